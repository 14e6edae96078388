"""Rows with images as they are trained on: ids, masks and pixels are the processor's own."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset, Features, Json, List, Value
from trl import apply_chat_template, prepare_multimodal_messages

from finetune.config.methods import METHODS
from finetune.config.schema import DataConfig, ModelConfig, RunConfig
from finetune.data.counting import arguments_for, count
from finetune.data.dataset import reader_for, rows_for
from finetune.data.image_batches import ImageBatches
from finetune.data.image_forms import SEEN
from finetune.data.image_prompts import (
    beside_notes,
    reading_prompts,
    refuse_uneven,
    with_pictures,
    without_empty,
)
from finetune.data.image_rows import (
    AS_PAIRS,
    AS_PROMPTS,
    AS_TEXT,
    as_pair,
    as_prompt,
    as_sequences,
    read,
)
from finetune.data.images import opened, references
from finetune.errors import ConfigError, DataError
from finetune.storage.pretrained import load_tokenizer
from tests.image_models import FOUR, processor_of, tiny_image_model

IMAGE = {"type": "image"}
ANSWERS = ["A tug.", "A brig, a big one.", "Noon.", "A buoy."]


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def said(*turns: list[Any]) -> list[dict[str, Any]]:
    return [
        {"role": ("user", "assistant")[n % 2], "content": parts} for n, parts in enumerate(turns)
    ]


def picture(folder: Path, width: int, height: int, seed: int = 0) -> dict[str, Any]:
    from PIL import Image

    numbers = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    file = folder / f"{seed}.png"
    Image.fromarray(numbers).save(file)
    return {"bytes": None, "path": str(file)}


@pytest.fixture
def rows(tmp_path: Path) -> Dataset:
    """Two images in two turns, none, and one."""
    made = [picture(tmp_path, *size) for size in ((90, 60, 0), (40, 80, 1), (64, 64, 2))]
    two = said(
        [IMAGE, text("What ship?")],
        [text(ANSWERS[0])],
        [text("And "), IMAGE, text("?")],
        [text(ANSWERS[1])],
    )
    none = said([text("What time?")], [text(ANSWERS[2])])
    one = said([IMAGE, text("What is it?")], [text(ANSWERS[3])])
    return Dataset.from_dict(
        {"messages": [two, none, one], "images": [made[:2], [], made[2:]]},
        features=Features(messages=List(Json()), images=references()),
    )


def as_text(rows: Dataset, processor: Any, **how: Any) -> Dataset:
    how = {"only_answers": True, "completion_only": False} | how
    return read(rows, processor, as_sequences, AS_TEXT, **how)


@pytest.fixture(params=FOUR)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


# ------------------------------------------------------------------------------------------ masks


@pytest.mark.parametrize("markers", [True, False])
def test_what_is_trained_on_is_the_answers(
    family: str, markers: bool, rows: Dataset, tmp_path: Path
):
    processor = processor_of(tiny_image_model(family, tmp_path, markers=markers, weights=False))
    done = as_text(rows, processor)
    decoded = [
        processor.tokenizer.decode([t for t in row["labels"] if t >= 0], skip_special_tokens=True)
        for row in done
    ]
    parts = [part for one in decoded for part in one.strip().splitlines()]
    assert "".join(parts) == "".join(ANSWERS)


def test_no_token_of_an_image_is_trained_on(family: str, rows: Dataset, tmp_path: Path):
    processor = processor_of(tiny_image_model(family, tmp_path, weights=False))
    for row in as_text(rows, processor, only_answers=False):
        ids, labels = np.array(row["input_ids"]), np.array(row["labels"])
        inside = np.zeros(len(ids), bool)
        for begin, end in zip(row["image_begins"], row["image_ends"], strict=True):
            inside[begin:end] = True
        assert set(np.flatnonzero(np.isin(ids, processor.image_token_ids))) <= {
            *np.flatnonzero(inside)
        }
        assert np.array_equal(labels < 0, inside)


def test_an_answer_of_its_own_row_keeps_the_images_before_it(rows: Dataset, tmp_path: Path):
    """A template that leaves out thoughts of earlier turns: two rows, of one image and of two."""
    home = tiny_image_model("qwen3_vl", tmp_path, markers=False, weights=False)
    processor = processor_of(home)
    processor.tokenizer.chat_template = processor.tokenizer.chat_template.replace(
        "{{ said(message['content']) + '<|im_end|>' }}{% else %}",
        "{{ said(message['content']) + ('<|im_end|>' if loop.last else '!') }}{% else %}",
    )
    done = as_text(rows.select([0]), processor)
    assert [len(row["images"]) for row in done] == [1, 2]
    assert [row["labels"][-2] for row in done] == [row["input_ids"][-2] for row in done]


def test_a_text_with_the_models_own_mark_of_an_image_is_refused(tmp_path: Path):
    processor = processor_of(tiny_image_model("qwen3_vl", tmp_path, weights=False))
    turns = said([text("What is <|image_pad|>?")], [text("A token.")])
    rows = Dataset.from_dict(
        {"messages": [turns], "images": [[]]},
        features=Features(messages=List(Json()), images=references()),
    )
    with pytest.raises(DataError, match="cannot be trained on"):
        as_text(rows, processor)


# ---------------------------------------------------------------------------------------- batches


def test_ids_and_pixels_of_a_batch_are_the_processors_own(
    family: str, rows: Dataset, tmp_path: Path
):
    """Beside Transformers' way from turns with pictures to numbers, which knows nothing of ours."""
    processor = processor_of(tiny_image_model(family, tmp_path, weights=False))
    done, collate = as_text(rows, processor), ImageBatches(processor, limit=None, multiple=None)
    if family == "smolvlm":  # whose template asks the processor of videos for its frames
        processor.video_processor = type("Frames", (), {"num_frames": 1, "fps": 1})()
    for picked in ([0], [1], [2], [2, 0]):
        turns = []
        for index in picked:
            pictures = iter([opened(one) for one in rows[index]["images"]])
            turns.append([
                {**turn, "content": [
                    {"type": "image", "image": next(pictures)} if part == IMAGE else part
                    for part in turn["content"]]}
                for turn in rows[index]["messages"]
            ])  # fmt: skip
        due = processor.apply_chat_template(
            turns, tokenize=True, return_dict=True, return_tensors="pt",
            processor_kwargs={"padding": True, "padding_side": "right"},
        )  # fmt: skip
        found = collate([done[index] for index in picked])
        assert found.keys() - due.keys() == {"labels"}
        assert all(torch.equal(found[key], due[key]) for key in due)


