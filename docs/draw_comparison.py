"""Draw the picture of the README from a comparison: losses, and what the receipt says.

    python -m finetune compare tiny_full_fp8
    python docs/draw_comparison.py runs/compare/tiny_full_fp8-vs-tiny_full_bf16/TIME

It writes `docs/pages/pictures/fp8_over_bf16.svg`: training loss (lines, means over the seeds) and
evaluation loss (points) of both sides over steps, and figures of the comparison and the receipt.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from statistics import mean
from typing import Any

from finetune.precision.proof.row import changed_numbers

PICTURE = Path(__file__).parent / "pages" / "pictures" / "fp8_over_bf16.svg"
STYLE = (
    "<style>svg{color:#24292f;font-family:system-ui,sans-serif}"
    "@media(prefers-color-scheme:dark){svg{color:#d0d7de}}</style>"
)
COLORS = {"a": "#e07b39", "b": "#4c78dd"}
LEFT, RIGHT, TOP, BOTTOM = 32, 420, 16, 256
"""The plot in a drawing of 720 x 290."""


def curves(folder: Path, facts: dict[str, Any], side: str, key: str) -> dict[int, float]:
    """Step -> mean over the seeds of what the runs of a side logged under a key."""
    found: dict[int, list[float]] = {}
    for run in facts["runs"]:
        for line in (folder / run[side] / "metrics.jsonl").read_text().splitlines():
            row = json.loads(line)
            if key in row:
                found.setdefault(row["step"], []).append(row[key])
    return {step: mean(values) for step, values in sorted(found.items())}


def draw(folder: Path) -> str:
    """The SVG."""
    facts = json.loads((folder / "comparison.json").read_text())
    losses = {side: curves(folder, facts, side, "loss") for side in "ab"}
    evals = {side: curves(folder, facts, side, "eval_loss") for side in "ab"}
    values = [v for found in (*losses.values(), *evals.values()) for v in found.values()]
    low, high, last = math.log(min(values) * 0.9), math.log(max(values) * 1.05), max(losses["a"])

    def x(step: float) -> float:
        return round(LEFT + step / last * (RIGHT - LEFT), 1)

    def y(loss: float) -> float:
        return round(BOTTOM - (math.log(loss) - low) / (high - low) * (BOTTOM - TOP), 1)

    parts = []
    for tick in (0.5, 1, 2, 4, 8):
        if low < math.log(tick) < high:
            parts.append(
                f'<path d="M{LEFT} {y(tick)}H{RIGHT}" stroke="currentColor" stroke-opacity=".2"/>'
                + _text(LEFT - 8, y(tick) + 4, f"{tick:g}", "end", 12)
            )
    for tick in range(0, last + 1, 10):
        parts.append(_text(x(tick), BOTTOM + 18, str(tick), "middle", 12))
    parts.append(_text((LEFT + RIGHT) / 2, BOTTOM + 34, "step", "middle", 12))
    for side, dash in (("b", ""), ("a", ' stroke-dasharray="5 4"')):
        points = " ".join(f"{x(step)},{y(loss)}" for step, loss in losses[side].items())
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{COLORS[side]}" stroke-width="2"'
            f"{dash}/>"
        )
        radius, width = (5, 2) if side == "b" else (2.5, 2)
        parts += [
            f'<circle cx="{x(step)}" cy="{y(loss)}" r="{radius}" fill="none" '
            f'stroke="{COLORS[side]}" stroke-width="{width}"/>'
            for step, loss in evals[side].items()
        ]
    for n, side in enumerate("ab"):
        at = TOP + 16 + 20 * n
        dash = ' stroke-dasharray="5 4"' if side == "a" else ""
        parts.append(
            f'<path d="M276 {at - 4}H306" stroke="{COLORS[side]}" stroke-width="2"{dash}/>'
            + _text(314, at, facts[side]["label"], "start", 13)
        )
    parts.append(_text(276, TOP + 56, "lines: training loss", "start", 11))
    parts.append(_text(276, TOP + 72, "points: eval loss", "start", 11))
    parts += words(folder, facts)
    body = "\n".join(parts)
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 296" font-size="13" '
        f'fill="currentColor">\n{STYLE}\n{body}\n</svg>\n'
    )


def words(folder: Path, facts: dict[str, Any]) -> list[str]:
    """What stands on the right: the receipt of the first FP8 run, and the verdict."""
    receipt = json.loads((folder / facts["runs"][0]["a"] / "receipt.json").read_text())
    trainable, precision, loss = receipt["trainable"], receipt["precision"], facts["losses"]["eval"]
    low, high = loss["interval"]
    eval_a, eval_b = (mean(loss[side]) for side in "ab")
    rows = [
        ("From the receipt", ""),
        ("verified", f"{receipt['fp8_flop_share']:.1%} of FLOPs in FP8"),
        ("engine", f"{precision['backend']}, {precision['scaling']} scaling"),
        ("trainable", f"{trainable['before']:,} parameters"),
        ("changed", f"{changed_numbers(receipt['movement'])[0]:,} of them"),
        ("", ""),
        (f"FP8 against BF16, {len(facts['runs'])} seeds", ""),
        ("eval loss", f"{eval_a:.4f} and {eval_b:.4f}"),
        ("gap", f"{loss['gap']:+.2%} ({low:+.2%} to {high:+.2%})"),
        ("verdict", f"{loss['verdict']} within {facts['margin']:.0%}"),
    ]
    parts = []
    for n, (name, value) in enumerate(rows):
        at = TOP + 16 + 24 * n
        weight = ' font-weight="600"' if name and not value else ""
        parts.append(_text(450, at, name, "start", 13, weight))
        parts.append(_text(526, at, value, "start", 13))
    return parts


def _text(x: float, y: float, text: str, anchor: str, size: int, more: str = "") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-size="{size}"{more}>{text}</text>'


if __name__ == "__main__":
    PICTURE.write_text(draw(Path(sys.argv[1])), encoding="utf-8")
    print(PICTURE)
