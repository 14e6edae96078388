"""The rows of `metrics.jsonl` in words, as a run prints them itself and as `watch` does. No torch.

step 20/400 | epoch 0.05 | loss 3.4568 | ... | 0.31 s/step | 1,234 tok/s | 2 min left | FP8 ...

What a method is judged by (`finetune.config.methods`) is shown: of answers that are rewarded their
rewards, and no loss.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from finetune.config.measures import ends
from finetune.config.methods import SHOWN, Method
from finetune.logging import PIPE_WIDTH
from finetune.runs.folder import finite
from finetune.units import elapsed, percent

OPERANDS = {"x": "activations", "w": "weights", "g": "gradients"}
"""Operand of a GEMM, as keys of health rows name it -> what it holds."""


def log_line(
    row: dict[str, Any], step: str, method: Method, left: int | None = None, width: int = PIPE_WIDTH
) -> str:
    """A row of training or of an evaluation in a line; empty for a row of another kind.

    Args:
        step: how the line begins, such as `step 20/400`.
        left: steps until the end; None leaves speed and time left out, which a bar shows.
        width: columns of the line: what matters less is left out where they are few.
    """
    if "eval_loss" in row:
        return _fitted([(0, step), *((1, text) for text in shown_of(row, method, "eval_"))], width)
    if "loss" not in row:
        return ""
    norm, seconds = row.get("grad_norm", float("nan")), finite(row.get("step_seconds"))
    # A part's number is how soon it leaves a narrow terminal: the highest goes first, 0 never.
    parts = [(0, step), (8, f"epoch {row.get('epoch', 0.0):.2f}")]
    parts += [(3 if number else 1, text) for number, text in enumerate(shown_of(row, method))]
    parts += [(6, f"grad_norm {norm:.3f}"), (7, f"lr {row.get('learning_rate', 0.0):.2e}")]
    parts += [(9, f"{seconds:.2f} s/step")] if seconds is not None else []
    if left is not None:
        parts += [(4, f"{row['tokens_per_s']:,} tok/s")] if "tokens_per_s" in row else []  # ORPO
        parts += [(2, f"{elapsed(seconds * left)} left")] if seconds is not None else []
    return _fitted([*parts, (5, str(row.get("precision", "")))], width)


def _fitted(parts: list[tuple[int, str]], width: int) -> str:
    """Parts in a line; while it is too long, the one of the highest number is left out."""
    while len(line := " | ".join(text for _, text in parts)) > width and len(parts) > 1:
        parts.remove(max(parts))
    return line


def shown_of(row: dict[str, Any], method: Method, prefix: str = "") -> list[str]:
    """`loss 0.6931`, `rewards/margins 0.72`: what a method is judged by, and its own metrics."""
    texts = list[str]()
    if "loss" in method.columns:
        loss = row[f"{prefix}loss"]
        texts += [f"loss {method.loss_in_words(loss) if prefix else format(loss, '.4f')}"]
    values = {key: finite(row.get(prefix + key)) for key in SHOWN}
    texts += [f"{SHOWN[k][0]} {x:{SHOWN[k][1]}}" for k, x in values.items() if x is not None]
    return [f"eval {texts[0]}", *texts[1:]] if prefix and texts else texts


def figures(rows: Sequence[dict[str, Any]], method: Method) -> dict[str, tuple[float, float]]:
    """Where each metric besides a loss begins and ends; first what the method is judged by."""
    # Losses have fields of their own in the report, `first_loss` and `final_loss`.
    every = {key: ends(key, rows) for key in (*method.columns, *SHOWN) if key[-4:] != "loss"}
    return {key: (fmean(first), fmean(last)) for key, (first, last) in every.items() if last}


def outcome(report: Mapping[str, Any], method: Method) -> Iterator[tuple[str, str]]:
    """Name and value of each figure of a `report.json`: `loss` and `5.551 -> 0.700`."""
    if "loss" in method.columns:
        if (last := report.get("final_loss")) is not None:
            yield "loss", _way(report.get("first_loss"), last, ".3f")
        if (loss := report.get("eval_loss")) is not None:
            yield "eval loss", method.loss_in_words(loss)
    for key, (first, last) in (report.get("own") or {}).items():
        name, form = named(key)
        yield name, _way(first, last, form)


def named(key: str) -> tuple[str, str]:
    """Name of a loss, of a column of `SHOWN` or of its evaluation, and the form of its values."""
    kind = key.removeprefix("eval_")
    name, form = SHOWN.get(kind, (kind, ".4f"))
    return ("eval " if kind != key else "") + name, form


def _way(first: float | None, last: float, form: str) -> str:
    began, ended = format(last if first is None else first, form), format(last, form)
    # What is alike in the digits shown is said once: an arrow between equal figures reads as a
    # fault.
    return ended if began == ended else f"{began} -> {ended}"


def health_line(row: dict[str, Any]) -> str:
    """The worst of a health row; empty if it is none.

    `least signal over noise 17 dB (mlp gradients), clipped at most 0.1% (attn gradients), updates
    0.0003 to 0.001 of the weights`
    """

    def of(end: str) -> list[tuple[float, str]]:
        """Values of keys with an end, as `health/mlp/g_snr_db` has one, and where they are from."""
        found = list[tuple[float, str]]()
        for key, value in row.items():
            if key.startswith("health/") and key.endswith(end) and finite(value) is not None:
                _, group, measure = key.split("/")
                found.append((value, f"{group} {OPERANDS.get(measure[0], '')}"))
        return found

    parts = list[str]()
    if noise := of("snr_db"):
        parts.append("least signal over noise {:.0f} dB ({})".format(*min(noise)))
    if clipped := of("overflow"):
        share, where = max(clipped)
        parts.append(f"clipped at most {percent(share)} ({where})" if share else "nothing clipped")
    if ratios := [value for value, _ in of("update_ratio")]:
        ends = dict.fromkeys(f"{end(ratios):.1g}" for end in (min, max))
        parts.append(f"updates {' to '.join(ends)} of the weights")
    return ", ".join(parts)
