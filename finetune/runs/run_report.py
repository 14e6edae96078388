"""`report.json`: what a run leaves behind, shown on a terminal or in a notebook."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.jupyter import JupyterMixin
from rich.text import Text

from finetune.runs.checkpoint import FOLDER, checkpoints_in
from finetune.runs.receipt import Receipt


@dataclass(frozen=True)
class Sample:
    """A prompt and what the trained model says to it (greedy)."""

    prompt: str
    answer: str


@dataclass(frozen=True)
class RunReport(JupyterMixin):
    """What a run leaves behind.

    Attributes:
        folder: the run folder.
        receipt: the proof of what ran.
        first_loss, final_loss: first and last logged training loss.
        eval_loss: last held-out loss, None without held-out rows.
        tokens_per_s: median over logging intervals, the first left out.
        seconds: of training, evaluation included.
        peak_memory_gib: peak of allocated memory.
        samples: answers of the trained model.
        tasks: of `eval.tasks`, name -> metric -> value.
        interrupted: stopped by Ctrl-C; `checkpoints/` holds where.
    """

    folder: Path
    receipt: Receipt
    first_loss: float | None
    final_loss: float | None
    eval_loss: float | None
    tokens_per_s: float | None
    seconds: float
    peak_memory_gib: float
    samples: list[Sample] = field(default_factory=list)
    tasks: dict[str, dict[str, Any]] = field(default_factory=dict)
    interrupted: bool = False

    def __rich__(self) -> RenderableType:
        """Samples, scores, receipt, facts, and what to do if it did not end well."""
        return Group(*self._parts())

    def _parts(self) -> Iterator[RenderableType]:
        for sample in self.samples:
            yield Text("> ", style="dim") + Text(sample.prompt, style="italic")
            yield Text(f"  {sample.answer}")
        for name, scores in self.tasks.items():
            yield Text(f"{name}: {describe(scores)}")
        yield Text()
        yield self.receipt
        yield Text(", ".join(self._facts()))
        if self.interrupted:
            resume = f"go on with train.resume_from_checkpoint={self.folder}"
            saved = checkpoints_in(self.folder / FOLDER)
            end = resume if saved else "before a checkpoint was saved"
            yield Text(f"interrupted; {end}", style="yellow", no_wrap=True, overflow="ignore")
        elif self.receipt.status != "proven":
            yield Text(
                "! this run is not proven: the proof needs two optimizer steps with a learning "
                "rate above zero",
                style="bold red",
            )
        yield Text(f"run folder: {self.folder}", no_wrap=True, overflow="ignore")

    def _facts(self) -> Iterator[str]:
        if self.first_loss is not None:
            yield f"loss {self.first_loss:.3f} -> {self.final_loss:.3f}"
        if self.eval_loss is not None:
            yield f"held-out loss {self.eval_loss:.4f}"
        yield f"{self.seconds:.0f} s"
        yield f"peak memory {self.peak_memory_gib:.2f} GiB"
        if self.tokens_per_s:
            yield f"{self.tokens_per_s:,.0f} tok/s"

    def to_json(self) -> str:
        """The report without the receipt, which has a file of its own."""
        values = asdict(self) | {"folder": str(self.folder)}
        del values["receipt"]
        status = self.receipt.status
        return json.dumps(values | {"status": status, "proven": status == "proven"}, indent=1)


def describe(scores: dict[str, Any]) -> str:
    """`acc 0.520 ± 0.071, acc_norm 0.560 ± 0.071 (50 rows)`: the scores of one task."""
    facts = []
    for metric, value in scores.items():
        if metric in ("n", "version") or metric.endswith("_stderr"):
            continue
        spread = scores.get(f"{metric}_stderr")
        facts.append(f"{metric} {value:.3f}" + (f" ± {spread:.3f}" if spread is not None else ""))
    return ", ".join(facts) + (f" ({scores['n']:,} rows)" if "n" in scores else "")
