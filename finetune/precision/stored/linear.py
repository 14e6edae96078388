"""Layers whose weight is stored in FP8: one byte per number, plus inverse scales.

A weight that does not train needs no master copy. E4M3 codes take half the memory of BF16, and are
dequantized before a 16-bit matmul (this module) or multiplied directly
(`finetune.precision.stored.frozen`). Granularities are in `finetune.precision.numbers.weights`;
`weight ≈ codes · weight_scale`, the name in published files (elsewhere here an *inverse*).

The codes are **uint8**, not `torch.float8_e4m3fn`: FSDP2's mixed precision, PEFT's casts of
adapters to the type of their base, `model.to(dtype)` and collectives leave integers alone, and an
integer cannot require a gradient. State dicts and files show the real type.

As with FP8 compute, a module keeps its identity and changes class, but here the high-precision
weight is dropped for good. Plan and receipt report storage from the module itself (`stored_as`),
not from the requested precision.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from finetune.errors import PlanError, did_you_mean, some
from finetune.precision.model.layers import (
    are_served_experts,
    is_conv1d,
    linear_records,
    matched,
    records,
    why_own_forward,
    without_adapters,
)
from finetune.precision.model.swap import Swapped, swap, unswap, weight_matrix
from finetune.precision.model.towers import modules_beside
from finetune.precision.model.tree import Tree
from finetune.precision.numbers.formats import E4M3
from finetune.precision.numbers.gemm import as_output, as_rows
from finetune.precision.numbers.weights import (
    GRANULARITIES,
    FrozenLinear,
    Granularity,
    Tile,
    dequantize_weight,
    dequantizing,
    quantize_weight,
    tile_of,
)
from finetune.precision.stored.codes import Fp8Bits, moving


def scale_of(name: str) -> str:
    """Name of the buffer with the inverse scales of a parameter of codes."""
    return f"{name}_scale"


class CodesMixin(Swapped):
    """Mixin of a module some of whose parameters are FP8 codes, each beside a buffer of scales.

    Attributes:
        stored_raw: True if state dicts hold bytes and no scales (see `before_sharding`).
    """

    stored_raw: bool = False
    in_copies = True

    def code_names(self) -> list[str]:
        """Names of the parameters that are codes."""
        raise AssertionError("each of these mixins knows its parameters")

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        scales = {scale_of(name): self.get_buffer(scale_of(name)) for name in self.code_names()}
        with moving(self._parameters[name] for name in self.code_names()):
            result = super()._apply(fn, recurse)
        for name, before in scales.items():
            after = getattr(self, name)
            if after.dtype is not torch.float32:  # model.to(dtype) is not about scales
                # The float32 scale from before, as one that went through BF16 has lost its digits.
                setattr(self, name, before.to(after.device))
        return result

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in () if self.stored_raw else self.code_names():
            destination[prefix + name] = destination[prefix + name].detach().view(E4M3.dtype)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        for name in self.code_names():
            given = state_dict.get(prefix + name)
            if given is not None and given.dtype is E4M3.dtype:
                state_dict[prefix + name] = given.view(torch.uint8)
            elif given is not None and given.dtype is not torch.uint8:
                # `rest` is local_metadata, strict, missing_keys, unexpected_keys, error_msgs.
                errors = rest[-1]
                errors.append(f"{prefix}{name} holds FP8 codes, and {given.dtype} was given")
                return
            alone = (given is None) is (prefix + scale_of(name) in state_dict)
            if alone and not self.stored_raw:  # also where `strict=False` lets names be missing
                message = f"{prefix}{name}: FP8 codes and {scale_of(name)} are loaded together"
                rest[-1].append(message)
                return
        super()._load_from_state_dict(state_dict, prefix, *rest)


class StoredMixin(CodesMixin):
    """Mixin before a linear layer's own class: the weight is FP8 codes, dequantized for use.

    Attributes:
        weight: uint8, in the layout of the layer's own class.
        weight_scale: float32 buffer, one for each tile of the weight taken as [N, K].
        stored_tile: tile of the weight that shares a scale.
        compute_dtype: type of the model; PEFT gives it to new adapters.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    weight_scale: Tensor
    stored_tile: Tile
    compute_dtype: torch.dtype

    def code_names(self) -> list[str]:
        return ["weight"]

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        result = super()._apply(fn, recurse)
        # What `fn` makes of a tensor of the model's type: `half()` changes it, `cuda()` does not.
        self.compute_dtype = fn(self.weight_scale.new_empty(0, dtype=self.compute_dtype)).dtype
        return result

    @property
    def bits(self) -> Tensor:
        """The codes as [N, K], uint8."""
        return weight_matrix(self)

    @property
    def W_q(self) -> Tensor:  # noqa: N802
        """The codes under HQQ's name, by which PEFT (DoRA) finds layers with `dequantize()`."""
        return self.bits

    @property
    def granularities(self) -> set[Granularity]:
        """Granularities at which the codes can be used without a new cast.

        One scale per tensor equals one per row, all the same; no other pair is compatible.
        """
        tile, (n, k) = self.stored_tile, self.bits.shape
        return {
            kind
            for kind in GRANULARITIES
            if tile == tile_of(kind, (n, k)) or (kind == "row" and tile == (n, k))
        }

    def dequantize(self) -> Tensor:
        """The weight in the layout of the layer's class, in the dtype of the model."""
        w = self.weight_in()
        return w.t() if self.transposed_weight else w

    def weight_in(self, dtype: torch.dtype | None = None) -> Tensor:
        """The weight [N, K] in `dtype`, by default the model's."""
        return dequantize_weight(
            self.bits, self.weight_scale, self.stored_tile, dtype or self.compute_dtype
        )

    def put_bits(self, bits: Tensor, inverse: Tensor) -> None:
        """Replace the codes [N, K] and their scales by another weight's."""
        self.weight = Fp8Bits(bits.t().contiguous() if self.transposed_weight else bits)
        self.weight_scale = inverse

    def forward(self, input: Tensor) -> Tensor:
        bits, inverse, how = self.bits, self.weight_scale, dequantizing(self.stored_tile)
        # No cast of x: both GEMMs are in high precision here.
        y = FrozenLinear.apply(as_rows(input), None, None, bits, inverse, how)
        return as_output(y, input, self.bias)

    def extra_repr(self) -> str:
        rows, columns = self.stored_tile
        plain = super().extra_repr()
        return f"{plain}, stored in {E4M3.name}, scale of {rows}x{columns}"


