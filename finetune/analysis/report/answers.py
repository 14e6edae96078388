"""Answers of a run's model to the prompts that are asked at each evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from finetune.analysis.report.elements import METRICS, REPORT, Cell, Source

EMPTY = "(empty answer)"
SHOWN_ANSWERS = 6
"""Answers to a prompt that are shown: the first, the last, and some between that differ."""
SHOWN_PROMPTS = 4
"""Prompts whose answers before and after stand at the top."""


@dataclass(frozen=True)
class Answers(Source):
    """A run folder, with its answers; those of one prompt are pairs (when, answer)."""

    def answers_of(self, number: int) -> Iterator[tuple[str, str, str, str, int]]:
        """Yield (prompt, answer, file, key, step) of one evaluation; -1 is the last."""
        found = self.run.samples
        step, pairs = found[number]
        final = found[number] is found[-1] and pairs == self.run.report.get("samples")
        file, key = (REPORT, "samples") if final else (METRICS, f"samples at step {step}")
        for pair in pairs:
            yield str(pair.get("prompt", "")), str(pair.get("answer", "")), file, key, step

    @cached_property
    def _said(self) -> dict[str, list[tuple[Cell, str]]]:
        """All answers to each prompt, (when, answer)."""
        prompts: dict[str, list[tuple[Cell, str]]] = {}
        for number in range(len(self.run.samples)):
            for prompt, answer, file, key, step in self.answers_of(number):
                text = "after training" if file == REPORT else f"step {step:,}"
                when = self.num("before training" if not step else text, file, key)
                prompts.setdefault(prompt, []).append((when, answer or EMPTY))
        return prompts

    @property
    def answers(self) -> dict[str, list[tuple[Cell, str]]]:
        """Answers to each prompt in the course of training, where they change."""
        shown = {}
        for prompt, said in self._said.items():
            changed = [i for i in range(1, len(said) - 1) if said[i][1] != said[i - 1][1]]
            kept = [0, *changed, *([len(said) - 1] if len(said) > 1 else [])]
            at = np.linspace(0, len(kept) - 1, min(len(kept), SHOWN_ANSWERS)).round().astype(int)
            shown[prompt] = [said[kept[i]] for i in at]
        return shown

    @property
    def asked_before(self) -> bool:
        """True if the first answers are those of the model before training."""
        return bool(self.run.samples) and not self.run.samples[0][0]

    @property
    def before_after(self) -> dict[str, list[tuple[Cell, str]]]:
        """First and last answer to the first prompts."""
        ends = {prompt: [said[0], said[-1]] for prompt, said in self._said.items() if said[1:]}
        return dict(list(ends.items())[:SHOWN_PROMPTS])

    @property
    def answers_between(self) -> dict[str, list[tuple[Cell, str]]]:
        """Answers that `before_after` does not show, with those that it does."""
        ends = self.before_after
        return {p: said for p, said in self.answers.items() if said[2:] or p not in ends}
