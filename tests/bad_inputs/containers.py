"""Data files damaged as containers: compressed, columnar, in folders, devices, encodings."""

from __future__ import annotations

import bz2
import functools
import gzip
import io
import json
import lzma
import zlib
from typing import Any

from hypothesis import strategies as st

from tests.bad_inputs.case import Case, Content, Folder, Link, Pipe, Repeated
from tests.bad_inputs.rows import GOOD, LINE, TURNS, VERB

MANY = LINE * 400
WAYS = st.sampled_from([(), (), ("data.streaming=true",), ("data.on_bad_row=skip",)])


def parquet(rows: list[dict[str, Any]]) -> bytes:
    """A whole Parquet file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    target = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), target)
    return target.getvalue()


def _flipped(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 0xFF]) + content[at + 1 :]


@functools.cache
def _files() -> list[tuple[str, dict[str, Content]]]:
    """(`data.path`, files)."""
    zipped, table = gzip.compress(MANY), parquet([GOOD] * 50)
    one: dict[str, list[Content]] = {
        "r.jsonl.gz": [
            b"", gzip.compress(b""), gzip.compress(b"\n\n"), gzip.compress(b"null\n" * 9),
            zipped[: len(zipped) // 2], zipped[:-4], zipped[:12], _flipped(zipped, 40), LINE,
            gzip.compress(zipped), zipped + b"trailing", zlib.compress(MANY),
            gzip.compress(b'{"prompt": "' + b"x" * 10_000_000), gzip.compress(b"\0" * 70_000_000),
        ],
        "r.csv.gz": [gzip.compress(b"prompt,completion\na\n"), zipped[:30], gzip.compress(b"")],
        "r.parquet.gz": [gzip.compress(table[:-8]), b""],
        "r.jsonl.bz2": [b"", bz2.compress(MANY)[:-9], b"BZh9", bz2.compress(b"")],
        "r.jsonl.xz": [b"", lzma.compress(MANY)[:-9], b"\xfd7zXZ\x00", lzma.compress(b"[]")],
        "r.jsonl.zst": [b"", b"\x28\xb5\x2f\xfd\x00", LINE],
        "r.parquet": [
            table[:-1], table[:-8], table[: len(table) // 2], table[4:], table + b"x",
            _flipped(table, len(table) - 7), parquet([{"a": 1}]),
            parquet([{"prompt": None, "completion": None}]), parquet([{"prompt": {"a": [1]}}]),
            parquet([{"prompt": 1, "completion": 2.5}]), parquet([]), parquet([{"text": b"\xff"}]),
            parquet([{"messages": [{"role": "user"}]}]),
            parquet([{"input_ids": [1.5]}]), parquet([{"input_ids": [2**40]}]),
        ],
        "r.arrow": [b"", b"ARROW1", b"ARROW1\0\0" + b"\xff" * 64, LINE, b"\xff\xff\xff\xff" * 9],
        "r.txt": [b"", b"\n\n", b"\xff\xfea\0", b" \n\t\n", "ä".encode("latin-1") + b"\n"],
        "r.tsv": [b"prompt\tcompletion\na\n", b"prompt,completion\na,b\n", b"\t\t\n1\t2\t3\n"],
        "r.csv": [
            b"prompt,completion\na,b\0\n\0,\n,c\n", b'prompt,completion\n"a\n' * 30,
            b"\xef\xbb\xbf\xef\xbb\xbfprompt,completion\n", b",".join([b"c"] * 50_000) + b"\n1\n",
            b"prompt,completion,\na,b,\n" * 2 + b"a\n",
            b"prompt,prompt,completion\na,b,c\n", b'"prompt","completion\na,b\n',
            Repeated(b"prompt,completion\n", b"a,b\n", 300_000, b"c\n"),
            Repeated(b"prompt,completion\na,", b"x" * 1000, 40_000),
        ],
        "r.jsonl": [
            LINE * 3 + b"\0\0\0\n" + LINE, LINE * 3 + b"\xef\xbb\xbf" + LINE[:-3], MANY + LINE[:-5],
            LINE + b'{"prompt": 1e400, "completion": "b"}\n',
            b'{"prompt": "a", "completion": 1}\n{"prompt": "a", "completion": [1]}\n',
            LINE * 2 + b'{"prompt": 1, "completion": "b"}\n',
            LINE * 2 + b'{"prompt": {"a": 1}, "completion": "b"}\n',
            LINE * 2 + b'{"prompt": true, "completion": "b"}\n',
            b'{"prompt": "a", "prompt": 3, "completion": "b"}\n',
            json.dumps({str(i): 1 for i in range(10_000)}).encode() + b"\n",
            json.dumps({"\0": "a", "\ud800": "b"}).encode() + b"\n",
            b'{"' + b"k" * 1_000_000 + b'": 1}\n', b'{"text": "\\ud800"}\n',
            b'{"text": -1e999}\n{"text": NaN}\n', b'{"text": 9999999999999999999999999}\n',
            b'{"text": "2020-01-01T00:00:00"}\n{"text": 3}\n', LINE * 20_000 + b"{]\n",
            LINE * 3_000 + b"null\n", LINE * 900 + b'{"prompt": "", "completion": ""}\n',
            LINE * 1_500 + b'{"prompt": 3, "completion": "b"}\n' + LINE,
            LINE * 5_000 + b'{"prompt": "a", "completion": 3}\n', LINE * 2_000 + b"\xff\xff\n",
            MANY.replace(b"\n", b","), b"[" + MANY + b"]",
            MANY.decode().encode("utf-16-le"), b"\xef\xbb\xbf",
        ],
        "r.json": [
            b"[" + LINE, b'{"data": []}', b'{"train": [{"prompt": "a", "completion": "b"}, 1]}',
            b'[{"prompt": "a"}, {"completion": "b"}]', b"[[[[[]]]]]", b'{"": {"": {"": ""}}}',
            Repeated(b"[", b'{"prompt": "a", "completion": 1},', 200_000, b"{}"),
            json.dumps([GOOD, {"prompt": 1, "completion": {}}]).encode(),
            json.dumps({str(i): GOOD for i in range(3000)}).encode(),
        ],
    }  # fmt: skip
    found = [(name, {name: content}) for name, some in one.items() for content in some]
    found += [
        ("r.jsonl", {"r.jsonl": Folder()}),
        ("d", {"d": Folder()}),
        ("d", {"d/.hidden.jsonl": LINE}),
        ("d", {"d/loop": Link(".")}),
        ("d", {"d/loop.jsonl": Link("loop.jsonl")}),
        ("d", {"d/a.jsonl": Pipe()}),
        ("d", {"d/a.jsonl": LINE, "d/b.jsonl": b""}),
        ("d", {"d/a.jsonl": LINE, "d/b.jsonl": b"null\n"}),
        ("d", {"d/a.jsonl": LINE, "d/b.csv": b"prompt,completion\na,b\n"}),
        ("d", {"d/a.jsonl": LINE, "d/b.jsonl": b'{"text": "a"}\n'}),
        ("d", {"d/state.json": b"{}", "d/dataset_info.json": b"{}"}),
        ("d", {"d/state.json": b"{", "d/dataset_info.json": b"{}", "d/data-0.arrow": b""}),
        ("d", {"d/state.json": b'{"_data_files": [{"filename": "gone.arrow"}]}'}),
        ("d", {"d/dataset_dict.json": b"{}"}),
        ("*.jsonl", {"r.txt": LINE}),
        ("[", {}), ("**", {}), ("d/**/x*", {"d/x.md": b"x"}), ("?", {}),
        *((path, {}) for path in (
            "/dev/zero", "/dev/stdin", "/dev/fd/0", "/dev/random", "/proc/self/mem", "/proc",
            "/dev", "-", "file:///r.jsonl", "s3://b/r.jsonl", "r.jsonl\n", "hf://x",
            "https://127.0.0.1:9/r.jsonl", "r::gzip", "zip://r.jsonl::r.zip", "a" * 5000,
        )),
        ("[r.jsonl,r.jsonl]", {"r.jsonl": b"null\n"}),
        ("[r.jsonl,gone.jsonl]", {"r.jsonl": LINE}),
        ("{r.jsonl: -1}", {"r.jsonl": LINE}), ("{r.jsonl: .nan}", {"r.jsonl": LINE}),
        ("{r.jsonl: 0}", {"r.jsonl": LINE}), ("{r.jsonl: x}", {"r.jsonl": LINE}),
        ("{r.jsonl: .inf, s.jsonl: 1}", {"r.jsonl": LINE, "s.jsonl": LINE}),
        ("{r.jsonl: 1e308, s.jsonl: 1e308}", {"r.jsonl": LINE, "s.jsonl": LINE}),
        ("{r.jsonl: 1, s.jsonl: 1}", {"r.jsonl": LINE, "s.jsonl": b'{"text": "a"}\n'}),
        ("[{path: r.jsonl, weight: 1, more: 2}]", {"r.jsonl": LINE}),
    ]  # fmt: skip
    return found


@st.composite
def containers(draw: st.DrawFn) -> Case:
    """A data path, read whole, as a stream, or with bad rows skipped."""
    path, files = draw(st.sampled_from(_files()))
    ways, verb = draw(WAYS), draw(VERB)
    line = (verb, "tiny_full_bf16", f"data.path={path}", "train.max_steps=2", *ways)
    # Rows that are wrong alone are left out where that was asked for; a stream of two steps may
    # end before it comes to them, and a row of a large stream lies behind its sample.
    tolerant = bool(ways)
    return Case("rows: container", line, files, tolerant=tolerant)


EVAL: list[Content] = [
    b"", b"null\n", b'{"text": "a"}\n', b'{"prompt": 3, "completion": "b"}\n', Folder(), Pipe(),
    json.dumps(TURNS).encode() + b"\n", b'{"input_ids": [99999]}\n', b"\xff\n",
]  # fmt: skip


def eval_files() -> st.SearchStrategy[Case]:
    """Good training rows, and eval rows that are none."""
    return st.sampled_from(EVAL).map(
        lambda content: Case(
            "rows: eval rows",
            ("run", "tiny_full_bf16", "data.path=r.jsonl", "data.eval_path=e.jsonl",
             "train.max_steps=1", "train.warmup_steps=0"),
            {"r.jsonl": LINE * 20, "e.jsonl": content},
        )
    )  # fmt: skip
