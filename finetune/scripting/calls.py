"""The calls `load`, `add_lora`, `trainer`, for notebooks and scripts.

    load("Qwen/Qwen3-8B", precision="fp8") ─> model, tokenizer     sections model, precision
    add_lora(model, r=16) ─> model                                 section lora
    trainer(model, tokenizer, data="mine.jsonl") ─> trainer        data, train, checkpoints, eval
    trainer.train() ─> Run: folder, receipt, export(...)

Each keyword is a key of a recipe, by the name that Transformers, PEFT and TRL have for it. Together
they are a recipe, and it is trained as `python -m finetune` trains one: preflight, session, rows,
run folder, proof and receipt are the same, and `config.yaml` of the run folder repeats the run.
Models, adapters and trainers are Transformers', PEFT's and TRL's.

What a call sets for a model is kept beside it (`_SETTINGS`), by the model inside of adapters.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from peft import PeftModel
from transformers import PreTrainedModel, set_seed

from finetune.config.aliases import keyword
from finetune.config.methods import arguments, method_of
from finetune.config.recipe import read_recipe
from finetune.config.sections import BUILTIN
from finetune.config.train_section import fields_of
from finetune.data.auto_length import decided
from finetune.data.dataset import MASKING, has_images
from finetune.errors import ConfigError
from finetune.estimator.gate import MemoryForecast
from finetune.hardware.device import this_device
from finetune.hardware.requirements import check_here, resolve
from finetune.logging import output
from finetune.precision.model.layers import without_adapters
from finetune.precision.stored.linear import stored_weights
from finetune.scripting import saving
from finetune.scripting.given import source_of
from finetune.scripting.keywords import Settings, by_section, recipe_of, speaks
from finetune.scripting.run import TRAINED, WAITING, OneRun, abandon
from finetune.storage.pretrained import load_tokenizer, template_of
from finetune.storage.processors import sizes_of, takes_images, tokenizer_of
from finetune.training import scope
from finetune.training.model import load_model
from finetune.training.run.preflight import check_storage
from finetune.training.run.run import begun

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase
    from trl import SFTTrainer

LORA_DEFAULTS, FULL_DEFAULTS = "llama_8b_lora_fp8", "llama_8b_full_fp8"
"""With adapters, or without: the recipe whose `train` section has the defaults."""
SEED = 42
"""Of what is drawn before there is a trainer, as `train.seed` has it."""
_SETTINGS: WeakKeyDictionary[Any, Settings] = WeakKeyDictionary()


# ------------------------------------------------------------------------------ load, add_lora


@speaks()
def load(
    name: str | Path,
    precision: str | Mapping[str, Any] | None = None,
    *,
    load_in_fp8: bool = False,
    load_in_4bit: bool = False,
    **settings: Any,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model and its tokenizer, and check that this machine has the precision.

    Args:
        name: hub id, local folder, or `builtin:tiny_llama`.
        precision: of the matmuls in training, `bf16` (the default), `fp8`, `fp16` or `fp32`; or
            a recipe's `precision` section, `{"compute": "fp8", "scaling": "rowwise"}`.
        load_in_fp8: store linear layers as FP8 codes while they are read, for adapters; computes in
            FP8, unless `precision` says otherwise.
        load_in_4bit: store them in NF4 (QLoRA), which computes in BF16.
        **settings: keys of a recipe's `model` and `precision` sections: `dtype`, `revision`,
            `attn_implementation`, `emulation="allow"` where there is no FP8 unit, ...

    Returns:
        A model of Transformers, on the host until it trains, and its tokenizer.

    Raises:
        PrecisionError: the precision is not available on this machine.
        ModelNotFoundError: no such model.
        ConfigError: settings that do not go together.
        UnknownArgumentError: a setting that does not exist.
    """
    said = by_section("load", settings)
    said["model"] = {"name": str(name), **said.get("model", {})}
    if not isinstance(precision, Mapping):
        precision = {"compute": precision or ("fp8" if load_in_fp8 else "bf16")}
    said["precision"] = {**precision, **said.get("precision", {})}
    in_codes = load_in_fp8 and said["precision"].get("compute") == "fp8"  # which are multiplied
    if load_in_4bit or (load_in_fp8 and not in_codes):
        said["model"]["storage"] = "nf4" if load_in_4bit else "fp8"
    stored = in_codes or "storage" in said["model"]
    config = recipe_of("load", said, {"lora": {}} if stored else {}).config
    if stored:
        check_storage(config, None)
    check_here(config, this_device())
    say(resolve(config.precision, this_device()).fallback)
    tokenizer, note = load_tokenizer(config.model)
    say(note)
    if config.model.weights == "random":
        set_seed(SEED)
    model = load_model(config.model.model_copy(update={"storage": "fp8"} if in_codes else {}))
    _SETTINGS[model] = said
    saving.put_on(PreTrainedModel, settings_of)
    return model, tokenizer


