"""Size of the report of a long run, and the seconds that making it takes.

    python -m tests.benchmarks.report_size                # 10,000 steps, every one logged
    python -m tests.benchmarks.report_size --steps 50000

The run folder is made by hand: loss, gradient norm and speed at every step, health of eight layer
groups at 200 of them, evaluations and samples. The seconds are those of a whole process, as a user
meets them: `python -m finetune report RUN`, interpreter and matplotlib included.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.run_folders import GROUPS, make_run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=10_000)
    steps = parser.parse_args().steps
    with tempfile.TemporaryDirectory() as folder:
        run = make_run(Path(folder) / "tiny_full_fp8" / "long", steps=steps, groups=GROUPS)
        began = time.perf_counter()
        subprocess.run([sys.executable, "-m", "finetune", "report", str(run)], check=True)
        seconds = time.perf_counter() - began
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        sizes = {
            name: (run / name).stat().st_size / 1e6 for name in ("metrics.jsonl", "report.html")
        }
        plots = len(list(run.glob("plots/*.png")))
        print(
            f"{steps:,} steps, {sizes['metrics.jsonl']:.1f} MB of metrics: report.html "
            f"{sizes['report.html']:.2f} MB, {plots} plots, {seconds:.1f} s "
            f"({used.ru_utime + used.ru_stime:.1f} s of a core)"
        )


if __name__ == "__main__":
    main()
