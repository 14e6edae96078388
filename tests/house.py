"""How large the house is, and how much happens in it: the figures that changes are held to.

    python -m tests.house [--root FOLDER]

*Code* is lines with a token that is no comment or docstring, stubs included. A *room* is a folder
or a file of the package, a *floor* a step of the longest way down by imports; a place branches on a
scaling or a backend where it compares something with the name of one. Of a small LoRA model
in FP8, emulated, it counts walks over the whole model (`modules`, `named_modules`, `parameters` and
`named_parameters` of the model that is prepared, or of one that wraps it) in `prepare` and in the
first step, hooks behind `prepare`, classes between a LoRA layer and the plain one, and frames of
ours above a GEMM, in forward.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
import tomllib
from collections import Counter
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
NOT_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    tokenize.ENDMARKER,
}


def code_and_comments(file: Path) -> tuple[int, int]:
    """Lines of code of a file, and comments in it."""
    text = file.read_text(encoding="utf-8")
    bodies = (
        node.body
        for node in ast.walk(ast.parse(text))
        if isinstance(getattr(node, "body", 0), list)
    )
    first = [one for body in bodies for one in body if isinstance(one, ast.Expr)]
    words = [
        one
        for one in first
        if isinstance(one.value, ast.Constant) and isinstance(one.value.value, str)
    ]
    docs = {line for one in words for line in range(one.lineno, (one.end_lineno or 0) + 1)}
    tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    held = (token for token in tokens if token.type not in NOT_CODE)
    lines = {line for token in held for line in range(token.start[0], token.end[0] + 1)}
    return len(lines - docs), sum(token.type == tokenize.COMMENT for token in tokens)


def sizes(root: Path) -> list[tuple[str, Any]]:
    """(figure, value) of what lies in the repository."""
    lines: Counter[str] = Counter()
    comments: Counter[str] = Counter()
    package = root / "finetune"
    for file in sorted([*package.rglob("*.py"), *package.rglob("*.pyi")]):
        parts = file.relative_to(package).parts
        name = parts[0] if len(parts) > 1 else "top"
        code, said = code_and_comments(file)
        lines[name] += code
        comments[name] += said
    found: list[tuple[str, Any]] = [("code lines of the package", lines.total())]
    found += [(f"    {name}", count) for name, count in sorted(lines.items())]
    tests = sum(
        len(file.read_text("utf-8").splitlines()) for file in (root / "tests").rglob("*.py")
    )
    core = "precision"
    outside = comments.total() - comments[core], lines.total() - lines[core]
    return [
        *found,
        ("lines of tests", tests),
        ("comments per 100 code lines in precision", per_100(comments[core], lines[core])),
        ("comments per 100 code lines outside of it", per_100(*outside)),
        ("notes", len(list((root / "docs/notes").glob("[0-9]*.md")))),
        *structure(package),
        *foreign(tomllib.loads((root / "tests/foreign_names.toml").read_text("utf-8"))),
    ]


def per_100(part: int, whole: int) -> float:
    """Per cent, to a tenth."""
    return round(100 * part / whole, 1)


# ------------------------------------------------------------------------------ what knows what

SCALINGS = {"tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed", "blockwise", "mxfp8", "nvfp4"}
BACKENDS = {"torchao", "te", "emulated"}


class Modules:
    """Files of a package by the name of their module, and what each imports of the package."""

    def __init__(self, package: Path) -> None:
        self.trees: dict[str, ast.Module] = {}
        self.packages: set[str] = set()
        for file in sorted(package.rglob("*.py")):
            parts = file.relative_to(package.parent).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            self.trees[name] = ast.parse(file.read_text("utf-8"))
            if parts[-1] == "__init__":
                self.packages.add(name)
        self.imports = {name: self._imports(name) for name in self.trees}

    def _imports(self, name: str) -> set[str]:
        found: set[str] = set()
        for node in ast.walk(self.trees[name]):
            if isinstance(node, ast.Import):
                found |= {one.name for one in node.names}
            elif isinstance(node, ast.ImportFrom):
                up = name.split(".")[: -node.level or None] if node.level else []
                if node.level and name in self.packages:
                    up = name.split(".")[: 1 - node.level or None]
                base = ".".join([*up, *([node.module] if node.module else [])])
                # `from finetune.a import b` names a file where `b` is one, else the file `a`
                full = {f"{base}.{one.name}" for one in node.names}
                found |= (full & self.trees.keys()) or {base}
        return (found & self.trees.keys()) - {name}


def room_of(module: str) -> str:
    """`finetune.data.rows` -> `data`; the package itself is none."""
    return module.split(".")[1] if "." in module else ""


def floors(arrows: dict[str, set[str]]) -> int:
    """The longest way down; what imports each other in a circle stands on one floor."""
    reach: dict[str, set[str]] = {}
    for name in arrows:
        reach[name], todo = set(), [name]
        while todo:
            new = arrows[todo.pop()] - reach[name]
            reach[name] |= new
            todo += new
    circle = {name: min({name, *(r for r in reach[name] if name in reach[r])}) for name in arrows}

    @cache
    def height(first: str) -> int:
        below = {circle[r] for r in reach[first]} - {first}
        return 1 + max(map(height, below), default=0)

    return max(map(height, circle.values()))


def structure(package: Path) -> list[tuple[str, Any]]:
    """(figure, value) of what files know of one another, and of names that stand as strings."""
    modules = Modules(package)
    most = max(modules.imports, key=lambda name: len(modules.imports[name]))

    rooms: dict[str, set[str]] = {room_of(name): set() for name in modules.trees if room_of(name)}
    for name, imported in modules.imports.items():
        if room_of(name):
            rooms[room_of(name)] |= {room_of(one) for one in imported} - {"", room_of(name)}
    core = {
        name: {one for one in imported if room_of(one) == "precision"}
        for name, imported in modules.imports.items()
        if room_of(name) == "precision"
    }
    needed = {one for name in core for one in modules.imports[name]} - core.keys()
    named = {
        key: [name for name, tree in modules.trees.items() for _ in compared(tree, words)]
        for key, words in (("a scaling", SCALINGS), ("a backend", BACKENDS))
    }
    reads = [
        name
        for name, tree in modules.trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and re.search(r"\btrain\.get$", ast.unparse(node.func))
    ]
    classes: dict[str, set[str]] = {}
    for name, tree in modules.trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                classes.setdefault(node.name, set()).add(name)
    return [
        ("rooms", len(rooms)),
        ("floors of the house", floors(rooms)),
        ("floors inside precision", floors(core)),
        ("files outside of precision that it imports", len(needed - {package.name})),
        ("files in training at one level", len(list(package.glob("training/*.py")))),
        (f"largest fan-out of a file ({most})", len(modules.imports[most])),
        *((f"places that branch on {key}", len(found)) for key, found in named.items()),
        *((f"files that branch on {key}", len(set(found))) for key, found in named.items()),
        ("calls of train.get", len(reads)),
        ("files that call it", len(set(reads))),
        ("names that classes share", sum(len(files) > 1 for files in classes.values())),
    ]


def compared(tree: ast.Module, words: set[str]) -> list[ast.AST]:
    """Comparisons and cases with one of some words, `in` a row of them too."""

    def says(node: ast.AST) -> bool:
        if isinstance(node, ast.MatchValue):
            return getattr(node.value, "value", None) in words
        if not isinstance(node, ast.Compare):
            return False
        constants = (one for one in ast.walk(node) if isinstance(one, ast.Constant))
        return any(isinstance(one.value, str) and one.value in words for one in constants)

    return [node for node in ast.walk(tree) if says(node)]


def foreign(listed: dict[str, dict[str, list[str]]]) -> list[tuple[str, Any]]:
    """(figure, value) of the names in `foreign_names.toml` with a private part."""
    private = [
        module
        for section, modules in listed.items()
        for module, names in modules.items()
        for name in names
        if module != "ours" and re.search(r"(^|\.)_(?!_)", name)
    ]
    return [
        ("private names of other libraries", len(private)),
        ("    of TRL", sum(module.split(".")[0] == "trl" for module in private)),
    ]


# ------------------------------------------------------------------------------ at run time

WALKS = ("modules", "named_modules", "parameters", "named_parameters")


@contextmanager
def counting_walks(model: Any) -> Any:
    """Counts of calls of each of `WALKS` by whoever asks the model, or what wraps it."""
    from torch import nn

    count: Counter[str] = Counter()
    plain = {name: getattr(nn.Module, name) for name in WALKS}
    busy = False

    def counted(name: str) -> Any:
        def walk(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            nonlocal busy
            whole = self is model or any(child is model for child in self._modules.values())
            if not whole or busy:  # one walk may be made of another
                return plain[name](self, *args, **kwargs)
            count[name] += 1
            busy = True
            try:
                return iter(list(plain[name](self, *args, **kwargs)))
            finally:
                busy = False

        return walk

    for name in WALKS:
        setattr(nn.Module, name, counted(name))
    try:
        yield count
    finally:
        for name, method in plain.items():
            setattr(nn.Module, name, method)


def behavior() -> list[tuple[str, Any]]:
    """(figure, value) of a prepared model and its first step."""
    import torch
    from peft import LoraConfig, get_peft_model
    from torch.utils._python_dispatch import TorchDispatchMode
    from transformers import LlamaConfig, LlamaForCausalLM

    from finetune import setup_fp8_mixed_precision_training

    class Frames(TorchDispatchMode):
        """The most frames of ours above a product of two matrices."""

        most = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if re.search(r"mm|matmul", str(func)):
                frame, ours = sys._getframe(1), 0
                while frame is not None:
                    ours += "/finetune/" in frame.f_code.co_filename
                    frame = frame.f_back
                self.most = max(self.most, ours)
            return func(*args, **(kwargs or {}))

    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, vocab_size=272, use_cache=False, pad_token_id=0,
        )
    ).to(torch.bfloat16)  # fmt: skip
    model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear")).train()
    ids = torch.randint(1, 272, (2, 32))
    accelerator = setup_fp8_mixed_precision_training(
        "emulated", frozen="fp8", emulation="allow", cpu=True
    )
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    with counting_walks(model) as prepared:
        model, optimizer = accelerator.prepare(model, optimizer)
    hooks = sum(
        len(getattr(m, name))
        for m in model.modules()
        for name in (
            "_forward_pre_hooks",
            "_forward_hooks",
            "_backward_hooks",
            "_backward_pre_hooks",
        )
    )
    layer = next(m for name, m in model.named_modules() if name.endswith("q_proj"))
    classes = [cls for cls in type(layer).__mro__ if cls.__module__.startswith("finetune")]
    with counting_walks(model) as stepped:
        accelerator.backward(model(input_ids=ids, labels=ids).loss)
        optimizer.step()
        optimizer.zero_grad()
    with Frames() as frames:
        model(input_ids=ids, labels=ids)
    return [
        ("walks over the model in prepare", prepared.total()),
        ("walks in the first step", stepped.total()),
        ("hooks behind prepare", hooks),
        ("classes of ours in a LoRA layer", len(classes)),
        ("frames of ours above a GEMM, at most", frames.most),
    ]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--root", type=Path, default=ROOT, help="another checkout, by size alone")
    root = parser.parse_args().root
    figures = sizes(root) + (behavior() if root == ROOT else [])
    width = max(len(name) for name, _ in figures)
    for name, value in figures:
        print(f"{name:{width}}  {value:>8,}")


if __name__ == "__main__":
    main()
