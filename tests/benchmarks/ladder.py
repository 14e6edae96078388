"""Two ladders: from what libraries do by themselves to what finetune does, a step at a time.

    python -m tests.benchmarks.ladder lora tiny_lora_fp8 lora.r=16 --grid "batch=1 length=64"
    python -m tests.benchmarks.ladder full llama_8b_full_fp8 --only stock --only "BF16, compiled"

prints a benchmark (`python -m finetune benchmark`) whose rows are the steps of a ladder. Each step
is the recipe that was requested, its model, adapters, optimizer and batch, trained in another way.
`stock` is TRL and PEFT in BF16, `shipped` is accelerate's own FP8; the others are precisions of
finetune. Layers run eagerly unless a step's name says `compiled`: each under `torch.compile`, which
fuses casts. Liger's kernels take part in finetune's steps wherever they can, and the row says where
they could not.

LoRA: what a frozen base costs, from accelerate's conversion, which multiplies three times and
converts adapters of some ranks, to a base stored in FP8 alone with FP8 forward and input gradient
(scales folded into it). Full: what each fusion and each scaling of FP8 brings over stock BF16.
Steps that cannot be taken here, or at all, are rows that say why: nothing is filled in.

*Shipped* is `trl.SFTTrainer` with accelerate's own FP8: `Accelerator(mixed_precision="fp8")` with
torchao. TRL has no argument for it (its `bf16` default overrides what is asked of accelerate,
FP8_FINDINGS.md), so the trainer's arguments for the accelerator are overridden, which is the
shortest way that is open. Nothing proves such a run. What can be seen from outside is whether the
weights that shall train have moved when it is over, and that is what its row says: accelerate wraps
the weights of converted layers in new parameters when the optimizer has the old ones, so that they
never train.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import importlib.util
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast
from unittest.mock import patch

from rich.console import Console
from torch import nn
from transformers import TrainerCallback, set_seed
from trl import SFTTrainer

from finetune import load_recipe
from finetune.analysis.benchmark.benchmark import ROUNDS, STEPS, Measuring, Say
from finetune.analysis.benchmark.grid import points_of
from finetune.analysis.benchmark.result import Benchmark, Row
from finetune.analysis.experiment.fairness import settle_checkpointing
from finetune.analysis.experiment.jobs import LabeledRecipe
from finetune.config.schema import RunConfig
from finetune.config.sft import sft_config
from finetune.data.dataset import load_data
from finetune.errors import ConfigError, FinetuneError, install_hint
from finetune.hardware.device import Device, Verdict, this_device
from finetune.hardware.gpus import this_machine
from finetune.precision import constants
from finetune.precision.cases.head import Head
from finetune.precision.proof.movement import sample
from finetune.precision.proof.proof import Proof
from finetune.runs.folder import new_folder
from finetune.runs.receipt import Receipt
from finetune.storage.pretrained import load_tokenizer, vocabulary_of
from finetune.training.faults import explained
from finetune.training.health.callbacks import MetricsWriter, StepTimer
from finetune.training.health.memory_meter import MemoryMeter
from finetune.training.helper.evidence import environment
from finetune.training.helper.session import Session
from finetune.training.model import OWN
from finetune.training.run.run_folder import start_folder
from finetune.training.trainer import make_trainer

How = Literal["finetune", "stock", "shipped", "shipped-te"]
Liger = Literal["", "wanted", "needed"]
FP8 = {"compute": "fp8", "backend": "torchao", "emulation": "allow", "compile": "off"}
ROWS = FP8 | {"frozen": "fp8", "scaling": "rowwise"}
BF16 = {"compute": "bf16", "compile": "off"}
ON = {"compile": "on"}


@dataclass(frozen=True)
class Step:
    """A way to train a recipe.

    Attributes:
        name: name of its row.
        precision: the `precision` section; of `stock` and `shipped`, what is nearest.
        how: `finetune`, a run of finetune; `stock`, TRL and PEFT without it; `shipped`,
            accelerate's own FP8 by torchao; `shipped-te`, by Transformer Engine.
        liger: `wanted`, its kernels take part where they can; `needed`, there is no run without.
        train: changes of the `train` section.
    """

    name: str
    precision: dict[str, Any] = field(default_factory=lambda: dict(BF16))
    how: How = "finetune"
    liger: Liger = "wanted"
    train: dict[str, Any] = field(default_factory=dict)

    def of(self, config: RunConfig, *, has_liger: bool = False) -> RunConfig:
        """The recipe trained this way."""
        model = config.model.model_copy(update={"storage": None})
        train = config.train | self.train
        train["use_liger_kernel"] = self.liger == "needed" or (self.liger == "wanted" and has_liger)
        data = config.model_dump() | {"precision": self.precision, "train": train}
        return RunConfig.model_validate(data | {"model": model.model_dump()})


LORA = (
    Step("stock", how="stock", liger=""),
    Step("fused"),
    Step("shipped", how="shipped", liger=""),
    Step("shipped, TE", how="shipped-te", liger=""),
    Step(
        "flags kept",
        FP8 | {"frozen": "bf16", "scaling": "tensorwise"},
        liger="",
    ),
    Step("fused, compiled", BF16 | ON),
    Step("FP8 weight", ROWS | {"high_gemms": ("dgrad",)}),
    Step("FP8 weight, compiled", ROWS | {"high_gemms": ("dgrad",)} | ON),
    Step("FP8 dgrad", ROWS),
    Step("FP8 dgrad, compiled", ROWS | ON),
    Step("FP8 dgrad per tensor, compiled", FP8 | {"frozen": "fp8", "scaling": "tensorwise"} | ON),
    Step("FP8 dgrad and head, compiled", ROWS | ON | {"map": {"output": "fp8"}}),
)
_PLAIN, _FUSED = {"optim": "adamw_torch"}, {"optim": "adamw_torch_fused"}
TENSORWISE = FP8 | {"scaling": "tensorwise"}
FULL = (
    Step("stock", how="stock", liger="", train=_PLAIN),
    Step("fused optimizer", how="stock", liger="", train=_FUSED),
    Step("fused kernels", how="stock", liger="needed", train=_FUSED),
    Step("BF16, compiled", BF16 | ON, train=_FUSED),
    Step("FP8 tensorwise", TENSORWISE, train=_FUSED),
    Step("FP8 tensorwise, compiled", TENSORWISE | ON, train=_FUSED),
    Step("FP8 rowwise, compiled", FP8 | {"scaling": "rowwise"} | ON, train=_FUSED),
    Step("FP8 delayed, Transformer Engine", FP8 | {"backend": "te", "scaling": "delayed"},
         train=_FUSED),
    Step("shipped", how="shipped", liger="", train=_FUSED),
    Step("shipped, TE", how="shipped-te", liger="", train=_FUSED),
)  # fmt: skip
LADDERS: dict[str, tuple[Step, ...]] = {"lora": LORA, "full": FULL}
REFERENCES: dict[str, tuple[str, ...]] = {
    "lora": ("stock", "fused"),
    "full": ("stock", "fused kernels"),
}
"""Steps that the other rows of the same benchmark are compared with."""


def steps_of(
    ladder: str, config: RunConfig, only: Sequence[str] = ()
) -> tuple[list[Step], tuple[str, ...]]:
    """The steps to take, and the names of those that others are compared with, which come first.

    Args:
        ladder: `lora` or `full`.
        config: the recipe that is trained.
        only: names, or parts of several; left out, all steps.

    Raises:
        ConfigError: no such step, or a recipe of the other method.
    """
    if config.method != ladder:
        raise ConfigError(
            f"the {ladder} ladder was requested of a {config.method} recipe",
            where=f"ladder {ladder}",
            fix="ladder lora, or ~lora to train all weights"
            if config.lora
            else "ladder full, or lora.r=16 for adapters",
        )
    steps, references = LADDERS[ladder], REFERENCES[ladder]
    names = [step.name for step in steps]
    for part in only:
        if not any(part in name for name in names):
            close = difflib.get_close_matches(part, names, n=1, cutoff=0.3)
            raise ConfigError(
                f"no step of the ladder has {part!r} in its name"
                + (f"; did you mean {close[0]!r}?" if close else ""),
                where="--only",
                fix=f"steps are: {'; '.join(names)}",
            )
    chosen = [step for step in steps if not only or _is_named(step.name, only, names)]
    first = [s for s in steps if s.name in references]
    return [*first, *(s for s in chosen if s not in first)], references


def _is_named(name: str, only: Sequence[str], names: Sequence[str]) -> bool:
    """One of `only` is the name, or part of it and no other step's whole name."""
    return any(part == name or (part in name and part not in names) for part in only)


