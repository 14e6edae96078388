"""Another trainer's weights in a file of torch, such as `latest.pt`, as a model folder.

    file ─> tensors by name ─> names and shapes of Transformers ─> loaded, strictly ─> folder

Three layouts are known, by names and shapes:

    Transformers   the names of its classes
    nanoGPT        GPT-2's names, but each linear layer is `nn.Linear` [out, in], where GPT-2's are
                   `Conv1D` [in, out]; with or without biases; the exact GELU
    BDH            of the published code: `encoder` [heads, D, N], `lm_head` [D, vocabulary], and
                   rotary pairs of the neurons 2i, 2i + 1, where ours are i, i + N/2

Every tensor must have its name and shape in the model that is named, and every name a tensor.
Weights alone are taken over: moments of an optimizer fit no other trainer's parameter groups.

Sources: `model.py` of karpathy/nanoGPT, `bdh.py` of pathwaycom/bdh.
"""

from __future__ import annotations

import contextlib
import functools
import re
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint

from finetune.config.schema import ModelConfig
from finetune.errors import ConfigError, ModelNotFoundError, first_line, some, writing
from finetune.storage.pretrained import auto_class, load_shape, load_tokenizer, load_whole

STATES = ("model", "model_state_dict", "state_dict", "module")
"""Where trainers put the weights in a file that holds more."""
WRAPPERS = re.compile(r"^((module|_orig_mod)\.)+|(?<=\.)_orig_mod\.")
"""What DDP and `torch.compile` put before names."""
IDLE = re.compile(r"\.attn\.(masked_)?bias$|(^|\.)(freqs|lm_gate|_extra_state)$")
"""Masks, tables and state of FP8 that models make themselves; a gate that BDH does not use."""
MOST_PADDING = 128
"""Rows by which an embedding is padded, at most: to a multiple of 64 (nanoGPT) or 128."""
PLAIN = "torch.save(torch.load(FILE, weights_only=False)['model'], 'weights.pt')"
PUBLISHED = {"encoder", "encoder_v", "decoder", "embed.weight", "lm_head"}
"""Names of the published BDH's weights."""
BARE = ("wte.weight", "wpe.weight", "lm_head.weight")
"""Weights of nanoGPT to which no bias belongs."""


def import_checkpoint(file: Path, model: str, folder: Path) -> dict[str, Any]:
    """Write the weights in a torch file as a model folder, which `model.name` takes.

    Args:
        file: what `torch.save` wrote: a state dict, or a mapping that holds one.
        model: hub id, folder or `builtin:` name of the architecture and the tokenizer.
        folder: is made; must not be there.

    Returns:
        `folder`; `layout`; `parameters`, their number; `notes`: what was added or changed.

    Raises:
        ConfigError: the file cannot be read without running code in it, is damaged or no
            checkpoint; its tensors do not fit the model, or are not finite; the folder is taken.
        ModelNotFoundError: there is no such model.
    """
    # An import never writes over a model.
    if folder.exists():
        raise ConfigError(f"{str(folder)!r} is there already", fix="choose another folder")
    if not model:
        raise ConfigError("--as names no model", fix="a hub id, folder or builtin: name")
    config, notes = ModelConfig(name=model, weights="random"), list[str]()
    shape, (tensors, beside) = load_shape(config), _tensors_in(file)
    layout, tensors = _in_our_layout(tensors, shape, notes)
    _follow(shape, layout, tensors, beside, notes)
    loaded = _loaded(file, model, shape, layout, tensors)
    head = getattr(loaded.get_output_embeddings(), "weight", None)
    if shape.tie_word_embeddings and head is not loaded.get_input_embeddings().weight:
        loaded.config.tie_word_embeddings = False  # Transformers found two that differ
        notes.append("tie_word_embeddings false: head and embedding of the file differ")
    tokenizer, missing = load_tokenizer(config)
    failure = f"{str(folder)!r} cannot be written"
    with writing(failure, where=str(folder.absolute()), fix="choose another folder"):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
            whole = Path(temporary) / "model"
            loaded.save_pretrained(whole)
            if missing:  # ids of the one that stands in are other words
                notes.append(f"no tokenizer of {model} here: save it in the folder")
            else:
                tokenizer.save_pretrained(str(whole))
            whole.replace(folder)
    found = {"folder": str(folder), "layout": layout, "parameters": loaded.num_parameters()}
    return found | {"notes": notes}


