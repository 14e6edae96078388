"""The table of changes that a run may be given to free memory or to save time. No torch.

One row a change: what is typed, what it does to the training, and why. `estimate` predicts what
each frees and costs and whether the run then fits (`finetune.estimator.variants`); refusals, texts
of out-of-memory errors (`finetune.estimator.gate`) and presets of `cp` name them. Ranks:

    same        same training: gradients equal up to rounding, or equal in expectation
    otherwise   same weights in other formats or of other rows: a 4-bit base, smaller images
    adapters    adapters train instead of all weights
    devices     same training on more GPUs
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

from finetune.config.methods import method_of
from finetune.config.optimizers import chosen
from finetune.config.schema import RunConfig
from finetune.config.sft import padding_free
from finetune.config.train_keys import TrainerArguments
from finetune.config.train_section import CHECKPOINTING
from finetune.hardware.device import Device
from finetune.precision.facts import SCALINGS, Scaling

Rank = Literal["same", "otherwise", "adapters", "devices"]
RANKS: tuple[Rank, ...] = get_args(Rank)

SHARDED = ("train.fsdp=true", "train.fsdp_config={version: 2, reshard_after_forward: true}")
# Shortest row length suggested, in tokens.
SHORTEST = 256
FP8, BF16, COMPILED = "precision.compute=fp8", "precision.compute=bf16", "precision.compile=on"
CHECKPOINTED = f"train.{CHECKPOINTING}=true"
LORA = ("lora.r=16", "lora.alpha=32")
IN_FP8 = (FP8, "precision.scaling=rowwise")
FP8_PARAMS = "precision.fp8_params=true"
IN_FOUR_BITS = (BF16, "model.storage=nf4")
UNMASKED = "model.attention=auto"
IMAGES = "images"
# Adapters need about ten times the learning rate of full fine-tuning; as in the LoRA recipes.
LORA_RATE = 2e-4
FUSED = "adamw_torch_fused"
# Compute capability from which FlashAttention runs (Ampere or newer).
FLASH_CAPABILITY = (8, 0)


@dataclass(frozen=True)
class Change:
    """One change to a run.

    Attributes:
        kind: Subject; changes of one kind exclude each other.
        overrides: `section.key=value` arguments.
        why: Effect and drawbacks.
        rank: Effect on the training, see the module docstring.
        gpus: Required number of GPUs; None leaves it unchanged.
        memory: It may free memory; else it is about time, or shows what a setting brings.
        tokens: Tokens of a row after it for each one before, where both say the same.
    """

    kind: str
    overrides: tuple[str, ...]
    why: str
    rank: Rank = "same"
    gpus: int | None = None
    memory: bool = True
    tokens: float = 1.0

    @property
    def typed(self) -> tuple[str, ...]:
        return typed((self,))


def typed(changes: Iterable[Change]) -> tuple[str, ...]:
    """Changes for the command line: `--gpus N`, overrides; the later of two wins."""
    made = list(changes)
    gpus = [f"--gpus {change.gpus}" for change in made if change.gpus is not None]
    # By key, so that a recipe never gets two values for one setting, of which the first would be
    # typed in vain.
    values = {item.partition("=")[0]: item for change in made for item in change.overrides}
    return (*gpus[-1:], *values.values())


def as_typed(change: Iterable[str]) -> str:
    """A change as it is typed: in quotes what has a space, apart from `--gpus N`."""
    return " ".join(
        shlex.quote(word) if " " in word and not word.startswith("--") else word for word in change
    )


def length_of(config: RunConfig) -> Any:
    """Tokens of the longest row.

    Rows that the model writes have no `max_length`: it is that of a prompt and its answer, and
    prompts are taken to have as many tokens as answers have at most.
    """
    if "max_length" not in config.train and method_of(config.train).writes:
        return 2 * config.train.max_completion_length
    return config.train.max_length


def longest(config: RunConfig) -> tuple[str, Any]:
    """Key of the `train` section that limits rows, or answers that the model writes; its value."""
    if method_of(config.train).writes:
        return "max_completion_length", config.train.max_completion_length
    return "max_length", length_of(config)


def with_length(config: RunConfig, length: int) -> RunConfig:
    """The run as if its longest row, or prompt and answer together, had so many tokens."""
    return config.model_copy(update={"train": config.train | {"max_length": length}})


def rows_in_groups(config: RunConfig) -> int:
    """What the rows of a micro-batch are a multiple of: a generation has all answers to a prompt.

    Eight answers to a prompt and two micro-batches a generation: 4.
    """
    train, (_, times) = config.train, rows_of(config)
    # TRL's own default, which stands where the recipe says nothing.
    usual = TrainerArguments(method_of(train).config_class).num_generations or 1
    answers, times = int(train.num_generations or usual), int(train.steps_per_generation or times)
    # A generation of `times` micro-batches has rows x times answers, which must be whole groups of
    # `answers`: rows is a multiple of answers / gcd(answers, times).
    return answers // math.gcd(answers, times)


def rows_of(config: RunConfig) -> tuple[int, int]:
    """(rows per micro-batch, micro-batches per step)."""
    train = config.train
    return int(train.per_device_train_batch_size), int(train.gradient_accumulation_steps)


def with_rows(rows: int, times: int) -> tuple[str, str]:
    return (
        f"train.per_device_train_batch_size={rows}",
        f"train.gradient_accumulation_steps={times}",
    )


def changes(
    config: RunConfig,
    device: Device,
    gpus: int = 1,
    *,
    compiled: bool | None = None,
    image_tokens: int = 0,
) -> tuple[Change, ...]:
    """Every change that applies, by rank and roughly from cheapest to most expensive in speed.

    Args:
        compiled: decoder layers are compiled; None leaves that out.
        image_tokens: tokens of a row that are of images; 0 leaves them out.
    """
    found = (
        *free_of_charge(config, device),
        *_smaller_base(config, device),
        *_masters(config, device),
        *_other_batches(config),
        *_recomputed(config),
        *_compiled(device, compiled),
        *_head(config),
        *_narrower(config),
        *(_sized(config, image_tokens) if image_tokens else ()),
        *_shorter(config),
        *_engines(config, device),
        *_adapters(config, device),
        *_more_devices(config, device, gpus),
    )
    return tuple(sorted(found, key=lambda change: RANKS.index(change.rank)))


def freeing(
    config: RunConfig, device: Device, gpus: int = 1, image_tokens: int = 0
) -> tuple[Change, ...]:
    """The changes that may free memory."""
    found = changes(config, device, gpus, image_tokens=image_tokens)
    return tuple(change for change in found if change.memory)


def attends_by_mask(config: RunConfig, device: Device) -> bool:
    """True if packed rows are configured to need an L x L mask, which `auto` would avoid."""
    # Below it `auto` itself has nothing better than a mask.
    able = device.kind == "cuda" and (device.capability or (0, 0)) >= FLASH_CAPABILITY
    return able and padding_free(config.train) and config.model.attention in ("sdpa", "eager")


def free_of_charge(config: RunConfig, device: Device) -> Iterator[Change]:
    """Changes that take neither time nor memory, nor change what is learnt."""
    if config.train.optim == "adamw_torch":
        why = "one fused kernel instead of passes over lists of tensors, which make temporaries"
        yield Change("optimizer kernel", (f"train.optim={FUSED}",), why)
    if attends_by_mask(config, device):
        why = "packed documents are kept apart without a mask of length x length"
        yield Change("attention", (UNMASKED,), why)


def _smaller_base(config: RunConfig, device: Device) -> Iterator[Change]:
    precision, storage = config.precision, config.model.storage
    # A base whose weights train has to stay in 16 bits or more: codes have no gradient.
    if config.lora is None or storage == "nf4":
        return
    if precision.compute == "bf16" and storage is None:
        if device.has_fp8:
            overrides = (*IN_FP8, "precision.frozen=fp8")
            why = "as the FP8 codes that it is multiplied by: one byte a weight"
        else:
            overrides = ("model.storage=fp8",)
            why = "in FP8, one byte a weight, and turned back before each product"
        yield Change("base", overrides, f"the frozen base is stored {why}", "otherwise")
    plain = precision.compute == "fp8" and precision.frozen != "fp8"
    # A stored base multiplies E4M3 operands alone: another format was asked for on purpose.
    if plain and precision.facts.stored and precision.format in (None, "e4m3"):
        why = "the frozen base is stored in FP8 alone, without a copy in 16 bits"
        yield Change("base", ("precision.frozen=fp8",), why, "otherwise")
    # bitsandbytes casts a layer's bias to BF16 in place, where its small updates are lost.
    if precision.compute in ("bf16", "fp8") and config.lora.bias == "none":
        why = "QLoRA: the frozen base in four bits, turned back to BF16 before each product"
        yield Change("base", IN_FOUR_BITS, f"{why}; needs the extra bnb", "otherwise")


def _masters(config: RunConfig, device: Device) -> Iterator[Change]:
    """Weights as FP8 codes on the GPU; what an optimizer has in host memory."""
    precision, train = config.precision, config.train
    able = device.kind == "cuda" and device.has_fp8 and config.lora is None and not train.fsdp
    if not able or precision.fp8_params or precision.engine.owns_weights:
        return
    why = "weights on the GPU as FP8 codes alone; masters, gradients and states in host memory"
    if precision.compute == "fp8" and precision.facts.stored:
        yield Change("masters", (FP8_PARAMS,), f"{why}, where the update runs")
    elif precision.compute == "bf16":
        yield Change("masters", (FP8, FP8_PARAMS), f"in FP8: {why}", "otherwise")


def _other_batches(config: RunConfig) -> Iterator[Change]:
    """Halve the rows and double the micro-batches, down to one row: 8 x 1, 4 x 2, 2 x 4, 1 x 8.

    Or the other way, twice the rows or all of a step at once.
    """
    given, micro_batches = rows_of(config)
    rows, times = given, micro_batches
    while rows > 1:
        # An odd number is not halved: 7 rows go to 1 x 7, which keeps the tokens of a step exactly.
        factor = 2 if rows % 2 == 0 else rows
        rows, times = rows // factor, times * factor
        why = "fewer activations at a time; a step keeps its tokens, in more micro-batches"
        yield Change("micro-batch", with_rows(rows, times), why)
    # Twice the rows, and all of a step at once: what lies between is between them in memory and in
    # speed, too.
    for factor in sorted({2, micro_batches}):
        if micro_batches > 1 and micro_batches % factor == 0:
            why = "larger micro-batches, fewer of them: a step keeps its tokens"
            larger = with_rows(given * factor, micro_batches // factor)
            yield Change("larger micro-batch", larger, why, memory=False)


def _recomputed(config: RunConfig) -> Iterator[Change]:
    if config.train.gradient_checkpointing:
        why = "nothing is computed twice where there is room to keep the activations"
        off = (f"train.{CHECKPOINTING}=false",)
        yield Change("no checkpointing", off, why, memory=False)
    else:
        why = "activations of a layer are computed again in backward instead of being kept"
        yield Change("checkpointing", (CHECKPOINTED,), why)


def _compiled(device: Device, compiled: bool | None) -> Iterator[Change]:
    # On a CPU compiling is never predicted to pay, so nothing is offered.
    if device.kind != "cuda" or compiled is None:
        return
    why = "torch.compile joins chains of small kernels; the first step takes minutes"
    setting = COMPILED
    if compiled:
        why, setting = "without torch.compile, which joins them", "precision.compile=off"
    yield Change("compile", (setting,), why, memory=False)


def _head(config: RunConfig) -> Iterator[Change]:
    if config.precision.map.get("output") == "fp8":
        why = "the output head in BF16"
        yield Change("head", ("~precision.map.output",), why, memory=False)


def _engines(config: RunConfig, device: Device) -> Iterator[Change]:
    """FP8 of other scalings and engines; a base that is stored in FP8 has rows alone."""
    if not device.has_fp8 or config.precision.compute not in ("bf16", "fp8"):
        return
    # An engine's own speed is what is asked about; over a stored base ours would multiply instead.
    cast_each_time = ("precision.frozen=bf16",) if config.lora else ()
    pairs: tuple[tuple[str, Scaling], ...] = (
        *(("torchao", "tensorwise"), ("torchao", "rowwise")),
        ("te", "delayed"),
    )
    for backend, scaling in pairs:
        rule = SCALINGS[scaling]
        overrides = (FP8, f"precision.backend={backend}", f"precision.scaling={scaling}")
        overrides += cast_each_time if rule.stored else ()
        # A rule with a history has no powers of two; a recipe's setting for them would be refused.
        overrides += ("precision.power_of_two_scales=null",) if rule.has_history else ()
        yield Change(f"{backend} {scaling}", overrides, f"FP8, {backend} {scaling}", "otherwise",
                     memory=False)  # fmt: skip


def _narrower(config: RunConfig) -> Iterator[Change]:
    if config.model.dtype == "float32" and config.precision.compute in ("bf16", "fp8"):
        why = "weights, gradients and moments in BF16: updates below its rounding are lost, unless "
        why += "train.optim=adamw_torch_8bit rounds by chance"
        yield Change("weights", ("model.dtype=bfloat16",), why, "otherwise")
    moments = chosen(config.train).moments
    # AdamW and its kin, with moments in the type of the weights: those in 8 bits are small already.
    if moments is not None and moments.count == 2 and not moments.blockwise:
        why = "both moments of AdamW in 8 bits, BF16 weights rounded by chance"
        yield Change("optimizer", ("train.optim=adamw_torch_8bit",), why, "otherwise")


def _sized(config: RunConfig, tokens: int) -> Iterator[Change]:
    """Images of fewer or more pixels, in rows of as much text, where a processor counts pixels."""
    from finetune.estimator.images import other_sizes  # loads torch

    writes = method_of(config.train).writes  # images are beside what its length counts
    length, multiple = length_of(config) + tokens * writes, config.train.row_multiple
    for pixels, other in other_sizes(config, tokens):
        row = -(-(length - tokens + other) // multiple) * multiple
        overrides = (f"train.max_pixels={pixels}",)
        overrides += (f"train.max_length={row}",) if row != length and not writes else ()
        less = other < tokens
        why = f"{'smaller' if less else 'larger'} images, {other:,} tokens of a row instead of "
        why += f"{tokens:,}, beside as much text"
        yield Change(IMAGES, overrides, why, "otherwise", memory=less, tokens=row / length)


def _shorter(config: RunConfig) -> Iterator[Change]:
    (key, length), (_, times) = longest(config), rows_of(config)
    # Rows below 256 tokens save little, and cut off most of what is to be learned.
    if length is None or length // 2 < SHORTEST:
        return
    what, overrides = "what is longer is cut off", (f"train.{key}={length // 2}",)
    if config.train.packing:  # keep the tokens per step
        what = "documents are split"
        overrides += (f"train.gradient_accumulation_steps={times * 2}",)
    why = f"{what}: what stands further apart is not learnt from"
    yield Change("length", overrides, why, "otherwise")


def _adapters(config: RunConfig, device: Device) -> Iterator[Change]:
    """Adapters on all linear layers, over a base in BF16, FP8 or NF4."""
    if config.lora is not None or config.precision.compute not in ("bf16", "fp8"):
        return
    rate = config.train.learning_rate or 0.0
    overrides = LORA + ((f"train.learning_rate={LORA_RATE:g}",) if rate < LORA_RATE else ())
    # Float32 masters are for weights that train; PEFT has adapters in float32 by itself.
    overrides += ("model.dtype=bfloat16",) if config.model.dtype == "float32" else ()
    what = "adapters train instead of all weights, which stand still"
    yield Change("method", overrides, f"LoRA: {what}", "adapters")
    if device.has_fp8 and config.precision.compute == "bf16":
        yield Change(
            "method", overrides + IN_FP8, f"LoRA: {what} and are stored in FP8", "adapters"
        )
    why = f"QLoRA: {what}, in four bits; needs the extra bnb"
    yield Change("method", overrides + IN_FOUR_BITS, why, "adapters")


def _more_devices(config: RunConfig, device: Device, gpus: int) -> Iterator[Change]:
    # bitsandbytes' four-bit weights are not sharded here (`presets` leaves them out likewise).
    if device.kind != "cuda" or config.model.storage == "nf4":
        return
    overrides = () if config.train.fsdp else SHARDED
    if gpus > 1 and overrides:
        why = f"the {gpus} GPUs share weights, gradients and states (FSDP2)"
        yield Change("sharding", overrides, why)
    for count in (2 * gpus, 4 * gpus, 8 * gpus):
        why = f"{count} GPUs share weights, gradients and states (FSDP2)"
        yield Change("devices", overrides, why, "devices", gpus=count)
