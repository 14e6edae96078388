"""Transformer Engine for tests, on a machine without a GPU.

    loading.py     the engine's own, unmodified Python (2.20.2), imported from a folder aside
    extension.py   a double of the compiled library under it, `transformer_engine_torch`
    stand_in.py    a small engine of our own, where the wheel is missing
    fetch.py       `python -m tests.te.fetch`: gets the wheel, once

The fixture `te_engine` (conftest) gives either, under the same assertions. Tests that only make
sense over the engine's own code take `real_te`, which skips them where the wheel is missing.
"""

from __future__ import annotations

from typing import Any


def install(patch: Any, *, real: bool | None = None) -> Any:
    """Put the engine into `sys.modules` until `patch` is undone; returns a handle on it.

    Args:
        patch: a `pytest.MonkeyPatch`.
        real: the engine's own Python, or the stand-in. Default: its own where the wheel is.
    """
    from peft.import_utils import is_te_pytorch_available

    from tests.te.fetch import is_here

    is_te_pytorch_available()  # PEFT remembers the first answer, which has to be that without it
    if is_here() if real is None else real:
        from tests.te.loading import Engine
    else:
        from tests.te.stand_in import Engine
    return Engine(patch)
