"""Finds a `ModelConfig`'s files, packaged, local or on the hub; loads its shape, class, tokenizer.

Most checkpoints are of a causal model. Gemma 3, Mistral 3, Qwen-VL and others are published whole,
with towers for images or sound and the decoder as one part of them (`precision.model.towers`).
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.config.paths import ASSETS, TINY_LLAMA, shipped_shape, shipped_shapes, user_path
from finetune.config.schema import ModelConfig
from finetune.config.sections import BUILTIN
from finetune.errors import (
    ConfigError,
    FinetuneError,
    ModelNotFoundError,
    did_you_mean,
    first_line,
    nearest,
    some,
)

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

LONGEST = 300
"""Characters of another library's message that are shown."""
TEMPLATE_ERRORS = (
    TypeError,
    LookupError,
    ValueError,
    AttributeError,
    ArithmeticError,
    RuntimeError,
    AssertionError,
    MemoryError,
)
"""Errors of a chat template, which is a program, besides Jinja's."""


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
    looks_local = name.startswith((".", "/", "~")) or name.count("/") != 1 or os.path.exists(path)
    if looks_local:
        check_folder(name, path, f"model.name: {path.absolute()}")
    return str(path) if looks_local else name


def check_folder(name: str, path: Path, where: str, subfolder: str = "") -> None:
    """Reject a folder that holds no model, or a pipe or device that would be read without an end.

    Raises:
        ModelNotFoundError: says which.
    """
    if not (path / subfolder / "config.json").is_file():
        raise no_model_in(name, path, where)
    for file in (path / subfolder).iterdir():
        # safetensors and json would wait at a named pipe for a writer that never comes.
        if file.exists() and not (file.is_file() or file.is_dir()):
            raise ModelNotFoundError(
                f"{file.name} of the model {name!r} is no regular file",
                where=where,
                why="reading a pipe, socket or device may have no end",
                fix="remove it, or put a regular file in its place",
            )


def no_model_in(name: str, path: Path, where: str) -> ModelNotFoundError:
    """The error for a folder that holds no model."""
    if os.path.isfile(path):
        return ModelNotFoundError(
            f"{name!r} is a file, and a model is a folder",
            where=where,
            why="weights alone say nothing of the architecture and the tokenizer",
            fix=f"python -m finetune import {shlex.quote(name)} --as BASE my-model, BASE a model "
            "of its architecture; then model.name=my-model model.weights=pretrained",
        )
    if (path / "adapter_config.json").is_file():
        run = path.parent if path.name == "model" else path
        return ModelNotFoundError(
            f"{name!r} is an adapter, which is no model without its base",
            where=where,
            fix=f"python -m finetune export {shlex.quote(str(run))} --to merged my-model; then "
            "model.name=my-model",
        )
    by_last_part = {shape.rpartition("/")[2].lower(): shape for shape in shipped_shapes()}
    meant = by_last_part.get(nearest(name.lower(), by_last_part) or "")
    return ModelNotFoundError(
        f"there is no model in {name!r}" + (f"; did you mean {meant!r}?" if meant else ""),
        where=where,
        why="a model folder holds config.json" if path.is_dir() else "no such folder",
        fix="give a folder with config.json and safetensors, or a hub id such as "
        "meta-llama/Llama-3.2-1B-Instruct",
    )


def refuse_random_base(model: ModelConfig) -> None:
    """Reject what needs the weights that a run began with, where nothing has them.

    Raises:
        ConfigError: the run began with random weights.
    """
    if model.weights == "random":
        raise ConfigError(
            "the weights that this run began with are stored nowhere",
            where="model.weights: random",
            why="the run drew them by chance, and other versions or devices draw others",
            fix="train it with model.weights=pretrained",
        )


def positions(shape: PretrainedConfig) -> int | None:
    """Context length by the model's configuration; None if unknown."""
    return getattr(shape.get_text_config(decoder=True), "max_position_embeddings", None)


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
        # The hub's own file comes first where it is here; without network the packaged one is as
        # good.
        cached = isinstance(try_to_load_from_cache(source, "config.json"), str)
        if model.weights == "random" or not cached:
            values: dict[str, Any] = json.loads(shipped.read_text(encoding="utf-8"))
            return with_head(AutoConfig.for_model(values.pop("model_type"), **values), model.head)
    with loading(source):
        found = AutoConfig.from_pretrained(
            source, revision=model.revision, trust_remote_code=model.trust_remote_code
        )
        _check_shape(found)
        if in_mxfp4(found.__dict__):  # read as the weights that they stand for: `storage.mxfp4`
            found.__dict__.pop("quantization_config")
        return with_head(found, model.head)


