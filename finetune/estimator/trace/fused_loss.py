"""TRL's fused losses as on a GPU, in a trace: the same tensors and products, and no values.

On a GPU TRL (1.16) selects the positions that count, and folds tiles of logits in Triton's kernels,
in place; on a CPU it keeps all positions, and folds in torch, with temporaries that a GPU has not.
Both losses are public functions of autograd. They are replaced whole:

    log-probabilities   the package's own (`precision.cases.head`), also of models that are not
    converted divergence          of a student from a teacher: two buffers of [tokens, words]
    float32, one
                        pass over both heads for statistics, another for a mixture, one in backward

Positions without a label are those whose target is 0, which no row of a rehearsal has; an answer
that a student has written counts whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from finetune.precision.cases.head import Head
from finetune.precision.engines.observers import Owner

OPS = torch.ops.finetune_estimator


def as_on_gpu() -> list[tuple[Any, str, Callable[..., Any]]]:
    """(owner, name, replacement) of TRL's losses."""
    from trl.kernels import ChunkedLogProbFunction
    from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

    plain = Head.apply

    def apply(
        self: Head, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, *rest: Any
    ) -> tuple[Tensor | None, ...]:
        """Of labeled positions, put back among all."""
        counts = targets > 0
        found = plain(self, hidden[counts], weight, bias, targets[counts], *rest)
        return tuple(
            None if x is None else x.new_zeros(counts.shape).masked_scatter(counts, x)
            for x in found
        )

    return [
        (Head, "apply", apply),
        (ChunkedLogProbFunction, "apply", partial(apply, Head(Owner("", [])))),
        (ChunkedDivergenceFunction, "apply", _Divergence.apply),
    ]


class _Divergence(torch.autograd.Function):
    """TRL's `ChunkedDivergenceFunction` (1.16): arguments, saved tensors, buffers, products."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, of_teacher: Tensor,
        its_weight: Tensor, its_bias: Tensor | None, beta: float, *_: Any,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        ctx.set_materialize_grads(False)
        statistics = [hidden.new_zeros(len(hidden), dtype=torch.float32) for _ in range(9)]
        pair = _Pair(hidden, weight, bias, of_teacher, its_weight, its_bias)
        # At 0 and 1 it is a plain KL divergence, which needs no mixture of both (arXiv 2306.13649).
        passes = ("stats", "jsd") if 0 < beta < 1 else ("stats",)
        for tokens in pair.parts(len(hidden), pair.tokens):
            for name in passes:
                for words in pair.parts(len(weight), pair.words):
                    for tile in pair.logits(tokens, words):
                        OPS.in_place(tile, f"divergence_{name}")
        student, teacher = statistics[0] + statistics[2], statistics[1] + statistics[4]
        divergence, entropy = statistics[7] - teacher, student - statistics[3]
        aux = statistics[8] if len(passes) == 2 else divergence
        ctx.save_for_backward(
            hidden, weight, bias, of_teacher, its_weight, its_bias, student, teacher, aux
        )
        ctx.mark_non_differentiable(entropy)
        return divergence, entropy

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None, _: Any) -> Any:  # type: ignore[override]
        if gradient is None:
            # One for each argument of forward.
            return (None,) * 12
        gradient = gradient.float().contiguous()
        operands = ctx.saved_tensors[:6]
        needed = [
            torch.zeros_like(x, dtype=torch.float32) if needs else None
            for x, needs in zip(operands[:3], ctx.needs_input_grad[:3], strict=True)
        ]
        pair, last = _Pair(*operands), list[Tensor]()  # the last one is there to the end
        for tokens in pair.parts(len(operands[0]), pair.tokens):
            for words in pair.parts(len(operands[1]), pair.words):
                tile, _ = pair.logits(tokens, words)
                OPS.in_place(tile, "divergence_backward")
                last[:] = [pair.backward(tile, tokens, words, *needed)]
        given = (
            None if g is None else g.to(x.dtype) for g, x in zip(needed, operands, strict=False)
        )
        return (*given, *(None,) * 9)


class _Pair:
    """Logits of a student and of its teacher, a tile of each at a time."""

    def __init__(self, *operands: Any) -> None:
        from trl.kernels import chunked_divergence as sizes

        self.sides = operands[:3], operands[3:]
        hidden = operands[0]
        low = torch.is_autocast_enabled(hidden.device.type)
        cast = torch.get_autocast_dtype(hidden.device.type)
        self.types = [cast if low else side[0].dtype for side in self.sides]
        self.tokens = min(len(hidden), sizes.TOKEN_CHUNK_SIZE)
        self.words = sizes.VOCAB_CHUNK_SIZE
        self.buffers = [
            hidden.new_empty((self.tokens, self.words), dtype=torch.float32) for _ in self.sides
        ]

    @staticmethod
    def parts(count: int, size: int) -> list[slice]:
        return [slice(i, min(i + size, count)) for i in range(0, math.ceil(count), size)]

    def logits(self, tokens: slice, words: slice) -> list[Tensor]:
        """[n, H] · [H, V] -> two tiles [n, V] float32."""
        tiles = []
        for (x, w, bias), dtype, buffer in zip(self.sides, self.types, self.buffers, strict=True):
            tile = buffer[: tokens.stop - tokens.start, : words.stop - words.start]
            OPS.addmm_fp32(tile, x[tokens].to(dtype), w[words].to(dtype).t())
            if bias is not None:
                tile.add_(bias[words].float())
            tiles.append(tile)
        return tiles

    def backward(
        self, tile: Tensor, tokens: slice, words: slice, of_hidden: Tensor | None,
        of_weight: Tensor | None, of_bias: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """Add a tile's part to the gradients that are needed; return the tile as it was read."""
        (x, w, _), dtype = self.sides[0], self.types[0]
        low = tile.to(dtype)
        if of_hidden is not None:
            OPS.addmm_fp32(of_hidden[tokens], low, w[words].to(dtype))
        if of_weight is not None:
            OPS.addmm_fp32(of_weight[words], low.t(), x[tokens].to(dtype))
        if of_bias is not None:
            of_bias[words] += tile.sum(dim=0, dtype=torch.float32)
        return low
