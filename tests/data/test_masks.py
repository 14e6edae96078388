"""Masks, token by token: every shape of rows under the chat templates of five families."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import trl
from jinja2 import TemplateError
from transformers import AutoTokenizer

from finetune.config.paths import TINY_LLAMA
from finetune.data.chat import plain, probe
from finetune.data.checks import MASKED
from finetune.data.masks import masked
from finetune.errors import DataError
from tests.data.shapes import (
    CALL,
    CALLS,
    FAMILIES,
    LIMIT,
    SHAPES,
    SYSTEM,
    THOUGHTS,
    TOOL,
    TURNS,
    answer,
    call_of,
    check_sums,
    counted,
    end,
    expected,
    of,
    trained_texts,
    user,
    with_thoughts,
)

TEMPLATE_FILES = Path(trl.__file__).parent / "chat_templates"
BY_COLUMNS = SHAPES[SHAPES.index("Alpaca") :]
"""Shapes that become one of the others before a template sees them: one family is enough."""
MATRIX = [
    (shape, family)
    for shape in SHAPES
    for family in (["chatml"] if shape in BY_COLUMNS else FAMILIES)
]


@pytest.fixture
def count(tmp_path, monkeypatch):
    """A function from a family and rows to these rows, tokenized and counted."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    return lambda family, *rows, **settings: counted(family, tmp_path, *rows, **settings)


def texts_of(found) -> list[list[str]]:
    return [list(trained_texts(found.tokenizer, row)) for row in found.prepared]


@pytest.mark.parametrize(("shape", "family"), MATRIX)
def test_masks_and_ledger(count, shape, family) -> None:
    """Of a good, a bad and a long row: one is trained on, as written; one refused, one dropped."""
    texts = expected(family, shape)
    run = partial(count, family, *of(family)[shape], max_length=LIMIT, on_bad_row="skip")
    if isinstance(texts, str):
        with pytest.raises(DataError, match=texts):
            run()
        return
    found = run()
    assert [text for row in texts_of(found) for text in row] == texts
    rows = len(found.prepared)  # an answer that the template alters later has a row of its own
    check_sums(found, read=3, refused=1, dropped=rows)
    assert found.ledger.split == 2 * (rows - 1)
    assert found.ledger.stops == rows * (shape != "tokenized")
    left_out = shape == "reasoning" and family not in THOUGHTS
    assert any("does not use 'thinking'" in note for note in found.rows.notes) == left_out


def test_system_text_stands_before_the_first_question_where_there_is_no_system_role(count) -> None:
    found = count("gemma", {"messages": [SYSTEM, *TURNS[:2]]}, {"messages": TURNS})
    asked = found.tokenizer.decode(found.prepared[0]["input_ids"])
    assert "<start_of_turn>user\nBe brief.\n\nTide?<end_of_turn>" in asked
    assert any("no system role" in note for note in found.rows.notes)


def test_a_template_that_refuses_a_row_is_told_in_its_own_words(count) -> None:
    """It was told of keys that the template does not use: with them and without, it failed."""
    rows = {"messages": TURNS}, {"messages": [TURNS[0], *TURNS]}
    with pytest.raises(DataError, match=r"refuses row 2[\s\S]*roles must alternate"):
        count("gemma", *rows)
    check_sums(count("gemma", *rows, on_bad_row="skip"), read=2, refused=1)


@pytest.mark.parametrize("family", THOUGHTS)
def test_a_call_is_the_completion_of_a_prompt(count, family) -> None:
    row = {"prompt": CALLS[:1], "completion": CALLS[1:2], "tools": [TOOL]}
    found = count(family, row)
    ((text,),) = texts_of(found)
    assert call_of(family).endswith(text)
    assert "Tide of a port." in found.tokenizer.decode(found.prepared[0]["input_ids"])


def test_reasoning_of_earlier_turns_is_trained_on_where_it_is_shown(count) -> None:
    """Behind the question that it answers; the last answer's row has it no more, as when asked."""
    turns = [TURNS[0], TURNS[1] | {"thinking": "Moon."}, *TURNS[2:]]
    found = count("gptoss", {"messages": turns})
    assert texts_of(found) == [[with_thoughts("gptoss")], [end("gptoss", "West.")]]
    assert "Moon." not in found.tokenizer.decode(found.prepared[1]["input_ids"])
    assert found.rows.notes == ()


