"""`Diagnosis`: a diagnosed step, printed to a terminal, saved as JSON, or shown in a notebook."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.jupyter import JupyterMixin
from rich.table import Table
from rich.text import Text

from finetune.analysis.diagnose.causes import Cause, percent
from finetune.analysis.diagnose.facts import Facts, PredictedStep
from finetune.analysis.diagnose.groups import ObservedGroup
from finetune.estimator.changes import as_typed
from finetune.estimator.speed.step_parts import StepPart
from finetune.logging import plain_table
from finetune.precision.model.plan import GEMMS
from finetune.runs.folder import write_whole
from finetune.runs.receipt import Receipt
from finetune.units import short_time, shortened

NAME_LENGTH = 44
"""Characters of a kernel's name that are shown."""


@dataclass(frozen=True)
class Diagnosis(JupyterMixin):
    """Executed precisions, step times and causes of a diagnosed run.

    Attributes:
        name: the recipe's name.
        causes: why FP8 is or is not faster, the largest share first.
        data: description of the rows.
        tokens: tokens of one optimizer step on one device, without padding.
        padding: share of a micro-batch that is padding, 0 to 1.
        step_seconds: duration of one optimizer step without the profiler.
        steps: number of timed steps, and of profiled ones.
        prediction: the estimator's, None without one.
        notes: lines on weights, tokenizer and prediction.
    """

    name: str
    receipt: Receipt
    facts: Facts
    causes: tuple[Cause, ...]
    data: str
    tokens: int
    padding: float
    step_seconds: float
    steps: int
    prediction: PredictedStep | None = None
    notes: tuple[str, ...] = ()

    @property
    def groups(self) -> tuple[ObservedGroup, ...]:
        """Layer groups; every linear layer is in exactly one."""
        return self.facts.groups

    @property
    def verdict(self) -> str:
        return self.facts.verdict

    @property
    def shares(self) -> dict[StepPart, float]:
        """Share of the step's time by part; they add up to one."""
        return {part: self.facts.share(seconds) for part, seconds in self.facts.parts.items()}

    def _parts(self) -> Iterator[dict[str, Any]]:
        found = self.prediction
        for part, share in self.shares.items():
            predicted = found.parts.get(part, 0.0) / found.seconds if found else None
            seconds = self.facts.parts[part]
            yield {"part": part, "seconds": seconds, "share": share, "predicted_share": predicted}

    def to_json(self) -> str:
        """Serialize everything, in seconds and shares from 0 to 1."""
        facts, environment = self.facts, self.receipt.environment
        values = {
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
            "profiled_step_seconds": facts.profiled_seconds,
            "tokens_per_s": self.tokens / self.step_seconds,
            "flop_share": self.receipt.flop_share,
            "groups": [_plain_group(group) for group in self.groups],
            "time": {
                "parts": list(self._parts()),
                "recompute_share": facts.share(facts.recompute_seconds),
                "adapter_share": facts.share(facts.adapter_seconds),
            },
            "memory_bandwidth": facts.bandwidth
            and dict(zip(("gb_s", "of_gb_s"), facts.bandwidth, strict=True)),
            "speed": {"now": facts.speed_now, "best": facts.speed_best},
            "verdict": self.verdict,
            "causes": [
                {"words" if key == "text" else key: value for key, value in asdict(cause).items()}
                for cause in self.causes
            ],
            "prediction": asdict(self.prediction) if self.prediction else None,
            "notes": list(self.notes),
        }
        return json.dumps(values, indent=1)

    def save(self, folder: Path) -> Path:
        """Write `diagnosis.json` into a folder and return its path."""
        write_whole(folder / "diagnosis.json", self.to_json() + "\n")
        return folder / "diagnosis.json"

    def __rich__(self) -> RenderableType:
        return Group(*self._lines())

    def _lines(self) -> Iterator[RenderableType]:
        receipt, facts = self.receipt, self.facts
        padding = f", {percent(self.padding)} padding" if self.padding else ""
        many = facts.micro_batches > 1
        batches = f" in {facts.micro_batches} micro-batches" if many else ""
        yield Text(receipt.headline, style="bold green" if receipt.is_proven else "bold yellow")
        yield Text(
            f"{receipt.environment['device']['name']}; {self.data}; {self.tokens:,} tokens a step"
            f"{batches}{padding}; {short_time(self.step_seconds)} a step, "
            f"{self.tokens / self.step_seconds:,.0f} tok/s"
        )
        yield Text(f"torch.compile: {facts.compiled}\n", style="dim")
        yield _layer_table(facts)
        reasons: dict[str, list[str]] = {}
        for group in (group for group in self.groups if not group.is_low):
            reasons.setdefault(group.reason, []).append(group.kind)
        for reason, kinds in reasons.items():
            yield Text(f"{', '.join(dict.fromkeys(kinds))}: {reason}", style="dim")
        note = "FLOPs: share of a step's matmuls; dB: signal-to-noise ratio of quantized operands\n"
        yield Text(note, style="dim")
        yield self._time_table()
        inside = {"adapters": facts.adapter_seconds, "recomputation": facts.recompute_seconds}
        shown = [f"{name} {percent(facts.share(s))}" for name, s in inside.items() if s]
        if shown:
            yield Text(f"included: {', '.join(shown)}", style="dim")
        if facts.device.kind == "cuda":
            under = short_time(facts.profiled_seconds)
            note = f"host: what kernels leave of a step; under the profiler a step takes {under}"
            yield Text(note, style="dim")
        if facts.bandwidth:
            used, peak = facts.bandwidth
            note = f"memory bandwidth in use: {percent(used / peak)} of {peak:,.0f} GB/s"
            yield Text(f"{note} or more, by the operands of kernels", style="dim")
        yield Text()
        yield _kernel_table(facts)
        yield Text(f"\n{self.verdict}", style="bold")
        for cause in self.causes:
            yield Text(f"{percent(cause.share):>7s}  ", style="cyan") + Text(cause.text)
            if cause.evidence:
                yield Text(f"         {cause.evidence}", style="dim")
            tried = f"try {as_typed(cause.change)}" if cause.change else ""
            if advice := "; ".join(filter(None, (tried, cause.hint))):
                yield Text(f"         {advice}")
        if self.prediction is not None and self.prediction.speed is not None:
            likely, low, high = self.prediction.speed
            said = f"FP8 runs at {likely:.2f}x the speed of BF16 ({low:.2f} to {high:.2f})"
            yield Text(f"predicted: {said}")
            if self.prediction.why:
                yield Text(f"  {'; '.join(self.prediction.why)}", style="dim")
        yield from (Text(note, style="dim") for note in self.notes)

    def _time_table(self) -> Table:
        right = ("", "share", "predicted") if self.prediction else ("", "share")
        table = plain_table("time of a step", *right, right=right)
        for row in self._parts():
            predicted = row["predicted_share"]
            if row["share"] or predicted:
                shown = [row["part"], short_time(row["seconds"]), percent(row["share"])]
                if predicted is not None:
                    shown.append(percent(predicted))
                table.add_row(*shown)
        return table


