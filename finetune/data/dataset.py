"""From `DataConfig` to the rows that a method's trainer expects.

A format is recognized by its columns and shown (`finetune.data.rows`); tokenizing, masking and
packing are TRL's, and counted (`finetune.data.ledger`).
"""

from __future__ import annotations

import hashlib
import itertools
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from finetune.config.methods import METHODS, Method, method_of
from finetune.config.paths import user_path
from finetune.config.schema import DataConfig, ModelConfig, RunConfig
from finetune.config.train_keys import TrainerArguments
from finetune.data.chat import unused_parts
from finetune.data.checks import UNKNOWN, shared_rows
from finetune.data.image_forms import COLUMN, COLUMNS, IN_METADATA, Rules, caches, shows_images
from finetune.data.mixture import Part, concatenated, in_one_format, joined
from finetune.data.rows import Form, SkippedLate, formatted, formatted_stream, unused_columns
from finetune.data.sources import HELD_OUT, Source, files_of, reading, sources_of
from finetune.data.undivided import undivided
from finetune.errors import ConfigError, DataError, DataNotFoundError, some
from finetune.storage.pretrained import load_shape, vocabulary_of
from finetune.storage.processors import load_processor, takes_images

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset
    from transformers import PreTrainedTokenizerBase

HEAD = 10_000
"""Rows of a stream that `eval_fraction` is a share of."""
LEAST_EVAL, LEAST_OF_FEW = 32, 16
"""Rows to evaluate on, where they are a tenth or less, or a fifth: a loss of three says little."""
SAMPLE, IMAGE_SAMPLE = 1000, 200
"""Rows that stand for a stream, or for large files, where all are not worth the time."""
LARGE = 32 << 20
"""Bytes of files from which on a sample is counted before training."""


@dataclass(frozen=True)
class Rows:
    """Training and evaluation rows in one of TRL's formats.

    Attributes:
        train: training rows; a stream does not end.
        eval: evaluation rows, or None.
        description: the recognized format, in a few words.
        settings: arguments of TRL's configuration that the format implies, where the recipe has
            none.
        refused: training rows that were skipped, since they cannot be trained on.
        notes: what is worth a warning.
        sample: the first training rows, where `train` is a stream.
        sampled: number of rows that were read, if that is not all.
        fingerprint: of a stream's sources, which is too long to be compared row by row.
        shared: evaluation rows that are also among the first 100,000 training rows, or
            among the first ones of a stream.
        late: rows of streams that are skipped behind their first ones, while they are read.
    """

    train: Dataset | IterableDataset
    eval: Dataset | None
    description: str
    settings: dict[str, Any]
    refused: int = 0
    notes: tuple[str, ...] = ()
    sample: Dataset | None = None
    sampled: int | None = None
    fingerprint: str = ""
    shared: int = 0
    late: tuple[SkippedLate, ...] = ()

    @property
    def images(self) -> bool:
        """True of a run with images: all of its rows have a column for them."""
        return COLUMN in (self.train.column_names or ())

    def first(self, count: int) -> Dataset:
        """The first training rows."""
        if self.sample is None:
            rows = cast("Dataset", self.train)
            return rows.select(range(min(count, len(rows))))
        return _first_rows(self.train, count)


def rows_for(
    config: RunConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    sample: bool = False,
    shape: Any = None,
) -> Rows:
    """The rows of a run, as `load_data` loads them.

    Args:
        shape: the model's configuration; default: read from its files.
    """
    shape = load_shape(config.model) if shape is None else shape
    found = load_data(
        *(config.data, tokenizer, int(config.train.seed)),
        sample=sample,
        vocabulary=int(shape.get_text_config(decoder=True).vocab_size),
        method=method_of(config.train),
        images=takes_images(shape),
    )
    if found.images:
        _refuse_beside_images(config)
    return found


def reader_for(config: RunConfig, rows: Rows, tokenizer: PreTrainedTokenizerBase) -> Any:
    """What makes token ids of a run's rows: its tokenizer; with images the model's processor.

    Raises:
        ConfigError: sizes of images are set, or what reads them trains, and no row has one; or
            there is no processor.
    """
    pixels, trained = config.train.pixels, config.model.train_vision
    if rows.images:
        return load_processor(config.model, tokenizer, **pixels)
    given = {f"train.{key}": value for key, value in pixels.items() if value}
    given |= {"model.train_vision": trained} if trained != "none" else {}
    for key, value in given.items():
        raise ConfigError(
            f"{key} is about images, and no row has an image",
            where=f"{key}={value}",
            why="nothing would read one, or learn from it",
            fix=f"~{key}; or rows with images, and a model that reads them",
        )
    return tokenizer


