"""`export_run(run, to, out)`: from a run folder to weights that others load, checked.

    adapter   the adapter as it is, naming the model that it belongs to
    merged    the adapter in the original weights, in the type that those are stored in
    fp8       merged, then FP8 (compressed-tensors `float-quantized`)
    nvfp4     merged, then four bits (compressed-tensors `nvfp4-pack-quantized`)

Original weights, not those of the run: a run may hold a frozen base in FP8 or NF4, and merging into
such codes would round the adapter away. A full run's own weights are what `model/` holds.
"""

from __future__ import annotations

import gc
import json
import platform
from dataclasses import dataclass
from functools import partial as bind
from pathlib import Path
from typing import Any

from rich.console import Console

from finetune import __version__
from finetune.config import BUILTIN
from finetune.device import version
from finetune.errors import ConfigError, nearest
from finetune.export import layouts, parity, writing
from finetune.export.calibration import input_amax
from finetune.export.checkpoint import Checkpoint, open_checkpoint, weights_folder
from finetune.export.destination import RECORD, writing_to
from finetune.export.evaluation import batches_of, load_stock
from finetune.export.merging import Merger
from finetune.export.parity import Observation, Parity
from finetune.export.runs import FinishedRun, open_run
from finetune.extras import require
from finetune.model import locate

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
    quantised, kept = layouts.layers_to_quantise(checkpoint) if to in QUANTISED else ([], [])
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
            quantization = layouts.quantization_config(to, kept) if to in QUANTISED else None
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
        return dict.fromkeys(layers, layouts.encode_fp8)
    if to == "nvfp4":
        largest = layouts.share_amax(writing.weight_amax(checkpoint, merger, layers))
        return {
            name: bind(layouts.encode_nvfp4, largest=largest[name], inputs=inputs[name])
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
