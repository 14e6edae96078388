"""FP8 fine-tuning for Hugging Face models: FP8 asked is FP8 given, proven, or an error.

Importing this package imports no torch: each public name is loaded when it is first used, from
where `__init__.pyi` has it.
"""

from __future__ import annotations

import functools
import importlib
import re
import sys
from pathlib import Path
from typing import Any

__version__ = "0.1.0"

_STUB = Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")
_HOME = {n: m for m, n in re.findall(r"from finetune\.(\S+) import \(?\s*\w+ as (\w+)", _STUB)}
__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'finetune' has no attribute {name!r}")
    _before_libraries()
    return getattr(importlib.import_module(f"finetune.{_HOME[name]}"), name)


@functools.cache
def _before_libraries() -> None:
    """Quiet them in a script, say once what is not tested, and refuse what is too old."""
    seen = sys.stderr is not None and (sys.stderr.isatty() or "ipykernel" in sys.modules)
    importlib.import_module("finetune.logging").quiet_imports(bars=seen)
    for line in importlib.import_module("finetune.hardware.versions").check():
        print(f"! {line}", file=sys.stderr)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
