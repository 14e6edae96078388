"""Attribution of matmuls by declared parameters, in whatever precision they run.

The witness sees GEMMs, and knows a linear layer's by its module. A parameter's have no module, so
while the witness watches, a `TorchFunctionMode` over the whole model looks at the arguments of
every call: GEMMs that run inside one which takes a parameter and something else belong to that
parameter, and so do those of the autograd nodes it leaves. FP8 products have been named by the
converter before (`parameters`); what is found here are products that run in high precision, as
planned, or past the converter, as these would do without a word:

    x @ self.weight.to(x.dtype)      a copy, not the parameter
    kernel(x, self.weight)           somebody else's function

A tensor made of a parameter without a GEMM (a cast, a copy, a scaled weight) is therefore followed
under the parameter's name. Looking rows up, as an embedding does, makes no such tensor, and a
product of the parameter with itself (a penalty on its singular values) has no tokens in it.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from finetune.precision.backends.base import Hook, in_backward
from finetune.precision.parameters import Parameters, taken_matrices, tensors_of

_ADD_TO = (torch.baddbmm, torch.addmm, Tensor.baddbmm, Tensor.addmm)
"""Functions that make W + B·A of a parameter W, a weight still (as PEFT's adapters do)."""


class Attribution(TorchFunctionMode):
    """Names the parameter behind each product while it is entered.

    Attributes:
        witness: an observer with `count` of the GEMMs that ran, `last` (m, n, k) of them, and the
            name of the parameter or layer `running` at present.
    """

    def __init__(self, witness: Any) -> None:
        super().__init__()
        self.witness = witness
        self.parameters = Parameters()
        self._made_of = WeakTensorKeyDictionary()
        self._recomputing: nn.Module | None = None

    def follow(self, name: str, owner: nn.Module) -> list[RemovableHandle]:
        """Follow a parameter of a module, also where its forward is recomputed in backward.

        Returns:
            Handles of the hooks.
        """
        local = name.rpartition(".")[2]

        def before(module: nn.Module, args: Any) -> None:
            # Again in each forward: FSDP2 puts the whole parameter in the place of its shard.
            self.parameters.add(name, module._parameters.get(local))
            if in_backward() and self._recomputing is None:
                self._recomputing = module
                self.__enter__()

        def after(module: nn.Module, args: Any, output: Any) -> None:
            if self._recomputing is module:
                self.end_recomputation()

        self.parameters.add(name, owner._parameters.get(local))
        return [
            owner.register_forward_pre_hook(Hook(before)),
            owner.register_forward_hook(Hook(after), always_call=True),
        ]

    def end_recomputation(self) -> None:
        """Leave the mode if a forward in backward has entered it."""
        # An interrupted backward has put back the modes of its beginning by itself.
        if self._recomputing is not None and _get_current_function_mode() is self:
            self.__exit__(None, None, None)
        self._recomputing = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, witness = kwargs or {}, self.witness
        given = [*tensors_of(args), *tensors_of(kwargs.values())]
        names = [self._name_of(x) for x in given]
        named = {name for name in names if name is not None}
        if len(named) != 1 or witness.running in named:
            return func(*args, **kwargs)
        (name,) = named
        others = [x for x, its in zip(given, names, strict=True) if its is None]
        before = witness.count
        adapted = func in _ADD_TO and names[0] is not None
        with contextlib.ExitStack() as stack:
            if others and not adapted:
                witness.enter(name, (0, 0))
                stack.callback(witness.leave)
            y = func(*args, **kwargs)
        results = list(tensors_of([y]))
        if witness.count > before and not adapted:
            if others:
                m, n, k = witness.last
                shape = (m if names[0] is not None else n, k)
                for result in results:
                    witness.watch(name, shape, result, tuple(given))
        else:
            own = {x.shape for x, its in zip(given, names, strict=True) if its is not None}
            if self._is_made_of(func, args, own, others, results):
                for result in results:
                    self._made_of[result] = name
        return y

    def _name_of(self, x: Tensor) -> str | None:
        return self.parameters.find(x) or self._made_of.get(x)

    @staticmethod
    def _is_made_of(
        func: Any, args: Any, own: set[Any], others: list[Tensor], results: list[Tensor]
    ) -> bool:
        """True if the results are weights still: a cast, a copy, matrices taken from a stack.

        `own` are the shapes of the parameters and what was made of them, among the arguments.
        """
        if any(x.dim() and not x.is_floating_point() for x in others):
            return taken_matrices(func, args) is not None
        plain = all(isinstance(x, nn.Parameter) or not x.dim() for x in others)
        return plain or {x.shape for x in results} <= own
