"""Files of a model that do not go together, through the command line."""

from __future__ import annotations

import json
import os
import shutil
from importlib.util import find_spec

import pytest

from finetune.config.paths import TINY_LLAMA

SHORT = [
    "train.max_steps=1", "data.max_rows=12", "data.eval_fraction=0", "train.eval_strategy=no",
    "eval.samples=false", "train.warmup_steps=0",
]  # fmt: skip


@pytest.fixture
def model(tmp_path):
    """A function that copies the packaged model, with other values in one of its files."""

    def make(file: str, **changed: object) -> str:
        home = tmp_path / "model"
        shutil.copytree(TINY_LLAMA, home)
        path = home / file
        before = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(before | changed))
        return f"model.name={home}"

    return make


@pytest.mark.skipif(find_spec("flash_attn") is not None, reason="it is installed here")
def test_a_package_that_attention_lacks_is_no_damaged_folder(cli, model) -> None:
    asked = (model("config.json"), "model.attention=flash_attention_2", *SHORT)
    found = cli("tiny_full_bf16", *asked)
    assert found.code == 2
    assert "~model.attention takes what is here" in " ".join(found.err.split())
    assert "copy the folder" not in found.err


def test_weights_that_the_configuration_has_no_place_for_are_an_error(cli, model) -> None:
    found = cli("tiny_full_bf16", model("config.json", num_hidden_layers=2), *SHORT)
    assert found.code == 2
    assert "has 18 weights without a place in it" in found.err
    assert "model.layers.2.input_layernorm.weight" in found.err


@pytest.mark.slow
def test_a_run_saves_the_generation_settings_that_its_model_came_with(cli, model, tmp_path) -> None:
    """Greedy with a temperature: Transformers wrote such files, and refuses to write them."""
    old = {"do_sample": False, "temperature": 0.9, "top_p": 0.6}
    found = cli("tiny_full_bf16", model("generation_config.json", **old), *SHORT, "--json")
    assert found.code == 0
    saved = json.loads(found.out)["folder"]
    kept = json.loads((tmp_path / saved / "model" / "generation_config.json").read_text())
    assert {key: kept[key] for key in old} == old
    assert cli("generate", saved, "Hello").code == 0


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("eos_token_id", [2, "x"]),
        pytest.param("temperature", "hot", marks=pytest.mark.slow),
        pytest.param("do_sample", 3, marks=pytest.mark.slow),
        pytest.param("repetition_penalty", True, marks=pytest.mark.slow),
    ],
)
def test_generation_settings_of_another_type_are_an_error(key, value, cli, model) -> None:
    found = cli("tiny_full_bf16", model("generation_config.json", **{key: value}), *SHORT)
    assert found.code == 2
    assert f"{key} of generation_config.json is" in found.err


@pytest.mark.slow
def test_a_model_whose_function_has_changed_is_not_resumed(cli, model, tmp_path) -> None:
    name = model("config.json")
    saving = ["train.save_strategy=steps", "train.save_steps=1", "train.max_steps=2"]
    assert cli("tiny_full_bf16", name, *SHORT, *saving).code == 0
    config = tmp_path / "model" / "config.json"
    before = json.loads(config.read_text())
    config.write_text(json.dumps(before | {"hidden_act": "gelu", "transformers_version": "9"}))
    again = ["resume", "last", "train.max_steps=3", "resume.allow=[train.max_steps]"]
    found = cli(*again)
    assert found.code == 2
    assert "model.config.json.hidden_act: silu in the checkpoint, gelu now" in found.err
    assert "transformers_version" not in found.err
    config.write_text(json.dumps(before))
    (tmp_path / "model" / "chat_template.jinja").write_text("{{ messages[0].content }}")
    found = cli(*again)
    assert found.code == 2
    assert "resuming would change model.chat_template.jinja" in found.err
    assert "put the files of model and rows back" in found.err


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["generate", "evaluate"])
def test_weights_that_are_not_finite_answer_nothing(verb, cli, tmp_path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    assert cli("tiny_full_bf16", *SHORT).code == 0
    (file,) = tmp_path.glob("runs/*/*/model/model.safetensors")
    weights = load_file(file)
    weights["model.norm.weight"][3] = torch.nan
    save_file(weights, file, {"format": "pt"})
    more = ["Hello"] if verb == "generate" else ["--tasks", "builtin:harbour_choice"]
    found = cli(verb, "last", *more)
    assert found.code == 2
    assert "1 weights of the run are not finite" in found.err
    assert "model.norm.weight" in found.err


def test_a_pipe_among_the_files_of_a_model_is_an_error(cli, model, tmp_path) -> None:
    """Reading one waits for ever."""
    name = model("config.json")
    (tmp_path / "model" / "model.safetensors").unlink()
    os.mkfifo(tmp_path / "model" / "model.safetensors")
    found = cli("validate", "tiny_full_bf16", name)
    assert found.code == 2
    assert "model.safetensors of the model" in found.err
    assert "is no regular file" in found.err


def test_a_chat_template_that_fails_on_a_question_is_an_error(cli, model, tmp_path) -> None:
    name = model("config.json")
    (tmp_path / "model" / "chat_template.jinja").write_text("{{ messages[1].content.strip() }}")
    found = cli("validate", "tiny_full_bf16", name)
    assert found.code == 2
    assert "the chat template of" in found.err
    assert "UndefinedError" in found.err
