"""Evidence of a session: the receipt of the model that trains, and the conditions of its run."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from finetune.config.methods import REWARDS
from finetune.config.train_keys import TrainerArguments
from finetune.errors import ProofError, some
from finetune.hardware.device import Device, cuda_of, expand_segments, gemm_engine
from finetune.hardware.requirements import Resolution, emulates
from finetune.hardware.unpromised import switched_off
from finetune.hardware.versions import installed, installed_torch, version_statuses
from finetune.logging import HIDDEN_WARNINGS
from finetune.precision.cases.lora import FusedMixin, fused_adapters
from finetune.precision.convert import Conversion
from finetune.precision.engines.base import Engine
from finetune.precision.model.layers import without_adapters
from finetune.precision.model.plan import GEMMS
from finetune.precision.model.tree import named_trainable
from finetune.precision.numbers.formats import E4M3
from finetune.precision.proof.proof import Proof
from finetune.precision.proof.row import changed_numbers
from finetune.precision.proof.witness import OTHER
from finetune.precision.settings import PrecisionConfig
from finetune.precision.stored.linear import stored_weights
from finetune.runs.card import recipe_name
from finetune.runs.receipt import Receipt
from finetune.training.helper import compute_types
from finetune.training.helper.finite import not_finite
from finetune.training.helper.varlen import executed_attention


def refuse_disagreement(receipt: Receipt) -> None:
    """Raise `ProofError` if some process ran something else than the first.

    Of a layer's GEMMs those are compared that both ran in their observed micro-step: to an expert
    the tokens of one process may have been sent, and none of another's, and a tower may have read
    images of one process alone (its products are no layer's).
    """
    from accelerate.utils import gather_object

    own = {"status": receipt.status, "precision": receipt.precision["ran"]}
    # Engines are chosen on each process by its own libraries and GPU: one machine of several that
    # lacks a kernel would train its shards in BF16, and only its own receipt would say so.
    own |= {f"{one.name}.{gemm}": getattr(one, gemm) for one in receipt.layers for gemm in GEMMS}
    # All processes come here, and raise together: one alone would leave the others waiting.
    everyone = gather_object([own])
    first = everyone[0]
    for rank, other in enumerate(everyone):
        absent = {key: "none" for key in {**first, **other} if key.startswith(OTHER)}
        one, two = absent | first, absent | other
        pairs = {key: (one.get(key), two.get(key)) for key in {**one, **two}}
        apart = {k: (a, b) for k, (a, b) in pairs.items() if a != b and "none" not in (a, b)}
        if apart:
            raise ProofError(
                f"process {rank} did not run what process 0 ran",
                where=some(list(apart), 3),
                why="; ".join(f"{key}: {a} and {b}" for key, (a, b) in apart.items())[:500],
                fix="look at its log: other hardware, libraries or code on its machine",
            )


def standstill(receipt: Receipt, known: str = "") -> ProofError | None:
    """The error for a run of which not one number has changed, on any process; None if one has.

    Args:
        known: why, where it is known.
    """
    from accelerate.utils import gather_object

    # Under sharding each process counts numbers of its own, all of which may have stood still.
    everyone = gather_object([changed_numbers(receipt.movement)])
    numbers = everyone[0][1]
    if not numbers or any(changed for changed, _ in everyone):
        return None
    return ProofError(
        f"0 of {numbers:,} trainable parameters changed",
        where=f"all steps ({receipt.movement['now']['steps']})",
        why="the model that was saved is the one that training began with: "
        + (
            known
            or "the learning rate was zero, or its updates were smaller than the weights' type can "
            "hold"
        ),
        fix=f"change train.{REWARDS}, or the prompts"
        if known
        else "train for more steps than warm up (train.warmup_steps=0 has no warm-up), or raise "
        "train.learning_rate; with BF16 weights train.optim=adamw_torch_8bit or "
        "model.dtype=float32",
    )


def receipt_of(
    resolution: Resolution,
    device: Device,
    proof: Proof | None,
    *,
    compiled: str,
    references: list[str],
    patches: list[str],
    loss_scaling: dict[str, Any],
) -> Receipt:
    """Receipt of the model of a proof; without one, nothing was prepared.

    Args:
        references: one line for each model beside it that is evaluated in training.
        patches: dotted names of patched methods.
        loss_scaling: settings of float16's scaler.
    """
    r, p = resolution, resolution.precision
    conversion = proof.conversion if proof is not None else None
    share = dict(proof.flop_share) if proof else {}
    engines = conversion.engines if conversion else []
    # A run of which one layer ran in FP8 counts as FP8: its share says how much.
    low = next((k for k in ("fp8", "fp4") if share.get(k)), "")
    ran = low or max(share, key=lambda k: share[k], default="nothing")
    fp8 = p.compute == "fp8"
    status = proof.status if proof else "not proven: nothing was trained"
    # What ran in FP8 may still have ended in NaN, by an update that no later step has checked.
    if status == "proven" and conversion and (broken := not_finite(conversion.tree)):
        status = f"not proven: weights are not finite ({some(broken, 3)})"
    return Receipt(
        status=status,
        precision={
            "asked": r.asked.compute,
            "ran": ran,
            "backend": "+".join(e.name for e in engines) if fp8 else "",
            "scaling": p.scaling if fp8 else "",
            "format": _format(p, engines) if fp8 else "",
            "effective": _effective(p, engines, loss_scaling),
            "gemm": _gemm(p, device),
            "reason": r.reason,
            "fallback": r.fallback,
            "storage": stored_weights(conversion.tree) if conversion else {},
            "forced": dict(conversion.plan.overrides) if conversion else {},
            "compile": compiled,
            "kernels": _kernels(conversion),
            "attention": executed_attention(conversion.model) if conversion else "",
            "evaluation": (p.eval if fp8 else "high") + ", by FP8 weights" * p.fp8_params,
            "references": references if fp8 else [],
            "adapters": _fused(conversion),
        },
        fp8_flop_share=share.get("fp8", 0.0) + share.get("fp4", 0.0),
        flop_share=share,
        trainable=dict(proof.trainable) if proof else {},
        movement=proof.movement.described() if proof else {},
        layers=proof.layers if proof else [],
        held=proof.sentinel.described() if proof else {},
        environment=environment(device) | {"patches": patches},
    )


def _gemm(p: PrecisionConfig, device: Device) -> str:
    """Library that multiplies FP8 here; empty in another precision."""
    if p.compute != "fp8":
        return ""
    if device.capability is None or emulates(p, device):
        return "emulated"
    # A frozen base in FP8 is multiplied through torch, whichever engine is named beside it.
    if p.engine.library and p.frozen != "fp8":
        return p.engine.library
    cuda = cuda_of(installed_torch(), torch.version.cuda)
    return gemm_engine(p.scaling, device.capability, cuda)


def _fused(conversion: Conversion | None) -> str:
    """How many adapters are fused with their base; empty without any."""
    return fused_adapters(conversion.swapped_by(FusedMixin)) if conversion else ""


def _kernels(conversion: Conversion | None) -> str:
    """Kernels that cast the operands of frozen weights; empty without them."""
    if conversion is None or conversion.frozen is None:
        return ""
    how = conversion.frozen.how
    casts = "inductor" if conversion.compiled else "triton" if how.own else "eager"
    # An operator of our own is opaque to the compiler, which would else make the cast itself.
    if how.own_cast:
        casts = "triton"
    return f"{casts}; transposes: triton" if how.own and casts == "inductor" else casts


def _effective(
    p: PrecisionConfig, engines: Iterable[Engine], loss_scaling: dict[str, Any]
) -> dict[str, Any]:
    """Settings in effect: of each backend, in its own terms; without one, in torch's."""
    found: dict[str, Any] = {}
    for engine in engines:
        own = engine.effective()
        found |= {"frozen": own} if engine.name == "frozen" else own
    # TF32 is a setting of the process that no tensor's type shows, so it is looked up.
    if not found and p.compute == "fp32":
        return {"fp32_precision": compute_types.in_force()}
    if not found and p.compute == "fp16":
        return {"loss_scaling": loss_scaling}
    return found


def environment(d: Device) -> dict[str, Any]:
    """Versions, device, processes and seed, as a receipt records them."""
    versions = installed()
    return {
        "versions": versions,
        "version_statuses": version_statuses(versions),
        "switched_off": switched_off(),
        # What was not shown on the terminal is counted here, so that nothing is hidden for good.
        "hidden_warnings": dict(HIDDEN_WARNINGS),
        "device": {
            "kind": d.kind,
            "name": d.name,
            "capability": ".".join(map(str, d.capability)) if d.capability else None,
            "memory_gib": round(d.memory_gib, 1),
        },
        "allocator": expand_segments().reason if d.kind == "cuda" else None,
        "processes": dist.get_world_size() if dist.is_initialized() else 1,
        # Of the generator, not of the recipe: a script may have seeded by other means.
        "seed": torch.initial_seed(),
    }


def _format(precision: PrecisionConfig, engines: list[Engine]) -> str:
    if [engine.name for engine in engines] == ["frozen"]:
        return E4M3.name
    return "e2m1" if precision.low == "fp4" else precision.fp8_format


def conditions_of(trainer: Any, conversion: Conversion | None, compiled: str) -> dict[str, Any]:
    """Executed settings that a fair pair of runs has to share, as plain data.

    They are read from the objects that trained (optimizer, prepared model and its configuration),
    not from the recipe, so ignored or replaced settings show. Precision is left out as the subject
    of comparisons. `finetune.analysis.experiment.fairness` explains why each condition matters.

    Args:
        trainer: the `SFTTrainer` that trained.

    Returns:
        Executed value by condition; empty if training ended before it had an optimizer.
    """
    if trainer.optimizer is None:
        return {}
    args = TrainerArguments(trainer.args)
    # A compiled model has `_orig_mod` in every name, and its pair may run uncompiled.
    model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    named = named_trainable(model)
    lines = "\n".join(sorted(f"{name} {tuple(p.shape)}" for name, p in named.items()))
    rows, held_out = trainer.train_dataset, trainer.eval_dataset
    return {
        "trainable parameters": {
            "count": sum(p.numel() for p in named.values()),
            # Thousands of names as one number, which is compared but never read.
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
            "padding_free": getattr(trainer, "padding_free", False),
            "pad_to_multiple_of": args.pad_to_multiple_of,
        },
        "length of the run": {"steps": trainer.state.max_steps},
        "data and its order": {
            # Transformers knows no length of a stream either; its order is compared by its seed.
            "rows": len(rows) if hasattr(rows, "__len__") else "a stream",
            "held out": None if held_out is None else len(held_out),
            "seed": args.seed,
            "data_seed": args.data_seed,
            "order": str(args.train_sampling_strategy),
        },
        "checkpointing": _checkpointing(args, model),
        "attention": executed_attention(model),
        # Behind the colon is a reason in words, which differs between precisions by nature.
        "compile": compiled.partition(":")[0],
        "fused kernels": {
            # True stands for Liger's own choice of kernels.
            "liger": args.use_liger_kernel and (args.liger_kernel_config or True),
            "loss": args.loss_type,
            "adapters": fused_adapters(conversion.swapped_by(FusedMixin))
            if conversion is not None
            else "",
        },
    }


def _model(model: Any) -> dict[str, Any]:
    base = without_adapters(model)
    config = base.config
    return {
        "name": recipe_name(base.name_or_path),
        "type": config.model_type,
        "layers": getattr(config, "num_hidden_layers", None),
        "hidden": getattr(config, "hidden_size", None),
        "vocabulary": getattr(config, "vocab_size", None),
        # Embeddings are lookups, which no precision converts: their type is that of the loaded
        # base.
        "embeddings": str(base.get_input_embeddings().weight.dtype).removeprefix("torch."),
    }


def _checkpointing(args: TrainerArguments, model: nn.Module) -> dict[str, Any]:
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
    # From what is there: a pattern in a configuration may name more than it finds.
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

    args, optimizer = TrainerArguments(trainer.args), trainer.optimizer
    inner = optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer
    settings: dict[str, list[Any]] = {}
    for group in inner.param_groups:
        for key, value in group.items():
            # `lr` has been moved by the schedule; tensors and functions in a group are states.
            if key not in ("params", "lr") and isinstance(value, int | float | str | tuple | None):
                values = settings.setdefault(key, [])
                value = list(value) if isinstance(value, tuple) else value
                values += [value] if value not in values else []
    return {
        "class": f"{type(inner).__module__}.{type(inner).__qualname__}",
        "settings": settings,
        "learning rate": args.learning_rate,
        "learning rate of embeddings": getattr(trainer, "embedding_learning_rate", None),
        "schedule": str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)),
        "schedule settings": args.lr_scheduler_kwargs or {},
        "warm-up steps": args.get_warmup_steps(trainer.state.max_steps),
        "max_grad_norm": args.max_grad_norm,
    }
