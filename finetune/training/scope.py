"""What of a model trains: weights, adapters, and linear layers that get none, with the reasons.

Left out without anybody's asking, and said:

* modules beside the decoder, such as the vision tower of Gemma 3 (`precision.model.towers`), but
  for what `model.train_vision` names. A projector then trains in full, under adapters as well (as
  PEFT's `modules_to_save`): it is small, and of low rank it would be bent and not taught, which is
  why LLaVA and its successors train it whole. Towers get adapters where the run has some;
* linear layers with a forward of their own, on which PEFT's adapters break (Llama 4's router
  returns a tuple), and those whose weight Mamba's kernels read past the layer's forward, where an
  adapter would have no effect and no gradient.

PEFT 0.21 itself leaves out more: for experts that Transformers holds in one parameter it rewrites
`all-linear` and the names gate_proj, up_proj and down_proj, and takes these names out of the linear
layers of the whole model (huggingface/peft#3711). `notes` says what came of it.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from torch import nn

from finetune.config.schema import LoraSection, RunConfig
from finetune.errors import ConfigError, did_you_mean, first_line, some
from finetune.precision.model.layers import (
    decoder_blocks,
    linear_records,
    matches,
    own_forward,
    plain_name,
    records,
    without_adapters,
)
from finetune.precision.model.plan import place_in_block
from finetune.precision.model.towers import beside_text, parameters_of
from finetune.precision.model.tree import Tree
from finetune.precision.stored.linear import stored_as

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import PreTrainedModel

ALL = "all-linear"
BESIDE = "model.train_vision"
SOUND = ("audio", "speech")
"""Words in names of what stands beside the decoder and is for sound."""


def trained_for_images(model: Any, wanted: str) -> dict[str, Any]:
    """What `model.train_vision` trains of a plain model: name -> module or parameter.

    The tower is what Transformers calls the encoder of images; what else stands beside the decoder
    is between the two: projector, connector, Q-Former, the row end of LLaVA-NeXT. Where nothing is,
    as in Qwen-VL, the projector is inside the tower: the parts behind its blocks that give vectors
    of the decoder's width.

    Raises:
        ConfigError: the model has no way for images.
    """
    if wanted == "none":
        return {}
    found = {
        name: part
        for name, part in beside_text(model).items()
        if not any(word in name for word in SOUND)
    }
    encoder = model.get_encoder(modality="image")
    tower = next((name for name, part in found.items() if part is encoder), "")
    if not tower:
        raise ConfigError(
            "this model has no tower for images to train",
            where=f"model.train_vision={wanted}: {type(model).__name__}",
            fix="~model.train_vision, or a model that reads images",
        )
    if wanted == "all":
        return found
    between = {name: part for name, part in found.items() if name != tower}
    return between or dict(_behind_blocks(model, encoder, f"{tower}."))


def _behind_blocks(model: Any, tower: Any, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    from transformers.modeling_layers import GradientCheckpointingLayer

    width, behind = model.config.get_text_config(decoder=True).hidden_size, False
    for name, child in tower.named_children():
        if any(isinstance(m, GradientCheckpointingLayer) for m in child.modules()):
            behind = True
        elif behind and any(p.dim() > 1 and p.shape[0] == width for p in child.parameters()):
            # One by one: PEFT copies no list of modules.
            several = child.named_children() if isinstance(child, nn.ModuleList) else ()
            parts = [(f"{name}.{key}", one) for key, one in several] or [(name, child)]
            yield from ((prefix + key, one) for key, one in parts)


def _copied_for_images(model: Any, config: RunConfig) -> list[str]:
    """Modules beside the decoder that train in full under adapters."""
    wanted = "none" if config.model.train_vision == "none" else "projector"
    found = trained_for_images(model, wanted)
    return [name for name, part in found.items() if isinstance(part, nn.Module)]


def freeze(model: PreTrainedModel, config: RunConfig) -> None:
    """Freeze what stands beside the text, and what `model.freeze` names, where all weights train.

    Raises:
        ConfigError: a pattern that names nothing, or nothing is left to train.
    """
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    trained = trained_for_images(model, config.model.train_vision)
    frozen: list[Any] = []
    # Names of modules or of parameters: a pattern may mean either.
    for pattern in config.model.freeze:
        found: list[Any] = [
            thing
            for things in (modules, parameters)
            for name, thing in things.items()
            if name and matches(pattern, name)
        ]
        # A pattern that names nothing would train in silence what it was meant to freeze.
        if not found:
            raise _names_nothing("model.freeze", pattern, [*modules, *parameters])
        frozen += found
    if config.lora is not None:  # PEFT freezes all of the base, which may be codes
        return
    for part in beside_text(model).values():
        part.requires_grad_(False)
    for part in trained.values():
        part.requires_grad_(True)
    for thing in frozen:
        thing.requires_grad_(False)
    if not any(p.requires_grad for p in parameters.values()):
        raise ConfigError(
            "every parameter is frozen: nothing is left to train",
            where="model.freeze" if config.model.freeze else "requires_grad of its parameters",
            fix="freeze less, or ~model.freeze"
            if config.model.freeze
            else "model.requires_grad_(True), as after model.merge_and_unload(), or adapters",
        )


def _names_nothing(where: str, pattern: str, names: Iterable[str]) -> ConfigError:
    parts = sorted({part for name in names for part in name.split(".") if not part.isdigit()})
    return ConfigError(
        f"{where} pattern {pattern!r} names nothing in this model"
        + did_you_mean(pattern, [*parts, *names]),
        where=where,
        why="what was meant to be left out would train silently",
        fix=f"~{where}; names are made of: {', '.join(part for part in parts if part)}",
    )


# ---------------------------------------------------------------------------------------- adapters


def kept_out(base: Any, config: RunConfig) -> dict[str, str]:
    """Plain name of each linear layer of a base that shall get no adapter -> the reason.

    Raises:
        ConfigError: a pattern that names no linear layer, or a layer number that does not exist.
    """
    lora = config.lora or LoraSection()
    bare = [record for record in linear_records(base) if "lora_" not in record.name]
    linears = {plain_name(record.name): record.owner for record in bare}
    # With the dot, since `vision` must not match `vision_head`.
    adapts = config.model.train_vision == "all"
    beside = _copied_for_images(base, config) if adapts else beside_text(base)
    towers = tuple(f"{name}." for name in beside)
    past = {plain_name(record.name): record.past for record in bare if record.past}
    blocks = _other_blocks(base, lora, list(linears))
    given = [("lora.exclude_modules", pattern) for pattern in lora.exclude_modules]
    chosen = [*given, *(("model.freeze", pattern) for pattern in config.model.freeze)]
    for where, pattern in given:
        if not any(matches(pattern, name) for name in linears):
            raise _names_nothing(where, pattern, linears)
    found: dict[str, str] = {}
    for name, module in linears.items():
        named = next((where for where, pattern in chosen if matches(pattern, name)), "")
        # In this order, so that the note gives the reason that no setting could change.
        if f"{name}.".startswith(towers):
            found[name] = BESIDE
        elif why := past.get(name, "") or ("" if stored_as(module) else own_forward(module)):
            found[name] = why
        elif named:
            found[name] = named
        elif name.startswith(blocks):
            found[name] = "lora.layers_to_transform"
    return found


def _other_blocks(model: nn.Module, lora: LoraSection, names: list[str]) -> tuple[str, ...]:
    """Prefixes of the decoder blocks that `lora.layers_to_transform` leaves out."""
    if not lora.layers_to_transform:
        return ()
    name, count = decoder_blocks(model, names, "lora.layers_to_transform")
    if beyond := [i for i in lora.layers_to_transform if i >= count]:
        raise ConfigError(
            f"there is no decoder block {beyond[0]} to adapt",
            where=f"lora.layers_to_transform: {list(lora.layers_to_transform)}",
            why=f"the model has {count}, counted from 0",
            fix=f"numbers below {count}, or ~lora.layers_to_transform",
        )
    return tuple(f"{name}.{i}." for i in range(count) if i not in lora.layers_to_transform)


def lora_config(model: Any, config: RunConfig) -> LoraConfig | None:
    """PEFT's configuration of a run's adapters on a plain model; None without a section `lora`.

    Raises:
        ConfigError: `exclude_modules` or `layers_to_transform` name what the model does not have.
        ValueError: PEFT refuses the section.
    """
    from peft import LoraConfig
    from transformers.pytorch_utils import Conv1D

    lora = config.lora
    if lora is None:
        return None
    excluded = kept_out(model, config)
    targets = lora.target_modules
    return LoraConfig(
        task_type="SEQ_CLS" if config.model.head else "CAUSAL_LM",
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=targets if isinstance(targets, str) else list(targets),
        # Names in full: PEFT takes a list as ends of names, and these can be the end of nothing
        # else.
        exclude_modules=sorted(excluded) or None,
        target_parameters=list(lora.target_parameters) or None,
        modules_to_save=[*lora.modules_to_save, *_copied_for_images(model, config)] or None,
        init_lora_weights=True if lora.init_lora_weights == "default" else lora.init_lora_weights,
        use_rslora=lora.use_rslora,
        use_dora=lora.use_dora,
        # PEFT sets it too, with a warning for a user who could not have set it.
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
        bias=lora.bias,
    )


def attach(model: Any, config: RunConfig) -> Any:
    """Put a run's adapters on a plain model, also on the meta device.

    Raises:
        ConfigError: PEFT cannot, or the section `lora` names what the model does not have. PEFT
            itself passes over a name in silence, or warns of it, where others of a list are there.
    """
    from peft import get_peft_model

    lora = config.lora
    if lora is None:
        return model
    names = _names_in(model)
    adapters: Any = None
    for key in ("target_parameters", "modules_to_save"):
        _refuse_missing(key, getattr(lora, key), names)
    try:
        adapters = lora_config(model, config)
        with false_warnings_ignored():
            attached = get_peft_model(model, adapters)
    except ConfigError:
        raise
    except (ValueError, TypeError, RuntimeError) as error:
        _refuse_missing("target_modules", adapters and adapters.target_modules, names)
        raise _not_attached(error, config) from error
    # Only now: names of experts that Transformers holds in one parameter PEFT takes out before.
    _refuse_missing("target_modules", adapters and adapters.target_modules, names)
    return attached


def _names_in(model: nn.Module) -> dict[str, tuple[list[str], list[str]]]:
    """Key of the section `lora` -> all names that it may end, and those that an error proposes."""
    tree = Tree(model)
    modules = [name for name in tree.named if name]
    parameters = [name for name, p in tree.named_parameters() if p.dim() in (2, 3)]
    linears = [record.name for record in linear_records(tree)]
    experts = [record.name for record in records(tree) if record.kind == "parameter"]
    return {
        "target_modules": (modules, [n for n in linears if any(map(str.isdigit, n.split(".")))]),
        "target_parameters": (parameters, experts),
        "modules_to_save": (modules, modules),
    }


def _is_end(wanted: str, names: Iterable[str]) -> bool:
    return any(name == wanted or name.endswith(f".{wanted}") for name in names)


def _refuse_missing(key: str, wanted: Any, names: dict[str, tuple[list[str], list[str]]]) -> None:
    """Raise for names in a list of the section `lora` that are the end of no name in the model."""
    there, proposed = names[key]
    wanted = () if isinstance(wanted, str) else sorted(wanted or ())  # a pattern, "all-linear"
    missing = [name for name in wanted if not _is_end(name, there)]
    if not missing:
        return
    kind, parts = ("parameter", 2) if key == "target_parameters" else ("layer", 1)
    # What PEFT matches is an end of a name: `q_proj`, or `experts.down_proj` of a parameter.
    ends = {".".join(name.split(".")[-parts:]) for name in proposed}
    known = sorted(end for end in ends if not end.isdigit())
    one_of_them = f"lora.{key}=[{','.join(known)}], which this model has, or fewer of them"
    raise ConfigError(
        f"no {kind}'s name ends in {some(missing)}{did_you_mean(missing[0], known)}",
        where=f"lora.{key}",
        why="nothing would be adapted or trained there, without a word",
        fix=f"{one_of_them}; or ~lora.{key}" if known else f"~lora.{key}",
    )


def _not_attached(error: Exception, config: RunConfig) -> ConfigError:
    """The error of adapters that PEFT cannot put on a model."""
    said = first_line(error)
    frozen = " ~precision.frozen" if config.precision.frozen == "fp8" else ""
    fix = f"other lora.target_modules, or ~lora{frozen} to train all weights (a BDH has no linear "
    fix += "layers to adapt)"
    for word, key in (("lora_dropout", "dropout"), ("use_dora", "use_dora")):
        if word in said and "ParamWrapper" in said:
            fix = f"~lora.{key}; or leave the experts out, as with lora.target_modules=[q_proj, "
            fix += "k_proj, v_proj, o_proj] in most models"
    where = f"lora: {config.model.name}"
    return ConfigError(
        "peft can put no such adapters on this model", where=where, why=said, fix=fix
    )


@contextlib.contextmanager
def false_warnings_ignored() -> Iterator[None]:
    """Ignore two warnings of PEFT 0.21 that are not true while adapters are attached.

    It compares `rank_pattern` and `alpha_pattern`, which it has written itself for experts in one
    parameter, with names of modules alone; the ranks of the adapters are right.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The following (rank|alpha)_pattern keys did not match")
        yield


