"""Packed rows: SDPA keeps documents apart where TRL trains and only there, varlen everywhere."""

from __future__ import annotations

from tests.benchmarks.packed_rows import errors


def test_sdpa_keeps_documents_apart_without_a_cache_only() -> None:
    trained, cached, masked, *varlen = errors().values()
    assert trained < 1e-5
    assert cached > 0.1
    assert masked > 0.1
    assert max(varlen) < 1e-5
