"""The precision plan: for every linear layer, in which precision each of its GEMMs shall run.

A linear layer `y = x Wᵀ` with tokens M, inputs K and outputs N is three GEMMs in training:

    fprop  y[M,N]  = x[M,K] · Wᵀ[K,N]      contracts K
    dgrad  dx[M,K] = g[M,N] · W[N,K]       contracts N
    wgrad  dW[N,K] = gᵀ[N,M] · x[M,K]      contracts M

FP8 GEMMs want K and N to be multiples of 16 (cuBLASLt); M is padded at run time. The plan is made
over the whole model, which may be on the meta device, before anything is touched, and gives a
reason for each layer. High precision by policy: head, adapters and routers
(`finetune.precision.layers`) and what the user chose (`finetune.precision.overrides`). Embeddings
and norms are no GEMMs; they are in the plan only where the user chose a type for them. A parameter
that multiplies without being a linear layer has a row of its own, in which N and K may stand either
way: its module decides which it contracts.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any, Literal

from rich.console import RenderableType
from rich.table import Column, Table
from rich.text import Text
from torch import nn

from finetune.errors import PlanError, PrecisionError, StorageNotComputeError
from finetune.precision.codes import Fp8Bits
from finetune.precision.facts import Gemm
from finetune.precision.layers import (
    Record,
    Role,
    are_served_experts,
    decoder_blocks,
    elementwise,
    head_modules,
    ids_giving_types,
    is_low_rank,
    linear_shape,
    past_forward_here,
    plain_name,
    records,
    why_made_anew,
    why_not_aligned,
    why_own_forward,
)
from finetune.precision.overrides import Choices, Part, part_of
from finetune.precision.peft_methods import cannot_adapt_codes, other_method
from finetune.precision.settings import Compute, PrecisionConfig
from finetune.precision.stored import StoredMixin, stored_as
from finetune.precision.weights import Granularity

GEMMS: tuple[Gemm, ...] = ("fprop", "dgrad", "wgrad")
OF_ENGINE = "Transformer Engine's layers own their weights; precision.backend=torchao takes it"
AS_CONFIGURED = "as configured"


@dataclass(frozen=True)
class LayerPlan:
    """One linear layer, or one parameter that multiplies.

    Attributes:
        name: dotted name of the module or parameter.
        shape: (N, K), outputs and inputs; for a parameter its last two dimensions as stored.
        frozen: True if the weight does not train, so there is no wgrad.
        compute: precision of its GEMMs; `fp8` if the layer is converted.
        reason: reason for this precision; empty in FP8 that nobody has chosen for this layer.
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
    def local(self) -> str:
        """The name of a parameter within its module."""
        return self.name.rpartition(".")[2]

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
            if layer.kind == "parameter" and not layer.stored:
                found.setdefault(layer.owner, []).append(layer)
        return found

    @property
    def overrides(self) -> dict[str, Compute]:
        """Modules that compute in a type of their own, by the user's choice."""
        named = [layer for layer in self.layers if layer.override]
        return {item.name: item.compute for item in (*named, *self.casts)}

    def __rich__(self) -> RenderableType:
        """Layers as a table: those of a place in all blocks, and all adapters, in one row."""
        rows = Counter((*_place(x), *_shown(x)) for x in self.layers)
        rows.update((place_in_block(x.name), "", x.compute, x.reason) for x in self.casts)
        titles = ("", "layer", "N x K", "", "reason")
        columns = [Column(t, no_wrap=t == "N x K", overflow="fold") for t in titles]
        table = Table(*columns, box=None, pad_edge=False, padding=(0, 1, 0, 0))
        for (name, shape, compute, reason), count in rows.items():
            style = "green" if compute in ("fp8", "fp4") else "dim"
            table.add_row(str(count), Text(name), shape, Text(compute, style), Text(reason))
        return table


def _place(layer: LayerPlan) -> tuple[str, str]:
    """Name and shape in the table; of an adapter only which of the two factors it is."""
    if layer.role == "adapter":
        return layer.name.removesuffix(".default").rpartition(".")[2], ""
    return place_in_block(layer.name), "x".join(map(str, layer.shape))


