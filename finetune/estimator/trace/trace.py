"""A tape of what a program allocated, freed and launched, in order.

`finetune.estimator.trace.trace` writes it; memory and time are read off it.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.nn.modules import module as module_hooks
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

Phase = Literal["forward", "recompute", "backward", "optimizer", "load", "other"]
Kind = Literal["weights", "fp8", "gradients", "optimizer", "saved", "logits", "temporary"]
KINDS: tuple[Kind, ...] = get_args(Kind)


class Operand(NamedTuple):
    """A tensor as an operator met it; `nbytes` is of its elements, not of its storage."""

    storage: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int


class Op(NamedTuple):
    """An operator that did something: not a view.

    Attributes:
        name: `aten.mm.default`.
        inputs, outputs: its tensors.
        phase: of the step.
        module: full name of the innermost module that ran it; in backward, of the module whose
            saved tensor it read last.
    """

    name: str
    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]
    phase: Phase
    module: str


class Event(NamedTuple):
    """A storage was allocated (`nbytes` > 0) or freed (< 0) before operator number `at` ended."""

    storage: int
    nbytes: int
    at: int


@dataclass(slots=True)
class Block:
    """One storage.

    Attributes:
        nbytes: its size.
        phase, module: where it was born.
        kind: what it turned out to be, see the module.
        saved: it lived when a backward began.
    """

    nbytes: int
    phase: Phase
    module: str
    dtype: torch.dtype
    op: str = ""
    kind: Kind = "temporary"
    saved: bool = False


@dataclass
class Tape:
    """What was written down.

    Attributes:
        ops: operators in order.
        events: allocations and frees in order; those of `held` are not among them.
        blocks: storage number -> what it is.
        held: storages that were there before, number -> bytes.
        marks: name -> index into `events` when it was marked.
    """

    ops: list[Op] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    blocks: dict[int, Block] = field(default_factory=dict)
    held: dict[int, int] = field(default_factory=dict)
    marks: dict[str, int] = field(default_factory=dict)

    @property
    def held_bytes(self) -> int:
        """Bytes that were there before the first event."""
        return sum(self.held.values())

    def peak(self, start: int = 0, end: int | None = None) -> tuple[int, int]:
        """The most bytes alive in `events[start:end]`, and the event after which."""
        alive = self.held_bytes + sum(e.nbytes for e in self.events[:start])
        most, at = alive, start - 1
        for i, event in enumerate(self.events[start:end], start):
            alive += event.nbytes
            if alive > most:
                most, at = alive, i
        return most, at

    def since(self, mark: str) -> list[Op]:
        """Operators after a mark."""
        place = self.marks[mark]
        return self.ops[self.events[place].at if place < len(self.events) else len(self.ops) :]

    def alive(self, at: int) -> set[int]:
        """Storages alive after event number `at`."""
        living = set(self.held)
        for event in self.events[: at + 1]:
            (living.add if event.nbytes > 0 else living.discard)(event.storage)
        return living


# ------------------------------------------------------------------------------------------
# What a program allocates, frees and launches: a tape of it, written while it runs.
#
# A dispatch mode sees every operator's operands and results. A result whose storage is new is an
# allocation, and a weak reference to that storage says when it is freed, as `LiveTensors` counts it
# on real tensors. On fake tensors nothing is computed and nothing is held, so that a model of 70
# billion parameters passes in seconds, through the very code that would train it.
#
# What stands on the tape is exact about tensors: their sizes, and when they live. What stands not
# on
# it is what has no tensor: buffers inside of a kernel, and what an allocator rounds up
# (`finetune.estimator.memory.overheads`, `finetune.estimator.memory.allocator`).
#
# Storages are sorted by what they turn out to be. Weights are those that were there before; a
# gradient is what `parameter.grad` holds when the optimizer steps; what is born in that step and
# outlives it is the optimizer's state; what is born around the decoder (head and loss) belongs to
# the
# logits; an FP8 copy tells itself by its type; what is born in forward and lives when backward
# begins
# was saved for it; anything else is temporary.


class Recorder(TorchDispatchMode):
    """Writes a tape while it is entered.

    Args:
        model: names modules and tells weights and gradients.
        known: other tensors that are there before.
    """

    def __init__(self, model: nn.Module | None = None, known: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.tape = Tape()
        self.phase: Phase = "forward"
        self._numbers: dict[int, int] = {}
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._next = 0
        self._names: dict[int, str] = {}
        self._around: set[str] = set()
        self._modules: list[str] = []
        self._hooks: list[Any] = []
        self._depth = 0
        self._model = model
        if model is not None:
            self._names = {id(m): n for n, m in model.named_modules(remove_duplicate=False)}
            self._around = around_decoder(model)
            for tensor in (*model.parameters(), *model.buffers()):
                self.hold(tensor)
        for tensor in known:
            self.hold(tensor)

    # ---------------------------------------------------------------------------------- storages

    def hold(self, tensor: Tensor, kind: Kind = "weights") -> None:
        """Count a tensor that was there before."""
        for plain in plain_tensors(tensor):
            known = self._numbers.get(plain.untyped_storage()._cdata)
            number = self._number(plain, "held", kind=kind)
            if known is None:
                self.tape.held[number] = self.tape.blocks[number].nbytes

    def _number(self, tensor: Tensor, op: str, kind: Kind | None = None) -> int:
        storage = tensor.untyped_storage()
        key = storage._cdata
        known = self._numbers.get(key)
        if known is not None:
            return known
        number, size, tape = self._next, 0 if self._elsewhere else storage.nbytes(), self.tape
        self._next += 1
        module = self._modules[-1] if self._modules else ""
        tape.blocks[number] = Block(size, self.phase, module, tensor.dtype, op, kind or "temporary")
        if kind is None:
            tape.events.append(Event(number, size, len(tape.ops)))
        numbers, alive = self._numbers, self._alive

        def died(_: Any) -> None:
            del numbers[key], alive[key]
            tape.events.append(Event(number, -size, len(tape.ops)))

        numbers[key] = number
        alive[key] = weakref.ref(storage, died)
        return number

    def numbers_of(self, tensors: Iterable[Tensor | None]) -> set[int]:
        """Numbers of the storages of tensors, of those that are known."""
        keys = (
            p.untyped_storage()._cdata for t in tensors if t is not None for p in plain_tensors(t)
        )
        return {self._numbers[key] for key in keys if key in self._numbers}

    @contextlib.contextmanager
    def elsewhere(self) -> Iterator[None]:
        """What is made in the block lies in memory that the device's allocator does not give."""
        self._elsewhere = True
        try:
            yield
        finally:
            self._elsewhere = False

    _elsewhere = False

    # ------------------------------------------------------------------------------------ phases

    @contextlib.contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Write what happens in the block under `phase`."""
        before, self.phase = self.phase, phase
        if phase == "backward":
            for number in self._numbers.values():
                self.tape.blocks[number].saved = True
        try:
            yield
        finally:
            self.phase = before
            if phase == "optimizer":
                self._sort_states()

    def mark(self, name: str) -> None:
        """Remember this moment under `name`."""
        self.tape.marks[name] = len(self.tape.events)

    def _sort_states(self) -> None:
        for number in self._numbers.values():
            block = self.tape.blocks[number]
            if block.phase == "optimizer" and block.kind == "temporary":
                block.kind = "optimizer"

    def sort_gradients(self) -> None:
        """What `.grad` of the model's parameters holds now is a gradient."""
        if self._model is not None:
            for number in self.numbers_of(p.grad for p in self._model.parameters()):
                if self.tape.blocks[number].kind == "temporary":
                    self.tape.blocks[number].kind = "gradients"

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
        for block in self.tape.blocks.values():
            if block.kind == "temporary":
                block.kind = self._kind(block)

    def _kind(self, block: Block) -> Kind:
        if block.phase == "optimizer":
            return "temporary"
        if block.dtype.is_floating_point and block.dtype.itemsize == 1:
            return "fp8"
        if block.module in self._around:
            return "logits"
        return "saved" if block.saved and block.phase == "forward" else "temporary"

    def _enter_module(self, module: nn.Module, _: Any) -> None:
        self._modules.append(
            self._names.get(id(module), self._modules[-1] if self._modules else "")
        )
        if self.phase == "backward":
            self.phase = "recompute"
            self._recomputing = len(self._modules)

    def _leave_module(self, module: nn.Module, _: Any, __: Any) -> None:
        if self._modules:
            self._modules.pop()
        if self.phase == "recompute" and len(self._modules) < self._recomputing:
            self.phase = "backward"

    _recomputing = 0

    # ------------------------------------------------------------------------------------- writing

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE:  # autograd asks at every node
            return args[0].fake_device if type(args[0]) is FakeTensor else args[0].device
        kwargs = kwargs or {}
        inputs: list[Tensor] = []
        _collect(args, inputs)
        if kwargs:
            _collect(tuple(kwargs.values()), inputs)
        for tensor in inputs:
            if type(tensor) is not FakeTensor and is_traceable_wrapper_subclass(tensor):
                return NotImplemented  # what it wraps comes back here, one by one
        for tensor in inputs:  # what was there before and nobody told of
            if tensor.dim() and tensor.untyped_storage()._cdata not in self._numbers:
                self.hold(tensor)
        result = self._run(func, inputs, args, kwargs)
        outputs: list[Tensor] = []
        _collect(result if isinstance(result, (tuple, list)) else (result,), outputs)
        before = self._next
        numbered = [
            Operand(
                self._number(t, func.__name__),
                tuple(t.shape),
                t.dtype,
                t.numel() * t.element_size(),
            )
            for t in outputs
        ]
        if self._next == before and (func.is_view or func in _NOTHING):
            return result
        taken = tuple(
            Operand(
                self._numbers.get(t.untyped_storage()._cdata, -1),
                tuple(t.shape),
                t.dtype,
                t.numel() * t.element_size(),
            )
            for t in inputs
        )
        module = self._modules[-1] if self._modules else self._owner(taken)
        self.tape.ops.append(Op(str(func), taken, tuple(numbered), self.phase, module))
        return result

    def _run(self, func: Any, inputs: list[Tensor], args: Any, kwargs: Any) -> Any:
        real = all(type(t) is not FakeTensor for t in inputs)
        if real and (inputs or func in _COUNTING) and _is_small(inputs):
            # A batch and what is counted from it: their values decide what a program does.
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if func is _INDEX and any(t is not None and t.dtype is torch.bool for t in args[1]):
            return self._index_by_mask(*args)
        if func is _ITEM:
            return args[0].dtype.is_floating_point or 1
        return func(*args, **kwargs)

    def _index_by_mask(self, x: Tensor, indices: list[Tensor | None]) -> Tensor:
        """`x[mask]` as CUDA does it: where the mask is true, as integers, first."""
        whole: list[Tensor | None] = []
        for index in indices:
            if index is None or index.dtype is not torch.bool:
                whole.append(index)
            else:
                with self:
                    places = torch.nonzero(index)
                    whole += [places[:, i] for i in range(index.dim())]
        return _INDEX(x, whole)

    def _owner(self, taken: tuple[Operand, ...]) -> str:
        """In backward no module runs: an operator belongs to that whose tensor it reads last."""
        latest = max((o.storage for o in taken if o.storage >= 0), default=-1)
        for number in sorted((o.storage for o in taken if o.storage >= 0), reverse=True):
            if module := self.tape.blocks[number].module:
                return module
        return self.tape.ops[-1].module if latest >= 0 and self.tape.ops else ""


