"""Page of one run: FP8 verification, key figures, then sections."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields
from statistics import median
from typing import Any

from finetune.analysis.report.content import (
    CONFIG,
    METRICS,
    MISSING,
    RECEIPT,
    REPORT,
    Block,
    Cell,
    Fact,
    Listing,
    Num,
    Page,
    Para,
    RunSource,
    Samples,
    Section,
    Table,
    Tone,
    Words,
    figure,
    fixed,
    is_number,
    signed,
    words,
)
from finetune.analysis.report.curves import curve, gradients_and_speed, health, loss_plot
from finetune.runs.receipt import LayerReceipt, Receipt, group_layers
from finetune.units import count, elapsed, percent, size_of_gib

SHOWN_ANSWERS = 6
"""Evaluations whose answers are shown: the first, the last, and some between."""
TRAINABLE = {
    "before": " before, ",
    "after": " after preparation, ",
    "in_optimizer": " in the optimizer, ",
    "moved": " moved",
}
PEAKS = (
    ("predicted", "predicted_gib", "predicted"),
    ("measured", "measured_gib", "measured"),
    ("predicted, reserved by the allocator", "predicted_reserved_gib", ""),
    ("reserved by the allocator", "reserved_gib", ""),
)


def run_page(s: RunSource) -> Page:
    verdict, tone, lead = verdict_of(s)
    loss = loss_plot(s)
    sections = (
        Section("Loss", (loss,)) if loss else None,
        what_ran(s),
        health(s),
        gradients_and_speed(s),
        _memory(s),
        samples(s),
        _tasks(s),
        _configuration(s),
        environment(s),
    )
    return Page(
        title=s.run.recipe,
        about=_about(s),
        verdict=verdict,
        tone=tone,
        lead=lead,
        loud=loud_lines(s),
        facts=(_loss_fact(s), _held_out_fact(s), speed_fact(s), memory_fact(s), _time_fact(s)),
        sections=tuple(section for section in sections if section is not None),
    )


# ----------------------------------------------------------------------------- head: verdict, facts


def _about(s: RunSource) -> Words:
    run = s.run
    state = run.state if run.state != "killed" else "killed before its end"
    line = words(Num(run.name, s.href() + "/"), f", {state} at step ", last_step(s))
    if run.planned_steps and run.planned_steps != run.last_step:
        return words(line, " of ", s.num(f"{run.planned_steps:,}", CONFIG, "train.max_steps"))
    return line


def last_step(s: RunSource) -> Num:
    return s.num(f"{s.run.last_step:,}", METRICS, "step")


def verdict_of(s: RunSource) -> tuple[str, Tone, Words]:
    """Headline, tone and sentence on the proof of the precision."""
    receipt, proven = s.run.receipt, s.run.proven
    if not receipt:
        goes_on = s.run.state == "running"
        lead = "the receipt comes when training ends" if goes_on else "it left no receipt"
        state = "The run goes on" if goes_on else "The run was killed"
        return "Not proven", "plain" if goes_on else "bad", words(f"{state}: {lead}.")
    p = receipt.get("precision", {})
    requested, executed = str(p.get("asked", "")).upper(), str(p.get("ran", "")).upper()
    status, low = str(receipt.get("status", "")), ("FP8", "FP4")
    reason = s.words(str(p.get("reason", "")), RECEIPT, "precision.reason")
    if requested in low and executed not in low:
        lead = words(f"{requested} was asked for and {executed} ran. ", reason)
        return f"Not {requested}", "bad", lead
    if executed not in low:
        if not proven:
            return f"{executed}, not proven", "bad", words(status)
        none = s.num("No matmul", RECEIPT, "fp8_flop_share")
        lead = words(none, " ran in FP8, and none was to. ", as_sentence(_moved(s)))
        return f"{executed}, as asked", "plain", lead
    share = s.num(figure(receipt.get("fp8_flop_share"), percent), RECEIPT, "fp8_flop_share")
    how = f"{p.get('backend')}/{p.get('scaling')}, {p.get('format')}"
    engine = s.num(how, RECEIPT, "precision.effective")
    lead = words(
        share, f" of matmul FLOPs ran in {executed} (", engine,
        "): counted during training, not read from a setting. ", as_sentence(_moved(s)),
    )  # fmt: skip
    if proven:
        return f"{executed}, proven", "good", words(lead, as_sentence(reason))
    why = as_sentence(s.words(status.removeprefix("not proven: "), RECEIPT, "status"))
    return f"{executed}, not proven", "bad", words(why, lead, as_sentence(reason))


def as_sentence(line: Words) -> Words:
    if not line:
        return line
    first, *rest = line.parts
    upper = (
        Num(first.text[:1].upper() + first.text[1:], first.href, first.key)
        if isinstance(first, Num)
        else first[:1].upper() + first[1:]
    )
    return words(upper, *rest, ". ")


def _moved(s: RunSource) -> Words:
    t = s.run.receipt.get("trainable") or {}
    if not t.get("after"):
        return Words(())
    moved = s.num(figure(t.get("moved", 0), count), RECEIPT, "trainable.moved")
    if t.get("moved") == t["after"]:
        return words("all ", moved, " trainable parameters moved")
    after = s.num(figure(t["after"], count), RECEIPT, "trainable.after")
    return words(moved, " of ", after, " trainable parameters moved")


def loud_lines(s: RunSource) -> tuple[Words, ...]:
    return tuple(line for line in _loud(s) if line)


def _loud(s: RunSource) -> Iterator[Words]:
    run, receipt = s.run, s.run.receipt
    for section, key in (("precision", "fallback"), ("run", "stopped")):
        yield s.words(str(receipt.get(section, {}).get(key) or ""), RECEIPT, f"{section}.{key}")
    if still := receipt.get("trainable", {}).get("below_resolution"):
        yield words(
            s.num(figure(still, count), RECEIPT, "trainable.below_resolution"),
            " parameters get updates smaller than their type can hold, and stand still: ",
            "BF16 weights need model.dtype=float32.",
        )
    for key in ("loss", "eval_loss"):
        if broken := curve(run.rows, key).broken:
            at = s.num(f"step {broken[0]:,.0f}", METRICS, key)
            yield words(f"{key} is not finite at ", at, ".")
    skipped = next((r["skipped_steps"] for r in reversed(run.rows) if r.get("skipped_steps")), 0)
    if skipped:
        number = s.num(figure(skipped, count), METRICS, "skipped_steps")
        yield words(number, " steps were skipped by loss scaling.")
    if run.state == "failed":
        yield words("The run ended in an error.")
    elif run.state in ("interrupted", "killed"):
        yield words(f"The run did not end by itself: it was {run.state}.")


def first_last(s: RunSource, key: str) -> tuple[Num, Num, list[float]]:
    """First and last value of a metric, linked, and all finite ones."""
    x, y, _ = curve(s.run.rows, key)
    if not len(y):
        return Num(MISSING), Num(MISSING), []
    first, last = (s.num(fixed(float(y[i])), METRICS, f"{key} at step {x[i]:.0f}") for i in (0, -1))
    return first, last, y.tolist()


def _loss_fact(s: RunSource) -> Fact:
    first, last, values = first_last(s, "loss")
    note = words("from ", first) if len(values) > 1 else words()
    return Fact("Training loss", words(last), note)


def _held_out_fact(s: RunSource) -> Fact:
    _, last, values = first_last(s, "eval_loss")
    note = words("no held-out rows" if not values and s.run.state == "finished" else "")
    if len(values) > 1:
        best = min(values)
        link = s.num(fixed(best), METRICS, "eval_loss")
        note = words("lowest ", link)
        if best == values[-1]:
            note = words("the lowest of ", s.num(str(len(values)), METRICS, "eval_loss"))
    return Fact("Held-out loss", words(last), note)


def speed_fact(s: RunSource) -> Fact:
    """Median tokens/s, and the utilization of a known GPU."""
    value: Any = s.run.report.get("tokens_per_s")
    file = REPORT
    if value is None:
        speeds = curve(s.run.rows, "tokens_per_s").y.tolist()
        value, file = (median(speeds[1:] or speeds) if speeds else None), METRICS
    mfu = next((r["health/mfu"] for r in reversed(s.run.rows) if "health/mfu" in r), None)
    if value is None:
        note = words()
    elif (s.run.receipt.get("precision") or {}).get("backend") == "emulated":
        note = words(s.num("emulated", RECEIPT, "precision.backend"), ", not the speed of FP8")
    elif mfu:
        note = words("MFU ", s.num(figure(mfu, percent), METRICS, "health/mfu"))
    else:
        note = words("median")
    number = s.num(figure(value, count), file, "tokens_per_s")
    return Fact("Tokens per second", words(number), note)


def memory_fact(s: RunSource) -> Fact:
    """Measured peak of a step, else of the process, beside the prediction."""
    m = s.run.receipt.get("memory") or {}
    measured: Any = m.get("measured_gib")
    predicted: Any = m.get("predicted_gib")
    if is_number(measured):
        value = s.num(size_of_gib(measured), RECEIPT, "memory.measured_gib")
    else:
        peak = figure(s.run.report.get("peak_memory_gib"), size_of_gib)
        value = s.num(peak, REPORT, "peak_memory_gib")
    note = Words(())
    if is_number(predicted) and predicted:
        text = size_of_gib(predicted)
        if is_number(measured):
            over = signed(measured / predicted - 1, 1)
            text = "as predicted" if over == "+0.0%" else f"{over} of the prediction"
        note = words(s.num(text, RECEIPT, "memory.predicted_gib"))
    return Fact("Peak memory", words(value), note)


def _time_fact(s: RunSource) -> Fact:
    seconds, file = s.run.report.get("seconds"), REPORT
    if seconds is None:
        seconds, file = (s.run.rows[-1].get("seconds") if s.run.rows else None), METRICS
    value = s.num(figure(seconds, elapsed), file, "seconds")
    return Fact("Time", words(value), words(last_step(s), " steps"))


# ---------------------------------------------------------------------------------------- sections


def what_ran(s: RunSource) -> Section | None:
    """Layers by group with the precision of each GEMM, trainable parameters, adapters."""
    if not s.run.receipt:
        return None
    receipt, p = receipt_of(s), s.run.receipt.get("precision", {})
    blocks: list[Block] = []
    if receipt.layers:
        total = sum(layer.flops for layer in receipt.layers) or 1
        rows, shares = [], []
        for number, names, *gemms, share, reason in group_layers(receipt.layers):
            rows.append(
                (
                    names,
                    s.num(number, RECEIPT, "layers[].name"),
                    *(
                        s.num(g.upper(), RECEIPT, "layers[]") if g != "-" else MISSING
                        for g in gemms
                    ),
                    s.num(share, RECEIPT, f"layers[].flops of {total:,}"),
                    s.words(reason, RECEIPT, "layers[].reason"),
                )
            )
            shares.append(float(share.rstrip("%")) / 100)
        head = ("layers", "count", "fprop", "dgrad", "wgrad", "FLOPs", "reason")
        blocks.append(Table(head, rows, numeric=(1, 5), shares={5: shares}))
    parts: list[str | Num] = []
    for role, share in receipt.role_share.items():
        parts += [", " if parts else "Of all matmul FLOPs: ", f"{role} "]
        parts.append(s.num(figure(share, percent), RECEIPT, f"role_share.{role}"))
    if parts:
        blocks.append(Para(words(*parts, ".")))
    if line := _trainable(s):
        blocks.append(Para(line))
    for key in ("adapters", "compile"):
        if p.get(key):
            text = s.words(str(p[key]), RECEIPT, f"precision.{key}")
            blocks.append(Para(words(f"{key.capitalize()}: ", text, ".")))
    return Section("What ran", tuple(blocks)) if blocks else None


def receipt_of(s: RunSource) -> Receipt:
    """Read the receipt, without keys unknown to this version."""
    data = s.run.receipt
    known = {f.name for f in fields(Receipt)} - {"layers"}
    receipt = Receipt(**{"status": "", "precision": {}} | {k: data[k] for k in known & data.keys()})
    inside = [f.name for f in fields(LayerReceipt)]
    for layer in data.get("layers") or []:
        if all(name in layer for name in inside):
            receipt.layers.append(LayerReceipt(**{name: layer[name] for name in inside}))
    return receipt


def _trainable(s: RunSource) -> Words:
    t = s.run.receipt.get("trainable") or {}
    if not t:
        return Words(())
    parts: list[str | Num] = ["Trainable parameters: "]
    for key, text in TRAINABLE.items():
        parts += [s.num(figure(t.get(key), count), RECEIPT, f"trainable.{key}"), text]
    state, owned = t.get("optimizer_state_bytes"), t.get("in_optimizer")
    if state and owned:
        each = s.num(f"{state / owned:.2f}", RECEIPT, "trainable.optimizer_state_bytes")
        parts += ["; ", each, " bytes of optimizer state each"]
    return words(*parts, ".")


def _memory(s: RunSource) -> Section | None:
    """Predicted and measured memory, as bars of one scale."""
    m = s.run.receipt.get("memory") or {}
    rows, values = [], []
    for label, key, why in PEAKS:
        if is_number(m.get(key)):
            note = s.words(str(m.get(why) or ""), RECEIPT, f"memory.{why}")
            rows.append((label, s.num(size_of_gib(m[key]), RECEIPT, f"memory.{key}"), note or ""))
            values.append(m[key])
    if not rows:
        why = s.words(str(m.get("measured") or ""), RECEIPT, "memory.measured")
        return Section("Memory", (Para(words("Not measured: ", why, ".")),)) if why else None
    bars = [value / (max(values) or 1) for value in values]
    return Section("Memory", (Table(("", "peak", "of what"), rows, (1,), {1: bars}),))


def answers(s: RunSource, number: int) -> Iterator[tuple[str, str, str, str, int]]:
    """Yield (prompt, answer, file, key, step) of one of the run's evaluations; -1 is the last."""
    found = s.run.samples
    step, pairs = found[number]
    final = found[number] is found[-1] and pairs == s.run.report.get("samples")
    file, key = (REPORT, "samples") if final else (METRICS, f"samples at step {step}")
    for pair in pairs:
        yield str(pair.get("prompt", "")), str(pair.get("answer", "")), file, key, step


