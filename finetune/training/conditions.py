"""Conditions of a run: executed settings that a fair pair of runs has to share.

`receipt.json` stores them under `conditions`. They are read from the objects that trained
(optimizer, prepared model and its configuration), not from the recipe, so ignored or replaced
settings show. Precision is left out as the subject of comparisons; library versions and the device
are under `environment`. `finetune.analysis.compare.fairness` explains why each condition matters.
"""

from __future__ import annotations

import hashlib
from typing import Any

from torch import nn

from finetune.precision.lora import fused_adapters
from finetune.precision.proof.proof import named_trainable
from finetune.runs.card import recipe_name
from finetune.training.attention import executed_attention
from finetune.training.session import Session


def conditions_of(trainer: Any, running: Session) -> dict[str, Any]:
    """Collect the conditions of a training that began, as plain data.

    Args:
        trainer: the `SFTTrainer` that trained.
        running: current session.

    Returns:
        Executed value by condition; empty if training ended before it had an optimizer.
    """
    if trainer.optimizer is None:
        return {}
    args = trainer.args
    model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    named = named_trainable(model)
    lines = "\n".join(sorted(f"{name} {tuple(p.shape)}" for name, p in named.items()))
    held_out, (_, conversion) = trainer.eval_dataset, running.training
    rows = trainer.train_dataset
    return {
        "trainable parameters": {
            "count": sum(p.numel() for p in named.values()),
            "names": hashlib.sha256(lines.encode()).hexdigest()[:16],
        },
        "model": _model(model),
        "adapters": _adapters(model),
        "optimizer": _optimizer(trainer),
        "tokens per step": {
            "rows": args.per_device_train_batch_size,
            "accumulation": args.gradient_accumulation_steps,
            "processes": args.world_size,
            "max_length": args.max_length,
            "packing": args.packing and args.packing_strategy,
            "padding_free": trainer.padding_free,
            "pad_to_multiple_of": args.pad_to_multiple_of,
        },
        "length of the run": {"steps": trainer.state.max_steps},
        "data and its order": {
            "rows": len(rows) if hasattr(rows, "__len__") else "a stream",
            "held out": None if held_out is None else len(held_out),
            "seed": args.seed,
            "data_seed": args.data_seed,
            "order": str(args.train_sampling_strategy),
        },
        "checkpointing": _checkpointing(args, model),
        "attention": executed_attention(model, running.device),
        "compile": running.compiled.partition(":")[0],
        "fused kernels": {
            "liger": args.use_liger_kernel and (args.liger_kernel_config or True),
            "loss": args.loss_type,
            "adapters": fused_adapters(conversion.fused) if conversion is not None else "",
        },
    }


def _model(model: Any) -> dict[str, Any]:
    from peft import PeftModel

    base: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    config = base.config
    return {
        "name": recipe_name(base.name_or_path),
        "type": config.model_type,
        "layers": getattr(config, "num_hidden_layers", None),
        "hidden": getattr(config, "hidden_size", None),
        "vocabulary": getattr(config, "vocab_size", None),
        "embeddings": str(base.get_input_embeddings().weight.dtype).removeprefix("torch."),
    }


def _checkpointing(args: Any, model: nn.Module) -> dict[str, Any]:
    by_sharding = (args.fsdp_config or {}).get("activation_checkpointing", False)
    return {
        "layers": sum(bool(getattr(m, "gradient_checkpointing", False)) for m in model.modules()),
        "by FSDP": bool(args.fsdp and by_sharding),
        "settings": args.gradient_checkpointing_kwargs or {},
        "offloading": args.activation_offloading,
    }


def _adapters(model: nn.Module) -> dict[str, Any] | None:
    from peft import PeftModel

    if not isinstance(model, PeftModel):
        return None
    config: Any = model.peft_config[model.active_adapters[0]]
    adapted = [n.rpartition(".lora_A")[0] for n, _ in model.named_parameters() if ".lora_A." in n]
    return {
        "r": config.r,
        "alpha": config.lora_alpha,
        "dropout": config.lora_dropout,
        "rslora": config.use_rslora,
        "dora": config.use_dora,
        "bias": config.bias,
        "targets": sorted({name.rpartition(".")[2] for name in adapted}),
    }


def _optimizer(trainer: Any) -> dict[str, Any]:
    """Class, parameter-group settings, and learning-rate scheduler."""
    from accelerate.optimizer import AcceleratedOptimizer

    args, optimizer = trainer.args, trainer.optimizer
    inner = optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer
    settings: dict[str, list[Any]] = {}
    for group in inner.param_groups:
        for key, value in group.items():
            if key not in ("params", "lr") and isinstance(value, int | float | str | tuple | None):
                values = settings.setdefault(key, [])
                value = list(value) if isinstance(value, tuple) else value
                values += [value] if value not in values else []
    return {
        "class": f"{type(inner).__module__}.{type(inner).__qualname__}",
        "settings": settings,
        "learning rate": args.learning_rate,
        "schedule": str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)),
        "schedule settings": args.lr_scheduler_kwargs or {},
        "warm-up steps": args.get_warmup_steps(trainer.state.max_steps),
        "max_grad_norm": args.max_grad_norm,
    }
