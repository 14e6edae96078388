"""Did both sides train the same thing? The conditions that a fair pair shares, checked twice.

*Before*: on the two configurations, where a difference costs nothing yet (`asked_differences`).
Both `train` sections are made a `trl.SFTConfig` first, so that a default left out equals the same
value written out. Every field of it belongs to a condition; one that nobody has sorted belongs to
`other training settings`, so that a new release of TRL adds a condition and not a hole.

*After*: on what really ran (`ran_differences`): the receipts' `conditions` and `environment`, the
linear layers the proof saw, and the tokens of every step, which are equal only if both sides met
the same rows in the same order.

The precision section is the point of the comparison and may differ, with three exceptions that are
not precision: `compile` and `fused_adapters` are about kernels, `health_every` is about watching.
How an FP8 run holds its frozen base (`precision.frozen`) is part of its precision; `model.storage`
is not: a base in NF4 is another model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from finetune.analysis.compare.result import Difference
from finetune.analysis.statistics import Step
from finetune.config.schema import RunConfig

WHY = {
    "trainable parameters": "fewer of them are less work, less memory and another optimum",
    "model": "another model, or other weights, has another loss and another speed",
    "storage of the base": "weights held in few bits are another model, and pay for dequantising; "
    "that is no matter of compute precision",
    "adapters": "rank, scale and targets decide what can be learnt and what it costs",
    "optimizer": "another update from the same gradient ends elsewhere and takes another time",
    "tokens per step": "larger batches use a device better, and take other steps",
    "length of the run": "losses after another number of steps say nothing of precision",
    "data and its order": "the order of rows alone moves a final loss by more than the margin",
    "checkpointing": "a forward that runs twice costs up to a third of the speed, and saves memory",
    "attention": "attention kernels differ in speed by more than FP8 gains",
    "compile": "compiled layers are faster whatever they multiply in",
    "fused kernels": "a fused loss or layer is faster, and smaller, whatever it multiplies in",
    "processes and sharding": "more devices are faster; sharding communicates and saves memory",
    "evaluation": "held-out losses of other rows or batches cannot be compared",
    "watching": "what is logged at some steps takes time in them",
    "libraries": "another version of a kernel has another speed",
    "device": "another device has another speed",
    "steps": "both sides of a pair step over the same tokens, or they did not train the same",
    "other training settings": "it may change what is learnt or what it costs",
}
"""Condition -> why a difference in it makes the pair unfair."""

FIELDS: dict[str, tuple[str, ...]] = {
    "optimizer": (
        "optim", "optim_args", "optim_target_modules", "learning_rate", "lr_scheduler_type",
        "lr_scheduler_kwargs", "warmup_steps", "weight_decay", "adam_beta1", "adam_beta2",
        "adam_epsilon", "max_grad_norm",
    ),
    "tokens per step": (
        "per_device_train_batch_size", "gradient_accumulation_steps", "max_length", "packing",
        "packing_strategy", "padding_free", "pad_to_multiple_of", "truncation_mode",
        "auto_find_batch_size", "average_tokens_across_devices",
    ),
    "length of the run": ("max_steps", "num_train_epochs", "resume_from_checkpoint"),
    "data and its order": (
        "seed", "data_seed", "train_sampling_strategy", "length_column_name", "shuffle_dataset",
        "dataloader_drop_last", "dataloader_in_order", "dataset_text_field", "dataset_kwargs",
        "completion_only_loss", "assistant_only_loss", "chat_template_path", "eos_token",
        "pad_token", "ignore_data_skip", "accelerator_config",
    ),
    "checkpointing": (
        "gradient_checkpointing", "gradient_checkpointing_kwargs", "activation_checkpointing",
        "activation_checkpointing_kwargs", "activation_offloading",
    ),
    "compile": ("torch_compile", "torch_compile_backend", "torch_compile_mode"),
    "fused kernels": ("use_liger_kernel", "liger_kernel_config", "loss_type"),
    "processes and sharding": (
        "fsdp", "fsdp_config", "deepspeed", "parallelism_config", "ddp_find_unused_parameters",
        "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph", "ddp_backend",
    ),
    "evaluation": (
        "eval_strategy", "eval_steps", "eval_delay", "eval_on_start", "eval_packing",
        "per_device_eval_batch_size", "eval_accumulation_steps",
    ),
    "watching": ("logging_steps", "logging_strategy", "logging_first_step"),
}  # fmt: skip
"""Condition -> fields of `trl.SFTConfig`."""

FREE = frozenset(
    ("output_dir", "bf16", "fp16", "tf32", "run_name", "project", "report_to", "ddp_timeout",
     "log_level", "log_level_replica", "log_on_each_node", "disable_tqdm", "local_rank", "debug",
     "save_strategy", "save_steps", "save_total_limit", "save_only_model", "save_on_each_node",
     "enable_jit_checkpoint", "push_to_hub", "hub_token", "hub_private_repo", "hub_model_id",
     "hub_strategy", "hub_always_push", "hub_revision", "trackio_space_id", "trackio_bucket_id",
     "trackio_static_space_id", "skip_memory_metrics", "do_train", "do_eval", "do_predict",
     "restore_callback_states_from_checkpoint", "logging_nan_inf_filter"),
)  # fmt: skip
"""Fields that move neither a loss nor a step's time: names, logs, checkpoints; and precision."""

_CONDITION = {name: condition for condition, names in FIELDS.items() for name in names}


# ------------------------------------------------------------------------------------ before a run


