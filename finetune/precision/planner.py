"""The precision plan: for every linear layer, in which precision each of its GEMMs shall run.

A linear layer `y = x Wᵀ` with tokens M, inputs K and outputs N is three GEMMs in training:

    fprop  y[M,N]  = x[M,K] · Wᵀ[K,N]      contracts K
    dgrad  dx[M,K] = g[M,N] · W[N,K]       contracts N
    wgrad  dW[N,K] = gᵀ[N,M] · x[M,K]      contracts M

FP8 GEMMs want K and N to be multiples of 16 (cuBLASLt); M is padded at run time. The plan is made
over the whole model, which may be on the meta device, before anything is touched, and gives a
reason for each layer. High precision by policy: the output head (its errors go straight into the
loss), adapters (small, and what is being learned), routers (a flipped expert is not rounding noise)
and what the user chose (`finetune.precision.overrides`). Embeddings and norms are no GEMMs; they
are
in the plan only where the user chose a type for them. A parameter that multiplies without being a
linear layer (`finetune.precision.layers`) has a row of its own, in which N and K may stand either
way: its module decides which it contracts.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from finetune.config.schema import Compute, Gemm, PrecisionConfig
from finetune.errors import PlanError, StorageNotComputeError
from finetune.precision.layers import (
    Role,
    is_low_rank,
    iter_linears,
    iter_parameters,
    iter_roles,
    iter_weights,
    output_head,
    why_made_anew,
    why_own_forward,
)
from finetune.precision.overrides import Choices, Part, part_of
from finetune.precision.stored import StoredMixin, iter_stored, stored_as
from finetune.precision.weights import Granularity, serves

if TYPE_CHECKING:
    from torch import nn

ALIGNMENT = 16
GEMMS: tuple[Gemm, ...] = ("fprop", "dgrad", "wgrad")


@dataclass(frozen=True)
class LayerPlan:
    """One linear layer, or one parameter that multiplies.

    Attributes:
        name: dotted name of the module or parameter.
        shape: (N, K), outputs and inputs; for a parameter its last two dimensions as stored.
        frozen: True if the weight does not train, so there is no wgrad.
        compute: precision of its GEMMs; `fp8` if the layer is converted.
        reason: reason for this precision.
        gemm_precision: GEMM -> precision of a converted layer that is not all FP8.
        override: True if the user chose a type that overrides autocast.
        kind: `linear` for a linear layer, `parameter` for a declared parameter.
        stored: granularity of a weight stored only as FP8 codes, else empty.
    """

    name: str
    shape: tuple[int, int]
    role: Role
    frozen: bool
    compute: Compute
    reason: str
    gemm_precision: tuple[tuple[Gemm, str], ...] = ()
    override: bool = False
    kind: Literal["linear", "parameter"] = "linear"
    stored: Granularity | Literal[""] = ""

    @property
    def owner(self) -> str:
        """The module that multiplies: the layer itself, or the one that holds the parameter."""
        return self.name if self.kind == "linear" else self.name.rpartition(".")[0]

    @property
    def plain_name(self) -> str:
        """The name of the module in the model without PEFT's wrapping."""
        return self.name.removeprefix("base_model.model.").removesuffix(".base_layer")

    @property
    def gemms(self) -> tuple[Gemm, ...]:
        """GEMMs that this layer may run in a training step."""
        return ("fprop", "dgrad") if self.frozen else GEMMS

    def precision_of(self, gemm: Gemm) -> str:
        """`fp8`, `fp4`, `bf16`, ... or `none` for the wgrad of a frozen weight."""
        return self.would_run(gemm) if gemm in self.gemms else "none"

    def would_run(self, gemm: Gemm) -> str:
        """The precision of this GEMM whenever it runs, also of a frozen weight that thawed."""
        return dict(self.gemm_precision).get(gemm, self.compute)


@dataclass(frozen=True)
class CastPlan:
    """A module without matmuls whose type the user chose: an embedding or a norm."""

    name: str
    compute: Compute
    reason: str


