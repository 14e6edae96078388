"""The frozen output head in FP8, inside TRL's fused loss.

`SFTTrainer` (TRL 1.16) never calls the head's layer. It hands the layer's weight to
`ChunkedLogProbFunction`, which multiplies tiles of tokens by slabs of the vocabulary and keeps of
the logits only what the loss needs: the log-probability of each label, and two metrics. Where the
head is stored as FP8 codes, the function below takes its place during a call of the model. Tiles
and statistics are TRL's (its Triton kernels on a GPU), the products are the layer's own:

    fprop  z[M,S]  = x[M,K] · Wᵀ[K,S]      x cast once, per token; S words of the vocabulary
    dgrad  dx[M,K] = Σ_slabs g[M,S] · W[S,K]

fprop gives the bits of the layer: a scale belongs to a row of x or of W, and a slab has whole rows.
In dgrad g is cast per token *and slab*, so each slab has a scale of its own, where the layer has
one for all words; the slabs are summed in float32, as TRL does it. There is no wgrad: a head that
trains is refused (`finetune.training.preflight`).

Memory: logits, their gradient's codes and the transposed codes of a slab are of one tile; from
forward to backward are kept the codes of x, a byte a number. A slab is the outer loop of backward,
so that each is transposed once; a transposed copy of the whole weight is not kept.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from finetune.precision.backends.base import ObservedMixin, Observer, Owner, multiplying
from finetune.precision.gemm import compute_dtype
from finetune.precision.kernels import transpose_codes
from finetune.precision.weights import Arithmetic, cast, dequantizing, dgrad, fprop, multiply

TOKENS, WORDS = 4096, 16384
"""Largest tile of logits, 128 MiB in BF16: as many tokens as in TRL, and half of its words, a row
of which `cast_rows` keeps in registers.
"""


class HeadMixin(ObservedMixin):
    """Mixin of a converted output head whose weight TRL's loss may take without calling it."""

    keeps_name = False


def in_fused_loss(head: Any) -> contextlib.AbstractContextManager[None]:
    """Let TRL's fused loss multiply by this head as its layer would, in calls inside the block.

    Args:
        head: frozen output head, stored and multiplied in FP8, with `HeadMixin`.
    """
    return _replaced(partial(_Replacement, head))


def watched_in_fused_loss(
    name: str, shape: tuple[int, int], observer: Observer
) -> contextlib.AbstractContextManager[None]:
    """Report TRL's products by a head of shape (N, K) to an observer, in calls inside the block."""
    return _replaced(partial(_Watched, name, shape, observer))


@contextlib.contextmanager
def _replaced(replacement: Callable[[Any], Any]) -> Iterator[None]:
    """Replace TRL's function by one that is made of it."""
    # Not imported here: if nobody has imported it, nobody calls its loss.
    trl: Any = sys.modules.get("trl.trainer.utils")
    if trl is None:
        yield
        return
    plain = trl._ChunkedLogProbFunction
    trl._ChunkedLogProbFunction = replacement(plain)
    try:
        yield
    finally:
        trl._ChunkedLogProbFunction = plain


class _Watched(NamedTuple):
    """TRL's function, of which an observer learns which products are the head's."""

    name: str
    shape: tuple[int, int]
    observer: Observer
    plain: Any

    def apply(self, hidden: Tensor, weight: Tensor, *rest: Any) -> Any:
        if weight.shape != self.shape:
            return self.plain.apply(hidden, weight, *rest)
        with multiplying(Owner(self.name, [self.observer]), weight):
            results = self.plain.apply(hidden, weight, *rest)
        self.observer.watch(self.name, self.shape, results[0], (hidden, weight))
        return results


