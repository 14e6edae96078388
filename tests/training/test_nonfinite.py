"""A NaN or Inf is named, and nothing is saved over what was saved before."""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from rich.console import Console
from torch import nn
from transformers import TrainerCallback

from finetune import HealthMonitor, load_recipe, train
from finetune.cli import app
from finetune.errors import NonFiniteError
from finetune.precision.planner import plan
from finetune.precision.settings import PrecisionConfig
from finetune.training.health import finiteness
from finetune.training.health.finiteness import Finding, advise, all_finite, check_parameters
from tests.conftest import batch, slow_but
from tests.training.test_health import trainer_of

QUIET = Console(quiet=True)
LAYER = "model.layers.1.mlp.down_proj"
pytestmark = pytest.mark.filterwarnings("ignore:.*(overflow and are saturated|signal over noise)")


def spoil_output(module: nn.Module, value: float = torch.nan):
    """The module's output gets one such value."""

    def hook(_, args, output):
        bad = output.clone()
        bad.view(-1)[0] = value
        return bad

    return module.register_forward_hook(hook)


# ------------------------------------------------------------------------------------ what is read


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_all_finite(value, dtype) -> None:
    tensors = [torch.ones(3), torch.zeros(0), torch.ones(2, 2, dtype=dtype)]
    assert all_finite(tensors)
    tensors[2][1, 0] = value
    assert not all_finite(tensors)
    tensors[0][0] = -value
    assert not all_finite(tensors)
    assert all_finite([])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_that_overflow_are_finite(dtype) -> None:
    most = torch.finfo(dtype).max
    assert all_finite([torch.full((400,), most, dtype=dtype)])
    assert all_finite([torch.full((4,), most, dtype=dtype), torch.full((4,), -most)])


def test_parameter(make_llama) -> None:
    model = make_llama()
    with torch.no_grad():
        model.get_submodule(LAYER).weight[2, 3] = torch.inf
    found = check_parameters(model)
    assert found is not None
    assert (found.kind, found.where) == ("parameter", f"{LAYER}.weight")
    assert found.counts == "0 NaN and 1 Inf of 8,192 values (float32 [64, 128])"


# --------------------------------------------------------------------------------- in the trainer


class At(TrainerCallback):
    """Does something to the model at the beginning of one step."""

    def __init__(self, step: int, action) -> None:
        self.step, self.action = step, action

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        if state.global_step + 1 == self.step:
            self.action(model)


def stopped(trainer) -> NonFiniteError:
    with pytest.raises(NonFiniteError) as caught:
        trainer.train()
    return caught.value


@pytest.mark.parametrize("backend", slow_but(["emulated"], ["te", "torchao", "emulated"]))
def test_trainer_stops_before_the_update(backend, make_llama, setup_backend, tmp_path) -> None:
    model = make_llama()
    weights: dict[str, torch.Tensor] = {}

    def spoil(model) -> None:
        weights.update({k: v.clone() for k, v in model.state_dict().items()})
        spoil_output(model.get_submodule(LAYER))

    setup_backend(backend, scaling="tensorwise", health_every=0)
    trainer = trainer_of(model, tmp_path, callbacks=[At(3, spoil)])
    step = trainer.training_step
    error = stopped(trainer)
    assert error.what == "the loss is not finite at step 3; stopped before anything was saved"
    assert error.where == "the loss: its value"
    assert "1 NaN and 0 Inf of 1 values" in error.why
    assert "look at the rows of this step" in error.fix
    assert isinstance(error, FloatingPointError)
    assert weights
    assert all(torch.equal(v, weights[k]) for k, v in model.state_dict().items())
    assert trainer.training_step == step


@pytest.mark.slow
def test_one_number_of_each_gradient_is_read(
    make_llama, setup_backend, tmp_path, monkeypatch
) -> None:
    """Finite norms settle it: weights are read when training ends."""
    read: list[int] = []
    plain = finiteness.all_finite

    def noted(tensors) -> bool:
        read.append(sum(t.numel() for t in tensors))
        return plain(tensors)

    setup_backend("emulated", health_every=0)
    model = make_llama()
    trainer = trainer_of(model, tmp_path, steps=2)
    monkeypatch.setattr(finiteness, "all_finite", noted)
    trainer.train()
    assert read[:2] == [1 + len(list(model.parameters()))] * 2  # and the loss
    assert len(read) == 3


