"""Images in a rehearsal: tokens as the processor gives them, and memory as it is measured."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image

from finetune.config.schema import RunConfig
from finetune.errors import ConfigError
from finetune.estimator.changes import changes
from finetune.estimator.images import Images, images_of, other_sizes, with_images
from finetune.estimator.predict import Prediction
from finetune.estimator.search import GpuChoice, GpuChoices
from finetune.estimator.trace.fake_cuda import to_fake, without_memory
from finetune.estimator.trace.images import add_images, blank_images
from finetune.estimator.variants import Variant, changes_of
from finetune.hardware.device import Device
from finetune.hardware.gpus import machine_of
from finetune.storage.processors import image_processor
from tests.benchmarks.predicted_images import run
from tests.conftest import slow_but
from tests.image_models import FAMILIES, processor_of, tiny_image_model


def _rehearsed(home: Path, processor: Any, images: Images, length: int = 128) -> dict[str, Any]:
    from transformers import AutoConfig, AutoModelForImageTextToText

    ones = torch.ones(2, length, dtype=torch.long)
    batch: dict[str, Any] = {"input_ids": ones, "labels": ones.clone()}
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(home))
    with without_memory():
        to_fake(model)
        add_images(batch, model, blank_images(processor, images, len(ones)))
    return batch | {"image": model.config.image_token_id}


@pytest.mark.slow  # a processor and a tower of each of five families
@pytest.mark.parametrize("family", FAMILIES)
def test_a_rehearsed_row_has_the_image_tokens_that_the_processor_writes(
    family: str, tmp_path: Path
):
    home = tiny_image_model(family, tmp_path, weights=False)
    processor, images = processor_of(home), Images(2, 96, 64)
    batch = _rehearsed(home, processor.image_processor, images)
    blank = Image.new("RGB", (96, 64), (1, 1, 1))
    text, of_row = FAMILIES[family][1] * 2, [blank] * 2
    real = processor(images=[of_row, of_row], text=[text, text], return_tensors="pt")
    here, there = (x["input_ids"] == batch["image"] for x in (batch, real))
    assert here.sum(1).tolist() == there.sum(1).tolist()
    assert (batch["labels"] == -100).equal(here)
    inputs = [k for k in real if k not in ("input_ids", "attention_mask", "num_crops")]
    for name in inputs:
        if "token_type" in name:
            assert (batch[name] == 1).equal(here)
        else:
            assert (batch[name].shape, batch[name].dtype) == (real[name].shape, real[name].dtype)


def test_a_row_that_would_end_inside_an_image_is_refused(tmp_path: Path):
    home = tiny_image_model("gemma3", tmp_path, weights=False)
    processor = processor_of(home).image_processor
    with pytest.raises(ConfigError, match="images take 17 tokens of a row"):
        _rehearsed(home, processor, Images(9, 96, 64), length=17)


def _config_of(home: Path, size: str, **train: Any) -> RunConfig:
    train = {"max_steps": 1, "max_length": 512, "pad_to_multiple_of": 16, **train}
    data = {"name": "builtin:harbour", "images_per_row": 2, "image_size": size}
    sections = {"model": {"name": str(home)}, "data": data, "train": train}
    return RunConfig.model_validate(sections)


def _tokens(batch: dict[str, Any]) -> int:
    return int((batch["input_ids"] == batch["image"]).sum()) // len(batch["input_ids"])


@pytest.mark.slow  # several processors and towers
def test_other_sizes_of_images_have_the_tokens_that_a_tower_makes_of_them(tmp_path: Path):
    home = tiny_image_model("qwen3_vl", tmp_path, weights=False)
    config = _config_of(home, "400x320", max_pixels=2**15)

    def tokens(pixels: int) -> int:
        processor = image_processor(config.model, max_pixels=pixels)
        return _tokens(_rehearsed(home, processor, Images(2, 400, 320), length=512))

    now = tokens(2**15)
    found = dict(other_sizes(config, now))
    assert min(found) < 2**15 < max(found)
    assert all(tokens(pixels) == other for pixels, other in found.items())
    gpu = Device("cuda", "H100", (9, 0), 80.0)
    sized = {
        c.overrides[0]: c for c in changes(config, gpu, image_tokens=now) if c.kind == "images"
    }
    for pixels, other in found.items():  # as much text
        made = sized[f"train.max_pixels={pixels}"]
        text = 512 * made.tokens - other
        assert 512 - now <= text < 512 - now + 16
        assert made.memory == (other < now)


def test_a_run_that_fits_is_shown_all_sizes_of_images_and_the_mildest_of_other_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    home = tiny_image_model("qwen3_vl", tmp_path, weights=False)
    config = _config_of(home, "400x320", max_pixels=2**15, per_device_train_batch_size=4)
    facts = {"compiled": False, "timing": 1, "fit": "fits", "image_tokens": 60}
    asked: Any = SimpleNamespace(config=config, machine=machine_of("H100"), **facts)

    def unpredicted(asked: Any, made: Any) -> Variant:
        return Variant(asked, made[0].overrides, None, label=made[0].kind)

    monkeypatch.setattr("finetune.estimator.variants.with_changes", unpredicted)
    kinds = Counter(row.label for row in changes_of(asked).rows)
    assert kinds.pop("images") == len([*other_sizes(config, 60)]) > 2
    assert set(kinds.values()) == {1}


def test_other_sizes_of_images_of_prompts_leave_the_length_of_answers(tmp_path: Path):
    home = tiny_image_model("qwen3_vl", tmp_path, weights=False)
    config = _config_of(home, "400x320", max_pixels=2**15)
    train = {key: value for key, value in config.train.items() if key != "max_length"}
    writes = config.model_copy(update={"train": type(config.train)(train | {"method": "grpo"})})
    gpu = Device("cuda", "H100", (9, 0), 80.0)
    sized = [c for c in changes(writes, gpu, image_tokens=60) if c.kind == "images"]
    assert len(sized) > 2
    assert all(len(change.overrides) == 1 for change in sized)
    assert {change.tokens < 1 for change in sized} == {True, False}


def test_images_of_one_size_have_no_others(tmp_path: Path):
    home = tiny_image_model("gemma3", tmp_path, weights=False)
    assert [*other_sizes(_config_of(home, "400x320"), 32)] == []


def test_images_are_those_that_settings_say():
    config = RunConfig.model_validate(
        {"model": {"name": "Qwen/Qwen3-VL-8B-Instruct"}, "data": {"name": "builtin:harbour"},
         "train": {"max_steps": 1}}
    )  # fmt: skip
    assert images_of(config) is None
    assert images_of(with_images(config, 2, "640x480")) == (2, 640, 480)
    sized = config.model_copy(update={"train": type(config.train)({"max_pixels": 65536})})
    assert images_of(sized) == (1, 1024, 768)


def _assumed(config: RunConfig) -> list[str]:
    """What a table of GPUs says of images."""
    unknown: Any = None
    machine = machine_of("H100")
    found = Prediction(config, machine, *[unknown] * 5, compiled=False, image_tokens=600)
    return GpuChoices((GpuChoice((), machine, None), GpuChoice((), machine, found)), "").notes


def test_a_table_of_gpus_says_what_images_are_taken():
    sections = {"model": {"name": "Qwen/Qwen3-VL-8B-Instruct"}, "data": {"name": "builtin:harbour"},
                "train": {"max_steps": 1}}  # fmt: skip
    config = with_images(RunConfig.model_validate(sections), 2, "640x480")
    assert "2 images of 640x480, 600 tokens;" in _assumed(config)[0]
    pairs = config.model_copy(update={"train": config.train | {"method": "dpo"}})
    assert "600 tokens in each of its 2 texts;" in _assumed(pairs)[0]
    writes = config.model_copy(update={"train": config.train | {"method": "grpo"}})
    assert "2 images of 640x480, 600 tokens;" in _assumed(writes)[0]
    of_text = with_images(config, 0, None)
    assert _assumed(of_text)[0].startswith("rows are taken to be text")


def test_images_that_nothing_says_are_those_of_rows_in_files(tmp_path: Path):
    rows = [{"images": [f"{n}.png"] * n, "text": "<image>" * n + "ships"} for n in (1, 3, 2)]
    rows.append({"images": ["gone.png"], "text": "<image>"})
    for n, size in ((1, (40, 30)), (2, (50, 60)), (3, (8, 8))):
        Image.new("RGB", size).save(tmp_path / f"{n}.png")
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    sections: dict[str, Any] = {
        "model": {"name": "builtin:tiny_vision"},
        "data": {"path": str(tmp_path / "rows.jsonl")},
        "train": {"max_steps": 1},
    }
    assert images_of(RunConfig.model_validate(sections)) == (3, 50, 60)
    of_text = sections | {"model": {"name": "builtin:tiny_llama"}}
    assert images_of(RunConfig.model_validate(of_text)) is None


LONG = pytest.mark.long
ALL = ("tiny_full_fp8", "model.train_vision=all")
"""Weights of two towers are not read to the last: these get neither gradients nor states."""
RUNS = [
    ("qwen3_vl", "tiny_lora_fp8"),
    ("smolvlm", "tiny_lora_fp8", "train.method=dpo", "~train.pad_to_multiple_of"),
    ("llava_next", *ALL),
    ("gemma3", *ALL, "train.gradient_accumulation_steps=2"),
]


@pytest.mark.slow  # a run each
@pytest.mark.filterwarnings("ignore:.*trainable parameters have had no gradient")
@pytest.mark.parametrize(
    "words",
    [pytest.param(x, id=x[0], marks=() if x in RUNS[::2] else LONG) for x in RUNS],
)
def test_memory_of_a_step_on_images_is_predicted_within_a_thousandth(words: tuple[str, ...]):
    found = run(words[0], [*words[1:]])
    assert abs(found["error"]) < 0.001
    assert found["without"] < -0.01  # of which the images are more than that


WRITES = ("tiny_grpo_fp8", "train.num_generations=2", "train.entropy_coef=0.01", "train.beta=0.1")


@pytest.mark.slow  # a run each
@pytest.mark.parametrize("family", slow_but(["llava_next"], ["qwen3_vl", "llava_next"], LONG))
def test_a_receipt_predicts_memory_of_prompts_with_images(family: str):
    """As they were: answers may be shorter, and prompts are of any length."""
    found = run(family, [*WRITES])
    assert abs(found["in receipt"]) < 0.02
    assert found["without"] < found["error"]
