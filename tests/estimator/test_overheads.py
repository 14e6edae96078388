"""Hidden memory: buffers of the kernels worked out by hand, and what must grow with what."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from finetune.estimator.memory.overheads import (
    MIB,
    attention_backward_extra,
    attention_forward_extra,
    context_bytes,
    cublas_workspace,
    library_workspaces,
    nccl_bytes,
    sdpa_kernel,
)
from finetune.hardware import versions
from finetune.hardware.versions import installed_torch

# Llama 3 8B, 2 rows of 4096.
LLAMA = {"batch": 2, "heads": 32, "kv_heads": 8, "queries": 4096, "keys": 4096, "head_dim": 128}


def test_flash_backward_of_llama():
    softmax_d, dq, dk, dv = attention_backward_extra("flash", **LLAMA)
    assert softmax_d == 1 * MIB  # 2 x 32 x 4096 float32
    assert dq == 128 * MIB  # 2 x 4096 x 32 x 128 float32, twice the queries
    assert dk == dv == 64 * MIB  # as many heads as queries, bfloat16
    alike = attention_backward_extra("flash", **{**LLAMA, "kv_heads": 32})
    assert alike == [softmax_d, dq]


def test_flash_rounds_rows_to_128_and_heads_to_32():
    few = attention_backward_extra("flash", 1, 1, 1, 100, 100, 72)
    assert few == [128 * 4, 128 * 96 * 4]
    assert attention_backward_extra("flash", 1, 1, 1, 128, 128, 144)[1] == 128 * 192 * 4


def test_flash3_sums_grouped_gradients_in_float32():
    parts = attention_backward_extra("flash3", **LLAMA)
    assert parts == [MIB, MIB, 128 * MIB, 32 * MIB, 32 * MIB]


def test_cudnn_takes_one_piece():
    (whole,) = attention_backward_extra("cudnn", **LLAMA)
    assert whole == (1 + 128 + 64 + 64) * MIB
    (alike,) = attention_backward_extra("cudnn", **{**LLAMA, "kv_heads": 32})
    assert alike == 129 * MIB


def test_efficient_is_flash_and_a_lock_for_each_tile():
    delta, workspace = attention_backward_extra("efficient", **{**LLAMA, "kv_heads": 32})
    assert delta == MIB
    assert workspace == 128 * MIB + 2 * 32 * 32 * 16
    wide = attention_backward_extra("efficient", 1, 8, 8, 1024, 1024, 256)[1]
    # 16 tiles of rows and 4 of columns, and 16 splits of dk and dv.
    assert wide == 8 * (64 * (16 + 64 * 64 * 4) + 2 * 16 * 64 * 256 * 4)


def test_log_sum_exp():
    assert attention_forward_extra("flash", 2, 32, 4096) == MIB
    assert attention_forward_extra("efficient", 1, 1, 33) == 64 * 4


def test_log_sum_exp_is_what_torch_returns():
    q = torch.randn(2, 4, 33, 16)
    _, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, q, q)
    assert lse.dtype == torch.float32
    assert lse.numel() * 4 == attention_forward_extra("flash", 2, 4, 33)


@pytest.mark.parametrize(
    ("capability", "version", "head_dim", "masked", "itemsize", "kernel"),
    [
        ((8, 0), (2, 13, 0), 128, False, 2, "flash"),
        ((8, 0), (2, 13, 0), 128, True, 2, "efficient"),
        ((8, 0), (2, 13, 0), 128, False, 4, "efficient"),
        ((8, 9), (2, 13, 0), 256, False, 2, "efficient"),
        ((7, 5), (2, 13, 0), 128, False, 2, "efficient"),
        ((9, 0), (2, 4, 1), 128, False, 2, "flash"),
        ((9, 0), (2, 5, 0), 128, False, 2, "cudnn"),
        ((9, 0), (2, 5, 1), 128, False, 2, "flash"),
        ((9, 0), (2, 8), 128, False, 2, "flash"),
        ((9, 0), (2, 9, 1), 128, False, 2, "cudnn"),
        ((9, 0), (2, 10, 0), 128, False, 2, "flash"),
        ((9, 0), (2, 13, 0), 256, True, 2, "cudnn"),
        ((10, 0), (2, 13, 0), 256, False, 2, "flash"),
        ((10, 0), (2, 13, 0), 128, False, 2, "cudnn"),
        ((12, 0), (2, 13, 0), 128, False, 2, "flash"),
    ],
)
def test_kernel_of_sdpa(
    capability: tuple[int, int],
    version: tuple[int, ...],
    head_dim: int,
    masked: bool,
    itemsize: int,
    kernel: str,
):
    assert kernel == sdpa_kernel(
        capability, version, head_dim=head_dim, masked=masked, itemsize=itemsize
    )


def test_cublas_workspaces():
    assert cublas_workspace((8, 0), (2, 13)) == 8_519_680  # as pytorch/pytorch#95668 measured
    assert cublas_workspace((9, 0), (2, 4)) == 32 * MIB
    assert cublas_workspace((10, 0), (2, 11)) == 8_519_680
    assert cublas_workspace((12, 0), (2, 12)) == 32 * MIB
    assert library_workspaces((9, 0), (2, 13)) == [32 * MIB] * 2
    assert sum(library_workspaces((8, 0), (2, 9, 1))) == 2 * (8_519_680 + MIB)


def test_installed_version_without_torch():
    assert installed_torch() == tuple(int(n) for n in torch.__version__.split("+")[0].split("."))
    code = "import sys, finetune.estimator.memory.overheads as h; h.library_workspaces((9, 0)); "
    code += "import finetune.estimator.memory.overheads; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("found", "predicted"),
    [("2.13.0+cpu", "the newest tested"), ("2.13.0", (2, 13, 0)), ("2.11.0+cu130", (2, 11, 0))],
)
def test_gpus_are_predicted_for_the_torch_that_can_run_there(found, predicted, monkeypatch):
    monkeypatch.setattr(versions, "version", lambda _: found)
    monkeypatch.setattr(sys, "platform", "linux")
    if predicted == "the newest tested":
        predicted = versions._release(versions.table()["ran"]["torch"][-1])
    assert versions.torch_of_gpus.__wrapped__() == predicted


def test_context_is_of_the_nearest_capability():
    assert context_bytes((8, 9)) == 500 * MIB
    assert context_bytes((8, 7)) == context_bytes((8, 6))
    assert context_bytes((12, 1)) == context_bytes((12, 0))
    assert context_bytes((7, 0)) == context_bytes((7, 5))


def test_nccl():
    assert nccl_bytes(1) == 0
    assert nccl_bytes(8) == 576 * MIB
    # NVIDIA/nccl#1685: 1.06 GB of one H100 of eight before anything else.
    assert nccl_bytes(8) + context_bytes((9, 0)) == pytest.approx(1.06e9, rel=0.15)
