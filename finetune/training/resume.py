"""Resuming: a checkpoint's recipe, rows and processes against those of the run.

Training that goes on under other settings than it began with has no meaning that a log could tell,
so every setting that changes the mathematics has to be allowed by name (`resume.allow`). Free are
settings that change only what is logged, saved or evaluated, or how a step is computed; precision
may change too, which a line and the receipt say. What a checkpoint's tensors cannot fit (adapters
of another rank, the state of another optimizer) cannot be allowed.
"""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import json
import math
import os
import pickle
import re
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.config.paths import user_path
from finetune.config.schema import RunConfig
from finetune.data.sources import Source
from finetune.errors import ConfigError
from finetune.runs.checkpoints import (
    Checkpoint,
    launcher_of,
)
from finetune.runs.folder import finite

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset


RULES = {
    "logged, reported, saved or evaluated, not trained": (
        *("eval.*", "checkpoints.*", "data.prompts", "train.logging_*", "train.log_*"),
        *("train.save_*", "train.eval_*", "train.per_device_eval_*", "train.report_to"),
        *("train.run_name", "train.project", "train.trackio_*", "train.disable_tqdm"),
        *("train.hub_*", "train.push_to_hub", "train.load_best_model_at_end"),
        *("train.metric_for_best_model", "train.greater_is_better", "train.include_*"),
        "train.skip_memory_metrics",
    ),
    "how a step is computed, which changes rounding alone": (
        *("model.attention", "train.gradient_checkpointing*", "train.activation_*"),
        *("train.use_liger_kernel", "train.ddp_*", "train.fsdp*", "train.torch_empty_*"),
        *("train.dataloader_num_workers", "train.dataloader_pin_memory"),
        *("train.dataloader_persistent_workers", "train.dataloader_prefetch_factor"),
        "train.dataset_num_proc",
    ),
    "where rows lie: the rows themselves are compared": (
        *("data.path", "data.name", "data.eval_path"),
    ),
    "precision: said in a line, in the receipt and in the folder's name": ("precision.*",),
    "resuming itself": ("resume.*", "train.resume_from_checkpoint"),
}  # fmt: skip
"""Settings that may differ, by why they may."""
FREE = tuple(pattern for patterns in RULES.values() for pattern in patterns)
FIXED = (
    *("lora", "lora.r", "lora.target_modules", "lora.modules_to_save", "lora.use_dora"),
    *("lora.bias", "lora.target_parameters", "lora.exclude_modules", "lora.layers_to_transform"),
    "train.optim",
)
"""Settings that a checkpoint's tensors are shaped by."""

PIECE = 1000
"""Rows that are hashed at a time."""


def rows_hash(*parts: Dataset | IterableDataset | None, fingerprint: str = "") -> str:
    """SHA-256 of rows in their order: any other row, column or order gives another.

    Args:
        parts: rows, or None.
        fingerprint: stands for a stream among them.
    """
    import pyarrow as pa
    from datasets import Dataset

    found = hashlib.sha256(fingerprint.encode())

    class Sink:
        closed = False

        def write(self, data: Any) -> int:
            found.update(data)
            return len(data)

        def flush(self) -> None:
            """Nothing is held back."""

        def close(self) -> None:
            self.closed = True

    for rows in parts:
        found.update(b"rows" if rows is not None else b"none")
        if not isinstance(rows, Dataset):
            continue
        for table in (rows.data.table, rows._indices and rows._indices.table):
            if table is None:
                continue
            table = table.replace_schema_metadata()
            with pa.ipc.new_stream(pa.PythonFile(Sink(), "w"), table.schema) as stream:
                # Pieces of one length: chunks of a table depend on how many processes made it.
                for start in range(0, len(table), PIECE):
                    piece = table.slice(start, PIECE)
                    stream.write_table(piece.take(list(range(len(piece)))).combine_chunks())
    return found.hexdigest()


def base_hash(config: RunConfig) -> str:
    """Fingerprint of a local model under adapters, which no checkpoint holds; of others empty."""
    folder = user_path(config.model.name)
    if config.lora is None or not os.path.isdir(folder):
        return ""
    files = tuple(sorted(folder.glob("*.safetensors")))
    return Source(config.model.name, "model.name", files).fingerprint() if files else ""


def model_files(config: RunConfig) -> dict[str, Any]:
    """What the files of a local model say besides its weights: a function, a vocabulary, a format.

    Returns:
        `model.config.json.KEY` -> value, and `model.FILE` -> the beginning of its SHA-256.
    """
    folder, found = user_path(config.model.name), dict[str, Any]()
    if not os.path.isfile(folder / "config.json"):
        return found
    shape = json.loads((folder / "config.json").read_text("utf-8"))
    kept = {key: value for key, value in shape.items() if not key.startswith("_")}  # _name_or_path
    found |= {f"model.config.json.{key}": value for key, value in kept.items()}
    for pattern in ("tokenizer*", "*.jinja", "vocab*", "merges.txt", "special_tokens_map.json"):
        for file in filter(Path.is_file, sorted(folder.glob(pattern))):
            found[f"model.{file.name}"] = hashlib.sha256(file.read_bytes()).hexdigest()[:12]
    return {key: value for key, value in found.items() if key.rpartition(".")[2] not in SAID_ONLY}


