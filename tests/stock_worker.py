"""Stock scripts of SFT, DPO and GRPO with the helper; prints what each did, a line of JSON each.

[PYTHONPATH=FOLDER of tests.renamed_trl] python -m tests.stock_worker FOLDER
"""

from __future__ import annotations

import json
import sys
from typing import Any

from datasets import Dataset
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

import finetune

ROWS = Dataset.from_list([{"prompt": f"{n} + 1 =", "completion": f" {n + 1}"} for n in range(16)])
PAIRS = Dataset.from_list(
    [{"prompt": f"{n} + 1 =", "chosen": f" {n + 1}", "rejected": f" {n}"} for n in range(8)]
)


def load() -> tuple[Any, Any]:
    return finetune.load("builtin:tiny_llama", dtype="float32")


def sft(**common: Any) -> Any:
    model, tokenizer = load()
    return SFTTrainer(model, SFTConfig(**common), train_dataset=ROWS, processing_class=tokenizer)


def dpo(**common: Any) -> Any:
    (model, tokenizer), (reference, _) = load(), load()
    args = DPOConfig(**common)
    return DPOTrainer(model, reference, args=args, train_dataset=PAIRS, processing_class=tokenizer)


def dpo_precomputed(**common: Any) -> Any:
    model, tokenizer = load()
    args = DPOConfig(precompute_ref_log_probs=True, **common)
    return DPOTrainer(model, args=args, train_dataset=PAIRS, processing_class=tokenizer)


def grpo(**common: Any) -> Any:
    model, tokenizer = load()
    return GRPOTrainer(
        model,
        reward_funcs=lambda completions, **_: [float(len(text)) for text in completions],
        args=GRPOConfig(max_completion_length=8, num_generations=2, **common),
        train_dataset=ROWS.select_columns(["prompt"]),
        processing_class=tokenizer,
    )


def main() -> None:
    for make in (sft, dpo, dpo_precomputed, grpo):
        finetune.setup_fp8_mixed_precision_training(emulation="allow")
        trainer = make(
            output_dir=sys.argv[1], max_steps=2, per_device_train_batch_size=4, use_cpu=True,
            learning_rate=1e-3, report_to="none", logging_steps=1, save_strategy="no", seed=1,
        )  # fmt: skip
        trainer.train()
        receipt = finetune.get_receipt()
        done = {
            "script": make.__name__,
            "trl": receipt.environment["versions"]["trl"],
            "status": receipt.status,
            "share": receipt.fp8_flop_share,
            "losses": [row["loss"] for row in trainer.state.log_history if "loss" in row],
            "off": receipt.environment["switched_off"],
        }
        print(json.dumps(done), flush=True)


if __name__ == "__main__":
    main()
