"""Checkpoint files as they are read: types and names of their tensors, and layouts of FP8 weights.

File keys may differ from the parameter names in Transformers: prefixes are missing, keys were
renamed, experts stored one by one become one parameter. Transformers' own table
(`get_model_conversion_mapping`) translates them, as in `from_pretrained`.

A published checkpoint is safetensors with `quantization_config` in its `config.json`. Two layouts
hold E4M3 codes `X.weight` [N, K] and numbers that multiply them, which is what a stored layer is:

    quant_method          scales                        of
    fp8                   X.weight_scale_inv            blocks [ceil(N/r), ceil(K/c)], or one
    compressed-tensors    X.weight_scale                channel [N, 1], tensor [1] or [],
      (float-quantized)                                 block, group [N, K/g]

(`inv`: the inverse of the scale that came before the cast, as here.) Scales may be BF16 or powers
of two (E8M0); as float32 they are the same numbers. Settings of activations are about *compute*,
and are ignored: `input_scale`, `activation_scheme`, schemes of the key-value cache. Which layers
are quantized is read from the files, not from lists of what to ignore: a tensor says itself that it
is E4M3. Codes and scales are checked (`check_codes`): a NaN would be in every output, and scales of
another shape, broadcast, would make another model.

Sources: DeepSeek-V3 `inference/kernel.py` (weight_dequant); Transformers `FineGrainedFP8Config`;
compressed-tensors `quantization/quant_args.py`, `compressors/`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.core_model_loading import WeightRenaming, rename_source_key

from finetune.errors import ConfigError, ModelNotFoundError, StorageNotComputeError, did_you_mean
from finetune.precision.numbers.formats import E4M3
from finetune.precision.numbers.weights import (
    BLOCK,
    GRANULARITIES,
    Granularity,
    Tile,
    slab_rows,
    tile_of,
)
from finetune.precision.stored.codes import Fp8Bits

if TYPE_CHECKING:
    from transformers import PreTrainedModel

OWN = "fp8_storage"
METHODS = (OWN, "fp8", "compressed-tensors")
SCALE = ".weight_scale"
FLOATS = ("F16", "BF16", "F32", "F64")
"""Types of weights in safetensors files that are no codes."""
NAN = 0x7F  # E4M3 has two NaN codes, 0x7F and 0xFF, and no infinity


@dataclass(frozen=True)
class Layout:
    """Names and block size of a checkpoint's scales.

    Attributes:
        method: `quant_method` of its `quantization_config`.
        scale: suffix of the names of scales, in the place of `.weight`.
        ignored: patterns of the names of tensors that are about compute.
        block: (rows, columns) that share a scale, if the configuration has them.
    """

    method: str
    scale: str = SCALE
    ignored: tuple[str, ...] = ()
    block: Tile | None = None


def layout_of(config: Mapping[str, Any]) -> Layout:
    """The layout of a checkpoint by its `quantization_config`.

    Raises:
        StorageNotComputeError: a layout that is not E4M3 codes and their scales.
    """
    method = str(config.get("quant_method", ""))
    if method == OWN:
        return Layout(OWN)
    if method == "fp8":
        if config.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
            raise refuse_layout(f"fp8 of format {config['fmt']}", "stored weights are E4M3")
        block = config.get("weight_block_size")
        ignored = (r"\.(activation|input)_scale$",)
        return Layout("fp8", ".weight_scale_inv", ignored, _tile(block) if block else None)
    if method == "compressed-tensors":
        return _compressed(config)
    bits = next((n for n in (4, 8) if config.get(f"load_in_{n}bit")), config.get("bits"))
    raise refuse_layout(
        f"{method or 'an unnamed method'}" + (f" in {bits} bits" if bits else ""),
        "it holds no E4M3 codes in a layout that is known here",
    )


def _compressed(config: Mapping[str, Any]) -> Layout:
    shown = f"compressed-tensors {config.get('format', '')}".strip()
    blocks: set[Tile | None] = set()
    for name, group in (config.get("config_groups") or {}).items():
        weights = group.get("weights")
        if weights is None:
            continue
        kind, bits = weights.get("type", "int"), weights.get("num_bits", 8)
        form = group.get("format") or config.get("format")
        if kind != "float" or bits != 8 or form not in ("float-quantized", "naive-quantized"):
            raise refuse_layout(
                f"{shown}: {name} is {kind}{bits}" + (f" as {form}" if form else ""),
                "stored weights are 8-bit floats, one a byte",
            )
        # A zero point is added, an order permutes columns: code times scale would be another
        # weight.
        if not weights.get("symmetric", True) or weights.get("actorder"):
            what = "reordered columns" if weights.get("actorder") else "zero points"
            raise refuse_layout(f"{shown}: {name} has {what}", "a stored weight has none")
        strategy, tile = weights.get("strategy"), None
        if strategy == "block":
            tile = _tile(weights.get("block_structure") or (BLOCK, BLOCK))
        elif strategy == "group":
            tile = (1, int(weights["group_size"]))
        blocks.add(tile)
    for extra in ("sparsity_config", "transform_config"):
        given = config.get(extra)
        if given and given.get("format", "") != "dense":
            raise refuse_layout(
                f"{shown} with {extra}", "its weights are not code times scale, and no more"
            )
    status = config.get("quantization_status", "compressed")
    if status != "compressed":
        raise refuse_layout(f"{shown} of status {status}", "its weights are not FP8 codes")
    ignored = (r"\.(input|k|v|q|output)_scale$", r"\.(input|output)_zero_point$")
    # Groups of several sizes: each weight's own is then read off the shape of its scales.
    block = blocks.pop() if len(blocks) == 1 else None
    return Layout("compressed-tensors", SCALE, ignored, block)


def _tile(block: Sequence[int]) -> Tile:
    rows, columns = block
    return int(rows), int(columns)


def refuse_layout(what: str, why: str) -> StorageNotComputeError:
    """The error of a checkpoint that is quantized in another way."""
    return StorageNotComputeError(
        f"load_in_fp8 does not read a checkpoint stored as {what}",
        where="config.json: quantization_config",
        why=why,
        fix="load it as its publisher says (from_pretrained alone), or take the model in BF16 or "
        "FP8 (block-scaled `fp8`, compressed-tensors `float-quantized`)",
    )


def tile_of_scale(
    name: str, shape: tuple[int, int], scale: Sequence[int], block: Tile | None
) -> Tile:
    """The tile of weights that share a scale, by the shape of the scales.

    Args:
        name: the layer, for the error.
        shape: (N, K) of the weight.
        scale: shape of its scales.
        block: block size in the configuration.

    Raises:
        StorageNotComputeError: scales that do not fit the weight.
    """
    n, k = shape
    if block is not None and tuple(scale) == (-(-n // block[0]), -(-k // block[1])):
        return block
    # Before rows: of a weight with one row both are the same number.
    if all(size == 1 for size in scale):
        return (n, k)
    if tuple(scale) in ((n, 1), (n,)):
        return (1, k)
    raise StorageNotComputeError(
        f"the scales of {name!r} do not fit its weight",
        where=f"weight {n} x {k}, scales {' x '.join(map(str, scale))}",
        why="there must be one for each "
        + (f"block of {block[0]} x {block[1]}, " if block else "")
        + "row, or one",
        fix="look whether weight_block_size in config.json fits the weights",
    )


def granularity_name(tile: Tile, shape: tuple[int, int]) -> str:
    """`row`, `tensor`, `block`, or `RxC` for blocks of another size."""
    if tile[0] >= shape[0] and tile[1] >= shape[1] and tile != (BLOCK, BLOCK):
        return "tensor"
    if tile == (1, shape[1]):
        return "row"
    return "block" if tile == (BLOCK, BLOCK) else f"{tile[0]}x{tile[1]}"


def check_granularity(granularity: str) -> Granularity:
    """A granularity by its name. Raises `ConfigError` for an unknown one."""
    for kind in GRANULARITIES:
        if granularity == kind:
            return kind
    raise ConfigError(
        f"there is no granularity {granularity!r}" + did_you_mean(str(granularity), GRANULARITIES),
        where="granularity",
        fix="row (a scale for each output channel), tensor (one) or block (128 x 128)",
    )


def tile_named(name: str, shape: tuple[int, int]) -> Tile:
    """The tile of a weight (N, K) under a granularity, or under `RxC` of a published checkpoint.

    Raises:
        ConfigError: an unknown granularity.
    """
    rows, x, columns = name.partition("x")
    if x and rows.isdigit() and columns.isdigit():
        return int(rows), int(columns)
    return tile_of(check_granularity(name), shape)


def tensors_in(file: str | Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Type and shape of each tensor of a safetensors file, by its key; only the header is read."""
    from safetensors import safe_open

    with safe_open(file, framework="pt") as opened:
        parts = {key: opened.get_slice(key) for key in opened.keys()}  # noqa: SIM118  not a dict
        return {key: (part.get_dtype(), tuple(part.get_shape())) for key, part in parts.items()}


