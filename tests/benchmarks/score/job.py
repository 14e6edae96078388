"""What is run: a configuration in words that a simulation understands.

A `Job` says what a row of measurements ran, in full: shape of the model, batch, adapters, how the
base is held, autocast, checkpointing, attention kernel, path of the loss, optimizer, sharding, and
what of all that memory was measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Checkpoint = Literal["none", "reentrant", "nonreentrant"]
Sharding = Literal["none", "ddp", "fsdp1", "fsdp2"]


@dataclass(frozen=True)
class Job:
    """One configuration.

    Attributes:
        shape: name in `assets/scored_shapes.yaml`.
        batch: rows in a step, per GPU.
        length: tokens of a row; of the longest, when they vary.
        engine: whose model code: `transformers` or `litgpt`.
        adapter: `""` for full training, or the name of a PEFT method.
        adapter_options: arguments of its configuration.
        weights: `bfloat16`, `float16`, `float32`, `nf4`, `nf4-dq`, `gptq4`, `gptq4-column`, `int8`.
        packs_head: the output head is packed too.
        keeps_packed_input: products of packed weights keep their input.
        accumulates: gradients of batches before are there when a step begins.
        compute: type of activations and products.
        adapter_type: type of adapter weights.
        autocast: products are cast by autocast.
        float32_norms: norms are held in float32.
        float32_rest: all that is not packed is held in float32.
        checkpoint: which checkpointing.
        attention: kernel, see `attention.NAMES`, or `eager`.
        loss: path, see `losses`.
        fast_loss, fused_kernels: Unsloth's kernels of fms-acceleration.
        outputs_in_float32: accelerate returns logits in float32.
        outputs_held: the training loop keeps the outputs of the step before.
        optimizer: `adamw-foreach`, `adamw-fused`, `adamw-for`, `adamw-8bit`, `adamw-4bit`, `paged`.
        gpus, sharding: how many share, and how.
        sharded_type: type of the sharded weights, when not `weights` (float32 masters).
        input_grads: the embedding's output is made to require grad.
        keeps_cache: keys and values are returned, and live until the loss is there.
        workspace: bytes of cuBLAS's workspace, counted as allocated.
        trainable: weights that the source says train, 0 when it does not: another number means that
            the installed PEFT makes another adapter.
    """

    shape: str
    batch: int
    length: int
    engine: str = "transformers"
    adapter: str = ""
    adapter_options: tuple[tuple[str, Any], ...] = ()
    weights: str = "bfloat16"
    packs_head: bool = False
    keeps_packed_input: bool = False
    accumulates: bool = False
    compute: str = "bfloat16"
    adapter_type: str = "float32"
    autocast: bool = False
    float32_norms: bool = False
    float32_rest: bool = False
    checkpoint: Checkpoint = "none"
    attention: str = "flash"
    loss: str = "transformers-5"
    fast_loss: bool = False
    fused_kernels: bool = False
    lora_wrapper: str = ""
    outputs_in_float32: bool = False
    outputs_held: bool = False
    optimizer: str = "adamw-foreach"
    gpus: int = 1
    sharding: Sharding = "none"
    sharded_type: str = ""
    input_grads: bool = True
    keeps_cache: bool = False
    workspace: int = 0
    trainable: int = 0
