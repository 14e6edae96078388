"""The instant preview: its counts against real models, what layers keep against tensors counted
alive, its floor against the bound over a model, and that it never contradicts itself."""

from __future__ import annotations

import functools
import gc
import json
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune.config.lookup import list_recipes
from finetune.config.recipe import load_recipe
from finetune.config.schema import RunConfig
from finetune.errors import ConfigError
from finetune.estimator.closed_form.activations import TrainingMode, layer_bytes
from finetune.estimator.closed_form.decoder import FAMILIES, Decoder, decoder_of, find_decoder
from finetune.estimator.closed_form.preview import Preview, preview, preview_of
from finetune.hardware.gpus import named_gpu
from tests.conftest import slow_but

SMALL = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 3, "vocab_size": 96}
SMALL |= {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32}
MOE = {"num_experts_per_tok": 2, "num_local_experts": 4, "num_experts": 4}
OTHERS = {
    "gpt2": {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128, "vocab_size": 96},
    "bdh": {
        **{"hidden_size": 64, "num_neurons": 2048, "num_attention_heads": 4},
        **{"num_hidden_layers": 2, "vocab_size": 96, "dropout": 0.0},
    },
    "mixtral": SMALL | MOE,
    "qwen3_moe": SMALL | MOE | {"moe_intermediate_size": 96},
}
ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def values_of(family: str, **changes) -> dict:
    return {"model_type": family, **OTHERS.get(family, SMALL), **changes}


def real_model(values: dict, dtype: str = "bfloat16", device: str = "meta"):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    import finetune.storage.bdh  # noqa: F401

    values = dict(values)
    shape = AutoConfig.for_model(values.pop("model_type"), **values)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(shape, dtype=getattr(torch, dtype))


def run_config(*, lora: dict | None = None, name: str = "builtin:tiny_llama", **sections):
    values = {"model": {"name": name}, "data": {"name": "builtin:harbour"}, **sections}
    return RunConfig.model_validate(values | ({"lora": lora} if lora else {}))


LLAMA_8B = find_decoder(load_recipe("llama_8b_lora_fp8", check_train=False).config.model)


def llama_8b(**sections) -> Preview:
    assert LLAMA_8B is not None
    found = preview_of(LLAMA_8B, run_config(**sections))
    assert found is not None
    return found


# ------------------------------------------------------------------------------------------- counts


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_parameters_are_those_of_the_model(family, tied) -> None:
    values = values_of(family, tie_word_embeddings=tied)
    decoder = decoder_of(values)
    assert decoder is not None
    assert decoder.parameters == real_model(values).num_parameters()


def test_biases_are_counted() -> None:
    values = values_of("llama", attention_bias=True, mlp_bias=True)
    assert decoder_of(values).parameters == real_model(values).num_parameters()  # pyright: ignore


def test_a_text_model_inside_of_another_is_found() -> None:
    text = values_of("gemma3_text")
    assert decoder_of({"model_type": "gemma3", "text_config": text}) == decoder_of(text)


@pytest.mark.parametrize(
    "values",
    [
        {"model_type": "mamba", "hidden_size": 64},
        {"model_type": "llama"},
        {},
        values_of("llama", hidden_size=None),
        values_of("qwen3_moe", mlp_only_layers=[0]),
    ],
)
def test_what_is_not_known_is_not_guessed(values) -> None:
    assert decoder_of(values) is None


# ------------------------------------------------------------------------ floor: weights and states


