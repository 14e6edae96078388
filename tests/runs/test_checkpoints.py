"""Which checkpoints are whole, which one is meant, and what may differ when training goes on."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import shlex
import shutil
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers import TrainerState

from finetune import load_recipe
from finetune.data.image_forms import SEEN
from finetune.errors import ConfigError
from finetune.runs.checkpoints import (
    KEPT,
    MANIFEST,
    SAVING,
    STATE,
    Checkpoint,
    checkpoints_in,
    find_checkpoint,
    hashes_of,
    newest_checkpoint,
    resume_command,
    superfluous,
)
from finetune.runs.folder import RunFolder
from finetune.runs.last_model import save_last_model
from finetune.training import faults
from finetune.training.checkpoints.resume import (
    FIXED,
    FREE,
    RULES,
    check_images,
    check_resume,
    facts_of,
    fitted_of,
    images_of,
    moved_rows,
    rows_hash,
)
from finetune.training.checkpoints.writing import CheckpointKeeper, _rename, refuse_unreadable
from tests.benchmarks import resume_table
from tests.benchmarks.resume_table import empty, flip_a_bit, truncate
from tests.run_folders import make_run, sign

FILES = ("model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", STATE)


def make(folder: Path, step: int, *, facts: dict | None = None, eval_loss: float = 1.0) -> Path:
    """A checkpoint as training writes it, with made-up tensors."""
    at = folder / f"checkpoint-{step}"
    at.mkdir(parents=True)
    for name in FILES[:-1]:
        (at / name).write_bytes(f"{name} of step {step}".encode() * 40)
    log = [{"step": step, "loss": 2.0}, {"step": step, "eval_loss": eval_loss}]
    state = {"global_step": step, "log_history": log}
    (at / STATE).write_text(json.dumps(state))
    sums = zip(FILES, hashes_of([at / name for name in FILES]), strict=True)
    files = {n: {"bytes": (at / n).stat().st_size, "sha256": value} for n, value in sums}
    manifest = {"step": step, **(facts or {}), "files": files}
    (at / MANIFEST).write_text(json.dumps(manifest))
    return at


@pytest.mark.parametrize("name", [*FILES, MANIFEST])
@pytest.mark.parametrize("damage", [Path.unlink, empty, truncate, flip_a_bit])
def test_a_damaged_checkpoint_is_passed_over(damage, name, tmp_path) -> None:
    """Any file, missing, empty, cut or with one bit flipped: the one before it is taken."""
    if name == MANIFEST and damage in (Path.unlink, flip_a_bit):
        return  # without one it is of another program, whose files are not compared
    make(tmp_path, 10)
    newest = make(tmp_path, 20)
    assert find_checkpoint(str(tmp_path))[0].step == 20
    damage(newest / name)
    found, broken = find_checkpoint(str(tmp_path))
    assert found.step == 10
    assert name in broken[newest]
    with pytest.raises(ConfigError, match=r"no checkpoint in .* is complete\n"):
        find_checkpoint(str(newest))


def test_without_any_whole_one_each_reason_is_given(tmp_path) -> None:
    for step in (1, 2):
        empty(make(tmp_path, step) / "optimizer.pt")
    with pytest.raises(ConfigError, match=r"checkpoint-2: optimizer.pt has 0 bytes[\s\S]*-1: "):
        find_checkpoint(str(tmp_path))


def test_other_folders_are_no_checkpoints(tmp_path) -> None:
    make(tmp_path, 10)
    shutil.copytree(tmp_path / "checkpoint-10", tmp_path / "checkpoint-10.bak")
    shutil.copytree(tmp_path / "checkpoint-10", tmp_path / "checkpoint-old-20")
    make(tmp_path / SAVING, 30)  # its process was killed before it could rename it
    (tmp_path / "checkpoint-40").write_text("a file")
    assert list(checkpoints_in(tmp_path)) == [10]
    assert newest_checkpoint(tmp_path) == tmp_path / "checkpoint-10"


@pytest.mark.parametrize(
    ("name", "step"),
    [("", 30), ("/last", 30), ("/latest", 30), ("/best", 20), ("/checkpoints", 30)],
)
def test_names_of_checkpoints(name, step, tmp_path) -> None:
    for at, loss in ((10, 2.0), (20, 1.0), (30, 1.5)):
        make(tmp_path / "run" / "checkpoints", at, eval_loss=loss)
    assert find_checkpoint(f"{tmp_path}/run{name}")[0].step == step


def test_the_best_checkpoint_of_rl_has_the_highest_reward(tmp_path, cli) -> None:
    """Its eval loss says nothing: here the lowest is of the worst answers."""
    rows, facts = tmp_path / "run" / "checkpoints", {"config": {"train": {"method": "grpo"}}}
    for at, reward in ((10, 0.5), (20, 0.75), (30, 0.25)):
        state = make(rows, at, facts=facts, eval_loss=-reward) / STATE
        logged = json.loads(state.read_text())
        logged["log_history"][1] |= {"eval_loss": reward, "eval_reward": reward}
        state.write_text(json.dumps(logged))
        sign(state.parent)
    assert find_checkpoint(f"{tmp_path}/run/best")[0].step == 20
    (rows.parent / "config.yaml").write_text("")
    (rows.parent / "run.json").write_text("{}")
    found = json.loads(cli("checkpoints", rows.parent, "--json").out)["checkpoints"]
    assert [row["eval_reward"] for row in found] == [0.5, 0.75, 0.25]
    assert not {"loss", "eval_loss"} & found[0].keys()


def test_one_of_another_program_needs_its_parts(tmp_path) -> None:
    at = make(tmp_path, 5)
    (at / MANIFEST).unlink()
    assert not Checkpoint(at).problem(contents=True)
    for name in ("optimizer.pt", "scheduler.pt", "model.safetensors"):
        kept = (at / name).read_bytes()
        empty(at / name)
        assert Checkpoint(at).problem() == f"{name} is empty"
        (at / name).unlink()
        assert "is missing" in Checkpoint(at).problem()
        (at / name).write_bytes(kept)


def test_a_model_alone_is_no_state_of_training(tmp_path) -> None:
    at = make(tmp_path, 5, facts={"only_model": True})
    assert "train.save_only_model" in Checkpoint(at).problem()


@pytest.mark.parametrize(
    ("last", "best", "named", "left"),
    [
        (1, 1, "", [20, 40]),
        (1, 0, "", [40]),
        (2, 2, "", [20, 30, 40]),
        (9, 1, "", [10, 20, 30, 40]),
        (2, 0, "checkpoint-10", [10, 40]),
        (1, 0, "checkpoint-10", [10, 40]),
        (2, 0, "checkpoint-40", [30, 40]),
    ],
)
def test_the_newest_and_the_best_are_kept(last, best, named, left, tmp_path) -> None:
    """Whatever the times of the files are: the last one looks like the oldest."""
    losses = {10: 3.0, 20: 1.0, 30: 2.0, 40: 4.0}
    saved = [Checkpoint(make(tmp_path, step, eval_loss=x)) for step, x in losses.items()]
    os.utime(saved[-1].folder, (0, 0))
    gone = superfluous(saved, last, best, named=named)
    assert [one.step for one in saved if one not in gone] == left


def test_what_a_user_keeps_outlives_every_limit_and_is_resumed_from(cli, tmp_path) -> None:
    run = make_run(tmp_path / "runs" / "run")
    at = run / "checkpoints"
    for step, loss in {10: 3.0, 20: 4.0, 30: 2.0, 40: 1.0}.items():
        make(at, step, eval_loss=loss)
    words = ("checkpoints", str(run))
    assert cli(*words, "keep", "10", "20").code == 0
    rows = json.loads(cli(*words, "--json").out)["checkpoints"]
    assert [row["step"] for row in rows if row["kept"]] == [10, 20]
    assert cli(*words).out.count("complete, kept") == 2
    saved = [Checkpoint(path) for path in checkpoints_in(at).values()]
    for last, best, named in ((1, 0, ""), (1, 1, ""), (2, 0, "checkpoint-20"), (9, 0, "")):
        left = {one.step for one in saved} - {
            s.step for s in superfluous(saved, last, best, named=named)
        }
        assert {10, 20, 40} <= left
        assert (30 in left) == (last > 1)
    assert find_checkpoint(str(at / "checkpoint-10"))[0].step == 10


def test_a_run_that_saves_a_kept_step_again_leaves_the_kept_one(tmp_path) -> None:
    kept = make(tmp_path, 10, eval_loss=7.0)
    (kept / KEPT).touch()
    for loss in (1.0, 2.0):
        _rename(make(tmp_path / SAVING, 10, eval_loss=loss), kept)
    assert Checkpoint(tmp_path / "checkpoint-10").rank == 2.0
    assert find_checkpoint(f"{tmp_path}/checkpoint-10.kept-1")[0].rank == 7.0


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["keep", "11"], "there are: 10, 20"),
        (["keep"], "checkpoints RUN keep STEP"),
        (["drop", "10"], "checkpoints RUN keep STEP"),
        (["keep", "20"], "checkpoint 20 is damaged"),
    ],
)
def test_what_cannot_be_kept_is_said(typed, said, cli, tmp_path) -> None:
    run = make_run(tmp_path / "runs" / "run")
    make(run / "checkpoints", 10)
    truncate(make(run / "checkpoints", 20) / "optimizer.pt")
    found = cli("checkpoints", str(run), *typed)
    assert found.code == 2
    assert said in found.err
    assert not Checkpoint(run / "checkpoints" / "checkpoint-20").is_kept


def test_an_eval_loss_without_a_number_is_not_the_best(tmp_path) -> None:
    losses = {1: float("nan"), 2: 9.0, 3: 10.0}
    saved = [Checkpoint(make(tmp_path, step, eval_loss=x)) for step, x in losses.items()]
    assert [one.step for one in superfluous(saved, 1, 1)] == [1]


def test_a_best_checkpoint_that_is_gone_is_said_and_forgotten(tmp_path) -> None:
    """The trainer forgets it but not its loss, and ends with the last weights for the best."""
    saved = make(tmp_path, 3)
    best = {"best_model_checkpoint": "/gone/checkpoint-2", "best_metric": 1.0}
    (saved / STATE).write_text(json.dumps(json.loads((saved / STATE).read_text()) | best))
    state = TrainerState(best_metric=1.0, best_global_step=2)
    with pytest.warns(UserWarning, match="checkpoint-2, the best until here, is gone"):
        CheckpointKeeper("BF16", {}, saved).on_train_begin(None, state, None)
    assert (state.best_global_step, state.best_metric) == (None, None)


@pytest.mark.parametrize(("limit", "left"), [(None, {1, 2, 3}), (2, {2, 3}), (1, {3})])
def test_a_limit_of_the_trainer_is_how_many_checkpoints_stay(limit, left, tmp_path) -> None:
    for step in (1, 2, 3):
        make(tmp_path, step)
    (tmp_path / SAVING).mkdir()
    keeper = CheckpointKeeper("BF16", {}, None)
    keeper.trainer = SimpleNamespace(state=TrainerState())
    keeper._delete_older(tmp_path, limit)
    assert set(checkpoints_in(tmp_path)) == left


# ------------------------------------------------------------------------------- what may differ


BEGAN = load_recipe(
    "tiny_lora_fp8",
    ["train.max_steps=40", "train.per_device_train_batch_size=4", "train.optim=adamw_torch"],
).config
SHAPES = ("lora.r=4", "lora.target_modules=[q_proj]", "train.optim=sgd", "lora.use_dora=true")


def at(tmp_path, **facts) -> Checkpoint:
    return Checkpoint(make(tmp_path, 10, facts=facts_of(BEGAN, "rows", 1) | facts))


@pytest.mark.parametrize("key", ["train.learning_rate", "data.max_rows", "lora.alpha"])
def test_other_mathematics_has_to_be_allowed_by_name(key, tmp_path) -> None:
    config = load_recipe_like([f"{key}=9"])
    checkpoint = at(tmp_path)
    with pytest.raises(ConfigError, match=rf"resuming would change {key}\n[\s\S]*allow=\[{key}\]"):
        check_resume(checkpoint, config, facts_of(config, "rows", 1))
    allowed = load_recipe_like([f"{key}=9", f"resume.allow=[{key}]"])
    assert list(check_resume(checkpoint, allowed, facts_of(allowed, "rows", 1))) == [key]


def test_another_base_under_the_adapters_has_to_be_allowed(tmp_path) -> None:
    """A checkpoint holds the adapters alone: they went on over whatever the folder held by then."""
    folder = tmp_path / "base"
    folder.mkdir()
    (folder / "model.safetensors").write_text("one")
    overrides = [f"model.name={folder}"]
    lora = load_recipe("tiny_lora_fp8", overrides, check_train=False).config
    full = load_recipe("tiny_full_fp8", overrides, check_train=False).config
    facts = facts_of(lora, "rows", 1)
    saved = Checkpoint(make(tmp_path, 1, facts=facts))
    assert check_resume(saved, lora, facts) == {}
    (folder / "model.safetensors").write_text("two")
    with pytest.raises(ConfigError, match=r"would change model\.weights[\s\S]*put the files"):
        check_resume(saved, lora, facts_of(lora, "rows", 1))
    overrides += ["resume.allow=[model.weights]"]
    allowed = load_recipe("tiny_lora_fp8", overrides, check_train=False).config
    assert list(check_resume(saved, allowed, facts_of(allowed, "rows", 1))) == ["model.weights"]
    assert facts_of(full, "rows", 1)["model_files"] == {}


@pytest.mark.parametrize(
    ("file", "key"),
    [
        ("mine/rewards.py", "train.reward_funcs.rewards.py"),
        ("mine/marks.py", "train.reward_funcs.marks.py"),
        ("teacher/model.safetensors", "train.teacher_model_name_or_path.weights"),
        ("teacher/tokenizer.json", "train.teacher_model_name_or_path.tokenizer.json"),
        ("base/model.safetensors", "model.weights"),
        ("chat.jinja", "train.chat_template_path.chat.jinja"),
    ],
)
def test_every_file_that_a_step_depends_on_is_compared(file, key, tmp_path, monkeypatch) -> None:
    """By content: a run went on by other rewards, by another teacher and from another reference."""
    monkeypatch.chdir(tmp_path)
    written = {
        "mine/rewards.py": "import json, datasets, marks\n",
        "mine/marks.py": "import torch\n",
        "datasets/rows.jsonl": "{}",  # a folder, and no module
        "teacher/model.safetensors": "one",
        "teacher/tokenizer.json": "{}",
        "base/model.safetensors": "one",
        "chat.jinja": "{{ messages }}",
    }
    for name, text in written.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(text)
    method, own = "grpo", ["model.name=base", "train.reward_funcs=[mine/rewards.py:f]"]
    if file.startswith("teacher"):
        method, own = "distill", ["train.teacher_model_name_or_path=teacher"]
    own += ["train.chat_template_path=chat.jinja"]
    config = load_recipe(f"tiny_{method}_fp8", own, check_train=False).config
    facts = facts_of(config, "rows", 1)
    saved = Checkpoint(make(tmp_path, 1, facts=facts))
    Path(file).touch()
    assert check_resume(saved, config, facts_of(config, "rows", 1)) == {}
    Path(file).write_text(f"{written[file]} ")
    with pytest.raises(ConfigError, match=rf"would change {key}\n"):
        check_resume(saved, config, facts_of(config, "rows", 1))


@pytest.mark.parametrize(
    ("overrides", "epoch", "said"),
    [
        ([], 0.5, "ends at step 10, and the checkpoint is at step 10"),
        (["~train.max_steps", "train.num_train_epochs=2"], 2.0, "ends at epoch 2, and"),
        (["~train.max_steps"], 3.0, "ends at epoch 3, and"),
    ],
)
def test_a_checkpoint_behind_which_no_step_is_left_is_refused(
    overrides, epoch, said, tmp_path
) -> None:
    """By epochs a run went on, trained nothing and ended well, with a receipt of nothing."""
    saved = at(tmp_path)
    saved.state["epoch"] = epoch
    overrides = overrides or ["train.max_steps=10"]
    config = load_recipe("tiny_lora_fp8", overrides).config
    with pytest.raises(ConfigError, match=rf"{said}[\s\S]*no step is left") as caught:
        check_resume(saved, config, facts_of(config, "rows", 1))
    more, allowed = shlex.split(caught.value.fix.partition(", or")[0])
    going = load_recipe("tiny_lora_fp8", [*overrides, more, allowed]).config
    with pytest.raises(ConfigError, match="resuming would change"):
        check_resume(saved, going, facts_of(going, "rows", 1))


def ended(folder: Path, *, best: str = "", until: int = 8) -> Path:
    """A run that was stopped by a signal in the evaluation behind its last step."""
    run = make_run(folder / "tiny_full_fp8" / "20260101-000000-aaaa", steps=8)
    receipt = json.loads((run / "receipt.json").read_text())
    receipt["run"] |= {"interrupted": True, "exit_code": 143}
    (run / "receipt.json").write_text(json.dumps(receipt))
    for step in (4, 8):
        checkpoint = make(run / "checkpoints", step)
        state = json.loads((checkpoint / STATE).read_text())
        state |= {"max_steps": until, "best_model_checkpoint": f"/elsewhere/{best}"}
        (checkpoint / STATE).write_text(json.dumps(state))
        sign(checkpoint)
    if best:
        config = (run / "config.yaml").read_text()
        best_last = "\ntrain:\n  load_best_model_at_end: true\n"
        (run / "config.yaml").write_text(config.replace("\ntrain:\n", best_last))
    return run


@pytest.mark.parametrize(("best", "step"), [("", 8), ("checkpoint-4", 4)])
def test_a_run_whose_model_alone_is_missing_gets_it(best, step, tmp_path, cli) -> None:
    """Resuming was refused, since no step is left: the model of a trained run was out of reach."""
    run = ended(tmp_path, best=best)
    assert RunFolder(run).state == "stopped"
    done = cli("resume", run)
    assert (done.code, done.err) == (0, "")
    assert f"model of checkpoint-{step} is saved in {run / 'model'}" in done.out
    assert [file.name for file in (run / "model").iterdir()] == ["model.safetensors"]
    assert f"of step {step}" in (run / "model" / "model.safetensors").read_text()
    assert RunFolder(run).state == "finished"
    assert "exit_code" not in RunFolder(run).receipt["run"]
    again = cli("resume", run)
    assert again.code == 2
    assert "has ended" in again.err
    assert f"resume {run} train.max_steps=16 'resume.allow=[train.max_steps]'" in again.err


def test_a_model_without_a_receipt_is_said_to_be_unproven(tmp_path, cli) -> None:
    run = ended(tmp_path)
    (run / "receipt.json").unlink()
    (run / "report.json").unlink()
    assert "killed before its receipt: nothing proves what ran" in cli("resume", run).out
    assert (run / "model").is_dir()


def test_other_processes_than_the_first_write_no_model(tmp_path) -> None:
    run = ended(tmp_path)
    for _ in range(2):
        assert save_last_model(run, writes=False) == run / "checkpoints" / "checkpoint-8"
        (run / "model").mkdir(exist_ok=True)  # by the first one, meanwhile


@pytest.mark.parametrize("damage", ["step", "best", "none"])
def test_no_other_model_is_saved_for_the_last(damage, tmp_path) -> None:
    """Steps are left, the best checkpoint was deleted, or nothing was saved."""
    run = ended(tmp_path, best="checkpoint-2" * (damage == "best"), until=8 + (damage == "step"))
    if damage == "none":
        shutil.rmtree(run / "checkpoints")
    assert save_last_model(run) is None
    assert not (run / "model").exists()


def test_no_setting_changes_in_silence(tmp_path) -> None:
    """Each one is refused with both values, or the table names the rule by which it may."""
    rows = resume_table.settings(tmp_path)
    assert len(rows) > 180
    verdicts = {row.key: row for row in rows}
    for row in rows:
        if row.verdict == "refused":
            assert row.values_shown, row
            assert row.allow_named, row
        else:
            assert row.verdict in (*RULES, "refused: tensors do not fit"), row
    for key in (
        "train.learning_rate",
        "train.seed",
        "train.max_length",
        "train.dataloader_drop_last",
        "data.seed",
        "data.eval_fraction",
        "model.dtype",
        "model.name",
        "lora.dropout",
    ):
        assert verdicts[key].verdict == "refused"
    assert verdicts["lora.r"].verdict == "refused: tensors do not fit"


def load_recipe_like(overrides: list[str]):
    from finetune.config.recipe import with_overrides

    return with_overrides(BEGAN, overrides)


@pytest.mark.parametrize("override", SHAPES)
def test_what_tensors_are_shaped_by_cannot_be_allowed(override, tmp_path) -> None:
    key = override.partition("=")[0]
    config = load_recipe_like([override, f"resume.allow=[{key}]"])
    with pytest.raises(ConfigError, match=rf"would change {key}\n[\s\S]*do not fit"):
        check_resume(at(tmp_path), config, facts_of(config, "rows", 1))


def test_rows_and_processes_are_compared(tmp_path) -> None:
    checkpoint = at(tmp_path)
    for rows, processes, key in (("others", 1, "data.rows"), ("rows", 2, "processes")):
        with pytest.raises(ConfigError, match=f"would change {key}"):
            check_resume(checkpoint, BEGAN, facts_of(BEGAN, rows, processes))


@pytest.mark.parametrize("most", [3, 1000])
def test_images_that_changed_under_their_names_are_compared(most, tmp_path, monkeypatch) -> None:
    """Any of 7 files, each of one row; the last of them is one of two in its row."""
    monkeypatch.setattr("finetune.training.checkpoints.resume.HASHES", most)
    files = [tmp_path / f"{number}.png" for number in range(8)]
    for number, file in enumerate(files):
        file.write_bytes(b"pixels")
        os.utime(file, (number, number))
    own = [*([file] for file in files[:6]), files[6:], []]

    def rows_of(seen: dict[Path, str]) -> Dataset:
        given = [[{"path": str(file), "bytes": None} for file in some] for some in own]
        hashes = [[seen.get(file, file.name) for file in some] for some in own]
        return Dataset.from_dict({"images": given, SEEN: hashes})

    folder = tmp_path / "checkpoint-3"
    folder.mkdir()
    (folder / MANIFEST).write_text(json.dumps({"images": images_of(rows_of({}))}))
    assert check_images(Checkpoint(folder), BEGAN, rows_of({})) == {}
    for file in files:
        time = file.stat().st_mtime
        os.utime(file, (100, 100))  # written last
        changed = rows_of({file: "others"})
        with pytest.raises(ConfigError, match=r"would change data\.images") as error:
            check_images(Checkpoint(folder), BEGAN, changed)
        assert f"other pixels of {file}" in error.value.why
        for allowed, found in (("data.images", ["data.images"]), ("data.rows", [])):
            config = load_recipe_like([f"resume.allow=[{allowed}]"])
            assert [*check_images(Checkpoint(folder), config, changed)] == found
        os.utime(file, (time, time))
    with pytest.raises(ConfigError, match=r"would change data\.images"):  # a larger one, left out
        check_images(Checkpoint(folder), BEGAN, rows_of({}).select(range(7)))
    (folder / MANIFEST).write_text("{}")  # of before, or of another program
    assert check_images(Checkpoint(folder), BEGAN, rows_of({files[0]: "others"})) == {}
    assert images_of(Dataset.from_dict({"input_ids": [[1]]})) == {}


@pytest.mark.parametrize(
    ("processes", "override", "says"),
    [
        (2, "train.gradient_accumulation_steps=1", "left out"),
        (1, "train.gradient_accumulation_steps=2", "left out"),
        (1, "train.per_device_train_batch_size=2", "trained again"),
        (2, "train.per_device_train_batch_size=2", ""),
    ],
)
def test_rows_that_another_batch_loses_or_repeats_are_said(
    processes, override, says, tmp_path
) -> None:
    """The trainer passes over a checkpoint's steps in batches of today."""
    checkpoint, config = at(tmp_path), load_recipe_like([override])
    facts = facts_of(config, "rows", processes)
    with pytest.raises(ConfigError) as caught:
        check_resume(checkpoint, config, facts)
    moved = moved_rows(checkpoint, facts)
    assert [says in line for line in moved] == [True] * bool(says)
    assert all(line in caught.value.why for line in moved)


