"""The packaged model of text and images: stock classes load it, and it answers on both."""

from __future__ import annotations

import json
import random

import pytest
import torch
from safetensors import safe_open

from finetune.config.paths import ASSETS, TINY_LLAMA
from finetune.config.schema import ModelConfig
from finetune.storage.pretrained import auto_class, load_shape, load_tokenizer
from tests.asset_makers.make_pictures import Scene
from tests.asset_makers.make_tiny_vision import TINTS, Shapes, pixels

FOLDER = ASSETS / "tiny_vision"
MODEL = ModelConfig(name="builtin:tiny_vision")


@pytest.fixture(scope="module")
def model():
    return auto_class(load_shape(MODEL)).from_pretrained(FOLDER, dtype=torch.float32)


@pytest.fixture(scope="module")
def processor():
    from transformers import AutoProcessor

    return AutoProcessor.from_pretrained(FOLDER)


def said(model, processor, question: str, scene: Scene | None = None) -> str:
    picture = [{"type": "image"}] if scene else []
    turns = [{"role": "user", "content": [*picture, {"type": "text", "text": question}]}]
    text = processor.apply_chat_template(turns, add_generation_prompt=True)
    images = scene and [scene.image.convert("RGB")]
    inputs = processor(images=images, text=text, return_tensors="pt")
    answer = model.generate(**inputs, max_new_tokens=32)[0, inputs["input_ids"].shape[1] :]
    return processor.decode(answer, skip_special_tokens=True)


def test_a_picture_is_sixteen_tokens_with_the_pixels_that_it_learned_from(processor) -> None:
    scene = Scene(random.Random(0))
    done = processor(images=[scene.image.convert("RGB")], text="<image>So?", return_tensors="pt")
    image = processor.tokenizer.convert_tokens_to_ids("<image>")
    assert (done["input_ids"] == image).sum() == load_shape(MODEL).image_seq_length == 16
    torch.testing.assert_close(done["pixel_values"], pixels([scene]))


def test_its_tokenizer_is_the_tiny_llamas_with_one_token_more() -> None:
    own, _ = load_tokenizer(MODEL)
    llama, _ = load_tokenizer(ModelConfig(name="builtin:tiny_llama"))
    assert own.get_vocab().items() - llama.get_vocab().items() == {("<image>", 1536)}
    turns = [{"role": "user", "content": "So?"}, {"role": "assistant", "content": "So."}]
    for rest in ({}, {"add_generation_prompt": True}):
        plain = [
            tokenizer.apply_chat_template(turns, **rest)["input_ids"] for tokenizer in (own, llama)
        ]
        assert plain[0] == plain[1]


def test_it_names_colors_and_answers_text(model, processor) -> None:
    named = []
    for tint in TINTS:
        scene = Shapes(random.Random(tint))
        scene.add("square", 32, 32, 9, tint)
        named.append(f"A {tint} " in said(model, processor, "What is this?", scene))
    assert sum(named) >= len(TINTS) - 1
    asked = "What is the capital of France?"
    assert said(model, processor, asked) == "The capital of France is Paris."


def test_it_adds_less_than_a_mebibyte_to_the_tiny_llama() -> None:
    sizes = [(folder / "model.safetensors").stat().st_size for folder in (FOLDER, TINY_LLAMA)]
    assert sizes[0] - sizes[1] < 1 << 20
    assert json.loads((FOLDER / "config.json").read_text())["model_type"] == "llava"
    with safe_open(FOLDER / "model.safetensors", "pt") as file:
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"BF16"}  # noqa: SIM118
