"""One precision in force over Accelerate, from `install` to `uninstall`.

Accelerate's own FP8 path is not used at all (what it does is told in FP8_FINDINGS.md). Instead the
accelerator runs in BF16 mixed precision, which is what everything outside FP8 GEMMs shall have,
and `Accelerator.prepare` first converts the model by our plan. Three methods of `Accelerator` are
patched while a session is in force (and by the helper `Trainer.train`, for `HealthMonitor`); the
receipt lists them and `uninstall` takes them away. What other compute types need is in
`finetune.training.compute_types` and `finetune.training.compute_types`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import platform
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from finetune.config.schema import PrecisionConfig
from finetune.errors import OrderError, PrecisionError
from finetune.hardware.device import Device, Resolution, resolve, this_device, version
from finetune.precision import convert
from finetune.precision.backends.base import Backend
from finetune.precision.formats import E4M3
from finetune.precision.holdings import held_weights, iter_weights, refuse_quantised
from finetune.precision.layers import iter_parameters
from finetune.precision.lora import fused_adapters
from finetune.precision.planner import plan
from finetune.precision.proof.movement import is_torchao
from finetune.precision.proof.proof import Proof, named_trainable
from finetune.precision.weights import before_sharding, share_scales
from finetune.runs.receipt import Receipt
from finetune.training import compute_types, guards, low_bit

LIBRARIES = (
    "torch",
    "transformers",
    "trl",
    "peft",
    "accelerate",
    "datasets",
    "torchao",
    "transformer-engine",
    "bitsandbytes",
    "liger-kernel",
    "triton",
)

AUTOCAST = {"fp8": "bf16", "bf16": "bf16", "fp16": "fp16", "fp32": "no"}
"""What Accelerate's mixed precision shall be: around FP8 GEMMs everything runs in BF16."""


