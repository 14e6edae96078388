"""The random Hadamard transform of NVFP4, which spreads outliers over a block before it is cast.

16 values share a scale set by the largest, so next to an outlier the others become zero. An
orthogonal matrix of entries ±1/4 makes every value a mixture of all sixteen; random signs keep
structured inputs from lining up with a row. Both operands of a product are transformed along the
contracted dimension, and (Hx)ᵀ(Hg) = xᵀg: nothing has to be undone.

Hardware fuses it with the cast, and it is no GEMM of the layer: a separate operator hides it from
dispatch modes (the proof's witness). Sources: arXiv 2509.25149, section 4.2; Transformer Engine's
`reference_nvfp4.py`.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

SIZE = 16
SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
"""Signs drawn once and fixed, as in Transformer Engine: both operands must use the same."""


@functools.cache
def hadamard_matrix(dtype: torch.dtype, device: torch.device) -> Tensor:
    """`diag(SIGNS) · H / 4` for the Hadamard matrix H of size 16: orthogonal, [16, 16]."""
    matrix = torch.ones(1, 1, dtype=torch.float32, device=device)
    for _ in range(4):  # Sylvester's construction
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    signs = torch.tensor(SIGNS, dtype=torch.float32, device=device)
    return (signs[:, None] * matrix / SIZE**0.5).to(dtype)


_library = torch.library.Library("finetune", "FRAGMENT")
_library.define("hadamard(Tensor x) -> Tensor")


def _hadamard(x: Tensor) -> Tensor:
    # Autocast would compute a float32 x in BF16.
    with torch.autocast(x.device.type, enabled=False):
        # [16, 16] @ [M/16, 16, C]
        turned = hadamard_matrix(x.dtype, x.device).t() @ x.unflatten(0, (-1, SIZE))
    return turned.flatten(0, 1)


_library.impl("hadamard", _hadamard, "CompositeExplicitAutograd")
_library.impl("hadamard", torch.empty_like, "Meta")


def transform(x: Tensor) -> Tensor:
    """Hadamard transform of every 16 rows of a matrix [M, C], in its own dtype.

    M is padded with zeros to a multiple of 16, which adds nothing to a product over M.
    """
    missing = -x.shape[0] % SIZE
    if missing:
        x = torch.nn.functional.pad(x, (0, 0, 0, missing))
    return torch.ops.finetune.hadamard(x)