_PACKED = True, "their positions in packed rows are not the model's own in every family"
BESIDE_IMAGES: dict[str, Any] = {
    "packing": _PACKED,
    "eval_packing": _PACKED,
    "padding_free": (True, "TRL pads each batch of them"),
    "truncation_mode": ("keep_end", "the images would be cut, whose place is before the answer"),
    "precompute_ref_log_probs": (True, "TRL opens images as batches are made"),
}
"""Setting of `train` -> the value that rows with images do not take, and why."""


def _refuse_beside_images(config: RunConfig) -> None:
    """Raise where the method or a setting of the trainer is for rows of text alone."""
    if not (method := method_of(config.train)).images:
        others = " or ".join(one.name for one in METHODS.values() if one.images)
        raise DataError(
            f"{method.key} trains on text alone, and these rows have images",
            where=config.data.label,
            why=f"{method.trainer} takes none, or none that can be checked",
            fix=f"train.method={others}; or rows of text",
        )
    for key, (value, why) in BESIDE_IMAGES.items():
        if getattr(config.train, key) == value:
            raise ConfigError(
                f"train.{key}={str(value).lower()} is not for rows with images",
                where=f"train.{key}",
                why=why,
                fix=f"~train.{key}"
                + "; batches of similar length: train.train_sampling_strategy=group_by_length"
                * ("packing" in key),
            )


def load_data(
    data: DataConfig, tokenizer: PreTrainedTokenizerBase, seed: int, *, sample: bool = False,
    vocabulary: int = UNKNOWN, method: Method = METHODS["sft"], images: bool = False,
) -> Rows:  # fmt: skip
    """Load rows, recognize their format, and split off evaluation rows.

    Args:
        tokenizer: its chat template, if any, formats the turns.
        seed: draws the evaluation rows, unless `data.seed` does, and the order of streams.
        sample: read only the first rows of large files and of the hub.
        vocabulary: tokens of the model, which rows that were tokenized before are checked by.
        method: training method, whose form the rows get.
        images: the model takes images. If any row of any source has some, all rows have contents
            in parts and a column `images` (`finetune.data.image_forms`).

    Raises:
        DataNotFoundError: no such file or hub data set.
        DataError: no rows, an unknown format, or a malformed row; with file and line.
    """
    sources = sources_of(data)
    _refuse_hub_settings(data)
    shown = images and has_images(data, sample=sample)
    seen = (
        f"the first {SAMPLE:,} training rows" if data.streaming or sample else "the training rows"
    )
    text_by = seen if images and not shown else ""
    form = Form(tokenizer, data, vocabulary, method, images=shown, text_by=text_by)
    parts = [_part(one, weight, form, seed, sample) for one, weight in sources]
    notes = list[str]()
    settings: dict[str, Any] = {}
    for part in parts:
        notes += part.source.unread(images=shown)
        unused = [name for name in part.unused if name != "rejected"]
        if len(unused) < len(part.unused):
            notes.append(
                f"{part.source.label} has preference pairs: the preferred answers are trained on, "
                "the rejected ones are not used (train.method=dpo learns from both)"
            )
        if pictures := [name for name in unused if name in COLUMNS]:
            notes += [
                f"the images of {part.source.label}, column {pictures[0]!r}, are not read: this "
                "run trains on text alone"
            ] * (not images)  # each row of which would be refused
            unused = [name for name in unused if name not in pictures]
        if unused:
            names = some([repr(name) for name in unused])
            notes.append(f"columns of {part.source.label} that are not used: {names}")
        first = next(iter(part.train), {})
        if any(isinstance(first.get(key), list) for key in ("messages", "prompt")):  # turns
            found = unused_parts(part.train, tokenizer, part.source.label)
            notes += [note for note in found if note not in notes]
    refused = {(p.source.label, i): why for p in parts for i, why in p.refused.items()}
    notes += _skipped(refused, "rows")
    named, bad = _named_eval(form)
    notes += dict.fromkeys(form.notes)
    notes += _skipped(bad, "eval rows")
    parts, named = in_one_format(parts, named)
    set_aside = [part.eval for part in parts if part.eval is not None]
    held_out = concatenated(set_aside) if set_aside else named
    train, description = joined(parts, data, seed)
    if held_out is not None:
        description += f", {len(held_out):,} eval rows"
    columns = parts[0].train.column_names
    if "messages" in columns:
        settings["assistant_only_loss"] = True
    if "text" in columns:  # packed, TRL's "bfd" cuts off what is longer than `max_length`
        settings["packing_strategy"] = "bfd_split"
    if shown:  # columns of ours, which the model's signature does not have
        settings["remove_unused_columns"] = False
    streams = any(part.stream is not None for part in parts)
    first = concatenated([part.train for part in parts]) if streams else None
    if streams:  # processes read the stream themselves: rows of a batch differ in length
        settings["accelerator_config"] = {"dispatch_batches": False}
    cut = [part.cut for part in parts if part.cut is not None]
    facts = [(p.source.fingerprint(), p.weight) for p in parts] if streams else []
    return Rows(
        train, held_out, description, settings, len(refused), tuple(notes),
        sample=first,
        sampled=sum(cut) if cut else None,
        fingerprint=hashlib.sha256(json.dumps(facts).encode()).hexdigest() if streams else "",
        shared=0 if held_out is None else shared_rows(first or train, held_out),
        late=tuple(part.late for part in parts if part.late is not None),
    )  # fmt: skip


