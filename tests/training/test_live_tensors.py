"""Counting live tensors: each storage once, for as long as it lives, and as torch's own counts."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker

from finetune.estimator.trace.trace import plain_tensors
from finetune.training.health.memory_meter import LiveTensors


def test_a_storage_counts_once_and_until_it_dies():
    known = torch.zeros(100)
    with LiveTensors([known, known[:10]]) as live:
        assert live.bytes == 400
        a = torch.ones(50)
        b = a.view(5, 10).t()[1:]
        assert live.bytes == 600
        del a
        assert live.bytes == 600  # the view holds it
        del b
        assert live.bytes == 400
        assert live.peak == 600
        live.peak = live.bytes
        known.add_(1)
        assert live.peak == live.bytes == 400


def test_the_peak_of_a_step_is_that_of_torchs_own_tracker():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.LayerNorm(64))
    peaks = []
    x = torch.randn(128, 64)
    for tracker in ("ours", "torch"):
        net = copy.deepcopy(model)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, foreach=False)

        def step(net=net, optimizer=optimizer):
            net(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        if tracker == "ours":
            with LiveTensors([x, *net.parameters()]) as live:
                step()
            peaks.append(live.peak)
        else:
            other = MemTracker()
            other.track_external(net, optimizer, x)
            with other:
                step()
            snapshot = other.get_tracker_snapshot("peak")
            peaks.append(snapshot[torch.device("cpu")]["Total"])
    assert peaks[0] == peaks[1]
    assert peaks[0] > 4 * 33_000 * 2


def test_an_operand_that_was_not_told_of_was_there_from_the_beginning():
    a, b = torch.ones(100), torch.ones(1000)
    with LiveTensors([a]) as reported:
        c = b + 1
        del c
    assert (reported.bytes, reported.peak) == (400, 4400)
    with LiveTensors([a], thorough=True) as live:
        c = a.expand(50, 100) * 2
        del c
        assert live.peak == 20400
        b.view(10, 100)[0].add_(1)
        assert (live.bytes, live.peak) == (4400, 24400)  # b was there when c was
        del b
        assert (live.bytes, live.peak) == (400, 24400)


def test_inside_of_a_wrapper_is_counted_when_thorough():
    from torchao.optim.subclass_8bit import OptimState8bit

    state = OptimState8bit.zeros((64, 256), signed=True, block_size=256)
    held = state.codes.nbytes + state.scale.nbytes + state.qmap.nbytes

    def step(live: LiveTensors) -> int:
        with live:
            return state.lerp(torch.ones(64, 256), 0.5).nbytes

    plain, thorough = LiveTensors([state]), LiveTensors([state], thorough=True)
    assert plain.bytes == thorough.bytes == held
    step(plain)
    step(thorough)
    assert plain.bytes == thorough.bytes == held
    values = 64 * 256 * 4
    assert plain.peak == held + 2 * values  # ones and the result
    assert thorough.peak == plain.peak + values  # what was looked up is there meanwhile


def test_what_has_no_memory_of_its_own_counts_nothing():
    live = LiveTensors([torch.empty(10, device="meta"), torch.ones(3, 3).to_sparse()])
    assert live.bytes == 0


def test_a_sharded_tensor_counts_its_shard() -> None:
    """Its mesh, which it names among its parts, is no tensor."""
    import torch.distributed as dist
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        sharded = distribute_tensor(torch.ones(8), mesh, [Shard(0)])
        assert LiveTensors([sharded]).bytes == 32
        assert [part.numel() for part in plain_tensors(sharded)] == [8]
    finally:
        dist.destroy_process_group()
