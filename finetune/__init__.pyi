"""Public names: `__init__.py` loads each from here when it is first used; for type checkers too."""

from finetune.analysis.benchmark.benchmark import benchmark as benchmark
from finetune.analysis.compare.compare import compare as compare
from finetune.analysis.diagnose.diagnose import diagnose as diagnose
from finetune.analysis.report.report import report as report
from finetune.api import train as train
from finetune.config.paths import list_recipes as list_recipes
from finetune.config.schema import RunConfig as RunConfig
from finetune.data.auto_length import load_recipe as load_recipe
from finetune.errors import FinetuneError as FinetuneError
from finetune.estimator.estimate import estimate as estimate
from finetune.export.export import export_run as export_run
from finetune.logging import quiet_libraries as quiet_libraries
from finetune.precision.cases.parameters import fp8_matmul as fp8_matmul
from finetune.precision.convert import apply as apply
from finetune.precision.convert import disabled as disabled
from finetune.precision.convert import revert as revert
from finetune.precision.planner import plan as plan
from finetune.precision.settings import PrecisionConfig as PrecisionConfig
from finetune.runs.lookup import find_runs as find_runs
from finetune.scripting.calls import add_lora as add_lora
from finetune.scripting.calls import load as load
from finetune.scripting.calls import trainer as trainer
from finetune.scripting.fast_language_model import FastLanguageModel as FastLanguageModel
from finetune.storage.loading import load_in_fp8 as load_in_fp8
from finetune.training.asking.chat import chat as chat
from finetune.training.health.monitor import HealthMonitor as HealthMonitor
from finetune.training.setup import get_receipt as get_receipt
from finetune.training.setup import (
    setup_fp8_mixed_precision_training as setup_fp8_mixed_precision_training,
)
from finetune.training.setup import (
    teardown_fp8_mixed_precision_training as teardown_fp8_mixed_precision_training,
)

__version__: str
