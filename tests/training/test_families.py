"""Model families: what trains of each, what gets no adapter and why, and that it is said."""

from __future__ import annotations

import re

import pytest
from transformers import T5Config

from finetune import load_recipe
from finetune.data.dataset import reader_for, rows_for
from finetune.errors import ConfigError
from finetune.precision.model.layers import plain_name, without_adapters
from finetune.precision.model.towers import beside_text, decoder_name
from finetune.precision.planner import plan
from finetune.storage.pretrained import auto_class, load_tokenizer
from finetune.training.model import meta_model
from finetune.training.scope import notes
from tests.benchmarks.families import run, run_exported
from tests.conftest import slow_but
from tests.families import FAMILIES, config_of, folder_of

TOWERS = {
    "gemma3": ["model.vision_tower", "model.multi_modal_projector"],
    "mistral3": ["model.vision_tower", "model.multi_modal_projector"],
    "smolvlm": ["model.vision_model", "model.connector"],
    "llava_next": ["model.image_newline", "model.vision_tower", "model.multi_modal_projector"],
    "qwen2_5_vl": ["model.visual"],
    "qwen3_vl": ["model.visual"],
}


def recipe(family: str, method: str, tmp_path, *overrides: str):
    name = f"model.name={folder_of(family, tmp_path)}"
    return load_recipe(f"tiny_{method}_fp8", [name, "model.weights=random", *overrides]).config


def trainable(model) -> list[str]:
    return [name for name, p in model.named_parameters() if p.requires_grad]


def adapted(model) -> set[str]:
    names = {name for name, _ in model.named_modules() if name.endswith((".lora_A", ".lora_B"))}
    return {n.removeprefix("base_model.model.").rpartition(".lora_")[0] for n in names}


@pytest.mark.parametrize("family", TOWERS)
@pytest.mark.parametrize("method", ["full", "lora"])
def test_towers_that_text_does_not_reach_stay_as_they_are(family, method, tmp_path) -> None:
    config = recipe(family, method, tmp_path)
    model = meta_model(config)
    towers, names = TOWERS[family], trainable(model)
    assert any(".layers.0.mlp." in name for name in names)
    assert not [name for name in names for tower in towers if tower in name]
    (note,) = notes(model, config)
    assert note.startswith(f"frozen: {', '.join(towers)} (")
    if method == "full":
        assert any("lm_head" in n or "embed_tokens" in n for n in names)
    else:
        assert len(adapted(model)) == 14


PROJECTORS = {
    "gemma3": {"model.multi_modal_projector"},
    "smolvlm": {"model.connector"},
    "llava_next": {"model.multi_modal_projector", "model.image_newline"},
    "qwen3_vl": {"model.visual.merger", "model.visual.deepstack_merger_list.0"},
}


@pytest.mark.parametrize("family", PROJECTORS)
@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_projector_trains_in_full_and_its_tower_stays(family, method, tmp_path) -> None:
    config = recipe(family, method, tmp_path, "model.train_vision=projector")
    model = meta_model(config)
    decoder = decoder_name(without_adapters(model))
    beside = {n for n in trainable(model) if decoder not in n and "lm_head" not in n}
    wanted = PROJECTORS[family] - ({"model.image_newline"} if method == "lora" else set())
    assert {next(part for part in wanted if part in name) for name in beside} == wanted
    frozen, trained = notes(model, config)
    assert all(part in trained for part in wanted)
    assert frozen.startswith("frozen: model.")
    rows = [row for row in plan(model, config.precision).layers if decoder not in row.name]
    assert {row.compute for row in rows if row.role == "tower"} == {"bf16"}
    assert not [row.name for row in rows if row.stored]


@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_tower_trains_where_asked_in_fp8_where_its_sizes_allow(method, tmp_path) -> None:
    config = recipe("qwen3_vl", method, tmp_path, "model.train_vision=all")
    model = meta_model(config)
    rows = [row for row in plan(model, config.precision).layers if "visual.blocks" in row.name]
    computes = {row.compute for row in rows if "lora_" not in row.name}
    assert (computes, len(adapted(model))) == ({"fp8"}, 22 if method == "lora" else 0)


def test_a_model_without_a_tower_has_none_to_train(tmp_path) -> None:
    with pytest.raises(ConfigError, match="no tower for images to train") as caught:
        meta_model(recipe("llama", "lora", tmp_path, "model.train_vision=projector"))
    assert caught.value.fix.startswith("~model.train_vision")


def test_a_projector_does_not_train_on_text_alone(tmp_path) -> None:
    config = recipe("gemma3", "lora", tmp_path, "model.train_vision=projector", "data.max_rows=4")
    tokenizer, _ = load_tokenizer(config.model)
    with pytest.raises(ConfigError, match="no row has an image") as caught:
        reader_for(config, rows_for(config, tokenizer), tokenizer)
    assert caught.value.fix.startswith("~model.train_vision")


