"""What the trained model says: greedy answers to a few prompts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from finetune.config import RunConfig
from finetune.data import Rows


@dataclass(frozen=True)
class Sample:
    """A prompt and what the trained model says to it (greedy)."""

    prompt: str
    answer: str


def prompts_of(config: RunConfig, rows: Rows) -> list[str]:
    """The recipe's prompts, or those of the first held-out rows."""
    if config.data.prompts:
        return list(config.data.prompts)
    held_out = rows.eval if rows.eval is not None else rows.train
    prompts = []
    row: Any
    for row in held_out.select(range(min(2, len(held_out)))):
        turns = row.get("messages") or row.get("prompt") or row.get("text", "")[:64]
        prompts.append(turns if isinstance(turns, str) else turns[0]["content"])
    return prompts


def answer(
    model: Any,
    tokenizer: Any,
    prompts: list[str],
    max_new_tokens: int = 48,
) -> list[Sample]:
    """Greedy answers, in evaluation mode."""
    import torch

    model.eval()
    samples = []
    for prompt in prompts:
        if tokenizer.chat_template:
            turns = [{"role": "user", "content": prompt}]
            inputs = tokenizer.apply_chat_template(
                turns, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
        else:
            inputs = tokenizer(prompt, return_tensors="pt")
        inputs = {
            key: value.to(model.device)
            for key, value in inputs.items()
            if key in ("input_ids", "attention_mask")
        }
        with torch.no_grad():
            tokens = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
        said = tokens[0, inputs["input_ids"].shape[1] :]
        samples.append(
            Sample(prompt, str(tokenizer.decode(said, skip_special_tokens=True)).strip())
        )
    return samples
