"""Bounds of memory: nothing that a rehearsal finds lies above the upper one, and it spares one."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from finetune import load_recipe
from finetune.config.train_section import with_checkpointing
from finetune.errors import MemoryShortError
from finetune.estimator import gate
from finetune.estimator.gate import MemoryForecast, bound_of, most_bytes
from finetune.estimator.predict import predict_whole
from finetune.hardware.device import this_device
from finetune.hardware.gpus import this_machine
from finetune.training.model import meta_model
from finetune.training.run.preflight import check_settings, preflight
from tests.conftest import H100, slow_but

RUNS = {
    "full": ("tiny_full_bf16", ()),
    "adapters": ("tiny_lora_fp8", ()),
    "dropout, by PEFT": ("tiny_lora_bf16", ("lora.dropout=0.1", "lora.use_dora=true")),
    "eager": ("tiny_full_bf16", ("model.attention=eager", "train.max_length=512")),
    "packed": ("tiny_full_bf16", ("train.packing=true", "model.attention=sdpa")),
    "GPT-2": ("gpt2_124m_full_fp8", ("train.max_length=256",)),
    "BDH, whose layers share weights": ("bdh_tiny_full_bf16", ()),
    "few tokens": ("llama_1b_full_bf16", ("train.max_length=16", "model.weights=random")),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(("full", "adapters", "packed"), RUNS, pytest.mark.long))
def test_no_step_takes_more_than_the_upper_bound(name) -> None:
    config = with_checkpointing(load_recipe(RUNS[name][0], RUNS[name][1]).config, False)
    model = meta_model(config)
    need = bound_of(config, model, check_settings(config, model))
    memory = predict_whole(config, this_machine(H100)).footprint
    assert need.total <= memory.allocated + memory.outside <= most_bytes(config, model, need)


def test_rows_without_a_greatest_length_have_no_upper_bound() -> None:
    config = load_recipe("tiny_full_bf16", ["train.max_length=null"]).config
    model = meta_model(config)
    assert most_bytes(config, model, bound_of(config, model, check_settings(config, model))) == (
        math.inf
    )


def test_what_fits_by_far_is_not_rehearsed(monkeypatch) -> None:
    asked = []
    monkeypatch.setattr(gate, "_rehearsed", lambda _, config: asked.append(config))
    run = preflight(load_recipe("tiny_lora_bf16").config, this_device())
    MemoryForecast().check(run)
    assert not MemoryForecast().needs_checkpointing(run)
    assert not asked
    monkeypatch.setattr(gate, "available_gib", lambda _: 0.4)  # above the lower bound alone
    with pytest.raises(AttributeError):
        MemoryForecast().check(run)
    assert asked


def test_masters_that_host_memory_cannot_take_are_refused_before_a_model_is_loaded(
    monkeypatch,
) -> None:
    words = ["precision.fp8_params=true", "precision.scaling=tensorwise"]
    run = preflight(load_recipe("tiny_full_fp8", words).config, this_device())
    run = replace(run, device=H100)
    monkeypatch.setattr(gate, "available_gib", lambda _: 80.0)
    MemoryForecast().check(run)
    monkeypatch.setattr(gate, "host_gib", lambda: 1.02)  # a GiB is for what comes beside
    with pytest.raises(MemoryShortError, match="does not fit here") as refused:
        MemoryForecast().check(run)
    assert "MiB pinned for masters and gradients" in refused.value.why
    assert "train.optim=adamw_torch_8bit" in refused.value.fix
