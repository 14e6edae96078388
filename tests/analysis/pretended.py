"""A run that only pretends: the folder that `python -m finetune run` leaves, in no time.

    python tests/analysis/pretended.py RECIPE.yaml train.seed=42 --out FOLDER ...

Its losses, scores and times follow from seed and precision; variables of the environment change
them. Nothing of this package is imported, so that as a process it starts at once.
"""

from __future__ import annotations

import json
import math
import os
import random
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

CPU = {"kind": "cpu", "name": "x86_64", "capability": None, "memory_gib": 23.5}


def receipt(precision: str) -> dict[str, Any]:
    """A receipt as a run of the tiny pair leaves it, as far as experiments read it."""
    return {
        "status": "proven",
        "precision": {"asked": precision, "ran": precision, "storage": {}, "gemm": "emulated"},
        "trainable": {
            "before": 1000,
            "after": 1000,
            "in_optimizer": 1000,
            "optimizer_state_bytes": 8000 if precision == "fp32" else 4000,
        },
        "layers": [{"name": "q_proj", "role": "base", "shape": [64, 64]}],
        "environment": {
            "versions": {"torch": "2.13", "trl": "1.16"},
            "device": CPU,
            "processes": 1,
            "seed": 42,
        },
        "memory": {
            "measured": "peak of live tensors in step 3",
            "measured_gib": 0.1 if precision == "bf16" else 0.08,
            "weights_gib": 0.01,
        },
        "conditions": {
            "trainable parameters": {"count": 1000, "names": "abc"},
            "model": {"type": "llama"},
            "adapters": None,
            "optimizer": {"class": "AdamW", "learning rate": 1e-3},
            "tokens per step": {"rows": 8, "padding_free": False},
            "length of the run": {"steps": 20},
            "data and its order": {"rows": 396, "seed": 42},
            "checkpointing": {"layers": 0},
            "attention": "sdpa",
            "compile": "off",
            "fused kernels": {"liger": False, "adapters": ""},
        },
    }


def pretend(
    recipe: Path, seed: int, out: Path, how: Mapping[str, str], measured: bool, gpus: int = 1
) -> None:
    """Write the run folder.

    Args:
        how: `GAP` and `EVAL_GAP`, relative gaps of FP8's losses; `EVAL`, its eval loss of seed 43;
            `BROKEN`, the precision whose loss of seed 43 is NaN; `RECEIPTS`, by precision; `TOKENS`
            more in each step; `WAITED` seconds of each on several processes; `DRAWN`, a seed that
            stands for all, as of a trainer that does not shuffle.
        measured: steps of the tokens that the recipe asks for, as a benchmark has them.
        gpus: processes of which each has that many.
    """
    folder = out / recipe.stem / "20260101-000000-abcd"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(recipe.read_text())
    config = yaml.safe_load(recipe.read_text())
    train, precision = config["train"], config["precision"]["compute"]
    fp8 = precision == "fp8"
    drawn = how.get("DRAWN", seed)
    noise, shared = random.Random(f"{drawn}{fp8}"), random.Random(drawn)
    gap = float(how.get("GAP", "0")) if fp8 else 0
    tokens = int(how.get("TOKENS", "0")) + train.get("gradient_accumulation_steps", 1) * gpus * (
        train["per_device_train_batch_size"] * train["max_length"]
    )
    rows: list[dict[str, Any]] = []
    steps: list[dict[str, Any]] = []
    for i in range(1, (train["max_steps"] if measured else 30) + 1):
        loss = (1 + gap) * (0.7 + shared.random() / 10) * math.exp(noise.gauss(0, 0.002))
        seconds = 0.15 if fp8 else 0.1
        # 600 W, and 9 kJ before the first step, in which it compiles.
        drawn = {"joules": 9000 + round(600 * seconds * i)} if measured else {}
        rows.append({"step": i, "loss": loss, "precision": precision.upper()} | drawn)
        steps.append(
            {
                "step": i,
                "seconds": seconds,
                "tokens": tokens if measured else shared.randint(90, 99),
            }
        )
        if gpus > 1:
            steps[-1] |= {"exchange": 0.03, "waited": float(how.get("WAITED", "0.02"))}
    gap = float(how.get("EVAL_GAP", gap)) if fp8 else 0
    rows.append({"step": 30, "eval_loss": (1 + gap) * 0.8 * math.exp(noise.gauss(0, 0.002))})
    scores = {"acc_norm": 0.3 + fp8 / 100, "acc_norm_stderr": 0.02}
    if seed == 43 and fp8 and "EVAL" in how:
        rows[-1]["eval_loss"] = float(how["EVAL"])
    if seed == 43 and how.get("BROKEN") == precision:
        rows[25]["loss"] = float("nan")
    rows.append({"step": 30, "tasks": {"hellaswag": scores}})
    for name, lines in (("metrics.jsonl", rows), ("steps.jsonl", steps)):
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    made = json.loads(how["RECEIPTS"])[precision] if "RECEIPTS" in how else receipt(precision)
    made["environment"]["seed"] = seed
    (folder / "receipt.json").write_text(json.dumps(made))
    report = {"first_loss": 5.0, "final_loss": 0.7, "eval_loss": 0.8, "seconds": 9.0}
    report |= {"status": "proven"}
    report["samples"] = [{"prompt": "Where?", "answer": "Here." if fp8 else "There."}]
    (folder / "report.json").write_text(json.dumps(report))


def main() -> None:
    recipe, seed = Path(sys.argv[1]), int(sys.argv[2].rpartition("=")[2])
    out, how = Path(sys.argv[4]), os.environ.get("PRETEND", "")
    if how == "fail":
        print("error: the loss is NaN\n  where: step 3\n  why:   it overflowed\n  fix:   lower it")
        sys.exit(2)
    if how == "crash":
        raise SystemError("boom")
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "stopped":
        sys.exit(143)
    if how == "wait":
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        out.mkdir()
        (out / "begun").touch()
        try:
            time.sleep(60)
        except KeyboardInterrupt:
            (out / "saved").touch()
            sys.exit(130)
    pretend(recipe, seed, out, os.environ, measured="--no-save" in sys.argv)


if __name__ == "__main__":
    main()
