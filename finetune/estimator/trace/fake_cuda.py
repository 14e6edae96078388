"""Fake tensors on the CPU that libraries treat as on a GPU.

Meta tensors make autocast, optimizers and attention take other paths than in training. A *fake*
tensor has shape, dtype and device, but no bytes. So models are built and adapters attached on meta,
which is fast, and then get fake parameters (`to_fake`). The device is always the CPU: fake CUDA
tensors need a CUDA build of torch.

If a library's CUDA path takes other memory or time, `on_gpu` selects it (torch 2.13, TRL 1.16):

* *attention* runs as one fused kernel, forward and backward. `F.scaled_dot_product_attention` is
  replaced by an operator that computes nothing, but has the results, saved tensors and temporaries
  of the kernel that CUDA would choose (`finetune.estimator.memory.overheads`). Saved are q, k, v,
  the output, one float32 per row (log-sum-exp), and the mask, which torch converts from bool to the
  operands' dtype;
* *autocast*: CUDA runs more functions in float32 than the CPU (torch documentation, "CUDA Ops that
  can autocast to float32");
* *optimizers and gradient norms*: `foreach` is the default on CUDA only, and makes temporaries of
  the size of all trainable parameters;
* *TRL's loss* selects labeled positions and runs Triton kernels in place, without needing Triton.

With `model.attention: varlen`, and where Transformers calls the package `flash-attn`, packed rows
have neither padding nor mask; documents attend to themselves only. As these kernels run on GPUs
only, an attention function of the same shapes replaces them (`choose_attention`).

Shapes: q [B, H, L, D]; k, v [B, Hkv, S, D]; output [B, H, L, D], laid out as [B, L, H, D].
Source: torch 2.13, aten/src/ATen/native/transformers/cuda.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from transformers import PretrainedConfig
from transformers.integrations import moe

from finetune.estimator.memory.overheads import (
    Kernel,
    attention_backward_extra,
    attention_forward_extra,
    sdpa_kernel,
)
from finetune.hardware.device import varlen_kernel
from finetune.hardware.versions import torch_of_gpus
from finetune.precision.numbers import gemm, weights

LIBRARY = torch.library.Library("finetune_estimator", "DEF")
"""Operators without values: results of the right shapes, for a trace to see."""
OPS = torch.ops.finetune_estimator


def define(schema: str, function: Callable[..., Any]) -> None:
    """Add an operator, which `function` implements on meta tensors."""
    LIBRARY.define(schema)
    LIBRARY.impl(schema.partition("(")[0], function, "Meta")


@contextlib.contextmanager
def without_memory() -> Iterator[FakeTensorMode]:
    """Make operators return fake tensors; real ones (a small batch) may be mixed in."""
    # Weights are cast to FP8 slab by slab; fake ones whole, which takes fewer operators.
    whole: list[tuple[Any, str, Any]] = [(weights, "SLAB", {}), (weights, "SLAB_ELSEWHERE", 2**62)]
    # Grouped products of fake tensors are BF16 only (torch 2.13); Transformers' own take any type.
    grouped = moe, "_can_use_grouped_mm", lambda _, w, __: w.dtype is torch.bfloat16
    # Real inputs are allowed for the batch, whose numbers decide control flow (lengths, labels).
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, replaced([*whole, grouped]):
        yield mode


@contextlib.contextmanager
def replaced(changes: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Replace attributes temporarily: (owner, name, value)."""
    with contextlib.ExitStack() as stack:
        for owner, name, value in changes:
            # Set back as it was: a class that inherited the name would otherwise keep a copy of its
            # own.
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
    made: dict[int, Any] = {}

    def fake(tensor: Tensor) -> Any:
        # By identity, so that a tied head stays the embedding.
        if id(tensor) not in made:
            # With the strides: `view` and `contiguous` take other paths for other layouts.
            data = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu"
            )
            if isinstance(tensor, nn.Parameter):
                data = nn.Parameter(data, requires_grad=tensor.requires_grad)
            made[id(tensor)] = data
        return made[id(tensor)]

    for module in model.modules():
        for name, tensor in module._parameters.items():
            if tensor is not None:
                module._parameters[name] = fake(tensor)
        for name, buffer in [*module.named_buffers(recurse=False, remove_duplicate=False)]:
            setattr(module, name, fake(buffer))


