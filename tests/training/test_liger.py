"""Liger's modules around layers held in FP8 and fused adapters; its kernels themselves need a GPU.

Here the kernels are replaced by torch, so that what is tested is who calls whom.
"""

from __future__ import annotations

import types

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.nn import functional as F

from finetune import get_receipt, load_recipe
from finetune.errors import ConfigError
from finetune.training.run.preflight import preflight
from tests.conftest import CPU, batch

pytest.importorskip("liger_kernel")


def rms_norm(x, w, eps, offset, casting_mode, in_place, row_mode):
    return F.rms_norm(x.float(), (x.shape[-1],), eps=eps).to(x.dtype) * (w + offset)


def losses(make_llama, setup_backend, monkeypatch, *, liger: bool) -> list[float]:
    model = make_llama()
    if liger:
        from liger_kernel.transformers import apply_liger_kernel_to_llama, swiglu
        from liger_kernel.transformers import rms_norm as norms

        kernel = types.SimpleNamespace(apply=rms_norm)
        monkeypatch.setattr(norms, "LigerRMSNormFunction", kernel)
        # `_swiglu_dispatch` of 0.8.5, or a layer's forward before it: both ask this.
        silu = types.SimpleNamespace(apply=lambda gate, up, *_: F.silu(gate) * up)
        monkeypatch.setattr(swiglu, "LigerSiLUMulFunction", silu)
        apply_liger_kernel_to_llama(
            rope=False,
            fused_linear_cross_entropy=False,  # as TRL has it
            rms_norm=True,
            swiglu=True,
            model=model,
        )
    torch.manual_seed(3)
    model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear")).train()
    accelerator = setup_backend("emulated", scaling="rowwise", frozen="fp8")
    trained = [p for p in model.parameters() if p.requires_grad]
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(trained, lr=1e-2))
    found = []
    for seed in range(3):
        loss = model(**batch(length=40, seed=seed)).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def test_frozen_layers_and_adapters_run_inside_ligers_modules(
    make_llama, setup_backend, monkeypatch
):
    from transformers.models.llama import modeling_llama

    for name in ("LlamaRMSNorm", "LlamaMLP"):  # Liger replaces them for good
        monkeypatch.setattr(modeling_llama, name, getattr(modeling_llama, name))
    plain = losses(make_llama, setup_backend, monkeypatch, liger=False)
    stock = get_receipt()
    with_liger = losses(make_llama, setup_backend, monkeypatch, liger=True)
    receipt = get_receipt()
    assert receipt.status == stock.status == "proven"
    assert receipt.precision["adapters"] == "14 of 14 fused with their base layer"
    rows = [[(r.name, r.fprop, r.dgrad, r.wgrad) for r in x.layers] for x in (stock, receipt)]
    assert rows[0] == rows[1]
    assert with_liger == pytest.approx(plain, rel=1e-2)


def test_ligers_kernels_are_refused_on_a_cpu():
    recipe = load_recipe("tiny_lora_fp8", ["train.use_liger_kernel=true"])
    with pytest.raises(ConfigError, match="Liger's kernels were requested on a CPU"):
        preflight(recipe.config, CPU)
