"""Stand-ins for the parts of an optimizer's update that cannot run on tensors without values.

*Loss scaling* (float16) checks the gradients for overflow. `SteadyScale` launches the same kernels
as `torch.amp.GradScaler`, and never overflows, as in almost every step.

*torchao's optimizers* compile their update. CPU runs step uncompiled (`finetune.training.low_bit`),
with the temporaries of one parameter at a time, and so does the rehearsal. On a GPU the compiled
update of a parameter counts as one kernel that updates states in place. The compiler's temporaries
are unknown: a few copies of the largest trainable tensor may be missing, without activations.

*bitsandbytes' paged optimizers* store large states in managed memory, which the driver moves to the
host when the GPU is full, outside PyTorch's allocator.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from finetune.estimator.trace.fake_cuda import replaced
from finetune.estimator.trace.trace import Recorder, plain_tensors

SCALE = 2.0**16
"""`init_scale` of `torch.amp.GradScaler`."""

_library = torch.library.Library("finetune_estimator", "FRAGMENT")
_library.define("update(Tensor(a!)[] states, Tensor grad) -> ()")
_library.impl("update", lambda *_: None, "Meta")

COMPILED = (
    "torchao compiles its optimizer: temporaries of the compiled update are not rehearsed; the "
    "optimizer's phase may hold more"
)
PAGED_FROM = 100_000
"""Elements from which bitsandbytes pages a state (`Optimizer8bit.get_state_buffer`)."""


class SteadyScale:
    """Stand-in for `torch.amp.GradScaler`."""

    def __init__(self) -> None:
        self._unscaled = False

    def scale(self, loss: Tensor) -> Tensor:
        return loss * torch.full((), SCALE)

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide all gradients by the scale, in place."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        gradients = [p.grad for p in parameters if p.grad is not None]
        overflow, inverse = torch.zeros(()), torch.full((), 1 / SCALE)
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, overflow, inverse)
        self._unscaled = True

    def step(self, optimizer: Optimizer, closure: Any = None) -> None:
        """Unscale, unless already done before clipping, and update."""
        if not self._unscaled:
            self.unscale_(optimizer)
        optimizer.step()

    def update(self) -> None:
        self._unscaled = False

    def get_scale(self) -> float:
        return SCALE


def _update_in_place(p: Tensor, grad: Tensor, *values: Any) -> None:
    """`torchao.optim.adam.single_param_adam` as one kernel."""
    states = [x for value in values if isinstance(value, Tensor) for x in plain_tensors(value)]
    torch.ops.finetune_estimator.update([*plain_tensors(p), *states], grad)


@contextlib.contextmanager
def torchao_updates(*, compiled: bool) -> Iterator[None]:
    """Step torchao's optimizers without a compiler.

    `compiled` emulates one, which fuses each parameter's update.
    """
    from torchao.optim import adam

    changes = [(adam, "single_param_adam", _update_in_place)] if compiled else []
    with torch.compiler.set_stance("force_eager"), replaced(changes):
        yield


@contextlib.contextmanager
def paged_states(recorder: Recorder) -> Iterator[None]:
    """Exclude the large states of bitsandbytes' optimizers, in managed memory on a GPU."""
    from bitsandbytes import functional
    from bitsandbytes.optim.optimizer import Optimizer8bit

    def get_paged(*shape: int, dtype: torch.dtype = torch.float32, device: Any = None) -> Tensor:
        with recorder.outside_of_allocator():
            return torch.zeros(shape, dtype=dtype)

    def get_state_buffer(optimizer: Any, p: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        if p.numel() < PAGED_FROM:
            return torch.zeros_like(p, dtype=dtype)
        return get_paged(*p.shape, dtype=dtype)

    changes = [
        (functional, "get_paged", get_paged),  # AdEMAMix asks for it by itself
        (functional, "fill", torch.fill_),
        (Optimizer8bit, "get_state_buffer", get_state_buffer),
    ]
    with replaced(changes):
        yield