# ---------------------------------------------------------------------------------------- attention


def _forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, kernel: Kernel
) -> tuple[Tensor, Tensor]:
    b, heads, length, _ = q.shape
    # Kernels write by position, so that the transpose which follows copies nothing.
    out = q.new_empty((b, length, heads, v.shape[3])).transpose(1, 2)
    saved = attention_forward_extra(kernel, b, heads, length)
    return out, q.new_empty(saved // 4, dtype=torch.float32)


def _backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Tensor | None,
    causal: bool, kernel: Kernel,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:  # fmt: skip
    (b, heads, rows, d), (_, kv_heads, keys, _) = q.shape, k.shape
    sizes = attention_backward_extra(kernel, b, heads, kv_heads, rows, keys, d, q.element_size())
    buffers = [q.new_empty(size, dtype=torch.uint8) for size in sizes]
    return _by_position(q), _by_position(k), _by_position(v), buffers


def _by_position(x: Tensor) -> Tensor:
    """Empty [B, H, L, D] with the memory layout [B, L, H, D] of the kernels."""
    return x.new_empty(x.transpose(1, 2).shape).transpose(1, 2)


# Two names, as a trace has no arguments: the kernel behind SDPA may be faster than flash.
for _name in ("attention", "flash_attention"):
    define(
        f"{_name}(Tensor q, Tensor k, Tensor v, Tensor? mask, bool causal, str kernel)"
        " -> (Tensor, Tensor)",
        _forward,
    )
    define(
        f"{_name}_backward(Tensor g, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
        "Tensor? mask, bool causal, str kernel) -> (Tensor, Tensor, Tensor, Tensor[])",
        _backward,
    )


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, kernel: Kernel
    ) -> Tensor:
        run = OPS.flash_attention if kernel == "flash" else OPS.attention
        out, lse = run(q, k, v, mask, causal, kernel)
        ctx.save_for_backward(q, k, v, out, lse, *([] if mask is None else [mask]))
        ctx.how = causal, kernel
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor):
        q, k, v, out, lse, *mask = ctx.saved_tensors
        kernel = ctx.how[1]
        run = OPS.flash_attention_backward if kernel == "flash" else OPS.attention_backward
        dq, dk, dv, _ = run(g, q, k, v, out, lse, mask[0] if mask else None, *ctx.how)
        return dq, dk, dv, None, None, None


def fused(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, kernel: Kernel
) -> Tensor:
    """Output [B, H, L, D] of a kernel, differentiable by the kernel's backward."""
    return _Attention.apply(q, k, v, mask, causal, kernel)  # pyright: ignore[reportReturnType]


def _as_autocast(*operands: Tensor) -> tuple[Tensor, ...]:
    """Operands cast as by autocast, or by the callers of kernels that autocast does not know."""
    device = operands[0].device.type
    if not torch.is_autocast_enabled(device):
        return operands
    return tuple(x.to(torch.get_autocast_dtype(device)) for x in operands)