@pytest.mark.slow
@pytest.mark.parametrize(("each", "named"), [(4, "3 of 4"), (2, "1 of 2")])
def test_micro_batch_is_named(each, named, make_llama, setup_backend, tmp_path) -> None:
    """Only a row that holds a certain token breaks: the seventh, in steps of 4 or 2 of one row."""
    model = make_llama()
    bad = batch(16)["input_ids"]

    def hook(module, args, output):
        hit = (args[0] == 7).any()
        return output * (torch.nan if hit else 1.0)

    setup_backend("emulated")
    trainer = trainer_of(
        model, tmp_path, gradient_accumulation_steps=each, per_device_train_batch_size=1,
        train_sampling_strategy="sequential",
    )  # fmt: skip
    rows = bad.masked_fill(bad == 7, 8)
    rows[6, 5] = 7
    trainer.train_dataset = [{"input_ids": r, "labels": r} for r in rows.tolist()]
    model.get_input_embeddings().register_forward_hook(hook)
    error = stopped(trainer)
    assert f"at step {6 // each + 1}" in error.what
    assert error.where == f"the loss: its value, micro-batch {named}"


@pytest.mark.slow
@pytest.mark.parametrize(("clipped", "value"), [(0.0, torch.inf), (1.0, torch.nan)])
def test_the_gradient_that_backward_came_to_first(
    clipped, value, make_llama, setup_backend, tmp_path
) -> None:
    """Although clipping makes all of them NaN, with the total norm."""

    def spoil(model) -> None:
        weight = model.model.layers[1].mlp.up_proj.weight
        weight.register_hook(lambda g: g * value)
        model.model.layers[0].mlp.up_proj.weight.register_hook(lambda g: g * value)

    setup_backend("emulated")
    error = stopped(
        trainer_of(make_llama(), tmp_path, callbacks=[At(2, spoil)], max_grad_norm=clipped)
    )
    assert error.what.startswith("a gradient is not finite at step 2")
    assert error.where == "model.layers.1.mlp.up_proj.weight: its gradient"
    assert "its norm is" in error.why
    assert "keep=['model.layers.1.mlp.up_proj']" in error.fix


def digest(folder: Path) -> dict[str, str]:
    return {
        str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(folder.rglob("*"))
        if p.is_file()
    }


@contextlib.contextmanager
def after_saving(monkeypatch, action):
    """Runs `action(trainer)` whenever a checkpoint was saved; yields digests of checkpoints."""
    from finetune.training.checkpoints.writing import CheckpointKeeper

    plain, digests = CheckpointKeeper.save, []

    def save(keeper, *args, **kwargs):
        plain(keeper, *args, **kwargs)
        digests.append(digest(Path(keeper.trainer.args.output_dir)))
        action(keeper.trainer)

    with monkeypatch.context() as patch:
        patch.setattr(CheckpointKeeper, "save", save)
        yield digests


SAVING = [
    "train.max_steps=6", "train.save_strategy=steps", "train.save_steps=2", "train.warmup_steps=0",
    "train.save_total_limit=1", "train.logging_steps=1", "train.eval_strategy=no",
    "checkpoints.first_step=false", "eval.samples=false", "train.per_device_train_batch_size=2",
    "data.max_rows=24",
]  # fmt: skip


@pytest.mark.slow
def test_checkpoint_receipt_and_metrics_are_kept(tmp_path, monkeypatch, capsys) -> None:
    """By the command line: exit code 2, and a fix that resumes from what is there."""

    def spoil(trainer) -> None:
        spoil_output(trainer.model.model.layers[0].mlp)

    monkeypatch.setattr("sys.argv", ["finetune", "tiny_full_fp8", *SAVING, f"--out={tmp_path}"])
    with after_saving(monkeypatch, spoil) as digests, pytest.raises(SystemExit) as exit_:
        app.main()
    assert exit_.value.code == 2
    shown = capsys.readouterr().err
    (folder,) = (tmp_path / "tiny_full_fp8").iterdir()
    checkpoint = folder / "checkpoints" / "checkpoint-2"
    assert "error: the loss is not finite at step 3" in shown
    assert "where: the loss: its value" in shown
    assert f"train.resume_from_checkpoint={checkpoint}" in shown
    assert "precision.margin=1" in shown
    assert digest(folder / "checkpoints") == digests[0]
    assert "checkpoint-2/fp8_scaling.safetensors" in digests[0]
    receipt = json.loads((folder / "receipt.json").read_text())
    assert receipt["status"] == "proven"
    assert "not finite" in receipt["run"]["stopped"], "proven, and yet it did not end well"
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == [1, 2]
    assert not (folder / "model").exists()