def climb(
    ladder: str,
    recipe: str,
    *,
    overrides: Sequence[str] = (),
    only: Sequence[str] = (),
    grid: str | None = None,
    steps: int = STEPS,
    rounds: int = ROUNDS,
    out: Path | str = "runs/benchmark",
    force: bool = False,
    say: Say | None = None,
) -> Benchmark:
    """Measure the steps of a ladder with a recipe; arguments as those of `finetune.benchmark`."""
    loaded, device = load_recipe(recipe, overrides), this_device()
    taken, references = steps_of(ladder, loaded.config, only)
    liger = has_liger(device)
    configs, _ = settle_checkpointing(
        [step.of(loaded.config, has_liger=bool(liger)) for step in taken], device
    )
    variants = [
        LabeledRecipe(
            step.name,
            dataclasses.replace(loaded, config=config),
            () if step.how == "finetune" else ("-m", "tests.benchmarks.ladder", "--run", step.how),
        )
        for step, config in zip(taken, configs, strict=True)
    ]
    points = points_of(grid, loaded.config)
    unpredicted = [  # Liger's kernels are not rehearsed: they take less memory and time
        step.name
        for step, config in zip(taken, configs, strict=True)
        if step.how.startswith("shipped") or config.train.get("use_liger_kernel")
    ]
    measuring = Climbing(
        variants, points, this_machine(device), steps, rounds, force, say=say,
        unpredicted=unpredicted, stock=[step.name for step in taken if step.how == "stock"],
    )  # fmt: skip
    result = Benchmark(references=list(references))
    if not liger and any(step.liger == "wanted" for step in taken):
        result.alike = f"without Liger: {liger.reason}"
    return measuring.measure(result, new_folder(Path(out) / f"{loaded.name}-{ladder}-ladder", out))


