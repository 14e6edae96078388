"""The scaled GEMM of quantized matrices, and the forward of a linear layer around a product.

A `Quantized` matrix has codes, numbers on a format's grid, and inverse scales. The emulated GEMM
multiplies codes exactly, accumulates in float32, multiplies by the inverse scales and rounds to the
output type, as FP8 tensor cores and cuBLASLt's epilogue do.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from finetune.precision.numbers.formats import E2M1, Format
from finetune.precision.numbers.tiles import times_blocks


class Quantized(NamedTuple):
    """A quantized matrix [R, C]: `x ≈ codes · block · inverse`.

    Attributes:
        codes: BF16 numbers on the grid of `fmt`, [R, C].
        inverse: float32 inverse scale: one element, or one per row [R, 1] or column [1, C].
        in_bf16: True if a CPU may multiply these in BF16 (see `scaled_mm`).
        block: inverse scales of blocks, [ceil(R/r), ceil(C/c)], or None.
        tile: (r, c), the size of a block.
    """

    codes: Tensor
    inverse: Tensor
    fmt: Format
    in_bf16: bool = False
    block: Tensor | None = None
    tile: tuple[int, int] = (1, 1)

    def t(self) -> Quantized:
        """The transposed matrix [C, R]."""
        block = None if self.block is None else self.block.t()
        inverse = self.inverse.t() if self.inverse.dim() == 2 else self.inverse
        codes, tile = self.codes.t(), self.tile[::-1]
        return self._replace(codes=codes, inverse=inverse, block=block, tile=tile)

    def dequantize(self) -> Tensor:
        """The dequantized matrix, float32 [R, C]."""
        values = self.codes.float()
        if self.block is not None:
            values = times_blocks(values, self.block, self.tile)
        return values * self.inverse


def compute_dtype(x: Tensor) -> torch.dtype:
    """Output type of matmuls here: autocast's if it is on, else `x`'s."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def as_rows(x: Tensor) -> Tensor:
    """The input of a linear layer, x [..., K], as a matrix [M, K] of the compute type."""
    return x.reshape(-1, x.shape[-1]).to(compute_dtype(x))


