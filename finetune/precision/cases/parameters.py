"""FP8 for matmuls whose weight is a plain `nn.Parameter` and not a linear layer.

There is no module to swap, so the *call* is intercepted. The module that owns declared parameters
(`finetune.precision.model.layers`) changes class, and its forward runs inside a
`TorchFunctionMode`. Where exactly one operand of a product
(`finetune.precision.cases.contractions`) is a planned parameter or a view of its memory, the
engine's linear function multiplies, in 2-D products. Everything else passes through, and gradients
reach the parameter through the model's own views.

A product that cannot be served in FP8 (K or N not aligned, `out=`, an einsum of three) raises; one
that is not recognized (of a cast or a copy, inside a third-party kernel) fails the proof: the
parameter was called and multiplied nothing. Outside the owner's forward it is in high precision. A
gather of whole matrices, `weight[expert_ids]`, is remembered: each expert's matrix is quantized
and multiplied once, not once per token.

Limits: `torch.compile` leaves these forwards out, since the mode reads tensors' memory. Parts that
are checkpointed *inside* the forward are recomputed outside the mode; checkpoint the module or its
parent. Tensor parallel weights (DTensors) are refused; FSDP2 shows whole ones during the forward.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from finetune.errors import ConversionError
from finetune.precision.cases.case import Site, Swap
from finetune.precision.cases.contractions import (
    Linear,
    contract,
    gathered,
    group_sizes,
    grouped,
    products,
    read,
)
from finetune.precision.engines.base import Backend, ObservedMixin, Owner, Tally, multiplying
from finetune.precision.model.layers import alignment
from finetune.precision.model.plan import LayerPlan
from finetune.precision.numbers.gemm import compute_dtype

PLAIN = (nn.Parameter, FakeTensor)
"""Parameter types that have memory of their own, or pretend to (fake tensors of rehearsals)."""


@dataclass
class PlannedParameter:
    """A planned parameter of a module, and its FP8 linear function."""

    layer: LayerPlan
    linear: Linear
    tally: Tally = field(default_factory=Tally)


class Parameters:
    """Lookup from a tensor to the parameter it is, or is a view of."""

    def __init__(self) -> None:
        self._by_storage: dict[int, dict[int, tuple[str, Tensor]]] = defaultdict(dict)

    def add(self, name: str, parameter: Tensor | None) -> None:
        """Register a parameter; one of a tensor subclass has no memory of its own."""
        if parameter is not None and type(parameter) in PLAIN:
            # Kept alive with its storage, whose address is the key.
            self._by_storage[parameter.untyped_storage()._cdata][id(parameter)] = name, parameter

    def find(self, x: Any) -> str | None:
        """Name of the parameter that `x` is or is a view of."""
        if type(x) not in (Tensor, *PLAIN) or x.layout is not torch.strided:
            return None
        there = self._by_storage.get(x.untyped_storage()._cdata, {})
        for name, parameter in there.values():
            # Several parameters may be flattened into one storage: the offset tells which it is.
            begin = parameter.storage_offset()
            inside = begin <= x.storage_offset() < begin + max(parameter.numel(), 1)
            if inside and x.dtype == parameter.dtype:
                return name
        return None


_TAKES = (Tensor.__getitem__, torch.index_select, Tensor.index_select)


def taken_matrices(func: Any, args: tuple[Any, ...]) -> Tensor | None:
    """The index [S] of a call that gathers whole matrices of a stack, `weight[index]`, or None."""
    if func not in _TAKES or not isinstance(args[0], Tensor) or args[0].dim() < 3:
        return None
    index = args[-1]
    if func is not Tensor.__getitem__ and (len(args) != 3 or args[1] != 0):
        return None
    whole = isinstance(index, Tensor) and index.dim() == 1
    return index if whole and index.dtype in (torch.int32, torch.int64) else None


class ParameterMode(TorchFunctionMode):
    """Multiplies by a module's planned parameters in FP8 while its forward runs."""

    def __init__(self, owner: ParameterMixin) -> None:
        super().__init__()
        self.planned = {each.layer.name: each for each in owner.fp8_parameters}
        self.observers = owner.fp8_observers
        self.multiple = alignment(owner.fp8_backend.precision)
        self._parameters = Parameters()
        self._taken = WeakTensorKeyDictionary()
        for name, entry in self.planned.items():
            parameter = getattr(owner, entry.layer.local)
            if type(parameter) not in PLAIN:
                raise ConversionError(
                    f"{name!r} is planned in FP8 and is a {type(parameter).__name__} in its "
                    "module's forward",
                    where=name,
                    why="its matmuls cannot be recognized; they would run in another precision",
                    fix=f"keep it high with precision.keep={name}; with FSDP2, wrap a layer that "
                    "contains the module; tensor parallel weights are not served",
                )
            self._parameters.add(name, parameter)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _TAKES:
            return self._take(func, args, kwargs)
        if func not in products():
            return func(*args, **kwargs)
        given = [*tensors_of(args), *tensors_of(kwargs.values())]
        names = [name for x in given if (name := self._name_of(x)) is not None]
        if len(names) != 1:  # of two parameters there are no tokens in the product
            return func(*args, **kwargs)
        return self._multiply(names[0], func, args, kwargs)

    def _take(self, func: Any, args: Any, kwargs: Any) -> Any:
        y, index = func(*args, **kwargs), taken_matrices(func, args)
        if index is not None and self._parameters.find(args[0]) is not None:
            # Weakly by the tensor: a copy of matrices is in no storage that is known.
            self._taken[y] = args[0], index
        return y

    def _name_of(self, x: Tensor) -> str | None:
        taken = self._taken.get(x)
        return self._parameters.find(x if taken is None else taken[0])

    def _multiply(self, name: str, func: Any, args: Any, kwargs: Any) -> Tensor:
        entry, product = self.planned[name], read(func, args, kwargs)
        if product is None:
            raise _refused(name, func, "this form of the call is not served")
        first = self._name_of(product.x) is not None
        if not first and self._name_of(product.w) is None:  # it was the bias
            return func(*args, **kwargs)
        product = product.exchanged() if first else product
        taken = self._taken.get(product.w)
        linear = functools.partial(self._linear, entry)
        if product.ends is not None:
            if first or taken is not None:
                raise _refused(name, func, "the parameter must be the stack of the groups' weights")
            self._check_aligned(entry, func, (product.w.shape[2], product.w.shape[1]))
            sizes = group_sizes(product.ends, product.x.shape[0])
            # w: [E, K, N] -> [E, N, K]; sizes are on the host, and so are the ends made of them.
            return grouped(product.x, product.w.mT, list(accumulate(sizes)), linear)
        if taken is None:
            product = product.narrowed()
        if not product.is_linear:
            raise _refused(name, func, "it is no linear product of tokens and weights")
        self._check_aligned(entry, func, product.shape)
        if taken is None:
            return contract(product, linear)
        source, index = taken
        if product.batch != product.of_w[:1]:
            raise _refused(name, func, "gathered matrices are multiplied by one token each")
        return gathered(product, source, index, linear)

    def _check_aligned(self, entry: PlannedParameter, func: Any, shape: tuple[int, int]) -> None:
        for label, size in zip("NK", shape, strict=True):
            if size % self.multiple:
                why = f"{label}={size} of this product is not a multiple of {self.multiple}"
                raise _refused(entry.layer.name, func, why)

    def _linear(self, entry: PlannedParameter, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        if not x.shape[0]:  # an expert without tokens has nothing to scale
            dtype = compute_dtype(x)
            return x.to(dtype) @ w.to(dtype).t()  # [0, K] @ [K, N]
        name, shape = entry.layer.name, (w.shape[0], w.shape[1])
        entry.tally.count(x)
        with multiplying(Owner(name, self.observers), w):
            y = entry.linear(x, w, bias)  # [M, K] @ [K, N]
        for observer in self.observers:
            observer.watch(name, shape, y, (x, w, bias))
        return y


def tensors_of(values: Any) -> Iterator[Tensor]:
    """The tensors among a call's arguments or results, including lists one level deep."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from (x for x in value if isinstance(x, Tensor))


def _refused(name: str, func: Any, why: str) -> ConversionError:
    return ConversionError(
        f"{name!r} is planned in FP8 and is multiplied in a way that cannot run in FP8",
        where=f"{name}, in {getattr(func, '__name__', func)}",
        why=why,
        fix="multiply tokens by the parameter or a view of it, with matmul, F.linear, an einsum of "
        f"two operands, bmm or grouped_mm; or keep it high with precision.keep={name}",
    )


class ParameterMixin(ObservedMixin):
    """Mixin of a module whose planned parameters multiply in FP8 in training."""

    can_compile = False
    multiplies = True
    fp8_backend: Backend
    fp8_parameters: list[PlannedParameter]

    @torch.compiler.disable
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self, ParameterMixin):  # accelerate keeps a root's forward after a revert
            return type(self).forward(self, *args, **kwargs)
        if not self.fp8_backend.runs_low(self):
            y = self.plain_class.forward(self, *args, **kwargs)
            for entry in self.fp8_parameters:
                for result in tensors_of([y]):
                    entry.tally.watch(result, result)
            return y
        with ParameterMode(self):
            return self.plain_class.forward(self, *args, **kwargs)


def planned_parameters(site: Site) -> Iterator[Swap]:
    """Modules that hold planned parameters which keep their numbers."""
    for owner, layers in site.plan.fp8_parameters.items():
        module, backend = site.modules[owner], site.backend
        assert backend is not None
        found = [PlannedParameter(layer, backend.linear(module, layer)) for layer in layers]
        facts = {"fp8_backend": backend, "fp8_parameters": found, "fp8_observers": []}
        yield Swap(module, ParameterMixin, facts)
