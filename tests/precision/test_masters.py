"""Weights that train as codes, with masters in host memory: the same training, elsewhere."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from finetune import get_receipt, revert, teardown_fp8_mixed_precision_training
from finetune.errors import ConfigError, PlanError, ProofError
from finetune.precision.convert import conversion_of, disabled
from finetune.precision.numbers.weights import Arithmetic, dequantize_weight, wgrad
from finetune.precision.stored import masters
from finetune.precision.stored.trained import TrainedMixin
from finetune.training.helper.optimizer import adamw_host
from tests.conftest import slow_but

STEPS = 4
IDS = torch.randint(1, 272, (2, 32), generator=torch.Generator().manual_seed(0))


def gpt2() -> Any:
    """Weights [K, N], a table of positions, a head tied to the embedding."""
    torch.manual_seed(0)
    shape = GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=272, n_positions=64)
    return GPT2LMHeadModel(shape).train()


def trained(setup, model: Any, *, micro: int = 1, optimizer=None, **settings):
    """Losses and gradient norms of a few steps, and the prepared model."""
    accelerator = setup("emulated", **settings)
    make = optimizer or (lambda weights: torch.optim.AdamW(weights, lr=1e-3))
    model, stepped = accelerator.prepare(model, make(model.parameters()))
    found = []
    for _ in range(STEPS):
        for shift in range(micro):
            ids = IDS.roll(shift, 0)
            accelerator.backward(model(input_ids=ids, labels=ids).loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
        stepped.step()
        stepped.zero_grad()
        with torch.no_grad():
            found.append((float(norm), model(input_ids=IDS, labels=IDS).loss.item()))
    return found, model


def masters_of(model: Any) -> list[Any]:
    conversion: Any = conversion_of(model)
    return conversion.engine.masters.each


def chance(weights):
    """8-bit AdamW with rounding by chance, by the compiled update."""
    from torchao.optim import AdamW8bit

    return AdamW8bit(weights, lr=1e-3, block_size=64, bf16_stochastic_round=True)


def fused(weights):
    """As Transformers has it: it moves no version counter of a weight (torch 2.13)."""
    return torch.optim.AdamW(weights, lr=1e-3, fused=True)


@pytest.mark.parametrize(
    "case",
    slow_but(
        [{"scaling": "tensorwise", "micro": 2}],
        [
            {"scaling": "tensorwise", "power_of_two_scales": True, "optimizer": chance},
            {"scaling": "tensorwise", "dtype": torch.float32, "micro": 2},
            {"scaling": "tensorwise", "fp8_format": "e4m3"},
            {"scaling": "tensorwise", "high_gemms": ["wgrad"]},
            {"scaling": "tensorwise", "optimizer": fused},
            {"scaling": "rowwise"},
        ],
    ),
)
def test_training_is_equal_to_the_bit_wherever_masters_are(case, make_llama, setup_backend) -> None:
    """A scale for the tensor, or powers of two: codes of fprop are those of dgrad, too."""
    settings = {key: value for key, value in case.items() if key != "dtype"}

    def run(**more):
        model = make_llama().to(case.get("dtype", torch.bfloat16))
        found, model = trained(setup_backend, model, eval_precision="fp8", **settings, **more)
        assert get_receipt().status == "proven"
        weights = {name: p.detach().clone() for name, p in model.named_parameters()}
        teardown_fp8_mixed_precision_training()
        return found, weights

    (found, weights), (there, masters_) = run(), run(fp8_params=True)
    assert found == there
    assert weights.keys() == masters_.keys()
    assert all(torch.equal(masters_[name], w) for name, w in weights.items())


def test_the_compiled_update_feeds_the_codes(make_llama, setup_backend, monkeypatch) -> None:
    """It writes by addresses, which no version counter of torch's sees."""
    monkeypatch.setattr(adamw_host, "LEAST", 1)
    model = make_llama().to(torch.bfloat16)
    _, model = trained(setup_backend, model, scaling="tensorwise", fp8_params=True,
                       optimizer=chance)  # fmt: skip
    for one in masters_of(model):
        if one.tile is not None:
            seen = dequantize_weight(one.bits, one.inverse, one.tile)
            assert (seen - one.parameter.float()).abs().max() < 0.05 * one.parameter.abs().max()
            assert not one.is_stale


