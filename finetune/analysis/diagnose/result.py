"""`Diagnosis`: what a diagnosed step says. Prints well, saves as JSON, shows in a notebook."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Group as Lines
from rich.console import RenderableType
from rich.jupyter import JupyterMixin
from rich.table import Table
from rich.text import Text

from finetune.analysis.diagnose.cause import Cause, percent
from finetune.analysis.diagnose.facts import Facts
from finetune.analysis.diagnose.layer_groups import GEMMS, Group
from finetune.analysis.diagnose.prediction import Prediction
from finetune.estimator.speed.step_parts import PROFILED_PARTS, StepPart
from finetune.runs.receipt import Receipt


@dataclass(frozen=True)
class Diagnosis(JupyterMixin):
    """What really ran in which precision, where the time went, and why.

    Attributes:
        name: of the recipe.
        receipt: of the run whose steps were looked at.
        facts: what was seen; layer groups and times are here.
        causes: why FP8 is or is not faster, the largest share first.
        verdict: the answer in a sentence or two.
        data: what the rows were.
        tokens: of one optimizer step on one device, padding left out.
        padding: share of a micro-batch that is padding, 0 to 1.
        step_seconds: of one optimizer step without a profile.
        steps: that were timed, and as many profiled.
        prediction: of the estimator, None where there is none.
        notes: what else to know.
    """

    name: str
    receipt: Receipt
    facts: Facts
    causes: tuple[Cause, ...]
    verdict: str
    data: str
    tokens: int
    padding: float
    step_seconds: float
    steps: int
    prediction: Prediction | None = None
    notes: tuple[str, ...] = ()

    @property
    def groups(self) -> tuple[Group, ...]:
        """Layers of one kind that ran alike; every linear layer is in exactly one."""
        return self.facts.groups

    @property
    def shares(self) -> dict[StepPart, float]:
        """Part -> its share of the step's time; they add up to one."""
        return {part: self.facts.share(self.facts.parts[part]) for part in PROFILED_PARTS}

    def to_json(self) -> str:
        """Everything, in seconds and shares from 0 to 1."""
        return json.dumps(self.as_dict(), indent=1)

    def as_dict(self) -> dict[str, Any]:
        """The same as plain data."""
        facts, environment = self.facts, self.receipt.environment
        expected = self.prediction
        parts = [
            {
                "part": part,
                "seconds": facts.parts[part],
                "share": share,
                "predicted_share": expected.parts.get(part, 0.0) / expected.seconds
                if expected
                else None,
            }
            for part, share in self.shares.items()
        ]
        return {
            "kind": "diagnosis",
            "recipe": self.name,
            "headline": self.receipt.headline,
            "status": self.receipt.status,
            "precision": self.receipt.precision,
            "device": environment["device"],
            "versions": environment["versions"],
            "data": self.data,
            "steps": self.steps,
            "tokens_per_step": self.tokens,
            "padding": self.padding,
            "micro_batches": facts.micro_batches,
            "step_seconds": self.step_seconds,
            "profiled_step_seconds": facts.seconds,
            "tokens_per_s": self.tokens / self.step_seconds,
            "flop_share": self.receipt.flop_share,
            "groups": [_plain(group) for group in self.groups],
            "time": {
                "parts": parts,
                "recompute_share": facts.share(facts.recompute_seconds),
                "adapter_share": facts.share(facts.adapter_seconds),
            },
            "speed": {"now": facts.speed_now, "best": facts.speed_best},
            "verdict": self.verdict,
            "causes": [asdict(cause) for cause in self.causes],
            "prediction": asdict(expected) if expected else None,
            "notes": list(self.notes),
        }

    def save(self, folder: Path) -> Path:
        """Write `diagnosis.json` into a folder; the file."""
        file = folder / "diagnosis.json"
        partial = file.with_suffix(".part")
        partial.write_text(self.to_json() + "\n", encoding="utf-8")
        partial.replace(file)
        return file

    def __rich__(self) -> RenderableType:
        return describe(self)


def _plain(group: Group) -> dict[str, Any]:
    """A group as plain data: kernels with their names, precisions under one key."""
    values = asdict(group)
    values["precision"] = {gemm: values.pop(gemm) for gemm in GEMMS}
    values["count"] = len(group.layers)
    values["kernels"] = [{"name": name, "seconds": seconds} for name, seconds in group.kernels]
    return values


# ------------------------------------------------------------------------------------------
# A diagnosis on a terminal: layers, times, and the verdict with its causes.


NAME = 44
"""Letters of a kernel's name that are shown."""


