"""Delayed scaling through a layer, against a table worked out by hand: twelve micro-steps.

The window has four micro-steps, so old amaxes fall out of it; a zero, an infinity and a NaN keep
the scale that was. Formats are hybrid: largest numbers 448 (x, w) and 57344 (g).
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from finetune.precision import convert, planner
from finetune.precision.numbers.formats import E4M3, cast
from finetune.precision.numbers.scaling import DelayedRule, DelayedState
from tests.conftest import emulated

INF, NAN = float("inf"), float("nan")
AMAX = {
    "x": [2.0, 8.0, 1.0, 1.0, 1.0, 1.0, 0.0, 4.0, INF, 3.0, 0.5, 0.25],
    "w": [1.0, 1.0, 1.0, 6.0, 6.0, 6.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0],
    "g": [1.0, 7.0, 0.5, 0.0, 0.0, 14.0, 0.25, NAN, 3.5, 1.75, 1.75, 1.75],
}
"""What each operand's largest magnitude is in each micro-step; w changes every third of them."""
WINDOW = {
    # The amax in force: of the last four micro-steps, None before anything was seen. What is not
    # finite or positive changes nothing: x keeps 4 while the infinity is in the window. NaN counts
    # as zero, and zero takes no place in the window.
    "max": {
        "x": [None, 2, 8, 8, 8, 8, 1, 1, 4, 4, 4, 4],
        "w": [None, 1, 1, 1, 6, 6, 6, 6, 6, 6, 2, 2],
        "g": [None, 1, 7, 7, 7, 7, 14, 14, 14, 14, 14, 3.5],
    },
    "most_recent": {
        "x": [None, 2, 8, 1, 1, 1, 1, 1, 4, 4, 3, 0.5],
        "w": [None, 1, 1, 1, 6, 6, 6, 2, 2, 2, 2, 2],
        "g": [None, 1, 7, 0.5, 0.5, 0.5, 14, 0.25, 0.25, 3.5, 1.75, 1.75],
    },
}
LARGEST = {"x": 448.0, "w": 448.0, "g": 57344.0}