def asked_differences(a: RunConfig, b: RunConfig, *, on_cpu: bool) -> list[Difference]:
    """What two configurations ask for differently that a fair pair shares.

    Args:
        a, b: with `precision.compile` settled (`finetune.analysis.compare.pairing`).
        on_cpu: whether they will train on a CPU.

    Raises:
        FinetuneError: one of them cannot be made a training at all.
    """
    found = []
    for (where, condition, x), (_, _, y) in zip(
        _asked(a, on_cpu=on_cpu), _asked(b, on_cpu=on_cpu), strict=True
    ):
        if x != y:
            found.append(Difference(condition=condition, where=where, a=x, b=y, why=WHY[condition]))
    return sorted(found, key=lambda d: list(WHY).index(d.condition))


def _asked(config: RunConfig, *, on_cpu: bool) -> Iterator[tuple[str, str, Any]]:
    """(dotted setting, condition, value), always the same settings in the same order."""
    from finetune.config.sft import sft_config

    for name, value in config.model.model_dump(mode="json").items():
        special = {"storage": "storage of the base", "attention": "attention"}
        yield f"model.{name}", special.get(name, "model"), value
    yield "lora", "adapters", config.lora and config.lora.model_dump(mode="json")
    for name, value in config.data.model_dump(mode="json").items():
        if name != "prompts":
            yield f"data.{name}", "data and its order", value
    for name, value in config.eval.model_dump(mode="json").items():
        yield f"eval.{name}", "evaluation", value
    precision = config.precision
    yield "precision.compile", "compile", precision.compile
    yield "precision.fused_adapters", "fused kernels", precision.fused_adapters
    yield "precision.health_every", "watching", precision.health_every
    optimizer = config.train.get("optim")  # ours are taken out of the SFTConfig
    args = sft_config(config, Path("runs"), {}, on_cpu=on_cpu).to_dict()
    args |= {"resume_from_checkpoint": config.train.get("resume_from_checkpoint")}
    args |= {"optim": optimizer or args["optim"]}
    for name in sorted(args.keys() - FREE):
        if not name.startswith("_"):
            condition = _CONDITION.get(name, "other training settings")
            yield f"train.{name}", condition, _plain(args[name])


def _plain(value: Any) -> Any:
    return value if isinstance(value, bool | int | float | str | dict | list | None) else str(value)


# -------------------------------------------------------------------------------------- after them


def ran_differences(
    a: dict[str, Any],
    b: dict[str, Any],
    steps_a: Sequence[Step] = (),
    steps_b: Sequence[Step] = (),
) -> list[Difference]:
    """What two finished runs of one seed did differently that a fair pair shares.

    Args:
        a, b: their `receipt.json`.
        steps_a, steps_b: their `steps.jsonl`.
    """
    conditions = dict.fromkeys((*a.get("conditions", {}), *b.get("conditions", {})))
    found = [
        _difference(name, "receipt.json: conditions", a["conditions"].get(name), x)
        for name in conditions
        if a.setdefault("conditions", {}).get(name) != (x := b.get("conditions", {}).get(name))
    ]
    for condition, where, read in _RECEIPT:
        if read(a) != read(b):
            found.append(_difference(condition, f"receipt.json: {where}", read(a), read(b)))
    for step, (x, y) in enumerate(zip(steps_a, steps_b, strict=False), 1):
        if x.tokens != y.tokens:
            found.append(_difference("steps", f"steps.jsonl: line {step}", x.tokens, y.tokens))
            break
    if len(steps_a) != len(steps_b):
        found.append(_difference("steps", "steps.jsonl: lines", len(steps_a), len(steps_b)))
    return found


def _difference(condition: str, where: str, a: Any, b: Any) -> Difference:
    """With the parts that are equal left out."""
    if isinstance(a, dict) and isinstance(b, dict):
        keys = [key for key in dict.fromkeys((*a, *b)) if a.get(key) != b.get(key)]
        a, b = {key: a.get(key) for key in keys}, {key: b.get(key) for key in keys}
    why = WHY.get(condition, WHY["other training settings"])
    return Difference(condition=condition, where=where, a=a, b=b, why=why)


def _shapes(receipt: dict[str, Any]) -> dict[str, Any]:
    layers = (layer for layer in receipt.get("layers", ()) if layer["role"] != "other")
    return {layer["name"]: layer["shape"] for layer in layers}


_RECEIPT: tuple[tuple[str, str, Callable[[dict[str, Any]], Any]], ...] = (
    ("libraries", "environment.versions", lambda r: r["environment"]["versions"]),
    ("device", "environment.device", lambda r: _device(r["environment"]["device"])),
    ("processes and sharding", "environment.processes", lambda r: r["environment"]["processes"]),
    ("data and its order", "environment.seed", lambda r: r["environment"]["seed"]),
    ("trainable parameters", "trainable.in_optimizer", lambda r: r["trainable"]["in_optimizer"]),
    ("model", "layers", _shapes),
    ("storage of the base", "precision.storage", lambda r: _held(r["precision"])),
)
"""Condition, what of the receipt, and how to read it."""


def _device(device: dict[str, Any]) -> dict[str, Any]:
    return {key: device.get(key) for key in ("kind", "name", "capability")}


def _held(precision: dict[str, Any]) -> dict[str, int]:
    """Layers held in few bits that their precision did not ask to be: NF4, or FP8 in a BF16 run."""
    held = precision.get("storage", {})
    return {k: n for k, n in held.items() if not (k == "fp8" and precision["asked"] == "fp8")}
