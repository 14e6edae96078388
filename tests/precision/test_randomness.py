"""Stochastic rounding draws from a generator of its own: nothing else of the run notices."""

from __future__ import annotations

import json
from unittest.mock import patch

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from torch import nn

from finetune import load_recipe, train
from finetune.precision import constants, convert, planner
from tests.conftest import emulated

QUIET = Console(quiet=True)


def gradients(*, seed: int = 0, stochastic: bool = True) -> tuple[list, torch.Tensor]:
    """Three backwards of a model with dropout; and the state torch's own generator ends in."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.Linear(64, 32))
    with patch.object(constants, "STOCHASTIC_ROUNDING", stochastic):
        convert.apply(model, planner.plan(model, emulated(scaling="nvfp4")))
    found = []
    for step in range(3):
        model.zero_grad()
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        found.append([p.grad.clone() for p in model.parameters()])
    return found, torch.get_rng_state()


def equal(a: list, b: list) -> bool:
    return all(
        torch.equal(x, y) for m, n in zip(a, b, strict=True) for x, y in zip(m, n, strict=True)
    )


def test_same_seed_same_gradients() -> None:
    assert equal(gradients()[0], gradients()[0])
    assert not equal(gradients()[0], gradients(seed=1)[0])


def test_torchs_own_generator_is_left_alone() -> None:
    """So dropout masks are those of the run without it, and whatever else is drawn."""
    (with_it, state), (without, plain) = gradients(), gradients(stochastic=False)
    assert torch.equal(state, plain)
    assert not equal(with_it, without)
    # The last layer's bias gets its gradient past all rounding: the same masks were drawn.
    assert all(torch.equal(a[3], b[3]) for a, b in zip(with_it[:1], without[:1], strict=True))


def test_recomputation_draws_nothing() -> None:
    from torch.utils.checkpoint import checkpoint

    class Net(nn.Module):
        def __init__(self, again: bool) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.again, self.layer = again, nn.Linear(64, 64)

        def forward(self, x):
            return checkpoint(self.layer, x, use_reentrant=False) if self.again else self.layer(x)

    grads = []
    for again in (False, True):
        model = Net(again)
        convert.apply(model, planner.plan(model, emulated(scaling="nvfp4")))
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(7))
        for _ in range(2):
            model(x).square().mean().backward()
        grads.append(model.layer.weight.grad)
    assert torch.equal(*grads)


@pytest.mark.long
def test_resuming_is_bit_identical(tmp_path) -> None:
    """The generator's state lies beside the checkpoint; without it the run is another one."""
    overrides = [
        "precision.scaling=nvfp4", "~precision.amax_history_len", "train.max_steps=4",
        "train.save_strategy=steps", "train.save_steps=2", "train.warmup_steps=0",
        "train.per_device_train_batch_size=2", "train.gradient_accumulation_steps=1",
        "train.logging_steps=1",
    ]  # fmt: skip
    whole = train(load_recipe("tiny_full_fp8", overrides), out=tmp_path, console=QUIET)
    assert whole.receipt.status == "proven"
    assert whole.receipt.flop_share["fp4"] > 0.5
    checkpoint = whole.folder / "checkpoints" / "checkpoint-2"
    assert set(load_file(checkpoint / "fp8_scaling.safetensors")) == {"random"}
    again = [*overrides, f"train.resume_from_checkpoint={checkpoint}"]

    def losses(report) -> dict[int, float]:
        lines = (report.folder / "metrics.jsonl").read_text().splitlines()
        return {r["step"]: r["loss"] for r in map(json.loads, lines) if "loss" in r}

    resumed = train(load_recipe("tiny_full_fp8", again), out=tmp_path, console=QUIET)
    assert losses(resumed) == losses(whole)
    a, b = (load_file(r.folder / "model" / "model.safetensors") for r in (whole, resumed))
    assert all(torch.equal(a[key], b[key]) for key in a)
    (checkpoint / "fp8_scaling.safetensors").unlink()
    with pytest.raises(ValueError, match=r"fp8_scaling\.safetensors is missing"):
        train(load_recipe("tiny_full_fp8", again), out=tmp_path, console=QUIET)


def test_each_process_keeps_its_own_state(tmp_path) -> None:
    """Generators differ by what they drew for, and amaxes without `reduce_amax`."""
    from finetune.training.helper.scaling_state import load_scaling, save_scaling

    def backend():
        model = nn.Sequential(nn.Linear(64, 64))
        return convert.apply(model, planner.plan(model, emulated(scaling="nvfp4"))).engine

    like, states = torch.empty(4), []
    for process in range(2):
        saving = backend()
        for _ in range(process + 1):
            saving.randomness.uniform(like)
        save_scaling(saving, tmp_path, process)
        states.append(saving.randomness.state)
    assert not torch.equal(*states)
    for process, expected in enumerate([*states, states[0]]):
        loading = backend()
        assert load_scaling(loading, tmp_path, process) == ""
        assert torch.equal(loading.randomness.state, expected)
