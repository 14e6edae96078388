"""float32 compute: nothing is rounded on the way into a product, and nothing else is changed."""

from __future__ import annotations

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from transformers import set_seed

from finetune import get_receipt, load_recipe
from finetune.errors import ConfigError, PrecisionError
from finetune.precision.settings import PrecisionConfig
from finetune.training.helper import compute_types, session
from tests.config.test_optimizers import SMALL
from tests.conftest import batch
from tests.run_folders import trained

FP32 = [*SMALL, "precision.compute=fp32"]


@pytest.fixture(autouse=True)
def _settings_as_they_were():
    yield
    torch.backends.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")


@pytest.mark.long
def test_a_run_is_bit_equal_to_a_plain_trainer(tmp_path) -> None:
    from trl import SFTTrainer

    from finetune.config.sft import sft_config
    from finetune.data.dataset import load_data
    from finetune.storage.pretrained import load_tokenizer
    from finetune.training.model import load_model

    recipe = load_recipe("tiny_full_bf16", FP32)
    ours = trained(recipe, out=tmp_path, console=Console(quiet=True))
    assert ours.receipt.status == "proven"

    config = recipe.config
    tokenizer, _ = load_tokenizer(config.model)
    rows = load_data(config.data, tokenizer, config.train["seed"])
    args = sft_config(
        config, tmp_path / "plain", rows.settings, on_cpu=not torch.cuda.is_available()
    )
    assert not args.bf16
    assert not args.fp16
    set_seed(args.seed)
    model = load_model(config.model)
    trainer = SFTTrainer(
        model=model, args=args, train_dataset=rows.train, processing_class=tokenizer
    )
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert (losses[0], losses[-1]) == (ours.first_loss, ours.final_loss)
    saved = load_file(ours.folder / "model" / "model.safetensors")
    plain = dict(model.named_parameters())
    assert saved.keys() <= plain.keys()
    assert all(torch.equal(w, plain[name]) for name, w in saved.items())


@pytest.mark.parametrize("before", ["fresh", "high", "medium", "tf32 everywhere"])
def test_products_are_exact_while_it_is_in_force(before, make_llama) -> None:
    from accelerate import Accelerator

    if before == "tf32 everywhere":  # as transformers sets it for tf32=True
        torch.backends.fp32_precision = "tf32"
    elif before != "fresh":
        torch.set_float32_matmul_precision(before)
    was = compute_types.in_force()
    session.install(PrecisionConfig(compute="fp32"))
    accelerator = Accelerator(cpu=True)
    model = make_llama()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    for seed in range(2):
        accelerator.backward(model(**batch(seed=seed)).loss)
        optimizer.step()
        optimizer.zero_grad()
    receipt = get_receipt()
    assert receipt.status == "proven"
    assert set(receipt.precision["effective"]["fp32_precision"].values()) == {"ieee"}
    # The older form of the settings can still be read, as torch.compile does.
    assert torch.get_float32_matmul_precision() == "highest"
    assert not torch.backends.cuda.matmul.allow_tf32
    assert not torch.backends.cudnn.allow_tf32
    session.uninstall()
    assert compute_types.in_force() == was


def test_settings_changed_after_preparation_are_found(make_llama) -> None:
    from accelerate import Accelerator

    session.install(PrecisionConfig(compute="fp32"))
    accelerator = Accelerator(cpu=True)
    model = make_llama()
    model, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    loss = model(**batch()).loss
    torch.set_float32_matmul_precision("medium")
    with pytest.raises(PrecisionError, match=r"cuda\.matmul\.fp32_precision=tf32"):
        accelerator.backward(loss)


@pytest.mark.parametrize(
    ("setting", "fix"),
    [("model.dtype=bfloat16", "model.dtype=float32"), ("train.tf32=true", "~train.tf32")],
)
def test_what_is_not_float32_is_refused_before_loading(setting, fix, tmp_path) -> None:
    with pytest.raises(ConfigError, match="FP32 compute was requested") as caught:
        trained(load_recipe("tiny_full_bf16", [*FP32, setting]), out=tmp_path)
    assert fix in caught.value.fix
    assert not list(tmp_path.iterdir())
