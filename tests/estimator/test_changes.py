"""Changes: each frees and costs what the table says, and sets said to fit do."""

from __future__ import annotations

import io
import json
import shlex
from dataclasses import replace
from types import SimpleNamespace

import pytest
from rich.console import Console

from finetune import load_recipe
from finetune.config.recipe import with_overrides
from finetune.config.schema import RunConfig
from finetune.estimator import predict as predicting
from finetune.estimator.changes import RANKS, SHARDED, as_typed, changes, freeing, rows_of
from finetune.estimator.predict import Prediction, predict_whole
from finetune.estimator.variants import Changes, Variant, changes_of
from finetune.hardware.gpus import Machine, machine_of
from tests.conftest import A100, CPU, H100

LAYERS = 2
BASE = (
    "model.dtype=bfloat16", "train.max_length=1024", "train.per_device_train_batch_size=4",
    "train.packing=true", "train.gradient_checkpointing=false", "train.pad_to_multiple_of=16",
    "train.optim=adamw_torch_fused",
)  # fmt: skip


@pytest.fixture(scope="session")
def shape(tmp_path_factory):
    """A model of two wide layers: 184 million parameters that nobody allocates."""
    folder = tmp_path_factory.mktemp("wide")
    values = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 2048,
        "intermediate_size": 8192, "num_hidden_layers": LAYERS, "num_attention_heads": 16,
        "num_key_value_heads": 4, "vocab_size": 32000, "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(values))
    return folder


@pytest.fixture
def run(shape):
    """A function that gives a run of that model: method, then overrides."""

    def make(name: str, *overrides: str) -> RunConfig:
        model = (f"model.name={shape}", "model.weights=random")
        return load_recipe(name, (*model, *BASE, *overrides)).config

    return make


@pytest.fixture
def seen(monkeypatch):
    """Runs that were rehearsed."""
    asked: list[RunConfig] = []
    real = predicting.rehearse

    def counted(config, *args, **kwargs):
        asked.append(config)
        return real(config, *args, **kwargs)

    predicting._made.cache_clear()
    monkeypatch.setattr(predicting, "rehearse", counted)
    return asked


def typed_again(config: RunConfig, found: Variant, tmp_path) -> RunConfig:
    """The run as a user would get it: the recipe written down, and the change typed behind it."""
    from finetune.config.yaml import dump_yaml

    path = tmp_path / "asked.yaml"
    path.write_text(dump_yaml(config.model_dump(mode="json")))
    return load_recipe(str(path), [c for c in found.change if "." in c.split("=")[0]]).config


def predicted(config: RunConfig, machine: Machine) -> tuple[Prediction, Changes]:
    prediction = predict_whole(config, machine)
    return prediction, changes_of(prediction)


# ---------------------------------------------------------------------------------- what is offered


def test_a_change_can_be_typed_as_it_is_printed():
    words = ("--gpus 2", *SHARDED, "precision.keep=[k_proj, v_proj]", "~train.optim")
    assert shlex.split(as_typed(words)) == ["--gpus", "2", *words[1:]]


@pytest.mark.parametrize(
    ("name", "overrides", "device", "offered", "not_offered"),
    [
        ("tiny_full_bf16", ("model.attention=sdpa",), H100, {"micro-batch", "checkpointing",
         "optimizer", "method", "length", "attention", "devices"},
         {"base", "weights", "optimizer kernel"}),
        ("tiny_full_bf16", ("train.optim=adamw_torch", "model.dtype=float32"), H100,
         {"optimizer kernel", "weights"}, {"base"}),
        ("tiny_full_bf16", ("train.optim=adamw_8bit", "train.per_device_train_batch_size=1",
         "train.gradient_checkpointing=true", "train.packing=false", "train.max_length=300"), H100,
         {"method", "devices"},
         {"optimizer", "micro-batch", "checkpointing", "attention", "length"}),
        ("tiny_lora_bf16", (), H100, {"base"}, {"method", "attention"}),
        ("tiny_lora_bf16", ("model.storage=nf4",), H100, {"micro-batch"}, {"base", "devices"}),
        ("tiny_full_bf16", (), CPU, {"micro-batch", "method"},
         {"attention", "devices"}),
    ],
)  # fmt: skip
def test_only_what_applies_is_offered(run, name, overrides, device, offered, not_offered):
    kinds = {change.kind for change in freeing(run(name, *overrides), device)}
    assert offered <= kinds
    assert not kinds & not_offered


@pytest.mark.parametrize(
    ("name", "device", "offered"),
    [
        ("tiny_full_bf16", H100, True),
        ("tiny_full_bf16", A100, False),
        ("tiny_full_fp8", H100, False),
    ],
)
def test_adapters_in_fp8_are_offered_to_bf16_where_a_gpu_has_it(run, name, device, offered):
    adapters = [c.overrides for c in changes(run(name), device) if c.kind == "method"]
    assert adapters
    assert any("precision.compute=fp8" in each for each in adapters) == offered


