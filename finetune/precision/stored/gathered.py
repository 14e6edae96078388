"""Linear layers that train and whose masters FSDP2 shards: it gathers their codes.

    before a call   the largest magnitudes of all weights in one all-reduce: scales are known
    each gather     own rows are cast from the master's                     1 byte a number
    forward, dgrad  products by codes, as in `trained`
    wgrad           FSDP2 reduces and scatters it in its type, as without codes

Before they are cast, masters are rounded to the type in which FSDP2 would gather them. So with one
scale for the tensor every operand has the codes that it has without `fp8_params`, and losses are
equal to the bit; with one for each row dgrad differs (`trained`).

What an optimizer, clipping and checkpoints see are FSDP2's ordinary shards. It looks for its
protocol of other tensors on the shard itself, "on a `torch.Tensor`, even without a subclass" (its
test of monkey patches), so two functions are set there, and no class of tensors is needed.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from finetune.errors import OrderError, PrecisionError
from finetune.precision.engines.observers import in_backward
from finetune.precision.model.layers import is_conv1d
from finetune.precision.model.plan import LayerPlan
from finetune.precision.model.swap import Swapped, weight_matrix
from finetune.precision.numbers.formats import E4M3, amax, scale_from_amax
from finetune.precision.numbers.scaling import scaled
from finetune.precision.numbers.weights import tile_of
from finetune.precision.settings import PrecisionConfig
from finetune.precision.stored.trained import CodedBackend, CodedMixin


class Shard:
    """A weight of which this process holds some rows.

    Attributes:
        module: its linear layer.
        count: number of its scales: one for each row [N], or 1.
        bits: codes, uint8 [N, K], whose memory is there while FSDP2 has it gathered.
        inverse: inverse scales, float32, [N, 1] or [1, 1].
        parameter: FSDP2's.
    """

    def __init__(self, shards: Shards, module: nn.Module, count: int) -> None:
        self.shards, self.module, self.count = shards, module, count
        self.bits: Any = None
        self.scale: Any = None
        self.inverse: Any = None
        self.parameter: Any = None
        self._turned = is_conv1d(type(module))  # [K, N]: what is sharded are columns
        self._local: Any = None
        self._there = slice(None)
        self._seen = -1

    # ------------------------------------------------------------------------------------- scales

    def attach(self) -> None:
        """Find the shard, and let FSDP2 find how it is gathered.

        Raises:
            PrecisionError: FSDP2 has left the layer out.
        """
        w: Any = self.module._parameters["weight"]
        if not isinstance(w, DTensor):
            if self._local is None:
                raise PrecisionError(
                    "FSDP2 leaves out a layer that fp8_params holds as codes",
                    where=f"a weight of {list(w.shape)}; ignored_modules of FSDP2",
                    why="its codes are made where FSDP2 gathers them",
                    fix="keep it in high precision: precision.keep=[pattern of its name]",
                )
            return  # gathered at the moment
        local: Any = w._local_tensor  # `to_local` of a parameter gives a view (torch 2.13)
        if local is self._local:
            return
        self.parameter, self._local = w, local
        mesh = w.device_mesh
        if self.count > 1 and not self._turned:
            first = mesh.get_local_rank(mesh.ndim - 1) * _share(w.shape[0], mesh.size(-1))
            self._there = slice(first, first + len(local))
        local.fsdp_pre_all_gather, local.fsdp_post_all_gather = self._before, self._after

    @property
    def own(self) -> Tensor:
        """Numbers of this process, [n, K]; [N, k] of a weight that is held as [K, N]."""
        return self._local.t() if self._turned else self._local

    def largest(self) -> Tensor:
        """Largest magnitudes of own numbers, float32 [count], 0 for rows that others hold."""
        found = torch.zeros(self.count, device=self._local.device)
        if self._local.numel():
            dim = 1 if self.count > 1 else None
            found[self._there] = amax(self.own, dim).reshape(-1)
        return found

    def take(self, scale: Tensor) -> None:
        """Scales of all rows, float32 [count, 1]."""
        self.scale, self.inverse = scale, scale.reciprocal()
        self._seen = self.parameter._version

    # ---------------------------------------------------------------------------- FSDP2's protocol

    def _before(
        self, mesh: Any, outer_size: torch.Size, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor], None]:
        """Codes of own rows, as many as every process has; FSDP2 counts the arguments."""
        if self.shards.is_over:
            raise OrderError(
                "this model was sharded under a set-up that has ended",
                where="precision.fp8_params under FSDP2",
                why="FSDP2 has made room for codes, and its layers would multiply by weights",
                fix="load its weights into a new model, from a checkpoint or its state_dict()",
            )
        if self.parameter._version != self._seen:  # a part of the model is called without the whole
            self.shards.refresh()
        codes = scaled(self.own.to(self.shards.dtype), self.scale[self._there]).to(E4M3.dtype)
        bits = codes.view(torch.uint8)
        bits = bits.t() if self._turned else bits
        missing = _share(outer_size[0], mesh.size()) - len(bits)
        return (nn.functional.pad(bits, (0, 0, 0, missing)).contiguous(),), None

    def _after(
        self, outputs: tuple[Tensor, ...], metadata: Any, dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        """Take the codes. FSDP2 wants a parameter of their shape, for its gradient.

        It gets one of the gathered type, of one number from its first use on (`GatheredMixin`).
        """
        bits = outputs[0][: self.parameter.shape[0]]
        self.bits = bits.t() if self._turned else bits
        if out is None:
            return torch.empty(self.parameter.shape, dtype=dtype, device=bits.device), ()
        return None


def _share(rows: int, processes: int) -> int:
    """Rows of each process, of which the last ones may hold fewer."""
    return -(-rows // processes)


class Shards:
    """All weights of a model that are gathered as codes.

    Attributes:
        dtype: type in which FSDP2 would gather them.
        pow2: True if scales are powers of two.
        is_over: True if their model is plain again.
        of_weight: the shard of each, by id of the parameter before FSDP2.
    """

    def __init__(self, dtype: torch.dtype, *, pow2: bool) -> None:
        self.dtype, self.pow2, self.is_over = dtype, pow2, False
        self.of_weight: dict[int, Shard] = {}

    def of(self, module: nn.Module, count: int) -> Shard:
        """The shard of a layer's weight, one also where layers share it."""
        key = id(module._parameters["weight"])
        return self.of_weight.setdefault(key, Shard(self, module, count))

    @torch.no_grad()
    def refresh(self) -> None:
        """Agree on the scales of all weights."""
        every = list(self.of_weight.values())
        for one in every:
            one.attach()
        largest = torch.cat([one.largest() for one in every])[:, None]
        if dist.is_initialized():  # one process alone may be no group
            dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        # Rounding keeps order: the largest number, rounded, is the largest of the rounded ones.
        largest = largest.to(self.dtype).float()
        scales = scale_from_amax(largest, E4M3, pow2=self.pow2)
        for one, scale in zip(every, scales.split([one.count for one in every]), strict=True):
            one.take(scale)


