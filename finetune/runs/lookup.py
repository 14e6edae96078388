"""Lookup of runs and comparisons on disk, for a user who names one. Imports no torch.

Runs are found as `ls --runs` shows them: those inside a comparison that has ended belong to it, and
are named by their folders.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from finetune.config.paths import recipe_of, user_path
from finetune.errors import ConfigError, did_you_mean, nearest
from finetune.logging import output, whole
from finetune.runs.folder import COMPARISON, RunFolder

if TYPE_CHECKING:
    from finetune.config.schema import RunConfig

DEPTH = 3
"""Folders below the folder of runs in which runs are looked for."""
COMPARED = ("compare", 6)
"""Folder of comparisons, and the depth below it of runs of one that has not ended."""
LAST = "last"
SHOWN = 3
_WRITTEN = ("run.json", "receipt.json", "metrics.jsonl")


def is_run(folder: Path) -> bool:
    """True if a folder is one of a run."""
    return (folder / "config.yaml").is_file() and any((folder / f).is_file() for f in _WRITTEN)


def find_runs(out: Path | str = "runs") -> list[RunFolder]:
    """All runs below a folder, newest first; runs of comparisons that ended belong to these.

    Raises:
        ConfigError: there is no such folder.
    """
    found = [RunFolder(folder) for folder in _folders(Path(out)) if is_run(folder)]
    return sorted(found, key=lambda run: (run.started, run.name), reverse=True)


def find_comparisons(out: Path | str = "runs") -> list[Path]:
    """All folders below a folder that hold a comparison, newest first; as `find_runs`.

    Raises:
        ConfigError: there is no such folder.
    """
    found = [folder for folder in _folders(Path(out)) if (folder / COMPARISON).is_file()]
    return sorted(found, key=lambda f: (f / COMPARISON).stat().st_mtime, reverse=True)


def _folders(out: Path) -> Iterator[Path]:
    """Folders of runs and of comparisons, nothing below either."""
    out = user_path(out)
    if not out.is_dir():
        raise ConfigError(
            f"there is no folder of runs {str(out)!r}",
            where=str(out.absolute()),
            fix="`python -m finetune RECIPE` makes runs/, or the folder of its --out",
        )
    yield from _walk(out, DEPTH)


def _walk(folder: Path, depth: int) -> Iterator[Path]:
    # Nothing below a run is one: checkpoints also hold configurations, and a comparison's runs are
    # its own.
    if is_run(folder) or (folder / COMPARISON).is_file():
        yield folder
        return
    # Runs of a comparison that has not ended lie deeper, below its sides.
    if folder.name == COMPARED[0]:
        depth = COMPARED[1]
    if depth:
        try:
            with os.scandir(folder) as entries:
                below = sorted(e.path for e in entries if e.is_dir() and e.name[0] != ".")
        except PermissionError:
            return  # another user's folder holds none of our runs
        for path in below:
            yield from _walk(Path(path), depth - 1)


def read_run(folder: Path | str) -> RunFolder:
    """The run in a folder; if it is none, a `ConfigError` names that around it, or the nearest."""
    folder = user_path(folder)
    if is_run(folder):
        return RunFolder(folder)
    around = next((path for path in folder.parents if is_run(path)), None)
    inside = next((path for path in (folder, *folder.parents) if path.is_dir()), Path())
    # Not the whole disk, or the folder that the command was started in.
    inside = Path("runs") if inside in (Path(), inside.parent) else inside
    known = [str(run.folder) for run in (find_runs(inside) if inside.is_dir() else [])]
    # From the most certain to the least: the run around it, a name that is close, the newest one.
    fix = "give the folder that the run printed, runs/<recipe>/<time>-<id>"
    if folder.exists() and around is not None:
        fix = f"the run is {around} (--checkpoint N takes one of its checkpoints)"
    elif close := None if folder.is_dir() else nearest(str(folder), known):
        fix = f"the nearest run is {close}"
    elif known:
        fix = f"the newest run {'in it ' if folder.is_dir() else ''}is {known[0]}"
    raise ConfigError(
        f"{str(folder)!r} is no run folder",
        where=str(folder.absolute()),
        why="a run folder holds config.yaml and metrics.jsonl or receipt.json"
        if folder.exists()
        else "there is no such folder",
        fix=fix,
    )


def newest_runs(out: Path, recipe: str | None = None) -> list[Path]:
    """Run folders under `out`, of a recipe or in a folder of that name, or all; newest first."""
    runs = find_runs(out) if out.is_dir() else []
    return [run.folder for run in runs if recipe in (None, run.recipe, run.folder.parent.name)]


def find_run(name: str, out: Path | str = "runs", holding: str = "") -> Path:
    """The run folder that a user means.

    Args:
        name: a run folder, `last`, or a recipe's name.
        out: folder of runs.
        holding: folder, such as trained weights', by which a recipe's name means the newest
            run that has it; what is newer is said.

    Raises:
        ConfigError: there is none; names the nearest, or the newest ones.
    """
    folder, out = user_path(name), user_path(out)
    # A folder comes before a recipe of the same name, as a shell's path would.
    if (folder / "config.yaml").is_file():
        return folder
    runs = newest_runs(out, None if name == LAST else name)
    if len(Path(name).parts) > 1 or (folder.exists() and not runs):
        return read_run(folder).folder
    if runs:
        has = (run for run in runs if name == LAST or (run / holding).is_dir())
        # The newest run may still train; taking an older one in silence would answer from other
        # weights.
        if (found := next(has, runs[0])) != runs[0]:
            newest = f"{runs[0]}, which is newer, has no {holding}/: {RunFolder(runs[0]).progress}"
            output(stderr=True).print(whole(f"! {newest}; {found} is taken", "yellow"), crop=False)
        return found
    others = newest_runs(out)
    known = did_you_mean(name, [LAST, *sorted(set(map(recipe_of, others)))])
    raise ConfigError(
        "there is no run yet" if name == LAST else f"there is no run {name!r}{known}",
        where=str((out if name == LAST else folder).absolute()),
        fix=f"the newest: {', '.join(map(str, others[:SHOWN]))}"
        if others
        else "train one: python -m finetune tiny_lora_fp8; a run elsewhere is named by its folder",
    )


def refuse_foreign_code(config: RunConfig, folder: Path, trusted: bool) -> None:
    """Reject a run whose model brings its own code, unless whoever starts the command trusts it.

    The folder may come from somebody else, and its own word is no permission.

    Raises:
        ConfigError: the run's recipe has `model.trust_remote_code`, and `trusted` is False.
    """
    if config.model.trust_remote_code and not trusted:
        raise ConfigError(
            "the model of this run brings code of its own, which would run here",
            where=f"{folder / 'config.yaml'}: model.trust_remote_code",
            why=f"{config.model.name} and the run's folder may come from somebody else",
            fix="--trust-remote-code, once you have read that code",
        )