def as_output(y: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
    """The output [..., N] of a linear layer from its product y [M, N] and its input x [..., K]."""
    y = y if bias is None else y + bias.to(y.dtype)
    # No view for autograd: torchao (0.18) returns one of its own, and then autograd forbids what
    # Falcon and Llama 4 do, to add in place to the result of a linear layer.
    return torch.ops.aten._unsafe_view(y, (*x.shape[:-1], y.shape[-1]))


def writes_float32(x: Tensor) -> bool:
    """True if torch has GEMMs from 16-bit operands to float32 on the device of `x` (2.13: CUDA)."""
    return x.is_cuda


def mm(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply matrices of one type into `dtype`, without a rounding or cast in between if it can.

    A gradient of float32 masters is one kernel instead of two, and not rounded to 16 bits first.
    """
    if dtype is torch.float32 and a.dtype is not dtype and writes_float32(a):
        return torch.mm(a, b, out_dtype=dtype)  # [M, K] @ [K, N]
    return torch.mm(a, b).to(dtype)


def add_mm(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a product [M, K] @ [K, N] to `total`, float32, without rounding it to 16 bits first."""
    if a.dtype is not torch.float32 and writes_float32(a):
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(a.float(), b.float())


def torch_scaled_mm(
    a: Tensor,
    b: Tensor,
    inverse_a: Tensor,
    inverse_b: Tensor,
    out_dtype: torch.dtype,
    *,
    fast: bool,
) -> Tensor:
    """Multiply FP8 codes [M, K] @ [K, N] by `torch._scaled_mm`, with inverse scales.

    Autocast is off: a CPU without FP8 units multiplies dequantized numbers by a plain matmul (torch
    2.13), which autocast would round to BF16 first. A compiled graph runs without autocast.

    Args:
        fast: sums with fewer digits.
    """
    with torch.autocast(a.device.type, enabled=False):
        return torch._scaled_mm(  # [M, K] @ [K, N]
            a, b, scale_a=inverse_a, scale_b=inverse_b, out_dtype=out_dtype, use_fast_accum=fast
        )


@functools.cache
def has_bf16_units() -> bool:
    """True if this CPU multiplies BF16 itself.

    Without, a BF16 product takes 10 to 40 times as long as a float32 one with its casts (torch 2.13
    on an EPYC with AVX2).
    """
    found = torch.cpu.get_capabilities()
    return any(found.get(name) for name in ("amx_bf16", "avx512_bf16", "bf16"))  # the last is Arm's


# Registered as an operator, so that dispatch modes see it like `aten._scaled_mm` on hardware: the
# proof counts both, and checks that these operands lie on their formats' grids.
_library = torch.library.Library("finetune", "DEF")
_library.define(
    "scaled_mm(Tensor a, Tensor b, Tensor inverse, Tensor? a_block, Tensor? b_block, int[] tiles, "
    "str a_format, str b_format, bool in_bf16, ScalarType out_dtype) -> Tensor"
)


def _scaled_mm(
    a: Tensor,
    b: Tensor,
    inverse: Tensor,
    a_block: Tensor | None,
    b_block: Tensor | None,
    tiles: list[int],
    a_format: str,
    b_format: str,
    in_bf16: bool,
    out_dtype: torch.dtype,
) -> Tensor:
    bf16 = torch.bfloat16
    with torch.autocast(a.device.type, enabled=False):
        # Code times block scale is exact in BF16 for powers of two, and for E4M3 times E2M1.
        exact = bf16 if in_bf16 or a_format == b_format == E2M1.name else torch.float32
        if a_block is not None:
            # These scales differ along K as well, so they cannot be left to the end.
            a = times_blocks(a.to(exact), a_block.to(exact), (tiles[0], tiles[1]))
        if b_block is not None:
            b = times_blocks(b.to(exact), b_block.to(exact), (tiles[2], tiles[3]))
        if a.dtype is b.dtype is bf16 and writes_float32(a):
            product = torch.mm(a, b, out_dtype=torch.float32)  # [M, K] @ [K, N]
        else:
            fast = in_bf16 and out_dtype is bf16 and (a.is_cuda or has_bf16_units())
            wide = bf16 if fast else torch.float32
            product = a.to(wide) @ b.to(wide)  # [M, K] @ [K, N]
    # cuBLASLt multiplies by both scales at the end; one at a time would be equal up to rounding.
    return product.mul_(inverse).to(out_dtype)


_library.impl("scaled_mm", _scaled_mm, "CompositeExplicitAutograd")
_library.impl(
    "scaled_mm", lambda a, b, *rest: a.new_empty((a.shape[0], b.shape[1]), dtype=rest[-1]), "Meta"
)
EMULATED = torch.ops.finetune.scaled_mm
"""The emulated GEMM as an operator overload, as dispatch modes see it."""


def scaled_mm(a: Quantized, b: Quantized, out_dtype: torch.dtype) -> Tensor:
    """Multiply quantized matrices [M, K] @ [K, N], accumulated in float32 and rounded once.

    Products of two codes are exact in float32. CPUs have no GEMM from BF16 to float32; a float32
    one is exact, and a BF16 one (`in_bf16` in both operands) two to four times faster where the CPU
    has units for it. The latter rounds the sum before the scale as well as after it: identical if
    scales are powers of two, else at most one unit in the last place of BF16 away.
    """
    tiles, formats = [*a.tile, *b.tile], (a.fmt.name, b.fmt.name)
    # By row the inverse scales are [M, 1] · [1, N] = [M, N]; per tensor, one number.
    operands = a.codes, b.codes, a.inverse * b.inverse, a.block, b.block
    return EMULATED(*operands, tiles, *formats, a.in_bf16 and b.in_bf16, out_dtype)
