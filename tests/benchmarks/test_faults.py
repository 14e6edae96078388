"""Every fault of `faults`: exit code, message, and whole checkpoints only."""

from __future__ import annotations

import re

import pytest

from tests.benchmarks.faults import FAULTS, happens
from tests.conftest import slow_but

QUICK = ("SIGTERM", "full")


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(QUICK, FAULTS, pytest.mark.long))
def test_a_fault_ends_in_one_error_and_loses_no_checkpoint(name) -> None:
    fault, found = FAULTS[name], happens(name)
    assert found.code == fault.code, found.output
    assert found.has_said(fault.says), found.output
    assert "Traceback" not in found.output
    assert len(re.findall("^error: ", found.output, re.M)) == (fault.code == 2)
    assert max(found.whole, default=0) == fault.newest
    assert not found.broken
