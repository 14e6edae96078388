"""Approximate peak memory and step time of a run in closed form: instant, without torch.

Memory is weights, optimizer states and the CUDA context (0.5 GiB), plus the worse of two moments of
a step after the first:

    backward begins   all saved activations, the head's gradient; the loss, or a layer at work
    backward ends     all gradients; a layer at work, or the optimizer

Gradients accumulated over micro-batches are in both. Activations of a layer are derived in
`finetune.estimator.closed_form.activations`; with checkpointing a layer saves its input, and the
layer at work has the rest. The head never makes the logits of a whole batch: TRL 1.16 takes 4096
tokens times 32768 words of the vocabulary at a time, and sums its gradients in float32.

Matmuls cost 2 FLOPs per weight and token: forward, again if checkpointing recomputes, the gradient
of the input, and that of the weight if it trains. TRL's head is multiplied once more in backward
instead of storing logits. Causal attention computes half of its table. Time is FLOPs over the GPU's
peak times the share that large GEMMs reach, plus bytes over the bandwidth times the share that
pointwise kernels reach. Bytes are those of saved activations, once in each pass and once more;
casts to FP8; weights, gradients and optimizer states.

Limits: no allocator, masks, engine copies, communication, launch gaps, partial waves or data
loading, so small models and several GPUs are slower than predicted. The result is never below
weights + gradients + optimizer (`floor_gib`), which bounds the traced estimate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from finetune.config.optimizers import chosen
from finetune.config.schema import RunConfig
from finetune.config.sft import padding_free
from finetune.errors import ConfigError
from finetune.estimator.closed_form.activations import FLOAT, HALF, TrainingMode, layer_bytes
from finetune.estimator.closed_form.decoder import Decoder, find_decoder
from finetune.estimator.closed_form.static_memory import (
    StaticMemory,
    adapted_linears,
    added_parameters,
    itemsize_of,
    parameters_of,
    static_memory,
    stored_linear,
)
from finetune.units import GIB

if TYPE_CHECKING:
    from finetune.hardware.gpus import Gpu, Peak

BF16_REACHED, FP8_REACHED, ATTENTION_REACHED, BANDWIDTH_REACHED = 0.70, 0.67, 0.50, 0.85
"""Shares of a GPU's peaks reached by large GEMMs in either precision, by fused attention and by
pointwise kernels. From published speeds on Hopper; `finetune/assets/efficiency.yaml` has them by
GPU and shape.
"""
FUSED_CAST_BYTES, EAGER_CAST_BYTES = 3.0, 5.0
"""Bytes moved per element cast: read and written once, or read once more for its amax."""
CONTEXT_GIB = 0.5
"""CUDA context: the middle of `finetune.estimator.memory.overheads.CONTEXT_MIB`."""
TOKEN_CHUNK, WORD_CHUNK = 4096, 32768
"""The head's tiles: trl/kernels/chunked_logprob.py and trl/trainer/utils.py of TRL 1.16."""
DEFAULT_ROWS, DEFAULT_LENGTH = 8, 1024
"""`per_device_train_batch_size` and `max_length` of `trl.SFTConfig`."""


