"""When FP8 pays, as the estimator predicts it: tables over GPUs, models, methods and tokens.

    python -m tests.benchmarks.when_fp8_pays            # which recipe on which GPU (README)
    python -m tests.benchmarks.when_fp8_pays --tokens   # by tokens of a micro-batch (findings)

No GPU, no weights and no network: a cell is what `python -m finetune estimate` says. Memory is what
`nvidia-smi` will show; where it does not fit, the least that is needed. Speed is that of the FP8
recipe over its BF16 twin, whose decoder layers are compiled as well (`precision.compile=on`): with
torchao FP8 layers are compiled by default, BF16 ones are not, and that gain is not FP8's.
`--tokens` shows the ratio over plain BF16 too. Predicted, not measured.
"""

from __future__ import annotations

import argparse
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

    try:
        found, speed = ask(f"{recipe}_fp8", gpu, gpus), True
    except (PrecisionError, RecipeNotFoundError):  # no FP8 on this GPU, or none of this recipe
        found, speed = ask(f"{recipe}_bf16", gpu, gpus), False
    held = found.measured.footprint
    if found.fit == "does not fit":
        return f"no ({(held.allocated + held.outside) / GIB:.0f} GiB)"
    tight = "" if found.fit == "fits" else ", tight"
    if not speed:
        return f"{held.shown / GIB:.0f} GiB, BF16{tight}"
    ratio = faster(found, ask(f"{recipe}_bf16", gpu, gpus, COMPILED))
    return f"{held.shown / GIB:.0f} GiB, {ratio:.2f}x{tight}"


COMPILED = ("precision.compile=on",)


def ask(recipe: str, gpu: str, gpus: int, overrides: tuple[str, ...] = ()) -> Any:
    """An estimate of this and nothing beside it."""
    from finetune import estimate
    from finetune.config.recipe import load_recipe

    checked = load_recipe(recipe, overrides)
    return estimate(checked, gpu=gpu, gpus=gpus, twin=False, advice=False)


def faster(found: Any, other: Any) -> float:
    """How many times as fast one estimate is as another; NaN where a time is not known."""
    pace, against = found.measured.pace, other.measured.pace
    return against.seconds / pace.seconds if pace and against else float("nan")


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
    """Markdown: FP8 over BF16 by tokens of a micro-batch; over compiled BF16, and over plain."""
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
            ways = (COMPILED, ())
            others = [ask(f"{recipe}_bf16", gpu, 1, (*asked, *more)) for more in ways]
            fair, plain = (faster(fp8, other) for other in others)
            cells.append(f"{fair:.2f} ({plain:.2f})")
        lines.append(f"| `{recipe}` | {' | '.join(cells)} |")
        print(lines[-1], file=sys.stderr, flush=True)
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--tokens", action="store_true", help="by tokens of a micro-batch")
    parser.add_argument("--gpus", default="", help=f"left out: {','.join(GPUS)}, or H100")
    args = parser.parse_args()
    gpus = tuple(args.gpus.split(",")) if args.gpus else (("H100",) if args.tokens else GPUS)
    print("\n\n".join(by_tokens(gpu) for gpu in gpus) if args.tokens else choosing(gpus))


if __name__ == "__main__":
    main()
