"""A double of Transformer Engine's compiled library, `transformer_engine_torch`, on a CPU.

The engine's own Python (`loading`) does everything else: recipes, autocast, modules, autograd,
quantized tensors, checkpointing, the bookkeeping of delayed scaling. It calls down to

    generic_gemm                                   every product, FP8, FP4 or BF16
    quantize, bgrad_quantize                       casts: per tensor (delayed, current), per block,
                                                   MXFP8, NVFP4; row-wise and column-wise codes
    fused_amax_and_scale_update_after_reduction    delayed scaling: rolls windows, sets scales
    fp8_transpose, create_empty_quantized_tensor, dequantize

and every other name raises NotImplementedError when it is called. Codes and scales have the types,
shapes and layouts of the library (the engine's Python checks some of them and dequantizes several),
except that scales are never swizzled. It is strict where the library is: a product reads the codes
of the direction that it contracts, which must be there; sizes are multiples of 16.

What it cannot show: bits of a GPU (order of summation, fast accumulation, the split accumulator),
stochastic rounding (it rounds to nearest), speed, memory, userbuffers, CUDA graphs, attention,
fused normalization, FP8 outputs. Numbers of enums, shapes of outputs, amaxes that enter row 0 of
their history by maximum and windows that an idle operand does not roll are those of the sources
(2.20.0.dev0: `transformer_engine.h`, `gemm.cpp`, `quantize_fp8.cuh`, `delayed_scaling.cu`).
"""

from __future__ import annotations

import enum
import functools
import importlib.machinery
import math
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import make_contiguous_strides_for
from torch.utils._python_dispatch import _disable_current_modes

from finetune.precision.numbers import formats, tiles
from finetune.precision.numbers.formats import E2M1, E4M3, E5M2
from finetune.precision.numbers.scaling import e8m0_scales, nvfp4_scales

NAME = "transformer_engine_torch"
E8M0_BIAS = 127


DType = enum.IntEnum(  # the engine's Python asserts that it has the same names
    "DType",
    {"kByte": 0, "kInt32": 2, "kFloat32": 4, "kFloat16": 5, "kBFloat16": 6, "kFloat8E4M3": 7,
     "kFloat8E5M2": 8, "kFloat4E2M1": 10},
)  # fmt: skip
TORCH = {DType.kFloat32: torch.float32, DType.kFloat16: torch.float16}
TORCH |= {DType.kBFloat16: torch.bfloat16}
FORMAT = {DType.kFloat8E4M3: E4M3, DType.kFloat8E5M2: E5M2, DType.kFloat4E2M1: E2M1}

_GEMMS = ("GEMM1", "GEMM2", "GEMM3")
_FORWARD = [f"{gemm}_{name}" for gemm in _GEMMS for name in ("INPUT", "WEIGHT", "OUTPUT")]
_BACKWARD = [f"GRAD_{name}{gemm[-1]}" for gemm in _GEMMS for name in ("OUTPUT", "INPUT")]
FP8FwdTensors = enum.IntEnum("FP8FwdTensors", _FORWARD, start=0)
FP8BwdTensors = enum.IntEnum("FP8BwdTensors", _BACKWARD, start=0)
NVTE_Fused_Attn_Backend = enum.IntEnum(
    "NVTE_Fused_Attn_Backend",
    {"NVTE_No_Backend": -1, "NVTE_F16_arbitrary_seqlen": 1, "NVTE_FP8": 2},
)


class _Names(type):
    """Any attribute is a number: enums of attention and communication, which nothing here reads."""

    def __getattr__(cls, name: str) -> int:
        if name.startswith("__"):
            raise AttributeError(name)
        return hash(name)


def _past_the_dispatcher(function: Callable[..., Any]) -> Callable[..., Any]:
    """Run as a compiled kernel does: unseen by autograd, autocast and dispatch modes."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad(), torch.autocast("cpu", enabled=False), _disable_current_modes():
            return function(*args, **kwargs)

    return wrapped


def _rows(x: Tensor) -> Tensor:
    """[..., K] as a matrix [M, K]."""
    return x.reshape(-1, x.shape[-1])


# ------------------------------------------------------------------------------------------ casts


@_past_the_dispatcher
def create_empty_quantized_tensor(
    quantizer: Any, shape: Any, dtype: torch.dtype, device: Any = None, pin_memory: bool = False
) -> Any:
    """A tensor of zeros of the quantizer's kind, with the buffers that its usages ask for."""
    from transformer_engine.pytorch import Float8CurrentScalingQuantizer, Float8Quantizer

    # The engine describes its buffers, for torch.compile. Delayed scaling has those of current.
    delayed = isinstance(quantizer, Float8Quantizer)
    kind = Float8CurrentScalingQuantizer if delayed else type(quantizer)
    shape, meta = tuple(shape), kind.storage_metadata(quantizer, dtype)
    if "with_gemm_swizzled_scales" in meta["nontensor_kwargs"]:
        meta["nontensor_kwargs"]["with_gemm_swizzled_scales"] = False
    buffers = {
        name: torch.zeros(size, dtype=kind_of)
        for name, (size, kind_of) in kind.inner_tensor_specs(quantizer, shape).items()
    }
    context = meta | {"is_tensor": not quantizer.internal, "requires_grad": False}
    strides = make_contiguous_strides_for(shape)
    return meta["cls"].__tensor_unflatten__(buffers, context, shape, strides)


