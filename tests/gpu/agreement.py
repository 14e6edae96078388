"""How far the emulation is from the engines it stands for: `python -m tests.gpu.agreement`.

One linear layer, the same weight, inputs and gradients, in every recipe and every backend that this
machine has. Shown is the signal-to-noise ratio of output, input gradient and weight gradient: of
the emulation against the engine, and, to measure it by, of the engine against float64. Where codes
and scales are the same the two differ only in the order of accumulation and in the last rounding to
BF16 (about 50 dB); where a rule is another one they are no closer than the format's own noise
(about 30 dB in E4M3, 20 dB in E2M1).

On a CPU torchao emulates too, and the table is about two emulations.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict, dataclass
from typing import Any, get_args
from unittest.mock import patch

import torch
from torch import Tensor, nn

from finetune.hardware.device import Device, this_device
from finetune.hardware.requirements import backend_verdict
from finetune.precision import constants, convert, planner
from finetune.precision.facts import Scaling
from finetune.precision.numbers.formats import snr_db
from finetune.precision.settings import PrecisionConfig

TENSORS = ("y", "dx", "dw")
STEPS = 3
"""So that delayed scaling has seen its amaxes; every step has the same data."""


@dataclass(frozen=True)
class Row:
    """One recipe in one engine.

    Attributes:
        scaling, engine: which.
        agreement: tensor -> SNR of the emulation against the engine, dB.
        noise: tensor -> SNR of the engine against float64, dB.
    """

    scaling: str
    engine: str
    agreement: dict[str, float]
    noise: dict[str, float]


def data(tokens: int, k: int, n: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """x [tokens, K] with a few large features, w [N, K], g [tokens, N]: all BF16."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, k, generator=generator)
    x[:, :: k // 8] *= 20
    w = torch.randn(n, k, generator=generator) / k**0.5
    g = torch.randn(tokens, n, generator=generator) * 1e-4
    return x.to(device).bfloat16(), w.to(device).bfloat16(), g.to(device).bfloat16()


def run(p: PrecisionConfig, x: Tensor, w: Tensor, g: Tensor, *, hardware: bool) -> list[Tensor]:
    """Output and gradients of the layer's last step."""
    n, k = w.shape
    model = nn.Sequential(nn.Linear(k, n, bias=False, device=x.device, dtype=x.dtype))
    model[0].weight.data.copy_(w)
    # No two engines round alike by chance.
    with patch.object(constants, "STOCHASTIC_ROUNDING", False):
        convert.apply(model, planner.plan(model, p), hardware=hardware)
    for _ in range(STEPS):
        inputs = x.clone().requires_grad_()
        model[0].weight.grad = None
        y = model(inputs)
        y.backward(g)
    assert inputs.grad is not None
    assert model[0].weight.grad is not None
    return [y.detach(), inputs.grad, model[0].weight.grad]


def precision(backend: str, scaling: str) -> PrecisionConfig:
    """As usual for the scaling."""
    settings: dict[str, Any] = {"backend": backend, "scaling": scaling, "emulation": "allow"}
    return PrecisionConfig.model_validate({"compute": "fp8"} | settings)


def compare(device: Device, tokens: int, k: int, n: int) -> list[Row]:
    """Every recipe in every engine of a device, against the emulation on the same device."""
    x, w, g = data(tokens, k, n, device.kind)
    exact = [x.double() @ w.double().t(), g.double() @ w.double(), g.double().t() @ x.double()]
    hardware, rows = bool(device.has_fp8), []
    for scaling in get_args(Scaling):
        ours = run(precision("emulated", scaling), x, w, g, hardware=hardware)
        noise = dict(zip(TENSORS, map(snr_db, exact, ours), strict=True))
        rows.append(Row(scaling, "emulated", dict.fromkeys(TENSORS, float("inf")), noise))
        for engine in ("torchao", "te"):
            p = precision(engine, scaling)
            if not backend_verdict(engine, p, device):
                continue
            theirs = run(p, x, w, g, hardware=hardware)
            agreement = dict(zip(TENSORS, map(snr_db, theirs, ours), strict=True))
            noise = dict(zip(TENSORS, map(snr_db, exact, theirs), strict=True))
            rows.append(Row(scaling, engine, agreement, noise))
    return rows


def markdown(rows: list[Row]) -> str:
    """The rows as a table, dB."""
    head = [
        f"{kind} {t}" for kind in ("emulated against it:", "it against float64:") for t in TENSORS
    ]
    lines = [f"| scaling | engine | {' | '.join(head)} |", "|" + "---|" * (2 + len(head))]
    for row in rows:
        cells = [
            *(f"{v:.1f}" if row.engine != "emulated" else "" for v in row.agreement.values()),
            *(f"{v:.1f}" for v in row.noise.values()),
        ]
        lines.append(f"| `{row.scaling}` | `{row.engine}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--k", type=int, default=2048)
    parser.add_argument("--n", type=int, default=4096)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    device = this_device()
    rows = compare(device, options.tokens, options.k, options.n)
    sizes = f"{device.name}; x [{options.tokens}, {options.k}], w [{options.n}, {options.k}]"
    text = f"{sizes}; SNR, dB\n\n{markdown(rows)}"
    print(json.dumps({"rows": list(map(plain, rows)), "markdown": text}) if options.json else text)


def plain(row: Row) -> dict[str, Any]:
    """A row for JSON, which has no infinity: None where two tensors are equal to the bit."""
    values = asdict(row)
    for key in ("agreement", "noise"):
        values[key] = {t: v if math.isfinite(v) else None for t, v in values[key].items()}
    return values


if __name__ == "__main__":
    main()
