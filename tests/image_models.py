"""Tiny random models that read images: a folder with weights, processor and chat template each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from finetune.config.paths import TINY_LLAMA
from finetune.config.schema import ModelConfig
from tests.families import config_of

EDGE = 28
"""Width and height of what the towers of the smallest ones read."""
GRID = [[EDGE, 2 * EDGE], [2 * EDGE, EDGE], [2 * EDGE, 2 * EDGE]]
"""Sizes into which LLaVA-NeXT cuts images."""
MARKED = "{% generation %}", "{% endgeneration %}"
TEMPLATE = (
    "{%- macro said(content) %}{% if content is string %}{{ content }}{% else %}"
    "{% for part in content %}"
    "{% if part['type'] == 'image' %}{{ 'IMAGE' }}{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{% endmacro %}"
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "BEGIN{{ said(message['content']) + '<|im_end|>' }}END{% else %}"
    "{{ said(message['content']) + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

QWEN = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>",
        "vision_start_token": "<|vision_start|>", "vision_end_token": "<|vision_end|>"}  # fmt: skip
GEMMA = {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>",
         "eoi_token": "<end_of_image>"}  # fmt: skip
SMOL = {
    "image_token": "<image>",
    "fake_image_token": "<fake_token_around_image>",
    "global_image_token": "<global-img>",
    "end_of_utterance_token": "<end_of_utterance>",
}
TILES = [f"<row_{i}_col_{j}>" for i in (1, 2, 3, 4) for j in (1, 2, 3, 4)]
QWEN_SIZE = {"shortest_edge": 56 * 56, "longest_edge": 112 * 112}
FAMILIES: dict[str, tuple[dict[str, str], str]] = {
    "qwen2_5_vl": (QWEN, "<|vision_start|><|image_pad|><|vision_end|>"),
    "qwen3_vl": (QWEN, "<|vision_start|><|image_pad|><|vision_end|>"),
    "gemma3": (GEMMA, "<start_of_image>"),
    "smolvlm": (SMOL, "<image>"),
    "llava_next": ({"image_token": "<image>"}, "<image>"),
}
"""Family -> its tokens for images by their names, and what its template prints for one."""
FOUR = ("qwen3_vl", "gemma3", "smolvlm", "llava_next")


def tiny_image_model(
    family: str, folder: Path, *, markers: bool = True, weights: bool = True
) -> Path:
    """Write a tiny random model of a family to a folder of its name inside of `folder`.

    Its tokenizer is the packaged one with the family's tokens for images behind its own. It loads
    by `AutoModelForImageTextToText.from_pretrained` and `processors.load_processor`.

    Args:
        markers: the chat template says with `{% generation %}` what an answer is.
        weights: write random weights, too.
    """
    import torch
    from transformers import AutoModelForImageTextToText

    home = folder / family
    tokenizer, processor = _processor(family, markers)
    processor.save_pretrained(home)
    tokenizer.save_pretrained(home)
    config = _config(family, tokenizer)
    config.save_pretrained(home)
    if weights:
        with torch.random.fork_rng([]):
            torch.manual_seed(0)
            AutoModelForImageTextToText.from_config(config).save_pretrained(home)
    return home


def processor_of(home: Path, **pixels: int) -> Any:
    """The processor in such a folder, around its tokenizer."""
    from finetune.storage.pretrained import load_tokenizer
    from finetune.storage.processors import load_processor

    model = ModelConfig(name=str(home))
    return load_processor(model, load_tokenizer(model)[0], **pixels)


def batch_of(home: Path, images: int = 1, family: str = "") -> dict[str, Any]:
    """A batch of two rows with so many images each, as the processor makes it."""
    import torch
    from PIL import Image

    processor, colors = processor_of(home), ("red", "navy")
    text = FAMILIES[family or home.name][1] * images + " What color is the sea?"
    given = [[Image.new("RGB", (40, 32), color)] * images for color in colors]
    made = processor(
        text=[f"{text} {color}" for color in colors],
        images=given if images else None,
        padding=True,
        return_tensors="pt",
    )
    ids = made["input_ids"]
    special = torch.tensor(processor.tokenizer.all_special_ids)
    return {**made, "labels": ids.masked_fill(torch.isin(ids, special), -100)}


def _config(family: str, tokenizer: Any) -> Any:
    config, ids = config_of(family), tokenizer.convert_tokens_to_ids
    config.text_config.vocab_size = 1600  # a multiple of 64, as FP8 wants it
    tokens, _ = FAMILIES[family]
    for name, token in tokens.items():
        key = name.removesuffix("_token")
        for attribute in (f"{key}_token_id", f"{key}_token_index"):
            if hasattr(config, attribute):
                setattr(config, attribute, ids(token))
    if hasattr(config, "image_grid_pinpoints"):
        config.image_grid_pinpoints = GRID  # the model counts an image's tokens by it as well
    return config


def _processor(family: str, markers: bool) -> tuple[Any, Any]:
    from transformers import AutoTokenizer

    from finetune.storage.processors import do_without, processor_class, without_videos

    tokens, placeholder = FAMILIES[family]
    tokenizer = AutoTokenizer.from_pretrained(TINY_LLAMA, extra_special_tokens=tokens)
    if family == "smolvlm":
        tokenizer.add_tokens(TILES, special_tokens=True)
    begin, end = MARKED if markers else ("", "")
    tokenizer.chat_template = (
        TEMPLATE.replace("BEGIN", begin).replace("END", end).replace("IMAGE", placeholder)
    )
    kind = without_videos(processor_class(config_of(family)))
    do_without("num2words", kind)
    images, settings = _images(family)
    given = {"image_processor": images, "tokenizer": tokenizer, "video_processor": None}
    order = processor_class(config_of(family)).get_attributes()
    processor = kind.from_args_and_dict([given[name] for name in order], settings)
    processor.chat_template = tokenizer.chat_template
    return tokenizer, processor


def _images(family: str) -> tuple[Any, dict[str, Any]]:
    """An image processor of small sizes, and the settings of the processor around it."""
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
    from transformers.models.llava_next.image_processing_pil_llava_next import (
        LlavaNextImageProcessorPil,
    )
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

    square = {"height": EDGE, "width": EDGE}
    if family.startswith("qwen"):
        patch = config_of(family).vision_config.patch_size
        return Qwen2VLImageProcessorPil(size=QWEN_SIZE, patch_size=patch), {}
    if family == "gemma3":
        return Gemma3ImageProcessorPil(size=square), {"image_seq_length": 1}
    if family == "smolvlm":
        longest = {"longest_edge": EDGE}
        images = SmolVLMImageProcessorPil(size={"longest_edge": 2 * EDGE}, max_image_size=longest)
        return images, {"image_seq_len": 1}
    images = LlavaNextImageProcessorPil(
        size={"shortest_edge": EDGE}, crop_size=square, image_grid_pinpoints=GRID
    )
    settings = {"patch_size": 14, "vision_feature_select_strategy": "default"}
    return images, settings | {"num_additional_image_tokens": 1}
