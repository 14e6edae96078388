"""Evidence of a session: the receipt of the model that trains."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from finetune.config.schema import PrecisionConfig
from finetune.errors import ProofError
from finetune.hardware.device import Device, Resolution, version
from finetune.hardware.gemm_engine import cuda_of, gemm_engine
from finetune.precision.backends.base import Backend
from finetune.precision.convert import Conversion
from finetune.precision.formats import E4M3
from finetune.precision.lora import fused_adapters
from finetune.precision.proof.proof import Proof
from finetune.precision.stored import stored_weights
from finetune.runs.receipt import Receipt
from finetune.training import compute_types
from finetune.training.attention import executed_attention

LIBRARIES = (
    *("torch", "transformers", "trl", "peft", "accelerate", "datasets", "torchao"),
    *("transformer-engine", "bitsandbytes", "liger-kernel", "triton"),
)
"""Distributions whose versions the receipt records."""


def refuse_disagreement(receipt: Receipt) -> None:
    """Compare the receipts of all processes, which must have reached the same end.

    Raises:
        ProofError: some process ran something else than the first.
    """
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    layers = [(one.name, one.fprop, one.dgrad, one.wgrad) for one in receipt.layers]
    own = {"status": receipt.status, "precision": receipt.precision["ran"], "layers": layers}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    for rank, other in enumerate(everyone):
        keys = [key for key in own if other[key] != everyone[0][key]]
        if keys:
            raise ProofError(
                f"process {rank} did not run what process 0 ran",
                where=", ".join(keys),
                why="; ".join(f"{key}: {everyone[0][key]} and {other[key]}" for key in keys)[:500],
                fix="look at its log: other hardware, libraries or code on its machine",
            )


def receipt_of(
    resolution: Resolution,
    device: Device,
    proof: Proof | None,
    *,
    compiled: str,
    references: list[str],
    patches: list[str],
) -> Receipt:
    """Receipt of the model of a proof.

    Args:
        resolution: executed precision, with reasons.
        device: the device that it was resolved for.
        proof: of the model that trains; None if nothing was prepared.
        compiled: compiled layers, and why.
        references: one line for each model beside it that is evaluated in training.
        patches: dotted names of patched methods.
    """
    r, p = resolution, resolution.precision
    conversion = proof.conversion if proof is not None else None
    share = dict(proof.flop_share) if proof else {}
    engines = conversion.engines if conversion else []
    low = next((k for k in ("fp8", "fp4") if share.get(k)), "")
    ran = low or max(share, key=lambda k: share[k], default="nothing")
    fp8 = p.compute == "fp8"
    return Receipt(
        status=proof.status if proof else "not proven: nothing was trained",
        precision={
            "asked": r.asked.compute,
            "ran": ran,
            "backend": "+".join(e.name for e in engines) if fp8 else "",
            "scaling": p.scaling if fp8 else "",
            "format": _format(p, engines) if fp8 else "",
            "effective": _effective(p, engines),
            "gemm": _gemm(p, device),
            "reason": r.reason,
            "fallback": r.fallback,
            "storage": stored_weights(conversion.model) if conversion else {},
            "forced": dict(conversion.plan.overrides) if conversion else {},
            "compile": compiled,
            "kernels": _kernels(conversion),
            "attention": executed_attention(conversion.model, device) if conversion else "",
            "evaluation": p.eval if fp8 else "high",
            "references": references if fp8 else [],
            "adapters": fused_adapters(conversion.fused) if conversion else "",
        },
        fp8_flop_share=share.get("fp8", 0.0) + share.get("fp4", 0.0),
        flop_share=share,
        trainable=dict(proof.trainable) if proof else {},
        layers=proof.layers if proof else [],
        held=proof.sentinel.described() if proof else {},
        environment=_environment(device) | {"patches": patches},
    )


def _gemm(p: PrecisionConfig, device: Device) -> str:
    """Library that multiplies FP8 here; empty in another precision."""
    if p.compute != "fp8":
        return ""
    if device.capability is None or not device.has_fp8 or p.backend == "emulated":
        return "emulated"
    if p.backend == "te" and p.frozen != "fp8":
        return "Transformer Engine"
    numbers = torch.__version__.split("+")[0].split(".")[:2]
    cuda = cuda_of(tuple(int(n) for n in numbers), torch.version.cuda)
    return gemm_engine(p.scaling, device.capability, cuda)


def _kernels(conversion: Conversion | None) -> str:
    """Kernels that cast the operands of frozen weights; empty without them."""
    if conversion is None or conversion.frozen is None:
        return ""
    casts = "inductor" if conversion.compiled else "eager"
    if conversion.frozen.own_cast:
        casts = "triton"
    if conversion.frozen.keeps_transposed:
        return f"{casts}; transposes: kept"
    apart = conversion.frozen.own_transpose and not conversion.frozen.own_cast
    return f"{casts}; transposes: triton" if apart else casts


def _effective(p: PrecisionConfig, engines: Iterable[Backend]) -> dict[str, Any]:
    """Settings in effect: of each backend, in its own terms; without one, in torch's."""
    found: dict[str, Any] = {}
    for engine in engines:
        own = engine.effective()
        found |= {"frozen": own} if engine.name == "frozen" else own
    if not found and p.compute == "fp32":
        return {"fp32_precision": compute_types.in_force()}
    if not found and p.compute == "fp16":
        return {"loss_scaling": compute_types.scaler_arguments(p)}
    return found


def _environment(d: Device) -> dict[str, Any]:
    return {
        "versions": {"python": platform.python_version()}
        | {name: v for name in LIBRARIES if (v := version(name))},
        "device": {
            "kind": d.kind,
            "name": d.name,
            "capability": ".".join(map(str, d.capability)) if d.capability else None,
            "memory_gib": round(d.memory_gib, 1),
        },
        "processes": dist.get_world_size() if dist.is_initialized() else 1,
        "seed": torch.initial_seed(),
    }


def _format(precision: PrecisionConfig, engines: list[Backend]) -> str:
    if [engine.name for engine in engines] == ["frozen"]:
        return E4M3.name
    return "e2m1" if precision.low == "fp4" else precision.fp8_format
