"""Verbs about recipes and their rows: `cat`, `cp`, `schema`, `data`, `validate`.

Printing imports no torch.
"""

from __future__ import annotations

import io
import json
import shlex
import sys
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from finetune.cli import AsJson, Overrides, RecipeName
from finetune.config.paths import find_recipe
from finetune.errors import (
    ConfigError,
    DataNotFoundError,
    FinetuneError,
    ModelNotFoundError,
    writing,
)
from finetune.logging import busy, output, print_rows, whole
from finetune.units import plural

if TYPE_CHECKING:
    from rich.console import Console

    from finetune.config.schema import RunConfig
    from finetune.data.counting import CountedRows
    from finetune.training.run.schedule import Schedule

REACH_SECONDS = 3
"""Time in which the hub has to answer before its cache alone is used."""
FP8 = "precision.compute=fp8 precision.scaling=rowwise"
SCHEMA = "recipe.schema.json"
"""JSON schema of recipes, which lies next to them."""


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
        from finetune.data.auto_length import load_recipe

        checked = load_recipe(recipe, overrides or ())
        if as_json:
            print(json.dumps(checked.config.model_dump(mode="json"), indent=1))
        else:
            sys.stdout.write(checked.to_yaml())
    else:
        from finetune.config.yaml import read_text

        sys.stdout.write(read_text(find_recipe(recipe)))


def cp(
    recipe: Annotated[
        str,
        typer.Argument(metavar="RECIPE", help="Name, or path to a YAML file.", show_default=False),
    ] = "",
    destination: Annotated[
        Path, typer.Argument(help="File or folder to copy it to; left out: here.")
    ] = Path(),
    preset: Annotated[
        str | None,
        typer.Option(
            help="fastest, least-memory, bf16, no-fp8, smoke or debug: change it for that."
        ),
    ] = None,
    force: Annotated[bool, typer.Option(help="Overwrite an existing file.")] = False,
    foreign: Annotated[
        Path | None,
        typer.Option(
            "--from", metavar="FILE", help="Of Axolotl or LLaMA-Factory, in place of RECIPE."
        ),
    ] = None,
) -> None:
    """Copy a recipe to edit it, with --preset for one end."""
    from finetune.config.yaml import read_text

    source = find_recipe(recipe if foreign is None else str(foreign))
    name, title, lines = source.name, "", list[str]()
    if foreign is None:
        text = read_text(source)
    else:
        from finetune.config.foreign import Translation

        destination, made = Path(recipe), Translation(source)
        recipe, text = str(foreign), made.to_yaml(name)
        title, lines = f": from {made.tool}'s {source}", made.lines()
    if preset is not None:
        from finetune.estimator.presets import preset_named, with_preset

        preset = preset_named(preset)
        text, changes = with_preset(recipe, text, preset)
        name = f"{source.stem}-{preset}.yaml"
        title = (title or f": {recipe}") + f", {preset}"
        lines += [f"  {x}" for x in changes or ("nothing to change: the recipe has it all",)]
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
    again = shlex.quote(str(target))
    print(f"{target}{title}", *lines, sep="\n")
    if foreign is not None:
        print(f"next: python -m finetune validate {again}; in FP8: {FP8}")
    elif preset is not None:
        print(f"next: python -m finetune estimate {again} --gpu H100")
    else:
        print(f"run it: python -m finetune {again}")


def schema() -> None:
    """Print the JSON schema of recipes, for editors.

    Recipes name it in their first line (`yaml-language-server: $schema=...`).
    """
    from finetune.config.schema import RunConfig

    print(json.dumps(RunConfig.model_json_schema(), indent=1))


# ------------------------------------------------------------------------------------------- rows

TRAINED, CONTEXT, IMAGE = "bold green", "dim", "cyan"


def data(
    recipe: RecipeName,
    overrides: Overrides = None,
    show: Annotated[int, typer.Option(min=0, help="Rows to decode.")] = 3,
    html: Annotated[Path | None, typer.Option(help="Write the rows as an HTML page too.")] = None,
    as_json: AsJson = False,
) -> None:
    """Count rows and tokens, and show which ones are trained on."""
    from rich.console import Console

    from finetune.data.auto_length import load_recipe

    checked = load_recipe(recipe, overrides or ())
    console = output(stderr=as_json)
    with busy(console, f"loading libraries for {checked.name}"):
        from finetune.data.counting import counted_rows
        from finetune.logging import counting_rows
    with counting_rows(console, f"reading the rows of {checked.name}"):
        found = counted_rows(checked.config)
    each = found.ledger.answers
    shown: Any = found.prepared.select(range(min(show * each, len(found.prepared))))
    if as_json:
        keys = ("input_ids", "labels", "answer", "image_begins", "image_ends")
        rows = [{k: row[k] for k in keys if k in row} for row in shown]
        facts = {"description": found.rows.description, "notes": found.rows.notes}
        ledgers = {name: ledger.as_json() for name, ledger in found.ledgers.items()}
        print(json.dumps({**facts, **ledgers, "rows": rows}))
        return
    show_ledger(console, found, checked.config)
    if (planned := _schedule(checked.config, found)) is not None:
        _show_schedule(console, planned)
    page = Console(record=True, file=io.StringIO(), width=100)
    for index, row in enumerate(shown):
        part, beside = row.get("answer"), list[Text]()
        title = filter(None, (f"row {index // each + 1}", part, f"{len(row['input_ids'])} tokens"))
        title = f"\n{', '.join(title)}"
        if part == "prompt":  # every row of the file is one
            given = found.rows.first(show)[index].items()
            rest = ", ".join(f"{k}={v!r}" for k, v in given if k != "prompt")
            beside = [Text(f"beside it, for the rewards: {rest or 'nothing'}")]
        for target in (console, page):
            target.print(title, style="bold")
            # In a pipe there is no style to tell them by.
            bracketed = target is console and console.color_system is None
            target.print(_decoded(found.tokenizer, row, bracketed=bracketed), *beside, sep="\n")
    trained = "[[trained]]" if console.color_system is None else "trained"
    console.print(Text.assemble("\n", (trained, TRAINED), " ", ("context", CONTEXT)))
    if html is not None:
        failure = f"the page {str(html)!r} cannot be written"
        with writing(failure, where="--html", fix="choose a file in a folder that is there"):
            html.write_text(page.export_html(), encoding="utf-8")
        console.print(whole(f"page: {html}"), crop=False)


