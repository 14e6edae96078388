"""Names for a profile: which layer is running, in forward and when it is computed a second time.

While entered, every linear layer of the plan, every decoder layer and every PEFT layer opens a
`record_function` range around its forward. In a trace everything below a range is that layer's;
backward is found by autograd's sequence numbers (`timeline`). A forward that runs inside a backward
is a recomputation of checkpointing, and its ranges say so.

The products of adapters that run in one function with their base, and those of declared parameters,
are told by what multiplies them. Layers under `torch.compile` cannot be looked into: they are one
range each, around the compiled call, and what they multiply is told apart by its sizes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.profiler import record_function

from finetune.precision.adapters import FusedMixin
from finetune.precision.backend import in_backward
from finetune.precision.convert import Conversion
from finetune.precision.parameters import ParameterMixin

PREFIX = "finetune|"
WINDOW = f"{PREFIX}window"
"""The range around all profiled steps."""
RECOMPUTE = "recompute"


def range_name(layer: str) -> str:
    """The range of a layer that begins now."""
    return f"{PREFIX}{RECOMPUTE if in_backward() else 'forward'}|{layer}"


class Ranges:
    """Opens ranges around the layers of a converted model. Use as a context manager."""

    def __init__(self, conversion: Conversion) -> None:
        self.conversion = conversion
        self._open: list[Any] = []
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> Ranges:
        model = self.conversion.model
        inside = {id(m) for c in self.conversion.compiled for m in c.modules()}
        decoder = {
            name for m in model.modules() for name in getattr(m, "_no_split_modules", None) or ()
        }
        planned = {layer.owner for layer in self.conversion.plan.layers}
        peft = {name for name, m in model.named_modules() if isinstance(m, BaseTunerLayer)}
        for name, module in model.named_modules():
            if id(module) in inside:
                continue
            if name in planned or name in peft or type(module).__name__ in decoder:
                self._around(name, module)
            if "_gradient_checkpointing_func" in vars(module):
                self._around_checkpoint(name, module)
            if isinstance(module, FusedMixin):
                module.fp8_listeners.append(self)
                self._undo.callback(module.fp8_listeners.remove, self)
            if isinstance(module, ParameterMixin):
                module.fp8_observers.append(self)
                self._undo.callback(module.fp8_observers.remove, self)
        for name, module in model.named_modules():
            if any(module is c for c in self.conversion.compiled):
                self._around_compiled(name, module)
        return self

    def __exit__(self, *exc: object) -> None:
        self._undo.close()
        while self._open:
            self.leave()

    def enter(self, name: str, shape: tuple[int, int], backward: bool = False) -> None:
        """A product of the adapter or parameter of this name begins."""
        self._push(f"{PREFIX}backward|{name}" if backward else range_name(name))

    def leave(self) -> None:
        """It has ended."""
        if self._open:
            self._open.pop().__exit__(None, None, None)

    def watch(self, name: str, shape: tuple[int, int], y: Tensor, inputs: tuple[Any, ...]) -> None:
        """A product of a parameter is made; its backward is found by its node's number."""

    def _push(self, name: str) -> None:
        opened = record_function(name)
        opened.__enter__()
        self._open.append(opened)

    def _around(self, name: str, module: nn.Module) -> None:
        def before(module: nn.Module, args: Any) -> None:
            self._push(range_name(name))

        def after(module: nn.Module, args: Any, output: Any) -> None:
            self.leave()

        first = module.register_forward_pre_hook(before, prepend=True)
        last = module.register_forward_hook(after, always_call=True)
        self._undo.callback(first.remove)
        self._undo.callback(last.remove)

    def _around_checkpoint(self, name: str, module: nn.Module) -> None:
        """Transformers checkpoints inside a layer's forward: hooks do not see what runs again."""
        checkpoint: Any = module._gradient_checkpointing_func

        def named(function: Any, *args: Any, **kwargs: Any) -> Any:
            def run(*inputs: Any, **more: Any) -> Any:
                with record_function(range_name(name)):
                    return function(*inputs, **more)

            return checkpoint(run, *args, **kwargs)

        def back() -> None:
            module.__dict__["_gradient_checkpointing_func"] = checkpoint

        named.finetune_wraps = checkpoint  # pyright: ignore  the engine's wrapper is inside already
        module.__dict__["_gradient_checkpointing_func"] = named
        self._undo.callback(back)

    def _around_compiled(self, name: str, module: nn.Module) -> None:
        call: Any = module._compiled_call_impl

        def named(*args: Any, **kwargs: Any) -> Any:
            with record_function(range_name(name)):
                return call(*args, **kwargs)

        def back() -> None:
            module._compiled_call_impl = call

        module._compiled_call_impl = named
        self._undo.callback(back)


@contextlib.contextmanager
def window() -> Iterator[None]:
    """The range around all profiled steps."""
    with record_function(WINDOW):
        yield