def _tensors_in(file: Path) -> tuple[dict[str, Tensor], Mapping[str, Any]]:
    """Tensors of a file by their plain names, and all that the file holds."""
    try:
        # Mapped, an optimizer's moments in the same file take no memory.
        mapped = zipfile.is_zipfile(file)
        found = torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
    except OSError:
        raise
    except Exception as error:  # noqa: BLE001  what is no pickle may raise anything
        why, fix = first_line(error), "copy it again: it is cut off, or no such file"
        with contextlib.suppress(Exception):
            if code := sorted(get_unsafe_globals_in_checkpoint(file)):
                why = f"it holds objects of {some(code)}, whose code would run"
                fix = f"if you trust it, where it was trained: {PLAIN}; then import weights.pt"
        what = f"{file.name} cannot be read as tensors"
        raise ConfigError(what, where=str(file), why=why, fix=fix) from None
    whole = found if isinstance(found, Mapping) else {}
    state = next((whole[k] for k in STATES if isinstance(whole.get(k), Mapping)), whole)
    tensors = {k: t for k, t in state.items() if isinstance(t, Tensor)}
    # Two names that differ by a wrapper alone would become one; the count below finds that.
    named = {WRAPPERS.sub("", k): t for k, t in tensors.items() if isinstance(k, str)}
    if not tensors:
        what = f"{file.name} is a {type(found).__name__} of {some(list(map(str, whole)))}"
        why, fix = "it holds no weights by name", "torch.save(model.state_dict(), FILE) makes one"
        raise ConfigError(what, where=str(file), why=why, fix=fix)
    plain = [t for t in named.values() if t.layout is torch.strided and not t.is_meta | t.is_nested]
    if len(plain) < len(tensors):
        what, fix = f"{file.name} is no state dict of one model", "save model.state_dict() alone"
        why = f"{len(tensors) - len(named):,} of {len(tensors):,} tensors have no name, or that of "
        why += f"another behind `module.`; {len(named) - len(plain)} are sparse or without numbers"
        raise ConfigError(what, where=str(file), why=why, fix=fix)
    return {name: t.detach() for name, t in named.items() if not IDLE.search(name)}, whole


# ------------------------------------------------------------------------------------------ layout


def _in_our_layout(
    tensors: dict[str, Tensor], shape: Any, notes: list[str]
) -> tuple[str, dict[str, Tensor]]:
    """Name of a file's layout, and its tensors by the names and in the shapes of Transformers."""
    rows = tensors.get("transformer.h.0.attn.c_attn.weight", torch.empty(0)).shape
    # `c_attn` makes three times as many numbers as it takes: [3 D, D] is `nn.Linear`'s, [D, 3 D]
    # `Conv1D`'s.
    if shape.model_type == "gpt2" and rows[0] > rows[-1]:
        return "nanoGPT", _from_nanogpt(tensors, notes)
    if shape.model_type == "bdh" and tensors.keys() >= PUBLISHED:
        return "BDH", _from_bdh(tensors)
    return "Transformers", tensors


def _from_nanogpt(tensors: dict[str, Tensor], notes: list[str]) -> dict[str, Tensor]:
    """nanoGPT's tensors: linear weights transposed, and zeros for biases that it trains without."""
    layers = {k: t for k, t in tensors.items() if k.endswith(".weight") and not k.endswith(BARE)}
    biases = {k.removesuffix("weight") + "bias": t.new_zeros(len(t)) for k, t in layers.items()}
    if tensors.keys() & biases.keys():
        biases = {}
    else:
        notes.append(f"{len(biases)} biases are zero: the file has none (bias=False)")
    return biases | tensors | {k: t.mT for k, t in layers.items() if t.ndim == 2}


