"""Whole diagnoses of the tiny recipes: they add up, and say what the run's own receipt says."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from torch.profiler import ProfilerActivity, profile, record_function

import finetune
from finetune import load_recipe
from finetune.analysis.diagnose import diagnose as module
from finetune.analysis.diagnose.facts import predict
from finetune.analysis.diagnose.groups import precisions_of
from finetune.analysis.diagnose.observer import PREFIX, WINDOW, Ranges, StepObserver
from finetune.analysis.diagnose.result import Diagnosis
from finetune.analysis.diagnose.timeline import Timeline, read_profile
from finetune.config.recipe import with_overrides
from finetune.data.dataset import random_rows
from finetune.errors import ProofError
from finetune.estimator.speed.step_parts import PROFILED_PARTS, StepPart
from finetune.precision import convert
from finetune.precision.planner import plan
from finetune.precision.settings import PrecisionConfig
from finetune.training.helper import session
from tests.conftest import CPU, H100, batch
from tests.traced import traced

SMALL = (
    "data.max_rows=24",
    "train.per_device_train_batch_size=2",
    "train.max_length=64",
    "train.warmup_steps=0",
)


def check(found: Diagnosis) -> dict:
    """What holds for every diagnosis; its JSON."""
    assert found.receipt.status == "proven"
    assert sum(found.shares.values()) == pytest.approx(1)
    assert all(share >= 0 for share in found.shares.values())
    assert sum(group.share for group in found.groups) == pytest.approx(1)
    names = [name for group in found.groups for name in group.layers]
    assert sorted(names) == sorted(row.name for row in found.receipt.layers)
    for row in found.receipt.layers:
        (group,) = [group for group in found.groups if row.name in group.layers]
        assert group.ran == precisions_of(row)
        assert group.shape == row.shape
    for cause in found.causes:
        assert 0 <= cause.share <= 1
        changed = with_overrides(found.facts.config, cause.change)
        assert (changed != found.facts.config) == bool(cause.change)
    return json.loads(found.to_json())


def test_every_step_sees_the_micro_batch_whose_tokens_are_counted() -> None:
    """Rows differ in length: tokens of one and seconds of others would make no tokens/s."""
    seen = []
    trainer = SimpleNamespace(training_step=lambda _, inputs: seen.append(inputs))
    observer = StepObserver(session=None, steps=1)
    observer.attend(trainer)
    for step, length in enumerate((5, 9, 2)):
        observer.on_step_begin(None, SimpleNamespace(global_step=step), None)
        for rows in (2, 3):  # micro-batches
            ids = torch.ones(rows, length + rows, dtype=torch.long)
            trainer.training_step(None, {"input_ids": ids, "attention_mask": ids.tril()})
    assert observer.tokens == (14, 3)
    assert {tuple(inputs["input_ids"].shape) for inputs in seen} == {(2, 7)}
    assert len(seen) == 6


def test_kernels_of_a_fused_loss_are_the_heads(make_llama) -> None:
    """In slabs of 16,384 words, of which no size tells that they are; in both directions."""
    from trl.trainer.utils import add_fused_lm_head

    model = make_llama(vocab_size=33_000)
    add_fused_lm_head(model)
    conversion = convert.apply(model, plan(model, PrecisionConfig(compute="bf16")))
    ids = batch(1, 24)["input_ids"]
    watched = profile(activities=[ProfilerActivity.CPU], record_shapes=True, acc_events=True)
    with watched as seen, Ranges(conversion), record_function(WINDOW):
        model(input_ids=ids, labels=ids, fused_lm_head=True).loss.backward()
    events = seen.events()
    assert events is not None
    trace = read_profile(events, steps=1, low={})
    of_head = [piece for piece in trace.slices if 33_000 % 2**14 in piece.sizes]
    assert {(piece.owner, piece.phase) for piece in of_head} == {
        ("lm_head", "forward"), ("lm_head", "backward"),
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # dynamo warns about parts of torch that it traces
def test_compiled_layers_in_ranges_are_still_ours(make_llama, setup_backend) -> None:
    """Else the proof takes their calls for a script's own, and no diagnosis on a GPU ends."""
    with traced():
        accelerator = setup_backend("torchao", compile="on", scaling="tensorwise")
        model = make_llama().train()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        model, optimizer = accelerator.prepare(model, optimizer)

        def step() -> None:
            accelerator.backward(model(**batch()).loss)
            optimizer.step()
            optimizer.zero_grad()

        step()
        step()
        running = session.in_force()
        assert running is not None
        conversion = running.conversion
        assert conversion is not None
        assert len(conversion.compiled) == 2
        watched = profile(activities=[ProfilerActivity.CPU], acc_events=True)
        with watched as seen, Ranges(conversion):
            step()
        step()
    names = {event.name for event in seen.events()}
    assert {f"{PREFIX}forward|model.layers.{i}" for i in (0, 1)} <= names


