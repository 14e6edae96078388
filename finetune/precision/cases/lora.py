"""A frozen layer and its low-rank adapter in one autograd function.

    y = x Wᵀ + s · (x Aᵀ) Bᵀ

As PEFT runs it, that is two small linear layers, two casts of float32 masters, a product by s and a
sum, each with a kernel, a result and a node of its own. Here the adapter is added by `addmm` into
the result of the base, and its input gradient into the base's; with t = s · x Aᵀ and
u = s · g B, both [M, r]:

    y  = x Wᵀ + t Bᵀ          dB = gᵀ t
    dx = g W + u A            dA = uᵀ x

dA needs x, which in LoRA is most of what a layer keeps for backward. Where the base multiplies in
FP8, the codes that fprop made of x can be kept instead, at half the bytes: x̂ = codes · inverse,
with the inverse folded into u. Siblings fed the same tensor keep the same codes.

Adapters are float32 masters (or of the user's type), computed in the type of autocast and never in
FP8 at any rank.
PEFT's module, names and files do not change; only the class of its layer does, and only training
is fused. Dropout, several active adapters, DoRA and other variants, and biases of adapters run in
PEFT's own forward, with the same base.

Hooks on the base layer run around base and adapter; those on `lora_A` and `lora_B` are not called,
as these modules are not.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from finetune.precision import constants
from finetune.precision.cases.case import Site, Swap
from finetune.precision.engines.observers import ObservedMixin, Owner, multiplying
from finetune.precision.model.layers import is_conv1d, linear_shape
from finetune.precision.model.swap import Swapped, weight_matrix
from finetune.precision.numbers.formats import decode_bits
from finetune.precision.numbers.gemm import as_output, as_rows, compute_dtype, mm
from finetune.precision.numbers.weights import Arithmetic, dequantizing, dgrad, fprop
from finetune.precision.stored.codes import refuse_merge
from finetune.precision.stored.frozen import FrozenMixin
from finetune.precision.stored.linear import StoredMixin


class Adapter(NamedTuple):
    """Masters [r, K] and [N, r] of an adapter, its s, and their names for observers of GEMMs.

    Those of an adapter on a stack of E experts are [r·E, K] and [N, r·E].
    """

    a: Tensor
    b: Tensor
    scaling: float
    owners: tuple[Owner, Owner]


class AdaptedLinear(torch.autograd.Function):
    """A frozen base and its adapter: six GEMMs, or eight where x needs a gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        x_codes: Tensor | None,
        x_inverse: Tensor | None,
        kept: Tensor | None,
        w: Tensor,
        w_inverse: Tensor | None,
        a: Tensor,
        b: Tensor,
        s: float,
        how: Arithmetic | None,
        owners: tuple[Owner, Owner],
    ) -> Tensor:
        """x [M, K] -> y [M, N] in the type of `x`.

        Args:
            x_codes, x_inverse: cast of x, if the base multiplies in FP8.
            kept: codes of `x` to save instead of it; None saves `x`.
            w, w_inverse: weight [N, K]: codes and inverse scales, or a plain matrix and None.
            a, b: masters of the adapter, [r, K] and [N, r].
            how: arithmetic of the base, None for a plain matmul.
        """
        low_a, low_b = a.to(x.dtype), b.to(x.dtype)
        if how is None:
            y = x @ w.t().to(x.dtype)  # [M, K] @ [K, N]
        else:
            assert w_inverse is not None
            y = fprop(x, (x_codes, x_inverse), w, w_inverse, how)  # [M, K] @ [K, N]
        with multiplying(owners[0], a):
            t = times(x, low_a.t(), s, low_b[0])  # [M, K] @ [K, r]
        with multiplying(owners[1], b):
            # Not in place in a graph, where it saves nothing: torch 2.11 (`weights.of_type`).
            add = y.addmm if torch.compiler.is_compiling() else y.addmm_
            y = add(t, low_b.t())  # [M, r] @ [r, N]
        saved = (x, None) if kept is None else (kept, x_inverse)
        saved = saved if ctx.needs_input_grad[6] else (None, None)  # 6: a. Only dA needs x
        ctx.save_for_backward(*saved, t, w, w_inverse, a, b)
        ctx.s, ctx.how, ctx.owners = s, how, owners
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor):
        """g [M, N] -> dx [M, K], da [r, K], db [N, r]."""
        x, x_inverse, t, w, w_inverse, a, b = ctx.saved_tensors
        low_a, low_b, dtype = a.to(g.dtype), b.to(g.dtype), g.dtype
        of_a, of_b = ctx.owners
        needs_x, needs_a, needs_b = (ctx.needs_input_grad[i] for i in (0, 6, 7))  # x, a, b
        dx = da = db = None
        u: Any = None
        if needs_x:
            plain = ctx.how is None
            dx = g @ w.to(dtype) if plain else dgrad(g, w, w_inverse, ctx.how)  # [M, N] @ [N, K]
        if needs_x or needs_a:
            with multiplying(of_b, b, backward=True):
                u = times(g, low_b, ctx.s, low_b[0])  # [M, N] @ [N, r]
        with multiplying(of_a, a, backward=True):
            if dx is not None:
                # Before `u` takes the inverse of x, which is for dA alone.
                dx = dx.addmm_(u, low_a)  # [M, r] @ [r, K]
            if needs_a:
                if x_inverse is not None:  # x̂ = codes · inverse: the inverse goes into u
                    x, u = decode_bits(x.view(torch.uint8)), u * x_inverse
                da = mm(u.to(dtype).t(), x.to(dtype), a.dtype)  # [r, M] @ [M, K]
        if needs_b:
            with multiplying(of_b, b, backward=True):
                db = mm(g.t(), t.to(dtype), b.dtype)  # [N, M] @ [M, r]
        nones = (None,) * (len(ctx.needs_input_grad) - 8)
        return dx, None, None, None, None, None, da, db, *nones


