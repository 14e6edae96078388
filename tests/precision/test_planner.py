"""The plan: which layers, in what precision, and why."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from rich.console import Console
from torch import nn

from finetune import load_recipe
from finetune.config.paths import list_recipes
from finetune.errors import PlanError
from finetune.precision.model.layers import matches
from finetune.precision.model.plan import PrecisionPlan
from finetune.precision.planner import plan
from finetune.precision.settings import PrecisionConfig
from finetune.training.model import meta_model
from tests.conftest import emulated, slow_but

FP8 = emulated()


def keep(*patterns: str) -> PrecisionConfig:
    return FP8.model_copy(update={"keep": patterns})


SIZES = ("gemma3_12b_", "llama_70b_", "qwen3_4b_", "qwen3_8b_", "qwen_7b_lora_", "llama_8b_lora32_")
METHODS = ("_continue_", "_dpo_", "_grpo_", "_kto_", "_orpo_", "_rloo_", "_distill_")
RECIPES = [
    name
    for name in list_recipes()
    if name.endswith("_fp8") and not name.startswith(SIZES) and not any(m in name for m in METHODS)
]
"""Without those that differ from one of these in sizes, or in what their losses are."""
SLOW = ("gemma3_4b_", "gpt_oss_20b_", "llama_8b_reward_", "mistral_small_", "phi4_", "qwen3_30b_")


@pytest.mark.parametrize("name", slow_but([r for r in RECIPES if not r.startswith(SLOW)], RECIPES))
def test_every_recipe_can_be_planned_without_weights(name) -> None:
    config = load_recipe(name, check_train=False).config
    the_plan = plan(meta_model(config), config.precision)
    base = [layer for layer in the_plan.layers if layer.role == "base"]
    assert base
    assert all(layer.compute == "fp8" for layer in base), "every base layer is aligned"
    assert all(layer.frozen == (config.method == "lora") for layer in base)
    assert {layer.compute for layer in the_plan.layers if layer.role == "head"} == {"bf16"}
    adapters = [layer for layer in the_plan.layers if layer.role == "adapter"]
    assert bool(adapters) == (config.method == "lora")
    assert all(layer.compute == "bf16" for layer in adapters)
    assert all(layer.reason or layer.compute == "fp8" for layer in the_plan.layers)


def test_keep_patterns(make_llama) -> None:
    def high(*patterns):
        layers = plan(make_llama(), keep(*patterns)).layers
        return [x.name for x in layers if x.compute != "fp8" and x.role == "base"]

    assert high("down_proj") == [f"model.layers.{i}.mlp.down_proj" for i in range(2)]
    assert len(high("layers.0")) == 7
    assert high("layers.1.*.q_proj") == ["model.layers.1.self_attn.q_proj"]
    assert len(high("self_attn", "up_proj")) == 10
    assert high("model.layers.0.mlp.gate_proj") == ["model.layers.0.mlp.gate_proj"]


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


class Doubled(nn.Linear):
    """A layer whose forward is more than a product."""

    def forward(self, x):
        return super().forward(x) * 2


class Attention(nn.Module):
    """Multiplies by `inner.out_proj.weight` without a call of that layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(64, 2)


@pytest.mark.parametrize(
    ("model", "name", "why"),
    [
        (
            nn.Sequential(Doubled(64, 64), nn.Linear(64, 64)),
            "0",
            "Doubled has a forward of its own",
        ),
        (Attention(), "inner.out_proj", "multiplied by its parent"),
    ],
)
def test_a_type_for_a_layer_whose_forward_cannot_be_replaced(model, name, why) -> None:
    """Replaced all the same, the first would give half its output; the second is never called."""
    with pytest.raises(PlanError, match=f"fp32 was chosen for '{name}'") as error:
        plan(model, PrecisionConfig(compute="bf16", map={name: "fp32"}))
    assert why in error.value.why


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


def shown(table: PrecisionPlan) -> str:
    console = Console(width=200)
    with console.capture() as out:
        console.print(table)
    return out.get()


def test_plan_prints_well(make_llama) -> None:
    text = shown(plan(make_llama(), FP8))
    assert "2 mlp.down_proj" in text
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


# --------------------------------------------------------------------- map, first_n, last_n, keep


def computes(model: nn.Module, **settings) -> dict[str, str]:
    """Name -> type of everything in the plan of a model."""
    the_plan = plan(model, emulated(**settings))
    return {x.name: x.compute for x in (*the_plan.layers, *the_plan.casts)}


def in_block(found: dict[str, str], index: int) -> set[str]:
    return {compute for name, compute in found.items() if f"layers.{index}." in name}


