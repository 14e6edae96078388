"""`torch.compile` of decoder layers: whole layers, no graph breaks, the same training."""

from __future__ import annotations

import contextlib

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch._dynamo.utils import counters

from finetune import get_receipt
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


@pytest.mark.filterwarnings("ignore")  # inductor warns about its own environment
def test_compiled_layers_train_alike(make_llama, setup_backend) -> None:
    eager = losses(make_llama, setup_backend, "off")
    assert get_receipt().precision["compile"] == "off: asked"
    torch._dynamo.reset()
    counters.clear()
    compiled = losses(make_llama, setup_backend, "on")
    receipt = get_receipt()
    assert compiled == pytest.approx(eager, rel=2e-3)
    assert receipt.status == "proven"
    assert receipt.precision["compile"] == "on: 2 decoder layers, after the witnessed step"
    assert not counters["graph_break"]
    assert counters["frames"]["ok"] == counters["frames"]["total"] > 0


@pytest.mark.filterwarnings("ignore")
def test_health_sees_compiled_layers_in_turns(make_llama, setup_backend) -> None:
    """A part of the layers runs uncompiled while it is looked into; nothing is compiled anew."""
    from finetune.health import OperandWatch
    from finetune.precision.convert import conversion_of

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
            seen.append(watch.tallies[("mlp", "x")].worst[1].split(".")[2])
    assert seen == ["0", "1"]
    assert watch.tallies[("mlp", "g")].layers == 3, "of one of the two layers"
    assert frames[-1] == frames[2]
