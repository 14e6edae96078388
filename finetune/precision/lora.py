"""A frozen layer and its low-rank adapter in one autograd function.

    y = x Wᵀ + s · (x Aᵀ) Bᵀ

As PEFT runs it, that is two small linear layers, two casts of float32 masters, a product by s and a
sum, each with a kernel, a result and a node of its own. Here the adapter is added by `addmm` into
the result of the base, and its input gradient into that of the base; with t = s · x Aᵀ and
u = s · g B, both [M, r]:

    y  = x Wᵀ + t Bᵀ          dB = gᵀ t
    dx = g W + u A            dA = uᵀ x

dA needs x, which in LoRA is most of what a layer keeps for backward. Where the base multiplies in
FP8, the codes that fprop made of x can be kept instead, at half the bytes: x̂ = codes · scale, with
its scale folded into u. Siblings fed the same tensor keep the same codes.

Adapters are float32 masters (or what the user made them), computed in the type of autocast, and
never in FP8 at any rank. PEFT's module, names and files stay as they are; only the class of its
layer changes, and only in training does it go this way. Dropout, several active adapters, DoRA and
other variants, and biases of adapters go PEFT's way, with the same base.

Hooks on the base layer run as ever, around base and adapter; those on `lora_A` and `lora_B`
themselves are not called, since nobody calls these modules.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from finetune.precision.backends.base import Fp8Mixin, compute_dtype
from finetune.precision.backends.frozen import Arithmetic, FrozenMixin, dgrad, fprop, operand
from finetune.precision.forced import ForcedMixin
from finetune.precision.formats import decode_bits
from finetune.precision.layers import is_conv1d, linear_shape
from finetune.precision.swap import Swapped
from finetune.precision.weights import StoredMixin, refuse_merge


class Listener(Protocol):
    """Is told whose GEMM runs inside the fused function."""

    def enter(self, name: str, shape: tuple[int, int], backward: bool = False) -> None:
        """A GEMM of the layer of this name and shape (N, K) begins."""
        ...

    def leave(self) -> None:
        """It has ended."""
        ...


class Adapter(NamedTuple):
    """What a base layer needs to know of its adapter.

    Attributes:
        a, b: the masters [r, K] and [N, r].
        scaling: s.
        names: of the modules that hold them.
        listeners: who is told, usually nobody.
    """

    a: Tensor
    b: Tensor
    scaling: float
    names: tuple[str, str]
    listeners: list[Listener]


def _of(
    adapter: tuple[list[Listener], tuple[str, str]],
    which: int,
    weight: Tensor,
    backward: bool,
    product: Callable[..., Tensor],
    *args: Any,
) -> Tensor:
    """A product of one adapter matrix; listeners, if any, are told whose."""
    listeners, names = adapter
    if not listeners:
        return product(*args)
    for listener in listeners:
        listener.enter(names[which], (weight.shape[0], weight.shape[1]), backward)
    try:
        return product(*args)
    finally:
        for listener in listeners:
            listener.leave()


class AdaptedLinear(torch.autograd.Function):
    """A frozen base and its adapter: six GEMMs, or eight where x needs a gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        values: Tensor | None,
        x_inverse: Tensor | None,
        kept: Tensor | None,
        w: Tensor,
        w_inverse: Tensor | None,
        a: Tensor,
        b: Tensor,
        scaling: float,
        how: Arithmetic | None,
        told: tuple[list[Listener], tuple[str, str]],
    ) -> Tensor:
        """x [M, K] -> y [M, N] in the type of `x`.

        Args:
            ctx: autograd's.
            x: the input.
            values, x_inverse: its cast, where the base multiplies in FP8.
            kept: the codes of `x` in one byte each, to be kept in its place; None keeps `x`.
            w, w_inverse: the weight [N, K]: codes and scales, or a plain matrix and None.
            a, b: masters of the adapter, [r, K] and [N, r].
            scaling: s.
            how: arithmetic of the base, None for a plain matmul.
            told: listeners, and the names of the two matrices.
        """
        if how is None:
            y = x @ w.t().to(x.dtype)
        else:
            assert w_inverse is not None
            y = fprop(x, operand(values, x_inverse), w, w_inverse, how)
        t = _of(told, 0, a, False, torch.mm, x, a.t().to(x.dtype)).mul_(scaling)
        y = _of(told, 1, b, False, y.addmm_, t, b.t().to(x.dtype))
        saved = (x, None) if kept is None else (kept, x_inverse)
        saved = saved if ctx.needs_input_grad[6] else (None, None)
        ctx.save_for_backward(*saved, t, w, w_inverse, a, b)
        ctx.scaling, ctx.how, ctx.told = scaling, how, told
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor):
        """g [M, N] -> dx [M, K], da [r, K], db [N, r]."""
        x, x_inverse, t, w, w_inverse, a, b = ctx.saved_tensors
        how, told = ctx.how, ctx.told
        dx = da = db = None
        needs_x, needs_a, needs_b = (ctx.needs_input_grad[i] for i in (0, 6, 7))
        if needs_x:
            plain = how is None
            dx = g @ w.to(g.dtype) if plain else dgrad(g, w, w_inverse, how)
        if needs_x or needs_a:
            u = _of(told, 1, b, True, torch.mm, g, b.to(g.dtype)).mul_(ctx.scaling)
            if dx is not None:
                dx = _of(told, 0, a, True, dx.addmm_, u, a.to(g.dtype))
            if needs_a:
                if x_inverse is not None:  # codes: their scales go into u
                    x, u = decode_bits(x.view(torch.uint8)).to(g.dtype), u * x_inverse
                da = _of(told, 0, a, True, torch.mm, u.t().to(g.dtype), x.to(g.dtype)).to(a.dtype)
        if needs_b:
            db = _of(told, 1, b, True, torch.mm, g.t(), t.to(g.dtype)).to(b.dtype)
        return dx, None, None, None, None, None, da, db, None, None, None


