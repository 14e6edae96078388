"""Every recipe trains; FP8 ends within 2 % of BF16; a run folder is complete and can be resumed."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from finetune import load_recipe, train
from finetune.config.paths import TINY_LLAMA
from finetune.runs.lookup import read_run
from tests.conftest import slow_but
from tests.run_folders import sign

QUIET = Console(quiet=True)
QUICK_RECIPES = ["tiny_lora_fp8", "bdh_tiny_full_fp8"]
"""One of each method; `RECIPES` adds one of each model and twin.

The rest differ from these in sizes, which a shrunken run does not have, and every recipe is planned
in tests/precision/test_planner.py.
"""
RECIPES = [
    *QUICK_RECIPES,
    "gpt2_124m_full_fp8", "llama_8b_qlora_bf16", "llama_8b_full_fp8",
]  # fmt: skip
SMALL = (
    "data.name=builtin:harbour",
    "data.max_rows=48",
    "data.prompts=[hello]",
    "eval.at_start=false",
    "precision.emulation=allow",
    "train.max_steps=3",
    "train.warmup_steps=0",
    "train.per_device_train_batch_size=2",
    "train.gradient_accumulation_steps=1",
    "train.max_length=128",
    "train.save_strategy=no",
    "~train.fsdp",
    "~train.fsdp_config",
    "~model.pad_token",
    "~data.eval_split",
)


TRAINING_ALONE = ("train.eval_strategy=no", "eval.samples=false")
"""Less than half the time of a short run, for tests that do not look at evaluation."""
SMALL_BATCHES = (*TRAINING_ALONE, "train.per_device_train_batch_size=2", "data.max_rows=24")


@pytest.fixture(scope="session")
def tiny_gpt2(tmp_path_factory) -> str:
    """A folder with a two-layer GPT-2 shape and the packaged tokenizer."""
    from transformers import AutoTokenizer, GPT2Config

    folder = tmp_path_factory.mktemp("gpt2")
    tokenizer = AutoTokenizer.from_pretrained(TINY_LLAMA)
    tokenizer.save_pretrained(folder)
    GPT2Config(
        n_embd=64, n_layer=2, n_head=2, n_positions=128, vocab_size=len(tokenizer),
        bos_token_id=1, eos_token_id=2, pad_token_id=0,
    ).save_pretrained(folder)  # fmt: skip
    return str(folder)


@pytest.mark.parametrize("name", slow_but(["tiny_lora_fp8"], RECIPES))
def test_every_recipe_trains(name, tmp_path, tiny_gpt2) -> None:
    """The recipe as it stands, on a small model and a few rows."""
    small = {"gpt2": tiny_gpt2, "bdh": "builtin:bdh_tiny"}
    model = small.get(name.partition("_")[0], "builtin:tiny_llama")
    overrides = [*SMALL, f"model.name={model}", "eval.samples=false"]
    if name.endswith("_bf16"):
        overrides.remove("precision.emulation=allow")
    report = train(load_recipe(name, overrides), out=tmp_path, console=QUIET)
    receipt = json.loads((report.folder / "receipt.json").read_text())
    fp8 = name.endswith("_fp8")
    assert receipt["status"] == "proven"
    assert receipt["precision"]["asked"] == ("fp8" if fp8 else "bf16")
    assert receipt["precision"]["ran"] == receipt["precision"]["asked"]
    assert (receipt["fp8_flop_share"] > 0.3) == fp8
    t = receipt["trainable"]
    assert t["before"] == t["after"] == t["in_optimizer"] == t["moved"] + t["below_resolution"]
    moved = receipt["movement"]
    if any(group["type"] == "bfloat16" for group in moved["now"]["groups"]):
        assert moved["rounding"] == "stochastic", "to nearest, most updates would be lost"
    assert (report.folder / "model").is_dir()


@pytest.mark.long
@pytest.mark.parametrize("method", ["full"])
def test_fp8_ends_within_two_percent_of_bf16(method, tmp_path) -> None:
    """The shipped pair, whole: same seed, same data; the loss falls and the style is learnt."""
    reports = {}
    for precision in ("fp8", "bf16"):
        recipe = load_recipe(
            f"tiny_{method}_{precision}", ["train.eval_steps=50", "eval.at_start=false"]
        )
        reports[precision] = train(recipe, out=tmp_path, console=QUIET)
    fp8, bf16 = reports["fp8"], reports["bf16"]
    assert fp8.eval_loss == pytest.approx(bf16.eval_loss, rel=0.02)
    assert fp8.folder.parent != bf16.folder.parent, "never the same folder"
    for report in reports.values():
        assert report.final_loss < 0.5 * report.first_loss
        assert all(s.answer.startswith("Ahoy!") for s in report.samples)
        assert all(s.answer.endswith("Fair winds.") for s in report.samples)


def test_run_folder_and_resuming_is_bit_identical(tmp_path) -> None:
    """Delayed scaling state is stored beside the checkpoint: resuming changes no bit."""
    overrides = [
        "train.max_steps=4", "train.save_strategy=steps", "train.save_steps=2",
        "train.logging_steps=1", *SMALL_BATCHES,
    ]  # fmt: skip
    whole = train(load_recipe("tiny_full_fp8", overrides), out=tmp_path, console=QUIET)
    checkpoint = whole.folder / "checkpoints" / "checkpoint-2"
    assert (checkpoint / "fp8_scaling.safetensors").is_file()
    overrides.append(f"train.resume_from_checkpoint={checkpoint}")
    resumed = train(load_recipe("tiny_full_fp8", overrides), out=tmp_path, console=QUIET)
    assert resumed.receipt.status == "proven"
    a, b = (load_file(r.folder / "model" / "model.safetensors") for r in (whole, resumed))
    assert a.keys() == b.keys()
    assert all(torch.equal(a[key], b[key]) for key in a)
    rows = [json.loads(x) for x in (whole.folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, 5))
    assert {"loss", "learning_rate", "grad_norm", "tokens_per_s", "precision"} <= rows[2].keys()
    expected = {"run.json", "config.yaml", "metrics.jsonl", "receipt.json", "report.json", "model"}
    assert expected <= {p.name for p in whole.folder.iterdir()}
    assert read_run(whole.folder).state == "finished"
    again = load_recipe(str(whole.folder / "config.yaml"))
    assert again.name == "tiny_full_fp8"
    assert again.config == load_recipe("tiny_full_fp8", overrides[:-1]).config
    assert_plain_hugging_face_weights(whole.folder / "model")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["group_by_length", "batch_rebalance"])
def test_a_run_goes_on_with_the_rows_that_its_epoch_has_left(strategy, tmp_path) -> None:
    """In the second epoch: Transformers' order by length is another one when a run goes on."""
    overrides = [
        "data.max_rows=16", "data.eval_fraction=0",
        "~train.max_steps", "train.num_train_epochs=2", "train.packing=false",
        "train.eval_strategy=no", "train.save_strategy=steps", "train.save_steps=6",
        f"train.train_sampling_strategy={strategy}", "train.logging_steps=1",
        "train.per_device_train_batch_size=4", "eval.samples=false",
    ]  # fmt: skip
    whole = train(load_recipe("tiny_lora_bf16", overrides), out=tmp_path, console=QUIET)
    checkpoint = whole.folder / "checkpoints" / "checkpoint-6"
    overrides.append(f"train.resume_from_checkpoint={checkpoint}")
    resumed = train(load_recipe("tiny_lora_bf16", overrides), out=tmp_path, console=QUIET)
    files = [r.folder / "model" / "adapter_model.safetensors" for r in (whole, resumed)]
    a, b = map(load_file, files)
    assert all(torch.equal(a[key], b[key]) for key in a)


