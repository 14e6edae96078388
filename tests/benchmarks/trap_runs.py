"""One user's script under three ways of asking for precision: upstream's FP8, ours, plain BF16.

    python -m tests.benchmarks.trap_runs --trap 2 --arm upstream --seed 42 --steps 150 --out a.json

The script is the same in all three: the packaged Llama and data, a stock `SFTTrainer`, `bf16=False`
where FP8 is asked. (For Transformer Engine with the loss of `transformers.Trainer`: TRL 1.16 fuses
head and loss, and stops in the first step at the empty bias of a head that Accelerate converted.)
What differs is what a user types around it:

    upstream    `accelerate launch --mixed_precision fp8 --fp8_backend AO` (or TE): here the
                environment variables which that sets
    ours        `setup_fp8_mixed_precision_training(...)` before the trainer
    bf16        SFTTrainer's own default

Each trap has the model that shows it: 2, full fine-tuning by torchao; 3, LoRA by Transformer
Engine; 5, full fine-tuning of a tied model by Transformer Engine. Transformer Engine is its own
Python over a double of its compiled library (`tests.te`; get its wheel by `python -m
tests.te.fetch`), upstream and ours alike, so that this runs on a CPU; torchao, Accelerate, PEFT,
TRL and Transformers are the installed ones, torchao with `emulate=True`, because `torch._scaled_mm`
is a scalar loop on many CPUs (14 minutes for three steps instead of 4 s). A run takes a process of
its own, since engines and Accelerate keep state in it.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from torch import Tensor, nn

ARMS = ("upstream", "ours", "bf16")
MIB = 2**20


@dataclass(frozen=True)
class Trap:
    """What the script trains, and with which engine.

    Attributes:
        engine: `torchao` or `te`.
        tied: the head shares its weight with the embeddings.
        rank: of adapters on every linear layer of the decoder; 0, full fine-tuning.
        learning_rate: that of the shipped recipes; higher for the tied model, whose head the
            packaged weights do not know.
    """

    title: str
    engine: str
    tied: bool = False
    rank: int = 0
    learning_rate: float = 5e-4


TRAPS = {
    2: Trap("trap 2: accelerate + torchao, full fine-tuning", "torchao"),
    3: Trap("trap 3: accelerate + TE, LoRA r=8", "te", rank=8, learning_rate=3e-3),
    5: Trap("trap 5: accelerate + TE, tied head", "te", tied=True, learning_rate=2e-3),
}


def ask(trap: Trap, arm: str, patch: Any) -> None:
    """Ask for the precision of an arm, before anything is built."""
    from finetune import setup_fp8_mixed_precision_training

    if arm == "upstream":
        patch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
        patch.setenv("ACCELERATE_FP8_BACKEND", "AO" if trap.engine == "torchao" else "TE")
        if trap.engine == "te":
            from tests import te
            from tests.te.loading import offer_to_accelerate

            te.install(patch, real=True)
            offer_to_accelerate(patch)
        else:  # Accelerate makes the settings when it is asked, and torchao multiplies by them
            import torchao.float8

            emulated = functools.partial(torchao.float8.Float8LinearConfig, emulate=True)
            patch.setattr(torchao.float8, "Float8LinearConfig", emulated)
    elif arm == "ours" and trap.engine == "te":
        import finetune.training.session
        from tests import te
        from tests.conftest import H100

        te.install(patch, real=True)
        patch.setattr(finetune.training.session, "this_device", lambda: H100)
        setup_fp8_mixed_precision_training("te", cpu=True)
    elif arm == "ours":
        setup_fp8_mixed_precision_training("torchao", emulation="allow", cpu=True)


def build(trap: Trap, arm: str, seed: int, steps: int, out: Path) -> Any:
    """The user's script up to `trainer.train()`."""
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer
    from trl import SFTConfig, SFTTrainer

    from finetune.config.paths import TINY_LLAMA
    from finetune.config.schema import DataConfig
    from finetune.data.dataset import load_data

    tokenizer = AutoTokenizer.from_pretrained(TINY_LLAMA)
    model = AutoModelForCausalLM.from_pretrained(TINY_LLAMA, dtype=torch.float32)
    if trap.tied:  # as models are that were trained so; the packaged one was not
        model.lm_head.weight = model.model.embed_tokens.weight
        model.config.tie_word_embeddings = True
    rows = load_data(DataConfig(name="builtin:harbour"), tokenizer, seed)
    args = SFTConfig(
        output_dir=str(out), bf16=arm == "bf16", use_cpu=True, seed=seed, max_steps=steps,
        learning_rate=trap.learning_rate, lr_scheduler_type="cosine", warmup_steps=5,
        per_device_train_batch_size=8, max_length=128, pad_to_multiple_of=16,
        gradient_checkpointing=False, logging_steps=1, save_strategy="no", report_to="none",
        disable_tqdm=True, **rows.settings,
    )  # fmt: skip
    lora = LoraConfig(r=trap.rank, lora_alpha=2 * trap.rank, target_modules="all-linear")

    class PlainLoss(SFTTrainer):
        """The model's own loss, in the place of TRL's."""

        compute_loss = Trainer.compute_loss

    return (PlainLoss if trap.engine == "te" else SFTTrainer)(
        model=model, args=args, train_dataset=rows.train, eval_dataset=rows.eval,
        processing_class=tokenizer, peft_config=lora if trap.rank else None,
    )  # fmt: skip


