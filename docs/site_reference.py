"""Tables of the documentation site, made from the code that they describe.

A page holds `<!-- generated: NAME -->` where a table belongs; `hooks.py` puts the text of
`GENERATED[NAME]()` there while the site is built, and `tests/docs/test_site.py` checks that nothing
is missing. `<!-- output: COMMAND -->` becomes what a command prints, so that no page shows old
output. To print a table: `python docs/site_reference.py NAME`.
"""

from __future__ import annotations

import functools
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, get_args

import yaml

from finetune.cli import listing
from finetune.config.aliases import DROPPED, SETTINGS, in_recipe
from finetune.config.methods import METHODS
from finetune.config.optimizers import (
    BLOCK,
    FP8_ADAMW,
    OPTIMIZERS,
    OWN_TYPE,
    SCALE_BYTES,
    Moments,
    Optimizer,
)
from finetune.config.paths import find_recipe
from finetune.config.schema import DataConfig, EvalConfig, LoraSection, ModelConfig
from finetune.config.sections import CheckpointsConfig, ResumeConfig
from finetune.estimator.measured import measured
from finetune.hardware.device import Device, version
from finetune.hardware.requirements import backend_verdict, engine_verdict
from finetune.precision.facts import Fp8Format, Scaling
from finetune.precision.settings import PrecisionConfig
from finetune.section import Section

ROOT = Path(__file__).parents[1]
RTX5090 = Device("cuda", "NVIDIA GeForce RTX 5090", (12, 0), 31.4)
APPLE = Device("mps", "Apple GPU", None, 32.0)


