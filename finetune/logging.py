"""Libraries speak through us: their progress bars and start-up notes are silenced."""

from __future__ import annotations

import logging
import os
import warnings


def quiet_libraries() -> None:
    """For a process whose output people read. Before the libraries are imported."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")
    noisy = (
        "torchao",
        "accelerate",
        "trl",
        "bitsandbytes",
        "torch.utils._pytree",
        "lm_eval",
        "matplotlib",
    )
    for name in noisy:
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=DeprecationWarning)
