"""The output head inside TRL's fused loss: log-probabilities of labels without logits.

TRL's trainers (1.16) never call the head's layer. They hand its weight to `ChunkedLogProbFunction`,
whose place the function below takes during a call of a converted model. It multiplies tiles of
tokens by slabs of the vocabulary, and keeps of the logits z what losses need:

    log p[y] = z[y] - log Σ e^z        of the label y, and H = -Σ p log p, and metrics

*A head that does not train* needs two products a token. The gradient of log p[y] with respect to
the hidden state x is a vector times whatever gradient comes from above, so it is made while the
logits are there, slab by slab as in FlashAttention, and the backward pass multiplies each token's
by a number:

    d log p[y] / dx = (1 - p[y]) W[y] - Σ_{j≠y} p[j] W[j]
                    = (1 - p[y]) W[y] - 1/s Σ_slabs e^(m' - m) Σ_{j≠y} e^(z[j] - m') W[j]

m is the largest logit of a token, m' the largest so far, s = Σ e^(z - m). The label's word is added
at the end, in float32: its weight 1 - p[y] is small where a model is right, and would be a
difference of two rounded numbers. For all losses the same: of SFT, DPO, KTO, GRPO and others.

*A head that trains* needs four: its gradient is a sum over tokens, each with its factor, so logits
are made once more in backward. So are they for the gradient of H, which a bonus of GRPO asks for:
three products then, as a frozen head of TRL's takes.

In FP8 (a frozen head stored as codes) the products are the layer's own:

    fprop  z[M,S]  = x[M,K] · Wᵀ[K,S]      x cast once, per token; S words of the vocabulary
    dgrad  dx[M,K] = Σ_slabs g[M,S] · W[S,K]

fprop gives the bits of the layer: a scale belongs to a row of x or of W, and a slab has whole rows.
In dgrad g, here e^(z - m'), is cast per token *and slab*, so each slab has a scale of its own,
where the layer has one for all words; the slabs are summed in float32. There is no wgrad: a head
that trains is refused (`finetune.training.run.preflight`).

Memory: logits, their codes and the transposed codes of a slab are of one tile, the float32 sum of
one tile's tokens. From forward to backward a frozen head keeps the gradient, as large as x.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from finetune.precision.cases.case import Site, Swap
from finetune.precision.engines.base import Fp8Mixin
from finetune.precision.engines.observers import Owner, in_backward, multiplying
from finetune.precision.numbers import gemm
from finetune.precision.numbers.kernels import STATISTICS, LogitMap, grade_logits, observe_logits
from finetune.precision.numbers.weights import (
    Arithmetic,
    cast_operand,
    dequantize_weight,
    dequantizing,
    dgrad,
    fprop,
    multiply,
)

TOKENS, WORDS = 4096, 16384
"""Largest tile of logits, 128 MiB in BF16: as many tokens as in TRL, and half of its words, a row
of which kernels keep in registers.
"""
OUTPUTS = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
"""What the function gives besides log-probabilities, in order."""
_Operand = tuple[Tensor, Tensor | None]  # [M, C], and inverse scales of codes


@dataclass(eq=False)
class Head:
    """The output head of a converted model.

    Attributes:
        owner: its name and observers.
        stored: its layer, if that is stored and multiplied in FP8.
        has_bonus: True once a gradient of entropies has been asked for. Logits are made once more
            for it, so from then on nothing is gained by a gradient in forward.
    """

    owner: Owner
    stored: Any = None
    has_bonus: bool = False

    @contextlib.contextmanager
    def in_fused_loss(self) -> Iterator[None]:
        """Multiply by this head in TRL's fused loss, in calls inside the block."""
        # Not imported here: if nobody has imported it, nobody calls its loss.
        trl: Any = sys.modules.get("trl.kernels")
        if trl is None:
            yield
            return
        function = trl.ChunkedLogProbFunction
        before, function.apply = function.apply, self.apply
        try:
            yield
        finally:
            function.apply = before

    def apply(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk_size: int,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        outputs: tuple[str, ...] = OUTPUTS,
    ) -> tuple[Tensor | None, ...]:
        """Arguments and results of TRL's: hidden [M, K], weight [N, K], targets [M] -> five [M].

        Log-probabilities, and of `OUTPUTS` those that are in `outputs`, others None. Entropies have
        a gradient, the last three none.
        """
        x, low = hidden.to(gemm.compute_dtype(hidden)), False
        head: Any = self.stored
        # By kind: of a head under FSDP2, TRL gathers the codes itself.
        if weight.dtype is torch.uint8:
            # In a block of `convert.disabled` it is no FP8 layer; without labels nothing is cast.
            low = issubclass(type(head), Fp8Mixin) and head.runs_low and hidden.numel() > 0
            bits = weight.t() if head.transposed_weight else weight
            how = head.fp8_how if low else dequantizing(head.stored_tile)
            w: Any = _CodedMatrix(bits, head.weight_scale, bias, self.owner, x.dtype, how)
            if low:
                head.fp8_calls.count(hidden)
        else:
            w = _Matrix(weight, bias, self.owner, x.dtype)
        mapped = LogitMap(logit_scale, softcap, 1 / temperature)
        trains = any(p is not None and p.requires_grad for p in (weight, bias))
        learns = torch.is_grad_enabled() and (trains or x.requires_grad)
        early = learns and not trains and not self.has_bonus
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            operand = w.tokens(x)
            found = _observe(w, operand, targets, mapped, outputs, early=early)
        log_probs, entropy, log_z, gradient, *metrics = found
        given = hidden, weight, bias
        facts = self, w, operand, targets, log_z, mapped
        if gradient is not None:
            log_probs = _Early.apply(x, log_probs, gradient)
            if entropy is not None:
                _, entropy = _Late.apply(*given, None, entropy, *facts)
        elif learns:
            log_probs, entropy = _Late.apply(*given, log_probs, entropy, *facts)
        if weight.dtype is torch.uint8 and not low and hidden.numel():
            head.fp8_calls.watch(hidden, log_probs)
        return log_probs, entropy, *metrics


