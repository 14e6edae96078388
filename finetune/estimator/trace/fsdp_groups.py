"""Groups of parameters that FSDP2 gathers together, and their visits in a rehearsed step.

`fully_shard` makes a group of each module that Accelerate passes to it (`fsdp2_prepare_model`,
accelerate 1.15): the input embedding, each decoder layer (a class of the model's
`_no_split_modules`, or of `fsdp_config.transformer_layer_cls_to_wrap`), and the final norm with the
head. All else goes to the root's group; here it counts to the head's, which like the root's is not
resharded. Tied embeddings are one parameter of the head's group.

With adapters Accelerate does not find the norm, which falls to the root, so that nothing of the
head's group is called where a loss takes the head's weight (TRL's fused head): the loss gathers it
as one tensor (`DTensor.full_tensor`), outside of FSDP2's buffers.

FSDP2 gathers and frees in module hooks: forward begins on entering a module, backward when the
gradient of its output arrives. `VisitRecorder` hooks the same places. Forwards within backward
(checkpointing) find their weights gathered and are no visits. A loss that uses the head's weight
without calling it (TRL's fused head) leaves its group unfinished; its backward then begins with the
gradient of the whole model's output.

An example: a Llama of two layers has the groups 0 (embedding), 1 and 2 (layers) and 3 (norm and
head). A step without a fused head visits forward 0, 1, 2, 3, loss, backward 3, 2, 1, 0, optimizer;
tied, the head is in group 0, and it visits forward 0, 1, 2, 0, loss, backward 0, 2, 1, 0.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from finetune.estimator.trace.trace import Trace, plain_tensors

Phase = Literal["forward", "loss", "backward", "optimizer"]


@dataclass(frozen=True)
class Group:
    """Parameters that are gathered together.

    Trainable ones count in elements, since mixed precision stores them in float32; frozen ones in
    bytes, FP8 codes too (mixed precision ignores them).

    Attributes:
        frozen: bytes of its frozen parameters as gathered.
        trainable: number of trainable elements.
        reshard: freed after forward and gathered again for backward.
        stored: bytes of its frozen parameters as stored, if not `frozen`.
        called: gathered by a hook; False for a head that a loss gathers itself, as one tensor.
    """

    frozen: int = 0
    trainable: int = 0
    reshard: bool = True
    stored: int | None = None
    called: bool = True

    @property
    def frozen_stored(self) -> int:
        """Bytes of the frozen parameters as stored."""
        return self.frozen if self.stored is None else self.stored


class GroupVisit(NamedTuple):
    """From event number `start` of the trace on, a group computes.

    `group` is its index; 0 in `loss` and `optimizer`.
    """

    phase: Phase
    group: int
    start: int


@dataclass(frozen=True)
class ModelGroups:
    """Parameter groups of a model.

    Attributes:
        groups: as Accelerate makes them, in forward order.
        modules: module name -> index of its group, for modules whose hooks begin and end visits.
        head: name of the output embedding.
        trainable_bytes: bytes of all trainable parameters on one device.
    """

    groups: tuple[Group, ...]
    modules: dict[str, int]
    head: str
    trainable_bytes: int


def cast_to(model: nn.Module, dtype: torch.dtype) -> dict[str, int]:
    """Cast floating-point parameters on meta to the gathered dtype, in place.

    Returns:
        Frozen parameter -> bytes per element before, for those whose dtype changed.
    """
    before: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        if parameter.dtype.is_floating_point and parameter.dtype != dtype:
            if not parameter.requires_grad:
                before[name] = parameter.element_size()
            parameter.data = parameter.data.to(dtype)
    return before


def model_groups(
    model: Any, *, layers: Collection[str] | None = None, stored: dict[str, int] | None = None
) -> ModelGroups:
    """Parameter groups of a model with its adapters.

    Args:
        model: a Transformers model, also under PEFT.
        layers: class names of decoder layers; default: the model's `_no_split_modules`.
        stored: frozen parameter -> bytes per element of its shard, if different from its present
            dtype.
    """
    classes = set(getattr(model, "_no_split_modules", None) or ()) if layers is None else {*layers}
    embedding, head = (
        getattr(model, f"get_{which}_embeddings", lambda: None)() for which in ("input", "output")
    )
    tied = head is not None and getattr(head, "weight", 0) is getattr(embedding, "weight", None)
    decoder_layers: list[nn.Module] = []
    inside: set[nn.Module] = set()
    names: dict[str, int] = {}
    for name, module in model.named_modules():
        if module in inside:
            continue
        if type(module).__name__ in classes:
            decoder_layers.append(module)
            inside.update(module.modules())
            names[name] = len(decoder_layers)
        elif module is embedding:
            names[name] = 0
    # A parameter can be in one group only, so a tied head goes where its embedding is.
    tail = 0 if tied else len(decoder_layers) + 1  # the norm and the head, or all that is tied
    first_layer = next((name for name, index in names.items() if index == 1), "")
    # `model.layers.0` lies in the list `model.layers` of the decoder `model`, which has the last
    # norm.
    decoder, head_name = first_layer.rpartition(".")[0].rpartition(".")[0], ""
    for name, module in model.named_modules():
        direct = name.rpartition(".")[0] == decoder
        if module is head or (direct and "Norm" in type(module).__name__):
            names[name] = tail
            head_name = name if module is head else head_name
    # A parameter belongs to the first group that contains it, or else to the tail's.
    owner: dict[int, int] = {}
    for index, module in enumerate([embedding, *decoder_layers]):
        for parameter in module.parameters() if module is not None else ():
            owner.setdefault(id(parameter), index)
    count = max(tail, len(decoder_layers)) + 1
    frozen, trainable, frozen_stored = ([0] * count for _ in range(3))
    trainable_bytes = 0
    for name, parameter in model.named_parameters():
        index = owner.get(id(parameter), tail)
        nbytes = sum(plain.nbytes for plain in plain_tensors(parameter))
        if parameter.requires_grad:
            trainable[index] += parameter.numel()
            trainable_bytes += nbytes
        else:
            frozen[index] += nbytes
            itemsize = (stored or {}).get(name) if parameter.dtype.is_floating_point else None
            frozen_stored[index] += nbytes if itemsize is None else parameter.numel() * itemsize
    groups = tuple(
        # The last group of forward is the first of backward: freeing it between would gather it
        # twice.
        Group(frozen[i], trainable[i], reshard=i != tail, stored=frozen_stored[i])
        for i in range(count)
    )
    return ModelGroups(groups, names, head_name, trainable_bytes)


class VisitRecorder:
    """Hooks that record which group computes, with the event count of `trace` as the clock."""

    def __init__(self, model: nn.Module, groups: ModelGroups, trace: Trace) -> None:
        self.visits: list[GroupVisit] = []
        # Off until `begin`: the first step makes optimizer states, and is not the one that counts.
        self._trace, self._on, self._headless = trace, False, True
        self._tail, self._groups = groups.modules.get(groups.head), groups
        self._has_adapters = hasattr(model, "peft_config")
        for name, module in model.named_modules():
            if (index := groups.modules.get(name)) is not None:
                module.register_forward_pre_hook(lambda *_, i=index: self._enter(i))
                module.register_forward_hook(lambda _m, _i, out, i=index: self._watch(out, i))
            if name == groups.head:
                module.register_forward_pre_hook(self._call_head)
        model.register_forward_hook(lambda _m, _i, out: self._end_forward(out))

    def begin(self) -> None:
        """Begin a step; discard earlier visits."""
        self._on, self._headless = True, True
        self.visits.clear()

    @property
    def groups(self) -> ModelGroups:
        """The groups as the recorded step gathers them."""
        groups = list(self._groups.groups)
        if self._tail and self._headless and self._has_adapters:  # 0: tied, called as embedding
            groups[self._tail] = replace(groups[self._tail], called=False)
        return replace(self._groups, groups=tuple(groups))

    def move(self, phase: Phase, group: int = 0) -> None:
        last = self.visits[-1] if self.visits else None
        if self._on and (last is None or (last.phase, last.group) != (phase, group)):
            self.visits.append(GroupVisit(phase, group, len(self._trace.events)))

    def _enter(self, group: int) -> None:
        phase = self.visits[-1].phase if self.visits else "forward"
        # In backward, only reentrant checkpointing gets here before the gradient's hook.
        if phase in ("forward", "backward"):
            self.move(phase, group)

    def _call_head(self, *_: Any) -> None:
        self._headless = False

    def _end_forward(self, output: Any) -> None:
        if self.visits and self.visits[-1].phase == "forward":
            self.move("loss")
            # Without a call of the head nothing tells when its backward begins but the loss's
            # gradient.
            if self._headless and self._tail is not None:
                self._watch(output, self._tail)

    def _watch(self, output: Any, group: int) -> None:
        values = output.values() if isinstance(output, dict) else output
        for tensor in values if isinstance(output, (tuple, list, dict)) else (output,):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(lambda _: self.move("backward", group))
