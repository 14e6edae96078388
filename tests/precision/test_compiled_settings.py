"""Every precision setting in compiled layers: whole graphs, and the gradients of eager mode.

On a GPU layers are compiled by default, and the proof watches a step before they are. Here each
setting's layers are compiled as far as AOTAutograd, on the path of FP8 hardware.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch._dynamo.utils import counters

from finetune.precision import constants, convert
from finetune.precision.planner import plan
from finetune.precision.settings import PrecisionConfig
from tests.conftest import batch
from tests.traced import traced

FULL = {
    "plain": {},
    "high-fprop": {"high_gemms": ["fprop"]},
    "high-dgrad": {"high_gemms": ["dgrad"]},
    "high-wgrad": {"high_gemms": ["wgrad"]},
    "high-two": {"high_gemms": ["dgrad", "wgrad"]},
    "other-scales": {"power_of_two_scales": True},
    "e4m3": {"format": "e4m3"},
    "attention-high": {"map": {"attn": "bf16"}},
    "mlp-fp32": {"map": {"mlp": "fp32"}},
    "norms-fp32": {"map": {"norm": "fp32"}},
}
FROZEN = {
    "plain": {},
    "inputs-high": {"SAVED_INPUT": "high"},
    "unfused": {"FUSED_ADAPTERS": False},
    "high-fprop": {"high_gemms": ["fprop"]},
    "high-dgrad": {"high_gemms": ["dgrad"]},
    "slow-sums": {"FAST_ACCUM": False},
    "base-16-bits": {"frozen": "bf16"},
    "mlp-fp32": {"map": {"mlp": "fp32"}},
}
ADAPTERS = {
    "all": {"target_modules": "all-linear"},
    "two": {"target_modules": ["q_proj", "v_proj"]},
    "dora": {"target_modules": "all-linear", "use_dora": True},
    "dropout": {"target_modules": "all-linear", "lora_dropout": 0.1},
    "bias": {"target_modules": "all-linear", "bias": "all"},
}
SCALINGS = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
Case = tuple[dict[str, Any], dict[str, Any] | None]
CASES: dict[str, Case] = {
    f"full-{scaling}-{name}": ({"scaling": scaling} | more, None)
    for scaling in SCALINGS
    for name, more in FULL.items()
}
CASES |= {
    f"lora-{scaling}-{name}-{kind}": ({"scaling": scaling, "frozen": "fp8"} | more, adapters)
    for scaling in ("tensorwise", "rowwise")
    for name, more in FROZEN.items()
    for kind, adapters in ADAPTERS.items()
    if kind == "all" or (name == "plain" and scaling == "tensorwise")
}


def gradients(model: Any) -> dict[str, Tensor]:
    for p in model.parameters():
        p.grad = None
    torch.manual_seed(3)  # dropout
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(**batch()).loss
    loss.backward()  # as trainers run it: without autocast
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # dynamo warns about parts of torch that it traces
@pytest.mark.parametrize("case", CASES)
def test_compiled_layers_have_the_gradients_of_eager_ones(make_llama, monkeypatch, case) -> None:
    """To the bit, also of a base multiplied under autocast, which a graph is not run under."""
    settings, adapters = CASES[case]
    model = make_llama()
    if adapters is not None:
        model = get_peft_model(model, LoraConfig(r=4, **adapters))
        for name, p in model.named_parameters():
            if "lora_B" in name:  # it begins at zero, and hides the gradient of A
                torch.nn.init.normal_(p, std=0.05)
    for name in {name for name in settings if name.isupper()}:
        monkeypatch.setattr(constants, name, settings[name])
    asked = {name: value for name, value in settings.items() if name.islower()}
    precision = PrecisionConfig.model_validate({"compute": "fp8", "backend": "torchao"} | asked)
    conversion = convert.apply(model.train(), plan(model, precision), hardware=True)
    eager = gradients(model)
    with traced():
        conversion.compile_layers()
        compiled = gradients(model)
        assert not counters["graph_break"]
        assert 0 < counters["frames"]["ok"] == counters["frames"]["total"] <= 2
    assert eager.keys() == compiled.keys()
    for name, gradient in eager.items():
        assert torch.equal(gradient, compiled[name]), name
