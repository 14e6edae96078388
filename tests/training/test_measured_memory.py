"""What a run held: measured in one step, without a trace left in the run or after it."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from finetune import load_recipe, train
from finetune.errors import ProofError
from finetune.runs.receipt import Receipt, memory_line
from finetune.training.health.memory_meter import Batch, MemoryMeter
from finetune.training.run.interrupt import GracefulStop
from finetune.units import size_of_gib

QUIET = Console(quiet=True)
SMALL = [
    "train.max_steps=3", "train.warmup_steps=0", "train.lr_scheduler_type=constant",
    "train.per_device_train_batch_size=2", "train.max_length=32", "train.save_strategy=no",
    "train.eval_strategy=no", "data.eval_fraction=0", "data.max_rows=12",
    "eval.samples=false",
]  # fmt: skip


def small(name: str, *changes: str):
    return load_recipe(name, [*SMALL, *changes])


class Loop:
    """Steps of a model under a meter, as a trainer would take them."""

    def __init__(self, *, kind: str = "cpu", compiled: str = "off", steps: int = 5) -> None:
        self.proof = SimpleNamespace(is_open=True)
        device = SimpleNamespace(kind=kind)
        session = SimpleNamespace(device=device, compiled=compiled, proof=self.proof)
        self.meter = MemoryMeter(session)  # pyright: ignore[reportArgumentType]
        self.model = nn.Linear(32, 8, bias=False)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), foreach=False)
        self.state = SimpleNamespace(global_step=0, max_steps=steps)
        self.counted: list[int] = []

    def begin(self) -> None:
        self.meter.on_step_begin(None, self.state, None, self.model, self.optimizer)  # pyright: ignore

    def step(self, tokens: int = 4) -> None:
        self.begin()
        if _get_current_dispatch_mode() is not None:
            self.counted.append(self.state.global_step + 1)
        self.model(torch.randn(tokens, 32)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.state.global_step += 1
        self.meter.on_step_end(None, self.state, None)  # pyright: ignore

    def run(self, proven_after: int = 2) -> dict:
        self.meter.on_train_begin(None, self.state, None, self.model)
        while self.state.global_step < self.state.max_steps:
            self.step()
            if self.state.global_step >= proven_after:
                self.proof.is_open = False
        self.meter.on_train_end(None, self.state, None)
        return self.meter.reading()


@pytest.mark.parametrize(
    ("steps", "proven_after", "step"), [(5, 2, 3), (3, 2, 3), (2, 2, 2), (5, 3, 4), (3, 3, 3)]
)
def test_one_step_is_counted_after_the_witnessed_one(steps, proven_after, step) -> None:
    loop = Loop(steps=steps)
    found = loop.run(proven_after)
    assert loop.counted == [step]
    assert found["measured"] == f"peak of live tensors in step {step}"
    weight = 32 * 8 * 4
    assert found["measured_gib"] * 2**30 >= 4 * weight  # with its gradient and two moments
    assert found["measured_gib"] * 2**30 < 8 * weight
    assert "reserved_gib" not in found


def test_a_resumed_run_counts_its_own_steps() -> None:
    loop = Loop(steps=9)
    loop.state.global_step = 4
    assert loop.run(proven_after=6)["measured"].endswith("in step 7")
    assert loop.counted == [7]


def test_all_micro_batches_of_a_step_are_counted() -> None:
    def peak(micro_batches: int) -> float:
        loop = Loop()
        for _ in range(3):
            loop.proof.is_open = False
            loop.begin()
            for i in range(micro_batches):
                loop.model(torch.randn(4 * (1 + 7 * i), 32)).sum().backward()
            loop.state.global_step += 1
            loop.meter.on_step_end(None, loop.state, None)  # pyright: ignore
        return loop.meter.reading()["measured_gib"]

    assert peak(4) > 2 * peak(1)  # the last one is the largest


def test_a_batch_is_noted_with_the_longest_prompt_that_was_answered() -> None:
    class Writing(nn.Linear):
        def forward(self, input_ids, past_key_values=None):  # pyright: ignore
            return super().forward(torch.ones(*input_ids.shape, 32)).sum()

    loop = Loop()
    loop.proof.is_open, loop.model = False, Writing(32, 8)
    for _ in range(3):  # the third is counted
        loop.begin()
    with torch.no_grad():
        for length in (5, 9, 1):  # the last is a token behind its cache
            loop.model(input_ids=torch.ones(2, length, dtype=torch.long), past_key_values=())
        loop.model(input_ids=torch.ones(2, 20, dtype=torch.long))  # scored, not written
    for rows, length in ((2, 3), (2, 12), (1, 13)):
        loop.model(input_ids=torch.ones(rows, length, dtype=torch.long)).backward()
    assert loop.meter.batch == (2, 12, False, 9, {})
    loop.meter.close()


@pytest.mark.parametrize(
    ("loop", "why"),
    [
        (Loop(steps=1), "the only step is the witnessed one"),
        (Loop(compiled="on: 2 decoder layers"), "compiled layers"),
        (Loop(kind="mps"), "mps has no count"),
    ],
)
def test_nothing_measured_has_a_reason(loop, why) -> None:
    found = loop.run()
    assert loop.counted == []
    assert found["measured_gib"] is None
    assert why in found["measured"]
    assert memory_line(found) == ""


def test_before_training_and_after_a_broken_step_there_is_a_reason() -> None:
    loop = Loop()
    assert "training did not begin" in loop.meter.reading()["measured"]
    loop.meter.on_train_begin(None, loop.state, None, loop.model)
    loop.step()
    loop.step()
    loop.proof.is_open = False
    loop.begin()
    assert _get_current_dispatch_mode() is not None
    loop.meter.close()
    loop.meter.close()
    assert _get_current_dispatch_mode() is None
    assert "ended before step 3" in loop.meter.reading()["measured"]


# --------------------------------------------------------------------------------------- whole runs


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("tiny_full_fp8", ("train.gradient_checkpointing=true",)),
        ("tiny_lora_fp8", ("train.gradient_accumulation_steps=2",)),
    ],
)
def test_measuring_changes_no_bit_of_a_run(name, changes, tmp_path, monkeypatch) -> None:
    def weights():
        report = train(small(name, *changes), out=tmp_path, console=QUIET)
        return report, load_file(next((report.folder / "model").glob("*.safetensors")))

    measured, with_it = weights()
    monkeypatch.setattr(MemoryMeter, "_is_due", lambda *_, **__: False)
    unmeasured, without = weights()
    assert measured.receipt.status == unmeasured.receipt.status == "proven"
    assert measured.receipt.memory["measured"] == "peak of live tensors in step 3"
    assert unmeasured.receipt.memory["measured_gib"] is None
    assert all(torch.equal(with_it[key], without[key]) for key in without)
    written = json.loads((measured.folder / "receipt.json").read_text())
    assert written["memory"] == measured.receipt.memory
    assert measured.peak_memory_gib > measured.receipt.memory["measured_gib"]


@pytest.mark.slow
@pytest.mark.parametrize("error", [KeyboardInterrupt(), ProofError("not in FP8")])
def test_a_step_that_breaks_off_leaves_no_mode(error, tmp_path, monkeypatch) -> None:
    def breaks(self, *args, **kwargs):
        if _get_current_dispatch_mode() is not None:
            raise error

    monkeypatch.setattr(GracefulStop, "on_pre_optimizer_step", breaks)
    if isinstance(error, KeyboardInterrupt):
        assert train(small("tiny_full_bf16"), out=tmp_path, console=QUIET).interrupted
    else:
        with pytest.raises(ProofError, match="not in FP8"):
            train(small("tiny_full_bf16"), out=tmp_path, console=QUIET)
    assert _get_current_dispatch_mode() is None
    (receipt,) = tmp_path.glob("*/*/receipt.json")
    assert "ended before step 3" in json.loads(receipt.read_text())["memory"]["measured"]


@pytest.mark.slow
def test_what_was_predicted_stands_beside_it(tmp_path, monkeypatch) -> None:
    forecast, asked = {"predicted_gib": 0.03, "predicted": "by a test"}, []

    def predicted(self, run, batch):
        asked.append((batch, run.processes))
        return forecast

    monkeypatch.setattr("finetune.estimator.gate.MemoryForecast.predicted", predicted)
    report = train(small("tiny_lora_bf16"), out=tmp_path, console=QUIET)
    memory = report.receipt.memory
    assert memory.items() >= forecast.items()
    assert memory_line(memory).startswith("tensors: predicted 30.7 MiB, measured ")
    assert json.loads((report.folder / "receipt.json").read_text())["memory"] == memory
    assert asked == [(Batch(rows=2, length=32, padded=False), 1)]


# ---------------------------------------------------------------------------------------- rendering


@pytest.mark.parametrize(
    ("memory", "line"),
    [
        ({}, ""),
        (
            {"predicted_gib": 37.9 / 1024, "measured_gib": 38.0 / 1024},
            "tensors: predicted 37.9 MiB, measured 38.0 MiB (+0.3 %)",
        ),
        ({"measured_gib": 2.5}, "tensors: measured 2.5 GiB"),
        ({"predicted_gib": 2.5, "measured_gib": None}, "tensors: predicted 2.5 GiB"),
        (
            {
                "predicted_gib": 50.0,
                "measured_gib": 49.0,
                "predicted_reserved_gib": 60.0,
                "reserved_gib": 60.0,
            },
            "tensors: predicted 50.0 GiB, measured 49.0 GiB (-2.0 %), reserved predicted 60.0 GiB, "
            "reserved measured 60.0 GiB (+0.0 %)",
        ),
    ],
)
def test_the_line_of_a_receipt(memory, line) -> None:
    assert memory_line(memory) == line
    console = Console(width=300, record=True, quiet=True)
    with console.capture() as shown:
        console.quiet = False
        console.print(Receipt("proven", {"ran": "bf16"}, memory=memory))
    assert line in shown.get()
    assert ("tensors:" in shown.get()) == bool(line)


@pytest.mark.parametrize(
    ("gib", "text"),
    [(0, "0 B"), (1000 / 2**30, "1000 B"), (2**-20, "1.0 KiB"), (1, "1.0 GiB"), (3072, "3.0 TiB")],
)
def test_sizes_in_sensible_units(gib, text) -> None:
    assert size_of_gib(gib) == text
