"""The output head of an 8B on an H100: products, bytes, memory and time, counted without a GPU.

    python -m tests.benchmarks.head [--tokens 8192] [RECIPE | RECIPE,override=value,...] ...

Rehearses one layer of each recipe, as `estimate` does, and adds up what runs from the first to the
last product of the head, forward and backward. Counted are products a token (2 x words x width
FLOPs each), kernels, bytes read and written by those that are no products, the most memory that the
head and its loss hold, and what of it is kept from forward to backward. *Predicted* are
milliseconds of products, casts and the rest.
"""

from __future__ import annotations

import argparse
from collections import Counter
from typing import Any

from rich.console import Console
from rich.table import Table

from finetune import load_recipe
from finetune.config.schema import RunConfig
from finetune.config.train_section import with_checkpointing
from finetune.estimator.speed.fusion import launches
from finetune.estimator.speed.operators import product_of
from finetune.estimator.speed.roofline import roofline_of
from finetune.estimator.speed.step_parts import StepPart, classes_of
from finetune.estimator.trace.rehearsal import rehearse
from finetune.estimator.trace.trace import Trace, layer_of
from finetune.hardware.gpus import machine_of
from finetune.hardware.requirements import Resolution
from tests.conftest import H100

RECIPES = (
    "llama_8b_lora_fp8", "llama_8b_lora_fp8,precision.map.output=fp8", "llama_8b_full_fp8",
)  # fmt: skip
MIB = 2**20


def trace_of(config: RunConfig) -> Trace:
    precision = config.precision.model_copy(update={"backend": "torchao"})
    resolution = Resolution(precision, config.precision, "for a count")
    return rehearse(with_checkpointing(config, False), H100, resolution, layers=1).trace


def memory_of(trace: Trace) -> tuple[int, int]:
    """Most bytes that the head and its loss hold, and those of them that a backward finds."""
    own = {
        number: storage
        for number, storage in trace.storages.items()
        if storage.kind in ("logits", "fp8") and not layer_of(storage.module)
    }
    kept = sum(one.nbytes for one in own.values() if one.saved and one.phase == "forward")
    alive = most = 0
    for event in trace.events[trace.marks["step"] :]:
        alive += event.nbytes if event.storage in own else 0
        most = max(most, alive)
    return most, kept


def counted(trace: Trace) -> Counter[str]:
    """Products, kernels, bytes and microseconds (predicted, H100) of the head and its loss."""
    gpu = machine_of("H100").gpu
    assert gpu is not None
    roofline = roofline_of(gpu, "compiled")
    ops, found = trace.ops, Counter[str]()
    classes = classes_of(ops)
    for phase in ("forward", "backward"):
        # From the first to the last that reads logits, or multiplies by the head.
        own = [i for i, op in enumerate(ops) if op.phase == phase and classes[i] is StepPart.HEAD]
        for launch in launches(ops):
            at = launch.ops[0]
            if not own or not own[0] <= at <= own[-1] or layer_of(ops[at].module):
                continue
            part = "casts" if classes[at] is StepPart.FP8_CASTS else "rest"
            product = product_of(ops[at])
            if product is not None:
                part, found["flops"] = "products", found["flops"] + int(product.flops)
            else:
                found["bytes"] += int(launch.read + launch.written)
            found["GEMMs" if product is not None else "kernels"] += 1
            found[part] += round(1e6 * roofline.kernel_time(ops[at], launch).seconds)
    return found


def row_of(name: str, tokens: int) -> list[Any]:
    recipe, *overrides = name.split(",")
    rows = ["train.per_device_train_batch_size=4", f"train.max_length={tokens // 4}"]
    config = load_recipe(recipe, [*rows, "train.gradient_accumulation_steps=1", *overrides]).config
    trace = trace_of(config)
    found = counted(trace)
    shape = 2 * tokens * 128_256 * 4096
    most, kept = memory_of(trace)
    times = [found[what] / 1e3 for what in ("products", "casts", "rest")]  # us -> ms
    return [
        name, f"{found['flops'] / shape:.2f}", found["GEMMs"], found["kernels"],
        f"{found['bytes'] / 1e9:.2f}", f"{most / MIB:.0f}", f"{kept / MIB:.0f}",
        *(f"{ms:.1f}" for ms in times), f"{sum(times):.1f}",
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipes", nargs="*", default=RECIPES)
    parser.add_argument("--tokens", type=int, default=8192)
    options = parser.parse_args()
    table = Table(box=None, pad_edge=False)
    for title in (
        "recipe", "products a token", "GEMMs", "other kernels", "GB", "peak MiB", "kept MiB",
        "products ms", "casts ms", "rest ms", "predicted ms",
    ):  # fmt: skip
        table.add_column(title)
    for name in options.recipes:
        table.add_row(*map(str, row_of(name, options.tokens)))
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
