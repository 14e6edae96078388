"""`transformers serve` for images: from what a request holds, and without torchvision.

    {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBOR..."}}    is read
    ... "https://example.com/tug.png"    is refused, unless `serve --image-urls` asked for it
    ... "/home/me/passport.png"          is refused

Transformers (5.23) would fetch any URL and open any file that a request names, also from inside of
a network that the asker is not in; it leaves images out in silence where a model reads text alone;
and processors that name one of videos it loads with torchvision alone.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable
from types import MethodType
from typing import Any

URLS = "--image-urls"
PARTS = ("image_url", "input_image", "video_url", "audio_url")
"""Types of parts that are read from somewhere."""


def refusal(messages: Iterable[Any], *, reads: bool, urls: bool) -> str:
    """Why a conversation is not answered; empty where it is.

    Args:
        reads: the model reads more than text.
        urls: what stands at an address may be fetched.
    """
    contents = (message.get("content") for message in messages)
    parts = (part for content in contents if isinstance(content, list) for part in content)
    for part in parts:
        if (kind := part.get("type")) not in PARTS:
            continue
        if not reads:
            return f"the model reads text alone, and would leave {kind!r} out"
        where = part.get("image_url" if kind == "input_image" else kind)
        where = str(where.get("url") if isinstance(where, dict) else where)
        remote = where.startswith(("http://", "https://"))
        if not where.startswith("data:") and not (remote and urls):
            fix = f", or serve with {URLS}" if remote else ""
            return f"{kind!r} names {where[:80]!r}, which is not read: send a data URL{fix}"
    return ""


def _checked(urls: bool) -> None:
    """Let the server refuse with status 400 what it would fetch, open, or leave out."""
    from fastapi import HTTPException
    from transformers.cli.serving.utils import BaseHandler, Modality

    plain = BaseHandler.get_processor_inputs_from_messages

    def checked(messages: list[Any], modality: Any) -> Any:
        if why := refusal(messages, reads=modality != Modality.LLM, urls=urls):
            raise HTTPException(400, why)
        return plain(messages, modality)

    BaseHandler.get_processor_inputs_from_messages = staticmethod(checked)


def _without_torchvision() -> None:
    """Let the server load the processors that runs have, where there is no torchvision."""
    from transformers import AutoProcessor, ProcessorMixin

    from finetune.config.schema import ModelConfig
    from finetune.storage.pretrained import load_shape, load_tokenizer
    from finetune.storage.processors import load_processor, takes_images

    plain: Any = AutoProcessor.from_pretrained

    def from_pretrained(source: Any, **options: Any) -> Any:
        model = ModelConfig(name=str(source), trust_remote_code=options["trust_remote_code"])
        if not takes_images(load_shape(model)):
            return plain(source, **options)
        found: Any = load_processor(model, load_tokenizer(model)[0])
        # SmolVLM's own reads settings of its processor of videos.
        found.apply_chat_template = MethodType(ProcessorMixin.apply_chat_template, found)
        return found

    AutoProcessor.from_pretrained = from_pretrained


if __name__ == "__main__":
    from transformers.cli.transformers import main

    _checked(URLS in sys.argv)
    if importlib.util.find_spec("torchvision") is None:
        _without_torchvision()
    sys.argv = [word for word in sys.argv if word != URLS]
    main()
