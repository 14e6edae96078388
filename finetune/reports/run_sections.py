"""What a report says of one run: its verdict, the few figures at the top, and its sections."""

from __future__ import annotations

import json
from dataclasses import fields
from statistics import median
from typing import Any, Literal

from finetune.receipt import LayerReceipt, Receipt, group_layers, in_units
from finetune.reports.content import (
    MISSING,
    Block,
    Cell,
    Fact,
    Listing,
    Num,
    Page,
    Para,
    Plot,
    Row,
    Samples,
    Section,
    Series,
    Source,
    Table,
    Words,
    duration,
    fixed,
    grouped,
    is_number,
    percent,
    signed,
    words,
)
from finetune.reports.health import health
from finetune.reports.series import envelope, said, series_of, smoothed, split, window_of
from finetune.runs import Run

METRICS, RECEIPT, REPORT, CONFIG = "metrics.jsonl", "receipt.json", "report.json", "config.yaml"
SHOWN_ANSWERS = 6
"""Evaluations of which answers are shown: the first, the last, and some between."""

Tone = Literal["good", "bad", "plain"]


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


def curves_section(gradient: Plot | None, speed: Plot | None) -> Section | None:
    """Gradient norm and speed beside each other."""
    found = tuple(plot for plot in (gradient, speed) if plot is not None)
    return Section("Gradients and speed", (Row(found),)) if found else None


# ---------------------------------------------------------------------------------------- the top


def about(run: Run, source: Source) -> Words:
    """The run's name, its state, and where its files are."""
    state = run.state if run.state != "killed" else "killed before its end"
    steps: Words = words(source.num(f"{run.last_step:,}", METRICS, "step"))
    if run.planned_steps and run.planned_steps != run.last_step:
        steps = words(
            steps, " of ", source.num(f"{run.planned_steps:,}", CONFIG, "train.max_steps")
        )
    return words(Num(run.name, source.href() + "/"), f", {state} at step ", steps)


def verdict_of(run: Run, source: Source) -> tuple[str, Tone, Words]:
    """What of the precision is proven, in plain words: headline, tone and a sentence."""
    if not run.receipt:
        goes_on = run.state == "running"
        lead = "the receipt comes when training ends" if goes_on else "it left no receipt"
        state = "The run goes on" if goes_on else "The run was killed"
        return "Not proven", "plain" if goes_on else "bad", words(f"{state}: {lead}.")
    receipt, p = run.receipt, run.receipt.get("precision", {})
    asked, ran = str(p.get("asked", "")), str(p.get("ran", ""))
    status = str(receipt.get("status", ""))
    low = ran in ("fp8", "fp4")
    reason = source.words(str(p.get("reason", "")), RECEIPT, "precision.reason")
    if asked in ("fp8", "fp4") and not low:
        lead = words(f"{asked.upper()} was asked for and {ran.upper()} ran. ", reason)
        return f"Not {asked.upper()}", "bad", lead
    if not low:
        layers = source.num("No matmul", RECEIPT, "fp8_flop_share")
        told = f"{ran.upper()}, {'as asked' if run.proven else 'not proven'}"
        lead = words(layers, " ran in FP8, and none was to. ", as_sentence(_moved(run, source)))
        return told, "plain" if run.proven else "bad", lead if run.proven else words(status)
    share = source.num(percent(receipt.get("fp8_flop_share")), RECEIPT, "fp8_flop_share")
    how = f"{p.get('backend')}/{p.get('scaling')}, {p.get('format')}"
    engine = source.num(how, RECEIPT, "precision.effective")
    lead = words(share, f" of matmul FLOPs ran in {ran.upper()} (", engine, "): counted during ")
    lead = words(lead, "training, not read from a setting. ", as_sentence(_moved(run, source)))
    if not run.proven:
        status = status.removeprefix("not proven: ")
        lead = words(source.num(f"{status[:1].upper()}{status[1:]}", RECEIPT, "status"), ". ", lead)
    lead = words(lead, as_sentence(reason))
    return (
        f"{ran.upper()}, {'proven' if run.proven else 'not proven'}",
        ("good" if run.proven else "bad"),
        lead,
    )


def as_sentence(line: Words) -> Words:
    """The line with a capital at its beginning and a stop at its end."""
    if not line:
        return line
    first, *rest = line.parts
    upper = (
        Num(first.text[:1].upper() + first.text[1:], first.href, first.key)
        if isinstance(first, Num)
        else first[:1].upper() + first[1:]
    )
    return words(upper, *rest, ". ")