def test_weights_of_both_layouts_and_tied_tables_train(setup_backend) -> None:
    found, model = trained(setup_backend, gpt2(), scaling="tensorwise", fp8_params=True)
    assert found[-1][1] < found[0][1]
    names = {name for name, m in model.named_modules() if isinstance(m, TrainedMixin)}
    assert len(names) == 8
    tied = [one for one in masters_of(model) if one.tile is None]
    assert len(tied) == 2  # the embedding, which is the head, and positions


def test_an_evaluation_reads_the_codes(make_llama, setup_backend) -> None:
    """In high precision: of them, as nothing else is on the device."""
    model = trained(setup_backend, make_llama(), scaling="tensorwise", fp8_params=True)[1].eval()
    with torch.no_grad():
        logits = model(input_ids=IDS).logits
        plain = make_llama().eval()
        plain.load_state_dict(model.state_dict())
        for name, module in model.named_modules():
            if isinstance(module, TrainedMixin):
                one: Any = module.fp8_master
                plain.get_submodule(name).weight.copy_(
                    dequantize_weight(one.bits, one.inverse, one.tile)
                )
        with torch.autocast("cpu", dtype=torch.bfloat16):
            there = plain(input_ids=IDS).logits.float()
        torch.testing.assert_close(logits, there, rtol=0.05, atol=0.02)
        with disabled(model):
            assert torch.equal(model(input_ids=IDS).logits, logits)
        assert model.generate(IDS[:1, :4], max_new_tokens=2, do_sample=False).shape == (1, 6)


def test_a_part_of_the_model_sees_the_last_update(make_llama, setup_backend) -> None:
    model = trained(setup_backend, make_llama(), scaling="tensorwise", fp8_params=True)[1]
    layer = model.model.layers[0].mlp.up_proj
    x = torch.ones(16, 64)
    with torch.no_grad():
        before = layer(x)
        layer.weight.mul_(2)
        assert torch.allclose(layer(x), 2 * before, rtol=0.1)
        layer.weight.data.copy_(layer.weight.data / 2)  # no version counter tells
        assert torch.allclose(layer(x), before, rtol=0.1)


def test_a_script_saves_loads_moves_and_averages_masters(make_llama, setup_backend) -> None:
    """By names and types of a plain model; what it writes past autograd is evaluated."""
    model = trained(setup_backend, make_llama(), scaling="tensorwise", fp8_params=True)[1].eval()

    def logits() -> torch.Tensor:
        with torch.no_grad():
            return model(input_ids=IDS).logits

    before, kept = logits(), copy.deepcopy(model.state_dict())
    assert kept.keys() == make_llama().state_dict().keys()
    assert all(torch.equal(kept[name], p) for name, p in model.named_parameters())
    average = [0.9 * p.detach() for p in model.parameters()]
    for swap in (False, True):
        for p, mean in zip(model.parameters(), average, strict=True):
            if swap:
                p.data = mean.clone()
            else:
                p.data.copy_(mean)
        assert not torch.equal(logits(), before)
        model.load_state_dict(kept)
        assert torch.equal(logits(), before)
    model.to("cpu", torch.float32)
    assert torch.equal(logits(), before)


def test_a_cast_between_micro_steps_is_refused(make_llama, setup_backend) -> None:
    accelerator = setup_backend("emulated", scaling="tensorwise", fp8_params=True)
    model = make_llama().to(torch.bfloat16)
    model, stepped = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.backward(model(input_ids=IDS, labels=IDS).loss)
    stepped.step()
    model.float()  # with gradients
    accelerator.backward(model(input_ids=IDS, labels=IDS).loss)
    with pytest.raises(ProofError, match="were cast from bfloat16 to float32"):
        stepped.step()


def test_copies_and_a_reverted_model_have_the_masters(make_llama, setup_backend) -> None:
    _, model = trained(setup_backend, make_llama(), scaling="tensorwise", fp8_params=True)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    again = copy.deepcopy(model), pickle.loads(pickle.dumps(revert(model))), model
    for one in again:
        assert not any(isinstance(m, TrainedMixin) for m in revert(one).modules())
        assert all(torch.equal(p, weights[name]) for name, p in one.named_parameters())


