"""The fullest moment of each phase, of what it consists, and who holds the most."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune.estimator.memory.footprint import Footprint, extrapolated, on_gpu, tensor_footprint
from finetune.estimator.trace.trace import KINDS, Event, Kind, Storage, Trace

F32 = torch.float32


def trace_of(
    steps: list[tuple[int, int, Kind, str]], held: int, marks: tuple[int, int, int]
) -> Trace:
    """A trace whose events are (storage, bytes, kind, module); storage 0 is held."""
    trace = Trace(initial={0: held}, storages={0: Storage(held, "load", "", F32, kind="weights")})
    for storage, nbytes, kind, module in steps:
        trace.events.append(Event(storage, nbytes, 0))
        if nbytes > 0:
            trace.storages[storage] = Storage(nbytes, "forward", module, F32, kind=kind)
    trace.marks = dict(zip(("step", "backward", "optimizer"), marks, strict=True))
    return trace


STEP: list[tuple[int, int, Kind, str]] = [
    (1, 20, "optimizer", ""),  # before the step that counts
    (2, 900, "temporary", "warm-up"),
    (2, -900, "temporary", "warm-up"),
    (3, 30, "saved", "layers.0.mlp"),  # forward
    (4, 40, "logits", ""),
    (5, 50, "temporary", "layers.0.mlp"),  # backward
    (4, -40, "logits", ""),
    (6, 10, "gradients", ""),
    (3, -30, "saved", "layers.0.mlp"),
    (5, -50, "temporary", "layers.0.mlp"),
    (7, 25, "temporary", ""),  # optimizer
    (7, -25, "temporary", ""),
]


def test_peaks_by_phase() -> None:
    found = tensor_footprint(trace_of(STEP, 100, (3, 5, 10)))
    peaks = {name: sum(kinds.values()) for name, kinds in found.phases.items()}
    assert peaks == {"load": 100, "forward": 190, "backward": 240, "optimizer": 155}
    assert tuple(peaks) == ("load", "forward", "backward", "optimizer")
    assert found.highest == "backward"
    assert found.kinds is found.phases["backward"]
    kinds = {kind: nbytes for kind, nbytes in found.kinds.items() if nbytes}
    assert kinds == {"weights": 100, "optimizer": 20, "saved": 30, "logits": 40, "temporary": 50}
    assert set(found.kinds) == set(KINDS)
    assert (found.owner, found.owned) == ("layers.0.mlp", 80)


def test_an_optimizer_may_hold_most() -> None:
    found = tensor_footprint(trace_of(STEP, 100, (3, 3, 3)))
    assert (found.highest, found.owner, found.tensors) == ("optimizer", "layers.0.mlp", 240)
    bare = tensor_footprint(trace_of(STEP[:1], 100, (0, 0, 0)))
    assert (bare.owner, bare.owned) == ("", 0)


@pytest.mark.parametrize("beside", [0, 7])
def test_many_layers_are_told_from_two_models_where_another_phase_is_the_highest(beside) -> None:
    """Backward of 2 and 3 layers, forward of 32; each layer leaves `beside` in the first step."""
    unit = 10**8

    def of_layers(count: int) -> Footprint:
        weights = {"weights": (10 + count) * unit}
        phases = {"forward": {"saved": 2 * count * unit}, "backward": {"saved": 20 * unit}}
        found = on_gpu(Footprint({name: weights | kinds for name, kinds in phases.items()}), (9, 0))
        return replace(found, fragments=found.fragments + beside * count * unit)

    few, more, whole = map(of_layers, (2, 3, 32))
    assert (few.highest, more.highest, whole.highest) == ("backward", "backward", "forward")
    found = extrapolated(few, more, 30)
    assert replace(found, fragments=0) == replace(whole, fragments=0)
    assert found.fragments == pytest.approx(whole.fragments, abs=31), "each was rounded"


def test_a_phase_in_which_nothing_is_allocated_holds_what_was_there() -> None:
    found = tensor_footprint(trace_of(STEP[:1], 100, (1, 1, 1)))
    assert {sum(kinds.values()) for name, kinds in found.phases.items() if name != "load"} == {120}


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 8), st.integers(1, 100), st.sampled_from(KINDS)), max_size=24
    ),
    st.integers(0, 50),
    st.data(),
)
def test_kinds_add_up_and_the_highest_phase_is_the_peak(program, held, data) -> None:
    alive: dict[int, int] = {}
    steps: list[tuple[int, int, Kind, str]] = []
    most, bytes_now, fresh = held, held, 10
    for storage, nbytes, kind in program:
        if storage in alive:
            number, size = alive[storage] // 1000, alive.pop(storage) % 1000
            steps.append((number, -size, kind, ""))
            bytes_now -= size
        else:
            fresh += 1
            alive[storage] = fresh * 1000 + nbytes
            steps.append((fresh, nbytes, kind, f"layers.{storage}"))
            bytes_now += nbytes
        most = max(most, bytes_now)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(steps)), min_size=2, max_size=2)))
    found = tensor_footprint(trace_of(steps, held, (0, *cuts)))
    assert found.tensors == most
    assert 0 <= found.owned <= found.tensors