def test_calls_behind_the_first_of_a_turn_are_not_left_out_in_silence(count) -> None:
    """gpt-oss has one call a turn; the second would be missing from the answer."""
    both = [CALLS[0], answer(None, tool_calls=[CALL, CALL | {"id": "2"}]), *CALLS[2:]]
    with pytest.raises(DataError, match="calls behind the first of a turn"):
        count("gptoss", {"messages": both, "tools": [TOOL]})


def test_padding_that_is_the_end_of_text_is_said_and_no_other(cli, tmp_path) -> None:
    (tmp_path / "rows.jsonl").write_text((json.dumps({"messages": TURNS}) + "\n") * 4)
    words = ("data", "tiny_full_bf16", "data.path=rows.jsonl")
    said = "padding is the end-of-text token"
    assert said not in cli(*words).out
    assert said in cli(*words, "model.pad_token=<|im_end|>").out


def test_a_template_that_nobody_marked_is_masked_in_a_run_of_its_own(cli, tmp_path) -> None:
    """Llama 3.1's, of which TRL has no marked copy; every token is trained on where it is asked."""
    model = shutil.copytree(TINY_LLAMA, tmp_path / "llama")
    shutil.copy(TEMPLATE_FILES / "llama3_1.jinja", model / "chat_template.jinja")
    turns = [SYSTEM, TURNS[0], TURNS[1] | {"weight": 0}, *TURNS[2:]]
    rows = {"rows": turns, "plain": [SYSTEM, *TURNS]}
    for name, one in rows.items():
        text = (json.dumps({"messages": one}) + "\n") * 4
        (tmp_path / f"{name}.jsonl").write_text(text, encoding="utf-8")
    common = ("tiny_full_bf16", f"model.name={model}", "train.max_length=512", "--json")
    found = json.loads(cli("data", *common, "data.path=rows.jsonl").out)
    decode = AutoTokenizer.from_pretrained(model).decode
    trained = [x for x in found["rows"][0]["labels"] if x != MASKED]
    assert decode(trained).startswith("West.<|eot_id|>")
    assert found["train"]["trained"] == 3 * len(trained)
    every = (*common, "train.assistant_only_loss=false")
    all_of_it = json.loads(cli("data", *every, "data.path=plain.jsonl").out)
    assert all_of_it["train"]["trained_share"] == 1
    too = "the user's turns too"
    assert too in cli("data", *every[:-2], every[-1], "data.path=plain.jsonl").out
    assert too not in cli("data", *common[:-1], "data.path=plain.jsonl").out
    refused = cli("data", *every, "data.path=rows.jsonl")
    assert refused.code == 2
    assert "a turn of the rows is not to be trained on" in refused.err


def test_only_conversations_have_answers_to_train_on(cli, tmp_path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "Once."}\n' * 4, encoding="utf-8")
    words = ("tiny_full_bf16", "data.path=rows.jsonl", "train.assistant_only_loss=true")
    refused = cli("data", *words)
    assert (refused.code, "needs rows of messages" in refused.err) == (2, True)


MARKED = (
    "{% for m in messages %}{{ m.role }}: {% generation %}{{ m.content }}{% endgeneration %}"
    "<|im_end|>{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.mark.parametrize(
    ("template", "row", "fix"),
    [
        (MARKED.replace("<|im_end|>", ""), {"messages": TURNS}, "train.eos_token=<|im_end|>"),
        (None, {"text": "Once."}, "train.eos_token=<|im_end|>"),
        (MARKED, {"messages": TURNS}, "train.assistant_only_loss=false"),
    ],
)
def test_rows_that_never_end_are_refused_with_a_fix_that_works(
    template, row, fix, cli, tmp_path
) -> None:
    model = shutil.copytree(TINY_LLAMA, tmp_path / "model")
    if template is not None:
        (model / "chat_template.jinja").write_text(template)
    if "eos_token" in fix:
        kept = json.loads((model / "tokenizer_config.json").read_text())
        (model / "tokenizer_config.json").write_text(json.dumps(kept | {"eos_token": None}))
    (tmp_path / "rows.jsonl").write_text((json.dumps(row) + "\n") * 8)
    words = ("tiny_full_bf16", f"model.name={model}", "data.path=rows.jsonl")
    for verb in ("run", "data"):
        refused = cli(verb, *words)
        assert refused.code == 2
        assert "a model that learns these rows never stops" in refused.err
        assert fix in refused.err.replace("'", "")
    found = cli("data", *words, fix)
    assert (found.code, "stop token" in found.out) == (0, False)