class _Replacement(NamedTuple):
    """TRL's function for weights other than that of `head`."""

    head: Any
    plain: Any

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
        outputs: tuple[str, ...] = (),
    ) -> Any:
        """Arguments and results of TRL's: hidden [M, K], weight [N, K], targets [M]."""
        head: Any = self.head
        # By kind: of a head under FSDP2, TRL gathers the codes itself.
        if weight.dtype is not torch.uint8 or weight.shape != head.weight.shape:
            rest = targets, temperature, chunk_size, softcap, logit_scale, outputs
            return self.plain.apply(hidden, weight, bias, *rest)
        # In a block of `convert.disabled` it is no FP8 layer; without labels nothing can be cast.
        low = issubclass(type(head), HeadMixin) and head.runs_low and hidden.numel() > 0
        how = head.fp8_how if low else dequantizing(head.stored_tile)
        if low:
            head.fp8_tally.count(hidden)
        settings = {
            "logit_scale": logit_scale,
            "softcap": softcap or 1.0,
            "inv_t": 1 / temperature,
            "HAS_SOFTCAP": softcap is not None,
        }
        results: Any = FusedHead.apply(
            hidden.to(compute_dtype(hidden)), bias, targets,
            weight.t() if head.transposed_weight else weight, head.weight_scale, how,
            Owner(head.fp8_name, head.fp8_observers), settings, outputs,
        )  # fmt: skip
        if not low and hidden.numel():
            head.fp8_tally.watch(hidden, results[0])
        return results


class _Product(NamedTuple):
    """The products of one slab of the head [S, K].

    Attributes:
        bits, inverse: its codes and inverse scales.
        bias: its part of the bias [S], or None.
        dtype: type of the logits.
    """

    bits: Tensor
    inverse: Tensor
    bias: Tensor | None
    how: Arithmetic
    owner: Owner
    dtype: torch.dtype

    def logits(self, x: tuple[Tensor, Tensor]) -> Tensor:
        """The tile z [M, S] of tokens x: [M, K] and inverse scales (none if fprop is high)."""
        with multiplying(self.owner, self.bits):
            if "fprop" in self.how.high:
                z = fprop(x[0], (None, None), self.bits, self.inverse, self.how)
            else:
                z = multiply(x, self.bits.t(), self.inverse.t(), self.how, self.dtype)
        return z if self.bias is None else z.add_(self.bias.to(z.dtype))

    def add_dgrad(self, g: Tensor, dx: Tensor) -> None:
        """Add g [M, S] · W [S, K] to dx [M, K], float32.

        The scales of W are folded into g, and those of g belong to the rows of the result. So the
        GEMM takes none, and gives float32: with scales by row it would round each slab to BF16.
        """
        with multiplying(self.owner, self.bits, backward=True):
            if "dgrad" in self.how.high:
                dx += dgrad(g, self.bits, self.inverse, self.how)
                return
            one = self.inverse.numel() == 1
            codes, scale = cast(g, self.how, None if one else self.inverse.t())
            # One scale per tensor, of 1: with scales by row, torch._scaled_mm gives BF16 only.
            whole, none = self.how._replace(per_row=False), scale.new_ones(())
            inverse = self.inverse if one else none
            y = multiply((codes, none), self.bits, inverse, whole, torch.float32)
        dx.addcmul_(y, scale)  # scale: [M, 1] or one number

    def transposed(self, g: Tensor) -> _Product:
        """The same with words innermost, as `torch._scaled_mm` contracts them."""
        if self.how.emulate or "dgrad" in self.how.high:
            return self
        # [K, S], contiguous; its view `copy.t()` is [S, K], column-major.
        copy = transpose_codes(self.bits, g) if self.how.own else self.bits.t().contiguous()
        return self._replace(bits=copy.t())


def _slabs(
    bits: Tensor, inverse: Tensor, bias: Tensor | None, *facts: Any
) -> Iterator[tuple[int, _Product]]:
    """First word and products of each slab."""
    for start in range(0, bits.shape[0], WORDS):
        words = slice(start, start + WORDS)
        own = inverse if inverse.numel() == 1 else inverse[words]
        yield start, _Product(bits[words], own, None if bias is None else bias[words], *facts)


def _tiles(count: int) -> Iterator[slice]:
    for start in range(0, count, TOKENS):
        yield slice(start, min(start + TOKENS, count))


