"""Layer groups: which of a model's many layers are alike, by name and by what ran in them.

A model has hundreds of layers and a person reads ten rows. Tables of a receipt and the diagnosis of
a step fold the rows of a receipt; training health groups modules by the same parts of their names.
Knows no torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeVar

PEFT_WRAPPERS = ("base_layer", "default")
"""Parts that PEFT adds to the names of layers: the layer it wraps, and its first adapter."""


class LayerRow(Protocol):
    """The parts of a receipt's row that groups go by (`finetune.runs.receipt.LayerReceipt`)."""

    name: str
    shape: tuple[int, int]
    role: str
    fprop: str
    dgrad: str
    wgrad: str
    reason: str


Row = TypeVar("Row", bound=LayerRow)


def name_parts(name: str) -> list[str]:
    """`model.layers.0.self_attn.q_proj.base_layer` -> `model layers self_attn q_proj`."""
    return [p for p in name.split(".") if not p.isdigit() and p not in PEFT_WRAPPERS]


def layer_kind(name: str) -> str:
    """`model.layers.0.self_attn.q_proj.base_layer` -> `q_proj`; of adapters `q_proj.lora_A`."""
    parts = name_parts(name)
    return ".".join(parts[-2:]) if parts[-1].startswith("lora_") else parts[-1]


def layer_groups(layers: Iterable[Row], *, by_kind: bool = False) -> list[list[Row]]:
    """Layers that ran alike, in the order of the model.

    Layers `0.q_proj 0.v_proj 1.q_proj 1.v_proj lm_head`, of which the head ran in BF16, are two
    groups, `[0.q_proj 0.v_proj 1.q_proj 1.v_proj] [lm_head]`; by kind they are three.

    Args:
        layers: rows of a receipt.
        by_kind: layers of a group have the same kind (`q_proj`) and shape too.
    """
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in layers:
        kind = (layer_kind(row.name), tuple(row.shape)) if by_kind else ()
        key = (row.role, *kind, row.fprop, row.dgrad, row.wgrad, row.reason)
        groups.setdefault(key, []).append(row)
    return list(groups.values())
