"""Presets of `cp`: each of every shipped recipe is a recipe, trains the same, and says itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from finetune import load_recipe
from finetune.config.paths import list_recipes
from finetune.config.yaml import parse_yaml, with_values
from finetune.estimator.changes import rows_of
from finetune.estimator.presets import PRESETS
from finetune.training.run.preflight import check_sharding
from tests.conftest import slow_but


def rows(config) -> int:
    """Rows of a step."""
    each, times = rows_of(config)
    return each * times


def computes(preset: str, before) -> str:
    """What a recipe multiplies in under a preset."""
    if preset == "debug" and before.model.storage is None:
        return "fp32"
    return "bf16" if preset in ("bf16", "no-fp8") else before.precision.compute


@pytest.mark.parametrize(
    "preset",
    [
        *slow_but(["fastest"], ["fastest", "least-memory"]),
        *slow_but(
            [], [x for x in PRESETS if x not in ("fastest", "least-memory")], pytest.mark.long
        ),
    ],
)
def test_every_recipe_with_a_preset_is_a_recipe_that_trains_the_same_batch(cli, preset):
    for name in list_recipes():
        done = cli("cp", name, "mine", "--force", "--preset", preset)
        assert done.code == 0, done.err
        before, found = load_recipe(name).config, load_recipe("mine.yaml").config
        check_sharding(found)
        assert rows(found) == rows(before)
        assert (found.model.name, found.lora, found.data.label) == (
            *(before.model.name, before.lora, before.data.label),
        )
        assert found.precision.compute == computes(preset, before)
        text = Path("mine.yaml").read_text("utf-8")
        assert text.startswith(f"# Preset {preset} of {name}:\n")
        assert "# yaml-language-server" in text  # comments of the recipe survive
        again = cli("cp", "./mine.yaml", "again", "--force", "--preset", preset)
        assert "nothing to change" in again.out


def test_without_fp8_a_recipe_is_its_bf16_twin(cli):
    pairs = [name for name in list_recipes() if name.endswith("_fp8")]
    for name in pairs:
        cli("cp", name, "mine", "--force", "--preset", "bf16")
        twin = load_recipe(name.removesuffix("fp8") + "bf16").config
        assert load_recipe("mine.yaml").config == twin
    assert len(pairs) > 10


def test_the_guides_presets_are_bf16_with_8_bit_adamw_and_fp32(cli):
    """`USE_FP8=False, USE_4BIT_OPTIMIZER=True`, and float32 with plain AdamW."""
    for recipe in ("gpt2_350m_full_fp8", "gpt2_350m_full_bf16"):
        assert cli("cp", recipe, "mine", "--force", "--preset", "no-fp8").code == 0
        found = load_recipe("mine.yaml").config
        assert (found.precision.compute, found.train["optim"]) == ("bf16", "adamw_torch_8bit")
    assert cli("cp", "llama_8b_full_fp8", "mine", "--force", "--preset", "debug").code == 0
    found = load_recipe("mine.yaml").config
    assert (found.precision.compute, found.model.dtype) == ("fp32", "float32")
    assert found.train["optim"] == "adamw_torch"
    assert found.train["max_steps"] == 10


def test_a_preset_is_found_by_what_people_guess_and_needs_no_destination(cli):
    assert cli("cp", "tiny_lora_fp8", "--preset", "Low_Memory").code == 0
    found = load_recipe("tiny_lora_fp8-least-memory.yaml").config
    assert found.train["gradient_checkpointing"] is True
    assert rows_of(found) == (1, 8)
    wrong = cli("cp", "tiny_lora_fp8", "--preset", "fastst")
    assert wrong.code == 2
    assert "did you mean 'fastest'?" in wrong.err


@pytest.mark.parametrize(
    "text", ["a:\n  b: 1 # why\n\n# c\nd:\n  e: 2\n", "{a: {b: 1}, d: {e: 2}}"]
)
def test_values_are_written_whatever_the_form_of_the_file(text):
    data = {"a": {**parse_yaml(text, "")[0]["a"], "new": "no"}, "d": {"e": [3, "4"]}}
    found = with_values(text, data)
    assert parse_yaml(found, "")[0] == {"a": {"b": "1", "new": "no"}, "d": {"e": ["3", "4"]}}
    assert ("# why" in found and "# c" in found) == text.startswith("a")


@pytest.mark.parametrize("empty", ["d: {}\n", "d:\n", ""])
def test_a_section_that_was_empty_or_missing_takes_no_comment_with_it(empty):
    text = f"# top\na:\n  b: 1 # why\n{empty}"
    found = with_values(text, {**parse_yaml(text, "")[0], "d": {"e": 2}})
    assert parse_yaml(found, "")[0] == {"a": {"b": "1"}, "d": {"e": "2"}}
    assert "# top" in found
    assert "# why" in found
