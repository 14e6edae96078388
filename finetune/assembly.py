"""The stock `SFTTrainer` around a recipe's model: what training and measuring have in common.

A speed that was measured on another assembly than the one that trains would say nothing of it, so
there is one: weights as the plan holds them, adapters, and an optimizer that Transformers may not
know by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from finetune import low_bit, nf4
from finetune.config import RunConfig
from finetune.model import load_model, lora_config
from finetune.optimizer_checks import chosen
from finetune.precision.holdings import held_weights

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    from finetune.precision.planner import LayerPlan


def make_trainer(
    config: RunConfig,
    args: SFTConfig,
    *,
    train: Dataset,
    held_out: Dataset | None,
    tokenizer: PreTrainedTokenizerBase,
    held: Sequence[LayerPlan],
    callbacks: list[TrainerCallback],
    kind: type[SFTTrainer] | None = None,
) -> SFTTrainer:
    """Load a recipe's model and build the trainer around it, under the session in force.

    Args:
        config: the run.
        args: of the trainer (`finetune.sft_arguments`).
        train, held_out: rows in one of TRL's formats.
        tokenizer: of the rows.
        held: rows of the run's plan whose weights are held in FP8 from the beginning.
        callbacks: of the trainer.
        kind: of trainer; left out, `trl.SFTTrainer` itself.

    Raises:
        FinetuneError: the model cannot be loaded, or adapters do not fit it.
    """
    from peft import get_peft_model
    from trl import SFTTrainer

    model: Any = load_model(config.model, held)
    adapters = lora_config(config.lora) if config.lora else None
    if adapters is not None and held_weights(model):  # the trainer would cast what it attaches
        model, adapters = get_peft_model(model, adapters), None
    optimizer = chosen(config.train)
    if optimizer.library == "bitsandbytes":
        low_bit.forget_overrides()
    with nf4.masters_kept(model):
        trainer = (kind or SFTTrainer)(
            model=model,
            args=args,
            train_dataset=train,
            eval_dataset=held_out,
            processing_class=tokenizer,
            peft_config=adapters,
            optimizer_cls_and_kwargs=low_bit.class_and_kwargs(config.train, args)
            if optimizer.library == "torchao"
            else None,
            callbacks=callbacks,
        )
    return trainer
