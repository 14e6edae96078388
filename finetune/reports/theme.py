"""The colours of a page, light and dark.

One accent carries the page; `c1` to `c8` tell series apart, each beside a dash pattern of its own,
so that no plot depends on colour alone. Every text colour has a contrast of at least 4.5 to its
background, and every line one of 3 (WCAG 2.2), in both themes; `tests/test_report.py` computes it.
"""

from __future__ import annotations

from typing import TypedDict

LIGHT = {
    "paper": "#fdfdfc",
    "raised": "#f5f4f1",
    "ink": "#1b1c1e",
    "muted": "#63666b",
    "rule": "#e3e2de",
    "accent": "#0b6b62",
    "bad": "#b3261e",
    "c1": "#0b6b63",
    "c2": "#b4520a",
    "c3": "#3f51b5",
    "c4": "#a3195b",
    "c5": "#5b6f0e",
    "c6": "#7b3ff2",
    "c7": "#0277a8",
    "c8": "#6d5446",
}
DARK = {
    "paper": "#131416",
    "raised": "#1c1e21",
    "ink": "#e9e8e4",
    "muted": "#a0a3a8",
    "rule": "#303338",
    "accent": "#5cc9bb",
    "bad": "#ff8a80",
    "c1": "#5cc9bc",
    "c2": "#f2a25c",
    "c3": "#93a4ff",
    "c4": "#ff86b5",
    "c5": "#bcd35f",
    "c6": "#c3a3ff",
    "c7": "#6cc4ee",
    "c8": "#c7a998",
}
COLOURS = ("c1", "c2", "c3", "c4", "c5", "c6", "c7", "c8")
PATTERNS = ("solid", "dashed", "dashdot", "dotted", "long")


class Look(TypedDict):
    """How a series is told from others."""

    colour: str
    dash: str


def style(number: int) -> Look:
    """Colour and dash of the series with this number; 40 of them differ."""
    turn = number + number // len(COLOURS)
    return {"colour": COLOURS[number % len(COLOURS)], "dash": PATTERNS[turn % len(PATTERNS)]}


def variables(colours: dict[str, str]) -> str:
    """CSS custom properties."""
    return "".join(f"--{name}:{value};" for name, value in colours.items())
