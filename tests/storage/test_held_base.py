"""Recipes over a base stored in FP8: loaded so, planned so, proven, and nothing else kept."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from finetune import (
    get_receipt,
    load_in_fp8,
    load_recipe,
    teardown_fp8_mixed_precision_training,
    train,
)
from finetune.config.paths import TINY_LLAMA
from finetune.config.recipe import Recipe
from finetune.errors import FinetuneError, PlanError, StorageNotComputeError
from finetune.estimator.gate import bound
from finetune.precision.planner import plan
from finetune.precision.settings import PrecisionConfig
from finetune.precision.stored.linear import StoredMixin, iter_stored, release, store
from finetune.training.model import load_model, meta_model
from finetune.training.run.preflight import check_settings
from tests.conftest import batch, slow_but
from tests.published import FINE_GRAINED, compressed, publish

SHORT = ("train.max_steps=3", "train.eval_steps=99", "eval.at_start=false", "data.max_rows=24",
         "eval.samples=false", "train.per_device_train_batch_size=2")  # fmt: skip


def recipe(name: str, *overrides: str) -> Recipe:
    return load_recipe(name, [*SHORT, *overrides])


def loaded(recipe: Recipe):
    config = recipe.config
    return load_model(config.model, plan(meta_model(config), config.precision).stored)


def tensors() -> list[torch.Tensor]:
    # By class: asking an object for its own would wake lazy modules that warn.
    return [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]


@pytest.mark.parametrize("weights", ["pretrained", "random"])
@pytest.mark.parametrize("scaling", ["rowwise", "tensorwise"])
def test_a_recipe_loads_its_base_as_codes(weights, scaling) -> None:
    chosen = recipe(
        "tiny_lora_fp8", f"model.weights={weights}", f"precision.scaling={scaling}",
        "precision.keep=[down_proj]",
    )  # fmt: skip
    model = loaded(chosen)
    linears = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    stored = dict(iter_stored(model))
    assert stored.keys() == {n for n in linears if "down_proj" not in n and n != "lm_head"}
    scales = {m.weight_scale.numel() == m.out_features for m in stored.values()}
    assert scales == {scaling == "rowwise"}
    config = chosen.config
    outline = meta_model(config)
    reported = bound(outline, plan(outline, config.precision), config.train).weights
    adapters = sum(p.numel() * 4 for p in outline.parameters() if p.requires_grad)
    held = sum(t.numel() * t.element_size() for t in model.parameters())
    held += sum(m.weight_scale.numel() * 4 for m in stored.values())
    assert reported == pytest.approx(held + adapters, abs=1)


@pytest.mark.slow
def test_no_plain_copy_of_a_held_weight_is_alive_after_loading() -> None:
    gc.collect()
    before = {id(t) for t in tensors()}
    model = loaded(recipe("tiny_lora_fp8"))
    gc.collect()
    new = [t for t in tensors() if id(t) not in before]
    shapes = {tuple(m.weight.shape) for _, m in iter_stored(model)}
    plain = [t for t in new if tuple(t.shape) in shapes and t.is_floating_point()]
    assert not [t for t in plain if not t.is_meta]
    codes = sum(tuple(t.shape) in shapes and t.dtype is torch.uint8 for t in new)
    assert codes == 28


def test_loaded_codes_are_those_of_a_model_stored_when_it_is_prepared(setup_backend) -> None:
    """A recipe loads codes; a script's plain model is cast. They are the same."""
    from peft import get_peft_model

    from finetune.training.scope import lora_config

    chosen = recipe("tiny_lora_fp8")
    mine = dict(iter_stored(loaded(chosen)))
    plain = AutoModelForCausalLM.from_pretrained(TINY_LLAMA, dtype=torch.float32)
    wrapped = get_peft_model(plain, lora_config(plain, chosen.config)).train()
    setup_backend("emulated", scaling="rowwise", frozen="fp8").prepare(wrapped)
    theirs = {
        n.removeprefix("base_model.model.").removesuffix(".base_layer"): m
        for n, m in wrapped.named_modules()
        if isinstance(m, StoredMixin)
    }
    assert mine.keys() == theirs.keys()
    for name, module in mine.items():
        assert torch.equal(module.weight, theirs[name].weight)
        assert torch.equal(module.weight_scale, theirs[name].weight_scale)


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """The packaged model as three others publish it in FP8."""
    root = tmp_path_factory.mktemp("published")
    plain = AutoModelForCausalLM.from_pretrained(TINY_LLAMA, dtype=torch.bfloat16)
    publish(plain, root / "blocks", FINE_GRAINED, "block", scale="weight_scale_inv")
    publish(plain, root / "channels", compressed("channel"), "row")
    load_in_fp8(str(TINY_LLAMA)).save_pretrained(root / "own")
    for folder in ("blocks", "channels", "own"):
        for file in (*TINY_LLAMA.glob("*token*"), *TINY_LLAMA.glob("*.jinja")):
            (root / folder / file.name).write_bytes(file.read_bytes())
    return root


