"""Scaling rules: how a GEMM operand becomes codes and scales.

FP8 has few digits and little range, so each operand is multiplied by a scale that puts its largest
magnitude (amax) at the largest number of the format. The rules differ in the scope and the type of
a scale:

| rule | values that share a scale | scale |
|---|---|---|
| tensorwise | the tensor | float32 |
| rowwise | a row along the contracted dimension | power of two |
| blockwise | x, g: 128 along the contracted dimension; w: 128 x 128 | power of two, or float32 |
| mxfp8 | 32 along the contracted dimension | E8M0, rounded up so that nothing saturates |
| nvfp4 | x, g: 16 along the contracted dimension; w: 16 x 16 | E4M3, under one float32 per tensor |
| delayed | the tensor | float32, from the amaxes of earlier micro-steps |

Only per-tensor codes serve all three GEMMs of a layer. Elsewhere the contracted dimension differs
(K, N, M for fprop, dgrad, wgrad), and each GEMM casts its operands from high precision, as casting
codes again would round twice.

NVFP4 adds a Hadamard transform with fixed random signs, which spreads outliers over the 16 tokens
of a block before the operands of wgrad are cast (it is orthogonal and cancels in the product), and
stochastic rounding of gradients, so that small ones are right on average.

Sources: torchao `float8/config.py` (rowwise); DeepSeek-V3 technical report, section 3.3
(blockwise); OCP MX 1.0 and NVIDIA cuBLAS, "1D block quantization" (mxfp8, scale rounded up);
"Pretraining Large Language Models with NVFP4", arXiv 2509.25149, and Transformer Engine's
`reference_nvfp4.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from finetune.precision import constants
from finetune.precision.numbers.formats import (
    E2M1,
    E4M3,
    E5M2,
    E8M0_EXPONENTS,
    Format,
    amax,
    floor_pow2,
    round_to,
    scale_from_amax,
)
from finetune.precision.numbers.gemm import Quantized
from finetune.precision.numbers.hadamard import transform
from finetune.precision.numbers.tiles import along, block_amax, join, split, widen
from finetune.precision.settings import PrecisionConfig

Operand = Literal["x", "w", "g"]
OPERANDS: tuple[Operand, ...] = ("x", "w", "g")
BLOCK, MX_BLOCK, NV_BLOCK = 128, 32, 16
FLOAT_MAX = torch.finfo(torch.float32).max


def formats_of(precision: PrecisionConfig) -> dict[Operand, Format]:
    """Formats of the operands. `hybrid` has E5M2 gradients: they need range more than digits."""
    if precision.facts.format is None:
        return dict.fromkeys(OPERANDS, E2M1)
    # e4m3, e5m2: all three operands; hybrid: x and w in E4M3, g in E5M2.
    both = E5M2 if precision.fp8_format == "e5m2" else E4M3
    return {"x": both, "w": both, "g": E4M3 if precision.fp8_format == "e4m3" else E5M2}


class Rule(ABC):
    """Casting rule of one layer's operands.

    Attributes:
        reuses: True if codes do not depend on the contracted dimension and serve every GEMM.
        in_bf16: True if a CPU may multiply its codes in BF16.
    """

    reuses = False

    def __init__(self, precision: PrecisionConfig) -> None:
        self.formats, self.pow2 = formats_of(precision), precision.pow2_scales
        self.in_bf16 = multiply_in_bf16(precision)

    @abstractmethod
    def cast(self, operand: Operand, x: Tensor, dim: int) -> Quantized:
        """Codes of a matrix whose dimension `dim` (0 or 1) is contracted."""

    def quantized(
        self, operand: Operand, codes: Tensor, inverse: Tensor, *blocks: Any
    ) -> Quantized:
        """Numbers on the grid of an operand's format, with their scales, as operand of a GEMM."""
        return Quantized(codes, inverse, self.formats[operand], self.in_bf16, *blocks)


def scaled(x: Tensor, scale: Tensor) -> Tensor:
    """`x · scale` in float32, a new tensor."""
    wide = x.float()
    # `float()` returns a float32 x itself, which belongs to the caller.
    return wide * scale if wide is x else wide.mul_(scale)


def to_codes(
    scaled_x: Tensor, fmt: Format, noise: Tensor | None = None, *, saturate: bool = False
) -> Tensor:
    """Round float32 values to the grid of `fmt`, as BF16. Overwrites its argument.

    Scales of the current amax cannot saturate; earlier ones, and NVFP4's rounded ones, can.
    """
    return round_to(scaled_x, fmt, noise, saturate=saturate).to(torch.bfloat16)


