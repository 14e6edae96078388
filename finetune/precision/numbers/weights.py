"""Codes of a weight [N, K], the scales that its tiles share, and the GEMMs by them.

    row     (1, K)       one scale per output channel, [N, 1]
    tensor  (N, K)       one scale, [1, 1]
    block   (128, 128)   as DeepSeek-V3 and Qwen publish, [ceil(N/128), ceil(K/128)]

Codes are stored as E4M3 bits in uint8 (why is in `finetune.precision.stored.linear`). A weight that
does not train needs `y = x Wᵀ` and the input gradient `dx = g W`, and neither a weight gradient nor
a cast per step, so both GEMMs start from the same codes q, w ≈ diag(s) · q with inverse scales s:

    fprop   y  = (x̂ · qᵀ) scaled by s_x[m] · s[n]         x cast per token
    dgrad   dx = (ĝ · q)  scaled by s_g[m]                 g · diag(s) cast per token

dgrad contracts the output channels, along which the scales differ, and FP8 GEMMs take no scale
along the contracted dimension. Folding the scales into the gradient before it is cast is exact
algebra, and leaves the same codes to serve both GEMMs. Gradients are E4M3 as well: a scale per
token covers their range, and E5M2 would cost a digit. (With one scale per tensor there is nothing
to fold.) Scales follow the current amax: delayed ones would stand still in a module that does not
train. A GEMM that stays in high precision starts from the dequantized weight.

A weight that trains may be held so, too, its master elsewhere (`stored/trained.py`): it has a
`wgrad` besides, and gradients in the format of the recipe.

On FP8 GPUs `torch._scaled_mm` multiplies; elsewhere the emulated GEMM does, from the same codes,
and differs in its sums (`engines/emulated.py`). The former takes FP8 only with the contracted
dimension innermost in both operands: Hopper and Ada have no other GEMM, and torch (2.13) refuses
other layouts when it compiles for a later GPU, too. So dgrad transposes the codes into a scratch of
one layer.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from finetune.errors import ConfigError
from finetune.precision.facts import Gemm, Granularity
from finetune.precision.numbers.formats import E4M3, Format, amax, decode_bits, scale_from_amax
from finetune.precision.numbers.gemm import Quantized, scaled_mm, torch_scaled_mm
from finetune.precision.numbers.kernels import cast_rows, transpose_codes
from finetune.precision.numbers.scaling import cast_current, scaled
from finetune.precision.numbers.tiles import block_amax, join, split, times_blocks, widen

GRANULARITIES: tuple[Granularity, ...] = ("row", "tensor", "block")
Tile = tuple[int, int]
BLOCK = 128
SLAB = {"cpu": 2**16}
"""Numbers quantized at a time. Larger temporaries fragment a CPU's heap between the codes; a GPU's
allocator is not affected, and its kernels want more.
"""
SLAB_ELSEWHERE = 2**24
INNER_MULTIPLE = 16
"""`torch._scaled_mm` takes an inner dimension that is a multiple of this."""


def tile_of(granularity: Granularity, shape: tuple[int, int]) -> Tile:
    """The tile of a weight [N, K] that shares a scale."""
    n, k = shape
    return {"row": (1, k), "tensor": (n, k), "block": (BLOCK, BLOCK)}[granularity]


def check_stack(name: str, bits: Tensor, inverse: Tensor) -> None:
    """Raise `ConfigError` unless codes [E, N, K] have scales [E, N, 1] by row or [E, 1, 1]."""
    if tuple(inverse.shape[1:]) not in ((bits.shape[1], 1), (1, 1)):
        raise ConfigError(
            "experts in one parameter cannot be stored with a scale for each block",
            where=name,
            why="their products take a scale for each row or for each expert's matrix",
            fix="granularity='row', or 'tensor'; blocks are for linear layers",
        )


def quantize_weight(w: Tensor, tile: Tile, *, pow2: bool = False) -> tuple[Tensor, Tensor]:
    """E4M3 codes of a weight [N, K] under the largest scale that saturates nothing.

    Some rows at a time: the float32 products of a whole weight would take four times its codes.

    Args:
        pow2: round scales down to powers of two.

    Returns:
        bits, uint8 [N, K]; inverse scales, float32, one per tile [ceil(N/r), ceil(K/c)]. A tile
        with NaN or infinity has a NaN or infinite inverse.
    """
    (n, k), scale = w.shape, None
    slabs, inverses = w.split(slab_rows((n, k), w.device, tile)), list[Tensor]()
    bits = torch.empty(n, k, dtype=torch.uint8, device=w.device)
    # One scale for all slabs has to be known before the first one is cast.
    if tile == (n, k):
        largest = torch.stack([amax(slab) for slab in slabs]).amax()
        scale = scale_from_amax(largest, E4M3, pow2=pow2)
        inverses.append(scale.reciprocal().reshape(1, 1))
    row = 0
    for slab in slabs:
        if scale is not None:
            codes = scaled(slab, scale).to(E4M3.dtype)
        elif tile == (1, k):
            codes, inverse = cast_current(slab, E4M3, 1, pow2=pow2, packed=True)
            inverses.append(inverse)
        else:
            tiles = split(slab.float(), tile)  # a slab has whole tiles (`slab_rows`)
            own = scale_from_amax(block_amax(tiles), E4M3, pow2=pow2)
            codes = join(tiles * widen(own), slab).to(E4M3.dtype)
            inverses.append(own.reciprocal())
        bits[row : row + len(slab)] = codes.view(torch.uint8)
        row += len(slab)
    return bits, torch.cat(inverses)


def slab_rows(shape: tuple[int, int], device: torch.device, tile: Tile = (1, 1)) -> int:
    """Number of rows of a weight [N, K] processed at a time: whole tiles, or whole rows."""
    n, k = shape
    whole = 1 if tile == shape else tile[0]  # one scale: rows may be cut anywhere
    slab = SLAB.get(device.type, SLAB_ELSEWHERE)
    return min(max(slab // k // whole, 1) * whole, n)


def dequantize_weight(
    bits: Tensor, inverse: Tensor, tile: Tile, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Multiply codes (uint8 [N, K]) by inverse scales (one per tile) in float32, rounded once."""
    codes = decode_bits(bits).float()
    # By row or as a whole, scales broadcast as they are.
    if inverse.shape[1] == 1 and inverse.shape[0] in (1, codes.shape[0]):
        return codes.mul_(inverse).to(dtype)
    return times_blocks(codes, inverse, tile).to(dtype)


