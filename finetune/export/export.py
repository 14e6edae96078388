"""`export_run(run, to, out)`: from a run folder to checked weights in standard formats.

    adapter   the adapter as it is, naming its base model
    merged    the adapter merged into the original weights, in their stored type
    fp8       merged, then FP8 (compressed-tensors `float-quantized`)
    nvfp4     merged, then four bits (compressed-tensors `nvfp4-pack-quantized`)
    gguf      merged, then a file in BF16 for llama.cpp and Ollama, and one for images where the
              model has a tower; `gguf-q8` in 8 bits (Q8_0)

Merging uses the original weights: a run may store its frozen base in FP8 or NF4, and merging into
such codes would round the adapter away. A full run's weights are in its `model/`; an interrupted
run has none, and nothing to export.
"""

from __future__ import annotations

import contextlib
import gc
import io
import platform
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial as bind
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from torch import Tensor

from finetune import __version__
from finetune.config.methods import method_of
from finetune.config.paths import recipe_of, user_path
from finetune.config.recipe import read_recipe
from finetune.config.schema import ModelConfig, RunConfig
from finetune.config.sections import BUILTIN
from finetune.errors import ConfigError, DataNotFoundError, did_you_mean, install_hint
from finetune.export import compressed_tensors, gguf, parity
from finetune.export.folder import (
    RECORD,
    copy_companions,
    stored_names,
    weights_folder,
    write_adapter,
    write_json,
    writing_to,
)
from finetune.export.merge import merged
from finetune.export.parity import Batches, Observation, Parity, batches_of, load_stock
from finetune.hardware.device import this_device
from finetune.hardware.requirements import require
from finetune.hardware.versions import version
from finetune.logging import output
from finetune.precision.model.towers import beside_text
from finetune.runs.card import model_card
from finetune.runs.checkpoints import resume_command
from finetune.runs.lookup import read_run, refuse_foreign_code
from finetune.storage.loading import quantization_of
from finetune.storage.pretrained import auto_class, loading, locate
from finetune.training.asking.reload import refuse_scores
from finetune.training.checkpoints.resume import refuse_other_base
from finetune.training.model import is_published_fp8

TARGETS = tuple(parity.MULTIPLES)
QUANTIZED = tuple(compressed_tensors.PRESETS)
LIBRARIES = ("torch", "transformers", "peft", "safetensors", "compressed-tensors", "gguf")


@dataclass(frozen=True)
class FinishedRun:
    """Run that can be exported.

    Attributes:
        model: folder of trained weights, plain Hugging Face weights or a plain adapter.
        status: `proven`, or the reason why not.
        eval_loss: eval loss that the run reported, None without evaluation rows.
    """

    folder: Path
    config: RunConfig
    model: Path
    status: str
    eval_loss: float | None

    @property
    def has_adapter(self) -> bool:
        """True if `model` has an adapter, False if it has all weights."""
        return (self.model / "adapter_config.json").is_file()


def open_run(folder: Path | str) -> FinishedRun:
    """Read a run folder.

    Raises:
        ConfigError: it is no run folder, or has no weights.
    """
    run = read_run(folder)
    folder = run.folder
    model = folder / "model"
    if not model.is_dir():
        again = f"let it end: {resume_command(folder)}, if it saved a checkpoint"
        raise run.without_weights(again)
    if not run.receipt:
        raise ConfigError(
            f"the run {str(folder)!r} has no receipt",
            where=str((folder / "receipt.json").absolute()),
            why="an export says what of the run was proven",
            fix="let the run end, or run it again",
        )
    config = read_recipe(str(folder / "config.yaml")).config
    refuse_scores(config, folder)
    refuse_other_base(config, model)
    # A loss of preferences is no loss of text, which is what is computed again.
    loss = run.report.get("eval_loss") if method_of(config.train).is_text else None
    return FinishedRun(folder, config, model, run.receipt["status"], loss)


@dataclass(frozen=True)
class Export:
    """Finished export.

    Attributes:
        target: one of `TARGETS`.
        parity: comparison with the run's model.
        rows: description of the compared rows.
        quantized, kept: names of linear layers that were quantized, and of those that were not.
    """

    folder: Path
    target: str
    parity: Parity
    rows: str
    quantized: tuple[str, ...]
    kept: tuple[str, ...]


