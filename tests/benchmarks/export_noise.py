"""How far correct and faulty exports are from their reference, in multiples of the noise of BF16.

    python -m tests.benchmarks.export_noise                # the packaged model, and random Llamas
    python -m tests.benchmarks.export_noise 256x16 512x8   # of hidden size x layers

A line of JSON for each: the noise of the logits, and for each export its logit error in multiples
of that and the error of its matrix that is furthest off. `MULTIPLES` of `finetune.export.parity` is
from it.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from finetune.config.paths import TINY_LLAMA
from finetune.export import compressed_tensors, parity

STRENGTH = 0.05
"""Norm of what an adapter adds, as a share of the weight's."""


def adapted(model: Any) -> Any:
    """The model under random adapters on all its linear layers."""
    lora = LoraConfig(task_type="CAUSAL_LM", r=8, lora_alpha=16, target_modules="all-linear")
    found = get_peft_model(model, lora).eval()
    for layer in found.modules():
        if hasattr(layer, "lora_B"):
            a, b = layer.lora_A["default"].weight.data, layer.lora_B["default"].weight.data
            b.normal_()
            b *= STRENGTH * layer.base_layer.weight.float().norm() / (2 * b @ a).norm()
    return found


def study(name: str, model: Any, ids: torch.Tensor) -> dict[str, Any]:
    """Noise of a model in BF16, and errors of its exports."""
    batches = [{"input_ids": ids, "labels": ids}]
    plain, model = copy.deepcopy(model), adapted(model)
    rounded = parity.observe(model, batches, answers=False)
    with parity.in_float32(model):
        exact = parity.observe(model, batches, answers=False)
    noise = parity.compare(exact, rounded).logit_error
    found: dict[str, Any] = {"model": name, "noise": noise}

    def note(what: str, export: Any, *, wide: bool = True) -> None:
        with parity.in_float32(export) if wide else contextlib.nullcontext():
            seen = parity.observe(export, batches, answers=False)
        seen = parity.compare(exact, seen, parity.furthest(export, sums))
        found[what] = (seen.logit_error / noise, seen.weight_error)

    merged = copy.deepcopy(model).merge_and_unload()
    sums = parity.signed_sums(merged)
    note("merged", merged)
    middle = f"model.layers.{len(merged.model.layers) // 2}.mlp.down_proj"
    for what in ("scaled by 1.05", "not merged", "a block transposed"):
        broken = copy.deepcopy(merged)
        weight = broken.get_submodule(middle).weight.data
        if what == "scaled by 1.05":
            weight *= 1.05
        elif what == "not merged":
            weight.copy_(plain.get_submodule(middle).weight)
        else:
            side = min(weight.shape) // 4
            weight[:side, :side] = weight[:side, :side].T.clone()
        note(what, broken)
    for to in ("fp8", "nvfp4"):
        model = copy.deepcopy(merged)
        chosen, kept = compressed_tensors.layers_to_quantize(model)
        inputs = compressed_tensors.input_amax(model, chosen, batches) if to == "nvfp4" else {}
        compressed_tensors.quantize(model, to, chosen, kept, inputs)
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
            model.save_pretrained(folder)
            note(to, AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval(), wide=False)
            file = Path(folder) / "model.safetensors"
            tensors = load_file(file)
            tensors[f"{middle}.weight{'_global' * (to == 'nvfp4')}_scale"] *= 2
            save_file(tensors, file, metadata={"format": "pt"})
            wrong = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
            note(f"{to}, a scale by 2", wrong, wide=False)
    return found


def main() -> None:
    """Study the models named on the command line."""
    for name in sys.argv[1:] or ("packaged", "64x2", "128x8", "128x24", "256x16"):
        torch.manual_seed(0)
        if name == "packaged":
            model = AutoModelForCausalLM.from_pretrained(TINY_LLAMA)
        else:
            hidden, layers = map(int, name.split("x"))
            sizes = {"hidden_size": hidden, "intermediate_size": 4 * hidden, "head_dim": 32}
            heads = {"num_attention_heads": hidden // 32, "num_key_value_heads": hidden // 64}
            config = LlamaConfig(vocab_size=1024, num_hidden_layers=layers, **sizes, **heads)
            model = LlamaForCausalLM(config)
        ids = torch.randint(3, 1000, (2, 64))
        print(json.dumps(study(name, model.bfloat16().eval(), ids)), flush=True)


if __name__ == "__main__":
    main()
