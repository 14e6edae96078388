"""What is put around the layers of a model while a step is written down.

Marks of where each layer begins, checkpointing, FSDP, and the few things that CUDA or an older
library does otherwise than the installed one does on a device without memory.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from finetune.estimator.trace.trace import Recorder
from tests.benchmarks.score.job import Job
from tests.benchmarks.score.sharded import Fsdp1


@contextlib.contextmanager
def rotation_in_place(model: Any, job: Job) -> Iterator[None]:
    """With fused kernels, rotation is in place: the tensors that come are those that go."""
    module: Any = sys.modules[type(model).__module__]
    if not job.fused_kernels or "apply_rotary_pos_emb" not in vars(module):
        yield
        return
    before = module.apply_rotary_pos_emb
    module.apply_rotary_pos_emb = lambda q, k, *_, **__: (q, k)
    try:
        yield
    finally:
        module.apply_rotary_pos_emb = before


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """As CUDA's, which keeps a mask of one byte an element, and not a tensor of the input's
    type."""
    return torch.native_dropout(input, p, True)[0] if training and p else input


@contextlib.contextmanager
def cuda_dropout() -> Iterator[None]:
    """Dropout is CUDA's while this is entered."""
    before = torch.nn.functional.dropout
    torch.nn.functional.dropout = _dropout
    try:
        yield
    finally:
        torch.nn.functional.dropout = before


def decoder_layers(model: Any) -> list[nn.Module]:
    """The repeated layers of a model."""
    for module in model.modules():
        if (
            isinstance(module, nn.ModuleList)
            and len(module) > 0
            and not isinstance(module[0], nn.Linear)
        ):
            return list(module)
    raise LookupError(type(model).__name__)


class Marks:
    """Marks on the tape where each layer begins, and where its backward ends."""

    def __init__(self) -> None:
        self.recorder: Recorder | None = None

    def enter(self, i: int, hidden: Tensor) -> None:
        """Layer `i` is about to run on `hidden`."""
        if self.recorder is None:
            return
        recorder = self.recorder
        recorder.mark(f"f{i}")
        if hidden.requires_grad:
            hidden.register_hook(lambda _: recorder.mark(f"b{i}"))


def wrap(layer: Any, i: int, job: Job, marks: Marks, shards: Fsdp1 | None) -> None:
    """Checkpoint around FSDP around the layer, as transformers before 5.2 nests them."""
    from torch.utils.checkpoint import checkpoint

    inner = layer.forward

    def forward(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        def unit(hidden: Tensor) -> Any:
            if shards is None:
                return inner(hidden, *args, **kwargs)
            shards.before(i, hidden)
            out = inner(hidden, *args, **kwargs)
            shards.after(i, hidden, out[0] if isinstance(out, tuple) else out)
            return out

        marks.enter(i, hidden)
        if job.checkpoint == "none":
            return unit(hidden)
        return checkpoint(
            unit, hidden, use_reentrant=job.checkpoint == "reentrant", preserve_rng_state=False
        )

    layer.forward = forward


def keep_cache(layers: list[nn.Module]) -> list[Tensor]:
    """GPTBigCode keeps a cache in training too: views of the product of q, k, v, so all of it."""
    kept: list[Tensor] = []

    def keep(_: Any, __: Any, out: Tensor) -> None:
        if not torch.is_grad_enabled():
            kept.append(out)

    for layer in layers:
        layer.attn.c_attn.register_forward_hook(keep)  # type: ignore[union-attr]
    return kept