@pytest.mark.slow
@pytest.mark.parametrize("layout", slow_but(["blocks"], ["blocks", "own"]))
def test_a_checkpoint_published_in_fp8_is_trained_over(published, tmp_path, layout) -> None:
    chosen = recipe("tiny_lora_fp8", f"model.name={published / layout}")
    report = train(chosen, out=tmp_path)
    receipt = report.receipt
    assert receipt.status == "proven"
    base = [row for row in receipt.layers if row.role == "base"]
    assert {row.fprop for row in base} == {"fp8"}
    assert receipt.precision["storage"] == {"fp8": 28}
    assert receipt.trainable["before"] == receipt.trainable["moved"] == 90112


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout"),
    slow_but(
        [("tiny_lora_bf16", "blocks")],
        [
            ("tiny_lora_bf16", "blocks"),
            ("fallback", "blocks"),
        ],
        pytest.mark.long,
    ),
)
def test_bf16_compute_over_published_codes(published, tmp_path, layout, name) -> None:
    """Its loss is that of the plain model: codes are read with their scales."""
    overrides = [f"model.name={published / layout}", "model.dtype=bfloat16"]
    if name == "fallback":
        name = "tiny_lora_fp8"
        overrides += ["precision.emulation=forbid", "precision.on_unsupported=bf16"]
    report = train(recipe(name, *overrides), out=tmp_path)
    assert report.receipt.status == "proven"
    assert report.receipt.fp8_flop_share == 0
    assert report.receipt.precision["storage"] == {"fp8": 28}
    plain = train(recipe("tiny_lora_bf16", "model.dtype=bfloat16"), out=tmp_path)
    assert report.eval_loss == pytest.approx(plain.eval_loss, rel=0.02)


def test_published_codes_are_not_rounded_to_four_bits(published, tmp_path) -> None:
    chosen = recipe("tiny_lora_bf16", f"model.name={published / 'own'}", "model.storage=nf4")
    with pytest.raises(FinetuneError, match="published in FP8"):
        train(chosen, out=tmp_path)


def test_a_model_stored_by_the_helper_is_saved_as_what_it_is(setup_backend, tmp_path) -> None:
    from peft import LoraConfig, get_peft_model

    plain = AutoModelForCausalLM.from_pretrained(TINY_LLAMA, dtype=torch.float32)
    wrapped = get_peft_model(plain, LoraConfig(r=4, target_modules=["q_proj"])).train()
    setup_backend("emulated", scaling="rowwise", frozen="fp8").prepare(wrapped)
    wrapped.unload().save_pretrained(tmp_path)
    teardown_fp8_mixed_precision_training()
    again = load_in_fp8(tmp_path, dtype=torch.float32)
    ids = torch.arange(12)[None]
    torch.testing.assert_close(again(ids).logits, wrapped.base_model.model.eval()(ids).logits)


@pytest.mark.slow
@pytest.mark.parametrize("weights", slow_but(["pretrained"], ["pretrained", "random"]))
def test_storage_in_fp8_with_bf16_compute(tmp_path, weights) -> None:
    chosen = recipe("tiny_lora_bf16", "model.storage=fp8", f"model.weights={weights}")
    receipt = train(chosen, out=tmp_path).receipt
    assert receipt.status == "proven"
    assert receipt.fp8_flop_share == 0
    assert receipt.precision["storage"] == {"fp8": 28}
    base = [row for row in receipt.layers if row.role == "base"]
    assert {row.fprop for row in base} == {"bf16"}
    assert receipt.precision["adapters"] == "28 of 28 fused with their base layer"


@pytest.mark.parametrize("layout", ["blocks", "own"])
def test_all_of_a_published_fp8_checkpoint_cannot_train(published, tmp_path, layout) -> None:
    chosen = recipe("tiny_full_fp8", f"model.name={published / layout}")
    with pytest.raises(FinetuneError, match=r"quantized|stored in FP8"):
        train(chosen, out=tmp_path)


@pytest.mark.long
def test_a_module_that_peft_trains_in_full_is_not_held(tmp_path) -> None:
    chosen = recipe(
        "tiny_lora_fp8", "lora.modules_to_save=[up_proj]", "lora.target_modules=[q_proj]"
    )
    receipt = train(chosen, out=tmp_path).receipt
    assert receipt.status == "proven"
    rows = [row for row in receipt.layers if "up_proj.modules_to_save" in row.name]
    assert rows
    assert {row.wgrad for row in rows} == {"bf16"}