def has_images(data: DataConfig, *, sample: bool = True) -> bool:
    """True if a row of any source has an image.

    Args:
        sample: look only at the first rows of large files and of the hub.
    """
    return any(_shows_images(source, data, sample) for source, _ in sources_of(data))


def rules_of(source: Source, data: DataConfig) -> Rules:
    """Where the pictures of a source are, and which may be read.

    Raises:
        DataNotFoundError: `data.image_folder` is none.
    """
    if data.image_folder and not user_path(data.image_folder).is_dir():
        raise DataNotFoundError(
            f"there is no folder {data.image_folder!r}",
            where=f"data.image_folder: {user_path(data.image_folder).absolute()}",
            why="paths of images would begin in it",
            fix="~data.image_folder, where they begin in the folder of the rows' file; or a folder "
            "that is there",
        )
    named = (user_path(data.image_folder).absolute(),) if data.image_folder else ()
    beside = tuple(dict.fromkeys(file.absolute().parent for file in source.files))
    metadata = all(file.name.startswith("metadata.") for file in source.files)
    columns = (*COLUMNS, *(IN_METADATA if source.files and metadata else ()))
    # Rows that others wrote may name none of the user's own files.
    inside = () if source.files else (*named, *caches())
    return Rules(named or beside, inside, data.image_urls, columns)


def _shows_images(source: Source, data: DataConfig, sample: bool) -> bool:
    """True if a row has an image; of a stream, and of large files before a run, a first one."""
    large = source.size is None or source.size >= LARGE
    first = data.streaming or (sample and large)
    rows: Any = source.read(streaming=first)
    names = [data.columns.get(name, name) for name in rules_of(source, data).columns]
    with reading(source):
        return shows_images(itertools.islice(rows, SAMPLE if first else None), names)


def _part(source: Source, weight: float | None, form: Form, seed: int, sample: bool) -> Part:
    """Rows of a source, its evaluation rows set aside."""
    data = form.data
    splits = not (data.eval_path or data.eval_split) and data.eval_fraction > 0
    small = source.size is not None and source.size < LARGE
    if data.streaming and not sample:
        return _streamed(source, weight, form, splits)
    cut = None
    if (sample and not small) or data.streaming:
        # One more than the sample, which tells whether there are others.
        most = _sample_of(form)
        rows = _first_rows(source.read(streaming=True), most + 1, source)
        cut = most if len(rows) > most else None
        rows = rows.select(range(min(most, len(rows))))
    else:
        rows = cast("Dataset", source.read(streaming=False))
    if data.max_rows is not None:
        cut = cut if data.max_rows > len(rows) else None
        rows = rows.select(range(min(data.max_rows, len(rows))))
    columns = rows.column_names
    kind, rows, refused = formatted(rows, form, source.label, rules_of(source, data))
    unused = unused_columns(columns, rows.column_names, kind, data.columns)
    held_out = None
    if splits and len(rows) > 1:
        count = _share_held_out(len(rows), data)
        # A seed of its own keeps the evaluation rows while training seeds change.
        seed = seed if data.seed is None else data.seed
        split = rows.train_test_split(test_size=count, seed=seed)
        rows, held_out = split["train"], split["test"]
    return Part(source, weight, kind, rows, held_out, None, refused, cut, unused)


