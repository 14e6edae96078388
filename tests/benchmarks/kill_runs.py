"""Kill runs with SIGKILL at random moments, many inside a save; each has to end bit-identically.

    python -m tests.benchmarks.kill_runs --kills 50

A run is killed `PER_RUN` times, resumed each time from whatever it left (`resume last`), and then
ends. Its weights must equal those of a run that nobody killed, to the bit. Every second kill waits
for the hidden folder of a checkpoint that is being written. Prints a JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import load_file

from finetune.runs.checkpoints import CHECKPOINTS, SAVING, Checkpoint, checkpoints_in

RECIPES = {"tiny_full_fp8": "model.safetensors", "tiny_lora_fp8": "adapter_model.safetensors"}
SETTINGS = (
    "train.max_steps=24", "train.save_strategy=steps", "train.save_steps=1",
    "train.save_total_limit=3", "train.eval_strategy=no", "eval.samples=false",
    "data.max_rows=60", "train.max_length=64", "precision.health_every=0",
)  # fmt: skip
PER_RUN = 5
PATIENCE = 900.0
"""Seconds after which a process that did not get to its moment counts as a failure."""


def start(folder: Path, *words: str) -> subprocess.Popen[bytes]:
    """`python -m finetune WORDS` in a folder, quietly."""
    with (folder / "log.txt").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "finetune", *words], cwd=folder, stdout=log, stderr=log,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip


def newest(folder: Path) -> Path | None:
    """The run folder that was made last."""
    runs = sorted(folder.glob("runs/*/*/run.json"), key=lambda file: file.stat().st_mtime)
    return runs[-1].parent if runs else None


def kill_at_a_moment(process: subprocess.Popen[bytes], folder: Path, *, saving: bool) -> bool:
    """Kill after the process has saved something, inside a save or anywhere; True if inside."""
    before, begun = newest(folder), time.monotonic()
    while time.monotonic() - begun < PATIENCE and process.poll() is None:
        run = newest(folder)
        if run is not None and run != before and checkpoints_in(run / CHECKPOINTS):
            break
        time.sleep(0.02)
    else:
        return False
    wait = random.uniform(0.0, 2.0)
    time.sleep(wait)
    hidden = run / CHECKPOINTS / SAVING
    while saving and process.poll() is None and not hidden.is_dir():
        time.sleep(0.0005)
    time.sleep(random.uniform(0.0, 0.02) if saving else 0.0)
    inside = hidden.is_dir()
    process.send_signal(signal.SIGKILL)
    process.wait()
    return inside


def one_run(recipe: str, kills: int, expected: dict[str, torch.Tensor]) -> dict[str, object]:
    """A run that is killed and resumed until it ends."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        process, inside, done = start(folder, recipe, *SETTINGS), 0, 0
        for kill in range(kills):
            inside += kill_at_a_moment(process, folder, saving=kill % 2 == 0)
            done += process.returncode == -signal.SIGKILL
            if process.poll() == 0:
                break
            process = start(folder, "resume", "last")
        code, run = process.wait(), newest(folder)
        assert run is not None
        saved = checkpoints_in(run / CHECKPOINTS).values()
        broken = [str(p.name) for p in saved if Checkpoint(p).problem(contents=True)]
        file = run / "model" / RECIPES[recipe]
        found = load_file(file) if file.is_file() else {}
        same = found.keys() == expected.keys() and all(
            torch.equal(found[key], expected[key]) for key in expected
        )
        if not same:
            print((folder / "log.txt").read_text()[-3000:], file=sys.stderr)
        return {
            "recipe": recipe, "kills": done, "inside": inside, "exit": code, "same": same,
            "broken": broken,
        }  # fmt: skip


def main(arguments: list[str] | None = None) -> dict[str, object]:
    """Kill, resume, compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    random.seed(options.seed)
    runs, expected = [], {}
    with tempfile.TemporaryDirectory() as place:
        for recipe, weights in RECIPES.items():
            assert start(Path(place), recipe, *SETTINGS).wait() == 0
            (file,) = Path(place).glob(f"runs/{recipe}/*/model/{weights}")
            expected[recipe] = load_file(file)
    while sum(run["kills"] for run in runs) < options.kills:
        recipe = list(RECIPES)[len(runs) % len(RECIPES)]
        runs.append(one_run(recipe, PER_RUN, expected[recipe]))
        print(json.dumps(runs[-1]), file=sys.stderr)
    kills, inside = (sum(run[key] for run in runs) for key in ("kills", "inside"))
    found = {"kills": kills, "inside": inside, "same": all(run["same"] for run in runs)}
    print(json.dumps({**found, "runs": runs}, indent=1))
    return found


if __name__ == "__main__":
    main()
