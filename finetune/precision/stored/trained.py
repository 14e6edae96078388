"""Linear layers that train and hold FP8 codes alone, their masters in host memory (`masters`).

    fprop   y  = x̂ · ŵᵀ      dgrad   dx = ĝ · ŵ      wgrad   dW = ĝᵀ · x̂, which goes to the host

fprop and dgrad are those of a frozen weight: one copy of codes, with a scale for the tensor or one
for each row, which goes into the gradient first. With one for the tensor every operand has the
codes that it has where weights are on the device, so that losses are equal to the bit; with one for
each row dgrad has other scales than `rowwise` there, where it casts the weight once more, along its
other dimension.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from finetune.precision.engines.base import Fp8Mixin
from finetune.precision.engines.observers import in_backward
from finetune.precision.model.layers import is_conv1d
from finetune.precision.model.plan import LayerPlan
from finetune.precision.model.swap import Swapped
from finetune.precision.numbers.gemm import as_output, as_rows, compute_dtype
from finetune.precision.numbers.scaling import Operand, formats_of, multiply_in_bf16
from finetune.precision.numbers.weights import (
    Arithmetic,
    dequantizing,
    dgrad,
    fprop,
    of_type,
    tile_of,
    wgrad,
)
from finetune.precision.settings import PrecisionConfig
from finetune.precision.stored.frozen import FrozenEngine
from finetune.precision.stored.masters import Master, Masters


class TrainedLinear(torch.autograd.Function):
    """`y = x Wᵀ` by codes of W, whose gradient goes to a stand-in for W."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, x_codes: Tensor | None, x_inverse: Tensor | None, w: Tensor,
        bits: Tensor, inverse: Tensor, how: Arithmetic,
    ) -> Tensor:  # fmt: skip
        """x [M, K], its cast, w and bits [N, K] -> y [M, N] in the type of `x`."""
        ctx.save_for_backward(x if ctx.needs_input_grad[3] else None, bits, inverse)
        ctx.how, ctx.dtype = how, w.dtype
        return fprop(x, (x_codes, x_inverse), bits, inverse, how)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor):
        """g [M, N] -> dx [M, K], dw [N, K]."""
        x, bits, inverse = ctx.saved_tensors
        # As torchao's recipe has it: fewer digits in the sums of fprop alone.
        dx, dw, how = None, None, ctx.how._replace(fast_accum=False)
        if ctx.needs_input_grad[0]:
            dx = dgrad(g, bits, inverse, how)
        if ctx.needs_input_grad[3]:
            dw = of_type(wgrad(g, x, how), ctx.dtype)
        return dx, None, None, dw, None, None, None


class AwayMixin(Swapped):
    """Mixin of a module whose weight stays in host memory when the module moves.

    Attributes:
        fp8_master: the weight, and what stands for it on the device.
    """

    fp8_master: Master
    keeps_name = True

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        master, own = self.fp8_master, self._parameters["weight"]
        assert own is not None
        # What `fn` makes of a tensor on the device: `cuda()` moves it, `half()` changes its type.
        there = fn(torch.empty(0, dtype=own.dtype, device=master.masters.device))
        self._parameters["weight"] = None
        try:
            result = super()._apply(fn, recurse)
        finally:
            self._parameters["weight"] = own
        master.masters.move(there.device, there.dtype)
        return result


class CodedMixin(Fp8Mixin):
    """Forward of a linear layer that holds codes; evaluated in high precision, by its codes too.

    Attributes:
        fp8_how: arithmetic of its products.
        fp8_master: its codes, uint8 [N, K], and their inverse scales.
    """

    fp8_engine: CodedBackend
    fp8_how: Arithmetic
    fp8_master: Any

    def fp8_lent(self) -> Tensor:
        """What autograd takes for the weight [N, K]."""
        raise AssertionError("each mixin knows where its gradient goes")

    def forward(self, input: Tensor) -> Tensor:
        if not isinstance(self, CodedMixin):  # accelerate keeps a root's forward after a revert
            return type(self).forward(self, input)
        master, low = self.fp8_master, self.runs_low and input.numel() > 0
        w = self.fp8_lent()
        how, cast = self.fp8_how if low else dequantizing(self.fp8_how.tile), (None, None)
        if "fprop" not in how.high:
            cast = self.fp8_engine.cast(input, how, compute_dtype(input))
        if low:
            self.fp8_calls.count(input)
        given = as_rows(input), *cast, w, master.bits, master.inverse, how
        y = as_output(TrainedLinear.apply(*given), input, self.bias)
        if not low and input.numel():
            self.fp8_calls.watch(input, y)
        return y