def watch(trainer: Any) -> dict[str, list[float]]:
    """Lists that fill up at each step: loss, gradient norms, MiB of gradients.

    `norm` is that of all gradients before clipping, `useful_norm` that of those which the
    optimizer uses; `left`, the factor by which clipping multiplies; `wasted_mib`, gradients that
    no optimizer uses.
    """
    from transformers import TrainerCallback

    names = ("loss", "norm", "useful_norm", "left", "useful_mib", "wasted_mib")
    seen: dict[str, list[float]] = {name: [] for name in names}

    class Watch(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, **_):
            owned = {id(p) for g in trainer.optimizer.param_groups for p in g["params"]}
            with_grad = [p for p in trainer.model.parameters() if p.grad is not None]
            useful = [p.grad for p in with_grad if id(p) in owned]
            wasted = [p.grad for p in with_grad if id(p) not in owned]
            self.after = norm_of(useful)  # clipped by now
            seen["useful_mib"].append(mib_of(useful))
            seen["wasted_mib"].append(mib_of(wasted))

        def on_log(self, args, state, control, logs=None, **_):
            if "loss" not in (logs or {}):
                return
            left = min(1.0, args.max_grad_norm / (logs["grad_norm"] + 1e-6))
            seen["loss"].append(logs["loss"])
            seen["norm"].append(logs["grad_norm"])
            seen["left"].append(left)
            seen["useful_norm"].append(self.after / left)

    trainer.add_callback(Watch())
    return seen


def norm_of(tensors: list[Tensor]) -> float:
    """Euclidean norm over all of them."""
    return sum(t.double().square().sum().item() for t in tensors) ** 0.5


def mib_of(tensors: list[Tensor]) -> float:
    """Memory that they take."""
    return sum(t.numel() * t.element_size() for t in tensors) / MIB


@torch.no_grad()
def held_out_loss(model: nn.Module, batches: list[dict[str, Tensor]]) -> float:
    """Mean over the trained-on tokens of eval rows, in evaluation mode under BF16 autocast."""
    model.eval()
    total = count = 0.0
    for batch in batches:
        labels = batch["labels"]
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(**{k: batch[k] for k in ("input_ids", "attention_mask")}).logits
        each = nn.functional.cross_entropy(
            logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten(), reduction="sum"
        )
        total += each.item()
        count += (labels[:, 1:] != -100).sum().item()
    return total / count


def reload(folder: Path, trap: Trap) -> Any:
    """What was saved, by a process that knows of no FP8: plain `from_pretrained`."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from finetune.config.paths import TINY_LLAMA

    if not trap.rank:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    base = AutoModelForCausalLM.from_pretrained(TINY_LLAMA, dtype=torch.float32)
    return PeftModel.from_pretrained(base, folder)


def count_trainable(model: nn.Module) -> int:
    """Elements of the parameters that want a gradient."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def run(number: int, arm: str, seed: int, steps: int, patch: Any) -> dict[str, Any]:
    """Train, save, load; losses and gradients of every step, held-out losses at the end.

    `reloaded` is the held-out loss of what was saved, as Transformers reads it, which takes a head
    that it finds in the file; `tied_as_config_says` that of the same files where a reader trusts
    `tie_word_embeddings` in config.json (as vLLM does); `not_saved`, the error in place of both.

    Args:
        patch: a `pytest.MonkeyPatch`, undone by the caller.
    """
    trap = TRAPS[number]
    ask(trap, arm, patch)
    with tempfile.TemporaryDirectory() as folder:
        trainer = build(trap, arm, seed, steps, Path(folder))
        before = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
        wanted = {n for n, p in trainer.model.named_parameters() if p.requires_grad}
        seen: dict[str, Any] = dict(watch(trainer))
        trainer.train()
        after = dict(trainer.model.named_parameters())
        seen["trainable"] = sum(before[n].numel() for n in wanted)
        seen["trainable_after"] = count_trainable(trainer.model)
        seen["moved"] = sum(
            p.numel() for n, p in after.items()
            if n in wanted and not torch.equal(p.detach(), before[n])
        )  # fmt: skip
        rows = list(trainer.get_eval_dataloader())
        seen["held_out"] = held_out_loss(trainer.model, rows)
        try:
            trainer.save_model(folder)
        except RuntimeError as error:  # torchao's weights have no storage that could be written
            return seen | {"not_saved": f"{type(error).__name__}: {error}"}
        patch.undo()  # what loads it knows of no engine
        loaded = reload(Path(folder), trap)
        seen["reloaded"] = held_out_loss(loaded, rows)
        if loaded.config.tie_word_embeddings:
            loaded.lm_head.weight = loaded.model.embed_tokens.weight
            seen["tied_as_config_says"] = held_out_loss(loaded, rows)
    return seen


def main() -> None:
    import pytest

    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--trap", type=int, choices=TRAPS, required=True)
    parser.add_argument("--arm", choices=ARMS, required=True)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        seen = run(args.trap, args.arm, args.seed, args.steps, patch)
    args.out.write_text(json.dumps(seen), encoding="utf-8")


if __name__ == "__main__":
    main()
