"""FP8 training in one file: what this folder does, without its settings, engines and guards.

A linear layer y = x Wᵀ is three GEMMs in training: fprop y = x Wᵀ, dgrad dx = g W, wgrad dW = gᵀ x.
Each operand is multiplied by a scale that puts its largest magnitude (amax) at the largest number
of its format, cast, multiplied, and the product divided by both scales. Activations and weights
take E4M3 (3 bits of mantissa, to 448), gradients E5M2 (2 bits, to 57,344; Micikevicius et al.,
arXiv 2209.05433). Here on any device: the codes are real FP8, and a GEMM multiplies their values
and adds them in float32; tensor cores may add with fewer digits (`constants.FAST_ACCUM`).

Nothing of the package imports this. `tests/precision/test_reading.py` trains with it and with the
package, in full and over a frozen base, and compares their losses to the last bit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

Quantized = tuple[Tensor, Tensor]  # codes and inverse scale, one or one a row: x ≈ codes · inverse


def cast(x: Tensor, fmt: torch.dtype, dim: int | None = None) -> Quantized:
    """Cast a matrix with one scale, or with one for each row whose amax is taken along `dim`."""
    top = torch.finfo(fmt).max
    amax = (x.abs().amax() if dim is None else x.abs().amax(dim, keepdim=True)).float()
    scale = torch.full_like(amax, top) / amax.clamp(min=top * 2.0**-126)  # zeros: a finite scale
    return (x.float() * scale).to(fmt), scale.reciprocal()


def gemm(a: Quantized, b: Quantized, dtype: torch.dtype) -> Tensor:
    """[M, K] @ [K, N]: accumulated in float32, scaled and rounded once, at the end."""
    return ((a[0].float() @ b[0].float()) * (a[1] * b[1])).to(dtype)


def transposed(a: Quantized) -> Quantized:
    """[M, K] -> [K, M], scales a row to scales a column."""
    return a[0].t(), a[1].t() if a[1].dim() else a[1]


class Trained(torch.autograd.Function):
    """y = x Wᵀ with one scale a tensor (tensorwise): the codes of fprop serve backward, too.

    A scale may leave a GEMM only along rows or columns that the GEMM keeps. One scale a tensor
    always may; with one a row, dgrad and wgrad would need the same matrix cast again.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:  # [M, K], [N, K] -> [M, N]
        x_codes, w_codes = cast(x, E4M3), cast(w, E4M3)
        ctx.save_for_backward(*x_codes, *w_codes)
        ctx.types = x.dtype, w.dtype
        return gemm(x_codes, transposed(w_codes), x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:  # [M, N] -> [M, K], [N, K]
        x, x_inverse, w, w_inverse = ctx.saved_tensors
        g_codes = cast(g, E5M2)
        dx = gemm(g_codes, (w, w_inverse), g.dtype)
        dw = gemm(transposed(g_codes), (x, x_inverse), g.dtype)
        return dx.to(ctx.types[0]), dw.to(ctx.types[1])


class Frozen(torch.autograd.Function):
    """y = x Wᵀ of a stored weight with a scale a row (rowwise): no wgrad, a byte a number.

    dgrad sums over W's rows, so that their scales cannot wait for the end: they are folded into the
    gradient before it is cast, and W's codes serve both GEMMs. With a scale for each token the
    gradient has range enough in E4M3, and keeps its third bit.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, w_inverse: Tensor) -> Tensor:
        ctx.save_for_backward(w, w_inverse)
        return gemm(cast(x, E4M3, 1), transposed((w, w_inverse)), x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        w, w_inverse = ctx.saved_tensors
        folded = cast(g.float() * w_inverse.t(), E4M3, 1)
        return gemm(folded, (w, w_inverse.new_ones(())), g.dtype), None, None


class Fp8Linear(nn.Linear):
    """A linear layer that trains in FP8; evaluation stays in high precision."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] -> [..., N], in the type of autocast where it is on."""
        if not self.training:
            return super().forward(x)
        kind = x.device.type
        low = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        rows, w = x.reshape(-1, x.shape[-1]).to(low), self.weight
        y: Any = Trained.apply(rows, w) if w.requires_grad else Frozen.apply(rows, *self.codes())
        y = y if self.bias is None else y + self.bias.to(y.dtype)
        return y.view(*x.shape[:-1], -1)

    def codes(self) -> Quantized:
        """Codes of a frozen weight, made once."""
        if not hasattr(self, "_codes"):
            self._codes = cast(self.weight, E4M3, 1)
        return self._codes


HIGH = ("lm_head", "lora_")  # errors of the head enter the loss; adapters are small


def convert(model: nn.Module) -> list[str]:
    """Make every linear layer but `HIGH` an `Fp8Linear`, and say which.

    A module changes its class: parameters stay the objects that an optimizer, PEFT or FSDP know.
    """
    layers = {name: module for name, module in model.named_modules() if type(module) is nn.Linear}
    names = [name for name in layers if not any(word in name for word in HIGH)]
    for name in names:
        layers[name].__class__ = Fp8Linear
    return names
