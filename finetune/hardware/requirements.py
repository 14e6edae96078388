"""Requirements of a run on a device: a backend for its precision, optional libraries, an optimizer.

All are checked before anything is loaded. Nothing is replaced in silence: what is not available is
an error that names what to use instead, also an optimizer that a library would quietly replace by
another (a paged one on a CPU).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from finetune.config.optimizers import cannot_have, chosen
from finetune.config.schema import RunConfig
from finetune.config.train_keys import TrainSection
from finetune.errors import ConfigError, MissingExtraError, PrecisionError, install_hint
from finetune.hardware.device import (
    NO_ROWWISE,
    Device,
    Verdict,
    has_bitsandbytes,
    has_launcher,
    has_transformer_engine,
    has_triton,
    shown_capability,
    this_device,
)
from finetune.hardware.gpus import Machine
from finetune.hardware.versions import version
from finetune.precision.facts import BLOCK_CAPABILITY, ENGINES, FASTEST, EngineName
from finetune.precision.settings import FP8_ONLY, PrecisionConfig

FP8_GPUS = "a GPU with FP8 (RTX 4090, L40S, H100, H200, B200)"


AUTO_ORDER: tuple[EngineName, ...] = ("torchao", "te", "emulated")
"""Backends that `auto` tries, fastest first: `FASTER` has the evidence. Emulation comes last."""
UNCOMPILED_ORDER: tuple[EngineName, ...] = ("te", "torchao", "emulated")
"""The same with `compile=off`."""

FASTER: dict[EngineName, str] = {
    "torchao": "compiled it takes 750 ms for a full step of an 8B model on an H100 (measured); "
    "Transformer Engine 1,200 uncompiled (measured), 1.05x as long as torchao compiled (predicted)",
    "te": "uncompiled it takes half of torchao's time for a full step of an 8B model (predicted)",
}
"""Engine -> why `auto` takes it where the other one has the precision, too.

