"""The errors a user of finetune can meet, all with the same four parts.

    FinetuneError
    ├── ConfigError            (ValueError)         a recipe, override or argument is wrong
    ├── UnknownArgumentError   (TypeError)          a setting that does not exist
    ├── RecipeNotFoundError    (FileNotFoundError)  no recipe of that name or path
    ├── DataError              (ValueError)         rows that cannot be trained on
    ├── DataNotFoundError      (FileNotFoundError)  no data file or hub data set there
    ├── ModelNotFoundError     (FileNotFoundError)  no model folder or hub model there
    ├── MissingExtraError      (ImportError)        an optional library is not installed
    ├── PrecisionError         (RuntimeError)       the precision asked for is not available here
    │   └── StorageNotComputeError                  FP8 compute asked of a quantized model
    ├── PlanError              (ValueError)         the precision plan cannot be honored
    ├── ConversionError        (RuntimeError)       the model does not equal its plan
    ├── OrderError             (RuntimeError)       helper and trainer called in the wrong order
    ├── ProofError             (RuntimeError)       the run is not what was asked: stopped
    ├── ParityError            (RuntimeError)       an export is not what was trained
    ├── NonFiniteError         (FloatingPointError) NaN or Inf in the loss, a gradient or a weight
    ├── CheckpointError        (OSError)            a checkpoint cannot be written
    ├── RunFailedError         (RuntimeError)       a run or a process of one ended early
    ├── UnfairPairError        (ValueError)         two runs that cannot be compared
    ├── RehearsalError         (RuntimeError)       the run cannot be rehearsed, so not estimated
    └── MemoryShortError       (MemoryError)        the run cannot fit this machine

Every message answers four questions: *what* is wrong, *where*, *why* it matters, and *what to
do*. Each class also inherits the standard-library class that it stands for, so that
`except ValueError` works.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import shlex
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any
from urllib.parse import unquote, urlsplit

_SPOKEN: list[Callable[[str], str]] = []


@contextlib.contextmanager
def speaking(form: Callable[[str], str]) -> Iterator[None]:
    """Write messages about settings in another form inside: as arguments, in a script."""
    _SPOKEN.append(form)
    try:
        yield
    finally:
        _SPOKEN.remove(form)


def in_words(text: str) -> str:
    """A message in the form in force; by default settings stand as in a recipe."""
    return _SPOKEN[-1](text) if _SPOKEN else text


class FinetuneError(Exception):
    """Base of all errors that the user can fix.

    Args:
        what: one sentence that says what is wrong.
        where: file and line, layer names, or the argument.
        why: the reason it is refused rather than carried on with.
        fix: what to type or change next.

    Attributes:
        more: errors of the same kind that were found with this one.
    """

    more: Sequence[FinetuneError] = ()

    def __init__(self, what: str, *, where: str = "", why: str = "", fix: str = "") -> None:
        what, where, why, fix = map(in_words, (what, where, why, fix))
        self.what, self.where, self.why, self.fix = what, where, why, fix
        parts = (("", what), ("where: ", where), ("why:   ", why), ("fix:   ", fix))
        super().__init__("\n  ".join(label + text for label, text in parts if text))

    def __reduce__(self) -> Any:  # errors cross from the processes that convert rows
        return partial(type(self), where=self.where, why=self.why, fix=self.fix), (self.what,)

    def __str__(self) -> str:  # KeyError and OSError would otherwise print only their repr or errno
        return str(self.args[0])


class ConfigError(FinetuneError, ValueError):
    """A recipe, an override or an argument is wrong."""


class UnknownArgumentError(FinetuneError, TypeError):
    """A setting that does not exist."""


class RecipeNotFoundError(FinetuneError, FileNotFoundError):
    """There is no recipe of that name or path."""


class DataError(FinetuneError, ValueError):
    """The rows cannot be trained on."""


class DataNotFoundError(FinetuneError, FileNotFoundError):
    """There is no data file or hub data set there."""


class ModelNotFoundError(FinetuneError, FileNotFoundError):
    """There is no model folder or hub model there."""


class MissingExtraError(FinetuneError, ImportError):
    """An optional library is not installed."""


class PrecisionError(FinetuneError, RuntimeError):
    """The precision asked for is not available on this device with this backend."""


class StorageNotComputeError(PrecisionError):
    """A model in quantized storage was handed to FP8 compute."""


class PlanError(FinetuneError, ValueError):
    """The precision plan cannot be honored on this model."""


class ConversionError(FinetuneError, RuntimeError):
    """After conversion the model does not equal its plan."""


class OrderError(FinetuneError, RuntimeError):
    """The helper and the trainer were called in an order that would train in BF16."""


class ProofError(FinetuneError, RuntimeError):
    """The first steps show that the run is not what was asked."""


class ParityError(FinetuneError, RuntimeError):
    """An exported model does not say what the run's model says."""