FLOORS = {
    "full, float32": ("llama_1b_full_fp8", ()),
    "adapters over FP8": ("llama_1b_lora_fp8", ()),
    "adapters, tensorwise": ("llama_1b_lora_fp8", ("precision.scaling=tensorwise",)),
    "adapters, first layer high": ("llama_1b_lora_fp8", ("precision.first_n=1",)),
    "adapters over BF16": ("llama_1b_lora_bf16", ()),
    "over stored FP8": ("llama_1b_lora_bf16", ("model.storage=fp8",)),
    "over NF4": ("llama_1b_lora_bf16", ("model.storage=nf4",)),
    "8-bit states": ("llama_1b_full_bf16", ("train.optim=adamw_torch_8bit",)),
    "Adafactor": ("llama_1b_full_bf16", ("train.optim=adafactor",)),
    "paged": ("llama_1b_full_bf16", ("train.optim=paged_adamw_8bit",)),
    "DoRA": ("llama_1b_lora_bf16", ("lora.use_dora=true",)),
    "a head that trains": ("qwen_7b_lora_bf16", ("lora.modules_to_save=[lm_head]",)),
    "biases too": ("qwen_7b_lora_bf16", ("lora.bias=all",)),
    "two targets": ("qwen_7b_lora_bf16", ("lora.target_modules=[q_proj,v_proj]",)),
    "a pattern": ("qwen_7b_lora_bf16", ("lora.target_modules=.*layers.[02].*_proj",)),
    "GPT-2": ("gpt2_124m_full_bf16", ()),
    "BDH": ("bdh_tiny_full_fp8", ()),
    "tiny": ("tiny_qlora_bf16", ()),
}


QUICK_FLOORS = ("adapters over FP8", "over NF4", "8-bit states", "a pattern", "BDH", "tiny")


@pytest.mark.parametrize(
    ("recipe", "overrides"),
    slow_but([FLOORS[name] for name in QUICK_FLOORS], FLOORS.values()),
    ids=FLOORS,
)
def test_floor_is_the_bound_over_the_model(recipe, overrides) -> None:
    from finetune.estimator.gate import bound
    from finetune.precision.planner import plan
    from finetune.training.model import sketch

    config = load_recipe(recipe, overrides, check_train=False).config
    model = sketch(config)
    need = bound(model, plan(model, config.precision), config.train, storage=config.model.storage)
    found = preview(config)
    assert found is not None
    assert (found.parameters, found.trainable) == (need.parameters, need.trainable)
    for part in ("weights", "gradients", "optimizer"):
        assert getattr(found, part) == pytest.approx(getattr(need, part) / 2**30, rel=1e-3), part
    assert found.floor_gib == pytest.approx(need.total / 2**30, rel=1e-3)


def test_shards_divide_what_is_held_only_with_fsdp() -> None:
    lone, idle, shared = (
        preview(load_recipe("llama_70b_lora_fp8", items, check_train=False).config, gpus=gpus)
        for items, gpus in (((), 1), (("~train.fsdp", "~train.fsdp_config"), 8), ((), 8))
    )
    assert lone is not None
    assert idle is not None
    assert shared is not None
    assert idle.floor_gib == lone.floor_gib
    assert shared.floor_gib == pytest.approx(lone.floor_gib / 8)
    assert shared.temporaries > lone.temporaries, "gathered"
    assert shared.saved == lone.saved


# --------------------------------------------------------------------------------- what layers keep


def measured_layer_bytes(values: dict, dtype: str, lora: tuple[str, ...], precision: dict) -> float:
    """Bytes a token that one layer more keeps at the end of forward, counted."""
    import torch
    from peft import LoraConfig, get_peft_model

    from finetune.config.schema import PrecisionConfig
    from finetune.precision.convert import apply
    from finetune.precision.planner import plan
    from finetune.training.memory_meter import LiveTensors

    rows, length, kept = 2, 64, []
    for layers in (1, 2):
        model = real_model(values | {"num_hidden_layers": layers}, dtype, "cpu").train()
        if lora:
            adapters = LoraConfig(r=8, target_modules=list(lora), task_type="CAUSAL_LM")
            model = get_peft_model(model, adapters).train()
            model.enable_input_require_grads()
            apply(model, plan(model, PrecisionConfig.model_validate(precision)))
        decoder = (model.get_base_model() if lora else model).base_model
        ids = torch.randint(1, 90, (rows, length))
        gc.collect()
        with LiveTensors([*model.parameters(), *model.buffers()]) as live:
            for _ in range(2):  # scales and the like are made in the first
                before = live.bytes
                with torch.autocast("cpu", torch.bfloat16):
                    result = decoder(input_ids=ids, use_cache=False).last_hidden_state
                kept_now = live.bytes - before
                result.float().sum().backward()
                model.zero_grad()
                del result
        kept.append(kept_now)
    return (kept[1] - kept[0]) / (rows * length)


