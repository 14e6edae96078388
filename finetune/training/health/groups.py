"""Layer groups: the few names under which the health of many layers is logged.

A model has hundreds of layers and a person reads ten curves. Layers of one kind behave alike, so
they share a group: `attn`, `mlp`, `experts`, `embed`, `norm`, `head`, `adapter`, `router`. What is
none of these goes by the name of its parent (`mixer`, `encoder`), so that unknown models stay
readable too; a module that multiplies by parameters of its own goes by its own name (`block`).
"""

from __future__ import annotations

from torch import nn

from finetune.precision.layers import HEADS, Role, declared_matmuls
from finetune.precision.overrides import part_of
from finetune.precision.planner import PrecisionPlan

_BY_ROLE: dict[Role, str] = {"head": "head", "adapter": "adapter", "router": "router"}


def group_of(name: str, module: nn.Module, role: Role | None = None) -> str:
    """The group of one module.

    Args:
        name: dotted module name, empty for the root.
        module: the module itself; its class tells embeddings and norms.
        role: of a linear layer, from the plan.
    """
    pieces = [p for p in name.split(".") if not p.isdigit() and p not in ("base_layer", "default")]
    if role in _BY_ROLE:
        return _BY_ROLE[role]
    if any(piece.startswith("lora_") or piece == "modules_to_save" for piece in pieces):
        return "adapter"
    if isinstance(module, nn.Embedding):
        return "embed"
    if "norm" in type(module).__name__.lower():
        return "norm"
    if "expert" in name.lower():
        return "experts"
    if pieces and pieces[-1] in HEADS and len(pieces) <= 3:
        return "head"
    if declared_matmuls(module):  # not a layer of something: the thing itself
        return part_of(name) or pieces[-1]
    return part_of(name) or (pieces[-2] if len(pieces) > 1 else "other")


def groups_of(model: nn.Module, plan: PrecisionPlan | None) -> dict[str, str]:
    """Module name -> group, for every module that holds parameters of its own."""
    roles: dict[str, Role] = {}
    if plan is not None:
        roles = {layer.name: layer.role for layer in plan.layers}
    return {
        name: group_of(name, module, roles.get(name))
        for name, module in model.named_modules()
        if any(True for _ in module.parameters(recurse=False))
    }
