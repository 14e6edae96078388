"""`diagnose(recipe)`: a few steps of a run as it would run, looked at from all sides.

The trainer is the run's own: `finetune.training.trainer.make_trainer` under the run's session,
with its
adapters, checkpointing, proof and compiled layers. What differs is that it ends after a few steps,
that nothing is evaluated or saved, and that an `Observer` looks on. Only as many rows are read as
these steps need. Nothing is left behind.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from transformers import set_seed
from transformers.trainer_callback import PrinterCallback

from finetune.analysis.diagnose.causes import causes_of, verdict_of
from finetune.analysis.diagnose.facts import EAGER_BYTES, FUSED_BYTES, Facts, payoff_of
from finetune.analysis.diagnose.layer_groups import (
    LOW,
    Group,
    group_receipts,
    with_noise,
    with_times,
)
from finetune.analysis.diagnose.observer import Observer
from finetune.analysis.diagnose.prediction import predict
from finetune.analysis.diagnose.products import with_bf16_times
from finetune.analysis.diagnose.result import Diagnosis
from finetune.analysis.diagnose.timeline import Trace, read_trace
from finetune.config.recipe import Recipe, load_recipe, with_overrides
from finetune.config.schema import RunConfig
from finetune.config.sft import sft_config
from finetune.errors import ConfigError
from finetune.estimator.gate import MemoryForecast
from finetune.estimator.speed.step_parts import StepPart
from finetune.hardware.device import Device, this_device
from finetune.hardware.gpus import find_gpu
from finetune.precision.convert import Conversion
from finetune.runs.receipt import Receipt
from finetune.training.data import MASKING, Rows, load_data, random_rows
from finetune.training.health.monitor import HealthMonitor
from finetune.training.model import load_tokenizer
from finetune.training.preflight import preflight, processes
from finetune.training.session import Session, session_of
from finetune.training.trainer import make_trainer

STEPS, LONG = 3, 8
"""Profiled steps, and micro-batches of a step above which one is enough."""
SHORTEST = 32
"""Packed rows are taken to hold at most so many short ones for each that is needed."""


def diagnose(
    run: RunConfig | Recipe | str,
    overrides: Sequence[str] = (),
    *,
    weights: Literal["random"] | None = None,
    steps: int | None = None,
    force: bool = False,
    console: Console | None = None,
) -> Diagnosis:
    """What really ran in which precision, where the time went, and why FP8 is or is not faster.

        finetune.diagnose("llama_8b_lora_fp8", weights="random")

    Args:
        run: a recipe's name or path, a recipe, or a configuration.
        overrides: `section.key=value` items.
        weights: `random` needs neither hub nor data: random weights, rows of random tokens.
        steps: optimizer steps to time, and to profile; left out: three, or one if it is long.
        force: run even where the memory bound says it cannot fit.
        console: where to show progress; left out: nowhere.

    Raises:
        FinetuneError: what the run itself would raise.
    """
    if steps is not None and steps < 1:
        raise ConfigError(f"{steps} steps to look at", where=f"--steps {steps}", fix="1 or more")
    name, config = _named(run)
    random = ("model.weights=random",) if weights == "random" else ()
    if overrides or random:
        config = with_overrides(config, (*overrides, *random))
    config, device = _unmasked(config) if random else config, this_device()
    if steps is None:
        micro_batches = int(config.train.get("gradient_accumulation_steps", 1))
        steps = STEPS if micro_batches <= LONG else 1
    ahead = preflight(config, device, forecast=MemoryForecast(), force=force)
    console = console or Console(quiet=True)
    with (
        tempfile.TemporaryDirectory() as folder,
        session_of(ahead.resolution, ahead.plan, console) as running,
    ):
        observer = Observer(running, steps)
        rows, tokenizer, notes = _rows(config, observer.total, synthetic=bool(random))
        short = _shortened(config, observer.total)
        args = sft_config(short, Path(folder), rows.settings, on_cpu=device.kind == "cpu")
        console.print(f"{name}: {observer.total} steps; data: {rows.description}", highlight=False)
        set_seed(args.seed)
        trainer = make_trainer(
            short,
            args,
            train=rows.train,
            held_out=None,
            tokenizer=tokenizer,
            held=ahead.plan.held,
            callbacks=[observer],
        )
        trainer.remove_callback(PrinterCallback)
        observer.attend(trainer)
        monitor = HealthMonitor(trainer, every=0)
        trainer.add_callback(monitor)
        try:
            trainer.train()
        finally:
            observer.close()
            monitor.close()
        return _conclude(name, config, device, running, observer, rows.description, notes)


def _named(run: RunConfig | Recipe | str) -> tuple[str, RunConfig]:
    if isinstance(run, str):
        run = load_recipe(run)
    return (run.name, run.config) if isinstance(run, Recipe) else (run.model.name, run)


def _unmasked(config: RunConfig) -> RunConfig:
    """The run without settings about parts of a row."""
    train = {key: value for key, value in config.train.items() if key not in MASKING}
    return config.model_copy(update={"train": train})


def _shortened(config: RunConfig, steps: int) -> RunConfig:
    """The run with so many steps, and nothing evaluated, saved or reported."""
    left_out = ("resume_from_checkpoint", "load_best_model_at_end", "eval_on_start")
    train = {key: value for key, value in config.train.items() if key not in left_out}
    train |= {"max_steps": steps, "eval_strategy": "no", "save_strategy": "no"}
    train |= {"logging_strategy": "no", "report_to": "none"}
    return config.model_copy(update={"train": train})


def _rows(config: RunConfig, steps: int, *, synthetic: bool) -> tuple[Rows, Any, tuple[str, ...]]:
    """As many rows as the steps need, the tokenizer, and what to know of it."""
    train = config.train
    each = int(train.get("per_device_train_batch_size", 8))
    needed = steps * each * int(train.get("gradient_accumulation_steps", 1)) * processes()
    if synthetic:
        builtin = config.model.model_copy(update={"name": "builtin:tiny_llama", "pad_token": None})
        tokenizer, _ = load_tokenizer(builtin)
        length = int(train.get("max_length") or 1024)
        drawn = random_rows(config.model, needed, length, int(train.get("seed", 42)))
        said = f"{needed} rows of {length:,} random tokens"
        return Rows(drawn, None, said, {}), tokenizer, ("weights are random",)
    tokenizer, note = load_tokenizer(config.model)
    rows = load_data(config.data, tokenizer, int(train.get("seed", 42)))
    enough = needed * SHORTEST if train.get("packing") else needed
    few = rows.train.select(range(min(enough, len(rows.train))))
    description = f"{rows.description}, {len(few):,} of them used"
    return (
        replace(rows, train=few, eval=None, description=description),
        tokenizer,
        ((note,) if note else ()),
    )


# --------------------------------------------------------------------------------------- conclusion


def _conclude(
    name: str,
    config: RunConfig,
    device: Device,
    running: Session,
    observer: Observer,
    data: str,
    notes: tuple[str, ...],
) -> Diagnosis:
    receipt = running.receipt()
    _, conversion = running.training
    assert conversion is not None
    micro_batches = int(config.train.get("gradient_accumulation_steps", 1))
    groups = with_noise(group_receipts(receipt.layers), observer.tallies)
    trace = read_trace(
        observer.events,
        steps=observer.steps,
        step_seconds=observer.step_seconds,
        low=_low(receipt),
        batched=any(layer.kind == "parameter" for layer in conversion.plan.layers),
    )
    groups = with_times(groups, trace)
    on = next(conversion.model.parameters()).device
    groups = with_bf16_times(groups, on, micro_batches)
    padded, real = observer.tokens
    facts = _facts(config, device, running, conversion, receipt, groups, trace)
    rows = int(config.train.get("per_device_train_batch_size", 8))
    prediction, why_not = predict(config, device, processes(), max(1, padded // rows))
    return Diagnosis(
        name,
        receipt,
        facts,
        tuple(causes_of(facts)),
        verdict_of(facts),
        data,
        tokens=real * micro_batches,
        padding=1 - real / padded if padded else 0.0,
        step_seconds=observer.step_seconds,
        steps=observer.steps,
        prediction=prediction,
        notes=(*notes, why_not) if why_not else notes,
    )


def _low(receipt: Receipt) -> dict[str, bool]:
    """Layer that has FP8 GEMMs -> whether all of them are."""
    ran = {row.name: {row.fprop, row.dgrad, row.wgrad} - {"none"} for row in receipt.layers}
    return {name: kinds <= LOW for name, kinds in ran.items() if kinds & LOW}


def _facts(
    config: RunConfig,
    device: Device,
    running: Session,
    conversion: Conversion,
    receipt: Receipt,
    groups: list[Group],
    trace: Trace,
) -> Facts:
    gpu, precision = find_gpu(device), running.precision
    compiled = running.compiled.startswith("on")
    fused = compiled or precision.backend == "te" or precision.scaling == "delayed"
    payoff = None
    if gpu is not None and device.has_fp8:
        moved = FUSED_BYTES if fused else EAGER_BYTES
        payoff = payoff_of(gpu, cast_bytes=moved, rowwise=precision.scaling == "rowwise")
    flash = "flash" in str(conversion.model.config._attn_implementation)  # pyright: ignore
    return Facts(
        config=config.model_copy(update={"precision": precision}),
        device=device,
        groups=tuple(groups),
        parts=trace.parts(),
        recompute_seconds=_recompute_seconds(groups, trace, compiled=compiled),
        adapter_seconds=_adapter_seconds(groups, trace),
        micro_batches=int(config.train.get("gradient_accumulation_steps", 1)),
        payoff=payoff,
        compiled=running.compiled,
        adapters=receipt.precision["adapters"],
        masked=bool(config.train.get("packing")) and not flash,
        trainable=receipt.trainable.get("after", 0),
    )


def _recompute_seconds(groups: list[Group], trace: Trace, *, compiled: bool) -> float:
    """What runs in ranges of recomputation; of compiled layers, which have none, products alone."""
    inside = sum(group.recomputed * group.seconds for group in groups) if compiled else 0.0
    return max(trace.seconds(phase="recompute"), inside)


def _adapter_seconds(groups: list[Group], trace: Trace) -> float:
    """Products of adapters, and what is elementwise in the modules that PEFT put around layers."""
    names = {name for group in groups if group.role == "adapter" for name in group.layers}
    around = {name.partition(".lora_")[0] for name in names if ".lora_" in name}
    elementwise = (
        piece.seconds
        for piece in trace.slices
        if piece.owner in names | around and piece.part not in (StepPart.GEMM, StepPart.HOST)
    )
    products = sum(group.gemm_seconds for group in groups if group.role == "adapter")
    return products + sum(elementwise) / trace.steps
