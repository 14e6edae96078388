"""Plots of reports: what is drawn of a series, ticks, colors, and the size of a long run's page."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

import finetune
from finetune.analysis.report.curves import (
    curve,
    envelope,
    health,
    loss_plots,
    smoothed,
    speed_plots,
    window_of,
)
from finetune.analysis.report.elements import Line, Plot, PlotRow, Series
from finetune.analysis.report.figures import (
    DARK,
    LIGHT,
    draw_plot,
    drawn,
    log_locator,
    save_picture,
    style,
    svgs,
)
from finetune.analysis.report.run_source import RunSource
from tests.run_folders import GROUPS, make_run


@pytest.fixture(scope="module")
def run(made_once):
    return made_once("run to plot", lambda folder: make_run(folder / "r"))


@pytest.mark.parametrize(("low", "high"), [(0.001, 0.0052), (1e-8, 1e-3), (0.0001, 0.0009)])
@pytest.mark.parametrize("log", [False, True])
def test_the_figures_of_an_axis_are_told_apart(low, high, log):
    """Thinning the drawing's coordinates leaves its text alone, and no two ticks read the same."""
    series = Series("one", np.arange(20.0).tolist(), np.geomspace(low, high, 20).tolist())
    svg = svgs(Plot("p", "Plot", "", "a plot", (series,), log=log))["any"]
    ticks = re.findall(r'<g id="p-ytick_\d+">.*?<text[^>]*>([^<]*)</text>', svg, flags=re.S)
    assert 2 <= len(ticks) <= 9
    assert len(set(ticks)) == len(ticks), ticks


@pytest.mark.parametrize(
    ("points", "most", "ticks"),
    [
        (range(0, 51, 5), 9, [0, 10, 20, 30, 40, 50]),
        (range(5, 51, 5), 9, [10, 20, 30, 40, 50]),
        (range(25, 1001, 25), 9, [200, 400, 600, 800, 1000]),
        (range(1, 4), 9, [1, 2, 3]),
        (range(1, 10_001), 4, [0, 5000, 10_000]),
        ([1, 2], 9, [1, 2]),
    ],
)
def test_ticks_of_steps_are_whole_and_round(points, most, ticks):
    plot = Plot("p", "Plot", "", "", (Series("one", list(points), [1.0] * len(points)),))
    axes = Figure().add_subplot()
    draw_plot(axes, plot, most)
    low, high = axes.get_xlim()
    assert [tick for tick in axes.get_xticks() if low <= tick <= high] == ticks


@pytest.mark.parametrize(
    ("width", "ticks"), [(310, range(0, 10_001, 5000)), (860, range(0, 10_001, 2000))]
)
def test_a_wide_drawing_has_more_figures_than_a_narrow_one(width, ticks):
    plot = Plot("p", "Plot", "", "", (Series("one", list(range(1, 10_001)), [1.0] * 10_000),))
    (axes,) = drawn(plot, width, 215).axes
    low, high = axes.get_xlim()
    assert [tick for tick in axes.get_xticks() if low <= tick <= high] == list(ticks)


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (1.3, 5.5, [1.5, 2, 3, 5]),
        (0.4, 6, [0.5, 1, 2, 5]),
        (0.9, 1200, [1, 10, 100, 1000]),
        (1e-12, 1, [1e-12, 1e-10, 1e-8, 1e-6, 1e-4, 1e-2, 1]),
        (2.05, 2.4, [2.05, 2.1, 2.15, 2.2, 2.25, 2.3, 2.35, 2.4]),
    ],
)
def test_a_logarithmic_axis_has_readable_ticks(low, high, ticks):
    found = log_locator(low, high).tick_values(low, high)
    assert [tick for tick in found if low <= tick <= high] == pytest.approx(ticks)


def test_losses_over_steps_and_time_and_the_learning_rate(run):
    rows = loss_plots([RunSource(run, run)]) + speed_plots([RunSource(run, run)])
    plots = {plot.name: plot for row in rows for plot in row.plots}
    assert list(plots) == ["loss", "loss_over_time", "gradient_norm", "learning_rate", "speed"]
    labels = ["training, as logged", "training, smoothed", "eval"]
    assert [series.label for series in plots["loss"].legend] == labels
    assert plots["loss_over_time"].over == "seconds"
    assert max(plots["loss_over_time"].series[0].x) == pytest.approx(32)  # 80 steps of 0.4 s
    (rate,) = plots["learning_rate"].series  # a schedule has no noise to smooth
    assert rate.weight == "normal"