def assert_plain_hugging_face_weights(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(TINY_LLAMA)
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["unexpected_keys"]
    assert not info["missing_keys"]
    assert model.state_dict().keys() == base.state_dict().keys()


@pytest.mark.slow
def test_the_best_checkpoint_outlives_an_interrupt_and_a_move(tmp_path) -> None:
    """Transformers deletes all but the best of a limit of 1, and takes the last for a moved one."""
    settings = ["train.max_steps=4", "train.save_strategy=steps", "train.save_steps=2"]
    settings += ["train.eval_strategy=steps", "train.eval_steps=2", "train.save_total_limit=1"]
    settings += ["train.load_best_model_at_end=true", "eval.samples=false", "eval.at_start=false"]
    settings += ["train.per_device_train_batch_size=2", "data.max_rows=24"]
    recipe = load_recipe("tiny_full_bf16", settings)
    began = train(recipe, out=tmp_path, console=QUIET, until=3).folder
    assert {path.name for path in (began / "checkpoints").glob("c*-*")} == {
        "checkpoint-2", "checkpoint-3"
    }  # fmt: skip
    moved = began.rename(tmp_path / "moved")
    state = json.loads((moved / "checkpoints" / "checkpoint-3" / "trainer_state.json").read_text())
    state["best_metric"] = 0.0  # no later one is better
    (moved / "checkpoints" / "checkpoint-3" / "trainer_state.json").write_text(json.dumps(state))
    sign(moved / "checkpoints" / "checkpoint-3")
    going = load_recipe("tiny_full_bf16", [*settings, f"train.resume_from_checkpoint={moved}"])
    ended = train(going, out=tmp_path, console=QUIET).folder
    best = load_file(moved / "checkpoints" / "checkpoint-2" / "model.safetensors")
    taken = load_file(ended / "model" / "model.safetensors")
    assert all(torch.equal(value, best[name]) for name, value in taken.items())


@pytest.mark.parametrize(
    ("setting", "module", "extra"),
    [
        ("train.report_to=wandb", "wandb", "tracking"),
        ("train.report_to=[tensorboard]", "tensorboard", "tracking"),
        ("train.optim=adamw_8bit", "bitsandbytes", "bnb"),
        ("train.optim=paged_adamw_8bit", "bitsandbytes", "bnb"),
        ("train.use_liger_kernel=true", "liger_kernel", "liger"),
    ],
)
def test_missing_extra(setting, module, extra, tmp_path, monkeypatch) -> None:
    import importlib.util

    from finetune.errors import MissingExtraError, install_hint

    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == module else find(name, *a)
    )
    with pytest.raises(MissingExtraError, match=re.escape(install_hint(extra))):
        train(load_recipe("tiny_lora_bf16", [setting]), out=tmp_path, console=QUIET)
    assert not list(tmp_path.iterdir()), "nothing was written"