def test_a_model_that_is_all_text_has_nothing_beside_it(tmp_path) -> None:
    config = recipe("llama", "full", tmp_path)
    assert not beside_text(meta_model(config))
    assert not notes(meta_model(config), config)


FEW = [("gemma3", "full"), ("qwen3_moe", "lora")]
ALL = [(family, method) for family in FAMILIES for method in ("full", "lora")]
SHARES = {"mamba": 0.3, "falcon_mamba": 0.3, "mamba2": 0.08, "opt": 0.37, "falcon": 0.4}
"""Least FP8 share of tiny models in which head, convolutions or scans weigh more than elsewhere."""


@pytest.mark.slow
@pytest.mark.parametrize(("family", "method"), slow_but(FEW, ALL, pytest.mark.long))
def test_every_family_is_proven_in_fp8_and_its_memory_predicted(family, method, tmp_path) -> None:
    """The table of `tests.benchmarks.families`, a row at a time."""
    row = run(family, method, tmp_path)
    assert row.error == ""
    assert row.receipt is not None
    assert row.receipt.status == "proven"
    assert row.receipt.fp8_flop_share > SHARES.get(family, 0.41)
    assert row.memory_error is not None
    assert abs(row.memory_error) < 0.01
    if family in TOWERS:
        assert row.receipt.notes[0].startswith("frozen: model.")
    if family in ("qwen3_moe", "mixtral") and method == "lora":
        assert row.receipt.fp8_flop_share > 0.5


EXPORTED = ("llama", "qwen3", "qwen3_moe", "gemma3", "mistral", "phi3", "gpt_oss", "smollm3")
NO_FP8 = ("gpt_oss",)
"""Experts in one parameter, in the files as well."""


@pytest.mark.long
@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("family", EXPORTED)
def test_a_family_is_exported_and_reloaded_by_transformers_alone(family, method, tmp_path) -> None:
    """As `--export` of the benchmark prints it; an error above the bounds of parity is text."""
    row = run_exported(family, method, tmp_path)
    assert (row.error, row.exports.keys()) == ("", {"merged", "fp8"})
    merged, fp8 = row.exports["merged"], row.exports["fp8"]
    assert isinstance(merged, float)
    assert (merged > 0) == (method == "lora"), "an adapter is rounded into the weights"
    if family in NO_FP8:
        assert "experts in one parameter" in str(fp8)
    else:
        assert isinstance(fp8, float)
        assert fp8 > merged


def test_a_model_that_generates_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="no text-generating model of type 't5'"):
        auto_class(T5Config())
    assert auto_class(config_of("mistral3")).__name__ == "AutoModelForImageTextToText"
    assert auto_class(config_of("gemma3")).__name__ == "AutoModelForCausalLM"


# ---------------------------------------------------------------------------------- what is chosen


def test_what_is_named_stays_frozen(tmp_path) -> None:
    model = meta_model(recipe("llama", "full", tmp_path, "model.freeze=[layers.0, embed_tokens]"))
    assert not [name for name in trainable(model) if ".0." in name or "embed" in name]
    assert len(trainable(model)) == 9 + 2


@pytest.mark.parametrize(
    ("override", "left"),
    [
        ("model.freeze=[layers.0]", 7),
        ("lora.exclude_modules=[mlp]", 8),
        ("lora.exclude_modules=[layers.1.*.q_proj]", 13),
        ("lora.layers_to_transform=[1]", 7),
    ],
)
def test_adapters_are_where_they_were_asked_for(override, left, tmp_path) -> None:
    config = recipe("llama", "lora", tmp_path, override)
    model = meta_model(config)
    assert len(adapted(model)) == left
    assert not notes(model, config), "what was asked for needs no note"


@pytest.mark.parametrize(
    ("method", "override", "what"),
    [
        ("full", "model.freeze=[embed_token]", "names nothing in this model; did you mean 'embed_"),
        ("full", "model.freeze=[model, lm_head]", "every parameter is frozen"),
        ("lora", "lora.exclude_modules=[mpl]", "'mpl' names nothing in this model; did you mean"),
        ("lora", "lora.layers_to_transform=[2]", "there is no decoder block 2 to adapt"),
        (
            "lora",
            "lora.target_modules=[q_proj, qkv_proj]",
            "no layer's name ends in qkv_proj; did",
        ),
        ("lora", "lora.target_modules=[nowhere]", "no layer's name ends in nowhere"),
        ("lora", "lora.target_parameters=[mlp.up.weight]", "no parameter's name ends in mlp.up"),
    ],
)
def test_a_choice_that_reaches_nothing_is_an_error(method, override, what, tmp_path) -> None:
    with pytest.raises(ConfigError, match=re.escape(what)) as caught:
        meta_model(recipe("llama", method, tmp_path, override))
    assert caught.value.fix


