"""Trace of a program: its allocations, frees and operators in order, recorded while it runs.

A dispatch mode (`Recorder`) sees every operator's operands and results. A result with a new storage
is an allocation; a weak reference to the storage records its end. On fake tensors nothing is
computed or allocated, so a model of 70 billion parameters takes seconds, in the very code that
would train it.

Sizes and lifetimes of tensors are exact. Not in a trace: buffers inside kernels and the allocator's
rounding (`finetune.estimator.memory.overheads`, `finetune.estimator.memory.footprint`).

Kinds of storages:

    weights      parameters and buffers, present before the first event
    gradients    `parameter.grad` when the optimizer steps
    optimizer    created in the optimizer's step and outliving it
    fp8          with an FP8 dtype
    logits       created outside the decoder: head and loss
    cache        keys and values that a generation reads
    saved        the batch; what is created in forward and alive when backward begins
    temporary    all others, with constants such as tables of an optimizer's codes
"""

from __future__ import annotations

import contextlib
import math
import re
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.nn.modules import module as module_hooks
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from finetune.precision.model.layers import without_adapters
from finetune.precision.model.towers import modules_beside

# fmt: off
Phase = Literal[
    "forward", "reference", "recompute", "backward", "optimizer", "prompt", "token",
    "load", "other",
]
# fmt: on
Kind = Literal["weights", "fp8", "gradients", "optimizer", "saved", "logits", "cache", "temporary"]
KINDS: tuple[Kind, ...] = get_args(Kind)
Memory = Literal["device", "pinned", "pageable"]
"""Where a storage is: on the device, or in host memory that is pinned or not."""


class Operand(NamedTuple):
    """A tensor as an operator saw it; `storage` is a number, `nbytes` is of its elements."""

    storage: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int


class Op(NamedTuple):
    """An operator other than a view.

    Attributes:
        name: such as `aten.mm.default`.
        module: full name of the innermost running module; in backward, of the module whose saved
            tensor was read last.
    """

    name: str
    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]
    phase: Phase
    module: str


class Event(NamedTuple):
    """Allocation (`nbytes` > 0) or free (< 0) of a storage before operator number `at` ended."""

    storage: int
    nbytes: int
    at: int


@dataclass(slots=True)
class Storage:
    """Phase, module (as of an `Op`) and operator that created a storage, dtype of its first tensor.

    `saved` is True if it was alive when a backward began, `passing` if an eager step makes and
    reads it in one kernel, `unread` if it is a gradient or state of a parameter that gets none.
    `stream` names a stream other than the one that computes, if it made it: the allocator keeps
    memory of each apart.
    """

    nbytes: int
    phase: Phase
    module: str
    dtype: torch.dtype
    op: str = ""
    kind: Kind = "temporary"
    saved: bool = False
    passing: bool = False
    unread: bool = False
    memory: Memory = "device"
    stream: str = ""


@dataclass
class Trace:
    """Record of a program.

    Attributes:
        events: allocations and frees in order, without those of `initial`.
        storages: storage number -> description.
        initial: storage number -> bytes, for storages present before the first event.
        marks: name -> index into `events`.
    """

    ops: list[Op] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    storages: dict[int, Storage] = field(default_factory=dict)
    initial: dict[int, int] = field(default_factory=dict)
    marks: dict[str, int] = field(default_factory=dict)

    @property
    def initial_bytes(self) -> int:
        return sum(self.initial.values())

    def peak(self, start: int = 0, end: int | None = None) -> tuple[int, int]:
        """Peak of the bytes alive in `events[start:end]`, and the index of its event."""
        alive = self.initial_bytes + sum(e.nbytes for e in self.events[:start])
        most, at = alive, start - 1
        for i, event in enumerate(self.events[start:end], start):
            alive += event.nbytes
            if alive > most:
                most, at = alive, i
        return most, at

    def only(self, belongs: Callable[[Storage], bool]) -> Trace:
        """The trace with the bytes of some storages, such as those of one memory."""
        there = {number for number, storage in self.storages.items() if belongs(storage)}
        if len(there) == len(self.storages):
            return self
        events = [e if e.storage in there else e._replace(nbytes=0) for e in self.events]
        initial = {number: size for number, size in self.initial.items() if number in there}
        return replace(self, events=events, initial=initial)

    def since(self, mark: str) -> list[Op]:
        place = self.marks[mark]
        return self.ops[self.events[place].at if place < len(self.events) else len(self.ops) :]

    def alive(self, at: int) -> set[int]:
        """Numbers of the storages alive after event number `at`."""
        living = set(self.initial)
        for event in self.events[: at + 1]:
            (living.add if event.nbytes > 0 else living.discard)(event.storage)
        return living


