"""GGUF exports: converted by llama.cpp's script, or a stand-in, and read back by Transformers."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from finetune.config.paths import TINY_LLAMA
from finetune.errors import ConfigError
from finetune.export import gguf, parity
from tests.benchmarks.gguf_engine import TOKENS, tiny_file
from tests.families import config_of, folder_of

STAND_IN = Path(__file__).parent / "llama_cpp"
IDS = torch.arange(3, 67).view(2, -1)


@pytest.fixture
def stand_in(monkeypatch):
    pytest.importorskip("gguf")
    monkeypatch.setenv("LLAMA_CPP", str(STAND_IN))


def read_back(folder: Path, file: Path):
    """The model in a folder, with nothing but the weights of the file."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    gguf.read_into(model, file)
    return model


def test_without_the_converter_it_is_said_how_to_get_it(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("LLAMA_CPP", raising=False)
    for home in (None, str(tmp_path)):
        if home:
            monkeypatch.setenv("LLAMA_CPP", home)
        with pytest.raises(ConfigError, match=r"no package index(.|\n)*git clone --depth 1"):
            gguf.converter("gguf")


@pytest.mark.slow
def test_a_file_is_read_back_and_a_wrong_order_is_found(stand_in, monkeypatch, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(TINY_LLAMA).eval()
    model.save_pretrained(tmp_path / "model")
    batch = [{"input_ids": IDS, "labels": IDS}]
    with parity.in_float32(model):
        exact = parity.observe(model, batch, answers=False)

    def error(target: str) -> float:
        file = tmp_path / f"{target}.gguf"
        gguf.convert(tmp_path / "model", file, target)
        back = read_back(tmp_path / "model", file)
        return parity.compare(exact, parity.observe(back, batch, answers=False)).logit_error

    assert error("gguf") < 1e-5 < error("gguf-q8") < 0.05
    monkeypatch.setenv("FAULT", "1")
    assert error("gguf") > 0.1


@pytest.mark.slow
def test_what_the_converter_does_not_know_is_said(stand_in, tmp_path):
    home = folder_of("gpt2", tmp_path)
    with pytest.raises(ConfigError, match=r"Model gpt2 is not supported(.|\n)*git pull"):
        gguf.convert(home, tmp_path / "out.gguf", "gguf")
    assert json.loads((home / "config.json").read_text())["n_ctx"] == 512


@pytest.mark.slow
def test_a_model_that_reads_images_becomes_two_files(stand_in, tmp_path):
    """Its text is read back and says the same; the projector's numbers are in the other file."""
    from gguf import GGUFReader

    torch.manual_seed(0)
    shape = config_of("smolvlm")
    model = AutoModelForImageTextToText.from_config(shape).eval()
    for parameter in model.parameters():  # as a run stores them, with room for its file's type
        parameter.data = parameter.data.bfloat16().float()
    model.save_pretrained(tmp_path / "model")
    gguf.convert(tmp_path / "model", tmp_path / "out.gguf", "gguf")
    back = AutoModelForImageTextToText.from_config(shape).eval()
    gguf.read_into(back, tmp_path / "out.gguf")
    with torch.inference_mode():
        found = [one(IDS).logits for one in (back, model)]
    torch.testing.assert_close(*found)
    assert gguf.convert_tower(tmp_path / "model", tmp_path, "gguf") == ""
    written = {t.name: t.data for t in GGUFReader(tmp_path / gguf.TOWER).tensors}
    ours = model.model.connector.modality_projection.proj.weight.detach()
    theirs = written["model.connector.modality_projection.proj.weight"]
    torch.testing.assert_close(torch.from_numpy(theirs.copy()), ours)
    assert "supported" in gguf.convert_tower(folder_of("gpt2", tmp_path), tmp_path, "gguf")


REAL = os.environ.get("LLAMA_CPP")


@pytest.mark.long
@pytest.mark.skipif(not REAL, reason="llama.cpp's repository is not in LLAMA_CPP")
@pytest.mark.parametrize(
    "family",
    ["llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gemma3_text", "gpt2", "smollm3"],
)
def test_families_by_the_real_converter(family, tmp_path):
    pytest.importorskip("gguf")
    home = tiny_file(family, tmp_path, str(REAL))
    exact = AutoModelForCausalLM.from_pretrained(home, dtype=torch.float32).eval()
    with torch.inference_mode():
        found = [model(IDS).logits for model in (read_back(home, tmp_path / "out.gguf"), exact)]
    # Rows beyond the tokenizer's vocabulary are left out by some.
    torch.testing.assert_close(*(logits[..., :TOKENS] for logits in found))
