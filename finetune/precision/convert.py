"""Conversion of a model to its plan: apply it, undo it, or switch it off for a while.

*Modules change class, parameters never change*: every trainable parameter stays the object the
optimizer knows.

A frozen weight may be replaced by FP8 codes, where the plan says so. Reverting does not undo
that: the high-precision weight is gone, and the layer dequantizes its codes.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from finetune.precision.cases import CASES
from finetune.precision.cases.case import Site
from finetune.precision.cases.parameters import promise
from finetune.precision.engines.base import Engine
from finetune.precision.engines.observers import ObservedMixin, in_backward
from finetune.precision.model import compiling
from finetune.precision.model.layers import decoder_layers, records, without_adapters
from finetune.precision.model.plan import PrecisionPlan
from finetune.precision.model.swap import Swapped, swap, unswap
from finetune.precision.model.towers import modules_beside
from finetune.precision.model.tree import Tree, named_trainable
from finetune.precision.numbers import kernels
from finetune.precision.settings import PrecisionConfig
from finetune.precision.stored.frozen import FrozenEngine
from finetune.precision.stored.gathered import GatheredEngine
from finetune.precision.stored.trained import CodedMixin, TrainedEngine

ATTRIBUTE = "_finetune_conversion"


class Conversion:
    """A model converted to a plan, and the state needed to revert it.

    Attributes:
        tree: the model's modules.
        model: its root, whose call begins a step.
        engine: engine of layers that keep their weights, None without such FP8 layers.
        frozen: engine of layers with weights stored in FP8, None without them.
        around: context managers entered around every call of the model.
        compiled: decoder layers under `torch.compile`.
        head: output head, as TRL's fused loss multiplies by it, if any.
        proof: observer of the model's steps, if it trains.
        follows: of a model that does not train, such as DPO's reference: tells whether its call is
            computed as in training, whatever its mode.
    """

    def __init__(
        self,
        tree: Tree,
        plan: PrecisionPlan,
        engine: Engine | None,
        frozen: FrozenEngine | None = None,
    ) -> None:
        self.tree, self.model, self.plan = tree, tree.model, plan
        self.engine, self.frozen = engine, frozen
        self.around: list[Callable[[], contextlib.AbstractContextManager[None]]] = []
        self.trainable = set(named_trainable(tree))
        self.compiled: list[nn.Module] = []
        # `_before`: Dynamo's counters when layers were compiled, of the whole process.
        self._before, self._has_warned = (0, 0, 0), False
        self._hooked: set[int] = set()  # ids of layers that ran uncompiled, for hooks inside
        self.head: Any = None
        self.proof: Any = None
        self.follows: Callable[[], bool] | None = None
        self._swapped: list[tuple[nn.Module, type[Swapped]]] = []
        self.is_applied = False
        for engine in self.engines:  # layers outlive the root: PEFT's `merge_and_unload()`
            engine.conversion = self

    @property
    def engines(self) -> list[Engine]:
        """FP8 engines: of frozen weights, and of the others."""
        return [engine for engine in (self.frozen, self.engine) if engine is not None]

    # ---------------------------------------------------------------------------- apply, revert

    def apply(self) -> None:
        """Let each case change its modules, and put the root's own mixin before its class."""
        site = Site(self.model, self.plan, self.engine, self.frozen, self.tree.named)
        for case in CASES:
            for module, mixin, facts in case(site):
                self._swap(module, mixin, **facts)
        root = WritingRootMixin if hasattr(self.model, "generate") else RootMixin
        self._swap(self.model, root, fp8_observers=site.observers, **{ATTRIBUTE: self})
        self.head = site.head
        self.is_applied = True
        promise(self)

    def _swap(self, module: nn.Module, mixin: type[Swapped], **facts: Any) -> None:
        self._swapped.append((module, mixin))
        swap(module, mixin, **facts)

    def swapped_by(self, mixin: type[Swapped]) -> list[nn.Module]:
        """Modules that a mixin was put before."""
        return [module for module, by in self._swapped if by is mixin]

    def shares(self, tree: Tree) -> bool:
        """True if layers of another model are converted by this one."""
        others = set() if tree.model is self.model else set(map(id, tree.modules()))
        return not others.isdisjoint(id(module) for module, _ in self._swapped)

    def is_current(self) -> bool:
        """True if the model is unchanged since conversion: same layers, same trainable set."""
        if not self.is_applied or named_trainable(self.tree).keys() != self.trainable:
            return False
        names = {record.name for record in records(self.tree)}
        return names == {layer.name for layer in self.plan.layers}

    def revert(self) -> None:
        """Restore the plain model; repeated calls have no effect."""
        for module, _ in self._swapped:
            # The first call for a module undoes all of its swaps; another one changes nothing.
            unswap(module)
        for module in self.compiled:
            module._compiled_call_impl = None  # undoes `nn.Module.compile`
        if self.is_applied and self.engine is not None:
            self.engine.release(self.model)
        self._swapped, self.compiled, self.head = [], [], None
        self.around.clear()
        self.is_applied = False
        if self.proof is not None:
            self.proof.release()

    @property
    def compilable(self) -> list[nn.Module]:
        """Decoder layers, without those that multiply by parameters of their own (`parameters`).

        Nor those of towers: each size of an image would be a graph of its own.
        """
        beside = modules_beside(without_adapters(self.model))
        return [
            module
            for module in decoder_layers(self.tree)
            if getattr(module, "can_compile", True) and id(module) not in beside
        ]

    def compile_layers(self) -> int:
        """`torch.compile` each decoder layer that can be, in place; returns their number."""
        compiling.prepare()
        self._before = compiling.left_out()
        inside = torch.__version__ >= ".".join(map(str, compiling.RECOMPUTES))
        for module in self.compilable:
            module.compile()
            if not inside:
                compiling.checkpointed_around(module)
            compiling.uncompiled_with_hooks(module, partial(self._hooked.add, id(module)))
            self.compiled.append(module)
        return len(self.compiled)

    @property
    def why_uncompiled(self) -> str:
        """What is known of compiled layers, or parts of them, that ran uncompiled, or ""."""
        hooked = ""
        if self._hooked:
            hooked = f"{len(self._hooked)} layers ran uncompiled, with hooks on modules inside"
        left = compiling.why_uncompiled(self._before) if self.compiled else ""
        return "; ".join(filter(None, (hooked, left)))

    # -------------------------------------------------------------------------- a call of the model

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """Context of a call of the root: step begin, the engines' regions, observers.

        Not a pair of hooks, the second of which would not run after Ctrl-C.
        """
        with contextlib.ExitStack() as stack:
            low = self.model.training
            trains = low or self.plan.precision.eval == "fp8"  # some train in evaluation mode
            steps = trains and torch.is_grad_enabled()
            if steps and compiling.is_inside():
                raise compiling.compiled_later("torch.compile of the prepared model")
            if self.follows is not None:
                low = steps = self.follows()
                computes = low or self.plan.precision.eval == "fp8"
                for engine in self.engines:
                    stack.enter_context(engine.computing(low=computes))
            if self.engine is not None:
                # A call in backward is a recomputation, part of the step that began already.
                if steps and not in_backward():
                    self.engine.begin_step()
                elif not steps:
                    stack.enter_context(self.engine.unrecorded())
                if low or steps:
                    stack.enter_context(self.engine.region())
            if self.head is not None:
                stack.enter_context(self.head.in_fused_loss())
            for enter in list(self.around):
                stack.enter_context(enter())
            yield
        if not self._has_warned and (why := self.why_uncompiled):
            self._has_warned = True
            logs = "" if self._hooked else "; TORCH_LOGS=recompiles,graph_breaks says why"
            warnings.warn(f"! {why}{logs}", stacklevel=2)

    def writing(self) -> contextlib.AbstractContextManager[None]:
        """Context of a generation by weights that train, in whatever mode the model is.

        Trainers of answers that the model writes leave it in training mode, where every token would
        cast all weights to FP8 again. Frozen weights are stored so, and stay.
        """
        if self.engine is None:
            return contextlib.nullcontext()
        return self.engine.computing(low=self.plan.precision.eval == "fp8")


