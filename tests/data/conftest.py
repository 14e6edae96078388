"""The packaged tokenizer, and a folder with a cache of rows of its own."""

from __future__ import annotations

import pytest
from transformers import AutoTokenizer

from finetune.config.paths import TINY_LLAMA


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY_LLAMA)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The current folder of a test, with a cache of its own."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path
