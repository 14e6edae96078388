"""The command line's `estimate`: memory and time of a recipe, searches."""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from finetune.cli import RECIPE, AsJson, Overrides, refuse, run_of
from finetune.errors import ConfigError, PrecisionError
from finetune.logging import busy, output
from finetune.logging import whole as line
from finetune.runs.checkpoints import launcher_of
from finetune.units import amount

if TYPE_CHECKING:
    from finetune.config.schema import RunConfig
    from finetune.estimator.estimate import Estimate
    from finetune.estimator.search import GpuChoices, Largest
    from finetune.hardware.gpus import Machine


Fit = Literal["batch", "gpu", "gpus"]
_ACTS_ON = {"batch": ("--gpu", "--memory", "--gpus"), "gpu": (), "gpus": ("--gpu",)}
"""Options that a search takes besides the recipe."""


def estimate(
    recipe: Annotated[
        str | None, typer.Argument(metavar="RECIPE", help=RECIPE, callback=run_of)
    ] = None,
    overrides: Overrides = None,
    gpu: Annotated[
        str | None,
        typer.Option(help="H100, 4090, A100-80GB, ..., or several: H100,4090. Left out: here."),
    ] = None,
    memory: Annotated[float | None, typer.Option(help="GiB of one GPU.")] = None,
    gpus: Annotated[int, typer.Option(help="How many.")] = 1,
    pcie: Annotated[
        float | None, typer.Option(help="GB/s to host memory, one way: fp8_params. By the GPU.")
    ] = None,
    cpu_bandwidth: Annotated[
        float | None, typer.Option(help="GB/s of host memory, where fp8_params updates. 70.")
    ] = None,
    cpu_cores: Annotated[
        int | None, typer.Option(help="Cores, by which fp8_params updates. 16; here: its own.")
    ] = None,
    images: Annotated[int | None, typer.Option(min=0, help="Images of each row.")] = None,
    image_size: Annotated[str | None, typer.Option(help="Their pixels: 1024x768.")] = None,
    tokens: Annotated[
        str | None,
        typer.Option(help="Tokens of the whole run (10e9, 10B): days, cost, energy by precision."),
    ] = None,
    price: Annotated[float | None, typer.Option(help="Of one GPU and hour.")] = None,
    changes: Annotated[
        bool | None,
        typer.Option(help="All changes: what each frees, costs, and if it fits. By itself a few."),
    ] = None,
    fit: Annotated[
        Fit | None,
        typer.Option(help="The largest batch and rows, the best GPU, or the fewest GPUs, instead."),
    ] = None,
    whole: Annotated[
        bool, typer.Option(help="Simulate all layers, also where the first ones are enough.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Predict memory and speed, on a GPU that need not be here."""
    rest = {"price": price, "changes": changes, "whole": whole}
    if fit is not None:
        given = {"gpu": gpu, "memory": memory, "gpus": gpus != 1, "tokens": tokens, **rest}
        takes = _ACTS_ON[fit]
        refuse(
            {f"--{x}": value for x, value in given.items() if f"--{x}" not in takes},
            "would change nothing",
            where=f"--fit {fit}",
            why=f"--fit {fit} takes {', '.join(('RECIPE', '--fit', *takes))} besides",
            fix="leave it out",
        )
    if recipe is None:
        raise ConfigError(
            "estimate needs a recipe", fix="python -m finetune estimate tiny_lora_fp8"
        )
    from finetune.data.auto_length import load_recipe
    from finetune.hardware.gpus import machine_of

    budget, (gpu, *others) = _tokens(tokens), _named(gpu, fit=fit, price=price)
    around = {"pcie": pcie, "cpu_bandwidth": cpu_bandwidth, "cpu_cores": cpu_cores}
    names = (gpu, *others)
    machines = [machine_of(name, memory_gib=memory, gpus=gpus, **around) for name in names]
    rows = {"images_per_row": images, "image_size": image_size}
    taken = [f"data.{key}={value}" for key, value in rows.items() if value is not None]
    checked = load_recipe(recipe, [*(overrides or ()), *taken])
    days = None
    if budget is not None:
        with busy(output(stderr=True), "predicting days in each precision"):
            from finetune.estimator.days import days_of

            days = days_of(checked.config, machines, budget, price)
    with busy(output(stderr=True), f"simulating a step of {checked.name}"):
        from finetune.estimator import estimate as estimator

        if fit is not None:
            result = _searched(fit, checked.config, machines[0], gpu)
        elif others and budget is None:
            from finetune.estimator.search import compared

            refuse(
                {"--changes": changes, "--whole": whole},
                "is of one GPU",
                where=f"--gpu {gpu},{','.join(filter(None, others))}",
                fix=f"--gpu {gpu}, or leave it out",
            )
            result = compared(checked.config, machines)
        else:
            where = {"gpu": gpu, "memory_gib": memory, "gpus": gpus, **around}
            try:
                result = estimator.estimate(checked, tokens=budget, **where, **rest)
            except (PrecisionError, ConfigError):
                if days is None or all(one.days is None for one in days.spent):
                    raise
                result = days  # of the precisions that it has there
    if as_json:
        found: Any = {} if result is days else result.facts()
        print(json.dumps(found | ({"days": days.facts()} if days else {}), indent=1))
        return
    console = output()
    if not isinstance(result, estimator.Estimate):
        console.print(result)
        return
    console.print(*result.answer(), sep="\n")
    with busy(output(stderr=True), "predicting changes"):
        table = [*result.table()]
    for part in table:
        console.print(part)
    if days is not None:
        console.print("", days, sep="\n")
    options = ["--gpu", gpu] if gpu else []
    options += ["--memory", f"{memory:g}"] if memory else []
    options += ["--gpus", str(gpus)] if gpus > 1 else []
    for name, value in around.items():
        options += [] if value is None else [f"--{name.replace('_', '-')}", f"{value:g}"]
    console.print(line(_next(result, [recipe, *(overrides or ())], options)), crop=False)


def _tokens(text: str | None) -> int | None:
    """The number of tokens that was typed."""
    if text is None:
        return None
    if not (found := amount(text)):
        raise ConfigError(
            f"{text!r} is not a number of tokens",
            where=f"--tokens {text}",
            fix="--tokens 10e9, 10B, 500M or 1_000_000",
        )
    return found


def _named(gpu: str | None, *, fit: Fit | None, price: float | None) -> list[str | None]:
    """The GPUs that were named, between commas; one for a search."""
    names: list[str | None] = [None] if gpu is None else [x.strip() for x in gpu.split(",")]
    if len(names) > 1 and fit is not None:
        raise ConfigError(
            f"--fit {fit} takes one GPU",
            where=f"--gpu {gpu}",
            fix=f"--gpu {names[0]}; or leave out --fit, and these are compared",
        )
    if len(names) > 1 and price is not None:
        raise ConfigError(
            "one price was given for several GPUs",
            where=f"--gpu {gpu} --price {price:g}",
            fix="price_usd_per_hour of each in ~/.config/fp8-finetune/gpus.yaml",
        )
    return names


def _next(found: Estimate, run: list[str], options: list[str]) -> str:
    """The command after an answer: train what fits, or look at what is changed until it does.

    Args:
        run: recipe and settings.
        options: those that say which GPU; none: this machine.
    """
    from finetune.estimator.changes import as_typed

    if found.fit != "does not fit":
        count = found.machine.count
        where = f", on {'such a GPU' if count == 1 else f'{count} such GPUs'}" if options else ""
        return f"next{where}: {launcher_of(count)} -m finetune {shlex.join(run)}"
    again, change = f"python -m finetune estimate {shlex.join(run)}", ["--fit gpu"]
    if found.changes is not None and found.changes.together is not None:
        change = [*found.changes.together.change]
        if any(x.startswith("--gpus") for x in change) and "--gpus" in options:
            options = options[: options.index("--gpus")]
        again += f" {shlex.join(options)}" if options else ""
    return f"next: {again} {as_typed(change)}"


def _searched(
    fit: Fit, config: RunConfig, machine: Machine, gpu: str | None
) -> GpuChoices | Largest:
    from finetune.estimator.search import cheapest_gpu, fewest_gpus, largest

    if fit == "batch":
        return largest(config, machine)
    if fit == "gpu":
        return cheapest_gpu(config)
    if gpu is None:
        raise ConfigError(
            "--fit gpus needs to know which GPU",
            where="--fit gpus",
            fix="--gpu H100; --fit gpu looks for the GPU itself",
        )
    return fewest_gpus(config, gpu)
