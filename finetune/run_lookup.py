"""Which run is meant: a folder, `last`, or a recipe's name for its newest run.

Runs lie in `runs/<recipe>/<time>-<id>/`; each has the `config.yaml` it was started with. Nothing
here imports torch.
"""

from __future__ import annotations

from pathlib import Path

from finetune.errors import ConfigError, nearest

LAST = "last"
SHOWN = 3


def newest_runs(out: Path, recipe: str = "*") -> list[Path]:
    """Run folders under `out`, newest first."""
    found = [config.parent for config in out.glob(f"{recipe}/*/config.yaml")]
    return sorted(found, key=lambda run: (run.name[:15], _written(run), run.name), reverse=True)


def _written(run: Path) -> int:
    """Two runs of one second have random ends of names."""
    return (run / "config.yaml").stat().st_mtime_ns


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
    runs = newest_runs(out) if name == LAST else newest_runs(out, _literal(name))
    if runs and len(Path(name).parts) == 1:
        return runs[0]
    inside = newest_runs(folder.parent, _literal(folder.name)) if folder.is_dir() else []
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


def _literal(name: str) -> str:
    import glob

    return glob.escape(name)