FP8 = {"compute": "fp8", "emulation": "allow", "scaling": "rowwise", "frozen": "fp8"}
KEPT = {
    "full": ("llama", "bfloat16", (), {}),
    "full, all heads": ("qwen3", "bfloat16", (), {}),
    "full, Gemma": ("gemma3_text", "bfloat16", (), {}),
    "full, float32": ("llama", "float32", (), {}),
    "full, experts": ("mixtral", "bfloat16", (), {}),
    "two adapters": ("llama", "bfloat16", ("q_proj", "v_proj"), {"compute": "bf16"}),
    "adapters": ("qwen2", "bfloat16", ALL_LINEAR, {"compute": "bf16"}),
    "adapters, float32": ("llama", "float32", ALL_LINEAR, {"compute": "bf16"}),
    "adapters by PEFT": (
        *("llama", "bfloat16", ALL_LINEAR),
        {"compute": "bf16", "fused_adapters": False},
    ),
    "adapters over FP8": ("llama", "bfloat16", ALL_LINEAR, FP8),
    "adapters over FP8, inputs high": (
        *("llama", "bfloat16", ALL_LINEAR),
        FP8 | {"saved_input": "high"},
    ),
}


@pytest.mark.parametrize("what", slow_but(["adapters over FP8"], KEPT))
def test_what_a_layer_keeps_is_what_is_alive(what) -> None:
    """GPT-2 is left out: on CPUs autocast does `pow` and its norms in BF16, on GPUs in float32."""
    family, dtype, lora, precision = KEPT[what]
    values = values_of(family)
    decoder = decoder_of(values)
    assert decoder is not None
    fused = precision.get("fused_adapters", True)
    how = TrainingMode(
        full=not lora,
        adapted=frozenset(x.path for x in decoder.linears if x.name in lora),
        rank=8,
        stream=2.0 if dtype == "bfloat16" else 4.0,
        fused=fused,
        codes=bool(precision.get("frozen")) and "saved_input" not in precision,
    )
    predicted = layer_bytes(decoder, how, 64)
    tokens = 2 * 64
    if not lora and dtype == "float32":  # copies of the weights, once for all tokens
        predicted += sum(x.n * x.k for x in decoder.linears) * 2 / tokens
    if lora and not fused:
        predicted += sum(x.n + x.k for x in decoder.linears) * 8 * 2 / tokens
    measured = measured_layer_bytes(values, dtype, lora, precision)
    assert predicted == pytest.approx(measured, rel=0.03 if family == "mixtral" else 0.005)


def test_layers_that_are_written_out_keep_a_table() -> None:
    decoder = decoder_of(values_of("gemma2"))
    assert decoder is not None
    short, long = (layer_bytes(decoder, TrainingMode(True, eager=True), n) for n in (64, 128))
    assert long - short == 64 * decoder.heads * 8
    assert layer_bytes(decoder, TrainingMode(True), 64) == layer_bytes(
        decoder, TrainingMode(True), 128
    )


# --------------------------------------------------------------------------------------- properties

configs = st.fixed_dictionaries(
    {
        "rows": st.integers(1, 8),
        "length": st.integers(1, 8192),
        "rank": st.integers(0, 256),
        "dtype": st.sampled_from(["bfloat16", "float32"]),
        "compute": st.sampled_from(["bf16", "fp8"]),
        "checkpointing": st.booleans(),
        "accumulation": st.integers(1, 4),
        "optim": st.sampled_from(["adamw_torch", "adamw_torch_fused", "adamw_8bit", "sgd"]),
    }
)


@functools.cache
def decoder_named(family: str) -> Decoder:
    found = decoder_of(values_of(family)) if family != "8B" else LLAMA_8B
    assert found is not None
    return found


