"""Measured memory of a run: its peak during training.

On a GPU torch's allocator counts; its peaks are reset when training begins, to exclude loading, and
read at the end. On a CPU `LiveTensors` counts the live tensors of one whole optimizer step: forward
and backward of its micro-batches, and the update. That is the third step; a later one while the
proof still reads weights, an earlier one in shorter runs, but never the first, which is witnessed
and has no optimizer states yet. Other steps run unchanged.

Limits: a dispatch mode does not work with compiled layers, so those runs are not measured on a CPU.
Each process measures itself.
"""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from transformers import TrainerCallback, TrainerState

from finetune.precision.model.layers import without_adapters
from finetune.training.helper.session import Session
from finetune.units import GIB

STEP = 3
BRANCHED_BY = 2**16
"""Most elements of an array of integers by whose values code may branch, as by sizes of images."""


class Batch(NamedTuple):
    """Shape of a micro-batch, True if some of its tokens are padding, tokens of a written prompt.

    That is of the longest prompt that the model answered in training, 0 if it wrote none. The last
    are the arrays of its images, without values (on meta) but for few integers.
    """

    rows: int
    length: int
    padded: bool
    prompt: int = 0
    arrays: dict[str, Tensor] = {}


class MemoryMeter(TrainerCallback):
    """Measures peak memory: of one step on a CPU, of the whole training on a GPU.

    Attributes:
        earlier_gib: on a GPU, the peak before torch's own was last reset.
    """

    def __init__(self, session: Session) -> None:
        self.session, self.kind = session, session.device.kind
        self.earlier_gib = 0.0
        self._largest: tuple[int, int, Tensor | bool] | None = None  # rows, length, has no padding
        self._arrays: dict[str, Tensor] = {}
        self._prompt = 0
        self._undo = contextlib.ExitStack()
        self._live: LiveTensors | None = None
        self._begun = 0  # steps of this process, which may have resumed
        self._bytes = self._reserved = self._weights = 0
        self._measured, self._why_not = "", "training did not begin"
        self._open = False  # torch's allocator counts for this meter

    # ---------------------------------------------------------------------------------- measuring

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, **_: Any
    ) -> None:
        self.close()
        self._begun = 0
        if self.kind == "cuda":
            self._reset_peak()
            self._bytes = self._reserved = 0
            self._open = True
            self._watch(model)
        elif self.kind == "cpu":
            self._why_not = f"the run ended before step {STEP}"
        else:
            self._why_not = f"{self.kind} has no count of its peak"

    def on_step_begin(
        self,
        args: Any,
        state: Any,
        control: Any,
        model: Any = None,
        optimizer: Any = None,
        **_: Any,
    ) -> None:
        self._begun += 1
        if self.kind != "cpu" or self._measured or self._live is not None:
            return
        if self.session.compiled.startswith("on"):
            self._why_not = "counting tensors does not go with compiled layers"
        elif self._is_due(last=state.max_steps - state.global_step == 1):
            self._live = LiveTensors(known(model, optimizer), thorough=True)
            self._undo.enter_context(self._live)
            self._watch(model)

    def _watch(self, model: nn.Module) -> None:
        """Count the weights, and record the shapes of the model's batches from now on."""
        self._weights = LiveTensors([*model.parameters(), *model.buffers()]).bytes

        def note(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            ids = kwargs.get("input_ids", args[0] if args else None)
            mask = kwargs.get("attention_mask")
            if not module.training or not isinstance(ids, Tensor):
                return
            if not torch.is_grad_enabled():
                if kwargs.get("past_key_values") is not None:  # it writes
                    self._prompt = max(self._prompt, ids.shape[1])
                return
            (rows, length), before = ids.shape, self._largest or (0, 0, True)
            # The largest one makes the peak that was measured, and is what the prediction is made
            # for.
            if rows * length >= before[0] * before[1]:
                found = {name: kwargs[name] for name in arrays_of(plain) & kwargs.keys()}
                self._arrays = {
                    k: without_values(v) for k, v in found.items() if isinstance(v, Tensor)
                }
                whole = mask.all() if isinstance(mask, Tensor) else True  # read at the end
                if (rows, length) == before[:2]:  # of several the padded one
                    whole = whole & before[2]
                self._largest = rows, length, whole

        plain: Any = without_adapters(model)
        # A distillation calls what is below the head alone.
        backbone: nn.Module = getattr(plain, "base_model", model)
        self._undo.callback(backbone.register_forward_pre_hook(note, with_kwargs=True).remove)

    def _is_due(self, *, last: bool) -> bool:
        if self._begun == 1:
            self._why_not = "the only step is the witnessed one" if last else self._why_not
            return False
        proof = self.session.proof
        return last or (self._begun >= STEP and (proof is None or not proof.is_open))

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        if self._live is not None:
            self._bytes = self._live.peak
            self._measured = f"peak of live tensors in step {state.global_step}"
            self.close()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.close()

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Exclude allocations inside the block from the peak: they are not training."""
        if not self._open:
            yield
            return
        self._note_peak()
        try:
            yield
        finally:
            self._reset_peak()

    def _reset_peak(self) -> None:
        self.earlier_gib = max(self.earlier_gib, torch.cuda.max_memory_allocated() / GIB)
        torch.cuda.reset_peak_memory_stats()

    def _note_peak(self) -> None:
        self._bytes = max(self._bytes, torch.cuda.max_memory_allocated())
        self._reserved = max(self._reserved, torch.cuda.max_memory_reserved())

    def close(self) -> None:
        """Stop counting, also after an aborted step. Idempotent."""
        self._undo.close()
        self._live = None
        if self._open:
            self._note_peak()
            self._measured, self._open = "peak allocated by torch, whole training", False

    # ------------------------------------------------------------------------------------ reading

    @property
    def batch(self) -> Batch | None:
        """The largest measured micro-batch; None before."""
        if self._largest is None:
            return None
        rows, length, whole = self._largest
        return Batch(rows, length, not bool(whole), self._prompt, self._arrays)

    def reading(self) -> dict[str, Any]:
        """Receipt entries: `measured_gib` (None if unmeasured), `measured`, `weights_gib`, and on a
        GPU `reserved_gib`."""
        if not self._measured:
            return {"measured_gib": None, "measured": f"not measured: {self._why_not}"}
        found = {"measured_gib": round(self._bytes / GIB, 6), "measured": self._measured}
        found["weights_gib"] = round(self._weights / GIB, 6)
        return found | ({"reserved_gib": round(self._reserved / GIB, 6)} if self._reserved else {})


def arrays_of(model: Any) -> set[str]:
    """Names of what a model takes of images beside their tokens; none of a model of text."""
    read = getattr(model, "get_image_features", None)
    return set(inspect.signature(read).parameters) if read is not None else set()


def without_values(array: Tensor) -> Tensor:
    """An array on meta, or as it is if it has few integers, by which code may branch."""
    few = not array.is_floating_point() and array.numel() <= BRANCHED_BY
    return array if few else torch.empty_like(array, device="meta")


def peak_memory_gib() -> float:
    """Peak memory in GiB: allocated by torch on the GPU, or of this process on the host."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / GIB
    import resource

    # KiB on Linux.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def known(model: nn.Module, optimizer: Any) -> list[Tensor]:
    """Tensors alive between steps: parameters, buffers, gradients, optimizer states."""
    parameters = list(model.parameters())
    states = [value for state in optimizer.state.values() for value in state.values()]
    found = [*parameters, *model.buffers(), *(p.grad for p in parameters), *states]
    return [value for value in found if isinstance(value, Tensor)]


# -------------------------------------------------------------------------------- live tensors


class LiveTensors(TorchDispatchMode):
    """Counts the bytes of live tensors, on any device.

    A dispatch mode sees every operator's results. Each storage counts once, however many tensors
    share it, until a weak reference reports its death, which is when the allocator gets it back:

        with LiveTensors(model.parameters()) as live:
            loss = model(x)         # live.bytes: weights, saved activations
            loss.backward()         # live.peak: the most at any moment

    Not seen: buffers inside a kernel, the allocator's rounding and cache, and earlier tensors that
    are not among `known`. Temporaries of an operator written in Python count as inside it; wrapper
    subclasses (torchao's) count as their inner tensors. `thorough` sees the last two: an unknown
    operand must have existed before, so it counts from the beginning, and a wrapper's operator is
    left to the wrapper, whose own operators are dispatched one at a time.

    torch has `torch.distributed._tools.mem_tracker`, which is private (torch 2.13);
    `tests/training/test_live_tensors.py` checks that both report the same peak of a step.

    Attributes:
        bytes: bytes alive now.
        peak: maximum since the beginning; `peak = bytes` restarts it.
    """

    def __init__(self, known: Iterable[Tensor] = (), *, thorough: bool = False) -> None:
        """Start counting, with existing tensors from the beginning."""
        super().__init__()
        self.bytes = self.peak = 0
        self.thorough = thorough
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        for tensor in known:
            self.count(tensor)

    def count(self, tensor: Tensor) -> int:
        """Count a tensor's storage, unless counted or absent (meta, sparse); return its bytes."""
        if is_traceable_wrapper_subclass(tensor):
            parts = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
            # A DTensor names its mesh among them (torch 2.13).
            return sum(self.count(part) for part in parts if isinstance(part, Tensor))
        # These have no storage of their own that could be asked for its bytes.
        if tensor.is_meta or tensor.layout is not torch.strided:
            return 0
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._alive:
            return 0

        def died(_: Any) -> None:
            del self._alive[key]
            self.bytes -= size

        self._alive[key] = weakref.ref(storage, died)
        self.bytes += size
        self.peak = max(self.peak, self.bytes)
        return size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.thorough:
            given = [*_tensors(args), *_tensors(kwargs)]
            for tensor in given:  # an unknown operand was alive at the peak so far, too
                before = self.peak
                self.peak = before + self.count(tensor)
            if any(is_traceable_wrapper_subclass(tensor) for tensor in given):
                return NotImplemented
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            self.count(tensor)
        return result


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors among an operator's arguments or results, however deep."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _tensors(part)