_DEVICE = torch.ops.prim.device.default
_INDEX = torch.ops.aten.index.Tensor
_ITEM = torch.ops.aten._local_scalar_dense.default
_COUNTING = {
    torch.ops.aten.arange.default,
    torch.ops.aten.arange.start,
    torch.ops.aten.arange.start_step,
}
_SMALL = 2**20
_NOTHING = {
    torch.ops.aten.detach.default,
    torch.ops.aten.alias.default,
    torch.ops.aten.lift_fresh.default,
    torch.ops.aten._unsafe_view.default,
}
"""Operators that launch nothing, besides views."""


def around_decoder(model: nn.Module) -> set[str]:
    """Names of the modules that run before and after the decoder: the roots, and the head."""
    lists = [(len(m), n) for n, m in model.named_modules() if isinstance(m, nn.ModuleList)]
    if not lists:
        return {""}
    decoder = max(lists)[1].rpartition(".")[0]
    parts = decoder.split(".")
    around = {".".join(parts[:i]) for i in range(len(parts))}
    head = getattr(model, "get_output_embeddings", lambda: None)()
    return around | {n for n, m in model.named_modules() if m is head}


def _is_small(inputs: list[Tensor]) -> bool:
    """Whether an operator on real tensors is done in no time; a mask of L x L is not."""
    if any(t.numel() > _SMALL for t in inputs):
        return False
    outer = 1
    for dims in zip_longest(*(reversed(t.shape) for t in inputs), fillvalue=1):
        outer *= max(dims)
    return outer <= _SMALL


def _collect(values: Any, found: list[Tensor]) -> None:
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            _collect(value, found)


def plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors with memory that a wrapper holds; itself, if it is none."""
    if type(tensor) is not FakeTensor and is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            yield from plain_tensors(getattr(tensor, name))
    else:
        yield tensor
