"""Predicted beside measured: the peak of live tensors of real training steps on this CPU.

    python -m tests.benchmarks.predicted_memory [--only NAME] [--json]

Each run is a whole `finetune.train` of a few steps, from 1.4 to about 300 million
parameters, whose receipt tells what its third step held (`training.health.memory_meter`). The
prediction is made from the configuration alone: the rehearsal on tensors without memory
(`finetune.estimator.trace.rehearsal`) and its footprint. Rows of the data are longer than
`max_length`, so that no batch is padded, as a prediction assumes. The goal is 2 % for each run.
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")

import json
import logging
import random
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from finetune import load_recipe
from finetune.api import train
from finetune.config.methods import method_of
from finetune.config.recipe import Recipe
from finetune.estimator.changes import longest
from finetune.estimator.memory.footprint import Footprint, tensor_footprint
from finetune.estimator.trace.rehearsal import rehearse
from finetune.hardware.device import this_device
from finetune.hardware.requirements import resolve

MIB = 2**20
GOAL = 0.02

Shape = dict[str, Any]
LLAMA: Shape = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "vocab_size": 1536,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def llama(hidden: int, layers: int, vocabulary: int = 1536, *, tied: bool = False) -> Shape:
    """A Llama's configuration with heads of 64."""
    return LLAMA | {
        "hidden_size": hidden,
        "intermediate_size": 11 * hidden // 4,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": max(1, hidden // 256),
        "vocab_size": vocabulary,
        "tie_word_embeddings": tied,
    }


SMALL, TIED = llama(256, 4), llama(256, 4, 8192, tied=True)
M100, M300 = llama(640, 12, 32000), llama(1024, 17, 32000)
FP8 = ("precision.compute=fp8", "precision.emulation=allow")
FULL = ("~lora", "~precision.frozen")


class Case(NamedTuple):
    """A run: a shipped recipe, changes to it, and another model shape if not its own."""

    name: str
    recipe: str
    changes: tuple[str, ...] = ()
    shape: Shape | None = None


def _fp8(scaling: str, backend: str = "emulated") -> tuple[str, ...]:
    return (*FP8, f"precision.scaling={scaling}", f"precision.backend={backend}")


CASES = (
    Case("tiny full fp32 compute", "tiny_full_bf16", ("precision.compute=fp32",)),
    Case("tiny full fp16, accumulation 4", "tiny_full_bf16",
         ("precision.compute=fp16", "train.gradient_accumulation_steps=4")),
    Case("tiny full bf16, adafactor", "tiny_full_bf16", ("train.optim=adafactor",), SMALL),
    Case("small full delayed, checkpointing", "tiny_full_bf16",
         (*_fp8("delayed"), "train.gradient_checkpointing=true"), SMALL),
    Case("small full tensorwise, tied", "tiny_full_bf16", _fp8("tensorwise"), TIED),
    Case("small full rowwise, torchao", "tiny_full_bf16", _fp8("rowwise", "torchao"), SMALL),
    Case("small full mxfp8, packing", "tiny_full_bf16",
         (*_fp8("mxfp8"), "train.packing=true"), SMALL),
    Case("small full blockwise, 8-bit AdamW", "tiny_full_bf16",
         (*_fp8("blockwise"), "train.optim=adamw_8bit"), SMALL),
    Case("small full bf16, torchao 8-bit AdamW", "tiny_full_bf16",
         ("train.optim=adamw_torch_8bit",), SMALL),
    Case("tiny LoRA 8, frozen FP8", "tiny_lora_fp8"),
    Case("tiny DoRA bf16", "tiny_lora_bf16", ("lora.use_dora=true",)),
    Case("tiny QLoRA nf4", "tiny_qlora_bf16"),
    Case("small LoRA 8, base in FP8, checkpointing", "tiny_lora_bf16",
         ("model.storage=fp8", "train.gradient_checkpointing=true"), SMALL),
    Case("BDH tiny full tensorwise", "bdh_tiny_full_fp8"),
    Case("GPT-2 124M full fp32", "gpt2_124m_full_bf16",
         ("precision.compute=fp32", "train.packing=false",
          "train.gradient_accumulation_steps=1")),
    Case("100M full bf16, tied, accumulation 2, checkpointing", "tiny_full_bf16",
         ("train.gradient_accumulation_steps=2", "train.gradient_checkpointing=true"),
         M100 | {"tie_word_embeddings": True}),
    Case("100M full tensorwise", "tiny_full_bf16", _fp8("tensorwise"), M100),
    Case("100M LoRA 32, frozen FP8 tensorwise, checkpointing", "tiny_lora_fp8",
         ("lora.r=32", "precision.scaling=tensorwise", "train.gradient_checkpointing=true"), M100),
    Case("300M LoRA 32 bf16", "tiny_lora_bf16", ("lora.r=32", "model.dtype=bfloat16"), M300),
    Case("300M full bf16 weights, 8-bit AdamW", "tiny_full_bf16",
         ("model.dtype=bfloat16", "train.optim=adamw_8bit"), M300),
    *(Case(f"{method} tiny {of}", recipe, (f"train.method={method}", "~train.pad_to_multiple_of"))
      for method in ("dpo", "kto")
      for of, recipe in (("full fp8", "tiny_full_fp8"), ("LoRA 8, frozen FP8", "tiny_lora_fp8"))),
    Case("grpo tiny full fp8", "tiny_grpo_fp8",
         ("train.num_generations=2", "train.entropy_coef=0.01")),
    Case("grpo tiny LoRA 8, reference, long generation", "tiny_grpo_bf16",
         ("lora.r=8", "train.beta=0.1", "train.gradient_accumulation_steps=32",
          "train.entropy_coef=0.01", "train.per_device_train_batch_size=1")),
    Case("rloo tiny full bf16, accumulation 4", "tiny_rloo_bf16",
         ("train.gradient_accumulation_steps=4",)),
    Case("distill tiny full fp8, accumulation 2", "tiny_distill_fp8",
         ("train.gradient_accumulation_steps=2",)),
)  # fmt: skip
"""Twenty of SFT, from tiny to large, methods with a reference, and those that write their rows."""

