"""The receipt of a run and the report around it: `receipt.json` and `report.json`.

The receipt says what was requested, what ran, and on what evidence; the report adds losses, speed,
samples and scores. Both files are read by people and other tools, and both objects show themselves
in a terminal or notebook. Tables fold a model's hundreds of layers to groups of those that ran
alike. The keys named in `Receipt` are stable. Imports no torch.
"""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Group, RenderableType
from rich.jupyter import JupyterMixin
from rich.text import Text

from finetune.config.methods import method_of
from finetune.logging import as_text, plain_table, whole
from finetune.precision.facts import SCALINGS
from finetune.precision.proof.row import LayerReceipt, changed_numbers, still_line
from finetune.runs.checkpoints import CHECKPOINTS, checkpoints_in, resume_command
from finetune.runs.folder import finite, write_whole
from finetune.runs.progress import outcome
from finetune.units import elapsed, percent, size_of_gib

PEFT_WRAPPERS = ("base_layer", "default")
"""Parts that PEFT adds to the names of layers: the layer it wraps, and its first adapter."""


def name_parts(name: str) -> list[str]:
    """`model.layers.0.self_attn.q_proj.base_layer` -> `model layers self_attn q_proj`.

    Layers of an `nn.Sequential` alone have numbers for names: `0` stays.
    """
    kept = [p for p in name.split(".") if not p.isdigit() and p not in PEFT_WRAPPERS]
    return kept or [name]


def layer_kind(name: str) -> str:
    """`model.layers.0.self_attn.q_proj.base_layer` -> `q_proj`; of adapters `q_proj.lora_A`."""
    parts = name_parts(name)
    return ".".join(parts[-2:]) if parts[-1].startswith("lora_") else parts[-1]


def layer_groups(
    layers: Iterable[LayerReceipt], *, by_kind: bool = False
) -> list[list[LayerReceipt]]:
    """Layers that ran alike, in the order of the model.

    Layers `0.q_proj 0.v_proj 1.q_proj 1.v_proj lm_head`, of which the head ran in BF16, are two
    groups, `[0.q_proj 0.v_proj 1.q_proj 1.v_proj] [lm_head]`; by kind (`q_proj`, and its shape)
    they are three.
    """
    groups: dict[tuple[object, ...], list[LayerReceipt]] = {}
    for row in layers:
        kind = (layer_kind(row.name), tuple(row.shape)) if by_kind else ()
        # In a terminal's table shapes do not count: layers that ran alike are one line.
        key = (row.role, *kind, row.fprop, row.dgrad, row.wgrad, row.reason)
        groups.setdefault(key, []).append(row)
    return list(groups.values())


class LayerGroup(NamedTuple):
    """Layers that ran alike, as a row of a table.

    Attributes:
        count: number of layers.
        names: last parts of their names, each once.
        gemms: precision of fprop, dgrad and wgrad; `-` where none ran.
        share: of the FLOPs of all layers; 0 to 1.
        reason: why this precision was planned.
    """

    count: int
    names: str
    gemms: tuple[str, str, str]
    share: float
    reason: str


def group_layers(layers: list[LayerReceipt]) -> list[LayerGroup]:
    """Groups of `layer_groups` with what a table shows of each."""
    total = sum(layer.flops for layer in layers) or 1

    def shown(precision: str) -> str:
        return precision if precision != "none" else "-"

    return [
        LayerGroup(
            len(rows),
            " ".join(dict.fromkeys(name_parts(row.name)[-1] for row in rows)),
            (shown(rows[0].fprop), shown(rows[0].dgrad), shown(rows[0].wgrad)),
            sum(row.flops for row in rows) / total,
            rows[0].reason,
        )
        for rows in layer_groups(layers)
    ]


