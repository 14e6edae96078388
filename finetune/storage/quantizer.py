"""FP8 storage as one of Transformers' quantizers: `from_pretrained`, `save_pretrained`, reload.

    AutoModelForCausalLM.from_pretrained(path, quantization_config=Fp8StorageConfig("row"))

Importing this module registers `fp8_storage`. Transformers builds the model on the meta device;
here the linear layers change class (`finetune.precision.stored.linear`), so that they expect codes
and scales. Then tensors come one by one from the memory-mapped files:

* of a 16-bit checkpoint each is quantized where it arrives, before the next is read, so no more
  than one weight ever exists in high precision;
* of an FP8 checkpoint, our own or a published one, codes go in as they are.

Afterwards every stored layer is checked: codes without NaN, finite scales of the right shape. All
parameters are frozen: it is a base for adapters; norms and embeddings would train by accident.

Experts in one 3-D parameter are no linear layers. Of a 16-bit checkpoint they are quantized, stack
by stack, where they are named (`modules`, as a recipe's plan does); else they stay as they are,
with a warning. A published FP8 one is refused.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import torch
from torch import nn
from transformers.core_model_loading import ConversionOps, WeightRenaming
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from finetune.errors import ConfigError, StorageNotComputeError, some
from finetune.precision.cases.experts import (
    put_experts,
    quantize_stack,
    release_experts,
    stored_names,
)
from finetune.precision.facts import Granularity
from finetune.precision.model.layers import experts_in, linear_shape, why_own_forward
from finetune.precision.numbers.formats import E4M3
from finetune.precision.numbers.weights import GRANULARITIES, Tile, quantize_weight
from finetune.precision.stored.codes import Fp8Bits, refuse_training
from finetune.precision.stored.linear import iter_stored, put, release, resolve, scale_of, storable
from finetune.storage import mxfp4
from finetune.storage.checkpoint_formats import (
    OWN,
    SCALE,
    Layout,
    check_codes,
    check_granularity,
    check_scales,
    granularity_name,
    key_translation,
    layout_of,
    refuse_codes,
    refuse_layout,
    scale_shapes,
    tile_named,
    tile_of_scale,
)
from finetune.storage.trial import check_quantizer

log = logging.getLogger(__name__)


class Fp8StorageConfig(QuantizationConfigMixin):
    """Configuration of FP8 storage: the layers, and the scope of their scales.

    Args:
        granularity: `row`, `tensor` or `block` (128 x 128).
        keep: patterns of linear layers that stay in the type of the model.
        modules: granularity -> names of the linear layers to store, in place of all but the head,
            routers and adapters. Filled in once a model is loaded, and saved with it.
        published: the `quantization_config` of a checkpoint in another layout.

    Raises:
        ConfigError: an unknown granularity.
    """

    def __init__(
        self,
        granularity: Granularity = "row",
        keep: Iterable[str] = (),
        modules: Mapping[str, Iterable[str]] | None = None,
        published: Mapping[str, Any] | None = None,
        quant_method: str = OWN,
    ) -> None:
        self.quant_method: Any = quant_method
        self.granularity: Granularity = check_granularity(granularity)
        self.keep = [keep] if isinstance(keep, str) else list(keep)
        self.modules = {k: list(v) for k, v in modules.items()} if modules is not None else None
        self.published = dict(published) if published is not None else None


class _TrainsAdaptersOnly:
    """Value of `is_qat_trainable` that raises in a condition.

    Transformers reads it of every quantized model that a `Trainer` is given, and tests it only
    without adapters (`validate_quantization_for_training`, Transformers 5.17).
    """

    def __bool__(self) -> NoReturn:
        raise refuse_training()


class QuantizeWeight(ConversionOps):
    """Quantizes each weight of a stored layer when it is read; other tensors pass."""

    def __init__(self, quantizer: Fp8StorageQuantizer) -> None:
        self.quantizer = quantizer

    @torch.no_grad()
    def convert(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, input_dict: dict[str, Any], *, model: Any, **_: Any
    ) -> dict[str, Any]:
        """Convert {full name: tensor, or a list of one}; a weight becomes codes and scales."""
        result: dict[str, Any] = {}
        for name in list(input_dict):  # taken out: one weight in high precision at a time
            value = input_dict.pop(name)
            value = value[0] if isinstance(value, list) else value
            if not self.quantizer.param_needs_quantization(model, name):
                result[name] = value
                continue
            if name in self.quantizer.stacks:
                result |= self._stack(model, name, value)
                continue
            module: Any = model.get_submodule(name.removesuffix(".weight"))
            w = value.t() if module.transposed_weight else value
            if tuple(w.shape) != tuple(module.bits.shape):  # is reported by its caller
                raise ValueError(f"{name} is {tuple(value.shape)} in the checkpoint")
            bits, inverse = quantize_weight(w, module.stored_tile)
            bits = bits.t().contiguous() if module.transposed_weight else bits
            result[name] = Fp8Bits(bits)
            result[name.removesuffix(".weight") + SCALE] = inverse
            del value, w
        return result

    def _stack(self, model: Any, name: str, value: Any) -> dict[str, Any]:
        """Codes and scales of all matrices of a stack of experts."""
        owner, _, local = name.rpartition(".")
        module = model.get_submodule(owner)
        if value.shape != module._parameters[local].shape:
            raise ValueError(f"{name} is {tuple(value.shape)} in the checkpoint")
        stack = value.mT if module.is_transposed else value
        bits, inverse = quantize_stack(stack, self.quantizer.stacks[name])
        bits = bits.mT if module.is_transposed else bits
        return {name: Fp8Bits(bits), scale_of(name): inverse}


class Fp8StorageQuantizer(HfQuantizer):
    """Makes linear layers stored ones before loading, and checks them after."""

    requires_calibration = False
    quantization_config: Fp8StorageConfig

    def __init__(self, quantization_config: Fp8StorageConfig, **kwargs: Any) -> None:
        # A configuration object may serve several models: names are written into a copy.
        super().__init__(Fp8StorageConfig(**quantization_config.to_dict()), **kwargs)
        self._names: set[str] = set()
        self.stacks: dict[str, Tile] = {}
        self.experts: list[str] = []  # stacks that are codes
        published = self.quantization_config.published
        self._layout = layout_of(published) if published is not None else Layout(OWN)

    @property
    def is_trainable(self) -> bool:
        return True  # adapters

    @property
    def is_qat_trainable(self) -> Any:
        return _TrainsAdaptersOnly()

    @property
    def is_compileable(self) -> bool:
        return True

    def is_serializable(self) -> bool:
        """True; asked before a model is saved.

        Raises:
            StorageNotComputeError: some experts are stored in FP8.
        """
        if self.experts:
            raise StorageNotComputeError(
                "a model with experts stored in FP8 cannot be saved whole",
                where=some(self.experts, 3),
                why="Transformers writes each expert alone, whose codes would be read as weights",
                fix="save the adapters (PeftModel.save_pretrained); the base is as it was loaded",
            )
        return True

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        # A word such as `auto` is decided later, and looked at once the model is loaded.
        if isinstance(device_map, dict):
            _refuse_offload(device_map)
        check_quantizer(self)

    def get_quantize_ops(self) -> QuantizeWeight:
        return QuantizeWeight(self)

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        if param_name in self.stacks and not self.pre_quantized:
            return True
        module, _, tensor = param_name.rpartition(".")
        # Transformers does not compare the shape of such a tensor; scales have the file's.
        return module in self._names and tensor == (
            "weight_scale" if self.pre_quantized else "weight"
        )

    def get_new_dtype(self, converter: Any, param: Any, dtype: torch.dtype | None) -> Any:
        if dtype is E4M3.dtype and param.get_dtype() != "F8_E4M3":
            raise StorageNotComputeError(
                f"{converter.target_patterns[0]!r} is {param.get_dtype()} in the checkpoint",
                where="quantization_config of config.json",
                why="that says the layer is stored in FP8; a cast without a scale would ruin it",
                fix="correct the configuration, or load the original weights",
            )
        return super().get_new_dtype(converter, param, dtype)

    def update_weight_conversions(self, weight_conversions: list[Any], model: Any) -> list[Any]:
        scale = self._layout.scale
        renamed = [] if scale == SCALE else [WeightRenaming(rf"\{scale}$", SCALE)]
        # Harmless elsewhere: no other checkpoint has such names.
        four_bits = [] if self.pre_quantized else mxfp4.conversions()
        return [*weight_conversions, *renamed, *four_bits]

    def _process_model_before_weight_loading(
        self,
        model: Any,
        dtype: torch.dtype | None = None,
        checkpoint_files: list[str] | None = None,
        **kwargs: Any,
    ) -> None:
        dtype = dtype or torch.get_default_dtype()
        files, published = checkpoint_files or [], self.quantization_config.modules is None
        by_files = self.pre_quantized and published
        tiles = self._found(model, files) if by_files else self._named(model)
        for name, experts in experts_in(model).items():
            if name in tiles:
                self.stacks[name] = _expect_stack(experts, name, tiles.pop(name))
        if not self.pre_quantized:
            # A plain checkpoint with codes in it has lost its `quantization_config`.
            refuse_codes(files)
            _warn_of_experts(model, dtype)
        elif not published:
            _refuse_unnamed(model, files, tiles)
        for name, tile in tiles.items():
            _expect_codes(model.get_submodule(name), tile, dtype)
        self._names = set(tiles)
        ignored = {*(model._keys_to_ignore_on_load_unexpected or ()), *self._layout.ignored}
        # Scales of activations are compute, and no part of a stored layer.
        model._keys_to_ignore_on_load_unexpected = ignored

    def _named(self, model: Any) -> dict[str, Tile]:
        """Tiles of the layers in the configuration's `modules`; without it, of all storable."""
        config = self.quantization_config
        if config.modules is None:
            named = {config.granularity: storable(model, config.keep)}
        else:
            named = {kind: resolve(model, names) for kind, names in config.modules.items()}
        stacks = experts_in(model)
        return {
            name: tile_named(kind, _shape_of(model, name, stacks.get(name)))
            for kind, names in named.items()
            for name in names
        }

    def _found(self, model: Any, files: list[str]) -> dict[str, Tile]:
        """Tiles of the linear layers whose weights the files hold as E4M3 codes."""
        known, tiles, translate = model.state_dict(), {}, key_translation(model)
        for key, companion in scale_shapes(files, self._layout.scale).items():
            name, whole = translate(key)
            if not whole:
                raise refuse_layout(
                    f"{key}, one of several tensors of {name}",
                    "experts in one parameter are no linear layers, and only those are stored",
                )
            if name not in known:
                continue  # Transformers reports what the model has no place for
            name = name.removesuffix(".weight")
            module = model.get_submodule(name)
            shape = linear_shape(module)
            if shape is None or why_own_forward(module):
                kind = type(module).__name__
                raise refuse_layout(f"{key} of a {kind}", "only linear layers are stored")
            if companion is None:
                raise refuse_layout(f"{key} without {self._layout.scale[1:]}", "codes need scales")
            tiles[name] = tile_of_scale(name, shape, companion, self._layout.block)
        if not tiles:
            what = f"{self._layout.method}, without E4M3 weights in its files"
            raise refuse_layout(what, "there is nothing to store")
        if self.quantization_config.published:
            log.warning(
                "load_in_fp8: %d layers in the layout of %s; what it says about activations is "
                "compute, and is ignored",
                len(tiles),
                self._layout.method,
            )
        return tiles

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        _refuse_offload(getattr(model, "hf_device_map", None) or {})
        weights = [f"{name}.weight" for name in self._names]
        missing = [
            name.removesuffix(".weight")
            for name in sorted([*weights, *self.stacks])
            # The flag that Transformers (5.23) sets on each tensor that came from a file.
            if not getattr(model.get_parameter(name), "_is_hf_initialized", False)
        ]
        if missing:
            raise StorageNotComputeError(
                f"the checkpoint has no weights for {len(missing)} layers to be stored in FP8",
                where=some(missing, 5),
                why="a new layer starts from random weights and has to train, which codes cannot",
                fix="name those layers in keep, or load the checkpoint's own architecture",
            )
        for name, module in iter_stored(model):
            check_codes(name, module)
        for name in self.stacks:
            check_scales(name, model.get_buffer(scale_of(name)))
        model._weight_conversions = [  # saved under our own names, not the publisher's
            c
            for c in model._weight_conversions
            if not (isinstance(c, WeightRenaming) and SCALE in c.target_patterns)
        ]
        adopt(model, self)
        return model

    def _dequantize(self, model: Any, dtype: torch.dtype | None = None) -> Any:
        for _, module in list(iter_stored(model)):
            release(module, dtype)
        release_experts(model, dtype or model.dtype)
        return model