def table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A Markdown table; line breaks and bars inside of cells are made harmless."""
    lines = [header, ("---",) * len(header), *rows]
    return "\n".join("| " + " | ".join(map(_cell, row)) + " |" for row in lines)


def _cell(text: str) -> str:
    return re.sub(r"(?<!\\)\|", r"\\|", " ".join(str(text).split()))


# ---------------------------------------------------------------------------------------- settings


def settings(name: str, section: type[Section]) -> str:
    """Settings of a section of a recipe: default, values, meaning."""
    schema = section.model_json_schema()["properties"]
    rows = []
    for key, field in section.model_fields.items():
        choices = [schema[key], *schema[key].get("anyOf", ())]
        values = next((x["enum"] for x in choices if "enum" in x), None)
        kinds = [x["type"] for x in choices if x.get("type") not in (None, "null")]
        shown = ", ".join(f"`{v}`" for v in values) if values else " or ".join(kinds)
        default = f"default: `{_yaml(field.default)}`"
        if field.is_required():
            default = "required"
        elif field.default is None:
            default = "default: depends" if name == "precision" else "default: none"
        rows.append((f"`{key}`<br>{default}", f"{shown}<br>{field.description}"))
    return table((f"`{name}.`", "values, and meaning"), rows)


def _yaml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return str(list(value) if value == () else value)


# ------------------------------------------------------------------- combinations and refusals


def combinations() -> str:
    """Scaling x format x backend, from the verdicts of `finetune.hardware.requirements`."""
    rows = []
    for scaling in get_args(Scaling):
        for fmt in (None,) if scaling == "nvfp4" else get_args(Fp8Format):
            precision = PrecisionConfig(
                compute="fp8", scaling=scaling, format=fmt, emulation="allow"
            )
            usual = " (usual)" if fmt == PrecisionConfig(scaling=scaling).fp8_format else ""
            shown = "E2M1" if fmt is None else f"`{fmt}`{usual}"
            cells = [_engine(name, precision) for name in ("emulated", "torchao", "te")]
            rows.append((f"`{scaling}`", shown, *cells))
    return table(("scaling", "format", "`emulated`", "`torchao`", "`te`"), rows)


def _engine(name: str, precision: PrecisionConfig) -> str:
    verdict = engine_verdict(name, precision)
    if not verdict:
        return verdict.reason
    if name == "emulated":
        return "anywhere"
    major, minor = precision.facts.capability
    later = f"has no {precision.scaling} on" in backend_verdict(name, precision, RTX5090).reason
    return f"{major}.{minor}+" + (", not 12.0" if later else "")


REFUSED = {
    "CPU": (
        ("tiny_lora_fp8", "precision.frozen=fp8 precision.scaling=delayed"),
        ("tiny_lora_fp8", "precision.frozen=fp8 precision.format=hybrid"),
        ("tiny_lora_fp8", "precision.frozen=bf16 precision.kernels=eager"),
        ("tiny_lora_fp8", "model.storage=nf4"),
        ("tiny_full_bf16", "model.storage=nf4"),
        ("tiny_qlora_bf16", "lora.bias=all"),
        ("tiny_qlora_bf16", "lora.modules_to_save=[q_proj]"),
        ("tiny_lora_fp8", "lora.target_modules=[lm_head]"),
        ("tiny_full_bf16", "precision.compute=bf16 precision.eval=fp8"),
        ("tiny_full_bf16", "precision.compute=fp32 model.dtype=bfloat16"),
        ("tiny_full_bf16", "precision.compute=fp16 model.dtype=bfloat16"),
        ("tiny_full_fp8", "precision.scaling=tensorwise precision.margin=2"),
        ("tiny_full_fp8", "precision.scaling=nvfp4 precision.format=e4m3"),
        ("tiny_full_fp8", "precision.scaling=mxfp8 precision.power_of_two_scales=false"),
        ("tiny_full_fp8", "precision.high_gemms=[fprop,dgrad,wgrad]"),
        ("tiny_full_fp8", "precision.map.output=fp8"),
        ("tiny_full_fp8", "precision.keep=[no_such_layer]"),
        ("tiny_full_fp8", "train.optim=paged_adamw_8bit"),
        ("tiny_full_fp8", "train.optim=lomo"),
    ),
    "A100-80GB": (("llama_1b_full_fp8", ""),),
    "4090": (("llama_1b_full_fp8", "precision.backend=te precision.scaling=blockwise"),),
    "H100": (
        ("llama_1b_full_fp8", "precision.backend=te precision.scaling=mxfp8"),
        ("llama_1b_full_fp8", "precision.backend=te precision.format=e5m2"),
        ("llama_1b_full_fp8", "precision.backend=torchao precision.format=e5m2"),
        ("llama_1b_full_fp8", "precision.backend=te precision.high_gemms=[wgrad]"),
        (
            "llama_1b_full_fp8",
            "precision.backend=te precision.scaling=delayed precision.compile=on",
        ),
    ),
    "5090": (("llama_1b_full_fp8", "precision.backend=te precision.scaling=mxfp8"),),
}
"""Device -> (recipe, overrides): settings that contradict one another, or that it does not have."""


def refusal(recipe: str, overrides: str, gpu: str = "CPU") -> Any:
    """The error of such settings on a device, None where they are accepted."""
    from finetune import load_recipe
    from finetune.errors import FinetuneError
    from finetune.hardware.gpus import as_device, named_gpu
    from finetune.training.run.preflight import preflight

    device = Device("cpu", "CPU", None, 16.0) if gpu == "CPU" else as_device(named_gpu(gpu))
    try:
        preflight(load_recipe(recipe, overrides.split()).config, device)
    except FinetuneError as error:
        return error
    return None


def refused() -> str:
    """Settings that are refused, with the sentences of the errors."""
    rows = []
    for gpu, cases in REFUSED.items():
        for recipe, overrides in cases:
            error = refusal(recipe, overrides, gpu)
            words = f"`{recipe}`" + (f" with `{overrides}`" if overrides else "")
            place = "" if gpu == "CPU" else f"<br>on {gpu}"
            said = ": ".join(part for part in (error.what, error.why) if part)
            fix = f" **Fix:** {_plain(error.fix)}." if error.fix else ""
            rows.append((words + place, f"{_plain(said)}.{fix}"))
    return table(("settings", "refused because"), rows)


def _plain(text: str) -> str:
    """Text of a terminal in Markdown: nothing in it is markup."""
    return re.sub(r"([*_<>\[\]])", r"\\\1", text)


# -------------------------------------------------------------------------------------- optimizers


def bytes_per_parameter(moments: Moments) -> float | None:
    """Of a large tensor; None where its type decides."""
    if moments.bits is None or moments.factored:
        return 0.0 if not moments.count else None
    scales = SCALE_BYTES / BLOCK if moments.blockwise else 0
    return moments.count * (moments.bits / 8 + scales)


def state(facts: Optimizer, moments: Moments) -> str:
    """Type and count of the stored state."""
    if moments.factored:
        return "float32, one number for each row and column"
    if not moments.count:
        return "none (with momentum: the parameter's type)"
    shape = {1: "", 2: "2 × ", 3: "3 × "}[moments.count]
    if not moments.blockwise:
        return shape + ("float32" if moments.bits else OWN_TYPE)
    form = "FP8 (E4M3)" if facts.name == FP8_ADAMW else f"{moments.bits} bits"
    return f"{shape}{form} in blocks of {BLOCK} with a float32 scale"


def optimizers() -> str:
    """Optimizers whose state is known."""
    header = ("`train.optim`", "algorithm", "library", "state is stored in", "bytes per parameter")
    header += ("update computed in", "weights rounded", "on a CPU")
    known = [facts for facts in OPTIMIZERS.values() if facts.moments is not None]
    return table(header, [_optimizer(facts, facts.moments) for facts in known if facts.moments])


def _optimizer(facts: Optimizer, moments: Moments) -> tuple[str, ...]:
    size = bytes_per_parameter(moments)
    if moments.factored:
        shown = "rows and columns only"
    elif size is None:
        shown = f"{2 * moments.count} (bfloat16) or {4 * moments.count} (float32)"
    else:
        shown = f"{size:.2f}".rstrip("0").rstrip(".")
    library = facts.library + (" (extra `bnb`)" if facts.library == "bitsandbytes" else "")
    by_chance = "by chance (to nearest with `train.optim_args=bf16_stochastic_round=false`)"
    rounded = by_chance if facts.library == "torchao" else "to nearest"
    cpu = f"no: use `{facts.instead}`" if facts.not_on_cpu else "yes"
    return (
        f"`{facts.name}`", facts.kind, library, state(facts, moments), shown, facts.math, rounded,
        cpu,
    )  # fmt: skip


def other_optimizers() -> str:
    """Optimizers of other libraries, and those that are refused."""
    rows = []
    for x in OPTIMIZERS.values():
        if x.refused:
            rows.append((f"`{x.name}`", f"refused: {x.refused}", f"`train.optim={x.instead}`"))
        elif x.moments is None:
            rows.append((f"`{x.name}`", f"{x.kind}, memory not known here", f"`{x.install}`"))
    return table(("`train.optim`", "what it is", "install, or use instead"), rows)


# ----------------------------------------------------------------------------------------- recipes


def pairs() -> dict[str, dict[str, dict[str, Any]]]:
    """Name of a pair of recipes -> precision -> its row of `ls`."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for row in listing.rows():
        name, _, compute = row["recipe"].rpartition("_")
        found.setdefault(name, {})[compute] = row
    return found