def export_run(
    run: Path | str,
    to: str,
    out: Path | str,
    *,
    force: bool = False,
    trust_remote_code: bool = False,
    console: Console | None = None,
) -> Export:
    """Export a run's weights, and check them against the run's model on its evaluation rows.

    Args:
        run: a run folder.
        to: `adapter`, `merged`, `fp8`, `nvfp4`, `gguf` or `gguf-q8`.
        out: the folder to make.
        force: replace an earlier export there.
        trust_remote_code: the model's own code may run, if the run's recipe says so too.
        console: console for progress output.

    Raises:
        ConfigError: no such run or target, or an unsupported combination, with the reason.
        MissingExtraError: a quantized export cannot be checked without compressed-tensors.
        ParityError: the export is not what was trained; it stays in `out.partial`.
    """
    from transformers import AutoTokenizer

    say = bind((console or output()).print, soft_wrap=True)
    finished, out = open_run(run), user_path(out)
    refuse_foreign_code(finished.config, finished.folder, trust_remote_code)
    _refuse_target(to, finished)
    config, adapter = finished.config, finished.model if finished.has_adapter else None
    source = weights_folder(config.model) if adapter else finished.model
    outline = None if to == "adapter" else _outline(source, config.model)
    with loading(str(finished.model)):
        AutoTokenizer.from_pretrained(  # it is copied
            finished.model, trust_remote_code=config.model.trust_remote_code
        )
    quantized, kept, experts = [], [], 0
    if to in QUANTIZED:
        stored = stored_names(source)
        quantized, kept = compressed_tensors.layers_to_quantize(outline, to, stored)
    with writing_to(out, force=force, keep_clear=(finished.folder, source)) as folder:
        if finished.status != "proven":
            say(f"! this run is {finished.status}", style="yellow")
        say(f"reference: {source}" + (f" + {adapter}" if adapter else ""))
        with loading(str(finished.model)):
            batches, reference, inputs = _observe_reference(
                finished, source, to, quantized if to == "nvfp4" else []
            )
        if to == "adapter":
            write_adapter(finished.model, folder, *_base_name(config.model))
        else:
            model = merged(source, config, adapter, torch.bfloat16 if to in QUANTIZED else "auto")
            reference = reference._replace(weights=parity.signed_sums(model))
            if to in QUANTIZED:
                compressed_tensors.quantize(model, to, quantized, kept, inputs)
            weights = folder / gguf.MERGED if to in gguf.TYPES else folder
            weights.mkdir(exist_ok=True)
            # Before the model is saved, whose config.json replaces the original one.
            copy_companions(source, weights, finished.model)
            model.save_pretrained(weights)
            del model
            if to == "fp8":
                experts = compressed_tensors.quantize_saved(weights)
        if to in gguf.TYPES:
            gguf.convert(folder / gguf.MERGED, folder / gguf.FILE, to)
            if beside_text(outline) and (
                left := gguf.convert_tower(folder / gguf.MERGED, folder, to)
            ):
                say(f"! {gguf.TOWER}, for images, is not written: {left}", style="yellow")
        if quantized:
            left = f"; kept in high precision: {', '.join(kept)}" if kept else ""
            more = f" and {experts} weights of experts" if experts else ""
            say(f"quantized to {to}: {len(quantized)} linear layers{more}{left}")
        mib = sum(file.stat().st_size for file in folder.iterdir()) / 2**20
        say(f"written: {mib:,.1f} MiB; now loading it to compare")
        measured = check_export(folder, to, finished, batches.evaluation, reference)
        layers = {"quantized": quantized, "kept_in_high_precision": kept}
        record = _record(finished, to, source, batches.rows, measured, reference.noise) | layers
        # Before the figures are judged: an export that fails keeps them beside it.
        write_json(folder / RECORD, record, indent=1)
        parity.check(measured, to, reference.noise, str(folder))
        shutil.rmtree(folder / gguf.MERGED, ignore_errors=True)
        compared, whole = f"{batches.rows}: {measured}", read_run(finished.folder)
        card = model_card(config, whole.receipt, whole.report, target=to, parity=compared)
        (folder / "README.md").write_text(card, encoding="utf-8")
    say(f"parity on {batches.rows}: {measured}")
    return Export(out.resolve(), to, measured, batches.rows, tuple(quantized), tuple(kept))


def check_export(
    folder: Path,
    to: str,
    run: FinishedRun,
    batches: list[dict[str, Any]],
    reference: Reference,
) -> Parity:
    """Load an export as users would and compare it with the reference's outputs.

    Raises:
        ParityError: that fails by itself, and the export stays.
    """
    # compressed-tensors (0.20) unpacks weights under bars, when loading or in the first forward.
    quiet: Any = contextlib.redirect_stderr(io.StringIO()) if to in QUANTIZED else None
    with parity.kept_unchecked(folder), quiet or contextlib.nullcontext():
        model = _loaded(folder, to, run)
        wide = to == "merged" or to in gguf.TYPES
        with parity.in_float32(model) if wide else contextlib.nullcontext():
            export = parity.observe(model, batches)
        return parity.compare(reference.outputs, export, parity.furthest(model, reference.weights))


def _loaded(folder: Path, to: str, run: FinishedRun) -> Any:
    if to in QUANTIZED:
        return load_stock(folder, run.config, dtype="auto")
    if to == "merged":
        return load_stock(folder, run.config)
    if to in gguf.TYPES:
        model = load_stock(folder / gguf.MERGED, run.config, dtype=torch.float32)
        gguf.read_into(model, folder / gguf.FILE)
        return model
    from peft import PeftConfig

    # By the export's own words: whether a base is found by them is a part of what is checked.
    named = PeftConfig.from_pretrained(str(folder))
    base = str(named.base_model_name_or_path)
    original = run.config.model.model_copy(update={"name": base, "revision": named.revision})
    stored = Path(base) if Path(base).is_dir() else weights_folder(original)
    return load_stock(stored, run.config, adapter=folder)


