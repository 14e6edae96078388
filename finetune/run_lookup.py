"""Which run is meant: a folder, `last`, or a recipe's name for its newest run.

Runs are found as `ls --runs` finds them (`finetune.runs`): those inside a comparison belong to it,
and are named by their folders. Nothing here imports torch.
"""

from __future__ import annotations

from pathlib import Path

from finetune.errors import ConfigError, nearest
from finetune.runs import find_runs

LAST = "last"
SHOWN = 3


def newest_runs(out: Path, recipe: str | None = None) -> list[Path]:
    """Run folders under `out`, of a recipe or of all, newest first."""
    runs = find_runs(out) if out.is_dir() else []
    return [run.folder for run in runs if recipe in (None, run.folder.parent.name)]


def find_run(name: str, out: Path | str = "runs") -> Path:
    """The run folder that a user means.

    Args:
        name: a run folder, `last`, or a recipe's name.
        out: folder of runs.

    Raises:
        ConfigError: there is none; names the nearest, or the newest ones.
    """
    folder, out = Path(name).expanduser(), Path(out).expanduser()
    if (folder / "config.yaml").is_file():
        return folder
    runs = newest_runs(out) if name == LAST else newest_runs(out, name)
    if runs and len(Path(name).parts) == 1:
        return runs[0]
    inside = newest_runs(folder.parent, folder.name) if folder.is_dir() else []
    recipes = sorted({run.parent.name for run in newest_runs(out)})
    hint = nearest(name, [LAST, *recipes])
    newest = ", ".join(map(str, (inside or newest_runs(out))[:SHOWN]))
    what = "there is no run yet" if name == LAST else f"there is no run {name!r}"
    raise ConfigError(
        what + (f"; {hint}" if hint and name != LAST else ""),
        where=str((out if name == LAST else folder).resolve()),
        why="a run folder holds config.yaml" if folder.is_dir() else "",
        fix=f"the newest: {newest}"
        if newest
        else "train one: python -m finetune tiny_lora_fp8; --out says where runs lie",
    )
