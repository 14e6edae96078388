"""Rows are counted while they are mapped, in a pipe and in a terminal."""

from __future__ import annotations

import io

import pytest
from datasets import Dataset, arrow_dataset
from rich.console import Console

from finetune import logging as progress


@pytest.mark.parametrize("terminal", [False, True])
def test_mapped_rows_are_counted(terminal, monkeypatch) -> None:
    monkeypatch.setattr(progress, "COUNT_PERIOD", 0.0)
    monkeypatch.setattr(progress, "COUNT_PERIOD_OF_LINES", 0.0)
    monkeypatch.setattr("datasets.arrow_dataset.config.PBAR_REFRESH_TIME_INTERVAL", 0.0)
    out, bar = io.StringIO(), arrow_dataset.hf_tqdm
    console = Console(file=out, force_terminal=terminal, width=100)
    rows = Dataset.from_dict({"a": list(range(7))})
    with progress.counting_rows(console, "reading x"):
        rows.map(lambda row: {"b": row["a"]}, desc="Tokenizing")
        assert arrow_dataset.hf_tqdm is not bar
    assert arrow_dataset.hf_tqdm is bar
    assert "tokenizing: 7 of 7 rows, " in out.getvalue() or terminal
    assert "reading x" in out.getvalue() or not terminal
