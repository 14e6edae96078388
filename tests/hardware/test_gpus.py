"""The table of GPUs: found by what one types, complete, and open to lines of one's own."""

from __future__ import annotations

import pytest

from finetune.errors import ConfigError
from finetune.hardware.device import Device, installed_model
from finetune.hardware.gpus import (
    as_device,
    find_gpu,
    gpu_table,
    gpus_with_own,
    named_gpu,
)
from finetune.hardware.requirements import resolve
from finetune.precision.facts import BLOCK_CAPABILITY, FP8_CAPABILITY
from finetune.precision.settings import PrecisionConfig

OWN = """\
- name: H20
  names: ["NVIDIA H20"]
  capability: [9, 0]
  memory_gib: 95.1
  tflops: {fp32: 44, tf32: 74, bf16: 148, fp16: 148, fp8: 296}
  gb_s: 4000
  sms: 78
  l2_mib: 60
  link: nvlink
  link_gb_s: 450
  price_usd_per_hour: 1.5
  source: mine
"""


@pytest.fixture(autouse=True)
def no_own_file(monkeypatch, tmp_path):
    """No GPUs of whoever runs the tests."""
    monkeypatch.delenv("FINETUNE_GPUS", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.fixture
def own(monkeypatch, tmp_path):
    """A function that makes a text the user's own file of GPUs."""

    def write(text: str) -> str:
        path = tmp_path / "mine.yaml"
        path.write_text(text)
        monkeypatch.setenv("FINETUNE_GPUS", str(path))
        return str(path)

    return write


# ----------------------------------------------------------------------------------- what one types


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("H100", "H100"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("h100 pcie", "H100-PCIe"),
        ("4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("a100 80gb", "A100-80GB"),
        ("A100-SXM4-40GB", "A100-40GB"),
        ("RTX PRO 6000", "RTX PRO 6000"),
        ("rtx pro 6000 max-q", "RTX PRO 6000 Max-Q"),
        ("AMD Instinct MI300X", "MI300X"),
    ],
)
def test_named(text, name) -> None:
    assert named_gpu(text).name == name


def test_every_name_leads_to_its_own_line() -> None:
    seen: dict[str, str] = {}
    for gpu in gpu_table():
        for text in (gpu.name, *gpu.aliases, *gpu.names):
            assert named_gpu(text.replace("*", "")) is gpu
        assert not seen.keys() & gpu.keys
        seen |= dict.fromkeys(gpu.keys, gpu.name)


@pytest.mark.parametrize("text", ["A100", "V100", "RTX", "", "A100-PCIe"])
def test_too_little_is_an_error(text) -> None:
    with pytest.raises(ConfigError) as caught:
        named_gpu(text)
    if text == "A100":
        assert "A100-40GB" in caught.value.fix
        assert "A100-80GB-PCIe" in caught.value.fix


@pytest.mark.parametrize(
    ("text", "hint"),
    [("H1000", "'H100'"), ("B20O", "'B200'"), ("RTX 4090 Ti", "'RTX 4090'"), ("zzzz", "")],
)
def test_unknown_names_the_nearest_and_all(text, hint) -> None:
    with pytest.raises(ConfigError) as caught:
        named_gpu(text)
    assert (f"did you mean {hint}?" in caught.value.what) == bool(hint)
    assert "L40S" in caught.value.fix


# ------------------------------------------------------------------------------------------ figures


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
        ("NVIDIA L40S", 362, 864),
        ("NVIDIA GeForce RTX 4090", 165.2, 1008),
        ("NVIDIA H100 80GB HBM3", 989.4, 3352),
        ("NVIDIA B200", 2250, 8000),
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


def test_the_links_of_pci_express_are_those_of_its_generations() -> None:
    assert {g.link_gb_s for g in gpu_table() if g.link == "pcie"} == {15.75, 31.5, 63}


def test_peaks_are_units_times_clock() -> None:
    """Divided by SMs and their dense FP16 multiply-adds in a clock (float32 sums), GHz are left."""
    rates = {(7, 0): 512, (7, 5): 512, (8, 0): 1024, (9, 0): 2048, (9, 4): 1024, (10, 0): 4096}
    for gpu in gpu_table():
        halved = "RTX" in gpu.name and "PRO" not in gpu.name and gpu.name != "RTX A6000"
        graphics = 256 if halved or gpu.name == "A10G" else 512
        rate = rates.get(gpu.capability, graphics)
        assert 1.4 < gpu.tflops["fp16"] * 1e3 / (2 * rate * gpu.sms) < 2.7, gpu.name


# --------------------------------------------------------------------------- a GPU that is not here


@pytest.mark.parametrize("gpu", gpu_table(), ids=lambda gpu: gpu.name)
def test_as_device_comes_back(gpu) -> None:
    device = as_device(gpu)
    assert find_gpu(device) is gpu
    assert device.memory_gib == gpu.memory_gib


def test_precision_is_resolved_for_a_gpu_that_is_not_here() -> None:
    precision = PrecisionConfig(compute="fp8", backend="torchao", on_unsupported="bf16")
    ran = {name: resolve(precision, as_device(named_gpu(name))) for name in ("H100", "A100-80GB")}
    assert ran["H100"].precision.compute == "fp8"
    assert ran["A100-80GB"].precision.compute == "bf16"
    amd = resolve(precision, as_device(named_gpu("MI300X")))
    assert amd.precision.compute == "bf16", "its FP8 is none that these backends use"


# ------------------------------------------------------------------------------- lines of one's own


def test_own_gpu_is_known_by_name_and_by_the_driver(own) -> None:
    own(OWN)
    gpu = named_gpu("h20")
    assert (gpu.price_usd_per_hour, gpu.tflops["fp8"], gpu.capability) == (1.5, 296, (9, 0))
    assert find_gpu(as_device(gpu)) == gpu
    assert len(gpus_with_own()) == len(gpu_table()) + 1
    assert named_gpu("H100").name == "H100"


def test_own_file_in_its_usual_place(tmp_path) -> None:
    folder = tmp_path / ".config" / "fp8-finetune"
    folder.mkdir(parents=True)
    (folder / "gpus.yaml").write_text(OWN)
    assert named_gpu("H20").memory_gib == 95.1


def test_own_line_of_the_same_name_replaces(own) -> None:
    own(OWN.replace("name: H20", "name: h200").replace("NVIDIA H20", "NVIDIA H200"))
    assert named_gpu("H200").price_usd_per_hour == 1.5
    assert len(gpus_with_own()) == len(gpu_table())


@pytest.mark.parametrize(
    ("change", "line", "words"),
    [
        (("gb_s: 4000", "gb_s: fast"), 6, ["gb_s", "number"]),
        (("gb_s: 4000", "gb_s: -1"), 6, ["gb_s", "greater than 0"]),
        (("  sms: 78\n", ""), 1, ["sms is missing"]),
        (("sms: 78", "smss: 78"), 7, ["smss", "sms"]),
        (("fp8: 296", "fp7: 296"), 5, ["fp7"]),
        (("bf16: 148, fp16: 148, ", ""), 1, ["bf16 or fp16"]),
        (("link: nvlink", "link: rope"), 9, ["link", "nvlink"]),
        (("name: H20", "name: RTX"), 1, ["letter or digit"]),
        (("sms: 78", "sms: [78"), 8, ["not valid YAML"]),
        (("- name", "name"), 1, ["valid YAML"]),
    ],
    ids=lambda value: str(value)[:24],
)
def test_a_wrong_file_is_named_with_its_line(own, change, line, words) -> None:
    path = own(OWN.replace(*change))
    with pytest.raises(ConfigError) as caught:
        gpus_with_own()
    message = str(caught.value)
    if "valid YAML" not in words[0]:
        assert f"{path}:{line}" in caught.value.where
    assert path in caught.value.where
    assert all(word in message for word in words), message


def test_a_file_that_is_not_there(monkeypatch) -> None:
    monkeypatch.setenv("FINETUNE_GPUS", "/nowhere/gpus.yaml")
    with pytest.raises(ConfigError, match="FINETUNE_GPUS"):
        named_gpu("H100")


def test_two_of_one_name_are_refused(own) -> None:
    own(OWN.replace("name: H20", "name: mine\n  aliases: [H100]"))
    with pytest.raises(ConfigError, match="same name"):
        gpus_with_own()
    own(OWN + OWN)
    with pytest.raises(ConfigError, match="same name"):
        gpus_with_own()


def test_the_installed_gpu_is_read_from_the_driver(tmp_path) -> None:
    assert installed_model(tmp_path) is None
    (tmp_path / "0000:01:00.0").mkdir()
    text = "Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 123\n"
    (tmp_path / "0000:01:00.0" / "information").write_text(text)
    model = installed_model(tmp_path)
    assert model is not None
    found = find_gpu(Device("cuda", model, None, 0.0))
    assert found is not None
    assert found.name == "H100"


def test_a_user_without_a_home_has_no_gpus_of_its_own(monkeypatch):
    """As in a container started with a number for a user: each estimate was a traceback."""
    for name in ("HOME", "XDG_CACHE_HOME", "FINETUNE_GPUS"):
        monkeypatch.delenv(name, raising=False)

    def unknown(_):
        raise KeyError

    monkeypatch.setattr("pwd.getpwuid", unknown)
    assert gpus_with_own() == gpu_table()
