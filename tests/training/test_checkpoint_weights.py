"""Resuming and the best checkpoint in stock trainers: every weight is loaded, or it is an error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Trainer,
    TrainingArguments,
)

from finetune import get_receipt, load_recipe, teardown_fp8_mixed_precision_training, train
from finetune.errors import CheckpointError, PrecisionError
from finetune.export.export import export_run
from finetune.precision.stored.trained import TrainedMixin
from finetune.training.asking.reload import loaded, open_trained
from tests.conftest import batch, slow_but


def rows() -> list[dict[str, Any]]:
    return [{"input_ids": x, "labels": x} for s in range(6) for x in batch(seed=s)["input_ids"]]


def mixtral(*, seed: int = 0) -> MixtralForCausalLM:
    torch.manual_seed(seed)
    return MixtralForCausalLM(
        MixtralConfig(
            hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, vocab_size=272, use_cache=False, num_local_experts=4,
            pad_token_id=0,
        )
    ).train()  # fmt: skip


def half_frozen(model: Any) -> Any:
    model.requires_grad_(False)
    model.model.layers[1].requires_grad_(True)
    return model


def trainer_of(model: Any, folder: Path, **settings: Any) -> Trainer:
    values: dict[str, Any] = {
        "max_steps": 4, "save_steps": 2, "use_cpu": True, "bf16": True, "report_to": "none",
        "learning_rate": 1e-2, "disable_tqdm": True, "logging_steps": 1,
    }  # fmt: skip
    args = TrainingArguments(output_dir=str(folder), **values | settings)
    return Trainer(model=model, args=args, train_dataset=rows(), eval_dataset=rows()[:2])


@pytest.mark.parametrize(("kind", "frozen"), slow_but([], [("llama", "fp8"), ("mixtral", "bf16")]))
def test_resumed_is_whole_to_the_bit(kind, frozen, make_llama, setup_backend, tmp_path) -> None:
    """Transformers left experts and routers out, and took frozen codes for numbers, proven."""

    def run(folder: str, resume: str | None = None) -> dict[str, torch.Tensor]:
        setup_backend("emulated", scaling="rowwise", frozen=frozen)
        model = make_llama() if kind == "llama" else mixtral()
        trainer = trainer_of(half_frozen(model) if frozen == "fp8" else model, tmp_path / folder)
        trainer.train(resume_from_checkpoint=resume)
        assert get_receipt().status == "proven"
        teardown_fp8_mixed_precision_training()
        return trainer.model.state_dict()

    whole = run("whole")
    resumed = run("resumed", str(tmp_path / "whole" / "checkpoint-2"))
    assert resumed.keys() == whole.keys()
    assert all(torch.equal(resumed[name], w) for name, w in whole.items())


@pytest.mark.slow
@pytest.mark.parametrize("masters", [False, True])
def test_the_best_checkpoint_is_loaded_whole(masters, make_llama, setup_backend, tmp_path) -> None:
    """It was its dense layers, with the experts of the last step."""
    setup_backend("emulated", scaling="rowwise", fp8_params=masters)
    model = make_llama() if masters else mixtral()
    trainer = trainer_of(
        model, tmp_path, eval_strategy="steps", eval_steps=2, load_best_model_at_end=True,
        metric_for_best_model="learning_rate", greater_is_better=True, learning_rate=3e-2,
    )  # fmt: skip
    trainer.compute_metrics = None
    plain = trainer.evaluate
    trainer.evaluate = lambda *args, **kwargs: (
        plain(*args, **kwargs) | {"eval_learning_rate": -trainer.state.global_step}
    )
    trainer.train()
    assert str(trainer.state.best_model_checkpoint).endswith("checkpoint-2")
    best = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-2").state_dict()
    found = trainer.model.state_dict()
    assert all(torch.equal(found[name], w) for name, w in best.items())


@pytest.mark.slow
def test_masters_are_what_is_saved_and_exported_and_codes_are_what_answers(tmp_path) -> None:
    words = ["precision.scaling=tensorwise", "precision.fp8_params=true", "model.dtype=bfloat16"]
    words += ["train.optim=adamw_torch_8bit", "train.max_steps=2", "train.save_strategy=steps"]
    words += ["train.save_steps=2", "train.eval_steps=2", "train.warmup_steps=0"]
    quiet = Console(quiet=True)
    report = train(load_recipe("tiny_full_fp8", words), out=tmp_path, console=quiet)
    assert report.receipt.status == "proven"
    assert report.receipt.precision["evaluation"] == "high, by FP8 weights"
    exported = export_run(report.folder, "merged", tmp_path / "merged", console=quiet).folder
    saved = load_file(report.folder / "checkpoints" / "checkpoint-2" / "model.safetensors")
    with loaded(open_trained(report.folder)) as (model, _):
        assert sum(isinstance(m, TrainedMixin) for m in model.modules()) == 28
        kept = {name: w.clone() for name, w in model.state_dict().items()}
    for other in (load_file(report.folder / "model" / "model.safetensors"),
                  load_file(exported / "model.safetensors"), kept):  # fmt: skip
        assert other.keys() >= saved.keys()
        assert all(torch.equal(other[name], w) for name, w in saved.items())


@pytest.mark.slow
def test_a_checkpoint_without_an_optimizer_is_said(make_llama, setup_backend, tmp_path) -> None:
    """Transformers trains on with moments of zero, and warms up again, without a word."""
    setup_backend("emulated", scaling="rowwise")
    trainer_of(make_llama(), tmp_path, max_steps=2, save_only_model=True).train()
    trainer = trainer_of(make_llama(), tmp_path / "other")
    with pytest.warns(UserWarning, match="no state of optimizer and schedule"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


@pytest.mark.slow
def test_codes_are_not_loaded_as_numbers(make_llama, setup_backend, tmp_path) -> None:
    setup_backend("emulated", scaling="rowwise", frozen="fp8")
    trainer_of(half_frozen(make_llama()), tmp_path, max_steps=2).train()
    setup_backend("emulated", scaling="rowwise")
    trainer = trainer_of(half_frozen(make_llama()), tmp_path / "other")
    with pytest.raises(CheckpointError, match=r"are FP8 codes, and the model's are not") as caught:
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert "frozen='fp8'" in caught.value.fix


def test_frozen_experts_in_fp8_that_no_checkpoint_could_hold(setup_backend) -> None:
    """They were saved one by one without their scales, and nothing reads them again."""
    model = half_frozen(mixtral())
    with pytest.raises(PrecisionError, match=r"experts stored in FP8 cannot be saved") as caught:
        setup_backend("emulated", scaling="rowwise", frozen="fp8").prepare(model)
    assert "experts.gate_up_proj" in caught.value.args[0]
    setup_backend("emulated", scaling="rowwise", frozen="bf16").prepare(model)  # what it says


def adapted(make_llama, **settings: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    values = {"r": 4, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    return get_peft_model(make_llama(), LoraConfig(**values | settings)).train()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("began", "now"),
    [
        ({"layers_to_transform": [0]}, {"layers_to_transform": [1]}),  # as many, of the same shapes
        ({}, {"target_modules": ["q_proj", "v_proj"]}),
        (None, {}),
    ],
    ids=["of another layer", "of fewer layers", "a whole model"],
)
def test_other_adapters_are_an_error(began, now, make_llama, setup_backend, tmp_path) -> None:
    """They stayed as they were drawn, with the moments of others, and the receipt said proven."""
    setup_backend("emulated", scaling="rowwise")
    model = make_llama() if began is None else adapted(make_llama, **began)
    trainer_of(model, tmp_path, max_steps=2, save_only_model=True).train()
    trainer = trainer_of(adapted(make_llama, **now), tmp_path / "other")
    with pytest.raises(CheckpointError, match=r"all of them and no others\n"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


@pytest.mark.slow
def test_a_whole_model_beside_adapters_is_named(make_llama, setup_backend, tmp_path) -> None:
    """Of a full run into the same folder: Transformers loads it, and leaves adapters as drawn."""
    setup_backend("emulated", scaling="rowwise")
    for model in (make_llama(), adapted(make_llama)):
        trainer_of(model, tmp_path, max_steps=2, save_only_model=True).train()
    trainer = trainer_of(adapted(make_llama), tmp_path / "other")
    with pytest.raises(CheckpointError, match=r"model\.safetensors, a whole model"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    (tmp_path / "checkpoint-2" / "model.safetensors").unlink()  # what it says
    with pytest.warns(UserWarning, match="save_only_model"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


@pytest.mark.slow
def test_the_same_adapters_go_on_and_another_weight_of_theirs_is_said(
    make_llama, setup_backend, tmp_path
) -> None:
    """Transformers reads the tensors alone: adapters under twice the alpha are twice as strong."""
    setup_backend("emulated", scaling="rowwise")
    trainer_of(adapted(make_llama, modules_to_save=["lm_head"]), tmp_path, max_steps=2).train()
    other = adapted(make_llama, modules_to_save=["lm_head"], lora_alpha=32)
    trainer = trainer_of(other, tmp_path / "other")
    with pytest.warns(UserWarning, match="trained with lora_alpha=8, and resumes with"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert trainer.state.global_step == 4


@pytest.mark.slow
@pytest.mark.parametrize("change", ["missing", "unknown"])
def test_a_checkpoint_without_a_weight_is_an_error(
    change, make_llama, setup_backend, tmp_path
) -> None:
    setup_backend("emulated", scaling="rowwise")
    trainer_of(make_llama(), tmp_path, max_steps=2).train()
    file = tmp_path / "checkpoint-2" / "model.safetensors"
    tensors = load_file(file)
    weight = tensors.pop("model.layers.1.mlp.up_proj.weight")
    if change == "unknown":
        tensors |= {
            "model.layers.1.mlp.up_proj.weight": weight,
            "model.layers.2.mlp.up_proj.weight": weight.clone(),
        }
    save_file(tensors, file, metadata={"format": "pt"})
    trainer = trainer_of(make_llama(), tmp_path / "other")
    with pytest.raises(CheckpointError, match=r"all of them and no others\n.*up_proj\.weight"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
