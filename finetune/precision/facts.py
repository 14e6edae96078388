"""What is true of each scaling rule and each engine, a row for each name.

Other files ask the row, and compare no names; two look a cast or an engine up by its name.

A new rule is a row here, a cast in `finetune.precision.numbers.scaling`, which the emulation takes,
and a recipe in any other engine that has it; planner, requirements, estimator, health and doctor
read the row. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

EngineName = Literal["te", "torchao", "emulated"]
Scaling = Literal[
    "delayed", "tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise", "mxfp8", "nvfp4"
]
Fp8Format = Literal["hybrid", "e4m3", "e5m2"]
Gemm = Literal["fprop", "dgrad", "wgrad"]
Granularity = Literal["row", "tensor", "block"]
"""What of a stored weight shares a scale (`finetune.precision.numbers.weights`)."""

FP8_CAPABILITY = (8, 9)
"""Least CUDA compute capability with FP8 tensor cores: Ada, Hopper, Blackwell."""
BLOCK_CAPABILITY = (10, 0)
"""The same of hardware scales of 32 or 16 numbers: Blackwell."""


@dataclass(frozen=True, kw_only=True)
class ScalingFacts:
    """Facts of a scaling rule.

    Attributes:
        shown: what a person reads.
        engines: those that multiply under it.
        format: usual format; None if the rule has one of its own, E2M1.
        pow2: True if scales are usually powers of two.
        own_scales: what scales are by definition, and no setting changes; else empty.
        high: GEMMs that stay in high precision.
        state: what carries over from one step to the next, and belongs to a checkpoint.
        whole: True if one number spans a whole tensor: its scale, or the scale of its scales.
        by_row: True if a row of each GEMM operand has a scale.
        block: numbers along the contracted dimension that share a scale; 0 without blocks.
        weight_rows: rows of a weight that share one.
        stored: granularity of a weight stored in FP8 under it; empty if it stores none.
        alignment: K and N have to be multiples of it.
        capability: least CUDA compute capability that multiplies so in hardware.
        size: bytes of a number, with its share of the scales.
        settings: those that belong to it alone.
    """

    shown: str
    engines: tuple[EngineName, ...]
    format: Fp8Format | None = "e4m3"
    pow2: bool = False
    own_scales: str = ""
    high: tuple[Gemm, ...] = ()
    state: Literal["", "amax history", "random numbers"] = ""
    whole: bool = False
    by_row: bool = False
    block: int = 0
    weight_rows: int = 1
    stored: Literal["row", "tensor", ""] = ""
    alignment: int = 16
    capability: tuple[int, int] = FP8_CAPABILITY
    size: float = 1.0
    settings: tuple[str, ...] = ()

    @property
    def low(self) -> Literal["fp8", "fp4"]:
        """What its GEMMs multiply in."""
        return "fp4" if self.format is None else "fp8"

    @property
    def has_history(self) -> bool:
        """True if scales come from the amaxes of earlier steps."""
        return self.state == "amax history"

    @property
    def is_random(self) -> bool:
        """True if numbers may be rounded by chance."""
        return self.state == "random numbers"

    @property
    def reads_twice(self) -> bool:
        """True if a tensor is read for its amax before it can be cast."""
        return self.whole and not self.block and not self.has_history

    @property
    def has_float_blocks(self) -> bool:
        """True if blocks have float32 scales, which fit into no operand of 16 bits."""
        return bool(self.block) and not self.own_scales

    @property
    def has_exponents(self) -> bool:
        """True if scales are exponents by definition (E8M0)."""
        return bool(self.own_scales) and self.pow2


SCALINGS: dict[Scaling, ScalingFacts] = {
    "delayed": ScalingFacts(
        shown="delayed scaling",
        engines=("te", "emulated"),
        format="hybrid",
        state="amax history",
        whole=True,
        settings=("margin", "amax_history_len", "amax_compute_algo", "reduce_amax"),
    ),
    "tensorwise": ScalingFacts(
        shown="tensor-wise scales",
        engines=("te", "torchao", "emulated"),
        format="hybrid",
        whole=True,
        stored="tensor",
    ),
    "rowwise": ScalingFacts(
        shown="row-wise scales",
        engines=("torchao", "emulated"),
        pow2=True,
        by_row=True,
        stored="row",
    ),
    "rowwise_with_gw_hp": ScalingFacts(
        shown="row-wise scales, wgrad high",
        engines=("torchao", "emulated"),
        pow2=True,
        high=("wgrad",),
        by_row=True,
    ),
    "blockwise": ScalingFacts(
        shown="block scales",
        engines=("te", "emulated"),
        pow2=True,
        block=128,
        weight_rows=128,
        capability=(9, 0),
        size=1 + 4 / 128,
    ),
    "mxfp8": ScalingFacts(
        shown="mxfp8 scaling",
        engines=("te", "emulated"),
        pow2=True,
        own_scales="powers of two (E8M0)",
        block=32,
        alignment=32,
        capability=BLOCK_CAPABILITY,
        size=1 + 1 / 32,
    ),
    "nvfp4": ScalingFacts(
        shown="nvfp4 scaling",
        engines=("te", "emulated"),
        format=None,
        own_scales="E4M3 numbers",
        state="random numbers",
        whole=True,
        block=16,
        weight_rows=16,
        alignment=32,
        capability=BLOCK_CAPABILITY,
        size=1 / 2 + 1 / 16,
    ),
}
FASTEST: Scaling = "tensorwise"
"""Predicted the fastest of those that every FP8 GPU has, where all weights train."""
STORED_SCALINGS = tuple(sorted(name for name, row in SCALINGS.items() if row.stored))
"""Rules under which weights are stored in FP8: they follow the current amax."""


@dataclass(frozen=True, kw_only=True)
class EngineFacts:
    """Facts of an engine.

    Attributes:
        shown: what a person reads.
        scaling: the rule that it has in a script that names none.
        has_kernels: True if it multiplies by FP8 tensor cores.
        emulates: True if it multiplies the values of FP8 codes in wider types.
        is_fused: True if a cast is one kernel without `torch.compile`.
        owns_weights: True if its layers make their weights, and take none of a module's own.
        extra: extra of this package that installs it.
        library: what multiplies on a GPU, if that is not torch itself.
    """

    shown: str = ""
    scaling: Scaling = "tensorwise"
    has_kernels: bool = False
    emulates: bool = False
    is_fused: bool = False
    owns_weights: bool = False
    extra: str = ""
    library: str = ""


ENGINES: dict[EngineName, EngineFacts] = {
    "te": EngineFacts(
        shown="Transformer Engine",
        scaling="delayed",
        has_kernels=True,
        is_fused=True,
        owns_weights=True,
        extra="te",
        library="Transformer Engine",
    ),
    "torchao": EngineFacts(shown="torchao", has_kernels=True),
    "emulated": EngineFacts(shown="the emulation", emulates=True),
}
UNDECIDED = EngineFacts()
"""Of `backend=auto`, which `finetune.hardware.requirements` resolves."""
