"""The session: one precision in force for everything that is prepared from `install` on.

    install ─> patches of Accelerator ─> a model is prepared: planned, converted, its proof begun
                                      ─> its first step: witnessed, then layers are compiled
    receipt <─ proof and conversion of the model that trains

A recipe's session is given the resolution and the plan that preflight made; the helper's makes its
own, since it sees each model first when that is prepared.
"""

from __future__ import annotations

import contextlib
import platform
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from rich.console import Console
from torch import nn
from torch.optim import Optimizer

from finetune.config.schema import PrecisionConfig
from finetune.errors import OrderError, PrecisionError
from finetune.hardware.device import Device, Resolution, resolve, this_device, version
from finetune.precision import convert
from finetune.precision.backends.base import Backend
from finetune.precision.formats import E4M3
from finetune.precision.layers import iter_linears, iter_parameters, iter_weights
from finetune.precision.lora import fused_adapters
from finetune.precision.planner import PrecisionPlan, plan, refuse_quantized
from finetune.precision.proof.movement import is_torchao
from finetune.precision.proof.proof import Proof, named_trainable
from finetune.precision.stored import StoredMixin, stored_as, stored_weights
from finetune.precision.weights import serves
from finetune.runs.receipt import Receipt
from finetune.training import compute_types, guards, low_bit
from finetune.training.compile import compile_layers
from finetune.training.patches import Patches, patch_accelerator

LIBRARIES = (
    *("torch", "transformers", "trl", "peft", "accelerate", "datasets", "torchao"),
    *("transformer-engine", "bitsandbytes", "liger-kernel", "triton"),
)
"""Distributions whose versions the receipt has."""


class Session:
    """One precision in force, from `install` to `uninstall`.

    Attributes:
        resolution: the concrete precision and why.
        precision: the same without the reason.
        planned: plan of the run's sketch, None where no sketch was made.
        conversions: of the models that were prepared under it and are still alive.
        proofs: one for each of them that trains; the receipt is that of the last.
        patches: what is patched while it is in force.
        compiled: which layers are compiled, and why.
    """

    def __init__(
        self, resolution: Resolution, device: Device, planned: PrecisionPlan | None = None
    ) -> None:
        self.resolution, self.device, self.planned = resolution, device, planned
        self.precision = resolution.precision
        self.conversions: weakref.WeakSet[convert.Conversion] = weakref.WeakSet()
        self.proofs: list[Proof] = []
        self.patches = Patches()
        self.compiled = "off"
        self._undo: list[Callable[[], None]] = []

    def begin(self) -> None:
        """Patch `Accelerator` so that what is prepared from now on follows this session."""
        patch_accelerator(
            self.patches, self.resolution, self._prepare_models, self._prepare_optimizer
        )

    def end(self, *, replaced: bool = False) -> None:
        """Take patches away and give every model its plain layers back.

        Args:
            replaced: another session follows. Then a model of this one that goes on training
                without being prepared again is an error, not a silent BF16 run.
        """
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()
        self.patches.restore()
        for proof in self.proofs:
            proof.release()
        for conversion in list(self.conversions):
            conversion.revert()
            if replaced:
                guards.guard(conversion.model)

    # -------------------------------------------------------------------------------- preparation

    def _prepare_models(self, models: Sequence[nn.Module]) -> None:
        for model in sorted(models, key=guards.multiplies, reverse=True):
            # A loss or a temperature beside the model has nothing to convert.
            if guards.multiplies(model) or not len(self.conversions):
                self.prepare_model(model)

    def prepare_model(self, model: nn.Module) -> convert.Conversion:
        """Plan and convert `model` (once a session), and start its proof if it trains."""
        known = convert.conversion_of(model)
        if known is not None and known in self.conversions and known.is_current():
            return known
        convert.revert(model)  # also models inside it that were prepared by themselves
        guards.unguard(model)
        if self.resolution.asked.compute == "fp8":  # also where BF16 stands in for it
            refuse_quantized(model, self.resolution.asked)
        if self.precision.compute == "fp16":
            compute_types.refuse_half_weights(model)
        if self.precision.compute == "fp32":
            self._undo.append(compute_types.make_exact())
        self._choose_engine_for(model)
        before = {name: p.numel() for name, p in named_trainable(model).items()}
        made = self.planned
        if made is None or made.precision != self.precision or not _is_of(made, model):
            made = plan(model, self.precision)
        conversion = convert.apply(model, made, hardware=bool(self.device.has_fp8))
        self.conversions.add(conversion)
        if made.stored:
            _describe_storage(model)
        if before:
            # A finished proof keeps its model alive: only the last is needed, for the receipt.
            for proof in self.proofs:
                if not proof.is_open:
                    proof.release()
            self.proofs = [proof for proof in self.proofs if proof.is_open]
            self.proofs.append(Proof(conversion, before, lambda: self._after_gemms(conversion)))
        else:
            self.compiled = compile_layers(conversion, self.precision, self.device)
        return conversion

    def _after_gemms(self, conversion: convert.Conversion) -> None:
        """After the witnessed step: look at float32 once more, compile."""
        if self.precision.compute == "fp32":
            compute_types.check_exact()
        self.compiled = compile_layers(conversion, self.precision, self.device)

    def _choose_engine_for(self, model: nn.Module) -> None:
        """`auto` prefers Transformer Engine, which cannot take weights that are no layers."""
        r = self.resolution
        takes = r.asked.backend == "auto" and self.precision.backend == "te"
        if not takes or next(iter_parameters(model), None) is None:
            return
        try:
            other = resolve(r.asked.model_copy(update={"backend": "torchao"}), self.device)
        except PrecisionError:  # torchao cannot have it: the plan says what then stays high
            return
        why = "the model multiplies by plain parameters, which Transformer Engine cannot"
        self.resolution = Resolution(other.precision, r.asked, f"{other.reason}; {why}")
        self.precision = other.precision

    def _prepare_optimizer(self, optimizer: Optimizer) -> None:
        from accelerate.optimizer import AcceleratedOptimizer

        if isinstance(optimizer, AcceleratedOptimizer):  # prepared before: a second train()
            optimizer = optimizer.optimizer
        self._undo.append(guards.watch_owner(optimizer, self.conversions))
        if self.precision.compute == "fp16":
            compute_types.skip_like_any_other(optimizer)
        if self.device.kind == "cpu" and is_torchao(optimizer):
            self._undo.append(low_bit.step_uncompiled(optimizer))

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
                "storage": stored_weights(conversion.model) if conversion else {},
                "forced": dict(conversion.plan.overrides) if conversion else {},
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
            "patches": self.patches.names,
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


