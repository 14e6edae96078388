"""Packed rows whose documents see each other are refused, whatever the model; others go on."""

from __future__ import annotations

import json

import pytest
import torch
from rich.console import Console

import finetune
from finetune import load_recipe
from finetune.training.health import monitor
from tests.benchmarks.isolation import look, probe
from tests.conftest import slow_but
from tests.families import FAMILIES, OTHERS, config_of, folder_of

SEES = {
    "bloom", "falcon", "falcon_mamba", "gpt_oss", "jamba", "mamba", "mamba2", "minimax", "mpt",
    "recurrent_gemma", "rwkv", "xlstm",
}  # fmt: skip
"""Families that let documents see each other on a CPU, by whichever attention."""
SEES_BY_ITSELF = {"afmoe", "opt", "qwen2_5_vl"}
"""Families that do under their own attention, and not under `varlen`."""
TAKES_NONE = {"bamba", "falcon_h1", "lfm2", "qwen3_next"}
"""Families whose own code refuses boundaries without kernels for a GPU."""
QUICK = ("gpt_oss", "jamba", "lfm2", "opt", "qwen3_moe")
PACKED = [
    "train.packing=true", "train.max_length=64", "train.max_steps=2", "train.warmup_steps=0",
    "data.max_rows=24", "data.prompts=[]", "eval.samples=false", "train.eval_strategy=no",
]  # fmt: skip


@pytest.mark.filterwarnings("ignore")  # of models whose kernels are for GPUs
@pytest.mark.parametrize("family", slow_but(QUICK, sorted(FAMILIES | OTHERS), pytest.mark.long))
def test_the_probe_tells_families_apart(family, tmp_path) -> None:
    auto, own = (look(family, tmp_path, own=own, dtype="float32") for own in (False, True))
    for found, sees in ((auto, SEES), (own, SEES | SEES_BY_ITSELF)):
        assert found.refusal.startswith("its masks or states know no") == (family in sees)
        assert ("packed sequences" in found.refusal) == (family in TAKES_NONE)
        assert bool(found.refusal) == (family in sees | TAKES_NONE)


def mixture(seed: int):
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config_of("qwen3_moe"), dtype=torch.float32)


def test_experts_that_round_by_the_number_of_their_rows_leak_nothing(monkeypatch) -> None:
    models = [mixture(seed) for seed in range(8)]
    assert not any(map(probe, models))
    monkeypatch.setattr("finetune.training.health.isolation.NOISE", 0)
    assert any(map(probe, models)), "none of these rounded: the look at a plain batch is untested"


def test_a_faint_leak_of_one_layer_of_a_mixture_is_seen() -> None:
    model = mixture(0)
    plain = model.model.layers[1].forward
    model.model.layers[1].forward = lambda x, *a, **k: plain(x + 1e-3 * x.cumsum(1), *a, **k)
    assert "changed the logits" in probe(model)


@pytest.mark.slow
def test_a_packed_run_that_would_mix_documents_is_refused_with_a_fix_that_works(
    cli, tmp_path
) -> None:
    model = [f"model.name={folder_of('gpt_oss', tmp_path)}", "model.weights=random"]
    found = cli("tiny_full_bf16", *model, *PACKED)
    assert found.code == 2
    assert "GptOssForCausalLM lets the documents of a packed row see each other" in found.err
    assert "Traceback" not in found.err
    assert not list((tmp_path / "runs").glob("*/metrics.jsonl"))
    fix = found.err.partition("fix:")[2].split()[:2]
    assert fix == ["train.packing=false", "train.padding_free=false"]
    assert cli("tiny_full_bf16", *model, *PACKED, *fix).code == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "more"),
    [
        ("tiny_lora_fp8", ["lora.dropout=0.2", "precision.eval=fp8"]),
        ("tiny_full_fp8", ["precision.scaling=delayed"]),
    ],
)
def test_a_run_is_the_same_with_and_without_the_probe(recipe, more, tmp_path, monkeypatch) -> None:
    """Random numbers, scales, proof and counts: nothing of the probe is left."""
    found = []
    for name in ("with", "without"):
        if name == "without":
            monkeypatch.setattr(monitor, "refuse_leaks", lambda _: None)
        settings = [*PACKED, "train.logging_steps=1", *more]
        report = finetune.train(
            load_recipe(recipe, settings), out=tmp_path / name, console=Console(quiet=True)
        )
        rows = map(json.loads, (report.folder / "metrics.jsonl").read_text().splitlines())
        losses = [(row["loss"], row["grad_norm"]) for row in rows if "loss" in row]
        assert len(losses) == 2
        receipt = report.receipt
        found.append((losses, receipt.status, receipt.flop_share, receipt.layers))
    assert found[0] == found[1]
    assert found[0][1] == "proven"
