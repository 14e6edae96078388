"""`estimate(recipe)`: memory and time of a run, and the gain from FP8."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rich.console import Group, RenderableType
from rich.jupyter import JupyterMixin
from rich.table import Table
from rich.text import Text

from finetune.config.recipe import Recipe
from finetune.config.schema import RunConfig
from finetune.data.auto_length import load_recipe
from finetune.errors import ConfigError
from finetune.estimator.changes import with_length
from finetune.estimator.images import with_images
from finetune.estimator.limits import limits
from finetune.estimator.measured import measured_pair
from finetune.estimator.memory.footprint import Fit
from finetune.estimator.predict import Prediction, check_sizes, predict
from finetune.estimator.speed.hosted import OVERLAPS
from finetune.estimator.speed.timing import Timing
from finetune.estimator.variants import Changes, PrecisionPair, changes_of, pair_of
from finetune.hardware.gpus import Gpu, Machine, machine_of
from finetune.logging import plain_table
from finetune.units import GIB, MEMORY, MIB, count, duration, percent, size

NAMES = {
    "weights": "weights",
    "fp8": "FP8 copies",
    "gradients": "gradients",
    "optimizer": "optimizer states",
    "saved": "saved activations",
    "logits": "head and loss",
    "cache": "keys and values",
    "temporary": "temporaries",
    "gathered": "gathered for a moment",
    "buckets": "buckets of DDP",
}
STYLE = {"fits": "bold green", "tight": "bold yellow", "does not fit": "bold red"}


@dataclass(frozen=True)
class Estimate(JupyterMixin):
    """Predicted memory and time of a run.

    Attributes:
        name: Recipe or model name.
        prediction: Memory and time on a machine.
        pair: The run in FP8 and in BF16, with like settings; None for other precisions.
        measured: What was measured of that pair on this GPU, if it was.
        notes: Limits of the estimate and the direction of their error.
        tokens: Tokens of the whole run on all devices; None if unknown.
        price: Price of one device per hour, in any currency.
        every: Predict all changes; None: those that answer the verdict on memory; False: none.
    """

    name: str
    prediction: Prediction
    pair: PrecisionPair | None = None
    measured: dict[str, Any] | None = None
    notes: tuple[str, ...] = ()
    tokens: int | None = None
    price: float | None = None
    every: bool | None = None

    @cached_property
    def changes(self) -> Changes | None:
        """What changes free and cost, and whether it then fits; takes seconds."""
        # Seconds for each change: whoever asks for figures alone (a script over many recipes) skips
        # them.
        if self.every is False:
            return None
        return changes_of(self.prediction, self.pair, every=bool(self.every))

    @property
    def machine(self) -> Machine:
        return self.prediction.machine

    @property
    def fit(self) -> Fit:
        return self.prediction.fit

    @property
    def tokens_per_s(self) -> float | None:
        """Throughput of all devices."""
        return self.prediction.tokens_per_s

    @property
    def run_seconds(self) -> float | None:
        speed = self.tokens_per_s
        return None if speed is None or self.tokens is None else self.tokens / speed

    @property
    def cost(self) -> float | None:
        """Cost of the whole run on all devices; None without a price or a duration."""
        seconds, price = self.run_seconds, self.price
        if seconds is None or price is None:
            return None
        return seconds / 3600 * price * self.machine.count

    def to_json(self) -> str:
        return json.dumps(self.facts(), indent=1)

    def facts(self) -> dict[str, Any]:
        return {
            "recipe": self.name,
            "device": str(self.machine),
            "devices": self.machine.count,
            "memory_bytes": self.machine.memory_bytes,
            "fit": self.fit,
            **_facts(self.prediction),
            "run": {
                "tokens": self.tokens,
                "seconds": self.run_seconds,
                "price_per_hour": self.price,
                "cost": self.cost,
            },
            "pair": None if self.pair is None else self.pair.facts(),
            "measured": self.measured,
            "changes": None if self.changes is None else self.changes.facts(),
            "notes": list(self.notes),
        }

    def __rich__(self) -> RenderableType:
        return Group(*self.answer(), *self.table())

    def answer(self) -> Iterator[RenderableType]:
        """Memory and time of the run, and what FP8 gains."""
        prediction, memory, capacity = (
            self.prediction,
            self.prediction.footprint,
            self.machine.memory_bytes,
        )
        # What `nvidia-smi` shows is what a user can check; where it does not fit, the least that
        # must fit counts, which leaves no way out.
        need = f"{_size(memory.shown)} of {_size(capacity)}"
        if self.fit == "does not fit":
            need = f"needs {_size(memory.allocated + memory.outside)} of {_size(capacity)}"
        yield Text.assemble(
            (self.name, "bold"), f" on {self.machine}: ", (prediction.resolution.label, "bold"),
            ", ", (self.fit, STYLE[self.fit]), f" ({need})",
        )  # fmt: skip
        counts = (
            f"{count(prediction.parameters)} parameters, {count(prediction.trainable)} trainable"
        )
        saving = "on" if prediction.config.train.gradient_checkpointing else "off"
        yield Text(f"{counts}; gradient checkpointing {saving}", "dim")
        yield Text()
        yield self._memory()
        yield from self._allocator()
        if memory.pinned:
            yield Text.assemble(
                "in host memory: ", (_size(memory.on_host), "bold"),
                f": {_size(memory.pinned)} pinned (masters and gradients), "
                f"{_size(memory.pageable)} for optimizer states",
            )  # fmt: skip
        if prediction.timing is not None:
            yield Text()
            yield from self._time(prediction.timing)
        if self.pair is not None:
            yield Text()
            yield from self._verdict(self.pair)
        for note in self.notes:
            yield Text(f"! {note}", "yellow")

    def table(self) -> Iterator[RenderableType]:
        """What changes do, which takes as long again as the answer."""
        if self.changes is not None and (self.changes.rows or self.fit != "fits"):
            yield Text()
            yield self.changes

    def _memory(self) -> Table:
        memory = self.prediction.footprint
        table = plain_table("peak memory during")
        for phase in memory.phases:
            style = "bold" if phase == memory.highest else "dim"
            table.add_column(phase, justify="right", style=style)
        # One unit for the whole table, so that its columns add up by eye.
        unit, name = (MIB, "MiB") if memory.tensors < GIB else (GIB, "GiB")
        for kind, label in NAMES.items():
            row = [memory.phases[phase].get(kind, 0) / unit for phase in memory.phases]
            # Nothing is shown that two decimals would round to zero.
            if max(row) >= 0.005:
                table.add_row(label, *(f"{value:.2f}" if value >= 0.005 else "" for value in row))
        totals = [sum(kinds.values()) / unit for kinds in memory.phases.values()]
        table.add_row(f"total, {name}", *(f"{total:.2f}" for total in totals), style="bold")
        return table

    def _allocator(self) -> Iterator[Text]:
        memory = self.prediction.footprint
        # Below a twentieth no single module is worth a change of its own.
        if memory.owned > 0.05 * memory.tensors:
            owner = memory.owner or "output head and loss"
            yield Text(f"largest temporary at the peak: {owner}, {_size(memory.owned)}")
        if self.machine.device.kind != "cuda":
            return
        yield Text.assemble(
            "needs ", (_size(memory.shown), "bold"), " as nvidia-smi shows it: "
            f"{_size(memory.allocated)} allocated, {_size(memory.reserved)} reserved",
        )  # fmt: skip

    def _time(self, timing: Timing) -> Iterator[Text]:
        _, low, high = timing.interval
        tokens, speed = (n * self.machine.count for n in (timing.tokens, timing.tokens_per_s))
        # Two digits, as many as the model is good for; through `float`, so that no exponent is
        # printed.
        steps = float(f"{1 / timing.seconds:.2g}")
        yield Text.assemble(
            f"step of {count(tokens)} tokens: ",
            (duration(timing.seconds), "bold"), f" ({duration(low)} to {duration(high)}), ",
            (f"{count(speed)} tokens/s", "bold"),
            f" ({_rough(tokens / high)} to {_rough(tokens / low)}), {steps:,g} steps/s",
        )  # fmt: skip
        # The GPU is idle then: faster kernels change nothing, larger batches or a compiler do.
        waits = {name: " (waiting)" for name, bound in timing.bound.items() if bound == "launch"}
        parts = [
            f"{name} {percent(timing.share(name), 0)}{waits.get(name, '')}"
            for name in sorted(timing.classes, key=timing.share, reverse=True)
            if timing.share(name) >= 0.01
        ]
        yield Text("breakdown: " + ", ".join(parts), "dim")
        if (traffic := timing.traffic) is not None:
            alone = f"{1 - traffic.added / timing.seconds:.0%} of the speed without it"
            least, most = map(duration, traffic.waits)
            yield Text(
                f"communication: each GPU sends {traffic.nbytes / 1e9:.3g} GB a step in "
                f"{duration(traffic.seconds)}, of which it waits {duration(traffic.added)} "
                f"({least} to {most}; how much hides behind computation is assumed): {alone}"
            )
        if timing.hosted is not None:
            yield from self._host(timing)
        if self.tokens is not None and self.run_seconds is not None:
            cost = f", costs {self.cost:.2f}" if self.cost is not None else ""
            took = duration(self.run_seconds)
            yield Text(f"whole run of {count(self.tokens)} tokens: {took}{cost}")
        elif self.price is not None:
            million = 1e6 / speed / 3600 * self.price * self.machine.count
            yield Text(f"a million tokens cost {million:.3f}")

    def _host(self, timing: Timing) -> Iterator[Text]:
        """What host memory takes of a step."""
        on_host, host = timing.hosted, self.machine.host
        assert on_host is not None
        down, up = (f"{nbytes / 1e9:.3g} GB" for nbytes in on_host.moved)
        yield Text(
            f"PCIe: a step moves {down} of gradients down and {up} up at "
            f"{on_host.bus / 1e9:.3g} GB/s, and waits {duration(on_host.waits)} for it; hidden "
            f"behind micro-batches of {_rough(on_host.hides_from(timing.tokens))} tokens or more"
        )
        behind = (
            ""
            if OVERLAPS
            else f" (behind the next forward it would save {duration(on_host.gained)})"
        )
        yield Text(
            f"CPU: norm {duration(on_host.norm)} and update {duration(on_host.update)} a step, by "
            f"{host.cores} cores and {host.gb_s:g} GB/s; the GPU waits "
            f"{duration(on_host.on_cpu)}{behind}"
        )

    def _verdict(self, pair: PrecisionPair) -> Iterator[Text]:
        if pair.gain is not None:
            value, low, high = pair.gain
            within, how = f" ({low:.2f}x to {high:.2f}x)", "predicted"
            if self.measured is not None:
                how = f"measured on commit {self.measured['commit']} ({value:.2f}x predicted)"
                value, within = self.measured["over_bf16"], ""
            # Below 2 % no user would see a gain, and the spread is larger.
            says = "FP8 runs at" if value > 1.02 else "FP8 does not pay here:"
            said = f"{says} {value:.2f}x{within} the speed of BF16, {how}; {pair.alike}"
            yield Text(said, "bold")
        for line in (*pair.unlike, *pair.reasons):
            yield Text(f"  {line}")


def _rough(number: float) -> str:
    """A figure that is known to a third: `12,000`."""
    return count(float(f"{number:.2g}"))


_IN_JSON = (
    "tensors", "allocated", "reserved", "shown", "margin",
    "phases", "workspaces", "outside", "pinned", "pageable",
)  # fmt: skip


def _facts(prediction: Prediction) -> dict[str, Any]:
    """Memory and time of one configuration as plain data, in bytes and seconds."""
    memory, timing = prediction.footprint, prediction.timing
    return {
        "precision": prediction.resolution.label,
        "parameters": prediction.parameters,
        "trainable": prediction.trainable,
        "image_tokens_per_row": prediction.image_tokens,
        "compiled": prediction.compiled,
        "memory": {name: getattr(memory, name) for name in _IN_JSON}
        | {"peak_phase": memory.highest, "peak_owner": memory.owner},
        "time": None
        if timing is None
        else {
            "step_seconds": timing.seconds,
            "step_seconds_range": list(timing.interval[1:]),
            "tokens_per_step_and_device": timing.tokens,
            "tokens_per_s_and_device": timing.tokens_per_s,
            "mfu": timing.mfu,
            "parts": timing.classes,
            "communication": timing.traffic
            and {
                "bytes": timing.traffic.nbytes,
                "seconds": timing.traffic.seconds,
                "waited": timing.traffic.added,
                "waited_range": list(timing.traffic.waits),
            },
            "host": timing.hosted and timing.hosted.facts(timing.tokens),
            "bound": timing.bound,
        },
    }


def estimate(
    run: RunConfig | Recipe | str,
    *,
    gpu: str | Gpu | None = None,
    memory_gib: float | None = None,
    gpus: int = 1,
    pcie: float | None = None,
    cpu_bandwidth: float | None = None,
    cpu_cores: int | None = None,
    length: int | None = None,
    images: int | None = None,
    image_size: str | None = None,
    tokens: int | None = None,
    price: float | None = None,
    changes: bool | None = None,
    whole: bool = False,
) -> Estimate:
    """Predict memory and time of a run on any GPU, without weights or network access.

        finetune.estimate("llama_8b_full_fp8", gpu="H100")

    Args:
        run: Recipe name or path, recipe, or configuration.
        gpu: Name (`H100`, `4090`, `A100-80GB`) or table entry; default: this machine.
        memory_gib: Memory of one GPU, if only that is known or it differs from the table.
        gpus: Number of GPUs; they shard the model with `train.fsdp`, else replicate it (DDP).
        pcie: GB/s between GPU and host memory, one way; default: the table's. What is in host
            memory (`precision.fp8_params`) crosses it.
        cpu_bandwidth, cpu_cores: GB/s and cores of the host, which updates what is there; default:
            a desktop's.
        length: Tokens of the longest row; default: `train.max_length`. Of a prompt and its answer
            where the model writes answers; default: twice `train.max_completion_length`.
        images, image_size: Images of each row, and their size in pixels (`1024x768`); default:
            `data.images_per_row` and `data.image_size`.
        tokens: Tokens of the whole run, for its time and cost; default: `data.max_tokens`, or
            from `train.max_steps`.
        price: Price per GPU and hour; default: the table's, if set there.
        changes: Predict every change of the table (other formats, engines, adapters, more GPUs);
            default: those that make it fit if it does not, else those that train the same. False:
            none, and no comparison of FP8 with BF16.
        whole: Rehearse all layers. By default the first ones are extrapolated, which is exact.

    Raises:
        FinetuneError: the run would fail before loading: unknown recipe, GPU or model, invalid
            batch sizes, adapters that the model cannot take.
    """
    machine = machine_of(gpu, memory_gib=memory_gib, gpus=gpus, pcie=pcie,
                     cpu_bandwidth=cpu_bandwidth, cpu_cores=cpu_cores)  # fmt: skip
    if isinstance(run, str):
        run = load_recipe(run)
    name, config = (run.name, run.config) if isinstance(run, Recipe) else (run.model.name, run)
    for what, value in (("tokens", tokens), ("price", price), ("length", length)):
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(
                f"{what} cannot be {value:g}",
                where=f"--{what} {value:g}",
                fix=f"--{what} with a number above 0, or leave it out",
            )
    # Before anything is predicted: all of what follows is about rows of this length.
    if length is not None:
        config = with_length(config, length)
    config = with_images(config, images, image_size)
    check_sizes(config)
    prediction = predict(config, machine, whole=whole)
    if price is None and machine.gpu is not None:
        price = machine.gpu.price_usd_per_hour
    steps, tokens = int(config.train.max_steps), tokens or config.data.max_tokens
    if tokens is None and steps > 0 and prediction.timing is not None:
        tokens = steps * prediction.timing.tokens * machine.count
    # What was measured was measured at the recipe's own length, and of its own rows.
    recipe = run if isinstance(run, Recipe) and length is images is image_size is None else None
    return Estimate(
        name,
        prediction,
        pair_of(prediction) if changes is not False else None,
        measured_pair(recipe, prediction) if recipe else None,
        limits(prediction),
        tokens,
        price,
        changes,
    )


def _size(nbytes: float) -> str:
    return size(nbytes, MEMORY)