@pytest.mark.slow
def test_broken_weights_are_not_saved(tmp_path, monkeypatch) -> None:
    """The update itself breaks a weight in the step of the next checkpoint."""

    def breaks(trainer) -> None:
        optimizer = trainer.optimizer.optimizer
        for group in optimizer.param_groups:
            group["lr"], group["weight_decay"] = 0.0, 0.0
        weight = trainer.model.model.layers[0].mlp.up_proj.weight

        def after(*_):
            if trainer.state.global_step == 3:
                weight.data[0, 0] = torch.inf

        optimizer.register_step_post_hook(after)

    with after_saving(monkeypatch, breaks) as digests, pytest.raises(NonFiniteError) as caught:
        train(load_recipe("tiny_full_bf16", SAVING), out=tmp_path, console=QUIET)
    (folder,) = (tmp_path / "tiny_full_bf16").iterdir()
    assert caught.value.what.startswith("a weight is not finite after the update of step 4")
    assert caught.value.where == "model.layers.0.mlp.up_proj.weight: its values"
    assert "checkpoint-2" in caught.value.fix
    assert len(digests) == 1
    assert digest(folder / "checkpoints") == digests[0]


@pytest.mark.slow
def test_weights_broken_by_the_last_update(make_llama, setup_backend, tmp_path) -> None:
    def breaks(model) -> None:
        def spoil(p) -> None:
            p.data.fill_(torch.nan)

        model.model.norm.weight.register_post_accumulate_grad_hook(spoil)

    setup_backend("emulated")
    trainer = trainer_of(make_llama(), tmp_path, steps=2, callbacks=[At(2, breaks)])
    error = stopped(trainer)
    assert error.where == "model.norm.weight: its values"
    assert "start again (no checkpoint was saved yet)" in error.fix


# ----------------------------------------------------------------------------------- loss scaling


@pytest.fixture
def loss_scaling(monkeypatch):
    """FP16's dynamic loss scaling on a CPU, where Accelerate has none."""
    plain = Accelerator.__init__

    def init(self, *args, **kwargs):
        plain(self, *args, **kwargs)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)

    monkeypatch.setattr(Accelerator, "__init__", init)


@pytest.mark.slow
def test_a_skipped_step_is_no_update_and_no_error(loss_scaling, make_llama, tmp_path) -> None:
    def spoil(model) -> None:
        def hook(g):
            handle.remove()
            return g * torch.inf

        handle = model.model.norm.weight.register_hook(hook)

    trainer = trainer_of(make_llama(), tmp_path, callbacks=[At(2, spoil)], bf16=False)
    trainer.add_callback(HealthMonitor(trainer, every=2))
    trainer.train()
    rows = [row for row in trainer.state.log_history if "health/attn/x_amax" in row]
    assert "health/attn/update_ratio" not in rows[0], "there was no update"
    assert "health/attn/update_ratio" in rows[1]


@pytest.mark.slow
def test_a_loss_is_judged_under_loss_scaling(loss_scaling, make_llama, tmp_path) -> None:
    model = make_llama()
    trainer = trainer_of(model, tmp_path, bf16=False)
    spoil_output(model.get_submodule(LAYER))
    trainer.add_callback(HealthMonitor(trainer))
    assert stopped(trainer).where == "the loss: its value"


@pytest.mark.slow
def test_gradients_when_the_scale_is_down_to_one(loss_scaling, make_llama, tmp_path) -> None:
    model = make_llama()
    model.model.norm.weight.register_hook(lambda g: g * torch.inf)
    trainer = trainer_of(model, tmp_path, steps=12, bf16=False)
    trainer.add_callback(HealthMonitor(trainer, every=0))
    error = stopped(trainer)
    assert "at step 9;" in error.what, "2^8 was halved eight times"
    assert error.where.startswith("model.norm")


# ------------------------------------------------------------------------------------------ advice


def advice(model, kind="gradient", where=f"{LAYER}.weight", checkpoint=None, **precision) -> str:
    values = {"compute": "fp8", "backend": "emulated", "emulation": "allow"} | precision
    the_plan = plan(model, PrecisionConfig(**values))
    return advise(Finding(kind, where, "its gradient", ""), the_plan, checkpoint)


def test_advice_by_recipe(make_llama) -> None:
    model = make_llama()
    delayed = advice(model, scaling="delayed", margin=2)
    assert "precision.margin=3" in delayed
    assert "precision.scaling=tensorwise" in delayed
    assert f"precision.keep=[{LAYER}]" in delayed
    tensorwise = advice(model, scaling="tensorwise")
    assert "margin" not in tensorwise
    assert "train.learning_rate" in tensorwise
    assert "precision.keep" not in advice(model, where="model.norm", scaling="tensorwise")
    assert advice(model, compute="fp16").startswith("FP16 ends at 65504: train with precision.comp")
    bf16 = advice(model, compute="bf16")
    assert "margin" not in bf16


def test_advice_by_cause(make_llama) -> None:
    model, saved = make_llama(), Path("runs/x/checkpoints/checkpoint-40")
    broken = advice(model, kind="parameter", checkpoint=saved)
    assert broken.startswith("the weights were broken before this step")
    assert f"train.resume_from_checkpoint={saved}" in broken
    assert "rows of this step" in advice(model, kind="loss")