class GatheredMixin(CodedMixin):
    """Forward of a linear layer whose weight is gathered as codes."""

    fp8_master: Shard
    weight: nn.Parameter

    def fp8_lent(self) -> Tensor:
        w = self.weight
        if not torch.compiler.is_compiling() and any(w.stride()):  # a first call is not
            # One number for all: who reads it sees NaN, and its memory is free.
            w.data = w.new_full((1, 1), torch.nan).expand(w.shape)
        return weight_matrix(self)


class GatheringMixin(Swapped):
    """Mixin of the model: scales are those of the weights that its call begins with.

    Attributes:
        fp8_shards: its weights that are gathered as codes.
    """

    fp8_shards: Shards
    keeps_name = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self, GatheringMixin) and not in_backward():  # no recomputation
            self.fp8_shards.refresh()
        return super().__call__(*args, **kwargs)


class GatheredEngine(CodedBackend):
    """Backend of layers that train and are gathered as codes.

    Attributes:
        shards: all weights that are.
    """

    name = "gathered"
    mixin = GatheredMixin
    where = "gathered as codes"

    def __init__(
        self, precision: PrecisionConfig, dtype: torch.dtype, *, emulate: bool, triton: bool = True
    ) -> None:
        super().__init__(precision, emulate=emulate, triton=triton)
        self.shards = Shards(dtype, pow2=self.how.pow2)

    def attributes(self, module: nn.Module, layer: LayerPlan) -> dict[str, Any]:
        tile = tile_of("row" if self.how.per_row else "tensor", layer.shape)
        shard = self.shards.of(module, layer.shape[0] if self.how.per_row else 1)
        return {"fp8_how": self.how._replace(tile=tile), "fp8_master": shard}

    def release(self, model: nn.Module) -> None:
        from torch.distributed.fsdp import FSDPModule

        self.shards.is_over = True
        for module in model.modules():
            if isinstance(module, FSDPModule):  # plain layers would multiply by what has no memory
                module.reshard()
