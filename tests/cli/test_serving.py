"""What a request to `serve` may name: an image that it holds, and nothing else unless asked for."""

from __future__ import annotations

from typing import Any

import pytest

from finetune.cli.serving import refusal

DATA = "data:image/png;base64,iVBORw0KGgo="


def asked(kind: str, where: Any) -> list[dict[str, Any]]:
    key = "image_url" if kind == "input_image" else kind
    text = {"type": "text", "text": "Which?"}
    return [{"role": "user", "content": [text, {"type": kind, key: where}]}]


@pytest.mark.parametrize("kind", ["image_url", "input_image", "video_url", "audio_url"])
@pytest.mark.parametrize("wrapped", [True, False])
def test_what_a_request_holds_is_read_and_what_it_names_is_not(kind: str, wrapped: bool) -> None:
    def why(where: str, **settings: bool) -> str:
        messages = asked(kind, {"url": where} if wrapped else where)
        return refusal(messages, **{"reads": True, "urls": False} | settings)

    assert why(DATA) == ""
    assert "serve with --image-urls" in why("https://example.com/a.png")
    assert why("https://example.com/a.png", urls=True) == ""
    for name in ("/etc/passwd", "file:///etc/passwd", "a.png", "", "ftp://example.com/a.png"):
        assert "send a data URL" in why(name, urls=True), name
    assert "reads text alone" in why(DATA, reads=False)


def test_text_is_never_refused() -> None:
    messages = [
        {"role": "user", "content": "See https://example.com"},
        {"role": "assistant", "content": None},
        {"role": "user", "content": [{"type": "text", "text": "/etc/passwd"}]},
    ]
    assert refusal(messages, reads=False, urls=False) == ""