SAID_ONLY = ("transformers_version", "architectures", "use_cache")
"""Keys of config.json that change no number."""


def facts_of(config: RunConfig, rows: str, processes: int, base: str = "") -> dict[str, Any]:
    """What a manifest keeps for `check_resume`."""
    facts = {"config": config.model_dump(mode="json"), "rows": rows, "processes": processes}
    facts |= {"model_files": files} if (files := model_files(config)) else {}
    return facts | ({"base": base} if base else {})


def check_resume(
    checkpoint: Checkpoint, config: RunConfig, rows: str, processes: int, base: str = ""
) -> dict[str, tuple[Any, Any]]:
    """Refuse a run that goes on from a checkpoint under other mathematics.

    Returns:
        Settings that differ and may: key -> (in the checkpoint, now), but for those of resuming
        itself; empty for a checkpoint of another program, whose manifest says nothing.

    Raises:
        ConfigError: a setting differs that `resume.allow` does not name, or cannot.
    """
    _refuse_ended(checkpoint, config.train)
    began = checkpoint.manifest
    if "config" not in began:
        return {}
    now = config.model_dump(mode="json")
    differing = dict(_changed_keys(began["config"], now))
    if began.get("rows") != rows:
        differing["data.rows"] = ("the rows it was trained on", "other rows, or another order")
    files = began.get("model_files") or {}
    named = model_files(config) if files else {}
    if named:
        keys = sorted({*files, *named})
        pairs = {key: (files.get(key), named.get(key)) for key in keys}
        differing |= {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}
    if base and began.get("base", base) != base:
        differing["model.weights"] = ("those that it trained adapters over", "others of that name")
    if began.get("processes") != processes:
        differing["processes"] = (began.get("processes"), processes)
    if _is_wide(began["config"], began.get("processes")) and not _is_wide(now, processes):
        differing["model.dtype"] = ("float32, as FSDP2 trains weights", config.model.dtype)
    allowed = config.resume.allow
    fixed = [key for key in differing if key in FIXED]
    refused = [key for key in differing if not _matches(key, (*FREE, *allowed))]
    if fixed or refused:
        shown = fixed or refused
        why = [f"{key}: {_say(*differing[key])}" for key in shown]
        if {*refused} & {*BATCH}:
            why += moved_rows(checkpoint, config, processes)
        kept = _keeping_batch(began, config, processes) if "processes" in refused else {}
        listed = ", ".join(dict.fromkeys((*allowed, *refused, *kept)))
        typed = "".join(f" {key}={value}" for key, value in kept.items())
        start = launcher_of(began["processes"]) if began.get("processes") else ""
        again = f" ({start} -m finetune)" if start and "processes" in refused else ""
        on_disk = {"model.weights", *files, *named}
        if not any(key.startswith("data.") for key in differing.keys() - {"data.rows"}):
            on_disk.add("data.rows")
        back = "leave these overrides out"
        if {*shown} <= on_disk:
            back = "put the files of model and rows back as they were"
        raise ConfigError(
            f"resuming would change {', '.join(shown)}",
            where=f"train.resume_from_checkpoint: {checkpoint.folder}",
            why="; ".join(why),
            fix="the checkpoint's tensors do not fit: leave these overrides out, or start again "
            "without train.resume_from_checkpoint"
            if fixed
            else f"{back}{again}, or 'resume.allow=[{listed}]'{typed}",
        )
    own = RULES["resuming itself"]
    return {key: pair for key, pair in differing.items() if not _matches(key, own)}


def _refuse_ended(checkpoint: Checkpoint, train: dict[str, Any]) -> None:
    """Refuse a checkpoint behind which no step is left, by number or by epochs."""
    key, kind, last = "train.max_steps", "step", train.get("max_steps", -1)
    at: Any = checkpoint.step
    if not isinstance(last, int) or last <= 0:  # as Transformers: then epochs count, by default 3
        key, kind, last = "train.num_train_epochs", "epoch", train.get("num_train_epochs", 3)
        at = finite(checkpoint.state.get("epoch")) or 0
    if last <= at:
        raise ConfigError(
            f"the run ends at {kind} {last:g}, and the checkpoint is at {kind} {at:g}",
            where=key,
            why="no step is left to train",
            fix=f"{key}={2 * math.ceil(at)} 'resume.allow=[{key}]', or use the run as it is",
        )


BATCH = {
    "train.per_device_train_batch_size": 8,
    "train.gradient_accumulation_steps": 1,
    "processes": 1,
}
"""What a step's rows are the product of, and the defaults of Transformers."""
_SIZE, _STEPS, _ = BATCH


