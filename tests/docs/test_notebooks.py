"""The notebooks run as they are on a CPU, come without outputs, and their GPU settings are real."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from finetune.config.recipe import list_recipes, load_recipe
from finetune.config.schema import PrecisionConfig

FOLDER = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"), key=lambda path: path.name)
NAMES = [
    "01_first_run", "02_will_it_fit", "03_prove_it", "04_fp8_lora", "05_fp8_vs_bf16",
    "06_sfttrainer_script",
]  # fmt: skip
EACH = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def cells(path: Path) -> list[str]:
    """Sources of the code cells."""
    return [c.source for c in nbformat.read(path, as_version=4).cells if c.cell_type == "code"]


def test_all_notebooks_are_there() -> None:
    assert [path.stem for path in NOTEBOOKS] == NAMES


@pytest.mark.long
@EACH
def test_runs_on_a_cpu_in_two_minutes(path, tmp_path, monkeypatch) -> None:
    for name, value in {"IPYTHONDIR": "ipython", "JUPYTER_RUNTIME_DIR": "jupyter"}.items():
        monkeypatch.setenv(name, str(tmp_path / value))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(FOLDER.parent), *_search_path()]))
    (tmp_path / "work").mkdir()
    notebook = nbformat.read(path, as_version=4)
    place = {"metadata": {"path": str(tmp_path / "work")}}
    NotebookClient(notebook, timeout=120, kernel_name="python3", resources=place).execute()
    shown = [cell for cell in notebook.cells if cell.cell_type == "code" and cell.outputs]
    assert len(shown) > len(cells(path)) // 2


def _search_path() -> list[str]:
    return [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]


@EACH
def test_outputs_are_stripped(path) -> None:
    for cell in nbformat.read(path, as_version=4).cells:
        assert not cell.get("outputs"), "clear the outputs before committing"
        assert cell.get("execution_count") is None


@EACH
def test_settings_of_the_one_cell_exist_on_both_kinds_of_machine(path) -> None:
    """The settings for a GPU are comments in the first code cell; they replace its last lines."""
    here = cells(path)[0]
    gpu = "\n".join(
        line.removeprefix("# ") for line in here.splitlines() if _is_code(line.removeprefix("# "))
    )
    assert gpu != here
    found: dict = {}
    exec(gpu, found)
    words = found.get("OVERRIDES", [])
    named = [
        value for value in found.values() if isinstance(value, str) and value in list_recipes()
    ]
    for name in named:
        assert not name.startswith("tiny"), "the settings for a GPU name real recipes"
        load_recipe(name, words)
    if "SETTINGS" in found:
        PrecisionConfig(compute="fp8", **found["SETTINGS"])
    assert named or "SETTINGS" in found


def _is_code(line: str) -> bool:
    try:
        ast.parse(line)
    except SyntaxError:
        return False
    return bool(line.strip())
