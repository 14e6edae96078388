"""A rehearsal on tensors without memory takes the memory that the run takes."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules import module as module_hooks
from torch.utils._python_dispatch import _get_current_dispatch_mode

from finetune import load_recipe
from finetune.config.methods import method_of
from finetune.config.paths import list_recipes
from finetune.config.recipe import with_overrides
from finetune.config.schema import RunConfig
from finetune.config.train_section import decides_checkpointing, with_checkpointing
from finetune.errors import RehearsalError
from finetune.estimator.changes import length_of, with_length
from finetune.estimator.gate import bound_of
from finetune.estimator.memory.footprint import tensor_footprint
from finetune.estimator.predict import in_eager_kernels, predict_fast
from finetune.estimator.speed.step_parts import StepPart, classes_of, in_layer
from finetune.estimator.trace import fake_cuda, rehearsal
from finetune.estimator.trace.rehearsal import Rehearsal, rehearse
from finetune.estimator.trace.stand_ins import SteadyScale, as_four_bit
from finetune.estimator.trace.trace import layer_of
from finetune.hardware.gpus import machine_of
from finetune.hardware.requirements import Resolution, engine_verdict
from finetune.precision.cases import head
from finetune.precision.numbers import weights
from finetune.precision.planner import plan
from finetune.storage.pretrained import load_shape
from finetune.training.helper.varlen import runs_on_cuda
from finetune.training.model import first_layers, meta_model
from tests.benchmarks import predicted_memory
from tests.conftest import H100, slow_but
from tests.estimator.test_trace import patched
from tests.families import folder_of

GIB = 2**30
CASES = {case.name: case for case in predicted_memory.CASES}
QUICK_RECIPES = ("tiny_full_bf16", "llama_8b_full_fp8", "llama_8b_lora_fp8", "bdh_tiny_full_fp8")
SMALLEST = (
    "tiny LoRA 8, frozen FP8",
    "tiny QLoRA nf4",
    "tiny full fp16, accumulation 4",
    "grpo tiny full fp8",
    "distill tiny full fp8, accumulation 2",
    "BDH tiny full tensorwise",
)


@pytest.mark.parametrize(
    "name",
    [*slow_but([], SMALLEST[:2]), *slow_but([], SMALLEST[2:], pytest.mark.long)],
)
def test_predicted_is_what_a_real_run_holds(name, tmp_path) -> None:
    row = predicted_memory.run(CASES[name], tmp_path)
    assert row.what == "peak of live tensors in step 3"
    assert abs(row.error) < 0.01


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["tiny_qlora_bf16", "tiny_lora_fp8"])
def test_dora_over_a_stored_base_is_predicted(recipe, tmp_path) -> None:
    """It dequantizes each weight for a norm; compiled, its identity is read from nothing."""
    given = ("lora.use_dora=true",)
    row = predicted_memory.run(predicted_memory.Case(recipe, recipe, given), tmp_path)
    assert abs(row.error) < 0.01
    assert predict_fast(load_recipe(recipe, given).config, machine_of("H100")).timing is not None


# ------------------------------------------------------------------------------------- for a GPU


def there(config: RunConfig, backend: str = "") -> Resolution:
    """The precision on an H100, by a backend that need not be installed."""
    precision = config.precision
    if precision.compute == "fp8":
        precision = precision.model_copy(update={"backend": backend})
    return Resolution(precision, config.precision, "for a test")


def on_h100(config: RunConfig, backend: str = "torchao", layers: int = 2) -> Rehearsal:
    if decides_checkpointing(config):
        config = with_checkpointing(config, True)
    return rehearse(config, H100, there(config, backend), layers=layers)


def engine(name: str) -> str:
    """What would run its FP8 there; nothing for a BF16 recipe."""
    precision = load_recipe(name).config.precision
    has = [e for e in ("torchao", "te") if engine_verdict(e, precision)]
    return has[0] if precision.compute == "fp8" else ""


@pytest.mark.parametrize(
    "optimizer", slow_but(["adamw_torch"], ["adamw_torch", "adamw_torch_8bit"])
)
def test_weights_are_parameters_and_buffers_alone(optimizer) -> None:
    """To the byte: no batch, and no table that an optimizer of 8 bits looks its codes up in."""
    settings = ("model.dtype=bfloat16", f"train.optim={optimizer}")
    config = load_recipe("tiny_full_bf16", settings).config
    model = meta_model(config, layers=2)
    kinds = tensor_footprint(on_h100(config).trace).kinds
    assert kinds["weights"] == sum(x.nbytes for x in (*model.parameters(), *model.buffers()))


# One of each model, method and engine: the others differ from these in sizes.
SAME = ("llama_1b_", "gpt2_350m_", "bdh_100m_", "llama_8b_lora32_", "tiny_lora_", "qwen_7b_full_")
SAME += ("gemma3_12b_", "mistral_", "phi4_", "qwen3_0_6b_", "qwen3_4b_", "qwen3_8b_full_")
ENGINES = [(name, engine(name)) for name in list_recipes() if not name.startswith(SAME)]
QUICK_ENGINES = [pair for pair in ENGINES if pair[0] in QUICK_RECIPES]
ENGINES += [(name, "te") for name in ("gpt2_124m_full_fp8", "llama_8b_lora_fp8")]


@pytest.mark.parametrize(("name", "backend"), slow_but(QUICK_ENGINES, ENGINES, pytest.mark.long))
def test_every_recipe_can_be_rehearsed_for_a_gpu(name, backend) -> None:
    """And holds weights, gradients and states at least."""
    config = load_recipe(name).config
    found = on_h100(config, backend)
    model = meta_model(config, layers=2)
    the_plan = plan(model, there(config, backend).precision)
    least = bound_of(config, model, the_plan)
    peaks = tensor_footprint(found.trace)
    assert peaks.tensors >= least.total
    kinds = peaks.phases["optimizer"]
    assert kinds["weights"] >= least.weights * 0.999
    assert kinds["gradients"] == round(least.gradients)
    assert kinds["optimizer"] >= least.optimizer * 0.999
    assert kinds["optimizer"] <= least.optimizer * 1.001 + 2**20
    assert (found.parameters, found.trainable) == (least.parameters, least.trainable)
    train = config.train
    rows = train["per_device_train_batch_size"] * method_of(train).texts
    assert found.tokens == rows * length_of(config)
    products = {"aten.mm.default", "aten._scaled_mm.default", "finetune_estimator.fp8_mm.default"}
    names = {op.name for op in found.trace.ops}
    assert names & products
    if backend and the_plan.fp8_layers:
        assert names & {"aten._scaled_mm.default", "finetune_estimator.fp8_mm.default"}


def test_transformer_engine_keeps_one_copy_of_codes_where_the_gpu_needs_no_transpose() -> None:
    """On Hopper two: its FP8 units contract along the last dimension alone."""
    config = load_recipe("tiny_full_fp8", ["model.dtype=bfloat16"]).config

    def peak(gpu: str) -> int:
        found = rehearse(config, machine_of(gpu).device, there(config, "te"), layers=1)
        return sum(tensor_footprint(found.trace).phases["forward"].values())

    assert peak("B200") < peak("H100")


@pytest.mark.slow
def test_an_fp8_head_is_stored_and_multiplied_in_fp8_and_counted_as_the_head(monkeypatch) -> None:
    monkeypatch.setattr(head, "WORDS", 768)  # two slabs
    plain, low = (
        on_h100(load_recipe("tiny_lora_fp8", ["model.dtype=bfloat16", *more]).config, layers=1)
        for more in ([], ["precision.map.output=fp8"])
    )
    saved = plain.trace.initial_bytes - low.trace.initial_bytes
    assert saved == 1536 * 128 - 4 * 1536, (
        "a byte of two for each number, and a scale for each word"
    )
    peaks = [tensor_footprint(found.trace).phases["backward"] for found in (plain, low)]
    assert sum(peaks[1].values()) < sum(peaks[0].values())
    named = zip(low.trace.ops, classes_of(low.trace.ops), strict=True)
    of_head = [op for op, part in named if part is StepPart.HEAD and "mm" in op.name]
    assert [op.name for op in of_head] == ["aten._scaled_mm.default"] * 4


def test_layers_in_four_bits_get_adapters() -> None:
    """Their class has a forward of its own, for which PEFT has adapters of its own."""
    pytest.importorskip("bitsandbytes")
    config = load_recipe("llama_8b_qlora_bf16").config
    model = meta_model(config, as_four_bit, layers=1)
    assert any("lora_A" in name for name, _ in model.named_parameters())


def phases(config: RunConfig, layers: int, backend: str = "torchao") -> dict[str, int]:
    found = tensor_footprint(on_h100(config, backend, layers).trace)
    return {name: sum(kinds.values()) for name, kinds in found.phases.items()}


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("llama_8b_full_fp8", "te"), ("llama_8b_lora_fp8", "torchao"), ("llama_8b_qlora_bf16", ""),
    ],
)  # fmt: skip
def test_two_and_four_layers_tell_of_eight(name, backend) -> None:
    config = load_recipe(name).config
    two, four, eight = (phases(config, n, backend) for n in (2, 4, 8))
    for phase, nbytes in eight.items():
        expected = two[phase] + 3 * (four[phase] - two[phase])
        assert expected == pytest.approx(nbytes, rel=1e-3), phase


@pytest.mark.slow
def test_checkpointing_and_accumulation_act() -> None:
    def peaks(*changes: str) -> dict[str, int]:
        return phases(load_recipe("llama_1b_full_bf16", changes).config, 4)

    off = peaks("train.gradient_checkpointing=false", "train.gradient_accumulation_steps=1")
    on = peaks("train.gradient_checkpointing=true", "train.gradient_accumulation_steps=1")
    assert on["forward"] < 0.75 * off["forward"]
    several = peaks("train.gradient_checkpointing=true", "train.gradient_accumulation_steps=4")
    model = meta_model(load_recipe("llama_1b_full_bf16").config, layers=4)
    gradients = sum(p.numel() * p.element_size() for p in model.parameters())
    waiting = several["forward"] - on["forward"] - gradients
    assert 0 < waiting < 2**20  # three more batches of ids


def test_a_loss_scale_is_launched_as_the_real_one() -> None:
    """One multiplication of the loss, and one pass over the gradients."""
    config = load_recipe("tiny_full_bf16", ["precision.compute=fp16"]).config
    found = on_h100(config)
    unscaled = [op for op in found.trace.ops if "non_finite_check_and_unscale" in op.name]
    assert len(unscaled) == 1
    assert sum(o.nbytes for o in unscaled[0].inputs) == 4 * found.trainable + 8
    halves = {o.dtype for op in found.trace.ops for o in op.outputs}
    assert torch.float16 in halves
    assert torch.bfloat16 not in halves

    class Real(torch.amp.GradScaler):
        pass

    weight = nn.Parameter(torch.ones(3))
    gradients = []
    for scaler in (SteadyScale(), Real("cpu", init_scale=SteadyScale().get_scale())):
        optimizer = torch.optim.SGD([weight], lr=0.0)
        any_scaler: Any = scaler
        any_scaler.scale((weight * 3).sum()).backward()
        any_scaler.step(optimizer)
        any_scaler.update()
        gradients.append(weight.grad)
        optimizer.zero_grad()
    assert torch.equal(*gradients)
    assert gradients[0].tolist() == [3, 3, 3]


# ------------------------------------------------------------------------------- leaving no trace


@pytest.mark.slow
def test_a_rehearsal_leaves_nothing_behind() -> None:
    """No hook, no model: the tenth is as fast as the first, and as small."""
    config = load_recipe("tiny_full_bf16").config

    def left() -> tuple[int, int]:
        gc.collect()
        fakes = sum(type(x) is FakeTensor for x in gc.get_objects())
        return len(module_hooks._global_forward_hooks), fakes

    on_h100(config)
    before = left()
    on_h100(config)
    assert left() == before


@pytest.mark.parametrize("where", ["check_settings", "rehearsal_trainer", "Recorder"])
def test_nothing_is_left_when_a_rehearsal_fails(where, monkeypatch) -> None:
    before = patched()

    def fails(*args: Any, **kwargs: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(f"{rehearsal.__name__}.{where}", fails)
    with pytest.raises((RehearsalError, ZeroDivisionError)):
        on_h100(load_recipe("tiny_full_bf16", ["train.optim=adamw_torch_8bit"]).config)
    assert all(a is b for a, b in zip(before, patched(), strict=True))
    assert _get_current_dispatch_mode() is None
    assert type(torch.ones(1)) is not FakeTensor
    assert weights.SLAB
    assert torch.compiler.set_stance("default") is not None


# ------------------------------------------------------------------------------------- fewer layers


def test_a_meta_model_of_the_first_layers() -> None:
    config = load_recipe("llama_8b_lora_bf16").config
    two, all_of_it = meta_model(config, layers=2), meta_model(config)
    names = {name for name, _ in two.named_parameters()}
    assert names == {
        name
        for name, _ in all_of_it.named_parameters()
        if ".layers." not in name or int(name.split(".layers.")[1].split(".")[0]) < 2
    }
    assert two.config.num_hidden_layers == 2
    assert meta_model(config, layers=99).config.num_hidden_layers == 32


@pytest.mark.parametrize("kind", ["gemma2", "qwen2", "gpt2", "smollm3", "gpt_oss", "mixtral"])
def test_lists_with_an_entry_for_each_layer_are_cut_too(kind) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = AutoConfig.for_model(kind)
    types = list(getattr(shape, "layer_types", None) or [])
    first_layers(shape, 2)
    assert list(getattr(shape, "layer_types", None) or []) == types[:2]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape)
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList)]
    assert max(map(len, lists)) == 2


def test_levels_of_a_bdh_are_cut() -> None:
    shape = load_shape(load_recipe("bdh_tiny_full_bf16").config.model)
    first_layers(shape, 1)
    assert shape.num_hidden_layers == 1


@pytest.mark.slow
def test_padded_rows_have_a_mask_under_varlen_too() -> None:
    """As `training.helper.varlen` runs them: it takes documents, not padding."""
    given = ["train.packing=false", "model.attention=varlen"]
    found = on_h100(load_recipe("llama_1b_lora_bf16", given).config)
    forward = [op for op in found.trace.ops if op.name == "finetune_estimator.attention.default"]
    assert all(len(op.inputs) == 4 for op in forward)
    assert forward


def test_attention_of_packed_rows_is_cast_as_autocast_would() -> None:
    """Weights in float32 make rotated queries in float32; the kernel takes, and saves, 16 bits."""
    found = on_h100(load_recipe("llama_1b_full_bf16").config)
    ran = [op for op in found.trace.ops if op.name == "finetune_estimator.attention.default"]
    assert {x.dtype for op in ran for x in op.inputs} == {torch.bfloat16}


@pytest.mark.parametrize("version", [(2, 14, 1), (2, 15, 0)])
def test_packed_rows_are_cudnns_from_torch_2_15_on(version, monkeypatch) -> None:
    monkeypatch.setattr(fake_cuda, "torch_of_gpus", lambda: version)
    found = on_h100(load_recipe("llama_1b_full_bf16").config)
    ran = {op.name for op in found.trace.ops if "attention.default" in op.name}
    assert ran == {f"finetune_estimator.{'' if version[1] == 15 else 'flash_'}attention.default"}


@pytest.mark.slow
def test_experts_in_fp8_are_left_out_of_compiled_layers(tmp_path) -> None:
    """As by `torch.compile`: casts of parameters are kernels of their own, BF16's are fused."""
    given = [f"model.name={folder_of('mixtral', tmp_path)}", "model.weights=random"]
    for recipe, left_out in (("llama_8b_full_fp8", True), ("llama_8b_full_bf16", False)):
        found = on_h100(load_recipe(recipe, [*given, "train.max_length=128"]).config)
        experts = {op.module for op in found.trace.ops if "experts" in op.module}
        assert experts
        assert all(in_layer(module) for module in experts)
        assert {layer_of(module) == "" for module in experts} == {left_out}
        assert found.compiles