@pytest.mark.long
def test_progress_on_a_terminal_names_the_precision_in_force(tmp_path) -> None:
    import io

    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=120)
    recipe = load_recipe("tiny_lora_fp8", ["train.max_steps=4", "train.logging_steps=1"])
    train(recipe, out=tmp_path, console=console)
    shown = screen.getvalue()
    assert "step 4 | epoch" in shown
    assert "FP8 frozen/rowwise" in shown
    assert "tok/s" in shown


@pytest.mark.parametrize(
    ("max_steps", "rows", "said"),
    [
        (50, 400, "50 steps = 1 epoch"),
        (50, 1600, "50 steps = 0.25 epochs; 75% of your rows are never read"),
        (-1, 1600, "50 steps = 0.25 epochs"),
        (50, 36, "50 steps = 10 epochs"),
    ],
)
def test_a_run_says_how_many_of_its_rows_its_steps_read(max_steps, rows, said) -> None:
    """Steps of two micro-batches of four rows."""
    from finetune.training.health.callbacks import extent

    loader = torch.utils.data.DataLoader(list(range(rows)), batch_size=4)  # pyright: ignore
    args: Any = SimpleNamespace(max_steps=max_steps, gradient_accumulation_steps=2)
    state: Any = SimpleNamespace(max_steps=50)
    line = extent(args, state, loader)
    assert line.partition(". To read all: train.num_train_epochs=1")[0] == said
    assert ("train.num_train_epochs=1" in line) == ("; 75%" in said)


