"""Adapters that begin from the base: equal to it at first, plain adapters of it in their files."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, get_peft_model
from rich.console import Console
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from finetune import load_recipe, train
from finetune.config.paths import TINY_LLAMA
from finetune.errors import ConfigError
from finetune.precision.planner import plan
from finetune.precision.stored import StoredMixin, iter_stored
from finetune.training import lora_init
from finetune.training.model import load_model, sketch
from finetune.training.preflight import check_settings
from finetune.training.reload import loaded, open_trained
from finetune.training.scope import lora_config
from tests.conftest import batch, slow_but
from tests.families import folder_of

QUIET = Console(quiet=True)
RECIPES = {"plain": "tiny_lora_bf16", "fp8": "tiny_lora_fp8", "nf4": "tiny_qlora_bf16"}
SPLITS = ("pissa", "pissa_niter_4", "olora")
QUICK = [("pissa", "plain"), ("pissa", "fp8"), ("loftq", "fp8")]
CASES = [
    *((kind, storage) for kind in SPLITS for storage in RECIPES),
    *(("loftq", storage) for storage in ("fp8", "nf4")),
]


def config_of(kind: str, storage: str, *overrides: str) -> Any:
    """Configuration of a packaged recipe whose adapters begin like this."""
    if storage == "nf4" and find_spec("bitsandbytes") is None:
        pytest.skip("needs bitsandbytes")
    given = [f"lora.init_lora_weights={kind}", *overrides]
    return load_recipe(RECIPES[storage], given, check_train=False).config


def adapted(config: Any, folder: Path | None = None) -> Any:
    """The recipe's model with its adapters as they begin."""
    base: Any = load_model(config.model, plan(sketch(config), config.precision).stored)
    adapters: Any = lora_config(base, config)
    model: Any = get_peft_model(base, adapters)
    lora_init.begin(model, config, folder)
    return model.eval()


@torch.no_grad()
def errors(model: Any, published: Any) -> list[float]:
    """Distance of each adapted weight, with its adapter, from the published one, by that's norm."""
    found = []
    for name in model.initial:
        layer, w = model.base_model.model.get_submodule(name), published.get_submodule(name).weight
        a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        base = lora_init.matrix_of(layer.get_base_layer())
        found.append(float((base + layer.scaling["default"] * b @ a - w).norm() / w.norm()))
    return found


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model.eval()(**batch(vocab=model.config.vocab_size)).logits.float()


@torch.no_grad()
def move(model: Any) -> None:
    """Change every adapter, as training does."""
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter += 0.02 * torch.randn_like(parameter)


@pytest.fixture(scope="module")
def published() -> Any:
    return AutoModelForCausalLM.from_pretrained(TINY_LLAMA, dtype=torch.float32)


@pytest.mark.parametrize(("kind", "storage"), slow_but(QUICK, CASES))
@torch.no_grad()
def test_the_first_weights_are_those_of_the_base(kind, storage, published) -> None:
    config = config_of(kind, storage)
    model = adapted(config)
    found = errors(model, published)
    if storage == "plain":
        assert max(found) < 1e-6
        torch.testing.assert_close(logits(model), logits(published), atol=1e-4, rtol=0)
        return
    stored: Any = load_model(config.model, plan(sketch(config), config.precision).stored)
    for error, name in zip(found, model.initial, strict=True):
        w, layer = published.get_submodule(name).weight, stored.get_submodule(name)
        usual = float((lora_init.matrix_of(layer) - w).norm() / w.norm())
        # What is left to store is smaller, or a part of its error is in the adapter.
        assert 0 < error < (0.95 if kind != "olora" else 1.1) * usual, name
    if kind != "loftq":
        with model.disable_adapter():
            assert (logits(model) - logits(published)).norm() > 0.2 * logits(published).norm()


@pytest.mark.parametrize(
    ("kind", "storage", "more"),
    [
        ("pissa", "fp8", ["lora.use_rslora=true"]),
        pytest.param("olora", "plain", [], marks=pytest.mark.slow),
        pytest.param("loftq", "nf4", [], marks=pytest.mark.slow),
    ],
)
def test_files_are_plain_adapters_of_the_published_weights(
    kind, storage, more, published, tmp_path
) -> None:
    model = adapted(config_of(kind, storage, *more))
    move(model)
    model.save_pretrained(str(tmp_path))
    base = AutoModelForCausalLM.from_pretrained(TINY_LLAMA, dtype=torch.float32)
    stock: Any = PeftModel.from_pretrained(base, str(tmp_path))
    assert stock.peft_config["default"].init_lora_weights is True
    merged = stock.merge_and_unload()
    for name, (a0, b0) in model.initial.items():
        layer = model.base_model.model.get_submodule(name)
        a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        change = layer.scaling["default"] * (b @ a - b0 @ a0)
        was = published.get_submodule(name).weight
        torch.testing.assert_close(
            merged.get_submodule(name).weight - was, change, atol=1e-5, rtol=0
        )


