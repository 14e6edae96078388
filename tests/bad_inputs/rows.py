"""Malformed data files, for the verbs `data` and `run`."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

from tests.bad_inputs.case import Case, Content, Folder, Link, Pipe, Repeated

GOOD = {"prompt": "Where?", "completion": "Here."}
LINE = json.dumps(GOOD).encode() + b"\n"
TURNS = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
ENDINGS = (".jsonl", ".json", ".csv", ".parquet")


def _case(kind: str, name: str, content: Content | None, verb: str, *more: str) -> Case:
    files = {} if content is None else {name: content}
    return Case(
        kind, (verb, "tiny_full_bf16", f"data.path={name}", "train.max_steps=2", *more), files
    )


VERB = st.sampled_from(["data"] * 5 + ["run"])
"""Rows are read alike by both; `data` loads no model."""


@st.composite
def files(draw: st.DrawFn) -> Case:
    """A data path that is no file of rows."""
    ending = draw(st.sampled_from([*ENDINGS, ".doc", "", ".jsonl.gz", ".zip", ".JSONL"]))
    content: Any = draw(
        st.sampled_from(
            [
                b"",
                b" \n\n ",
                b"\x00" * 40,
                b"\xff\xfe\x00\x00",
                b"PAR1",
                b"PAR1" + b"\x00" * 20 + b"PAR1",
                b"\x1f\x8b\x08",
                b"PK\x03\x04",
                b"null\n",
                b"[]",
                b"{}",
                b"{}\n{}\n",
                b"[{}]",
                b"[1, 2]",
                b"42\n",
                b'"text"\n',
                b"<html></html>",
                b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
                Folder(),
                Link("rows" + ending),
                Link("gone"),
                Pipe(),
                None,
            ]
        )
    )
    return _case("rows: file", "rows" + ending, content, draw(VERB))


SCALARS: list[Any] = [
    None,
    1,
    -0.5,
    True,
    "",
    " ",
    [],
    {},
    [[]],
    [None],
    {"a": None},
    ["x"],
    [1, 2],
]


@st.composite
def damaged_rows(draw: st.DrawFn) -> Case:
    """A JSONL file in which a line is damaged as a file: no JSON, no object, no text."""
    line: Any = draw(
        st.sampled_from(
            [
                b"null",
                b"[]",
                b"3",
                b'"x"',
                b"{",
                b"}",
                b"{'prompt': 'a', 'completion': 'b'}",
                b'{"prompt": "a" "completion": "b"}',
                b'{"prompt": "a", "completion": "b"',
                b"\xff\xfe",
                b'{"prompt": "\xff", "completion": "b"}',
                b'{"prompt": NaN, "completion": Infinity}',
                b'{"prompt": "a", "completion": "b"}}',
                b'[{"prompt": "a", "completion": "b"}]',
                b"\x00",
                b'{"prompt": "\\ud800", "completion": "b"}',
                b'{"prompt": "\\x", "completion": "b"}',
                b"prompt,completion",
                b"undefined",
                b"// comment",
                b'{"prompt": ' + b"9" * 5000 + b', "completion": "b"}',
                b'{"prompt": "a", "completion": {"b": 1}}',
                b'{"prompt": ["a"], "completion": "b"}',
                b'{"prompt": "a", "completion": 3}',
            ]
        )
    )
    place = draw(st.sampled_from(["first", "middle", "last", "all"]))
    before = LINE * {"first": 0, "middle": 3, "last": 5, "all": 0}[place]
    after = {"first": LINE * 3, "middle": LINE * 2, "last": b"", "all": (line + b"\n") * 4}[place]
    return _case("rows: JSON", "rows.jsonl", before + line + b"\n" + after, draw(VERB))


def greedy_rows() -> st.SearchStrategy[Case]:
    """Rows that made an interpreter crash, or that are larger than any parser takes."""
    made: list[Content] = [
        Repeated(b"", b"null\n", 10_000),
        Repeated(b"", b"null\n", 3),
        Repeated(LINE, b"null\n", 10_000),
        Repeated(b'{"prompt": ', b"[", 100_000, b"]" * 100_000 + b', "completion": "b"}\n'),
        Repeated(
            LINE + b'{"prompt": ',
            b'{"a": ',
            100_000,
            b"1" + b"}" * 100_000 + b', "completion": "b"}\n',
        ),
        Repeated(b'{"messages": ', b"[", 5_000, b"]" * 5_000 + b"}\n"),
        Repeated(b'{"prompt": ', b"[", 1_000_000, b"\n"),
        Repeated(b"", b"[", 100_000, b"]" * 100_000),
        Repeated(b"", b'{"a":', 100_000, b"1" + b"}" * 100_000 + b"\n"),
        Repeated(b"", b"\n", 3_000_000),
        Repeated(b'{"prompt": "', b"x", 70_000_000),
        Repeated(b"", b"{", 3_000_000),
        Repeated(b'{"', b"k", 3_000_000, b'": 1}\n'),
    ]
    endings = st.sampled_from([".jsonl", ".json"])
    return st.builds(
        lambda content, ending: _case("rows: greedy", "rows" + ending, content, "data"),
        st.sampled_from(made),
        endings,
    )


LEGAL: list[list[dict[str, Any]]] = [
    [{"input_ids": [1, 2]}], [{"input_ids": [1, 2], "labels": [1, 2]}],
    *[[{"chosen": TURNS["messages"], "prompt": text}] for text in ("", " ")],  # turns hold it
]  # fmt: skip
"""Rows of those below that can be trained on."""


@st.composite
def wrong_rows(draw: st.DrawFn) -> Case:
    """Rows of a known format with a part that nothing can be learnt from."""
    bad = draw(st.sampled_from(SCALARS))
    turn = draw(
        st.sampled_from(
            [
                bad,
                {"role": "user"},
                {"content": "x"},
                {"role": "", "content": "x"},
                {"role": 3, "content": "x"},
                {"role": "assistant", "content": bad},
                {"role": "assistant", "content": 3},
                {"from": "gpt"},
                {"from": 3, "value": "x"},
                {"role": ["a"], "content": "x"},
                {"role": "assistant", "content": "x", "weight": 0},
                {"role": "assistant", "content": "x", "train": False},
            ]
        )
    )
    rows = draw(
        st.sampled_from(
            [
                [{"prompt": bad, "completion": "b"}],
                [{"prompt": "a", "completion": bad}],
                [{"text": bad}],
                [{"messages": bad}],
                [{"messages": [turn]}],
                [{"conversations": [turn]}],
                [{"messages": [{"role": "user", "content": "only asks"}]}],
                [{"messages": [{"role": "user", "content": "a"}, turn]}],
                [{"instruction": bad, "output": "b"}],
                [{"instruction": "a", "output": bad}],
                [{"question": "a", "answer": bad}],
                [{"chosen": bad}],
                [{"prompt": "a", "chosen": bad}],
                [{"chosen": [turn]}],
                [{"chosen": TURNS["messages"], "prompt": bad}],
                [{"input_ids": bad}],
                [{"input_ids": [-1, 2]}],
                [{"input_ids": [10**9]}],
                [{"input_ids": [0.5]}],
                [{"input_ids": [1, 2], "labels": [1]}],
                [{"input_ids": [1, 2], "labels": bad}],
                [{"input_ids": []}],
                [{"unknown": "a", "columns": "b"}],
                [{"": "a"}],
                [{"prompt": "a"}],
                [{"completion": "a"}],
                [GOOD, {"prompt": bad, "completion": "b"}],
                [{"text": "a"}, {"text": bad}],
                [{**TURNS, "tools": "no JSON"}],
                [{**TURNS, "tools": 3}],
                [{**TURNS, "tools": [3]}],
                [{**TURNS, "tools": [{"name": "f"}]}],
            ]
        )
    )
    if rows in LEGAL:
        rows = [{"prompt": "a"}]
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    return _case("rows: content", "rows.jsonl", text, draw(VERB))


def tables() -> st.SearchStrategy[Case]:
    """CSV and JSON files that are no table of rows."""
    made = [
        (".csv", b"prompt,completion\na,b,c\n"),
        (".csv", b"prompt,completion\na\n"),
        (".csv", b"prompt,completion\n"),
        (".csv", b'prompt,completion\n"a,b\n'),
        (".csv", b"prompt,completion\na,b\nc,d,e\n"),
        (".csv", b"a,b\n1,2\n"),
        (".csv", b",\na,b\n"),
        (".csv", b"prompt,prompt\na,b\n"),
        (".csv", b"prompt;completion\na;b\n"),
        (".csv", "prompt,completion\nä,b\n".encode("latin-1")),
        (".csv", "prompt,completion\na,b\n".encode("utf-16")),
        (".csv", b"prompt,completion\n,\n"),
        (".csv", b"prompt,completion\n" + b"x" * 200_000 + b',y\n"' + b"z" * 200_000),
        (".csv", b"\n\n\n"),
        (".csv", b"prompt\ta\n"),
        (".csv", b"prompt,completion\na,b\n" * 2 + b"c\n"),
        (".json", b'{"prompt": "a"'),
        (".json", b'{"rows": 3}'),
        (".json", b'[{"prompt": "a", "completion": "b"}, 3]'),
        (".json", b'[[{"prompt": "a"}]]'),
        (".json", b'{"prompt": {"a": 1}, "completion": "b"}'),
        (".json", b"null"),
        (".json", b"3"),
        (".json", b'[null, {"prompt": "a", "completion": "b"}]'),
        (".json", '[{"prompt": "a", "completion": "b"}]'.encode("utf-16")),
        (".jsonl", '{"prompt": "a", "completion": "b"}\n'.encode("utf-16")),
        (".jsonl", '{"prompt": "a", "completion": "b"}\n'.encode("utf-32")),
        (".jsonl", b'{"prompt": "a", "completion": "b"}\r{"prompt": "c"'),
        (".parquet", LINE),
        (".parquet", b"PAR1" + LINE * 20 + b"PAR1"),
    ]
    return st.builds(
        lambda one, verb: _case("rows: table", f"rows{one[0]}", one[1], verb),
        st.sampled_from(made),
        VERB,
    )


@st.composite
def settings(draw: st.DrawFn) -> Case:
    """Good rows under settings that leave nothing to train on."""
    long = json.dumps({"prompt": "a" * 600, "completion": "b"}).encode() + b"\n"
    chat = (
        json.dumps(
            {"messages": [{"role": "user", "content": "a" * 600}, TURNS["messages"][1]]}
        ).encode()
        + b"\n"
    )
    content, more = draw(
        st.sampled_from(
            [
                (long * 4, ("train.max_length=64",)),
                (chat * 4, ("train.max_length=64",)),
                (long, ("train.max_length=64", "data.eval_fraction=0")),
                (LINE * 4, ("data.columns={prompt: gone}",)),
                (LINE * 4, ("data.columns={prompt: completion, completion: completion}",)),
                (LINE * 4, ("data.eval_path=rows.doc",)),
                (LINE * 4, ("data.eval_path=gone.jsonl",)),
                (LINE * 4, ("data.split=test",)),
                (LINE * 4, ("data.subset=x",)),
                (LINE * 4, ("data.eval_split=x",)),
                (b'{"prompt": "", "completion": ""}\n' * 3, ("data.on_bad_row=skip",)),
                (b'{"text": "a"}\n' * 3, ("train.completion_only_loss=true",)),
                (LINE * 4, ("train.max_length=1",)),
            ]
        )
    )
    return _case("rows: settings", "rows.jsonl", content, draw(VERB), *more)
