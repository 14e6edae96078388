"""`train.gradient_checkpointing: auto`: on only where a step does not fit without it."""

from __future__ import annotations

import pytest

from finetune import load_recipe
from finetune.analysis.experiment.fairness import settle_checkpointing
from finetune.config.train_section import CHECKPOINTING, decides_checkpointing
from finetune.errors import ConfigError
from finetune.estimator.predict import decided, predict
from finetune.estimator.search import cheapest_gpu
from finetune.hardware.gpus import machine_of, named_gpu
from finetune.training.run.preflight import preflight
from tests.conftest import CPU
from tests.families import folder_of

OPEN = f"train.{CHECKPOINTING}=auto"


class Forecast:
    """Memory of a forecast that always says the same."""

    def __init__(self, *, needs: bool) -> None:
        self.needs, self.checked = needs, []

    def explain(self, error, run):
        return error

    def needs_checkpointing(self, run) -> bool:
        return self.needs

    def check(self, run) -> None:
        self.checked.append(run.config.train[CHECKPOINTING])

    def how_to_shrink(self, run) -> str:
        return ""

    def predicted(self, run, batch):
        return {}


def tiny(*overrides: str):
    return load_recipe("tiny_full_fp8", [OPEN, *overrides]).config


@pytest.mark.parametrize("needs", [True, False])
def test_preflight_decides_by_the_forecast_before_memory_is_checked(needs) -> None:
    forecast = Forecast(needs=needs)
    ahead = preflight(tiny(), CPU, forecast=forecast)
    assert ahead.config.train[CHECKPOINTING] is needs
    assert forecast.checked == [needs]


def test_without_a_forecast_memory_is_saved() -> None:
    assert preflight(tiny(), CPU).config.train[CHECKPOINTING] is True


def test_what_is_set_stays() -> None:
    config = load_recipe("tiny_full_fp8").config
    assert not decides_checkpointing(config)
    assert preflight(config, CPU, forecast=Forecast(needs=True)).config is config
    assert decided(config, machine_of("H100")) is config


def test_another_word_is_refused() -> None:
    with pytest.raises(ConfigError, match="gradient_checkpointing must be true or false"):
        load_recipe("tiny_full_fp8", [f"train.{CHECKPOINTING}=perhaps"])


@pytest.mark.long
def test_a_large_gpu_keeps_activations_and_a_small_one_does_not() -> None:
    config = load_recipe("gpt2_124m_full_bf16", [OPEN]).config
    large, small = (predict(config, machine_of("H100", memory_gib=gib)) for gib in (None, 10))
    assert [found.config.train[CHECKPOINTING] for found in (large, small)] == [False, True]
    assert small.footprint.allocated < large.footprint.allocated
    assert small.tokens_per_s < large.tokens_per_s  # type: ignore[operator]
    gpus = tuple(named_gpu("H100").model_copy(update={"memory_gib": gib}) for gib in (80, 10))
    found = {round(c.machine.device.memory_gib): c for c in cheapest_gpu(config, gpus=gpus).choices}
    assert found[80].prediction.config.train[CHECKPOINTING] is False
    assert found[10].prediction.config.train[CHECKPOINTING] is True


@pytest.mark.slow
def test_both_sides_of_a_comparison_decide_alike() -> None:
    pair = [tiny(), load_recipe("tiny_full_bf16", [OPEN]).config]
    configs, note = settle_checkpointing(pair, CPU)
    assert [config.train[CHECKPOINTING] for config in configs] == [False, False]
    assert note.startswith("train.gradient_checkpointing=false on all sides")


@pytest.mark.slow
def test_a_run_says_what_was_decided(cli) -> None:
    done = cli(
        "tiny_full_fp8", OPEN, "train.max_steps=2", "train.warmup_steps=0", "eval.samples=false",
        "train.eval_strategy=no", "train.per_device_train_batch_size=1", "data.max_rows=12",
    )  # fmt: skip
    assert done.code == 0
    assert "gradient checkpointing: off, memory is enough without" in done.out


def test_a_loss_of_routers_that_reentrant_checkpointing_cuts_off_is_refused(cli, tmp_path) -> None:
    """Their norms were 0.001 for 0.062 without checkpointing, and nothing said so."""
    base = folder_of("qwen3_moe", tmp_path)
    words = ("validate", "tiny_full_bf16", f"model.name={base}", "model.weights=random")
    words += ("train.gradient_checkpointing=true",)
    reentrant = "train.gradient_checkpointing_kwargs={use_reentrant: true}"
    refused = cli(*words, reentrant)
    assert refused.code == 2
    assert "the auxiliary loss of the routers would have no gradient" in refused.err
    assert cli(*words, reentrant.replace("true", "false")).code == 0
    assert cli(*words, reentrant, "train.router_aux_loss_coef=0").code == 0
    assert cli("validate", "tiny_full_bf16", words[4], reentrant).code == 0
