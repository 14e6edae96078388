"""The precision plan: for every linear layer, in which precision each of its GEMMs shall run.

A linear layer `y = x Wᵀ` with tokens M, inputs K and outputs N is three GEMMs in training:

    fprop  y[M,N]  = x[M,K] · Wᵀ[K,N]      contracts K
    dgrad  dx[M,K] = g[M,N] · W[N,K]       contracts N
    wgrad  dW[N,K] = gᵀ[N,M] · x[M,K]      contracts M

FP8 GEMMs want K and N to be multiples of 16 (cuBLASLt); M is padded at run time. The plan is made
over the whole model, which may be on the meta device, before anything is touched, and gives a
reason for each layer. High precision by policy: the output head (its errors go straight into the
loss), adapters (small, and what is being learned), routers (a flipped expert is not rounding noise)
and what the user keeps. Embeddings and norms are no GEMMs.
"""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from finetune.config import Compute, PrecisionConfig
from finetune.errors import PlanError, StorageNotComputeError, nearest

if TYPE_CHECKING:
    from torch import nn

ALIGNMENT = 16
Gemm = Literal["fprop", "dgrad", "wgrad"]
GEMMS: tuple[Gemm, ...] = ("fprop", "dgrad", "wgrad")
Role = Literal["base", "head", "adapter", "router"]


@dataclass(frozen=True)
class LayerPlan:
    """One linear layer.

    Attributes:
        name: dotted module name.
        shape: (N, K): outputs, inputs.
        role: what the layer is in the model.
        frozen: its weight does not train, so there is no wgrad.
        compute: precision of its GEMMs.
        reason: why this precision.
    """

    name: str
    shape: tuple[int, int]
    role: Role
    frozen: bool
    compute: Compute
    reason: str

    @property
    def gemms(self) -> tuple[Gemm, ...]:
        """GEMMs that this layer may run in a training step."""
        return ("fprop", "dgrad") if self.frozen else GEMMS

    def precision_of(self, gemm: Gemm) -> str:
        """`fp8`, `bf16`, ... or `none` for the wgrad of a frozen weight."""
        return self.compute if gemm in self.gemms else "none"


@dataclass(frozen=True)
class PrecisionPlan:
    """The plan of a model: its layers in module order, and the precision it was made for."""

    layers: tuple[LayerPlan, ...]
    precision: PrecisionConfig

    @property
    def fp8_layers(self) -> tuple[LayerPlan, ...]:
        """The layers to be converted."""
        return tuple(layer for layer in self.layers if layer.compute == "fp8")

    def __str__(self) -> str:
        rows = Counter((_group(x.name), x.shape, x.compute, x.reason) for x in self.layers)
        return "\n".join(
            f"{count:4d} x {name:40s} {n:>6d} x {k:<6d} {compute:5s} {reason}"
            for (name, (n, k), compute, reason), count in rows.items()
        )


def _group(name: str) -> str:
    name = name.removeprefix("base_model.model.")  # PEFT's wrapping says nothing to a reader
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def linear_shape(module: nn.Module) -> tuple[int, int] | None:
    """(N, K) of a module that multiplies by one 2-D weight as `nn.Linear` does, else None."""
    from torch import nn

    if isinstance(module, nn.Linear):
        return module.out_features, module.in_features
    if is_conv1d(module):
        weight: Any = module.weight
        return weight.shape[1], weight.shape[0]  # GPT-2 stores its weight as [K, N]
    return None


def is_conv1d(module: nn.Module) -> bool:
    """Whether this is GPT-2's `Conv1D`, a linear layer with a transposed weight."""
    return any(
        cls.__name__ == "Conv1D" and cls.__module__ == "transformers.pytorch_utils"
        for cls in type(module).__mro__
    )


def iter_linears(model: nn.Module) -> Iterator[tuple[str, Any, tuple[int, int]]]:
    """Name, module and (N, K) of each linear layer, shared modules once."""
    for name, module in model.named_modules():
        shape = linear_shape(module)
        if shape is not None:
            yield name, module, shape


def plan(model: nn.Module, precision: PrecisionConfig) -> PrecisionPlan:
    """Decide the precision of every linear layer of `model` and say why.

    Args:
        model: any module, also on the meta device. Adapters must already be attached.
        precision: what was asked; only `compute` and `keep` matter here.

    Raises:
        PlanError: a `keep` pattern matches no layer, or FP8 was asked and no layer can take it.
        StorageNotComputeError: the model's weights are held quantised.
    """
    refuse_quantised(model)
    linears = list(iter_linears(model))
    kept = _match_keep(precision.keep, [name for name, _, _ in linears])
    head = _output_head(model)
    experts = _expert_count(model)
    in_head = set(head.modules()) if head is not None else set()  # PEFT may have wrapped it
    layers = []
    for name, module, shape in linears:
        role, why_high = _role(name, module, in_head, experts)
        frozen = not module.weight.requires_grad
        compute: Compute = precision.compute
        reason = "asked"
        if precision.compute == "fp8":
            high = why_high or _why_not_fp8(name, module, shape, kept)
            compute, reason = ("bf16", high) if high else ("fp8", "linear layer, aligned")
        layers.append(LayerPlan(name, shape, role, frozen, compute, reason))
    result = PrecisionPlan(tuple(layers), precision)
    if precision.compute == "fp8" and not result.fp8_layers:
        reasons = Counter(layer.reason for layer in layers)
        raise PlanError(
            "FP8 was asked and no layer of this model can take it",
            where=type(model).__name__,
            why="; ".join(f"{n} layers: {r}" for r, n in reasons.items()) or "no linear layers",
            fix="keep fewer layers, or choose precision.compute=bf16",
        )
    return result


