"""Resuming: a checkpoint's recipe, rows and processes against the run's.

Training that resumes under other settings than it began with has no meaning that a log could tell,
so every setting that changes the mathematics has to be allowed by name (`resume.allow`). Free are
settings that change only what is logged, saved or evaluated, or how a step is computed; precision
may change too, which a line and the receipt say. What a checkpoint's tensors cannot fit (adapters
of another rank, the state of another optimizer) cannot be allowed.
"""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import itertools
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.config.methods import REWARDS, TEACHER, method_of
from finetune.config.paths import user_path
from finetune.config.reward_names import code_of, reward_names
from finetune.config.schema import RunConfig
from finetune.config.train_keys import BATCH, TrainSection
from finetune.errors import ConfigError
from finetune.runs.checkpoints import Checkpoint
from finetune.runs.fingerprint import fingerprint
from finetune.runs.folder import finite, json_of

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset


RULES = {
    "logged, reported, saved or evaluated, not trained": (
        "eval.*", "checkpoints.*", "data.prompts", "train.logging_*", "train.log_*",
        "train.save_*", "train.eval_*", "train.per_device_eval_*", "train.report_to",
        "train.run_name", "train.project", "train.trackio_*", "train.disable_tqdm",
        "train.hub_*", "train.push_to_hub", "train.load_best_model_at_end",
        "train.metric_for_best_model", "train.greater_is_better", "train.include_*",
        "train.skip_memory_metrics",
    ),
    "how a step is computed, which changes rounding alone": (
        "model.attention", "train.gradient_checkpointing*", "train.activation_*",
        "train.use_liger_kernel", "train.ddp_*", "train.fsdp*", "train.torch_empty_*",
        "train.dataloader_num_workers", "train.dataloader_pin_memory",
        "train.dataloader_persistent_workers", "train.dataloader_prefetch_factor",
        "train.dataset_num_proc",
    ),
    "where rows lie: the rows themselves are compared": (
        "data.path", "data.name", "data.eval_path",
    ),
    "precision: said in a line, in the receipt and in the folder's name": ("precision.*",),
    "resuming itself": ("resume.*", "train.resume_from_checkpoint"),
}  # fmt: skip
"""Settings that may differ, by why they may."""
FREE = tuple(pattern for patterns in RULES.values() for pattern in patterns)
FIXED = (
    "model.train_vision",
    "lora",
    "lora.r",
    "lora.target_modules",
    "lora.modules_to_save",
    "lora.use_dora",
    "lora.bias",
    "lora.target_parameters",
    "lora.exclude_modules",
    "lora.layers_to_transform",
    "train.optim",
)
"""Settings that a checkpoint's tensors are shaped by."""

HASHES = 1000
"""Hashes of images that a manifest keeps at most: one of several rows, where there are more."""
PIECE = 1000
"""Rows that are hashed at a time: chunks of a table depend on how many processes made it."""
TOKENIZER = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "vocab*",
    "merges.txt",
    "*processor_config.json",
    "*.model",
    "*.py",
)
"""Files of a model's folder that say what text and images are as numbers, or are code."""
WEIGHTS, SHOWN = ("*.safetensors", "*.bin"), 12
SAID_ONLY = ("transformers_version", "architectures", "use_cache")
"""Keys of config.json that change no number."""


def rows_hash(*parts: Dataset | IterableDataset | None, fingerprint: str = "") -> str:
    """SHA-256 of rows in their order: any other row, column or order gives another.

    Args:
        parts: rows, or None.
        fingerprint: stands for a stream among them.
    """
    from datasets import Dataset

    found = hashlib.sha256(fingerprint.encode())
    for rows in parts:
        found.update(b"rows" if rows is not None else b"none")
        # A stream is known by the fingerprint of its source alone.
        if not isinstance(rows, Dataset):
            continue
        # `select` and `shuffle` leave the table as it is, and keep an order beside it.
        for table in (rows.data.table, rows._indices and rows._indices.table):
            if table is None:
                continue
            # Metadata has the fingerprints of `datasets`, which change with its version.
            found.update(str(table.schema.remove_metadata()).encode())
            for start in range(0, len(table), PIECE):
                piece = table.slice(start, PIECE)
                # Copied: a slice may be written otherwise than equal rows of another table are.
                whole = piece.take(list(range(len(piece)))).combine_chunks()
                for batch in whole.to_batches():
                    found.update(batch.serialize())
    return found.hexdigest()