def _shown(layer: LayerPlan) -> tuple[str, str]:
    """Precision of its GEMMs (FP4 with nvfp4), and the reason with the GEMMs kept high."""
    if layer.compute != "fp8":
        return layer.compute, layer.reason
    ran = {gemm: layer.precision_of(gemm) for gemm in layer.gemms}
    kept = [gemm for gemm, kind in ran.items() if kind not in ("fp8", "fp4")]
    low = next((kind for kind in ran.values() if kind in ("fp8", "fp4")), layer.compute)
    high = f"{', '.join(kept)} high" if kept else ""
    return low, "; ".join(filter(None, (layer.reason, high)))


def place_in_block(name: str) -> str:
    """`base_model.model.model.layers.7.mlp.up_proj.base_layer` -> `mlp.up_proj`."""
    name = plain_name(name).removeprefix("model.").removesuffix(".default")
    return re.split(r"(?:^|\.)\d+\.", name)[-1]


def plan(model: nn.Module, precision: PrecisionConfig) -> PrecisionPlan:
    """Choose the precision of every linear layer and declared parameter, with a reason.

    Args:
        model: any module, also on the meta device. Adapters must already be attached.
        precision: requested precision.

    Raises:
        PlanError: a choice (`keep`, `map`, `first_n`, `last_n`) reaches nothing or cannot be
            honored, or FP8 was requested and no layer can take it.
        StorageNotComputeError: FP8 was requested and the model's weights are quantized.
    """
    modules = dict(model.named_modules())
    found = records(model, modules)
    if precision.compute == "fp8":
        refuse_quantized(model, precision, found)
    in_head, lookups = head_modules(model), elementwise(modules)
    parts: dict[str, Part] = {
        each.name: _part(each, each.owner in in_head)
        for each in found
        if not is_low_rank(each.name)
    }
    parts |= lookups
    blocks = "", 0
    if precision.first_n or precision.last_n:
        names = [name for name, part in parts.items() if part]
        blocks = decoder_blocks(model, names, "precision.first_n, precision.last_n")
    choices, storing = Choices(precision, parts, blocks), _Storing([*modules.values()], precision)
    layers = []
    for each in found:
        cannot = why_not_aligned(each.shape, precision)
        if each.kind == "linear":
            own = why_own_forward(each.owner) or past_forward_here(each)
            row = _plan_layer(each, cannot or own, choices)
            _check_override(row, own)
            layers.append(storing.row(row, each.owner))
            continue
        # Experts that are stored are multiplied by our own forward, whatever the backend.
        if not storing.serves(each.owner, frozen=not each.weight.requires_grad):
            served = are_served_experts(each.owner)
            made_anew = "" if served else why_made_anew(model, each.name, each.owner)
            cannot = made_anew or (OF_ENGINE if not precision.engine.takes_parameters else cannot)
        row = _plan_layer(each, cannot, choices)
        _check_override(
            row, "its module multiplies by it, and only linear layers have a forward to replace"
        )
        layers.append(storing.parameter_row(_as_parameter(row), each.owner))
    casts = [
        CastPlan(n, choice.compute, choice.reason) for n in lookups if (choice := choices.of(n))
    ]
    result = PrecisionPlan(tuple(layers), precision, tuple(casts))
    if precision.compute == "fp8" and not result.fp8_layers:
        reasons = Counter(layer.reason for layer in layers)
        raise PlanError(
            "FP8 was requested and no layer of this model can take it",
            where=type(model).__name__,
            why="; ".join(f"{n} layers: {r}" for r, n in reasons.items())
            or "no linear layers, and no parameters declared to multiply (fp8_matmuls)",
            fix="precision.compute=bf16" + (", or ~precision.keep" if precision.keep else ""),
        )
    if precision.frozen == "fp8" and not result.stored:
        raise PlanError(
            "frozen=fp8 was requested and this model has no frozen layer to store in FP8",
            where="precision.frozen",
            why="every linear layer that runs in FP8 trains, and needs its high-precision weight",
            fix="~precision.frozen; it is for the base under adapters (a lora section)",
        )
    return result


