"""Give finetune malformed inputs, each in a process of its own, and count how it ends.

    python -m tests.benchmarks.bad_inputs --cases 1000 --seed 0

Inputs are drawn by `tests.bad_inputs`: command lines, recipes, overrides, data files, model, run,
checkpoint and comparison folders. Each must end within 10 CPU seconds with exit code 2 and a
message that has a fix; verbs that show run folders may also leave out what they cannot read (exit
code 0).
Prints each failure, then a table.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import itertools
import json
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from finetune.logging import quiet_libraries
from tests.bad_inputs.case import Case, Outcome, attempt
from tests.bad_inputs.kinds import cases, prepare

LIMIT = 10.0
"""CPU seconds that a case may take; libraries are loaded before."""
PRELOADED = (
    "torch",
    "trl",
    "trl.trainer.sft_trainer",
    "datasets",
    "peft",
    "pandas",
    "bitsandbytes",
    "torchao",
    "torch._dynamo",
    "transformers.trainer",
    "transformers.models.llama.modeling_llama",
    "finetune.api",
    "finetune.export.export",
    "finetune.estimator.gate",
    "finetune.estimator.estimate",
    "finetune.training.trainer",
    "finetune.data.ledger",
    "finetune.training.reload",
    "finetune.training.callbacks",
    "finetune.training.checkpoints",
    "finetune.training.health.monitor",
    "finetune.analysis.compare.compare",
    "finetune.analysis.report.report",
    "finetune.analysis.diagnose.diagnose",
    "finetune.analysis.benchmark.benchmark",
)
COUNTS = ("wrong_code", "traceback", "crashed", "hung", "no_help", "left", "torch")
TITLES = {
    "wrong_code": "other codes", "traceback": "tracebacks", "crashed": "crashes", "hung": "hangs",
    "no_help": "no help", "left": "folder left", "torch": "torch",
}  # fmt: skip


def tried(
    chosen: Iterable[Case], folder: Path, prepared: dict[str, Path], jobs: int
) -> list[Outcome]:
    """Try cases, until Ctrl-C; failures are printed as they come.

    Args:
        jobs: processes that share the cases which need torch, which is imported before they start.
    """
    found: list[Outcome] = []
    with contextlib.suppress(KeyboardInterrupt):
        numbered = iter(enumerate(chosen))
        for number, case in numbered:
            if case.needs_torch:
                numbered = itertools.chain([(number, case)], numbered)
                break
            found.append(_try(number, case, folder, prepared))
        for name in PRELOADED:
            importlib.import_module(name)
        rest = list(numbered)
        parts = [(folder / f"part-{i}", rest[i::jobs]) for i in range(jobs)]
        workers = [_started(target, part, folder, prepared) for target, part in parts]
        for worker in workers:
            os.waitpid(worker, 0)
        for target, _ in parts:
            found += pickle.loads(target.read_bytes())
    return found


def _started(
    target: Path, part: list[tuple[int, Case]], folder: Path, prepared: dict[str, Path]
) -> int:
    """A process that tries cases one after the other and leaves their outcomes in a file."""
    if worker := os.fork():
        return worker
    found: list[Outcome] = []
    try:
        with contextlib.suppress(KeyboardInterrupt):
            for number, case in part:
                found.append(_try(number, case, folder, prepared))
    finally:
        target.write_bytes(pickle.dumps(found))
        os._exit(0)


def _try(number: int, case: Case, folder: Path, prepared: dict[str, Path]) -> Outcome:
    last = attempt(case, folder / f"case-{number}", prepared, LIMIT)
    if last.faults:
        said = last.err.strip()[-1500:]
        print(f"{','.join(last.faults)} [{case.kind}] code {last.code} {last.seconds:.1f} s")
        print(f"    {case}\n    {said}\n".encode(errors="replace").decode(), flush=True)
    return replace(last, out="", err=last.err[-3000:])


def table_of(found: list[Outcome]) -> Table:
    """Kind, cases, how they ended, and the longest."""
    titles = ("kind", "cases", "exit 2", "exit 0", *TITLES.values(), "longest, CPU s")
    table = Table(*titles, box=None, pad_edge=False)
    names = list(dict.fromkeys(outcome.case.kind for outcome in found))
    for name in (*names, "all"):
        some = [one for one in found if name in (one.case.kind, "all")]
        ended = [sum(one.code == code and not one.wrong_code for one in some) for code in (2, 0)]
        faults = [sum(getattr(one, count) for one in some) for count in COUNTS]
        slowest = max((one.seconds for one in some), default=0.0)
        table.add_row(name, *map(str, (len(some), *ended, *faults)), f"{slowest:.1f}")
    return table


def main(arguments: list[str] | None = None) -> dict[str, int]:
    """Draw, try, count."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--kinds", default="", help="words with commas: only kinds with one of them"
    )
    parser.add_argument("--jobs", type=int, default=2, help="processes that try cases")
    parser.add_argument("--quick", action="store_true", help="nothing that needs a trained run")
    parser.add_argument("--prepared", type=Path, help="where to keep trained runs for another time")
    options = parser.parse_args(arguments)
    quiet_libraries()
    os.environ |= {"HF_HUB_OFFLINE": "1", "COLUMNS": "100"}
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        os.environ["HF_DATASETS_CACHE"] = f"{place}/cache"
        home = options.prepared or Path(place) / "prepared"
        prepared = prepare(home.absolute(), train=not options.quick)
        drawn = cases(prepared, options.cases, options.seed)
        chosen = (
            case for case in drawn if any(word in case.kind for word in options.kinds.split(","))
        )
        found = tried(chosen, Path(place), prepared, options.jobs)
    Console(width=160).print(table_of(found))
    counts = {name: sum(getattr(one, name) for one in found) for name in COUNTS}
    counts = {"cases": len(found), **counts, "seconds": round(time.monotonic() - begun)}
    print(json.dumps(counts))
    return counts


if __name__ == "__main__":
    counts = main()
    sys.exit(any(counts[name] for name in COUNTS))
