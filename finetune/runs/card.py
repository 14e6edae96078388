"""Model card of trained weights, and names that leave this machine, without paths of its disk.

The card replaces PEFT's or TRL's, most of whose fields say that more information is needed.
Cards, reports and receipts are shared, so a packaged model is named as recipes name it
(`builtin:tiny_llama`), and a folder of the user by its last parts.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from finetune import __version__
from finetune.config.methods import method_of
from finetune.config.paths import ASSETS
from finetune.config.schema import RunConfig
from finetune.config.sections import BUILTIN
from finetune.runs.progress import outcome
from finetune.runs.receipt import Receipt

TARGETS = {
    "": "all weights, as trained",
    "adapter": "adapter, as trained",
    "merged": "adapter merged into the original weights",
    "fp8": "quantized to FP8 (W8A8, compressed-tensors)",
    "nvfp4": "quantized to NVFP4 (W4A4, compressed-tensors)",
    "gguf": "merged, in BF16 (GGUF, for llama.cpp and Ollama)",
    "gguf-q8": "merged, in 8 bits (GGUF Q8_0, for llama.cpp and Ollama)",
}
"""Form of the weights -> its name on the card; the first is of a full fine-tuning's run."""


def model_card(
    config: RunConfig,
    receipt: dict[str, Any],
    report: dict[str, Any],
    *,
    target: str = "",
    parity: str = "",
) -> str:
    """The card as Markdown with the front matter that the hub reads.

    Args:
        target: one of `TARGETS`; left out, the run itself.
        parity: comparison of an export with the run's model.
    """
    template = Environment(
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    text = (ASSETS / "model_card.md.j2").read_text(encoding="utf-8")
    base, data = config.model.name, config.data.label
    environment = receipt.get("environment", {})
    target = target or ("adapter" if config.lora else "")
    trained = method_of(config.train)
    kind = f"{trained.name.upper()}, " if trained.name != "sft" else ""
    return template.from_string(text).render(
        adapter=target == "adapter",
        title=f"{short_name(base)} on {short_name(data)}",
        base=long_name(base),
        base_id=base if is_hub_id(base) else "",
        conditions=receipt.get("conditions", {}),
        config=config,
        data=long_name(data),
        data_id=data if config.data.name and is_hub_id(data) else "",
        device=device_name(environment.get("device") or {}) or "unknown",
        form=TARGETS[target],
        gguf=target.startswith("gguf"),
        headline=Receipt.read(receipt).headline,
        outcome=list(outcome(report, trained)),
        method=kind + method_name(config.lora and config.lora.r, config.model.storage),
        parity=parity,
        quantized=target in ("fp8", "nvfp4"),
        versions=environment.get("versions") or {},
        written_by=f"fp8-finetune {__version__}",
    )


# ------------------------------------------------------------------------------------------- names

_UNNAMED = re.compile(r"model|checkpoint-\d+")
"""Folders that say nothing without those above: `tiny_full_fp8/<run>/model`."""
_ABSOLUTE = re.compile(
    r"(?<![\w.:/\\~-])(?:~|[A-Za-z]:)?[/\\](?:[^\s/\\'\",;:]+[/\\])*([^\s/\\'\",;:]+)"
)


def recipe_name(name: str) -> str:
    """`builtin:tiny_llama` for a folder of the package; any other name unchanged."""
    path = Path(name)
    return f"{BUILTIN}{path.name}" if path.parent == ASSETS else name


def is_hub_id(name: str) -> bool:
    """True for `organization/model`, unless a folder of that name is here."""
    return bool(re.fullmatch(r"[\w.-]+/[\w.-]+", name)) and not Path(name).exists()


def short_name(name: str) -> str:
    """`tiny_llama`, `Qwen/Qwen3-8B`, `rows.jsonl`: a model or data set in a title."""
    name = recipe_name(name)
    if name.startswith(BUILTIN) or is_hub_id(name):
        return name.removeprefix(BUILTIN)
    parts = Path(name).parts
    return "/".join(parts[-3:] if _UNNAMED.fullmatch(parts[-1]) else parts[-1:]) if parts else name


def long_name(name: str) -> str:
    """The same, with where packaged ones come from."""
    packaged = recipe_name(name).startswith(BUILTIN)
    return short_name(name) + (" (packaged with fp8-finetune)" if packaged else "")


def without_paths(text: str) -> str:
    """A text in which absolute paths keep their last part: `/home/me/rows.jsonl`, `…/rows.jsonl`.

    Relative paths, addresses (`https://...`) and fractions (`tokens/s`) stay.
    """
    return _ABSOLUTE.sub(r"…/\1", text)


def method_name(rank: int | None, storage: str | None = None) -> str:
    """`full fine-tuning`, `LoRA rank 8`, or `QLoRA rank 8` over weights stored in NF4."""
    if rank is None:
        return "full fine-tuning"
    return f"{'QLoRA' if storage == 'nf4' else 'LoRA'} rank {rank}"


def device_name(device: dict[str, Any]) -> str:
    """`NVIDIA H100 80GB HBM3`, `CPU (x86_64)`: the device of a receipt."""
    name = str(device.get("name") or "")
    return f"CPU ({name})" if name and device.get("kind") == "cpu" else name
