"""Large data: resident memory over time and seconds to the first step, beside plain TRL.

    python -m tests.benchmarks.large_data [--rows 1000000] [--steps 2000] [--only stream]

A JSONL file of prompts and completions is made in a temporary folder, beside an own cache of
`datasets`. Each run is a process of its own: the tiny packaged model, one short row a step.
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


def measure(run: str, file: Path, steps: int, folder: Path) -> dict[str, float | str]:
    """Seconds to the first step, seconds of all steps, and memory (MiB) by quarter of the steps."""
    environment = os.environ | {"HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1"}
    out, began = folder / run.replace(" ", "_"), time.perf_counter()
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            command(run, file, steps, out), stdout=log, stderr=subprocess.STDOUT, env=environment
        )
        memory: list[tuple[float, float]] = []
        first = 0.0
        while process.poll() is None:
            time.sleep(PERIOD)
            now = time.perf_counter() - began
            memory.append((now, resident(process.pid)))
            text = "" if first else Path(log.name).read_text()
            metrics = [] if first else list(out.glob("**/metrics.jsonl"))
            done = any(path.stat().st_size for path in metrics)
            first = first or (now if done or "'loss'" in text else 0.0)
    if process.returncode:
        print(Path(log.name).read_text()[-3000:], file=sys.stderr)
        raise SystemExit(f"{run}: exit code {process.returncode}")
    training = [mib for at, mib in memory[:-2] if at >= first]
    quarters = [training[len(training) * i // 4] for i in range(4)] + training[-1:]
    return {
        "run": run,
        "first step, s": round(first, 1),
        "all, s": round(time.perf_counter() - began, 1),
        "peak, MiB": round(max(mib for _, mib in memory)),
        "memory while training, MiB": " ".join(f"{mib:.0f}" for mib in quarters),
    }


def main() -> None:
    """Print a row of figures for each run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--only", action="append", choices=RUNS)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, file = Path(name), Path(name) / "rows.jsonl"
        make(file, given.rows)
        print(f"{given.rows:,} rows, {file.stat().st_size / 2**20:.0f} MiB, {given.steps} steps")
        for run in given.only or RUNS:
            print(json.dumps(measure(run, file, given.steps, folder)), flush=True)


if __name__ == "__main__":
    main()
