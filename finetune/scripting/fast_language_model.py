"""`FastLanguageModel`: Unsloth's calls, for a notebook that was written for them.

    from unsloth import FastLanguageModel  ─>  from finetune import FastLanguageModel

The rest of such a notebook is TRL: its stock `SFTTrainer` trains in the precision in which the
model was loaded, through the set-up of scripts, and `finetune.get_receipt()` says what ran.
Arguments with another effect here are printed, unknown ones are errors. Unsloth's own kernels are
not here.
"""

from __future__ import annotations

from typing import Any

from finetune.hardware.device import this_device
from finetune.scripting.calls import add_lora, load, say, settings_of
from finetune.training.setup import (
    setup_fp8_mixed_precision_training,
    teardown_fp8_mixed_precision_training,
)

WITHOUT_EFFECT = (
    "device_map",
    "fast_inference",
    "gpu_memory_utilization",
    "max_lora_rank",
    "loftq_config",
    "token",
    "fix_tokenizer",
    "disable_log_stats",
    "use_exact_model_name",
    "rope_scaling",
    "load_in_16bit",
    "max_seq_length",
    "random_state",
    "use_gradient_checkpointing",
)
"""Arguments of Unsloth that change nothing here, which is said where they are given."""


class FastLanguageModel:
    """Unsloth's class of this name, as far as FP8, QLoRA and LoRA go."""

    @staticmethod
    def from_pretrained(
        model_name: str,
        max_seq_length: int | None = None,
        dtype: Any = None,
        load_in_4bit: bool = False,
        load_in_fp8: bool = False,
        full_finetuning: bool = False,
        **kwargs: Any,
    ) -> tuple[Any, Any]:
        """Load a model and its tokenizer, as `finetune.load`.

        Args:
            max_seq_length: longest row of `finetune.trainer`; SFTTrainer has `max_length` for it.
            dtype: type of plain weights; None: bfloat16.
            load_in_4bit: QLoRA; not the default here.
            load_in_fp8: FP8 codes that are multiplied in FP8, for adapters.
            full_finetuning: with `load_in_fp8`: plain weights, all trained in FP8.
            **kwargs: as `finetune.load`.
        """
        given = _with_effect(kwargs) | ({} if dtype is None else {"dtype": dtype})
        fp8: dict[str, Any] = (
            {"load_in_fp8": not full_finetuning, "precision": "fp8"} if load_in_fp8 else {}
        )
        model, tokenizer = load(model_name, load_in_4bit=load_in_4bit, **fp8, **given)
        said = settings_of(model)
        if load_in_fp8:
            stored: dict[str, Any] = (
                {} if full_finetuning else {"frozen": "fp8", "scaling": "rowwise"}
            )
            own = {key: value for key, value in said["precision"].items() if key != "compute"}
            setup_fp8_mixed_precision_training(**stored | own)
        else:
            teardown_fp8_mixed_precision_training()
        if max_seq_length is not None:
            said["train"] = {"max_length": max_seq_length}
            if max_seq_length != 1024:
                say(f"SFTTrainer cuts rows at SFTConfig(max_length={max_seq_length}): 1024 if left "
                    "out, whatever max_seq_length says here")  # fmt: skip
        return model, tokenizer

    @staticmethod
    def get_peft_model(
        model: Any,
        r: int = 16,
        lora_alpha: int = 16,
        use_gradient_checkpointing: bool | str = "unsloth",
        random_state: int = 3407,
        **kwargs: Any,
    ) -> Any:
        """Put adapters on a model, as `finetune.add_lora`.

        Args:
            use_gradient_checkpointing: of `finetune.trainer`; `unsloth` is plain checkpointing.
                SFTConfig has `gradient_checkpointing`, which is on if left out.
        """
        kwargs = _with_effect(kwargs)
        said = settings_of(model)
        checkpointing = {"gradient_checkpointing": bool(use_gradient_checkpointing)}
        said["train"] = said.get("train", {}) | checkpointing
        return add_lora(model, r, lora_alpha=lora_alpha, random_state=random_state, **kwargs)

    @staticmethod
    def for_inference(model: Any) -> Any:
        """Put the model on the device of this machine, to answer."""
        return model.to(this_device().kind).eval()

    @staticmethod
    def for_training(model: Any) -> Any:
        """Put the model into training mode again."""
        return model.train()


def _with_effect(asked: dict[str, Any]) -> dict[str, Any]:
    for word, value in asked.items():
        if value and word in WITHOUT_EFFECT:
            say(f"{word} has no effect here" + ("; `hf auth login`" if word == "token" else ""))
    given = {key: value for key, value in asked.items() if key not in WITHOUT_EFFECT}
    return {key: value for key, value in given.items() if value is not None and value is not False}
