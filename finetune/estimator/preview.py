"""Peak memory and step time of a run from a closed form: in an instant, without torch, approximate.

Memory is weights, states of the optimizer and the CUDA context (0.5 GiB), and what comes on top in
the worse of two moments of a step after the first:

    backward begins   all that forward kept, the head's gradient; the loss, or a layer at work
    backward ends     all gradients; a layer at work, or the optimizer

where gradients that accumulate over micro-steps are there in both. What a layer keeps is derived in
`finetune.estimator.saved`; with checkpointing it is its input, and the layer at work has the rest.
The head never makes logits of a whole batch: TRL 1.16 takes 4096 tokens times 32768 words at a
time, and sums its gradients in float32.

Time is the work of the matmuls over the GPU's peak times what large GEMMs reach of it (0.70 in
BF16, 0.67 in FP8), attention at half of peak, and what the rest moves over 0.85 of the bandwidth:
what layers keep, written and read in each pass, and weights, gradients and states of the optimizer.

This is a preview: no allocator, no masks, no engine's own copies, no communication, no launch gaps.
It is never below weights + gradients + optimizer (`floor_gib`), which bounds the traced estimate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from finetune.config import RunConfig
from finetune.estimator.decoder import Decoder, shape_at_hand
from finetune.estimator.held import Held, element_bytes, held
from finetune.estimator.saved import FLOAT, HALF, Trained, layer_bytes
from finetune.optimizer_checks import chosen

if TYPE_CHECKING:
    from finetune.gpus import Gpu, Peak

GIB = 2**30
CONTEXT_GIB = 0.5
TOKEN_CHUNK, WORD_CHUNK = 4096, 32768
"""The head's tiles: trl/kernels/chunked_logprob.py and trl/trainer/utils.py of TRL 1.16."""
DEFAULT_ROWS, DEFAULT_LENGTH = 8, 1024
"""`per_device_train_batch_size` and `max_length` of `trl.SFTConfig`."""
BF16_REACHED, FP8_REACHED, ATTENTION_REACHED, BANDWIDTH_REACHED = 0.70, 0.67, 0.50, 0.85


@dataclass(frozen=True)
class Preview:
    """What a run would take on one GPU, about. Memory in GiB.

    Attributes:
        parameters, trainable: counts, adapters included.
        weights, gradients, optimizer: held by this GPU.
        saved: kept for backward at the end of forward.
        loss: what the head takes beside, gradients of the last hidden state included.
        temporaries: the most that is alive in passing, while a layer is at work or optimized.
        context: CUDA's own.
        peak_gib: at the worse of the two moments; not the sum of all these.
        tokens: of one micro-step on this GPU.
        accumulated: micro-steps of one optimizer step.
        flops: of one micro-step: in linear layers of the decoder, in the head, in attention.
        low: precision in which linear layers of the decoder multiply.
        moved: bytes that pass through memory beside the matmuls in one micro-step, and in the
            optimizer's step.
    """

    parameters: int
    trainable: int
    weights: float
    gradients: float
    optimizer: float
    saved: float
    loss: float
    temporaries: float
    context: float
    peak_gib: float
    tokens: int
    accumulated: int
    flops: tuple[float, float, float]
    low: Peak
    moved: tuple[float, float]

    @property
    def floor_gib(self) -> float:
        """Weights + gradients + optimizer: no run can do with less."""
        return self.weights + self.gradients + self.optimizer

    def step_seconds(self, gpu: Gpu) -> float:
        """Time of one optimizer step on this GPU; communication of several is left out.

        What the GPU has no units for takes the time of its 16 bits.
        """
        high = gpu.tflops.get("bf16") or gpu.tflops["fp16"]
        low, reached = high, BF16_REACHED
        if self.low in gpu.tflops and self.low != "bf16":
            low, reached = gpu.tflops[self.low], FP8_REACHED
        linear, head, attention = self.flops
        micro = linear / (low * reached) + head / (high * BF16_REACHED)
        micro += attention / (high * ATTENTION_REACHED)
        pace = gpu.gb_s * 1e9 * BANDWIDTH_REACHED
        micro = micro / 1e12 + self.moved[0] / pace
        return self.accumulated * micro + self.moved[1] / pace

    def tokens_per_s(self, gpu: Gpu) -> float:
        """Of one GPU."""
        return self.tokens * self.accumulated / self.step_seconds(gpu)

    def __str__(self) -> str:
        return (
            f"≈{self.peak_gib:.1f} GiB (preview: weights {self.weights:.1f}, gradients "
            f"{self.gradients:.1f}, optimizer {self.optimizer:.1f}, saved {self.saved:.1f}, loss "
            f"{self.loss:.1f}, temporaries {self.temporaries:.1f}, context {self.context:.1f})"
        )


