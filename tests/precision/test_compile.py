"""`torch.compile` of decoder layers: whole layers, no graph breaks, the same training."""

from __future__ import annotations

import contextlib

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch._dynamo.utils import counters

from finetune import get_receipt, setup_fp8_mixed_precision_training
from finetune.errors import PrecisionError
from tests.conftest import batch


def losses(make_llama, setup_backend, compile: str) -> list[float]:
    torch.manual_seed(1)
    model = get_peft_model(make_llama(), LoraConfig(r=8, target_modules="all-linear")).train()
    accelerator = setup_backend("torchao", scaling="tensorwise", compile=compile)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    found = []
    for seed in range(3):
        loss = model(**batch(seed=seed)).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # inductor warns about its own environment
def test_compiled_layers_train_alike(make_llama, setup_backend) -> None:
    eager = losses(make_llama, setup_backend, "off")
    assert get_receipt().precision["compile"] == "off, as configured"
    torch._dynamo.reset()
    counters.clear()
    compiled = losses(make_llama, setup_backend, "on")
    receipt = get_receipt()
    assert compiled == pytest.approx(eager, rel=2e-3)
    assert receipt.status == "proven"
    assert receipt.precision["compile"] == "on: 2 decoder layers, after the witnessed step"
    assert not counters["graph_break"]
    assert counters["frames"]["ok"] == counters["frames"]["total"] > 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_health_sees_compiled_layers_in_turns(make_llama, setup_backend) -> None:
    """A part of the layers runs uncompiled while it is looked into; nothing is compiled anew."""
    from finetune.precision.convert import conversion_of
    from finetune.training.health.operands import OperandWatch

    accelerator = setup_backend("torchao", scaling="tensorwise", compile="on")
    model = make_llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    watch = OperandWatch(model, conversion_of(model))
    seen, frames = [], []
    for seed in range(6):
        looks = seed in (3, 4)
        with watch.watching() if looks else contextlib.nullcontext():
            accelerator.backward(model(**batch(seed=seed)).loss)
        optimizer.step()
        optimizer.zero_grad()
        frames.append(counters["frames"]["ok"])
        if looks:
            seen.append(watch.sums[("mlp", "x")].worst[1].split(".")[2])
    assert seen == ["0", "1"]
    assert watch.sums[("mlp", "g")].layers == 3, "of one of the two layers"
    assert frames[-1] == frames[2]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


class Net(nn.Module):
    """As small as what is compiled may be: one decoder layer."""

    _no_split_modules = ["Block"]

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # dynamo warns about parts of torch that it traces
@pytest.mark.parametrize(
    "scaling",
    ["rowwise", "blockwise", "nvfp4"],
)
def test_emulated_rules_compile(setup_backend, monkeypatch, scaling) -> None:
    """Traced by dynamo and AOTAutograd and run without a code generator: the same bits.

    In whole layers, but for NVFP4, whose generator of random numbers is no value of a graph: its
    matmuls run in eager mode between the pieces of a layer.
    """
    compile = torch.nn.Module.compile
    monkeypatch.setattr(
        torch.nn.Module,
        "compile",
        lambda self, *a, **k: compile(self, *a, **k, backend="aot_eager"),
    )

    def run(mode: str) -> list[float]:
        torch.manual_seed(0)
        accelerator = setup_backend("emulated", scaling=scaling, compile=mode)
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = accelerator.prepare(model, optimizer)
        found = []
        for seed in range(3):
            optimizer.zero_grad()
            x = torch.randn(32, 64, generator=torch.Generator().manual_seed(seed))
            loss = model(x).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            found.append(loss.item())
        return found

    torch._dynamo.reset()
    counters.clear()
    assert run("on") == run("off")
    assert counters["stats"]["unique_graphs"] > 0
    assert bool(counters["graph_break"]) == (scaling == "nvfp4")


@pytest.mark.parametrize("backend", ["auto", "te", "emulated"])
def test_delayed_scaling_is_not_compiled(te_stand_in, backend) -> None:
    with pytest.raises(PrecisionError) as caught:
        setup_fp8_mixed_precision_training(
            backend, scaling="delayed", compile="on", emulation="allow", cpu=True
        )
    assert "use compile=off, or scaling=tensorwise" in caught.value.why
