"""The sentinel: holds a proven run to its plan, at each optimizer step until the last.

The proof ends after a few steps; a model can leave its plan at any later one. At each step, before
the optimizer uses the gradients, what the model is made of is compared with what it was: the
objects of its modules, the types and `requires_grad` of its parameters, and that no adapter that
trains is merged. Only what differs is looked at again, since sharding and wrapping change the same
things in harmless ways.

Each converted layer counts its calls, and a gradient that has passed it in evaluation mode is BF16
that entered. A layer that is not called rests, which is allowed at any step, and counted in the
receipt. To change layers or what trains, prepare the model again.

Not seen: code that multiplies a layer's weight by itself after the first steps, as a forward that
is put in the place of another does; the layer then rests.

The cost is a look at each module, less than a microsecond (`finetune.precision.model.tree`).

*The share of the run.* Calls count their rows, so the FLOPs of the witnessed micro-step are
weighted with the rows of each layer over the run, other matmuls with those of the busiest layer.
Attention grows faster than rows do, so its part is that of the witnessed step. Layers under
`torch.compile` count no rows; then the share is that of the witnessed step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from finetune.errors import some
from finetune.precision.engines.observers import CallCount
from finetune.precision.model.compiling import compiled_later, refuse_compiled
from finetune.precision.model.layers import is_low_rank, linear_records
from finetune.precision.model.plan import LayerPlan, PrecisionPlan
from finetune.precision.model.tree import Tree, named_trainable
from finetune.precision.proof.fixes import fix_of
from finetune.precision.stored.trained import TrainedMixin

Flops = dict[tuple[str, str], int]
"""(Layer, precision) -> FLOPs of the witnessed micro-step."""


@dataclass
class Watched:
    """A converted layer under watch.

    Attributes:
        calls: its own, counted from its conversion on.
        first: its rows until the watch began, in the witnessed micro-step.
    """

    layer: LayerPlan
    calls: CallCount
    first: int = 0


class Sentinel:
    """Compares a model with its plan.

    Attributes:
        steps: optimizer steps compared.
        rests: layer -> steps in which it was not called.
        entered: layer -> steps in which gradients passed it in high precision.
    """

    def __init__(
        self,
        tree: Tree,
        plan: PrecisionPlan,
        trains: set[str],
        fail: Callable[..., None],
        leave: Callable[..., None],
    ) -> None:
        """Note the layers of a model that was just converted.

        Args:
            tree: modules of the prepared model.
            plan: what it was converted to.
            trains: names of the parameters that trained before preparation.
            fail: raises an error of what, where, why and fix.
            leave: the same for BF16 that enters, which a setting may allow.
        """
        self._tree, self._plan, self._fail, self._leave = tree, plan, fail, leave
        self.steps, self.rests, self.entered = 0, Counter[str](), Counter[str]()
        modules = tree.named
        linears = [(row.name, modules[row.name]) for row in plan.layers if row.kind == "linear"]
        self._linears: dict[int, tuple[str, Any]] = {id(m): (name, m) for name, m in linears}
        self._trains = trains
        self._watched: list[Watched] = []
        self._adapters = self._trained_adapters()
        self._types: dict[str, torch.dtype] = {}
        self._noted: list[Any] = []  # the structure that was last found in order
        self._is_begun = False
        self._task = -1  # autograd's id of the backward last looked at; -1: none was running

    def begin(self) -> None:
        """Begin to count, after the witnessed micro-step."""
        self._watched = list(self._iter_watched(self._tree.named))
        for one in self._watched:  # calls before that micro-step were of no step
            one.calls.high = one.calls.high_rows = 0
        # Not at preparation, after which FSDP2 has its own way with types.
        self._types = {name: p.dtype for name, p in named_trainable(self._tree).items()}
        self._is_begun = True

    def _iter_watched(self, modules: dict[str, nn.Module]) -> Iterator[Watched]:
        """Layers planned in FP8 that are still converted."""
        for layer in self._plan.fp8_layers:
            module: Any = modules.get(layer.owner)
            if getattr(module, "multiplies", False):
                calls = module.calls_of(layer)
                yield Watched(layer, calls, calls.rows)

    def _as_it_is(self) -> list[Any]:
        """Objects of modules, and what may be compiled; of parameters, types and flags."""
        modules = self._tree.modules()
        calls = [(m, m._compiled_call_impl, vars(m).get("forward")) for m in modules]
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
            for m in self._tree.modules()
            if "merged_adapters" in vars(m) and any(p.requires_grad for p in m.parameters())
        ]

    # ------------------------------------------------------------------------------ each step

    def before_step(self) -> None:
        """Compare, before an optimizer of the model uses the gradients."""
        # An optimizer that steps inside the backward comes here once for each parameter: there
        # the structure is compared, and a step counted, once in each backward.
        task = torch._C._current_graph_task_id()
        if task == -1 or task != self._task:
            self._task = task
            self.steps += 1
            self._check_structure()
            self._check_merged()
            self._check_codes()
        self._check_calls()

    def _check_structure(self) -> None:
        """Look closer at what the model is made of, unless it is as it was last found in order."""
        now = self._as_it_is()
        if now == self._noted:
            return
        parameters = dict(self._tree.named_parameters())
        self._check_layers()
        self._check_trainable({name for name, p in parameters.items() if p.requires_grad})
        if self._is_begun:
            self._check_types(parameters)
            refuse_compiled(self._tree, compiled_later)
            self._adapters = self._trained_adapters()
            self._noted = now

    def _check_codes(self) -> None:
        """Raise unless the device multiplied what the optimizer is about to update.

        Of one weight, a small one: what changes weights unseen changes all.
        """
        away = (m for _, m in self._linears.values() if isinstance(m, TrainedMixin))
        layer = next(away, None)
        master = layer and layer.fp8_engine.masters.one_to_check(self.steps)
        if master is not None and not master.is_cast():
            self._fail(
                "the device multiplied by other weights than those in host memory",
                where=f"a weight of {list(master.shape)}, at optimizer step {self.steps}",
                why="something changed masters where neither an optimizer's step nor a forward "
                "could see it, between forward and step: the gradients belong to other weights",
                fix="change weights between a step and the next forward, or ~precision.fp8_params",
            )

    def _check_layers(self) -> None:
        """Raise unless the linear layers are those that were prepared."""
        now = {id(r.owner): (r.name, r.owner) for r in linear_records(self._tree)}
        gone = sorted(
            name
            for key, (name, m) in self._linears.items()
            if key not in now and not _is_frozen_adapter(name, m)
        )
        new = sorted(
            name
            for key, (name, m) in now.items()
            if key not in self._linears and not _is_frozen_adapter(name, m)
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

    def _check_trainable(self, now: set[str]) -> None:
        """Raise unless the parameters that train are those that trained at preparation."""
        unfrozen, froze = sorted(now - self._trains), sorted(self._trains - now)
        if unfrozen or froze:
            self._fail(
                "the model was prepared with a different choice of which parameters train",
                where=f"now trainable: {some(unfrozen)}; no longer: {some(froze)}",
                why="the plan, the optimizer and the receipt are of the parameters that trained "
                "when it was prepared",
                fix="freeze before building the trainer, and do not touch requires_grad "
                "afterwards; or prepare the model again when it has changed",
            )

    def _check_types(self, parameters: dict[str, nn.Parameter]) -> None:
        """Raise if a trained parameter has another type than after the witnessed micro-step."""
        cast = [
            (name, self._types[name], p.dtype)
            for name, p in parameters.items()
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

    def _check_merged(self) -> None:
        """Raise if an adapter that trains is merged into its base weight."""
        merged = [m for m in self._adapters if m.merged_adapters]
        if merged:
            names = {id(m): name for name, m in self._tree.named_modules()}
            self._fail(
                f"{len(merged)} adapters are merged into their base weights and do not train",
                where=some([names.get(id(m), "?") for m in merged]),
                why="a merged adapter is not multiplied, so no gradient reaches it",
                fix="model.unmerge_adapter() before the next forward of training; merge a copy, or "
                "`python -m finetune export RUN` when the run has ended",
            )

    def _check_calls(self) -> None:
        """Report layers that ran in high precision; count those that rested.

        Resets `ran` and `high` of each count for the next step.
        """
        high: list[str] = []
        resting: list[str] = []
        for one in self._watched:
            name, calls = one.layer.name, one.calls
            if calls.high:
                calls.high = 0
                high.append(name)
            elif calls.ran:
                calls.ran = False
            else:
                resting.append(name)
        # If all rest, another optimizer has stepped on the same backward.
        if len(resting) < len(self._watched):
            self.rests.update(resting)
        self.entered.update(high)
        if high:
            roles = {h.layer.role for h in self._watched}
            self._leave(
                f"BF16 entered at optimizer step {self.steps}: {len(high)} layers that were "
                "planned in FP8 did not run in FP8",
                where=some(high),
                why="they were called in evaluation mode, where layers multiply in high precision",
                fix=fix_of("fp8", training=False, silent=True, roles=roles),
            )

    # ------------------------------------------------------------------------------- the share

    def share(self, flops: Flops, *, compiled: bool = False) -> dict[str, float]:
        """Share of each precision in the matmul FLOPs of the run; `compiled` layers count no rows.

        Two layers of 100 FLOPs in FP8 each and a head of 100 in BF16, with 10 rows in the witnessed
        micro-step: after 100 rows of one layer and 50 of the other they are 1000, 500 and 1000
        FLOPs, and FP8 has 60 % instead of 67 %.
        """
        weights: dict[str, float] = {}
        more: Counter[str] = Counter()
        for one in self._watched:
            n, k = one.layer.shape
            each, calls = 2 * n * k * len(one.layer.gemms), one.calls
            if one.first:
                weights[one.layer.name] = calls.rows / one.first
            else:  # not called in the witnessed micro-step, so without FLOPs in `flops`
                more[self._plan.precision.low] += each * calls.rows
            more["bf16"] += each * calls.high_rows
        if compiled or not any(weights.values()):
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


def _is_frozen_adapter(name: str, module: nn.Module) -> bool:
    """True for a frozen adapter's layer, which may come and go: adapters never run in FP8."""
    return is_low_rank(name) and not any(p.requires_grad for p in module.parameters())
