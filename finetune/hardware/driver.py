"""The model of this machine's GPU, as NVIDIA's driver names it: known without torch."""

from __future__ import annotations

import re
from pathlib import Path

DRIVER = Path("/proc/driver/nvidia/gpus")
"""Folder in which NVIDIA's driver describes each GPU of a Linux machine."""


def installed_model(driver: Path = DRIVER) -> str | None:
    """The model of the first GPU; None where there is none."""
    for file in sorted(driver.glob("*/information")):
        if model := re.search(r"^Model:\s*(.+)$", file.read_text(), re.MULTILINE):
            return model[1].strip()
    return None
