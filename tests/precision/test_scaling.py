"""Every scaling rule against loops over blocks, torchao and Transformer Engine's formulas.

The loops below are written from the rules' definitions: one block after the other, scales in NumPy
float32 scalars and Python integers, rounding by `ml_dtypes`. Codes and scales must be equal bit for
bit, for the operands of each of the three GEMMs as a layer really multiplies them, and with sizes
that no block divides. The loop for NVFP4 follows Transformer Engine's reference
(`custom_recipes/reference_nvfp4.py` of version 2.20) step by step, the order of its float32
operations included.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torchao.float8 import Float8LinearConfig
from torchao.float8.config import ScalingGranularity
from torchao.float8.float8_linear import Float8Linear
from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
from torchao.float8.float8_training_tensor import LinearMMConfig
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.kernels import unpack_uint4
from torchao.prototype.mx_formats.mx_tensor import to_mx
from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale

from finetune.precision import constants, convert, planner
from finetune.precision.engines import emulated
from finetune.precision.facts import SCALINGS
from finetune.precision.numbers.formats import E2M1, E4M3, E5M2, snr_db
from finetune.precision.numbers.gemm import Quantized
from finetune.precision.numbers.hadamard import SIGNS, transform
from finetune.precision.numbers.scaling import make_rule
from finetune.precision.settings import PrecisionConfig

ML = {E4M3: ml_dtypes.float8_e4m3fn, E5M2: ml_dtypes.float8_e5m2, E2M1: ml_dtypes.float4_e2m1fn}
F32 = np.float32
FLOAT_MAX = np.finfo(F32).max


def fp8(scaling: str, **settings) -> PrecisionConfig:
    return PrecisionConfig.model_validate(
        {"compute": "fp8", "backend": "emulated", "emulation": "allow", "scaling": scaling}
        | settings
    )


# -------------------------------------------------------------------------------- loops over blocks


def in_format(values: np.ndarray, fmt) -> np.ndarray:
    """Saturated, and rounded to nearest even by `ml_dtypes`."""
    return np.clip(values, -fmt.max, fmt.max).astype(ML[fmt]).astype(F32)


def pow2_below(x: np.float32) -> np.float32:
    return F32(2.0 ** (math.frexp(float(x))[1] - 1))


def per_block(x: np.ndarray, tile: tuple[int, int], fmt, scale_of) -> tuple[np.ndarray, np.ndarray]:
    """Codes, and the inverse scale of each block, with `scale_of(amax) -> (scale, inverse)`."""
    rows, columns = x.shape
    r, c = tile
    codes = np.zeros_like(x, dtype=F32)
    inverses = np.zeros((-(-rows // r), -(-columns // c)), dtype=F32)
    for i in range(0, rows, r):
        for j in range(0, columns, c):
            block = x[i : i + r, j : j + c]
            scale, inverse = scale_of(np.abs(block).max())
            with np.errstate(over="ignore"):  # where a block's scale was rounded to zero
                codes[i : i + r, j : j + c] = in_format(block * scale, fmt)
            inverses[i // r, j // c] = inverse
    return codes, inverses


def float_scale(fmt, pow2: bool, floor: float):
    def scale_of(amax: np.float32):
        scale = F32(fmt.max) / max(amax, F32(floor))
        scale = pow2_below(scale) if pow2 else scale
        return scale, F32(1) / scale

    return scale_of


def mx_scale(fmt):
    def scale_of(amax: np.float32):
        """The smallest power of two under which the largest value fits."""
        if amax == 0:
            return F32(1), F32(2.0**-127)
        fraction, exponent = math.frexp(float(amax / F32(fmt.max)))
        exponent -= fraction == 0.5  # a power of two is its own ceiling
        return F32(2.0**-exponent), F32(2.0**exponent)

    return scale_of


def nv_scale(x: np.ndarray):
    """Transformer Engine's: an E4M3 number for the block, and one float32 for the tensor."""
    amax_of_all = np.abs(x).max()
    encode = min(F32(448 * 6) / amax_of_all, FLOAT_MAX) if amax_of_all else FLOAT_MAX
    multiplier = encode * (F32(1) / F32(6))

    def scale_of(amax: np.float32):
        block = in_format(np.array(amax * multiplier, dtype=F32), E4M3)
        decode = block * (F32(1) / encode)
        return (min(F32(1) / decode, FLOAT_MAX) if decode else FLOAT_MAX), block

    return scale_of, F32(1) / encode


