"""What the matmuls of one micro-step are fed: range, overflow, underflow and noise by layer group.

A linear layer multiplies three operands: the input x [M, K], the weight w [N, K] and the gradient
of the output g [M, N]. Hooks see them in high precision, as every engine gets them before its cast.
Of each:

* `amax`, the largest magnitude, over the whole operand;
* where the layer runs in FP8 (or FP4), what the cast of the recipe in force does to up to
  `SAMPLE_ROWS` rows, evenly spread, by the project's own reference rule and therefore alike for
  every engine (of x and w the cast for fprop, of g that for dgrad): the share of values that
  saturate (`overflow`) and of those that are not zero and become zero (`underflow`), and the
  signal-to-noise ratio of the quantised operand, 10 log10(Σx² / Σ(x - x̂)²) dB
  (a weight held as codes has an amax, and nothing to lose);
* with delayed scaling, which uses the scale of yesterday's amax, `scale_drift`: |log2(scale in
  force / scale that this amax asks for)|, and `scale_change`: |log2(scale / scale when last seen)|.

A declared parameter that multiplies (`finetune.precision.parameters`) is judged by its products:
its weight is the matrix of one product, one expert's for instance. Of each such parameter the first
`PRODUCTS` products are looked at. Adapters that run inside their base layer's call (`adapters`)
show their weights only: their input and their gradient are the base layer's.

Looking on changes nothing: hooks only read, random rounding draws from a generator of its own, an
activation that checkpointing computes twice is counted once, and nothing is hooked outside
`watching()`. One exception is told: layers under `torch.compile` cannot be looked into, so a part
of them, another each time, runs uncompiled in a watched micro-step.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from finetune.config.schema import Gemm, PrecisionConfig
from finetune.precision.backends.base import compute_dtype, in_backward
from finetune.precision.convert import Conversion
from finetune.precision.formats import amax, scale_from_amax
from finetune.precision.layers import is_conv1d
from finetune.precision.parameters import ParameterMixin
from finetune.precision.planner import LayerPlan, PrecisionPlan
from finetune.precision.scaling import BLOCK, NV_BLOCK, Formats, Operand
from finetune.precision.weights import StoredMixin
from finetune.training.health.groups import groups_of
from finetune.training.health.tallies import OperandHealth, Tallies, Tally, inspect_operand

SAMPLE_ROWS = 256
PRODUCTS = 8
COMPILED_SHARE = 4
"""Of compiled layers one in so many is looked into at a time: uncompiled layers are slow."""


@dataclass
class OperandWatch:
    """Watches a model's operands. Enter `watching()` around one forward and backward.

    Attributes:
        model: the root module, converted or not.
        conversion: its plan and engine, None where no precision was set up.
        grouping: from the model and its plan to the group of each module; `groups_of`, or finer.
        tallies: (group, operand) -> what was seen in the last `watching()`.
    """

    model: nn.Module
    conversion: Conversion | None
    grouping: Callable[[nn.Module, PrecisionPlan | None], dict[str, str]] = groups_of
    tallies: Tallies = field(default_factory=dict)
    _turn: int = 0
    _scales: dict[tuple[str, Operand], float] = field(default_factory=dict)
    _scales_before: dict[tuple[str, Operand], float] = field(default_factory=dict)
    _amaxes: list[tuple[tuple[str, Operand], Tensor]] = field(default_factory=list)
    _unseen: dict[str, nn.Module] = field(default_factory=dict)
    _groups: dict[str, str] = field(default_factory=dict)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Look at every operand inside the block; `tallies` holds the result afterwards."""
        plan = self.conversion.plan if self.conversion is not None else None
        self._groups = self.grouping(self.model, plan)
        low = {layer.name: low_operands(layer) for layer in plan.fp8_layers} if plan else {}
        modules = {n: m for n, m in self.model.named_modules() if n in self._groups}
        self.tallies, self._amaxes, self._unseen = {}, [], dict(modules)
        self._scales_before |= self._scales
        handles = [
            module.register_forward_hook(
                partial(self._after, name, low.get(name, ())), with_kwargs=True
            )
            for name, module in modules.items()
        ]
        products = [_Products(self, o) for o in modules.values() if isinstance(o, ParameterMixin)]
        try:
            with self._uncompiled():
                yield
        finally:
            for handle in handles:
                handle.remove()
            for observer in products:
                observer.close()
        with torch.no_grad():
            for name, module in self._unseen.items():  # TRL multiplies by the head's weight itself
                self._see_weights(name, module, ())
        self._settle()

    @contextlib.contextmanager
    def _uncompiled(self) -> Iterator[None]:
        """Every fourth compiled layer, plain: hooks inside a compiled layer are not called."""
        compiled = list(self.conversion.compiled) if self.conversion is not None else []
        share = min(COMPILED_SHARE, len(compiled)) or 1
        chosen = compiled[self._turn % share :: share]
        self._turn += 1
        calls = [module._compiled_call_impl for module in chosen]
        for module in chosen:
            module._compiled_call_impl = None
        try:
            yield
        finally:
            for module, call in zip(chosen, calls, strict=True):
                module._compiled_call_impl = call

    def _after(
        self,
        name: str,
        low: Collection[Operand],
        module: nn.Module,
        args: Any,
        kwargs: Any,
        output: Any,
    ) -> None:
        if not in_backward():  # a recomputation computes the same operands again
            with torch.no_grad():
                self._unseen.pop(name, None)
                x = _first_tensor((*args, *kwargs.values()))
                if x is not None:
                    self._see(name, "x", module, x.to(compute_dtype(x)), "x" in low)
                self._see_weights(name, module, low)
        y = _first_tensor(output if isinstance(output, (tuple, list)) else (output,))
        if y is not None and y.requires_grad:
            # Also in a recomputation: there, or in the first forward, is the graph that is used.
            y.register_hook(partial(self._see_gradient, name, low, module))

    def _see_weights(self, name: str, module: nn.Module, low: Collection[Operand]) -> None:
        if isinstance(module, StoredMixin):  # what codes stand for is multiplied without loss
            self._see(name, "w", module, module.dequantise(), False)
        for own, parameter in module.named_parameters(recurse=False):
            w = getattr(parameter, "_local_tensor", parameter).detach()
            if own == "bias" or not w.is_floating_point() or w.is_meta or not w.numel():
                continue  # quantised storage has no magnitudes of its own
            is_low = "w" in low and own == "weight"
            self._see(name, "w", module, w.t() if is_low and is_conv1d(type(module)) else w, is_low)

    def _see_gradient(
        self, name: str, low: Collection[Operand], module: nn.Module, g: Tensor
    ) -> None:
        with torch.no_grad():
            self._see(name, "g", module, g, "g" in low)

    def see_product(self, layer: LayerPlan, engine: Any, x: Tensor, w: Tensor, y: Tensor) -> None:
        """Look at one product `y = x wᵀ` of a declared parameter: x [M, K], w [N, K], y [M, N].

        Args:
            layer: the parameter's row in the plan.
            engine: what holds its scales, as a converted layer would.
        """
        low = low_operands(layer)
        self._groups.setdefault(layer.name, self._groups[layer.name.rpartition(".")[0]])
        if not in_backward():
            with torch.no_grad():
                self._see(layer.name, "x", engine, x.to(compute_dtype(x)), "x" in low)
                self._see(layer.name, "w", engine, w.detach(), "w" in low)
        if y.requires_grad:
            y.register_hook(partial(self._see_gradient, layer.name, low, engine))

    def _see(
        self, name: str, operand: Operand, module: nn.Module, value: Tensor, is_low: bool
    ) -> None:
        key = (self._groups[name], operand)
        tally = self.tallies.setdefault(key, Tally())
        if not value.numel():
            return  # an expert without tokens
        if not is_low:
            self._amaxes.append((key, amax(value)))
            return
        engine: Any = module.fp8_backend
        rows, precision = engine.as_cast(module, operand, value.reshape(-1, value.shape[-1]))
        scale = engine.scale_in_force(module, operand)
        seen = inspect_sample(rows, operand, precision, scale)
        tally.add(name, rows.numel(), seen)
        if scale is not None:
            self._see_scale(name, operand, tally, float(scale), seen.amax)

    def _see_scale(
        self, name: str, operand: Operand, tally: Tally, scale: float, amax: float
    ) -> None:
        assert self.conversion is not None
        precision = self.conversion.plan.precision
        if amax > 0 and math.isfinite(amax):
            fmt, pow2 = Formats.of(precision)[operand], precision.pow2_scales
            wanted = float(scale_from_amax(torch.tensor(amax), fmt, pow2=pow2))
            lag = abs(math.log2(scale * 2**precision.margin / wanted))
            tally.drift = max(tally.drift or 0.0, lag)
        before = self._scales_before.get((name, operand))
        if before is not None:
            tally.change = max(tally.change or 0.0, abs(math.log2(scale / before)))
        self._scales[(name, operand)] = scale

    def _settle(self) -> None:
        """Fetch the amaxes of layers in high precision, all at once: each fetch waits for a GPU."""
        for device in {value.device for _, value in self._amaxes}:
            here = [(key, value) for key, value in self._amaxes if value.device == device]
            values = torch.stack([value for _, value in here]).tolist()
            for (key, _), value in zip(here, values, strict=True):
                self.tallies[key].amax = max(self.tallies[key].amax, value)
        self._amaxes.clear()


