"""Peaks of runs on a GPU made of host memory, beside their predictions, in bytes as JSON.

    python -m tests.host_gpu.memory FOLDER "precision.fp8_params=true precision.compile=off" ...

Each is a small Llama in full over rows of one length, or the model of tests.image_models that the
first word names, over rows with pictures; peaks are of steps in which nothing is proven any more.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import TrainerCallback

from finetune.estimator.memory.overheads import pinned_bytes
from finetune.estimator.predict import predict_whole
from finetune.hardware.device import this_device
from finetune.hardware.gpus import this_machine
from finetune.precision.convert import conversion_of
from finetune.training.health.memory_meter import LiveTensors, known
from finetune.training.run import run as whole_run
from tests.benchmarks.predicted_images import image_recipe
from tests.benchmarks.predicted_memory import SMALL, Case, recipe_of
from tests.host_gpu.worker import SETTLED
from tests.image_models import FAMILIES
from tests.run_folders import trained

SHAPE = SMALL | {"hidden_act": "relu"}
"""Its operators run whole there; SiLU's gradient and fused attention are taken apart."""


class OnDevice(LiveTensors):
    """Live tensors of the device, without what its operators' stand-ins make in passing."""

    def count(self, tensor: Tensor) -> int:
        plain = not is_traceable_wrapper_subclass(tensor)
        return 0 if plain and not tensor.is_cuda else super().count(tensor)


class Peaks(TrainerCallback):
    """Peak of the device in a settled step, and what is in host memory after it."""

    def __init__(self) -> None:
        self.device = self.pinned = self.pageable = 0
        self.live: Any = None

    def on_step_begin(
        self,
        args: Any,
        state: Any,
        control: Any,
        model: Any = None,
        optimizer: Any = None,
        **_: Any,
    ) -> None:
        if state.global_step == SETTLED:
            self.live = OnDevice(known(model, optimizer), thorough=True).__enter__()

    def on_step_end(
        self,
        args: Any,
        state: Any,
        control: Any,
        model: Any = None,
        optimizer: Any = None,
        **_: Any,
    ) -> None:
        if self.live is None:
            return
        self.live.__exit__(None, None, None)
        self.device, self.live = self.live.peak, None
        engine: Any = getattr(conversion_of(model), "engine", None)
        held = getattr(engine, "masters", None)
        masters = [] if held is None else [one.parameter for one in held.each]
        self.pinned = 2 * sum(pinned_bytes(p.nbytes) for p in masters)
        states = (x for p in masters for x in optimizer.state[p].values())
        self.pageable = sum(x.nbytes for x in states if x.dim())


def run(words: list[str], folder: Path) -> dict[str, Any]:
    family = words.pop(0) if words[0] in FAMILIES else None
    changes = ("train.max_steps=7", "data.eval_fraction=0", "model.attention=eager", *words)
    if family is None:
        recipe = recipe_of(Case("small", "tiny_full_fp8", changes, SHAPE), folder)
    else:
        recipe = image_recipe(family, ["tiny_full_fp8", *changes], folder)
    seen, plain = Peaks(), whole_run.make_trainer

    def make(*args: Any, **kwargs: Any) -> Any:
        return plain(*args, **kwargs | {"callbacks": [seen, *kwargs["callbacks"]]})

    machine = this_machine(this_device())
    found = predict_whole(recipe.config, machine, padded=False).footprint  # cut to one length
    whole_run.make_trainer = make
    trained(recipe, out=str(folder), console=Console(quiet=True), save=False)
    whole_run.make_trainer = plain
    return {
        "case": " ".join([family or "small", *words]),
        "device": [found.tensors, seen.device],
        "pinned": [found.pinned, seen.pinned],
        "pageable": [found.pageable, seen.pageable],
        "phases": found.phases,
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    for case in sys.argv[2:]:
        print(json.dumps(run(case.split(), Path(sys.argv[1]))), flush=True)