@dataclass
class Receipt(JupyterMixin):
    """Evidence of what a run computed, and in which precision.

    Attributes:
        status: `proven`, or why it is not (yet).
        precision: `asked`, `ran`, `backend`, `scaling`, `format`, `gemm` (the library that
            multiplies FP8 here, such as `cuBLASLt outer-vector`), `effective` (the engine's own
            words), `reason`, `fallback` (one loud line, or empty), `compile`, `attention` (the
            implementation, and with `varlen` its kernel), `kernels` (what casts and transposes for
            GEMMs of weights stored in FP8), `storage` (how frozen weights are stored that are not
            plain, `nf4` -> number of layers),
            `forced` (module -> type, where `precision.map` chose one of its own), `adapters` (how
            many run in one function with their base, and why others do not), `references` (models
            evaluated beside the one that trains, and their precision).
        fp8_flop_share: FLOPs of FP8 (and FP4) GEMMs over FLOPs of all matmuls of the run, attention
            and output head included; 0 to 1. Those of the observed micro-step, weighted with the
            calls of each layer until now.
        flop_share: the same for each precision.
        role_share: share of those FLOPs by what a layer is: `base`, `adapter`, `head`, `router`,
            and `other` for matmuls that are no layers.
        trainable: parameter counts `before`, `after` (preparation), `in_optimizer`, and of tensors
            of which, by the second optimizer step with a learning rate above zero, some number has
            `moved`, or none has though they had gradients (`below_resolution`: updates are smaller
            than their type can hold), or that are `without_gradient`;
            `optimizer_state_bytes`: of moments and their scales as they are stored, on this
            process.
        movement: numbers that differ from those before the first step, `early` (after warm-up) and
            `now`: `steps`, and `groups` of `kind` (matrices, embeddings, vectors), `type`,
            `numbers` and `changed`. Of tensors with more than `sample` numbers they are estimates;
            `rounding` of BF16 weights is `nearest` or `stochastic`.
        layers: every linear layer, in the observed micro-step.
        held: what was watched until the end: optimizer `steps` compared with the plan, layers
            `resting` (name -> steps without a call), and those that BF16 `entered`.
        notes: what does not train although one might think so, and why, a line each.
        environment: versions, device, seed, processes, patches in force, and what is `switched_off`
            because names of a library are gone (`finetune.hardware.unpromised`).
        memory: `measured_gib`, the peak of a step or of the training (None: not measured);
            `measured`, what that is or why it is missing; `weights_gib`, parameters and buffers;
            `reserved_gib`, the most that torch's allocator kept (GPUs); `predicted_gib`,
            `predicted_reserved_gib` and `predicted`, the
            same as they were expected before the run, and by whom.
        energy: `joules` that the GPUs of all processes drew in training, evaluations left out,
            `tokens_per_joule` (without padding) and `mean_watts` (of all GPUs together), or None;
            `measured`, how they were counted or why they are missing.
        conditions: what a fair twin of the run has to share (`finetune.training.helper.evidence`).
        data: rows and tokens of `train` and `eval`, accounted for (`finetune.data.ledger`).
    """

    status: str
    precision: dict[str, Any]
    fp8_flop_share: float = 0.0
    flop_share: dict[str, float] = field(default_factory=dict)
    trainable: dict[str, int] = field(default_factory=dict)
    movement: dict[str, Any] = field(default_factory=dict)
    layers: list[LayerReceipt] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    environment: dict[str, Any] = field(default_factory=dict)
    memory: dict[str, Any] = field(default_factory=dict)
    energy: dict[str, Any] = field(default_factory=dict)
    conditions: dict[str, Any] = field(default_factory=dict)
    held: dict[str, Any] = field(default_factory=dict)
    run: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, data: dict[str, Any]) -> Receipt:
        """A receipt from its JSON, of any version: without keys and layers not known as such."""
        # A receipt may be older or newer than this code; unknown keys are dropped, missing ones are
        # empty, so that old runs stay readable in tables and reports.
        known = {f.name for f in fields(cls)} - {"layers"}
        receipt = cls(**{"status": "", "precision": {}} | {k: data[k] for k in known & data.keys()})
        kinds: dict[str, Any] = dict.fromkeys((f.name for f in fields(LayerReceipt)), str)
        kinds |= {"shape": list | tuple, "calls": dict, "flops": int | float}
        for layer in data.get("layers") or []:
            # A damaged layer is left out: what a table shows has all its fields.
            if isinstance(layer, dict) and all(
                isinstance(layer.get(name), kind) for name, kind in kinds.items()
            ):
                receipt.layers.append(LayerReceipt(**{name: layer[name] for name in kinds}))
        return receipt

    @property
    def role_share(self) -> dict[str, float]:
        """Role -> its share of the FLOPs of the observed micro-step."""
        flops: Counter[str] = Counter()
        for layer in self.layers:
            flops[layer.role] += layer.flops
        return {role: done / flops.total() for role, done in flops.items() if flops.total()}

    def to_json(self) -> str:
        """The receipt as indented JSON."""
        values = asdict(self) | {"role_share": self.role_share}
        return json.dumps(values, indent=1, ensure_ascii=False)

    def save(self, path: Path) -> None:
        """Write `to_json()` so that a reader never sees half a file."""
        write_whole(path, self.to_json() + "\n")

    @property
    def headline(self) -> str:
        """One line: precision, share, engine."""
        p = self.precision
        kind = p.get("ran", "").upper()
        if not kind:
            return self.status
        if kind in ("FP8", "FP4"):
            share = f"{self.fp8_flop_share:.1%} of matmul FLOPs"
            return f"{kind} {self._verdict}: {share} ({self.engine})"
        kept = ", ".join(f"{n} weights stored in {k}" for k, n in (p.get("storage") or {}).items())
        return f"{kind} {self._verdict}: no matmul ran in FP8" + (kept and f"; {kept}")

    @property
    def engine(self) -> str:
        """`frozen base, row-wise scales`: what multiplied in FP8, with which scales."""
        p = self.precision
        engine, scaling = p.get("backend") or "", p.get("scaling") or ""
        scales = SCALINGS[scaling].shown if scaling in SCALINGS else f"{scaling} scaling"
        return f"{'frozen base' if engine == 'frozen' else engine}, {scales}{self.emulated}"

    @property
    def is_proven(self) -> bool:
        """True if the proof passed: `status` says so, or why not."""
        return self.status == "proven"

    @property
    def is_emulated(self) -> bool:
        """True if FP8 was computed by exact rounding: its speed says nothing about FP8."""
        return self.precision.get("gemm") == "emulated"

    @property
    def emulated(self) -> str:
        """`, emulated` after an engine whose name does not say so."""
        unsaid = "emulated" not in (self.precision.get("backend") or "")
        return ", emulated" if unsaid and self.is_emulated else ""

    @property
    def _verdict(self) -> str:
        return "verified" if self.is_proven else self.status

    def __str__(self) -> str:
        return as_text(self)

    def __rich__(self) -> RenderableType:
        """Headline, loud lines, layers by group, trainable parameters, memory."""
        return Group(*self._parts())

    def verdict(self) -> Iterator[Text]:
        """Headline, and the warnings among the facts, which are yellow."""
        # Green is for what was asked for: a fallback that is proven is still not what was asked.
        verified = self.is_proven and not self.precision.get("fallback")
        yield Text(self.headline, style="bold green" if verified else "bold yellow")
        if self.precision.get("fallback"):
            yield Text(f"! {self.precision['fallback']}", style="bold yellow")
        yield from (line for line in self._facts() if line.style == "yellow")

    def _parts(self) -> Iterator[RenderableType]:
        warnings = list(self.verdict())
        yield from (line for line in warnings if line.style != "yellow")
        yield from self._facts()
        whole_columns = ("layers", "fprop", "dgrad", "wgrad", "FLOPs")
        titles = ("layers", "", "fprop", "dgrad", "wgrad", "FLOPs", "reason")
        table = plain_table(*titles, whole=whole_columns)
        for g in group_layers(self.layers):
            table.add_row(str(g.count), g.names, *g.gemms, percent(g.share), g.reason)
        yield Text()
        yield table

    def _facts(self) -> Iterator[Text]:
        yield Text(f"torch.compile: {self.precision.get('compile', 'off')}", style="dim")
        if self.precision.get("attention"):
            yield Text(f"attention: {self.precision['attention']}", style="dim")
        if self.precision.get("kernels"):
            yield Text(f"FP8 casts: {self.precision['kernels']}", style="dim")
        for line in self.precision.get("references", ()):
            yield Text(f"reference: {line}", style="dim")
        if self.role_share.get("adapter"):
            shares = ", ".join(f"{role} {share:.1%}" for role, share in self.role_share.items())
            yield Text(f"matmul FLOPs: {shares}")
            if self.precision.get("adapters"):
                yield Text(f"adapters: {self.precision['adapters']}", style="dim")
        for note in self.notes:
            yield Text(note, style="dim")
        for line in self.environment.get("switched_off", ()):
            yield Text(f"! {line}", style="yellow")
        if t := self.trainable:
            state, owned = t.get("optimizer_state_bytes", 0), t["in_optimizer"]
            each = f"; {state / owned:.2f} bytes of optimizer state each" if state and owned else ""
            if each and (self.environment.get("processes") or 1) > 1:
                each += " per process"  # sharded, each has a part of it
            changed, numbers = changed_numbers(self.movement)
            told = f"{changed:,} of {numbers:,} trainable parameters changed" if numbers else ""
            yield Text(f"{told or f'{owned:,} trainable parameters'}{each}")
            # Preparation must neither lose a parameter nor add one, and the optimizer has to have
            # all of them.
            if not t["before"] == t["after"] == owned:
                yield Text(
                    f"! trainable parameters: {t['before']:,} before and {t['after']:,} after "
                    f"preparation, {owned:,} in the optimizer",
                    style="yellow",
                )
            if still := t.get("without_gradient"):
                yield Text(
                    f"! {still:,} of {t['after']:,} trainable parameters had no gradient but zeros",
                    style="yellow",
                )
        if line := still_line(self.movement):
            yield Text(f"! {line}", style="yellow")
        if line := memory_line(self.memory):
            yield Text(line)


