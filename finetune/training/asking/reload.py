"""Reload of a trained run: its model as it was during training.

A full run is its own weights. An adapter run is its base, stored as in the run (plain, FP8 codes,
NF4), under the adapter: its eval loss and samples came from that combination, which the adapter was
trained on. Evaluation runs in high precision, so nothing is converted, unless the run requested it
(`precision.eval=fp8`, `precision.map`); then the model is prepared as in training, in a session of
its own.

Limits: adapters over random weights cannot be reloaded, since those are stored nowhere. GPU kernels
that round differently (attention, other batch sizes) may flip a near tie between tokens.
"""

from __future__ import annotations

import contextlib
import shlex
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.config.recipe import read_recipe
from finetune.config.schema import ModelConfig, RunConfig
from finetune.errors import ConfigError, FinetuneError, did_you_mean, some
from finetune.precision.settings import PrecisionConfig
from finetune.runs.checkpoints import CHECKPOINTS, Checkpoint, checkpoints_in
from finetune.runs.folder import RunFolder
from finetune.runs.lookup import refuse_foreign_code
from finetune.storage.pretrained import refuse_random_base


@dataclass(frozen=True)
class TrainedRun:
    """Weights of a run, at its end or at a checkpoint: a plain Hugging Face model or adapter."""

    folder: Path
    config: RunConfig
    weights: Path


def open_trained(
    folder: Path,
    checkpoint: str | None = None,
    *,
    trust_remote_code: bool = False,
    train: bool = False,
) -> TrainedRun:
    """Find a run's weights; a `ConfigError` lists its checkpoints.

    Args:
        checkpoint: a step, or `last`; default: the weights at the run's end.
        trust_remote_code: the model's own code may run, if the run's recipe says so too.
        train: check the section `train`, too, of which nothing is needed to answer, and which loads
            TRL; unchecked, its numbers are texts.
    """
    config = read_recipe(str(folder / "config.yaml"), check_train=train).config
    refuse_scores(config, folder)
    # Before anything of the folder is loaded, since loading it is what runs the code.
    refuse_foreign_code(config, folder, trust_remote_code)
    saved = {str(step): path for step, path in checkpoints_in(folder / CHECKPOINTS).items()}
    steps, weights = list(saved), folder / "model"
    again = f"`python -m finetune {shlex.quote(str(folder / 'config.yaml'))}` trains it again"
    known = f"--checkpoint last, or one of {', '.join(steps)}" if steps else f"it has none: {again}"
    if checkpoint is None and weights.is_dir():
        return TrainedRun(folder, config, weights)
    if checkpoint is None:
        raise RunFolder(folder).without_weights(known, can_wait=not steps)
    step = steps[-1] if checkpoint == "last" and steps else checkpoint
    if step not in saved:
        raise ConfigError(
            f"there is no checkpoint {checkpoint!r}{did_you_mean(step, steps)}",
            where=str((folder / CHECKPOINTS).absolute()),
            fix="leave --checkpoint out: the run has its last weights"
            if weights.is_dir() and not steps
            else known,
        )
    if damage := Checkpoint(saved[step]).damage(contents=True, of=".safetensors"):
        raise ConfigError(
            f"checkpoint {step} is damaged: {damage}",
            where=str(saved[step]),
            why="answers would not be the run's",
            fix=f"another step: {known}; or {again}",
        )
    return TrainedRun(folder, config, saved[step])


def refuse_scores(config: RunConfig, folder: Path) -> None:
    """Reject a reward model, of which Transformers takes the scores as the run has saved it."""
    if config.model.head:
        name = str(folder / "model")
        raise ConfigError(
            "a reward model scores texts, and writes none",
            where=str(folder),
            why=f"it was trained by train.method={config.train.method}",
            fix=f"AutoModelForSequenceClassification.from_pretrained({name!r}, num_labels=1); of "
            "an adapter, AutoPeftModelForSequenceClassification",
        )


def _reader(run: TrainedRun, tokenizer: Any, images: bool | None) -> Any:
    """The processor of a run's model around its tokenizer, or the tokenizer alone."""
    from transformers.utils import PROCESSOR_NAME

    from finetune.logging import output
    from finetune.storage.pretrained import load_shape
    from finetune.storage.processors import load_processor, takes_images

    model, train = run.config.model, run.config.train
    if images is False or not takes_images(load_shape(model)):
        return tokenizer
    if (run.weights / "config.json").is_file() and (run.weights / PROCESSOR_NAME).is_file():
        model = model.model_copy(update={"name": str(run.weights.resolve()), "revision": None})
    try:
        return load_processor(model, tokenizer, **train.pixels)
    except FinetuneError as error:
        if images:
            raise
        output(stderr=True).print(f"! no images: {error.what}; {error.fix}", style="yellow")
        return tokenizer


