"""Verb `data`: the rows of a recipe as the model will see them, and their ledger."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from finetune.cli import AsJson, Overrides, RecipeName
from finetune.errors import writing
from finetune.logging import busy, output, whole

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from finetune.data.ledger import CountedRows

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

    from finetune.config.recipe import load_recipe

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
    show_ledger(console, found)
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


def show_ledger(console: Console, found: CountedRows) -> None:
    """Print what rows are, what is worth a warning, and their counts."""
    from rich.text import Text

    console.print(f"data: {found.rows.description}", highlight=False)
    for line in found.rows.notes:
        console.print(Text(f"! {line}", style="yellow"))
    for warns, line in found.ledger.lines():
        console.print(Text(f"! {line}", style="yellow") if warns else f"      {line}")


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
