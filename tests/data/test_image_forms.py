"""Rows with images: every form becomes one, and none loses or mixes up a picture."""

from __future__ import annotations

import base64
import io
import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from datasets import Dataset, Features, List, Value
from datasets import Image as ImageFeature
from PIL import Image

from finetune.config.methods import METHODS
from finetune.config.sections import DataConfig
from finetune.data import dataset, image_forms
from finetune.data.chat import BadRowError
from finetune.data.dataset import load_data
from finetune.data.image_forms import Rules, fetched, reference
from finetune.data.images import opened
from finetune.errors import DataError, DataNotFoundError
from finetune.scripting.given import source_of
from finetune.training.checkpoints.resume import rows_hash

IN_PARTS = (
    "{% for turn in messages %}<|im_start|>{{ turn['role'] }}\n{% for part in turn['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A template that takes contents in parts alone, as those of vision-language models do."""
COLOURS = {"red": (255, 0, 0), "green": (0, 128, 0), "blue": (0, 0, 255)}


@pytest.fixture
def reader(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", IN_PARTS)
    return tokenizer


def png(colour: str) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (4, 3), colour).save(file, "PNG")
    return file.getvalue()


@pytest.fixture
def folder(here: Path) -> Path:
    (here / "sub").mkdir()
    for colour in COLOURS:
        (here / "sub" / f"{colour}.png").write_bytes(png(colour))
    return here


def read(reader: Any, path: Path | str = "rows.jsonl", method: str = "sft", **more: Any) -> Any:
    data = DataConfig.model_validate({"path": str(path), "eval_fraction": 0.0} | more)
    return load_data(data, reader, 0, images=True, method=METHODS[method])


def write(*rows: dict[str, Any], to: str = "rows.jsonl") -> None:
    Path(to).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def told(row: dict[str, Any], *keys: str) -> str:
    """A row as text, with the colour of each picture where it stands."""
    names = {value: name for name, value in COLOURS.items()}
    pictures = iter([names[tuple(np.asarray(opened(one))[0, 0].tolist())] for one in row["images"]])
    text = ""
    for key in keys or ("messages", "prompt", "completion"):
        for turn in row.get(key) or ():
            parts = [next(pictures) if p["type"] == "image" else p["text"] for p in turn["content"]]
            text += f"{turn['role'][0]}:" + "|".join(parts) + " "
    assert next(pictures, None) is None
    return text.strip()


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


ANSWER = {"role": "assistant", "content": "A tug."}
RED, WHAT = "sub/red.png", {"type": "text", "text": "What?"}
URL = "data:image/png;base64," + base64.b64encode(png("red")).decode()
BARE = base64.b64encode(png("red")).decode()
PARTS: dict[str, dict[str, Any]] = {
    "path in image": {"type": "image", "image": RED},
    "path": {"type": "image", "path": RED},
    "url": {"type": "image", "url": URL},
    "base64": {"type": "image", "base64": BARE},
    "data URL in image": {"type": "image", "image": URL},
    "OpenAI": {"type": "image_url", "image_url": {"url": URL, "detail": "low"}},
    "OpenAI, a text": {"type": "image_url", "image_url": URL},
    "OpenAI, a path": {"type": "image_url", "image_url": {"url": RED}},
    "Responses": {"type": "input_image", "image_url": URL, "detail": "auto"},
    "Anthropic": {"type": "image", "source": {"type": "base64", "data": BARE}},
    "Anthropic, URL": {"type": "image", "source": {"type": "url", "url": URL}},
    "no type": {"image": RED},
    "struct": {"type": "image", "image": {"bytes": BARE, "path": None}},
    "struct of a path": {"type": "image", "image": {"bytes": None, "path": RED}},
    "keys of other parts": {"type": "image", "image": RED, "text": None, "image_url": None},
}


@pytest.mark.parametrize("form", PARTS)
@pytest.mark.usefixtures("folder")
def test_a_picture_in_a_part_is_the_parts_own(reader, form) -> None:
    write({"messages": [user([WHAT, PARTS[form], {"type": "text", "text": "!"}]), ANSWER]})
    assert told(next(iter(read(reader).train))) == "u:What?|red|! a:A tug."


BLUE = "sub/blue.png"
BESIDE: dict[str, tuple[dict[str, Any], str]] = {
    "LLaVA": (
        {"image": RED, "conversations": [
            {"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "A tug."}]},
        "u:red|What? a:A tug.",
    ),
    "LLaVA, behind": ({"image": RED, "messages": [user("What?\n<image>"), ANSWER]},
                      "u:What?|red a:A tug."),
    "LLaVA, no place": ({"image": RED, "messages": [user("What?"), ANSWER]},
                        "u:red|What? a:A tug."),
    "LLaMA-Factory": ({"images": [RED, BLUE], "messages": [user("<image>or <image>?"), ANSWER]},
                      "u:red|or |blue|? a:A tug."),
    "two turns": (
        {"images": [RED, BLUE],
         "messages": [user("<image>What?"), ANSWER, user("And <image>?"), ANSWER]},
        "u:red|What? a:A tug. u:And |blue|? a:A tug.",
    ),
    "no place, after a system's text": (
        {"images": [RED, BLUE], "system": "Be brief.", "messages": [user("What?"), ANSWER]},
        "s:Be brief. u:red|blue|What? a:A tug.",
    ),
    "TRL": ({"images": [RED], "messages": [user([{"type": "image"}, WHAT]), ANSWER]},
            "u:red|What? a:A tug."),
    "by index": (
        {"images": [RED, BLUE], "messages": [
            user([{"type": "image", "index": 1}, WHAT, {"type": "image", "index": 0}]), ANSWER]},
        "u:blue|What?|red a:A tug.",
    ),
    "Alpaca": ({"instruction": "What?", "input": "<image>", "output": "A tug.", "images": [RED]},
               "u:What?\n\n|red a:A tug."),
    "question, answer": ({"question": "What?", "answer": "A tug.", "image": RED},
                         "u:red|What? a:A tug."),
    "prompt, completion in turns": (
        {"prompt": [user("What?")], "completion": [ANSWER], "image": RED}, "u:red|What? a:A tug."),
    "caption": ({"image": RED, "text": "A tug."}, "u:red a:A tug."),
    "caption with its place": ({"image": RED, "text": "<image>\nA tug."}, "u:red a:A tug."),
    "struct": ({"image": {"bytes": BARE, "path": "x.png"}, "question": "What?", "answer": "A tug."},
               "u:red|What? a:A tug."),
    "turns in a cell": (
        {"image": RED, "messages": json.dumps([user("<image>What?"), ANSWER])},
        "u:red|What? a:A tug."),
    "text alone": ({"images": [], "messages": [user("What?"), ANSWER]}, "u:What? a:A tug."),
}  # fmt: skip


@pytest.mark.parametrize("form", BESIDE)
@pytest.mark.usefixtures("folder")
def test_a_picture_beside_the_text_stands_where_the_text_says(reader, form) -> None:
    row, want = BESIDE[form]
    shown = {"image": RED, **{key: "" for key in row if key not in ("image", "images")}}
    write(row, *([] if form != "text alone" else [shown]))
    if form == "text alone":  # beside a row with an image
        write(row, {"images": [RED], "messages": [user("<image>?"), ANSWER]})
    assert told(next(iter(read(reader).train))) == want


@pytest.mark.usefixtures("folder")
def test_a_line_break_goes_with_its_place_and_no_other_text_does(reader) -> None:
    write({"images": [RED, BLUE], "messages": [user("<image>\n\n a\n<image>"), ANSWER]})
    assert told(next(iter(read(reader).train))) == "u:red|\n a|blue a:A tug."


@pytest.mark.usefixtures("folder")
def test_preferences_have_the_pictures_of_their_question(reader) -> None:
    answers = {"chosen": [ANSWER], "rejected": [{**ANSWER, "content": "A buoy."}]}
    asked = [user([{"type": "image"}, WHAT])]
    rows: list[dict[str, Any]] = [
        {"images": [RED], "prompt": asked, **answers},
        {"images": [RED], **{key: asked + value for key, value in answers.items()}},
    ]
    for row in rows:
        write(row)
        found = next(iter(read(reader, method="dpo").train))
        assert told(found, "prompt", "chosen") == "u:red|What? a:A tug."
        assert found["rejected"][0]["content"] == [{"type": "text", "text": "A buoy."}]


@pytest.mark.usefixtures("folder")
def test_prompts_keep_the_columns_that_a_reward_reads(reader) -> None:
    write({"image": RED, "prompt": "What?", "solution": "tug"})
    found = next(iter(read(reader, method="grpo").train))
    assert told(found) == "u:red|What?"
    assert found["solution"] == "tug"
    assert "image" not in found


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("method", ["sft", "dpo", "grpo"])
def test_a_broken_picture_is_counted_by_each_method(reader, method: str) -> None:
    Path("sub/cut.png").write_bytes(png("red")[:40])
    answers = {"answer": "A tug.", "chosen": "A tug.", "rejected": "A cow."}
    keys = {"sft": ["answer"], "dpo": ["chosen", "rejected"], "grpo": []}[method]
    row = {"question": "What?", **{key: answers[key] for key in keys}}
    write({**row, "image": RED}, {**row, "image": "sub/cut.png"}, {**row, "image": None})
    found = read(reader, method=method, on_bad_row="skip")
    assert (len(found.train), found.refused) == (2, 1)
    with pytest.raises(DataError, match="row 2") as error:
        read(reader, method=method)
    assert "cut off or damaged" in error.value.why


# ---------------------------------------------------------------------------------- where they lie


def test_paths_begin_in_the_folder_of_their_file_or_in_one_that_is_named(reader, folder) -> None:
    (folder / "other").mkdir()
    row = {"image": RED, "question": "What?", "answer": "A tug."}
    write(row, to="other/rows.jsonl")
    with pytest.raises(DataError, match="row 1"):
        read(reader, "other/rows.jsonl")
    assert told(next(iter(read(reader, "other/rows.jsonl", image_folder=".").train)))
    with pytest.raises(DataNotFoundError, match="there is no folder 'gone'"):
        read(reader, "other/rows.jsonl", image_folder="gone")
    for path in ("../sub/red.png", str(folder / RED), (folder / RED).as_uri(), "..\\sub\\red.png"):
        write({**row, "image": path}, to="other/rows.jsonl")
        assert told(next(iter(read(reader, "other/rows.jsonl").train))) == "u:red|What? a:A tug."


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_a_folder_of_pictures_is_read_by_its_metadata(reader, folder, kind) -> None:
    rows = [{"file_name": f"{c}.png", "text": c} for c in COLOURS]
    table = Dataset.from_list(rows)
    write = {"jsonl": table.to_json, "csv": table.to_csv, "parquet": table.to_parquet}[kind]
    write(str(folder / "sub" / f"metadata.{kind}"))
    found = read(reader, "sub")
    assert sorted(map(told, found.train)) == sorted(f"u:{c} a:{c}" for c in COLOURS)
    assert not found.notes
    assert found.description.startswith("captions of images, 3 training rows")


def test_a_name_in_two_folders_is_no_guess(reader, folder) -> None:
    for name in ("one", "two"):
        (folder / name).mkdir()
        row = {"image": "x.png", "question": "What?", "answer": name}
        write(row, to=f"{name}/rows.jsonl")
        (folder / name / "x.png").write_bytes(png("red"))
    with pytest.raises(DataError) as raised:
        read(reader, "*/rows.jsonl")
    assert "in several folders" in raised.value.why
    (folder / "two" / "x.png").unlink()
    assert len(list(read(reader, "*/rows.jsonl").train)) == 2


@pytest.mark.parametrize("kind", ["parquet", "base64"])
@pytest.mark.usefixtures("here")
def test_bytes_in_a_row_are_part_of_what_a_resumed_run_compares(reader, kind) -> None:
    def hash_of(colour: str) -> str:
        row: dict[str, Any] = {"messages": [user("<image>What?"), ANSWER]}
        if kind == "base64":
            write(
                row | {"image": "data:image/png;base64," + base64.b64encode(png(colour)).decode()}
            )
            return rows_hash(read(reader).train)
        row |= {"image": {"bytes": png(colour), "path": None}}
        Dataset.from_list([row]).to_parquet(f"{colour}.parquet")
        return rows_hash(read(reader, f"{colour}.parquet").train)

    assert hash_of("red") == hash_of("red") != hash_of("blue")


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("kind", ["Image", "List(Image)", "struct", "bytes"])
def test_parquet_and_saved_sets_hand_out_references(reader, folder, kind, streaming) -> None:
    content = png("red") + b"\0"  # which no encoder would write again
    struct = {"bytes": content, "path": "nowhere.png"}
    feature: Any = {
        "Image": ImageFeature(), "List(Image)": List(ImageFeature()), "bytes": Value("binary"),
        "struct": {"bytes": Value("binary"), "path": Value("string")},
    }[kind]  # fmt: skip
    value = {"List(Image)": [struct], "bytes": content}.get(kind, struct)
    rows = {"image": [value] * 3, "question": ["What?"] * 3, "answer": ["A tug."] * 3}
    made = Dataset.from_dict(
        rows,
        Features({"image": feature, "question": Value("string"), "answer": Value("string")}),
    )
    made.to_parquet("rows.parquet")
    made.save_to_disk("saved")
    for path in ("rows.parquet", "saved"):
        found = read(reader, path, streaming=streaming)
        row = next(iter(found.train))
        assert told(row) == "u:red|What? a:A tug."
        assert row["images"][0]["bytes"] == content


def test_pictures_of_rows_in_memory_are_found_as_those_of_a_file(reader, folder) -> None:
    """As a notebook has them: opened, or by paths from where it runs; in a list or a data set."""
    row = {"question": "What?", "answer": "A tug."}
    every = [row | {"image": image} for image in (Image.new("RGB", (4, 3), "red"), RED)]
    for rows in ([every[0]], [every[1]], Dataset.from_list(every[:1])):
        found = read(reader, **source_of(rows, folder / "runs"))
        assert told(next(iter(found.train))) == "u:red|What? a:A tug."


def test_rows_of_others_name_no_file_of_the_user(tmp_path) -> None:
    inside = tmp_path / "set"
    inside.mkdir()
    (tmp_path / "private.png").write_bytes(png("red"))
    (inside / "a.png").write_bytes(png("red"))
    (inside / "link.png").symlink_to("../private.png")
    rules = Rules((inside,), (inside,))
    assert reference("a.png", rules)["path"] == str(inside / "a.png")
    for path in (
        "../private.png",
        str(tmp_path / "private.png"),
        "link.png",
        "/etc/hosts",
    ):
        with pytest.raises(BadRowError, match="outside of its data set"):
            reference(path, rules)


# ------------------------------------------------------------------------------------- what is said


@pytest.mark.usefixtures("folder")
def test_a_run_on_text_refuses_parts_and_names_columns_of_images(tokenizer) -> None:
    write({"messages": [user([PARTS["OpenAI"], WHAT]), ANSWER]})
    with pytest.raises(DataError, match=r"it has an image, and .* reads text alone"):
        load_data(DataConfig.model_validate({"path": "rows.jsonl"}), tokenizer, 0)
    write({"messages": [user("What?"), ANSWER], "images": [RED]})
    found = load_data(DataConfig.model_validate({"path": "rows.jsonl"}), tokenizer, 0)
    assert any("column 'images', are not read" in note for note in found.notes)


@pytest.mark.usefixtures("folder")
def test_rows_without_any_image_are_read_as_text(reader, tokenizer) -> None:
    write({"messages": [user("What?"), ANSWER], "images": []})
    assert "images" not in read(reader).train.column_names


@pytest.mark.usefixtures("folder")
def test_a_picture_that_was_mended_is_read_again(reader) -> None:
    write(
        {"image": RED, "question": "?", "answer": "A."},
        {"image": BLUE, "question": "?", "answer": "A."},
    )
    whole = Path(RED).read_bytes()
    Path(RED).write_bytes(whole[:40])
    assert read(reader, on_bad_row="skip").refused == 1
    Path(RED).write_bytes(whole)
    assert read(reader, on_bad_row="skip").refused == 0


@pytest.mark.usefixtures("folder")
def test_a_mixture_with_images_has_one_form(reader) -> None:
    write({"image": RED, "question": "What?", "answer": "A tug."}, to="a.jsonl")
    write({"messages": [user("Tide?"), ANSWER]}, to="b.jsonl")
    data = DataConfig.model_validate({"path": ["a.jsonl", "b.jsonl"], "eval_fraction": 0.0})
    rows: Any = load_data(data, reader, 0, images=True)
    assert sorted(map(told, rows.train)) == ["u:Tide? a:A tug.", "u:red|What? a:A tug."]


def test_urls_are_fetched_where_they_are_wished_for(monkeypatch) -> None:
    asked: list[str] = []

    def answer(request: Any, timeout: float) -> io.BytesIO:
        asked.append(request.full_url)
        if "broken" in request.full_url:
            raise OSError("no route")
        return io.BytesIO(png("red") if "red" in request.full_url else bytes((64 << 20) + 1))

    monkeypatch.setattr("urllib.request.urlopen", answer)
    monkeypatch.setattr(image_forms, "WAITS", 0.0)
    with pytest.raises(BadRowError, match=r"data\.image_urls=true"):
        fetched("https://x.org/red.png", Rules())
    assert not asked
    wished = Rules(urls=True)
    assert fetched("https://x.org/red.png", wished) == png("red")
    for name, why in (("large", "more than 64 MiB"), ("broken", "no route")):
        with pytest.raises(BadRowError, match=why):
            fetched(f"https://x.org/{name}.png", wished)
    assert len(asked) == 2 + image_forms.TRIES


def test_a_stream_from_the_hub_hands_out_bytes_of_its_files(monkeypatch) -> None:
    addresses: list[str] = []

    def opened_there(address: str, mode: str) -> io.BytesIO:
        addresses.append(address)
        if "gone" in address:
            raise FileNotFoundError(address)
        return io.BytesIO(png("red"))

    monkeypatch.setattr("fsspec.open", opened_there)
    inside = Rules(inside=(Path("/cache"),))
    for address in ("hf://datasets/a/b@main/x.png", "zip://x.png::hf://datasets/a/b@main/x.zip"):
        assert reference({"bytes": None, "path": address}, inside)["bytes"] == png("red")
    with pytest.raises(BadRowError, match="could not be fetched"):
        reference("hf://datasets/a/b@main/gone.png", inside)
    with pytest.raises(BadRowError, match="not read"):  # of a file of one's own nothing is fetched
        reference("hf://datasets/a/b@main/x.png", Rules())
    assert len(addresses) == 3


def test_places_and_pictures_agree_or_the_row_is_refused(reader, folder) -> None:
    """Any number of places and pictures: as many of each, no place at all, or a bad row."""
    dice = random.Random(0)
    write({"images": [RED], "messages": [user("<image>"), ANSWER]})
    for _ in range(12):
        places, pictures = dice.randrange(4), dice.randrange(4)
        row = {"images": [RED] * pictures, "messages": [user("<image>" * places + "?"), ANSWER]}
        write({"images": [RED], "messages": [user("<image>?"), ANSWER]}, row)
        if places in (0, pictures):
            assert len(list(read(reader).train)[1]["images"]) == pictures
        else:
            with pytest.raises(DataError, match="row 2"):
                read(reader)


LATE: dict[str, dict[str, Any]] = {
    "column": {"images": [RED], "messages": [user("<image>What?"), ANSWER]},
    "column, no place": {"image": RED, "messages": [user("What?"), ANSWER]},
    "part": {"messages": [user([WHAT, PARTS["path"]]), ANSWER]},
}


@pytest.mark.parametrize("kind", LATE)
@pytest.mark.parametrize("held_out", [0.0, 0.3])
@pytest.mark.usefixtures("folder")
def test_no_picture_is_lost_of_a_stream_that_begins_with_text(
    tokenizer, monkeypatch, kind, held_out
) -> None:
    """At any row behind those that are looked at: an error that names it, or a row that counts."""
    monkeypatch.setattr(dataset, "SAMPLE", 2)
    text, given = {"messages": [user("Who?"), ANSWER]}, {"streaming": True, "shuffle_buffer": 1}

    def rows_of(at: int, **more: Any) -> tuple[Any, int]:
        write(*[text] * at, LATE[kind], *[text] * (6 - at))
        found = read(tokenizer, **given, eval_fraction=held_out, **more)
        count = 7 - len(found.eval or ())
        return found, sum(1 for _ in zip(range(count), found.train, strict=False))

    for at in (2, 6):
        with pytest.raises(DataError, match=f"row {at + 1} of .* cannot be trained on") as error:
            rows_of(at)
        assert "it has an image, and the first 2 training rows have none" in error.value.why
        assert "put a row with an image among them" in error.value.fix
        found, _ = rows_of(at, on_bad_row="skip")
        assert found.refused + sum(map(int, found.late)) == 1
        assert not any("are not read" in note for note in found.notes)
    monkeypatch.setattr(tokenizer, "chat_template", IN_PARTS)
    write(text, LATE[kind])  # among the first
    assert read(tokenizer, **given).images


@pytest.mark.usefixtures("folder")
def test_a_picture_to_evaluate_on_is_not_lost_of_a_run_of_text(tokenizer) -> None:
    write({"messages": [user("Who?"), ANSWER]})
    write(LATE["column"], to="eval.jsonl")
    with pytest.raises(DataError, match=r"row 1 of eval.jsonl cannot be trained on") as error:
        read(tokenizer, eval_path="eval.jsonl")
    assert "it has an image, and the training rows have none" in error.value.why


def test_a_column_of_pictures_that_begins_behind_the_known_ones_is_refused(
    tokenizer, folder, monkeypatch
) -> None:
    monkeypatch.setattr("finetune.data.sources.CHECKED", 2)
    write(*[{"messages": [user("Who?"), ANSWER]}] * 3, LATE["column"])
    with pytest.raises(DataError, match=r"has a column 'images' that its first rows do not have"):
        read(tokenizer, streaming=True)


@pytest.mark.slow
@pytest.mark.parametrize("streaming", [False, True])
def test_a_folder_of_2000_pictures_is_read_with_flat_memory(reader, here, streaming) -> None:
    """Kept, they would be 130 MB of files, or 400 MB of numbers."""
    (here / "many").mkdir()
    noise = np.random.default_rng(0).integers(0, 256, (256, 256, 3), np.uint8)
    Image.fromarray(noise).save("noise.jpg", quality=90)
    size = Path("noise.jpg").stat().st_size
    for k in range(2000):
        os.link("noise.jpg", f"many/{k}.jpg")
    rows = [{"file_name": f"{k}.jpg", "prompt": "What?", "completion": str(k)} for k in range(2000)]
    write(*rows, to="many/metadata.jsonl")
    resident = psutil.Process().memory_info
    read(reader, "many", streaming=True, max_rows=300, shuffle_buffer=1)  # what is made once
    before = resident().rss
    order = {"streaming": True, "shuffle_buffer": 1} if streaming else {}
    found = read(reader, "many", **order)
    seen = [row["images"][0]["path"] for row, _ in zip(found.train, range(2000), strict=False)]
    grown = resident().rss - before
    assert {*seen} == {str(here / "many" / f"{k}.jpg") for k in range(2000)}
    assert grown < min(40 << 20, 2000 * size / 3), f"{grown >> 20} MB"
