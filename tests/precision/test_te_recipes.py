"""Each recipe of Transformer Engine's own Python under our backend, as on an H100 and on a B200.

The proof watches, the emulation multiplies beside it. Over a double of the compiled library
(`tests.te.extension`), so: which codes and scales go into which product and when, not a GPU's bits.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

import finetune.training.helper.session
from finetune import get_receipt, setup_fp8_mixed_precision_training
from finetune.hardware.device import Device
from finetune.precision import constants, convert, planner
from finetune.precision.numbers.formats import snr_db
from finetune.precision.settings import PrecisionConfig
from tests.conftest import B200, H100, batch, slow_but
from tests.traced import traced

RECIPES = [
    *[(H100, scaling) for scaling in ("delayed", "tensorwise", "our-casts", "blockwise")],
    *[(B200, scaling) for scaling in ("delayed", "tensorwise", "our-casts", "mxfp8", "nvfp4")],
]
"""Where scales are powers of two, kernels of ours cast; here their reference does."""
SHARE = {"full": 0.8454, "lora": 0.7148, "recomputed": 0.8688, "reentrant": 0.8688}
"""Proven share of matmul FLOPs. Recomputation multiplies in FP8 once more, the head does not."""


def name(value: Device | str) -> str:
    return value.name.split()[1] if isinstance(value, Device) else value


def settings(scaling: str) -> dict[str, Any]:
    if scaling == "our-casts":
        return {"scaling": "tensorwise", "power_of_two_scales": True}
    return {"scaling": scaling} | ({"amax_history_len": 4} if scaling == "delayed" else {})


@pytest.fixture(autouse=True)
def _nearest(monkeypatch) -> None:
    """Stochastic rounding cannot be compared, and the double has none."""
    monkeypatch.setattr(constants, "STOCHASTIC_ROUNDING", False)


@pytest.fixture
def trained(real_te, monkeypatch, make_llama):
    """A function that trains three steps: gradients of the last one, and the scaling state."""

    def train(device: Device, scaling: str, kind: str) -> dict[str, torch.Tensor]:
        real_te.become(device.capability)
        monkeypatch.setattr(finetune.training.helper.session, "this_device", lambda: device)
        monkeypatch.setattr(finetune.training.helper.session, "starts_triton", lambda: True)
        accelerator = setup_fp8_mixed_precision_training("te", cpu=True, **settings(scaling))
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
        ours = get_receipt().precision["effective"]["casts"] == "finetune"
        assert ours == (scaling == "our-casts")
        assert get_receipt().fp8_flop_share == pytest.approx(SHARE[kind], abs=1e-4)
        assert real_te.depth == 0
        named = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        return named | convert.conversion_of(model).engine.state_tensors()

    return train


QUICK = [(H100, "delayed", "full"), (B200, "nvfp4", "full")]
LORA = [(*recipe, "lora") for recipe in RECIPES]
LONG, KEPT = pytest.mark.long, [RECIPES[0], *RECIPES[5:]]


@pytest.mark.parametrize(
    ("device", "scaling", "kind"),
    [*slow_but(QUICK, QUICK), *slow_but([], LORA[5:]), *slow_but([], LORA[:5], LONG)],
    ids=name,
)
def test_recipe_is_proven(trained, device, scaling, kind) -> None:
    """All weights under the others too, where recomputation is compared with it."""
    assert all(bool(x.isfinite().all()) for x in trained(device, scaling, kind).values())


@pytest.mark.slow
@pytest.mark.parametrize("kind", slow_but(["reentrant"], ["recomputed", "reentrant"], LONG))
@pytest.mark.parametrize(("device", "scaling"), slow_but(KEPT, RECIPES, LONG), ids=name)
def test_recomputation_changes_no_bit(trained, device, scaling, kind) -> None:
    """Neither gradients nor, under delayed scaling, any history or scale."""
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
        asked = {"compute": "fp8", "backend": backend, "emulation": "allow"}
        precision = PrecisionConfig.model_validate(asked | settings(scaling))
        conversion, out = convert.apply(model, planner.plan(model, precision)), []
        for step in range(4):
            generator = torch.Generator().manual_seed(step)
            x = torch.randn(160, 256, generator=generator).mul(3.0**step).bfloat16()
            g = torch.randn(160, 192, generator=generator).mul(0.3**step).bfloat16()
            model.zero_grad()
            with conversion.engine.region():
                y = model(x.requires_grad_())
            y.backward(g)
            out += [y.detach(), x.grad, *(p.grad for p in model.parameters())]
        return out

    pairs = zip(steps("te"), steps("emulated"), strict=True)
    assert all(snr_db(emulated, engine) > 49 for engine, emulated in pairs)


@pytest.mark.parametrize(("device", "scaling"), RECIPES, ids=name)
@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_has_the_bits_of_the_engines_own(real_te, device, scaling, bias) -> None:
    """Of `te.Linear` under TE's autocast: outputs, gradients and delayed states of four steps."""
    import transformer_engine.pytorch as te

    real_te.become(device.capability)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 192, bias=bias, dtype=torch.bfloat16))
    own = te.Linear(256, 192, bias=bias, params_dtype=torch.bfloat16)
    own.load_state_dict(model[0].state_dict(), strict=False)
    asked = {"compute": "fp8", "backend": "te"} | settings(scaling)
    precision = PrecisionConfig.model_validate(asked)
    conversion = convert.apply(model, planner.plan(model, precision))

    def step(layer: nn.Module, x: torch.Tensor, g: torch.Tensor) -> list[Any]:
        layer.zero_grad()
        x = x.clone().requires_grad_()
        y = layer(x)
        y.backward(g)
        return [y, x.grad, layer.weight.grad, layer.bias.grad if bias else y]

    for number in range(4):
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(160, 256, generator=generator).mul(3.0**number).bfloat16()
        g = torch.randn(160, 192, generator=generator).mul(0.3**number).bfloat16()
        mine = step(model[0], x, g)
        with te.autocast(enabled=True, recipe=conversion.engine.recipe):
            theirs = step(own, x, g)
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True)), number
    if scaling == "delayed":
        conversion.engine.begin_step()  # which the engine does when its autocast ends
        states = [(own.fp8_meta[d].scale, own.fp8_meta[d].amax_history) for d in own.quantizers]
        both = zip(model[0].fp8_states, [x for pair in states for x in pair], strict=True)
        assert all(torch.equal(a[..., :1], b[..., :1]) for a, b in both)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # dynamo warns about parts of torch that it traces
