"""Searches: what was found fits, its neighbour does not, and few points were measured."""

from __future__ import annotations

import dataclasses
import io
import json

import pytest
from rich.console import Console

from finetune import load_recipe
from finetune.config.recipe import with_overrides
from finetune.config.schema import RunConfig
from finetune.estimator import predict as predicting
from finetune.estimator import search as searching
from finetune.estimator.changes import SHARDED
from finetune.estimator.memory.footprint import Footprint
from finetune.estimator.predict import Prediction, predict_fast
from finetune.estimator.search import (
    GpuChoice,
    GpuChoices,
    cheapest_gpu,
    fewest_gpus,
    largest_length,
    largest_rows,
    search,
)
from finetune.hardware.gpus import machine_of, named_gpu
from finetune.units import count

GIB = 2**30
MARGIN = 800_000_000


@pytest.fixture(scope="session")
def shape(tmp_path_factory):
    """A model of two wide layers, for up to 4096 tokens, that nobody allocates."""
    folder = tmp_path_factory.mktemp("wide")
    values = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 1024,
        "intermediate_size": 4096, "num_hidden_layers": 2, "num_attention_heads": 8,
        "num_key_value_heads": 4, "vocab_size": 8192, "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(values))
    return folder


@pytest.fixture
def run(shape):
    """A function that gives a run of that model: recipe, then overrides."""

    def make(name: str = "tiny_full_bf16", *overrides: str) -> RunConfig:
        fixed = (f"model.name={shape}", "model.weights=random", "model.dtype=bfloat16",
                 "train.max_length=512", "train.per_device_train_batch_size=4")  # fmt: skip
        return load_recipe(name, (*fixed, *overrides)).config

    return make


def pretended(needs) -> tuple:
    """A measure of a run that needs `needs(n)` bytes beside the margin, and the n it was asked."""
    asked: list[int] = []

    def predict(n: int) -> Prediction:
        asked.append(n)
        memory = Footprint({"forward": {"saved": int(needs(n))}})
        return Prediction(None, None, None, memory, None, 0, 0, False)  # pyright: ignore

    return predict, asked


# ------------------------------------------------------------------------------------ the search