def cast_current(
    x: Tensor, fmt: Format, dim: int | None, *, pow2: bool = False, packed: bool = False
) -> tuple[Tensor, Tensor]:
    """Cast a matrix [R, C] under its current amax, by row or as a whole.

    Every cast with a scale per row or per tensor from the current amax is this one: of `x`, `w` and
    `g` in the rules below, of the operands of a frozen weight, and of a weight that is stored.

    Args:
        x: any floating type.
        dim: contracted dimension, along which values share a scale; None for one scale.
        pow2: round scales down to powers of two.
        packed: codes in the format's own type, for `torch._scaled_mm` and for storage; else BF16
            numbers on its grid, for the emulated GEMM.

    Returns:
        Codes [R, C], and the float32 inverse scale: [R, 1], [1, C] or a scalar.
    """
    scale = scale_from_amax(amax(x, dim), fmt, pow2=pow2)
    product = scaled(x, scale)
    return product.to(fmt.dtype) if packed else to_codes(product, fmt), scale.reciprocal()


def multiply_in_bf16(precision: PrecisionConfig) -> bool:
    """True if a CPU may multiply codes in BF16: always under powers of two, where it is lossless.

    Float32 scales of blocks are part of the operands, which then do not fit in BF16.
    """
    exact = precision.pow2_scales
    return exact or (precision.emulation != "exact" and not precision.facts.has_float_blocks)


class TensorwiseRule(Rule):
    """One scale per tensor, from its current amax."""

    reuses = True

    def cast(self, operand: Operand, x: Tensor, dim: int) -> Quantized:
        return self.quantized(
            operand, *cast_current(x, self.formats[operand], None, pow2=self.pow2)
        )


class RowwiseRule(Rule):
    """One scale per row along the contracted dimension.

    With the weight gradient in high precision (`rowwise_with_gw_hp`), the weight of dgrad has one
    scale per tensor, as in torchao, which saves a second scale per row.
    """

    def __init__(self, precision: PrecisionConfig) -> None:
        super().__init__(precision)
        self.one_scale_in_dgrad = "wgrad" in precision.facts.high

    def cast(self, operand: Operand, x: Tensor, dim: int) -> Quantized:
        whole = operand == "w" and dim == 0 and self.one_scale_in_dgrad
        along = None if whole else dim
        return self.quantized(
            operand, *cast_current(x, self.formats[operand], along, pow2=self.pow2)
        )


class BlockwiseRule(Rule):
    """1 x 128 for activations and gradients, 128 x 128 for weights.

    As in Transformer Engine (`amax_epsilon=0`), amax has no floor; scales stop at the largest
    float32.
    """

    def cast(self, operand: Operand, x: Tensor, dim: int) -> Quantized:
        fmt = self.formats[operand]
        tile = (BLOCK, BLOCK) if operand == "w" else along(dim, BLOCK)
        blocks = split(x.float(), tile)
        # An amax of max / FLOAT_MAX at least: scales up to FLOAT_MAX.
        scale = scale_from_amax(block_amax(blocks), fmt, pow2=self.pow2, inverse=1 / FLOAT_MAX)
        codes = to_codes(blocks * widen(scale), fmt)
        # 1 in place of a scale over those of the blocks
        return self.quantized(operand, join(codes, x), _one(x), scale.reciprocal(), tile)


class MxRule(Rule):
    """32 values along the contracted dimension share an E8M0 scale."""

    def cast(self, operand: Operand, x: Tensor, dim: int) -> Quantized:
        fmt = self.formats[operand]
        tile = along(dim, MX_BLOCK)
        blocks = split(x.float(), tile)
        inverse, scale = e8m0_scales(block_amax(blocks), fmt)
        codes = to_codes(blocks * widen(scale), fmt)
        return self.quantized(operand, join(codes, x), _one(x), inverse, tile)


def e8m0_scales(amax: Tensor, fmt: Format) -> tuple[Tensor, Tensor]:
    """Inverse scale and scale of MX blocks: 2^e and 2^-e with e = ceil(log2(amax / max)).

    Rounding up keeps the largest value from saturating (the OCP specification rounds down). As in
    NVIDIA's kernels, blocks below 2^-127 are multiplied by 1, that is, flushed to zero, and an
    infinite amax gives the largest scale.
    """
    low, high = E8M0_EXPONENTS
    mantissa, exponent = torch.frexp(amax / fmt.max)  # = mantissa · 2^exponent, in [0.5, 1)
    exponent = exponent - (mantissa == 0.5).int()  # a power of two needs no rounding up
    exponent = torch.where(amax == 0, low, torch.where(amax.isinf(), high, exponent))
    exponent = exponent.clamp(low, high)
    one = torch.where(amax.isnan(), torch.nan, torch.ones_like(amax))  # a NaN reaches both scales
    scale = torch.where(exponent == low, one, torch.ldexp(one, -exponent))
    return torch.ldexp(one, exponent), scale


