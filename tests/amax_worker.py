"""Run under torchrun by `test_distributed.py`: the scales of one layer in two processes.

    torchrun --nproc_per_node=2 -m tests.amax_worker OUT SCALING

With `reduce_amax` and without it, as powers of two and not. Process 1 sees inputs and gradients
four times as large as process 0. Each writes OUT/SCALING/RANK.json: `reduce/pow2` -> operand ->
its scale in each of four steps.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from finetune.precision import convert, planner
from finetune.precision.settings import PrecisionConfig

torch.set_num_threads(1)


def scales(rank: int, scaling: str, *, reduce: bool, pow2: bool) -> dict[str, list[float]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64))
    p = PrecisionConfig.model_validate({
        "compute": "fp8", "backend": "emulated", "scaling": scaling, "emulation": "allow",
        "amax_history_len": 4, "reduce_amax": reduce, "power_of_two_scales": pow2,
    })  # fmt: skip
    convert.apply(model, planner.plan(model, p))
    found: dict[str, list[float]] = {"x": [], "w": [], "g": []}
    for _ in range(4):
        x = torch.randn(32, 64).mul_(4**rank).requires_grad_()
        model(x).backward(torch.randn(32, 64) * 1e-3 * 4**rank)
        for operand, seen in found.items():
            seen.append(float(model[0].fp8_rule.scale_in_force(operand)))
    return found


def main(out: Path, scaling: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    facts = {
        f"{reduce}/{pow2}": scales(rank, scaling, reduce=reduce, pow2=pow2)
        for reduce in (True, False)
        for pow2 in (True, False)
    }
    (out / scaling).mkdir(parents=True, exist_ok=True)
    (out / scaling / f"{rank}.json").write_text(json.dumps(facts))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
