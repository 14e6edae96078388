"""Sharded memory against real steps of two processes, and by hand; communication by hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from finetune import load_recipe
from finetune.estimator.limits import limits
from finetune.estimator.memory.sharding import Fsdp2, Moment, Peak
from finetune.estimator.predict import predict
from finetune.estimator.speed.timing import Ring, copied_traffic, ring_of, sharded_traffic
from finetune.estimator.trace.fsdp_groups import Group, model_groups
from finetune.hardware.gpus import machine_of, named_gpu

ROOT = Path(__file__).parents[2]
CASES = ("full-4", "full-8", "full-sum-4", "tied-4", "lora-8", "lora-ckpt-4")


@pytest.fixture(scope="module")
def steps(made_once) -> dict[str, Any]:
    """What `sharding_worker` saw: alone, and on each of two processes (15 to 40 s)."""
    return made_once("FSDP2 by hand", lambda folder: run_worker(folder, CASES))


def run_worker(out: Path, cases: Sequence[str]) -> dict[str, Any]:
    """Run cases of `sharding_worker` on two processes: name of a file -> case -> what is in it."""
    environment = os.environ | {
        "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "WORLD_SIZE": "2",
        "MASTER_ADDR": "localhost", "MASTER_PORT": str(31500 + os.getpid() % 2000),
    }  # fmt: skip
    command = [sys.executable, "-m", "tests.sharding_worker", str(out), ",".join(cases)]
    runs = [
        subprocess.Popen(
            command, cwd=ROOT, env=environment | {"RANK": rank, "LOCAL_RANK": rank},
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )
        for rank in "01"
    ]  # fmt: skip
    said = [run.communicate(timeout=300)[1] for run in runs]
    for run, errors in zip(runs, said, strict=True):
        assert run.returncode == 0, errors[-3000:]
    names = ("alone", "sharded-0", "sharded-1")
    return {name: json.loads((out / f"{name}.json").read_text()) for name in names}


def highest(model: Fsdp2, moments: Sequence[Moment], **kwargs: Any) -> Peak:
    """The peak of a step of one GPU."""
    return max(model.find_peaks(moments, **kwargs), key=lambda peak: peak.total)


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_two_processes_hold_what_is_predicted(steps: dict[str, Any], case: str) -> None:
    alone = steps["alone"][case]
    kept = 0 if case.startswith("tied") else len(alone["groups"]) - 1
    groups = tuple(Group(*x, reshard=i != kept) for i, x in enumerate(alone["groups"]))
    model = Fsdp2(groups, gpus=2, reduce=4)
    trainable = sum(group.trainable for group in groups)
    peak = highest(
        model,
        [Moment(*m) for m in alone["moments"]],
        optimizer_bytes=8 * trainable,
        accumulates="-sum-" in case,
    )
    for name in ("sharded-0", "sharded-1"):
        real = steps[name][case]
        assert model.weight_bytes() + 4 * trainable == pytest.approx(real["held"], rel=1e-3)
        # A few per cent would do; it is a thousandth, so a term that is missing is seen.
        assert peak.total == pytest.approx(real["peak"], rel=1e-3)
    # It is less than a copy of everything on each, and more than half of it.
    whole = sum(group.frozen + group.trainable * 16 for group in groups)
    assert whole / 2 < peak.total < whole + max(m[2] for m in alone["moments"])


def test_forward_and_backward_of_three_layers_by_hand() -> None:
    # Weights of 10 a group in the dtype of computing, gradients as large, 20 in float32.
    model = Fsdp2((Group(trainable=5),) * 3, gpus=5)
    assert model.weight_bytes() == 12
    assert model.gathered_bytes(2) == 10

    def total(*moments: tuple[Any, ...]) -> int:
        return highest(model, [Moment(*m) for m in moments]).total

    # Entering: gathered and copied out.
    assert total(("forward", 0, 100)) == 12 + 20 + 100
    forward = [("forward", i, 0) for i in range(3)]
    assert total(*forward) == 12 + 20
    # Backward leaves the last: the one before is gathered, its gradients are there, and a copy to
    # send.
    assert total(*forward, ("backward", 2, 50, 10)) == 12 + 10 + 10 + 10 + 50
    # In the middle of the next: itself, the one before, what is being sent, and 7 of gradients; the
    # shards of the gradients of the last.
    steps = [("backward", 2, 0, 10), ("backward", 1, 0, 0), ("backward", 1, 50, 7)]
    assert total(*forward, *steps) == (12 + 4) + (10 + 10 + 10 + 7) + 50


def test_a_head_that_a_loss_gathers_is_one_tensor_beside_the_last_buffer() -> None:
    layer, head = Group(frozen=10), Group(frozen=40, reshard=False)
    forward = [Moment("forward", 0, 0), Moment("forward", 1, 0)]
    assert highest(Fsdp2((layer, head), gpus=5), forward).total == 10 + 2 * 40
    taken = replace(head, called=False)
    assert highest(Fsdp2((layer, taken), gpus=5), forward).total == 10 + 10 + 40


def test_optimizer_divides_its_temporaries() -> None:
    model = Fsdp2((Group(frozen=40, trainable=10),), gpus=4)
    steps = [Moment("backward", 0, 0, 20), Moment("optimizer", 0, 4000)]
    peaks = model.find_peaks([Moment("forward", 0, 0), *steps], optimizer_bytes=80)
    assert peaks[-1] == Peak(shards=10 + 10 + 20 + 10, gathered=0, whole=0, other=1000)


def test_frozen_groups_send_nothing() -> None:
    frozen = Fsdp2((Group(frozen=10),) * 2, gpus=5)
    steps = [Moment("forward", 0, 0), Moment("forward", 1, 0), Moment("backward", 1, 0)]
    assert highest(frozen, steps).total == 4 + 20


@pytest.mark.parametrize("tied", [False, True])
def test_groups_are_those_of_accelerate(tied: bool) -> None:
    """Embedding, layers, norm with head; tied, the head's weight is in the embedding's group."""
    shape = LlamaConfig(vocab_size=100, hidden_size=8, intermediate_size=16, num_hidden_layers=2,
                        num_attention_heads=2, tie_word_embeddings=tied)  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(shape)
    model.lm_head.weight.requires_grad_(tied)
    found = model_groups(model)
    vocabulary, layer = 100 * 8, 4 * 8 * 8 + 3 * 8 * 16 + 2 * 8
    middle = [Group(0, layer, stored=0)] * 2
    kept = vocabulary + 8 if tied else 8
    last = Group(
        0 if tied else 4 * vocabulary, kept, reshard=False, stored=0 if tied else 4 * vocabulary
    )
    expected = [last, *middle] if tied else [Group(0, vocabulary, stored=0), *middle, last]
    assert list(found.groups) == expected
    assert found.modules["model.norm"] == found.modules["lm_head"] == (0 if tied else 3)
    assert found.trainable_bytes == 4 * sum(group.trainable for group in found.groups)


def test_a_ring_sends_all_parts_but_one() -> None:
    assert Ring(2, 1).seconds(4_000_000_000) == pytest.approx(2 + 30e-6)
    assert Ring(8, 70).seconds(8_000_000_000, collectives=10) == pytest.approx(0.1 + 300e-6)
    assert Ring(2, 1).seconds(0) == Ring(1, 1).seconds(10**9, 0) == 0
    nvlink, pcie = (ring_of(named_gpu(name), 8) for name in ("H100", "4090"))
    assert nvlink.gb_s > 40 * pcie.gb_s


@pytest.mark.parametrize("reshard", [True, False])
def test_what_fsdp2_sends(reshard: bool) -> None:
    """4 groups of 1 GB on two GPUs at 1 GB/s, gathered twice or once, and reduced once."""
    model = Fsdp2((Group(trainable=500_000_000, reshard=reshard),) * 4, gpus=2)
    sent = sharded_traffic(model, Ring(2, 1), (0.0, 0.0))
    gathers = 4 if reshard else 2
    assert sent.added == pytest.approx(gathers + 2, rel=1e-3)  # nothing hides it
    three = sharded_traffic(model, Ring(2, 1), (0.0, 0.0), 3)
    assert three.added == pytest.approx(3 * gathers + 2, rel=1e-3)
    assert three.nbytes == (3 * gathers + 2) * 10**9
    assert three.seconds == pytest.approx(three.nbytes / 1e9, rel=1e-3)


def test_half_of_what_is_hidden_shows() -> None:
    sent = copied_traffic(2**30, Ring(2, 1), (5.0, 0.0))
    assert sent.added == pytest.approx(2**30 / 1e9, rel=1e-2)  # forward hides no gradients
    assert sent._replace(computed_backward=10.0).added == pytest.approx(sent.added / 2)
    assert sent.nbytes == 2**30
    assert copied_traffic(0, Ring(2, 1), (1.0, 1.0)).added == 0


def test_sharded_masters_take_no_host_memory() -> None:
    """Under FSDP2 GPUs have them, and what is gathered is predicted as BF16, which is said."""
    tiny = ("tiny_full_24gb_fp8", ["train.fsdp=full_shard", "train.gradient_checkpointing=false"])
    with_codes, without = (
        predict(load_recipe(tiny[0], [*tiny[1], *more]).config, machine_of("H100", gpus=2))
        for more in ((), ("precision.fp8_params=false",))
    )
    assert with_codes.footprint.pinned == 0
    assert with_codes.footprint.allocated == without.footprint.allocated
    assert any("gathered in BF16" in line for line in limits(with_codes))
    assert not any("gathered in BF16" in line for line in limits(without))