def recipes() -> str:
    """Shipped recipes by model, a pair in a row: method, scaling, tokens, memory, speed."""
    _, speeds, ratios = listing._speeds()
    seen = measured("H100")
    groups: dict[str, list[tuple[str, ...]]] = {}
    for name, pair in pairs().items():
        one = next(iter(pair.values()))
        ran, fp8 = seen.get(f"{name}_fp8"), f"{name}_fp8"
        tokens = ran["tokens_per_s"] if ran else speeds.get(fp8)
        ratio = ran["over_bf16"] if ran else ratios.get(fp8)
        speed = f"{tokens:,}" if tokens else "-"
        speed += f", {ratio:.2f}x" if ratio else ""
        memory = (_gib(pair[x]["preview_gib"] if x in pair else None) for x in ("fp8", "bf16"))
        row = (
            f"`{name}`",
            one["method"],
            ", ".join(f"`_{x}`" for x in sorted(pair, reverse=True)),
            str(one["length"]),
            one["data"],
            " / ".join(memory),
            f"**{speed}, measured**" if ran else speed,
        )
        groups.setdefault(one["model"].removeprefix("builtin:"), []).append(row)
    header = ("recipe", "method", "precision", "tokens a row", "data", "≥ GiB", "tokens/s")
    return "\n\n".join(f"### {model}\n\n{table(header, rows)}" for model, rows in groups.items())


