"""Low-bit optimizers, whose state is stored in few bits: its size, building and stepping them.

torchao compiles its update with `torch.compile`. On a GPU that makes it fast; on a CPU it needs a
C++ compiler and 20 to 40 seconds for nothing, so the update runs uncompiled there, with the same
arithmetic. Where it is compiled, it is so once, and for rows of one block (`compiled_once`).
torchao's classes go to the trainer as `optimizer_cls_and_kwargs`, since Transformers
has no name for the FP8 one and passes `block_size` as text.

They compute an update in float32, and round BF16 weights by chance unless that is switched off: up
with the probability that makes the mean right, so that updates below a weight's last bit survive on
average (Gupta et al. 2015, arXiv 1502.02551).

    weight 0.02, BF16 spacing 1.2e-4: an update of 1e-5 moves it by 1.2e-4 in one step of twelve

The Trainer requests 32-bit embeddings from bitsandbytes in a process-wide register that keeps every
model and identifies parameters by `id()`, which Python reuses. A later run in the same process
would get 32 bits for an unrelated weight with the same id.
"""

from __future__ import annotations

import contextlib
import functools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from pydantic import BaseModel, Field, ValidationError
from torch import Tensor, nn
from torch.optim import Optimizer

from finetune.config.optimizers import BLOCK, FP8_ADAMW, arguments, chosen, state_bytes
from finetune.errors import ConfigError
from finetune.precision.proof.movement import is_torchao
from finetune.training.replacing import replaced

Parts = tuple[type[Any], dict[str, Tensor], list[Any]]


class TorchaoArguments(BaseModel):
    """Values that `train.optim_args` may have."""

    block_size: int = Field(default=BLOCK, ge=2)
    bf16_stochastic_round: bool = True  # of BF16 weights alone: torchao asks for their type


def bytes_of_states(model: nn.Module, train: dict[str, Any]) -> float:
    """Bytes of the states of a `train` section's optimizer for a model, also on meta."""
    facts = chosen(train)
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    return sum(
        state_bytes(facts, tuple(p.shape), p.element_size(), embedding=id(p) in embeddings)
        for p in model.parameters()
        if p.requires_grad
    )


def class_and_kwargs(train: dict[str, Any], args: Any) -> tuple[type[Optimizer], dict[str, Any]]:
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
    return classes[chosen(train).name], {
        "lr": args.learning_rate,
        "betas": (args.adam_beta1, args.adam_beta2),
        "eps": args.adam_epsilon,
    } | own


def forget_overrides() -> None:
    """Clear bitsandbytes' per-weight overrides from earlier runs of this process."""
    from bitsandbytes.optim import GlobalOptimManager

    GlobalOptimManager.get_instance().initialize()


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """Updates of torchao's optimizers without `torch.compile`."""
    with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
        # torch 2.12 says so of a whole graph even where nothing was to be compiled.
        warnings.filterwarnings("ignore", ".*found no compiled frames")
        yield


@contextlib.contextmanager
def draws_of_step(optimizer: Optimizer) -> Iterator[None]:
    """Rounding by chance with draws that depend on the number of the optimizer's step alone.

    torchao draws from torch's generator. Replicas of data parallelism need not share its state
    (their weights would drift apart), nor has a resumed script what it was. Dropout and samples
    draw afterwards as if nothing had been drawn here.
    """
    counted = (int(state["step"]) for state in optimizer.state.values() if "step" in state)
    device = optimizer.param_groups[0]["params"][0].device
    on_cpu = device.type == "cpu"
    kind = {} if on_cpu else {"device_type": device.type}
    with torch.random.fork_rng([] if on_cpu else [device], **kind):
        torch.manual_seed(max(counted, default=0))
        yield


def around_steps(optimizer: Optimizer, *, compiled: bool) -> Callable[[], None]:
    """Step a torchao optimizer with `draws_of_step`; returns a function to end it.

    These hooks run inside of the global ones: an error of the proof leaves nothing behind.

    Args:
        compiled: False to run its update without `torch.compile`.
    """
    update = contextlib.ExitStack()
    kept = compiled_once(torch.compile)

    def before(*_: Any) -> None:
        update.enter_context(replaced(torch, "compile", kept) if compiled else uncompiled())
        update.enter_context(draws_of_step(optimizer))

    def after(*_: Any) -> None:
        update.close()

    hooks = (optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after))

    def undo() -> None:
        for hook in hooks:
            hook.remove()
        after()

    return undo


def compiled_once(compiler: Callable[..., Any]) -> Callable[..., Any]:
    """A `torch.compile` for the time of torchao's step, which asks for its update at each tensor.

    Asking takes the host four times as long as the rest, so it is done once. And low-bit states are
    updated in rows of one block: in the shape of a weight [N, K] Inductor separates the maxima of
    blocks from the rest, with two float32 copies of the weight and three more kernels; of rows it
    makes one kernel. Each number is computed, and rounded by chance, as in torchao's own step.

    Tensors without blocks, shards (DTensor), AMSGrad and strided weights keep their shape.
    """
    from torchao.optim.adam import single_param_adam

    def in_rows(p: Tensor, grad: Tensor, step: Tensor, first: Any, second: Any, *rest: Any) -> None:
        rows = first[1]["scale"].numel()
        shape = (rows, p.numel() // rows)
        p, grad = p.view(shape), grad.reshape(shape)
        single_param_adam(p, grad, step, _of_parts(first, shape), _of_parts(second, shape), *rest)

    @functools.cache
    def kept(**how: Any) -> Callable[..., None]:
        whole, rows = compiler(single_param_adam, **how), compiler(in_rows, **how)

        def update(
            p: Tensor, grad: Tensor, step: Tensor, first: Any, second: Any, largest: Any, *rest: Any
        ) -> None:
            if is_torchao(first) and largest is None and p.is_contiguous():
                rows(p, grad, step, _parts(first), _parts(second), largest, *rest)
            else:
                whole(p, grad, step, first, second, largest, *rest)

        return update

    def compile_(model: Any = None, **how: Any) -> Any:
        return kept(**how) if model is single_param_adam else compiler(model, **how)

    return compile_


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
