"""Linear layers, `y = x Wᵀ`, their roles in a model, and parameters that multiply."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Literal

from finetune.errors import PlanError, nearest

if TYPE_CHECKING:
    from torch import nn


def matches(pattern: str, name: str) -> bool:
    """True if a pattern names this module: the whole name, or any run of its parts."""
    if fnmatch.fnmatchcase(name, pattern):
        return True
    parts = name.split(".")
    width = pattern.count(".") + 1
    return any(
        fnmatch.fnmatchcase(".".join(parts[i : i + width]), pattern)
        for i in range(len(parts) - width + 1)
    )


def linear_shape(module: nn.Module) -> tuple[int, int] | None:
    """(N, K) of a module that multiplies by one 2-D weight as `nn.Linear` does, else None."""
    from torch import nn

    if isinstance(module, nn.Linear):
        return module.out_features, module.in_features
    if is_conv1d(type(module)):
        weight: Any = module.weight
        return weight.shape[1], weight.shape[0]  # GPT-2 stores its weight as [K, N]
    return None


def is_conv1d(cls: type[nn.Module]) -> bool:
    """True for GPT-2's `Conv1D`, a linear layer with a transposed weight."""
    return any(
        base.__name__ == "Conv1D" and base.__module__ == "transformers.pytorch_utils"
        for base in cls.__mro__
    )


def iter_linears(model: nn.Module) -> Iterator[tuple[str, Any, tuple[int, int]]]:
    """Name, module and (N, K) of each linear layer, shared modules once."""
    for name, module in model.named_modules():
        shape = linear_shape(module)
        if shape is not None:
            yield name, module, shape


# Roles. High precision by policy: the output head (its errors enter the loss directly), adapters
# (small, and trained) and routers (a flipped expert is more than rounding noise). Embeddings are
# lookups and norms are elementwise: no linear layers.


Role = Literal["base", "head", "adapter", "router"]
HEADS = ("lm_head", "score", "classifier", "embed_out", "classification_head")


def iter_roles(model: nn.Module) -> Iterator[tuple[str, Any, Role, str]]:
    """Name, module, role and, except for layers of the base, the reason for high precision."""
    head, experts = output_head(model), expert_count(model)
    in_head = set(head.modules()) if head is not None else set()  # PEFT may have wrapped it
    for name, module, _ in iter_linears(model):
        yield name, module, *role_of(name, module, in_head, experts)


def role_of(
    name: str, module: Any, in_head: set[nn.Module], experts: int | None
) -> tuple[Role, str]:
    """The role of a linear layer, and the reason for high precision ("" for a layer of the base).

    Args:
        name: dotted name of the module.
        module: a linear layer.
        in_head: modules of the output head.
        experts: number of experts of a mixture-of-experts model.
    """
    parts = name.split(".")
    if is_low_rank(name):
        return "adapter", "adapter: small, and what is being learned"
    if "modules_to_save" in parts:
        return "adapter", "trained in full beside the adapters (modules_to_save)"
    # A classifier is a child of the root; deeper down, a layer of that name is an ordinary one.
    if module in in_head or (len(parts) <= 3 and parts[-1] in HEADS and "layers" not in parts):
        return "head", "output head: its rounding goes straight into the loss"
    if "router" in parts or (parts[-1] == "gate" and module.out_features == experts):
        return "router", "router: rounding would change which expert is chosen"
    return "base", ""


def is_low_rank(name: str) -> bool:
    """True if the name is that of one of PEFT's low-rank factors."""
    return any(part.startswith("lora_") for part in name.split("."))


def expert_count(model: Any) -> int | None:
    """Experts of a mixture-of-experts model, by its configuration."""
    config = getattr(model, "config", None)
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    return next(
        (getattr(config, n) for n in names if isinstance(getattr(config, n, None), int)), None
    )


def output_head(model: Any) -> Any:
    """The module that computes logits, or None."""
    getter = getattr(model, "get_output_embeddings", None)
    return getter() if callable(getter) else None


def why_own_forward(module: nn.Module) -> str:
    """The reason why swapping the class of a linear layer would have no effect, or ""."""
    from torch import nn
    from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

    if isinstance(module, NonDynamicallyQuantizableLinear):
        return "multiplied by its parent, nn.MultiheadAttention, past its forward"
    own = isinstance(module, nn.Linear) and type(module).forward is not nn.Linear.forward
    if own or "forward" in module.__dict__:
        return f"{type(module).__name__} has a forward of its own"
    return ""


