"""CUDA's autocast, on tensors without memory.

`torch.autocast` has its lists per device, and none for the meta device. This mode casts as the
CUDA lists do (docs.pytorch.org/docs/stable/amp.html): products to the low type, with the copy of a
trainable float32 weight kept until the end of the context; a few functions to float32.
Only what Python calls passes here, so backward is left alone, as it is by the real one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

_TO_LOW: set[Callable[..., Any]] = {
    F.linear, torch.matmul, torch.mm, torch.bmm, torch.addmm, torch.baddbmm, torch.addbmm, torch.mv,
    torch.einsum, torch.conv1d, F.conv1d, Tensor.matmul, Tensor.mm, Tensor.bmm, Tensor.__matmul__,
    Tensor.__rmatmul__, torch.chain_matmul, torch.linalg.multi_dot, F.scaled_dot_product_attention,
}  # fmt: skip
_TO_FLOAT32: set[Callable[..., Any]] = {
    F.softmax, torch.softmax, F.log_softmax, torch.log_softmax, F.cross_entropy, F.nll_loss,
    F.layer_norm, torch.layer_norm, F.group_norm, torch.pow, Tensor.pow, Tensor.__pow__, torch.exp,
    Tensor.exp, torch.log, Tensor.log, torch.rsqrt, Tensor.rsqrt, torch.sum, Tensor.sum, torch.norm,
    Tensor.norm, torch.linalg.vector_norm, torch.cumsum, Tensor.cumsum, torch.reciprocal,
    Tensor.reciprocal, F.softplus, torch.cosh, torch.prod, torch.logsumexp,
}  # fmt: skip


class CudaAutocast(TorchFunctionMode):
    """Casts operands while it is entered.

    Args:
        dtype: what products are done in.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}
        self._depth = 0

    def __enter__(self) -> CudaAutocast:
        self._depth += 1
        return super().__enter__()

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        self._depth -= 1
        if not self._depth:
            self._copies.clear()

    def _low(self, x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.dtype.is_floating_point or x.dtype == self.dtype:
            return x
        if x.dtype is torch.float32 and x.is_leaf and x.requires_grad and torch.is_grad_enabled():
            kept = self._copies.get(id(x))
            if kept is None:
                kept = self._copies[id(x)] = (x, x.to(self.dtype))
            return kept[1]
        return x.to(self.dtype)

    @staticmethod
    def _high(x: Any) -> Any:
        low = isinstance(x, Tensor) and x.dtype in (torch.bfloat16, torch.float16)
        return x.float() if low else x

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        cast = self._low if func in _TO_LOW else self._high if func in _TO_FLOAT32 else None
        if cast is not None:
            args = tuple(
                type(a)(cast(x) for x in a) if type(a) in (list, tuple) else cast(a) for a in args
            )
            kwargs = {name: cast(x) for name, x in kwargs.items()}
        return func(*args, **kwargs)