class NvRule(Rule):
    """16 values share an E4M3 scale, under one float32 scale per tensor.

    Attributes:
        generator: source of stochastic rounding, separate from torch's own, so that dropout and
            data order match the high-precision run.
    """

    def __init__(self, precision: PrecisionConfig, generator: Randomness) -> None:
        super().__init__(precision)
        self.hadamard = constants.HADAMARD
        self.stochastic = constants.STOCHASTIC_ROUNDING
        self.generator = generator

    def cast(self, operand: Operand, x: Tensor, dim: int) -> Quantized:
        tile = (NV_BLOCK, NV_BLOCK) if operand == "w" else along(dim, NV_BLOCK)
        if self.hadamard and dim == 0 and operand != "w":  # contracts tokens: an operand of wgrad
            x = transform(x)
        # A transformed x, to whose M (padded to a multiple of 16) `join` below cuts the codes.
        blocks = split(x.float(), tile)
        largest = block_amax(blocks)
        inverse, block, scale = nvfp4_scales(largest)
        scaled_blocks = blocks * widen(scale)
        noise = None
        if operand == "g" and self.stochastic:
            noise = self.generator.uniform(scaled_blocks)
        codes = to_codes(scaled_blocks, E2M1, noise, saturate=True)  # the block scale was rounded
        return self.quantized(operand, join(codes, x), inverse, block, tile)