@_past_the_dispatcher
def quantize(x: Tensor, quantizer: Any, output: Any = None, noop: Tensor | None = None) -> Any:
    """Cast `x`, into `output` if there is one."""
    from transformer_engine import pytorch as te

    if noop is not None and bool(noop):
        return output
    if output is None:
        output = create_empty_quantized_tensor(quantizer, x.shape, x.dtype)
    casts = {
        te.Float8Quantizer: _per_tensor,
        te.Float8CurrentScalingQuantizer: _per_tensor,
        te.Float8BlockQuantizer: _per_block,
        te.MXFP8Quantizer: _per_32,
        te.NVFP4Quantizer: _per_16,
    }
    casts[type(quantizer)](_rows(x.detach()).float(), quantizer, output)
    return output


def _put(buffer: Tensor, values: Tensor) -> None:
    """Write bit patterns or scales into a buffer whose padding stays zero."""
    if values.dtype is not buffer.dtype:  # FP8 patterns, into bytes
        values = values.view(buffer.dtype)
    if values.numel() == buffer.numel():
        buffer.copy_(values.reshape(buffer.shape))
    else:
        buffer[: values.shape[0], : values.shape[1]] = values


def _per_tensor(x: Tensor, quantizer: Any, out: Any) -> None:
    """One scale: the state's (delayed), or that of this tensor (current)."""
    fmt, amax = FORMAT[DType(quantizer.dtype)], formats.amax(x)
    if hasattr(quantizer, "scale"):
        scale = quantizer.scale
        quantizer.amax.copy_(torch.maximum(quantizer.amax, amax))
    else:
        amax = amax.clamp(min=quantizer.amax_epsilon)
        scale = formats.scale_from_amax(amax, fmt, pow2=quantizer.force_pow_2_scales)
    codes = formats.cast(x, scale, fmt)
    out._scale_inv.copy_(scale.reciprocal().reshape(1))
    if out._data is not None:
        _put(out._data, codes)
    if out._transpose is not None:
        _put(out._transpose, codes.t().contiguous())
        out._transpose_invalid = False


def _per_block(x: Tensor, quantizer: Any, out: Any) -> None:
    """Blocks of 128 x 128, or of 1 x 128 along the contracted dimension."""
    fmt = FORMAT[DType(quantizer.dtype)]
    for way, matrix in (("rowwise", x), ("columnwise", x.t())):
        data = getattr(out, f"_{way}_data")
        if data is None:
            continue
        tile = (128, 128) if quantizer.block_scaling_dim == 2 else (1, 128)
        blocks = tiles.split(matrix, tile)
        amax = tiles.block_amax(blocks).clamp(min=quantizer.amax_epsilon)
        scale = formats.scale_from_amax(amax, fmt, pow2=quantizer.force_pow_2_scales)
        codes = formats.cast(blocks, tiles.widen(scale), fmt)
        _put(data, tiles.join(codes, matrix).contiguous())
        inverse = scale.reciprocal()  # [R, C / 128]; stored [C / 128, R] in the one-row case
        _put(getattr(out, f"_{way}_scale_inv"), inverse if tile[0] > 1 else inverse.t())


def _per_32(x: Tensor, quantizer: Any, out: Any) -> None:
    """32 numbers along the contracted dimension share a power of two; nothing is transposed."""
    fmt = FORMAT[DType(quantizer.dtype)]
    for way, tile in (("rowwise", (1, 32)), ("columnwise", (32, 1))):
        data = getattr(out, f"_{way}_data")
        if data is None:
            continue
        blocks = tiles.split(x, tile)
        inverse, scale = e8m0_scales(tiles.block_amax(blocks), fmt)
        codes = formats.cast(blocks, tiles.widen(scale), fmt)
        _put(data, tiles.join(codes, x).contiguous())
        exponent = inverse.log2().round().int() + E8M0_BIAS
        _put(getattr(out, f"_{way}_scale_inv"), exponent.to(torch.uint8))


