"""Does a precision recipe hurt training? Real text, the same seed, every recipe, one table.

    python -m tests.benchmarks.convergence [--model llama|bdh] [--steps 500] [--recipes bf16,mxfp8]
                                           [--seeds 0,1] [--out runs/convergence] [--threads 1]

*Text.* The sources of the Python standard library, on every machine: bytes as tokens, files in the
order of their names, every 20th held out. A run sees each batch once; the fingerprint of the text
is part of a run's settings, since another Python has other sources.

*Models.* `llama`: 5.2M parameters. `bdh`: the packaged `bdh_tiny` shape. Both with a vocabulary of
bytes. Weights and optimizer are in float32; recipes differ in the matmuls alone, under BF16
autocast (`fp32` without it).

*Noise band.* Two runs whose only difference is the seed do not end at the same loss. BF16 is run
from each of `--seeds`, which draws other initial weights; batches are the same and in the same
order in all runs. The band is the mean of the BF16 losses plus or minus the largest difference
between two of them. A recipe, always from the first seed, is *outside* when its loss is further
from that mean than two BF16 runs are from each other. Two seeds say how large noise is, not how it
is distributed: a band from more seeds is worth more.

*Losses.* Training loss: mean of the last 50 steps, forward in the recipe's precision. Held-out
loss: 128 fixed rows of held-out files, in evaluation mode, which is high precision for every recipe
(BF16 autocast; `fp32`: float32). So it judges the weights that were learnt, not the rounding of one
more forward. The verdict is by the held-out loss.

Each finished run is a JSON file; a sweep that was interrupted goes on where it stopped, and a run
of other settings, text or FP8 code is done again. The table and the plot lie beside them.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import json
import math
import os
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

import finetune
from finetune.config.schema import ModelConfig, PrecisionConfig
from finetune.precision.convert import apply
from finetune.precision.planner import plan
from finetune.storage.pretrained import load_shape
from tests.benchmarks.convergence_report import plot, table_of

RECIPES: dict[str, dict[str, Any]] = {
    "bf16": {"compute": "bf16"},
    "fp32": {"compute": "fp32"},
    "delayed": {"scaling": "delayed", "amax_history_len": 16},
    "tensorwise": {"scaling": "tensorwise"},
    "tensorwise-e5m2": {"scaling": "tensorwise", "format": "e5m2"},
    "rowwise": {"scaling": "rowwise"},
    "rowwise_with_gw_hp": {"scaling": "rowwise_with_gw_hp"},
    "blockwise": {"scaling": "blockwise"},
    "mxfp8": {"scaling": "mxfp8"},
    "nvfp4": {"scaling": "nvfp4"},
    "nvfp4-plain": {"scaling": "nvfp4", "hadamard": False, "stochastic_rounding": False},
}
"""Name -> `PrecisionConfig`, where it says no `compute` on the emulated FP8 backend."""

VOCABULARY = 272  # 256 bytes and the mark between files, filled up to a multiple of 16
BETWEEN_FILES = 256
LENGTH = 128
BATCH = {"llama": 6, "bdh": 8}  # rows a step: about 0.25 s in BF16 on one core
LEARNING_RATE = {"llama": 1e-3, "bdh": 2e-3}
WARMUP = 30
HELD_OUT_ROWS = 128
LEFT_OUT = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "encodings",
    "pydoc_data",
    "idlelib",
}


# ------------------------------------------------------------------------------- text and models


@functools.cache
def read_text() -> tuple[Tensor, Tensor, str]:
    """Training and held-out tokens, int16 [bytes], and the fingerprint of both."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in LEFT_OUT]
        # _sysconfigdata describes the machine that Python was built on.
        files += [
            Path(folder, n) for n in names if n.endswith(".py") and not n.startswith("_sysconfig")
        ]
    digest, parts = hashlib.sha256(), ([], [])
    for index, file in enumerate(sorted(files, key=lambda f: f.relative_to(root).as_posix())):
        text = file.read_bytes()
        digest.update(text)
        tokens = torch.frombuffer(bytearray(text + b"\0"), dtype=torch.uint8).to(torch.int16)
        tokens[-1] = BETWEEN_FILES
        parts[index % 20 == 19].append(tokens)
    train, held_out = (torch.cat(part) for part in parts)
    return train, held_out, digest.hexdigest()[:16]


def rows_of(tokens: Tensor, rows: int, seed: int) -> Tensor:
    """int64 [rows, LENGTH] at random places, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(tokens) - LENGTH, (rows, 1), generator=generator)
    return tokens[starts + torch.arange(LENGTH)].long()


def make_model(name: str, seed: int) -> PreTrainedModel:
    """A model in float32 with the initial weights of a seed."""
    if name == "bdh":
        shape = load_shape(ModelConfig(name="builtin:bdh_tiny", weights="random"))
        shape.vocab_size = VOCABULARY
    else:
        shape = LlamaConfig(
            hidden_size=256, intermediate_size=768, num_hidden_layers=6, num_attention_heads=4,
            num_key_value_heads=4, vocab_size=VOCABULARY, max_position_embeddings=LENGTH,
        )  # fmt: skip
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(shape, dtype=torch.float32)


def precision_of(recipe: str) -> PrecisionConfig:
    """The recipe's precision section."""
    emulated = {"compute": "fp8", "backend": "emulated", "emulation": "allow"}
    return PrecisionConfig(**(emulated | RECIPES[recipe]))


