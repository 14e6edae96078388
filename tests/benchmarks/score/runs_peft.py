"""Jobs of PEFT's comparison of methods on MetaMathQA (`method_comparison`)."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tests.benchmarks.score.job import Job
from tests.benchmarks.score.mapping import UnmappedError, shape_name, sizes
from tests.benchmarks.score.rows import Row
from tests.benchmarks.score.stacks import torch_version, workspace_of

LONGEST_METAMATH_BATCH = 709
"""Tokens of the longest padded batch of PEFT's MetaMathQA runs, one number for all methods.

It is not published: rows are cut at 768 tokens, texts over 1300 characters are left out and 20,000
of them pass. It was inferred from developed-on rows, as the length at which the traces of most
methods reserve what was measured; so these rows test what a method adds, and not the length."""

_TARGETS = {
    "qv": ("q_proj", "v_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
    "all": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
}


@cache
def _experiments() -> dict[str, dict[str, Any]]:
    path = Path(__file__).with_name("peft_experiments.yaml")
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def peft_job(row: Row) -> Job:
    """`method_comparison/MetaMathQA/run.py`: no autocast, `outputs` kept from step to step, batches
    sorted from long to short and the cache emptied before each bucket, so that the longest batch
    meets an empty cache."""
    name = row.notes.split(";")[0].strip()
    found = _experiments().get(name)
    if found is None:
        raise UnmappedError(f"the adapter's configuration of {name!r} is not known")
    options = dict(found)
    config = options.pop("class", "")
    targets = options.pop("t", "")
    blocks = options.pop("bdlora", 0)
    if targets:
        options["target_modules"] = _TARGETS[targets]
    if config:
        options["config_class"] = f"{config}Config"
    if blocks:
        raise UnmappedError("BD-LoRA's blocks are not modelled")
    batch, _ = sizes(row)
    said = re.search(r"trainable=(\d+)", row.notes)
    return Job(
        shape=shape_name(row),
        batch=batch,
        length=LONGEST_METAMATH_BATCH,
        adapter=config and row.method,
        adapter_options=tuple((k, _frozen(v)) for k, v in options.items()),
        attention="masked",
        loss="transformers-5",
        outputs_held=True,
        input_grads=False,
        optimizer="adamw-foreach",
        workspace=workspace_of(row.gpu, torch_version(row.framework)),
        trainable=int(said[1]) if said else 0,
    )


def _frozen(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(value)
    return tuple(value.items()) if isinstance(value, dict) else value