def test_what_is_behind_max_length_is_cut_from_every_tensor_of_tokens(
    rows: Dataset, tmp_path: Path
):
    processor = processor_of(tiny_image_model("qwen3_vl", tmp_path, weights=False))
    done = list(as_text(rows.select([2, 1]), processor))
    limit = len(done[0]["input_ids"]) - 2
    done[0] |= {key: done[0][key][:limit] for key in ("input_ids", "labels")}
    found = ImageBatches(processor, limit=limit, multiple=None)(done)
    for key in ("input_ids", "attention_mask", "mm_token_type_ids", "labels"):
        assert found[key].shape == (2, limit)


def test_another_picture_under_the_same_name_is_an_error(rows: Dataset, tmp_path: Path):
    processor = processor_of(tiny_image_model("qwen3_vl", tmp_path, weights=False))
    done, collate = as_text(rows, processor), ImageBatches(processor, limit=None, multiple=None)
    collate([done[2]])
    Path(done[2]["images"][0]["path"]).write_bytes(Path(done[0]["images"][0]["path"]).read_bytes())
    with pytest.raises(DataError, match="changed since") as error:
        collate([done[2]])
    assert done[2]["images"][0]["path"] in error.value.where


def test_pairs_have_the_pictures_of_their_prompt_on_both_sides(tmp_path: Path):
    processor = processor_of(tiny_image_model("gemma3", tmp_path, weights=False))
    prompt = said([IMAGE, text("What ship?")])
    answers = [[{"role": "assistant", "content": [text(one)]}] for one in ("A tug.", "A cow.")]
    rows = Dataset.from_dict(
        {"prompt": [prompt], "chosen": answers[:1], "rejected": answers[1:],
         "images": [[picture(tmp_path, 50, 50)]]},
        features=Features(prompt=List(Json()), chosen=List(Json()), rejected=List(Json()),
                          images=references()),
    )  # fmt: skip
    done = read(rows, processor, as_pair, AS_PAIRS)
    found = ImageBatches(processor, limit=None, multiple=None)(list(done))
    assert torch.equal(*found["pixel_values"])
    counts = [
        processor.tokenizer.decode(ids[on.bool()], skip_special_tokens=True).strip()
        for ids, on in zip(found["input_ids"], found["completion_mask"], strict=True)
    ]
    assert counts == ["A tug.", "A cow."]