class RootMixin(ObservedMixin):
    """Mixin of a converted model: a call in training begins a step; observed is its head."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        conversion = self.__dict__.get(ATTRIBUTE)
        with contextlib.nullcontext() if conversion is None else conversion.call():
            return super().__call__(*args, **kwargs)


class WritingRootMixin(RootMixin):
    """The same of a model that writes."""

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        conversion = self.__dict__.get(ATTRIBUTE)
        with contextlib.nullcontext() if conversion is None else conversion.writing():
            return super().generate(*args, **kwargs)  # pyright: ignore


def make_engine(
    precision: PrecisionConfig,
    layers: int,
    *,
    hardware: bool,
    triton: bool = True,
    gathered: torch.dtype | None = None,
) -> Engine:
    """The engine of layers that keep their weights.

    Args:
        precision: its `backend` must be concrete (`hardware.requirements.resolve`).
        layers: number of layers that it will multiply.
        hardware: True if the device multiplies FP8; if not, torchao emulates.
        triton: True if kernels of ours start there.
        gathered: type in which FSDP2 gathers weights, if it shards them.
    """
    if precision.fp8_params:
        emulate = not hardware or precision.engine.emulates
        if gathered is not None:
            return GatheredEngine(precision, gathered, emulate=emulate, triton=triton)
        return TrainedEngine(precision, emulate=emulate, triton=triton)
    match precision.backend:  # a library is imported only where its engine is wanted
        case "emulated":
            from finetune.precision.engines.emulated import EmulatedEngine

            return EmulatedEngine(precision, layers)
        case "torchao":
            from finetune.precision.engines.torchao import TorchaoEngine

            return TorchaoEngine(precision, emulate=not hardware, triton=triton)
        case "te":
            from finetune.precision.engines.transformer_engine import TeEngine

            return TeEngine(precision, triton=triton)
        case _:
            raise AssertionError("resolve() names the engine before a plan is made")


def apply(
    model: nn.Module | Tree,
    plan: PrecisionPlan,
    *,
    hardware: bool = False,
    triton: bool = True,
    gathered: torch.dtype | None = None,
) -> Conversion:
    """Make `model` equal `plan`. A model that was already converted is reverted first.

    Args:
        hardware: True if the device multiplies FP8; elsewhere it is emulated.
        triton: False if the device cannot start kernels of Triton: torch's own take their place.
        gathered: type in which FSDP2 will gather weights, if it shards them.
    """
    tree = Tree.of(model)
    revert(tree)
    kernels.can_launch = triton
    precision, plain = plan.precision, sum(not layer.stored for layer in plan.fp8_layers)
    able: Any = {"hardware": hardware, "triton": triton, "gathered": gathered}
    engine = make_engine(precision, plain, **able) if plain else None
    emulate = not hardware or precision.engine.emulates
    frozen = FrozenEngine(precision, emulate=emulate, triton=triton) if plan.stored else None
    conversion = Conversion(tree, plan, engine, frozen)
    try:
        conversion.apply()
    except BaseException:  # Ctrl-C, too, must not leave half a conversion
        conversion.revert()
        raise
    return conversion


def conversion_of(model: nn.Module) -> Conversion | None:
    """The conversion of this model, or of the model that it wraps (DDP), if any."""
    while model.__dict__.get(ATTRIBUTE) is None and isinstance(
        model, nn.parallel.DistributedDataParallel
    ):
        model = model.module
    return model.__dict__.get(ATTRIBUTE)


def revert(model: nn.Module | Tree) -> nn.Module:
    """Give back the plain model, and plain models inside it: same parameters, original classes."""
    tree = Tree.of(model)
    for module in tree.modules():
        conversion = module.__dict__.get(ATTRIBUTE)
        if conversion is not None:
            conversion.revert()
    return tree.model


@contextlib.contextmanager
def disabled(model: nn.Module) -> Iterator[None]:
    """Run the converted layers in high precision inside the block."""
    every: list[Any] = [m for m in model.modules() if getattr(m, "multiplies", False)]
    away = {m.fp8_engine for m in every if isinstance(m, CodedMixin)}
    layers = [module for module in every if not isinstance(module, CodedMixin)]
    classes = [type(module) for module in layers]
    with contextlib.ExitStack() as stack:
        for engine in away:  # their plain classes would multiply by weights on another device
            stack.enter_context(engine.computing(low=False))
        try:
            for module, cls in zip(layers, classes, strict=True):
                # Facts stay in the `__dict__` of a module: its class again is enough afterwards.
                module.__class__ = cls.plain_class
            yield
        finally:
            for module, cls in zip(layers, classes, strict=True):
                module.__class__ = cls
