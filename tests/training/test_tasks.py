"""`eval.tasks`: lm-eval's own definitions over local rows, refused early when they cannot be."""

from __future__ import annotations

import importlib.util
import io
import json
import re
import socket
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from transformers import TrainerState

from finetune import load_recipe, train
from finetune.config.schema import EvalConfig
from finetune.errors import (
    ConfigError,
    DataError,
    DataNotFoundError,
    MissingExtraError,
    install_hint,
)
from finetune.precision.settings import PrecisionConfig
from finetune.training.asking import evaluate
from finetune.training.asking.evaluate import PACKAGED, load_tasks, score
from finetune.training.run.preflight import check_sharding

pytest.importorskip("lm_eval", reason="the extra eval is not installed")
BUILTIN = "builtin:harbour_choice"
ROWS = PACKAGED / "harbour_choice" / "validation.jsonl"


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("the network was touched")

    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture
def data(tmp_path) -> Path:
    """A folder of rows as a user has it: HellaSwag's columns."""
    folder = tmp_path / "data" / "hellaswag"
    folder.mkdir(parents=True)
    (folder / "validation.jsonl").write_text(ROWS.read_text())
    return folder.parent


@pytest.fixture(scope="module")
def tiny():
    from finetune.storage.pretrained import load_tokenizer
    from finetune.training.model import load_model

    config = load_recipe("tiny_lora_bf16").config.model
    return load_model(config), load_tokenizer(config)[0]


def scored(model, **values) -> dict:
    config = load_recipe("tiny_lora_bf16", check_train=False).config
    exact = PrecisionConfig(compute="fp32")  # BF16 logits tie, and batches break ties
    config = config.model_copy(update={"eval": EvalConfig(**values), "precision": exact})
    return score(*model, load_tasks(config.eval), config)


def test_packaged_rows_have_four_endings_of_which_any_may_be_right() -> None:
    rows = [json.loads(line) for line in ROWS.read_text().splitlines()]
    assert len(rows) == 50
    assert all(len(set(row["endings"])) == 4 for row in rows)
    labels = [row["label"] for row in rows]
    assert all(labels.count(str(i)) >= 5 for i in range(4)), "no position gives it away"


@pytest.mark.slow
def test_hellaswag_is_lm_evals_own_over_local_rows(tiny, data) -> None:
    """The definition's prompt and metrics; the score is that of log-likelihoods by hand."""
    import torch

    (task,) = load_tasks(EvalConfig(tasks="hellaswag", data=str(data)))
    assert task.config.process_docs is not None, "HellaSwag's own preparation of rows"
    found = scored(tiny, tasks="hellaswag", data=str(data), limit=12)["hellaswag"]
    assert {"acc", "acc_stderr", "acc_norm", "acc_norm_stderr", "version"} <= found.keys()
    assert found["n"] == 12
    model, tokenizer = tiny
    right = 0
    for doc in list(task.eval_docs)[:12]:
        sums = []
        for ending in doc["choices"]:
            start = tokenizer(doc["query"], return_tensors="pt").input_ids
            ids = tokenizer(doc["query"] + " " + ending, return_tensors="pt").input_ids
            with torch.no_grad():
                logits = model(input_ids=ids).logits[0].log_softmax(-1)
            answer = ids[0, start.shape[1] :]
            sums.append(logits[start.shape[1] - 1 : -1].gather(1, answer[:, None]).sum().item())
        right += max(range(4), key=sums.__getitem__) == doc["gold"]
    assert found["acc"] == right / 12


@pytest.mark.slow
def test_parquet_shots_and_chat_template_act(tiny, data) -> None:
    import datasets

    rows = datasets.Dataset.from_list([json.loads(x) for x in ROWS.read_text().splitlines()])
    (data / "hellaswag" / "validation.jsonl").unlink()
    rows.to_parquet(data / "hellaswag" / "validation.parquet")
    asked = {"tasks": "hellaswag", "data": str(data), "limit": 6}
    seen = []
    plain = tiny[0].forward

    def forward(*args, **kwargs):
        ids = args[0] if args else kwargs["input_ids"]
        seen.append((ids.shape[-1], tiny[1].decode(ids[0])))
        return plain(*args, **kwargs)

    lengths, texts = {}, {}
    for name, more in {"": {}, "shots": {"shots": 2}, "chat": {"chat_template": True}}.items():
        seen.clear()
        tiny[0].forward = forward
        try:
            scored(tiny, **asked, **more)
        finally:
            del tiny[0].forward
        lengths[name], texts[name] = max(x for x, _ in seen), seen[0][1]
    assert lengths["shots"] > 2 * lengths[""]
    assert "<|im_start|>" in texts["chat"]
    assert "<|im_start|>" not in texts[""]