def test_a_smaller_batch_of_few_rows_stays_until_another_one_is_asked_for(tmp_path) -> None:
    made = {"least_rows": 10, "batch": [1, 2]}
    few, other = "data.min_steps=50", "train.per_device_train_batch_size=8"
    began = {**facts_of(load_recipe_like([few]), "rows", 1), "fitted": made}

    def kept(*overrides: str) -> dict[str, Any]:
        return fitted_of(began, facts_of(load_recipe_like([*overrides]), "rows", 1))

    assert kept(few) == made
    assert kept(few, other) == {"least_rows": 10, "batch": None}
    assert kept("~data.min_steps") == {}


def test_precision_may_change_and_is_told(tmp_path) -> None:
    config = load_recipe_like(["precision.compute=bf16"])
    changed = check_resume(at(tmp_path), config, facts_of(config, "rows", 1))
    assert changed["precision.compute"] == ("fp8", "bf16")


def test_every_free_setting_is_one(tmp_path) -> None:
    """A pattern that matches nothing would be a misspelt key, which then is refused or missed."""
    import fnmatch

    from trl import SFTConfig

    sections = {
        f"{section}.{key}"
        for section, field in type(BEGAN).model_fields.items()
        for part in (field.annotation, *getattr(field.annotation, "__args__", ()))
        for key in getattr(part, "model_fields", {})
    }
    known = sections | {f"train.{field.name}" for field in dataclasses.fields(SFTConfig)} | {"lora"}
    for pattern in (*FREE, *FIXED):
        optional = ("lora.target_parameters", "lora.exclude_modules", "lora.layers_to_transform")
        assert fnmatch.filter(known, pattern) or pattern in optional, pattern


