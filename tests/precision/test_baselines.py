"""Estimates of others, as they make them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.benchmarks.score.baselines import accelerate_estimate


@pytest.fixture
def shape():
    from transformers import LlamaConfig

    return LlamaConfig(
        **{"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3},
        **{"num_attention_heads": 4, "vocab_size": 500},
    )


@pytest.mark.parametrize(("dtype", "times"), [("float32", 4), ("float16", 2), ("bfloat16", 2)])
def test_it_is_weights_without_a_head_times_a_number(shape, dtype, times) -> None:
    d, i, head_dim = 64, 160, 16
    layer = 4 * d * d + 3 * d * i + 2 * d
    rotary = 2 * head_dim // 2  # frequencies and their originals, which are buffers
    assert accelerate_estimate(shape, dtype) == times * 4 * (500 * d + 3 * layer + d + rotary)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_it_is_what_the_command_prints(shape, dtype, monkeypatch, capsys) -> None:
    """The command itself, with a model made here in the place of one from the hub."""
    from accelerate import init_empty_weights
    from accelerate.commands import estimate
    from accelerate.utils import convert_bytes
    from transformers import AutoModel

    def create(*_, **__):
        with init_empty_weights():
            return AutoModel.from_config(shape, dtype=torch.float32)

    monkeypatch.setattr(estimate, "create_empty_model", create)
    args = {"model_name": "x", "library_name": "transformers", "trust_remote_code": False}
    estimate.estimate_command(SimpleNamespace(dtypes=[dtype], **args))
    (row,) = (line for line in capsys.readouterr().out.splitlines() if f"│{dtype}" in line)
    assert row.strip("│").split("│")[-1].strip() == convert_bytes(accelerate_estimate(shape, dtype))


def test_it_makes_no_weights(shape) -> None:
    shape.hidden_size, shape.intermediate_size, shape.num_hidden_layers = 8192, 28672, 80
    shape.num_attention_heads = 64
    assert accelerate_estimate(shape, "float32") > 800 * 2**30
