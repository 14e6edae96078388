"""What a report says of one run, section by section."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

from finetune.analysis.report.content import (
    MISSING,
    Block,
    Cell,
    Listing,
    Num,
    Page,
    Para,
    Samples,
    Section,
    Source,
    Table,
    Words,
    fixed,
    grouped,
    is_number,
    percent,
    words,
)
from finetune.analysis.report.curves import curves_section, gradient_plot, loss_plot, speed_plot
from finetune.analysis.report.health_plots import health
from finetune.analysis.report.run_facts import (
    CONFIG,
    METRICS,
    RECEIPT,
    REPORT,
    about,
    facts,
    loud_lines,
    verdict_of,
)
from finetune.runs.folder import Run
from finetune.runs.receipt import LayerReceipt, Receipt, group_layers
from finetune.units import size_of_gib

SHOWN_ANSWERS = 6
"""Evaluations of which answers are shown: the first, the last, and some between."""


def run_page(run: Run, source: Source) -> Page:
    """The page of one run."""
    verdict, tone, lead = verdict_of(run, source)
    return Page(
        title=run.recipe,
        about=about(run, source),
        verdict=verdict,
        tone=tone,
        lead=lead,
        loud=loud_lines(run, source),
        facts=facts(run, source),
        sections=tuple(s for s in _sections(run, source) if s is not None),
    )


def _sections(run: Run, source: Source) -> list[Section | None]:
    loss, gradient = loss_plot(run, source), gradient_plot(run, source)
    speed = speed_plot(run, source)
    return [
        Section("Loss", (loss,)) if loss else None,
        what_ran(run, source),
        health(run, source),
        curves_section(gradient, speed),
        memory(run, source),
        samples(run, source),
        tasks(run, source),
        configuration(run, source),
        environment(run, source),
    ]


def what_ran(run: Run, source: Source) -> Section | None:
    """Layers by group with the precision of each GEMM, trainable parameters, adapters."""
    if not run.receipt:
        return None
    receipt, p = receipt_of(run), run.receipt.get("precision", {})
    blocks: list[Block] = []
    if receipt.layers:
        total = sum(layer.flops for layer in receipt.layers) or 1
        rows, shares = [], []
        for count, names, fprop, dgrad, wgrad, share, reason in group_layers(receipt.layers):
            rows.append(
                (
                    names,
                    source.num(count, RECEIPT, "layers[].name"),
                    *(source.num(g.upper(), RECEIPT, "layers[]") if g != "-" else MISSING
                      for g in (fprop, dgrad, wgrad)),
                    source.num(share, RECEIPT, f"layers[].flops of {total:,}"),
                    source.words(reason, RECEIPT, "layers[].reason"),
                )
            )  # fmt: skip
            shares.append(float(share.rstrip("%")) / 100)
        head = ("layers", "count", "fprop", "dgrad", "wgrad", "FLOPs", "reason")
        blocks.append(Table(head, rows, numeric=(1, 5), shares={5: shares}))
    parts: list[str | Num] = []
    for role, share in receipt.role_share.items():
        parts += [", " if parts else "Of all matmul FLOPs: ", f"{role} "]
        parts.append(source.num(percent(share), RECEIPT, f"role_share.{role}"))
    if parts:
        blocks.append(Para(words(*parts, ".")))
    if line := _trainable(run, source):
        blocks.append(Para(line))
    for key, told in (("adapters", "Adapters"), ("compile", "Compile")):
        if p.get(key):
            text = source.words(str(p[key]), RECEIPT, f"precision.{key}")
            blocks.append(Para(words(f"{told}: ", text, ".")))
    return Section("What ran", tuple(blocks)) if blocks else None


def receipt_of(run: Run) -> Receipt:
    """The receipt as an object, keys that this version does not know left out."""
    known = {f.name for f in fields(Receipt)}
    values: dict[str, Any] = {k: v for k, v in run.receipt.items() if k in known}
    values["layers"] = []
    values.setdefault("status", "")
    values.setdefault("precision", {})
    receipt = Receipt(**values)
    inside = [f.name for f in fields(LayerReceipt)]
    for layer in run.receipt.get("layers") or []:
        if all(name in layer for name in inside):
            receipt.layers.append(LayerReceipt(**{name: layer[name] for name in inside}))
    return receipt


def _trainable(run: Run, source: Source) -> Words:
    t = run.receipt.get("trainable") or {}
    if not t:
        return Words(())
    told = (
        ("before", "before"),
        ("after", "after preparation"),
        ("in_optimizer", "in the optimizer"),
        ("moved", "moved"),
    )
    parts: list[str | Num] = ["Trainable parameters: "]
    for key, text in told:
        parts += [source.num(grouped(t.get(key)), RECEIPT, f"trainable.{key}"), f" {text}, "]
    state = t.get("optimizer_state_bytes")
    parts[-1] = " moved"
    if state and t.get("in_optimizer"):
        each = source.num(
            f"{state / t['in_optimizer']:.2f}", RECEIPT, "trainable.optimizer_state_bytes"
        )
        parts += ["; ", each, " bytes of optimizer state each"]
    return words(*parts, ".")


# ----------------------------------------------------------------------- memory, samples and tasks


def memory(run: Run, source: Source) -> Section | None:
    """Predicted beside measured, as bars of one scale."""
    m = run.receipt.get("memory") or {}
    rows, values = [], []
    for told, key, why in (
        ("predicted", "predicted_gib", "predicted"),
        ("measured", "measured_gib", "measured"),
        ("predicted, reserved by the allocator", "predicted_reserved_gib", ""),
        ("reserved by the allocator", "reserved_gib", ""),
    ):
        if is_number(m.get(key)):
            size = source.num(size_of_gib(m[key]), RECEIPT, f"memory.{key}")
            note = source.words(str(m.get(why) or ""), RECEIPT, f"memory.{why}")
            rows.append((told, size, note or ""))
            values.append(m[key])
    if not rows:
        why = source.words(str(m.get("measured") or ""), RECEIPT, "memory.measured")
        return Section("Memory", (Para(words("Not measured: ", why, ".")),)) if why else None
    most = max(values) or 1
    bars = [value / most for value in values]
    return Section("Memory", (Table(("", "peak", "of what"), rows, (1,), {1: bars}),))


def samples(run: Run, source: Source) -> Section | None:
    """What the model said to each prompt, as it learned."""
    prompts: dict[str, list[tuple[Cell, str]]] = {}
    found = run.samples
    final = run.report.get("samples")
    for number, (step, pairs) in enumerate(found):
        last = number == len(found) - 1 and pairs == final
        file, key = (REPORT, "samples") if last else (METRICS, f"samples at step {step}")
        for pair in pairs:
            told = source.num(f"step {step:,}" if not last else "trained", file, key)
            prompt, answer = str(pair.get("prompt", "")), str(pair.get("answer", ""))
            prompts.setdefault(prompt, []).append((told, answer))
    blocks = tuple(Samples(prompt, _some(answers)) for prompt, answers in prompts.items())
    return Section("What it says", blocks) if blocks else None


def _some(answers: list[tuple[Cell, str]]) -> list[tuple[Cell, str]]:
    if len(answers) <= SHOWN_ANSWERS:
        return answers
    last = len(answers) - 1
    return [answers[round(i * last / (SHOWN_ANSWERS - 1))] for i in range(SHOWN_ANSWERS)]


def tasks(run: Run, source: Source) -> Section | None:
    """Scores of downstream tasks."""
    rows = []
    for row in run.rows:
        for task, scores in (row.get("tasks") or {}).items():
            for metric, value in scores.items():
                if metric.endswith("_stderr") or not is_number(value):
                    continue
                key = f"tasks.{task}.{metric} at step {row['step']}"
                error = scores.get(f"{metric}_stderr")
                rows.append(
                    (
                        task,
                        metric,
                        source.num(f"{row['step']:,}", METRICS, "step"),
                        source.num(fixed(value), METRICS, key),
                        source.num(f"± {error:.4f}", METRICS, key) if is_number(error) else "",
                    )
                )
    head = ("task", "metric", "step", "score", "standard error")
    return Section("Tasks", (Table(head, rows, (2, 3, 4)),)) if rows else None


# --------------------------------------------------------------------- configuration, environment


def configuration(run: Run, source: Source) -> Section | None:
    """The complete recipe, as it can be run again."""
    try:
        text = (run.folder / CONFIG).read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    link = Num(CONFIG, source.href(CONFIG), "the complete recipe")
    return Section("Configuration", (Listing(text.strip(), link),), folded=True)


def environment(run: Run, source: Source) -> Section | None:
    """Device, processes, seed and library versions."""
    e = run.receipt.get("environment") or {}
    rows: list[tuple[Cell, Cell]] = []
    device = e.get("device") or {}
    if device:
        size = device.get("memory_gib")
        told = f"{device.get('name')}" + (f", {size:.1f} GiB" if is_number(size) else "")
        rows.append(("device", source.num(told, RECEIPT, "environment.device")))
    for key in ("processes", "seed"):
        if key in e:
            rows.append((key, source.num(str(e[key]), RECEIPT, f"environment.{key}")))
    for library, version in (e.get("versions") or {}).items():
        key = f"environment.versions.{library}"
        rows.append((library, source.num(str(version), RECEIPT, key)))
    if e.get("patches"):
        names = ", ".join(map(str, e["patches"]))
        rows.append(("patched", source.num(names, RECEIPT, "environment.patches")))
    if run.start.get("command"):
        command = " ".join(map(str, run.start["command"]))
        rows.append(("command", source.num(command, "run.json", "command")))
    if conditions := run.receipt.get("conditions"):
        for key, value in conditions.items():
            text = value if isinstance(value, str) else json.dumps(value)
            rows.append((key.replace("_", " "), source.num(text, RECEIPT, f"conditions.{key}")))
    return Section("Environment", (Table(("", ""), rows),), folded=True) if rows else None