def test_below_three_values_numbers_are_said_and_nothing_is_drawn(tmp_path):
    run = make_run(tmp_path / "r", steps=4, every=2, groups=())  # eval and samples at each step
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    few = [row for row in rows if row["step"] % 2 == 0]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in few))
    (row,) = loss_plots([RunSource(run, run)])
    assert row.plots == ()
    loss, held = ([r[key] for r in few if key in r] for key in ("loss", "eval_loss"))
    assert row.said[0].text == (
        f"Training and eval loss: training {loss[0]:.4g} at step 2; training {loss[1]:.4g} at "
        f"step 4; eval {held[0]:.4g} at step 2; eval {held[1]:.4g} at step 4."
    )
    report = finetune.report(run)
    assert report.pictures == ()
    page = report.html.read_text("utf-8")
    assert "<figure" not in page
    assert "Learning rate: " in page


def test_health_is_drawn_by_group_and_what_is_always_zero_is_a_sentence(run):
    parts = health(RunSource(run, run))
    plots = {plot.name: plot for part in parts if isinstance(part, PlotRow) for plot in part.plots}
    assert [series.label for series in plots["snr_weights"].series] == ["attn", "embed", "mlp"]
    assert "overflow_gradients" in plots
    assert "overflow_weights" not in plots
    (line,) = [part.text for part in parts if isinstance(part, Line)]
    assert line == "Activations and weights: no overflow at all."


def test_a_thinned_series_keeps_every_extreme():
    rng = np.random.default_rng(0)
    x, y = np.arange(10_000.0), rng.normal(size=10_000)
    y[1234], y[7001] = 50, -50
    tx, ty = envelope(x, y, 300)
    assert len(ty) <= 602
    assert (ty.max(), ty.min()) == (50, -50)
    assert (tx[0], tx[-1]) == (0, 9999)
    assert all(y[int(step)] == value for step, value in zip(tx, ty, strict=True))
    for part in np.array_split(np.arange(10_000), 300):
        inside = ty[(tx >= part[0]) & (tx <= part[-1])]
        assert (inside.min(), inside.max()) == (y[part].min(), y[part].max())


def test_smoothing_is_a_mean_and_splitting_tells_what_is_not_finite():
    y = np.arange(200.0)
    assert window_of(200) == 5
    assert smoothed(y, 5)[2:-2] == pytest.approx(y[2:-2])
    assert smoothed(y, 1) is y
    values = (1.0, math.nan, math.inf)
    x, finite, broken = curve([{"step": i, "loss": v} for i, v in enumerate(values)], "loss")
    assert (x.tolist(), finite.tolist(), broken) == ([0.0], [1.0], (1.0, 2.0))


def contrast(one: Sequence[int], other: Sequence[int]) -> float:
    """Of two RGB colours, after WCAG 2.2."""

    def luminance(rgb: Sequence[int]) -> float:
        parts = [c / 255 for c in rgb]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_colours_are_readable_in_both_themes(theme):
    rgb = {name: bytes.fromhex(colour[1:]) for name, colour in theme.items()}
    for name in ("ink", "muted", "accent", "bad"):
        assert contrast(rgb[name], rgb["paper"]) >= 4.5, name
    for name in (f"c{i}" for i in range(1, 9)):
        assert contrast(rgb[name], rgb["paper"]) >= 3, name
    assert LIGHT.keys() == DARK.keys()
    assert len(set(LIGHT.values())) == len(LIGHT), "a colour stands for one variable"


def test_forty_series_look_different():
    assert len({style(i) for i in range(40)}) == 40


def test_a_picture_has_room_for_its_legend(tmp_path):
    def height(count: int) -> int:
        lines = tuple(Series(f"run {i}", [0.0, 1.0], [0.0, float(i)]) for i in range(count))
        save_picture(Plot("p", "Plot", "", "a plot", lines, size="wide"), tmp_path / "p.png")
        with Image.open(tmp_path / "p.png") as picture:
            return picture.height

    assert height(200) > height(1) + 18 * 200 / 4


@pytest.mark.long
@pytest.mark.slow  # draws 10,000 steps of 24 health curves
def test_ten_thousand_steps_make_less_than_two_megabytes(tmp_path):
    report = finetune.report(make_run(tmp_path / "long", steps=10_000, groups=GROUPS))
    assert report.html.stat().st_size < 1_000_000
    assert "10,000 points drawn as the lowest and highest of every 67" in report.html.read_text()
