"""Loads a `ModelConfig`'s model and tokenizer: with weights, or as a sketch on the meta device."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from finetune.config.paths import ASSETS, shipped_shape, user_path
from finetune.config.schema import BUILTIN, ModelConfig, RunConfig
from finetune.errors import ConfigError, FinetuneError, ModelNotFoundError, did_you_mean, some
from finetune.storage import nf4
from finetune.storage.architecture import auto_class, fit_trl
from finetune.training import scope
from finetune.training.attention import AUTO, implementation_arguments

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from finetune.precision.planner import LayerPlan

LONGEST = 300
"""Characters of another library's message that are shown."""
TINY_LLAMA = ASSETS / "tiny_llama"


def locate(model: ModelConfig) -> str:
    """Argument for `from_pretrained`: a folder of the package, a local folder, or a hub id.

    Raises:
        ModelNotFoundError: an unknown `builtin:` name, or a missing path.
        ConfigError: pretrained weights are requested of a packaged shape, which has none.
    """
    name = model.name
    if name.startswith(BUILTIN):
        folder = ASSETS / name.removeprefix(BUILTIN)
        if (folder / "config.json").is_file():
            if model.weights == "pretrained" and not (folder / "model.safetensors").is_file():
                raise ConfigError(
                    f"the packaged model {name!r} is a shape without weights",
                    where="model.weights: pretrained",
                    why="it is meant to be trained from scratch",
                    fix="model.weights=random",
                )
            return str(folder)
        known = sorted(BUILTIN + p.parent.name for p in ASSETS.glob("*/config.json"))
        raise ModelNotFoundError(
            f"there is no packaged model {name!r}" + did_you_mean(name, known),
            where="model.name",
            fix=f"packaged models: {', '.join(known)}",
        )
    path = user_path(name)
    looks_local = name.startswith((".", "/", "~")) or name.count("/") != 1 or path.is_dir()
    if looks_local and not (path / "config.json").is_file():
        raise ModelNotFoundError(
            f"there is no model in {name!r}",
            where=f"model.name: {path.absolute()}",
            why="a model folder holds config.json" if path.is_dir() else "no such folder",
            fix="give a folder with config.json and safetensors, or a hub id such as "
            "meta-llama/Llama-3.2-1B-Instruct",
        )
    return str(path) if looks_local else name


def load_shape(model: ModelConfig) -> PretrainedConfig:
    """Architecture: from the package for packaged models, else from a folder or the hub.

    Raises:
        ModelNotFoundError: the hub cannot be reached or has no such model.
    """
    from huggingface_hub import try_to_load_from_cache
    from transformers import AutoConfig

    import finetune.storage.bdh  # noqa: F401  registers our own model types

    source = locate(model)
    shipped = shipped_shape(source)
    if shipped is not None:
        cached = isinstance(try_to_load_from_cache(source, "config.json"), str)
        if model.weights == "random" or not cached:
            values: dict[str, Any] = json.loads(shipped.read_text(encoding="utf-8"))
            return AutoConfig.for_model(values.pop("model_type"), **values)
    with loading(source):
        return AutoConfig.from_pretrained(
            source, revision=model.revision, trust_remote_code=model.trust_remote_code
        )


def is_published_fp8(shape: PretrainedConfig) -> bool:
    """True if the configuration describes FP8 weights, ours or published ones.

    Raises:
        StorageNotComputeError: FP8 in an unknown layout.
    """
    if getattr(shape.get_text_config(decoder=True), "quantization_config", None) is None:
        return False
    from finetune.storage.loading import holds_fp8

    return holds_fp8(shape)