def test_weights_changed_behind_a_forward_are_found_at_the_step(make_llama, setup_backend) -> None:
    """As by a hook in backward: what was multiplied is not what is updated."""
    accelerator = setup_backend("emulated", scaling="tensorwise", fp8_params=True)
    model = make_llama()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    accelerator.backward(model(input_ids=IDS, labels=IDS).loss)
    for layer in model.model.layers:
        layer.self_attn.k_proj.weight.data.mul_(2)
        layer.self_attn.v_proj.weight.data.mul_(2)
    with pytest.raises(ProofError, match="other weights than those in host memory"):
        optimizer.step()


def test_only_with_masters_a_trainer_leaves_the_model_where_it_is(
    make_llama, setup_backend, tmp_path
) -> None:
    # All weights on a GPU, before the first of them leaves, can be more than it has.
    def moved(**settings: Any) -> bool:
        setup_backend("emulated", scaling="tensorwise", **settings)
        args = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
        return Trainer(make_llama(), args).place_model_on_device

    assert not moved(fp8_params=True)
    assert moved()


@pytest.mark.slow
def test_a_trainer_resumes_to_the_bit(make_llama, setup_backend, tmp_path) -> None:
    """Checkpoints hold masters and states, and codes follow from them."""
    rows: Any = [{"input_ids": row, "labels": row} for row in IDS.repeat(4, 1)]

    def run(folder: str, resume: str | None = None) -> dict[str, torch.Tensor]:
        setup_backend("emulated", scaling="tensorwise", fp8_params=True)
        args = TrainingArguments(
            output_dir=str(tmp_path / folder), max_steps=4, save_steps=2, use_cpu=True, bf16=True,
            report_to="none", learning_rate=1e-2, disable_tqdm=True,
        )  # fmt: skip
        trainer: Any = Trainer(model=make_llama(), args=args, train_dataset=rows)
        trainer.train(resume_from_checkpoint=resume)
        assert get_receipt().status == "proven"
        teardown_fp8_mixed_precision_training()
        return trainer.model.state_dict()

    whole = run("whole")
    resumed = run("resumed", str(tmp_path / "whole" / "checkpoint-2"))
    assert all(torch.equal(resumed[name], w) for name, w in whole.items())


@pytest.mark.parametrize(
    ("settings", "said", "fix"),
    [
        ({"scaling": "blockwise"}, "current scaling", "rowwise"),
        ({"scaling": "rowwise", "frozen": "fp8"}, "frozen=fp8", "fp8_params"),
        ({"scaling": "tensorwise", "fp8_format": "e5m2"}, "E4M3", "fp8_format"),
        ({"backend": "te", "scaling": "tensorwise"}, "owns its weights", "torchao"),
    ],
)
def test_what_holds_no_codes_is_refused(settings, said, fix, setup_backend) -> None:
    from finetune import setup_fp8_mixed_precision_training

    with pytest.raises(ConfigError, match=said) as refused:
        setup_fp8_mixed_precision_training(emulation="allow", fp8_params=True, **settings)
    assert fix in refused.value.fix


def test_weights_that_are_no_layers_are_refused_by_name(setup_backend) -> None:
    from tests.precision.test_parameters import Block

    with pytest.raises(PlanError, match="multiplies by a parameter"):
        trained(setup_backend, Block(), scaling="rowwise", fp8_params=True)


def test_a_base_that_does_not_train_is_refused(make_llama, setup_backend) -> None:
    model = make_llama()
    model.model.requires_grad_(False)
    with pytest.raises(PlanError, match="no FP8 layer of this model trains"):
        trained(setup_backend, model, scaling="rowwise", fp8_params=True)


# ------------------------------------------------------------------------------- the other memory


