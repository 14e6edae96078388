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

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.benchmarks.score.jobs import Job


def trainer_changes(trainer: type[Any]) -> list[tuple[Any, str, Any]]:
    """How a trainer steps under FSDP 1: (owner, name, value) for `replaced`."""
    step = trainer.training_step

    def training_step(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        loss = step(self, *args, **kwargs)
        self.model.fsdp1.finish()
        return loss

    def create_optimizer(self: Any, *_: Any, **__: Any) -> Any:
        self.optimizer = torch.optim.AdamW(self.model.fsdp1.trained, foreach=True)
        return self.optimizer

    return [
        (trainer, "training_step", training_step),
        (trainer, "create_optimizer", create_optimizer),
    ]


def share(model: Any, base: Any, job: Job) -> None:
    """Have `model` (with its adapters around `base`) run as one rank's part, in place."""
    object.__setattr__(model, "fsdp1", Fsdp1(model, base, job))


def decoder_layers(base: Any) -> list[nn.Module]:
    """The repeated layers of a model."""
    lists = [m for m in base.get_decoder().children() if isinstance(m, nn.ModuleList)]
    return list(max(lists, key=len))


class _Unit:
    """Weights that are gathered together; the rank keeps a part of them.

    Attributes:
        whole_bytes: of all weights in the type of computing, codes as they are.
        part: the rank's part of what is frozen; `shard` is its part of what trains.
    """

    def __init__(self, parameters: list[nn.Parameter], job: Job) -> None:
        self.trained = [p for p in parameters if p.requires_grad]
        self.held = torch.float32 if job.float32_shards else torch.bfloat16
        self.whole_bytes = sum(p.numel() * min(p.element_size(), 2) for p in parameters)
        frozen = [p for p in parameters if not p.requires_grad]
        part = sum(math.ceil(p.numel() / job.gpus) * p.element_size() for p in frozen)
        self.part = torch.empty(part, dtype=torch.uint8)
        count = sum(math.ceil(p.numel() / job.gpus) for p in self.trained)
        self.shard = nn.Parameter(torch.empty(count, dtype=self.held)) if count else None
        self.flat: Tensor | None = None
        self.waiting = len(self.trained)

    def gather(self, gpus: int) -> None:
        """Bring all of the unit's weights here, unless they are."""
        if self.flat is not None:
            return
        copy = None
        if self.held is torch.float32:  # the part is cast before it is sent
            copy = torch.empty(self.whole_bytes // gpus, dtype=torch.uint8)
        self.flat = torch.empty(self.whole_bytes, dtype=torch.uint8)
        del copy

    def free(self) -> None:
        self.flat = None

    def reduce(self) -> None:
        """Whole gradients become one flat tensor, then the rank's part."""
        assert self.shard is not None
        flat = torch.empty(sum(p.numel() for p in self.trained), dtype=torch.bfloat16)
        for p in self.trained:
            p.grad = None
        part = torch.empty(self.shard.numel(), dtype=torch.bfloat16)
        del flat
        self.shard.grad = part.to(self.held)


class Fsdp1:
    """Hooks that gather and free; the model's own parameters weigh nothing from then on.

    Args:
        model: of fake tensors, adapters attached.
        base: the model inside of the adapters.
        job: how many GPUs, which types.

    Attributes:
        trained: what the rank's optimizer steps.
    """

    def __init__(self, model: Any, base: Any, job: Job) -> None:
        self.gpus = job.gpus
        self.prefetches = job.checkpoint != "reentrant"
        self.retained: list[Tensor] = []
        # Adapters are units of their own (`fsdp_auto_wrap_policy`), or, when kernels fuse them,
        # ignored by FSDP and replicated.
        self.adapters = [p for p in model.parameters() if p.requires_grad] if job.adapter else []
        self.replicated = job.fused_kernels
        apart = {id(p) for p in self.adapters}
        layers = decoder_layers(base)
        inside = [[p for p in layer.parameters() if id(p) not in apart] for layer in layers]
        apart |= {id(p) for weights in inside for p in weights}
        self.root = _Unit([p for p in base.parameters() if id(p) not in apart], job)
        self.units = [_Unit(weights, job) for weights in inside]
        self.adapter_parts = self.adapters if self.replicated else [
            nn.Parameter(p.new_empty(math.ceil(p.numel() / self.gpus))) for p in self.adapters
        ]  # fmt: skip
        shards = [u.shard for u in (*self.units, self.root) if u.shard is not None]
        self.trained = [*self.adapter_parts, *shards]
        self._take_weights(
            model, [p for p in base.parameters() if id(p) not in map(id, self.adapters)]
        )
        for i, layer in enumerate(layers):
            layer.forward = self._around(i, layer)  # pyright: ignore[reportAttributeAccessIssue]
        base.register_forward_pre_hook(lambda *_: self.root.gather(self.gpus))  # and stays

    def _take_weights(self, model: Any, own: list[nn.Parameter]) -> None:
        for unit in (*self.units, self.root):
            for p in unit.trained:
                p.register_post_accumulate_grad_hook(self._counted(unit))
        weightless = own if self.replicated or not self.adapters else [*own, *self.adapters]
        for p in weightless:  # one element, seen as all
            p.data = p.data.new_empty(()).expand(p.shape)
        for i, unit in enumerate((*self.units, self.root)):
            model.register_buffer(f"fsdp1_part_{i}", unit.part)
        for i, p in enumerate(self.trained if not self.replicated else ()):
            model.register_parameter(f"fsdp1_shard_{i}", p)

    def finish(self) -> None:
        """End of backward: what was retained goes, the root is freed."""
        self.retained.clear()
        for unit in (*self.units, self.root):
            unit.free()
        if self.adapters and not self.replicated:
            for part, whole in zip(self.adapter_parts, self.adapters, strict=True):
                whole.grad, part.grad = None, torch.empty_like(part)

    def _around(self, i: int, layer: Any) -> Callable[..., Any]:
        """The forward of layer `i`: checkpoint around unit around layer.

        So Transformers nested them until 5.17, which checkpoints inside of the hooks.
        """
        plain = type(layer).forward.__wrapped__.__get__(layer)

        def unit(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
            self._before(i, hidden)
            out = plain(hidden, *args, **kwargs)
            self._after(i, hidden, out[0] if isinstance(out, tuple) else out)
            return out

        def forward(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
            if not layer.gradient_checkpointing:
                return unit(hidden, *args, **kwargs)
            again = functools.partial(unit, **kwargs)
            return layer._gradient_checkpointing_func(again, hidden, *args)

        return forward

    def _before(self, i: int, hidden: Tensor) -> None:
        """Layer `i` is about to run on `hidden` [B, L, H]."""
        self.units[i].gather(self.gpus)
        if torch.is_grad_enabled() and hidden.requires_grad and not self.units[i].trained:
            self.retained.append(hidden)

    def _after(self, i: int, hidden: Tensor, out: Tensor) -> None:
        """Layer `i` has made `out` of `hidden`."""
        self.units[i].free()
        if torch.is_grad_enabled() and out.requires_grad:
            out.register_hook(lambda _: self._backward_begins(i))
            if hidden.requires_grad and not self.units[i].trained:
                hidden.register_hook(lambda _: self.units[i].free())

    def _backward_begins(self, i: int) -> None:
        self.units[i].gather(self.gpus)
        if i and self.prefetches:
            self.units[i - 1].gather(self.gpus)

    def _counted(self, unit: _Unit) -> Any:
        def counted(_: Any) -> None:
            unit.waiting -= 1
            if not unit.waiting:
                unit.waiting = len(unit.trained)
                unit.reduce()
                unit.free()

        return counted
