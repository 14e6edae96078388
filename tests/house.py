"""How large the house is, and how much happens in it: the figures that changes are held to.

    python -m tests.house [--root FOLDER]

*Code* is lines with a token that is no comment or docstring, stubs included. Of a small LoRA model
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
    rooms: Counter[str] = Counter()
    comments: Counter[str] = Counter()
    package = root / "finetune"
    for file in sorted([*package.rglob("*.py"), *package.rglob("*.pyi")]):
        parts = file.relative_to(package).parts
        room = parts[0] if len(parts) > 1 else "top"
        code, said = code_and_comments(file)
        rooms[room] += code
        comments[room] += said
    found: list[tuple[str, Any]] = [("code lines of the package", rooms.total())]
    found += [(f"    {room}", lines) for room, lines in sorted(rooms.items())]
    tests = sum(
        len(file.read_text("utf-8").splitlines()) for file in (root / "tests").rglob("*.py")
    )
    listed = tomllib.loads((root / "tests/foreign_names.toml").read_text("utf-8"))
    private = [name for names in listed["names"].values() for name in names]
    return [
        *found,
        ("lines of tests", tests),
        (
            "comments per 100 code lines in precision",
            round(100 * comments["precision"] / rooms["precision"], 1),
        ),
        ("private names of other libraries, listed", len(private)),
        ("notes", len(list((root / "docs/notes").glob("[0-9]*.md")))),
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
