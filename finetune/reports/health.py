"""Plots of training health: what FP8 casts do to activations, weights and gradients, by group.

Three operands (`x`, `w`, `g`) side by side, a line for each layer group. Shares that were zero
at every step are said in words: a flat line at zero tells nothing more.
"""

from __future__ import annotations

import re
from typing import Any

from finetune.reports.content import Block, Num, Para, Plot, Row, Section, Series, Source, words
from finetune.reports.series import envelope, said, series_of, split
from finetune.reports.theme import style
from finetune.runs import Run

FILE = "metrics.jsonl"
OPERANDS = {"x": "activations", "w": "weights", "g": "gradients"}
MEASURES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "snr_db": (
        "Signal over quantisation noise",
        "dB",
        {"note": "Gaussian values read 31 dB in E4M3, 25 dB in E5M2; higher keeps more."},
    ),
    "overflow": ("Overflow", "share of values saturated", {"percent": True, "from_zero": True}),
    "underflow": ("Underflow", "share of values flushed to zero", {"percent": True}),
    "amax": ("Largest magnitude (amax)", "absolute value", {"log": True}),
}
OTHERS = {
    "grad_snr": ("Gradient signal over noise", "ratio", {"log": True}),
    "update_ratio": ("Update relative to weight", "ratio of norms", {"log": True}),
}
_KEY = re.compile(r"health/([^/]+)/(?:([xwg])_)?(\w+)$")
SMALL = 150
"""Buckets of a small plot."""


def health(run: Run, source: Source) -> Section | None:
    """The section on health; None where no health was logged."""
    keys = sorted({key for row in run.rows for key in row if key.startswith("health/")})
    parsed = {key: match.groups() for key in keys if (match := _KEY.match(key))}
    groups = sorted({group for group, _, _ in parsed.values()})
    if not groups:
        return None
    looks = {group: style(i) for i, group in enumerate(groups)}
    blocks: list[Block] = []
    for measure, (title, unit, options) in MEASURES.items():
        plots, silent = [], []
        for operand, named in OPERANDS.items():
            found = {
                group: key
                for key, (group, x, what) in parsed.items()
                if x == operand and what == measure
            }
            plot = _plot(run, source, found, looks, f"{measure}_{named}", named, unit, options)
            if plot is None:
                continue
            at_zero = all(not any(s.y) for s in plot.series)
            if measure in ("overflow", "underflow") and at_zero:
                silent.append(named)
            else:
                plots.append(plot)
        _add(blocks, title, unit, options.get("note", ""), plots, looks)
        if silent:
            link = source.num(f"no {measure}", FILE, f"health/*/*_{measure}")
            blocks.append(Para(words(f"{' and '.join(silent).capitalize()}: ", link, " at all.")))
    plots = []
    for measure, (title, unit, options) in OTHERS.items():
        found = {group: key for key, (group, x, what) in parsed.items() if (x, what) == (None, measure)}
        plot = _plot(run, source, found, looks, measure, title, unit, options)
        plots += [plot] if plot else []
    _add(blocks, "Gradients and updates", "", "", plots, looks)
    return Section("Training health", tuple(blocks))


def _add(
    blocks: list[Block], title: str, unit: str, note: str, plots: list[Plot], looks: dict[str, Any]
) -> None:
    if not plots:
        return
    shown = {s.label for plot in plots for s in plot.series}
    legend = tuple(Series(g, (), **look) for g, look in looks.items() if g in shown)
    text = f"{title}{', ' if unit else ''}{unit}. {note}".strip()
    blocks += [Para(words(text)), Row(tuple(plots), legend)]


def _plot(
    run: Run,
    source: Source,
    found: dict[str, str],
    looks: dict[str, Any],
    name: str,
    title: str,
    unit: str,
    options: dict[str, Any],
) -> Plot | None:
    series, n = [], 0
    for group, key in sorted(found.items()):
        x, y, _ = split(*series_of(run.rows, key))
        n = max(n, len(x))
        if len(x):
            x, y = envelope(x, y, SMALL)
            series.append(Series(group, x.tolist(), y.tolist(), **looks[group]))
    if not series:
        return None
    plain = {k: v for k, v in options.items() if k != "note"}
    example = next(iter(found.values()))
    return Plot(
        name=name,
        title=title[:1].upper() + title[1:],
        unit=unit,
        about=f"{title} over steps, {unit}, one line for each layer group: {', '.join(found)}.",
        series=tuple(series),
        note=said(n, buckets=SMALL),
        sources=(Num(FILE, source.href(FILE), example),),
        **plain,
    )
