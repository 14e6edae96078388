"""The proof: in its first steps, a run shows that it is what was requested, or it is stopped.

Three things are observed, none read off a flag:

1. *GEMMs.* The first training micro-step is run under a `Witness`: every planned FP8 layer must
   have run FP8 GEMMs and nothing else, and requested FP8 must have a share above 0.
2. *The trainable set.* What trained before preparation must train after it, no more and no less,
   and every such parameter must be in the optimizer.
3. *Movement* (`movement`). The numbers of trainable parameters change: counted in the first steps,
   after warm-up and at the end.

Afterwards a `Sentinel` holds the run to its plan, at each optimizer step until the last.

The moment to judge a step is before its optimizer changes a weight: in the optimizer's own hook,
inside a closure after its backward, or inside the backward where each parameter steps by itself.
A proof lives as long as its conversion does, hence its model: hooks refer to it weakly.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from finetune.errors import OrderError, ProofError
from finetune.precision.convert import Conversion
from finetune.precision.engines.observers import in_backward
from finetune.precision.model.compiling import (
    is_inside,
    never_compiled,
    recomputed,
    refuse_compiled,
)
from finetune.precision.model.plan import GEMMS
from finetune.precision.model.tree import named_trainable
from finetune.precision.proof.fixes import fix_of
from finetune.precision.proof.movement import Movement, changes_nothing
from finetune.precision.proof.row import LayerReceipt
from finetune.precision.proof.sentinel import Flops, Sentinel
from finetune.precision.proof.witness import NOT_LINEAR, UNKNOWN, Seen, Witness


class Proof:
    """Observes the first steps of one model. Raises `ProofError` out of the step that fails.

    Attributes:
        status: `proven`, or what is still missing.
        is_open: True while steps are observed.
        is_stopped: True once it has failed.
        is_released: True once the model is no longer converted to this plan.
        layers: rows of the receipt, after the first micro-step.
        trainable: counts for the receipt.
        flops: of the witnessed micro-step, by layer and precision.
        sentinel: holds the model to its plan.
        movement: judges the first steps, and counts changed numbers until the last.
    """

    def __init__(
        self,
        conversion: Conversion,
        trainable_before: dict[str, int],
        after_gemms: Callable[[], None] = lambda: None,
        *,
        compiles: bool = False,
        optimizers: Collection[Optimizer] = (),
    ) -> None:
        """Start observing.

        Args:
            conversion: the prepared model; keeps this proof.
            trainable_before: name -> elements of what trained before preparation.
            after_gemms: called once the GEMMs are proven. A dispatch mode keeps `torch.compile`
                away, for good where it was met compiling, so compiling must wait until then.
            compiles: decoder layers are compiled then. What the witnessed micro-step saves for
                backward is not more than what those after it do: these layers are checkpointed.
            optimizers: those that will step, at some time; kept as the collection changes.
        """
        self.conversion, self._after_gemms, self._compiles = conversion, after_gemms, compiles
        self.model, self._tree = conversion.model, conversion.tree
        self.status = "not proven: no training step yet"
        self.layers: list[LayerReceipt] = []
        later = "after", "in_optimizer", "moved", "below_resolution", "without_gradient"
        self.trainable = {"before": sum(trainable_before.values())}
        self.trainable |= dict.fromkeys((*later, "optimizer_state_bytes"), 0)
        self.is_open, self.is_released, self.is_stopped = True, False, False
        self._witness: Witness | None = Witness(self._tree, conversion.plan)
        self._mode: bool | None = None
        self.movement = Movement(self._tree, self.trainable, self._fail, optimizers)
        trains = set(trainable_before)
        self.sentinel = Sentinel(self._tree, conversion.plan, trains, self._fail, self._leave_plan)
        self.flops: Flops = {}
        self._train: dict[str, nn.Parameter] = {}  # in the step that is being taken
        self._left = ""
        self._makes_state = False  # the step that is being taken
        self._steppers: weakref.WeakKeyDictionary[Optimizer, bool] = weakref.WeakKeyDictionary()
        conversion.proof = self
        conversion.around.append(self._around_forward)
        watch_backwards(self)
        self._handles = [
            register_optimizer_step_pre_hook(_weakly(self._before_step)),
            register_optimizer_step_post_hook(_weakly(self._after_step)),
        ]
        for handle in self._handles:
            weakref.finalize(self, handle.remove)

    @property
    def flop_share(self) -> dict[str, float]:
        """Precision -> share of the matmul FLOPs of the run so far; empty before the first step."""
        compiled = bool(self.conversion.compiled)
        return self.sentinel.share(self.flops, compiled=compiled) if self.flops else {}

    def close(self) -> None:
        """Stop observing; repeated calls have no effect."""
        self._stop_witness()
        self.is_open = False

    def release(self) -> None:
        """Remove hooks as well: not from inside a step, whose hooks are being walked through."""
        self.close()
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.is_released = True

    @property
    def was_stopped(self) -> bool:
        """True if its run has failed, here or elsewhere: it proves nothing that comes after."""
        return self.status.startswith("stopped")

    def stop(self, why: str) -> None:
        """End an unfinished proof: the run has failed elsewhere."""
        if self.is_open:
            self.status = f"stopped: {why}"
            self.close()

    # ------------------------------------------------------------------------------- 1. the GEMMs

    @contextlib.contextmanager
    def _around_forward(self) -> Iterator[None]:
        witness = self._witness
        if witness is None or not torch.is_grad_enabled() or in_backward():
            yield
            return
        if is_inside():  # `prepare` refuses a model that is compiled before
            raise never_compiled("torch.compile of the prepared model, or of what calls it")
        refuse_compiled(self._tree)
        if self._mode is not self.model.training:  # what a sanity check ran is no evidence
            witness.reset()
            self._mode = self.model.training
        layers = self.conversion.compilable if self._compiles else []
        try:
            with witness.watching(), recomputed(layers, self._uncounted):
                yield
        except BaseException:
            witness.reset()  # half a forward is none either
            raise

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Context of forwards and backwards that are no training step, whatever they look like."""
        witness, self._witness = self._witness, None
        try:
            yield
        finally:
            self._witness = witness
            if witness is not None:
                witness.reset()

    @contextlib.contextmanager
    def _uncounted(self) -> Iterator[None]:
        """Context of a recomputation that the steps after the witnessed one do not have."""
        witness = self._witness
        if witness is not None:
            witness.is_paused = True
        try:
            yield
        finally:
            if witness is not None:
                witness.is_paused = False

    @contextlib.contextmanager
    def watch_backward(self) -> Iterator[None]:
        """Context of a backward, of this model or another."""
        witness = self._witness
        if witness is None or not witness.called:  # the backward of another model
            yield
            return
        try:
            with witness.watching():
                yield
        except BaseException:
            witness.reset()  # half a backward is no evidence
            raise

    def after_backward(self) -> None:
        """Judge the GEMMs, if the backward was of this model."""
        witness = self._witness
        if witness is not None and witness.saw_backward:
            self._stop_witness()
            self._judge_gemms(witness)
            self.sentinel.begin()
            self._after_gemms()

    def _stop_witness(self) -> None:
        unwatch_backwards(self)
        if self._around_forward in self.conversion.around:
            self.conversion.around.remove(self._around_forward)
        if self._witness is not None:
            self._witness.close()
            self._witness = None

    def _judge_gemms(self, witness: Witness) -> None:
        for (name, _, precision), seen in witness.seen.items():
            self.flops[name, precision] = self.flops.get((name, precision), 0) + seen.flops
        shares = self.flop_share
        self.layers = self._layer_receipts(witness)
        self.status = f"not proven: {self.movement.missing}"
        plan = self.conversion.plan
        requested: str = plan.precision.compute
        requested = plan.precision.low if requested == "fp8" else requested
        # Heads and adapters follow policies of their own, unless the user chose their precision. A
        # parameter that is not converted is multiplied as its module does it.
        planned = {
            layer.name: layer
            for layer in plan.layers
            if layer.kind == "linear" or layer.compute == "fp8"
            if layer.override
            or layer.compute == "fp8"
            or (layer.role == "base" and layer.compute == requested)
        }
        rows = [row for row in self.layers if row.name in planned]
        silent = sorted((planned.keys() & witness.called) - witness.owners)
        other = [f"{name} was called and multiplied nothing" for name in silent]
        other += [
            f"{row.name} was multiplied outside a call of the prepared model"
            for row in rows
            if row.fprop == "none" != row.wgrad
        ]
        high = {layer.name for layer in plan.layers if layer.compute != "fp8"} - planned.keys()
        other += [
            f"{row.name} ran in {plan.precision.low.upper()}, planned in high precision"
            for row in self.layers
            if row.name in high
            and any(plan.precision.low in getattr(row, gemm).split("+") for gemm in GEMMS)
        ]
        wrong: list[LayerReceipt] = []
        for row in rows:
            for gemm in GEMMS:
                if getattr(row, gemm) not in (planned[row.name].would_run(gemm), "none"):
                    other.append(f"{row.name} {gemm}={getattr(row, gemm)}")
                    wrong.append(row)
        if other or not shares.get(requested):
            self._fail(
                f"{requested.upper()} was requested and did not run",
                where=", ".join(other[:6]) or "all layers",
                why=f"of the matmul FLOPs of the first step {shares.get(requested, 0):.1%} ran in "
                f"{requested.upper()}",
                fix=fix_of(
                    requested,
                    training=self._is_training(planned[row.name].owner for row in wrong),
                    silent=bool(silent),
                    roles={planned[row.name].role for row in wrong},
                ),
            )

    def _is_training(self, names: Iterable[str]) -> bool:
        """True if the model and these modules are in training mode.

        PEFT's wrapper is, around a model that CorDA's preprocessing or X-LoRA has left in another.
        """
        modules = self._tree.named
        return self.model.training and all(modules[name].training for name in names)

    def _layer_receipts(self, witness: Witness) -> list[LayerReceipt]:
        by_layer: dict[str, list[tuple[str, str, Seen]]] = {}
        for (name, gemm, precision), seen in witness.seen.items():
            by_layer.setdefault(name, []).append((gemm, precision, seen))
        rows = []
        for layer in self.conversion.plan.layers:
            seen = by_layer.pop(layer.name, [])
            reason = layer.reason
            if not seen:
                rested = "did not run in the first step"
                if layer.kind == "parameter" and layer.name in witness.called:
                    rested = "multiplied by its module in high precision, counted there"
                reason = "; ".join(filter(None, (rested, layer.reason)))
            rows.append(_row(layer.name, layer.shape, layer.role, seen, reason))
        for name, seen in by_layer.items():
            which = f" ({', '.join(sorted(witness.unknown))})" if name == UNKNOWN else ""
            rows.append(_row(name, (0, 0), "other", seen, NOT_LINEAR[name] + which))
        return rows

    # ------------------------------------------------------------ 2. trainable set, 3. movement

    def concerns(self, optimizer: Optimizer) -> bool:
        """True if an optimizer has a parameter of this model."""
        known = self._steppers.get(optimizer)
        if not known:
            owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
            known = any(id(p) in owned for p in self._tree.parameters())
            self._steppers[optimizer] = known
        return known

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        self._makes_state = False
        if self.is_released or not self.concerns(optimizer):
            return None
        if self.is_stopped:
            raise OrderError(
                "the model trains on after an error that has stopped its run",
                where=self.status,
                why="nothing has watched it since: what runs is unknown",
                fix="do what that error said, then accelerator.prepare(model, optimizer) or "
                "trainer.train() once more, which begin a new proof",
            )
        if self._witness is not None and not self._witness.called and changes_nothing(optimizer):
            self._makes_state = True
            return None
        closure = kwargs.get("closure") or next(iter(args[1:]), None)
        if closure is None:
            self._judge_step(optimizer)
            return None

        def judged(*inner: Any, **inner_kwargs: Any) -> Any:
            nonlocal is_first
            loss = closure(*inner, **inner_kwargs)
            if is_first:
                is_first = False
                self._judge_step(optimizer)
            return loss

        is_first = True
        if kwargs.get("closure"):
            return args, kwargs | {"closure": judged}
        return (args[0], judged, *args[2:]), kwargs

    def _judge_step(self, optimizer: Optimizer) -> None:
        """Judge the gradients of a step, before they are used."""
        if self._witness is not None and not in_backward():
            self._fail(
                "the optimizer steps, and no forward and backward of the prepared model was seen",
                where="the step before optimizer.step()",
                why="what ran is unknown: FP8 has not been proven",
                fix="call the prepared model itself, not its parts, and then loss.backward()",
            )
        if self._witness is None:
            self.sentinel.before_step()
        if self.is_open:
            self._train = named_trainable(self._tree)
            self.trainable["after"] = sum(p.numel() for p in self._train.values())
            self.movement.before_step(optimizer, self._train)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._makes_state or not self.concerns(optimizer):
            return
        self.movement.count_step(optimizer)
        if not self.is_open:
            return
        self.movement.after_step(optimizer, self._train)
        self.status = f"not proven: {self.movement.missing}"
        if self.movement.is_done and self._witness is None:
            self.status = f"not proven: {self._left}" if self._left else "proven"
            self.close()

    def _leave_plan(self, what: str, *, where: str, why: str, fix: str) -> None:
        """BF16 entered: an error, or a loud line if the run may fall back to it."""
        if self.conversion.plan.precision.on_unsupported != "bf16":
            self._fail(what, where=where, why=why, fix=fix)
        if not self._left:
            warnings.warn(f"! {what} ({where}): {why}", stacklevel=2)
        self._left = what
        self.status = f"not proven: {what}"

    def _fail(self, what: str, *, where: str, why: str, fix: str) -> None:
        self.status, self.is_stopped = f"stopped: {what}", True
        self.close()
        raise ProofError(what, where=where, why=why, fix=fix)


