"""`torch.compile` of decoder layers: how torch is set up for it, and what it leaves uncompiled.

Layers are compiled one by one, in place, and share graphs (`06-compiled-layers.md` of
`docs/notes`). Those that run uncompiled for a while, to be observed, are checkpointed. A layer in
which somebody has put hooks runs uncompiled as long as they are there (`Hooks`).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch.utils.checkpoint import checkpoint

from finetune.errors import PrecisionError
from finetune.precision.model.tree import Tree

GRAPHS = 64
"""Graphs that Dynamo makes of one decoder layer at most."""
OURS = "is_of_finetune"
"""Attribute of what compiled layers call, if it was compiled here."""
UNREPEATABLE = ("ALoraLinearVariant", "MontecloraLinearVariant")
"""Classes of PEFT (0.21) whose forward is another one in a recomputation (`_does_not_repeat`)."""
CAPTURING = "transformers.utils.output_capturing"
"""Module of Transformers (5.23) whose hooks give `output_attentions` and other outputs."""
BY_LAYER = (
    "leave torch_compile out and set precision.compile=on: each "
    "decoder layer is compiled after the witnessed step"
)
"""Fix of a script that compiles by itself."""


def never_compiled(where: str) -> PrecisionError:
    """The error of a model that a script compiles by itself."""
    return PrecisionError(
        "torch_compile of the whole model does not go with the proof",
        where=where,
        why="a model that torch.compile first meets under the witness is never compiled",
        fix=BY_LAYER,
    )


def compiled_later(where: str) -> PrecisionError:
    """The error of a model that a script compiles by itself after its first steps."""
    return PrecisionError(
        "the script has compiled a model whose first steps were proven uncompiled",
        where=where,
        why="such graphs are not those that are tested here: backward is traced under autocast, "
        "and hooks are those of the first call",
        fix=BY_LAYER,
    )


def refuse_compiled(
    model: nn.Module | Tree, error: Callable[[str], PrecisionError] = never_compiled
) -> None:
    """Raise `PrecisionError` for a model or layer that the script has compiled by itself.

    Met by the witness, its layers would run, in FP8 and proven, but as plain modules until the end
    of the process.
    """
    from torch._dynamo import OptimizedModule

    for name, module in model.named_modules():
        said, call = "", module._compiled_call_impl
        if isinstance(module, OptimizedModule):
            said = "torch.compile(model)"
        # `nn.Module.compile` sets `_compiled_call_impl`; `uncompiled_with_hooks` marks ours.
        elif call is not None and not hasattr(call, OURS):
            said = ".compile()"
        elif hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable"):
            said = "torch.compile(model.forward)"
        if said:
            raise error(f"{said} of {name or 'the model'}: {type(module).__name__}")


def is_inside() -> bool:
    """True in a call that `torch.compile` surrounds, as of a model that it has wrapped."""
    # Dynamo cannot trace the second question, and answers the first one without a graph break.
    # Callback None: Dynamo is off; False: it only runs graphs that it has, and traces none.
    return torch.compiler.is_compiling() or get_eval_frame_callback() not in (None, False)


@contextlib.contextmanager
def recomputed(
    layers: Iterable[nn.Module],
    again: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
) -> Iterator[None]:
    """Checkpoint decoder layers of Transformers that are called in this block in training.

    For layers that are compiled otherwise: of 8,192 tokens one of an 8B model saves 0.7 GB for
    backward, uncompiled 1.2 to 1.6 (`docs/notes/06-compiled-layers.md`). What fits
    in memory compiled would not fit in the few micro-steps that run uncompiled, to be observed.

    Layers with hooks inside are left out, as they are not compiled either, and in backward the
    hooks may be gone; so are adapters whose forward does not repeat, and calls with entries in a
    cache, as those of prefix tuning: Transformers (5.23) checkpoints without caches.

    Args:
        layers: decoder layers; those that are checkpointed already, or cannot be, stay as they are.
        again: context of each recomputation in backward.
    """
    name = "_gradient_checkpointing_func"

    def contexts() -> tuple[Any, Any]:
        return contextlib.nullcontext(), again()

    # Transformers calls it with the layer's forward, keywords bound, and the positional arguments.
    def function(hooks: Hooks, run: Callable[..., Any], *args: Any) -> Any:
        if hooks.are_there():
            return run(*args)
        # Only the non-reentrant one takes a `context_fn`.
        return checkpoint(run, *args, use_reentrant=False, context_fn=contexts)

    with contextlib.ExitStack() as undo:
        for layer in layers:
            # True by default: a class without the attribute cannot be checkpointed.
            if getattr(layer, "gradient_checkpointing", True) or _does_not_repeat(layer):
                continue
            # Undone from the last to the first: ours is removed, then what was there comes back.
            before = {k: v for k, v in vars(layer).items() if k in (name, "gradient_checkpointing")}
            undo.callback(vars(layer).update, before)
            undo.callback(vars(layer).pop, name, None)
            undo.callback(vars(layer).pop, "gradient_checkpointing", None)
            own = partial(function, Hooks(layer))
            vars(layer).update({name: own, "gradient_checkpointing": True})
            hook = layer.register_forward_pre_hook(_leave_cached, with_kwargs=True)
            undo.callback(hook.remove)
        yield


def _leave_cached(layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    """Hook of a layer that checkpoints it unless it is called with entries in a cache."""
    has_entries = any(cache.get_seq_length() for cache in _caches(args, kwargs))
    vars(layer)["gradient_checkpointing"] = not has_entries


def _caches(args: Any, kwargs: dict[str, Any]) -> list[Any]:
    """Caches of Transformers that a layer is called with."""
    return [each for each in (*args, *kwargs.values()) if _is_cache(each)]


def _is_cache(value: Any) -> bool:
    from transformers import Cache

    return isinstance(value, Cache)


def _does_not_repeat(layer: nn.Module) -> bool:
    """True if a recomputation would differ from the forward: aLoRA's and MonteCLoRA's of PEFT 0.21.

    aLoRA looks for checkpointed layers when its offsets are handed out; MonteCLoRA draws again.
    """
    variants = [v for m in layer.modules() for v in getattr(m, "lora_variant", {}).values()]
    return any(type(v).__name__ in UNREPEATABLE for v in variants)


class Hooks:
    """Hooks that others put on the modules inside a decoder layer.

    A graph has the hooks that stood when it was made, for good, and for every layer that shares it:
    torch (2.13) does not look at hooks again (`skip_nnmodule_hook_guards`). PEFT hands things to
    its layers by hooks that stand for one call: rows' adapters (`adapter_names`), the offsets of
    aLoRA, Poly's tasks, X-LoRA's scalings.

    Hooks of torch and Transformers that stand when layers are compiled are alike in every layer,
    and stay. Transformers' output hooks stay too, and do nothing where no output is asked for.
    """

    def __init__(self, layer: nn.Module) -> None:
        self._inside = [module for module in layer.modules() if module is not layer]
        self._stood = [hook for hook in self._all() if _package(hook) in ("torch", "transformers")]

    def are_there(self) -> bool:
        """True if a call now would run hooks that a graph does not have."""
        stood = {id(hook) for hook in self._stood}
        return any(id(hook) not in stood and _acts(hook) for hook in self._all())

    def _all(self) -> Iterator[Any]:
        for m in self._inside:
            for hooks in (
                m._forward_pre_hooks, m._forward_hooks, m._backward_pre_hooks, m._backward_hooks
            ):  # fmt: skip
                if hooks:
                    yield from hooks.values()


def _package(hook: Any) -> str:
    """First part of the module's name in which a hook, or the class of one, was written."""
    return (getattr(hook, "__module__", None) or type(hook).__module__).partition(".")[0]