def memory_line(memory: dict[str, Any]) -> str:
    """`Receipt.memory` in one line; empty when it has neither a prediction nor a measurement.

    `tensors: predicted 37.9 MiB, measured 38.0 MiB (+0.3 %)`: of the prediction.
    """
    parts = []
    for kind, predicted, measured in (
        ("", memory.get("predicted_gib"), memory.get("measured_gib")),
        ("reserved ", memory.get("predicted_reserved_gib"), memory.get("reserved_gib")),
    ):
        if predicted is not None:
            parts.append(f"{kind}predicted {size_of_gib(predicted)}")
        if measured is not None:
            # 0 and None alike give no percentage.
            over = predicted and percent(measured / predicted - 1, sign=True, space=True)
            parts.append(f"{kind}measured {size_of_gib(measured)}" + (f" ({over})" if over else ""))
    return f"tensors: {', '.join(parts)}" if parts else ""


def energy_line(energy: dict[str, Any]) -> str:
    """`energy: 0.123 kWh, 410 W, 31.9 tokens per joule`; empty where it was not measured."""
    if not energy.get("joules"):
        return ""
    # 3.6e6 J are one kWh.
    parts = f"{energy['joules'] / 3.6e6:.3g} kWh", f"{energy['mean_watts']:,.0f} W"
    return f"energy: {', '.join(parts)}, {energy['tokens_per_joule']:.3g} tokens per joule"


