"""FP8 and NVFP4 exports: which layers, whose scales, and what compressed-tensors reads back."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import preset_name_to_scheme
from transformers import AutoModelForCausalLM, Gemma3ForConditionalGeneration

from finetune.errors import ConfigError
from finetune.export import compressed_tensors
from finetune.export.compressed_tensors import PRESETS, input_amax
from finetune.precision.numbers.formats import snr_db
from tests.families import config_of


def scheme(to: str):
    preset, form = PRESETS[to]
    found = preset_name_to_scheme(preset, ["Linear"])
    found.format = form
    return found


@pytest.mark.parametrize(("to", "inputs", "least"), [("fp8", None, 30), ("nvfp4", 7.0, 18)])
def test_codes_and_scales_are_read_back_as_the_weight(to, inputs, least):
    """Rows of widely different size, one row of zeros."""
    w = torch.randn(48, 64, generator=torch.Generator().manual_seed(0))
    w *= torch.logspace(-1, 1, 48).view(-1, 1)
    w[3] = 0
    w = w.bfloat16()
    stored = compressed_tensors.encode(w, scheme(to), w.float().abs().max(), inputs)
    judge = BaseCompressor.get_value_from_registry(PRESETS[to][1])
    back = judge.decompress(stored, scheme(to))["weight"]
    assert back.dtype == w.dtype
    assert snr_db(w.float(), back.float()) > least  # a wrong scale gives less than 3
    assert not back[3].any()
    if to == "nvfp4":
        assert stored["input_global_scale"].item() == pytest.approx(448 * 6 / 7)
        shared = compressed_tensors.encode(w, scheme(to), 2 * w.float().abs().max(), inputs)
        twice = stored["weight_global_scale"] / shared["weight_global_scale"]
        assert twice.item() == pytest.approx(2)


def test_layers_of_one_gemm_share_their_global_scale():
    names = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    largest = {
        f"layers.{i}.{name}": torch.tensor(10.0 * i + k)
        for i in (1, 2)
        for k, name in enumerate(names)
    }
    shared = {name: value.item() for name, value in compressed_tensors.share_amax(largest).items()}
    assert [shared[f"layers.1.{n}"] for n in names] == [12, 12, 12, 13, 15, 15, 16]
    assert shared["layers.2.q_proj"] == 22


def test_which_layers_are_quantized(make_llama):
    chosen, kept = compressed_tensors.layers_to_quantize(make_llama(intermediate_size=72))
    assert len(chosen) == 2 * 4
    assert kept == [
        *(f"model.layers.{i}.mlp.{n}_proj" for i in (0, 1) for n in ("gate", "up", "down")),
        "lm_head",
    ]


def test_a_tower_that_text_does_not_reach_stays_as_it_is():
    """No row of text runs its layers, so that neither calibration nor check would see them."""
    model = Gemma3ForConditionalGeneration(config_of("gemma3"))
    chosen, kept = compressed_tensors.layers_to_quantize(model)
    assert len(chosen) == 2 * 7
    assert all(name.startswith("model.language_model.layers.") for name in chosen)
    tower = {name for name in kept if name.startswith("model.vision_tower.")}
    assert {*kept} == tower | {"lm_head"}
    assert len(tower) == 2 * 6 + 2 + 1
    # A class of its own, which compressed-tensors would take for codes as well.
    assert "model.vision_tower.head.attention.out_proj" in tower


@pytest.mark.parametrize(
    ("family", "why"), [("gpt2", "no layer that can be quantized"), ("gpt_oss", "experts")]
)
def test_models_that_cannot_be_quantized_are_refused(family, why):
    with pytest.raises(ConfigError, match=rf"{why}(.|\n)*--to merged"):
        compressed_tensors.layers_to_quantize(AutoModelForCausalLM.from_config(config_of(family)))


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


def test_calibration_keeps_packed_documents_apart(make_llama):
    model, name = make_llama().eval(), "model.layers.1.mlp.down_proj"
    ids = torch.arange(1, 13).view(1, 12)
    documents = [{"input_ids": ids[:, :5]}, {"input_ids": ids[:, 5:]}]
    packed = {"input_ids": ids, "position_ids": torch.tensor([[*range(5), *range(7)]])}
    apart, whole = (input_amax(model, [name], x)[name] for x in (documents, [packed]))
    together = input_amax(model, [name], [{"input_ids": ids}])[name]
    assert whole == pytest.approx(apart, rel=1e-6)
    assert together != pytest.approx(apart, rel=1e-3)