def test_a_profile_without_kernels_is_no_diagnosis_of_a_gpu(monkeypatch) -> None:
    """Containers withhold CUPTI; what is left are times of the host."""
    monkeypatch.setattr(module, "read_profile", lambda *_, **__: Timeline((), 1, 1.0, on_gpu=False))
    receipt = SimpleNamespace(layers=[])
    conversion = SimpleNamespace(plan=SimpleNamespace(layers=[]))
    running = SimpleNamespace(device=H100, receipt=lambda: receipt, conversion=conversion)
    seen = SimpleNamespace(events=[], steps=1, step_seconds=1.0)
    with pytest.raises(ProofError, match="saw no kernel of the GPU"):
        module._conclude("a recipe", None, running, seen, "rows", ())


@pytest.mark.long
def test_fp8_adapters_with_random_weights_and_checkpointing(tmp_path, monkeypatch) -> None:
    """Precision is that of the receipt of a run of the same recipe; noise is that of E4M3."""
    monkeypatch.chdir(tmp_path)
    recipe = load_recipe("tiny_lora_fp8", [*SMALL, "train.gradient_checkpointing=true"])
    found = finetune.diagnose(recipe, weights="random", steps=1)
    data = check(found)
    assert list(tmp_path.iterdir()) == []
    assert session.in_force() is None
    run = load_recipe("tiny_lora_fp8", [*SMALL, "train.max_steps=2", "train.eval_strategy=no",
                                        "train.gradient_checkpointing=true"])  # fmt: skip
    report = finetune.train(run, out=tmp_path, console=Console(quiet=True))
    ran = {row.name: (row.fprop, row.dgrad, row.wgrad) for row in report.receipt.layers}
    assert ran == {row.name: (row.fprop, row.dgrad, row.wgrad) for row in found.receipt.layers}
    for group in found.groups:
        if group.is_low:
            assert group.role == "base"
            assert group.snr_db.keys() == {"x", "g"}  # the weight is held as codes
            assert all(25 < snr < 40 for snr in group.snr_db.values())
            assert all(group.worst_snr_db[o] <= snr for o, snr in group.snr_db.items())
            assert group.gemm_seconds > 0
            assert group.cast_seconds > 0
            assert group.bf16_seconds
        else:
            assert group.snr_db == {}
            assert group.bf16_seconds is None
        assert group.kernels
        assert group.tokens in (0, 128, 126), "the head has no last token"
    assert data["padding"] == 0
    assert data["tokens_per_step"] == 128
    assert "random tokens" in data["data"]
    facts = found.facts
    assert 0 < facts.recompute_seconds < facts.seconds
    assert all(group.recomputed for group in found.groups if group.is_low)
    assert 0 < facts.adapter_seconds < facts.seconds
    low = sum(group.seconds for group in found.groups if group.is_low)
    assert low == pytest.approx(facts.parts[StepPart.FP8_GEMM] + facts.parts[StepPart.CASTS])
    assert facts.speed_best is not None
    assert facts.speed_best == pytest.approx(1), "no FP8 units, nothing to gain"
    causes = {cause.name: cause for cause in found.causes}
    assert found.causes[0].name == "emulation"
    assert causes["recomputation"].change == ("train.gradient_checkpointing=false",)
    assert "emulated here" in found.verdict
    narrow = Console(width=80, file=io.StringIO())
    narrow.print(found)
    shown = narrow.file.getvalue()
    assert "fp8/fp8/-" in shown
    assert "try precision.compute=bf16" in shown
    assert "text/html" in found._repr_mimebundle_((), ())