ROWS: dict[str, Callable[[str], dict[str, Any]]] = {
    "answers": lambda text: {"text": text},
    "preference": lambda text: {"prompt": "Write.", "chosen": text, "rejected": text[::-1]},
    "unpaired": lambda text: {"prompt": "Write.", "completion": text, "label": text > "n"},
    "prompts": lambda text: {"prompt": text[:40], "answer": "7"},
}
"""Form of rows -> a row of more tokens than a batch may have."""

COMMON = (
    "~data.name",
    "train.max_steps=3",
    "train.per_device_train_batch_size=2",
    "train.lr_scheduler_type=constant",
    "train.warmup_steps=0",
    "train.eval_strategy=no",
    "train.save_strategy=no",
    "train.logging_steps=100",
    "eval.samples=false",
)


class Row(NamedTuple):
    """A case's result; GiB."""

    name: str
    parameters: int
    predicted: float
    measured: float
    what: str
    seconds: float

    @property
    def error(self) -> float:
        """Of the prediction, relative: above 0 where it is too high."""
        return self.predicted / self.measured - 1


def recipe_of(case: Case, folder: Path) -> Recipe:
    """The case's recipe, over data of full rows; its model's shape is written to `folder`."""
    data = folder / "rows.jsonl"
    named = [x for x in case.changes if x.startswith(("train.method=", "~train.pad"))]
    config = load_recipe(case.recipe, named).config
    rows = (ROWS[method_of(config.train).rows[0]](text) for text in _texts())
    data.write_text("\n".join(map(json.dumps, rows)))
    changes = [*COMMON, f"data.path={data}", f"train.{longest(config)[0]}=64"]
    if case.shape is not None:
        model = folder / case.name.replace(" ", "_").replace(",", "")
        model.mkdir(exist_ok=True)
        (model / "config.json").write_text(json.dumps(case.shape))
        changes += [f"model.name={model}", "model.weights=random"]
    return load_recipe(case.recipe, [*changes, *case.changes])


def _texts() -> list[str]:
    """Texts of more tokens than any row may have."""
    letters = random.Random(0)
    word = "abcdefghijklmnopqrstuvwxyz"
    return [" ".join("".join(letters.sample(word, 6)) for _ in range(80)) for _ in range(64)]


def predict(recipe: Recipe) -> tuple[Footprint, int]:
    """Peaks of a step of the recipe on this machine, and the model's parameters."""
    device = this_device()
    resolution = resolve(recipe.config.precision, device)
    found = rehearse(recipe.config, device, resolution, padded=False)  # every row is cut to length
    return tensor_footprint(found.trace), found.parameters


def measure(recipe: Recipe, folder: Path) -> dict[str, Any]:
    """`Receipt.memory` of a run; what it says afterwards is left out."""
    return train(recipe, out=folder / "runs", console=Console(quiet=True)).receipt.memory


def run(case: Case, folder: Path) -> Row:
    """Predict, then measure; prompts are of any length, and predicted as they were."""
    started, recipe = time.perf_counter(), recipe_of(case, folder)
    expected, parameters = predict(recipe)
    memory = measure(recipe, folder)
    assert memory["measured_gib"] is not None, memory["measured"]
    writes = method_of(recipe.config.train).writes
    return Row(
        case.name,
        parameters,
        memory["predicted_gib"] if writes else expected.tensors / 2**30,
        memory["measured_gib"],
        memory["measured"],
        time.perf_counter() - started,
    )


def table(rows: list[Row]) -> str:
    """Markdown: MiB."""
    lines = [
        "| run | parameters | predicted MiB | measured MiB | error |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {row.name} | {row.parameters / 1e6:.1f}M | {row.predicted * 1024:.2f} | "
        f"{row.measured * 1024:.2f} | {row.error:+.2%} |"
        for row in rows
    ]
    worst = max(abs(row.error) for row in rows)
    done = sum(abs(row.error) <= GOAL for row in rows)
    return "\n".join([*lines, "", f"within 2 %: {done} of {len(rows)}; worst {worst:.2%}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--only", default="", help="part of a run's name")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    rows = []
    for case in CASES:
        if args.only.lower() in case.name.lower():
            with tempfile.TemporaryDirectory() as folder:
                rows.append(run(case, Path(folder)))
            if not args.json:
                print(
                    f"{rows[-1].name}: {rows[-1].error:+.3%}, {rows[-1].seconds:.0f} s", flush=True
                )
    print(json.dumps([r._asdict() for r in rows], indent=1) if args.json else table(rows))


if __name__ == "__main__":
    main()
