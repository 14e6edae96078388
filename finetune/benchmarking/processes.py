"""A process for each point, and what its end says where it left no word.

Ctrl-C at a terminal reaches the process too; one that does not end by itself is ended.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import finetune
from finetune.benchmarking.job import Job

PATIENCE_S = 10.0
"""What a point's process has to end by itself when it is interrupted."""


def run_apart(job: Job, log: Path) -> list[dict[str, Any]]:
    """Measure a job in a process of its own.

    Args:
        job: at its point.
        log: where the process's stderr goes.

    Returns:
        The lines that it printed; where it ended without a result, one that says how.
    """
    package = str(Path(finetune.__file__).parents[1])
    paths = [p for p in (os.environ.get("PYTHONPATH"),) if p]
    if "site-packages" not in package:
        paths.insert(0, package)
    # No point asks the hub. What allocates is left as the user has it (PYTORCH_CUDA_ALLOC_CONF).
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", "finetune.benchmarking.point"]
    with log.open("w", encoding="utf-8") as errors:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
            text=True, encoding="utf-8", env=environment,
        )  # fmt: skip
        try:
            printed, _ = process.communicate(job.to_json() + "\n")
        except KeyboardInterrupt:
            _end(process)
            raise
    lines = [json.loads(line) for line in printed.splitlines()]
    if not lines or lines[-1]["kind"] == "forecast":
        lines.append(ended(process.returncode, log))
    return lines


def _end(process: subprocess.Popen[str]) -> None:
    """A process that was interrupted with us, or that has to be."""
    try:
        process.wait(1.0)
    except subprocess.TimeoutExpired:
        process.terminate()
    try:
        process.wait(PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def ended(code: int, log: Path) -> dict[str, Any]:
    """The line of a process that ended without a result.

    Args:
        code: as `subprocess` has it; negative is a signal.
        log: what it wrote to stderr.
    """
    if code == -signal.SIGINT or (code == 1 and _last(log).startswith("KeyboardInterrupt")):
        raise KeyboardInterrupt
    if code == -signal.SIGKILL:
        return {
            "kind": "failed",
            "out_of_memory": True,
            "error": "out of memory: killed by the system, which is how Linux ends a process that "
            "takes the last of its memory",
        }
    if code < 0:
        return {"kind": "failed", "error": f"crashed: {signal.Signals(-code).name}; see {log}"}
    return {"kind": "failed", "error": f"{_last(log) or f'exit code {code}'}; see {log}"}


def _last(log: Path) -> str:
    lines = [line for line in log.read_text("utf-8", errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line[:1].isalpha() and "Error" in line.partition(":")[0]]
    return (errors or lines or [""])[-1][:300]
