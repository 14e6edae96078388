"""A model's modules by name, found in one walk and handed on to all who ask for them.

A model is planned, converted, proven and checked at each step, and each of these asks for its
modules or parameters. A `Tree` answers as the model itself would, from one walk.

*It is stale once a module has other children than it had*, and then walks again by itself: a module
was added, replaced or removed. What a module is (its class, weights, types and flags) is no part of
it and is read from the module when asked, so that converting, sharding, casting or freezing leaves
a tree as it is. To look costs less than a microsecond a module.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from torch import nn


class Tree:
    """The modules of a model, shared ones once, in the order of `nn.Module.named_modules`.

    Attributes:
        model: its root.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._named: dict[str, nn.Module] = {}
        self._children: list[tuple[nn.Module, dict[str, Any]]] = []

    @staticmethod
    def of(model: nn.Module | Tree) -> Tree:
        """The tree of a model, or the one that is given."""
        return model if isinstance(model, Tree) else Tree(model)

    @property
    def named(self) -> dict[str, nn.Module]:
        """Name -> module."""
        if not self._named or any(m._modules != children for m, children in self._children):
            self._named = dict(self.model.named_modules())
            self._children = [(m, dict(m._modules)) for m in self._named.values()]
        return self._named

    def named_modules(self) -> Collection[tuple[str, nn.Module]]:
        """Names and modules."""
        return self.named.items()

    def modules(self) -> Collection[nn.Module]:
        """Modules."""
        return self.named.values()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Names and parameters as they are now, tied ones once."""
        known: set[int] = set()
        for prefix, module in self.named.items():
            for local, p in module._parameters.items():
                if p is not None and id(p) not in known:
                    known.add(id(p))
                    yield f"{prefix}.{local}" if prefix else local, p

    def parameters(self) -> Iterator[nn.Parameter]:
        """Parameters as they are now, tied ones once."""
        return (p for _, p in self.named_parameters())


def named_trainable(model: nn.Module | Tree) -> dict[str, nn.Parameter]:
    """Trainable parameters by name, tied ones once."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}
