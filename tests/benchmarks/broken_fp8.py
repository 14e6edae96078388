"""Does `compare` catch an FP8 that is broken? The packaged recipe, broken on purpose.

    python -m tests.benchmarks.broken_fp8 [--steps 60] [--seeds 2] [--only frozen,margin]

`frozen`: the weights of all FP8 layers are taken out of the optimizer, as stock libraries do when
they replace layers after the optimizer was built. Three nets hang one above the other: the proof
stops the run; without the proof, the receipts differ in what trained, and the pair is
refused; with `--allow`, the losses say `not equivalent`.

`margin`: legal settings that nobody should take, `precision.margin=14`: E4M3 spans 18 binades, and
14 of headroom leave 4. FP8 is what runs, so the proof has nothing against it; the losses say it.
(E5M2 spans 32, and E5M2 everywhere with a margin of 16 does not show in the loss: `--only e5m2`.)

`wrong-margin`: E5M2 in every GEMM and a margin of 12 that is applied the wrong way round, so that
all above a 4096th of the largest is clipped.

The runs are those of `compare`, each a process of its own; the broken side is started through this
file, which breaks what it has to and then runs the command line.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from rich.console import Console

from finetune.analysis.compare import compare
from finetune.analysis.compare import jobs as running
from finetune.analysis.compare.result import Comparison
from finetune.errors import RunFailedError
from finetune.logging import quiet_libraries

RECIPE = "tiny_full_fp8"
BREAKS = {
    "frozen": (),
    "frozen-unproven": (),
    "margin": ("a.precision.margin=14",),
    "wrong-margin": ("a.precision.format=e5m2", "a.precision.margin=12"),
    "e5m2": ("a.precision.format=e5m2", "a.precision.margin=16"),
}
"""What to break -> settings that go with it."""


def freeze_fp8_weights() -> None:
    """Take the weights of the decoder's linear layers out of every optimizer of a trainer."""
    from transformers import Trainer

    original = Trainer.create_optimizer

    def create(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        optimizer = original(trainer, *args, **kwargs)
        lost = {id(p) for n, p in trainer.model.named_parameters() if "_proj.weight" in n}
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if id(p) not in lost]
        return optimizer

    Trainer.create_optimizer = create


def hold_off_the_proof() -> None:
    """Let the proof look and find nothing."""
    from finetune.precision.proof.proof import Proof

    def find_nothing(*args: Any) -> None:
        pass

    Proof._judge_optimizers = Proof._judge_movement = find_nothing


def turn_the_margin_around() -> None:
    """Scale up by 2^margin where it should be down."""
    from finetune.precision.scaling import DelayedState

    original = DelayedState.__init__

    def begin(state: DelayedState, layers: int, precision: Any) -> None:
        original(state, layers, precision)
        state.margin = -state.margin

    DelayedState.__init__ = begin


def run_broken(how: str, arguments: Sequence[str]) -> None:
    """Break it, then be the command line."""
    if how.startswith("frozen"):
        freeze_fp8_weights()
    if how == "frozen-unproven":
        hold_off_the_proof()
    if how == "wrong-margin":
        turn_the_margin_around()
    from finetune.cli.app import main as command_line

    sys.argv = ["finetune", *arguments]
    command_line()


def compare_broken(
    how: str, overrides: Sequence[str], seeds: int, out: Path, *, allow: bool = False
) -> Comparison:
    """Compare the recipe with its twin, side a through this file.

    Args:
        how: one of `BREAKS`.
        overrides: as for `compare`, besides those of `BREAKS`.
        seeds: how many.
        out: folder of runs.
        allow: insist.

    Raises:
        RunFailedError: the broken run was stopped.
    """
    plan = running.plan_jobs

    def plan_broken(*args: Any, **kwargs: Any) -> list[running.Job]:
        jobs = plan(*args, **kwargs)
        for job in jobs:
            if job.side == "a":
                job.program = ("-m", "tests.benchmarks.broken_fp8", "--as", how)
        return jobs

    with mock.patch.object(compare, "plan_jobs", plan_broken):
        settings = [*overrides, *BREAKS[how]]
        return compare.compare(RECIPE, overrides=settings, seeds=seeds, out=out, allow=allow)


def main() -> None:
    """Run the comparisons and print their verdicts."""
    if sys.argv[1:2] == ["--as"]:
        run_broken(sys.argv[2], sys.argv[3:])
        return
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--only", default="frozen,frozen-unproven,margin,wrong-margin")
    asked = parser.parse_args()
    quiet_libraries()
    console = Console(highlight=False, width=120)
    short = [f"train.max_steps={asked.steps}", f"train.eval_steps={asked.steps}"]
    with tempfile.TemporaryDirectory() as out:
        for how in asked.only.split(","):
            console.rule(how)
            try:
                found = compare_broken(how, short, asked.seeds, Path(out))
            except RunFailedError as error:
                console.print(f"stopped: {error}")
                continue
            console.print(found)
            if found.verdict == "refused" and found.folder is not None:
                console.rule(f"{how}, with --allow")
                again = compare.judge_again(found.folder, margin=None, confidence=None, allow=True)
                console.print(again)


if __name__ == "__main__":
    main()
