"""README and site tell the truth: every command is run here, or parsed and marked as too long."""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import finetune
from finetune import setup_fp8_mixed_precision_training
from finetune.config.paths import list_recipes, shipped_shape
from finetune.config.schema import RunConfig
from finetune.precision.settings import PrecisionConfig
from tests.docs.commands import BLOCK, ROOT, Command, check, commands_of, documents

HELPER = setup_fp8_mixed_precision_training
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = [block for _, block in BLOCK.findall(README)]
SMALL = {
    "compare": ("--seeds", "1", "train.max_steps=4"),
    "benchmark": ("--grid", "batch=1 length=64", "--steps", "2", "--rounds", "1"),
}
"""Verbs that take minutes as the documents have them -> what makes them short."""
SLOW = (*SMALL, "diagnose", "estimate")
RUN_ELSEWHERE = {
    "chat": "tests/training/test_chat.py",
    "generate": "tests/cli/test_cli.py",
    "serve": "tests/cli/test_last_lines.py",
    "evaluate": "tests/cli/test_cli.py",
    "report": "tests/analysis/test_report.py",
    "export": "tests/export/test_export.py",
    "watch": "tests/cli/test_watch.py",
}
"""Verbs about a finished run -> the tests that run them on one."""
ESTIMATES = ("--fit", "--changes", "--tokens")
"""Options of `estimate`, each of which is run once."""

ALL = [command for path in documents() for command in commands_of(path)]


def must_run() -> list[str]:
    """Commands that are run: all that are not marked, once for each way through the code."""
    found: dict[object, str] = {}
    for text, _, mark in ALL:
        words = shlex.split(text)
        if mark or words[:3] != ["python", "-m", "finetune"]:
            continue
        verb = words[3]
        if verb in RUN_ELSEWHERE or text == "python -m finetune tiny_lora_fp8":
            continue  # the second: test_training.py trains the whole recipe
        key = text
        if verb == "estimate":
            key = next((o for o in ESTIMATES if o in words), "--gpus" in words)
        elif verb in SLOW:
            key = verb
        found.setdefault(key, text)
    return sorted(set(found.values()))


def takes_long(command: str) -> bool:
    """True for verbs of minutes, and for runs that differ from others in a setting."""
    words = shlex.split(command)
    return words[3] in SLOW or "train.max_steps=4" in words


def tier(command: str) -> list:
    if takes_long(command):
        return [pytest.mark.long]
    trains = shlex.split(command)[3] in list_recipes()
    return [pytest.mark.slow] if trains else []


def test_first_command_runs_the_main_job_and_second_is_that_of_ci() -> None:
    assert BLOCKS[0].strip().endswith("&& python -m finetune tiny_lora_fp8")
    rest = (ROOT / ".ci" / "run").read_text()
    for part in BLOCKS[1].strip().split(" && "):  # in this order, with other work between
        assert part in rest
        rest = rest.partition(part)[2]


def test_readme_is_short() -> None:
    assert len(README.splitlines()) <= 180


@pytest.mark.parametrize("path", documents(), ids=lambda path: path.stem)
def test_what_commands_name_is_there(path) -> None:
    for command in commands_of(path):
        try:
            check(command.text)
        except Exception as error:
            raise AssertionError(f"{command.document}: {command.text}") from error


def test_recipes_of_the_documents_are_there() -> None:
    """A word such as `llama_8b_lora_fp8` is a recipe."""
    known, methods = set(list_recipes()), ("_full_fp8", "_full_bf16", "_lora_fp8", "_lora_bf16")
    for path in documents():
        for word in path.read_text(encoding="utf-8").replace("`", " ").split():
            assert not word.endswith(methods) or word.startswith("_") or word in known, word


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
    [pytest.param(one, marks=tier(one)) for one in must_run()],
)
def test_command_runs(command, cli, tmp_path) -> None:
    """Each in a fresh folder."""
    rows = "\n".join(f'{{"prompt": "Say {i}.", "completion": "It is {i}."}}' for i in range(16))
    (tmp_path / "mine.jsonl").write_text(rows)
    words = shlex.split(command)[3:]
    if words[0] == "estimate":  # of one layer: a search over all 32 or 80 takes a minute
        words.append(f"model.name={one_layer(tmp_path)}")
    if words[0] in list_recipes():
        # test_training.py trains whole recipes
        words += ["train.max_steps=3", "data.max_rows=48", "eval.samples=false"]
    done = cli(*words, *SMALL.get(words[0], ()))
    undecided = {"compare": 3}.get(words[0], 0)  # four steps of one seed decide nothing
    assert done.code in (0, undecided), done.err[-2000:]
    assert done.out.strip()


NOISE = ("Failed to load", "FutureWarning", "Enum subclass", "experimental")
"""What libraries say about themselves when they are imported."""


@pytest.mark.long
@pytest.mark.parametrize("code", re.findall(r"^```python\n(.*?)^```", README, re.S | re.M))
def test_python_of_readme_runs_as_it_is_written(code, tmp_path) -> None:
    """In a fresh interpreter, without a GPU or a network; and nothing but the script speaks."""
    hidden = {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=os.environ | hidden, text=True,
        capture_output=True, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert "FP8 verified" in done.stdout
    assert not [word for word in NOISE if word in done.stderr], done.stderr[:2000]


@pytest.mark.parametrize("path", documents(), ids=lambda path: path.stem)
def test_code_of_the_documents_is_code(path) -> None:
    """Python parses and imports public names; the precision of YAML blocks is accepted."""
    text = path.read_text(encoding="utf-8")
    for block in re.findall(r"^```python\n(.*?)^```", text, re.S | re.M):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and node.module == "finetune":
                assert {alias.name for alias in node.names} <= set(finetune.__all__)
            if isinstance(node, ast.Call) and ast.unparse(node.func) == HELPER.__name__:
                known = inspect.signature(HELPER).parameters.keys() | PrecisionConfig.model_fields
                assert {keyword.arg for keyword in node.keywords} <= known
    for block in re.findall(r"^```yaml\n(.*?)^```", text, re.S | re.M):
        sections = yaml.safe_load(block)
        assert sections.keys() <= RunConfig.model_fields.keys()
        PrecisionConfig(**sections.get("precision", {}))


def test_a_wrong_command_would_be_found() -> None:
    for text in (
        "python -m finetune estimat llama_8b_lora_fp8",
        "python -m finetune estimate llama_8b_lora_fp8 --gpuu H100",
        "python -m finetune tiny_full_fp8 precision.scalling=mxfp8",
        "python -m tests.benchmarks.no_such_thing",
        "pytest tests/docs/test_readme.py -k no_such_test",
    ):
        with pytest.raises((Exception, SystemExit)):
            check(Command(text, "", "").text)
