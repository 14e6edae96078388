"""PEFT's adapters on experts, multiplied apart from the base.

Adapters on experts are PEFT's `ParamWrapper`, which computes W + s·BA for all experts, [E, N, K],
in each forward, and its dense gradient in backward. Split, they are

    t = x · A_eᵀ                  [S, r], grouped
    y = base(x) + s · t · B_eᵀ    [S, N], grouped

which is the same sum without a tensor of W's size, and leaves the base as it is stored. PEFT's
modules, parameters and files do not change. Both classes stay in copies, like storage.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from finetune.precision.backends.base import ObservedMixin, Owner
from finetune.precision.experts import ExpertsMixin, stored_names
from finetune.precision.layers import are_served_experts, declared_matmuls
from finetune.precision.lora import Adapter
from finetune.precision.stored import refuse_merge
from finetune.precision.swap import Swapped, swap


class SplitMixin(Swapped):
    """Mixin of PEFT's `ParamWrapper` around served experts: hands its factors on to them."""

    in_copies = True
    keeps_name = True
    base_layer: Any
    parameter_name: str

    def forward(self, x: Tensor, *args: Any, adapters: Any = None, **kwargs: Any) -> Tensor:
        this: Any = self
        if this.disable_adapters and this.merged:
            this.unmerge()
        own: tuple[Adapter, ...] = ()
        if not this.disable_adapters and not this.merged:
            own = tuple(self._adapter(n) for n in this.active_adapters if n in this.lora_A)
        given = {**(adapters or {}), self.parameter_name: own}
        return self.base_layer(x, *args, adapters=given, **kwargs)

    def _adapter(self, name: str) -> Adapter:
        this: Any = self
        of_a, of_b = (self._owner(f"lora_{which}.{name}") for which in "AB")
        a, b = this.lora_A[name].weight, this.lora_B[name].weight
        return Adapter(a, b, float(this.scaling[name]), (of_a, of_b))

    def _owner(self, name: str) -> Owner:
        return Owner(name, [])

    def merge(self, *args: Any, **kwargs: Any) -> None:
        this: Any = self
        if self.parameter_name in stored_names(this.get_base_layer()):
            raise refuse_merge(self.parameter_name)
        super().merge(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]


class ConvertedSplitMixin(ObservedMixin):
    """Mixin of a split adapter in a converted model: its GEMMs are named."""

    fp8_name: str
    keeps_name = True

    def _owner(self, name: str) -> Owner:
        return Owner(f"{self.fp8_name}.{name}", self.fp8_observers)


def iter_adapted(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Name and module of each of PEFT's wrappers around a stack of served experts."""
    for name, module in model.named_modules():
        wrapper: Any = module
        if type(module).__name__ != "ParamWrapper":
            continue
        experts = wrapper.get_base_layer()
        if are_served_experts(experts) and wrapper.parameter_name in declared_matmuls(experts):
            yield name, wrapper


def split_adapters(model: nn.Module) -> None:
    """Let the adapters on experts be multiplied apart from the base, from now on."""
    for _, wrapper in list(iter_adapted(model)):
        if not isinstance(wrapper.get_base_layer(), ExpertsMixin):
            swap(wrapper.get_base_layer(), ExpertsMixin)
        if not isinstance(wrapper, SplitMixin):
            swap(wrapper, SplitMixin)
