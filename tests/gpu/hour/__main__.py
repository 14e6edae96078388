"""The GPU hour: one command for every figure that only an FP8 GPU can give.

    python -m tests.gpu.hour                      # all parts, about an hour
    python -m tests.gpu.hour --parts gemm,lora_r8
    python -m tests.gpu.hour --within 9           # ends after 9 minutes, for a GPU lent by the call
    python -m tests.gpu.hour --rehearse           # tiny sizes, on whatever is here, also a CPU

Random weights, no downloads. Each part is a process of its own with a limit of 8 minutes, so that a
crash or a lack of memory loses that part alone; what a benchmark had measured by then is kept. A
part that has its result in the folder is not run again: Ctrl-C at any time, and the same command
goes on. One that failed, or could not run, is tried again; so is one that `--within` has cut short.
To measure a part again, delete its `PART/result.json`.

Written after each part: `hour.json`, and `hour.md`, whose text goes into FP8_FINDINGS.md as it is.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from finetune.errors import ConfigError, FinetuneError, did_you_mean
from finetune.hardware.versions import version
from finetune.runs.folder import make_folder, new_folder, write_whole
from finetune.units import elapsed
from tests.gpu.hour.parts import (
    PARTS,
    Part,
    predictions,
    predictions_markdown,
    promises_markdown,
    read_part,
)

ROOT = Path(__file__).parents[3]
OUT = "runs/gpu_hour"
MINUTES = 8.0
PATIENCE_S = 20.0
"""Seconds between Ctrl-C and the end by force, in which a benchmark writes its rows."""
LEAST_S = 60.0
"""Seconds that must be left of `--within` for another part to be begun."""
INTERRUPTED = 130
LIBRARIES = (
    "torch", "triton", "nvidia-cublas", "nvidia-cublas-cu12", "transformers", "trl", "peft",
    "accelerate", "torchao", "transformer-engine", "liger-kernel", "flash-attn", "bitsandbytes",
)  # fmt: skip


def environment(*, rehearse: bool) -> dict[str, Any]:
    """GPU, driver, versions and commit, found without torch, which would take memory of the GPU."""
    query = "name,driver_version,memory.total,power.limit"
    gpu = _output("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader")
    name, driver, *rest = f"{gpu.splitlines()[0]}, , ".split(", ") if gpu else ("no NVIDIA GPU", "")
    return {
        "gpu": name,
        "driver": driver,
        "limits": ", ".join(x for x in rest if x.strip()),
        "rehearsal": rehearse,
        "versions": {"python": platform.python_version()}
        | {library: found for library in LIBRARIES if (found := version(library))},
        "commit": _output("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"),
        "date": time.strftime("%Y-%m-%d"),
    }


def _output(program: str, *words: str) -> str:
    """What a program prints; nothing where it is missing or fails."""
    if shutil.which(program) is None:
        return ""
    found = subprocess.run([program, *words], capture_output=True, text=True, check=False)
    return found.stdout.strip() if found.returncode == 0 else ""


# ----------------------------------------------------------------------------------------- a part


def execute(
    command: Sequence[str], folder: Path, limit_s: float, codes: Sequence[int] = (0,)
) -> str:
    """Run a command as a process, its output in files of the folder.

    Args:
        codes: exit codes of a good end.

    Returns:
        How it ended, if it ended badly; an empty text otherwise.
    """
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    with (folder / "stdout.txt").open("w") as out, (folder / "log.txt").open("w") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out, stderr=log,
            env=os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": paths},
            start_new_session=True,  # Ctrl-C comes here first, and ends all its processes in order
        )  # fmt: skip
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return f"the time limit of {elapsed(limit_s)} was reached"
        finally:
            _end(process)
    if code in codes:
        return ""
    if code == -signal.SIGKILL:
        return "killed by the system, as Linux does where a process takes the last of its memory"
    if code < 0:
        return f"ended by {signal.Signals(-code).name}"
    lines = (folder / "log.txt").read_text("utf-8", errors="replace").splitlines()
    errors = [line for line in lines if re.match(r"(\w|\.)*Error\b|error: ", line)]
    said = next(iter([*errors[-1:], *filter(str.strip, lines[-1:])]), "")
    return f"exit code {code}" + (f": {said.strip()[:300]}" if said else "")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End what is left of the process and of those that it started."""
    for number in (signal.SIGINT, signal.SIGKILL):
        if process.poll() is None or number == signal.SIGKILL:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(PATIENCE_S)