def adopt(model: Any, quantizer: Fp8StorageQuantizer) -> None:
    """Freeze a model with stored layers, and write into its configuration which those are."""
    # Norms and embeddings as well: without adapters they would be all that trains.
    model.requires_grad_(False)
    describe(model, quantizer.quantization_config)
    stacks = experts_in(model).items()
    quantizer.experts = [n for n, e in stacks if n.rpartition(".")[2] in stored_names(e)]
    model.hf_quantizer = quantizer
    model.is_quantized = True
    model.quantization_method = quantizer.quantization_config.quant_method


def describe(model: Any, config: Fp8StorageConfig | None = None) -> None:
    """Write into a model's configuration, of storage a new one or `config`, its stored layers.

    Without it others would read saved codes back as the weights themselves. The model may have
    PEFT's layers in it.
    """
    config = config or Fp8StorageConfig()
    config.published, config.modules = None, {}
    for name, module in iter_stored(model):
        kind = granularity_name(module.stored_tile, tuple(module.bits.shape))
        config.modules.setdefault(kind, []).append(name.removesuffix(".base_layer"))
    if len(config.modules) == 1 and (kind := next(iter(config.modules))) in GRANULARITIES:
        config.granularity = check_granularity(kind)
    model.config.quantization_config = config


def _refuse_unnamed(model: Any, files: list[str], tiles: Mapping[str, Tile]) -> None:
    """Refuse codes of our own layout, as of experts, that its configuration does not name."""
    translate = key_translation(model)
    for key in scale_shapes(files, SCALE):
        name, _ = translate(key)
        if name.removesuffix(".weight") not in tiles:
            raise refuse_layout(f"{key} in FP8", "its `modules` do not name that weight")


