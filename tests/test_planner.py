"""The plan: which layers, in what precision, and why."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from finetune import load_recipe
from finetune.config import PrecisionConfig
from finetune.errors import PlanError
from finetune.model import sketch
from finetune.precision.choices import matches
from finetune.precision.planner import plan
from finetune.recipe import list_recipes

FP8 = PrecisionConfig(compute="fp8", backend="emulated", emulation="allow")


def keep(*patterns: str) -> PrecisionConfig:
    return FP8.model_copy(update={"keep": patterns})


@pytest.mark.parametrize("name", [n for n in list_recipes() if n.endswith("_fp8")])
def test_every_recipe_can_be_planned_without_weights(name) -> None:
    config = load_recipe(name, check_train=False).config
    the_plan = plan(sketch(config), config.precision)
    base = [layer for layer in the_plan.layers if layer.role == "base"]
    assert base
    assert all(layer.compute == "fp8" for layer in base), "every base layer is aligned"
    assert all(layer.frozen == (config.method == "lora") for layer in base)
    assert [layer.compute for layer in the_plan.layers if layer.role == "head"] == ["bf16"]
    adapters = [layer for layer in the_plan.layers if layer.role == "adapter"]
    assert bool(adapters) == (config.method == "lora")
    assert all(layer.compute == "bf16" for layer in adapters)
    assert all(layer.reason for layer in the_plan.layers)


def test_keep_patterns(make_llama) -> None:
    def high(*patterns):
        layers = plan(make_llama(), keep(*patterns)).layers
        return [x.name for x in layers if x.compute != "fp8" and x.role == "base"]

    assert high("down_proj") == [f"model.layers.{i}.mlp.down_proj" for i in range(2)]
    assert len(high("layers.0")) == 7
    assert high("layers.1.*.q_proj") == ["model.layers.1.self_attn.q_proj"]
    assert len(high("self_attn", "up_proj")) == 10
    assert high("model.layers.0.mlp.gate_proj") == ["model.layers.0.mlp.gate_proj"]


def test_keep_pattern_that_matches_nothing(make_llama) -> None:
    with pytest.raises(PlanError, match=r"'dwn_proj' matches no linear layer; did you mean 'down"):
        plan(make_llama(), keep("dwn_proj"))


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("mlp", "model.layers.0.mlp.up_proj", True),
        ("ml", "model.layers.0.mlp.up_proj", False),
        ("layers.1", "model.layers.11.mlp.up_proj", False),
        ("*up_proj", "model.layers.0.mlp.up_proj", True),
        ("layers.[01].mlp", "model.layers.1.mlp.up_proj", True),
    ],
)
def test_matches(pattern, name, expected) -> None:
    assert matches(pattern, name) is expected


def test_router_stays_high_and_experts_do_not() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = nn.ModuleDict({"gate": nn.Linear(64, 16), "up": nn.Linear(64, 64)})
            self.config = type("Config", (), {"num_experts": 16})

    layers = {x.name: x for x in plan(Block(), FP8).layers}
    assert layers["mlp.gate"].compute == "bf16"
    assert "router" in layers["mlp.gate"].reason
    assert layers["mlp.up"].compute == "fp8"


def test_layer_with_a_forward_of_its_own_stays() -> None:
    class Odd(nn.Linear):
        def forward(self, x):
            return super().forward(x) * 2

    layers = plan(nn.Sequential(Odd(64, 64), nn.Linear(64, 64)), FP8).layers
    assert [x.compute for x in layers] == ["bf16", "fp8"]
    assert layers[0].reason == "Odd has a forward of its own"


def test_model_without_fp8_layers_is_an_error() -> None:
    with pytest.raises(PlanError, match="no layer of this model can take it"):
        plan(nn.Sequential(nn.Linear(10, 10)), FP8)


@pytest.mark.parametrize("rank", [4, 8, 16, 32, 64])
def test_nothing_depends_on_the_rank(make_llama, rank) -> None:
    model = get_peft_model(make_llama(), LoraConfig(r=rank, target_modules="all-linear"))
    layers = plan(model, FP8).layers
    assert sum(x.compute == "fp8" for x in layers) == 14
    assert {x.compute for x in layers if x.role == "adapter"} == {"bf16"}
    assert {x.gemms for x in layers if x.role == "base"} == {("fprop", "dgrad")}


def test_plan_prints_well(make_llama) -> None:
    text = str(plan(make_llama(), FP8))
    assert "2 x model.layers.*.mlp.down_proj" in text
    assert "output head" in text


def test_plan_needs_no_memory() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2**17, 2**17))
    assert plan(model, FP8).layers[0].compute == "fp8"


def test_names_alone_make_neither_head_nor_router() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            inner = {"gate": nn.Linear(64, 64), "score": nn.Linear(64, 64)}
            self.layers = nn.ModuleList([nn.ModuleDict(inner)])
            self.score = nn.Linear(64, 16)

    roles = {x.name: x.role for x in plan(Block(), FP8).layers}
    assert roles == {"layers.0.gate": "base", "layers.0.score": "base", "score": "head"}


def test_layer_that_its_parent_multiplies_stays() -> None:
    layers = plan(nn.TransformerEncoderLayer(64, 4, 64), FP8).layers
    reasons = {x.name: x.reason for x in layers if x.compute != "fp8"}
    assert list(reasons) == ["self_attn.out_proj"]
    assert "multiplied by its parent" in reasons["self_attn.out_proj"]
