"""Parameters that FSDP2 gathers together, and when a step of a rehearsed model visits them.

`fully_shard` makes a group of each module that Accelerate names to it (`fsdp2_prepare_model`,
accelerate 1.15): the input embedding, each decoder layer (a class of the model's
`_no_split_modules`, or of `fsdp_config.transformer_layer_cls_to_wrap`), and the final norm with the
head. What is in none of them goes to the root's group; here it is counted to the head's, which is
kept as the root's is. (With adapters Accelerate does not find the norm, so that it is in the
root's.) Tied embeddings are one parameter and of the head's group, from the start on.

Groups change hands in hooks of their modules: forward begins where a module is entered, backward
where the gradient of its output comes. `Visits` hangs hooks in the same places. Forwards
within backward (checkpointing) find their group's weights there and are no visits. A loss that
takes the head's weight without calling it (TRL's fused head) leaves its group unfinished; then its
backward begins where the gradient of the whole model's output comes.

Sizes: frozen parameters count as they are held, also FP8 codes (bytes, which mixed precision leaves
alone); those that train as numbers, since mixed precision holds them in float32. `cast_to` gives
floating parameters the type in which they are gathered, as they are when FSDP2 computes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from finetune.estimator.memory.sharding import Group, Phase, accelerate_groups
from finetune.estimator.trace.trace import plain_tensors


@dataclass(frozen=True)
class Visit:
    """From event number `start` on, a group computes.

    Attributes:
        phase: of the step.
        group: index; 0 in `loss` and `optimizer`.
        start: into the events of the tape.
    """

    phase: Phase
    group: int
    start: int


@dataclass(frozen=True)
class ModelGroups:
    """The groups of a model.

    Attributes:
        groups: as Accelerate makes them, in the order of forward.
        modules: name -> index of its group, of those whose hooks tell of visits.
        head: name of the output embedding.
        trainable_bytes: of all parameters that train, as they are on one device.
    """

    groups: tuple[Group, ...]
    modules: dict[str, int]
    head: str
    trainable_bytes: int


def cast_to(model: nn.Module, dtype: torch.dtype) -> dict[str, int]:
    """Give floating parameters on meta the type in which they are gathered, in place.

    Returns:
        Of frozen parameters whose type has changed: name -> bytes of an element before.
    """
    before: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        if parameter.dtype.is_floating_point and parameter.dtype != dtype:
            if not parameter.requires_grad:
                before[name] = parameter.element_size()
            parameter.data = parameter.data.to(dtype)
    return before


def model_groups(
    model: Any, *, layers: Collection[str] | None = None, held: dict[str, int] | None = None
) -> ModelGroups:
    """The groups of a model with its adapters.

    Args:
        model: a Transformers model, also under PEFT.
        layers: class names of decoder layers; left out: those that the model says not to split.
        held: frozen parameter -> bytes of an element of its shard, where these differ from what it
            has now.
    """
    classes = set(getattr(model, "_no_split_modules", None) or ()) if layers is None else {*layers}
    embedding, head = (
        getattr(model, f"get_{which}_embeddings", lambda: None)() for which in ("input", "output")
    )
    tied = head is not None and getattr(head, "weight", 0) is getattr(embedding, "weight", None)
    found: list[nn.Module] = []
    inside: set[nn.Module] = set()
    names: dict[str, int] = {}
    for name, module in model.named_modules():
        if module in inside:
            continue
        if type(module).__name__ in classes:
            found.append(module)
            inside.update(module.modules())
            names[name] = len(found)
        elif module is embedding:
            names[name] = 0
    tail = 0 if tied else len(found) + 1
    head_name = ""
    for name, module in model.named_modules():
        direct = name.rpartition(".")[0] == _decoder(names)
        if module is head or (direct and "Norm" in type(module).__name__):
            names[name] = tail
            head_name = name if module is head else head_name
    # A parameter belongs to the first group that has it.
    owner: dict[int, int] = {}
    for index, module in enumerate([embedding, *found]):
        for parameter in module.parameters() if module is not None else ():
            owner.setdefault(id(parameter), index)
    sizes = [[0, 0, 0] for _ in range(len(found) + 2)]  # frozen, trainable, frozen as held
    trainable_bytes = 0
    for name, parameter in model.named_parameters():
        own = sizes[owner.get(id(parameter), len(found) + 1)]
        if parameter.requires_grad:
            own[1] += parameter.numel()
            trainable_bytes += _nbytes(parameter)
        else:
            own[0] += _nbytes(parameter)
            each = (held or {}).get(name) if parameter.dtype.is_floating_point else None
            own[2] += _nbytes(parameter) if each is None else parameter.numel() * each
    labels = ["embedding", *(f"layer {i}" for i in range(len(found))), "head"]
    first, *middle, last = (
        Group(label, own[0], own[1], held=None if own[2] == own[0] else own[2])
        for label, own in zip(labels, sizes, strict=True)
    )
    groups = accelerate_groups(first, middle, last, tied=tied)
    return ModelGroups(groups, names, head_name, trainable_bytes)


def _decoder(names: dict[str, int]) -> str:
    """Name of the module that has the decoder's layers in a list."""
    layer = next((name for name, index in names.items() if index == 1), "")
    return layer.rpartition(".")[0].rpartition(".")[0]


def _nbytes(parameter: Tensor) -> int:
    return sum(plain.nbytes for plain in plain_tensors(parameter))


class Visits:
    """Which group computes when, told by hooks.

    Args:
        model: with the modules of `groups`.
        groups: of it.
        now: number of events so far.
    """

    def __init__(self, model: nn.Module, groups: ModelGroups, now: Callable[[], int]) -> None:
        self.visits: list[Visit] = []
        self._now, self._on, self._headless = now, False, True
        self._tail = groups.modules.get(groups.head)
        for name, module in model.named_modules():
            if (index := groups.modules.get(name)) is not None:
                module.register_forward_pre_hook(lambda *_, i=index: self._enter(i))
                module.register_forward_hook(lambda _m, _i, out, i=index: self._watch(out, i))
            if name == groups.head:
                module.register_forward_pre_hook(self._call_head)
        model.register_forward_hook(lambda _m, _i, out: self._end_forward(out))

    def begin(self) -> None:
        """A step begins; what was before was none."""
        self._on, self._headless = True, True
        self.visits.clear()

    def move(self, phase: Phase, group: int = 0) -> None:
        """On to another group or phase."""
        last = self.visits[-1] if self.visits else None
        if self._on and (last is None or (last.phase, last.group) != (phase, group)):
            self.visits.append(Visit(phase, group, self._now()))

    def _enter(self, group: int) -> None:
        phase = self.visits[-1].phase if self.visits else "forward"
        # Of backwards only reentrant checkpointing comes here first: no hook told of the group.
        if phase in ("forward", "backward"):
            self.move(phase, group)

    def _call_head(self, *_: Any) -> None:
        self._headless = False

    def _end_forward(self, output: Any) -> None:
        if self.visits and self.visits[-1].phase == "forward":
            self.move("loss")
            if self._headless and self._tail is not None:
                self._watch(output, self._tail)

    def _watch(self, output: Any, group: int) -> None:
        values = output.values() if isinstance(output, dict) else output
        for tensor in values if isinstance(output, (tuple, list, dict)) else (output,):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(lambda _: self.move("backward", group))
