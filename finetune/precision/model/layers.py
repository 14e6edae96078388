"""Linear layers, `y = x Wᵀ`, their roles in a model, and parameters that multiply.

High precision by policy: the output head (its errors enter the loss directly), adapters (small, and
trained), routers (a flipped expert is more than rounding noise) and frozen towers for images
(`finetune.precision.model.towers`). Embeddings are lookups and norms are elementwise: no linear
layers.

Some modules multiply by an `nn.Parameter` of their own: `x @ self.weight`, an einsum, experts in
one [experts, N, K] tensor. No type distinguishes such a weight from a table of positions, so it
is declared, and its forward multiplies by `finetune.fp8_matmul`:

    class Block(nn.Module):
        fp8_matmuls: ClassVar[tuple[str, ...]] = ("encoder", "decoder")

The nearest declaration in the class's MRO counts, an empty one included. Expert weights of
Transformers are known: 3-D parameters `gate_up_proj` (or `gate_proj`, `up_proj`) and `down_proj` of
a class that is its own or decorated by its `use_experts_implementation`, and those of DBRX and
JetMoE. Decorated ones and Llama 4's are multiplied by forwards of ours (`precision.cases.experts`);
the others have a row in the plan, in high precision.
"""

from __future__ import annotations

import fnmatch
import functools
import importlib.util
import inspect
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils import parametrize

from finetune.errors import PlanError, did_you_mean
from finetune.precision.model.towers import FROZEN_TOWER, modules_beside
from finetune.precision.model.tree import Tree
from finetune.precision.settings import PrecisionConfig

Role = Literal["base", "head", "adapter", "router", "tower"]
HEADS = ("lm_head", "score", "classifier", "embed_out", "classification_head")
IN_HEAD = "output head: errors here hit the loss directly"
BESIDE_ADAPTERS = "trained in full next to the adapters (modules_to_save)"
ATTRIBUTE = "fp8_matmuls"
EXPERTS = ("gate_up_proj", "gate_proj", "up_proj", "down_proj")
OTHER_EXPERTS = {"DbrxExpertGLU": ("w1", "v1", "w2"), "JetMoeParallelExperts": ("weight",)}
"""Classes of Transformers (5.23) whose experts are in parameters of other names or shapes."""
BATCHED_EXPERTS = ("Llama4TextExperts",)
"""Classes of Transformers (5.23) whose experts take as many tokens each."""


# ----------------------------------------------------------------------------------- linear layers


def linear_shape(module: nn.Module) -> tuple[int, int] | None:
    """(N, K) of a module that multiplies by one 2-D weight as `nn.Linear` does, else None."""
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


def decoder_layers(model: nn.Module | Tree) -> Iterator[nn.Module]:
    """Layers that Transformers names in `_no_split_modules`, which are compiled and timed whole."""
    modules = list(model.modules())
    names = {n for m in modules for n in getattr(m, "_no_split_modules", None) or ()}
    for module in modules:
        # By any class: FSDP2 puts one of its own in front, under another name.
        if not names.isdisjoint(cls.__name__ for cls in type(module).__mro__):
            yield module


def decoder_blocks(model: nn.Module | Tree, names: list[str], where: str) -> tuple[str, int]:
    """Name and length of the list of decoder blocks: the outermost that holds these weights.

    Raises:
        PlanError: there is none; `where` is the setting that counts them.
    """
    # A list counts if one of these weights is in its first block, `name.0.`.
    lists = [
        (len(module), name)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and any(n.startswith(f"{name}.0.") for n in names)
    ]
    if not lists:
        raise PlanError(
            f"{where}: set for a model without a list of decoder blocks",
            where=where,
            why="its blocks share one set of weights, or are not held in an nn.ModuleList",
            fix=f"{' '.join('~' + key for key in where.split(', '))}, and name modules instead "
            "(precision.keep, lora.exclude_modules)",
        )
    # Experts are lists inside a block: the outermost list comes first, whatever its length.
    depth = min(name.count(".") for _, name in lists)
    count, name = max((c, n) for c, n in lists if n.count(".") == depth)
    return name, count


