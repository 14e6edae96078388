"""What a run folder holds, and whether it can be exported.

A run that ended leaves `config.yaml`, `receipt.json`, `report.json` and `model/`; one that was
interrupted or stopped has no `model/`, and there is nothing to export.
"""

from __future__ import annotations

import contextlib
import gc
import json
import platform
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial as bind
from pathlib import Path
from typing import Any

from rich.console import Console

from finetune import __version__
from finetune.config.recipe import load_recipe
from finetune.config.schema import BUILTIN, RunConfig
from finetune.errors import ConfigError, ParityError, nearest
from finetune.export import compressed_tensors, parity, writing
from finetune.export.compressed_tensors import input_amax
from finetune.export.merge import Merger
from finetune.export.parity import Observation, Parity, batches_of, load_stock
from finetune.export.weights import Checkpoint, open_checkpoint, weights_folder
from finetune.hardware.device import version
from finetune.hardware.requirements import require
from finetune.runs.lookup import read_run
from finetune.training.model import locate

ADAPTER_CONFIG = "adapter_config.json"


@dataclass(frozen=True)
class FinishedRun:
    """A run that can be exported.

    Attributes:
        folder: the run folder.
        config: what was run.
        model: the folder of trained weights, plain Hugging Face weights or a plain adapter.
        status: of the proof, `proven` or why not.
        eval_loss: held-out loss that the run reported, None without held-out rows.
    """

    folder: Path
    config: RunConfig
    model: Path
    status: str
    eval_loss: float | None

    @property
    def has_adapter(self) -> bool:
        """Whether `model` holds an adapter; else it holds all weights."""
        return (self.model / ADAPTER_CONFIG).is_file()


def open_run(folder: Path | str) -> FinishedRun:
    """Read a run folder.

    Raises:
        ConfigError: it is no run folder, or the run has left no weights.
    """
    run = read_run(folder)
    folder = run.folder
    model = folder / "model"
    if not model.is_dir():
        why = {
            "interrupted": "it was interrupted before its end",
            "stopped": run.receipt.get("run", {}).get("stopped", ""),
            "failed": "it ended in an error",
            "running": "it has not ended yet",
            "killed": "it was killed before its end",
        }.get(run.state, "it ended, and its model/ was removed")
        raise ConfigError(
            f"the run {str(folder)!r} has no trained weights",
            where=str(model.resolve()),
            why=why,
            fix=f"let it end: train.resume_from_checkpoint={folder} goes on from its last "
            "checkpoint, if it saved one",
        )
    if not run.receipt:
        raise ConfigError(
            f"the run {str(folder)!r} has no receipt",
            where=str((folder / "receipt.json").resolve()),
            why="an export says what of the run was proven",
            fix="let the run end, or run it again",
        )
    config = load_recipe(str(folder / "config.yaml")).config
    status, eval_loss = run.receipt["status"], run.report.get("eval_loss")
    return FinishedRun(folder, config, model, status, eval_loss)


# ------------------------------------------------------------------------------------------
# The folder an export is written to: complete and checked, or not there.
#
# Everything is written to `OUT.partial` and moved to `OUT` at the end. Ctrl-C or an error takes the
# partial folder away; a failed parity check leaves it, with the figures, to be looked at.


RECORD = "export.json"
"""The file that marks a folder as an export of ours, finished or not."""


@contextlib.contextmanager
def writing_to(out: Path, *, force: bool, keep_clear: tuple[Path, ...]) -> Iterator[Path]:
    """A folder to write to, which becomes `out` when the body ends well.

    Args:
        out: where the export shall be.
        force: replace an earlier export there.
        keep_clear: folders that are read, in which nothing may be written.

    Raises:
        ConfigError: `out` is taken, or inside a folder that is read.
    """
    partial = out.parent / f"{out.name}.partial"
    _check(out, partial, force=force, keep_clear=keep_clear)
    if partial.exists():
        shutil.rmtree(partial)
    try:
        partial.mkdir(parents=True)
        (partial / RECORD).write_text('{"finished": false}\n', encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{str(out)!r} cannot be written: {error.strerror}", where=str(out.resolve())
        ) from None
    try:
        yield partial
    except ParityError:
        raise
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    if out.exists():
        shutil.rmtree(out)  # empty, or an earlier export and --force
    partial.rename(out)