class AdaptedMixin(Swapped):
    """In front of a frozen base layer's class: it can be called with its adapter."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def forward(self, input: Tensor, adapter: Adapter | None = None) -> Tensor:
        if adapter is None:
            return super().forward(input)
        dtype = compute_dtype(input)
        rows = input.reshape(-1, input.shape[-1]).to(dtype)
        values = x_inverse = kept = inverse = how = None
        w: Tensor = self.weight.t() if self.transposed_weight else self.weight
        if isinstance(self, StoredMixin):
            inverse = self.weight_scale
            how = Arithmetic(self.stored_tile, high=frozenset({"fprop", "dgrad"}))
        if isinstance(self, FrozenMixin):
            how = self.fp8_how
            if "fprop" not in how.high:
                values, x_inverse, kept = self.fp8_backend.cast_and_keep(input, how, dtype)
        told = adapter.listeners, adapter.names
        y = AdaptedLinear.apply(
            *(rows, values, x_inverse, kept, w, inverse),
            *(adapter.a, adapter.b, adapter.scaling, how, told),
        )
        y = y if self.bias is None else y + self.bias.to(dtype)
        return y.reshape(*input.shape[:-1], y.shape[-1])


# A compiled layer must not depend on its name: each decoder layer would be a graph of its own, and
# those past `torch._dynamo.config.recompile_limit` none.
_UNHEARD = ("", "")


class FusedMixin(Swapped):
    """In front of PEFT's LoRA layer: in training its adapter goes into the call of the base.

    Attributes:
        fp8_name: dotted name of this module.
        fp8_listeners: who is told of the adapter's GEMMs.
    """

    fp8_name: str
    fp8_listeners: list[Listener]
    base_layer: nn.Module

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        this: Any = self
        active = [name for name in this.active_adapters if name in this.lora_A]
        if args or kwargs or not this.training or why_not_fused(this, active):
            return self.plain_class.forward(this, x, *args, **kwargs)
        (name,) = active
        names = _UNHEARD
        if self.fp8_listeners:
            names = f"{self.fp8_name}.lora_A.{name}", f"{self.fp8_name}.lora_B.{name}"
        return self.base_layer(
            x,
            Adapter(
                this.lora_A[name].weight,
                this.lora_B[name].weight,
                float(this.scaling[name]),
                names,
                self.fp8_listeners,
            ),
        )

    def merge(self, *args: Any, **kwargs: Any) -> None:
        if isinstance(self.base_layer, StoredMixin):
            raise refuse_merge(self.fp8_name)
        self.plain_class.merge(self, *args, **kwargs)


def why_not_fused(layer: Any, active: list[str]) -> str:
    """Why PEFT's own forward is to run, empty where the fused function can.

    Args:
        layer: PEFT's LoRA layer.
        active: names of its active adapters.
    """
    if not isinstance(layer.base_layer, AdaptedMixin):  # switched off for a while
        return "the base layer is not its own"
    if layer.base_layer.weight.requires_grad:
        return "the base trains"
    if layer.disable_adapters or layer.merged:
        return "adapters are disabled or merged"
    if len(active) != 1:
        return f"{len(active)} active adapters"
    (name,) = active
    if name in layer.lora_variant:
        return type(layer.lora_variant[name]).__name__
    if getattr(layer.lora_dropout[name], "p", 0.0):
        return "dropout"
    return "adapter with a bias" if layer.lora_bias[name] else ""


def fused_adapters(layers: Iterable[Any]) -> str:
    """How many of PEFT's layers run with their base in one function, and why others do not.

    Args:
        layers: those whose class was changed.
    """
    reasons = Counter(
        why_not_fused(layer, [name for name in layer.active_adapters if name in layer.lora_A])
        for layer in layers
    )
    if not reasons:
        return ""
    left = [f"{count} as PEFT has them: {why}" for why, count in reasons.items() if why]
    return "; ".join([f"{reasons['']} of {reasons.total()} in one function with their base", *left])


def iter_fusable(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Name and module of each of PEFT's LoRA layers whose base this module can multiply."""
    peft = sys.modules.get("peft.tuners.lora.layer")
    for name, module in model.named_modules() if peft is not None else ():
        if type(module) is not peft.Linear:  # pyright: ignore[reportOptionalMemberAccess]
            continue
        base: Any = module.base_layer
        cls: Any = type(base)
        plain = linear_shape(base) is not None and _plain_forward(cls)
        frozen = plain and not base.weight.requires_grad
        ours = issubclass(cls, FrozenMixin) or cls.forward is StoredMixin.forward
        if (ours or frozen) and "forward" not in base.__dict__:
            yield name, module


def _plain_forward(cls: type[nn.Module]) -> bool:
    own = getattr(cls, "forward", None)
    return own is nn.Linear.forward or (is_conv1d(cls) and not issubclass(cls, _OTHERS))


_OTHERS = (Fp8Mixin, ForcedMixin, StoredMixin)
