"""The scoreboard: rows, shapes, jobs, statistics, and published steps through the estimator."""

import csv
import hashlib
import io
import json
import os
import signal
from dataclasses import replace

import pytest
from rich.console import Console

from finetune.errors import ConfigError, DataNotFoundError, RunFailedError
from tests.benchmarks.score import scoreboard
from tests.benchmarks.score.jobs import (
    REPEATED,
    gpu_of,
    map_row,
    torch_version,
    transformers_version,
)
from tests.benchmarks.score.rows import COLUMNS, held_out, read_rows
from tests.benchmarks.score.scoreboard import (
    Scoreboard,
    Scored,
    Unscored,
    Verdict,
    score_csv,
    statistics,
)
from tests.benchmarks.score.shapes import config_of, shape_of
from tests.benchmarks.score.table import print_board

FMS = "TRL SFTTrainer accelerate 1.0.1 torch 2.4.1 transformers 4.48.1 trl 0.13.0 / fms plugin "
ROW = {
    "id": "x1", "gpu": "A100-80GB", "n_gpus": "1", "model": "tiny-llama", "method": "lora",
    "lora_rank": "16", "precision": "bfloat16 weights, no autocast", "batch_per_gpu": "2",
    "seq_len": "512", "framework": FMS + "none", "peak_mem_gb": "4.5", "mem_kind": "allocated",
}  # fmt: skip


def write(path, *rows, columns=COLUMNS):
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(dict.fromkeys(columns, "") | row for row in rows)
    return path


def one(tmp_path, **changes):
    return read_rows(write(tmp_path / "rows.csv", ROW | changes))[0]


# -------------------------------------------------------------------------------------------- rows


def test_rows_are_typed(tmp_path) -> None:
    row = one(
        tmp_path, notes="fine", batch_per_gpu="2 (torchtune config)", seq_len="alpaca dynamic"
    )
    assert (row.line, row.id, row.n_gpus, row.lora_rank, row.peak_gb) == (2, "x1", 1, 16, 4.5)
    assert row.batch == 2
    assert (row.length, row.length_text) == (None, "alpaca dynamic")
    assert not row.suspect
    assert not row.out_of_memory


def test_a_third_is_held_out_by_hash() -> None:
    ids = [f"gt{i:04d}" for i in range(900)]
    assert all(
        held_out(i) == (int(hashlib.sha256(i.encode()).hexdigest(), 16) % 3 == 0) for i in ids
    )
    assert 250 < sum(map(held_out, ids)) < 350


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"peak_mem_gb": "much"}, "peak_mem_gb is 'much'"),
        ({"peak_mem_gb": "-1"}, "not below zero"),
        ({"step_time_s": "inf"}, "finite"),
        ({"mem_kind": "virtual"}, "mem_kind is 'virtual'"),
        ({"id": ""}, "id is ''"),
    ],
)
def test_a_wrong_row_is_refused_with_file_and_line(tmp_path, changes, said) -> None:
    path = write(tmp_path / "rows.csv", ROW | {"id": "first"}, ROW | changes)
    with pytest.raises(ConfigError, match=said) as error:
        read_rows(path)
    assert f"{path}:3" in str(error.value)


def test_a_wrong_file_is_refused(tmp_path) -> None:
    with pytest.raises(DataNotFoundError):
        read_rows(tmp_path / "none.csv")
    with pytest.raises(ConfigError, match="no column 'mem_kind'"):
        read_rows(write(tmp_path / "a.csv", ROW, columns=[c for c in COLUMNS if c != "mem_kind"]))
    with pytest.raises(ConfigError, match="comes twice"):
        read_rows(write(tmp_path / "b.csv", ROW, ROW))
    with pytest.raises(ConfigError, match="no rows"):
        read_rows(write(tmp_path / "c.csv"))
    (tmp_path / "d.csv").write_bytes(b"\xff\xfe\x00\x81")
    with pytest.raises(ConfigError, match="UTF-8"):
        read_rows(tmp_path / "d.csv")


# ---------------------------------------------------------------------------------- shapes, stacks


@pytest.mark.parametrize(
    ("model", "billions"),
    [
        ("Llama-3.1-8B", 8.030), ("NousResearch/Llama-2-70b-hf", 68.977), ("Llama-3.2-3B", 3.213),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", 46.703), ("qwen-14b-chat", 14.167),
        ("bigcode/gpt_bigcode-santacoder", 1.125), ("ibm/PowerLM-3b", 3.511),
        ("StableLM Alpha 3 B", 3.637), ("falcon-7b", 7.217), ("gemma-2b", 2.506),
    ],
)  # fmt: skip
def test_shapes_have_the_published_number_of_weights(model, billions) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(config_of(shape_of(model).name))
    assert sum(p.numel() for p in made.parameters()) / 1e9 == pytest.approx(billions, abs=5e-4)


def test_an_unknown_model_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"qwen2\.5-7b"):
        shape_of("Qwen2.5-8B")


