"""`resume --verify`: steps between two checkpoints, trained again and compared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from finetune.runs.checkpoints import CHECKPOINTS, STATE, Checkpoint
from finetune.training.replay import _comparable, _differences
from tests.forked import ended, start
from tests.run_folders import sign


@pytest.mark.long
def test_a_run_repeats_itself_or_the_first_difference_is_named(tmp_path) -> None:
    words = (
        "tiny_full_fp8", "train.max_steps=6", "train.save_strategy=steps", "train.save_steps=2",
        "train.logging_steps=1", "train.eval_steps=2", "eval.samples=false", "data.max_rows=24",
        "train.max_length=64",
    )  # fmt: skip
    assert ended([start(tmp_path, *words)]) == [0]
    (run,) = tmp_path.glob("runs/*/*")

    def verify(*words: str, log: str) -> tuple[int | None, str]:
        (code,) = ended([start(tmp_path, "resume", "last", "--verify", *words, log=log)])
        return code, (tmp_path / log).read_text()

    code, said = verify(log="newest")
    assert code == 0, said
    assert "verified: steps 5 to 6 replayed, 2 logged losses equal to the digit, 2 files" in said
    code, said = verify("--checkpoint", "2", log="first")
    assert code == 0, said
    assert "verified: steps 1 to 2 replayed" in said
    saved = run / CHECKPOINTS / "checkpoint-6"
    state = json.loads((saved / STATE).read_text())
    (row,) = (row for row in state["log_history"] if row["step"] == 5 and "loss" in row)
    logged, row["loss"] = row["loss"], 1.5
    (saved / STATE).write_text(json.dumps(state))
    sign(saved)
    code, said = verify(log="changed")
    assert code == 2
    assert f"loss at step 5 is {logged}, and 1.5 was logged" in said
    assert "versions and device are the same" in said
    assert [path.name for path in tmp_path.glob("runs/*/*")] == [run.name]
    assert not list(run.glob(".replay*"))


def checkpoint(folder: Path, step: int, losses: dict[int, float], weights: str) -> Checkpoint:
    at = folder / f"checkpoint-{step}"
    at.mkdir(parents=True)
    log = [{"step": at, "loss": loss} for at, loss in losses.items()]
    (at / STATE).write_text(json.dumps({"global_step": step, "log_history": log}))
    files = {"model.safetensors": {"bytes": 1, "sha256": weights}}
    (at / "manifest.json").write_text(json.dumps({"files": files}))
    return Checkpoint(at)


def test_only_means_over_replayed_steps_are_compared(tmp_path) -> None:
    """The mean of steps 17 to 20 is of before the checkpoint of step 18."""
    logged = {4 * i: float(i) for i in range(1, 8)}
    end = checkpoint(tmp_path / "then", 30, logged, "a")
    assert [row["step"] for row in _comparable(end, 18)] == [24, 28]
    assert [row["step"] for row in _comparable(end, 20)] == [24, 28]
    assert [row["step"] for row in _comparable(end, 0)] == list(logged)
    assert not _comparable(end, 27)
    same = checkpoint(tmp_path / "same", 30, {**logged, 20: 9.0}, "a")
    assert not _differences(end, same, 18)
    other = checkpoint(tmp_path / "other", 30, {**logged, 28: 9.0}, "b")
    assert _differences(end, other, 18) == [
        "loss at step 28 is 9.0, and 7.0 was logged",
        "model.safetensors of step 30 has other contents",
    ]
    nothing = checkpoint(tmp_path / "nothing", 30, {}, "a")
    (nothing.folder / "manifest.json").unlink()
    assert (
        "nothing of steps 19 to 30 was logged"
        in _differences(Checkpoint(nothing.folder), same, 18)[0]
    )
