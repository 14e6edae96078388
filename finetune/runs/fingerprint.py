"""What files hold, as one number: told from other files by content, not by name or time.

A run reads files again when it resumes, is exported or asked (base, teacher, rewards, templates);
`finetune.training.checkpoints.resume.model_files` lists them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

BLOCK, BLOCKS = 1 << 20, 64
"""Bytes of a block, and blocks of a large file that are read."""


def fingerprint(files: Iterable[Path], *about: str) -> str:
    """SHA-256 of files' contents in their order, and of what is known about them.

    Of a file above 64 MiB: of its size and 64 evenly spaced blocks, the first and last among them.
    Weights that were trained, merged or cast again differ in all of these.
    """
    found = hashlib.sha256(repr(about).encode())
    for path in files:
        size = path.stat().st_size
        found.update(str(size).encode())
        count = min(BLOCKS, -(-size // BLOCK))
        with path.open("rb") as file:
            for index in range(count):
                file.seek((size - BLOCK) * index // (count - 1) if count > 1 else 0)
                found.update(file.read(BLOCK))
    return found.hexdigest()
