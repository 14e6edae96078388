"""Does an FP8 base cost LoRA anything? The same adapters over a BF16 and an FP8 base, by loss.

    python -m tests.benchmarks.lora_loss [--ranks 8,32] [--seeds 0,1,2] [--steps 500]
    python -m tests.benchmarks.lora_loss --recipes [--seeds 42,43,44]

*Recipes.* The shipped pair `tiny_lora_fp8` and `tiny_lora_bf16` at each rank (alpha is twice the
rank), for 150 steps on the packaged rows, three epochs. The eval rows change with the seed, so
a pair is compared at equal seed.

*Text*, without `--recipes`. The packaged Llama, pretrained on something else, learns the sources of
the Python standard library: a new domain, in which 500 steps see nothing twice. Adapters on every
linear layer of the decoder. A seed draws the initial adapters and the order of batches, both alike
for all bases; eval rows are the same in all runs. The *noise band* is the mean of the BF16 runs
plus or minus the largest difference between two of them, as in `tests.benchmarks.convergence`.

Held-out losses are in evaluation mode: BF16 matmuls on the base that was trained over, which for
FP8 means its dequantized codes. `over BF16` is the loss of the same adapter over the original
weights, as it would be merged and deployed.
"""

from __future__ import annotations

import argparse
import functools
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from finetune.config.paths import TINY_LLAMA
from finetune.config.schema import PrecisionConfig
from finetune.precision.convert import apply, revert
from finetune.precision.planner import plan
from tests.benchmarks import convergence
from tests.benchmarks.convergence import BETWEEN_FILES, once, read_text, rows_of, share
from tests.benchmarks.convergence_report import band_of, smoothed, verdict

FP8 = {"compute": "fp8", "backend": "emulated", "emulation": "allow", "frozen": "fp8"}
BASES: dict[str, dict[str, Any]] = {
    "bf16": {"compute": "bf16"},
    "fp8": FP8 | {"scaling": "rowwise"},
    "fp8-head": FP8 | {"scaling": "rowwise", "map": {"output": "fp8"}},
    "fp8-tensor": FP8 | {"scaling": "tensorwise"},
}
"""Name -> `PrecisionConfig`."""

BATCH = 8
LEARNING_RATE = 3e-3  # of the shipped recipe
BYTES = 3_000_000  # of training text; 500 steps see a third of its tokens
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@functools.cache
def tokens() -> tuple[Tensor, Tensor]:
    """Training and held-out tokens of the packaged tokenizer, int64 [T]."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(TINY_LLAMA)
    found = []
    for part in read_text()[:2]:
        files = part[:BYTES].tolist()
        text = bytes(b for b in files if b != BETWEEN_FILES).decode(errors="replace")
        found.append(torch.tensor(tokenizer(text, verbose=False)["input_ids"]))
    return found[0], found[1]


def make_model(rank: int, seed: int) -> Any:
    """The packaged Llama under adapters with the initial weights of a seed, in float32."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(TINY_LLAMA, dtype=torch.float32)
    torch.manual_seed(seed)
    lora = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=TARGETS, task_type="CAUSAL_LM")
    return get_peft_model(base, lora)


def settings_of(rank: int, base: str, seed: int, steps: int) -> dict[str, Any]:
    """All that a run's result depends on."""
    code = convergence.code_of("llama", "rowwise")
    return {
        "model": f"LoRA rank {rank}", "rank": rank, "recipe": base, "seed": seed, "steps": steps,
        "batch": BATCH, "length": convergence.LENGTH, "learning_rate": LEARNING_RATE,
        "held_out_rows": convergence.HELD_OUT_ROWS, "precision": BASES[base],
        "text": read_text()[2], "bytes": BYTES, "torch": torch.__version__, "code": code,
    }  # fmt: skip


def held_out_loss(model: Any) -> float:
    """Over fixed rows, in evaluation mode."""
    rows = rows_of(tokens()[1], convergence.HELD_OUT_ROWS, seed=0).split(16)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        losses = [model.eval()(input_ids=x, labels=x, use_cache=False).loss for x in rows]
    return torch.stack(losses).mean().item()


def train(settings: dict[str, Any]) -> dict[str, Any]:
    """One run: losses of all steps, and the held-out losses of the adapter at its end."""
    rank, seed, steps = settings["rank"], settings["seed"], settings["steps"]
    model = make_model(rank, seed).train()
    precision = PrecisionConfig(**settings["precision"])
    apply(model, plan(model, precision))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=settings["learning_rate"], fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: share(step, steps))
    result: dict[str, Any] = {"settings": settings, "losses": [], "before": held_out_loss(model)}
    model.train()
    started = time.perf_counter()
    for step in range(steps):
        ids = rows_of(tokens()[0], settings["batch"], seed=seed * 1_000_000 + step)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        result["losses"].append(loss.item())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if (step + 1) % 100 == 0:
            pace = (time.perf_counter() - started) / (step + 1)
            print(f"  step {step + 1}/{steps}  {loss.item():.4f}  {pace:.2f} s", flush=True)
    result["step_s"] = (time.perf_counter() - started) / steps
    result["held_out"] = held_out_loss(model)
    adapter = {n: p for n, p in revert(model).named_parameters() if p.requires_grad}
    plain = make_model(rank, seed)
    plain.load_state_dict(adapter, strict=False)
    result["over_bf16"] = held_out_loss(plain)
    return result


# ------------------------------------------------------------------------------------------ tables


