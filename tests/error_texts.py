"""Texts of errors and warnings in the package, and those that left it, each with a reason.

    python -m tests.error_texts    # adds new ones to tests/error_texts.txt

A guard that leaves with a refactoring takes its test along, and nobody misses it until somebody
meets what it guarded from. So a text that is in the file and no more in the package fails the test
until its line says why: `text  ->  reason` (another text that says it now, an input that is valid
now, a state that cannot be reached, what a library refuses itself).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILE, ARROW = Path(__file__).with_suffix(".txt"), "  ->  "
RAISES = re.compile(r"Error$|^_?refuse|^_?warn$")
"""Names of what is called with such a text first; so is whatever is called with a `fix=`, too."""


def template(node: ast.expr) -> str:
    """The text of an expression, `{}` in the place of each value; empty if it has none."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(template(v) if isinstance(v, ast.Constant) else "{}" for v in node.values)
    if isinstance(node, ast.BinOp):
        return "".join(template(side) or "{}" for side in (node.left, node.right))
    return ""


@cache
def texts(package: Path = ROOT / "finetune") -> set[str]:
    """What errors, refusals and warnings say first, one line each."""
    found = set[str]()
    for file in package.rglob("*.py"):
        nodes = list(ast.walk(ast.parse(file.read_text("utf-8"))))
        parts = {
            id(one) for node in nodes if isinstance(node, ast.JoinedStr) for one in node.values
        }
        for node in nodes:
            if id(node) not in parts:
                found |= {" ".join(template(one).split()) for one in _said(node)}
    return {text for text in found if len(text.replace("{}", "")) > 8}


def _said(node: ast.AST) -> Iterator[ast.expr]:
    """Texts that a node says: the first argument of an error, what is kept for one (`what = ...`),
    the reason of a verdict (`Verdict(False, ...)`), and a line of warning (`! ...`).
    """
    if isinstance(node, ast.Call) and node.args:
        name = getattr(node.func, "id", getattr(node.func, "attr", ""))
        if RAISES.search(name) or any(each.arg == "fix" for each in node.keywords):
            yield node.args[0]
        elif name == "Verdict" and getattr(node.args[0], "value", None) is False:
            yield from node.args[1:]
    elif isinstance(node, ast.Constant | ast.JoinedStr) and template(node).startswith("! "):
        yield node
    elif isinstance(node, ast.Assign):
        names, value = node.targets[0], node.value
        both = isinstance(names, ast.Tuple) and isinstance(value, ast.Tuple)
        pairs = zip(names.elts, value.elts, strict=False) if both else [(names, value)]
        yield from (said for name, said in pairs if getattr(name, "id", "") == "what")


def known() -> dict[str, str]:
    """Text -> why it left; empty of one that is there."""
    lines = FILE.read_text("utf-8").splitlines()
    return {text: why for text, _, why in (line.partition(ARROW) for line in lines)}


def main() -> None:
    """Add what is new; a text that is there again needs no reason."""
    here, before = texts(), known() if FILE.is_file() else {}
    gone = {text: why for text, why in before.items() if text not in here}
    lines = [*here, *(f"{text}{ARROW}{why}" if why else text for text, why in gone.items())]
    FILE.write_text("\n".join(sorted(lines)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
