"""Layers whose weight is stored in FP8: one byte a number, and the scales that undo the cast.

A weight that does not train needs no master copy. Stored as E4M3 codes it takes half of BF16, and
every use of it starts from the same codes: dequantized before a 16-bit matmul (this module), or
multiplied as they are (`finetune.precision.backends.frozen`). What shares a scale is in
`finetune.precision.weights`; `weight ≈ codes · weight_scale`, as published files call it (elsewhere
here it is an *inverse*).

The codes are **uint8**, not `torch.float8_e4m3fn`: FSDP2's mixed precision, PEFT's casts of
adapters to the type of their base, `model.to(dtype)` and collectives leave integers alone, and an
integer cannot be made to require a gradient. State dicts and files show the real type.

As with FP8 compute, a module keeps its identity and changes class. Unlike there, its weight does
change: the high-precision one is gone, and nothing brings it back. Plan and receipt tell how a
weight is stored from what the module holds (`stored_as`), not from what was asked: storage is
apart from compute.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from finetune.errors import StorageNotComputeError
from finetune.precision.formats import E4M3
from finetune.precision.layers import is_conv1d, iter_linears
from finetune.precision.swap import Swapped, swap, unswap
from finetune.precision.weights import (
    Granularity,
    Tile,
    dequantize_weight,
    quantize_slabs,
    quantize_weight,
    serves,
    slab_rows,
    tile_of,
)


class DequantizedLinear(torch.autograd.Function):
    """`y = x Wᵀ` in high precision, W dequantized anew for each GEMM: no copy of it is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bits: Tensor, inverse: Tensor, tile: Tile) -> Tensor:
        """x [M, K], bits [N, K] -> [M, N] in the type of `x`."""
        ctx.save_for_backward(bits, inverse)
        ctx.tile = tile
        return x @ dequantize_weight(bits, inverse, tile, x.dtype).t()  # [M, K] @ [K, N]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor):
        """g [M, N] -> dx [M, K]."""
        bits, inverse = ctx.saved_tensors
        dx = g @ dequantize_weight(bits, inverse, ctx.tile, g.dtype)  # [M, N] @ [N, K]
        return dx, None, None, None


class Fp8Bits(nn.Parameter):
    """A frozen parameter of bit patterns. Putting others in its place is an error, not garbage.

    PEFT's safe merge casts an adapter to the type of the weight, adds it, and assigns the sum to
    `weight.data`. (Its other merge adds in place, which torch refuses for integers.) A device move
    or a reload assigns the same bits.
    """

    def __new__(cls, data: Tensor, requires_grad: bool = False) -> Fp8Bits:
        return super().__new__(cls, data, requires_grad=requires_grad)

    def requires_grad_(self, requires_grad: bool = True) -> Fp8Bits:
        if requires_grad:
            raise refuse_training()
        return self

    moving = False
    """Its module is being moved, by which the bits stay what they are."""

    @property
    def data(self) -> Tensor:
        return Tensor.data.__get__(self)  # pyright: ignore[reportAttributeAccessIssue]

    @data.setter
    def data(self, new: Tensor) -> None:
        # Not by value: an adapter smaller than one is nothing at all in the type of the codes.
        elsewhere = self.moving or new.device != self.device
        same = elsewhere or new.data_ptr() == self.data_ptr()
        if new.dtype is not self.dtype or not same:
            raise refuse_merge()
        Tensor.data.__set__(self, new)  # pyright: ignore[reportAttributeAccessIssue]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Fp8Bits, (self.as_subclass(Tensor),)


def refuse_merge(where: str = "") -> StorageNotComputeError:
    """The error of merging an adapter into FP8 weights."""
    return StorageNotComputeError(
        "an adapter cannot be merged into weights held in FP8",
        where=where,
        why="one step of E4M3 is up to an eighth of a weight, far more than what LoRA changes it "
        "by: rounding would undo the training",
        fix="merge into the original weights: `python -m finetune export RUN --to merged OUT`, or "
        "load the base model plain and the adapter over it with peft, then merge_and_unload()",
    )


def refuse_training() -> StorageNotComputeError:
    """The error of training weights that are held in FP8."""
    return StorageNotComputeError(
        "weights stored in FP8 cannot be trained",
        where="a model of load_in_fp8, or a base with precision.frozen=fp8",
        why="codes are integers and have no gradient (only floating point has), and an update is "
        "far smaller than one step of E4M3",
        fix="to train all weights with FP8 compute, load the model plain and call "
        "setup_fp8_mixed_precision_training(); to train adapters, attach them with peft",
    )


