"""The trainable set and the optimizer's set are the same before and after, whatever trains.

And gradient checkpointing gives the same gradients: recomputation runs under the same recipe and
the same scales.
"""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoTokenizer, Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer

from finetune import get_receipt, revert
from finetune.config.paths import TINY_LLAMA
from finetune.precision.engines.base import Fp8Mixin
from tests.conftest import batch, slow_but, train

BACKENDS = [
    ("emulated", "delayed"),
    ("emulated", "rowwise"),
    ("torchao", "tensorwise"),
    ("te", "delayed"),
    ("te", "tensorwise"),
]
LORA = {
    "lora_alpha": 16,
    "target_modules": ["q_proj", "v_proj", "down_proj"],
    "task_type": "CAUSAL_LM",
}
METHODS = {
    "full": {},
    "full tied": {"tie": True},
    "lora 8": {"lora": {"r": 8, **LORA}},
    "lora 16": {"lora": {"r": 16, **LORA}},
    "lora 32 tied": {"tie": True, "lora": {"r": 32, **LORA}},
    "dora 16": {"lora": {"r": 16, "use_dora": True, **LORA}},
    "modules_to_save": {"lora": {"r": 8, "modules_to_save": ["lm_head"], **LORA}},
}


def build(make_llama, method: dict):
    model = make_llama(tie=method.get("tie", False))
    if "lora" in method:
        torch.manual_seed(3)
        model = get_peft_model(model, LoraConfig(**method["lora"])).train()
    return model


def state_of(model) -> dict[str, tuple[int, bool, torch.dtype]]:
    return {
        n: (id(p), p.requires_grad, p.dtype)
        for n, p in model.named_parameters(remove_duplicate=False)
    }


