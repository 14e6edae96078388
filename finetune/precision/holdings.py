"""How the weights of linear layers are held, where they are not plain numbers of 16 or 32 bits.

Storage is apart from compute: a weight in NF4 (bitsandbytes) is dequantised before a BF16 matmul,
one in FP8 (`finetune.precision.weights`) likewise or multiplied as it is. Plan and receipt tell it
from what the module holds, not from what was asked. FP8 compute of weights that are held in another
way is refused here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from finetune.config.schema import PrecisionConfig
from finetune.errors import StorageNotComputeError
from finetune.precision.layers import iter_linears, iter_parameters
from finetune.precision.weights import StoredMixin, iter_stored

if TYPE_CHECKING:
    from torch import nn

    from finetune.precision.planner import LayerPlan


def held_as(module: nn.Module) -> str:
    """`nf4` or `fp4` of bitsandbytes' layers, `fp8` of ours, empty for a plain weight."""
    if isinstance(module, StoredMixin):
        return "fp8"
    weight = module._parameters.get("weight")
    # By name, as Transformers and PEFT ask: bitsandbytes need not be installed.
    return weight.quant_type if type(weight).__name__ == "Params4bit" else ""  # pyright: ignore


def held_weights(model: nn.Module) -> dict[str, int]:
    """How weights are held that are not plain -> number of linear layers."""
    return dict(Counter(kind for _, module, _ in iter_linears(model) if (kind := held_as(module))))


def tell_holdings(rows: Iterable[LayerPlan], model: nn.Module) -> list[LayerPlan]:
    """Rows of a plan, with how the weight is held in the reason of those without FP8 compute."""
    held = {name: kind for name, module, _ in iter_linears(model) if (kind := held_as(module))}
    return [
        replace(row, reason=f"{row.reason}; weight held in {held[row.name]}")
        if row.name in held and row.compute != "fp8"
        else row
        for row in rows
    ]


def iter_weights(model: nn.Module) -> Iterator[tuple[str, Any, tuple[int, int]]]:
    """Name, weight and (N, K) of all that multiplies: linear layers and declared parameters."""
    for name, module, shape in iter_linears(model):
        yield name, module.weight, shape
    for name, _, parameter in iter_parameters(model):
        yield name, parameter, (parameter.shape[-2], parameter.shape[-1])


def refuse_quantised(model: nn.Module, precision: PrecisionConfig) -> None:
    """Raise `StorageNotComputeError` for quantised weights that FP8 GEMMs cannot be fed from.

    Storage (4-bit, 8-bit, `load_in_fp8`) saves memory and is dequantised before each matmul;
    compute multiplies in FP8. Frozen weights stored in FP8 can do both (`precision.frozen`).
    """
    stored = {f"{name}.weight" for name, _ in iter_stored(model)}
    quantised = [
        (name, f"{name}.weight" in stored)
        for name, weight, _ in iter_weights(model)
        if not weight.dtype.is_floating_point or weight.dtype.itemsize < 2
    ]
    flags = ("is_loaded_in_4bit", "is_loaded_in_8bit", "is_quantized")
    flag = next((name for name in flags if getattr(model, name, False)), None)
    if not flag and getattr(getattr(model, "config", None), "quantization_config", None):
        flag = "config.quantization_config"
    where = next((name for name, ours in quantised if not ours), flag)
    if quantised and all(ours for _, ours in quantised):
        if precision.frozen == "fp8":
            return
        raise StorageNotComputeError(
            "this model is stored in FP8 (load_in_fp8), and FP8 compute was not told to use that",
            where=quantised[0][0],
            why="load_in_fp8 is about storage: weights are dequantised before a 16-bit matmul; "
            "frozen weights can also be multiplied as they are stored",
            fix="frozen='fp8' with adapters over it, in setup_fp8_mixed_precision_training("
            "scaling='rowwise', frozen='fp8') or precision.frozen=fp8; to train all parameters, "
            "load the model plain",
        )
    if where is None:
        return
    raise StorageNotComputeError(
        "this model was loaded quantised, and FP8 compute needs plain weights",
        where=where,
        why="load_in_4bit, load_in_8bit and load_in_fp8 are about storage: weights are kept small "
        "and dequantised before a 16-bit matmul; FP8 training is about compute: the matmul itself "
        "runs in FP8 from 16- or 32-bit weights",
        fix="load the model without a quantization_config to train in FP8 (precision.frozen=fp8 "
        "holds a base under adapters in one byte a number), or keep it quantised and train without "
        "setup_fp8_mixed_precision_training (QLoRA in BF16)",
    )