def _products(owner: Owner, w: Tensor) -> contextlib.AbstractContextManager[None]:
    """Report the GEMMs by a slab of the head in this block."""
    return multiplying(owner, w, backward=in_backward())


class _Matrix(NamedTuple):
    """Products by a head [S, K], or a slab of one, in the type of the logits."""

    w: Tensor
    bias: Tensor | None
    owner: Owner
    dtype: torch.dtype

    def slab(self, words: slice) -> _Matrix:
        bias = None if self.bias is None else self.bias[words]
        return self._replace(w=self.w[words].to(self.dtype), bias=bias)

    def tokens(self, x: Tensor) -> _Operand:
        """x [M, K] as an operand."""
        return x, None

    def logits(self, x: _Operand) -> Tensor:
        """x [M, K] · Wᵀ [K, S] -> z [M, S]."""
        with _products(self.owner, self.w):
            z = x[0] @ self.w.t()
        return z if self.bias is None else z.add_(self.bias.to(z.dtype))

    def observed(self, z: Tensor, *observing: Any) -> _Operand:
        """`observe_logits`, and the weights [M, S] that it leaves as an operand of `add_dgrad`."""
        observe_logits(z, *observing, weigh=True)
        return z, None

    def graded(self, g: Tensor) -> _Operand:
        """A gradient g [M, S] as such an operand."""
        return g, None

    def add_dgrad(self, g: _Operand, total: Tensor) -> None:
        """Add g [M, S] · W [S, K] to `total` [M, K], float32."""
        with _products(self.owner, self.w):
            gemm.add_mm(total, g[0], self.w)

    def rows(self, targets: Tensor) -> Tensor:
        """Words [M, K] of the labels."""
        return self.w[targets]


