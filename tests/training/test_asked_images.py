"""Images that a model is asked with: what Transformers alone says to them, and no question lost."""

from __future__ import annotations

import io
import json
import shutil
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from rich.console import Console

from finetune import load_recipe
from finetune.config.yaml import dump_yaml
from finetune.data.chat import without_system
from finetune.data.dataset import Rows
from finetune.errors import ConfigError
from finetune.training.asking.chat import chat
from finetune.training.asking.questions import Question, encode, length_of, question_of
from finetune.training.asking.samples import SampleWriter, answer, prompts_of
from tests.image_models import FOUR, processor_of, tiny_image_model
from tests.run_folders import make_run

NEW = 5
SIZES = {"red": (60, 40), "blue": (33, 80), "gray": (28, 28)}
USUAL: Any = {"do_sample": False, "max_new_tokens": NEW}


def painted(color: str) -> Image.Image:
    return Image.new("RGB", SIZES[color], color)


@pytest.fixture(scope="module")
def asked_model(tmp_path_factory, request):
    """A tiny model of a family, its processor, and its folder."""
    from transformers import AutoModelForImageTextToText

    family = getattr(request, "param", "qwen3_vl")
    home = tiny_image_model(family, tmp_path_factory.mktemp("models"))
    loads: Any = AutoModelForImageTextToText
    return loads.from_pretrained(home).eval(), processor_of(home), home


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pictures of ships")
    found = {color: folder / f"{color} one.png" for color in SIZES}
    for color, file in found.items():
        painted(color).save(file)
    (folder / "no image.png").write_text("a tide table")
    return found | {"text": folder / "no image.png", "none": folder / "gone.png"}


def turn(*parts: Any) -> dict[str, Any]:
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image", "image": part}
        for part in parts
    ]
    return {"role": "user", "content": content}


def by_transformers(model: Any, processor: Any, turns: list[dict[str, Any]]) -> str:
    """The next answer by the processor's own template and call, and by plain `generate`."""
    from transformers import ProcessorMixin

    # The base class's: SmolVLM's own asks for a processor of videos.
    inputs: Any = ProcessorMixin.apply_chat_template(
        processor,
        turns,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    )
    ids = model.generate(**inputs, **USUAL)[0, inputs["input_ids"].shape[1] :]
    return processor.tokenizer.decode(ids, skip_special_tokens=True).strip()


@pytest.mark.parametrize(
    "asked_model",
    [pytest.param(f, marks=pytest.mark.slow if f != "qwen3_vl" else ()) for f in FOUR],
    indirect=True,
)
def test_each_of_several_is_answered_as_transformers_alone_answers_it(asked_model) -> None:
    """Sizes differ, one has two images and one none; a question depends on no other."""
    model, processor, _ = asked_model
    red, blue = painted("red"), painted("blue")
    every = [(red, "What is it?"), ("This ", blue, " and ", red, "?"), ("Hello?",)]
    samples = answer(model, processor, [Question(one) for one in every], NEW, compute="fp32")
    said = [by_transformers(model, processor, [turn(*one)]) for one in every]
    assert [sample.answer for sample in samples] == said
    assert len(set(said)) > 1
    assert samples[0].tokens < samples[1].tokens > samples[2].tokens


def test_pixels_reach_the_model(asked_model) -> None:
    """Same sizes, same ids: what differs is the color alone."""
    model, processor, _ = asked_model
    one, other = (
        encode(processor, Question((Image.new("RGB", (56, 56), color), "What?")))
        for color in ("black", "white")
    )
    assert torch.equal(one["input_ids"], other["input_ids"])
    with torch.no_grad():
        a, b = (model(**inputs).logits[0, -1] for inputs in (one, other))
    assert (a - b).abs().max() > 1e-4