@dataclass(frozen=True, eq=False)
class Record:
    """What is known of one weight that multiplies, before any precision is chosen.

    Attributes:
        name: dotted name of the linear layer, or of the declared parameter.
        owner: the module that multiplies: the layer, or the one that holds the parameter.
        weight: the parameter; where a parametrization makes it, its value.
        shape: (N, K) of a layer; the last two dimensions of a parameter.
        kind: `linear` or `parameter`.
        role: what it is in the model.
        why_high: except for `base`, the reason for high precision.
        past: the reason why its parent may multiply by it past its forward, or empty.
    """

    name: str
    owner: Any
    weight: Any
    shape: tuple[int, int]
    kind: Literal["linear", "parameter"]
    role: Role
    why_high: str
    past: str = ""


def records(model: nn.Module | Tree) -> list[Record]:
    """All linear layers, then all declared parameters of a model; shared modules once.

    Raises:
        PlanError: a declared name is no matrix parameter of its module.
    """
    tree = Tree.of(model)
    modules = tree.named
    in_head, experts = head_modules(tree.model), _expert_count(tree.model)
    beside = modules_beside(without_adapters(tree.model))
    linears: list[Record] = []
    parameters: list[Record] = []
    for name, module in modules.items():
        shape = linear_shape(module)
        if shape is not None:
            role, why = _role(name, module, in_head, experts)
            if role == "base" and id(module) in beside and not _trains(name, modules):
                role, why = "tower", FROZEN_TOWER
            past = _read_by_parent(name, modules)
            linears.append(Record(name, module, module.weight, shape, "linear", role, why, past))
        for local in declared_matmuls(module):
            weight, full = _declared(name, module, local), f"{name}.{local}" if name else local
            role, why = ("head", IN_HEAD) if module in in_head else ("base", "")
            if "modules_to_save" in full.split("."):
                role, why = "adapter", BESIDE_ADAPTERS
            sizes = weight.shape[-2], weight.shape[-1]
            parameters.append(Record(full, module, weight, sizes, "parameter", role, why))
    return linears + parameters


def multiplies(module: nn.Module | Tree) -> bool:
    """True if there is anything to convert: a linear layer or a declared parameter."""
    return any(linear_shape(m) is not None or declared_matmuls(m) for m in module.modules())


def linear_records(model: nn.Module | Tree) -> list[Record]:
    """The linear layers among `records`."""
    return [record for record in records(model) if record.kind == "linear"]


def elementwise(modules: dict[str, nn.Module]) -> dict[str, Literal["embed", "norm"]]:
    """Name -> part of embeddings and norms: modules with weights and no matmul."""
    found: dict[str, Literal["embed", "norm"]] = {}
    for name, module in modules.items():
        if isinstance(module, nn.Embedding):
            found[name] = "embed"
        # By name: RMSNorm is a class of its own in each model of Transformers.
        elif "norm" in type(module).__name__.lower() and not list(module.children()):
            found[name] = "norm"
    return found


def why_own_forward(module: nn.Module) -> str:
    """The reason why swapping the class of a linear layer would have no effect, or ""."""
    if isinstance(module, NonDynamicallyQuantizableLinear):
        return "multiplied by its parent, nn.MultiheadAttention, past its forward"
    if "forward" in module.__dict__:
        return f"{type(module).__name__} has a forward of its own"
    return own_forward(module)


def own_forward(module: nn.Module) -> str:
    """The reason why a subclass of `nn.Linear` is no `y = x Wᵀ + b`, or ""."""
    cls: Any = type(module)
    while "swapped_from" in vars(cls):  # storage of ours is no forward of the model's
        cls = cls.swapped_from
    if not isinstance(module, nn.Linear) or cls.forward is nn.Linear.forward:
        return ""
    same = any(f"{base.__module__}.{base.__name__}" in SAME_AS_LINEAR for base in cls.__mro__)
    return "" if same else f"{cls.__name__} has a forward of its own"


