"""The command line: `python -m finetune RECIPE [section.key=value ...]` and its verbs.

Listing imports neither torch nor transformers. A mistake of the user's prints what, where, why and
what to do, and exits with 2.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperGroup

from finetune import __version__
from finetune.cli import INTERRUPTED, MISUSE, analysis, recipes, runs, train
from finetune.cli.data import data
from finetune.cli.estimate import estimate
from finetune.config.recipe import is_path, list_recipes
from finetune.config.section import is_text
from finetune.errors import ConfigError, FinetuneError, RecipeNotFoundError, did_you_mean
from finetune.logging import output, quiet_libraries

# Click's own errors of usage; newer typers carry a click of their own inside.
_USAGE_ERRORS: Any = tuple(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")


VERBS: dict[str, dict[str, Callable[..., None]]] = {
    "Train": {
        "run": train.run,
        "resume": train.resume,
        "checkpoints": runs.checkpoints,
        "ls": recipes.ls,
        "cp": recipes.cp,
        "cat": recipes.cat,
        "schema": recipes.schema,
    },
    "Plan": {
        "data": data,
        "validate": recipes.validate,
        "estimate": estimate,
        "doctor": analysis.doctor,
    },
    "Understand": {
        "diagnose": analysis.diagnose,
        "compare": analysis.compare,
        "benchmark": analysis.benchmark,
        "evaluate": train.evaluate,
    },
    "Share": {
        "generate": train.generate,
        "report": analysis.report,
        "export": runs.export,
    },
}
"""Heading of the help -> verb -> its function, whose docstring's first line is that of the help."""


def _first_line(verb: Callable[..., None]) -> str:
    return str(verb.__doc__).splitlines()[0]


class _RecipeOrVerb(TyperGroup):
    """A first word that is no verb is a recipe: `finetune X` is `finetune run X`."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for heading, verbs in VERBS.items():
            with formatter.section(heading):
                formatter.write_dl([(name, _first_line(verb)) for name, verb in verbs.items()])

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:
        first = next((i for i, arg in enumerate(args) if not arg.startswith("-")), None)
        if first is not None and args[first] not in self.commands:
            word = args[first]
            if first == 0 and not is_path(word) and word not in list_recipes():
                raise RecipeNotFoundError(
                    f"there is no recipe or verb {word!r}"
                    + did_you_mean(word, [*self.commands, *list_recipes()]),
                    fix="`python -m finetune ls` lists the recipes, --help the verbs; a path to a "
                    "YAML file works too",
                )
            args = ["run", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_RecipeOrVerb,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=False,
)


def main() -> None:
    """Entry point of `python -m finetune` and of the console script."""
    quiet_libraries()
    code = None
    try:
        _check_words(sys.argv[1:])
        code = app(standalone_mode=False)
    except FinetuneError as error:
        _show_error(error)
        sys.exit(MISUSE)
    except OSError as error:
        if error.filename is None:  # of no file: a fault of ours or of a library
            raise
        _show_error(_of_file(error))
        sys.exit(MISUSE)
    except _USAGE_ERRORS as error:
        error.show()
        sys.exit(MISUSE)
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    if code == INTERRUPTED:  # newer typers catch Ctrl-C and return it
        output(stderr=True).print("interrupted")
        sys.exit(INTERRUPTED)


def _check_words(words: list[str]) -> None:
    """Reject arguments that are no text: no file, recipe or setting can have such a name.

    Raises:
        ConfigError: an argument has a NUL, or bytes that are not UTF-8.
    """
    for word in words:
        if not is_text(word):
            raise ConfigError(
                "an argument is not UTF-8 text",
                where=ascii(word),
                why="it has a NUL, or bytes of another encoding",
                fix="type it again; a file whose name is not UTF-8 has to be renamed",
            )


def _of_file(error: OSError) -> ConfigError:
    """The error for a file or folder that the system does not let us use."""
    return ConfigError(
        f"{os.path.basename(str(error.filename)) or error.filename}: {error.strerror}",
        where=str(error.filename),
        why=f"the system refused to open, list or write it ({type(error).__name__})",
        fix="check that it is there, is of the right kind, and that you may read and write it",
    )


def _show_error(error: FinetuneError) -> None:
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(Text("error: ", style="bold red") + Text(error.what, style="bold"))
    for label, text in (("where", error.where), ("why", error.why), ("fix", error.fix)):
        if text:
            console.print(Text(f"  {label + ':':7s}", style="cyan") + Text(text))


@app.callback(invoke_without_command=True)
def _start(
    ctx: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """FP8 fine-tuning: FP8 asked is FP8 given, proven, or an error."""
    if version:
        print(f"finetune {__version__}")
        raise typer.Exit
    if ctx.invoked_subcommand is None:
        print(ctx.get_help())
        print("\nStart here: python -m finetune tiny_lora_fp8\nRecipes:    python -m finetune ls")


for verbs in VERBS.values():
    for name, verb in verbs.items():
        app.command(name)(verb)
