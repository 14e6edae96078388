"""The updates of a session's optimizers: whose kernels are ours, who clips, and whose weights wait.

Where a model has its weights in host memory (`precision.fp8_params`), a weight goes to the device
as soon as it is updated, while the next one is; and whatever optimizer steps, the codes of what it
has changed are cast again.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from finetune.precision.convert import Conversion
from finetune.precision.stored.masters import Masters
from finetune.precision.stored.trained import TrainedEngine
from finetune.training.helper.optimizer import low_bit
from finetune.training.helper.replacing import replaced


class Updates:
    """Updates of optimizers that Accelerate has prepared.

    Args:
        conversions: gives the models of the session.
        undo: what ends with it.
    """

    def __init__(
        self, conversions: Callable[[], Iterable[Conversion]], undo: contextlib.ExitStack
    ) -> None:
        self._conversions, self._undo = conversions, undo
        self._known = weakref.WeakKeyDictionary[Optimizer, Any]()

    def take(self, optimizer: Optimizer) -> None:
        """Take over the steps of an optimizer of torchao's; those of others stay their own."""
        if not low_bit.steps_by_parts(optimizer) or optimizer in self._known:
            return
        from finetune.training.helper.optimizer.adamw import Update

        self._known[optimizer] = update = Update(optimizer)
        update.defer = partial(self._by_weights, update)
        self._undo.callback(update.attach())

    def clip(
        self, accelerator: Any, parameters: Sequence[Tensor], bound: float, norm_type: float
    ) -> Tensor | None:
        """Norm of gradients whose clipping an update does; None where Accelerate is to clip."""
        # Scaled gradients: a step may be left out.
        if not self._known or norm_type != 2 or accelerator.scaler is not None:
            return None
        from finetune.training.helper.optimizer.clipping import clip

        return clip(list(self._known.values()), parameters, bound)

    # ------------------------------------------------------------------- weights in host memory

    def leave_models(self) -> None:
        """Let Accelerate alone move a `Trainer`'s model, when its weights are masters.

        A `Trainer` does so when it is built, all of it. Transformers documents this property as
        one that is there to be overridden.
        """
        from transformers import TrainingArguments

        stays = replaced(TrainingArguments, "place_model_on_device", property(lambda _: False))
        self._undo.enter_context(stays)
        self._undo.callback(register_optimizer_step_post_hook(self._tell).remove)

    def _masters(self) -> list[Masters]:
        engines = [conversion.engine for conversion in self._conversions()]
        return [one.masters for one in engines if isinstance(one, TrainedEngine)]

    def _by_weights(self, update: Any, noted: list[Any]) -> None:
        def on_done(parameter: Tensor) -> None:
            for masters in self._masters():
                masters.send_up(parameter)

        update.finish(noted, on_done)

    def _tell(self, optimizer: Optimizer, *_: Any) -> None:
        for masters in self._masters():
            masters.stepped(optimizer)