def show_ledger(console: Console, found: CountedRows, config: RunConfig) -> None:
    """Print what rows are, what is worth a warning, their counts, and what row lengths cost."""
    console.print(f"data: {found.rows.description}", highlight=False)
    for line in found.rows.notes:
        console.print(Text(f"! {line}", style="yellow"))
    for name, ledger in found.ledgers.items():
        for warns, line in ledger.lines("eval " if name == "eval" else ""):
            console.print(Text(f"! {line}", style="yellow") if warns else f"      {line}")
    if found.ledger.trained:
        _show_lengths(console, found, config)


def _show_lengths(console: Console, found: CountedRows, config: RunConfig) -> None:
    """Print how long rows are, and what is cut by some lengths; packed text is not cut."""
    from finetune.config.methods import method_of
    from finetune.config.train_keys import TrainerArguments
    from finetune.data.auto_length import uncut
    from finetune.data.ledger import SPLITTING

    lengths, method = found.lengths, method_of(config.train)
    if found.ledger.dropped and not method.is_text:  # TRL kept the rest alone
        lengths = uncut(config, sample=found.ledger.sampled is not None)
    (_, median), *more, (_, longest) = lengths.percentiles().items()
    ends = "".join(f", {share}% up to {tokens:,}" for share, tokens in more)
    console.print(f"      tokens of a row: median {median:,}{ends}, longest {longest:,}")
    strategy = TrainerArguments(found.args).packing_strategy
    if found.ledger.bins is None or strategy not in SPLITTING:
        costs = [*lengths.costs(config)]
        print_rows(console, costs, right=[*costs[0]][1:])


def _schedule(config: RunConfig, found: CountedRows) -> Schedule | None:
    """Steps of a run on these rows; None where only some of them were read."""
    from finetune.config.methods import method_of
    from finetune.config.train_keys import TrainerArguments
    from finetune.training.run.schedule import schedule_of

    ledger = found.ledger
    rows = ledger.rows - ledger.dropped if ledger.bins is None else ledger.bins
    known = None if ledger.sampled is not None else rows
    if known is None and TrainerArguments(found.args).max_steps <= 0:
        return None
    facts: Any = {"method": method_of(config.train), "length": ledger.max_length}
    return schedule_of(found.args, known, config.data.min_steps, **facts)


def _show_schedule(console: Console, planned: Schedule) -> None:
    console.print(f"      {planned.line}", highlight=False)
    if planned.lowered:
        console.print(f"      {planned.lowered}", highlight=False)
    if planned.few:
        console.print(f"! {planned.few}", style="yellow", highlight=False)


def _decoded(tokenizer: Any, row: dict[str, Any], *, bracketed: bool) -> Text:
    """The row as text, trained tokens in another style, or in brackets too.

    Spans are decoded together: a character may have several tokens. An image is one line for all
    of its tokens.
    """
    ids, text = row["input_ids"], Text()
    kinds: list[bool | str] = [label >= 0 for label in row["labels"]]
    places = zip(row.get("image_begins") or (), row.get("image_ends") or (), strict=True)
    for number, (begin, end) in enumerate(places, 1):
        kinds[begin:end] = [f"[image {number}: {plural(end - begin, 'token')}]"] * (end - begin)
    for trained, span in groupby(zip(kinds, ids, strict=False), key=lambda token: token[0]):
        if isinstance(trained, str):
            text.append(trained, style=IMAGE)
            continue
        part = tokenizer.decode([token for _, token in span])
        part = f"[[{part}]]" if trained and bracketed else part
        text.append(part, style=TRAINED if trained else CONTEXT)
    return text


def _rows(config: RunConfig) -> tuple[CountedRows | None, str]:
    """Rows of a recipe, counted; or the reason why they are not available here.

    What lies on the hub may be out of reach, and says nothing against a recipe.

    Raises:
        DataError, DataNotFoundError: what lies here cannot be trained on.
    """
    from finetune.config.sections import BUILTIN
    from finetune.data.counting import counted_rows

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
    from finetune.data.auto_length import load_recipe

    checked = load_recipe(recipe, overrides or ())
    with busy(output(stderr=True), f"checking {checked.name}"):
        from finetune.estimator.gate import bound_of, why_too_small
        from finetune.hardware.device import this_device
        from finetune.hardware.requirements import check_here, resolve
        from finetune.training.model import meta_model, resolve_attention
        from finetune.training.run.preflight import check_settings, check_sharding

        config, device = checked.config, this_device()
        check_sharding(config)
        model = meta_model(config)
        the_plan, resolution = check_settings(config, model), None
        need = bound_of(config, model, the_plan, device)
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
            {"name": x.name, "shape": x.shape, "compute": x.compute, "stored": x.stored,
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
    red = (f"; too small here: {short}" if short else "", "red")
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