def _per_16(x: Tensor, quantizer: Any, out: Any) -> None:
    """16 numbers (16 x 16 in weights) share an E4M3 scale; what contracts tokens is transformed."""
    for way, matrix in (("rowwise", x), ("columnwise", x.t())):
        data = getattr(out, f"_{way}_data")
        if data is None:
            continue
        if way == "columnwise" and quantizer.with_rht:
            matrix = _hadamard(matrix, quantizer.rht_matrix)
        tile = (16, 16) if quantizer.with_2d_quantization else (1, 16)
        blocks = tiles.split(matrix, tile)
        _, block, scale = nvfp4_scales(tiles.block_amax(blocks))
        nibbles = tiles.join(formats.cast(blocks, tiles.widen(scale), E2M1), matrix)
        _put(data, nibbles[:, ::2] | nibbles[:, 1::2] << 4)
        rows = block.repeat_interleave(tile[0], 0)  # the library keeps a scale a row
        _put(getattr(out, f"_{way}_scale_inv"), rows.to(E4M3.dtype).view(torch.uint8))
        getattr(out, f"_amax_{way}").copy_(formats.amax(matrix).reshape(1))


def _hadamard(x: Tensor, matrix: Tensor) -> Tensor:
    """Every 16 numbers of a row times the engine's matrix, in BF16."""
    turned = x.to(matrix.dtype).unflatten(1, (-1, 16)) @ matrix
    return turned.flatten(1).float()


@_past_the_dispatcher
def bgrad_quantize(x: Tensor, quantizer: Any) -> tuple[Tensor, Any]:
    """Gradient of a bias, and the cast gradient."""
    return _rows(x.detach()).float().sum(0).to(x.dtype), quantize(x, quantizer)


@_past_the_dispatcher
def fp8_transpose(data: Tensor, dtype: Any, *, out: Tensor | None = None) -> Tensor:
    """[..., K] bytes as [K, ...]."""
    turned = data.movedim(-1, 0).contiguous()
    return turned if out is None else out.copy_(turned)


@_past_the_dispatcher
def dequantize(x: Any, dtype: Any) -> Tensor:
    """The numbers that row-wise codes stand for."""
    return _values(x, rowwise=True).reshape(x.size()).to(TORCH[DType(dtype)])


