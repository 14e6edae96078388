"""What a device can do in FP8, which backend is taken, and what is said where there is none."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from rich.console import Console

from finetune import load_recipe
from finetune.analysis.doctor import COMBINATIONS, examine, real_gemm
from finetune.errors import MissingExtraError, PrecisionError, install_hint
from finetune.hardware.device import (
    ALLOCATOR,
    Device,
    available_gib,
    expand_segments,
    this_device,
)
from finetune.hardware.gpus import Machine
from finetune.hardware.requirements import FP8_GPUS, backend_verdict, pays_to_compile, resolve
from finetune.precision.settings import PrecisionConfig
from finetune.units import GIB
from tests import te
from tests.conftest import A100, APPLE, B200, CPU, H100, RTX4090, V100
from tests.hardware.test_gemm_engine import RTX5090

AMD = Device("cuda", "AMD Instinct MI300X", (9, 4), 192.0, is_rocm=True)
WITH_FP8 = (RTX4090, H100, B200)
WITHOUT_FP8 = (V100, A100, AMD, APPLE, CPU)


def named(devices):
    return pytest.mark.parametrize("device", devices, ids=lambda d: d.name.replace(" ", "-"))


def fp8(**settings) -> PrecisionConfig:
    return PrecisionConfig(compute="fp8", **settings)


@pytest.fixture
def no_te(monkeypatch):
    """Transformer Engine is not installed, whatever this machine has."""
    monkeypatch.setitem(sys.modules, "transformer_engine", None)


@pytest.fixture
def with_te(monkeypatch):
    """Transformer Engine is importable."""
    te.install(monkeypatch, real=False)


# -------------------------------------------------------------------------------------- hardware


@pytest.mark.parametrize(
    ("device", "has_fp8", "has_blocks"),
    [
        (V100, False, False),
        (A100, False, False),
        (RTX4090, True, False),
        (H100, True, False),
        (B200, True, True),
        (AMD, False, False),
        (APPLE, False, False),
        (CPU, False, False),
    ],
    ids=lambda value: value.name.replace(" ", "-") if isinstance(value, Device) else None,
)
def test_fp8_needs_8_9_and_blocks_need_10_0(device, has_fp8, has_blocks):
    assert (device.has_fp8.ok, device.has_block_fp8.ok) == (has_fp8, has_blocks)


@named([RTX4090, H100])
def test_a_device_without_block_formats_is_told_what_they_need(device):
    shown = ".".join(map(str, device.capability))
    assert device.has_block_fp8.reason == f"compute capability {shown}; 10.0 is needed"


A, B = "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB"


@pytest.fixture
def two_gpus(monkeypatch):
    """A machine with an H100 and an A100."""
    gpus = [
        SimpleNamespace(name=A, major=9, minor=0, total_memory=79 * GIB),
        SimpleNamespace(name=B, major=8, minor=0, total_memory=78 * GIB),
    ]
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: len(gpus))
    monkeypatch.setattr("torch.cuda.get_device_properties", gpus.__getitem__)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda index: ((index + 1) * GIB, 0))


def test_processes_that_train_together_go_by_the_least_of_their_gpus(two_gpus, monkeypatch):
    alone = this_device.__wrapped__()
    assert (alone.name, alone.capability, alone.memory_gib, alone.count) == (A, (9, 0), 79, 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    both = this_device.__wrapped__()
    assert (both.name, both.capability, both.memory_gib) == (B, (8, 0), 78)
    assert not both.has_fp8


def test_processes_on_a_cpu_share_its_memory(monkeypatch):
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=12 * GIB))
    assert available_gib(CPU) == 12
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert available_gib(CPU) == 4
    assert Machine(CPU, None, 2).memory_bytes == 8 * GIB
    assert Machine(H100, None, 2).memory_bytes == int(H100.memory_gib * GIB)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_free_memory_is_that_of_the_gpu_of_the_process(two_gpus, monkeypatch, rank):
    monkeypatch.setenv("LOCAL_RANK", str(rank))
    assert available_gib(H100) == 1 + rank % 2


@pytest.fixture
def told(monkeypatch):
    """What torch's allocator is told on a machine with CUDA."""
    heard = []
    for name in ALLOCATOR:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda: 0)
    monkeypatch.setattr("torch._C._accelerator_setAllocatorSettings", heard.append)
    monkeypatch.setattr(sys, "platform", "linux")
    return heard