@contextlib.contextmanager
def loaded(run: TrainedRun, *, images: bool | None = False) -> Iterator[tuple[Any, Any]]:
    """Load a run's model, in evaluation mode on this machine's device, and what reads for it.

    Args:
        images: True: it is asked with images, and its processor is loaded; None: it may be, and
            why it cannot is a line; False: its tokenizer is enough.

    Raises:
        ModelNotFoundError: the base is missing, or a file of either is broken.
        ConfigError: the base had random weights.
        PrecisionError: the run evaluates in FP8, which is unavailable here.
    """
    from transformers import AutoTokenizer
    from transformers.trainer_utils import align_special_tokens

    from finetune.hardware.device import this_device
    from finetune.storage.pretrained import loading
    from finetune.training.helper import session
    from finetune.training.helper.finite import not_finite

    device = this_device().kind
    with loading(str(run.weights)):
        model = _load(run)
        # A run that ended in NaN has saved weights; without this its answers are empty or noise.
        if broken := not_finite(model):
            raise ConfigError(
                f"{len(broken):,} weights of the run are not finite",
                where=f"{run.weights}: {some(broken, 3)}",
                why="answers and scores that NaN or infinity gives say nothing about the rest",
                fix="--checkpoint with an earlier one, or train again at a lower "
                "train.learning_rate",
            )
        trust = run.config.model.trust_remote_code  # `open_trained` asked whether it may
        tokenizer = AutoTokenizer.from_pretrained(run.weights, trust_remote_code=trust)
        align_special_tokens(model, tokenizer)  # as in the trainer: decides where an answer ends
    reader = _reader(run, tokenizer, images)
    precision = _as_evaluated(run.config.precision)
    codes_alone = precision is not None and precision.fp8_params
    if model.device.type != device and not codes_alone:
        model = model.to(device)
    with session.replacing() if precision is not None else contextlib.nullcontext():
        if precision is not None:
            conversion = session.install(precision).prepare_model(model)
            if codes_alone:  # all of it may be too much for the device
                model = model.to(device)
            if precision.eval == "fp8" and conversion.engine is not None:
                _take_scales(run, conversion.engine)
        yield model.eval(), reader


def untrained(run: TrainedRun, model: Any) -> Any:
    """The model that training began with, as `chat` takes it: True for adapters, to switch off.

    Raises:
        ConfigError: it began with random weights.
    """
    from finetune.training.model import load_model

    if (run.weights / "adapter_config.json").is_file():
        return True
    refuse_random_base(run.config.model)
    return load_model(run.config.model).to(model.device).eval()


def _take_scales(run: TrainedRun, engine: Any) -> None:
    """Load the scales of delayed scaling, without which casts would be noise."""
    from finetune.training.helper.scaling_state import load_scaling

    if not run.config.precision.facts.has_history:
        return
    # A checkpoint has its scales beside its weights, a finished run in its folder.
    if load_scaling(engine, run.weights) and (why := load_scaling(engine, run.folder)):
        raise ConfigError(
            "the run evaluates in FP8 by delayed scaling, and its scales are not stored",
            where=str(run.folder),
            why=f"{why}: casts by other scales would not say what the run said",
            fix="--checkpoint last, if it saved one",
        )


def _load(run: TrainedRun) -> Any:
    from finetune.precision.cases.experts import split_adapters
    from finetune.precision.planner import plan
    from finetune.training.checkpoints.resume import refuse_other_base
    from finetune.training.model import load_model, meta_model

    config = run.config
    if not (run.weights / "adapter_config.json").is_file():
        # Whole weights are what they are: stored in no other form, and of no revision of the hub.
        full: Any = config.model.model_dump() | {"name": str(run.weights.resolve())}
        full |= {"weights": "pretrained", "storage": None, "revision": None}
        return load_model(ModelConfig(**full))
    refuse_random_base(config.model)
    refuse_other_base(config, run.weights)
    base: Any = load_model(config.model, plan(meta_model(config), config.precision).stored)
    model = with_adapter(base, run.weights, is_trainable=True)
    split_adapters(model.modules())  # PEFT adds those on experts to weights, which may be codes
    return model


def with_adapter(model: Any, adapter: Path, **options: Any) -> Any:
    """A plain model under the adapter in a folder, by stock PEFT with its `options`."""
    from peft import PeftModel

    from finetune.storage.ends import take_ends
    from finetune.training.scope import false_warnings_ignored

    with false_warnings_ignored():  # PEFT leaves what it does not find as it was drawn
        # PEFT would begin what is missing by chance, with a warning that nobody reads.
        warnings.filterwarnings("error", "Found missing adapter keys")
        model = PeftModel.from_pretrained(model, str(adapter), **options)
    take_ends(model, adapter)
    return model


def _as_evaluated(precision: PrecisionConfig) -> PrecisionConfig | None:
    """Precision to prepare the model in; None if it is evaluated as a plain model."""
    is_fp8 = precision.compute == "fp8"
    if is_fp8 and precision.eval == "fp8":
        return precision
    if not (precision.map or precision.fp8_params):
        return None
    # Evaluation does not run FP8 GEMMs, so any engine will do.
    any_backend = {"backend": "emulated", "emulation": "allow"}
    return precision.model_copy(update=any_backend) if is_fp8 else precision
