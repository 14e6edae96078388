"""The ladders run end to end, and each step is what its name says."""

from __future__ import annotations

import os

import pytest

from finetune import load_recipe
from finetune.analysis.benchmark import benchmark
from finetune.errors import RunFailedError
from tests.analysis.pretended import pretend
from tests.benchmarks.ladder import LADDERS, climb, main, steps_of, train_stock


def run_here(jobs, threads=None) -> None:
    """Steps of finetune pretend; those of other libraries train, as their own process would."""
    (job,) = jobs
    if not job.variant.program:
        pretend(job.file, job.seed, job.out, os.environ, measured=True)
        return
    words = [str(job.file), f"train.seed={job.seed}", "--out", str(job.out)]
    try:
        train_stock(job.variant.program[-1], *words)
    except ImportError as error:
        raise RunFailedError(str(error)) from None


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("ladder", "moved"), [("lora", "it trains nothing"), ("full", "; ")])
def test_a_ladder_runs_end_to_end(ladder, moved, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(benchmark, "run_jobs", run_here)
    rank = ["lora.r=16", "train.gradient_checkpointing=auto"] if ladder == "lora" else []
    found = climb(
        ladder, f"tiny_{ladder}_fp8", steps=1, rounds=1, out=tmp_path / "out",
        overrides=rank, grid="batch=1 length=64", only=["shipped"],
    )  # fmt: skip
    rows = {row.label: row for row in found.rows}
    assert list(rows) == [*found.references, "shipped"]
    assert "100.0% of the trainable weights moved" in rows["stock"].proven
    assert rows["stock"].gib_over_predicted == pytest.approx(1, abs=0.02)
    assert moved in rows["shipped"].proven  # adapters of rank 16 are wrapped again
    assert "100.0%" not in rows["shipped"].proven
    assert rows["shipped"].predicted_gib is None
    if ladder == "full":
        assert "liger-kernel" in rows["fused kernels"].error
    assert ("without Liger" in found.alike) is (ladder == "lora")


@pytest.mark.parametrize(
    ("ladder", "step"), [(name, step) for name in LADDERS for step in LADDERS[name]],
    ids=lambda x: getattr(x, "name", x),
)  # fmt: skip
def test_a_step_is_what_its_name_says(ladder, step) -> None:
    recipe = load_recipe(f"tiny_{ladder}_fp8", check_train=False).config
    config = step.of(recipe)
    precision, name = config.precision, step.name
    assert (config.lora, config.data) == (recipe.lora, recipe.data)
    others = ("stock", "shipped", "shipped, TE", "fused optimizer", "fused kernels")
    assert (step.how == "finetune") is (name not in others)
    assert (precision.compute == "fp8") is ("FP8" in name or name == "flags kept")
    assert precision.compile == ("on" if "compiled" in name else "off")
    assert (precision.frozen == "fp8") is (ladder == "lora" and name.startswith("FP8"))
    assert ("dgrad" in precision.gemms_kept_high) is ("FP8 weight," in f"{name}," and
                                                      ladder == "lora")  # fmt: skip
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
    assert {s.name for s in steps} == {s.name for s in LADDERS["lora"]}
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