@dataclass(frozen=True)
class PrecisionPlan:
    """The plan of a model: its layers in module order, and the precision it was made for."""

    layers: tuple[LayerPlan, ...]
    precision: PrecisionConfig
    casts: tuple[CastPlan, ...] = ()

    @property
    def fp8_layers(self) -> tuple[LayerPlan, ...]:
        """The layers to be converted."""
        return tuple(layer for layer in self.layers if layer.compute == "fp8")

    @property
    def stored(self) -> tuple[LayerPlan, ...]:
        """The layers whose weights are stored only as FP8 codes."""
        return tuple(layer for layer in self.layers if layer.stored)

    @property
    def fp8_parameters(self) -> dict[str, list[LayerPlan]]:
        """Module name -> its parameters that are to multiply in FP8."""
        found: dict[str, list[LayerPlan]] = {}
        for layer in self.fp8_layers:
            if layer.kind == "parameter":
                found.setdefault(layer.owner, []).append(layer)
        return found

    @property
    def overrides(self) -> dict[str, Compute]:
        """Modules that compute in a type of their own, by the user's choice."""
        named = [layer for layer in self.layers if layer.override]
        return {item.name: item.compute for item in (*named, *self.casts)}

    def __str__(self) -> str:
        rows = Counter((_group(x.name), x.shape, *_shown(x)) for x in self.layers)
        lines = [
            f"{count:4d} x {name:40s} {n:>6d} x {k:<6d} {compute:5s} {reason}"
            for (name, (n, k), compute, reason), count in rows.items()
        ]
        casts = Counter((_group(x.name), x.compute, x.reason) for x in self.casts)
        lines += [
            f"{count:4d} x {name:40s} {'':15s} {compute:5s} {reason}"
            for (name, compute, reason), count in casts.items()
        ]
        return "\n".join(lines)


def _shown(layer: LayerPlan) -> tuple[str, str]:
    """What its GEMMs multiply (FP4 with nvfp4), and the reason with the GEMMs kept high."""
    if layer.compute != "fp8":
        return layer.compute, layer.reason
    ran = {gemm: layer.precision_of(gemm) for gemm in layer.gemms}
    kept = [gemm for gemm, kind in ran.items() if kind not in ("fp8", "fp4")]
    low = next((kind for kind in ran.values() if kind in ("fp8", "fp4")), layer.compute)
    return low, layer.reason + (f"; {', '.join(kept)} high" if kept else "")


def _group(name: str) -> str:
    name = name.removeprefix("base_model.model.")
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def plan(model: nn.Module, precision: PrecisionConfig) -> PrecisionPlan:
    """Choose the precision of every linear layer and declared parameter, with a reason.

    Args:
        model: any module, also on the meta device. Adapters must already be attached.
        precision: requested precision.

    Raises:
        PlanError: a choice (`keep`, `map`, `first_n`, `last_n`) reaches nothing or cannot be
            honoured, or FP8 was requested and no layer can take it.
        StorageNotComputeError: FP8 was requested and the model's weights are quantized.
    """
    if precision.compute == "fp8":
        refuse_quantized(model, precision)
    linears = list(iter_linears(model))
    head = output_head(model)
    in_head = set(head.modules()) if head is not None else set()  # PEFT may have wrapped it
    roles: dict[str, tuple[Role, str]] = {
        name: (role, why) for name, _, role, why in iter_roles(model)
    }
    parameters = list(iter_parameters(model))
    roles |= {name: _parameter_role(name, owner in in_head) for name, owner, _ in parameters}
    parts: dict[str, Part] = {
        name: _part(name, roles[name][0], m in in_head) for name, m, _ in linears
    }
    parts |= {name: _part(name, roles[name][0], m in in_head) for name, m, _ in parameters}
    parts = {name: part for name, part in parts.items() if not is_low_rank(name)}
    choices = Choices(model, precision, parts | _elementwise(model))
    shared = _shared_parameters(model)
    # PEFT's adapters of a parameter add to it in its own type.
    parametrised = {id(m.base_layer) for m in model.modules() if type(m).__name__ == "ParamWrapper"}
    layers = []
    for name, module, shape in linears:
        cannot = _why_not_fp8(module, shape, precision)
        frozen = not module.weight.requires_grad
        row = _plan_layer(name, shape, frozen, roles[name], cannot, choices)
        plain = id(module.weight) in shared or id(module) in parametrised
        layers.append(row if plain else _stored(row, module, precision))
    for name, owner, parameter in parameters:
        n, k = parameter.shape[-2:]
        cannot = why_made_anew(model, name, owner) or _why_not_parameter((n, k), precision)
        row = _plan_layer(name, (n, k), not parameter.requires_grad, roles[name], cannot, choices)
        layers.append(_as_parameter(row))
    kinds = {name: kind for name, module, _ in linears if (kind := stored_as(module))}
    layers = [
        replace(row, reason=f"{row.reason}; weight held in {kinds[row.name]}")
        if row.name in kinds and row.compute != "fp8"
        else row
        for row in layers
    ]
    casts = [
        CastPlan(name, choice.compute, choice.reason)
        for name in _elementwise(model)
        if (choice := choices.of(name)) is not None
    ]
    result = PrecisionPlan(tuple(layers), precision, tuple(casts))
    if precision.compute == "fp8" and not result.fp8_layers:
        reasons = Counter(layer.reason for layer in layers)
        raise PlanError(
            "FP8 was asked and no layer of this model can take it",
            where=type(model).__name__,
            why="; ".join(f"{n} layers: {r}" for r, n in reasons.items())
            or "no linear layers, and no parameters declared to multiply (fp8_matmuls)",
            fix="keep fewer layers, or choose precision.compute=bf16",
        )
    if precision.frozen == "fp8" and not result.stored:
        raise PlanError(
            "frozen=fp8 was asked and this model has no frozen layer to hold in FP8",
            where="precision.frozen",
            why="every linear layer that runs in FP8 trains, and needs its high-precision weight",
            fix="~precision.frozen; it is for the base under adapters (a lora section)",
        )
    return result


