"""Title, verdict, key figures, answers and tables of a run folder, each with its source."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import PurePosixPath
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from finetune.analysis.report.curves import curve
from finetune.analysis.report.elements import (
    CONFIG,
    METRICS,
    MISSING,
    RECEIPT,
    REPORT,
    Line,
    Num,
    PageSource,
    Table,
    Tone,
    figure,
    fixed,
)
from finetune.runs.card import device_name, method_name, short_name, without_paths
from finetune.runs.folder import finite, images_in, scores_in
from finetune.runs.progress import figures, named
from finetune.runs.receipt import Receipt, group_layers, metrics_of
from finetune.units import count, elapsed, percent, perplexity, size_of_gib

LOW = ("FP8", "FP4")
PEAKS = (
    ("predicted", "predicted_gib", "predicted"),
    ("measured", "measured_gib", "measured"),
    ("predicted, reserved by the allocator", "predicted_reserved_gib", ""),
    ("reserved by the allocator", "reserved_gib", ""),
)

EMPTY = "(empty answer)"
SHOWN_ANSWERS = 6
"""Answers to a prompt that are shown: the first, the last, and some between that differ."""


class ShownQuestion(NamedTuple):
    """A prompt, its images as data URLs, what its row says, and the tokens of the question."""

    prompt: str
    images: tuple[str, ...] = ()
    expected: str = ""
    tokens: int | None = None


class Course(NamedTuple):
    """First, last and least value of a metric, linked, and the number of finite ones."""

    first: Num
    last: Num
    least: Num
    count: int


@dataclass(frozen=True)
class RunSource(PageSource):
    """A run folder, with the figures and tables that pages show."""

    # ------------------------------------------------------------------------------------- verdict

    @property
    def requested(self) -> str:
        return str(self.facts("precision.asked") or "").upper()

    @property
    def executed(self) -> str:
        return str(self.facts("precision.ran") or "").upper()

    @property
    def is_low(self) -> bool:
        return self.executed in LOW

    @property
    def fell_back(self) -> bool:
        """True if FP8 was requested and did not run."""
        return self.requested in LOW and not self.is_low

    @property
    def status(self) -> str:
        return str(self.facts("status") or "")

    @property
    def engine(self) -> Num:
        kind = str(self.facts("precision.format") or "").upper()
        return self.num(f"{self._receipt.engine}, {kind}", RECEIPT, "precision.effective")

    @property
    def is_emulated(self) -> bool:
        return self.is_low and self._receipt.is_emulated

    @property
    def verdict(self) -> tuple[Num, Tone]:
        """Headline on the proof of the precision, and its tone."""
        if not self.run.receipt:
            going = self.run.state == "running"
            return (Num("Not verified yet"), "plain") if going else (Num("Not verified"), "bad")
        if self.fell_back:
            text = f"{self.requested} refused: {self.executed} executed"
            return self.num(text, RECEIPT, "precision.fallback"), "bad"
        if not self.run.proven:
            return self.num(f"{self.executed} not verified".strip(), RECEIPT, "status"), "bad"
        if self.is_low:
            share = figure(self.facts("fp8_flop_share"), percent)
            text = f"{self.executed} verified: {share} of matmul FLOPs"
            return self.num(text, RECEIPT, "fp8_flop_share"), "good"
        return self.num(f"{self.executed}, as configured", RECEIPT, "precision.ran"), "plain"

    # --------------------------------------------------------------------------------------- title

    @property
    def title(self) -> Line:
        """`tiny_llama, LoRA rank 8 on harbour`."""
        model, data = (self.run.config.get(key) or {} for key in ("model", "data"))
        if not (base := short_name(str(model.get("name") or ""))):
            return Line((self.run.recipe,))
        rank = (self.run.config.get("lora") or {}).get("r")
        method = method_name(rank, model.get("storage"))
        parts: list[str | Num] = [self.num(base, CONFIG, "model.name")]
        if (trained := self.run.method.name) != "sft":
            parts += [", ", self.num(trained.upper(), CONFIG, "train.method")]
        parts += [", ", self.num(method, CONFIG, "lora.r") if rank else method]
        if rows := data.get("path") or data.get("name"):
            parts += [" on ", self.num(short_name(str(rows)), CONFIG, "data")]
        return Line(parts)

    @property
    def setting(self) -> Line:
        """Device and date."""
        date = datetime.fromtimestamp(self.run.started).strftime("%Y-%m-%d")
        dated = self.num(date, "run.json", "started") if self.run.start else Num(date, "./")
        device = device_name(self.facts("environment.device") or {})
        if not device:
            return Line((dated,))
        return Line((self.num(device, RECEIPT, "environment.device"), ", ", dated))

    # ------------------------------------------------------------------------------------- figures

    @property
    def last_step(self) -> Num:
        return self.num(f"{self.run.last_step:,}", METRICS, "step")

    @property
    def not_finite(self) -> Iterator[tuple[str, Num]]:
        """Losses that were not finite, each with its first such step."""
        for key in ("loss", "eval_loss"):
            if broken := curve(self.run.rows, key).broken:
                yield key, self.num(f"step {broken[0]:,.0f}", METRICS, key)

    @property
    def skipped(self) -> Num | None:
        found = self._last("skipped_steps")
        return self.num(figure(found, count), METRICS, "skipped_steps") if found else None

    def _last(self, key: str) -> Any:
        return next((row[key] for row in reversed(self.run.rows) if row.get(key)), None)

    def course(self, key: str) -> Course:
        x, y, broken = curve(self.run.rows, key)
        if not len(y):
            none = Num(MISSING)
            return Course(none, none, none, 0)
        first, last, least = (
            self.num(fixed(float(y[i])), METRICS, f"{key} at step {x[i]:.0f}")
            for i in (0, -1, int(y.argmin()))
        )
        if broken and broken[-1] > x[-1]:
            last = self.num("not finite", METRICS, f"{key} at step {broken[-1]:.0f}")
        return Course(first, last, least, len(y))

    @property
    def learned(self) -> dict[str, Course]:
        """Losses that say something, and the method's own metrics, by name."""
        loss, evaluated = self.course("loss"), self.course("eval_loss")
        found = {"training loss": loss._replace(least=loss.last), "eval loss": evaluated}
        found = found if "loss" in self.run.method.columns else {}
        for key, values in figures(self.run.rows, self.run.method).items():
            name, form = named(key)
            first, last = (self.num(format(value, form), METRICS, key) for value in values)
            found[name] = Course(first, last, last, 1 if first == last else 2)
        return found

    @property
    def perplexity(self) -> Num | None:
        """Perplexity of the last eval loss, if it is one of words."""
        losses = curve(self.run.rows, "eval_loss").y if self.run.method.is_text else []
        shown = perplexity(losses[-1]) if len(losses) else ""
        return self.num(shown, METRICS, "eval_loss") if shown else None

    @property
    def speed(self) -> Num:
        """Median tokens per second."""
        value, file = self.run.report.get("tokens_per_s"), REPORT
        if value is None:
            speeds = curve(self.run.rows, "tokens_per_s").y.tolist()
            value, file = (median(speeds[1:] or speeds) if speeds else None), METRICS
        return self.num(figure(value, count), file, "tokens_per_s")

    @property
    def memory(self) -> Num:
        """Measured peak of a step, else of the process."""
        if finite(self.facts("memory.measured_gib")) is not None:
            return self.receipt("memory.measured_gib", size_of_gib)
        peak = figure(self.run.report.get("peak_memory_gib"), size_of_gib)
        return self.num(peak, REPORT, "peak_memory_gib")

    @property
    def time(self) -> Num:
        seconds, file = self.run.report.get("seconds"), REPORT
        if seconds is None:
            seconds, file = self._last("seconds"), METRICS
        return self.num(figure(seconds, elapsed), file, "seconds")

    @property
    def timed(self) -> Num:
        """Steps that the time is of: of a resumed run, those behind its checkpoint."""
        first = int(self.run.steps[0]["step"]) if self.run.steps else 1
        if first <= 1:
            return self.num(f"{self.run.last_step:,} steps", METRICS, "step")
        text = f"steps {first:,} to {self.run.last_step:,}, as resumed"
        return self.num(text, "steps.jsonl", "step")

    @property
    def role_share(self) -> dict[str, Num]:
        shares = self._receipt.role_share.items()
        return {r: self.num(figure(x, percent), RECEIPT, f"role_share.{r}") for r, x in shares}

    @property
    def state_bytes(self) -> Line | None:
        """Bytes of optimizer state per parameter; sharded, each process has a part."""
        t, processes = self.facts("trainable") or {}, self.facts("environment.processes")
        state, owned = t.get("optimizer_state_bytes"), t.get("in_optimizer")
        if not state or not owned:
            return None
        each = self.num(f"{state / owned:.2f}", RECEIPT, "trainable.optimizer_state_bytes")
        where = " per process" if isinstance(processes, int) and processes > 1 else ""
        return Line((each, f" bytes of optimizer state each{where}."))

    # ------------------------------------------------------------------------------------- answers

    @property
    def answers(self) -> dict[ShownQuestion, list[tuple[Num, str]]]:
        """Answers to each prompt in the course of training, (when, answer), where they change."""
        prompts: dict[ShownQuestion, list[tuple[Num, str]]] = {}
        samples = self.run.samples
        for number, (step, pairs) in enumerate(samples, 1):
            when = f"step {step:,}" if step else "before training"
            file, key = METRICS, f"samples at step {step}"
            if number == len(samples) and pairs == self.run.report.get("samples"):
                when, file, key = "after training", REPORT, "samples"
            for pair in pairs:
                said = self.num(when, file, key), str(pair.get("answer", "")) or EMPTY
                prompts.setdefault(self._asked(pair), []).append(said)
        shown = {}
        for prompt, said in prompts.items():
            between = range(1, len(said) - 1)
            kept = [0, *(i for i in between if said[i][1] != said[i - 1][1]), len(said) - 1]
            at = np.linspace(0, len(kept) - 1, min(len(kept), SHOWN_ANSWERS)).round().astype(int)
            shown[prompt] = [said[i] for i in dict.fromkeys(kept[i] for i in at)]
        return shown

    def _asked(self, pair: dict[str, Any]) -> ShownQuestion:
        images = filter(None, map(self._embedded, images_in(pair)))
        tokens = pair.get("tokens")
        return ShownQuestion(
            str(pair.get("prompt", "")), tuple(images), str(pair.get("expected", "")),
            tokens if isinstance(tokens, int) else None,
        )  # fmt: skip

    def _embedded(self, name: str) -> str:
        """The copy of an image as a data URL; empty if it is gone."""
        # By its last part alone: a name from somebody's metrics leads nowhere else.
        file = self.folder / "samples" / PurePosixPath(name).name
        content = base64.b64encode(file.read_bytes()).decode() if file.is_file() else ""
        return content and f"data:image/jpeg;base64,{content}"

    # -------------------------------------------------------------------------------------- tables

    @cached_property
    def _receipt(self) -> Receipt:
        return Receipt.read(self.run.receipt)

    @property
    def layers(self) -> Table:
        """Layers by group with the precision of each GEMM."""
        rows, groups = [], group_layers(self._receipt.layers)
        for g in groups:
            ran = [gemm.upper().replace("-", MISSING) for gemm in g.gemms]
            texts = str(g.count), *ran, percent(g.share), g.reason
            rows.append((g.names, *(self.num(text, RECEIPT, "layers[]") for text in texts)))
        head = ("layers", "count", "fprop", "dgrad", "wgrad", "FLOPs", "reason")
        return Table(head, rows, numeric=(1, 5), shares={5: [g.share for g in groups]})

    @property
    def peaks(self) -> Table:
        """Predicted and measured memory, as bars of one scale."""
        m = self.facts("memory") or {}
        found = [peak for peak in PEAKS if finite(m.get(peak[1])) is not None]
        rows = [
            (label, self.receipt(f"memory.{key}", size_of_gib), self.receipt(f"memory.{why}"))
            for label, key, why in found
        ]
        most = max((m[key] for _, key, _ in found), default=0) or 1
        bars = [m[key] / most for _, key, _ in found]
        return Table(("", "peak", "of what"), rows, (1,), {1: bars})

    @property
    def tasks(self) -> Table:
        rows = []
        for row in self.run.rows:
            for task, scores in scores_in(row).items():
                for metric, value, error in metrics_of(scores):
                    key = f"tasks.{task}.{metric} at step {row['step']}"
                    step = self.num(f"{row['step']:,}", METRICS, "step")
                    spread = "" if error is None else self.num(f"± {error:.4f}", METRICS, key)
                    score = self.num(fixed(value), METRICS, key)
                    rows.append((task, metric, step, score, spread))
        return Table(("task", "metric", "step", "score", "standard error"), rows, (2, 3, 4))

    @property
    def config(self) -> str:
        try:
            return without_paths((self.folder / CONFIG).read_text("utf-8").strip())
        except (OSError, UnicodeDecodeError):
            return ""

    @property
    def environment(self) -> Table:
        """Device, versions, command and conditions of the run."""
        e, device = self.facts("environment") or {}, self.facts("environment.device") or {}
        size = device.get("memory_gib")
        size = f", {size:.1f} GiB" if finite(size) is not None else ""
        found = {"device": (device_name(device) + size, RECEIPT, "environment.device")}
        for name, at in (("processes", "processes"), ("seed", "seed"), ("patched", "patches")):
            found[name] = _as_words(e.get(at, "")), RECEIPT, f"environment.{at}"
        for library, version in (e.get("versions") or {}).items():
            found[library] = str(version), RECEIPT, f"environment.versions.{library}"
        if isinstance(command := self.run.start.get("command"), list) and command:
            program, *words = map(str, command)
            program = "python -m finetune" if program.endswith("__main__.py") else program
            found["command"] = " ".join((program, *words)), "run.json", "command"
        for key, value in (self.facts("conditions") or {}).items():
            found[key.replace("_", " ")] = _as_words(value), RECEIPT, f"conditions.{key}"
        rows = ((name, without_paths(text), *at) for name, (text, *at) in found.items() if text)
        return Table(("", ""), [(name, self.num(text, *at)) for name, text, *at in rows])


def _as_words(value: Any) -> str:
    """Nested data in a line: `{"rows": 8, "betas": [0.9, 0.999]}` is `rows 8, betas 0.9 0.999`."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_as_words(inner)}" for key, inner in value.items())
    if isinstance(value, (list, tuple)):
        return " ".join(map(_as_words, value))
    return {"None": "none", "True": "yes", "False": "no"}.get(str(value), str(value))
