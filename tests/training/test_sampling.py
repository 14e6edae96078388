"""Samples change nothing about training; `generate` says what the run's own samples say."""

from __future__ import annotations

import io
import itertools
import json
import math
import random
import time
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from finetune import load_recipe, train
from finetune.config.methods import METHODS
from finetune.config.schema import EvalConfig
from finetune.errors import ConfigError
from finetune.training.asking import samples as sampling
from finetune.training.asking.samples import answer
from finetune.training.helper.undisturbed import undisturbed

SHORT = (
    "train.max_steps=3", "train.warmup_steps=0", "train.eval_steps=2", "train.logging_steps=1",
    "train.per_device_train_batch_size=2", "data.max_rows=12", "eval.max_new_tokens=6",
)  # fmt: skip
ADAPTERS = (
    *SHORT, "lora.dropout=0.2", "train.gradient_checkpointing=true", "train.save_strategy=steps",
    "train.save_steps=2",
)  # fmt: skip
DELAYED = (*SHORT, "precision.eval=fp8", "precision.amax_history_len=4")
SLEEP = 0.4


def run_of(
    name: str, overrides, out: Path, *, samples: bool = True, console: Console | None = None
):
    off = () if samples else ("eval.samples=false", "~eval.max_new_tokens")
    console = console or Console(quiet=True)
    return train(load_recipe(name, [*overrides, *off]), out=out, console=console)


def rows_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def run(made_once):
    """A short run with adapters over a base held in FP8, with samples, and what it printed."""
    plain = sampling.answer

    def slow(*args, **kwargs):
        time.sleep(SLEEP)
        return plain(*args, **kwargs)

    def make(folder: Path):
        screen = io.StringIO()
        sampling.answer = slow
        try:
            console = Console(file=screen, width=200)
            report = run_of("tiny_lora_fp8", ADAPTERS, folder / "runs", console=console)
        finally:
            sampling.answer = plain
        return report, screen.getvalue()

    return made_once("run with samples", make)


@pytest.fixture(scope="module")
def delayed_run(made_once):
    """A short full run with delayed scaling that evaluates in FP8, with samples."""
    return made_once(
        "delayed run with samples", lambda folder: run_of("tiny_full_fp8", DELAYED, folder)
    )


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    (file,) = (folder / "model").glob("*.safetensors")
    return load_file(file)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["adapters", "delayed"])
def test_training_is_bit_for_bit_as_without_samples(case, run, delayed_run, tmp_path) -> None:
    """Dropout and checkpointing; and amax histories that evaluation in FP8 records into."""
    if case == "adapters":
        asked, name, overrides = run[0].folder, "tiny_lora_fp8", ADAPTERS
    else:
        asked, name, overrides = delayed_run.folder, "tiny_full_fp8", DELAYED
    plain = run_of(name, overrides, tmp_path, samples=False).folder
    with_samples = [row for row in rows_of(asked) if "samples" in row]
    assert [row["step"] for row in with_samples] == [0, 2, 3]
    assert not any("samples" in row for row in rows_of(plain))
    for key in ("loss", "eval_loss", "grad_norm", "num_tokens"):
        values = [[row[key] for row in rows_of(folder) if key in row] for folder in (asked, plain)]
        assert values[0] == values[1], key
    a, b = weights_of(asked), weights_of(plain)
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_nothing_of_an_evaluation_is_left(make_llama) -> None:
    """Of its random numbers, its modes, and what its forward multiplied in FP8."""
    from finetune.precision import convert
    from finetune.precision.planner import plan
    from finetune.precision.settings import PrecisionConfig

    precision = PrecisionConfig(
        compute="fp8", backend="emulated", scaling="delayed", emulation="allow", eval="fp8"
    )
    model = make_llama()
    conversion = convert.apply(model, plan(model, precision))
    ids = torch.randint(1, 200, (1, 8))
    model(input_ids=ids, labels=ids).loss.backward()
    model.model.layers[1].eval()
    state = {k: v.clone() for k, v in conversion.engine.state_tensors().items()}
    modes = {name: module.training for name, module in model.named_modules()}

    def everything():
        now = conversion.engine.state_tensors()
        return (
            {name: module.training for name, module in model.named_modules()} == modes
            and all(torch.equal(now[k], state[k]) for k in state)
            and torch.equal(torch.get_rng_state(), generators[0])
            and random.getstate() == generators[1]
            and np.array_equal(np.random.get_state()[1], generators[2][1])
        )

    generators = torch.get_rng_state(), random.getstate(), np.random.get_state()
    with undisturbed(model), torch.no_grad():
        model(input_ids=torch.randint(1, 200, (1, 30)))
        torch.rand(3), random.random(), np.random.rand()
        assert not model.training
    assert everything()
    with pytest.raises(KeyboardInterrupt), undisturbed(model):
        raise KeyboardInterrupt
    assert everything()


