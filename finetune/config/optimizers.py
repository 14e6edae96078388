"""Optimizers: what each keeps for every parameter, in what it computes, and where it runs.

AdamW keeps two moving averages (moments) for every parameter, of the gradient and of its square.
"8-bit" and "4-bit" optimizers *store* these two in 8 or 4 bits. Nothing else is in 8 or 4 bits: the
moments are turned back into float32, the update is computed in float32 and the weights stay in the
type they have (`model.dtype`), to which the updated weight is rounded.

Storage is blockwise (Dettmers et al. 2021, arXiv 2110.02861): a block of 256 numbers shares one
float32 scale, its largest magnitude, and every number is an index into a table of 256 (16) values
between -1 and 1 that lie closer together near zero (those of the second moment in 4 bits are evenly
spaced, and none is zero). FP8 moments are E4M3 numbers under such scales. So a moment costs
bits/8 + 4/256 bytes for each parameter. What is too small to matter keeps plain moments: tensors of
fewer than 4096 elements, with torchao those that 256 does not divide, and with bitsandbytes' 8 bits
every embedding, for which the Trainer asks for 32.

Names are those of `transformers.OptimizerNames`, and `adamw_torchao_fp8`, for which it has none.
Limits: of optimizers from libraries outside the extras of this package no memory is known.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from finetune.errors import ConfigError, nearest

SMALLEST_QUANTISED = 4096
BLOCK = 256
SCALE_BYTES = 4

PAGED_ON_CPU = "pages live in memory shared with a GPU; on a CPU bitsandbytes keeps plain state"
IN_BACKWARD = "it updates weights inside the backward, where no step can be seen, clipped or proven"


@dataclass(frozen=True)
class Moments:
    """Storage of what an optimizer keeps for each parameter.

    Attributes:
        count: numbers kept for each parameter.
        bits: of each number, None for the type of the parameter.
        small_bits: bits where a tensor is not quantised, None for the type of the parameter.
        factored: one number for each row and each column instead of one for each parameter.
    """

    count: int
    bits: int | None = None
    small_bits: int | None = None
    factored: bool = False

    @property
    def blockwise(self) -> bool:
        """True if blocks of numbers share a scale."""
        return self.bits is not None and self.bits < 16

    @property
    def bytes_per_parameter(self) -> float | None:
        """Bytes of state for each parameter of a large tensor, None where its type decides."""
        if self.bits is None or self.factored:
            return 0.0 if not self.count else None
        return self.count * (self.bits / 8 + (SCALE_BYTES / BLOCK if self.blockwise else 0))


@dataclass(frozen=True)
class Optimizer:
    """One value of `train.optim`.

    Attributes:
        name: as written in a recipe.
        library: module that it comes from.
        kind: what the library calls it.
        moments: what it keeps, None where nothing is known.
        math: type in which the update is computed.
        rounding: how the updated weight is rounded to the type it is stored in.
        arguments: keys that `train.optim_args` may hold.
        paged: state moves to host memory when the GPU is full.
        not_on_cpu: why it cannot step on a CPU, empty when it does.
        instead: what to use where it cannot be had.
        refused: why it cannot be had anywhere.
        capability: compute capability that an NVIDIA GPU needs.
    """

    name: str
    library: str
    kind: str
    moments: Moments | None
    math: str = "float32"
    rounding: str = "to nearest"
    arguments: tuple[str, ...] = ()
    paged: bool = False
    not_on_cpu: str = ""
    instead: str = ""
    refused: str = ""
    capability: tuple[int, int] = (0, 0)

    @property
    def install(self) -> str:
        """Command that installs its library where that is optional, else empty."""
        return _INSTALL.get(self.library, "")

    @property
    def state(self) -> str:
        """Type and count of the stored state, in words."""
        m = self.moments
        if m is None:
            return "not known here"
        if m.factored:
            return "float32, one number for each row and column"
        if not m.count:
            return "none (with momentum: the parameter's type)"
        shape = {1: "", 2: "2 × ", 3: "3 × "}[m.count]
        if not m.blockwise:
            return shape + ("float32" if m.bits else _OWN)
        form = "FP8 (E4M3)" if self.name == FP8_ADAMW else f"{m.bits} bits"
        return f"{shape}{form} in blocks of {BLOCK} with a float32 scale"


_INSTALL = {
    "bitsandbytes": "pip install 'fp8-finetune[bnb]'",
    "galore_torch": "pip install galore-torch",
    "apollo_torch": "pip install apollo-torch",
    "grokadamw": "pip install grokadamw",
    "schedulefree": "pip install schedulefree",
    "optimi": "pip install torch-optimi",
    "torchdistx": "build github.com/pytorch/torchdistx",
}

FP8_ADAMW = "adamw_torchao_fp8"
_OWN = "the parameter's type"
_TORCHAO = ("block_size", "bf16_stochastic_round")


def _ao(name: str, kind: str, bits: int, **kwargs: Any) -> Optimizer:
    rounding = "to nearest, or by chance (`train.optim_args=bf16_stochastic_round=true`)"
    moments = Moments(2, bits, small_bits=None)
    return Optimizer(
        name, "torchao", kind, moments, rounding=rounding, arguments=_TORCHAO, **kwargs
    )


def _bnb(name: str, kind: str, count: int, bits: int, arguments: tuple[str, ...] = ()) -> Optimizer:
    paged = name.startswith("paged_")
    plain = {"paged_adamw_32bit": "adamw_torch_fused", "paged_ademamix_32bit": "ademamix"}
    return Optimizer(
        name,
        "bitsandbytes",
        kind,
        Moments(count, bits, small_bits=32),
        arguments=arguments,
        paged=paged,
        not_on_cpu=PAGED_ON_CPU if paged else "",
        instead=plain.get(name, name.removeprefix("paged_")) if paged else "",
    )


def _other(name: str, library: str, kind: str, **kwargs: Any) -> Optimizer:
    return Optimizer(name, library, kind, None, arguments=("*",), **kwargs)


_ADEMAMIX = ("beta1", "beta2", "beta3", "alpha", "eps", "t_alpha", "t_beta3")

OPTIMIZERS = {
    optimizer.name: optimizer
    for optimizer in (
        Optimizer("adamw_torch", "torch", "AdamW", Moments(2), _OWN),
        Optimizer("adamw_torch_fused", "torch", "AdamW, one fused kernel", Moments(2)),
        _bnb("adamw_8bit", "AdamW", 2, 8),
        _bnb("adamw_bnb_8bit", "AdamW (the same as `adamw_8bit`)", 2, 8),
        _bnb("paged_adamw_8bit", "AdamW, paged", 2, 8),
        _bnb("paged_adamw_32bit", "AdamW, paged", 2, 32),
        _ao("adamw_torch_8bit", "AdamW", 8),
        _ao("adamw_torch_4bit", "AdamW", 4),
        _ao(FP8_ADAMW, "AdamW", 8, capability=(8, 9), instead="adamw_torch_8bit"),
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
        Optimizer(
            "rmsprop",
            "torch",
            "RMSprop",
            Moments(1),
            _OWN,
            arguments=("momentum", "alpha", "eps", "weight_decay", "centered"),
        ),
        Optimizer(
            "adagrad",
            "torch",
            "Adagrad",
            Moments(1),
            _OWN,
            arguments=("lr_decay", "weight_decay", "eps"),
        ),
        Optimizer(
            "sgd",
            "torch",
            "SGD",
            Moments(0),
            _OWN,
            arguments=("momentum", "dampening", "weight_decay", "nesterov"),
        ),
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
        *(
            _other(name, "", name, refused=IN_BACKWARD, instead=instead)
            for name, instead in {
                "lomo": "adamw_torch_4bit",
                "adalomo": "adamw_torch_4bit",
                "galore_adamw_layerwise": "galore_adamw",
                "galore_adamw_8bit_layerwise": "galore_adamw_8bit",
                "galore_adafactor_layerwise": "galore_adafactor",
                "apollo_adamw_layerwise": "apollo_adamw",
            }.items()
        ),
        *(
            _other(
                name,
                "",
                name,
                refused=f"it is for {device}, which this package does not support",
                instead="adamw_torch_fused",
            )
            for name, device in {"adamw_torch_xla": "TPUs", "adamw_torch_npu_fused": "NPUs"}.items()
        ),
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

    Args:
        facts: the optimizer.
        shape: of the parameter.
        element_size: bytes of one of its elements.
        embedding: it is the weight of an `nn.Embedding`.
    """
    m, numel = facts.moments, math.prod(shape)
    if m is None:
        return 0.0
    if m.factored and len(shape) > 1:  # Adafactor: Shazeer and Stern 2018, arXiv 1804.04235
        return 4.0 * (math.prod(shape[:-1]) + math.prod(shape[:-2]) * shape[-1])
    quantised = m.blockwise and numel >= SMALLEST_QUANTISED
    if facts.library == "torchao":
        quantised = quantised and numel % BLOCK == 0
    elif embedding:
        quantised = False
    if quantised:
        assert m.bits is not None
        return m.count * (numel * m.bits / 8 + SCALE_BYTES * math.ceil(numel / BLOCK))
    bits = m.small_bits if m.blockwise else m.bits
    return m.count * numel * (element_size if bits is None else bits / 8)


