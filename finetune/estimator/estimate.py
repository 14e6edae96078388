"""`estimate(recipe)`: will it fit, how fast, and does FP8 pay."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

from rich.console import RenderableType
from rich.jupyter import JupyterMixin

from finetune.config import RunConfig
from finetune.errors import ConfigError
from finetune.estimator.advice import Advised
from finetune.estimator.comparison import Beside, alternatives_of, twin_of
from finetune.estimator.footprint import Fit
from finetune.estimator.limits import limits
from finetune.estimator.measure import Measured, check_sizes, measure_well
from finetune.estimator.place import Place, place_of
from finetune.estimator.timing import spread
from finetune.estimator.trials import advise
from finetune.estimator.words import describe
from finetune.gpus import Gpu
from finetune.recipe import Recipe, load_recipe


@dataclass(frozen=True)
class Estimate(JupyterMixin):
    """What a run would take.

    Attributes:
        name: of the recipe.
        place: where it would train.
        measured: its memory and time there.
        twin: the same run in the other precision, where there is one.
        others: other ways to run it, where they were asked for.
        advised: what to change, where it does not fit or was asked for.
        notes: what is not modelled, and in which direction the truth lies.
        tokens: of the whole run, on all devices; None where it is not known.
        price: of one device and hour, in the currency that it was given in.
    """

    name: str
    place: Place
    measured: Measured
    twin: Beside | None = None
    others: tuple[Beside, ...] = ()
    advised: Advised | None = None
    notes: tuple[str, ...] = ()
    tokens: int | None = None
    price: float | None = None

    @property
    def fit(self) -> Fit:
        """Whether it fits into the memory of one device."""
        return self.measured.footprint.fit(self.place.memory_bytes)

    @property
    def tokens_per_s(self) -> float | None:
        """Of all devices together."""
        pace = self.measured.pace
        return None if pace is None else pace.tokens_per_s * self.place.count

    @property
    def run_seconds(self) -> float | None:
        """Of the whole run, where its tokens are known."""
        speed = self.tokens_per_s
        return None if speed is None or self.tokens is None else self.tokens / speed

    @property
    def cost(self) -> float | None:
        """Of the whole run, all devices; None without a price or an end."""
        seconds, price = self.run_seconds, self.price
        known = seconds is not None and price is not None
        return seconds / 3600 * price * self.place.count if known else None  # pyright: ignore

    def __rich__(self) -> RenderableType:
        return describe(self)

    def to_json(self) -> str:
        """Everything, in bytes and seconds."""
        return json.dumps(self.facts(), indent=1)

    def facts(self) -> dict[str, Any]:
        """The same as plain data."""
        place = self.place
        return {
            "recipe": self.name,
            "device": str(place),
            "devices": place.count,
            "memory_bytes": place.memory_bytes,
            "fit": self.fit,
            **facts_of(self.measured),
            "run": {
                "tokens": self.tokens,
                "seconds": self.run_seconds,
                "price_per_hour": self.price,
                "cost": self.cost,
            },
            "twin": None if self.twin is None else self.twin.facts(),
            "alternatives": [other.facts() for other in self.others],
            "advice": None if self.advised is None else self.advised.facts(),
            "notes": list(self.notes),
        }


def facts_of(measured: Measured) -> dict[str, Any]:
    """Memory and time of one configuration as plain data, in bytes and seconds."""
    held, pace = measured.footprint, measured.pace
    return {
        "precision": measured.resolution.label,
        "parameters": measured.parameters,
        "trainable": measured.trainable,
        "compiled": measured.compiled,
        "memory": {
            "tensors": held.tensors,
            "allocated": held.allocated,
            "reserved": held.reserved,
            "reserved_expandable": held.expandable,
            "shown": held.shown,
            "margin": held.margin,
            "peak_phase": held.highest,
            "peak_owner": held.owner,
            "phases": held.phases,
            "workspaces": held.workspaces,
            "outside": held.outside,
        },
        "time": None
        if pace is None
        else {
            "step_seconds": pace.seconds,
            "step_seconds_range": list(spread(pace.seconds, pace.scatter)[1:]),
            "tokens_per_step_and_device": pace.tokens,
            "tokens_per_s_and_device": pace.tokens_per_s,
            "mfu": pace.mfu,
            "calibrated": pace.calibrated,
            "parts": pace.classes,
            "bound": pace.bound,
        },
    }


def estimate(
    run: RunConfig | Recipe | str,
    *,
    gpu: str | Gpu | None = None,
    memory_gib: float | None = None,
    gpus: int = 1,
    length: int | None = None,
    tokens: int | None = None,
    price: float | None = None,
    alternatives: bool = False,
    twin: bool = True,
    advice: bool | None = None,
    whole: bool = False,
) -> Estimate:
    """What a run would take on a GPU that need not be here. No weights, no network.

        finetune.estimate("llama_8b_full_fp8", gpu="H100")

    Args:
        run: a recipe's name or path, a recipe, or a configuration.
        gpu: a name (`H100`, `4090`, `A100-80GB`) or a line of the table; left out: this machine.
        memory_gib: of one GPU, where only that is known, or where it differs from the table.
        gpus: how many. They share the model with `train.fsdp`, else each has a copy (DDP).
        length: tokens of the longest row; left out: `train.max_length`.
        tokens: of the whole run, for its time and cost; left out: from `train.max_steps`.
        price: of one GPU and hour; left out: the table's, where the user put one there.
        alternatives: also look at other ways to run it: scalings, engines, optimizers, storage.
        twin: also look at the same run in the other precision.
        advice: measure what to change: to make it fit, or to make it faster. Left out: where it
            does not fit easily.
        whole: rehearse all layers. Otherwise the first ones speak for the others, exactly but for
            fragments, unless the memory is nearly full.

    Raises:
        FinetuneError: what the run itself would raise before it loads: no such recipe, GPU, model,
            numbers that no batch has, adapters that the model cannot take.
    """
    place = place_of(gpu, memory_gib=memory_gib, gpus=gpus)
    name, config = _run(run)
    for what, value in (("tokens", tokens), ("price", price), ("length", length)):
        if value is not None and value <= 0:
            raise ConfigError(f"{what} cannot be {value:g}", where=f"--{what} {value:g}")
    check_sizes(config)
    measured = measure_well(config, place, length=length, whole=whole)
    config = measured.config
    beside = twin_of(measured, place) if twin else None
    others = tuple(alternatives_of(measured, place)) if alternatives else ()
    if price is None and place.gpu is not None:
        price = place.gpu.price_usd_per_hour
    result = Estimate(
        name,
        place,
        measured,
        beside,
        others,
        notes=limits(measured, place),
        tokens=tokens or _tokens(measured, place),
        price=price,
    )
    if advice is None:
        advice = result.fit != "fits"
    return replace(result, advised=advise(measured, place)) if advice else result


def _run(run: RunConfig | Recipe | str) -> tuple[str, RunConfig]:
    if isinstance(run, str):
        run = load_recipe(run)
    return (run.name, run.config) if isinstance(run, Recipe) else (run.model.name, run)


def _tokens(measured: Measured, place: Place) -> int | None:
    """Of the whole run, where its number of steps is written down."""
    steps = int(measured.config.train.get("max_steps", -1))
    if steps < 1 or measured.pace is None:
        return None
    return steps * measured.pace.tokens * place.count