def table_of(results: list[dict[str, Any]]) -> str:
    """Markdown for the runs of one rank, BF16 among them."""
    bf16 = {r["settings"]["seed"]: r["held_out"] for r in results if is_bf16(r)}
    mean, width = band_of(list(bf16.values()))
    settings = results[0]["settings"]
    lines = [
        f"{settings['model']}, {settings['steps']} steps of {settings['batch']} x "
        f"{settings['length']} tokens. Held-out loss before: "
        f"{results[0]['before']:.4f} (BF16 base); noise band of {len(bf16)} BF16 seeds after: "
        f"{mean:.4f} ± {width:.4f} (± {width / mean:.2%})",
        "",
        "| base | seed | held-out loss | to BF16 of the same seed | to the mean | noise band "
        "| over BF16 |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in results:
        base, seed, loss = r["settings"]["recipe"], r["settings"]["seed"], r["held_out"]
        cells = [
            base, str(seed), f"{loss:.4f}", f"{loss / bf16[seed] - 1:+.2%}",
            f"{loss / mean - 1:+.2%}", verdict(loss, mean, width), f"{r['over_bf16']:.4f}",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def is_bf16(result: dict[str, Any]) -> bool:
    """Whether its base is BF16."""
    return result["settings"]["recipe"] == "bf16"


def plot(by_rank: list[list[dict[str, Any]]], file: Path) -> None:
    """A column for each rank: training losses, and below them the gap to BF16 of the same seed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6 * len(by_rank), 7), layout="constrained")
    axes = figure.subplots(2, len(by_rank), sharex=True, sharey="row", squeeze=False)
    for (losses, gaps), results in zip(axes.T, by_rank, strict=True):
        bf16 = {r["settings"]["seed"]: smoothed(r["losses"]) for r in results if is_bf16(r)}
        for r in results:
            base, seed = r["settings"]["recipe"], r["settings"]["seed"]
            line, name = smoothed(r["losses"]), f"{base}, seed {seed}"
            look: dict[str, Any] = {"color": f"C{seed % 10}", "linewidth": 1.2}
            losses.plot(line, label=name, linestyle="--" if is_bf16(r) else "-", **look)
            if not is_bf16(r):
                gap = [100 * (a / b - 1) for a, b in zip(line, bf16[seed], strict=True)]
                gaps.plot(gap, label=name, **look)
        losses.set_title(results[0]["settings"]["model"])
        losses.legend()
        gaps.axhline(0, color="#000000", linewidth=0.8)
        gaps.set_xlabel("step")
    axes[0, 0].set(ylabel="training loss, mean of 25 steps", yscale="log")
    axes[1, 0].set_ylabel("FP8 base: gap to BF16 of the same seed, %")
    figure.savefig(file, dpi=100)


def run_text(ranks: list[int], bases: list[str], seeds: list[int], steps: int, out: Path) -> None:
    """Every base and seed at every rank; tables and a plot into `out`."""
    by_rank, tables = [], []
    for rank in ranks:
        results = []
        for base in bases:
            for seed in seeds:
                settings = settings_of(rank, base, seed, steps)
                results.append(once(out / f"rank{rank}-{base}-seed{seed}.json", settings, train))
        by_rank.append(results)
        tables.append(table_of(results))
        (out / "lora_loss.md").write_text("\n\n".join(tables) + "\n", encoding="utf-8")
        plot(by_rank, out / "lora_loss.png")
    print("\n" + "\n\n".join(tables) + f"\n\n{out / 'lora_loss.png'}")


def run_recipes(ranks: list[int], seeds: list[int]) -> None:
    """The shipped pair at every rank and seed; prints a table."""
    from rich.console import Console

    from finetune.config.recipe import load_recipe
    from finetune.training.trainer import train as train_recipe

    lines = ["| rank | seed | FP8 base | BF16 base | gap |", "|---|---|---|---|---|"]
    for rank in ranks:
        for seed in seeds:
            losses = {}
            for base in ("fp8", "bf16"):
                asked = [f"lora.r={rank}", f"lora.alpha={2 * rank}", f"train.seed={seed}"]
                asked += ["train.max_steps=150", "train.eval_steps=50", "data.eval_fraction=0.05"]
                with tempfile.TemporaryDirectory() as folder:
                    recipe = load_recipe(f"tiny_lora_{base}", asked)
                    report = train_recipe(recipe, out=Path(folder), console=Console(quiet=True))
                losses[base] = report.eval_loss
            gap = losses["fp8"] / losses["bf16"] - 1
            row = f"| {rank} | {seed} | {losses['fp8']:.4f} | {losses['bf16']:.4f} | {gap:+.2%} |"
            print(row, flush=True)
            lines.append(row)
    print("\n" + "\n".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--recipes", action="store_true", help="the shipped pair, not the text")
    parser.add_argument("--ranks", default="8,32")
    parser.add_argument("--seeds", default="", help="0,1,2; of the recipes 42,43,44")
    parser.add_argument("--bases", default="bf16,fp8", help=f"of {', '.join(BASES)}")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--out", type=Path, default=Path("runs/lora_loss"))
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    ranks = [int(rank) for rank in args.ranks.split(",")]
    usual = "42,43,44" if args.recipes else "0,1,2"
    seeds = [int(seed) for seed in (args.seeds or usual).split(",")]
    bases = args.bases.split(",")
    if unknown := [name for name in bases if name not in BASES]:
        parser.error(f"no base {unknown[0]!r}; there are {', '.join(BASES)}")
    if "bf16" not in bases:
        parser.error("BF16 is what the others are measured against: put bf16 into --bases")
    if args.recipes:
        return run_recipes(ranks, seeds)
    args.out.mkdir(parents=True, exist_ok=True)
    return run_text(ranks, bases, seeds, args.steps, args.out)


if __name__ == "__main__":
    main()