def _acts(hook: Any) -> bool:
    """True unless it is a hook of ours, which observes, or one of Transformers' for no output."""
    if getattr(hook, "__module__", "") == CAPTURING:
        return bool(sys.modules[CAPTURING]._active_collector.get())
    return _package(hook) != __name__.partition(".")[0]


RECOMPUTES = (2, 13, 0)
"""torch from which on a checkpoint inside of a graph computes autograd functions again; 2.11 keeps
what adapters and weights with masters elsewhere save (counted under both; on an H100, an 8B took
32.9 GiB where 14.1 were meant)."""


def checkpointed_around(layer: nn.Module) -> None:
    """Checkpoint a compiled layer around its graph, where Transformers (5.23) does it inside.

        inside of the graph      backward computes again what it needs: torch 2.13 and later
        around the graph         backward computes all of forward again, whatever torch

    Losses are those of the layer without a checkpoint, to the bit: forward runs the same graph
    twice.
    """
    run: Any = layer._compiled_call_impl

    def plain(*args: Any, **kwargs: Any) -> Any:
        # Dynamo looks at this attribute: without it the graph is that of a layer without a
        # checkpoint.
        vars(layer)["gradient_checkpointing"] = False
        try:
            return run(*args, **kwargs)
        finally:
            vars(layer)["gradient_checkpointing"] = True

    def call(*args: Any, **kwargs: Any) -> Any:
        asked = getattr(layer, "gradient_checkpointing", False)
        if not (asked and layer.training and torch.is_grad_enabled()):
            return run(*args, **kwargs)
        # As Transformers does: a cache would be written a second time.
        kwargs = {name: None if _is_cache(value) else value for name, value in kwargs.items()}
        if kwargs.get("use_cache"):
            kwargs["use_cache"] = False
        # Keywords are bound, as they may hold what is no tensor; the function is the trainer's.
        again: Any = layer._gradient_checkpointing_func
        return again(partial(plain, **kwargs), *args)

    layer._compiled_call_impl = call


