"""MFU and bandwidth: figures by hand, a pretended GPU, fake timings, and the table of GPUs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import finetune.training.health.speed
import finetune.training.session
from finetune.config.schema import PrecisionConfig
from finetune.hardware.device import BLOCK_CAPABILITY, FP8_CAPABILITY, Device
from finetune.hardware.gpus import find_gpu, gpu_table
from finetune.precision.proof.witness import ATTENTION
from finetune.runs.receipt import LayerReceipt
from finetune.training.health.speed import (
    Speed,
    Work,
    least_bandwidth_gb_s,
    mfu,
    optimizer_bytes,
    work_of,
)
from tests.conftest import A100, B200, CPU, H100, RTX4090, batch

M, N, K = 32, 64, 48
GEMM = 2 * M * N * K


def linear(name="a", precision="fp8", fprop=1, dgrad=1, wgrad=1) -> LayerReceipt:
    calls = {"fprop": fprop, "dgrad": dgrad, "wgrad": wgrad}
    ran = {gemm: precision if count else "none" for gemm, count in calls.items()}
    flops = GEMM * sum(calls.values())
    return LayerReceipt(name, (N, K), "base", calls=calls, flops=flops, reason="", **ran)


# ---------------------------------------------------------------------------------------- the table


def test_every_line_of_the_table() -> None:
    names = [name for gpu in gpu_table() for name in gpu.names]
    assert len(names) == len(set(names))
    for gpu in gpu_table():
        t = gpu.tflops
        if gpu.capability < (8, 0):
            assert sorted(t) == ["fp16", "fp32"], "before Ampere there is neither BF16 nor TF32"
            continue
        assert t["fp32"] <= t["tf32"] <= t["bf16"] == t["fp16"]
        assert ("fp8" in t) == (gpu.capability >= FP8_CAPABILITY)
        is_amd = gpu.names[0].startswith("AMD")
        assert ("fp4" in t) == (gpu.capability >= BLOCK_CAPABILITY and not is_amd)
        if "fp8" in t:  # dense: twice BF16, where "with sparsity" would be four times
            assert t["fp8"] == pytest.approx(2 * t["bf16"], rel=0.03)
        assert 10 < t["bf16"] / gpu.gb_s * 1e3 < 450, "operations a byte"
        assert gpu.source


@pytest.mark.parametrize(
    ("name", "bf16", "gb_s"),
    [
        ("NVIDIA A100-SXM4-40GB", 312, 1555),
        ("NVIDIA A100-SXM4-80GB", 312, 2039),
        ("NVIDIA A100 80GB PCIe", 312, 1935),
        ("NVIDIA A10G", 70, 600),
        ("NVIDIA L4", 121, 300),
        ("NVIDIA L40S", 362, 864),
        ("NVIDIA GeForce RTX 3090", 71, 936),
        ("NVIDIA GeForce RTX 4090", 165.2, 1008),
        ("NVIDIA GeForce RTX 5090", 209.5, 1792),
        ("NVIDIA H100 PCIe", 756, 2039),
        ("NVIDIA H100 80GB HBM3", 989.4, 3352),
        ("NVIDIA H100 NVL", 835.5, 3938),
        ("NVIDIA H200", 989.4, 4800),
        ("NVIDIA B200", 2250, 8000),
        ("NVIDIA GB200", 2500, 8000),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 503.8, 1792),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 500, 1597),
        ("AMD Instinct MI300X", 1307.4, 5300),
        ("AMD Instinct MI300X OAM", 1307.4, 5300),
    ],
)
def test_found_by_the_name_of_the_driver(name, bf16, gb_s) -> None:
    gpu = find_gpu(Device("cuda", name, (9, 0), 80.0))
    assert gpu is not None
    assert (gpu.tflops["bf16"], gpu.gb_s) == (bf16, gb_s)


@pytest.mark.parametrize(
    "name", ["NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 4090 D", "NVIDIA H20"]
)
def test_other_chips_of_a_like_name_are_unknown(name) -> None:
    assert find_gpu(Device("cuda", name, (8, 9), 16.0)) is None


@pytest.mark.parametrize("device", [A100, H100, RTX4090, B200])
def test_pretended_devices_agree_with_the_table(device) -> None:
    gpu = find_gpu(device)
    assert gpu is not None
    assert gpu.capability == device.capability
    assert gpu.memory_gib == pytest.approx(device.memory_gib, rel=0.01)


def test_a_cpu_has_no_line() -> None:
    assert find_gpu(CPU) is None


# -------------------------------------------------------------------------- work of a micro-step


def test_work_by_hand() -> None:
    work = work_of([linear(), linear("head", "bf16")], tokens=M)
    assert work.flops == {"fp8": 3 * GEMM, "bf16": 3 * GEMM}
    x, w, y = M * K, N * K, M * N
    results = 2 * (y + x + w)
    operands = 2 * (x + w + y)
    assert work.gemm_bytes == (operands + results) + (2 * operands + results)
    assert work.tokens == M


def test_recomputation_is_not_model_work() -> None:
    plain, again = work_of([linear()], M), work_of([linear(fprop=2)], M)
    assert again.flops == plain.flops
    assert again.gemm_bytes > plain.gemm_bytes, "but it moves memory"
    calls = {"fprop": 2, "dgrad": 1, "wgrad": 0}
    attention = LayerReceipt(
        ATTENTION, (0, 0), "other", "bf16", "bf16", "none", calls, (2 + 2 + 5) * 1000, ""
    )
    assert work_of([attention], M).flops == {"bf16": 7000}


def test_forward_without_backward_is_kept() -> None:
    """The first layer of a frozen base has no gradient to compute."""
    assert work_of([linear(dgrad=0, wgrad=0)], M).flops == {"fp8": GEMM}


def test_optimizer_traffic_by_hand() -> None:
    p = nn.Parameter(torch.zeros(10, dtype=torch.bfloat16))
    frozen = nn.Parameter(torch.zeros(99), requires_grad=False)
    optimizer = torch.optim.AdamW([p], lr=0.1)
    p.grad = torch.ones_like(p)
    optimizer.step()
    # weight read and written, gradient read, two moments read and written: 7 passes of 2 bytes
    assert optimizer_bytes([p], optimizer) == 7 * 20
    assert frozen.numel() == 99


# -------------------------------------------------------------------------------------------- rates


def test_mfu_by_hand() -> None:
    gpu = find_gpu(H100)
    assert gpu is not None
    work = Work({"fp8": 1978.9e12, "bf16": 989.4e12}, 0.0, tokens=100)
    assert mfu(work, 100, 4.0, gpu) == pytest.approx(0.5), "one second each, of four"
    assert mfu(work, 300, 12.0, gpu) == pytest.approx(0.5)
    only = Work({"fp32": 66.9e12}, 0.0, tokens=100)
    assert mfu(only, 100, 1.0, gpu) == pytest.approx(1.0)
    assert mfu(only, 100, 1.0, gpu, tf32=True) == pytest.approx(66.9 / 494.7)


def test_mixed_rows_are_held_to_the_lower_peak() -> None:
    gpu = find_gpu(H100)
    assert gpu is not None
    work = Work({"bf16+fp8": 989.4e12}, 0.0, tokens=1)
    assert mfu(work, 1, 1.0, gpu) == pytest.approx(1.0)


def test_no_peak_no_mfu() -> None:
    gpu = find_gpu(A100)
    assert gpu is not None
    assert mfu(Work({"fp8": 1e12}, 0.0, 1), 1, 1.0, gpu) is None


def test_bandwidth_by_hand() -> None:
    work = Work({}, 5e9, tokens=100)
    assert least_bandwidth_gb_s(work, 300, 1e9, 2.0) == pytest.approx((15 + 1) / 2)


# -------------------------------------------------------------------------------------- a session


class Clock:
    """Says what it is given, second by second."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def trained(make_llama, monkeypatch):
    """A session that saw one step, on a device of choice, and its `Speed`."""

    def make(device: Device, **precision):
        from accelerate import Accelerator

        monkeypatch.setattr(finetune.training.session, "this_device", lambda: device)
        running = finetune.training.session.install(
            PrecisionConfig(**({"compute": "bf16"} | precision))
        )
        model = make_llama()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        accelerator = Accelerator(cpu=True)
        model, optimizer = accelerator.prepare(model, optimizer)
        clock = Clock()
        speed = Speed(clock)
        for seed in range(3):
            inputs = batch(seed=seed)
            speed.begin_micro_step(inputs)
            accelerator.backward(model(**inputs).loss)
            optimizer.step()
            optimizer.zero_grad()
            clock.now += 2.0
            speed.end_step()
        return running, model, optimizer, speed, clock

    return make