def refuse_quantized(model: nn.Module, precision: PrecisionConfig) -> None:
    """Raise `StorageNotComputeError` for quantised weights that FP8 GEMMs cannot be fed from.

    Storage (4-bit, 8-bit, `load_in_fp8`) saves memory and is dequantised before each matmul;
    compute multiplies in FP8. Frozen weights stored in FP8 can do both (`precision.frozen`).
    """
    stored = {f"{name}.weight" for name, _ in iter_stored(model)}
    quantised = [
        (name, f"{name}.weight" in stored)
        for name, weight, _ in iter_weights(model)
        if not weight.dtype.is_floating_point or weight.dtype.itemsize < 2
    ]
    flags = ("is_loaded_in_4bit", "is_loaded_in_8bit", "is_quantized")
    flag = next((name for name in flags if getattr(model, name, False)), None)
    if not flag and getattr(getattr(model, "config", None), "quantization_config", None):
        flag = "config.quantization_config"
    where = next((name for name, ours in quantised if not ours), flag)
    if quantised and all(ours for _, ours in quantised):
        if precision.frozen == "fp8":
            return
        raise StorageNotComputeError(
            "this model is stored in FP8 (load_in_fp8), and FP8 compute was not told to use that",
            where=quantised[0][0],
            why="load_in_fp8 is about storage: weights are dequantised before a 16-bit matmul; "
            "frozen weights can also be multiplied as they are stored",
            fix="frozen='fp8' with adapters over it, in setup_fp8_mixed_precision_training("
            "scaling='rowwise', frozen='fp8') or precision.frozen=fp8; to train all parameters, "
            "load the model plain",
        )
    if where is None:
        return
    raise StorageNotComputeError(
        "this model was loaded quantised, and FP8 compute needs plain weights",
        where=where,
        why="load_in_4bit, load_in_8bit and load_in_fp8 are about storage: weights are kept small "
        "and dequantised before a 16-bit matmul; FP8 training is about compute: the matmul itself "
        "runs in FP8 from 16- or 32-bit weights",
        fix="load the model without a quantization_config to train in FP8 (precision.frozen=fp8 "
        "holds a base under adapters in one byte a number), or keep it quantised and train without "
        "setup_fp8_mixed_precision_training (QLoRA in BF16)",
    )


def _shared_parameters(model: nn.Module) -> set[int]:
    """Identities of parameters that several modules hold, such as a head tied to an embedding."""
    held = Counter(id(p) for m in model.modules() for p in m.parameters(recurse=False))
    return {key for key, count in held.items() if count > 1}


def _stored(row: LayerPlan, module: Any, precision: PrecisionConfig) -> LayerPlan:
    """Row of a linear layer; its weight is stored in FP8 if it is frozen and computes so."""
    if precision.frozen != "fp8" or row.compute != "fp8" or not row.frozen:
        return row
    if row.name.endswith(".original_module"):  # PEFT trains a copy of it in its place
        return row
    granularity: Granularity = "row" if precision.scaling == "rowwise" else "tensor"
    reason = f"frozen, held in FP8 by {granularity}"
    if isinstance(module, StoredMixin) and not serves(module.stored_tile, row.shape, granularity):
        reason += ", cast again from what the checkpoint holds"
    asked = "" if row.reason == "linear layer, aligned" else f"{row.reason}; "
    return replace(row, stored=granularity, reason=asked + reason)


