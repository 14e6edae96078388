"""The emulation computes what the hardware does, recipe by recipe; on a CPU, what torchao says."""

from __future__ import annotations

import pytest

from finetune.hardware.device import this_device
from tests.conftest import CPU
from tests.gpu.agreement import compare, markdown

MARGIN = 10.0
"""dB by which the emulation is closer to an engine than the engine is to exact arithmetic."""


def check(rows) -> None:
    for row in rows:
        for tensor, agreement in row.agreement.items():
            assert agreement > row.noise[tensor] + MARGIN, f"{row.engine} {row.scaling} {tensor}"
        low, high = (10, 25) if row.scaling == "nvfp4" else (20, 45)
        if row.scaling == "rowwise_with_gw_hp":
            assert row.noise.pop("dw") > high, "the weight gradient stays high"
        assert all(low < noise < high for noise in row.noise.values()), row


def test_on_a_cpu() -> None:
    rows = compare(CPU, 128, 256, 128)
    check(rows)
    torchaos = {row.scaling for row in rows if row.engine == "torchao"}
    assert torchaos == {"tensorwise", "rowwise", "rowwise_with_gw_hp"}, "which emulates too"
    assert markdown(rows).count("\n") == len(rows) + 1


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # engines warn about each other's builds
def test_on_a_gpu() -> None:
    rows = compare(this_device(), 2048, 2048, 4096)
    check(rows)
    assert {"tensorwise", "rowwise"} <= {row.scaling for row in rows if row.engine == "torchao"}


@pytest.mark.gpu
@pytest.mark.te
@pytest.mark.filterwarnings("ignore")
def test_transformer_engine_is_among_them() -> None:
    rows = compare(this_device(), 256, 512, 512)
    assert {"delayed", "tensorwise"} <= {row.scaling for row in rows if row.engine == "te"}