def test_rows_have_one_hash_in_one_order() -> None:
    from datasets import Dataset

    rows = Dataset.from_dict({"text": [f"row {i}" for i in range(3000)]})
    same = Dataset.from_dict({"text": [f"row {i}" for i in range(3000)]})
    assert rows_hash(rows, None) == rows_hash(same, None)
    one = Dataset.from_dict({"text": [f"row {i + (i == 2999)}" for i in range(3000)]})
    different = [
        rows_hash(*parts)
        for parts in (
            (rows, None),
            (rows, rows),
            (one, None),
            (rows.shuffle(seed=1), None),
            (rows.select(range(2999)), None),
            (rows.rename_column("text", "t"), None),
        )
    ]
    assert len(set(different)) == len(different)


@pytest.mark.parametrize(
    ("dtype", "sharding", "processes", "refused"),
    [
        ("bfloat16", "~train.fsdp", 2, True), ("bfloat16", "train.fsdp=true", 1, True),
        ("bfloat16", "train.fsdp=true", 4, False), ("float32", "~train.fsdp", 1, False),
    ],
)  # fmt: skip
def test_float32_weights_of_fsdp_are_not_rounded(
    dtype, sharding, processes, refused, tmp_path
) -> None:
    """FSDP2 trains float32 weights of a BF16 model; one process would take them as BF16."""
    words = ["train.max_steps=40", f"model.dtype={dtype}"]
    began = load_recipe("tiny_full_bf16", [*words, "train.fsdp=true"]).config
    saved = Checkpoint(make(tmp_path, 10, facts=facts_of(began, "rows", 2)))
    words += [sharding, "resume.allow=[processes]"]
    now = load_recipe("tiny_full_bf16", words).config
    if not refused:
        check_resume(saved, now, facts_of(now, "rows", processes))
        return
    with pytest.raises(ConfigError, match=r"model.dtype: float32, as FSDP2[\s\S]*bfloat16 now"):
        check_resume(saved, now, facts_of(now, "rows", processes))


