"""Does a policy in FP8 earn what one in BF16 earns? Reward curves of GRPO, and a verdict on them.

    python -m tests.benchmarks.grpo_reward [--seeds 0,1,2] [--steps 30] [--method full]

TRL's stock `GRPOTrainer` trains the packaged model on the packaged questions, with the helper
(`fp8`) and without it (`bf16`). The reward of an answer is the share of its words that begin with
one of the letters a to m, which a policy raises by other words. A seed draws the order of questions
and the answers, alike on both sides until the policies differ.

Judged are the mean reward of the last ten steps, that of answers to questions that were not trained
on, sampled in high precision after the end, and for the way there that of all steps: as `finetune
compare` judges losses, paired by seed, with two one-sided tests. The margin is 2 % of the reward:
32 answers a step are few, and sampling alone moves their mean by more than 1 %.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback
from trl import GRPOConfig, GRPOTrainer

from finetune import get_receipt
from finetune.analysis.compare.result import signed
from finetune.analysis.statistics import loss_gap, verdict_of
from finetune.config.paths import ASSETS, TINY_LLAMA
from tests.benchmarks.convergence import once
from tests.benchmarks.stock_trainers import METHODS, adapters
from tests.benchmarks.trainers import precision_of

MARGIN, CONFIDENCE = 0.02, 0.95
LAST = 10
"""Steps whose mean is the final reward."""
LENGTH = 24  # tokens of an answer
EVALUATED = 64  # questions that are not trained on
LEARNING_RATES = {"full": 1e-3, "LoRA": 7e-3, "frozen": 7e-3}


def first_half(completions: list[Any], **_: Any) -> list[float | None]:
    """Reward: the share of words of each answer that begin with one of the letters a to m."""
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    words = [re.findall("[a-z]+", text.lower()) for text in texts]
    return [sum(word[0] <= "m" for word in found) / max(len(found), 1) for found in words]


def questions() -> tuple[list[Any], list[Any]]:
    """Prompts to train on, and others."""
    lines = (ASSETS / "data" / "harbour.jsonl").read_text(encoding="utf-8").splitlines()
    prompts = [[json.loads(line)["messages"][0]] for line in lines]
    return prompts[:-EVALUATED], prompts[-EVALUATED:]


@torch.no_grad()
def evaluated(model: Any, tokenizer: Any, prompts: list[Any]) -> float:
    """Mean reward of eight sampled answers to each question, as evaluation computes."""
    model.eval()
    inputs = tokenizer.apply_chat_template(
        prompts, add_generation_prompt=True, return_tensors="pt", return_dict=True, padding=True
    )
    torch.manual_seed(0)
    with torch.autocast("cpu", torch.bfloat16):
        ids = model.generate(
            **inputs, max_new_tokens=LENGTH, do_sample=True, num_return_sequences=8
        )
    answers = tokenizer.batch_decode(
        ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True
    )
    return fmean(x or 0.0 for x in first_half(answers))


def train(settings: dict[str, Any]) -> dict[str, Any]:
    """One run: mean reward of each step, final rewards, FP8 share."""
    side, method, seed, steps = (settings[k] for k in ("side", "method", "seed", "steps"))
    tokenizer = AutoTokenizer.from_pretrained(TINY_LLAMA, padding_side="left")
    trained, others = questions()
    with (
        tempfile.TemporaryDirectory() as folder,
        precision_of("emulated" if side == "fp8" else "bf16", method),
    ):
        args = GRPOConfig(
            folder, max_steps=steps, per_device_train_batch_size=32, num_generations=8, beta=0.0,
            max_completion_length=LENGTH, learning_rate=LEARNING_RATES[method], logging_steps=1,
            lr_scheduler_type="constant", report_to="none", save_strategy="no", disable_tqdm=True,
            use_cpu=True, bf16=True, seed=seed,
        )  # fmt: skip
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(TINY_LLAMA, dtype=torch.float32),
            reward_funcs=first_half,
            args=args,
            train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in trained]),
            processing_class=tokenizer,
            peft_config=adapters(method),
        )
        trainer.remove_callback(PrinterCallback)
        before = evaluated(trainer.model, tokenizer, others)
        trainer.model.train()
        trainer.train()
        rewards = [row["reward"] for row in trainer.state.log_history if "reward" in row]
        result = {
            "settings": settings, "seed": seed, "rewards": rewards, "all": fmean(rewards),
            "last": fmean(rewards[-LAST:]), "before": before,
            "after": evaluated(trainer.model, tokenizer, others),
        }  # fmt: skip
        if side == "fp8":
            receipt = get_receipt()
            result["fp8"] = f"{receipt.status}, {receipt.fp8_flop_share:.1%}"
    return result


def verdict(name: str, fp8: list[float], bf16: list[float]) -> str:
    """Row of Markdown: both rewards, the gap with its interval, and what it says."""
    gap = loss_gap(fp8, bf16, margin=MARGIN, confidence=CONFIDENCE)
    cells = [name, *(", ".join(f"{x:.4f}" for x in side) for side in (fp8, bf16)), signed(gap.gap)]
    if gap.equivalence_interval is not None:
        low, high = gap.equivalence_interval
        found = verdict_of(gap.equivalence_interval, MARGIN)
        cells[-1] += f" ({signed(low)} to {signed(high)})"
        cells.append(found)
    else:
        cells.append("one seed has no spread to judge by")
    return f"| {' | '.join(cells)} |"


def plot(runs: dict[str, list[dict[str, Any]]], method: str, file: Path) -> None:
    """Reward by step: FP8 solid, BF16 dashed, a color for each seed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for side, results in runs.items():
        for result in results:
            axes.plot(
                range(1, len(result["rewards"]) + 1), result["rewards"],
                label=f"{side.upper()}, seed {result['seed']}", color=f"C{result['seed'] % 10}",
                linestyle="-" if side == "fp8" else "--", linewidth=1.3,
            )  # fmt: skip
    axes.set(xlabel="step", ylabel="reward: share of words from a to m", title=f"GRPO, {method}")
    axes.legend(ncols=len(runs))
    figure.savefig(file, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--method", choices=METHODS, default="full")
    parser.add_argument("--out", type=Path, default=Path("runs/grpo_reward"))
    args = parser.parse_args()
    seeds = [int(seed) for seed in args.seeds.split(",")]
    args.out.mkdir(parents=True, exist_ok=True)
    runs: dict[str, list[dict[str, Any]]] = {"fp8": [], "bf16": []}
    for seed in seeds:
        for side, results in runs.items():
            settings = {
                "side": side, "method": args.method, "seed": seed, "steps": args.steps,
                "learning_rate": LEARNING_RATES[args.method], "torch": torch.__version__,
            }  # fmt: skip
            found = once(args.out / f"{args.method}-{side}-{seed}.json", settings, train)
            results.append(found)
            print(
                f"{side}, seed {seed}: {found['rewards'][0]:.3f} -> {found['last']:.3f}, other "
                f"questions {found['before']:.3f} -> {found['after']:.3f} {found.get('fp8', '')}",
                flush=True,
            )
    rows = [
        verdict(name, *([r[key] for r in runs[side]] for side in ("fp8", "bf16")))
        for name, key in (
            (f"last {LAST} steps", "last"),
            ("other questions", "after"),
            ("all steps", "all"),
        )
    ]
    lines = [f"| reward, {args.method} | FP8 | BF16 | gap | verdict |", "|---|---|---|---|---|"]
    table = "\n".join([*lines, *rows])
    (args.out / f"{args.method}.md").write_text(table + "\n", encoding="utf-8")
    plot(runs, args.method, args.out / f"{args.method}.png")
    print(f"\n{table}\n\n{args.out / f'{args.method}.png'}")


if __name__ == "__main__":
    main()