@dataclass(frozen=True)
class Sample:
    """A prompt and the trained model's greedy answer.

    Attributes:
        images: small copies of those that it was asked with: files in the run folder.
        expected: what the row says, of a question with images.
        tokens: of the question in its template, images included; likewise.
    """

    prompt: str
    answer: str
    images: tuple[str, ...] = ()
    expected: str = ""
    tokens: int = 0

    def facts(self) -> dict[str, Any]:
        """As `metrics.jsonl` and `report.json` have it: without what a text does not have."""
        found = {"prompt": self.prompt, "answer": self.answer}
        shown = {"images": [*self.images], "expected": self.expected, "tokens": self.tokens}
        return found | (shown if self.images else {})


@dataclass(frozen=True)
class RunReport(JupyterMixin):
    """Results of a run.

    Attributes:
        first_loss, final_loss: first and last logged training loss; None where a method's says
            nothing, as of rewarded answers.
        eval_loss: last eval loss, None without eval rows; likewise.
        tokens_per_s, steps_per_s: median over logging intervals, the first left out.
        seconds: duration of training, evaluation included.
        peak_memory_gib: peak of allocated memory.
        samples: answers of the trained model.
        tasks: scores on `eval.tasks`, name -> metric -> value.
        interrupted: True if stopped by a signal; `checkpoints/` has the last step saved.
        own: metric of the training method, in `metrics.jsonl` -> where it begins and ends: means
            of some steps, or an evaluation (`finetune.config.measures`).
        hints: lines about what to try next, and that it stopped early.
    """

    folder: Path
    receipt: Receipt
    first_loss: float | None
    final_loss: float | None
    eval_loss: float | None
    tokens_per_s: float | None
    seconds: float
    peak_memory_gib: float
    samples: list[Sample] = field(default_factory=list)
    tasks: dict[str, dict[str, Any]] = field(default_factory=dict)
    interrupted: bool = False
    steps_per_s: float | None = None
    own: dict[str, tuple[float, float]] = field(default_factory=dict)
    hints: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return as_text(self)

    def __rich__(self) -> RenderableType:
        """Losses or rewards, speed, samples, scores, receipt, and the next command."""
        return Group(*self._parts())

    @property
    def summary(self) -> RenderableType:
        """Loss, verdict, costs, folder, next command; warnings and scores where there are any."""
        return Group(*self._parts(whole_receipt=False))

    def _parts(self, *, whole_receipt: bool = True) -> Iterator[RenderableType]:
        yield Text()
        if figures := list(outcome(vars(self), method_of(self.receipt.run))):
            yield Text(" · ".join(map(" ".join, figures)), style="bold")
        if not whole_receipt:
            yield from self.receipt.verdict()
        yield Text(", ".join(self._costs()))
        if line := energy_line(self.receipt.energy):
            yield Text(line)
        for hint in self.hints:
            yield Text(f"hint: {hint}", style="yellow")
        for sample in self.samples if whole_receipt else ():
            yield Text("> ", style="dim") + Text(sample.prompt, style="italic")
            yield Text(f"  {sample.answer or '(empty answer)'}")
        for name, scores in self.tasks.items():
            yield Text(f"{name}: {describe(scores)}")
        if whole_receipt:
            yield self.receipt
            yield Text()
        if self.interrupted:
            yield whole(f"Interrupted. {self._after_interrupt}", "yellow")
            return
        # Not an error: too short a run (a smoke test of one step) is a result, but no evidence.
        if not self.receipt.is_proven:
            yield Text(
                "! this run is not verified: the proof needs two optimizer steps with a learning "
                "rate above zero and gradients that are not all zero",
                style="bold yellow",
            )
        yield whole(f"run folder: {self.folder}")
        name = shlex.quote(str(self.folder))
        writes = method_of(self.receipt.run).head == "causal"
        if writes:
            yield whole(f'next: python -m finetune generate {name} "..."')
        # `generate` needs a model that writes; of a classifier or a reward model the report is
        # next.
        if whole_receipt or not writes:
            yield whole(f"      python -m finetune report {name}")

    @property
    def _after_interrupt(self) -> str:
        if not checkpoints_in(self.folder / CHECKPOINTS):
            return f"No checkpoint was saved yet; logs are in {self.folder}"
        return f"Resume: {resume_command(self.folder)}"

    def _costs(self) -> Iterator[str]:
        yield elapsed(self.seconds)
        kind = "GPU memory" if self.receipt.memory.get("reserved_gib") else "process memory (RSS)"
        yield f"peak {kind} {self.peak_memory_gib:.2f} GiB"
        if self.tokens_per_s:
            yield f"{self.tokens_per_s:,.0f} tok/s"
        if self.steps_per_s:
            yield f"{self.steps_per_s:.3g} steps/s"

    def to_json(self) -> str:
        """The report without the receipt, which has a file of its own."""
        values = asdict(self) | {"folder": str(self.folder)}
        values["samples"] = [sample.facts() for sample in self.samples]
        del values["receipt"]
        values |= {"status": self.receipt.status, "proven": self.receipt.is_proven}
        return json.dumps(values, indent=1)


def metrics_of(scores: dict[str, Any]) -> Iterator[tuple[str, float, float | None]]:
    """Yield (metric, value, standard error or None) of the scores of one task.

    lm-eval names a metric's filter behind a comma, also in the name of its error:
    `exact_match,strict-match` and `exact_match_stderr,strict-match`. Numbers of rows (`n`) and the
    task's `version` are no metrics.
    """
    for key, value in scores.items():
        metric, comma, filtered = key.partition(",")
        if key in ("n", "version") or metric.endswith("_stderr") or finite(value) is None:
            continue
        yield key, value, finite(scores.get(f"{metric}_stderr{comma}{filtered}"))


def describe(scores: dict[str, Any]) -> str:
    """`acc 0.520 ± 0.071, acc_norm 0.560 ± 0.071 (50 rows)`: the scores of one task."""
    facts = [
        f"{metric} {value:.3f}" + (f" ± {spread:.3f}" if spread is not None else "")
        for metric, value, spread in metrics_of(scores)
    ]
    return ", ".join(facts) + (f" ({scores['n']:,} rows)" if "n" in scores else "")