@pytest.mark.slow
def test_bf16_of_the_packaged_model_and_data() -> None:
    found = finetune.diagnose("tiny_full_bf16", SMALL, steps=1)
    data = check(found)
    assert data["flop_share"]["bf16"] > 0.8
    assert not found.facts.ran_fp8
    assert all(not group.snr_db for group in found.groups)
    assert found.shares[StepPart.FP8_GEMM] == found.shares[StepPart.CASTS] == 0
    assert 0 < found.shares[StepPart.HOST] < 1
    assert 0 < found.padding < 1
    assert found.facts.adapter_seconds == found.facts.recompute_seconds == 0
    (cause,) = [cause for cause in found.causes if cause.name == "no FP8"]
    products = sum(group.gemm_seconds for group in found.groups if group.role == "base")
    assert cause.share == pytest.approx(products / found.facts.seconds)
    assert "FP8 cannot be faster here" in found.verdict
    assert math.isfinite(found.step_seconds)


def test_random_rows_are_as_long_as_asked_and_alike_for_a_seed() -> None:
    model = load_recipe("tiny_lora_fp8", SMALL).config.model
    first, again, other = (random_rows(model, 5, 64, s)["input_ids"][:] for s in (3, 3, 4))
    assert first == again != other
    assert [len(row) for row in first] == [64] * 5
    assert 0 <= min(map(min, first)) <= max(map(max, first)) < 1536  # its vocabulary


@pytest.mark.long
def test_the_prediction_of_a_known_gpu_is_in_the_same_parts() -> None:
    fp8, why_not = predict(load_recipe("tiny_lora_fp8", SMALL).config, H100, 1, 64)
    assert fp8 is not None
    assert not why_not
    assert sum(fp8.parts.values()) == pytest.approx(fp8.seconds)
    assert fp8.parts.keys() <= set(PROFILED_PARTS)
    assert fp8.parts[StepPart.FP8_GEMM] > 0
    assert fp8.speed is not None
    compiled = [*SMALL, "precision.compile=on"]  # as the FP8 run is on a GPU
    bf16, _ = predict(load_recipe("tiny_lora_bf16", compiled).config, H100, 1, 64)
    assert bf16 is not None
    assert fp8.speed.value == pytest.approx(bf16.seconds / fp8.seconds, rel=0.02)
    nothing, why_not = predict(load_recipe("tiny_lora_bf16", SMALL).config, CPU, 1, 64)
    assert nothing is None
    assert "nothing is predicted for x86_64" in why_not


# --------------------------------------------------------------------------------- the command line


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["tiny_lora_fp8", "precision.emulation=forbid"], ["is not available on", "no FP8 matrix"]),
        (["tiny_lora_fp8", "--steps", "0"], ["0 steps to look at"]),
        (["tiny_lora_fp8", "--weights", "zero"], ["'random'"]),
        (["tiny_lora_fp8", "--out", "file"], ["the folder 'file' cannot be made"]),
    ],
)
def test_a_mistake_exits_with_2(cli, words, said) -> None:
    Path("file").write_text("")
    done = cli("diagnose", *words)
    assert done.code == 2
    assert "Traceback" not in done.err
    for part in said:
        assert part in done.err
    assert not Path("runs").exists()


def test_ctrl_c_leaves_nothing_behind(cli, monkeypatch) -> None:
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("finetune.analysis.diagnose.diagnose.make_trainer", interrupted)
    done = cli("diagnose", "tiny_lora_fp8", *SMALL)
    assert done.code == 130
    assert "interrupted" in done.err
    assert session.in_force() is None
    assert [path.name for path in Path().iterdir() if path.name != "cache"] == []


@pytest.fixture
def finished(monkeypatch):
    """A diagnosis that is there at once, so that the command is tested and not the steps."""
    from tests.analysis.test_diagnosis import facts

    seen = facts()

    class Done:
        def to_json(self) -> str:
            return json.dumps({"kind": "diagnosis", "seconds": seen.seconds})

        def save(self, folder: Path) -> Path:
            return Diagnosis.save(self, folder)  # pyright: ignore

    monkeypatch.setattr("finetune.analysis.diagnose.diagnose.diagnose", lambda *_, **__: Done())


def test_json_and_a_folder_and_a_second_run(cli, finished) -> None:
    for _ in range(2):
        done = cli("diagnose", "tiny_lora_fp8", "--json", "--out", "kept")
        assert done.code == 0
        assert json.loads(done.out) == json.loads(Path("kept/diagnosis.json").read_text())
    assert [path.name for path in Path("kept").iterdir()] == ["diagnosis.json"]
