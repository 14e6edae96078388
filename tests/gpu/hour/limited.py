"""A recipe in the memory of a smaller GPU: time and tokens of a step, what its copies hide behind.

    python -m tests.gpu.hour.limited llama_8b_full_24gb_fp8 [section.key=value ...]

A diagnosis with random weights, by a process that may allocate 24 GB (`--gb`) of this GPU, which
is what is left of a card of 24 GiB beside CUDA's context. Copies over PCIe are *hidden* while a
kernel runs, and the GPU *waits* where neither runs, as it does for an update in host memory. Both
are read off the trace of the profiled steps, `trace.json.gz` in the folder of `--out`.
"""

from __future__ import annotations

import argparse
import gzip
import json
import resource
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

import finetune
from finetune.analysis.diagnose.observer import WINDOW
from finetune.errors import FinetuneError
from finetune.hardware.device import expand_segments, this_device
from finetune.units import GIB
from tests.gpu.hour.kernels import table

COPIES = {"down": "Memcpy DtoH", "up": "Memcpy HtoD"}
"""Beginnings of the names that copies have in a trace."""


def limit(gigabytes: float) -> None:
    """Let this process allocate so many GB of the GPU; of a CPU as much as there is."""
    device = this_device()
    if device.kind == "cuda":
        expand_segments()  # before CUDA is in use, as a run does
        whole = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, gigabytes * 1e9 / whole))


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of spans: of (0, 2), (1, 3) and (5, 6) it is 4."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def transfers(events: list[dict[str, Any]], steps: int) -> dict[str, Any]:
    """Copies in a step of a trace: GB, seconds, seconds with no kernel; and what the GPU waits.

    Args:
        events: `traceEvents`, with microseconds.
        steps: optimizer steps in the window.
    """

    def spans(chosen: Iterable[dict[str, Any]]) -> list[tuple[float, float]]:
        return [(e["ts"], e["ts"] + e["dur"]) for e in chosen]

    complete = [e for e in events if e.get("ph") == "X"]
    kernels = spans(e for e in complete if e.get("cat") == "kernel")
    window = next(e["dur"] for e in complete if e["name"] == WINDOW)
    found, every = {}, list(kernels)
    for way, name in COPIES.items():
        copies = [e for e in complete if e["name"].startswith(name)]
        taken = spans(copies)
        every += taken
        found[way] = {
            "gb": sum(e["args"].get("bytes", 0) for e in copies) / 1e9 / steps,
            "seconds": covered(taken) / 1e6 / steps,
            "alone": (covered([*taken, *kernels]) - covered(kernels)) / 1e6 / steps,
        }
    return found | {"waits": (window - covered(every)) / 1e6 / steps}


def memory() -> dict[str, float]:
    """Peaks of this process, GiB: allocated on the GPU, pinned, and resident on the host."""
    found = {"host": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}
    if this_device().kind == "cuda":
        found["gpu"] = torch.cuda.max_memory_allocated() / GIB
        found["pinned"] = torch.cuda.host_memory_stats().get("allocated_bytes.peak", 0) / GIB
    return found


def measured(recipe: str, overrides: list[str], steps: int | None, folder: Path) -> dict[str, Any]:
    """Rows and Markdown of a diagnosis, whose trace and JSON lie in the folder."""
    trace = folder / "trace.json.gz"
    found = finetune.diagnose(recipe, overrides, weights="random", steps=steps, trace=trace)
    found.save(folder)
    with gzip.open(trace) as file:
        moved = transfers(json.load(file)["traceEvents"], found.steps)
    peaks = memory()
    row = {
        "recipe": recipe,
        "status": found.receipt.status,
        "tokens": found.tokens,
        "step_seconds": found.step_seconds,
        "profiled_seconds": found.facts.profiled_seconds,
        "transfers": moved,
        "memory_gib": peaks,
    }
    head = ["recipe", "tokens a step", "ms a step", "tokens/s", "ms that the GPU waits"]
    cells = [recipe, f"{found.tokens:,}", f"{found.step_seconds * 1e3:,.4g}"]
    cells += [f"{found.tokens / found.step_seconds:,.0f}", f"{moved['waits'] * 1e3:,.4g}"]
    for way in COPIES:
        copies = moved[way]
        head.append(f"{way}: GB, ms, not hidden")
        cells.append(
            f"{copies['gb']:.1f}, {copies['seconds'] * 1e3:,.4g}, {copies['alone'] * 1e3:,.4g}"
        )
    head += [f"GiB, {name}" for name in peaks]
    cells += [f"{gib:.2f}" for gib in peaks.values()]
    under = f"{found.facts.profiled_seconds * 1e3:,.4g} ms"
    notes = [
        found.receipt.headline,
        f"Copies and waiting are of steps under the profiler, of {under}. Trace: `trace.json.gz`.",
    ]
    return {"rows": [row], "markdown": table([head, cells], notes), "failed": ""}


def main() -> None:
    """Measure a recipe, and print its row."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    parser.add_argument("--gb", type=float, default=24.0, help="GB of the GPU, 24")
    parser.add_argument("--steps", type=int, help="steps to time, and to profile")
    parser.add_argument("--out", type=Path, help="folder for trace.json.gz and diagnosis.json")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_intermixed_args()
    with tempfile.TemporaryDirectory() as name:
        limit(args.gb)
        try:
            found = measured(args.recipe, args.overrides, args.steps, args.out or Path(name))
        except FinetuneError as error:
            found = {"rows": [], "markdown": "", "failed": str(error)}
        except torch.OutOfMemoryError as error:
            found = {"rows": [], "markdown": "", "failed": f"{args.gb:g} GB: {error}"[:300]}
    print(json.dumps(found) if args.json else found["markdown"] or found["failed"])


if __name__ == "__main__":
    main()
