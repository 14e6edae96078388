"""When FP8 pays, as the estimator predicts it: tables over GPUs, models, methods and tokens.

    python -m tests.benchmarks.when_fp8_pays            # which recipe on which GPU (README)
    python -m tests.benchmarks.when_fp8_pays --tokens   # by tokens of a micro-batch (findings)
    python -m tests.benchmarks.when_fp8_pays --speeds   # tokens/s and memory of each side

No GPU, no weights and no network: a figure is what `python -m finetune estimate` says, or what
`finetune/assets/measured.json` has of a GPU, which then says so. Memory is the peak that
PyTorch allocates; where it does not fit, the least that is needed. Speed is that of the FP8 recipe
over its BF16 twin, whose decoder layers are compiled as well (`precision.compile=on`): with torchao
FP8 layers are compiled by default, BF16 ones are not, and that gain is not FP8's. Recipes that
leave gradient checkpointing open have it where FP8's own memory needs it, and the twin has it where
FP8 has it: equal pairs, and no others.
"""

from __future__ import annotations

import argparse
import functools
import sys
from typing import Any

GPUS = ("4090", "L40S", "A100-80GB", "H100", "H200", "B200")
RECIPES = (
    "llama_1b_lora", "llama_1b_full", "llama_8b_qlora", "llama_8b_lora", "llama_8b_lora32",
    "llama_8b_full",
)  # fmt: skip
"""Recipes without their precision."""

MANY = ("llama_70b_lora", 8)
"""The recipe of several GPUs, and how many."""

TOKENS = (512, 2048, 8192)
SWEPT = ("llama_1b_full", "llama_8b_full", "llama_8b_lora", "llama_8b_lora32")
GIB = 2**30


def cell(recipe: str, gpu: str, gpus: int = 1) -> str:
    """GiB of the recipe in FP8 where the GPU and the recipe have it, else in BF16; the speed-up."""
    from finetune.errors import PrecisionError, RecipeNotFoundError
    from finetune.estimator.measured import measured

    seen = measured(gpu)
    if one := seen.get(f"{recipe}_fp8") or seen.get(f"{recipe}_bf16"):
        ratio = f"{one['over_bf16']:.2f}x" if "over_bf16" in one else "BF16"
        return f"**{one['gib']:.0f} GiB, {ratio}, measured**"
    try:
        found, speed = ask(f"{recipe}_fp8", gpu, gpus), True
    except (PrecisionError, RecipeNotFoundError):  # no FP8 on this GPU, or none of this recipe
        found, speed = ask(f"{recipe}_bf16", gpu, gpus), False
    held = found.prediction.footprint
    if found.fit == "does not fit":
        if recipe.endswith("_full") and speed:  # masters in host memory: no twin in BF16 has that
            hosted = ask(f"{recipe}_fp8", gpu, gpus, HOSTED)
            if hosted.fit != "does not fit":
                return f"{hosted.prediction.footprint.allocated / GIB:.0f} GiB, `fp8_params`"
        return f"no ({held.allocated / GIB:.0f} GiB)"
    tight = "" if found.fit == "fits" else ", tight"
    if not speed:
        return f"{held.allocated / GIB:.0f} GiB, BF16{tight}"
    ratio = faster(found, like(found, recipe, gpu, gpus))
    return f"{held.allocated / GIB:.0f} GiB, {ratio:.2f}x{tight}"


def like(found: Any, recipe: str, gpu: str, gpus: int, more: tuple[str, ...] = ()) -> Any:
    """The estimate of the compiled BF16 twin with the checkpointing of the FP8 side."""
    saving = f"{CHECKPOINTING}={str(checkpoints(found)).lower()}"
    return ask(f"{recipe}_bf16", gpu, gpus, (*COMPILED, *more, saving))


COMPILED = ("precision.compile=on",)
HOSTED = ("precision.fp8_params=true", "train.gradient_checkpointing=true")
CHECKPOINTING = "train.gradient_checkpointing"


def checkpoints(found: Any) -> bool:
    """True if an estimate is of a run with gradient checkpointing."""
    return bool(found.prediction.config.train["gradient_checkpointing"])


@functools.cache
def ask(recipe: str, gpu: str, gpus: int, overrides: tuple[str, ...] = ()) -> Any:
    """An estimate of this and nothing beside it."""
    from finetune import estimate, load_recipe

    checked = load_recipe(recipe, overrides)
    return estimate(checked, gpu=gpu, gpus=gpus, changes=False)


def faster(found: Any, other: Any) -> float:
    """How many times as fast one estimate is as another; NaN where a time is not known."""
    timing, against = found.prediction.timing, other.prediction.timing
    return against.seconds / timing.seconds if timing and against else float("nan")


