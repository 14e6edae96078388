"""What the estimator expects of the same step on this device, beside what was measured.

Its classes are not quite ours: `head and loss` and `adapters` hold what is elementwise of them too.
They are told with the products, where most of their time is on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

from finetune.config.schema import RunConfig
from finetune.errors import FinetuneError
from finetune.estimator.alternatives import twin_of
from finetune.estimator.measure import changed, measure_fast
from finetune.estimator.place import Place
from finetune.estimator.speed.calibration import load_calibration
from finetune.estimator.speed.step_parts import StepPart
from finetune.estimator.speed.timing import Interval
from finetune.hardware.device import Device
from finetune.hardware.gpus import find_gpu


@dataclass(frozen=True)
class Prediction:
    """What the estimator expects.

    Attributes:
        seconds: of one optimizer step.
        parts: part -> seconds.
        speed: over the same run in BF16 (under it, for a run in BF16): most likely, from, to.
        why: reasons, in plain words.
        calibrated: on this very device.
    """

    seconds: float
    parts: dict[StepPart, float]
    speed: Interval | None
    why: tuple[str, ...]
    calibrated: bool


def predict(
    config: RunConfig, device: Device, processes: int, length: int
) -> tuple[Prediction | None, str]:
    """The expected step, or None and the reason why nothing is expected.

    Args:
        config: of the run.
        device: this one.
        processes: of the run.
        length: tokens of a row as they were.
    """
    place = Place(device, find_gpu(device), processes, here=True)
    if place.gpu is None and load_calibration(device.name) is None:
        return None, (
            f"nothing is predicted for {device.name}: its speed is not known "
            "(python -m finetune estimate --calibrate measures it)"
        )
    try:
        packed = bool(config.train.get("packing"))
        config = config if packed else changed(config, train={"max_length": length})
        measured = measure_fast(config, place)
        beside = twin_of(measured, place)
    except FinetuneError as error:
        return None, f"nothing is predicted: {error.why or error.what}"
    if measured.pace is None:
        return None, f"nothing is predicted for {device.name}"
    fp8 = measured.config.precision.compute == "fp8"
    parts: dict[StepPart, float] = {}
    for name, seconds in measured.pace.classes.items():
        part = StepPart(name).profiled(fp8=fp8)
        parts[part] = parts.get(part, 0.0) + seconds
    speed = beside.speed if beside is not None else None
    why = beside.why if beside is not None else ()
    pace = measured.pace
    return Prediction(pace.seconds, parts, speed, why, pace.calibrated), ""
