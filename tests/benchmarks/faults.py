"""Faults in the middle of a run: what is lost, what is said, and the exit code.

    python -m tests.benchmarks.faults [NAME ...]

Each fault happens in step 5 of a tiny run that saves every second step, in a process of its own.
Faults of the system are real ones: signals, a limit on the size of files, `/dev/full`, a folder
without permission. Memory and clocks are simulated. A run that ends has to leave whole
checkpoints only, and one error: the first. Prints a table.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any
from unittest import mock

from finetune.runs.checkpoints import CHECKPOINTS, Checkpoint, checkpoints_in
from finetune.runs.folder import write_start
from tests.forked import ended, start

RECIPE = "tiny_full_fp8"
SETTINGS = (
    "train.max_steps=8", "train.save_strategy=steps", "train.save_steps=2", "train.logging_steps=1",
    "train.eval_strategy=no", "eval.samples=false", "data.max_rows=24", "train.max_length=64",
    "precision.health_every=0",
)  # fmt: skip
DONE = 4
"""Steps that have ended, and are saved, when the fault comes."""


@dataclass(frozen=True)
class Fault:
    """A fault and what has to come of it.

    Attributes:
        does: the fault in words.
        inject: brings it about, called in the process of the run before that starts.
        code: exit code.
        says: texts that its report has, in this order; `{pid}` and `{host}` are of the process.
        newest: step of the newest whole checkpoint afterwards; 0: none.
        settings: further ones of the run.
        verb: words of the command line.
    """

    does: str
    inject: Callable[[], None]
    code: int
    says: tuple[str, ...]
    newest: int = DONE
    settings: tuple[str, ...] = ()
    verb: tuple[str, ...] = (RECIPE,)


def run_folder() -> Path:
    """The folder of the run of this process."""
    (start,) = Path("runs").glob("*/*/run.json")
    return start.parent


# ------------------------------------------------------------------------------------ injections


def in_step_5(act: Callable[[], None]) -> None:
    """Do something at the beginning of step 5."""
    from transformers.trainer_callback import CallbackHandler

    plain = CallbackHandler.on_step_begin

    def on_step_begin(self: Any, args: Any, state: Any, control: Any) -> Any:
        if state.global_step == DONE:
            act()
        return plain(self, args, state, control)

    CallbackHandler.on_step_begin = on_step_begin


def signals(*numbers: int) -> None:
    def act() -> None:
        for number in numbers:
            os.kill(os.getpid(), number)

    in_step_5(act)


def fail(error: Callable[[], BaseException]) -> None:
    def act() -> None:
        raise error()

    in_step_5(act)


def out_of_gpu_memory() -> BaseException:
    import torch

    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has ...")


def no_host_memory() -> None:
    """None that could be pinned is left when gradients are to leave the device."""
    import torch

    from finetune.precision.stored.masters import Master

    plain = Master.gradient_buffer

    def empty(*_: Any, **__: Any) -> Any:
        raise torch.AcceleratorError("CUDA error: out of memory")

    def gradient_buffer(self: Master) -> Any:
        with mock.patch("torch.empty", empty):
            return plain(self)

    Master.gradient_buffer = gradient_buffer


def stopped_in_an_update() -> None:
    """Twice, in step 5, when half of the masters have been updated."""
    from finetune.precision.stored.masters import Masters
    from finetune.training.helper.optimizer import adamw_host

    adamw_host.LEAST = 1
    plain, sent = Masters.send_up, []

    def send_up(self: Masters, parameter: Any) -> None:
        sent.extend(one for one in self.each if one.parameter is parameter)
        if len(sent) == int((DONE + 0.5) * len(self.each)):
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGINT)
        plain(self, parameter)

    Masters.send_up = send_up


def full_disk_in_a_checkpoint() -> None:
    """The optimizer's file of the next checkpoint lies on a full device."""
    from transformers import Trainer

    plain = Trainer._save_optimizer_and_scheduler

    def save(self: Any, folder: str) -> None:
        if self.state.global_step > DONE:
            (Path(folder) / "optimizer.pt").symlink_to("/dev/full")
        plain(self, folder)

    Trainer._save_optimizer_and_scheduler = save


