"""FLOPs and bytes of a step, from a shape, and the time that a GPU takes for them: closed form.

Matmuls cost 2 FLOPs for each weight and token: forward, again where checkpointing recomputes, the
gradient of the input, and that of the weight where it trains. TRL's head is multiplied once more in
backward, in the place of logits kept. Causal attention does half of its table.

Time is FLOPs over the GPU's peak times the share of it that large GEMMs reach, and bytes over the
bandwidth times the share of it that pointwise kernels reach: what layers keep, once in each pass
and once more; casts to FP8; and weights, gradients and states of the optimizer.

Not in it: communication, launch gaps, waves that do not fill the GPU, data. So small models and
several GPUs are slower than this says.
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
"""Shares of a GPU's peaks that are reached: by large GEMMs in either precision, by fused attention
and by pointwise kernels. From published speeds on Hopper; `finetune/assets/efficiency.yaml` has
them by GPU and shape."""
FUSED_CAST_BYTES, EAGER_CAST_BYTES = 3.0, 5.0
"""Moved for each element that is cast: read and written once, or read once more for its amax."""


@dataclass(frozen=True)
class StepWork:
    """Work of one GPU in a step.

    Attributes:
        linear, head, attention: FLOPs of one micro-batch, by where.
        moved: bytes of one micro-batch that pointwise kernels move.
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

        A precision that the GPU has no units for takes the time of its 16 bits.
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
    """Work of one GPU in a step.

    Args:
        decoder: shape of the model.
        mode: what trains.
        static: weights, gradients and states of this GPU.
        rows, length: of a micro-batch.
        forwards: 2 where checkpointing recomputes the layers, else 1.
        kept: bytes that one layer keeps for the micro-batch.
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

    An operand is read twice, for its amax and for its codes, and written once: 5 bytes a number;
    for the weight gradient and dgrad of a weight that trains its codes are also transposed, 2 more.
    """
    each, transposed = EAGER_CAST_BYTES, 2.0 if mode.full else 0.0
    inputs = sum(x.k for x in decoder.linears)
    gradients = sum(x.n for x in decoder.linears)
    numbers = tokens * (inputs * (each * forwards + transposed) + gradients * (each + transposed))
    if mode.full:
        numbers += sum(x.numel for x in decoder.linears) * (each * forwards + transposed)
    return numbers * decoder.layers
