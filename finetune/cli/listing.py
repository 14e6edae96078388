"""The verb `ls`: recipes, model families and runs, in tables.

Imports no torch: what it says of a recipe is in `assets/recipes.json`.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from finetune.cli import AsJson
from finetune.config.measures import LOSSES
from finetune.config.paths import ASSETS, find_recipe, list_recipes, shipped_shape, shipped_shapes
from finetune.errors import ConfigError
from finetune.estimator.measured import measured
from finetune.logging import output, print_rows
from finetune.runs.lookup import find_comparisons, find_runs
from finetune.units import percent, size_of_gib

ROWS = ASSETS / "recipes.json"
"""Rows of `ls`, each with the checksum of its recipe and predicted speeds on several GPUs; made by
`tests.asset_makers.make_recipes`."""
FAMILIES = ASSETS / "families.json"
"""Families of models, each with what was measured of it; written by `tests.benchmarks.families`."""


def rows() -> list[dict[str, Any]]:
    """A row for each shipped recipe: the stored one; of a changed one a new one, without memory."""
    stored = json.loads(ROWS.read_text())
    found = []
    for name in list_recipes():
        known = stored.get(name, {})
        same = known.get("crc32") == checksum(name)
        found.append(known["row"] if same else row_of(name) | {"preview_gib": None})
    return found


def checksum(name: str) -> int:
    """CRC-32 of a recipe's file."""
    return zlib.crc32(find_recipe(name).read_bytes())


def row_of(name: str) -> dict[str, Any]:
    """The facts of a recipe in a table: model, method, precision, rows."""
    from finetune.config.recipe import read_recipe

    config = read_recipe(name, check_train=False).config
    lora, precision = config.lora, config.precision
    fp8 = precision.compute == "fp8"
    return {
        "recipe": name,
        "model": config.model.name.rpartition("/")[2],
        "method": f"{'QLoRA' if config.model.storage else 'LoRA'} r={lora.r}" if lora else "full",
        "precision": f"fp8 {precision.scaling}" if fp8 else precision.compute,
        "length": str(config.train.max_length) if "max_length" in config.train else "",
        "data": config.data.label.rpartition("/")[2],
    }


def ls(
    runs: Annotated[bool, typer.Option("--runs", help="List runs instead.")] = False,
    out: Annotated[Path | None, typer.Option(help="With --runs: folder of runs.")] = None,
    models: Annotated[bool, typer.Option("--models", help="List model families instead.")] = False,
    as_json: AsJson = False,
) -> None:
    """List recipes, runs (--runs) or model families (--models)."""
    if runs and models:
        raise ConfigError("--runs and --models are two lists", where="ls", fix="one of them")
    if models:
        _list_families(as_json=as_json)
        return
    if runs:
        list_runs(out, as_json=as_json)
        return
    if out is not None:
        raise ConfigError("--out would change nothing", where="ls", fix="ls --runs --out FOLDER")
    if as_json:
        print(json.dumps(rows(), indent=1))
        return
    pairs: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows():
        name, _, compute = row["recipe"].rpartition("_")
        pairs.setdefault(name, {})[compute] = row
    gpu, speeds, ratios = _speeds()
    seen = measured(gpu)
    figures = (*(f"{compute} ≥GiB" for compute in COMPUTES), "fp8 tok/s", "/ bf16")
    losing, shown = list[str](), list[dict[str, Any]]()
    for name, pair in pairs.items():
        one = next(iter(pair.values()))  # they differ in precision alone
        memory = (_digits(pair[x]["preview_gib"]) if x in pair else "-" for x in COMPUTES)
        fp8, ratio = speeds.get(f"{name}_fp8"), ratios.get(f"{name}_fp8")
        if ran := seen.get(f"{name}_fp8"):
            fp8, ratio = ran["tokens_per_s"], ran["over_bf16"]
        star = "*" if ran else " "
        loses = ratio is not None and ratio < LOSES
        if loses:
            losing.append(name)
        shown_ratio = "-" if ratio is None else f"{ratio:.2f}x{star}"
        ratio = Text(shown_ratio, style="yellow" if loses else "")
        facts = (*memory, f"{fp8:,}{star}" if fp8 else "-", ratio)
        model = re.sub(r"^builtin:|-Instruct|-\d{4}$", "", one["model"])  # --json has it whole
        row = {"recipe": name, "model": model, "method": one["method"]}
        shown.append(row | dict(zip(figures, facts, strict=True)))
    console = output()
    print_rows(console, shown, right=figures, gap=1)
    if losing:
        line = f"\nFP8 is slower than BF16 in {', '.join(losing)}: take the _bf16 twin for speed"
        console.print(Text(line, style="yellow"))
    console.print(
        "\nnames end in _fp8 or _bf16; ≥GiB: predicted least memory of one GPU, with\n"
        "checkpointing where the forecast decides it; where there is more, the faster run\n"
        f"takes it (`estimate` has its figure); tok/s: on one {gpu}, and over compiled\n"
        "BF16 with the same checkpointing: * measured (note 15 has it), others predicted;\n"
        "`-`: does not fit, no FP8 twin, or not predicted\n"
        "next: python -m finetune estimate llama_8b_lora_fp8 --gpu H100",
        style="dim",
    )


