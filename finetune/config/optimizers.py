"""Optimizers: what each keeps for every parameter, in what it computes, and where it runs.

AdamW keeps two moving averages (moments) for every parameter, of the gradient and of its square.
"8-bit" and "4-bit" optimizers *store* these two in 8 or 4 bits. Nothing else is in 8 or 4 bits: the
moments are turned back into float32, the update is computed in float32 and the weights stay in the
type they have (`model.dtype`), to which the updated weight is rounded: to nearest, or where torchao
updates BF16 weights by chance (`bf16_stochastic_round`, on unless `train.optim_args` says false).

Storage is blockwise (Dettmers et al. 2021, arXiv 2110.02861): a block of 256 numbers shares one
float32 scale, its largest magnitude, and every number is an index into a table of 256 (16) values
between -1 and 1 that lie closer together near zero (the second moment in 4 bits has evenly
spaced ones, none of them zero). FP8 moments are E4M3 numbers under such scales. So a moment costs
bits/8 + 4/256 bytes for each parameter. What is too small to matter keeps plain moments: tensors of
fewer than 4096 elements, with torchao those that 256 does not divide, and with bitsandbytes' 8 bits
every embedding, for which the Trainer asks for 32.

Names are from `transformers.OptimizerNames`, but for `adamw_torchao_fp8`, which it does not have.
Limits: of optimizers from libraries outside the extras of this package no memory is known.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from finetune.config.train_keys import TrainSection
from finetune.errors import ConfigError, did_you_mean, install_hint

SMALLEST_QUANTIZED = 4096
BLOCK = 256
SCALE_BYTES = 4

PAGED_ON_CPU = "pages live in memory shared with a GPU; on a CPU bitsandbytes keeps plain state"
WHOLE_WEIGHTS = {
    "bitsandbytes": "its kernels take whole tensors, and no shards (DTensor; bitsandbytes 0.50)",
    "adafactor": "its means over rows and columns are whole tensors, which do not go with shards",
    "adagrad": "it makes its state for whole weights, before they are sharded",
}
"""Why optimizers, by library or name, cannot step where FSDP2 shards the weights."""
IN_BACKWARD = "it updates weights inside the backward, where no step can be seen, clipped or proven"


@dataclass(frozen=True)
class Moments:
    """Storage of what an optimizer keeps for each parameter.

    Attributes:
        count: numbers kept for each parameter.
        bits: of each number, None for the type of the parameter.
        small_bits: bits where a tensor is not quantized, None for the type of the parameter.
        factored: True for one number per row and column instead of one per parameter.
    """

    count: int
    bits: int | None = None
    small_bits: int | None = None
    factored: bool = False

    @property
    def blockwise(self) -> bool:
        """True if blocks of numbers share a scale."""
        return self.bits is not None and self.bits < 16


@dataclass(frozen=True)
class Optimizer:
    """One value of `train.optim`.

    Attributes:
        kind: the library's name of the algorithm.
        moments: storage of its state, None where nothing is known.
        math: type in which the update is computed.
        arguments: keys that `train.optim_args` may hold.
        paged: True if state moves to host memory when the GPU is full.
        not_on_cpu, refused: reason why it cannot step on a CPU, or anywhere; empty when it does.
        instead: what to use where it is not available.
        capability: compute capability that an NVIDIA GPU needs.
    """

    name: str
    library: str
    kind: str
    moments: Moments | None
    math: str = "float32"
    arguments: tuple[str, ...] = ()
    paged: bool = False
    not_on_cpu: str = ""
    instead: str = ""
    refused: str = ""
    capability: tuple[int, int] = (0, 0)

    @property
    def install(self) -> str:
        """Command that installs its library where that is optional, else empty."""
        if self.library == "bitsandbytes":
            return install_hint("bnb")
        return _INSTALL.get(self.library, "")

    @property
    def by_torchao(self) -> bool:
        """True if torchao holds its state."""
        return self.library == "torchao"

    @property
    def not_sharded(self) -> str:
        """Reason why it cannot step where FSDP2 shards the weights; empty when it does."""
        return WHOLE_WEIGHTS.get(self.name) or WHOLE_WEIGHTS.get(self.library, "")


_INSTALL = {
    "galore_torch": "pip install galore-torch",
    "apollo_torch": "pip install apollo-torch",
    "grokadamw": "pip install grokadamw",
    "schedulefree": "pip install schedulefree",
    "optimi": "pip install torch-optimi",
    "torchdistx": "build github.com/pytorch/torchdistx",
}

FP8_ADAMW = "adamw_torchao_fp8"
OWN_TYPE = "the parameter's type"
_TORCHAO = ("block_size", "bf16_stochastic_round")


def _torch(name: str, kind: str, count: int, *arguments: str) -> Optimizer:
    return Optimizer(name, "torch", kind, Moments(count), OWN_TYPE, arguments)


def _ao(name: str, bits: int, **kwargs: Any) -> Optimizer:
    return Optimizer(name, "torchao", "AdamW", Moments(2, bits), arguments=_TORCHAO, **kwargs)


def _bnb(name: str, kind: str, count: int, bits: int, arguments: tuple[str, ...] = ()) -> Optimizer:
    moments = Moments(count, bits, small_bits=32)
    plain = Optimizer(name, "bitsandbytes", kind, moments, arguments=arguments)
    if not name.startswith("paged_"):
        return plain
    others = {"paged_adamw_32bit": "adamw_torch_fused", "paged_ademamix_32bit": "ademamix"}
    instead = others.get(name, name.removeprefix("paged_"))
    return replace(plain, paged=True, not_on_cpu=PAGED_ON_CPU, instead=instead)


def _other(name: str, library: str, kind: str, **kwargs: Any) -> Optimizer:
    return Optimizer(name, library, kind, None, arguments=("*",), **kwargs)


def _in_backward(name: str, instead: str) -> Optimizer:
    return _other(name, "", name, refused=IN_BACKWARD, instead=instead)


def _not_for(name: str, device: str) -> Optimizer:
    refused = f"it is for {device}, which this package does not support"
    return _other(name, "", name, refused=refused, instead="adamw_torch_fused")


_ADEMAMIX = ("beta1", "beta2", "beta3", "alpha", "eps", "t_alpha", "t_beta3")

OPTIMIZERS = {
    optimizer.name: optimizer
    for optimizer in (
        _torch("adamw_torch", "AdamW", 2),
        Optimizer("adamw_torch_fused", "torch", "AdamW, one fused kernel", Moments(2)),
        _bnb("adamw_8bit", "AdamW", 2, 8),
        _bnb("adamw_bnb_8bit", "AdamW (the same as `adamw_8bit`)", 2, 8),
        _bnb("paged_adamw_8bit", "AdamW, paged", 2, 8),
        _bnb("paged_adamw_32bit", "AdamW, paged", 2, 32),
        _ao("adamw_torch_8bit", 8),
        _ao("adamw_torch_4bit", 4),
        _ao(FP8_ADAMW, 8, capability=(8, 9), instead="adamw_torch_8bit"),
        Optimizer("adafactor", "transformers", "Adafactor", Moments(1, 32, factored=True)),
        _bnb("lion_8bit", "Lion", 1, 8),
        _bnb("lion_32bit", "Lion", 1, 32),
        _bnb("paged_lion_8bit", "Lion, paged", 1, 8),
        _bnb("paged_lion_32bit", "Lion, paged", 1, 32),
        _bnb("ademamix_8bit", "AdEMAMix", 3, 8, _ADEMAMIX),
        _bnb("ademamix", "AdEMAMix", 3, 32, _ADEMAMIX),
        _bnb("paged_ademamix_8bit", "AdEMAMix, paged", 3, 8, _ADEMAMIX),
        _bnb("paged_ademamix_32bit", "AdEMAMix, paged", 3, 32, _ADEMAMIX),
        _bnb("rmsprop_bnb_8bit", "RMSprop", 1, 8),
        _bnb("rmsprop_bnb", "RMSprop", 1, 32),
        _bnb("rmsprop_bnb_32bit", "RMSprop", 1, 32),
        _torch("rmsprop", "RMSprop", 1, "momentum", "alpha", "eps", "weight_decay", "centered"),
        _torch("adagrad", "Adagrad", 1, "lr_decay", "weight_decay", "eps"),
        _torch("sgd", "SGD", 0, "momentum", "dampening", "weight_decay", "nesterov"),
        _other("galore_adamw", "galore_torch", "GaLore"),
        _other("galore_adamw_8bit", "galore_torch", "GaLore"),
        _other("galore_adafactor", "galore_torch", "GaLore"),
        _other("apollo_adamw", "apollo_torch", "APOLLO"),
        _other("schedule_free_radam", "schedulefree", "schedule-free RAdam"),
        _other("schedule_free_adamw", "schedulefree", "schedule-free AdamW"),
        _other("schedule_free_sgd", "schedulefree", "schedule-free SGD"),
        _other("grokadamw", "grokadamw", "GrokAdamW"),
        _other("stable_adamw", "optimi", "StableAdamW"),
        _other("adamw_anyprecision", "torchdistx", "AnyPrecision AdamW"),
        _in_backward("lomo", "adamw_torch_4bit"),
        _in_backward("adalomo", "adamw_torch_4bit"),
        _in_backward("galore_adamw_layerwise", "galore_adamw"),
        _in_backward("galore_adamw_8bit_layerwise", "galore_adamw_8bit"),
        _in_backward("galore_adafactor_layerwise", "galore_adafactor"),
        _in_backward("apollo_adamw_layerwise", "apollo_adamw"),
        _not_for("adamw_torch_xla", "TPUs"),
        _not_for("adamw_torch_npu_fused", "NPUs"),
    )
}
"""Every value of `train.optim`."""

OWN_NAMES = frozenset({FP8_ADAMW})
"""Those that `transformers.OptimizerNames` does not have."""


# ------------------------------------------------------------------------------------------ memory


def state_bytes(
    facts: Optimizer, shape: tuple[int, ...], element_size: int, *, embedding: bool = False
) -> float:
    """Bytes of moments and their scales for one parameter tensor; 0 where nothing is known.

    Lookup tables (2 KiB a tensor with torchao's 8 bits) and step counters are left out.
    `element_size` is in bytes; `embedding` is True for the weight of an `nn.Embedding`.
    """
    m, numel = facts.moments, math.prod(shape)
    if m is None:
        return 0.0
    if m.factored and len(shape) > 1:  # Adafactor: Shazeer and Stern 2018, arXiv 1804.04235
        return 4.0 * (math.prod(shape[:-1]) + math.prod(shape[:-2]) * shape[-1])
    whole = numel % BLOCK == 0 if facts.by_torchao else not embedding
    if m.bits is not None and m.blockwise and numel >= SMALLEST_QUANTIZED and whole:
        return m.count * (numel * m.bits / 8 + SCALE_BYTES * math.ceil(numel / BLOCK))
    bits = m.small_bits if m.blockwise else m.bits
    return m.count * numel * (element_size if bits is None else bits / 8)


# ---------------------------------------------------------------- checks, before anything is loaded


def chosen(train: TrainSection) -> Optimizer:
    """The optimizer of a `train` section; `adamw_torch_fused` when it names none.

    Raises:
        ConfigError: there is none of that name.
    """
    name = str(train.optim)
    check_name(name)
    return OPTIMIZERS[name]


def check_name(name: str, where: str = "train.optim") -> None:
    """Raise `ConfigError` with the nearest name unless there is such an optimizer."""
    if name not in OPTIMIZERS:
        known = [known for known, facts in OPTIMIZERS.items() if not facts.refused]
        raise ConfigError(
            f"there is no optimizer {name!r}{did_you_mean(name, known)}",
            where=where,
            fix="adamw_torch_fused is the usual one; adamw_8bit and adamw_torch_4bit need less "
            "memory (docs/pages/reference/optimizers.md lists all)",
        )


def check_optimizer(train: TrainSection) -> None:
    """Refuse an optimizer that no device has, or of shards; and arguments without effect.

    Raises:
        ConfigError: names what to use instead.
    """
    facts = chosen(train)
    if facts.refused:
        raise cannot_have(facts, "anywhere", facts.refused, facts.instead)
    if train.fsdp and facts.not_sharded:
        small = facts.moments is not None and (facts.moments.blockwise or facts.moments.factored)
        instead = "adamw_torch_8bit" if small else "adamw_torch_fused"
        why = f"{facts.not_sharded}; without train.fsdp (DDP) it steps"
        raise cannot_have(facts, "with train.fsdp", why, instead)
    for key in arguments(train) if "*" not in facts.arguments else ():
        if key not in facts.arguments:
            known = ", ".join(facts.arguments)
            raise ConfigError(
                f"{facts.name} has no argument {key!r}{did_you_mean(key, facts.arguments)}",
                where="train.optim_args",
                why="it would be ignored",
                fix=f"known: {known}" if known else "~train.optim_args",
            )


def cannot_have(facts: Optimizer, where: str, why: str, instead: str) -> ConfigError:
    return ConfigError(
        f"{facts.name} is not available {where}",
        where=f"train.optim={facts.name}",
        why=why,
        fix=f"train.optim={instead}",
    )


def arguments(train: TrainSection) -> dict[str, str]:
    """`train.optim_args`, written `key=value,key=value`, as a mapping.

    Raises:
        ConfigError: not of that form.
    """
    text = str(train.optim_args or "").replace(" ", "")
    pairs = [item.partition("=") for item in text.split(",") if item]
    for key, equals, value in pairs:
        if not (key and equals and value):
            raise ConfigError(
                f"train.optim_args cannot be {text!r}",
                where="train.optim_args",
                fix="~train.optim_args, or write it as key=value,key=value",
            )
    return {key: value for key, _, value in pairs}