def preview_with(family: str, facts: dict, **changes) -> Preview:
    facts = facts | changes
    precision: dict = {"compute": facts["compute"]}
    if facts["compute"] == "fp8":
        precision["emulation"] = "allow"
    config = run_config(
        lora={"r": facts["rank"]} if facts["rank"] and family != "bdh" else None,
        precision=precision,
        train={
            "per_device_train_batch_size": facts["rows"],
            "max_length": facts["length"],
            "gradient_checkpointing": facts["checkpointing"],
            "gradient_accumulation_steps": facts["accumulation"],
            "optim": facts["optim"],
        },
    )
    found = preview_of(
        decoder_named(family),
        config.model_copy(
            update={"model": config.model.model_copy(update={"dtype": facts["dtype"]})}
        ),
    )
    assert found is not None
    return found


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(["8B", "gemma2", "mixtral", "gpt2", "bdh"]), configs)
def test_more_work_takes_more_and_nothing_less_than_the_floor(family, facts) -> None:
    here = preview_with(family, facts)
    gpu = named_gpu("H100")
    assert here.peak_gib >= here.floor_gib + here.context
    assert min(here.weights, here.gradients, here.saved, here.loss, here.temporaries) > 0
    for more in ({"rows": facts["rows"] + 1}, {"length": facts["length"] + 64}):
        there = preview_with(family, facts, **more)
        assert there.peak_gib >= here.peak_gib
        assert there.saved > here.saved
        assert there.floor_gib == here.floor_gib
        assert there.step_seconds(gpu) > here.step_seconds(gpu)
    if facts["rank"] and family != "bdh":
        there = preview_with(family, facts, rank=facts["rank"] + 8)
        assert there.trainable >= here.trainable
        assert there.peak_gib >= here.peak_gib


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(["8B", "mixtral"]), configs)
def test_what_saves_memory_saves_memory(family, facts) -> None:
    facts = facts | {"rank": facts["rank"] or 8, "length": 512}
    kept, again = (preview_with(family, facts, checkpointing=flag) for flag in (False, True))
    assert again.saved < kept.saved
    assert again.peak_gib <= kept.peak_gib
    assert again.step_seconds(named_gpu("L40S")) > kept.step_seconds(named_gpu("L40S"))
    full = preview_with(family, facts, rank=0, dtype="float32")
    assert preview_with(family, facts).peak_gib < full.peak_gib


# ------------------------------------------------------------------------------------ known figures


def test_an_8b_with_adapters_over_fp8_fits_a_card_of_24_gb_and_over_bf16_just() -> None:
    found = {
        name: preview(load_recipe(f"llama_8b_lora_{name}", check_train=False).config)
        for name in ("fp8", "bf16")
    }
    assert found["fp8"] is not None
    assert found["bf16"] is not None
    assert found["fp8"].peak_gib < 16 < 18 < found["bf16"].peak_gib < 23
    assert found["bf16"].weights - found["fp8"].weights == pytest.approx(6.5, abs=0.1)


def test_a_foreach_optimizer_makes_a_copy_of_all_gradients() -> None:
    train = {"max_length": 64, "per_device_train_batch_size": 1}
    fused, foreach = (
        llama_8b(train=train | {"optim": name}) for name in ("adamw_torch_fused", "adamw_torch")
    )
    assert foreach.peak_gib - fused.peak_gib > 10
    assert foreach.floor_gib == fused.floor_gib


def test_time_is_that_of_the_units_a_gpu_has() -> None:
    train = {"max_length": 2048, "per_device_train_batch_size": 4}
    low = llama_8b(precision={"compute": "fp8", "emulation": "allow"}, train=train)
    high = llama_8b(train=train)
    ratio = {}
    for name in ("H100", "A100-80GB"):
        gpu = named_gpu(name)
        ratio[name] = high.step_seconds(gpu) / low.step_seconds(gpu)
    assert 0.8 < ratio["A100-80GB"] <= 1 < ratio["H100"] < 2
    assert high.step_seconds(named_gpu("A100-80GB")) > 2 * high.step_seconds(named_gpu("H100"))
    assert high.tokens_per_s(named_gpu("H100")) == pytest.approx(
        high.tokens / high.step_seconds(named_gpu("H100"))
    )


