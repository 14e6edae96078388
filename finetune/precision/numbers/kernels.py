"""Operators of torch around GEMMs: casts and transposes of FP8 operands, sums over logits.

    cast_rows(x, fold, pow2)     [M, K] -> E4M3 codes [M, K], inverse scales [M, 1]
    transpose_codes(codes, g)    [N, K] -> [K, N], contiguous
    observe_logits(z, ...)       [M, S] -> into statistics of M tokens, and z into weights or codes
    grade_logits(z, ...)         [M, S] -> their gradient, in place
    cast_whole(x, ...)           [R, C] -> codes [R, C], transposed ones [C, R], one scale
    swiglu_cast, swiglu_backward_cast    the same of silu(gate) · up, and of its gradients

Written in ATen, the same is a chain of pointwise kernels that `torch.compile` has to fuse. Inductor
fuses it into the producer of x, but as often as there are readers: q, k and v get a buffer of codes
each. An operator is opaque to the compiler, so equal calls in a graph become one, its result is
stored once, and without a compiler it is one kernel, too. Dispatch modes (the proof's witness, the
estimator's trace) see it by name.

Implementations: CUDA launches kernels of our own (`triton_kernels`, imported at the first launch:
Triton comes with CUDA builds of torch); any other device runs the reference, from which casts and
transposes differ in no bit, and sums over the vocabulary in their order; fake and meta tensors get
shapes. The setting `precision.kernels` chooses (`finetune.hardware.requirements`), and
`finetune.precision.numbers.weights` calls. Logits have no other way
(`finetune.precision.cases.head`).
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from finetune.precision.numbers.formats import E4M3, E5M2, Format, amax, scale_from_amax
from finetune.precision.numbers.scaling import cast_current, scaled

_library = torch.library.Library("finetune", "FRAGMENT")
_library.define("cast_rows(Tensor x, Tensor? fold, bool pow2) -> (Tensor, Tensor)")
_library.define("transpose_codes(Tensor codes, Tensor? after) -> Tensor")
_MAP = "float scale, float? softcap, float inv_t"
_library.define(
    "observe_logits(Tensor(a!) z, Tensor targets, Tensor(b!) statistics, int start, "
    f"{_MAP}, str[] outputs, bool weigh, Tensor? fold, bool? pow2) -> Tensor[]"
)
_library.define(
    "grade_logits(Tensor(a!) z, Tensor targets, Tensor log_z, Tensor? entropy, Tensor? g_probs, "
    f"Tensor? g_entropy, int start, {_MAP}) -> ()"
)


def cast_rows(
    x: Tensor, fold: Tensor | None = None, *, pow2: bool = False
) -> tuple[Tensor, Tensor]:
    """Cast a matrix to E4M3 under the current amax of each row.

    Args:
        x: floating type, [M, K].
        fold: float32 factors of the columns, [1, K], multiplied in first: for dgrad the scales of
            the weight, which lie along the dimension that it contracts.
        pow2: round scales down to powers of two.

    Returns:
        Codes, `float8_e4m3fn` [M, K]; inverse scales, float32 [M, 1]. The bits are those of
        `cast_current(x.float() * fold, E4M3, 1, pow2=pow2, packed=True)`.
    """
    return torch.ops.finetune.cast_rows(x, fold, pow2)


def transpose_codes(codes: Tensor, after: Tensor | None = None) -> Tensor:
    """Transpose a matrix of one-byte numbers into a contiguous one: [N, K] -> [K, N].

    cuBLASLt multiplies FP8 only with the contracted dimension innermost in both operands, and
    codes of a weight serve two GEMMs, which contract K and N.

    Args:
        after: any tensor that has to be there first, not read. Of a weight alone, AOTAutograd would
            transpose in forward and keep the result for backward: a second copy of each weight.
    """
    return torch.ops.finetune.transpose_codes(codes, after)


class LogitMap(NamedTuple):
    """What a model does to its logits y before the softmax: `cap · tanh(y · scale / cap) · inv_t`.

    Attributes:
        scale: a factor (Cohere's `logit_scale`).
        softcap: the cap, None without one (Gemma 2).
        inv_t: one over the temperature.
    """

    scale: float = 1.0
    softcap: float | None = None
    inv_t: float = 1.0


STATISTICS = 8
"""Rows of `statistics`, of each token, in order: the largest logit m; Σ e^(z - m); Σ z e^(z - m);
Σ e^(2z - 2m); Σ z; the largest logit before the label's; the label's; and the factor by which the
last slab, through m, has shrunk what was added up. First and sixth begin at -inf, others at 0.
"""


def observe_logits(
    z: Tensor,
    targets: Tensor,
    statistics: Tensor,
    start: int,
    mapped: LogitMap,
    outputs: Collection[str],
    *,
    weigh: bool,
    fold: Tensor | None = None,
    pow2: bool | None = None,
) -> list[Tensor]:
    """Update the statistics of tokens by a slab of their logits; weigh the slab for the gradient.

    Args:
        z: logits [M, S] of the words from `start` on, of the type of their GEMM; used up.
        targets: labels [M], int64.
        statistics: [STATISTICS, M], float32.
        outputs: what is wanted of `entropy`, `log_sum_sq_probs`, `mean_logits`, `is_top1`; rows for
            others stay.
        weigh: let each logit become e^(z - m), times 1 - tanh² under a cap, and a label's 0.
        fold, pow2: with a `pow2`, True or False, such weights are not stored, but cast as by
            `cast_rows`.

    Returns:
        Codes and inverse scales with `pow2`, else nothing.
    """
    return torch.ops.finetune.observe_logits(
        z, targets, statistics, start, *mapped, list(outputs), weigh, fold, pow2
    )


def grade_logits(
    z: Tensor,
    targets: Tensor,
    log_z: Tensor,
    entropy: Tensor | None,
    g_probs: Tensor | None,
    g_entropy: Tensor | None,
    start: int,
    mapped: LogitMap,
) -> None:
    """Replace a slab of logits [M, S] by the gradient of the loss with respect to it.

    With p = e^(z - log Σ e^z) it is g_probs · (1[label] - p) - g_entropy · p (log p + H), and the
    derivative of the map.

    Args:
        log_z, entropy: log Σ e^z and H of each token [M], float32; H is for `g_entropy`.
        g_probs, g_entropy: gradients of log-probabilities and entropies [M], float32, or None.
    """
    torch.ops.finetune.grade_logits(z, targets, log_z, entropy, g_probs, g_entropy, start, *mapped)


def _cast_rows(x: Tensor, fold: Tensor | None, pow2: bool) -> tuple[Tensor, Tensor]:
    wide = x if fold is None else x.float() * fold
    # Contiguous, as the shapes for fake tensors (`_empty_rows`) promise it to the compiler.
    return cast_current(wide.contiguous(), E4M3, 1, pow2=pow2, packed=True)


def _empty_rows(x: Tensor, fold: Tensor | None, pow2: bool) -> tuple[Tensor, Tensor]:
    codes = x.new_empty(x.shape, dtype=E4M3.dtype)
    return codes, x.new_empty((x.shape[0], 1), dtype=torch.float32)


def _transpose(codes: Tensor, after: Tensor | None) -> Tensor:
    # Not `contiguous()`: for N = 1 it is a view, and an operator must not return one of its input.
    return codes.t().clone(memory_format=torch.contiguous_format)


def _empty_transpose(codes: Tensor, after: Tensor | None) -> Tensor:
    return codes.new_empty(codes.shape[::-1])


def _map(z: Tensor, scale: float, softcap: float | None, inv_t: float) -> tuple[Tensor, Any]:
    """Mapped logits, float32, and tanh of the capped ones (None without a cap)."""
    y, t = z.float() * scale, None
    if softcap is not None:
        t = torch.tanh(y / softcap)
        y = softcap * t
    return y * inv_t, t


def _labels(targets: Tensor, start: int, words: int) -> Tensor:
    """True where a word of the slab is the label of the token: [M, S]."""
    return torch.arange(start, start + words, device=targets.device) == targets[:, None]


def _observe_logits(
    z: Tensor, targets: Tensor, statistics: Tensor, start: int, scale: float,
    softcap: float | None, inv_t: float, outputs: list[str], weigh: bool,
    fold: Tensor | None, pow2: bool | None,
) -> list[Tensor]:  # fmt: skip
    y, t = _map(z, scale, softcap, inv_t)
    largest, total, x_total, squares, z_total, before, label, shrunk = statistics
    words, local = z.shape[1], targets - start
    if "mean_logits" in outputs:
        z_total += y.sum(-1)
    if "is_top1" in outputs:
        earlier = torch.arange(words, device=z.device) < local[:, None]
        before.copy_(torch.maximum(before, y.masked_fill(~earlier, float("-inf")).amax(-1)))
    now = torch.maximum(largest, y.amax(-1))
    shrunk.copy_(torch.exp(largest - now))
    e = torch.exp(y - now[:, None])
    total.mul_(shrunk).add_(e.sum(-1))
    if "entropy" in outputs:
        x_total.mul_(shrunk).add_((e * y).sum(-1))
    if "log_sum_sq_probs" in outputs:
        squares.mul_(shrunk * shrunk).add_((e * e).sum(-1))
    largest.copy_(now)
    of_label = y.gather(-1, local.clamp(0, words - 1)[:, None])[:, 0]
    label.copy_(torch.where((local >= 0) & (local < words), of_label, label))
    if weigh:
        e = e if t is None else e * (1 - t * t)
        z.copy_(e.masked_fill_(_labels(targets, start, words), 0.0))
    return [] if pow2 is None else [*_cast_rows(z, fold, pow2)]


def _empty_logits(z: Tensor, *rest: Any) -> list[Tensor]:
    return [] if rest[-1] is None else [*_empty_rows(z, None, False)]


def _grade_logits(
    z: Tensor, targets: Tensor, log_z: Tensor, entropy: Tensor | None, g_probs: Tensor | None,
    g_entropy: Tensor | None, start: int, scale: float, softcap: float | None, inv_t: float,
) -> None:  # fmt: skip
    y, t = _map(z, scale, softcap, inv_t)
    log_p = y - log_z[:, None]
    p = torch.exp(log_p)
    g = torch.zeros_like(y)
    if g_probs is not None:
        g += g_probs[:, None] * (_labels(targets, start, z.shape[1]).float() - p)
    if g_entropy is not None:
        assert entropy is not None
        g -= g_entropy[:, None] * p * (log_p + entropy[:, None])
    g = g * inv_t
    z.copy_((g if t is None else g * (1 - t * t)) * scale)


# One scale a tensor needs the amax of the whole, so it takes two readings: three bytes of five, to
# cast a 16-bit operand, or five of seven into both orders. But a scale that is a power of two is
# nearly always that of the step before. So the operand is cast under that one, in the pass that
# finds the amax, and again only if the scale has turned out to be another. *No result depends on
# the guess*, only time does: operators are functions of their operands, also in checkpoints, where
# they run again, and kernels keep their guesses without anybody's knowledge.

FORMATS = {fmt.dtype: fmt for fmt in (E4M3, E5M2)}
_library.define(
    "cast_whole(Tensor x, Tensor guesses, int column, ScalarType dtype, bool pow2, bool plain, "
    "bool turned) -> (Tensor, Tensor, Tensor, Tensor)"
)
_library.define(
    "swiglu_cast(Tensor gate, Tensor up, Tensor guesses, int column, ScalarType dtype, bool pow2) "
    "-> (Tensor, Tensor, Tensor)"
)
_library.define(
    "swiglu_backward_cast(Tensor dy, Tensor gate, Tensor up, Tensor scale, Tensor gate_guesses, "
    "Tensor up_guesses, int column, ScalarType act_dtype, ScalarType dtype, bool pow2) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)


class Whole(NamedTuple):
    """A matrix [R, C] under one scale: codes / scale, and the transposed codes.

    Attributes:
        codes: [R, C], empty if not asked for.
        turned: [C, R], contiguous, empty if not asked for.
        scale, inverse: float32 scalars.
    """

    codes: Tensor
    turned: Tensor
    scale: Tensor
    inverse: Tensor


def cast_whole(
    x: Tensor, guesses: Tensor, column: int, fmt: Format, *, pow2: bool,
    plain: bool = True, turned: bool = False,
) -> Whole:  # fmt: skip
    """Cast a matrix under one scale from its current amax.

    Args:
        x: floating type, [R, C].
        guesses: float32 numbers of a layer, that in `column` being the last scale of this operand.
        pow2: round the scale down to a power of two, which can be guessed.
        plain, turned: which codes are wanted.

    Returns:
        The bits of `cast_current(x, fmt, None, pow2=pow2, packed=True)`.
    """
    op = torch.ops.finetune.cast_whole
    return Whole(*op(x, guesses, column, fmt.dtype, pow2, plain, turned))


def _cast_whole(
    x: Tensor, guesses: Tensor, column: int, dtype: torch.dtype, pow2: bool,
    plain: bool, turned: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    scale = scale_from_amax(amax(x), FORMATS[dtype], pow2=pow2)
    codes = scaled(x.contiguous(), scale).to(dtype)
    none = codes.new_empty(0)
    back = _transpose(codes, None) if turned else none
    return codes if plain else none.clone(), back, scale, scale.reciprocal()


def empty_whole(
    x: Tensor, guesses: Tensor, column: int, dtype: torch.dtype, pow2: bool,
    plain: bool, turned: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Results of `cast_whole` without content."""
    codes = x.new_empty(x.shape if plain else 0, dtype=dtype)
    back = x.new_empty(x.shape[::-1] if turned else 0, dtype=dtype)
    return codes, back, *_empty_scales(x)


def _empty_scales(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty((), dtype=torch.float32), x.new_empty((), dtype=torch.float32)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up, each product rounded to the type of `gate`, as of activations in PyTorch."""
    return _silu(gate) * up


def _silu(gate: Tensor) -> Tensor:
    wide = gate.float()
    return (wide / ((-wide).exp() + 1.0)).to(gate.dtype)


def swiglu_backward(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of gate and up from `swiglu`'s, rounded as autograd and Inductor do."""
    wide = gate.float()
    half = 1.0 / ((-wide).exp() + 1.0)
    of_gate = (dy * up).float() * half * (wide * (1.0 - half) + 1.0)
    return of_gate.to(gate.dtype), dy * _silu(gate)


def swiglu_cast(
    gate: Tensor, up: Tensor, guesses: Tensor, column: int, fmt: Format, *, pow2: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [M, F] of `swiglu(gate, up)`, scale and inverse scale, as of `cast_whole`."""
    return torch.ops.finetune.swiglu_cast(gate, up, guesses, column, fmt.dtype, pow2)


def _swiglu_cast(
    gate: Tensor, up: Tensor, guesses: Tensor, column: int, dtype: torch.dtype, pow2: bool
) -> tuple[Tensor, ...]:
    codes, _, *scales = _cast_whole(swiglu(gate, up), guesses, column, dtype, pow2, True, False)
    return codes, *scales


def empty_swiglu(
    gate: Tensor, up: Tensor, guesses: Tensor, column: int, dtype: torch.dtype, pow2: bool
) -> tuple[Tensor, ...]:
    """Results of `swiglu_cast` without content."""
    return gate.new_empty(gate.shape, dtype=dtype), *_empty_scales(gate)


def swiglu_backward_cast(
    dy: Tensor, gate: Tensor, up: Tensor, scale: Tensor, guesses: tuple[Tensor, Tensor],
    column: int, act: Format, fmt: Format, *, pow2: bool,
) -> tuple[Tensor, Whole, Whole]:  # fmt: skip
    """Casts of the backward of `swiglu`: all that it reads is [M, F], and read once.

    Args:
        scale: of the product in forward (`swiglu_cast`).
        guesses: last scales of the layers of gate and up.
        act, fmt: formats of the product and of gradients.

    Returns:
        Transposed codes of the product, [F, M], for the weight gradient of what it is multiplied
        by; gradients of gate and up, in both orders.
    """
    op = torch.ops.finetune.swiglu_backward_cast
    act_t, *rest = op(dy, gate, up, scale, *guesses, column, act.dtype, fmt.dtype, pow2)
    return act_t, Whole(*rest[:2], *rest[4:6]), Whole(*rest[2:4], *rest[6:])


def _swiglu_backward_cast(
    dy: Tensor, gate: Tensor, up: Tensor, scale: Tensor, gate_guesses: Tensor,
    up_guesses: Tensor, column: int, act_dtype: torch.dtype, dtype: torch.dtype, pow2: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    act_t = _transpose(scaled(swiglu(gate, up), scale).to(act_dtype), None)
    gradients = zip(swiglu_backward(dy, gate, up), (gate_guesses, up_guesses), strict=True)
    of_gate, of_up = (
        _cast_whole(g, guesses, column, dtype, pow2, True, True) for g, guesses in gradients
    )
    return act_t, *of_gate[:2], *of_up[:2], *of_gate[2:], *of_up[2:]


def empty_swiglu_backward(
    dy: Tensor, gate: Tensor, up: Tensor, scale: Tensor, gate_guesses: Tensor,
    up_guesses: Tensor, column: int, act_dtype: torch.dtype, dtype: torch.dtype, pow2: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Results of `swiglu_backward_cast` without content."""
    both = dy.shape, dy.shape[::-1]
    gradients = [dy.new_empty(shape, dtype=dtype) for shape in (*both, *both)]
    act_t = dy.new_empty(both[1], dtype=act_dtype)
    return act_t, *gradients, *_empty_scales(dy), *_empty_scales(dy)


can_launch = True
"""False where Triton has no launcher, as in slim containers; `convert.apply` sets it."""


def _launch(name: str, reference: Any, *args: Any) -> Any:
    if not can_launch:
        return reference(*args)
    from finetune.precision.numbers import triton_kernels

    return getattr(triton_kernels, name)(*args)


for _name, _reference, _empty in (
    ("cast_rows", _cast_rows, _empty_rows),
    ("transpose_codes", _transpose, _empty_transpose),
    ("observe_logits", _observe_logits, _empty_logits),
    ("grade_logits", _grade_logits, lambda *_: None),
    ("cast_whole", _cast_whole, empty_whole),
    ("swiglu_cast", _swiglu_cast, empty_swiglu),
    ("swiglu_backward_cast", _swiglu_backward_cast, empty_swiglu_backward),
):
    _library.impl(_name, _reference, "CompositeExplicitAutograd")  # any device not named below
    _library.impl(_name, partial(_launch, _name, _reference), "CUDA")
    _library.impl(_name, _empty, "Meta")
