"""Class swaps: put a mixin in front of a module's class, and undo it.

The module stays the *same object*: only its `__class__` changes, to a subclass, as FSDP2's
`fully_shard` does it. All references stay valid: the parent, PEFT's `base_layer`, hooks, the
parameters in the optimizer, ties, and names in the state dict. A mixin's data about one module are
*facts*, attributes that go with the swap. Swaps stack: storage, FP8 compute, adapter.

Copies (pickle, deepcopy) are of the plain module, as a converted one refers to engines and hooks of
this process. Storage stays in copies, since the weight exists only as codes.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn

from finetune.precision.model.layers import is_conv1d

if TYPE_CHECKING:
    Module = nn.Module
else:  # a mixin stands in front of a module's class and must not bring a second one
    Module = object


class Swapped(Module):
    """Base of the mixins; `swap` fills in the first five attributes, a mixin says the others.

    Attributes:
        swapped_by: mixin of the outermost swap.
        swapped_from: class before that swap.
        swapped_facts: names of the attributes added by that swap.
        plain_class: class without any swap except those that copies keep.
        transposed_weight: True if the weight is [K, N], as in GPT-2's `Conv1D`.
        in_copies: True if copies of a module keep this swap.
        can_compile: False if `torch.compile` has to leave such a module out.
        multiplies: True if its forward computes in the precision of the plan.
        keeps_name: True if the class keeps the name of the original, by which FSDP wraps layers and
            which checkpoints record.
    """

    swapped_by: ClassVar[type[Swapped]]
    swapped_from: ClassVar[type[nn.Module]]
    swapped_facts: ClassVar[tuple[str, ...]]
    plain_class: ClassVar[Any]
    transposed_weight: ClassVar[bool]
    in_copies: ClassVar[bool] = False
    can_compile: ClassVar[bool] = True
    multiplies: ClassVar[bool] = False
    keeps_name: ClassVar[bool] = False

    def __reduce_ex__(self, protocol: Any) -> Any:
        swaps = [cls for cls in type(self).__mro__ if "swapped_from" in vars(cls)]
        mixins = [(cls.swapped_by, cls.swapped_facts) for cls in swaps]
        kept = tuple((mixin, facts) for mixin, facts in mixins if mixin.in_copies)
        dropped = {name for mixin, facts in mixins if not mixin.in_copies for name in facts}
        state = {name: value for name, value in self.__dict__.items() if name not in dropped}
        # The last swap's is the class of the model's author.
        return _empty, (swaps[-1].swapped_from, kept), state


def weight_matrix(module: Any) -> Any:
    """The weight of a swapped linear layer as [N, K], a view of its parameter."""
    return module.weight.t() if module.transposed_weight else module.weight


def swap(module: nn.Module, mixin: type[Swapped], **facts: Any) -> None:
    """Put a mixin in front of the class of a module, with `facts` as attributes of the module."""
    cls: Any = swapped_class(mixin, type(module), tuple(facts))
    module.__class__ = cls
    # Bypasses nn.Module.__setattr__: an engine that is a module must not become a child.
    module.__dict__.update(facts)


def unswap(module: nn.Module, *, to: type[nn.Module] | None = None) -> None:
    """Restore a module's plain class, or the class `to`, and remove the facts of its swaps.

    FSDP2's own class in front of ours stays in front of the plain one.
    """
    cls: Any = type(module)
    to = to or getattr(cls, "plain_class", cls)
    for swapped in cls.__mro__[: cls.__mro__.index(to)]:
        for name in vars(swapped).get("swapped_facts", ()):
            module.__dict__.pop(name, None)
    # Without it, the outermost class is somebody else's, FSDP2's say, and has to stay.
    plain: Any = to if "swapped_from" in vars(cls) else _in_front(cls, to)
    module.__class__ = plain


@functools.cache
def _in_front(cls: type[nn.Module], to: type[nn.Module]) -> type[nn.Module]:
    """A class of somebody else that was put in front of ours, in front of `to`."""
    # FSDP2's class has the bases (FSDPModule, class of the module).
    bases = tuple(to if issubclass(base, Swapped) else base for base in cls.__bases__)
    return cls if bases == cls.__bases__ else type(cls.__name__, bases, {**vars(cls)})


@functools.cache
def swapped_class(
    mixin: type[Swapped], original: type[nn.Module], facts: tuple[str, ...]
) -> type[nn.Module]:
    """The class of a module of class `original` with a mixin, cached."""
    members: dict[str, Any] = {
        "swapped_by": mixin,
        "swapped_from": original,
        "swapped_facts": facts,
        "plain_class": getattr(original, "plain_class", original),
        "transposed_weight": is_conv1d(original),
        "__module__": mixin.__module__,
    }
    name = f"{mixin.__name__.removesuffix('Mixin')}{original.__name__}"
    if mixin.keeps_name:
        name = original.__name__
        members |= {"__module__": original.__module__, "__qualname__": original.__qualname__}
    made: Any = type(name, (mixin, original), members)
    if mixin.in_copies:
        # Storage outlives a conversion: undoing the swaps above it leads back to this class.
        made.plain_class = made
    return made


def _empty(original: type[nn.Module], kept: tuple[tuple[Any, tuple[str, ...]], ...]) -> nn.Module:
    """A module without attributes, of a class with these swaps, outermost first."""
    cls = original
    for mixin, facts in reversed(kept):
        cls = swapped_class(mixin, cls, facts)
    return cls.__new__(cls)