def test_refused_before_training_with_a_way_out(data, tmp_path, monkeypatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda n, *a: None if n == "lm_eval" else find(n, *a)
    )
    out = tmp_path / "runs"
    with pytest.raises(MissingExtraError, match=re.escape(install_hint("eval"))):
        train(load_recipe("tiny_lora_bf16", [f"eval.tasks={BUILTIN}"]), out=out)
    monkeypatch.undo()
    bad = [f"eval.tasks={BUILTIN}x"]
    with pytest.raises(ConfigError, match="did you mean 'builtin:harbour_choice'"):
        train(load_recipe("tiny_lora_bf16", bad), out=out, console=Console(quiet=True))
    assert not out.exists(), "nothing was made"
    with pytest.raises(DataNotFoundError, match=r"put validation\.jsonl") as error:
        load_tasks(EvalConfig(tasks="hellaswag", data=str(tmp_path)))
    assert "Rowan/hellaswag" in str(error.value)
    (data / "hellaswag" / "validation.jsonl").write_text('{"question": "a", "label": "1"}\n')
    with pytest.raises(DataError, match="ctx_a"):
        load_tasks(EvalConfig(tasks="hellaswag", data=str(data)))
    with pytest.raises(DataNotFoundError, match=r"eval\.data=FOLDER"):
        load_tasks(EvalConfig(tasks="hellaswag"))  # there is no hub here


@pytest.mark.parametrize(
    ("written", "said"),
    [("", r"validation\.jsonl \(empty\)"), ("[]", "not what the task"), ("not json", "not what")],
)
def test_a_file_without_rows_is_named_and_not_the_connection(data, written, said) -> None:
    (data / "hellaswag" / "validation.jsonl").write_text(written)
    with pytest.raises((DataError, DataNotFoundError), match=said) as error:
        load_tasks(EvalConfig(tasks="hellaswag", data=str(data)))
    assert "connection" not in str(error.value)


def test_a_misspelt_task_of_lm_evals(monkeypatch) -> None:
    """All of its 14,000 definitions take long to read: one folder of them stands in."""
    import lm_eval.tasks

    stock = Path(lm_eval.tasks.__file__).parent
    few = lm_eval.tasks.TaskManager(include_defaults=False, include_path=[stock / "hellaswag"])
    monkeypatch.setattr(evaluate, "manager_of", lambda *_: few)
    with pytest.raises(ConfigError, match="did you mean 'hellaswag'"):
        load_tasks(EvalConfig(tasks="helaswag"))


def test_groups_and_tags_are_made_of_their_tasks(tmp_path, monkeypatch) -> None:
    import lm_eval.tasks

    for name in ("one", "two"):
        (tmp_path / f"{name}.yaml").write_text(
            f"include: {PACKAGED}/harbour_choice/harbour_choice.yaml\ntask: {name}\ntag: both\n"
        )
        (tmp_path / name).mkdir()
        (tmp_path / name / "validation.jsonl").write_text(ROWS.read_text())
    (tmp_path / "pair.yaml").write_text("group: pair\ntask: [one, two]\n")

    def manager(names):
        return lm_eval.tasks.TaskManager(include_defaults=False, include_path=[tmp_path])

    monkeypatch.setattr(evaluate, "manager_of", manager)
    for name in ("pair", "both"):
        found = load_tasks(EvalConfig(tasks=name, data=str(tmp_path)))
        assert sorted(manager(()).load(found)["tasks"]) == ["one", "two"]


def test_sharded_weights_are_refused() -> None:
    asked = [f"eval.tasks={BUILTIN}", "train.fsdp=full_shard"]
    config = load_recipe("tiny_lora_bf16", asked).config
    with pytest.raises(ConfigError, match="python -m finetune evaluate RUN --tasks"):
        check_sharding(config)