@pytest.mark.slow
def test_the_first_micro_step_casts_in_kernels_and_compiled_layers_fuse_casts() -> None:
    """From one rehearsal: memory as with kernels of ours, and operators as for Inductor."""
    by = {
        kernels: on_h100(load_recipe("llama_8b_lora_fp8", [f"precision.kernels={kernels}"]).config)
        for kernels in ("auto", "triton", "inductor")
    }
    casts = {
        kernels: [(op.module, op.phase) for op in found.trace.ops if op.name == "aten.amax.default"]
        for kernels, found in by.items()
    }
    assert casts["auto"] == casts["inductor"]
    assert not casts["triton"]
    eager = tensor_footprint(in_eager_kernels(by["auto"].trace))
    assert eager.phases == tensor_footprint(by["triton"].trace).phases
    assert eager.tensors < tensor_footprint(by["inductor"].trace).tensors


@pytest.mark.skipif(not runs_on_cuda(), reason="this torch has no windows in varlen attention")
def test_a_sliding_window_is_in_the_trace(tmp_path) -> None:
    """Packed rows run FlashAttention, which skips what a query does not see."""
    from transformers import MistralConfig

    MistralConfig(
        vocab_size=1024, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, sliding_window=64, head_dim=32,
    ).save_pretrained(tmp_path)  # fmt: skip
    given = (f"model.name={tmp_path}", "model.weights=random", "train.max_length=512")
    found = on_h100(load_recipe("llama_1b_full_bf16", given).config)
    flash = [op for op in found.trace.ops if op.name.startswith("finetune_estimator.flash")]
    assert {op.inputs[-1].shape for op in flash} == {(64,)}