def _refuse_target(to: str, run: FinishedRun) -> None:
    if to not in TARGETS:
        raise ConfigError(
            f"there is no export to {to!r}{did_you_mean(to, TARGETS)}",
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
    if to in QUANTIZED:
        require(f"--to {to}", "compressed_tensors", install_hint("export"))
    if to in gguf.TYPES:
        gguf.converter(to)


def _outline(source: Path, model: ModelConfig) -> Any:
    """The stock model of the weights in a folder, on the meta device.

    Raises:
        ConfigError: they are codes already, into which nothing can be merged.
    """
    from transformers import AutoConfig

    trust = {"trust_remote_code": model.trust_remote_code}
    with loading(str(source)):
        shape = AutoConfig.from_pretrained(source, **trust)
        # Which layers can be quantized follows from shapes: no weight is read for it.
        with torch.device("meta"):
            outline = auto_class(shape).from_config(shape, **trust)
    if is_published_fp8(shape):  # merged into the BF16 weights that the codes stand for
        del outline.config.quantization_config
    elif found := quantization_of(shape):
        raise ConfigError(
            f"the weights in {str(source)!r} are quantized ({found.get('quant_method')}), and "
            "nothing is merged into such weights",
            where=f"model.name: {source}",
            why="a step of such weights is larger than most of what an adapter adds: rounding "
            "would drop it",
            fix="--to adapter, and load it over these weights; or train on the BF16 weights that "
            "they were made from",
        )
    return outline


def _base_name(model: ModelConfig) -> tuple[str, str | None]:
    """Hub name and revision of the base, or its folder."""
    found = Path(locate(model))
    if model.name.startswith(BUILTIN) or found.is_dir():
        return str(found.resolve()), None
    return model.name, model.revision


class Reference(NamedTuple):
    """Outputs of the run's model, the noise of BF16 in them, and sums of its merged weights."""

    outputs: Observation
    noise: Parity | None
    weights: dict[str, Tensor]


def _observe_reference(
    run: FinishedRun, source: Path, to: str, calibrate: list[str]
) -> tuple[Batches, Reference, dict[str, float]]:
    """Run the reference: what it says, and the largest inputs of `calibrate` layers.

    An adapter is compared in the type in which it is used, and bit by bit: there is no noise.
    """
    model = load_stock(source, run.config, adapter=run.model if run.has_adapter else None)
    with _naming_the_rows(run):
        batches = batches_of(run.config, model)
    with contextlib.ExitStack() as rounding:
        # A run in FP16 or float32: the noise that bounds are multiples of is BF16's.
        if to != "adapter" and model.dtype != torch.bfloat16:
            rounding.enter_context(parity.in_float32(model))
            rounding.enter_context(torch.autocast(this_device().kind, torch.bfloat16))
        outputs = parity.observe(model.eval(), batches.evaluation, answers=False)
    noise = None
    if to != "adapter":
        rounded = outputs
        with parity.in_float32(model):
            outputs = parity.observe(model, batches.evaluation, answers=False)
        noise = parity.compare(outputs, rounded)
    parity.check_reference(outputs.loss, parity.likelihood_of(run.config.train, run.eval_loss))
    inputs = {}
    if calibrate:
        inputs = compressed_tensors.input_amax(model, calibrate, batches.calibration)
    del model
    gc.collect()  # the trainer behind the batches refers to the model in cycles
    return batches, Reference(outputs, noise, {}), inputs


@contextlib.contextmanager
def _naming_the_rows(run: FinishedRun) -> Iterator[None]:
    """Say of rows that are gone why an export needs them, and where their path stands."""
    try:
        yield
    except DataNotFoundError as error:
        raise DataNotFoundError(
            error.what,
            where=error.where,
            why="an export is compared with the run's model on the run's own rows",
            fix="export in the folder that the run was started in, or write the path of its rows "
            f"into {run.folder / 'config.yaml'} (data)",
        ) from None


def _record(
    run: FinishedRun, to: str, source: Path, rows: str, measured: Parity, noise: Parity | None
) -> dict[str, Any]:
    figures = parity.as_record(measured, to, noise)
    return {
        "finished": figures["passed"],
        "target": to,
        "run": str(run.folder.resolve()),
        "recipe": recipe_of(run.folder),
        "proof": run.status,
        "model": run.config.model.name,
        "weights": str(source),
        "rows": rows,
        "parity": figures,
        "run_eval_loss": run.eval_loss,
        "versions": {"finetune": __version__, "python": platform.python_version()}
        | {name: found for name in LIBRARIES if (found := version(name))},
    }
