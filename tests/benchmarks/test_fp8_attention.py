"""The figures for which attention stays in high precision."""

from __future__ import annotations

import pytest
import torch

from tests.benchmarks.fp8_attention import attention, errors, linear_error, operands


def test_the_exact_mode_is_attention() -> None:
    q, k, v, g = operands(2.0)
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    y = torch.nn.functional.scaled_dot_product_attention(
        *(x[None] for x in inputs), is_causal=True
    )[0]
    y.backward(g)
    for ours, theirs in zip(attention(q, k, v, g), [y, *(x.grad for x in inputs)], strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-4)


def test_a_linear_layers_error_is_that_of_its_operands_whatever_their_size() -> None:
    assert [linear_error(size) for size in (0.5, 32.0)] == pytest.approx([0.037] * 2, abs=0.002)


@pytest.mark.parametrize("part", [0, 1], ids=["output", "gradients"])
def test_the_error_of_fp8_attention_grows_with_the_scores(part) -> None:
    found = [errors(size, "fp8")[part] for size in (0.5, 2.0, 8.0, 32.0)]
    assert found == sorted(found)
    assert found[-1] > 4 * found[0] > 0.1
    assert all(
        error > 10 * errors(size, "bf16")[part]
        for size, error in zip((0.5, 2.0, 8.0, 32.0), found, strict=True)
    )


def test_scores_that_doubled_saturate_under_an_old_scale() -> None:
    for size in (1.0, 4.0, 16.0):
        for now, old in zip(errors(size, "fp8"), errors(size, "doubled"), strict=True):
            assert old > 1.5 * now


def test_stored_scores_overflow() -> None:
    """Above 448 all are one number: what the largest scores say is lost."""
    assert errors(128.0, "stored")[1] > 1 > 5 * errors(128.0, "bf16")[1]
