"""`load_in_fp8`: a model whose linear layers store their weights as FP8 codes.

This is *storage*: half the memory of BF16, with every matmul in 16 bits from dequantized weights,
for inference and as a frozen base of adapters. FP8 *compute* is
`setup_fp8_mixed_precision_training`.

    model = load_in_fp8("meta-llama/Llama-3.1-8B-Instruct")
    model = get_peft_model(model, LoraConfig(target_modules="all-linear"))

    checkpoint                          stored codes, without `granularity`
    16 or 32 bits                       quantized on loading, one scale per row
    our own (`save_pretrained`)         the same bits
    `fp8` (DeepSeek, Qwen), or          the published codes bit for bit, with their scales
      compressed-tensors float-quantized

Given a `granularity`, published codes are requantized to it (`finetune.precision.stored.linear`),
so that a base published in blocks can be multiplied in FP8 row by row.

`build_stored` makes such a model of random weights, starting on the meta device: each decoder layer
in turn is allocated, initialized by its model, and quantized. The peak is all codes plus one
decoder layer in high precision. The unit is a decoder layer because a model may initialize a weight
again with the block around it (GPT-2 scales `c_proj` so).
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers import initialization as init

import finetune.storage.bdh  # noqa: F401  makes our own model types known
from finetune.config.paths import user_path
from finetune.config.schema import Storage
from finetune.errors import ConfigError, PlanError
from finetune.precision.cases.experts import store_experts
from finetune.precision.facts import Granularity
from finetune.precision.stored import peft_methods  # noqa: F401  watches what PEFT attaches to codes
from finetune.precision.stored.linear import (
    iter_stored,
    leave_out,
    release,
    requantize,
    resolve,
    storable,
    store,
)
from finetune.storage import nf4
from finetune.storage.checkpoint_formats import METHODS, OWN, check_granularity, layout_of
from finetune.storage.pretrained import auto_class as auto_class_of
from finetune.storage.pretrained import check_folder, in_mxfp4, load_whole, loading, with_head
from finetune.storage.quantizer import Fp8StorageConfig, Fp8StorageQuantizer, adopt

HUB = (
    "cache_dir",
    "code_revision",
    "force_download",
    "local_files_only",
    "proxies",
    "revision",
    "subfolder",
    "token",
    "trust_remote_code",
)
"""Arguments of `from_pretrained` that are passed on to the loading of the configuration."""


def load_in_fp8(
    model_name_or_path: str | os.PathLike[str],
    granularity: Granularity | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    keep: Iterable[str] = (),
    auto_class: Any = None,
    **kwargs: Any,
) -> PreTrainedModel:
    """Load a pretrained model with the weights of its linear layers stored in FP8.

    Weights are quantized one by one while they are read: the model never exists in high precision.
    The output head, embeddings, norms and routers stay in `dtype`, and every parameter is frozen.

    Args:
        model_name_or_path: a folder with `config.json` and safetensors, or a hub id.
        granularity: scope of a scale: `row`, `tensor` or `block` (128 x 128). Default: as in an
            FP8 checkpoint, else `row`.
        dtype: type of everything else, and of the matmuls.
        keep: patterns of linear layers that stay in `dtype`, as in `precision.keep`.
        auto_class: class of Transformers that loads the model; default: the one for text, also of
            a checkpoint with towers for images.
        **kwargs: for `from_pretrained`: `device_map`, `revision`, `attn_implementation`, ...

    Returns:
        A model in evaluation mode. `save_pretrained` writes codes and scales; `load_in_fp8`, or
        `from_pretrained` with this module imported, reads them back bit for bit.

    Raises:
        ConfigError: an unknown granularity, or a device map that offloads.
        ModelNotFoundError: no such folder or hub model, the hub cannot be reached, or the files are
            broken or, without `auto_class`, lack weights.
        PlanError: no linear layer to store, or a pattern that matches none.
        StorageNotComputeError: the checkpoint is quantized in another way, or broken.
    """
    wanted = check_granularity(granularity) if granularity is not None else None
    storage = Fp8StorageConfig(wanted or "row", keep)

    def published(model: Any) -> dict[str, Granularity | None]:
        # A published checkpoint says itself which layers are codes; `keep` takes some back.
        names = leave_out(model, [n for n, _ in iter_stored(model)], storage.keep)
        return dict.fromkeys(names, wanted)

    return _load(model_name_or_path, storage, published, dtype, auto_class, kwargs)


def load_stored(
    source: str | os.PathLike[str],
    names: Collection[str],
    granularity: Granularity = "row",
    *,
    dtype: torch.dtype = torch.bfloat16,
    head: str | None = None,
    **kwargs: Any,
) -> PreTrainedModel:
    """Load a pretrained model in which exactly the named linear layers and experts are FP8 codes.

    Args:
        source: as `model_name_or_path` of `load_in_fp8`; published codes are requantized if in
            `names`, else dequantized.
        names: dotted names of linear layers of the plain model, and of parameters of experts.
        granularity: scope of a scale.
        head: `model.head`.

    Raises:
        ConfigError, ModelNotFoundError, StorageNotComputeError: as `load_in_fp8`; the first also
            for blocks of a stack of experts, which takes a scale by row or by matrix.
        PlanError: a name that is no linear layer of the model.
    """
    storage = Fp8StorageConfig(granularity, modules={granularity: names})

    def published(model: Any) -> dict[str, Granularity | None]:
        return dict.fromkeys(resolve(model, names), granularity)

    return _load(source, storage, published, dtype, None, kwargs, head)


def stored_layers(model: nn.Module, storage: Storage | None) -> dict[str, Any]:
    """Layers of a frozen base, plain or with adapters, that `model.storage` keeps in FP8 or NF4.

    Raises:
        PlanError: there is no layer that could be stored in FP8.
    """
    if storage == "fp8":
        return {name: model.get_submodule(name) for name in storable(model)}
    return nf4.stored_linears(model) if storage == "nf4" else {}


def holds_fp8(config: PretrainedConfig) -> bool:
    """True if the `config.json` of a checkpoint declares FP8 weights in a known layout.

    Raises:
        StorageNotComputeError: FP8 in an unknown variant.
    """
    given = quantization_of(config)
    return given is not None and given.get("quant_method") in METHODS and bool(layout_of(given))


def _load(
    name: str | os.PathLike[str],
    storage: Fp8StorageConfig,
    published: Callable[[Any], Mapping[str, Granularity | None]],
    dtype: torch.dtype,
    given_class: Any,
    kwargs: dict[str, Any],
    head: str | None = None,
) -> Any:
    """Load a checkpoint with the layers of `storage` quantized, or the layers of `published` kept.

    Args:
        published: for FP8 checkpoints, `storage` being for others: a function from the loaded model
            to the layers that stay stored, and their granularity (None: unchanged).
        given_class: class of Transformers that loads the model; None: the one for text.
    """
    for other in ("quantization_config", "load_in_4bit", "load_in_8bit"):
        if other in kwargs:
            raise ConfigError(
                f"load_in_fp8 was given {other}",
                where=other,
                why="weights are stored in one way",
                fix=f"AutoModelForCausalLM.from_pretrained(..., {other}=...), or load_in_fp8 "
                "without",
            )
    source = _source(name, kwargs.get("subfolder", ""))
    hub = {key: kwargs[key] for key in HUB if key in kwargs}
    with loading(source, (OSError, ValueError)):
        config = with_head(AutoConfig.from_pretrained(source, **hub), head)
    given = quantization_of(config)
    if in_mxfp4(config.__dict__):
        # MXFP4 is read as 16-bit weights (`storage.mxfp4`), so there is nothing published to keep.
        given = config.__dict__.pop("quantization_config") and None
    if given is None:
        kwargs = {**kwargs, "quantization_config": storage}
    elif given.get("quant_method") != OWN:
        layout_of(given)  # refuses what is not FP8 before anything is read
        # Transformers reads here that the weights are codes already.
        config.quantization_config = {"quant_method": OWN, "published": dict(given)}  # pyright: ignore[reportAttributeAccessIssue]
    with loading(source, (OSError, SafetensorError)):
        if given_class is not None:  # which may have a new head
            model = given_class.from_pretrained(source, config=config, dtype=dtype, **kwargs)
        else:
            load = auto_class_of(config).from_pretrained
            model = load_whole(load, source, config=config, dtype=dtype, **kwargs)
    return model if given is None else _conform(model, published(model))


def _source(name: str | os.PathLike[str], subfolder: str) -> str:
    """A folder that contains `config.json`, or a hub id.

    Raises:
        ModelNotFoundError: what looks like a path is no such folder.
    """
    source = str(name)
    path = user_path(source)
    # The hub's names have one slash; what else looks like a path is one, with an error of its own.
    if not (path.is_dir() or source.startswith((".", "/", "~")) or source.count("/") > 1):
        return source
    check_folder(source, path, str(path.resolve()), subfolder)
    return str(path)


def quantization_of(config: PretrainedConfig) -> Mapping[str, Any] | None:
    """The `quantization_config` of a checkpoint; of a composite model, its text part's."""
    parts = (config, config.get_text_config(decoder=True))
    found = next((q for c in parts if (q := getattr(c, "quantization_config", None))), None)
    return found if found is None or isinstance(found, Mapping) else found.to_dict()


