"""The same assertions as on a CPU, on FP8 hardware: real `_scaled_mm`, real Transformer Engine."""

from __future__ import annotations

import pytest
import torch

from finetune import (
    get_receipt,
    setup_fp8_mixed_precision_training,
    teardown_fp8_mixed_precision_training,
)
from tests.conftest import batch

pytestmark = pytest.mark.gpu
TE = pytest.mark.te
BACKENDS = [
    pytest.param("torchao", "tensorwise", id="torchao-tensorwise"),
    pytest.param("torchao", "rowwise", id="torchao-rowwise"),
    pytest.param("te", "delayed", id="te-delayed", marks=TE),
    pytest.param("te", "tensorwise", id="te-tensorwise", marks=TE),
    pytest.param("emulated", "delayed", id="emulated-delayed"),
]
SHAPE = {"hidden_size": 256, "intermediate_size": 512, "max_position_embeddings": 256}


def run(make_llama, backend: str, scaling: str, *, lora: bool, checkpointing: bool = False):
    """Losses and last gradients of five steps on the GPU."""
    model = make_llama(**SHAPE).cuda()
    if lora:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(1)
        model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear")).train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    if backend == "bf16":
        from accelerate import Accelerator

        accelerator = Accelerator(mixed_precision="bf16")
    else:
        accelerator = setup_fp8_mixed_precision_training(
            backend, scaling=scaling, compile="off", emulation="allow"
        )
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    losses = []
    for seed in range(5):
        optimizer.zero_grad()
        rows = {k: v.cuda() for k, v in batch(4, 100, seed=seed).items()}  # 400 tokens: 25 x 16
        loss = model(**rows).loss
        accelerator.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    receipt = None if backend == "bf16" else get_receipt()
    teardown_fp8_mixed_precision_training()
    return losses, gradients, receipt


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize(("backend", "scaling"), BACKENDS)
def test_trains_in_fp8_and_proves_it(make_llama, backend, scaling, lora) -> None:
    losses, _, receipt = run(make_llama, backend, scaling, lora=lora)
    bf16, _, _ = run(make_llama, "bf16", "", lora=lora)
    t = receipt.trainable
    assert receipt.status == "proven"
    assert receipt.precision["backend"] == backend
    assert receipt.fp8_flop_share > 0.4
    assert t["before"] == t["after"] == t["in_optimizer"] == t["moved"]
    for row in receipt.layers:
        if row.role == "base":
            assert {row.fprop, row.dgrad, row.wgrad} <= {"fp8", "none"}
            assert (row.wgrad == "none") == lora, "a frozen weight costs two GEMMs"
    assert losses == pytest.approx(bf16, rel=0.02)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("backend", "scaling"), BACKENDS)
def test_checkpointing_gives_the_same_gradients(make_llama, backend, scaling) -> None:
    losses, plain, _ = run(make_llama, backend, scaling, lora=False)
    again, recomputed, _ = run(make_llama, backend, scaling, lora=False, checkpointing=True)
    assert losses == pytest.approx(again, rel=1e-4)
    for name, gradient in plain.items():
        torch.testing.assert_close(recomputed[name], gradient, rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize(
    ("backend", "scaling"), [("torchao", "tensorwise"), ("torchao", "rowwise")]
)
@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
def test_experts_train_in_fp8(backend, scaling, implementation) -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}
    config = MixtralConfig(**shape, **heads, vocab_size=272, use_cache=False)
    model = MixtralForCausalLM(config).train().cuda()
    model.set_experts_implementation(implementation)
    accelerator = setup_fp8_mixed_precision_training(backend, scaling=scaling, compile="off")
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    for seed in range(3):
        rows = {k: v.cuda() for k, v in batch(4, 100, seed=seed).items()}
        accelerator.backward(model(**rows).loss)
        optimizer.step()
        optimizer.zero_grad()
    receipt = get_receipt()
    experts = [row for row in receipt.layers if ".experts." in row.name]
    assert receipt.status == "proven"
    assert {(row.fprop, row.dgrad, row.wgrad) for row in experts} == {("fp8", "fp8", "fp8")}
