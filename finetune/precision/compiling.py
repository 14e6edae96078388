"""`torch.compile` of decoder layers: what torch has to be told, and what it leaves uncompiled.

Layers are compiled one by one, in place, and share graphs (`19-one-graph-for-all-layers.md` of
`docs/notes`). Those that run uncompiled for a while, to be observed, are checkpointed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch.utils.checkpoint import checkpoint

from finetune.errors import PrecisionError

GRAPHS = 64
"""Graphs that Dynamo makes of one decoder layer at most."""


def never_compiled(where: str) -> PrecisionError:
    """The error of a model that a script compiles by itself."""
    return PrecisionError(
        "torch_compile of the whole model does not go with the proof",
        where=where,
        why="a model that torch.compile first meets under the witness is never compiled",
        fix="leave torch_compile out and set precision.compile=on (compile='on' in the "
        "helper): each decoder layer is compiled after the witnessed step",
    )


def is_inside() -> bool:
    """True in a call that `torch.compile` surrounds, as of a model that it has wrapped."""
    return get_eval_frame_callback() not in (None, False)


@contextlib.contextmanager
def recomputed(
    layers: Iterable[nn.Module],
    again: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
) -> Iterator[None]:
    """Checkpoint those of Transformers' decoder layers that are called in this block in training.

    For layers that are compiled otherwise: of 8,192 tokens one of an 8B model saves 0.7 GB for
    backward, uncompiled 1.2 to 1.6 (`docs/notes/35-compiled-fp8-saves-activations.md`). What fits
    in memory compiled would not fit in the few micro-steps that run uncompiled, to be observed.

    Args:
        layers: decoder layers; those that are checkpointed already, or cannot be, stay as they are.
        again: context of each recomputation in backward.
    """
    name = "_gradient_checkpointing_func"
    function = partial(
        checkpoint,
        use_reentrant=False,
        context_fn=lambda: (contextlib.nullcontext(), again()),
    )
    with contextlib.ExitStack() as undo:
        for layer in layers:
            if getattr(layer, "gradient_checkpointing", True):
                continue
            before = {k: v for k, v in vars(layer).items() if k in (name, "gradient_checkpointing")}
            undo.callback(vars(layer).update, before)
            undo.callback(vars(layer).pop, name, None)
            undo.callback(vars(layer).pop, "gradient_checkpointing", None)
            vars(layer).update({name: function, "gradient_checkpointing": True})
        yield


def store_operands_once() -> None:
    """Tell Inductor that FP8 GEMMs read their operands from memory, as `mm` does.

    Without it (torch 2.13) each GEMM gets a buffer of codes of its own, also those that share an
    operand, as q, k and v do.
    """
    from torch._inductor.lowering import add_needs_realized_inputs

    add_needs_realized_inputs(torch.ops.aten._scaled_mm)


def allow_graphs() -> None:
    """Let Dynamo make as many graphs of a decoder layer as a run of rows of all lengths needs.

    Beyond `recompile_limit` (8 in torch 2.13) layers run uncompiled, with a line in torch's log. It
    is reached by two lengths, each with padding and without, in training and evaluation; the first
    layer's input needs no gradient under LoRA, which takes graphs of its own.
    """
    from torch._dynamo import config

    config.recompile_limit = max(config.recompile_limit, GRAPHS)


def counters() -> Any:
    """Dynamo's counters of this process: kind -> reason -> number."""
    from torch._dynamo.utils import counters

    return counters


def left_out() -> tuple[int, int, int]:
    """What Dynamo has not compiled in this process so far.

    Returns:
        Functions at their `recompile_limit`, functions begun and not compiled, and graph breaks.
    """
    found, frames = counters(), counters()["frames"]
    limits = sum(n for why, n in found["unimplemented"].items() if "recompile limit" in why.lower())
    return limits, frames["total"] - frames["ok"], sum(found["graph_break"].values())


def allow_counts_in_checkpoints() -> None:
    """Let Dynamo trace a checkpoint in which attributes change, as those of `base.Tally` do.

    Transformers (5.23) checkpoints inside a decoder layer's forward, hence in its graph. Without it
    (torch 2.13) such a layer breaks, and runs uncompiled.
    """
    from torch._dynamo import config

    config.skip_fwd_side_effects_in_bwd_under_checkpoint = True


def run_backward_without_autocast() -> None:
    """Let AOTAutograd trace backward as it runs: outside of the trainer's autocast.

    By default (torch 2.13) it is traced under that of forward, and layers that `precision.map`
    gives fp32, or routers that a model keeps in fp32, multiply BF16 operands in backward.
    """
    from torch._functorch import config

    config.backward_pass_autocast = "off"


def prepare() -> None:
    """Set torch up for compiled layers, in this process."""
    run_backward_without_autocast()
    store_operands_once()
    allow_counts_in_checkpoints()
    allow_graphs()


def why_uncompiled(before: tuple[int, int, int]) -> str:
    """What torch's counters say of parts of compiled layers that run uncompiled, or "".

    Args:
        before: `left_out` when the layers were compiled.
    """
    limits, skipped, breaks = (now - then for now, then in zip(left_out(), before, strict=True))
    if limits > 0:
        return "torch's recompile_limit is reached: some layers run uncompiled"
    if skipped > 0:
        return f"torch skips {skipped} functions: layers, or parts of them, run uncompiled"
    return f"{breaks} graph breaks: parts of layers run uncompiled" if breaks > 0 else ""
