"""Parts of the hour: their commands, and what each wrote as data and as Markdown.

A part is a command of the repository that anyone can type. Imports no torch, so that the process
that starts the parts holds no memory of the GPU.
"""

from __future__ import annotations

import io
import json
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from finetune.analysis.benchmark.result import Benchmark

BENCHMARK = "python -m finetune benchmark"
LADDER = "python -m tests.benchmarks.ladder"
SETTINGS = "train.gradient_accumulation_steps=1"
POINT = f'--grid "batch=4 length=2048" --rounds 1 {SETTINGS}'
"""8,192 tokens a step: ten timed steps and five before them in each of two processes."""

TINY = '--grid "batch=1 length=16" --rounds 1 --steps 1'


class Result(NamedTuple):
    """What a part measured: for the JSON, and for the Markdown; `failed` if it measured nothing."""

    data: Any
    markdown: str
    failed: str = ""


@dataclass(frozen=True)
class Part:
    """A command and its result.

    Attributes:
        title: heading in the Markdown.
        command: as it is shown and run.
        rehearsal: the same with tiny sizes; empty: there is none.
        read: reads the result from the folder in which the command ran; raises what `read_part`
            catches where there is none.
        files: arguments that are added when it runs; `{folder}` is its folder.
        needs: `fp8` or `te`, where a rehearsal needs it too; all parts but `doctor` need `fp8`.
        codes: exit codes with which the command has done all it should.
    """

    name: str
    title: str
    command: str
    rehearsal: str
    read: Callable[[Path], Result]
    files: str = ""
    needs: str = ""
    codes: tuple[int, ...] = (0,)


def read_part(part: Part, folder: Path) -> Result | None:
    """Result of a part that has ended somehow, None if it left none."""
    try:
        return part.read(folder)
    except (
        OSError,
        ValueError,
        KeyError,
        IndexError,
        ET.ParseError,
    ):  # cut short, or never written
        return None


def read_doctor(folder: Path) -> Result:
    """Findings of `doctor --json`."""
    found = json.loads((folder / "stdout.txt").read_text("utf-8"))
    verdicts = {"FP8": found["fp8"], **found["backends"]}
    if found["gemm"]:
        verdicts["FP8 GEMM, real"] = found["gemm"]
    lines = [f"| {k} | {'yes' if v['ok'] else 'no'} | {v['reason']} |" for k, v in verdicts.items()]
    bad = [f"\nKnown not to work: {line}" for line in found["known_bad"]]
    head = ["| | here | why |", "|---|---|---|"]
    return Result(found, "\n".join([*head, *lines, "", f"auto: {found['auto']}", *bad]))


def read_printed(folder: Path) -> Result:
    """Last line of a command that prints rows and Markdown, and why there is no figure, as JSON."""
    found = json.loads((folder / "stdout.txt").read_text("utf-8").strip().splitlines()[-1])
    return Result(found["rows"], found["markdown"], found.get("failed", ""))


def read_diagnosis(folder: Path) -> Result:
    """Milliseconds of a step by part; the trace lies beside it."""
    found = json.loads((folder / "diagnosis.json").read_text("utf-8"))
    time = found["time"]
    lines = ["| part | ms a step |", "|---|---|"]
    lines += [f"| {row['part']} | {row['seconds'] * 1e3:.4g} |" for row in time["parts"]]
    lines.append(f"| *step* | {found['step_seconds'] * 1e3:.4g} |")
    return Result(found, "\n".join([*lines, "", "Trace: `trace.json.gz`, for Perfetto."]))


def read_text(folder: Path) -> Result:
    """What a command printed, as it is."""
    lines = (folder / "stdout.txt").read_text("utf-8").rstrip().splitlines()
    return Result(
        lines, "\n".join(["```text", *lines, "```"]), "" if lines else "it printed nothing"
    )


def read_tests(folder: Path) -> Result:
    """Counts of pytest's JUnit file, and the names of what failed."""
    cases = list(ET.parse(folder / "tests.xml").getroot().iter("testcase"))
    failed = [
        f"{case.get('classname')}::{case.get('name')}: {str(bad[0].get('message'))[:200]}"
        for case in cases
        if (bad := [*case.findall("failure"), *case.findall("error")])
    ]
    skipped = [str(s.get("message")) for case in cases for s in case.findall("skipped")]
    passed = len(cases) - len(failed) - len(skipped)
    data = {"passed": passed, "failed": failed, "skipped": skipped}
    lines = [f"{passed} passed, {len(failed)} failed, {len(skipped)} skipped"]
    lines += [f"* failed: `{' '.join(line.split())}`" for line in failed]
    lines += [f"* skipped: {reason}" for reason in dict.fromkeys(skipped)]
    return Result(data, "\n".join(lines), "" if cases else "pytest collected no test")


