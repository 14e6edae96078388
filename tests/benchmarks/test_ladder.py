"""The ladders run end to end, and each step is what its name says."""

from __future__ import annotations

import json

import pytest
import torch

from finetune import load_recipe
from finetune.analysis.benchmark.result import Benchmark, Row
from finetune.config.paths import TINY_LLAMA
from tests.analysis.test_benchmark import in_this_process
from tests.benchmarks.ladder import STEPS, StepJob, climb, main, measure_step, steps_of


def run_here(job: StepJob, log) -> list[dict]:
    """Measure a step in this process, as its own would."""
    return in_this_process(StepJob, measure_step, job)


def one_layer(folder, monkeypatch) -> str:
    """A local folder with the shape of a Llama of one layer; compiling takes no back end here."""
    shape = json.loads((TINY_LLAMA / "config.json").read_text())
    shape |= {"num_hidden_layers": 1, "layer_types": None}
    (folder / "config.json").write_text(json.dumps({k: v for k, v in shape.items() if v}))
    plain = torch.nn.Module.compile

    def compile(module: torch.nn.Module, **_: object) -> None:
        plain(module, backend="aot_eager")

    monkeypatch.setattr(torch.nn.Module, "compile", compile)
    return f"model.name={folder}"


@pytest.mark.long
@pytest.mark.slow  # compiles
@pytest.mark.filterwarnings("ignore")  # dynamo warns about its own environment
def test_the_lora_ladder_runs_end_to_end(tmp_path, monkeypatch) -> None:
    found = climb(
        "lora", "tiny_lora_fp8", steps=1, rounds=1, run=run_here, out=tmp_path / "out",
        overrides=[one_layer(tmp_path, monkeypatch), "lora.r=16"], grid="batch=1 length=64",
        only=["shipped", "flags", "FP8 weight", "head"],
    )  # fmt: skip
    rows = {row.label: row for row in found.rows}
    assert list(rows) == [
        "stock", "fused", "shipped", "flags kept", "FP8 weight", "FP8 dgrad and head, compiled",
    ]  # fmt: skip
    ours = ("fused", "flags kept", "FP8 weight", "FP8 dgrad and head, compiled")
    assert {rows[name].proven for name in ours} == {"proven"}
    assert "100.0% of the trainable weights moved" in rows["stock"].proven
    assert "trains nothing" in rows["shipped"].proven  # adapters of rank 16 are wrapped anew
    for name in ("fused", "FP8 weight"):
        assert "without Liger" in rows[name].note  # its kernels need a GPU, and the row says so
    assert rows["flags kept"].note == ""
    assert found.memory_ratio(rows["FP8 weight"], "stock") < 1
    for name in ("stock", "fused", "flags kept", "FP8 weight"):
        assert rows[name].facts()["gib_over_predicted"] == pytest.approx(1, abs=0.02), name


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_accelerates_own_conversion_trains_a_part(tmp_path, monkeypatch) -> None:
    found = climb(
        "full", "tiny_full_fp8", steps=1, rounds=1, run=run_here, out=tmp_path / "out",
        overrides=[one_layer(tmp_path, monkeypatch)], grid="batch=1 length=64",
        only=["shipped", "Transformer Engine"],
    )  # fmt: skip
    rows = {row.label: row for row in found.rows}
    assert list(rows) == ["stock", "fused kernels", "FP8 delayed, Transformer Engine", "shipped"]
    assert "Triton" in rows["fused kernels"].error
    assert rows["FP8 delayed, Transformer Engine"].error
    share = float(rows["shipped"].proven.split("; ")[1].partition("%")[0])
    assert 0 < share < 100


@pytest.mark.parametrize(
    ("ladder", "step"), [(name, step) for name in STEPS for step in STEPS[name]],
    ids=lambda x: getattr(x, "name", x),
)  # fmt: skip
def test_a_step_is_what_its_name_says(ladder, step) -> None:
    recipe = load_recipe(f"tiny_{ladder}_fp8", check_train=False).config
    config = step.of(recipe)
    precision, name = config.precision, step.name
    assert (config.lora, config.data) == (recipe.lora, recipe.data)
    assert (step.how == "finetune") is (name not in ("stock", "shipped", "fused optimizer",
                                                     "fused kernels"))  # fmt: skip
    assert (precision.compute == "fp8") is ("FP8" in name or name == "flags kept")
    assert precision.compile == ("on" if "compiled" in name else "off")
    assert (precision.frozen == "fp8") is (ladder == "lora" and name.startswith("FP8"))
    assert ("dgrad" in precision.gemms_kept_high) is ("FP8 weight," in f"{name}," and
                                                      ladder == "lora")  # fmt: skip
    assert (precision.saved_input == "high") is ("x kept in BF16" in name)
    assert (precision.backend == "te") is ("Transformer Engine" in name)
    tensorwise = "per tensor" in name or "tensorwise" in name or name == "flags kept"
    if precision.compute == "fp8":
        assert (precision.scaling == "tensorwise") is tensorwise
    optimizer = recipe.train["optim"] if ladder == "lora" else "adamw_torch_fused"
    assert config.train["optim"] == ("adamw_torch" if name == "stock" else optimizer)
    assert bool(step.liger) is ((step.how == "finetune" and name != "flags kept")
                                or name == "fused kernels")  # fmt: skip


def test_references_run_first_and_names_choose_steps() -> None:
    lora = load_recipe("tiny_lora_fp8", check_train=False).config
    steps, references = steps_of("lora", lora)
    assert [s.name for s in steps[:2]] == list(references) == ["stock", "fused"]
    assert {s.name for s in steps} == {s.name for s in STEPS["lora"]}
    some, _ = steps_of("lora", lora, ["flags"])
    assert [s.name for s in some] == ["stock", "fused", "flags kept"]
    one, _ = steps_of("lora", lora, ["FP8 dgrad"])  # a whole name means that step alone
    assert [s.name for s in one] == ["stock", "fused", "FP8 dgrad"]
    full, references = steps_of("full", load_recipe("tiny_full_fp8", check_train=False).config)
    assert [s.name for s in full[:2]] == list(references)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["full", "tiny_lora_fp8"], "~lora"),
        (["lora", "tiny_full_fp8"], "lora.r=16"),
        (["lora", "tiny_lora_fp8", "--only", "fusd"], "did you mean 'fused'"),
        (["lroa", "tiny_lora_fp8"], "invalid choice"),
    ],
)
def test_mistakes_end_a_ladder(words, said, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert (ended.value.code, said in capsys.readouterr().err) == (2, True)


def test_what_did_not_run_is_no_reference() -> None:
    rows = [
        Row("stock", 1, 16, 16, error="out of memory"),
        Row("fused", 1, 16, 16, rounds=[[2.0, 2.0]], allocated_gib=2.0),
        Row("FP8 dgrad", 1, 16, 16, rounds=[[1.0, 1.0]], allocated_gib=1.0),
    ]
    found = Benchmark(rows, references=("stock", "fused"))
    assert found.ratio(rows[2], "stock") is None
    assert found.ratio(rows[2], "fused") == (2.0, None)
    text = found.to_markdown()
    assert "| FP8 dgrad | 1000 (1000 to 1000) | 16 | 1.0 GiB | - |  |  | 2.00x | 0.50x |" in text
    assert "| out of memory |" in text
