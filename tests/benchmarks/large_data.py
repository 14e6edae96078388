"""Large data: memory over time, seconds and CPU seconds to the first step, beside plain TRL.

    python -m tests.benchmarks.large_data [--rows 1000000] [--steps 2000] [--only stream]

JSONL files of prompts and completions are made in a temporary folder, beside an own cache of
`datasets`. Each run is a process of its own: the tiny packaged model, one short row a step. CPU
seconds, of a process and all that it starts, tell two programs apart where other work shares the
machine.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PLAIN = """
import sys
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer
file, steps, streaming, model = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "stream", sys.argv[4]
rows = load_dataset("json", data_files=file, split="train", streaming=streaming)
rows = rows.map(lambda row: {
    "prompt": [{"role": "user", "content": row["prompt"]}],
    "completion": [{"role": "assistant", "content": row["completion"]}],
})
args = SFTConfig(
    output_dir=sys.argv[5], max_steps=steps, per_device_train_batch_size=1, max_length=64,
    logging_steps=1, save_strategy="no", report_to=[], use_cpu=True, bf16=True, disable_tqdm=True,
    gradient_checkpointing=False, learning_rate=1e-4,
)
SFTTrainer(
    AutoModelForCausalLM.from_pretrained(model), args=args, train_dataset=rows,
    processing_class=AutoTokenizer.from_pretrained(model),
).train()
"""
"""The same file and steps by TRL alone: path, steps, `stream` or `map`, model, output folder."""
RUNS = ("stream", "cached", "again", "trl stream", "trl cached", "trl again")
PERIOD = 0.5


def make(file: Path, rows: int) -> None:
    """Rows of about 200 bytes, each another."""
    with file.open("w", encoding="utf-8") as out:
        for i in range(rows):
            row = {
                "prompt": f"What is {i} and {i % 997}?",
                "completion": f"It is {i + i % 997}. " * 8,
            }
            out.write(json.dumps(row) + "\n")


def command(run: str, file: Path, steps: int, out: Path) -> list[str]:
    """The process of a run."""
    from finetune.config.paths import TINY_LLAMA

    kind = "stream" if "stream" in run else "map"
    if run.startswith("trl"):
        return [sys.executable, "-c", PLAIN, str(file), str(steps), kind, str(TINY_LLAMA), str(out)]
    train = {
        "max_steps": steps, "per_device_train_batch_size": 1, "max_length": 64, "logging_steps": 1,
        "save_strategy": "no", "eval_strategy": "no", "gradient_checkpointing": "false",
        "gradient_accumulation_steps": 1, "learning_rate": 1e-4,
    }  # fmt: skip
    return [
        *(sys.executable, "-m", "finetune", "tiny_full_bf16", f"data.path={file}", "~data.prompts"),
        *(f"data.streaming={str(kind == 'stream').lower()}", "eval.samples=false"),
        *("data.eval_fraction=0", "--out", str(out)),
        *(f"train.{key}={value}" for key, value in train.items()),
    ]


def resident(pid: int) -> float:
    """Resident memory of a process and its children in MiB, without pages of files."""
    found = 0.0
    for one in (pid, *children(pid)):
        try:
            status = Path(f"/proc/{one}/status").read_text()
        except OSError:
            continue
        anonymous = [x for x in status.splitlines() if x.startswith(("RssAnon", "RssShmem"))]
        found += sum(int(line.split()[1]) for line in anonymous) / 1024
    return found


def children(pid: int) -> Iterator[int]:
    """Processes that a process has started, with theirs."""
    try:
        listed = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return
    for one in map(int, listed):
        yield one
        yield from children(one)


def cpu_seconds(pid: int) -> float:
    """User and system time of a process, and of the processes that it has or had."""
    found = 0.0
    for one in (pid, *children(pid)):
        try:
            fields = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        found += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return found


def measure(run: str, file: Path, steps: int, folder: Path) -> dict[str, float | str]:
    """Seconds to the first step, seconds of all steps, and memory (MiB) by quarter of the steps."""
    environment = os.environ | {"HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1"}
    environment |= {"PYTHONUNBUFFERED": "1"}  # TRL's first step is seen in its output
    out, began = folder / run.replace(" ", "_"), time.perf_counter()
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            command(run, file, steps, out), stdout=log, stderr=subprocess.STDOUT, env=environment
        )
        memory: list[tuple[float, float]] = []
        first = cpu = cpu_first = 0.0
        while process.poll() is None:
            time.sleep(PERIOD)
            now = time.perf_counter() - began
            memory.append((now, resident(process.pid)))
            cpu = cpu_seconds(process.pid) or cpu
            text = "" if first else Path(log.name).read_text()
            metrics = [] if first else list(out.glob("**/metrics.jsonl"))
            done = any(path.stat().st_size for path in metrics)
            if not first and (done or "'loss'" in text):
                first, cpu_first = now, cpu
    if process.returncode:
        print(Path(log.name).read_text()[-3000:], file=sys.stderr)
        raise SystemExit(f"{run}: exit code {process.returncode}")
    training = [mib for at, mib in memory[:-2] if at >= first]
    quarters = [training[len(training) * i // 4] for i in range(4)] + training[-1:]
    return {
        "run": run,
        "first step, s": round(first, 1),
        "first step, CPU s": round(cpu_first, 1),
        "all, s": round(time.perf_counter() - began, 1),
        "all, CPU s": round(cpu, 1),
        "peak, MiB": round(max(mib for _, mib in memory)),
        "memory while training, MiB": " ".join(f"{mib:.0f}" for mib in quarters),
    }


def main() -> None:
    """Print a row of figures for each run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument(
        "--cached-rows", type=int, default=100_000, help="rows of the runs that do not stream"
    )
    parser.add_argument("--only", action="append", choices=RUNS)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, found = Path(name), dict[str, dict[str, Any]]()
        for run in given.only or RUNS:
            rows = given.rows if "stream" in run else given.cached_rows
            file = folder / f"{rows}.jsonl"
            if not file.exists():
                make(file, rows)
                size = file.stat().st_size / 2**20
                print(f"{rows:,} rows, {size:.0f} MiB, {given.steps} steps")
            found[run] = measure(run, file, given.steps, folder)
            print(json.dumps(found[run]), flush=True)
    for run in (run for run in found if f"trl {run}" in found):
        trl = found[f"trl {run}"]
        ratios = {k: round(v / trl[k], 2) for k, v in found[run].items() if isinstance(v, float)}
        print(json.dumps({"ours / TRL": run, **ratios}))


if __name__ == "__main__":
    main()
