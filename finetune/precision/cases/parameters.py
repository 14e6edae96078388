"""FP8 for weights that are plain parameters of a module, and no linear layer.

There is no module to swap, so the model's own forward asks for the product, and its class tells the
plan which parameters are multiplied so:

    class Block(nn.Module):
        fp8_matmuls: ClassVar[tuple[str, ...]] = ("encoder",)

        def forward(self, x):
            return finetune.fp8_matmul(x, self.encoder)

The module that holds a planned parameter changes class, and while its forward runs `fp8_matmul`
finds the parameter there. The engine's linear function multiplies, in 2-D products:

    w [K, N]           x [..., M, K]       one
    w [E, K, N]        x [..., E, M, K]    one for each matrix of the stack
    w [E, K, N]        x [..., M, K]       one with E·N outputs: dgrad sums over E inside the GEMM
    w [E, K, N], offs  x [S, K] sorted     one for each expert that has tokens

Everywhere else it is `x @ w`. So that this never happens in silence, an error says if a prepared
model multiplies by a parameter that its class does not declare, or by a planned one outside of its
module's forward; a declared parameter that is multiplied by `@`, or as a copy, fails the proof.

Limits: `torch.compile` leaves these forwards out, since experts' tokens are counted and parameters
are found by what they are. Parts that are checkpointed *inside* the forward are recomputed outside
of it, an error: checkpoint the module or its parent. Tensor parallel weights (DTensors) are
refused; FSDP2 shows whole ones during the forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.weak import WeakTensorKeyDictionary

from finetune.errors import ConversionError
from finetune.precision.cases.case import Site, Swap
from finetune.precision.engines.base import Engine
from finetune.precision.engines.observers import (
    CallCount,
    ObservedMixin,
    Owner,
    multiplying,
    tensors_of,
)
from finetune.precision.model.layers import ATTRIBUTE, alignment
from finetune.precision.model.plan import LayerPlan
from finetune.precision.numbers.gemm import compute_dtype

Product = Callable[[Tensor, Tensor], Tensor]
"""x [..., K], w [N, K] -> y [..., N]."""
PLAIN = (nn.Parameter, FakeTensor)
"""Parameter types that have memory of their own, or pretend to (fake tensors of rehearsals)."""


def fp8_matmul(x: Tensor, w: Tensor, offs: Tensor | None = None) -> Tensor:
    """Multiply tokens by a parameter of a module, in FP8 where the model's plan has it so.

    In training of a model that was prepared in FP8, all three GEMMs of the product run as those of
    a linear layer with this weight, to the bit. Elsewhere (not prepared, in evaluation, or where
    the plan keeps the parameter high) it is `torch.matmul(x, w)`, or a grouped product in the type
    of `x` or of autocast.

        class Block(nn.Module):
            fp8_matmuls = ("encoder",)  # for the plan: what is multiplied so

            def forward(self, x):
                return finetune.fp8_matmul(x, self.encoder)

    Args:
        x: tokens [..., M, K]; for a stack [..., E, M, K], or [..., M, K] for all of its matrices.
        w: the parameter or a view of it, no copy: [K, N], or a stack of matrices [E, K, N].
            `self.weight.mT` for one that is held as [N, K], `self.experts[i]` for one of a stack.
        offs: int [E], for tokens x [S, K] sorted by expert and a stack: the end of each expert's
            rows, as in `torch.nn.functional.grouped_mm`. Rows past the last end come out as 0.

    Returns:
        [..., M, N]; of a stack [..., E, M, N]; with `offs` [S, N].

    Raises:
        ConversionError: shapes that are none of these; and in a model prepared in FP8, a parameter
            that is not in `fp8_matmuls` of its class, a planned one outside of its module's
            forward, or a view of it whose K or N is no multiple of 16 (32 for MXFP8 and NVFP4).
    """
    _check_shapes(x, w, offs)
    product = None if torch.compiler.is_compiling() else _planned_product(w)
    if offs is not None:
        if product is None:
            dtype = compute_dtype(x)
            return grouped_mm(x.to(dtype), w.to(dtype), offs)
        return _grouped(x, w, group_sizes(offs, x.shape[0]), product)
    if product is None:
        return torch.matmul(x, w)
    if w.dim() == 2:
        return product(x, w.mT)  # [M, K] @ [K, N]
    return _stacked(x, w, product)


def grouped_mm(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """Rows x [S, C] sorted by expert times w [E, C, D], in the type of `w`."""
    from transformers.integrations import moe

    return moe._grouped_mm(x, w, ends)


def _check_shapes(x: Tensor, w: Tensor, offs: Tensor | None) -> None:
    dims, stack = x.dim(), w.dim() == 3
    known = w.dim() == 2 or (stack and dims > 1)
    if stack and dims > 2 and w.shape[0] > 1:
        known = x.shape[-3] in (1, w.shape[0])
    if offs is not None:
        known = stack and dims == 2 and offs.shape == w.shape[:1]
    if not known or x.shape[-1:] != w.shape[-2:-1]:
        by = "" if offs is None else f", offs {list(offs.shape)}"
        raise ConversionError(
            "fp8_matmul cannot multiply operands of these shapes",
            where=f"x {list(x.shape)}, w {list(w.shape)}{by}",
            why="it takes x [..., M, K] and w [K, N]; x [..., E, M, K] or [..., M, K] and a stack "
            "w [E, K, N]; and with offs [E], x [S, K] and a stack",
            fix="view or transpose the parameter: self.weight.mT for one held as [N, K]",
        )


def _stacked(x: Tensor, w: Tensor, product: Product) -> Tensor:
    """x [..., E or 1, M, K], or [M, K], times w [E, K, N] -> [..., E, M, N]."""
    experts, k, n = w.shape
    x = x if x.dim() > 2 else x[None]
    if experts == 1:
        return product(x, w[0].mT)
    if x.shape[-3] == 1:
        y = product(x.squeeze(-3), w.mT.reshape(experts * n, k))  # [M, K] @ [K, E·N]
        return y.unflatten(-1, (experts, n)).movedim(-2, -3)
    # Unbound once, so that backward stacks gradients instead of adding E tensors of full size.
    pairs = zip(x.unbind(-3), w.unbind(0), strict=True)
    return torch.stack([product(x_MK, w_KN.mT) for x_MK, w_KN in pairs], dim=-3)


def _grouped(x: Tensor, w: Tensor, sizes: Sequence[int], product: Product) -> Tensor:
    """Tokens x [S, K] sorted by expert, with `sizes` rows each, times w [E, K, N] -> [S, N]."""
    *pieces, rest = x.split([*sizes, x.shape[0] - sum(sizes)])
    found = [
        product(x_MK, w_KN.mT)  # [M, K] @ [K, N], M the tokens of one expert
        for x_MK, w_KN in zip(pieces, w.unbind(0), strict=True)
        if x_MK.shape[0]
    ]
    if not found:  # keeps the result connected to both operands
        found = [product(pieces[0], w[0].mT)]
    return torch.cat([*found, found[0].new_zeros(rest.shape[0], w.shape[2])])


def group_sizes(ends: Tensor, rows: int) -> list[int]:
    """Number of rows of each group, given their ends; one synchronization with the device.

    Fake tensors, as in rehearsals, have no values: their groups are even.
    """
    groups = len(ends)
    if isinstance(ends, FakeTensor):
        return [rows // groups + (i < rows % groups) for i in range(groups)]
    values = ends.tolist()
    return [end - start for start, end in zip([0, *values[:-1]], values, strict=True)]


# ----------------------------------------------------------------- which parameter, in which plan


@dataclass
class PlannedParameter:
    """A planned parameter of a module, and its FP8 linear function."""

    layer: LayerPlan
    linear: Callable[..., Tensor]
    calls: CallCount = field(default_factory=CallCount)


_running: list[ParameterMixin] = []
"""Modules whose forward runs in FP8 now, on any thread: a parameter finds its own by identity."""

_prepared: WeakSet[Any] = WeakSet()
_kept = WeakTensorKeyDictionary()
"""Parameters that may be multiplied in high precision, as `_check_kept` found."""


def promise(conversion: Any) -> None:
    """Hold products to the plan of a `precision.convert.Conversion`, while it is applied."""
    _prepared.add(conversion)
    _kept.clear()


def _planned_product(w: Tensor) -> Product | None:
    """The FP8 product by the parameter that `w` is, or is a view of; None in high precision."""
    for owner in reversed(_running):
        for entry in owner.fp8_parameters:
            parameter = getattr(owner, entry.layer.local)
            if parameter is w or parameter is w._base:
                _check_aligned(entry.layer, w, alignment(owner.fp8_engine.precision))
                return partial(_multiply, owner, entry)
    whole = w if w._base is None else w._base
    if type(whole) in PLAIN and torch.is_grad_enabled() and whole not in _kept:
        _check_kept(whole)
    return None


def _multiply(owner: ParameterMixin, entry: PlannedParameter, x: Tensor, w: Tensor) -> Tensor:
    """x [..., K], w [N, K] -> [..., N]."""
    name, observers, shape = entry.layer.name, owner.fp8_observers, (w.shape[0], w.shape[1])
    rows = x.reshape(-1, x.shape[-1])  # [M, K]
    if not rows.shape[0]:  # an expert without tokens has nothing to scale
        dtype = compute_dtype(x)
        return x.to(dtype) @ w.to(dtype).t()  # [0, K] @ [K, N]
    entry.calls.count(rows)
    with multiplying(Owner(name, observers), w):
        y = entry.linear(rows, w, None)  # [M, K] @ [K, N]
    for observer in observers:
        observer.watch(name, shape, y, (rows, w))
    return y.unflatten(0, x.shape[:-1]) if x.dim() != 2 else y


def _check_aligned(layer: LayerPlan, w: Tensor, multiple: int) -> None:
    name = layer.name
    for label, size in zip("KN", w.shape[-2:], strict=True):
        if size % multiple:
            raise ConversionError(
                f"{name!r} is planned in FP8 and is multiplied in a way that cannot run in FP8",
                where=f"{name}, in fp8_matmul: w {list(w.shape)}",
                why=f"{label}={size} of this product is not a multiple of {multiple}",
                fix=f"multiply by more of the parameter; or precision.keep={name}",
            )


def _check_kept(parameter: Tensor) -> None:
    """Raise if a prepared model promises FP8 of this parameter, or does not know of the product."""
    for conversion in list(_prepared):
        model, plan = conversion.model, conversion.plan
        names = [n for n, p in model.named_parameters(remove_duplicate=False) if p is parameter]
        if not names or not conversion.is_applied or plan.precision.compute != "fp8":
            continue
        row = next((x for x in plan.layers if x.kind == "parameter" and x.name in names), None)
        if row is None:
            raise ConversionError(
                f"fp8_matmul multiplies by {names[0]!r}, which is not declared: it would stay high",
                where=names[0],
                why="the plan was made without this product, and no row of it says its precision",
                fix=f"{ATTRIBUTE} = (..., {names[0].rpartition('.')[2]!r}) in the class of its "
                "module, before the model is prepared; a linear layer is called instead",
            )
        if row.compute != "fp8" or row.stored:
            continue
        owner: Any = model.get_submodule(row.owner)
        # Not in FP8 now: in evaluation, or inside `finetune.disabled`.
        if not isinstance(owner, ParameterMixin) or not owner.fp8_engine.runs_low(owner):
            return
        raise ConversionError(
            f"{row.name!r} is planned in FP8 and is multiplied outside of its module's forward",
            where=f"{row.name}, in fp8_matmul",
            why="FP8 is on while the module runs that holds the parameter: another module's "
            "forward, and a part that is checkpointed inside of it, run in high precision",
            fix="multiply in the forward of the module that holds it, and checkpoint the whole "
            f"module; or precision.keep={row.name}",
        )
    _kept[parameter] = True


# ------------------------------------------------------------------------------------ the module


class ParameterMixin(ObservedMixin):
    """Mixin of a module whose planned parameters multiply in FP8 in training."""

    can_compile = False
    multiplies = True
    fp8_engine: Engine
    fp8_parameters: list[PlannedParameter]

    def calls_of(self, layer: LayerPlan) -> CallCount:
        return next(entry.calls for entry in self.fp8_parameters if entry.layer is layer)

    @torch.compiler.disable
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self, ParameterMixin):  # accelerate keeps a root's forward after a revert
            return type(self).forward(self, *args, **kwargs)
        if not self.fp8_engine.runs_low(self):
            y = self.plain_class.forward(self, *args, **kwargs)
            for entry in self.fp8_parameters:
                for result in tensors_of([y]):
                    entry.calls.watch(result, result)
            return y
        for entry in self.fp8_parameters:
            _check_whole(entry.layer.name, getattr(self, entry.layer.local))
        _running.append(self)
        try:
            return super().forward(*args, **kwargs)
        finally:
            _running.remove(self)


def _check_whole(name: str, parameter: Any) -> None:
    if type(parameter) not in PLAIN:
        raise ConversionError(
            f"{name!r} is planned in FP8 and is a {type(parameter).__name__} in its "
            "module's forward",
            where=name,
            why="its matmuls cannot be recognized; they would run in another precision",
            fix=f"keep it high with precision.keep={name}; with FSDP2, wrap a layer that "
            "contains the module; tensor parallel weights are not served",
        )


def planned_parameters(site: Site) -> Iterator[Swap]:
    """Modules that hold planned parameters which keep their numbers."""
    for owner, layers in site.plan.fp8_parameters.items():
        module, engine = site.modules[owner], site.engine
        assert engine is not None
        found = [PlannedParameter(layer, engine.linear(module, layer)) for layer in layers]
        facts = {"fp8_engine": engine, "fp8_parameters": found, "fp8_observers": []}
        yield Swap(module, ParameterMixin, facts)