def attention_on(capability: tuple[int, int]) -> Callable[..., Tensor]:
    """`F.scaled_dot_product_attention` of a GPU."""

    def fused_attention(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
        dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        query, key, value = _as_autocast(query, key, value)
        if attn_mask is not None and attn_mask.dtype != query.dtype:
            attn_mask = attn_mask.to(query.dtype)
        kernel = sdpa_kernel(
            capability,
            torch_of_gpus(),
            head_dim=query.shape[-1],
            masked=attn_mask is not None,
            itemsize=query.element_size(),
        )
        return fused(query, key, value, attn_mask, is_causal, kernel)

    return fused_attention


FLASH = "finetune_flash"
KERNELS: dict[str, Kernel | None] = {
    "varlen": None,
    "flash_attention_2": "flash",
    "flash_attention_3": "flash3",
}
"""Kernels that take documents of different lengths, by implementation of attention; None: by the
GPU and torch (`varlen_kernel`).
"""


def choose_attention(model: nn.Module, name: str | None, capability: tuple[int, int]) -> None:
    """Apply a resolved `model.attention` in place to a meta model that has its default.

    Args:
        capability: compute capability of the GPU.
    """
    if name in KERNELS:
        _register_flash(KERNELS[name], capability)
        name = FLASH
    for module in model.modules() if name is not None else ():
        config: Any = getattr(module, "config", None)
        if isinstance(config, PretrainedConfig):
            config._attn_implementation = name


def _register_flash(kernel: Kernel | None, capability: tuple[int, int]) -> None:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, flash_attention_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    # Read here: layers that are compiled trace `attend`. A torch without CUDA has no cuDNN.
    version, cudnn = torch_of_gpus(), torch.backends.cudnn.version()

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor,
        attention_mask: Tensor | None, max_length_q: int | None = None,
        sliding_window: int | None = None, **kwargs: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        query, key, value = _as_autocast(query, key, value)
        length = query.shape[2]
        documents = length // (max_length_q or length)
        if documents > 1 and length % documents == 0:
            query, key, value = (_split(x, documents) for x in (query, key, value))
        # A trace sees operands alone: one with an element for each token that a query sees.
        seen = None if sliding_window is None else key[0, 0, :sliding_window, 0]
        picked = kernel
        if picked is None:
            whole = varlen_kernel(
                capability, version, cudnn, head_dim=query.shape[-1], windowed=seen is not None
            )
            picked = "cudnn" if whole == "cuDNN" else "flash"
        out = fused(query, key, value, seen, True, picked).transpose(1, 2)
        return out.reshape(-1, length, *out.shape[2:]), None

    ALL_ATTENTION_FUNCTIONS.register(FLASH, attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(FLASH, flash_attention_mask)


def _split(x: Tensor, documents: int) -> Tensor:
    """View [1, H, n L, D] as one row per document, [n, H, L, D]."""
    _, heads, length, d = x.shape
    rows = x.transpose(1, 2).reshape(documents, length // documents, heads, d)
    return rows.transpose(1, 2)


# -------------------------------------------------------------- autocast, optimizers and TRL's loss

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


define("in_place(Tensor(a!) tile, str name) -> ()", lambda *_: None)
define("addmm_fp32(Tensor(a!) acc, Tensor a, Tensor b) -> ()", lambda *_: None)


def _dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Dropout with CUDA's mask of one byte per element; the CPU's has the dtype of `x`."""
    return torch.native_dropout(x, p, True)[0] if training and p > 0 else x


@contextlib.contextmanager
def on_gpu(capability: tuple[int, int] = (9, 0)) -> Iterator[None]:
    """Treat CPU tensors as CUDA would treat its own."""
    import torch.optim.optimizer as optimizers
    from torch.utils import _foreach_utils

    from finetune.estimator.trace.fused_loss import as_on_gpu

    def also_cpu() -> list[str]:
        return ["cpu", "cuda"]

    def always(_: Any) -> bool:
        return True

    changes: list[tuple[Any, str, Any]] = [
        (optimizers, "_get_foreach_kernels_supported_devices", also_cpu),
        (_foreach_utils, "_get_foreach_kernels_supported_devices", also_cpu),
        (optimizers, "_foreach_supported_types", [Tensor, nn.Parameter, FakeTensor]),
        (_foreach_utils, "_foreach_supported_types", [Tensor, FakeTensor]),
        *as_on_gpu(),
        (gemm, "add_mm", OPS.addmm_fp32),
        (F, "scaled_dot_product_attention", attention_on(capability)),
        (F, "dropout", _dropout),
        (gemm, "writes_float32", always),
    ]
    for owner, names in FLOAT32.items():
        changes += [(owner, name, _in_float32(getattr(owner, name))) for name in names.split()]
    with replaced(changes):
        yield
