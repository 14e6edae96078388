"""Codes from a file: which there are, and whether they can be used as they are.

A file of FP8 weights is believed in nothing. NaN codes and infinite scales would be in every
output; scales of another shape, taken by broadcasting, would make another model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from finetune.errors import StorageNotComputeError
from finetune.precision.layouts import refuse_layout
from finetune.precision.numerics import E4M3
from finetune.precision.storage import Fp8Bits
from finetune.precision.tiles import slab_rows

NAN = 0x7F


def scale_shapes(files: list[str], suffix: str) -> dict[str, tuple[int, ...] | None]:
    """Name of each E4M3 tensor in the files -> shape of its scales, None where there are none.

    Only headers are read.

    Args:
        files: paths of safetensors.
        suffix: what stands for `.weight` in the name of its scales.
    """
    from safetensors import safe_open

    codes: list[str] = []
    scales: dict[str, tuple[int, ...]] = {}
    for file in files:
        if not file.endswith(".safetensors"):
            raise refuse_layout(file.rpartition("/")[2], "only safetensors are read")
        with safe_open(file, framework="pt") as opened:
            for key in opened.keys():  # noqa: SIM118  not a dict
                part = opened.get_slice(key)
                if key.endswith(suffix):
                    scales[key.removesuffix(suffix)] = tuple(part.get_shape())
                elif part.get_dtype() == "F8_E4M3":
                    codes.append(key)
    return {key: scales.get(key.removesuffix(".weight")) for key in codes}


def settle(name: str, module: Any) -> None:
    """Make what came from a file what a stored layer holds, or refuse it.

    Args:
        name: of the layer, for the error.
        module: a stored layer, whose weight may show as `torch.float8_e4m3fn` and whose scales may
            have lost or gained a dimension.

    Raises:
        StorageNotComputeError: codes or scales that are NaN, of another type or number.
    """
    held: Tensor = module.weight
    if held.dtype is E4M3.dtype:
        module.weight = Fp8Bits(held.detach().view(torch.uint8))
    elif held.dtype is not torch.uint8:
        raise refuse_layout(f"{name} in {held.dtype}", "the layer was to be E4M3 codes")
    n, k = module.bits.shape
    rows, columns = module.stored_tile
    grid, scale = (-(-n // rows), -(-k // columns)), module.weight_scale
    if scale.numel() != grid[0] * grid[1]:
        raise refuse_layout(f"{name} with scales {tuple(scale.shape)}", f"{grid} were expected")
    if scale.dtype is not torch.float32:
        raise refuse_layout(f"{name} with scales in {scale.dtype}", "scales are floating point")
    module.weight_scale = scale.reshape(grid)
    if not torch.isfinite(module.weight_scale).all():
        raise StorageNotComputeError(
            f"{name!r} has NaN or infinity in its weight or scales",
            where="checkpoint",
            why="it would be in every output of the model",
            fix="take another copy of the checkpoint",
        )
    parts = module.bits.detach().split(slab_rows((n, k), scale.device))
    bad = sum(int(((part & NAN) == NAN).sum()) for part in parts)
    if bad:
        raise StorageNotComputeError(
            f"{name!r} has {bad} codes of NaN (0x7F, 0xFF)",
            where="checkpoint",
            why="E4M3 has no infinities: whoever wrote it overflowed",
            fix="take another copy of the checkpoint, or quantise the 16-bit one",
        )
