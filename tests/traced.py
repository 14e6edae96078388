"""Decoder layers compiled as far as AOTAutograd: every graph of a GPU's, and no code generator."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import nn


@contextlib.contextmanager
def traced() -> Iterator[Callable[[], str]]:
    """Let `nn.Module.compile` trace alone; yields what Dynamo has made so far, in words."""
    from torch._dynamo.utils import counters

    compile = nn.Module.compile

    def only_traced(self: nn.Module, *args: Any, options: Any = None) -> None:
        compile(self, *args, backend="aot_eager")

    def graphs() -> str:
        frames, breaks = counters["frames"], sum(counters["graph_break"].values())
        left = frames["total"] - frames["ok"]
        found = f"graphs: {frames['ok']}"
        found += f", breaks: {breaks}" if breaks else ""
        return found + (f", functions left out: {left}" if left else "")

    torch._dynamo.reset()
    counters.clear()
    with mock.patch.object(nn.Module, "compile", only_traced):
        yield graphs
    torch._dynamo.reset()
    counters.clear()
