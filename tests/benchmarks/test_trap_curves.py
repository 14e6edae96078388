"""The scripts behind the loss curves of upstream's traps still show the traps, and ours none."""

from __future__ import annotations

import pytest
import torch

from tests.benchmarks import trap_curves
from tests.benchmarks.trap_curves import ARMS, gradients_table, losses_table, plot
from tests.benchmarks.trap_runs import TRAPS, run
from tests.conftest import slow_but
from tests.te.fetch import is_here


@pytest.fixture(autouse=True)
def _needs_the_wheel(request):
    """Upstream converts to Transformer Engine's own layers."""
    trap = getattr(request.node, "callspec", None) and request.node.callspec.params.get("trap")
    if trap and TRAPS[trap].engine == "te" and not is_here():
        pytest.skip("needs Transformer Engine's wheel: python -m tests.te.fetch")


STEPS = 3  # the first has a learning rate of zero, and LoRA's A moves once B has


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # accelerate deprecates parts of its own FP8 path
@pytest.mark.parametrize("trap", slow_but([2], TRAPS, pytest.mark.long))
def test_a_script_falls_into_its_trap_upstream(trap, monkeypatch) -> None:
    found = run(trap, "upstream", seed=0, steps=STEPS, patch=monkeypatch)
    wasted = found["wasted_mib"][-1]
    assert wasted > 0
    assert all(a > b for a, b in zip(found["norm"], found["useful_norm"], strict=True))
    if trap == 2:
        assert found["moved"] < 0.4 * found["trainable"] == 0.4 * found["trainable_after"]
        assert "python storage" in found["not_saved"]
    if trap == 3:
        assert found["trainable_after"] > 10 * found["trainable"] == 10 * found["moved"]
        assert wasted > 10 * found["useful_mib"][-1]
        assert found["reloaded"] == found["held_out"], "what was trained is saved"
    if trap == 5:
        assert found["trainable_after"] > found["trainable"] == found["moved"]
        assert found["reloaded"] == found["held_out"], "the clone is in the file"
        assert found["tied_as_config_says"] != found["reloaded"], "and config.json denies it"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("trap", slow_but([2], TRAPS, pytest.mark.long))
def test_the_same_script_is_free_of_it_ours(trap, monkeypatch) -> None:
    found = run(trap, "ours", seed=0, steps=STEPS, patch=monkeypatch)
    assert found["trainable"] == found["trainable_after"] == found["moved"]
    assert set(found["wasted_mib"]) == {0.0}
    assert found["useful_norm"] == pytest.approx(found["norm"], rel=1e-4)
    assert found["reloaded"] == found["held_out"]
    assert found.get("tied_as_config_says", found["reloaded"]) == found["reloaded"]
    assert torch.tensor(found["loss"]).isfinite().all()


def made_up(arm: str) -> dict:
    keys = ("norm", "useful_norm", "left", "useful_mib", "wasted_mib")
    result = dict.fromkeys(keys, [1.0] * 30) | {"loss": [float(i) for i in range(30, 0, -1)]}
    result |= {"trainable": 1000, "trainable_after": 2000, "moved": 10, "held_out": 2.0}
    unsaved = {"not_saved": "RuntimeError: no storage"}
    return result | (unsaved if arm == "upstream" else {"reloaded": 2.5})


def test_tables_and_plot_tell_every_run(tmp_path) -> None:
    runs = {(2, arm, seed): made_up(arm) for arm in ARMS for seed in (1, 2)}
    losses = losses_table(runs, [2], [1, 2]).splitlines()
    assert losses[2].startswith("| 2 | upstream FP8 | 10 of 1,000 | 13.000 | 2.000 / 2.000 |")
    assert losses[2].endswith("| cannot be saved: `RuntimeError` |")
    assert losses[3].endswith("| 2.500 / 2.500 |")
    assert len(gradients_table(runs, [2], [1, 2]).splitlines()) == 2 + len(ARMS)
    plot(runs, [2], [1, 2], tmp_path / "traps.png")
    assert (tmp_path / "traps.png").stat().st_size > 10_000


def test_a_run_that_fails_says_so(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(trap_curves.sys, "executable", "false")
    settings = {"trap": 2, "arm": "ours", "seed": 0, "steps": 1, "out": str(tmp_path / "x.json")}
    with pytest.raises(RuntimeError, match=r"tests\.benchmarks\.trap_runs --out"):
        trap_curves.train(settings)