def put(module: nn.Module, bits: Tensor, inverse: Tensor, tile: Tile, dtype: torch.dtype) -> None:
    """Turn a linear layer, also on the meta device, into a stored one; its own weight is dropped.

    The new weight is `bits`, uint8 [N, K], with a float32 `inverse` scale for each tile; `dtype` is
    the type of the model.
    """
    bits = bits.t() if is_conv1d(type(module)) else bits  # [K, N] in memory
    module.weight = Fp8Bits(bits.contiguous())
    module.register_buffer("weight_scale", inverse)
    swap(module, StoredMixin, stored_tile=tile, compute_dtype=dtype)


@torch.no_grad()
def store(module: nn.Module, granularity: Granularity = "row") -> None:
    """Store the weight of a linear layer in FP8, in place, from any current storage.

    The high-precision weight is dropped. Codes of another granularity are cast again through the
    float32 weight of this one layer. The layer may be on the meta device.
    """
    weight: Any = module.weight
    if not isinstance(module, StoredMixin):
        w = weight.t() if is_conv1d(type(module)) else weight
        tile = tile_of(granularity, tuple(w.shape))
        put(module, *quantize_weight(w, tile), tile, weight.dtype)
        return
    if granularity not in module.granularities:
        requantize(module, granularity)


@torch.no_grad()
def requantize(module: StoredMixin, granularity: Granularity) -> None:
    """Change the granularity of a stored layer, through its weight in float32.

    Nothing is cast where it is unchanged, and where one scale becomes one per row. Else a
    second E4M3 rounding error is added, nearly independent of the first, so together they are about
    √2 of one (measured within 1 %, `docs/notes/05-memory.md`):

        ‖W - row(block(W))‖ ≈ (‖W - block(W)‖² + ‖W - row(W)‖²)^½
    """
    (n, k), old = module.bits.shape, module.stored_tile
    tile = tile_of(granularity, (n, k))
    if old == (n, k) and tile == (1, k):
        module.weight_scale = module.weight_scale.repeat(n, 1)  # [1, 1] -> [N, 1]
    elif old != tile:
        module.put_bits(*quantize_weight(module.weight_in(torch.float32), tile))
    module.stored_tile = tile


