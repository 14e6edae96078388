"""Weights held as FP8: one byte a number, and the scales that undo the cast.

A weight that does not train needs no master copy. Held as E4M3 codes it takes half of BF16, and
every use of it starts from the same codes: dequantised before a 16-bit matmul (this module), or
multiplied as they are (`finetune.precision.backends.frozen`). What shares a scale is in
`finetune.precision.weights`; `weight ≈ codes · weight_scale`, as published files call it (elsewhere
here it is an *inverse*).

The codes are held as **uint8**, not as `torch.float8_e4m3fn`: FSDP2's mixed precision, PEFT's
casts of adapters to the type of their base, `model.to(dtype)` and collectives leave integers alone,
and an integer cannot be made to require a gradient. State dicts and files show the real type.

As with FP8 compute, a module keeps its identity and changes class. Unlike there, its weight does
change: the high-precision one is gone, and nothing brings it back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from finetune.errors import StorageNotComputeError
from finetune.precision.formats import (
    E4M3,
    amax,
    block_amax,
    decode_bits,
    join,
    scale_from_amax,
    split,
    times_blocks,
    widen,
)
from finetune.precision.layers import is_conv1d
from finetune.precision.swap import Swapped, swap


class DequantisedLinear(torch.autograd.Function):
    """`y = x Wᵀ` in high precision, W dequantised anew for each GEMM: no copy of it is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bits: Tensor, inverse: Tensor, tile: Tile) -> Tensor:
        """x [M, K], bits [N, K] -> [M, N] in the type of `x`."""
        ctx.save_for_backward(bits, inverse)
        ctx.tile = tile
        return x @ dequantise_weight(bits, inverse, tile, x.dtype).t()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor):
        """g [M, N] -> dx [M, K]."""
        bits, inverse = ctx.saved_tensors
        return g @ dequantise_weight(bits, inverse, ctx.tile, g.dtype), None, None, None


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
    """In front of a linear layer's own class: the weight is FP8 codes, dequantised to be used.

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
        w = self.dequantise()
        return w.t() if self.transposed_weight else w

    def dequantise(self, dtype: torch.dtype | None = None) -> Tensor:
        """The weight [N, K] in `dtype`, else in the type of the model."""
        return dequantise_weight(
            self.bits, self.weight_scale, self.stored_tile, dtype or self.compute_dtype
        )

    def forward(self, input: Tensor) -> Tensor:
        kind = input.device.type
        autocast = torch.is_autocast_enabled(kind)
        dtype = torch.get_autocast_dtype(kind) if autocast else input.dtype
        rows = input.reshape(-1, input.shape[-1]).to(dtype)
        y = DequantisedLinear.apply(rows, self.bits, self.weight_scale, self.stored_tile)
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
def hold(module: nn.Module, granularity: Granularity = "row") -> None:
    """Quantise the weight of a linear layer in place. Its high-precision weight is dropped.

    Args:
        module: a linear layer (`finetune.precision.layers`), also on the meta device.
        granularity: what shares a scale.
    """
    weight: Any = module.weight
    w = weight.t() if is_conv1d(type(module)) else weight
    tile = tile_of(granularity, tuple(w.shape))
    bits, inverse = quantise_weight(w, tile)
    put(module, bits, inverse, tile, weight.dtype)


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


# ------------------------------------------------------------------------------------------
# Codes of a weight, and the scales that its tiles share.
#
#     row     (1, K)       one scale per output channel, [N, 1]
#     tensor  (N, K)       one scale, [1, 1]
#     block   (128, 128)   as DeepSeek-V3 and Qwen publish, [ceil(N/128), ceil(K/128)]
#
# Of a weight [N, K], under current amax. Codes are bit patterns of E4M3 in uint8.


Granularity = Literal["row", "tensor", "block"]
Tile = tuple[int, int]
BLOCK = 128
SLAB = {"cpu": 2**16}
"""Numbers that are quantised at a time. On a heap larger temporaries come to lie between codes, and
leave holes as large as these; a GPU's allocator does not mind, and its kernels want more."""
SLAB_ELSEWHERE = 2**24


