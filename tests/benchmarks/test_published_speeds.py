"""Rows of published speeds: what they ran, or why that cannot be said. Rows here are made up."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import pytest

from tests.benchmarks.score.published import Case, read_case
from tests.benchmarks.score.speed import judge, pair_up, predict, read_rows, score_rows

COLUMNS = [
    "id", "source", "gpu", "n_gpus", "model", "params_b", "method", "lora_rank", "lora_targets",
    "precision", "optimizer", "batch_per_gpu", "seq_len", "grad_ckpt", "attention", "fused_ce",
    "framework", "peak_mem_gb", "mem_kind", "tokens_per_s", "step_time_s", "notes", "verified",
]  # fmt: skip


def row(**changes: str) -> dict[str, str]:
    return dict.fromkeys(COLUMNS, "") | {
        "id": "x1",
        "source": "a page",
        "gpu": "A100-80GB",
        "n_gpus": "1",
        "model": "Llama-3.1-8B",
        "method": "full",
        "precision": "bf16",
        "batch_per_gpu": "2",
        "seq_len": "2048",
        "grad_ckpt": "on",
        "framework": "transformers",
        "tokens_per_s": "2000",
        **changes,
    }


def case(**changes: str) -> Case:
    found = read_case(row(**changes))
    assert isinstance(found, Case), found
    return found


def test_a_plain_row():
    found = case()
    assert (found.shape.layers, found.gpu.name) == (32, "A100-80GB")
    assert (found.setting.batch, found.setting.length) == (2, 2048)
    assert found.setting.checkpointing == "full"
    assert found.stack.compiled is None
    assert found.published == 2000
    assert 1000 < predict(found) < 10_000


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tokens_per_s": ""}, "no speed"),
        ({"model": "Unheard-of-9B"}, "shape of Unheard-of-9B"),
        ({"gpu": "TPU v5"}, "TPU v5"),
        ({"batch_per_gpu": ""}, "batch"),
        ({"seq_len": ""}, "length"),
        ({"method": "peft:boft"}, "peft:boft"),
        ({"notes": "SUSPECT: a line"}, "doubtful"),
        ({"notes": "CPU offload"}, "offload"),
        ({"framework": "torchtitan FSDP2+CP", "attention": "sdpa + CP4"}, "context parallelism"),
        ({"framework": "NeMo TP2 PP4"}, "tensor and pipeline"),
        ({"n_gpus": "128"}, "several machines"),
    ],
)
def test_what_cannot_be_said_is_a_reason(changes, reason):
    found = read_case(row(**changes))
    assert isinstance(found, str)
    assert reason in found


def test_frameworks_launch_in_their_ways():
    assert case(framework="torchtitan FSDP2").stack.launched == "compiled"
    assert case(framework="torchtune compile=True").setting.compiled
    assert case(framework="litgpt").stack.launched == "slow"
    native = case(framework="llm.q (not PyTorch)", n_gpus="4", tokens_per_s="8000")
    assert native.stack.launched == "native"
    assert native.published == 2000  # its figure is of all GPUs
    assert native.setting.accumulation == 32
    liger = case(fused_ce="liger FLCE")
    assert liger.setting.loss == "fused"
    assert predict(liger) > predict(case())


def test_precisions_and_adapters():
    assert case(gpu="H100", precision="fp8 tensorwise").setting.fp8 == "tensorwise"
    assert case(gpu="B200", precision="MXFP8").setting.fp8 == "blocks"
    te = case(gpu="H100", precision="fp8", framework="accelerate + Transformer Engine")
    assert te.setting.fp8 == "delayed"
    qlora = case(
        method="qlora", lora_rank="16", lora_targets="q_proj+v_proj", precision="bf16, base nf4"
    )
    assert qlora.setting.base_bits == 4
    assert qlora.setting.targets == ("q_proj", "v_proj")
    assert qlora.setting.rank == 16
    most = case(method="lora", lora_targets="q+k+v+gate+up+down (no o_proj)")
    assert most.setting.targets == (
        "q_proj", "k_proj", "v_proj",
        "gate_proj", "up_proj", "down_proj",
    )  # fmt: skip


def test_a_power_limit_slows_the_clock():
    usual, limited = case(gpu="RTX 3090"), case(gpu="RTX3090 280W")
    assert limited.gpu.tflops["bf16"] == pytest.approx(
        usual.gpu.tflops["bf16"] * math.sqrt(280 / 350)
    )


def test_rows_of_changing_length_are_compared_by_tokens():
    found = case(notes="MetaMathQA; unpadded tokens", step_time_s="0.5", batch_per_gpu="4")
    assert found.published == 2000
    assert found.counted == 840 < found.setting.tokens
    tune = case(framework="torchtune", seq_len="alpaca dynamic", batch_per_gpu="16 (a guess)")
    assert not tune.timed


@pytest.mark.slow
def test_pairs_and_figures(tmp_path: Path):
    common = {"gpu": "H100", "framework": "torchtitan", "seq_len": "4096", "model": "Llama-3.2-1B"}
    rows = [
        row(id="a", precision="bf16", batch_per_gpu="2", tokens_per_s="40000", **common),
        row(id="b", precision="bf16", batch_per_gpu="8", tokens_per_s="50000", **common),
        row(id="c", precision="fp8 tensorwise", batch_per_gpu="8", tokens_per_s="55000", **common),
        row(id="d", method="peft:boft"),
        row(id="e", gpu="A100-80GB", precision="fp8 tensorwise"),
    ]
    path = tmp_path / "rows.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    scored, reasons = score_rows(read_rows(path))
    assert set(reasons) == {"d", "e"}
    assert "no matrix units for fp8" in reasons["e"]
    assert len(scored) == 3
    (pair,) = pair_up(scored)
    assert (pair.fp8.case.row["id"], pair.bf16.case.row["id"]) == ("c", "b")
    assert pair.published == pytest.approx(1.1)
    figures = judge(scored)
    assert figures["rows"] == 3
    assert figures["pairs"] == 1
    assert figures["median_error"] > 0
    assert figures["sign_right"] in (0.0, 1.0)


def test_a_short_line_has_empty_cells(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("\ufeff" + ",".join(COLUMNS) + "\nx1,a page\nx2,b" + "," * 30, "utf-8")
    scored, reasons = score_rows(read_rows(path))
    assert (scored, set(reasons)) == ([], {"x1", "x2"})
