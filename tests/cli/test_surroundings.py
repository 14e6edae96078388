"""What surrounds a command: variables of schedulers and libraries, numbers out of range."""

from __future__ import annotations

import io
import json

import pytest
from rich.text import Text

from finetune.cli import app as cli_app
from finetune.logging import safe_console


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("RANK", "abc", "RANK is 'abc', and no number"),
        ("WORLD_SIZE", "2", "would take itself for one of several"),
        ("LOCAL_RANK", "0", "would take itself for one of several"),
        ("RANK", "3", "would take itself for one of several"),
    ],
)
@pytest.mark.parametrize("verb", ["run", "data", "validate", "compare", "benchmark"])
def test_a_lone_variable_of_a_launcher_is_refused(
    verb, variable, value, said, cli, monkeypatch
) -> None:
    monkeypatch.setenv(variable, value)
    found = cli(verb, "tiny_full_bf16", "train.max_steps=1")
    assert found.code == 2
    assert said in found.err
    assert f"env -u {variable} python" in found.err
    assert ("torchrun" in found.err.partition("fix:")[2]) == (verb == "run" or value == "abc")


def test_what_says_that_there_is_one_process_is_none_of_several(cli, monkeypatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "abc"}.items():
        monkeypatch.setenv(name, value)
    assert cli("tiny_full_bf16", "train.max_step=1").code == 2  # of another mistake, read later
    assert cli("validate", "tiny_full_bf16").code == 0


def test_a_variable_that_a_library_cannot_use_is_named(cli, monkeypatch, tmp_path) -> None:
    (tmp_path / "reads_a_variable.py").write_text("import os\nint(os.environ['SOME_TIMEOUT'])\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("SOME_TIMEOUT", "soon")

    def verb(*_: object, **__: object) -> None:
        import reads_a_variable  # noqa: F401  # pyright: ignore[reportMissingImports]

    monkeypatch.setattr(cli_app, "app", verb)
    found = cli("ls")
    assert found.code == 2
    assert "a library cannot use SOME_TIMEOUT of the environment" in found.err
    assert "env -u SOME_TIMEOUT python" in found.err

    def fault(*_: object, **__: object) -> None:
        int("soon")  # the same words, and no library was being imported

    monkeypatch.setattr(cli_app, "app", fault)
    with pytest.raises(ValueError, match="soon"):
        cli("ls")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--seed", "-5"], "--seed"),
        (["--seed", "99999999999999999999"], "--seed"),
        (["--seed", "1", "--temperature", "1e-320"], "drawn at a temperature of 9.99989e-321"),
        (["--temperature", "nan"], "--temperature"),
    ],
)
def test_numbers_that_nothing_can_be_drawn_with_are_refused(words, said, cli) -> None:
    words = words if "--temperature" in words else [*words, "--temperature", "1"]
    found = cli("generate", "last", "Hello", *words)
    assert found.code == 2
    assert said in found.err


def test_what_a_file_says_to_a_terminal_is_shown_and_not_obeyed(cli, tmp_path) -> None:
    row = {"prompt": "x \x1b]0;title\x07 \u202e {}", "completion": "\x1b[2Jgone\tthere"}
    lines = (json.dumps(row | {"prompt": row["prompt"].format(i)}) for i in range(40))
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    found = cli("data", "tiny_full_bf16", "data.path=rows.jsonl", "--show", 2)
    assert found.code == 0
    assert not {"\x1b", "\x07", "\u202e"} & {*found.out, *found.err}
    assert r"\x1b]0;title \u202e" in found.out  # rich leaves bells out
    assert r"\x1b[2Jgone" in found.out
    assert "\x1b" not in cli("tiny_full_bf16", "data.path=a\x1b[2J.jsonl").err


def test_a_terminal_obeys_what_is_ours() -> None:
    shown = io.StringIO()
    console = safe_console(file=shown, force_terminal=True, width=40, color_system="standard")
    console.print(Text("red\x1b[2J", style="red"), Text("a\x9bb\u2066"))
    assert shown.getvalue().startswith("\x1b[31mred\\x1b[2J\x1b[0m")
    assert r"a\x9bb\u2066" in shown.getvalue()