def _values(x: Any, *, rowwise: bool) -> Tensor:
    """An operand's numbers in float32, [M, K], from the codes of one direction alone."""
    from transformer_engine import pytorch as te

    if isinstance(x, te.Float8TensorStorage):
        return _values_per_tensor(x, rowwise)
    way = "rowwise" if rowwise else "columnwise"
    data, scale = getattr(x, f"_{way}_data"), getattr(x, f"_{way}_scale_inv")
    assert data is not None, f"a product reads {way} codes that were not made"
    if isinstance(x, te.Float8BlockwiseQTensorStorage):  # the engine has a CPU path of its own
        other = "columnwise" if rowwise else "rowwise"
        only = {f"{other}_data": None, f"{other}_scale_inv": None}
        one = te.Float8BlockwiseQTensorStorage(**(x.get_metadata() | only))
        return _rows(one.dequantize(dtype=torch.float32))
    if isinstance(x, te.MXFP8TensorStorage):
        codes = _rows(data).view(FORMAT[DType(x._fp8_dtype)].dtype).float()
        tile = (1, 32) if rowwise else (32, 1)
        block = torch.exp2(scale.float() - E8M0_BIAS)
        rows, columns = (math.ceil(n / t) for n, t in zip(codes.shape, tile, strict=True))
        return tiles.times_blocks(codes, block[:rows, :columns], tile)
    assert isinstance(x, te.NVFP4TensorStorage), type(x)
    grid = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    packed = _rows(data).int()
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(1)
    codes = torch.cat((grid, -grid))[codes]
    block = scale.view(E4M3.dtype).float()[: codes.shape[0], : codes.shape[1] // 16]
    amax = getattr(x, f"_amax_{way}")
    values = tiles.times_blocks(codes, block, (1, 16)) * (amax / (E2M1.max * E4M3.max))
    return values if rowwise else values.t()


def _values_per_tensor(x: Any, rowwise: bool) -> Tensor:
    from transformer_engine.pytorch.utils import is_non_tn_fp8_gemm_supported

    # Before Blackwell, FP8 products contract rows of memory alone, so the other way is a copy.
    whole = rowwise or is_non_tn_fp8_gemm_supported()
    data = x._data if whole else x._transpose
    assert data is not None, "a product reads codes that were not made"
    assert whole or not x._transpose_invalid, "a product reads a transpose that is out of date"
    matrix = _rows(data) if whole else data.flatten(1).t()
    return matrix.view(FORMAT[DType(x._fp8_dtype)].dtype).float() * x._scale_inv


# --------------------------------------------------------------------------------------- products


@_past_the_dispatcher
def generic_gemm(
    a: Any, transa: bool, b: Any, transb: bool, out: Any, quantizer: Any, out_dtype: Any,
    bias: Tensor | None, bias_dtype: Any, gelu: bool, gelu_in: Any, grad: bool, workspace: Any,
    workspace_size: int, accumulate: bool, use_split_accumulator: bool, *, comm_overlap: Any = None,
    comm_type: Any = None, extra_output: Any = None, bulk_overlap: bool = False,
    alpha: float = 1.0, beta: float | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """`op(B) @ op(A)`, row-major: TN is fprop, NN dgrad, NT wgrad; bias or its gradient besides."""
    assert quantizer is None, "the double makes no quantized outputs"
    assert not gelu, "the double has no GELU in its epilogue"
    assert comm_overlap is None, "the double has no userbuffers"
    low = [hasattr(x, "_fp8_dtype") or hasattr(x, "_fp4_dtype") for x in (a, b)]
    assert low[0] is low[1], "both operands are quantized, or none"
    # A is read along rows if it is transposed (its last dimension is contracted), B if it is not.
    left = _values(b, rowwise=not transb) if low[1] else _rows(b)
    right = _values(a, rowwise=transa) if low[0] else _rows(a)
    left, right = left.t() if transb else left, right.t() if transa else right
    if low[0]:
        sizes = (*left.shape, right.shape[1])
        assert not any(size % 16 for size in sizes), f"{sizes}: not multiples of 16"
    y = left @ right  # [M, K] @ [K, N]
    bias_grad = None
    if bias is not None and not grad:
        y = y + bias.to(y.dtype)
    elif bias is not None:
        bias_grad = left.sum(1).to(bias.dtype)  # wgrad contracts the tokens of B = g
    dtype = TORCH[DType(out_dtype)] if out_dtype is not None else y.dtype
    if not transb and len(b.size()) > 2:
        y = y.reshape(*b.size()[:-1], y.shape[1])
    if out is None:
        out = y.to(dtype)
    else:
        out.copy_(y.reshape(out.shape) * alpha + (out * beta if accumulate else 0))
    return out, bias_grad, None, extra_output


# -------------------------------------------------------------------------------- delayed scaling


@_past_the_dispatcher
def fused_amax_and_scale_update_after_reduction(
    amax: Tensor, histories: list[Tensor], scales: list[Tensor], algorithm: str, dtype: Any,
    margin: int,
) -> None:  # fmt: skip
    """Take reduced amaxes into each window and set the scales of the next step.

    A window whose newest amax is zero (idle, or all zeros) stays as it is, and so does its scale.
    """
    largest = FORMAT[DType(dtype)].max
    parts = amax.split([history.shape[1] for history in histories])
    for last, history, scale in zip(parts, histories, scales, strict=True):
        rolled = history.roll(-1, 0)
        rolled[-1], newest = last, last
        known = rolled.nan_to_num(nan=0.0, posinf=math.inf)  # as `fmaxf` has it
        window = known.amax(0) if algorithm == "max" else newest
        rolled[0] = 0.0
        seen = last != 0
        history.copy_(torch.where(seen, rolled, history))
        usable = seen & (window > 0) & window.isfinite()
        new = (largest / window / 2**margin).clamp(max=torch.finfo(torch.float32).max)
        scale.copy_(torch.where(usable, new, scale))


# ----------------------------------------------------------------------------------------- module


def make() -> types.ModuleType:
    """The module under which the engine imports all this."""
    made = types.ModuleType(NAME, __doc__)
    made.__spec__ = importlib.machinery.ModuleSpec(NAME, None)
    here = (
        DType, FP8FwdTensors, FP8BwdTensors, NVTE_Fused_Attn_Backend, generic_gemm, quantize,
        bgrad_quantize, fp8_transpose, dequantize, create_empty_quantized_tensor,
        fused_amax_and_scale_update_after_reduction,
    )  # fmt: skip
    made.__dict__.update({thing.__name__: thing for thing in here})
    constants = {
        "get_cublasLt_version": 130000, "get_cudnn_version": 91500,
        "device_supports_multicast": False, "ubuf_built_with_mpi": False,
    }  # fmt: skip
    made.__dict__.update({name: lambda *_, v=value: v for name, value in constants.items()})

    def absent(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name.startswith(("NVTE", "CommOverlap", "FP8TensorMeta")):
            return _Names(name, (), {})

        def call(*_: Any, **__: Any) -> Any:
            raise NotImplementedError(f"the double of {NAME} has no {name}")

        return call

    made.__getattr__ = absent  # type: ignore[method-assign]
    return made
