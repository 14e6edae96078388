"""How long an estimate takes, and what memory: the whole process, as one would time a command.

    python -m tests.benchmarks.estimate_speed [--best-of 3] [--recipes llama_8b_full_fp8 ...]

Each figure is of new processes, the best of three, imports included: `estimate` for a recipe of 8
and of 70 billion parameters (goals on two cores: 10 and 25 seconds), `ls` (0.3 s over Python's own
start), and one point of a search (2 s), timed in a process that has rehearsed once. Peak memory is
that of the process (`ru_maxrss`); it is flat when the model of 70 billion needs no more than that
of 8 billion.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from typing import Any

RECIPES = {"llama_8b_full_fp8": 10.0, "llama_8b_lora_bf16": 10.0, "llama_70b_lora_fp8": 25.0}
IMPORTS = "import gc, os; gc.disable(); import trl.trainer.sft_trainer; os._exit(0)"
POINT = """
import json, resource, sys, time
from finetune.estimator.predict import predict_fast
from finetune.hardware.gpus import machine_of
from finetune import load_recipe
from finetune.config.recipe import with_overrides
config, machine = load_recipe(sys.argv[1]).config, machine_of("H100")
predict_fast(config, machine)
times = []
for rows in (1, 2, 3):
    started = time.perf_counter()
    predict_fast(with_overrides(config, (f"train.per_device_train_batch_size={rows}",)), machine)
    times.append(time.perf_counter() - started)
print(json.dumps([min(times), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20]))
"""


def timed(command: list[str], best_of: int) -> tuple[float, float, str]:
    """Best wall seconds of a command, its peak memory in GiB, and what it printed."""
    best, peak, printed = float("inf"), 0.0, ""
    for _ in range(best_of):
        started = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert process.stdout is not None
        printed = process.stdout.read().decode()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            assert process.stderr is not None
            sys.exit(process.stderr.read().decode())
        best, peak = min(best, time.perf_counter() - started), max(peak, usage.ru_maxrss / 2**20)
    return best, peak, printed


def main() -> None:
    """Print a line for each figure, with its goal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--best-of", type=int, default=3)
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES))
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    lines: list[dict[str, Any]] = []

    def note(what: str, seconds: float, goal: float, peak: float) -> None:
        lines.append({"what": what, "seconds": seconds, "goal": goal, "peak_gib": peak})
        if not args.json:
            over = "" if seconds <= goal else "  over its goal"
            print(f"{what:42s} {seconds:6.2f} s  (goal {goal:g})  {peak:.2f} GiB{over}", flush=True)

    floor, peak, _ = timed([sys.executable, "-W", "ignore", "-c", IMPORTS], args.best_of)
    note("imports alone, without looks for garbage", floor, 5.0, peak)
    start, peak, _ = timed([sys.executable, "-c", "pass"], args.best_of)
    own, peak, _ = timed([sys.executable, "-m", "finetune", "ls"], args.best_of)
    note("ls, beyond Python's start", own - start, 0.3, peak)
    for recipe in args.recipes:
        goal = RECIPES.get(recipe, 10.0)
        command = [sys.executable, "-m", "finetune", "estimate", recipe, "--gpu", "H100", "--json"]
        seconds, peak, _ = timed(command, args.best_of)
        note(f"estimate {recipe}", seconds, goal, peak)
        _, _, printed = timed([sys.executable, "-c", POINT, recipe], 1)
        point, peak = json.loads(printed.splitlines()[-1])
        note(f"a point of a search, {recipe}", point, 2.0, peak)
    if args.json:
        print(json.dumps({"load": os.getloadavg()[0], "figures": lines}))


if __name__ == "__main__":
    main()
