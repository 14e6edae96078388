"""The sentinel: holds a proven run to its plan, at each optimizer step until the last.

The proof ends after a few steps; a model can leave its plan at any later one. At each step, before
the optimizer uses the gradients, seven things are compared, none of which needs the witness:

    tree       every linear layer is the object that was prepared, and there is no other; adapters
               that do not train may come and go (a reference's, a teacher's)
    classes    every planned layer is still a converted one
    trainable  the parameters that train are those that trained at preparation
    types      they are of the type that they had in the witnessed micro-step
    adapters   none that trains is merged into its base: the base would run alone (at each call)
    compiled   the script compiles nothing by itself
    calls      each converted layer counts its calls: one whose weight (or adapter) has a gradient
               was called in FP8, and no gradient has passed a call in high precision

A layer that is not called at all rests, which is allowed at any step and counted: unless the
forward of a module around it was replaced since, which multiplies past it. Prepare a model again to
change its layers, their forwards or what trains.

The cost is one walk over the modules, about a microsecond for each, and a tenth of that for each
call of a converted layer. What differs is looked at again, since sharding and wrapping change the
same things in harmless ways.

*The share of the run.* Calls count their rows, so the FLOPs of the witnessed micro-step are
weighted with the rows of each layer over the run, other matmuls with those of the busiest layer.
Attention grows faster than rows do, so its part is that of the witnessed step. Layers under
`torch.compile` count no rows; then the share is that of the witnessed step.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from finetune.errors import some
from finetune.precision.backends.base import Fp8Mixin, Tally, in_backward
from finetune.precision.compiling import compiled_later, refuse_compiled
from finetune.precision.convert import Conversion
from finetune.precision.experts import ConvertedExpertsMixin
from finetune.precision.layers import is_low_rank, iter_linears
from finetune.precision.parameters import ParameterMixin
from finetune.precision.planner import LayerPlan
from finetune.precision.proof.movement import is_nonzero
from finetune.precision.proof.remedy import remedy

Flops = dict[tuple[str, str], int]
"""(Layer, precision) -> FLOPs of the witnessed micro-step."""


@dataclass
class Held:
    """A converted layer under watch.

    Attributes:
        layer: its plan.
        module: the module whose class was changed.
        tally: its calls.
        evidence: the trainable parameters whose gradients come from its calls alone.
        own: ids of all that train in it, and in its adapters.
        first: its rows of the witnessed micro-step.
    """

    layer: LayerPlan
    module: nn.Module
    tally: Tally
    evidence: list[nn.Parameter]
    own: set[int]
    first: int = 0


class Sentinel:
    """Compares a model with its plan.

    Attributes:
        steps: optimizer steps compared.
        rests: layer -> steps in which it was not called.
        idle: ids of trainable parameters whose layers rested in the step compared last.
        entered: layer -> steps in which gradients passed it in high precision.
    """

    def __init__(
        self,
        conversion: Conversion,
        trains: set[str],
        fail: Callable[..., None],
        leave: Callable[..., None],
    ) -> None:
        """Note the layers of a model that was just converted.

        Args:
            conversion: the prepared model.
            trains: names of the parameters that trained before preparation.
            fail: raises an error of what, where, why and fix.
            leave: the same for BF16 that enters, which a setting may allow.
        """
        self.conversion, self.model, self._fail = conversion, conversion.model, fail
        self._leave = leave
        self.steps, self.rests, self.entered = 0, Counter[str](), Counter[str]()
        self.idle: set[int] = set()
        self._linears = {id(m): (name, m) for name, m, _ in iter_linears(self.model)}
        self._names = {name for name, _ in self.model.named_parameters()}
        self._trains = trains
        self._held: list[Held] = []
        self._mine: weakref.WeakKeyDictionary[Optimizer, list[Held]] = weakref.WeakKeyDictionary()
        self._forwards: dict[str, tuple[nn.Module, tuple[Any, Any]]] = {}
        self._adapters = self._trained_adapters()
        self._types: dict[str, torch.dtype] = {}
        self._noted: list[Any] = []
        self._is_begun = False
        self._task = -1

    def begin(self) -> None:
        """Begin to count, after the witnessed micro-step."""
        self._find_evidence()
        for held in self._held:
            held.first = held.tally.rows
        self._forwards = {n: (m, _forward_of(m)) for n, m in self.model.named_modules()}
        # Not at preparation, after which FSDP2 has its own way with types.
        named = self.model.named_parameters()
        self._types = {name: p.dtype for name, p in named if p.requires_grad}
        self._is_begun = True

    def _find_evidence(self) -> None:
        first = {held.layer.name: held.first for held in self._held}
        self._held = list(self._iter_held(dict(self.model.named_parameters())))
        for held in self._held:
            held.first = first.get(held.layer.name, 0)
        self._mine.clear()

    def _iter_held(self, parameters: dict[str, nn.Parameter]) -> Iterator[Held]:
        modules = dict(self.model.named_modules())
        owned = [id(p) for m in modules.values() for p in m._parameters.values()]
        tied = {key for key, count in Counter(owned).items() if count > 1}
        for layer in self.conversion.plan.fp8_layers:
            module: Any = modules.get(layer.owner)
            if isinstance(module, Fp8Mixin):
                weight, tally = parameters.get(f"{layer.name}.weight"), module.fp8_tally
            elif isinstance(module, ParameterMixin):
                weight = parameters.get(layer.name)
                tally = next(e.tally for e in module.fp8_parameters if e.layer is layer)
            elif isinstance(module, ConvertedExpertsMixin):
                weight, tally = None, module.fp8_tallies[layer.local]
            else:
                continue
            # A weight of two layers has gradients of either.
            alone = weight is not None and weight.requires_grad and id(weight) not in tied
            evidence = [weight] if weight is not None and alone else []
            whole = modules.get(layer.name.removesuffix(".base_layer"))  # with its adapters
            own = [p for p in whole.parameters() if p.requires_grad] if whole is not None else []
            if not evidence and layer.name.endswith(".base_layer"):
                evidence = own
            yield Held(layer, module, tally, evidence, {id(p) for p in own})

    def _as_it_is(self) -> list[Any]:
        """Objects, classes and own forwards of modules; objects, types and flags of parameters."""
        modules = list(self.model.modules())
        calls = [(m, type(m), m._compiled_call_impl, vars(m).get("forward")) for m in modules]
        trained = [
            (id(p), p.requires_grad, p.dtype)
            for m in modules
            for p in m._parameters.values()
            if p is not None
        ]
        return [*calls, *trained]

    def _trained_adapters(self) -> list[Any]:
        """PEFT's layers with adapters that train."""
        return [
            m
            for m in self.model.modules()
            if "merged_adapters" in vars(m) and any(p.requires_grad for p in m.parameters())
        ]

    # ------------------------------------------------------------------------------ each step

    @contextlib.contextmanager
    def around_forward(self) -> Iterator[None]:
        """Context of a call of the model: where all is merged, no gradient ever gets to a step."""
        if self.model.training and torch.is_grad_enabled() and not in_backward():
            self._check_merged()
        yield

    def before_step(self, optimizer: Optimizer) -> None:
        """Compare, before an optimizer of the model uses the gradients."""
        # Where each parameter steps inside the backward, once in each.
        task = torch._C._current_graph_task_id()
        if task == -1 or task != self._task:
            self._task = task
            self.steps += 1
            self._check_structure()
            self._check_merged()
        if self._is_begun:
            self._check_calls(self._concerned(optimizer))

    def _check_structure(self) -> None:
        now = self._as_it_is()
        if now == self._noted:
            return
        self.check_layers()
        self.check_trainable()
        if self._is_begun:
            self._check_types()
            self._check_classes()
            refuse_compiled(self.model, compiled_later)
            self._find_evidence()  # weights may have been put in the place of others
            self._adapters = self._trained_adapters()
            self._noted = now

    def check_layers(self) -> None:
        """Raise unless the linear layers are those that were prepared."""
        now = {id(m): (name, m) for name, m, _ in iter_linears(self.model)}
        gone = sorted(
            name
            for key, (name, m) in self._linears.items()
            if key not in now and not _rests(name, m)
        )
        new = sorted(
            name
            for key, (name, m) in now.items()
            if key not in self._linears and not _rests(name, m)
        )
        if gone:
            self._leave(
                "linear layers were replaced or removed after preparation",
                where=some(gone),
                why="what stands in their place was never converted: it would run in BF16, and "
                "optimizers made before do not have it",
                fix="change the model first, then prepare it (or build the trainer); later, "
                "prepare it again together with its optimizer",
            )
        if new:
            self._leave(
                "linear layers were added after preparation",
                where=some(new),
                why="layers that were not there when the model was prepared are not converted, and "
                "no optimizer made before has them",
                fix="attach adapters first (get_peft_model, or the trainer's peft_config), then "
                "prepare the model",
            )
        self._linears = now

    def check_trainable(self) -> None:
        """Raise unless the parameters that train are those that trained at preparation."""
        now = {name for name, p in self.model.named_parameters() if p.requires_grad}
        unfrozen, froze = sorted(now - self._trains), sorted(self._trains - now)
        if added := [name for name in unfrozen if name not in self._names]:
            self._fail(
                "trainable parameters were added after preparation",
                where=some(added),
                why="the plan does not have them, and no optimizer made before has them",
                fix="add them first, then prepare the model",
            )
        if unfrozen or froze:
            self._fail(
                "the model was prepared with a different choice of which parameters train",
                where=f"now trainable: {some(unfrozen)}; no longer: {some(froze)}",
                why="the plan, the optimizer and the receipt are of the parameters that trained "
                "when it was prepared",
                fix="freeze before building the trainer, and do not touch requires_grad "
                "afterwards; or prepare the model again when it has changed",
            )

    def _check_types(self) -> None:
        cast = [
            (name, self._types[name], p.dtype)
            for name, p in self.model.named_parameters()
            if p.dtype is not self._types.get(name, p.dtype)
        ]
        if cast:
            _, before, now = cast[0]
            self._fail(
                f"weights that train were cast from {before} to {now} during training".replace(
                    "torch.", ""
                ),
                where=some([name for name, *_ in cast]),
                why="model.half(), model.to(dtype), or bf16_full_eval and fp16_full_eval of an "
                "evaluation rounded them in place: updates would be of rounded weights, and the "
                "optimizer's state is of those before",
                fix="leave these out, and cast a copy; or finetune.revert(model), cast it, and "
                "build the trainer (or prepare model and optimizer) again",
            )

    def _check_classes(self) -> None:
        plain = [h.layer.name for h in self._held if not _is_converted(h.module)]
        if plain:
            self._leave(
                "converted layers became plain again",
                where=some(plain),
                why="they multiply in BF16",
                fix="prepare the model again, or leave its classes as they are",
            )

    def _check_merged(self) -> None:
        merged = [m for m in self._adapters if m.merged_adapters]
        if merged:
            names = {id(m): name for name, m in self.model.named_modules()}
            self._fail(
                f"{len(merged)} adapters are merged into their base weights and do not train",
                where=some([names.get(id(m), "?") for m in merged]),
                why="a merged adapter is not multiplied, so no gradient reaches it",
                fix="model.unmerge_adapter() before the next forward of training; merge a copy, or "
                "`python -m finetune export RUN` when the run has ended",
            )

    def _check_calls(self, concerned: list[Held]) -> None:
        past: list[str] = []
        high: list[str] = []
        around: list[str] = []
        ran: list[Held] = []
        resting: list[Held] = []
        for held in concerned:
            tally = held.tally
            if tally.high:
                tally.high = 0
                high.append(held.layer.name)
            elif tally.ran:
                tally.ran = False
                ran.append(held)
            elif any(is_nonzero(p.grad) for p in held.evidence):
                past.append(held.layer.name)
            elif self._is_bypassed(held.layer.name):
                around.append(held.layer.name)
            else:
                resting.append(held)
        self.rests.update(held.layer.name for held in resting)
        # A weight of two layers is not idle.
        self.idle = set[int]().union(*(h.own for h in resting)) - set().union(*(h.own for h in ran))
        left = high + past + around
        self.entered.update(left)
        if left:
            why = "their weights have gradients, and the layers were not called"
            if high:
                why = "they were called in evaluation mode, where layers multiply in high precision"
            elif not past:
                why = (
                    "the forward of a module around them was replaced after the first step, and "
                    "since then they are not called"
                )
            self._leave(
                f"BF16 entered at optimizer step {self.steps}: {len(left)} layers that were "
                "planned in FP8 did not run in FP8",
                where=some(left),
                why=why,
                fix=remedy(
                    "fp8", training=not high, silent=True, roles={h.layer.role for h in self._held}
                ),
            )

    def _is_bypassed(self, name: str) -> bool:
        """True if the forward of a layer, or of a module around it, is another than at first."""
        parts = name.split(".")
        # Not of the whole model, whose forward Accelerate wraps and unwraps.
        paths = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
        known = (self._forwards[path] for path in paths if path in self._forwards)
        return any(_forward_of(module) != at_first for module, at_first in known)

    def _concerned(self, optimizer: Optimizer) -> list[Held]:
        """Layers of which an optimizer has the evidence, and those that have none."""
        if optimizer not in self._mine:
            owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
            self._mine[optimizer] = [
                held
                for held in self._held
                if not held.evidence or any(id(p) in owned for p in held.evidence)
            ]
        return self._mine[optimizer]

    # ------------------------------------------------------------------------------- the share

    def share(self, flops: Flops) -> dict[str, float]:
        """Share of each precision in the matmul FLOPs of the run.

        Two layers of 100 FLOPs in FP8 each and a head of 100 in BF16, with 10 rows in the witnessed
        micro-step: after 100 rows of one layer and 50 of the other they are 1000, 500 and 1000
        FLOPs, and FP8 has 60 % instead of 67 %.
        """
        weights: dict[str, float] = {}
        more: Counter[str] = Counter()
        for held in self._held:
            n, k = held.layer.shape
            each, tally = 2 * n * k * len(held.layer.gemms), held.tally
            if held.first:
                weights[held.layer.name] = tally.rows / held.first
            else:
                more[self.conversion.plan.precision.low] += each * tally.rows
            more["bf16"] += each * tally.high_rows
        if self.conversion.compiled or not any(weights.values()):
            weights = {}
        usual = max(weights.values(), default=1.0)
        total: dict[str, float] = {}
        for (name, precision), done in flops.items():
            total[precision] = total.get(precision, 0.0) + done * weights.get(name, usual)
        for precision, done in more.items():
            if done:
                total[precision] = total.get(precision, 0.0) + done
        whole = sum(total.values()) or 1.0
        return {precision: done / whole for precision, done in sorted(total.items())}

    def described(self) -> dict[str, Any]:
        """Facts for the receipt."""
        return {
            "steps": self.steps,
            "resting": dict(self.rests),
            "entered": dict(self.entered),
        }


def _rests(name: str, module: nn.Module) -> bool:
    """True for a layer of an adapter that does not train: no adapter multiplies in FP8."""
    return is_low_rank(name) and not any(p.requires_grad for p in module.parameters())


def _forward_of(module: nn.Module) -> tuple[Any, Any]:
    """What a call of a module runs: a forward of its own, if it has one, and its class's."""
    return vars(module).get("forward"), type(module).forward


def _is_converted(module: nn.Module) -> bool:
    return isinstance(module, Fp8Mixin | ParameterMixin | ConvertedExpertsMixin)
