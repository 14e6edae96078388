"""Shapes of the models that measurements name, as configurations of transformers.

The numbers are data (`assets/scored_shapes.yaml`); here they become the fields each architecture
calls them by.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from finetune.errors import ConfigError, did_you_mean

_FILE = Path(__file__).with_name("scored_shapes.yaml")


@dataclass(frozen=True)
class Shape:
    """A model's sizes.

    Attributes:
        name: in the file.
        of: `model_type` of transformers.
        h, i, l, a, k, v, p: hidden, intermediate, layers, heads, key heads, words, positions.
        d: size of a head.
        tied: the head is the embedding.
        rotary: share of a head that is rotated.
        experts, top: experts of a layer, and how many a token takes.
    """

    name: str
    of: str
    h: int
    i: int
    l: int  # noqa: E741
    a: int
    k: int
    v: int
    p: int
    d: int = 0
    tied: bool = False
    rotary: float = 1.0
    experts: int = 0
    top: int = 0

    @property
    def head(self) -> int:
        """Size of a head."""
        return self.d or self.h // self.a


@cache
def _read() -> tuple[dict[str, Shape], dict[str, str]]:
    shapes: dict[str, Shape] = {}
    names: dict[str, str] = {}
    for name, fields in yaml.safe_load(_FILE.read_text(encoding="utf-8")).items():
        known = fields.pop("names")
        shapes[name] = Shape(name, **fields)
        names |= dict.fromkeys((name, *known), name)
    return shapes, names


def shape_of(model: str) -> Shape:
    """The shape of a model as a row calls it.

    Raises:
        ConfigError: a model that is not in the file.
    """
    shapes, names = _read()
    found = names.get(model.strip().lower())
    if found is None:
        raise ConfigError(
            f"No shape is known for the model {model!r}.",
            where=_FILE.name,
            why="without its sizes nothing can be predicted.",
            fix=did_you_mean(model.lower(), names).removeprefix("; ") or "add it to the file.",
        )
    return shapes[found]


def config_of(name: str, layers: int | None = None) -> Any:
    """The configuration of shape `name`, with `layers` layers when said."""
    from transformers import AutoConfig

    s = shape_of(name)
    fields: dict[str, Any] = {
        "hidden_size": s.h,
        "intermediate_size": s.i,
        "num_hidden_layers": layers or s.l,
        "num_attention_heads": s.a,
        "num_key_value_heads": s.k,
        "vocab_size": s.v,
        "max_position_embeddings": s.p,
        "tie_word_embeddings": s.tied,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if s.d:
        fields["head_dim"] = s.d
    if s.of == "mistral":
        fields["sliding_window"] = None
    elif s.of == "mixtral":
        fields |= {"num_local_experts": s.experts, "num_experts_per_tok": s.top}
        fields["sliding_window"] = None
    elif s.of == "gpt_bigcode":
        fields = {
            "n_embd": s.h, "n_inner": s.i, "n_layer": layers or s.l, "n_head": s.a,
            "multi_query": s.k == 1, "vocab_size": s.v, "n_positions": s.p,
            "activation_function": "gelu_pytorch_tanh", "tie_word_embeddings": s.tied,
            "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
        }  # fmt: skip
    elif s.of == "granite":
        fields |= {"logits_scaling": 9.0}
    elif s.of in ("phi", "gpt_neox"):
        fields["rope_parameters"] = {
            "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": s.rotary,
        }  # fmt: skip
    return AutoConfig.for_model(s.of, **fields)
