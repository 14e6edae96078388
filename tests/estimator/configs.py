"""Configurations for tests of the estimator."""

from __future__ import annotations

from typing import Any

from finetune.config.schema import RunConfig


def changed(config: RunConfig, **sections: dict[str, Any] | None) -> RunConfig:
    """Copy a configuration with other values, validated.

    Args:
        **sections: section -> keys to set; None unsets a key, or removes a section.
    """
    data = config.model_dump()
    for name, values in sections.items():
        section = {**(data[name] or {}), **(values or {})}
        kept = {k: v for k, v in section.items() if v is not None or k not in (values or {})}
        data[name] = None if values is None else kept
    return RunConfig.model_validate(data)
