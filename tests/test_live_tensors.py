"""Counting live tensors: each storage once, for as long as it lives, and as torch's own counts."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker

from finetune.live_tensors import LiveTensors


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
        live.reset_peak()
        known.add_(1)
        assert live.peak == live.bytes == 400


def test_what_is_saved_for_backward_lives_until_backward():
    x = torch.randn(64, 32, requires_grad=True)
    with LiveTensors([x]) as live:
        y = x.exp().sum()
        assert live.bytes == 2 * x.nbytes + 4
        y.backward()
        del y
        assert live.bytes == 2 * x.nbytes  # x and its gradient
        x.grad = None
        assert live.bytes == x.nbytes


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
