"""Session: one precision in effect for everything prepared after `install`.

    install ─> patches of Accelerator ─> a model is prepared: planned, converted, its proof begun
                                      ─> its first step: witnessed, then layers are compiled
    receipt <─ proof and conversion of the model that trains

A recipe's session takes its resolution from preflight, the helper's makes its own; each model is
planned when it is prepared.

*Compiling* (`precision.compile`). Each decoder layer is compiled separately, after the witnessed
step, since a model first run under the witness is never compiled. `auto` compiles what runs in FP8
on a GPU: there is much to fuse around products that are fast, and torchao's casts are separate
kernels otherwise; and where the run is long enough (`pays_to_compile`). On a CPU nothing is gained.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from typing import Any

import torch
from rich.console import Console
from rich.text import Text
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from finetune.errors import OrderError, PlanError, PrecisionError
from finetune.hardware.device import Device, expand_segments, starts_triton, this_device
from finetune.hardware.gpus import find_gpu
from finetune.hardware.requirements import Resolution, pays_to_compile, resolve
from finetune.hardware.unpromised import stands
from finetune.hardware.versions import table, version
from finetune.precision import convert
from finetune.precision.convert import Conversion
from finetune.precision.model.compiling import recomputed, refuse_compiled
from finetune.precision.model.layers import Record, multiplies, records, without_adapters
from finetune.precision.model.plan import PrecisionPlan
from finetune.precision.model.tree import Tree, named_trainable
from finetune.precision.planner import plan, refuse_half_weights, refuse_quantized
from finetune.precision.proof.proof import Proof
from finetune.precision.settings import PrecisionConfig
from finetune.runs.receipt import Receipt
from finetune.training.helper import compute_types
from finetune.training.helper.checkpoint_weights import load_all_weights, refuse_unsaved_experts
from finetune.training.helper.evidence import conditions_of, receipt_of
from finetune.training.helper.optimizer_checks import OptimizerChecks, drop
from finetune.training.helper.patches import patch_accelerator
from finetune.training.helper.references import References
from finetune.training.helper.replacing import Patches
from finetune.training.helper.scaling_state import keep_in_trainers
from finetune.training.helper.updates import Updates


class Session:
    """One precision in effect, from `install` to `uninstall`.

    Attributes:
        conversions: conversions of the models prepared under it that are still alive.
        compiled: compiled layers, and why.
        gathered: type in which FSDP2 gathers weights; None: none are sharded.
        loss_scaling: settings of float16's scaler.
        micro_batches: those of the run that begins; None if unknown.
        again: puts the session of a script into effect again, after a run of a recipe.
        undo: what is undone when the session ends.
        updates: steps of its optimizers, and clipping.
    """

    again: Callable[[], Session] | None = None
    micro_batches: int | None = None
    gathered: torch.dtype | None = None

    def __init__(self, resolution: Resolution, device: Device) -> None:
        self.resolution, self.device = resolution, device
        self.precision, self.gpu = resolution.precision, find_gpu(device)
        self.conversions: weakref.WeakSet[Conversion] = weakref.WeakSet()
        self.references = References(lambda: self.conversion, self.prepare_model)
        self.patches = Patches()
        self._proofs: list[weakref.ref[Proof]] = []
        # Alive for the receipt: the proof begun last, and the last whose model has an optimizer.
        self._newest: Proof | None = None
        self._stepped: Proof | None = None
        self._checks = OptimizerChecks(self)
        # Weights for which FP8 codes stand now, by id: alive if an optimizer has them.
        self._replaced = weakref.WeakValueDictionary[int, nn.Parameter]()
        self.has_prepared, self.compiled = False, "off"
        self.loss_scaling: dict[str, Any] = {}
        self.undo = contextlib.ExitStack()
        self.updates = Updates(lambda: self.conversions, self.undo)

    def begin(self) -> None:
        """Patch `Accelerator` and `Trainer`, which from now on follow this session."""
        if self.device.kind == "cuda":
            # Before the first tensor on the GPU: the allocator takes no such setting afterwards.
            expand_segments()
        patch_accelerator(self)
        stores = self.precision.frozen == "fp8"
        load_all_weights(self.patches, self.prepare_model if stores else None)
        keep_in_trainers(self.patches)
        if self.precision.fp8_params:
            self.updates.leave_models()
        # Of all optimizers, also those that were never given to Accelerate: they are what is looked
        # for.
        hook = register_optimizer_step_pre_hook(self._checks.before_step)
        self.undo.callback(hook.remove)

    def end(self, *, replaced: bool = False) -> None:
        """Remove the patches and restore every model's plain layers.

        If another session follows (`replaced`), a model of this one that trains on without being
        prepared again raises, instead of silently running in BF16.
        """
        self.undo.close()
        self.patches.restore()
        # A copy, since conversions are dropped from the weak set while it is walked.
        for conversion in list(self.conversions):
            conversion.revert()
            if replaced:
                guard(conversion.model)

    # -------------------------------------------------------------------------------- preparation

    @staticmethod
    def tree_of(model: nn.Module) -> Tree:
        """The tree of a model: its conversion's, if it has one."""
        known = convert.conversion_of(model)
        return known.tree if known is not None and known.model is model else Tree(model)

    def prepare_models(self, trees: Sequence[Tree], *, evaluation: bool = False) -> None:
        """Convert models that Accelerate is about to prepare; `evaluation`: none of them trains."""
        self._checks.models.update(tree.model for tree in trees)
        asked = [(multiplies(tree), tree) for tree in trees]
        # The model with layers first: the second condition below asks whether there was one.
        for converts, tree in sorted(asked, key=itemgetter(0), reverse=True):
            if evaluation:
                self._prepare_reference(tree)
            # A loss or temperature module has nothing to convert.
            elif converts or not len(self.conversions):
                self.prepare_model(tree)

    def _prepare_reference(self, tree: Tree) -> None:
        if self.precision.compute != "fp8" or convert.conversion_of(tree.model) is not None:
            return  # autocast is all it takes
        try:
            hardware = bool(self.device.has_fp8)
            # A plan of its own: weights of a reference are not stored again, whatever the policy's
            # are.
            made = plan(tree, self.references.precision_of(self.precision, hardware=hardware))
        except (PlanError, PrecisionError):  # stored in fewer bits, or of layers that FP8 lacks
            return
        self._take_over(tree)
        conversion = convert.apply(tree, made, hardware=hardware, triton=starts_triton())
        self.conversions.add(conversion)
        self.references.add(conversion)

    def _take_over(self, tree: Tree) -> None:
        """Give back plain layers that were prepared with another model: PEFT's, unloaded since."""
        for other in [c for c in self.conversions if c.shares(tree)]:
            other.revert()
            guard(other.model)

    def prepare_model(self, model: nn.Module | Tree) -> Conversion:
        """Plan and convert `model` (once a session), and start its proof if it trains."""
        tree = model if isinstance(model, Tree) else self.tree_of(model)
        model = tree.model
        known = convert.conversion_of(model)
        before = {name: p.numel() for name, p in named_trainable(tree).items()}
        if known is not None and known in self.conversions and known.is_current():
            # Evaluated before it trains (`trainer.evaluate()` first), it has no proof yet.
            was_reference = known.follows is not None
            was_stopped = known.proof is not None and known.proof.was_stopped
            # A model that was an evaluation's or whose run has failed is planned again, as one that
            # trains.
            if not (was_reference and before) and not was_stopped:
                return known
        self._take_over(tree)
        convert.revert(tree)  # also submodules that were prepared separately
        unguard(tree)
        refuse_compiled(tree)  # by the script: ours are plain again
        made = self._plan(tree)
        if before:
            refuse_unsaved_experts(model, made)
        # All frozen weights before, less those that are still there: what is left has become codes.
        self._replaced.update((id(p), p) for p in tree.parameters() if not p.requires_grad)
        hardware = bool(self.device.has_fp8)
        able: Any = {"triton": starts_triton(), "gathered": self.gathered}
        conversion = convert.apply(tree, made, hardware=hardware, **able)
        _leave_head(conversion)
        self.conversions.add(conversion)
        self.has_prepared = True
        for p in tree.parameters():
            self._replaced.pop(id(p), None)
        if made.stored:
            _describe_storage(model)
        if before:
            # A model that trains is compiled after its witnessed step, one that does not at once.
            self._begin_proof(conversion, before)
        else:
            self._compile(conversion)
        return conversion

    def _plan(self, tree: Tree) -> PrecisionPlan:
        """Plan a model that trains. Its records, which hold weights, are gone afterwards."""
        found = records(tree)
        if self.resolution.asked.compute == "fp8":  # also if BF16 replaces it
            refuse_quantized(tree.model, self.resolution.asked, found)
        if self.precision.compute == "fp16":
            refuse_half_weights(tree)
        else:
            compute_types.warn_of_half_weights(tree)
        if self.precision.compute == "fp32":
            self.undo.callback(compute_types.make_exact())
        self._choose_engine_for(found)
        return plan(tree, self.precision, found)

    def _begin_proof(self, conversion: Conversion, before: dict[str, int]) -> None:
        why = self._why_uncompiled(conversion)
        compiles = not why
        proof = Proof(
            conversion, before, lambda: self._after_gemms(conversion),
            compiles=compiles, optimizers=self._checks.optimizers,
        )  # fmt: skip
        self._proofs = [one for one in self._proofs if one() is not None] + [weakref.ref(proof)]
        self._newest = proof
        for optimizer in self._checks.optimizers:
            self._note_owner(proof, optimizer)

    def _note_owner(self, proof: Proof, optimizer: Optimizer) -> None:
        # Of several prepared models (a teacher, a reward model) the one that an optimizer steps is
        # the run's.
        if not proof.is_released and proof.concerns(optimizer):
            self._stepped = proof

    def _after_gemms(self, conversion: Conversion) -> None:
        """Check float32 weights again and compile, after the witnessed step."""
        if self.precision.compute == "fp32":
            compute_types.check_exact()
        self._compile(conversion)

    def _compile(self, conversion: Conversion) -> None:
        """Compile the decoder layers of a converted model as configured; `compiled` says why."""
        self.compiled = self._why_uncompiled(conversion)
        if not self.compiled and (short := self._why_too_short(conversion)):
            self.compiled = f"off: {short}"
            # Uncompiled layers save more for backward than memory was found to be enough for.
            self.undo.enter_context(recomputed(conversion.compilable))
        elif not self.compiled:
            left = conversion.plan.fp8_parameters
            left_out = "; forwards that multiply by parameters are left out" if left else ""
            count = conversion.compile_layers()
            self.compiled = f"on: {count} decoder layers, after the witnessed step{left_out}"

    def _why_uncompiled(self, conversion: Conversion) -> str:
        """The reason why decoder layers are not compiled, empty if they are."""
        p, requested = self.precision, self.precision.compile_requested
        real = p.engine.has_kernels or conversion.frozen is not None
        unfused = p.compute == "fp8" and real and self.device.kind == "cuda"
        if requested == "off":
            return "off, as configured" + "; nothing is fused, slower than BF16" * unfused
        if requested == "auto" and not unfused:
            return f"off (not needed on {self.device.kind.upper()})"
        if conversion.compilable:
            return ""
        if conversion.plan.fp8_parameters:
            return "off: the decoder layers multiply by parameters, and are left out"
        return "off: no decoder layers found to compile"

    def _why_too_short(self, conversion: Conversion) -> str:
        """The reason why compiling takes this run longer than it saves, empty if it does not."""
        proof, count = conversion.proof, self.micro_batches
        if self.precision.compile_requested != "auto" or not (self.gpu and proof and count):
            return ""
        pays = pays_to_compile(
            *(self.precision, self.gpu.half_peak, sum(proof.flops.values())),
            *(len(conversion.compilable), count),
        )
        return "" if pays else pays.reason

    def _choose_engine_for(self, found: list[Record]) -> None:
        """Replace Transformer Engine, where `auto` takes it, for weights outside of layers."""
        r = self.resolution
        takes = r.asked.backend == "auto" and self.precision.engine.owns_weights
        if not takes or all(record.kind == "linear" for record in found):
            return
        try:
            other = resolve(r.asked.model_copy(update={"backend": "torchao"}), self.device)
        except PrecisionError:  # not torchao either: the plan reports what stays in BF16
            return
        why = "the model multiplies by plain parameters, which Transformer Engine cannot"
        self.resolution = Resolution(other.precision, r.asked, f"{other.reason}; {why}")
        self.precision = other.precision

    def prepare_optimizer(self, optimizer: Optimizer) -> None:
        """Watch an optimizer that Accelerate is about to prepare."""
        from accelerate.optimizer import AcceleratedOptimizer

        if isinstance(optimizer, AcceleratedOptimizer):  # prepared by an earlier train()
            optimizer = optimizer.optimizer
        self._checks.optimizers.add(optimizer)
        for group in optimizer.param_groups:  # or they would stay in memory beside their codes
            drop(group, optimizer.defaults, lambda p: self._replaced.get(id(p)) is p)
        for one in self._proofs:
            if (proof := one()) is not None:
                self._note_owner(proof, optimizer)
        if self.precision.compute == "fp16" and hasattr(optimizer, "_step_supports_amp_scaling"):
            # A fused optimizer would skip inside its kernel unreported: the learning rate would
            # advance, and skipped steps would count as steps.
            optimizer._step_supports_amp_scaling = False
        self.updates.take(optimizer)

    def stop(self, error: BaseException) -> None:
        """End the proof of a run that has failed, so that nothing of it watches later runs."""
        if (proof := self.proof) is not None:
            proof.stop(type(error).__name__)

    # ------------------------------------------------------------------------------------ receipt

    @property
    def proof(self) -> Proof | None:
        """Proof of the model that trains: of several the last with an optimizer."""
        return self._stepped or self._newest

    @property
    def conversion(self) -> Conversion | None:
        """Conversion of the model that trains."""
        return self.proof.conversion if self.proof else None

    def receipt(self) -> Receipt:
        """Receipt of the model that trains."""
        conversion = self.conversion
        lost = conversion.why_uncompiled if conversion is not None else ""
        compiled = "; ".join(filter(None, (self.compiled, lost)))
        return receipt_of(
            self.resolution, self.device, self.proof, compiled=compiled,
            references=self.references.described(), patches=self.patches.names,
            loss_scaling=self.loss_scaling,
        )  # fmt: skip

    def conditions(self, trainer: Any) -> dict[str, Any]:
        """Settings of the model that trains, which a fair pair of runs has to share."""
        return conditions_of(trainer, self.conversion, self.compiled)