def full_disk_in_the_log() -> None:
    def act() -> None:
        log = run_folder() / "metrics.jsonl"
        log.rename(log.with_name("before"))
        log.symlink_to("/dev/full")

    in_step_5(act)


def small_files() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))


def read_only() -> None:
    """The run folder cannot be written; root, whom permissions do not bind, becomes nobody."""
    run_folder().chmod(0o555)
    if os.geteuid() == 0:
        Finalize(None, os.seteuid, (0,), exitpriority=100)  # the process cleans up as root
        os.seteuid(65534)


def another_runs_folder() -> None:
    """The next run folder has a living process's `run.json`."""
    from finetune.training import trainer

    folder = Path("runs", RECIPE, "20260101-000000-aaaa-fp8-delayed").absolute()
    folder.mkdir(parents=True)
    write_start(folder)
    (folder / "config.yaml").write_text("model: {}\n")
    trainer.name_folder = lambda *_: folder


def eval_loss_of_nan() -> None:
    from trl import SFTTrainer

    plain = SFTTrainer.prediction_step

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        loss, *rest = plain(self, *args, **kwargs)
        return (loss * float("nan") if self.state.global_step else loss), *rest

    SFTTrainer.prediction_step = step


def clock_jumps_back() -> None:
    """From step 5 on the clock, and the times of files, are those of the day before."""
    from finetune.training.checkpoints import writing as checkpoints

    now, plain = time.time, checkpoints._rename

    def rename(made: Path, final: Path) -> None:
        plain(made, final)
        os.utime(final, (time.time(), time.time()))

    def act() -> None:
        time.time = lambda: now() - 86_400

    checkpoints._rename = rename
    in_step_5(act)


def no_receipt() -> None:
    """A folder stands where the receipt is written first."""
    (run_folder() / "receipt.json.partial").mkdir()


def both(first: BaseException) -> None:
    def act() -> None:
        no_receipt()
        raise first

    in_step_5(act)


MASTERS = (
    "precision.scaling=tensorwise", "precision.fp8_params=true", "model.dtype=bfloat16",
    "train.optim=adamw_torch_8bit",
)  # fmt: skip
STOPPED = ("Interrupted. Resume: python -m finetune resume",)
GO_ON = "resume: python -m finetune resume"
FAULTS = {
    **{
        name: Fault(
            f"{name}, once", partial(signals, getattr(signal, name)),
            128 + getattr(signal, name), STOPPED, DONE + 1,
        )
        for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1")
    },
    "twice": Fault("SIGTERM, twice", partial(signals, *2 * [signal.SIGTERM]), 143, STOPPED),
    "full": Fault(
        "disk full, in a checkpoint", full_disk_in_a_checkpoint, 2,
        ("checkpoint of step 6 could not be written", "make room", GO_ON),
    ),
    "full_log": Fault(
        "disk full, in the log", full_disk_in_the_log, 2,
        ("could not be written", "No space left", "make room", GO_ON),
    ),
    "limit": Fault(
        "limit on the size of a file", partial(in_step_5, small_files), 2,
        ("checkpoint of step 6 could not be written", "ulimit -f", GO_ON),
    ),
    "deleted": Fault(
        "run folder deleted", partial(in_step_5, lambda: shutil.rmtree(run_folder())), 2,
        ("was deleted or moved while the run was training", "start again"), 0,
    ),
    "read_only": Fault(
        "run folder read-only", partial(in_step_5, read_only), 2,
        ("could not be written", "Permission denied", "leave the folder writable", GO_ON),
    ),
    "resumed": Fault(
        "resume of a run that goes on", another_runs_folder, 2,
        ("is still running", "process {pid} on {host}", "kill {pid}"), 0, verb=("resume", "last"),
    ),
    "nan": Fault(
        "eval loss NaN", eval_loss_of_nan, 2,
        ("eval loss is not finite at step 5", "eval rows", GO_ON), DONE + 1,
        ("train.eval_strategy=steps", "train.eval_steps=5"),
    ),
    "memory": Fault(
        "out of memory, host", partial(fail, MemoryError), 2,
        ("out of memory", "train.per_device_train_batch_size=4", GO_ON),
    ),
    "gpu_memory": Fault(
        "out of memory, GPU", partial(fail, out_of_gpu_memory), 2,
        ("out of memory", "20.00 GiB", "train.gradient_checkpointing=true", GO_ON),
    ),
    "host_memory": Fault(
        "no host memory for masters", no_host_memory, 2,
        ("host memory is full", "CUDA error: out of memory", "ulimit -l"), 0, MASTERS,
    ),
    "masters_full": Fault(
        "disk full, with masters", full_disk_in_a_checkpoint, 2,
        ("checkpoint of step 6 could not be written", "make room", GO_ON), settings=MASTERS,
    ),
    "masters_twice": Fault(
        "SIGINT, twice, in an update", stopped_in_an_update, 130, STOPPED, settings=MASTERS
    ),
    "clock": Fault(
        "clock one day back", clock_jumps_back, 0, ("FP8 verified",), 8,
        ("checkpoints.keep_last=1",),
    ),
    "receipt": Fault(
        "receipt cannot be written", partial(in_step_5, no_receipt), 2,
        ("receipt could not be written", GO_ON), 8,
    ),
    "two_errors": Fault(
        "an error, then the receipt's", partial(both, MemoryError("the first")), 2,
        ("no receipt could be written", "error: the run is out of memory", "the first"),
    ),
}  # fmt: skip


