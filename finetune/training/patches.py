"""Patches of Accelerate during a session: three methods, listed in the receipt.

    Accelerator.__init__        mixed precision is that of the session
    Accelerator.prepare         converts models and watches optimizers, before Accelerate's own
    Accelerator.prepare_model   the same for a single model

Accelerate's own FP8 path is not used (FP8_FINDINGS.md has the reasons). The accelerator runs in
BF16 mixed precision, for everything outside FP8 GEMMs. Written for accelerate 1.15.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from finetune.config.schema import Compute
from finetune.hardware.device import Resolution
from finetune.precision.stored import before_sharding, share_scales
from finetune.training import compute_types, guards

AUTOCAST: dict[Compute, str] = {"fp8": "bf16", "bf16": "bf16", "fp16": "fp16", "fp32": "no"}
"""Accelerate's mixed precision by compute precision: BF16 around FP8 GEMMs."""


class Patches:
    """Temporary replacements of class methods."""

    def __init__(self) -> None:
        self._replaced: list[tuple[type, str, Any]] = []  # owner, name, original

    @property
    def names(self) -> list[str]:
        """Dotted names of the replaced methods, in order."""
        return [f"{o.__module__}.{o.__qualname__}.{name}" for o, name, _ in self._replaced]

    def replace(self, owner: type, name: str, make: Callable[[Any], Any]) -> None:
        """Replace a method by `make(method)`."""
        original = getattr(owner, name)
        setattr(owner, name, functools.wraps(original)(make(original)))
        self._replaced.append((owner, name, original))

    def restore(self) -> None:
        for owner, name, original in reversed(self._replaced):
            setattr(owner, name, original)
        self._replaced.clear()

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        in_force = [(owner, name, getattr(owner, name)) for owner, name, _ in self._replaced]
        for owner, name, original in reversed(self._replaced):
            setattr(owner, name, original)
        try:
            yield
        finally:
            for owner, name, patch in in_force:
                setattr(owner, name, patch)


def patch_accelerator(
    patches: Patches,
    resolution: Resolution,
    prepare_models: Callable[[Sequence[nn.Module]], None],
    prepare_optimizer: Callable[[Optimizer], None],
) -> None:
    """Make every `Accelerator` built from now on follow a precision.

    Args:
        patches: collection to add to.
        resolution: executed and requested precision.
        prepare_models: called with models before Accelerate prepares them.
        prepare_optimizer: called with each optimizer before Accelerate prepares it.
    """
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    precision = resolution.precision
    made: weakref.WeakSet[Any] = weakref.WeakSet()  # accelerators built under this precision

    def make_init(original: Any) -> Any:
        signature = inspect.signature(original)

        def init(accelerator: Any, *args: Any, **kwargs: Any) -> None:
            given = signature.bind(accelerator, *args, **kwargs).arguments
            guards.refuse_conflicts(given, precision)
            given["mixed_precision"] = AUTOCAST[precision.compute]
            del given["self"]
            # Accelerate keeps its first configuration process-wide: another precision would be
            # rejected, and a trainer's FSDP or compile settings silently ignored.
            AcceleratorState._reset_state()
            if precision.compute == "fp16":
                compute_types.hand_over(given, precision)
            original(accelerator, **given)
            if precision.compute == "fp16":
                compute_types.complete(accelerator, precision)
            made.add(accelerator)

        return init

    def make_prepare(original: Any) -> Any:
        def prepare(accelerator: Any, *args: Any, **kwargs: Any) -> Any:
            models = [a for a in args if isinstance(a, nn.Module)]
            if models:
                guards.check_accelerator(accelerator, resolution, known=accelerator in made)
                prepare_models(models)
            for optimizer in args:
                if isinstance(optimizer, Optimizer):
                    prepare_optimizer(optimizer)
            if "FSDP" not in str(accelerator.distributed_type):
                return original(accelerator, *args, **kwargs)
            for model in models:
                before_sharding(model)
            prepared = original(accelerator, *args, **kwargs)
            for model in models if accelerator.state.fsdp_plugin.cpu_ram_efficient_loading else ():
                share_scales(model)
            return prepared

        return prepare

    def make_prepare_model(original: Any) -> Any:
        def prepare_model(accelerator: Any, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if guards.multiplies(model):
                guards.check_accelerator(accelerator, resolution, known=accelerator in made)
                prepare_models([model])
            return original(accelerator, model, *args, **kwargs)

        return prepare_model

    patches.replace(Accelerator, "__init__", make_init)
    patches.replace(Accelerator, "prepare", make_prepare)
    patches.replace(Accelerator, "prepare_model", make_prepare_model)