def _leave_head(conversion: Conversion) -> None:
    """Leave the output head to TRL's fused loss where we cannot stand in for it.

    Raises:
        PrecisionError: it is stored as codes, of which that loss knows nothing.
    """
    head = conversion.head
    if head is None or stands("head"):
        return
    if head.stored is not None:
        conversion.revert()
        raise PrecisionError(
            "the output head was to multiply in FP8, and this TRL's fused loss cannot",
            where=f"{head.owner.name}, trl {version('trl')}",
            why="it multiplies by the weight itself, which is stored as codes",
            fix="leave the head in high precision: ~precision.map.output, or pip install "
            f"'trl<={table()['ran']['trl'][-1]}'",
        )
    conversion.head = None


def _describe_storage(model: nn.Module) -> None:
    """Record FP8 storage in the model's configuration, in case it is saved."""
    from transformers import PreTrainedModel

    from finetune.storage.quantizer import describe

    base = without_adapters(model)
    if isinstance(base, PreTrainedModel):
        describe(base)


GUARD = "_finetune_guard"
"""Attribute of a model that a replaced session has reverted; see `guard`."""


def guard(model: nn.Module) -> None:
    """Reject training calls of a model whose layers were given back to another one's session."""

    def before_forward(module: nn.Module, args: Any) -> None:
        if module.training and torch.is_grad_enabled():
            raise OrderError(
                "this model was prepared under a set-up that has been replaced",
                where="setup_fp8_mixed_precision_training() was called again, or a recipe was run, "
                "or another model with the same layers was prepared (unload() of PEFT)",
                why="its layers are plain again, or follow another plan: nothing proves what runs",
                fix="prepare it again (or build the trainer again) after the last set-up; layers "
                "that two models share belong into one module, which is prepared as a whole",
            )

    model.__dict__[GUARD] = model.register_forward_pre_hook(before_forward)