def is_code(key: str, kind: str) -> bool:
    """True of a weight whose type is no float of 16 bits or more; masks and positions are none."""
    return kind not in FLOATS and (kind.startswith("F") or "weight" in key.rpartition(".")[2])


def refuse_codes(files: Iterable[str | Path]) -> None:
    """Reject codes in the files of a plain checkpoint.

    Transformers would cast them, whose scales it does not know of, in silence.

    Raises:
        ModelNotFoundError: names the first weight of another type.
    """
    for file in map(Path, files):
        for key, (kind, _) in tensors_in(file).items() if file.suffix == ".safetensors" else ():
            if is_code(key, kind):
                raise ModelNotFoundError(
                    f"{file.name} has weights of type {kind}",
                    where=f"model.name: {key}",
                    why="no quantization_config of config.json says how to read them",
                    fix="download or copy config.json and the safetensors files again, together",
                )


def scale_shapes(files: Iterable[str], suffix: str) -> dict[str, tuple[int, ...] | None]:
    """Name of each E4M3 tensor in the files -> shape of its scales, None where there are none.

    Args:
        files: paths of safetensors.
        suffix: end of the names of scales, in the place of `.weight`.

    Raises:
        StorageNotComputeError: files or codes of another type.
    """
    codes: list[str] = []
    scales: dict[str, tuple[int, ...]] = {}
    for file in files:
        if not file.endswith(".safetensors"):
            raise refuse_layout(file.rpartition("/")[2], "only safetensors are read")
        for key, (kind, shape) in tensors_in(file).items():
            if key.endswith(suffix):
                scales[key.removesuffix(suffix)] = shape
            elif kind == "F8_E4M3":
                codes.append(key)
            elif is_code(key, kind):
                raise refuse_layout(f"{key} in {kind}", "stored weights are E4M3")
    return {key: scales.get(key.removesuffix(".weight")) for key in codes}


