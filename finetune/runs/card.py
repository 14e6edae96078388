"""Model card of trained weights, filled from the run: what, from what, on what, in which precision.

Replaces the card that PEFT or TRL writes, most of whose fields say that more information is needed.
Names no path of the machine (`finetune.runs.names`).
"""

from __future__ import annotations

import math
from importlib.metadata import version
from typing import Any

from jinja2 import Environment, StrictUndefined

from finetune.config.paths import ASSETS
from finetune.config.schema import RunConfig
from finetune.runs.names import device_name, is_hub_id, long_name, method_name, short_name
from finetune.runs.receipt import Receipt

TARGETS = {
    "": "all weights, as trained",
    "adapter": "adapter, as trained",
    "merged": "adapter merged into the original weights",
    "fp8": "quantized to FP8 (W8A8, compressed-tensors)",
    "nvfp4": "quantized to NVFP4 (W4A4, compressed-tensors)",
}
"""Form of the weights -> its name on the card; the first is that of a full fine-tuning's run."""


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
    template = Environment(
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    template.filters["exp"] = math.exp
    text = (ASSETS / "model_card.md.j2").read_text(encoding="utf-8")
    base, data = config.model.name, config.data.label
    environment = receipt.get("environment", {})
    return template.from_string(text).render(
        adapter=adapter,
        title=f"{short_name(base)} on {short_name(data)}",
        base=long_name(base),
        base_id=base if is_hub_id(base) else "",
        conditions=receipt.get("conditions", {}),
        config=config,
        data=long_name(data),
        data_id=data if config.data.name and is_hub_id(data) else "",
        device=device_name(environment.get("device", {})) or "unknown",
        form=TARGETS[target or ("adapter" if adapter else "")],
        headline=Receipt.read(receipt).headline,
        method=method_name(config.lora and config.lora.r, config.model.storage),
        parity=parity,
        quantized=target in ("fp8", "nvfp4"),
        report=report,
        versions=environment.get("versions", {}),
        written_by=f"fp8-finetune {version('fp8-finetune')}",
    )
