"""What an error says to do is done, and works: precisions that a device cannot have."""

from __future__ import annotations

import importlib.util
import itertools
import subprocess
import sys
from types import SimpleNamespace

import pytest

from finetune import load_recipe
from finetune.errors import ConfigError, MissingExtraError, PrecisionError
from finetune.hardware import requirements
from finetune.hardware.device import Verdict
from finetune.hardware.requirements import FP8_GPUS, backend_verdict, check_here, resolve
from tests.conftest import A100, APPLE, B200, CPU, H100, RTX4090, V100, slow_but
from tests.hardware.test_gemm_engine import RTX5090

BACKENDS = ("te", "torchao", "auto")
SCALINGS = ("delayed", "tensorwise", "rowwise", "blockwise", "mxfp8", "nvfp4")
MORE = (
    "", "precision.format=e5m2", "precision.format=hybrid", "precision.high_gemms=[wgrad]",
    "precision.power_of_two_scales=true", "precision.compile=on",
)  # fmt: skip
DEVICES = {d.name: d for d in (A100, APPLE, B200, CPU, H100, RTX4090, RTX5090, V100)}


def ways(device, overrides):
    """The settings that the refusal names, each as it is typed; none if nothing is refused."""
    try:
        precision = load_recipe("tiny_full_fp8", overrides, check_train=False).config.precision
    except ConfigError:
        return []  # settings that exclude one another, on every device
    try:
        resolve(precision, device)
    except (MissingExtraError, PrecisionError) as error:
        ways = error.fix.split(", or ")
        return [way for way in ways if way != FP8_GPUS and not way.startswith("pip install")]
    return []


@pytest.mark.parametrize("emulation", ["forbid", "allow"])
@pytest.mark.parametrize("device", slow_but([CPU, H100, RTX5090], DEVICES.values()), ids=DEVICES)
def test_every_setting_that_a_refusal_names_works(device, emulation) -> None:
    tried = 0
    for backend, scaling, more in itertools.product(BACKENDS, SCALINGS, MORE):
        overrides = [f"precision.backend={backend}", f"precision.scaling={scaling}"]
        overrides += [f"precision.emulation={emulation}", *([more] if more else [])]
        for way in ways(device, overrides):
            chosen = way.partition(" (")[0].split()
            config = load_recipe("tiny_full_fp8", [*overrides, *chosen], check_train=False).config
            found = resolve(config.precision, device)
            assert not found.fallback
            fp8 = "compute" not in way
            assert (found.precision.compute == "fp8") is fp8, (overrides, way)
            tried += 1
    assert tried > (20 if emulation == "forbid" else 0)


def test_a_refusal_of_te_on_a_cpu_does_not_name_what_gives_it_again() -> None:
    (emulated, bf16) = ways(CPU, ["precision.backend=te", "precision.scaling=delayed"])
    assert emulated == "precision.backend=emulated (exact FP8 rounding, slow)"
    assert bf16 == "precision.compute=bf16"


@pytest.mark.parametrize(
    ("scaling", "high", "taken"),
    [("delayed", ("dgrad", "wgrad"), False), ("delayed", (), True),
     ("tensorwise", ("dgrad", "wgrad"), True), ("tensorwise", ("wgrad",), False)],
)  # fmt: skip
def test_te_keeps_two_gemms_high_together_and_none_under_delayed_scaling(scaling, high, taken):
    asked = [f"precision.scaling={scaling}", f"precision.high_gemms=[{','.join(high)}]"]
    precision = load_recipe("tiny_full_fp8", asked, check_train=False).config.precision
    verdict = backend_verdict("te", precision, H100, Verdict(True, "it is there"))
    assert bool(verdict) is taken, verdict.reason


def test_a_backend_named_emulated_is_permission_enough() -> None:
    config = load_recipe(
        "tiny_full_fp8", ["precision.backend=emulated", "precision.emulation=forbid"]
    ).config
    assert resolve(config.precision, CPU).label == "FP8 emulated/delayed"


def test_ligers_kernels_are_asked_for_and_then_refused_on_a_cpu(monkeypatch) -> None:
    found: list[str] = []
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found.append(name) or name)
    overrides = ["train.use_liger_kernel=true", "train.optim=adamw_8bit"]
    config = load_recipe("tiny_full_fp8", overrides, check_train=False).config
    check_here(config, H100)
    assert "liger_kernel" in found
    with pytest.raises(ConfigError, match="Liger's kernels were requested on a CPU"):
        check_here(load_recipe("tiny_full_fp8", overrides[:1], check_train=False).config, CPU)


@pytest.mark.parametrize(
    ("recipe", "override", "instead"),
    [
        ("tiny_qlora_bf16", "model.storage=nf4", "model.storage=fp8"),
        ("tiny_full_fp8", "train.optim=adamw_8bit", "train.optim=adamw_torch_8bit"),
    ],
)
def test_bitsandbytes_without_kernels_is_refused_before_a_model_is_loaded(
    monkeypatch, recipe, override, instead
) -> None:
    """It imports nevertheless, and a model that it could not store was called broken."""
    cextension = pytest.importorskip("bitsandbytes.cextension")
    missing = "libcublas.so.13: cannot open shared object file"
    lib = SimpleNamespace(compiled_with_cuda=False, error_msg=missing)
    monkeypatch.setattr(cextension, "lib", lib)
    monkeypatch.setattr(requirements, "this_device", lambda: H100)
    config = load_recipe(recipe, [override], check_train=False).config
    with pytest.raises(MissingExtraError, match=f"{override} cannot run on") as refused:
        check_here(config, H100)
    assert refused.value.why.endswith(missing)
    assert refused.value.fix.endswith(instead)
    check_here(config, RTX4090)  # some other machine's
    lib.compiled_with_cuda = True
    check_here(config, H100)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("Failed to find C compiler."), "Failed to find C compiler"),
        (AssertionError("libcuda.so cannot found!"), "libcuda.so cannot found!"),
        (subprocess.CalledProcessError(1, ["gcc", "-c"]), "gcc cannot compile Triton's launcher"),
    ],
)
def test_a_machine_without_a_c_compiler_is_refused_before_a_model_is_loaded(
    monkeypatch, error, said
) -> None:
    class Driver:
        @property
        def active(self) -> None:
            raise error

    runtime = SimpleNamespace(driver=Driver())
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(runtime=runtime))
    monkeypatch.setitem(sys.modules, "triton.runtime", runtime)
    monkeypatch.setattr(requirements, "this_device", lambda: H100)
    requirements.has_launcher.cache_clear()

    def check(*overrides: str) -> None:
        precision = load_recipe(overrides[0], overrides[1:]).config.precision
        requirements.check_launcher(resolve(precision, H100).precision, H100)

    try:
        for recipe in (("tiny_lora_fp8",), ("tiny_full_fp8", "precision.scaling=tensorwise")):
            with pytest.raises(MissingExtraError, match="Triton cannot run kernels") as refused:
                check(*recipe)
            assert said in refused.value.why
            without = refused.value.fix.rpartition("; or ")[2].partition(",")[0]
            check(*recipe, without)
        check("tiny_lora_bf16")
    finally:
        requirements.has_launcher.cache_clear()