class Climbing(Measuring):
    """Predicts steps of stock libraries with PEFT's adapters and TRL's head.

    On a GPU with a head that holds as much: TRL's own kernels are not rehearsed.
    """

    def __init__(self, *args: Any, stock: Collection[str], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._stock = stock

    def _unfit(self, row: Row, config: RunConfig) -> str:
        if row.label not in self._stock:
            return super()._unfit(row, config)
        with (
            patch.object(constants, "FUSED_ADAPTERS", False),
            patch.object(Head, "in_fused_loss", lambda _: contextlib.nullcontext()),
        ):
            return super()._unfit(row, config)


# ---------------------------------------------------------------------------- runs without finetune


def has_liger(device: Device) -> Verdict:
    """True if Liger's kernels can run here."""
    if device.kind == "cpu":
        return Verdict(False, "Liger's kernels are written in Triton, which compiles for GPUs")
    if importlib.util.find_spec("liger_kernel") is None:
        return Verdict(False, f"not installed: {install_hint('liger')}")
    return Verdict(True, "liger-kernel is installed")


def train_stock(how: str, file: str, seed: str, *options: str) -> None:
    """Train a recipe without a session of finetune, and leave a run folder as `run` does."""
    recipe, device = load_recipe(file, [seed]), this_device()
    config, shipped = recipe.config, {"shipped": Shipped, "shipped-te": ShippedByEngine}.get(how)
    folder = Path(options[options.index("--out") + 1]) / recipe.name / how
    start_folder(folder, recipe, folder)
    tokenizer, _ = load_tokenizer(config.model)
    rows = load_data(config.data, tokenizer, 0, vocabulary=vocabulary_of(config.model))
    args = sft_config(config, folder, rows.settings, on_cpu=device.kind == "cpu")
    set_seed(args.seed)
    label = "FP8, as shipped" if shipped else "BF16, stock"
    meter, movement = MemoryMeter(cast(Session, NoSession(device))), Movement()
    timer = StepTimer(device.kind, folder / "steps.jsonl")
    with explained(folder, lambda: ""):
        make_trainer(
            *(config, args),
            train=rows.train,
            held_out=None,
            reader=tokenizer,
            stored=(),
            attention=OWN,
            callbacks=[MetricsWriter(folder / "metrics.jsonl", label), meter, timer, movement],
            kind=shipped,
        ).train()
    receipt = Receipt(movement.status, {"ran": label}, environment=environment(device))
    receipt.memory = meter.reading()
    receipt.save(folder / "receipt.json")


class Shipped(SFTTrainer):
    """`SFTTrainer` under accelerate's FP8, by torchao; emulated by torchao where there is none."""

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        args = super()._build_accelerator_args(**kwargs)
        handlers = [*(args.get("kwargs_handlers") or ()), self.handler()]
        return args | {"mixed_precision": "fp8", "kwargs_handlers": handlers}

    @staticmethod
    def handler() -> Any:
        from accelerate.utils import AORecipeKwargs

        recipe = AORecipeKwargs()
        assert recipe.config is not None  # its own default
        hardware = bool(this_device().has_fp8)
        recipe.config = dataclasses.replace(recipe.config, emulate=not hardware)
        return recipe


class ShippedByEngine(Shipped):
    """`SFTTrainer` under accelerate's FP8, by Transformer Engine with its usual settings."""

    @staticmethod
    def handler() -> Any:
        from accelerate.utils import TERecipeKwargs

        return TERecipeKwargs()


@dataclass
class NoSession:
    """Attributes of a session that a `MemoryMeter` reads, where there is none."""

    device: Device
    compiled: str = "off"
    proof: Proof | None = None


class Movement(TrainerCallback):
    """Tells which trainable weights differ after training from before its first step."""

    def __init__(self) -> None:
        self._before: dict[str, int] = {}
        self.moved = self.total = 0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self._before:
            self._before = {name: sample(p) for name, p in _trainable(kwargs["model"])}

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for name, p in _trainable(kwargs["model"]):
            self.total += p.numel()
            self.moved += p.numel() if not sample(p).equal(self._before[name]) else 0

    @property
    def status(self) -> str:
        """Status for the row: not proven, and how much of what shall train has moved."""
        share = self.moved / self.total if self.total else 0.0
        if share == 0:
            return "not proven: it trains nothing, no trainable weight has moved"
        return f"not proven: stock libraries; {share:.1%} of the trainable weights moved"


def _trainable(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            yield name, getattr(parameter.data, "_tensor", parameter.data)


def main(words: Sequence[str] | None = None) -> None:
    """Climb a ladder and print its table."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("ladder", choices=list(LADDERS))
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    parser.add_argument("--only", action="append", default=[], help="a step, or part of several")
    parser.add_argument("--grid", help='"batch=1,2,4 length=512,2048"; the recipe\'s own')
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--out", type=Path, default=Path("runs/benchmark"))
    parser.add_argument("--force", action="store_true")
    progress = Console(stderr=True, highlight=False, soft_wrap=True)
    options = vars(parser.parse_intermixed_args(words))
    try:
        found = climb(**options, say=progress.print)
    except FinetuneError as error:
        parser.error(str(error))
    Console(highlight=False, width=max(120, Console().width)).print(found)
    print(f"rows: {found.folder}/benchmark.json and .csv")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        try:
            train_stock(*sys.argv[2:])
        except FinetuneError as error:
            sys.exit(f"error: {error}")
    else:
        main()
