"""Settings of an answer, checked before a model is looked for. No torch."""

from __future__ import annotations

from typing import Any

from finetune.errors import ConfigError


def generation(
    max_new_tokens: int | None, temperature: float, top_p: float | None, top_k: int | None,
    seed: int | None,
) -> dict[str, Any]:  # fmt: skip
    """Arguments of `generate`.

    Raises:
        ConfigError: a setting that changes nothing, or a temperature of no numbers.
    """
    drawing = {"top_p": top_p, "top_k": top_k}
    for name, value in {**drawing, "seed": seed}.items():
        if value is not None and not temperature:
            raise ConfigError(
                f"--{name.replace('_', '-')} would change nothing",
                where=name,
                why="without a temperature nothing is drawn",
                fix="--temperature 0.7, or leave it out",
            )
    if temperature and not 1e-6 <= temperature <= 1e6:
        raise ConfigError(
            f"nothing can be drawn at a temperature of {temperature:g}",
            where="temperature",
            why="scores divided by it are not finite, or all alike",
            fix="0 takes the most probable token, as the limit of small ones would; 0.7 is usual",
        )
    given = {"max_new_tokens": max_new_tokens, **drawing, "temperature": temperature or None}
    told = {name: value for name, value in given.items() if value is not None}
    return told | {"do_sample": temperature > 0}
