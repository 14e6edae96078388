"""FP8 fine-tuning for Hugging Face models: FP8 asked is FP8 given, proven, or an error.

Importing this package imports no torch: each public name is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_HOME = {
    "FinetuneError": "errors",
    "HealthMonitor": "training.health.monitor",
    "export_run": "export.export",
    "PrecisionConfig": "config.schema",
    "RunConfig": "config.schema",
    "apply": "precision.convert",
    "benchmark": "analysis.benchmark.benchmark",
    "diagnose": "analysis.diagnose.diagnose",
    "compare": "analysis.compare.compare",
    "disabled": "precision.convert",
    "estimate": "estimator.estimate",
    "find_runs": "runs.lookup",
    "list_recipes": "config.paths",
    "load_in_fp8": "storage.loading",
    "load_recipe": "config.recipe",
    "plan": "precision.planner",
    "quiet_libraries": "logging",
    "get_receipt": "training.hook",
    "report": "analysis.report.report",
    "register_parameter_matmuls": "precision.layers",
    "revert": "precision.convert",
    "setup_fp8_mixed_precision_training": "training.hook",
    "teardown_fp8_mixed_precision_training": "training.hook",
    "train": "api",
}
__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'finetune' has no attribute {name!r}")
    return getattr(importlib.import_module(f"finetune.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
