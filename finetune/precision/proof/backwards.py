"""Backwards, whoever starts them.

Accelerate, Trainer and hand-written loops all go through `torch.autograd.backward` or `.grad`. A
dispatch mode must be entered on the thread that calls them: autograd's own threads inherit it. Both
functions are patched while somebody watches, once for all watchers, and restored afterwards.
Watchers are held weakly: one of a run that failed goes with its model.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from typing import Any, Protocol

import torch

from finetune.precision.backends.base import in_backward


class Watcher(Protocol):
    """An observer of backwards."""

    def watch_backward(self) -> contextlib.AbstractContextManager[None]:
        """Context of a backward, of any model."""
        ...

    def after_backward(self) -> None:
        """Called after a backward that raised nothing."""
        ...


_watching: list[weakref.ref[Any]] = []
_plain: dict[str, Any] = {}


def watch_backwards(watcher: Watcher) -> None:
    """Let `watcher` see each backward from now on."""
    _watching.append(weakref.ref(watcher, lambda _: _restore_unwatched()))
    if not _plain:
        for name in ("backward", "grad"):
            _plain[name] = getattr(torch.autograd, name)
            setattr(torch.autograd, name, _watched(_plain[name]))


def unwatch_backwards(watcher: Watcher) -> None:
    """Undo `watch_backwards`; repeated calls have no effect."""
    _watching[:] = [one for one in _watching if one() is not watcher]
    _restore_unwatched()


def _restore_unwatched() -> None:
    _watching[:] = [one for one in _watching if one() is not None]
    if not _watching:
        for name, plain in _plain.items():
            setattr(torch.autograd, name, plain)
        _plain.clear()


def _watched(plain: Any) -> Any:
    @functools.wraps(plain)
    def watched(*args: Any, **kwargs: Any) -> Any:
        # A backward inside one (reentrant checkpointing) is a part of it: modes are entered
        # already, and what has run so far is not all of it.
        watchers = [] if in_backward() else [w for one in _watching if (w := one()) is not None]
        with contextlib.ExitStack() as stack:
            for watcher in watchers:
                stack.enter_context(watcher.watch_backward())
            result = plain(*args, **kwargs)
        for watcher in watchers:
            watcher.after_backward()
        return result

    return watched
