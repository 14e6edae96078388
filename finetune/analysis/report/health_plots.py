"""Plots of training health: what FP8 casts do to activations, weights and gradients, by group.

Three operands (`x`, `w`, `g`) side by side, a line for each layer group. Shares that were zero
at every step are said in words: a flat line at zero tells nothing more.
"""

from __future__ import annotations

import re
from typing import Any

from finetune.analysis.report.content import (
    Block,
    Num,
    Para,
    Plot,
    Row,
    Section,
    Series,
    Source,
    words,
)
from finetune.analysis.report.figures import Look, style
from finetune.analysis.report.series import envelope, said, series_of, split
from finetune.runs.folder import Run

FILE = "metrics.jsonl"
OPERANDS = {"x": "activations", "w": "weights", "g": "gradients"}
MEASURES: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "snr_db": (
        "Signal over quantisation noise",
        "dB",
        "Higher keeps more; E4M3 lies some six dB above E5M2.",
        {"least": 4.0},
    ),
    "overflow": ("Overflow", "%", "Share of values that a cast saturated.", {"from_zero": True}),
    "underflow": ("Underflow", "%", "Share of values that a cast made zero.", {"from_zero": True}),
    "amax": ("Largest magnitude", "", "The amax that scales follow.", {"log": True}),
}
OTHERS = {
    "grad_snr": ("Gradient signal over noise", "ratio", {"log": True}),
    "update_ratio": ("Update relative to weight", "ratio of norms", {"log": True}),
}
_KEY = re.compile(r"health/([^/]+)/(?:([xwg])_)?(\w+)$")
SMALL = 150
"""Buckets of a small plot."""
LEAST_PERCENT = 1e-3
"""Shares below it are told per million."""


def health(run: Run, source: Source) -> Section | None:
    """The section on health; None where no health was logged."""
    keys = sorted({key for row in run.rows for key in row if key.startswith("health/")})
    parsed = {key: match.groups() for key in keys if (match := _KEY.match(key))}
    groups = sorted({group for group, _, _ in parsed.values()})
    if not groups:
        return None
    looks = {group: style(i) for i, group in enumerate(groups)}
    blocks: list[Block] = []
    for measure, (title, unit, note, options) in MEASURES.items():
        plots, silent = [], []
        for operand, named in OPERANDS.items():
            found = {
                group: key
                for key, (group, x, what) in parsed.items()
                if x == operand and what == measure
            }
            name = f"{measure.removesuffix('_db')}_{named}"
            about = f"{title} of {named}"
            plot = _plot(run, source, found, looks, name, named, unit, about, options)
            if plot is None:
                continue
            at_zero = all(not any(s.y) for s in plot.series)
            if measure in ("overflow", "underflow") and at_zero:
                silent.append(named)
            else:
                plots.append(plot)
        _add(blocks, title, note, plots, looks)
        if silent:
            link = source.num(f"no {measure}", FILE, f"health/*/*_{measure}")
            blocks.append(Para(words(f"{' and '.join(silent).capitalize()}: ", link, " at all.")))
    plots = []
    for measure, (title, unit, options) in OTHERS.items():
        found = {
            group: key for key, (group, x, what) in parsed.items() if (x, what) == (None, measure)
        }
        plot = _plot(run, source, found, looks, measure, title, unit, title, options)
        plots += [plot] if plot else []
    _add(blocks, "Gradients and updates", "", plots, looks)
    return Section("Training health", tuple(blocks))


def _add(
    blocks: list[Block], title: str, note: str, plots: list[Plot], looks: dict[str, Look]
) -> None:
    if not plots:
        return
    shown = {s.label for plot in plots for s in plot.series}
    legend = tuple(Series(g, (), **look) for g, look in looks.items() if g in shown)
    blocks += [Para(words(note), head=title), Row(tuple(plots), legend)]


def _plot(
    run: Run,
    source: Source,
    found: dict[str, str],
    looks: dict[str, Look],
    name: str,
    title: str,
    unit: str,
    about: str,
    options: dict[str, Any],
) -> Plot | None:
    drawn = {group: split(*series_of(run.rows, key))[:2] for group, key in sorted(found.items())}
    drawn = {group: (x, y) for group, (x, y) in drawn.items() if len(x)}
    if not drawn:
        return None
    factor = 1.0
    if unit == "%":  # a share; most are so small that per cent would be all zeros
        rare = max(y.max() for _, y in drawn.values()) < LEAST_PERCENT
        unit, factor = ("per million", 1e6) if rare else (unit, 100.0)
    series = []
    for group, whole in drawn.items():
        x, y = envelope(*whole, SMALL)
        series.append(Series(group, x.tolist(), (factor * y).tolist(), **looks[group]))
    example = next(iter(found.values()))
    return Plot(
        name=name,
        title=title[:1].upper() + title[1:],
        unit=unit,
        about=f"{about} over steps, a line for each layer group: {', '.join(drawn)}.",
        series=tuple(series),
        note=said(max(len(x) for x, _ in drawn.values()), buckets=SMALL),
        sources=(Num(FILE, source.href(FILE), example),),
        **options,
    )
