"""Energy of a run, counted by a stand-in of NVML whose figures are made by hand."""

from __future__ import annotations

import json
import sys
from types import ModuleType, SimpleNamespace

import pytest

from finetune.hardware.energy import EnergyCounter
from finetune.training.health import callbacks
from finetune.training.health.callbacks import MetricsWriter

UUID = "5f0c-b7"


class Nvml(ModuleType):
    """`pynvml` of a machine of one GPU, whose counter stands where a test puts it."""

    class NVMLError(Exception):
        pass

    def __init__(self, *, counts: bool = True) -> None:
        super().__init__("pynvml")
        self.counts, self.joules, self.watts = counts, 0.0, 0.0

    def nvmlInit(self) -> None:  # noqa: N802
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        if uuid != f"GPU-{UUID}":
            raise self.NVMLError("Not Found")
        return "the GPU"

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:  # noqa: N802
        if not self.counts or handle != "the GPU":
            raise self.NVMLError("Not Supported")
        return round(self.joules * 1000)

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:  # noqa: N802
        assert handle == "the GPU"
        return round(self.watts * 1000)


@pytest.fixture
def gpu(monkeypatch):
    """A function that makes the machine's NVML, and the GPU that torch names."""

    def make(*, uuid: str = UUID, counts: bool = True) -> Nvml:
        nvml = Nvml(counts=counts)
        monkeypatch.setitem(sys.modules, "pynvml", nvml)
        monkeypatch.setattr("torch.cuda.current_device", lambda: 3)
        monkeypatch.setattr(
            "torch.cuda.get_device_properties", lambda _: SimpleNamespace(uuid=uuid)
        )
        return nvml

    return make


class Run:
    """A trainer's events by hand: `at(seconds, joules or watts)` sets clock and meter."""

    def __init__(self, folder, nvml, monkeypatch) -> None:
        self.now, self.nvml = 0.0, nvml
        monkeypatch.setattr(callbacks.time, "perf_counter", lambda: self.now)
        self.state = SimpleNamespace(global_step=0, is_world_process_zero=True)
        self.metrics = MetricsWriter(folder / "metrics.jsonl", "FP8", EnergyCounter("cuda"))
        self.tell("train_begin")

    def at(self, seconds: float, **meter: float) -> Run:
        self.now = seconds
        vars(self.nvml).update(meter)
        return self

    def tell(self, event: str, **more: object) -> None:
        getattr(self.metrics, f"on_{event}")(None, self.state, None, **more)

    def log(self, step: int, tokens: int) -> dict:
        self.state.global_step = step
        self.tell("log", logs={"loss": 1.0, "num_tokens": tokens})
        return self.metrics.rows[-1]


def test_joules_are_those_of_training_without_evaluations(tmp_path, gpu, monkeypatch):
    run = Run(tmp_path, gpu(), monkeypatch)
    row = run.at(2, joules=800.0).log(2, 100)
    assert (row["watts"], row["joules"], row["step_seconds"]) == (400, 800, 1)
    # Right behind a log: 3 s and 900 J of it are no training's.
    run.at(3, joules=900.0).tell("prediction_step")
    run.at(5, joules=1700.0).tell("evaluate")
    row = run.at(7, joules=2100.0).log(4, 200)
    assert (row["watts"], row["joules"], row["tokens_per_s"]) == (200, 1200, 50)
    # Between two logs: step 5 is before it, step 6 behind it.
    run.state.global_step = 5
    run.at(8, joules=2200.0).tell("prediction_step")
    run.at(20, joules=9200.0).tell("prediction_step")
    run.at(30, joules=9900.0).tell("evaluate")
    with run.at(30.5, joules=9950.0).metrics.aside():  # tasks, say
        run.at(60, joules=20000.0)
    row = run.at(61, joules=20050.0).log(6, 300)
    assert (row["watts"], row["joules"], row["step_seconds"]) == (80, 1400, 1.25)
    run.at(61.5, joules=20090.0).tell("train_end")
    assert run.metrics.energy(tokens=2880) == {
        "joules": 1440.0,
        "tokens_per_joule": 2.0,
        "mean_watts": 205.7,  # of 7 s
        "measured": "the GPU's own energy counter, training without evaluations",
    }