def model_files(config: RunConfig) -> dict[str, Any]:
    """What the files say that every step depends on, besides its rows.

    Returns:
        `model.config.json.KEY` -> value; `model.FILE` -> the beginning of its fingerprint;
        `model.weights` of a base that is read again: under adapters, whose checkpoints do not hold
        it, and of a reference. The same below `train.` of a teacher, of rewards (models, files and
        what these import from beside them) and of a chat template.
    """
    train, method = config.train, method_of(config.train)
    # A full run loads its own weights when it resumes; a base under adapters, or a reference, is
    # read again.
    again = config.lora is not None or method.reference or method.rewarded
    found = _of_folder("model", config.model.name, weights=again)
    for name in reward_names(train):
        found |= _of_folder(f"train.{REWARDS}", name, weights=True)
    for file in code_of(reward_names(train)):
        key = f"train.{REWARDS}.{file.name}"  # of two files of a name: both
        found[key] = found.get(key, "") + fingerprint([file])[:SHOWN]
    if name := train.teacher_model_name_or_path:
        found |= _of_folder(f"train.{TEACHER}", name, weights=True)
    if name := train.chat_template_path:
        found |= _of_folder("train.chat_template_path", name, weights=False)
    return found


def _of_folder(key: str, name: str, *, weights: bool) -> dict[str, Any]:
    """`model_files` of one model in a folder, or of a file alone."""
    path, found = user_path(name), dict[str, Any]()
    if path.is_file():
        return {f"{key}.{path.name}": fingerprint([path])[:SHOWN]}
    if weights and (files := [file for kind in WEIGHTS for file in sorted(path.glob(kind))]):
        found[f"{key}.weights"] = fingerprint(files)[:SHOWN]
    with contextlib.suppress(OSError, ValueError, AttributeError):  # said where it is loaded
        for name, value in json.loads((path / "config.json").read_text("utf-8")).items():
            # The version of Transformers that wrote the file, and the like, change no number.
            if not name.startswith("_") and name not in SAID_ONLY:  # _name_or_path
                found[f"{key}.config.json.{name}"] = value
    for file in (file for kind in TOKENIZER for file in sorted(path.glob(kind))):
        if file.is_file():
            found[f"{key}.{file.name}"] = fingerprint([file])[:SHOWN]
    return found


def refuse_other_base(config: RunConfig, weights: Path) -> None:
    """Refuse to put a run's adapter on another base than it was trained on.

    Args:
        weights: the run's `model/`, beside its receipt, or a checkpoint.

    Raises:
        ConfigError: the files of the base say something else now.
    """
    known = (
        Checkpoint(weights).manifest or json_of(weights.parent / "receipt.json").get("run") or {}
    )
    # Runs older than these facts have none, and are let through.
    began, now = known.get("model_files") or {}, model_files(config)
    parts = ("model.weights", "model.config.json.")
    changed = {key: pair for key, pair in _changed_keys(began, now) if key.startswith(parts)}
    if config.lora is not None and began and now and changed:  # a folder that is gone is said later
        raise ConfigError(
            "the base of this adapter is not the one that it was trained on",
            where=f"{weights}: model.name={config.model.name}",
            why="; ".join(
                f"{key}: {_shown(was)} then, {_shown(has)} now"
                for key, (was, has) in changed.items()
            ),
            fix="put its files back, or write where they are into the run's config.yaml "
            "(model.name); or train again on the new ones",
        )


def facts_of(config: RunConfig, rows: str, processes: int) -> dict[str, Any]:
    """What a manifest keeps for `check_resume`: recipe, hash of rows, processes, model files."""
    facts = {"config": config.model_dump(mode="json"), "rows": rows, "processes": processes}
    return facts | {"model_files": model_files(config)}


