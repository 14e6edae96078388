"""Malformed command lines, recipes, settings and files of rows: exit code 2, and a fix."""

from __future__ import annotations

import dataclasses
import gzip
import itertools
import json
import random
import re
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from pydantic import BaseModel

from finetune.config.paths import find_recipe
from finetune.config.schema import RunConfig
from finetune.data.text_rows import rows_of
from finetune.errors import DataError
from tests.conftest import slow_but

CORPUS: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "corpus.yaml").read_text("utf-8"))
FIX = re.compile(r"^  fix: +\S|^Try '.+ (--help|-h)'", re.MULTILINE)
"""An error's way out: ours, or that of an unknown option."""


@pytest.fixture
def refused(cli, monkeypatch):
    """A function that runs a command line, which has to end with 2 and a fix."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def run(*words: str) -> None:
        done = cli(*words)
        assert (done.code, bool(FIX.search(done.err))) == (2, True), f"{words!r}\n{done.err}"

    return run


def some(cases: Any, count: int) -> list[Any]:
    """A sample of cases, always the same."""
    cases = list(cases)
    return random.Random(0).sample(cases, min(count, len(cases)))


# ------------------------------------------------------------------------ command lines and recipes


@pytest.mark.parametrize("torch", [False, pytest.param(True, marks=pytest.mark.long)])
def test_words_of_the_command_line(refused, torch) -> None:
    lines = [given["line"] for given in CORPUS["words"] if given.get("torch", False) == torch]
    for line, number in zip(lines, itertools.cycle(CORPUS["numbers"]), strict=False):
        refused(*(part.replace("NUMBER", number).replace("NAME", "q-[b]/\n") for part in line))


def test_texts_that_are_no_recipes(refused) -> None:
    recipe = find_recipe("tiny_lora_fp8").read_text("utf-8")
    texts = [text.encode("utf-8", "surrogatepass") for text in CORPUS["recipes"]]
    texts += [recipe.encode(code) for code in ("utf-16", "utf-16-le", "utf-32")]
    texts += [recipe.encode().replace(b"rowwise", bad) for bad in (b"row\xffwise", b"row\0wise")]
    for text in texts:
        Path("r.yaml").write_bytes(text)
        refused("cat", "r.yaml", "--resolved")


def test_recipes_with_a_damaged_line(refused) -> None:
    lines = find_recipe("tiny_lora_fp8").read_text("utf-8").splitlines()
    places = [i for i, line in enumerate(lines) if ":" in line.partition("#")[0]]
    for place, damage in some(itertools.product(places, CORPUS["damage"]), 40):
        key = lines[place].partition(":")[0]
        indent = " " * (len(key) - len(key.lstrip()))
        bad = damage.replace("LINE", lines[place]).replace("KEY", key).replace("INDENT", indent)
        Path("r.yaml").write_text("\n".join([*lines[:place], bad, *lines[place + 1 :], ""]))
        refused("cat", "r.yaml", "--resolved")


@pytest.mark.parametrize("verb", ["cat", "run", "validate", "estimate", "cp", "data", "diagnose"])
def test_paths_that_are_no_recipe_files(refused, verb) -> None:
    Path("folder.yaml").mkdir()
    Path("loop.yaml").symlink_to("loop.yaml")
    names = ["folder.yaml", "loop.yaml", "a/b/r.yaml", "r" * 300 + ".yaml", "a\nb.yaml"]
    for name in [*names, "/dev/null/x.yaml", "~nobody/r.yaml"]:
        refused(verb, name, *(["copy.yaml"] if verb == "cp" else []))


# ---------------------------------------------------------------------------------------- settings


def fields() -> dict[str, Any]:
    """Setting of a section of ours -> its type."""
    found = {}
    for section, field in RunConfig.model_fields.items():
        parts = (field.annotation, *get_args(field.annotation))
        kind = next((p for p in parts if isinstance(p, type) and issubclass(p, BaseModel)), None)
        for name, inner in kind.model_fields.items() if kind else ():
            found[f"{section}.{name}"] = inner.annotation
    return found


def kinds(annotation: Any) -> set[str]:
    """Names of what a setting takes: `int`, `str`, `Literal`, `tuple`, ..."""
    origin = getattr(annotation, "__origin__", None)
    if origin in (tuple, dict):
        return {origin.__name__}
    if "Literal" in str(origin):
        return {"Literal"}
    inner = [kinds(one) for one in get_args(annotation) if one is not type(None)]
    return set().union(*inner) if inner else {getattr(annotation, "__name__", "")}


@pytest.mark.parametrize("name", fields())
def test_values_of_another_type_or_out_of_range(refused, name) -> None:
    taken = kinds(fields()[name])
    first = next(k for k in CORPUS["values"] if k in taken)
    values = CORPUS["values"]["dict or nothing" if {"tuple", "str"} <= taken else first]
    for value in ["{a: b}"] if name == "eval.tasks" else some(values, 3):
        refused("cat", "tiny_lora_fp8", "--resolved", f"{name}={value}")


def numeric() -> list[str]:
    """Settings of `trl.SFTConfig` that are numbers."""
    from trl import SFTConfig

    found = {f.name: str(f.type) for f in dataclasses.fields(SFTConfig) if f.init}
    numbers = [name for name, kind in found.items() if "int" in kind or "float" in kind]
    return sorted({*numbers} - {*CORPUS["any number"]})


def test_numbers_that_no_training_has(refused) -> None:
    own = [(name, value) for name, values in CORPUS["also of"].items() for value in values]
    for name, value in own + some(itertools.product(numeric(), CORPUS["train numbers"]), 60):
        refused("cat", "tiny_full_bf16", "--resolved", f"train.{name}={value}")


def test_overrides_that_are_none(refused) -> None:
    empty = ["{}=", "{}=  ", "{}=''", "{}=\x00", "{}=\udcff", "{}", "~{}=1", "={}"]
    names = [*fields(), *(f"train.{name}" for name in numeric())]
    for name, form in some(itertools.product(names, empty), 40):
        refused("cat", "tiny_lora_fp8", "--resolved", form.format(name))
    for line in CORPUS["overrides"]:
        refused("cat", "tiny_lora_fp8", "--resolved", line)


@pytest.mark.long
@pytest.mark.parametrize("line", [[x] for x in CORPUS["meanings"]] + CORPUS["train"], ids=str)
def test_settings_that_name_nothing_or_that_a_library_refuses(refused, line) -> None:
    refused("run", "tiny_lora_fp8", "train.max_steps=2", "train.warmup_steps=0", *line)


# -------------------------------------------------------------------------------------------- rows

ROW = b'{"text": "a"}\n'
PAIR = b'{"prompt": "a", "completion": "b"}\n'
CSV = b"prompt,completion\n"
FILES: dict[str, list[bytes]] = {
    "r.csv": [
        CSV, CSV + b"a,b,c\n", CSV + b"a\n", CSV + b'"a,b\n', CSV + b"a,b\nc,d,e\n", CSV + b",\n",
        b"a,b\n1,2\n", b",\na,b\n", b"prompt,prompt\na,b\n", b"\n\n\n", b"prompt\ta\n",
        CSV + "ä,b\n".encode("latin-1"), (CSV + b"a,b\n").decode().encode("utf-16"),
        b"\n" + CSV + b"a,b\n", b"\0" * 40, b"PK\x03\x04" + bytes(40),
    ],
    "r.json": [
        b'{"prompt": "a"', b'{"rows": 3}', b"[" + PAIR + b", 3]", b"[[" + PAIR + b"]]", b"null",
        b"3", b"[1]", b"[null, " + PAIR + b"]", f"[{PAIR.decode()}]".encode("utf-16"), b"{}",
        b'{"prompt": {"a": 1}, "completion": "b"}', b'{"data": []}', b"[" * 100_000, b"<html>",
    ],
    "r.jsonl": [
        b"", b" \n\n ", b"null\n", b"{}\n{}\n", b"\x1f\x8b\x08", PAIR + b"{'prompt': 'a'}\n",
        PAIR * 2 + b'{"prompt": "\xff", "completion": "b"}\n', PAIR + b"\0\0\0\n" + PAIR,
        PAIR * 2 + b'{"prompt": 1, "completion": "b"}\n', b'{"text": "\\ud800"}\n',
        PAIR + b'{"prompt": ' + b"9" * 5000 + b"}\n", PAIR.replace(b"prompt", b"completion"),
        PAIR.decode().encode("utf-32"), b"prompt,completion\n", b"// comment\n", b'{"prompt": "a"}',
        *(json.dumps(row).encode() for row in (
            {"text": None}, {"messages": 3}, {"chosen": "  "}, {"input_ids": [-1]}, {"": "a"},
            {"input_ids": [10**9]}, {"input_ids": [0.5]}, {"input_ids": [1], "labels": [1, 2]},
            {"messages": [{"role": "user", "content": "a"}]}, {"instruction": "a", "output": ""},
        )),
    ],
    "r.jsonl.gz": [gzip.compress(PAIR * 400)[:60], gzip.compress(b""), PAIR],
    "r.parquet": [PAIR, b"PAR1" + PAIR * 20 + b"PAR1"],
    "r.txt": [b"\n\n", b"\xff\xfea\0", "ä\n".encode("latin-1")],
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("streaming", slow_but(["false"], ["false", "true"]))
def test_files_that_are_no_rows(refused, name, streaming) -> None:
    for content in FILES[name]:
        Path(name).write_bytes(content)
        more = (f"data.streaming={streaming}", "data.eval_fraction=0", "train.max_steps=2")
        refused("data", "tiny_full_bf16", f"data.path={name}", *more)


@pytest.mark.parametrize(
    ("lines", "number"),
    [
        ([b"null\n"], 1),
        ([ROW, b"\n", b" [1]\n"], 3),
        ([b'{"text": ' + b"[" * 100_000], 1),
        ([ROW.decode().encode("utf-16")], 1),
        ([b"\x1f\x8b\x08"], 1),
    ],
)
def test_lines_that_are_no_rows_are_refused_with_their_number(lines, number, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b"".join(lines))
    with pytest.raises(DataError) as raised:
        list(rows_of(file))
    assert raised.value.where == f"{file}:{number}"


def test_lines_of_deep_but_sane_rows_pass(tmp_path):
    file = tmp_path / "rows.jsonl"
    deep = b'{"text": "' + b"[" * 200 + b'", "a": ' + b"[" * 60 + b"]" * 60 + b"}\n"
    file.write_bytes(b"\xef\xbb\xbf" + ROW + b"\n" + deep + b"  " + ROW)
    assert [number for number, _ in rows_of(file)] == [1, 3, 4]


@pytest.mark.parametrize(
    ("text", "rows"),
    [(b"[]", 0), (b'[{"a": 1}]', 1), (ROW * 3, 3), (b'{\n "a": {\n "b": 1\n }\n}', 1)],
)
def test_documents_of_rows_pass(text, rows, tmp_path):
    file = tmp_path / "rows.json"
    file.write_bytes(text)
    assert len(list(rows_of(file))) == rows
