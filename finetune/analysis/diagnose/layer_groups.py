"""Layer groups of a diagnosis: layers of one kind that ran alike, with what was seen of them.

A group has one role, one kind of projection (`q_proj`), one shape, one precision for each of its
three GEMMs and one reason; every linear layer is in exactly one, and so is what multiplies outside
of layers (attention, the rest). Precisions and FLOPs are those of the receipt: what the witness saw
in the first micro-step, not what was planned. Signal-to-noise ratios are those of training health
(`finetune.training.health.collector`), here by layer: x and w as fprop casts them, g as dgrad does.

Kernels come to a group by the layer in whose range they ran; products in compiled layers, which
have no ranges inside, by their sizes {M, N, K}. Where several groups multiply alike they share the
time by their FLOPs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from finetune.analysis.diagnose.timeline import Slice, Trace
from finetune.estimator.speed.step_parts import StepPart
from finetune.precision.proof import witness
from finetune.runs.receipt import LayerReceipt
from finetune.training.health.tallies import Tallies

LOW = frozenset({"fp8", "fp4"})
GEMMS = ("fprop", "dgrad", "wgrad")
OPERANDS = {"x": "activation", "w": "weight", "g": "gradient"}
KERNELS, LEAST = 3, 0.02
"""Names of kernels that are told of each group: those that take longest, and this share of it."""


@dataclass(frozen=True)
class Group:
    """Layers of one kind that ran alike.

    Attributes:
        kind: last part of their names.
        role: base, adapter, router, head, or other.
        layers: their names.
        shape: (N, K); (0, 0) of what is no layer.
        fprop, dgrad, wgrad: precision that ran, `none` where the StepPart.GEMM did not.
        reason: why.
        tokens: M of a product, the mean over calls; 0 of what is no layer.
        calls: StepPart.GEMM -> calls in the observed micro-step.
        flops: of the observed micro-step.
        share: of that micro-step's matmul FLOPs, 0 to 1.
        snr_db: operand (x, w, g) -> mean over layers in dB, of those that are quantised.
        worst_snr_db: operand -> of the worst layer.
        gemm_seconds, cast_seconds: of one optimizer step.
        bf16_seconds: that the same products take in BF16 here; None where not measured.
        kernels: (name, seconds of one step), longest first.
    """

    kind: str
    role: str
    layers: tuple[str, ...]
    shape: tuple[int, int]
    fprop: str
    dgrad: str
    wgrad: str
    reason: str
    tokens: int
    calls: dict[str, int]
    flops: int
    share: float
    snr_db: dict[str, float] = field(default_factory=dict)
    worst_snr_db: dict[str, float] = field(default_factory=dict)
    gemm_seconds: float = 0.0
    cast_seconds: float = 0.0
    bf16_seconds: float | None = None
    kernels: tuple[tuple[str, float], ...] = ()

    @property
    def ran(self) -> dict[str, str]:
        """StepPart.GEMM -> precision, of those that ran."""
        found = {gemm: str(getattr(self, gemm)) for gemm in GEMMS}
        return {gemm: precision for gemm, precision in found.items() if precision != "none"}

    @property
    def is_low(self) -> bool:
        """Whether some StepPart.GEMM ran in FP8 or FP4."""
        return not LOW.isdisjoint(self.ran.values())

    @property
    def recomputed(self) -> float:
        """Share of its products that checkpointing ran a second time, by calls, 0 to 1."""
        backward = max(self.calls["dgrad"], self.calls["wgrad"])
        if not backward or not all(self.shape) or self.role == "head":
            return 0.0
        return max(0, self.calls["fprop"] - backward) / sum(self.calls.values())

    @property
    def seconds(self) -> float:
        """Products and casts, of one optimizer step."""
        return self.gemm_seconds + self.cast_seconds


def group_receipts(layers: Iterable[LayerReceipt]) -> list[Group]:
    """Fold the rows of a receipt into groups, in the order of the model."""
    rows = list(layers)
    total = sum(row.flops for row in rows) or 1
    found: dict[tuple[Any, ...], list[LayerReceipt]] = {}
    for row in rows:
        key = (row.role, kind_of(row.name), tuple(row.shape), row.fprop, row.dgrad, row.wgrad)
        found.setdefault((*key, row.reason), []).append(row)
    groups = []
    for (role, kind, shape, fprop, dgrad, wgrad, reason), members in found.items():
        calls = {gemm: sum(row.calls.get(gemm, 0) for row in members) for gemm in GEMMS}
        flops, each = sum(row.flops for row in members), 2 * math.prod(shape) * sum(calls.values())
        groups.append(
            Group(
                *(kind, role, tuple(row.name for row in members), shape),
                *(fprop, dgrad, wgrad, reason),
                tokens=round(flops / each) if each else 0,
                calls=calls,
                flops=flops,
                share=flops / total,
            )
        )
    return groups


def kind_of(name: str) -> str:
    """`model.layers.0.self_attn.q_proj.base_layer` -> `q_proj`; of adapters `q_proj.lora_A`."""
    parts = [p for p in name.split(".") if not p.isdigit() and p not in ("base_layer", "default")]
    if parts[-1].startswith("lora_") and len(parts) > 1:
        return f"{parts[-2]}.{parts[-1]}"
    return parts[-1]


def with_noise(groups: Sequence[Group], tallies: Tallies) -> list[Group]:
    """Add the signal-to-noise ratios that were seen of their layers.

    Args:
        groups: of the model.
        tallies: (layer name, operand) -> what was seen.
    """
    found = []
    for group in groups:
        mean: dict[str, float] = {}
        worst: dict[str, float] = {}
        for operand in OPERANDS:
            names = ((name, operand) for name in group.layers)
            seen = [tallies[key] for key in names if key in tallies and tallies[key].layers]  # pyright: ignore[reportArgumentType]
            if seen:
                mean[operand] = sum(t.snr_db for t in seen) / sum(t.layers for t in seen)
                worst[operand] = min(t.worst[0] for t in seen)
        found.append(replace(group, snr_db=mean, worst_snr_db=worst))
    return found


def with_times(groups: Sequence[Group], trace: Trace) -> list[Group]:
    """Add the seconds of their products and casts, and the names of the kernels behind them."""
    by_layer = {name: index for index, group in enumerate(groups) for name in group.layers}
    gemm, casts = [0.0] * len(groups), [0.0] * len(groups)
    kernels: list[dict[str, float]] = [{} for _ in groups]
    for piece in trace.slices:
        if piece.part not in (StepPart.FP8_GEMM, StepPart.GEMM, StepPart.CASTS, StepPart.ATTENTION):
            continue
        for index, share in _shares(piece, groups, by_layer):
            seconds = share * piece.seconds / trace.steps
            times = casts if piece.part == StepPart.CASTS else gemm
            times[index] += seconds
            kernels[index][piece.name] = kernels[index].get(piece.name, 0.0) + seconds
    return [
        replace(
            group,
            gemm_seconds=gemm[index],
            cast_seconds=casts[index],
            kernels=_longest(kernels[index]),
        )
        for index, group in enumerate(groups)
    ]


def _longest(kernels: dict[str, float]) -> tuple[tuple[str, float], ...]:
    least = LEAST * sum(kernels.values())
    found = sorted(kernels.items(), key=lambda kernel: -kernel[1])[:KERNELS]
    return tuple((name, seconds) for name, seconds in found if seconds > least)


def _shares(
    piece: Slice, groups: Sequence[Group], by_layer: dict[str, int]
) -> list[tuple[int, float]]:
    """(group, share of the slice) of what a slice belongs to; empty where it is nobody's."""
    if piece.part == StepPart.ATTENTION:
        nobody = [
            by_layer[name] for name in (witness.ATTENTION, witness.BATCHED) if name in by_layer
        ]
        return [(index, 1.0) for index in nobody[:1]]
    if piece.owner in by_layer:
        return [(by_layer[piece.owner], 1.0)]
    alike = [i for i, g in enumerate(groups) if g.tokens and _multiplies(g, piece)]
    total = sum(groups[i].flops for i in alike)
    if total:
        return [(i, groups[i].flops / total) for i in alike]
    rest = [by_layer[name] for name in (witness.OTHER, witness.BATCHED) if name in by_layer]
    return [(index, 1.0) for index in rest[:1]] if piece.part != StepPart.CASTS else []


def _multiplies(group: Group, piece: Slice) -> bool:
    low = {precision in LOW for precision in group.ran.values()}
    if not piece.sizes or (piece.part == StepPart.FP8_GEMM) not in low:
        return False
    if group.role == "head":  # multiplied in pieces of the tokens
        return set(group.shape) <= set(piece.sizes)
    return tuple(sorted((group.tokens, *group.shape))) == piece.sizes