# ------------------------------------------------------------- prompts, whose answers are written


@pytest.fixture
def prompts(rows: Dataset) -> Dataset:
    """Two images in two turns, none, and one; without an answer, and with a column of their own."""
    asked = [messages[:-1] for messages in rows["messages"]]
    return Dataset.from_dict(
        {"prompt": asked, "images": list(rows["images"]), "length": ["short"] * 3},
        features=Features(prompt=List(Json()), images=references(), length=Value("string")),
    )


def with_images(rows: Dataset, index: int) -> list[dict[str, Any]]:
    """Turns of a prompt with its pictures in them, as TRL has them."""
    pictures = [opened(one) for one in rows[index]["images"]]
    return prepare_multimodal_messages(rows[index]["prompt"], images=pictures)


@pytest.mark.parametrize("picked", [[0, 2], [1, 2], [1]])
def test_prompts_are_written_to_and_learned_of_as_the_processor_makes_them(
    family: str, picked: list[int], prompts: Dataset, tmp_path: Path
):
    """Beside Transformers' own batch, padded on the left, of a tokenizer that pads on the right."""
    home = tiny_image_model(family, tmp_path, weights=False)
    reading, own = reading_prompts(processor_of(home)), processor_of(home)
    if family == "smolvlm":  # whose template asks the processor of videos for its frames
        own.video_processor = type("Frames", (), {"num_frames": 1, "fps": 1})()
    turns = [with_images(prompts, index) for index in picked]
    ask = {"add_generation_prompt": True, "tokenize": True, "return_dict": True}
    due = own.apply_chat_template(
        turns, **ask, return_tensors="pt",
        processor_kwargs={"padding": True, "padding_side": "left"},
    )  # fmt: skip
    written = reading.apply_chat_template(conversation=turns, tools=None, **ask)
    whole = [mask.bool() for mask in due["attention_mask"]]
    ids = [row[on].tolist() for row, on in zip(due["input_ids"], whole, strict=True)]
    assert written["input_ids"] == ids
    # As TRL does: nothing stands for no images, and texts are rendered before.
    images = [[opened(one) for one in prompts[index]["images"]] or None for index in picked]
    texts = [apply_chat_template({"prompt": one}, reading)["prompt"] for one in turns]
    learned = reading(images=images, text=texts, padding=True, return_tensors="pt")
    assert learned.keys() == due.keys() == written.keys()
    assert all(torch.equal(learned[key], due[key]) for key in due)
    assert reading.tokenizer.backend_tokenizer.padding is None
    assert type(reading).__name__ == type(own).__name__


def test_pictures_of_prompts_are_opened_as_they_are_read(prompts: Dataset, tmp_path: Path):
    processor = processor_of(tiny_image_model("qwen3_vl", tmp_path, weights=False))
    done = read(prompts, processor, as_prompt, AS_PROMPTS, template={})
    shown = beside_notes(prompts, done).with_transform(with_pictures)
    assert len(shown) == 3
    batch = shown[[0, 0, 1]]
    assert batch.keys() == {"prompt", "images", "length"}
    assert batch["length"] == ["short"] * 3
    assert [[one.size for one in images] for images in batch["images"]] == [
        [(90, 60), (40, 80)], [(90, 60), (40, 80)], []
    ]  # fmt: skip
    picture(tmp_path, 90, 60, 7)
    (tmp_path / "7.png").replace(tmp_path / "0.png")
    with pytest.raises(DataError, match="changed since"):
        shown[0]


