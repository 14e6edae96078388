"""Fake tensors on the CPU that libraries treat as on a GPU.

Meta tensors make autocast, optimizers and attention take other paths than in training. A *fake*
tensor has shape, dtype and device, but no bytes. So models are built and adapters attached on meta,
which is fast, and then get fake parameters (`to_fake`). The device is always the CPU: fake CUDA
tensors need a CUDA build of torch.

If a library's CUDA path takes other memory or time, `on_gpu` selects it (torch 2.13, TRL 1.16):

* *attention* runs as one fused CUDA kernel (`finetune.estimator.trace.attention`);
* *autocast*: CUDA runs more functions in float32 than the CPU (torch documentation, "CUDA Ops that
  can autocast to float32");
* *optimizers and gradient norms*: `foreach` is the default on CUDA only, and makes temporaries of
  the size of all trainable parameters;
* *TRL's loss* selects labeled positions and runs Triton kernels in place, without needing Triton.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional as F

from finetune.estimator.trace.attention import attention_on
from finetune.precision import weights


@contextlib.contextmanager
def without_memory() -> Iterator[FakeTensorMode]:
    """Make operators return fake tensors; real ones (a small batch) may be mixed in."""
    # Weights are cast to FP8 slab by slab; fake ones whole, which takes fewer operators.
    whole: list[tuple[Any, str, Any]] = [(weights, "SLAB", {}), (weights, "SLAB_ELSEWHERE", 2**62)]
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, replaced(whole):
        yield mode


@contextlib.contextmanager
def replaced(changes: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Replace attributes temporarily: (owner, name, value)."""
    with contextlib.ExitStack() as stack:
        for owner, name, value in changes:
            if name in vars(owner):
                stack.callback(setattr, owner, name, getattr(owner, name))
            else:  # inherited
                stack.callback(delattr, owner, name)
            setattr(owner, name, value)
        yield


def to_fake(model: nn.Module) -> None:
    """Replace meta parameters and buffers by CPU ones in place, ties kept.

    Inside `without_memory` those are fake.
    """
    made: dict[int, Tensor] = {}

    def fake(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            data: Tensor = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu"
            )
            if isinstance(tensor, nn.Parameter):
                data = nn.Parameter(data, requires_grad=tensor.requires_grad)
            made[id(tensor)] = data
        return made[id(tensor)]

    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = fake(parameter)  # pyright: ignore[reportArgumentType]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = fake(buffer)


_MATHS = (
    "acos asin cosh cumprod cumsum dist erfinv exp expm1 log log10 log1p log2 norm pow prod "
    "reciprocal renorm rsqrt sinh softmax log_softmax sum tan"
)
FLOAT32 = {
    torch: f"{_MATHS} cdist layer_norm group_norm",
    Tensor: f"{_MATHS} __pow__ __rpow__ __rdiv__ __rtruediv__",
    F: "layer_norm group_norm softmax log_softmax softmin softplus normalize cross_entropy "
    "nll_loss kl_div l1_loss mse_loss smooth_l1_loss cosine_similarity",
}
"""Functions that CUDA's autocast runs in float32, by owner."""


def _in_float32(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wide(*args: Any, **kwargs: Any) -> Any:
        if torch.is_autocast_enabled("cpu"):
            args = tuple(_wide(value) for value in args)
        return function(*args, **kwargs)

    return wide


def _wide(value: Any) -> Any:
    low = isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if low else value


class _Launcher:
    """Stand-in for a Triton kernel that works in place; records its operand in a trace."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self._launch

    def _launch(self, tile: Tensor, *args: Any, **kwargs: Any) -> None:
        torch.ops.finetune_estimator.in_place(tile, self.name)


_library = torch.library.Library("finetune_estimator", "FRAGMENT")
for _schema in (
    "in_place(Tensor(a!) tile, str name) -> ()",
    "addmm_fp32(Tensor(a!) acc, Tensor a, Tensor b) -> ()",
):
    _library.define(_schema)
    _library.impl(_schema.partition("(")[0], lambda *_: None, "Meta")


def _dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Dropout with CUDA's mask of one byte per element; the CPU's has the dtype of `x`."""
    return torch.native_dropout(x, p, True)[0] if training and p > 0 else x


@contextlib.contextmanager
def on_gpu(
    capability: tuple[int, int] = (9, 0), torch_version: tuple[int, ...] | None = None
) -> Iterator[None]:
    """Treat CPU tensors as CUDA would treat its own.

    `torch_version`, the installed one by default, decides which attention kernel runs.
    """
    import torch.optim.optimizer as optimizers
    from torch.utils import _foreach_utils
    from trl.kernels import chunked_logprob
    from trl.trainer import utils as trl_utils

    def also_cpu() -> list[str]:
        return ["cpu", "cuda"]

    def always(device: torch.device) -> bool:
        return True

    changes: list[tuple[Any, str, Any]] = [
        (optimizers, "_get_foreach_kernels_supported_devices", also_cpu),
        (_foreach_utils, "_get_foreach_kernels_supported_devices", also_cpu),
        (optimizers, "_foreach_supported_types", [Tensor, nn.Parameter, FakeTensor]),
        (trl_utils, "_use_triton", always),
        (chunked_logprob, "_use_triton", always),
        (chunked_logprob, "triton", SimpleNamespace(cdiv=lambda n, by: -(-n // by))),
        (chunked_logprob, "_addmm_fp32", torch.ops.finetune_estimator.addmm_fp32),
        (chunked_logprob, "_forward_kernel", _Launcher("logprob_forward")),
        (chunked_logprob, "_backward_kernel", _Launcher("logprob_backward")),
        (F, "scaled_dot_product_attention", attention_on(capability, torch_version)),
        (F, "dropout", _dropout),
    ]
    for owner, names in FLOAT32.items():
        changes += [(owner, name, _in_float32(getattr(owner, name))) for name in names.split()]
    with replaced(changes):
        yield