def _batch(train: dict[str, Any], processes: Any) -> dict[str, int]:
    given = {f"train.{key}": value for key, value in train.items()} | {"processes": processes}
    return {key: int(given.get(key) or default) for key, default in BATCH.items()}


def moved_rows(checkpoint: Checkpoint, config: RunConfig, processes: int) -> list[str]:
    """What happens to rows where a step has more or fewer of them than before; empty if as many.

    The trainer passes over the steps of a checkpoint in batches of today: 4 steps of 8 rows, gone
    on with 16 rows a step, begin behind row 64, and rows 33 to 64 are never seen.
    """
    began = checkpoint.manifest.get("config", {}).get("train", {})
    if config.train.get("ignore_data_skip"):
        return []
    before, now = (
        math.prod(_batch(*one).values())
        for one in ((began, checkpoint.manifest.get("processes")), (config.train, processes))
    )
    if before == now:
        return []
    step = checkpoint.step
    ends = "rows are trained again" if now < before else "the rows between are left out"
    return [
        f"global batch: {before} rows in the checkpoint, {now} now; its {step} steps were "
        f"{step * before:,} rows and are passed over as {step * now:,}: {ends}"
    ]


def _keeping_batch(began: dict[str, Any], config: RunConfig, processes: int) -> dict[str, int]:
    """The micro-batch with which other processes have the rows of a step that were; none if none.

    Of 2 processes with 4 rows each one process has 8.
    """
    before, now = _batch(began["config"]["train"], began.get("processes")), config.train
    rows, others = math.prod(before.values()), processes * _batch(now, 1)[_STEPS]
    size = {_SIZE: rows // others} if rows % others == 0 else {}
    return {} if _batch(now, processes)[_SIZE] == size.get(_SIZE) else size


READERS = ("torch.serialization", "safetensors.torch")
"""Modules whose `load` and `load_file` the trainer and PEFT read a checkpoint's tensors with."""
_CODE = re.compile(r"Unsupported (?:global|class).*|GLOBAL \S+|.*(?:reduce|instantiate).*")
"""Parts of a refusal of torch's reader (2.13) that are about code, not about damaged bytes."""


def _is_wide(config: dict[str, Any], processes: Any) -> bool:
    """True if the weights that train are float32, whatever `model.dtype` is.

    Accelerate 1.15 makes them so when it shards a model (`fsdp2_prepare_model`); adapters always
    are. Going on in BF16 would round weights and moments.
    """
    sharded = (config.get("train") or {}).get("fsdp") and processes != 1
    dtype = (config.get("model") or {}).get("dtype")
    return bool(sharded or config.get("lora") or dtype == "float32")


@contextlib.contextmanager
def reading(checkpoint: Path | None) -> Iterator[None]:
    """Raise for a file of a checkpoint that is damaged, or would run code when it is read.

    The trainer reads optimizer, schedule and generators with `weights_only`, which stops at
    anything but tensors and plain data. Files that a manifest lists were compared before; those of
    another program, or of a manifest that was written anew, show here what they are.

    Raises:
        ConfigError: with the file's name.
    """
    try:
        yield
    except Exception as error:
        file = _being_read(error)
        if checkpoint is None or file is None or checkpoint.resolve() not in file.parents:
            raise
        said = str(error).partition("WeightsUnpickler error: ")[2] or str(error)
        line = next(iter(said.strip().splitlines()), "").partition(". ")[0]  # advice follows
        if isinstance(error, pickle.UnpicklingError) and (found := _CODE.search(str(error))):
            raise ConfigError(
                f"{file.name} holds more than tensors and numbers",
                where=str(checkpoint),
                why=f"reading it would run code; nothing of it was run ({found[0]})",
                fix="resume from a checkpoint that you made yourself: this file was made by "
                "another program, or to attack",
            ) from None
        raise ConfigError(
            f"{file.name} cannot be read: it is damaged",
            where=str(checkpoint),
            why=f"{type(error).__name__}: {line}".rstrip(": "),
            fix="resume from another checkpoint of the run, or copy the file again from where it "
            "came from",
        ) from error


def _being_read(error: BaseException) -> Path | None:
    """The file that one of `READERS` was reading when it failed, if any."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_globals.get("__name__") in READERS and frame.f_code.co_name.startswith("load"):
            file = frame.f_locals.get("f", frame.f_locals.get("filename"))
            if isinstance(file, str | Path):
                return Path(file).resolve()
    return None


def changes_training(key: str) -> bool:
    """True for a changed setting that is worth a line of its own: precision, or one allowed."""
    return key.startswith("precision.") or not _matches(key, FREE)


def _matches(key: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns)


def _say(before: Any, now: Any) -> str:
    return f"{_shown(before)} in the checkpoint, {_shown(now)} now"


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