def rows(model, optimizer, speed) -> tuple[dict[str, float], list[str]]:
    reported: list[str] = []
    row = speed.row(model.parameters(), optimizer, lambda *said: reported.append(said[-1]))
    return row, reported


def test_on_a_pretended_gpu(trained) -> None:
    running, model, optimizer, speed, _ = trained(H100)
    row, reported = rows(model, optimizer, speed)
    assert (speed.steps, speed.tokens, speed.seconds) == (3, 3 * 64, 6.0)
    proof = running.proof
    assert proof is not None
    assert list(proof.flop_share) == ["bf16"]
    flops = sum(layer.flops for layer in proof.layers)
    assert row["health/mfu"] == pytest.approx(flops / 989.4e12 / 2.0), "each step took 2 s"
    weights = sum(p.numel() * 4 for p in model.parameters())
    assert row["health/bandwidth_at_least_gb_s"] > 3 * weights / 2.0 / 1e9
    assert row["health/bandwidth_at_least"] == pytest.approx(
        row["health/bandwidth_at_least_gb_s"] / 3352
    )
    assert reported == []


def test_unknown_gpu_says_so_and_has_no_mfu(trained) -> None:
    _, model, optimizer, speed, _ = trained(Device("cuda", "NVIDIA Q9000", (9, 0), 99.0))
    row, reported = rows(model, optimizer, speed)
    assert list(row) == ["health/bandwidth_at_least_gb_s"]
    assert reported == ["the peak of 'NVIDIA Q9000' is not known here, so there is no MFU"]


def test_emulated_fp8_has_no_mfu(trained) -> None:
    _, model, optimizer, speed, _ = trained(
        H100, compute="fp8", backend="emulated", emulation="allow"
    )
    row, _ = rows(model, optimizer, speed)
    assert "health/mfu" not in row
    assert "health/bandwidth_at_least" in row


def test_a_cpu_has_neither(trained) -> None:
    _, model, optimizer, speed, _ = trained(CPU)
    assert rows(model, optimizer, speed) == ({}, [])


def test_evaluation_is_not_training_time(trained) -> None:
    *_, speed, clock = trained(H100)
    clock.now += 1000.0
    speed.resume()
    clock.now += 2.0
    speed.end_step()
    assert speed.seconds == 8.0
    speed.restart()
    assert (speed.steps, speed.tokens, speed.seconds) == (0, 0, 0.0)