class Session:
    """One precision in force, from `install` to `uninstall`.

    Attributes:
        resolution: the concrete precision and why.
        conversions: of the models that were prepared under it and are still alive.
        proofs: one for each of them that trains; the last is the one the receipt tells of.
        patches: dotted names of what is patched.
    """

    def __init__(self, resolution: Resolution, device: Device) -> None:
        self.resolution, self.device = resolution, device
        self.precision = resolution.precision
        self.conversions: weakref.WeakSet[convert.Conversion] = weakref.WeakSet()
        self.proofs: list[Proof] = []
        self.patches: list[str] = []
        self.compiled = "off"
        self._accelerators: weakref.WeakSet[Any] = weakref.WeakSet()
        self._undo: list[Callable[[], None]] = []
        self._patched: list[tuple[type, str, Any]] = []

    # ------------------------------------------------------------------------------------ patches

    def install(self) -> None:
        """Patch `Accelerator` so that what is prepared from now on follows this session."""
        from accelerate import Accelerator

        self.patch(Accelerator, "__init__", self._make_init)
        self.patch(Accelerator, "prepare", self._make_prepare)
        self.patch(Accelerator, "prepare_model", self._make_prepare_model)

    def uninstall(self, *, replaced: bool = False) -> None:
        """Take patches away and give every model its plain layers back.

        Args:
            replaced: another session follows. Then a model of this one that goes on training
                without being prepared again is an error, not a silent BF16 run.
        """
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()
        self.patches.clear()
        self._patched.clear()
        for proof in self.proofs:
            proof.release()
        for conversion in list(self.conversions):
            conversion.revert()
            if replaced:
                guards.guard(conversion.model)

    def patch(self, owner: type, name: str, make: Callable[[Any], Any]) -> None:
        """Replace a method by `make(method)` until the session ends."""
        original = getattr(owner, name)
        setattr(owner, name, functools.wraps(original)(make(original)))
        self._undo.append(lambda: setattr(owner, name, original))
        self._patched.append((owner, name, original))
        self.patches.append(f"{owner.__module__}.{owner.__qualname__}.{name}")

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Take the patches away for a while: what is prepared meanwhile is not of this session."""
        patches = [(owner, name, getattr(owner, name)) for owner, name, _ in self._patched]
        for owner, name, original in reversed(self._patched):
            setattr(owner, name, original)
        try:
            yield
        finally:
            for owner, name, patch in patches:
                setattr(owner, name, patch)

    def _make_init(self, original: Any) -> Any:
        from accelerate.state import AcceleratorState

        session, signature = self, inspect.signature(original)

        def init(accelerator: Any, *args: Any, **kwargs: Any) -> None:
            given = signature.bind(accelerator, *args, **kwargs).arguments
            session._refuse_conflicts(given)
            given["mixed_precision"] = AUTOCAST[session.precision.compute]
            del given["self"]
            # Accelerate remembers its first configuration process-wide: an earlier precision would
            # be refused, and a trainer's FSDP or compile settings ignored without a word.
            AcceleratorState._reset_state()
            fp16 = session.precision.compute == "fp16"
            if fp16:
                compute_types.hand_over(given, session.precision)
            original(accelerator, **given)
            if fp16:
                compute_types.complete(accelerator, session.precision)
            session._accelerators.add(accelerator)

        return init

    def _refuse_conflicts(self, given: dict[str, Any]) -> None:
        if self.precision.compute == "fp8" and str(given.get("mixed_precision")) == "fp16":
            raise PrecisionError(
                "FP8 was set up, and this trainer asks for FP16",
                where="fp16=True or mixed_precision='fp16'",
                why="FP8 training keeps everything else in BF16; FP16 needs loss scaling, which "
                "delayed and current FP8 scales would see as exploding gradients",
                fix="leave fp16 out, or call teardown_fp8_mixed_precision_training() first",
            )
        names = {type(handler).__name__ for handler in given.get("kwargs_handlers") or ()}
        clash = names & {"TERecipeKwargs", "AORecipeKwargs", "FP8RecipeKwargs", "MSAMPRecipeKwargs"}
        if clash:
            raise PrecisionError(
                "FP8 was set up twice: by the helper and by Accelerate's own recipe handlers",
                where=f"kwargs_handlers={sorted(clash)}",
                why="both would convert the model",
                fix="pass those settings to setup_fp8_mixed_precision_training instead",
            )

    def _make_prepare(self, original: Any) -> Any:
        session = self

        def prepare(accelerator: Any, *args: Any, **kwargs: Any) -> Any:
            models = [a for a in args if isinstance(a, nn.Module)]
            if models:
                session._check_accelerator(accelerator)
            for model in sorted(models, key=_multiplies, reverse=True):
                # A loss or a temperature beside the model has nothing to convert.
                if _multiplies(model) or not len(session.conversions):
                    session.prepare_model(model)
            for optimizer in args:
                if isinstance(optimizer, Optimizer):
                    session._prepare_optimizer(optimizer)
            if "FSDP" not in str(accelerator.distributed_type):
                return original(accelerator, *args, **kwargs)
            for model in models:
                before_sharding(model)
            prepared = original(accelerator, *args, **kwargs)
            for model in models if accelerator.state.fsdp_plugin.cpu_ram_efficient_loading else ():
                share_scales(model)
            return prepared

        return prepare

    def _prepare_optimizer(self, optimizer: Optimizer) -> None:
        from accelerate.optimizer import AcceleratedOptimizer

        if isinstance(optimizer, AcceleratedOptimizer):  # prepared before: a second train()
            optimizer = optimizer.optimizer
        self._undo.append(guards.watch_owner(optimizer, self.conversions))
        if self.precision.compute == "fp16":
            compute_types.skip_like_any_other(optimizer)
        if self.device.kind == "cpu" and is_torchao(optimizer):
            self._undo.append(low_bit.step_uncompiled(optimizer))

    def _make_prepare_model(self, original: Any) -> Any:
        session = self

        def prepare_model(accelerator: Any, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if _multiplies(model):
                session._check_accelerator(accelerator)
                session.prepare_model(model)
            return original(accelerator, model, *args, **kwargs)

        return prepare_model

    def _check_accelerator(self, accelerator: Any) -> None:
        if accelerator not in self._accelerators:
            raise OrderError(
                f"this trainer was built before {self.resolution.asked.compute.upper()} was set up",
                where="Trainer() or Accelerator() came before setup_fp8_mixed_precision_training()",
                why="its Accelerator was made for another precision; it would train in BF16",
                fix="call setup_fp8_mixed_precision_training() first, then build the trainer",
            )
        if str(accelerator.distributed_type).rpartition(".")[2] in ("DEEPSPEED", "MEGATRON_LM"):
            raise PrecisionError(
                "FP8 with DeepSpeed or Megatron-LM is not supported",
                where=f"distributed_type={accelerator.distributed_type}",
                why="their engines replace forward and optimizer, past what can be proven here",
                fix="use FSDP2 (train.fsdp, fsdp_version 2) or DDP",
            )
        if self.precision.fp8_params and "FSDP" in str(accelerator.distributed_type):
            raise PrecisionError(
                "fp8_params with FSDP is not supported",
                where="precision.fp8_params=true",
                why="FSDP gathers each weight anew for every use, so there is nothing to hold",
                fix="~precision.fp8_params; or use DDP",
            )
        if accelerator.state.dynamo_plugin.backend.value != "NO":
            raise PrecisionError(
                "torch_compile of the whole model does not go with the proof",
                where="torch_compile=True, or the dynamo settings of accelerate",
                why="a model that torch.compile first meets under the witness is never compiled",
                fix="leave torch_compile out and set precision.compile=on (compile='on' in the "
                "helper): each decoder layer is compiled after the witnessed step",
            )

    # -------------------------------------------------------------------------------- preparation

    def prepare_model(self, model: nn.Module) -> convert.Conversion:
        """Plan and convert `model` (once a session), and start its proof if it trains."""
        known = convert.conversion_of(model)
        if known is not None and known in self.conversions and known.is_current():
            return known
        convert.revert(model)  # also models inside it that were prepared by themselves
        guards.unguard(model)
        if self.resolution.asked.compute == "fp8":  # also where BF16 stands in for it
            refuse_quantised(model, self.resolution.asked)
        match self.precision.compute:
            case "fp16":
                compute_types.refuse_half_weights(model)
            case "fp32":
                self._undo.append(compute_types.make_exact())
            case _:
                pass
        self._choose_engine_for(model)
        before = {name: p.numel() for name, p in named_trainable(model).items()}
        the_plan = plan(model, self.precision)
        conversion = convert.apply(model, the_plan, hardware=bool(self.device.has_fp8))
        self.conversions.add(conversion)
        if the_plan.held:
            _tell_configuration(model)
        if before:
            # A finished proof keeps its model alive: only the last is needed, for the receipt.
            for proof in self.proofs:
                if not proof.is_open:
                    proof.release()
            self.proofs = [proof for proof in self.proofs if proof.is_open]
            self.proofs.append(Proof(conversion, before, lambda: self._after_gemms(conversion)))
        else:
            self._compile(conversion)
        return conversion

    def _after_gemms(self, conversion: convert.Conversion) -> None:
        if self.precision.compute == "fp32":
            compute_types.check_exact()
        self._compile(conversion)

    def _choose_engine_for(self, model: nn.Module) -> None:
        """`auto` prefers Transformer Engine, which has no door for weights that are no layers."""
        r = self.resolution
        takes = r.asked.backend == "auto" and self.precision.backend == "te"
        if not takes or next(iter_parameters(model), None) is None:
            return
        try:
            other = resolve(r.asked.model_copy(update={"backend": "torchao"}), self.device)
        except PrecisionError:  # torchao cannot have it: the plan says what then stays high
            return
        why = "the model multiplies by plain parameters, which Transformer Engine cannot"
        reason = f"{other.reason}; {why}"
        self.resolution = Resolution(other.precision, r.asked, reason)
        self.precision = other.precision

    def _compile(self, conversion: convert.Conversion) -> None:
        wanted, backend = self.precision.compile, self.precision.backend
        on_gpu = self.device.kind == "cuda"
        eager_casts = backend == "torchao" or conversion.frozen is not None
        casts_unfused = self.precision.compute == "fp8" and eager_casts and on_gpu
        if wanted == "off":
            slow = "; casts are not fused, slower than BF16" if casts_unfused else ""
            self.compiled = f"off: asked{slow}"
        elif wanted == "auto" and not casts_unfused:
            self.compiled = "off: only torchao and frozen weights on a GPU need it"
        elif count := conversion.compile_layers():
            left_out = "; forwards that multiply by parameters are left out"
            self.compiled = f"on: {count} decoder layers, after the witnessed step" + (
                left_out if conversion.plan.fp8_parameters else ""
            )
        elif conversion.plan.fp8_parameters:
            self.compiled = "off: the decoder layers multiply by parameters, and are left out"
        else:
            self.compiled = "off: no decoder layers found to compile"

    # ------------------------------------------------------------------------------------ receipt

    @property
    def training(self) -> tuple[Proof | None, convert.Conversion | None]:
        """Proof and conversion of the model that trains (the last one prepared)."""
        proof = self.proofs[-1] if self.proofs else None
        return proof, proof.conversion if proof else None

    def receipt(self) -> Receipt:
        """The receipt of the model that trains (the last one prepared)."""
        r, p = self.resolution, self.precision
        proof, conversion = self.training
        share = dict(proof.flop_share) if proof else {}
        engines = conversion.engines if conversion else []
        low = next((k for k in ("fp8", "fp4") if share.get(k)), "")
        ran = low or max(share, key=lambda k: share[k], default="nothing")
        return Receipt(
            status=proof.status if proof else "not proven: nothing was trained",
            precision={
                "asked": r.asked.compute,
                "ran": ran,
                "backend": "+".join(e.name for e in engines) if p.compute == "fp8" else "",
                "scaling": p.scaling if p.compute == "fp8" else "",
                "format": _format(p, engines) if p.compute == "fp8" else "",
                "effective": _effective_of(engines) or self._effective(),
                "reason": r.reason,
                "fallback": r.fallback,
                "storage": held_weights(conversion.model) if conversion else {},
                "forced": dict(conversion.plan.forced) if conversion else {},
                "compile": self.compiled,
                "evaluation": p.eval if p.compute == "fp8" else "high",
                "adapters": fused_adapters(conversion.fused) if conversion else "",
            },
            fp8_flop_share=share.get("fp8", 0.0) + share.get("fp4", 0.0),
            flop_share=share,
            trainable=dict(proof.trainable) if proof else {},
            layers=proof.layers if proof else [],
            environment=self._environment(),
        )

    def _effective(self) -> dict[str, Any]:
        """What is in force beside FP8, in torch's words."""
        if self.precision.compute == "fp32":
            return {"fp32_precision": compute_types.in_force()}
        if self.precision.compute == "fp16":
            return {"loss_scaling": compute_types.scaler_arguments(self.precision)}
        return {}

    def _environment(self) -> dict[str, Any]:
        import torch.distributed as dist

        d = self.device
        return {
            "versions": {"python": platform.python_version()}
            | {name: v for name in LIBRARIES if (v := version(name))},
            "device": {
                "kind": d.kind,
                "name": d.name,
                "capability": ".".join(map(str, d.capability)) if d.capability else None,
                "memory_gib": round(d.memory_gib, 1),
            },
            "processes": dist.get_world_size() if dist.is_initialized() else 1,
            "seed": torch.initial_seed(),
            "patches": list(self.patches),
        }


