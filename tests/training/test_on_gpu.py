"""Whole runs on a GPU made of host memory (`tests.host_gpu`): the paths that CUDA alone takes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.host_gpu.device import build

ROOT = Path(__file__).parents[2]
CODES = (
    "tiny_full_fp8 precision.scaling=tensorwise precision.compile=on "
    "train.gradient_checkpointing=true"
)
MASTERS = f"{CODES} precision.fp8_params=true precision.health_every=4"
CASES = (
    "tiny_lora_fp8 train.packing=true precision.health_every=4 precision.compile=on",
    "tiny_lora_fp8 precision.compile=off train.gradient_checkpointing=true",
    "tiny_full_fp8 precision.scaling=tensorwise",
    CODES,
    MASTERS,
)


def on_gpu(*words: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    """`python -m` of these words on a machine with an H100."""
    if build() is None:
        pytest.skip("needs g++ on Linux")
    paths = f"{ROOT}{os.pathsep}{ROOT / 'tests/host_gpu/site'}"
    env = os.environ | {"HOST_GPU": "H100", "PYTHONPATH": paths, "COLUMNS": "120"} | environment
    command = [sys.executable, "-m", *words]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def runs(made_once):
    """What came of each case, on a machine of two H100."""

    def make(folder: Path) -> dict[str, dict]:
        done = on_gpu("tests.host_gpu.worker", str(folder), *CASES, HOST_GPUS="2")
        assert done.returncode == 0, done.stderr[-4000:]
        found = [json.loads(line) for line in done.stdout.splitlines() if line[:1] == "{"]
        return {run["case"]: run for run in found}

    return made_once("runs on a GPU of host memory", make)


AWAY = "precision.fp8_params=true precision.compile=off"
MEMORY = (
    f"{AWAY} precision.scaling=tensorwise",
    f"{AWAY} precision.scaling=rowwise train.gradient_checkpointing=true "
    "train.gradient_accumulation_steps=2",
    "qwen3_vl precision.compile=off precision.scaling=tensorwise model.train_vision=projector",
)


@pytest.mark.long
def test_a_gpu_and_its_host_take_what_is_predicted(tmp_path) -> None:
    done = on_gpu("tests.host_gpu.memory", str(tmp_path), *MEMORY)
    assert done.returncode == 0, done.stderr[-4000:]
    found = [json.loads(line) for line in done.stdout.splitlines() if line[:1] == "{"]
    assert len(found) == len(MEMORY)
    for run in found:
        predicted, measured = run["device"]
        assert abs(predicted / measured - 1) < 0.01, run
        assert run["pinned"][0] == run["pinned"][1], run
        states, held = run["pageable"]
        assert held <= states <= 1.2 * held, run  # one weight's temporaries


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_a_run_is_proven_and_waits_once_a_step(runs, case) -> None:
    """To see that its gradients are finite; a micro-step waits for nothing of ours.

    With masters in host memory once more, where gradients are waited for anyhow: to compare codes.
    """
    run = runs[case]
    assert run["status"] == "proven"
    assert run["precision"]["ran"] == "fp8"
    assert run["environment"]["name"] == "NVIDIA H100 80GB HBM3"
    assert run["memory"]["measured"] == "peak allocated by torch, whole training"
    assert run["loss"] < 6
    once = {"finetune/training/health/finiteness.py all_finite": run["steps"]}
    if case == MASTERS:
        once["finetune/precision/stored/masters.py is_cast"] = run["steps"]
    assert run["waits"] == once


@pytest.mark.long
def test_engines_and_kernels_are_those_of_a_gpu(runs) -> None:
    packed, eager, full = (runs[case]["precision"] for case in CASES[:3])
    assert packed["attention"] == "varlen, FlashAttention-2"
    assert packed["gemm"] == eager["gemm"] == "cuBLASLt outer-vector"
    assert packed["compile"].startswith("on: 4 decoder layers")
    assert eager["kernels"] == "triton"
    assert full["effective"]["engine"] == "torchao.float8"
    assert not full["effective"]["emulate"]
    assert (
        full["compile"] == "off: compiling saves 12 micro-batches 0.048 s of the 45 that it takes"
    )


@pytest.mark.long
def test_masters_in_host_memory_change_no_loss_and_take_less_of_the_gpu(runs) -> None:
    on_device, away = runs[CODES], runs[MASTERS]
    assert away["precision"]["backend"] == "fp8_params"
    assert away["precision"]["evaluation"] == "high, by FP8 weights"
    assert away["loss"] == on_device["loss"]
    # No gradient and no moment of AdamW: 0.040 GiB instead of 0.053.
    assert away["memory"]["measured_gib"] < 0.8 * on_device["memory"]["measured_gib"]


@pytest.mark.long
def test_segments_of_the_allocator_grow_on_a_gpu(runs) -> None:
    for run in runs.values():
        assert run["allocator"] == "expandable_segments:True"


@pytest.mark.long
def test_one_process_takes_one_gpu_of_several_and_says_so(runs) -> None:
    for run in runs.values():
        assert run["notes"][0].startswith("1 of 2 GPUs trains; all of them: torchrun")


@pytest.mark.long
def test_a_diagnosis_of_compiled_layers_ends_in_kernels(tmp_path) -> None:
    done = on_gpu("finetune", "diagnose", "tiny_lora_fp8", "--steps", "1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "torch.compile: on: 4 decoder layers" in done.stdout
    assert "slowest kernels" in done.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_a_run_that_has_no_memory_is_refused_and_if_forced_says_what_to_do(tmp_path) -> None:
    words = ("finetune", "tiny_full_fp8", "precision.scaling=tensorwise", "train.eval_strategy=no")
    refused = on_gpu(*words, cwd=tmp_path, HOST_GPU_GIB="0.04")
    assert refused.returncode == 2
    assert "does not fit here" in refused.stderr
    forced = on_gpu(*words, "--force", cwd=tmp_path, HOST_GPU_GIB="0.04")
    assert forced.returncode == 2
    assert "error: the run is out of memory" in forced.stderr
    assert "train.gradient_checkpointing=true" in forced.stderr
    assert "(allocator: expandable_segments:True)" in forced.stderr
    assert "Traceback" not in forced.stderr.partition("error: the run")[2]