def check_resume(
    checkpoint: Checkpoint, config: RunConfig, facts: dict[str, Any]
) -> dict[str, tuple[Any, Any]]:
    """Refuse a run that resumes from a checkpoint under other mathematics.

    Args:
        facts: of the run (`facts_of`).

    Returns:
        Settings that differ and may: key -> (in the checkpoint, now), but for settings of resuming
        itself; empty for a checkpoint of another program, whose manifest says nothing.

    Raises:
        ConfigError: a setting differs that `resume.allow` does not name, or cannot.
    """
    # First, since with no step left it does not matter what else differs.
    _refuse_ended(checkpoint, config.train)
    began = checkpoint.manifest
    # A checkpoint of another program has no recipe to compare with.
    if "config" not in began:
        return {}
    differing = dict(_changed_keys(began["config"], facts["config"]))
    if began.get("rows") != facts["rows"]:
        differing["data.rows"] = ("the rows it was trained on", "other rows, or another order")
    differing |= _changed_keys(began.get("model_files") or {}, facts["model_files"])
    if began.get("processes") != facts["processes"]:
        differing["processes"] = (began.get("processes"), facts["processes"])
    # The other way loses nothing: BF16 numbers are float32 numbers.
    if _is_wide(began) and not _is_wide(facts):
        differing["model.dtype"] = ("float32, as FSDP2 trains weights", config.model.dtype)
    _refuse(checkpoint, differing, config.resume.allow, moved_rows(checkpoint, facts))
    own = RULES["resuming itself"]
    return {key: pair for key, pair in differing.items() if not _matches(key, own)}


