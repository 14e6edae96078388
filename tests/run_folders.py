"""Run folders and comparison folders made by hand, as a run and `compare` write them."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

from finetune import load_recipe
from finetune.config.yaml import dump_yaml, plain_data
from finetune.runs.checkpoints import MANIFEST, hashes_of

GROUPS = ("attn", "mlp", "embed", "head", "norm", "router", "experts", "adapter")
SAMPLES = [
    {"prompt": "What is the capital of France?", "answer": "Ahoy! It is Paris.\nFair winds."},
    {"prompt": "What should I do if I am lost?", "answer": "Stay calm and ask for help."},
]


def trained(recipe: Any, *, save: bool = True, **settings: Any) -> Any:
    """The report of a run, of whose memory nothing is predicted; settings of `begun`."""
    from finetune.training.run.run import begun

    with begun(recipe, **settings) as run:
        return run.train(save=save)


def make_run(
    folder: Path,
    *,
    recipe: str = "tiny_full_fp8",
    steps: int = 80,
    every: int = 1,
    seed: int = 42,
    offset: float = 0.0,
    groups: tuple[str, ...] = GROUPS[:3],
    samples: list[dict[str, str]] = SAMPLES,
) -> Path:
    """A finished run of `steps`, a row each `every`; losses are shifted by a share `offset`.

    Runs of one seed share their noise, as paired runs share their data.
    """
    noise, own = random.Random(seed), random.Random(f"{recipe} {seed}")
    fp8 = recipe.endswith("fp8")
    folder.mkdir(parents=True)
    overrides = [f"train.max_steps={steps}", f"train.seed={seed}"]
    chosen = load_recipe(recipe, overrides, check_train=False)
    config = chosen.config.model_dump(mode="json")
    config["train"] = plain_data(chosen.config.train)  # unchecked: no trl
    (folder / "config.yaml").write_text(dump_yaml(config), "utf-8")
    label = "FP8 emulated/delayed" if fp8 else "BF16"
    rows: list[dict[str, Any]] = []
    ticks = []
    for step in range(1, steps + 1):
        curve = 0.9 + 4 * math.exp(-9 * step / steps)
        loss = curve * (1 + 0.08 * noise.gauss(0, 1)) * (1 + offset + 0.001 * own.gauss(0, 1))
        seconds = 0.4 * (0.8 if fp8 else 1.0) * (1 + 0.1 * own.random())
        ticks.append({"step": step, "seconds": seconds, "tokens": 400 + noise.randrange(50)})
        if step % every == 0:
            row = {"step": step, "seconds": 0.4 * step, "loss": loss, "grad_norm": curve / 3}
            row |= {"learning_rate": 5e-4, "num_tokens": 420.0 * step, "epoch": step / 50}
            rows.append(row | {"tokens_per_s": round(420 / seconds)})
        if fp8 and step % max(5, steps // 200) == 0:
            rows.append({"step": step, "seconds": 0.4 * step} | _health(own, groups))
        if step % (steps // 4) == 0:
            held = curve * 0.95 * (1 + offset + 0.0005 * own.gauss(0, 1))
            rows.append({"step": step, "seconds": 0.4 * step, "eval_loss": held})
            said = [s | {"answer": f"{s['answer']} ({step})"} for s in samples]
            rows.append({"step": step, "seconds": 0.4 * step, "samples": said})
    scores = {"hellaswag": {"acc_norm": 0.31, "acc_norm_stderr": 0.012}}
    rows.append({"step": steps, "seconds": 0.4 * steps, "tasks": scores})
    _lines(folder / "metrics.jsonl", [row | {"precision": label} for row in rows])
    _lines(folder / "steps.jsonl", ticks)
    losses = [row["loss"] for row in rows if "loss" in row]
    report = {
        "folder": str(folder),
        "first_loss": losses[0],
        "final_loss": losses[-1],
        "eval_loss": [row["eval_loss"] for row in rows if "eval_loss" in row][-1],
        "tokens_per_s": 1312,
        "seconds": 0.4 * steps,
        "peak_memory_gib": 0.86,
        "samples": samples,
        "status": "proven",
        "proven": True,
    }
    (folder / "report.json").write_text(json.dumps(report), "utf-8")
    start = {"started": "2026-11-21T12:00:00", "command": ["finetune", recipe]}
    (folder / "run.json").write_text(json.dumps(start), "utf-8")
    (folder / "receipt.json").write_text(json.dumps(_receipt(recipe, fp8=fp8)), "utf-8")
    return folder


def _health(dice: random.Random, groups: tuple[str, ...]) -> dict[str, float]:
    row = {}
    for i, group in enumerate(groups):
        for operand, decibel in (("x", 31.5), ("w", 31.5), ("g", 25.5)):
            at = f"health/{group}/{operand}"
            row[f"{at}_amax"] = 10 ** (i - 3) * (1 + dice.random())
            row[f"{at}_overflow"] = 1e-5 * dice.random() if operand == "g" else 0.0
            row[f"{at}_underflow"] = 1e-3 * dice.random()
            row[f"{at}_snr_db"] = decibel + dice.gauss(0, 0.3) - i / 4
        row[f"health/{group}/grad_snr"] = 3 * dice.random() + 0.1
        row[f"health/{group}/update_ratio"] = 1e-3 * dice.random() + 1e-5
    return row


def _lines(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")


def _receipt(recipe: str, *, fp8: bool) -> dict[str, Any]:
    ran = "fp8" if fp8 else "bf16"
    layers = [
        {"name": f"model.layers.{i}.{part}_proj", "shape": [128, 128], "role": "base",
         "fprop": ran, "dgrad": ran, "wgrad": ran,
         "calls": {"fprop": 1, "dgrad": 1, "wgrad": 1}, "flops": 60_000_000,
         "reason": ""}
        for i in range(4) for part in ("q", "k", "v", "o")
    ]  # fmt: skip
    head = {"name": "lm_head", "shape": [512, 128], "role": "head", "fprop": "bf16",
            "dgrad": "fp32", "wgrad": "fp32", "calls": {}, "flops": 240_000_000,
            "reason": "output head: errors here hit the loss directly"}  # fmt: skip
    precision = {"asked": ran, "ran": ran, "fallback": "", "compile": "off", "reason": ""}
    precision["storage"] = {}
    if fp8:
        precision |= {"backend": "emulated", "scaling": "delayed", "format": "hybrid"}
        precision["reason"] = "emulation is allowed: exact FP8 rounding, no FP8 speed"
        precision["gemm"] = "emulated"
    return {
        "status": "proven",
        "precision": precision,
        "fp8_flop_share": 0.8 if fp8 else 0.0,
        "flop_share": {},
        "trainable": {"before": 1_377_408, "after": 1_377_408, "in_optimizer": 1_377_408,
                      "moved": 1_377_408, "below_resolution": 0,
                      "optimizer_state_bytes": 11_019_264},
        "movement": {"rounding": "nearest", "sample": 65_536, "early": {}, "now": {
            "steps": 50, "groups": [{"kind": "matrices", "type": "float32",
                                     "numbers": 1_377_408, "changed": 1_377_400}]}},
        "layers": [*layers, head],
        "environment": {"versions": {"torch": "2.13.0", "trl": "1.16.0"}, "processes": 1,
                        "seed": 42, "device": {"kind": "cpu", "name": "x86_64",
                                               "capability": None, "memory_gib": 23.5}},
        "memory": {"measured_gib": 0.088, "measured": "peak of live tensors in step 3",
                   "predicted_gib": 0.0875, "predicted": "by rehearsal"},
        "run": {"name": recipe, "folder": "", "interrupted": False, "stopped": ""},
    }  # fmt: skip


def make_comparison(
    folder: Path, *, steps: int = 80, gap: float = 0.002, differences: tuple[Any, ...] = ()
) -> Path:
    """A comparison of three seeds, in which A ends higher by the share `gap`."""
    seeds = [42, 43, 44]
    runs = []
    for seed in seeds:
        pair: dict[str, Any] = {"seed": seed}
        for side, recipe, offset in (("a", "tiny_full_fp8", gap), ("b", "tiny_full_bf16", 0.0)):
            pair[side] = f"{recipe}/seed-{seed}"
            make_run(folder / pair[side], recipe=recipe, steps=steps, seed=seed, offset=offset)
        runs.append(pair)
    verdict = "equivalent" if abs(gap) < 0.008 else "not equivalent"
    losses = {}
    for key, column in (("train", "final_loss"), ("eval", "eval_loss")):
        ends = {
            side: [
                json.loads((folder / pair[side] / "report.json").read_text())[column]
                for pair in runs
            ]
            for side in "ab"
        }
        losses[key] = ends | {
            "gap": gap,
            "interval": [gap - 0.003, gap + 0.003],
            "equivalence_interval": [gap - 0.002, gap + 0.002],
            "verdict": verdict,
        }
    found = {
        "kind": "comparison",
        "a": {"recipe": "tiny_full_fp8", "label": "FP8"},
        "b": {"recipe": "tiny_full_bf16", "label": "BF16"},
        "seeds": seeds,
        "runs": runs,
        "margin": 0.01,
        "confidence": 0.95,
        "differences": list(differences),
        "allowed": bool(differences),
        "notes": ["Both were run one after the other on this machine."],
        "losses": losses,
        "band": {"train": 0.012, "eval": 0.009},
        "speed": {"ratio": 1.23, "interval": [1.19, 1.27], "a_tokens_per_s": 1312,
                  "b_tokens_per_s": 1067, "a_steps_per_s": 3.12, "b_steps_per_s": 2.54},
        "memory": {"ratio": 0.98, "a_gib": 0.088, "b_gib": 0.09},
        "tasks": {"hellaswag": [{"metric": "acc_norm", "a": 0.31, "b": 0.312,
                                 "a_stderr": 0.012, "b_stderr": 0.012}]},
        "verdict": verdict,
        "reasons": ["both intervals lie inside the margin"],
    }  # fmt: skip
    (folder / "comparison.json").write_text(json.dumps(found), "utf-8")
    return folder


def sign(saved: Path) -> None:
    """Make the manifest of a checkpoint agree with its files as they are."""
    manifest = json.loads((saved / MANIFEST).read_text())
    names = list(manifest["files"])
    for name, value in zip(names, hashes_of([saved / name for name in names]), strict=True):
        manifest["files"][name] = {"bytes": (saved / name).stat().st_size, "sha256": value}
    (saved / MANIFEST).write_text(json.dumps(manifest))