def say(line: str) -> None:
    """Print a warning, unless it is empty."""
    if line:
        output().print(f"! {line}", style="yellow")


@speaks()
def add_lora(
    model: PreTrainedModel | PeftModel, r: int = 16, *, random_state: int = SEED, **settings: Any
) -> PeftModel:
    """Put low-rank adapters on a model, by PEFT: the base does not train.

    Args:
        model: from `load`, or a plain one of Transformers.
        r: rank.
        random_state: draws the adapters.
        **settings: keys of a recipe's `lora` section, `alpha` and `dropout` as `lora_alpha`
            (left out: 2 r) and `lora_dropout`; `target_modules` is `all-linear` if left out.

    Raises:
        ConfigError: the model has adapters, or cannot have these.
        UnknownArgumentError: a setting that does not exist.
    """
    if without_adapters(model) is not model:
        raise ConfigError(
            "this model has adapters already",
            where="finetune.add_lora(model)",
            why="adapters over adapters would train one of them, and merge neither",
            fix="train it as it is; for others take model = model.unload() first, or load it again",
        )
    said = settings_of(model)
    lora = {"r": r, "alpha": 2 * r, **by_section("add_lora", settings).get("lora", {})}
    config = recipe_of("add_lora", said, {"lora": lora}).config
    set_seed(random_state)
    adapted = scope.attach(model, config)
    saving.put_on(PeftModel, settings_of)
    said["lora"] = lora
    return adapted


def settings_of(model: Any) -> Settings:
    """Settings that a model was loaded with; of one that a script has loaded, by its configuration.

    Raises:
        ConfigError: it has no name or folder, or adapters that a recipe does not know.
    """
    base = without_adapters(model)
    name = getattr(base, "name_or_path", "")
    if base not in _SETTINGS and not name:
        raise ConfigError(
            "this model has no name and no folder",
            where=type(base).__name__,
            why="a resumed run, and an export of merged adapters, read the weights it begins with",
            fix="model.save_pretrained('base') and the tokenizer's, then finetune.load('base')",
        )
    plain = {"name": name, "dtype": str(getattr(base, "dtype", "")).removeprefix("torch.")}
    said = _SETTINGS.setdefault(base, {"model": plain, "precision": {"compute": "bf16"}})
    if base is model:
        said.pop("lora", None)  # unloaded since
    elif "lora" not in said:
        said["lora"] = _section_of(model)
    return said


def _section_of(model: Any) -> dict[str, Any]:
    """The `lora` section of adapters that a script has put on with PEFT."""
    peft = model.peft_config[model.active_adapter].to_dict()
    names = {keyword("lora", key): key for key in fields_of("lora")}
    given = {names[word]: value for word, value in peft.items() if word in names and value}
    lists = {key: sorted(value) for key, value in given.items() if isinstance(value, set | list)}
    begin = given.get("init_lora_weights")
    return given | lists | {"init_lora_weights": "default" if begin is True else begin}


# ------------------------------------------------------------------------------- trainer, run