def _from_bdh(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The published BDH's tensors: heads [H, D, N] side by side, the neurons of a pair N/2 apart.

    Neurons 0 to 5 of a head become 0, 2, 4, 1, 3, 5.
    """
    heads, _width, size = tensors["encoder"].shape
    # 0 2 4 ... 1 3 5 ...: what was a pair of neighbors is then half a head apart.
    order = torch.arange(size).view(-1, 2).T.flatten()
    found = {
        "model.block.encoder": tensors["encoder"][..., order].movedim(0, 1).flatten(1),  # [D, H·N]
        "model.block.encoder_v": tensors["encoder_v"][..., order],
        "model.block.decoder": tensors["decoder"].view(heads, size, -1)[:, order].flatten(0, 1),
        "model.embed_tokens.weight": tensors["embed.weight"],
        "lm_head.weight": tensors["lm_head"].mT,
    }
    return found | {name: t for name, t in tensors.items() if name not in PUBLISHED}


def _follow(
    shape: Any, layout: str, tensors: dict[str, Tensor], beside: Mapping[str, Any], notes: list[str]
) -> None:
    """Change a configuration by what the file has, in place, with a note on each change."""
    text, names = shape.get_text_config(decoder=True), ("wte.weight", "embed_tokens.weight")
    rows = max((len(t) for name, t in tensors.items() if name.endswith(names)), default=0)
    if 0 < rows - text.vocab_size < MOST_PADDING:
        notes.append(f"vocab_size {rows:,}: {text.vocab_size:,} tokens, and padding of the file")
        text.vocab_size = rows
    if layout == "nanoGPT":
        if "model_args" in beside:  # as its trainer saves
            text.activation_function = "gelu"
        notes.append(
            f"activation_function {text.activation_function}: nanoGPT computes gelu, GPT-2 "
            "gelu_new; if the file's trainer computes the other, change it in config.json"
        )


# ------------------------------------------------------------------------------------------- check


def _loaded(file: Path, model: str, shape: Any, layout: str, tensors: dict[str, Tensor]) -> Any:
    """The model with these tensors, each under its name, after a forward with finite outputs.

    Raises:
        ConfigError: names those that are missing, unknown, of another shape, or broken.
    """

    def refuse(why: str, where: str) -> ConfigError:
        return ConfigError(
            f"{file.name} does not fit {model}",
            where=where,
            why=f"{why} (read in the layout of {layout})",
            fix="--as another model; for other sizes, a folder with a config.json of them",
        )

    def check(why: str, good: Callable[[str, Tensor], bool]) -> None:
        if bad := [name for name, t in tensors.items() if not good(name, t)]:
            raise refuse(f"{len(bad):,} of {len(tensors):,} tensors {why}", some(bad))

    check("are no floats of 16 bits", lambda _, t: t.is_floating_point() and t.itemsize > 1)
    check("are not finite", lambda _, t: bool(t.isfinite().all()))
    # The widest of them, so that no tensor is rounded.
    kind = functools.reduce(torch.promote_types, {t.dtype for t in tensors.values()})
    with torch.device("meta"):
        cls = type(auto_class(shape).from_config(shape))
    given = {"config": shape, "state_dict": dict(tensors), "dtype": kind}
    try:
        loaded = load_whole(lambda _, **k: cls.from_pretrained(None, **k), model, **given)
    except ModelNotFoundError as error:
        names = error.where.removeprefix("model.name: ")
        raise refuse(error.what, f"{names}: {error.why}") from None
    state = loaded.eval().state_dict()
    # By content: a class may initialize again, or tie, what it has just been given.
    check("are others in the model", lambda name, t: torch.equal(state[name], t.to(kind)))
    with torch.no_grad():
        logits = loaded(input_ids=torch.arange(8)[None]).logits
    if not bool(logits.isfinite().all()):
        raise refuse("its outputs are not finite", str(file))
    return loaded
