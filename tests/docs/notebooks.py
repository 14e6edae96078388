"""Notebooks run and stored with their outputs.

    python -m tests.docs.notebooks [01 ...]   # run them and store their outputs

Each code cell's metadata keeps a hash of all code up to it, so that a test sees outputs of another
source without running anything.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"), key=lambda path: path.name)
ENVIRONMENT = {"IPYTHONDIR": "ipython", "JUPYTER_RUNTIME_DIR": "jupyter"}
PROGRESS_BARS = "ignore:IProgress not found"  # tqdm without ipywidgets: no matter of the reader


def code_cells(notebook) -> list:
    """Code cells in order."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def source_hashes(notebook) -> list[str]:
    """A hash for each code cell, of all code up to it: its outputs depend on all of that."""
    so_far, hashes = hashlib.sha256(), []
    for cell in code_cells(notebook):
        so_far.update(cell.source.encode() + b"\0")
        hashes.append(so_far.hexdigest()[:16])
    return hashes


def execute(path: Path, folder: Path):
    """A notebook, run in a new folder under `folder` with settings of its own."""
    for name, value in ENVIRONMENT.items():
        os.environ[name] = str(folder / value)
    found = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *found])
    os.environ["PYTHONWARNINGS"] = PROGRESS_BARS
    (folder / "work").mkdir()
    notebook = nbformat.read(path, as_version=4)
    place = {"metadata": {"path": str(folder / "work")}}
    NotebookClient(notebook, timeout=600, kernel_name="python3", resources=place).execute()
    return tidy(notebook, folder / "work")


def tidy(notebook, folder: Path):
    """Remove what belongs to the machine: folders, times of cells, the kernel's version."""
    paths = {f"{folder}/": "", str(folder): ".", f"{ROOT}/": "", str(ROOT): "."}

    def clean(value):
        if isinstance(value, str):
            for given, shown in paths.items():
                value = value.replace(given, shown)
            return value
        if isinstance(value, list):
            return [clean(part) for part in value]
        return (
            {key: clean(part) for key, part in value.items()} if isinstance(value, dict) else value
        )

    for cell, digest in zip(code_cells(notebook), source_hashes(notebook), strict=True):
        cell.outputs = [nbformat.from_dict(clean(output)) for output in cell.outputs]
        cell.metadata = nbformat.from_dict({"source": digest})
    notebook.metadata.language_info = {"name": "python"}
    return notebook


def main(words: list[str]) -> None:
    """Run and store notebooks whose names begin with one of `words`; none: all."""
    for path in NOTEBOOKS:
        if path.name.startswith(tuple(words or [""])):
            with tempfile.TemporaryDirectory() as folder:
                nbformat.write(execute(path, Path(folder)), path)
            print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