class _CodedMatrix(NamedTuple):
    """The same by FP8 codes [S, K] and their inverse scales."""

    bits: Tensor
    inverse: Tensor
    bias: Tensor | None
    owner: Owner
    dtype: torch.dtype
    how: Arithmetic

    def slab(self, words: slice) -> _CodedMatrix:
        bias = None if self.bias is None else self.bias[words]
        return self._replace(bits=self.bits[words], inverse=self._scales(words), bias=bias)

    def _scales(self, words: Any) -> Tensor:
        return self.inverse if self.inverse.numel() == 1 else self.inverse[words]

    def tokens(self, x: Tensor) -> _Operand:
        return (x, None) if "fprop" in self.how.high else cast_operand(x, self.how)

    def logits(self, x: _Operand) -> Tensor:
        with _products(self.owner, self.bits):
            if x[1] is None:
                z = fprop(x[0], (None, None), self.bits, self.inverse, self.how)
            else:
                inverse = self.inverse.t()
                z = multiply((x[0], x[1]), self.bits.t(), inverse, self.how, self.dtype)
        return z if self.bias is None else z.add_(self.bias.to(z.dtype))

    @property
    def _fold(self) -> Tensor | None:
        return None if self.inverse.numel() == 1 else self.inverse.t()

    def observed(self, z: Tensor, *observing: Any) -> _Operand:
        how = self.how
        own = how.own and how.per_row and not how.emulate and "dgrad" not in how.high
        casting = {"fold": self._fold, "pow2": how.pow2} if own else {}
        codes = observe_logits(z, *observing, weigh=True, **casting)
        return (codes[0], codes[1]) if codes else self.graded(z)

    def graded(self, g: Tensor) -> _Operand:
        return (g, None) if "dgrad" in self.how.high else cast_operand(g, self.how, self._fold)

    def add_dgrad(self, g: _Operand, total: Tensor) -> None:
        """The scales of W are folded into g, and those of g belong to the rows of the result.

        So the GEMM takes none, and gives float32: with scales by row it would round each slab to
        BF16.
        """
        with _products(self.owner, self.bits):
            if g[1] is None:
                total += dgrad(g[0], self.bits, self.inverse, self.how)
                return
            # One scale per tensor, of 1: with scales by row, torch._scaled_mm gives BF16 only.
            whole, none = self.how._replace(per_row=False), g[1].new_ones(())
            inverse = self.inverse if self.inverse.numel() == 1 else none
            y = multiply((g[0], none), self.bits, inverse, whole, torch.float32)
        total.addcmul_(y, g[1])  # [M, 1] or one number

    def rows(self, targets: Tensor) -> Tensor:
        inverse, tile = self._scales(targets), self.how.tile
        return dequantize_weight(self.bits[targets], inverse, tile, torch.float32)


def _slabs(w: Any, vocabulary: int) -> Iterator[tuple[int, Any]]:
    """First word and products of each slab."""
    for start in range(0, vocabulary, WORDS):
        yield start, w.slab(slice(start, start + WORDS))


def _tiles(x: _Operand) -> Iterator[tuple[slice, _Operand]]:
    """Tokens of each tile: which, and their operand."""
    for start in range(0, x[0].shape[0], TOKENS):
        rows = slice(start, min(start + TOKENS, x[0].shape[0]))
        whole = x[1] is None or x[1].numel() == 1
        yield rows, (x[0][rows], x[1] if whole or x[1] is None else x[1][rows])


def _observe(
    w: Any, x: _Operand, targets: Tensor, mapped: LogitMap, outputs: tuple[str, ...], *, early: bool
) -> tuple[Tensor | None, ...]:
    """Log-probabilities, entropies, log Σ e^z, gradient [M, K] if `early`, and three metrics."""
    count, vocabulary = targets.shape[0], w[0].shape[0]
    statistics = torch.zeros(STATISTICS, count, dtype=torch.float32, device=targets.device)
    largest, total, x_total, squares, z_total, before, label, shrunk = statistics
    largest.fill_(float("-inf"))
    before.fill_(float("-inf"))
    gradient = torch.empty_like(x[0], dtype=w.dtype) if early else None
    for rows, tokens in _tiles(x):
        part = torch.zeros_like(tokens[0], dtype=torch.float32) if early else None
        for start, slab in _slabs(w, vocabulary):
            z = slab.logits(tokens)
            observing = targets[rows], statistics[:, rows], start, mapped, outputs
            if part is None:
                observe_logits(z, *observing, weigh=False)
                continue
            g = slab.observed(z, *observing)
            del z  # before its product
            if start:
                part *= shrunk[rows, None]
            slab.add_dgrad(g, part)
        if part is not None and gradient is not None:
            derivative = torch.full_like(total[rows], mapped.scale * mapped.inv_t)
            part *= (-derivative / total[rows])[:, None]
            log_p = label[rows] - (largest[rows] + total[rows].log())
            if mapped.softcap is not None:
                derivative *= 1 - (label[rows] / (mapped.softcap * mapped.inv_t)) ** 2
            part.addcmul_(w.rows(targets[rows]), (-derivative * log_p.expm1())[:, None])
            gradient[rows] = part
    log_z = largest + total.log()  # log Σ e^z
    return (
        label - log_z,
        log_z - x_total / total if "entropy" in outputs else None,
        log_z,
        gradient,
        squares.log() - 2 * total.log() if "log_sum_sq_probs" in outputs else None,
        z_total / vocabulary if "mean_logits" in outputs else None,
        # As `argmax`, which takes the first of equal ones: above all words before the label.
        (label >= largest) & (label > before) if "is_top1" in outputs else None,
    )


