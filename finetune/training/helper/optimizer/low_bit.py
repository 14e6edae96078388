"""Low-bit optimizers, whose state is stored in few bits: its size, and building them.

`finetune.training.helper.optimizer.adamw` has their steps. torchao's classes go to the trainer as
`optimizer_cls_and_kwargs`, since Transformers has no name for the FP8 one and passes `block_size`
as text.

They compute an update in float32, and round BF16 weights by chance unless that is switched off: up
with the probability that makes the mean right, so that updates below a weight's last bit survive on
average (Gupta et al. 2015, arXiv 1502.02551).

    weight 0.02, BF16 spacing 1.2e-4: an update of 1e-5 moves it by 1.2e-4 in one step of twelve

The Trainer requests 32-bit embeddings from bitsandbytes in a process-wide register that keeps every
model and identifies parameters by `id()`, which Python reuses. A later run in the same process
would get 32 bits for an unrelated weight with the same id.
"""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from typing import Any

import torch
from pydantic import BaseModel, Field, ValidationError
from torch import Tensor, nn
from torch.optim import Optimizer

from finetune.config.optimizers import BLOCK, FP8_ADAMW, arguments, chosen, state_bytes
from finetune.config.train_keys import TrainerArguments, TrainSection
from finetune.errors import ConfigError
from finetune.precision.proof.movement import is_torchao

Parts = tuple[type[Any], dict[str, Tensor], list[Any]]


class TorchaoArguments(BaseModel):
    """Values that `train.optim_args` may have."""

    block_size: int = Field(default=BLOCK, ge=2)
    bf16_stochastic_round: bool = True  # of BF16 weights alone: torchao asks for their type


def bytes_of_states(model: nn.Module, train: TrainSection, without: Container[int] = ()) -> float:
    """Bytes of the states of a `train` section's optimizer for a model, also on meta.

    Args:
        without: ids of parameters that are left out.
    """
    facts = chosen(train)
    # bitsandbytes keeps 32 bits for the states of embeddings, as the Trainer asks it to.
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    return sum(
        state_bytes(facts, tuple(p.shape), p.element_size(), embedding=id(p) in embeddings)
        for p in model.parameters()
        if p.requires_grad and id(p) not in without
    )


def class_and_kwargs(train: TrainSection, args: Any) -> tuple[type[Optimizer], dict[str, Any]]:
    """Trainer's `optimizer_cls_and_kwargs` for a `train` section with a torchao optimizer.

    Raises:
        ConfigError: an invalid value in `train.optim_args`.
    """
    from torchao import optim

    classes = {
        "adamw_torch_8bit": optim.AdamW8bit,
        "adamw_torch_4bit": optim.AdamW4bit,
        FP8_ADAMW: optim.AdamWFp8,
    }
    try:
        own = TorchaoArguments.model_validate(arguments(train)).model_dump()
    except ValidationError:
        raise ConfigError(
            f"train.optim_args cannot be {train['optim_args']!r}",
            where="train.optim_args",
            fix="block_size is a number, bf16_stochastic_round is true or false",
        ) from None
    args = TrainerArguments(args)
    return classes[chosen(train).name], {
        "lr": args.learning_rate,
        "betas": (args.adam_beta1, args.adam_beta2),
        "eps": args.adam_epsilon,
    } | own


def steps_by_parts(optimizer: Optimizer) -> bool:
    """True for an optimizer of torchao's whose steps `adamw` finishes."""
    return type(optimizer).__module__ == "torchao.optim.adam"


def forget_overrides() -> None:
    """Clear bitsandbytes' per-weight overrides from earlier runs of this process."""
    from bitsandbytes.optim import GlobalOptimManager

    GlobalOptimManager.get_instance().initialize()


# ------------------------------------------------------------------------------- shards of a state
#
# A state is codes in the order of its numbers, one byte each (two in 4 bits), and a scale for each
# block of them. Parts of it that begin and end between blocks are therefore parts of both.


def joined(parts: list[Any], shape: Sequence[int]) -> Tensor | None:
    """A torchao state [N, ...] of the parts of all processes, split along N; None if one is plain.

    Args:
        parts: of each process in order, empty where it has none.
    """
    low = [one for one in parts if one.numel()]
    if not low or not all(map(is_torchao, low)):
        return None
    # As bytes, whatever type the codes have.
    codes = torch.cat([one.codes.flatten().view(torch.uint8) for one in low])
    codes, scale = codes.view(low[0].codes.dtype), torch.cat([one.scale for one in low])
    return _of_parts(_parts(low[0], codes=codes, scale=scale), shape)


def part(state: Any, start: int, shape: Sequence[int]) -> Tensor | None:
    """The part of a torchao state from a number on; None if it is empty or splits a block."""
    stop, block = start + math.prod(shape), state.block_size
    if start == stop or start % block or stop % block:
        return None
    each = state.numel() // state.codes.numel()  # numbers in a code
    codes = state.codes.flatten()[start // each : stop // each]
    scale = state.scale[start // block : stop // block]
    return _of_parts(_parts(state, codes=codes.clone(), scale=scale.clone()), shape)


def _parts(state: Any, **other: Tensor) -> Parts:
    """The class of a torchao state, its tensors or `other` by name, and what the class asks for."""
    names, facts = state.__tensor_flatten__()
    return type(state), {name: getattr(state, name) for name in names} | other, facts


def _of_parts(parts: Parts, shape: Sequence[int]) -> Tensor:
    """The reverse of `_parts`, in another shape."""
    kind, tensors, facts = parts
    if tensors["codes"].numel() == math.prod(shape):  # in 4 bits they are flat
        tensors = tensors | {"codes": tensors["codes"].view(*shape)}
    facts = [tuple(shape) if isinstance(fact, tuple) else fact for fact in facts]
    return kind.__tensor_unflatten__(tensors, facts)
