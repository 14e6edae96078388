"""What a run really held: the peak of its memory, measured while it trains.

On a GPU torch's allocator counts by itself: its peaks are set back when training begins, so that
loading is not mixed in, and read when it ends. On a CPU nobody counts, so the live tensors of one
whole optimizer step are (`finetune.live_tensors`): its micro-batches' forward and backward, and the
update. That is the third step; later where the proof still looks at weights then, since what it
computes is no part of training; earlier where a run is shorter; never the first, which is
witnessed and has no optimizer states yet. Other steps run as they would without this.

A dispatch mode does not go with compiled layers, so those runs are not measured on a CPU. One
process measures itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import TrainerCallback, TrainerState

from finetune.live_tensors import LiveTensors
from finetune.session import Session

STEP = 3
GIB = 2**30


class Batch(NamedTuple):
    """The shape of a micro-batch, and whether some of its tokens are padding."""

    rows: int
    length: int
    padded: bool


class MemoryMeter(TrainerCallback):
    """Measures the peak of a run's memory: on a CPU of one step, on a GPU of the whole training.

    Attributes:
        earlier_gib: on a GPU, the peak before torch's own was last set back.
        batch: the largest micro-batch that was measured; None before.
    """

    def __init__(self, session: Session) -> None:
        self.session, self.kind = session, session.device.kind
        self.earlier_gib = 0.0
        self.batch: Batch | None = None
        self._hook: RemovableHandle | None = None
        self._live: LiveTensors | None = None
        self._begun = 0  # steps of this process, which may have resumed
        self._bytes = self._reserved = 0
        self._measured = ""
        self._why_not = "training did not begin"
        self._open = False

    # ---------------------------------------------------------------------------------- measuring

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        self.close()
        self._begun = 0
        if self.kind == "cuda":
            self.earlier_gib = max(self.earlier_gib, torch.cuda.max_memory_allocated() / GIB)
            torch.cuda.reset_peak_memory_stats()
            self._bytes = self._reserved = 0
            self._open = True
            self._watch(model)
        elif self.kind != "cpu":
            self._why_not = f"{self.kind} has no count of its peak"
        else:
            self._why_not = f"the run ended before step {STEP}"

    def on_step_begin(
        self,
        args: Any,
        state: TrainerState,
        control: Any,
        model: Any = None,
        optimizer: Any = None,
        **kwargs: Any,
    ) -> None:
        self._begun += 1
        if self.kind != "cpu" or self._measured or self._live is not None:
            return
        if self.session.compiled.startswith("on"):
            self._why_not = "counting tensors does not go with compiled layers"
        elif self._is_due(last=state.max_steps - state.global_step == 1):
            self._live = LiveTensors(known(model, optimizer), thorough=True)
            self._live.__enter__()
            self._watch(model)

    def _watch(self, model: nn.Module) -> None:
        """Note the shape of the batches that the model is given from now on."""

        def note(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            ids, mask = kwargs.get("input_ids"), kwargs.get("attention_mask")
            if not module.training or not isinstance(ids, Tensor):
                return
            rows, length = ids.shape
            if self.batch is None or rows * length > self.batch.rows * self.batch.length:
                padded = isinstance(mask, Tensor) and not bool(mask.all())
                self.batch = Batch(rows, length, padded)

        self._hook = model.register_forward_pre_hook(note, with_kwargs=True)

    def _is_due(self, *, last: bool) -> bool:
        if self._begun == 1:
            self._why_not = "the only step is the witnessed one" if last else self._why_not
            return False
        proof, _ = self.session.training
        undisturbed = proof is None or not proof.is_open
        return last or (self._begun >= STEP and undisturbed)

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if self._live is not None:
            self._bytes = self._live.peak
            self._measured = f"peak of live tensors in step {state.global_step}"
            self.close()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.close()

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """What is allocated inside is no part of training: it does not raise its peak."""
        if not self._open:
            yield
            return
        self._note_peak()
        try:
            yield
        finally:
            self.earlier_gib = max(self.earlier_gib, torch.cuda.max_memory_allocated() / GIB)
            torch.cuda.reset_peak_memory_stats()

    def _note_peak(self) -> None:
        self._bytes = max(self._bytes, torch.cuda.max_memory_allocated())
        self._reserved = max(self._reserved, torch.cuda.max_memory_reserved())

    def close(self) -> None:
        """Stop counting, also out of a step that was broken off. Harmless when already done."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        live, self._live = self._live, None
        if live is not None:
            live.__exit__(None, None, None)
        if self._open:
            self._note_peak()
            self._measured, self._open = "peak allocated by torch, whole training", False

    # ------------------------------------------------------------------------------------ reading

    def reading(self) -> dict[str, Any]:
        """For the receipt: `measured_gib`, None if nothing was, `measured`, and `reserved_gib`."""
        if not self._measured:
            return {"measured_gib": None, "measured": f"not measured: {self._why_not}"}
        found = {"measured_gib": round(self._bytes / GIB, 6), "measured": self._measured}
        return found | ({"reserved_gib": round(self._reserved / GIB, 6)} if self._reserved else {})


def known(model: nn.Module, optimizer: Any) -> list[Tensor]:
    """Tensors that are there between steps: parameters, buffers, gradients, optimizer states."""
    parameters = list(model.parameters())
    found: list[Tensor] = [*parameters, *model.buffers()]
    found += [p.grad for p in parameters if p.grad is not None]
    for state in optimizer.state.values():
        found += [value for value in state.values() if isinstance(value, Tensor)]
    return found
