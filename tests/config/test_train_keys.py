"""The table of arguments: as the libraries have them, and the one place of a new name."""

from __future__ import annotations

import ast
import copy
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from transformers import TrainingArguments

import finetune
from finetune import load_recipe
from finetune.config.methods import KEYS, METHODS, arguments
from finetune.config.train_keys import (
    ARGUMENTS,
    TrainerArguments,
    TrainSection,
    for_library,
    refuse_renamed,
)
from finetune.config.train_section import RANGES
from finetune.errors import ConfigError
from finetune.export.parity import ABOUT_ROWS

OUR_DEFAULTS = {
    *KEYS,
    "learning_rate", "loss_type", "num_generations",  # each method has its own
    "reward_funcs",  # an argument of the trainer, not of its configuration
}  # fmt: skip
OTHER_DEFAULTS = {("orpo", "max_completion_length"), ("kto", "train_sampling_strategy")}
"""Of single methods."""


@pytest.mark.parametrize("method", METHODS.values(), ids=lambda method: method.name)
def test_arguments_have_the_defaults_of_the_library_and_are_of_the_configurations_listed(
    method,
) -> None:
    theirs = method.config_class.__dataclass_fields__
    kinds = {kind.__name__.removesuffix("Config") for kind in method.config_class.__mro__}
    for name, key in ARGUMENTS.items():
        assert (name in theirs) is not kinds.isdisjoint(key.of), name
        if name not in OUR_DEFAULTS and name in theirs:
            usual = theirs[name].default
            assert key.default == usual or (method.name, name) in OTHER_DEFAULTS


def test_every_key_of_the_train_section_that_is_read_is_an_argument_of_a_method() -> None:
    theirs = {name for method in METHODS.values() for name in arguments(method)}
    assert {*ARGUMENTS} <= theirs
    assert {*RANGES, *ABOUT_ROWS} <= theirs


@dataclass
class SFTConfig(TrainingArguments):
    """That of a release that calls a limit otherwise."""

    max_tokens: int | None = 7
    eval_packing: bool | None = None


SFTConfig.__module__ = "trl"


def test_an_argument_that_a_library_renames_is_refused_and_is_one_change_in_the_table(
    monkeypatch,
) -> None:
    with pytest.raises(ConfigError, match=r"^trl\.SFTConfig has no argument max_length") as error:
        TrainerArguments(SFTConfig).max_length  # noqa: B018
    assert "pip install trl==" in error.value.fix
    with pytest.raises(ConfigError) as error:
        refuse_renamed(SFTConfig)
    assert len(error.value.more) > 5  # all are named at once

    monkeypatch.setattr(ARGUMENTS["max_length"], "also", ("max_tokens",))
    args = TrainerArguments(SFTConfig(use_cpu=True, report_to="none"))
    assert args.max_length == 7
    args.max_length = 9
    assert (args.own.max_tokens, hasattr(args.own, "max_length")) == (9, False)
    assert for_library(SFTConfig, {"max_length": 3, "seed": 1}) == {"max_tokens": 3, "seed": 1}


def test_arguments_that_a_trainer_does_not_have_are_none_or_off_and_are_not_set() -> None:
    plain = TrainingArguments(use_cpu=True, report_to="none")
    args = TrainerArguments(TrainerArguments(plain))
    assert (args.own, args.max_length, args.packing, args.world_size) == (plain, None, False, 1)
    with pytest.raises(AttributeError, match="TrainingArguments has no max_length"):
        args.max_length = 9
    other = copy.copy(args)
    other.max_steps = 3
    assert (other.max_steps, plain.max_steps) == (3, -1)


def is_args(node: ast.expr) -> bool:
    """`args`, or `.args` of something."""
    return "args" in (getattr(node, "id", ""), getattr(node, "attr", ""))


def reads_one(node: ast.AST) -> ast.expr | None:
    """What an argument of the table is read from, where that is called `args`."""
    owner, name = None, ""
    if isinstance(node, ast.Attribute):
        owner, name = node.value, node.attr
    elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr"):
        owner, name = node.args[0], getattr(node.args[1], "value", "")
    return owner if owner is not None and name in ARGUMENTS and is_args(owner) else None


def reads_by_hand(tree: ast.Module) -> list[int]:
    """Lines that read an argument of the table from something else than `TrainerArguments`."""
    found, own = [], None
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        reads = [(node, owner) for node in ast.walk(function) if (owner := reads_one(node))]
        if not reads:
            continue
        if own is None:
            own = "\n    args: TrainerArguments\n" in ast.unparse(tree)  # of a data class
        text = ast.unparse(function)
        is_typed = any(f"args: {kind}TrainerArguments" in text for kind in ("", "'"))
        wraps = (
            own
            or is_typed
            or re.search(r"\bargs = .*TrainerArguments\(|\bargs\b.* = .*Trainer", text)
        )
        for node, owner in reads:
            is_safe = own if isinstance(owner, ast.Attribute) else wraps
            found += [] if is_safe and isinstance(node, ast.Attribute) else [node.lineno]
    return found


def test_no_file_reads_an_argument_of_a_trainer_but_by_the_table() -> None:
    by_hand = ast.parse("def f(trainer, args):\n x = trainer.args.seed\n y = args.max_length")
    assert reads_by_hand(by_hand) == [2, 3]
    for file in Path(finetune.__file__).parent.rglob("*.py"):
        lines = reads_by_hand(ast.parse(file.read_text("utf-8")))
        assert not lines, f"{file}: {lines}"


def test_a_typed_train_section_stays_the_mapping_that_was_written() -> None:
    train = TrainSection(packing=None, max_length=None, learning_rate=1e-4)
    assert (train.packing, train.max_length, train.max_steps) == (False, None, -1)
    assert {**train} == {"packing": None, "max_length": None, "learning_rate": 1e-4}
    changed = load_recipe("tiny_lora_bf16").config.model_copy(update={"train": {"seed": 7}})
    assert changed.train.seed == 7
