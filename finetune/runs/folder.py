"""Run folders: what a run left behind, read without torch, whatever state it is in.

`runs/<recipe>/<stamp>/` is written while a run trains (`run.json` and `config.yaml` first, then
`metrics.jsonl` and `steps.jsonl` line by line, `receipt.json` when training ends, `report.json` at
the very end), so that a folder says by itself how far its run came:

    finished     report.json is there
    stopped      by a signal or one of our own errors, as the receipt says; or by another error:
                 there is a receipt, and nothing after it
    running      neither, and the process of run.json lives
    killed       neither, and it does not

A process of another machine cannot be asked, nor one of a folder older than `run.json`: those count
as running while a file of theirs changed in the last `QUIET` seconds. A file that is being written
may end in half a line: what cannot be read yet is left out, here and nowhere else. Checkpoints are
in `checkpoints/`: see `finetune.runs.checkpoints`.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import socket
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from types import UnionType
from typing import Any, Literal

from finetune.config.measures import MEASURES
from finetune.config.methods import Method, method_in
from finetune.config.paths import recipe_of
from finetune.config.secrets import redacted
from finetune.config.train_keys import TrainSection
from finetune.config.yaml import parse_yaml, plain_data, read_text
from finetune.errors import ConfigError, writing

State = Literal["finished", "stopped", "running", "killed"]
COMPARISON = "comparison.json"
QUIET = 900.0
"""Seconds without a change after which a run whose process cannot be asked counts as killed."""
TAIL_BYTES = 1 << 20
"""Read of a long log for a table: rows of several evaluations, whose answers may be long."""
_CONFIG: dict[str, Any] = {"model": {}, "precision": {}, "data": {}, "train": {}}
_NUMBER, _ANY = int | float, int | float | None
_WORDS = "asked backend scaling format gemm fallback compile attention kernels adapters reason"
_GROUP = {"kind": str, "type": str, "changed": _NUMBER, "numbers": _NUMBER}
_RECEIPT: dict[str, Any] = {
    "status": str, "layers": list, "notes": [str], "run": {}, "conditions": {}, "held": {},
    "precision": {"ran": str, "storage": {}, "references": list | None}
    | dict.fromkeys(_WORDS.split(), str | None),
    "environment": {"device": {}, "versions": {}, "patches": list | None},
    "trainable": {"before": _NUMBER, "after": _NUMBER, "in_optimizer": _NUMBER,
                  "optimizer_state_bytes": _ANY},
    "movement": {"now": {"groups": [_GROUP], "steps": _NUMBER}},
    "memory": {"predicted_gib": _ANY, "measured_gib": _ANY, "weights_gib": _ANY,
               "predicted_reserved_gib": _ANY, "reserved_gib": _ANY},
    "energy": {"joules": _ANY, "tokens_per_joule": _ANY, "mean_watts": _ANY},
    "data": {}, "flop_share": {},
}  # fmt: skip
_REPORT: dict[str, Any] = {
    "samples": list, "tasks": {}, "receipt": {}, "own": {}, "hints": [str], "final_loss": _ANY,
    "eval_loss": _ANY, "tokens_per_s": _ANY, "seconds": _ANY, "peak_memory_gib": _ANY,
}  # fmt: skip
"""Form of each part that is read, which a damaged file, or one of another version, may lack."""


def write_start(folder: Path, recipe: str = "") -> None:
    """Write `run.json`: who runs here, so that a reader can tell a living run from a killed one.

    The recipe's name stays with a folder that is moved before it has a receipt.
    """
    from finetune import __version__

    facts = {
        "started": datetime.now().astimezone().isoformat(timespec="milliseconds"),
        "command": command_line(),
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "version": __version__,
        **({"recipe": recipe} if recipe else {}),
    }
    (folder / "run.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def command_line() -> list[str]:
    """`sys.argv` without secrets; `["notebook"]` in one, whose arguments are the kernel's."""
    notebook = Path(sys.argv[0]).stem == "ipykernel_launcher"
    return ["notebook"] if notebook else redacted(sys.argv)


