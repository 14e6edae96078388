"""Several GPUs: against real steps of two processes, and what must hold for any number."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from finetune.config.schema import RunConfig
from finetune.config.sft import FsdpSettings, fsdp_settings
from finetune.config.train_keys import TrainSection
from finetune.errors import ConfigError, FinetuneError
from finetune.estimator.estimate import estimate
from finetune.estimator.limits import limits
from finetune.estimator.memory.overheads import nccl_bytes
from finetune.estimator.memory.sharding import sharded_footprint
from finetune.estimator.predict import Prediction, predict_fast, predict_whole
from finetune.estimator.trace.rehearsal import rehearse
from finetune.hardware.device import this_device
from finetune.hardware.gpus import Machine, machine_of
from finetune.hardware.requirements import resolve
from tests.estimator.configs import changed
from tests.estimator.test_sharding import run_worker
from tests.sharding_worker import RECIPES, recipe_config


@pytest.fixture(scope="module")
def steps(made_once) -> dict[str, Any]:
    """What two processes held under TRL's trainer and FSDP2 (about 40 s)."""
    return made_once("FSDP2 under TRL", lambda folder: run_worker(folder, list(RECIPES)))


@pytest.mark.long
@pytest.mark.parametrize("case", RECIPES)
def test_two_processes_hold_what_is_estimated(steps, case: str, tmp_path: Path) -> None:
    config, device = recipe_config(case, tmp_path), this_device()
    resolution = resolve(config.precision, device)
    # Rows of the worker are all of one length.
    found = rehearse(config, device, resolution, sharded=True, padded=False)
    memory = sharded_footprint(found, config, Machine(device, None, 2))
    for name in ("sharded-0", "sharded-1"):
        # A few per cent would do; it is two thousandths, so a term that is missing is seen.
        assert memory.tensors == pytest.approx(steps[name][case]["peak"], rel=2e-3)


# ------------------------------------------------------------------- what holds for any number


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """Full fine-tuning of a small Llama, sharded."""
    return recipe_config("recipe-full", tmp_path_factory.mktemp("shape"))


@pytest.fixture(scope="module")
def sharded(config: RunConfig) -> dict[int, Prediction]:
    """The same on 2, 8 and very many H100."""
    return {count: predict_whole(config, gpus(count)) for count in (2, 8, 4096)}


def gpus(count: int) -> Machine:
    return machine_of("H100", gpus=count)


@pytest.mark.slow
def test_shards_are_parts_of_the_whole(config: RunConfig, sharded: dict[int, Prediction]) -> None:
    trainable = sharded[2].trainable
    for count in (2, 8):
        kinds = sharded[count].footprint.phases["optimizer"]
        for kind, each in {"weights": 4, "gradients": 4, "optimizer": 8}.items():
            # Buffers and a batch are on every GPU; FSDP2 holds what trains in float32.
            assert kinds[kind] == pytest.approx(each * trainable / count, abs=20_000)


@pytest.mark.slow
def test_more_gpus_never_need_more(sharded: dict[int, Prediction]) -> None:
    two, eight, many = (found.footprint for found in sharded.values())
    assert two.tensors > eight.tensors > many.tensors
    for phase in ("load", "optimizer"):
        assert sum(many.phases[phase].values()) < 0.01 * sum(two.phases[phase].values())
    # What is left is gathered weights, activations and gradients of one group, which no number of
    # GPUs divides.
    left = {
        kind: nbytes for kind, nbytes in many.kinds.items() if kind not in ("weights", "optimizer")
    }
    assert sum(left.values()) > 0.998 * many.tensors
    few, most = two.phases["forward"], many.phases["forward"]
    assert few["gathered"] == most["gathered"] > 0
    assert few["saved"] == most["saved"] > 0


@pytest.mark.slow
def test_copies_are_one_gpu_with_buckets(config: RunConfig) -> None:
    copies = changed(config, train={"fsdp": None, "fsdp_config": None})
    alone, two = predict_whole(copies, gpus(1)), predict_whole(copies, gpus(2))
    sent = 2 * alone.trainable
    assert two.footprint.tensors == alone.footprint.tensors + sent
    assert two.footprint.kinds["buckets"] == sent
    assert two.footprint.outside == alone.footprint.outside + nccl_bytes(2)
    assert two.timing is not None
    assert alone.timing is not None
    waits = {k: v for k, v in two.timing.classes.items() if k not in alone.timing.classes}
    assert list(waits) == ["communication"]
    assert two.timing.seconds == pytest.approx(alone.timing.seconds + waits["communication"])


@pytest.mark.slow
def test_one_gpu_shards_nothing(config: RunConfig) -> None:
    alone = changed(config, train={"fsdp": None, "fsdp_config": None})
    asked, not_asked = predict_whole(config, gpus(1)), predict_whole(alone, gpus(1))
    assert asked.footprint == not_asked.footprint
    assert any("train.fsdp needs several GPUs" in note for note in limits(asked))
    assert not any("fsdp" in note for note in limits(not_asked))