def _plan_layer(
    name: str,
    shape: tuple[int, int],
    frozen: bool,
    role_and_why: tuple[Role, str],
    cannot: str,
    choices: Choices,
) -> LayerPlan:
    (role, why_high), precision = role_and_why, choices.precision
    # Low-rank adapters follow the run, whatever holds them.
    choice = choices.of(name) if name in choices.parts else None
    wanted = choice.compute if choice is not None else precision.compute
    if wanted != "fp8":
        usual = "bf16" if precision.compute == "fp8" else precision.compute
        reason = choice.reason if choice is not None else "asked"
        return LayerPlan(name, shape, role, frozen, wanted, reason, override=wanted != usual)
    if choice is not None and choice.asked and cannot:
        raise PlanError(
            f"FP8 was chosen for {name!r}, which cannot take it",
            where=choice.reason,
            why=cannot,
            fix="leave it out of precision.map, or choose bf16",
        )
    asked = choice is not None and choice.asked
    high = ("" if asked else why_high) or cannot
    if high:
        return LayerPlan(name, shape, role, frozen, "bf16", high)
    kept = precision.gemms_kept_high
    gemms: dict[Gemm, str] = {gemm: "bf16" if gemm in kept else precision.low for gemm in GEMMS}
    reason = choice.reason if asked and choice is not None else "linear layer, aligned"
    return LayerPlan(name, shape, role, frozen, "fp8", reason, tuple(gemms.items()))


def _as_parameter(row: LayerPlan) -> LayerPlan:
    """The row of a parameter, of which a linear layer's rules have decided."""
    if row.override:
        raise PlanError(
            f"{row.compute} was chosen for {row.name!r}, a parameter that its module multiplies",
            where=row.reason,
            why="only linear layers can be made to compute in a type of their own",
            fix="leave it out of precision.map, or choose fp8 or what the rest of the model has",
        )
    reason = row.reason
    if row.compute == "fp8":
        reason = reason.replace("linear layer, aligned", "parameter that multiplies, aligned")
    elif reason == "asked":
        reason = "multiplied as its module does it"
    return replace(row, reason=reason, kind="parameter")


def _part(name: str, role: Role, in_head: bool) -> Part:
    if role == "head" or in_head:  # a copy of the head beside adapters is one too
        return "output"
    return "router" if role == "router" else part_of(name)


def _elementwise(model: nn.Module) -> dict[str, Part]:
    """Name -> part of embeddings and norms: modules with weights and no matmul."""
    from torch import nn

    found: dict[str, Part] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            found[name] = "embed"
        elif "norm" in type(module).__name__.lower() and not list(module.children()):
            found[name] = "norm"
    return found


def _parameter_role(name: str, in_head: bool) -> tuple[Role, str]:
    if "modules_to_save" in name.split("."):
        return "adapter", "trained in full beside the adapters (modules_to_save)"
    if in_head:
        return "head", "output head: its rounding goes straight into the loss"
    return "base", ""


def _why_not_aligned(shape: tuple[int, int], precision: PrecisionConfig) -> str:
    multiple = alignment(precision)
    for label, size in zip("KN", shape[::-1], strict=True):
        if size % multiple:
            return f"{label}={size} is not a multiple of {multiple}"
    return ""


def _why_not_parameter(shape: tuple[int, int], precision: PrecisionConfig) -> str:
    if precision.backend == "te":
        return "Transformer Engine's layers own their weights; precision.backend=torchao takes it"
    return _why_not_aligned(shape, precision)


def _why_not_fp8(module: nn.Module, shape: tuple[int, int], precision: PrecisionConfig) -> str:
    own = "" if isinstance(module, StoredMixin) else why_own_forward(module)
    return _why_not_aligned(shape, precision) or own


def alignment(precision: PrecisionConfig) -> int:
    """Required divisor of K and N: 16 for FP8 GEMMs, 32 for Blackwell's block formats."""
    return 32 if precision.scaling in ("mxfp8", "nvfp4") else ALIGNMENT