def _share_held_out(count: int, data: DataConfig) -> int:
    """Rows of `count` to evaluate on: 32 of many, 16 or a fifth of fewer, at least; never all."""
    few = max(1, min(LEAST_OF_FEW, count // 5))
    least = LEAST_EVAL if count >= 10 * LEAST_EVAL else few
    # At least one row is left to train on.
    return min(max(least, round(count * data.eval_fraction)), count - 1)


def _streamed(source: Source, weight: float | None, form: Form, splits: bool) -> Part:
    """A stream, whose first rows are in memory: for evaluation, and to stand for the others."""
    data = form.data
    stream = undivided(cast("IterableDataset", source.read(streaming=True)))
    if data.max_rows is not None:
        stream = stream.take(data.max_rows)
    with reading(source):
        # A stream has no length; its beginning decides how many are held out.
        count = sum(1 for _ in itertools.islice(stream, HEAD)) if splits else 0
    first = _share_held_out(count, data) if count > 1 else 0
    most, rules = _sample_of(form), rules_of(source, data)
    kind, beginning, refused = formatted(
        _first_rows(stream, first + most, source), form, source.label, rules
    )
    late = SkippedLate(most)
    # Behind the rows that are held out: a stream cannot take single ones out.
    rest = formatted_stream(stream.skip(first), beginning, form, source.label, first, late, rules)
    # Refused rows are gone from `beginning`, so those held out are fewer by them.
    good = first - sum(index < first for index in refused)
    held_out = beginning.select(range(good)) if good else None
    sample = beginning.select(range(good, len(beginning)))
    given = stream.column_names or []
    unused = unused_columns(given, beginning.column_names, kind, data.columns)
    return Part(source, weight, kind, sample, held_out, rest, refused, None, unused, late)


def _sample_of(form: Form) -> int:
    """Rows that stand for a stream: with images fewer, since their bytes may be in memory."""
    return IMAGE_SAMPLE if form.images else SAMPLE


def _first_rows(rows: Any, count: int, source: Source | None = None) -> Dataset:
    """The first rows of a stream, in memory."""
    from contextlib import nullcontext

    from datasets import Dataset

    with reading(source) if source is not None else nullcontext():
        return Dataset.from_list(list(itertools.islice(rows, count)), features=rows.features)


def _skipped(refused: dict[Any, str], what: str) -> list[str]:
    """A line about rows that are skipped, if any are."""
    first = next(iter(refused.values()), "")
    return [f"{len(refused):,} {what} are skipped; the first: {first}"] if refused else []


def _named_eval(form: Form) -> tuple[Dataset | None, dict[Any, str]]:
    """Named rows to evaluate on, and which of them are skipped."""
    data = form.data
    if not (data.eval_path or data.eval_split):
        return None, {}
    if data.eval_path:
        sources = [files_of(data.eval_path, "data.eval_path", data.sample_by)]
    else:
        named = data.model_copy(update={"split": data.eval_split})
        sources = [source for source, _ in sources_of(named)]
    rows = [cast("Dataset", source.read(streaming=False)) for source in sources]
    done = [
        formatted(one, form, source.label, rules_of(source, data))
        for one, source in zip(rows, sources, strict=True)
    ]
    bad = {(n, i): why for n, part in enumerate(done) for i, why in part[2].items()}
    return concatenated([part[1] for part in done]), bad


def refuse_no_eval_rows(rows: Rows, args: Any) -> None:
    """Raise `DataError` where a trainer is to evaluate and there are no rows for it.

    Args:
        args: the trainer's.
    """
    strategy = TrainerArguments(args).eval_strategy
    if rows.eval is None and strategy != "no":
        raise DataError(
            "there are no rows to evaluate on",
            where=f"train.eval_strategy={getattr(strategy, 'value', strategy)}",
            why="data.eval_fraction sets none aside of these rows, and data.eval_path names none",
            fix="train.eval_strategy=no, or data.eval_path=FILE",
        )


def _refuse_hub_settings(data: DataConfig) -> None:
    """Reject splits and subsets of a file: only the hub has them, and packaged pictures one."""
    if data.hub is not None:
        return
    held_out = data.name is not None and data.eval_split == HELD_OUT
    for key in ("eval_split", "subset", "split")[held_out:]:
        if getattr(data, key) != DataConfig.model_fields[key].default:
            raise DataError(
                f"data.{key} is about a hub data set, and these rows are a file",
                where=f"data.{key}",
                fix=f"~data.{key}; eval rows come from data.eval_path or data.eval_fraction",
            )


# ------------------------------------------------------------------------------------ random rows

MASKING = ("assistant_only_loss", "completion_only_loss")
"""Settings of `SFTConfig` about parts of a row, which random rows do not have."""


def random_rows(model: ModelConfig, count: int, length: int, seed: int) -> Dataset:
    """Random token ids, [count, length], for models with random weights: no hub, file or padding.

    `diagnose --weights random` and `benchmark` train on them. Each row has the full length, as
    packed real rows do, so the GEMMs have the sizes of a real run. Equal seeds give equal rows.
    """
    import torch
    from datasets import Dataset

    vocabulary = vocabulary_of(model)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(vocabulary, (count, length), generator=generator)
    return Dataset.from_dict({"input_ids": ids.tolist()})
