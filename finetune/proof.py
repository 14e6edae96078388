"""The proof: in its first steps, a run shows that it is what was asked, or it is stopped.

Three things are observed, none read off a flag:

1. *GEMMs.* The first training micro-step is run under a `Witness`: every planned FP8 layer must
   have run FP8 GEMMs and nothing else, and FP8 asked must not come out as a share of 0.
2. *The trainable set.* What trained before preparation must train after it, no more and no less,
   and every such parameter must be in the optimizer.
3. *Movement.* By the second optimizer step with a learning rate above zero every trainable
   parameter must have changed (LoRA's A has no gradient until B has moved). One exception is told
   and not stopped: a 16-bit weight whose update is smaller than half a unit in the last place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from finetune.errors import ProofError
from finetune.precision.backend import in_backward
from finetune.precision.convert import Conversion
from finetune.precision.planner import GEMMS
from finetune.precision.witness import Witness
from finetune.receipt import LayerReceipt

EFFECTIVE_STEPS = 2


def named_trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Trainable parameters by name, tied ones once."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def fingerprint(parameter: Tensor) -> int:
    """A hash of a parameter's bits (of this process's shard, when sharded)."""
    local = getattr(parameter, "_local_tensor", parameter).detach()
    return int(torch.hash_tensor(local.contiguous()).view(torch.int64)) if local.numel() else 0


class Proof:
    """Observes the first steps of one model. Raises `ProofError` out of the step that fails.

    Attributes:
        status: `proven`, or what is still missing.
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
            ("after", "in_optimizer", "moved", "below_resolution"), 0
        )
        self._witness: Witness | None = Witness(self.model, conversion.plan)
        self._watching: list[Any] = []
        self._prints: dict[str, int] = {}
        self._effective_steps = 0
        self._lr_above_zero = False
        self._plain_backward: Any = None
        self._handles = [
            self.model.register_forward_pre_hook(self._before_forward, prepend=True),
            self.model.register_forward_hook(self._after_forward, always_call=True),
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]

    @property
    def is_open(self) -> bool:
        """Whether steps are still observed."""
        return bool(self._handles)

    def close(self) -> None:
        """Stop observing. Harmless when already stopped."""
        self._stop_witness()
        for handle in self._handles:
            handle.remove()
        self._handles = []

    # ------------------------------------------------------------------------------- 1. the GEMMs

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        training = module.training and torch.is_grad_enabled() and not in_backward()
        if self._witness is None or not training:
            return
        context = self._witness.watching()
        context.__enter__()
        self._watching.append(context)

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self._watching:
            return
        self._watching.pop().__exit__(None, None, None)
        if self._plain_backward is None:
            self._watch_next_backward()

    def _watch_next_backward(self) -> None:
        """The one place through which accelerate, Trainer and hand-written loops all go."""
        original = self._plain_backward = torch.autograd.backward

        @functools.wraps(original)
        def backward(*args: Any, **kwargs: Any) -> None:
            witness = self._witness
            if witness is None:
                return original(*args, **kwargs)
            with witness.watching():
                original(*args, **kwargs)
            if witness.saw_backward:  # else it was the backward of something else
                self._stop_witness()
                self._judge_gemms(witness)
                self._after_gemms()

        torch.autograd.backward = backward

    def _stop_witness(self) -> None:
        if self._plain_backward is not None:
            torch.autograd.backward = self._plain_backward
            self._plain_backward = None
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
        self.status = "not proven: weights have not been seen to move"
        planned = {x.name for x in plan.layers if x.compute == asked and x.role == "base"}
        other = [
            f"{row.name} {gemm}={getattr(row, gemm)}"
            for row in self.layers
            if row.name in planned
            for gemm in GEMMS
            if getattr(row, gemm) not in (asked, "none")
        ]
        if other or not shares.get(asked):
            self._fail(
                f"{asked.upper()} was asked and did not run",
                where=", ".join(other[:6]) or "all layers",
                why=f"of the matmul FLOPs of the first step {shares.get(asked, 0):.1%} ran in "
                f"{asked.upper()}",
                fix="look at the plan with `python -m finetune validate RECIPE`; a layer called "
                "outside the model's forward, or replaced after preparation, is not converted"
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
        reasons = {"(attention)": "scores and weighted sum stay in high precision"}
        for name, seen in by_layer.items():
            rows.append(_row(name, (0, 0), "other", seen, reasons.get(name, "not a linear layer")))
        return rows

    # ------------------------------------------------------------ 2. trainable set, 3. movement

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
        trainable = named_trainable(self.model)
        if not self._concerns(owned, trainable):
            return
        self._lr_above_zero = any(group["lr"] > 0 for group in optimizer.param_groups)
        if not self._prints:
            self._judge_trainable_set(owned, trainable)
            self._prints = {name: fingerprint(p) for name, p in trainable.items()}

    def _concerns(self, owned: set[int], trainable: dict[str, nn.Parameter]) -> bool:
        return any(id(p) in owned for p in self.model.parameters()) or not trainable

    def _judge_trainable_set(self, owned: set[int], trainable: dict[str, nn.Parameter]) -> None:
        t = self.trainable
        t["after"] = sum(p.numel() for p in trainable.values())
        t["in_optimizer"] = sum(p.numel() for p in self.model.parameters() if id(p) in owned)
        unfrozen = sorted(trainable.keys() - self._before.keys())
        froze = sorted(self._before.keys() - trainable.keys())
        if unfrozen or froze:
            self._fail(
                "preparation changed which parameters train",
                where=f"now trainable: {_some(unfrozen)}; no longer: {_some(froze)}",
                why="a frozen base that trains, or weights that stopped, is not the run asked for",
                fix="freeze before building the trainer, and do not touch requires_grad afterwards",
            )
        missing = [name for name, p in trainable.items() if id(p) not in owned]
        if missing:
            self._fail(
                "trainable parameters are not in the optimizer",
                where=_some(missing),
                why="they get gradients that nothing applies, and would never train",
                fix="build the optimizer from model.parameters() after adapters are attached, and "
                "pass model and optimizer together to accelerator.prepare",
            )

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
        trainable = named_trainable(self.model)
        if not self._prints or not self._concerns(owned, trainable) or not self._lr_above_zero:
            return
        self._effective_steps += 1
        self.count_moved(optimizer)
        if self._effective_steps >= EFFECTIVE_STEPS:
            self._judge_movement(optimizer, trainable)
            self.status = "proven"
            if self._witness is not None:  # gradients came by another way: torch.autograd.grad
                self._judge_gemms(self._witness)
                self.status = "proven in forward; no call of backward() was seen"
            self.close()

    def count_moved(self, optimizer: Optimizer) -> dict[str, bool]:
        """Which trainable parameters differ from what they were before the first step."""
        trainable = named_trainable(self.model)
        moved = {name: fingerprint(p) != self._prints.get(name) for name, p in trainable.items()}
        if dist.is_initialized() and dist.get_world_size() > 1:  # a shard may stand still alone
            device = next(iter(trainable.values())).device if trainable else torch.device("cpu")
            flags = torch.tensor([float(m) for m in moved.values()], device=device)
            dist.all_reduce(flags, op=dist.ReduceOp.MAX)
            moved = {name: bool(f) for name, f in zip(moved, flags.tolist(), strict=True)}
        self.trainable["moved"] = sum(trainable[name].numel() for name, m in moved.items() if m)
        return moved

    def _judge_movement(self, optimizer: Optimizer, trainable: dict[str, nn.Parameter]) -> None:
        still = [name for name, moved in self.count_moved(optimizer).items() if not moved]
        rounded = [n for n in still if _updated_below_resolution(trainable[n], optimizer)]
        self.trainable["below_resolution"] = sum(trainable[n].numel() for n in rounded)
        dead = [name for name in still if name not in rounded]
        if dead:
            self._fail(
                f"{len(dead)} trainable parameters do not train",
                where=_some(dead),
                why=f"their bits are unchanged after {EFFECTIVE_STEPS} optimizer steps with a "
                "learning rate above zero",
                fix="check that they take part in the loss; freeze them if they are not meant to",
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


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:6]) or "none"
    return shown + (f" and {len(names) - 6} more" if len(names) > 6 else "")


def _updated_below_resolution(parameter: Tensor, optimizer: Optimizer) -> bool:
    """A 16-bit weight that the optimizer stepped (it has statistics), but by less than it holds."""
    if parameter.dtype not in (torch.bfloat16, torch.float16):
        return False
    state = optimizer.state.get(parameter, {})
    return any(
        isinstance(v, Tensor) and v.dim() > 0 and bool((getattr(v, "_local_tensor", v) != 0).any())
        for v in state.values()
    )