def samples(s: RunSource) -> Section | None:
    """Answers to each prompt, in the course of training."""
    prompts: dict[str, list[tuple[Cell, str]]] = {}
    for number in range(len(s.run.samples)):
        for prompt, answer, file, key, step in answers(s, number):
            when = s.num("trained" if file == REPORT else f"step {step:,}", file, key)
            prompts.setdefault(prompt, []).append((when, answer))
    blocks = tuple(Samples(prompt, _some(found)) for prompt, found in prompts.items())
    return Section("What it says", blocks) if blocks else None


def _some(found: list[tuple[Cell, str]]) -> list[tuple[Cell, str]]:
    if len(found) <= SHOWN_ANSWERS:
        return found
    last = len(found) - 1
    return [found[round(i * last / (SHOWN_ANSWERS - 1))] for i in range(SHOWN_ANSWERS)]


def _tasks(s: RunSource) -> Section | None:
    rows = []
    for row in s.run.rows:
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
                        s.num(f"{row['step']:,}", METRICS, "step"),
                        s.num(fixed(value), METRICS, key),
                        s.num(f"± {error:.4f}", METRICS, key) if is_number(error) else "",
                    )
                )
    head = ("task", "metric", "step", "score", "standard error")
    return Section("Tasks", (Table(head, rows, (2, 3, 4)),)) if rows else None


