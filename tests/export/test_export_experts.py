"""A run with adapters on the experts of a mixture is exported as stock PEFT merges it."""

from __future__ import annotations

import json

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests.families import config_of, folder_of


def test_a_merged_export_has_the_adapters_of_its_experts(cli, tmp_path) -> None:
    torch.manual_seed(0)
    base = folder_of("mixtral", tmp_path)
    AutoModelForCausalLM.from_config(config_of("mixtral"), dtype=torch.float32).save_pretrained(
        base
    )
    found = cli(
        "tiny_lora_bf16", f"model.name={base}", "lora.target_modules=[q_proj]",
        "lora.target_parameters=[experts.gate_up_proj, experts.down_proj]", "train.max_steps=4",
        "train.learning_rate=0.01", "train.warmup_steps=0", "data.max_rows=24", "data.prompts=[]",
        "eval.samples=false", "train.max_length=64",
    )  # fmt: skip
    assert found.code == 0
    done = cli("export", "last", "merged", "--to", "merged")
    assert done.code == 0
    assert done.out.splitlines()[-1] == f"next: vllm serve {tmp_path / 'merged'}"
    assert json.loads((tmp_path / "merged" / "export.json").read_text())["parity"]["passed"]
    (adapter,) = tmp_path.glob("runs/*/*/model")
    plain = AutoModelForCausalLM.from_pretrained(base)
    before = plain.state_dict()["model.layers.1.mlp.experts.down_proj"].clone()
    theirs = PeftModel.from_pretrained(plain, str(adapter)).merge_and_unload().state_dict()
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    assert not torch.equal(before, theirs["model.layers.1.mlp.experts.down_proj"])
    for name, weight in theirs.items():
        torch.testing.assert_close(ours[name].float(), weight.float(), rtol=8e-3, atol=1e-5)
