"""Versions of the libraries around this package, compared with those that its tests ran on.

`assets/tested.toml` is the one table: pip's ranges in pyproject.toml, the README, `doctor`, the
receipt and what is said at the start of a run all follow it. Nothing here imports a library: their
versions are read from their metadata, in milliseconds, before one that is too old can fail.
"""

from __future__ import annotations

import functools
import importlib.metadata
import platform
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from finetune.errors import ConfigError

TABLE = Path(__file__).parents[1] / "assets" / "tested.toml"
Standing = Literal["tested", "newer", "older"]


@functools.cache
def table() -> dict[str, Any]:
    """The table: `ran` (library -> versions, lowest first), `needed`, `known_bad`."""
    return tomllib.loads(TABLE.read_text(encoding="utf-8"))


def version(distribution: str) -> str | None:
    """Installed version of a distribution, None when it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def installed() -> dict[str, str]:
    """Library -> version of those in the table that are installed, and Python's."""
    found = {name: version(name) for name in table()["ran"] if name != "python"}
    return {"python": platform.python_version()} | {k: v for k, v in found.items() if v}


def standing(name: str, version: str) -> Standing:
    """Where a version lies: `newer` begins at the first minor version after the last that ran."""
    from packaging.version import Version

    lowest, newest = (Version(table()["ran"][name][end]) for end in (0, -1))
    found = Version(version)
    if Version(found.base_version) < lowest:
        return "older"
    return "newer" if (found.major, found.minor) > (newest.major, newest.minor) else "tested"


def standings(versions: Mapping[str, str]) -> dict[str, Standing]:
    """The same of all libraries in the table."""
    ran = table()["ran"]
    return {name: standing(name, found) for name, found in versions.items() if name in ran}


def concerns(versions: Mapping[str, str]) -> Iterator[str]:
    """Lines about versions that are older or newer than tested, or known to be bad together."""
    from packaging.specifiers import SpecifierSet

    ran = table()["ran"]
    for name, where in standings(versions).items():
        if where == "older":
            yield f"{name} {versions[name]} is older than {ran[name][0]}, the oldest tested"
    newer = [name for name, where in standings(versions).items() if where == "newer"]
    if newer:
        each = (f"{name} {versions[name]} (tested up to {ran[name][-1]})" for name in newer)
        yield f"newer than this package was tested with: {', '.join(each)}"
    for pair in table()["known_bad"]:
        if all(
            name in versions and SpecifierSet(spec).contains(versions[name], prereleases=True)
            for name, spec in pair["versions"].items()
        ):
            both = " with ".join(f"{name} {versions[name]}" for name in pair["versions"])
            yield f"{both}: {pair['reason']}. Fix: {pair['fix']}"


def check(versions: Mapping[str, str] | None = None) -> list[str]:
    """Lines to show before a run; versions are those that are installed unless given.

    Raises:
        ConfigError: Python or a library that every run needs is older than the oldest tested.
    """
    versions = installed() if versions is None else versions
    needed = ("python", *table()["needed"])
    old = [name for name in needed if standings(versions).get(name) == "older"]
    if old:
        lowest = {name: table()["ran"][name][0] for name in old}
        install = " ".join(f"'{name}>={lowest[name]}'" for name in old if name != "python")
        raise ConfigError(
            ", ".join(f"{name} {versions[name]} is too old" for name in old),
            where="the installed libraries",
            why="; ".join(f"the oldest tested is {name} {lowest[name]}" for name in old),
            fix=f"pip install {install}" if install else f"Python {lowest['python']} or later",
        )
    # An old library of an extra is a line of `doctor`: a run may not use it.
    return [line for line in concerns(versions) if " is older than " not in line]
