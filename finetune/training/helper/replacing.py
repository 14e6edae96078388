"""Methods of other libraries that are replaced for a while, and put back."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Context manager that gives one object an attribute of its own, and its former one back."""
    had, before = name in vars(owner), vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if had:  # another library's
            setattr(owner, name, before)
        else:
            delattr(owner, name)


class Patches:
    """Temporary replacements of class methods.

    Attributes:
        are_aside: True while the original methods are back for a while.
    """

    def __init__(self) -> None:
        self._replaced: list[tuple[type, str, Any, Any]] = []  # owner, name, original, replacement
        self.are_aside = False

    @property
    def names(self) -> list[str]:
        """Dotted names of the replaced methods, in order."""
        return [f"{o.__module__}.{o.__qualname__}.{name}" for o, name, _, _ in self._replaced]

    def replace(self, owner: type, name: str, make: Callable[[Any], Any]) -> None:
        """Replace a method by `make(method)`."""
        original = getattr(owner, name)
        # With its name and signature, which Accelerate and Transformers look up.
        replacement = functools.wraps(original)(make(original))
        setattr(owner, name, replacement)
        self._replaced.append((owner, name, original, replacement))

    def _put_back(self) -> None:
        # Backwards: of a method that was replaced twice the first original comes back.
        for owner, name, original, _ in reversed(self._replaced):
            setattr(owner, name, original)

    def restore(self) -> None:
        self._put_back()
        self._replaced.clear()

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Context manager under the original methods."""
        self._put_back()
        self.are_aside = True
        try:
            yield
        finally:
            self.are_aside = False
            for owner, name, _, replacement in self._replaced:
                setattr(owner, name, replacement)