def preview(config: RunConfig, *, gpus: int = 1) -> Preview | None:
    """What a run would take, if the shape of its model is at hand.

    Args:
        config: of the run; its `train` section may be as written (text).
        gpus: processes, which share everything with `train.fsdp` and nothing without.

    Returns:
        None where the model's shape is not in the package or a local folder, or of a family that is
        not known here, or where no length is set (`max_length: null`).

    Raises:
        ConfigError: there is no such optimizer.
    """
    decoder = shape_at_hand(config.model)
    return None if decoder is None else preview_of(decoder, config, gpus=gpus)


def preview_of(decoder: Decoder, config: RunConfig, *, gpus: int = 1) -> Preview | None:
    """The same, of a shape in hand."""
    train = config.train
    if "max_length" in train and train["max_length"] is None:
        return None
    rows = int(train.get("per_device_train_batch_size") or DEFAULT_ROWS)
    length = int(train.get("max_length") or DEFAULT_LENGTH)
    accumulated = int(train.get("gradient_accumulation_steps") or 1)
    tokens = rows * length
    holds = held(decoder, config, gpus if train.get("fsdp") else 1)
    how = _how(decoder, config, holds)
    checkpointing = _is_true(train.get("gradient_checkpointing", True))
    head_trains = any(t.weight.kind == "head" for t in holds.trained) or how.full

    cast, cast_for_all = _cast_weights(decoder, config, how, holds)
    layer = layer_bytes(decoder, how, length) * tokens + cast
    stream = decoder.hidden * how.stream * tokens
    saved = decoder.layers * (stream if checkpointing else layer) + cast_for_all
    saved += (FLOAT + how.stream * (2 + how.full)) * decoder.hidden * tokens  # last norm, result
    loss, head_gradient = _head(decoder, how, holds, tokens, head_trains)
    at_work = _layer_temporaries(decoder, config, how, tokens) + _unpacked(decoder, config, holds)
    at_work += stream + (layer if checkpointing else 0.0)
    # One kernel for each list of tensors makes a copy of all gradients; a fused one makes none.
    optimizer = chosen(train)
    foreach = optimizer.library == "torch" and "fused" not in optimizer.name
    stepping = holds.gradients if foreach else holds.largest
    before = holds.gradients if accumulated > 1 else 0.0
    moments = (
        saved + head_gradient + max(loss, at_work) + before,
        holds.gradients + max(at_work, stepping),
    )
    trained = sum(trainee.nbytes for trainee in holds.trained) / holds.shards
    return Preview(
        parameters=holds.parameters,
        trainable=holds.trainable,
        weights=holds.weights / GIB,
        gradients=holds.gradients / GIB,
        optimizer=holds.optimizer / GIB,
        saved=saved / GIB,
        loss=loss / GIB,
        temporaries=max(at_work, stepping) / GIB,
        context=CONTEXT_GIB,
        peak_gib=(holds.weights + holds.optimizer + max(moments)) / GIB + CONTEXT_GIB,
        tokens=tokens,
        accumulated=accumulated,
        flops=_flops(decoder, how, tokens, length, checkpointing, holds.added, head_trains),
        low=config.precision.low if config.precision.compute == "fp8" else "bf16",
        moved=(
            (4 if checkpointing else 3) * decoder.layers * layer,
            3 * trained + 2 * holds.optimizer,
        ),
    )


def _is_true(value: Any) -> bool:
    """A truth value of the `train` section, also as it was written."""
    return str(value).lower() in ("true", "yes", "on", "1")