class Hour:
    """The parts in a folder.

    Args:
        out: folder of all results.
        rehearse: run the tiny commands.
        minutes: limit of a part.
        within: minutes after which all has ended.

    Raises:
        ConfigError: the folder has results of another machine, or of a rehearsal.
    """

    def __init__(
        self, out: Path, *, rehearse: bool, minutes: float, within: float | None = None
    ) -> None:
        self.out, self.rehearse, self.limit_s = out, rehearse, minutes * 60
        self.ends = math.inf if within is None else time.monotonic() + within * 60 - PATIENCE_S
        self.environment = environment(rehearse=rehearse)
        self.parts: dict[str, dict[str, Any]] = {
            part.name: json.loads(file.read_text("utf-8"))
            for part in PARTS
            if (file := out / part.name / "result.json").exists()
        }
        for name, record in self.parts.items():
            self._check(name, record["environment"])

    def _check(self, name: str, then: dict[str, Any]) -> None:
        def key(facts: dict[str, Any]) -> tuple[Any, ...]:
            return facts["gpu"], facts["versions"].get("torch"), facts["rehearsal"]

        if key(then) != key(self.environment):
            raise ConfigError(
                "the folder has results of another machine, another torch or a rehearsal",
                where=f"{self.out / name}: {key(then)}; here {key(self.environment)}",
                why="figures of one table would not belong together",
                fix=f"--out {self.out}_2, or another new folder",
            )

    def is_done(self, part: Part) -> bool:
        return self.parts.get(part.name, {}).get("status") == "measured"

    def run(self, part: Part) -> dict[str, Any]:
        """Run a part, or find out why it cannot run; its record is written and returned.

        Raises:
            KeyboardInterrupt: the time of `--within` is over, or will be before the part has begun.
        """
        if self.ends - time.monotonic() < LEAST_S:
            raise KeyboardInterrupt
        folder, started = new_folder(self.out / part.name, self.out), time.time()
        reason, result = self._lacks(part), None
        if not reason:
            reason = self._execute(part, folder)
            result = read_part(part, folder)
            reason = result.failed or reason if result else reason or "it wrote no result"
        if result and result.failed:
            result = None
        # The last lines of logs and of benchmarks name files by their whole path.
        here = f"{self.out.resolve()}{os.sep}"
        record = {
            "part": part.name,
            "command": self._command(part),
            "status": "measured" if result else "not measured",
            "reason": reason.replace(here, ""),
            "seconds": round(time.time() - started, 1),
            "environment": self.environment,
            "result": result.data if result else None,
            "markdown": result.markdown.replace(here, "") if result else "",
        }
        write_whole(self.out / part.name / "result.json", json.dumps(record, indent=1) + "\n")
        self.parts[part.name] = record
        return record

    def _execute(self, part: Part, folder: Path) -> str:
        words = shlex.split(self._command(part))
        files = shlex.split(part.files.format(folder=shlex.quote(str(folder.resolve()))))
        limit = min(self.limit_s, self.ends - time.monotonic())
        reason = execute([sys.executable, *words[1:], *files], folder, limit, part.codes)
        if limit == self.limit_s or time.monotonic() < self.ends:
            return reason
        raise KeyboardInterrupt  # half a part is none: it is begun again

    def _command(self, part: Part) -> str:
        return part.rehearsal if self.rehearse else part.command

    def _lacks(self, part: Part) -> str:
        """Reason why a part cannot run here."""
        if part.name == "doctor" or (self.rehearse and not part.needs):
            return ""
        record = self.parts.get("doctor")
        if record is None or record["status"] != "measured":
            return "`doctor` gave no result, which says what this machine has"
        found = record["result"]
        te = found["backends"]["te/delayed"]
        verdicts = (found["fp8"], te) if part.needs == "te" else (found["fp8"],)
        return next((verdict["reason"] for verdict in verdicts if not verdict["ok"]), "")

    def write(self) -> None:
        """Write `hour.json` and `hour.md`."""
        results = {name: r["result"] for name, r in self.parts.items() if r["status"] == "measured"}
        rows = predictions(results)
        data = {"kind": "gpu hour", "environment": self.environment, "parts": self.parts}
        text = json.dumps(data | {"predictions": rows}, indent=1)
        write_whole(self.out / "hour.json", text + "\n")
        write_whole(self.out / "hour.md", self.markdown(rows))

    def markdown(self, rows: list[dict[str, Any]]) -> str:
        """The document: machine, then each part with its command and table, or the reason."""
        e = self.environment
        title = "Rehearsal of the GPU hour, no figures" if self.rehearse else "The GPU hour"
        machine = ", ".join(x for x in (e["gpu"], e["limits"]) if x)
        doctor = self.parts.get("doctor", {}).get("result") or {}
        device = doctor.get("device", {}).get("name", e["gpu"])
        facts = [e["date"], machine, e["driver"] and f"driver {e['driver']}"]
        facts += [", ".join(f"{name} {found}" for name, found in e["versions"].items())]
        facts += [e["commit"] and f"commit {e['commit']}"]
        blocks = [f"## {title}: {device}", f"*{' · '.join(filter(None, facts))}*"]
        blocks += ["    python -m tests.gpu.hour" + " --rehearse" * self.rehearse]
        for part in PARTS:
            record = self.parts.get(part.name, {})
            blocks += [f"### {part.title} (`{part.name}`)", f"    {self._command(part)}"]
            blocks += [record["markdown"]] if record.get("markdown") else []
            reason = record.get("reason", "not run yet")
            if not self.is_done(part):
                blocks.append(f"Not measured: {reason}.")
            elif reason:
                blocks.append(f"Incomplete: {reason}.")
        blocks += ["### Promises", promises_markdown(rows)]
        blocks += ["### The estimator against these figures"]
        blocks.append(predictions_markdown(rows) if rows else "Not measured: no step was timed.")
        return "\n\n".join(blocks) + "\n"