# ------------------------------------------------------------------------------------------- runs


@dataclass(frozen=True)
class Outcome:
    """What a fault left: exit code, output, steps of whole and of broken checkpoints."""

    pid: int | None
    code: int | None
    output: str
    whole: list[int]
    broken: dict[int, str]

    def has_said(self, texts: tuple[str, ...]) -> bool:
        """True if the output has these texts, in this order."""
        known = {"pid": self.pid, "host": socket.gethostname()}
        pattern = r"[\s\S]*".join(re.escape(text.format(**known)) for text in texts)
        return re.search(pattern, self.output) is not None

    @property
    def message(self) -> str:
        """The line that reports the fault."""
        found = re.search(r"^(error: .*|Interrupted.*)$", self.output, re.M)
        return found[0] if found else ""


def _inject(name: str) -> None:
    FAULTS[name].inject()


def happens(name: str) -> Outcome:
    """Let a fault happen."""
    fault = FAULTS[name]
    settings = (*SETTINGS, *fault.settings) if fault.verb == (RECIPE,) else fault.settings
    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o755)  # `nobody` enters it
        process = start(Path(place), *fault.verb, *settings, before=partial(_inject, name))
        ended([process])
        saved = [
            Checkpoint(path)
            for folder in Path(place).glob(f"runs/*/*/{CHECKPOINTS}")
            for path in checkpoints_in(folder).values()
        ]
        problems = {one.step: one.problem(contents=True) for one in saved}
        return Outcome(
            process.pid,
            process.exitcode,
            (Path(place) / "log.txt").read_text("utf-8"),
            [step for step, problem in problems.items() if not problem],
            {step: problem for step, problem in problems.items() if problem},
        )


def main(names: list[str]) -> list[dict[str, Any]]:
    """Print what each fault did."""
    from rich.table import Table

    from finetune.logging import output

    table = Table("fault, in step 5", "exit", "newest checkpoint", "message", box=None)
    rows = []
    for name in names or FAULTS:
        fault, found = FAULTS[name], happens(name)
        newest = max(found.whole, default=0)
        table.add_row(
            fault.does, str(found.code), f"step {newest}" if newest else "-", found.message
        )
        rows.append({"fault": name, "exit": found.code, "newest": newest, "said": found.message})
        print(json.dumps(rows[-1]), file=sys.stderr)
        if "Traceback" in found.output or not found.has_said(fault.says):
            print(found.output, file=sys.stderr)
    output().print(table)
    return rows


if __name__ == "__main__":
    main(sys.argv[1:])
