"""Kill runs with SIGKILL at random moments, many inside a save; each has to end bit-identically.

    python -m tests.benchmarks.kill_runs --kills 50

A run is killed `PER_RUN` times, resumed each time from whatever it left (`resume last`), and then
ends. Each resume has to begin at the newest checkpoint whose files are all as they were saved, and
the last one's weights, optimizer states and metrics of each step must equal those of a run that
nobody killed, to the bit. Every second kill
waits for the hidden folder of a checkpoint that is being written; the others come at any moment
after a process has its run folder, before its first save too. A kill behind the last step's save
leaves nothing to resume: that checkpoint is compared. Prints a JSON object.

Runs that are killed are forked from a process that has imported the libraries, which is most of
what a start takes; the runs that nobody kills are commands of their own.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from finetune.runs.checkpoints import CHECKPOINTS, SAVING, Checkpoint, checkpoints_in
from tests.forked import start

MASTERS = (
    "tiny_full_fp8 precision.scaling=tensorwise precision.fp8_params=true model.dtype=bfloat16 "
    "train.optim=adamw_torch_8bit"
)
CASES = {
    "tiny_full_fp8": "model.safetensors", "tiny_lora_fp8": "adapter_model.safetensors",
    MASTERS: "model.safetensors",
}  # fmt: skip
STEPS = 24
SETTINGS = (
    f"train.max_steps={STEPS}", "train.save_strategy=steps", "train.save_steps=1",
    "train.save_total_limit=3", "train.eval_strategy=no", "eval.samples=false",
    "data.max_rows=60", "train.max_length=64", "precision.health_every=0", "train.logging_steps=1",
)  # fmt: skip
PER_RUN = 5
PATIENCE = 900.0
"""Seconds after which a process that did not get to its moment counts as a failure."""


def flat(value: Any, name: str = "") -> dict[str, Any]:
    """Tensors and numbers of a nested value, those inside of tensors of torchao's too."""
    if isinstance(value, torch.Tensor) and type(value) is not torch.Tensor:
        parts = value.__tensor_flatten__()[0]  # pyright: ignore[reportAttributeAccessIssue]
        value = {part: getattr(value, part) for part in parts}
    if isinstance(value, list | tuple):
        value = dict(enumerate(value))
    if not isinstance(value, dict):
        return {name: value}
    return {k: v for key, one in value.items() for k, v in flat(one, f"{name}/{key}").items()}


def state_of(run: Path, weights: str) -> dict[str, Any]:
    """Weights, optimizer states and metrics of a run at its last step."""
    last = run / CHECKPOINTS / f"checkpoint-{STEPS}"
    optimizer = torch.load(last / "optimizer.pt", "cpu", weights_only=False)
    log = json.loads((last / "trainer_state.json").read_text())["log_history"]
    for entry in log:
        entry.pop("num_tokens", None)  # TRL counts from where a process begins
    found = flat({"optimizer": optimizer, "log": log, "weights": load_file(last / weights)})
    if (run / "model" / weights).is_file():
        model = flat(load_file(run / "model" / weights), "/weights")
        assert equal(model, {name: w for name, w in found.items() if name in model}), run
    return found


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """True if all tensors are equal to the bit, and all else is equal."""

    def is_same(a: Any, b: Any) -> bool:
        tensors = isinstance(a, torch.Tensor), isinstance(b, torch.Tensor)
        return torch.equal(a, b) and a.dtype == b.dtype if all(tensors) else a == b

    return one.keys() == other.keys() and all(is_same(v, other[k]) for k, v in one.items())


def newest(folder: Path) -> Path | None:
    """The run folder that was made last."""
    runs = sorted(folder.glob("runs/*/*/run.json"), key=lambda file: file.stat().st_mtime)
    return runs[-1].parent if runs else None


def newest_whole(folder: Path) -> Path | None:
    """The newest whole checkpoint of the newest run that has one, every byte compared."""
    runs = sorted(folder.glob("runs/*/*/run.json"), key=lambda file: file.stat().st_mtime)
    for run in reversed(runs):
        for saved in reversed(checkpoints_in(run.parent / CHECKPOINTS).values()):
            if not Checkpoint(saved).problem(contents=True):
                return saved
    return None


