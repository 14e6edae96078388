"""Runs of several processes against runs of one: losses, checkpoints and faults, over gloo."""

from __future__ import annotations

import errno
import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from finetune.runs.checkpoints import CHECKPOINTS, Checkpoint, checkpoints_in
from finetune.training.helper import session
from tests.forked import ended, start, start_ranks
from tests.image_models import tiny_image_model

pytestmark = pytest.mark.long

GLOBAL_BATCH = 8
SETTINGS = (
    "train.max_steps=8", "train.logging_steps=1", "train.eval_strategy=no", "eval.samples=false",
    "data.max_rows=200", "train.max_length=64", "precision.health_every=0",
)  # fmt: skip
FP32 = ("tiny_full_bf16", "precision.compute=fp32")
DELAYED = ("tiny_full_fp8",)
SAVING = ("train.save_strategy=steps", "train.save_steps=2")


def train(folder: Path, *words: str, processes: int = 1, accumulation: int = 1) -> Path:
    """A run folder, trained by so many processes with the same global batch."""
    batch = GLOBAL_BATCH // processes // accumulation
    words = (*words, f"train.per_device_train_batch_size={batch}")
    words += (f"train.gradient_accumulation_steps={accumulation}",) * (accumulation > 1)
    before = set(folder.glob("runs/*/*"))
    if processes > 1:
        codes = ended(start_ranks(folder, *words, processes=processes))
    else:
        codes = ended([start(folder, *words)])
    assert codes == [0] * processes, "".join(f.read_text() for f in folder.glob("*.txt"))[-3000:]
    (made,) = set(folder.glob("runs/*/*")) - before
    return made


def losses(run: Path) -> dict[int, float]:
    """Step -> loss."""
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


def weights(run: Path) -> dict[str, torch.Tensor]:
    (file,) = (run / "model").glob("*model.safetensors")
    return load_file(file)


def test_two_processes_have_the_loss_of_one_with_the_same_global_batch(tmp_path) -> None:
    """In FP32, where the order of sums is all that differs: rows and averages are the same."""
    one, two = (losses(train(tmp_path, *FP32, *SETTINGS, processes=n)) for n in (1, 2))
    assert len(one) == 8
    assert two == pytest.approx(one, rel=1e-6)


@pytest.mark.parametrize(
    ("rows", "packing", "drops"),
    [(186, False, False), (166, False, False), (186, True, False), (186, False, True)],
)
def test_the_eval_loss_of_uneven_rows_is_that_of_one_process(
    rows, packing, drops, tmp_path
) -> None:
    """37 rows are 36 and 1, 33 rows 32 and 1: then the second process has none of its own.

    Packed rows and their repetitions stand in one sequence. Where training rows that fill no batch
    are left out, eval rows are not.
    """
    words = ("tiny_lora_bf16", *SETTINGS, f"data.max_rows={rows}", "train.max_steps=1")
    words += ("train.warmup_steps=0",)
    words += ("train.packing=true", "train.max_length=128") * packing
    words += ("train.eval_strategy=steps", "eval.at_start=true")
    words += ("train.per_device_eval_batch_size=4",)
    found = []
    for processes in (1, 2):
        more = ("train.dataloader_drop_last=true",) * (drops and processes == 2)
        log = (train(tmp_path, *words, *more, processes=processes) / "metrics.jsonl").read_text()
        lines = map(json.loads, log.splitlines())
        found.append(next(row["eval_loss"] for row in lines if "eval_loss" in row))
    one, two = found
    assert two == pytest.approx(one, rel=1e-6)