def _check(out: Path, partial: Path, *, force: bool, keep_clear: tuple[Path, ...]) -> None:
    where = str(out.resolve())
    for folder in (f.resolve() for f in keep_clear):
        inside = out.resolve().is_relative_to(folder)
        if inside or folder.is_relative_to(out.resolve()):
            relation = "is inside" if inside else "holds"
            raise ConfigError(
                f"{str(out)!r} {relation} {str(folder)!r}, which is read",
                where=where,
                why="a run folder stays as the run left it",
                fix="choose a folder beside it",
            )
    if out.is_file():
        raise ConfigError(f"{str(out)!r} is a file", where=where, fix="choose another folder")
    ours = (out / RECORD).is_file()
    if out.is_dir() and any(out.iterdir()) and not (force and ours):
        raise ConfigError(
            f"{str(out)!r} is not empty",
            where=where,
            why="an export is there already" if ours else "what is in it is not an export",
            fix="choose another folder, or --force to replace it" if ours else "choose another",
        )
    if partial.exists() and not (partial / RECORD).is_file():
        raise ConfigError(
            f"{str(partial)!r} is in the way",
            where=str(partial.resolve()),
            why="the export is written there until it is complete",
            fix="remove it, or choose another folder",
        )


# ------------------------------------------------------------------------------------------
# `export_run(run, to, out)`: from a run folder to weights that others load, checked.
#
#     adapter   the adapter as it is, naming the model that it belongs to
#     merged    the adapter in the original weights, in the type that those are stored in
#     fp8       merged, then FP8 (compressed-tensors `float-quantized`)
#     nvfp4     merged, then four bits (compressed-tensors `nvfp4-pack-quantized`)
#
# Original weights, not those of the run: a run may hold a frozen base in FP8 or NF4, and merging
# into
# such codes would round the adapter away. A full run's own weights are what `model/` holds.


TARGETS = tuple(parity.BOUNDS)
QUANTISED = ("fp8", "nvfp4")
LIBRARIES = ("torch", "transformers", "peft", "safetensors", "compressed-tensors")


@dataclass(frozen=True)
class Export:
    """A finished export.

    Attributes:
        folder: where it is.
        target: `adapter`, `merged`, `fp8` or `nvfp4`.
        parity: how it compares with the run's model.
        rows: on which rows.
        quantised, kept: linear layers that were quantised, and those that were not.
    """

    folder: Path
    target: str
    parity: Parity
    rows: str
    quantised: tuple[str, ...]
    kept: tuple[str, ...]


@dataclass(frozen=True)
class _Reference:
    """The run's model, seen once: what it says, and what reaches its layers."""

    batches: list[dict[str, Any]]
    rows: str
    said: Observation
    input_amax: dict[str, float]


def export_run(
    run: Path | str,
    to: str,
    out: Path | str,
    *,
    force: bool = False,
    console: Console | None = None,
) -> Export:
    """Export a run's weights, and check them against the run's model on its evaluation rows.

    Args:
        run: a run folder.
        to: `adapter`, `merged`, `fp8` or `nvfp4`.
        out: the folder to make.
        force: replace an earlier export there.
        console: where to show progress.

    Raises:
        ConfigError: no such run or target, or a combination that is refused, with the reason.
        MissingExtraError: a quantised export cannot be checked without compressed-tensors.
        ParityError: the export is not what was trained; it stays in `out.partial`.
    """
    say = bind((console or Console()).print, highlight=False, soft_wrap=True)
    finished, out = open_run(run), Path(out).expanduser().resolve()
    source, checkpoint = _source(finished, _checked(to, finished))
    quantised, kept = (
        compressed_tensors.layers_to_quantise(checkpoint) if to in QUANTISED else ([], [])
    )
    with writing_to(out, force=force, keep_clear=(finished.folder, source)) as folder:
        if finished.status != "proven":
            say(f"! this run is not proven: {finished.status}", style="yellow")
        adapter = finished.model if finished.has_adapter else None
        say(f"reference: {source}" + (f" + {adapter}" if adapter else ""))
        reference = _observe_reference(finished, source, quantised if to == "nvfp4" else [])
        if to == "adapter":
            base, revision = _base_name(finished)
            writing.write_adapter(finished.model, folder, base, revision)
        else:
            merger = Merger(checkpoint, adapter) if adapter else None
            encoders = _encoders(to, checkpoint, merger, quantised, reference.input_amax)
            writing.copy_companions(source, folder, finished.model)
            writing.write_weights(checkpoint, folder, merger, encoders)
            quantization = (
                compressed_tensors.quantization_config(to, kept) if to in QUANTISED else None
            )
            untied = merger is not None and bool(merger.untied)
            writing.write_config(checkpoint, folder, untied=untied, quantization=quantization)
        if quantised:
            left = f"; as they were: {', '.join(kept)}" if kept else ""
            say(f"in {to}: {len(quantised)} linear layers{left}")
        say(f"written: {_mib(folder):,.1f} MiB; now loading it to compare")
        measured = check_export(folder, to, finished, reference.batches, reference.said)
        record = _record(finished, to, source, reference.rows, measured) | {
            "quantised": quantised,
            "kept_in_high_precision": kept,
        }
        text = json.dumps(record, indent=1, ensure_ascii=False) + "\n"
        (folder / RECORD).write_text(text, encoding="utf-8")
        parity.check(measured, to, str(folder))
    say(f"parity on {reference.rows}: {measured}")
    return Export(out, to, measured, reference.rows, tuple(quantised), tuple(kept))