@pytest.mark.parametrize(
    ("kind", "storage"), slow_but([("pissa_niter_4", "fp8")], [("olora", "plain"), CASES[-1]])
)
def test_what_goes_on_from_a_file_is_the_same_to_the_bit(kind, storage, tmp_path) -> None:
    config = config_of(kind, storage)
    model = adapted(config)
    move(model)
    model.save_pretrained(str(tmp_path))
    again = adapted(config, tmp_path)
    again.load_adapter(str(tmp_path), "default")
    state, other = model.state_dict(), again.state_dict()
    assert state.keys() == other.keys()
    for key, value in state.items():
        assert torch.equal(value.view(torch.uint8), other[key].view(torch.uint8)), key
    with pytest.raises(ConfigError, match="another initialization"):
        adapted(config_of(kind, storage, "lora.r=4"), tmp_path)


def test_layers_kept_in_high_precision_have_no_error_to_begin_as(tmp_path) -> None:
    model = adapted(config_of("loftq", "fp8", "precision.keep=[q_proj]"))
    kept = model.base_model.model.model.layers[0].self_attn.q_proj
    assert not isinstance(kept.base_layer, StoredMixin)
    assert kept.lora_A["default"].weight.any()
    assert not kept.lora_B["default"].weight.any()
    model.save_pretrained(str(tmp_path))


@pytest.mark.parametrize(
    ("recipe", "overrides", "what"),
    [
        ("tiny_lora_bf16", ["loftq"], "a base that has no rounding error"),
        ("tiny_lora_fp8", ["loftq", "model.weights=random"], "a base that has no rounding error"),
        ("tiny_lora_fp8", ["pissa", "lora.r=129"], "at rank 129, and"),
        ("tiny_lora_fp8", ["olora", "train.fsdp=full_shard"], "requested under FSDP"),
    ],
)
def test_what_it_cannot_be_had_with_is_refused(recipe, overrides, what) -> None:
    kind, *more = overrides
    given = [f"lora.init_lora_weights={kind}", *more]
    config = load_recipe(recipe, given, check_train=False).config
    with pytest.raises(ConfigError, match=re.escape(what)) as caught:
        check_settings(config, sketch(config))
    assert caught.value.fix


def test_experts_are_not_one_matrix(tmp_path) -> None:
    given = [f"model.name={folder_of('qwen3_moe', tmp_path)}", "lora.init_lora_weights=pissa"]
    config = load_recipe("tiny_lora_fp8", given, check_train=False).config
    with pytest.raises(ConfigError, match="adapters that are on no linear layer") as caught:
        check_settings(config, sketch(config))
    targets = caught.value.fix.rpartition("target_modules=")[2]
    given.append(f"lora.target_modules={targets}")
    config = load_recipe("tiny_lora_fp8", given, check_train=False).config
    check_settings(config, sketch(config))


@pytest.mark.long
def test_a_run_trains_goes_on_and_is_reloaded(tmp_path) -> None:
    overrides = ["lora.init_lora_weights=pissa", "train.max_steps=6", "train.save_strategy=steps"]
    overrides += ["train.save_steps=3", "data.prompts=[hello]", "data.max_rows=48"]
    overrides += ["train.warmup_steps=0", "train.eval_strategy=no", "train.logging_steps=1"]
    recipe = load_recipe("tiny_lora_fp8", overrides)
    whole = train(recipe, out=tmp_path, console=QUIET)
    assert whole.receipt.status == "proven"
    assert (whole.final_loss or 9) < 0.8 * (whole.first_loss or 0)
    checkpoint = whole.folder / "checkpoints" / "checkpoint-3"
    overrides.append(f"train.resume_from_checkpoint={checkpoint}")
    resumed = train(load_recipe("tiny_lora_fp8", overrides), out=tmp_path, console=QUIET)
    file = Path("model") / lora_init.WEIGHTS
    a, b = (load_file(report.folder / file) for report in (whole, resumed))
    assert a.keys() == b.keys()
    assert all(torch.equal(a[key], b[key]) for key in a)
    with loaded(open_trained(whole.folder)) as (model, _):
        assert any(True for _ in iter_stored(model))
        rows = batch(vocab=model.config.vocab_size)
        stock = AutoModelForCausalLM.from_pretrained(TINY_LLAMA, dtype=torch.float32)
        plain = PeftModel.from_pretrained(stock, str(whole.folder / "model")).eval()
        with torch.no_grad():
            losses = [m(**rows).loss.item() for m in (model, plain)]
        assert losses[0] == pytest.approx(losses[1], rel=0.02)