def refuse_quantized(model: nn.Module, precision: PrecisionConfig, found: list[Record]) -> None:
    """Raise `StorageNotComputeError` for quantized weights that FP8 GEMMs cannot read.

    Storage (4-bit, 8-bit, `load_in_fp8`) saves memory and is dequantized before each matmul;
    compute multiplies in FP8. Frozen weights stored in FP8 can do both (`precision.frozen`).
    """
    quantized = [
        (each.name, isinstance(each.owner, StoredMixin) or isinstance(each.weight, Fp8Bits))
        for each in found
        if not each.weight.dtype.is_floating_point or each.weight.dtype.itemsize < 2
    ]
    flags = ("is_loaded_in_4bit", "is_loaded_in_8bit", "is_quantized")
    flag = next((name for name in flags if getattr(model, name, False)), None)
    if not flag and getattr(getattr(model, "config", None), "quantization_config", None):
        flag = "config.quantization_config"
    where = next((name for name, ours in quantized if not ours), flag)
    if quantized and all(ours for _, ours in quantized):
        if precision.frozen == "fp8":
            return
        raise StorageNotComputeError(
            "this model is stored in FP8 (load_in_fp8), and frozen='fp8' was not set",
            where=quantized[0][0],
            why="load_in_fp8 is about storage: weights are dequantized before a 16-bit matmul",
            fix="precision.frozen=fp8 with adapters over it, which multiplies weights as they are "
            "stored; to train all parameters, load the model plain",
        )
    if where is not None:
        raise StorageNotComputeError(
            "this model was loaded quantized, and FP8 compute needs plain weights",
            where=where,
            why="load_in_4bit, load_in_8bit and load_in_fp8 are about storage: weights are "
            "dequantized before a 16-bit matmul; FP8 training is about compute: the matmul itself",
            fix="load the model without a quantization_config to train in FP8 "
            "(precision.frozen=fp8 holds a base under adapters in one byte a number), or keep it "
            "quantized and train without setup_fp8_mixed_precision_training (QLoRA in BF16)",
        )


def refuse_half_weights(model: nn.Module) -> None:
    """Raise `PrecisionError` unless all trainable weights are float32; also on the meta device."""
    half = {n: p.dtype for n, p in model.named_parameters() if p.requires_grad and p.itemsize < 4}
    if half:
        kinds = " and ".join(sorted({str(dtype).removeprefix("torch.") for dtype in half.values()}))
        raise PrecisionError(
            f"FP16 was requested, and {len(half)} trainable weights are {kinds}",
            where=", ".join(list(half)[:4]),
            why="their gradients would be of that type too, and those of a scaled loss cannot be "
            "unscaled in it: float16 loses what the scale saved, bfloat16 has no kernel on CUDA",
            fix="model.dtype=float32 (matmuls run in float16 all the same), or adapters, which are "
            "float32 over frozen weights of any type",
        )


