"""The ladder of an estimate: what each setting of a run brings."""

from __future__ import annotations

import math

import pytest

from finetune import load_recipe
from finetune.estimator.ladder import ladder_of
from finetune.estimator.predict import predict
from finetune.estimator.variants import pair_of
from finetune.hardware.gpus import place_of


@pytest.mark.long
def test_gains_multiply_to_the_run() -> None:
    """Each setting that the run has is a rung; the one before FP8 is its BF16 twin."""
    changes = (
        "train.packing=true", "train.max_length=512", "train.per_device_train_batch_size=4",
        "precision.map.output=fp8",
    )  # fmt: skip
    run = predict(load_recipe("tiny_lora_fp8", changes).config, place_of("H100"))
    twin = pair_of(run).twin
    rungs = ladder_of(run, twin)
    assert [rung.setting.partition("=")[0] for rung in rungs] == [
        "", "model.attention", "precision.compile",
        "train.gradient_checkpointing", "precision.compute",
        "precision.map.output",
    ]  # fmt: skip
    assert twin is not None
    assert twin.pace is not None
    assert rungs[-3].tokens_per_s == twin.pace.tokens_per_s
    assert rungs[-1].tokens_per_s == run.tokens_per_s
    whole = math.prod(rung.gain for rung in rungs)
    assert math.isclose(whole * rungs[0].tokens_per_s, rungs[-1].tokens_per_s)
    assert all(rung.gain > 0.5 for rung in rungs)


@pytest.mark.long
def test_rungs_of_layers_that_share_their_weights() -> None:
    """A BDH calls one block again and again: its second layer is no other module."""
    run = predict(load_recipe("bdh_tiny_full_fp8").config, place_of("H100"))
    twin = pair_of(run).twin
    assert twin is not None
    assert twin.pace is not None
    rungs = ladder_of(run, None)
    assert [rung.setting for rung in rungs[1:]] == [
        "train.gradient_checkpointing=false", "precision.compute=fp8",
    ]  # fmt: skip
    assert math.isclose(rungs[1].tokens_per_s, twin.pace.tokens_per_s)
