"""FSDP 1 (`torch.distributed.fsdp`, FULL_SHARD): what one rank of many allocates.

Every decoder layer is a unit and the rest of the model is the root unit. A rank keeps its part of
each unit's flat weights. Before a unit runs its weights are gathered whole, in the compute type
(through a 16-bit copy of the rank's part when the part is in float32); after forward they are
freed, the root's not until its backward. In backward a unit's weights are gathered again, its
whole gradient is flattened and reduced to the rank's part, and cast to the type of the part.
`BACKWARD_PRE` gathers the next unit's weights meanwhile, unless checkpointing is reentrant: what
has not run with gradients asks for no gather before backward (`_register_pre_backward_hooks`).
Gradients of the parts live until the next forward: with `use_orig_params` a `zero_grad` drops the
views only (`_reset_flat_param_grad_info_if_needed`).

A frozen unit has no gradient of weights and frees itself by a hook on the gradients of its inputs
(`_register_post_backward_reshard_only_hook`), whose handle lives until the end of backward. Under
reentrant checkpointing these inputs are the detached copies the layer runs again on: so the input
of every layer, and its gradient, stay alive until backward ends.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from finetune.estimator.trace.trace import Recorder
from tests.benchmarks.score.job import Job
from tests.benchmarks.score.packed import PackedLinear


class _Unit:
    def __init__(self, parameters: list[nn.Parameter], job: Job, types: dict[str, Any]) -> None:
        self.parameters = parameters
        self.trained = [p for p in parameters if p.requires_grad]
        low = types[job.compute]
        self.whole_bytes = sum(
            p.numel() * (p.element_size() if not p.dtype.is_floating_point else low.itemsize)
            for p in parameters
        )
        self.low = low
        held = types[job.sharded_type] if job.sharded_type else None
        part = sum(
            math.ceil(p.numel() / job.gpus)
            * (held.itemsize if held and p.dtype.is_floating_point else p.element_size())
            for p in parameters
        )
        self.part = torch.empty(part, dtype=torch.uint8, device="meta")
        self.part_type = held or low
        self.cast = held is not None and held != low
        self.flat: Tensor | None = None
        count = sum(math.ceil(p.numel() / job.gpus) for p in self.trained)
        self.shard = (
            nn.Parameter(torch.empty(count, dtype=self.part_type, device="meta")) if count else None
        )
        self.waiting = len(self.trained)

    def gather(self, gpus: int) -> list[Tensor]:
        """Bring all of the unit's weights here, unless they are; returns what was allocated."""
        if self.flat is not None:
            return []
        copy = None
        if self.cast:
            copy = torch.empty(self.whole_bytes // gpus, dtype=torch.uint8, device="meta")
        self.flat = torch.empty(self.whole_bytes, dtype=torch.uint8, device="meta")
        return [self.flat] if copy is None else [self.flat, copy]

    def free(self) -> None:
        self.flat = None

    def reduce(self, gpus: int) -> None:
        """Whole gradients become one flat tensor, then the rank's part."""
        assert self.shard is not None
        flat = torch.empty(sum(p.numel() for p in self.trained), dtype=self.low, device="meta")
        for p in self.trained:
            p.grad = None
        part = torch.empty(self.shard.numel(), dtype=self.low, device="meta")
        del flat
        self.shard.grad = part.to(self.part_type)


class Fsdp1:
    """Hooks that gather and free; the model's own parameters are taken to weigh nothing.

    Args:
        model: on the meta device, adapters attached.
        layers: its decoder layers.
        job: how many GPUs, which types.
        types: name -> type.
    """

    def __init__(
        self, model: Any, layers: list[nn.Module], job: Job, types: dict[str, Any]
    ) -> None:
        self.gpus = job.gpus
        self.prefetches = job.checkpoint != "reentrant"
        self.retained: list[Tensor] = []
        self.recorder: Recorder | None = None
        self.gathered: set[int] = set()
        # adapters are units of their own (`fsdp_auto_wrap_policy`), or ignored and replicated
        self.adapters = [p for p in model.parameters() if p.requires_grad] if job.adapter else []
        self.replicated = job.fused_kernels
        apart = {id(p) for p in self.adapters}
        self.units: list[_Unit] = []
        inside: set[int] = set()
        for layer in layers:
            weights = [p for p in layer.parameters() if id(p) not in apart]
            inside |= {id(p) for p in weights}
            self.units.append(_Unit(weights, job, types))
        rest = [p for p in model.parameters() if id(p) not in apart | inside]
        self.root = _Unit(rest, job, types)
        self.scales = [t for m in model.modules() if isinstance(m, PackedLinear) for t in m.scales]
        self.adapter_parts = [
            p if self.replicated else nn.Parameter(p.new_empty(math.ceil(p.numel() / self.gpus)))
            for p in self.adapters
        ]
        for unit in [*self.units, self.root]:
            for p in unit.trained:
                p.register_post_accumulate_grad_hook(self._counted(unit))

    def held(self) -> Iterator[Tensor]:
        """What a rank holds between steps: parts, adapters, what is not sharded."""
        yield from (unit.part for unit in [*self.units, self.root])
        yield from self.scales
        yield from self.adapter_parts

    def trained(self, _: Any) -> list[nn.Parameter]:
        """What the rank's optimizer steps."""
        if self.adapters:
            return list(self.adapter_parts)
        return [u.shard for u in [*self.units, self.root] if u.shard is not None]

    def begin(self) -> None:
        """The root is gathered before the first layer and stays."""
        self._gather(self.root)

    def finish(self) -> None:
        """End of backward: what was retained goes, the root is freed."""
        self.retained.clear()
        for unit in [*self.units, self.root]:
            unit.free()
        if self.adapters and not self.replicated:
            for part, whole in zip(self.adapter_parts, self.adapters, strict=True):
                whole.grad, part.grad = None, torch.empty_like(part)

    def before(self, i: int, hidden: Tensor) -> None:
        """Layer `i` is about to run on `hidden` [B, L, H]."""
        self._gather(self.units[i])
        if torch.is_grad_enabled() and hidden.requires_grad and not self.units[i].trained:
            self.retained.append(hidden)

    def after(self, i: int, hidden: Tensor, out: Tensor) -> None:
        """Layer `i` has made `out` of `hidden`."""
        self.units[i].free()
        if torch.is_grad_enabled() and out.requires_grad:
            out.register_hook(lambda _: self._backward_begins(i))
            if hidden.requires_grad and not self.units[i].trained:
                hidden.register_hook(lambda _: self.units[i].free())

    def _backward_begins(self, i: int) -> None:
        self._gather(self.units[i])
        if i and self.prefetches:
            self._gather(self.units[i - 1])

    def _gather(self, unit: _Unit) -> None:
        made = unit.gather(self.gpus)
        if self.recorder is not None:
            self.gathered |= self.recorder.numbers_of(made)

    def _counted(self, unit: _Unit) -> Any:
        def counted(_: Any) -> None:
            unit.waiting -= 1
            if not unit.waiting:
                unit.waiting = len(unit.trained)
                unit.reduce(self.gpus)
                unit.free()

        return counted