def _how(decoder: Decoder, config: RunConfig, holds: Held) -> Trained:
    model, precision, lora = config.model, config.precision, config.lora
    fused = bool(
        lora
        and precision.fused_adapters
        and model.storage != "nf4"
        and not (lora.dropout or lora.use_dora or lora.bias == "lora_only")
    )
    return Trained(
        full=lora is None,
        adapted=holds.adapted,
        rank=lora.r if lora else 0,
        stream=element_bytes(config),
        fused=fused,
        codes=fused and precision.frozen == "fp8" and precision.saved_input == "fp8",
        dropout=bool(lora and lora.dropout),
        # A mask that keeps packed texts apart goes to a kernel without grouped heads.
        expanded=model.attention in (None, "sdpa") and _is_true(config.train.get("packing")),
        eager=model.attention == "eager" or decoder.family == "gemma2",
        compute=FLOAT if precision.compute == "fp32" else HALF,
    )


# -------------------------------------------------------------------------------- beside the layers


def _head(
    decoder: Decoder, how: Trained, holds: Held, tokens: int, trains: bool
) -> tuple[float, float]:
    """What the head takes in passing, and its gradient."""
    words = decoder.vocabulary * decoder.hidden
    tile = min(tokens, TOKEN_CHUNK) * min(decoder.vocabulary, WORD_CHUNK) * how.compute
    passing = tile + (FLOAT + how.compute) * decoder.hidden * tokens + FLOAT * words * trains
    if holds.shards > 1:  # gathered whole
        passing += words * how.stream
    return passing, words * how.stream * trains / holds.shards


def _cast_weights(
    decoder: Decoder, config: RunConfig, how: Trained, holds: Held
) -> tuple[float, float]:
    """16-bit copies of float32 weights that the backward of one layer, or of all, needs."""
    if how.compute == FLOAT:
        return 0.0, 0.0
    adapters = 0 if how.full or how.fused else holds.added / decoder.layers
    if how.stream == HALF or config.model.storage or config.precision.frozen == "fp8":
        return adapters * HALF, 0.0
    experts = 3 * decoder.experts * decoder.inner * decoder.hidden
    inside = holds.adapted if how.fused else frozenset()
    linear = sum(x.n * x.k for x in decoder.linears if x.path not in inside)
    shared = 3 * decoder.inner * decoder.hidden if decoder.shared_levels else 0
    return (adapters + linear + experts) * HALF, shared * HALF


def _unpacked(decoder: Decoder, config: RunConfig, holds: Held) -> float:
    """A weight in four bits unpacked for its matmul; with shards a layer gathered whole."""
    whole = holds.layer if holds.shards > 1 else 0.0
    if config.model.storage != "nf4":
        return whole
    return whole + max((x.n * x.k for x in decoder.linears), default=0) * HALF


def _layer_temporaries(decoder: Decoder, config: RunConfig, how: Trained, tokens: int) -> float:
    """Gradients that live while one layer is worked on, and attention's workspace."""
    width = decoder.inner * max(decoder.active, 1)
    inside = (3 * width + 2 * decoder.hidden) * how.compute
    if config.precision.compute == "fp8":  # a float32 copy on the way to codes
        inside += FLOAT * width
    heads = decoder.heads * decoder.head_dim
    attention = heads * FLOAT  # sum of dq
    if decoder.kv_heads < decoder.heads:
        attention += 2 * heads * how.compute  # dk and dv of all query heads
    if decoder.family == "bdh":  # of queries and keys, which are the neurons
        attention = 2 * decoder.inner * how.compute
    return max(inside, attention + 2 * decoder.hidden * how.compute) * tokens


def _flops(
    decoder: Decoder,
    how: Trained,
    tokens: int,
    length: int,
    checkpointing: bool,
    adapters: int,
    head_trains: bool,
) -> tuple[float, float, float]:
    """Of one micro-step: linear layers of the decoder, the head, attention."""
    forwards = 2 if checkpointing else 1
    linear = 2.0 * decoder.multiplied * tokens * (forwards + 1 + how.full)
    linear += 2.0 * adapters * tokens * (forwards + 2)
    # The head is multiplied once more in backward instead of keeping logits.
    head = 2.0 * decoder.vocabulary * decoder.hidden * tokens * (3 + head_trains)
    if decoder.family == "bdh":
        table = 2.0 * length * (decoder.inner + decoder.heads * decoder.hidden)
        attention = table * (forwards + 2)
    else:
        attention = 2.0 * length * decoder.heads * decoder.head_dim * (forwards + 2.5)  # causal
    return linear, head, attention * decoder.layers * tokens
