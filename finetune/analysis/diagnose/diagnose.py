"""`diagnose(recipe)`: profile a few steps of a run and explain their speed.

The trainer is the run's own (`make_trainer` under the run's session), with its adapters,
checkpointing, proof and compiled layers. It stops after a few steps, reads only the rows they need,
does not evaluate or save, runs under an `StepObserver`, and leaves nothing behind.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from transformers import set_seed
from transformers.trainer_callback import PrinterCallback

from finetune.analysis.diagnose.causes import causes_of
from finetune.analysis.diagnose.facts import Facts, predict
from finetune.analysis.diagnose.groups import (
    LOW,
    ObservedGroup,
    groups_of_receipt,
    precisions_of,
    with_bf16_times,
    with_noise,
    with_times,
)
from finetune.analysis.diagnose.observer import StepObserver
from finetune.analysis.diagnose.result import Diagnosis
from finetune.analysis.diagnose.timeline import Timeline, read_profile
from finetune.analysis.experiment.fairness import settle_compile
from finetune.config.methods import method_of
from finetune.config.recipe import Recipe, with_overrides
from finetune.config.schema import RunConfig
from finetune.config.sft import padding_free, sft_config, shortened
from finetune.config.train_keys import TrainerArguments
from finetune.data.auto_length import load_recipe
from finetune.data.dataset import MASKING, Rows, random_rows, reader_for, rows_for
from finetune.errors import ConfigError, ProofError
from finetune.estimator.changes import rows_of
from finetune.estimator.gate import MemoryForecast
from finetune.estimator.speed.step_parts import StepPart
from finetune.hardware.device import processes, this_device
from finetune.logging import output
from finetune.storage.pretrained import load_tokenizer
from finetune.training.health.monitor import HealthMonitor
from finetune.training.helper.session import Session, session_of
from finetune.training.run.preflight import preflight
from finetune.training.trainer import make_trainer

STEPS, LONG = 3, 8
"""Steps to profile, and micro-batches per step above which one step is enough."""
MOST_PACKED = 32
"""Most short rows that one packed row is expected to hold."""


def diagnose(
    run: RunConfig | Recipe | str,
    overrides: Sequence[str] = (),
    *,
    weights: Literal["random"] | None = None,
    steps: int | None = None,
    force: bool = False,
    console: Console | None = None,
    trace: Path | None = None,
) -> Diagnosis:
    """Find out which precision ran, where the time went, and why FP8 is or is not faster.

        finetune.diagnose("llama_8b_lora_fp8", weights="random")

    Args:
        run: a recipe's name or path, a recipe, or a configuration.
        overrides: `section.key=value` items.
        weights: `random` uses random weights and tokens: no hub, no data.
        steps: optimizer steps to time, and to profile; default three, or one if it is long.
        force: run even if the memory bound says it cannot fit.
        console: console for progress output; default none.
        trace: file for the trace of the profiled steps (`.json.gz`), which Perfetto opens.

    Raises:
        FinetuneError: as the run itself would raise; or the recipe's model writes its own rows.
    """
    if steps is not None and steps < 1:
        raise ConfigError(f"{steps} steps to look at", where=f"--steps {steps}", fix="1 or more")
    run = load_recipe(run) if isinstance(run, str) else run
    name, config = (run.name, run.config) if isinstance(run, Recipe) else (run.model.name, run)
    if (method := method_of(config.train)).writes:
        raise ConfigError(
            f"the steps of {name} cannot be taken apart: its model writes what it learns from",
            where=f"train.method={method.name}",
            why="each step has other rows, and most of it is generation",
            fix="python -m finetune estimate shows the parts of its step, a run's report its speed",
        )
    synthetic, device = weights == "random", this_device()
    if synthetic:
        overrides = (*overrides, "model.weights=random")
    config = with_overrides(config, overrides) if overrides else config
    if synthetic:  # random rows have no parts to mask
        plain = {key: value for key, value in config.train.items() if key not in MASKING}
        config = config.model_copy(update={"train": plain})
    steps = steps or (STEPS if rows_of(config)[1] <= LONG else 1)
    # Else `auto` would compile nothing, since these few steps are over before it pays.
    (config,), _ = settle_compile([config], device)  # a few steps stand for a long run
    ahead = preflight(config, device, forecast=MemoryForecast(), force=force)
    config = ahead.config
    console = console or output(quiet=True)
    with (
        tempfile.TemporaryDirectory() as folder,
        session_of(ahead.resolution, console) as running,
    ):
        observer = StepObserver(running, steps, trace)
        rows, tokenizer, notes = _rows(config, observer.total, synthetic=synthetic)
        train = shortened(config.train, observer.total)
        short = config.model_copy(update={"train": train})
        args = sft_config(short, Path(folder), rows.settings, on_cpu=device.kind == "cpu")
        console.print(f"{name}: {observer.total} steps; data: {rows.description}", highlight=False)
        set_seed(TrainerArguments(args).seed)
        trainer = make_trainer(
            short,
            args,
            train=rows.train,
            held_out=None,
            reader=tokenizer,
            stored=ahead.plan.stored,
            attention=ahead.attention,
            callbacks=[observer],
        )
        trainer.remove_callback(PrinterCallback)
        observer.attend(trainer)
        # The checks of any run (finite, documents kept apart), and no rows of health.
        monitor = HealthMonitor(trainer, every=0)
        trainer.add_callback(monitor)
        try:
            trainer.train()
        finally:
            observer.close()
            monitor.close()
        return _conclude(name, config, running, observer, rows.description, notes)


def _rows(config: RunConfig, steps: int, *, synthetic: bool) -> tuple[Rows, Any, list[str]]:
    """As many rows as the steps need, the tokenizer, and notes on it."""
    train = config.train
    needed = steps * math.prod(rows_of(config)) * processes()
    if synthetic:
        builtin = config.model.model_copy(update={"name": "builtin:tiny_llama", "pad_token": None})
        tokenizer, _ = load_tokenizer(builtin)
        length = int(train.max_length or 1024)
        drawn = random_rows(config.model, needed, length, int(train.seed))
        description = f"{needed} rows of {length:,} random tokens"
        return Rows(drawn, None, description, {}), tokenizer, ["weights are random"]
    tokenizer, note = load_tokenizer(config.model, train.chat_template_path)
    rows = rows_for(config, tokenizer)
    # Packing needs several short rows for one; how many is known once they are tokenized.
    enough = needed * MOST_PACKED if train.packing else needed
    few = rows.first(enough)
    description = f"{rows.description}, {len(few):,} of them used"
    used = replace(rows, train=few, eval=None, description=description)
    return used, reader_for(config, rows, tokenizer), [note]


# --------------------------------------------------------------------------------------- conclusion


def _conclude(
    name: str,
    config: RunConfig,
    running: Session,
    observer: StepObserver,
    data: str,
    notes: list[str],
) -> Diagnosis:
    """The diagnosis of what was observed.

    Args:
        data: description of the rows.
        notes: on the tokenizer or the weights; empty ones are left out.

    Raises:
        ProofError: on a GPU whose kernels the profiler did not see.
    """
    receipt, device, conversion = running.receipt(), running.device, running.conversion
    assert conversion is not None
    ran = {row.name: set(precisions_of(row).values()) for row in receipt.layers}
    timeline = read_profile(
        observer.events,
        steps=observer.steps,
        step_seconds=observer.step_seconds,
        low={layer: kinds <= LOW for layer, kinds in ran.items() if kinds & LOW},
        batched=any(layer.kind == "parameter" for layer in conversion.plan.layers),
    )
    # Without kernels the times of operators on the host would be taken for the GPU's.
    if device.kind == "cuda" and not timeline.on_gpu:
        raise ProofError(
            "the profiler saw no kernel of the GPU",
            where=device.name,
            why="torch.profiler gets them from CUPTI, which this container or driver withholds: "
            "there are the operators of the host alone, whose times say nothing of the GPU's",
            fix="another container or machine; `python -m finetune benchmark` measures speed "
            "without a profiler",
        )
    groups = with_times(with_noise(groups_of_receipt(receipt.layers), observer.sums), timeline)
    where = torch.device(device.kind)  # a parameter may be in host memory
    attention = getattr(conversion.model.config, "_attn_implementation", "")
    facts = Facts(
        config=config.model_copy(update={"precision": running.precision}),
        device=device,
        groups=tuple(with_bf16_times(groups, where, rows_of(config)[1])),
        parts=timeline.parts(),
        adapter_seconds=_adapter_seconds(groups, timeline),
        profiled_seconds=timeline.profiled_seconds,
        compiled=running.compiled,
        adapters=receipt.precision["adapters"],
        masked=padding_free(config.train) and attention in ("sdpa", "eager"),
        trainable=receipt.trainable.get("after", 0),
        nbytes=timeline.nbytes,
    )
    # Compiled layers have no recomputation ranges inside: there the GEMMs alone count.
    inside = sum(group.recomputed * group.seconds for group in groups if facts.is_compiled)
    recomputed = max(timeline.seconds(phase="recompute"), inside)
    facts = replace(facts, recompute_seconds=recomputed)
    padded, real = observer.tokens
    # For rows as long as those that were seen, not for the longest possible.
    prediction, why_not = predict(config, device, processes(), max(1, padded // facts.rows))
    return Diagnosis(
        name,
        receipt,
        facts,
        tuple(causes_of(facts)),
        data,
        tokens=real * facts.micro_batches,
        padding=1 - real / padded if padded else 0.0,
        step_seconds=observer.step_seconds,
        steps=observer.steps,
        prediction=prediction,
        notes=tuple(filter(None, (*notes, why_not))),
    )


def _adapter_seconds(groups: list[ObservedGroup], timeline: Timeline) -> float:
    """GEMMs of adapters, and elementwise operations in the modules PEFT adds around layers."""
    adapters = [group for group in groups if group.role == "adapter"]
    names = {name for group in adapters for name in group.layers}
    # PEFT's wrapper of a layer scales and adds: work that is there for the adapter alone.
    around = {name.partition(".lora_")[0] for name in names if ".lora_" in name}
    elementwise = sum(
        piece.seconds
        for piece in timeline.slices
        if piece.owner in names | around and piece.part not in (StepPart.GEMM, StepPart.HOST)
    )
    return sum(group.gemm_seconds for group in adapters) + elementwise / timeline.steps
