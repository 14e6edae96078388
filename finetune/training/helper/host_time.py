"""What the host does between two steps, shortened: a GPU that has nothing queued waits for it.

Once in each optimizer step the host reads whether the gradients are finite, and the GPU waits until
the host has come from there to the first kernel of the next forward. Of 32 layers with adapters
Transformers (5.23) walks over 2,700 modules several times on this way: an H100 waited 45 ms of a
step of 390 (`docs/notes/15-on-an-h100.md`). None of these walks finds anything new:

| in Transformers | walks over | instead |
|---|---|---|
| `Trainer.floating_point_ops` | parameters, to count them | counted once |
| `Trainer.training_step` | modules, by `model.train()` | where one is in evaluation mode |
| `Trainer._run_epoch` | parameters, by `model.zero_grad()` | those that the optimizer has |

And `logging_nan_inf_filter` reads each loss twice, to keep what is not finite out of the log: such
a loss ends the run (`finetune.training.health.finiteness`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from finetune.config.train_keys import TrainerArguments
from finetune.precision.model.layers import without_adapters
from finetune.training.helper.replacing import replaced


@contextmanager
def shortened(trainer: Any, model: nn.Module) -> Iterator[None]:
    """Context manager of a training loop without these walks and reads.

    Args:
        trainer: whose `train` has begun: its optimizer and wrapped model are there.
        model: its model, unwrapped.
    """
    base, wrapped = without_adapters(model), trainer.model_wrapped
    # Dictionaries, since reading an attribute of `nn.Module` is a call for each.
    states, plain = [vars(module) for module in wrapped.modules()], wrapped.train

    def train(mode: bool = True) -> nn.Module:
        # A callback may have put a module into evaluation mode; then the walk is due.
        as_asked = mode and all(state["training"] for state in states)
        return wrapped if as_asked else plain(mode)

    with ExitStack() as stack:
        name = TrainerArguments.logging_nan_inf_filter.name_in(trainer.args)
        stack.enter_context(replaced(trainer.args, name, False))
        stack.enter_context(replaced(wrapped, "train", train))
        stack.enter_context(replaced(wrapped, "zero_grad", trainer.optimizer.zero_grad))
        if isinstance(base, PreTrainedModel):
            # By its arguments, of which Transformers (5.23) gives one.
            count = functools.cache(base.num_parameters)
            stack.enter_context(replaced(base, "num_parameters", count))
        yield
