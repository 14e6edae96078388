"""Which parameters multiply: weights of matmuls that are no linear layers.

Some modules multiply by an `nn.Parameter` of their own: `x @ self.weight`, an einsum, experts held
as one [experts, N, K] tensor. No type tells such a weight from a table of positions, so it has to
be declared:

    class Block(nn.Module):
        fp8_matmuls: ClassVar[tuple[str, ...]] = ("encoder", "decoder")

or, for a class that is not yours, before the model is prepared:

    finetune.register_parameter_matmuls(TheirBlock, ["encoder", "decoder"])

Expert weights of Transformers are known: 3-D parameters `gate_up_proj` (or `up_proj`) and
`down_proj` of a class that is its own or that its `use_experts_implementation` has decorated. The
nearest declaration in the class's line of inheritance counts, an empty one included.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from finetune.errors import PlanError

if TYPE_CHECKING:
    from torch import nn

ATTRIBUTE = "fp8_matmuls"
EXPERTS = ("gate_up_proj", "up_proj", "down_proj")

_registered: dict[type[nn.Module], tuple[str, ...]] = {}


def register_parameter_matmuls(cls: type[nn.Module], names: Iterable[str]) -> None:
    """Declare the parameters of a class that are operands of its matmuls.

    Args:
        cls: the class whose forward multiplies; its subclasses follow it.
        names: of its parameters, of 2 dimensions or more; an empty list takes all back.

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
    """A class of Transformers, or one that its decorator has given its choice of forwards."""
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
    """Why what is multiplied is not the parameter itself but made from it, or an empty string.

    Parametrisations (weight norm, and PEFT's `target_parameters`, which adds B·A to a weight) make
    the operand anew in each forward, past what can be recognised.
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
