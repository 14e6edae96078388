"""Experts that Transformers holds in one parameter: stored as FP8 codes, adapters split off.

A mixture of experts keeps each of its two stacks of matrices, [experts, N, K], in one parameter
([experts, K, N] in gpt-oss). Frozen, it is stored like the weight of a linear layer
(`finetune.precision.numbers.weights`): uint8 codes in the parameter's shape, with one scale per
expert and output channel. Tokens come sorted by expert, x [S, K], and both GEMMs start from the
codes:

    fprop   y  = x̂_e · q_eᵀ       for each expert e with tokens
    dgrad   dx = ĝ_e · q_e

It is a loop over the experts, after one synchronization.

The forward is that of `transformers.integrations.moe.grouped_mm_experts_forward` (5.23), whose
routing, gates, biases and norms it keeps; the weights follow autocast, which `grouped_mm` by itself
does not. Not served: expert parallelism (FSDP2 shards the codes).

Adapters on experts are PEFT's `ParamWrapper`, which computes W + s·BA for all experts, [E, N, K],
in each forward, and its dense gradient in backward. Split, they are

    t = x · A_eᵀ                  [S, r], grouped
    y = base(x) + s · t · B_eᵀ    [S, N], grouped

which is the same sum without a tensor of W's size, and leaves the base as it is stored. PEFT's
modules, parameters and files do not change. Both classes stay in copies, like storage.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from finetune.precision import constants
from finetune.precision.cases.case import Site, Swap
from finetune.precision.cases.lora import Adapter
from finetune.precision.cases.parameters import fp8_matmul, group_sizes, grouped_mm
from finetune.precision.engines.observers import (
    CallCount,
    ObservedMixin,
    Observer,
    Owner,
    multiplying,
)
from finetune.precision.model.layers import (
    are_batched_experts,
    are_served_experts,
    declared_matmuls,
)
from finetune.precision.model.plan import LayerPlan
from finetune.precision.model.swap import Swapped, swap
from finetune.precision.numbers.formats import E4M3
from finetune.precision.numbers.gemm import compute_dtype
from finetune.precision.numbers.weights import (
    Arithmetic,
    Granularity,
    Tile,
    check_stack,
    dequantize_weight,
    dequantizing,
    dgrad,
    fprop,
    quantize_weight,
    tile_of,
)
from finetune.precision.stored.codes import Fp8Bits, refuse_merge
from finetune.precision.stored.frozen import FrozenEngine
from finetune.precision.stored.linear import CodesMixin, scale_of


class Routing(NamedTuple):
    """Rows of tokens sorted by expert.

    Attributes:
        order: position of each sorted row among the rows as routed, [S].
        token: token of each sorted row, [S].
        expert: expert of each sorted row, [S].
        ends: end of each expert's rows, int32 [E].
        sizes: number of rows of each expert; empty where no stack is stored, which needs none.
    """

    order: Tensor
    token: Tensor
    expert: Tensor
    ends: Tensor
    sizes: list[int]


class FrozenExperts(torch.autograd.Function):
    """`y = x W_eᵀ` for rows sorted by expert, of stored codes; nothing else is kept."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        x_codes: Tensor | None,
        x_inverse: Tensor | None,
        bits: Tensor,
        inverse: Tensor,
        route: Routing,
        how: Arithmetic,
        owner: Owner,
    ) -> Tensor:
        """x [S, K], its cast (None if high), bits [E, N, K], inverse [E, N, 1] -> [S, N]."""
        ctx.save_for_backward(bits, inverse)
        ctx.sizes, ctx.how, ctx.owner = route.sizes, how, owner
        y = x.new_empty(x.shape[0], bits.shape[1])
        with multiplying(owner, bits[0]):  # bits[0]: observers want [N, K]
            for e, rows in _parts(route.sizes):
                xq = _rows(x_codes, rows), _rows(x_inverse, rows)
                y[rows] = fprop(x[rows], xq, bits[e], inverse[e], how)  # [M, K] @ [K, N]
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor):
        """g [S, N] -> dx [S, K]."""
        bits, inverse = ctx.saved_tensors
        dx = g.new_empty(g.shape[0], bits.shape[2])
        with multiplying(ctx.owner, bits[0], backward=True):
            for e, rows in _parts(ctx.sizes):
                dx[rows] = dgrad(g[rows], bits[e], inverse[e], ctx.how)  # [M, N] @ [N, K]
        return dx, None, None, None, None, None, None, None