# ----------------------------------------------------------------------------------- documentation


def markdown_table() -> str:
    """The table of the README: optimizers whose state is known here."""
    header = (
        "| `train.optim` | algorithm | library | state is stored in | bytes per parameter | "
        "update computed in | weights rounded | on a CPU |\n|---|---|---|---|---|---|---|---|"
    )
    return "\n".join([header, *(_row(x) for x in OPTIMIZERS.values() if x.moments is not None)])


def _row(facts: Optimizer) -> str:
    moments = facts.moments
    assert moments is not None
    size = moments.bytes_per_parameter
    if moments.factored:
        shown = "rows and columns only"
    elif size is None:
        shown = f"{2 * moments.count} (bfloat16) or {4 * moments.count} (float32)"
    else:
        shown = f"{size:.2f}".rstrip("0").rstrip(".")
    library = facts.library + (" (extra `bnb`)" if facts.library == "bitsandbytes" else "")
    cpu = f"no: use `{facts.instead}`" if facts.not_on_cpu else "yes"
    cells = (f"`{facts.name}`", facts.kind, library, facts.state, shown)
    return "| " + " | ".join((*cells, facts.math, facts.rounding, cpu)) + " |"


# ------------------------------------------------------------------------------------------ checks
#
# Asked before anything is loaded: an optimizer that cannot be had, and arguments that a
# library would not read, are errors that say what to do.