def moe() -> nn.Module:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = nn.ModuleDict(
                {"gate": nn.Linear(64, 16), "experts": nn.ModuleList([nn.Linear(64, 64)])}
            )
            self.config = type("Config", (), {"num_experts": 16})

    return Block()


def test_parts_are_chosen_by_name(make_llama) -> None:
    found = computes(
        make_llama(),
        map={"attn": "fp32", "mlp": "bf16", "norm": "fp32", "embed": "bf16", "output": "fp8"},
    )
    kinds = {"self_attn": "fp32", "mlp.": "bf16", "norm": "fp32", "embed": "bf16", "lm_head": "fp8"}
    for name, compute in found.items():
        assert compute == next(c for piece, c in kinds.items() if piece in name), name
    assert sum("norm" in name for name in found) == 5


def test_router_can_be_chosen() -> None:
    assert computes(moe(), map={"router": "fp32"})["mlp.gate"] == "fp32"
    assert computes(moe(), map={"router": "fp8"})["mlp.gate"] == "fp8"
    assert computes(moe())["mlp.gate"] == "bf16"


def test_a_pattern_is_stronger_than_a_part(make_llama) -> None:
    chosen = {"attn": "bf16", "q_proj": "fp8", "layers.1.self_attn": "fp32"}
    found = computes(make_llama(), map=chosen)
    assert found["model.layers.0.self_attn.q_proj"] == "fp8"
    assert found["model.layers.0.self_attn.k_proj"] == "bf16"
    assert found["model.layers.1.self_attn.q_proj"] == "fp32", "the later of two patterns"
    assert found["model.layers.1.mlp.up_proj"] == "fp8"


@pytest.mark.parametrize(("first", "last"), [(1, 0), (0, 1), (2, 1), (1, 2)])
def test_first_and_last_blocks_stay_high(make_llama, first, last) -> None:
    the_plan = plan(make_llama(num_hidden_layers=4), emulated(first_n=first, last_n=last))
    found = {x.name: x.compute for x in the_plan.layers}
    for i in range(4):
        kept = i < first or i >= 4 - last
        assert in_block(found, i) == ({"bf16"} if kept else {"fp8"})
    reasons = {x.reason for x in the_plan.layers if "layers.0" in x.name}
    assert not first or reasons == {f"in a block kept by first_n={first}"}


def test_experts_in_a_list_of_their_own_are_no_blocks(make_llama) -> None:
    model = make_llama()
    for layer in model.model.layers:
        layer.mlp.experts = nn.ModuleList(deepcopy(layer.mlp) for _ in range(3))
    found = computes(model, first_n=1)
    assert in_block(found, 0) == {"bf16"}
    assert in_block(found, 1) == {"fp8"}


def test_keep_and_first_n_take_fp8_away_and_nothing_else(make_llama) -> None:
    """A part mapped to FP32 is not lowered to BF16 by a choice that says "not FP8"."""
    found = computes(make_llama(), first_n=1, keep=("layers.1.mlp.up_proj",), map={"attn": "fp32"})
    assert found["model.layers.0.self_attn.q_proj"] == "fp32"
    assert found["model.layers.0.mlp.up_proj"] == found["model.layers.1.mlp.up_proj"] == "bf16"
    found = computes(make_llama(), keep=("q_proj",), map={"attn": "fp32"})
    assert found["model.layers.0.self_attn.q_proj"] == "fp32"
    # FP8 for a part gives way to them, and has the rest.
    found = computes(make_llama(), first_n=1, map={"attn": "fp8"})
    assert found["model.layers.0.self_attn.q_proj"] == "bf16"
    assert found["model.layers.1.self_attn.q_proj"] == "fp8"


def test_what_is_asked_where_the_rest_is_high_is_high(make_llama) -> None:
    """In a BF16 or FP32 run "not FP8" is the type of the run."""
    fp32 = PrecisionConfig(compute="fp32", keep=("q_proj",), map={"mlp": "bf16"})
    found = {x.name: (x.compute, x.override) for x in plan(make_llama(), fp32).layers}
    assert found["model.layers.0.self_attn.q_proj"] == ("fp32", False)
    assert found["model.layers.0.mlp.up_proj"] == ("bf16", True)