@pytest.mark.parametrize(
    "recipe",
    [
        ("tiny_full_fp8", "precision.scaling=rowwise"),
        ("tiny_lora_fp8",),
        ("tiny_full_bf16", "model.dtype=bfloat16", "train.optim=adamw_torch_8bit"),
    ],
)
def test_two_processes_equal_two_micro_batches_of_one_to_the_bit(recipe, tmp_path) -> None:
    """Scales and BF16 products are of a micro-batch, whichever process computes it.

    Weights that are rounded by chance are so with the same draws.
    """
    one = train(tmp_path, *recipe, *SETTINGS, accumulation=2)
    two = train(tmp_path, *recipe, *SETTINGS, processes=2)
    assert losses(two) == losses(one)
    expected, found = weights(one), weights(two)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_process_whose_prompts_have_no_images_waits_for_none(tmp_path) -> None:
    """One row of eight has an image: TRL alone would gather it where it was drawn, for ever."""
    from PIL import Image

    home = tiny_image_model("qwen2_5_vl", tmp_path)
    Image.new("RGB", (60, 40), "navy").save(tmp_path / "sea.png")
    rows = [{"prompt": f"Ship {n}?", "images": []} for n in range(7)]
    rows.append({"prompt": "<image>Ship?", "images": ["sea.png"]})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = (
        "tiny_lora_fp8", f"model.name={home}", "model.weights=pretrained", "~data.name",
        f"data.path={tmp_path / 'rows.jsonl'}", "data.eval_fraction=0", "eval.samples=false",
        "train.method=grpo", "train.reward_funcs=[builtin:one_sentence]", "~train.max_length",
        "train.num_generations=2", "train.max_completion_length=4", "train.entropy_coef=0.01",
        "train.max_steps=4", "train.eval_strategy=no", "train.lr_scheduler_type=constant",
    )  # fmt: skip
    run = train(tmp_path, *words, processes=2)
    assert json.loads((run / "receipt.json").read_text())["status"] == "proven"


@pytest.mark.parametrize(("recipe", "within"), [(FP32, 1e-6), (DELAYED, 0.02)])
def test_a_checkpoint_of_two_goes_on_as_one_as_two_and_as_four(recipe, within, tmp_path) -> None:
    """The same rows, schedule and moments: losses are those of the run that nobody stopped."""
    run = train(tmp_path, *recipe, *SETTINGS, *SAVING, processes=2)
    expected, allow = losses(run), "resume.allow=[processes,train.per_device_train_batch_size]"
    for step, processes in ((2, 1), (4, 2), (6, 4)):
        words = ("resume", str(run), "--checkpoint", str(step), allow)
        run = train(tmp_path, *words, processes=processes)
        found = losses(run)
        assert list(found) == list(range(1, 9))
        assert found == pytest.approx({s: expected[s] for s in found}, rel=within)
        receipt = json.loads((run / "receipt.json").read_text())
        assert receipt["status"] == "proven"
        assert receipt["environment"]["processes"] == processes


# ----------------------------------------------------------------------------------------- faults


def killed_in_step_5() -> None:
    _in_step_5(lambda: os.kill(os.getpid(), signal.SIGKILL))


def killed_under_torchrun_in_step_5() -> None:
    """`torchrun` signals the process that is left: before it has noticed, and while it ends."""
    _in_step_5(lambda: os.kill(os.getpid(), signal.SIGKILL))
    _in_step_5(lambda: os.kill(os.getpid(), signal.SIGTERM), rank="0")
    plain = session.receipt_of

    def receipt_of(*args: Any, **kwargs: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return plain(*args, **kwargs)

    session.receipt_of = receipt_of


def out_of_memory_in_step_5() -> None:
    def fail() -> None:
        raise MemoryError("no memory on this machine")

    _in_step_5(fail)


def stopped_at_once_in_step_5() -> None:
    """A second signal to one process alone, which does not wait for the end of the step."""

    def stop() -> None:
        raise KeyboardInterrupt

    _in_step_5(stop)


def _in_step_5(act: Callable[[], None], rank: str = "1") -> None:
    from transformers.trainer_callback import CallbackHandler

    plain = CallbackHandler.on_step_begin

    def on_step_begin(self: Any, args: Any, state: Any, control: Any) -> Any:
        if state.global_step == 4 and os.environ["RANK"] == rank:
            act()
        return plain(self, args, state, control)

    CallbackHandler.on_step_begin = on_step_begin


def full_disk_in_step_6() -> None:
    """In its part of the checkpoint, when the other process has written its own."""
    from transformers import Trainer

    plain = Trainer._save_rng_state

    def save(self: Any, folder: str) -> None:
        if self.state.global_step == 6 and os.environ["RANK"] == "1":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), folder)
        plain(self, folder)

    Trainer._save_rng_state = save


