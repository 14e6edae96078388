"""The random Hadamard transform: outliers are spread over a block before it is cast to four bits.

A block of 16 values shares one scale, which its largest value sets; next to an outlier the others
become zero. Multiplying the block by an orthogonal matrix with all entries ±1/4 makes every value a
mixture of all sixteen, so that no one stands out. Random signs in front keep structured inputs from
lining up with a row of the matrix. Both operands of a product are transformed along the dimension
that is contracted, and (Hx)ᵀ(Hg) = xᵀg: nothing has to be undone.

It is part of a cast, on hardware fused with it, and no matrix multiplication of the layer. So it is
an operator of its own, whose inside a dispatch mode (the proof's witness) does not see. Sources:
arXiv 2509.25149, section 4.2; Transformer Engine's `reference_nvfp4.py`.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

SIZE = 16
SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
"""Random once, then fixed, as in Transformer Engine: both operands must use the same."""


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
    with torch.autocast(x.device.type, enabled=False):
        turned = hadamard_matrix(x.dtype, x.device).t() @ x.unflatten(0, (-1, SIZE))
    return turned.flatten(0, 1)


_library.impl("hadamard", _hadamard, "CompositeExplicitAutograd")
_library.impl("hadamard", torch.empty_like, "Meta")


def transform(x: Tensor) -> Tensor:
    """The Hadamard transform of every 16 rows of a matrix [M, C], in its own type.

    M is padded with zeros to a multiple of 16, which adds nothing to a product over M.
    """
    missing = -x.shape[0] % SIZE
    if missing:
        x = torch.nn.functional.pad(x, (0, 0, 0, missing))
    return torch.ops.finetune.hadamard(x)
