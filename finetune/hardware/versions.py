"""Versions of the libraries around this package, compared with those that its tests ran on.

`assets/tested.toml` is the one table: pip's ranges in pyproject.toml, the README, `doctor`, the
receipt and what is said at the start of a run all follow it. Nothing here imports a library: their
versions are read from their metadata, in milliseconds, before one that is too old can fail.
"""

from __future__ import annotations

import functools
import importlib.metadata
import platform
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from finetune.errors import ConfigError

TABLE = Path(__file__).parents[1] / "assets" / "tested.toml"
VersionStatus = Literal["tested", "newer", "older"]


@functools.cache
def table() -> dict[str, Any]:
    """`needed`, `counts_patches`, `ran` (library -> versions, lowest first) and `known_bad`."""
    return tomllib.loads(TABLE.read_text(encoding="utf-8"))


@functools.cache  # a receipt asks for all of them
def version(distribution: str) -> str | None:
    """Installed version of a distribution, None when it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache  # asked for at each attention
def installed_torch() -> tuple[int, int, int]:
    """Version of the installed torch."""
    return _release(version("torch") or "0")


@functools.cache
def torch_of_gpus() -> tuple[int, int, int]:
    """Version of torch that a GPU runs: the one here, unless its build has no CUDA.

    Then the newest that was tested, which `requirements/gpu.txt` brings.
    """
    here = version("torch") or "0"
    without_cuda = "+cpu" in here or sys.platform == "darwin"
    return _release(table()["ran"]["torch"][-1] if without_cuda else here)


def _release(found: str) -> tuple[int, int, int]:
    from packaging.version import Version

    release = Version(found)
    return release.major, release.minor, release.micro


def installed() -> dict[str, str]:
    """Library -> version of those in the table that are installed, and Python's."""
    found = {name: version(name) for name in table()["ran"] if name != "python"}
    return {"python": platform.python_version()} | {k: v for k, v in found.items() if v}


def version_status(name: str, version: str) -> VersionStatus:
    """Where a version lies: `newer` begins at the first minor version after the last that ran."""
    from packaging.version import Version

    lowest, newest = (Version(table()["ran"][name][end]) for end in (0, -1))
    found = Version(version)
    if Version(found.base_version) < lowest:
        return "older"
    length = series_length(name)
    return "newer" if found.release[:length] > newest.release[:length] else "tested"


def series_length(name: str) -> int:
    """How many parts name a series of releases: 2 (5.24), or 3 where patches count (0.4.13)."""
    return 3 if name in table()["counts_patches"] else 2


def version_statuses(versions: Mapping[str, str]) -> dict[str, VersionStatus]:
    """`version_status` of each library in the table."""
    ran = table()["ran"]
    return {name: version_status(name, found) for name, found in versions.items() if name in ran}


def older(versions: Mapping[str, str]) -> dict[str, str]:
    """Library -> the lowest version that was tested, of those that are older."""
    ran = table()["ran"]
    return {name: ran[name][0] for name, at in version_statuses(versions).items() if at == "older"}


def concerns(versions: Mapping[str, str]) -> list[str]:
    """Lines about versions that are newer than tested, or known to be bad together."""
    from packaging.specifiers import SpecifierSet

    ran = table()["ran"]
    newer = ", ".join(
        f"{name} {versions[name]} (tested up to {ran[name][-1]})"
        for name, at in version_statuses(versions).items()
        if at == "newer"
    )
    lines = [f"newer than this package was tested with: {newer}"] if newer else []
    for pair in table()["known_bad"]:
        if all(
            name in versions and SpecifierSet(spec).contains(versions[name], prereleases=True)
            for name, spec in pair["versions"].items()
        ):
            both = " with ".join(f"{name} {versions[name]}" for name in pair["versions"])
            lines.append(f"{both}: {pair['reason']}. Fix: {pair['fix']}")
    return lines


def check() -> list[str]:
    """Lines to show before a run, about Python and the libraries that every run needs.

    Raises:
        ConfigError: one of these is older than the oldest tested.
    """
    needed = ("python", *table()["needed"])
    versions = {name: found for name, found in installed().items() if name in needed}
    if old := older(versions):
        install = " ".join(f"'{name}>={low}'" for name, low in old.items() if name != "python")
        raise ConfigError(
            ", ".join(f"{name} {versions[name]} is too old" for name in old),
            where="the installed libraries",
            why="; ".join(f"the oldest tested is {name} {low}" for name, low in old.items()),
            fix=f"pip install {install}" if install else f"Python {old['python']} or later",
        )
    return concerns(versions)