def families() -> list[dict[str, Any]]:
    """A row for each model whose shape is packaged, and for each other family of the matrix.

    `full` and `lora` are shares of matmul FLOPs in FP8, `exports` logit errors, or why there is no
    export, of a tiny random model: `tests.benchmarks.families` measures and writes them.
    """
    measured: dict[str, dict[str, Any]] = json.loads(FAMILIES.read_text())
    shapes = {name: shipped_shape(name) for name in shipped_shapes()}
    found = [
        (json.loads(path.read_text())["model_type"], name) for name, path in shapes.items() if path
    ]
    others = measured.keys() - {family for family, _ in found}
    return [
        {"model": name, "family": family} | measured.get(family, {})
        for family, name in (*sorted(found), *((family, None) for family in sorted(others)))
    ]


def _list_families(*, as_json: bool) -> None:
    if as_json:
        print(json.dumps(families(), indent=1))
        return
    shown = list[dict[str, Any]]()
    for row in families():
        exports = row.get("exports", {})
        failed = {name.split()[1] for name, x in exports.items() if isinstance(x, str)}
        good = dict.fromkeys(name.split()[1] for name in exports if name.split()[1] not in failed)
        trained = [method for method in ("full", "lora") if method in row]
        shares = {f"FP8 {x}": percent(row[x], 0) if x in row else "-" for x in ("full", "lora")}
        words = ["images" if "images" in row else "trained", *good]
        verified = ", ".join(words) if trained else "only estimated"
        model = (row["model"] or "-").rpartition("/")[2]
        shown.append({"model": model, "family": row["family"], **shares, "verified": verified})
    console = output()
    print_rows(console, shown, right=("FP8 full", "FP8 lora"), gap=1)
    console.print(
        "\nmodel: its shape is packaged, `estimate` needs no network; `-`: any of them\n"
        "FP8: proven share of the matmul FLOPs of a tiny random model, whose head weighs\n"
        "more than in a real one. trained: that model, in full and LoRA; images: that, on\n"
        "rows with them, too; merged, fp8: exported so, reloaded by Transformers alone,\n"
        "logits compared. only estimated: not trained yet, in any size. On a GPU only\n"
        "Llama has run: 8B on one H100",
        style="dim",
    )


LOSES = 0.995
"""Speed of FP8 over BF16 below which the table says that FP8 does not pay."""


def _speeds() -> tuple[str, dict[str, int], dict[str, float]]:
    """Name of the GPU here, or else the H100; predicted tokens/s on it, and FP8 over BF16."""
    from finetune.hardware.device import installed_model

    stored = json.loads(ROWS.read_text())
    speeds, name = {recipe: known["tokens_per_s"] for recipe, known in stored.items()}, "H100"
    if model := installed_model():
        from finetune.hardware.device import Device
        from finetune.hardware.gpus import find_gpu

        gpu = find_gpu(Device("cuda", model, None, 0.0))
        name = gpu.name if gpu and any(gpu.name in row for row in speeds.values()) else name
    ratios = {recipe: known.get("over_bf16", {}) for recipe, known in stored.items()}
    tokens, times = (
        {x: row[name] for x, row in of.items() if name in row} for of in (speeds, ratios)
    )
    return name, tokens, times


COMPUTES = ("fp8", "bf16")


def _digits(gib: float | None) -> str:
    """Memory in as many digits as a table has room for."""
    return "-" if gib is None else f"{gib:.0f}" if gib >= 10 else f"{gib:.1f}"