def read_benchmark(folder: Path) -> Result:
    """Rows of the newest benchmark below the folder; those without a time have a reason."""
    files = sorted(folder.rglob("benchmark.json"), key=lambda file: file.stat().st_mtime)
    text = files[-1].read_text("utf-8")
    found = Benchmark.model_validate_json(text)
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(found)
    states = [row.state for row in found.rows]
    why = found.rows[0].explanation or states[0] if found.rows else "no row was measured"
    nothing = all(state == "failed" for state in states)
    shown = f"```text\n{console.export_text().rstrip()}\n```"
    return Result(json.loads(text), shown, why if nothing else "")


def _pair(name: str, title: str, recipe: str, tiny: str, rounds: int = 1) -> Part:
    """A recipe in BF16 and FP8, compiled alike."""
    point = POINT.replace("--rounds 1", f"--rounds {rounds}")
    command = f"{BENCHMARK} {recipe}_bf16 --vs {recipe}_fp8 {point}"
    rehearsal = f"{BENCHMARK} {tiny}_bf16 --vs {tiny}_fp8 {TINY}"
    return Part(name, title, command, rehearsal, read_benchmark, "--out {folder}")


def _engine(method: str, more: str = "") -> Part:
    """An 8B recipe under Transformer Engine."""
    words = "precision.backend=te precision.scaling=delayed precision.power_of_two_scales=null"
    words += more
    return Part(
        f"te_{method}",
        f"Transformer Engine, llama_8b_{method}_fp8",
        f"{BENCHMARK} llama_8b_{method}_fp8 {POINT} {words}",
        f"{BENCHMARK} tiny_{method}_fp8 {TINY} {words}",
        read_benchmark,
        "--out {folder}",
        needs="te",
    )


PARTS = (
    Part("doctor", "This machine", *2 * ("python -m finetune doctor --json",), read_doctor),
    Part(
        "trace_full",
        "Where a full step's time goes",
        f"python -m finetune diagnose llama_8b_full_fp8 --weights random --steps 2 {SETTINGS} "
        "precision.backend=torchao train.per_device_train_batch_size=4 train.max_length=2048",
        "python -m finetune diagnose tiny_full_fp8 --weights random --steps 1",
        read_diagnosis,
        "--out {folder}",
    ),
    *(
        Part(name, title, command, command, read_text, needs="fp8")
        for name, title, command in (
            ("update", "The update alone", "python -m tests.benchmarks.optimizer_update --gpu"),
            ("casts", "Casts alone", "python -m tests.benchmarks.compiled_layer --gpu"),
        )
    ),
    _pair("full", "Full fine-tuning", "llama_8b_full", "tiny_full", rounds=3),
    _pair("lora_r8", "LoRA, rank 8", "llama_8b_lora", "tiny_lora", rounds=3),
    _engine("full"),
    _engine("lora", " precision.frozen=bf16"),
    _pair("lora_r32", "LoRA, rank 32", "llama_8b_lora32", "tiny_lora"),
    Part(
        "stock",
        "LoRA, rank 8, by the stock libraries and accelerate's own FP8",
        f"{LADDER} lora llama_8b_lora_fp8 --only stock --only shipped --only 'shipped, TE' {POINT}",
        f"{LADDER} lora tiny_lora_fp8 --only stock {TINY} train.gradient_checkpointing=auto",
        read_benchmark,
        "--out {folder}",
    ),
    Part(
        "full_24gb",
        "Full fine-tuning of an 8B in 24 GB, masters in host memory",
        "python -m tests.gpu.hour.limited llama_8b_full_24gb_fp8 --steps 2",
        "python -m tests.gpu.hour.limited tiny_full_24gb_fp8 --steps 1",
        read_printed,
        "--json --out {folder}",
    ),
    Part(
        "attention",
        "Attention kernels, 8,192 tokens",
        "python -m tests.gpu.hour.kernels attention",
        "python -m tests.gpu.hour.kernels attention --shrink 128",
        read_printed,
        "--json",
    ),
    Part(
        "grpo",
        "A step of GRPO",
        "python -m tests.gpu.hour.answers llama_8b_grpo_lora_fp8",
        "python -m tests.gpu.hour.answers tiny_grpo_fp8 train.max_completion_length=4",
        read_printed,
        "--json",
    ),
    Part(
        "gemm",
        "GEMM rates, 8,192 tokens",
        "python -m tests.gpu.hour.kernels gemm",
        "python -m tests.gpu.hour.kernels gemm --shrink 256",
        read_printed,
        "--json",
    ),
    Part(
        "tests",
        "The same assertions on hardware",
        "python -m pytest tests/gpu -m gpu -W default -p no:cacheprovider",
        "python -m pytest tests/gpu -m gpu -W default -p no:cacheprovider",
        read_tests,
        "--junitxml={folder}/tests.xml",
        needs="fp8",
        codes=(0, 1),  # 1: some test failed, and is in the file
    ),
    Part(
        "agreement",
        "Engines against the emulation, SNR in dB",
        "python -m tests.gpu.agreement",
        "python -m tests.gpu.agreement --tokens 16 --k 64 --n 32",
        read_printed,
        "--json",
    ),
)
"""In the order in which they run: what an interrupted hour should have comes first."""


