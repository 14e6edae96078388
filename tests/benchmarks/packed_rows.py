"""Packed rows under SDPA: where Transformers keeps documents apart, and where it does not.

    python -m tests.benchmarks.packed_rows

Three documents in one row, with `position_ids` that begin at 0 in each. Gradients of the packaged
Llama's weights are compared with those of one forward per document: with `use_cache=False` as TRL
trains, at its default, and with a mask of ones; then alike with `varlen` attention, which also
gets the boundaries that TRL's collator makes. Where documents see each other, no warning is given.
"""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM

from finetune.config.paths import ASSETS
from finetune.training.helper.varlen import register

LENGTHS = (31, 64, 33)
CALLS = {
    "use_cache=False, as TRL trains": {"use_cache": False},
    "use_cache at its default": {},
    "use_cache=False, a mask of ones": {
        "use_cache": False,
        "attention_mask": torch.ones(1, sum(LENGTHS), dtype=torch.long),
    },
}


def gradients(model: torch.nn.Module, weights: torch.Tensor, calls: list[dict]) -> torch.Tensor:
    """Gradient of the weighted logits of all calls, as one vector."""
    model.zero_grad()
    logits = torch.cat([model(**call).logits for call in calls], dim=1)
    (logits * weights).sum().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def errors() -> dict[str, float]:
    """Kind of call -> relative error of the gradients."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(
        ASSETS / "tiny_llama", attn_implementation="sdpa", dtype=torch.float32
    )
    ids = torch.randint(model.config.vocab_size, (1, sum(LENGTHS)))
    weights = torch.randn(1, sum(LENGTHS), model.config.vocab_size)
    documents = [{"input_ids": part, "use_cache": False} for part in ids.split(LENGTHS, dim=1)]
    expected = gradients(model, weights, documents)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    packed = {"input_ids": ids, "position_ids": positions}
    found = {name: gradients(model, weights, [packed | more]) for name, more in CALLS.items()}
    register()
    model.set_attn_implementation("varlen")
    ends = torch.tensor((0, *LENGTHS)).cumsum(0)
    for name, more in CALLS.items():
        call = packed | more | {"cu_seq_lens_q": ends, "max_length_q": max(LENGTHS)}
        found[f"varlen: {name}"] = gradients(model, weights, [call])
    return {name: ((got - expected).norm() / expected.norm()).item() for name, got in found.items()}


def main() -> None:
    """Print the relative error of the gradients for each kind of call."""
    print("| call on packed rows | gradient error |\n|---|---|")
    for name, error in errors().items():
        print(f"| {name} | {error:.1e} |")


if __name__ == "__main__":
    main()