Measured: `docs/notes/15-on-an-h100.md`. Predicted: `tests.benchmarks.te_layer`; 880 ms and 1,688 by
`python -m finetune estimate llama_8b_full_fp8 --gpu H100 train.gradient_checkpointing=true
train.gradient_accumulation_steps=1 precision.compile=off precision.backend=te` (or `torchao`).
"""


Limit = tuple[str, dict[str, Any]]
"""What an engine lacks, and settings under which it lacks it no longer."""


def _limits(
    name: EngineName, precision: PrecisionConfig, device: Device | None = None
) -> Iterator[Limit]:
    """What an engine lacks of a precision on a device with FP8, or on whatever device.

    What is not here it has, from `least_capability` on.
    """
    if name not in precision.facts.engines:
        yield f"{ENGINES[name].shown} has no {precision.scaling} scaling", {}
    capability = device.capability if device and device.has_fp8 else None
    yield from _LIMITS[name](precision, capability[0] if capability else 0, device and device.name)


def _torchao_limits(p: PrecisionConfig, major: int, here: str | None) -> Iterator[Limit]:
    by_row = p.facts.by_row
    if by_row and p.fp8_format != "e4m3":
        yield "torchao's rowwise GEMMs take E4M3 operands only", {"format": "e4m3"}
    if p.fp8_format == "e5m2":
        yield "torchao's GEMMs take no pair of E5M2 operands", {"format": "hybrid"}
    if by_row and major == NO_ROWWISE:
        no = f"torch cannot multiply row-wise scales on {here} yet (torch 2.10, CUDA 13.0)"
        yield no, {"scaling": FASTEST}


def _emulation_limits(p: PrecisionConfig, major: int, here: str | None) -> Iterator[Limit]:
    if p.facts.has_history and p.compile_requested == "on":
        # Its casts write into a history that every layer shares.
        yield f"the emulation cannot compile {p.scaling} scaling", {"compile": "off"}


def _te_limits(p: PrecisionConfig, major: int, here: str | None) -> Iterator[Limit]:
    facts, high, engine = p.facts, p.high_gemms, "Transformer Engine"
    if p.fp8_format == "e5m2":
        yield f"{engine} has no pure E5M2", {"format": "hybrid"}
    if facts.has_history and p.pow2_scales:
        yield f"{engine}'s delayed scales are not powers of two", {"power_of_two_scales": None}
    if facts.has_history and high:
        yield f"{engine} keeps no GEMM high under delayed scaling", {"high_gemms": ()}
    if high and set(high) != {"dgrad", "wgrad"}:
        both = {"high_gemms": ("dgrad", "wgrad")}
        yield f"{engine} keeps dgrad and wgrad high together or not at all", both
    if facts.has_exponents and major >= 12:
        yield f"{engine} has no {p.scaling} on {here} yet", {}
    if facts.has_float_blocks and major >= BLOCK_CAPABILITY[0] and not p.pow2_scales:
        # Its blockwise recipe runs on MXFP8 there, whose scales are powers of two.
        no = f"{engine}'s block scales are powers of two on {here}"
        yield no, {"power_of_two_scales": None}


_LIMITS: dict[EngineName, Callable[[PrecisionConfig, int, str | None], Iterator[Limit]]] = {
    "torchao": _torchao_limits,
    "emulated": _emulation_limits,
    "te": _te_limits,
}


def engine_verdict(
    name: EngineName, precision: PrecisionConfig, device: Device | None = None
) -> Verdict:
    """True if an engine has this precision, on a device or on any at all; if not, what to use."""
    for no, settings in _limits(name, precision, device):
        ways = [_typed(settings)] if settings else []
        others = [x for x in AUTO_ORDER if not any(_limits(x, precision, device))]
        ways += [f"backend={x}" for x in others]
        return Verdict(False, f"{no}; use {' or '.join(ways)}" if ways else no)
    return Verdict(True, f"{ENGINES[name].shown} has it")


def backend_verdict(
    name: EngineName, precision: PrecisionConfig, device: Device, engine: Verdict | None = None
) -> Verdict:
    """True if backend `name` can run `precision` on `device`, and why.

    `engine` says whether Transformer Engine is there; default: whether it imports here.
    """
    if not (has := engine_verdict(name, precision, device)):
        return has
    if ENGINES[name].emulates:
        if precision.emulation != "forbid" or precision.engine.emulates:  # named: permitted
            return Verdict(True, "emulation is allowed: exact FP8 rounding, no FP8 speed")
        return Verdict(False, "precision.emulation=allow emulates FP8: exact, and slow")
    if not device.has_fp8 or device.capability is None:
        if not ENGINES[name].extra and precision.emulation != "forbid":
            return Verdict(True, "torchao's own emulation (emulate=True), no FP8 speed")
        return device.has_fp8
    needed = precision.facts.capability
    if device.capability < needed:
        no = f"{precision.scaling} needs compute capability {shown_capability(needed)}"
        return Verdict(False, f"{no}; {device.name} has less; backend=emulated has it")
    if ENGINES[name].extra:
        return engine or has_transformer_engine()
    return Verdict(True, f"torchao {version('torchao')} on {device.has_fp8.reason}")


@dataclass(frozen=True)
class Resolution:
    """A precision that this machine can train in.

    Attributes:
        precision: concrete: backend named, or compute changed to bf16 after a fall-back.
        asked: the recipe's precision.
        reason: reason for this backend.
        fallback: one line to be shown loudly, where FP8 was requested and BF16 will run.
    """

    precision: PrecisionConfig
    asked: PrecisionConfig
    reason: str
    fallback: str = ""

    @property
    def label(self) -> str:
        """Short name for a progress bar: `FP8 te/delayed`, `BF16`."""
        p = self.precision
        if p.compute != "fp8":
            return p.compute.upper()
        engine = "frozen" if p.frozen == "fp8" else p.backend
        return f"{p.low.upper()} {engine}/{p.scaling}"

    @property
    def described(self) -> str:
        """For a person to read: `FP8 (frozen base, row-wise scales)`, `BF16`."""
        p = self.precision
        if p.compute != "fp8":
            return self.label
        engine = "frozen base" if p.frozen == "fp8" else p.backend
        return f"{p.low.upper()} ({engine}, {p.facts.shown})"


def emulates(precision: PrecisionConfig, device: Device) -> bool:
    """True if a concrete precision multiplies in FP8 (or FP4) by exact rounding on this device."""
    return precision.compute == "fp8" and (precision.engine.emulates or not device.has_fp8)


def _in_bf16(precision: PrecisionConfig) -> PrecisionConfig:
    """The same run without FP8: settings of FP8 alone go back to their defaults."""
    update: dict[str, Any] = {"compute": "bf16", "backend": "auto"}
    update["map"] = {k: "bf16" if v == "fp8" else v for k, v in precision.map.items()}
    fields = PrecisionConfig.model_fields
    return precision.model_copy(update=update | {k: fields[k].default for k in FP8_ONLY})


def resolve(
    precision: PrecisionConfig, device: Device, engine: Verdict | None = None
) -> Resolution:
    """Choose the backend, or explain why there is none.

    Args:
        engine: whether Transformer Engine is there; default: whether it imports here.

    Raises:
        MissingExtraError: the backend asked for by name is not installed.
        PrecisionError: FP8 is not available and `on_unsupported` is `error`.
    """
    found = _found(precision, device, engine)
    if isinstance(found, Resolution):
        return found
    why, ways = _listed(found), [words for words, _ in _ways(precision, device)]
    if (extra := precision.engine.extra) and device.has_fp8 and "not installed" in why:
        install = f"{install_hint(extra)} (builds against your CUDA and torch)"
        raise MissingExtraError(
            "precision.backend=te needs Transformer Engine",
            why=why,
            fix=", or ".join([install, *ways]),
        )
    raise _not_available(precision, device, found, ways)


Refused = dict[EngineName, str]
"""Engine -> why it cannot run a precision."""


def _found(
    precision: PrecisionConfig, device: Device, engine: Verdict | None
) -> Resolution | Refused:
    """What runs on the device, or why each engine that was tried does not."""
    if precision.compute != "fp8":
        return Resolution(precision, precision, f"{precision.compute} was asked")
    names = _engines(precision)
    refused: Refused = {}
    for name in names:
        verdict = backend_verdict(name, precision, device, engine)
        # Torchao's emulation is a test vehicle: `auto` prefers ours, which is faster and complete.
        emulated = ENGINES[name].emulates
        hardware = bool(device.has_fp8) or emulated or precision.backend != "auto"
        if verdict and hardware:
            _check_kernels(precision, device, name)
            chosen = precision.model_copy(update={"backend": name})
            reason = verdict.reason
            if precision.frozen == "fp8" and device.has_fp8 and not emulated:
                reason = f"frozen layers by torch._scaled_mm, others by {name}: {reason}"
            if emulated and device.has_fp8 and refused:
                reason = f"{reason} ({_listed(refused)})"
            elif not emulated and precision.backend == "auto":
                reason = f"{reason}; {_preferred(name, precision, device)}"
            return Resolution(chosen, precision, reason)
        refused[name] = verdict.reason if hardware else device.has_fp8.reason
    if precision.on_unsupported == "bf16":
        line = f"FP8 was requested, BF16 will run ({_listed(refused)})"
        return Resolution(_in_bf16(precision), precision, "on_unsupported=bf16", fallback=line)
    return refused


def _not_available(
    precision: PrecisionConfig, device: Device, refused: Refused, ways: Iterable[str]
) -> PrecisionError:
    return PrecisionError(
        f"FP8 ({precision.scaling}, {precision.fp8_format}) is not available on {device.name}",
        where=f"precision.backend={precision.backend}",
        why=_listed(refused),
        fix=", or ".join(ways),
    )


def _engines(precision: PrecisionConfig) -> tuple[EngineName, ...]:
    """The backends to try, in this order."""
    if precision.backend != "auto":
        return (precision.backend,)
    return UNCOMPILED_ORDER if precision.compile_requested == "off" else AUTO_ORDER


def _preferred(name: EngineName, precision: PrecisionConfig, device: Device) -> str:
    """Why `auto` takes this engine of the two."""
    other: EngineName = next(one for one in AUTO_ORDER if one != name)
    return next((no for no, _ in _limits(other, precision, device)), FASTER[name])


def _listed(refused: Refused) -> str:
    """Engines and the reasons why they were refused."""
    alike = {no: [name for name in refused if refused[name] == no] for no in refused.values()}
    return "; ".join(f"{', '.join(names)}: {no}" for no, names in alike.items())


def _check_kernels(precision: PrecisionConfig, device: Device, backend: EngineName) -> None:
    """Raise where `precision.kernels=triton` cannot be honored."""
    can = device.has_fp8 and has_triton()
    if can and ENGINES[backend].emulates:
        can = Verdict(False, "an emulated GEMM takes its codes as BF16 numbers")
    if precision.kernels == "triton" and not can:
        raise PrecisionError(
            f"Triton kernels are not available on {device.name}",
            where="precision.kernels=triton",
            why=can.reason,
            fix="~precision.kernels",
        )


def compiles(precision: PrecisionConfig, device: Device) -> bool:
    """True if decoder layers are compiled: in FP8 on a GPU, if not emulated, or as asked."""
    requested = precision.compile_requested
    if requested != "auto" or device.kind != "cuda":
        return requested == "on"
    real = precision.engine.has_kernels or precision.frozen == "fp8"
    return precision.compute == "fp8" and real


COMPILING_S = 45.0
"""Seconds that compiling the layers of a model takes, whatever their number: they share graphs.

