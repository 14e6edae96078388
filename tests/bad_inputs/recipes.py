"""Malformed recipes, overrides and command lines."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, get_args

import yaml
from hypothesis import strategies as st
from pydantic import BaseModel

from finetune.config.paths import find_recipe
from finetune.config.schema import RunConfig
from tests.bad_inputs.case import Case, Folder, Link, Pipe, Repeated

CORPUS: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "corpus.yaml").read_text("utf-8"))
RECIPE = find_recipe("tiny_lora_fp8").read_text("utf-8")
NAMES = ("tiny_lora_fp8", "tiny_full_bf16")


def _encoded(text: str) -> bytes:
    """Bytes of a corpus text, in which `\\x00` and its like stand for themselves."""
    return text.encode("utf-8", "surrogatepass")


# ------------------------------------------------------------------------------------------- words


@st.composite
def words(draw: st.DrawFn) -> Case:
    """A verb, recipe or option that is not there, or an option's value that it cannot take."""
    given = draw(st.sampled_from(CORPUS["words"]))
    bad = draw(st.sampled_from(CORPUS["numbers"]))
    name = draw(st.text("abcdefgxyz_-. /\x00\udcff*[]$'\"\n", min_size=1, max_size=12))
    name = "q" + name.removesuffix("=")
    line = tuple(part.replace("NUMBER", bad).replace("NAME", name) for part in given["line"])
    return Case("verbs and options", line, needs_torch=given.get("torch", False))


# ----------------------------------------------------------------------------------------- recipes


def recipe_texts() -> st.SearchStrategy[Case]:
    """A recipe's file whose text is no recipe."""
    texts = [_encoded(text) for text in CORPUS["recipes"]]
    bomb = b"a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + b"".join(
        f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n".encode() for i in range(1, 12)
    )
    made: list[Any] = [
        *texts,
        *(RECIPE.encode(code) for code in ("utf-16", "utf-16-le", "utf-32")),
        RECIPE.encode().replace(b"rowwise", b"row\xffwise"),
        RECIPE.encode().replace(b"rowwise", b"row\x00wise"),
        bomb,
        bomb + b"data: *a11\n",
        Repeated(b"model: ", b"[", 100_000),
        Repeated(b"", b"{a: ", 100_000),
        Repeated(b"", b"- ", 100_000),
        Repeated(RECIPE.encode() + b"train:\n", b"# nothing here\n", 700_000),
        Repeated(b"model: ", b"x", 10_000_000),
        Repeated(b"", b"\x00", 10_000_000),
        Repeated(RECIPE.encode(), b"  k: v\n", 100_000),
    ]
    return st.sampled_from(made).map(
        lambda content: Case(
            "recipe: text",
            ("cat", "r.yaml", "--resolved"),
            {"r.yaml": content},
            needs_torch=isinstance(content, bytes) and b"train: {" in content,
        )
    )


@st.composite
def damaged_recipes(draw: st.DrawFn) -> Case:
    """A recipe with one line damaged."""
    lines = RECIPE.splitlines()
    at = draw(st.sampled_from([i for i, line in enumerate(lines) if ":" in line.partition("#")[0]]))
    key = lines[at].partition(":")[0]
    damage = draw(st.sampled_from(CORPUS["damage"]))
    indent = " " * (len(key) - len(key.lstrip()))
    lines[at] = damage.replace("LINE", lines[at]).replace("KEY", key).replace("INDENT", indent)
    text = "\n".join(lines) + "\n"
    return Case(
        "recipe: a damaged line",
        ("cat", "r.yaml", "--resolved"),
        {"r.yaml": text.encode()},
        needs_torch="train" in key or at > _line("train:"),
    )


def _line(start: str) -> int:
    return next(i for i, line in enumerate(RECIPE.splitlines()) if line.startswith(start))


@st.composite
def recipe_files(draw: st.DrawFn) -> Case:
    """A recipe's path that is no readable file."""
    verb = draw(st.sampled_from(["cat", "run", "validate", "estimate", "cp", "data", "diagnose"]))
    content = draw(st.sampled_from([Folder(), Link("r.yaml"), Link("gone.yaml"), Pipe(), None]))
    name = draw(st.sampled_from(["r.yaml", "./r.yml", "a/b/r.yaml", "r" * 300 + ".yaml"]))
    if draw(st.booleans()):
        name = draw(
            st.sampled_from(
                [
                    "/dev/null/x.yaml",
                    "\x00.yaml",
                    "\udcff.yaml",
                    "/proc/self/mem/r",
                    "/proc/self/r.yaml",
                    "~nobody/r.yaml",
                    "a\nb.yaml",
                ]
            )
        )
        content = None
    files = {} if content is None or len(name) > 255 else {name: content}
    line = (verb, name, "copy.yaml") if verb == "cp" else (verb, name)
    return Case("recipe: file", line, files, needs_torch=False)


# ---------------------------------------------------------------------------------------- settings


def _fields() -> list[tuple[str, Any]]:
    found = []
    for section, field in RunConfig.model_fields.items():
        parts = (field.annotation, *get_args(field.annotation))
        kind = next((p for p in parts if isinstance(p, type) and issubclass(p, BaseModel)), None)
        for name, inner in kind.model_fields.items() if kind else ():
            found.append((f"{section}.{name}", inner.annotation))
    return found


