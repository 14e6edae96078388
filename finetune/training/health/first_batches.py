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
(GPT-2) would score a short prompt's answer as if it stood elsewhere. So two prompts are scored
alone and in one batch. Where that differs, positions are made of the mask, and it is tried again.
Prompts with images go through a step that learns, of answers that are an end token each: ids, types
of tokens and pixels that reach the model then are compared with those that the processor makes.
`python -m tests.benchmarks.first_batches` prints what becomes of each method and family.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from accelerate.data_loader import get_sampler
from datasets import Dataset
from torch import Tensor, nn

from finetune.config.train_keys import TrainerArguments
from finetune.data.image_batches import pictures_of, sides_of
from finetune.data.image_forms import COLUMN
from finetune.data.image_prompts import with_pictures
from finetune.data.image_rows import as_pair, as_prompt, as_sequences
from finetune.data.masks import MASKED, as_trained, shared
from finetune.data.preparing import Accounted
from finetune.errors import ConfigError, DataError
from finetune.hardware.unpromised import READS_PROMPTS, stands
from finetune.logging import counting_rows, output
from finetune.precision.model.layers import without_adapters
from finetune.storage.processors import as_read, tokenizer_of
from finetune.training.health.isolation import in_high_precision
from finetune.training.helper import session
from finetune.training.helper.replacing import replaced
from finetune.training.helper.undisturbed import undisturbed

LOOKED_AT, SHAPES = 256, 8
"""Rows among which others are looked for, and the most that are tried."""
ONE_LABEL = 64
"""Rows that may be read before both labels have occurred."""
EXACT, ROUNDED = 1e-3, 0.05
"""Scores of a prompt may differ by this part of the largest one: in float32, in 16 bits."""


Tokens = tuple[tuple[int, bool], ...]
"""One sequence: its token ids, and for each whether it has a part in the loss."""


def check_first_batches(trainer: Any) -> None:
    """Compare what the trainer's loss sees of its first rows with what they say.

    All processes run it.

    Args:
        trainer: one of `trl_trainer.trainer_of`, whose model is prepared, and has not
            trained; of others nothing is known.

    Raises:
        DataError: other tokens reach the loss, or others are trained on, than the rows say.
        ConfigError: a prompt is scored otherwise behind padding than alone.
    """
    given = trainer.given if isinstance(trainer, Accounted) else None
    # Ids are read as they are, and a stream's first rows would fill its shuffle buffer.
    if not isinstance(given, Dataset) or "input_ids" in given.column_names:
        return
    _refuse_one_label(trainer)
    picked = different(given)
    rows = [dict(given[index]) for index in picked]
    if trainer.method.writes:
        from finetune.data.pairs import asked

        # The longest one beside short ones makes the padding that is to be looked at.
        rows.append(max(_some(given).values(), key=lambda row: len(str(row["prompt"]))))
        words = tokenizer_of(trainer.processing_class)
        if COLUMN in given.column_names:
            if stands("prompts"):
                _check_prompts(trainer, rows)
            return
        read = [asked(words, row, trainer.args)["prompt_ids"] for row in rows]
        if stands("prompts"):
            found = getattr(trainer, READS_PROMPTS)([row["prompt"] for row in rows])[0]
            for row, said, ids in zip(rows, read, found, strict=True):
                _compare(trainer, [row], [_untrained(said)], [_untrained(ids)])
        with _evaluating(trainer):
            read.sort(key=len)
            _score_alike(trainer, read, partial(_padded, words.pad_token_id))
        return
    if TrainerArguments(trainer.args).precompute_ref_log_probs:
        return  # its loss takes scores of a reference, which noise has none of
    images = COLUMN in given.column_names
    said = [one for row in rows for one in _of_images(row, trainer)] if images else []
    expected = [tokens for tokens, _ in said]
    if not images:
        expected = [one for row in rows for one in _expected(row, trainer)]
    with counting_rows(output(quiet=True), "looking at the first rows"):
        prepared = trainer.prepared(given, picked)
    if not prepared:
        return  # each is cut before its answer begins: rows that are left out, and counted
    with _evaluating(trainer):
        seen = list(_seen(trainer, prepared, 1 if images else None))
    _compare(trainer, rows, expected, [tokens for tokens, _ in seen])
    for tokens, pixels in seen if images else ():
        _compare_pixels(trainer, _ids(tokens), pixels, said)


