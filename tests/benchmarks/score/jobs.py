"""From a row of measurements to a job, or to the reason why there is none.

Each family of measurements has one mapping; a row that none knows, or that leaves open what decides
its memory, is unscored with its reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.benchmarks.score.job import Job
from tests.benchmarks.score.mapping import UnmappedError
from tests.benchmarks.score.rows import Row
from tests.benchmarks.score.runs_fms import fms_job
from tests.benchmarks.score.runs_others import fsdp_qlora_job, litgpt_job, swift_job, trainer_job
from tests.benchmarks.score.runs_peft import peft_job

TRANSFORMERS = "Transformers / TRL / PEFT"
OTHERS = "other frameworks"


@dataclass(frozen=True)
class Mapped:
    """A row with its job, or the reason why it has none.

    Attributes:
        family: of measurements.
        path: `TRANSFORMERS` or `OTHERS`.
        dynamic: lengths vary from step to step.
    """

    row: Row
    job: Job | None
    reason: str = ""
    family: str = ""
    path: str = OTHERS
    dynamic: bool = False


def _family(row: Row) -> tuple[str, str, bool, Callable[[Row], Job]]:
    framework = row.framework
    if "fms plugin" in framework:
        return "fms-acceleration", TRANSFORMERS, False, fms_job
    if framework.startswith("PEFT "):
        return "PEFT comparison", TRANSFORMERS, True, peft_job
    if framework.startswith("ms-swift"):
        return "ms-swift", TRANSFORMERS, True, swift_job
    if framework.startswith("HF Trainer"):
        return "Trainer", TRANSFORMERS, False, trainer_job
    if framework.startswith("fsdp_qlora"):
        return "fsdp_qlora", TRANSFORMERS, False, fsdp_qlora_job
    if framework.startswith("litgpt"):
        return "litgpt", OTHERS, False, litgpt_job
    raise UnmappedError(f"no mapping for the framework {framework!r}")


def map_row(row: Row) -> Mapped:
    """The job of a row, or the reason why it has none."""
    family, path, dynamic = "", OTHERS, False
    if row.suspect:
        return Mapped(row, None, "its notes say SUSPECT")
    try:
        family, path, dynamic, make = _family(row)
        return Mapped(row, make(row), "", family, path, dynamic)
    except UnmappedError as reason:
        return Mapped(row, None, str(reason), family, path, dynamic)
