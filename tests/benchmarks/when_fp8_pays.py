"""When FP8 pays, as the estimator predicts it: tables over GPUs, models, methods and tokens.

    python -m tests.benchmarks.when_fp8_pays            # which recipe on which GPU (README)
    python -m tests.benchmarks.when_fp8_pays --tokens   # by tokens of a micro-batch (findings)

No GPU, no weights and no network: every cell is what `python -m finetune estimate RECIPE --gpu GPU`
says. Memory is what `nvidia-smi` will show (where it does not fit, the least that is needed); speed is that of the FP8 recipe over its BF16 twin, which differs in `precision` alone. The range
is where nine of ten published pairs lie, as for every ratio of the estimator. Predicted, not
measured.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

GPUS = ("4090", "L40S", "A100-80GB", "H100", "H200", "B200")
RECIPES = {
    "llama_1b_lora": (), "llama_1b_full": (), "llama_8b_qlora": (), "llama_8b_lora": (),
    "llama_8b_lora32": (), "llama_8b_full": (),
}  # fmt: skip
"""Recipe without its precision -> overrides."""

MANY = ("llama_70b_lora", 8)
"""The recipe of several GPUs, and how many."""

TOKENS = (512, 1024, 2048, 8192)
SWEPT = ("llama_1b_full", "llama_1b_lora", "llama_8b_full", "llama_8b_lora", "llama_8b_lora32")
GIB = 2**30


def cell(recipe: str, gpu: str, gpus: int = 1, overrides: tuple[str, ...] = ()) -> str:
    """GiB of the recipe in FP8 where the GPU and the recipe have it, else in BF16; the speed-up."""
    from finetune.errors import PrecisionError, RecipeNotFoundError

    try:
        found = ask(f"{recipe}_fp8", gpu, gpus, overrides)
    except (PrecisionError, RecipeNotFoundError):  # no FP8 on this GPU, or none of this recipe
        found = ask(f"{recipe}_bf16", gpu, gpus, overrides)
    held = found.measured.footprint
    if found.fit == "does not fit":
        return f"no ({(held.allocated + held.outside) / GIB:.0f} GiB)"
    fp8 = found.measured.config.precision.compute == "fp8"
    speed = f", {faster(found)}" if fp8 else ", BF16"
    return f"{held.shown / GIB:.0f} GiB{speed}" + ("" if found.fit == "fits" else ", tight")


def ask(recipe: str, gpu: str, gpus: int, overrides: tuple[str, ...]) -> Any:
    """An estimate with the twin."""
    from finetune import estimate
    from finetune.recipe import load_recipe

    return estimate(load_recipe(recipe, overrides), gpu=gpu, gpus=gpus, advice=False)


def faster(found: Any) -> str:
    """How many times as fast as its BF16 twin an FP8 run is."""
    twin = found.twin
    return "?" if twin is None or twin.speed is None else f"{1 / twin.speed[0]:.2f}x"


def ranged(found: Any) -> str:
    """The same with its range."""
    if found.twin is None or found.twin.speed is None:
        return "?"
    middle, low, high = found.twin.speed
    return f"{1 / middle:.2f} ({1 / high:.2f} to {1 / low:.2f})"


def choosing(gpus: tuple[str, ...]) -> str:
    """Markdown: a row for each GPU, a column for each recipe."""
    from finetune.gpus import named_gpu

    recipe, count = MANY
    names = [f"`{name}`" for name in RECIPES] + [f"`{recipe}`, {count} GPUs"]
    lines = [f"| GPU | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for gpu in gpus:
        about = named_gpu(gpu)
        cells = [cell(name, gpu, overrides=asked) for name, asked in RECIPES.items()]
        cells.append(cell(recipe, gpu, count))
        size = f"{about.memory_gib:.0f} GiB"
        lines.append(f"| {gpu}, {size} | {' | '.join(cells)} |")
        print(lines[-1], file=sys.stderr, flush=True)
    return "\n".join(lines)


def by_tokens(gpu: str) -> str:
    """Markdown: FP8 over BF16 by tokens of a micro-batch, without and with checkpointing as is."""
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
            cells.append(ranged(ask(f"{recipe}_fp8", gpu, 1, asked)))
        lines.append(f"| `{recipe}` | {' | '.join(cells)} |")
        print(lines[-1], file=sys.stderr, flush=True)
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--tokens", action="store_true", help="by tokens, on one GPU each")
    parser.add_argument("--gpus", default="", help=f"left out: {','.join(GPUS)}, or H100,4090")
    args = parser.parse_args()
    gpus = tuple(args.gpus.split(",")) if args.gpus else (("H100", "4090") if args.tokens else GPUS)
    print("\n\n".join(by_tokens(gpu) for gpu in gpus) if args.tokens else choosing(gpus))


if __name__ == "__main__":
    main()