@pytest.fixture
def talk(asked_model, monkeypatch, capsys):
    """Talk over a pipe, or as if typed; returns turns and both outputs."""

    def run(*lines: str, typed: bool = False, reader: Any = None, **settings: Any):
        model, processor, _ = asked_model
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        monkeypatch.setattr("finetune.training.asking.chat.is_typed", lambda: typed)
        settings = {"max_new_tokens": NEW, "compute": "fp32"} | settings
        return chat(model, reader or processor, **settings), capsys.readouterr()

    return run


def test_an_image_stands_before_the_next_question_and_stays_in_the_conversation(
    talk, asked_model, files, monkeypatch
) -> None:
    """Its name with spaces as it is, in quotes, escaped, and from the home folder."""
    model, processor, _ = asked_model
    home, red, blue = files["red"].parent, painted("red"), painted("blue")
    monkeypatch.setenv("HOME", str(home))
    escaped = str(files["red"]).replace(" ", "\\ ")
    turns, _ = talk(
        *(f"/image {files['gray']}", "/reset", f'/image "{files["red"]}"', "/image ~/blue one.png"),
        *("Which ships?", f"/image {escaped}", "And this?", "Why?"),
    )
    replies = [one for one in turns if one["role"] == "assistant"]
    asked = [turn(red, blue, "Which ships?"), turn(red, "And this?"), turn("Why?")]
    before: list[dict[str, Any]] = []
    for question, reply in zip(asked, replies, strict=True):
        said = [{"type": "text", "text": reply["content"]}]
        before.append(question)
        assert reply["content"].strip() == by_transformers(model, processor, before)
        before.append({"role": "assistant", "content": said})


def test_a_wrong_image_is_a_line_where_somebody_types_and_an_error_in_a_pipe(talk, files) -> None:
    """A program would take the answer to a question without its image for one with it."""
    wrong = {
        f"/image {files['none']}": "is not there",
        f"/image {files['text']}": "no image",
        f"/image {files['text'].parent}": "is a folder",
        "/image https://example.com/a.png": "URL",
        "/image": "no image is named",
    }
    for line, why in wrong.items():
        turns, shown = talk(line, "Hello?", typed=True)
        assert [one["content"] for one in turns if one["role"] == "user"] == ["Hello?"]
        assert why in " ".join(shown.err.split()), line
        with pytest.raises(ConfigError, match=why):
            talk(line, "Hello?")


def test_a_model_of_text_alone_takes_no_images(talk, asked_model, files) -> None:
    _, processor, _ = asked_model
    with pytest.raises(ConfigError, match="takes no images"):
        talk(f"/image {files['red']}", "What?", reader=processor.tokenizer)
    with pytest.raises(ConfigError, match="takes no images"):
        encode(processor.tokenizer, Question((painted("red"), "What?")))


# --------------------------------------------------------------------------------- during training


def row(color: str, asked: str, file: Any) -> dict[str, Any]:
    said = [{"type": "text", "text": f"A {color} ship."}]
    shown = {"type": "image", "text": None}
    content = [shown, {"type": "text", "text": asked}]
    turns = [{"role": "user", "content": content}, {"role": "assistant", "content": said}]
    return {"messages": turns, "images": [{"bytes": None, "path": str(file)}]}


def test_samples_are_of_held_out_images_and_their_copies_lie_beside_the_metrics(
    asked_model, files, tmp_path
) -> None:
    """One question of two images is two; a row whose image is broken is none."""
    from datasets import Dataset

    model, processor, home = asked_model
    config = load_recipe(
        "tiny_full_bf16", [f"model.name={home}", "data.prompts=[]"], check_train=False
    ).config
    given = [row("lost", "Which?", files["none"]), *(row(c, "Which?", files[c]) for c in SIZES)]
    rows = Rows(cast(Any, None), Dataset.from_list([given[1], *given]), "", {})
    prompts = prompts_of(config, rows, processor)
    assert [(one.text, one.images[0].size) for one in prompts] == [
        ("Which?", SIZES["red"]), ("Which?", SIZES["blue"])
    ]  # fmt: skip
    written: list[dict[str, Any]] = []
    metrics: Any = SimpleNamespace(
        path=tmp_path / "metrics.jsonl", write=lambda r, _: written.append(r)
    )
    meter: Any = SimpleNamespace(aside=lambda: torch.no_grad())
    writer = SampleWriter(config, prompts, processor, metrics, Console(quiet=True), meter)
    state: Any = SimpleNamespace(is_world_process_zero=True, global_step=3, max_steps=9, epoch=0.1)
    writer.ask(model, state)
    (found,) = written
    assert [one["expected"] for one in found["samples"]] == ["A red ship.", "A blue ship."]
    for one, color in zip(found["samples"], ("red", "blue"), strict=True):
        (name,) = one["images"]
        with Image.open(tmp_path / name) as copy:
            assert copy.size == SIZES[color]
        assert (tmp_path / name).stat().st_size < 32_000
        assert one["tokens"] == length_of(processor, Question((painted(color), "Which?")))
    assert [sample.facts() for sample in writer.samples] == found["samples"]


