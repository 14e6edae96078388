"""gpt-oss as it is published, experts in MXFP4: trained as the weights that the codes stand for."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from finetune import load_recipe, train
from finetune.config.schema import ModelConfig
from finetune.training.model import load_model
from tests.benchmarks.families import SMALL
from tests.conftest import slow_but
from tests.families import config_of, folder_of

CODES = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
"""Values of E2M1, in the order of its codes (OCP Microscaling Formats 1.0)."""


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A folder in MXFP4, and the weights of its experts."""
    folder = folder_of("gpt_oss", tmp_path_factory.mktemp("published"))
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config_of("gpt_oss"), dtype=torch.bfloat16).save_pretrained(
        folder
    )
    file, weights = folder / "model.safetensors", {}
    tensors = load_file(file)
    for name in [n for n in tensors if n.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, k, n = tensors.pop(name).shape
        codes = torch.randint(16, (experts, n, k // 32, 32), dtype=torch.uint8)
        scales = torch.randint(118, 123, (experts, n, k // 32), dtype=torch.uint8)
        tensors[f"{name}_blocks"] = codes[..., ::2] | codes[..., 1::2] << 4
        tensors[f"{name}_scales"] = scales
        values = CODES[codes.long()] * torch.exp2(scales.float() - 127).unsqueeze(-1)
        weights[name] = values.reshape(experts, n, k).mT
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder, weights


def test_its_weights_are_read_to_the_last_bit(published) -> None:
    folder, weights = published
    model = load_model(ModelConfig(name=str(folder), dtype="bfloat16"))
    assert len(weights) == 4
    for name, expected in weights.items():
        assert torch.equal(model.get_parameter(name).float(), expected)
    assert not hasattr(model.config, "quantization_config")


@pytest.mark.parametrize(
    "recipe",
    slow_but(["tiny_lora_fp8"], ["tiny_lora_bf16", "tiny_lora_fp8", "tiny_full_fp8"]),
)
def test_it_trains(recipe, published, tmp_path) -> None:
    more = [*SMALL, f"model.name={published[0]}", "model.weights=pretrained", "train.max_steps=2"]
    receipt = train(load_recipe(recipe, more), out=tmp_path).receipt
    assert receipt.status == "proven"
    assert (receipt.fp8_flop_share > 0.5) == recipe.endswith("fp8")
