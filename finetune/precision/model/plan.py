"""The plan of a model: a row for each layer, with the precision of its GEMMs and the reason.

`finetune.precision.planner` makes it; engines, cases and the proof read it.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import Literal

from rich.console import RenderableType
from rich.table import Column, Table
from rich.text import Text

from finetune.precision.facts import Gemm, Granularity
from finetune.precision.model.layers import Role, plain_name
from finetune.precision.settings import Compute, PrecisionConfig

GEMMS: tuple[Gemm, ...] = ("fprop", "dgrad", "wgrad")


@dataclass(frozen=True)
class LayerPlan:
    """One linear layer, or one parameter that multiplies.

    Attributes:
        name: dotted name of the module or parameter.
        shape: (N, K), outputs and inputs; for a parameter its last two dimensions as stored.
        frozen: True if the weight does not train, so there is no wgrad.
        compute: precision of its GEMMs; `fp8` if the layer is converted.
        reason: reason for this precision; empty in FP8 that nobody has chosen for this layer.
        gemm_precision: GEMM -> precision of a converted layer that is not all FP8.
        override: True if the user chose a type that overrides autocast.
        kind: `linear` for a linear layer, `parameter` for a declared parameter.
        stored: granularity of a weight stored only as FP8 codes, else empty.
    """

    name: str
    shape: tuple[int, int]
    role: Role
    frozen: bool
    compute: Compute
    reason: str
    gemm_precision: tuple[tuple[Gemm, str], ...] = ()
    override: bool = False
    kind: Literal["linear", "parameter"] = "linear"
    stored: Granularity | Literal[""] = ""

    @property
    def owner(self) -> str:
        """The module that multiplies: the layer itself, or the one that holds the parameter."""
        return self.name if self.kind == "linear" else self.name.rpartition(".")[0]

    @property
    def local(self) -> str:
        """The name of a parameter within its module."""
        return self.name.rpartition(".")[2]

    @property
    def gemms(self) -> tuple[Gemm, ...]:
        """GEMMs that this layer may run in a training step."""
        return ("fprop", "dgrad") if self.frozen else GEMMS

    def precision_of(self, gemm: Gemm) -> str:
        """`fp8`, `fp4`, `bf16`, ... or `none` for the wgrad of a frozen weight."""
        return self.would_run(gemm) if gemm in self.gemms else "none"

    def would_run(self, gemm: Gemm) -> str:
        """The precision of this GEMM whenever it runs, also of a frozen weight that thawed."""
        return dict(self.gemm_precision).get(gemm, self.compute)


@dataclass(frozen=True)
class CastPlan:
    """A module without matmuls whose type the user chose: an embedding or a norm."""

    name: str
    compute: Compute
    reason: str


@dataclass(frozen=True)
class PrecisionPlan:
    """The plan of a model: its layers in module order, and the precision it was made for."""

    layers: tuple[LayerPlan, ...]
    precision: PrecisionConfig
    casts: tuple[CastPlan, ...] = ()

    @property
    def fp8_layers(self) -> tuple[LayerPlan, ...]:
        """The layers to be converted."""
        return tuple(layer for layer in self.layers if layer.compute == "fp8")

    @property
    def stored(self) -> tuple[LayerPlan, ...]:
        """The layers whose weights are stored only as FP8 codes."""
        return tuple(layer for layer in self.layers if layer.stored)

    @property
    def fp8_parameters(self) -> dict[str, list[LayerPlan]]:
        """Module name -> its parameters that are to multiply in FP8."""
        found: dict[str, list[LayerPlan]] = {}
        for layer in self.fp8_layers:
            if layer.kind == "parameter" and not layer.stored:
                found.setdefault(layer.owner, []).append(layer)
        return found

    @property
    def overrides(self) -> dict[str, Compute]:
        """Modules that compute in a type of their own, by the user's choice."""
        named = [layer for layer in self.layers if layer.override]
        return {item.name: item.compute for item in (*named, *self.casts)}

    def __rich__(self) -> RenderableType:
        """Layers as a table: a row for each place in a block, and one for all adapters."""
        rows = Counter((*_place(x), *_shown(x)) for x in self.layers)
        rows.update((place_in_block(x.name), "", x.compute, x.reason) for x in self.casts)
        titles = ("", "layer", "N x K", "", "reason")
        columns = [Column(t, no_wrap=t == "N x K", overflow="fold") for t in titles]
        table = Table(*columns, box=None, pad_edge=False, padding=(0, 1, 0, 0))
        for (name, shape, compute, reason), count in rows.items():
            style = "green" if compute in ("fp8", "fp4") else "dim"
            table.add_row(str(count), Text(name), shape, Text(compute, style), Text(reason))
        return table


def _place(layer: LayerPlan) -> tuple[str, str]:
    """Name and shape in the table; of an adapter only which of the two factors it is."""
    if layer.role == "adapter":
        return layer.name.removesuffix(".default").rpartition(".")[2], ""
    return place_in_block(layer.name), "x".join(map(str, layer.shape))


def _shown(layer: LayerPlan) -> tuple[str, str]:
    """Precision of its GEMMs (FP4 with nvfp4), and the reason with the GEMMs kept high."""
    if layer.compute != "fp8":
        return layer.compute, layer.reason
    ran = {gemm: layer.precision_of(gemm) for gemm in layer.gemms}
    kept = [gemm for gemm, kind in ran.items() if kind not in ("fp8", "fp4")]
    low = next((kind for kind in ran.values() if kind in ("fp8", "fp4")), layer.compute)
    high = f"{', '.join(kept)} high" if kept else ""
    return low, "; ".join(filter(None, (layer.reason, high)))


def place_in_block(name: str) -> str:
    """`base_model.model.model.layers.7.mlp.up_proj.base_layer` -> `mlp.up_proj`."""
    name = plain_name(name).removeprefix("model.").removesuffix(".default")
    return re.split(r"(?:^|\.)\d+\.", name)[-1]
