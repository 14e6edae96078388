"""The only surgery on a model: apply a plan, undo it, or switch it off for a while.

Two rules hold the design together. *Modules change class, parameters never change*: every trainable
parameter stays the object the optimizer knows. *The model equals the plan or an error is raised.*
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from finetune.errors import ConversionError
from finetune.precision.backend import Backend, Fp8Mixin, in_backward
from finetune.precision.planner import PrecisionPlan

ATTRIBUTE = "_finetune_conversion"


class Conversion:
    """A model under a plan: what was changed, and how to change it back.

    Attributes:
        model: the root module, whose forward is a step's beginning.
        plan: what the model now equals.
        backend: the engine, None when the plan has no FP8 layer.
    """

    def __init__(self, model: nn.Module, plan: PrecisionPlan, backend: Backend | None) -> None:
        self.model, self.plan, self.backend = model, plan, backend
        self._changed: list[tuple[nn.Module, type[nn.Module], list[str]]] = []
        self._checkpointed: list[tuple[nn.Module, Any]] = []
        self._compiled: list[nn.Module] = []
        self._hooks: list[Any] = []
        self._regions: list[contextlib.AbstractContextManager[None]] = []

    # ---------------------------------------------------------------------------- apply, revert

    def apply(self) -> None:
        """Change the classes of the planned layers, install hooks, then check against the plan."""
        parameters = {id(p): p.requires_grad for p in self.model.parameters()}
        if self.backend is not None:
            modules = dict(self.model.named_modules())
            for layer in self.plan.fp8_layers:
                module = modules[layer.name]
                attributes = {
                    "fp8_backend": self.backend,
                    **self.backend.attributes(module, layer),
                }
                self._changed.append((module, type(module), list(attributes)))
                module.__class__ = self.backend.layer_class(module)
                # Past nn.Module.__setattr__: an engine that is a module must not become a child.
                module.__dict__.update(attributes)
            self._hooks = [
                self.model.register_forward_pre_hook(self._before_forward, prepend=True),
                self.model.register_forward_hook(self._after_forward, always_call=True),
            ]
        object.__setattr__(self.model, ATTRIBUTE, self)
        self.check()
        if {id(p): p.requires_grad for p in self.model.parameters()} != parameters:
            raise ConversionError(
                "conversion changed the model's parameters",
                why="the optimizer would update weights that the model no longer uses",
                fix="report this as a bug",
            )

    def check(self) -> None:
        """Raise `ConversionError` unless exactly the planned layers are FP8 layers."""
        planned = {layer.name for layer in self.plan.fp8_layers}
        found = {n for n, m in self.model.named_modules() if isinstance(m, Fp8Mixin)}
        if planned != found:
            raise ConversionError(
                "the model does not equal its precision plan",
                where=", ".join(sorted(planned ^ found)[:8]),
                why="some layers would run in another precision than the receipt says",
                fix="convert after adapters are attached, and do not replace layers afterwards",
            )

    def revert(self) -> None:
        """Give back the plain model. Harmless when already reverted."""
        for module, original, attributes in self._changed:
            module.__class__ = original
            for name in attributes:
                module.__dict__.pop(name, None)
        for module, function in self._checkpointed:
            module.__dict__["_gradient_checkpointing_func"] = function
        for hook in self._hooks:
            hook.remove()
        for module in self._compiled:
            module._compiled_call_impl = None
        self._changed, self._checkpointed, self._hooks, self._compiled = [], [], [], []
        self.model.__dict__.pop(ATTRIBUTE, None)

    def compile_layers(self) -> int:
        """`torch.compile` each decoder layer in place; how many there are."""
        names = {
            name
            for m in self.model.modules()
            for name in getattr(m, "_no_split_modules", None) or ()
        }
        for module in self.model.modules():
            if type(module).__name__ in names:
                module.compile()
                self._compiled.append(module)
        return len(self._compiled)

    # ------------------------------------------------------------------------------- step hooks

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        assert self.backend is not None
        training = module.training and torch.is_grad_enabled()
        if training and not in_backward():
            if self.backend.wraps_checkpointing:
                self._wrap_checkpointing()
            self.backend.begin_step()
        region = self.backend.region() if module.training else contextlib.nullcontext()
        region.__enter__()
        self._regions.append(region)

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._regions:
            self._regions.pop().__exit__(None, None, None)

    def _wrap_checkpointing(self) -> None:
        # Trainers enable checkpointing at moments of their own, so this looks again each step.
        assert self.backend is not None
        wrapped = {id(module) for module, _ in self._checkpointed}
        for module in self.model.modules():
            function = module.__dict__.get("_gradient_checkpointing_func")
            if function is not None and id(module) not in wrapped:
                self._checkpointed.append((module, function))
                wrapped_function = self.backend.wrap_checkpoint(function)
                module.__dict__["_gradient_checkpointing_func"] = wrapped_function


def make_backend(plan: PrecisionPlan, *, hardware: bool) -> Backend | None:
    """The engine of a plan, None when nothing runs in FP8.

    Args:
        plan: its `precision.backend` must be concrete (see `finetune.device.resolve`).
        hardware: the device multiplies FP8; otherwise torchao emulates.
    """
    layers = len(plan.fp8_layers)
    if not layers:
        return None
    match plan.precision.backend:
        case "emulated":
            from finetune.precision.emulated import EmulatedBackend

            return EmulatedBackend(plan.precision, layers)
        case "torchao":
            from finetune.precision.ao import TorchaoBackend

            return TorchaoBackend(plan.precision, layers, emulate=not hardware)
        case "te":
            from finetune.precision.te import TransformerEngineBackend

            return TransformerEngineBackend(plan.precision, layers)
        case _:
            raise AssertionError("resolve() names the backend before a plan is made")


def apply(model: nn.Module, plan: PrecisionPlan, *, hardware: bool = False) -> Conversion:
    """Make `model` equal `plan`. A model that was already converted is reverted first.

    Raises:
        ConversionError: the model does not equal the plan afterwards.
    """
    revert(model)
    conversion = Conversion(model, plan, make_backend(plan, hardware=hardware))
    try:
        conversion.apply()
    except BaseException:
        conversion.revert()
        raise
    return conversion


def conversion_of(model: nn.Module) -> Conversion | None:
    """The conversion of this model, or of the model that it wraps (DDP, compiled), if any."""
    for module in model.modules():
        found = module.__dict__.get(ATTRIBUTE)
        if found is not None:
            return found
    return None


def revert(model: nn.Module) -> nn.Module:
    """Give back the plain model: original classes, no hooks, the same parameters."""
    conversion = conversion_of(model)
    if conversion is not None:
        conversion.revert()
    return model


@contextlib.contextmanager
def disabled(model: nn.Module) -> Iterator[None]:
    """Run the converted layers in high precision inside the block."""
    layers = [m for m in model.modules() if isinstance(m, Fp8Mixin)]
    classes = [type(module) for module in layers]
    try:
        for module, cls in zip(layers, classes, strict=True):
            module.__class__ = cls.fp8_original
        yield
    finally:
        for module, cls in zip(layers, classes, strict=True):
            module.__class__ = cls