class _Early(torch.autograd.Function):
    """Log-probabilities [M] whose gradient [M, K] has been made with them."""

    @staticmethod
    def forward(ctx: Any, _x: Tensor, log_probs: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return log_probs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor):
        (gradient,) = ctx.saved_tensors
        # One kernel, without a float32 copy: numbers are multiplied as float32 and rounded once.
        return torch.mul(gradient, g[:, None], out=torch.empty_like(gradient)), None, None


class _Late(torch.autograd.Function):
    """Log-probabilities and entropies [M], one of them or both, whose logits are made once more.

    A node of its own for the entropies of a frozen head: where they are only logged, it is gone
    before the backward pass, and what it keeps with it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        _weight: Tensor,
        bias: Tensor | None,
        log_probs: Tensor | None,
        entropy: Tensor | None,
        head: Head,
        w: Any,
        x: _Operand,
        targets: Tensor,
        log_z: Tensor,
        mapped: LogitMap,
    ) -> tuple[Tensor | None, Tensor | None]:
        ctx.set_materialize_grads(False)  # None tells which gradients are needed
        ctx.save_for_backward(w[0], bias, *x, targets, log_z, entropy)
        ctx.facts = head, w._replace(**{w._fields[0]: None, "bias": None}), mapped, hidden.dtype
        return log_probs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_probs: Tensor | None, g_entropy: Tensor | None):
        """Gradients [M] of log-probabilities and entropies -> of hidden, weight and bias."""
        matrix, bias, *x, targets, log_z, entropy = ctx.saved_tensors
        head, w, mapped, dtype = ctx.facts
        head.has_bonus |= g_entropy is not None
        w = w._replace(**{w._fields[0]: matrix, "bias": bias})
        of_x, of_w, of_b = ctx.needs_input_grad[:3]
        wide: dict[str, Any] = {"dtype": torch.float32, "device": x[0].device}
        dx = torch.empty(x[0].shape, dtype=dtype, device=x[0].device) if of_x else None
        dw = torch.zeros(matrix.shape, **wide) if of_w else None
        db = torch.zeros(bias.shape, **wide) if of_b else None
        above = [None if g is None else g.float().contiguous() for g in (g_probs, g_entropy)]
        with torch.autocast(x[0].device.type, enabled=False):
            for rows, tokens in _tiles((x[0], x[1])):
                part = torch.zeros(tokens[0].shape, **wide) if of_x else None
                each = [None if t is None else t[rows] for t in (log_z, entropy, *above)]
                for start, slab in _slabs(w, matrix.shape[0]):
                    words = slice(start, start + WORDS)
                    z = slab.logits(tokens)
                    grade_logits(z, targets[rows], *each, start, mapped)  # pyright: ignore
                    if part is not None:
                        slab.add_dgrad(slab.graded(z), part)
                    if dw is not None:
                        with _products(w.owner, slab.w):
                            gemm.add_mm(dw[words], z.t(), tokens[0])
                    if db is not None:
                        db[words] += z.sum(0, dtype=torch.float32)
                if dx is not None and part is not None:
                    dx[rows] = part
        dw = None if dw is None else dw.to(matrix.dtype)
        db = None if db is None else db.to(bias.dtype)
        # hidden, weight, bias, then eight without gradients: log_probs to mapped.
        return dx, dw, db, *[None] * 8


def fused_head(site: Site) -> Iterator[Swap]:
    """The planned head, in calls of the model: no class changes for TRL's fused loss."""
    for layer in site.plan.layers:
        if layer.role == "head":
            stored = site.modules[layer.name] if layer.stored else None
            site.head = Head(Owner(layer.name, site.observers), stored)
            break
    return iter(())