def _effective_of(engines: list[Backend]) -> dict[str, Any]:
    """What is in force in the engines' own words; of frozen weights under a name of its own."""
    found: dict[str, Any] = {}
    for engine in engines:
        found |= {"frozen": engine.effective()} if engine.name == "frozen" else engine.effective()
    return found


def _format(precision: PrecisionConfig, engines: list[Backend]) -> str:
    if [engine.name for engine in engines] == ["frozen"]:
        return E4M3.name
    return "e2m1" if precision.low == "fp4" else precision.fp8_format


_session: Session | None = None


def _tell_configuration(model: nn.Module) -> None:
    """Say in a model's configuration what is held in FP8, should it be saved."""
    from peft import PeftModel
    from transformers import PreTrainedModel

    from finetune.storage.quantizer import describe

    base = model.get_base_model() if isinstance(model, PeftModel) else model
    if isinstance(base, PreTrainedModel):
        describe(base)


def _multiplies(module: nn.Module) -> bool:
    return next(iter(iter_weights(module)), None) is not None


def install(precision: PrecisionConfig) -> Session:
    """Put a precision in force for everything prepared by Accelerate from now on.

    A second call replaces the first. Used by the helper and by `finetune.training.trainer` alike.

    Raises:
        PrecisionError: it cannot be had on this machine.
    """
    global _session
    device = this_device()
    resolution = resolve(precision, device)
    _end(replaced=True)
    session = Session(resolution, device)
    session.install()
    _session = session
    return session


def uninstall() -> None:
    """End the session in force, if any."""
    _end(replaced=False)


def _end(*, replaced: bool) -> None:
    global _session
    if _session is not None:
        _session.uninstall(replaced=replaced)
        _session = None


def in_force() -> Session | None:
    """The session in force, None when there is none."""
    return _session


def aside() -> contextlib.AbstractContextManager[None]:
    """Work as if no session were in force."""
    return _session.aside() if _session is not None else contextlib.nullcontext()


def current() -> Session:
    """The session in force.

    Raises:
        OrderError: there is none.
    """
    if _session is None:
        raise OrderError(
            "there is no receipt: FP8 was not set up, or already torn down",
            fix="call setup_fp8_mixed_precision_training() and train; ask before teardown",
        )
    return _session