class _Storing:
    """Adds storage to the rows of linear layers: planned, or found in the model."""

    def __init__(self, modules: list[Any], precision: PrecisionConfig) -> None:
        self.precision = precision
        # `_parameters`, as `parameters()` would name a shared one once.
        owned = [(id(p), m) for m in modules for p in m._parameters.values() if p is not None]
        times = Counter(key for key, _ in owned)
        # A parameter of several modules, such as a head tied to an embedding. Linear layers alone,
        # such as those of PEFT's `layer_replication`, share their codes as they shared the weight.
        self._shared = {k for k, m in owned if times[k] > 1 and linear_shape(m) is None}
        # PEFT's adapters of a parameter add to it in its own type.
        self._adapted = {id(m.base_layer) for m in modules if type(m).__name__ == "ParamWrapper"}
        self._other_methods: dict[int, str] = {
            id(getattr(m, "base_layer", None)): method
            for m in modules
            if type(m).__name__ != "ParamWrapper" and (method := other_method(m))
        }
        self._typed = set(ids_giving_types(modules))
        # By row as x and g are cast then; the other rules go with one scale per tensor.
        self._granularity: Granularity = precision.rule.frozen or "tensor"

    def row(self, row: LayerPlan, module: Any) -> LayerPlan:
        """The row of a layer whose weight is stored in FP8 if it is frozen and computes so."""
        if stored_as(module):
            self._check_method(row, module)
        if row.compute != "fp8":
            kind = stored_as(module)
            reason = f"{row.reason}; weight stored in {kind}" if kind else row.reason
            return replace(row, reason=reason)
        copied = row.name.endswith(".original_module")  # PEFT trains a copy of it in its place
        single = id(module.weight) not in self._shared and id(module) not in self._adapted
        if self.precision.frozen != "fp8" or not row.frozen or copied or not single:
            return row
        if id(module) in self._typed:
            why = "weight kept: its module casts activations to the weight's type"
            return replace(row, reason="; ".join(filter(None, (row.reason, why))))
        self._check_method(row, module)
        reason = f"frozen, stored in FP8 (per-{self._granularity} scale)"
        if isinstance(module, StoredMixin) and self._granularity not in module.granularities:
            reason += ", cast again from what the checkpoint holds"
        requested = f"{row.reason}; " if row.reason else ""
        return replace(row, stored=self._granularity, reason=requested + reason)

    def _check_method(self, row: LayerPlan, module: Any) -> None:
        """Raise `StorageNotComputeError` for a stored layer that is adapted by another method."""
        if method := self._other_methods.get(id(module)):
            raise cannot_adapt_codes(method, row.name)

    def serves(self, owner: nn.Module, *, frozen: bool) -> bool:
        """True if a parameter of this module would be stored in FP8."""
        return self.precision.frozen == "fp8" and frozen and are_served_experts(owner)

    def parameter_row(self, row: LayerPlan, owner: nn.Module) -> LayerPlan:
        """The row of a parameter: experts are stored like linear layers."""
        if row.compute != "fp8" or not self.serves(owner, frozen=row.frozen):
            return row
        reason = f"experts: frozen, stored in FP8 (per-{self._granularity} scale)"
        return replace(row, stored=self._granularity, reason=reason)


def _plan_layer(of: Record, cannot: str, choices: Choices) -> LayerPlan:
    name, shape, role, precision = of.name, of.shape, of.role, choices.precision
    frozen = not of.weight.requires_grad
    # Low-rank adapters follow the run, whatever holds them.
    choice = choices.of(name) if name in choices.parts else None
    wanted = choice.compute if choice is not None else precision.compute
    if wanted != "fp8":
        # What autocast gives it anyway, for which no class has to change.
        usual = "bf16" if precision.compute == "fp8" else precision.compute
        reason = choice.reason if choice is not None else AS_CONFIGURED
        return LayerPlan(name, shape, role, frozen, wanted, reason, override=wanted != usual)
    reason = choice.reason if choice is not None else ""  # `keep` and the like never choose FP8
    if reason and cannot:
        raise PlanError(
            f"FP8 was chosen for {name!r}, which cannot take it",
            where=reason,
            why=cannot,
            fix="~precision.map, or bf16 for this layer",
        )
    # A choice for this very layer overrules the policy: of the head, say.
    high = cannot if reason else of.why_high or cannot
    if high:
        return LayerPlan(name, shape, role, frozen, "bf16", high)
    kept = precision.gemms_kept_high
    gemms: dict[Gemm, str] = {gemm: "bf16" if gemm in kept else precision.low for gemm in GEMMS}
    return LayerPlan(name, shape, role, frozen, "fp8", reason, tuple(gemms.items()))


def _check_override(row: LayerPlan, cannot: str) -> None:
    """Refuse a type of its own where the layer's forward cannot be replaced."""
    if row.override and cannot:
        raise PlanError(
            f"{row.compute} was chosen for {row.name!r}, which cannot take it",
            where=row.reason,
            why=f"{cannot}: it cannot be made to compute in a type of its own",
            fix="~precision.map, or for this weight what the rest of the model has",
        )


def _as_parameter(row: LayerPlan) -> LayerPlan:
    """The row of a parameter, planned by the rules of a linear layer."""
    reason = row.reason
    if row.compute == "fp8":
        reason = reason or "parameter that multiplies"
    elif reason == AS_CONFIGURED:
        reason = "multiplied as its module does it"
    return replace(row, reason=reason, kind="parameter")


def _part(of: Record, in_head: bool) -> Part:
    if of.role == "head" or in_head:  # a copy of the head beside adapters is one too
        return "output"
    return "router" if of.role == "router" else part_of(of.name)
