"""Search for the first layer and tensor with NaN or Inf, by running one micro-batch under hooks.

Nonfinite numbers spread: one Inf in a layer makes the loss NaN, and with it every gradient. Only
the order of execution shows the origin.

* *Before anything*: a parameter or model input that is already nonfinite.
* *Forward*: modules end innermost first. The first nonfinite output comes from its module, unless
  the module's input was nonfinite: then from an operation between two modules, in the forward of
  the enclosing one.
* *The loss*: finite logits can have a nonfinite loss.
* *Backward*: every autograd node belongs to the innermost module whose forward made it. The first
  node that turns finite gradients into others made them: the gradient of its input, or of a weight.
  Nonfinite gradients that enter a node first are a sum of several finite ones.

Example: Inf in layer 3's `down_proj` output makes later layers and all gradients NaN; reported is
the forward of layer 3's `down_proj`.

Attention masks may contain -Inf and are not judged. Recomputed activations equal the first ones.
Operations inside a backend's kernels show at the edges of its module.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from finetune.precision.backends.base import in_backward
from finetune.precision.proof.movement import local_part

Kind = Literal["parameter", "input", "forward", "loss", "gradient", "sum"]
KINDS: tuple[Kind, ...] = ("parameter", "input", "forward", "loss", "gradient", "sum")
"""Kinds in order of execution; `sum` is a sum of finite gradients."""
BETWEEN = ("TBackward0", "TransposeBackward0", "ViewBackward0", "ToCopyBackward0")
"""Autograd nodes between a matmul and its weight."""


@dataclass(frozen=True)
class Finding:
    """First nonfinite tensor.

    Attributes:
        kind: its place in the order of execution.
        where: dotted name of the module or parameter.
        tensor: name of the tensor within it.
        counts: number of NaN, of Inf and of all values.
        fed: amax of each input operand.
    """

    kind: Kind
    where: str
    tensor: str
    counts: str
    fed: tuple[str, ...] = ()


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Return True if every element of every tensor is finite, with one read of each.

    NaN and Inf survive any sum, so a finite sum settles it. A nonfinite sum may be an overflow of
    large numbers: only then every element is tested. Of sharded tensors, this process's part is
    tested.
    """
    local = [local_part(t).detach() for t in tensors]
    local = [t.coalesce().values() if t.is_sparse else t for t in local]
    on_cpu = [t.sum(dtype=_SUM_IN.get(t.dtype)).float() for t in local if t.device.type == "cpu"]
    elsewhere = [t for t in local if t.device.type != "cpu" and t.numel()]
    sums = [torch.stack(on_cpu).sum()] if on_cpu else []
    if elsewhere:  # one fused kernel for all
        sums.append(torch.nn.utils.get_total_norm(elsewhere))
    return all(math.isfinite(s) for s in sums) or not any(_broken(t) for t in local)


_SUM_IN = {torch.float16: torch.float32}
"""Accumulation types: FP16 sums would overflow often. BF16 sums accumulate in float32 anyway."""


def check_parameters(model: nn.Module) -> Finding | None:
    """Return the first nonfinite parameter, if any."""
    for name, parameter in model.named_parameters():
        local = local_part(parameter).detach()
        if _broken(local):
            return Finding("parameter", name, "its values", _counts(local))
    return None


