"""Runs on rows with images: trained, resumed to the bit, and refused where a file changes."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file

import finetune
from finetune.errors import ConfigError, DataError
from tests.conftest import slow_but
from tests.image_models import FAMILIES, FOUR, tiny_image_model

LONG = pytest.mark.long

ROWS, ADAPTERS = 8, {"r": 4}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Rows with one image, two, and none; the same as pairs."""
    from PIL import Image

    chance = np.random.default_rng(0)
    rows, pairs = [], []
    for number in range(ROWS):
        height, width = chance.integers(30, 90, 2)
        picture = chance.integers(0, 255, (height, width, 3), dtype=np.uint8)
        Image.fromarray(picture).save(tmp_path / f"{number}.png")
        names = [f"{number}.png", "0.png"][: number % 3]
        ask = "<image>" * len(names) + f"Ship {number}?"
        rows.append({"prompt": ask, "completion": f"Tug {number}.", "images": names})
        pairs.append({"prompt": ask, "chosen": "A tug.", "rejected": "A cow.", "images": names})
    for name, given in (("rows", rows), ("pairs", pairs)):
        text = "".join(json.dumps(row) + "\n" for row in given)
        (tmp_path / f"{name}.jsonl").write_text(text, "utf-8")
    (tmp_path / "rewards.py").write_text(REWARD, "utf-8")
    return tmp_path


REWARD = """
def each_other(completions, images, **columns):
    assert not {*columns} & {"images as seen", "texts"}
    assert all(picture.mode == "RGB" for own in images for picture in own)
    return [float(number % 2) for number in range(len(completions))]
"""


def trained(data: Path, family: str = "qwen3_vl", *, lora: Any = ADAPTERS, **settings: Any) -> Any:
    """The run of a recipe of four steps in FP8."""
    home = data / family
    if not home.is_dir():
        tiny_image_model(family, data)
    rows = "pairs" if settings.get("method") == "dpo" else "rows"
    steps = {
        "per_device_train_batch_size": 2, "max_steps": 4, "learning_rate": 1e-3, "save_steps": 2,
        "eval_strategy": "no", "logging_steps": 1,
    }  # fmt: skip
    recipe = {
        "model": {"name": str(home), "weights": "pretrained"},
        "precision": {"compute": "fp8", "backend": "emulated"},
        "lora": lora,
        "data": {"path": str(data / f"{rows}.jsonl"), "eval_fraction": 0.0},
        "eval": {"samples": False},
        "train": steps | settings,
    }
    file = data / "images.yaml"
    file.write_text(yaml.safe_dump(recipe), "utf-8")
    return finetune.train(finetune.load_recipe(str(file)), out=data / "runs")


def written(data: Path, family: str, **settings: Any) -> Any:
    """The same by GRPO, of two steps: each a part of rows without images, and one with some."""
    own = {
        "method": "grpo", "reward_funcs": [f"{data / 'rewards.py'}:each_other"],
        "num_generations": 2, "max_completion_length": 4, "max_steps": 2, "save_strategy": "no",
        "gradient_accumulation_steps": 4, "beta": 0.1,
    }  # fmt: skip
    return trained(data, family, **own | settings)