@pytest.mark.slow
def test_every_micro_batch_gathers(config: RunConfig, sharded: dict[int, Prediction]) -> None:
    four = predict_whole(changed(config, train={"gradient_accumulation_steps": 4}), gpus(2))
    once, often = (
        found.timing.classes["communication"] for found in (sharded[2], four) if found.timing
    )
    assert 2 * once < often < 4 * once  # gradients are sent once
    assert four.footprint.phases["forward"]["gradients"] == 4 * four.trainable  # whole, in FP32


@pytest.mark.long
@pytest.mark.parametrize("fsdp", [True, None])
def test_the_first_layers_say_what_all_of_them_take(config: RunConfig, fsdp) -> None:
    shape = json.loads((Path(config.model.name) / "config.json").read_text())
    deep = Path(config.model.name) / "deep"
    deep.mkdir(exist_ok=True)
    (deep / "config.json").write_text(json.dumps(shape | {"num_hidden_layers": 8}))
    asked = changed(config, model={"name": str(deep)}, train={"fsdp": fsdp})
    whole, fast = predict_whole(asked, gpus(4)), predict_fast(asked, gpus(4))
    assert fast.footprint.tensors == pytest.approx(whole.footprint.tensors, rel=5e-3)
    assert fast.footprint.outside == whole.footprint.outside
    assert whole.timing is not None
    assert fast.timing is not None
    assert fast.timing.seconds == pytest.approx(whole.timing.seconds, rel=1e-2)


@pytest.mark.slow
def test_words_and_json_tell_of_several(config: RunConfig) -> None:
    result = estimate(config, gpu="H100", gpus=8, changes=False)
    console = Console(width=160, no_color=True)
    with console.capture() as shown:
        console.print(result)
    words, facts = shown.get(), json.loads(result.to_json())
    assert "8 x H100" in words
    assert "gathered for a moment" in words
    assert "communication: each GPU sends" in words
    sent = facts["time"]["communication"]
    assert sent["waited"] == facts["time"]["parts"]["communication"]
    least, most = sent["waited_range"]
    assert least <= sent["waited"] <= most == sent["seconds"]
    assert facts["devices"] == 8
    assert facts["memory"]["phases"]["backward"]["gathered"] > 0
    assert facts["time"]["parts"]["communication"] > 0


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        (
            {"model": {"storage": "nf4"}, "lora": {"target_modules": "all-linear"}},
            "FSDP cannot shard",
        ),
    ],
)
def test_what_cannot_be_sharded_is_refused(config: RunConfig, sections, words) -> None:
    with pytest.raises(FinetuneError, match=words):
        predict_whole(changed(config, **sections), gpus(2))


@pytest.mark.parametrize(
    ("train", "freed", "offload"),
    [
        ({"fsdp": True}, True, False),
        ({"fsdp": True, "fsdp_config": {"fsdp_reshard_after_forward": False}}, False, False),
        ({"fsdp": True, "fsdp_config": {"reshard_after_forward": "no"}}, False, False),
        ({"fsdp": "shard_grad_op auto_wrap"}, False, False),
        ({"fsdp": "full_shard offload"}, True, True),
        ({"fsdp": ["shard_grad_op"], "fsdp_config": {"reshard_after_forward": True}}, True, False),
    ],
)
def test_sharding_is_read_as_transformers_reads_it(train, freed, offload) -> None:
    """Its older words in `fsdp` as well, and what `fsdp_config` says goes before them."""
    found = fsdp_settings(TrainSection(train))
    assert (found.reshard, found.offload) == (freed, offload)


def test_a_cpu_shards_nothing(config: RunConfig) -> None:
    with pytest.raises(ConfigError, match=r"train\.fsdp was requested on 2 x"):
        predict_whole(config, Machine(this_device(), None, 2))


def test_settings_of_fsdp(tmp_path: Path) -> None:
    assert fsdp_settings(TrainSection()) == FsdpSettings()
    given = {"fsdp_reshard_after_forward": False, "transformer_layer_cls_to_wrap": "A,B"}
    assert fsdp_settings(TrainSection({"fsdp_config": given})) == FsdpSettings(
        reshard=False, layers=("A", "B")
    )
    file = tmp_path / "fsdp.json"
    file.write_text(json.dumps({"version": 1, "cpu_offload": True}))
    assert fsdp_settings(TrainSection({"fsdp_config": str(file)})) == FsdpSettings(
        version=1, offload=True
    )
    with pytest.raises(ConfigError, match="cannot be read"):
        fsdp_settings(TrainSection({"fsdp_config": str(tmp_path / "nowhere.json")}))
