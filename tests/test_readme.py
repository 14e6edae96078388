"""The README tells the truth: its commands run, its tables are those of the code."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from finetune.config import PrecisionConfig
from finetune.recipe import list_recipes

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```bash\n(.*?)```", README, re.S)
COMMANDS = [
    line.partition("  #")[0].strip()
    for block in BLOCKS
    for line in block.splitlines()
    if line.startswith("python -m finetune")
]


def precision_reference() -> str:
    """The table of `precision.*`, from the configuration model."""
    schema = PrecisionConfig.model_json_schema()["properties"]
    rows = []
    for name, field in PrecisionConfig.model_fields.items():
        values = schema[name].get("enum") or next(
            (x["enum"] for x in schema[name].get("anyOf", ()) if "enum" in x), None
        )
        kind = schema[name].get("type", "")
        shown = ", ".join(f"`{v}`" for v in values) if values else kind
        default = field.default
        text = "(usual)" if default is None else str(list(default) if default == () else default)
        rows.append(f"| `{name}` | {shown} | `{text.lower()}` | {field.description} |")
    return "\n".join(rows)


def test_first_command_runs_the_main_job_and_second_is_that_of_ci() -> None:
    assert BLOCKS[0].strip().endswith("&& python -m finetune tiny_lora_fp8")
    assert BLOCKS[1].strip() in (ROOT / ".ci" / "run").read_text().splitlines()


def test_precision_reference_is_current() -> None:
    assert precision_reference() in README, f"README's table should be:\n{precision_reference()}"


def test_every_recipe_is_in_the_table() -> None:
    table = README.split("## Recipes")[1].split("##")[0]
    for name in list_recipes():
        assert f"`{name.rpartition('_')[0]}`" in table


@pytest.mark.parametrize("command", sorted(set(COMMANDS)))
def test_command_runs(command, tmp_path) -> None:
    """Each command of the README in a fresh folder."""
    rows = "\n".join(f'{{"prompt": "Say {i}.", "completion": "It is {i}."}}' for i in range(16))
    (tmp_path / "mine.jsonl").write_text(rows)
    argv = shlex.split(command)
    argv[0] = sys.executable
    if "tiny_lora_fp8" in argv[3:4] and "data.path=mine.jsonl" in argv:
        argv += ["train.max_steps=3"]  # the whole recipe is trained in test_training.py
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip()
