"""`write_report`: write `report.html` and `plots/` from run folders.

A template for each kind of page (`run.j2`, `several.j2`, `comparison.j2`) sets its sentences;
`blocks.j2` has the tables, plots and sections, `page.html.j2` the frame.

The HTML is one file that can fetch nothing: its content security policy allows its own style and
script (by hash) alone, so that text of a model could not run even if it slipped past the escaping.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import html
import re
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from finetune import __version__
from finetune.analysis.benchmark.matrix import read_benchmark
from finetune.analysis.benchmark.result import BENCHMARK
from finetune.analysis.compare.result import read_comparison
from finetune.analysis.report.comparison_page import comparison_page
from finetune.analysis.report.elements import Page, PageSource
from finetune.analysis.report.figures import DARK, LIGHT, TEMPLATES, save_picture, svgs
from finetune.analysis.report.run_page import benchmark_page, names_of, page_of
from finetune.analysis.report.run_source import RunSource
from finetune.config.paths import user_path
from finetune.errors import ConfigError, writing
from finetune.precision.proof.row import changed_numbers, still_line
from finetune.runs.folder import COMPARISON
from finetune.runs.last_model import MODEL
from finetune.runs.lookup import LAST, find_comparisons, find_run, find_runs, read_run
from finetune.units import count, percent, size_of_gib


@dataclass(frozen=True)
class Report:
    """A written report. A notebook displays it.

    Attributes:
        html: the page.
        pictures: plots, in `plots/`.
        verdict: headline of the page.
    """

    folder: Path
    html: Path
    pictures: tuple[Path, ...]
    verdict: str

    def facts(self) -> dict[str, Any]:
        return {
            "html": str(self.html),
            "pictures": [str(picture) for picture in self.pictures],
            "verdict": self.verdict,
        }

    def _repr_html_(self) -> str:
        """The page in an iframe, so that the notebook's style does not apply to it."""
        page = html.escape(self.html.read_text("utf-8"))
        return (
            f'<iframe srcdoc="{page}" title="report" loading="lazy" style="width:100%;height:44rem;'
            f'border:1px solid #8884;border-radius:6px"></iframe><p><small>'
            f"{html.escape(str(self.html))}"
            "</small></p>"
        )


def write_report(
    folders: Sequence[Path | str] | Path | str, to: Path | str | None = None
) -> Report:
    """Write the report of a run, of several runs, of a comparison, or of a benchmark.

    Args:
        folders: run folders, one folder of a comparison or benchmark, a recipe's name for its
            newest run in `runs/`, or `last` for the newest of all.
        to: output folder; default: the folder of the one run or comparison, or
            `runs/reports/<time>/` for several.

    Raises:
        ConfigError: no run in a folder, or the output cannot be written.
    """
    given = [folders] if isinstance(folders, (str, Path)) else list(folders)
    # A run that is named twice is one run.
    paths = list({path.resolve(): path for path in map(_meant, given)}.values())
    if not paths:
        raise ConfigError("a report needs a run", fix="python -m finetune report last")
    compared = [path for path in paths if (path / COMPARISON).is_file()]
    if compared and len(paths) > 1:
        raise ConfigError(
            "a comparison is reported alone",
            where=str(compared[0]),
            fix="give its folder only, or the run folders inside it",
        )
    stamp = time.strftime("%Y%m%d-%H%M%S")
    home = paths[0] if len(paths) == 1 else Path("runs") / "reports" / stamp
    base = user_path(home if to is None else to)
    if (paths[0] / BENCHMARK).is_file() and len(paths) == 1:
        found = read_benchmark(paths[0] / BENCHMARK)
        page = benchmark_page(found, PageSource(paths[0], base))
    elif compared:
        page = comparison_page(read_comparison(compared[0]), PageSource(compared[0], base))
    else:
        runs = [read_run(path) for path in paths]
        named = zip(names_of(runs), runs, strict=True)
        page = page_of([RunSource(run.folder, base, name) for name, run in named])
    where, fix = str(base.absolute()), "choose another folder with --to"
    with writing("the report cannot be written", where=where, fix=fix), warnings.catch_warnings():
        # Letters that matplotlib's own font lacks are boxes in pictures; the page has them.
        warnings.filterwarnings("ignore", "Glyph")
        pictures = {base / "plots" / f"{plot.name}.png": plot for plot in page.plots}
        (base / "plots" if pictures else base).mkdir(parents=True, exist_ok=True)
        for file, plot in pictures.items():
            save_picture(plot, file)
        (base / "report.html").write_text(as_html(page), encoding="utf-8")
    return Report(base, base / "report.html", tuple(pictures), page.verdict.text)


report = write_report
"""Name in the package: `finetune.report(...)`."""


def _meant(one: Path | str) -> Path:
    path = user_path(one)
    if str(one) != LAST:
        # A folder that is there is meant as it is; else a word is a recipe's name.
        by_name = len(path.parts) == 1 and not path.exists()
        return find_run(str(one), holding=MODEL) if by_name else path
    newest: list[tuple[float, Path]] = [
        ((folder / COMPARISON).stat().st_mtime, folder) for folder in find_comparisons()[:1]
    ]
    newest += [(run.started, run.folder) for run in find_runs()[:1]]
    return max(newest)[1] if newest else find_run(LAST)


# --------------------------------------------------------------------------------------- rendering


def as_html(page: Page) -> str:
    """Render the page, with its plots."""
    script = (TEMPLATES / "page.js").read_text("utf-8").strip()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    themes = {
        theme: "".join(f"--{name}:{value};" for name, value in colors.items())
        for theme, colors in (("light", LIGHT), ("dark", DARK))
    }
    environment = _environment()
    body = environment.get_template(page.template).render(page=page, **page.parts)
    return environment.get_template("page.html.j2").render(
        page=page,
        body=Markup(body),
        style=(TEMPLATES / "page.css").read_text("utf-8"),
        script=script,
        digest=digest,
        themes=themes,
        made=time.strftime("%Y-%m-%d %H:%M"),
        version=__version__,
    )


@functools.cache  # to read templates takes most of a page without plots
def _environment() -> Environment:
    """Templates of pages, which escape whatever is no markup."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["line"] = lambda text: Markup(" ".join(text.split()))
    environment.filters["anchor"] = lambda text: re.sub(r"\W+", "-", text.lower()).strip("-")
    forms = (changed_numbers, still_line, count, percent, size_of_gib)
    environment.globals.update({form.__name__: form for form in forms}, draw=svgs)
    return environment
