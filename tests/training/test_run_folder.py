"""Names of run folders, what a run will save against the room on its disk, and lost processes."""

from __future__ import annotations

import errno
from collections import namedtuple
from pathlib import Path

import pytest
from rich.console import Console

from finetune import load_recipe, train
from finetune.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    MemoryShortError,
    RunFailedError,
)
from finetune.runs.last_model import saved_whole
from finetune.training import faults
from finetune.training.run import run_folder
from finetune.training.run.preflight import preflight
from tests.conftest import CPU

STEPS = ("train.save_strategy=steps", "train.max_steps=100", "train.save_steps=10")


@pytest.mark.parametrize(
    ("label", "end"),
    [
        ("FP8 emulated/delayed", "-fp8-delayed"),
        ("FP8 te/mxfp8", "-fp8-mxfp8"),
        ("FP8 torchao/rowwise_with_gw_hp", "-fp8-rowwise-with-gw-hp"),
        ("BF16", "-bf16"),
    ],
)
def test_a_folder_is_named_by_the_precision_that_ran(label, end) -> None:
    folder = run_folder.name_folder(Path("runs"), "tiny_full_fp8", label)
    assert folder.parent == Path("runs/tiny_full_fp8")
    assert folder.name[20:] == end


@pytest.mark.parametrize(
    ("overrides", "most"),
    [
        (["train.save_strategy=no"], (0, 0)),
        ([*STEPS], (11, 10)),
        ([*STEPS, "checkpoints.first_step=false"], (10, 10)),
        ([*STEPS, "checkpoints.keep_last=2"], (4, 3)),
        ([*STEPS, "train.save_total_limit=1"], (2, 1)),
        ([*STEPS, "train.save_steps=0.5", "checkpoints.first_step=false"], (2, 2)),
        (["train.save_strategy=epoch", "train.num_train_epochs=3", "~train.max_steps"], (4, 3)),
    ],
)
def test_the_most_checkpoints_at_one_time(overrides, most) -> None:
    assert run_folder.checkpoints_at_once(load_recipe("tiny_full_fp8", overrides).config) == most


@pytest.mark.parametrize("rows", ["", '{"step": 1}\n'])
@pytest.mark.parametrize("saved", ["", "checkpoints/checkpoint-1"])
def test_ctrl_c_before_the_first_step_leaves_no_folder(rows, saved, tmp_path) -> None:
    """`ls --runs` and `last` took the folder for a run that was killed; a checkpoint is kept."""
    folder = tmp_path / "run"
    (folder / saved).mkdir(parents=True)
    (folder / "metrics.jsonl").write_text(rows)
    with pytest.raises(KeyboardInterrupt), run_folder.discarded_unless_begun(folder):
        raise KeyboardInterrupt
    assert folder.is_dir() == bool(rows or saved)


def test_a_model_is_there_whole_or_not_at_all(tmp_path) -> None:
    def half(place: Path) -> None:
        place.mkdir()
        (place / "half").touch()
        raise OSError("full")

    with pytest.raises(OSError, match="full"), saved_whole(tmp_path) as place:
        half(place)
    assert list(tmp_path.iterdir()) == []
    with saved_whole(tmp_path) as place:
        place.mkdir()
        assert not (tmp_path / "model").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.fixture
def disk(monkeypatch):
    """A function that sets the free bytes of every disk."""

    def free(nbytes: float) -> None:
        usage = namedtuple("usage", "total used free")(0, 0, nbytes)
        monkeypatch.setattr(run_folder.shutil, "disk_usage", lambda _: usage)

    return free


@pytest.mark.parametrize("recipe", ["tiny_full_fp8", "tiny_lora_fp8"])
def test_a_run_that_has_no_room_on_the_disk_is_refused(recipe, disk, tmp_path) -> None:
    """Eleven checkpoints need more than ten have room for; the one that is named does fit."""
    config = load_recipe(recipe, STEPS).config
    run = preflight(config, CPU)
    each = run_folder.bytes_of_checkpoint(run.meta_model, config)
    model = run_folder.bytes_of_weights(run.meta_model, config)
    assert each == pytest.approx(3 * model), "two moments in the weights' type"
    disk(11 * each)
    run_folder.check_disk(run, tmp_path / "runs")
    disk(10.9 * each)
    with pytest.raises(
        CheckpointError, match=r"no room[\s\S]*fix: +checkpoints.keep_last=8"
    ) as error:
        run_folder.check_disk(run, tmp_path / "runs")
    assert str(tmp_path) in str(error.value)
    fewer = load_recipe(recipe, [*STEPS, "checkpoints.keep_last=8"]).config
    run_folder.check_disk(preflight(fewer, CPU), tmp_path / "runs")


