"""What upstream's FP8 does to a loss curve: traps 2, 3 and 5 beside ours and plain BF16.

    python -m tests.benchmarks.trap_curves [--seeds 42,43,44] [--steps 150] [--traps 2,3,5]

The same user script (`tests.benchmarks.trap_runs`), seed and order of data in all three arms of a
trap; each run is a process of its own, and one that finished before is read from its file. Prints
the tables, and draws `trap_curves.png`: training loss above; below what explains it, gradient norms
(what clipping sees, and what the optimizer uses).

What trap 3 wastes is the memory and the products of gradients that no optimizer reads, and what
clipping leaves. AdamW divides a constant factor out again, so its loss curve need not show it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

from tests.benchmarks.convergence import once
from tests.benchmarks.convergence_report import smoothed
from tests.benchmarks.trap_runs import ARMS, TRAPS

NAMES = {"upstream": "upstream FP8", "ours": "FP8 with the helper", "bf16": "BF16"}
COLOURS = {"upstream": "#c62828", "ours": "#1565c0", "bf16": "#333333"}
STYLES = {"upstream": "-", "ours": "-", "bf16": (0, (4, 2))}
Runs = dict[tuple[int, str, int], dict[str, Any]]
"""(trap, arm, seed) -> what `tests.benchmarks.trap_runs.run` returns."""


def train(settings: dict[str, Any]) -> dict[str, Any]:
    """One run in its own process. Raises `RuntimeError` with its last lines if it fails."""
    out = Path(settings["out"]).resolve()
    options = ("trap", "arm", "seed", "steps")
    argv = [sys.executable, "-m", "tests.benchmarks.trap_runs", "--out", str(out)]
    argv += [word for key in options for word in (f"--{key}", str(settings[key]))]
    done = subprocess.run(argv, capture_output=True, text=True, env=os.environ)
    if done.returncode:
        raise RuntimeError(f"{' '.join(argv)}\n{done.stderr[-3000:]}")
    return {"settings": settings} | json.loads(out.read_text(encoding="utf-8"))


# ------------------------------------------------------------------------------------------ tables


def losses_table(runs: Runs, traps: list[int], seeds: list[int]) -> str:
    """Markdown: a row for each trap and arm, held-out losses by seed."""
    shown = " / ".join(str(seed) for seed in seeds)
    lines = [
        f"| trap | arm | trainable that moved | training loss | held-out loss, seeds {shown} "
        "| the saved model, reloaded |",
        "|---|---|---|---|---|---|",
    ]
    for trap in traps:
        for arm in ARMS:
            of = [runs[trap, arm, seed] for seed in seeds]
            last = fmean(fmean(r["loss"][-25:]) for r in of)
            cells = [
                str(trap), NAMES[arm], f"{of[0]['moved']:,} of {of[0]['trainable']:,}",
                f"{last:.3f}", " / ".join(f"{r['held_out']:.3f}" for r in of), saved(of),
            ]  # fmt: skip
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def saved(of: list[dict[str, Any]]) -> str:
    """What became of the saved models."""
    if "not_saved" in of[0]:
        return f"cannot be saved: `{of[0]['not_saved'].partition(':')[0]}`"
    same = all(r["reloaded"] == r["held_out"] for r in of)
    text = "the same" if same else " / ".join(f"{r['reloaded']:.3f}" for r in of)
    if "tied_as_config_says" in of[0] and any(
        r["tied_as_config_says"] != r["reloaded"] for r in of
    ):
        tied = " / ".join(f"{r['tied_as_config_says']:.3f}" for r in of)
        text += f"; tied as its config.json says: {tied}"
    return text


def gradients_table(runs: Runs, traps: list[int], seeds: list[int]) -> str:
    """Markdown: norms before clipping, what clipping leaves, memory; means over steps and seeds."""
    lines = [
        "| trap | arm | want a gradient | norm that clipping sees | of what the optimizer uses "
        "| clipping multiplies by | gradients used, MiB | gradients wasted, MiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for trap in traps:
        for arm in ARMS:
            of = [runs[trap, arm, seed] for seed in seeds]
            mean = {
                key: fmean(fmean(r[key]) for r in of)
                for key in ("norm", "useful_norm", "left", "useful_mib", "wasted_mib")
            }
            cells = [
                str(trap), NAMES[arm], f"{of[0]['trainable_after']:,}", f"{mean['norm']:.2f}",
                f"{mean['useful_norm']:.2f}", f"{mean['left']:.2f}", f"{mean['useful_mib']:.2f}",
                f"{mean['wasted_mib']:.2f}",
            ]  # fmt: skip
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


# -------------------------------------------------------------------------------------------- plot


def plot(runs: Runs, traps: list[int], seeds: list[int], file: Path) -> None:
    """A column for each trap: loss above, gradient norms below; thin lines are further seeds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2 * len(traps), 7.4), layout="constrained", facecolor="white")
    axes = figure.subplots(2, len(traps), sharex=True, squeeze=False)
    for column, trap in enumerate(traps):
        losses, norms = axes[0, column], axes[1, column]
        ends: list[tuple[float, str, str]] = []
        for arm in ARMS:
            for number, seed in enumerate(seeds):
                run = runs[trap, arm, seed]
                first = number == 0
                look: dict[str, Any] = {"color": COLOURS[arm], "linestyle": STYLES[arm]}
                look |= {"linewidth": 2.0 if first else 0.8, "alpha": 1.0 if first else 0.4}
                line = smoothed(run["loss"], 10)
                losses.plot(line, **look)
                if first:
                    ends.append((line[-1], f"{line[-1]:.2f}  {NAMES[arm]}", COLOURS[arm]))
                    norms.plot(smoothed(run["norm"], 10), **look)
        label_ends(losses, ends, len(runs[trap, ARMS[0], seeds[0]]["loss"]))
        explain(norms, runs[trap, "upstream", seeds[0]])
        losses.set_title(TRAPS[trap].title, fontsize=11)
        norms.set_xlabel("step")
        norms.set_yscale("log")
        norms.yaxis.set_major_formatter("{x:g}")
        norms.yaxis.set_minor_formatter("")
        for axis in (losses, norms):
            axis.set_facecolor("white")
            axis.spines[["top", "right"]].set_visible(False)
            axis.grid(alpha=0.25)
    axes[0, 0].set_ylabel("training loss, mean of 10 steps")
    axes[1, 0].set_ylabel("gradient norm before clipping (at 1.0)")
    thin = f" Thin lines: seeds {', '.join(map(str, seeds[1:]))}." if len(seeds) > 1 else ""
    figure.suptitle(
        "One SFTTrainer script, three ways of asking for precision (packaged 1.4M Llama, CPU). "
        f"torchao is real; Transformer Engine's Python is, over a double of its kernels.{thin}",
        fontsize=11,
    )  # fmt: skip
    figure.savefig(file, dpi=100, facecolor="white")