def test_a_gpu_without_fp8_holds_a_base_in_fp8_by_storage(run):
    config = run("tiny_lora_bf16")
    bases = {d.name: [c.overrides for c in changes(config, d) if c.kind == "base"]
             for d in (H100, A100)}  # fmt: skip
    assert "precision.frozen=fp8" in bases[H100.name][0]
    assert bases[A100.name][0] == ("model.storage=fp8",)
    for found in bases.values():
        assert found[1] == ("precision.compute=bf16", "model.storage=nf4")


def test_gpus_with_a_copy_each_may_share_one(run):
    config = run("tiny_full_bf16")
    assert not [c for c in changes(config, H100, 1) if c.kind == "sharding"]
    (shared,) = (c for c in changes(config, H100, 8) if c.kind == "sharding")
    assert (shared.typed, shared.rank, shared.gpus) == (SHARDED, "same", None)
    sharded = with_overrides(config, shared.overrides)
    assert not [c for c in changes(sharded, H100, 8) if c.kind == "sharding"]
    for one in (config, sharded):  # bitsandbytes steps no shards, and rounds BF16 to nearest
        (smaller,) = (c for c in changes(one, H100, 8) if c.kind == "optimizer")
        assert smaller.overrides == ("train.optim=adamw_torch_8bit",)


@pytest.mark.parametrize(("rows", "expected"), [(8, [4, 2, 1]), (6, [3, 1]), (1, []), (5, [1])])
def test_smaller_micro_batches_keep_the_tokens_of_a_step(run, rows, expected):
    config = run("tiny_full_bf16", f"train.per_device_train_batch_size={rows}",
                 "train.gradient_accumulation_steps=3")  # fmt: skip
    found = [c.overrides for c in changes(config, H100) if c.kind == "micro-batch"]
    pairs = [tuple(int(text.partition("=")[2]) for text in overrides) for overrides in found]
    assert [pair[0] for pair in pairs] == expected
    assert all(a * b == rows * 3 for a, b in pairs)


# --------------------------------------------------------------------------------- a run that fits


@pytest.mark.long
def test_a_run_that_fits_is_shown_what_its_settings_bring(run):
    """Each row is typed behind the recipe, and trains the same; what it costs is predicted."""
    config = run("tiny_lora_fp8", "train.gradient_accumulation_steps=4")
    machine = machine_of("H100")
    prediction, found = predicted(config, machine)
    assert (prediction.fit, found.fit, found.together) == ("fits", "fits", None)
    rows = {row.label: row for row in found.rows}
    assert rows.keys() == {
        "micro-batch", "larger micro-batch", "checkpointing", "compile",
    }  # fmt: skip
    assert {row.rank for row in found.rows} == {"same"}
    assert rows["compile"].change == ("precision.compile=off",)
    assert not rows["compile"].prediction.compiled
    assert rows["checkpointing"].frees > 0
    assert rows["checkpointing"].times < 1
    assert rows["larger micro-batch"].frees < 0
    assert all(row.speed_shown == f"{row.times:.2f}x" for row in found.rows)


@pytest.mark.slow
def test_without_speeds_a_run_that_fits_has_no_rows(run, seen):
    _, found = predicted(run("tiny_full_bf16"), machine_of(memory_gib=40))
    assert (found.fit, found.rows) == ("fits", ())
    assert len(seen) == 1, "the run itself alone"


@pytest.mark.long
def test_attention_under_a_mask_is_said_to_cost_time(run, tmp_path):
    config = run("tiny_full_bf16", "train.max_length=4096", "model.attention=sdpa")
    machine = machine_of("H100")
    prediction, found = predicted(config, machine)
    (best,) = (row for row in found.rows if row.label == "attention")
    assert best.change == ("model.attention=auto",)
    other = predict_whole(typed_again(config, best, tmp_path), machine)
    gain = other.timing.tokens_per_s / prediction.timing.tokens_per_s
    assert gain == pytest.approx(best.times)
    assert gain > 1.1


@pytest.mark.long
def test_every_change_can_run_or_says_why_not(run):
    asked = predict_whole(run("tiny_lora_fp8"), machine_of("H100"))
    found = {row.label: row for row in changes_of(asked, every=True).rows}
    assert {"torchao tensorwise", "torchao rowwise", "te delayed", "base", "checkpointing"} <= set(
        found
    )
    assert all(
        row.prediction or (row.why and row.outcome == "cannot run") for row in found.values()
    )
    assert found["base"].change == ("precision.compute=bf16", "model.storage=nf4")
    cast_each_time = found["torchao rowwise"].prediction
    assert cast_each_time is not None
    assert cast_each_time.config.precision.frozen != "fp8"


# ------------------------------------------------------------------------- a run that does not fit