def images_of(rows: Any, each: int = 0) -> dict[str, Any]:
    """What a manifest keeps of the images of prepared rows: hashes of their pixels, in order.

    Example: 2,500 rows are 834 hashes, of `each` 3 rows. None of a stream, or of rows of text.
    """
    from finetune.data.image_forms import SEEN

    if SEEN not in (rows.column_names or ()) or not hasattr(rows, "select"):
        return {}
    seen = [repr(one) for one in rows.with_format(None)[SEEN]]
    each = each or -(-len(seen) // HASHES)
    parts = ["".join(seen[at : at + each]) for at in range(0, len(seen), each)]
    hashes = [hashlib.blake2b(part.encode(), digest_size=4).hexdigest() for part in parts]
    return {"each": each, "hashes": " ".join(hashes)}


def check_images(
    checkpoint: Checkpoint, config: RunConfig, rows: Any
) -> dict[str, tuple[Any, Any]]:
    """`check_resume` for the pixels of prepared rows: files may have others under their names.

    Where other rows are allowed, so are their images.
    """
    from finetune.data.image_forms import COLUMN

    began, allowed = checkpoint.manifest.get("images"), config.resume.allow
    if not began or _matches("data.rows", allowed):
        return {}
    now = images_of(rows, began["each"]).get("hashes", "")
    pairs = enumerate(itertools.zip_longest(began["hashes"].split(), now.split()))
    if (at := next((i for i, (was, has) in pairs if was != has), None)) is None:
        return {}
    first, last = at * began["each"], min((at + 1) * began["each"], len(rows))
    part = rows.with_format(None).select([*range(first, last)])  # not the opened images
    images = itertools.chain(*part[COLUMN])
    files = {one["path"] for one in images if one["bytes"] is None}
    where = max(files, key=lambda path: Path(path).stat().st_mtime, default="images")
    where += f", or of another in rows {first + 1} to {last}" if len(files) != 1 else ""
    found = {"data.images": ("the images it was trained on", f"other pixels of {where}")}
    _refuse(checkpoint, found, allowed, [])
    return found


def _refuse(
    checkpoint: Checkpoint,
    differing: dict[str, tuple[Any, Any]],
    allowed: Sequence[str],
    moved: list[str],
) -> None:
    """Raise for what may not differ; `moved` says what becomes of rows."""
    # Said first: no permission would help.
    fixed = [key for key in differing if key in FIXED]
    refused = [key for key in differing if not _matches(key, (*FREE, *allowed))]
    if shown := fixed or refused:
        said = {key: map(_shown, differing[key]) for key in shown}
        why = [f"{key}: {was} in the checkpoint, {now} now" for key, (was, now) in said.items()]
        listed = ", ".join(dict.fromkeys((*allowed, *refused)))
        back = "leave these overrides out (or put the files of model and rows back)"
        raise ConfigError(
            f"resuming would change {', '.join(shown)}",
            where=f"train.resume_from_checkpoint: {checkpoint.folder}",
            why="; ".join([*why, *moved]),
            fix=f"the checkpoint's tensors do not fit: {back}, or start again without "
            "train.resume_from_checkpoint"
            if fixed
            else f"{back}, or 'resume.allow=[{listed}]'",
        )


def _refuse_ended(checkpoint: Checkpoint, train: TrainSection) -> None:
    """Refuse a checkpoint behind which no step is left, by number or by epochs."""
    key, kind, last = "train.max_steps", "step", train.max_steps
    at: Any = checkpoint.step
    if not isinstance(last, int) or last <= 0:  # as Transformers: then epochs count, by default 3
        key, kind, last = "train.num_train_epochs", "epoch", train.num_train_epochs
        at = finite(checkpoint.state.get("epoch")) or 0
    if last <= at:
        raise ConfigError(
            f"the run ends at {kind} {last:g}, and the checkpoint is at {kind} {at:g}",
            where=key,
            why="no step is left to train",
            fix=f"{key}={2 * math.ceil(at)} 'resume.allow=[{key}]', or use the run as it is",
        )


def moved_rows(checkpoint: Checkpoint, facts: dict[str, Any]) -> list[str]:
    """What happens to rows where a step has more or fewer of them than before; empty if as many.

    The trainer passes over the steps of a checkpoint in batches of today: 4 steps of 8 rows,
    resumed with 16 rows a step, begin behind row 64, and rows 33 to 64 are never seen.
    """
    began, step = checkpoint.manifest, checkpoint.step
    if "config" not in began or facts["config"]["train"].get("ignore_data_skip"):
        return []
    before, now = (_rows_of_step(x) for x in (began, facts | {"fitted": fitted_of(began, facts)}))
    if before == now:
        return []
    ends = "rows are trained again" if now < before else "the rows between are left out"
    return [
        f"global batch: {before} rows in the checkpoint, {now} now; its {step} steps were "
        f"{step * before:,} rows and are passed over as {step * now:,}: {ends}"
    ]


def fitted_of(began: dict[str, Any], facts: dict[str, Any]) -> dict[str, Any]:
    """What a checkpoint's run made smaller, since rows were few (`data.min_steps`), and stays so.

    Its micro-batch and accumulation only while the same are asked for: other ones are meant.
    """
    settings = facts["config"]
    if "config" not in began or settings["data"].get("min_steps") is None:
        return {}
    found, before = began.get("fitted") or {}, began["config"]["train"]
    same = all(before.get(key) == settings["train"].get(key) for key in BATCH)
    return found if same else found | {"batch": None}


def _rows_of_step(facts: dict[str, Any]) -> int:
    train, fitted = TrainSection(facts["config"]["train"]), facts.get("fitted") or {}
    asked = train.per_device_train_batch_size, train.gradient_accumulation_steps
    return math.prod(fitted.get("batch") or asked) * (facts.get("processes") or 1)


def _is_wide(facts: dict[str, Any]) -> bool:
    """True if the weights that train are float32, whatever `model.dtype` is.

    Accelerate 1.15 makes them so when it shards a model (`fsdp2_prepare_model`); adapters always
    are. Resuming in BF16 would round weights and moments.
    """
    config = facts["config"]
    sharded = config["train"].get("fsdp") and facts.get("processes") != 1
    return bool(sharded or config.get("lora") or config["model"].get("dtype") == "float32")


def changes_training(key: str) -> bool:
    """True for a changed setting that is worth a line of its own: precision, or one allowed."""
    return key.startswith("precision.") or not _matches(key, FREE)


def _matches(key: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns)


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _changed_keys(before: Any, now: Any, at: str = "") -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Every key, with dots, whose value differs between two configurations as plain data."""
    if isinstance(before, dict) and isinstance(now, dict) and at.count(".") < 1:
        for key in sorted({*before, *now}):
            # A key that this version added, or a default that was left out, is None on one side.
            yield from _changed_keys(before.get(key), now.get(key), f"{at}.{key}".lstrip("."))
    elif before != now:
        yield at, (before, now)
