"""No guard leaves unseen."""

from __future__ import annotations

import pytest

from tests.error_texts import FILE, known, texts


def test_a_text_of_an_error_leaves_with_a_reason() -> None:
    here, before = texts(), known()
    gone = sorted(text for text, why in before.items() if text not in here and not why)
    assert not gone, f"write why behind an arrow in {FILE.name}: {gone}"


@pytest.mark.parametrize(
    "source",
    [
        'raise ConfigError("too few rows of text", fix="more")',
        'self._fail("too few rows of text", where="", why="", fix="more")',
        'what = "too few rows of text"',
        'what, why = "too few rows of text", "because"',
        'warn("too few rows of text")',
        'Verdict(False, "too few rows of text")',
        'say(f"! too few rows of {kind}")',
    ],
)
def test_a_text_is_watched_however_it_is_said(source, tmp_path) -> None:
    (tmp_path / "some.py").write_text(source)
    (text,) = texts(tmp_path)
    assert "too few rows of" in text


def test_new_texts_are_soon_among_those_that_are_watched() -> None:
    new = texts() - known().keys()
    assert len(new) < 40, f"python -m tests.error_texts adds {len(new)} texts, such as {min(new)!r}"