class Arithmetic(NamedTuple):
    """Arithmetic of the GEMMs of one layer that holds codes; wgrad is of one that trains.

    Attributes:
        tile: tile of the stored weight that shares a scale.
        per_row: True if x and g are cast per token, else per tensor.
        pow2: True if their scales are powers of two.
        emulate: True for codes in BF16, else `torch._scaled_mm`.
        in_bf16: True if the emulated GEMM may be a BF16 one (see `gemm.scaled_mm`).
        high: GEMMs that stay in high precision, from the dequantized weight.
        fast_accum: True if `torch._scaled_mm` may accumulate with fewer digits.
        own: True if operators of `finetune.precision.numbers.kernels` transpose codes for
            `torch._scaled_mm`, and cast its operands by row where nothing is compiled.
        own_cast: True if they cast in compiled layers, too, where Inductor joins casts to others.
        gradients: format of g.
    """

    tile: Tile
    per_row: bool = True
    pow2: bool = False
    emulate: bool = True
    in_bf16: bool = True
    high: frozenset[Gemm] = frozenset()
    fast_accum: bool = True
    own: bool = False
    own_cast: bool = False
    gradients: Format = E4M3


def dequantizing(tile: Tile) -> Arithmetic:
    """Arithmetic of a layer that is stored in FP8 and multiplies in high precision."""
    return Arithmetic(tile, high=frozenset({"fprop", "dgrad"}))


def cast_operand(
    x: Tensor, how: Arithmetic, fold: Tensor | None = None, fmt: Format = E4M3
) -> tuple[Tensor, Tensor]:
    """Codes of an activation or gradient [M, C], and their inverse scale: [M, 1], or one number.

    Args:
        fold: float32 [1, C], multiplied into the columns before they are cast.
    """
    own = how.own_cast or (how.own and not torch.compiler.is_compiling())
    if own and how.per_row and fmt is E4M3 and not how.emulate:
        return cast_rows(x, fold, pow2=how.pow2)
    wide = x if fold is None else x.float() * fold
    dim = 1 if how.per_row else None
    return cast_current(wide, fmt, dim, pow2=how.pow2, packed=not how.emulate)


def multiply(
    a: tuple[Tensor, Tensor], bits: Tensor, inverse: Tensor, how: Arithmetic, dtype: torch.dtype,
    fmt: Format = E4M3,
) -> Tensor:  # fmt: skip
    """Multiply a cast operand by stored codes: [M, C] @ [C, D] -> [M, D] in `dtype`.

    `bits` are uint8 in any layout, with a float32 inverse scale per column, [1, D], or one number;
    `fmt` is the format of `a`.
    """
    if how.emulate:
        b = Quantized(decode_bits(bits), inverse, E4M3, how.in_bf16)
        return scaled_mm(Quantized(*a, fmt, how.in_bf16), b, dtype)  # [M, C] @ [C, D]
    if how.per_row:
        # torch._scaled_mm takes [M, 1] and [1, N], contiguous.
        inverse = inverse.expand(1, bits.shape[1]).contiguous()
    column_major = bits
    # Column-major is qᵀ, the view [K, N] of codes [N, K] that fprop takes; dgrad's q is not.
    if bits.stride(0) != 1:
        row_major = transpose_codes(bits, a[0]) if how.own else bits.t().contiguous()
        column_major = row_major.t()
    # The kernel with a scale per row has BF16 results only.
    y = torch_scaled_mm(  # [M, C] @ [C, D]
        a[0],
        column_major.view(E4M3.dtype),
        a[1],
        inverse if how.per_row else inverse.reshape(()),
        torch.bfloat16 if how.per_row else dtype,
        fast=how.fast_accum,
    )
    return of_type(y, dtype)