def _shape_of(model: nn.Module, name: str, experts: Any) -> tuple[int, int]:
    """(N, K) of a linear layer, or of each matrix of a stack in the module `experts`."""
    if experts is None:
        return _shape(model.get_submodule(name))
    rows, columns = model.get_parameter(name).shape[-2:]
    return (columns, rows) if experts.is_transposed else (rows, columns)


def _expect_stack(experts: Any, name: str, tile: Tile) -> Tile:
    """Make a stack of experts on the meta device one that codes can be loaded into."""
    local = name.rpartition(".")[2]
    w = experts._parameters[local]
    count, n, k = (w.mT if experts.is_transposed else w).shape
    with torch.device("meta"):
        bits = torch.empty(count, n, k, dtype=torch.uint8)
        scales = torch.empty(count, -(-n // tile[0]), -(-k // tile[1]), dtype=torch.float32)
    put_experts(experts, local, bits, scales)
    experts._is_hf_initialized = True  # a weight that is missing is an error, not a random one
    return tile


def _shape(module: nn.Module) -> tuple[int, int]:
    shape = linear_shape(module)
    assert shape is not None
    return shape


def _expect_codes(module: Any, tile: Tile, dtype: torch.dtype) -> None:
    """Make a layer on the meta device one that codes can be loaded into."""
    n, k = _shape(module)
    grid = -(-n // tile[0]), -(-k // tile[1])
    with torch.device("meta"):
        bits, scales = torch.empty(n, k, dtype=torch.uint8), torch.empty(grid, dtype=torch.float32)
    put(module, bits, scales, tile, dtype)
    module._is_hf_initialized = True  # a weight that is missing is an error, not a random one


def _refuse_offload(device_map: Mapping[str, Any]) -> None:
    devices = {str(device) for device in device_map.values()}
    if "disk" in devices or ("cpu" in devices and len(devices) > 1):
        raise ConfigError(
            "a model stored in FP8 cannot be offloaded",
            where=f"device_map: {', '.join(sorted(devices))}",
            why="Accelerate casts what it brings back to the type of its place, and codes would "
            "be read as numbers",
            fix="a device_map of GPUs only, or of the CPU only",
        )


def _warn_of_experts(model: nn.Module, dtype: torch.dtype) -> None:
    stacked = {
        name: p.numel()
        for name, p in model.named_parameters()
        if p.ndim > 2 and p.is_floating_point()
    }
    total = sum(p.numel() for p in model.parameters())
    # Below a tenth the memory of 16-bit experts is no reason for a warning.
    if sum(stacked.values()) * 10 < total:
        return
    warnings.warn(
        f"{sum(stacked.values()) / total:.0%} of this model are parameters of experts "
        f"({some(sorted(stacked), 5)}), which are no linear layers: they stay in {dtype}",
        stacklevel=2,
    )


register_quantization_config(OWN)(Fp8StorageConfig)
register_quantizer(OWN)(Fp8StorageQuantizer)