@contextlib.contextmanager
def loading(source: str) -> Iterator[None]:
    """Raise what libraries raise over missing or broken files of a model, which is anything.

    Raises:
        ModelNotFoundError: the files cannot be read, or do not go together.
    """
    import torch

    try:
        yield
    except (FinetuneError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise _not_loaded(source, error) from error


def _not_loaded(source: str, error: Exception) -> ModelNotFoundError:
    said = next(iter(str(error).strip().splitlines()), "")
    said = said if len(said) <= LONGEST else f"{said[:LONGEST]} ..."
    known = isinstance(error, OSError | ValueError | ImportError)
    local = os.path.isdir(source)
    return ModelNotFoundError(
        f"the model {source!r} could not be loaded",
        where=f"model.name: {source}" if local else "model.name",
        why=said if known else f"a file of it is broken ({type(error).__name__}: {said})",
        fix="download or copy the folder again: config.json, tokenizer and all safetensors files "
        "belong together"
        if local
        else "check the name and your connection, `hf auth login` for gated models, or use "
        "model.weights=random to plan and measure without weights",
    )


def _check_complete(source: str, missing: Iterable[str]) -> None:
    """Reject weights that the files lack, which Transformers draws by chance with a warning."""
    if names := sorted(missing):
        raise ModelNotFoundError(
            f"the model {source!r} lacks {len(names):,} of its weights",
            where=f"model.name: {some(names, 3)}",
            why="they would be drawn by chance, and trained as if they were the model's",
            fix="download or copy its safetensors files again; model.weights=random draws all of "
            "them",
        )


def first_layers(shape: PretrainedConfig, layers: int) -> None:
    """Reduce an architecture to its first `layers` decoder layers, in place.

    Lists with an entry per layer (`layer_types`) are cut alike; shorter models stay as they are.
    """
    text = shape.get_text_config(decoder=True)
    depth = text.num_hidden_layers
    if layers >= depth:
        return
    for name, value in vars(text).items():
        if isinstance(value, (list, tuple)) and len(value) == depth:
            text.__dict__[name] = value[:layers]
    text.num_hidden_layers = layers


def sketch(
    config: RunConfig,
    before_adapters: Callable[[PreTrainedModel], None] | None = None,
    *,
    layers: int | None = None,
) -> PreTrainedModel:
    """Build the model with its adapters on the meta device: shapes without memory, in a second.

    Args:
        before_adapters: called with the plain model first.
        layers: number of leading decoder layers; default all.
    """
    import torch

    shape = load_shape(config.model)
    if layers is not None:
        first_layers(shape, layers)
    if "fp8" in (config.precision.frozen, config.model.storage):
        # A published FP8 checkpoint is read into FP8 layers, or rejected on loading.
        shape.__dict__.pop("quantization_config", None)
    kwargs: dict[str, Any] = {"dtype": getattr(torch, config.model.dtype)}
    with torch.device("meta"), loading(config.model.name):
        model = auto_class(shape).from_config(shape, **kwargs)
    fit_trl(model)
    if before_adapters is not None:
        before_adapters(model)
    scope.freeze(model, config)
    if (adapters := scope.lora_config(model, config)) is not None:
        from peft import get_peft_model

        try:
            with torch.device("meta"), scope.false_warnings_ignored():
                model = get_peft_model(model, adapters)  # pyright: ignore[reportArgumentType]
        except (ValueError, TypeError, RuntimeError) as error:
            raise scope.why_not_adapted(error, config) from error
    return model  # pyright: ignore[reportReturnType]


def load_model(model: ModelConfig, stored: Sequence[LayerPlan] = ()) -> PreTrainedModel:
    """Load the model, pretrained or random, on the device where that is cheapest.

    Args:
        stored: plan rows of weights stored in FP8 from the start: the model never exists without.

    Raises:
        ConfigError: the model or machine lacks the attention implementation.
        ModelNotFoundError: no such folder or hub model, or the hub cannot be reached.
        StorageNotComputeError: FP8 weights were requested of an otherwise quantized checkpoint.
    """
    import torch

    kwargs: dict[str, Any] = {"dtype": getattr(torch, model.dtype)}
    kwargs |= implementation_arguments(model)
    if model.weights == "pretrained":
        return _load_pretrained(model, stored, kwargs)
    try:
        return _build_random(model, stored, kwargs)
    except FinetuneError:
        raise
    except (ValueError, ImportError) as error:
        if model.attention in (None, AUTO):
            raise
        raise ConfigError(
            f"{model.name} cannot be built like this",
            where=f"model.attention: {model.attention}",
            why=str(error).strip().splitlines()[0],
            fix="~model.attention takes the model's own",
        ) from error


def _build_random(
    model: ModelConfig, stored: Sequence[LayerPlan], kwargs: dict[str, Any]
) -> PreTrainedModel:
    import torch

    from finetune.hardware.device import this_device
    from finetune.precision.layers import storable
    from finetune.storage.loading import build_stored

    shape, device = load_shape(model), this_device().kind
    if model.storage == "nf4":
        return nf4.build_random(shape, **kwargs)
    names = [row.plain_name for row in stored]
    if not stored and model.storage == "fp8":
        with torch.device("meta"):
            names = storable(auto_class(shape).from_config(shape))
    if names:
        granularity = (stored[0].stored if stored else "") or "row"
        return build_stored(shape, names, granularity, device=device, **kwargs)
    with torch.device(device):
        return auto_class(shape).from_config(shape, **kwargs)


def _load_pretrained(
    model: ModelConfig, stored: Sequence[LayerPlan], kwargs: dict[str, Any]
) -> PreTrainedModel:
    from finetune.precision.stored import stored_weights
    from finetune.storage.loading import load_in_fp8, load_stored

    source, shape = locate(model), load_shape(model)
    published = is_published_fp8(shape)
    kwargs |= {"revision": model.revision, "trust_remote_code": model.trust_remote_code}
    if published and model.storage == "nf4":
        raise ConfigError(
            "this checkpoint is published in FP8, and was to be stored in four bits",
            where=f"model.storage: {model.storage}",
            why="its codes would be rounded a second time, to fewer levels",
            fix="~model.storage holds the published codes, or take the checkpoint in 16 bits",
        )
    with loading(source):
        if stored and (granularity := stored[0].stored):
            names = [row.plain_name for row in stored]
            return load_stored(source, names, granularity, **kwargs)
        if published or model.storage == "fp8":
            return load_in_fp8(source, "row" if model.storage == "fp8" else None, **kwargs)
        if model.storage == "nf4":
            kwargs["quantization_config"] = nf4.quantization_config()
        kwargs["output_loading_info"] = True
        loaded, found = auto_class(shape).from_pretrained(source, **kwargs)
        _check_complete(source, found["missing_keys"])
    # A checkpoint may itself be in NF4.
    in_nf4 = model.storage == "nf4" or "nf4" in stored_weights(loaded)
    return nf4.prepare(loaded) if in_nf4 else loaded


def load_tokenizer(model: ModelConfig) -> tuple[PreTrainedTokenizerBase, str]:
    """Load the model's tokenizer, and a sentence if a substitute was used.

    The packaged models share one, byte-level. If the hub is out of reach, it also substitutes for
    the tokenizer of a model with random weights, which is enough to measure speed and memory.

    Raises:
        ModelNotFoundError: it cannot be loaded, and the weights are pretrained.
        ConfigError: `model.pad_token` is not in its vocabulary.
    """
    from transformers import AutoTokenizer

    source = locate(model)
    source = str(TINY_LLAMA) if model.name.startswith(BUILTIN) else source
    try:
        with loading(source):
            tokenizer = AutoTokenizer.from_pretrained(source, revision=model.revision)
    except ModelNotFoundError:
        if model.weights != "random":
            raise
        note = f"no tokenizer of {model.name} here: the packaged byte-level one stands in"
        return AutoTokenizer.from_pretrained(TINY_LLAMA), note
    token = model.pad_token
    if token is not None and token not in (vocabulary := tokenizer.get_vocab()):
        raise ConfigError(
            f"the tokenizer has no token {token!r}"
            + did_you_mean(token, [t for t in vocabulary if "pad" in t]),
            where="model.pad_token",
            why="a new token would have no trained embedding",
            fix="~model.pad_token uses the tokenizer's own",
        )
    if token is not None:
        tokenizer.pad_token = token
    return tokenizer, ""
