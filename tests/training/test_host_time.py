"""The walks that a step is spared find nothing, and what they would have found is found."""

from __future__ import annotations

import pytest
from torch import nn
from transformers import TrainerCallback

from finetune import HealthMonitor
from tests.conftest import slow_but
from tests.training.test_health import trainer_of


class Late(TrainerCallback):
    """Does something at the end of a step, and looks on in the last one."""

    def __init__(self, monkeypatch=None, then=lambda _: None) -> None:
        self.monkeypatch, self.then, self.walks = monkeypatch, then, []

    def on_step_end(self, args, state, control, model=None, **_) -> None:
        self.then(model)
        if self.monkeypatch is not None and state.global_step == state.max_steps - 1:
            walk = nn.Module.named_modules

            def counted(module, memo=None, *more, **named):
                if memo is None:
                    self.walks.append(type(module).__name__)
                return walk(module, memo, *more, **named)

            self.monkeypatch.setattr(nn.Module, "named_modules", counted)


@pytest.mark.slow
def test_a_step_walks_over_the_model_for_accelerates_clipping_alone(
    make_llama, setup_backend, tmp_path, monkeypatch
) -> None:
    setup_backend("emulated", health_every=0)
    late = Late(monkeypatch)
    trainer_of(make_llama(), tmp_path, steps=6, callbacks=[late]).train()
    monkeypatch.undo()
    assert 1 <= len(late.walks) <= 3, late.walks


@pytest.mark.slow
def test_flops_and_losses_are_those_of_a_plain_trainer(make_llama, tmp_path) -> None:
    def run(watched: bool):
        trainer = trainer_of(make_llama(), tmp_path)
        if watched:
            trainer.add_callback(HealthMonitor(trainer))
        trainer.train()
        rows = [row.get("loss") for row in trainer.state.log_history]
        return trainer.state.total_flos, rows, trainer

    (flops, losses, _), (same, rows, trainer) = run(False), run(True)
    assert (flops, losses) == (same, rows)
    model, args = trainer.model_wrapped, trainer.args
    assert not {"train", "zero_grad", "num_parameters"} & vars(model).keys()
    assert args.logging_nan_inf_filter


@pytest.mark.parametrize("path", slow_but([""], ["", "model.layers.1.mlp"]))
def test_a_module_in_evaluation_mode_trains_again_in_the_next_step(
    make_llama, tmp_path, path
) -> None:
    modes = []

    def put_to_evaluation(model) -> None:
        modes.append(all(module.training for module in model.modules()))
        model.get_submodule(path).eval()

    trainer = trainer_of(make_llama(), tmp_path, callbacks=[Late(then=put_to_evaluation)])
    trainer.add_callback(HealthMonitor(trainer))
    trainer.train()
    assert modes == [True] * 4