Measured on an H100, in 20 steps of 4 layers of 512: 42.6 s under torchao, 1.8 under Transformer
Engine (`docs/notes/15-on-an-h100.md`).
"""
SEEN_S = 0.05
"""Seconds saved in a micro-batch from which layers are compiled in a run of any length: of a model
this large a short run is there to see its speed."""
SAVED = {"frozen": 0.5, "te": 0.3, "torchao": 1.4}
"""Engine, or a base in FP8 -> seconds that compiled layers save, over those in which the GPU
multiplies as much in BF16 at its peak. Predicted, the least of H100, B200 and RTX 4090."""
LAYER_S = 1e-3
"""The same of the kernels that the host need not launch, for each layer. Predicted."""


def pays_to_compile(
    precision: PrecisionConfig, peak: float, flops: float, layers: int, batches: int
) -> Verdict:
    """True if compiled layers save more time in a run than compiling them takes.

        100 micro-batches of 6e12 FLOP, 12 layers, 989e12 FLOP/s: 2 s saved of the 45 that it takes

    Args:
        peak: dense peak in BF16, FLOP/s.
        flops: matmul FLOPs of a micro-batch.
        batches: micro-batches of the run.
    """
    engine = "frozen" if precision.frozen == "fp8" else precision.backend
    each = SAVED.get(engine, SAVED["torchao"]) * flops / peak + LAYER_S * layers
    saved = f"{each * batches:.2g} s of the {COMPILING_S:g} that it takes"
    said = f"compiling saves {batches:,} micro-batches {saved}"
    return Verdict(each >= SEEN_S or each * batches >= COMPILING_S, said)


def check_launcher(precision: PrecisionConfig, device: Device) -> None:
    """Refuse compiled layers, and kernels of our own, that could not be launched on this GPU.

    Args:
        precision: resolved.

    Raises:
        MissingExtraError: says what Triton lacks.
    """
    if device.kind != "cuda" or device != this_device():
        return
    frozen = precision.frozen == "fp8" and not precision.engine.emulates
    own = frozen and precision.kernels in ("auto", "triton")
    if (own or compiles(precision, device)) and not (can := has_launcher()):
        without = "precision.kernels=eager" if own else "precision.compile=off"
        raise MissingExtraError(
            f"Triton cannot run kernels on {device.name}",
            where="torch.compile, and casts of frozen weights",
            why=can.reason,
            fix="install a C compiler and Python's headers (apt-get install gcc python3-dev) or "
            f"set CC; or {without}, which is slower",
        )


def _ways(precision: PrecisionConfig, device: Device) -> Iterator[tuple[str, bool]]:
    """Settings under which it runs there, each of them tried; then what has FP8 units.

    With each, True if FP8 is emulated by it.
    """
    limits = () if precision.backend == "auto" else _limits(precision.backend, precision, device)
    tried = [settings for _, settings in limits if settings][:1]
    if not tried and precision.facts.by_row and precision.frozen != "bf16":
        tried.append({"scaling": FASTEST})
    if not precision.engine.emulates:
        others = [x for x in AUTO_ORDER[:-1] if x != precision.backend and device.has_fp8]
        tried += [{"backend": x} for x in others]
        tried += [{"backend": "emulated"}, {"backend": "emulated", "compile": "off"}]
    for update in tried:
        other = precision.model_copy(update=update)
        if any(backend_verdict(name, other, device) for name in _engines(other)):
            emulated = other.engine.emulates
            yield _typed(update) + " (exact FP8 rounding, slow)" * emulated, emulated
            if emulated:
                break
    half = device.capability is not None and device.capability < (8, 0)  # no BF16 either
    compute = "precision.compute=fp16" if half else "precision.compute=bf16"
    without = " ~precision.high_gemms" if precision.high_gemms else ""  # FP8's alone
    yield compute + without, False
    if not device.has_fp8:
        yield FP8_GPUS, False


def _typed(settings: Mapping[str, Any]) -> str:
    """Settings as they are typed: `precision.format=hybrid ~precision.high_gemms`."""
    words = []
    for key, value in settings.items():
        shown = f"[{','.join(value)}]" if isinstance(value, tuple) else value
        words.append(f"precision.{key}={shown}" if value else f"~precision.{key}")
    return " ".join(words)


TAKEN = Verdict(True, "Transformer Engine, taken to be installed there")


def resolve_there(precision: PrecisionConfig, machine: Machine) -> Resolution:
    """Precision executed on a machine, whatever is installed here.

    Transformer Engine is assumed installed there if a recipe names it or no other backend supports
    the requested precision.

    Raises:
        PrecisionError: FP8 is unavailable there.
    """
    engine = TAKEN if precision.engine.extra and not machine.here else None
    found = _found(precision, machine.device, engine)
    named = precision.backend != "auto" and not precision.engine.extra
    if not (isinstance(found, Resolution) or engine or named):
        # Here nothing runs it without Transformer Engine, which may be installed there.
        found = _found(precision, machine.device, TAKEN)
    if isinstance(found, Resolution):
        return found
    first = "--gpu H100, or another GPU, which need not be here"
    ways = list(_ways(precision, machine.device))
    if not machine.here:  # a plan for a GPU is of what is trained there: not emulated
        first, ways = "the recipe's _bf16 twin", [way for way in ways if not way[1]]
        if precision.backend == "auto":
            found = Refused((name, no) for name, no in found.items() if not ENGINES[name].emulates)
    raise _not_available(precision, machine.device, found, [first, *(words for words, _ in ways)])


# ---------------------------------------------------------------------------- libraries, optimizer

TRACKERS = ("wandb", "trackio", "tensorboard")


def check_here(config: RunConfig, device: Device) -> None:
    """Refuse settings whose library is not installed, or cannot run on this device.

    Raises:
        MissingExtraError: an optional library is not installed.
        ConfigError: an optimizer, or Liger's kernels, cannot run here.
    """
    train = config.train
    reports = train.report_to
    for name in [reports] if isinstance(reports, str) else reports:
        if name in TRACKERS:
            require(f"train.report_to={name}", name, install_hint("tracking"))
    if config.model.storage == "nf4":
        require("model.storage=nf4", "bitsandbytes", install_hint("bnb"))
        _check_bitsandbytes("model.storage=nf4", "model.storage=fp8", device)
    optimizer, liger = chosen(train), train.use_liger_kernel
    if optimizer.install:
        require(f"train.optim={optimizer.name}", optimizer.library, optimizer.install)
    if optimizer.library == "bitsandbytes":
        _check_bitsandbytes(f"train.optim={optimizer.name}", "train.optim=adamw_torch_8bit", device)
    if liger:
        require("train.use_liger_kernel", "liger_kernel", install_hint("liger"))
    if config.eval.tasks:
        require("eval.tasks", "lm_eval", install_hint("eval"))
    check_optimizer_here(train, device)
    if liger and device.kind == "cpu":
        raise ConfigError(
            "Liger's kernels were requested on a CPU",
            where="train.use_liger_kernel",
            why="they are written in Triton, which compiles for GPUs",
            fix="~train.use_liger_kernel, or run on a GPU",
        )


def require(setting: str, module: str, install: str) -> None:
    """Raise `MissingExtraError` unless a module that a setting needs is installed."""
    if importlib.util.find_spec(module) is None:
        what = f"{setting} needs {module}, which is not installed"
        raise MissingExtraError(what, where=setting, fix=install)


def _check_bitsandbytes(setting: str, instead: str, device: Device) -> None:
    """Raise `MissingExtraError` where bitsandbytes has no kernels for the GPU of this machine."""
    if device.kind != "cuda" or device != this_device():
        return
    if not (can := has_bitsandbytes()):
        raise MissingExtraError(
            f"{setting} cannot run on {device.name}",
            where=setting,
            why=can.reason,
            fix="pip install -U bitsandbytes (`python -m bitsandbytes` says what it lacks), or "
            f"{instead}",
        )


BITSANDBYTES_ON_CPU = (0, 50)
"""First release whose optimizers step on CPUs (bitsandbytes changelog, 0.50)."""


def check_optimizer_here(train: TrainSection, device: Device) -> None:
    """Refuse an optimizer that cannot step on this device.

    Raises:
        ConfigError: names what to use instead.
    """
    facts = chosen(train)
    if device.kind == "cpu":
        why, instead = facts.not_on_cpu, facts.instead
        if not why and facts.library == "bitsandbytes":
            found, instead = version("bitsandbytes") or "0.0", "adamw_torch_8bit"
            if tuple(int(part) for part in found.split(".")[:2]) < BITSANDBYTES_ON_CPU:
                why = (
                    f"bitsandbytes {found} steps on GPUs only; from 0.50 on it steps on a CPU "
                    f"too ({install_hint('bnb')})"
                )
        if why:
            raise cannot_have(facts, f"on {device.name}", why, instead)
    elif device.capability is not None and device.capability < facts.capability:
        needed, here = map(shown_capability, (facts.capability, device.capability))
        why = f"its FP8 casts need compute capability {needed}; this GPU has {here}"
        raise cannot_have(facts, f"on {device.name}", why, facts.instead)
