"""Processors of models that read images: a tokenizer, and what makes numbers of a picture.

    "<image>What ship?" + a picture  ──>  input_ids (a token for each part of the picture), pixels

They are Transformers' own. Most also name a processor of videos, which needs torchvision and is of
no use here: without torchvision a processor is made without one, and keeps that one's settings for
the files that it saves. Images then go by Pillow, as Transformers itself falls back. The tokenizer
is the one that runs of text have (`pretrained.load_tokenizer`), with its template and its tokens.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.config.paths import SHAPES
from finetune.errors import ConfigError, first_line, install_hint
from finetune.storage.pretrained import load_shape, loading, locate

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase, ProcessorMixin

    from finetune.config.schema import ModelConfig

IMAGES, VIDEO = "image_processor", "video_processor"
PARTS = {
    VIDEO: "AutoVideoProcessor",
    "feature_extractor": "AutoFeatureExtractor",
}
"""Other parts of a processor than tokenizer and images -> Transformers' class that loads them."""
FILES = "*processor_config.json"
"""Files of a processor beside those of its tokenizer."""
NAMED = "image_processor_type"
"""Key of an image processor's settings that names its class: by Pillow or by torchvision."""
FOR_VIDEOS = "num2words"
"""Package that SmolVLM's processor asks for, to say how many frames a video has."""
SIZES = {"max_pixels": "longest_edge", "min_pixels": "shortest_edge"}
"""Setting of `train` -> what it is called in the `size` of processors that count pixels."""


def processor_class(shape: PretrainedConfig) -> Any:
    """Transformers' class for an architecture that reads images beside text; None of others."""
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    kind: Any = PROCESSOR_MAPPING.get(type(shape), None)
    return kind if kind is not None and IMAGES in kind.get_attributes() else None


def takes_images(shape: PretrainedConfig) -> bool:
    """True of a model whose processor reads images beside text."""
    return processor_class(shape) is not None


def tokenizer_of(reader: Any) -> Any:
    """The tokenizer of a processor; a tokenizer itself."""
    return getattr(reader, "tokenizer", reader)


def as_read(reader: Any, texts: list[str], images: list[list[Any]], **how: Any) -> Any:
    """What a processor makes of texts as the chat template prints them, and of the images of each.

    Raises:
        ValueError: images and the places for them differ, or it refuses one.
    """
    shown = images if any(images) else None
    made = reader(images=shown, text=texts, add_special_tokens=False, **how)
    if backend := getattr(tokenizer_of(reader), "backend_tokenizer", None):
        backend.no_padding()  # it is remembered, and saved with the run: for all who load it
    return made


def load_processor(
    model: ModelConfig, tokenizer: PreTrainedTokenizerBase, **pixels: int | None
) -> ProcessorMixin:
    """The processor of a model that reads images, around a tokenizer of `load_tokenizer`.

    Args:
        pixels: `max_pixels` and `min_pixels` of an image, by which it is made smaller or larger;
            None: as the model's own files have it.

    Raises:
        ConfigError: the model reads no images; Pillow is missing, or torchvision broken; its images
            have one size, and the number of their pixels no choice.
        ModelNotFoundError: its files are missing or broken.
    """
    import transformers

    source = locate(model)
    images = _image_processor(model, source, pixels)
    kind = processor_class(load_shape(model))
    videos = importlib.util.find_spec("torchvision") is not None
    options = {"revision": model.revision, "trust_remote_code": model.trust_remote_code}
    with loading(source):
        settings, _ = kind.get_processor_dict(source, revision=model.revision)
        stored, template = settings.pop(VIDEO, None), settings.pop("chat_template", None)
        tokenizer.chat_template = tokenizer.chat_template or template
        parts: dict[str, Any] = {IMAGES: images, "tokenizer": tokenizer, VIDEO: stored}
        for name, loads in PARTS.items():
            if name in kind.get_attributes() and (videos or name != VIDEO):
                parts[name] = getattr(transformers, loads).from_pretrained(source, **options)
        given = [parts[name] for name in kind.get_attributes()]
        do_without(FOR_VIDEOS, kind)
        made = (kind if videos else without_videos(kind)).from_args_and_dict(given, settings)
    made.chat_template = tokenizer.chat_template
    if stored is not None and not videos:
        made.video_processor = stored  # a mapping, which is saved as it is
    return made


def processor_files(model: ModelConfig) -> list[Path]:
    """Files by which Transformers loads the processor of stored weights, as their source has them.

    None for a model that reads text alone, or whose shape alone is known.
    """
    from huggingface_hub import snapshot_download

    source = locate(model)
    if not takes_images(load_shape(model)):
        return []
    if model.weights == "pretrained" and not Path(source).is_dir():
        with loading(source):
            source = snapshot_download(source, revision=model.revision, allow_patterns=[FILES])
    return sorted(Path(source).glob(FILES))


def image_processor(model: ModelConfig, **pixels: int | None) -> Any:
    """What makes numbers of a model's images, without a tokenizer: for counting them beforehand.

    That of a shape in the package is packaged beside it. Arguments and errors are those of
    `load_processor`.
    """
    source = locate(model)
    packaged = SHAPES / "processors" / source.replace("/", "--")
    return _image_processor(model, str(packaged) if packaged.is_dir() else source, pixels)