def times(x: Tensor, w: Tensor, s: float, unread: Tensor) -> Tensor:
    """`s · (x w)`, the factor applied by the GEMM: [M, K] @ [K, N].

    Args:
        unread: any vector [N] in place of a summand, which beta=0 leaves out. Inductor would fill
            an empty one by a kernel.
    """
    return torch.addmm(unread, x, w, beta=0, alpha=s)


class AdaptedMixin(Swapped):
    """Mixin of a frozen base layer that can be called with its adapter."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def forward(self, input: Tensor, adapter: Adapter | None = None) -> Tensor:
        if adapter is None:
            return super().forward(input)
        x_codes = x_inverse = kept = inverse = how = None
        w, (a, b, s, owners) = weight_matrix(self), adapter
        if isinstance(self, StoredMixin):
            inverse, how = self.weight_scale, dequantizing(self.stored_tile)
        if isinstance(self, FrozenMixin) and input.numel():  # no tokens have no scale
            self.fp8_calls.count(input)
            how = self.fp8_how
            if "fprop" not in how.high:
                dtype = compute_dtype(input)
                x_codes, x_inverse, kept = self.fp8_engine.cast_and_keep(input, how, dtype)
                # On FP8 units these are `x_codes` themselves, and Dynamo (torch 2.10 to 2.13)
                # refuses a function that takes one tensor twice: as bytes they are another.
                kept = None if kept is None else kept.view(torch.uint8)

        cast = x_codes, x_inverse, kept
        y = AdaptedLinear.apply(as_rows(input), *cast, w, inverse, a, b, s, how, owners)
        return as_output(y, input, self.bias)


class FusedMixin(ObservedMixin):
    """Mixin of PEFT's LoRA layer: in training its adapter is passed to the base."""

    keeps_name = False
    base_layer: nn.Module

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        this: Any = self
        # An expert without tokens has no scale.
        if args or kwargs or not this.training or not x.numel() or why_not_fused(this):
            return self.plain_class.forward(this, x, *args, **kwargs)
        (name,) = active_names(this)
        # Without observers a compiled layer must not depend on its name: each decoder layer would
        # be a graph of its own, and those past `torch._dynamo.config.recompile_limit` none.
        a_name = b_name = ""
        if self.fp8_observers:
            a_name, b_name = (f"{self.fp8_name}.lora_{which}.{name}" for which in "AB")
        owners = Owner(a_name, self.fp8_observers), Owner(b_name, self.fp8_observers)
        return self.base_layer(x, Adapter(*active(this), float(this.scaling[name]), owners))

    def merge(self, *args: Any, **kwargs: Any) -> None:
        if isinstance(self.base_layer, StoredMixin):
            raise refuse_merge(self.fp8_name)
        self.plain_class.merge(self, *args, **kwargs)


