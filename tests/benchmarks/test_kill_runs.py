"""The short form of `kill_runs`: five kills."""

from __future__ import annotations

import pytest

from tests.benchmarks import kill_runs


@pytest.mark.long
def test_a_killed_run_goes_on_to_the_same_weights() -> None:
    found = kill_runs.main(["--kills", "5"])
    assert found["from_newest"]
    assert found["same"]
    assert found["kills"] == 5
