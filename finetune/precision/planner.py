"""The precision plan: for every linear layer, in which precision each of its GEMMs shall run.

A linear layer `y = x Wᵀ` with tokens M, inputs K and outputs N is three GEMMs in training:

    fprop  y[M,N]  = x[M,K] · Wᵀ[K,N]      contracts K
    dgrad  dx[M,K] = g[M,N] · W[N,K]       contracts N
    wgrad  dW[N,K] = gᵀ[N,M] · x[M,K]      contracts M

FP8 GEMMs want K and N to be multiples of 16 (cuBLASLt); M is padded at run time. The plan is made
over the whole model, which may be on the meta device, before anything is touched, and gives a
reason for each layer. High precision by policy: head, adapters and routers
(`finetune.precision.model.layers`) and what the user chose (`finetune.precision.model.choices`).
Embeddings and norms are no GEMMs; they are in the plan only where the user chose a type for them. A
parameter that multiplies without being a linear layer has a row of its own, in which N and K may
stand either way: its module decides which it contracts.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from torch import nn

from finetune.errors import PlanError, PrecisionError, StorageNotComputeError
from finetune.precision.facts import Gemm, Granularity
from finetune.precision.model.choices import Choices, Part, part_of
from finetune.precision.model.layers import (
    Record,
    are_served_experts,
    decoder_blocks,
    elementwise,
    head_modules,
    ids_giving_types,
    is_low_rank,
    linear_shape,
    past_forward_here,
    records,
    why_made_again,
    why_multiplied_past,
    why_not_aligned,
    why_own_forward,
)
from finetune.precision.model.plan import GEMMS, CastPlan, LayerPlan, PrecisionPlan
from finetune.precision.model.tree import Tree, named_trainable
from finetune.precision.settings import PrecisionConfig
from finetune.precision.stored.codes import Fp8Bits
from finetune.precision.stored.linear import StoredMixin, stored_as
from finetune.precision.stored.peft_methods import cannot_adapt_codes, other_method

OF_ENGINE = "Transformer Engine's layers own their weights; precision.backend=torchao takes it"
AS_CONFIGURED = "as configured"


def plan(
    model: nn.Module | Tree, precision: PrecisionConfig, found: list[Record] | None = None
) -> PrecisionPlan:
    """Choose the precision of every linear layer and declared parameter, with a reason.

    Args:
        model: any module, also on the meta device. Adapters must already be attached.
        precision: requested precision.
        found: its `records`, if the caller has made them.

    Raises:
        PlanError: a choice (`keep`, `map`, `first_n`, `last_n`) reaches nothing or cannot be
            honored, or FP8 was requested and no layer can take it.
        StorageNotComputeError: FP8 was requested and the model's weights are quantized.
    """
    tree = Tree.of(model)
    model, modules = tree.model, tree.named
    found = records(tree) if found is None else found
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
        blocks = decoder_blocks(tree, names, "precision.first_n, precision.last_n")
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
        # Experts that are stored are multiplied by our own forward, whatever the engine.
        if not storing.serves(each.owner, frozen=not each.weight.requires_grad):
            served = are_served_experts(each.owner)
            made_again = "" if served else why_made_again(modules, each.name, each.owner)
            past = made_again or why_multiplied_past(each.owner)
            cannot = past or (OF_ENGINE if precision.engine.owns_weights else cannot)
        row = _plan_layer(each, cannot, choices)
        _check_override(
            row, "its module multiplies by it, and only linear layers have a forward to replace"
        )
        if precision.fp8_params and row.compute == "fp8":
            raise PlanError(
                "fp8_params holds linear layers as codes, and this model multiplies by a parameter",
                where=each.name,
                why="its module reads the parameter itself, which would be in host memory",
                fix="~precision.fp8_params, or in high precision: precision.keep=["
                f"{each.name.rpartition('.')[0]}]",
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
    trained = {each.name for each in found if each.weight.requires_grad}
    if precision.fp8_params and not any(layer.name in trained for layer in result.fp8_layers):
        raise PlanError(
            "fp8_params was requested and no FP8 layer of this model trains",
            where="precision.fp8_params",
            why="it holds weights that train as FP8 codes, with their updates in host memory",
            fix="~precision.fp8_params; a base under adapters is held as codes by "
            "precision.frozen=fp8",
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


def refuse_half_weights(model: nn.Module | Tree) -> None:
    """Raise `PrecisionError` unless all trainable weights are float32; also on the meta device."""
    half = {n: p.dtype for n, p in named_trainable(model).items() if p.itemsize < 4}
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
        self._granularity: Granularity = precision.facts.stored or "tensor"

    def row(self, row: LayerPlan, module: Any) -> LayerPlan:
        """The row of a layer whose weight is stored in FP8 if it is frozen and computes so."""
        if stored_as(module):
            self._check_method(row, module)
        if row.compute != "fp8":
            kind = stored_as(module)
            reason = f"{row.reason}; weight stored in {kind}" if kind else row.reason
            return replace(row, reason=reason)
        if self.precision.fp8_params:
            stored = "held as FP8 codes, master in host memory"
            return replace(row, reason="; ".join(filter(None, (row.reason, stored))))
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
