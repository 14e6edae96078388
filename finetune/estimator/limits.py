"""What an estimate does not know, and which way it is wrong: a line each, where it applies.

What a run could change is no limit but a row of the table (`finetune.estimator.changes`); what is
true of every estimate stands in docs/pages/estimator.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from finetune.config.methods import method_of
from finetune.config.optimizers import chosen
from finetune.config.sft import fsdp_settings, padding_free
from finetune.estimator.changes import attends_by_mask, length_of
from finetune.estimator.images import images_of
from finetune.estimator.predict import Prediction
from finetune.hardware.device import shown_capability, varlen_kernel
from finetune.hardware.requirements import TAKEN, pays_to_compile
from finetune.hardware.versions import torch_of_gpus
from finetune.storage.pretrained import load_shape
from finetune.storage.processors import takes_images
from finetune.units import GIB, plural

ONE_MACHINE = (
    "all GPUs are taken to be in one machine: over a network communication takes longer than "
    "predicted here"
)


class Limit(NamedTuple):
    """A sentence, and the predictions that it is true of."""

    applies: Callable[[Prediction], bool]
    text: str


def _on_gpu(of: Prediction) -> bool:
    return of.machine.device.kind == "cuda"


def _unknown_gpu(of: Prediction) -> bool:
    """Only its memory was given."""
    return _on_gpu(of) and of.machine.gpu is None and not of.machine.here


def _shards(of: Prediction) -> bool:
    return of.machine.count > 1 and bool(of.config.train.fsdp)


def _writes(of: Prediction) -> bool:
    return method_of(of.config.train).writes


TABLE = (
    Limit(
        _unknown_gpu,
        "only the memory of this GPU is known: it is taken to have FP8 (compute capability 9.0), "
        "and no time is predicted",
    ),
    Limit(
        lambda of: of.timing is None and not _unknown_gpu(of),
        "no time is predicted: this device is not in the table of GPUs; --gpu predicts for one "
        "that is",
    ),
    Limit(
        lambda of: of.resolution.precision.compile_requested == "on" and not of.compiled,
        "precision.compile=on is predicted to change nothing: it leaves out layers that multiply "
        "by parameters in FP8, and one layer called many times is not modelled",
    ),
    Limit(
        lambda of: TAKEN.reason in of.resolution.reason,
        "Transformer Engine is taken to be installed there; its casts are modelled from its "
        "sources, not run: memory within some per cent of the FP8 copies either way; an "
        "uncompiled 8B step took 1.2 s on an H100 where 0.85 were predicted, without idle time "
        "and with a faster update",
    ),
    Limit(
        lambda of: _on_gpu(of) and chosen(of.config.train).paged,
        "states of a paged optimizer are not counted: they lie on the GPU while it has room, so "
        "that nvidia-smi shows more, and on the host when it is full, which takes time",
    ),
    Limit(
        lambda of: bool(of.footprint.pinned) and of.timing is not None,
        "PCIe is taken at 0.8 of its speed, and the host as stated (--pcie, --cpu-bandwidth, "
        "--cpu-cores); the update of weights there was measured beside one GPU, an H100",
    ),
    Limit(
        lambda of: of.config.train.use_liger_kernel,
        "Liger's kernels are not rehearsed: memory and time will be lower than this",
    ),
    Limit(
        lambda of: of.machine.device.is_rocm,
        "rehearsed as CUDA would run it: attention and allocator of ROCm differ, either way",
    ),
    Limit(
        lambda of: _on_gpu(of) and not _writes(of) and not of.config.train.packing,
        "rows are taken to have train.max_length tokens: shorter ones take less memory and time",
    ),
    Limit(
        _writes,
        "generation is that of Transformers, uncompiled, and its time was never measured; reward "
        "models are not counted",
    ),
    Limit(
        lambda of: of.machine.count == 1 and bool(of.config.train.fsdp),
        "train.fsdp needs several GPUs, refused on one; predicted without it",
    ),
    Limit(
        lambda of: of.machine.count > 1 and _on_gpu(of) and of.machine.gpu is None,
        "how these GPUs are linked is not known: NCCL's buffers are taken as over NVLink",
    ),
    Limit(lambda of: of.machine.count > 8, ONE_MACHINE),
    Limit(
        lambda of: _shards(of) and _writes(of),
        "gathering weights for each token of an answer is not in its time: far longer",
    ),
    Limit(
        lambda of: _shards(of) and fsdp_settings(of.config.train).version != 2,
        "FSDP1 is estimated as FSDP2: it gathers the next group too and holds its flat gradient, "
        "one to two decoder layers more than predicted here",
    ),
    Limit(
        lambda of: _shards(of) and of.resolution.precision.fp8_params,
        "weights that are gathered as FP8 codes (fp8_params) are predicted as gathered in BF16: "
        "layers of a group take half of that, and half of the gathered bytes travel",
    ),
    Limit(
        lambda of: _shards(of) and fsdp_settings(of.config.train).offload,
        "cpu_offload is not modelled: GPUs hold less than predicted, and steps take longer",
    ),
    Limit(
        lambda of: (
            _shards(of) and fsdp_settings(of.config.train).wrapping != "TRANSFORMER_BASED_WRAP"
        ),
        "another auto_wrap_policy than TRANSFORMER_BASED_WRAP is estimated as that: larger groups "
        "hold more than predicted here while they are gathered, smaller ones less",
    ),
)


def limits(of: Prediction) -> tuple[str, ...]:
    """Limits of one prediction."""
    return (*_with_figures(of), *(text for applies, text in TABLE if applies(of)))


def _with_figures(of: Prediction) -> Iterator[str]:
    """Limits with a figure of the run in them."""
    config, device = of.config, of.machine.device
    capability = device.capability or (8, 0)
    if _on_gpu(of) and padding_free(config.train) and not attends_by_mask(config, device):
        yield "attention is timed for documents that fill their rows: shorter ones take less of it"
        if room := _room_of_unequal(of):
            more = f"{room / GIB:.1f} GiB more"
            yield f"for documents of several lengths cuDNN's backward holds up to {more}"
    if (
        _on_gpu(of)
        and not device.is_rocm
        and capability < (8, 0)
        and of.resolution.precision.compute == "bf16"
    ):
        name = of.machine.gpu.name if of.machine.gpu is not None else device.name
        yield (
            f"{name} has no BF16 (compute capability {shown_capability(capability)}; it takes "
            "8.0): torch converts each operand, and steps take longer than predicted, which is for "
            "FP16; precision.compute=fp16"
        )
    yield from of_images(of)
    if _writes(of):
        answer, length = config.train.max_completion_length, length_of(config)
        yield (
            f"answers are taken to have {answer} tokens (train.max_completion_length) and prompts "
            f"{max(1, length - answer)}; finetune.estimate(..., length=N) is for other sums of both"
        )
    if why := _too_short(of):
        yield f"a run this short is not compiled ({why}); precision.compile=on is predicted"


def of_images(of: Prediction) -> Iterator[str]:
    """What images the rows of a model that reads some are taken to have, with their tokens."""
    if not takes_images(load_shape(of.config.model)):
        return
    images, texts = images_of(of.config), method_of(of.config.train).texts
    said = f"each row is taken to have {images}" if images else "rows are taken to be text"
    if of.image_tokens:
        said += f", {plural(of.image_tokens, 'token')}"
        said += f" in each of its {texts} texts" * (texts > 1)
    yield f"{said}; --images and --image-size (of the data's largest) say otherwise"


def _too_short(of: Prediction) -> str:
    """Why a run is over before compiling its layers would pay; empty if it is not."""
    config, timing, gpu = of.config, of.timing, of.machine.gpu
    steps = int(config.train.max_steps)
    auto = of.compiled and config.precision.compile_requested == "auto"
    # Epochs have no number of steps before the rows are counted.
    if steps < 1 or timing is None or gpu is None or not auto:
        return ""
    each = int(config.train.gradient_accumulation_steps)
    layers = load_shape(config.model).get_text_config(decoder=True).num_hidden_layers
    # MFU times peak times seconds are the FLOPs of a step; a micro-step has its share of them.
    flops = timing.mfu * timing.seconds * gpu.half_peak / each
    pays = pays_to_compile(config.precision, gpu.half_peak, flops, layers, steps * each)
    return "" if pays else pays.reason


def _room_of_unequal(of: Prediction) -> float:
    """Bytes that cuDNN's backward holds for documents of several lengths, beyond the prediction."""
    from finetune.training.helper.varlen import ROOM

    config, capability = of.config, of.machine.device.capability or (0, 0)
    text = load_shape(config.model).get_text_config(decoder=True)
    heads = getattr(text, "num_attention_heads", None) or 1
    width = getattr(text, "head_dim", None) or text.hidden_size // heads
    if varlen_kernel(capability, torch_of_gpus(), None, head_dim=width) != "cuDNN":
        return 0
    tokens = config.train.per_device_train_batch_size * (length_of(config) or 0)
    # Gradients of queries in float32, of keys and values in 16 bits for every head of queries.
    # 4 bytes of dq, 2 of dk and 2 of dv.
    return (ROOM - 1) * tokens * heads * width * 8
