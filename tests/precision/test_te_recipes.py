"""Each recipe of Transformer Engine's own Python under our backend, as on an H100 and on a B200.

The proof watches, the emulation multiplies beside it. Over a double of the compiled library
(`tests.te.extension`), so: which codes and scales go into which product and when, not a GPU's bits.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

import finetune.training.session
from finetune import get_receipt, setup_fp8_mixed_precision_training
from finetune.config.schema import PrecisionConfig
from finetune.hardware.device import Device
from finetune.precision import convert, planner
from finetune.precision.formats import snr_db
from tests.conftest import B200, H100, batch, slow_but

RECIPES = [
    *[(H100, scaling) for scaling in ("delayed", "tensorwise", "blockwise")],
    *[(B200, scaling) for scaling in ("delayed", "tensorwise", "mxfp8", "nvfp4")],
]
SHARE = {"full": 0.8454, "lora": 0.7148, "recomputed": 0.8688, "reentrant": 0.8688}
"""Proven share of matmul FLOPs. Recomputation multiplies in FP8 once more, the head does not."""


def name(value: Device | str) -> str:
    return value.name.split()[1] if isinstance(value, Device) else value


def settings(scaling: str) -> dict[str, Any]:
    """Stochastic rounding cannot be compared, and the double has none."""
    return {"delayed": {"amax_history_len": 4}, "nvfp4": {"stochastic_rounding": False}}.get(
        scaling, {}
    )


@pytest.fixture
def trained(real_te, monkeypatch, make_llama):
    """A function that trains three steps: gradients of the last one, and the scaling state."""

    def train(device: Device, scaling: str, kind: str) -> dict[str, torch.Tensor]:
        real_te.become(device.capability)
        monkeypatch.setattr(finetune.training.session, "this_device", lambda: device)
        accelerator = setup_fp8_mixed_precision_training(
            "te", scaling=scaling, cpu=True, **settings(scaling)
        )
        model = make_llama(hidden_size=128, intermediate_size=256)
        if kind == "lora":
            model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear"))
        elif kind != "full":
            model.activation_checkpointing_enable({"use_reentrant": kind == "reentrant"})
            model.enable_input_require_grads()
        parameters = [p for p in model.parameters() if p.requires_grad]
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(parameters, lr=0.01))
        for step in range(3):
            optimizer.zero_grad()
            accelerator.backward(model(**batch(seed=step)).loss)
            optimizer.step()
        assert get_receipt().status == "proven"
        assert get_receipt().fp8_flop_share == pytest.approx(SHARE[kind], abs=1e-4)
        assert real_te.depth == 0
        named = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        return named | convert.conversion_of(model).backend.state_tensors()

    return train


QUICK = [(H100, "delayed", "full"), (B200, "nvfp4", "full")]
LORA = [(*recipe, "lora") for recipe in RECIPES]


@pytest.mark.parametrize(("device", "scaling", "kind"), slow_but(QUICK, QUICK + LORA), ids=name)
def test_recipe_is_proven(trained, device, scaling, kind) -> None:
    """All weights under the others too, where recomputation is compared with it."""
    assert all(bool(x.isfinite().all()) for x in trained(device, scaling, kind).values())


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", slow_but(["reentrant"], ["recomputed", "reentrant"], pytest.mark.long)
)
@pytest.mark.parametrize(("device", "scaling"), RECIPES, ids=name)
def test_recomputation_changes_no_bit(trained, device, scaling, kind) -> None:
    """Neither gradients nor, under delayed scaling, any history or scale.

    Re-entrant recomputation makes every layer the first of its autocast, whose backward updates the
    scales of gradients: once a layer, where each update finds one layer with new amaxes.
    """
    plain, again = trained(device, scaling, "full"), trained(device, scaling, kind)
    assert plain.keys() == again.keys()
    assert all(torch.equal(x, again[name]) for name, x in plain.items())
    histories = [x for name, x in plain.items() if name.endswith("scaling_bwd.amax_history")]
    assert {int((h[:, 0] > 0).sum()) for h in histories} <= {3}


@pytest.mark.parametrize(("device", "scaling"), RECIPES, ids=name)
def test_a_layer_is_that_of_the_emulation(real_te, device, scaling) -> None:
    """Output and gradients to 49 dB, BF16's own rounding, while inputs grow from step to step."""
    real_te.become(device.capability)

    def steps(backend: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(256, 192, dtype=torch.bfloat16))
        asked = {"compute": "fp8", "backend": backend, "emulation": "allow", "scaling": scaling}
        precision = PrecisionConfig.model_validate(asked | settings(scaling))
        conversion, out = convert.apply(model, planner.plan(model, precision)), []
        for step in range(4):
            generator = torch.Generator().manual_seed(step)
            x = torch.randn(160, 256, generator=generator).mul(3.0**step).bfloat16()
            g = torch.randn(160, 192, generator=generator).mul(0.3**step).bfloat16()
            model.zero_grad()
            with conversion.backend.region():
                y = model(x.requires_grad_())
            y.backward(g)
            out += [y.detach(), x.grad, *(p.grad for p in model.parameters())]
        return out

    pairs = zip(steps("te"), steps("emulated"), strict=True)
    assert all(snr_db(emulated, engine) > 49 for engine, emulated in pairs)


def test_two_forwards_and_one_backward_move_a_gradients_history_twice(real_te) -> None:
    """As scaling.md says; the emulation's moves once."""
    model = nn.Sequential(nn.Linear(64, 64))
    precision = PrecisionConfig(compute="fp8", backend="te", scaling="delayed", amax_history_len=4)
    conversion = convert.apply(model, planner.plan(model, precision))
    outputs = []
    for _ in range(2):
        with conversion.backend.region():
            outputs.append(model(torch.randn(32, 64, requires_grad=True)))
    sum(outputs).sum().backward()
    state = conversion.backend.state_tensors()
    assert int((state["0.scaling_bwd.amax_history"][:, 0] > 0).sum()) == 2
