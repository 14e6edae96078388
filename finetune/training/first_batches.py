"""The first rows as the trainer's own collator and loss see them, beside what the template prints.

A trainer of TRL reads the columns that it knows, cuts, masks and pads, and says nothing of a column
that it does not read. So before the first step some rows go its whole way: its preparation, its
collator, its loss. What reaches the model, and which positions of it have a gradient, is compared
with the rows under the chat template:

    row ──> template ──────────────────────────────> ids, trained tokens ─┐
    row ──> preparation ─> collator ─> loss ─> model ─> ids, gradients ───┴─> equal, or an error

The model's layers run as in an evaluation, once. What they give is replaced by noise, the same for
each model, that the output head and the loss continue with: then a policy is equal to its
reference, no token is foreseen, and each position that counts has a gradient. None reaches the
layers, so it costs a forward of a few rows, and the head's backward.

Methods that write their answers have prompts alone to compare. These stand on the right of a batch,
behind padding, and the trainer passes no positions: a model that does not make them from the mask
(GPT-2) would score a short prompt's answer as that of another place. So two prompts are scored
alone and in one batch. Where that differs, positions are made of the mask, and it is tried again.
`python -m tests.benchmarks.first_batches` prints what becomes of each method and family.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor, nn

from finetune.data.both_labels import BothLabels
from finetune.data.ledger import Accounted
from finetune.data.masks import MASKED, as_trained
from finetune.errors import ConfigError, DataError
from finetune.logging import counting_rows, output
from finetune.precision.convert import conversion_of
from finetune.precision.layers import without_adapters
from finetune.training import session
from finetune.training.samples import undisturbed

LOOKED_AT, SHAPES = 256, 8
"""Rows among which others are looked for, and the most that are tried."""
ONE_LABEL = 64
"""Rows that may be read before both labels have occurred."""
EXACT, ROUNDED = 1e-3, 0.05
"""Scores of a prompt may differ by this part of the largest one: in float32, in 16 bits."""


@dataclass(frozen=True)
class LossTokens:
    """One sequence: its token ids, and for each whether it has a part in the loss."""

    ids: tuple[int, ...]
    trained: tuple[bool, ...]


def check_first_batches(trainer: Any) -> None:
    """Compare what the trainer's loss sees of its first rows with what they say.

    All processes run it.

    Args:
        trainer: one of `finetune.data.pairs.trainer_of`, whose model is prepared, and has not
            trained; of others nothing is known.

    Raises:
        DataError: other tokens reach the loss, or others are trained on, than the rows say.
        ConfigError: a prompt is scored otherwise behind padding than alone.
    """
    given = trainer.given["train"] if isinstance(trainer, Accounted) and trainer.given else None
    if not isinstance(given, Dataset) or "input_ids" in given.column_names:
        return
    _refuse_one_label(trainer)
    picked = different(given)
    rows = [dict(given[index]) for index in picked]
    if trainer.writes:
        first = map(dict, itertools.islice(given, LOOKED_AT))
        rows.append(max(first, key=lambda row: len(str(row["prompt"]))))
        prompts = [row["prompt"] for row in rows]
        read = [tuple(ids) for ids in trainer._tokenize_prompts(prompts)[0]]
        for row, ids in zip(rows, read, strict=True):
            _compare(
                trainer, [row], [_prompt(row, trainer)], [LossTokens(ids, (False,) * len(ids))]
            )
        with _evaluating(trainer):
            _score_alike(trainer, sorted({*read}, key=len))
        return
    if getattr(trainer.args, "precompute_ref_log_probs", False):
        return  # its loss takes scores of a reference, which noise has none of
    expected = [list(_expected(row, trainer)) for row in rows]
    with counting_rows(output(quiet=True), "looking at the first rows"):
        prepared = trainer.prepared(given, picked)
    with _evaluating(trainer):
        seen = list(_seen(trainer, prepared))
    _compare(trainer, rows, [one for each in expected for one in each], seen)


def _refuse_one_label(trainer: Any) -> None:
    """Refuse labelled rows of which the trainer would read one label alone for long."""
    rows = trainer.train_dataset
    if not isinstance(rows, Dataset) or not isinstance(trainer, BothLabels):
        return
    with undisturbed(trainer.model):
        first = list(itertools.islice(trainer._get_train_sampler(), ONE_LABEL))
    labels = {*rows.select(first)["label"]}
    if len(labels) < 2 and len(first) == ONE_LABEL:
        raise DataError(
            f"the first {ONE_LABEL} rows that are read have the label {str(*labels).lower()}",
            where=trainer.named,
            why="labelled rows are read in order, and those of the other label come behind them",
            fix="~train.train_sampling_strategy",
        )


def different(rows: Dataset) -> list[int]:
    """Positions of the first rows that differ in what they have: columns, roles and keys of turns.

    The shortest of the first ones stands for each, so that few tokens are computed.
    """
    first = [dict(row) for row in itertools.islice(rows, LOOKED_AT)]
    found: dict[Any, tuple[int, int]] = {}
    for index, row in enumerate(first):
        turns = [turn for value in row.values() if isinstance(value, list) for turn in value]
        keys = {
            (turn.get("role"), key)
            for turn in turns
            if isinstance(turn, dict)
            for key in turn
            if turn[key]
        }
        there = (key for key in row if row[key] not in (None, [], {}, ""))
        shape = (*sorted(there), *sorted(map(str, keys)))
        found[shape] = min(found.get(shape, (1 << 60, 0)), (len(str(row)), index))
    return sorted(index for _, index in list(found.values())[:SHAPES])


# ------------------------------------------------------------------------------ what the rows say


def _expected(row: dict[str, Any], trainer: Any) -> Iterator[LossTokens]:
    """Sequences of a row as the template prints them, an answer each."""
    tokenizer = trainer._tokenizer
    asked = {key: row[key] for key in ("prompt", "tools", "chat_template_kwargs") if key in row}
    answers = [key for key in ("chosen", "rejected") if key in row]
    parts = [{**asked, "completion": row[key]} for key in answers] or [row]
    only = trainer.only_answers or getattr(trainer, "completion_only_loss", True)
    found = [
        one for part in parts for one in as_trained(part, tokenizer, completion_only=bool(only))
    ]
    masks = [[label != MASKED for label in labels] for _, labels in found]
    if not trainer.is_text:  # what both answers begin with is their prompt's; all behind it counts
        begin = min(mask.index(True) for mask in masks)
        masks = [[place >= begin for place in range(len(mask))] for mask in masks]
    for number, ((ids, _), mask) in enumerate(zip(found, masks, strict=True)):
        if trainer.scores:
            mask = [False] * len(ids)
        elif trainer.prompts_train and number == 0:
            mask = [True] * len(ids)
        yield LossTokens(tuple(ids), (False, *mask[1:]))  # nothing foresees a first token


def _prompt(row: dict[str, Any], trainer: Any) -> LossTokens:
    from finetune.data.pairs import asked

    ids = asked(trainer._tokenizer, row, trainer.args)["prompt_ids"]
    return LossTokens(tuple(ids), (False,) * len(ids))


def _compare(
    trainer: Any, rows: list[dict[str, Any]], said: list[LossTokens], seen: list[LossTokens]
) -> None:
    """Raise `DataError` for a sequence that no row's is, ends apart, which the ledger counts."""
    limit = getattr(trainer.args, "max_length", None) or 1 << 60
    known = [
        _unended(LossTokens(one.ids[part], one.trained[part]), trainer._tokenizer)
        for one in said
        for part in (slice(limit), slice(max(0, len(one.ids) - limit), None))
    ]
    if not seen:
        raise DataError(
            "nothing of the first rows has a gradient",
            where=trainer.named,
            fix="look at the rows: python -m finetune data RECIPE --show 5",
        )
    for one in (_unended(one, trainer._tokenizer) for one in seen):
        if any(one.ids == x.ids and (trainer.scores or one == x) for x in known):
            continue
        near = max(known, key=lambda other: _shared(one.ids, other.ids))
        decode, at = trainer._tokenizer.decode, _shared(one.ids, near.ids)
        beside = [key for key in ("tools", "chat_template_kwargs") if any(map(_has(key), rows))]
        if near.ids != one.ids:
            what = "the trainer reads other tokens than the rows have under the chat template"
            parts = [decode(list(ids[at : at + 12])) or "nothing" for ids in (near.ids, one.ids)]
        else:
            what = "the loss is on other tokens than those that are to be trained on"
            parts = [
                decode([i for i, on in zip(x.ids, x.trained, strict=True) if on]) or "nothing"
                for x in (near, one)
            ]
        said_of = f" (the rows have {' and '.join(map(repr, beside))})" if beside else ""
        raise DataError(
            what,
            where=f"{trainer.named} and the first rows{said_of}",
            why=f"it should be {parts[0]!r:.200}, and is {parts[1]!r:.200}",
            fix="leave out a column that this method does not read, take another chat template "
            "(train.chat_template_path), or train.method=sft",
        )


