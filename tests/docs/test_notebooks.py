"""The notebooks are stored with fresh outputs, run as they are on a CPU, install their clone."""

from __future__ import annotations

import ast
import re
from difflib import SequenceMatcher
from pathlib import Path

import nbformat
import pytest

from finetune import load_recipe
from finetune.config.paths import list_recipes
from finetune.precision.settings import PrecisionConfig
from tests.docs import notebooks
from tests.docs.notebooks import NOTEBOOKS, code_cells

NAMES = [
    "01_first_run", "02_will_it_fit", "03_prove_it", "04_fp8_lora", "05_fp8_vs_bf16",
    "06_sfttrainer_script", "07_pitfalls", "08_python_door", "09_images",
]  # fmt: skip
EACH = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
STORE = f"store its outputs: python -m {notebooks.__name__}"
LARGEST = 300_000
SAME = 0.8
"""Share of words that two executions of a cell have in common, in order, at least."""


def read(path: Path):
    return nbformat.read(path, as_version=4)


def test_all_notebooks_are_there() -> None:
    assert [path.stem for path in NOTEBOOKS] == NAMES


# ---------------------------------------------------------------------------------- stored outputs


def stale(notebook) -> list[str]:
    """Reasons why stored outputs are not those of the sources, run once from top to bottom."""
    cells = code_cells(notebook)
    hashes = notebooks.source_hashes(notebook)
    found = [
        f"{cell.id} has changed since it was run"
        for cell, digest in zip(cells, hashes, strict=True)
        if cell.metadata.get("source") != digest
    ]
    if [cell.execution_count for cell in cells] != list(range(1, len(cells) + 1)):
        found.append("the cells were not run once each, in order")
    return found + [
        f"{cell.id} shows nothing" for cell in cells if shows(cell) and not cell.outputs
    ]


def shows(cell) -> bool:
    """True if the last line of a cell is an expression, or any line prints or plots."""
    source = re.sub(r"^([ \t]*)%.*", r"\1pass", cell.source, flags=re.MULTILINE)
    body = ast.parse(source).body
    last = body[-1] if body else None
    ends = isinstance(last, ast.Expr) and not isinstance(last.value, ast.Call)
    return ends or "print(" in source or "plt.show()" in source


@EACH
def test_outputs_are_those_of_the_source(path) -> None:
    assert stale(read(path)) == [], STORE
    assert path.stat().st_size < LARGEST


@pytest.mark.parametrize("change", ["source", "order", "nothing"])
def test_outputs_of_another_source_are_found(change) -> None:
    notebook = read(NOTEBOOKS[0])
    printing = next(cell for cell in code_cells(notebook) if "print(" in cell.source)
    if change == "source":
        code_cells(notebook)[1].source += "\n"
    elif change == "order":
        printing.execution_count += 1
    else:
        printing.outputs = []
    assert stale(notebook)


@EACH
def test_outputs_name_no_folder_of_a_machine(path) -> None:
    for cell in code_cells(read(path)):
        found = re.findall(
            r"(?<![\w.:/<])/(?:tmp|home|root|work|Users|opt)/\S*", said(cell, all=True)
        )
        assert found == [], cell.id


def said(cell, *, all: bool = False) -> str:
    """Text of a cell's outputs; with `all` their HTML, too."""
    parts = []
    for output in cell.outputs:
        data = output.get("data", {})
        parts += [output.get("text", ""), data.get("text/plain", "")]
        parts += [data.get("text/html", "")] if all else []
    return "\n".join(parts)


def words(cell) -> list[str]:
    """Words of a cell's outputs without what differs from run to run: numbers, names of runs."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", said(cell))
    return re.findall(r"[A-Za-z_]{2,}", re.sub(r"\d{8}-\d{6}-[0-9a-f]{4}", "", text))


def likeness(stored, executed) -> float:
    return SequenceMatcher(None, words(stored), words(executed), autojunk=False).ratio()


def kinds(cell) -> list[str]:
    """Kinds of outputs; lines that follow one another are one, however they were cut."""
    found = [
        kind
        for output in cell.outputs
        for kind in (output.get("data", {}) or {output.output_type: ""})
    ]
    return sorted(set(found))


@pytest.mark.long
@EACH
def test_runs_on_a_cpu_in_two_minutes_and_gives_what_is_stored(path, tmp_path, monkeypatch) -> None:
    for name in (*notebooks.ENVIRONMENT, "PYTHONPATH", "PYTHONWARNINGS"):
        monkeypatch.setenv(name, "")  # restored afterwards
    stored, executed = read(path), notebooks.execute(path, tmp_path)
    for before, after in zip(code_cells(stored), code_cells(executed), strict=True):
        assert kinds(before) == kinds(after), f"{before.id}: {STORE}"
        assert likeness(before, after) >= SAME, f"{before.id}: {STORE}"


def test_another_output_is_not_like_the_stored_one() -> None:
    first, second = (code_cells(read(path)) for path in NOTEBOOKS[:2])
    assert likeness(first[2], first[2]) == 1.0
    assert likeness(first[2], second[2]) < SAME


# -------------------------------------------------------------------------- where and how they run


@EACH
def test_the_first_cell_installs_the_clone_that_the_notebook_is_in(path) -> None:
    install = code_cells(read(path))[0]
    line = install.source.splitlines()[-1].split()
    assert line[:2] == ["%pip", "install"]
    assert (path.parent / line[-1] / "pyproject.toml").is_file(), "kernels start in its folder"
    assert "-e" not in line, "a kernel that runs does not see it"
    assert not install.outputs, "where finetune is installed, the cell is quiet"


@EACH
def test_settings_of_the_one_cell_exist_on_both_kinds_of_machine(path) -> None:
    """The settings for a GPU are comments in the second code cell; they replace its last lines."""
    here = code_cells(read(path))[1].source
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
