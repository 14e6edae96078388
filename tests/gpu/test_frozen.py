"""Frozen layers on FP8 hardware: `torch._scaled_mm` agrees with the emulation, and trains."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model

from finetune import (
    get_receipt,
    setup_fp8_mixed_precision_training,
    teardown_fp8_mixed_precision_training,
)
from finetune.precision.numbers.weights import (
    Arithmetic,
    cast_operand,
    dgrad,
    fprop,
    quantize_weight,
    tile_of,
)
from tests.conftest import batch

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]
SHAPE = {"hidden_size": 256, "intermediate_size": 512, "max_position_embeddings": 256}


@pytest.mark.parametrize("tokens", [1, 100, 512])
@pytest.mark.parametrize("granularity", ["row", "tensor"])
def test_hardware_and_emulation_differ_by_accumulation_only(granularity, tokens) -> None:
    torch.manual_seed(0)
    x = torch.randn(tokens, 512, device="cuda", dtype=torch.bfloat16)
    g = torch.randn(tokens, 768, device="cuda", dtype=torch.bfloat16)
    tile = tile_of(granularity, (768, 512))
    bits, inverse = quantize_weight(torch.randn(768, 512, device="cuda"), tile)
    results = []
    for emulate in (True, False):
        how = Arithmetic(tile, per_row=granularity == "row", emulate=emulate)
        y = fprop(x, cast_operand(x, how), bits, inverse, how)
        results.append((y, dgrad(g, bits, inverse, how)))
    for emulated, real in zip(*results, strict=True):
        # Hopper's fast accumulation keeps about 14 bits.
        assert (emulated - real).norm() < 5e-3 * emulated.norm()


def losses(make_llama, *, compile: str, scaling: str, low: bool) -> list[float]:
    torch.manual_seed(0)
    model = make_llama(**SHAPE).cuda()
    torch.manual_seed(1)
    model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear")).train()
    if low:
        accelerator = setup_fp8_mixed_precision_training(
            "torchao", scaling=scaling, frozen="fp8", compile=compile
        )
    else:
        from accelerate import Accelerator

        accelerator = Accelerator(mixed_precision="bf16")
    trained = [p for p in model.parameters() if p.requires_grad]
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(trained, lr=1e-3))
    found = []
    for seed in range(6):
        optimizer.zero_grad()
        loss = model(**{k: v.cuda() for k, v in batch(4, 100, seed=seed).items()}).loss
        accelerator.backward(loss)
        optimizer.step()
        found.append(loss.item())
    if low:
        receipt = get_receipt()
        assert receipt.status == "proven"
        assert receipt.precision["effective"]["frozen"]["engine"] == "torch._scaled_mm"
        base = [row for row in receipt.layers if row.role == "base"]
        assert {row.fprop for row in base} == {"fp8"}
        assert {row.wgrad for row in base} == {"none"}
        teardown_fp8_mixed_precision_training()
    return found


@pytest.mark.parametrize("compile", ["off", "on"])
@pytest.mark.parametrize("scaling", ["rowwise", "tensorwise"])
def test_lora_on_a_base_held_in_fp8_trains_as_bf16(make_llama, scaling, compile) -> None:
    low = losses(make_llama, compile=compile, scaling=scaling, low=True)
    assert low == pytest.approx(
        losses(make_llama, compile="off", scaling=scaling, low=False), rel=0.02
    )
