"""Packaged shapes: each has as many parameters as its model was published with."""

from __future__ import annotations

import re

import pytest
import torch

from finetune.config.paths import SHAPES, shipped_shapes
from finetune.config.schema import ModelConfig
from finetune.storage.pretrained import auto_class, load_shape

PUBLISHED = {
    name: int(count.replace(",", ""))
    for name, count in re.findall(
        r"^\| (\S+/\S+) \| ([\d,]+) \|", (SHAPES / "README.md").read_text(), re.M
    )
}


def test_each_shape_has_a_source() -> None:
    assert list(PUBLISHED) == shipped_shapes()


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_shape_has_the_parameters_of_the_published_model(name) -> None:
    shape = load_shape(ModelConfig(name=name, weights="random"))
    with torch.device("meta"):
        model = auto_class(shape).from_config(shape)
    assert model.num_parameters() == PUBLISHED[name]