@speaks()
def trainer(
    model: PreTrainedModel | PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    data: str | Path | list[Any] | dict[str, float] | Dataset,
    *,
    precision: str | Mapping[str, Any] | None = None,
    train_on_responses_only: bool | None = None,
    eval: Mapping[str, Any] | None = None,
    out: Path | str = "runs",
    force: bool = False,
    **settings: Any,
) -> SFTTrainer:
    """Make the trainer of a model: what `python -m finetune` would make of the same recipe.

    Args:
        model: from `load` or `add_lora`, or a plain one of Transformers or PEFT.
        tokenizer: its tokenizer, or the processor around it: the chat template is used as it is,
            and so are the sizes of images, unless `max_pixels` and `min_pixels` set them.
        data: file, folder, glob, hub id, `builtin:harbour`; several as a list, or a mixture by
            weight as a dict; or rows, as a list of dicts or a `datasets.Dataset`.
        precision: as in `load`, of a model that a script has loaded, or instead of what `load` had.
        train_on_responses_only: True: the assistant's turns of chat rows are trained on and nothing
            else, which is the default (`assistant_only_loss`); False: every token of any row.
        eval: a recipe's `eval` section, such as `{"tasks": ["hellaswag"]}`.
        out: folder of runs.
        force: train even where memory is expected to be too small.
        **settings: any argument of `trl.SFTConfig`, and keys of a recipe's `data` and `checkpoints`
            sections. Left out: as in the recipe `llama_8b_lora_fp8`, of a model without adapters
            `llama_8b_full_fp8` (`python -m finetune cat` shows them); rows with images are not
            packed.

    Returns:
        An `SFTTrainer` of TRL, whose `train()` makes a run folder and returns a `Run`.

    Raises:
        FinetuneError: anything that the user can put right, see `finetune.errors`.
    """
    abandon()
    said = settings_of(model)
    typed = by_section("trainer", settings)
    reader, tokenizer = tokenizer, tokenizer_of(tokenizer)
    if precision is not None:
        one = precision if isinstance(precision, Mapping) else {"compute": precision}
        said["precision"] = dict(one)
    _note_storage(model, said)
    if train_on_responses_only is not None:
        masks = ("assistant_only_loss",) if train_on_responses_only else MASKING
        typed["train"] = dict.fromkeys(masks, train_on_responses_only) | typed.get("train", {})
    if eval is not None:
        typed["eval"] = dict(eval)
    typed["data"] = source_of(data, Path(out)) | typed.get("data", {})
    if template := typed.get("train", {}).get("chat_template_path"):
        tokenizer.chat_template = template_of(str(template))
    defaults = LORA_DEFAULTS if "lora" in said else FULL_DEFAULTS
    usual = read_recipe(defaults, check_train=False).config
    method = method_of(typed.get("train", {}))
    if method.head == "score":
        raise ConfigError(
            f"{method.name} trains a model that scores, and this one writes",
            where=f"finetune.trainer(method={method.name!r})",
            fix=f"a recipe with train.method={method.name}, by finetune.train(...)",
        )
    train = usual.train | said.get("train", {})
    leaves = {"save_steps"} if "save_strategy" in typed.get("train", {}) else set()
    if method.name != "sft":  # whose configuration may lack a key, and has a rate of its own
        leaves |= {"learning_rate"} | train.keys() - {*arguments(method)}
    train = {key: value for key, value in train.items() if key not in leaves}
    before = said | {"train": train, "data": {"min_steps": usual.data.min_steps}}
    recipe = recipe_of("trainer", before, typed, _name_of(said))
    if takes_images(without_adapters(model).config) and has_images(recipe.config.data):
        if train.pop("packing", False) and "packing" not in typed.get("train", {}):
            say("packing is off: batches of rows with images are padded")
        train |= sizes_of(reader, recipe.config.model)
        recipe = recipe_of("trainer", before, typed, _name_of(said))
    recipe = decided(recipe, tokenizer)
    if model.device.type == "cuda":  # trained before: what it takes is not taken twice
        on_host: Any = model
        on_host.to("cpu")
        torch.cuda.empty_cache()
    begins = begun(
        recipe, forecast=MemoryForecast(), out=out, force=force, given=(model, tokenizer)
    )
    run = WAITING.enter_context(begins)
    if (earlier := TRAINED.get(without_adapters(model))) and run.resume is None:
        note = f"the model was trained before ({earlier}): config.yaml alone does not repeat this"
        run.notes = [*run.notes, note]
        say(note)
    if run.console.is_jupyter:
        from transformers.utils.notebook import NotebookProgressCallback

        run.trainer.remove_callback(run.observers.bar)
        run.trainer.add_callback(NotebookProgressCallback)
    found: Any = run.trainer
    found.__class__ = type(type(found).__name__, (OneRun, type(found)), {"run": run})
    return found


def _note_storage(model: Any, said: Settings) -> None:
    """Let the recipe say how the base is stored, by what is there: codes for FP8, or to dequantize.

    With codes and no adapters preflight refuses the recipe: nothing would train.
    """
    kind = next(iter(stored_weights(model)), None)
    multiplied = kind == "fp8" == said["precision"].get("compute") and "lora" in said
    said["model"]["storage"] = None if multiplied else kind


def _name_of(said: Settings) -> str:
    """Name of a recipe as shipped ones are named: `qwen3-8b_lora_fp8`."""
    model = Path(said["model"]["name"].removeprefix(BUILTIN)).name or "model"
    quantized = "q" if said["model"]["storage"] else ""
    method = f"{quantized}lora" if "lora" in said else "full"
    return f"{model}_{method}_{said['precision'].get('compute', 'bf16')}".lower()