def nvfp4_scales(amax: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Scales of NVFP4 blocks: x ≈ code · block · inverse, and code = round(x · scale).

    Returns:
        `inverse`, a float32 scalar: amax of the tensor over 6 · 448; `block`, numbers of E4M3, and
        `scale`, both float32 and of the shape of `amax`, the largest magnitude of each block.
    """
    largest = amax.max()
    # Scales of blocks, amax · encode / 6, then reach up to the 448 of E4M3.
    encode = torch.full_like(largest, E4M3.max * E2M1.max).div_(largest).clamp_(max=FLOAT_MAX)
    encode = torch.where(encode == 0, 1.0, encode)  # an infinite amax: no infinite inverse
    # Not `/ 6`, which rounds differently: the kernels multiply by the reciprocal.
    block = round_to(amax * (encode * (1 / E2M1.max)), E4M3)
    inverse = encode.reciprocal()
    return inverse, block, (block * inverse).reciprocal().clamp(max=FLOAT_MAX)  # block 0: all zeros


class Randomness:
    """Generator for stochastic rounding, seeded once from torch's."""

    def __init__(self) -> None:
        self._generator: torch.Generator | None = None
        self._state: Tensor | None = None

    def uniform(self, like: Tensor) -> Tensor:
        """Numbers in [0, 1), float32, of the shape and device of `like`."""
        if self._generator is None or self._generator.device != like.device:
            self._generator = torch.Generator(like.device)
            rank = dist.get_rank() if dist.is_initialized() else 0  # independent over processes
            self._generator.manual_seed(torch.initial_seed() + rank)
            if self._state is not None:
                # A restored state waits for the first number, which tells the device.
                self._generator.set_state(self._state)
        return torch.rand(
            like.shape, generator=self._generator, device=like.device, dtype=torch.float32
        )

    @property
    def state(self) -> Tensor | None:
        """The state to store in a checkpoint, None before the first number."""
        return self._state if self._generator is None else self._generator.get_state()

    def restore(self, state: Tensor) -> None:
        """Resume from a stored state."""
        self._generator, self._state = None, state.cpu()


_RULES: dict[str, type[Rule]] = {
    "tensorwise": TensorwiseRule,
    "rowwise": RowwiseRule,
    "rowwise_with_gw_hp": RowwiseRule,
    "blockwise": BlockwiseRule,
    "mxfp8": MxRule,
}


def make_rule(precision: PrecisionConfig, randomness: Randomness | None = None) -> Rule:
    """Rule of a precision; delayed scaling has state, and its engine makes a `DelayedRule`."""
    if precision.facts.is_random:
        return NvRule(precision, randomness or Randomness())
    return _RULES[precision.scaling](precision)


def _one(x: Tensor) -> Tensor:
    return torch.ones((), dtype=torch.float32, device=x.device)


# Delayed scaling: a tensor's scale comes from the amaxes of earlier micro-steps.
#
# The scale is known before the tensor is, so cast and amax share one pass. As in Transformer Engine
# (`FP8GlobalStateManager.reduce_and_update_fp8_tensors`), every cast of a micro-step uses the scale
# of its beginning and records its amax; the last `amax_history_len` amaxes set the next scale. TE
# updates at the end of forward and keeps old scales for recomputation; we update at the beginning
# of the next training forward: the scales are the same, and a checkpointed layer recomputed in
# backward records the same amaxes again, which changes nothing.
#
# After two forwards and one backward through both, TE advances the gradients' history twice, we
# once, with the larger amax.

UNSEEN = -1.0


class DelayedState:
    """Amax history and scales of every operand of every delayed-scaling layer.

    Attributes:
        history: float32 [amax_history_len, 3 · layers], newest first after each `advance`.
        current: float32 [3 · layers], amaxes of the running micro-step; `UNSEEN` without one.
        scale: float32 [3 · layers], in use during the running micro-step.
    """

    def __init__(self, layers: int, precision: PrecisionConfig) -> None:
        self.formats, self.pow2 = formats_of(precision), precision.pow2_scales
        self.in_bf16 = multiply_in_bf16(precision)
        wide = torch.float32  # whatever a script has made torch's default
        self.largest = torch.tensor([self.formats[o].max for o in OPERANDS] * layers, dtype=wide)
        self.margin = precision.margin
        self.algorithm = precision.amax_compute_algo
        self.reduce = precision.reduce_amax
        self.history = torch.zeros(precision.amax_history_len, 3 * layers, dtype=wide)
        self.current = torch.full((3 * layers,), UNSEEN, dtype=wide)
        self.scale = torch.ones(3 * layers, dtype=wide)
        self.steps = 0

    def to(self, device: torch.device) -> None:
        """Move the state to the model's device."""
        if self.scale.device != device:
            with torch.inference_mode(False):  # training writes into them
                for name in ("largest", "history", "current", "scale"):
                    setattr(self, name, getattr(self, name).to(device))

    @torch.no_grad()
    def advance(self) -> None:
        """End a micro-step: the recorded amaxes enter the history and the scales follow.

            scale = max / (window · 2^margin)

        As in TE (`delayed_scaling.cu`), an operand that was not seen (an idle expert, a gradient
        without a backward) or was all zeros keeps window and scale: else `amax_history_len` such
        steps would forget its range, and the next real tensor would saturate. One whose window has
        an infinity keeps its scale. A NaN counts as zero.
        """
        if self.steps:
            if self.reduce and dist.is_initialized() and dist.get_world_size() > 1:
                # UNSEEN is below any amax, so one process that saw the operand is enough.
                dist.all_reduce(self.current, op=dist.ReduceOp.MAX)
            rolled = self.history.roll(1, 0)  # the oldest comes to row 0, and is overwritten
            rolled[0] = self.current
            self.history = torch.where(self.current > 0, rolled, self.history)
            window = self.history.amax(0) if self.algorithm == "max" else self.history[0]
            usable = (window > 0) & window.isfinite()
            # Clamped, as a tiny amax would give an infinite scale.
            new = (self.largest / window / 2**self.margin).clamp(max=FLOAT_MAX)
            new = floor_pow2(new) if self.pow2 else new
            self.scale = torch.where(usable, new, self.scale)
            self.current = torch.full_like(self.current, UNSEEN)
        self.steps += 1


class DelayedRule(Rule):
    """The rule of one layer: three columns of the run's `DelayedState`."""

    reuses = True

    def __init__(self, state: DelayedState, row: int) -> None:
        self.state, self.row = state, row
        self.formats, self.in_bf16 = state.formats, state.in_bf16
        self.used_in: int | None = None  # forward pass of the last use

    def index(self, operand: Operand) -> int:
        """The operand's column in the state."""
        return 3 * self.row + OPERANDS.index(operand)

    def scale_in_force(self, operand: Operand) -> Tensor:
        """The scale of the running micro-step, a float32 scalar."""
        return self.state.scale[self.index(operand)]

    def cast(self, operand: Operand, x: Tensor, dim: int) -> Quantized:
        """Codes with the scale of the step's beginning; records the amax."""
        state, index = self.state, self.index(operand)
        state.to(x.device)
        # Not `maximum`: a NaN would hide the other amaxes of the micro-step.
        state.current[index] = torch.fmax(state.current[index].clamp(min=0), amax(x))
        scale = state.scale[index]
        codes = to_codes(scaled(x, scale), self.formats[operand], saturate=True)
        return self.quantized(operand, codes, scale.reciprocal())
