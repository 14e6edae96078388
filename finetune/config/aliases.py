"""Settings of other tools, and what says the same here.

NeMo and Megatron write `fp8_margin`, Transformer Engine wrote `interval`, Unsloth and bitsandbytes
`load_in_4bit`, older TRL `max_seq_length`. None of them is accepted under that name (a setting with
two names is one that two lines of a recipe can contradict): each error names the replacement.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Iterable
from typing import Any

SETTINGS = {
    # NeMo, Megatron-LM, Transformer Engine
    "fp8": "precision.compute=fp8",
    "use_fp8": "precision.compute=fp8",
    "fp8_e4m3": "precision.format=e4m3",
    "fp8_hybrid": "precision.format=hybrid",
    "fp8_format": "precision.format",
    "fp8_margin": "precision.margin",
    "fp8_amax_history_len": "precision.amax_history_len",
    "fp8_amax_compute_algo": "precision.amax_compute_algo",
    "fp8_recipe": "precision.scaling",
    "mixed_precision": "precision.compute",
    "precision_map": "precision.map",
    "transformer_engine": "precision.backend=te",
    # Unsloth, bitsandbytes, Transformers
    "load_in_4bit": "model.storage=nf4",
    "load_in_8bit": "model.storage=fp8",
    "load_in_fp8": "precision.frozen=fp8",
    "use_4bit_optimizer": "train.optim=adamw_8bit",
    "torch_dtype": "model.dtype",
    "compute_dtype": "model.dtype",
    "attn_implementation": "model.attention",
    "model_name": "model.name",
    "model_name_or_path": "model.name",
    "use_gradient_checkpointing": "train.gradient_checkpointing",
    "full_finetuning": "write ~lora (a recipe of full fine-tuning has no section lora)",
    "random_state": "train.seed",
    "train_on_responses_only": "train.assistant_only_loss",
    "group_by_length": "train.train_sampling_strategy=group_by_length",
    "warmup_ratio": "train.warmup_steps",
    "early_stopping_patience": "write train.load_best_model_at_end=true: no run stops early, and "
    "the best checkpoint is kept",
    # older TRL, PEFT
    "max_seq_length": "train.max_length",
    "max_seq_len": "train.max_length",
    "dataset_name": "data.name",
    "dataset_config": "data.subset",
    "dataset_train_split": "data.split",
    "dataset_test_split": "data.eval_split",
    "use_peft": "lora.r=8",
    "lora_r": "lora.r",
    "lora_alpha": "lora.alpha",
    "lora_dropout": "lora.dropout",
    "lora_target_modules": "lora.target_modules",
    "lora_modules_to_save": "lora.modules_to_save",
    "beta": "preference data is for a script: a stock trl.DPOTrainer under "
    "setup_fp8_mixed_precision_training()",
    # scripts, litgpt, torchtune
    "lr": "train.learning_rate",
    "max_lr": "train.learning_rate",
    "epochs": "train.num_train_epochs",
    "num_epochs": "train.num_train_epochs",
    "max_steps_per_epoch": "train.max_steps",
    "num_warmup_steps": "train.warmup_steps",
    "batch_size": "train.per_device_train_batch_size",
    "micro_batch_size": "train.per_device_train_batch_size",
    "eval_batch_size": "train.per_device_eval_batch_size",
    "seq_len": "train.max_length",
    "clip_grad_norm": "train.max_grad_norm",
    "enable_activation_checkpointing": "train.gradient_checkpointing",
    "packed": "train.packing",
    "lora_attn_modules": "lora.target_modules",
    "lora_rank": "lora.r",
    "use_tensorboard": "train.report_to=tensorboard",
    "checkpoint_dir": "write --out FOLDER, for the folder of runs (checkpoints lie in a run's)",
    "list_checkpoints": "`python -m finetune checkpoints last` lists those of the newest run",
    "resume": "`python -m finetune resume last` continues the newest run",
    # Axolotl
    "base_model": "model.name",
    "adapter": "write lora.r=8, with model.storage=nf4 for QLoRA",
    "datasets": "write data.path=FILE, or data.name=HUB/NAME",
    "sequence_len": "train.max_length",
    "sample_packing": "train.packing",
    "pad_to_sequence_len": "train.pad_to_multiple_of=16",
    "val_set_size": "data.eval_fraction",
    "optimizer": "train.optim",
    "lr_scheduler": "train.lr_scheduler_type",
    "flash_attention": "model.attention=flash_attention_2",
    "sdp_attention": "model.attention=sdpa",
    "lora_target_linear": "lora.target_modules=all-linear",
    "train_on_inputs": "write train.assistant_only_loss=false, or train.completion_only_loss=false",
    "unfrozen_parameters": "write model.freeze=[NAME], with the names of what does not train",
    "special_tokens": "write model.pad_token=NAME, train.eos_token=NAME",
    "evals_per_epoch": "write train.eval_strategy=steps train.eval_steps=100",
    "saves_per_epoch": "write train.save_strategy=steps train.save_steps=100",
    "wandb_project": "train.report_to=wandb",
    # LLaMA-Factory
    "dataset": "write data.path=FILE, or data.name=HUB/NAME",
    "dataset_dir": "write data.path=FILE, with the folder",
    "cutoff_len": "train.max_length",
    "max_samples": "data.max_rows",
    "val_size": "data.eval_fraction",
    "preprocessing_num_workers": "train.dataset_num_proc",
    "quantization_bit": "write model.storage=nf4, or model.storage=fp8 for 8 bits",
    "flash_attn": "model.attention=flash_attention_2",
    "lora_target": "write lora.target_modules=all-linear, or [NAME,NAME]",
    "finetuning_type": "choose a recipe: llama_8b_lora_fp8, llama_8b_full_fp8, llama_8b_qlora_bf16",
    "template": "leave it out: rows are put into the model's own chat template",
    "train_on_prompt": "write train.completion_only_loss=false, or train.assistant_only_loss=false",
    "enable_liger_kernel": "train.use_liger_kernel",
    "pure_bf16": "model.dtype=bfloat16",
    "neat_packing": "train.packing",
}
"""Name elsewhere -> the setting here, with the value that it then has where that is another one.

