"""The command that installs an extra is right wherever the package came from: no index has it."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from finetune.errors import install_hint

ROOT = Path(__file__).parents[1]
TEXTS = (".github", "docs", "finetune", "notebooks", "recipes", "README.md", "pyproject.toml")
KINDS = (".ipynb", ".j2", ".md", ".py", ".sh", ".toml", ".yaml", ".yml")
DEAD = re.compile(r"YOUR_ACCOUNT|pip install [^`\n]*fp8-finetune")
"""An address without an account, and a name that no index has."""


def came(path: Path, source: str | None) -> None:
    """Write what pip keeps of an installed package, with where it came from."""
    kept = path / "fp8_finetune-0.dist-info"
    kept.mkdir(parents=True)
    (kept / "METADATA").write_text("Name: fp8-finetune\nVersion: 0\n")
    if source is not None:
        (kept / "direct_url.json").write_text(source)


@pytest.fixture
def site(tmp_path, monkeypatch) -> Path:
    """A folder of installed packages that comes before all others; none is in it."""
    monkeypatch.syspath_prepend(tmp_path / "site")
    return tmp_path / "site"


def test_from_a_clone(site, tmp_path, monkeypatch) -> None:
    clone = tmp_path / "a clone"
    clone.mkdir()
    source: dict[str, Any] = {"url": clone.as_uri(), "dir_info": {"editable": True}}
    came(site, json.dumps(source))
    assert install_hint("te") == f"pip install -e '{clone}[te]'"
    monkeypatch.chdir(clone)
    assert install_hint("te") == "pip install -e '.[te]'"
    monkeypatch.chdir(tmp_path)
    clone.rmdir()
    assert install_hint("te") == f"pip install -e '{clone}[te]'"


@pytest.mark.parametrize("kind", ["dir_info", "archive_info"])
def test_from_a_folder_or_a_wheel(kind, site) -> None:
    came(site, json.dumps({"url": "file:///a%20folder/x", kind: {}}))
    assert install_hint("te") == "pip install 'fp8-finetune[te] @ file:///a%20folder/x'"


@pytest.mark.parametrize("source", [None, "", "not JSON"])
def test_from_an_index_or_unknown(source, site) -> None:
    came(site, source)
    assert install_hint("te") == "pip install 'fp8-finetune[te]'"


def test_not_installed(site, monkeypatch) -> None:
    monkeypatch.setattr(sys, "path", [str(site)])
    assert install_hint("te") == "pip install 'fp8-finetune[te]'"


def test_no_text_names_what_is_not_there() -> None:
    files = [file for name in TEXTS for file in (ROOT / name, *(ROOT / name).rglob("*"))]
    texts = [file for file in files if file.suffix in KINDS]
    dead = [file for file in texts if DEAD.search(file.read_text(encoding="utf-8"))]
    assert dead == [ROOT / "finetune/errors.py"], "only where the command is made"
