"""Errors of a training loop: each is provoked, then the same loop does what the error says.

A case is a function that trains a small Llama wrongly, and as its error's fix says with `obey`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import AORecipeKwargs
from peft import LoraConfig, get_peft_model
from torch import nn

from finetune import (
    get_receipt,
    load_in_fp8,
    setup_fp8_mixed_precision_training,
    teardown_fp8_mixed_precision_training,
)
from finetune.errors import FinetuneError
from tests.conftest import batch, slow_but

set_up = partial(
    setup_fp8_mixed_precision_training, "emulated", emulation="allow", scaling="rowwise", cpu=True
)


@dataclass
class Given:
    """A fresh Llama, the same one on disk, and True to do what the error says."""

    model: Any
    folder: str
    obey: bool


def adapted(model: Any) -> Any:
    return get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"])).train()


def adamw(model: nn.Module, without: str = "-") -> torch.optim.Optimizer:
    found = [p for n, p in model.named_parameters() if p.requires_grad and without not in n]
    return torch.optim.AdamW(found, lr=1e-2)


def train(accelerator: Accelerator, model: Any, optimizer: Any) -> None:
    """Two steps, after which a run is proven."""
    for seed in range(2):
        accelerator.backward(model(**batch(seed=seed)).loss)
        optimizer.step()
        optimizer.zero_grad()


def accelerator_first(given: Given) -> None:
    early = Accelerator(cpu=True)
    accelerator = set_up()
    accelerator = accelerator if given.obey else early
    train(accelerator, *accelerator.prepare(given.model, adamw(given.model)))


def model_never_prepared(given: Given) -> None:
    accelerator, optimizer = set_up(), adamw(given.model)
    if given.obey:
        train(accelerator, *accelerator.prepare(given.model, optimizer))
    else:
        train(accelerator, given.model, accelerator.prepare(optimizer))


def evaluation_mode(given: Given) -> None:
    accelerator = set_up()
    model, optimizer = accelerator.prepare(given.model, adamw(given.model))
    model.train() if given.obey else model.eval()
    train(accelerator, model, optimizer)


def optimizer_alone(given: Given) -> None:
    accelerator = set_up()
    model, optimizer = accelerator.prepare(given.model, adamw(given.model))
    if given.obey:
        train(accelerator, model, optimizer)
        return
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def adapters_afterwards(given: Given) -> None:
    accelerator, model = set_up(), given.model
    if given.obey:
        model = adapted(model)
    optimizer = adamw(model)
    model, optimizer = accelerator.prepare(model, optimizer)
    train(accelerator, model if given.obey else adapted(model), optimizer)


def frozen_afterwards(given: Given) -> None:
    accelerator = set_up()
    embedding = given.model.get_input_embeddings()
    embedding.requires_grad_(not given.obey)
    model, optimizer = accelerator.prepare(given.model, adamw(given.model))
    embedding.requires_grad_(False)
    train(accelerator, model, optimizer)


def half_an_optimizer(given: Given) -> None:
    accelerator = set_up()
    optimizer = adamw(given.model, without="-" if given.obey else "mlp")
    train(accelerator, *accelerator.prepare(given.model, optimizer))


def set_up_again(given: Given) -> None:
    accelerator = set_up()
    model = accelerator.prepare(given.model)
    accelerator = set_up()
    if given.obey:
        model._is_accelerate_prepared = False  # what building a trainer again does
        model, optimizer = accelerator.prepare(model, adamw(model))
    else:
        optimizer = adamw(model)
    train(accelerator, model, optimizer)


def recipe_handlers(given: Given) -> None:
    accelerator = set_up(**{} if given.obey else {"kwargs_handlers": [AORecipeKwargs()]})
    train(accelerator, *accelerator.prepare(given.model, adamw(given.model)))


def fp16_beside(given: Given) -> None:
    accelerator = set_up(**{} if given.obey else {"mixed_precision": "fp16"})
    train(accelerator, *accelerator.prepare(given.model, adamw(given.model)))


def compiled_whole(given: Given) -> None:
    accelerator = set_up(**{} if given.obey else {"dynamo_backend": "inductor"})
    train(accelerator, *accelerator.prepare(given.model, adamw(given.model)))


def compiled_by_hand(given: Given) -> None:
    accelerator = set_up()
    model = given.model if given.obey else torch.compile(given.model, backend="eager")
    train(accelerator, *accelerator.prepare(model, adamw(model)))


def compiled_after_it_is_prepared(given: Given) -> None:
    accelerator = set_up()
    model, optimizer = accelerator.prepare(given.model, adamw(given.model))
    model = model if given.obey else torch.compile(model, backend="eager")
    train(accelerator, model, optimizer)


def layers_compiled_by_hand(given: Given) -> None:
    accelerator = set_up()
    for layer in () if given.obey else given.model.model.layers:
        layer.compile(backend="eager")
    train(accelerator, *accelerator.prepare(given.model, adamw(given.model)))


def receipt_too_late(given: Given) -> None:
    accelerator = set_up()
    train(accelerator, *accelerator.prepare(given.model, adamw(given.model)))
    if not given.obey:
        teardown_fp8_mixed_precision_training()
    get_receipt()


def stored_base(given: Given) -> None:
    accelerator = set_up(**{"frozen": "fp8"} if given.obey else {})
    model = adapted(load_in_fp8(given.folder))
    train(accelerator, *accelerator.prepare(model, adamw(model)))


def codes_that_train(given: Given) -> None:
    model = load_in_fp8(given.folder).train()
    if given.obey:
        model = adapted(model)
        accelerator = set_up(frozen="fp8")
        train(accelerator, *accelerator.prepare(model, adamw(model)))
    else:
        model.requires_grad_(True)


def no_frozen_layer(given: Given) -> None:
    accelerator = set_up(frozen="fp8")
    model = adapted(given.model) if given.obey else given.model
    train(accelerator, *accelerator.prepare(model, adamw(model)))


def merged_into_codes(given: Given) -> None:
    from peft import PeftModel

    accelerator = set_up(frozen="fp8")
    model = adapted(load_in_fp8(given.folder))
    train(accelerator, *accelerator.prepare(model, adamw(model)))
    if given.obey:
        model.save_pretrained(f"{given.folder}/adapter")
        PeftModel.from_pretrained(given.model, f"{given.folder}/adapter").merge_and_unload()
    else:
        model.merge_and_unload()


CASES: list[tuple[Callable[[Given], None], str]] = [
    (accelerator_first, "call setup_fp8_mixed_precision_training() first"),
    (model_never_prepared, "pass model and optimizer to accelerator.prepare"),
    (evaluation_mode, "model.train() before the step"),
    (optimizer_alone, "call the prepared model itself"),
    (adapters_afterwards, "attach adapters first"),
    (frozen_afterwards, "freeze before"),
    (half_an_optimizer, "build the optimizer from model.parameters()"),
    (set_up_again, "prepare it again"),
    (recipe_handlers, "pass those settings to setup_fp8_mixed_precision_training"),
    (fp16_beside, "leave fp16 out"),
    (compiled_whole, "leave torch_compile out"),
    (compiled_by_hand, "leave torch_compile out"),
    (compiled_after_it_is_prepared, "leave torch_compile out"),
    (layers_compiled_by_hand, "leave torch_compile out"),
    (receipt_too_late, "ask before teardown"),
    (stored_base, "frozen='fp8' with adapters over it"),
    (codes_that_train, "attach them with peft"),
    (no_frozen_layer, "the base under adapters"),
    (merged_into_codes, "load the base model plain and the adapter over it with peft"),
]
"""Case, and the words of the fix that it does."""


@pytest.mark.parametrize(
    ("case", "says"),
    [
        *slow_but([case for case in CASES if case[0] is evaluation_mode], CASES[::3]),
        *slow_but([], [case for case in CASES if case not in CASES[::3]], pytest.mark.long),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_the_error_says_is_done_and_trains(case, says, make_llama, tmp_path, tried) -> None:
    make_llama().save_pretrained(tmp_path)
    with pytest.raises(FinetuneError) as caught:
        case(Given(make_llama(), str(tmp_path), obey=False))
    assert says in caught.value.fix
    teardown_fp8_mixed_precision_training()
    _forget_accelerators()
    case(Given(make_llama(), str(tmp_path), obey=True))
    assert get_receipt().status == "proven"
    tried(case.__name__.replace("_", " "), caught.value, f"{says}; trained two steps, proven")


def _forget_accelerators() -> None:
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
