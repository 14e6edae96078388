"""Activations that one decoder layer saves for its backward, in bytes per token.

An operator saves what its derivative needs, under autocast in its compute dtype:

    norm        its input in float32; if its weight trains, also the normalized input
    linear      its input, if its weight or an adapter trains; siblings that read one tensor
                (q, k, v; gate, up) share it, unless each casts a float32 stream for itself
    attention   q, k and v as they enter it, and with fused kernels its output and a float32 per
                head; `eager` saves the table of weights twice instead
    gated MLP   gate, act(gate) and up, whatever trains
    rotary      nothing of its own (cosines are shared by all layers)

Adapters save their input likewise (fused with their base: once for all siblings, as FP8 codes if
the base computes in FP8; unfused: a BF16 copy each, and a mask with dropout), and r numbers each.
With checkpointing a layer saves its input only, and all this while it is at work.

Derived from the layers of Transformers 5 and checked against live tensors
(`tests/estimator/test_preview.py`). Not included: padding masks, engines that save their own codes
(Transformer Engine: about half of what linears save), and savings by a compiler.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from finetune.estimator.closed_form.decoder import Decoder, Linear

HALF, FLOAT, CODE = 2.0, 4.0, 1.0
"""Bytes per element in BF16 (FP16), in float32 and in FP8."""


@dataclass(frozen=True)
class TrainingMode:
    """Training settings that decide which activations are saved.

    Attributes:
        full: all weights train.
        adapted: paths of the linear layers with an adapter.
        added: elements of adapters and of trainable copies of frozen weights.
        stream: bytes per element of the residual stream: that of the model's dtype.
        fused: adapters run in one function with their base.
        codes: adapters save FP8 codes of their input.
        dropout: adapters draw a mask.
        expanded: keys and values are repeated for all query heads before attention.
        eager: attention consists of separate operators.
        compute: bytes per element in matmuls.
    """

    full: bool
    adapted: frozenset[str] = frozenset()
    rank: int = 0
    added: int = 0
    head: bool = False
    stream: float = HALF
    fused: bool = True
    codes: bool = False
    dropout: bool = False
    expanded: bool = False
    eager: bool = False
    compute: float = HALF


def layer_bytes(decoder: Decoder, mode: TrainingMode, length: int) -> float:
    """Bytes that one layer saves per token; `length` in tokens matters to eager attention only."""
    family = {"bdh": _bdh, "gpt2": _gpt2}.get(decoder.family, _llama_like)
    return family(decoder, mode, length)


def _llama_like(decoder: Decoder, mode: TrainingMode, length: int) -> float:
    d, i = decoder.hidden, decoder.inner
    norms = 0.0
    for n, times in _norms(decoder):
        # Gemma multiplies in float32 by 1 + weight, others in the stream's dtype.
        gemma = decoder.family.startswith("gemma")
        weighted = FLOAT if gemma else mode.stream
        norms += times * (FLOAT * (3 if gemma else 1) + n * (FLOAT + weighted * mode.full))
    attention = _attention(decoder, mode, length)
    if decoder.experts:
        # Per expert: gate and up, act(gate), the result to be weighted; if it trains, its input
        # and the product. Besides, the router's input.
        of_each = 3 * i + d + (i + d) * mode.full
        inner = (decoder.active * of_each + d) * mode.compute + 8 * decoder.experts
    else:
        inner = 3 * i * mode.compute
    return norms + attention + inner + _inputs(decoder, mode)


def _norms(decoder: Decoder) -> list[tuple[int, int]]:
    """(elements under one norm, number of such norms) for each norm of a layer."""
    of_stream = sum(length == decoder.hidden for length in decoder.vectors)
    norms = [(decoder.hidden, of_stream)]
    if len(decoder.vectors) > of_stream:  # of queries and keys
        norms.append((decoder.head_dim, decoder.heads + decoder.kv_heads))
    return norms


def _attention(decoder: Decoder, mode: TrainingMode, length: int) -> float:
    q, kv = decoder.heads * decoder.head_dim, decoder.kv_heads * decoder.head_dim
    entering = (q + 2 * (q if mode.expanded or mode.eager else kv)) * mode.compute
    if not mode.eager:
        return entering + q * mode.compute + FLOAT * decoder.heads
    capped = mode.compute if decoder.family == "gemma2" else 0.0
    return entering + decoder.heads * length * (FLOAT + mode.compute + capped)


def _gpt2(decoder: Decoder, mode: TrainingMode, length: int) -> float:
    d, i = decoder.hidden, decoder.inner
    norms = 2 * (d + 2) * FLOAT
    attention = _attention(decoder, mode, length)
    # gelu_new consists of separate operators: x, x³ and tanh in float32, as autocast runs `pow`.
    inner = i * (3 * FLOAT + mode.compute)
    return norms + attention + inner + decoder.dropouts * d + _inputs(decoder, mode)


def _bdh(decoder: Decoder, mode: TrainingMode, length: int) -> float:
    d, n, heads = decoder.hidden, decoder.inner, decoder.heads
    neurons = 4 * n * mode.compute  # active, turned, excited, both
    scores = heads * length * mode.compute
    read = heads * d * (FLOAT + 2 * mode.compute)  # also the stream, repeated for each head
    norms = 2 * d * FLOAT
    return neurons + scores + read + norms + d * mode.compute + decoder.dropouts * n


# -------------------------------------------------------------------------- inputs of linear layers


def _inputs(decoder: Decoder, mode: TrainingMode) -> float:
    """Inputs saved for trainable weights or adapters."""
    siblings: dict[str, list[Linear]] = defaultdict(list)
    for linear in decoder.linears:
        siblings[_reads(linear)].append(linear)
    return sum(_shared_input(source, linears, mode) for source, linears in siblings.items())


def _reads(linear: Linear) -> str:
    if linear.name in ("q_proj", "k_proj", "v_proj", "c_attn"):
        return "first norm"
    if linear.name in ("gate_proj", "up_proj", "c_fc"):
        return "second norm"
    return "attention" if "attn" in linear.path else "product"


def _shared_input(source: str, linears: list[Linear], mode: TrainingMode) -> float:
    k = linears[0].k
    float_input = source.endswith("norm") and mode.stream > mode.compute
    once = 0.0 if source == "attention" and not mode.eager else k * mode.compute
    if mode.full:
        return len(linears) * k * mode.compute if float_input else once
    adapters = sum(linear.path in mode.adapted for linear in linears)
    if not adapters:
        return 0.0
    own = adapters * mode.rank * mode.compute
    if mode.codes:
        return own + k * CODE + FLOAT
    if mode.fused:
        return own + (adapters * k * mode.compute if float_input else once)
    return own + adapters * k * (mode.compute + CODE * mode.dropout)
