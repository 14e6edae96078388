"""Model card of trained weights, filled from the run: what, from what, on what, in which precision.

Replaces the card that PEFT or TRL writes, most of whose fields say that more information is needed.
Names no path of the machine: a base in a folder is named by the folder's last part.
"""

from __future__ import annotations

import re
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from finetune.config.paths import ASSETS
from finetune.config.schema import RunConfig
from finetune.runs.receipt import Receipt

TARGETS = {
    "": "as trained",
    "adapter": "adapter, as trained",
    "merged": "adapter merged into the original weights",
    "fp8": "quantized to FP8 (W8A8, compressed-tensors)",
    "nvfp4": "quantized to NVFP4 (W4A4, compressed-tensors)",
}
"""Form of the weights -> its name on the card; the first is that of a run folder."""


FIELDS = {field.name for field in fields(Receipt)}


def model_card(
    config: RunConfig,
    receipt: dict[str, Any],
    report: dict[str, Any],
    *,
    adapter: bool,
    target: str = "",
    parity: str = "",
) -> str:
    """The card as Markdown with the front matter that the hub reads.

    Args:
        config: configuration of the run.
        receipt: the run's receipt, as data.
        report: the run's report, as data.
        adapter: True if the folder holds an adapter, False if it holds all weights.
        target: one of `TARGETS`.
        parity: comparison of an export with the run's model.
    """
    template = Environment(undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    text = (ASSETS / "model_card.md.j2").read_text(encoding="utf-8")
    name = config.model.name
    device = receipt.get("environment", {}).get("device", {})
    return template.from_string(text).render(
        adapter=adapter,
        base=shown_name(name),
        base_id=name if is_hub_id(name) else "",
        conditions=receipt.get("conditions", {}),
        config=config,
        data=shown_name(str(config.data.path or config.data.name or "")),
        device=device.get("name", "unknown"),
        form=TARGETS[target],
        headline=Receipt(**{k: v for k, v in receipt.items() if k in FIELDS}).headline,
        method="full fine-tuning" if config.lora is None else f"LoRA, rank {config.lora.r}",
        parity=parity,
        report=report,
        versions=receipt.get("environment", {}).get("versions", {}),
        written_by=f"fp8-finetune {version('fp8-finetune')}",
    )


def is_hub_id(name: str) -> bool:
    """True for `organization/model`, unless a folder of that name is here."""
    return bool(re.fullmatch(r"[\w.-]+/[\w.-]+", name)) and not Path(name).exists()


def shown_name(name: str) -> str:
    """A model or data set without the path of this machine."""
    if name.startswith("builtin:"):
        return f"{name.removeprefix('builtin:')} (packaged with fp8-finetune)"
    return name if is_hub_id(name) else Path(name).name
