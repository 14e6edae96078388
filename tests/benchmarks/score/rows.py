"""A csv file of published measurements, read into typed rows.

A file of that form has the columns of `Row`, one measurement a line, empty where the source says
nothing. Sizes are in GB (10^9 bytes). `mem_kind` says what was measured: `allocated` tensors,
memory `reserved` by PyTorch's allocator, what `nvidia-smi` shows, or unknown. A row whose notes say
SUSPECT is physically impossible or extrapolated and is never scored.

**Held out.** A third of the rows, by the hash of the id, is read by no one while the predictions
are made better; `held_out` says which. Their score is reported apart.
"""

from __future__ import annotations

import csv
import hashlib
import re
from dataclasses import dataclass, fields
from pathlib import Path

from finetune.errors import ConfigError, DataNotFoundError

KINDS = ("allocated", "reserved", "nvidia-smi", "unknown", "")


@dataclass(frozen=True)
class Row:
    """One measurement; text as the file has it, numbers where they are numbers.

    Attributes:
        line: in the file, the header being 1.
        n_gpus: 0 when the source does not say.
        batch: rows per GPU; None when the source does not say.
        length: tokens per row; None when it is not one number.
        peak_gb: 10^9 bytes; None when nothing was measured, as after an out-of-memory error.
    """

    line: int
    id: str
    source: str
    gpu: str
    n_gpus: int
    model: str
    params_b: float | None
    method: str
    lora_rank: int | None
    lora_targets: str
    precision: str
    optimizer: str
    batch: int | None
    length: int | None
    batch_text: str
    length_text: str
    grad_ckpt: str
    attention: str
    fused_ce: str
    framework: str
    peak_gb: float | None
    mem_kind: str
    tokens_per_s: float | None
    step_time_s: float | None
    notes: str

    @property
    def suspect(self) -> bool:
        """Never to be scored. Of a doubtful speed the memory still counts."""
        return "SUSPECT" in self.notes.replace("SUSPECT throughput", "")

    @property
    def out_of_memory(self) -> bool:
        """The run did not fit."""
        return self.peak_gb is None and bool(re.search(r"\bOOM\b", self.notes))


def held_out(row_id: str) -> bool:
    """Whether a row is of the third that is looked at last: sha256 of its id, modulo 3, is 0."""
    return int(hashlib.sha256(row_id.encode()).hexdigest(), 16) % 3 == 0


COLUMNS = (
    "id", "source", "gpu", "n_gpus", "model", "params_b", "method", "lora_rank",
    "lora_targets", "precision", "optimizer", "batch_per_gpu", "seq_len", "grad_ckpt",
    "attention", "fused_ce", "framework", "peak_mem_gb", "mem_kind", "tokens_per_s",
    "step_time_s", "notes",
)  # fmt: skip


def read_rows(path: str | Path) -> list[Row]:
    """The rows of a file, in its order.

    Raises:
        DataNotFoundError: no file there.
        ConfigError: a column is missing, a number is not one, a kind of memory is not known, or an
            id comes twice; with file and line.
    """
    path = Path(path)
    if not path.is_file():
        raise DataNotFoundError(
            f"There is no file {str(path)!r}.", fix="give a csv file of measurements."
        )
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(
            "The file is not text in UTF-8.", where=str(path), why=str(error)
        ) from None
    reader = csv.DictReader(text.splitlines(keepends=True))
    missing = [c for c in COLUMNS if c not in (reader.fieldnames or ())]
    if missing:
        raise ConfigError(
            f"The file has no column {', '.join(map(repr, missing))}.",
            where=f"{path}:1",
            why="a row cannot be mapped to a configuration without them.",
            fix=f"columns: {', '.join(COLUMNS)}",
        )
    rows: list[Row] = []
    seen: dict[str, int] = {}
    for given in reader:
        row = _row({k: (v or "").strip() for k, v in given.items() if k}, path, reader.line_num)
        if row.id in seen:
            raise ConfigError(
                f"The id {row.id!r} comes twice.",
                where=f"{path}:{row.line} and {seen[row.id]}",
                why="scores are kept by id.",
            )
        seen[row.id] = row.line
        rows.append(row)
    if not rows:
        raise ConfigError("The file has no rows.", where=str(path), fix="one measurement a line.")
    return rows


def _row(given: dict[str, str], path: Path, line: int) -> Row:
    def wrong(column: str, why: str) -> ConfigError:
        return ConfigError(
            f"{column} is {given.get(column)!r}.",
            where=f"{path}:{line}",
            why=why,
            fix="mend the row.",
        )

    def number(column: str) -> float | None:
        text = given[column]
        if not text:
            return None
        try:
            value = float(text)
        except ValueError:
            raise wrong(column, "it has to be a number, or empty.") from None
        if not 0 <= value < float("inf"):
            raise wrong(column, "it has to be a finite number, not below zero.")
        return value

    def whole(column: str) -> int | None:
        found = re.match(r"\d+(?=$|[\s(])", given[column])
        return int(found[0]) if found else None

    if not given["id"]:
        raise wrong("id", "every row needs one.")
    if given["mem_kind"] not in KINDS:
        raise wrong("mem_kind", f"known: {', '.join(k for k in KINDS if k)}, or empty.")
    rank, gpus = number("lora_rank"), number("n_gpus")
    return Row(
        line=line,
        n_gpus=int(gpus or 0),
        params_b=number("params_b"),
        lora_rank=None if rank is None else int(rank),
        batch=whole("batch_per_gpu"),
        length=whole("seq_len"),
        batch_text=given["batch_per_gpu"],
        length_text=given["seq_len"],
        peak_gb=number("peak_mem_gb"),
        tokens_per_s=number("tokens_per_s"),
        step_time_s=number("step_time_s"),
        **{f.name: given[f.name] for f in fields(Row) if f.type == "str" and f.name in given},
    )