def key_translation(model: PreTrainedModel) -> Callable[[str], tuple[str, bool]]:
    """A function from a file's key to its parameter's name, and True if it is all of that."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters: Any = [rule for rule in rules if not isinstance(rule, WeightRenaming)]
    prefix, known = model.base_model_prefix, model.state_dict()

    def translate(key: str) -> tuple[str, bool]:
        name, part = rename_source_key(key, renamings, converters, prefix, known)
        if name not in known and key in known:  # the rule is for another model
            name, part = rename_source_key(key, [], [], prefix, known)
        return name, part is None

    return translate


def check_scales(name: str, scale: Tensor) -> None:
    """Raise `StorageNotComputeError` for scales that are NaN or infinite, as of such weights."""
    if not torch.isfinite(scale).all():
        raise StorageNotComputeError(
            f"{name!r} has NaN or infinity in its weight or scales",
            where="checkpoint",
            why="it would be in every output of the model",
            fix="take another copy of the checkpoint",
        )


def check_codes(name: str, module: Any) -> None:
    """Check codes and scales that came from a file, and bring them to their type and shape.

    Args:
        name: the layer, for the error.
        module: a stored layer, whose weight may be `torch.float8_e4m3fn` and whose scales may have
            lost or gained a dimension.

    Raises:
        StorageNotComputeError: codes or scales that are NaN, of another type or number.
    """
    weight: Tensor = module.weight
    if weight.dtype is E4M3.dtype:
        # As bytes: code that takes them for numbers should fail, not compute.
        module.weight = Fp8Bits(weight.detach().view(torch.uint8))
    elif weight.dtype is not torch.uint8:
        raise refuse_layout(f"{name} in {weight.dtype}", "the layer was to be E4M3 codes")
    n, k = module.bits.shape
    rows, columns = module.stored_tile
    grid, scale = (-(-n // rows), -(-k // columns)), module.weight_scale
    if scale.numel() != grid[0] * grid[1]:
        raise refuse_layout(f"{name} with scales {tuple(scale.shape)}", f"{grid} were expected")
    if scale.dtype is not torch.float32:
        raise refuse_layout(f"{name} with scales in {scale.dtype}", "scales are floating point")
    module.weight_scale = scale.reshape(grid)
    check_scales(name, module.weight_scale)
    # Slab by slab: a mask as large as an embedding would double the peak of loading.
    parts = module.bits.detach().split(slab_rows((n, k), scale.device))
    bad = sum(int(((part & NAN) == NAN).sum()) for part in parts)
    if bad:
        raise StorageNotComputeError(
            f"{name!r} has {bad} codes of NaN (0x7F, 0xFF)",
            where="checkpoint",
            why="E4M3 has no infinities: whoever wrote it overflowed",
            fix="take another copy of the checkpoint, or quantize the 16-bit one",
        )