def code_of(model: str, recipe: str) -> str:
    """Fingerprint of our sources that a run depends on; none for Llama in BF16."""
    package = Path(finetune.__file__).parent
    files = [package / "storage/bdh.py"] if model == "bdh" else []
    if precision_of(recipe).compute == "fp8":
        files += sorted((package / "precision").rglob("*.py"))
    sources = b"".join(file.read_bytes() for file in files)
    return hashlib.sha256(sources).hexdigest()[:16]


# ------------------------------------------------------------------------------------------- a run


def settings_of(model: str, recipe: str, seed: int, steps: int) -> dict[str, Any]:
    """All that a run's result depends on."""
    return {
        "model": model, "recipe": recipe, "seed": seed, "steps": steps, "length": LENGTH,
        "batch": BATCH[model], "learning_rate": LEARNING_RATE[model], "warmup": WARMUP,
        "held_out_rows": HELD_OUT_ROWS,
        "precision": RECIPES[recipe], "text": read_text()[2],
        "torch": torch.__version__, "code": code_of(model, recipe),
    }  # fmt: skip


def train(settings: dict[str, Any]) -> dict[str, Any]:
    """One run: losses of all steps, and the held-out loss of the weights at its end.

    A loss that is not finite ends the run at that step, without a held-out loss.
    """
    name, recipe, steps = settings["model"], settings["recipe"], settings["steps"]
    precision = precision_of(recipe)
    tokens, held_out, _ = read_text()
    model = make_model(name, settings["seed"]).train()
    result: dict[str, Any] = {"settings": settings, "losses": [], "held_out": None}
    if precision.compute == "fp8":
        conversion = apply(model, plan(model, precision))
        assert conversion.backend is not None, "a plan without FP8 layers is a PlanError"
        result["effective"] = conversion.backend.effective()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings["learning_rate"], betas=(0.9, 0.95), weight_decay=0.1,
        fused=True,
    )  # fmt: skip
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: share(step, steps))
    autocast = functools.partial(
        torch.autocast, "cpu", dtype=torch.bfloat16, enabled=precision.compute != "fp32"
    )
    started = time.perf_counter()
    for step in range(steps):
        ids = rows_of(tokens, settings["batch"], seed=step)
        with autocast():
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        if not loss.isfinite():
            break
        result["losses"].append(loss.item())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if (step + 1) % 50 == 0:
            pace = (time.perf_counter() - started) / (step + 1)
            print(
                f"  step {step + 1}/{steps}  loss {loss.item():.4f}  {pace:.2f} s a step",
                flush=True,
            )
    result["step_s"] = (time.perf_counter() - started) / (len(result["losses"]) or 1)
    if len(result["losses"]) == steps:
        with torch.no_grad(), autocast():
            rows = rows_of(held_out, HELD_OUT_ROWS, seed=0).split(16)
            losses = [model.eval()(input_ids=x, labels=x, use_cache=False).loss for x in rows]
        result["held_out"] = torch.stack(losses).mean().item()
    return result


def share(step: int, steps: int) -> float:
    """Of the peak learning rate: linear warm-up, then a cosine to a tenth."""
    warmup = min(WARMUP, steps // 2)
    if step < warmup:
        return (step + 1) / warmup
    return 0.55 + 0.45 * math.cos(math.pi * (step - warmup) / max(1, steps - warmup))


def finished(file: Path, settings: dict[str, Any]) -> dict[str, Any] | None:
    """The result stored in `file`, if it is one of these settings."""
    with contextlib.suppress(FileNotFoundError):
        result = json.loads(file.read_text(encoding="utf-8"))
        return result if result["settings"] == settings else None
    return None


def run(model: str, recipe: str, seed: int, steps: int, out: Path) -> dict[str, Any]:
    """The result of a run, from its file when it was finished before."""
    settings = settings_of(model, recipe, seed, steps)
    return once(out / f"{model}-{recipe}-seed{seed}.json", settings, train)


def once(
    file: Path, settings: dict[str, Any], train: Callable[[dict[str, Any]], dict[str, Any]]
) -> dict[str, Any]:
    """What `train(settings)` returns, from its file when that was done before."""
    if (result := finished(file, settings)) is not None:
        print(f"{file.stem}: finished before")
        return result
    print(f"{file.stem}:", flush=True)
    result = train(settings)
    unfinished = file.with_suffix(".part")
    unfinished.write_text(json.dumps(result), encoding="utf-8")
    unfinished.replace(file)
    return result


def main() -> None:
    usual = [name for name in RECIPES if name != "nvfp4-plain"]
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--model", choices=sorted(BATCH), default="llama")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--recipes", default=",".join(usual))
    parser.add_argument("--seeds", default="0,1", help="of the BF16 runs; others take the first")
    parser.add_argument("--out", type=Path, default=Path("runs/convergence"))
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    recipes, seeds = args.recipes.split(","), [int(seed) for seed in args.seeds.split(",")]
    unknown = [name for name in recipes if name not in RECIPES]
    if unknown:
        parser.error(f"no recipe {unknown[0]!r}; there are {', '.join(RECIPES)}")
    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    # BF16 is what all others are measured against, so it is always there.
    runs = [("bf16", seed) for seed in seeds]
    runs += [(name, seeds[0]) for name in recipes if name != "bf16"]
    results = []
    for recipe, seed in runs:
        results.append(run(args.model, recipe, seed, args.steps, args.out))
        table = table_of(results)
        (args.out / f"{args.model}.md").write_text(table + "\n", encoding="utf-8")
        plot(results, args.out / f"{args.model}.png")
    print(f"\n{table}\n\n{args.out / args.model}.png")


if __name__ == "__main__":
    main()
