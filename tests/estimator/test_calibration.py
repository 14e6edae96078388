"""Calibration: what a machine was measured to do, kept and taken up."""

from __future__ import annotations

import json

import pytest

from finetune.errors import ConfigError
from finetune.estimator.speed.calibration import (
    Calibration,
    calibrate,
    calibrated_roofline,
    calibration_path,
    load_calibration,
    precisions_of,
    save_calibration,
)
from finetune.estimator.speed.operators import Product
from finetune.estimator.speed.roofline import Roofline, efficiency_of, host, shape_share
from finetune.hardware.device import Device, this_device
from finetune.hardware.gpus import find_gpu, gpu_table, gpus_with_own, named_gpu
from tests.benchmarks.score.setting import Setting, Shape
from tests.benchmarks.score.workload import write_step

H100 = Calibration(
    device="NVIDIA H100 80GB HBM3",
    torch="2.13.0",
    units=132,
    memory_gib=79.2,
    tflops={"bf16": 600, "fp32": 50, "fp8": 1000, "fp8_rowwise": 800},
    gb_s=2500,
    launch_us=9,
)
SHAPE = Shape(2, 1024, 8, 8, 2048, 4000)


def test_a_calibration_is_kept_where_caches_are(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert load_calibration(H100.device) is None
    path = save_calibration(H100)
    assert path == tmp_path / "fp8-finetune/calibration/nvidia-h100-80gb-hbm3.json"
    assert load_calibration(H100.device) == H100
    assert load_calibration("NVIDIA L4") is None
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert calibration_path("x").is_relative_to(tmp_path / "home/.cache")


def test_a_file_that_is_no_calibration_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = save_calibration(H100)
    path.write_text(json.dumps({"device": "x"}))
    with pytest.raises(ConfigError, match="cannot be read") as caught:
        load_calibration(H100.device)
    assert str(path) in str(caught.value)


def test_a_user_without_a_home_has_no_calibration_and_no_gpus_of_its_own(monkeypatch):
    """As in a container started with a number for a user: each estimate was a traceback."""
    for name in ("HOME", "XDG_CACHE_HOME", "FINETUNE_GPUS"):
        monkeypatch.delenv(name, raising=False)

    def unknown(_):
        raise KeyError

    monkeypatch.setattr("pwd.getpwuid", unknown)
    assert load_calibration(H100.device) is None
    assert gpus_with_own() == gpu_table()
    with pytest.raises(ConfigError, match="XDG_CACHE_HOME"):
        save_calibration(H100)


def test_a_calibration_that_could_not_be_kept_is_not_measured(tmp_path, monkeypatch, cli):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr("finetune.estimator.speed.calibration.calibrate", pytest.fail)
    done = cli("estimate", "--calibrate")
    assert done.code == 2
    assert "XDG_CACHE_HOME=FOLDER" in done.err


def test_shares_give_back_what_was_measured():
    gpu = named_gpu("H100")
    roofline = calibrated_roofline(H100, gpu, "eager")
    shares = roofline.efficiency
    product = Product(1, 4096, 4096, 8192, "bf16")
    endless = product.flops / (600e12 * shape_share(product, gpu.sms, shares.shared.pipeline_k))
    assert roofline.product_seconds(product) == pytest.approx(endless)
    assert shares.shared.rowwise == pytest.approx(0.8)
    assert shares.shared.bandwidth == pytest.approx(2500 / gpu.gb_s)
    assert "measured" in shares.origin
    assert roofline.host.forward == 2 * host("eager").forward


def test_a_slow_layer_slows_all_within_bounds():
    def with_layer(layer: float) -> Roofline:
        measured = H100.model_copy(update={"layer": layer, "launch_us": 4.5})
        return calibrated_roofline(measured, named_gpu("H100"), "eager")

    step = write_step(SHAPE, Setting(4, 1024)).micro
    plain, slower = (with_layer(layer).step_time(step).seconds for layer in (1.0, 1.5))
    assert slower == pytest.approx(1.5 * plain, rel=0.1)
    plain, wild = (with_layer(layer).efficiency.gemm["bf16"] for layer in (1.0, 50.0))
    assert wild == pytest.approx(plain / 2)


def test_a_precision_that_was_not_measured_keeps_the_tables_share():
    gpu = named_gpu("H100")
    only = H100.model_copy(update={"tflops": {"bf16": 600.0}})
    shares = calibrated_roofline(only, gpu, "eager").efficiency
    assert shares.gemm["fp8"] == efficiency_of(gpu).gemm["fp8"]
    assert shares.shared.rowwise == efficiency_of(gpu).shared.rowwise


def test_only_what_torch_multiplies_is_measured():
    """An RTX 5090 has no kernel for row-wise scales, and AMD's FP8 is another format."""
    found = {
        name: [*precisions_of(Device("cuda", name, capability, 32, is_rocm=rocm))]
        for name, capability, rocm in (
            ("H100", (9, 0), False), ("RTX 5090", (12, 0), False), ("MI300X", (9, 4), True),
        )
    }  # fmt: skip
    assert found["H100"] == ["bf16", "fp32", "fp8", "fp8_rowwise"]
    assert found["RTX 5090"] == ["bf16", "fp32", "fp8"]
    assert found["MI300X"] == ["bf16", "fp32"]


def test_a_gpu_of_no_known_family_is_predicted_once_measured():
    """As the error about its family says."""
    odd = named_gpu("H100").model_copy(update={"name": "Z1", "capability": (99, 0)})
    step = write_step(SHAPE, Setting(4, 1024)).micro
    known, unknown = (
        calibrated_roofline(H100, gpu, "eager").step_time(step).seconds
        for gpu in (named_gpu("H100"), odd)
    )
    assert unknown == pytest.approx(known, rel=0.2)


@pytest.mark.slow
def test_this_cpu_is_measured_and_predicted(monkeypatch, tmp_path):
    """Short measurements; the layer that was measured is predicted within its own factor."""
    device = this_device()
    found = calibrate(device, seconds=0.02)
    assert found.seconds < 60
    assert found.device == device.name
    assert {"bf16", "fp32"} <= set(found.tflops)
    assert 0.2 < found.layer < 5  # a busy machine is uneven
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    save_calibration(found)
    kept = load_calibration(device.name)
    assert kept == found
    step = write_step(Shape(2, 256, 4, 4, 512, 1000), Setting(1, 64)).micro
    roofline = calibrated_roofline(found, find_gpu(device), "eager")
    assert 0 < roofline.step_time(step).seconds < 60
