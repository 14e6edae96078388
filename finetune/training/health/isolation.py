"""Isolation of the documents of a packed row, probed on the model that is about to train.

A row holds several documents behind one another. What keeps them apart is the model's own: masks
made from `position_ids`, a kernel that takes boundaries, states that are cleared. Models that make
masks without positions, and most of those with a recurrent state, let each document see those
before it, and nothing says so. So two short documents are passed as the trainer passes its rows,
then once more with another first document:

    [a a a a b b b b] ─> logits of b ─┐
    [c c c c b b b b] ─> logits of b ─┴─> other by more than rounding: the packing is refused

Shapes and kernels are the same, so any difference means that b sees the other document, with one
exception: experts multiply as many rows as the router sends them, and the order in which a kernel
adds depends on that number (3e-7 in float32). So where something differs, the same documents are
passed as separate rows of a plain batch, which cannot see one another, and what differs there is
rounding. The weakest leak that was found (Jamba, random weights) is 2e-2, and in BF16 experts on a
CPU do not differ at all.
`python -m tests.benchmarks.isolation` prints what becomes of each family.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from finetune.errors import ConfigError, FinetuneError, first_line
from finetune.precision.convert import conversion_of
from finetune.precision.model.layers import without_adapters
from finetune.training.helper.undisturbed import undisturbed

TOKENS = 8
"""Of each document: more than the short convolutions of recurrent layers reach back."""
NOISE = 4
"""Up to this multiple of the change in a plain batch counts as rounding."""


def refuse_leaks(trainer: Any) -> None:
    """Reject packed or padding-free rows if a document of theirs sees another one.

    The forwards, of 16 tokens, are as in an evaluation in high precision: no dropout, no scales
    of FP8 that tokens of a row share, nothing for the proof to count. All processes run them.

    Args:
        trainer: one whose model is prepared, and has not trained.

    Raises:
        ConfigError: documents see each other, or the model cannot be given their boundaries.
    """
    # Rows with padding are documents of their own, which a mask keeps apart.
    if not getattr(trainer, "padding_free", False):
        return
    model = without_adapters(trainer.accelerator.unwrap_model(trainer.model))
    name = type(model).__name__
    with contextlib.ExitStack() as stack:
        # FP8 scales follow all rows of a batch, so another document would change them, and seem a
        # leak.
        stack.enter_context(in_high_precision(trainer.model))
        stack.enter_context(torch.no_grad())
        try:
            change = _change(trainer, packed=True)
            # The plain batch is passed only where something differs: most models end here with
            # zero.
            leaks = change > 0 and change > NOISE * _change(trainer, packed=False)
        except (FinetuneError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # of the model's own code, whatever it is
            raise _refusal(f"{name} takes no packed rows", first_line(error)) from error
    if leaks:
        why = "its masks or states know no boundaries: other tokens in the first of two documents "
        why += f"changed the logits of the second by {change:.2g}"
        raise _refusal(f"{name} lets the documents of a packed row see each other", why)


@contextlib.contextmanager
def in_high_precision(model: nn.Module) -> Iterator[None]:
    """An evaluation in high precision, whatever `precision.eval` says."""
    conversion = conversion_of(model)
    with contextlib.ExitStack() as stack:
        for engine in conversion.engines if conversion is not None else ():
            stack.enter_context(engine.computing(low=False))
        stack.enter_context(undisturbed(model))
        yield


def _refusal(what: str, why: str) -> ConfigError:
    return ConfigError(
        what,
        where="train.packing or train.padding_free",
        why=why,
        fix="train.packing=false train.padding_free=false (SFTConfig's, in a script): each document"
        " is a padded row of its own; where model.attention was chosen, ~model.attention may do",
    )


def _change(trainer: Any, *, packed: bool) -> float:
    """Largest change of the second document's logits if the first has other tokens."""
    before, after = (_second(trainer, part, packed=packed) for part in (0, 1))
    return float((before - after).abs().max())


def _second(trainer: Any, first: int, *, packed: bool) -> Tensor:
    """Logits [TOKENS, vocabulary] of the second document, behind one of two first ones."""
    from accelerate.utils import send_to_device

    model = trainer.model
    config: Any = without_adapters(trainer.accelerator.unwrap_model(model)).config
    words = config.get_text_config(decoder=True).vocab_size // 4
    # From the middle of the vocabulary, where no tokens of padding, pictures or turns are.
    rows = [[words * part + i for i in range(TOKENS)] for part in (first + 1, 3)]
    batch: Any = {"input_ids": torch.tensor(rows)}
    if packed:
        batch = trainer.data_collator([{"input_ids": row, "labels": row} for row in rows])
        del batch["labels"]
    # Without a cache, which some models would fill across documents.
    logits = model(**send_to_device(batch, trainer.accelerator.device), use_cache=False).logits
    return logits.flatten(0, 1)[TOKENS : 2 * TOKENS].float()