# ------------------------------------------------------------------------------------------- notes


def notes(model: Any, config: RunConfig) -> list[str]:
    """One line for each thing that does not train although one might think so, or the reverse."""
    base, setting = without_adapters(model), config.model.train_vision
    asked = trained_for_images(base, setting)
    counts: dict[str, dict[str, int]] = {"frozen": {}, "trained for images": {}}
    for name, part in (beside_text(base) | asked).items():
        own = parameters_of(part)
        trains = name in asked and any(p.requires_grad for p in own)
        numbers = sum(p.numel() for p in own if p.requires_grad == trains)
        counts["trained for images" if trains else "frozen"][name] = numbers
    lines = [
        f"{words}: {', '.join(of)} ({sum(of.values()):,} parameters): model.train_vision={setting}"
        for words, of in counts.items()
        if of
    ]
    return lines + (_adapter_notes(base, config, config.lora) if config.lora else [])


def _adapter_notes(base: Any, config: RunConfig, lora: LoraSection) -> list[str]:
    excluded, left = kept_out(base, config), dict[str, list[str]]()
    tree, head = Tree(base), base.get_output_embeddings()
    for record in linear_records(tree):
        name, plain = record.name, plain_name(record.name)
        if "lora_" in name or ".base_layer" in name or record.owner is head:
            continue
        why = excluded.get(plain, "")
        if why.startswith(("lora.", "model.")):  # said above, or as requested
            continue
        if why or _is_target(plain, lora):
            left.setdefault(why or PEFT_LOSS, []).append(plain)
    lines = [
        f"no adapter on {len(names)} linear layers ({_kinds(names)}): {why}"
        for why, names in left.items()
    ]
    wrapped = {
        f"{plain_name(name)}.{module.parameter_name}"
        for name, module in tree.named_modules()
        if type(module).__name__ == "ParamWrapper"
    }
    experts = {plain_name(r.name) for r in records(tree) if r.kind == "parameter"}
    plain = sorted(experts - wrapped)
    # Whoever names modules has chosen; `all-linear` sounds as if it were all.
    if plain and lora.target_modules == ALL:
        ends = sorted({".".join(name.split(".")[-2:]) for name in plain})
        lines.append(
            f"no adapter on the experts ({', '.join(ends)}): they are parameters and no linear "
            f"layers; lora.target_parameters=[{', '.join(ends)}] adapts them"
        )
    return lines


PEFT_LOSS = (
    "PEFT takes these names for experts held in one parameter (peft#3711); "
    "lora.target_parameters=[NAME.weight, ...] with precision.keep=[NAME, ...] adapts them, in "
    "BF16: each forward computes W + BA again"
)


def _is_target(name: str, lora: LoraSection) -> bool:
    targets = lora.target_modules
    if isinstance(targets, str):
        return targets == ALL
    return any(_is_end(target, [name]) for target in targets)


def _kinds(names: list[str]) -> str:
    """`mlp.gate_proj, mlp.up_proj`: names without what comes before the last number."""
    return some(sorted({place_in_block(name) for name in names}), 4)
