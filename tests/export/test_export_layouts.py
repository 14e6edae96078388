"""FP8 and NVFP4 exports: compressed-tensors is the judge of what the files mean."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import (
    QuantizationConfig,
    QuantizationScheme,
    preset_name_to_scheme,
)
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from transformers import (
    Gemma3ForConditionalGeneration,
    GPT2Config,
    GPT2LMHeadModel,
    MixtralConfig,
    MixtralForCausalLM,
)

from finetune.errors import ConfigError
from finetune.export import compressed_tensors
from finetune.export.compressed_tensors import input_amax
from finetune.export.shards import open_checkpoint
from finetune.precision.formats import snr_db
from tests.families import config_of, folder_of

PRESETS = {"fp8": "FP8_DYNAMIC", "nvfp4": "NVFP4"}
FORMATS = {"fp8": "float-quantized", "nvfp4": "nvfp4-pack-quantized"}


def scheme(target: str) -> QuantizationScheme:
    config = QuantizationConfig.model_validate(
        compressed_tensors.quantization_config(target, ["lm_head"])
    )
    return config.config_groups["group_0"]


def weight(seed: int = 0, rows: int = 48, columns: int = 64, dtype=torch.bfloat16):
    """Rows of widely different size, one row and one block of zeros."""
    w = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    w *= torch.logspace(-4, 1, rows).view(-1, 1)
    w[3] = 0
    w[5, 16:32] = 0
    return w.to(dtype)


@pytest.mark.parametrize("target", PRESETS)
def test_configuration_is_the_published_scheme(target):
    config = QuantizationConfig.model_validate(
        compressed_tensors.quantization_config(target, ["lm_head"])
    )
    assert (config.format, config.quantization_status.value) == (FORMATS[target], "compressed")
    assert config.ignore == ["lm_head"]
    ours, published = scheme(target), preset_name_to_scheme(PRESETS[target], ["Linear"])
    assert ours.targets == published.targets
    for part in ("weights", "input_activations"):
        mine, theirs = (getattr(s, part).model_dump() for s in (ours, published))
        mine.pop("observer", None)
        theirs.pop("observer", None)
        assert mine == theirs


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_fp8_codes_and_scales_are_those_of_compressed_tensors(dtype):
    w = weight(dtype=dtype)
    ours = compressed_tensors.encode_fp8(w)
    assert ours["weight"].dtype == torch.float8_e4m3fn
    assert ours["weight_scale"].shape == (48, 1)
    judge = BaseCompressor.get_value_from_registry("float-quantized")
    back = judge.decompress(ours, scheme("fp8"))["weight"].float()
    step = w.float().abs().clamp(min=2**-6 * ours["weight_scale"].float()) * 2**-4
    slack = 1 + 2**-6  # the scale and the product are rounded to the stored type
    assert ((back - w.float()).abs() <= slack * step + 1e-12).all()
    wide = {"weight": w.float(), "weight_scale": ours["weight_scale"].float()}
    theirs = judge.compress(wide, scheme("fp8"))["weight"]
    assert torch.equal(ours["weight"].view(torch.uint8) & 127, theirs.view(torch.uint8) & 127)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_nvfp4_codes_and_scales_are_those_of_compressed_tensors(dtype):
    w = weight(dtype=dtype)
    ours = compressed_tensors.encode_nvfp4(w, w.float().abs().max(), inputs=7.0)
    assert ours["weight_packed"].shape == (48, 32)
    assert (ours["weight_scale"].dtype, ours["weight_scale"].shape) == (
        torch.float8_e4m3fn,
        (48, 4),
    )
    global_scale = generate_gparam(w.float().min(), w.float().max())
    torch.testing.assert_close(ours["weight_global_scale"], global_scale, rtol=1e-6, atol=0)
    assert ours["input_global_scale"].item() == pytest.approx(448 * 6 / 7)
    blocks = w.float().view(48, 4, 16)
    scale, _ = calculate_qparams(
        blocks.amin(-1), blocks.amax(-1), scheme("nvfp4").weights, global_scale
    )
    # Blocks that underflow: theirs becomes the least normal number, ours zero; the values are lost.
    lives = ours["weight_scale"].float() > 0
    assert torch.equal(ours["weight_scale"].float()[lives], scale.float()[lives])
    assert lives.float().mean() > 0.7
    judge = BaseCompressor.get_value_from_registry("nvfp4-pack-quantized")
    sent = {"weight": w.float(), "weight_scale": scale, "weight_global_scale": global_scale}
    theirs = judge.compress(sent, scheme("nvfp4"))["weight_packed"]
    same = (ours["weight_packed"] == theirs).view(48, 4, 8).all(-1)
    assert same[lives].float().mean() > 0.99  # a tie may fall the other way by one ulp of a scale


def test_nvfp4_decompresses_to_the_weight():
    w = torch.randn(64, 128, generator=torch.Generator().manual_seed(2))
    ours = compressed_tensors.encode_nvfp4(w, w.abs().max(), inputs=1.0)
    judge = BaseCompressor.get_value_from_registry("nvfp4-pack-quantized")
    back = judge.decompress(ours, scheme("nvfp4"))["weight"]
    assert snr_db(w, back) > 18  # four bits; a wrong scale or nibble order gives less than 3
    upside_down = ours | {"weight_global_scale": 1 / ours["weight_global_scale"]}
    assert snr_db(w, judge.decompress(upside_down, scheme("nvfp4"))["weight"]) < 3


def test_layers_of_one_gemm_share_their_global_scale():
    names = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    largest = {
        f"layers.{i}.{name}": torch.tensor(10.0 * i + k)
        for i in (1, 2)
        for k, name in enumerate(names)
    }
    shared = {name: value.item() for name, value in compressed_tensors.share_amax(largest).items()}
    first = [shared[f"layers.1.{n}"] for n in names]
    assert first == [12, 12, 12, 13, 15, 15, 16]
    assert shared["layers.2.q_proj"] == 22


def test_which_layers_are_quantized(make_llama, tmp_path):
    make_llama(intermediate_size=72).save_pretrained(tmp_path / "odd")
    chosen, kept = compressed_tensors.layers_to_quantize(open_checkpoint(tmp_path / "odd"))
    assert len(chosen) == 2 * 4
    assert kept == [
        *(f"model.layers.{i}.mlp.{n}_proj" for i in (0, 1) for n in ("gate", "up", "down")),
        "lm_head",
    ]


def test_a_tower_that_text_does_not_reach_stays_as_it_is(tmp_path):
    """No row of text runs its layers, so that neither calibration nor check would see them."""
    folder = folder_of("gemma3", tmp_path)
    Gemma3ForConditionalGeneration(config_of("gemma3")).save_pretrained(folder)
    chosen, kept = compressed_tensors.layers_to_quantize(open_checkpoint(folder))
    assert len(chosen) == 2 * 7
    assert all(name.startswith("model.language_model.layers.") for name in chosen)
    tower = {name for name in kept if name.startswith("model.vision_tower.")}
    assert {*kept} == tower | {"lm_head"}
    assert len(tower) == 2 * 6 + 2


def test_models_that_cannot_be_quantized_are_refused(tmp_path):
    gpt2 = GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=64, n_positions=32)
    GPT2LMHeadModel(gpt2).save_pretrained(tmp_path / "gpt2")
    with pytest.raises(ConfigError, match=r"no layer that can be quantized(.|\n)*Conv1D layers"):
        compressed_tensors.layers_to_quantize(open_checkpoint(tmp_path / "gpt2"))
    mixtral = MixtralConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=2, vocab_size=64,
    )  # fmt: skip
    MixtralForCausalLM(mixtral).save_pretrained(tmp_path / "moe")
    with pytest.raises(ConfigError, match=r"experts(.|\n)*--to merged"):
        compressed_tensors.layers_to_quantize(open_checkpoint(tmp_path / "moe"))


def test_calibration_sees_the_largest_input(make_llama):
    model, name = make_llama().eval(), "model.layers.1.self_attn.q_proj"
    batches = [{"input_ids": torch.arange(1, 17).view(2, 8), "labels": None}] * 2
    seen = []
    layer = model.get_submodule(name)
    hook = layer.register_forward_pre_hook(lambda _, args: seen.append(args[0].abs().max().item()))
    found = input_amax(model, [name, "model.layers.0.mlp.down_proj"], batches)
    hook.remove()
    assert found[name] == max(seen)
    assert not layer._forward_pre_hooks
    with pytest.raises(ConfigError, match="could not be calibrated"):
        input_amax(model, [name], [])