class StoredMixin(Swapped):
    """In front of a linear layer's own class: the weight is FP8 codes, dequantized to be used.

    Attributes:
        weight: uint8, in the layout of the class in front of which this stands.
        weight_scale: float32 buffer, one for each tile of the weight taken as [N, K].
        stored_tile: what shares a scale.
        compute_dtype: type of the model; PEFT gives it to new adapters.
        stored_raw: state dicts hold bytes and no scales (see `before_sharding`).
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    weight_scale: Tensor
    stored_tile: Tile
    compute_dtype: torch.dtype
    stored_raw: bool = False
    in_copies = True

    @property
    def bits(self) -> Tensor:
        """The codes as [N, K], uint8."""
        return self.weight.t() if self.transposed_weight else self.weight

    @property
    def W_q(self) -> Tensor:  # noqa: N802
        """The codes under HQQ's name: PEFT (DoRA) asks who has one for `dequantize()`."""
        return self.bits

    def dequantize(self) -> Tensor:
        """The weight in the layout of the layer's class, in the type of the model."""
        w = self.weight_in()
        return w.t() if self.transposed_weight else w

    def weight_in(self, dtype: torch.dtype | None = None) -> Tensor:
        """The weight [N, K] in `dtype`, else in the type of the model."""
        return dequantize_weight(
            self.bits, self.weight_scale, self.stored_tile, dtype or self.compute_dtype
        )

    def forward(self, input: Tensor) -> Tensor:
        kind = input.device.type
        autocast = torch.is_autocast_enabled(kind)
        dtype = torch.get_autocast_dtype(kind) if autocast else input.dtype
        rows = input.reshape(-1, input.shape[-1]).to(dtype)
        y = DequantizedLinear.apply(rows, self.bits, self.weight_scale, self.stored_tile)
        y = y if self.bias is None else y + self.bias.to(dtype)
        return y.reshape(*input.shape[:-1], y.shape[-1])

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        before, bits = self.weight_scale, cast("Any", self.weight)
        bits.__dict__["moving"] = True  # where FSDP2 has put its own parameter, it says nothing
        try:
            result = super()._apply(fn, recurse)
        finally:
            bits.__dict__.pop("moving", None)
        if self.weight_scale.dtype is not torch.float32:  # model.to(dtype) is not about scales
            self.weight_scale = before.to(self.weight_scale.device)
        return result

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        bits = destination[prefix + "weight"]
        if not self.stored_raw:
            destination[prefix + "weight"] = bits.detach().view(E4M3.dtype)

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, meta: Any, strict: bool, missing: Any, *rest: Any
    ) -> None:
        given = state_dict.get(prefix + "weight")
        if given is not None and given.dtype is E4M3.dtype:
            state_dict[prefix + "weight"] = given.view(torch.uint8)
        elif given is not None and given.dtype is not torch.uint8:
            errors = rest[-1]
            errors.append(f"{prefix}weight holds FP8 codes, and {given.dtype} was given")
            return
        super()._load_from_state_dict(state_dict, prefix, meta, strict, missing, *rest)

    def extra_repr(self) -> str:
        rows, columns = self.stored_tile
        held = super().extra_repr()
        return f"{held}, held in {E4M3.name}, scale of {rows}x{columns}"


def put(module: nn.Module, bits: Tensor, inverse: Tensor, tile: Tile, dtype: torch.dtype) -> None:
    """Make a linear layer a stored one that holds these codes; its own weight is dropped.

    Args:
        module: a linear layer, also on the meta device.
        bits: uint8 [N, K].
        inverse: float32, one for each tile.
        tile: what shares a scale.
        dtype: type of the model.
    """
    bits = bits.t() if is_conv1d(type(module)) else bits
    module.weight = Fp8Bits(bits.contiguous())
    module.register_buffer("weight_scale", inverse)
    swap(module, StoredMixin, stored_tile=tile, compute_dtype=dtype)


@torch.no_grad()
def store(module: nn.Module, granularity: Granularity = "row") -> None:
    """Store the weight of a linear layer in FP8, in place, whatever it is stored in now.

    The high-precision weight is dropped. Codes that do not serve at the granularity are cast again,
    by way of the float32 weight of this one layer.

    Args:
        module: a linear layer (`finetune.precision.layers`), also on the meta device.
        granularity: what shares a scale.
    """
    weight: Any = module.weight
    if not isinstance(module, StoredMixin):
        w = weight.t() if is_conv1d(type(module)) else weight
        tile = tile_of(granularity, tuple(w.shape))
        put(module, *quantize_weight(w, tile), tile, weight.dtype)
        return
    n, k = module.bits.shape
    if not serves(module.stored_tile, (n, k), granularity):
        requantize(module, granularity)


