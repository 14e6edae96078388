"""Exports of runs with images: loaded by Transformers alone, they say the same of a picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from transformers import AutoModelForImageTextToText, AutoProcessor

from tests.benchmarks.families import run_with_images_exported
from tests.conftest import slow_but
from tests.image_models import FOUR, batch_of, processor_of

BY_TORCHVISION = ("qwen3_vl", "smolvlm")
"""Families whose processor Transformers alone makes only where torchvision is installed."""


def logits(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    with torch.inference_mode():
        return model.eval()(**{k: v for k, v in batch.items() if k != "labels"}).logits


def kept_matrices(folder: Path) -> set[str]:
    """Layers with a matrix in the files that is not codes, without tables."""
    with safe_open(folder / "model.safetensors", "pt") as file:
        names = {*file.keys()}
        wide = {n for n in names if n.endswith(".weight") and file.get_tensor(n).dim() == 2}
    layers = {name.removesuffix(".weight") for name in wide}
    return {n for n in layers if f"{n}.weight_scale" not in names and "embed" not in n}


CASES = [(family, method) for family in FOUR for method in ("full", "lora")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "method"), slow_but([("gemma3", "lora")], CASES, pytest.mark.long)
)
def test_an_export_says_of_pictures_what_the_run_says(family, method, tmp_path) -> None:
    row = run_with_images_exported(family, method, tmp_path)
    assert (row.error, row.exports.keys()) == ("", {"merged", "fp8"})
    assert row.receipt is not None
    assert row.receipt.status == "proven"
    home = tmp_path / "with_images" / family
    merged, fp8 = (tmp_path / f"{family}_{method}_{to}" for to in ("merged", "fp8"))
    batch, trained = batch_of(home), row.folder / "model"
    of: Any = AutoModelForImageTextToText.from_pretrained
    run = of(trained) if method == "full" else PeftModel.from_pretrained(of(home), trained)
    expected, found = logits(run, batch), logits(of(merged, dtype=torch.float32), batch)
    assert not torch.allclose(expected, logits(of(home), batch)), "nothing was trained"
    assert float((found - expected).norm() / expected.norm()) < (0.02 if method == "lora" else 1e-6)
    # The files of an export make the batches of the run.
    processor = processor_of(merged)
    if family not in BY_TORCHVISION:
        processor = AutoProcessor.from_pretrained(merged)
    assert processor.image_processor.to_dict() == processor_of(home).image_processor.to_dict()
    assert processor.chat_template
    again = batch_of(merged, family=family)
    assert all(torch.equal(value, again[key]) for key, value in batch.items())
    # As vLLM reads it: all that is no code is named.
    ignored = {*json.loads((fp8 / "config.json").read_text())["quantization_config"]["ignore"]}
    kept = kept_matrices(fp8)
    assert kept <= ignored
    assert any("vis" in name for name in kept)
    text = [name for name in kept if "language_model" in name or "text_model" in name]
    assert not [name for name in text if not name.endswith("lm_head")]