# -------------------------------------------------------------------------------------- estimator


def predictions(results: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Prediction beside measurement for each timed row; `results`: part -> its data."""
    keys = (
        "label", "batch", "length", "tokens", "step_seconds", "predicted_seconds",
        "allocated_gib", "predicted_gib", "seconds_over_predicted", "gib_over_predicted",
        "against",
    )  # fmt: skip
    return [
        {"part": name, **{key: row[key] for key in keys}}
        for name, data in results.items()
        if isinstance(data, dict) and data.get("kind") == "benchmark"
        for row in data["rows"]
        if row["step_seconds"]
    ]


def predictions_markdown(rows: list[dict[str, Any]]) -> str:
    """Table of `predictions`, with the error as measured over predicted, less one."""
    columns = ("measured", "predicted", "error")
    head = ["part", "row", "tokens/s", *(f"{what}, {x}" for what in ("ms", "GiB") for x in columns)]
    lines = [head, ["---"] * len(head)]
    for row in rows:
        cells = [f"`{row['part']}`", row["label"].replace("|", "/")]
        cells.append(f"{_rate(row):,.0f}")
        cells += _error(row["step_seconds"], row["predicted_seconds"], 1e3)
        cells += _error(row["allocated_gib"], row["predicted_gib"], 1)
        lines.append(cells)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# --------------------------------------------------------------------------------------- promises


class Promise(NamedTuple):
    """A ratio of two timed rows: parts, and the last word of their labels.

    Attributes:
        key: `speed`, tokens/s, or `memory`, peak allocated.
        goal: of `docs/notes/15-on-an-h100.md`; None without one.
    """

    what: str
    part: str
    over: tuple[str, str]
    key: str
    goal: float | None = None


PROMISES = (
    Promise(
        "LoRA r=8, FP8 over fused BF16, tokens/s", "lora_r8", ("lora_r8", "bf16"), "speed", 1.4
    ),
    Promise(
        "LoRA r=8, FP8 over TRL and PEFT, tokens/s", "lora_r8", ("stock", "stock"), "speed", 2.1
    ),
    Promise(
        "LoRA r=8, FP8 over fused BF16, memory", "lora_r8", ("lora_r8", "bf16"), "memory", 0.65
    ),
    Promise(
        "LoRA r=32, FP8 over fused BF16, tokens/s", "lora_r32", ("lora_r32", "bf16"), "speed", 1.4
    ),
    Promise("full, FP8 over BF16, tokens/s", "full", ("full", "bf16"), "speed"),
    Promise("full, FP8 over BF16, memory", "full", ("full", "bf16"), "memory"),
)


def promises_markdown(rows: list[dict[str, Any]]) -> str:
    """A figure for each promise; `rows` of `predictions`.

    FP8 at 8,192 tokens in 1.0 s over BF16 at as many in 1.5 s is 1.50x, and a goal of 1.40x is met.
    """

    def value(part: str, word: str, key: str) -> float | None:
        for row in rows:
            if row["part"] == part and row["label"].split("_")[-1] == word:
                return row["allocated_gib"] if key == "memory" else _rate(row)
        return None

    lines = ["| promise | measured | goal |", "|---|---|---|"]
    for what, part, over, key, goal in PROMISES:
        above, below = value(part, "fp8", key), value(*over, key)
        measured = "not measured" if not above or not below else f"{above / below:.2f}x"
        aim = "" if goal is None else f"{goal:.2f}x"
        if above and below and goal is not None:
            met = above / below <= goal if key == "memory" else above / below >= goal
            aim += ", met" if met else ", missed"
        lines.append(f"| {what} | {measured} | {aim} |")
    return "\n".join(lines)


def _rate(row: dict[str, Any]) -> float:
    return row["tokens"] / row["step_seconds"]


def _error(measured: float | None, predicted: float | None, scale: float) -> list[str]:
    shown = f"{measured / predicted - 1:+.1%}" if measured and predicted else ""
    return [
        "not measured" if measured is None else f"{measured * scale:,.4g}",
        "not predicted" if predicted is None else f"{predicted * scale:,.4g}",
        shown,
    ]