def write_whole(file: Path, text: str) -> None:
    """Write a file so that a reader never sees half of it."""
    # In the same folder, since a rename is atomic within one file system only (POSIX `rename`).
    partial = file.with_name(f"{file.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(file)


def make_folder(folder: Path, out: Path | str) -> Path:
    """Make a folder of results, if it is not there, and return it; `out` is named in the error."""
    failure, fix = f"the folder {str(folder)!r} cannot be made", "choose another folder with --out"
    with writing(failure, where=f"--out {out}", fix=fix):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


def new_folder(inside: Path, out: Path | str) -> Path:
    """Make `inside/<time>-<short id>/`, as `make_folder`.

    Raises:
        ConfigError: it cannot be made there.
    """
    # Local time sorts as people look for runs; the four digits part runs started in one second, as
    # the jobs of a comparison are.
    stamp = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(2).hex()}"
    return make_folder(inside / stamp, out)


@dataclass(frozen=True)
class RunFolder:
    """A run folder. Each file is read when it is first asked for, and once."""

    folder: Path

    @cached_property
    def start(self) -> dict[str, Any]:
        """`run.json`; empty in folders older than it."""
        return json_of(self.folder / "run.json")

    @cached_property
    def config(self) -> dict[str, Any]:
        """`config.yaml` as plain data, by section."""
        try:
            data = parse_yaml(read_text(self.folder / "config.yaml"), "config.yaml")[0]
        except ConfigError:
            return {}
        return _whole(plain_data(data), _CONFIG) if isinstance(data, dict) else {}

    @cached_property
    def receipt(self) -> dict[str, Any]:
        """`receipt.json`; empty before training ended. One that says nothing proves nothing."""
        found = _whole(json_of(self.folder / "receipt.json"), _RECEIPT)
        silent = found and not (found.get("precision") and found.get("status"))
        return found | {"status": "not proven: the receipt lacks what ran"} if silent else found

    @cached_property
    def report(self) -> dict[str, Any]:
        """`report.json`; empty before the end."""
        return _whole(json_of(self.folder / "report.json"), _REPORT)

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """`metrics.jsonl`, a dictionary a line."""
        return list(_rows_of(_read(self.folder / "metrics.jsonl")))

    @cached_property
    def steps(self) -> list[dict[str, Any]]:
        """`steps.jsonl`: step, seconds on the device, tokens without padding; empty without it."""
        return list(_rows_of(_read(self.folder / "steps.jsonl")))

    @property
    def recipe(self) -> str:
        """The recipe's name, which the folder above has too unless the run was moved."""
        return recipe_of(self.folder)

    @property
    def name(self) -> str:
        """`<time>-<id>`."""
        return self.folder.resolve().name

    @cached_property
    def started(self) -> float:
        """Seconds since the epoch: of `run.json`, else of the stamp, else of the folder."""
        try:
            return datetime.fromisoformat(self.start["started"]).timestamp()
        except (KeyError, TypeError, ValueError, OverflowError):
            pass  # written before run.json existed, or damaged
        try:
            return time.mktime(time.strptime(self.name[:15], "%Y%m%d-%H%M%S"))
        except ValueError:
            return self.folder.stat().st_mtime

    @cached_property
    def state(self) -> State:
        """How far it came; `killed` is a run that ended without a word."""
        # In this order: a receipt's own word comes first, since a process number may live on as
        # another's.
        ended = self.receipt.get("run", {})
        if ended.get("interrupted") or ended.get("stopped"):
            return "stopped"
        if self.receipt and self.report:
            return "finished"
        if self._lives():
            return "running"
        return "stopped" if self.receipt else "killed"

    @property
    def progress(self) -> str:
        """`running at step 20 of 400`."""
        return f"{self.state} at step {self.last_step} of {self.planned_steps or '?'}"

    def without_weights(self, fix: str, *, can_wait: bool = True) -> ConfigError:
        """The error of a run without trained weights; one that still trains is to be waited for."""
        stopped = self.receipt.get("run", {}).get("stopped")
        why = stopped or f"before its end it was {self.progress}"
        if self.state == "finished":
            why = "its model/ was removed"
        if self.state == "running":
            why = self.progress.replace("running", "it still trains", 1)
            watch = f"python -m finetune watch {shlex.quote(str(self.folder))}"
            fix = watch if can_wait else fix
        return ConfigError(
            f"the run {str(self.folder)!r} has no trained weights",
            where=str((self.folder / "model").absolute()),
            why=why,
            fix=fix,
        )

    def _lives(self) -> bool:
        # Such as a run on a cluster's node whose folder lies on a shared disk.
        if not self._is_of_this_machine:
            changed = max(file.lstat().st_mtime for file in self.folder.iterdir())
            return time.time() - changed < QUIET
        return self._process_lives()

    @property
    def holder(self) -> str:
        """`process 123 on host, since 2026-01-01T...`: who surely writes here now; else empty."""
        alive = not self.receipt and self._is_of_this_machine and self._process_lives()
        return "process {pid} on {host}, since {started}".format_map(self.start) if alive else ""

    @property
    def _is_of_this_machine(self) -> bool:
        is_known = type(self.start.get("pid")) is int  # no bool
        return is_known and self.start.get("host") == socket.gethostname()

    def _process_lives(self) -> bool:
        import psutil

        pid = self.start["pid"]

        try:
            process = psutil.Process(pid)
            # A number is given again: a process that began after the run is another one.
            return process.status() != psutil.STATUS_ZOMBIE and (
                process.create_time() <= self.started + 1
            )
        except (psutil.Error, ValueError, OverflowError):  # no number of a process
            return False

    @property
    def proven(self) -> bool:
        """True if the receipt proves what ran."""
        return self.receipt.get("status") == "proven"

    def logged(self, key: str) -> Any:
        """The last value that was logged under `key`; None if none was."""
        return next((row[key] for row in reversed(self.tail) if row.get(key) is not None), None)

    def learned(self, key: str, reported: Any = None) -> Any:
        """A loss as reported, else the last logged; None where the method's says nothing."""
        # GRPO and its like log a loss, too, which starts at zero and says nothing about learning.
        return reported or self.logged(key) if key in self.method.columns else None

    @property
    def precision(self) -> str:
        """`FP8 te/delayed`, `BF16`: as the rows of metrics say it."""
        if label := self.logged("precision"):
            return str(label)
        ran = self.receipt.get("precision") or {}
        if ran.get("ran") in ("fp8", "fp4"):
            return f"{ran['ran'].upper()} {ran.get('backend')}/{ran.get('scaling')}"
        asked = self.config.get("precision", {}).get("compute", "")
        return str(ran.get("ran") or asked).upper()

    @property
    def method(self) -> Method:
        """Its training method; SFT where that is of another version."""
        return method_in(self.config)

    @property
    def scores(self) -> dict[str, float]:
        """Where its method's own measures end, by name; reads the end of `metrics.jsonl` only."""
        ends = {n: MEASURES[n].end(self.tail) for n in self.method.judged if MEASURES[n].rises}
        return {name: end for name, x in ends.items() if (end := finite(x)) is not None}

    @property
    def tasks(self) -> dict[str, dict[str, Any]]:
        """Last scores of each task: the verb `evaluate` adds some of other tasks."""
        found = [scores_in(row) for row in self.rows]
        return {task: scores for row in found for task, scores in row.items()}

    @cached_property
    def samples(self) -> list[tuple[int, list[dict[str, Any]]]]:
        """(step, prompts with their answers), oldest first; the trained model's last."""
        asked = ((int(row["step"]), _samples_in(row)) for row in self.rows)
        found = [(step, samples) for step, samples in asked if samples]
        final = _samples_in(self.report)
        if final and (not found or found[-1][1] != final):
            found.append((self.last_step, final))
        return found

    @cached_property
    def last_step(self) -> int:
        """The last step that was logged."""
        return int(self.logged("step") or 0)

    @cached_property
    def planned_steps(self) -> int | None:
        """Steps of the whole run; None where it is not known yet."""
        train = TrainSection(self.config.get("train", {}))
        steps = train.max_steps
        if isinstance(steps, (int, float)) and steps > 0:
            return int(steps)
        if self.state == "finished":
            return self.last_step
        # Step over epoch is the number of steps of an epoch, which only the trainer knows.
        row = next((r for r in reversed(self.tail) if finite(r.get("epoch"))), None)
        # 3 is the default of Transformers' `TrainingArguments`.
        epochs = finite(train.num_train_epochs) or 3
        return round(row["step"] / row["epoch"] * epochs) if row else None

    def summary(self) -> dict[str, Any]:
        """Summarize the run for a table; reads the end of `metrics.jsonl` only.

        Losses in nats per token, None where the method's says nothing; memory in GiB: the measured
        peak of a step where there is one, else the process's. `fallback` is why BF16 ran
        where FP8 was requested, or empty.
        """
        report, memory = self.report, self.receipt.get("memory", {}).get("measured_gib")
        return {
            "recipe": self.recipe,
            "run": self.name,
            "folder": str(self.folder),
            "started": datetime.fromtimestamp(self.started).isoformat(timespec="seconds"),
            "precision": self.precision,
            "state": self.state,
            "proven": self.proven,
            "fallback": (self.receipt.get("precision") or {}).get("fallback") or "",
            "step": self.last_step,
            "steps": self.planned_steps,
            "loss": finite(self.learned("loss", report.get("final_loss"))),
            "eval_loss": finite(self.learned("eval_loss", report.get("eval_loss"))),
            "scores": self.scores,
            "tokens_per_s": finite(report.get("tokens_per_s") or self.logged("tokens_per_s")),
            "memory_gib": finite(memory or report.get("peak_memory_gib")),
        }

    @cached_property
    def tail(self) -> list[dict[str, Any]]:
        """The last rows of `metrics.jsonl`, without reading all of a long one."""
        return list(_rows_of(_read(self.folder / "metrics.jsonl", TAIL_BYTES)))


