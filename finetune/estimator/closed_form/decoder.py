"""Shape of a decoder from its `config.json`, without torch: matrices, vectors, counts.

A table of how each known family builds its layers: matrices (`Linear`), their inputs and the other
weights; `None` for unknown families. Missing values are the defaults of the family's class in
Transformers. `tests/estimator/test_preview.py` checks the counts against Transformers' models.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from finetune.config.paths import ASSETS, shipped_shape, user_path
from finetune.config.schema import BUILTIN, ModelConfig

LLAMA_LIKE = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text"),
    *("granite", "mixtral", "qwen3_moe"),
)
FAMILIES = (*LLAMA_LIKE, "gpt2", "bdh")
_TEXT_OF = {"gemma3": "gemma3_text"}
_HEAD_DIM = {"gemma": 256, "gemma2": 256, "gemma3_text": 256, "qwen3": 128}
_KV_HEADS = {"mistral": 8, "mixtral": 8, "gemma2": 4, "gemma3_text": 4, "qwen3_moe": 4}

Kind = Literal["linear", "experts", "embedding", "head", "vector"]


class Linear(NamedTuple):
    """Linear layer with a weight [n, k], by its path inside the decoder layer."""

    path: str
    n: int
    k: int
    bias: bool = False

    @property
    def name(self) -> str:
        """`q_proj` of `self_attn.q_proj`."""
        return self.path.rpartition(".")[2]

    @property
    def numel(self) -> int:
        return self.n * self.k


class Weight(NamedTuple):
    """Weight tensor, the number of equal ones in the model, and the linear layer it belongs to."""

    shape: tuple[int, ...]
    count: int
    kind: Kind
    path: str = ""


@dataclass(frozen=True)
class Decoder:
    """Parts of a decoder with identical layers.

    Attributes:
        hidden: width of the residual stream.
        layers: number of layers applied.
        heads, kv_heads, head_dim: attention shape (`bdh`: neurons of a head).
        inner: width inside the feed-forward part (`bdh`: neurons; MoE: of one expert).
        linears: linear layers of one decoder layer.
        vectors: lengths of the norms' weights of one layer.
        experts, active: experts of one layer and those that see a token; 0 without experts.
        positions: rows of a table of learned positions.
        tied: head and embedding are one matrix.
        prefix: name of a layer up to its number.
        dropouts: stream-wide masks that one layer draws in training.
    """

    family: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocabulary: int
    linears: tuple[Linear, ...]
    vectors: tuple[int, ...]
    experts: int = 0
    active: int = 0
    positions: int = 0
    tied: bool = False
    prefix: str = "model.layers."
    dropouts: int = 0

    def weights(self) -> Iterator[Weight]:
        """All weight tensors; biases count as vectors."""
        d, n = self.hidden, self.layers
        yield Weight((self.vocabulary, d), 1, "embedding")
        if not self.tied:
            yield Weight((self.vocabulary, d), 1, "head")
        if self.positions:
            yield Weight((self.positions, d), 1, "embedding")
        if self.family == "bdh":
            heads = (self.heads, d, self.head_dim)
            for shape in ((d, self.inner), heads, (self.inner, d)):
                yield Weight(shape, 1, "experts")
            return
        for linear in self.linears:
            yield Weight((linear.n, linear.k), n, "linear", linear.path)
            if linear.bias:
                yield Weight((linear.n,), n, "vector", linear.path)
        if self.experts:
            yield Weight((self.experts, d), n, "experts")  # the router, which is no nn.Linear
            yield Weight((self.experts, 2 * self.inner, d), n, "experts")
            yield Weight((self.experts, d, self.inner), n, "experts")
        for length in self.vectors:
            yield Weight((length,), n, "vector")
        for _ in range(2 if self.family == "gpt2" else 1):  # the last norm
            yield Weight((d,), 1, "vector")

    @property
    def parameters(self) -> int:
        """Elements of all weights."""
        return sum(math.prod(weight.shape) * weight.count for weight in self.weights())

    @property
    def multiplied(self) -> int:
        """Weights of all layers that multiply one token, without head and embedding."""
        if self.family == "bdh":
            return 3 * self.inner * self.hidden * self.layers
        of_experts = 3 * self.active * self.inner * self.hidden + self.experts * self.hidden
        dense = sum(linear.numel for linear in self.linears)
        return (dense + (of_experts if self.experts else 0)) * self.layers


# --------------------------------------------------------------------------------- from config.json


def find_decoder(model: ModelConfig) -> Decoder | None:
    """Shape of a recipe's model from the package or a local folder, never the hub, or None."""
    path = user_path(model.name) / "config.json"
    if model.name.startswith(BUILTIN):
        path = ASSETS / model.name.removeprefix(BUILTIN) / "config.json"
    elif not path.is_file():
        path = shipped_shape(model.name)
    if path is None or not path.is_file():
        return None
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:  # loading the model reports the error
        return None
    return decoder_of(values) if isinstance(values, dict) else None