def describe(found: Diagnosis) -> RenderableType:
    """Everything, top to bottom: what ran, where the time went, why."""
    receipt, facts = found.receipt, found.facts
    device = receipt.environment["device"]["name"]
    padding = f", {percent(found.padding)} padding" if found.padding else ""
    several = facts.micro_batches > 1
    batches = f" in {facts.micro_batches} micro-batches" if several else ""
    lines: list[RenderableType] = [
        Text(receipt.headline, style="bold"),
        Text(
            f"{device}; {found.data}; {found.tokens:,} tokens a step{batches}{padding}; "
            f"{_time(found.step_seconds)} a step, "
            f"{found.tokens / found.step_seconds:,.0f} tok/s"
        ),
        Text(f"compile: {facts.compiled}", style="dim"),
        Text(),
        _layers(found),
        *_reasons(found),
        Text("FLOPs: of a step's matmuls; dB: signal over noise of what is quantised", style="dim"),
        Text(),
        _times(found),
    ]
    beside = [
        f"{name} {percent(facts.share(seconds))}"
        for name, seconds in (
            ("adapters", facts.adapter_seconds),
            ("recomputation", facts.recompute_seconds),
        )
        if seconds
    ]
    if beside:
        lines.append(Text(f"of these, {', '.join(beside)}", style="dim"))
    lines += [Text(), _kernels(found), Text(), Text(found.verdict, style="bold")]
    for cause in found.causes:
        lines += _cause(cause)
    if found.prediction is not None and found.prediction.speed is not None:
        likely, low, high = found.prediction.speed
        why = "; ".join(found.prediction.why)
        lines.append(Text(f"the estimator expects {likely:.2f} times ({low:.2f} to {high:.2f})"))
        lines += [Text(f"  {why}", style="dim")] if why else []
    lines += [Text(note, style="dim") for note in found.notes]
    return Lines(*lines)


def _layers(found: Diagnosis) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    titles = ("layers", "N x K", "tokens", "fprop/dgrad/wgrad", "FLOPs", "dB x/w/g", "time")
    table.add_column("", justify="right")
    for title in titles:
        right = title in ("tokens", "FLOPs", "time")
        table.add_column(title, no_wrap=True, justify="right" if right else "left")
    for group in found.groups:
        table.add_row(
            *(str(len(group.layers)), group.kind),
            "x".join(map(str, group.shape)) if all(group.shape) else "",
            f"{group.tokens:,}" if group.tokens else "",
            "/".join(group.ran.get(gemm, "-") for gemm in GEMMS),
            percent(group.share),
            _noise(group),
            percent(found.facts.share(group.seconds)) if group.seconds else "",
            style=None if group.is_low else "dim",
        )
    return table


def _reasons(found: Diagnosis) -> list[RenderableType]:
    """Why layers stayed high, each reason once."""
    kinds: dict[str, list[str]] = {}
    for group in found.groups:
        if not group.is_low:
            kinds.setdefault(group.reason, []).append(group.kind)
    return [
        Text(f"{', '.join(dict.fromkeys(names))}: {reason}", style="dim")
        for reason, names in kinds.items()
    ]


def _noise(group: Group) -> str:
    """Signal over noise of x, w, g; `-` where an operand is not cast."""
    if not group.is_low:
        return ""
    seen = (group.snr_db.get(operand) for operand in "xwg")
    return "/".join("-" if value is None else f"{value:.0f}" for value in seen)


def _times(found: Diagnosis) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("time of a step")
    table.add_column("", justify="right")
    table.add_column("share", justify="right")
    expected = found.prediction
    if expected is not None:
        table.add_column("predicted", justify="right")
    for part in PROFILED_PARTS:
        seconds = found.facts.parts[part]
        share = expected.parts.get(part, 0.0) / expected.seconds if expected else 0.0
        if seconds or share:
            row = [part, _time(seconds), percent(found.facts.share(seconds))]
            table.add_row(*row, *([percent(share)] if expected is not None else []))
    return table


def _kernels(found: Diagnosis) -> Table:
    what = "kernels" if found.facts.device.kind == "cuda" else "operators"
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("layers", no_wrap=True)
    table.add_column(f"{what} behind them", style="dim")
    for group in found.groups:
        shown = ", ".join(f"{_cut(name)} {_time(seconds)}" for name, seconds in group.kernels)
        if shown:
            table.add_row(group.kind, shown)
    return table


def _cause(cause: Cause) -> list[RenderableType]:
    lines: list[RenderableType] = [
        Text(f"{percent(cause.share):>7s}  ", style="cyan") + Text(cause.words),
        Text(f"         {cause.evidence}", style="dim"),
    ]
    hint = f"; {cause.hint}" if cause.hint else ""
    if cause.change:
        lines.append(Text(f"         try {' '.join(cause.change)}{hint}"))
    elif cause.hint:
        lines.append(Text(f"         {cause.hint}"))
    return lines


def _cut(name: str) -> str:
    return name if len(name) <= NAME else name[: NAME - 1] + "…"


def _time(seconds: float) -> str:
    """`1.23 s`, `45.6 ms`, `78 us`."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"
