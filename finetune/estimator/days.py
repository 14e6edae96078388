"""Days, energy and cost of so many tokens in FP32, BF16 and FP8, on one, four and eight GPUs.

Each figure is a prediction of the recipe with nothing changed but its precision. Gradient
checkpointing that the recipe leaves to `auto` is decided for each, so the memory that FP8 frees
counts. On N GPUs each takes the recipe's batch: a step has N times the tokens. Energy is the most
that the boards draw, all the time: an upper bound for the GPUs, without host and cooling.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from finetune.config.recipe import with_overrides
from finetune.config.schema import RunConfig
from finetune.errors import FinetuneError
from finetune.estimator.changes import BF16, COMPILED, FP8, IN_FP8
from finetune.estimator.memory.footprint import Fit
from finetune.estimator.predict import Prediction, predict, tried
from finetune.estimator.speed.timing import spread
from finetune.hardware.gpus import Machine
from finetune.hardware.requirements import compiles, resolve_there
from finetune.logging import plain_table
from finetune.units import count

COUNTS = (1, 4, 8)
CHANGES = {
    "fp32": ("precision.compute=fp32", "model.dtype=float32"),
    "bf16": (BF16,),
    "fp8": (FP8,),
}
"""Precision -> overrides that put a run into it; FP32 as torch has it by default, without TF32."""


@dataclass(frozen=True)
class Spent:
    """What the tokens take in one precision on one machine.

    Attributes:
        days: duration; None if it cannot run there, or the speed is unknown.
        kwh: energy of the GPUs, at most; None where their power is unknown.
        cost: of all GPUs; None without a price.
        scatter: standard deviation of ln(predicted / true) of the days.
        why: why it cannot run there.
    """

    machine: str
    gpus: int
    compute: str
    days: float | None = None
    kwh: float | None = None
    cost: float | None = None
    fit: Fit = "does not fit"
    scatter: float = 0.0
    why: str = ""


@dataclass(frozen=True)
class Days:
    """What a number of tokens takes; rows of three precisions each, by machine."""

    tokens: int
    spent: tuple[Spent, ...]

    def facts(self) -> list[dict[str, Any]]:
        return [asdict(one) for one in self.spent]

    def __rich__(self) -> RenderableType:
        return Group(*self._parts())

    def _parts(self) -> Iterator[RenderableType]:
        if all(one.days is None for one in self.spent):
            why = self.spent[0].why or "the speed of this machine is not known; --gpu H100"
            yield Text(f"! no days are predicted: {why}", "yellow")
            return
        shown = ["days", "kWh", *(["cost"] if any(one.cost for one in self.spent) else [])]
        titles = [f"{unit} {name.upper()}" for unit in shown for name in CHANGES]
        titles.insert(len(CHANGES), "FP8 saves")
        heading = f"{count(self.tokens)} tokens"
        table = plain_table(heading, *titles, right=titles, whole=[heading], gap=1)
        # The same iterator three times: `zip` takes three in turn, the precisions of one machine.
        for row in zip(*[iter(self.spent)] * len(CHANGES), strict=True):
            cells = [_cell(getattr(one, unit.lower()), one) for unit in shown for one in row]
            bf16, fp8 = row[1].days, row[2].days
            saved = None if bf16 is None or fp8 is None else bf16 - fp8
            table.add_row(row[0].machine, *cells[:3], _cell(saved), *cells[3:])
        yield table
        # One line for the table, so the widest spread of its figures.
        _, low, high = spread(1.0, max(one.scatter for one in self.spent))
        yield Text(
            f"predicted: days within {low:.2f} to {high:.2f} of the figure (90%); kWh: power of "
            "the boards x time, an upper bound; - : cannot run",
            "dim",
        )
        if any(one.days and one.fit == "does not fit" for one in self.spent):
            yield Text("(in brackets): needs more memory than the GPU has", "dim")
        for one in self.spent:
            if one.why:
                yield Text(f"! {one.compute.upper()} on {one.machine}: {one.why}", "yellow")


def days_of(
    config: RunConfig, machines: Sequence[Machine], tokens: int, price: float | None = None
) -> Days:
    """Predict what tokens take in each precision on 1, 4 and 8 GPUs of each machine.

    Args:
        machines: also with their own number of GPUs.
        price: of one GPU and hour; default: the table's of GPUs, if set there.
    """
    numbers = [replace(at, count=gpus) for at in machines for gpus in sorted({*COUNTS, at.count})]
    spent = (_spent(config, at, compute, tokens, price) for at in numbers for compute in CHANGES)
    return Days(tokens, tuple(spent))


def _spent(
    config: RunConfig, machine: Machine, compute: str, tokens: int, price: float | None
) -> Spent:

    def changed() -> Prediction:
        return predict(with_overrides(config, _changes(config, machine, compute)), machine)

    # A precision that cannot run there is a row with the reason, not the end of the table.
    (found, why), gpu = tried(changed), machine.gpu
    alone = Spent(str(machine), machine.count, compute, why=why)
    if found is None or found.timing is None or gpu is None:
        return alone
    hours = tokens / found.timing.tokens_per_s / 3600  # of all GPUs together
    # Hours of all GPUs, so that kWh and cost need no factor for their number.
    kwh, price = gpu.watts and hours * gpu.watts / 1e3, price or gpu.price_usd_per_hour
    spent = {"days": hours / machine.count / 24, "kwh": kwh, "cost": price and hours * price}
    return replace(alone, **spent, fit=found.fit, scatter=found.timing.scatter)


def _changes(config: RunConfig, machine: Machine, compute: str) -> tuple[str, ...]:
    """Overrides for a precision; where the FP8 of the run is compiled, so are the others."""
    # As it is, with whatever scaling and storage it has: the question is about this recipe.
    if config.precision.compute == compute:
        return ()
    compiled = False
    if config.precision.compute == "fp8":
        with contextlib.suppress(FinetuneError):  # no FP8 there
            compiled = compiles(resolve_there(config.precision, machine).precision, machine.device)
    # By row over a frozen base, as the LoRA recipes are shipped.
    into = IN_FP8 if compute == "fp8" and config.lora else CHANGES[compute]
    return (*into, *((COMPILED,) if compiled else ()))


def _cell(value: float | None, of: Spent | None = None) -> str:
    if value is None:
        return "-"
    # No more digits than a prediction has: two or three.
    text = f"{value:.2g}" if abs(value) < 1 else f"{value:,.{0 if abs(value) >= 100 else 1}f}"
    return f"({text})" if of is not None and of.fit == "does not fit" else text
