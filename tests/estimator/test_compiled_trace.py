"""Compiled layers in a trace: what backward keeps, what it computes again, and what torch keeps."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from finetune.estimator.speed.fusion import launches
from finetune.estimator.trace import compiled
from finetune.estimator.trace.compiled import compiled_trace
from finetune.estimator.trace.fake_cuda import to_fake, without_memory
from finetune.estimator.trace.trace import Recorder, Trace, layer_of
from tests.benchmarks import compiled_layer, inductor_code

B, K, N = 4, 8, 16
WORD = 4
"""Bytes of a float32."""


class Gated(nn.Module):
    """A residual gated layer, of which no weight trains."""

    def __init__(self, *, checkpointing: bool) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.gate, self.up = nn.Linear(K, N, bias=False), nn.Linear(K, N, bias=False)
        self.down = nn.Linear(N, K, bias=False)
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.run, x, use_reentrant=False) if self.checkpointing else self.run(x)

    def run(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


class Net(nn.Module):
    """Two layers behind an embedding that trains."""

    def __init__(self, *, checkpointing: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, K)
        self.layers = nn.ModuleList(Gated(checkpointing=checkpointing) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return x.sum()


def record(*, checkpointing: bool = False) -> Trace:
    """Trace of a step, marked as a rehearsal marks it."""
    with torch.device("meta"):
        net = Net(checkpointing=checkpointing)
    with without_memory():
        to_fake(net)
        ids = torch.zeros(1, B, dtype=torch.int64)
        recorder = Recorder(net, [ids])
        with recorder:
            recorder.mark("step")
            loss = net(ids)
            recorder.mark("backward")
            with recorder.during("backward"):
                loss.backward()
            recorder.mark("optimizer")
            recorder.sort_gradients()
    return recorder.trace


def alive(trace: Trace) -> int:
    """Bytes alive between forward and backward, besides the weights."""
    numbers = trace.alive(trace.marks["backward"] - 1) - trace.initial.keys()
    return sum(trace.storages[number].nbytes for number in numbers)


def test_what_can_be_computed_again_is_not_saved() -> None:
    """silu(gate) is a GEMM's result away from what is saved; gate and up are results of GEMMs."""
    before = record()
    after, _ = compiled_trace(before)
    assert alive(before) - alive(after) == 2 * B * N * WORD
    assert sum(op.name == "aten.silu.default" for op in after.since("backward")) == 2
    assert sum(op.name == "aten.silu.default" for op in before.since("backward")) == 0


def test_every_storage_is_allocated_once_and_freed_after_its_last_reader() -> None:
    for checkpointing in (False, True):
        trace, moved = compiled_trace(record(checkpointing=checkpointing))
        living: set[int] = set(trace.initial)
        last = {x.storage: i for i, op in enumerate(trace.ops) for x in op.inputs}
        places = [event.at for event in trace.events]
        assert places == sorted(places)
        for event in trace.events:
            if event.nbytes > 0:
                assert event.storage not in living
                living.add(event.storage)
            elif event.nbytes:  # none: the empty tensors of a checkpoint under torch 2.10, 2.11
                living.remove(event.storage)
                assert event.at > last.get(event.storage, -1)
        assert moved(0) == 0
        assert set(trace.marks) == {"step", "backward", "optimizer"}


def test_a_compiled_layer_computes_again_what_backward_needs() -> None:
    """Of two products up and one down, and the residual sum, the last two are read by none."""
    after, _ = compiled_trace(record(checkpointing=True))
    seen = {
        phase: Counter(o.name for o in after.ops if o.phase == phase and layer_of(o.module))
        for phase in ("forward", "recompute")
    }
    assert seen["forward"]["aten.mm.default"] == 6
    assert seen["recompute"]["aten.mm.default"] == 4
    assert seen["recompute"]["aten.add.Tensor"] == 0


def test_a_checkpoint_around_the_graph_computes_all_of_it_again(monkeypatch) -> None:
    """As before torch 2.13: the layer's output, too, and nothing more lives between the two."""
    inside, _ = compiled_trace(record(checkpointing=True))
    monkeypatch.setattr(compiled, "torch_of_gpus", lambda: (2, 11, 0))
    around, _ = compiled_trace(record(checkpointing=True))
    again = Counter(op.name for op in around.ops if op.phase == "recompute")
    assert again["aten.mm.default"] == 6
    assert again["aten.add.Tensor"] == 2
    assert alive(around) == alive(inside) < alive(compiled_trace(record())[0])


def test_layers_do_not_share_kernels() -> None:
    """The sum that ends a layer is written for the next one, another graph, to read."""
    trace, _ = compiled_trace(record())
    ops = trace.since("step")
    for launch in launches(ops, lambda op: layer_of(op.module)):
        assert len({layer_of(ops[index].module) for index in launch.ops}) == 1


# -------------------------------------------------------------------------- beside torch's compiler


@pytest.fixture(scope="module")
def counted() -> dict[str, dict]:
    """Counts of `tests.benchmarks.compiled_layer`, in a process of its own for its patches."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.benchmarks.compiled_layer", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.long
@pytest.mark.parametrize("layer", compiled_layer.LAYERS)
def test_a_layer_saves_what_torch_saves(counted, layer) -> None:
    """Bytes that AOTAutograd's own partition of an 8B layer keeps at 8,192 tokens."""
    found = counted[layer]
    assert found["model"]["saved"] == pytest.approx(found["saved"], rel=0.01)