SAME_AS_LINEAR = ("transformers.models.falcon.modeling_falcon.FalconLinear",)
"""Subclasses whose forward is that of `nn.Linear` in other words (`x @ W.T + b`).

Bit for bit without a bias (Falcon 7B and 40B); with one, the sum is rounded once more.
"""


def _read_by_parent(name: str, modules: dict[str, nn.Module]) -> str:
    """The reason why the weight of a layer in a Mamba mixer is read past its forward, or "".

    The fused kernels of `mamba_ssm` take the weights of `out_proj`, `x_proj` and `dt_proj`, and
    Transformers 5.23 multiplies by `dt_proj.weight` without them, too. A mixer is known by its
    parameters `A_log` and `D`.
    """
    # Under PEFT the mixer's child is the wrapper, and the linear layer its `base_layer`.
    parent, _, last = name.removesuffix(".base_layer").rpartition(".")
    if last in MAMBA and {"A_log", "D"} <= modules[parent]._parameters.keys():
        return "Mamba's kernels read its weight past the layer's forward"
    return ""


MAMBA = ("out_proj", "x_proj", "dt_proj")


def past_forward_here(record: Record) -> str:
    """`Record.past`, where this machine's kernels would read the weight so; else ""."""
    # `dt_proj.weight` is read everywhere, the others only by the fused kernels.
    if not record.past or "dt_proj" in record.name.split("."):
        return record.past
    fused = any(importlib.util.find_spec(name) for name in ("mamba_ssm", "kernels"))
    return record.past if fused else ""


def ids_giving_types(modules: Iterable[nn.Module]) -> Iterator[int]:
    """Ids of layers whose parent's code casts activations to the type of their weight.

    T5's `wo` is one. Cast to the type of FP8 codes, activations would lose scale and gradient.
    """
    for parent in modules:
        for name in _named_before_dtype(type(parent)):
            child = getattr(parent, name, None)
            yield id(getattr(child, "base_layer", child))


@functools.cache
def _named_before_dtype(cls: type[nn.Module]) -> tuple[str, ...]:
    """Names `x` in each `self.x.weight.dtype` of a class's forward."""
    try:
        source = inspect.getsource(cls.forward)
    except (OSError, TypeError):  # written in C, or in a notebook cell that is gone
        return ()
    return tuple(re.findall(r"self\.(\w+)\.weight\.dtype", source))


# ------------------------------------------------------------------------------------------- roles


def _role(name: str, module: Any, in_head: set[nn.Module], experts: int | None) -> tuple[Role, str]:
    """Role of a linear layer and, except for those of the base, the reason for high precision."""
    parts = name.split(".")
    if is_low_rank(name):
        return "adapter", "LoRA adapter: trained, kept in high precision"
    if "modules_to_save" in parts:
        return "adapter", BESIDE_ADAPTERS
    # A classifier is a child of the root; deeper down, a layer of that name is an ordinary one.
    if module in in_head or (len(parts) <= 3 and parts[-1] in HEADS and "layers" not in parts):
        return "head", IN_HEAD
    # By width as well: a `gate` without one output per expert is part of an MLP.
    if "router" in parts or (parts[-1] == "gate" and module.out_features == experts):
        return "router", "router: rounding would change which expert is chosen"
    return "base", ""


def _trains(name: str, modules: dict[str, nn.Module]) -> bool:
    """True if the weight of a linear layer trains, or an adapter over it."""
    outer = modules[name.removesuffix(".base_layer")]
    return any(p.requires_grad for p in outer.parameters())


def is_low_rank(name: str) -> bool:
    """True for PEFT's low-rank factors and X-LoRA's classifier, not for its base (`lora_model`)."""
    parts = set(name.split(".")) - {"lora_model"}
    return any(part.startswith(("lora_", "internal_xlora_")) for part in parts)