@pytest.mark.parametrize(
    ("name", "value", "grows"),
    [
        (None, None, True),
        ("PYTORCH_ALLOC_CONF", "expandable_segments:True", True),
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False", False),
        ("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:128", False),
    ],
)
def test_segments_grow_unless_the_user_has_settings(told, monkeypatch, name, value, grows):
    if name:
        monkeypatch.setenv(name, value)
    found = expand_segments.__wrapped__()
    assert found.ok is grows
    assert [words.partition(",")[0] for words in told] == (
        [] if name else ["expandable_segments:True"]
    )
    assert (f"{name}={value}" in found.reason) is bool(name)


def test_segments_stay_where_tensors_were_before_and_the_line_to_export_is_said(told, monkeypatch):
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda: 1)
    found = expand_segments.__wrapped__()
    assert not found
    assert not told
    assert found.reason.endswith("export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True")


# ----------------------------------------------------------------------------- short runs

LLAMA_8B = 3.9e14
"""FLOPs of 8,192 tokens."""


@pytest.mark.parametrize(
    ("flops", "layers", "batches", "pays"),
    [
        (1e9, 4, 20, False),
        (1e9, 4, 20_000, True),
        (LLAMA_8B, 32, 1, True),  # somebody looks at its speed
        (6e12, 12, 100, False),
        (6e12, 12, 10_000, True),
    ],
)
@pytest.mark.parametrize("frozen", ["fp8", "bf16"])
def test_layers_are_compiled_where_that_saves_more_than_it_takes(
    flops, layers, batches, pays, frozen
):
    precision = fp8(frozen=frozen, scaling="rowwise")
    found = pays_to_compile(precision, 989e12, flops, layers, batches)
    assert found.ok is pays
    assert f"{batches:,} micro-batches" in found.reason


# --------------------------------------------------------------------------------------- refused


@named([V100, A100])
@pytest.mark.parametrize("backend", ["auto", "te", "torchao"])
def test_an_older_gpu_is_refused_with_its_capability(device, backend):
    with pytest.raises(PrecisionError) as caught:
        resolve(fp8(backend=backend), device)
    shown = ".".join(map(str, device.capability))
    assert caught.value.what == f"FP8 (tensorwise, hybrid) is not available on {device.name}"
    assert caught.value.where == f"precision.backend={backend}"
    assert f"compute capability {shown}; FP8 needs 8.9" in caught.value.why
    for advice in ("precision.backend=emulated", "precision.compute=", "H100"):
        assert advice in caught.value.fix


@pytest.mark.parametrize(
    ("device", "reason"),
    [
        (APPLE, "Apple GPUs have no FP8 matrix units"),
        (CPU, "CPUs have no FP8 matrix units"),
        (AMD, "AMD Instinct MI300X"),
    ],
    ids=["apple", "cpu", "amd"],
)
def test_other_hardware_is_refused_by_its_kind(device, reason):
    with pytest.raises(PrecisionError) as caught:
        resolve(fp8(), device)
    assert reason in caught.value.why
    assert "precision.emulation=allow" in caught.value.why
    assert caught.value.fix.endswith(FP8_GPUS)


@pytest.mark.parametrize(
    ("backend", "settings", "reason"),
    [
        (
            "te",
            {"scaling": "rowwise"},
            "no rowwise scaling; use backend=torchao or ",
        ),
        ("te", {"format": "e5m2"}, "no pure E5M2; use precision.format=hybrid or backend=emulated"),
        ("torchao", {"scaling": "delayed"}, "scaling; use backend=te or backend=emulated"),
        (
            "torchao",
            {"format": "e5m2"},
            "no pair of E5M2 operands; use precision.format=hybrid",
        ),
        (
            "torchao",
            {"scaling": "rowwise", "format": "hybrid"},
            "E4M3 operands only; use precision.format=e4m3 or backend=emulated",
        ),
    ],
)
@named([H100, CPU])
def test_what_an_engine_cannot_do_is_refused_whether_emulated_or_not(
    with_te, device, backend, settings, reason
):
    precision = fp8(backend=backend, emulation="allow", **settings)
    with pytest.raises(PrecisionError) as caught:
        resolve(precision, device)
    assert reason in caught.value.why