def _moved(run: Run, source: Source) -> Words:
    t = run.receipt.get("trainable") or {}
    if not t.get("after"):
        return Words(())
    moved = source.num(grouped(t.get("moved", 0)), RECEIPT, "trainable.moved")
    after = source.num(grouped(t["after"]), RECEIPT, "trainable.after")
    if t.get("moved") == t["after"]:
        return words("all ", moved, " trainable parameters moved")
    return words(moved, " of ", after, " trainable parameters moved")


def loud_lines(run: Run, source: Source) -> tuple[Words, ...]:
    """What nobody should overlook."""
    receipt, lines = run.receipt, []
    fallback = str(receipt.get("precision", {}).get("fallback") or "")
    lines.append(source.words(fallback, RECEIPT, "precision.fallback"))
    lines.append(
        source.words(str(receipt.get("run", {}).get("stopped") or ""), RECEIPT, "run.stopped")
    )
    still = receipt.get("trainable", {}).get("below_resolution")
    if still:
        count = source.num(grouped(still), RECEIPT, "trainable.below_resolution")
        lines.append(
            words(
                count,
                " parameters get updates smaller than their type can hold, and stand still: ",
                "BF16 weights need model.dtype=float32.",
            )
        )
    for key in ("loss", "eval_loss"):
        _, _, broken = split(*series_of(run.rows, key))
        if broken:
            at = source.num(f"step {broken[0]:,.0f}", METRICS, key)
            lines.append(words(f"{key} is not finite at ", at, "."))
    skipped = next((r["skipped_steps"] for r in reversed(run.rows) if r.get("skipped_steps")), 0)
    if skipped:
        count = source.num(grouped(skipped), METRICS, "skipped_steps")
        lines.append(words(count, " steps were skipped by loss scaling."))
    if run.state in ("interrupted", "failed", "killed"):
        lines.append(words(f"The run did not end by itself: it was {run.state}."
                           if run.state != "failed" else "The run ended in an error."))  # fmt: skip
    return tuple(line for line in lines if line)


def facts(run: Run, source: Source) -> tuple[Fact, ...]:
    """Loss, held-out loss, speed, memory, steps and time."""
    return (
        _loss_fact(run, source),
        _held_out_fact(run, source),
        speed_fact(run, source),
        memory_fact(run, source),
        _time_fact(run, source),
    )


def first_last(run: Run, source: Source, key: str) -> tuple[Num, Num, list[float]]:
    """The first and the last value of a key in the metrics, linked, and all finite ones."""
    x, y, _ = split(*series_of(run.rows, key))
    if not len(y):
        return Num(MISSING), Num(MISSING), []
    ends = [source.num(fixed(float(y[i])), METRICS, f"{key} at step {x[i]:.0f}") for i in (0, -1)]
    return ends[0], ends[1], y.tolist()


def _loss_fact(run: Run, source: Source) -> Fact:
    first, last, values = first_last(run, source, "loss")
    return Fact(
        "Training loss", words(last), words("from ", first) if len(values) > 1 else Words(())
    )


def _held_out_fact(run: Run, source: Source) -> Fact:
    _, last, values = first_last(run, source, "eval_loss")
    note: Words = (
        words("no held-out rows" if run.state == "finished" else "") if not values else words()
    )
    if len(values) > 1:
        best = min(values)
        note = words("lowest ", source.num(fixed(best), METRICS, "eval_loss"))
        note = (
            words("the lowest of ", source.num(str(len(values)), METRICS, "eval_loss"))
            if (best == values[-1])
            else note
        )
    return Fact("Held-out loss", words(last), note)


def speed_fact(run: Run, source: Source) -> Fact:
    """Median tokens/s, and what of the GPU it uses where that is known."""
    value: Any = run.report.get("tokens_per_s")
    file, key = REPORT, "tokens_per_s"
    if value is None:
        speeds = split(*series_of(run.rows, "tokens_per_s"))[1].tolist()
        value, file = (median(speeds[1:] or speeds), METRICS) if speeds else (None, METRICS)
    mfu = next((r["health/mfu"] for r in reversed(run.rows) if "health/mfu" in r), None)
    note = (
        words("MFU ", source.num(percent(mfu), METRICS, "health/mfu")) if mfu else words("median")
    )
    if (run.receipt.get("precision") or {}).get("backend") == "emulated":
        note = words(source.num("emulated", RECEIPT, "precision.backend"), ", not the speed of FP8")
    if value is None:
        note = words()
    return Fact("Tokens per second", words(source.num(grouped(value), file, key)), note)


