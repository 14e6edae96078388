"""Limits of an estimate and the direction of their error: everything a rehearsal cannot run."""

from __future__ import annotations

from collections.abc import Iterator

from finetune.config.methods import method_of
from finetune.config.optimizers import chosen
from finetune.config.schema import RunConfig
from finetune.config.sft import fsdp_settings, padding_free
from finetune.estimator.changes import attends_by_mask, length_of
from finetune.estimator.predict import Prediction
from finetune.hardware.device import Device, shown_capability, varlen_kernel
from finetune.hardware.requirements import TAKEN, pays_to_compile
from finetune.hardware.versions import torch_of_gpus
from finetune.storage.pretrained import load_shape
from finetune.units import GIB

ONE_MACHINE = (
    "all GPUs are taken to be in one machine: over a network communication takes longer than "
    "predicted here"
)


def limits(prediction: Prediction) -> tuple[str, ...]:
    """Caveats that apply to one configuration at one place."""
    return (*_of_each(prediction), *_of_several(prediction))


def _of_each(prediction: Prediction) -> Iterator[str]:
    """Caveats of a device, however many there are."""
    config, train, place = prediction.config, prediction.config.train, prediction.place
    on_gpu, pace = place.device.kind == "cuda", prediction.pace
    masked = on_gpu and attends_by_mask(config, place.device)
    if masked and pace is not None and pace.share("attention") > 0.2:
        yield (
            f"attention is {pace.share('attention'):.0%} of the step: rows packed into one make an "
            "explicit mask, which flash attention does not take and other kernels compute in full. "
            "~model.attention needs no mask; --advice predicts it"
        )
    if on_gpu and padding_free(train) and not masked:
        yield (
            "attention is timed for documents that fill their rows: shorter ones take less of it"
            + _of_unequal(config, place.device)
        )
    if place.gpu is None and on_gpu and not place.here:
        yield (
            "only the memory of this GPU is known: it is taken to have FP8 (compute capability "
            "9.0), and no time is predicted"
        )
    elif pace is None:
        yield (
            f"no time is predicted: {place.device.name} is not in the table of GPUs; --gpu "
            "predicts for one that is"
        )
    capability = place.device.capability or (8, 0)
    in_bf16 = prediction.resolution.precision.compute == "bf16"
    if on_gpu and not place.device.is_rocm and capability < (8, 0) and in_bf16:
        name = place.gpu.name if place.gpu is not None else place.device.name
        yield (
            f"{name} has no BF16 (compute capability {shown_capability(capability)}; it takes "
            "8.0): torch converts each operand, and steps take longer than predicted, which is for "
            "FP16; precision.compute=fp16"
        )
    if on_gpu and prediction.compiled:
        yield "torch.compile is modelled by its own rules of fusion and partition, and not run"
        yield from _too_short(prediction)
    if prediction.resolution.precision.compile_requested == "on" and not prediction.compiled:
        yield (
            "precision.compile=on is predicted to change nothing: it leaves out layers that "
            "multiply by parameters in FP8, and one layer called many times is not modelled"
        )
    if TAKEN.reason in prediction.resolution.reason:
        yield (
            "Transformer Engine is taken to be installed there; its casts are modelled from its "
            "sources, not run: memory within some per cent of the FP8 copies either way; an "
            "uncompiled 8B step took 1.2 s on an H100 where 0.85 were predicted, without idle time "
            "and with a faster update"
        )
    if on_gpu and chosen(train).paged:
        yield (
            "states of a paged optimizer are not counted: they lie on the GPU while it has room, "
            "so that nvidia-smi shows more, and on the host when it is full, which takes time"
        )
    if train.use_liger_kernel:
        yield "Liger's kernels are not rehearsed: memory and time will be lower than this"
    if config.lora is not None and config.lora.dropout:
        yield "dropout's masks are rehearsed; its random numbers cost time not counted here"
    if place.device.is_rocm:
        yield "rehearsed as CUDA would run it: attention and allocator of ROCm differ, either way"
    if method_of(train).writes:
        answer, length = config.train.max_completion_length, length_of(config)
        yield (
            f"answers are taken to have {answer} tokens (train.max_completion_length) and prompts "
            f"{max(1, length - answer)}; finetune.estimate(..., length=N) is for other sums of both"
        )
        yield (
            "generation is that of Transformers, uncompiled, and its time was never measured; "
            "reward models are not counted"
        )
    elif not train.packing and on_gpu:
        yield (
            "rows are taken to have train.max_length tokens: shorter ones take less memory and time"
        )


def _too_short(prediction: Prediction) -> Iterator[str]:
    """The caveat of a run that is over before compiling its layers would pay."""
    config, pace, gpu = prediction.config, prediction.pace, prediction.place.gpu
    steps = int(config.train.max_steps)
    if steps < 1 or not (pace and gpu) or config.precision.compile_requested != "auto":
        return
    each = int(config.train.gradient_accumulation_steps)
    layers = load_shape(config.model).get_text_config(decoder=True).num_hidden_layers
    flops = pace.mfu * pace.seconds * gpu.half_peak / each
    pays = pays_to_compile(config.precision, gpu.half_peak, flops, layers, steps * each)
    if not pays:
        yield f"a run this short is not compiled ({pays.reason}); precision.compile=on is predicted"


def _of_unequal(config: RunConfig, device: Device) -> str:
    """What cuDNN's backward holds for documents of several lengths, beyond what is predicted."""
    from finetune.training.helper.varlen import ROOM

    text = load_shape(config.model).get_text_config(decoder=True)
    heads = getattr(text, "num_attention_heads", None) or 1
    width = getattr(text, "head_dim", None) or text.hidden_size // heads
    kernel = varlen_kernel(device.capability or (0, 0), torch_of_gpus(), None, head_dim=width)
    if kernel != "cuDNN":
        return ""
    tokens = config.train.per_device_train_batch_size * (length_of(config) or 0)
    # Gradients of queries in float32, of keys and values in 16 bits for every head of queries.
    more = (ROOM - 1) * tokens * heads * width * 8
    return f"; of several lengths, cuDNN's backward holds up to {more / GIB:.1f} GiB more"


def _of_several(prediction: Prediction) -> Iterator[str]:
    """Caveats of training on several devices."""
    train, place = prediction.config.train, prediction.place
    if place.count == 1:
        if train.fsdp:
            yield "train.fsdp needs several GPUs, refused on one; predicted without it"
        return
    if place.device.kind == "cuda" and place.gpu is None:
        yield "how these GPUs are linked is not known: NCCL's buffers are taken as over NVLink"
    if place.count > 8:
        yield ONE_MACHINE
    if not train.fsdp:
        yield (
            "each GPU holds a copy of the model and its gradients a second time, to be sent (DDP); "
            "train.fsdp=true shards them"
        )
        return
    settings = fsdp_settings(train)
    if method_of(train).writes:
        yield "gathering weights for each token of an answer is not in its time: far longer"
    yield (
        "gathered weights are of streams of their own, with fragments of their own: reserved "
        "memory may be some GiB off, either way"
    )
    if settings.version != 2:
        yield (
            "FSDP1 is estimated as FSDP2: it gathers the next group too and holds its flat "
            "gradient, one to two decoder layers more than predicted here"
        )
    if settings.offload:
        yield "cpu_offload is not modelled: GPUs hold less than predicted, and steps take longer"
    if settings.wrapping != "TRANSFORMER_BASED_WRAP":
        yield (
            f"auto_wrap_policy {settings.wrapping} is estimated as TRANSFORMER_BASED_WRAP: larger "
            "groups hold more than predicted here while they are gathered, smaller ones less"
        )
