"""What an estimate does not know, and in which direction the truth lies.

Nothing is guessed silently: what a rehearsal cannot run is named.
"""

from __future__ import annotations

from finetune.estimator.measure import Measured
from finetune.estimator.place import Place


def limits(measured: Measured, place: Place) -> tuple[str, ...]:
    """Sentences about one configuration at one place, those that apply."""
    config, train = measured.config, measured.config.train
    on_gpu, notes = place.device.kind == "cuda", []
    if place.gpu is None and on_gpu:
        notes.append(
            "only the memory of this GPU is known: it is taken to have FP8 (compute capability "
            "9.0), and no time is told"
        )
    if on_gpu and measured.compiled:
        notes.append(
            "compiled layers are rehearsed uncompiled: memory is at most this, since fused chains "
            "make no temporaries; their time counts a chain as one kernel"
        )
    if measured.resolution.reason.startswith("Transformer Engine, taken"):
        notes.append(
            "Transformer Engine is taken to be installed there; its layers are modelled from its "
            "sources, not run: memory within some per cent of the FP8 copies either way"
        )
    if train.get("use_liger_kernel"):
        notes.append("Liger's kernels are not rehearsed: memory and time will be lower than this")
    if config.lora is not None and config.lora.dropout:
        notes.append("dropout's masks are rehearsed; its random numbers cost time not counted here")
    if place.device.is_rocm:
        notes.append(
            "rehearsed as CUDA would run it: attention and allocator of ROCm differ, either way"
        )
    if not train.get("packing") and on_gpu:
        notes.append(
            "the longest row is taken to have train.max_length tokens: shorter ones take less "
            "memory and time, and lengths that change from batch to batch reserve more"
        )
    return tuple(notes)
