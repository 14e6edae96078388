"""Evaluation inside of a training that goes on as if there had been none."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from finetune.hardware.device import generators
from finetune.precision.convert import conversion_of
from finetune.precision.settings import Compute
from finetune.training.helper.compute_types import AUTOCAST


def whole(model: Any) -> Any:
    """The model inside of its copies' exchange, if there is one."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def autocast(compute: Compute, device: str) -> torch.autocast:
    """Autocast as in training: BF16 or FP16, none with FP32."""
    dtype = AUTOCAST[compute]
    return torch.autocast(device, dtype, enabled=dtype is not None)


@contextlib.contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Evaluate inside; restores generators and module modes. Evaluation moves no scale."""
    conversion = conversion_of(model)
    modes = [(module, module.training) for module in model.modules()]
    python, arrays = random.getstate(), np.random.get_state()
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(generators()))
        if conversion is not None and conversion.compiled:
            # Each length of a prompt or a task would be a graph of its own, until Dynamo (torch
            # 2.13) gives the layer up, for training as well.
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        try:
            model.eval()
            yield
        finally:
            for module, training in modes:
                module.training = training
            random.setstate(python)
            np.random.set_state(arrays)
