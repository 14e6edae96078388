"""Bytes that two decoder layers save for backward: compiled or not, checkpointed or not.

    python -m tests.benchmarks.checkpointed_layers [NAME ...] [--inside | --around]

A small Llama on a CPU, 1,024 tokens, FP8 emulated, by Inductor: a line for each way with the MiB
that autograd is handed beside the weights, and the losses of four steps. `--inside` leaves a
compiled layer's checkpoint in its graph, `--around` puts it around, whatever this torch has by
itself (`precision.model.compiling.RECOMPUTES`). For another torch, call that one's Python.
"""

from __future__ import annotations

import argparse
import itertools
import warnings
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from finetune.precision.model import compiling
from finetune.precision.settings import PrecisionConfig
from finetune.training.helper.session import install

FP8: dict[str, Any] = {
    "compute": "fp8",
    "backend": "torchao",
    "emulation": "allow",
    "scaling": "tensorwise",
}
KINDS: dict[str, dict[str, Any]] = {
    "fp8": FP8,
    "fp8 masters": FP8 | {"fp8_params": True},
    "fp8 lora": FP8,
    "fp8 lora frozen": FP8 | {"frozen": "fp8", "scaling": "rowwise"},
    "bf16": {"compute": "bf16"},
    "bf16 lora": {"compute": "bf16"},
}
SHAPE: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4,
}  # fmt: skip
STEPS, ROWS, LENGTH = 4, 2, 512


def train(kind: str, compile: str, *, checkpointing: bool) -> tuple[float, list[float]]:
    """MiB saved in the last step, and the loss of each."""
    torch._dynamo.reset()
    AcceleratorState._reset_state(reset_partial_state=True)
    torch.manual_seed(1)
    model: Any = LlamaForCausalLM(LlamaConfig(**SHAPE))
    if "lora" in kind:
        model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear"))
    install(PrecisionConfig(compile=compile, **KINDS[kind]))  # pyright: ignore[reportArgumentType]
    accelerator = Accelerator()
    model.train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    optimizer: Any = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    losses, saved = list[float](), dict[int, int]()
    for seed in range(STEPS):
        ids = torch.randint(512, (ROWS, LENGTH), generator=torch.Generator().manual_seed(seed))
        saved = {}

        def pack(x: Tensor, saved: dict[int, int] = saved) -> Tensor:
            saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            loss = model(input_ids=ids, labels=ids).loss
        for p in model.parameters():
            saved.pop(p.untyped_storage().data_ptr(), None)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return sum(saved.values()) / 2**20, losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=[*KINDS], help=", ".join(KINDS))
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--inside", action="store_const", dest="from_torch", const=(0, 0, 0))
    where.add_argument("--around", action="store_const", dest="from_torch", const=(99, 0, 0))
    given = parser.parse_args()
    compiling.RECOMPUTES = given.from_torch or compiling.RECOMPUTES
    warnings.simplefilter("ignore")  # Inductor warns about its own environment
    for kind in given.names:
        for compile, checkpointing in itertools.product(("off", "on"), (False, True)):
            saved, losses = train(kind, compile, checkpointing=checkpointing)
            way = f"{'compiled' if compile == 'on' else 'plain'}{', checkpointed' * checkpointing}"
            print(f"torch {torch.__version__}  {kind:16} {way:24} {saved:6.1f} MiB  {losses}")


if __name__ == "__main__":
    main()