def choosing(gpus: tuple[str, ...]) -> str:
    """Markdown: a row for each GPU, a column for each recipe."""
    from finetune.hardware.gpus import named_gpu

    recipe, count = MANY
    names = [f"`{name}`" for name in RECIPES] + [f"`{recipe}`, {count} GPUs"]
    lines = [f"| GPU | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for gpu in gpus:
        about = named_gpu(gpu)
        cells = [cell(name, gpu) for name in RECIPES]
        cells.append(cell(recipe, gpu, count))
        size = f"{about.memory_gib:.0f} GiB"
        lines.append(f"| {gpu}, {size} | {' | '.join(cells)} |")
        print(lines[-1], file=sys.stderr, flush=True)
    return "\n".join(lines)


def by_tokens(gpu: str) -> str:
    """Markdown: FP8 over compiled BF16 by tokens of a micro-batch."""
    names = [f"{tokens:,} tokens" for tokens in TOKENS]
    lines = [f"| recipe, {gpu} | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for recipe in SWEPT:
        cells = []
        for tokens in TOKENS:
            length = min(tokens, 2048)
            asked = (
                f"train.max_length={length}",
                f"train.per_device_train_batch_size={tokens // length}",
            )
            fp8 = ask(f"{recipe}_fp8", gpu, 1, asked)
            if fp8.measured:
                cells.append(f"{fp8.measured['over_bf16']:.2f}, measured")
                continue
            cells.append(f"{faster(fp8, like(fp8, recipe, gpu, 1, asked)):.2f}")
        lines.append(f"| `{recipe}` | {' | '.join(cells)} |")
        print(lines[-1], file=sys.stderr, flush=True)
    return "\n".join(lines)


SIDES: tuple[tuple[str, int, tuple[str, ...]], ...] = (
    ("llama_8b_lora", 1, ()), ("llama_8b_lora32", 1, ()), ("llama_8b_full", 1, ()),
    ("llama_8b_full", 1, ("train.optim=adamw_torch_fused",)), ("qwen_7b_lora", 1, ()),
    ("llama_70b_lora", 8, ()), ("llama_1b_full", 1, ()),
)  # fmt: skip
"""Recipes of the table of speeds, their GPUs and overrides."""


def speeds(gpus: tuple[str, ...]) -> str:
    """Markdown: tokens/s of all GPUs and GiB of one, FP8 and compiled BF16; equal checkpointing."""
    titles = "recipe, GPU | FP8 tokens/s | BF16 tokens/s | FP8 / BF16 | checkpointing | FP8 GiB"
    titles += " | BF16 GiB | FP8 / BF16 memory"
    lines = [f"| {titles} |", "|---" * 8 + "|"]
    for recipe, count, more in SIDES:
        for gpu in gpus:
            name = f"`{recipe}`" + "".join(f" `{override}`" for override in more)
            name += f", {f'{count} x ' * (count > 1)}{gpu}"
            fp8 = ask(f"{recipe}_fp8", gpu, count, more)
            if fp8.measured:
                lines.append(f"| {name}, **measured** | {measured_sides(recipe, gpu)} |")
                continue
            other = like(fp8, recipe, gpu, count, more)
            ratio = f"{faster(fp8, other):.2f}"
            cells = [f"{x.tokens_per_s:,.0f}" for x in (fp8, other)]
            cells += [ratio, "on" if checkpoints(fp8) else "off"]
            held = [x.prediction.footprint.allocated / GIB for x in (fp8, other)]
            fits = ["" if x.fit == "fits" else f", {x.fit}" for x in (fp8, other)]
            cells += [f"{size:.1f}{fit}" for size, fit in zip(held, fits, strict=True)]
            cells.append(f"{held[0] / held[1]:.2f}")
            lines.append(f"| {name} | {' | '.join(cells)} |")
            print(lines[-1], file=sys.stderr, flush=True)
    return "\n".join(lines)


def measured_sides(recipe: str, gpu: str) -> str:
    """Cells of a measured pair, which had no checkpointing."""
    from finetune.estimator.measured import measured

    fp8, other = (measured(gpu)[f"{recipe}_{compute}"] for compute in ("fp8", "bf16"))
    cells = [f"{x['tokens_per_s']:,}" for x in (fp8, other)] + [f"{fp8['over_bf16']:.2f}", "off"]
    cells += [f"{x['gib']:.1f}" for x in (fp8, other)] + [f"{fp8['gib'] / other['gib']:.2f}"]
    return " | ".join(cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--tokens", action="store_true", help="by tokens of a micro-batch")
    parser.add_argument("--speeds", action="store_true", help="tokens/s and memory of each side")
    parser.add_argument("--gpus", default="", help=f"left out: {','.join(GPUS)}, or H100")
    args = parser.parse_args()
    gpus = tuple(args.gpus.split(",")) if args.gpus else (("H100",) if args.tokens else GPUS)
    if args.speeds:
        print(speeds(tuple(gpu for gpu in gpus if gpu != "A100-80GB")))
        return
    print("\n\n".join(by_tokens(gpu) for gpu in gpus) if args.tokens else choosing(gpus))


if __name__ == "__main__":
    main()
