"""`precision.saved_mlp=fp8`: what an MLP keeps for backward, as FP8 codes.

The backward of `silu(gate) * up` reads gate and up [M, I], the largest tensors that a compiled
layer saves: 470 of 707 MB of an FP8 LoRA layer of an 8B model, for 8,192 tokens. Here autograd
keeps E4M3 codes [M, I] and one float32 scale per row [M, 1] instead, half the bytes. Forward
computes with the results themselves, so logits and loss of a step are the same to the bit. Backward
decodes them in the kernel that reads them, and makes all from them that it computes again: also the
input of the down projection. Their rounding, 2.6 % of a normal number, is in the gradients.

A pair of saved-tensor hooks does it. Hooks that are graphs are put into a compiled layer's graph
after AOTAutograd has split it (torch 2.8), so its partition stays as it is. They see what forward
saves for backward, besides its inputs and results; the MLP's activations are found by their width.

Sources: DeepSeek-V3 technical report (arXiv 2412.19437), section 3.3.3, keeps the inputs of SwiGLU
in FP8; COAT (arXiv 2410.19313) all activations.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from finetune.errors import PrecisionError
from finetune.precision.compiling import counters
from finetune.precision.formats import E4M3
from finetune.precision.scaling import cast_current

FEW = 16
"""Rows below which a tensor is no activation: scales of columns."""
MATRIX = 2
"""Dimensions of a linear layer's weight; hidden states have one more."""
Kept = Tensor | tuple[Tensor, Tensor]
"""A saved tensor, or its codes and inverse scales."""


class SavedMlp:
    """The hooks of one converted model.

    Attributes:
        widths: see `finetune.precision.overrides.mlp_widths`.
        kept: tensors of compiled graphs that are kept in FP8.
    """

    def __init__(self, widths: frozenset[int]) -> None:
        self.widths, self.kept = widths, 0
        self._hooks = _as_graph(self._pack), _as_graph(unpack)

    def _pack(self, x: Tensor) -> Kept:
        """Codes [..., M, I] and inverse scales [..., M, 1] of an activation; others as they are.

        Called when a graph is made, and by uncompiled operators, whose tensors stay as they are.
        """
        *rows, width = x.shape if x.dtype is torch.bfloat16 and x.dim() else (1,)
        inside = isinstance(width, int) and width in self.widths  # a symbol is a length
        few = all(isinstance(size, int) for size in rows) and prod(rows) < FEW
        if few or not inside or not _is_activation():
            return x
        self.kept += 1
        return cast_current(x, E4M3, -1, packed=True)

    @contextlib.contextmanager
    def in_call(self, layers: Iterable[nn.Module]) -> Iterator[None]:
        """Context of a call of the model, in training, whose decoder layers are compiled.

        But for those that training health observes uncompiled.

        Raises:
            PrecisionError: layers are checkpointed; or some were compiled in this call, and keep
                nothing of an MLP.
        """
        compiled = [layer for layer in layers if layer._compiled_call_impl is not None]
        if any(getattr(layer, "gradient_checkpointing", False) for layer in compiled):
            raise _idle(
                "a checkpointed layer saves nothing of its MLP, and computes it again",
                "train.gradient_checkpointing=false, or",
            )
        before = counters()["frames"]["ok"]
        with torch.autograd.graph.saved_tensors_hooks(*self._hooks):
            yield
        if counters()["frames"]["ok"] > before and not self.kept:
            raise _idle("graphs begin or end inside it; TORCH_LOGS=graph_breaks says where")


def _is_activation() -> bool:
    """True if the tensor that a hook is given is made of the layer's input [B, L, H] in a graph.

    Others are made of weights alone: in 16 bits beside a float32 master, or with DoRA's update. No
    graph exists where uncompiled operators save. `torch.compiler.is_compiling()` cannot decide it:
    before torch 2.13 it is False while a graph's hooks are called.
    """
    from torch._functorch._aot_autograd import graph_compile

    context = graph_compile._get_saved_tensor_hook_context()
    seen, waiting = set[torch.fx.Node](), [context["_node"]] if context else []
    while waiting:
        node = waiting.pop()
        value = node.meta.get("val")  # an input may be a length, too
        if node.op == "placeholder" and isinstance(value, Tensor) and value.dim() > MATRIX:
            return True
        waiting += [each for each in node.all_input_nodes if each not in seen]
        seen.update(node.all_input_nodes)
    return False


def _idle(why: str, fix: str = "") -> PrecisionError:
    return PrecisionError(
        "precision.saved_mlp=fp8 acts on nothing: compiled layers save nothing of an MLP",
        where="the first compiled micro-step",
        why=why,
        fix=f"{fix} ~precision.saved_mlp".strip(),
    )


def unpack(kept: Kept) -> Tensor:
    """The saved tensor, or the BF16 numbers [..., M, I] that its codes stand for."""
    if isinstance(kept, Tensor):
        return kept
    codes, inverse = kept
    return (codes.float() * inverse).to(torch.bfloat16)


def _as_graph(function: Callable[[Any], Any]) -> torch.fx.GraphModule:
    """A graph that calls a function: hooks of this form become part of compiled graphs."""
    graph = torch.fx.Graph()
    graph.output(graph.call_function(function, (graph.placeholder("x"),)))
    return torch.fx.GraphModule(nn.Module(), graph)
