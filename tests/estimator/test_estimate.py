"""Estimates: what they say, that they add up, and what they refuse."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from rich.console import Console

import finetune
from finetune import load_recipe
from finetune.config.recipe import with_overrides
from finetune.config.schema import RunConfig
from finetune.errors import (
    ConfigError,
    FinetuneError,
    ModelNotFoundError,
    PrecisionError,
    RehearsalError,
)
from finetune.estimator import predict as predicting
from finetune.estimator import variants
from finetune.estimator.changes import as_typed
from finetune.estimator.estimate import Estimate, estimate
from finetune.estimator.limits import limits
from finetune.estimator.memory.footprint import (
    Footprint,
    footprint,
    with_first,
)
from finetune.estimator.predict import (
    Prediction,
    are_alike,
    in_eager_kernels,
    predict,
    predict_fast,
    predict_whole,
)
from finetune.estimator.speed import roofline
from finetune.estimator.speed.step_parts import StepPart
from finetune.estimator.trace import fake_cuda, rehearsal
from finetune.estimator.trace.compiled import as_compiled
from finetune.estimator.trace.rehearsal import rehearse
from finetune.estimator.variants import pair_of
from finetune.hardware import requirements
from finetune.hardware.device import Device, Verdict
from finetune.hardware.gpus import machine_of, this_machine
from finetune.hardware.requirements import resolve_there
from finetune.precision.settings import PrecisionConfig
from finetune.training.health.memory_meter import Batch
from finetune.units import GIB, MEMORY, duration, size
from tests.conftest import slow_but
from tests.estimator.configs import changed

H100 = machine_of("H100")


@pytest.fixture(scope="module")
def shape(tmp_path_factory) -> str:
    """A folder with the shape of a Llama of four layers."""
    from transformers import LlamaConfig

    folder = tmp_path_factory.mktemp("shape")
    LlamaConfig(
        vocab_size=2048,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
    ).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def config(shape) -> RunConfig:
    """FP8 under LoRA on that shape."""
    recipe = load_recipe(
        "llama_8b_lora_fp8",
        [
            f"model.name={shape}",
            "model.weights=random",
            "train.max_length=256",
            "train.packing=false",
            "train.gradient_checkpointing=true",
        ],
    )
    return recipe.config


@pytest.fixture(scope="module")
def result(config) -> Estimate:
    """Its estimate on an H100."""
    return estimate(config, gpu="H100", tokens=10**6, price=3.0)


@pytest.fixture
def forget():
    """Function after which rehearsals are made again; called before the test."""
    predicting._made.cache_clear()
    return predicting._made.cache_clear


@pytest.fixture
def as_the_run(result, monkeypatch):
    """Predicts changes as the run itself: to rehearse each takes a second."""

    def prediction(config: RunConfig, machine) -> Prediction:
        return replace(result.prediction, config=config, machine=machine)

    monkeypatch.setattr(variants, "predict_fast", prediction)


def text_of(result: Estimate) -> str:
    console = Console(width=200, no_color=True)
    with console.capture() as shown:
        console.print(result)
    return shown.get()


# ---------------------------------------------------------------------------------- what it says


@pytest.mark.long
def test_the_figures_are_each_larger_than_the_one_before(result):
    memory = result.prediction.footprint
    assert 0 < memory.tensors < memory.allocated <= memory.reserved < memory.shown
    assert memory.shown + memory.margin <= H100.memory_bytes
    assert result.fit == "fits"


@pytest.mark.slow
def test_kinds_add_up_to_the_peak_of_every_phase(config):
    rehearsal = rehearse(config, H100.device, resolve_there(config.precision, H100))
    memory = footprint(rehearsal.trace, H100.device)
    assert list(memory.phases) == ["load", "forward", "backward", "optimizer"]
    whole = rehearsal.trace.marks["step"]
    assert memory.tensors == rehearsal.trace.peak(whole)[0]
    assert rehearsal.trace.initial_bytes == sum(memory.phases["load"].values())


@pytest.mark.slow
def test_the_time_of_a_step_is_the_sum_of_its_parts(result):
    timing = result.prediction.timing
    assert sum(timing.classes.values()) == pytest.approx(timing.seconds)
    assert sum(timing.share(part) for part in timing.classes) == pytest.approx(1)
    assert 0 < timing.mfu < 1
    assert result.run_seconds == pytest.approx(10**6 / result.tokens_per_s)
    assert result.cost == pytest.approx(result.run_seconds / 3600 * 3.0)


@pytest.mark.slow
def test_micro_batches_take_their_time_each_and_gradients_stay(config):
    alone = predict_whole(changed(config, train={"gradient_accumulation_steps": 1}), H100)
    four = predict_whole(config, H100)
    assert four.timing.tokens == 4 * alone.timing.tokens
    idle = (roofline.shared().before_update_ms + roofline.shared().after_update_ms) * 1e-3
    assert four.timing.seconds - idle == pytest.approx(4 * (alone.timing.seconds - idle), rel=0.1)
    assert four.footprint.phases["forward"]["gradients"] > 0
    assert alone.footprint.phases["forward"]["gradients"] == 0


@pytest.mark.long
def test_the_first_layers_say_what_all_of_them_take(config):
    whole, fast = predict_whole(config, H100), predict_fast(config, H100)
    assert fast.footprint.tensors == pytest.approx(whole.footprint.tensors, rel=1e-3)
    assert fast.timing.seconds == pytest.approx(whole.timing.seconds, rel=1e-2)
    assert (fast.parameters, fast.trainable) == (whole.parameters, whole.trainable)


@pytest.mark.long
def test_the_twin_is_the_same_run_in_the_other_precision(config, result):
    twin = result.pair.twin
    assert twin.label == "BF16, compiled"
    assert result.prediction.compiled
    assert twin.prediction.compiled, "what compiling gains is not FP8's merit"
    back = estimate(changed(twin.prediction.config, train={}), gpu="H100")
    assert back.pair.twin.label == "FP8"  # what was FP8 is the twin's twin
    assert back.prediction.footprint.allocated == twin.prediction.footprint.allocated
    # A frozen base in one byte a number against two.
    assert result.prediction.footprint.kinds["weights"] < back.prediction.footprint.kinds["weights"]
    assert result.pair.reasons


@pytest.mark.slow
def test_fp8_that_a_gpu_has_not_is_a_row_with_its_reason(config):
    old = estimate(
        changed(config, precision=dict.fromkeys(PrecisionConfig.model_fields)), gpu="A100-80GB"
    )
    assert old.pair.twin.prediction is None
    assert "FP8 needs 8.9" in old.pair.twin.why
    assert "cannot run" in text_of(old)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["tiny_lora_fp8", "tiny_lora_bf16", "tiny_full_fp8"])
def test_settings_of_a_change_typed_behind_the_recipe_are_what_was_predicted(
    recipe, result, as_the_run
):
    own = ["precision.keep=[k_proj]", "precision.health_every=7"]
    asked = load_recipe(recipe, own).config
    unmeasured = replace(result.prediction, config=asked)
    pair = variants.pair_of(unmeasured)
    assert pair is not None
    every = variants.changes_of(unmeasured, pair, every=True).rows
    for other in (one for one in every if one.rank != "devices"):
        assert other.prediction is not None, other
        typed = load_recipe(recipe, [*own, *other.change]).config
        assert other.prediction.config == typed, other.label
        assert typed.precision.keep == ("k_proj",)


def test_json_says_the_same_as_the_words(result, as_the_run):
    facts = json.loads(result.to_json())
    memory = result.prediction.footprint
    assert facts["memory"]["allocated"] == memory.allocated
    assert facts["fit"] == "fits"
    assert facts["time"]["step_seconds"] == result.prediction.timing.seconds
    words = text_of(result)
    assert size(memory.allocated, MEMORY) in words
    assert duration(result.prediction.timing.seconds) in words
    assert "FP8" in words
    assert all(note in words for note in result.notes)
    changes = [as_typed(row["change"]) for row in facts["changes"]["rows"]]
    assert changes
    assert all(change in words for change in changes)


@pytest.mark.long
@pytest.mark.parametrize(
    ("section", "values"),
    [
        ("lora", {"target_modules": r".*layers\.[0-2]\..*q_proj"}),
        ("lora", {"target_modules": ("layers.0.self_attn.q_proj", "v_proj")}),
        ("precision", {"first_n": 2}),
    ],
)
def test_layers_named_by_number_are_rehearsed_whole(config, section, values):
    asked = changed(config, **{section: values})
    whole, fast = predict_whole(asked, H100), predict_fast(asked, H100)
    assert fast.trainable == whole.trainable
    assert fast.footprint == whole.footprint


def test_layers_that_differ_in_turn_are_not_alike():
    from transformers import LlamaConfig, MixtralConfig, Qwen3MoeConfig

    assert are_alike(LlamaConfig(num_hidden_layers=9))
    assert are_alike(MixtralConfig(num_hidden_layers=9))
    assert are_alike(Qwen3MoeConfig(num_hidden_layers=9))
    assert not are_alike(Qwen3MoeConfig(num_hidden_layers=9, decoder_sparse_step=2))
    assert not are_alike(Qwen3MoeConfig(num_hidden_layers=9, decoder_sparse_step=3))


@pytest.mark.long
@pytest.mark.parametrize(("optimizer", "bytes_each"), [("paged_ademamix_32bit", 12)])
def test_paged_states_are_not_memory_of_the_device(config, optimizer, bytes_each):
    pytest.importorskip("bitsandbytes")
    precision = {"frozen": None}
    asked = changed(config, lora=None, precision=precision, train={"optim": optimizer})
    memory = predict_whole(asked, H100).footprint.phases["forward"]
    attention, norms = 4 * 2 * (256 * 256 + 256 * 128), 9 * 256  # too small to be paged
    assert memory["optimizer"] == bytes_each * (attention + norms)


@pytest.mark.slow
def test_an_estimate_leaves_no_trace(config, forget):
    from accelerate.state import AcceleratorState
    from torch.nn import functional as F

    torch.manual_seed(1)
    random.seed(1)
    before = torch.get_rng_state(), random.getstate(), dict(AcceleratorState._shared_state)
    attention, power = F.scaled_dot_product_attention, torch.pow
    estimate(config, gpu="H100", changes=False)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()
    assert before[2] == AcceleratorState._shared_state
    assert (attention, power) == (F.scaled_dot_product_attention, torch.pow)
    assert "pow" not in vars(torch.Tensor)


@pytest.mark.slow
def test_an_estimate_in_one_of_several_processes_is_of_one_and_disturbs_none(
    config, monkeypatch, forget
):
    """As torchrun has it: no group is made or joined, and arguments keep their state."""
    import os

    from accelerate import PartialState
    from transformers import TrainingArguments

    args = TrainingArguments(output_dir="unused", use_cpu=True)
    before = dict(PartialState._shared_state)
    launched = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "ACCELERATE_USE_FSDP": "true"}
    for key, value in launched.items():
        monkeypatch.setenv(key, value)
    args.distributed_state.process_index = 1  # pyright: ignore[reportOptionalMemberAccess]
    result = estimate(config, gpu="H100", changes=False)
    assert result.prediction.footprint.allocated > 0
    assert not torch.distributed.is_initialized()
    assert PartialState._shared_state == before | {"process_index": 1}
    assert args.process_index == 1
    assert {key: os.environ[key] for key in launched} == launched


@pytest.mark.long
def test_a_session_in_force_neither_disturbs_an_estimate_nor_is_disturbed(
    config, make_llama, forget
):
    from transformers import Trainer, TrainingArguments

    from tests.conftest import batch

    rows = [{"input_ids": x, "labels": x} for x in batch(4)["input_ids"].tolist()]
    alone = estimate(config, gpu="H100", changes=False).facts()
    finetune.setup_fp8_mixed_precision_training("emulated", emulation="allow", cpu=True)
    args = TrainingArguments(
        output_dir="unused", max_steps=2, per_device_train_batch_size=2, use_cpu=True, bf16=True,
        report_to="none", disable_tqdm=True, save_strategy="no",
    )  # fmt: skip
    trainer = Trainer(model=make_llama(), args=args, train_dataset=rows)  # pyright: ignore
    forget()
    assert estimate(config, gpu="H100", changes=False).facts() == alone
    trainer.train()
    assert finetune.get_receipt().status == "proven"
    forget()
    assert estimate(config, gpu="H100", changes=False).facts() == alone
    trainer.train()
    assert finetune.get_receipt().status == "proven"


def test_what_cannot_be_rehearsed_is_said_and_neither_refused_nor_fatal(
    config, monkeypatch, forget
):
    from transformers.models.llama.modeling_llama import LlamaMLP

    from finetune.estimator.gate import MemoryForecast
    from finetune.hardware.device import this_device
    from finetune.training.run.preflight import preflight

    def reads_values(mlp, x):
        return x * x.detach().float().numpy().mean()

    monkeypatch.setattr(LlamaMLP, "forward", reads_values)
    bf16 = changed(config, precision={"compute": "bf16", "frozen": None})
    with pytest.raises(RehearsalError, match="cannot be rehearsed"):
        estimate(bf16, gpu="H100", changes=False)
    monkeypatch.setattr("finetune.estimator.gate.most_bytes", lambda *_: float("inf"))
    monkeypatch.setattr(Footprint, "fit", lambda *_: "does not fit")
    forecast, run = MemoryForecast(), preflight(bf16, this_device())
    forecast.check(run)
    reported = forecast.predicted(run, Batch(2, 64, False))
    assert reported["predicted"].startswith("not predicted: ")


@pytest.mark.long
def test_settings_of_data_are_not_asked_of_made_up_rows(config):
    plain = predict_whole(config, H100).footprint
    masked = changed(config, train={"assistant_only_loss": True})
    assert predict_whole(masked, H100).footprint == plain
    with pytest.raises(RehearsalError, match="padding_free"):
        predict_whole(changed(config, train={"padding_free": True}), H100)


@pytest.mark.long
def test_a_wrapped_batch_is_predicted_as_the_rows_it_has(config, monkeypatch):
    from finetune.estimator import gate
    from finetune.hardware.device import this_device
    from finetune.training.run.preflight import preflight

    monkeypatch.setattr(gate, "_rehearsed", lambda _run, config, *_: predict_whole(config, H100))
    exact = changed(config, precision={"emulation": "allow"})
    for strategy, shape in (("bfd", (1, 512, False)), ("wrapped", (4, 128, False))):
        train = {"packing": True, "packing_strategy": strategy, "per_device_train_batch_size": 4}
        run = preflight(changed(exact, train=train), this_device())
        reported = gate.MemoryForecast().predicted(run, Batch(*shape))
        assert "a batch of 4 x 128 tokens" in reported["predicted"]


def test_a_packed_batch_of_no_given_size_is_predicted_with_the_librarys_rows(config, monkeypatch):
    from finetune.estimator import gate
    from finetune.hardware.device import this_device
    from finetune.training.run.preflight import preflight

    def not_rehearsed(_run, same: RunConfig, *_):
        rehearsed.append((same.train["per_device_train_batch_size"], same.train["max_length"]))
        raise RehearsalError("nothing is rehearsed here")

    rehearsed: list[tuple[int, int]] = []
    monkeypatch.setattr(gate, "_rehearsed", not_rehearsed)
    own = ["precision.compute=bf16", "~train.per_device_train_batch_size", "train.packing=true"]
    run = preflight(with_overrides(config, own), this_device())
    gate.MemoryForecast().predicted(run, Batch(1, 8 * 128, False))
    assert rehearsed == [(8, 128)]


# ----------------------------------------------------------------------------- what decides the fit


@pytest.mark.parametrize(
    ("memory_gib", "fit"), [(8.0, "does not fit"), (10.6, "tight"), (11.5, "fits")]
)
def test_fit_is_decided_by_what_cannot_be_given_back(memory_gib, fit):
    memory = Footprint({"backward": {"weights": 10 * GIB}}, fragments=GIB // 4, outside=GIB // 2)
    assert memory.fit(int(memory_gib * GIB)) == fit


def test_the_first_step_may_need_the_most():
    """It runs uncompiled and is over before there are optimizer states."""
    update = {"weights": 5, "optimizer": 3}
    steps = Footprint(
        {"forward": update, "backward": update, "optimizer": update}, owner="head", fragments=2
    )
    kept = {**update, "saved": 4}
    first = Footprint(
        {"forward": kept, "backward": update, "optimizer": {"weights": 99}},
        owner="mlp",
        fragments=6,
    )
    both = with_first(steps, first)
    assert both.tensors == 9, "5 of weights and 4 saved"
    assert both.phases["backward"] == both.phases["optimizer"] == update
    assert (both.owner, both.reserved) == ("mlp", 15)
    assert with_first(steps, steps) == steps


@pytest.mark.slow
def test_the_first_step_is_counted_uncompiled(config):
    """Where layers are checkpointed; else the first step alone is, and holds less than others."""
    config = changed(config, train={"gradient_checkpointing": True})
    rehearsal = rehearse(config, H100.device, resolve_there(config.precision, H100))
    traces = as_compiled(rehearsal).trace, in_eager_kernels(rehearsal.trace)
    steps, first = (footprint(trace, H100.device) for trace in traces)
    run, few = predict_whole(config, H100).footprint, predict_fast(config, H100).footprint
    for phase, kinds in run.phases.items():
        expected = sum(steps.phases[phase].values())
        if phase in ("forward", "backward"):
            early = first.phases[phase]
            expected = max(expected, sum(early.values()) - early["optimizer"])
        assert sum(kinds.values()) == expected
    assert few.tensors == pytest.approx(run.tensors, rel=1e-3)


@pytest.mark.long
def test_no_ratio_is_of_unlike_settings():
    """48 GB hold rank 32 without checkpointing in FP8 alone: BF16 computes its forward twice."""
    found = estimate(load_recipe("llama_8b_lora32_fp8"), gpu="L40S")
    twin, fitting = found.pair.twin, found.pair.fitting
    assert (found.fit, twin.fit, fitting.fit) == ("fits", "does not fit", "fits")
    assert fitting.prediction.config.train["gradient_checkpointing"] is True
    assert fitting.times < twin.times
    said = text_of(found)
    assert f"FP8 runs at {1 / twin.times:.2f}x (" in said
    assert "the speed of BF16, predicted; both compiled, without gradient checkpointing" in said
    assert f"with checkpointing a step takes {duration(fitting.timing.seconds)}" in said
    assert f"{1 / fitting.times:.2f}x" not in said
    plain = pair_of(predict(load_recipe("llama_8b_lora32_bf16").config, machine_of("L40S")))
    fp8, bf16 = plain.timings
    assert plain.twin.prediction.compiled
    assert plain.compiled.prediction.compiled, "the run itself is not"
    assert plain.gain.value == fp8.tokens_per_s / bf16.tokens_per_s < plain.twin.times
    assert estimate(load_recipe("llama_8b_lora32_fp8"), gpu="H200").pair.fitting is None


@pytest.mark.slow
def test_memory_alone_is_enough_for_a_verdict(config):
    small = estimate(config, memory_gib=0.1, changes=False)
    assert small.fit == "does not fit"
    assert small.prediction.timing is None
    assert any("only the memory of this GPU is known" in note for note in small.notes)
    assert estimate(config, memory_gib=8, changes=False).fit == "fits"


# ---------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("train", "words"),
    [
        ({"per_device_train_batch_size": 0}, "train.per_device_train_batch_size is 0"),
        ({"gradient_accumulation_steps": 0}, "train.gradient_accumulation_steps is 0"),
        ({"max_length": 8192}, "longer than"),
    ],
)
def test_numbers_that_no_batch_has_are_refused(config, train, words):
    with pytest.raises(ConfigError, match=words):
        estimate(changed(config, train=train), gpu="H100")


def test_rows_without_end_are_refused(config):
    endless = config.model_copy(update={"train": {**config.train, "max_length": None}})
    with pytest.raises(ConfigError, match="no greatest length"):
        estimate(endless, gpu="H100")


@pytest.mark.parametrize(
    ("recipe", "typed", "words"),
    [
        ("tiny_full_fp8", "precision.map.output=fp8", "output head, which SFTTrainer"),
        ("llama_8b_full_bf16", "precision.compute=fp32", "weights that are not float32"),
    ],
)
def test_what_a_run_refuses_has_no_estimate(recipe, typed, words):
    with pytest.raises(FinetuneError, match=words):
        estimate(load_recipe(recipe, [typed]), gpu="H100")


def test_what_is_not_there_is_refused(config, tmp_path):
    with pytest.raises(ConfigError, match="did you mean 'H100'"):
        estimate(config, gpu="H1000")
    with pytest.raises(ModelNotFoundError, match="no model in"):
        estimate(changed(config, model={"name": str(tmp_path / "nowhere")}), gpu="H100")
    with pytest.raises(ConfigError, match="no layer's name ends in nowhere"):
        estimate(changed(config, lora={"target_modules": ["nowhere"]}), gpu="H100")
    with pytest.raises(PrecisionError, match="is not available on NVIDIA A100"):
        estimate(config, gpu="A100-80GB")
    for wrong in (
        *({"gpus": 0}, {"memory_gib": 0}, {"memory_gib": -1}, {"tokens": 0}),
        *({"price": -1}, {"price": math.nan}, {"price": math.inf}),
    ):
        with pytest.raises(ConfigError):
            estimate(config, **{"gpu": "H100", **wrong})


def test_transformer_engine_need_not_be_installed_to_be_estimated():
    asked = PrecisionConfig(compute="fp8", backend="te", scaling="delayed")
    there = resolve_there(asked, H100)
    assert (there.precision.backend, "taken to be installed" in there.reason) == ("te", True)
    with pytest.raises(FinetuneError):
        resolve_there(asked, machine_of("A100-80GB"))
    # MXFP8 needs Blackwell, with whatever engine.
    blocks = PrecisionConfig(compute="fp8", backend="te", scaling="mxfp8")
    with pytest.raises(FinetuneError):
        resolve_there(blocks, H100)
    assert resolve_there(blocks, machine_of("B200")).precision.backend == "te"


def test_transformer_engine_may_be_broken_here_and_run_there(monkeypatch):
    broken = Verdict(False, "transformer-engine is installed but does not import: libcudnn")
    monkeypatch.setattr(requirements, "has_transformer_engine", lambda: broken)
    asked = PrecisionConfig(compute="fp8", backend="te", scaling="delayed")
    assert resolve_there(asked, H100).reason == requirements.TAKEN.reason
    by_need = PrecisionConfig(compute="fp8", scaling="delayed")  # torchao has none
    assert resolve_there(by_need, H100).precision.backend == "te"


@pytest.mark.parametrize("gpu", slow_but(["T4"], ["T4", "A100-80GB"]))
def test_bf16_where_the_gpu_has_none_is_said(config, gpu):
    plain = with_overrides(config, ["precision.compute=bf16"])
    said = " ".join(limits(predict_fast(plain, machine_of(gpu))))
    assert ("has no BF16 (compute capability 7.5" in said) == (gpu == "T4")


def test_a_gpu_here_that_is_not_in_the_table_is_not_taken_for_another(config, monkeypatch):
    slice_of_one = Device("cuda", "NVIDIA A100-SXM4-80GB MIG 3g.40gb", (8, 0), 39.5)
    plain = with_overrides(config, ["precision.compute=bf16"])
    prediction = predict_fast(plain, this_machine(slice_of_one))
    said = " ".join(limits(prediction))
    assert "not in the table of GPUs" in said
    assert "taken to have FP8" not in said


@pytest.mark.slow
def test_a_cpu_has_no_predicted_time(config):
    found = predict_fast(with_overrides(config, ["precision.compute=bf16"]), machine_of())
    said = " ".join(limits(found))
    assert "no time is predicted" in said
    assert "--gpu" in said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optim", "nbytes"),
    [
        # clipping reads gradients twice and writes them; AdamW reads four tensors and writes three
        ("adamw_torch_fused", 6 + 14),
        # read for their norm, clipped in the update, whose 150 instructions take longer than bytes
        ("adamw_torch_8bit", 2 + 150 / 33.45 * 0.85 * 3.35),
        # bitsandbytes keeps the embedding's moments (0.26e9) in float32
        pytest.param("adamw_8bit", 6 + 10 + 12 * 0.26 / 1.24, marks=pytest.mark.long),
    ],
)
def test_the_update_counts_once_however_many_micro_batches(optim, nbytes):
    """Gradients are normed, clipped and used once a step: a 1B has 1.24e9 of them."""
    given = [
        f"train.optim={optim}", "train.gradient_checkpointing=true", "model.dtype=bfloat16",
    ]  # fmt: skip
    asked = load_recipe("llama_1b_full_bf16", given).config
    seconds = [
        predict_fast(changed(asked, train={"gradient_accumulation_steps": n}), H100)
        .timing.classes[StepPart.OPTIMIZER]
        for n in (1, 8)
    ]  # fmt: skip
    assert seconds[0] == pytest.approx(seconds[1])
    assert seconds[0] == pytest.approx(1.24e9 * nbytes / (0.85 * 3.35e12), rel=0.03)


@pytest.mark.slow
def test_layers_that_are_left_out_of_compiling_are_predicted_so():
    """BDH's only block multiplies by parameters: uncompiled, whatever `precision.compile` says."""
    recipe = load_recipe("bdh_tiny_full_fp8", ["precision.compile=on"])
    prediction = predict_fast(recipe.config, H100)
    assert not prediction.compiled
    assert "precision.compile=on is predicted to change nothing" in " ".join(limits(prediction))
    pair = pair_of(prediction)
    assert pair is not None
    assert pair.twin.change == ("precision.compute=bf16",)