def unguard(tree: Tree) -> None:
    """Undo `guard`, of a model and of what is in it; without one nothing happens."""
    for module in tree.modules():
        hook = module.__dict__.pop(GUARD, None)
        if hook is not None:
            hook.remove()


# ---------------------------------------------------------------------------------- current session

_session: Session | None = None


def install(precision: PrecisionConfig | Resolution) -> Session:
    """Put a precision into effect for everything that Accelerate prepares from now on.

    A second call replaces the first.

    Raises:
        PrecisionError: it is unavailable on this machine.
    """
    global _session
    device = this_device()
    known = isinstance(precision, Resolution)
    session = Session(precision if known else resolve(precision, device), device)
    uninstall(replaced=True)
    session.begin()
    _session = session
    return session


def uninstall(*, replaced: bool = False) -> None:
    """End the current session, if any; see `Session.end`."""
    global _session
    if _session is not None:
        _session.end(replaced=replaced)
        _session = None


@contextlib.contextmanager
def session_of(resolution: Resolution, console: Console) -> Iterator[Session]:
    """Context manager for a run's session; a fallback to BF16 is printed loudly."""
    with replacing():
        session = install(resolution)
        if resolution.fallback:
            console.print(Text(f"! {resolution.fallback}", "bold red"))
        yield session


@contextlib.contextmanager
def replacing() -> Iterator[None]:
    """Context manager for a session of our own inside a script, whose own session follows again.

    Trainers that the script builds afterwards would otherwise train in BF16 without a word. Models
    that it prepared before are plain, and have to be prepared again.
    """
    before = _session
    try:
        yield
    finally:
        uninstall()
        if before is not None and before.again is not None:
            follows = before.again()
            # What the script's own session knows of order errors holds for the one that follows it.
            follows.has_prepared = before.has_prepared


def in_force() -> Session | None:
    """Current session, or None."""
    return _session


def aside() -> contextlib.AbstractContextManager[None]:
    """Context manager that works as if there were no session."""
    return _session.patches.aside() if _session is not None else contextlib.nullcontext()


def current() -> Session:
    """Current session; without one an `OrderError`."""
    if _session is None:
        raise OrderError(
            "there is no receipt: FP8 was not set up, or already torn down",
            fix="call setup_fp8_mixed_precision_training() and train; ask before teardown",
        )
    return _session