# ---------------------------------------------------------------------------------- other methods


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "texts", "copies"),
    slow_but(
        [("dpo", 2, 2), ("reward", 2, 1)],
        [("dpo", 2, 2), ("kto", 1, 2), ("orpo", 2, 1), ("reward", 2, 1)],
        pytest.mark.long,
    ),
)
def test_a_method_is_rehearsed_with_its_own_loss_and_reference(method, texts, copies) -> None:
    """Weights of a reference and tokens of a pair are there, and no gradients of the reference."""
    settings = (f"train.method={method}", "~train.pad_to_multiple_of")
    config = load_recipe("tiny_full_bf16", settings).config
    found, weights = (
        on_h100(config),
        sum(p.nbytes for p in meta_model(config, layers=2).parameters()),
    )
    train = config.train
    assert found.tokens == texts * train["per_device_train_batch_size"] * train["max_length"]
    kinds = tensor_footprint(found.trace).phases["optimizer"]
    assert kinds["weights"] == pytest.approx(copies * weights, rel=1e-3)
    assert kinds["gradients"] == weights
    phases = {op.phase for op in found.trace.ops}
    assert ("reference" in phases) == (copies == 2)


@pytest.mark.slow
def test_adapters_switched_off_are_the_reference() -> None:
    config = load_recipe("tiny_lora_fp8", ["train.method=dpo"]).config
    plain, found = on_h100(load_recipe("tiny_lora_fp8").config), on_h100(config)
    assert [tensor_footprint(x.trace).kinds["weights"] for x in (plain, found)] == [
        tensor_footprint(plain.trace).kinds["weights"]
    ] * 2
    asked = sum(op.phase == "reference" and "_scaled_mm" in op.name for op in found.trace.ops)
    learnt = sum(op.phase == "forward" and "_scaled_mm" in op.name for op in found.trace.ops)
    assert 0 < asked == learnt


