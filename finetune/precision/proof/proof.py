"""The proof: in its first steps, a run shows that it is what was requested, or it is stopped.

Three things are observed, none read off a flag:

1. *GEMMs.* The first training micro-step is run under a `Witness`: every planned FP8 layer must
   have run FP8 GEMMs and nothing else, and requested FP8 must have a share above 0.
2. *The trainable set.* What trained before preparation must train after it, no more and no less,
   and every such parameter must be in the optimizer.
3. *Movement.* By the second optimizer step with a learning rate above zero the bits of every
   trainable parameter must have changed (LoRA's A has no gradient until B has moved). Where they
   have not, the gradient and the optimizer's statistics tell a dead weight (all zeros), which
   stops the run, from one whose update is less than its type can hold, which is only reported.

Of sharded tensors this process's shard is read.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from finetune.errors import ProofError, some
from finetune.precision.backends.base import in_backward
from finetune.precision.convert import Conversion
from finetune.precision.formats import matrix_hash
from finetune.precision.planner import GEMMS
from finetune.precision.proof.remedies import remedy, why_still
from finetune.precision.proof.witness import NOT_LINEAR, Seen, Witness
from finetune.runs.receipt import LayerReceipt

EFFECTIVE_STEPS = 2


def named_trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Trainable parameters by name, tied ones once."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


class Proof:
    """Observes the first steps of one model. Raises `ProofError` out of the step that fails.

    Attributes:
        status: `proven`, or what is still missing.
        is_open: True while steps are observed.
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
        self._names = {name for name, _ in conversion.model.named_parameters()}
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
        _watch_backwards(self)
        self._handles = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]

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
        """Context of a backward, of this model or another."""
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
        _unwatch_backwards(self)
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
        self.status = "not proven: weights have not been seen to move"
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
                fix=remedy(
                    requested,
                    training=self.model.training,
                    silent=bool(silent),
                    roles={planned[row.name].role for row in wrong},
                ),
            )

    def _layer_receipts(self, witness: Witness) -> list[LayerReceipt]:
        by_layer: dict[str, list[tuple[str, str, Seen]]] = {}
        for (name, gemm, precision), seen in witness.seen.items():
            by_layer.setdefault(name, []).append((gemm, precision, seen))
        rows = []
        for layer in self.conversion.plan.layers:
            seen = by_layer.pop(layer.name, [])
            reason = layer.reason if seen else f"did not run in the observed step ({layer.reason})"
            rows.append(_row(layer.name, layer.shape, layer.role, seen, reason))
        for name, seen in by_layer.items():
            rows.append(_row(name, (0, 0), "other", seen, NOT_LINEAR[name]))
        return rows

    # ------------------------------------------------------------ 2. trainable set, 3. movement

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        owned = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
        if not self.is_open or not any(id(p) in owned for p in self.model.parameters()):
            return
        if self._witness is not None:
            self._fail(
                "the optimizer steps, and no forward and backward of the prepared model was seen",
                where="the step before optimizer.step()",
                why="what ran is unknown: FP8 has not been proven",
                fix="call the prepared model itself, not its parts, and then loss.backward()",
            )
        trainable = named_trainable(self.model)
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
        if added := sorted(set(unfrozen) - self._names):
            self._fail(
                "trainable parameters were added after preparation",
                where=some(added),
                why="layers that were not there when the model was prepared are not converted, and "
                "no optimizer made before has them",
                fix="attach adapters first (get_peft_model, or the trainer's peft_config), then "
                "prepare the model",
            )
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
        steps[id(optimizer)] = steps.get(id(optimizer), 0) + bool(owned - self._idle)
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
        """True for each trainable parameter that differs from before the first step."""
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
        rounded = [n for n in still if _was_updated(trainable[n], optimizer)]
        self.trainable["below_resolution"] = sum(trainable[n].numel() for n in rounded)
        dead = [name for name in still if name not in rounded]
        if dead:
            self._fail(
                f"{len(dead)} trainable parameters do not train",
                where=some(dead),
                why=f"{why_still([trainable[name] for name in dead])}, and their bits are "
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


def _row(
    name: str, shape: tuple[int, int], role: str, seen: list[tuple[str, str, Seen]], reason: str
) -> LayerReceipt:
    # The lowest precision must not hide a higher one: 'bf16+fp8' where both ran.
    ran = {g: "+".join(sorted({p for of, p, _ in seen if of == g})) or "none" for g in GEMMS}
    calls = {gemm: sum(s.calls for of, _, s in seen if of == gemm) for gemm in GEMMS}
    flops = sum(s.flops for _, _, s in seen)
    return LayerReceipt(name, shape, role, calls=calls, flops=flops, reason=reason, **ran)


# ------------------------------------------------------- backwards, whoever starts them
#
# Accelerate, Trainer and hand-written loops all go through `torch.autograd.backward` or `.grad`. A
# dispatch mode must be entered on the thread that calls them: autograd's own threads inherit it.
# Both functions are patched while a proof is open, once for all proofs, and restored afterwards.

_watching: list[Proof] = []
_plain: dict[str, Any] = {}


def _watch_backwards(proof: Proof) -> None:
    _watching.append(proof)
    if not _plain:
        for name in ("backward", "grad"):
            _plain[name] = getattr(torch.autograd, name)
            setattr(torch.autograd, name, _watched(_plain[name]))


def _unwatch_backwards(proof: Proof) -> None:
    _watching[:] = [one for one in _watching if one is not proof]
    if not _watching:
        for name, plain in _plain.items():
            setattr(torch.autograd, name, plain)
        _plain.clear()


def _watched(plain: Any) -> Any:
    @functools.wraps(plain)
    def watched(*args: Any, **kwargs: Any) -> Any:
        # A backward inside one (reentrant checkpointing) is a part of it: modes are entered
        # already, and what has run so far is not all of it.
        proofs = [] if in_backward() else list(_watching)
        with contextlib.ExitStack() as stack:
            for proof in proofs:
                stack.enter_context(proof.watch_backward())
            result = plain(*args, **kwargs)
        for proof in proofs:
            proof.after_backward()
        return result

    return watched


# ------------------------------------------------------------- bits and the optimizer's statistics


def fingerprint(parameter: Tensor) -> int:
    """A hash of a parameter's bits, at the cost of one pass over them (`formats.matrix_hash`).

    Position counts: a plain xor or sum would miss the same change made to an even number of equal
    weights, as a norm's ones are.
    """
    local = _local(parameter).detach()
    if not local.numel():  # an empty shard
        return 0
    return int(matrix_hash(local.reshape(-1, local.shape[-1] if local.dim() else 1)))


def _was_updated(parameter: Tensor, optimizer: Optimizer) -> bool:
    """True if a parameter has a gradient or optimizer statistics other than 0."""
    tensors = [*evidence(optimizer.state.get(parameter, {}))]
    if parameter.grad is not None:
        tensors.append(_local(parameter.grad))
    return any(bool((t != 0).any()) for t in tensors)


def evidence(state: dict[str, Any]) -> Iterator[Tensor]:
    """Tensors of a parameter's optimizer state that are not all 0 once a gradient was not.

    Codes and lookup tables are no evidence: zero is some code between others. So of torchao's
    moments the first is read, which has an exact zero, and of bitsandbytes' the scales.

    Args:
        state: `optimizer.state[parameter]`.
    """
    quantized = "absmax1" in state
    for key, local in _moments(state):
        if is_torchao(local):
            if key == "exp_avg":
                yield local.dequantize()
        elif not quantized or key.startswith("absmax"):
            yield local


def stored_bytes(optimizer: Optimizer) -> int:
    """Bytes of the moments and their scales, without lookup tables and step counters."""
    return sum(
        part.numel() * part.element_size()
        for state in optimizer.state.values()
        for _, local in _moments(state)
        for part in ((local.codes, local.scale) if is_torchao(local) else (local,))
    )


def is_torchao(thing: Any) -> bool:
    """True for a low-bit optimizer of torchao, or a tensor of its state."""
    return type(thing).__module__.startswith("torchao.optim.")


def _moments(state: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Key and local tensor of all but step counters and bitsandbytes' lookup tables (`qmap1`)."""
    for key, value in state.items():
        if isinstance(value, Tensor) and value.dim() and not key.startswith("qmap"):
            yield key, _local(value)


def _local(value: Tensor) -> Any:
    return getattr(value, "_local_tensor", value)
