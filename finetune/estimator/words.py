"""An estimate in words, for a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from finetune.estimator.comparison import Beside
from finetune.estimator.footprint import Footprint
from finetune.estimator.timing import Pace, spread

if TYPE_CHECKING:
    from finetune.estimator.estimate import Estimate

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
