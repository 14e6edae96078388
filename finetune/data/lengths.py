"""Lengths of rows before truncation, and what each `train.max_length` costs.

    needed    tokens of a row up to its last trained one
    auto      the longest of these; where that is more than twice what all but one row of 200 need,
              what these need. Rounded up to `train.pad_to_multiple_of`; never more than the
              model's positions (`max_position_embeddings`)

Example: of 1,000 rows the five longest need 9,000, 910, 900, 890 and 880 tokens, the next 870: it
is 870, and five rows are cut. Of 100 rows none is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from finetune.config.methods import method_of
from finetune.config.schema import RunConfig
from finetune.config.sft import padding_free
from finetune.units import percent

RARE, VERY_LONG = 200, 2
"""Of so many rows one may be cut, where it is so many times as long as the others."""
SHARES = (50, 90, 95, 99, 100)
"""Percentiles that are shown; the last is the longest row."""
POWERS = 4
"""Powers of two that are shown, the highest of those between half of the rows and the longest."""


@dataclass(frozen=True)
class Lengths:
    """Tokens of rows before truncation.

    Attributes:
        whole: tokens of each row, [rows]; of a pair its prompt and the longer answer.
        needed: of these, tokens up to the last trained one, [rows].
        trained: trained tokens of all rows by their distance from the end that is kept, [longest].
    """

    whole: np.ndarray
    needed: np.ndarray
    trained: np.ndarray

    def of_rows(self, answers: int) -> Lengths:
        """Of rows that have so many sequences each, one behind another."""
        whole, needed = (x.reshape(-1, answers).max(axis=1) for x in (self.whole, self.needed))
        return replace(self, whole=whole, needed=needed)

    @classmethod
    def joined(cls, parts: list[Lengths]) -> Lengths:
        """Of the rows of several data sets."""
        longest = max(part.trained.size for part in parts)
        trained = [np.pad(part.trained, (0, longest - part.trained.size)) for part in parts]
        whole, needed = ([getattr(x, name) for x in parts] for name in ("whole", "needed"))
        return cls(np.concatenate(whole), np.concatenate(needed), np.sum(trained, axis=0))

    def percentiles(self) -> dict[int, int]:
        """Percentile -> tokens that so many of a hundred rows do not exceed."""
        # A length that some row has, not one between two of them.
        found = np.percentile(self.whole, SHARES, method="inverted_cdf")
        return dict(zip(SHARES, found.astype(int).tolist(), strict=True))

    def auto(self, multiple: int, most: int | None) -> int:
        """Row length of `train.max_length: auto`, in tokens.

        Args:
            multiple: that it is rounded up to.
            most: positions of the model; None without a limit.
        """
        order = np.sort(self.needed)
        usual, longest = int(order[-1 - order.size // RARE]), int(order[-1])
        # A few rows far longer than all others would set the memory of each batch.
        rounded = _rounded(usual if longest > VERY_LONG * usual else longest, multiple)
        return min(rounded, most or rounded)

    def costs(self, config: RunConfig) -> Iterator[dict[str, str]]:
        """A row of a table for each of some row lengths: what is cut, and what a step holds."""
        train, text = config.train, method_of(config.train).is_text
        multiple, most = limits(config)
        chosen, own = self.auto(multiple, most), train.max_length
        half, longest = self.percentiles()[50], int(self.whole.max())
        powers = (1 << n for n in range(half.bit_length(), (longest - 1).bit_length())[-POWERS:])
        longest = _rounded(longest, multiple)
        each = int(train.per_device_train_batch_size)
        shown = {one for one in (*powers, longest) if one <= (most or one)}
        for limit in sorted({chosen, own or chosen, *shown}):
            marks = " (auto)" * (limit == chosen) + " (now)" * (limit == own)
            rows, lost = int((self.whole > limit).sum()), int(self.trained[limit:].sum())
            width = limit if train.packing else min(limit, longest)
            row = {
                "train.max_length": f"{limit:,}{marks}",
                "rows cut": f"{rows:,} ({percent(rows / self.whole.size)})",
                "trained tokens lost": f"{lost:,} ({percent(lost / max(1, self.trained.sum()))})",
                "tokens in a micro-batch": f"{each * method_of(train).texts * width:,}",
            }
            if text and not padding_free(train):
                row["padding"] = percent(self.padding(limit, each), 0)
            yield row

    def padding(self, limit: int, rows: int) -> float:
        """Share of padding in micro-batches of so many rows in random order."""
        # Drawn once with a seed: the same table each time.
        kept = np.random.default_rng(0).permutation(np.minimum(self.whole, limit))
        rows = min(rows, kept.size)
        batches = kept[: kept.size // rows * rows].reshape(-1, rows)
        return float(1 - batches.sum() / (batches.max(axis=1).sum() * rows))


def _rounded(length: int, multiple: int) -> int:
    return max(1, -(-length // multiple)) * multiple


def limits(config: RunConfig) -> tuple[int, int | None]:
    """What a row length is a multiple of, and the positions of the model."""
    from finetune.storage.pretrained import load_shape, positions

    return config.train.row_multiple, positions(load_shape(config.model))
