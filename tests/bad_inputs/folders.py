"""Damaged folders of models, runs, checkpoints and comparisons."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from tests.bad_inputs.case import Case, Content, Folder, Gone, Link, Pipe, Repeated, pick

WRONG: list[Any] = [
    None,
    [],
    {},
    "x",
    -1,
    0.5,
    10**30,
    True,
    [None],
    {"a": 1},
    "\x00",
    float("nan"),
]
TEXTS: list[Content] = [
    b"",
    b" ",
    b"null",
    b"[]",
    b"3",
    b'"x"',
    b"{",
    b"{}",
    b"\xff\xfe\x00",
    b"\x00" * 64,
    b"[1, 2, {}]",
    b"\xef\xbb\xbf{",
    Repeated(b"", b"[", 100_000),
    Repeated(b"", b'{"a":', 100_000),
    b"not json\n",
    Folder(),
    Link("gone"),
    Pipe(),
    b'{"a": 1}\n{"a": 2}\n',
    b"<html>",
    "{}".encode("utf-16"),
]
"""Instead of a JSON object, or of any file."""


def loop(name: str) -> Link:
    """A link to itself."""
    return Link(Path(name).name)


def paths_of(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value in plain data, of at most two items of a list."""
    found = [at] if at else []
    parts = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value[:2])
        if isinstance(value, list)
        else ()
    )
    for key, part in parts:
        found += paths_of(part, (*at, key))
    return found


def replaced(value: Any, path: tuple[Any, ...], other: Any) -> Any:
    """Plain data with another value at a path."""
    if not path:
        return other
    copied = list(value) if isinstance(value, list) else dict(value)
    copied[path[0]] = replaced(copied[path[0]], path[1:], other)
    return copied


@st.composite
def damaged(draw: st.DrawFn, file: Path, name: str, *, inside: bool = True) -> Content:
    """Another content for a file: cut, emptied, no file, or one value of another type."""
    content = file.read_bytes()
    way = pick(draw, ["text", "cut", "value", "value"] if inside else ["text", "cut"])
    if way == "text":
        return pick(draw, [*TEXTS, loop(name), Gone()])
    if way == "cut":
        return content[: draw(st.integers(1, max(1, min(len(content) - 4, 4000))))]
    lines = content.decode().splitlines() if name.endswith("l") else [content.decode()]
    at = draw(st.integers(0, len(lines) - 1))
    data = json.loads(lines[at])
    path = pick(draw, paths_of(data))
    lines[at] = json.dumps(replaced(data, path, pick(draw, WRONG)))
    return "\n".join(lines).encode() + b"\n"


# ------------------------------------------------------------------------------------------ models

WEIGHTS = "model.safetensors"
HEADERS: list[bytes] = [
    b"",
    b"\x00" * 8,
    b"\xff" * 16,
    b"\x08\x00\x00\x00\x00\x00\x00\x00{}      ",
    (1 << 62).to_bytes(8, "little") + b"{}",
    (10).to_bytes(8, "little") + b"not json!!",
    (40).to_bytes(8, "little") + b'{"a":{"dtype":"F99","shape":[1],"data_off',
    (2).to_bytes(8, "little") + b"{}",
    b"PK\x03\x04",
    b"version https://git-lfs.github.com/spec/v1\n",
]


@st.composite
def models(draw: st.DrawFn, model: Path) -> Case:
    """A model folder with a file that is broken."""
    name = pick(
        draw,
        [
            "config.json",
            "config.json",
            "tokenizer.json",
            "tokenizer_config.json",
            WEIGHTS,
            "model.safetensors.index.json",
        ],
    )
    verb = "run"
    if name == WEIGHTS:
        content: Any = pick(draw, [*HEADERS, Folder(), Gone(), loop(name), Link("gone"), None])
        content = (model / name).read_bytes()[:100_000] if content is None else content
    elif name.endswith("index.json"):
        index = pick(
            draw,
            [
                {"weight_map": {"model.norm.weight": "gone.safetensors"}},
                {"weight_map": {}},
                {"weight_map": []},
                [],
                {},
                {"weight_map": {"model.norm.weight": "../../x"}},
                {"weight_map": {"a": None}},
            ],
        )
        files: dict[str, Content] = {
            f"m/{name}": json.dumps(index).encode(),
            f"m/{WEIGHTS}": Gone(),
        }
        return Case(
            "model folder",
            (verb, "tiny_full_bf16", "model.name=./m", "train.max_steps=1", "train.warmup_steps=0"),
            files,
            {"m": "model"},
        )
    elif name == "config.json":
        verb = pick(draw, ["run", "validate"])
        key, value = pick(
            draw,
            [
                (key, value)
                for key in (
                    "model_type",
                    "hidden_size",
                    "num_hidden_layers",
                    "num_attention_heads",
                    "vocab_size",
                    "intermediate_size",
                )
                for value in ("x", -1, 0, None, [], {}, 0.5, 10**30)
                if (key, value) not in (("num_hidden_layers", 0),)
            ],
        )
        config = json.loads((model / name).read_text()) | {key: value}
        content = pick(
            draw, [json.dumps(config).encode()] * 3 + [t for t in TEXTS if t != b"{}"] + [b"{}"]
        )
    else:
        content = pick(
            draw,
            [
                t
                for t in TEXTS
                if not (name == "tokenizer_config.json" and t in (b"{}", Link("gone")))
            ],
        )
    return Case(
        "model folder",
        (verb, "tiny_full_bf16", "model.name=./m", "train.max_steps=1", "train.warmup_steps=0"),
        {f"m/{name}": content},
        {"m": "model"},
    )


# -------------------------------------------------------------------------------------------- runs