def _scalars(annotation: Any) -> set[str]:
    """Names of what a setting takes: `int`, `str`, `Literal`, `tuple`, ..."""
    args = [a for a in get_args(annotation) if a is not type(None)]
    origin = getattr(annotation, "__origin__", None)
    if origin in (tuple, dict):
        return {origin.__name__}
    if "Literal" in str(origin):
        return {"Literal"}
    if args:
        return set().union(*map(_scalars, args)) - {"Ge", "Gt"}
    return {getattr(annotation, "__name__", "")}


@st.composite
def settings(draw: st.DrawFn) -> Case:
    """A setting of a section of ours, given a value of another type or out of its range."""
    name, annotation = draw(st.sampled_from(_fields()))
    kinds = _scalars(annotation)
    allowed = [k for k in ("str", "tuple", "dict", "Literal", "bool", "int", "float") if k in kinds]
    values = CORPUS["values"][allowed[0]]
    if "tuple" in kinds and "str" in kinds:
        values = CORPUS["values"]["dict or nothing"]
    value = draw(st.sampled_from(values))
    if name == "eval.tasks":
        value = "{a: b}"
    recipe = draw(st.sampled_from(NAMES))
    return Case(
        "setting: type and range",
        ("cat", recipe, "--resolved", f"{name}={value}"),
        needs_torch=False,
    )


@st.composite
def empty_values(draw: st.DrawFn) -> Case:
    """A setting given nothing, or what no text may hold."""
    names = [name for name, _ in _fields()] + [f"train.{f}" for f in _trainer_fields()]
    name = draw(st.sampled_from(names))
    form = draw(
        st.sampled_from(["{}=", "{}=  ", "{}=''", "{}=\x00", "{}=\udcff", "{}", "~{}=1", "={}"])
    )
    return Case(
        "override: empty or no text",
        ("cat", "tiny_lora_fp8", "--resolved", form.format(name)),
        needs_torch=name.startswith("train."),
    )


def overrides() -> st.SearchStrategy[Case]:
    """Overrides that are none, that contradict one another, or that are far too long."""
    bomb = ", ".join(f"&a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12))
    long = [
        "a" * 1_000_000, ".".join("a" * 50_000) + "=1", "data.on_bad_row=" + "a" * 1_000_000,
        "train.learning_rate=" + "9" * 1_000_000, "data.prompts=" + "[" * 100_000,
        "train.optim_args=" + "{a: " * 50_000, "model.freeze=" + "*" * 1_000_000,
        "train.seed=" + "\t" * 100_000 + "x", f"model.freeze=[&a0 [x, x], {bomb}]",
        "=" * 1_000_000, "~" * 100_000, "data.path=" + "../" * 300_000 + "r.jsonl",
        "lora.target_modules=" + "(a+)+" * 9_999 + "$",
    ]  # fmt: skip
    verbs = st.sampled_from([("cat", "--resolved"), ("validate",), ("run",)])
    return st.builds(
        lambda line, verb: Case("override: form", (verb[0], "tiny_lora_fp8", *verb[1:], line)),
        st.sampled_from([*CORPUS["overrides"], *long]),
        verbs,
    )


def meanings() -> st.SearchStrategy[Case]:
    """Overrides that name files, layers, columns or checkpoints that are not there."""
    return st.sampled_from(CORPUS["meanings"]).map(
        lambda line: Case(
            "override: meaning",
            ("run", "tiny_lora_fp8", "train.max_steps=1", "train.warmup_steps=0", line),
        )
    )


def _trainer_fields() -> dict[str, str]:
    """Name -> type of each setting of `trl.SFTConfig`."""
    from trl import SFTConfig

    return {f.name: str(f.type) for f in dataclasses.fields(SFTConfig) if f.init}


@st.composite
def trainer_numbers(draw: st.DrawFn) -> Case:
    """A number of the `train` section that no training can have."""
    numeric = {
        name: kind
        for name, kind in _trainer_fields().items()
        if any(word in kind for word in ("int", "float")) and name not in CORPUS["any number"]
    }
    name = draw(st.sampled_from(sorted(numeric)))
    values = [*CORPUS["train numbers"], *CORPUS["also of"].get(name, ())]
    value = draw(st.sampled_from(values))
    verb = draw(st.sampled_from([("cat", "--resolved")] * 4 + [("run",)]))
    line = (verb[0], "tiny_full_bf16", *verb[1:], f"train.{name}={value}")
    return Case("train: number", line)


def trainer_values() -> st.SearchStrategy[Case]:
    """Values that `SFTConfig`, `SFTTrainer`, the optimizer or the scheduler refuses."""
    return st.sampled_from(CORPUS["train"]).map(
        lambda line: Case("train: value", ("run", "tiny_full_bf16", "train.max_steps=2", *line))
    )


def sizes() -> st.SearchStrategy[Case]:
    """Batches, lengths and ranks of which no memory could hold a step."""
    lines = CORPUS["sizes"]
    verbs = st.sampled_from(["run", "diagnose"])
    return st.builds(lambda line, verb: Case("sizes", (verb, *line)), st.sampled_from(lines), verbs)
