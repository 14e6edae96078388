"""Layer groups of a diagnosis: linear layers of one kind that ran alike, with their measurements.

A group has one role, one kind of projection (`q_proj`), one shape, one precision per GEMM and one
reason; every linear layer is in exactly one, as are matmuls outside of layers (attention, the
rest). Precisions and FLOPs are the receipt's: executed in the first micro-step, not planned.
Signal-to-noise ratios are training health's: x and w as fprop casts them, g as dgrad does.

Kernels belong to the group in whose layer's range they ran; GEMMs in compiled layers, which have no
ranges inside, are matched by their sizes {M, N, K}. Groups with equal sizes share the time by
FLOPs: 3 seconds of GEMMs {64, 128, 256} are 1 second of one `q_proj` and 2 of two `v_proj`.

Savings are measured: for each group and GEMM one product of the same sizes runs in BF16 on the same
device, from random operands laid out as in linear layers (x [M, K], w [N, K], g [M, N], last
dimension innermost). Limit: on a GPU, GEMMs below some ten microseconds include launch cost.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.utils.benchmark import Timer

from finetune.analysis.diagnose.timeline import Slice, Timeline
from finetune.estimator.speed.step_parts import StepPart
from finetune.precision.model.plan import GEMMS
from finetune.precision.numbers.scaling import OPERANDS
from finetune.precision.proof import witness
from finetune.precision.proof.row import LayerReceipt
from finetune.runs.receipt import layer_groups, layer_kind
from finetune.training.health.operands import GroupSums, merge_sums

LOW = frozenset({"fp8", "fp4"})
KERNELS, LEAST = 3, 0.02
"""Reported kernels of a group: the longest, each at least this share of the group's time."""
MEASURED_S = 0.02
"""Least seconds that the BF16 products of one size are timed for."""


@dataclass(frozen=True)
class ObservedGroup:
    """Layers of one kind that ran alike.

    Attributes:
        kind: last part of the layer names.
        shape: (N, K); (0, 0) for matmuls outside of layers.
        ran: executed precision by GEMM, of those that ran.
        tokens: M of a GEMM, the mean over calls; 0 outside of layers. Of a head that its loss
            multiplies in slabs, the M of as many GEMMs by the whole weight.
        calls, flops, share: of the observed micro-step; the share is of its matmul FLOPs.
        snr_db, worst_snr_db: mean over layers, and the worst layer, by quantized operand (x, w, g).
        gemm_seconds, cast_seconds: time per optimizer step.
        bf16_seconds: time of the same GEMMs in BF16 here; None if not measured.
        kernels: (name, seconds of one step), longest first.
    """

    kind: str
    role: str
    layers: tuple[str, ...]
    shape: tuple[int, int]
    ran: dict[str, str]
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
    def is_low(self) -> bool:
        """True if some GEMM ran in FP8 or FP4."""
        return not LOW.isdisjoint(self.ran.values())

    @property
    def recomputed(self) -> float:
        """Share of calls that checkpointing recomputed, 0 to 1."""
        backward = max(self.calls["dgrad"], self.calls["wgrad"])
        # TRL's fused loss multiplies by the head again in backward, with or without checkpointing.
        if not backward or not all(self.shape) or self.role == "head":
            return 0.0
        return max(0, self.calls["fprop"] - backward) / sum(self.calls.values())

    @property
    def seconds(self) -> float:
        """GEMMs and casts of one optimizer step."""
        return self.gemm_seconds + self.cast_seconds


def precisions_of(row: LayerReceipt) -> dict[str, str]:
    """Executed precision by GEMM, of those that ran."""
    found = {"fprop": row.fprop, "dgrad": row.dgrad, "wgrad": row.wgrad}
    return {gemm: precision for gemm, precision in found.items() if precision != "none"}


def groups_of_receipt(layers: Sequence[LayerReceipt]) -> list[ObservedGroup]:
    """Group a receipt's rows, in model order."""
    total = sum(row.flops for row in layers) or 1
    groups = []
    for rows in layer_groups(layers, by_kind=True):
        one, flops = rows[0], sum(row.flops for row in rows)
        calls = {gemm: sum(row.calls.get(gemm, 0) for row in rows) for gemm in GEMMS}
        # FLOPs over one token's are tokens, whatever experts a row went to.
        flops_of_a_token = 2 * math.prod(one.shape) * sum(calls.values())
        groups.append(
            ObservedGroup(
                kind=layer_kind(one.name),
                role=one.role,
                layers=tuple(row.name for row in rows),
                shape=one.shape,
                ran=precisions_of(one),
                reason=one.reason,
                tokens=round(flops / flops_of_a_token) if flops_of_a_token else 0,
                calls=calls,
                flops=flops,
                share=flops / total,
            )
        )
    return groups