def plain_name(name: str) -> str:
    """The name of a module in the model without PEFT's wrapping."""
    return name.removeprefix("base_model.model.").replace(".base_layer", "")


def without_adapters(model: Any) -> Any:
    """The model that PEFT has wrapped, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def head_modules(model: Any) -> set[nn.Module]:
    """The module that computes logits, or one score, and those inside it, as PEFT wraps it."""
    getter = getattr(model, "get_output_embeddings", None)
    head = getter() if callable(getter) else None
    if head is None and getattr(getattr(model, "config", None), "num_labels", None) == 1:
        head = getattr(model, "score", None)  # of a reward model
    return set(head.modules()) if head is not None else set()


def _expert_count(model: Any) -> int | None:
    """Experts of a mixture-of-experts model, by its configuration."""
    config = getattr(model, "config", None)
    # As Qwen, Mixtral and gpt-oss, DeepSeek, and ERNIE call it, in this order.
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    return next(
        (getattr(config, n) for n in names if isinstance(getattr(config, n, None), int)), None
    )


# --------------------------------------------------------------------------------- chosen by name


def matches(pattern: str, name: str) -> bool:
    """True if a pattern names this module: the whole name, or any run of its parts.

    Such are those of `precision.keep`, `model.freeze` and `lora.exclude_modules`.
    `layers.0` names `model.layers.0.mlp.up_proj`, and so do `mlp`, `*_proj` and `layers.0.mlp`.
    """
    if fnmatch.fnmatchcase(name, pattern):
        return True
    parts = name.split(".")
    width = pattern.count(".") + 1
    return any(
        fnmatch.fnmatchcase(".".join(parts[i : i + width]), pattern)
        for i in range(len(parts) - width + 1)
    )


def matched(
    patterns: Iterable[str],
    names: Iterable[str],
    *,
    where: str,
    what: str = "linear layer",
    fate: str = "run in FP8",
    known: tuple[str, ...] = (),
) -> dict[str, str]:
    """Name -> pattern, for each name that a pattern matches; the last one of several.

    Args:
        where: the setting that has the patterns.
        what: kind of thing that `names` are.
        fate: end of "a layer meant to stay in high precision would silently ...".
        known: words that the setting takes besides patterns.

    Raises:
        PlanError: a pattern that matches nothing.
    """
    names, found = list(names), {}
    for pattern in patterns:
        hits = [name for name in names if matches(pattern, name)]
        if not hits:
            words = sorted({p for name in names for p in name.split(".") if not p.isdigit()})
            raise PlanError(
                f"{where} pattern {pattern!r} matches no {what}"
                + did_you_mean(pattern, [*words, *names, *known]),
                where=where,
                why=f"a layer meant to stay in high precision would silently {fate}",
                fix=(f"~{where}; " if where.startswith("precision.") else "")
                + (f"parts are {', '.join(known)}; " if known else "")
                + f"layer names are made of: {', '.join(words)}",
            )
        found |= dict.fromkeys(hits, pattern)
    return found


# ------------------------------------------------------------------------ parameters that multiply


def declared_matmuls(module: nn.Module) -> tuple[str, ...]:
    """Names of the module's own parameters that are declared, or known, to multiply."""
    cls = type(module)
    if hasattr(cls, ATTRIBUTE):
        return tuple(getattr(cls, ATTRIBUTE))
    theirs = [base for base in cls.__mro__ if base.__module__.startswith("transformers.")]
    if not theirs and not _is_decorated(cls):
        return ()
    other = next((OTHER_EXPERTS[c.__name__] for c in theirs if c.__name__ in OTHER_EXPERTS), None)
    if other is not None:
        return other
    own = module._parameters
    return tuple(n for n in EXPERTS if (p := own.get(n)) is not None and p.dim() == 3)