def kill_at_a_moment(
    process: BaseProcess, folder: Path, before: Path | None, *, saving: bool
) -> str | None:
    """Kill inside a save or anywhere; the moment's name, or None if the process ended before.

    Args:
        before: the newest run folder when the process was started.
    """
    begun = time.monotonic()
    while time.monotonic() - begun < PATIENCE and process.is_alive():
        run = newest(folder)
        if run is not None and run != before and (not saving or checkpoints_in(run / CHECKPOINTS)):
            break
        time.sleep(0.02)
    else:
        return None
    time.sleep(random.uniform(0.0, 2.0 if saving else 12.0))
    hidden = run / CHECKPOINTS / SAVING
    while saving and process.is_alive() and not hidden.is_dir():
        time.sleep(0.0005)
    time.sleep(random.uniform(0.0, 0.02) if saving else 0.0)
    inside, saved = hidden.is_dir(), checkpoints_in(run / CHECKPOINTS)
    process.kill()
    process.join()
    if process.exitcode != -signal.SIGKILL:
        return None
    return "inside a save" if inside else "between saves" if saved else "before a save"


def one_run(case: str, kills: int, expected: dict[str, Any]) -> dict[str, object]:
    """A run that is killed and resumed until it ends."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place).resolve()
        process, before, moments, begun_at = start(folder, *case.split(), *SETTINGS), None, [], []
        for kill in range(kills):
            moment = kill_at_a_moment(process, folder, before, saving=kill % 2 == 0)
            if moment is None:
                break
            moments.append(moment)
            wanted, before = newest_whole(folder), newest(folder)
            if wanted is not None and wanted.name == f"checkpoint-{STEPS}":
                moments[-1] = "after the last step"  # `resume` would refuse
                break
            begun_at.append(str(wanted and wanted.relative_to(folder)))
            process = start(folder, "resume", "last")
        process.join()
        log, run = (folder / "log.txt").read_text(), newest(folder)
        assert run is not None
        found = re.findall(r"resuming from (?:.*/)?(runs/\S+)", log)
        saved = checkpoints_in(run / CHECKPOINTS).values()
        broken = [str(p.name) for p in saved if Checkpoint(p).problem(contents=True)]
        ended = (run / CHECKPOINTS / f"checkpoint-{STEPS}").is_dir()
        last = state_of(run, CASES[case]) if ended else {}
        same = equal(last, expected)
        if not same or found != begun_at:
            other = [k for k, v in expected.items() if not equal({k: v}, {k: last.get(k)})]
            print(log[-3000:], begun_at, found, other, file=sys.stderr)
        return {
            "case": case, "kills": len(moments), "moments": moments, "exit": process.exitcode,
            "from_newest": found == begun_at, "same": same, "broken": broken,
            "steps": [int(at.rpartition("-")[2]) for at in found],
        }  # fmt: skip


def main(arguments: list[str] | None = None) -> dict[str, object]:
    """Kill, resume, compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", choices=CASES, action="append", help="only this; default: all")
    options = parser.parse_args(arguments)
    random.seed(options.seed)
    runs, expected, cases = [], {}, options.case or list(CASES)
    with tempfile.TemporaryDirectory() as place:
        for number, case in enumerate(cases):
            words = [sys.executable, "-m", "finetune", *case.split(), *SETTINGS]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            folder = Path(place, str(number))
            folder.mkdir()
            subprocess.run(words, cwd=folder, env=environment, check=True, capture_output=True)
            (run,) = folder.glob("runs/*/*")
            expected[case] = state_of(run, CASES[case])
    while (left := options.kills - sum(run["kills"] for run in runs)) > 0:
        case = cases[len(runs) % len(cases)]
        runs.append(one_run(case, min(left, PER_RUN), expected[case]))
        print(json.dumps(runs[-1]), file=sys.stderr)
    moments = [moment for run in runs for moment in run["moments"]]
    found = {
        "kills": len(moments), **{m: moments.count(m) for m in sorted(set(moments))},
        "from_newest": all(run["from_newest"] for run in runs),
        "same": all(run["same"] for run in runs),
    }  # fmt: skip
    print(json.dumps({**found, "runs": runs}, indent=1))
    return found


if __name__ == "__main__":
    main()
