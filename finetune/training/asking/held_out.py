"""`evaluate --rows`: how many answers to a run's held-out rows are the row's own, word for word.

    row         a picture, "Which ship?", "A tug."
    asked       the turns before the row's first answer, its images in them, greedily
    exact_match 1 for "A tug.", 0 for "A tug boat." or "A tug"

It is kept as a task's score is, so that the report and `compare` show it. Its standard error is
that of a share: 1.6 points of 1,000 rows half of which are right.

Limits: one row at a time; an answer is cut a few tokens behind the length of the row's own. Answers
that say the same in other words count as wrong.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from finetune.config.schema import RunConfig
from finetune.data.answers import Answers
from finetune.data.chat import BadRowError
from finetune.errors import ConfigError, DataError
from finetune.storage.processors import tokenizer_of
from finetune.training.asking.questions import asked_of, encode
from finetune.training.helper.undisturbed import autocast, undisturbed

if TYPE_CHECKING:
    from finetune.data.dataset import Rows

NAME = "held_out_rows"
"""What the scores are kept under, beside those of tasks."""
BEHIND = 8
"""Tokens that an answer may be longer than the row's, to be seen to be."""


def score_rows(
    model: Any, reader: Any, rows: Rows, config: RunConfig, limit: int | None = None
) -> dict[str, dict[str, Any]]:
    """Share of held-out rows that a model answers word for word, in evaluation mode.

    Args:
        reader: the model's tokenizer, or its processor where rows have images.
        limit: only the first rows.

    Returns:
        `exact_match`, `exact_match_stderr` and `n`, under `NAME`.

    Raises:
        ConfigError: there are no held-out rows, or none with a question and its answer.
        DataError: an image of one cannot be read.
    """
    held_out: Any = rows.eval if rows.eval is not None else ()
    few = held_out if limit is None else held_out.select(range(min(limit, len(held_out))))
    right, answers = list[bool](), Answers.of(tokenizer_of(reader))
    compute, device = config.precision.compute, model.device
    with undisturbed(model), autocast(compute, device.type), torch.no_grad():
        for index, row in enumerate(few):
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
            inputs = {k: v.to(device) for k, v in encode(reader, turns).items()}
            prompt = inputs["input_ids"][0]
            most = len(answers.tokenizer(expected)["input_ids"]) + BEHIND
            found = model.generate(**inputs, do_sample=False, max_new_tokens=most)[0]
            said = answers.read(found[len(prompt) :], prompt)["content"]
            right.append(said.strip() == expected.strip())
    if not right:
        raise ConfigError(
            "the run has no held-out rows with a question and its answer",
            where="evaluate --rows",
            fix="a run with data.eval_path or data.eval_fraction, on rows of turns",
        )
    share, count = sum(right) / len(right), len(right)
    error = math.sqrt(share * (1 - share) / max(count - 1, 1))
    return {NAME: {"exact_match": share, "exact_match_stderr": error, "n": count}}
