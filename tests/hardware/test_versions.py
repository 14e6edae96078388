"""What a user of untested versions reads, before a library is imported."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import warnings
from collections import Counter

import pytest
from packaging.utils import canonicalize_name

import finetune
from finetune import logging
from finetune.analysis.doctor import examine
from finetune.errors import ConfigError
from finetune.hardware import versions
from finetune.hardware.versions import check, concerns, table, version_status
from tests.conftest import H100
from tests.lock import TORCH, locked

RAN = table()["ran"]
NEWEST = {name: each[-1] for name, each in RAN.items()}


@pytest.fixture
def having(monkeypatch):
    """A function that fakes versions: the newest tested ones, but for those it is given."""

    def fake(**others: str) -> None:
        monkeypatch.setattr(versions, "version", (NEWEST | others).get)
        finetune._before_libraries.cache_clear()

    yield fake
    finetune._before_libraries.cache_clear()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("screen", "bars"), [(None, False), (io.StringIO(), False), (Terminal(), True)]
)
def test_a_script_has_bars_of_imports_where_somebody_looks(screen, bars, having, monkeypatch):
    having()
    asked = []
    monkeypatch.setattr(logging, "quiet_imports", lambda *, bars: asked.append(bars))
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", screen)
        finetune._before_libraries()
    assert asked == [bars]


def test_versions_that_ran_are_tested_and_a_build_of_them_is() -> None:
    for name, each in RAN.items():
        assert {version_status(name, found) for found in each} == {"tested"}
    assert version_status("torch", RAN["torch"][-1] + "+cpu") == "tested"


def test_the_lock_has_versions_that_are_tested() -> None:
    pins = locked()
    for name in RAN.keys() - {"python", "transformer-engine", "liger-kernel", "triton"}:
        assert version_status(name, pins[canonicalize_name(name)]) == "tested", name


def test_gpus_have_the_torch_that_predictions_are_for() -> None:
    assert locked("gpu.txt") == locked() | {"torch": RAN["torch"][-1]}
    for file, (version, _) in TORCH.items():
        assert locked(file)["torch"] == version


@pytest.mark.parametrize("name", ["transformers", "trl", "peft", "torch", "accelerate", "datasets"])
def test_a_newer_minor_version_is_one_line(name, having) -> None:
    major, minor, *_ = map(int, NEWEST[name].split("."))
    newer = f"{major}.{minor + 1}.0.dev0"
    having(**{name: newer})
    (line,) = [each for each in check() if "newer than" in each]
    assert f"{name} {newer} (tested up to {NEWEST[name]})" in line
    assert version_status(name, f"{major}.{minor}.99") == "tested"


def test_patches_are_releases_where_a_library_counts_them() -> None:
    *series, patch = map(int, NEWEST["lm-eval"].split("."))
    assert version_status("lm-eval", ".".join(map(str, [*series, patch + 1]))) == "newer"


@pytest.mark.parametrize("name", table()["needed"])
def test_an_older_version_is_an_error_that_names_the_lowest(name, having) -> None:
    having(**{name: "0.0.1"})
    with pytest.raises(ConfigError, match=f"{name} 0.0.1 is too old") as raised:
        check()
    assert raised.value.fix == f"pip install '{name}>={RAN[name][0]}'"


def test_an_older_python_is_an_error(having, monkeypatch) -> None:
    having()
    monkeypatch.setattr("platform.python_version", lambda: "3.10.4")
    with pytest.raises(ConfigError, match=r"python 3\.10\.4 is too old") as raised:
        check()
    assert raised.value.fix == f"Python {RAN['python'][0]} or later"


def test_other_libraries_are_lines_of_the_doctor_alone(having) -> None:
    having(**{"transformer-engine": "2.8.0", "psutil": "99.0", "transformers": "5.23.0"})
    assert check() == []
    (line, newer) = examine(H100).known_bad
    assert line == "transformer-engine 2.8.0 is older than 2.20.2"
    assert "psutil 99.0 (tested up to" in newer


def test_versions_that_are_bad_together_are_named_with_a_fix(having) -> None:
    having(transformers="5.24.0", peft="0.21.2")
    (line,) = check()
    assert line.startswith("transformers 5.24.0 with peft 0.21.2: model.add_adapter()")
    assert "pip install 'transformers<5.24'" in line
    assert concerns({"transformers": "5.23.0", "peft": "0.21.2"}) == []
    assert not any("with" in each for each in concerns({"transformers": "5.24.0"}))


@pytest.mark.parametrize("name", ["train", "setup_fp8_mixed_precision_training", "load_in_fp8"])
def test_a_script_reads_it_before_the_library_is_imported(name, having, capsys) -> None:
    having(trl="99.0")
    getattr(finetune, name)
    getattr(finetune, name)
    lines = [line for line in capsys.readouterr().err.splitlines() if "trl 99.0" in line]
    assert len(lines) == 1, "said once"
    having(transformers="4.57.0")
    with pytest.raises(ConfigError, match="transformers 4"):
        getattr(finetune, name)


def _with(folder, **found: str):
    """Lay metadata of other versions before those that are installed."""
    for name, version in found.items():
        metadata = folder / f"{name}-{version}.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
    return {"PYTHONPATH": str(folder)}


def test_an_older_library_ends_a_command_with_exit_code_2(tmp_path) -> None:
    found = _with(tmp_path, transformers="5.1.0")
    command = [sys.executable, "-m", "finetune", "tiny_lora_fp8"]
    done = subprocess.run(
        command, env={**os.environ, **found}, text=True, capture_output=True, check=False
    )
    assert done.returncode == 2
    assert "transformers 5.1.0 is too old" in done.stderr
    assert "Traceback" not in done.stderr
    assert f"fix:   pip install 'transformers>={RAN['transformers'][0]}'" in done.stderr


def test_warnings_hidden_from_users_are_counted_for_the_receipt(monkeypatch) -> None:
    monkeypatch.setattr(logging, "HIDDEN_WARNINGS", counted := Counter())
    with warnings.catch_warnings():
        logging.quiet_libraries()
        for _ in range(2):  # once per place, as Python shows them
            warnings.warn("`old` will be `new`\nin 6.0", FutureWarning, stacklevel=1)
    assert counted == {"FutureWarning: `old` will be `new`": 1}
