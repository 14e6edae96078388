"""Several GPUs: against real steps of two processes, and what must hold for any number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from finetune.device import resolve, this_device
from finetune.estimator.place import Place
from finetune.estimator.rehearsal import rehearse
from finetune.estimator.several import sharded_footprint
from tests.sharding_worker import RECIPES, recipe_config
from tests.test_sharding import run_worker


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What two processes held under TRL's trainer and FSDP2 (about 40 s)."""
    return run_worker(tmp_path_factory.mktemp("several"), list(RECIPES))


@pytest.mark.parametrize("case", RECIPES)
def test_two_processes_hold_what_is_estimated(steps, case: str, tmp_path: Path) -> None:
    config, device = recipe_config(case, tmp_path), this_device()
    found = rehearse(config, device, resolve(config.precision, device), sharded=True)
    held = sharded_footprint(found, config, Place(device, None, 2))
    for name in ("sharded-0", "sharded-1"):
        assert held.tensors == pytest.approx(steps[name][case]["peak"], rel=0.02)