class InPlace(nn.Module):
    """Adds to the result of a linear layer in place, as Falcon and Llama 4 do."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64, bias=False), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x)
        hidden += 1
        y = self.down(hidden)
        y += x
        return y


@pytest.mark.parametrize(("backend", "scaling"), BACKENDS)
def test_a_result_may_be_changed_in_place(setup_backend, backend, scaling) -> None:
    def gradients(backend: str, scaling: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        accelerator = setup_backend(backend, scaling=scaling)
        model = InPlace()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = accelerator.prepare(model, optimizer)
        accelerator.backward(model(torch.ones(2, 16, 32)).sum())
        optimizer.step()
        return [p.grad for p in model.parameters() if p.grad is not None]

    found, plain = gradients(backend, scaling), gradients("emulated", "tensorwise")
    for a, b in zip(found, plain, strict=True):
        assert torch.cosine_similarity(a.flatten(), b.flatten(), dim=0) > 0.98


QUICK = [(*backend, method) for backend in BACKENDS for method in ("full tied", "lora 8")]
SLOW = [(*BACKENDS[0], method) for method in METHODS if (*BACKENDS[0], method) not in QUICK]


@pytest.mark.parametrize(("backend", "scaling", "method"), slow_but(QUICK, QUICK + SLOW))
def test_hand_written_loop(make_llama, setup_backend, backend, scaling, method) -> None:
    model = build(make_llama, METHODS[method])
    before, keys = state_of(model), list(model.state_dict())
    accelerator = setup_backend(backend, scaling=scaling)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    owned = [id(p) for group in optimizer.param_groups for p in group["params"]]
    model, optimizer = accelerator.prepare(model, optimizer)

    assert state_of(model) == before, "same objects, same requires_grad, same dtype, same ties"
    assert [id(p) for g in optimizer.param_groups for p in g["params"]] == owned
    assert list(model.state_dict()) == keys, "no extra state in the checkpoint"
    layers = {n: type(m).__name__ for n, m in model.named_modules() if isinstance(m, Fp8Mixin)}
    assert len(layers) == 14, "seven linear layers in each of two blocks"
    assert not [n for n in layers if "lora_" in n or "lm_head" in n]

    train(accelerator, model, optimizer, 3)
    receipt = get_receipt()
    t = receipt.trainable
    assert receipt.status == "proven"
    assert t["before"] == t["after"] == t["in_optimizer"] == t["moved"]
    assert receipt.fp8_flop_share > 0.4
    frozen = [r for r in receipt.layers if r.role == "base" and "lora" in method]
    assert all(row.wgrad == "none" for row in frozen), "a frozen weight costs two GEMMs"
    adapters = [row for row in receipt.layers if row.role == "adapter"]
    assert all("fp8" not in (row.fprop, row.dgrad, row.wgrad) for row in adapters)

    revert(model)
    assert state_of(model) == before
    assert not [m for m in model.modules() if isinstance(m, Fp8Mixin)]


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY_LLAMA)


ROWS = [{"text": "The harbour is calm and the boats are home before the night falls."}] * 16


@pytest.mark.parametrize("method", ["full tied", "lora 16"])
@pytest.mark.parametrize(("backend", "scaling"), [BACKENDS[2], BACKENDS[3]])
def test_stock_sft_trainer(
    make_llama, setup_backend, tokenizer, tmp_path, backend, scaling, method
) -> None:
    """Default arguments: bf16=True and gradient checkpointing on."""
    spec = METHODS[method]
    model = make_llama(tie=spec.get("tie", False), vocab_size=len(tokenizer))
    setup_backend(backend, scaling=scaling)
    args = SFTConfig(
        output_dir=str(tmp_path), max_steps=4, learning_rate=1e-2, report_to="none",
        per_device_train_batch_size=4, disable_tqdm=True, save_strategy="no", use_cpu=True,
    )  # fmt: skip
    trainer = SFTTrainer(
        model=model,
        args=args,
        train_dataset=Dataset.from_list(ROWS),
        processing_class=tokenizer,
        peft_config=LoraConfig(**spec["lora"]) if "lora" in spec else None,
    )
    assert args.bf16
    assert args.gradient_checkpointing
    trainer.train()
    receipt = get_receipt()
    t = receipt.trainable
    assert receipt.status == "proven"
    assert receipt.precision["ran"] == "fp8"
    assert t["before"] == t["after"] == t["in_optimizer"] == t["moved"]
    base = [row for row in receipt.layers if row.role == "base"]
    assert all(row.calls["fprop"] == 2 for row in base), "forward, and again under checkpointing"


@pytest.mark.parametrize("bf16", [True, False])
def test_stock_trainer(make_llama, setup_backend, tmp_path, bf16) -> None:
    """`transformers.Trainer`, whatever its bf16 says."""
    data = Dataset.from_list([{k: v[0].tolist() for k, v in batch(1, 32).items()}] * 8)
    setup_backend("emulated", scaling="tensorwise")
    args = TrainingArguments(
        output_dir=str(tmp_path), max_steps=3, report_to="none", disable_tqdm=True, bf16=bf16,
        save_strategy="no", use_cpu=True, learning_rate=1e-2,
    )  # fmt: skip
    Trainer(model=make_llama(), args=args, train_dataset=data).train()
    receipt = get_receipt()
    assert receipt.status == "proven"
    assert receipt.precision["ran"] == "fp8"
    assert set(receipt.flop_share) == {"fp8", "bf16"}, "what is not FP8 is BF16, not FP32"


def gradients(make_llama, setup_backend, backend, scaling, *, checkpointing, reentrant, lora):
    from finetune import teardown_fp8_mixed_precision_training

    model = build(make_llama, METHODS["lora 16" if lora else "full"])
    if checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
    accelerator = setup_backend(backend, scaling=scaling)
    model = accelerator.prepare(model)
    losses = []
    for seed in range(3):  # later micro-steps depend on the scales that earlier ones left
        model.zero_grad()
        loss = model(**batch(seed=seed)).loss
        accelerator.backward(loss)
        losses.append(loss.item())
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    teardown_fp8_mixed_precision_training()
    return losses, found


@pytest.mark.parametrize(
    ("reentrant", "lora"),
    [
        (True, True),
        pytest.param(False, False, marks=pytest.mark.slow),
        pytest.param(True, False, marks=pytest.mark.long),
        pytest.param(False, True, marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize(("backend", "scaling"), BACKENDS)
def test_checkpointing_gives_the_same_gradients(
    make_llama, setup_backend, backend, scaling, reentrant, lora
) -> None:
    arguments = (make_llama, setup_backend, backend, scaling)
    losses, plain = gradients(*arguments, checkpointing=False, reentrant=False, lora=lora)
    again, recomputed = gradients(*arguments, checkpointing=True, reentrant=reentrant, lora=lora)
    assert losses == again
    assert plain.keys() == recomputed.keys()
    different = [name for name in plain if not torch.equal(plain[name], recomputed[name])]
    assert not different
