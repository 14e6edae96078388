"""QLoRA: a base in NF4 under adapters is trained, proven, reported; the impossible is refused."""

from __future__ import annotations

import json
import weakref

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from torch import nn

pytest.importorskip("bitsandbytes")

from finetune import load_recipe, setup_fp8_mixed_precision_training, train
from finetune.config.paths import TINY_LLAMA
from finetune.errors import (
    ConfigError,
    MissingExtraError,
    PlanError,
    PrecisionError,
    StorageNotComputeError,
    install_hint,
)
from finetune.estimator.gate import bound
from finetune.precision.planner import plan
from finetune.precision.stored.linear import stored_as, stored_weights
from finetune.storage import nf4
from finetune.storage.nf4 import nf4_bytes
from finetune.training.model import load_model, meta_model
from finetune.training.run.preflight import check_settings, preflight
from finetune.training.scope import lora_config
from finetune.units import GIB
from tests.conftest import CPU, batch

QUIET = Console(quiet=True)
LAYERS = 28
SHORT = (
    "train.max_steps=3", "train.warmup_steps=0", "train.eval_strategy=no", "eval.samples=false",
    "data.max_rows=24", "train.per_device_train_batch_size=2",
)  # fmt: skip
METHODS = ("qlora", "lora")


@pytest.fixture(scope="module")
def report(made_once):
    """A function that gives three steps of QLoRA, or of its LoRA sibling."""

    def of(name: str):
        recipe = load_recipe(f"tiny_{name}_bf16", SHORT)
        return made_once(name, lambda folder: train(recipe, out=folder, console=QUIET))

    return of


@pytest.fixture(scope="module")
def qlora(report):
    return report("qlora")


@pytest.fixture(scope="module")
def lora(report):
    return report("lora")


@pytest.fixture
def base():
    """The packaged model with its base in NF4."""
    return load_model(load_recipe("tiny_qlora_bf16", check_train=False).config.model)


def held_layers(model) -> list:
    return [module for module in model.modules() if stored_as(module)]


def held_bytes(layer) -> int:
    """Bytes of codes, 8-bit absmaxes and their float32 scales."""
    state = layer.weight.quant_state
    scales = state.state2.absmax
    return layer.weight.nbytes + state.absmax.nbytes + scales.nbytes


# --------------------------------------------------------------------------------------- training


@pytest.mark.long
def test_it_ends_where_lora_over_a_plain_base_ends(tmp_path) -> None:
    longer = (
        "train.max_steps=20",
        "train.eval_steps=99",
        "eval.at_start=false",
        "data.prompts=[hello]",
    )
    recipes = [load_recipe(f"tiny_{name}_bf16", longer) for name in METHODS]
    qlora, lora = (train(recipe, out=tmp_path, console=QUIET) for recipe in recipes)
    assert qlora.eval_loss == pytest.approx(lora.eval_loss, rel=0.03)
    assert qlora.eval_loss != lora.eval_loss
    assert qlora.final_loss < 0.5 * qlora.first_loss
    assert qlora.samples[0].answer


@pytest.mark.slow
def test_the_receipt_proves_it_and_tells_the_storage(qlora) -> None:
    receipt = json.loads((qlora.folder / "receipt.json").read_text())
    assert receipt["status"] == "proven"
    assert receipt["precision"]["ran"] == "bf16"
    assert receipt["precision"]["storage"] == {"nf4": LAYERS}
    assert f"{LAYERS} weights stored in nf4" in qlora.receipt.headline
    base = [row for row in receipt["layers"] if row["role"] == "base"]
    assert len(base) == LAYERS
    assert {(row["fprop"], row["wgrad"]) for row in base} == {("bf16", "none")}
    assert sum(row["dgrad"] == "bf16" for row in base) == LAYERS - 3, "the first block's q, k, v"
    assert all("weight stored in nf4" in row["reason"] for row in base)
    adapters = [row for row in receipt["layers"] if row["role"] == "adapter"]
    assert {row["wgrad"] for row in adapters} == {"bf16"}
    assert not [row for row in adapters if "nf4" in row["reason"]]


@pytest.mark.slow
def test_the_adapter_is_an_ordinary_float32_one(qlora, lora) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    folders = [run.folder / "model" for run in (qlora, lora)]
    ours, plain = (load_file(folder / "adapter_model.safetensors") for folder in folders)
    assert {k: (v.shape, v.dtype) for k, v in ours.items()} == {
        k: (v.shape, v.dtype) for k, v in plain.items()
    }
    assert all(v.dtype == torch.float32 for v in ours.values())
    assert any(not torch.equal(v, v.bfloat16().float()) for v in ours.values())
    losses = []
    for folder in folders:
        model = AutoModelForCausalLM.from_pretrained(TINY_LLAMA, dtype=torch.float32)
        rows = batch(vocab=model.config.vocab_size)
        losses.append(PeftModel.from_pretrained(model, folder)(**rows).loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=0.05)