def decoder_of(values: dict[str, Any]) -> Decoder | None:
    """Decoder for the values of a `config.json`.

    None if the family is unknown, or a required value is missing or of a wrong type.
    """
    family = _TEXT_OF.get(str(values.get("model_type")), str(values.get("model_type")))
    if isinstance(values.get("text_config"), dict):
        values = values["text_config"]
    try:
        if family in LLAMA_LIKE:
            return _llama_like(family, values)
        makers = {"gpt2": _gpt2, "bdh": _bdh}
        return makers[family](values) if family in makers else None
    except (KeyError, TypeError, ZeroDivisionError):
        return None


def _llama_like(family: str, values: dict[str, Any]) -> Decoder | None:
    d, heads = int(values["hidden_size"]), int(values["num_attention_heads"])
    kv_heads = int(values.get("num_key_value_heads") or _KV_HEADS.get(family, heads))
    head_dim = int(values.get("head_dim") or _HEAD_DIM.get(family, d // heads))
    inner, experts = int(values["intermediate_size"]), 0
    if family == "mixtral":
        experts = int(values["num_local_experts"])
    elif family == "qwen3_moe":
        if int(values.get("decoder_sparse_step", 1)) != 1 or values.get("mlp_only_layers"):
            return None  # layers that are not alike
        inner, experts = int(values["moe_intermediate_size"]), int(values["num_experts"])
    q, kv = heads * head_dim, kv_heads * head_dim
    biased = bool(values.get("attention_bias", False))
    b = biased or family == "qwen2"  # whose q, k and v have biases whatever the file says
    linears = [
        Linear("self_attn.q_proj", q, d, b),
        Linear("self_attn.k_proj", kv, d, b),
        Linear("self_attn.v_proj", kv, d, b),
        Linear("self_attn.o_proj", d, q, biased and family != "qwen2"),
    ]
    if not experts:
        b = bool(values.get("mlp_bias", False)) and family in ("llama", "granite")
        linears += [
            Linear("mlp.gate_proj", inner, d, b),
            Linear("mlp.up_proj", inner, d, b),
            Linear("mlp.down_proj", d, inner, b),
        ]
    norms = [d] * (4 if family in ("gemma2", "gemma3_text") else 2)
    if family in ("qwen3", "qwen3_moe", "gemma3_text"):
        norms += [head_dim, head_dim]  # of queries and keys
    return Decoder(
        family, d, int(values["num_hidden_layers"]), heads, kv_heads, head_dim, inner,
        int(values["vocab_size"]), tuple(linears), tuple(norms), experts,
        int(values["num_experts_per_tok"]) if experts else 0,
        tied=bool(values.get("tie_word_embeddings", family.startswith("gemma"))),
    )  # fmt: skip


def _gpt2(values: dict[str, Any]) -> Decoder:
    d, heads = int(values["n_embd"]), int(values["n_head"])
    inner = int(values.get("n_inner") or 4 * d)
    linears = (
        Linear("attn.c_attn", 3 * d, d, True),
        Linear("attn.c_proj", d, d, True),
        Linear("mlp.c_fc", inner, d, True),
        Linear("mlp.c_proj", d, inner, True),
    )
    return Decoder(
        "gpt2", d, int(values["n_layer"]), heads, heads, d // heads, inner,
        int(values["vocab_size"]), linears, (d,) * 4, positions=int(values["n_positions"]),
        tied=bool(values.get("tie_word_embeddings", True)), prefix="transformer.h.",
        dropouts=2 if values.get("resid_pdrop", 0.1) else 0,
    )  # fmt: skip


def _bdh(values: dict[str, Any]) -> Decoder:
    d, n, heads = (int(values[k]) for k in ("hidden_size", "num_neurons", "num_attention_heads"))
    return Decoder(
        "bdh", d, int(values["num_hidden_layers"]), heads, heads, n // heads, n,
        int(values["vocab_size"]), (), (), tied=bool(values.get("tie_word_embeddings", False)),
        prefix="model.block.", dropouts=1 if values.get("dropout", 0.1) else 0,
    )  # fmt: skip