class TrainedMixin(AwayMixin, CodedMixin):
    """The same of a layer whose master is in host memory."""

    keeps_name = False

    def fp8_lent(self) -> Tensor:
        master = self.fp8_master
        return master.handle if torch.compiler.is_compiling() else master.lend()


class TableMixin(AwayMixin):
    """Mixin of an embedding or a head, which reads the copy on the device."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with self.fp8_lent():
            return super().forward(*args, **kwargs)

    @contextlib.contextmanager
    def fp8_lent(self) -> Iterator[None]:
        """Context in which the weight is the copy: of a call of this module, or of the model.

        TRL's fused loss reads the weight of a head outside of any call of the head.
        """
        own = self._parameters
        if own["weight"] is not self.fp8_master.parameter:  # inside of such a context
            yield
            return
        self.__dict__["_parameters"] = own | {"weight": self.fp8_master.lend()}
        try:
            yield
        finally:
            self.__dict__["_parameters"] = own


class LayerMixin(Swapped):
    """Mixin of a decoder layer: what stands for its weights is there before its call.

    Attributes:
        fp8_inside: masters of the layers inside.
    """

    fp8_inside: list[Master]
    keeps_name = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for master in self.__dict__.get("fp8_inside", ()):
            master.arrive()
            if self._compiled_call_impl is not None:
                # Made outside of the compiled code: its gradient has to leave that to be sent.
                master.handle = master.lend()
        return super().__call__(*args, **kwargs)


class DeviceMixin(Swapped):
    """Mixin of the model: masters that changed are cast before a call, and its device is known.

    Attributes:
        fp8_masters: all of its masters.
        fp8_tables: its embeddings, and its head.
    """

    fp8_masters: Masters
    fp8_tables: list[TableMixin]
    keeps_name = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self, DeviceMixin) or in_backward():  # a recomputation
            return super().__call__(*args, **kwargs)
        self.fp8_masters.refresh()
        with contextlib.ExitStack() as stack:
            for table in self.fp8_tables:
                stack.enter_context(table.fp8_lent())
            return super().__call__(*args, **kwargs)

    @property
    def device(self) -> torch.device:
        """Where inputs go: Transformers takes that of the first parameter, which is a master."""
        return self.fp8_masters.device


class CodedBackend(FrozenEngine):
    """Backend of layers that train and hold codes.

    Attributes:
        where: what the receipt says of their masters.
    """

    where: ClassVar[str]

    def __init__(self, precision: PrecisionConfig, *, emulate: bool, triton: bool = True) -> None:
        super().__init__(precision, emulate=emulate, triton=triton)
        self.how = self.how._replace(
            pow2=precision.pow2_scales,  # as where weights are on the device
            in_bf16=multiply_in_bf16(precision),
            high=precision.gemms_kept_high,
            gradients=formats_of(precision)["g"],
        )

    def as_cast(
        self, module: Any, operand: Operand, value: Tensor
    ) -> tuple[Tensor, PrecisionConfig]:
        inverse = module.fp8_master.inverse
        if operand == "g" and inverse is not None and inverse.numel() > 1:
            value = value.float() * inverse.t()
        return value, self.precision

    def effective(self) -> dict[str, Any]:
        here = {"w": f"e4m3, {self.where}", "g": self.how.gradients.name}
        return super().effective() | here


class TrainedEngine(CodedBackend):
    """Backend of layers whose masters are in host memory.

    Attributes:
        masters: all masters of the model.
    """

    name = "fp8_params"
    mixin = TrainedMixin
    where = "master in host memory"

    def __init__(self, precision: PrecisionConfig, *, emulate: bool, triton: bool = True) -> None:
        super().__init__(precision, emulate=emulate, triton=triton)
        self.masters = Masters(pow2=self.how.pow2)

    def attributes(self, module: nn.Module, layer: LayerPlan) -> dict[str, Any]:
        weight: Any = module._parameters["weight"]
        tile = tile_of("row" if self.how.per_row else "tensor", layer.shape)
        master = self.masters.of(weight, tile, turned=is_conv1d(type(module)))
        return {"fp8_how": self.how._replace(tile=tile), "fp8_master": master}

    def release(self, model: nn.Module) -> None:
        if self.masters.device.type != "cpu":
            model.cpu()  # with the masters, or layers would have weights on two devices
