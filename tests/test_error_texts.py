"""No guard leaves unseen."""

from __future__ import annotations

from tests.error_texts import FILE, known, texts


def test_a_text_of_an_error_leaves_with_a_reason() -> None:
    here, before = texts(), known()
    gone = sorted(text for text, why in before.items() if text not in here and not why)
    assert not gone, f"write why behind an arrow in {FILE.name}: {gone}"


def test_new_texts_are_soon_among_those_that_are_watched() -> None:
    new = texts() - known().keys()
    assert len(new) < 40, f"python -m tests.error_texts adds {len(new)} texts, such as {min(new)!r}"