def test_a_stream_has_no_epochs_also_as_the_share_of_a_process() -> None:
    from accelerate.data_loader import IterableDatasetShard

    from finetune.training.health.callbacks import extent

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(range(9))

    state: Any = SimpleNamespace(max_steps=50)
    for rows in (Stream(), IterableDatasetShard(Stream(), num_processes=2)):
        loader = torch.utils.data.DataLoader(rows, batch_size=4)
        assert extent(SimpleNamespace(gradient_accumulation_steps=1), state, loader) == ""


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGINT, marks=pytest.mark.slow),
        pytest.param(signal.SIGUSR1, marks=pytest.mark.long),  # and in tests/benchmarks/faults.py
    ],
    ids=lambda number: number.name,
)
def test_first_signal_saves_and_stops(number, tmp_path, monkeypatch, cli) -> None:
    """In step 3: the step ends, a checkpoint is there, and the run resumes from it."""
    from finetune.training.health import callbacks

    plain = callbacks.MetricsWriter.on_log

    def on_log(self, args, state, control, **kwargs):
        plain(self, args, state, control, **kwargs)
        if state.global_step == 3 and not kwargs["logs"].get("eval_loss"):
            os.kill(os.getpid(), number)

    monkeypatch.setattr(callbacks.MetricsWriter, "on_log", on_log)
    overrides = ["train.max_steps=5", "train.logging_steps=1", "train.warmup_steps=0"]
    overrides += SMALL_BATCHES
    report = train(load_recipe("tiny_full_fp8", overrides), out=tmp_path, console=QUIET)
    assert report.interrupted
    receipt = json.loads((report.folder / "receipt.json").read_text())
    assert receipt["run"]["exit_code"] == 128 + number
    (checkpoint,) = (report.folder / "checkpoints").glob("checkpoint-*")
    monkeypatch.undo()
    console = Console(width=80, file=io.StringIO())
    console.print(report, crop=False)
    (line,) = (x for x in console.file.getvalue().splitlines() if "Resume: " in x)  # pyright: ignore
    _, _, _, *words = shlex.split(line.partition("Resume: ")[2])
    assert cli(*words, "--out", tmp_path).code == 0
    (resumed,) = {f for f in report.folder.parent.iterdir() if f != report.folder}
    steps = [row["step"] for row in read_run(resumed).steps]
    assert steps == [*range(int(checkpoint.name.rpartition("-")[2]) + 1, 6)]
    # What was logged before belongs to it: its last lines and its page begin at step 1.
    rows = [row for row in read_run(resumed).rows if "loss" in row]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert sorted(row["seconds"] for row in rows) == [row["seconds"] for row in rows]
    ended = read_run(resumed).report
    assert (ended["first_loss"], ended["final_loss"]) == (report.first_loss, rows[-1]["loss"])


@pytest.mark.slow
def test_a_signal_in_the_last_evaluation_stops_at_once_with_a_receipt(
    tmp_path, monkeypatch
) -> None:
    """But for Ctrl-C it killed the process: a run that was trained to its end had no receipt."""
    from transformers import Trainer

    def evaluate(self, *args, **kwargs):
        os.kill(os.getpid(), signal.SIGTERM)
        return plain(self, *args, **kwargs)

    plain, before = Trainer.evaluate, signal.signal(signal.SIGTERM, lambda *_: None)
    monkeypatch.setattr(Trainer, "evaluate", evaluate)
    overrides = [*SMALL_BATCHES, "train.max_steps=2", "train.eval_strategy=steps"]
    overrides += ["train.eval_steps=9", "eval.at_start=false"]
    try:
        report = train(load_recipe("tiny_full_fp8", overrides), out=tmp_path, console=QUIET)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert report.interrupted
    receipt = json.loads((report.folder / "receipt.json").read_text())
    assert receipt["run"]["exit_code"] == 128 + signal.SIGTERM
    assert not (report.folder / "model").exists()


