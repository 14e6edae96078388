"""float16 compute: overflow is skipped, the scale backs off and grows, and all is reported."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from finetune import get_receipt, load_recipe
from finetune.errors import NonFiniteError, PrecisionError, ProofError
from finetune.precision.settings import PrecisionConfig
from finetune.runs.receipt import RunReport
from finetune.training.helper import session
from finetune.training.helper.compute_types import LOSS_SCALING, refuse_vanished_scale
from tests.config.test_optimizers import SMALL, low_bit_adamw
from tests.conftest import batch
from tests.run_folders import trained

OPTIMIZERS = {
    "plain": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "bitsandbytes 8 bits": lambda p: low_bit_adamw("adamw_8bit", p, lr=1e-2),
    "torchao 4 bits": lambda p: low_bit_adamw("adamw_torch_4bit", p, lr=1e-2),
}


def run(out: Path, *overrides: str, recipe: str = "tiny_full_bf16") -> RunReport:
    settings = [*SMALL, "precision.compute=fp16", *overrides]
    return trained(load_recipe(recipe, settings), out=out, console=Console(quiet=True))


def logs(report: RunReport) -> list[dict[str, Any]]:
    lines = (report.folder / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "loss" in row]


def prepared(model, make_optimizer=OPTIMIZERS["plain"], **scaling):
    from accelerate import Accelerator
    from accelerate.utils import GradScalerKwargs

    session.install(PrecisionConfig(compute="fp16"))
    accelerator = Accelerator(cpu=True, kwargs_handlers=[GradScalerKwargs(**scaling)])
    return accelerator, *accelerator.prepare(model, make_optimizer(model.parameters()))


def step(accelerator, model, optimizer, seed: int = 0) -> float:
    """One step as the Trainer takes it; the norm of the gradients."""
    accelerator.backward(model(**batch(seed=seed)).loss)
    norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return float(norm)


# -------------------------------------------------------------------------------------- a whole run


@pytest.mark.slow
def test_a_recipe_trains_in_float16_and_proves_it(tmp_path) -> None:
    report = run(tmp_path)
    receipt = report.receipt
    assert receipt.status == "proven"
    assert receipt.precision["ran"] == receipt.precision["asked"] == "fp16"
    scaling = {"init_scale": 65536.0, "growth_interval": 2000}
    scaling |= {"growth_factor": 2.0, "backoff_factor": 0.5}
    assert receipt.precision["effective"] == {"loss_scaling": scaling}
    base = [row for row in receipt.layers if row.role == "base"]
    assert {(row.fprop, row.dgrad, row.wgrad) for row in base} == {("fp16",) * 3}
    assert receipt.trainable["moved"] == receipt.trainable["after"]
    assert [row["skipped_steps"] for row in logs(report)] == [0, 0, 0]


@pytest.mark.slow
def test_overflow_is_skipped_backs_off_and_is_logged(tmp_path, monkeypatch) -> None:
    """From 2^22, where this model overflows; the learning rate waits for the first real step."""
    monkeypatch.setitem(LOSS_SCALING, "init_scale", 2.0**22)
    report = run(tmp_path, "train.max_steps=8")
    rows = logs(report)
    skipped = rows[-1]["skipped_steps"]
    assert 1 <= skipped <= 6
    for number, row in enumerate(rows, start=1):
        overflows = number <= skipped
        assert row["skipped_steps"] == min(number, skipped)
        assert row["loss_scale"] == 2.0 ** (22 - min(number, skipped))
        assert math.isfinite(row["grad_norm"]) != overflows
    assert len({row["learning_rate"] for row in rows[: skipped + 1]}) == 1, "it waits"
    assert rows[skipped + 1]["learning_rate"] < rows[0]["learning_rate"]
    assert report.receipt.status == "proven"
    model = load_file(report.folder / "model" / "model.safetensors")
    assert all(bool(w.isfinite().all()) for w in model.values())


@pytest.mark.slow
def test_a_run_of_skipped_steps_alone_is_not_proven(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(LOSS_SCALING, "init_scale", 1e30)
    report = run(tmp_path)
    assert report.receipt.status.startswith("not proven: weights have not been seen to move")
    assert report.receipt.trainable["moved"] == 0
    assert [row["skipped_steps"] for row in logs(report)] == [1, 2, 3]


@pytest.mark.slow
def test_resuming_goes_on_with_scale_and_count(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(LOSS_SCALING, "init_scale", 2.0**22)
    monkeypatch.setitem(LOSS_SCALING, "growth_interval", 3)
    settings = [
        "train.max_steps=9", "train.save_strategy=steps", "train.save_steps=5",
        "train.optim=adamw_torch_fused",
    ]  # fmt: skip
    whole = run(tmp_path, *settings)
    resume = f"train.resume_from_checkpoint={whole.folder}/checkpoints/checkpoint-5"
    resumed = run(tmp_path, *settings, resume)
    keys = ("step", "loss", "learning_rate", "loss_scale", "skipped_steps")
    expected = [[row[key] for key in keys] for row in logs(whole)]
    assert [[row[key] for key in keys] for row in logs(resumed)] == expected
    assert expected[5][-1] > 0
    a, b = (load_file(r.folder / "model" / "model.safetensors") for r in (whole, resumed))
    assert all(torch.equal(a[key], b[key]) for key in a)


def test_a_weight_that_no_scale_can_save_is_named(tmp_path, monkeypatch) -> None:
    from finetune.training import trainer

    load = trainer.load_model

    def broken(config, *_):
        model = load(config)
        model.model.layers[2].mlp.up_proj.weight.data[0, 0] = float("inf")
        return model

    monkeypatch.setitem(LOSS_SCALING, "init_scale", 4.0)
    monkeypatch.setattr(trainer, "load_model", broken)
    with pytest.raises(NonFiniteError, match=r"first step[\s\S]*layers\.2\.mlp\.up_proj\.weight"):
        run(tmp_path, "train.max_steps=9")
    assert not list(tmp_path.glob("**/model"))


def test_a_scale_that_has_vanished_is_refused() -> None:
    """The last resort: a gradient that no scale can save is named before (`Finiteness`)."""
    refuse_vanished_scale(1.0, 3)
    with pytest.raises(ProofError, match=r"loss scale of 0\.5[\s\S]*3 steps were skipped"):
        refuse_vanished_scale(0.5, 3)


@pytest.mark.slow
def test_accumulated_gradients_are_unscaled_once(tmp_path) -> None:
    settings = ["train.gradient_accumulation_steps=2", "train.per_device_train_batch_size=2"]
    fp16 = logs(run(tmp_path, *settings))
    fp32 = logs(run(tmp_path, *settings, "precision.compute=fp32"))
    for a, b in zip(fp16, fp32, strict=True):
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=2e-2)


# -------------------------------------------------------------------------------- single steps


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_skipped_step_touches_neither_weights_nor_moments(kind, make_llama) -> None:
    """Fused optimizers too, which would skip unseen and let the learning rate go on."""
    accelerator, model, optimizer = prepared(make_llama(), OPTIMIZERS[kind], init_scale=2.0**60)
    before = {name: w.clone() for name, w in model.state_dict().items()}
    for _ in range(2):
        assert not math.isfinite(step(accelerator, model, optimizer))
        assert optimizer.step_was_skipped
    assert accelerator.scaler.get_scale() == 2.0**58
    assert all(torch.equal(w, before[name]) for name, w in model.state_dict().items())
    assert not optimizer.state
    assert get_receipt().status == "not proven: weights have not been seen to move"

    accelerator.scaler.update(1024.0)
    for seed in range(2):
        assert get_receipt().status != "proven"
        assert math.isfinite(step(accelerator, model, optimizer, seed))
        assert not optimizer.step_was_skipped
    receipt = get_receipt()
    assert receipt.status == "proven"
    assert receipt.precision["effective"]["loss_scaling"]["init_scale"] == 2.0**60
    assert not any(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_weights_that_train_in_float16_are_refused(make_llama) -> None:
    with pytest.raises(PrecisionError, match="trainable weights are float16"):
        prepared(make_llama().half())


def test_frozen_float16_weights_are_not(make_llama) -> None:
    from peft import LoraConfig, get_peft_model

    base = make_llama().half()
    model = get_peft_model(base, LoraConfig(r=8, target_modules="all-linear")).train()
    accelerator, model, optimizer = prepared(
        model, lambda _: torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    )
    for seed in range(2):
        step(accelerator, model, optimizer, seed)
    assert get_receipt().status == "proven"


# ------------------------------------------------------------------------------------------ refused


def test_bfloat16_weights_are_refused_before_loading(tmp_path) -> None:
    with pytest.raises(PrecisionError, match=r"are bfloat16[\s\S]*model.dtype=float32"):
        run(tmp_path, "model.dtype=bfloat16")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise", "blockwise", "mxfp8"])
def test_a_scaled_loss_changes_no_fp8_gradient(make_llama, setup_backend, scaling) -> None:
    """So FP8 needs no loss scaling, and has none."""
    accelerator = setup_backend("emulated", scaling=scaling)
    model = accelerator.prepare(make_llama(num_hidden_layers=1))
    gradients = []
    for factor in (1.0, 2.0**10):
        model.zero_grad()
        (model(**batch()).loss * factor).backward()
        gradients.append({n: p.grad / factor for n, p in model.named_parameters()})
    plain, scaled = gradients
    assert all(torch.equal(grad, scaled[name]) for name, grad in plain.items())
