"""Loops of scripts: closures, optimizers inside the backward, checkpoints, nothing prepared."""

from __future__ import annotations

import atexit
import gc

import pytest
import torch
from peft import LoraConfig, get_peft_model
from rich.console import Console
from torch import nn
from transformers import Trainer, TrainingArguments

from finetune import (
    disabled,
    get_receipt,
    load_recipe,
    teardown_fp8_mixed_precision_training,
)
from finetune.errors import OrderError, ProofError
from finetune.hardware.device import this_device
from finetune.hardware.requirements import resolve
from finetune.precision.proof import proof
from finetune.precision.proof.proof import Proof
from finetune.precision.stored.frozen import FrozenMixin
from finetune.training.helper import session
from tests.conftest import batch


def prepared(model, setup_backend, **kwargs):
    accelerator = setup_backend("emulated", **kwargs)
    return accelerator, *accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))


def step(accelerator, model, optimizer, seed: int = 0) -> None:
    accelerator.backward(model(**batch(seed=seed)).loss)
    optimizer.step()
    optimizer.zero_grad()


def test_closure_is_judged_between_backward_and_update(make_llama, setup_backend) -> None:
    accelerator, model, optimizer = prepared(make_llama(), setup_backend)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(**batch()).loss
        accelerator.backward(loss)
        return loss

    for _ in range(3):
        optimizer.step(closure)
    assert get_receipt().status == "proven"
    model.eval()
    with pytest.raises(ProofError, match="BF16 entered at optimizer step 4: 14 layers"):
        optimizer.step(closure)


def test_optimizer_inside_the_backward(make_llama, setup_backend) -> None:
    accelerator = setup_backend("emulated")
    model = accelerator.prepare(make_llama())
    optimizers = {p: torch.optim.SGD([p], lr=1e-2) for p in model.parameters()}

    def update(p: torch.Tensor) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(update)
    for seed in range(3):
        accelerator.backward(model(**batch(seed=seed)).loss)
    receipt = get_receipt()
    counts = receipt.trainable
    assert receipt.status == "proven"
    assert counts["in_optimizer"] == counts["moved"] == counts["before"]
    assert receipt.held["steps"] == 2, "once in each backward after the witnessed one"
    model.eval()
    with pytest.raises(ProofError, match="BF16 entered"):
        accelerator.backward(model(**batch()).loss)


