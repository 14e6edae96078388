"""Which tokens of a conversation are trained on: what the model writes, under any chat template.

An answer is what the tokenizer's own template prints between a conversation up to it that asks for
an answer (`add_generation_prompt`) and the same conversation with it, so what is trained on stands
behind the text that will be there when the model is asked, and ends as an answer has to:

    up to it   <|im_start|>user\\nTide?<|im_end|>\\n<|im_start|>assistant\\n
    with it    <|im_start|>user\\nTide?<|im_end|>\\n<|im_start|>assistant\\nHigh.<|im_end|>\\n
    trained                                                              High.<|im_end|>\\n

Templates may print an answer otherwise when others follow it: without its reasoning (Qwen 3, GLM,
Gemma 4), with another end (gpt-oss, Phi-3). Such an answer gets a row of its own, that ends with
it; the others share one. A template's `{% generation %}` markers, where it has them, are its
author's word on which part of an answer counts, and take the rest of it away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np

from finetune.data.chat import BadRowError, as_content, said, turns_of
from finetune.data.checks import MASKED
from finetune.data.doubled_tokens import once
from finetune.errors import ConfigError, DataError

Span = tuple[int, int]
Render = partial[Any]
TRAINED_TURNS = "trained_turns"
"""Column with a truth value for each turn of the assistant, where not all of them are true."""
WHOLE = "text"
"""Role of a turn that is no turn: a text that is trained on whole, beside conversations."""
FIX = (
    "a chat_template.jinja beside the tokenizer that prints answers whole, behind its generation "
    "prompt; or train on every token: train.assistant_only_loss=false"
)


def answers(
    row: dict[str, Any], tokenizer: Any, *, completion_only: bool = True
) -> list[tuple[int, list[Span]]]:
    """Rows that a conversation becomes.

    Args:
        completion_only: of a prompt and a completion, answers in the prompt are not trained on.

    Returns:
        For each row the number of turns that it has, and (begin, end) of the answers that are
        trained on in it, in characters of these turns as text.

    Raises:
        BadRowError: the template prints an answer in part, or alters what stands before it.
    """
    turns = turns_of(row)
    places = [k for k, turn in enumerate(turns) if turn["role"] == "assistant"]
    before = len(row.get("prompt") or ()) if completion_only else 0
    trained = row.get(TRAINED_TURNS) or [k >= before for k in places]
    render, found, text = _renderer(row, tokenizer), list[tuple[int, list[Span]]](), ""
    # From the last answer backwards: earlier ones share its row as long as the template prints them
    # as they were written.
    for place in [k for k, flag in zip(places, trained, strict=True) if flag][::-1]:
        whole = render(turns[: place + 1])
        # The template prints this answer otherwise once others follow, so it gets a row that ends
        # with it.
        if not text.startswith(whole):
            text = whole
            found.append((place + 1, []))
        begin = _begin(turns, place, whole, render)
        _refuse_part(said(turns[place].get("content")), whole, begin)
        found[-1][1].append((begin, len(whole)))
    return found[::-1]


def _renderer(row: dict[str, Any], tokenizer: Any) -> Render:
    """A function from turns to text, with what a row has beside them."""
    given = {"tokenize": False, **(row.get("chat_template_kwargs") or {})}
    return partial(tokenizer.apply_chat_template, tools=row.get("tools") or None, **given)


def _begin(turns: list[Any], place: int, whole: str, render: Render) -> int:
    """Where the model begins to write an answer.

    A generation prompt may open what an answer does not have (`<think>` of DeepSeek-R1): it begins
    where the two part, which another answer shows too, if theirs begin alike by chance.
    """
    asked = render(turns[:place], add_generation_prompt=True) if place else ""
    # The usual case: the conversation with the answer begins as the one that asks for it.
    if place and whole.startswith(asked):
        return len(asked)
    # What both answers have in common is what the template prints before any answer.
    content = as_content(".", isinstance(turns[place].get("content"), list))
    other = render([*turns[:place], {"role": "assistant", "content": content}])
    if not place:  # nothing asks for it
        return shared(whole, other)
    begin = shared(asked, whole, other)
    if begin < shared(asked, render(turns[:place])):
        raise BadRowError(
            "the chat template prints what stands before an answer in two ways: "
            f"{asked[begin:][:40]!r} when it asks for it, {whole[begin:][:40]!r} when it is there"
        )
    return begin


def shared(*texts: Any) -> int:
    """Number of characters, or of tokens, that all begin with."""
    columns = enumerate(zip(*texts, strict=False))
    return next((i for i, column in columns if len({*column}) > 1), min(map(len, texts)))


def _refuse_part(content: str, whole: str, begin: int) -> None:
    """Refuse an answer without all of its content; white space is the template's affair.

    Of a content with its thoughts the generation prompt may have the first word (`<think>`).
    """
    shown = whole[max(begin - len(content), 0) :]
    # White space aside, which templates strip and add as they like.
    if "".join(content.split()) not in "".join(shown.split()):
        raise BadRowError(
            f"the chat template leaves out a part of an answer: of {content[:40]!r} it prints "
            f"{whole[begin:][:40]!r}"
        )


def masked(
    rows: dict[str, list[Any]], tokenizer: Any, *, completion_only: bool
) -> dict[str, list[list[int]]]:
    """Token ids and labels of a batch of conversations, for `datasets.Dataset.map`.

    A template without an end of its own gets the tokenizer's, as plain text does. A text among them
    (`WHOLE`) is tokenized as TRL does where all rows are text.

    Raises:
        DataError: a conversation of which the template makes no answers.
    """

    def made(row: dict[str, Any]) -> Iterator[dict[str, list[int]]]:
        for ids, labels in _tokenized(row, tokenizer, completion_only):
            yield {"input_ids": ids, "labels": labels}

    what = "a row cannot be trained on the assistant's turns alone"
    return {"input_ids": [], "labels": []} | each_row(rows, made, what, FIX)


def each_row(
    rows: dict[str, list[Any]],
    made: Callable[[dict[str, Any]], Iterable[dict[str, Any]]],
    what: str,
    fix: str,
) -> dict[str, list[Any]]:
    """A batch of what is made of each row of a batch, for `datasets.Dataset.map`.

    Raises:
        DataError: nothing can be made of one, by `what` and `fix`.
    """
    done: dict[str, list[Any]] = {}
    for values in zip(*rows.values(), strict=True):
        row = dict(zip(rows, values, strict=True))
        try:
            for one in made(row):
                for key, value in one.items():
                    done.setdefault(key, []).append(value)
        except (BadRowError, NotImplementedError) as error:  # the second of slow tokenizers
            raise DataError(
                what,
                where=f"data: the row that begins {str(turns_of(row)[0].get('content'))!r:.80}",
                why=str(error),
                fix=fix,
            ) from error
    return done


def answer_end(tokenizer: Any) -> int | None:
    """The token that the chat template ends an answer with; None without a template."""
    if tokenizer.chat_template is None:
        return None
    turns = [{"role": role, "content": "."} for role in ("user", "assistant")]
    ((ids, _),) = _tokenized({"messages": turns}, tokenizer, False)
    last = next(token for token in reversed(ids) if tokenizer.decode([token]).strip())
    return last if last in tokenizer.added_tokens_decoder else None


def as_trained(
    row: dict[str, Any], tokenizer: Any, *, completion_only: bool
) -> Iterator[tuple[list[int], list[int]]]:
    """(ids, labels) of the sequences of a row of any form, nothing of it cut.

    Text begins and ends as the tokenizer has it, once; a completion begins where its prompt's
    tokens end, or part from those of both.
    """
    answer = row.get("completion")
    if "messages" in row or (answer and not isinstance(answer, str)):
        yield from _tokenized(row, tokenizer, completion_only)
        return
    text, end = row.get("text") or row.get("prompt", "") + answer, tokenizer.eos_token or ""
    ids = tokenizer(text if text.endswith(end) else text + end)["input_ids"]
    begin = 0
    if "prompt" in row and completion_only:
        begin = shared(tokenizer(row["prompt"])["input_ids"], ids)
    cut = once(
        {"input_ids": ids, "labels": [*(MASKED for _ in ids[:begin]), *ids[begin:]]}, tokenizer
    )
    yield cut["input_ids"], cut["labels"]


def _tokenized(
    row: dict[str, Any], tokenizer: Any, completion_only: bool
) -> Iterator[tuple[list[int], list[int]]]:
    """(ids, labels) of the rows that a conversation, or a text among conversations, becomes."""
    turns = turns_of(row)
    if turns[0]["role"] != WHOLE:
        for count, spans in answers(row, tokenizer, completion_only=completion_only):
            yield _labels(row, count, spans, tokenizer)
        return
    yield from as_trained({"text": turns[0]["content"]}, tokenizer, completion_only=False)


def _labels(
    row: dict[str, Any], count: int, spans: list[Span], tokenizer: Any
) -> tuple[list[int], list[int]]:
    """Ids of the first turns, and labels: a token that has any character of a span counts."""
    ids, _, on = _located(row, count, spans, tokenizer)
    labels = np.where(on, ids, MASKED).tolist()
    if _is_open(ids, tokenizer):
        ids.append(tokenizer.eos_token_id)
        labels.append(tokenizer.eos_token_id)
    return ids, labels


def trained_characters(
    row: dict[str, Any], count: int, spans: list[Span], tokenizer: Any
) -> tuple[str, np.ndarray]:
    """The first turns as text, ended as ids are, and which characters trained tokens have."""
    ids, places, on = _located(row, count, spans, tokenizer)
    text = rendered_turns(row, count, tokenizer)
    found = np.zeros(len(text), bool)
    for begin, end in places[on]:
        found[begin:end] = True
    end = tokenizer.eos_token if _is_open(ids, tokenizer) else ""
    return text + end, np.append(found, np.ones(len(end), bool))


def rendered_turns(row: dict[str, Any], count: int, tokenizer: Any) -> str:
    """The first turns of a conversation as text."""
    return _renderer(row, tokenizer)(turns_of(row)[:count])


def _located(
    row: dict[str, Any], count: int, spans: list[Span], tokenizer: Any
) -> tuple[list[int], np.ndarray, np.ndarray]:
    """Ids of the first turns; (begin, end) of each in characters, [n, 2]; which count, [n]."""
    from trl.chat_template_utils import has_generation_markers

    # Without markers Transformers (5.23) would give a mask of zeros.
    marked = has_generation_markers(tokenizer.get_chat_template(tools=row.get("tools") or None))
    found: Any = _renderer(row, tokenizer)(
        turns_of(row)[:count], tokenize=True, return_dict=True,
        return_assistant_tokens_mask=marked, tokenizer_kwargs={"return_offsets_mapping": True},
    )  # fmt: skip
    ids, places = list(found["input_ids"]), np.asarray(found["offset_mapping"])
    begins, ends = places.T  # characters of each token
    inside = np.zeros(ends.max() + 1, int)  # of each character, and how many lie before it
    for begin, end in spans:
        inside[begin + 1 : end + 1] = 1
    before = inside.cumsum()
    # A token that holds the answer's first or last character counts, whatever else it holds.
    on = before[ends] > before[begins]
    if marked:
        on &= np.asarray(found["assistant_masks"], bool)
    return ids, places, on


def _is_open(ids: list[int], tokenizer: Any) -> bool:
    """True where no special token ends a conversation, white space apart."""
    last = next((token for token in reversed(ids) if tokenizer.decode([token]).strip()), None)
    return last not in tokenizer.added_tokens_decoder and tokenizer.eos_token_id is not None


def refuse_weights(row: dict[str, Any]) -> dict[str, Any]:
    """Nothing, for `datasets.Dataset.map`.

    Raises:
        ConfigError: a turn is not to be trained on, or is a text that no template takes.
    """
    where = "train.assistant_only_loss=false"
    if turns_of(row)[0]["role"] == WHOLE:
        raise ConfigError(
            "text and turns are in one run, and turns are to be trained on whole",
            where=where,
            why="one of the two would be put into a chat template, or trained on in part",
            fix="~train.assistant_only_loss, or rows of one format",
        )
    if not all(row[TRAINED_TURNS] or ()):
        raise ConfigError(
            "a turn of the rows is not to be trained on, and every token is",
            where=where,
            why="the turn's weight of 0 would be passed over",
            fix="~train.assistant_only_loss, or rows of turns without weight, train and loss",
        )
    return {}