def test_unlike_many_images_are_refused_where_trl_could_mix_them_up(
    family: str, prompts: Dataset, tmp_path: Path
):
    """Of SmolVLM, which fills rows up: 2 + 0 images of 2 rows look like one of each."""
    processor = processor_of(tiny_image_model(family, tmp_path, weights=False))
    done = read(prompts, processor, as_prompt, AS_PROMPTS, template={})
    for picked in ([0, 1], [1, 2], [2, 0]):
        refused = pytest.raises(DataError, match="as many in each")
        with refused if family == "smolvlm" else contextlib.nullcontext():
            refuse_uneven(done.select(picked), processor, METHODS["grpo"])
    refuse_uneven(done.select([2, 2]), processor, METHODS["grpo"])


def test_texts_without_images_come_without_what_is_left_of_pixels():
    pixels = {"pixel_values": torch.zeros(0, 4), "image_grid_thw": torch.zeros(0, 3)}
    batch = {"input_ids": torch.tensor([[1, 2]]), "mm_token_type_ids": torch.zeros(1, 2), **pixels}
    found = without_empty(None, (), batch, token=7)
    assert found is not None
    assert found[1].keys() == {"input_ids", "mm_token_type_ids"}
    assert without_empty(None, (), batch, token=2) is None


def test_the_ledger_of_prompts_counts_image_tokens(tmp_path: Path):
    home = tiny_image_model("llava_next", tmp_path, weights=False)
    plain = recipe(tmp_path, home)
    train: Any = {"method": "grpo", "reward_funcs": ["builtin:one_sentence"]}
    found = counted(RunConfig(model=plain.model, data=plain.data, train=train))
    assert (found.ledger.rows, found.ledger.images, found.ledger.text_alone) == (3, 3, 1)
    reader = processor_of(home)
    marked = [
        sum(token in reader.image_token_ids for token in ids) for ids in found.prepared["input_ids"]
    ]
    assert found.ledger.image_tokens >= sum(marked) > 0
    assert found.ledger.tokens == sum(map(len, found.prepared["input_ids"]))


# ------------------------------------------------------------------------------------- whole runs


def recipe(folder: Path, home: Path, **train: Any) -> RunConfig:
    """A recipe of three rows: two images, none, and one in a long text."""
    for number in range(3):
        picture(folder, 120, 120, number)
    words = " ".join(["rope"] * 60)
    turns = [
        ("<image>What ship? <image>", "A tug.", ["0.png", "1.png"]),
        ("What time?", "Noon.", []),
        (f"{words} <image>?", "A buoy.", ["2.png"]),
    ]
    rows = [{"prompt": a, "completion": b, "images": c} for a, b, c in turns]
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return RunConfig(
        model=ModelConfig(name=str(home)),
        data=DataConfig(path=str(file), eval_fraction=0),
        train={"max_length": 80, **train},  # pyright: ignore[reportArgumentType]
    )


def counted(config: RunConfig) -> Any:
    tokenizer, _ = load_tokenizer(config.model)
    rows = rows_for(config, tokenizer)
    reader = reader_for(config, rows, tokenizer)
    return count(rows, arguments_for(rows, config), reader, METHODS[config.train.method])


def test_rows_whose_image_would_be_cut_are_dropped_and_counted(tmp_path: Path):
    home = tiny_image_model("llava_next", tmp_path, weights=False)
    found = counted(recipe(tmp_path, home))
    ledger = found.ledger
    assert (ledger.rows, ledger.dropped, ledger.images_cut, ledger.images) == (3, 1, 1, 3)
    assert [len(row["image_ends"]) for row in found.prepared] == [2, 0]
    assert any("would cut an image" in line for warns, line in ledger.lines() if warns)
    assert counted(recipe(tmp_path, home, max_length=None)).ledger.dropped == 0


