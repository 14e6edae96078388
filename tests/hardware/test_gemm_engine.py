"""The kernels by GPU, scaling, torch and CUDA: of FP8 products, and of attention to documents."""

from __future__ import annotations

import pytest

from finetune.estimator.speed.roofline import efficiency_of
from finetune.hardware.device import Device, cuda_of, gemm_engine, varlen_kernel
from finetune.hardware.gpus import named_gpu
from finetune.hardware.requirements import backend_verdict, resolve
from finetune.precision.settings import PrecisionConfig

RTX5090 = Device("cuda", "NVIDIA GeForce RTX 5090", (12, 0), 31.4)


@pytest.mark.parametrize(
    ("scaling", "capability", "cuda", "engine"),
    [
        ("tensorwise", (9, 0), (13, 0), "cuBLASLt tensorwise"),
        ("rowwise", (9, 0), (13, 0), "cuBLASLt outer-vector"),
        ("rowwise", (9, 0), (12, 9), "cuBLASLt outer-vector"),
        ("rowwise", (9, 0), (12, 8), "CUTLASS rowwise"),
        ("rowwise_with_gw_hp", (8, 9), (13, 0), "CUTLASS rowwise"),
        ("rowwise", (10, 0), (13, 0), "CUTLASS rowwise"),
    ],
)
def test_engine(scaling, capability, cuda, engine) -> None:
    assert gemm_engine(scaling, capability, cuda) == engine


def test_cuda_is_that_of_this_torch_or_of_the_usual_wheel() -> None:
    assert cuda_of((2, 10, 0), "13.0") == (13, 0)
    usual = [cuda_of((2, minor, 0), None) for minor in (10, 11, 15)]
    assert usual == [(12, 8), (13, 0), (13, 2)]


def test_rows_are_slow_where_cutlass_multiplies_them() -> None:
    shares = [efficiency_of(named_gpu("H100"), torch=(2, minor, 0)).shared for minor in (8, 11)]
    assert shares[0].rowwise < shares[1].rowwise < 1
    ada = [efficiency_of(named_gpu("4090"), torch=(2, minor, 0)).shared for minor in (8, 11)]
    assert ada[0] == ada[1]


def test_rows_are_refused_where_nothing_multiplies_them() -> None:
    rows = PrecisionConfig(compute="fp8", scaling="rowwise", backend="torchao")
    no = backend_verdict("torchao", rows, RTX5090)
    assert not no
    assert "use precision.scaling=tensorwise or backend=emulated" in no.reason
    tensors = rows.model_copy(update={"scaling": "tensorwise"})
    assert resolve(tensors, RTX5090).precision.backend == "torchao"


@pytest.mark.parametrize(
    ("capability", "minor", "cudnn", "more", "kernel"),
    [
        ((9, 0), 15, None, {}, "cuDNN"),
        ((10, 0), 15, 92600, {}, "cuDNN"),
        ((10, 3), 15, 92500, {"head_dim": 64}, "cuDNN"),
        ((9, 0), 14, 92600, {}, "FlashAttention-2"),
        ((9, 0), 10, None, {}, "FlashAttention-2"),
        ((9, 0), 15, 92400, {}, "FlashAttention-2"),  # NaN of documents without tokens
        ((9, 0), 15, 0, {}, "FlashAttention-2"),
        ((9, 0), 15, None, {"windowed": True}, "FlashAttention-2"),
        ((9, 0), 15, None, {"head_dim": 192}, "FlashAttention-2"),
        ((8, 0), 15, None, {}, "FlashAttention-2"),
        ((12, 0), 15, None, {}, "FlashAttention-2"),
    ],
)
def test_kernel_of_documents(capability, minor, cudnn, more, kernel) -> None:
    given = {"head_dim": 128} | more
    assert varlen_kernel(capability, (2, minor, 0), cudnn, **given) == kernel