def _refuse_one_label(trainer: Any) -> None:
    """Refuse labelled rows of which the trainer would read one label alone for long."""
    rows = trainer.train_dataset
    if not isinstance(rows, Dataset) or "unpaired" not in trainer.method.rows:
        return
    with undisturbed(trainer.model):
        order: Any = get_sampler(trainer.get_train_dataloader())
        # `undisturbed` puts the generators back: drawing an order here must not change the order of
        # training.
        first = list(itertools.islice(order, ONE_LABEL))
    labels = {*rows.select(first)["label"]}
    if len(labels) < 2 and len(first) == ONE_LABEL:
        raise DataError(
            f"the first {ONE_LABEL} rows that are read have the label {str(*labels).lower()}",
            where=trainer.method.key,
            why="labelled rows are read in order, and rows of the other label come behind them",
            fix="~train.train_sampling_strategy",
        )


def _some(rows: Dataset) -> dict[int, dict[str, Any]]:
    """Rows at equal distances, by position: the first ones of a file may be of one kind."""
    return {i: dict(rows[i]) for i in range(0, len(rows), max(1, -(-len(rows) // LOOKED_AT)))}


def different(rows: Dataset) -> list[int]:
    """Positions of rows that differ in what they have: columns, roles and keys of turns.

    The shortest stands for each, so that few tokens are computed, and none is cut.
    """
    found: dict[Any, tuple[int, int]] = {}
    for index, row in _some(rows).items():
        turns = [turn for value in row.values() if isinstance(value, list) for turn in value]
        turns = [turn for turn in turns if isinstance(turn, dict)]
        keys = {str((turn.get("role"), key)) for turn in turns for key in turn if turn[key]}
        there = {key for key in row if row[key] not in (None, [], {}, "")}
        shape = (*sorted(there), *sorted(keys))
        # The shortest of each shape is the cheapest to look at.
        size = len(str({key: value for key, value in row.items() if key != COLUMN}))
        found[shape] = min(found.get(shape, (1 << 60, 0)), (size, index))
    return sorted(index for _, index in list(found.values())[:SHAPES])


# ------------------------------------------------------------------------------ what the rows say


def _expected(row: dict[str, Any], trainer: Any) -> Iterator[Tokens]:
    """Sequences of a row as the template prints them, an answer each."""
    asked = {key: row[key] for key in ("prompt", "tools", "chat_template_kwargs") if key in row}
    answers = [key for key in ("chosen", "rejected") if key in row]
    parts = [{**asked, "completion": row[key]} for key in answers] or [row]
    only = bool(trainer.only_answers or getattr(trainer, "completion_only_loss", True))
    each = partial(as_trained, tokenizer=trainer.processing_class, completion_only=only)
    found = [(ids, np.asarray(labels) != MASKED) for part in parts for ids, labels in each(part)]
    if not trainer.method.is_text:  # what both answers begin with is their prompt's; all behind
        # TRL's methods of preference train on all of an answer, whatever the template marks in it.
        begin = min(mask.argmax() for _, mask in found)  # it counts
        for _, mask in found:
            mask[begin:] = True
    if trainer.method.prompts_train:
        found[0][1][:] = True
    yield from (tuple(zip(ids, mask.tolist(), strict=True)) for ids, mask in found)


def _of_images(row: dict[str, Any], trainer: Any) -> Iterator[tuple[Tokens, Tensor | None]]:
    """Sequences of a row with images, and the pixels that the processor itself makes of each."""
    reader = trainer.processing_class
    if trainer.method.is_text:
        pairs = "prompt" in row and bool(trainer.completion_only_loss)
        only = trainer.only_answers or pairs
        made = as_sequences(row, reader, only_answers=only, completion_only=pairs)
    else:
        made = as_pair(row, reader)
    for one in made:
        for side in sides_of([one]):
            found = as_read(reader, [side.text], [side.images], return_tensors="pt")
            yield tuple(zip(side.ids, side.on, strict=True)), found.get("pixel_values")


def _compare_pixels(
    trainer: Any, ids: list[int], pixels: Tensor | None, said: list[tuple[Tokens, Tensor | None]]
) -> None:
    """Raise `DataError` where a sequence reaches the model with other pixels than its row's."""
    for tokens, due in said:
        same = due is pixels is None or (
            due is not None and pixels is not None and torch.equal(due, pixels.cpu())
        )
        if _ids(tokens)[: len(ids)] == ids and same:
            return
    raise _other_pixels(trainer)


def _other_pixels(trainer: Any) -> DataError:
    return DataError(
        "the model sees other pixels than the rows have",
        where=f"{trainer.method.key} and the first rows",
        why="an image reaches it otherwise than the model's processor makes it",
        fix="look at the rows: python -m finetune data RECIPE --show 5; leave the files of a data "
        "set as they are while a run reads them",
    )


def _check_prompts(trainer: Any, rows: list[dict[str, Any]]) -> None:
    """Compare prompts with images, as a step learns of them, with what the processor makes.

    Raises:
        DataError: as `check_first_batches`.
        ConfigError: the same; or the trainer takes no images of this family.
    """
    template = TrainerArguments(trainer.args).chat_template_kwargs or {}
    said = [next(as_prompt(row, trainer.processing_class, template=template)) for row in rows]
    # Of two with the same ids one: of both, nobody could tell which is which.
    known = {tuple(one["prompt_ids"]): at for at, one in enumerate(said)}
    batch = partial(_read, trainer.processing_class)
    with _evaluating(trainer):
        seen = _learned(trainer, [rows[at] for at in known.values()])
        found = [tuple(ids[:-1].tolist()) for ids in _unpadded(seen, "input_ids")]
        if others := [one for one in found if one not in known]:
            due = [_untrained(one["prompt_ids"]) for one in said]
            _compare(trainer, rows, due, [*map(_untrained, others)])
        made = batch([said[known[ids]] for ids in found if ids in known])
        if lost := made.keys() - seen.keys():
            raise _not_taken(trainer, sorted(lost))
        # Others than these were refused, but for their ends.
        if len(made["input_ids"]) != len(found) or not all(_same(made, seen, key) for key in made):
            raise _other_pixels(trainer)
        _score_alike(trainer, sorted(said, key=lambda one: one["length"]), batch)


def _same(made: dict[str, Tensor], seen: dict[str, Any], name: str) -> bool:
    """True if a batch that reached the model has what was made of its prompts under this name."""
    if made[name].shape[:2] != made["input_ids"].shape:
        return torch.equal(made[name], seen[name].cpu())
    pairs = zip(_unpadded(made, name), _unpadded(seen, name), strict=True)
    return all(torch.equal(one, other[:-1]) for one, other in pairs)  # the last is an answer's


def _unpadded(batch: dict[str, Any], name: str) -> list[Tensor]:
    """Rows of what a batch has of each token."""
    rows = zip(batch[name].cpu(), batch["attention_mask"].cpu().bool(), strict=True)
    return [row[on] for row, on in rows]


def _read(reader: Any, prompts: list[dict[str, Any]]) -> dict[str, Tensor]:
    """A batch of prompts with images, which stand on its right, as the processor makes it."""
    images = [pictures_of(one) for one in prompts]
    texts = [one["texts"][0] for one in prompts]
    return dict(reader(images=images, text=texts, padding=True, return_tensors="pt"))


def _not_taken(trainer: Any, names: list[str]) -> ConfigError:
    return ConfigError(
        f"{trainer.method.trainer} takes no images of {type(trainer.processing_class).__name__}",
        where=trainer.method.key,
        why=f"{', '.join(names)} of its processor would not reach the model",
        fix="a model of another family, such as Qwen/Qwen3-VL-4B-Instruct; or train.method=sft or "
        "dpo, which take it",
    )


def _learned(trainer: Any, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    """What reaches the model of rows when it learns: two answers to each, the end token alone.

    All of it is TRL's but the writing and the judging: of the two one is rewarded.
    """
    model = trainer.accelerator.unwrap_model(trainer.model)
    end = tokenizer_of(trainer.processing_class).eos_token_id

    def written(prompts: list[Any], _: Any) -> dict[str, Any]:
        asked = getattr(trainer, READS_PROMPTS)(prompts)[0]
        answers = {"completion_ids": [end], "logprobs": [0.0]}
        return {"prompt_ids": asked} | {key: [one] * len(asked) for key, one in answers.items()}

    def judged(completions: list[Any], **_: Any) -> list[float]:
        return [float(at % 2) for at in range(len(completions))]

    columns = with_pictures({key: [row[key] for row in rows] for key in rows[0]})
    shown = [dict(zip(columns, one, strict=True)) for one in zip(*columns.values(), strict=True)]
    aside: list[tuple[Any, str, Any]] = [
        (trainer, "rollout_func", written),
        (trainer, "reward_funcs", [judged] * len(trainer.reward_funcs)),
        (trainer, "num_generations", 2),
        (trainer, "num_iterations", 1),  # of more, scores are kept of answers as they are written
        (trainer, "use_vllm", False),
        (trainer, "beta", 0.0),  # no reference, which would take the step for one of training
        (trainer, "current_gradient_accumulation_steps", 1),  # which a training loop sets
        (trainer.args, "steps_per_generation", 1),
        (trainer.state, "num_input_tokens_seen", trainer.state.num_input_tokens_seen),
    ]  # the last is counted
    calls: list[tuple[dict[str, Any], Tensor]] = []
    with contextlib.ExitStack() as stack:
        for owner, name, value in aside:
            stack.enter_context(replaced(owner, name, value))
        stack.enter_context(torch.no_grad())
        stack.enter_context(_as_noise(without_adapters(model).base_model, calls))
        trainer.model.train()  # of a model that evaluates TRL makes batches another way
        trainer.prediction_step(trainer.model, [row for row in shown for _ in range(2)], True)
        trainer.model.eval()
    return calls[-1][0]


def _untrained(ids: Sequence[int]) -> Tokens:
    return tuple((token, False) for token in ids)


def _compare(
    trainer: Any, rows: list[dict[str, Any]], said: list[Tokens], seen: list[Tokens]
) -> None:
    """Raise `DataError` for a sequence that no row's is, ends apart, which the ledger counts."""
    method, tokenizer = trainer.method, tokenizer_of(trainer.processing_class)
    limit = TrainerArguments(trainer.args).max_length
    # Trainers keep the beginning of a long row or its end, by a setting of theirs.
    cuts = (slice(limit), slice(limit and -limit, None))
    parts = [one[cut] for one in said for cut in cuts]
    # Nothing foresees a first token.
    known = [_unended(_untrained(x[0][:1]) + x[1:], tokenizer) for x in parts]
    if not seen:
        raise DataError(
            "nothing of the first rows has a gradient",
            where=method.key,
            fix="look at the rows: python -m finetune data RECIPE --show 5",
        )
    for one in (_unended(one, tokenizer) for one in seen):
        ids = _ids(one)
        if any(one == x or (method.head == "score" and ids == _ids(x)) for x in known):
            continue
        near = max(known, key=lambda other: shared(ids, _ids(other)))
        if _ids(near) != ids:
            at = shared(ids, _ids(near))
            what = "the trainer reads other tokens than the rows have under the chat template"
            shown = [_ids(x)[at : at + 12] for x in (near, one)]
        else:
            what = "the loss is on other tokens than those that are to be trained on"
            shown = [[token for token, on in x if on] for x in (near, one)]
        beside = [key for key in ("tools", "chat_template_kwargs") if any(r.get(key) for r in rows)]
        columns = f" (the rows have {' and '.join(map(repr, beside))})" if beside else ""
        due, found = (tokenizer.decode(tokens) or "nothing" for tokens in shown)
        raise DataError(
            what,
            where=f"{method.key} and the first rows{columns}",
            why=f"it should be {due!r:.200}, and is {found!r:.200}",
            fix="leave out a column that this method does not read, take another chat template "
            "(train.chat_template_path), or train.method=sft",
        )


def _ids(tokens: Tokens) -> list[int]:
    return [token for token, _ in tokens]


def _unended(tokens: Tokens, tokenizer: Any) -> Tokens:
    """Without the end token, and white space, at its end."""
    while tokens and (
        tokens[-1][0] == tokenizer.eos_token_id or not tokenizer.decode([tokens[-1][0]]).strip()
    ):
        tokens = tokens[:-1]
    return tokens


# ------------------------------------------------------------------------- what the trainer sees


@contextlib.contextmanager
def _evaluating(trainer: Any) -> Iterator[None]:
    """High precision, no dropout; the trainer's own metrics are as they were."""
    import copy

    kept = {
        key: copy.deepcopy(value) for key, value in vars(trainer).items() if key.endswith("metrics")
    }
    running = session.in_force()
    with contextlib.ExitStack() as stack:
        if running is not None and running.proof is not None:
            stack.enter_context(running.proof.aside())
        stack.enter_context(in_high_precision(trainer.model))
        yield
    vars(trainer).update(kept)


def _seen(
    trainer: Any, prepared: list[dict[str, Any]], size: int | None
) -> Iterator[tuple[Tokens, Tensor | None]]:
    """Sequences that reach the loss, of rows that the trainer has prepared, and their pixels.

    Args:
        size: rows of a batch; None: as in training. Pixels are given for a batch of one row.
    """
    from accelerate.utils import send_to_device

    model = trainer.accelerator.unwrap_model(trainer.model)
    size = size or TrainerArguments(trainer.args).per_device_train_batch_size
    pad = tokenizer_of(trainer.processing_class).pad_token_id
    for begin in range(0, len(prepared), size):
        batch = trainer.data_collator(prepared[begin : begin + size])
        batch = send_to_device(batch, trainer.accelerator.device)
        with contextlib.ExitStack() as stack:
            calls: list[tuple[dict[str, Any], Tensor]] = []
            for one in filter(None, (model, getattr(trainer, "ref_model", None))):
                backbone = without_adapters(trainer.accelerator.unwrap_model(one)).base_model
                stack.enter_context(_as_noise(backbone, calls if one is model else []))
            stack.enter_context(trainer.compute_loss_context_manager())
            loss = trainer.compute_loss(model, batch)
            states = [states for _, states in calls]
            gradients = torch.autograd.grad(loss, states, allow_unused=True)
        for (inputs, _), gradient in zip(calls, gradients, strict=True):
            if gradient is not None:  # none of it: what an estimate reads beside
                found = [*_sequences(inputs, gradient)]
                pixels = inputs.get("pixel_values")
                each = [None] * len(found) if pixels is None else pixels.chunk(len(found))
                for one, own in zip(found, each, strict=False):
                    if {*_ids(one)} - {pad}:  # else it fills up a packed row
                        yield one, own


@contextlib.contextmanager
def _as_noise(backbone: nn.Module, calls: list[tuple[dict[str, Any], Tensor]]) -> Iterator[None]:
    """Layers without gradients, whose states are noise that has one; calls are noted."""
    forward = backbone.forward

    @functools.wraps(forward)
    def noisy(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            output = forward(*args, **kwargs)
        # Small, so that no softmax saturates and each position's gradient can be told from zero.
        noise = 0.1 * torch.randn(output[0].shape, generator=torch.Generator().manual_seed(0))
        output.last_hidden_state = noise.to(output[0]).requires_grad_()
        inputs = inspect.signature(forward).bind_partial(*args, **kwargs).arguments
        calls.append((inputs, output.last_hidden_state))
        return output

    with replaced(backbone, "forward", noisy):
        yield


def _sequences(inputs: dict[str, Any], gradient: Tensor) -> Iterator[Tokens]:
    """Sequences of one call: rows without padding, and documents of a row that has several."""
    ids, mask = inputs["input_ids"], inputs.get("attention_mask")
    positions = inputs.get("position_ids")
    if not isinstance(mask, Tensor) or mask.shape != ids.shape:
        mask = torch.ones_like(ids)
    starts = list[int]()
    if isinstance(positions, Tensor) and positions.dim() == 2 and len(ids) == 1:
        starts = positions[0].eq(0).nonzero().flatten().tolist()
    for row in zip(ids, mask.bool(), gradient.abs().amax(-1).gt(0), strict=True):
        for own, whole, on in zip(*(x.cpu().tensor_split(starts) for x in row), strict=True):
            # A state foresees the next token: the gradient at a position belongs to the
            # token behind it.
            counts = (False, *on[whole][:-1].tolist())
            yield tuple(zip(own[whole].tolist(), counts, strict=False))


# --------------------------------------------------------------------------- behind padding


def _score_alike(trainer: Any, prompts: list[Any], batch: Callable[[list[Any]], Any]) -> None:
    """Make positions of the mask where a prompt is scored otherwise behind padding than alone.

    Args:
        prompts: the shortest first, the longest last.
        batch: makes a batch of some, padded on the left.
    """
    alone, beside = (dict(batch(some)) for some in (prompts[:1], [prompts[0], prompts[-1]]))
    if alone["input_ids"].shape[1] == beside["input_ids"].shape[1]:
        return
    model = without_adapters(trainer.accelerator.unwrap_model(trainer.model))
    changed = partial(_change, trainer, alone, beside)
    low = trainer.accelerator.native_amp or model.dtype != torch.float32
    if changed() <= (limit := ROUNDED if low else EXACT):
        return
    # Images have places of their own in some families, which no mask tells.
    if (
        "position_ids" in inspect.signature(model.forward).parameters
        and "pixel_values" not in beside
    ):
        # It stays: training needs the same positions as this look.
        model.register_forward_pre_hook(place_by_mask, with_kwargs=True)
        if changed() <= limit:
            return
    raise ConfigError(
        f"{type(model).__name__} scores a prompt otherwise behind padding than alone",
        where=trainer.method.key,
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


def _padded(pad: int, prompts: list[list[int]]) -> dict[str, Tensor]:
    """A batch of prompts, which stand on its right."""
    from torch.nn.utils.rnn import pad_sequence

    rows = [torch.tensor(row) for row in prompts]
    left = functools.partial(pad_sequence, batch_first=True, padding_side="left")
    mask = left([torch.ones_like(row) for row in rows])
    return {"input_ids": left(rows, padding_value=pad), "attention_mask": mask}


def _change(trainer: Any, alone: dict[str, Tensor], beside: dict[str, Tensor]) -> float:
    """Change of a short prompt's scores behind padding: the largest, as a part of all."""
    from accelerate.utils import send_to_device

    size = alone["input_ids"].shape[1]
    model = without_adapters(trainer.accelerator.unwrap_model(trainer.model))
    # Of a long prompt all scores would take gigabytes: those behind the padding are enough.
    keeps = "logits_to_keep" in inspect.signature(model.forward).parameters
    kept = {"logits_to_keep": size} if keeps else {}
    with torch.no_grad():
        one, other = (
            trainer.model(**send_to_device(batch, trainer.accelerator.device), **kept)
            for batch in (alone, beside)
        )
    one, other = (output.logits[0, -size:] for output in (one, other))
    return float((one - other).float().abs().max() / one.float().abs().max())
