"""Selection of layers for `torch.compile`: `precision.compile` of `auto`, `on` or `off`.

Each decoder layer is compiled separately, after the witnessed step, since a model first run under
the witness is never compiled. `auto` compiles where FP8 casts are separate kernels that the
compiler can fuse: torchao's, and those of frozen weights, on a GPU. Transformer Engine has fused
casts already; on a CPU nothing is gained.
"""

from __future__ import annotations

from finetune.config.schema import PrecisionConfig
from finetune.hardware.device import Device
from finetune.precision.convert import Conversion


def compile_layers(conversion: Conversion, precision: PrecisionConfig, device: Device) -> str:
    """Compile the decoder layers of a converted model as configured.

    Returns:
        Outcome and reason, as in the receipt: `on: ...` or `off: ...`.
    """
    eager_casts = precision.backend == "torchao" or conversion.frozen is not None
    unfused = precision.compute == "fp8" and eager_casts and device.kind == "cuda"
    if precision.compile == "off":
        return "off: asked" + ("; casts are not fused, slower than BF16" if unfused else "")
    if precision.compile == "auto" and not unfused:
        return "off: only torchao and frozen weights on a GPU need it"
    by_parameters = conversion.plan.fp8_parameters
    if count := conversion.compile_layers():
        left_out = "; forwards that multiply by parameters are left out" if by_parameters else ""
        return f"on: {count} decoder layers, after the witnessed step{left_out}"
    if by_parameters:
        return "off: the decoder layers multiply by parameters, and are left out"
    return "off: no decoder layers found to compile"