@pytest.mark.long
def test_resuming_is_bit_identical(tmp_path) -> None:
    overrides = ["train.max_steps=4", "train.save_strategy=steps", "train.save_steps=2"]
    overrides += ["data.prompts=[hello]", "data.max_rows=48", "train.eval_strategy=no"]
    overrides += ["train.warmup_steps=0"]
    whole = train(load_recipe("tiny_qlora_bf16", overrides), out=tmp_path, console=QUIET)
    checkpoint = whole.folder / "checkpoints" / "checkpoint-2"
    overrides.append(f"train.resume_from_checkpoint={checkpoint}")
    resumed = train(load_recipe("tiny_qlora_bf16", overrides), out=tmp_path, console=QUIET)
    a, b = (load_file(r.folder / "model" / "adapter_model.safetensors") for r in (whole, resumed))
    assert a.keys() == b.keys()
    assert all(torch.equal(a[key], b[key]) for key in a)


# ---------------------------------------------------------------------- what libraries do to it


@pytest.mark.parametrize("kept", [True, False])
def test_trl_casts_adapters_to_bf16_and_we_keep_them(base, tmp_path, kept) -> None:
    """The day TRL stops, `masters_kept` can go."""
    from datasets import Dataset
    from peft import get_peft_model
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    model = get_peft_model(base, lora_config(base, load_recipe("tiny_qlora_bf16").config))
    for p in model.parameters():
        if p.requires_grad:
            torch.nn.init.normal_(p)  # PEFT draws them in the base's compute type
    before = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    assert {p.dtype for p in before.values()} == {torch.float32}

    def build() -> None:
        args = SFTConfig(output_dir=str(tmp_path), report_to="none", use_cpu=True, bf16=True)
        rows = Dataset.from_list([{"text": "The harbour is calm."}] * 4)
        tokenizer = AutoTokenizer.from_pretrained(TINY_LLAMA)
        SFTTrainer(model=model, args=args, train_dataset=rows, processing_class=tokenizer)

    if kept:
        with nf4.masters_kept(model):
            build()
    else:
        build()
    after = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert after.keys() == before.keys()
    same = all(torch.equal(after[name].float(), before[name]) for name in before)
    types = {p.dtype for p in after.values()}
    assert (same, types) == ((True, {torch.float32}) if kept else (False, {torch.bfloat16}))


def test_an_evaluation_leaves_the_gradients_alone(base) -> None:
    """bitsandbytes repacks weights for a kernel without gradient, on CPUs with AVX512-BF16."""
    rows = batch(vocab=base.config.vocab_size)

    def gradient() -> torch.Tensor:
        embedded = base.get_input_embeddings()(rows["input_ids"]).detach().requires_grad_(True)
        base.train()(inputs_embeds=embedded, labels=rows["labels"]).loss.backward()
        assert embedded.grad is not None
        return embedded.grad

    before = gradient()
    with torch.no_grad():
        base.eval()(**rows)
    assert torch.equal(gradient(), before)
    assert not [m for m in held_layers(base) if m.support_avx512bf16_for_cpu]


# --------------------------------------------------------------------------------- memory, loading


@pytest.mark.parametrize("numel", [64, 4096, 64 * 256 * 3 + 128])
def test_stored_bytes_are_those_of_bitsandbytes(numel) -> None:
    from bitsandbytes.functional import quantize_4bit

    w = torch.randn(numel // 64, 64)
    codes, state = quantize_4bit(w, blocksize=64, compress_statistics=True, quant_type="nf4")
    assert nf4_bytes(numel) == codes.nbytes + state.absmax.nbytes + state.state2.absmax.nbytes


def bound_of(config):
    model = meta_model(config)
    storage = config.model.storage
    return bound(model, plan(model, config.precision), config.train, storage=storage)


def test_the_memory_bound_is_what_the_model_holds(base) -> None:
    config = load_recipe("tiny_qlora_bf16").config
    need = bound_of(config)
    layers = held_layers(base)
    plain = {id(layer.weight) for layer in layers}
    rest = sum(p.nbytes for p in base.parameters() if id(p) not in plain)
    adapters = need.trainable * 4
    assert need.weights == sum(map(held_bytes, layers)) + rest + adapters
    lora = load_recipe("tiny_lora_bf16").config
    assert need.parameters == bound_of(lora).parameters
    eight = load_recipe("llama_8b_qlora_bf16", ["model.weights=random"]).config
    assert bound_of(eight).weights / GIB == pytest.approx(5.3, abs=0.1)


def test_the_meta_model_has_what_transformers_holds(base) -> None:
    held = nf4.stored_linears(meta_model(load_recipe("tiny_qlora_bf16").config))
    names = {name.removesuffix(".base_layer").removeprefix("base_model.model.") for name in held}
    assert names == {name for name, module in base.named_modules() if stored_as(module)}
    assert stored_weights(base) == {"nf4": LAYERS}
    assert base.lm_head.weight.dtype == torch.float32


def test_random_weights_are_held_as_soon_as_they_are_made(monkeypatch) -> None:
    """There is one plain layer at a time, and nothing stays on meta."""
    from bitsandbytes.functional import dequantize_4bit

    made: list[weakref.ref[nn.Linear]] = []
    alive, original = [], nn.Linear.reset_parameters

    def counted(self) -> None:
        original(self)
        if not self.weight.is_meta:
            made.append(weakref.ref(self))
            alive.append(sum(ref() is not None for ref in made))

    monkeypatch.setattr(nn.Linear, "reset_parameters", counted)
    overrides = ["model.weights=random", "model.dtype=bfloat16"]
    model = load_model(load_recipe("tiny_qlora_bf16", overrides, check_train=False).config.model)
    assert alive == [1] * LAYERS
    assert not [t for t in (*model.parameters(), *model.buffers()) if t.is_meta]
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16, torch.uint8}
    layer = model.model.layers[0].mlp.up_proj
    w = layer.weight
    assert not w.requires_grad
    std = dequantize_4bit(w.data, w.quant_state).float().std().item()
    assert std == pytest.approx(model.config.initializer_range, rel=0.05)
    assert torch.isfinite(model(**batch(vocab=model.config.vocab_size)).loss)