def test_where_the_gpu_does_not_count_power_is_added_up_step_by_step(tmp_path, gpu, monkeypatch):
    run = Run(tmp_path, gpu(counts=False), monkeypatch)
    run.at(1, watts=100.0).tell("step_end")
    run.at(3, watts=300.0).tell("step_end")
    row = run.at(4, watts=50.0).log(2, 100)
    assert (row["joules"], row["watts"]) == (100 + 600 + 50, 187.5)


@pytest.mark.parametrize("missing", ["library", "gpu", "slice", "later"])
def test_what_is_not_measured_says_why(missing, tmp_path, gpu, monkeypatch):
    nvml = gpu(uuid="another" if missing == "slice" else UUID)
    if missing == "library":
        monkeypatch.setitem(sys.modules, "pynvml", None)
    counter = EnergyCounter("cpu" if missing == "gpu" else "cuda")
    metrics = MetricsWriter(tmp_path / "metrics.jsonl", "FP8", counter)
    nvml.counts = missing != "later"
    state = SimpleNamespace(global_step=2, is_world_process_zero=True)
    metrics.on_log(None, state, None, logs={"loss": 1.0})
    assert not {"joules", "watts"} & metrics.rows[0].keys()
    found = metrics.energy(10)
    why = {"library": "[energy]", "gpu": "no NVIDIA GPU", "slice": "NVML says Not Found",
           "later": "NVML says Not Supported"}[missing]  # fmt: skip
    assert found["measured"].startswith("not measured: ")
    assert why in found["measured"]
    assert found["joules"] is found["tokens_per_joule"] is found["mean_watts"] is None


@pytest.mark.slow
def test_a_run_has_its_energy_in_summary_receipt_and_rows(cli, gpu, monkeypatch, tmp_path):
    nvml = gpu()

    def counts(handle: str) -> int:
        nvml.joules += 7.0
        return round(nvml.joules * 1000)

    nvml.nvmlDeviceGetTotalEnergyConsumption = counts
    monkeypatch.setattr(
        "finetune.training.run.observers.EnergyCounter", lambda _: EnergyCounter("cuda")
    )
    settings = [
        "train.max_steps=3", "data.max_rows=12", "train.warmup_steps=0", "train.logging_steps=1",
        "train.lr_scheduler_type=constant", "train.eval_strategy=no", "data.eval_fraction=0",
    ]  # fmt: skip
    found = cli("tiny_full_bf16", *settings)
    assert found.code == 0, found.err
    (folder,) = (tmp_path / "runs" / "tiny_full_bf16").iterdir()
    energy = json.loads((folder / "receipt.json").read_text())["energy"]
    steps = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert energy["joules"] % 7 == 0
    assert energy["tokens_per_joule"] == sum(s["tokens"] for s in steps) / energy["joules"]
    logged = [row["joules"] for row in rows if "loss" in row]
    assert logged == sorted(set(logged))
    assert logged[-1] < energy["joules"] <= nvml.joules
    assert f" W, {energy['tokens_per_joule']:.3g} tokens per joule\n" in found.out


def test_a_comparison_has_the_ratio_of_tokens_per_joule(tmp_path, monkeypatch):
    from finetune.analysis.compare.result import read_comparison
    from finetune.analysis.compare.verdict import judge
    from finetune.analysis.experiment.outcome import read_outcome
    from finetune.logging import as_text
    from tests.run_folders import make_comparison

    monkeypatch.setattr("finetune.analysis.compare.verdict.executed_differences", lambda *_: [])
    folder = make_comparison(tmp_path / "compared")
    found = read_comparison(folder)
    for pair in found.runs:
        for run, rate in ((pair.a, 8.0), (pair.b, 5.0)):
            file = folder / run / "receipt.json"
            energy = {"joules": 10.0, "tokens_per_joule": rate, "mean_watts": 1.0}
            file.write_text(json.dumps(json.loads(file.read_text()) | {"energy": energy}))
    pairs = [(read_outcome(folder / pair.a), read_outcome(folder / pair.b)) for pair in found.runs]
    judged = judge(found, pairs)
    assert judged.energy is not None
    assert judged.energy.ratio == pytest.approx(1.6)
    assert "FP8 trains 1.600x the tokens of BF16 per joule; 8 and 5 tokens" in as_text(judged)