def _gib(gib: float | None) -> str:
    """Memory in two digits at least; of what is not predicted none."""
    return "-" if gib is None else f"{gib:.2g}" if gib < 10 else f"{gib:.0f}"


# ------------------------------------------------------------------------ methods and keys of train

LEARNS = {
    "sft": "answers",
    "continue": "plain text: continued pre-training",
    "dpo": "a better and a worse answer, beside the model that training began with",
    "kto": "answers to give and not to give, beside that model",
    "orpo": "as `dpo`, in one go with SFT, without the other model",
    "reward": "as `dpo`; the model gives a score and no words",
    "grpo": "a reward for answers that the model writes while it trains",
    "rloo": "as `grpo`, each answer beside the mean of the others",
    "distill": "a teacher, who judges each word of answers that the model writes",
}
"""Method -> what the model learns from."""

KEYS = {
    "num_train_epochs": "passes over the rows",
    "max_steps": "optimizer steps; replaces epochs",
    "learning_rate": "highest rate of the schedule",
    "lr_scheduler_type": "`cosine`, `linear`, `constant`, `constant_with_warmup`, ...",
    "lr_scheduler_kwargs": "arguments of the schedule",
    "warmup_steps": "steps with a rising rate; below 1 a share of all steps",
    "per_device_train_batch_size": "rows of a micro-batch on each GPU",
    "gradient_accumulation_steps": "micro-batches of an optimizer step",
    "max_length": "tokens of a row, longer ones are cut; `auto` (ours): by the rows",
    "packing": "several rows in one of `max_length`",
    "packing_strategy": "`bfd`: whole rows; `wrapped`: cut wherever one is full",
    "pad_to_multiple_of": "tokens of a batch are padded to it: FP8 needs 16; `auto`: 128 on GPUs",
    "gradient_checkpointing": "compute activations twice to save memory; `auto` (ours): by need",
    "optim": "[optimizer](optimizers.md)",
    "adam_beta2": "decay of the second moment",
    "weight_decay": "of all weights but biases and norms",
    "max_grad_norm": "gradients are clipped to it",
    "assistant_only_loss": "train on the assistant's turns; left out, by the rows",
    "completion_only_loss": "train on completions; left out, by the rows",
    "eval_strategy": "`steps`, `epoch` or `no`",
    "eval_steps": "steps between evaluations",
    "per_device_eval_batch_size": "rows of a batch of evaluation",
    "save_strategy": "`steps`, `epoch`, `best` or `no`",
    "save_steps": "steps between checkpoints",
    "save_total_limit": "checkpoints that are kept",
    "load_best_model_at_end": "end with the checkpoint that evaluated best",
    "early_stopping_patience": "evaluations without a better result until the run ends (ours)",
    "logging_steps": "steps between lines of the log",
    "seed": "draws rows, adapters and dropout",
    "report_to": "`tensorboard`, `wandb`, `trackio`, `none`",
    "fsdp": "shard over GPUs: [several GPUs](../guides/several-gpus.md)",
    "fsdp_config": "how it shards",
    "method": "[training method](../guides/training-methods.md) (ours)",
    "embedding_learning_rate": "rate of embeddings and output head (ours)",
    "max_pixels": "most pixels of an image (ours)",
    "min_pixels": "fewest pixels of an image (ours)",
    "beta": "weight of the reference (`dpo`, `kto`, `grpo`, ...); of KL in `distill`",
    "reward_funcs": "rewards of `grpo` and `rloo`",
    "reward_weights": "their weights",
    "teacher_model_name_or_path": "teacher of `distill`",
    "num_generations": "answers to each prompt",
    "num_generations_eval": "the same in evaluation",
    "max_completion_length": "tokens of an answer",
    "temperature": "of the answers",
}
"""Key of `train` -> what it does, in the order of the page."""
ALWAYS = (
    "learning_rate", "per_device_train_batch_size", "gradient_accumulation_steps", "max_length",
    "packing", "gradient_checkpointing", "optim", "eval_steps", "save_steps",
)  # fmt: skip
"""Keys with a column of their own in the table of recipes; others stand in the last one."""
SHORT = {
    "per_device_train_batch_size": "batch",
    "gradient_accumulation_steps": "accum.",
    "gradient_checkpointing": "checkpointing",
}