def finite(value: Any) -> float | None:
    """A number that can be shown; None for what is missing, NaN or infinite."""
    # Booleans are numbers of Python, and would be drawn as 0 and 1.
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        return value
    return None


def _read(file: Path, last: int | None = None) -> str:
    """A text file, or its last bytes; empty where it cannot be read."""
    if not os.path.isfile(file):  # reading a named pipe would wait for ever
        return ""
    try:
        with file.open("rb") as opened:
            if last is not None:
                opened.seek(max(0, opened.seek(0, os.SEEK_END) - last))
            # A read from within the file may begin in the middle of a character.
            return opened.read().decode("utf-8", errors="replace")
    except OSError:
        return ""


def json_of(file: Path) -> dict[str, Any]:
    """A JSON object; empty when the file is missing or not whole."""
    try:
        data = json.loads(_read(file))
    except (ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}


def _whole(data: dict[str, Any], parts: dict[str, Any]) -> dict[str, Any]:
    """Replace parts of another form by empty ones: one bad file spoils no table and no page."""
    for key, form in parts.items():
        if key in data and (data[key] is None or not _fits(data[key], form)):
            # A type with alternatives (`_ANY`) may be None; what has to be a text is an empty one.
            nothing = None if isinstance(form, UnionType) else ""
            data = data | {key: type(form)() if isinstance(form, dict | list) else nothing}
    return data


