"""Two layers through Transformers' quantizer, before the first model is trusted to it.

What `finetune.storage.quantizer` overrides are names that Transformers does not promise
(`_process_model_before_weight_loading` and others). If one had another name, ours would not be
called, and codes be read as numbers without their scales: no error, and no model. So before the
first load a model of two layers is quantized, saved and loaded again, in a tenth of a second:

    w [16, 16] ──> from_pretrained(quantization_config) ──> codes ──> save, load ──> the same codes
"""

from __future__ import annotations

import contextlib
import io
import tempfile
import warnings
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from finetune.errors import StorageNotComputeError, first_line
from finetune.hardware.device import generators
from finetune.hardware.versions import table, version
from finetune.precision.numbers.weights import quantize_weight
from finetune.precision.stored.linear import iter_stored
from finetune.storage.checkpoint_formats import tile_named

SIZE = 16


class _Config(PreTrainedConfig):
    model_type = "finetune_trial"


class _Model(PreTrainedModel):
    config_class = _Config

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.first, self.second = (nn.Linear(SIZE, SIZE, bias=False) for _ in range(2))
        self.norm = nn.LayerNorm(SIZE)  # a model has a type, which codes have not
        self.post_init()

    def should_save_on_this_rank(self, is_main_process: bool) -> bool:
        """Each process of a run tries in a folder of its own; Transformers (5.23): the first."""
        return is_main_process


def check_quantizer(quantizer: Any) -> None:
    """Try Transformers' quantizers once in this process, but for the models of the trial.

    Args:
        quantizer: the one that a model is about to be loaded by.

    Raises:
        StorageNotComputeError: this Transformers does not store weights as codes.
    """
    # The trial loads models by the same quantizer, which would try itself for ever.
    if not _trying:
        _check(type(quantizer), type(quantizer.quantization_config))


_trying: list[bool] = []


@contextlib.contextmanager
def _aside() -> Iterator[str]:
    """Context manager: a folder, and nothing of the trial is seen outside."""
    _trying.append(True)
    try:
        with (
            tempfile.TemporaryDirectory() as folder,
            # A run that loads an FP8 base draws as one that loads another.
            torch.random.fork_rng(generators()),
            torch.device("cpu"),
            warnings.catch_warnings(action="ignore"),
            contextlib.redirect_stderr(io.StringIO()),  # bars
        ):
            yield folder
    finally:
        _trying.clear()


# Once a process: the library does not change meanwhile.
@cache
def _check(quantizer: type, config: type) -> None:
    try:
        with _aside() as folder:
            plain: Any = _Model(_Config())
            due = {
                name: quantize_weight(module.weight.detach(), tile_named("row", (SIZE, SIZE)))[0]
                for name, module in plain.named_children()
                if isinstance(module, nn.Linear)
            }
            plain.save_pretrained(f"{folder}/plain")
            model: Any = _Model.from_pretrained(
                f"{folder}/plain", quantization_config=config("row")
            )
            _compare(model, due)
            model.save_pretrained(f"{folder}/codes")
            again: Any = _Model.from_pretrained(f"{folder}/codes")
            _compare(again, due)
            _compare(again.dequantize(), {})
    except Exception as error:
        found, known = version("transformers"), table()["ran"]["transformers"][-1]
        raise StorageNotComputeError(
            "weights cannot be stored in FP8 with this Transformers",
            where=f"transformers {found} (tested up to {known})",
            why=f"two layers were tried before the model: {first_line(error)}",
            fix=f"pip install 'transformers<={known}'",
        ) from error


def _compare(model: Any, due: dict[str, torch.Tensor]) -> None:
    found = {name: module.bits for name, module in iter_stored(model)}
    if found.keys() != due.keys():
        raise ValueError(f"{len(found)} layers are codes, {len(due)} were to be")
    for name, bits in found.items():
        if not torch.equal(bits.cpu().view(torch.uint8), due[name].view(torch.uint8)):
            raise ValueError(f"the codes of {name} are others than its weights'")
    if any(p.requires_grad for p in model.parameters()):
        raise ValueError("what is not stored would train")