def _conform(model: Any, stored: Mapping[str, Granularity | None]) -> Any:
    """Bring a loaded FP8 checkpoint to what was asked for: exactly these layers stored.

    Args:
        stored: layer -> granularity of its scales; None: as published.
    """
    for name, module in list(iter_stored(model)):
        if name not in stored:
            release(module)
    already = dict(iter_stored(model))
    for name, granularity in stored.items():
        if name not in already:
            store(model.get_submodule(name), granularity or "row")
        elif granularity is not None:
            requantize(already[name], granularity)
    adopt(model, model.hf_quantizer)
    return model


def build_stored(
    config: PretrainedConfig,
    names: Collection[str],
    granularity: Granularity = "row",
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> PreTrainedModel:
    """Build a model of random weights in which exactly the named linear layers are stored in FP8.

    Args:
        config: the architecture.
        names: as of `load_stored`.
        granularity: scope of a scale.
        dtype: type of everything else.
        device: where layers are allocated, one decoder layer in high precision at a time.
        **kwargs: for `from_config`.

    Returns:
        A frozen model in training mode.

    Raises:
        ConfigError: an unknown granularity.
        PlanError: a name that is no linear layer, or a model that leaves weights uninitialized.
    """
    granularity = check_granularity(granularity)
    with torch.device("meta"):
        model = auto_class_of(config).from_config(copy.deepcopy(config), dtype=dtype, **kwargs)
    due = set(resolve(model, names))

    def real(tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return tensor.to(device)
        empty = torch.empty_like(tensor, device=device)
        # What no initialization sets stays NaN, and is found by `_refuse_uninitialized`.
        return empty.fill_(torch.nan) if empty.is_floating_point() else empty

    def fill(module: nn.Module, prefix: str, owner: Any) -> None:
        """Allocate and initialize a module, children before parents, as Transformers does."""
        owner = module if isinstance(module, PreTrainedModel) else owner
        for name, child in module.named_children():
            fill(child, f"{prefix}{name}.", owner)
            # Behind a whole decoder layer, since its own initialization may set weights of its
            # children again.
            if isinstance(module, nn.ModuleList):
                store_in(f"{prefix}{name}.")
        module._apply(real, recurse=False)
        owner._initialize_weights(module)

    def store_in(prefix: str) -> None:
        """Quantize what is due in a decoder layer that is complete, or in the whole model."""
        for name in [name for name in due if name.startswith(prefix)]:
            due.remove(name)
            store_named(model, name, granularity)

    # Transformers' guard: tensors that are initialized already are left alone.
    with torch.no_grad(), init.guard_torch_init_functions():
        fill(model, "", model)
        store_in("")
    # After all are real: a tie made on meta would be of tensors that are gone.
    model.tie_weights()
    _refuse_uninitialized(model)
    adopt(model, Fp8StorageQuantizer(Fp8StorageConfig()))
    return model


def store_named(model: nn.Module, name: str, granularity: Granularity = "row") -> None:
    """Store a linear layer, or a parameter of experts, in FP8, in place."""
    owner, _, local = name.rpartition(".")
    holder = model.get_submodule(owner)
    if local in holder._parameters:
        store_experts(holder, local, granularity)
    else:
        store(holder.get_submodule(local), granularity)


def _refuse_uninitialized(model: nn.Module) -> None:
    """Raise `PlanError` for tensors that hold the NaN with which `build_stored` allocated them."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    left = [name for name, t in tensors if t.is_floating_point() and bool(t.isnan().any())]
    if left:
        raise PlanError(
            f"{type(model).__name__} does not initialize all of its tensors",
            where=", ".join(left[:5]),
            why="they would hold whatever was in memory: _init_weights has to set them",
            fix="build it with from_config, in full, and load_in_fp8 what was saved of it",
        )