def _tokens(x: Tensor, inverse: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
    return x[rows], inverse if inverse.numel() == 1 else inverse[rows]


class FusedHead(torch.autograd.Function):
    """Log-probabilities of labels without logits; see TRL's `ChunkedLogProbFunction`."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        bits: Tensor,
        inverse: Tensor,
        how: Arithmetic,
        owner: Owner,
        settings: dict[str, Any],
        outputs: tuple[str, ...],
    ) -> tuple[Tensor | None, ...]:
        """hidden [M, K], bits [N, K] -> five results [M], those not in `outputs` None."""
        from trl.kernels import chunked_logprob as trl

        ctx.set_materialize_grads(False)  # None, not zeros, tells which gradients the kernel needs
        ctx.facts = facts = how, owner, hidden.dtype
        ctx.settings, ctx.device = settings, hidden.device
        (count, _), (vocabulary, _) = hidden.shape, bits.shape
        high = "fprop" in how.high
        x, x_inverse = (hidden, inverse.new_ones(1)) if high else cast(hidden, how)
        flags = {f"HAS_{name.upper()}": name in outputs for name in trl.OPTIONAL_OUTPUTS}
        # In the order of TRL's kernel, which updates them in place from tile to tile.
        statistics = torch.zeros(7, count, dtype=torch.float32, device=hidden.device)
        # m = largest z, Σ e^(z - m), Σ z e^(z - m), Σ e^(2z - 2m), Σ z; then of the label.
        largest, total, x_total, squares, z_total, before, label = statistics
        largest.fill_(float("-inf"))
        before.fill_(float("-inf"))
        kernel: Any = trl._forward_kernel
        for start, slab in _slabs(bits, inverse, bias, *facts):
            for rows in _tiles(count):
                z = slab.logits(_tokens(x, x_inverse, rows))
                launched = trl._use_triton(z.device)
                fold: Any = kernel[(z.shape[0],)] if launched else trl._forward_tile
                fold(
                    z, z.stride(0), targets[rows], *statistics[:, rows], start, z.shape[1],
                    BLOCK_SIZE=trl._BLOCK_SIZE, **flags, **settings,
                )  # fmt: skip
                del z  # before the next one
        log_z = largest + total.log()  # log Σ exp(z)
        log_probs = label - log_z
        entropy = log_z - x_total / total if "entropy" in outputs else None
        spread = squares.log() - 2 * total.log() if "log_sum_sq_probs" in outputs else None
        mean = z_total / vocabulary if "mean_logits" in outputs else None
        # As `argmax`, which takes the first of equal ones: above all words before the label.
        first = (label >= largest) & (label > before) if "is_top1" in outputs else None
        saved = log_z if entropy is None else entropy  # any [M]: not read without its gradient
        ctx.save_for_backward(x, x_inverse, bias, targets, bits, inverse, log_z, saved)
        ctx.mark_non_differentiable(*(y for y in (spread, mean, first) if y is not None))
        return log_probs, entropy, spread, mean, first

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_probs: Tensor | None, g_entropy: Tensor | None, *_: Any):
        """Gradients [M] of log-probabilities and entropy -> gradient of hidden, and of the bias."""
        from trl.kernels import chunked_logprob as trl

        x, x_inverse, bias, targets, bits, inverse, log_z, entropy = ctx.saved_tensors
        dx = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        db = torch.zeros_like(bias, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        given = [None if g is None else g.float().contiguous() for g in (g_probs, g_entropy)]
        flags = {
            "HAS_LOGPROB_GRAD": g_probs is not None,
            "HAS_ENTROPY_GRAD": g_entropy is not None,
        }
        # In place of a gradient that is None any [M]: the flags keep it from being read.
        each = targets, log_z, entropy, *(log_z if g is None else g for g in given)
        kernel: Any = trl._backward_kernel
        for start, slab in _slabs(bits, inverse, bias, *ctx.facts):
            transposed = slab.transposed(dx)
            for rows in _tiles(x.shape[0]):
                z = slab.logits(_tokens(x, x_inverse, rows))
                launched = trl._use_triton(z.device)
                grid = z.shape[0], -(-z.shape[1] // trl._BLOCK_SIZE)
                fold: Any = kernel[grid] if launched else trl._backward_tile
                fold(  # the logits become their gradient
                    z, z.stride(0), *(value[rows] for value in each), start, z.shape[1],
                    BLOCK_SIZE=trl._BLOCK_SIZE, **flags, **ctx.settings,
                )  # fmt: skip
                transposed.add_dgrad(z, dx[rows])
                if db is not None:
                    db[start : start + WORDS] += z.sum(0, dtype=torch.float32)
                del z
        db = None if db is None else db.to(bias.dtype)
        # hidden, bias, then seven without gradients: targets to outputs.
        return dx.to(ctx.facts[-1]), db, *[None] * 7
