"""References: models that a trainer evaluates beside the one that trains.

Trainers prepare them with `evaluation_mode=True`. They get no proof, as nothing of them trains. One
with the layers of the policy is its *reference*: DPO, KTO, GRPO and RLOO compare log-probabilities
of the two, and rounding in one alone would look like a difference between them (the loss of DPO
would begin at 0.679 instead of ln 2 = 0.693). So a reference computes as the policy does at that
moment: in FP8 while it trains, in the precision of evaluation while it is evaluated; under
`fp8_params` it keeps its weights, and is evaluated in FP8 or not at all. Other models
(a teacher, a reward model) compute in high precision, unless `precision.eval=fp8`.

The same holds for a policy that is its own reference: adapters switched off, where it trains on in
FP8 anyway, and log-probabilities computed once before training, where this file prepares the model
early. TRL caches these on disk; the precision becomes a part of their key.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import nn

from finetune.errors import PrecisionError
from finetune.hardware.unpromised import ITS_KEY, PRECOMPUTES, stands
from finetune.precision.convert import Conversion
from finetune.precision.model.plan import PrecisionPlan
from finetune.precision.settings import PrecisionConfig
from finetune.training.helper.replacing import Patches, replaced


class References:
    """The references of one session."""

    def __init__(
        self,
        policy: Callable[[], Conversion | None],
        prepare: Callable[[nn.Module], Conversion],
    ) -> None:
        """Begin without any; `prepare` converts a model that trains, `policy` gives that."""
        self._policy, self._prepare = policy, prepare
        self._lines: dict[str, None] = {}

    def described(self) -> list[str]:
        """One line for each kind of reference that has computed."""
        return list(self._lines)

    @staticmethod
    def precision_of(precision: PrecisionConfig, *, hardware: bool) -> PrecisionConfig:
        """Precision of a reference: the same casts, of weights that are kept as they are."""
        if not (precision.frozen == "fp8" or precision.fp8_params):
            return precision
        # Stored weights have scales of their own default, and E4M3 alone.
        # A reference's weights are those of the policy in 16 bits, cast on each call to the codes
        # that the policy has stored.
        same: dict[str, Any] = {"frozen": "bf16", "fp8_params": False}
        # Of weights that train, codes have the scaling's default.
        pow2 = precision.pow2_scales if precision.fp8_params else precision.power_of_two_scales
        same["power_of_two_scales"] = bool(pow2)
        if not hardware:
            # Stored layers are emulated here by our GEMM, whatever the engine. torchao's emulation
            # has the same codes and rounds products once less: DPO would begin at 0.69305.
            same["backend"] = "emulated"
        return precision.model_copy(update=same)

    def add(self, conversion: Conversion) -> None:
        """Let a converted model compute as the policy does, if it is its reference."""
        # Weak, or the function would keep alive the conversion that holds it.
        made = weakref.ref(conversion)

        def follows() -> bool:
            this = made()
            assert this is not None  # it is being called
            return self._follows(this)

        conversion.follows = follows

    def _follows(self, reference: Conversion) -> bool:
        name, policy = type(reference.model).__name__, self._policy()
        if policy is None:  # nothing trains yet: an evaluation like any other
            return False
        if layers_of(policy.plan) != layers_of(reference.plan):
            self._lines[f"{name}, another model: evaluated in high precision"] = None
            return False
        self._lines[f"{name}: in the precision of the policy, FP8 in training"] = None
        # At this moment: a trainer evaluates both between two steps.
        if not policy.model.training:
            refuse_evaluation_apart(policy.plan.precision, where=name)
        return policy.model.training

    # ----------------------------------------------------------------------------- precomputed

    def patch_trainers(self, patches: Patches) -> None:
        """Patch the trainers loaded so far that compute log-probabilities before training."""
        transformers = sys.modules.get("transformers.trainer")
        # TRL's trainers that are loaded, found as subclasses: importing all of them takes seconds.
        classes: list[type] = [] if transformers is None else [transformers.Trainer]
        while classes:
            cls = classes.pop()
            classes += cls.__subclasses__()
            name = f"{cls.__module__}.{cls.__qualname__}.{PRECOMPUTES}"
            known = name in patches.names or not stands("precomputed")
            if PRECOMPUTES in vars(cls) and not known:
                patches.replace(cls, PRECOMPUTES, self._make_precompute)

    def _make_precompute(self, original: Any) -> Any:
        def precompute(trainer: Any, dataset: Any, name: str, *args: Any, **kwargs: Any) -> Any:
            conversion = self._prepare(trainer.ref_model or trainer.model)
            low = name == "train"
            # Or a run in FP8 would be given the log-probabilities that one in BF16 has cached.
            key = f"{getattr(trainer, ITS_KEY)} {low} {conversion.plan.precision!r}"
            if low:
                line = "log-probabilities precomputed in FP8"
                if conversion.plan.precision.facts.whole:
                    line += ", with the scales of other batches"
                self._lines[line] = None
            with (
                replaced(conversion, "follows", lambda: low),
                replaced(trainer, ITS_KEY, key),
            ):
                return original(trainer, dataset, name, *args, **kwargs)

        return precompute


def refuse_evaluation_apart(precision: PrecisionConfig, *, where: str) -> None:
    """Raise `PrecisionError` if a policy is evaluated by codes, and its reference by weights."""
    if precision.fp8_params and precision.eval == "high":
        raise PrecisionError(
            "a policy and its reference would be evaluated by different weights",
            where=f"{where}, precision.fp8_params with precision.eval=high",
            why="those of the policy are FP8 codes on the device, and those of the reference have "
            "16 bits: two equal models would seem to differ (0.709 instead of ln 2 = 0.693)",
            fix="precision.eval=fp8, which casts both alike; or train.eval_strategy=no",
        )


def layers_of(plan: PrecisionPlan) -> Counter[Any]:
    """Shapes of the layers of a model without adapters."""
    return Counter((row.role, row.shape) for row in plan.layers if row.role != "adapter")
