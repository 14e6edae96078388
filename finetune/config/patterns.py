"""Patterns over dotted names, as in `precision.keep`, `model.freeze` and `lora.exclude_modules`."""

from __future__ import annotations

import fnmatch


def matches(pattern: str, name: str) -> bool:
    """True if a pattern names this module: the whole name, or any run of its parts.

    `layers.0` names `model.layers.0.mlp.up_proj`, and so do `mlp`, `*_proj` and `layers.0.mlp`.
    """
    if fnmatch.fnmatchcase(name, pattern):
        return True
    parts = name.split(".")
    width = pattern.count(".") + 1
    return any(
        fnmatch.fnmatchcase(".".join(parts[i : i + width]), pattern)
        for i in range(len(parts) - width + 1)
    )
