"""Rewards: found by name, refused where they give none, watched for groups that teach nothing."""

from __future__ import annotations

import asyncio
import json
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from finetune import load_recipe
from finetune.config.paths import ASSETS
from finetune.config.reward_names import reward_names
from finetune.config.train_keys import TrainSection
from finetune.errors import ConfigError, DataError, ProofError
from finetune.training.asking.rewards import EARLY, FLAT, RewardWatch, rewards_of, text_of
from finetune.training.run.hints import hints
from tests.asset_makers.make_sums import sums
from tests.data.shapes import tokenizer_of
from tests.run_folders import trained

ROWS: dict[str, Any] = {
    "prompts": ["Two plus two?", "One plus two?"],
    "completions": [[{"role": "assistant", "content": "It is four."}], "3, or 4"],
    "answer": ["4", "#### 3"],
}
SOURCE = """import sys, torch
def exact(completions, answer, **columns):
    return [float(a in str(c)) for c, a in zip(completions, answer)]

def broken(completions, **columns): return [1 / 0 for _ in completions]
def said(completions, **columns): return [float(c[-1]["content"] == "4") for c in completions]
def short(completions, **columns): return [1.0]
def word(completions, **columns): return [1.0, "good"]
def infinite(completions, **columns): return [1.0, float("inf")]
def one(completions, **columns): return 1.0
def quiet(completions, **columns): return [None, 0]
def same(completions, **columns): return [1.0 for _ in completions]
def rising(completions, **columns): return [float(i) for i, _ in enumerate(completions)]
def empty(completions, **columns): return completions[2]
def huge(completions, **columns): return [0, 10 ** 5000]
def wide(completions, **columns): return [0, 1e39]
class Odd:
    def __float__(self): raise RuntimeError("no number")
    def __repr__(self): raise RuntimeError("no text")
def odd(completions, **columns): return [0, Odd()]
def leaves(completions, **columns): sys.exit(0)
def switches(completions, **columns): torch.set_grad_enabled(False); return [0, 1]
def metric(completions, log_metric, **columns): log_metric("loss", float("nan")); return [0, 1]
async def late(completions, **columns): return [0.5, float("nan")]
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "my_rewards_of_tests.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("builtin:last_number", [1.0, 0.0]),
        ("builtin:one_sentence", [1.0, 0.0]),
        ("my_rewards_of_tests.py:exact", [0.0, 0.0]),
        ("my_rewards_of_tests.exact", [0.0, 0.0]),
        ("my_rewards_of_tests.quiet", [None, 0.0]),
    ],
)
def test_a_reward_is_found_and_gives_what_it_gives(folder, name, given):
    (found,) = rewards_of([name])
    assert found(**ROWS) == given
    assert found.__name__ in name, "TRL's logs are named by it"


def test_a_reward_reads_content_where_decoding_joins_it_with_thinking(folder):
    tokenizer = tokenizer_of("gptoss")
    marked = "<|channel|>analysis<|message|>9?<|end|><|start|>assistant<|channel|>final<|message|>4"
    ids = tokenizer.encode(f"{marked}<|return|>", add_special_tokens=False)
    text = tokenizer.decode(ids, skip_special_tokens=True)
    rows = {
        "prompts": [[{"role": "user", "content": "Two plus two?"}]],
        "completions": [[{"role": "assistant", "content": text}]],
        "completion_ids": [ids],
        "answer": ["4"],
    }
    assert rewards_of(["my_rewards_of_tests.said"], tokenizer)[0](**rows) == [1.0]
    chatml = tokenizer_of("chatml")
    assert rewards_of(["my_rewards_of_tests.said"], chatml)[0](**rows) == [0.0]


def test_rewards_of_trl_and_reward_models_are_trls(folder):
    assert (
        rewards_of(reward_names(TrainSection({"reward_funcs": "think_format_reward, me/model"})))[1]
        == "me/model"
    )  # as it is typed


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ([], "none is named"),
        (["builtin:last_numbr"], "did you mean 'builtin:last_number'?"),
        (["my_rewards_of_tests.exat"], "did you mean 'exact'?"),
        (["my_rewards_of_tests.py:exat"], "did you mean 'exact'?"),
        (["./my_rewards_of_tests.py"], "one of Odd, broken, empty"),
        (["nowhere.exact"], "ModuleNotFoundError"),
        (["nowhere.py:exact"], "FileNotFoundError"),
        (["think_formt_reward"], "did you mean 'think_format_reward'?"),
    ],
)
def test_a_reward_that_is_not_there_is_refused(folder, names, said):
    with pytest.raises(ConfigError) as refused:
        rewards_of(names)
    assert said in str(refused.value)
    assert "train.reward_funcs" in refused.value.fix


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("broken", ["ZeroDivisionError", "my_rewards_of_tests.py:5", "beside the prompt: answer"]),
        ("short", ["gave 1 for 2 completions"]),
        ("one", ["gave 1.0, not a list for 2"]),
        ("word", ["gave 'good'", "One plus two?", "3, or 4"]),
        ("infinite", ["gave inf", "One plus two?"]),
        ("late", ["gave nan", "One plus two?"]),
        ("huge", ["gave inf", "One plus two?"]),
        ("wide", ["gave 1e+39", "One plus two?"]),
        ("odd", ["gave <Odd instance at", "One plus two?"]),
        ("leaves", ["SystemExit: sys.exit(0) (", "my_rewards_of_tests.py:"]),
        ("switches", ["set_grad_enabled(False)", "with torch.no_grad()"]),
        ("metric", ["log_metric('loss', ...) would replace"]),
    ],
)
def test_what_is_no_reward_is_refused_with_its_row(folder, name, said):
    (found,) = rewards_of([f"my_rewards_of_tests.{name}"])
    with pytest.raises(DataError) as refused:
        asyncio.run(found(**ROWS)) if name == "late" else found(**ROWS, log_metric=print)
    assert torch.is_grad_enabled()
    assert f"my_rewards_of_tests.{name}" in refused.value.what
    assert all(words in str(refused.value) for words in said)


def test_a_reward_of_no_completion_is_refused_without_a_row(folder):
    (found,) = rewards_of(["my_rewards_of_tests.empty"])
    with pytest.raises(DataError, match="IndexError"):
        found(prompts=[], completions=[])


@pytest.mark.parametrize("end", ["sys.exit(0)", "raise SystemExit"])
def test_a_reward_file_that_ends_the_process_is_refused_by_name(end, folder):
    (folder / "leaving.py").write_text(f"import sys\ndef f(**rows): return []\n{end}\n")
    for name in ("leaving.py:f", "leaving.f"):
        with pytest.raises(ConfigError, match=rf"{name}' cannot be imported[\s\S]*leaving.py:3"):
            rewards_of([name])


def test_a_column_that_rows_lack_is_named(folder):
    rows = {key: value for key, value in ROWS.items() if key != "answer"}
    with pytest.raises(DataError, match=r"columns beside the prompt: none.*data\.columns"):
        rewards_of(["builtin:last_number"])[0](**rows)


@pytest.mark.parametrize(
    ("shares", "early", "at_the_end"),
    [
        ([1.0] * EARLY, True, "100% of the groups had equal rewards"),
        ([1.0] * EARLY + [0.5] * 2, True, "90% of the groups had equal rewards"),
        ([0.25, 0.5], False, ""),
        ([], False, ""),
    ],
)
def test_equal_rewards_are_said_early_and_at_the_end(shares, early, at_the_end):
    lines: list[str] = []
    rows = [{"step": step, FLAT: share, "reward": 0.0} for step, share in enumerate(shares)]
    watch = RewardWatch(lines.append)
    for row in [*rows, {"step": 0, "loss": 1.0}]:
        watch.on_log(None, SimpleNamespace(global_step=row["step"]), None, row)
    assert [line[:29] for line in lines] == ["step 9: the rewards of every "] * early
    config = load_recipe("tiny_grpo_fp8", check_train=False).config
    hint = "".join(hints(config, rows, steps=12, rate=1e-4))
    assert hint.startswith(at_the_end)
    assert bool(hint) == bool(at_the_end)
    assert bool(watch.learned_nothing) == (bool(shares) and math.isclose(min(shares), 1))


def test_rewards_that_are_all_none_are_said_to_be():
    """The error at the end spoke of the learning rate."""
    watch = RewardWatch(print)
    for step in range(3):
        state = SimpleNamespace(global_step=step)
        watch.on_log(None, state, None, logs={FLAT: 0.0, "reward": None})
    assert "(mean None)" in watch.learned_nothing


def test_the_packaged_sums_are_those_that_their_maker_makes():
    lines = (ASSETS / "data" / "sums.jsonl").read_text("utf-8").splitlines()
    assert [json.loads(line) for line in lines] == sums()


SHORT = (
    "train.max_steps=2", "train.max_completion_length=4", "train.eval_strategy=no",
    "train.per_device_train_batch_size=4", "eval.samples=false",
)  # fmt: skip


def test_a_reward_model_does_not_score_answers_to_images():
    assert rewards_of(["me/reward-model"]) == ["me/reward-model"]
    names = ["builtin:one_sentence", "me/reward-model"]
    with pytest.raises(ConfigError, match="without the images") as refused:
        rewards_of(names, images=True)
    assert refused.value.where.endswith("me/reward-model")
    assert len(rewards_of(names[:1], images=True)) == 1


def test_a_prompt_with_images_is_told_as_text():
    parts = [{"type": "image", "image": object()}, {"type": "text", "text": "What ship?"}]
    assert text_of([{"role": "user", "content": parts}]) == "<image>What ship?"


def run(method: str, folder: Any, *more: str) -> Any:
    return trained(load_recipe(f"tiny_{method}_fp8", [*SHORT, *more]), out=folder, save=False)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["grpo", "rloo", "distill"])
def test_answers_are_written_in_fp8_and_what_is_trained_on_is_counted(folder, method):
    """Once a layer, though it ran for each word; the model beside it computes as it does."""
    rewarded = ("train.num_generations=2", "train.reward_funcs=[my_rewards_of_tests.py:rising]")
    found = run(method, folder, *(rewarded if method != "distill" else ()))
    receipt = found.receipt
    assert receipt.status == "proven"
    assert receipt.run["method"] == method
    assert receipt.fp8_flop_share > 0.3
    assert {row.calls["fprop"] for row in receipt.layers if row.role == "base"} == {1}
    beside = ["LlamaForCausalLM: in the precision of the policy, FP8 in training"]
    assert receipt.precision["references"] == (beside if method != "grpo" else [])


@pytest.mark.slow
def test_distillation_of_float32_weights_multiplies_in_bf16(folder):
    """TRL calls the model below the forward that has autocast; the proof would stop the run."""
    recipe = load_recipe("tiny_distill_bf16", SHORT)
    assert trained(recipe, out=folder, save=False).receipt.status == "proven"


@pytest.mark.slow
def test_a_run_whose_rewards_are_equal_has_learned_nothing(folder):
    with pytest.raises(ProofError, match=r"0 of .* trainable parameters changed") as refused:
        run(
            "grpo",
            folder,
            "train.num_generations=2",
            "train.reward_funcs=[my_rewards_of_tests.same]",
        )
    assert "the rewards of every group were equal (mean 1)" in refused.value.why
    assert "train.reward_funcs" in refused.value.fix
