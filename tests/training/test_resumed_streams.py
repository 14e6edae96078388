"""A streamed run that is killed goes on with the rows that it had not read."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.forked import ended, start

DATA = Path(__file__).parents[2] / "finetune" / "assets" / "data" / "harbour.jsonl"
SETTINGS = (
    "tiny_full_fp8", "~data.name", "data.streaming=true", "data.eval_fraction=0",
    "train.max_steps=8", "train.save_strategy=steps", "train.save_steps=2",
    "train.logging_steps=1", "train.eval_strategy=no", "eval.samples=false",
    "train.max_length=64", "train.per_device_train_batch_size=4",
)  # fmt: skip


def killed_in_step_6() -> None:
    from transformers.trainer_callback import CallbackHandler

    plain = CallbackHandler.on_step_begin

    def on_step_begin(self: Any, args: Any, state: Any, control: Any) -> Any:
        if state.global_step == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(self, args, state, control)

    CallbackHandler.on_step_begin = on_step_begin


@pytest.mark.long
@pytest.mark.parametrize("mixed", [False, True])
def test_a_killed_stream_goes_on_to_the_same_weights(mixed, tmp_path) -> None:
    """In one order, shuffled through a buffer and short enough to start again; mixed by weight."""
    rows = DATA.read_text().splitlines()
    (tmp_path / "a.jsonl").write_text("\n".join(rows[:22]))
    (tmp_path / "b.jsonl").write_text("\n".join(rows[22:40]))
    path = '[{path: "a.jsonl", weight: 0.7}, {path: "b.jsonl", weight: 0.3}]'
    words = (*SETTINGS, f"data.path={path if mixed else 'a.jsonl'}", "data.shuffle_buffer=7")
    for name, before in (("whole", None), ("killed", killed_in_step_6)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.jsonl").symlink_to(tmp_path / "a.jsonl")
        (tmp_path / name / "b.jsonl").symlink_to(tmp_path / "b.jsonl")
        (code,) = ended([start(tmp_path / name, *words, before=before)])
        assert code == (-signal.SIGKILL if before else 0), (tmp_path / name / "log.txt").read_text()
    log = tmp_path / "killed" / "log.txt"
    before = log.read_text()
    (code,) = ended([start(tmp_path / "killed", "resume", "last")])
    after = log.read_text().removeprefix(before)
    assert code == 0, after
    assert "resuming from " in after
    assert warned(after) <= warned(before), "of rows that are cut, and of nothing else"
    (whole,) = tmp_path.glob("whole/runs/*/*")
    (resumed,) = (run.parent for run in tmp_path.glob("killed/runs/*/*/model"))
    assert losses(resumed) == losses(whole)  # those until the checkpoint belong to it
    expected, found = (load_file(run / "model" / "model.safetensors") for run in (whole, resumed))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def warned(log: str) -> set[str]:
    """Lines of warning."""
    return {line for line in log.splitlines() if line.startswith("! ")}


def losses(run: Path) -> dict[int, float]:
    """Step -> loss."""
    log = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row["loss"] for row in log if "loss" in row}