@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
def test_random_gpt2_whose_weights_are_stored_transposed(tmp_path) -> None:
    from transformers import GPT2Config

    GPT2Config(n_embd=64, n_layer=2, n_head=2, n_positions=64, vocab_size=272).save_pretrained(
        tmp_path
    )
    overrides = [f"model.name={tmp_path}", "model.weights=random"]
    config = load_recipe("tiny_qlora_bf16", overrides, check_train=False).config
    model = load_model(config.model)
    layer = model.transformer.h[0].mlp.c_fc
    assert tuple(layer.weight.quant_state.shape) == (256, 64)
    assert len(held_layers(model)) == len(nf4.stored_linears(meta_model(config))) == 8
    model(**batch()).loss.backward()
    assert model.lm_head.weight is model.transformer.wte.weight


# --------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("overrides", "error", "said"),
    [
        (["~lora"], ConfigError, ["no section lora", "_qlora_"]),
        (
            ["precision.compute=fp8", "precision.emulation=allow"],
            PrecisionError,
            ["precision.compute=fp8", "precision.frozen=fp8"],
        ),
        (["precision.compute=fp16"], PrecisionError, ["FP16", "precision.compute=bf16"]),
        (["precision.compute=fp32"], PrecisionError, ["FP32", "precision.compute=bf16"]),
        (["train.fsdp=full_shard"], ConfigError, ["FSDP", "~train.fsdp"]),
        (["lora.bias=all"], ConfigError, ["biases", "~lora.bias"]),
        (["lora.modules_to_save=[up_proj]"], PlanError, ["train in full", "mlp.up_proj"]),
        (["precision.map.attn=fp32"], PlanError, ["fp32", "q_proj", "precision.map"]),
    ],
)
def test_what_cannot_work_is_refused_before_loading(overrides, error, said) -> None:
    config = load_recipe("tiny_qlora_bf16", overrides).config
    with pytest.raises(error) as caught:
        check_settings(config, meta_model(config))
    for part in ("model.storage=nf4", *said):
        assert part in str(caught.value)


@pytest.mark.slow
def test_a_checkpoint_of_four_bits_trains_under_adapters_only(base, tmp_path) -> None:
    from transformers import AutoTokenizer

    base.save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(TINY_LLAMA).save_pretrained(tmp_path / "model")
    overrides = [*SHORT, "train.max_steps=2", f"model.name={tmp_path / 'model'}"]
    report = train(load_recipe("tiny_lora_bf16", overrides), out=tmp_path, console=QUIET)
    assert report.receipt.precision["storage"] == {"nf4": LAYERS}
    saved = load_file(report.folder / "model" / "adapter_model.safetensors")
    assert any(not torch.equal(v, v.bfloat16().float()) for v in saved.values())
    with pytest.raises(ConfigError, match=r"stored quantized[\s\S]*quantization_config"):
        train(load_recipe("tiny_lora_bf16", [*overrides, "~lora"]), out=tmp_path, console=QUIET)


def test_missing_bitsandbytes_is_named(monkeypatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(MissingExtraError, match=r"model\.storage=nf4 needs bitsandbytes") as caught:
        preflight(load_recipe("tiny_qlora_bf16").config, CPU)
    assert caught.value.fix == install_hint("bnb")


@pytest.mark.parametrize(
    "settings", [{"emulation": "allow"}, {"on_unsupported": "bf16"}], ids=["fp8", "bf16 stands in"]
)
@pytest.mark.filterwarnings("ignore:.*BF16")
def test_the_helper_refuses_it(base, settings) -> None:
    accelerator = setup_fp8_mixed_precision_training("emulated", cpu=True, **settings)
    with pytest.raises(StorageNotComputeError, match="loaded quantized"):
        accelerator.prepare(base)


def test_a_model_without_layers_to_hold_is_refused(make_llama) -> None:
    with pytest.raises(PlanError, match="no layer of this model"):
        nf4.prepare(make_llama())


# ---------------------------------------------------------------------------------------- telling
