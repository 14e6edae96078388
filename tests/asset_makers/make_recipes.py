"""Make `recipes.json`: the facts of each shipped recipe that `finetune ls` shows.

Run as ``python -m tests.asset_makers.make_recipes [RECIPE ...]`` after a change of a recipe (that
one alone) or of the estimator (all: some minutes). `tests/cli` compares the facts of the file with
fresh ones, and a slow test what is predicted of one recipe.
"""

import json
import sys

from finetune import load_recipe
from finetune.cli.listing import ROWS, checksum, row_of
from finetune.config.paths import list_recipes
from finetune.config.schema import RunConfig
from finetune.config.train_section import decides_checkpointing, with_checkpointing
from finetune.estimator.predict import predict_fast
from finetune.estimator.search import GpuChoice, cheapest_gpu
from finetune.hardware.gpus import Gpu, gpu_table, machine_of
from finetune.units import GIB

GPUS = ("A100-80GB", "RTX 4090", "L40S", "RTX 5090", "H100", "H200", "B200")


def preview_gib(recipe: str) -> float:
    """Predicted peak on one H100, context included, as if it had room for any run."""
    config = _compiled(recipe)
    if decides_checkpointing(config):
        config = with_checkpointing(config, True)
    held = predict_fast(config, machine_of("H100")).footprint
    return round((held.allocated + held.outside) / GIB, 2)


def speeds(recipe: str, names: tuple[str, ...] = GPUS) -> dict[str, int]:
    """GPU -> predicted tokens/s of a recipe, where it fits on one.

    Tiny recipes run on CPUs, QLoRA has no FP8 twin: none at all.
    """
    if "tiny" in recipe or "qlora" in recipe:
        return {}
    fast = {name: round(choice.tokens_per_s) for name, choice in _fitting(recipe, names).items()}
    return dict(sorted(fast.items()))


def over_bf16(recipe: str, names: tuple[str, ...] = GPUS) -> dict[str, float]:
    """GPU -> predicted speed of FP8 over its compiled twin with the same checkpointing."""
    if "tiny" in recipe or not recipe.endswith("_fp8"):
        return {}
    found, twin = _fitting(recipe, names), _compiled(recipe.removesuffix("fp8") + "bf16")
    ratios, others = dict[str, float](), dict[bool, dict[str, GpuChoice]]()
    for name, choice in sorted(found.items()):
        saving = bool(choice.prediction.config.train["gradient_checkpointing"])
        if saving not in others:
            like = cheapest_gpu(with_checkpointing(twin, saving), gpus=_gpus(names)).choices
            others[saving] = {x.machine.gpu.name: x for x in like}
        if against := others[saving][name].tokens_per_s:
            ratios[name] = round(choice.tokens_per_s / against, 3)
    return ratios


def _fitting(recipe: str, names: tuple[str, ...]) -> dict[str, GpuChoice]:
    found = cheapest_gpu(_compiled(recipe), gpus=_gpus(names)).choices
    return {x.machine.gpu.name: x for x in found if x.tokens_per_s and x.fit != "does not fit"}


def _gpus(names: tuple[str, ...]) -> tuple[Gpu, ...]:
    return tuple(gpu for gpu in gpu_table() if gpu.name in names)


def _compiled(recipe: str) -> RunConfig:
    """A recipe's settings; BF16 is compiled, as FP8 is."""
    compiled = ["precision.compile=on"] if recipe.endswith("_bf16") else []
    return load_recipe(recipe, compiled).config


if __name__ == "__main__":
    for name in sys.argv[1:] or list_recipes():
        row = row_of(name) | {"preview_gib": preview_gib(name)}
        made = {"crc32": checksum(name), "row": row, "tokens_per_s": speeds(name)}
        if ratios := over_bf16(name):
            made["over_bf16"] = ratios
        print(name, row["preview_gib"], made["tokens_per_s"].get("H100"), flush=True)
        table = json.loads(ROWS.read_text()) | {name: made}  # each at once: some take minutes
        ordered = {known: table[known] for known in list_recipes() if known in table}
        ROWS.write_text(json.dumps(ordered, indent=1) + "\n")
