"""The run's own rows as batches, and its model put together by stock libraries.

The rows are tokenised, masked and padded as the run's evaluation did it, by the same `SFTTrainer`.
Models are loaded in the type that the run computed in, with nothing of ours in between: what is
measured is what anyone gets who loads these weights.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from finetune.config import RunConfig
from finetune.data import load_data
from finetune.device import this_device
from finetune.model import is_published_fp8, load_tokenizer
from finetune.precision.loading import load_in_fp8
from finetune.sft_arguments import sft_config

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedModel

ABOUT_ROWS = (
    "assistant_only_loss",
    "chat_template_path",
    "completion_only_loss",
    "dataset_kwargs",
    "dataset_text_field",
    "eos_token",
    "eval_packing",
    "max_length",
    "packing",
    "packing_strategy",
    "pad_to_multiple_of",
    "pad_token",
    "padding_free",
    "seed",
    "truncation_mode",
)
"""Settings of `train` that decide what a batch looks like; the others are about training."""
EVALUATION_ROWS = 128
CALIBRATION_ROWS = 64
BATCH = 4


@dataclass(frozen=True)
class Batches:
    """Rows as the model takes them.

    Attributes:
        evaluation: batches of the run's held-out rows (the first 128).
        calibration: batches of training rows (64).
        rows: what the evaluation rows are, in words.
    """

    evaluation: list[dict[str, Any]]
    calibration: list[dict[str, Any]]
    rows: str


def compute_dtype(config: RunConfig) -> torch.dtype:
    """The type that the run computed in: under FP8 that of the model around it, BF16."""
    return {"fp16": torch.float16, "fp32": torch.float32}.get(
        config.precision.compute, torch.bfloat16
    )


def load_stock(
    weights: Path | str, config: RunConfig, *, adapter: Path | None = None
) -> PreTrainedModel:
    """A model by `from_pretrained`, with an adapter by stock PEFT, in evaluation mode.

    Args:
        weights: folder of plain or compressed-tensors weights.
        config: the run's, for its compute type, attention and trust.
        adapter: folder of a PEFT adapter.
    """
    from peft import PeftModel
    from transformers import AutoConfig, AutoModelForCausalLM

    import finetune.models  # noqa: F401  makes our own model types known

    kwargs: dict[str, Any] = {}
    if config.model.attention is not None:
        kwargs["attn_implementation"] = config.model.attention
    load: Any = AutoModelForCausalLM.from_pretrained
    trust = config.model.trust_remote_code
    if adapter is not None and is_published_fp8(
        AutoConfig.from_pretrained(weights, trust_remote_code=trust)
    ):
        load = load_in_fp8  # what others make of such a base depends on their device
    model: Any = load(
        weights,
        dtype=compute_dtype(config),
        device_map=this_device().kind,
        trust_remote_code=trust,
        **kwargs,
    )
    if adapter is not None:
        model = PeftModel.from_pretrained(model, str(adapter))
    return model.eval()


def batches_of(config: RunConfig, model: PreTrainedModel) -> Batches:
    """The run's held-out rows and some training rows, as batches on the model's device.

    Raises:
        DataError, DataNotFoundError: the run's rows are not there any more.
    """
    from trl import SFTTrainer

    tokenizer, _ = load_tokenizer(config.model)
    rows = load_data(config.data, tokenizer, int(config.train.get("seed", 42)))
    held_out = rows.train if rows.eval is None else rows.eval
    kind = "training rows (the run held none out)" if rows.eval is None else "held-out rows"
    evaluation = _first(held_out, EVALUATION_ROWS)
    train = {key: value for key, value in config.train.items() if key in ABOUT_ROWS}
    sizes = {f"per_device_{part}_batch_size": BATCH for part in ("train", "eval")}
    only = config.model_copy(update={"train": train | sizes | {"report_to": "none"}})
    with tempfile.TemporaryDirectory() as scratch:
        trainer = SFTTrainer(
            model=model,
            args=sft_config(only, Path(scratch), rows.settings, on_cpu=this_device().kind == "cpu"),
            train_dataset=_first(rows.train, CALIBRATION_ROWS),
            eval_dataset=evaluation,
            processing_class=tokenizer,
        )
        return Batches(
            evaluation=list(trainer.get_eval_dataloader()),
            calibration=list(trainer.get_train_dataloader()),
            rows=f"{len(evaluation)} of {len(held_out)} {kind}",
        )


def _first(rows: Dataset, count: int) -> Dataset:
    return rows.select(range(min(count, len(rows))))