def memory_fact(run: Run, source: Source) -> Fact:
    """The measured peak of a step, else of the process, beside what was predicted."""
    m = run.receipt.get("memory") or {}
    measured: Any = m.get("measured_gib")
    predicted: Any = m.get("predicted_gib")
    if is_number(measured):
        value = source.num(in_units(measured), RECEIPT, "memory.measured_gib")
    else:
        peak: Any = run.report.get("peak_memory_gib")
        value = source.num(
            in_units(peak) if is_number(peak) else MISSING, REPORT, "peak_memory_gib"
        )
    note = Words(())
    if is_number(predicted) and predicted:
        told = in_units(predicted)
        if is_number(measured):
            told = signed(measured / predicted - 1, 1).replace("+0.0%", "as predicted")
            told = told if told == "as predicted" else f"{told} of the prediction"
        note = words(source.num(told, RECEIPT, "memory.predicted_gib"))
    return Fact("Peak memory", words(value), note)


def _time_fact(run: Run, source: Source) -> Fact:
    seconds, file = run.report.get("seconds"), REPORT
    if seconds is None:
        seconds, file = (run.rows[-1].get("seconds") if run.rows else None), METRICS
    steps = source.num(f"{run.last_step:,}", METRICS, "step")
    return Fact(
        "Time", words(source.num(duration(seconds), file, "seconds")), words(steps, " steps")
    )


# ----------------------------------------------------------------------------------------- curves


def _links(source: Source, *keys: str, file: str = METRICS) -> tuple[Num, ...]:
    return tuple(Num(file, source.href(file), key) for key in keys[:1])


def loss_plot(run: Run, source: Source) -> Plot | None:
    """Training loss, raw and smoothed, and held-out loss."""
    x, y, broken = split(*series_of(run.rows, "loss"))
    ex, ey, ebroken = split(*series_of(run.rows, "eval_loss"))
    if not len(x) and not len(ex):
        return None
    window = window_of(len(y))
    series = []
    if len(x):
        thin = envelope(x, y)
        if window > 1:
            even = envelope(x, smoothed(y, window))
            series += [
                Series("training, as logged", *_listed(thin), colour="c1", weight="faint"),
                Series("training, smoothed", *_listed(even), colour="c1"),
            ]
        else:
            series.append(Series("training", *_listed(thin), colour="c1"))
    if len(ex):
        thin = envelope(ex, ey)
        few = len(ex) <= 60
        series.append(
            Series(
                "held out", *_listed(thin), colour="c2", dash="dashed", marker="o" if few else ""
            )
        )
    ends = [f"{s.label} from {s.y[0]:.3f} to {s.y[-1]:.3f}" for s in series if s.weight != "faint"]
    return Plot(
        "loss",
        "Training and held-out loss",
        "nats per token",
        f"Loss over {run.last_step} steps: {'; '.join(ends)}.",
        tuple(series),
        note=said(len(y), window),
        sources=_links(source, "loss", "eval_loss"),
        marks=broken + ebroken,
        size="wide",
    )


def _listed(pair: Any) -> tuple[list[float], list[float]]:
    return pair[0].tolist(), pair[1].tolist()


def _curve(
    run: Run, source: Source, key: str, name: str, title: str, unit: str, rows: Any, file: str
) -> Plot | None:
    x, y, broken = split(*series_of(rows, key))
    if len(x) < 2:
        return None
    window = window_of(len(y))
    series = [
        Series("as logged", *_listed(envelope(x, y)), weight="faint" if window > 1 else "normal")
    ]
    if window > 1:
        series.append(Series("smoothed", *_listed(envelope(x, smoothed(y, window)))))
    return Plot(
        name,
        title,
        unit,
        f"{title} over steps, from {min(y):.4g} to {max(y):.4g} {unit}.",
        tuple(series),
        note=said(len(y), window),
        sources=_links(source, key, file=file),
        marks=broken,
        from_zero=True,
        size="half",
    )


def gradient_plot(run: Run, source: Source) -> Plot | None:
    """Gradient norm over steps."""
    return _curve(
        run, source, "grad_norm", "gradient_norm", "Gradient norm", "L2", run.rows, METRICS
    )


def speed_plot(run: Run, source: Source) -> Plot | None:
    """Tokens per second over steps, of single steps where their clock ran."""
    ticks = [
        {"step": r["step"], "speed": r["tokens"] / r["seconds"]}
        for r in run.steps
        if is_number(r.get("tokens")) and is_number(r.get("seconds")) and r["seconds"] > 0
    ]
    title, unit = "Speed", "tokens per second"
    if len(ticks) > 1:
        return _curve(run, source, "speed", "speed", title, unit, ticks, "steps.jsonl")
    return _curve(run, source, "tokens_per_s", "speed", title, unit, run.rows, METRICS)


# --------------------------------------------------------------------------------------- what ran


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
            size = source.num(in_units(m[key]), RECEIPT, f"memory.{key}")
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