def test_adapters_on_the_head_are_refused() -> None:
    chosen = recipe("tiny_lora_fp8", "lora.target_modules=[lm_head]")
    with pytest.raises(PlanError, match="adapters were requested on the output head"):
        check_settings(chosen.config, meta_model(chosen.config))


def test_frozen_weights_are_asked_of_a_full_fine_tune() -> None:
    chosen = recipe("tiny_full_fp8", "precision.scaling=rowwise", "precision.frozen=fp8")
    with pytest.raises(PlanError, match="no frozen layer"):
        plan(meta_model(chosen.config), chosen.config.precision)


@pytest.mark.slow
@pytest.mark.parametrize(("loaded", "scaling"), [(False, "rowwise"), (True, "tensorwise")])
def test_replicated_layers_share_their_codes(setup_backend, loaded, scaling) -> None:
    """PEFT's `layer_replication` makes layers that share weights, under adapters of their own."""
    from peft import LoraConfig, get_peft_model

    plain = AutoModelForCausalLM.from_pretrained(TINY_LLAMA, dtype=torch.float32)
    config = LoraConfig(r=4, target_modules="all-linear", layer_replication=[[0, 4], [0, 4]])
    expected = get_peft_model(plain, config).train()(**batch()).loss.item()
    if loaded:
        plain = load_in_fp8(str(TINY_LLAMA), dtype=torch.float32)
    else:
        plain = AutoModelForCausalLM.from_pretrained(TINY_LLAMA, dtype=torch.float32)
    model = get_peft_model(plain, config).train()
    accelerator = setup_backend("emulated", scaling=scaling, frozen="fp8")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    losses = []
    for _ in range(2):
        loss = model(**batch()).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    receipt = get_receipt()
    assert receipt.status == "proven"
    assert receipt.precision["storage"] == {"fp8": 56}
    held = [layer for _, layer in iter_stored(model)]
    assert len({layer.weight.data_ptr() for layer in held}) == 28
    assert len({id(layer.weight_scale) for layer in held}) == 28
    assert losses[0] == pytest.approx(expected, rel=0.02)


def test_methods_of_peft_that_read_the_weight_train_over_a_plain_base_alone(make_llama) -> None:
    """Nothing is stored under them, unless it is asked for: then it is an error that says so."""
    from peft import IA3Config, get_peft_model

    config = IA3Config(target_modules=["q_proj", "up_proj"], feedforward_modules=[])
    model = get_peft_model(make_llama(), config)
    plain = PrecisionConfig(compute="fp8", scaling="rowwise", frozen="bf16")
    assert plan(model, plain).fp8_layers
    with pytest.raises(StorageNotComputeError, match="PEFT's ia3 cannot adapt") as caught:
        plan(model, plain.model_copy(update={"frozen": "fp8"}))
    assert "q_proj" in caught.value.where
    assert "LoRA" in caught.value.fix


def trained_over(model: Any, config: Any) -> list[torch.Tensor]:
    """Logits and gradients of an adapted model in BF16, at the beginning and a step later."""
    import peft

    torch.manual_seed(0)
    model = peft.get_peft_model(model, config).train()
    torch.manual_seed(1)
    for p in model.parameters():
        if p.requires_grad:
            p.data.add_(0.01 * torch.randn_like(p))
    torch.manual_seed(2)
    with torch.autocast("cpu", torch.bfloat16):
        out = model(**batch())
    out.loss.backward()
    return [out.logits, *(p.grad for p in model.parameters() if p.grad is not None)]