def test_stacks_are_recognised() -> None:
    assert transformers_version("4.45.2").loss == "transformers-4.45"
    assert transformers_version("4.48.1").loss == "transformers-4.48"
    assert transformers_version("5.13.1").loss == "transformers-5"
    assert transformers_version("4.45.2").repeats_keys
    assert not transformers_version("4.48.1").repeats_keys
    assert torch_version("ms-swift / HF Trainer / torch 2.1.1") == (2, 1, 1)
    assert gpu_of("RTX3090 280W") == gpu_of("RTX 3090")
    assert gpu_of("a card") is None


# -------------------------------------------------------------------------------------------- jobs


def test_a_row_becomes_a_job(tmp_path) -> None:
    job = map_row(one(tmp_path, framework=FMS + "accelerated-peft-bnb-foak + FSDP", n_gpus="2",
                      precision="bfloat16 weights + autocast, base nf4")).job  # fmt: skip
    assert job is not None
    assert (job.weights, job.autocast, job.fused_kernels, job.fast_loss) == ("nf4-dq", *3 * (True,))
    assert (job.sharding, job.gpus, job.torch) == ("fsdp1", 2, (2, 4, 1))


def test_a_job_becomes_a_recipe(job) -> None:
    from tests.benchmarks.score.memory import run_config

    config = run_config(replace(job, weights="nf4-dq", autocast=True, attention=REPEATED))
    assert config.lora is not None
    assert (config.lora.r, config.lora.dropout) == (16, 0.1)
    assert config.model.storage == "nf4"
    assert config.precision.compute == "bf16"
    assert config.train["max_length"] == 512
    assert config.train["activation_checkpointing_kwargs"] == {"use_reentrant": True}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"framework": "axolotl"}, "no mapping for the framework 'axolotl'"),
        ({"model": "MyModel-9B"}, "shape of 'MyModel-9B' is not known"),
        ({"seq_len": "alpaca dynamic"}, "'alpaca dynamic' is not a number"),
        ({"notes": "SUSPECT: too small"}, "its notes say SUSPECT"),
        ({"framework": "fsdp_qlora train.py (FSDP1)", "notes": "CPU offload"}, "offload"),
        ({"framework": "PEFT 0.19", "notes": "some--experiment; x"}, "some--experiment"),
    ],
)
def test_a_row_that_cannot_be_mapped_says_why(tmp_path, changes, reason) -> None:
    mapped = map_row(one(tmp_path, **changes))
    assert mapped.job is None
    assert reason in mapped.reason


def test_a_doubtful_speed_does_not_bar_the_memory(tmp_path) -> None:
    assert map_row(one(tmp_path, notes="SUSPECT throughput: too fast")).job is not None


# ------------------------------------------------------------------- through the shipped estimator


@pytest.fixture
def job(tmp_path):
    return map_row(one(tmp_path)).job


@pytest.mark.slow
def test_the_parts_of_a_peak_are_there(job) -> None:
    """Full training: weights, gradients, two states and AdamW's temporaries, in bf16: 10 bytes."""
    from tests.benchmarks.score.memory import memory_of

    found = memory_of(replace(job, adapter="", adapter_options=(), batch=1, length=64))
    workspaces = 2 * (8.125 + 1) * 2**20  # of torch 2.4 on an A100
    assert found.phase == "optimizer"
    assert found.allocated == pytest.approx(10 * 1_100_048_384 + workspaces, rel=1e-3)


@pytest.mark.slow
def test_rows_go_through_the_functions_of_estimate(job, monkeypatch) -> None:
    from finetune.estimator import predict
    from tests.benchmarks.score.memory import memory_of

    seen = []
    rehearse = predict.rehearse
    monkeypatch.setattr(
        predict, "rehearse", lambda *args, **kw: seen.append(kw) or rehearse(*args, **kw)
    )
    memory_of(replace(job, length=128))
    assert [call["layers"] for call in seen] == [2, 3]


@pytest.mark.long
def test_frozen_shards_keep_the_inputs_of_all_layers(job) -> None:
    """Under FSDP 1 with adapters and reentrant checkpointing: inputs of layers and gradients."""
    from tests.benchmarks.score.memory import memory_of

    long = replace(job, batch=1, length=8192, loss="fused-head")
    sharded = replace(long, sharding="fsdp1", gpus=2)
    inputs = 22 * 8192 * 2048 * 2
    weights = 1_100_048_384 * 2
    alone, shared = memory_of(long), memory_of(sharded)
    assert shared.phase == "backward"
    assert shared.allocated - (alone.allocated - weights / 2) > 0.9 * inputs


