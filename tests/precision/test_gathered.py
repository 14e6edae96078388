"""FSDP2 gathers codes of weights that train: one process, as a group of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers.pytorch_utils import Conv1D

from finetune.errors import OrderError, PrecisionError
from finetune.precision import convert
from finetune.precision.planner import plan
from finetune.precision.settings import PrecisionConfig

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def group(tmp_path) -> Iterator[None]:
    """A group of one process."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def stack() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 48), nn.GELU(), Conv1D(16, 48), nn.LayerNorm(16))


def sharded(*, codes: bool, scaling: str = "tensorwise", **more: Any) -> Any:
    model = stack().train()
    asked = {"scaling": scaling, "fp8_params": codes, "emulation": "exact", "backend": "emulated"}
    precision = PrecisionConfig(compute="fp8", **asked)  # pyright: ignore
    convert.apply(model, plan(model, precision), gathered=BF16)
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)
    return fully_shard(model, mesh=init_device_mesh("cpu", (1,)), mp_policy=policy, **more)


def steps(model: Any, count: int = 3) -> tuple[list[float], list[Tensor]]:
    """Losses and weights of some steps, of changing tokens."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.01), []
    draw = torch.Generator().manual_seed(1)
    for _ in range(count):
        loss = model(torch.randn(24, 32, generator=draw)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [p.full_tensor().detach() for p in model.parameters()]


def test_codes_that_are_gathered_train_as_weights_that_are() -> None:
    """To the bit: every operand has the same codes. A `Conv1D` holds its weight turned."""
    (plain, weights), (codes, others) = (steps(sharded(codes=codes)) for codes in (False, True))
    assert codes == plain
    assert len(set(plain)) == 3
    assert all(torch.equal(a, b) for a, b in zip(weights, others, strict=True))


def test_what_is_sharded_stays_a_plain_float32_parameter() -> None:
    model = sharded(codes=True, scaling="rowwise")
    steps(model, 1)
    for parameter in model.state_dict().values():
        assert isinstance(parameter, DTensor)
        assert type(parameter.to_local()) is Tensor
        assert parameter.dtype is torch.float32


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
def test_a_gathered_weight_takes_a_byte_a_number(scaling) -> None:
    """Its parameter, which gets a gradient of 16 bits, is one number, NaN for who reads it."""
    model = sharded(codes=True, scaling=scaling, reshard_after_forward=False)
    model(torch.randn(8, 32))
    for layer, shape in ((model[0], (48, 32)), (model[2], (16, 48))):
        assert layer.weight.dtype is BF16
        assert layer.weight.untyped_storage().nbytes() == BF16.itemsize
        assert layer.weight.isnan().all()
        assert layer.fp8_master.bits.shape == shape
        assert layer.fp8_master.bits.dtype is torch.uint8
        assert layer.fp8_master.inverse.shape == ((shape[0], 1) if scaling == "rowwise" else (1, 1))


def test_a_layer_changed_between_calls_of_the_whole_is_cast_again() -> None:
    """A part of a model may be called alone; FSDP2 knows its root by then."""
    model = sharded(codes=True)
    model(torch.randn(8, 32))
    before = model[0].fp8_master.inverse.clone()
    model.reshard()
    with torch.no_grad():
        model[0].weight.mul_(4)
    model.unshard()
    assert torch.equal(model[0].fp8_master.inverse, 4 * before)


def test_a_model_that_was_gathered_as_codes_says_so_when_it_is_plain() -> None:
    model = sharded(codes=True)
    steps(model, 1)
    convert.revert(model)
    with pytest.raises(OrderError, match="a set-up that has ended"):
        model(torch.randn(8, 32))
    assert model.state_dict().keys() == stack().state_dict().keys()


def test_a_layer_that_is_not_sharded_is_refused() -> None:
    model = stack().train()
    precision = PrecisionConfig(compute="fp8", fp8_params=True, emulation="allow")
    convert.apply(model, plan(model, precision), gathered=BF16)
    ignored = set(model[0].parameters())
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)), ignored_params=ignored)
    with pytest.raises(PrecisionError, match=r"FSDP2 leaves out a layer[^~]*\[48, 32\]"):
        model(torch.randn(8, 32))