def _configuration(s: RunSource) -> Section | None:
    try:
        text = (s.folder / CONFIG).read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    link = Num(CONFIG, s.href(CONFIG), "the complete recipe")
    return Section("Configuration", (Listing(text.strip(), link),), folded=True)


def environment(s: RunSource) -> Section | None:
    rows = [(name, s.num(text, file, key)) for name, text, file, key in _environment(s)]
    return Section("Environment", (Table(("", ""), rows),), folded=True) if rows else None


def _environment(s: RunSource) -> Iterator[tuple[str, str, str, str]]:
    e = s.run.receipt.get("environment") or {}
    if device := e.get("device"):
        size = device.get("memory_gib")
        text = f"{device.get('name')}" + (f", {size:.1f} GiB" if is_number(size) else "")
        yield "device", text, RECEIPT, "environment.device"
    for key in ("processes", "seed"):
        if key in e:
            yield key, str(e[key]), RECEIPT, f"environment.{key}"
    for library, version in (e.get("versions") or {}).items():
        yield library, str(version), RECEIPT, f"environment.versions.{library}"
    if e.get("patches"):
        yield "patched", ", ".join(map(str, e["patches"])), RECEIPT, "environment.patches"
    if command := s.run.start.get("command"):
        yield "command", " ".join(map(str, command)), "run.json", "command"
    for key, value in (s.run.receipt.get("conditions") or {}).items():
        text = value if isinstance(value, str) else json.dumps(value)
        yield key.replace("_", " "), text, RECEIPT, f"conditions.{key}"
