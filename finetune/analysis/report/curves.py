"""The curves of one run: loss, gradient norm, tokens per second."""

from __future__ import annotations

from typing import Any

from finetune.analysis.report.content import Num, Plot, Row, Section, Series, Source, is_number
from finetune.analysis.report.run_facts import METRICS
from finetune.analysis.report.series import envelope, said, series_of, smoothed, split, window_of
from finetune.runs.folder import Run


def curves_section(gradient: Plot | None, speed: Plot | None) -> Section | None:
    """Gradient norm and speed beside each other."""
    found = tuple(plot for plot in (gradient, speed) if plot is not None)
    return Section("Gradients and speed", (Row(found),)) if found else None


def _links(source: Source, *keys: str, file: str = METRICS) -> tuple[Num, ...]:
    return tuple(Num(file, source.href(file), key) for key in keys[:1])


def loss_plot(run: Run, source: Source) -> Plot | None:
    """Training loss, raw and smoothed, and held-out loss."""
    x, y, broken = split(*series_of(run.rows, "loss"))
    ex, ey, ebroken = split(*series_of(run.rows, "eval_loss"))
    if not len(x) and not len(ex):
        return None
    window = window_of(len(y))
    series = []
    if len(x):
        thin = envelope(x, y)
        if window > 1:
            even = envelope(x, smoothed(y, window))
            series += [
                Series("training, as logged", *_listed(thin), colour="c1", weight="faint"),
                Series("training, smoothed", *_listed(even), colour="c1"),
            ]
        else:
            series.append(Series("training", *_listed(thin), colour="c1"))
    if len(ex):
        thin = envelope(ex, ey)
        few = len(ex) <= 60
        series.append(
            Series(
                "held out", *_listed(thin), colour="c2", dash="dashed", marker="o" if few else ""
            )
        )
    ends = [f"{s.label} from {s.y[0]:.3f} to {s.y[-1]:.3f}" for s in series if s.weight != "faint"]
    return Plot(
        "loss",
        "Training and held-out loss",
        "nats per token",
        f"Loss over {run.last_step} steps: {'; '.join(ends)}.",
        tuple(series),
        note=said(len(y), window),
        sources=_links(source, "loss", "eval_loss"),
        marks=broken + ebroken,
        size="wide",
    )


def _listed(pair: Any) -> tuple[list[float], list[float]]:
    return pair[0].tolist(), pair[1].tolist()


def _curve(
    run: Run, source: Source, key: str, name: str, title: str, unit: str, rows: Any, file: str
) -> Plot | None:
    x, y, broken = split(*series_of(rows, key))
    if len(x) < 2:
        return None
    window = window_of(len(y))
    series = [
        Series("as logged", *_listed(envelope(x, y)), weight="faint" if window > 1 else "normal")
    ]
    if window > 1:
        series.append(Series("smoothed", *_listed(envelope(x, smoothed(y, window)))))
    return Plot(
        name,
        title,
        unit,
        f"{title} over steps, from {min(y):.4g} to {max(y):.4g} {unit}.",
        tuple(series),
        note=said(len(y), window),
        sources=_links(source, key, file=file),
        marks=broken,
        from_zero=True,
        size="half",
    )


def gradient_plot(run: Run, source: Source) -> Plot | None:
    """Gradient norm over steps."""
    return _curve(
        run, source, "grad_norm", "gradient_norm", "Gradient norm", "L2", run.rows, METRICS
    )


def speed_plot(run: Run, source: Source) -> Plot | None:
    """Tokens per second over steps, of single steps where their clock ran."""
    ticks = [
        {"step": r["step"], "speed": r["tokens"] / r["seconds"]}
        for r in run.steps
        if is_number(r.get("tokens")) and is_number(r.get("seconds")) and r["seconds"] > 0
    ]
    title, unit = "Speed", "tokens per second"
    if len(ticks) > 1:
        return _curve(run, source, "speed", "speed", title, unit, ticks, "steps.jsonl")
    return _curve(run, source, "tokens_per_s", "speed", title, unit, run.rows, METRICS)