@pytest.mark.long
def test_a_change_frees_and_costs_what_its_row_says(run, tmp_path):
    config, machine = run("tiny_full_bf16"), machine_of("4090", memory_gib=3.0)
    prediction, found = predicted(config, machine)
    assert found.fit != "fits"
    order = [(RANKS.index(one.rank), round(1 / one.times, 3)) for one in found.rows]
    assert order == sorted(order)
    many = [one.change for one in found.rows if one.rank == "devices"]
    assert many
    assert all(change[0].startswith("--gpus") and SHARDED[0] in change for change in many)
    shown = "".join(_shown(found).split())  # long ones are folded
    assert all("".join(word.split()) in shown for one in found.rows for word in one.change)
    facts = json.loads(json.dumps(found.facts()))
    assert [fact["change"] for fact in facts["rows"]] == [list(one.change) for one in found.rows]
    for one in found.rows[:3]:
        other = predict_whole(typed_again(config, one, tmp_path), machine)
        assert one.frees == prediction.footprint.allocated - other.footprint.allocated > 0
        assert one.fit == other.footprint.fit(machine.memory_bytes)
        assert 1 / one.times == pytest.approx(
            prediction.timing.tokens_per_s / other.timing.tokens_per_s, abs=1e-9
        )


@pytest.mark.long
@pytest.mark.parametrize(("memory", "rank"), [(2.2, "adapters"), (3.0, "otherwise"), (3.6, "same")])
def test_what_is_said_to_fit_together_fits_and_changes_no_more_than_it_must(
    run, tmp_path, memory, rank
):
    config, machine = run("tiny_full_bf16"), machine_of("4090", memory_gib=memory)
    prediction, found = predicted(config, machine)
    assert found.fit != "fits"
    assert found.together is not None
    assert found.together.rank == rank
    other = predict_whole(typed_again(config, found.together, tmp_path), machine).footprint
    assert found.together.fit == other.fit(machine.memory_bytes) == "fits"
    assert found.together.frees == prediction.footprint.allocated - other.allocated
    rows, times = rows_of(typed_again(config, found.together, tmp_path))
    length = 2 if any("max_length" in item for item in found.together.change) else 1
    assert rows * times == length * 4, "a step keeps its tokens"


@pytest.mark.long
def test_where_nothing_helps_it_says_so(run):
    _, found = predicted(run("tiny_full_bf16"), machine_of("4090", memory_gib=0.9))
    assert found.together is None
    assert "no set of these changes makes it fit" in _shown(found)


# -------------------------------------------------------------------------------------------- words


def _shown(found: Changes) -> str:
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(found)
    return console.export_text()


def made_up(*change: str, frees: int = 0, slower: float | None = None, rank="same") -> Variant:
    """A variant of a run of a TiB, whose memory and speed are as given."""

    def found(allocated: int, speed: float | None):
        timing = None if speed is None else SimpleNamespace(tokens_per_s=speed)
        return SimpleNamespace(
            footprint=SimpleNamespace(allocated=allocated), timing=timing, fit="fits"
        )

    speed = None if slower is None else 1 / (1 + slower)
    asked, other = found(2**40, 1.0), found(2**40 - frees, speed)
    return Variant(asked, change, other, "why", "", rank)  # pyright: ignore


@pytest.mark.parametrize("width", [60, 1000])
def test_no_setting_is_broken_and_a_pipe_has_one_line_for_each_change(width):
    change = ("train.per_device_train_batch_size=1", "train.gradient_accumulation_steps=8")
    found = Changes("does not fit", (made_up(*change, frees=2**30, slower=0.5),))
    console = Console(file=io.StringIO(), width=width)
    console.print(found)
    lines = console.file.getvalue().splitlines()  # pyright: ignore[reportAttributeAccessIssue]
    for setting in change:
        assert any(setting in line for line in lines), lines
    together = [line for line in lines if all(part in line for part in (*change, "0.67x"))]
    assert len(together) == (width == 1000)


def test_a_change_of_gpus_is_priced_by_the_gpu():
    """Four GPUs at half the speed each are twice as fast together."""
    four = made_up("--gpus 4", slower=1.0, rank="devices")
    assert four.speed_shown == "0.50x, each GPU"
    assert replace(four, rank="same").speed_shown == "0.50x"


def test_a_change_to_shorter_rows_of_as_much_text_is_priced_by_the_text():
    """Half of the tokens of a step in half of its time are the same text in half of the time."""
    assert replace(made_up("train.max_pixels=65536", slower=0.0), tokens=0.5).times == 2.0


def test_a_set_that_fits_is_shown_with_what_it_costs():
    one = made_up("train.optim=adamw_8bit", frees=3 * 2**30, slower=0.02, rank="otherwise")
    said = "fits with train.optim=adamw_8bit (frees 3.0 GiB, 0.98x the speed, changes training)"
    assert said in _shown(Changes("tight", (), one))
    both = made_up("a=1", "b=2", frees=5 * 2**30, slower=0.0)
    assert "fits with a=1 b=2 (frees 5.0 GiB, 1.00x the speed)" in _shown(
        Changes("tight", (one,), both)
    )