What has a space says in words what to do.
"""
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
_ELSEWHERE = {
    "model.attention": "attn_implementation",
    "model.dtype": "dtype",
    "lora.alpha": "lora_alpha",
    "lora.dropout": "lora_dropout",
}
"""Key of a recipe -> its name as an argument of Transformers or PEFT, where it is another one."""
_FALSE = ("false", "no", "off", "0", "none", "null")


def in_recipe(name: str, value: object = "...") -> str:
    """The fix for a key of another tool in a recipe; empty if no tool that we know has it.

    >>> in_recipe("max_seq_length", 512)
    'write train.max_length=512'
    >>> in_recipe("LOAD_IN_4BIT", True), in_recipe("load_in_4bit", False)
    ('write model.storage=nf4', 'leave it out')
    """
    name = name.lower()
    if name in DROPPED:
        return f"leave it out: {DROPPED[name]}"
    setting = SETTINGS.get(name, "")
    if "=" in setting and str(value).lower() in _FALSE:
        return "leave it out"
    if " " in setting:
        return setting
    return f"write {setting}" + ("" if "=" in setting else f"={_flow(value)}") if setting else ""


def _flow(value: object) -> str:
    """A value as it is typed in a shell."""
    if isinstance(value, list):
        return f"[{','.join(map(str, value))}]"
    text = json.dumps(value, separators=(",", ":")) if isinstance(value, dict) else str(value)
    return shlex.quote(text) if set(text) & set("{ ") else text


def in_script(name: str, value: object) -> str:
    """The fix for an argument of `setup_fp8_mixed_precision_training`; empty if it is unknown.

    >>> in_script("fp8_hybrid", True)
    "write fp8_format='hybrid'"
    """
    if name == "compute":
        return "leave it out: it is always fp8 here (BF16 and FP16 are plain Trainers' own)"
    if name in DROPPED:
        return f"leave it out: {DROPPED[name]}"
    if " " in SETTINGS.get(name, ""):
        return f"leave it out: in a recipe, {in_recipe(name)}"
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
    return ", or ".join(
        " and ".join(
            in_python(f"{'~' * word.startswith('~')}precision.{word.removeprefix('~')}")
            for word in way.split()
        )
        for way in ways
        if "compute=" not in way  # it is always fp8 there
    )


_SETTING = re.compile(
    r"(?<![\w./])(~?)"
    r"(precision(?=\.[a-z])|train(?=\.[a-z])|lora(?=\.[a-z])|model(?=\.(?:attention|dtype)\b))"
    r"\.(\w+)(?:(?<=\.map)\.(\w+))?(?:=(\[[^\]]*\]|[^\s,;()]*[^\s,;().:]))?"
)
"""A setting of a recipe in a message; of `model` those that no module is named like."""


def in_python(text: str) -> str:
    """A message about a recipe's settings as one about the arguments of a script.

    >>> in_python("precision.keep=[a, b], or ~precision.format; train.max_grad_norm=1")
    "keep=['a', 'b'], or leave fp8_format out; max_grad_norm=1"
    """
    return _SETTING.sub(_argument, text)


def _argument(found: re.Match[str]) -> str:
    off, section, key, part, value = found.groups()
    if (section, key) == ("precision", "compute") and value not in (None, "fp8"):
        return f"{value.upper()}, without setup_fp8_mixed_precision_training()"
    own = ARGUMENTS if section == "precision" else {}
    name = own.get(key) or _ELSEWHERE.get(f"{section}.{key}", key)
    if off:
        return f"leave {name} out"
    if value is None:
        return f"{name}[{part!r}]" if part else name
    shown = repr(_value(value))
    return f"{name}={{{part!r}: {shown}}}" if part else f"{name}={shown}"


def _value(text: str) -> Any:
    if text.startswith("["):
        return [item.strip() for item in text[1:-1].split(",")]
    if text in ("true", "false", "null"):
        return {"true": True, "false": False}.get(text)
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def plain_dtype(value: object) -> str:
    """`bfloat16` for `torch.bfloat16`, as an object or as text; other values as text."""
    return str(value).removeprefix("torch.")
