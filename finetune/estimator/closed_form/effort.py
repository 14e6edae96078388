"""How much a step computes and moves, from a shape, and how long a GPU takes for it: closed form.

Matmuls cost 2 FLOPs for each weight and token: forward, again where checkpointing recomputes, the
gradient of the input, and that of the weight where it trains. TRL's head is multiplied once more in
backward, in the place of logits kept. Causal attention does half of its table.

Time is that work over the GPU's peak times what large GEMMs reach of it (0.70 in BF16, 0.67 in
FP8), attention at half of peak, and what moves beside over 0.85 of the bandwidth: what layers keep,
once in each pass and once more; casts to FP8; and weights, gradients and states of the optimizer.

Not in it: communication, launch gaps, waves that do not fill the GPU, data. So small models and
several GPUs are slower than this says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from finetune.estimator.closed_form.activations import Trained
from finetune.estimator.closed_form.decoder import Decoder
from finetune.estimator.closed_form.static_memory import Held

if TYPE_CHECKING:
    from finetune.hardware.gpus import Gpu, Peak

BF16_REACHED, FP8_REACHED, ATTENTION_REACHED, BANDWIDTH_REACHED = 0.70, 0.67, 0.50, 0.85


@dataclass(frozen=True)
class Effort:
    """Of one GPU.

    Attributes:
        linear, head, attention: FLOPs of one micro-step, by where.
        moved: bytes of one micro-step, beside the matmuls' own.
        optimized: bytes that the optimizer's step moves.
        low: precision of the decoder's linear layers.
    """

    linear: float
    head: float
    attention: float
    moved: float
    optimized: float
    low: Peak

    def seconds(self, gpu: Gpu, micro_steps: int = 1) -> float:
        """Time of one optimizer step of `micro_steps` micro-steps.

        What the GPU has no units for takes the time of its 16 bits.
        """
        high = gpu.tflops.get("bf16") or gpu.tflops["fp16"]
        low, reached = high, BF16_REACHED
        if self.low in gpu.tflops and self.low != "bf16":
            low, reached = gpu.tflops[self.low], FP8_REACHED
        matmuls = self.linear / (low * reached) + self.head / (high * BF16_REACHED)
        matmuls += self.attention / (high * ATTENTION_REACHED)
        pace = gpu.gb_s * 1e9 * BANDWIDTH_REACHED
        return micro_steps * (matmuls / 1e12 + self.moved / pace) + self.optimized / pace


def effort(
    decoder: Decoder,
    how: Trained,
    holds: Held,
    *,
    rows: int,
    length: int,
    forwards: int,
    kept: float,
    low: Peak,
) -> Effort:
    """What one GPU does in a step.

    Args:
        decoder: shape of the model.
        how: what trains.
        holds: what is held.
        rows, length: of a micro-batch.
        forwards: 2 where checkpointing recomputes the layers, else 1.
        kept: bytes that one layer keeps for the micro-batch.
        low: precision of the decoder's linear layers.
    """
    tokens = rows * length
    linear = 2.0 * decoder.multiplied * (forwards + 1 + how.full)
    linear += 2.0 * holds.added * (forwards + 2)
    head_trains = how.full or any(t.weight.kind == "head" for t in holds.trained)
    head = 2.0 * decoder.vocabulary * decoder.hidden * (3 + head_trains)
    if decoder.family == "bdh":
        table = 2.0 * length * (decoder.inner + decoder.heads * decoder.hidden)
        attention = table * (forwards + 2)
    else:
        attention = 2.0 * length * decoder.heads * decoder.head_dim * (forwards + 2.5)
    moved = (2 + forwards) * decoder.layers * kept
    if low != "bf16":
        moved += _cast_traffic(decoder, how, tokens, forwards)
    trained = sum(trainee.nbytes for trainee in holds.trained) / holds.shards
    return Effort(
        linear=linear * tokens,
        head=head * tokens,
        attention=attention * decoder.layers * tokens,
        moved=moved,
        optimized=3 * trained + 2 * holds.optimizer,
        low=low,
    )


def _cast_traffic(decoder: Decoder, how: Trained, tokens: int, forwards: int) -> float:
    """Bytes that casting to FP8 moves in one micro-step.

    An operand is read twice, for its amax and for its codes, and written once: 5 bytes a number;
    for the weight gradient and dgrad of a weight that trains its codes are also transposed, 2 more.
    """
    turned = 2.0 if how.full else 0.0
    inputs = sum(x.k for x in decoder.linears)
    gradients = sum(x.n for x in decoder.linears)
    numbers = tokens * (inputs * (5 * forwards + turned) + gradients * (5 + turned))
    if how.full:
        numbers += sum(x.n * x.k for x in decoder.linears) * (5 * forwards + turned)
    return numbers * decoder.layers
