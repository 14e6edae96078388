"""The receipt of a run: what was asked, what ran, and on what evidence. Knows no torch.

`receipt.json` is read by people and by other tools; the keys named in `Receipt` are stable.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.jupyter import JupyterMixin
from rich.table import Table
from rich.text import Text

from finetune.runs.folder import write_whole
from finetune.runs.layer_groups import layer_groups, name_parts
from finetune.units import percent, size_of_gib


@dataclass
class LayerReceipt:
    """One linear layer: the precision in which each GEMM really ran, `none` where it did not.

    Attributes:
        name: dotted module name.
        shape: (N, K).
        role: base, head, adapter or router.
        fprop, dgrad, wgrad: `fp8`, `bf16`, ... or `none`.
        calls: GEMM calls of each kind in the observed micro-step.
        flops: floating point operations of the observed micro-step.
        reason: why this precision was planned.
    """

    name: str
    shape: tuple[int, int]
    role: str
    fprop: str
    dgrad: str
    wgrad: str
    calls: dict[str, int]
    flops: int
    reason: str


@dataclass
class Receipt(JupyterMixin):
    """Evidence of what a run computed, and in which precision.

    Attributes:
        status: `proven`, or why it is not (yet).
        precision: `asked`, `ran`, `backend`, `scaling`, `format`, `effective` (the engine's own
            words), `reason`, `fallback` (one loud line, or empty), `compile`, `storage` (how
            frozen weights are stored that are not plain, `nf4` -> number of layers),
            `forced` (module -> type, where `precision.map` chose one of its own), `adapters` (how
            many run in one function with their base, and why others do not).
        fp8_flop_share: FLOPs of FP8 (and FP4) GEMMs over those of all matmuls of the observed
            micro-step, attention and output head included; 0 to 1.
        flop_share: the same for each precision.
        role_share: share of those FLOPs by what a layer is: `base`, `adapter`, `head`, `router`,
            and `other` for matmuls that are no layers.
        trainable: parameter counts `before`, `after` (preparation), `in_optimizer`, `moved` (by
            the second optimizer step with a learning rate above zero), `below_resolution` (updated
            by the optimizer, but by less than their type can hold); `optimizer_state_bytes`: of
            moments and their scales as they are stored, on this process.
        layers: every linear layer.
        environment: versions, device, seed, processes, patches in force.
        memory: `measured_gib`, the most that a step or the training held (None: not measured);
            `measured`, what that is or why it is missing; `reserved_gib`, the most that torch's
            allocator kept (GPUs); `predicted_gib`, `predicted_reserved_gib` and `predicted`, the
            same as they were expected before the run, and by whom.
        conditions: what a fair twin of the run has to share (`finetune.training.conditions`).
    """

    status: str
    precision: dict[str, Any]
    fp8_flop_share: float = 0.0
    flop_share: dict[str, float] = field(default_factory=dict)
    trainable: dict[str, int] = field(default_factory=dict)
    layers: list[LayerReceipt] = field(default_factory=list)
    environment: dict[str, Any] = field(default_factory=dict)
    memory: dict[str, Any] = field(default_factory=dict)
    conditions: dict[str, Any] = field(default_factory=dict)
    run: dict[str, Any] = field(default_factory=dict)

    @property
    def role_share(self) -> dict[str, float]:
        """Role -> its share of the FLOPs of the observed micro-step."""
        total = sum(layer.flops for layer in self.layers)
        flops: dict[str, int] = {}
        for layer in self.layers:
            flops[layer.role] = flops.get(layer.role, 0) + layer.flops
        return {role: done / total for role, done in flops.items()} if total else {}

    def to_json(self) -> str:
        """The receipt as indented JSON."""
        values = asdict(self) | {"role_share": self.role_share}
        return json.dumps(values, indent=1, ensure_ascii=False)

    def save(self, path: Path) -> None:
        """Write `to_json()` so that a reader never sees half a file."""
        write_whole(path, self.to_json() + "\n")

    @property
    def headline(self) -> str:
        """One line: precision, share, engine."""
        p = self.precision
        if p["ran"] in ("fp8", "fp4"):
            kind = p["ran"].upper()
            share = f"{self.fp8_flop_share:.1%} of matmul FLOPs ran in {kind}"
            return f"{kind} {p['backend']}/{p['scaling']}, {self.status}: {share}"
        held = ", ".join(f"{n} weights held in {k}" for k, n in p.get("storage", {}).items())
        return f"{p['ran'].upper()}, {self.status}: no matmul ran in FP8" + (held and f"; {held}")

    def __rich__(self) -> RenderableType:
        """Headline, loud lines, layers by group, trainable parameters."""
        parts: list[RenderableType] = [Text(self.headline, style="bold")]
        if self.precision.get("fallback"):
            parts.append(Text(f"! {self.precision['fallback']}", style="bold red"))
        parts.append(Text(f"  compile: {self.precision.get('compile', 'off')}", style="dim"))
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for column in ("layers", "", "fprop", "dgrad", "wgrad", "FLOPs", "reason"):
            table.add_column(column, no_wrap=column not in ("", "reason"))
        for row in group_layers(self.layers):
            table.add_row(*row)
        parts.append(table)
        if self.role_share.get("adapter"):
            shares = ", ".join(f"{role} {share:.1%}" for role, share in self.role_share.items())
            parts.append(Text(f"matmul FLOPs: {shares}"))
            if self.precision.get("adapters"):
                parts.append(Text(f"adapters: {self.precision['adapters']}", style="dim"))
        t = self.trainable
        if t:
            parts.append(
                Text(
                    f"trainable parameters: {t['before']:,} before, {t['after']:,} after "
                    f"preparation, {t['in_optimizer']:,} in the optimizer, {t['moved']:,} moved"
                    + _per_parameter(t)
                )
            )
            if t.get("below_resolution"):
                parts.append(
                    Text(
                        f"! {t['below_resolution']:,} parameters get updates smaller than their "
                        "type can hold at this learning rate and stand still; BF16 weights need "
                        "model.dtype=float32",
                        style="yellow",
                    )
                )
        if line := memory_line(self.memory):
            parts.append(Text(line))
        return Group(*parts)


def memory_line(memory: dict[str, Any]) -> str:
    """`Receipt.memory` in one line; empty when it has neither a prediction nor a measurement.

    `memory: predicted 37.9 MiB, measured 38.0 MiB (+0.3 %)`: of the prediction.
    """
    parts = []
    for kind, predicted, measured in (
        ("", memory.get("predicted_gib"), memory.get("measured_gib")),
        ("reserved ", memory.get("predicted_reserved_gib"), memory.get("reserved_gib")),
    ):
        if predicted is not None:
            parts.append(f"{kind}predicted {size_of_gib(predicted)}")
        if measured is not None:
            over = predicted and percent(measured / predicted - 1, sign=True, space=True)
            parts.append(f"{kind}measured {size_of_gib(measured)}" + (f" ({over})" if over else ""))
    return f"memory: {', '.join(parts)}" if parts else ""


def _per_parameter(trainable: dict[str, int]) -> str:
    state, owned = trainable.get("optimizer_state_bytes", 0), trainable["in_optimizer"]
    return f"; {state / owned:.2f} bytes of optimizer state each" if state and owned else ""


def group_layers(layers: list[LayerReceipt]) -> list[tuple[str, ...]]:
    """Layers with the same role, precisions and reason, folded to one row of text for a table."""
    total = sum(layer.flops for layer in layers) or 1
    return [
        (
            str(len(rows)),
            " ".join(dict.fromkeys(name_parts(row.name)[-1] for row in rows)),
            *(p if p != "none" else "-" for p in (rows[0].fprop, rows[0].dgrad, rows[0].wgrad)),
            f"{sum(row.flops for row in rows) / total:.1%}",
            rows[0].reason,
        )
        for rows in layer_groups(layers)
    ]