def test_a_question_is_the_first_of_a_user_with_the_images_that_are_its_own() -> None:
    references = [{"bytes": b"", "path": str(i)} for i in range(3)]
    shown = {"type": "image"}
    system = {"role": "system", "content": [shown, {"type": "text", "text": "As here."}]}
    asked = {"role": "user", "content": [{"type": "text", "text": "And "}, shown, shown]}
    said = {"role": "assistant", "content": "So."}
    found = question_of({"messages": [system, asked, said], "images": references})
    assert found.parts == ("And ", *references[1:])
    assert found.expected == "So."
    pair = {"prompt": [asked], "chosen": [said], "rejected": [asked], "images": references[:2]}
    assert question_of(pair).expected == "So."


def test_the_text_of_a_system_that_a_template_does_not_take_stands_before_the_image() -> None:
    system: dict[str, Any] = {"role": "system", "content": "Be brief."}
    for content in ("Be brief.", [{"type": "text", "text": "Be brief."}]):
        (found,) = without_system([system | {"content": content}, turn("image", "Which?")])
        texts = [part.get("text") for part in found["content"]]
        assert texts == ["Be brief.", "\n\n", "image", "Which?"]


# ------------------------------------------------------------------------------------ command line


@pytest.fixture(scope="module")
def run(asked_model, tmp_path_factory) -> Path:
    """A finished run of the tiny model, whose weights are what it began with."""
    import yaml

    model, processor, home = asked_model
    folder = make_run(tmp_path_factory.mktemp("runs") / "r", recipe="tiny_full_bf16", steps=4)
    config = yaml.safe_load((folder / "config.yaml").read_text())
    config["model"] |= {"name": str(home), "weights": "pretrained"}
    (folder / "config.yaml").write_text(dump_yaml(config))
    model.save_pretrained(folder / "model")
    processor.save_pretrained(folder / "model")
    return folder


def test_generate_answers_each_prompt_about_its_images(run, asked_model, files, cli) -> None:
    model, processor, _ = asked_model
    words = ["--image", files["red"], "--image", files["blue"], "--max-new-tokens", str(NEW)]
    done = cli("generate", run, "Which?", "And why?", *words, "--json")
    assert done.code == 0, done.err
    red, blue = painted("red"), painted("blue")
    said = [by_transformers(model, processor, [turn(red, blue, p)]) for p in ("Which?", "And why?")]
    assert [one["answer"] for one in json.loads(done.out)["answers"]] == said


def loss_by_transformers(model: Any, processor: Any, rows: list[Any]) -> float:
    """Of (parts of a question, answer): mean over the tokens of all answers and their ends."""
    losses = list[torch.Tensor]()
    for parts, said in rows:
        asked = encode(processor, [turn(*parts)])
        ids = processor.tokenizer(f"{said}<|im_end|>", return_tensors="pt")["input_ids"]
        ids = torch.cat([asked["input_ids"], ids], 1)
        same = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        kinds = {"mm_token_type_ids"} & {*asked}  # none of the answer's tokens is an image's
        same |= {key: F.pad(asked[key], (0, ids.shape[1] - asked[key].shape[1])) for key in kinds}
        count = ids.shape[1] - asked["input_ids"].shape[1]
        with torch.no_grad():
            logits = model(**asked | same).logits[0, -count - 1 : -1]
        losses.append(F.cross_entropy(logits, ids[0, -count:], reduction="none"))
    return float(torch.cat(losses).mean())


