"""Rows as a trainer of TRL prepares them, without the model that trains.

A trainer tokenizes, cuts and drops its rows when it is made, and has them as `train_dataset` from
then on. How it does so is its own affair, and changes. So one is made around a model of a few
numbers, for its rows alone:

    rows ──> trainer(a model of a few numbers, arguments about rows) ──> its train_dataset

It takes a twentieth of a second beside the tokenizing. The trainer that trains is handed these
(`as_they_are`), after they have been counted (`finetune.data.ledger`).
"""

from __future__ import annotations

import copy
import dataclasses
from tempfile import TemporaryDirectory
from typing import Any

import torch
from datasets import Dataset, IterableDataset

from finetune.config.methods import METHODS, Method
from finetune.config.train_keys import for_library
from finetune.hardware.device import generators

ASIDE: dict[str, Any] = {
    "activation_offloading": False,
    "assistant_only_loss": False,
    "chat_template_path": None,
    "dataset_kwargs": None,
    "eval_packing": None,
    "eval_strategy": "no",
    "gradient_checkpointing": False,
    "gradient_checkpointing_kwargs": None,
    "packing": False,
    "padding_free": False,
    "precompute_ref_log_probs": False,
    "push_to_hub": False,
    "report_to": [],
    "sync_ref_model": False,
    "use_liger_kernel": False,
}
"""Arguments that say nothing of rows, or of which `finetune.data.masks` has taken care."""
NOT_MOVED = {"place_model_on_device": False}
"""What a class of arguments says (documented): a model of a few numbers needs no GPU."""


def prepared(method: Method, rows: Any, args: Any, tokenizer: Any, **settings: Any) -> Any:
    """Rows of a method as the trainer that prepares them has them, a `Dataset` or a stream.

    Args:
        method: one with `prepared_by`.
        rows: in one of TRL's formats.
        args: the trainer's arguments, which stay as they are.
        settings: arguments in their place; of `ASIDE` none counts otherwise.

    Raises:
        ValueError and what a chat template raises: as the trainer does.
    """
    method = METHODS[method.prepared_by]
    kind = type(method.config.rpartition(".")[2], (method.config_class,), NOT_MOVED)
    aside, settings = for_library(kind, ASIDE), for_library(kind, settings)
    # `__post_init__` of the arguments resets Accelerate's state of the process, devices and seeds.
    quiet: Any = object.__new__(kind)  # nothing is set up a second time
    for field in dataclasses.fields(method.config_class):
        made = field.default_factory
        default = field.default if made is dataclasses.MISSING else made()
        setattr(quiet, field.name, aside.get(field.name, getattr(args, field.name, default)))
    vars(quiet).update({key: value for key, value in vars(args).items() if key not in aside})
    # Building a model draws numbers, which training is to draw as if there had been none.
    with torch.random.fork_rng(generators()), TemporaryDirectory() as folder:
        settings |= for_library(kind, {"output_dir": folder})  # which a trainer makes
        vars(quiet).update(settings)
        trainer = method.trainer_class(
            **_smallest(method), args=quiet, train_dataset=rows, processing_class=tokenizer
        )
    return trainer.train_dataset


def _smallest(method: Method) -> dict[str, Any]:
    """A model of a few numbers, as a trainer takes it; adapters stand for a reference."""
    from peft import LoraConfig
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

    shape = LlamaConfig(
        vocab_size=2, hidden_size=2, intermediate_size=2, num_hidden_layers=1,
        num_attention_heads=1, num_key_value_heads=1, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    shape.num_labels = 1
    if method.head == "score":
        return {"model": LlamaForSequenceClassification(shape)}
    adapters = {"peft_config": LoraConfig(r=1, target_modules=["q_proj"])}
    return {"model": LlamaForCausalLM(shape)} | (adapters if method.reference else {})


class _Rows(Dataset):
    """Prepared rows: what a trainer maps or filters again stays as it is."""

    def map(self, *_: Any, **__: Any) -> Any:
        return self

    def filter(self, *_: Any, **__: Any) -> Any:
        return self


class _Stream(IterableDataset):
    """The same of a stream."""

    def map(self, *_: Any, **__: Any) -> Any:
        return self

    def filter(self, *_: Any, **__: Any) -> Any:
        return self


def as_they_are(done: Any) -> Any:
    """Prepared rows for a trainer that would prepare them once more."""
    handed = copy.copy(done)
    # A subclass, since trainers ask for the type of what they are given.
    handed.__class__ = _Rows if isinstance(done, Dataset) else _Stream
    return handed
