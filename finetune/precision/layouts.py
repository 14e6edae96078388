"""How others publish weights in FP8, in the terms of `finetune.precision.storage`.

A published checkpoint is safetensors with `quantization_config` in its `config.json`. Two layouts
hold E4M3 codes `X.weight` [N, K] and numbers that multiply them, which is what a stored layer is:

    quant_method          scales                        of
    fp8                   X.weight_scale_inv            blocks [ceil(N/r), ceil(K/c)], or one
    compressed-tensors    X.weight_scale                channel [N, 1], tensor [1] or [],
      (float-quantized)                                 block, group [N, K/g]

(`inv` there means what it means here: the inverse of the scale that came before the cast.) Scales
may be BF16 or powers of two (E8M0); as float32 they are the same numbers. What a checkpoint says
about activations is about *compute*, and is ignored: `input_scale`, `activation_scheme`, schemes of
the key-value cache. Which layers are quantised is read from the files, not from lists of what to
ignore: a tensor says itself that it is E4M3.

Sources: DeepSeek-V3 `inference/kernel.py` (weight_dequant); Transformers `FineGrainedFP8Config`;
compressed-tensors `quantization/quant_args.py`, `compressors/`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from finetune.errors import StorageNotComputeError, nearest
from finetune.precision.tiles import BLOCK, Granularity, Tile

OWN = "fp8_storage"
METHODS = (OWN, "fp8", "compressed-tensors")
SCALE = ".weight_scale"
KINDS: tuple[Granularity, ...] = ("row", "tensor", "block")


@dataclass(frozen=True)
class Layout:
    """How a checkpoint names what goes with its codes.

    Attributes:
        method: `quant_method` of its `quantization_config`.
        scale: end of the name of a scale, where `.weight` is that of the codes.
        ignored: patterns of tensors that are about compute.
        block: (rows, columns) that share a scale, where the configuration says so.
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
        return _fine_grained(config)
    if method == "compressed-tensors":
        return _compressed(config)
    bits = next((n for n in (4, 8) if config.get(f"load_in_{n}bit")), config.get("bits"))
    raise refuse_layout(
        f"{method or 'an unnamed method'}" + (f" in {bits} bits" if bits else ""),
        "it holds no E4M3 codes in a layout that is known here",
    )


def _fine_grained(config: Mapping[str, Any]) -> Layout:
    if config.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise refuse_layout(f"fp8 of format {config['fmt']}", "stored weights are E4M3")
    block = config.get("weight_block_size")
    return Layout(
        "fp8",
        ".weight_scale_inv",
        (r"\.(activation|input)_scale$",),
        _tile(block) if block else None,
    )


def _compressed(config: Mapping[str, Any]) -> Layout:
    shown = f"compressed-tensors {config.get('format', '')}".strip()
    blocks: set[Tile | None] = set()
    for name, group in (config.get("config_groups") or {}).items():
        weights = group.get("weights")
        if weights is None:
            continue
        kind, bits = weights.get("type", "int"), weights.get("num_bits", 8)
        held = group.get("format") or config.get("format")
        if kind != "float" or bits != 8 or held not in ("float-quantized", "naive-quantized"):
            raise refuse_layout(
                f"{shown}: {name} is {kind}{bits}" + (f" as {held}" if held else ""),
                "stored weights are 8-bit floats, one a byte",
            )
        if not weights.get("symmetric", True) or weights.get("actorder"):
            what = "reordered columns" if weights.get("actorder") else "zero points"
            raise refuse_layout(f"{shown}: {name} has {what}", "a stored weight has none")
        blocks.add(_group_tile(weights))
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
    block = blocks.pop() if len(blocks) == 1 else None
    return Layout("compressed-tensors", SCALE, ignored, block)


def _group_tile(weights: Mapping[str, Any]) -> Tile | None:
    strategy = weights.get("strategy")
    if strategy == "block":
        return _tile(weights.get("block_structure") or (BLOCK, BLOCK))
    if strategy == "group":
        return (1, int(weights["group_size"]))
    return None


def _tile(block: Sequence[int]) -> Tile:
    rows, columns = block
    return int(rows), int(columns)


def refuse_layout(what: str, why: str) -> StorageNotComputeError:
    """The error of a checkpoint that is quantised in another way."""
    return StorageNotComputeError(
        f"load_in_fp8 does not read a checkpoint held as {what}",
        where="config.json: quantization_config",
        why=why,
        fix="load it as its publisher says (from_pretrained alone), or take the model in BF16 or "
        "FP8 (block-scaled `fp8`, compressed-tensors `float-quantized`)",
    )


def tile_of_scale(
    name: str, shape: tuple[int, int], scale: Sequence[int], block: Tile | None
) -> Tile:
    """What shares a scale, by the shape of the scales.

    Args:
        name: of the layer, for the error.
        shape: (N, K) of the weight.
        scale: shape of its scales.
        block: what the configuration says of blocks.

    Raises:
        StorageNotComputeError: scales that do not fit the weight.
    """
    n, k = shape
    if block is not None and tuple(scale) == (-(-n // block[0]), -(-k // block[1])):
        return block
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
        fix="look whether weight_block_size in config.json is that of the weights",
    )


def granularity_name(tile: Tile, shape: tuple[int, int]) -> str:
    """`row`, `tensor`, `block`, or `RxC` for blocks of another size."""
    if tile[0] >= shape[0] and tile[1] >= shape[1] and tile != (BLOCK, BLOCK):
        return "tensor"
    if tile == (1, shape[1]):
        return "row"
    return "block" if tile == (BLOCK, BLOCK) else f"{tile[0]}x{tile[1]}"


def tile_named(name: str, shape: tuple[int, int]) -> Tile:
    """The tile of a weight (N, K) under the name of a granularity, as in our own checkpoints."""
    known = {"row": (1, shape[1]), "tensor": shape, "block": (BLOCK, BLOCK)}
    if name in known:
        return known[name]
    rows, x, columns = name.partition("x")
    if x and rows.isdigit() and columns.isdigit():
        return int(rows), int(columns)
    hint = nearest(name, KINDS)
    raise StorageNotComputeError(
        f"there is no granularity {name!r}" + (f"; {hint}" if hint else ""),
        where="config.json: quantization_config.modules",
    )