def turn(x: np.ndarray) -> np.ndarray:
    """The Hadamard transform along rows, 16 at a time, from the definition; in float64."""
    padded = np.zeros((-(-len(x) // 16) * 16, x.shape[1]))
    padded[: len(x)] = x
    out = np.zeros_like(padded)
    for i in range(0, len(padded), 16):
        for j in range(16):  # H[k, j] is -1 to the number of ones that k and j have in common
            for k in range(16):
                sign = SIGNS[k] * (-1) ** (k & j).bit_count()
                out[i + j] += sign * padded[i + k] / 4
    return out


def expected(operand: str, x: Tensor, dim: int, p: PrecisionConfig):
    """Codes [R, C], inverse scale of each block and of the tensor, of a contraction over `dim`."""
    fmt = {"hybrid": E5M2 if operand == "g" else E4M3, "e4m3": E4M3, "e5m2": E5M2}[p.fp8_format]
    values = x.float().numpy().astype(F32)

    def along(n: int) -> tuple[int, int]:
        return (1, n) if dim == 1 else (n, 1)

    if p.scaling == "nvfp4":
        if dim == 0 and operand != "w" and constants.HADAMARD:
            values = torch.from_numpy(turn(values)).to(x.dtype).float().numpy()
        scale_of, inverse = nv_scale(values)
        tile = (16, 16) if operand == "w" else along(16)
        return *per_block(values, tile, E2M1, scale_of), inverse
    if p.scaling == "mxfp8":
        return *per_block(values, along(32), fmt, mx_scale(fmt)), F32(1)
    if p.scaling == "blockwise":
        tile = (128, 128) if operand == "w" else along(128)
        tiny = float(F32(fmt.max) / FLOAT_MAX)
        return *per_block(values, tile, fmt, float_scale(fmt, p.pow2_scales, tiny)), F32(1)
    # One scale for the GEMM's row or tensor: no blocks, the scale is taken out of the sum.
    whole = p.scaling == "tensorwise" or (
        p.scaling == "rowwise_with_gw_hp" and operand == "w" and dim == 0
    )
    tile = values.shape if whole else along(values.shape[dim])
    return *per_block(values, tile, fmt, float_scale(fmt, p.pow2_scales, fmt.max * 2.0**-126)), F32(
        1
    )


def same(codes: Quantized, reference) -> None:
    values, blocks, inverse = reference
    assert codes.codes.dtype is torch.bfloat16
    assert torch.equal(codes.codes.float(), torch.from_numpy(values))
    if codes.block is None:
        ours = codes.inverse.reshape(blocks.shape)
        assert torch.equal(ours, torch.from_numpy(blocks))
    else:
        assert torch.equal(codes.block, torch.from_numpy(blocks))
        assert float(codes.inverse) == inverse


class Layer:
    """One linear layer that has multiplied, and the operands of its three GEMMs as it did."""

    def __init__(self, p: PrecisionConfig, shape: tuple[int, int, int], monkeypatch) -> None:
        m, k, n = shape
        torch.manual_seed(1)
        spread = torch.logspace(-3, 1, k)  # so that blocks differ in amax
        self.x = (torch.randn(m, k) * spread).bfloat16().float().requires_grad_()
        self.g = (torch.randn(m, n) * torch.logspace(-6, -2, m)[:, None]).bfloat16().float()
        self.model = nn.Sequential(nn.Linear(k, n, bias=False))
        self.model[0].weight.data = self.model[0].weight.data.bfloat16().float()
        self.operands: list[tuple[Quantized, Quantized]] = []

        def spy(a: Quantized, b: Quantized, dtype: torch.dtype) -> Tensor:
            self.operands.append((a, b))
            return multiply(a, b, dtype)

        multiply = emulated.scaled_mm
        monkeypatch.setattr(emulated, "scaled_mm", spy)
        convert.apply(self.model, planner.plan(self.model, p))
        self.y = self.model(self.x)
        self.y.backward(self.g)
        self.w, self.dw = self.model[0].weight.detach(), self.model[0].weight.grad
        self.x, self.dx, self.y = self.x.detach(), self.x.grad, self.y.detach()


RULES = {
    "tensorwise": {},
    "tensorwise in powers of two": {"power_of_two_scales": True},
    "tensorwise, e5m2": {"format": "e5m2"},
    "rowwise": {},
    "rowwise in float32": {"power_of_two_scales": False},
    "rowwise, hybrid": {"format": "hybrid"},
    "rowwise_with_gw_hp": {},
    "blockwise": {},
    "blockwise in float32": {"power_of_two_scales": False},
    "mxfp8": {},
    "mxfp8, hybrid": {"format": "hybrid"},
    "nvfp4": {},
    "nvfp4, plain": {},
}
EXACT = {"STOCHASTIC_ROUNDING": False}
PLAIN = EXACT | {"HADAMARD": False}


def test_every_rule_has_a_reference_of_its_own() -> None:
    """Delayed scaling has its own, in `test_delayed.py`."""
    assert {name.split(",")[0].split(" ")[0] for name in RULES} == {*SCALINGS} - {"delayed"}


@contextmanager
def rule_of(name: str) -> Iterator[PrecisionConfig]:
    """One of `RULES`, rounded to nearest."""
    with patch.dict(vars(constants), PLAIN if name == "nvfp4, plain" else EXACT):
        yield fp8(name.split(",")[0].split(" ")[0], **RULES[name])


@pytest.mark.parametrize("shape", [(40, 160, 96), (256, 128, 256)], ids=["ragged", "whole"])
@pytest.mark.parametrize("name", RULES)
def test_rule_equals_loops_over_blocks(name, shape, monkeypatch) -> None:
    """fprop contracts K, dgrad N, wgrad the tokens: so lie the blocks of its operands."""
    with rule_of(name) as p:
        layer = Layer(p, shape, monkeypatch)
        operands = [("x", 1), ("w", 1)], [("g", 1), ("w", 0)], [("g", 0), ("x", 0)]
        high = p.scaling == "rowwise_with_gw_hp"
        assert len(layer.operands) == (2 if high else 3)
        for gemm, pair, seen in zip(
            ("fprop", "dgrad", "wgrad"), operands, layer.operands, strict=False
        ):
            # As multiplied: [M, K] x [K, N]. As cast: the layer's own x [M, K], w [N, K], g [M, N].
            a = seen[0].t() if gemm == "wgrad" else seen[0]
            b = seen[1].t() if gemm == "fprop" else seen[1]
            for (operand, dim), codes in zip(pair, (a, b), strict=True):
                same(codes, expected(operand, getattr(layer, operand), dim, p))
        exact = [
            (layer.y, [c.dequantize().double() for c in layer.operands[0]]),
            (layer.dx, [c.dequantize().double() for c in layer.operands[1]]),
            (layer.dw, [layer.g.t().double(), layer.x.double()])
            if high
            else (layer.dw, [c.dequantize().double() for c in layer.operands[2]]),
        ]
        for result, (a, b) in exact:
            assert float(((result - a @ b).abs() / (a.abs() @ b.abs())).max()) < 1e-6


@st.composite
def matrices(draw, rows, columns) -> Tensor:
    """Magnitudes that differ as no training's do; rows, columns and whole matrices of zeros."""
    r, c = draw(rows), draw(columns)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    low, high = sorted(draw(st.tuples(st.integers(-100, 60), st.integers(-100, 60))))
    exponents = torch.randint(low, high + 1, (r, c), generator=generator).float()
    x = torch.randn(r, c, generator=generator).double() * 2.0 ** exponents.double()
    x *= torch.rand(r, 1, generator=generator) >= draw(st.sampled_from([0, 0.3, 1]))
    x *= torch.rand(1, c, generator=generator) >= draw(st.sampled_from([0, 0, 0.3]))
    return x.float().to(draw(st.sampled_from([torch.float32, torch.bfloat16])))


@pytest.mark.parametrize("name", [name for name in RULES if name != "nvfp4"])  # turned in float32
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_every_operand_equals_loops_over_blocks(name, data) -> None:
    """Whatever its rows: of one token, of zeros, 2^160 apart."""
    operand, dim = data.draw(st.sampled_from("xwg")), data.draw(st.sampled_from([0, 1]))
    x = data.draw(matrices(st.integers(1, 40), st.integers(1, 40)))
    with rule_of(name) as p:
        same(make_rule(p).cast(operand, x, dim), expected(operand, x, dim, p))


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("value", [0.0, 1e-30, 1e-44])
def test_zero_and_tiny_stay_finite(name, value) -> None:
    model = nn.Sequential(nn.Linear(32, 32))
    with rule_of(name) as p:
        convert.apply(model, planner.plan(model, p))
    x = torch.full((16, 32), value, requires_grad=True)
    y = model(x)
    y.backward(torch.full_like(y, value))
    for result in (y, x.grad, model[0].weight.grad):
        assert bool(result.isfinite().all())


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise", "blockwise", "mxfp8", "nvfp4"])
def test_nan_comes_out_as_nan(scaling) -> None:
    """So does infinity, except in NVFP4, where Transformer Engine saturates it (and so do we)."""
    rule = make_rule(fp8(scaling))
    for value in (torch.nan, torch.inf):
        x = torch.ones(32, 64)
        x[3, 5] = value
        for operand in ("x", "w", "g"):
            back = rule.cast(operand, x, 1).dequantize()
            hidden = scaling == "nvfp4" and value == torch.inf
            assert bool(back[3, 5].isnan()) != hidden
    # Under powers of two the rest of a tensor with an infinity is no garbage off the grid either.
    x[3, 5] = torch.inf
    values = make_rule(fp8("tensorwise", power_of_two_scales=True)).cast("x", x * 1e4, 1).codes
    assert bool((values.isnan() | (values.abs() <= 448)).all())


# -------------------------------------------------------------------------------------------- NVFP4


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [32, 40])
def test_transform_cancels_in_the_product(rows, kind) -> None:
    generator = torch.Generator().manual_seed(0)
    # Sixteenths: their sums are exact in float32, and rounded to BF16 once.
    x, g = (torch.randint(-64, 64, (rows, 24), generator=generator) / 16 for _ in range(2))
    turned = transform(x.to(kind))
    assert turned.dtype is kind
    assert torch.equal(turned, torch.from_numpy(turn(x.numpy())).to(kind))
    assert not torch.equal(turned[:rows], x.to(kind))
    if kind is torch.float32:
        assert torch.allclose(transform(g).t() @ turned, g.t() @ x, atol=1e-4)


def test_gradients_are_rounded_stochastically_and_nothing_else() -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 64)
    rule = make_rule(fp8("nvfp4"))
    with rule_of("nvfp4") as p:
        nearest = make_rule(p)
    for operand in ("x", "w"):
        for dim in (0, 1):
            a, b = rule.cast(operand, x, dim), nearest.cast(operand, x, dim)
            assert torch.equal(a.codes, b.codes)
    for dim in (0, 1):
        fixed = nearest.cast("g", x, dim)
        draws = [rule.cast("g", x, dim) for _ in range(400)]
        assert all(torch.equal(d.block, fixed.block) for d in draws)
        assert not torch.equal(draws[0].codes, draws[1].codes)
        wanted = transform(x) if dim == 0 else x
        mean = torch.stack([d.dequantize() for d in draws]).double().mean(0)
        fits = fixed.codes.abs() < 6  # rounding of the block's scale saturates a few
        assert (
            snr_db(wanted[fits], mean[fits]) > snr_db(wanted[fits], fixed.dequantize()[fits]) + 20
        )


# ------------------------------------------------------------------------------------------ torchao


def ao_linear(model: nn.Sequential, recipe: str, **changes) -> nn.Sequential:
    import dataclasses

    config = Float8LinearConfig.from_recipe_name(recipe)
    config = dataclasses.replace(config, emulate=True, **changes)
    return nn.Sequential(Float8Linear.from_float(model[0], config))


def step(model: nn.Module, x: Tensor, g: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    model.zero_grad()
    y = model(x)
    y.backward(g)
    return [y.detach(), x.grad, model[0].weight.grad.clone()]


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("scaling", "settings", "changes"),
    [
        ("rowwise", {}, {}),
        ("rowwise_with_gw_hp", {}, {}),
        ("tensorwise", {"power_of_two_scales": True}, {"round_scales_to_power_of_2": True}),
        ("tensorwise", {}, {}),
    ],
)
def test_layer_equals_torchaos_emulation(scaling, settings, changes, kind) -> None:
    """Forward and both gradients of `Float8Linear(emulate=True)`, from torchao's own recipes.

    Under powers of two, bit for bit. Under float32 scales the codes and scales are still bit-equal
    (next test), but torchao divides each operand by its scale before the product, in float32, and
    we multiply the sum by both scales, as `_scaled_mm` does on a GPU: a difference in float32's
    last digits. (`emulation=exact` because `allow` may round a product to BF16 first.)
    """
    torch.manual_seed(0)
    x, g = torch.randn(48, 64).to(kind), torch.randn(48, 96).to(kind) * 1e-3
    model = nn.Sequential(nn.Linear(64, 96, bias=False).to(kind))
    theirs = step(ao_linear(model, scaling, **changes), x, g)
    p = fp8(scaling, emulation="exact", **settings)
    assert p.pow2_scales == (scaling != "tensorwise" or bool(changes)), "as torchao's recipe has it"
    convert.apply(model, planner.plan(model, p))
    ours = step(model, x, g)
    for a, b in zip(ours, theirs, strict=True):
        if p.pow2_scales:
            assert torch.equal(a, b)
        else:
            error = float(((a - b).abs() / b.abs().max()).max())
            assert error < (1e-6 if kind is torch.float32 else 2.0**-8)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dim", [None, 0, 1])
@pytest.mark.parametrize("pow2", [False, True])
def test_codes_and_scales_equal_torchaos(pow2, dim, kind) -> None:
    """Bit for bit, though torchao divides in float64: rounded to float32 the quotient is the same
    (53 digits are more than twice 24 and two). It raises every amax to 1e-12, which we do not."""
    x = torch.randn(64, 160, generator=torch.Generator().manual_seed(0)) * torch.logspace(
        -20, 9, 160
    )
    x = x.to(kind)
    x[:, 7] = 0
    x[9] = 0
    rule = make_rule(fp8("rowwise" if dim is not None else "tensorwise", power_of_two_scales=pow2))
    for operand, fmt in (("x", E4M3), ("g", rule.formats["g"])):
        ours = rule.cast(operand, x, 1 if dim is None else dim)
        granularity = ScalingGranularity.TENSORWISE if dim is None else ScalingGranularity.AXISWISE
        theirs = hp_tensor_to_float8_dynamic(
            x, fmt.dtype, LinearMMConfig(), scaling_granularity=granularity,
            axiswise_dim=-1 if dim == 1 else dim, round_scales_to_power_of_2=pow2,
        )  # fmt: skip
        largest = x.abs().amax() if dim is None else x.abs().amax(dim, keepdim=True)
        kept = largest >= 1e-12
        where = kept.expand_as(x)
        assert bool(kept.any())
        assert torch.equal(ours.codes.float()[where], theirs._data.float()[where])
        assert torch.equal(ours.inverse[kept], theirs._scale.reciprocal()[kept])


def mx_inputs(kind: torch.dtype) -> Tensor:
    """Blocks over the whole range of exponents, zeros, a NaN and powers of two among them."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(256, 64, generator=generator) * torch.logspace(-40, 36, 256)[:, None]
    x[0] = 0
    x[1, 5] = torch.nan
    for row, exponent in enumerate((-9, -3, 0, 5, 100), 2):
        x[row] = torch.linspace(-448, 448, 64) * 2.0**exponent  # the largest just fits
    return x.to(kind)


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda f: f.name)
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=str)
def test_mxfp8_equals_torchaos(kind, fmt) -> None:
    """`to_mx` with RCEIL, which rounds scales up as ours and NVIDIA's kernels do."""
    x = mx_inputs(kind)
    scale, data = to_mx(x, fmt.dtype, 32, ScaleCalculationMode.RCEIL)
    ours = make_rule(fp8("mxfp8", format=fmt.name)).cast("x", x, 1)
    theirs = scale.view(torch.float8_e8m0fnu).float()
    assert torch.equal(ours.block.nan_to_num(7), theirs.nan_to_num(7))
    assert torch.equal(ours.codes.float().nan_to_num(7), data.float().nan_to_num(7))
    assert bool(ours.codes[1, :32].isnan().any())


def nv_by_torchao(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Values of codes, block scales and tensor scale of torchao's two-level NVFP4."""
    tensor_scale = per_tensor_amax_to_scale(x.abs().max())
    scale, packed = nvfp4_quantize(x, 16, tensor_scale)
    patterns = unpack_uint4(packed).view(x.shape)
    codes = torch.from_numpy(patterns.numpy().view(ML[E2M1]).astype(F32))
    return codes, scale.float(), tensor_scale


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=str)
def test_nvfp4_equals_torchaos_where_both_define_the_same(kind) -> None:
    """`nvfp4_quantize` in two levels, with blocks above torchao's floor and an amax of 2688 · 2^n.

    Two differences remain elsewhere. torchao holds block scales at 2^-6 or more (`E4M3_EPS`), where
    Transformer Engine and we use E4M3's subnormals. And it divides by 6 and by the tensor's scale,
    where they multiply by rounded reciprocals: the last digit of the block scale before it is
    rounded to E4M3, and that of a value before it is rounded to E2M1, can differ.
    """
    x = torch.randn(128, 256, generator=torch.Generator().manual_seed(0)).to(kind)
    x[5, 9] = 2688 * 2.0**-5
    codes, blocks, tensor_scale = nv_by_torchao(x)
    ours = make_rule(fp8("nvfp4")).cast("x", x, 1)
    assert torch.equal(ours.block, blocks)
    assert torch.equal(ours.codes.float(), codes)
    assert torch.equal(ours.inverse, tensor_scale)
    # Any amax: one in ten thousand, each by one step.
    x = torch.randn(512, 256, generator=torch.Generator().manual_seed(1)).to(kind)
    codes, blocks, _ = nv_by_torchao(x)
    ours = make_rule(fp8("nvfp4")).cast("x", x, 1)
    assert float((ours.block != blocks).float().mean()) < 1e-3
    assert float((ours.codes.float() != codes).float().mean()) < 1e-3


@pytest.mark.parametrize("exponent", [-44, -30, -3, 0, 8, 36])
def test_nvfp4_equals_transformer_engines_formulas(exponent) -> None:
    """Any magnitude: the tensor's scale at the end of float32's range, block scales of zero.

    Without the transform, whose BF16 products lose subnormal numbers on some CPUs.
    """
    generator = torch.Generator().manual_seed(exponent + 50)
    spread = torch.logspace(-6, 0, 64)[:, None]
    x = (torch.randn(64, 64, generator=generator) * spread * 10.0**exponent).bfloat16()
    with rule_of("nvfp4, plain") as p:
        for operand, dim in (("x", 1), ("w", 0), ("g", 0)):
            same(make_rule(p).cast(operand, x, dim), expected(operand, x, dim, p))