def test_shards_are_not_read(tmp_path) -> None:
    """torch 2.13 reads their `.metadata` with `pickle.load`; none is taken."""
    make(tmp_path, 10)
    newest = make(tmp_path, 20)
    (newest / "pytorch_model_fsdp_0").mkdir()
    (newest / "pytorch_model_fsdp_0" / ".metadata").write_bytes(b"")
    found, broken = find_checkpoint(str(tmp_path))
    assert found.step == 10
    assert "FSDP" in broken[newest]


# ---------------------------------------------------------------------------- reading and writing


class Code:
    """Would make a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


def other_zip(file: Path) -> None:
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("x", "y")


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (truncate, "damaged"), (empty, "damaged"), (other_zip, "damaged"),
        (lambda file: file.write_bytes(b"hello world\n"), "damaged"),
        (lambda file: torch.save(Code(file.parent / "ran"), file), "more than tensors"),
        (lambda file: file.write_bytes(pickle.dumps(Code(file.parent / "ran"), 2)), "damaged"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_read_is_refused(damage, says, tmp_path) -> None:
    """As in a checkpoint of another program, whose files no manifest lists."""
    for name in ("optimizer.pt", "model.safetensors"):
        file, tensors = tmp_path / name, {"a": torch.ones(1000)}
        torch.save(tensors, file) if name == "optimizer.pt" else save_file(tensors, file)
        refuse_unreadable(tmp_path)
        damage(file)
        with pytest.raises(
            ConfigError, match=says if name == "optimizer.pt" else "damaged"
        ) as seen:
            refuse_unreadable(tmp_path)
        assert name in str(seen.value)
        file.unlink()
    assert not (tmp_path / "ran").exists()


def test_a_write_that_is_cut_short_is_of_the_disk(tmp_path) -> None:
    (tmp_path / "optimizer.pt").symlink_to("/dev/full")
    with pytest.raises(RuntimeError) as seen:
        torch.save({"a": torch.ones(100_000)}, tmp_path / "optimizer.pt")
    assert faults.is_of_the_disk(seen.value)
    with pytest.raises(SafetensorError) as seen:
        save_file({"a": torch.ones(10)}, tmp_path / "no folder" / "model.safetensors")
    assert faults.is_of_the_disk(seen.value)


@pytest.mark.parametrize(
    ("processes", "here", "starts"),
    [
        (1, None, "python -m finetune resume "),
        (8, None, "torchrun --standalone --nproc_per_node=8 -m finetune resume "),
        (8, 8, "torchrun --standalone --nproc_per_node=8 -m finetune resume "),
        (16, 8, "torchrun --nnodes=2 --nproc_per_node=8 --rdzv"),
    ],
)
def test_a_run_goes_on_in_as_many_processes(processes, here, starts, tmp_path, monkeypatch) -> None:
    """`python -m finetune resume` of a run of several would be refused, or change the batch."""
    make(tmp_path / "checkpoints", 10, facts={"processes": processes})
    if here:
        monkeypatch.setenv("WORLD_SIZE", str(processes))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(here))
    assert resume_command(tmp_path).startswith(starts)
    assert resume_command(tmp_path).endswith(f"-m finetune resume {tmp_path}")


def test_a_run_that_saved_nothing_is_said_to_be_one(tmp_path) -> None:
    (tmp_path / "config.yaml").write_text("model: {}\n")
    with pytest.raises(ConfigError, match=r"there is no checkpoint[\s\S]*save_strategy=steps"):
        find_checkpoint(f"{tmp_path}/last")