def with_head(shape: PretrainedConfig, head: str | None) -> PretrainedConfig:
    """An architecture with one output (`score`) in place of words, or as it is."""
    from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING as SCORING

    if head is not None:
        shape.num_labels = 1
        known = type(shape) in SCORING
        shape.architectures = [SCORING[type(shape)].__name__ if known else SCORER]
    return shape


def scores(shape: PretrainedConfig) -> bool:
    """True if a model gives one score of a text, and no words: a reward model."""
    names = getattr(shape, "architectures", None) or ()
    return shape.num_labels == 1 and any(name.endswith(SCORER) for name in names)


def in_mxfp4(settings: Mapping[str, Any]) -> bool:
    """True of a `config.json` whose experts are in MXFP4."""
    return (settings.get("quantization_config") or {}).get("quant_method") == "mxfp4"


def _check_shape(found: PretrainedConfig) -> None:
    """Refuse sizes that no decoder has, which building one would not survive.

    Raises:
        ValueError: names the key of config.json.
    """
    text: Any = found.get_text_config(decoder=True)
    if not hasattr(text, "to_dict"):
        raise ValueError(f"text_config of config.json is {text!r}, and no configuration")
    # Even on meta a model of 10^9 layers is 10^9 Python objects.
    for key, most in (("vocab_size", 2**31), ("num_hidden_layers", 10_000)):
        size = getattr(text, key, 1)
        if isinstance(size, bool) or not isinstance(size, int) or not 0 < size <= most:
            raise ValueError(f"{key} of config.json is {size!r}, and not from 1 to {most:,}")


def vocabulary_of(model: ModelConfig) -> int:
    """Tokens that a model's embedding has, by its configuration alone."""
    return int(load_shape(model).get_text_config(decoder=True).vocab_size)


@contextlib.contextmanager
def loading(
    source: str, errors: type[Exception] | tuple[type[Exception], ...] = Exception
) -> Iterator[None]:
    """Raise what libraries raise over missing or broken files of a model, which may be anything.

    Raises:
        ModelNotFoundError: the files cannot be read, or do not go together.
    """
    import torch

    try:
        yield
    except (FinetuneError, MemoryError, torch.OutOfMemoryError):
        raise
    except errors as error:
        raise _not_loaded(source, error) from error


def _not_loaded(source: str, error: Exception) -> ModelNotFoundError:
    said = first_line(error)
    said = said if len(said) <= LONGEST else f"{said[:LONGEST]} ..."
    known = isinstance(error, OSError | ValueError | ImportError)
    local = os.path.isdir(source)
    return ModelNotFoundError(
        f"the model {source!r} could not be loaded",
        where=f"model.name: {source}" if local else "model.name",
        why=said if known else f"a file of it is broken ({type(error).__name__}: {said})",
        fix="install the package that it names, or ~model.attention takes what is here"
        if isinstance(error, ImportError)
        else "download or copy the folder again: config.json, tokenizer and all safetensors files "
        "belong together"
        if local
        else "check the name and your connection, `hf auth login` for gated models, or use "
        "model.weights=random to plan and measure without weights",
    )


def load_whole(load: Any, source: str | Path, **kwargs: Any) -> PreTrainedModel:
    """`from_pretrained` of a class, which refuses files that lack weights or have more.

    Transformers would draw them by chance, or leave them out, with a warning.

    Raises:
        ModelNotFoundError: names the missing weights, those without a place, or one of another
            shape.
    """
    # Mismatched ones are named by Transformers in a log that is silent here.
    model, found = load(source, output_loading_info=True, ignore_mismatched_sizes=True, **kwargs)
    for name, stored, expected in sorted(found["mismatched_keys"]):
        raise ModelNotFoundError(
            f"a tensor of the model {str(source)!r} has another shape than config.json says",
            where=f"model.name: {name}",
            why=f"{list(stored)} in the file, {list(expected)} by config.json",
            fix="download or copy the folder again: config.json and all safetensors files belong "
            "together",
        )
    if type(model).__name__.endswith(SCORER):  # its output layer may replace one for words
        inside = f"{model.base_model_prefix}."
        for key in ("unexpected_keys", "missing_keys"):
            found[key] = {name for name in found[key] if name.startswith(inside)}
    # Buffers of rotary embeddings and what a class knows to leave out are not among these.
    if names := sorted(found["unexpected_keys"]):
        raise ModelNotFoundError(
            f"the model {str(source)!r} has {len(names):,} weights without a place in it",
            where=f"model.name: {some(names, 3)}",
            why="its config.json describes a model without them: they would be left out",
            fix="download or copy config.json again (num_hidden_layers, tie_word_embeddings, "
            "architectures), or take those weights out of its safetensors files",
        )
    if names := sorted(found["missing_keys"]):
        raise ModelNotFoundError(
            f"the model {str(source)!r} lacks {len(names):,} of its weights",
            where=f"model.name: {some(names, 3)}",
            why="they would be drawn by chance, and trained as if they were the model's",
            fix="download or copy its safetensors files again; model.weights=random draws all of "
            "them",
        )
    check_generation(getattr(model, "generation_config", None))
    return model


