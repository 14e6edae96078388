"""Stock trainers of TRL and Transformers under the helper: what was proven, beside BF16.

    python -m tests.benchmarks.trainers [--trainers DPO KTO] [--methods full] [--backends torchao]

Each row trains a tiny model for four steps with an unmodified trainer class, after one added line.
All rows run in one process, one after the other. `loss` and `BF16` are the mean losses of the four
steps, of the same script with and without that line; generations differ between the two.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from rich.console import Console
from rich.table import Table
from transformers import (
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
)

from finetune import (
    get_receipt,
    setup_fp8_mixed_precision_training,
    teardown_fp8_mixed_precision_training,
)
from finetune.errors import FinetuneError
from finetune.runs.receipt import Receipt
from finetune.training.model import TINY_LLAMA

STEPS = 4
METHODS = ("full", "LoRA", "frozen")
"""All weights; adapters; adapters over a base stored in FP8."""
BACKENDS = ("emulated", "torchao")
WORDS = [
    "calm",
    "water",
    "and",
    "small",
    "boats",
    "come",
    "home",
    "before",
    "night",
    "falls",
    "on",
    "it",
]
COMMON: dict[str, Any] = {
    "max_steps": STEPS, "per_device_train_batch_size": 4, "learning_rate": 1e-3, "logging_steps": 1,
    "report_to": "none", "save_strategy": "no", "disable_tqdm": True, "use_cpu": True, "bf16": True,
    "seed": 0,
}  # fmt: skip
GENERATION = {"num_generations": 2, "max_completion_length": 8}


class Workshop:
    """Tiny models and rows, made once in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tokenizer = AutoTokenizer.from_pretrained(TINY_LLAMA)
        torch.manual_seed(0)
        config = LlamaConfig(
            hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, vocab_size=len(self.tokenizer), max_position_embeddings=128,
            tie_word_embeddings=False, pad_token_id=self.tokenizer.pad_token_id,
        )  # fmt: skip
        config.num_labels = 1
        LlamaForCausalLM(config).save_pretrained(folder / "policy")
        LlamaForSequenceClassification(config).save_pretrained(folder / "reward")
        wide = LlamaConfig(**{**config.to_dict(), "intermediate_size": 192})
        LlamaForCausalLM(wide).save_pretrained(folder / "teacher")

    def policy(self, name: str = "policy") -> Any:
        return LlamaForCausalLM.from_pretrained(self.folder / name)

    def classifier(self, labels: int) -> Any:
        return LlamaForSequenceClassification.from_pretrained(
            self.folder / "reward", num_labels=labels, ignore_mismatched_sizes=True
        )

    def rows(self, **columns: Callable[[int], Any]) -> Dataset:
        rows = [{name: make(i) for name, make in columns.items()} for i in range(16)]
        return Dataset.from_list(rows)


def text(i: int, words: int = 6) -> str:
    """Words of a row, the same in each run."""
    return " ".join(WORDS[(i + 3 * k) % len(WORDS)] for k in range(words))


def adapters(method: str, task: str = "CAUSAL_LM") -> LoraConfig | None:
    return (
        None if method == "full" else LoraConfig(r=8, target_modules="all-linear", task_type=task)
    )


def by_length(completions: list[str], **_: Any) -> list[float | None]:
    """Reward that differs within a group: the share of vowels in the completion."""
    return [sum(c in "aeiou" for c in text) / (len(text) + 1) + len(text) for text in completions]


# --------------------------------------------------------------------------------------- trainers

Make = Callable[[Workshop, str], Trainer]


def sft(shop: Workshop, method: str) -> Trainer:
    from trl import SFTConfig, SFTTrainer

    return SFTTrainer(
        model=shop.policy(),
        args=SFTConfig(str(shop.folder), max_length=64, **COMMON),
        train_dataset=shop.rows(text=text),
        processing_class=shop.tokenizer,
        peft_config=adapters(method),
    )


def _preferences(shop: Workshop) -> Dataset:
    return shop.rows(
        prompt=text, chosen=lambda i: " " + text(i + 5, 4), rejected=lambda i: " " + text(i + 9, 3)
    )


