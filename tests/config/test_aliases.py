"""Names that people bring from other tools: each error says what to write, and that works."""

from __future__ import annotations

import doctest
from typing import Any

import pytest

from finetune import setup_fp8_mixed_precision_training
from finetune.config import aliases
from finetune.config.recipe import load_recipe
from finetune.errors import ConfigError, UnknownArgumentError

FIRST_VALUES = {
    "fp8_format": "hybrid",
    "fp8_margin": 1,
    "fp8_amax_history_len": 16,
    "fp8_amax_compute_algo": "most_recent",
    "fp8_recipe": "delayed",
    "mixed_precision": "fp8",
    "torch_dtype": "bfloat16",
    "attn_implementation": "sdpa",
    "model_name_or_path": "builtin:tiny_llama",
    "dataset_name": "builtin:harbour",
    "use_gradient_checkpointing": "true",
    "max_seq_length": 64,
    "max_seq_len": 64,
    "lora_r": 4,
    "lora_alpha": 8,
    "lora_dropout": 0.1,
    "lora_target_modules": "all-linear",
    "lr": 1e-4,
    **dict.fromkeys(("epochs", "num_epochs", "batch_size", "micro_batch_size"), 2),
    "seq_len": 64,
}
SECTION_OF = {name: setting.partition(".")[0] for name, setting in aliases.SETTINGS.items()}


def test_the_examples() -> None:
    assert doctest.testmod(aliases).failed == 0


@pytest.mark.parametrize("name", aliases.SETTINGS)
def test_what_the_error_says_to_write_is_accepted(name, tried) -> None:
    value = FIRST_VALUES.get(name, "true")
    recipe = "tiny_lora_bf16" if name.startswith("load_in") else "tiny_full_fp8"
    recipe = "tiny_lora_fp8" if name.startswith("lora") else recipe
    for key in (name, f"{SECTION_OF[name]}.{name}"):
        with pytest.raises(ConfigError) as caught:
            load_recipe(recipe, [f"{key}={value}"])
        assert caught.value.fix.startswith("write ")
        load_recipe(recipe, [caught.value.fix.removeprefix("write ")])
        tried(f"{key}={value}", caught.value, caught.value.fix.removeprefix("write "))


@pytest.mark.parametrize("name", aliases.DROPPED)
def test_what_nothing_says_here_is_to_be_left_out(name) -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe("tiny_full_fp8", [f"precision.{name}=1"])
    assert caught.value.fix.startswith("leave it out: ")
    made: Any = 1
    with pytest.raises(UnknownArgumentError, match="leave it out: "):
        setup_fp8_mixed_precision_training("emulated", cpu=True, **{name: made})


def test_a_dtype_of_torch_as_a_value() -> None:
    with pytest.raises(ConfigError, match="write bfloat16"):
        load_recipe("tiny_full_fp8", ["model.dtype=torch.bfloat16"])
    with pytest.raises(ConfigError, match="one of float32, bfloat16"):
        load_recipe("tiny_full_fp8", ["model.dtype=torch.float64"])


@pytest.mark.parametrize(
    "name", ["fp8_hybrid", "fp8_e4m3", "fp8_margin", "fp8_amax_history_len", "format", "eval"]
)
def test_in_a_script_the_argument_that_it_names_is_accepted(name) -> None:
    value: Any = {"format": "hybrid", "eval": "fp8"}.get(name) or FIRST_VALUES.get(name, True)
    with pytest.raises(UnknownArgumentError) as caught:
        setup_fp8_mixed_precision_training("emulated", scaling="delayed", cpu=True, **{name: value})
    key, _, shown = caught.value.fix.removeprefix("write ").partition("=")
    accepted: dict[str, Any] = {key: shown.strip("'") if shown.startswith("'") else int(shown)}
    setup_fp8_mixed_precision_training("emulated", scaling="delayed", cpu=True, **accepted)


def test_what_is_no_matter_of_compute_is_named_as_such() -> None:
    with pytest.raises(UnknownArgumentError, match=r"in a recipe it is model\.storage=nf4"):
        setup_fp8_mixed_precision_training("emulated", load_in_4bit=True)