def _row(
    name: str, shape: tuple[int, int], role: str, seen: list[tuple[str, str, Seen]], reason: str
) -> LayerReceipt:
    # The lowest precision must not hide a higher one: 'bf16+fp8' where both ran.
    ran = {g: "+".join(sorted({p for of, p, _ in seen if of == g})) or "none" for g in GEMMS}
    calls = {gemm: sum(s.calls for of, _, s in seen if of == gemm) for gemm in GEMMS}
    flops = sum(s.flops for _, _, s in seen)
    return LayerReceipt(name, shape, role, calls=calls, flops=flops, reason=reason, **ran)


def _weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """A hook that does not keep the object of its method alive."""
    reference = weakref.WeakMethod(method)

    def hook(*args: Any) -> Any:
        alive = reference()
        return alive(*args) if alive is not None else None

    return hook


# ------------------------------------------------------------------- backwards, whoever starts them
#
# Accelerate, Trainer and hand-written loops all go through `torch.autograd.backward` or `.grad`. A
# dispatch mode must be entered on the thread that calls them: autograd's own threads inherit it.
# Both functions are patched while somebody watches, once for all proofs, and restored afterwards.
# Proofs are held weakly: one of a run that failed goes with its model.

_watching: list[weakref.ref[Proof]] = []
_plain: dict[str, Any] = {}


