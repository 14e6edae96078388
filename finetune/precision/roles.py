"""What a linear layer is in its model, and which of them FP8 is for by policy.

High precision by policy: the output head (its errors go straight into the loss), adapters (small,
and what is being learned) and routers (a flipped expert is not rounding noise). Embeddings are
lookups and norms are elementwise: no linear layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Literal

from finetune.errors import PlanError, nearest
from finetune.precision.choices import matches
from finetune.precision.linears import iter_linears

if TYPE_CHECKING:
    from torch import nn

Role = Literal["base", "head", "adapter", "router"]
HEADS = ("lm_head", "score", "classifier", "embed_out", "classification_head")


def iter_roles(model: nn.Module) -> Iterator[tuple[str, Any, Role, str]]:
    """Name, module, role and, unless it is a layer of the base, the reason to keep it high."""
    head, experts = output_head(model), expert_count(model)
    in_head = set(head.modules()) if head is not None else set()  # PEFT may have wrapped it
    for name, module, _ in iter_linears(model):
        yield name, module, *role_of(name, module, in_head, experts)


def role_of(
    name: str, module: Any, in_head: set[nn.Module], experts: int | None
) -> tuple[Role, str]:
    """The role of a linear layer, and the reason to keep it high ("" for a layer of the base).

    Args:
        name: dotted name of the module.
        module: a linear layer.
        in_head: the modules of the output head.
        experts: number of experts of a mixture-of-experts model.
    """
    parts = name.split(".")
    if is_low_rank(name):
        return "adapter", "adapter: small, and what is being learned"
    if "modules_to_save" in parts:
        return "adapter", "trained in full beside the adapters (modules_to_save)"
    # A classifier is a child of the root; deeper down, a layer of such a name is just a layer.
    if module in in_head or (len(parts) <= 3 and parts[-1] in HEADS and "layers" not in parts):
        return "head", "output head: its rounding goes straight into the loss"
    if "router" in parts or (parts[-1] == "gate" and module.out_features == experts):
        return "router", "router: rounding would change which expert is chosen"
    return "base", ""


def is_low_rank(name: str) -> bool:
    """Whether this is one of PEFT's low-rank factors, by its name."""
    return any(part.startswith("lora_") for part in name.split("."))


def expert_count(model: Any) -> int | None:
    """Experts of a mixture-of-experts model, by its configuration."""
    config = getattr(model, "config", None)
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    return next(
        (getattr(config, n) for n in names if isinstance(getattr(config, n, None), int)), None
    )


def output_head(model: Any) -> Any:
    """The module that makes logits, None where a model has none."""
    getter = getattr(model, "get_output_embeddings", None)
    return getter() if callable(getter) else None


def why_own_forward(module: nn.Module) -> str:
    """Why changing the class of a linear layer would not change what it does, "" if it would."""
    from torch import nn
    from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

    if isinstance(module, NonDynamicallyQuantizableLinear):
        return "multiplied by its parent, nn.MultiheadAttention, past its forward"
    own = isinstance(module, nn.Linear) and type(module).forward is not nn.Linear.forward
    if own or "forward" in module.__dict__:
        return f"{type(module).__name__} has a forward of its own"
    return ""


def storable(model: nn.Module, keep: Iterable[str] = ()) -> list[str]:
    """Names of the linear layers that are stored in FP8 where nothing else is said.

    Args:
        model: on any device.
        keep: patterns of layers to leave out, as in `precision.keep`.

    Raises:
        PlanError: a pattern that matches no linear layer, or no layer is left.
    """
    names = [
        name
        for name, module, role, _ in iter_roles(model)
        if role == "base" and not why_own_forward(module)
    ]
    left = leave_out(model, names, keep)
    if not left:
        raise PlanError(
            "there is no linear layer to store in FP8",
            where=type(model).__name__,
            why="besides head and routers it has no linear layers",
            fix="load the model without FP8 storage",
        )
    return left


def leave_out(model: nn.Module, names: Iterable[str], keep: Iterable[str]) -> list[str]:
    """The names without those that a pattern keeps.

    Raises:
        PlanError: a pattern that matches no linear layer, or patterns that keep all names.
    """
    every = [name for name, _, _ in iter_linears(model)]
    for pattern in keep:
        if not any(matches(pattern, name) for name in every):
            words = sorted({p for n in every for p in n.split(".") if not p.isdigit()})
            hint = nearest(pattern, [*words, *every])
            raise PlanError(
                f"keep pattern {pattern!r} matches no linear layer" + (f"; {hint}" if hint else ""),
                where="keep",
                why="a layer meant to stay in high precision would silently be held in FP8",
                fix=f"layer names are made of: {', '.join(words)}",
            )
    names = list(names)
    left = [name for name in names if not any(matches(pattern, name) for pattern in keep)]
    if names and not left:
        raise PlanError(
            "there is no linear layer left to store in FP8",
            where="keep",
            why=f"its patterns keep all {len(names)}",
            fix="keep fewer layers",
        )
    return left


def resolve(model: Any, names: Iterable[str]) -> list[str]:
    """Names of linear layers in this model: also those of the model with, or without, its head.

    Raises:
        PlanError: a name that is no linear layer of the model.
    """
    prefix = f"{model.base_model_prefix}."
    known = {name for name, _, _ in iter_linears(model)}
    found = []
    for name in names:
        candidates = (name, name.removeprefix(prefix), prefix + name)
        match = next((c for c in candidates if c in known), None)
        if match is None:
            hint = nearest(name, known)
            raise PlanError(
                f"{name!r} is no linear layer of this model" + (f"; {hint}" if hint else ""),
                where=type(model).__name__,
                why="it was named to be stored in FP8",
            )
        found.append(match)
    return found
