"""`assets/speeds.json`, which `ls` shows, is what the estimator says today."""

from __future__ import annotations

import json

import pytest

from finetune.config.lookup import list_recipes
from tests.asset_makers.make_speeds import FILE, GPUS, speeds


def test_it_names_recipes_that_there_are() -> None:
    table = json.loads(FILE.read_text())
    assert set(table) == set(GPUS)
    assert {name for row in table.values() for name in row} <= set(list_recipes())
    assert {"llama_8b_lora_fp8", "llama_8b_full_fp8", "llama_1b_full_bf16"} <= set(table["H100"])


@pytest.mark.slow
def test_it_is_fresh() -> None:
    table, recipe = json.loads(FILE.read_text()), "llama_1b_lora_fp8"
    stored = {gpu: row[recipe] for gpu, row in table.items() if recipe in row}
    assert stored == pytest.approx(speeds(recipe), rel=0.02)
