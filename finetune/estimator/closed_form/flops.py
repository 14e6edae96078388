"""FLOPs and bytes of a step from a shape, and a GPU's time for them, in closed form.

Matmuls cost 2 FLOPs per weight and token: forward, again if checkpointing recomputes, the gradient
of the input, and that of the weight if it trains. TRL's head is multiplied once more in backward
instead of storing logits. Causal attention computes half of its table.

Time is FLOPs over the GPU's peak times the share that large GEMMs reach, plus bytes over the
bandwidth times the share that pointwise kernels reach. Bytes are those of saved activations, once
in each pass and once more; casts to FP8; weights, gradients and optimizer states.

Limits: no communication, launch gaps, partial waves or data loading, so small models and several
GPUs are slower than predicted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from finetune.estimator.closed_form.activations import TrainingMode
from finetune.estimator.closed_form.decoder import Decoder
from finetune.estimator.closed_form.static_memory import StaticMemory

if TYPE_CHECKING:
    from finetune.hardware.gpus import Gpu, Peak

BF16_REACHED, FP8_REACHED, ATTENTION_REACHED, BANDWIDTH_REACHED = 0.70, 0.67, 0.50, 0.85
"""Shares of a GPU's peaks reached by large GEMMs in either precision, by fused attention and by
pointwise kernels. From published speeds on Hopper; `finetune/assets/efficiency.yaml` has them by
GPU and shape.
"""
FUSED_CAST_BYTES, EAGER_CAST_BYTES = 3.0, 5.0
"""Bytes moved per element cast: read and written once, or read once more for its amax."""


@dataclass(frozen=True)
class StepWork:
    """Work of one GPU in a step.

    Attributes:
        linear, head, attention: FLOPs of one micro-batch by part.
        moved: bytes that pointwise kernels move in one micro-batch.
        optimized: bytes that the optimizer's step moves.
        low: precision of the decoder's linear layers.
    """

    linear: float
    head: float
    attention: float
    moved: float
    optimized: float
    low: Peak

    def seconds(self, gpu: Gpu, micro_batches: int = 1) -> float:
        """Time of one optimizer step of `micro_batches`.

        A precision without units on the GPU runs at its 16-bit speed.
        """
        high = gpu.tflops.get("bf16") or gpu.tflops["fp16"]
        low, reached = high, BF16_REACHED
        if self.low in gpu.tflops and self.low != "bf16":
            low, reached = gpu.tflops[self.low], FP8_REACHED
        matmuls = self.linear / (low * reached) + self.head / (high * BF16_REACHED)
        matmuls += self.attention / (high * ATTENTION_REACHED)
        pace = gpu.gb_s * 1e9 * BANDWIDTH_REACHED
        return micro_batches * (matmuls / 1e12 + self.moved / pace) + self.optimized / pace


def step_work(
    decoder: Decoder,
    mode: TrainingMode,
    static: StaticMemory,
    *,
    rows: int,
    length: int,
    forwards: int,
    kept: float,
    low: Peak,
) -> StepWork:
    """Compute the work of one GPU in a step.

    Args:
        static: weights, gradients and states of this GPU.
        rows, length: shape of a micro-batch.
        forwards: 2 if checkpointing recomputes the layers, else 1.
        kept: bytes that one layer saves for the micro-batch.
        low: precision of the decoder's linear layers.
    """
    tokens = rows * length
    linear = 2.0 * decoder.multiplied * (forwards + 1 + mode.full)
    linear += 2.0 * mode.added * (forwards + 2)
    head = 2.0 * decoder.vocabulary * decoder.hidden * (3 + mode.head)
    if decoder.family == "bdh":
        table = 2.0 * length * (decoder.inner + decoder.heads * decoder.hidden)
        attention = table * (forwards + 2)
    else:  # the backward of fused attention multiplies 5 times where its forward does twice
        attention = 2.0 * length * decoder.heads * decoder.head_dim * (forwards + 2.5)
    moved = (2 + forwards) * decoder.layers * kept
    if low != "bf16":
        moved += _cast_traffic(decoder, mode, tokens, forwards)
    return StepWork(
        linear=linear * tokens,
        head=head * tokens,
        attention=attention * decoder.layers * tokens,
        moved=moved,
        optimized=3 * static.gradients + 2 * static.optimizer,
        low=low,
    )


def _cast_traffic(decoder: Decoder, mode: TrainingMode, tokens: int, forwards: int) -> float:
    """Bytes that casting to FP8 moves in one micro-batch.

    An operand is read twice, for amax and codes, and written once: 5 bytes per element. For the
    wgrad and dgrad of a trainable weight its codes are also transposed, 2 more.
    """
    each, transposed = EAGER_CAST_BYTES, 2.0 if mode.full else 0.0
    inputs = sum(x.k for x in decoder.linears)
    gradients = sum(x.n for x in decoder.linears)
    numbers = tokens * (inputs * (each * forwards + transposed) + gradients * (each + transposed))
    if mode.full:
        numbers += sum(x.numel for x in decoder.linears) * (each * forwards + transposed)
    return numbers * decoder.layers