def label_ends(axis: Any, ends: list[tuple[float, str, str]], steps: int) -> None:
    """Write each line's last value and name beside it, pushed apart where lines meet."""
    low, high = axis.get_ylim()
    gap, below = (high - low) * 0.055, float("-inf")
    axis.set_xlim(0, steps * 1.75)
    axis.set_xticks(range(0, steps + 1, 50))
    for value, text, colour in sorted(ends):
        below = max(value, below + gap)
        axis.text(steps * 1.03, below, text, color=colour, va="center", fontsize=9)


def explain(axis: Any, upstream: dict[str, Any]) -> None:
    """In upstream's norms, what the optimizer uses of them."""
    useful, seen = smoothed(upstream["useful_norm"], 10), smoothed(upstream["norm"], 10)
    axis.fill_between(range(len(seen)), useful, seen, color=COLOURS["upstream"], alpha=0.15)
    axis.plot(useful, color=COLOURS["upstream"], linestyle=":", linewidth=1.5)
    share = fmean(u / s for u, s in zip(upstream["useful_norm"], upstream["norm"], strict=True))
    text = "shaded: upstream's\ngradients that no\noptimizer uses\n"
    text += f"(used: {share:.0%} of\nthe norm, dotted)"
    axis.text(0.6, 0.97, text, transform=axis.transAxes, va="top", fontsize=9,
              color=COLOURS["upstream"])  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--traps", default="2,3,5")
    parser.add_argument("--seeds", default="42,43,44")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--out", type=Path, default=Path("runs/trap_curves"))
    args = parser.parse_args()
    traps = [int(trap) for trap in args.traps.split(",")]
    seeds = [int(seed) for seed in args.seeds.split(",")]
    if unknown := [trap for trap in traps if trap not in TRAPS]:
        parser.error(f"no trap {unknown[0]} here; there are {', '.join(map(str, TRAPS))}")
    args.out.mkdir(parents=True, exist_ok=True)
    runs: Runs = {}
    for seed in seeds:
        for trap in traps:
            for arm in ARMS:
                name = f"trap{trap}-{arm}-seed{seed}"
                settings = {"trap": trap, "arm": arm, "seed": seed, "steps": args.steps}
                settings["out"] = str(args.out / f"{name}.raw.json")
                runs[trap, arm, seed] = once(args.out / f"{name}.json", settings, train)
    tables = [losses_table(runs, traps, seeds), gradients_table(runs, traps, seeds)]
    (args.out / "trap_curves.md").write_text("\n\n".join(tables) + "\n", encoding="utf-8")
    plot(runs, traps, seeds, args.out / "trap_curves.png")
    print("\n" + "\n\n".join(tables) + f"\n\n{args.out / 'trap_curves.png'}")


if __name__ == "__main__":
    main()