@torch.no_grad()
def requantize(module: nn.Module, granularity: Granularity) -> None:
    """Give a stored layer scales of another granularity. Its weight changes by a rounding.

    A layer that has them already keeps its codes, and so does one with a single scale that gets
    one a row, all equal.

    Args:
        module: a stored layer.
        granularity: what shares a scale.
    """
    if not isinstance(module, StoredMixin):
        raise TypeError(f"{type(module).__name__} holds no FP8 codes")
    n, k = module.bits.shape
    tile = tile_of(granularity, (n, k))
    if module.stored_tile != tile:
        recast(module, tile)


def recast(module: StoredMixin, tile: Tile) -> None:
    """Give a stored layer scales of another tile: codes are multiplied out and cast again.

    In float32, some rows at a time. From one scale to one a row nothing has to be cast. The second
    rounding adds an error that stands beside that of the first. Both are of E4M3 and nearly
    independent, so that together they are about √2 of one, which
    `python -m tests.benchmarks.fp8_loading --errors` measures:

        ‖W - row(block(W))‖ ≈ (‖W - block(W)‖² + ‖W - row(W)‖²)^½

    Args:
        module: a stored layer.
        tile: what shall share a scale.
    """
    (n, k), held, inverse = module.bits.shape, module.stored_tile, module.weight_scale
    one = held == (n, k)
    if one and tile == (1, k):
        module.weight_scale, module.stored_tile = inverse.repeat(n, 1), tile
        return
    rows = slab_rows((n, k), module.bits.device, tile, held)

    def slabs() -> Iterator[Tensor]:
        for start in range(0, n, rows):
            stop = min(start + rows, n)
            above = slice(None) if one else slice(start // held[0], -(-stop // held[0]))
            part = (stop - start, k) if one else held
            yield dequantize_weight(module.bits[start:stop], inverse[above], part)

    bits = torch.empty_like(module.bits, memory_format=torch.contiguous_format)
    new = quantize_slabs(slabs, bits, tile)
    module.weight = Fp8Bits(bits.t().contiguous() if module.transposed_weight else bits)
    module.weight_scale, module.stored_tile = new, tile


@torch.no_grad()
def release(module: nn.Module, dtype: torch.dtype | None = None) -> None:
    """Make a stored layer a plain one, whose weight is what the codes stand for.

    Args:
        module: a stored layer.
        dtype: of the weight; left out: the type of the model.
    """
    if not isinstance(module, StoredMixin):
        raise TypeError(f"{type(module).__name__} holds no FP8 codes")
    dtype = dtype or module.compute_dtype
    w = module.weight_in(dtype)
    w = w.t().contiguous() if module.transposed_weight else w
    plain: Any = module
    unswap(module, to=module.plain_class.swapped_from)
    del plain.weight_scale
    plain.weight = torch.nn.Parameter(w, requires_grad=False)


def before_sharding(model: nn.Module) -> None:
    """Make stored layers what FSDP2 and accelerate can shard: bytes, with scales left to us.

    Accelerate moves weights by way of a state dict in which everything is sharded. Scales are not:
    they are small, and as parameters FSDP2's mixed precision would round them to BF16.
    """
    for _, module in iter_stored(model):
        module.__dict__["stored_raw"] = True
        module._non_persistent_buffers_set.add("weight_scale")
        if module.weight_scale.is_meta:  # another process has the weights
            module.weight_scale = torch.empty_like(module.weight_scale, device="cpu")


def share_scales(model: nn.Module) -> None:
    """Take the scales of the first process, where the codes were taken from it as well."""
    for _, module in iter_stored(model):
        dist.broadcast(module.weight_scale, src=0)


def iter_stored(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Name and module of each layer that holds its weight as FP8 codes."""
    for name, module in model.named_modules():
        if isinstance(module, StoredMixin):
            yield name, module


def stored_as(module: nn.Module) -> str:
    """`nf4` or `fp4` of bitsandbytes' layers, `fp8` of ours, empty for a plain weight."""
    if isinstance(module, StoredMixin):
        return "fp8"
    weight = module._parameters.get("weight")
    # By name, as Transformers and PEFT ask: bitsandbytes need not be installed.
    return weight.quant_type if type(weight).__name__ == "Params4bit" else ""  # pyright: ignore


def stored_weights(model: nn.Module) -> dict[str, int]:
    """How weights are stored that are not plain -> number of linear layers."""
    return dict(Counter(kind for _, m, _ in iter_linears(model) if (kind := stored_as(m))))