class NonFiniteError(FinetuneError, FloatingPointError):
    """The loss, a gradient or a weight is NaN or Inf; stopped before anything is saved."""


class CheckpointError(FinetuneError, OSError):
    """A checkpoint cannot be written; the run stops, and earlier ones are as they were."""


class RunFailedError(FinetuneError, RuntimeError):
    """A run of a comparison ended without a result; the comparison ends with it."""


class UnfairPairError(FinetuneError, ValueError):
    """Two runs differ in what they have to share: a comparison of them would mislead."""


class RehearsalError(FinetuneError, RuntimeError):
    """Code of the model does not run on tensors without memory: nothing is known of the run."""


class MemoryShortError(FinetuneError, MemoryError):
    """The run cannot fit this machine."""


REFUSED = (
    ConfigError,
    DataError,
    DataNotFoundError,
    ModelNotFoundError,
    PrecisionError,
    PlanError,
)
"""Errors on what a run is given, rather than on what happened in it."""


def raise_all(errors: Sequence[FinetuneError]) -> None:
    """Raise the first of several errors, the others with it (`more`); nothing where none is."""
    for first in errors[:1]:
        first.more = [*first.more, *errors[1:]]
        raise first


@contextlib.contextmanager
def writing(failure: str, *, where: str, fix: str) -> Iterator[None]:
    """Raise a `ConfigError` where the system refuses to make or write a file inside.

    Args:
        failure: what is said before the system's reason, `the page 'a.html' cannot be written`.
    """
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{failure}: {error.strerror}", where=where, fix=fix) from None


def install_hint(extra: str) -> str:
    """The command that installs an extra of this package, from where the package itself came.

    `pip install -e '.[te]'` in its clone; `pip install 'fp8-finetune[te]'` if it came from an
    index. Addresses of clones, folders and wheels are kept in `direct_url.json` (PEP 610).
    """
    from importlib import metadata  # email and zipfile with it: slow for what lists recipes

    name = f"fp8-finetune[{extra}]"
    try:
        came = metadata.distribution("fp8-finetune").read_text("direct_url.json")
        source = json.loads(came or "{}")
    except (metadata.PackageNotFoundError, OSError, ValueError):
        source = {}
    url = source.get("url", "")
    if source.get("dir_info", {}).get("editable"):
        folder = unquote(urlsplit(url).path)
        here = os.path.exists(folder) and os.path.samefile(folder, os.curdir)
        return f"pip install -e {shlex.quote(f'{os.curdir if here else folder}[{extra}]')}"
    if url.startswith("file:"):
        name += f" @ {url}"
    return f"pip install {shlex.quote(name)}"


def exited(end: SystemExit) -> RunFailedError:
    """The error for code of others that ends the process: exit 0 would say that it finished."""
    at = traceback.extract_tb(end.__traceback__)[-1]
    return RunFailedError(
        f"code outside of finetune ended the process by sys.exit({end.code or 0!r})",
        where=f"{at.filename}:{at.lineno}",
        why="nothing after it ran: no model is saved, and an exit code of 0 would say one was",
        fix="raise an error there instead, or return",
    )


def some(names: Sequence[str], shown: int = 6) -> str:
    """The first names of a list, for an error's `where`: `a, b and 3 more`; `none` of no names."""
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return (", ".join(names[:shown]) or "none") + more


def first_line(error: BaseException) -> str:
    """The first line of a library's message; the name of the error where it has none."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


CLOSE = 0.65
"""Least similarity of a guess: `early_stopping_patience` and `learning_rate` have 0.56."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The closest known word as the end of a sentence, `"; did you mean 'x'?"`, or nothing."""
    close = nearest(word, known)
    return f"; did you mean {close!r}?" if close else ""


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that is closest, None if none is close; the beginning of one is."""
    known = list(known)
    begun = [one for one in known if len(word) > 4 and one.startswith(word)]
    return next(iter(begun or difflib.get_close_matches(word, known, n=1, cutoff=CLOSE)), None)
