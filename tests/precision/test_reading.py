"""`finetune/precision/reading.py`, the whole of it in one file, trains as the package does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from finetune import setup_fp8_mixed_precision_training
from finetune.precision import constants, reading

STEPS = 6
IDS = torch.randint(1, 272, (2, 32), generator=torch.Generator().manual_seed(0))


def model(lora: bool) -> Any:
    """The same weights at every call."""
    torch.manual_seed(0)
    made: Any = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, vocab_size=272, use_cache=False, pad_token_id=0,
        )
    ).to(torch.bfloat16)  # fmt: skip
    if lora:
        made = get_peft_model(made, LoraConfig(r=8, target_modules="all-linear"))
    return made.train()


def adamw(trained: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in trained.parameters() if p.requires_grad], lr=1e-3)


def losses(trained: Any, optimizer: Any, backward: Callable[[Tensor], Any]) -> list[float]:
    found = []
    for _ in range(STEPS):
        loss = trained(input_ids=IDS, labels=IDS).loss
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


class InBfloat16(nn.Linear):
    """Float32 masters of an adapter, multiplied in BF16 as autocast does."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x.to(torch.bfloat16), self.weight.to(torch.bfloat16))


@pytest.mark.parametrize(
    ("lora", "settings"),
    [
        (False, {"scaling": "tensorwise"}),
        (True, {"scaling": "rowwise", "frozen": "fp8", "power_of_two_scales": False}),
    ],
    ids=["full, tensorwise", "LoRA over a frozen base, rowwise"],
)
def test_the_file_that_is_read_gives_the_losses_of_the_package_to_the_bit(
    lora: bool, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "FUSED_ADAPTERS", False)  # they keep codes of their input
    read = model(lora)
    assert len(reading.convert(read)) == 14
    for name, module in read.named_modules():
        if "lora_" in name and type(module) is nn.Linear:
            module.__class__ = InBfloat16
    told = losses(read, adamw(read), Tensor.backward)

    ours = model(lora)
    accelerator = setup_fp8_mixed_precision_training(
        "emulated", emulation="exact", cpu=True, **settings
    )
    prepared, optimizer = accelerator.prepare(ours, adamw(ours))
    assert losses(prepared, optimizer, accelerator.backward) == told
    assert told[-1] < told[0]