OF_LLAMA = "[q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj]"


@pytest.mark.parametrize(
    ("family", "missing"),
    slow_but(
        [("phi3", "gate_proj, k_proj, q_proj, "), ("mistral", "")],
        [
            ("phi3", "gate_proj, k_proj, q_proj, "),
            ("gpt_oss", "down_proj, gate_proj, "),
            ("qwen3_moe", ""),
            ("mistral", ""),
        ],
    ),
)
def test_the_layers_of_llama_are_refused_on_models_without_them(family, missing, cli, tmp_path):
    """PEFT adapted what is left of the list; the experts' names it knows of some mixtures."""
    words = ["validate", "tiny_lora_bf16", f"model.name={folder_of(family, tmp_path)}"]
    words += ["model.weights=random"]
    found = cli(*words, f"lora.target_modules={OF_LLAMA}")
    assert found.code == 2 * bool(missing)
    if missing:
        assert f"no layer's name ends in {missing}up_proj" in found.err
        fix = " ".join(found.err.partition("fix:")[2].split()).partition(", which")[0]
        assert cli(*words, fix).code == 0


@pytest.mark.parametrize(
    ("overrides", "what"),
    [
        (["lora.init_lora_weights=eva"], "belongs to scripts"),
        (["lora.init_lora_weights=pissa_niter_16"], "belongs to scripts"),
        (["lora.init_lora_weights=orthogonal", "lora.r=3"], "r is 3"),
        (["lora.init_lora_weights=gausian"], "did you mean 'gaussian'"),
    ],
)
def test_an_initialization_that_cannot_be_had_is_refused(overrides, what) -> None:
    with pytest.raises(ConfigError, match=re.escape(what)) as caught:
        load_recipe("tiny_lora_bf16", overrides)
    assert caught.value.fix


def test_initializations_reach_peft(tmp_path) -> None:
    model = meta_model(recipe("llama", "lora", tmp_path))
    assert model.peft_config["default"].init_lora_weights is True
    for name in ("gaussian", "orthogonal"):
        model = meta_model(recipe("llama", "lora", tmp_path, f"lora.init_lora_weights={name}"))
        assert model.peft_config["default"].init_lora_weights == name


# ----------------------------------------------------------------------- what stays out by itself


def test_mamba_layers_read_past_their_forward_get_no_adapter(tmp_path) -> None:
    config = recipe("mamba", "lora", tmp_path)
    model = meta_model(config)
    assert {name.rpartition(".")[2] for name in adapted(model)} == {"in_proj"}
    (note,) = notes(model, config)
    assert "6 linear layers (mixer.dt_proj, mixer.out_proj, mixer.x_proj)" in note
    rows = {plain_name(x.name): x for x in plan(model, config.precision).layers}
    assert "past the layer's forward" in rows["backbone.layers.0.mixer.dt_proj"].reason


def test_a_router_that_returns_a_tuple_gets_no_adapter(tmp_path) -> None:
    config = recipe("llama4", "lora", tmp_path)
    model = meta_model(config)
    assert not [name for name in adapted(model) if "router" in name]
    router, experts = notes(model, config)
    assert "Llama4Router has a forward of its own" in router
    assert "lora.target_parameters=[experts.down_proj" in experts


def test_trl_finds_the_backbone_of_llama_4(tmp_path) -> None:
    """Its fused loss calls `base_model`, and adds a loss of routers for a number it looks up."""
    model = meta_model(recipe("llama4", "full", tmp_path))
    assert model.base_model is model.model
    assert model.config.get_text_config().router_aux_loss_coef == 0


def test_falcon_linear_is_a_linear_layer(tmp_path) -> None:
    config = recipe("falcon", "full", tmp_path)
    assert len(plan(meta_model(config), config.precision).fp8_layers) == 8


def test_what_peft_leaves_out_is_said(tmp_path) -> None:
    """Its two warnings of ranks that match nothing are errors in tests, and do not come."""
    config = recipe("deepseek_v3", "lora", tmp_path)
    (lost,) = notes(meta_model(config), config)
    assert lost.startswith("no adapter on 6 linear layers (mlp.down_proj, mlp.gate_proj, ")
    assert "peft#3711" in lost
    assert "lora.target_parameters=[NAME.weight, ...] with precision.keep=[NAME, ...]" in lost


def test_dropout_on_experts_is_refused_with_both_ways_out(tmp_path) -> None:
    with pytest.raises(ConfigError, match="lora_dropout != 0") as caught:
        meta_model(recipe("qwen3_moe", "lora", tmp_path, "lora.dropout=0.1"))
    assert caught.value.fix.startswith("~lora.dropout; or leave the experts out")