@pytest.mark.slow
def test_the_bytes_of_a_checkpoint_are_those_on_the_disk(tmp_path) -> None:
    """But for the headers of its many small tensors."""
    from rich.console import Console

    from finetune import train

    recipe = load_recipe(
        "tiny_lora_fp8",
        ["train.max_steps=1", "train.warmup_steps=0", "train.save_strategy=steps",
         "eval.samples=false", "data.max_rows=24", "train.eval_strategy=no"],
    )  # fmt: skip
    report = train(recipe, out=tmp_path, console=Console(quiet=True))
    saved = report.folder / "checkpoints" / "checkpoint-1"
    names = ("optimizer.pt", "adapter_model.safetensors")
    found = sum((saved / name).stat().st_size for name in names)
    run = preflight(recipe.config, CPU)
    expected = run_folder.bytes_of_checkpoint(run.meta_model, recipe.config)
    assert expected < found < 1.1 * expected


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_lost_process_is_no_fault_of_a_row(wrapped, tmp_path, monkeypatch) -> None:
    """TRL prepares rows between collectives, where a RuntimeError is taken for one of a row."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    error: Exception = RuntimeError("[gloo/transport/tcp/pair.cc:554] Connection closed by peer")
    if wrapped:
        row = DataError("a row of the train set cannot be formatted")
        row.__cause__, error = error, row
    lost = r"another process of the run has ended[\s\S]*it failed, as its own"
    with pytest.raises(RunFailedError, match=lost), faults.explained(tmp_path, lambda: ""):
        raise error
    own = ValueError("its own")
    own.__cause__ = error  # of another library, which answers for what it makes of it
    with pytest.raises(ValueError, match="its own"), faults.explained(tmp_path, lambda: ""):
        raise own


def test_a_full_disk_is_a_fault_of_the_run_and_a_missing_file_where_it_is_its_own(tmp_path) -> None:
    saved = tmp_path / "checkpoints"
    for error in (OSError(errno.ENOSPC, "full"), PermissionError(errno.EACCES, "no", str(saved))):
        with pytest.raises(CheckpointError), faults.explained(tmp_path, lambda: ""):
            raise error
    other = FileNotFoundError(errno.ENOENT, "no such file", "/elsewhere/chat.jinja")
    with pytest.raises(FileNotFoundError) as caught, faults.explained(tmp_path, lambda: ""):
        raise other
    assert caught.value is other


def test_only_an_error_that_says_so_is_one_of_memory(tmp_path) -> None:
    own = RuntimeError("shape mismatch in a row")
    with pytest.raises(RuntimeError) as caught, faults.explained(tmp_path, lambda: "less"):
        raise own
    assert caught.value is own
    full = RuntimeError("CUDA error: out of memory")
    with pytest.raises(MemoryShortError), faults.explained(tmp_path, lambda: "less"):
        raise full


def test_a_hub_out_of_reach_is_a_refusal_with_a_fix(tmp_path, monkeypatch) -> None:
    """`train.push_to_hub` makes a repository first; httpx's errors are of no built-in kind."""
    error = type("ConnectError", (Exception,), {"__module__": "httpx2"})

    def init_hf_repo(*_: object, **__: object) -> None:
        raise error("[Errno 111] Connection refused")

    monkeypatch.setattr("transformers.Trainer.init_hf_repo", init_hf_repo)
    words = ["train.max_steps=2", "train.eval_strategy=no"]
    pushed = load_recipe("tiny_lora_fp8", [*words, "train.push_to_hub=true"])
    with pytest.raises(ConfigError, match="Connection refused") as caught:
        train(pushed, out=tmp_path, console=Console(quiet=True))
    assert caught.value.fix.startswith("~train.push_to_hub, ")
    assert not list(tmp_path.glob("*/*"))
