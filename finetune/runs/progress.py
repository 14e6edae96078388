"""The rows of `metrics.jsonl` in words, as a run prints them itself and as `watch` does. No torch.

step 20/400 | epoch 0.05 | loss 3.4568 | ... | 0.31 s/step | 1,234 tok/s | 2 min left | FP8 ...
"""

from __future__ import annotations

from typing import Any

from finetune.config.methods import SHOWN, Method
from finetune.runs.folder import finite
from finetune.units import elapsed, percent

OPERANDS = {"x": "activations", "w": "weights", "g": "gradients"}
"""Operand of a GEMM, as keys of health rows name it -> what it holds."""


def log_line(row: dict[str, Any], step: str, method: Method, left: int | None = None) -> str:
    """A row of training or of an evaluation in a line; empty for a row of another kind.

    Args:
        step: how the line begins, such as `step 20/400`.
        left: steps until the end; None leaves speed and time left out, which a bar shows.
    """
    if "eval_loss" in row:
        loss = method.loss_in_words(row["eval_loss"])
        return " | ".join([f"{step} | eval loss {loss}", *shown_of(row, "eval_")])
    if "loss" not in row:
        return ""
    norm, pace = row.get("grad_norm", float("nan")), finite(row.get("step_seconds"))
    parts = [step, f"epoch {row.get('epoch', 0.0):.2f}", f"loss {row['loss']:.4f}"]
    parts += shown_of(row)
    parts += [f"grad_norm {norm:.3f}", f"lr {row.get('learning_rate', 0.0):.2e}"]
    parts += [f"{pace:.2f} s/step"] if pace is not None else []
    if left is not None:
        parts += [f"{row['tokens_per_s']:,} tok/s"] if "tokens_per_s" in row else []  # ORPO: none
        parts += [f"{elapsed(pace * left)} left"] if pace is not None else []
    return " | ".join([*parts, str(row.get("precision", ""))])


def shown_of(row: dict[str, Any], prefix: str = "") -> list[str]:
    """`rewards/margins 0.72`: what a method's own metrics say, beside a loss."""
    values = {key: finite(row.get(prefix + key)) for key in SHOWN}
    return [f"{key} {value:.3g}" for key, value in values.items() if value is not None]


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
        share, place = max(clipped)
        parts.append(f"clipped at most {percent(share)} ({place})" if share else "nothing clipped")
    if ratios := [value for value, _ in of("update_ratio")]:
        ends = dict.fromkeys(f"{end(ratios):.1g}" for end in (min, max))
        parts.append(f"updates {' to '.join(ends)} of the weights")
    return ", ".join(parts)
