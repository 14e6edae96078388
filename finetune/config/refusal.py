"""Refusals of settings that do not go together, each with the settings that solve it."""

from __future__ import annotations


class RefusedError(ValueError):
    """Values of a section that do not go together, with the settings that solve it.

    Args:
        what: sentence on what is wrong.
        ways: each alone is enough: `key=value` to set, `~key` to leave out, several with spaces.

    >>> print(RefusedError("margin belongs to delayed scaling", "scaling=delayed", "~margin"))
    margin belongs to delayed scaling; set scaling=delayed or leave margin out
    >>> RefusedError("margin is idle", "~margin", "eval=high ~keep").typed("precision")
    '~precision.margin, or precision.eval=high ~precision.keep'
    """

    def __init__(self, what: str, *ways: str) -> None:
        self.what, self.ways = what, ways
        super().__init__(f"{what}; {' or '.join(map(_in_words, ways))}")

    def typed(self, section: str) -> str:
        """The settings as they are typed on the command line."""
        return ", or ".join(
            " ".join(
                f"{'~' * word.startswith('~')}{section}.{word.removeprefix('~')}"
                for word in way.split()
            )
            for way in self.ways
        )


def _in_words(way: str) -> str:
    return " and ".join(
        f"leave {word[1:]} out" if word.startswith("~") else f"set {word}" for word in way.split()
    )