def test_answers_that_are_all_cut_before_their_end_are_a_warning(cli, tmp_path) -> None:
    row = {"prompt": "Tide?", "completion": "High, " * 50}
    (tmp_path / "rows.jsonl").write_text((json.dumps(row) + "\n") * 8)
    found = cli("data", "tiny_full_bf16", "data.path=rows.jsonl", "train.max_length=32")
    assert (found.code, "! no row ends with a trained stop token" in found.out) == (0, True)


# ------------------------------------------------------------------------------ every template

THINKS = "<think>\n\n</think>\n\n"
CHATML = ("", "<|im_end|>\n")
TURN = ("", "<turn|>\n")
EMPTY = ("</think>", "<|im_end|>\n")
AROUND = {
    "cohere": ("", "<|END_OF_TURN_TOKEN|>"),
    "cohere2": ("", "<|END_RESPONSE|><|END_OF_TURN_TOKEN|>"),
    "deepseek_r1_distill": ("", "<｜end▁of▁sentence｜>"),
    "deepseekv3": ("", "<｜end▁of▁sentence｜>"),
    "gemma": ("", "<end_of_turn>\n"),
    "gemma3": ("", "<end_of_turn>\n"),
    "glm4moe": ("\n<think></think>\n", "<eos>"),  # it has no end of its own
    "gptoss": ("<|channel|>final<|message|>", "<|return|>"),
    "llama3": ("", "<|eot_id|>"),
    "llama3_1": ("", "<|eot_id|>"),
    "llama3_2": ("", "<|eot_id|>"),
    "muse_glimmer": (" to=user<|message|>", "<|eot|>"),
    "phi3": ("", "<|end|>\n<eos>"),
    "phi3_5": ("", "<|end|>\n<eos>"),
    "qwen3": (THINKS, "<|im_end|>\n"),
    **dict.fromkeys(("qwen3_5_think", "qwen3_6", "qwen3_8"), ("\n</think>\n\n", "<|im_end|>\n")),
    **dict.fromkeys(("lfm2", "lfm2_v2", "lfm2_2_5", "lfm2_2_5_v2", "lfm2_2_5_vl"), CHATML),
    **dict.fromkeys(("qwen2_5", "qwen2_5_vl", "qwen3_vl", "qwen3_instruct_2507"), CHATML),
    "qwen3_5_nothink": CHATML,
    **dict.fromkeys(("diffusion_gemma", "gemma4", "gemma4_v2", "gemma4_v3"), TURN),
    **dict.fromkeys(("gemma4_v4", "gemma4_v5"), TURN),
    **dict.fromkeys([f"nemotron_3_{x}" for x in ("nano", "super", "ultra", "5_lightning")], EMPTY),
    "mistral": (" ", "<eos>"),
    "mistral_tools": (" ", "<eos>"),
}
"""What a model writes before and behind a plain answer, by template."""
PICTURES = {"idefics3", "llava_next", "smolvlm"}
"""Templates that take content in parts alone: a text has no place in them."""
MISTRAL = {
    "mistral": "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}"
    "{{ '[INST] ' + m.content + ' [/INST]' }}{% else %}{{ ' ' + m.content + eos_token }}"
    "{% endif %}{% endfor %}",
    # The tools stand before the last question, a system text in it, if nothing follows it.
    "mistral_tools": "{% if messages[0].role == 'system' %}{% set rest = messages[1:] %}{% else %}"
    "{% set rest = messages %}{% endif %}{% set asked = rest | selectattr('role', 'equalto', "
    "'user') | list %}{{ bos_token }}{% for m in rest %}{% if m.role == 'user' %}"
    "{% if tools and m == asked[-1] %}{{ '[AVAILABLE_TOOLS] ' + tools | tojson + "
    "'[/AVAILABLE_TOOLS]' }}{% endif %}{{ '[INST] ' }}{% if loop.last and messages[0].role == "
    "'system' %}{{ messages[0].content + '\n\n' }}{% endif %}{{ m.content + '[/INST]' }}"
    "{% elif m.tool_calls %}{{ '[TOOL_CALLS] ' + m.tool_calls | tojson + eos_token }}"
    "{% elif m.role == 'tool' %}{{ '[TOOL_RESULTS] ' + m.content + '[/TOOL_RESULTS]' }}"
    "{% else %}{{ ' ' + m.content | trim + eos_token }}{% endif %}{% endfor %}",
}
"""How Mistral's templates print turns."""
TEMPLATES = sorted(
    {file.stem for file in TEMPLATE_FILES.glob("*.jinja") if not file.stem.endswith("_training")}
    | MISTRAL.keys()
)