def watch_backwards(proof: Proof) -> None:
    """Let a proof see each backward from now on."""
    _watching.append(weakref.ref(proof, lambda _: _restore_unwatched()))
    if not _plain:
        for name in ("backward", "grad"):
            _plain[name] = getattr(torch.autograd, name)
            setattr(torch.autograd, name, _watched(_plain[name]))


def unwatch_backwards(proof: Proof) -> None:
    """Undo `watch_backwards`; repeated calls have no effect."""
    _watching[:] = [one for one in _watching if one() is not proof]
    _restore_unwatched()


def _restore_unwatched() -> None:
    _watching[:] = [one for one in _watching if one() is not None]
    if not _watching:
        for name, plain in _plain.items():
            setattr(torch.autograd, name, plain)
        _plain.clear()


def _watched(plain: Any) -> Any:
    @functools.wraps(plain)
    def watched(*args: Any, **kwargs: Any) -> Any:
        # A backward inside one (reentrant checkpointing) is a part of it: modes are entered
        # already, and what has run so far is not all of it.
        proofs = [] if in_backward() else [w for one in _watching if (w := one()) is not None]
        with contextlib.ExitStack() as stack:
            for proof in proofs:
                stack.enter_context(proof.watch_backward())
            result = plain(*args, **kwargs)
        for proof in proofs:
            proof.after_backward()
        return result

    return watched
