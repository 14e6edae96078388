"""FP8 exports of a mixture of experts: the layout that vLLM reads, and Transformers as well."""

from __future__ import annotations

import json

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from finetune.errors import ConfigError
from finetune.export import compressed_tensors
from finetune.export.folder import stored_names
from finetune.precision.numbers.formats import snr_db
from tests.families import config_of

IDS = torch.arange(3, 67).view(2, -1)


def quantized(family: str, folder, **saving):
    """A random model, saved plain and in FP8; its logits, and the layers that were quantized."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(family), dtype=torch.bfloat16).eval()
    with torch.inference_mode():
        expected = model(IDS).logits.float()
    model.save_pretrained(folder / "plain", **saving)
    chosen, kept = compressed_tensors.layers_to_quantize(
        model, "fp8", stored_names(folder / "plain")
    )
    compressed_tensors.quantize(model, "fp8", chosen, kept, {})
    model.save_pretrained(folder / "fp8", **saving)
    return expected, chosen, compressed_tensors.quantize_saved(folder / "fp8")


@pytest.mark.parametrize(
    ("family", "expert", "router"),
    [
        ("qwen3_moe", "model.layers.1.mlp.experts.3.down_proj", "model.layers.1.mlp.gate"),
        ("mixtral", "model.layers.1.block_sparse_moe.experts.3.w2",
         "model.layers.1.block_sparse_moe.gate"),
    ],
)  # fmt: skip
def test_experts_are_stored_one_by_one_and_read_back(family, expert, router, tmp_path):
    expected, chosen, count = quantized(family, tmp_path, max_shard_size="1MB")
    held, plain = {}, {}
    for into, home in ((held, "fp8"), (plain, "plain")):
        for file in (tmp_path / home).glob("*.safetensors"):
            into |= load_file(file)
    stored = [name for name in held if compressed_tensors.EXPERT.search(name)]
    assert len(stored) == count == 2 * 3 * config_of(family).num_local_experts
    assert {held[name].dtype for name in stored} == {torch.float8_e4m3fn}
    assert len(chosen) == 2 * 4
    weight = plain[f"{expert}.weight"]
    assert held[f"{expert}.weight_scale"].shape == (len(weight), 1)
    assert held[f"{router}.weight"].dtype == torch.bfloat16

    config = json.loads((tmp_path / "fp8" / "config.json").read_text())["quantization_config"]
    assert {router, "lm_head"} <= {*config["ignore"]}
    index = json.loads((tmp_path / "fp8" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == held.keys()

    judge = BaseCompressor.get_value_from_registry("float-quantized")
    codes = {key: held[f"{expert}.{key}"] for key in ("weight", "weight_scale")}
    back = judge.decompress(codes, compressed_tensors._scheme("fp8"))["weight"]
    assert snr_db(weight.float(), back.float()) > 30

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "fp8", dtype="auto").eval()
    with torch.inference_mode():
        said = loaded(IDS).logits.float()
    assert 1e-3 < float((said - expected).norm() / expected.norm()) < 0.2


def test_experts_that_are_stored_together_are_refused(make_llama):
    model = AutoModelForCausalLM.from_config(config_of("qwen3_moe"))
    for to, why in (("fp8", "one by one"), ("nvfp4", "calibrated")):
        stored = ["model.layers.0.mlp.experts.0.up_proj.weight"] if to == "nvfp4" else []
        with pytest.raises(ConfigError, match=rf"{to.upper()} yet(.|\n)*{why}(.|\n)*--to merged"):
            compressed_tensors.layers_to_quantize(model, to, stored)


def test_layers_of_one_gemm_are_quantized_together(make_llama):
    """vLLM refuses a q_proj in FP8 beside a v_proj that is not."""
    model = make_llama()
    model.model.layers[0].self_attn.v_proj = torch.nn.Linear(128, 72, bias=False)
    chosen, kept = compressed_tensors.layers_to_quantize(model)
    first = [f"model.layers.0.self_attn.{name}_proj" for name in "qkvo"]
    assert {*kept} == {*first[:3], "lm_head"}
    assert first[3] in chosen