def _plain_group(group: ObservedGroup) -> dict[str, Any]:
    values = asdict(group)
    values["precision"] = dict.fromkeys(GEMMS, "none") | values.pop("ran")
    values["count"] = len(group.layers)
    values["kernels"] = [{"name": name, "seconds": seconds} for name, seconds in group.kernels]
    return values


def _layer_table(facts: Facts) -> Table:
    titles = ("layers", "N x K", "tokens", "fprop/dgrad/wgrad", "FLOPs", "dB x/w/g", "time")
    right = ("", "tokens", "FLOPs", "time")
    table = plain_table("", *titles, right=right, whole=titles, gap=1)
    for group in facts.groups:
        noise = (group.snr_db.get(operand) for operand in "xwg")  # `-`: the operand is not cast
        table.add_row(
            str(len(group.layers)),
            group.kind,
            "x".join(map(str, group.shape)) if all(group.shape) else "",
            f"{group.tokens:,}" if group.tokens and group.role != "head" else "",
            "/".join(group.ran.get(gemm, "-") for gemm in GEMMS),
            percent(group.share),
            "/".join("-" if db is None else f"{db:.0f}" for db in noise) if group.is_low else "",
            percent(facts.share(group.seconds)) if group.seconds else "",
            style=None if group.is_low else "dim",
        )
    return table


def _kernel_table(facts: Facts) -> Table:
    what = "kernels" if facts.device.kind == "cuda" else "operators"
    table = plain_table("layers", whole=("layers",))
    table.add_column(f"slowest {what}", style="dim")
    for group in facts.groups:
        times = ((shortened(name, NAME_LENGTH), short_time(s)) for name, s in group.kernels)
        shown = ", ".join(f"{name} {time}" for name, time in times)
        if shown:
            table.add_row(group.kind, shown)
    return table