@pytest.mark.slow
def test_samples_are_shown_written_and_reported(run) -> None:
    report, screen = run
    rows = [row for row in rows_of(report.folder) if "samples" in row]
    stored = json.loads((report.folder / "report.json").read_text())["samples"]
    assert rows[-1]["samples"] == stored
    assert [one["prompt"] for one in stored] == [one.prompt for one in report.samples]
    for step in (0, 2, 3):
        assert f"step {step}/3 | sample | What is the capital of France? | " in screen
    assert max(map(len, (x for x in screen.splitlines() if "| sample |" in x))) < 200
    loss = report.eval_loss
    shown = f"eval loss {loss:.4f} (perplexity {math.exp(loss):.2f})"
    assert f"step 3/3 | {shown}" in screen
    assert shown in str(report)


def test_perplexity_is_of_a_loss_of_text_alone() -> None:
    text = METHODS["continue"].loss_in_words
    assert [text(x) for x in (8.37, 20.5)] == ["8.3700 (perplexity 4,316)", "20.5000"]
    assert METHODS["distill"].loss_in_words(3.5) == METHODS["dpo"].loss_in_words(3.5) == "3.5000"


@pytest.mark.slow
def test_neither_tokens_per_second_nor_the_memory_counts_samples(run) -> None:
    """Each sampling slept: the pause is in the clock of the rows and not in the speed."""
    report, _ = run
    rows = [row for row in rows_of(report.folder) if "loss" in row]
    for before, after in itertools.pairwise(rows):
        took = (after["num_tokens"] - before["num_tokens"]) / after["tokens_per_s"]
        asked_between = before["step"] == 2  # evaluated, and asked, after step 2
        elapsed = after["seconds"] - before["seconds"]
        assert (elapsed - took > SLEEP) == asked_between
    assert report.receipt.status == "proven"
    assert "step 3" in report.receipt.memory["measured"]


def test_memory_meter_leaves_out_what_is_aside(monkeypatch) -> None:
    """On a pretended GPU: peaks before, inside and after."""
    from types import SimpleNamespace

    from finetune.training.health.memory_meter import MemoryMeter
    from finetune.units import GIB

    peak = {"now": 5 * GIB}
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: peak["now"])
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 2 * peak["now"])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: peak.update(now=GIB))
    meter = MemoryMeter(SimpleNamespace(device=SimpleNamespace(kind="cuda")))
    meter.on_train_begin(None, None, None, model=torch.nn.Linear(2, 2))
    peak["now"] = 3 * GIB
    with meter.aside():
        peak["now"] = 9 * GIB
    peak["now"] = 2 * GIB
    meter.close()
    assert meter.reading() == {
        "measured_gib": 3.0,
        "measured": "peak allocated by torch, whole training",
        "reserved_gib": 6.0,
        "weights_gib": 0.0,
    }
    assert meter.earlier_gib == 9, "the report has what the process took"


def test_sharded_weights_are_not_asked_and_that_is_said() -> None:
    from types import SimpleNamespace

    screen = io.StringIO()
    config = load_recipe("tiny_lora_bf16", check_train=False).config
    config = config.model_copy(update={"train": {"fsdp": "full_shard"}})
    unused = SimpleNamespace()
    writer = sampling.SampleWriter(config, ["hi"], unused, unused, Console(file=screen), unused)
    state = SimpleNamespace(is_world_process_zero=True, global_step=1)
    writer.on_train_begin(None, state, None)
    writer.on_evaluate(None, state, None, model=None)
    assert "FSDP shards the weights" in screen.getvalue()
    assert writer.at_end(None, state, changed=True) == []


def test_a_short_memory_ends_samples_and_not_the_run(monkeypatch) -> None:
    from contextlib import nullcontext
    from types import SimpleNamespace

    def short(*args, **kwargs):
        asked.append(1)
        raise torch.OutOfMemoryError

    asked, screen = [], io.StringIO()
    monkeypatch.setattr(sampling, "answer", short)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    config = load_recipe("tiny_lora_bf16", check_train=False).config
    meter = SimpleNamespace(aside=nullcontext)
    writer = sampling.SampleWriter(config, ["hi"], None, None, Console(file=screen), meter)
    state = SimpleNamespace(is_world_process_zero=True, global_step=1)
    for _ in range(2):
        writer.on_evaluate(None, state, None, model=None)
    assert len(asked) == 1
    assert "training continues without samples" in screen.getvalue()