def _fits(value: Any, form: Any) -> bool:
    """True for a value of a type; a list of values that fit; or a mapping whose values do."""
    if isinstance(form, dict):
        return value is None or (
            isinstance(value, dict) and all(_fits(value.get(k), f) for k, f in form.items())
        )
    if isinstance(form, list):
        return isinstance(value, list) and all(_fits(one, form[0]) for one in value)
    return isinstance(value, form)


def _samples_in(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Prompts with answers in a row of metrics or in the report."""
    given = row.get("samples")
    texts = (one for one in given if isinstance(one, dict)) if isinstance(given, list) else ()
    return [s for s in texts if all(isinstance(s.get(key), str) for key in ("prompt", "answer"))]


def images_in(sample: dict[str, Any]) -> list[str]:
    """Names of the copies of images in `samples/` that a prompt was asked with."""
    given = sample.get("images")
    names = given if isinstance(given, list) else ()
    return [name for name in names if isinstance(name, str)]


def scores_in(row: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Scores by task in a row of metrics, without a damaged one's."""
    tasks = row.get("tasks")
    scored = tasks.items() if isinstance(tasks, dict) else ()
    return {task: scores for task, scores in scored if isinstance(scores, dict)}


def _rows_of(text: str) -> Iterable[dict[str, Any]]:
    # `splitlines` would also cut at U+0085 and U+2028, which JSON has as they are within a text.
    for line in text.split("\n"):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue  # half a line: it is being written, or its writer was killed
        if isinstance(row, dict) and finite(row.get("step")) is not None:
            yield row