def test_on_an_fp8_gpu_the_advice_is_what_has_the_setting_there(with_te):
    with pytest.raises(PrecisionError) as caught:
        resolve(fp8(backend="torchao", scaling="delayed"), H100)
    emulated = "precision.backend=emulated (exact FP8 rounding, slow)"
    expected = ["precision.backend=te", emulated, "precision.compute=bf16"]
    assert caught.value.fix.split(", or ") == expected


def test_te_asked_by_name_and_not_installed_says_how_to_install_it(no_te):
    with pytest.raises(MissingExtraError, match="needs Transformer Engine") as caught:
        resolve(fp8(backend="te"), H100)
    assert install_hint("te") in caught.value.fix
    assert "precision.backend=torchao" in caught.value.fix
    assert isinstance(caught.value, ImportError)


def test_without_fp8_hardware_te_is_not_to_be_installed(no_te):
    with pytest.raises(PrecisionError) as caught:
        resolve(fp8(backend="te"), A100)
    assert "pip install" not in str(caught.value)


def test_te_that_is_too_old_is_not_called_missing(with_te, monkeypatch):
    monkeypatch.setattr("transformer_engine.pytorch.Float8CurrentScalingQuantizer", object)
    with pytest.raises(PrecisionError, match=r"older than 2\.20"):
        resolve(fp8(backend="te"), H100)


# ---------------------------------------------------------------------------------------- chosen


@named(WITH_FP8)
def test_auto_takes_torchao_where_te_is_not_installed(no_te, device):
    resolution = resolve(fp8(emulation="allow"), device)
    assert resolution.precision.backend == "torchao"
    assert resolution.asked.backend == "auto"
    assert resolution.label == "FP8 torchao/tensorwise"
    assert device.name in resolution.reason
    assert not resolution.fallback


@named(WITH_FP8)
@pytest.mark.parametrize(
    ("settings", "takes", "reason"),
    [
        ({"scaling": "tensorwise"}, "torchao", "750 ms for a full step of an 8B model on an H100"),
        ({"scaling": "rowwise"}, "torchao", "Transformer Engine has no rowwise scaling"),
        ({"scaling": "delayed"}, "te", "torchao has no delayed scaling"),
        ({"scaling": "tensorwise", "compile": "off"}, "te", "(predicted)"),
    ],
    ids=lambda value: "-".join(value.values()) if isinstance(value, dict) else None,
)
def test_auto_takes_the_faster_engine_that_has_the_scaling(
    with_te, device, settings, takes, reason
):
    found = resolve(fp8(**settings), device)
    assert found.precision.backend == takes
    assert reason in found.reason


def test_a_backend_asked_by_name_is_taken(with_te):
    assert resolve(fp8(backend="torchao"), H100).precision.backend == "torchao"
    allowed = fp8(backend="emulated", emulation="allow")
    assert resolve(allowed, H100).precision.backend == "emulated"


@pytest.mark.parametrize("scaling", ["delayed", "tensorwise", "rowwise"])
@named(WITHOUT_FP8)
def test_auto_emulates_only_when_allowed(device, scaling):
    with pytest.raises(PrecisionError, match=r"precision\.emulation=allow emulates FP8"):
        resolve(fp8(scaling=scaling), device)
    resolution = resolve(fp8(scaling=scaling, emulation="allow"), device)
    assert resolution.label == f"FP8 emulated/{scaling}"
    assert "no FP8 speed" in resolution.reason


def test_auto_does_not_emulate_silently_on_an_fp8_gpu(no_te):
    with pytest.raises(PrecisionError) as caught:
        resolve(fp8(scaling="delayed"), H100)
    for reason in ("te: transformer-engine is not installed", "torchao: torchao has no delayed"):
        assert reason in caught.value.why


def test_an_fp8_gpu_that_emulates_says_what_refused_the_recipe(no_te):
    found = resolve(fp8(scaling="rowwise", frozen="fp8", emulation="allow"), RTX5090)
    assert found.precision.backend == "emulated"
    for reason in ("no FP8 speed", "torchao: torch cannot multiply row-wise", "scaling=tensorwise"):
        assert reason in found.reason


def test_torchao_by_name_may_emulate_itself():
    assert backend_verdict("torchao", fp8(), CPU).ok is False
    verdict = backend_verdict("torchao", fp8(emulation="allow"), CPU)
    assert verdict.ok
    assert "emulate=True" in verdict.reason