@pytest.mark.parametrize(
    ("rows", "length", "published"),
    [(1, 8192, 1.25), (8, 256, 1.17)],
    ids=["torchao tensorwise, 8 H100", "Transformer Engine, one H100"],
)
def test_gain_of_fp8_in_full_training_of_an_8b(rows, length, published) -> None:
    train = {"max_length": length, "per_device_train_batch_size": rows}
    gpu = named_gpu("H100")
    low = llama_8b(precision={"compute": "fp8", "emulation": "allow"}, train=train)
    ratio = llama_8b(train=train).step_seconds(gpu) / low.step_seconds(gpu)
    assert ratio == pytest.approx(published, abs=0.08)


def test_small_models_gain_nothing() -> None:
    bf16, fp8 = (
        preview(load_recipe(f"gpt2_124m_full_{name}", check_train=False).config)
        for name in ("bf16", "fp8")
    )
    assert bf16 is not None
    assert fp8 is not None
    assert 0.85 < bf16.step_seconds(named_gpu("H100")) / fp8.step_seconds(named_gpu("H100")) < 1.1


def test_other_trainers_make_logits() -> None:
    assert LLAMA_8B is not None
    train = {"max_length": 4096, "per_device_train_batch_size": 1}
    config = run_config(lora={"r": 8}, train=train)
    none, made = (preview_of(LLAMA_8B, config, logits=size) for size in (0.0, 10.0))
    assert none is not None
    assert made is not None
    assert made.loss == pytest.approx(10 * 4096 * 128256 / 2**30)
    assert made.peak_gib > none.peak_gib


# ------------------------------------------------------------------------------------ as it is used


def test_every_recipe_has_a_preview_and_says_that_it_is_one() -> None:
    for name in list_recipes():
        found = preview(load_recipe(name, check_train=False).config)
        assert found is not None, name
        assert str(found).startswith("≈")
        assert "preview" in str(found)


def test_a_recipe_as_written_and_as_checked_have_the_same() -> None:
    for name in ("llama_8b_lora_fp8", "gpt2_124m_full_bf16"):
        assert preview(load_recipe(name, check_train=False).config) == preview(
            load_recipe(name).config
        )


def test_local_folder(tmp_path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(values_of("qwen3")))
    found = preview(run_config(name=str(tmp_path)))
    assert found is not None
    assert found.parameters == real_model(values_of("qwen3")).num_parameters()
    (tmp_path / "config.json").write_text("{")
    assert preview(run_config(name=str(tmp_path))) is None


def test_none_where_shape_or_length_is_not_at_hand() -> None:
    assert preview(run_config(name="someone/unknown")) is None
    assert preview(run_config(name="builtin:unknown")) is None
    assert preview(run_config(train={"max_length": None})) is None


@pytest.mark.parametrize("key", ["per_device_train_batch_size", "max_length"])
@pytest.mark.parametrize("value", [0, -1, "0", "many"])
def test_a_batch_of_zero_is_an_error(key, value) -> None:
    with pytest.raises(ConfigError, match=key):
        preview(run_config(train={key: value}))


def test_an_unknown_optimizer_is_an_error() -> None:
    with pytest.raises(ConfigError, match="adamw"):
        preview(run_config(train={"optim": "adamw_torhc"}))


def test_no_torch_is_imported() -> None:
    code = """
import sys
from finetune.estimator.closed_form.preview import preview
from finetune.hardware.gpus import named_gpu
from finetune.config.recipe import load_recipe
found = preview(load_recipe("llama_70b_lora_fp8", check_train=False).config, gpus=8)
assert found.step_seconds(named_gpu("H100")) > 0
print(sorted({"torch", "transformers", "trl", "peft", "numpy"} & sys.modules.keys()))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "[]\n", done.stderr