def check_generation(settings: Any) -> None:
    """Refuse settings of generation, of generation_config.json, with values of other types.

    Raises:
        ValueError: names the key.
    """
    usual = settings._get_default_generation_params() if settings is not None else {}
    numbers = {key: type(value) for key, value in usual.items() if isinstance(value, int | float)}
    kinds = numbers | dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), int)
    for key in kinds.keys() - {"early_stopping"} if usual else ():  # it may be "never"
        value = getattr(settings, key, None)
        for one in value if isinstance(value, list) else [value]:
            plain = isinstance(one, int | float) and isinstance(one, bool) == (kinds[key] is bool)
            if one is not None and not plain:
                raise ValueError(f"{key} of generation_config.json is {one!r}")


def keep_generation(model: Any) -> None:
    """Let a model's settings of generation be saved as they are, though the padding token is new.

    Transformers 5.23 saves settings that have changed since they were read only if they pass a
    strict check. Files of its own that it wrote earlier do not: greedy, with a temperature.
    """
    settings = getattr(model, "generation_config", None)
    if settings is not None:
        # Transformers (5.23) is strict with settings that have changed since they were read, and
        # would not save them.
        settings._original_object_hash = hash(settings)


def refuse_other_words(tokenizer: PreTrainedTokenizerBase, model: ModelConfig, where: str) -> None:
    """Reject a second model whose token ids stand for other words than the first one's.

    Vocabularies of one size may be other ones; then both models run, and what is learned is noise.

    Args:
        tokenizer: of the first model.
        model: the second one.
        where: setting that names it.

    Raises:
        ConfigError: a word has two ids, or one of the models does not know it.
        ModelNotFoundError: the second one has no tokenizer.
    """
    # Word by word: tokenizers of one class and size may number them otherwise.
    own, other = tokenizer.get_vocab(), _plain_tokenizer(model).get_vocab()
    if apart := sorted(word for word in {*own, *other} if own.get(word) != other.get(word)):
        word = apart[0]
        raise ConfigError(
            f"two models that must read the same tokens differ in {len(apart):,} of them",
            where=where,
            why=f"the first: {word!r} is {own.get(word, 'no token')} of the model that trains, and "
            f"{other.get(word, 'no token')} of {model.name}",
            fix="take a model of the same family and generation, whose tokenizer is the same",
        )


def load_tokenizer(
    model: ModelConfig, template: str | None = None
) -> tuple[PreTrainedTokenizerBase, str]:
    """Load the model's tokenizer, and a sentence if a substitute was used.

    The packaged models of text share one, byte-level. If the hub is out of reach, it also
    substitutes for the tokenizer of a model with random weights, which is enough to measure speed
    and memory.

    Args:
        template: `train.chat_template_path`: a file, or another model, whose chat template it gets.

    Raises:
        ModelNotFoundError: it cannot be loaded, and the weights are pretrained; or its chat
            template renders no question.
        ConfigError: `model.pad_token` is not in its vocabulary, or there is none to pad with.
    """
    from transformers import AutoTokenizer

    source = locate(model)
    try:
        tokenizer = _plain_tokenizer(model)
    except ModelNotFoundError:
        if model.weights != "random":
            raise
        note = f"no tokenizer of {model.name} here: the packaged byte-level one stands in"
        return AutoTokenizer.from_pretrained(TINY_LLAMA), note
    if template is not None:
        tokenizer.chat_template = template_of(template)
    _try_out(tokenizer, template or source)
    token = model.pad_token
    # Assigning a token that is not there would add one, behind the rows of the embedding.
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
    elif tokenizer.pad_token is None and tokenizer.eos_token is None:  # TRL takes either
        known = sorted({*tokenizer.all_special_tokens} or tokenizer.get_vocab())
        close = [one for one in known if "pad" in one.lower()] or known
        raise ConfigError(
            "the tokenizer has no padding token, and no end token that could stand in",
            where=f"model.name: {source}",
            why="rows of a batch differ in length",
            fix=f"model.pad_token={shlex.quote(close[0])}, a token of its vocabulary that rows do "
            "not have",
        )
    return tokenizer, ""


def _plain_tokenizer(model: ModelConfig) -> PreTrainedTokenizerBase:
    """A model's tokenizer as it is."""
    from transformers import AutoTokenizer

    source = packaged_tokenizer(model.name) or locate(model)
    with loading(source):
        return AutoTokenizer.from_pretrained(
            source, revision=model.revision, trust_remote_code=model.trust_remote_code
        )