def active_names(layer: Any) -> list[str]:
    """Names of the active adapters of one of PEFT's layers."""
    return [name for name in layer.active_adapters if name in layer.lora_A]


def active(layer: Any) -> tuple[Tensor, Tensor]:
    """Masters A and B of the active adapter."""
    (name,) = active_names(layer)
    return layer.lora_A[name].weight, layer.lora_B[name].weight


def why_not_fused(layer: Any) -> str:
    """The reason why PEFT's own forward runs, or "" if the fused function can."""
    active = active_names(layer)
    if not isinstance(layer.base_layer, AdaptedMixin):  # `disabled` for a while
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
    if isinstance(layer.scaling[name], Tensor):  # to be read, it would break a graph
        return "scaling in a tensor, to be swapped"
    return "adapter with a bias" if layer.lora_bias[name] else ""


def fused_adapters(layers: Iterable[Any]) -> str:
    """Number of PEFT's layers fused with their base, and the reasons of the others."""
    reasons = Counter(why_not_fused(layer) for layer in layers)
    if not reasons:
        return ""
    left = [f"{count} as PEFT has them: {why}" for why, count in reasons.items() if why]
    return "; ".join([f"{reasons['']} of {reasons.total()} fused with their base layer", *left])


def iter_fusable(modules: dict[str, nn.Module]) -> Iterator[tuple[str, Any]]:
    """Name and module of each of PEFT's LoRA layers whose base `AdaptedLinear` can multiply."""
    peft = sys.modules.get("peft.tuners.lora.layer")
    for name, module in modules.items() if peft is not None else ():
        # Exactly this class: those over bitsandbytes and other storage have forwards of their own.
        if type(module) is not peft.Linear:  # pyright: ignore[reportOptionalMemberAccess]
            continue
        base: Any = module.base_layer
        cls: Any = type(base)
        plain = linear_shape(base) is not None and _plain_forward(cls)
        frozen = plain and not base.weight.requires_grad
        ours = issubclass(cls, FrozenMixin) or cls.forward is StoredMixin.forward
        # X-LoRA gives PEFT's layers forwards of their own.
        if (ours or frozen) and not {"forward"} & (base.__dict__.keys() | module.__dict__.keys()):
            yield name, module


def fused_layers(site: Site) -> Iterator[Swap]:
    """Layers of PEFT's LoRA, and their bases, which one function multiplies."""
    # All are found before a class changes: `iter_fusable` looks at classes.
    found = list(iter_fusable(site.modules)) if constants.FUSED_ADAPTERS else []
    for name, module in found:
        yield Swap(module.base_layer, AdaptedMixin, {})
        yield Swap(module, FusedMixin, {"fp8_name": name, "fp8_observers": []})


def _plain_forward(cls: type[nn.Module]) -> bool:
    return cls.forward is nn.Linear.forward or (is_conv1d(cls) and not issubclass(cls, Swapped))