def tile_of(granularity: Granularity, shape: tuple[int, int]) -> Tile:
    """The tile of a weight [N, K] that shares a scale."""
    n, k = shape
    return {"row": (1, k), "tensor": (n, k), "block": (BLOCK, BLOCK)}[granularity]


def serves(tile: Tile, shape: tuple[int, int], granularity: Granularity) -> bool:
    """Whether codes stored with this tile can be used at a granularity, or are to be cast again.

    One scale per tensor is one per row, all equal; no other can stand for another.
    """
    wanted = tile_of(granularity, shape)
    return tile == wanted or (granularity == "row" and tile == tile_of("tensor", shape))


def quantise_weight(w: Tensor, tile: Tile) -> tuple[Tensor, Tensor]:
    """E4M3 codes of a weight under the largest scale that saturates nothing.

    Some rows at a time: the float32 products of a whole weight would take four times its codes.

    Args:
        w: [N, K], floating point.
        tile: what shares a scale.

    Returns:
        bits, uint8 [N, K]; inverse scales, float32, one for each tile [ceil(N/r), ceil(K/c)]. A
        tile with NaN or infinity has a NaN or infinite inverse, which nothing hides.
    """
    n, k = w.shape
    rows, bits = (
        slab_rows((n, k), w.device, tile),
        torch.empty(n, k, dtype=torch.uint8, device=w.device),
    )
    return bits, quantise_slabs(lambda: w.split(rows), bits, tile)


def slab_rows(shape: tuple[int, int], device: torch.device, *tiles: Tile) -> int:
    """How many rows of a weight [N, K] are worked on at a time: whole tiles, or whole rows."""
    n, k = shape
    whole = math.lcm(*(tile[0] for tile in tiles if tile != shape))
    slab = SLAB.get(device.type, SLAB_ELSEWHERE)
    return min(max(slab // k // whole, 1) * whole, n)


def quantise_slabs(slabs: Callable[[], Iterable[Tensor]], bits: Tensor, tile: Tile) -> Tensor:
    """`quantise_weight` of a weight that comes some rows at a time.

    Args:
        slabs: gives the rows in order, `slab_rows` at a time; called twice for a scale of all.
        bits: uint8 [N, K]; is written.
        tile: what shares a scale.

    Returns:
        Inverse scales, float32, one for each tile.
    """
    shape, inverses, row = tuple(bits.shape), [], 0
    scale = None
    if tile == shape:
        top = torch.stack([amax(slab) for slab in slabs()]).amax()
        scale = scale_from_amax(top, E4M3)
        inverses.append(scale.reciprocal().reshape(1, 1))
    for slab in slabs():
        if scale is not None:
            codes = slab.float() * scale
        elif tile == (1, shape[1]):
            own = scale_from_amax(amax(slab, 1), E4M3)
            codes = slab * own
            inverses.append(own.reciprocal())
        else:
            tiles = split(slab.float(), tile)
            own = scale_from_amax(block_amax(tiles), E4M3)
            codes = join(tiles * widen(own), slab)
            inverses.append(own.reciprocal())
        bits[row : row + len(slab)] = codes.to(E4M3.dtype).view(torch.uint8)
        row += len(slab)
    return torch.cat(inverses)


def dequantise_weight(
    bits: Tensor, inverse: Tensor, tile: Tile, dtype: torch.dtype = torch.float32
) -> Tensor:
    """The weight that codes stand for: their product in float32, rounded once to `dtype`.

    Args:
        bits: uint8 [N, K].
        inverse: float32, one for each tile.
        tile: what shares a scale.
        dtype: of the result [N, K].
    """
    values = decode_bits(bits).float()
    if inverse.shape[1] == 1 and inverse.shape[0] in (1, values.shape[0]):
        return values.mul_(inverse).to(dtype)
    return times_blocks(values, inverse, tile).to(dtype)