def weights(run: Any) -> dict[str, torch.Tensor]:
    return load_file(run.folder / "model" / "adapter_model.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("family", FOUR)
def test_a_run_with_images_is_proven_and_its_model_has_the_processor(family: str, data: Path):
    run = trained(data, family, max_steps=2, save_strategy="no")
    assert run.receipt.status == "proven"
    assert run.receipt.data["train"]["images"] == 7
    assert (run.folder / "model" / "processor_config.json").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("lora", [ADAPTERS, None])
def test_a_run_on_text_alone_leaves_a_model_that_reads_images(lora: Any, data: Path):
    """By Transformers alone, of its end, a checkpoint and an export."""
    from PIL import Image
    from transformers import AutoProcessor

    from finetune.export.export import export_run

    (data / "rows.jsonl").write_text('{"prompt": "What time?", "completion": "Noon."}\n' * 8)
    run = trained(data, "llava_next", lora=lora, max_steps=2, packing=False)
    export_run(run.folder, "merged" if lora else "fp8", data / "export")
    image, text = Image.open(data / "0.png"), FAMILIES["llava_next"][1] + " What ship?"
    due = AutoProcessor.from_pretrained(data / "llava_next")(images=image, text=text)
    at = run.folder / "checkpoints" / "checkpoint-2"
    for folder in (run.folder / "model", at, data / "export"):
        found = AutoProcessor.from_pretrained(folder)(images=image, text=text)
        assert found["input_ids"] == due["input_ids"]
        assert np.array_equal(found["pixel_values"], due["pixel_values"])


@pytest.mark.slow
def test_pairs_with_images_are_learned(data: Path):
    run = trained(data, "smolvlm", method="dpo", learning_rate=1e-2, max_steps=3)
    assert run.receipt.status == "proven"
    lines = (run.folder / "metrics.jsonl").read_text("utf-8").splitlines()
    losses = [row["loss"] for row in map(json.loads, lines) if "loss" in row]
    assert losses[0] == pytest.approx(0.693, abs=1e-3)
    assert losses[-1] < losses[0]


@pytest.mark.slow
def test_a_run_with_images_resumes_to_the_bit(data: Path):
    whole = trained(data, dataloader_num_workers=0)
    resumed = trained(
        data, resume_from_checkpoint=str(whole.folder / "checkpoints" / "checkpoint-2")
    )
    one, other = weights(whole), weights(resumed)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.slow
@pytest.mark.parametrize("run", [trained, pytest.param(written, marks=LONG)])
def test_a_run_does_not_resume_on_another_picture_under_the_same_name(run: Any, data: Path):
    run = partial(run, data, "qwen3_vl", max_steps=3, save_strategy="steps")
    whole = run()
    at = whole.folder / "checkpoints" / "checkpoint-2"
    (data / "4.png").write_bytes((data / "5.png").read_bytes())
    with pytest.raises(ConfigError, match=r"would change data\.images") as error:
        run(resume_from_checkpoint=str(at))
    assert str(data / "4.png") in error.value.why


@pytest.mark.slow
def test_batches_of_rows_with_images_can_be_of_similar_length(data: Path):
    run = trained(data, train_sampling_strategy="group_by_length", max_steps=2)
    assert run.receipt.status == "proven"


@pytest.mark.slow
def test_another_picture_than_the_model_is_shown_is_an_error(
    data: Path, monkeypatch: pytest.MonkeyPatch
):
    """A collator that brightens images: ids are the same, and pixels are not."""
    from finetune.data.image_batches import ImageBatches

    whole = ImageBatches.__call__

    def brighter(self: Any, rows: Any) -> Any:
        batch = whole(self, rows)
        if "pixel_values" in batch:
            batch["pixel_values"] = batch["pixel_values"] + 0.1
        return batch

    monkeypatch.setattr(ImageBatches, "__call__", brighter)
    with pytest.raises(DataError, match="other pixels"):
        trained(data, "gemma3", save_strategy="no")


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", slow_but(["gemma3"], ["qwen2_5_vl", "gemma3", "llava_next"], LONG)
)
def test_answers_to_prompts_with_images_are_learned_in_fp8(family: str, data: Path):
    run = written(data, family)
    assert run.receipt.status == "proven"
    ledger = run.receipt.data["train"]
    assert (ledger["images"], ledger["text_alone"]) == (7, 3)
    assert not [name for name in weights(run) if "vis" in name]
    assert (run.folder / "model" / "processor_config.json").is_file()
    # The tokenizer pads as it did: a state of it is saved, for all who load it.
    assert (
        json.loads((run.folder / "model" / "tokenizer.json").read_text("utf-8"))["padding"] is None
    )


