"""All kinds of malformed inputs, drawn in their proportions, and the folders that they damage."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from finetune.config.paths import ASSETS
from tests.bad_inputs import containers, folders, models, recipes, rows, turns
from tests.bad_inputs.case import Case
from tests.run_folders import make_comparison, make_run

TRAINED = {"lora": "tiny_lora_fp8", "full": "tiny_full_bf16"}
WITHOUT_TORCH = 5
"""Kinds, the first ones, most of whose cases need no torch."""
SETTINGS = (
    "train.max_steps=2", "train.save_strategy=steps", "train.save_steps=1", "data.max_rows=40",
    "train.eval_strategy=no", "eval.samples=false", "train.optim=adamw_torch",
)  # fmt: skip


def prepare(folder: Path, *, train: bool = True) -> dict[str, Path]:
    """Make whole folders for cases to damage, if they are not there: name -> folder.

    Args:
        train: also two trained runs, which takes about half a minute.
    """
    found = {"run": folder / "run", "comparison": folder / "comparison", "model": folder / "model"}
    if not folder.exists():
        make_run(found["run"], steps=12)
        make_comparison(found["comparison"], steps=8)
        shutil.copytree(ASSETS / "tiny_llama", found["model"])
    for name, recipe in TRAINED.items() if train else ():
        command = [sys.executable, "-m", "finetune", recipe, *SETTINGS, f"--out={folder / name}"]
        if not (folder / name).exists():
            subprocess.run(command, check=True, capture_output=True)
        (found[name],) = (folder / name).glob("*/*")
    return found


def kinds(prepared: dict[str, Path]) -> dict[st.SearchStrategy[Case], int]:
    """Strategy of each kind -> its share of the cases, in parts of their sum."""
    found = {
        recipes.words(): 120,
        recipes.recipe_texts(): 90,
        recipes.damaged_recipes(): 110,
        recipes.recipe_files(): 60,
        recipes.settings(): 230,
        recipes.empty_values(): 70,
        recipes.overrides(): 45,
        recipes.trainer_numbers(): 130,
        recipes.meanings(): 25,
        recipes.trainer_values(): 45,
        recipes.sizes(): 8,
        rows.files(): 50,
        rows.damaged_rows(): 60,
        rows.greedy_rows(): 15,
        rows.wrong_rows(): 80,
        rows.tables(): 40,
        rows.settings(): 12,
        containers.containers(): 120,
        containers.eval_files(): 9,
        turns.conversations(): 110,
        folders.models(prepared["model"]): 25,
        models.mismatched(prepared["model"]): 70,
        folders.looking(prepared["run"]): 80,
        folders.comparisons(prepared["comparison"]): 30,
    }
    if "lora" in prepared:
        for name in TRAINED:
            found[folders.used_runs(prepared[name], name)] = 15
        found[folders.resumed(prepared["lora"], "lora")] = 25
    return found


def drawn(strategy: st.SearchStrategy[Case], count: int, number: int) -> list[Case]:
    """Up to `count` different cases of a strategy, equal for equal seeds."""
    found: dict[str, Case] = {}

    @settings(
        max_examples=4 * count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @seed(number)
    @given(strategy)
    def collect(case: Case) -> None:
        if len(found) < count:
            found[str((case.words, case.files, case.copies))] = case

    collect()
    return list(found.values())


def cases(prepared: dict[str, Path], total: int, number: int) -> Iterator[Case]:
    """About `total` malformed inputs of all kinds; those that may not import torch come first.

    Some strategies import trl to know its settings, so later ones are drawn when it is their turn.
    """
    parts = kinds(prepared)
    whole, later = sum(parts.values()), list[Case]()
    for place, (strategy, share) in enumerate(parts.items()):
        found = drawn(strategy, max(1, round(total * share / whole)), number)
        if place < WITHOUT_TORCH:
            yield from (case for case in found if not case.needs_torch)
            later += [case for case in found if case.needs_torch]
            continue
        yield from later
        later.clear()
        yield from found