@dataclass(frozen=True)
class Preview:
    """Approximate memory on one GPU, in GiB, and the work of a step.

    Attributes:
        weights, gradients, optimizer: stored by this GPU from step to step.
        saved: activations saved for backward at the end of forward.
        loss: temporaries of the head, gradients of the last hidden state included.
        temporaries: peak of other temporaries, while a layer is at work or optimized.
        peak_gib: at the worse of the two moments; not the sum of the parts.
        tokens: tokens of one micro-batch on this GPU.
        accumulated: micro-batches per optimizer step.
        work: FLOPs and bytes of one GPU.
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
    work: StepWork

    @property
    def floor_gib(self) -> float:
        """Weights + gradients + optimizer: a lower bound of any run."""
        return self.weights + self.gradients + self.optimizer

    def step_seconds(self, gpu: Gpu) -> float:
        """Time of one optimizer step on this GPU, without communication."""
        return self.work.seconds(gpu, self.accumulated)

    def tokens_per_s(self, gpu: Gpu) -> float:
        """Tokens per second of one GPU."""
        return self.tokens * self.accumulated / self.step_seconds(gpu)

    def __str__(self) -> str:
        return (
            f"≈{self.peak_gib:.1f} GiB (preview: weights {self.weights:.1f}, gradients "
            f"{self.gradients:.1f}, optimizer {self.optimizer:.1f}, saved {self.saved:.1f}, loss "
            f"{self.loss:.1f}, temporaries {self.temporaries:.1f}, context {self.context:.1f})"
        )


def preview(config: RunConfig, *, gpus: int = 1) -> Preview | None:
    """Memory and work of a run, if the shape of its model is known.

    Args:
        config: run configuration, also before validation of `train`.
        gpus: processes; with `train.fsdp` they share the model, else each stores all of it.

    Returns:
        None if the shape is neither in the package nor a local folder, the family is unknown, no
        length is set (`max_length: null`), or parts of the model are frozen by name.

    Raises:
        ConfigError: an unknown optimizer, or a value that is not a number of at least one.
    """
    decoder = find_decoder(config.model)
    if decoder is None or config.model.freeze:
        return None
    return preview_of(decoder, config, gpus=gpus)


def preview_of(
    decoder: Decoder, config: RunConfig, *, gpus: int = 1, logits: float = 0.0
) -> Preview | None:
    """Memory and work of a run with a given shape, whatever model `config` names.

    `logits` is the number of bytes that the loss makes per token and word of the vocabulary: 0 for
    the head of TRL 1.16; other trainers make BF16 logits, float32 logits and their gradient.
    """
    train = config.train
    if "max_length" in train and train["max_length"] is None:
        return None
    rows = _count(train, "per_device_train_batch_size", DEFAULT_ROWS)
    length = _count(train, "max_length", DEFAULT_LENGTH)
    accumulated = _count(train, "gradient_accumulation_steps", 1)
    tokens = rows * length
    optimizer, shards = chosen(train), gpus if train.get("fsdp") else 1
    static = static_memory(parameters_of(decoder, config), optimizer, shards)
    mode = _mode(decoder, config)
    checkpointing = _is_true(train.get("gradient_checkpointing", True))

    cast, cast_for_all = _cast_weights(decoder, config, mode)
    layer = layer_bytes(decoder, mode, length) * tokens + cast
    stream = decoder.hidden * mode.stream * tokens
    saved = decoder.layers * (stream if checkpointing else layer) + cast_for_all
    saved += (FLOAT + mode.stream * (2 + mode.full)) * decoder.hidden * tokens  # last norm, result
    loss = max(_head_temporaries(decoder, mode, tokens), logits * decoder.vocabulary * tokens)
    head_gradient = decoder.vocabulary * decoder.hidden * mode.stream * mode.head / shards
    whole = _whole_weights(decoder, config, shards)
    at_work = _layer_temporaries(decoder, config, mode, tokens)
    at_work += stream + (layer if checkpointing else 0.0)
    # One kernel for each list of tensors makes a copy of all gradients; a fused one makes none.
    foreach = optimizer.library == "torch" and "fused" not in optimizer.name
    stepping = static.gradients if foreach else static.largest
    before = static.gradients if accumulated > 1 else 0.0
    moments = (
        saved + head_gradient + max(loss, at_work) + whole + before,
        static.gradients + max(at_work + whole, stepping),
    )
    return Preview(
        parameters=static.parameters,
        trainable=static.trainable,
        weights=static.weights / GIB,
        gradients=static.gradients / GIB,
        optimizer=static.optimizer / GIB,
        saved=saved / GIB,
        loss=loss / GIB,
        temporaries=max(at_work + whole, stepping) / GIB,
        context=CONTEXT_GIB,
        peak_gib=(static.weights + static.optimizer + max(moments)) / GIB + CONTEXT_GIB,
        tokens=tokens,
        accumulated=accumulated,
        work=_step_work(
            decoder,
            mode,
            static,
            config.precision.low if config.precision.compute == "fp8" else "bf16",
            tokens=tokens,
            length=length,
            forwards=2 if checkpointing else 1,
            kept=layer,
        ),
    )


def _count(train: dict[str, Any], key: str, default: int) -> int:
    """Read a number from the `train` section; strings are converted."""
    value = train.get(key)
    try:
        number = default if value is None else int(value)
    except ValueError:
        number = 0
    if number < 1:
        raise ConfigError(f"train.{key} cannot be {value!r}", where=f"train.{key}", fix="1 or more")
    return number


def _is_true(value: Any) -> bool:
    """True if a value of the `train` section, possibly a string, is true, or may be (`auto`)."""
    return str(value).lower() in ("true", "yes", "on", "1", "auto")


def _mode(decoder: Decoder, config: RunConfig) -> TrainingMode:
    model, precision, lora = config.model, config.precision, config.lora
    fused = bool(
        lora
        and precision.fused_adapters
        and model.storage != "nf4"
        and not (lora.dropout or lora.use_dora or lora.bias == "lora_only")
    )
    return TrainingMode(
        full=lora is None,
        adapted=frozenset(adapted_linears(decoder, lora) if lora else ()),
        rank=lora.r if lora else 0,
        added=sum(p.numel for p in added_parameters(decoder, config)),
        head=lora is None or "lm_head" in lora.modules_to_save,
        stream=float(itemsize_of(config)),
        fused=fused,
        codes=fused and precision.frozen == "fp8" and precision.saved_input == "fp8",
        dropout=bool(lora and lora.dropout),
        # A mask that keeps packed texts apart goes to a kernel without grouped heads.
        expanded=model.attention == "sdpa" and padding_free(config.train),
        eager=model.attention == "eager" or decoder.family == "gemma2",
        compute=FLOAT if precision.compute == "fp32" else HALF,
    )


# -------------------------------------------------------------------------------- beside the layers


def _head_temporaries(decoder: Decoder, mode: TrainingMode, tokens: int) -> float:
    """A tile of logits, hidden states and their gradient, the weight's gradient in float32."""
    tile = min(tokens, TOKEN_CHUNK) * min(decoder.vocabulary, WORD_CHUNK) * mode.compute
    hidden = (FLOAT + mode.compute) * decoder.hidden * tokens
    return tile + hidden + FLOAT * decoder.vocabulary * decoder.hidden * mode.head


