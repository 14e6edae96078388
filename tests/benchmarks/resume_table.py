"""What resuming does with every changed setting, and with every damaged file of a checkpoint.

    python -m tests.benchmarks.resume_table

Settings are walked in the models of the configuration and in `trl.SFTConfig`: each is given another
value than the checkpoint's. Files are those of a real run, each removed, emptied, cut and with one
bit flipped.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from finetune import load_recipe
from finetune.config.schema import RunConfig
from finetune.config.train_section import OWNED_BY_US
from finetune.errors import ConfigError
from finetune.runs.checkpoints import CHECKPOINTS, MANIFEST, Checkpoint, checkpoints_in
from finetune.training.checkpoints.resume import RULES, check_resume, facts_of

OTHER = 977


class Row(NamedTuple):
    """A changed setting or damaged file, what was done to it, and what came of it.

    Attributes:
        verdict: `refused`, or the rule by which a setting may differ; the problem of a checkpoint.
        values_shown, allow_named: of a refusal, both values and the key of `resume.allow`.
    """

    key: str
    change: str
    verdict: str
    values_shown: bool = False
    allow_named: bool = False


# --------------------------------------------------------------------------------------- settings


def _keys() -> Iterator[str]:
    """`section.key` of every setting that a recipe can have."""
    from trl import SFTConfig

    for section, field in RunConfig.model_fields.items():
        for part in (field.annotation, *getattr(field.annotation, "__args__", ())):
            yield from (f"{section}.{key}" for key in getattr(part, "model_fields", {}))
    names = (f.name for f in dataclasses.fields(SFTConfig) if f.init)
    yield from (f"train.{name}" for name in names if name not in OWNED_BY_US)


def settings(folder: Path) -> list[Row]:
    """A row for each setting, changed alone."""
    began = load_recipe("tiny_lora_fp8").config
    saved = folder / "checkpoint-1"
    saved.mkdir()
    (saved / "trainer_state.json").write_text(json.dumps({"global_step": 1}))
    facts = {**facts_of(began, "rows", 1), "files": {}}
    (saved / MANIFEST).write_text(json.dumps(facts))
    rows = []
    for key in _keys():
        section, _, name = key.partition(".")
        now = began.model_dump()
        now[section][name] = OTHER  # whatever its type: what is compared is plain data
        rows.append(_verdict(key, saved, began, facts | {"config": json.loads(json.dumps(now))}))
    return rows


def _verdict(key: str, saved: Path, config: RunConfig, facts: dict[str, Any]) -> Row:
    try:
        check_resume(Checkpoint(saved), config, facts)
    except ConfigError as error:
        fits = "do not fit" not in error.fix
        shown = f"{key}: " in error.why and f"{OTHER} now" in error.why
        verdict = "refused" if fits else "refused: tensors do not fit"
        return Row(key, "another value", verdict, shown, f"[{key}]" in error.fix)
    may = (r for r, patterns in RULES.items() if any(fnmatch.fnmatch(key, p) for p in patterns))
    rule = next(may, "")
    return Row(key, "another value", rule)


# ------------------------------------------------------------------------------------------ files


def empty(file: Path) -> None:
    file.write_bytes(b"")


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-7])


def flip_a_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)


def files(folder: Path) -> list[Row]:
    """A row for each file of a run's checkpoint and each damage."""
    from rich.console import Console

    from tests.run_folders import trained

    recipe = load_recipe(
        "tiny_full_fp8",
        ["train.max_steps=1", "train.warmup_steps=0", "train.save_strategy=steps",
         "train.eval_strategy=no", "eval.samples=false", "data.max_rows=24", "train.max_length=64"],
    )  # fmt: skip
    report = trained(recipe, out=folder, console=Console(quiet=True))
    (saved,) = checkpoints_in(report.folder / CHECKPOINTS).values()
    rows = []
    for file in sorted(path for path in saved.rglob("*") if path.is_file()):
        whole = file.read_bytes()
        for damage in (Path.unlink, empty, truncate, flip_a_bit):
            damage(file)
            problem = Checkpoint(saved).problem(contents=True)
            rows.append(Row(str(file.relative_to(saved)), damage.__name__, problem))
            file.write_bytes(whole)
    return rows


def main() -> None:
    """Print both tables."""
    from rich.table import Table

    from finetune.logging import output

    with tempfile.TemporaryDirectory() as place:
        for title, rows in (
            ("every setting, changed", settings(Path(place))),
            ("every file, damaged", files(Path(place))),
        ):
            table = Table("key or file", "change", "verdict", title=title, box=None)
            for row in rows:
                table.add_row(row.key, row.change, row.verdict or "[red]SILENT")
            output().print(table)


if __name__ == "__main__":
    main()
