"""Listeners to every backward, whoever starts it.

Accelerate, Trainer and hand-written loops all go through `torch.autograd.backward` or `.grad`. A
dispatch mode must be entered on the thread that calls them: autograd's own threads inherit it. Both
functions are patched while somebody listens, once for all listeners, and plain again afterwards.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any, Protocol

import torch

from finetune.precision.backends.base import in_backward


class Listener(Protocol):
    """A listener to backwards."""

    def watch_backward(self) -> contextlib.AbstractContextManager[None]:
        """Entered around a backward of anything."""
        ...

    def after_backward(self) -> None:
        """Called when it has ended well."""
        ...


_listeners: list[Listener] = []
_plain: dict[str, Any] = {}


def listen(listener: Listener) -> None:
    """Call a listener around each backward from now on."""
    _listeners.append(listener)
    if not _plain:
        for name in ("backward", "grad"):
            _plain[name] = getattr(torch.autograd, name)
            setattr(torch.autograd, name, _watched(_plain[name]))


def stop(listener: Listener) -> None:
    """Call it no longer. Harmless when it is not called."""
    _listeners[:] = [one for one in _listeners if one is not listener]
    if not _listeners:
        for name, plain in _plain.items():
            setattr(torch.autograd, name, plain)
        _plain.clear()


def _watched(plain: Any) -> Any:
    @functools.wraps(plain)
    def watched(*args: Any, **kwargs: Any) -> Any:
        # A backward inside one (reentrant checkpointing) is a part of it: modes are entered
        # already, and what has run so far is not all of it.
        listening = [] if in_backward() else list(_listeners)
        with contextlib.ExitStack() as stack:
            for listener in listening:
                stack.enter_context(listener.watch_backward())
            result = plain(*args, **kwargs)
        for listener in listening:
            listener.after_backward()
        return result

    return watched