VARIANTS = {
    "lora": {}, "dora": {"use_dora": True}, "aLoRA": {"alora_invocation_tokens": [5]},
    "replicated": {"layer_replication": [[0, 2], [1, 4]]},
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", VARIANTS)
def test_lora_over_codes_trains_as_over_their_weights(kind) -> None:
    """A model of `load_in_fp8` trains without a plan: PEFT itself is all that runs."""
    from peft import LoraConfig

    config = LoraConfig(target_modules=["q_proj", "up_proj"], **VARIANTS[kind])
    found = trained_over(load_in_fp8(str(TINY_LLAMA), dtype=torch.bfloat16), config)
    plain = load_in_fp8(str(TINY_LLAMA), dtype=torch.bfloat16)
    for _, layer in list(iter_stored(plain)):
        release(layer)
    del plain.config.quantization_config, plain.is_quantized, plain.quantization_method
    pairs = zip(found, trained_over(plain, config), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("method", ["IA3", "LoHa", "OFT", "Vera", "AdaLora"])
def test_other_methods_are_not_attached_to_codes(method) -> None:
    import peft

    settings = {"OFT": {"r": 0, "oft_block_size": 16}, "AdaLora": {"total_step": 10}}
    config = getattr(peft, f"{method}Config")(
        target_modules=["q_proj", "k_proj"], **settings.get(method, {})
    )
    with pytest.raises(StorageNotComputeError, match=f"(?i)PEFT's {method} cannot adapt weights"):
        peft.get_peft_model(load_in_fp8(str(TINY_LLAMA)), config)


def beginnings() -> dict[str, dict[str, Any]]:
    """Settings of LoRA whose adapters start from a layer's weight, or from its type."""
    from peft import LoftQConfig
    from peft.tuners.lora.config import BdLoraConfig, CordaConfig, KasaConfig

    blocks = BdLoraConfig(target_modules_bd_a=["o_proj"], nblocks=2, match_strict=False)
    names = ("pissa", "pissa_niter_4", "olora", "mica", "orthogonal")
    return {name: {"init_lora_weights": name} for name in names} | {
        "loftq": {"init_lora_weights": "loftq", "loftq_config": LoftQConfig()},
        "corda": {"init_lora_weights": "corda", "corda_config": CordaConfig()},
        "bdlora": {"use_bdlora": blocks},
        "kasa": {"kasa_config": KasaConfig()},
    }


@pytest.mark.parametrize("kind", beginnings())
def test_initial_values_made_of_codes_are_refused(kind) -> None:
    """PEFT and torch fail at these in words of their own, on a GPU LoftQ after it took codes."""
    from peft import LoraConfig, get_peft_model

    stored = load_in_fp8(str(TINY_LLAMA))
    with pytest.raises(StorageNotComputeError, match=r"cannot adapt weights") as caught:
        get_peft_model(stored, LoraConfig(target_modules=["o_proj"], **beginnings()[kind]))
    assert "load the model plain" in caught.value.fix


@pytest.mark.parametrize("kind", [k for k in beginnings() if k != "kasa"])  # PEFT's, alone or not
@pytest.mark.parametrize("unloaded", [False, True])
def test_a_second_adapter_starts_from_no_codes_either(
    make_llama, setup_backend, kind, unloaded
) -> None:
    """PEFT made its layers over plain weights, which were stored when the model was prepared."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(make_llama(), LoraConfig(r=4, target_modules=["o_proj"]))
    model = setup_backend("emulated", scaling="rowwise", frozen="fp8").prepare(model)
    config = LoraConfig(r=4, target_modules=["o_proj"], **beginnings()[kind])
    if unloaded:
        model = model.unload()
    with pytest.raises(StorageNotComputeError, match=r"cannot adapt weights"):
        get_peft_model(model, config) if unloaded else model.add_adapter("other", config)
    if unloaded:
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["o_proj"]))
    else:
        model.add_adapter("another", LoraConfig(r=4, target_modules=["o_proj"]))
        for _, layer in list(iter_stored(model)):
            release(layer)
        teardown_fp8_mixed_precision_training()
        if kind != "loftq":  # which needs a GPU
            model.add_adapter("plain again", config) if kind != "corda" else None
    model(**batch())


def test_gradients_of_codes_are_refused_before_they_are_asked_for() -> None:
    """As LoRA-GA does, and scripts that let all parameters train: torch's error named no FP8."""
    from peft import LoraConfig, get_peft_model
    from peft.tuners.lora.config import LoraGAConfig
    from peft.tuners.lora.loraga import preprocess_loraga

    stored = load_in_fp8(str(TINY_LLAMA))
    config = LoraConfig(
        target_modules=["o_proj"], init_lora_weights="lora_ga", lora_ga_config=LoraGAConfig()
    )
    with pytest.raises(StorageNotComputeError, match="cannot be trained"):
        preprocess_loraga(stored, config, lambda: None)
    with pytest.raises(StorageNotComputeError, match="lora_ga"):
        get_peft_model(stored, config)


def test_parameters_of_stored_layers_are_no_targets() -> None:
    from peft import LoraConfig, get_peft_model

    stored = load_in_fp8(str(TINY_LLAMA))
    config = LoraConfig(target_modules=["q_proj"], target_parameters=["0.mlp.down_proj.weight"])
    with pytest.raises(StorageNotComputeError, match="target_parameters") as caught:
        get_peft_model(stored, config)
    assert "by target_modules" in caught.value.fix


def test_codes_are_not_taken_for_numbers() -> None:
    layer = torch.nn.Linear(64, 32)
    store(layer)
    before, data = layer.weight.clone(), layer.weight.data
    for write in (lambda: data.copy_(torch.ones(32, 64)), lambda: data.add_(1)):
        with pytest.raises(StorageNotComputeError, match="cannot be merged"):
            write()
    for read in (lambda: torch.linalg.svd(data.T.float()), lambda: data.clone() * 0.5):
        with pytest.raises(StorageNotComputeError, match="as if they were numbers"):
            read()
    assert torch.equal(layer.weight, before)
    assert torch.equal(data.to("cpu"), before)
    assert data.view(torch.float8_e4m3fn).dtype is torch.float8_e4m3fn