@pytest.mark.parametrize(
    ("settings", "what", "fix"),
    [
        ({"keep": ("dwn_proj",)}, "'dwn_proj' matches no linear layer; did you mean", "down_proj"),
        ({"map": {"atn": "fp32"}}, "'atn' matches no module; did you mean 'attn'", "attn, mlp"),
        ({"map": {"router": "fp32"}}, "this model has no part 'router'", "attn, embed, mlp, norm"),
        ({"map": {"embed": "fp8"}}, "'model.embed_tokens', which multiplies no matrices", "bf16"),
        ({"map": {"norm": "fp8"}}, "which multiplies no matrices", "bf16, fp16 or fp32"),
        ({"map": {"input_layernorm": "fp8"}}, "which multiplies no matrices", "bf16"),
        ({"first_n": 1, "last_n": 1}, "keep all 2 decoder blocks high", "fewer than 2"),
        ({"first_n": 5}, "keep all 2 decoder blocks high", "precision.compute=bf16"),
        ({"keep": ("self_attn",), "map": {"attn": "fp8"}}, "map.attn decides over nothing", "keep"),
        ({"map": {"q_proj": "fp32", "*q_proj": "bf16"}}, "map.q_proj decides over nothing", "~"),
        ({"map": {"attn": "fp32", "self_attn": "bf16"}}, "map.attn decides over nothing", "~"),
        ({"keep": ("q_proj",), "map": {"self_attn": "fp8"}}, "pattern 'q_proj' decides", "~"),
        ({"keep": ("model",)}, "no layer of this model can take it", "precision.keep"),
    ],
)  # fmt: skip
def test_a_choice_that_cannot_be_honored(make_llama, settings, what, fix) -> None:
    with pytest.raises(PlanError) as caught:
        plan(make_llama(), emulated(**settings))
    assert what in caught.value.what
    assert fix in caught.value.fix
    assert caught.value.where
    assert caught.value.why


def test_fp8_for_a_layer_that_cannot_take_it() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 10))
    assert computes(model) == {"0": "fp8", "1": "bf16"}
    with pytest.raises(PlanError, match="chosen for '1', which cannot") as caught:
        plan(model, emulated(map={"1": "fp8"}))
    assert "N=10 is not a multiple of 16" in caught.value.why


@pytest.mark.parametrize(("scaling", "size"), [("rowwise", 48), ("mxfp8", 48), ("nvfp4", 48)])
def test_block_formats_need_multiples_of_32(scaling, size) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, size))
    expected = "fp8" if scaling == "rowwise" else "bf16"
    assert computes(model, scaling=scaling)["1"] == expected


def test_fp8_in_a_run_without_fp8(make_llama) -> None:
    with pytest.raises(PlanError, match=r"in a run whose precision\.compute is bf16") as caught:
        plan(make_llama(), PrecisionConfig(map={"mlp": "fp8"}))
    assert "compute=fp8" in caught.value.fix


def test_blocks_of_a_model_without_blocks() -> None:
    with pytest.raises(PlanError, match="without a list of decoder blocks") as caught:
        plan(nn.Sequential(nn.Linear(64, 64)), emulated(first_n=1))
    assert "precision.keep" in caught.value.fix


@pytest.mark.parametrize("target", ["all-linear", ["q_proj", "v_proj"]])
def test_map_reaches_what_adapters_wrap_and_not_adapters(make_llama, target) -> None:
    model = get_peft_model(
        make_llama(), LoraConfig(r=8, target_modules=target, modules_to_save=["lm_head"])
    )
    found = computes(model, map={"attn": "fp32", "output": "fp32"}, first_n=1)
    adapters = {c for name, c in found.items() if "lora_" in name}
    assert adapters == {"bf16"}
    base = {c for n, c in found.items() if "self_attn" in n and "lora_" not in n}
    assert base == {"fp32"}
    assert found["base_model.model.lm_head.modules_to_save.default"] == "fp32", "what trains"
    with pytest.raises(PlanError, match="'lora_A' matches no module"):
        plan(model, emulated(map={"lora_A": "fp32"}))
    names = {n.rpartition(".layers.")[2] for n, c in found.items() if c == "fp8"}
    assert {n[:5] for n in names} == {"1.mlp"}


def test_high_gemms_stand_in_the_plan(make_llama) -> None:
    the_plan = plan(make_llama(), emulated(high_gemms=("dgrad",), scaling="nvfp4"))
    row = the_plan.fp8_layers[0]
    assert [row.precision_of(gemm) for gemm in row.gemms] == ["fp4", "bf16", "fp4"]
    row = plan(make_llama(), emulated(scaling="rowwise_with_gw_hp")).fp8_layers[0]
    assert row.precision_of("wgrad") == "bf16"


def test_the_plan_shows_what_the_gemms_multiply(make_llama) -> None:
    text = shown(plan(make_llama(), emulated(high_gemms=("dgrad",), scaling="nvfp4")))
    assert "fp4  dgrad high" in text
    assert " fp8 " not in text
    assert " fp8 " in shown(plan(make_llama(), FP8))
