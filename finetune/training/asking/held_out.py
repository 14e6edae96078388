"""`evaluate --rows`: how many answers to a run's held-out rows are the row's own, and their loss.

    row         a picture, "Which ship?", "A tug."
    loss        mean over all tokens that the run would train on, of "A tug." and its end
    asked       the turns before the row's first answer, its images in them, greedily
    exact_match 1 for "A tug.", 0 for "A tug boat." or "A tug"

Both are kept as a task's scores are, so that the report and `compare` show them. The standard error
is that of a share: 1.6 points of 1,000 rows half of which are right.

Limits: one row at a time; an answer is cut a few tokens behind the length of the row's own. Answers
that say the same in other words count as wrong. A loss that compares with the model that training
began with, or with an answer that is to be avoided, is not computed.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from rich.console import Console

from finetune.config.methods import Method, method_of
from finetune.config.schema import RunConfig
from finetune.config.train_keys import TrainerArguments
from finetune.data.answers import Answers
from finetune.data.chat import BadRowError
from finetune.data.checks import MASKED
from finetune.data.counting import arguments_for, preparer
from finetune.data.dataset import rows_for
from finetune.data.image_batches import ImageBatches
from finetune.data.image_forms import COLUMN
from finetune.errors import ConfigError, DataError
from finetune.runs.receipt import describe
from finetune.storage.processors import tokenizer_of
from finetune.training.asking.questions import asked_of, encode
from finetune.training.helper.undisturbed import autocast, undisturbed

NAME = "held_out_rows"
"""What the scores are kept under, beside those of tasks."""
BEHIND = 8
"""Tokens that an answer may be longer than the row's, to be seen to be."""


def score_rows(
    model: Any, reader: Any, config: RunConfig, console: Console, limit: int | None = None
) -> dict[str, dict[str, Any]]:
    """Loss of held-out rows, and the share that a model answers word for word, as it evaluates.

    Args:
        reader: the model's tokenizer, or its processor where rows have images.
        config: of the run, whose rows they are.
        console: prints the scores, and why there is no loss.
        limit: only the first rows.

    Returns:
        Under `NAME`: `loss` in nats, of a method whose loss is on text itself; `exact_match`,
        `exact_match_stderr` and `n`, of rows with a question and its answer.

    Raises:
        ConfigError: there are no held-out rows, or nothing can be said of them.
        DataError: an image of one cannot be read.
    """
    rows = rows_for(config, tokenizer_of(reader))
    held_out: Any = rows.eval if rows.eval is not None else ()
    few = held_out if limit is None else held_out.select(range(min(limit, len(held_out))))
    found, compute, method = dict[str, Any](), config.precision.compute, method_of(config.train)
    with undisturbed(model), autocast(compute, model.device.type), torch.no_grad():
        if len(few) and method.is_text:
            found["loss"] = _loss(model, reader, few, arguments_for(rows, config), method)
        right = _answered(model, reader, few)
    if right:
        share, count = sum(right) / len(right), len(right)
        error = math.sqrt(share * (1 - share) / max(count - 1, 1))
        found = {"exact_match": share, "exact_match_stderr": error, **found, "n": count}
    if not found:
        raise ConfigError(
            "the run has no held-out rows with a question and its answer",
            where="evaluate --rows",
            fix="a run with data.eval_path or data.eval_fraction, on rows of turns",
        )
    console.print(f"{NAME}: {describe(found)}")
    if "loss" not in found:
        console.print(f"no loss: that of {method.key} is not on the text of an answer alone")
    return {NAME: found}


def _loss(model: Any, reader: Any, rows: Any, args: Any, method: Method) -> float:
    """Mean cross-entropy in nats of all tokens that count, as the run prepares and cuts them."""
    limit, collate = TrainerArguments(args).max_length, _as_batch
    if COLUMN in rows.column_names:
        collate = ImageBatches(reader, limit=limit, multiple=None)
    total, count = 0.0, 0
    for row in preparer(reader, method).counts(rows, args, "eval"):
        batch = {key: value.to(model.device) for key, value in collate([row]).items()}
        if tokens := int((batch["labels"][:, 1:] != MASKED).sum()):
            total += float(model(**batch, use_cache=False).loss) * tokens
            count += tokens
    return total / count


def _as_batch(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return {key: torch.tensor([row[key] for row in rows]) for key in ("input_ids", "labels")}


def _answered(model: Any, reader: Any, rows: Any) -> list[bool]:
    """Whether each row with a question and its answer is answered word for word."""
    right, answers = list[bool](), Answers.of(tokenizer_of(reader))
    for index, row in enumerate(rows):
        try:
            turns, expected = asked_of(row)
        except BadRowError as error:
            raise DataError(
                "a held-out row cannot be asked",
                where=f"held-out row {index + 1}",
                why=str(error),
                fix="put the file back where the run's rows name it",
            ) from error
        if not turns or not expected.strip():
            continue
        inputs = {k: v.to(model.device) for k, v in encode(reader, turns).items()}
        prompt = inputs["input_ids"][0]
        most = len(answers.tokenizer(expected)["input_ids"]) + BEHIND
        found = model.generate(**inputs, do_sample=False, max_new_tokens=most)[0]
        said = answers.read(found[len(prompt) :], prompt)["content"]
        right.append(said.strip() == expected.strip())
    return right