def test_pairs_whose_image_would_be_cut_are_counted_as_rows_are(tmp_path: Path):
    """By any limit: images and their tokens of all rows, those dropped, those with one cut."""
    home = tiny_image_model("llava_next", tmp_path, weights=False)

    def facts(limit: int | None, *, pairs: bool) -> tuple[int, ...]:
        config = recipe(tmp_path, home, max_length=limit, **{"method": "dpo"} if pairs else {})
        file = Path(str(config.data.path))
        if pairs:
            rows = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
            rows = [row | {"chosen": row.pop("completion"), "rejected": "A cow."} for row in rows]
            file.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
        found = counted(config).ledger
        names = ("rows", "dropped", "images", "image_tokens", "text_alone", "images_cut")
        return tuple(getattr(found, name) for name in names)

    expected = [facts(limit, pairs=False) for limit in (30, 80, None)]
    assert [one[-1] for one in expected] == [2, 1, 0]
    assert [facts(limit, pairs=True) for limit in (30, 80, None)] == expected


def test_tokens_of_images_are_counted_by_their_pixels(tmp_path: Path):
    home = tiny_image_model("qwen3_vl", tmp_path, weights=False)
    few, many = (
        counted(recipe(tmp_path, home, max_length=None, max_pixels=most)).ledger
        for most in (64 * 64, 128 * 128)
    )
    assert few.images == many.images == 3
    assert many.tokens - few.tokens == many.image_tokens - few.image_tokens > 0


def test_a_picture_that_was_replaced_between_two_runs_is_read_anew(tmp_path: Path):
    config = recipe(tmp_path, tiny_image_model("qwen3_vl", tmp_path, weights=False))
    first = counted(config).prepared[SEEN]
    picture(tmp_path, 120, 120, 7)
    (tmp_path / "7.png").replace(tmp_path / "0.png")
    again = counted(config).prepared[SEEN]
    assert [one == other for one, other in zip(first[0], again[0], strict=True)] == [False, True]


@pytest.mark.parametrize(
    "setting", [{"packing": True}, {"padding_free": True}, {"truncation_mode": "keep_end"}]
)
def test_what_rows_with_images_do_not_take_is_refused_by_name(
    setting: dict[str, Any], tmp_path: Path
):
    home = tiny_image_model("qwen3_vl", tmp_path, weights=False)
    with pytest.raises(ConfigError, match="not for rows with images") as error:
        counted(recipe(tmp_path, home, **setting))
    assert error.value.where == f"train.{next(iter(setting))}"


@pytest.mark.parametrize("method", sorted({*METHODS} - {"sft", "dpo", "grpo"}))
def test_other_methods_refuse_images_by_name(method: str, tmp_path: Path):
    home = tiny_image_model("qwen3_vl", tmp_path, weights=False)
    config = recipe(tmp_path, home, method=method)
    row = {"prompt": "<image>Ship?", "completion": "A tug.", "images": ["0.png"], "label": True}
    row |= {"chosen": "A tug.", "rejected": "A cow."} if method in ("orpo", "reward") else {}
    row |= {"text": "A tug."} if method == "continue" else {}
    Path(str(config.data.path)).write_text(json.dumps(row) + "\n", "utf-8")
    with pytest.raises(DataError, match=f"train.method={method} trains on text alone"):
        counted(config)


def test_sizes_of_images_need_images(tmp_path: Path):
    home = tiny_image_model("qwen3_vl", tmp_path, weights=False)
    config = recipe(tmp_path, home, max_pixels=4096)
    file = Path(str(config.data.path))
    file.write_text(json.dumps({"prompt": "Time?", "completion": "Noon."}) + "\n", "utf-8")
    with pytest.raises(ConfigError, match="no row has an image"):
        counted(config)
