"""A comparison in plain words, for the terminal: the verdict first, then what it rests on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from finetune.comparison.result import Comparison, Interval

NAMES = {"train": "training loss", "eval": "held-out loss"}
STYLES = {
    "equivalent": "bold green", "not equivalent": "bold red", "undecided": "bold yellow",
    "refused": "bold red",
}  # fmt: skip
SHOWN_CHARACTERS = 200


def describe(found: Comparison) -> RenderableType:
    """Verdict, differences, losses, speed, memory, tasks, samples, notes."""
    parts: list[RenderableType] = [Text(headline(found), style=STYLES[found.verdict])]
    parts += [Text(f"  {reason}") for reason in found.reasons]
    if found.differences:
        title = "not the same on both sides" + (", allowed" if found.allowed else "")
        parts += [Text(""), Text(f"! {title}:", style="bold red")]
        for d in found.differences:
            parts.append(Text(f"  {d.condition} ({d.where}): {_short(d.a)} and {_short(d.b)}"))
            parts.append(Text(f"    {d.why}", style="dim"))
    if found.losses:
        parts += [Text(""), _losses(found), *_ratios(found)]
    if found.tasks:
        parts += [Text(""), _tasks(found)]
    parts += _samples(found)
    if found.notes:
        parts.append(Text(""))
        parts += [Text(f"  {note}", style="dim") for note in found.notes]
    return Group(*parts)


def headline(found: Comparison) -> str:
    """The verdict in one sentence."""
    a, b, n = found.a.label, found.b.label, len(found.seeds)
    margin, seeds = percent(found.margin, sign=False), _count(n, "seed")
    match found.verdict:
        case "equivalent":
            return f"equivalent: {a} ends where {b} ends, within {margin}, over {seeds}"
        case "not equivalent":
            return f"not equivalent: {a} does not end where {b} ends, within {margin}, over {seeds}"
        case "undecided":
            do = "does" if n == 1 else "do"
            return (
                f"undecided: {seeds} {do} not show whether {a} ends where {b} ends, within {margin}"
            )
        case _:
            return f"refused: {a} and {b} cannot be compared"


def percent(share: float, *, sign: bool = True, digits: int | None = None) -> str:
    """`+0.26 %`; without a sign, and with no more digits than it has or is given: `1 %`."""
    if sign:
        return f"{share * 100:+.2f} %"
    return f"{share * 100:g} %" if digits is None else f"{share * 100:.{digits}f} %"


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"


def _losses(found: Comparison) -> Table:
    """Losses by seed and over them; `seeds` is the band that the seeds of b span."""
    level = f"{found.confidence:.0%}".replace("%", " %")
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("final loss")
    for title in (found.a.label, found.b.label, "gap", f"{level} interval", "seeds"):
        table.add_column(title, justify="right")
    table.add_column("verdict")
    for name, gap in found.losses.items():
        for seed, a, b in zip(found.seeds, gap.a, gap.b, strict=True):
            row = (f"{a:.4f}", f"{b:.4f}", percent(a / b - 1), "", "", "")
            table.add_row(f"  seed {seed}", *row, style="dim")
        means = (f"{sum(side) / len(side):.4f}" for side in (gap.a, gap.b))
        table.add_row(
            NAMES[name],
            *means,
            percent(gap.gap),
            _as_percents(gap.interval),
            percent(found.band[name], sign=False, digits=1) if name in found.band else "-",
            Text(gap.verdict, style=STYLES[gap.verdict]),
        )
    return table


def _as_percents(interval: Interval | None) -> str:
    return "-" if interval is None else f"{interval[0] * 100:+.2f} to {percent(interval[1])}"


def _ratios(found: Comparison) -> list[Text]:
    lines = []
    if (s := found.speed) is not None:
        between = f" ({s.interval[0]:.3f} to {s.interval[1]:.3f})" if s.interval else ""
        lines.append(
            Text(
                f"speed: {found.a.label} at {s.ratio:.3f} times {found.b.label}{between}; "
                f"{s.a_tokens_per_s:,.0f} and {s.b_tokens_per_s:,.0f} tok/s"
                + (", emulated" if found.emulated else "")
            )
        )
    if (m := found.memory) is not None:
        lines.append(
            Text(
                f"peak memory: {found.a.label} at {m.ratio:.3f} times {found.b.label}; "
                f"{m.a_gib:.3f} and {m.b_gib:.3f} GiB"
            )
        )
    return [Text(""), *lines] if lines else []


def _tasks(found: Comparison) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("task")
    for title in (found.a.label, found.b.label, "difference"):
        table.add_column(title, justify="right")
    for task, scores in (found.tasks or {}).items():
        for s in scores:
            error = f" ± {s.a_stderr:.4f}" if s.a_stderr is not None else ""
            table.add_row(
                f"{task} {s.metric}", f"{s.a:.4f}{error}", f"{s.b:.4f}", f"{s.a - s.b:+.4f}"
            )
    return table


def _samples(found: Comparison) -> list[RenderableType]:
    """What both sides of the first seed answered at the end, one above the other."""
    if not found.runs or found.folder is None or found.verdict == "refused":
        return []
    first = found.runs[0]
    a, b = (_answers(found.folder / run) for run in (first.a, first.b))
    lines: list[RenderableType] = []
    width = max(len(found.a.label), len(found.b.label))
    for prompt in a:
        if prompt in b:
            lines.append(Text("> ", style="dim") + Text(prompt, style="italic"))
            for label, said in ((found.a.label, a[prompt]), (found.b.label, b[prompt])):
                lines.append(Text(f"  {label:{width}s}  ", style="dim") + Text(said))
    return [Text(""), Text(f"samples, seed {first.seed}", style="bold"), *lines] if lines else []


def _answers(run: Path) -> dict[str, str]:
    file = run / "report.json"
    if not file.is_file():
        return {}
    samples = json.loads(file.read_text("utf-8")).get("samples") or []
    return {s["prompt"]: s["answer"][:SHOWN_CHARACTERS] for s in samples}


def _short(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 1] + "…"
