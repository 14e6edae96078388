"""What a convergence sweep found: the noise band, the table, the plot.

A result is what `tests.benchmarks.convergence.train` returns: `settings`, `losses` of all steps,
`held_out` (None when the loss ceased to be finite) and `step_s`.
"""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

LAST = 50
"""Steps whose mean is the final training loss."""


def band_of(losses: list[float]) -> tuple[float, float]:
    """Mean of the BF16 losses, and the largest difference between two of them."""
    return fmean(losses), max((abs(a - b) for a, b in combinations(losses, 2)), default=0.0)


def verdict(loss: float | None, mean: float, width: float) -> str:
    """Where a held-out loss lies."""
    if loss is None:
        return "outside: diverged"
    if abs(loss - mean) <= width:
        return "inside"
    return f"outside: {'worse' if loss > mean else 'better'}"


def name_of(result: dict[str, Any]) -> str:
    """The recipe, with its seed where it is run from several."""
    recipe, seed = result["settings"]["recipe"], result["settings"]["seed"]
    return f"{recipe}, seed {seed}" if recipe == "bf16" else recipe


def table_of(results: list[dict[str, Any]]) -> str:
    """Markdown, one row a run. The BF16 runs come first in `results`.

    Raises:
        ValueError: BF16 itself has diverged, so there is nothing to measure against.
    """
    bf16 = [r for r in results if r["settings"]["recipe"] == "bf16"]
    if any(r["held_out"] is None for r in bf16):
        raise ValueError("the loss of a BF16 run is not finite: lower the learning rate")
    mean, width = band_of([r["held_out"] for r in bf16])
    same_seed, settings = bf16[0]["held_out"], bf16[0]["settings"]
    lines = [
        f"{settings['model']}, {settings['steps']} steps of {settings['batch']} x "
        f"{settings['length']} bytes. Noise band of {len(bf16)} BF16 seeds: held-out loss "
        f"{mean:.4f} ± {width:.4f} (± {width / mean:.2%})",
        "",
        "| recipe | training loss | held-out loss | gap to BF16 | to BF16 of the same seed "
        "| noise band | s a step |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in results:
        loss, held = f"{fmean(r['losses'][-LAST:] or [float('nan')]):.4f}", r["held_out"]
        if held is None:
            held_out = [f"not finite at step {len(r['losses']) + 1}", "", ""]
        else:
            held_out = [f"{held:.4f}", f"{held / mean - 1:+.2%}", f"{held / same_seed - 1:+.2%}"]
        cells = [name_of(r), loss, *held_out, verdict(held, mean, width), f"{r['step_s']:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def smoothed(losses: list[float], width: int = 25) -> list[float]:
    """Mean of the last `width` steps at each step."""
    return [fmean(losses[max(0, i + 1 - width) : i + 1]) for i in range(len(losses))]


def plot(results: list[dict[str, Any]], file: Path) -> None:
    """Above the training losses, below their distance to the first run, BF16 of the same seed.

    Both smoothed. The line of the other BF16 seed shows how far noise alone goes.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 9), layout="constrained")
    losses, gaps = figure.subplots(2, 1, sharex=True)
    first, settings = smoothed(results[0]["losses"]), results[0]["settings"]
    ends = [1.0]
    for index, result in enumerate(results):
        line = smoothed(result["losses"])
        steps = range(1, len(line) + 1)
        gap = [100 * (a / b - 1) for a, b in zip(line, first, strict=False)]
        ends += [abs(g) for g in gap[-1:]]
        noise = result["settings"]["recipe"] == "bf16"
        look: dict[str, Any] = {
            "color": ("#000000", "#888888")[index % 2] if noise else f"C{index % 10}",
            "linestyle": "--" if noise or index >= 10 else "-",
            "linewidth": 2.0 if noise else 1.2,
        }
        losses.plot(steps, line, label=name_of(result), **look)
        gaps.plot(steps, gap, **look)
    losses.set(ylabel="training loss, mean of 25 steps", yscale="log")
    losses.set_title(
        f"{settings['model']}, {settings['batch']} x {settings['length']} bytes a step"
    )
    gaps.set(xlabel="step", ylabel="gap to BF16 of the same seed, %")
    gaps.set_ylim(-1.5 * max(ends), 1.5 * max(ends))
    figure.legend(loc="outside right upper")
    figure.savefig(file, dpi=120)