def storable(model: nn.Module, keep: Iterable[str] = ()) -> list[str]:
    """Names of the linear layers that are stored in FP8 by default.

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
    """Remove the names that a pattern keeps.

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
    """Names of linear layers in this model, given names with or without the prefix of a head model.

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


# Parameters that multiply: weights of matmuls outside linear layers.
#
# Some modules multiply by an `nn.Parameter` of their own: `x @ self.weight`, an einsum, experts in
# one [experts, N, K] tensor. No type distinguishes such a weight from a table of positions, so it
# has to be declared:
#
#     class Block(nn.Module):
#         fp8_matmuls: ClassVar[tuple[str, ...]] = ("encoder", "decoder")
#
# or, for a third-party class, before the model is prepared:
#
#     finetune.register_parameter_matmuls(TheirBlock, ["encoder", "decoder"])
#
# Expert weights of Transformers are known: 3-D parameters `gate_up_proj` (or `up_proj`) and
# `down_proj` of a class that is its own or decorated by its `use_experts_implementation`. The
# nearest declaration in the class's MRO counts, an empty one included.


ATTRIBUTE = "fp8_matmuls"
EXPERTS = ("gate_up_proj", "up_proj", "down_proj")

_registered: dict[type[nn.Module], tuple[str, ...]] = {}


def register_parameter_matmuls(cls: type[nn.Module], names: Iterable[str]) -> None:
    """Declare the parameters of a class that are operands of its matmuls.

    Args:
        cls: the class whose forward multiplies; subclasses inherit the declaration.
        names: parameters of 2 dimensions or more; an empty list undeclares all.

    Raises:
        PlanError: one string instead of several, or a class that is no `nn.Module`.
    """
    from torch import nn

    if isinstance(names, str) or not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise PlanError(
            "register_parameter_matmuls takes a module class and a list of parameter names",
            where=f"cls={cls!r}, names={names!r}",
            fix='register_parameter_matmuls(Block, ["encoder", "decoder"])',
        )
    _registered[cls] = tuple(names)


def declared_matmuls(module: nn.Module) -> tuple[str, ...]:
    """Names of the module's own parameters that are declared to multiply."""
    for cls in type(module).__mro__:
        if cls in _registered:
            return _registered[cls]
        if ATTRIBUTE in vars(cls):
            return tuple(vars(cls)[ATTRIBUTE])
    if not _holds_experts(type(module)):
        return ()
    held = module._parameters
    return tuple(n for n in EXPERTS if (p := held.get(n)) is not None and p.dim() == 3)


def _holds_experts(cls: type) -> bool:
    """True for a class of Transformers, or one decorated by its `use_experts_implementation`."""
    decorated = getattr(cls.forward, "__globals__", {}).get("__name__")
    ours = any(base.__module__.startswith("transformers.") for base in cls.__mro__)
    return ours or decorated == "transformers.integrations.moe"


def iter_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Module, Any]]:
    """Dotted name, owner and value of each declared parameter, shared modules once.

    Raises:
        PlanError: a declared name is no matrix parameter of its module.
    """
    for prefix, module in model.named_modules():
        for local in declared_matmuls(module):
            value = _value(module, local)
            if value is None or value.dim() < 2:
                found = "no such parameter" if value is None else f"shape {tuple(value.shape)}"
                raise PlanError(
                    f"{local!r} is declared to multiply and is no matrix of its module",
                    where=f"{prefix or 'the model'} ({type(module).__name__}): {found}",
                    why="its matmuls would silently run in high precision",
                    fix=f"mend {ATTRIBUTE}, or what was given to register_parameter_matmuls",
                )
            yield f"{prefix}.{local}" if prefix else local, module, value


def _value(module: nn.Module, local: str) -> Any:
    from torch.nn.utils import parametrize

    if parametrize.is_parametrized(module, local):
        return getattr(module, local)
    return module._parameters.get(local)


def why_made_anew(model: nn.Module, name: str, owner: nn.Module) -> str:
    """The reason why the operand is not the parameter but computed from it, or an empty string.

    Parametrizations (weight norm, and PEFT's `target_parameters`, which adds B·A to a weight)
    compute the operand in each forward, where it cannot be recognized.
    """
    from torch.nn.utils import parametrize

    prefix, _, local = name.rpartition(".")
    if parametrize.is_parametrized(owner, local):
        return "parametrised: the operand is made anew in each forward"
    while prefix.rpartition(".")[2] == "base_layer":
        prefix = prefix.rpartition(".")[0]
        wrapper: Any = model.get_submodule(prefix)
        if type(wrapper).__name__ == "ParamWrapper" and wrapper.parameter_name == local:
            return "adapted by PEFT's target_parameters: the operand is W + BA, made anew"
    return ""


def iter_weights(model: nn.Module) -> Iterator[tuple[str, Any, tuple[int, int]]]:
    """Name, weight and (N, K) of all linear layers and declared parameters."""
    for name, module, shape in iter_linears(model):
        yield name, module.weight, shape
    for name, _, parameter in iter_parameters(model):
        yield name, parameter, (parameter.shape[-2], parameter.shape[-1])