@pytest.fixture(scope="module")
def trained():
    """A function from a template and a conversation to the texts trained on, a row each."""
    tokenizer = AutoTokenizer.from_pretrained(TINY_LLAMA)
    ends = {behind.strip() for _, behind in AROUND.values()} | {"<eos>", "<bos>", "</think>"}
    tokenizer.add_special_tokens({"additional_special_tokens": sorted(ends)})
    tokenizer.eos_token, tokenizer.bos_token = "<eos>", "<bos>"

    def texts(name: str, turns: list, **beside) -> list[list[str]]:
        text = MISTRAL.get(name) or (TEMPLATE_FILES / f"{name}.jinja").read_text(encoding="utf-8")
        tokenizer.chat_template = text
        takes = probe(tokenizer)
        row = {"messages": [plain(turn, takes) for turn in turns], **beside}
        columns = masked({k: [v] for k, v in row.items()}, tokenizer, completion_only=False)
        rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        return [list(trained_texts(tokenizer, row)) for row in rows]

    return texts


def test_every_template_has_its_ends_here() -> None:
    assert {*AROUND} | PICTURES == {*TEMPLATES}


@pytest.mark.parametrize("name", AROUND)
def test_a_chat_is_trained_on_where_the_model_writes(trained, name) -> None:
    """Content and end, in each of several turns, behind a system text where there may be one."""
    before, behind = AROUND[name]
    answers = [f"{before}{text}{behind}" for text in ("High.", "West.", "<b>9</b> kn")]
    more = [user("How strong?"), answer("<b>9</b> kn")]
    rows = trained(name, [*TURNS, *more])
    if name == "glm4moe":  # its answers end with the next question, the last one at the end of text
        answers[:2] = [text.removesuffix("<eos>") for text in answers[:2]]
    assert [text for row in rows for text in row] == answers
    try:
        rows = trained(name, [SYSTEM, *TURNS[:2]])
    except (TemplateError, DataError) as error:
        assert name in ("gemma", "mistral", "mistral_tools"), error  # noqa: PT017
    else:
        assert rows == [[answers[0].removesuffix("<eos>") + "<eos>" * (behind[-5:] == "<eos>")]]


WITHOUT_CALLS = ("qwen2_5_vl", "llama3", "mistral", "deepseek_r1_distill", "phi3", "phi3_5", "lfm2")
"""Templates that leave the calls of such a turn out, for which rows with calls are refused."""


@pytest.mark.parametrize("name", AROUND)
def test_thoughts_and_calls_are_trained_on_whole_or_refused(trained, name) -> None:
    """Each thought, call and answer once, and no word of anyone else."""
    key = {"gptoss": "thinking"}.get(name, "reasoning_content")
    end = AROUND[name][1]
    thoughts = [answer(text, **{key: f"{text} thought"}) for text in ("High.", "West.")]
    inline = [answer(f"<think>\n{text} thought\n</think>\n\n{text}") for text in ("High.", "West.")]
    for one, other in (thoughts, inline):
        try:
            rows = trained(name, [TURNS[0], one, TURNS[2], other])
        except DataError as error:
            assert name.startswith("deepseek"), error  # noqa: PT017
            assert "leaves out a part" in error.why  # noqa: PT017
            continue
        texts = [text for row in rows for text in row]
        assert len(texts) == 2
        shown = "thought" in "".join(texts)
        for text, word in zip(texts, ("High.", "West."), strict=True):
            assert text.count(f"{word} thought") == shown
            assert text.removesuffix("<eos>").endswith(f"{word}{end}".removesuffix("<eos>"))
            assert not {"Tide?", "Wind?"} & {*text.replace("<", " ").split()}
    call = {"type": "function", "id": "123456789", "function": CALL["function"]}
    result = {"role": "tool", "name": "tide", "tool_call_id": "123456789", "content": "5 m"}
    turns = [TURNS[0], answer(None, tool_calls=[call]), result, answer("High."), *TURNS[2:]]
    try:
        rows = trained(name, turns, tools=[TOOL])
    except (TemplateError, TypeError):
        return  # a template that knows no calls
    called, *texts = [text for row in rows for text in row]
    assert "Brest" in called or name in WITHOUT_CALLS
    assert ["High." in text for text in texts] == [True, False]
    assert ["West." in text for text in texts] == [False, True]
    for text in (called, *texts):
        assert not {"Tide?", "Wind?", "5 m"} & {*text.replace("<", " ").split()}


@pytest.mark.parametrize("name", sorted(PICTURES))
def test_a_template_without_a_place_for_text_is_refused(trained, name) -> None:
    with pytest.raises((DataError, TemplateError), match=r"leaves out a part|no attribute"):
        trained(name, TURNS)