def _unended(one: LossTokens, tokenizer: Any) -> LossTokens:
    """Without the end token, and white space, at its end."""
    size = len(one.ids)
    while size and (
        one.ids[size - 1] == tokenizer.eos_token_id
        or not tokenizer.decode([one.ids[size - 1]]).strip()
    ):
        size -= 1
    return LossTokens(one.ids[:size], one.trained[:size])


def _has(key: str) -> Any:
    return lambda row: bool(row.get(key))


def _shared(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


# ------------------------------------------------------------------------- what the trainer sees


@contextlib.contextmanager
def _evaluating(trainer: Any) -> Iterator[None]:
    """High precision, no dropout; the trainer's own metrics are as they were."""
    import copy

    kept = {key: copy.deepcopy(vars(trainer)[key]) for key in vars(trainer) if "metrics" in key}
    conversion = conversion_of(trainer.model)
    running = session.in_force()
    with contextlib.ExitStack() as stack:
        if running is not None and running.proof is not None:
            stack.enter_context(running.proof.aside())
        for engine in conversion.engines if conversion is not None else ():
            stack.enter_context(engine.computing(low=False))
        stack.enter_context(undisturbed(trainer.model))
        yield
    vars(trainer).update(kept)


def _seen(trainer: Any, prepared: list[dict[str, Any]]) -> Iterator[LossTokens]:
    """Sequences that reach the loss, of rows that the trainer has prepared."""
    from accelerate.utils import send_to_device

    model = trainer.accelerator.unwrap_model(trainer.model)
    size = trainer.args.per_device_train_batch_size
    pad = trainer._tokenizer.pad_token_id
    for begin in range(0, len(prepared), size):
        batch = trainer.data_collator(prepared[begin : begin + size])
        batch = send_to_device(batch, trainer.accelerator.device)
        with contextlib.ExitStack() as stack:
            calls: list[tuple[dict[str, Any], Tensor]] = []
            for one in filter(None, (model, getattr(trainer, "ref_model", None))):
                backbone = without_adapters(trainer.accelerator.unwrap_model(one)).base_model
                stack.enter_context(_as_noise(backbone, calls if one is model else []))
            stack.enter_context(torch.no_grad())  # up to the states
            stack.enter_context(trainer.compute_loss_context_manager())
            loss = trainer.compute_loss(model, batch)
            states = [states for _, states in calls]
            gradients = torch.autograd.grad(loss, states, allow_unused=True)
        for (inputs, _), gradient in zip(calls, gradients, strict=True):
            if gradient is not None:  # none of it: what an estimate reads beside
                found = _sequences(inputs, gradient)
                yield from (one for one in found if {*one.ids} != {pad})  # fills up a packed row


@contextlib.contextmanager
def _as_noise(backbone: nn.Module, calls: list[tuple[dict[str, Any], Tensor]]) -> Iterator[None]:
    """Layers without gradients, whose states are noise that has one; calls are noted."""
    signature = inspect.signature(backbone.forward)

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        torch.set_grad_enabled(False)

    def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        torch.set_grad_enabled(True)  # put back by the `no_grad` around the call
        noise = 0.1 * torch.randn(output[0].shape, generator=torch.Generator().manual_seed(0))
        states = noise.to(output[0]).requires_grad_()
        calls.append((signature.bind_partial(*args, **kwargs).arguments, states))
        output.last_hidden_state = states

    with (
        backbone.register_forward_pre_hook(before, with_kwargs=True),
        backbone.register_forward_hook(after, with_kwargs=True),
    ):
        yield


def _sequences(inputs: dict[str, Any], gradient: Tensor) -> Iterator[LossTokens]:
    """Sequences of one call: rows without padding, and documents of a row that has several."""
    ids, counts = inputs["input_ids"].cpu(), gradient.abs().amax(-1).gt(0).cpu()
    mask, places = inputs.get("attention_mask"), inputs.get("position_ids")
    for row in range(len(ids)):
        whole = torch.ones_like(ids[row], dtype=torch.bool)
        if isinstance(mask, Tensor) and mask.shape == ids.shape:
            whole = mask[row].cpu().bool()
        starts = [0]
        if isinstance(places, Tensor) and places.dim() == 2 and len(ids) == 1:
            starts = places[0].cpu().eq(0).nonzero().flatten().tolist()
        for begin, end in itertools.pairwise([*starts, ids.shape[1]]):
            own, on = (
                ids[row, begin:end][whole[begin:end]],
                counts[row, begin:end][whole[begin:end]],
            )
            if own.numel():
                yield LossTokens(tuple(own.tolist()), (False, *on[:-1].tolist()))


# --------------------------------------------------------------------------- behind padding


def _score_alike(trainer: Any, prompts: list[tuple[int, ...]]) -> None:
    """Make positions of the mask where a prompt is scored otherwise behind padding than alone."""
    if len(prompts) < 2 or len(prompts[0]) == len(prompts[-1]):
        return
    model = without_adapters(trainer.accelerator.unwrap_model(trainer.model))
    changed = partial(_change, trainer, prompts[0], prompts[-1])
    low = trainer.accelerator.native_amp or model.dtype != torch.float32
    if changed() <= (limit := ROUNDED if low else EXACT):
        return
    if "position_ids" in inspect.signature(model.forward).parameters:
        model.register_forward_pre_hook(place_by_mask, with_kwargs=True)
        if changed() <= limit:
            return
    raise ConfigError(
        f"{type(model).__name__} scores a prompt otherwise behind padding than alone",
        where=trainer.named,
        why="prompts stand on the right of a batch, and its layers read what stands before them: "
        f"the scores of a prompt changed by {changed():.0%} of the largest",
        fix="train.per_device_train_batch_size=1 train.num_generations=1 pads nothing where the "
        "method allows it; else train.method=sft or dpo, which pad on the right",
    )


def place_by_mask(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
    """Forward pre-hook: positions of tokens behind padding on the left, counted from the first."""
    mask, ids = kwargs.get("attention_mask"), kwargs.get("input_ids")
    given = kwargs.get("position_ids")
    if given is not None or not isinstance(mask, Tensor) or ids is None or mask.shape != ids.shape:
        return None
    return args, {**kwargs, "position_ids": (mask.long().cumsum(-1) - 1).clamp(min=0)}


def _change(trainer: Any, short: tuple[int, ...], long: tuple[int, ...]) -> float:
    """Change of a short prompt's scores behind padding: the largest, as a part of all."""
    from accelerate.utils import send_to_device

    pad, gap = trainer._tokenizer.pad_token_id, len(long) - len(short)
    ids = torch.tensor([[pad] * gap + list(short), long])
    mask = torch.ones_like(ids)
    mask[0, :gap] = 0
    one = {"input_ids": ids[:1, gap:], "attention_mask": mask[:1, gap:]}
    both = {"input_ids": ids, "attention_mask": mask}
    with torch.no_grad():
        alone, beside = (
            trainer.model(**send_to_device(batch, trainer.accelerator.device)).logits[0]
            for batch in (one, both)
        )
    return float((alone - beside[gap:]).float().abs().max() / alone.float().abs().max())