def another_receipt() -> None:
    from finetune.training.helper import evidence

    plain = evidence.receipt_of

    def receipt_of(*args: Any, **kwargs: Any) -> Any:
        receipt = plain(*args, **kwargs)
        return replace(receipt, status="other") if os.environ["RANK"] == "1" else receipt

    session.receipt_of = receipt_of


def test_a_row_that_is_refused_ends_all_processes_with_a_sentence(tmp_path) -> None:
    """The first one reads it; the others wait for it in a collective, without a run folder."""
    good, bad = '{"prompt": "a", "completion": "b"}', '{"prompt": "", "completion": "b"}'
    (tmp_path / "rows.jsonl").write_text(f"{good}\n{bad}\n")
    words = (*DELAYED, *SETTINGS, "~data.name", "data.path=rows.jsonl")
    assert ended(start_ranks(tmp_path, *words, processes=2)) == [2, 2]
    first, second = ((tmp_path / f"{rank}.txt").read_text() for rank in range(2))
    assert "row 2 of rows.jsonl cannot be trained on" in first
    assert "another process of the run has ended" in second
    assert "Traceback" not in second


@pytest.mark.parametrize("rows", ["train", "eval"])
def test_unequal_numbers_of_batches_end_all_processes(rows, tmp_path) -> None:
    """Accelerate's `even_batches: false`: one process waited for the other for half an hour."""
    count = {"train": ("data.max_rows=17", "data.eval_fraction=0"), "eval": ("data.max_rows=15",)}
    words = (*DELAYED, *SETTINGS, *count[rows], "train.accelerator_config={even_batches: false}")
    words += ("train.eval_strategy=steps", "train.eval_steps=1") * (rows == "eval")
    words += ("train.per_device_eval_batch_size=4", "train.per_device_train_batch_size=4")
    assert ended(start_ranks(tmp_path, *words, processes=2)) == [2, 2]
    for rank in range(2):
        assert "fewer batches for one process" in (tmp_path / f"{rank}.txt").read_text()


GONE = "another process of the run has ended"


@pytest.mark.parametrize(
    ("fault", "codes", "says", "newest"),
    [
        (killed_in_step_5, [2, -signal.SIGKILL], GONE, 4),
        (killed_under_torchrun_in_step_5, [2, -signal.SIGKILL], GONE, 4),
        (stopped_at_once_in_step_5, [2, 130], GONE, 4),
        (out_of_memory_in_step_5, [2, 2], "no memory on this machine", 4),
        (full_disk_in_step_6, [2, 2], "checkpoint of step 6 could not be written", 4),
        (another_receipt, [2, 2], "process 1 did not run what process 0 ran", 8),
    ],
)
def test_a_process_that_fails_ends_all_with_its_error(fault, codes, says, newest, tmp_path) -> None:
    """A checkpoint is whole on all of them, or is none."""
    words = (*DELAYED, *SETTINGS, *SAVING, "train.per_device_train_batch_size=4")
    assert ended(start_ranks(tmp_path, *words, processes=2, before=fault)) == codes
    log, other = ((tmp_path / f"{rank}.txt").read_text() for rank in range(2))
    assert "Traceback" not in log
    assert says in log + other
    assert fault is another_receipt or GONE in log
    assert fault is another_receipt or "torchrun --standalone --nproc_per_node=2 -m fine" in log
    (folder,) = tmp_path.glob(f"runs/*/*/{CHECKPOINTS}")
    saved = [Checkpoint(path) for path in checkpoints_in(folder).values()]
    assert saved[-1].step == newest
    assert not any(one.problem(contents=True) for one in saved)
    run = json.loads((folder.parent / "receipt.json").read_text())["run"]
    assert not run["interrupted"]
    assert run["stopped"] or fault is another_receipt
    assert (folder.parent / "model").is_dir() == (fault is another_receipt)