def chosen(train: dict[str, Any]) -> Optimizer:
    """The optimizer of a `train` section; `adamw_torch_fused` when it names none.

    Raises:
        ConfigError: there is none of that name.
    """
    name = str(train.get("optim") or "adamw_torch_fused")
    check_name(name)
    return OPTIMIZERS[name]


def check_name(name: str, where: str = "train.optim") -> None:
    """Raise `ConfigError` with the nearest name unless there is such an optimizer."""
    if name not in OPTIMIZERS:
        hint = nearest(name, [known for known, facts in OPTIMIZERS.items() if not facts.refused])
        raise ConfigError(
            f"there is no optimizer {name!r}" + (f"; {hint}" if hint else ""),
            where=where,
            fix="adamw_torch_fused is the usual one; adamw_8bit and adamw_torch_4bit need less "
            "memory (README, Optimizers, lists all)",
        )


def check_optimizer(train: dict[str, Any]) -> None:
    """Refuse an optimizer that cannot be had anywhere, and arguments that would not act.

    Raises:
        ConfigError: names what to use instead.
    """
    facts = chosen(train)
    if facts.refused:
        raise cannot_have(facts, "anywhere", facts.refused, facts.instead)
    for key in arguments(train) if "*" not in facts.arguments else ():
        if key not in facts.arguments:
            hint = nearest(key, facts.arguments)
            known = ", ".join(facts.arguments)
            raise ConfigError(
                f"{facts.name} has no argument {key!r}" + (f"; {hint}" if hint else ""),
                where="train.optim_args",
                why="it would be ignored",
                fix=f"known: {known}" if known else "~train.optim_args",
            )


def cannot_have(facts: Optimizer, place: str, why: str, instead: str) -> ConfigError:
    return ConfigError(
        f"{facts.name} cannot be had {place}",
        where=f"train.optim={facts.name}",
        why=why,
        fix=f"train.optim={instead}",
    )


def arguments(train: dict[str, Any]) -> dict[str, str]:
    """`train.optim_args`, written `key=value,key=value`, as a mapping.

    Raises:
        ConfigError: not of that form.
    """
    text = str(train.get("optim_args") or "").replace(" ", "")
    pairs = [item.partition("=") for item in text.split(",") if item]
    for key, equals, value in pairs:
        if not (key and equals and value):
            raise ConfigError(
                f"train.optim_args cannot be {text!r}",
                where="train.optim_args",
                fix="write key=value,key=value",
            )
    return {key: value for key, _, value in pairs}