PINNED: dict[str, dict[str, Any]] = {
    "BF16 LoRA": {"saved": 1077, "kernels": (20, 5), "gemms": (21, 35), "moved": (1.48, 2.15)},
    "FP8 LoRA": {
        "saved": 708, "kernels": (21, 19), "fp8_gemms": (7, 7), "gemms": (14, 28),
        "code_stores": (4, 5), "transposes": (0, 7), "moved": (1.77, 3.53),
    },
    "BF16 full": {"saved": 1075, "kernels": (6, 6), "gemms": (7, 14), "moved": (1.48, 2.64)},
    "FP8 full": {
        "saved": 706, "kernels": (28, 25), "fp8_gemms": (7, 14), "code_stores": (3, 8),
        "moved": (2.32, 4.05),
    },
    "FP8 full, float32 scales": {
        "saved": 706, "kernels": (36, 29), "fp8_gemms": (7, 14), "code_stores": (9, 9),
        "moved": (3.23, 4.84),
    },
    "FP8 full, rowwise": {
        "saved": 706, "kernels": (14, 61), "fp8_gemms": (7, 14), "code_stores": (9, 19),
        "moved": (2.05, 8.56),
    },
    "BF16 full, checkpointed": {
        "saved": 0, "kernels": (6, 10), "gemms": (7, 20), "moved": (1.48, 3.38),
    },
    "FP8 full, checkpointed": {
        "saved": 0, "kernels": (28, 51), "fp8_gemms": (7, 20), "code_stores": (3, 14),
        "moved": (2.32, 6.13),
    },
    "BF16 LoRA, rank 32": {
        "saved": 1084, "kernels": (20, 5), "gemms": (21, 35), "moved": (1.50, 2.15),
    },
    "FP8 LoRA, rank 32": {
        "saved": 715, "kernels": (21, 19), "fp8_gemms": (7, 7), "gemms": (14, 28),
        "code_stores": (4, 5), "transposes": (0, 7), "moved": (1.78, 3.54),
    },
    "BF16 LoRA, checkpointed": {
        "saved": 0, "kernels": (20, 23), "gemms": (21, 54), "moved": (1.48, 2.89),
    },
    "FP8 LoRA, checkpointed": {
        "saved": 0, "kernels": (21, 37), "fp8_gemms": (7, 13), "gemms": (14, 41),
        "code_stores": (4, 8), "transposes": (0, 7), "moved": (1.77, 4.37),
    },
}  # fmt: skip
"""Upper bounds of what a compiled layer saves (MB), launches and moves (GB), and exact products."""


@pytest.mark.long
@pytest.mark.skipif(find_spec("triton") is None, reason="Inductor writes no GPU code without it")
@pytest.mark.parametrize("layer", PINNED)
def test_a_compiled_layer_launches_and_moves_no_more_than_before(counted, layer) -> None:
    """Counts in the code that Inductor writes for an H100, forward and backward."""
    found, pinned = counted[layer], dict(PINNED[layer])
    phases = [found[name] for name in ("forward", "backward")]
    assert found["saved"] / 1e6 <= pinned.pop("saved") * 1.01
    for phase, most in zip(phases, pinned.pop("moved"), strict=True):
        assert phase["bytes"] / 1e9 <= most * 1.01
    for phase, most in zip(phases, pinned.pop("kernels"), strict=True):
        assert phase["kernels"] <= most
    for key in ("fp8_gemms", "gemms", "code_stores", "transposes"):
        assert tuple(phase[key] for phase in phases) == pinned.get(key, (0, 0)), key


CODE = """
triton_poi_0 = async_compile.triton('triton_poi_0', '''
    triton_meta={{'signature': {{'in_ptr0': '*bf16', 'out_ptr0': '*fp32', 'xnumel': 'i32'}}}}
''')
def call(args):
    {check}
    triton_poi_0.run(a_1, b_1, 12, stream=stream0)
"""


@pytest.mark.parametrize(
    "check",
    [
        "assert_size_stride(a_1, (3, 4), (4, 1))\n    assert_size_stride(b_1, (12, ), (1, ))",
        "assert_size_stride_grouped((a_1, b_1), ((3, 4), (12, )), ((4, 1), (1, )), 'input')",
    ],
    ids=["torch 2.11 to 2.14", "torch 2.15"],
)
def test_bytes_are_counted_in_the_code_of_each_torch(check) -> None:
    found = inductor_code.count(CODE.format(check=check))
    assert (found["launches"], found["bytes"]) == (1, 12 * 2 + 12 * 4)


PREDICTED = {
    "BF16 LoRA": (1.00, 1.00),
    "FP8 LoRA": (1.00, 0.98),
    "BF16 full": (1.00, 1.02),
    "FP8 full": (1.04, 1.04),
    "FP8 full, float32 scales": (1.03, 1.10),
    "FP8 full, rowwise": (1.29, 0.88),
    "BF16 full, checkpointed": (1.00, 1.01),
    "FP8 full, checkpointed": (1.04, 0.94),
    "BF16 LoRA, rank 32": (1.00, 1.00),
    "FP8 LoRA, rank 32": (1.00, 0.98),
    "BF16 LoRA, checkpointed": (1.00, 1.00),
    "FP8 LoRA, checkpointed": (1.00, 1.02),
}
"""Bytes by the estimator / bytes of Inductor's kernels, forward and backward."""


@pytest.mark.long
@pytest.mark.skipif(find_spec("triton") is None, reason="Inductor writes no GPU code without it")
@pytest.mark.parametrize("layer", PINNED)
def test_predicted_traffic_is_close_to_inductors(counted, layer) -> None:
    """By row, so that an error that grows, or another sign of it, is seen."""
    found = counted[layer]
    for phase, ratio in zip(("forward", "backward"), PREDICTED[layer], strict=True):
        assert found["model"][phase] / found[phase]["bytes"] == pytest.approx(ratio, abs=0.012)
