"""Isolation of a rehearsal from the process it runs in, whose shared state is set aside meanwhile.

`train` rehearses before it trains: Accelerate's state, seeds and the launcher's variables are then
as if it had not.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
from collections.abc import Iterator

import numpy as np
import torch

from finetune.hardware.device import generators
from finetune.training.helper import session


@contextlib.contextmanager
def isolated_process() -> Iterator[None]:
    """Run the block as a single process, and restore the state that the whole process shares.

    Training arguments reset Accelerate's global state to a CPU, which a trainer at work would then
    read. The environment of torchrun or `accelerate launch` would make the rehearsal join the run's
    processes, or create their group too early.
    """
    from accelerate.state import AcceleratorState, GradientState, PartialState

    # Accelerate (1.15) has one dictionary for all instances of a class (the Borg pattern).
    shared = [cls._shared_state for cls in (PartialState, AcceleratorState, GradientState)]
    before = [dict(state) for state in shared]
    python, numbers = random.getstate(), np.random.get_state()
    launched = {key: os.environ[key] for key in list(os.environ) if _LAUNCHED.fullmatch(key)}
    for state in shared:
        state.clear()
    for key in launched:
        del os.environ[key]
    try:
        # A run that is checked before it trains must draw the numbers that it would have drawn
        # without.
        with torch.random.fork_rng(generators()), session.aside():
            yield
    finally:
        for key in [key for key in os.environ if _LAUNCHED.fullmatch(key)]:
            del os.environ[key]
        os.environ.update(launched)
        random.setstate(python)
        np.random.set_state(numbers)
        for state, values in zip(shared, before, strict=True):
            state.clear()
            state.update(values)


_LAUNCHED = re.compile(
    r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|(PMI|OMPI_COMM_WORLD|MV2_COMM_WORLD)_\w+"
    r"|ACCELERATE_\w+|FSDP_\w+|TORCHELASTIC_\w+"
)
"""Launcher variables that describe the process group and its sharding."""
