"""Rows begin once and end once: a start or end token that two sides have set is found by its id.

A text that begins with `<s>` gets another by the tokenizer, one that ends with `</s>` and a space
another by TRL, which looks at the last characters. The model would learn to begin and to end twice,
which no prompt and no answer does. What is cut is counted (`finetune.data.ledger`).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from datasets import Dataset


def once(row: dict[str, list[int]], tokenizer: Any) -> dict[str, list[int]]:
    """A tokenized row with one start token of several, and one end of several with white space."""
    ids, start, end = row["input_ids"], tokenizer.bos_token_id, tokenizer.eos_token_id
    first = next((i for i, token in enumerate(ids) if token != start), len(ids))
    begin, tail = max(first - 1, 0), len(ids)
    # White space between two ends: TRL adds one behind what a template has printed last.
    while tail > first and (ids[tail - 1] == end or not tokenizer.decode([ids[tail - 1]]).strip()):
        tail -= 1
    stop = tail + ids[tail:].index(end) + 1 if ids[tail:].count(end) > 1 else len(ids)
    return {key: row[key][begin:stop] for key in ("input_ids", "labels")}


def each_once(rows: Any, tokenizer: Any, **processes: Any) -> tuple[Any, int]:
    """Tokenized rows, each as `once` has it, and how many of them were cut (of a stream: 0)."""
    done = rows.map(partial(once, tokenizer=tokenizer), **processes)
    if not isinstance(rows, Dataset):
        return done, 0
    return done, int(np.sum(_lengths(rows) != _lengths(done)))


def _lengths(rows: Dataset) -> Any:
    column: Any = rows.with_format("arrow")["input_ids"]
    return np.concatenate([np.asarray(part.value_lengths()) for part in column.chunks])
