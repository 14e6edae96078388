"""Movement: every trainable parameter is in an optimizer and changes in the first steps.

A step counts if the learning rate is above zero and some gradient of the model is not zero: where
the loss has none (equal rewards in a group, say) nothing can move. By the second step that counts
the bits of every trainable parameter must have changed (LoRA's A has no gradient until B has
moved). One that has not is

    below resolution   the optimizer has statistics of its gradient: reported
    dead               it had gradients in two steps, of zeros: an error
    idle               it had none, its layer has not run: an error after `IDLE_STEPS`
    waiting            PEFT's rows of added tokens, none of which has been in a batch: said
    cancelled          a bias with gradients of zeros, beside a weight that has moved: said

Weight decay alone is no movement: bits that change beside gradients of zeros, and statistics of
zeros, are the optimizer's and not the loss's. A layer that runs in some steps only (a branch, an
expert) is allowed, whenever it rests. A bias
is cancelled where the loss compares outputs of one model: in that of a reward model, a function of
score(chosen) - score(rejected), the bias of the last norm occurs with both signs.
Of sharded tensors this process's shard is read.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Set
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from finetune.errors import some
from finetune.precision.backends.base import in_backward
from finetune.precision.formats import matrix_hash
from finetune.precision.planner import LayerPlan

EFFECTIVE_STEPS = 2
IDLE_STEPS = 8
"""Steps that count, within which every trainable parameter must have had a gradient."""
STILL = "weights have not been seen to move"
ZEROS = "all gradients were zero"


class Movement:
    """Judges the first steps of a model's optimizers.

    Attributes:
        is_done: True once every trainable parameter has moved, or its gradient was too small to.
        missing: what has not been seen yet.
        counts: `Receipt.trainable`, kept current.
    """

    def __init__(
        self,
        model: nn.Module,
        counts: dict[str, int],
        fail: Callable[..., None],
        optimizers: Collection[Optimizer] = (),
    ) -> None:
        """Begin.

        Args:
            model: the model whose parameters train.
            counts: counts to fill in.
            fail: raises an error of what, where, why and fix.
            optimizers: those that will step, at some time: a generator's, say, after five steps of
                its critic's.
        """
        self.model, self.counts, self._fail = model, counts, fail
        self.is_done, self.missing, self._optimizers = False, STILL, optimizers
        self._prints: dict[str, int] = {}
        self._moved: set[str] = set()
        self._owned: set[int] = set()
        self._switched_off: set[int] = set()
        self._steps: Counter[int] = Counter()  # that count, of each optimizer
        self._with_gradient: Counter[str] = Counter()  # steps, of each parameter
        self._driven: set[str] = set()  # have had a gradient that is not zeros
        self._zeros: set[str] = set()  # have had one of zeros
        self._state_bytes: dict[int, int] = {}
        self._said = self._without_gradient = False

    def before_step(
        self, optimizer: Optimizer, trainable: dict[str, nn.Parameter], idle: Set[int] = frozenset()
    ) -> None:
        """Take fingerprints and look at gradients, before the weights change.

        Args:
            optimizer: what will step.
            trainable: name -> parameter of all that trains.
            idle: ids of parameters whose layers had no tokens: zeros are no gradient of theirs.
        """
        groups = optimizer.param_groups
        owned = {id(p): group.get("lr", 1.0) for group in groups for p in group["params"]}
        self._owned |= owned.keys()
        off = {key for key, lr in owned.items() if not lr > 0}
        self._switched_off = (self._switched_off - owned.keys()) | off
        for name, p in trainable.items():
            if name not in self._prints:
                self._prints[name] = fingerprint(p)
        mine = {name: p for name, p in trainable.items() if id(p) in owned}
        with_gradient = {
            name: p.grad for name, p in mine.items() if p.grad is not None and id(p) not in idle
        }
        rising = len(off) < len(owned)
        for name, gradient in with_gradient.items():
            if name not in self._driven:
                (self._driven if is_nonzero(gradient) else self._zeros).add(name)
        counts = rising and any(map(is_nonzero, with_gradient.values()))  # the first one tells
        if _maximum([[counts]], self._device)[0][0]:
            self._steps[id(optimizer)] += 1
            self._with_gradient.update(with_gradient.keys())
        else:
            self._without_gradient |= rising
        if not self._steps:
            self.missing = STILL + (f"; {ZEROS}" if rising else "")
        elif self.missing.startswith(STILL):
            self.missing = STILL
        # A gradient without an optimizer counts, too: nothing would ever apply it.
        groups = [group for one in list(self._optimizers) for group in one.param_groups]
        known = {id(p) for group in groups for p in group["params"]} | owned.keys()
        left = {name: p for name, p in trainable.items() if id(p) not in known}
        self._with_gradient.update(name for name, p in left.items() if p.grad is not None)

    def after_step(self, optimizer: Optimizer, trainable: dict[str, nn.Parameter]) -> None:
        """Judge what has moved; raises through `fail`."""
        self.counts["in_optimizer"] = sum(
            p.numel() for p in self.model.parameters() if id(p) in self._owned
        )
        self._state_bytes[id(optimizer)] = stored_bytes(optimizer)
        self.counts["optimizer_state_bytes"] = sum(self._state_bytes.values())
        left = [n for n in trainable if n not in self._moved]
        rounded, graded = self._look(optimizer, left, trainable)
        self.counts["moved"] = sum(trainable[n].numel() for n in self._moved & trainable.keys())
        done = max(self._steps.values(), default=0)
        if done == 1:
            self.missing = f"one optimizer step was seen, and it takes {EFFECTIVE_STEPS}"
            if self._without_gradient:
                self.missing += f"; in the others {ZEROS}"
        if done >= EFFECTIVE_STEPS:  # by now all optimizers have stepped
            self._judge_optimizers(trainable, graded)
            self._judge_movement(trainable, rounded, graded, done)

    def _look(
        self, optimizer: Optimizer, left: list[str], trainable: dict[str, nn.Parameter]
    ) -> tuple[set[str], set[str]]:
        """Note what of `left` has moved; names of updated parameters, and of those with gradients.

        Of all processes together: a shard may stand still alone.
        """
        flags: list[list[bool]] = []
        for name in left:
            p = trainable[name]
            moved = fingerprint(p) != self._prints.get(name)
            if moved and name in self._zeros - self._driven:  # by weight decay?
                moved = was_updated(p, optimizer)
            updated = not moved and was_updated(p, optimizer)
            flags.append([moved, updated, self._with_gradient[name] >= EFFECTIVE_STEPS])
        rounded, graded = set[str](), set[str]()
        together = _maximum(flags, self._device)
        for name, (moved, updated, has_gradients) in zip(left, together, strict=True):
            if moved:
                self._moved.add(name)
            elif updated:
                rounded.add(name)
            if has_gradients:
                graded.add(name)
        return rounded, graded

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device

    def _judge_optimizers(self, trainable: dict[str, nn.Parameter], graded: set[str]) -> None:
        missing = [n for n, p in trainable.items() if id(p) not in self._owned and n in graded]
        if missing:
            self._fail(
                "trainable parameters are not in the optimizer",
                where=some(missing),
                why="they get gradients that nothing applies, and would never train",
                fix="build the optimizer from model.parameters() after adapters are attached, and "
                "pass model and optimizer together to accelerator.prepare",
            )

    def _judge_movement(
        self, trainable: dict[str, nn.Parameter], rounded: set[str], graded: set[str], steps: int
    ) -> None:
        still = [n for n in trainable if n not in self._moved]
        still = [n for n in still if id(trainable[n]) not in self._switched_off]
        self.counts["below_resolution"] = sum(trainable[n].numel() for n in still if n in rounded)
        left = [name for name in still if name not in rounded]
        rows = _chosen_rows(self.model) if left else set[int]()
        waiting = [name for name in left if id(trainable[name]) in rows]
        left = [name for name in left if name not in waiting]
        dead = [name for name in left if name in graded]
        if cancelled := [n for n in dead if f"{n.removesuffix('.bias')}.weight" in self._moved]:
            warnings.warn(
                f"{len(cancelled)} biases stand still ({some(cancelled, 3)}): their gradients are "
                "zeros throughout, though their layers train. A loss of differences cancels them, "
                "as a reward model's does; if yours does not, look at how it uses these layers",
                stacklevel=2,
            )
        left, dead = ([n for n in names if n not in cancelled] for names in (left, dead))
        if dead:
            self._fail(
                f"{len(dead)} trainable parameters do not train",
                where=some(dead),
                why=f"the gradients of all of them are zeros throughout, and but for weight decay "
                f"they are unchanged after {EFFECTIVE_STEPS} optimizer steps with a learning rate "
                "above zero",
                fix="check that they take part in the loss; freeze them if they are not meant to; "
                "gradients of zeros alone can be an underflow: a few tokens with gradients far "
                "above the rest take the scale (padding that is attended to?), and the same step "
                "in BF16 tells",
            )
        if left and steps >= IDLE_STEPS:
            self._fail(
                f"{len(left)} trainable parameters do not train",
                where=some(left),
                why=f"no gradient reached them in {steps} optimizer steps: their layers did not "
                "run, or their outputs are not part of the loss",
                fix="freeze them (requires_grad_(False)) before the model is prepared if they are "
                "not meant to train",
            )
        self.is_done = not left and not waiting
        count = len(left) + len(waiting)
        self.missing = f"no gradient has reached {count} trainable parameters yet"
        if count and not self._said:
            self._said = True
            why = (
                f"their layers have not run. The run stops after {IDLE_STEPS} steps without any; "
                "freeze them if they are not meant to train"
                if left
                else "none of their tokens has been in a batch. They train once one is"
            )
            warnings.warn(f"{self.missing} ({some(left or waiting, 3)}): {why}", stacklevel=2)


def _chosen_rows(model: nn.Module) -> set[int]:
    """Ids of PEFT's rows of single tokens (`trainable_token_indices`).

    Their layer runs in each step; the gradient is zeros where a batch has none of the tokens.
    """
    layers = [m for m in model.modules() if type(m).__name__ == "TrainableTokensLayer"]
    return {id(p) for layer in layers for p in layer.parameters()}


def changes_nothing(optimizer: Optimizer) -> bool:
    """True for a step by which torch makes an optimizer's state before it loads one into it.

    `torch.distributed.checkpoint` (torch 2.13, `_init_optim_state`) steps with gradients of zeros
    and a learning rate of zero, as Accelerate does when a run under FSDP2 goes on.
    """
    groups = optimizer.param_groups
    gradients = [p.grad for group in groups for p in group["params"] if p.grad is not None]
    rates = [float(group.get("lr", 1.0)) for group in groups]
    return not any(rates) and not any(map(is_nonzero, gradients))


def has_new_gradient(model: nn.Module, layer: LayerPlan, before: Set[int]) -> bool:
    """True if the weight of this layer alone has a gradient; ids `before` had one before."""
    name = f"{layer.name}.weight" if layer.kind == "linear" else layer.name
    named = list(model.named_parameters(remove_duplicate=False))
    weight = dict(named).get(name)
    if weight is None or id(weight) in before or not is_nonzero(weight.grad):
        return False
    return sum(p is weight for _, p in named) == 1


def is_nonzero(gradient: Tensor | None) -> bool:
    """True if there is a gradient, and it is not all zeros in this process."""
    return gradient is not None and bool((local_part(gradient) != 0).any())


def _maximum(flags: list[list[bool]], device: torch.device) -> list[list[bool]]:
    """True where any process has True; an optimizer that steps inside a backward decides alone."""
    if not dist.is_initialized() or dist.get_world_size() == 1 or in_backward():
        return flags
    reduced = torch.tensor(flags, dtype=torch.float32, device=device)
    dist.all_reduce(reduced, op=dist.ReduceOp.MAX)
    return [[bool(flag) for flag in row] for row in reduced.tolist()]


# ------------------------------------------------------------- bits and the optimizer's statistics


def fingerprint(parameter: Tensor) -> int:
    """A hash of a parameter's bits, at the cost of one pass over them (`formats.matrix_hash`).

    Position counts: a plain xor or sum would miss the same change made to an even number of equal
    weights, as a norm's ones are.
    """
    local = local_part(parameter).detach()
    if not local.numel():  # an empty shard
        return 0
    return int(matrix_hash(local.reshape(-1, local.shape[-1] if local.dim() else 1)))


def was_updated(parameter: Tensor, optimizer: Optimizer) -> bool:
    """True if a parameter has a gradient or optimizer statistics other than 0."""
    tensors = [*evidence(optimizer.state.get(parameter, {}))]
    if parameter.grad is not None:
        tensors.append(local_part(parameter.grad))
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
            yield key, local_part(value)


def local_part(value: Tensor) -> Any:
    """This process's part of a tensor."""
    return getattr(value, "_local_tensor", value)