@torch.no_grad()
def release(module: StoredMixin, dtype: torch.dtype | None = None) -> None:
    """Turn a stored layer into a plain one with the dequantized weight, by default in its type."""
    dtype = dtype or module.compute_dtype
    w = module.weight_in(dtype)  # before the class goes that reads codes
    w = w.t().contiguous() if module.transposed_weight else w
    plain: Any = module
    # Below the storage, which `plain_class` includes, as copies keep it.
    unswap(module, to=module.plain_class.swapped_from)
    del plain.weight_scale
    plain.weight = torch.nn.Parameter(w, requires_grad=False)


def before_sharding(model: nn.Module) -> None:
    """Prepare stored weights for FSDP2 and accelerate: state dicts of bytes, scales apart.

    Accelerate moves weights by a state dict in which everything is sharded. Scales are small and
    stay whole: as parameters, FSDP2's mixed precision would round them to BF16.
    """
    for module, scales in iter_scales(model):
        module.__dict__["stored_raw"] = True
        for name, scale in scales.items():
            # On meta: another process has the weights. State dicts leave it out from now on.
            there = torch.empty_like(scale, device="cpu") if scale.is_meta else scale
            module.register_buffer(name, there, persistent=False)


def share_scales(model: nn.Module) -> None:
    """Broadcast the scales of the first process, from which the codes came as well."""
    for _, scales in iter_scales(model):
        for scale in scales.values():
            dist.broadcast(scale, src=0)


def iter_scales(model: nn.Module) -> Iterator[tuple[nn.Module, dict[str, Tensor]]]:
    """Each module that has parameters of FP8 codes, and its buffers of scales by name."""
    for module in model.modules():
        if isinstance(module, CodesMixin) and (names := module.code_names()):
            yield module, {scale_of(name): module.get_buffer(scale_of(name)) for name in names}


def iter_stored(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Name and module of each layer that stores its weight as FP8 codes."""
    for name, module in model.named_modules():
        if isinstance(module, StoredMixin):
            yield name, module


def stored_as(module: nn.Module) -> str:
    """Storage of a weight: `nf4` or `fp4` (bitsandbytes), `fp8` (ours), or empty if plain."""
    if isinstance(module, StoredMixin):
        return "fp8"
    weight = module._parameters.get("weight")
    # By class name, as Transformers and PEFT do: bitsandbytes need not be installed.
    return weight.quant_type if type(weight).__name__ == "Params4bit" else ""  # pyright: ignore


def stored_weights(model: nn.Module | Tree) -> dict[str, int]:
    """Number of linear layers by storage format, plain ones left out."""
    return dict(Counter(kind for r in linear_records(model) if (kind := stored_as(r.owner))))


# -------------------------------------------------------------------------- layers to be stored


def storable(model: nn.Module, keep: Iterable[str] = ()) -> list[str]:
    """Names of the linear layers that are stored in FP8 by default, but those that `keep` matches.

    Towers for images and their projectors are not (`finetune.precision.model.towers`).

    Raises:
        PlanError: a pattern that matches no linear layer, or no layer is left.
    """
    beside = modules_beside(without_adapters(model))
    names = [
        record.name
        for record in linear_records(model)
        if record.role == "base" and not why_own_forward(record.owner) and not record.past
        if id(record.owner) not in beside
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
    every = [record.name for record in linear_records(model)]
    kept = matched(keep, every, where="keep", fate="be stored in FP8")
    names = list(names)
    left = [name for name in names if name not in kept]
    if names and not left:
        raise PlanError(
            "there is no linear layer left to store in FP8",
            where="keep",
            why=f"its patterns keep all {len(names)}",
            fix="keep fewer layers",
        )
    return left


def resolve(model: Any, names: Iterable[str]) -> list[str]:
    """Names of linear layers and experts in this model, given with or without a head's prefix.

    Raises:
        PlanError: a name that is no linear layer and no stack of experts of the model.
    """
    prefix = f"{model.base_model_prefix}."
    known = {
        record.name
        for record in records(model)
        if record.kind == "linear" or are_served_experts(record.owner)
    }
    found = []
    for name in names:
        candidates = (name, name.removeprefix(prefix), prefix + name)
        match = next((c for c in candidates if c in known), None)
        if match is None:
            raise PlanError(
                f"{name!r} is no linear layer of this model{did_you_mean(name, known)}",
                where=type(model).__name__,
                why="it was named to be stored in FP8",
                fix=f"its linear layers: {some(sorted(known))}",
            )
        found.append(match)
    return found
