"""FP8 fine-tuning for Hugging Face models: FP8 asked is FP8 given, proven, or an error.

Importing this package imports no torch: each public name is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from finetune.benchmarking.runner import benchmark as benchmark
    from finetune.comparison.comparing import compare as compare
    from finetune.config import PrecisionConfig as PrecisionConfig
    from finetune.config import RunConfig as RunConfig
    from finetune.diagnosis.diagnose import diagnose as diagnose
    from finetune.errors import FinetuneError as FinetuneError
    from finetune.estimator.estimate import estimate as estimate
    from finetune.export.exporter import export_run as export_run
    from finetune.health.monitor import HealthMonitor as HealthMonitor
    from finetune.hook import get_receipt as get_receipt
    from finetune.hook import (
        setup_fp8_mixed_precision_training as setup_fp8_mixed_precision_training,
    )
    from finetune.hook import (
        teardown_fp8_mixed_precision_training as teardown_fp8_mixed_precision_training,
    )
    from finetune.precision.convert import apply as apply
    from finetune.precision.convert import disabled as disabled
    from finetune.precision.convert import revert as revert
    from finetune.precision.declared import (
        register_parameter_matmuls as register_parameter_matmuls,
    )
    from finetune.precision.loading import load_in_fp8 as load_in_fp8
    from finetune.precision.planner import plan as plan
    from finetune.quiet import quiet_libraries as quiet_libraries
    from finetune.recipe import list_recipes as list_recipes
    from finetune.recipe import load_recipe as load_recipe
    from finetune.reports.writer import report as report
    from finetune.runs import find_runs as find_runs
    from finetune.trainer import train as train

__version__ = "0.1.0"

_HOME = {
    "FinetuneError": "errors",
    "HealthMonitor": "health.monitor",
    "export_run": "export.exporter",
    "PrecisionConfig": "config",
    "RunConfig": "config",
    "apply": "precision.convert",
    "benchmark": "benchmarking.runner",
    "diagnose": "diagnosis.diagnose",
    "compare": "comparison.comparing",
    "disabled": "precision.convert",
    "estimate": "estimator.estimate",
    "find_runs": "runs",
    "list_recipes": "recipe",
    "load_in_fp8": "precision.loading",
    "load_recipe": "recipe",
    "plan": "precision.planner",
    "quiet_libraries": "quiet",
    "get_receipt": "hook",
    "report": "reports.writer",
    "register_parameter_matmuls": "precision.declared",
    "revert": "precision.convert",
    "setup_fp8_mixed_precision_training": "hook",
    "teardown_fp8_mixed_precision_training": "hook",
    "train": "trainer",
}
__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'finetune' has no attribute {name!r}")
    return getattr(importlib.import_module(f"finetune.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