DEFAULT_OUT = Path("runs")
_STATES = {"finished": "", "running": "cyan", "stopped": "yellow"}


def list_runs(out: Path | None, *, as_json: bool) -> None:
    """Print the runs below `out`, newest first, and the comparisons apart.

    Raises:
        ConfigError: a folder was named and is not there.
    """
    folder = DEFAULT_OUT if out is None else out
    nothing = out is None and not folder.is_dir()
    runs = [] if nothing else [run.summary() for run in find_runs(folder)]
    compared = [] if nothing else [_comparison(path) for path in find_comparisons(folder)]
    if as_json:
        print(json.dumps({"runs": runs, "comparisons": compared}, indent=1))
        return
    if not runs and not compared:
        print(f"no runs in {folder}/ yet: python -m finetune tiny_lora_fp8 makes one")
        return
    console = output()
    if runs:
        right = ("steps", "loss", "eval loss", "tok/s", "memory")
        rows = _used([*map(_row, runs)])
        judged = sum(key in rows[0] for key in ("loss", "eval loss", "score"))
        print_rows(console, rows, right=right, least=3 + judged)
    if compared:
        console.print(Text("\ncomparisons" if runs else "comparisons", style="bold"))
        print_rows(console, _used([*map(_comparison_row, compared)]))


def _used(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows without the columns in which none has a figure: runs of RL have no losses."""
    idle = {key for key in rows[0] if all(row[key] == "-" for row in rows)}
    return [{key: cell for key, cell in row.items() if key not in idle} for row in rows]


def _row(run: dict[str, Any]) -> dict[str, Any]:
    """A run in a line, what matters most first: its name has its precision at the end."""
    ended = "" if run["state"] == "finished" else f" {run['state']}"
    return {
        "run": f"{run['recipe']}/{run['run']}",
        "verified": _verified(run),
        "steps": Text(
            f"{run['step']}/{run['steps'] or '?'}{ended}", style=_STATES.get(run["state"], "red")
        ),
        "loss": figure(run["loss"], ".3f"),
        "eval loss": figure(run["eval_loss"], ".3f"),
        "score": _scores(run["scores"]),
        "precision": run["precision"],
        "tok/s": figure(run["tokens_per_s"], ",.0f"),
        "memory": "-" if run["memory_gib"] is None else size_of_gib(run["memory_gib"]),
    }


def _scores(scores: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.3f}" for name, value in scores.items()) or "-"


def _verified(run: dict[str, Any]) -> Text:
    if run["fallback"]:  # BF16 is verified, and is not what was requested
        return Text("fell back", style="bold yellow")
    return Text("yes", style="green") if run["proven"] else Text("no", style="bold red")


def figure(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _comparison(folder: Path) -> dict[str, Any]:
    """A comparison in a line; one that cannot be read says so instead of a verdict."""
    from finetune.analysis.compare.result import read_comparison

    try:
        found = read_comparison(folder)
    except ConfigError:
        nothing = {"a": None, "b": None, "seeds": 0, "verdict": "cannot be read"}
        return {"folder": str(folder), **nothing, "gap": {}, "speed": None}
    return {
        "folder": str(folder),
        "a": found.a.recipe,
        "b": found.b.recipe,
        "seeds": len(found.seeds),
        "verdict": found.verdict,
        "gap": {name: gap.gap for name, gap in found.gaps.items()},
        "speed": found.speed and found.speed.ratio,
    }


def _comparison_row(one: dict[str, Any]) -> dict[str, Any]:
    points = {
        name: f"{gap * 100:+z.2f} pt" for name, gap in one["gap"].items() if name not in LOSSES
    }
    scores = ", ".join(f"{name} {gap}" for name, gap in points.items()) or "-"
    return {
        "folder": one["folder"],
        "verdict": Text(one["verdict"], style="" if one["verdict"] == "equivalent" else "yellow"),
        "a against b": f"{one['a']} against {one['b']}",
        "seeds": str(one["seeds"]),
        "loss": figure(one["gap"].get("train"), "+z.2%"),
        "eval loss": figure(one["gap"].get("eval"), "+z.2%"),
        "score": scores,
        "speed": figure(one["speed"], ".2f") + ("x" if one["speed"] is not None else ""),
    }
