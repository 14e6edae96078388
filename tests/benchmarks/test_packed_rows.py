"""Packed rows under SDPA: Transformers keeps documents apart where TRL trains, and only there."""

from __future__ import annotations

from tests.benchmarks.packed_rows import errors


def test_documents_are_kept_apart_without_a_cache_only() -> None:
    trained, cached, masked = errors().values()
    assert trained < 1e-5
    assert cached > 0.1
    assert masked > 0.1
