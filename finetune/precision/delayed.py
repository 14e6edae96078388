"""Delayed scaling: a tensor's scale comes from the amaxes of earlier micro-steps.

So the scale is known before the tensor is, and cast and amax cost one pass together. It follows
Transformer Engine (`FP8GlobalStateManager.reduce_and_update_fp8_tensors`): during a micro-step
every cast uses the scale of the step's beginning and records its amax; then the window of the last
`amax_history_len` amaxes sets the next scale. TE updates at the end of forward and keeps the old
scales aside for recomputation. We update at the beginning of the next training forward instead: the
scales in use are the same, and a checkpointed layer that is recomputed during backward finds its
scales untouched and records the same amaxes once more, which changes nothing.

As in TE, the history of gradients is one of its own: it moves on when a backward has run, and not
with a forward that had none. (After two forwards and one backward through both TE moves it on
twice, we once, with the larger amax.)
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from finetune.config import PrecisionConfig
from finetune.precision.gemm import Codes
from finetune.precision.numerics import amax, floor_pow2
from finetune.precision.scaling import (
    OPERANDS,
    Formats,
    Operand,
    multiply_in_bf16,
    scaled,
    to_codes,
)

UNSEEN = -1.0
GRADIENTS = slice(OPERANDS.index("g"), None, len(OPERANDS))
"""Columns of gradients in a `DelayedState`."""


class DelayedState:
    """Amax history and scales of every operand of every delayed-scaling layer.

    Attributes:
        history: float32 [amax_history_len, 3 · layers], newest first after each `advance`.
        current: float32 [3 · layers], amaxes seen in the running micro-step; `UNSEEN` without one.
        scale: float32 [3 · layers], in use during the running micro-step.
    """

    def __init__(self, layers: int, precision: PrecisionConfig) -> None:
        self.formats, self.pow2 = Formats.of(precision), precision.pow2_scales
        self.in_bf16 = multiply_in_bf16(precision)
        self.largest = torch.tensor([self.formats[o].max for o in OPERANDS] * layers)
        self.margin = precision.margin
        self.algorithm = precision.amax_compute_algo
        self.reduce = precision.reduce_amax
        self.history = torch.zeros(precision.amax_history_len, 3 * layers)
        self.current = torch.full((3 * layers,), UNSEEN)
        self.scale = torch.ones(3 * layers)
        self.steps = 0

    def to(self, device: torch.device) -> None:
        """Follow the model to its device."""
        if self.scale.device != device:
            for name in ("largest", "history", "current", "scale"):
                setattr(self, name, getattr(self, name).to(device))

    @torch.no_grad()
    def advance(self) -> None:
        """End a micro-step: the recorded amaxes enter the history and the scales follow.

            scale = max / (window · 2^margin)

        An operand that was not seen, or whose amax is not finite, keeps its scale (as in TE).
        """
        if self.steps:
            if self.reduce and dist.is_initialized() and dist.get_world_size() > 1:
                dist.all_reduce(self.current, op=dist.ReduceOp.MAX)
            moves = torch.ones_like(self.current, dtype=torch.bool)
            moves[GRADIENTS] = (self.current[GRADIENTS] > UNSEEN).any()
            rolled = self.history.roll(1, 0)
            rolled[0] = self.current.clamp(min=0)
            self.history = torch.where(moves, rolled, self.history)
            window = self.history.amax(0) if self.algorithm == "max" else self.history[0]
            usable = (window > 0) & window.isfinite()
            most = torch.finfo(torch.float32).max
            new = (self.largest / window / 2**self.margin).clamp(max=most)
            new = floor_pow2(new) if self.pow2 else new
            self.scale = torch.where(usable, new, self.scale)
            self.current = torch.full_like(self.current, UNSEEN)
        self.steps += 1


class DelayedRule:
    """The rule of one layer: three columns of the run's `DelayedState`."""

    reuses = True

    def __init__(self, state: DelayedState, row: int) -> None:
        self.state, self.row = state, row

    def index(self, operand: Operand) -> int:
        """The operand's column in the state."""
        return 3 * self.row + OPERANDS.index(operand)

    def scale_in_force(self, operand: Operand) -> Tensor:
        """The scale of the running micro-step, a float32 scalar."""
        return self.state.scale[self.index(operand)]

    def cast(self, operand: Operand, x: Tensor, dim: int) -> Codes:
        """Codes with the scale of the step's beginning; records the amax."""
        state, index = self.state, self.index(operand)
        state.to(x.device)
        # Not `maximum`: a NaN in the history would hold the scale for as long as it stays there.
        state.current[index] = torch.fmax(state.current[index].clamp(min=0), amax(x))
        # A copy: codes saved for backward keep the scale that made them.
        scale = state.scale[index].clone()
        fmt = state.formats[operand]
        values = to_codes(scaled(x, scale), fmt, saturate=True)
        return Codes(values, scale.reciprocal(), fmt, state.in_bf16)
