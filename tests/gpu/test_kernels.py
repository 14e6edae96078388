"""Our kernels on a GPU give the bits of their references on a CPU."""

from __future__ import annotations

import pytest
import torch

from finetune.precision.kernels import cast_rows, transpose_codes

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("pow2", [False, True])
@pytest.mark.parametrize("length", [1, 37, 160, 1024, 4096, 14336, 18944, 28672])
def test_casts(length, pow2) -> None:
    torch.manual_seed(length)
    x = torch.randn(300, length)
    x[1], x[2], x[3] = x[1] * 3e4, x[2] * 1e-6, 0.0
    x[4, 0], x[5, -1] = float("inf"), float("nan")
    fold = torch.logspace(-3, 1, length)[None]
    for given, factors in ((x.bfloat16(), None), (x.bfloat16(), fold), (x, fold)):
        on_gpu = None if factors is None else factors.cuda()
        codes, inverse = (y.cpu() for y in cast_rows(given.cuda(), on_gpu, pow2=pow2))
        wanted, scale = cast_rows(given, factors, pow2=pow2)
        torch.testing.assert_close(inverse, scale, rtol=0, atol=0, equal_nan=True)
        # Under an infinite scale, that of NaN as a power of two, torch before 2.12 has NaN on a CPU
        # where later ones saturate, as hardware does; the NaN itself stays one.
        finite = inverse.flatten() != 0
        assert codes[5, -1].float().isnan()
        codes, wanted = (y.float()[finite] for y in (codes, wanted))
        torch.testing.assert_close(codes, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("shape", [(1, 1), (37, 200), (4096, 1024), (1024, 14336)])
def test_transposes(shape) -> None:
    codes = torch.randint(0, 256, shape, dtype=torch.uint8)
    assert torch.equal(transpose_codes(codes.cuda()).cpu(), codes.t())
