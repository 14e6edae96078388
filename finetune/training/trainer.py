"""`train(recipe)`: from a checked recipe to a run folder with weights, metrics and a receipt.

The stock `trl.SFTTrainer` trains, through the same helper that a user's own script would call.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from finetune.config.optimizers import chosen
from finetune.config.recipe import Recipe
from finetune.config.schema import RunConfig
from finetune.config.sft import sft_config
from finetune.errors import ConfigError, FinetuneError
from finetune.estimator.gate import check_room, predicted
from finetune.hardware.device import this_device
from finetune.precision.holdings import held_weights
from finetune.runs.folder import write_start
from finetune.storage import nf4
from finetune.training import low_bit, session
from finetune.training.conditions import conditions_of
from finetune.training.data import load_data
from finetune.training.evaluate import load_tasks, refuse_sharded, score
from finetune.training.model import load_model, load_tokenizer, lora_config
from finetune.training.preflight import preflight, processes
from finetune.training.run_report import RunReport
from finetune.training.samples import prompts_of
from finetune.training.session import Session

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    from finetune.precision.planner import LayerPlan
    from finetune.training.callbacks import MetricsWriter


def new_run_folder(out: Path, name: str) -> Path:
    """`out/<recipe>/<time>-<short id>/`, the same on every process."""
    from accelerate.utils import broadcast_object_list

    stamp = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(2).hex()}"
    if processes() > 1:
        stamp = broadcast_object_list([stamp])[0]
    return out / name / stamp


def train(
    recipe: Recipe,
    *,
    out: Path | str = "runs",
    force: bool = False,
    console: Console | None = None,
) -> RunReport:
    """Train a recipe and write its run folder.

    Args:
        recipe: from `finetune.load_recipe`.
        out: folder of runs.
        force: train even where the memory bound says it cannot fit.
        console: where to show progress; a quiet one for notebooks and tests.

    Raises:
        FinetuneError: anything that is the user's to mend, see `finetune.errors`.
    """
    from accelerate import PartialState
    from transformers import set_seed
    from transformers.trainer_callback import PrinterCallback, ProgressCallback

    from finetune.training.callbacks import (
        GracefulStop,
        LossScaleLog,
        MetricsWriter,
        ProgressBar,
        ScalingStateKeeper,
        peak_memory_gib,
    )
    from finetune.training.health.monitor import HealthMonitor
    from finetune.training.memory_meter import MemoryMeter
    from finetune.training.samples import SampleWriter
    from finetune.training.timer import STEPS_FILE, StepTimer

    config, device = recipe.config, this_device()
    refuse_sharded(config)
    ahead = preflight(config, device, force=force)
    if not force:
        check_room(config, device, processes())
    state = PartialState(cpu=device.kind == "cpu")
    main_process = state.is_main_process
    console = console or Console(quiet=not main_process)
    folder = new_run_folder(Path(out), recipe.name)
    tokenizer, note = load_tokenizer(config.model)
    with state.main_process_first():
        rows = load_data(config.data, tokenizer, int(config.train.get("seed", 42)))
    args = sft_config(config, folder, rows.settings, on_cpu=device.kind == "cpu")
    resume = _resume_folder(config)
    if "eval_on_start" not in config.train and rows.eval is not None and resume is None:
        args.eval_on_start = config.eval.at_start and args.eval_strategy != "no"
    tasks = load_tasks(config.eval) if main_process else []
    if main_process:
        try:
            folder.mkdir(parents=True)
        except OSError as error:
            raise ConfigError(
                f"the run folder {str(folder)!r} cannot be made: {error.strerror}",
                where=f"--out {out}",
                fix="choose another folder with --out",
            ) from None
        write_start(folder)
        (folder / "config.yaml").write_text(recipe.to_yaml(), encoding="utf-8")
    console.print(f"[bold]{recipe.name}[/] -> {folder}", highlight=False)
    console.print(f"data: {rows.description}", highlight=False)
    if note:
        console.print(f"[yellow]! {note}[/]")

    with session_of(config, console) as running:
        metrics = MetricsWriter(folder / "metrics.jsonl", running.resolution.label)
        bar, stop = ProgressBar(console, metrics), GracefulStop(console)
        meter = MemoryMeter(running)
        keeper = ScalingStateKeeper(running, resume)
        prompts = prompts_of(config, rows, tokenizer)
        asking = SampleWriter(config, prompts, tokenizer, metrics, console, meter)
        clock = StepTimer(device.kind, folder / STEPS_FILE)
        set_seed(args.seed)
        trainer = make_trainer(
            config,
            args,
            train=rows.train,
            held_out=rows.eval,
            tokenizer=tokenizer,
            held=ahead.plan.held,
            callbacks=[asking, metrics, bar, stop, keeper, meter, clock],
        )
        monitor = HealthMonitor(trainer, say=lambda line: console.print(f"[yellow]! {line}[/]"))
        trainer.add_callback(monitor)
        trainer.remove_callback(PrinterCallback)
        trainer.remove_callback(ProgressCallback)
        if running.precision.compute == "fp16":
            trainer.callback_handler.callbacks.insert(0, LossScaleLog())
        started = time.perf_counter()
        interrupted, stopped = False, ""
        try:
            with stop:
                trainer.train(resume_from_checkpoint=str(resume) if resume else None)
                interrupted = stop.asked
            if rows.eval is not None and not interrupted and not _just_evaluated(metrics):
                trainer.evaluate()
        except KeyboardInterrupt:
            interrupted = True
        except FinetuneError as error:
            stopped = error.what
            raise
        finally:
            meter.close()
            clock.close()
            bar.close()
            monitor.close()
            receipt = running.receipt()
            receipt.memory = meter.reading()
            receipt.conditions = conditions_of(trainer, running)
            receipt.run = {"name": recipe.name, "folder": str(folder)}
            receipt.run |= {"interrupted": interrupted, "stopped": stopped}
            if main_process:
                receipt.save(folder / "receipt.json")
        seconds = time.perf_counter() - started
        if not interrupted:
            trainer.save_model(str(folder / "model"))
            if main_process and config.precision.eval == "fp8":
                keeper.save_to(folder)  # `generate` casts by these scales
        samples, scores = [], {}
        if not interrupted and main_process:
            unwrapped = trainer.accelerator.unwrap_model(trainer.model)
            samples = asking.at_end(unwrapped, trainer.state, anew=args.load_best_model_at_end)
            if tasks:
                scores = score(unwrapped, tokenizer, tasks, config)
                metrics.write({"step": trainer.state.global_step, "tasks": scores}, trainer.state)

    if not interrupted and main_process:
        receipt.memory |= predicted(config, device, meter.batch, processes())
        receipt.save(folder / "receipt.json")
    losses, speeds = metrics.values("loss"), sorted(metrics.values("tokens_per_s")[1:])
    report = RunReport(
        folder=folder,
        receipt=receipt,
        first_loss=losses[0] if losses else None,
        final_loss=losses[-1] if losses else None,
        eval_loss=next(iter(metrics.values("eval_loss")[-1:]), None),
        tokens_per_s=speeds[len(speeds) // 2] if speeds else None,
        seconds=seconds,
        peak_memory_gib=max(meter.earlier_gib, peak_memory_gib()),
        samples=samples,
        tasks=scores,
        interrupted=interrupted,
    )
    if main_process:
        (folder / "report.json").write_text(report.to_json() + "\n", encoding="utf-8")
    return report


@contextlib.contextmanager
def session_of(config: RunConfig, console: Console) -> Iterator[Session]:
    """The precision of a run in force; a fall-back is said loudly."""
    installed = session.install(config.precision)
    try:
        if installed.resolution.fallback:
            console.print(f"[bold red]! {installed.resolution.fallback}[/]", highlight=False)
        yield installed
    finally:
        session.uninstall()


def _resume_folder(config: RunConfig) -> Path | None:
    value = config.train.get("resume_from_checkpoint")
    if not value:
        return None
    folder = Path(str(value)).expanduser()
    if (folder / "checkpoints").is_dir():  # a run folder: its newest checkpoint
        folder = folder / "checkpoints"
    found = sorted(folder.glob("checkpoint-*"), key=lambda p: int(p.name.rpartition("-")[2]))
    folder = found[-1] if found else folder
    if not (folder / "trainer_state.json").is_file():
        raise ConfigError(
            f"there is no checkpoint in {str(value)!r}",
            where="train.resume_from_checkpoint",
            why="a checkpoint folder holds trainer_state.json",
            fix="give a run folder, its checkpoints/ folder, or one checkpoint-N folder",
        )
    return folder


def _just_evaluated(metrics: MetricsWriter) -> bool:
    steps = [row["step"] for row in metrics.rows if "eval_loss" in row]
    return bool(steps) and steps[-1] == metrics.rows[-1]["step"]


# ------------------------------------------------------------------------------------------
# The stock `SFTTrainer` around a recipe's model: what training and measuring have in common.
#
# A speed that was measured on another assembly than the one that trains would say nothing of it, so
# there is one: weights as the plan holds them, adapters, and an optimizer that Transformers may not
# know by name.


def make_trainer(
    config: RunConfig,
    args: SFTConfig,
    *,
    train: Dataset,
    held_out: Dataset | None,
    tokenizer: PreTrainedTokenizerBase,
    held: Sequence[LayerPlan],
    callbacks: list[TrainerCallback],
    kind: type[SFTTrainer] | None = None,
) -> SFTTrainer:
    """Load a recipe's model and build the trainer around it, under the session in force.

    Args:
        config: the run.
        args: of the trainer (`finetune.config.sft`).
        train, held_out: rows in one of TRL's formats.
        tokenizer: of the rows.
        held: rows of the run's plan whose weights are held in FP8 from the beginning.
        callbacks: of the trainer.
        kind: of trainer; left out, `trl.SFTTrainer` itself.

    Raises:
        FinetuneError: the model cannot be loaded, or adapters do not fit it.
    """
    from peft import get_peft_model
    from trl import SFTTrainer

    model: Any = load_model(config.model, held)
    adapters = lora_config(config.lora) if config.lora else None
    if adapters is not None and held_weights(model):  # the trainer would cast what it attaches
        model, adapters = get_peft_model(model, adapters), None
    optimizer = chosen(config.train)
    if optimizer.library == "bitsandbytes":
        low_bit.forget_overrides()
    with nf4.masters_kept(model):
        trainer = (kind or SFTTrainer)(
            model=model,
            args=args,
            train_dataset=train,
            eval_dataset=held_out,
            processing_class=tokenizer,
            peft_config=adapters,
            optimizer_cls_and_kwargs=low_bit.class_and_kwargs(config.train, args)
            if optimizer.library == "torchao"
            else None,
            callbacks=callbacks,
        )
    return trainer
