"""`estimate(recipe)`: will it fit, how fast, and does FP8 pay."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Group, RenderableType
from rich.jupyter import JupyterMixin
from rich.table import Table
from rich.text import Text

from finetune.config.recipe import Recipe, load_recipe
from finetune.config.schema import RunConfig
from finetune.errors import ConfigError
from finetune.estimator.advice import Advised
from finetune.estimator.alternatives import Beside, alternatives_of, twin_of
from finetune.estimator.caveats import limits
from finetune.estimator.measure import Measured, check_sizes, measure_well
from finetune.estimator.memory.footprint import Fit, Footprint
from finetune.estimator.place import Place, place_of
from finetune.estimator.speed.timing import Pace, spread
from finetune.estimator.trials import advise
from finetune.hardware.gpus import Gpu


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


# ------------------------------------------------------------------------------------------
# An estimate in words, for a terminal.


NAMES = {
    "weights": "weights",
    "fp8": "FP8 copies",
    "gradients": "gradients",
    "optimizer": "optimizer states",
    "saved": "saved activations",
    "logits": "head and loss",
    "temporary": "temporaries",
    "gathered": "gathered for a moment",
    "buckets": "buckets of DDP",
}
STYLE = {"fits": "bold green", "tight": "bold yellow", "does not fit": "bold red"}


def size(nbytes: float) -> str:
    """Bytes as people read them: MiB below one GiB."""
    gib = nbytes / 2**30
    return f"{gib:.1f} GiB" if gib >= 1 else f"{nbytes / 2**20:.1f} MiB"


def duration(seconds: float) -> str:
    """Seconds as people read them."""
    if seconds < 1:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02d} min"


def describe(result: Estimate) -> RenderableType:
    """An estimate, with its reasons."""
    return Group(*_parts(result))


def _parts(result: Estimate) -> Iterator[RenderableType]:
    measured, place = result.measured, result.place
    held = measured.footprint
    yield Text.assemble(
        (result.name, "bold"),
        f" on {place}: ",
        (measured.resolution.label, "bold"),
        ", ",
        _fit(result),
    )
    yield Text(f"{measured.parameters:,} parameters, {measured.trainable:,} trainable", "dim")
    yield Text()
    yield _memory(held)
    yield from _allocator(held, on_gpu=place.device.kind == "cuda")
    if measured.pace is not None:
        yield Text()
        yield from _time(result, measured.pace)
    twin = [result.twin] if result.twin else []
    known = {way.change for way in twin}
    beside = [*twin, *(way for way in result.others if way.change not in known)]
    if beside:
        yield Text()
        yield _beside(beside)
        yield from _why(result)
    if result.advised is not None:
        yield Text()
        yield result.advised
    for note in result.notes:
        yield Text(f"! {note}", "yellow")


def _fit(result: Estimate) -> Text:
    held, memory = result.measured.footprint, result.place.memory_bytes
    words = Text(result.fit, STYLE[result.fit])
    if result.fit == "does not fit":
        words.append(f" (needs {size(held.allocated + held.outside)} of {size(memory)})", "default")
    else:
        words.append(f" ({size(held.shown)} of {size(memory)})", "default")
    return words


def _memory(held: Footprint) -> Table:
    """Kinds by phase, in GiB; the fullest phase stands out."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("memory, at its fullest in")
    for phase in held.phases:
        peak = phase == held.highest
        table.add_column(phase, justify="right", style="bold" if peak else "dim")
    small = held.tensors < 2**30
    unit, name = (2**20, "MiB") if small else (2**30, "GiB")
    for kind, words in NAMES.items():
        row = [held.phases[phase].get(kind, 0) / unit for phase in held.phases]
        if max(row) >= 0.005:
            table.add_row(words, *(f"{value:.2f}" if value >= 0.005 else "" for value in row))
    totals = [sum(kinds.values()) / unit for kinds in held.phases.values()]
    table.add_row(f"together, {name}", *(f"{total:.2f}" for total in totals), style="bold")
    return table


def _allocator(held: Footprint, *, on_gpu: bool) -> Iterator[Text]:
    if held.owned > 0.05 * held.tensors:
        owner = held.owner or "the head and the loss"
        yield Text(f"most of what is in passing at the peak belongs to {owner}: {size(held.owned)}")
    if not on_gpu:
        return
    about = "about " if held.about else ""
    yield Text.assemble(
        "allocated ", (size(held.allocated), "bold"), f" (with {size(held.workspaces)} of library "
        f"workspaces), reserved {about}{size(held.reserved)}, "
        f"shown by nvidia-smi {about}{size(held.shown)}"
    )  # fmt: skip
    if held.expandable is not None and held.reserved - held.expandable > 2**29:
        yield Text(
            f"PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True reserves {size(held.expandable)}",
            "dim",
        )


def _time(result: Estimate, pace: Pace) -> Iterator[Text]:
    low, high = spread(pace.seconds, pace.scatter)[1:]
    yield Text.assemble(
        "step ", (duration(pace.seconds), "bold"), f" ({duration(low)} to {duration(high)}) of "
        f"{pace.tokens * result.place.count:,} tokens: ",
        (f"{result.tokens_per_s:,.0f} tokens/s", "bold"),
        f", MFU {pace.mfu:.0%}", "" if pace.calibrated else ", not calibrated on this GPU",
    )  # fmt: skip
    waits = {name: " (waiting)" for name, bound in pace.bound.items() if bound == "launch"}
    parts = [
        f"{name} {pace.share(name):.0%}{waits.get(name, '')}"
        for name in sorted(pace.classes, key=pace.share, reverse=True)
        if pace.share(name) >= 0.01
    ]
    yield Text("of it " + ", ".join(parts), "dim")
    if result.run_seconds is not None:
        cost = f", costs {result.cost:.2f}" if result.cost is not None else ""
        yield Text(f"whole run of {result.tokens:,} tokens: {duration(result.run_seconds)}{cost}")
    elif result.price is not None and result.tokens_per_s:
        million = 1e6 / result.tokens_per_s / 3600 * result.price * result.place.count
        yield Text(f"a million tokens cost {million:.3f}")


def _beside(others: list[Beside]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("beside", "memory", "speed", "range", "how"):
        table.add_column(column, justify="right" if column in ("memory", "speed") else "left")
    for other in others:
        if other.measured is None:
            table.add_row(other.label, "-", "-", "", other.why[0], style="dim")
            continue
        speed = (
            f"{other.speed.value:.2f}x" if other.speed else "?" if not other.measured.pace else "1x"
        )
        within = f"{other.speed.low:.2f} to {other.speed.high:.2f}" if other.speed else ""
        how = " ".join(other.change)
        table.add_row(other.label, size(other.measured.footprint.allocated), speed, within, how)
    return table


def _why(result: Estimate) -> Iterator[Text]:
    twin = result.twin
    if twin is None or twin.speed is None:
        return
    asked_fp8 = result.measured.config.precision.compute == "fp8"
    gain = 1 / twin.speed.value if asked_fp8 else twin.speed.value
    yield Text(f"FP8 is {gain:.2f} times as fast as BF16 here" if gain > 1.02 else
               f"FP8 does not pay here: {gain:.2f} times the speed of BF16", "bold")  # fmt: skip
    for reason in twin.why:
        yield Text(f"  {reason}")
