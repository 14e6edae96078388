"""Settings of other tools, and what says the same here.

NeMo and Megatron write `fp8_margin`, Transformer Engine wrote `interval`, Unsloth and bitsandbytes
`load_in_4bit`, older TRL `max_seq_length`. None of them is accepted under that name (a setting with
two names is one that two lines of a recipe can contradict): each error names the replacement.
"""

from __future__ import annotations

from collections.abc import Iterable

SETTINGS = {
    # NeMo, Megatron-LM, Transformer Engine
    "fp8": "precision.compute=fp8",
    "fp8_e4m3": "precision.format=e4m3",
    "fp8_hybrid": "precision.format=hybrid",
    "fp8_format": "precision.format",
    "fp8_margin": "precision.margin",
    "fp8_amax_history_len": "precision.amax_history_len",
    "fp8_amax_compute_algo": "precision.amax_compute_algo",
    "fp8_recipe": "precision.scaling",
    "mixed_precision": "precision.compute",
    # Unsloth, bitsandbytes, Transformers
    "load_in_4bit": "model.storage=nf4",
    "load_in_8bit": "model.storage=fp8",
    "torch_dtype": "model.dtype",
    "attn_implementation": "model.attention",
    "model_name_or_path": "model.name",
    "use_gradient_checkpointing": "train.gradient_checkpointing",
    # older TRL, PEFT
    "max_seq_length": "train.max_length",
    "max_seq_len": "train.max_length",
    "dataset_name": "data.name",
    "lora_r": "lora.r",
    "lora_alpha": "lora.alpha",
    "lora_dropout": "lora.dropout",
    "lora_target_modules": "lora.target_modules",
    # scripts, litgpt, torchtune, Axolotl
    "lr": "train.learning_rate",
    "epochs": "train.num_train_epochs",
    "num_epochs": "train.num_train_epochs",
    "batch_size": "train.per_device_train_batch_size",
    "micro_batch_size": "train.per_device_train_batch_size",
    "seq_len": "train.max_length",
}
"""Name elsewhere -> the setting here, with the value that it then has where that is another one."""
_EVERY_STEP = "Transformer Engine dropped it, and scales are updated at every step"
_ATTENTION = (
    "attention stays in high precision: in FP8 its error grows with the scores (docs/notes/42), "
    "where that of a linear layer does not"
)
DROPPED = {
    "interval": _EVERY_STEP,
    "fp8_interval": _EVERY_STEP,
    "fp8_dpa": _ATTENTION,
    "fp8_mha": _ATTENTION,
}
"""Name elsewhere -> why nothing says it here."""
ARGUMENTS = {"format": "fp8_format", "eval": "eval_precision"}
"""Key of a recipe's `precision` -> its name in `setup_fp8_mixed_precision_training`."""


def in_recipe(name: str, value: object = "...") -> str:
    """The fix for a key of another tool in a recipe; empty if no tool that we know has it.

    >>> in_recipe("max_seq_length", 512)
    'write train.max_length=512'
    """
    if name in DROPPED:
        return f"leave it out: {DROPPED[name]}"
    setting = SETTINGS.get(name, "")
    return f"write {setting}" + ("" if "=" in setting else f"={value}") if setting else ""


def in_script(name: str, value: object) -> str:
    """The fix for an argument of `setup_fp8_mixed_precision_training`; empty if it is unknown.

    >>> in_script("fp8_hybrid", True)
    "write fp8_format='hybrid'"
    """
    if name == "compute":
        return "leave it out: it is always fp8 here (BF16 and FP16 are plain Trainers' own)"
    if name in DROPPED:
        return f"leave it out: {DROPPED[name]}"
    section, _, rest = SETTINGS.get(name, f"precision.{name}").partition(".")
    key, equals, fixed = rest.partition("=")
    if section != "precision":
        return f"leave it out: in a recipe it is {section}.{rest}, in a script not FP8's business"
    if name in SETTINGS or key in ARGUMENTS:
        return f"write {ARGUMENTS.get(key, key)}={(fixed if equals else value)!r}"
    return ""


def as_arguments(ways: Iterable[str]) -> str:
    """The settings of a `RefusedError` as arguments of `setup_fp8_mixed_precision_training`.

    >>> as_arguments(["format=hybrid", "~margin", "compute=bf16 ~high_gemms"])
    "fp8_format='hybrid', or leave margin out"
    """
    shown = []
    for way in ways:
        words = [
            f"leave {ARGUMENTS.get(word[1:], word[1:])} out"
            if word.startswith("~")
            else f"{ARGUMENTS.get(key, key)}={_value(value)!r}"
            for word in way.split()
            for key, _, value in [word.partition("=")]
        ]
        if "compute=" not in way:  # it is always fp8 there
            shown.append(" and ".join(words))
    return ", or ".join(shown)


def _value(text: str) -> str | list[str]:
    return text[1:-1].split(",") if text.startswith("[") else text


def plain_dtype(value: object) -> str:
    """`bfloat16` for `torch.bfloat16`, as an object or as text; other values as text."""
    return str(value).removeprefix("torch.")