def test_prompts_are_questions_that_leave_room_to_answer() -> None:
    """Not the system's turn, and none that a model's positions or the run's rows are short of."""
    from datasets import Dataset

    from finetune.data.dataset import Rows
    from finetune.storage.pretrained import load_tokenizer
    from finetune.training.asking.samples import prompts_of

    config = load_recipe("tiny_full_bf16", ["data.prompts=[]"], check_train=False).config
    tokenizer, _ = load_tokenizer(config.model)
    system = {"role": "system", "content": "Be brief."}
    questions = ["word " * 3000, "First?", "First?", "Second?", "Third?"]
    turns = [[system, {"role": "user", "content": text}] for text in questions]
    rows = Rows(Dataset.from_list([{"messages": one} for one in turns]), None, "", {})

    def asked(rows: Rows) -> list[str]:
        return [one.text for one in prompts_of(config, rows, tokenizer)]

    assert asked(rows) == ["First?", "Second?"]
    unread: Any = None  # training rows, maybe a stream of the hub's
    held_out = Rows(unread, cast(Dataset, rows.train), "", {})
    assert asked(held_out) == ["First?", "Second?"]
    pairs = Rows(Dataset.from_list([{"prompt": one} for one in turns]), None, "", {})
    assert asked(pairs) == ["First?", "Second?"]
    tokenizer.chat_template = None
    text = Rows(Dataset.from_list([{"text": "A tide table. " * 20}]), None, "", {})
    assert asked(text) == [("A tide table. " * 20)[:64]]
    for prompts, said in ((("",), "is empty"), (("word " * 3000,), "no room for an answer")):
        data = config.data.model_copy(update={"prompts": prompts})
        with pytest.raises(ConfigError, match=said):
            prompts_of(config.model_copy(update={"data": data}), rows, tokenizer)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"limit": 5}, "limit is about tasks"),
        ({"data": "x"}, "data is about tasks"),
        ({"samples": False, "max_new_tokens": 9}, "max_new_tokens is about samples"),
    ],
)
def test_a_setting_that_would_change_nothing_is_an_error(values, message) -> None:
    with pytest.raises(ValueError, match=message):
        EvalConfig(**values)


def test_tasks_are_a_list_or_words_with_commas() -> None:
    assert EvalConfig(tasks="hellaswag, arc_easy").tasks == ("hellaswag", "arc_easy")
    with pytest.raises(ConfigError, match="did you mean 'tasks'"):
        load_recipe("tiny_lora_fp8", ["eval.task=hellaswag"])


# ---------------------------------------------------------------------------------------- generate


@pytest.mark.slow
def test_generate_says_what_the_run_said(run, cli) -> None:
    report, _ = run
    prompts = [one.prompt for one in report.samples]
    out = str(report.folder.parent.parent)
    done = cli("generate", "last", *prompts, "--json", "--out", out)
    reported = json.loads(done.out)
    assert Path(reported["run"]) == report.folder
    assert [x["answer"] for x in reported["answers"]] == [one.answer for one in report.samples]
    streamed = cli("generate", str(report.folder), prompts[0])
    assert streamed.out.strip() == report.samples[0].answer


@pytest.mark.slow
def test_generate_reads_lines_and_a_checkpoint_and_draws_by_seed(run, cli, monkeypatch) -> None:
    report, _ = run
    monkeypatch.setattr("sys.stdin", io.StringIO("What is a library?\n\nHello.\n"))
    words = ("generate", str(report.folder), "--checkpoint", "2", "--max-new-tokens", "4")
    out = cli(*words, "-").out
    assert [x for x in out.splitlines() if x.startswith(">")] == [
        "> What is a library?",
        "> Hello.",
    ]
    drawn = [
        json.loads(cli(*words, "Hello.", "--temperature", "2", "--seed", s, "--json").out)
        for s in ("1", "1", "2")
    ]
    said = [x["answers"][0]["answer"] for x in drawn]
    assert said[0] == said[1] != said[2]


