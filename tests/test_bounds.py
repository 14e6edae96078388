"""The versions that pyproject.toml promises were run, and what no library promises is listed."""

from __future__ import annotations

import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from finetune.analysis.doctor import known_bad
from tests.private import LISTED, ROOT, all_missing, attributes, missing, names, unread

RAN = LISTED["ran"]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
NEEDED = {each.name: each.specifier for each in map(Requirement, PROJECT["dependencies"])}
LINES = [line for extra in PROJECT["optional-dependencies"].values() for line in extra]
BOUNDS = {each.name: each.specifier for each in map(Requirement, LINES)} | NEEDED


def test_every_dependency_was_run_at_its_lowest() -> None:
    assert NEEDED.keys() <= RAN.keys()


@pytest.mark.parametrize("name", [each for each in RAN if each != "python"])
def test_a_range_begins_where_the_tests_ran(name) -> None:
    (lowest,) = (Version(each.version) for each in BOUNDS[name] if each.operator == ">=")
    ran = [Version(each) for each in RAN[name]]
    assert ran == sorted(ran)
    assert ran[0] == lowest
    assert all(each in BOUNDS[name] for each in ran)


def test_torch_was_run_in_every_minor_version_of_its_range() -> None:
    """Its private parts change from one to the next, and the range ends behind the last."""
    minors = [Version(each).minor for each in RAN["torch"]]
    assert minors == list(range(minors[0], minors[-1] + 1))
    assert BOUNDS["torch"] == SpecifierSet(f">=2.{minors[0]},<2.{minors[-1] + 1}")


def test_the_doctor_knows_the_range() -> None:
    *_, last = ran = RAN["torch"]
    assert [known_bad({"torch": each}) for each in ran] == [[]] * len(ran)
    assert known_bad({"torch": f"2.{Version(last).minor + 1}.0"})
    assert known_bad({"torch": f"2.{Version(ran[0]).minor - 1}.1"})


def test_the_doctor_knows_the_first_transformer_engine() -> None:
    """2.9 is the first with `te.autocast`; 2.8 has `fp8_autocast` alone."""
    (lowest,) = (each.version for each in BOUNDS["transformer-engine"] if each.operator == ">=")
    assert known_bad({"transformer-engine": lowest}) == []
    assert known_bad({"transformer-engine": "2.8.0"})


def test_python_begins_where_the_tests_ran() -> None:
    assert SpecifierSet(PROJECT["requires-python"]) == SpecifierSet(f">={RAN['python'][0]}")


@pytest.mark.parametrize("document", ["README.md", "docs/pages/guides/first-run.md"])
def test_documents_say_the_range(document) -> None:
    minor = [".".join(each.split(".")[:2]) for each in RAN["torch"]]
    line = f"Python {RAN['python'][0]} or later, torch {minor[0]} to {minor[-1]}"
    assert line in (ROOT / document).read_text(encoding="utf-8")


def test_every_private_name_of_a_library_is_listed() -> None:
    assert names() - {name for listed in LISTED["names"].values() for name in listed} == set()


def test_every_private_attribute_of_a_library_s_objects_is_listed() -> None:
    listed = {name for each in LISTED["attributes"].values() for name in each}
    listed |= {name.rpartition(".")[2] for each in LISTED["names"].values() for name in each}
    assert attributes() - listed - set(LISTED["elsewhere"]["transformer_engine"]) == set()


def test_every_private_name_is_in_what_is_installed() -> None:
    assert all_missing() == []


def test_a_name_that_is_gone_is_found() -> None:
    assert missing("torch._C._no_such_name")
    assert missing("torch._no_such_module.name")
    assert unread("torch.storage", "_no_such_name")
    assert unread("torch._no_such_module", "_cdata")
