"""Large data: memory over time, seconds and CPU seconds to the first step, beside plain TRL.

    python -m tests.benchmarks.large_data [--rows 1000000] [--steps 2000] [--only stream]

JSONL files of prompts and completions are made in a temporary folder, beside an own cache of
`datasets`. Each run is a process of its own: the tiny packaged model, one short row a step. TRL's
program has the recipe's own settings, so both compute the same: that their losses are equal, to
the last bit of each step, is printed. Streams run beside each other, a core each; the others one
after another, since ours converts and tokenizes with all cores. CPU seconds, of a process and all
that it starts, tell two programs apart where other work shares the machine.
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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

PLAIN = """
import json, sys
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer
file, streaming, model, out, settings = sys.argv[1:]
rows = load_dataset("json", data_files=file, split="train", streaming=streaming == "stream")
rows = rows.map(lambda row: {
    "prompt": [{"role": "user", "content": row["prompt"]}],
    "completion": [{"role": "assistant", "content": row["completion"]}],
})
given = json.loads(settings)
if streaming == "stream":
    rows = rows.shuffle(seed=given["seed"], buffer_size=1000)
    given["accelerator_config"] = {"dispatch_batches": False}
trainer = SFTTrainer(
    AutoModelForCausalLM.from_pretrained(model, dtype="float32"),
    args=SFTConfig(output_dir=out, use_cpu=True, bf16=True, disable_tqdm=True, **given),
    train_dataset=rows,
    processing_class=AutoTokenizer.from_pretrained(model),
)
trainer.train()
trainer.save_model()
losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
json.dump(losses, open(f"{out}/losses.json", "w"))
"""
"""The same file by TRL alone: path, `stream` or `map`, model, output folder, settings in JSON."""
RECIPE = "tiny_full_bf16"
RUNS = (("stream", "trl stream"), ("cached",), ("trl cached",), ("again",), ("trl again",))
"""Runs in their order; those of a group run at once."""
OURS = ("stream", "cached", "again")
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
    from finetune import load_recipe
    from finetune.config.paths import TINY_LLAMA

    kind = "stream" if "stream" in run else "map"
    train = {
        "max_steps": steps, "per_device_train_batch_size": 1, "max_length": 64, "logging_steps": 1,
        "save_strategy": "no", "eval_strategy": "no", "gradient_checkpointing": "false",
        "gradient_accumulation_steps": 1, "learning_rate": 1e-4,
    }  # fmt: skip
    words = [f"train.{key}={value}" for key, value in train.items()]
    if run.startswith("trl"):
        # What a recipe does of itself: the newline behind an answer is not the answer's.
        settings = json.dumps(
            load_recipe(RECIPE, words).config.train | {"assistant_only_loss": True}
        )
        program = [sys.executable, "-c", PLAIN, str(file), kind]
        return [*program, str(TINY_LLAMA), str(out), settings]
    return [
        sys.executable, "-m", "finetune", RECIPE, f"data.path={file}", "~data.prompts",
        f"data.streaming={str(kind == 'stream').lower()}", "eval.samples=false",
        "data.eval_fraction=0", "--out", str(out), *words,
    ]  # fmt: skip


def losses(out: Path) -> list[float]:
    """Loss of each step."""
    for file in out.glob("losses.json"):
        return json.loads(file.read_text())
    (file,) = out.glob("**/metrics.jsonl")
    rows = map(json.loads, file.read_text().splitlines())
    return [row["loss"] for row in rows if "loss" in row]


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


def measure(run: str, words: list[str], steps: int, folder: Path) -> dict[str, float | str]:
    """Seconds to the first step, seconds of all steps, and memory (MiB) by quarter of the steps."""
    environment = os.environ | {"HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1"}
    # One thread each: two of them, on as many cores, would slow one another down.
    environment |= {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    out, began = folder / run.replace(" ", "_"), time.perf_counter()
    with (folder / f"{out.name}.log").open("w") as log:
        process = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT, env=environment)
        memory: list[tuple[float, float]] = []
        first = cpu = cpu_first = cpu_last = 0.0
        seen = seen_first = seen_last = 0
        while process.poll() is None:
            time.sleep(PERIOD)
            now = time.perf_counter() - began
            memory.append((now, resident(process.pid)))
            cpu = cpu_seconds(process.pid) or cpu
            seen = Path(log.name).read_text().count(" loss " if run in OURS else "'loss'")
            if seen and not first:
                first, cpu_first, seen_first = now, cpu, seen
            if seen_last < seen < steps:
                cpu_last, seen_last = cpu, seen
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
        "a step, CPU ms": round((cpu_last - cpu_first) / (seen_last - seen_first) * 1e3, 1),
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
    parser.add_argument("--cached-steps", type=int, default=200)
    parser.add_argument("--only", action="append", choices=[one for group in RUNS for one in group])
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, found = Path(name), dict[str, dict[str, Any]]()

        for group in RUNS:
            words, sizes = dict[str, list[str]](), dict[str, tuple[int, int]]()
            for run in (run for run in group if run in (given.only or group)):
                stream = "stream" in run
                rows = given.rows if stream else given.cached_rows
                sizes[run] = rows, given.steps if stream else given.cached_steps
                if not (file := folder / f"{rows}.jsonl").exists():
                    make(file, rows)
                words[run] = command(run, file, sizes[run][1], folder / run.replace(" ", "_"))

            def measured(run: str, words: Any = words, sizes: Any = sizes) -> None:
                rows, steps = sizes[run]
                found[run] = measure(run, words[run], steps, folder)
                print(json.dumps({"rows": rows, "steps": steps, **found[run]}), flush=True)

            with ThreadPoolExecutor(max(len(words), 1)) as pool:
                list(pool.map(measured, words))
        for run in (run for run in found if f"trl {run}" in found):
            trl = found[f"trl {run}"]
            ratios = {
                k: round(v / trl[k], 3) for k, v in found[run].items() if not isinstance(v, str)
            }
            same = losses(folder / run) == losses(folder / f"trl_{run}")
            print(json.dumps({"ours / TRL": run, **ratios, "losses are equal": same}))


if __name__ == "__main__":
    main()
