"""Names that no library promises, and the one feature that each of them carries.

A private name of a library may be gone with its next release. What nothing else can do stands here:
a feature, the names that it needs, and what is lost without it. `stands` looks for the names and
tries what a look does not show, on two tensors, once and only in modules that are imported by then.
A feature that does not stand is off, and everything else works; the receipt has a line:

    off with trl 1.17.0: a head in FP8 in TRL's fused loss (ChunkedLogProbFunction.forward is gone);
    lost: ...

Weights stored in FP8 have a trial of their own (`finetune.storage.trial`), which ends in an error.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from finetune.hardware.versions import version

PRECOMPUTES, ITS_KEY = "_precompute_ref_logps", "_precompute_model_hash"
"""TRL's (1.16): method of a trainer that lets a reference score rows in advance, and the attribute
that is its key in the cache on disk."""
READS_PROMPTS = "_tokenize_prompts"
"""TRL's (1.16): method of a trainer whose model writes, from prompts to token ids."""


@dataclass(frozen=True)
class Feature:
    """What is off where a name is gone.

    Attributes:
        what: the feature, for a person.
        lost: what a run is without it.
        names: module, and in it the names that it needs, such as `DPOTrainer._save`. After `>` one
            that the code of a function has to read.
        trial: raises if the names mean something else; module -> None.
    """

    what: str
    lost: str
    names: tuple[tuple[str, tuple[str, ...]], ...]
    trial: Callable[[Any], None] | None = None


def _scores(module: Any) -> None:
    """TRL's fused loss gives log-probabilities as we do: x [2, 2], W [2, 2], targets [2]."""
    import torch

    taken = [*inspect.signature(module.ChunkedLogProbFunction.forward).parameters][1:]
    if taken != HEAD_TAKES:
        raise TypeError(f"ChunkedLogProbFunction takes {', '.join(taken)}")
    x, targets = torch.tensor([[1.0, -2.0], [0.5, 3.0]]), torch.tensor([0, 1])
    found = module.ChunkedLogProbFunction.apply(x, x, None, targets, 1.0, 2)[0]
    due = (x @ x.t()).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(found.float(), due)


HEAD_TAKES = [
    "hidden",
    "weight",
    "bias",
    "targets",
    "temperature",
    "chunk_size",
    "final_logit_softcapping",
    "logit_scale",
    "outputs",
]
"""Arguments, in order, that `precision.cases.head.Head.apply` stands in for."""

_IN = "trl.trainer."
FEATURES = {
    "head": Feature(
        "an output head in FP8 in TRL's fused loss",
        "the products of the output head in TRL's trainers are neither FP8 nor counted",
        (("trl.kernels", ("ChunkedLogProbFunction.apply",)),),
        _scores,
    ),
    "precomputed": Feature(
        "references that score rows before training, in the precision of the policy",
        "with precompute_ref_log_probs references score in high precision, the policy in FP8: "
        "their difference does not begin at 0",
        tuple(
            (f"{_IN}{name.lower()}_trainer", (f"{name}Trainer.{PRECOMPUTES} > {ITS_KEY}",))
            for name in ("DPO", "KTO")
        ),
    ),
    "prompts": Feature(
        "prompts compared with the chat template before the first step",
        "that a trainer whose model writes reads prompts as the template prints them is not seen",
        tuple(
            (f"{_IN}{name.lower()}_trainer", (f"{name}Trainer.{READS_PROMPTS}",))
            for name in ("GRPO", "RLOO", "Distillation")
        ),
    ),
    "weights of checkpoints": Feature(
        "weights of a checkpoint compared with the model's",
        "what a resumed run does not load of FP8 codes, experts and adapters is not seen",
        (("transformers.trainer", ("Trainer._load_from_checkpoint", "Trainer._load_best_model")),),
    ),
    "whole checkpoints": Feature(
        "checkpoints that are complete or absent, with a manifest",
        "a checkpoint that was cut short looks like a complete one, none has a manifest, and of a "
        "sharded model each process writes its own part",
        (
            (
                "transformers.trainer",
                (
                    "Trainer._save_checkpoint > _get_output_dir",
                    "Trainer._get_output_dir",
                    "Trainer._save_optimizer_and_scheduler",
                    "Trainer._load_optimizer_and_scheduler",
                ),
            ),
        ),
    ),
    "scales of checkpoints": Feature(
        "amax histories in a Trainer's checkpoints",
        "delayed scaling begins again where a run is resumed",
        (("transformers.trainer", ("Trainer._save_scaler", "Trainer._load_scaler")),),
    ),
}


def stands(name: str) -> bool:
    """True if nothing is missing of a feature, in the modules that are imported so far."""
    return not _problems(FEATURES[name])


def switched_off() -> list[str]:
    """A line for each feature that is off, for a receipt."""
    found = []
    for feature in FEATURES.values():
        for library, problems in _problems(feature).items():
            at = f"{library} {version(library) or ''}".strip()
            found.append(f"off with {at}: {feature.what} ({problems}); lost: {feature.lost}")
    return found


def _problems(feature: Feature) -> dict[str, str]:
    """Library -> what is wrong with it."""
    wrong: dict[str, list[str]] = {}
    for module, names in feature.names:
        if (made := sys.modules.get(module)) is not None and (why := _wrong(made, names, feature)):
            wrong.setdefault(module.partition(".")[0], []).append(why)
    return {library: "; ".join(lines) for library, lines in wrong.items()}


@cache
def _wrong(module: Any, names: tuple[str, ...], feature: Feature) -> str:
    for name in names:
        path, _, read = name.partition(" > ")
        found: Any = module
        for part in path.split("."):
            found = getattr(found, part, None)
        if found is None:
            return f"{path} is gone"
        # A method that is there and does not read the name any more would be replaced without
        # effect.
        if read and read not in inspect.unwrap(found).__code__.co_names:
            return f"{path} reads no {read}"
    try:
        if feature.trial is not None:
            feature.trial(module)
    except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError,
            TypeError, ValueError) as error:  # fmt: skip
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    return ""