def check_export(
    folder: Path,
    to: str,
    run: FinishedRun,
    batches: list[dict[str, Any]],
    said: Observation,
) -> Parity:
    """Load an export as anyone would and compare it with what the run's model said.

    Args:
        folder: the export.
        to: its kind.
        run: the run that it was made from.
        batches: evaluation batches.
        said: the reference's answers to them.
    """
    if to == "adapter":
        from peft import PeftConfig

        named = PeftConfig.from_pretrained(str(folder))
        base = str(named.base_model_name_or_path)
        revision = named.revision
        stored = (
            Path(base)
            if Path(base).is_dir()
            else weights_folder(
                run.config.model.model_copy(update={"name": base, "revision": revision})
            )
        )
        model = load_stock(stored, run.config, adapter=folder)
    else:
        model = load_stock(folder, run.config)
    return parity.compare(said, parity.observe(model, batches))


def _checked(to: str, run: FinishedRun) -> str:
    if to not in TARGETS:
        hint = nearest(to, TARGETS)
        raise ConfigError(
            f"there is no export to {to!r}" + (f"; {hint}" if hint else ""),
            where=f"--to {to}",
            fix=f"one of {', '.join(TARGETS)}",
        )
    if to == "adapter" and not run.has_adapter:
        raise ConfigError(
            "this run has no adapter",
            where=f"--to adapter: {run.folder}",
            why="it trained all weights",
            fix="--to merged gives its weights",
        )
    if to in QUANTISED:
        require(f"--to {to}", "compressed_tensors", "pip install 'fp8-finetune[export]'")
    return to


def _source(run: FinishedRun, to: str) -> tuple[Path, Any]:
    """The folder of stored weights, and the checkpoint in it (None where none is read)."""
    folder = weights_folder(run.config.model) if run.has_adapter else run.model
    if to == "adapter":
        return folder, None
    return folder, open_checkpoint(folder, trust_remote_code=run.config.model.trust_remote_code)


def _base_name(run: FinishedRun) -> tuple[str, str | None]:
    model, found = run.config.model, locate(run.config.model)
    if model.name.startswith(BUILTIN) or Path(found).is_dir():
        return str(Path(found).resolve()), None
    return model.name, model.revision


def _observe_reference(run: FinishedRun, source: Path, calibrate: list[str]) -> _Reference:
    model = load_stock(source, run.config, adapter=run.model if run.has_adapter else None)
    batches = batches_of(run.config, model)
    said = parity.observe(model.eval(), batches.evaluation)
    largest = input_amax(model, calibrate, batches.calibration) if calibrate else {}
    parity.check_reference(said.loss, run.eval_loss)
    del model
    gc.collect()  # the trainer that made the batches refers to the model in circles
    return _Reference(batches.evaluation, batches.rows, said, largest)


def _encoders(
    to: str,
    checkpoint: Checkpoint,
    merger: Merger | None,
    layers: list[str],
    inputs: dict[str, float],
) -> dict[str, writing.Encode]:
    if to == "fp8":
        return dict.fromkeys(layers, compressed_tensors.encode_fp8)
    if to == "nvfp4":
        largest = compressed_tensors.share_amax(writing.weight_amax(checkpoint, merger, layers))
        return {
            name: bind(compressed_tensors.encode_nvfp4, largest=largest[name], inputs=inputs[name])
            for name in layers
        }
    return {}


def _record(run: FinishedRun, to: str, source: Path, rows: str, measured: Parity) -> dict[str, Any]:
    figures = parity.as_record(measured, to)
    return {
        "finished": figures["passed"],
        "target": to,
        "run": str(run.folder.resolve()),
        "recipe": run.folder.resolve().parent.name,
        "proof": run.status,
        "model": run.config.model.name,
        "weights": str(source),
        "rows": rows,
        "parity": figures,
        "run_eval_loss": run.eval_loss,
        "versions": {"finetune": __version__, "python": platform.python_version()}
        | {name: found for name in LIBRARIES if (found := version(name))},
    }


def _mib(folder: Path) -> float:
    return sum(file.stat().st_size for file in folder.iterdir()) / 2**20