def methods() -> str:
    """Training methods: what is learned from which rows, recipes, rates, TRL's trainer."""
    names: dict[str, list[str]] = {}
    for name, train in _train_sections().items():
        names.setdefault(train.get("method", "sft"), []).append(f"`{name}`")
    rows = []
    for method in METHODS.values():
        shown = names.get(method.name, [])
        if len(shown) > 6:
            shown = ["`tiny_full`", "`llama_8b_lora`", "[and others](../reference/recipes.md)"]
        low, high = method.rates
        rate = f"{low:.0e} to {high:.0e}".replace("e-0", "e-")
        trainer = f"`{method.trainer.rpartition('.')[2]}`"
        learns = LEARNS[method.name]
        rows.append((f"`{method.name}`", learns, method.needs, ", ".join(shown), rate, trainer))
    header = ("`train.method`", "learns from", "rows", "recipes", "learning rate", "trainer of TRL")
    return table(header, rows)


def _train_sections() -> dict[str, dict[str, Any]]:
    """Name of a pair of recipes -> its `train` section as written."""
    found = {}
    for name, pair in pairs().items():
        recipe = next(iter(pair.values()))["recipe"]
        found[name] = yaml.safe_load(find_recipe(recipe).read_text(encoding="utf-8"))["train"]
    return found


def train_keys() -> str:
    """Keys of `train`: what each does, its default, and what recipes set."""
    sections = _train_sections()
    rows = []
    for key, meaning in KEYS.items():
        values = Counter(_yaml(train[key]) for train in sections.values() if key in train)
        most = [f"`{value}` ({count})" for value, count in values.most_common(4)]
        rows.append((f"`{key}`", meaning, ", ".join(most) + ", ..." * (len(values) > 4) or "-"))
    return table(("`train.`", "meaning", "in recipes (how many pairs)"), rows)


def train_values() -> str:
    """What each pair of recipes sets, its other keys in the last column."""
    rows = []
    for name, train in _train_sections().items():
        epochs = train.get("num_train_epochs")
        steps = train.get("max_steps") or (f"{epochs} epoch" if epochs else "`data.max_tokens`")
        known = (_yaml(train[key]) if key in train else "-" for key in ALWAYS)
        counted = {*ALWAYS, "max_steps", "num_train_epochs", *SAME}
        rest = (f"`{key}: {_yaml(value)}`" for key, value in train.items() if key not in counted)
        rows.append((f"`{name}`", str(steps), *known, ", ".join(rest)))
    header = ("recipe", "steps", *(f"`{SHORT.get(key, key)}`" for key in ALWAYS), "and")
    return table(header, rows)


SAME = ("eval_strategy", "save_strategy", "seed", "report_to")
"""Keys that are alike in all recipes, or follow from another."""


# ------------------------------------------------------------------------------------ command line


def command_line() -> str:
    """Every verb: what it does, its arguments and options, from typer."""
    return "\n\n".join(_verb(name, verb) for name, verb in verbs().items())


def verbs() -> dict[str, Any]:
    """Verb -> its command."""
    from finetune.cli.app import MODULES, command_of

    return {verb: command_of(verb) for verb in MODULES}


def _verb(name: str, verb: Any) -> str:
    rows = []
    words = []
    for param in verb.params:
        if getattr(param, "hidden", False):
            continue
        text = getattr(param, "help", "") or ""
        if param.param_type_name == "argument":
            words.append(shown := param.metavar or param.name.upper())
            rows.append((f"`{shown}`", text))
        else:
            default = param.default if isinstance(param.default, str | int | float) else None
            usual = f" Default: `{default}`." if default and default is not True else ""
            rows.append((", ".join(f"`{o}`" for o in param.opts), text + usual))
    usage = " ".join(["python -m finetune", name, *words, "[options]"])
    return f"## {name}\n\n{verb.help}\n\n```text\n{usage}\n```\n\n" + table(
        ("argument or option", "meaning"), rows
    )


