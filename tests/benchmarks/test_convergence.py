"""The convergence benchmark: its text, its noise band, and that a finished run stays finished."""

from __future__ import annotations

import json

import pytest
import torch

from finetune.precision.planner import plan
from tests.benchmarks import convergence
from tests.benchmarks.convergence import (
    BETWEEN_FILES,
    LENGTH,
    RECIPES,
    VOCABULARY,
    make_model,
    precision_of,
    read_text,
    rows_of,
    run,
    share,
)
from tests.benchmarks.convergence_report import plot, table_of


def result(recipe: str, held_out: float | None, seed: int = 0, loss: float = 2.0) -> dict:
    settings = {"model": "llama", "recipe": recipe, "seed": seed, "steps": 3}
    settings |= {"batch": 6, "length": 128}
    losses = [3.0, 2.5, loss] if held_out else [3.0]
    return {"settings": settings, "losses": losses, "held_out": held_out, "step_s": 0.25}


def test_verdicts_are_by_the_distance_of_the_bf16_seeds() -> None:
    results = [
        result("bf16", 2.0),
        result("bf16", 2.04, seed=1),
        result("mxfp8", 2.059),
        result("nvfp4", 2.061),
        result("fp32", 1.979),
        result("delayed", None),
    ]
    head, _, _, _, *rows = table_of(results).splitlines()
    assert "2.0200 ± 0.0400 (± 1.98%)" in head
    cells = {row.split(" | ")[0].strip("| "): row.split(" | ") for row in rows}
    assert cells["bf16, seed 1"][3:6] == ["+0.99%", "+2.00%", "inside"]
    assert cells["mxfp8"][1:6] == ["2.5000", "2.0590", "+1.93%", "+2.95%", "inside"]
    assert cells["nvfp4"][5] == "outside: worse"
    assert cells["fp32"][5] == "outside: better"
    assert cells["delayed"][2] == "not finite at step 2"
    assert cells["delayed"][5] == "outside: diverged"


def test_without_a_finite_bf16_run_there_is_no_table() -> None:
    with pytest.raises(ValueError, match="BF16 run is not finite"):
        table_of([result("bf16", None)])


@pytest.mark.slow
def test_the_plot_has_a_line_for_each_run(tmp_path) -> None:
    plot([result("bf16", 2.0), result("rowwise", 2.1), result("delayed", None)], tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_text_is_split_by_file_and_rows_are_fixed() -> None:
    train, held_out, _ = read_text()
    assert 0.02 < len(held_out) / len(train) < 0.12
    assert len(train) > 500 * 8 * LENGTH, "a run of 500 steps sees little of it twice"
    assert train.max() == held_out.max() == BETWEEN_FILES < VOCABULARY
    assert torch.equal(rows_of(train, 4, seed=3), rows_of(train, 4, seed=3))
    assert not torch.equal(rows_of(train, 4, seed=3), rows_of(train, 4, seed=4))


def test_learning_rate_warms_up_and_falls_to_a_tenth() -> None:
    shares = [share(step, 500) for step in range(501)]
    assert shares[0] == pytest.approx(1 / 30)
    assert max(shares) == shares[29] == shares[30] == 1
    assert shares[500] == pytest.approx(0.1)


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_has_a_plan(recipe) -> None:
    precision = precision_of(recipe)
    layers = plan(make_model("llama", 0), precision).layers
    assert {x.compute for x in layers if x.role == "base"} == {precision.compute}
    assert len(layers) == 6 * 7 + 1


@pytest.mark.slow
@pytest.mark.parametrize(("model", "recipe"), [("llama", "tensorwise"), ("bdh", "bf16")])
def test_a_finished_run_is_read_and_one_of_other_settings_is_done_again(
    model, recipe, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(convergence, "HELD_OUT_ROWS", 16)
    first = run(model, recipe, 0, 2, tmp_path)
    assert len(first["losses"]) == 2
    assert first["held_out"] < first["losses"][0]
    assert ("effective" in first) == (recipe != "bf16")
    trained = []
    monkeypatch.setattr(convergence, "train", lambda s: trained.append(s) or {"settings": s})
    assert run(model, recipe, 0, 2, tmp_path) == first
    assert not trained
    run(model, recipe, 0, 3, tmp_path)
    run(model, recipe, 1, 2, tmp_path)
    assert [(s["steps"], s["seed"]) for s in trained] == [(3, 0), (2, 1)]
    stored = json.loads((tmp_path / f"{model}-{recipe}-seed0.json").read_text())
    assert stored["settings"]["steps"] == 3
    assert not list(tmp_path.glob("*.part"))
