"""The command line: `python -m finetune RECIPE [section.key=value ...]` and its verbs.

Only the module of the verb that was typed is imported, and listing imports neither torch nor
transformers. A mistake of the user's prints what, where, why and what to do, and exits with 2.
"""

from __future__ import annotations

import errno
import functools
import importlib
import os
import re
import sys
import traceback
from keyword import iskeyword
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from finetune import __version__
from finetune.cli import INTERRUPTED, MISUSE
from finetune.config.paths import is_path, list_recipes
from finetune.errors import ConfigError, FinetuneError, RecipeNotFoundError, did_you_mean, exited
from finetune.logging import fit_streams, output, quiet_libraries

# Click's own errors of usage; newer typers carry a click of their own inside.
_USAGE_ERRORS: Any = tuple(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")


VERBS = {
    "Train": {
        "run": ("train", "Train a recipe (the verb may be left out)."),
        "resume": ("train", "Resume a run from its newest complete checkpoint."),
        "checkpoints": ("runs", "List a run's checkpoints: step, loss, size, complete or damaged."),
        "watch": ("watch", "Follow a run from another terminal: loss, speed, health, time left."),
        "ls": ("listing", "List recipes, runs (--runs) or model families (--models)."),
        "cp": ("recipes", "Copy a recipe to edit it, with --preset for one end."),
        "cat": ("recipes", "Print a recipe, with --resolved complete."),
        "import": ("runs", "Take over another trainer's weights (`latest.pt`) as a model folder."),
        "schema": ("recipes", "Print the JSON schema of recipes, for editors."),
    },
    "Plan": {
        "data": ("recipes", "Count rows and tokens, and show which ones are trained on."),
        "validate": (
            "recipes",
            "Check a recipe and its rows, show each layer's precision; loads no weights.",
        ),
        "estimate": ("estimate", "Predict memory and speed, on a GPU that need not be here."),
        "doctor": ("analysis", "Show what this machine can do in FP8, and why."),
    },
    "Understand": {
        "diagnose": ("analysis", "Show what runs in FP8, where the time goes, and why."),
        "compare": ("analysis", "Train FP8 and BF16: do they end the same, and is it faster?"),
        "benchmark": ("analysis", "Measure speed and memory: random weights, synthetic tokens."),
        "evaluate": (
            "train",
            "Score a run on lm-eval tasks or held-out rows, and keep it.",
        ),
    },
    "Share": {
        "chat": ("train", "Talk with a trained model, or answer prompts."),
        "generate": ("train", "Talk with a trained model, or answer prompts."),
        "serve": (
            "train",
            "Serve a run or an export by `transformers serve`, over OpenAI's protocol.",
        ),
        "report": ("analysis", "Write one page about runs: HTML, plots."),
        "export": ("runs", "Export weights, checked: adapter, merged, FP8, NVFP4, GGUF."),
    },
}
"""Heading of the help -> verb -> file in this folder with a function of the verb's name, and its
line of the help: the first of the function's docstring."""
NO_LIBRARIES = {"checkpoints", "watch", "ls", "cp", "cat", "schema", "doctor"}
"""Verbs that need no torch, and the one that shows all versions."""
MODULES = {verb: module for verbs in VERBS.values() for verb, (module, _) in verbs.items()}


@functools.cache
def command_of(verb: str) -> Any:
    """The command of a verb, whose module is imported now."""
    module = importlib.import_module(f"finetune.cli.{MODULES[verb]}")
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(verb)(getattr(module, f"{verb}_" if iskeyword(verb) else verb))
    return typer.main.get_command(app)


class _RecipeOrVerb(TyperGroup):
    """A first word that is no verb is a recipe: `finetune X` is `finetune run X`."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(MODULES)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return command_of(cmd_name) if cmd_name in MODULES else None

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for heading, verbs in VERBS.items():
            with formatter.section(heading):
                formatter.write_dl([(name, line) for name, (_, line) in verbs.items()])

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:
        first = next((i for i, arg in enumerate(args) if not arg.startswith("-")), None)
        if first is not None and args[first] not in MODULES:
            word = args[first]
            is_a_file = is_path(word) or os.path.isdir(word)
            if first == 0 and not is_a_file and word not in list_recipes():
                raise RecipeNotFoundError(
                    f"there is no recipe or verb {word!r}"
                    + did_you_mean(word, [*MODULES, *list_recipes()]),
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
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Entry point of `python -m finetune` and of the console script."""
    quiet_libraries()
    fit_streams()
    code = None
    try:
        _check_versions(sys.argv[1:2])
        code = app(standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except (Exception, SystemExit) as error:
        if (found := _of_user(error)) is None:
            raise
        _show_error(found)
        sys.exit(MISUSE)
    if code == INTERRUPTED:  # newer typers catch Ctrl-C and return it
        output(stderr=True).print("interrupted")
        sys.exit(INTERRUPTED)


def _of_user(error: Any) -> FinetuneError | None:
    """The error that the user can fix; None for a fault of ours or a library's."""
    if isinstance(error, FinetuneError):
        return error
    if isinstance(error, SystemExit):
        return None if error.code else exited(error)  # ours have one
    if isinstance(error, OSError):
        return _of_file(error)
    if isinstance(error, _USAGE_ERRORS):
        return _as_setting(error) or _of_usage(error)
    return _of_environment(error)


def _of_environment(error: BaseException) -> ConfigError | None:
    """The error for a variable whose value a library cannot use when it is imported; else None.

    Libraries convert variables in their first lines, and say what they met, not in which of them.
    """
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    codes = [f.f_code for f, _ in traceback.walk_tb(error.__traceback__)]
    imports = any(code.co_name == "<module>" for code in codes)
    names = [name for name, value in os.environ.items() if value and repr(value) in str(error)]
    if not names or not imports:
        return None
    return ConfigError(
        f"a library cannot use {', '.join(names)} of the environment",
        why=f"{type(error).__name__}: {error}",
        fix=f"{' '.join(f'env -u {name}' for name in names)} python -m finetune ..., or another "
        "value",
    )


def _check_versions(verb: list[str]) -> None:
    """Say what is not tested, and refuse what is too old, before a verb imports the libraries.

    Raises:
        ConfigError: see `finetune.hardware.versions.check`.
    """
    if verb and verb[0] not in NO_LIBRARIES and not verb[0].startswith("-"):
        from finetune.hardware.versions import check

        trains = MODULES.get(verb[0], "train") == "train" and os.environ.get("RANK", "0") == "0"
        console = output(stderr=True, quiet=not trains)
        for line in check():
            console.print(f"! {line}", style="yellow")


def _of_usage(error: Any) -> ConfigError:
    """The error for words that a verb does not take: click's, with what to type instead."""
    said = error.format_message().replace("Value error, ", "").rstrip(".")  # pydantic's
    if error.ctx is None:  # of an option without its value click does not say whose it is
        fix = "python -m finetune --help lists the verbs, and a verb's own --help its options"
        return ConfigError(said, fix=fix)
    given, *choices = re.findall(r"'([^']*)'", error.message) or [""]
    fixes = ["leave it out, or quote a value with spaces"] if "extra argument" in said else []
    fixes = list(getattr(error, "possibilities", None) or fixes)
    if about := getattr(getattr(error, "param", None), "help", None):
        name = next(iter(re.findall(r"'([^']*)'", said)), "it")  # of the option or argument
        fixes = [f"{name}: {about.rstrip('.')}"]
    return ConfigError(
        said + did_you_mean(given, choices),
        where=" ".join(error.ctx.get_usage().split()).removeprefix("Usage: "),
        fix="; ".join((*fixes, f"{error.ctx.command_path} --help lists what it takes")),
    )


def _as_setting(error: Any) -> ConfigError | None:
    """The error for `--max_steps 30`, as scripts of Transformers take settings; else None."""
    from finetune.config.methods import METHODS, arguments
    from finetune.config.train_section import OWNED_BY_US, elsewhere

    option = getattr(error, "option_name", "")
    takes_settings = error.ctx and "overrides" in {p.name for p in error.ctx.command.params}
    if not option.startswith("--") or not takes_settings or error.possibilities:
        return None
    words = " ".join(sys.argv[1:]).partition(option)[2].replace("=", " ", 1).split()
    value = words[0] if words and not words[0].startswith("--") else "..."
    key = option[2:].replace("-", "_")
    fix = f"write {key}={value}" if "." in key else elsewhere(key, value)
    if key in OWNED_BY_US:
        fix = f"leave it out: {OWNED_BY_US[key]}"
    return ConfigError(
        f"there is no option {option!r}"
        + did_you_mean(key, () if fix else arguments(METHODS["sft"])),
        why="a setting of a recipe is given as section.key=value",
        fix="; ".join(filter(None, (fix, "--help lists the options"))),
    )


def _of_file(error: OSError) -> ConfigError | None:
    """The error for a file or folder that the system does not let us use; else None."""
    if error.filename is None:
        full = ConfigError("the disk that the output goes to is full", fix="make room on it")
        return full if error.errno == errno.ENOSPC else None
    return ConfigError(
        f"{os.path.basename(str(error.filename)) or error.filename}: {error.strerror}",
        where=str(error.filename),
        why=f"the system refused to open, list or write it ({type(error).__name__})",
        fix="check that it is there, is of the right kind, and that you may read and write it",
    )


def _show_error(error: FinetuneError) -> None:
    from rich.text import Text

    from finetune.config.secrets import scrubbed
    from finetune.logging import safe_console

    console = safe_console(stderr=True, highlight=False, soft_wrap=True)
    console.print(Text("error: ", style="bold red") + Text(scrubbed(error.what), style="bold"))
    for label, text in (("where", error.where), ("why", error.why), ("fix", error.fix)):
        if text:
            console.print(Text(f"  {label + ':':7s}", style="cyan") + Text(scrubbed(text)))
    for other in error.more:
        _show_error(other)


ALONE = ("evaluate", "export", "report")
"""Verbs that write what several processes would write over each other."""
TRAIN = ("run", "resume", "diagnose")
"""Verbs that `torchrun` may start several times."""
TRAIN_ALONE = ("data", "validate", "compare", "benchmark")
"""Verbs that read a run's settings as it does, or start the runs themselves."""


def _check_launch(verb: str | None) -> None:
    """Reject variables of a launcher by which a verb would wait for processes that are not there.

    Accelerate reads them as soon as the settings of a trainer are built.

    Raises:
        ConfigError: several processes of a verb that is one, or one of several that are missing.
    """
    if verb in (*TRAIN, *TRAIN_ALONE):
        from finetune.hardware.device import refuse_lone_process

        refuse_lone_process(f"-m finetune {verb} ...", several=verb in TRAIN)
    count = os.environ.get("WORLD_SIZE", "1")
    if verb in ALONE and count.isdigit() and int(count) > 1:
        raise ConfigError(
            f"{verb} was started as {count} processes",
            where=f"WORLD_SIZE={count}",
            why="each would do all of it, and write the same files",
            fix=f"python -m finetune {verb} ..., without torchrun or accelerate launch; where a "
            "scheduler sets WORLD_SIZE, take it out of the environment (env -u WORLD_SIZE)",
        )


@app.callback(invoke_without_command=True)
def _start(
    ctx: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Fine-tune Hugging Face models in FP8. FP8 that cannot run is an error, never silent BF16."""
    if version:
        print(f"finetune {__version__}")
        raise typer.Exit
    _check_launch(ctx.invoked_subcommand)
    if ctx.invoked_subcommand is None:
        print(ctx.get_help())
        print("\nStart here: python -m finetune tiny_lora_fp8\nRecipes:    python -m finetune ls")
