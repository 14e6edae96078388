"""Memory of a LoRA step, measured: an FP8 base is far below BF16, and torchao is not."""

from __future__ import annotations

import functools

import pytest

from tests.benchmarks import lora_memory
from tests.benchmarks.lora_memory import BASELINE, Memory, Shape, table

SMALL = Shape(hidden=384, layers=2, tokens=24, rank=8, vocabulary=64)  # weights dominate


@functools.cache
def measure(name: str, checkpointing: bool) -> Memory:
    return lora_memory.measure(SMALL, name, checkpointing=checkpointing)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
def test_weights_and_saved_activations_of_an_fp8_base(checkpointing):
    bf16, fp8 = measure(BASELINE, checkpointing), measure("FP8", checkpointing)
    assert fp8.held <= 0.62 * bf16.held
    assert fp8.weights <= 0.56 * bf16.weights
    assert fp8.peak < 0.85 * bf16.peak
    if not checkpointing:
        assert fp8.saved < 0.65 * bf16.saved


@pytest.mark.slow
def test_codes_kept_for_backward_are_less_than_inputs():
    low, high = measure("FP8", False), measure("FP8, x high", False)
    assert low.weights == high.weights
    assert low.saved < 0.95 * high.saved


@pytest.mark.slow
def test_a_step_leaves_nothing_behind_and_holds_what_it_must():
    """A float32 adapter has a gradient and two states at the optimizer's moment."""
    found = {BASELINE: measure(BASELINE, True)}
    weights, saved, peak = found[BASELINE]
    assert saved < 0.1 * weights
    assert peak > 1.1 * weights
    head, _, _, _, row = table(SMALL, found, "title").splitlines()
    assert head == "title"
    assert row.count("1.00") == 2