@pytest.mark.long
def test_a_run_with_tasks_reports_them_and_evaluate_scores_the_same(tmp_path, cli) -> None:
    asked = (
        "train.max_steps=2", "train.eval_strategy=no", "train.warmup_steps=0", "data.max_rows=24",
        "eval.samples=false", f"eval.tasks={BUILTIN}", "eval.limit=20",
    )  # fmt: skip
    recipe = load_recipe("tiny_lora_fp8", asked)
    report = train(recipe, out=tmp_path / "runs", console=Console(quiet=True))
    found = report.tasks["harbour_choice"]
    assert 0.5 < found["acc"] <= 1, "what the base knows is not forgotten in two steps"
    assert report.samples == []
    kept = json.loads((report.folder / "report.json").read_text())
    assert kept["tasks"] == report.tasks
    rows = [json.loads(x) for x in (report.folder / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1] == {"step": 2, "tasks": report.tasks}
    again = cli("evaluate", "last", "--out", str(tmp_path / "runs"), "--json")
    assert json.loads(again.out) == report.tasks
    shown = cli("evaluate", str(report.folder), "--tasks", BUILTIN, "--limit", "4")
    assert "harbour_choice: acc " in shown.out
    assert "(4 rows)" in shown.out
    kept = json.loads((report.folder / "report.json").read_text())
    assert kept["tasks"]["harbour_choice"]["n"] == 4
    assert kept["status"] == "proven", "the rest of the report stays"
    commas = cli("evaluate", str(report.folder), "--tasks", ",", "--data", "x")
    assert commas.code == 2
    assert "no task is named" in commas.err
    (
        report.folder / "report.json.partial"
    ).mkdir()  # nothing can be written there, not even by root
    lost = cli("evaluate", str(report.folder), "--limit", "2", "--json")
    assert lost.code == 2
    assert json.loads(lost.out)["harbour_choice"]["n"] == 2
    assert "could not be kept" in lost.err
    (report.folder / "report.json.partial").rmdir()
    (report.folder / "report.json").unlink()  # as of a run that failed after its training
    apart = cli("evaluate", str(report.folder), "--limit", "2")
    assert apart.out.strip().endswith("tasks-model.json")
    assert not (report.folder / "report.json").exists(), "it did not finish"
    config = report.folder / "config.yaml"
    config.write_text(re.sub(r"tasks:(\n +- .*)+", "tasks: []", config.read_text()))
    config.write_text(config.read_text().replace("limit: 20", "limit: null"))
    none = cli("evaluate", str(report.folder))
    assert none.code == 2
    assert "no task is named" in none.err


@pytest.mark.long
def test_scores_at_intervals_leave_training_as_it_is(tmp_path) -> None:
    """Delayed scaling and dropout would show what an evaluation moves; memory may be short once."""
    asked = (
        "train.max_steps=4", "train.eval_strategy=no", "train.warmup_steps=0", "data.max_rows=24",
        "train.save_strategy=no", "train.logging_steps=1", "eval.samples=false",
        "precision.scaling=delayed", "train.max_length=64", "train.gradient_accumulation_steps=1",
    )  # fmt: skip
    scored = (f"eval.tasks={BUILTIN}", "eval.limit=3", "eval.tasks_every=2")
    shown = io.StringIO()
    console = Console(file=shown, width=200)
    rows = []
    for name, more in (("plain", ()), ("scored", scored)):
        recipe = load_recipe("tiny_full_fp8", [*asked, *more])
        folder = train(recipe, out=tmp_path / name, console=console, save=False).folder
        rows.append([json.loads(x) for x in (folder / "metrics.jsonl").read_text().splitlines()])
    plain, found = ([(r["loss"], r["grad_norm"]) for r in log if "loss" in r] for log in rows)
    assert found == plain
    assert len(found) == 4
    assert [row["step"] for row in rows[1] if "tasks" in row] == [2, 4]
    assert "step 2/4 | harbour_choice: acc " in shown.getvalue()


def test_a_short_memory_ends_scores_and_not_the_run(monkeypatch) -> None:
    def short(*_: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(evaluate, "score", short)
    config = load_recipe("tiny_lora_bf16", [f"eval.tasks={BUILTIN}", "eval.tasks_every=2"]).config
    shown, rows = Console(file=io.StringIO(), width=200), list[object]()
    metrics = SimpleNamespace(aside=nullcontext, write=lambda row, _: rows.append(row))
    meter = SimpleNamespace(aside=nullcontext)
    scorer = evaluate.TaskScorer(config, [object()], None, metrics, shown, meter)  # pyright: ignore
    for step in (1, 2, 4):
        state = TrainerState(global_step=step, max_steps=9)
        scorer.on_step_end(None, state, None, model=torch.nn.Linear(2, 2))
    assert rows == []
    assert shown.file.getvalue().count("no memory is left to score tasks") == 1  # pyright: ignore
