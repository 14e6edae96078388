"""The proof: in its first steps, a run shows that it is what was asked, or it is stopped.

Three things are observed, none read off a flag:

1. *GEMMs.* The first training micro-step is run under a `Witness`: every planned FP8 layer must
   have run FP8 GEMMs and nothing else, and FP8 asked must not come out as a share of 0.
2. *The trainable set.* What trained before preparation must train after it, no more and no less,
   and every such parameter must be in the optimizer.
3. *Movement.* By the second optimizer step with a learning rate above zero every trainable
   parameter must have changed (LoRA's A has no gradient until B has moved). One exception is told
   and not stopped: a weight with a gradient whose update is less than its type can hold.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from finetune.errors import ProofError, some
from finetune.precision.backends.base import in_backward
from finetune.precision.convert import Conversion
from finetune.precision.planner import GEMMS
from finetune.precision.proof import autograd_watch
from finetune.precision.proof.movement import fingerprint, stored_bytes, was_updated
from finetune.precision.proof.witness import NOT_LINEAR, Witness
from finetune.runs.receipt import LayerReceipt

EFFECTIVE_STEPS = 2


def named_trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Trainable parameters by name, tied ones once."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


class Proof:
    """Observes the first steps of one model. Raises `ProofError` out of the step that fails.

    Attributes:
        status: `proven`, or what is still missing.
        is_open: steps are still observed.
        layers: rows of the receipt, after the first micro-step.
        flop_share: precision -> share of matmul FLOPs.
        trainable: counts for the receipt.
    """

    def __init__(
        self,
        conversion: Conversion,
        trainable_before: dict[str, int],
        after_gemms: Callable[[], None] = lambda: None,
    ) -> None:
        """Start observing.

        Args:
            conversion: the prepared model.
            trainable_before: name -> elements of what trained before preparation.
            after_gemms: called once the GEMMs are proven. A dispatch mode keeps `torch.compile`
                away, for good where it was met compiling, so compiling must wait until then.
        """
        self.conversion, self._after_gemms = conversion, after_gemms
        self.model = conversion.model
        self.status = "not proven: no training step yet"
        self.layers: list[LayerReceipt] = []
        self.flop_share: dict[str, float] = {}
        self._before = trainable_before
        self.trainable = {"before": sum(trainable_before.values())} | dict.fromkeys(
            ("after", "in_optimizer", "moved", "below_resolution", "optimizer_state_bytes"), 0
        )
        self.is_open = True
        self._witness: Witness | None = Witness(self.model, conversion.plan)
        self._mode: bool | None = None
        self._prints: dict[str, int] = {}
        self._owned: set[int] = set()
        self._idle: set[int] = set()
        self._effective_steps: dict[int, int] = {}
        self._state_bytes: dict[int, int] = {}
        conversion.around.append(self._around_forward)
        autograd_watch.listen(self)
        self._handles = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]

    def close(self) -> None:
        """Stop observing. Harmless when already stopped."""
        self._stop_witness()
        self.is_open = False

    def release(self) -> None:
        """Remove hooks as well: not from inside a step, whose hooks are being walked through."""
        self.close()
        for handle in self._handles:
            handle.remove()
        self._handles = []

    # ------------------------------------------------------------------------------- 1. the GEMMs

    @contextlib.contextmanager
    def _around_forward(self) -> Iterator[None]:
        witness = self._witness
        if witness is None or not torch.is_grad_enabled() or in_backward():
            yield
            return
        if self._mode is not self.model.training:  # what a sanity check ran is no evidence
            witness.reset()
            self._mode = self.model.training
        with witness.watching():
            yield

    @contextlib.contextmanager
    def watch_backward(self) -> Iterator[None]:
        """Around a backward of anything."""
        witness = self._witness
        if witness is None:
            yield
            return
        try:
            with witness.watching(backward=True):
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
            self._after_gemms()

    def _stop_witness(self) -> None:
        autograd_watch.stop(self)
        if self._around_forward in self.conversion.around:
            self.conversion.around.remove(self._around_forward)
        if self._witness is not None:
            self._witness.close()
            self._witness = None

    def _judge_gemms(self, witness: Witness) -> None:
        total = sum(seen.flops for seen in witness.seen.values()) or 1
        shares: dict[str, float] = {}
        for (_, _, precision), seen in witness.seen.items():
            shares[precision] = shares.get(precision, 0.0) + seen.flops / total
        self.flop_share = dict(sorted(shares.items()))
        self.layers = self._layer_receipts(witness)
        plan = self.conversion.plan
        asked = plan.precision.compute
        asked = plan.precision.low if asked == "fp8" else asked
        self.status = "not proven: weights have not been seen to move"
        # Heads and adapters follow policies of their own, unless the user chose their precision. A
        # parameter that is not converted is multiplied as its module does it.
        planned = {
            layer.name: layer
            for layer in plan.layers
            if layer.override or layer.compute in ("fp8", asked if layer.role == "base" else "fp8")
            if layer.kind == "linear" or layer.compute == "fp8"
        }
        silent = sorted((planned.keys() & witness.called) - witness.owners)
        other = [f"{name} was called and multiplied nothing" for name in silent]
        other += [
            f"{row.name} was multiplied outside a call of the prepared model"
            for row in self.layers
            if row.name in planned and row.fprop == "none" != row.wgrad
        ]
        other += [
            f"{row.name} {gemm}={getattr(row, gemm)}"
            for row in self.layers
            if row.name in planned
            for gemm in GEMMS
            if getattr(row, gemm) not in (planned[row.name].would_run(gemm), "none")
        ]
        if other or not shares.get(asked):
            self._fail(
                f"{asked.upper()} was asked and did not run",
                where=", ".join(other[:6]) or "all layers",
                why=f"of the matmul FLOPs of the first step {shares.get(asked, 0):.1%} ran in "
                f"{asked.upper()}",
                fix="look at the plan with `python -m finetune validate RECIPE`; a layer called "
                "outside the model's forward, or replaced after preparation, is not converted; a "
                "model in evaluation mode (model.eval()) multiplies in high precision; SFTTrainer "
                "multiplies the output head inside its loss, past the head's layer; a declared "
                "parameter is to be multiplied itself or as a view (autocast casts it), not a copy"
                + ("; FP32 needs model.dtype=float32" if asked == "fp32" else ""),
            )

    def _layer_receipts(self, witness: Witness) -> list[LayerReceipt]:
        by_layer: dict[str, dict[str, list[tuple[str, Any]]]] = {}
        for (name, gemm, precision), seen in witness.seen.items():
            by_layer.setdefault(name, {}).setdefault(gemm, []).append((precision, seen))
        rows = []
        for layer in self.conversion.plan.layers:
            seen = by_layer.pop(layer.name, {})
            reason = layer.reason if seen else f"did not run in the observed step ({layer.reason})"
            rows.append(_row(layer.name, layer.shape, layer.role, seen, reason))
        for name, seen in by_layer.items():
            rows.append(_row(name, (0, 0), "other", seen, NOT_LINEAR[name]))
        return rows

    # ------------------------------------------------------------ 2. trainable set, 3. movement

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        owned = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
        trainable = named_trainable(self.model)
        if not self.is_open or not any(id(p) in owned for p in self.model.parameters()):
            return
        if self._witness is not None:
            self._fail(
                "the optimizer steps, and no forward and backward of the prepared model was seen",
                where="the step before optimizer.step()",
                why="what ran cannot be told: FP8 has not been proven",
                fix="call the prepared model itself, not its parts, and then loss.backward()",
            )
        self._judge_trainable_set(trainable)
        self._owned |= owned.keys()
        switched_off = {key for key, lr in owned.items() if not lr > 0}
        self._idle = (self._idle - owned.keys()) | switched_off
        for name, p in trainable.items():
            if name not in self._prints:
                self._prints[name] = fingerprint(p)

    def _judge_trainable_set(self, trainable: dict[str, nn.Parameter]) -> None:
        self.trainable["after"] = sum(p.numel() for p in trainable.values())
        unfrozen = sorted(trainable.keys() - self._before.keys())
        froze = sorted(self._before.keys() - trainable.keys())
        if unfrozen or froze:
            self._fail(
                "preparation changed which parameters train",
                where=f"now trainable: {some(unfrozen)}; no longer: {some(froze)}",
                why="a frozen base that trains, or weights that stopped, is not the run asked for",
                fix="freeze before building the trainer, and do not touch requires_grad afterwards",
            )

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
        trainable = named_trainable(self.model)
        concerned = self._prints and any(id(p) in owned for p in trainable.values())
        if not self.is_open or not concerned:
            return
        steps = self._effective_steps
        steps.setdefault(id(optimizer), 0)
        if owned - self._idle:
            steps[id(optimizer)] += 1
        self.trainable["in_optimizer"] = sum(
            p.numel() for p in self.model.parameters() if id(p) in self._owned
        )
        self._state_bytes[id(optimizer)] = stored_bytes(optimizer)
        self.trainable["optimizer_state_bytes"] = sum(self._state_bytes.values())
        moved = self._moved(trainable)
        if max(steps.values()) >= EFFECTIVE_STEPS:
            self._judge_optimizers(trainable)  # by now all of them have stepped
        if min(steps.values()) >= EFFECTIVE_STEPS:
            self._judge_movement(optimizer, trainable, moved)
            self.status = "proven"
            self.close()

    def _judge_optimizers(self, trainable: dict[str, nn.Parameter]) -> None:
        missing = [name for name, p in trainable.items() if id(p) not in self._owned]
        if missing:
            self._fail(
                "trainable parameters are not in the optimizer",
                where=some(missing),
                why="they get gradients that nothing applies, and would never train",
                fix="build the optimizer from model.parameters() after adapters are attached, and "
                "pass model and optimizer together to accelerator.prepare",
            )

    def _moved(self, trainable: dict[str, nn.Parameter]) -> dict[str, bool]:
        """Which trainable parameters differ from what they were before the first step."""
        moved = {name: fingerprint(p) != self._prints.get(name) for name, p in trainable.items()}
        if dist.is_initialized() and dist.get_world_size() > 1:  # a shard may stand still alone
            device = next(iter(trainable.values())).device
            flags = torch.tensor([float(m) for m in moved.values()], device=device)
            dist.all_reduce(flags, op=dist.ReduceOp.MAX)
            moved = {name: bool(f) for name, f in zip(moved, flags.tolist(), strict=True)}
        self.trainable["moved"] = sum(trainable[name].numel() for name, m in moved.items() if m)
        return moved

    def _judge_movement(
        self, optimizer: Optimizer, trainable: dict[str, nn.Parameter], moved: dict[str, bool]
    ) -> None:
        still = [n for n, m in moved.items() if not m and id(trainable[n]) not in self._idle]
        rounded = [n for n in still if was_updated(trainable[n], optimizer)]
        self.trainable["below_resolution"] = sum(trainable[n].numel() for n in rounded)
        dead = [name for name in still if name not in rounded]
        if dead:
            self._fail(
                f"{len(dead)} trainable parameters do not train",
                where=some(dead),
                why=f"{_why_still([trainable[name] for name in dead])}, and their bits are "
                f"unchanged after {EFFECTIVE_STEPS} optimizer steps with a learning rate above "
                "zero",
                fix="check that they take part in the loss; freeze them if they are not meant to; "
                "gradients of zeros alone can be an underflow: a few tokens with gradients far "
                "above the rest take the scale (padding that is attended to?), and the same step "
                "in BF16 tells",
            )

    def _fail(self, what: str, *, where: str, why: str, fix: str) -> None:
        self.status = f"stopped: {what}"
        self.close()
        raise ProofError(what, where=where, why=why, fix=fix)


def _row(name: str, shape: tuple[int, int], role: str, seen: Any, reason: str) -> LayerReceipt:
    def ran(gemm: str) -> str:
        # The lowest precision must not hide a higher one: 'bf16+fp8' where both ran.
        return "+".join(sorted({precision for precision, _ in seen.get(gemm, [])})) or "none"

    calls = {gemm: sum(s.calls for _, s in seen.get(gemm, [])) for gemm in GEMMS}
    flops = sum(s.flops for entries in seen.values() for _, s in entries)
    gemms = {gemm: ran(gemm) for gemm in GEMMS}
    return LayerReceipt(name, shape, role, calls=calls, flops=flops, reason=reason, **gemms)


def _why_still(dead: list[nn.Parameter]) -> str:
    """No gradient at all is a hole in the graph; a gradient of zeros is one of the numbers."""
    zeros = sum(p.grad is not None for p in dead)
    if not zeros:
        return "no gradient reached them"
    who = "all" if zeros == len(dead) else f"{zeros}"
    return f"the gradients of {who} of them are zeros throughout"