def test_a_state_that_torch_makes_to_load_into_is_no_step(make_llama, setup_backend) -> None:
    """It steps with zeros before the first forward: so did every run under FSDP2 that went on."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    accelerator, model, optimizer = prepared(make_llama(), setup_backend)
    inner = optimizer.optimizer
    assert get_optimizer_state_dict(model, inner)["state"]
    assert inner.state
    assert get_receipt().status == "not proven: no training step yet"
    for seed in range(2):
        step(accelerator, model, optimizer, seed)
    assert get_receipt().status == "proven"
    assert get_receipt().held["steps"] == 2


def test_save_state_keeps_delayed_scales(make_llama, setup_backend, tmp_path) -> None:
    accelerator, model, optimizer = prepared(make_llama(), setup_backend, scaling="delayed")
    for seed in range(3):
        step(accelerator, model, optimizer, seed)
    accelerator.save_state(str(tmp_path))
    expected = model(**batch(seed=7)).loss.item()
    teardown_fp8_mixed_precision_training()
    accelerator, model, optimizer = prepared(make_llama(seed=1), setup_backend, scaling="delayed")
    accelerator.load_state(str(tmp_path))
    assert model(**batch(seed=7)).loss.item() == expected


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [("rowwise", {"scaling": "delayed"}, "has no FP8 scaling state"),
     ("delayed", {"scaling": "delayed", "margin": 1}, "is of another precision")],
)  # fmt: skip
def test_load_state_under_another_scaling(
    before, now, said, make_llama, setup_backend, tmp_path
) -> None:
    """Accelerate counts what is registered: it refused such states, beside objects of a script."""
    counters = [torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD([torch.ones(1)]))] * 2
    for settings, counter in zip(({"scaling": before}, now), counters, strict=True):
        accelerator, model, optimizer = prepared(make_llama(), setup_backend, **settings)
        accelerator.register_for_checkpointing(counter)
        if settings is not now:
            step(accelerator, model, optimizer)
            accelerator.save_state(str(tmp_path))
            expected = [p.detach().clone() for p in model.parameters()]
            teardown_fp8_mixed_precision_training()
    with pytest.warns(match=said):
        accelerator.load_state(str(tmp_path))
    assert all(map(torch.equal, model.parameters(), expected))
    step(accelerator, model, optimizer)


@pytest.mark.slow
def test_trainers_checkpoints_keep_delayed_scales(make_llama, setup_backend, tmp_path) -> None:
    """A stock `Trainer` that goes on from its checkpoint ends bit for bit where one run ends."""
    rows = [{"input_ids": x, "labels": x} for s in range(6) for x in batch(seed=s)["input_ids"]]

    def run(folder: str, *, resume: bool = False) -> dict[str, torch.Tensor]:
        setup_backend("emulated", scaling="delayed", amax_history_len=4)
        args = TrainingArguments(
            output_dir=str(tmp_path / folder), max_steps=6, save_steps=3, use_cpu=True, bf16=True,
            report_to="none", learning_rate=1e-2, disable_tqdm=True, logging_steps=1,
        )  # fmt: skip
        trainer = Trainer(model=make_llama(), args=args, train_dataset=rows)
        trainer.train(
            resume_from_checkpoint=str(tmp_path / "whole/checkpoint-3") if resume else None
        )
        teardown_fp8_mixed_precision_training()
        return trainer.model.state_dict()

    whole = run("whole")
    assert (tmp_path / "whole" / "checkpoint-3" / "fp8_scaling.safetensors").is_file()
    resumed = run("resumed", resume=True)
    assert all(torch.equal(resumed[name], w) for name, w in whole.items())
    (tmp_path / "whole" / "checkpoint-3" / "fp8_scaling.safetensors").unlink()
    with pytest.warns(UserWarning, match="has no FP8 scaling state"):
        fresh = run("fresh", resume=True)
    assert not all(torch.equal(fresh[name], w) for name, w in whole.items()), "histories matter"


@pytest.mark.slow
@pytest.mark.parametrize("frozen", [False, True])
def test_evaluation_before_training_is_no_reference(
    frozen, make_llama, setup_backend, tmp_path
) -> None:
    """`trainer.evaluate()` first, for a loss to compare with: high precision, then proven FP8."""
    rows = [{"input_ids": x, "labels": x} for s in range(2) for x in batch(seed=s)["input_ids"]]
    lora = LoraConfig(r=4, target_modules="all-linear")
    model = get_peft_model(make_llama(), lora) if frozen else make_llama()
    setup_backend("emulated", scaling="rowwise", **({"frozen": "fp8"} if frozen else {}))
    args = TrainingArguments(
        output_dir=str(tmp_path), max_steps=3, use_cpu=True, report_to="none", disable_tqdm=True,
        save_strategy="no", learning_rate=1e-2,
    )  # fmt: skip
    trainer = Trainer(model=model, args=args, train_dataset=rows, eval_dataset=rows[:2])
    trainer.evaluate()
    with torch.no_grad():
        high = model.eval()(**batch()).loss.item()
        with disabled(model):
            assert model(**batch()).loss.item() == high
    assert not get_receipt().precision.get("references")
    trainer.train()
    receipt = get_receipt()
    assert receipt.status == "proven"
    assert receipt.fp8_flop_share > 0.4
    stored = [m for m in model.modules() if isinstance(m, FrozenMixin)]
    assert len(stored) == (14 if frozen else 0)


@pytest.mark.slow
@pytest.mark.parametrize("inside", ["train", "reload"])
def test_a_recipe_inside_a_script_gives_its_session_back(
    inside, make_llama, setup_backend, tmp_path
) -> None:
    """Trainers built after `finetune.train` trained in BF16: nothing said that FP8 had ended."""
    accelerator = setup_backend("emulated")
    model = make_llama()
    model, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    precision = load_recipe("tiny_full_fp8").config.precision
    if inside == "train":
        resolution = resolve(precision, this_device())
        with session.session_of(resolution, Console(quiet=True)) as of_recipe:
            assert session.current() is of_recipe
    else:
        with session.replacing():
            session.install(precision)
    assert get_receipt().status.startswith("not proven")
    with pytest.raises(OrderError, match=r"replaced[\s\S]*or a recipe was run"):
        model.train()(**batch())
    args = TrainingArguments(
        output_dir=str(tmp_path), max_steps=2, use_cpu=True, report_to="none", disable_tqdm=True,
        save_strategy="no", learning_rate=1e-2,
    )  # fmt: skip
    rows = [{"input_ids": x, "labels": x} for x in batch()["input_ids"]]
    Trainer(model=make_llama(), args=args, train_dataset=rows).train()
    assert get_receipt().status == "proven"
    assert get_receipt().fp8_flop_share > 0.4
    teardown_fp8_mixed_precision_training()
    with session.session_of(resolve(precision, this_device()), Console(quiet=True)):
        pass
    assert session.in_force() is None


def test_nothing_prepared_is_stopped_at_the_first_step(make_llama, setup_backend) -> None:
    setup_backend("emulated")
    model = make_llama()
    optimizer = torch.optim.AdamW(model.parameters())
    model(**batch()).loss.backward()
    with pytest.raises(OrderError, match="no model was prepared"):
        optimizer.step()
    teardown_fp8_mixed_precision_training()
    optimizer.step()


def test_nothing_prepared_is_said_at_the_end(setup_backend, monkeypatch, capsys) -> None:
    at_exit = []
    monkeypatch.setattr(atexit, "register", at_exit.append)
    setup_backend("emulated")
    (say,) = (call for call in at_exit if call.__module__ == "finetune.training.setup")
    say()
    assert "no model was prepared: nothing ran in FP8" in capsys.readouterr().err


def test_processes_that_would_train_alone(make_llama, setup_backend, monkeypatch) -> None:
    accelerator = setup_backend("emulated")
    monkeypatch.setenv("WORLD_SIZE", "2")  # one of torchrun's, of which this Accelerator knows not
    with pytest.raises(OrderError, match="2 processes were started, and each would train alone"):
        accelerator.prepare(make_llama())


# ------------------------------------------------------------------------------- the whole share


def test_recurrent_layers_count(setup_backend) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.inner = nn.Linear(32, 32, bias=False)
            self.lstm = nn.LSTM(32, 16, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.lstm(self.inner(x.requires_grad_()))[0].square().mean()

    accelerator, model, optimizer = prepared(Model(), setup_backend)
    for _ in range(2):
        accelerator.backward(model(torch.randn(2, 8, 32)))
        optimizer.step()
        optimizer.zero_grad()
    # Fused, its products are an estimate; step by step, as CPUs without BF16 units run it, they are
    # seen: 32 * 32 for each token in FP8, 4 * 16 * (32 + 16) not.
    assert 0 < get_receipt().fp8_flop_share < 0.9


@torch.library.custom_op("finetune_test::opaque", mutates_args=())
def opaque(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x @ w


opaque.register_autograd(
    lambda ctx, g: (opaque(g, ctx.saved_tensors[1].t()), None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),  # noqa: ARG005
)


def test_operators_that_cannot_be_looked_into_are_listed(setup_backend) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.inner = nn.Linear(32, 32, bias=False)
            self.register_buffer("w", torch.randn(32, 32))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.inner(x.requires_grad_())
            return opaque(y, self.w.to(y.dtype)).square().mean()

    accelerator, model, optimizer = prepared(Model(), setup_backend)
    for _ in range(2):
        accelerator.backward(model(torch.randn(16, 32)))
        optimizer.step()
        optimizer.zero_grad()
    receipt = get_receipt()
    assert receipt.flop_share == pytest.approx({"fp8": 3 / 5, "unknown": 2 / 5})
    assert any("finetune_test::opaque" in row.reason for row in receipt.layers)


# ------------------------------------------------------------------------------ run after run


def fail(model, kind: int) -> None:
    """Make the next training step of a model raise: in forward, in backward, in checkpointing."""

    def raising(*_):
        raise RuntimeError("made to fail")

    layer = model.model.layers[1].mlp.down_proj
    if kind == 0:
        layer.register_forward_pre_hook(raising)
    elif kind == 1:
        layer.weight.register_hook(raising)
    else:
        model.lm_head.register_forward_hook(raising)


@pytest.mark.slow
@pytest.mark.parametrize("runs", [6, pytest.param(50, marks=pytest.mark.long)])
def test_a_failed_run_leaves_nothing_behind(make_llama, setup_backend, tmp_path, runs) -> None:
    setup_backend("emulated")
    ids = batch()["input_ids"].tolist()
    plain = torch.autograd.backward
    statuses = []
    for index in range(runs):
        args = TrainingArguments(
            output_dir=str(tmp_path), max_steps=2, use_cpu=True, report_to="none", bf16=True,
            save_strategy="no", learning_rate=1e-2, disable_tqdm=True, logging_steps=1,
            gradient_checkpointing=index % 2 == 1,
        )  # fmt: skip
        rows = [{"input_ids": x, "labels": x} for x in ids * 4]
        trainer = Trainer(model=make_llama(), args=args, train_dataset=rows)
        if index % 5 == 2:
            fail(trainer.model, index // 5 % 3)
            with pytest.raises(RuntimeError, match="made to fail"):
                trainer.train()
            assert get_receipt().status == "stopped: RuntimeError"
            continue
        trainer.train()
        statuses.append(get_receipt().status)
    assert statuses == ["proven"] * (runs - (runs + 2) // 5)
    del trainer
    gc.collect()
    assert torch.autograd.backward is plain
    assert not proof._watching
    assert sum(type(thing) is Proof for thing in gc.get_objects()) <= 2, "the receipt's"
