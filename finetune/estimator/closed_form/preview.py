"""Peak memory and step time of a run from a closed form: in an instant, without torch, approximate.

Memory is weights, states of the optimizer and the CUDA context (0.5 GiB), and what comes on top in
the worse of two moments of a step after the first:

    backward begins   all that forward kept, the head's gradient; the loss, or a layer at work
    backward ends     all gradients; a layer at work, or the optimizer

where gradients that accumulate over micro-steps are there in both. What a layer keeps is derived in
`finetune.estimator.closed_form.activations`; with checkpointing it is its input, and the layer at
work has the rest.
The head never makes logits of a whole batch: TRL 1.16 takes 4096 tokens times 32768 words at a
time, and sums its gradients in float32.

Time is what the step computes and moves over what the GPU does
(`finetune.estimator.closed_form.effort`).

This is a preview: no allocator, no masks, no engine's own copies, no communication.
It is never below weights + gradients + optimizer (`floor_gib`), which bounds the traced estimate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from finetune.config.optimizers import chosen
from finetune.config.schema import RunConfig
from finetune.errors import ConfigError
from finetune.estimator.closed_form.activations import FLOAT, HALF, Trained, layer_bytes
from finetune.estimator.closed_form.decoder import Decoder, shape_at_hand
from finetune.estimator.closed_form.effort import Effort, effort
from finetune.estimator.closed_form.static_memory import Held, element_bytes, held

if TYPE_CHECKING:
    from finetune.hardware.gpus import Gpu

GIB = 2**30
CONTEXT_GIB = 0.5
TOKEN_CHUNK, WORD_CHUNK = 4096, 32768
"""The head's tiles: trl/kernels/chunked_logprob.py and trl/trainer/utils.py of TRL 1.16."""
DEFAULT_ROWS, DEFAULT_LENGTH = 8, 1024
"""`per_device_train_batch_size` and `max_length` of `trl.SFTConfig`."""


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
        effort: what one GPU computes and moves.
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
    effort: Effort

    @property
    def floor_gib(self) -> float:
        """Weights + gradients + optimizer: no run can do with less."""
        return self.weights + self.gradients + self.optimizer

    def step_seconds(self, gpu: Gpu) -> float:
        """Time of one optimizer step on this GPU; communication of several is left out."""
        return self.effort.seconds(gpu, self.accumulated)

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
        ConfigError: there is no such optimizer, or a number that is none or less than one.
    """
    decoder = shape_at_hand(config.model)
    return None if decoder is None else preview_of(decoder, config, gpus=gpus)


def preview_of(
    decoder: Decoder, config: RunConfig, *, gpus: int = 1, logits: float = 0.0
) -> Preview | None:
    """The same, of a shape in hand.

    Args:
        decoder: the shape.
        config: of the run; the name of its model does not matter.
        gpus: processes.
        logits: bytes that the loss makes for each token and word. 0 for the head of TRL 1.16, which
            makes none; other trainers make logits in BF16, in float32 and their gradient.
    """
    train = config.train
    if "max_length" in train and train["max_length"] is None:
        return None
    rows = _count(train, "per_device_train_batch_size", DEFAULT_ROWS)
    length = _count(train, "max_length", DEFAULT_LENGTH)
    accumulated = _count(train, "gradient_accumulation_steps", 1)
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
    loss = max(loss, logits * decoder.vocabulary * tokens)
    whole = _whole(decoder, config, holds)
    at_work = _layer_temporaries(decoder, config, how, tokens)
    at_work += stream + (layer if checkpointing else 0.0)
    # One kernel for each list of tensors makes a copy of all gradients; a fused one makes none.
    optimizer = chosen(train)
    foreach = optimizer.library == "torch" and "fused" not in optimizer.name
    stepping = holds.gradients if foreach else holds.largest
    before = holds.gradients if accumulated > 1 else 0.0
    moments = (
        saved + head_gradient + max(loss, at_work) + whole + before,
        holds.gradients + max(at_work + whole, stepping),
    )
    return Preview(
        parameters=holds.parameters,
        trainable=holds.trainable,
        weights=holds.weights / GIB,
        gradients=holds.gradients / GIB,
        optimizer=holds.optimizer / GIB,
        saved=saved / GIB,
        loss=loss / GIB,
        temporaries=max(at_work + whole, stepping) / GIB,
        context=CONTEXT_GIB,
        peak_gib=(holds.weights + holds.optimizer + max(moments)) / GIB + CONTEXT_GIB,
        tokens=tokens,
        accumulated=accumulated,
        effort=effort(
            decoder,
            how,
            holds,
            rows=rows,
            length=length,
            forwards=2 if checkpointing else 1,
            kept=layer,
            low=config.precision.low if config.precision.compute == "fp8" else "bf16",
        ),
    )


def _count(train: dict[str, Any], key: str, default: int) -> int:
    """A number of the `train` section, also as it was written."""
    value = train.get(key)
    try:
        number = default if value is None else int(value)
    except ValueError:
        number = 0
    if number < 1:
        raise ConfigError(f"train.{key} cannot be {value!r}", where=f"train.{key}", fix="1 or more")
    return number


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


def _whole(decoder: Decoder, config: RunConfig, holds: Held) -> float:
    """Weights that are whole for a while: one in four bits unpacked; with shards more.

    FSDP gathers the layer at work and the next one, and keeps embedding and head gathered.
    """
    whole = 0.0
    if config.model.storage == "nf4":
        whole += max((x.n * x.k for x in decoder.linears), default=0) * HALF
    if holds.shards > 1:
        words = decoder.vocabulary * decoder.hidden * (1 if decoder.tied else 2)
        whole += 2 * holds.layer + words * element_bytes(config)
    return whole


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