# -------------------------------------------------------------------------------------- Python API

API = {
    "In a notebook": ("load", "add_lora", "trainer", "chat", "FastLanguageModel"),
    "In your own script": (
        "setup_fp8_mixed_precision_training",
        "teardown_fp8_mixed_precision_training",
        "get_receipt",
        "HealthMonitor",
        "load_in_fp8",
    ),
    "Recipes and runs": (
        "train",
        "load_recipe",
        "list_recipes",
        "find_runs",
        "export_run",
        "RunConfig",
        "PrecisionConfig",
    ),
    "Before and after a run": ("estimate", "compare", "benchmark", "diagnose", "report"),
    "Layers": ("plan", "apply", "revert", "disabled", "fp8_matmul"),
    "The rest": ("FinetuneError", "quiet_libraries"),
}
"""Public names in the order of the page."""


def python_api() -> str:
    """A mkdocstrings block for every public name."""
    import finetune

    home = finetune._HOME
    parts = []
    for title, names in API.items():
        parts.append(f"## {title}")
        for name in names:
            parts.append(
                f"::: finetune.{home[name]}.{name}\n"
                "    options:\n"
                "      heading_level: 3\n"
                f"      heading: finetune.{name}\n"
                f"      toc_label: {name}\n"
            )
    return "\n\n".join(parts)


# -------------------------------------------------------------------------------------------- GPUs

FAMILIES = {
    "H100": "H100",
    "H200": "H200",
    "B200": "B200",
    "RTX 5090": "RTX 5090",
    "RTX 4090": "RTX 4090",
    "L40S": "L40S",
    "RTX PRO 6000": "RTX PRO 6000",
    "A100": "A100-80GB",
    "RTX 3090": "RTX 3090",
    "V100": "V100-32GB",
    "T4": "T4",
    "MI300X": "MI300X",
}
"""Name on the page -> line of the table of GPUs."""


def devices() -> Iterator[tuple[str, Device]]:
    """Devices of the page, as `finetune.hardware` sees them."""
    from finetune.hardware.gpus import as_device, named_gpu

    for name, line in FAMILIES.items():
        yield name, as_device(named_gpu(line))
    yield "Apple M series", APPLE


def scalings_on(device: Device) -> dict[str, list[str]]:
    """Scaling -> engines that multiply it in hardware on a device, if they are installed."""
    found: dict[str, list[str]] = {}
    for scaling in get_args(Scaling):
        precision = PrecisionConfig(compute="fp8", scaling=scaling)
        for engine in ("te", "torchao"):
            verdict = backend_verdict(engine, precision, device)
            missing = "transformer-engine is" in verdict.reason  # on the machine of the build
            if verdict or missing:
                found.setdefault(scaling, []).append(engine)
    return found


def gpus() -> str:
    """GPU x FP8, MXFP8, NVFP4, 8-bit optimizer, and what to use."""
    rows = []
    for name, device in devices():
        has = scalings_on(device)
        half = device.capability is not None and device.capability < (8, 0)
        marks = ["yes" if s in has else "no" for s in ("tensorwise", "mxfp8", "nvfp4")]
        capability = "-" if device.capability is None else ".".join(map(str, device.capability))
        capability = "-" if device.is_rocm else capability
        rows.append((name, capability, *marks, _eight_bit(device), _use(device, has, half)))
    header = ("GPU", "compute capability", "FP8", "MXFP8", "NVFP4", "8-bit optimizer", "use")
    return table(header, rows)


def _eight_bit(device: Device) -> str:
    if device.kind == "mps" or device.is_rocm:
        return "`adamw_torch_8bit`, not tried"
    return "`adamw_8bit`"


def _use(device: Device, has: dict[str, list[str]], half: bool) -> str:
    if not has:
        return (
            "`precision.compute=fp16 model.dtype=float32`; it has no BF16 units"
            if half
            else "a `_bf16` recipe; FP8 only to rehearse, emulated"
        )
    if "nvfp4" in has:
        return "an `_fp8` recipe; FP4 with `te` to experiment"
    return "an `_fp8` recipe"


