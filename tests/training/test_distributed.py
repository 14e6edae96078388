"""Two processes over gloo: DDP and FSDP2 train in FP8, and `reduce_amax` keeps scales together."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from transformers import TrainerControl

from finetune.errors import PrecisionError, ProofError
from finetune.precision.proof.row import LayerReceipt
from finetune.precision.settings import PrecisionConfig
from finetune.runs.receipt import Receipt
from finetune.training.helper.evidence import refuse_disagreement
from finetune.training.helper.patches import gathered_type
from finetune.training.run.interrupt import GracefulStop
from tests.te.fetch import is_here

ROOT = Path(__file__).parents[2]


def launch(
    out: Path, modes: str, module: str = "tests.distributed_worker", processes: int = 2
) -> dict[str, list]:
    """Mode -> what each process wrote, of a worker that runs modes one after the other."""
    port = 29500 + os.getpid() % 2000
    command = [
        sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={processes}",
        f"--master_port={port}", "-m", module, str(out), modes,
    ]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return {
        mode: [json.loads((out / mode / f"{rank}.json").read_text()) for rank in range(processes)]
        for mode in modes.split(",")
    }


@pytest.fixture(scope="module")
def facts(tmp_path_factory):
    """Mode -> what both processes wrote. One launch: it takes ten times as long as a mode."""
    modes = (
        "ddp,fsdp,experts,local,frozen,frozen_fsdp,frozen_experts,frozen_ram,frozen_ram_experts,"
        "frozen_head,frozen_head_fsdp,sharded_tensorwise,sharded_tensorwise_codes,sharded_rowwise,"
        "sharded_rowwise_codes"
    )
    return launch(tmp_path_factory.mktemp("two"), modes)


@pytest.mark.long
@pytest.mark.parametrize("mode", ["ddp", "fsdp", "experts"])
def test_two_processes_train_in_fp8_with_the_same_scales(mode, facts) -> None:
    first, second = facts[mode]
    names = ("gate_up_proj", "down_proj") if mode == "experts" else ()
    for one in (first, second):
        t = one["trainable"]
        assert one["status"] == "proven"
        assert one["processes"] == 2
        assert one["share"] > 0.5
        assert t["before"] == t["after"] == t["in_optimizer"] == t["moved"] > 0
        changed, numbers = one["changed"]  # of shards, estimates for the whole
        assert t["before"] / 2 < changed <= numbers == t["before"]
        assert (one["sharded"] > 0) == (mode != "ddp"), "parameters are DTensors under FSDP2"
        assert one["experts"] == {name: ["fp8"] * 3 for name in names}
    assert len(first["scale"]) >= 3, "x, w and g of some layers"
    assert first["scale"] == second["scale"], "reduce_amax keeps scales identical"
    assert first["history"] == second["history"]


@pytest.mark.long
@pytest.mark.parametrize("mode", ["fsdp", "frozen_head_fsdp"])
def test_losses_over_fsdp2_have_more_than_the_digits_of_bf16(mode, facts) -> None:
    """From 4 to 8 BF16 has steps of 1/32, and the mean of two processes steps of 1/64."""
    losses = facts[mode][0]["loss"]
    assert len(losses) == 3
    assert all(4 < loss < 8 and (64 * loss) % 1 for loss in losses)


@pytest.mark.long
def test_a_base_held_in_fp8_is_sharded_as_codes(facts) -> None:
    """FSDP2 gathers bytes, whatever its mixed precision is, and trains as DDP does."""
    one, sharded, first = (facts[mode] for mode in ("frozen", "frozen_fsdp", "frozen_ram"))
    for seen in (*one, *sharded, *first):
        assert seen["status"] == "proven"
        assert {"fp8fp8"} <= set(seen["base"]) <= {"fp8fp8", "fp8none"}
        assert seen["codes"] == ["torch.uint8"] * 14
    for seen in (*sharded, *first):
        assert seen["local"] == [0.5] * 14
    losses = [mode[0]["loss"] for mode in (one, sharded, first)]
    assert len(losses[0]) > 1
    assert losses[1] == pytest.approx(losses[0], rel=2e-3)
    assert losses[2] == losses[1], "with the weights of the first process alone"


@pytest.mark.long
def test_a_head_held_in_fp8_is_sharded_as_codes_and_multiplied_in_the_loss(facts) -> None:
    one, sharded = facts["frozen_head"], facts["frozen_head_fsdp"]
    for seen in (*one, *sharded):
        assert seen["status"] == "proven"
        assert seen["head"] == ["fp8fp8"]
        assert seen["codes"] == ["torch.uint8"] * 15
    assert [seen["local"] for seen in sharded] == [[0.5] * 15] * 2
    losses = [mode[0]["loss"] for mode in (one, sharded)]
    assert len(losses[0]) > 1
    assert losses[1] == pytest.approx(losses[0], rel=2e-3)


@pytest.mark.long
def test_experts_held_in_fp8_are_sharded_as_codes(facts) -> None:
    sharded, first = facts["frozen_experts"], facts["frozen_ram_experts"]
    assert first[0]["loss"] == sharded[0]["loss"], "with the weights of the first process alone"
    for seen in (*sharded, *first):
        assert seen["status"] == "proven"
        assert seen["stacks"] == ["torch.uint8"] * 4
        assert seen["stacks_local"] == [0.5] * 4
        for name in ("gate_up_proj", "down_proj"):
            assert seen["experts"][name] == ["fp8", "fp8", "none"]


@pytest.mark.long
@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
def test_weights_that_train_are_gathered_as_codes_in_half_of_the_bytes(scaling, facts) -> None:
    """With one scale for the tensor losses and weights are equal to the bit, in both processes."""
    plain, codes = (facts[f"sharded_{scaling}{more}"] for more in ("", "_codes"))
    for one, other in zip(plain, codes, strict=True):
        assert other["status"] == "proven"
        assert other["share"] == one["share"]
        assert other["trainable"] == one["trainable"]
        assert other["sharded"] == one["sharded"] > 0
        assert len(other["loss"]) == 3
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-3)
        if scaling == "tensorwise":
            assert (other["loss"], other["weights"]) == (one["loss"], one["weights"])
        before = one["gathered"]["torch.bfloat16"] - other["gathered"]["torch.bfloat16"]
        assert before > 0
        assert other["gathered"]["torch.uint8"] / before == pytest.approx(0.5, abs=0.01)


def test_several_processes_with_masters_in_host_memory_are_refused() -> None:
    """Each would have a copy of them; FSDP2, which shards them, gathers in the type of compute."""
    precision = PrecisionConfig(compute="fp8", fp8_params=True)
    replicated = SimpleNamespace(distributed_type="DistributedType.MULTI_GPU", num_processes=2)
    with pytest.raises(PrecisionError, match="2 processes would each have a copy"):
        gathered_type(replicated, precision)
    alone = SimpleNamespace(distributed_type="DistributedType.NO", num_processes=1)
    assert gathered_type(alone, precision) is None
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    plugin = SimpleNamespace(mixed_precision_policy=policy, cpu_offload=OffloadPolicy())
    sharded = SimpleNamespace(
        distributed_type="DistributedType.FSDP", state=SimpleNamespace(fsdp_plugin=plugin)
    )
    assert gathered_type(sharded, precision) is torch.bfloat16
    plugin.cpu_offload = CPUOffloadPolicy()
    with pytest.raises(PrecisionError, match="keep shards in host memory"):
        gathered_type(sharded, precision)


@pytest.mark.long
def test_without_reduce_amax_scales_differ(facts) -> None:
    first, second = facts["local"]
    assert first["status"] == second["status"] == "proven"
    x, w, g = (
        [a == b for a, b in zip(first["scale"][i::3], second["scale"][i::3], strict=True)]
        for i in range(3)
    )
    assert w, "scales are delayed"
    assert all(w), "weights are the same in both"
    assert not all(x), "each process saw other tokens"
    assert not all(g)


# ------------------------------------------------------------------------------ Transformer Engine

KINDS, SCALINGS = ("ddp", "fsdp"), ("delayed", "tensorwise")


@pytest.fixture(scope="module")
def of_te(tmp_path_factory):
    """Mode of `te_worker` -> what one process wrote, and each of two."""
    both = [f"{kind}-{scaling}" for kind in KINDS for scaling in SCALINGS]
    alone = [*both, *(f"layer-{each}" for each in ("delayed", "local", "tensorwise"))]
    more = [*alone, *(f"{mode}-compiled" for mode in both), "ddp-delayed-local"]
    return [
        launch(tmp_path_factory.mktemp("te"), ",".join(modes), "tests.te_worker", processes)
        for processes, modes in ((1, both), (2, more))
    ]


@pytest.mark.long
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_under_te_have_the_bits_of_one_that_computes_both_halves(
    kind, scaling, of_te
) -> None:
    """Losses and weights of four steps, and under delayed scaling every scale and history."""
    (one,), two = (found[f"{kind}-{scaling}"] for found in of_te)
    halves = zip(*(each["losses"] for each in two), strict=True)
    assert [first + second for first, second in halves] == one["losses"]
    for each in two:
        assert each["status"] == "proven"
        assert (each["sharded"] > 0) == (kind == "fsdp")
        assert each["weights"] == one["weights"]
        assert each["states"] == one["states"]
        assert bool(each["states"]) == (scaling == "delayed")


@pytest.mark.long
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_layers_under_te_have_the_same_bits_in_two_processes(kind, scaling, of_te) -> None:
    plain, compiled = (of_te[1][f"{kind}-{scaling}{more}"] for more in ("", "-compiled"))
    assert all(re.fullmatch("graphs: [1-9]", each.pop("graphs")) for each in compiled)
    assert compiled == [{key: each[key] for key in compiled[0]} for each in plain]


@pytest.mark.long
def test_without_reduce_amax_te_keeps_scales_of_each_process(of_te) -> None:
    first, second = (each["states"] for each in of_te[1]["ddp-delayed-local"])
    alike = {name: first[name] == second[name] for name in first}
    assert not any(value for name, value in alike.items() if "bwd" in name)
    scales = [(first[name], second[name]) for name in first if name.endswith("fwd.scale")]
    assert not any(a[0] == b[0] for a, b in scales), "each process saw other tokens"
    assert all(a[1] == b[1] for a, b in scales), "weights are the same in both"


@pytest.mark.long
@pytest.mark.skipif(not is_here(), reason="needs Transformer Engine's wheel")
@pytest.mark.parametrize("mode", ["delayed", "local", "tensorwise"])
def test_amaxes_are_reduced_as_by_the_engines_own_layer(mode, of_te) -> None:
    """Of `te.Linear` under DDP: outputs, gradients, and scales and histories at the end."""
    both = of_te[1][f"layer-{mode}"]
    for each in both:
        assert each["ours"] == each["theirs"]
    states = [each["ours"][4:] for each in both]
    assert len(states[0]) == (0 if mode == "tensorwise" else 4)
    assert (states[0] == states[1]) == (mode != "local")


# -------------------------------------------------------------------- processes that have to agree


@pytest.fixture
def two(monkeypatch):
    """A function that makes this process one of two, and sets what the other one has."""
    import torch.distributed as dist

    def with_other(value) -> None:
        def reduce(tensor, op):
            assert op == dist.ReduceOp.MAX
            tensor.clamp_(min=float(value))

        monkeypatch.setattr(dist, "is_initialized", lambda: True)
        monkeypatch.setattr(dist, "get_world_size", lambda: 2)
        monkeypatch.setattr(dist, "all_reduce", reduce)
        monkeypatch.setattr("accelerate.utils.gather_object", lambda own: [own[0], own[0] | value])

    return with_other


@pytest.mark.parametrize("other", [0, 10])
def test_a_signal_of_one_process_stops_both_after_the_same_step(other, two) -> None:
    two(other)
    stop = GracefulStop(Console(quiet=True))
    control = TrainerControl()
    stop.on_step_end(SimpleNamespace(device="cpu"), None, control)
    assert stop.asked == control.should_save == control.should_training_stop == bool(other)
    assert stop.number == (other or 2)


def test_receipts_that_differ_between_processes_stop_the_run(two) -> None:
    one = LayerReceipt("expert", (8, 8), "base", "fp8", "fp8", "none", {}, 1, "")
    receipt = Receipt("proven", {"ran": "fp8"}, layers=[one])
    # Of an expert: the tokens of one process were not sent to it, or frozen weights have no wgrad.
    unlike = [{"expert.fprop": "none", "expert.dgrad": "none"}, {"expert.wgrad": "fp8"}]
    # Nor of a tower, which read images of the other process alone.
    for alike in ({}, *unlike, {"(other).fprop": "bf16"}):
        two(alike)
        refuse_disagreement(receipt)
    for other in ({"precision": "bf16"}, {"expert.dgrad": "bf16"}, {"another.fprop": "fp8"}):
        two(other)
        with pytest.raises(ProofError, match=r"process 1 did not run what process 0 ran"):
            refuse_disagreement(receipt)


@pytest.mark.long
def test_reduce_amax_takes_the_largest_of_all_processes(tmp_path) -> None:
    """With it scales are identical, those of the process that saw most; without they differ."""
    both = launch(tmp_path, "delayed", "tests.amax_worker")["delayed"]
    for pow2 in (True, False):
        (alone, largest), (first, second) = (
            [facts[f"{reduce}/{pow2}"] for facts in both] for reduce in (False, True)
        )
        assert first == second == largest
        assert alone["w"] == largest["w"]
        for operand in ("x", "g"):
            ratios = [a / b for a, b in zip(alone[operand], largest[operand], strict=True)]
            assert ratios == [1.0, *[pytest.approx(4.0, rel=1e-6)] * 3], "1 before anything is seen"
        everything = [scale for seen in (*first.values(), *alone.values()) for scale in seen]
        assert all(math.frexp(scale)[0] == 0.5 for scale in everything) == pow2