@pytest.mark.slow
def test_the_reference_of_a_full_run_computes_as_the_policy(data: Path):
    """TRL would load it again, with a tower that trains: another model, in high precision."""
    run = written(data, "gemma3", lora=None)
    assert run.receipt.status == "proven"
    (line,) = run.receipt.precision["references"]
    assert line.endswith("in the precision of the policy, FP8 in training")


@pytest.mark.slow
def test_smolvlm_answers_prompts_that_have_as_many_images_each(data: Path):
    file = data / "rows.jsonl"
    rows = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    one = [row | {"prompt": "<image>Ship?", "images": ["1.png"]} for row in rows]
    file.write_text("".join(json.dumps(row) + "\n" for row in one), "utf-8")
    assert written(data, "smolvlm").receipt.status == "proven"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "swapped"), [("qwen2_5_vl", "pixel_values"), ("gemma3", "token_type_ids")]
)
def test_prompts_that_are_learned_of_with_others_images_are_an_error(
    family: str, swapped: str, data: Path, monkeypatch: pytest.MonkeyPatch
):
    """A batch in another order than its pixels, or than the tokens that are marked as images'."""
    from trl.trainer import grpo_trainer

    whole = grpo_trainer.shuffle_sequence_dict

    def mixed(batch: Any) -> Any:
        batch = whole(batch)
        found = batch[swapped]
        return batch | {swapped: found[::-1] if isinstance(found, list) else found.flip(0)}

    monkeypatch.setattr(grpo_trainer, "shuffle_sequence_dict", mixed)
    with pytest.raises(DataError, match="other pixels"):
        written(data, family)


@pytest.mark.slow
def test_the_packaged_model_of_images_learns_by_a_reward(tmp_path: Path):
    settings = (
        "train.method=grpo", "train.reward_funcs=[builtin:one_sentence]", "train.max_steps=2",
        "train.per_device_train_batch_size=4", "train.num_generations=4", "~train.max_length",
        "train.max_completion_length=8", "train.eval_strategy=no", "train.temperature=2",
        "train.lr_scheduler_type=constant",
    )  # fmt: skip
    recipe = finetune.load_recipe("tiny_vision_lora_fp8", settings)
    assert finetune.train(recipe, out=tmp_path).receipt.status == "proven"


@pytest.mark.slow
def test_a_processor_that_makes_more_than_trl_takes_is_refused_by_name(
    data: Path, monkeypatch: pytest.MonkeyPatch
):
    from transformers import Gemma3Processor

    whole = Gemma3Processor.__call__

    def more(self: Any, *args: Any, **how: Any) -> Any:
        made = whole(self, *args, **how)
        return made | {"aspect_ratio_ids": torch.ones(len(made["input_ids"]), 1)}

    monkeypatch.setattr(Gemma3Processor, "__call__", more)
    with pytest.raises(ConfigError, match="takes no images of Gemma3Processor"):
        written(data, "gemma3")


@pytest.mark.slow
@pytest.mark.parametrize("method", slow_but(["grpo"], ["dpo", "grpo"], LONG))
def test_an_export_of_another_method_is_compared_on_its_rows_with_images(
    method: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Of pairs the better answers, of prompts all that is there: as rows of SFT."""
    from finetune.export import parity

    looked = list[Any]()
    whole = parity._as_answers
    monkeypatch.setattr(parity, "_as_answers", lambda rows: looked.append(whole(rows)) or looked[0])
    how: dict[str, Any] = {"max_steps": 2, "save_strategy": "no"}
    run = (
        written(data, "gemma3")
        if method == "grpo"
        else trained(data, "gemma3", method="dpo", **how)
    )
    found = finetune.export_run(run.folder, "merged", tmp_path / "merged")
    assert found.rows == f"{ROWS} of {ROWS} training rows (the run kept none for evaluation)"
    turns = [row.get("messages") or row["prompt"] + row["completion"] for row in looked[0].train]
    roles = [turn["role"] for turn in turns[0]]
    assert roles == ["user", "assistant"][: 1 + (method == "dpo")]
    assert sum(len(row["images"]) for row in looked[0].train) == 7
    assert found.parity.positions > 0