@functools.cache
def _is_decorated(cls: type[nn.Module]) -> bool:
    """True for a class that Transformers' `use_experts_implementation` has decorated."""
    # The decorator's `wraps` copies the name of the module, not the globals of the function.
    forwards = (vars(base).get("forward") for base in cls.__mro__)
    names = (getattr(forward, "__globals__", {}).get("__name__") for forward in forwards)
    return "transformers.integrations.moe" in names


def are_served_experts(module: nn.Module) -> bool:
    """True for decorated experts on this process, as `precision.cases.experts` multiplies."""
    spread = getattr(module, "_is_expert_parallel", False)
    return _is_decorated(type(module)) and not spread


def are_batched_experts(module: nn.Module) -> bool:
    """True for Llama 4's experts, as `precision.cases.experts` multiplies them."""
    theirs = [c for c in type(module).__mro__ if c.__module__.startswith("transformers.")]
    return any(c.__name__ in BATCHED_EXPERTS for c in theirs) and not hasattr(module, ATTRIBUTE)


def why_multiplied_past(module: nn.Module) -> str:
    """The reason why a module's forward multiplies past `finetune.fp8_matmul`, or ""."""
    ours = hasattr(type(module), ATTRIBUTE) or are_batched_experts(module)
    if ours or are_served_experts(module):
        return ""
    return "multiplied by its own module, which finetune.fp8_matmul in its forward would do in FP8"


def experts_in(model: nn.Module) -> dict[str, nn.Module]:
    """Name of each parameter that is a stack of served experts -> its module."""
    found = (record for record in records(model) if record.kind == "parameter")
    return {record.name: record.owner for record in found if are_served_experts(record.owner)}


def _declared(prefix: str, module: nn.Module, local: str) -> Any:
    """Value of a declared parameter.

    Raises:
        PlanError: it is no matrix parameter of its module.
    """
    # A parametrized one is under `parametrizations`, and a property computes its value.
    made = parametrize.is_parametrized(module, local)
    value: Any = getattr(module, local) if made else module._parameters.get(local)
    if value is None or value.dim() < 2:
        found = "no such parameter" if value is None else f"shape {tuple(value.shape)}"
        raise PlanError(
            f"{local!r} is declared to multiply and is no matrix of its module",
            where=f"{prefix or 'the model'} ({type(module).__name__}): {found}",
            why="its matmuls would silently run in high precision",
            fix=f"correct {ATTRIBUTE} of its class, names of parameters of 2 dimensions or more",
        )
    return value


def why_made_again(modules: dict[str, nn.Module], name: str, owner: nn.Module) -> str:
    """The reason why the operand is not the parameter but computed from it, or an empty string.

    Parametrizations (weight norm, and PEFT's `target_parameters`, which adds B·A to a weight)
    compute the operand in each forward, where it cannot be recognized.
    """
    prefix, _, local = name.rpartition(".")
    if parametrize.is_parametrized(owner, local):
        return "parametrized: the operand is computed again in each forward"
    # One ParamWrapper is around another where several parameters of a module are adapted.
    while prefix.rpartition(".")[2] == "base_layer":
        prefix = prefix.rpartition(".")[0]
        wrapper: Any = modules[prefix]
        if type(wrapper).__name__ == "ParamWrapper" and wrapper.parameter_name == local:
            return "adapted by PEFT's target_parameters: the operand is W + BA, computed again"
    return ""


def why_not_aligned(shape: tuple[int, int], precision: PrecisionConfig) -> str:
    """The dimension of a weight [N, K] that an FP8 GEMM cannot take, or ""."""
    multiple = alignment(precision)
    for label, size in zip("KN", shape[::-1], strict=True):
        if size % multiple:
            return f"{label}={size} is not a multiple of {multiple}"
    return ""


def alignment(precision: PrecisionConfig) -> int:
    """Required divisor of K and N: 16 for FP8 GEMMs, 32 for Blackwell's block formats."""
    return precision.facts.alignment
