"""The Transformer Engine backend over the engine's own Python, and over the stand-in for it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from finetune import get_receipt, setup_fp8_mixed_precision_training
from finetune.precision import convert, planner
from finetune.precision.settings import PrecisionConfig
from tests import te
from tests.conftest import batch, on_h100, train
from tests.te.fetch import is_here


@pytest.fixture(params=["own", "stand-in"])
def te_engine(request, monkeypatch):
    """Both engines in turn, so that neither departs from the other."""
    if request.param == "own" and not is_here():
        pytest.skip("needs Transformer Engine's wheel: python -m tests.te.fetch")
    on_h100(monkeypatch)
    return te.install(monkeypatch, real=request.param == "own")


@pytest.fixture
def prepared(make_llama, te_engine):
    """A Llama under te/delayed, its accelerator and conversion."""
    accelerator = setup_fp8_mixed_precision_training("te", amax_history_len=8, cpu=True)
    model = accelerator.prepare(make_llama())
    return accelerator, model, convert.conversion_of(model)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_history_holds_one_amax_a_training_forward(prepared, te_engine, checkpointing) -> None:
    accelerator, model, conversion = prepared
    if checkpointing:
        model.activation_checkpointing_enable()
        model.enable_input_require_grads()
    for step in range(1, 4):
        accelerator.backward(model(**batch(seed=step)).loss)
        state = conversion.engine.state_tensors()
        for direction in ("scaling_fwd", "scaling_bwd"):
            history = state[f"0.{direction}.amax_history"]
            assert (history[:, 0] > 0).sum() == step, "not again in recomputation"
    model.eval()
    with torch.no_grad():
        model(**batch())
    assert (state["0.scaling_fwd.amax_history"][:, 0] > 0).sum() == 3, "not in evaluation"
    assert te_engine.depth == 0
    assert set(state) == {
        f"{i}.{direction}.{name}"
        for i in range(14)
        for direction in ("scaling_fwd", "scaling_bwd")
        for name in ("amax_history", "scale")
    }


def test_calls_without_gradients_leave_no_amax(prepared) -> None:
    """They would set the scales of the next training step."""
    accelerator, model, conversion = prepared
    with torch.no_grad():  # before there is any state
        model(**batch(seed=8))
    for step in range(2):
        accelerator.backward(model(**batch(seed=step)).loss)
    before = {k: v.clone() for k, v in conversion.engine.state_tensors().items()}
    assert int((before["0.scaling_fwd.amax_history"][:, 0] > 0).sum()) == 2
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(50)
        model(**batch(seed=9))
    after = conversion.engine.state_tensors()
    assert all(torch.equal(after[k], before[k]) for k in before)


def test_scaling_state_is_taken_back(make_llama, prepared, te_engine) -> None:
    accelerator, model, conversion = prepared
    for step in range(3):
        accelerator.backward(model(**batch(seed=step)).loss)
    state = {k: v.clone() for k, v in conversion.engine.state_tensors().items()}
    accelerator = setup_fp8_mixed_precision_training("te", amax_history_len=8, cpu=True)
    fresh = accelerator.prepare(make_llama())
    backend = convert.conversion_of(fresh).engine
    backend.load_state_tensors(state)
    assert all(torch.equal(v, state[k]) for k, v in backend.state_tensors().items())
    assert te_engine.depth == 0


@pytest.mark.parametrize("length", [16, 13, 1])
def test_any_number_of_tokens(prepared, length) -> None:
    """Rows are padded to a multiple of 16 for the GEMM and cut again."""
    accelerator, model, _ = prepared
    outputs = model(**batch(3, length))
    assert outputs.logits.shape[:2] == (3, length)
    accelerator.backward(outputs.logits.square().mean())
    assert get_receipt().precision["ran"] == "fp8"


def test_nothing_of_the_engine_is_in_the_model(make_llama, te_engine) -> None:
    """One copy of each weight, plain names in the state dict, no module more."""
    plain = make_llama()
    parameters, modules = dict(plain.named_parameters()), dict(plain.named_modules())
    model = setup_fp8_mixed_precision_training("te", cpu=True).prepare(plain)
    model(**batch())
    assert all(p is parameters[name] for name, p in model.named_parameters())
    assert dict(model.named_modules()).keys() == modules.keys()
    assert not [key for key in model.state_dict() if "extra_state" in key]


def test_gpt2_weights_are_multiplied_transposed(te_engine) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    shape = {"n_embd": 64, "n_layer": 1, "n_head": 2, "vocab_size": 272, "n_positions": 64}
    ids = {"bos_token_id": 1, "eos_token_id": 2, "use_cache": False}
    model = GPT2LMHeadModel(GPT2Config(**shape, **ids)).train()
    accelerator = setup_fp8_mixed_precision_training("te", cpu=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    train(accelerator, model, optimizer)
    receipt = get_receipt()
    assert receipt.status == "proven"
    assert {r.wgrad for r in receipt.layers if r.role == "base"} == {"fp8"}


def test_a_layer_called_by_itself_begins_a_step(te_engine) -> None:
    """Some scripts call parts of a model; its scales move nevertheless, and layers' beside it."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    precision = PrecisionConfig(compute="fp8", backend="te", scaling="delayed")
    convert.apply(model, planner.plan(model, precision))
    for size in (1.0, 4.0):
        model[0](torch.full((16, 64), size, requires_grad=True)).sum().backward()
    (scale, history, g_scale, _), idle = (layer.fp8_states for layer in model)
    assert scale[0] == 448, "that of the first call"
    assert history[0, 0] == 4
    assert g_scale[0] != 1
    assert idle[0][0] == 1
