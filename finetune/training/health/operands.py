"""Operand health of one micro-step: range, overflow, underflow and quantization noise by layer
group.

A linear layer multiplies three operands: the input x [M, K], the weight w [N, K] and the output
gradient g [M, N]. Hooks read them in high precision, as every engine receives them, and report:

* `amax`, the largest magnitude of the whole operand;
* for FP8 or FP4 layers, the effect of the cast on up to `SAMPLE_ROWS` evenly spread rows, by the
  reference rule and thus alike for every engine (x and w as fprop casts them, g as dgrad does):
  shares of values that saturate (`overflow`) and of nonzero values that become zero (`underflow`),
  and the signal-to-noise ratio 10 log10(Σx² / Σ(x - x̂)²) dB (weights stored as codes report only
  an amax).

*Groups.* Layers of one kind share a row: `attn`, `mlp`, `experts`, `embed`, `norm`, `head`,
`adapter`, `router`. Other modules take their parent's name (`mixer`, `encoder`), modules with GEMMs
of their own take theirs (`block`). Over the layers of a group and the processes of a run: amax by
the maximum, shares over all elements, the ratio by its mean and its worst layer.

Of a declared parameter (`finetune.precision.cases.parameters`) the first `PRODUCTS` GEMMs are
judged, each weight being the matrix of one GEMM, e.g. one expert's. Adapters fused with their base
layer show their weights only.

Observing changes nothing: stochastic rounding draws from its own generator, recomputed activations
count once, hooks exist only inside `watching()`. Exception: hooks cannot look into layers under
`torch.compile`, so a rotating part of them runs uncompiled in an observed micro-step.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from finetune.precision.cases.parameters import ParameterMixin
from finetune.precision.convert import Conversion
from finetune.precision.engines.observers import in_backward
from finetune.precision.facts import Gemm
from finetune.precision.model.choices import part_of
from finetune.precision.model.compiling import recomputed
from finetune.precision.model.layers import HEADS, Role, declared_matmuls, is_conv1d, is_low_rank
from finetune.precision.model.plan import LayerPlan, PrecisionPlan
from finetune.precision.numbers.formats import amax, scale_from_amax, snr_db
from finetune.precision.numbers.gemm import Quantized, compute_dtype
from finetune.precision.numbers.scaling import (
    Operand,
    formats_of,
    make_rule,
    multiply_in_bf16,
    scaled,
    to_codes,
)
from finetune.precision.proof.movement import local_part
from finetune.precision.settings import PrecisionConfig
from finetune.precision.stored.linear import StoredMixin
from finetune.runs.receipt import name_parts

SAMPLE_ROWS = 256
PRODUCTS = 8
COMPILED_SHARE = 4
"""Compiled layers are observed one in this many at a time: uncompiled layers are slow."""
GEMMS: dict[Operand, tuple[Gemm, Gemm]] = {
    "x": ("fprop", "wgrad"),
    "w": ("fprop", "dgrad"),
    "g": ("dgrad", "wgrad"),
}
"""GEMMs that multiply each operand."""
EXACT_DB = 144.5
"""Reported for a cast without noise: 20 log10(2^24), the resolution of float32."""


def group_of(name: str, module: nn.Module, role: Role | None = None) -> str:
    """Group of one module; `role` is the planned role of a linear layer."""
    parts = name_parts(name)
    if role in ("head", "adapter", "router", "tower"):
        return role
    if is_low_rank(name) or "modules_to_save" in parts:
        return "adapter"
    if isinstance(module, nn.Embedding):
        return "embed"
    if "norm" in type(module).__name__.lower():
        return "norm"
    if "expert" in name.lower():
        return "experts"
    # Deeper down, a layer of such a name (a classifier in a block) is an ordinary one.
    if parts and parts[-1] in HEADS and len(parts) <= 3:
        return "head"
    if declared_matmuls(module):  # the module multiplies itself, so it is the group
        return part_of(name) or parts[-1]
    return part_of(name) or (parts[-2] if len(parts) > 1 else "other")


def groups_of(model: nn.Module, plan: PrecisionPlan | None) -> dict[str, str]:
    """Map every module that has parameters of its own to its group."""
    layers = plan.layers if plan is not None else ()
    roles: dict[str, Role] = {layer.name: layer.role for layer in layers}
    return {
        name: group_of(name, module, roles.get(name))
        for name, module in model.named_modules()
        if any(True for _ in module.parameters(recurse=False))
    }


@dataclass
class OperandSums:
    """Effect of quantization on one operand of a layer, or of the layers of a group.

    Attributes:
        amax: largest magnitude before the cast.
        elements: number of values judged by a cast, 0 without one.
        overflow, underflow: number of these that saturated, and that became zero and were not.
        snr_db: signal-to-noise ratios in dB, summed over layers.
        layers: number of layers in that sum; one of zeros has no ratio.
        worst: lowest ratio in dB, and its layer.
    """

    amax: float = 0.0
    elements: int = 0
    overflow: int = 0
    underflow: int = 0
    snr_db: float = 0.0
    layers: int = 0
    worst: tuple[float, str] = (math.inf, "")

    def merge(self, other: OperandSums) -> None:
        """Add another layer, or the same group of another process."""
        self.amax = max(self.amax, other.amax)
        self.worst = min(self.worst, other.worst)
        for name in ("elements", "overflow", "underflow", "snr_db", "layers"):
            setattr(self, name, getattr(self, name) + getattr(other, name))


@torch.no_grad()
def inspect_operand(
    x: Tensor,
    operand: Operand,
    precision: PrecisionConfig,
    scale: Tensor | None = None,
    name: str = "",
) -> OperandSums:
    """Health of one operand under the reference cast of fprop (x, w) or dgrad (g).

    Args:
        x: [rows, columns], the contracted dimension last.
        scale: the delayed scale in use, float32. Without it delayed scaling is treated as
            tensorwise: the scale follows from this amax.
        name: the layer's.
    """
    if scale is None:
        # Its scales are known from earlier steps alone, and none was given: that of the tensor
        # itself is the nearest.
        update = {"scaling": "tensorwise"} if precision.facts.has_history else {}
        cast = make_rule(precision.model_copy(update=update)).cast(operand, x, 1)
    else:
        fmt = formats_of(precision)[operand]
        codes = to_codes(scaled(x, scale), fmt, saturate=True)
        cast = Quantized(codes, scale.reciprocal(), fmt, multiply_in_bf16(precision))
    back, wide = cast.dequantize(), x.float()
    lost = (cast.codes == 0) & (wide != 0)
    # Rounding moves a value by half a unit at most; a value that moved further down saturated.
    half_unit = 2.0 ** -(cast.fmt.mantissa + 1)
    at_limit = cast.codes.abs() == cast.fmt.max
    saturated = at_limit & (back.abs() < wide.abs() * (1 - half_unit))
    found = OperandSums(float(amax(x)), x.numel(), int(saturated.sum()), int(lost.sum()))
    # A cast without noise has an infinite ratio, which no JSON number holds.
    ratio = min(snr_db(wide, back), EXACT_DB)
    if not math.isnan(ratio):  # all zeros: no ratio
        found.snr_db, found.layers, found.worst = ratio, 1, (ratio, name)
    return found


def inspect_sample(
    rows: Tensor,
    operand: Operand,
    precision: PrecisionConfig,
    scale: Tensor | None = None,
    name: str = "",
) -> OperandSums:
    """Health of sampled rows of a matrix [R, C], scaled as the whole matrix would be.

    Rows come in runs as high as the tiles that share a scale. Tensorwise scales use the amax of the
    whole matrix; NVFP4's outer scale is kept by including the run with the amax. Example: R = 4096
    rowwise takes every 16th row; blockwise weights take every 16th run of 128 rows.
    """
    largest = amax(rows)
    facts = precision.facts
    run = facts.weight_rows if operand == "w" else 1
    if scale is None and facts.whole and not facts.block:
        fmt = formats_of(precision)[operand]
        # A scale of the whole tensor has to be known from all rows, of which a sample is then cast.
        scale = scale_from_amax(largest, fmt, pow2=precision.pow2_scales)
    every, sample = -(-rows.shape[0] // max(SAMPLE_ROWS, run)), rows
    if every > 1:
        first = torch.arange(0, rows.shape[0], run, device=rows.device)[::every]
        if facts.whole and facts.block:
            # The row that sets the tensor's own scale has to be in the sample.
            top = rows.abs().amax(1).argmax() // run * run
            first = torch.cat((first, top[None])).unique()
        index = (first[:, None] + torch.arange(run, device=rows.device)).flatten()
        sample = rows[index[index < rows.shape[0]]]
    found = inspect_operand(sample, operand, precision, scale, name)
    found.amax = float(largest)
    return found


Key = tuple[str, Operand]
GroupSums = dict[Key, OperandSums]
"""Maps (group, operand) to its sums."""


def health_row(sums: GroupSums) -> dict[str, float]:
    """Logged metrics such as `health/attn/x_amax`: plain finite floats."""
    row: dict[str, float] = {}
    for (group, operand), of in sorted(sums.items()):
        at = f"health/{group}/{operand}"
        row[f"{at}_amax"] = of.amax
        if of.elements:
            row[f"{at}_overflow"] = of.overflow / of.elements
            row[f"{at}_underflow"] = of.underflow / of.elements
        if of.layers:
            row[f"{at}_snr_db"] = of.snr_db / of.layers
            row[f"{at}_worst_snr_db"] = of.worst[0]
    return {key: value for key, value in row.items() if math.isfinite(value)}


def merge_sums(parts: Iterable[GroupSums]) -> GroupSums:
    """Combine the sums of several processes."""
    whole: GroupSums = {}
    for part in parts:
        for key, sums in part.items():
            whole.setdefault(key, OperandSums()).merge(sums)
    return whole


class OperandWatch:
    """Observer of a model's operands. Enter `watching()` around one forward and backward.

    Attributes:
        sums: result of the last `watching()`.
        groups: group of each module with parameters, as of then.
    """

    def __init__(
        self,
        model: nn.Module,
        conversion: Conversion | None,
        grouping: Callable[[nn.Module, PrecisionPlan | None], dict[str, str]] = groups_of,
    ) -> None:
        """Observe a model, with its plan and engine if it has them, by groups of modules."""
        self.model, self.conversion, self.grouping = model, conversion, grouping
        self.sums: GroupSums = {}
        self.groups: dict[str, str] = {}
        self._turn = 0

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Observe every operand inside the block; `sums` has the result afterwards."""
        plan = self.conversion.plan if self.conversion is not None else None
        self.groups = self.grouping(self.model, plan)
        # Layers and declared parameters by name: their modules, and the operands cast to low bits.
        self._modules = {n: m for n, m in self.model.named_modules() if n in self.groups}
        self._low = {x.name: low_operands(x) for x in plan.fp8_layers} if plan else {}
        self.sums, self._unseen = {}, set(self._modules)
        self._amaxes: list[tuple[Key, Tensor]] = []
        self._products: Counter[tuple[str, bool]] = Counter()
        with contextlib.ExitStack() as undo:
            compiled = self._uncompile_some(undo)
            for name, module in list(self._modules.items()):
                if module in compiled:
                    continue
                hook = partial(self._after, name)
                undo.callback(module.register_forward_hook(hook, with_kwargs=True).remove)
                # Its products are calls within one forward, which hooks of modules do not see.
                if isinstance(module, ParameterMixin):
                    for each in module.fp8_parameters:
                        linear: Any = each.linear  # bound to the module with its scales
                        self._modules[each.layer.name] = linear.args[0]
                        self.groups.setdefault(each.layer.name, self.groups[name])
                    module.fp8_observers.append(self)
                    undo.callback(module.fp8_observers.remove, self)
            yield
        with torch.no_grad():
            for name in sorted(self._unseen):  # e.g. the head: TRL multiplies by its weight
                self._see_weights(name, ())
        self._fetch_amaxes()

    def _uncompile_some(self, undo: contextlib.ExitStack) -> set[nn.Module]:
        """Run every fourth compiled layer eagerly, to be observed; returns what the others hold.

        Graphs do not call the hooks of modules inside, and one made while there are hooks would
        break at each, and stay so: torch does not look at hooks again (`skip_nnmodule_hook_guards`,
        torch 2.13). The observed layers are checkpointed, to save no more than the others.
        """
        compiled = list(self.conversion.compiled) if self.conversion is not None else []
        share = min(COMPILED_SHARE, len(compiled)) or 1
        # In turn, so that after a few intervals all layers have been looked at.
        observed = compiled[self._turn % share :: share]
        for module in observed:
            undo.callback(setattr, module, "_compiled_call_impl", module._compiled_call_impl)
            module._compiled_call_impl = None
        undo.enter_context(recomputed(observed))
        self._turn += 1
        return {m for layer in compiled if layer not in observed for m in layer.modules()}

    def _after(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        low = self._low.get(name, ())
        if not in_backward():  # recomputation repeats the same operands
            with torch.no_grad():
                self._unseen.discard(name)
                x = _first_tensor((*args, *kwargs.values()))
                if x is not None:
                    self._see(name, "x", x.to(compute_dtype(x)), low)
                self._see_weights(name, low)
        # Also in a recomputation: the graph of either forward may be the one in use.
        y = _first_tensor(output if isinstance(output, tuple | list) else (output,))
        if y is not None:
            self._see_gradient_of(y, name)

    def _see_weights(self, name: str, low: Collection[Operand]) -> None:
        module = self._modules[name]
        # Stored codes are multiplied without further loss. Rows of a shard may split a tile.
        if isinstance(module, StoredMixin) and not isinstance(module.weight, DTensor):
            self._see(name, "w", module.weight_in(), ())
        for own, parameter in module.named_parameters(recurse=False):
            if own == "weight":  # of a layer that holds codes another stands there
                parameter = getattr(getattr(module, "fp8_master", None), "parameter", parameter)
            w = local_part(parameter).detach()
            if own == "bias" or not w.is_floating_point() or w.is_meta or not w.numel():
                continue  # quantized storage has no magnitudes of its own
            is_low = "w" in low and own == "weight"
            w = w.t() if is_low and is_conv1d(type(module)) else w
            self._see(name, "w", w, low if own == "weight" else ())

    def _see_gradient_of(self, y: Tensor, name: str) -> None:
        def hook(g: Tensor) -> None:
            with torch.no_grad():
                self._see(name, "g", g, self._low.get(name, ()))

        if y.requires_grad:
            y.register_hook(hook)

    def enter(self, name: str, shape: tuple[int, int], backward: bool = False) -> None:
        """Ignored: a GEMM of a declared parameter begins."""

    def leave(self) -> None:
        """Ignored: the GEMM ended."""

    def watch(self, name: str, shape: tuple[int, int], y: Tensor, inputs: tuple[Any, ...]) -> None:
        """Observe the GEMM `y` of `inputs` (tokens, matrix, bias): [M, K] @ [K, N]."""
        self._products[name, in_backward()] += 1
        if self._products[name, in_backward()] > PRODUCTS:
            return
        if not in_backward():
            (x, w, *_), low = inputs, self._low.get(name, ())  # some have a bias
            with torch.no_grad():
                self._see(name, "x", x.to(compute_dtype(x)), low)
                self._see(name, "w", w.detach(), low)
        self._see_gradient_of(y, name)

    def _see(self, name: str, operand: Operand, value: Tensor, low: Collection[Operand]) -> None:
        """Add an operand of a layer; its cast is judged if it is among the `low` ones."""
        key: Key = (self.groups[name], operand)
        module = self._modules[name]
        sums = self.sums.setdefault(key, OperandSums())
        if not value.numel():
            return  # an expert without tokens
        # Put off: each fetch of a number waits for the device.
        if operand not in low:
            self._amaxes.append((key, amax(value)))
            return
        engine: Any = module.fp8_engine
        rows, precision = engine.as_cast(module, operand, value.reshape(-1, value.shape[-1]))
        scale = engine.scale_in_force(module, operand)
        sums.merge(inspect_sample(rows, operand, precision, scale, name))

    def _fetch_amaxes(self) -> None:
        """Fetch the amaxes of high-precision operands in one transfer: each fetch synchronizes."""
        for device in {value.device for _, value in self._amaxes}:  # masters are in host memory
            here = [(key, value) for key, value in self._amaxes if value.device == device]
            found = torch.stack([value for _, value in here]).tolist()
            for (key, _), largest in zip(here, found, strict=True):
                self.sums[key].merge(OperandSums(largest))
        self._amaxes.clear()


def low_operands(layer: LayerPlan) -> list[Operand]:
    """Operands of a converted layer that at least one GEMM takes quantized."""
    low = {gemm for gemm in layer.gemms if layer.precision_of(gemm) in ("fp8", "fp4")}
    return [operand for operand, gemms in GEMMS.items() if low.intersection(gemms)]


def _first_tensor(values: Iterable[Any]) -> Tensor | None:
    """First floating-point tensor: the input among arguments, the output of a tuple."""
    return next((v for v in values if isinstance(v, Tensor) and v.is_floating_point()), None)
