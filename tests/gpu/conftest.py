"""Skips on a GPU what torch cannot multiply there."""

from __future__ import annotations

import pytest

from finetune.hardware.device import NO_ROWWISE, this_device


@pytest.fixture(autouse=True)
def _scales_by_row(request) -> None:
    """Compute capability 12.x has no product of scales by row."""
    capability = this_device().capability or (0, 0)
    given = getattr(request.node, "callspec", None)
    by_row = given is not None and {"row", "rowwise"} & {str(v) for v in given.params.values()}
    if by_row and capability[0] == NO_ROWWISE:
        pytest.skip("torch has no product of scales by row on compute capability 12.x")