@pytest.mark.slow
@pytest.mark.parametrize("layers", [2, 3])
def test_a_generation_holds_keys_and_values_of_all_its_rows(layers) -> None:
    """Of four micro-batches of 2 rows, to the last token but one; gradients come after it.

    Two heads of 32, in float32 as rotated; what the step trains on is one micro-batch.
    """
    given = (
        "train.per_device_train_batch_size=2", "train.gradient_accumulation_steps=4",
        "train.max_completion_length=24",
    )  # fmt: skip
    config = load_recipe("tiny_grpo_bf16", given).config
    found = rehearse(with_length(config, 40), H100, there(config), layers=layers)
    phases = tensor_footprint(found.trace).phases
    prompt, answered = (2 * 8 * tokens * layers * 2 * 32 * 4 for tokens in (16, 16 + 24 - 1))
    # Of one layer keys are there twice, as they were and with one more token.
    assert phases["prompts"]["cache"] == prompt
    assert answered <= phases["answers"]["cache"] <= answered * (1 + 1 / layers)
    assert phases["forward"]["cache"] == phases["answers"]["gradients"] == 0
    assert phases["forward"]["gradients"] > 0
    assert (found.tokens, found.answer, found.generations) == (2 * 40, 24, 1)


@pytest.mark.long
def test_longer_answers_take_more_of_the_step() -> None:
    """Twice the tokens of a prompt and twice the answer; a generation for two steps half of it."""
    config, machine = load_recipe("tiny_grpo_fp8").config, machine_of("H100")

    def generation(*given: str) -> float:
        timing = predict_fast(with_overrides(config, given), machine).timing
        assert timing is not None
        return timing.classes[StepPart.GENERATION]

    once = generation()
    assert 1.8 < generation("train.max_completion_length=32") / once < 2.2
    assert generation("train.steps_per_generation=2") == pytest.approx(once / 2, rel=0.1)


EIGHT_B = (
    "precision.fp8_params=true", "train.gradient_checkpointing=true",
    "train.gradient_accumulation_steps=1", "precision.compile=on",
)  # fmt: skip


@pytest.mark.slow
def test_an_8b_in_full_with_masters_in_host_memory_takes_less_than_16_gb() -> None:
    config = load_recipe("llama_8b_full_fp8", EIGHT_B).config
    found = predict_fast(config, machine_of("4090"))
    memory, numbers = found.footprint, found.trainable
    assert found.compiled
    assert found.timing is not None
    assert found.timing.tokens == 8192
    assert memory.allocated < 16e9
    assert memory.pinned == pytest.approx(4 * numbers, rel=1e-3)  # a master and a gradient in BF16
    assert memory.pageable == pytest.approx(2 * numbers * (1 + 4 / 256), rel=1e-3)  # 8-bit states
    on_host = found.timing.hosted
    assert on_host is not None
    assert on_host.moved == pytest.approx((2 * numbers, 2 * numbers), rel=1e-3)
