"""The top of a run's report: what it was, whether FP8 is proven, what is loud, a few figures."""

from __future__ import annotations

from statistics import median
from typing import Any, Literal

from finetune.analysis.report.content import (
    MISSING,
    Fact,
    Num,
    Source,
    Words,
    duration,
    fixed,
    grouped,
    is_number,
    percent,
    signed,
    words,
)
from finetune.analysis.report.series import series_of, split
from finetune.runs.folder import Run
from finetune.units import size_of_gib

METRICS, RECEIPT, REPORT, CONFIG = "metrics.jsonl", "receipt.json", "report.json", "config.yaml"
Tone = Literal["good", "bad", "plain"]


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
        value = source.num(size_of_gib(measured), RECEIPT, "memory.measured_gib")
    else:
        peak: Any = run.report.get("peak_memory_gib")
        value = source.num(
            size_of_gib(peak) if is_number(peak) else MISSING, REPORT, "peak_memory_gib"
        )
    note = Words(())
    if is_number(predicted) and predicted:
        told = size_of_gib(predicted)
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