@pytest.mark.parametrize("kind", ["full", "lora", "recomputed"])
@pytest.mark.parametrize(("device", "scaling"), RECIPES, ids=name)
def test_a_compiled_layer_is_one_graph_with_the_same_bits(trained, device, scaling, kind) -> None:
    """Its first step is uncompiled; every number of all steps is that of three uncompiled ones."""
    eager = trained(device, scaling, kind)
    with traced() as graphs:
        compiled = trained(device, scaling, kind)
        assert re.fullmatch("graphs: [1-9]", graphs())
    assert eager.keys() == compiled.keys()
    assert all(torch.equal(x, compiled[name]) for name, x in eager.items())


def test_two_forwards_and_one_backward_move_a_gradients_history_once(real_te) -> None:
    """As in the emulation: states take in what was seen when the next forward begins."""
    model = nn.Sequential(nn.Linear(64, 64))
    precision = PrecisionConfig(compute="fp8", backend="te", scaling="delayed", amax_history_len=4)
    conversion = convert.apply(model, planner.plan(model, precision))
    outputs = [model(torch.randn(32, 64, requires_grad=True)) for _ in range(2)]
    sum(outputs).sum().backward()
    conversion.engine.begin_step()
    state = conversion.engine.state_tensors()
    assert int((state["0.scaling_bwd.amax_history"][:, 0] > 0).sum()) == 1
