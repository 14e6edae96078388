"""The versions that pyproject.toml promises were run."""

from __future__ import annotations

import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from finetune.hardware.versions import series_length, table, version_status
from tests.canary import ROOT

RAN = table()["ran"]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
NEEDED = {each.name: each.specifier for each in map(Requirement, PROJECT["dependencies"])}
LINES = [line for extra in PROJECT["optional-dependencies"].values() for line in extra]
BOUNDS = {each.name: each.specifier for each in map(Requirement, LINES)} | NEEDED


MINORS = ("torch", "torchao", "compressed-tensors", "lm-eval")
"""Libraries whose minor versions change what we call: a range ends behind the last that ran."""
MAJORS = ("transformers", "trl", "peft")
"""Those whose private names are tried (`finetune.hardware.unpromised`): up to a major version."""


def test_every_dependency_was_run_at_its_lowest() -> None:
    assert NEEDED.keys() <= RAN.keys()
    assert set(table()["needed"]) <= NEEDED.keys()


@pytest.mark.parametrize("name", sorted(RAN.keys() & BOUNDS.keys()))
def test_a_range_begins_where_the_tests_ran(name) -> None:
    (lowest,) = (Version(each.version) for each in BOUNDS[name] if each.operator == ">=")
    ran = [Version(each) for each in RAN[name]]
    assert ran == sorted(ran)
    assert ran[0] == lowest
    assert all(each in BOUNDS[name] for each in ran)
    assert {version_status(name, each) for each in RAN[name]} == {"tested"}


@pytest.mark.parametrize("name", MINORS)
def test_every_minor_version_of_a_range_was_run_and_none_behind_it_is_in_it(name) -> None:
    length = series_length(name)
    series = sorted({Version(each).release[:length] for each in RAN[name]})
    *same, first = series[0]
    assert series == [(*same, first + i) for i in range(len(series))]
    behind = (*same, first + len(series))
    ends = [each.version for each in BOUNDS[name] if each.operator == "<"]
    assert ends == [".".join(map(str, behind))]


@pytest.mark.parametrize("name", MAJORS)
def test_a_range_ends_before_the_next_major_version(name) -> None:
    ends = [each.version for each in BOUNDS[name] if each.operator == "<"]
    assert ends == [str(Version(RAN[name][-1]).major + 1)]
    following = Version(RAN[name][-1]).release[:2]
    assert version_status(name, f"{following[0]}.{following[1] + 1}.0") == "newer"


def test_python_begins_where_the_tests_ran() -> None:
    assert SpecifierSet(PROJECT["requires-python"]) == SpecifierSet(f">={RAN['python'][0]},<3.15")


@pytest.mark.parametrize("document", ["README.md", "docs/pages/guides/first-run.md"])
def test_documents_say_what_ran(document) -> None:
    minor = [".".join(each.split(".")[:2]) for each in RAN["torch"]]
    line = f"Python {RAN['python'][0]} to {RAN['python'][-1]}, torch {minor[0]} to {minor[-1]}"
    assert line in (ROOT / document).read_text(encoding="utf-8")
