"""Several sources in one run: their rows in one format, behind one another or drawn by weight.

What is trained on stays what it is in each source: answers of turns, completions, all of a text.

    messages, and prompt and completion in turns    messages; turns of the prompt are not trained on
    turns, and text                                 messages; a text is one turn of role `WHOLE`
    prompt and completion as text, and text         a text is a completion without a prompt
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from finetune.config.sections import DataConfig
from finetune.data.images import references
from finetune.data.masks import TRAINED_TURNS, WHOLE
from finetune.data.rows import SkippedLate
from finetune.data.sources import Source
from finetune.data.undivided import undivided
from finetune.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

BESIDE = {"tools", "chat_template_kwargs", TRAINED_TURNS, "images"}
"""Columns that rows of one format may have or not."""


@dataclass(frozen=True)
class Part:
    """Rows of one source, converted.

    Attributes:
        weight: share of the rows drawn from it; None: all, once.
        kind: recognized format.
        unused: columns that nothing is trained on.
        late: rows of the stream that are skipped while it is read.
    """

    source: Source
    weight: float | None
    kind: str
    train: Dataset
    eval: Dataset | None
    stream: IterableDataset | None = None
    refused: dict[int, str] = field(default_factory=dict)
    cut: int | None = None
    unused: Sequence[str] = ()
    late: SkippedLate | None = None


# --------------------------------------------------------------------------------------- one format


def in_one_format(parts: list[Part], named: Dataset | None) -> tuple[list[Part], Dataset | None]:
    """Parts, and eval rows that were named (`data.eval_path`), with columns of one format.

    Raises:
        DataError: rows of token ids among others; eval rows that are trained on in other parts
            than any training row is.
    """
    forms = {_form(part.train) for part in parts}
    # Converting it would be possible, and wrong: an eval loss on prompts, say, beside a training
    # loss on answers, which nobody would notice in a curve.
    if named is not None and _form(named) not in forms:
        raise DataError(
            "the eval rows are in another format than the training rows",
            where="data.eval_path",
            why=f"{_form(named)} and not {' or '.join(sorted(forms))}: the loss would be on other "
            "parts of a row",
            fix="bring them into the format of the training rows, or ~data.eval_path, which takes "
            "a share of those",
        )
    columns = [_columns(part.train) for part in parts]
    others = [] if named is None else [_columns(named)]
    # Of rows of token ids those for evaluation may have labels and the others none, or vice versa.
    if all(one == columns[0] for one in columns) and all(
        one ^ columns[0] <= {"labels"} for one in others
    ):
        return parts, named
    # Ids cannot be turned back into turns without a guess at the template; a preference is two
    # answers, where other rows have one.
    if alone := sorted({"token ids", "preferences"} & forms):
        raise DataError(
            f"rows of {alone[-1]} and other rows cannot be in one run",
            where="; ".join(f"{part.source.label}: {part.kind}" for part in parts),
            why="all rows have the same columns: labels or none, token ids or text",
            fix="bring them into one format, or name one source",
        )
    # The form that loses nothing: turns cannot be written as a prompt and a completion before the
    # template is known, a text can be a turn.
    convert = _as_messages if "turns" in forms else _as_pair

    def whole(rows: Any) -> Any:
        known = rows.column_names  # a stream has them, too: its first rows were looked at
        # With features given: types that are inferred from the first rows of each source may
        # differ, which `concatenate_datasets` refuses.
        return rows.map(convert, remove_columns=known, features=_features(convert, known))

    done = [
        replace(
            part,
            train=whole(part.train),
            eval=None if part.eval is None else whole(part.eval),
            stream=None if part.stream is None else whole(part.stream),
        )
        for part in parts
    ]
    return done, None if named is None else whole(named)


def _form(rows: Dataset) -> str:
    """What a row of these is: `turns`, a `prompt and completion`, `text`, `preferences`, ids."""
    names = {*rows.column_names}
    if "input_ids" in names:
        return "token ids"
    if "text" in names:
        return "text"
    if {"chosen", "label"} & names:
        return "preferences"
    # TRL has prompt and completion as texts or as lists of turns under the same two names.
    pair = "completion" in names and getattr(rows.features["completion"], "dtype", "") == "string"
    return "prompt and completion" if pair else "turns"


def _columns(rows: Dataset) -> set[str]:
    return {*rows.column_names} - BESIDE


def _as_messages(row: dict[str, Any]) -> dict[str, Any]:
    """Messages with a truth value for each answer, of a row of turns or of text."""
    if "text" in row:
        return {"messages": [{"role": WHOLE, "content": row["text"]}], TRAINED_TURNS: []}
    asked = row.get("prompt") or []
    turns = row.get("messages") or [*asked, *row["completion"]]
    # Without values of its own: what TRL trains on with `completion_only_loss`, the answers behind
    # the prompt. Examples in the prompt are answers, too, and are not trained on.
    given = row.get(TRAINED_TURNS) or [
        place >= len(asked) for place, turn in enumerate(turns) if turn["role"] == "assistant"
    ]
    kept = {key: row[key] for key in BESIDE if key in row}
    return kept | {"messages": turns, TRAINED_TURNS: given}


def _as_pair(row: dict[str, Any]) -> dict[str, Any]:
    """Prompt and completion; a text is a completion without a prompt."""
    return {"prompt": row.get("prompt", ""), "completion": row.get("completion", row.get("text"))}


def _features(convert: Any, names: list[str]) -> Any:
    from datasets import Features, Json, List, Value

    if convert is _as_pair:
        return Features(prompt=Value("string"), completion=Value("string"))
    beside = {"tools": List(Json()), "chat_template_kwargs": Json(), "images": references()}
    found = {name: kind for name, kind in beside.items() if name in names}
    return Features({"messages": List(Json()), TRAINED_TURNS: List(Value("bool")), **found})


# -------------------------------------------------------------------------------------------- order


def joined(parts: list[Part], data: DataConfig, seed: int) -> tuple[Dataset | IterableDataset, str]:
    """Training rows of all sources: behind one another, or drawn by weight."""
    from datasets import concatenate_datasets, interleave_datasets

    weights = [part.weight for part in parts if part.weight is not None]
    total, kind = sum(weights), " + ".join(dict.fromkeys(part.kind for part in parts))
    if parts[0].stream is not None:
        # If one is a stream all are: sources of a recipe are streamed together or not at all.
        streams: list[Any] = [part.stream for part in parts]
        names = ", ".join(_share(part, total) for part in parts)
        description = f"{kind}, streamed from {names}"
        if not weights:
            whole: Any = concatenate_datasets(streams)
            return undivided(_unending(whole, data, seed)), description
        # Each for itself: a short source begins again while a long one still has rows, so that
        # shares hold over the whole run.
        streams = [_unending(one, data, seed) for one in streams]
        shares = [weight / total for weight in weights]
        return undivided(interleave_datasets(streams, shares, seed)), description
    if not weights:
        train = concatenated([part.train for part in parts])
        of = f" of {len(parts)} sources" if len(parts) > 1 else ""
        return train, f"{kind}, {len(train):,} training rows{of}"
    shares = [weight / total for weight in weights]
    # `all_exhausted` draws until each source was read whole: short ones come several times, which
    # the lines below say. The default would stop at the end of the shortest.
    train: Any = interleave_datasets(
        [part.train for part in parts], shares, seed, stopping_strategy="all_exhausted"
    )
    times = ", ".join(
        f"{_share(part, total)} x {share * len(train) / len(part.train):.2g}"
        for part, share in zip(parts, shares, strict=True)
    )
    return train, f"{kind}, {len(train):,} training rows mixed of {times}"


def _share(part: Part, total: float) -> str:
    files = f" ({len(part.source.files)} files)" if len(part.source.files) > 1 else ""
    share = "" if part.weight is None else f"{part.weight / total:.0%} "
    subset = f" {part.source.hub[1]}" if part.source.hub[1] else ""
    return f"{share}{part.source.label}{subset}{files}"


def _unending(rows: Any, data: DataConfig, seed: int) -> Any:
    """A stream in another order than its source's, which starts again at its end.

    Without an end the trainer counts no epochs, of which it could not know the length.
    """
    if data.shuffle_buffer > 1:
        rows = rows.shuffle(seed=seed, buffer_size=data.shuffle_buffer)
    return rows.repeat(None)


def concatenated(parts: list[Dataset]) -> Dataset:
    from datasets import concatenate_datasets

    return parts[0] if len(parts) == 1 else concatenate_datasets(parts)