LOOKING = [
    *[("ls", "--runs"), ("ls", "--runs", "--json"), ("checkpoints",)] * 2,
    *[("report",), ("report", "last")],
]
"""Verbs that show what they can read of a run."""


@st.composite
def looking(draw: st.DrawFn, run: Path) -> Case:
    """Verbs that show runs, over one whose files are damaged: they say what they can."""
    name = pick(
        draw,
        [
            "receipt.json",
            "receipt.json",
            "metrics.jsonl",
            "steps.jsonl",
            "report.json",
            "run.json",
            "config.yaml",
        ],
    )
    content = draw(damaged(run / name, name, inside=name != "config.yaml"))
    verb = pick(draw, LOOKING)
    where = "runs/tiny/20261121-120000-aaaa"
    words = (*verb, where) if verb in (("report",), ("checkpoints",)) else verb
    return Case(
        "run folder: shown",
        words,
        {f"{where}/{name}": content},
        {where: "run", "runs/tiny/20261121-110000-bbbb": "run"},
        tolerant=True,
    )


USES = {
    "generate": ("generate", "RUN", "hello", "--max-new-tokens", "2"),
    "evaluate": ("evaluate", "RUN", "--tasks", "builtin:harbour_choice", "--limit", "1"),
    "export": ("export", "RUN", "out", "--to", "merged"),
    "resume": ("resume", "RUN", "train.max_steps=3", "resume.allow=[train.max_steps]"),
}


@st.composite
def used_runs(draw: st.DrawFn, run: Path, copied: str) -> Case:
    """Verbs that need a run's recipe or weights, over damaged ones."""
    weights = (
        "adapter_model.safetensors" if (run / "model/adapter_config.json").exists() else WEIGHTS
    )
    name = pick(
        draw,
        [
            "config.yaml",
            f"model/{weights}",
            f"model/{'adapter_config' if 'adapter' in weights else 'config'}.json",
            "model/tokenizer.json",
        ],
    )
    verb = pick(draw, ["generate", "evaluate", "export"] + ["resume"] * (name == "config.yaml"))
    content: Any
    if name == "config.yaml":
        content = pick(
            draw, [*TEXTS, Gone(), loop(name), b"model: {name: x}", (run / name).read_bytes()[:300]]
        )
    elif name.endswith("safetensors"):
        content = pick(
            draw, [*HEADERS, Folder(), Gone(), loop(name), (run / name).read_bytes()[:-4000]]
        )
    else:
        content = pick(draw, [*TEXTS, loop(name), Gone()])
    words = tuple(word.replace("RUN", "r/t/20261121-120000-aaaa") for word in USES[verb])
    return Case(
        "run folder: used",
        words,
        {f"r/t/20261121-120000-aaaa/{name}": content},
        {"r/t/20261121-120000-aaaa": copied},
    )


CHECKPOINT_FILES = (
    "trainer_state.json",
    "manifest.json",
    "optimizer.pt",
    "scheduler.pt",
    "rng_state.pth",
    "fp8_scaling.safetensors",
    "adapter_model.safetensors",
    "adapter_config.json",
    "training_args.bin",
)


@st.composite
def resumed(draw: st.DrawFn, run: Path, copied: str) -> Case:
    """Going on from the only checkpoint of a run, one file of which is damaged."""
    home = "r/t/20261121-120000-aaaa"
    saved = sorted((run / "checkpoints").iterdir())
    names = [
        n for n in sorted(p.name for p in saved[-1].iterdir()) if (saved[-1] / n).stat().st_size
    ]
    name = pick(
        draw, [n for n in names if n.endswith((".json", ".pt", ".pth", ".safetensors", ".bin"))]
    )
    whole = (saved[-1] / name).read_bytes()
    content = pick(
        draw,
        [
            b"",
            whole[: len(whole) // 2],
            whole + b"x",
            b"\x00" * 100,
            Folder(),
            Gone(),
            loop(name),
            b"[]",
            b"null",
            bytes([whole[0] ^ 1]) + whole[1:],
        ],
    )
    if name in ("manifest.json", "trainer_state.json") and draw(st.booleans()):
        content = draw(damaged(saved[-1] / name, name))
    if name == "manifest.json" and content == Gone():  # a checkpoint of another program has none
        content = b""
    files: dict[str, Content] = {f"{home}/checkpoints/{saved[-1].name}/{name}": content}
    for other in saved[:-1]:
        files[f"{home}/checkpoints/{other.name}"] = Gone()
    start = pick(draw, ["", f"/checkpoints/{saved[-1].name}", "/last", "/best"])
    line = pick(
        draw,
        [("resume", home), ("run", "tiny_lora_fp8", f"train.resume_from_checkpoint={home}{start}")],
    )
    if draw(st.integers(0, 3)) == 0:
        return Case(
            "checkpoint folder: shown", ("checkpoints", home), files, {home: copied}, tolerant=True
        )
    more = ("train.max_steps=3", "resume.allow=[train.max_steps]")
    return Case("checkpoint folder: used", (*line, *more), files, {home: copied})


# ------------------------------------------------------------------------------------- comparisons


@st.composite
def comparisons(draw: st.DrawFn, comparison: Path) -> Case:
    """A comparison whose file is damaged, judged again."""
    data = json.loads((comparison / "comparison.json").read_text())
    path = pick(draw, paths_of(data))
    broken = json.dumps(
        replaced(data, path, pick(draw, [None, [None], {"x": {}}, "\x00"]))
    ).encode()
    content = pick(draw, [*TEXTS, broken, broken, broken, broken])
    tolerant = content == broken
    verb = pick(draw, ["compare", "report"])
    if content in (Folder(), Link("gone"), Pipe()):
        tolerant = True
    return Case(
        "comparison folder",
        (verb, "c"),
        {"c/comparison.json": content},
        {"c": "comparison"},
        tolerant=tolerant,
    )