def _image_processor(model: ModelConfig, source: str, pixels: dict[str, int | None]) -> Any:
    from transformers import AutoImageProcessor

    require_images(model)
    _refuse_libraries(model.name)
    options = {"revision": model.revision, "trust_remote_code": model.trust_remote_code}
    with loading(source):
        found = AutoImageProcessor.from_pretrained(source, **options)
    return _sized(found, pixels, model.name)


def sizes_of(reader: Any, model: ModelConfig) -> dict[str, int]:
    """`max_pixels` and `min_pixels` of a processor that a script gives, if not the model's own.

    Raises:
        ConfigError: it differs from the model's own in something else, which no recipe says.
    """
    if (given := getattr(reader, IMAGES, None)) is None:
        return {}
    mine, own = given.to_dict(), image_processor(model).to_dict()
    others = [key for key in {*mine} & {*own} - {NAMED} if mine[key] != own[key]]
    if not others:
        return {}
    if others == ["size"] and counts_pixels(given):
        return {key: dict(given.size)[name] for key, name in SIZES.items()}
    raise ConfigError(
        "the processor treats images otherwise than the model's own",
        where=", ".join(f"image_processor.{key}={mine[key]}" for key in sorted(others)),
        why="the run's recipe would not say so, and who repeats it or asks its model would show it "
        "other numbers",
        fix="save it beside the model, processor.save_pretrained(FOLDER) and "
        "model.save_pretrained(FOLDER), and load that: finetune.load(FOLDER)",
    )


def require_images(model: ModelConfig) -> None:
    """Raise `reads_text` of a model that takes no images."""
    if not takes_images(load_shape(model)):
        raise reads_text(model.name)


def reads_text(name: str) -> ConfigError:
    """The error for images that a model is to read which reads text alone."""
    return ConfigError(
        f"the model {name!r} takes no images",
        where="model.name",
        why="it reads text alone, and would go on as if there were none",
        fix="leave them out; or a vision-language model, such as "
        "model.name=Qwen/Qwen3-VL-4B-Instruct",
    )


def _refuse_libraries(name: str) -> None:
    """Raise `ConfigError` where Pillow is missing, or torchvision cannot be imported."""
    require_pillow()
    if importlib.util.find_spec("torchvision") is None:
        return
    try:
        importlib.import_module("torchvision")
    except Exception as error:  # an operator that is not there, a library that is not found
        raise ConfigError(
            "torchvision is installed, and cannot be imported",
            where=f"model.name: {name}",
            why=f"{first_line(error)}: it was built for another torch, and Transformers would fail "
            "in the middle of a row",
            fix="pip uninstall torchvision, and Pillow reads the images; or install the build of "
            "your torch (https://pytorch.org)",
        ) from error


def require_pillow() -> Any:
    """Pillow's module of images; a `ConfigError` where it cannot be imported."""
    try:
        from PIL import Image
    except ImportError as error:
        raise ConfigError(
            "images need Pillow", where="import PIL", why=str(error), fix=install_hint("images")
        ) from error
    return Image


def without_videos(kind: Any) -> Any:
    """A processor's class without its part for videos, which no class of Transformers is without.

    Processors pair what they are given with `get_attributes`, and check the class of each.
    """
    names = [name for name in kind.get_attributes() if name != VIDEO]
    own = {"get_attributes": classmethod(lambda _: names), "__module__": kind.__module__}
    return type(kind.__name__, (kind,), own)


def do_without(package: str, kind: Any) -> None:
    """Let a processor's module pass its own check for a package that reads no images."""
    module = sys.modules[kind.__module__]
    if vars(module).get(package, kind) is None:
        setattr(module, package, str)


def counts_pixels(images: Any) -> bool:
    """True of an image processor that takes a least and a largest number of pixels."""
    return {*SIZES} <= {*images.valid_kwargs.__annotations__}


def _sized(images: Any, pixels: dict[str, int | None], name: str) -> Any:
    """An image processor with a least and a largest number of pixels of an image.

    Raises:
        ConfigError: it has other sizes, or the least is above the largest.
    """
    given = {key: value for key, value in pixels.items() if value is not None}
    if not given:
        return images
    where = ", ".join(f"train.{key}={value}" for key, value in given.items())
    sizes = dict(images.size or {})
    if not counts_pixels(images):
        raise ConfigError(
            f"images of {name!r} are not sized by a number of pixels",
            where=where,
            why=f"its processor makes each of the size {sizes}",
            fix="~" + " ~".join(f"train.{key}" for key in given),
        )
    sizes |= {SIZES[key]: value for key, value in given.items()}
    patch = getattr(images, "patch_size", 1) * getattr(images, "merge_size", 1)
    if not patch**2 <= sizes["longest_edge"] >= sizes["shortest_edge"]:
        raise ConfigError(
            "an image cannot have at least more pixels than at most, or less than a token's",
            where=where,
            why=f"{sizes['shortest_edge']:,} at least, {sizes['longest_edge']:,} at most, and a "
            f"token stands for {patch**2:,}",
            fix=f"train.max_pixels={max(sizes['shortest_edge'], 256 * patch**2)}",
        )
    return type(images).from_dict(images.to_dict() | {"size": sizes})