def uncompiled_with_hooks(layer: nn.Module, said: Callable[[], None]) -> None:
    """Let a layer that is compiled now run uncompiled in calls with hooks inside; `said` is called.

    So do the calls of a generation. Dynamo (2.13) makes graphs of its own for each layer that reads
    a cache: of 32 layers they reach the limit, and training, which comes later, is not compiled.

    Call it after everything else that replaces `layer._compiled_call_impl`.
    """
    run: Any = layer._compiled_call_impl
    hooks = Hooks(layer)

    def call(*args: Any, **kwargs: Any) -> Any:
        generates = not torch.is_grad_enabled() and bool(_caches(args, kwargs))
        if not generates and not hooks.are_there():
            return run(*args, **kwargs)
        if not generates:
            said()
        return layer._call_impl(*args, **kwargs)

    setattr(call, OURS, True)
    layer._compiled_call_impl = call


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


def prepare() -> None:
    """Set torch (2.13) up for compiled layers, in this process."""
    from torch._dynamo import config as dynamo
    from torch._functorch import config as aot
    from torch._inductor.lowering import add_needs_realized_inputs

    # Backward is traced as it runs, outside of the trainer's autocast. Under that of forward,
    # layers that `precision.map` gives fp32, or routers that a model keeps in fp32, multiply BF16
    # operands in backward.
    aot.backward_pass_autocast = "off"
    # FP8 GEMMs read their operands from memory, as `mm` does. Else each gets a buffer of codes of
    # its own, also those that share an operand, as q, k and v do.
    add_needs_realized_inputs(torch.ops.aten._scaled_mm)
    # Transformers (5.23) checkpoints inside a decoder layer's forward, hence in its graph, in which
    # `CallCount` changes attributes. Such a layer would break, and run uncompiled.
    dynamo.skip_fwd_side_effects_in_bwd_under_checkpoint = True
    # Beyond the limit (8) layers run uncompiled, with a line in torch's log. It is reached by two
    # lengths, each with padding and without, in training and evaluation; the first layer's input
    # needs no gradient under LoRA, which takes graphs of its own.
    dynamo.recompile_limit = max(dynamo.recompile_limit, GRAPHS)


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
