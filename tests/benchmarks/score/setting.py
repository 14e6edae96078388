"""A training step in a handful of sizes: the shape of a decoder, and how it is run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tests.benchmarks.score.casts import Fp8

Checkpointing = Literal["off", "full", "selective"]
Loss = Literal["plain", "fused"]
ATTENTION_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP_LINEARS = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder-only transformer.

    Attributes:
        gated: three linears in the feed-forward (SwiGLU) instead of two.
        experts, chosen: of a mixture: how many, and how many see each token; 0 for none.
        norm: `rms` or `layer`.
        tied: whether the head is the embedding.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int
    head_dim: int = 0
    gated: bool = True
    experts: int = 0
    chosen: int = 0
    norm: Literal["rms", "layer"] = "rms"
    tied: bool = False

    @property
    def width(self) -> int:
        """Columns of q: heads x head dimension."""
        return self.heads * (self.head_dim or self.hidden // self.heads)

    @property
    def kv_width(self) -> int:
        """Columns of k and of v."""
        return self.kv_heads * (self.head_dim or self.hidden // self.heads)

    def linears(self) -> dict[str, tuple[int, int]]:
        """(N, K) of the linears of a layer; of one expert, in a mixture."""
        found = {
            "q_proj": (self.width, self.hidden),
            "k_proj": (self.kv_width, self.hidden),
            "v_proj": (self.kv_width, self.hidden),
            "o_proj": (self.hidden, self.width),
            "up_proj": (self.intermediate, self.hidden),
            "down_proj": (self.hidden, self.intermediate),
        }
        if self.gated:
            found["gate_proj"] = (self.intermediate, self.hidden)
        return found

    @property
    def layer_parameters(self) -> int:
        """Weights of one layer, without norms."""
        total = 0
        for name, (n, k) in self.linears().items():
            total += n * k * (self.experts or 1 if name in MLP_LINEARS else 1)
        return total

    @property
    def parameters(self) -> int:
        """Weights of all, without norms and biases."""
        ends = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return self.layers * self.layer_parameters + ends


@dataclass(frozen=True)
class Setting:
    """How a step is run.

    Attributes:
        batch, length: sequences and tokens of a micro-batch on one GPU.
        method: `full`, or adapters over a frozen base.
        rank, targets: of the adapters.
        base_bits: bits per weight of a frozen base that products unpack; 16: it is not packed.
        fp8: how the layers' linears multiply; None: in BF16.
        fp8_head: the head too.
        checkpointing: `selective` keeps attention and every second product.
        loss: `plain` makes float32 logits; `fused` passes over the BF16 logits once, in place.
        weight_dtype: of the trained weights as held (`float32` under mixed precision).
        optimizer: `foreach` or `fused` AdamW, or `8bit` states.
        state_dtype: of its moments.
        accumulation: micro-batches per update.
        shards: GPUs that share weights, gradients and moments.
        turn_codes: FP8 operands are transposed as codes, not cast again from BF16 (C++ programs).
        cast_weights_once: FP8 weights are cast (each GPU its share) before the micro-batches.
        compiled: whether equal casts are done once (compiled layers).
        adapter_dtype: of the adapters' products.
    """

    batch: int
    length: int
    method: Literal["full", "lora"] = "full"
    rank: int = 16
    targets: tuple[str, ...] = ATTENTION_LINEARS
    base_bits: int = 16
    fp8: Fp8 | None = None
    fp8_head: bool = False
    checkpointing: Checkpointing = "off"
    loss: Loss = "plain"
    weight_dtype: str = "bfloat16"
    optimizer: Literal["foreach", "fused", "8bit"] = "foreach"
    state_dtype: str = "bfloat16"
    accumulation: int = 1
    shards: int = 1
    turn_codes: bool = False
    cast_weights_once: bool = False
    compiled: bool = False
    adapter_dtype: str = "bfloat16"

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch."""
        return self.batch * self.length
