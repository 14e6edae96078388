"""A conversation says what plain Transformers says to the same turns, and loses none in silence."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from finetune.config.schema import ModelConfig
from finetune.data.answers import Answers
from finetune.errors import ConfigError
from finetune.storage.pretrained import load_tokenizer
from finetune.training.asking.chat import chat
from tests.data.shapes import FAMILIES, THOUGHTS, tokenizer_of

NEW = 5


@pytest.fixture
def tokenizer():
    found, _ = load_tokenizer(ModelConfig(name="builtin:tiny_llama"))
    return found


@pytest.fixture
def plain(make_llama):
    return make_llama(vocab_size=1536, max_position_embeddings=128).eval()


@pytest.fixture
def talk(plain, tokenizer, monkeypatch, capsys):
    """Talk over a pipe with a random model; returns turns and both outputs."""

    def run(*lines: str, model=plain, **settings):
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        settings = {"max_new_tokens": NEW, "compute": "fp32"} | settings
        turns = chat(model, tokenizer, **settings)
        return turns, capsys.readouterr()

    return run


def reference(model, tokenizer, turns) -> str:
    """The next answer by plain Transformers."""
    inputs = tokenizer.apply_chat_template(
        turns, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    ids = model.generate(**inputs, do_sample=False, max_new_tokens=NEW)
    return tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def test_each_answer_is_that_of_transformers_to_all_turns_before_it(talk, plain, tokenizer) -> None:
    turns, shown = talk("Old.", "/reset", "Hello.", "", "And you?", system="Be brief.")
    assert [t["role"] for t in turns] == ["system", *("user", "assistant") * 2]
    for i in (2, 4):
        assert turns[i]["content"] == reference(plain, tokenizer, turns[:i])
    assert shown.out.endswith(f"{turns[2]['content']}\n{turns[4]['content']}\n")
    assert ">" not in shown.out.replace("<unk>", "")


def test_what_does_not_fit_is_dropped_from_the_front_and_said(talk, plain, monkeypatch) -> None:
    lengths, generates = [], plain.generate

    def generate(*args, **kwargs):
        lengths.append(kwargs["input_ids"].shape[1])
        return generates(*args, **kwargs)

    monkeypatch.setattr(plain, "generate", generate)
    turns, shown = talk(*["What is a word?"] * 9, system="Be brief.")
    assert max(lengths) + NEW <= 128
    assert max(lengths) > 90  # no more than must
    assert turns[0]["role"] == "system"
    assert len(turns) < 1 + 18
    assert "turns were dropped" in shown.err
    with pytest.raises(ConfigError, match="leaves no room"):
        talk("word " * 200)


def test_ctrl_c_stops_an_answer_and_a_second_one_leaves(talk, monkeypatch) -> None:
    from transformers import LlamaForCausalLM

    calls, runs = [], LlamaForCausalLM.forward

    def forward(*args, **kwargs):
        calls.append(kwargs["input_ids"].shape[1])
        if len(calls) == 3:
            raise KeyboardInterrupt
        return runs(*args, **kwargs)

    monkeypatch.setattr(LlamaForCausalLM, "forward", forward)
    with pytest.raises(KeyboardInterrupt):  # of a pipe the first one leaves
        talk("Hello.")
    calls.clear()
    typed = iter(["Hello.", "/rest", "Again.", KeyboardInterrupt])

    def type_(prompt):
        word: Any = next(typed)
        if word is KeyboardInterrupt:
            raise word
        return word

    monkeypatch.setattr("builtins.input", type_)
    monkeypatch.setattr("finetune.training.asking.chat.is_typed", lambda: True)
    with pytest.raises(KeyboardInterrupt):
        talk()
    assert len(calls) == 3 + NEW  # the second question was answered,
    assert calls[3] > calls[2]  # behind what the first answer had said


def test_base_and_trained_answers_stand_beside_each_other(talk, plain, make_llama) -> None:
    alone, _ = talk("Hello.")
    adapted = get_peft_model(
        make_llama(vocab_size=1536, max_position_embeddings=128), LoraConfig(r=4)
    ).eval()
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=2.0)
    turns, shown = talk("Hello.", model=adapted, base=True)
    assert turns[1]["content"] != alone[1]["content"]
    texts = {"base": alone[1]["content"], "trained": turns[1]["content"]}
    assert shown.out == "".join(f"{name}: {text.strip()}\n" for name, text in texts.items())
    _, beside = talk("Hello.", model=adapted, base=plain)
    assert beside.out == shown.out


def test_without_a_chat_template_text_is_continued(talk, plain, tokenizer) -> None:
    tokenizer.chat_template = None
    turns, shown = talk("Once upon", "And then")
    assert "the model continues your text" in shown.err
    text = "".join(turn["content"] for turn in turns[:3])
    ids = plain.generate(
        **tokenizer(text, return_tensors="pt"), do_sample=False, max_new_tokens=NEW
    )
    assert tokenizer.decode(ids[0], skip_special_tokens=True).endswith(turns[3]["content"])
    with pytest.raises(ConfigError, match="no chat template"):
        talk("Hello.", system="Be brief.")
    with pytest.raises(ConfigError, match="--top-p would change nothing"):
        talk("Hello.", top_p=0.9)


ASK: Any = [{"role": "user", "content": "Hi?"}]


def ids_of(tokenizer: Any, **reply: str) -> tuple[list[int], list[int]]:
    """Tokens of a prompt, and of an answer behind it, as the template has them."""
    asked, whole = (
        tokenizer.apply_chat_template(turns, add_generation_prompt=begun, return_dict=False)
        for turns, begun in ((ASK, True), ([*ASK, {"role": "assistant", **reply}], False))
    )
    assert whole[: len(asked)] == asked
    return asked, whole[len(asked) :]


@pytest.mark.parametrize("family", FAMILIES)
def test_an_answer_is_read_by_the_marks_of_its_template(family: str) -> None:
    tokenizer, thoughts = tokenizer_of(family), THOUGHTS.get(family)
    answers = Answers.of(tokenizer)
    said = {"content": "Ahoy."} | ({thoughts: "They greet."} if thoughts else {})
    prompt, ids = ids_of(tokenizer, **said)
    read = answers.read(ids, prompt)
    assert {key: text.strip() for key, text in read.items()} == {"role": "assistant", **said}
    assert answers.read(ids_of(tokenizer, content="Ahoy.")[1], prompt)["content"].strip() == "Ahoy."
    assert answers.read(ids[:4], prompt)["content"], "an answer that is cut has its text"


@pytest.mark.parametrize("family", THOUGHTS)
def test_thinking_is_neither_printed_nor_content_of_the_next_prompt(
    family: str, plain, monkeypatch, capsys
) -> None:
    tokenizer, prompts = tokenizer_of(family), list[str]()
    _, ids = ids_of(tokenizer, content="Ahoy, mate.", **{THOUGHTS[family]: "They greet."})

    def generate(input_ids, streamer, **_):
        prompts.append(tokenizer.decode(input_ids[0]))
        for tokens in (input_ids, *torch.tensor(ids).split(1)):
            streamer.put(tokens)
        streamer.end()

    monkeypatch.setattr(plain, "generate", generate)
    plain.config.max_position_embeddings = 1024
    monkeypatch.setattr("sys.stdin", io.StringIO("Hi?\nHi?\n"))
    turns = chat(plain, tokenizer, compute="fp32")
    assert capsys.readouterr().out.split() == ["Ahoy,", "mate."] * 2
    assert turns[1]["content"] == "Ahoy, mate."
    kept = [{"role": "user", "content": "Hi?"}, turns[1], {"role": "user", "content": "Hi?"}]
    assert turns[1][THOUGHTS[family]].strip() == "They greet."
    assert "They greet." not in prompts[1]
    assert prompts[1] == tokenizer.apply_chat_template(
        kept, add_generation_prompt=True, tokenize=False
    )
