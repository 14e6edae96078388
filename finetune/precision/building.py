"""A model of random weights with stored layers, which never exists in high precision.

The model is built on the meta device: shapes, no memory. Then one decoder layer at a time gets
memory, its model's own initialisation, and codes in place of the weights that are to be stored. At
the peak there is what is held already and one decoder layer in high precision, so an 8B model is
made in the memory of its codes.

A decoder layer is the unit, not a linear layer: a model may initialise a weight a second time with
the block that holds it (GPT-2 scales `c_proj` so). Buffers without a file, such as rotary
frequencies, are what the model's initialisation makes of them. Whatever it forgets is found, since
memory is filled with NaN first.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers import initialization as init

from finetune.errors import PlanError
from finetune.precision.loading import mark_stored
from finetune.precision.quantiser import check_granularity
from finetune.precision.roles import resolve
from finetune.precision.storage import hold
from finetune.precision.tiles import Granularity

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def build_stored(
    config: PretrainedConfig,
    names: Collection[str],
    granularity: Granularity = "row",
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    auto_class: Any = AutoModelForCausalLM,
    **kwargs: Any,
) -> PreTrainedModel:
    """A model of random weights in which exactly the named linear layers are stored in FP8.

    Args:
        config: the architecture; is not changed.
        names: dotted names of linear layers of the plain model.
        granularity: what shares a scale.
        dtype: of everything else.
        device: where it is built.
        auto_class: of Transformers, whose `from_config` builds it.
        **kwargs: of `from_config`, such as `attn_implementation`.

    Returns:
        A frozen model in training mode, as `from_config` gives it.

    Raises:
        ConfigError: an unknown granularity.
        PlanError: a name that is no linear layer, or a model that leaves weights uninitialised.
    """
    granularity = check_granularity(granularity)
    with torch.device("meta"):
        model = auto_class.from_config(copy.deepcopy(config), dtype=dtype, **kwargs)
    shared = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    tied = {key for key, count in shared.items() if count > 1}
    filling = _Filling(set(resolve(model, names)), granularity, torch.device(device), tied)
    with torch.no_grad(), init.guard_torch_init_functions():
        filling.fill(model, "", model)
        filling.hold_due(model)
    model.tie_weights()
    _refuse_uninitialised(model)
    return mark_stored(model)


class _Filling:
    """One walk over a model on the meta device, children before parents, as Transformers does."""

    def __init__(
        self, names: set[str], granularity: Granularity, device: torch.device, tied: set[int]
    ) -> None:
        self.granularity: Granularity = granularity
        self.names, self.device, self.tied = names, device, tied
        self.due: list[str] = []
        # Memory of weights that are codes by now, for the next layer: freed, it would be cut up.
        self.spare: dict[tuple[torch.Size, torch.dtype], list[Tensor]] = {}
        self.made: dict[int, tuple[Tensor, Tensor]] = {}  # with the tensor whose id is the key

    def fill(self, module: nn.Module, name: str, owner: Any) -> None:
        """Memory and initial values for a module and all that is in it."""
        owner = module if isinstance(module, PreTrainedModel) else owner
        for child_name, child in module.named_children():
            full = f"{name}.{child_name}" if name else child_name
            self.fill(child, full, owner)
            if isinstance(module, nn.ModuleList):
                self.hold_due(child, f"{full}.")
        for key, parameter in module.named_parameters(recurse=False):
            new = self._real(parameter)
            if not isinstance(new, nn.Parameter):
                new = nn.Parameter(new, requires_grad=False)
            module.register_parameter(key, new)
        for key, buffer in module.named_buffers(recurse=False):
            setattr(module, key, self._real(buffer))
        owner._initialize_weights(module)
        if name in self.names:
            self.due.append(name)

    def hold_due(self, root: nn.Module, prefix: str = "") -> None:
        """Quantise what is complete: the named layers inside a decoder layer, or the rest."""
        for name in self.due:
            module: Any = root.get_submodule(name.removeprefix(prefix))
            used = module.weight.detach()
            hold(module, self.granularity)
            self.spare.setdefault((used.shape, used.dtype), []).append(used)
        self.due = []

    def _real(self, tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return tensor.to(self.device)
        if id(tensor) in self.made:  # tied: initialised by the module that had it first
            real = self.made[id(tensor)][1]
            real._is_hf_initialized = True  # pyright: ignore[reportAttributeAccessIssue]
            return real
        spare = self.spare.get((tensor.shape, tensor.dtype))
        real = spare.pop() if spare else torch.empty_like(tensor, device=self.device)
        real = real.detach()
        if real.is_floating_point():
            real.fill_(torch.nan)
        if isinstance(tensor, nn.Parameter):
            real = nn.Parameter(real, requires_grad=False)
        if id(tensor) in self.tied:
            self.made[id(tensor)] = (tensor, real)
        return real


def _refuse_uninitialised(model: nn.Module) -> None:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    left = [name for name, t in tensors if t.is_floating_point() and bool(t.isnan().any())]
    if left:
        raise PlanError(
            f"{type(model).__name__} does not initialise all of its tensors",
            where=", ".join(left[:5]),
            why="they would hold whatever was in memory: _init_weights has to set them",
            fix="build it with from_config, in full, and load_in_fp8 what was saved of it",
        )