def gpu_scalings() -> str:
    """GPU x scaling: the engines that have it."""
    names = get_args(Scaling)
    rows = []
    for name, device in devices():
        has = scalings_on(device)
        if has:
            rows.append(
                (name, *(", ".join(f"`{e}`" for e in has.get(s, ())) or "-" for s in names))
            )
    return table(("GPU", *(f"`{name}`" for name in names)), rows)


def gpu_figures() -> str:
    """The table of GPUs that the estimator uses."""
    from finetune.hardware.gpus import gpu_table

    rows = []
    for gpu in gpu_table():
        peaks = [f"{gpu.tflops[p]:,.0f}" if p in gpu.tflops else "-" for p in PEAKS]
        rows.append((gpu.name, f"{gpu.memory_gib:.0f}", *peaks, f"{gpu.gb_s:,.0f}", gpu.link))
    header = ("GPU", "GiB", "BF16", "FP16", "FP8", "FP4", "GB/s", "link")
    return table(header, rows)


PEAKS = ("bf16", "fp16", "fp8", "fp4")


# ---------------------------------------------------------------------------------------- versions


def versions() -> str:
    """Libraries that the site was built with."""
    names = ("torch", "transformers", "trl", "peft", "accelerate", "torchao", "bitsandbytes")
    return table(
        ("library", "version"), [(name, version(name) or "not installed") for name in names]
    )


SECTIONS: dict[str, type[Section]] = {
    "model": ModelConfig,
    "precision": PrecisionConfig,
    "lora": LoraSection,
    "data": DataConfig,
    "eval": EvalConfig,
    "checkpoints": CheckpointsConfig,
    "resume": ResumeConfig,
}


def other_tools() -> str:
    """Each key of another tool that an error knows, and what it says."""
    names = sorted({*SETTINGS, *DROPPED})
    return table(
        ("elsewhere", "here"), [(f"`{name}`", _as_code(in_recipe(name))) for name in names]
    )


def _as_code(fix: str) -> str:
    """`write train.max_length=...` with its settings as code."""
    setting = (
        r"(?<![`\w])(--out FOLDER|~lora|~?(?:model|precision|lora|data|train)\.\w+(?:=[^\s,:.]+)?)"
    )
    return re.sub(setting, r"`\1`", fix.removesuffix("=..."))


GENERATED: dict[str, Callable[[], str]] = {
    **{f"settings {name}": partial(settings, name, s) for name, s in SECTIONS.items()},
    "combinations": combinations,
    "refused": refused,
    "optimizers": optimizers,
    "other optimizers": other_optimizers,
    "recipes": recipes,
    "methods": methods,
    "train keys": train_keys,
    "train values": train_values,
    "command line": command_line,
    "python api": python_api,
    "gpus": gpus,
    "gpu scalings": gpu_scalings,
    "gpu figures": gpu_figures,
    "versions": versions,
    "other tools": other_tools,
}
"""Name in a page -> the function that makes its text."""


OUTPUT = re.compile(r"<!-- output: (python -m finetune [^\n]+) -->")
"""In a page: a command, whose output stands there when the site is built."""


@functools.cache
def output(command: str) -> str:
    """A block with a command and what it prints at 80 columns, run in an empty folder."""
    words = [sys.executable, *shlex.split(command)[1:]]
    surroundings = os.environ | {
        "COLUMNS": "80",
        "NO_COLOR": "1",
        "PYTHONPATH": os.pathsep.join(path for path in (str(ROOT), *sys.path) if path),
        "OMP_NUM_THREADS": "1",
    }
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            words, capture_output=True, text=True, check=True, cwd=folder, env=surroundings
        )
    lines = [line.rstrip() for line in done.stdout.strip("\n").splitlines()]
    return "\n".join(["```text", f"$ {command}", *lines, "```"])


def insert(text: str) -> str:
    """A page with its generated parts put in."""
    text = re.sub(r"<!-- generated: ([\w ]+) -->", lambda m: GENERATED[m[1]](), text)
    return OUTPUT.sub(lambda found: output(found[1]), text)


if __name__ == "__main__":
    print(GENERATED[" ".join(sys.argv[1:])]())