def dpo(shop: Workshop, method: str, **settings: Any) -> Trainer:
    from trl import DPOConfig, DPOTrainer

    return DPOTrainer(
        model=shop.policy(),
        args=DPOConfig(str(shop.folder), max_length=64, **COMMON, **settings),
        train_dataset=_preferences(shop),
        processing_class=shop.tokenizer,
        peft_config=adapters(method),
    )


def dpo_given(shop: Workshop, method: str) -> Trainer:
    from trl import DPOConfig, DPOTrainer

    return DPOTrainer(
        model=shop.policy(),
        ref_model=shop.policy(),
        args=DPOConfig(str(shop.folder), max_length=64, **COMMON),
        train_dataset=_preferences(shop),
        processing_class=shop.tokenizer,
        peft_config=adapters(method),
    )


def kto(shop: Workshop, method: str) -> Trainer:
    from trl import KTOConfig, KTOTrainer

    return KTOTrainer(
        model=shop.policy(),
        args=KTOConfig(str(shop.folder), max_length=64, **COMMON),
        train_dataset=shop.rows(
            prompt=text, completion=lambda i: " " + text(i + 5, 4), label=lambda i: i % 2 == 0
        ),
        processing_class=shop.tokenizer,
        peft_config=adapters(method),
    )


def reward(shop: Workshop, method: str) -> Trainer:
    from trl import RewardConfig, RewardTrainer

    return RewardTrainer(
        model=shop.classifier(1),
        args=RewardConfig(str(shop.folder), max_length=64, **COMMON),
        train_dataset=shop.rows(chosen=text, rejected=lambda i: text(i + 9, 5)),
        processing_class=shop.tokenizer,
        peft_config=adapters(method, "SEQ_CLS"),
    )


def grpo(shop: Workshop, method: str, **settings: Any) -> Trainer:
    from trl import GRPOConfig, GRPOTrainer

    rewards = settings.pop("reward_funcs", by_length)
    return GRPOTrainer(
        model=shop.policy(),
        reward_funcs=rewards,
        args=GRPOConfig(str(shop.folder), **GENERATION, **COMMON, **settings),
        train_dataset=shop.rows(prompt=text),
        processing_class=shop.tokenizer,
        peft_config=adapters(method),
        reward_processing_classes=shop.tokenizer if isinstance(rewards, str) else None,
    )


def rloo(shop: Workshop, method: str) -> Trainer:
    from trl import RLOOConfig, RLOOTrainer

    return RLOOTrainer(
        model=shop.policy(),
        reward_funcs=by_length,
        args=RLOOConfig(str(shop.folder), **GENERATION, **COMMON),
        train_dataset=shop.rows(prompt=text),
        processing_class=shop.tokenizer,
        peft_config=adapters(method),
    )


def distillation(shop: Workshop, method: str) -> Trainer:
    from trl import DistillationConfig, DistillationTrainer

    return DistillationTrainer(
        model=shop.policy(),
        teacher_model=shop.policy("teacher"),
        args=DistillationConfig(str(shop.folder), max_completion_length=8, **COMMON),
        train_dataset=shop.rows(prompt=text),
        processing_class=shop.tokenizer,
        peft_config=adapters(method),
    )


def _adapted(model: Any, method: str, task: str) -> Any:
    from peft import get_peft_model

    wanted = adapters(method, task)
    return model if wanted is None else get_peft_model(model, wanted)


def classification(shop: Workshop, method: str) -> Trainer:
    rows = shop.rows(
        **{
            "input_ids": lambda i: shop.tokenizer(text(i))["input_ids"],
            "labels": lambda i: i % 3,
        }
    )
    return Trainer(
        model=_adapted(shop.classifier(3), method, "SEQ_CLS"),
        args=TrainingArguments(str(shop.folder), **COMMON),
        train_dataset=rows,
        processing_class=shop.tokenizer,
    )


def seq2seq(shop: Workshop, method: str) -> Trainer:
    torch.manual_seed(0)
    config = T5Config(
        d_model=64, d_ff=128, d_kv=16, num_layers=2, num_heads=4, vocab_size=len(shop.tokenizer),
        pad_token_id=shop.tokenizer.pad_token_id,    )  # fmt: skip
    config.decoder_start_token_id = 0
    model = _adapted(T5ForConditionalGeneration(config), method, "SEQ_2_SEQ_LM")
    rows = shop.rows(
        **{
            "input_ids": lambda i: shop.tokenizer(text(i))["input_ids"],
            "labels": lambda i: shop.tokenizer(text(i + 5, 4))["input_ids"],
        }
    )
    return Seq2SeqTrainer(
        model=model,
        args=Seq2SeqTrainingArguments(str(shop.folder), **COMMON),
        train_dataset=rows,
        data_collator=DataCollatorForSeq2Seq(shop.tokenizer, model),
        processing_class=shop.tokenizer,
    )


