"""Run under torchrun by `test_distributed.py`: Transformer Engine in two processes, and in one.

    torchrun --nproc_per_node=2 -m tests.te_worker OUT MODE,MODE,...

A mode is `ddp` or `fsdp`, a scaling, and `compiled` or `local` (delayed scaling without
`reduce_amax`) or neither, with dashes; or `layer` and a scaling or `local`: a layer of ours beside
`te.Linear`, both under DDP. Batches are halves. Each of two processes computes one, and one process
both, in a step of delayed scaling that sees the amaxes of both, as processes do that share them.
Its learning rate is half of theirs: it has the sum of gradients of which they have the mean.

Each process writes OUT/MODE/RANK.json. Losses and weights are compared to the bit: as they are, and
as a digest.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import DistributedType, PartialState
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from finetune import get_receipt, setup_fp8_mixed_precision_training
from finetune.precision import convert, planner
from finetune.precision.settings import PrecisionConfig
from tests import te
from tests.conftest import on_h100
from tests.distributed_worker import one_by_one
from tests.traced import traced

torch.set_num_threads(1)
STEPS = 4


def digest(tensors: list[Tensor]) -> str:
    whole = [t.full_tensor() if isinstance(t, DTensor) else t for t in tensors]
    return hashlib.sha256(b"".join(t.detach().numpy().tobytes() for t in whole)).hexdigest()


def own_half(x: Tensor) -> Tensor:
    """What this process computes of a batch."""
    return x.chunk(dist.get_world_size())[dist.get_rank()]


def model_steps(kind: str, scaling: str, *more: str) -> dict[str, Any]:
    fsdp, beside = None, {}
    if kind == "fsdp":
        # Accelerate ignores FSDP on CPUs without a word; taking these for GPUs, it shards them.
        PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU
        fsdp = FullyShardedDataParallelPlugin(
            fsdp_version=2, reshard_after_forward=True, cpu_ram_efficient_loading=False,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        )  # fmt: skip
        beside = {"fsdp_plugin": fsdp}
    if scaling == "delayed":
        beside |= {"amax_history_len": 3, "reduce_amax": "local" not in more}
    accelerator: Any = setup_fp8_mixed_precision_training("te", scaling=scaling, cpu=True, **beside)  # pyright: ignore
    torch.manual_seed(0)
    shape = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=272, use_cache=False, pad_token_id=0,
    )  # fmt: skip
    plain: Any = LlamaForCausalLM(shape).train()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05 * dist.get_world_size())
    model, optimizer = accelerator.prepare(plain, optimizer)
    torch.set_autocast_cache_enabled(False)  # a copy in BF16 would have the gradient of both halves
    conversion: Any = convert.conversion_of(model)
    begin, losses, draw = conversion.engine.begin_step, [], torch.Generator().manual_seed(1)
    with traced() if "compiled" in more else nullcontext(lambda: "") as graphs:
        for step in range(STEPS):
            # Few different tokens in the second half, and more of them in each step.
            ids = torch.randint(1, 272, (4, 16), generator=draw)
            ids[2:] %= 2 + 8 * step
            optimizer.zero_grad()
            losses.append([])
            for x in own_half(ids + 1).chunk(2 // dist.get_world_size()):
                # Both halves are one step to delayed scales.
                conversion.engine.begin_step = (lambda: None) if losses[-1] else begin
                loss = model(input_ids=x % 272, labels=x % 272).loss
                accelerator.backward(loss)
                losses[-1].append(loss.item())
            optimizer.step()
        made = graphs()
    begin()  # takes in what the last one has seen
    states = conversion.engine.state_tensors()
    receipt = get_receipt()
    return {
        "losses": losses,
        "weights": digest(list(plain.parameters())),
        "states": {name: value[..., :2].tolist() for name, value in states.items()},
        "sharded": sum(isinstance(p, DTensor) for p in plain.parameters()),
        "status": receipt.status,
        "share": receipt.fp8_flop_share,
        "graphs": made,
    }


def layer_steps(scaling: str) -> dict[str, Any]:
    """Outputs, gradients and delayed states of both layers, by digests."""
    import transformer_engine.pytorch as engine

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 48, dtype=torch.bfloat16))
    own: Any = engine.Linear(64, 48, params_dtype=torch.bfloat16)
    own.load_state_dict(model[0].state_dict(), strict=False)
    asked: dict[str, Any] = {"compute": "fp8", "backend": "te", "scaling": scaling}
    if scaling in ("delayed", "local"):
        reduces = {"reduce_amax": scaling == "delayed", "amax_history_len": 3}
        asked |= {"scaling": "delayed", **reduces}
    precision = PrecisionConfig.model_validate(asked)
    conversion: Any = convert.apply(model, planner.plan(model, precision))
    found: dict[str, list[str]] = {"ours": [], "theirs": []}
    layers: list[Any] = [model, own]
    if dist.get_world_size() > 1:
        layers = [nn.parallel.DistributedDataParallel(layer) for layer in layers]
    draw = torch.Generator().manual_seed(2)
    for step in range(STEPS):
        x = torch.randn(64, 64, generator=draw).bfloat16()
        g = torch.randn(64, 48, generator=draw).mul(1e-3).bfloat16()
        x[32:], g[32:] = x[32:] * 4**step, g[32:] * 4  # the second half is larger
        for (name, seen), layer in zip(found.items(), layers, strict=True):
            layer.zero_grad()
            inside = engine.autocast(enabled=True, recipe=conversion.engine.recipe)
            rows = own_half(x).clone().requires_grad_()
            with inside if name == "theirs" else nullcontext():
                y = layer(rows)
            y.backward(own_half(g))
            seen.append(
                digest([t.float() for t in (y, rows.grad, *(p.grad for p in layer.parameters()))])
            )
    if asked["scaling"] == "delayed":
        conversion.engine.begin_step()  # which the engine does when its autocast ends
        metas = [(own.fp8_meta[d].scale, own.fp8_meta[d].amax_history) for d in own.quantizers]
        for seen, tensors in zip(
            found.values(), (model[0].fp8_states, sum(metas, ())), strict=True
        ):
            # Two operands of forward, one of backward; the rest of the slots is never used.
            kept = [t[..., : 2 if i < 2 else 1] for i, t in enumerate(tensors)]
            seen += [str(t.tolist()) for t in kept]
    return found


def main(out: Path, mode: str) -> None:
    kind, *words = mode.split("-")
    with pytest.MonkeyPatch.context() as patch:
        on_h100(patch)
        te.install(patch)
        facts = layer_steps(*words) if kind == "layer" else model_steps(kind, *words)
    (out / f"{os.environ['RANK']}.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    one_by_one(main, Path(sys.argv[1]), sys.argv[2])
    dist.destroy_process_group()
