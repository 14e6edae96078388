"""What a LoRA training step holds in memory, measured: FP8 base, BF16, torchao.

    python -m tests.benchmarks.lora_memory [--hidden 1024] [--layers 8] [--tokens 256] [--rank 16]
                                           [--engine emulated|real]

Bytes of live tensors (`training.health.memory_meter`) over one training step of a Llama-shaped
model with random BF16 weights, AdamW over float32 adapters on every linear layer of the decoder,
under BF16 autocast as a trainer has it. The step before has made the optimizer's states. Three
moments are read off:

    weights   before the step: parameters and buffers; without the optimizer's states
    saved     at the end of forward, beyond what was there before it: kept for backward
    peak      the most that was alive at any moment of the step, everything included

The goal is at most 0.62 of stock BF16 LoRA in weights + saved. 0.5 is the floor for weights;
embeddings, head, norms and adapters are no FP8, and of what is saved only the inputs of linear
layers become codes: the rest (attention, SwiGLU, norms) is PyTorch's and the model's own.

    PEFT BF16       as PEFT runs it
    fused BF16      adapters in one function with their base
    FP8             base held in FP8, inputs for dA kept as codes; `high`: kept in BF16
    torchao, ours   `backend: torchao`, `frozen: bf16`: no weight gradient
    torchao         `convert_to_float8_training` on all but head and adapters, as its users call it

`--engine real` multiplies by `torch._scaled_mm`, as a GPU does: slow on some CPUs, but without the
decoded BF16 copy of one layer that the emulation makes in passing (it shows in `peak`). torchao's
own emulation decodes inside one operator, where nothing is counted.
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import dataclasses
import gc
from collections.abc import Iterable
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

from finetune.precision import constants
from finetune.precision.convert import apply
from finetune.precision.planner import plan
from finetune.precision.settings import PrecisionConfig
from finetune.training.health.memory_meter import LiveTensors

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
FP8 = {"compute": "fp8", "emulation": "allow", "scaling": "rowwise"}
CONTENDERS: dict[str, dict[str, Any] | None] = {
    "PEFT BF16": {"compute": "bf16"},
    "fused BF16": {"compute": "bf16"},
    "FP8": FP8 | {"frozen": "fp8"},
    "FP8, x high": FP8 | {"frozen": "fp8"},
    "torchao, ours": FP8 | {"frozen": "bf16", "backend": "torchao"},
    "torchao": None,
}
"""Name -> `PrecisionConfig`; None: by torchao's own function."""
BASELINE = "PEFT BF16"
CHOICES: dict[str, dict[str, Any]] = {
    BASELINE: {"FUSED_ADAPTERS": False},
    "FP8, x high": {"SAVED_INPUT": "high"},
}
"""What a contender has in the place of `finetune.precision.constants`."""
MIB = 2**20


class Shape(NamedTuple):
    """Of the model and the micro-batch."""

    hidden: int = 1024
    layers: int = 8
    tokens: int = 256
    rank: int = 16
    vocabulary: int = 512


class Memory(NamedTuple):
    """Bytes of live tensors in one training step."""

    weights: int
    saved: int
    peak: int

    @property
    def held(self) -> int:
        """Weights and saved activations."""
        return self.weights + self.saved


def make_model(shape: Shape) -> Any:
    """A Llama with the proportions of the 8B one, in BF16, under float32 adapters."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = shape.hidden // 64
    config = LlamaConfig(
        hidden_size=shape.hidden, intermediate_size=7 * shape.hidden // 2,
        num_hidden_layers=shape.layers, num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 4), vocab_size=shape.vocabulary,
        max_position_embeddings=shape.tokens, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(config)
    model = model.to(torch.bfloat16)
    lora = LoraConfig(r=shape.rank, lora_alpha=32, target_modules=TARGETS, task_type="CAUSAL_LM")
    return get_peft_model(model, lora).train()


def convert(model: Any, precision: dict[str, Any] | None, *, real: bool) -> None:
    """Make the model a contender's."""
    if precision is None:
        recipe = Float8LinearConfig.from_recipe_name("rowwise")  # pyright: ignore[reportArgumentType]
        config = dataclasses.replace(recipe, emulate=not real)
        convert_to_float8_training(model, config=config, module_filter_fn=_base_layer)
        return
    if precision["compute"] == "fp8":
        engine = "torchao" if real or precision["frozen"] == "bf16" else "emulated"
        precision = {"backend": engine} | precision
    apply(model, plan(model, PrecisionConfig.model_validate(precision)), hardware=real)


def _base_layer(_: nn.Module, name: str) -> bool:
    return "lm_head" not in name and "lora_" not in name


def tensors_of(model: nn.Module) -> Iterable[Tensor]:
    """Parameters and buffers."""
    yield from model.parameters()
    yield from model.buffers()


def measure(shape: Shape, name: str, *, checkpointing: bool, real: bool = False) -> Memory:
    """The second training step of a contender's new model."""
    with patch.dict(vars(constants), CHOICES.get(name, {})):
        return _measure(shape, CONTENDERS[name], checkpointing=checkpointing, real=real)


def _measure(
    shape: Shape, precision: dict[str, Any] | None, *, checkpointing: bool, real: bool
) -> Memory:
    model = make_model(shape)
    convert(model, precision, real=real)
    if checkpointing:
        model.enable_input_require_grads()
        model.activation_checkpointing_enable({"use_reentrant": False})
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    ids = torch.randint(1, shape.vocabulary, (1, shape.tokens))
    gc.collect()
    with LiveTensors(tensors_of(model)) as live:
        weights, saved = live.bytes, 0
        for _ in range(2):
            before = live.bytes
            live.peak = live.bytes
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(input_ids=ids, labels=ids).loss
            saved = live.bytes - before
            loss.backward()
            del loss
            optimizer.step()
            optimizer.zero_grad()
    return Memory(weights, saved, live.peak)


def table(shape: Shape, found: dict[str, Memory], title: str) -> str:
    """Markdown: MiB, and ratios to stock BF16."""
    base = found[BASELINE]
    lines = [
        title,
        "",
        "| LoRA | weights | saved | weights + saved | over PEFT BF16 | peak | over PEFT BF16 |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, m in found.items():
        cells = [f"{v / MIB:.1f}" for v in (m.weights, m.saved, m.held)]
        cells += [f"{m.held / base.held:.2f}", f"{m.peak / MIB:.1f}", f"{m.peak / base.peak:.2f}"]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    for name, value in Shape._field_defaults.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--engine", choices=("emulated", "real"), default="emulated")
    args = parser.parse_args()
    torch.set_num_threads(1)
    shape = Shape(*(getattr(args, name) for name in Shape._fields))
    for checkpointing in (False, True):
        found = {
            name: measure(shape, name, checkpointing=checkpointing, real=args.engine == "real")
            for name in CONTENDERS
        }
        how = "with" if checkpointing else "without"
        title = (
            f"hidden {shape.hidden}, {shape.layers} layers, rank {shape.rank}, {shape.tokens} "
            f"tokens, {args.engine}, {how} gradient checkpointing; MiB"
        )
        print(table(shape, found, title) + "\n", flush=True)


if __name__ == "__main__":
    main()