def test_logits_cost_what_each_path_copies() -> None:
    """Bytes per token and word in forward: 12 in 4.45 (two float32 copies and the log of the
    softmax), 14 in 4.48 (the 16-bit logits too), 8 with the in-place kernel."""
    import torch

    from finetune.estimator.trace.trace import Recorder
    from tests.benchmarks.score.losses import take_loss

    with torch.device("meta"):
        head = torch.nn.Linear(64, 32000, bias=False, dtype=torch.bfloat16)
        hidden = torch.empty(2, 1024, 64, dtype=torch.bfloat16, requires_grad=True)
        labels = torch.zeros(2, 1024, dtype=torch.long)

    def forward(path: str, **options) -> float:
        recorder = Recorder(None, [head.weight, hidden, labels])
        with recorder:
            take_loss(path, hidden, head, labels, **options)
        return recorder.trace.peak()[0] / (2048 * 32000)

    with_kernel = forward("transformers-4.45", fast=True)
    assert with_kernel == pytest.approx(8, abs=0.1)
    assert forward("transformers-4.45") - with_kernel == pytest.approx(4, abs=0.05)
    assert forward("transformers-4.48") - with_kernel == pytest.approx(6, abs=0.05)
    assert forward("fused-head") < with_kernel - 4


def test_packed_weights_weigh_half_a_byte() -> None:
    from tests.benchmarks.score.packed import packed_bytes

    assert sum(packed_bytes("nf4", 4096, 4096)) / 4096**2 == pytest.approx(0.5 + 4 / 64)
    assert sum(packed_bytes("nf4-dq", 4096, 4096)) / 4096**2 == pytest.approx(0.516, abs=1e-3)
    assert sum(packed_bytes("gptq4", 4096, 4096)) / 4096**2 == pytest.approx(0.52, abs=1e-2)


# --------------------------------------------------------------------------------------- the board


def test_statistics() -> None:
    found = statistics([0.01, -0.03, 0.02, -0.005])
    assert found is not None
    assert (found.count, found.median, found.worst, found.lowest) == (4, 0.01, 0.03, -0.03)
    assert found.under == 0.25
    assert statistics([]) is None
    many = statistics(i / 100 for i in range(1, 101))
    assert many is not None
    assert (many.median, many.p90, many.p95) == (0.5, 0.9, 0.95)
    assert many.lowest == 0.0


def scored(name: str, apart: bool, predicted: float) -> Scored:
    group = "allocated, Transformers path"
    return Scored(name, 2, group, "f", apart, 10.0, predicted, "head", 12.0)


def test_held_out_rows_are_scored_apart() -> None:
    board = Scoreboard(
        "rows.csv", 5, (scored("a", False, 10.1), scored("b", True, 9.0)),
        (Verdict("c", 4, "f", False, True, 90.0), Verdict("d", 5, "f", False, False, 0.0)),
        (Unscored("e", 6, True, "no memory was measured"),),
    )  # fmt: skip
    line = board.table(apart=True)["allocated, Transformers path"]
    traced, theirs = line["traced"], line["accelerate"]
    assert traced is not None
    assert traced.worst == pytest.approx(0.1)
    assert theirs is not None
    assert theirs.median == pytest.approx(0.2)
    assert board.right(apart=False) == (1, 2)
    text = io.StringIO()
    print_board(board, Console(file=text, width=140))
    for said in ("Held-out rows", "1 of 2 foreseen", "no memory was measured"):
        assert said in text.getvalue()
    json.dumps(board.to_json())


@pytest.mark.long
def test_every_row_is_in_one_place(tmp_path) -> None:
    rows = [
        ROW,
        ROW | {"id": "x2", "peak_mem_gb": "", "notes": "FAILED/OOM", "batch_per_gpu": "512"},
        ROW | {"id": "x3", "mem_kind": "unknown"},
        ROW | {"id": "x4", "framework": "axolotl"},
        ROW | {"id": "x5", "peak_mem_gb": ""},
        ROW | {"id": "x6", "mem_kind": "reserved"},
    ]
    board = score_csv(write(tmp_path / "rows.csv", *rows))
    assert board.rows == len(board.scored) + len(board.verdicts) + len(board.unscored) == 6
    assert [s.id for s in board.scored] == ["x1", "x6"]
    allocated, reserved = board.scored
    assert 2.2 < allocated.predicted < reserved.predicted < 6
    assert allocated.accelerate is not None
    assert [(v.id, v.right) for v in board.verdicts] == [("x2", True)]
    assert len(board.reasons()) == 3


def dies(rows, baselines) -> None:
    """In the place of what a worker does."""
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_a_worker_that_dies_ends_the_scoring(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(scoreboard, "place", dies)
    with pytest.raises(RunFailedError, match=r"has died\n.*x1 \(line 2\)"):
        score_csv(write(tmp_path / "rows.csv", ROW), processes=1)


def test_the_command_scores_a_file(tmp_path, monkeypatch, capsys) -> None:
    from tests.benchmarks.score.__main__ import main

    file = write(tmp_path / "rows.csv", ROW | {"framework": "axolotl"}, ROW | {"id": "x2"})
    monkeypatch.setattr("sys.argv", ["score", str(file), "--json", "--rows", "x1"])
    assert main() == 0
    printed = capsys.readouterr()
    assert "1 of 1 rows" in printed.err
    board = json.loads(printed.out)
    assert [u["id"] for u in board["memory"]["unscored"]] == ["x1"]
    assert set(board) == {"memory", "speed"}
    monkeypatch.setattr("sys.argv", ["score", str(tmp_path / "none.csv")])
    assert main() == 1
    assert "error: There is no file" in capsys.readouterr().err
