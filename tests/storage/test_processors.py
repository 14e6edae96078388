"""Processors of models that read images: loaded without torchvision, sized, saved as they were."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from finetune.config.schema import ModelConfig
from finetune.errors import ConfigError
from finetune.storage.pretrained import load_tokenizer
from finetune.storage.processors import load_processor, takes_images
from tests.families import config_of
from tests.image_models import FAMILIES, processor_of, tiny_image_model


def _picture(width: int, height: int):
    from PIL import Image

    numbers = np.random.default_rng(0).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(numbers)


@pytest.mark.parametrize("family", FAMILIES)
def test_saved_processors_are_loaded_again_with_the_same_numbers(family: str, tmp_path: Path):
    home = tiny_image_model(family, tmp_path, weights=False)
    text = ["IMAGE?".replace("IMAGE", FAMILIES[family][1])]
    made = processor_of(home)
    made.save_pretrained(tmp_path / "again")
    again = processor_of_files(home, tmp_path / "again")
    first, second = (
        one(images=[[_picture(90, 60)]], text=text, return_tensors="np") for one in (made, again)
    )
    assert first.keys() == second.keys() > {"pixel_values"}
    assert all(np.array_equal(first[key], second[key]) for key in first)


def processor_of_files(home: Path, folder: Path):
    """The processor of a folder, with another's `config.json`."""
    (folder / "config.json").write_text((home / "config.json").read_text("utf-8"), "utf-8")
    return processor_of(folder)


def test_settings_for_videos_are_saved_as_they_were(tmp_path: Path):
    home = tiny_image_model("qwen3_vl", tmp_path, weights=False)
    file = home / "processor_config.json"
    settings = json.loads(file.read_text("utf-8")) | {"video_processor": {"fps": 3}}
    file.write_text(json.dumps(settings), "utf-8")
    processor_of(home).save_pretrained(tmp_path / "again")
    again = json.loads((tmp_path / "again" / "processor_config.json").read_text("utf-8"))
    assert again["video_processor"] == {"fps": 3}


def test_more_pixels_are_more_tokens(tmp_path: Path):
    home = tiny_image_model("qwen2_5_vl", tmp_path, weights=False)
    text, lengths = ["<|image_pad|>"], []
    for most in (56 * 56, 112 * 112, 224 * 224):
        found = processor_of(home, max_pixels=most)(images=[_picture(400, 400)], text=text)
        lengths.append(len(found["input_ids"][0]))
    assert lengths == [4, 16, 64]


def test_numbers_of_pixels_are_refused_where_images_have_one_size(tmp_path: Path):
    home = tiny_image_model("gemma3", tmp_path, weights=False)
    with pytest.raises(ConfigError, match="not sized by a number of pixels"):
        processor_of(home, max_pixels=1000)


@pytest.mark.parametrize("given", [{"max_pixels": 10}, {"min_pixels": 1 << 20}])
def test_impossible_numbers_of_pixels_are_refused(given: dict[str, int], tmp_path: Path):
    home = tiny_image_model("qwen3_vl", tmp_path, weights=False)
    with pytest.raises(ConfigError, match="an image cannot have"):
        processor_of(home, **given)


def test_models_of_text_have_no_processor():
    model = ModelConfig(name="builtin:tiny_llama")
    with pytest.raises(ConfigError, match="reads text alone"):
        load_processor(model, load_tokenizer(model)[0])
    takes = {
        family: takes_images(config_of(family)) for family in ("llama", "gemma3_text", *FAMILIES)
    }
    assert takes == {"llama": False, "gemma3_text": False} | dict.fromkeys(FAMILIES, True)


def test_a_broken_torchvision_is_an_error_with_a_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    home = tiny_image_model("qwen3_vl", tmp_path, weights=False)
    (tmp_path / "torchvision.py").write_text("raise RuntimeError('torchvision::nms is not there')")
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("torchvision", None)
    with pytest.raises(ConfigError, match="cannot be imported") as error:
        processor_of(home)
    assert "nms" in error.value.why
    assert "pip uninstall torchvision" in error.value.fix
