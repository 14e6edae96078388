"""FP8 with images in the batch: what the language layers, the projector and the tower run in."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import AutoModelForImageTextToText

from finetune import get_receipt, load_in_fp8, load_recipe
from finetune.precision.model.towers import FROZEN_TOWER, modules_beside
from finetune.precision.stored.linear import stored_as
from finetune.storage import nf4
from finetune.training import scope
from finetune.training.model import load_model, meta_model
from tests.conftest import slow_but
from tests.image_models import FOUR, batch_of, tiny_image_model


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Folder of a tiny model of a family, made once."""
    return cache(lambda family: tiny_image_model(family, tmp_path_factory.mktemp("models")))


def model_of(home: Path, method: str, vision: str = "none", checkpointed: bool = False) -> Any:
    """The model, frozen and adapted as a run does it."""
    overrides = [f"model.name={home}", f"model.train_vision={vision}"]
    config = load_recipe(f"tiny_{method}_fp8", overrides).config
    model = AutoModelForImageTextToText.from_pretrained(home)
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    scope.freeze(model, config)
    return scope.attach(model, config).train()


def steps(model: Any, accelerator: Any, batches: list[dict[str, Any]]) -> list[float]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    losses = []
    for batch in batches:
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def rows_by_role() -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for row in get_receipt().layers:
        found.setdefault(row.role, []).append(row)
    return found


CASES = [(family, method) for family in FOUR for method in ("full", "lora")]


@pytest.mark.parametrize(
    ("family", "method"), slow_but([("gemma3", "full"), ("qwen3_vl", "lora")], CASES)
)
def test_language_layers_run_in_fp8_and_a_frozen_tower_does_not(
    home, setup_backend, family, method
) -> None:
    model = model_of(home(family), method, checkpointed=family == "gemma3")
    before = {n: p.clone() for n, p in model.named_parameters() if not p.requires_grad}
    images, text = batch_of(home(family)), batch_of(home(family), images=0)
    losses = steps(model, setup_backend("emulated"), [images, text, images])
    assert get_receipt().status == "proven"
    assert losses[2] < losses[0]
    rows = rows_by_role()
    assert {(row.fprop, row.wgrad) for row in rows["base"]} == {
        ("fp8", "fp8" if method == "full" else "none")
    }
    assert {(row.fprop, row.wgrad) for row in rows["tower"]} <= {("bf16", "none"), ("none", "none")}
    ran = [row for row in rows["tower"] if row.fprop == "bf16"]
    assert ran
    assert {row.reason for row in ran} == {FROZEN_TOWER}
    after = dict(model.named_parameters())
    assert all(torch.equal(values, after[name]) for name, values in before.items())


@pytest.mark.parametrize(("family", "method"), slow_but([("gemma3", "lora")], CASES))
def test_text_before_the_first_image_is_no_error_where_the_projector_trains(
    home, setup_backend, family, method
) -> None:
    """It has no gradient until a batch has an image, and trains from then on."""
    model = model_of(home(family), method, "projector")
    projector = {
        name: p.clone()
        for name, p in model.named_parameters()
        if p.requires_grad and p.dim() == 2 and ".layers." not in name and "lora_" not in name
        if "embed_tokens" not in name and "lm_head" not in name
    }
    images, text = batch_of(home(family)), batch_of(home(family), images=0)
    with pytest.warns(UserWarning, match="have had no gradient but zeros"):
        steps(model, setup_backend("emulated"), [text, text, images, images])
    receipt = get_receipt()
    assert receipt.status == "proven"
    assert not receipt.held["entered"]
    after = dict(model.named_parameters())
    assert projector
    assert not [name for name, values in projector.items() if torch.equal(values, after[name])]


@pytest.mark.filterwarnings("ignore:.*no gradient but zeros")  # Gemma's projector begins with zeros
@pytest.mark.parametrize("family", slow_but(["qwen3_vl"], FOUR))
def test_a_tower_that_trains_runs_in_fp8_where_its_sizes_allow(home, setup_backend, family) -> None:
    model = model_of(home(family), "full", "all")
    batch = batch_of(home(family), images=2)
    losses = steps(model, setup_backend("emulated"), [batch, batch])
    assert losses[1] < losses[0]
    rows = rows_by_role()
    assert "tower" not in rows
    ran = [row for row in rows["base"] if "language" not in row.name and "text_" not in row.name]
    assert {row.fprop for row in ran if row.calls["fprop"] and not row.reason} == {"fp8"}
    assert get_receipt().status == "proven"


@pytest.mark.parametrize("family", slow_but(["qwen3_vl"], FOUR))
def test_storage_in_fp8_leaves_tower_and_projector_as_they_are(home, family) -> None:
    model = load_in_fp8(home(family), dtype=torch.float32)
    plain = AutoModelForImageTextToText.from_pretrained(home(family))
    beside = modules_beside(model)
    assert beside
    assert {bool(stored_as(m)) for m in model.modules() if id(m) in beside} == {False}
    assert any(stored_as(m) for m in model.modules())
    batch = batch_of(home(family))
    pixels = {k: v for k, v in batch.items() if k.startswith(("pixel_values", "image_"))}
    with torch.inference_mode():
        seen = [cast(Any, one).get_image_features(**pixels).pooler_output for one in (model, plain)]
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))


@pytest.mark.parametrize("family", slow_but(["gemma3"], FOUR))
def test_four_bits_leave_tower_and_projector_which_can_train(home, family) -> None:
    overrides = [f"model.name={home(family)}", "model.train_vision=projector"]
    config = load_recipe("tiny_qlora_bf16", overrides).config
    model = load_model(config.model)
    stored = {id(m) for m in model.modules() if stored_as(m)}
    assert stored
    assert not stored & modules_beside(model)
    assert len(stored) == len(nf4.stored_linears(meta_model(config)))
    model = scope.attach(model, config)
    model(**batch_of(home(family))).loss.backward()
    trained = {n for n, p in model.named_parameters() if p.grad is not None}
    assert any("modules_to_save" in name for name in trained)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # inductor warns about its own environment
def test_compiled_decoder_layers_take_images(home, setup_backend) -> None:
    losses, family = {}, "gemma3"
    images, text = batch_of(home(family)), batch_of(home(family), images=0)
    for compiled in ("off", "on"):
        torch._dynamo.reset()
        counters.clear()
        accelerator = setup_backend("emulated", compile=compiled)
        losses[compiled] = steps(model_of(home(family), "lora"), accelerator, [images, text] * 2)
    assert losses["on"] == pytest.approx(losses["off"], rel=1e-2)
    assert get_receipt().precision["compile"] == "on: 2 decoder layers, after the witnessed step"
    assert not counters["graph_break"]