def with_noise(groups: Iterable[ObservedGroup], sums: GroupSums) -> list[ObservedGroup]:
    """Add signal-to-noise ratios from sums by (layer name, operand)."""
    found = []
    for group in groups:
        whole = merge_sums(
            {(o, o): sums[n, o]} for n in group.layers for o in OPERANDS if (n, o) in sums
        )
        cast = {operand: of for (_, operand), of in whole.items() if of.layers}
        mean = {operand: of.snr_db / of.layers for operand, of in cast.items()}
        worst = {operand: of.worst[0] for operand, of in cast.items()}
        found.append(replace(group, snr_db=mean, worst_snr_db=worst))
    return found


# --------------------------------------------------------------------------------- measured time


def with_times(groups: Sequence[ObservedGroup], timeline: Timeline) -> list[ObservedGroup]:
    """Add the seconds of GEMMs and casts, and the kernels behind them."""
    by_layer = {name: index for index, group in enumerate(groups) for name in group.layers}
    gemm, casts = [0.0] * len(groups), [0.0] * len(groups)
    kernels: list[dict[str, float]] = [{} for _ in groups]
    for piece in timeline.slices:
        for index, share in _shares(piece, groups, by_layer):
            seconds = share * piece.seconds / timeline.steps
            times = casts if piece.part == StepPart.CASTS else gemm
            times[index] += seconds
            kernels[index][piece.name] = kernels[index].get(piece.name, 0.0) + seconds
    found = []
    for group, g, c, times in zip(groups, gemm, casts, kernels, strict=True):
        longest = sorted(times.items(), key=lambda kernel: -kernel[1])[:KERNELS]
        shown = tuple(kernel for kernel in longest if kernel[1] > LEAST * sum(times.values()))
        found.append(replace(group, gemm_seconds=g, cast_seconds=c, kernels=shown))
    return found


def _shares(
    piece: Slice, groups: Sequence[ObservedGroup], by_layer: dict[str, int]
) -> list[tuple[int, float]]:
    """Shares of a slice by group index; empty if it belongs to no group."""
    if piece.part == StepPart.ATTENTION:
        return _first_of((witness.ATTENTION, witness.BATCHED), by_layer)
    if piece.part not in (StepPart.FP8_GEMM, StepPart.GEMM, StepPart.CASTS):
        return []
    if piece.owner in by_layer:
        return [(by_layer[piece.owner], 1.0)]
    # In a compiled layer no range says which projection runs; equal sizes share by FLOPs.
    alike = [i for i, g in enumerate(groups) if g.tokens and _multiplies(g, piece)]
    if total := sum(groups[i].flops for i in alike):
        return [(i, groups[i].flops / total) for i in alike]
    is_cast = piece.part == StepPart.CASTS
    return [] if is_cast else _first_of((witness.OTHER, witness.BATCHED), by_layer)


def _first_of(names: tuple[str, ...], by_layer: dict[str, int]) -> list[tuple[int, float]]:
    return [(by_layer[name], 1.0) for name in names if name in by_layer][:1]


def _multiplies(group: ObservedGroup, piece: Slice) -> bool:
    low = {precision in LOW for precision in group.ran.values()}
    if not piece.sizes or (piece.part == StepPart.FP8_GEMM) not in low:
        return False
    if group.role == "head":  # multiplied in chunks of the tokens
        return set(group.shape) <= set(piece.sizes)
    return tuple(sorted((group.tokens, *group.shape))) == piece.sizes


# ----------------------------------------------------------------------------------- BF16 time


def with_bf16_times(
    groups: Iterable[ObservedGroup], device: torch.device, micro_batches: int
) -> list[ObservedGroup]:
    """Add `bf16_seconds` to groups with FP8 GEMMs; `micro_batches` make one optimizer step."""
    known: dict[tuple[str, int, int, int], float] = {}

    def seconds(group: ObservedGroup) -> float:
        total = 0.0
        for gemm in group.ran:  # BF16 GEMMs too: their time is among the group's seconds
            key = (gemm, group.tokens, *group.shape)
            # Sizes repeat from layer to layer.
            known[key] = known.get(key) or _bf16_seconds(*key, device)
            total += known[key] * group.calls[gemm] * micro_batches
        return total

    return [replace(g, bf16_seconds=seconds(g)) if g.is_low and g.tokens else g for g in groups]


def _bf16_seconds(gemm: str, m: int, n: int, k: int, device: torch.device) -> float:
    """Median seconds of one product of two random operands."""

    def made(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, device=device, dtype=torch.bfloat16)

    match gemm:
        case "fprop":
            a, b = made(m, k), made(n, k).t()  # [M, K] @ [K, N]
        case "dgrad":
            a, b = made(m, n), made(n, k)  # [M, N] @ [N, K]
        case _:
            a, b = made(m, n).t(), made(m, k)  # [N, M] @ [M, K]
    timer = Timer("a @ b", globals={"a": a, "b": b}, num_threads=torch.get_num_threads())
    return timer.blocked_autorange(min_run_time=MEASURED_S).median
