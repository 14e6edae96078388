"""A sample of malformed inputs; `python -m tests.benchmarks.bad_inputs` tries a thousand."""

from __future__ import annotations

import subprocess
import sys

import pytest

from finetune.data.json_rows import rows_of
from finetune.errors import DataError
from tests.bad_inputs import recipes
from tests.bad_inputs.case import FIXES, Repeated
from tests.bad_inputs.kinds import drawn

QUICK = {
    "words": recipes.words,
    "texts": recipes.recipe_texts,
    "lines": recipes.damaged_recipes,
    "files": recipes.recipe_files,
    "settings": recipes.settings,
    "empty": recipes.empty_values,
    "numbers": recipes.trainer_numbers,
}


@pytest.mark.parametrize("name", QUICK)
def test_bad_input_ends_with_2_and_a_fix(name, cli, tmp_path, monkeypatch):
    found = [
        case for case in drawn(QUICK[name](), 30, 7) if not case.needs_torch or name == "numbers"
    ]
    quick = [
        case for case in found if not any(isinstance(x, Repeated) for x in case.files.values())
    ]
    for number, case in enumerate(quick[:6]):
        folder = tmp_path / str(number)
        folder.mkdir()
        monkeypatch.chdir(folder)
        words = ("cat", *case.words[1:], "--resolved") if name == "numbers" else case.words
        case.lay_out(folder, {})
        done = cli(*words)
        assert (done.code, bool(FIXES.search(done.err))) == (2, True), f"{case}\n{done.err}"


@pytest.mark.long
def test_no_kind_of_bad_input_ends_otherwise():
    command = [sys.executable, "-m", "tests.benchmarks.bad_inputs", "--cases", "150", "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


# ---------------------------------------------------------------------------------- rows of JSON

ROW = b'{"text": "a"}\n'


@pytest.mark.parametrize(
    ("lines", "number"),
    [
        ([b"null\n"], 1),
        ([ROW, b"\n", b" [1]\n"], 3),
        ([b'{"text": ' + b"[" * 100_000], 1),
        (['{"text": "a"}\n'.encode("utf-16")], 1),
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


@pytest.mark.parametrize("text", [b"null", b"[1]", b"[{}, null]", b"[" * 100_000, b"3\n"])
def test_documents_that_are_no_rows_are_refused(text, tmp_path):
    file = tmp_path / "rows.json"
    file.write_bytes(text)
    with pytest.raises(DataError):
        list(rows_of(file))


@pytest.mark.parametrize(
    ("text", "rows"),
    [(b"[]", 0), (b'[{"a": 1}]', 1), (ROW * 3, 3), (b'{\n "a": {\n "b": 1\n }\n}', 1)],
)
def test_documents_of_rows_pass(text, rows, tmp_path):
    file = tmp_path / "rows.json"
    file.write_bytes(text)
    assert len(list(rows_of(file))) == rows