def test_evaluate_counts_held_out_rows_whose_answer_is_their_own(
    run, asked_model, files, cli, tmp_path
) -> None:
    """Rows are made of what the model says: two of three are right; one is of text alone."""
    import yaml

    model, processor, _ = asked_model
    asked = [turn(painted("red"), "Which?")], [turn("Hello?")]
    # A random model ends nowhere: its third tokens are made ends.
    inputs = [encode(processor, one) for one in asked]
    said = [model.generate(**one, **USUAL)[0, one["input_ids"].shape[1] :] for one in inputs]
    ends = [int(one[2]) for one in said]
    ended = deepcopy(model)
    ended.generation_config.eos_token_id = ends
    said, hello = (by_transformers(ended, processor, one) for one in asked)
    given = [
        ([str(files["red"])], "<image>Which?", said),
        ([str(files["blue"])], "<image>Which?", "No."),
        ([], "Hello?", hello),
    ]
    lines = [
        {"images": images, "messages": [
            {"role": "user", "content": asked}, {"role": "assistant", "content": answer}]}
        for images, asked, answer in given
    ]  # fmt: skip
    for name in ("rows.jsonl", "held_out.jsonl"):
        (tmp_path / name).write_text("".join(json.dumps(one) + "\n" for one in lines))
    copy = tmp_path / "r"
    shutil.copytree(run, copy)
    ended.generation_config.save_pretrained(copy / "model")
    config = yaml.safe_load((copy / "config.yaml").read_text())
    paths = {"path": str(tmp_path / "rows.jsonl"), "eval_path": str(tmp_path / "held_out.jsonl")}
    config["precision"]["compute"] = "fp32"
    config["data"] = {key: value for key, value in config["data"].items() if key != "name"} | paths
    (copy / "config.yaml").write_text(dump_yaml(config))
    done = cli("evaluate", copy, "--rows", "--json")
    assert done.code == 0, done.err
    scores = json.loads(done.out)["held_out_rows"]
    assert (scores["exact_match"], scores["n"]) == (pytest.approx(2 / 3), 3)
    asked = [(painted("red"), "Which?"), (painted("blue"), "Which?"), ("Hello?",)]
    rows = list(zip(asked, (said, "No.", hello), strict=True))
    loss = loss_by_transformers(model, processor, rows)
    assert scores["loss"] == pytest.approx(loss, rel=1e-5)
    assert abs(loss_by_transformers(model, processor, rows[:1]) - loss) > 1e-3 * loss
    kept = json.loads((copy / "report.json").read_text())["tasks"]
    assert kept["held_out_rows"] == scores
    first = json.loads(cli("evaluate", copy, "--rows", "--limit", "1", "--json").out)
    assert first["held_out_rows"]["n"] == 1
    assert first["held_out_rows"]["exact_match"] == 1
    beside = cli("evaluate", copy, "--rows", "--shots", "2")
    assert beside.code == 2
    assert "are about tasks" in beside.err


def test_generate_refuses_what_is_no_image(run, files, cli) -> None:
    for name, why in (("none", "is not there"), ("text", "no image")):
        done = cli("generate", run, "Which?", "--image", files[name])
        assert done.code == 2
        assert why in done.err
        assert str(files[name]) in done.err


def test_generate_refuses_an_image_for_a_model_of_text_alone(files, cli, tmp_path) -> None:
    folder = make_run(tmp_path / "r", recipe="tiny_full_bf16", steps=4)
    (folder / "model").mkdir()
    done = cli("generate", folder, "Which?", "--image", files["red"])
    assert done.code == 2
    assert "'builtin:tiny_llama' takes no images" in done.err