def _is_of(made: PrecisionPlan, model: nn.Module) -> bool:
    """Whether the plan of a sketch holds for the loaded model: the same layers, stored as planned.

    A base stored in four bits or published in FP8, which the sketch has not, is planned anew: its
    rows say so.
    """
    rows = {row.name: row for row in made.layers}
    found = {name: (shape, not w.requires_grad) for name, w, shape in iter_weights(model)}
    if found != {name: (row.shape, row.frozen) for name, row in rows.items()}:
        return False
    for name, module, shape in iter_linears(model):
        if isinstance(module, StoredMixin):
            held = rows[name].stored
            if not held or not serves(module.stored_tile, shape, held):
                return False
        elif stored_as(module):
            return False
    return True


def _describe_storage(model: nn.Module) -> None:
    """Record in a model's configuration what is held in FP8, in case it is saved."""
    from peft import PeftModel
    from transformers import PreTrainedModel

    from finetune.storage.quantizer import describe

    base = model.get_base_model() if isinstance(model, PeftModel) else model
    if isinstance(base, PreTrainedModel):
        describe(base)


# ---------------------------------------------------------------------------------------- in force

_session: Session | None = None


def install(
    precision: PrecisionConfig | Resolution, planned: PrecisionPlan | None = None
) -> Session:
    """Put a precision in force for everything prepared by Accelerate from now on.

    A second call replaces the first.

    Args:
        precision: requested, or as it was resolved already.
        planned: plan of the sketch of the model that will be prepared, where one was made.

    Raises:
        PrecisionError: it cannot be had on this machine.
    """
    global _session
    device = this_device()
    known = isinstance(precision, Resolution)
    session = Session(precision if known else resolve(precision, device), device, planned)
    _end(replaced=True)
    session.begin()
    _session = session
    return session


def uninstall() -> None:
    """End the session in force, if any."""
    _end(replaced=False)


def _end(*, replaced: bool) -> None:
    global _session
    if _session is not None:
        _session.end(replaced=replaced)
        _session = None


@contextlib.contextmanager
def session_of(
    resolution: Resolution, planned: PrecisionPlan | None, console: Console
) -> Iterator[Session]:
    """The session of a run, as a block; a fall-back to BF16 is printed loudly."""
    session = install(resolution, planned)
    try:
        if resolution.fallback:
            console.print(f"[bold red]! {resolution.fallback}[/]", highlight=False)
        yield session
    finally:
        uninstall()


def in_force() -> Session | None:
    """The session in force, None when there is none."""
    return _session


def aside() -> contextlib.AbstractContextManager[None]:
    """Work as if no session were in force."""
    return _session.patches.aside() if _session is not None else contextlib.nullcontext()


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