class Unread(io.StringIO):
    """Output whose reader is gone once it has seen the second step, as `| head` is."""

    def write(self, text: str) -> int:
        if "step 2/" in self.getvalue():
            raise BrokenPipeError
        return super().write(text)


@pytest.mark.slow
def test_a_run_whose_output_nobody_reads_any_more_saves_and_stops(tmp_path) -> None:
    overrides = ["train.max_steps=6", "train.logging_steps=1", "train.eval_strategy=no"]
    console = Console(width=100, file=Unread())
    recipe = load_recipe("tiny_full_fp8", [*overrides, *SMALL_BATCHES])
    report = train(recipe, out=tmp_path, console=console)
    assert report.interrupted
    receipt = json.loads((report.folder / "receipt.json").read_text())
    assert receipt["run"]["exit_code"] == 128 + signal.SIGHUP
    assert len(list((report.folder / "checkpoints").glob("checkpoint-*"))) == 1
    assert "on_broken_pipe" not in vars(console)


def test_seconds_per_step_are_those_since_the_last_log_also_of_a_resumed_run(
    tmp_path, monkeypatch
) -> None:
    from finetune.training.health import callbacks

    now = [0.0]
    monkeypatch.setattr(callbacks.time, "perf_counter", lambda: now[0])
    metrics = callbacks.MetricsWriter(tmp_path / "metrics.jsonl", "FP8")
    state: Any = SimpleNamespace(global_step=100, is_world_process_zero=True)
    metrics.on_train_begin(None, state, None)
    for step, seconds in ((102, 4.0), (104, 9.0)):
        state.global_step, now[0] = step, seconds
        metrics.on_log(None, state, None, logs={"loss": 1.0})
    now[0] = 60.0  # an evaluation of 51 seconds
    metrics.on_evaluate(None, state, None)
    state.global_step, now[0] = 105, 63.0
    metrics.on_log(None, state, None, logs={"loss": 1.0})
    assert metrics.values("step_seconds") == [2.0, 2.5, 3.0]


@pytest.mark.long
def test_training_from_a_thread(tmp_path) -> None:
    import threading

    found = []
    recipe = load_recipe("tiny_lora_bf16", ["train.max_steps=3", "train.warmup_steps=0"])

    def run() -> None:
        found.append(train(recipe, out=tmp_path, console=QUIET))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found[0].receipt.status == "proven"


@pytest.mark.slow
def test_the_eval_loss_of_a_run_is_that_of_the_model_it_keeps(tmp_path) -> None:
    """With `load_best_model_at_end` it was that of the last step, whose weights are gone."""
    recipe = load_recipe("tiny_full_bf16", [
        "data.max_rows=160", "eval.samples=false", "train.max_steps=10", "train.learning_rate=2e-2",
        "train.eval_steps=5", "train.save_strategy=steps", "train.save_steps=5",
        "train.load_best_model_at_end=true", "train.warmup_steps=5",
    ])  # fmt: skip
    report = train(recipe, out=tmp_path, console=QUIET)
    losses = {}
    for row in read_run(report.folder).rows:
        if "eval_loss" in row:
            losses.setdefault(row["step"], []).append(row["eval_loss"])
    (best,), (last, kept) = losses[5], losses[10]
    assert best < last
    assert report.eval_loss == kept == pytest.approx(best, rel=1e-4)


@pytest.mark.slow
def test_a_run_that_changes_nothing_fails_at_its_end(cli) -> None:
    """Its updates are smaller than the type of its weights can hold."""
    steps = ("train.max_steps=1", "train.warmup_steps=0", "train.save_strategy=no")
    steps += (*SMALL_BATCHES, "train.eval_strategy=no")
    done = cli("tiny_full_bf16", *steps, "train.learning_rate=1e-30")
    assert done.code == 2
    assert "0 of 1,377,408 trainable parameters changed" in done.err + done.out
    (receipt,) = Path("runs").rglob("receipt.json")
    assert "1,377,408" in json.loads(receipt.read_text())["run"]["stopped"]
    assert (receipt.parent / "model").is_dir(), "saved all the same"
    assert cli("tiny_full_bf16", *steps).code == 0