def _cast_weights(decoder: Decoder, config: RunConfig, mode: TrainingMode) -> tuple[float, float]:
    """16-bit copies of float32 weights for the backward of one layer, or of all."""
    if mode.compute == FLOAT:
        return 0.0, 0.0
    adapters = 0 if mode.full or mode.fused else mode.added / decoder.layers
    if mode.stream == HALF or config.model.storage or config.precision.frozen == "fp8":
        return adapters * HALF, 0.0
    experts = 3 * decoder.experts * decoder.inner * decoder.hidden
    inside = mode.adapted if mode.fused else frozenset()
    linear = sum(x.numel for x in decoder.linears if x.path not in inside)
    # All layers of a BDH use the same weights.
    shared = 3 * decoder.inner * decoder.hidden if decoder.family == "bdh" else 0
    return (adapters + linear + experts) * HALF, shared * HALF


def _whole_weights(decoder: Decoder, config: RunConfig, shards: int) -> float:
    """Weights that are temporarily whole: one unpacked 4-bit weight; more with shards.

    FSDP gathers the layer at work and the next one, and keeps embedding and head gathered.
    """
    whole = 0.0
    if config.model.storage == "nf4":
        whole += max((x.numel for x in decoder.linears), default=0) * HALF
    if shards > 1:
        layer = sum(stored_linear(x.n, x.k, decoder, config)[0] for x in decoder.linears)
        embeddings = decoder.vocabulary * decoder.hidden * (1 if decoder.tied else 2)
        whole += 2 * layer + embeddings * itemsize_of(config)
    return whole


def _layer_temporaries(
    decoder: Decoder, config: RunConfig, mode: TrainingMode, tokens: int
) -> float:
    """Gradients alive while one layer is at work, and attention's workspace."""
    width = decoder.inner * max(decoder.active, 1)
    inside = (3 * width + 2 * decoder.hidden) * mode.compute
    if config.precision.compute == "fp8":  # a float32 copy on the way to codes
        inside += FLOAT * width
    heads = decoder.heads * decoder.head_dim
    attention = heads * FLOAT  # sum of dq
    if decoder.kv_heads < decoder.heads:
        attention += 2 * heads * mode.compute  # dk and dv of all query heads
    if decoder.family == "bdh":  # of queries and keys, which are the neurons
        attention = 2 * decoder.inner * mode.compute
    return max(inside, attention + 2 * decoder.hidden * mode.compute) * tokens


# -------------------------------------------------------------------------------- FLOPs and bytes


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


def _step_work(
    decoder: Decoder, mode: TrainingMode, static: StaticMemory, low: Peak,
    *, tokens: int, length: int, forwards: int, kept: float,
) -> StepWork:  # fmt: skip
    """Work of one GPU in a step.

    Args:
        static: weights, gradients and states of this GPU.
        low: precision of the decoder's linear layers.
        tokens, length: of a micro-batch, and of a row.
        forwards: 2 if checkpointing recomputes the layers, else 1.
        kept: bytes that one layer saves for the micro-batch.
    """
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