@named(WITHOUT_FP8)
def test_a_fallback_runs_bf16_and_says_so(device):
    resolution = resolve(fp8(on_unsupported="bf16", backend="te"), device)
    assert resolution.precision.compute == "bf16"
    assert resolution.asked.compute == "fp8"
    assert resolution.label == "BF16"
    assert resolution.fallback.startswith("FP8 was requested, BF16 will run (")
    assert device.has_fp8.reason in resolution.fallback
    assert "\n" not in resolution.fallback


@pytest.mark.parametrize(
    ("device", "compute"),
    [(H100, "bf16"), (V100, "fp16"), (H100, "fp32"), (CPU, "bf16"), (CPU, "fp16"), (CPU, "fp32")],
    ids=lambda value: value.kind if isinstance(value, Device) else value,
)
def test_other_precisions_resolve_to_themselves(device, compute):
    precision = PrecisionConfig(compute=compute)
    resolution = resolve(precision, device)
    assert resolution.precision == resolution.asked == precision
    assert resolution.label == compute.upper()
    assert not resolution.fallback


# ---------------------------------------------------------------------------------------- doctor


@pytest.mark.parametrize(
    ("device", "advice", "not_said"),
    [
        (V100, ["precision.compute=fp16", "adamw_8bit"], ["_bf16", "_fp8"]),
        (A100, ["_bf16 recipes", "no FP8 units", "train.optim=adamw_torch_8bit"], ["_fp8"]),
        (RTX4090, ["python -m finetune llama_8b_lora_fp8"], ["MXFP8", "_bf16"]),
        (H100, ["python -m finetune llama_8b_lora_fp8"], ["MXFP8", "_bf16"]),
        (B200, ["python -m finetune llama_8b_lora_fp8", "MXFP8 and NVFP4 too"], ["_bf16"]),
        (AMD, ["AMD GPUs are not supported in FP8", "_bf16 recipes"], ["_fp8"]),
        (APPLE, ["Apple GPU", "emulation"], ["llama_8b"]),
        (CPU, ["tiny_* recipes", "emulation", "validate"], ["llama_8b"]),
    ],
    ids=lambda value: value.name.replace(" ", "-") if isinstance(value, Device) else "",
)
def test_the_doctor_advises_what_the_device_can_do(device, advice, not_said):
    found = examine(device).advice
    for part in advice:
        assert part in found
    for part in not_said:
        assert part not in found


@named(WITH_FP8 + WITHOUT_FP8)
def test_the_doctor_gives_a_reason_for_every_backend(no_te, device):
    findings = examine(device)
    assert set(findings.backends) == {f"{name}/{scaling}" for name, scaling in COMBINATIONS}
    assert all(verdict.reason for verdict in findings.backends.values())
    assert findings.backends["emulated/delayed"].ok
    assert not findings.backends["te/delayed"].ok
    assert findings.gemm is None
    assert (findings.fp8, findings.block_fp8) == (device.has_fp8, device.has_block_fp8)
    if device.has_fp8:
        assert findings.auto.startswith("FP8 torchao/tensorwise (")
    else:
        assert findings.auto.startswith("no FP8: ")
        assert device.has_fp8.reason in findings.auto


def test_an_fp8_gpu_is_not_said_to_have_no_fp8_unit(no_te):
    """Two backends without the same library have one reason, which is given once."""
    console = Console(width=200)
    with console.capture() as shown:
        console.print(examine(H100))
    assert "no FP8 unit" not in shown.get()
    assert "as above" in shown.get()
    assert install_hint("te") in shown.get()


@named((*WITH_FP8, RTX5090))
def test_the_recipe_that_the_doctor_advises_is_not_refused(no_te, device):
    words = examine(device).advice.partition("python -m finetune ")[2].split()
    precision = load_recipe(words[0], words[1:]).config.precision
    assert resolve(precision, device).precision.backend == "torchao"


def test_the_doctors_findings_are_json():
    found = json.loads(examine(replace(H100, count=8)).to_json())
    assert found["device"] == {
        "kind": "cuda",
        "name": "NVIDIA H100 80GB HBM3",
        "capability": [9, 0],
        "memory_gib": 79.6,
        "count": 8,
        "is_rocm": False,
    }
    assert found["fp8"]["ok"] is True
    assert found["versions"]["torch"]


@pytest.mark.gpu
def test_a_real_gemm_is_within_the_tolerance_of_fp8():
    verdict = real_gemm()
    assert verdict.ok, verdict.reason
    for name in ("fprop", "dgrad", "wgrad"):
        assert name in verdict.reason