@pytest.mark.slow
def test_a_longer_row_is_checked_as_one_in_the_recipe(config):
    with pytest.raises(ConfigError, match="longer than"):
        estimate(config, gpu="H100", length=8192, changes=False)
    endless = changed(config, train={"max_length": 64}).model_copy(
        update={"train": {**config.train, "max_length": None}}
    )
    assert estimate(endless, gpu="H100", length=128, changes=False).prediction.timing is not None


@pytest.mark.long
@pytest.mark.parametrize(
    ("recipe", "fp8", "bf16", "within"),
    [  # (seconds, GiB) of a step on one H100 80GB HBM3, 26 November 2026: note 15
        ("llama_8b_lora_fp8", (0.3756, 32.37), (0.5103, 40.81), 0.08),
        ("llama_8b_full_fp8", (0.7497, 56.88), (0.8616, 67.88), 0.11),
    ],
)
def test_a_step_of_8b_is_predicted_as_an_h100_took_it(recipe, fp8, bf16, within, monkeypatch):
    """As the step was then: torchao asked for `torch.compile` at each tensor, 0.6 ms of the host;
    torch clipped; attention was FlashAttention-2's; a frozen head took three products.
    """
    alone = roofline.Roofline.kernel_time

    def asked_for(self: roofline.Roofline, op: Any, launch: Any) -> roofline.Kernel:
        kernel = alone(self, op, launch)
        waits = 600e-6 if "estimator.update" in op.name else 0.0
        return kernel._replace(seconds=max(kernel.seconds, waits))

    monkeypatch.setattr(roofline.Roofline, "kernel_time", asked_for)
    monkeypatch.setattr(rehearsal, "clip_in_update", torch.nn.utils.clip_grad_norm_)
    for module in (fake_cuda, roofline):
        monkeypatch.setattr(module, "torch_of_gpus", lambda: (2, 11, 0))
    third = 0.013 * ("lora" in recipe)  # `python -m tests.benchmarks.head`
    rows = ("train.per_device_train_batch_size=4", "train.max_length=2048")
    config = load_recipe(recipe, (*rows, "train.gradient_accumulation_steps=1"))
    found = estimate(config, gpu="H100").facts()
    seconds, twin = found["time"]["step_seconds"], found["pair"]["rows"][0]
    assert seconds + third == pytest.approx(fp8[0], rel=within)
    assert twin["step_seconds"] + third == pytest.approx(bf16[0], rel=0.04)
    assert found["memory"]["allocated"] / GIB == pytest.approx(fp8[1], rel=0.005)
    assert twin["allocated"] / GIB == pytest.approx(bf16[1], rel=0.005)


@pytest.mark.long
def test_what_was_measured_of_a_recipe_stands_before_what_is_predicted():
    """Until a setting differs that its step depends on; both recipes of a pair say the same."""
    same = ["train.max_steps=8", "train.gradient_accumulation_steps=1"]
    found = estimate(load_recipe("llama_8b_lora_fp8", same), gpu="H100")
    measured = found.measured["over_bf16"]
    assert f"FP8 runs at {measured:.2f}x the speed of BF16, measured on commit" in text_of(found)
    assert f"({found.pair.gain.value:.2f}x predicted); both compiled, without" in text_of(found)
    for other in ("lora.r=16", "train.max_length=1024", "train.gradient_checkpointing=true"):
        recipe = load_recipe("llama_8b_lora_fp8", [other])
        assert estimate(recipe, gpu="H100", changes=False).measured is None
    twin = load_recipe("llama_8b_lora_bf16", ["precision.compile=on"])
    assert estimate(twin, gpu="H100", changes=False).measured["over_bf16"] == measured
    assert estimate(twin, gpu="H200", changes=False).measured is None
