"""The benchmarks of FP8 LoRA run, and the figures that do not depend on a machine hold."""

from __future__ import annotations

import statistics

import pytest

from finetune.config import PrecisionConfig
from tests.benchmarks import convergence, dx_error, lora_ladder, lora_loss
from tests.benchmarks.convergence import once
from tests.benchmarks.frozen_layer import TORCHAO, contenders, measure
from tests.benchmarks.frozen_layer import table as layer_table
from tests.benchmarks.lora_ladder import BEST, FUSED, LADDER, STOCK, Result, jobs_of, row_of


@pytest.mark.parametrize("kind", dx_error.SYNTHETIC)
def test_folded_scales_are_as_exact_as_a_second_copy(kind) -> None:
    operands = dx_error.synthetic(kind, seed=0)
    found = {name: dx_error.error(way, *operands) for name, way in dx_error.WAYS.items()}
    assert 0.033 < found["folded"] < 0.038
    assert found["folded"] < 1.01 * found["second copy"]
    assert found["folded"] < 1.02 * found["torchao rows"]
    assert 0.023 < found["BF16 dgrad"] < 0.027
    assert found["per tensor"] < 0.038
    assert found["torchao e5m2"] > 1.5 * found["folded"]


@pytest.mark.parametrize("scaling", ["rowwise", "tensorwise"])
def test_a_frozen_layer_takes_at_most_three_quarters_of_torchaos_time(scaling) -> None:
    layers = contenders(scaling, emulate=True)
    shape = (256, 512, 512)
    wanted = {
        name: layer for name, layer in layers(*shape[1:]).items() if name in (TORCHAO, "ours")
    }
    times = measure(wanted, *shape, rounds=9)
    ratios = [a / b for a, b in zip(times["ours"], times[TORCHAO], strict=True)]
    assert statistics.median(ratios) <= 0.75


def test_the_real_operator_is_measured_too() -> None:
    text = layer_table("title", contenders("rowwise", emulate=False), 32, 32, 32, rounds=2)
    names = [line.split(" | ")[0].strip("| ") for line in text.splitlines()[4:]]
    assert names == [TORCHAO, "ours", "ours, bf16 kept", "BF16"]


def test_adapters_learn_over_both_bases(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(convergence, "HELD_OUT_ROWS", 16)
    monkeypatch.setattr(lora_loss, "BYTES", 100_000)
    lora_loss.tokens.cache_clear()
    results = []
    for base in ("bf16", "fp8"):
        settings = lora_loss.settings_of(4, base, 0, 8)
        result = once(tmp_path / f"{base}.json", settings, lora_loss.train)
        assert once(tmp_path / f"{base}.json", settings, lambda _: {}) == result
        assert result["held_out"] < 0.95 * result["before"]
        results.append(result)
    lora_loss.tokens.cache_clear()
    high, low = results
    assert high["over_bf16"] == pytest.approx(high["held_out"], rel=1e-3)
    assert low["losses"] != high["losses"]
    assert low["held_out"] == pytest.approx(high["held_out"], rel=0.02)
    rows = lora_loss.table_of(results).splitlines()[4:]
    assert next(row.split(" | ")[3] for row in rows) == "+0.00%"
    assert len(rows) == 2


@pytest.mark.filterwarnings("ignore")  # dynamo warns about its own environment
def test_the_ladder_runs_end_to_end(capsys) -> None:
    lora_ladder.main(["--tiny", "--layers", "1", "--ranks", "", "--rungs", "shipped,flags,weight"])
    rows = [
        line.split(" | ") for line in capsys.readouterr().out.partition("By rung")[2].split("\n")
    ]
    rows = [row for row in rows if len(row) > 2]
    names = ["rung", "shipped", "flags kept", "stock", "fused (no Liger)"]
    names += ["FP8 weight (no Liger)", "FP8 weight, compiled (no Liger)"]
    assert [row[0].strip("| ") for row in rows] == names
    memory = {row[0].strip("| "): row[-2] for row in rows}
    assert memory["stock"] == "1.00x"
    assert float(memory["FP8 weight (no Liger)"][:-1]) < 1 < float(memory["shipped"][:-1])


@pytest.mark.filterwarnings("ignore")
def test_the_best_rung() -> None:
    result = lora_ladder.climb(BEST, lora_ladder.Job(1, 32, 2, tiny=True), rank=8)
    assert len(result.seconds) == 2
    assert not result.liger  # its kernels need a GPU, and the row says so
    assert result.peak > 0


@pytest.mark.parametrize("rung", LADDER, ids=lambda rung: rung.name)
def test_a_rung_is_what_its_name_says(rung) -> None:
    if isinstance(rung.precision, dict):
        precision = PrecisionConfig.model_validate(rung.precision)
        assert (precision.frozen == "fp8") is rung.name.startswith("FP8")
        assert ("dgrad" in precision.gemms_kept_high) is ("FP8 weight" in rung.name)
        assert (precision.saved_input == "high") is ("x kept in BF16" in rung.name)
    assert rung.compiled is ("compiled" in rung.name)
    assert rung.liger is (rung.name not in ("shipped", "flags kept", "stock"))


def test_a_rung_that_does_not_fit_says_so_and_is_no_baseline() -> None:
    results = {
        ("stock", 16): Result([], why="out of memory"),
        ("fused", 16): Result([2.0, 2.0], 200, liger=True),
        (BEST.name, 16): Result([1.0, 1.0], 100, liger=True),
    }
    assert row_of("stock", 16, results, 8).startswith("| stock | 16 | out of memory |")
    cells = row_of(BEST.name, 16, results, 8).strip("| ").split(" | ")
    assert cells[5:7] == ["", "2.00x"]
    assert cells[-2:] == ["", "0.50x"]
    text = lora_ladder.table(results, 8).splitlines()
    assert {line.count("|") for line in text} == {11}


def test_baselines_run_first_and_at_every_rank() -> None:
    jobs = jobs_of([], 16, [8, 64])
    assert jobs[:2] == [(STOCK, 16), (FUSED, 16)]
    assert {r.name for r, rank in jobs if rank == 16} == {r.name for r in LADDER}
    others = [(r.name, rank) for r, rank in jobs if rank != 16]
    usual = ["stock", "fused", "fused, compiled", BEST.name]
    assert others == [(name, rank) for rank in (8, 64) for name in usual]
    assert [r.name for r, _ in jobs_of(["flags"], 16, [])] == ["stock", "fused", "flags kept"]
