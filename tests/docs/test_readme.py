"""The README tells the truth: its commands run, its tables are those of the code."""

from __future__ import annotations

import json
import re
import shlex
from functools import partial
from pathlib import Path
from typing import get_args

import pytest

from finetune.config.paths import shipped_shape
from finetune.config.recipe import list_recipes
from finetune.config.schema import (
    DataConfig,
    EvalConfig,
    Fp8Format,
    LoraSection,
    ModelConfig,
    PrecisionConfig,
    Scaling,
    Section,
)
from finetune.hardware.device import Device, backend_verdict, engine_verdict, least_capability

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```bash\n(.*?)```", README, re.S)
SMALL = {
    "compare": ("--seeds", "1", "train.max_steps=4"),
    "benchmark": ("--grid", "batch=1 length=64", "--steps", "2", "--rounds", "1"),
}
"""Verbs that take minutes as the README has them -> what makes them short."""
SLOW = (*SMALL, "diagnose", "estimate")

COMMANDS = [
    line.partition("  #")[0].strip()
    for block in BLOCKS
    for line in block.splitlines()
    if line.startswith("python -m finetune")
    and " RUN " not in line  # tests/export/test_export.py has these
]


def reference(name: str, section: type[Section]) -> str:
    """The table of a section's settings, from the configuration model."""
    schema = section.model_json_schema()["properties"]
    rows = [f"| `{name}.` | values | default | meaning |", "|---|---|---|---|"]
    for key, field in section.model_fields.items():
        values = schema[key].get("enum") or next(
            (x["enum"] for x in schema[key].get("anyOf", ()) if "enum" in x), None
        )
        kinds = [x.get("type") for x in schema[key].get("anyOf", ())]
        kind = schema[key].get("type") or next((k for k in kinds if k != "null"), "")
        shown = ", ".join(f"`{v}`" for v in values) if values else kind
        default = field.default
        text = str(list(default) if default == () else default)
        if field.is_required():
            text = "needed"
        elif default is None:
            text = "(usual)" if name == "precision" else "none"
        rows.append(f"| `{key}` | {shown} | `{text.lower()}` | {field.description} |")
    return "\n".join(rows)


def combinations() -> str:
    """Scaling x format x backend, from the verdicts of `finetune.hardware.device`."""
    rows = ["| scaling | format | `emulated` | `torchao` | `te` |", "|---|---|---|---|---|"]
    for scaling in get_args(Scaling):
        for fmt in (None,) if scaling == "nvfp4" else get_args(Fp8Format):
            precision = PrecisionConfig(
                compute="fp8", scaling=scaling, format=fmt, emulation="allow"
            )
            usual = " (usual)" if fmt == PrecisionConfig(scaling=scaling).fp8_format else ""
            shown = "E2M1" if fmt is None else f"`{fmt}`{usual}"
            cells = [_cell(name, precision) for name in ("emulated", "torchao", "te")]
            rows.append(f"| `{scaling}` | {shown} | {' | '.join(cells)} |")
    return "\n".join(rows)


def _cell(name: str, precision: PrecisionConfig) -> str:
    verdict = engine_verdict(name, precision)
    if not verdict:
        return verdict.reason
    if name == "emulated":
        return "anywhere"
    major, minor = least_capability(precision)
    later = f"has no {precision.scaling} on" in backend_verdict(name, precision, RTX5090).reason
    return f"{major}.{minor}+" + (", not 12.0" if later else "")


RTX5090 = Device("cuda", "NVIDIA GeForce RTX 5090", (12, 0), 31.4)


GENERATED = {
    "precision reference": partial(reference, "precision", PrecisionConfig),
    "model reference": partial(reference, "model", ModelConfig),
    "lora reference": partial(reference, "lora", LoraSection),
    "data reference": partial(reference, "data", DataConfig),
    "eval reference": partial(reference, "eval", EvalConfig),
    "combinations": combinations,
}
"""Name of a `<!-- name: ... -->` section of the README -> the function that makes its table."""


def refresh() -> None:
    """Write the generated sections anew: `python -m tests.docs.test_readme`."""
    text = README
    for name, make in GENERATED.items():
        head, begin, rest = text.partition(f"<!-- {name}:")
        comment, _, rest = rest.partition("-->\n")
        text = f"{head}{begin}{comment}-->\n{make()}\n{rest[rest.index('<!-- end -->') :]}"
    (ROOT / "README.md").write_text(text, encoding="utf-8")


def test_first_command_runs_the_main_job_and_second_is_that_of_ci() -> None:
    assert BLOCKS[0].strip().endswith("&& python -m finetune tiny_lora_fp8")
    assert BLOCKS[1].strip() in (ROOT / ".ci" / "run").read_text().splitlines()


@pytest.mark.parametrize("name", GENERATED)
def test_generated_tables_are_current(name) -> None:
    assert GENERATED[name]() in README, "write it anew: python -m tests.docs.test_readme"


def test_every_recipe_is_in_the_table() -> None:
    table = README.split("## Recipes")[1].split("##")[0]
    for name in list_recipes():
        assert f"`{name.rpartition('_')[0]}`" in table


def one_layer(folder: Path) -> Path:
    """A folder with the shape of an 8B Llama that has a single layer."""
    shipped = shipped_shape("meta-llama/Llama-3.1-8B-Instruct")
    assert shipped is not None
    short = {"num_hidden_layers": 1, "max_position_embeddings": 4096}
    shape = json.loads(shipped.read_text()) | short
    (folder / "one_layer").mkdir()
    (folder / "one_layer" / "config.json").write_text(json.dumps(shape))
    return folder / "one_layer"


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(one, marks=[pytest.mark.slow] if one.split()[3] in SLOW else [])
        for one in sorted(set(COMMANDS))
    ],
)
def test_command_runs(command, cli, tmp_path) -> None:
    """Each command of the README in a fresh folder."""
    rows = "\n".join(f'{{"prompt": "Say {i}.", "completion": "It is {i}."}}' for i in range(16))
    (tmp_path / "mine.jsonl").write_text(rows)
    words = shlex.split(command)[3:]
    if words[0] == "estimate":  # of one layer: a search over all 32 or 80 takes a minute
        words.append(f"model.name={one_layer(tmp_path)}")
    if "data.path=mine.jsonl" in words:
        words.append("train.max_steps=3")  # the whole recipe is trained in test_training.py
    done = cli(*words, *SMALL.get(words[0], ()))
    undecided = {"compare": 3}.get(words[0], 0)  # four steps of one seed decide nothing
    assert done.code in (0, undecided), done.err[-2000:]
    assert done.out.strip()


if __name__ == "__main__":
    refresh()