@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("tokens", [32, 37])
def test_wgrad_on_hardware_is_the_emulated_one(per_row, tokens) -> None:
    """`torch._scaled_mm` of transposed codes, padded to what it takes."""
    generator = torch.Generator().manual_seed(0)
    g = torch.randn(tokens, 48, generator=generator).bfloat16()
    x = torch.randn(tokens, 64, generator=generator).bfloat16()
    how = Arithmetic((1, 1), per_row=per_row, pow2=True)
    dw = wgrad(g, x, how)
    torch.testing.assert_close(wgrad(g, x, how._replace(emulate=False)), dw, rtol=2**-7, atol=0)
    exact = g.float().t() @ x.float()
    assert (dw.float() - exact).norm() < 0.05 * exact.norm()


class Stream:
    """A stream that notes what it is told; events are numbers of its last operation."""

    def __init__(self, log: list, name: str) -> None:
        self.log, self.name = log, name

    def wait_stream(self, other) -> None:
        self.log.append((self.name, "waits for", other.name))

    def wait_event(self, event) -> None:
        self.log.append((self.name, "waits until", event))

    def record_event(self) -> str:
        event = f"{self.name} {len(self.log)}"
        self.log.append((self.name, "reaches", event))
        return event

    def synchronize(self) -> None:
        self.log.append(("host", "waits for", self.name))


@pytest.fixture
def streams(monkeypatch):
    """Masters on a GPU whose memory is the host's, and the log of its streams."""
    import contextlib

    log: list = []
    compute, ended = Stream(log, "compute"), []
    made = masters.Masters(pow2=False)
    monkeypatch.setattr(masters.Masters, "is_apart", True)
    made._streams = Stream(log, "up"), Stream(log, "down")
    engine = SimpleNamespace(queue_callback=ended.append)
    monkeypatch.setattr("torch.autograd.Variable._execution_engine", engine, raising=False)
    monkeypatch.setattr("torch.cuda.current_stream", lambda _=None: compute)
    monkeypatch.setattr("torch.cuda.stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(
        masters.Masters, "host_memory", lambda _, shape, dtype: torch.empty(shape, dtype=dtype)
    )
    return made, log, ended


def test_gradients_leave_before_many_are_there_and_the_host_waits_once(streams) -> None:
    """Each is let go once the compute stream waits for its transfer, `IN_FLIGHT` later."""
    made, log, ended = streams
    weights = [nn.Parameter(torch.zeros(4, 4)) for _ in range(6)]
    for step in (1, 2):
        for number, w in enumerate(weights):
            made.send(made.of(w, (4, 4)), torch.full((4, 4), float(number)))
            assert len(made._leaving) <= masters.IN_FLIGHT
        assert not [entry for entry in log if entry[0] == "host"]
        assert len(ended) == step  # one end for all gradients of a backward
        ended[-1]()
        assert not made._leaving
        assert log.pop() == ("host", "waits for", "down")
        for number, w in enumerate(weights):  # added up, over both micro-steps
            assert w.grad is not None
            assert torch.equal(w.grad, torch.full((4, 4), step * float(number)))
    gone = [entry[2] for entry in log if entry[:2] == ("down", "reaches")]
    waited = [entry[2] for entry in log if entry[:2] == ("compute", "waits until")]
    assert waited == gone  # in order, none forgotten


def test_a_backward_that_broke_off_leaves_nothing_for_the_next(streams) -> None:
    """Its end never came: the next forward ends it, and the next backward has one of its own."""
    made, log, ended = streams
    w = made.of(nn.Parameter(torch.zeros(4, 4)), (4, 4))
    made.send(w, torch.ones(4, 4))
    made.refresh()
    assert not made._leaving
    assert ("host", "waits for", "down") in log
    made.send(w, torch.ones(4, 4))
    assert len(ended) == 2


def test_codes_are_waited_for_where_they_are_used(streams) -> None:
    made, log, _ = streams
    one, other = (made.of(nn.Parameter(torch.randn(4, 4)), (4, 4)) for _ in range(2))
    made.refresh()
    assert log[0] == ("up", "waits for", "compute")  # products by the codes before
    assert not [entry for entry in log if entry[0] in ("compute", "host")]
    other.lend()
    assert log[-1] == ("compute", "waits until", "up 2")
    one.lend()
    assert log[-1] == ("compute", "waits until", "up 1")
    log.clear()
    one.lend()
    made.refresh()
    assert not log  # nothing has changed since
