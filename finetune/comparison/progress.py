"""What is shown while the runs of a comparison train: a line for each.

The runs are other processes, so their progress is read where they write it: `metrics.jsonl`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from finetune.comparison.running import Job
from finetune.plain_yaml import parse_yaml, read_text


class Watcher:
    """Follows runs on a terminal, or prints a line when one ends.

    Attributes:
        finished: runs that ended well, in the order in which they did.
    """

    def __init__(self, console: Console, jobs: Sequence[Job]) -> None:
        self.console, self.jobs = console, jobs
        self.finished: list[Job] = []
        self._bars: Progress | None = None
        self._tasks: dict[int, TaskID] = {}
        self._read: dict[int, int] = {}
        self._last: dict[int, dict[str, Any]] = {}

    def __enter__(self) -> Watcher:
        if self.console.is_terminal:
            bars = self._bars = Progress(
                TextColumn("{task.description:14s}"),
                BarColumn(bar_width=20),
                TextColumn("{task.fields[facts]}"),
                console=self.console,
            )
            bars.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._bars is not None:
            self._bars.stop()
            self._bars = None

    def look(self, running: Sequence[Job]) -> None:
        """Show how far the runs are."""
        for job in running if self._bars is not None else ():
            self._show(job)

    def _show(self, job: Job) -> None:
        assert self._bars is not None
        key, folder = id(job), job.folder
        if key not in self._tasks:
            self._tasks[key] = self._bars.add_task(job.name, total=None, facts="starting")
        row = self._newest(key, folder / "metrics.jsonl") if folder is not None else None
        if row is not None and "loss" in row:
            facts = f"step {row['step']}  loss {row['loss']:.4f}"
            self._bars.update(
                self._tasks[key], completed=row["step"], total=_steps(job), facts=facts
            )

    def _newest(self, key: int, file: Path) -> dict[str, Any] | None:
        """The last whole line that was written, reading only what is new."""
        if not file.is_file():
            return None
        with file.open("rb") as lines:
            lines.seek(self._read.get(key, 0))
            new = lines.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._read[key] = self._read.get(key, 0) + len(whole)
        rows = [json.loads(line) for line in whole.splitlines()]
        with_loss = [row for row in rows if "loss" in row]
        if with_loss:
            self._last[key] = with_loss[-1]
        return self._last.get(key)

    def finish(self, job: Job) -> None:
        """Show what a run came to."""
        self.finished.append(job)
        report = json.loads((job.run_folder / "report.json").read_text("utf-8"))
        facts = [f"loss {report['first_loss']:.3f} -> {report['final_loss']:.3f}"]
        if report["eval_loss"] is not None:
            facts.append(f"held-out {report['eval_loss']:.4f}")
        facts.append(f"{report['seconds']:.0f} s, {report['status']}")
        line = f"[{len(self.finished)}/{len(self.jobs)}] {job.name}: {', '.join(facts)}"
        if self._bars is not None and id(job) in self._tasks:
            self._bars.remove_task(self._tasks.pop(id(job)))
        self.console.print(line, highlight=False, soft_wrap=True)


def _steps(job: Job) -> float | None:
    """`max_steps` of a run; None where its epochs decide."""
    train = parse_yaml(read_text(job.recipe), str(job.recipe))[0].get("train") or {}
    steps = int(train.get("max_steps", -1))
    return steps if steps > 0 else None