@pytest.mark.slow
def test_a_checkpoint_with_other_weights_than_it_saved_does_not_answer(run, cli, tmp_path) -> None:
    import shutil

    copied = tmp_path / "copied"
    shutil.copytree(run[0].folder, copied)
    weights = copied / "checkpoints" / "checkpoint-3" / "adapter_model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-100] ^= 0x40
    weights.write_bytes(content)
    done = cli("generate", copied, "hi", "--checkpoint", "last")
    assert done.code == 2
    assert "checkpoint 3 is damaged: adapter_model.safetensors has changed" in done.err
    assert "another step: --checkpoint last, or one of 2, 3" in done.err
    assert cli("generate", copied, "hi", "--checkpoint", "2").code == 0
    weights.unlink()
    done = cli("generate", copied, "hi", "--checkpoint", "3")
    assert "adapter_model.safetensors is missing" in done.err


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_a_prompt_that_is_no_text_is_refused(errors, run, cli, monkeypatch) -> None:
    typed = io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), "utf-8", errors)
    monkeypatch.setattr("sys.stdin", typed)
    done = cli("generate", run[0].folder)
    assert done.code == 2
    assert "a prompt is not UTF-8 text" in done.err
    assert "iconv" in done.err


def test_generate_refuses_with_a_way_out(run, cli, tmp_path) -> None:
    import shutil

    report, _ = run
    out = tmp_path / "runs"
    none = cli("generate", "last", "hi", "--out", str(out))
    assert none.code == 2
    assert "there is no run yet" in none.err
    broken = out / "tiny_lora_fp8" / "20260101-000000-abcd"
    shutil.copytree(report.folder, broken, ignore=shutil.ignore_patterns("model"))
    words = ("--out", str(out))
    assert "did you mean 'tiny_lora_fp8'?" in cli("generate", "tiny_lora_fp9", "hi", *words).err
    no_weights = cli("generate", "tiny_lora_fp8", "hi", *words)
    assert no_weights.code == 2
    assert "has no trained weights" in no_weights.err
    assert "--checkpoint last, or one of 2, 3" in no_weights.err
    assert (
        "--checkpoint last, or one of 2, 3"
        in cli("generate", "last", "hi", "--checkpoint", "7", *words).err
    )
    assert "--seed would change nothing" in cli("generate", "last", "hi", "--seed", "1", *words).err
    (broken / "checkpoints").rename(broken / "away")
    assert "trains it again" in cli("generate", "last", "hi", "--checkpoint", "last", *words).err
    assert "trains it again" in cli("generate", "last", "hi", *words).err
    (broken / "away").rename(broken / "checkpoints")
    config = broken / "config.yaml"
    config.write_text(config.read_text().replace("builtin:tiny_llama", "builtin:tiny_lama"))
    no_base = cli("generate", "last", "hi", "--checkpoint", "last", *words)
    assert no_base.code == 2
    assert "there is no packaged model 'builtin:tiny_lama'" in no_base.err


@pytest.mark.slow
def test_generate_without_an_input_or_with_a_prompt_too_long(run, cli, monkeypatch) -> None:
    folder = str(run[0].folder)
    monkeypatch.setattr("sys.stdin", None)  # closed
    nothing = cli("generate", folder)
    assert (nothing.code, nothing.out) == (0, "")
    assert cli("generate", folder, "Hello.", "Hi.", "--max-new-tokens", "2").code == 0
    for prompt, said in (("", "a prompt is empty"), ("word " * 3000, "leaves no room")):
        refused = cli("generate", folder, prompt)
        assert refused.code == 2
        assert said in refused.err


def test_generate_interrupted(run, cli, monkeypatch) -> None:
    def stop(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("finetune.training.asking.chat.Conversation.ask", stop)
    assert cli("generate", str(run[0].folder), "hi").code == 130


@pytest.mark.long
def test_a_full_run_that_evaluates_in_fp8_is_asked_in_fp8(delayed_run) -> None:
    """With the scales of delayed scaling; the session that it takes is gone afterwards."""
    from finetune.precision.convert import conversion_of
    from finetune.training.asking.reload import loaded, open_trained
    from finetune.training.helper import session

    run, samples = open_trained(delayed_run.folder), delayed_run.samples
    with loaded(run) as (model, tokenizer):
        conversion = conversion_of(model)
        assert conversion is not None
        assert conversion.plan.fp8_layers
        assert (conversion.engine.state.scale != 1).any()
        prompts = [one.prompt for one in samples]
        assert answer(model, tokenizer, prompts, 6) == samples  # as many tokens as `run_of` asks
    assert session.in_force() is None
    (delayed_run.folder / "fp8_scaling.safetensors").rename(delayed_run.folder / "away")
    with pytest.raises(ConfigError, match="its scales are not stored"), loaded(run):
        pass
    assert session.in_force() is None