class Net(nn.Module):
    """One layer, recomputed in backward or not."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.layer, self.reentrant = nn.Linear(32, 32, bias=False), reentrant

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant is None:
            return self.layer(x)
        return checkpoint(self.layer, x, use_reentrant=self.reentrant)


def prepared(reentrant: bool | None = None, **settings) -> tuple[Net, convert.Conversion]:
    model = Net(reentrant)
    p = emulated(scaling="delayed", **settings)
    return model, convert.apply(model, planner.plan(model, p))


def matrix(amax: float) -> Tensor:
    """[32, 32] with one entry of this magnitude and the others at half a percent of it."""
    x = torch.full((32, 32), 0.005 * amax if amax not in (INF, NAN) else 0.0)
    x[3, 4] = -amax
    return x


def floor_pow2(scale: float) -> float:
    return 2.0 ** int(torch.tensor(scale).log2().floor())


@pytest.mark.parametrize("pow2", [None, True])
@pytest.mark.parametrize("margin", [0, 1])
@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize("reentrant", [None, False, True], ids=["plain", "recomputed", "reentrant"])
def test_scales_in_force_are_those_of_the_table(reentrant, algorithm, margin, pow2) -> None:
    """With and without recomputation; gradients are accumulated over three micro-steps."""
    model, conversion = prepared(
        reentrant, amax_history_len=4, amax_compute_algo=algorithm, margin=margin,
        power_of_two_scales=pow2,
    )  # fmt: skip
    rule = model.layer.fp8_rule
    for i in range(12):
        if i % 3 == 0:  # the optimizer steps
            model.layer.weight.data = matrix(AMAX["w"][i])
        x = matrix(AMAX["x"][i]).requires_grad_()
        y = model(x)
        y.backward(matrix(AMAX["g"][i]))
        for operand, window in WINDOW[algorithm].items():
            scale = 1.0 if window[i] is None else LARGEST[operand] / window[i] / 2**margin
            scale = floor_pow2(scale) if pow2 else scale
            assert float(rule.scale_in_force(operand)) == pytest.approx(scale), (i, operand)
        # And the layer used it: the codes of x are those of this scale.
        in_force = rule.scale_in_force("x")
        codes = cast(x.detach(), in_force, E4M3).float()
        weight = cast(model.layer.weight.detach(), rule.scale_in_force("w"), E4M3).float()
        expected = (codes @ weight.t()) * (1 / in_force) * (1 / rule.scale_in_force("w"))
        assert torch.allclose(y, expected, rtol=1e-5)
    assert conversion.engine.state_tensors()["history"].shape == (4, 3)
    assert conversion.engine.effective()["margin"] == margin


def test_a_gradients_history_moves_with_backwards_only() -> None:
    """Two forwards and one backward, as contrastive losses have it: one row, not one and a zero."""
    model, conversion = prepared(amax_history_len=4)
    for i in range(3):
        outputs = [model(matrix(2.0 + i).requires_grad_()) for _ in range(2)]
        sum(outputs).backward(matrix(1.0 + i))
    model(matrix(1.0))
    history = conversion.engine.state_tensors()["history"]
    assert history[:, 2].tolist() == [3, 2, 1, 0]
    assert history[:, 0].tolist() == [4, 4, 3, 3]


@pytest.mark.parametrize("amaxes", [(4.0, 2.0), (2.0, 4.0)])
def test_the_largest_amax_of_a_step_counts_whichever_call_has_it(amaxes, monkeypatch) -> None:
    """Of a layer that is called twice in a step, as shared ones are."""
    model, conversion = prepared(amax_history_len=4)
    twice = lambda self, xs: self.layer(xs[0]) + self.layer(xs[1])  # noqa: E731
    monkeypatch.setattr(Net, "forward", twice)
    for _ in range(2):  # the second begins with the history of the first
        model([matrix(amax).requires_grad_() for amax in amaxes]).backward(matrix(1.0))
    assert conversion.engine.state_tensors()["history"][0, 0] == 4


def updated(history: list[float], scale: float, amax: float, algorithm: str) -> float:
    """Transformer Engine's rule written out for one E4M3 operand; `history` is changed.

    `delayed_scaling.cu`, `kernel_bulk`: an amax of zero rolls nothing; the window is the newest
    amax and the `len(history) - 1` before it; a scale follows from a finite, positive amax alone.
    """
    if amax == 0:
        return scale
    history.insert(0, amax)
    history.pop()
    largest = max(history) if algorithm == "max" else amax
    if not 0 < largest < INF:
        return scale
    return min(float(torch.tensor(448.0) / torch.tensor(largest)), torch.finfo(torch.float32).max)


AMAXES = st.lists(
    st.sampled_from([None, 0.0, INF, NAN, 1e-44, 1e-30, 0.02, 1.0, 3.0, 300.0, 1e30]),
    min_size=1, max_size=40,
)  # fmt: skip
"""Of each micro-step; None where the operand is idle."""


@settings(deadline=None, max_examples=60)
@given(
    amaxes=AMAXES,
    length=st.sampled_from([1, 2, 3, 16, 1024]),
    algorithm=st.sampled_from(["max", "most_recent"]),
)
@example(amaxes=[283.0, 0.0215, 0.0, 0.0, 0.0, 0.0], length=3, algorithm="max")
def test_scales_are_those_of_transformer_engines_rule(amaxes, length, algorithm) -> None:
    """Idle, zero, infinite and tiny operands, in windows of one to 1024 micro-steps."""
    p = emulated(
        scaling="delayed", amax_history_len=length, amax_compute_algo=algorithm, format="e4m3"
    )
    state = DelayedState(1, p)
    rule = DelayedRule(state, 0)
    history, scale = [0.0] * length, 1.0
    for amax in amaxes:
        state.advance()
        assert float(rule.scale_in_force("x")) == scale
        if amax is not None:
            rule.cast("x", torch.tensor([[0.0, -amax]]), 1)
            scale = updated(history, scale, 0.0 if amax != amax else amax, algorithm)
    state.advance()
    assert float(rule.scale_in_force("x")) == scale
    assert state.history[:, 0].tolist() == pytest.approx(history)


def test_evaluation_moves_nothing() -> None:
    model, conversion = prepared(amax_history_len=4, eval="fp8")
    model(matrix(2.0)).sum().backward()
    model(matrix(2.0)).sum().backward()
    before = {k: v.clone() for k, v in conversion.engine.state_tensors().items()}
    model.eval()
    with torch.no_grad():
        model(matrix(1.0))
        model.train()(matrix(1.0))  # a training mode without gradients is no step either
    with torch.inference_mode():
        model.eval()(matrix(1.0))
    after = conversion.engine.state_tensors()
    assert all(torch.equal(after[k], before[k]) for k in before)
    model.train()(matrix(2.0)).sum().backward()


def test_training_in_evaluation_mode_is_a_step() -> None:
    """As `eval=fp8` lets one do it, to switch dropout off."""
    model, conversion = prepared(amax_history_len=2, eval="fp8")
    model.eval()
    for _ in range(3):
        model(matrix(1000.0)).sum().backward()
    assert float(model.layer.fp8_rule.scale_in_force("x")) == pytest.approx(448 / 1000)
    assert conversion.engine.state.steps == 3


def test_parts_called_alone_are_steps() -> None:
    """Without the whole model nothing else would end a step: the scale would stand still."""
    model, conversion = prepared(amax_history_len=2)
    for _ in range(2):
        model(matrix(2.0)).sum().backward()
    for _ in range(3):
        model.layer(matrix(1000.0)).sum().backward()
    assert float(model.layer.fp8_rule.scale_in_force("x")) == pytest.approx(448 / 1000)
    assert conversion.engine.state.steps == 5


def test_scales_are_float32_whatever_is_the_default() -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        state = DelayedState(1, prepared()[1].plan.precision)
    finally:
        torch.set_default_dtype(before)
    tensors = state.history, state.current, state.scale, state.largest
    assert {t.dtype for t in tensors} == {torch.float32}


def test_state_is_taken_back() -> None:
    """A copy that goes on from stored state has the same scales as one that never stopped."""
    model, conversion = prepared(amax_history_len=4)
    for i in range(6):
        model(matrix(AMAX["x"][i])).backward(matrix(AMAX["g"][i] + 1))
    stored = {k: v.clone() for k, v in conversion.engine.state_tensors().items()}
    fresh, other = prepared(amax_history_len=4)
    fresh.load_state_dict(model.state_dict())
    other.engine.load_state_tensors(stored)
    for i in range(6, 12):
        for net in (model, fresh):
            net(matrix(AMAX["x"][i])).backward(matrix(AMAX["g"][i]))
        for operand in "xwg":
            a, b = (net.layer.fp8_rule.scale_in_force(operand) for net in (model, fresh))
            assert float(a) == float(b)
