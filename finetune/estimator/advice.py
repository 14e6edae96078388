"""Advice on a run, in words and as data: what to change, what that frees and what it costs."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from finetune.estimator.knobs import Rank
from finetune.estimator.memory.footprint import Fit

FREE = 0.01
"""Of speed, below which a change costs nothing."""


@dataclass(frozen=True)
class Advice:
    """Something to change, measured.

    Attributes:
        change: as typed: overrides behind the recipe, `--gpus N`, a variable before the command.
        frees: bytes of allocated; of fragments, where the change is about these. Negative: takes.
        slower: share by which each token takes longer; negative: faster; None: speed is not known.
        fit: of the run with it.
        why: what it does, and what speaks against it.
        rank: how much it touches what is trained.
    """

    change: tuple[str, ...]
    frees: int
    slower: float | None
    fit: Fit
    why: str
    rank: Rank = "same"

    def facts(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "change": list(self.change),
            "frees_bytes": self.frees,
            "slower": self.slower,
            "fit": self.fit,
            "trains": self.rank,
            "why": self.why,
        }


@dataclass(frozen=True)
class Advised:
    """Advice on a run.

    Attributes:
        fit: of the run as it is.
        each: single changes: first what trains the same, each rank from the cheapest in speed on.
        together: the cheapest set of changes found that makes the run fit; None where it fits as
            it is, or nothing does.
        faster: what would make a run that fits faster.
    """

    fit: Fit
    each: tuple[Advice, ...] = ()
    together: Advice | None = None
    faster: tuple[Advice, ...] = ()

    def facts(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "fit": self.fit,
            "each": [advice.facts() for advice in self.each],
            "together": None if self.together is None else self.together.facts(),
            "faster": [advice.facts() for advice in self.faster],
        }

    def __rich__(self) -> RenderableType:
        if self.fit == "fits":
            return _table("to make it faster", self.faster) if self.faster else Text()
        parts: list[RenderableType] = [_table("what to change", self.each)] if self.each else []
        if self.together is not None:
            parts.append(Text.assemble(("fits with ", "bold green"), _typed(self.together),
                                       f" ({_cost(self.together)})"))  # fmt: skip
        else:
            parts.append(Text("no set of these changes makes it fit: a smaller model, or a GPU "
                              "with more memory", "bold"))  # fmt: skip
        return Group(*parts)


def one_line(advices: Advised | Sequence[Advice]) -> str:
    """Advice as the last line of an error: what makes the run fit first, then single changes."""
    each = list(advices.each if isinstance(advices, Advised) else advices)
    if isinstance(advices, Advised) and advices.together is not None:
        each.insert(0, advices.together)
    fitting = [advice for advice in each if advice.fit == "fits"]
    shown = list({advice.change: advice for advice in fitting or each}.values())[:3]
    if not shown:
        return "a smaller model (`python -m finetune ls`), or a GPU with more memory"
    lines = [f"{_typed(advice)} ({_cost(advice)})" for advice in shown]
    return ("" if fitting else "nothing of this alone is enough: ") + "; or ".join(lines)


def _cost(advice: Advice) -> str:
    words = [_size(advice.frees)]
    if advice.slower is not None:
        words.append(_speed(advice.slower))
    if advice.rank in ("otherwise", "adapters"):
        words.append("trains otherwise")
    return ", ".join(words)


def _typed(advice: Advice) -> str:
    return " ".join(shlex.quote(word) if " " in word and not word.startswith("--") else word
                    for word in advice.change)  # fmt: skip


def _size(frees: int) -> str:
    mib = abs(frees) / 2**20
    size = f"{mib / 1024:.1f} GiB" if mib >= 1024 else f"{mib:.0f} MiB"
    return f"{'frees' if frees >= 0 else 'takes'} {size}"


def _speed(slower: float) -> str:
    if abs(slower) < FREE:
        return "as fast"
    return f"{slower:.0%} slower" if slower > 0 else f"{1 / (1 + slower) - 1:.0%} faster"


def _table(title: str, advices: Sequence[Advice]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in (title, "memory", "speed", "then it", "what that is"):
        table.add_column(column, justify="left", overflow="fold")
    for advice in advices:
        speed = "?" if advice.slower is None else _speed(advice.slower)
        typed = "\n".join(advice.change)
        table.add_row(typed, _size(advice.frees), speed, advice.fit, advice.why)
    return table