def refuse_quantised(model: nn.Module) -> None:
    """Raise `StorageNotComputeError` for a model whose weights are held quantised.

    Storage (4-bit, 8-bit, `load_in_fp8`) saves memory and is dequantised before each matmul;
    compute multiplies in FP8. A quantised weight cannot be an operand of an FP8 GEMM.
    """
    config = getattr(model, "config", None)
    stored = getattr(config, "quantization_config", None)
    flags = ("is_loaded_in_4bit", "is_loaded_in_8bit", "is_quantized")
    flag = next((name for name in flags if getattr(model, name, False)), None)
    odd = next(
        (
            name
            for name, module, _ in iter_linears(model)
            if not module.weight.dtype.is_floating_point or module.weight.dtype.itemsize < 2
        ),
        None,
    )
    if not (stored or flag or odd):
        return
    raise StorageNotComputeError(
        "this model was loaded quantised, and FP8 compute needs plain weights",
        where=odd or flag or "config.quantization_config",
        why="load_in_4bit, load_in_8bit and load_in_fp8 are about storage: weights are kept small "
        "and dequantised before a 16-bit matmul; FP8 training is about compute: the matmul itself "
        "runs in FP8 from 16- or 32-bit weights",
        fix="load the model without a quantization_config to train in FP8, or keep it quantised "
        "and train without setup_fp8_mixed_precision_training (QLoRA in BF16)",
    )


def matches(pattern: str, name: str) -> bool:
    """Whether a `keep` pattern names this module: the whole name, or any run of its parts."""
    if fnmatch.fnmatchcase(name, pattern):
        return True
    parts = name.split(".")
    width = pattern.count(".") + 1
    return any(
        fnmatch.fnmatchcase(".".join(parts[i : i + width]), pattern)
        for i in range(len(parts) - width + 1)
    )


def _match_keep(patterns: tuple[str, ...], names: list[str]) -> dict[str, str]:
    kept: dict[str, str] = {}
    for pattern in patterns:
        found = [name for name in names if matches(pattern, name)]
        if not found:
            parts = {part for name in names for part in name.split(".") if not part.isdigit()}
            hint = nearest(pattern, [*parts, *names])
            raise PlanError(
                f"precision.keep pattern {pattern!r} matches no linear layer"
                + (f"; {hint}" if hint else ""),
                where="precision.keep",
                why="a layer meant to stay in high precision would silently run in FP8",
                fix=f"layer names are made of: {', '.join(sorted(parts))}",
            )
        kept.update(dict.fromkeys(found, pattern))
    return kept


HEADS = ("lm_head", "score", "classifier", "embed_out", "classification_head")


def _expert_count(model: Any) -> int | None:
    """Experts of a mixture-of-experts model, by its configuration."""
    config = getattr(model, "config", None)
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    return next(
        (getattr(config, n) for n in names if isinstance(getattr(config, n, None), int)), None
    )


def _output_head(model: Any) -> Any:
    getter = getattr(model, "get_output_embeddings", None)
    return getter() if callable(getter) else None


def _role(name: str, module: Any, in_head: set[nn.Module], experts: int | None) -> tuple[Role, str]:
    parts = name.split(".")
    if any(part.startswith("lora_") for part in parts):
        return "adapter", "adapter: small, and what is being learned"
    if "modules_to_save" in parts:
        return "adapter", "trained in full beside the adapters (modules_to_save)"
    # A classifier is a child of the root; deeper down, a layer of such a name is just a layer.
    if module in in_head or (len(parts) <= 3 and parts[-1] in HEADS and "layers" not in parts):
        return "head", "output head: its rounding goes straight into the loss"
    if "router" in parts or (parts[-1] == "gate" and module.out_features == experts):
        return "router", "router: rounding would change which expert is chosen"
    return "base", ""


def _why_not_fp8(name: str, module: nn.Module, shape: tuple[int, int], kept: dict[str, str]) -> str:
    from torch import nn
    from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

    if name in kept:
        return f"kept by pattern {kept[name]!r}"
    n, k = shape
    for label, size in (("K", k), ("N", n)):
        if size % ALIGNMENT:
            return f"{label}={size} is not a multiple of {ALIGNMENT}"
    if isinstance(module, NonDynamicallyQuantizableLinear):
        return "multiplied by its parent, nn.MultiheadAttention, past its forward"
    own = isinstance(module, nn.Linear) and type(module).forward is not nn.Linear.forward
    if own or "forward" in module.__dict__:
        return f"{type(module).__name__} has a forward of its own"
    return ""