class Finder:
    """Hooks on every module and autograd node of one forward and backward; `found` is the first.

    Enter it around the micro-batch, and pass it the loss before its backward.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.found: Finding | None = None
        self._names = {module: name for name, module in model.named_modules()}
        self._parameters = {id(p): name for name, p in model.named_parameters()}
        self._stack: list[str] = []
        self._owned: set[Any] = set()
        self._handles: list[Any] = []

    def __enter__(self) -> Finder:
        for module in self._names:
            self._handles += [
                module.register_forward_pre_hook(self._before, with_kwargs=True),
                module.register_forward_hook(self._after, with_kwargs=True),
            ]
        return self

    def __exit__(self, *exc: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._owned.clear()

    # -------------------------------------------------------------------------------- forward

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        name = self._names[module]
        given = () if self.found or in_backward() else _inputs(module, args, kwargs)
        argument, value = next((item for item in given if _broken(item[1])), ("", None))
        if value is not None and not self._stack:
            self.found = Finding("input", _shown(name), argument, _counts(value))
        elif value is not None:
            tensor = f"the result of an operation of its forward, handed to {name} as {argument}"
            self.found = Finding("forward", _shown(self._stack[-1]), tensor, _counts(value))
        self._stack.append(name)

    def _after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        name = self._names[module]
        if self._stack:
            self._stack.pop()
        outputs = dict(_tensors("output", output))
        inputs = dict(_inputs(module, args, kwargs))
        if not self.found and not in_backward():
            broken = next((item for item in outputs.items() if _broken(item[1])), None)
            if broken is not None:
                after = ", after its own layers" if any(True for _ in module.children()) else ""
                fed = _fed(module, inputs)
                tensor = f"its {broken[0]}{after}"
                self.found = Finding("forward", _shown(name), tensor, _counts(broken[1]), fed)
        self._own_nodes(name, outputs.values(), inputs.values())

    # ------------------------------------------------------------------------------- backward

    def see_loss(self, loss: Tensor) -> None:
        """Judge the loss, and hook the nodes between it and the model."""
        if not self.found and _broken(loss.detach()):
            self.found = Finding("loss", "the loss", "its value", _counts(loss.detach()))
        self._own_nodes("the loss", [loss], [])

    def _own_nodes(self, name: str, outputs: Iterable[Tensor], inputs: Iterable[Tensor]) -> None:
        """Hook the autograd nodes between outputs and inputs that no inner module owns."""
        visited = {x.grad_fn for x in inputs} | {None}
        pending = [y.grad_fn for y in outputs]
        while pending:
            node = pending.pop()
            if node in visited or node is None:
                continue
            visited.add(node)
            following = [n for n, _ in node.next_functions]
            pending.extend(following)
            if node not in self._owned and type(node).__name__ != "AccumulateGrad":
                self._owned.add(node)
                weights = [self._weight_of(n) for n in following]
                hook = partial(self._node_ran, _shown(name), node.name(), weights)
                self._handles.append(node.register_hook(hook))

    def _weight_of(self, node: Any) -> str:
        """Parameter that a gradient belongs to, also through its transpose or cast."""
        while node is not None and node.name() in BETWEEN:
            node = node.next_functions[0][0]
        variable = getattr(node, "variable", None)  # only AccumulateGrad nodes have one
        return "" if variable is None else self._parameters.get(id(variable), "a weight")

    def _node_ran(
        self, name: str, operator: str, weights: list[str], grad_inputs: Any, grad_outputs: Any
    ) -> None:
        if self.found:
            return
        made = [i for i, g in enumerate(grad_inputs) if isinstance(g, Tensor) and _broken(g)]
        if not made:
            return
        given = [g for g in grad_outputs if isinstance(g, Tensor)]
        broken = next((g for g in given if _broken(g)), None)
        if broken is not None:
            tensor = "the gradient of its output, as it arrives (a hook, or a sum of gradients)"
            self.found = Finding("gradient", name, f"{tensor}, at {operator}", _counts(broken))
            return
        weight = weights[made[0]] if made[0] < len(weights) else ""
        tensor = f"the gradient of {weight}" if weight else "the gradient of its input"
        fed = tuple(f"gradient of its output: amax {_amax(g):.3g}" for g in given)
        counts = _counts(grad_inputs[made[0]])
        self.found = Finding("gradient", name, f"{tensor}, made by {operator}", counts, fed)

    def see_gradients(self) -> None:
        """Check after the backward for nonfinite sums of finite gradients."""
        for name, parameter in self.model.named_parameters():
            if self.found or parameter.grad is None:
                continue
            grad = local_part(parameter.grad)
            if _broken(grad):
                tensor = "its gradient, summed over micro-batches or processes"
                self.found = Finding("sum", name, tensor, _counts(grad))


def _shown(name: str) -> str:
    return name or "the model itself"


def _broken(x: Tensor) -> bool:
    judged = x.is_floating_point() and x.dtype.itemsize >= 2 and x.numel() > 0
    return judged and not bool(x.detach().isfinite().all())


def _counts(x: Tensor) -> str:
    nan, inf = int(x.isnan().sum()), int(x.isinf().sum())
    kind = str(x.dtype).removeprefix("torch.")
    return f"{nan:,} NaN and {inf:,} Inf of {x.numel():,} values ({kind} {list(x.shape)})"


def _amax(x: Tensor) -> float:
    finite = x.detach()[x.detach().isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def _fed(module: nn.Module, inputs: dict[str, Tensor]) -> tuple[str, ...]:
    values = {k: v for k, v in inputs.items() if v.is_floating_point()}
    values |= {k: local_part(p) for k, p in module.named_parameters(recurse=False)}
    return tuple(f"{name}: amax {_amax(value):.3g}" for name, value in values.items())


def _inputs(module: nn.Module, args: Any, kwargs: Any) -> Iterator[tuple[str, Tensor]]:
    """Floating-point inputs of a module by argument name, without masks."""
    bound = inspect.signature(module.forward).bind_partial(*args, **kwargs)
    for name, value in bound.arguments.items():
        if "mask" not in name:
            for path, tensor in _tensors(name, value):
                if "mask" not in path:
                    yield path, tensor


def _tensors(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """Floating-point tensors inside tuples, lists and dictionaries, each with a name."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield name, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _tensors(f"{name}.{key}", item)
    elif isinstance(value, (tuple, list)):
        for index, item in enumerate(value):
            yield from _tensors(f"{name}[{index}]", item)