# ---------------------------------------------------------------------------------------- command


def chosen(text: str) -> list[Part]:
    """Parts by their names, with `doctor`, which says what the others can have here.

    Raises:
        ConfigError: no such part.
    """
    names = text.split(",") if text else [part.name for part in PARTS]
    known = [part.name for part in PARTS]
    for name in names:
        if name not in known:
            raise ConfigError(
                f"there is no part {name!r}{did_you_mean(name, known)}",
                where=f"--parts {text}",
                fix=f"--parts with names of {', '.join(known)}",
            )
    return [part for part in PARTS if part.name in {"doctor", *names}]


def main(words: Sequence[str] | None = None) -> int:
    """Run the parts that have no result yet; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu.hour", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--parts", default="", help="names with commas between; left out: all")
    parser.add_argument("--out", type=Path, default=Path(OUT), help=f"folder, {OUT}")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="limit of a part, 8")
    parser.add_argument("--within", type=float, help="minutes after which it ends, to go on later")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes, to see that it runs")
    parser.add_argument("--list", action="store_true", help="show the parts, and run none")
    args = parser.parse_args(words)
    try:
        parts = chosen(args.parts)
        hour = Hour(args.out, rehearse=args.rehearse, minutes=args.minutes, within=args.within)
        if args.list:
            for part in parts:
                state = hour.parts.get(part.name, {}).get("status", "not run yet")
                print(f"{part.name:<24} {state:<13} {hour._command(part)}")
            return 0
        make_folder(args.out, args.out)
    except FinetuneError as error:
        parser.error(str(error))
    return _run_all(hour, parts, sys.argv[1:] if words is None else words)


def _run_all(hour: Hour, parts: Sequence[Part], words: Sequence[str]) -> int:
    again = shlex.join(["python", "-m", "tests.gpu.hour", *words])
    for number, part in enumerate(parts, 1):
        title = f"[{number}/{len(parts)}] {part.name}"
        if hour.is_done(part):
            print(f"{title}: has its result, not run again", flush=True)
            continue
        print(f"{title}: {hour._command(part)}", flush=True)
        try:
            record = hour.run(part)
        except KeyboardInterrupt:
            hour.write()
            print(f"interrupted in {part.name}; parts before it are kept. Go on: {again}")
            return INTERRUPTED
        reason = f": {record['reason']}" if record["reason"] else ""
        print(f"    {record['status']} in {elapsed(record['seconds'])}{reason}", flush=True)
        hour.write()
    hour.write()
    missing = [part.name for part in parts if not hour.is_done(part)]
    if missing:
        print(f"not measured: {', '.join(missing)}. To try them again: {again}")
    print(f"written: {hour.out / 'hour.md'}, {hour.out / 'hour.json'}")
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a job's end is like Ctrl-C
    sys.exit(main())
