"""TensorBoard over all runs, whatever their `train.report_to` was: from their `metrics.jsonl`.

Events are written into a folder of this process, a run's under its recipe, name and precision, and
follow running runs as TensorBoard reads them. Nothing stays behind, and no run is touched.
"""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from finetune.errors import ConfigError, install_hint
from finetune.runs.folder import RunFolder, finite

PERIOD = 5.0
"""Seconds between two looks at the runs."""


def serve(runs: Callable[[], list[Path]]) -> int:
    """Open TensorBoard over the folders that `runs` finds at each look; its exit code, at its end.

    Raises:
        ConfigError: TensorBoard is not installed.
    """
    try:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
    except ImportError:
        raise ConfigError(
            "TensorBoard is not installed",
            where="watch --tensorboard",
            fix=f"{install_hint('tracking')}; without it `python -m finetune report RUN RUN` "
            "draws the same curves into one page",
        ) from None
    writers, sizes, written = dict[Path, Any](), dict[Path, int](), dict[Path, int]()
    with tempfile.TemporaryDirectory(prefix="finetune-tensorboard-") as folder:
        command = [sys.executable, "-m", "tensorboard.main", "--logdir", folder]
        board = subprocess.Popen([*command, "--reload_interval", f"{PERIOD:.0f}"])
        # A scheduler's SIGTERM would end this process alone, and leave the board on its port.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            while True:
                for path in runs():
                    run, log = RunFolder(path), path / "metrics.jsonl"
                    size = log.stat().st_size if log.is_file() else 0
                    if size == sizes.get(path, 0):  # most runs have long ended
                        continue
                    if path not in writers:
                        writers[path] = EventFileWriter(str(Path(folder) / name_of(run)))
                    for row in run.rows[written.get(path, 0) :]:
                        values = [Summary.Value(tag=t, simple_value=v) for t, v in scalars(row)]
                        event = Event(step=int(row["step"]), summary=Summary(value=values))
                        event.wall_time = run.started + (finite(row.get("seconds")) or 0.0)
                        writers[path].add_event(event)
                    sizes[path], written[path] = size, len(run.rows)
                    writers[path].flush()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return board.wait(PERIOD)
        finally:
            board.terminate()
            board.wait()
            for writer in writers.values():
                writer.close()


def name_of(run: RunFolder) -> str:
    """`tiny_lora_fp8-20261126-065835-ada5-fp8-rowwise`: the precision is there once."""
    name, precision = f"{run.recipe}-{run.name}", re.sub(r"\W+", "-", run.precision.lower())
    return name if precision.split("-")[0] in run.name.split("-") else f"{name}-{precision}"


def scalars(row: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Numbers under the tags of Transformers (`train/loss`, `eval/loss`), `health/...` as it is."""
    for key, value in row.items():
        if finite(value) is not None and key != "step":
            name = re.sub(r"^eval_", "eval/", key)
            yield (name if "/" in name else f"train/{name}"), float(value)