NEEDS = {
    "linear": lambda n: 5e9 + 2.3e8 * n,
    "steep": lambda n: 1e9 + 3.1e9 * n,
    "quadratic": lambda n: 2e9 + 1e8 * n + 4e6 * n * n,
    "steps": lambda n: 2e9 + 5e8 * (n // 7) + 1e7 * n,
    "all": lambda _: 1e9,
    "none": lambda _: 9e10,
}


@pytest.mark.parametrize("start", [1, 4, 64, 900])
@pytest.mark.parametrize("kind", NEEDS)
def test_what_is_found_fits_and_the_next_does_not(kind, start):
    predict, asked = pretended(NEEDS[kind])
    memory, most = 24 * GIB, 1000
    value, following, seen = search(predict, memory, start=start, most=most)
    fitting = [n for n in range(1, most + 1)
               if predict(n).footprint.fit(memory) == "fits"]  # fmt: skip
    asked = asked[:-most]
    assert value == max(fitting, default=0)
    assert following == (None if value == most else value + 1)
    assert len(seen) == len(asked) == len(set(asked))
    assert (value in seen) == (value > 0)
    assert len(asked) <= (4 if kind in ("linear", "steep") else 12)


# --------------------------------------------------------------------------------- rows and length


@pytest.mark.long
def test_the_largest_micro_batch_has_a_neighbour_that_does_not_fit(run):
    config, machine = run(), machine_of("4090", memory_gib=4)
    found = largest_rows(config, machine)
    assert 1 <= found.value < found.next == found.value + 1
    assert found.points <= 10
    for rows, expected in ((found.value, True), (found.next, False)):
        typed = with_overrides(config, (f"train.per_device_train_batch_size={rows}",))
        memory = predict_fast(typed, machine).footprint
        assert (memory.fit(machine.memory_bytes) == "fits") is expected
    assert load_recipe("tiny_full_bf16", found.change)
    more = largest_rows(config, machine_of("4090", memory_gib=5))
    assert more.value > found.value


@pytest.mark.long
def test_the_longest_row_has_a_neighbour_that_does_not_fit(run):
    rows = "train.per_device_train_batch_size=2"
    config, machine = run("tiny_full_bf16", rows), machine_of("4090", memory_gib=3)
    found = largest_length(config, machine)
    assert found.next == found.value + 128
    for length, expected in ((found.value, True), (found.next, False)):
        typed = with_overrides(config, (f"train.max_length={length}",))
        memory = predict_fast(typed, machine).footprint
        assert (memory.fit(machine.memory_bytes) == "fits") is expected


@pytest.mark.slow
def test_rows_end_where_the_model_does(run):
    found = largest_length(run(), machine_of("H200"))
    assert (found.value, found.next) == (4096, None)


@pytest.mark.slow
def test_where_not_even_one_row_fits_it_says_so(run):
    found = largest_rows(run(), machine_of("4090", memory_gib=1))
    assert (found.value, found.next, found.prediction) == (0, 1, None)
    assert "not even the smallest fits" in _shown(found)
    assert json.loads(json.dumps(found.facts()))["change"] is None


# -------------------------------------------------------------------------------------------- GPUs


@pytest.fixture
def rehearsals(monkeypatch):
    """Kinds of GPU that a model was rehearsed on."""
    done: list[tuple[int, int] | None] = []
    real = predicting.rehearse

    def counted(config, device, *args, **kwargs):
        done.append(device.capability)
        return real(config, device, *args, **kwargs)

    predicting._made.cache_clear()
    monkeypatch.setattr(predicting, "rehearse", counted)
    return done


def _gpus(*names: str, **prices: float):
    lines = [named_gpu(name) for name in names]
    return tuple(g.model_copy(update={"price_usd_per_hour": prices.get(g.name)}) for g in lines)


@pytest.mark.slow
def test_gpus_of_one_capability_share_a_rehearsal_and_differ_in_speed(run, rehearsals):
    found = cheapest_gpu(run(), gpus=_gpus("H100", "H200", "H100-PCIe", "4090", "L4"))
    assert len(rehearsals) == 2
    speeds = {c.machine.gpu.name: c.tokens_per_s for c in found.choices}
    assert speeds["H100"] > speeds["H100-PCIe"] > speeds["RTX 4090"] > speeds["L4"]
    assert [c.tokens_per_s for c in found.choices] == sorted(speeds.values(), reverse=True)
    alone = predict_fast(run(), machine_of("H100-PCIe"))
    shared = next(c.prediction for c in found.choices if c.machine.gpu.name == "H100-PCIe")
    assert shared.footprint == alone.footprint
    assert shared.timing == alone.timing


@pytest.mark.slow
def test_prices_decide_where_they_are_known_and_what_does_not_fit_comes_last(run, rehearsals):
    gpus = _gpus("H200", "H100", "L4", H100=2.0, L4=0.01)
    small = _gpus("H100-NVL")[0].model_copy(update={"memory_gib": 1.0, "price_usd_per_hour": 0.001})
    found = cheapest_gpu(run(), gpus=(*gpus, small))
    assert [c.machine.gpu.name for c in found.choices] == ["L4", "H100", "H200", "H100-NVL"]
    assert [c.fit for c in found.choices] == ["fits"] * 3 + ["does not fit"]
    best = found.best
    assert best is not None
    assert best.usd_per_million == pytest.approx(0.01 / 3600 / best.tokens_per_s * 1e6)
    assert found.order == "the cheapest first"
    assert "$ a million" in _shown(found)
    assert json.loads(json.dumps(found.facts()))["choices"][0]["device"] == "L4"


def test_a_gpu_that_has_no_fp8_is_named_with_the_reason(run):
    config = run("tiny_full_fp8", "precision.emulation=forbid", "precision.on_unsupported=error")
    found = cheapest_gpu(config, gpus=_gpus("A100-80GB", "H100"))
    assert [c.machine.gpu.name for c in found.choices] == ["H100", "A100-80GB"]
    assert found.choices[1].fit == "does not fit"
    assert "compute capability 8.0" in found.choices[1].why
    assert "compute capability 8.0" in _shown(found)


@pytest.mark.slow
def test_the_fewest_gpus_come_from_two_rehearsals(run, rehearsals, monkeypatch):
    """Sharding, pretended: what is held divided by the number of GPUs."""
    asked = []

    def shared(config, machine):
        asked.append((machine.count, bool(config.train.get("fsdp"))))
        found = predict_fast(config, machine)
        phases = {p: {k: (v + 4 * GIB) // machine.count for k, v in kinds.items()}
                  for p, kinds in found.footprint.phases.items()}  # fmt: skip
        memory = dataclasses.replace(found.footprint, phases=phases, fragments=0)
        return dataclasses.replace(found, footprint=memory)

    monkeypatch.setattr(searching, "predict_fast", shared)
    found = fewest_gpus(run(), "4090")
    assert asked[0] == (1, False)
    assert asked[1:] == [(2**n, True) for n in range(1, len(asked))]
    assert len(rehearsals) == 2  # one GPU alone, and one of several whatever their number
    best = found.best
    assert best is not None
    assert best.machine.count == asked[-1][0] > 1
    assert best.change == (f"--gpus {best.machine.count}", *SHARDED)
    assert "train.fsdp=true" in _shown(found)  # else each GPU would have a copy of the model
    assert all(c.fit != "fits" for c in found.choices[1:])


def test_one_gpu_that_is_enough_needs_no_sharding(run, rehearsals):
    found = fewest_gpus(run(), "4090")
    assert [c.machine.count for c in found.choices] == [1]
    assert found.best is not None
    assert found.best.change == ()


def test_a_sharded_run_on_one_gpu_is_no_longer_sharded(run, rehearsals):
    """As training on one GPU refuses `train.fsdp`."""
    found = fewest_gpus(run("tiny_full_bf16", *SHARDED), "4090")
    assert found.best is not None
    assert found.best.change == ("~train.fsdp", "~train.fsdp_config")
    assert "~train.fsdp" in _shown(found)


@pytest.mark.slow
def test_what_cannot_be_sharded_says_why(run):
    config = run("tiny_lora_bf16", "model.storage=nf4")
    small = named_gpu("4090").model_copy(update={"memory_gib": 0.5})
    found = fewest_gpus(config, small)
    assert found.best is None
    assert "without the scales" in found.choices[0].why
    assert found.order == "none of these numbers fits"


def test_a_speed_is_that_of_all_gpus(run):
    machine = machine_of("H100", gpus=4)
    found = searching._largest("train.max_length", run(), machine, 64, 64, 64)
    assert found.prediction is not None
    assert found.prediction.tokens_per_s == pytest.approx(4 * found.prediction.timing.tokens_per_s)
    assert f" {count(found.prediction.tokens_per_s)} tokens/s" in _shown(found)


def test_many_gpus_are_taken_to_be_in_one_machine():
    few, many = (
        GpuChoices((GpuChoice((), machine_of("H100", gpus=n), None),), "") for n in (8, 16)
    )
    assert "one machine" not in _shown(few)
    assert "one machine" in _shown(many)


def _shown(found) -> str:
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(found)
    return console.export_text()


@pytest.mark.slow
def test_gpus_that_are_named_are_compared(cli):
    done = cli("estimate", "tiny_full_bf16", "--gpu", "4090,H100", "--json")
    choices = json.loads(done.out)["choices"]
    assert [one["device"] for one in choices] == ["H100", "RTX 4090"]
    assert choices[0]["tokens_per_s"] > choices[1]["tokens_per_s"]