TRAINERS: dict[str, Make] = {
    "SFT": sft,
    "DPO": dpo,
    "DPO, reference given": dpo_given,
    "DPO, precomputed": lambda shop, method: dpo(shop, method, precompute_ref_log_probs=True),
    "DPO, synchronized": lambda shop, method: dpo(
        shop, method, sync_ref_model=True, ref_model_sync_steps=2
    ),
    "KTO": kto,
    "Reward": reward,
    "GRPO": grpo,
    "GRPO, beta 0.1": lambda shop, method: grpo(shop, method, beta=0.1),
    "GRPO, reward model": lambda shop, method: grpo(
        shop, method, reward_funcs=str(shop.folder / "reward")
    ),
    "RLOO": rloo,
    "Distillation": distillation,
    "Trainer, classification": classification,
    "Trainer, seq2seq": seq2seq,
}


# -------------------------------------------------------------------------------------------- runs


@dataclass(frozen=True)
class Outcome:
    """What a run gave: its losses, and its receipt or the error that ended it."""

    losses: list[float]
    receipt: Receipt | None = None
    error: str = ""

    @property
    def verdict(self) -> str:
        if self.error or self.receipt is None:
            return self.error
        share = f"{self.receipt.fp8_flop_share:.1%}"
        return f"{self.receipt.status}, {share}" if self.receipt.status != "proven" else share


@contextlib.contextmanager
def precision_of(backend: Any, method: str, **settings: Any) -> Iterator[None]:
    """Context manager for one set-up; none for backend `bf16`."""
    if backend != "bf16":
        stored = {"frozen": "fp8", "scaling": "rowwise"} if method == "frozen" else {}
        setup_fp8_mixed_precision_training(
            backend, emulation="allow", cpu=True, **{**stored, **settings}
        )
    try:
        yield
    finally:
        teardown_fp8_mixed_precision_training()


def train(shop: Workshop, name: str, method: str, backend: str, **settings: Any) -> Outcome:
    """Train a row; an error is a part of what is reported."""
    torch.manual_seed(0)
    with precision_of(backend, method, **settings):
        trainer = None
        try:
            trainer = TRAINERS[name](shop, method)
            trainer.train()
            error = ""
        except (FinetuneError, AttributeError, RuntimeError, TypeError, ValueError) as problem:
            error = f"{type(problem).__name__}: {str(problem).splitlines()[0]}"
            if not isinstance(problem, FinetuneError):
                traceback.print_exc()
        log = trainer.state.log_history if trainer is not None else []
        losses = [row["loss"] for row in log if "loss" in row]
        return Outcome(losses, None if backend == "bf16" else get_receipt(), error)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trainers", nargs="+", default=list(TRAINERS))
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--backends", nargs="+", default=list(BACKENDS))
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    console = Console(width=120, highlight=False)
    table = Table(box=None, pad_edge=False)
    for column in ("trainer", "method", "backend", "FP8 share", "loss at step 1", "loss", "BF16"):
        table.add_column(column)
    with tempfile.TemporaryDirectory() as folder:
        shop = Workshop(Path(folder))
        for name in options.trainers:
            for method in options.methods:
                if method != "full" and name in ("DPO, synchronized",):
                    continue  # TRL has no synchronized reference under adapters
                plain = train(shop, name, method, "bf16")
                for backend in options.backends:
                    ours = train(shop, name, method, backend)
                    console.print(f"{name}, {method}, {backend}: {ours.verdict}")
                    first = f"{ours.losses[0]:.5f}" if ours.losses else "-"
                    cells = [name, method, backend, ours.verdict, first]
                    table.add_row(*cells, *(mean(run.losses) for run in (ours, plain)))
    console.print(table)


def mean(losses: list[float]) -> str:
    return f"{sum(losses) / len(losses):.4f}" if losses else "-"


if __name__ == "__main__":
    main()