def of_type(y: Tensor, dtype: torch.dtype) -> Tensor:
    """`y.to(dtype)`, for results of an autograd function.

    Dynamo of torch 2.11.0 knows the result of a function by the tensor it is. Where the last
    operator returns the tensor that it was given, as `to` of its own type and `add_` do, the graph
    has no gradient below it: zeros, with no error.
    """
    return y if y.dtype is dtype else y.to(dtype)


def fprop(x: Tensor, xq: tuple[Any, Any], bits: Tensor, inverse: Tensor, how: Arithmetic) -> Tensor:
    """`x Wᵀ`: x [M, K] and its cast, bits [N, K], inverse scales of the weight -> [M, N]."""
    if "fprop" in how.high:
        return x @ dequantize_weight(bits, inverse, how.tile, x.dtype).t()  # [M, K] @ [K, N]
    return multiply(xq, bits.t(), inverse.t(), how, x.dtype)  # [M, K] @ [K, N]


def dgrad(g: Tensor, bits: Tensor, inverse: Tensor, how: Arithmetic) -> Tensor:
    """`g W`: g [M, N], bits [N, K], inverse scales of the weight -> [M, K]."""
    if "dgrad" in how.high:
        return g @ dequantize_weight(bits, inverse, how.tile, g.dtype)  # [M, N] @ [N, K]
    fmt = how.gradients
    if inverse.numel() == 1:
        gq = cast_operand(g, how, fmt=fmt)
        return multiply(gq, bits, inverse, how, g.dtype, fmt)  # [M, N] @ [N, K]
    folded = cast_operand(g, how, inverse.t(), fmt)
    # The scales of W are in the codes of g already: 1 in their place.
    return multiply(folded, bits, inverse.new_ones(1, 1), how, g.dtype, fmt)  # [M, N] @ [N, K]


def wgrad(g: Tensor, x: Tensor, how: Arithmetic) -> Tensor:
    """`gᵀ x`: g [M, N], x [M, K] -> [N, K] in the type of `g`, each cast along tokens."""
    if "wgrad" in how.high:
        return g.t() @ x.to(g.dtype)  # [N, M] @ [M, K]
    fmt = how.gradients
    if how.emulate:
        dim = 0 if how.per_row else None
        gq, xq = (
            Quantized(*cast_current(each, f, dim, pow2=how.pow2), f, how.in_bf16)
            for each, f in ((g, fmt), (x, E4M3))
        )
        return scaled_mm(gq.t(), xq, g.dtype)  # [N, M] @ [M, K]
    if missing := -len(g) % INNER_MULTIPLE:
        g, x = (nn.functional.pad(each, (0, 0, 0, missing)) for each in (g, x))
    # Turned before they are cast: a scale for each row, and tokens innermost, as FP8 GEMMs want.
    gq, xq = (cast_operand(each.t().contiguous(), how, fmt=f) for each, f in ((g, fmt), (x, E4M3)))
    bits, inverse = xq[0].view(torch.uint8).t(), xq[1].t() if how.per_row else xq[1]
    return multiply(gq, bits, inverse, how._replace(fast_accum=False), g.dtype)  # [N, M] @ [M, K]


class FrozenLinear(torch.autograd.Function):
    """`y = x Wᵀ` with a stored weight: two GEMMs, and only the weight's codes are kept."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        x_codes: Tensor | None,
        x_inverse: Tensor | None,
        bits: Tensor,
        inverse: Tensor,
        how: Arithmetic,
    ) -> Tensor:
        """x [M, K], its cast (None if fprop is high), bits [N, K] -> y [M, N] in the type of x."""
        ctx.save_for_backward(bits, inverse)  # without wgrad, x is not needed again
        ctx.how = how
        return fprop(x, (x_codes, x_inverse), bits, inverse, how)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor):
        """g [M, N] -> dx [M, K]."""
        bits, inverse = ctx.saved_tensors
        return dgrad(g, bits, inverse, ctx.how), None, None, None, None, None
