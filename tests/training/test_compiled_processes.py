"""Decoder layers compiled in two processes, as on several GPUs, as far as AOTAutograd."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.forked import ended, start_ranks
from tests.traced import traced
from tests.training.test_processes import SETTINGS, losses
from tests.training.test_sharded_checkpoints import SHARDED, sharded_on_cpus

pytestmark = pytest.mark.long

COMPILED = "precision.compile=on"
SHORT = ("train.max_steps=4", "precision.health_every=2", "train.per_device_train_batch_size=2")
AS_ON_GPUS = ("tiny_full_fp8", "precision.backend=torchao", "precision.scaling=tensorwise")


def traced_on_shards() -> None:
    """Compile without a code generator, for the rest of this process."""
    sharded_on_cpus()
    traced().__enter__()


def train(folder: Path, *words: str) -> Path:
    """The run folder of two processes."""
    before = set(folder.glob("runs/*/*"))
    words = (*words[:1], *SETTINGS, *SHORT, *words[1:])
    assert ended(start_ranks(folder, *words, processes=2, before=traced_on_shards)) == [0, 0], (
        "".join(f.read_text() for f in folder.glob("*.txt"))[-3000:]
    )
    (made,) = set(folder.glob("runs/*/*")) - before
    return made


def largest_weights(run: Path) -> list[dict[str, Any]]:
    """By group of layers, of each step that health observed."""
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    found = [{k: v for k, v in row.items() if k.endswith("/w_amax")} for row in rows]
    return [row for row in found if row]


@pytest.mark.parametrize(
    "recipe",
    [
        AS_ON_GPUS,
        (*AS_ON_GPUS, "precision.fp8_params=true"),
        ("tiny_lora_fp8",),
        ("tiny_lora_bf16", "model.storage=fp8"),
    ],
)
def test_compiled_layers_over_fsdp2_train_as_eager_ones(recipe, tmp_path) -> None:
    """With training health, which looks at weights outside their layer's forward.

    Of layers that stay compiled it found shards of FP8 codes beside whole scales: a traceback.
    """
    eager, compiled = (train(tmp_path, *recipe, SHARDED, *words) for words in ((), (COMPILED,)))
    receipt = json.loads((compiled / "receipt.json").read_text())
    assert receipt["status"] == "proven"
    assert receipt["precision"]["compile"].startswith("on: 4 decoder layers")
    assert "uncompiled" not in receipt["precision"]["compile"]
    assert losses(compiled) == pytest.approx(losses(eager), rel=0.01)
    seen, expected = largest_weights(compiled), largest_weights(eager)
    assert len(seen) == 2
    # Those of a layer whose forward is observed are gathered, in BF16; others are shards, which of
    # a base stored in FP8 are left out.
    near = [pytest.approx(row, rel=2**-8) for row in expected]
    if recipe is AS_ON_GPUS:
        assert seen == near
    for row, whole in zip(seen, expected, strict=True):
        assert row.keys() == whole.keys()
        assert all(row[key] <= whole[key] * (1 + 2**-8) for key in row)


def test_health_over_fsdp2_leaves_out_a_head_stored_in_fp8(tmp_path) -> None:
    """TRL multiplies by its weight inside the loss: only its shard of codes could be seen."""
    run = train(tmp_path, "tiny_lora_fp8", "precision.map={output: fp8}", SHARDED)
    rows = largest_weights(run)
    assert len(rows) == 2
    assert all("health/mlp/w_amax" in row and "health/head/w_amax" not in row for row in rows)