class _Products:
    """Shows a watch the products of one module's planned parameters."""

    def __init__(self, watch: OperandWatch, owner: ParameterMixin) -> None:
        self._watch, self._owner = watch, owner
        self._seats = {seat.layer.name: seat for seat in owner.fp8_seats}
        self._seen: Counter[tuple[str, bool]] = Counter()
        owner.fp8_observers.append(self)

    def close(self) -> None:
        self._owner.fp8_observers.remove(self)

    def enter(self, name: str, shape: tuple[int, int]) -> None:
        """A product begins; what it multiplies is seen when it has ended."""

    def leave(self) -> None:
        """It has ended."""

    def watch(self, name: str, shape: tuple[int, int], y: Tensor, inputs: tuple[Any, ...]) -> None:
        """The product `y` of `inputs`: tokens, matrix and bias."""
        seat, (x, w, _) = self._seats[name], inputs
        linear: Any = seat.linear  # the engine's, bound to what holds its scales
        self._seen[name, in_backward()] += 1
        if self._seen[name, in_backward()] <= PRODUCTS:
            self._watch.see_product(seat.layer, linear.args[0], x, w, y)


def inspect_sample(
    rows: Tensor, operand: Operand, precision: PrecisionConfig, scale: Tensor | None = None
) -> OperandHealth:
    """`inspect_operand` of some rows of a matrix [R, C], scaled as the whole matrix would be.

    Rows are taken in runs as high as the tiles that share a scale. Where all of a tensor shares
    one, it is that of the whole tensor; NVFP4's outer one is kept by the run that holds the amax.

    Args:
        rows: the contracted dimension last.
        operand: which one it is.
        precision: with the scaling rule and format.
        scale: the delayed scale in force, float32.
    """
    largest = amax(rows)
    run = {"blockwise": BLOCK, "nvfp4": NV_BLOCK}.get(precision.scaling, 1) if operand == "w" else 1
    if scale is None and precision.scaling in ("tensorwise", "delayed"):
        fmt = Formats.of(precision)[operand]
        scale = scale_from_amax(largest, fmt, pow2=precision.pow2_scales)
    every = -(-rows.shape[0] // max(SAMPLE_ROWS, run))
    sample = rows
    if every > 1:
        first = torch.arange(0, rows.shape[0], run, device=rows.device)[::every]
        if precision.scaling == "nvfp4":
            top = rows.abs().amax(1).argmax() // run * run
            first = torch.cat((first, top[None])).unique()
        index = (first[:, None] + torch.arange(run, device=rows.device)).flatten()
        sample = rows[index[index < rows.shape[0]]]
    return replace(inspect_operand(sample, operand, precision, scale), amax=float(largest))


_GEMMS: dict[Operand, tuple[Gemm, Gemm]] = {
    "x": ("fprop", "wgrad"),
    "w": ("fprop", "dgrad"),
    "g": ("dgrad", "wgrad"),
}


def low_operands(layer: LayerPlan) -> list[Operand]:
    """The operands of a converted layer that some GEMM of it takes quantised."""
    low = {gemm for gemm in layer.gemms if layer.precision_of(gemm) in ("fp8", "fp4")}
    return [operand for operand, gemms in _GEMMS.items() if low.intersection(gemms)]


def _first_tensor(values: Iterable[Any]) -> Tensor | None:
    """The first floating tensor: of arguments the input, of a tuple the output."""
    return next((v for v in values if isinstance(v, Tensor) and v.is_floating_point()), None)
