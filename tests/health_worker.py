"""Run under torchrun by `test_health.py`: two processes train, then one of them meets a NaN.

    torchrun --nproc_per_node=2 -m tests.health_worker OUT MODE,MODE

A mode is `ddp` or `fsdp`. Each process writes OUT/MODE/RANK.json.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

torch.set_num_threads(1)

from accelerate import DistributedType, PartialState
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from finetune import setup_fp8_mixed_precision_training
from finetune.errors import NonFiniteError
from tests.distributed_worker import one_by_one, rows

LAYER = "model.layers.1.mlp.down_proj"


class SpoilOnSecond(TrainerCallback):
    """In step 4 the second process gets a NaN out of one layer."""

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        if state.global_step == 3 and int(os.environ["RANK"]) == 1:
            model.get_submodule(LAYER).register_forward_hook(lambda *call: call[-1] * torch.nan)


def main(out: Path, mode: str) -> None:
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, vocab_size=272, use_cache=False, pad_token_id=0,
        )
    )  # fmt: skip
    sharded = {"fsdp": True, "fsdp_config": {"version": 2, "reshard_after_forward": True}}
    args = TrainingArguments(
        output_dir=str(out / "run"), max_steps=6, per_device_train_batch_size=1, use_cpu=True,
        bf16=True, learning_rate=1e-3, report_to="none", disable_tqdm=True, save_strategy="no",
        gradient_accumulation_steps=2, logging_steps=1, ddp_find_unused_parameters=False,
        **(sharded if mode == "fsdp" else {}),
    )  # fmt: skip
    if mode == "fsdp":
        # Accelerate ignores FSDP on CPUs without a word; taking these for GPUs, it shards them.
        PartialState().distributed_type = DistributedType.MULTI_GPU
    setup_fp8_mixed_precision_training(
        "emulated", scaling="tensorwise", emulation="allow", cpu=True, health_every=2
    )
    trainer = Trainer(model=model, args=args, train_dataset=rows(rank), callbacks=[SpoilOnSecond()])
    try:
        trainer.train()
        where = "nowhere"
    except NonFiniteError as error:
        where = error.where
    health = [row for row in trainer.state.log_history if "health/attn/x_amax" in row]
    facts = {"where": where, "step": trainer.state.global_step, "health": health}
    (out / f"{rank}.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    one_by_one(main, Path(sys.argv[1]), sys.argv[2])