def _parts(sizes: list[int]) -> Iterator[tuple[int, slice]]:
    """Number and rows of each expert that has tokens."""
    start = 0
    for e, size in enumerate(sizes):
        if size:
            yield e, slice(start, start + size)
        start += size


def _rows(x: Tensor | None, rows: slice) -> Any:
    return x if x is None or x.numel() == 1 else x[rows]  # one scale serves all rows


# ------------------------------------------------------------------------------------ the module


def stored_names(module: nn.Module) -> list[str]:
    """Names of the parameters of a module that are stacks of FP8 codes."""
    own = module._parameters
    return [n for n in declared_matmuls(module) if getattr(own[n], "dtype", None) is torch.uint8]


class ExpertsMixin(CodesMixin):
    """Mixin of decorated experts: stored stacks are dequantized for use, adapters are split."""

    keeps_name = True
    has_gate: bool
    has_bias: bool
    has_post_expert_norm: bool
    is_transposed: bool
    num_experts: int

    def code_names(self) -> list[str]:
        return stored_names(self)

    def forward(
        self,
        hidden_states: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        adapters: Mapping[str, tuple[Adapter, ...]] | None = None,
    ) -> Tensor:
        """Tokens [T, H], their experts and weights [T, top] -> [T, H]."""
        this, adapters = self, adapters or {}
        tokens = hidden_states.to(compute_dtype(hidden_states))
        route = self._route(top_k_index)
        up = "gate_up_proj" if self.has_gate else "up_proj"
        y = self._project(up, tokens, route, adapters.get(up, ()), route.token)
        y = this._apply_gate(y) if self.has_gate else this.act_fn(y)  # pyright: ignore
        y = self._project("down_proj", y, route, adapters.get("down_proj", ()))
        y = this.post_expert_norm(y) if self.has_post_expert_norm else y  # pyright: ignore
        y = y * top_k_weights.reshape(-1)[route.order].unsqueeze(-1)
        # The inverse permutation: sorted rows go back to where routing had them.
        back = torch.empty_like(route.order)
        back[route.order] = torch.arange(len(back), device=back.device)
        y = y[back].view(*top_k_index.shape, -1).sum(dim=1)  # [T, top, H] -> [T, H]
        return y.to(hidden_states.dtype)

    def _route(self, top_k_index: Tensor) -> Routing:
        expert, order = torch.sort(top_k_index.reshape(-1))
        # By comparison: `histc` and `bincount` have no common type on CPUs and GPUs.
        numbers = torch.arange(self.num_experts, device=expert.device)
        # right: the number of rows whose expert is at most e
        ends = torch.searchsorted(expert, numbers, right=True).int()
        sizes = group_sizes(ends, len(expert)) if self._arithmetic() else []
        # Rows as routed go by token, `top` of them for each: row i is of token i // top.
        return Routing(order, order // top_k_index.shape[-1], expert, ends, sizes)

    def _arithmetic(self) -> dict[str, Arithmetic]:
        """Arithmetic of the GEMMs of each stored stack."""
        found = {}
        for name in stored_names(self):
            _, n, k = self.bits_of(name).shape
            one = self.get_buffer(scale_of(name)).shape[1] == 1
            found[name] = dequantizing((n, k) if one else (1, k))
        return found

    def _cast(self, x: Tensor, how: Arithmetic) -> tuple[Tensor, Tensor]:
        raise AssertionError("codes are dequantized outside of FP8 runs")

    def _owner(self, name: str) -> Owner:
        return Owner(name, [])

    def bits_of(self, name: str) -> Tensor:
        """The codes of a stored stack as bits [E, N, K]."""
        w: Any = self._parameters[name]
        return w.mT if self.is_transposed else w

    def _project(
        self,
        name: str,
        x: Tensor,
        route: Routing,
        adapters: tuple[Adapter, ...],
        token: Tensor | None = None,
    ) -> Tensor:
        """Rows, or rows `token` of the tokens, times this stack, with its bias and adapters."""
        how = self._arithmetic().get(name)
        x_codes = x_inverse = None
        if how is not None and "fprop" not in how.high:
            # Cast once per token, before it is repeated for each of its experts.
            x_codes, x_inverse = self._cast(x, how)
            if token is not None:
                x_codes, x_inverse = _take(x_codes, token), _take(x_inverse, token)
        x = x if token is None else x[token]
        if how is not None:
            bits, inverse = self.bits_of(name), self.get_buffer(scale_of(name))
            owner = self._owner(name)
            y = FrozenExperts.apply(x, x_codes, x_inverse, bits, inverse, route, how, owner)
        else:
            w = getattr(self, name)
            # In FP8 where it is planned so (`ParameterMixin`). w: [E, K, N]
            y = fp8_matmul(x, w if self.is_transposed else w.mT, route.ends)
        for adapter in adapters:
            y = y + _low_rank(x, adapter, route)  # x, not its cast: never FP8
        bias = getattr(self, f"{name}_bias") if self.has_bias else None
        return y if bias is None else y + bias[route.expert].to(y.dtype)  # bias [E, N]


class PlainExpertsMixin(ExpertsMixin):
    """The same of plain weights: in FP8, or following autocast, as `grouped_mm` does not let them.

    So experts multiply in one way, whatever implementation of Transformers' is configured.
    """

    in_copies = False


class BatchedExpertsMixin(Swapped):
    """Mixin of Llama 4's experts (Transformers 5.23), to which tokens come in equal shares."""

    keeps_name = True

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Tokens [E·T, H], grouped by expert -> [E·T, H]."""
        this: Any = self
        x = hidden_states.view(this.num_experts, -1, this.hidden_size)  # [E, T, H]
        gate, up = fp8_matmul(x, this.gate_up_proj).chunk(2, dim=-1)
        return fp8_matmul(up * this.act_fn(gate), this.down_proj).view(-1, this.hidden_size)


def cast_experts(modules: Iterable[nn.Module]) -> Iterator[Any]:
    """Experts with float32 weights that Transformers would multiply past autocast."""
    for module in modules:
        if not are_served_experts(module) or isinstance(module, ExpertsMixin):
            continue
        own = [module._parameters[name] for name in declared_matmuls(module)]
        wide = any(p is not None and p.dtype is torch.float32 for p in own)
        config: Any = module.config
        # Eager and `batched_mm` experts multiply by F.linear and bmm, which autocast covers.
        if wide and config._experts_implementation == "grouped_mm":
            yield module


def _take(x: Tensor, rows: Tensor) -> Tensor:
    """Rows of a cast; one scale for all stays. As bytes, since FP8 types have no index kernels."""
    if x.numel() == 1:
        return x
    return x.view(torch.uint8)[rows].view(x.dtype) if x.dtype is E4M3.dtype else x[rows]


def _low_rank(x: Tensor, adapter: Adapter, route: Routing) -> Tensor:
    """`s · x A_eᵀ B_eᵀ` of rows sorted by expert: [S, K] -> [S, N]."""
    experts, (of_a, of_b) = len(route.ends), adapter.owners
    a = adapter.a.to(x.dtype).reshape(experts, -1, adapter.a.shape[1])  # [E, r, K]
    # PEFT lays A out with experts outermost, and B with experts innermost.
    b = adapter.b.to(x.dtype).reshape(adapter.b.shape[0], -1, experts)  # [N, r, E]
    b = b.permute(2, 1, 0)  # [E, r, N]
    if odd := -a.shape[1] % 8:  # grouped products want rows of 16 bytes, as t [S, r] has them
        a, b = F.pad(a, (0, 0, 0, odd)), F.pad(b, (0, 0, 0, odd))
    b = b.contiguous()
    with multiplying(of_a, a[0]):
        t = grouped_mm(x, a.mT, route.ends) * adapter.scaling  # [S, K] @ [K, r]
    with multiplying(of_b, b[0].t()):
        y = grouped_mm(t, b, route.ends)  # [S, r] @ [r, N]
    for owner, result, given, w in ((of_a, t, x, a), (of_b, y, t, b)):
        for observer in owner.observers:
            observer.watch(owner.name, (w.shape[1], w.shape[2]), result, (given, w))
    return y


class ConvertedExpertsMixin(ObservedMixin):
    """Mixin of experts in a converted model: named, observed, and in FP8 where stored."""

    multiplies = True
    fp8_frozen: FrozenEngine | None
    fp8_how: dict[str, Arithmetic]
    fp8_calls_by_weight: dict[str, CallCount]

    def calls_of(self, layer: LayerPlan) -> CallCount:
        return self.fp8_calls_by_weight[layer.local]

    def _project(self, name: str, x: Tensor, *args: Any) -> Tensor:
        y = super()._project(name, x, *args)  # pyright: ignore[reportAttributeAccessIssue]
        if name in self.fp8_calls_by_weight and self.fp8_frozen is not None and y.numel():
            calls = self.fp8_calls_by_weight[name]  # of rows [S, N]
            calls.count(y) if self.fp8_frozen.runs_low(self) else calls.watch(y, y)
        return y

    def _arithmetic(self) -> dict[str, Arithmetic]:
        engine = self.fp8_frozen
        if engine is None or not engine.runs_low(self):
            return super()._arithmetic()  # pyright: ignore[reportAttributeAccessIssue]
        return self.fp8_how

    def _cast(self, x: Tensor, how: Arithmetic) -> tuple[Tensor, Tensor]:
        assert self.fp8_frozen is not None
        return self.fp8_frozen.cast(x, how, x.dtype)

    def _owner(self, name: str) -> Owner:
        return Owner(f"{self.fp8_name}.{name}", self.fp8_observers)


# ---------------------------------------------------------------------------------- split adapters


class SplitMixin(Swapped):
    """Mixin of PEFT's `ParamWrapper` around served experts: hands its factors on to them."""

    in_copies = True
    keeps_name = True
    base_layer: Any
    parameter_name: str
    fp8_name = ""
    fp8_observers: ClassVar[list[Observer]] = []

    def forward(self, x: Tensor, *args: Any, adapters: Any = None, **kwargs: Any) -> Tensor:
        this: Any = self
        if this.disable_adapters and this.merged:
            this.unmerge()
        own: tuple[Adapter, ...] = ()
        if not this.disable_adapters and not this.merged:
            own = tuple(self._adapter(n) for n in this.active_adapters if n in this.lora_A)
        # Wrappers of one module's parameters are nested: each adds its own and passes the rest on.
        given = {**(adapters or {}), self.parameter_name: own}
        return self.base_layer(x, *args, adapters=given, **kwargs)

    def _adapter(self, name: str) -> Adapter:
        this: Any = self
        of_a, of_b = (
            Owner(f"{self.fp8_name}.lora_{which}.{name}", self.fp8_observers) for which in "AB"
        )
        a, b = this.lora_A[name].weight, this.lora_B[name].weight
        return Adapter(a, b, float(this.scaling[name]), (of_a, of_b))

    def merge(self, *args: Any, **kwargs: Any) -> None:
        this: Any = self
        if self.parameter_name in stored_names(this.get_base_layer()):
            raise refuse_merge(self.parameter_name)
        super().merge(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]


def split_adapters(modules: Iterable[nn.Module]) -> None:
    """Let the adapters on served experts be multiplied apart from the base, from now on."""
    wrappers: list[Any] = [m for m in modules if type(m).__name__ == "ParamWrapper"]
    for wrapper in wrappers:
        experts = wrapper.get_base_layer()
        if are_served_experts(experts) and wrapper.parameter_name in declared_matmuls(experts):
            for module, mixin in ((experts, ExpertsMixin), (wrapper, SplitMixin)):
                if not isinstance(module, mixin):
                    swap(module, mixin)


def converted_experts(site: Site) -> Iterator[Swap]:
    """Store frozen experts, multiply the adapters on experts apart, and observe both."""
    modules = site.modules
    if constants.FUSED_ADAPTERS or site.frozen is not None:
        split_adapters(modules.values())
    stored: dict[str, dict[str, Arithmetic]] = {}
    for layer in site.plan.stored:
        if layer.kind == "parameter" and layer.stored and site.frozen is not None:
            owner: Any = modules[layer.owner]
            store_experts(owner, layer.local, layer.stored)
            tile = tile_of(layer.stored, owner.bits_of(layer.local).shape[1:])
            stored.setdefault(layer.owner, {})[layer.local] = site.frozen.how._replace(tile=tile)
    if site.plan.precision.compute != "fp32":
        in_fp8 = [modules[name] for name in site.plan.fp8_parameters]
        ours = [m for m in in_fp8 if are_served_experts(m) and not isinstance(m, ExpertsMixin)]
        ours += [m for m in cast_experts(modules.values()) if m not in in_fp8]
        yield from (Swap(module, PlainExpertsMixin, {}) for module in ours)
        batched = filter(are_batched_experts, in_fp8)
        yield from (Swap(module, BatchedExpertsMixin, {}) for module in batched)
    for name, module in modules.items():
        seen: dict[str, Any] = {"fp8_name": name, "fp8_observers": []}
        if isinstance(module, ExpertsMixin):
            how = stored.get(name, {})
            facts = {"fp8_how": how, "fp8_calls_by_weight": {local: CallCount() for local in how}}
            facts |= {"fp8_frozen": site.frozen}
            yield Swap(module, ConvertedExpertsMixin, seen | facts)
        elif isinstance(module, SplitMixin):
            yield Swap(module, ObservedMixin, seen)


# --------------------------------------------------------------------------------------- storage


@torch.no_grad()
def store_experts(module: Any, name: str, granularity: Granularity = "row") -> None:
    """Store one stack of a module of experts as FP8 codes, in place; also on the meta device."""
    if name in stored_names(module):
        return
    w = module._parameters[name]
    stack = w.mT if module.is_transposed else w  # [E, N, K]
    tile = tile_of(granularity, (stack.shape[1], stack.shape[2]))
    put_experts(module, name, *quantize_stack(stack, tile))


def quantize_stack(stack: Tensor, tile: Tile) -> tuple[Tensor, Tensor]:
    """Codes [E, N, K] of a stack, and inverse scales [E, N, 1] by row, [E, 1, 1] by matrix."""
    experts, n, k = stack.shape
    if tile == (1, k):
        # By row it is one weight [E·N, K].
        bits, inverse = quantize_weight(stack.reshape(-1, k), tile)
        return bits.view(experts, n, k), inverse.view(experts, n, 1)
    pairs = [quantize_weight(matrix, tile) for matrix in stack]
    return torch.stack([bits for bits, _ in pairs]), torch.stack([inverse for _, inverse in pairs])


def put_experts(module: Any, name: str, bits: Tensor, inverse: Tensor) -> None:
    """Replace a stack by codes [E, N, K] and inverse scales [E, N, 1], or [E, 1, 1]."""
    check_stack(name, bits, inverse)
    # In the shape that the module had, from which PEFT reads the sizes of adapters.
    module._parameters[name] = Fp8Bits(bits.mT if module.is_transposed else bits)
    module.register_buffer(scale_of(name), inverse)
    if not isinstance(module, ExpertsMixin):
        swap(module, ExpertsMixin)


@torch.no_grad()
def release_experts(model: nn.Module, dtype: torch.dtype) -> None:
    """Turn all stored stacks of a model into plain parameters with the dequantized weights."""
    stacks: list[Any] = [m for m in model.modules() if isinstance(m, ExpertsMixin)]
    for module in stacks:
        for name in stored_names(module):
            bits, inverse = module.bits_of(name), module.get_buffer(scale_of(name))
            # One expert after another: (1, K) also takes a single scale, [1, 1], which broadcasts.
            pairs, tile = zip(bits, inverse, strict=True), (1, bits.shape[2])
            w = torch.stack([dequantize_weight(q, scale, tile, dtype) for q, scale in pairs])
            w = w.mT.contiguous() if module.is_transposed else w
            delattr(module, scale_of(name))
            module._parameters[name] = nn.Parameter(w, requires_grad=False)