class Recorder(TorchDispatchMode):
    """Dispatch mode that records a trace while entered.

    Args:
        model: model whose modules, weights and gradients are identified.
        known: other tensors present before the first event.
        beside: other models, which do not train. Their layers count as no layers of the decoder.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        known: Iterable[Tensor] = (),
        *,
        beside: Iterable[nn.Module] = (),
    ) -> None:
        super().__init__()
        self.trace = Trace()
        self.phase: Phase = "forward"
        self._numbers: dict[int, int] = {}
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._names: dict[int, str] = {}
        self.around: set[str] = set()
        self._modules: list[str] = []
        self._hooks: list[Any] = []
        self._depth = 0
        self._recomputing = 0  # depth of modules at which a recomputation began
        self._outside = self._passing = False
        self.stream = ""
        self.small = SMALL
        self.to_device: set[Any] = set()  # operators that copy from host memory
        self.rewards = 0  # numbers of a table whose values are there: advantages follow of them
        self._model = model
        if model is not None:
            self._names = {id(m): n for n, m in model.named_modules(remove_duplicate=False)}
            self._names |= _left_out(model)
            for module in self._names.keys() & modules_beside(without_adapters(model)):
                self._names[module] = OF_IMAGES + self._names[module]
            self.around = around_decoder(model)
            for tensor in (*model.parameters(), *model.buffers()):
                self.add_initial(tensor)
        for other in beside:
            for name, module in other.named_modules():
                self._names[id(module)] = f"beside/{name}".replace(".", "/")
            for tensor in (*other.parameters(), *other.buffers()):
                self.add_initial(tensor)
        for tensor in known:
            self.add_initial(tensor, "saved")

    # ---------------------------------------------------------------------------------- storages

    def add_initial(self, tensor: Tensor, kind: Kind = "weights") -> None:
        """Register a tensor that existed before the first event."""
        for plain in plain_tensors(tensor):
            # The address of the storage's C++ object: views and shards of one storage have the
            # same.
            if plain.untyped_storage()._cdata not in self._numbers:
                number = self._number(plain, "initial", kind)
                self.trace.initial[number] = self.trace.storages[number].nbytes

    def _number(self, tensor: Tensor, op: str, kind: Kind | None = None) -> int:
        storage = tensor.untyped_storage()
        key = storage._cdata
        known = self._numbers.get(key)
        if known is not None:
            return known
        number, trace = len(self.trace.storages), self.trace
        size = 0 if self._outside else storage.nbytes()
        module = self._modules[-1] if self._modules else ""
        trace.storages[number] = Storage(
            size, self.phase, module, tensor.dtype, op, kind or "temporary", passing=self._passing,
            stream=self.stream,
        )  # fmt: skip
        # With a kind given the tensor was there before, and its allocation is no event.
        if kind is None:
            trace.events.append(Event(number, size, len(trace.ops)))
        numbers, alive = self._numbers, self._alive

        def died(_: Any) -> None:
            # The address may be given to the next storage, which gets a number of its own.
            del numbers[key], alive[key]
            trace.events.append(Event(number, -size, len(trace.ops)))

        numbers[key] = number
        alive[key] = weakref.ref(storage, died)
        return number

    @contextlib.contextmanager
    def outside_of_allocator(self) -> Iterator[None]:
        """Exclude tensors created in the block from the device allocator's memory."""
        self._outside = True
        try:
            yield
        finally:
            self._outside = False

    def as_kernel(self, function: Callable[..., tuple[Tensor, ...]], *args: Any) -> Any:
        """Record a function's operators, of which one kernel stores the results alone."""
        self._passing = True
        results = function(*args)
        self._passing = False
        for result in results:
            self.trace.storages[self._number(result, "")].passing = False
        return results

    # ------------------------------------------------------------------------------------ phases

    @contextlib.contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Record the block under `phase`."""
        before, self.phase = self.phase, phase
        first = len(self.trace.storages)
        if phase == "backward":
            for number in self._numbers.values():
                self.trace.storages[number].saved = True
        try:
            yield
        finally:
            self.phase = before
            for number in self._numbers.values() if phase == "optimizer" else ():
                storage = self.trace.storages[number]
                # What the optimizer makes and keeps beyond its step are its states.
                if number >= first and storage.kind == "temporary":
                    storage.kind = "optimizer"

    def mark(self, name: str) -> None:
        self.trace.marks[name] = len(self.trace.events)

    def sort_gradients(self) -> None:
        """Assign the kind `gradients` to the current `.grad` of the model's parameters."""
        for parameter in self._model.parameters() if self._model is not None else ():
            for plain in plain_tensors(parameter.grad) if parameter.grad is not None else ():
                number = self._numbers.get(plain.untyped_storage()._cdata, -1)
                storage = self.trace.storages.get(number)
                if storage is not None and storage.kind == "temporary":
                    storage.kind = "gradients"

    def sort_cache(self, states: Iterable[Tensor]) -> None:
        """Assign the kind `cache` to the tensors of a cache."""
        for storage in self.storages_of(states):
            storage.kind = "cache"

    def storages_of(self, tensors: Iterable[Tensor]) -> Iterator[Storage]:
        """Descriptions of tensors' storages, to be changed."""
        for tensor in tensors:
            for plain in plain_tensors(tensor):
                yield self.trace.storages[self._number(plain, "")]

    # ----------------------------------------------------------------------------------- modules

    def __enter__(self) -> Recorder:
        if self._names and not self._depth:
            self._hooks = [
                module_hooks.register_module_forward_pre_hook(self._enter_module),
                module_hooks.register_module_forward_hook(self._leave_module, always_call=True),
            ]
        self._depth += 1
        return super().__enter__()

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        self._depth -= 1
        if not self._depth:  # it enters itself for operators that it takes apart
            self._end()

    def _end(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self.sort_gradients()
        self._alive.clear()  # what dies from now on is no event
        storages = self.trace.storages
        for op in self.trace.ops:  # no module runs in backward: by its operands
            for made in (storages[x.storage] for x in op.outputs if op.phase == "backward"):
                if made.phase == "backward" and not made.module:
                    made.module = op.module
        for storage in self.trace.storages.values():
            if storage.kind == "temporary":
                storage.kind = self._kind(storage)

    def _kind(self, storage: Storage) -> Kind:
        if storage.phase == "optimizer":
            return "temporary"
        if storage.dtype.is_floating_point and storage.dtype.itemsize == 1:
            return "fp8"
        if storage.module in self.around:
            return "logits"
        return "saved" if storage.saved and storage.phase == "forward" else "temporary"

    def _enter_module(self, module: nn.Module, _: Any) -> None:
        self._modules.append(
            self._names.get(id(module), self._modules[-1] if self._modules else "")
        )
        # A module that is called in backward is a checkpoint's: nothing else calls one there.
        if self.phase == "backward":
            self.phase = "recompute"
            self._recomputing = len(self._modules)
        if self.phase == "forward" and len(self._modules) == 1 and not torch.is_grad_enabled():
            self.phase = "reference"  # a model with nothing to learn from this

    def _leave_module(self, module: nn.Module, _: Any, __: Any) -> None:
        if self._modules:
            self._modules.pop()
        # The checkpoint's outermost module has ended; inner ones end at greater depth.
        if self.phase == "recompute" and len(self._modules) < self._recomputing:
            self.phase = "backward"
        if self.phase == "reference" and not self._modules:
            self.phase = "forward"

    # ------------------------------------------------------------------------------------- writing

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE:  # called by autograd at every node
            return args[0].fake_device if type(args[0]) is FakeTensor else args[0].device
        kwargs = kwargs or {}
        inputs: list[Tensor] = []
        _collect((*args, *kwargs.values()), inputs)
        for tensor in inputs:
            if type(tensor) is not FakeTensor and is_traceable_wrapper_subclass(tensor):
                return NotImplemented  # what it wraps comes back here, one by one
        for tensor in inputs:  # of which nobody said that it was there before
            if tensor.dim() and tensor.untyped_storage()._cdata not in self._numbers:
                self.add_initial(tensor, "temporary")
        result = self._run(func, inputs, args, kwargs)
        outputs: list[Tensor] = []
        _collect(result if isinstance(result, (tuple, list)) else (result,), outputs)
        before = len(self.trace.storages)
        for tensor in outputs:
            self._number(tensor, func.__name__)
        if self.to_device:
            self._stay_on_host(func, inputs, before)
        # A view of something new counts, such as a slice of a result that only now is seen.
        if len(self.trace.storages) == before and (func.is_view or func in _NOTHING):
            return result
        taken, made = self._operands(inputs), self._operands(outputs)
        self.trace.ops.append(Op(str(func), taken, made, self.phase, self._owner(taken)))
        return result

    def _stay_on_host(self, func: Any, inputs: list[Tensor], first: int) -> None:
        """What is made of tensors in host memory is there, too, but for copies to the device."""
        storages, read = self.trace.storages, (x.storage for x in self._operands(inputs))
        if func in self.to_device or all(n < 0 or storages[n].memory == "device" for n in read):
            return
        for number in range(first, len(storages)):
            storages[number].memory = "pageable"

    def _run(self, func: Any, inputs: list[Tensor], args: Any, kwargs: Any) -> Any:
        if func in _PICKED and _may_pick(inputs):  # without values it picks everything
            with unset_fake_temporarily():
                return func(torch.ones(inputs[0].shape, dtype=torch.bool), *args[1:], **kwargs)
        real = all(type(t) is not FakeTensor for t in inputs)
        counts = inputs or _counts(func, args, kwargs, self.small)
        counts = counts or (func is _ZEROS and math.prod(args[0]) == self.rewards)
        if real and counts and _is_small(inputs, self.small):
            # A batch and counts derived from it: their values decide control flow.
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if func is _INDEX and any(t is not None and t.dtype is torch.bool for t in args[1]):
            return self._index_by_mask(*args)
        # No values are there: 1 or True lets loops and checks of a healthy step go on.
        if func is _ITEM:
            return args[0].dtype.is_floating_point or 1
        return func(*args, **kwargs)

    def _index_by_mask(self, x: Tensor, indices: list[Tensor | None]) -> Tensor:
        """`x[mask]` as CUDA does it: the mask is first converted to integer indices."""
        whole: list[Tensor | None] = []
        for index in indices:
            if index is None or index.dtype is not torch.bool:
                whole.append(index)
                continue
            with self:
                places = torch.nonzero(index)
                whole += [places[:, i] for i in range(index.dim())]
        return _INDEX(x, whole)

    def owner(self, x: Tensor) -> str:
        """Module of an operator that reads `x`, as of an `Op`."""
        return self._owner(self._operands([x]))

    def _operands(self, tensors: list[Tensor]) -> tuple[Operand, ...]:
        keys = [t.untyped_storage()._cdata for t in tensors]
        return tuple(
            Operand(self._numbers.get(key, -1), tuple(t.shape), t.dtype, t.nbytes)
            for key, t in zip(keys, tensors, strict=True)
        )

    def _owner(self, taken: tuple[Operand, ...]) -> str:
        """The running module; none runs in backward: that whose tensor was made last."""
        if self._modules:
            return self._modules[-1]
        numbers = sorted((o.storage for o in taken if o.storage >= 0), reverse=True)
        last = self.trace.ops[-1].module if numbers and self.trace.ops else ""
        for number in numbers:
            module = self.trace.storages[number].module
            # All layers share some tensors, as angles of rotary embeddings.
            if module and not (layer_of(last) and not layer_of(module)):
                return module
        return last


OF_IMAGES = "images:"
"""What names of modules begin with in a tower for images and its projector."""
_LAYER = re.compile(r"(?:.*?\.)?\d+(?=\.|$)")
_DEVICE = torch.ops.prim.device.default
_INDEX = torch.ops.aten.index.Tensor
_ITEM = torch.ops.aten._local_scalar_dense.default
_PICKED = {torch.ops.aten.sum.dim_IntList, torch.ops.aten.nonzero.default}
_COUNTING = {getattr(torch.ops.aten.arange, name) for name in ("default", "start", "start_step")}
_COUNTING |= {torch.ops.aten.randperm.default}
_FULL, _ZEROS = torch.ops.aten.full.default, torch.ops.aten.zeros.default
SMALL = 2**20
"""Most elements of an operator that runs on real tensors."""
FEW = 2**12
"""Most elements of a mask without values that is taken to pick all of them."""
_NOTHING = {
    getattr(torch.ops.aten, name).default
    for name in ("detach", "alias", "lift_fresh", "_unsafe_view")
}
"""Operators besides views that launch nothing."""


def layer_of(module: str) -> str:
    """Name of the decoder layer that a module belongs to; empty outside of them."""
    found = _LAYER.match(module)
    return found[0] if found else ""


def _left_out(model: nn.Module) -> dict[int, str]:
    """Names of modules that `torch.compile` leaves out of their layer, with slashes for dots."""
    return {
        id(module): f"{name}.{inner}".rstrip(".").replace(".", "/")
        for name, owner in model.named_modules()
        if getattr(type(owner).forward, "_torchdynamo_disable", False)
        for inner, module in owner.named_modules()
    }


def around_decoder(model: nn.Module) -> set[str]:
    """Names of the modules that run before and after the decoder: the roots, and the head."""
    beside = modules_beside(without_adapters(model))  # a tower may be deeper than the decoder
    lists = [
        (len(m), n)
        for n, m in model.named_modules()
        if isinstance(m, nn.ModuleList) and id(m) not in beside
    ]
    if not lists:
        return {""}
    decoder = max(lists)[1].rpartition(".")[0]
    parts = decoder.split(".")
    around = {".".join(parts[:i]) for i in range(len(parts))}
    head = getattr(model, "get_output_embeddings", lambda: None)()
    return around | {n for n, m in model.named_modules() if m is head}


def _is_small(inputs: list[Tensor], most: int) -> bool:
    """True if an operator on real tensors is fast; False for an L x L mask."""
    if any(t.numel() > most for t in inputs):
        return False
    outer = 1
    for dims in zip_longest(*(reversed(t.shape) for t in inputs), fillvalue=1):
        # Broadcast against each other, small operands may make something large.
        outer *= max(dims)
    return outer <= most


def _may_pick(inputs: list[Tensor]) -> bool:
    """True of a mask whose values are not there, of so few elements that code may count them."""
    mask = inputs[0]
    return type(mask) is FakeTensor and mask.dtype is torch.bool and mask.numel() <= FEW


def _counts(func: Any, args: Any, kwargs: Any, most: int) -> bool:
    """True if an operator without operands makes integers, as batches are made of."""
    integers = func is _FULL and kwargs.get("dtype") is torch.long
    return func in _COUNTING or (integers and math.prod(args[0]) <= most)


def _collect(values: Any, found: list[Tensor]) -> None:
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            _collect(value, found)


def plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """Tensors with memory inside a wrapper subclass; else the tensor itself."""
    if type(tensor) is not FakeTensor and is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            if isinstance(part := getattr(tensor, name), Tensor):  # no mesh of a DTensor
                yield from plain_tensors(part)
    else:
        yield tensor