def packaged_tokenizer(name: str) -> str | None:
    """Folder of a packaged model's tokenizer, its own or the tiny Llama's; None of others."""
    if not name.startswith(BUILTIN):
        return None
    own = ASSETS / name.removeprefix(BUILTIN)
    return str(own if (own / "tokenizer.json").is_file() else TINY_LLAMA)


def template_of(path: str) -> str:
    """Text of a chat template, from a Jinja file or from the tokenizer of another model.

    TRL would also take that tokenizer's end token, add its tokens and resize the embeddings: new
    ones are not trained under LoRA. Marks that are no tokens here are trained on as plain text.
    """
    from transformers import AutoTokenizer

    where = f"train.chat_template_path={path}"
    file = user_path(path)
    if file.suffix in (".jinja", ".j2"):
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelNotFoundError(
                f"the chat template {str(file)!r} cannot be read",
                where=where,
                why=first_line(error),
                fix="give a .jinja file, or a model folder or hub name whose template to take",
            ) from error
    source = packaged_tokenizer(path) or path
    with loading(source):
        found = AutoTokenizer.from_pretrained(source).chat_template
    if not isinstance(found, str):
        raise ModelNotFoundError(
            f"{path!r} has no chat template",
            where=where,
            fix="an -Instruct model, or a .jinja file",
        )
    return found


def _try_out(tokenizer: Any, source: str) -> None:
    """Refuse a tokenizer or chat template that takes no text at all, before one is needed.

    Raises:
        ModelNotFoundError: says which of the two, and why.
    """
    from jinja2 import TemplateError

    question: Any = [{"role": "user", "content": "?"}]
    prompt: Any = {"add_generation_prompt": True}
    part, fix = "tokenizer", "download or copy the folder again: its files belong together"
    try:
        tokenizer("?")
        if tokenizer.chat_template:
            part = "chat template"
            fix = "put a chat_template.jinja that does beside the tokenizer, or remove it: rows of "
            fix += "text and of prompt and completion need none"
            tokenizer.apply_chat_template(question, tokenize=False, **prompt)
    except (TemplateError, *TEMPLATE_ERRORS) as error:
        said = first_line(error)[:LONGEST]
        raise ModelNotFoundError(
            f"the {part} of {source!r} cannot be used",
            where=f"model.name: {source}",
            why=f"it does not take a question of one user: {type(error).__name__}: {said}",
            fix=fix,
        ) from error


# ------------------------------------------------------------------------------------ architecture

CLASSES = {
    "AutoModelForCausalLM": "MODEL_FOR_CAUSAL_LM_MAPPING",
    "AutoModelForImageTextToText": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING",
    "AutoModelForMultimodalLM": "MODEL_FOR_MULTIMODAL_LM_MAPPING",
}
"""Auto classes of models that generate text, in order of preference, and what they look up."""
SCORER = "ForSequenceClassification"
"""End of the name of classes that score a text."""
SCORERS = {f"AutoModel{SCORER}": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING"}


def auto_class(config: PretrainedConfig) -> Any:
    """The first of `CLASSES` that knows this architecture, or that the checkpoint's own code names.

    Raises:
        ConfigError: no such class; a model that is not generative, or an encoder and decoder.
    """
    import transformers

    import finetune.storage.bdh  # noqa: F401  makes our own model types known

    remote = getattr(config, "auto_map", None) or {}
    classes = SCORERS if scores(config) else CLASSES
    for name, table in classes.items():
        cls = getattr(transformers, name, None)
        # By the table, without importing the model's code.
        if cls is not None and (name in remote or type(config) in getattr(transformers, table)):
            return cls
    raise ConfigError(
        f"Transformers has no {'scoring' if scores(config) else 'text-generating'} model of type "
        f"{config.model_type!r}",
        where="model.name",
        why=f"none of {', '.join(classes)} takes a {type(config).__name__}",
        fix="a decoder model, such as Llama, Qwen, Gemma or Mistral; an encoder with a decoder or "
        "a classifier trains in a script of your own, with setup_fp8_mixed_precision_training()",
    )


def fit_trl(model: PreTrainedModel) -> None:
    """Let the fused loss of TRL (1.16) find its way in an architecture; only Llama 4 needs it.

    It calls the backbone as `base_model`, and `Llama4ForCausalLM` names an attribute for that which
    only its multimodal parent has (Transformers 5.23). It adds the routers' auxiliary loss for a
    number of experts that Llama 4's configuration does not have by that name; the model's own loss
    has no such term.
    """
    if not hasattr(model, model.base_model_prefix) and hasattr(model, "model"):
        model.base_model_prefix = "model"
    text = model.config.get_text_config()
    if hasattr(text, "output_router_logits") and not hasattr(text, "num_experts"):
        text.router_aux_loss_coef = 0.0
