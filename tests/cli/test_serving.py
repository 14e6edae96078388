"""What a request to `serve` may name: an image that it holds, and nothing else unless asked for."""

from __future__ import annotations

import base64
import io
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from finetune.cli import serving
from finetune.cli.serving import refusal
from tests.image_models import FAMILIES, processor_of, tiny_image_model

PARSED = "get_processor_inputs_from_messages"
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


@pytest.mark.parametrize("family", ["qwen3_vl", "smolvlm"])
def test_the_models_inputs_have_the_picture_of_a_request_as_the_processor_reads_it(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the server's own calls, from turns to tensors; and no file that a request names."""
    from PIL import Image
    from transformers import AutoProcessor
    from transformers.cli.serving.utils import BaseHandler, Modality

    class Refused(Exception):  # noqa: N818
        pass

    home = tiny_image_model(family, tmp_path, weights=False)
    monkeypatch.setitem(sys.modules, "fastapi", SimpleNamespace(HTTPException=Refused))
    for kind, name in ((BaseHandler, PARSED), (AutoProcessor, "from_pretrained")):
        monkeypatch.setattr(kind, name, staticmethod(getattr(kind, name)))  # put back afterwards
    serving._checked(urls=False)
    serving._without_torchvision()
    read: Any = getattr(BaseHandler, PARSED)

    numbers = np.random.default_rng(0).integers(0, 255, (60, 90, 3), dtype=np.uint8)
    image, file = Image.fromarray(numbers), io.BytesIO()
    image.save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    turns = read(asked("image_url", {"url": url}), Modality.VLM)
    processor: Any = AutoProcessor.from_pretrained(str(home), trust_remote_code=False)
    found = processor.apply_chat_template(
        turns, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )
    place = FAMILIES[family][1]
    text = f"<|im_start|>user\nWhich?{place}<|im_end|>\n<|im_start|>assistant\n"
    due = processor_of(home)(text=[text], images=[[image]], return_tensors="pt")
    assert found.keys() == due.keys() >= {"pixel_values"}
    assert all(torch.equal(found[key], due[key]) for key in due)
    image.save(tmp_path / "sea.png")
    with pytest.raises(Refused, match="is not read"):
        read(asked("image_url", {"url": str(tmp_path / "sea.png")}), Modality.VLM)
