"""Mixtral's experts as transformers held them before 5: linear layers, run one expert at a time.

Version 5 holds all experts of a layer in two three-dimensional parameters, which 4-bit libraries
and FSDP of that time never met. Routing depends on the data; here every expert gets an equal share
of tokens, as a loss for balance asks of it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class _Expert(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(hidden, inner, bias=False)
        self.w2 = nn.Linear(inner, hidden, bias=False)
        self.w3 = nn.Linear(hidden, inner, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class ExpertsOneByOne(nn.Module):
    """`MixtralSparseMoeBlock` of transformers 4.36 to 4.57."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.top = config.num_experts_per_tok
        self.gate = nn.Linear(config.hidden_size, config.num_local_experts, bias=False)
        self.experts = nn.ModuleList(
            _Expert(config.hidden_size, config.intermediate_size)
            for _ in range(config.num_local_experts)
        )

    def forward(self, hidden_states: Tensor) -> Tensor:
        """hidden_states [B, L, H] -> [B, L, H]."""
        batch, length, size = hidden_states.shape
        x = hidden_states.view(-1, size)
        chances = F.softmax(self.gate(x), dim=1, dtype=torch.float)
        chances, chosen = torch.topk(chances, self.top, dim=-1)
        chances = chances / chances.sum(dim=-1, keepdim=True)
        chances = chances.to(x.dtype)
        final = torch.zeros_like(x)
        mask = F.one_hot(chosen, len(self.experts)).permute(2, 1, 0)
        share = x.shape[0] * self.top // len(self.experts)
        for expert in self.experts:
            tokens = mask.new_empty(share)
            ranks = mask.new_empty(share)
            inner = x[None, tokens].reshape(-1, size)
            out = expert(inner) * chances[tokens, ranks, None]
            final.index_add_(0, tokens, out.to(x.dtype))
        return final.view(batch, length, size)


def separate_experts(model: Any) -> None:
    """Put `ExpertsOneByOne` in the place of every block of experts of `model`, in place."""
    for layer in model.model.layers:
        with torch.device("meta"):
            layer.mlp = ExpertsOneByOne(model.config).to(model.dtype)
