"""Verbs about recipes and their rows: `ls`, `cat`, `cp`, `schema`, `data`, `validate`.

Listing and printing import no torch: what `ls` says of a recipe is in `assets/recipes.json`.
"""

from __future__ import annotations

import io
import json
import re
import shlex
import sys
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from finetune.cli import AsJson, Overrides, RecipeName
from finetune.config.paths import (
    ASSETS,
    find_recipe,
    list_recipes,
    shipped_shape,
    shipped_shapes,
)
from finetune.errors import (
    ConfigError,
    DataNotFoundError,
    FinetuneError,
    ModelNotFoundError,
    writing,
)
from finetune.logging import busy, output, print_rows, whole

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from finetune.config.schema import RunConfig
    from finetune.data.ledger import CountedRows
    from finetune.training.schedule import Schedule

REACH_SECONDS = 3
"""Time in which the hub has to answer before its cache alone is used."""
ROWS = ASSETS / "recipes.json"
"""Rows of `ls`, each with the checksum of its recipe and predicted speeds on several GPUs; made by
`tests.asset_makers.make_recipes`."""
FAMILIES = ASSETS / "families.json"
"""Families of models, each with what was measured of it; written by `tests.benchmarks.families`."""
SCHEMA = "recipe.schema.json"
"""JSON schema of recipes, which lies next to them."""


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
    from finetune.config.recipe import load_recipe

    config = load_recipe(name, check_train=False).config
    lora, precision = config.lora, config.precision
    fp8 = precision.compute == "fp8"
    return {
        "recipe": name,
        "model": config.model.name.rpartition("/")[2],
        "method": f"{'QLoRA' if config.model.storage else 'LoRA'} r={lora.r}" if lora else "full",
        "precision": f"fp8 {precision.scaling}" if fp8 else precision.compute,
        "length": str(config.train.get("max_length", "")),
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
        from finetune.cli.runs import list_runs

        list_runs(out, as_json=as_json)
        return
    if out is not None:
        raise ConfigError("--out would change nothing", where="ls", fix="ls --runs --out FOLDER")
    if as_json:
        print(json.dumps(rows(), indent=1))
        return
    from rich.text import Text

    pairs: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows():
        name, _, compute = row["recipe"].rpartition("_")
        pairs.setdefault(name, {})[compute] = row
    gpu, speeds = _speeds()
    figures = (*(f"{compute} ≥GiB" for compute in COMPUTES), "fp8 tok/s", "/ bf16")
    losing, shown = list[str](), list[dict[str, Any]]()
    for name, pair in pairs.items():
        one = next(iter(pair.values()))  # they differ in precision alone
        memory = (_digits(pair[x]["preview_gib"]) if x in pair else "-" for x in COMPUTES)
        fp8, bf16 = (speeds.get(f"{name}_{compute}", 0) for compute in COMPUTES)
        ratio = fp8 / bf16 if fp8 and bf16 else None
        loses = ratio is not None and ratio < LOSES
        losing += [name] * loses
        ratio = Text("-" if ratio is None else f"{ratio:.2f}x", style="yellow" if loses else "")
        facts = (*memory, f"{fp8:,}" if fp8 else "-", ratio)
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
        "checkpointing where the forecast decides it; tok/s: predicted on one "
        f"{gpu},\nbeside compiled BF16; where there is more memory, the faster run takes it\n"
        "(`estimate` has its figure); `-`: does not fit, no FP8 twin, or not predicted\n"
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
    from finetune.units import percent

    shown = list[dict[str, Any]]()
    for row in families():
        exports = row.get("exports", {})
        failed = {name.split()[1] for name, x in exports.items() if isinstance(x, str)}
        good = dict.fromkeys(name.split()[1] for name in exports if name.split()[1] not in failed)
        trained = [method for method in ("full", "lora") if method in row]
        shares = {f"FP8 {x}": percent(row[x], 0) if x in row else "-" for x in ("full", "lora")}
        verified = ", ".join(["trained", *good]) if trained else "only estimated"
        model = (row["model"] or "-").rpartition("/")[2]
        shown.append({"model": model, "family": row["family"], **shares, "verified": verified})
    console = output()
    print_rows(console, shown, right=("FP8 full", "FP8 lora"), gap=1)
    console.print(
        "\nmodel: its shape is packaged, `estimate` needs no network; `-`: any of them\n"
        "FP8: proven share of the matmul FLOPs of a tiny random model, whose head weighs\n"
        "more than in a real one. trained: that model, in full and LoRA; merged, fp8:\n"
        "exported so, reloaded by Transformers alone, logits compared. only estimated:\n"
        "not trained yet, in any size. On a GPU no family has been measured yet",
        style="dim",
    )


LOSES = 0.995
"""Speed of FP8 over BF16 below which the table says that FP8 does not pay."""


def _speeds() -> tuple[str, dict[str, int]]:
    """Name of the GPU here, or else the H100, and predicted tokens/s of recipes on it."""
    from finetune.hardware.device import installed_model

    stored = json.loads(ROWS.read_text())
    speeds, name = {recipe: known["tokens_per_s"] for recipe, known in stored.items()}, "H100"
    if model := installed_model():
        from finetune.hardware.device import Device
        from finetune.hardware.gpus import find_gpu

        gpu = find_gpu(Device("cuda", model, None, 0.0))
        name = gpu.name if gpu and any(gpu.name in row for row in speeds.values()) else name
    return name, {recipe: row[name] for recipe, row in speeds.items() if name in row}


COMPUTES = ("fp8", "bf16")


def _digits(gib: float | None) -> str:
    """Memory in as many digits as a table has room for."""
    return "-" if gib is None else f"{gib:.0f}" if gib >= 10 else f"{gib:.1f}"


def cat(
    recipe: RecipeName,
    overrides: Overrides = None,
    resolved: Annotated[
        bool, typer.Option(help="Complete: every default, every override.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Print a recipe, with --resolved complete."""
    if resolved or overrides or as_json:
        from finetune.data.lengths import load_recipe

        checked = load_recipe(recipe, overrides or ())
        if as_json:
            print(json.dumps(checked.config.model_dump(mode="json"), indent=1))
        else:
            sys.stdout.write(checked.to_yaml())
    else:
        from finetune.config.yaml import read_text

        sys.stdout.write(read_text(find_recipe(recipe)))


def cp(
    recipe: RecipeName,
    destination: Annotated[
        Path, typer.Argument(help="File or folder to copy it to; left out: here.")
    ] = Path(),
    preset: Annotated[
        str | None, typer.Option(help="fastest, least-memory, no-fp8 or debug: change it for that.")
    ] = None,
    force: Annotated[bool, typer.Option(help="Overwrite an existing file.")] = False,
) -> None:
    """Copy a recipe to edit it, with --preset for one end."""
    from finetune.config.yaml import read_text

    source, text, lines = find_recipe(recipe), read_text(find_recipe(recipe)), None
    name = source.name
    if preset is not None:
        from finetune.estimator.presets import preset_named, with_preset

        preset = preset_named(preset)
        text, lines = with_preset(recipe, text, preset)
        name = f"{source.stem}-{preset}.yaml"
    target = destination / name if destination.is_dir() else destination
    if target.suffix not in (".yaml", ".yml"):
        target = target.with_name(target.name + ".yaml")
    if target.exists() and not force:
        raise ConfigError(
            f"{target} is there already",
            where=str(target.absolute()),
            fix="--force replaces it; or another name",
        )
    if not target.parent.is_dir():
        raise ConfigError(
            f"there is no folder {str(target.parent)!r}",
            where=str(target.absolute()),
            fix=f"mkdir -p {shlex.quote(str(target.parent))}",
        )
    # The schema stays where it is installed; a copy elsewhere names it in full.
    text = text.replace(f"$schema={SCHEMA}", f"$schema={source.parent / SCHEMA}")
    where, fix = str(target.absolute()), "a folder that you may write to"
    with writing(f"{target} cannot be written", where=where, fix=fix):
        target.write_text(text, encoding="utf-8")
    again = _as_argument(target)
    if lines is None:
        print(f"{target}\nrun it: python -m finetune {again}")
        return
    print(f"{target}: {recipe}, {preset}")
    for line in lines or ["nothing to change: the recipe has it all"]:
        print(f"  {line}")
    print(f"next: python -m finetune estimate {again} --gpu H100")


def _as_argument(path: Path) -> str:
    return shlex.quote(str(path) if len(path.parts) > 1 or path.suffix else f"./{path}")


def schema() -> None:
    """Print the JSON schema of recipes, for editors.

    Recipes name it in their first line (`yaml-language-server: $schema=...`).
    """
    from finetune.config.schema import RunConfig

    print(json.dumps(RunConfig.model_json_schema(), indent=1))


# ------------------------------------------------------------------------------------------- rows

TRAINED, CONTEXT = "bold green", "dim"


def data(
    recipe: RecipeName,
    overrides: Overrides = None,
    show: Annotated[int, typer.Option(min=0, help="Rows to decode.")] = 3,
    html: Annotated[Path | None, typer.Option(help="Write the rows as an HTML page too.")] = None,
    as_json: AsJson = False,
) -> None:
    """Count rows and tokens, and show which ones are trained on."""
    from rich.console import Console
    from rich.text import Text

    from finetune.data.lengths import load_recipe

    checked = load_recipe(recipe, overrides or ())
    console = output(stderr=as_json)
    with busy(console, f"loading libraries for {checked.name}"):
        from finetune.data.ledger import counted_rows
        from finetune.logging import counting_rows
    with counting_rows(console, f"reading the rows of {checked.name}"):
        found = counted_rows(checked.config)
    shown: Any = found.prepared.select(range(min(show, len(found.prepared))))
    if as_json:
        rows = [{"input_ids": row["input_ids"], "labels": row["labels"]} for row in shown]
        facts = {"description": found.rows.description, "notes": found.rows.notes}
        print(json.dumps({**facts, "train": found.ledger.as_json(), "rows": rows}))
        return
    show_ledger(console, found, checked.config)
    if (planned := _schedule(checked.config, found)) is not None:
        _show_schedule(console, planned)
    page = Console(record=True, file=io.StringIO(), width=100)
    for index, row in enumerate(shown):
        for target in (console, page):
            target.print(f"\nrow {index + 1}, {len(row['input_ids'])} tokens", style="bold")
            # In a pipe there is no style to tell them by.
            bracketed = target is console and console.color_system is None
            target.print(_decoded(found.tokenizer, row, bracketed=bracketed))
    trained = "[[trained]]" if console.color_system is None else "trained"
    console.print(Text.assemble("\n", (trained, TRAINED), " ", ("context", CONTEXT)))
    if html is not None:
        failure = f"the page {str(html)!r} cannot be written"
        with writing(failure, where="--html", fix="choose a file in a folder that is there"):
            html.write_text(page.export_html(), encoding="utf-8")
        console.print(whole(f"page: {html}"), crop=False)


def show_ledger(console: Console, found: CountedRows, config: RunConfig) -> None:
    """Print what rows are, what is worth a warning, their counts, and what row lengths cost."""
    from rich.text import Text

    console.print(f"data: {found.rows.description}", highlight=False)
    for line in found.rows.notes:
        console.print(Text(f"! {line}", style="yellow"))
    for warns, line in found.ledger.lines():
        console.print(Text(f"! {line}", style="yellow") if warns else f"      {line}")
    if found.ledger.trained:
        _show_lengths(console, found, config)


def _show_lengths(console: Console, found: CountedRows, config: RunConfig) -> None:
    """Print how long rows are, and what is cut by some lengths; packed text is not cut."""
    from finetune.config.methods import method_of
    from finetune.data.ledger import SPLITTING
    from finetune.data.lengths import uncut

    lengths, method = found.ledger.lengths, method_of(config.train)
    if found.ledger.dropped and not method.is_text:  # TRL kept the rest alone
        lengths = uncut(config, sample=found.ledger.sampled is not None)
    (_, median), *more, (_, longest) = lengths.percentiles().items()
    ends = "".join(f", {share}% up to {tokens:,}" for share, tokens in more)
    console.print(f"      tokens of a row: median {median:,}{ends}, longest {longest:,}")
    if found.ledger.bins is None or found.args.packing_strategy not in SPLITTING:
        costs = [*lengths.costs(config)]
        print_rows(console, costs, right=[*costs[0]][1:])


def _schedule(config: RunConfig, found: CountedRows) -> Schedule | None:
    """Steps of a run on these rows; None where only some of them were read."""
    from finetune.training.schedule import schedule_of

    ledger = found.ledger
    rows = ledger.rows - ledger.dropped if ledger.bins is None else ledger.bins
    known = None if ledger.sampled is not None else rows
    if known is None and found.args.max_steps <= 0:
        return None
    return schedule_of(found.args, known, config.data.min_steps)


def _show_schedule(console: Console, planned: Schedule) -> None:
    console.print(f"      {planned.line}", highlight=False)
    if planned.lowered:
        console.print(f"      {planned.lowered}", highlight=False)
    if planned.few:
        console.print(f"! {planned.few}", style="yellow", highlight=False)


def _decoded(tokenizer: Any, row: dict[str, Any], *, bracketed: bool) -> Text:
    """The row as text, trained tokens in another style, or in brackets too.

    Spans are decoded together: a character may have several tokens.
    """
    from rich.text import Text

    text, ids, labels = Text(), row["input_ids"], row["labels"]
    start = 0
    for end in range(1, len(ids) + 1):
        if end == len(ids) or (labels[end] >= 0) != (labels[start] >= 0):
            part, trained = tokenizer.decode(ids[start:end]), labels[start] >= 0
            part = f"[[{part}]]" if trained and bracketed else part
            text.append(part, style=TRAINED if trained else CONTEXT)
            start = end
    return text


def _rows(config: RunConfig) -> tuple[CountedRows | None, str]:
    """Rows of a recipe, counted; or the reason why they cannot be had here.

    What lies on the hub may be out of reach, and says nothing against a recipe.

    Raises:
        DataError, DataNotFoundError: what lies here cannot be trained on.
    """
    from finetune.config.schema import BUILTIN
    from finetune.data.ledger import counted_rows

    named = (config.data.hub, config.model.name)
    if any(name and not name.startswith(BUILTIN) and not Path(name).exists() for name in named):
        _stay_offline_if_out_of_reach()
    try:
        return counted_rows(config, sample=True), ""
    except (ModelNotFoundError, DataNotFoundError) as error:
        is_here = config.model.name.startswith(BUILTIN) or Path(config.model.name).exists()
        if is_here if isinstance(error, ModelNotFoundError) else config.data.hub is None:
            raise
        return None, error.what


def _stay_offline_if_out_of_reach() -> None:
    """Let the hub's library use its cache alone where there is no hub: it would try for 40 s."""
    import socket
    import urllib.parse
    import urllib.request

    import datasets
    from huggingface_hub import constants

    host = urllib.parse.urlsplit(constants.ENDPOINT).hostname or ""
    if urllib.request.getproxies():
        return
    try:
        socket.create_connection((host, 443), timeout=REACH_SECONDS).close()
    except OSError:
        constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True


def validate(recipe: RecipeName, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Check a recipe and its rows, show each layer's precision; loads no weights."""
    from rich.text import Text

    from finetune.data.lengths import load_recipe

    checked = load_recipe(recipe, overrides or ())
    with busy(output(stderr=True), f"checking {checked.name}"):
        from finetune.estimator.gate import bound_of, why_too_small
        from finetune.hardware.device import this_device
        from finetune.hardware.requirements import check_here, resolve
        from finetune.training.model import resolve_attention, sketch
        from finetune.training.preflight import check_settings, check_sharding

        config, device = checked.config, this_device()
        check_sharding(config)
        model = sketch(config)
        the_plan, resolution = check_settings(config, model), None
        need = bound_of(config, model, the_plan)
        attention = resolve_attention(config, model, device)
    try:
        check_here(config, device)
        resolution = resolve(config.precision, device)
        here = resolution.fallback or f"{resolution.label}: {resolution.reason}"
    except FinetuneError as error:
        here = f"not on this machine: {error.why or error.what}"
    short = why_too_small(need, device)
    with busy(output(stderr=True), f"reading the rows of {checked.name}"):
        rows, unread = _rows(config)
        if (planned := rows and _schedule(config, rows)) is not None:
            planned.check()
    if as_json:
        layers = [
            {"name": x.name, "shape": x.shape, "compute": x.compute, "held": x.stored,
             "reason": x.reason}
            for x in the_plan.layers
        ]  # fmt: skip
        facts: dict[str, Any] = {"recipe": checked.name, "here": here, "memory": str(need)}
        facts["short"] = short
        facts |= {"storage": config.model.storage or "", "attention": str(attention)}
        found = {"description": rows.rows.description, **rows.ledger.as_json()} if rows else {}
        facts |= {"data": found or {"unread": unread}}
        print(json.dumps({**facts, "trainable": need.trainable, "layers": layers}, indent=1))
        return
    file = checked.source
    origin = file.name if file.parent.name == "recipes" else str(file)
    console = output()
    console.print(whole(f"{checked.name}: valid ({origin})", "bold"), crop=False)
    stored = f"; frozen base stored in {config.model.storage}" if config.model.storage else ""
    console.print(f"parameters: {need.parameters:,}, {need.trainable:,} of them trained{stored}")
    red = (f"; too small here: {short}" * bool(short), "red")
    console.print(Text.assemble(f"memory: at least {need}", red))
    console.print(f"precision here: {here}", style=None if resolution else "yellow")
    console.print(f"attention here: {attention}")
    if rows is None:
        console.print(f"data: not read: {unread}", style="yellow")
    else:
        show_ledger(console, rows, config)
        if planned is not None:
            _show_schedule(console, planned)
    console.print("\n", the_plan, "", sep="")
    again = shlex.join([recipe, *(overrides or ()), *([] if resolution else ["--gpu", "H100"])])
    console.print(whole(f"next: python -m finetune estimate {again}"), crop=False)
