"""Reports: what they say, that every figure is linked, that text stays text, and their size."""

from __future__ import annotations

import json
import math
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pytest

import finetune
from finetune.analysis.compare.result import EMULATED, read_comparison
from finetune.analysis.report.comparison_page import comparison_page
from finetune.analysis.report.curves import curve, envelope, smoothed, window_of
from finetune.analysis.report.elements import Line, Num, Plot, Series, Source, escape_md
from finetune.analysis.report.figures import DARK, LIGHT, style, to_svg
from finetune.analysis.report.report import as_html
from finetune.cli.app import main
from finetune.errors import ConfigError
from tests.run_folders import GROUPS, make_comparison, make_run

TRAP = "<script>alert(1)</script> **bold** | [link](http://example.com) `code`"


class Links(HTMLParser):
    """Links of a page, and text with digits that stands outside of any link or source."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.hrefs: list[tuple[str, str]] = []
        self.bare: list[str] = []
        self.scripts = 0
        self._open: list[tuple[str, bool]] = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        sourced = "data-source" in found or tag in ("a", "svg", "style", "script", "title")
        self.scripts += tag == "script"
        if tag == "a":
            self.hrefs.append((found["href"], found.get("title", "")))
        if tag not in ("meta", "link", "br"):
            self._open.append((tag, sourced))

    def handle_endtag(self, tag):
        while self._open and self._open.pop()[0] != tag:
            pass

    def handle_data(self, data):
        sourced = any(sourced for _, sourced in self._open)
        if not sourced and any(word.strip("().,:;")[:1].isdigit() for word in data.split()):
            self.bare.append(data)


@pytest.fixture(scope="module")
def run(made_once):
    name = Path("tiny_full_fp8") / "20261121-120000-aaaa"
    samples = [{"prompt": TRAP, "answer": TRAP}]
    return made_once("run to report", lambda folder: make_run(folder / name, samples=samples))


@pytest.fixture(scope="module")
def reports(run, made_once):
    """A report of each kind, the folder of several and of a comparison with odd names."""

    def make(folder: Path) -> dict:
        other = make_run(folder / "tiny_full_bf16" / "b", recipe="tiny_full_bf16", seed=43)
        compared = make_comparison(folder / "a vs #b", steps=40)
        return {
            "one": finetune.report(run),
            "several": finetune.report([run, other], to=folder / "50% of <both>"),
            "comparison": finetune.report(compared),
        }

    return made_once("reports of each kind", make)


# ------------------------------------------------------------------------------------------ links

KINDS = ("one", "several", "comparison")


@pytest.mark.parametrize("kind", KINDS)
def test_every_figure_links_to_a_file_and_key(reports, kind):
    report = reports[kind]
    links = Links(report.html.read_text("utf-8"))
    assert links.bare == []
    assert len(links.hrefs) > 30
    for href, title in links.hrefs:
        file = report.folder / unquote(href)
        assert file.exists(), href
        assert file.is_dir() or title.startswith(f"{file.name}: "), (href, title)


def test_a_linked_figure_is_the_one_in_the_file(reports, run):
    page = reports["one"].html.read_text("utf-8")
    stored = json.loads((run / "report.json").read_text())
    share = 'title="receipt.json: fp8_flop_share">80.0%</a>'
    assert share in page
    assert f'title="metrics.jsonl: loss at step 80">{stored["final_loss"]:.4f}</a>' in page
    assert 'href="report.json" title="report.json: tokens_per_s">1,312</a>' in page


@pytest.mark.parametrize("kind", KINDS)
def test_markdown_says_the_same_and_shows_the_pictures(reports, kind):
    report = reports[kind]
    text = report.markdown.read_text("utf-8")
    assert text.startswith("# ")
    assert report.verdict in text
    for picture in report.pictures:
        assert f"]({picture.name})" in text
        assert picture.read_bytes().startswith(b"\x89PNG")
    assert (report.folder / "loss.png") in report.pictures


def test_verdicts(reports, tmp_path):
    assert reports["one"].verdict == "FP8, proven"
    assert reports["several"].verdict == "All proven"
    assert reports["comparison"].verdict == "Equivalent"
    difference = {"condition": "optimizer", "a": "adamw_torch", "b": "sgd", "why": "other update"}
    worse = finetune.report(
        make_comparison(tmp_path / "c", steps=40, gap=0.03, differences=(difference,))
    )
    assert worse.verdict == "Not equivalent"
    page = worse.html.read_text("utf-8")
    assert page.index("optimizer") < page.index("Do they train the same?")


@pytest.mark.slow
def test_speeds_of_an_emulation_say_so(tmp_path):
    folder = make_comparison(tmp_path / "c", steps=8)
    found = read_comparison(folder)
    assert "emulated, no claim" not in as_html(comparison_page(found, Source(folder, folder)))
    found.notes.append(EMULATED)
    page = as_html(comparison_page(found, Source(folder, folder)))
    assert "emulated, no claim" in page
    cost = page.partition("<h2>Speed and memory</h2>")[2].partition("</section>")[0]
    assert EMULATED in cost
    a, b = (finetune.report(folder / run) for run in (found.runs[0].a, found.runs[0].b))
    assert "not the speed of FP8" in a.html.read_text("utf-8")
    assert "not the speed of FP8" not in b.html.read_text("utf-8")


def _spoil(run: Path, **precision: str) -> None:
    receipt = json.loads((run / "receipt.json").read_text())
    receipt["precision"] |= precision
    (run / "receipt.json").write_text(json.dumps(receipt))


def test_bf16_where_fp8_was_asked_is_said_loudly(tmp_path):
    run = make_run(tmp_path / "r", steps=8, groups=())
    _spoil(run, ran="bf16", fallback="no FP8 here: trains in BF16")
    report = finetune.report(run)
    assert report.verdict == "Not FP8"
    assert '<div class="verdict bad">' in report.html.read_text("utf-8")
    assert "no FP8 here: trains in BF16" in report.markdown.read_text("utf-8")


def test_a_run_that_goes_on_and_one_that_diverged_have_a_report(tmp_path):
    run = make_run(tmp_path / "r", steps=8, groups=())
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "loss": NaN}\n{"step": 10, "loss": Infinity}\n{"step": 1')
    for name in ("receipt.json", "report.json", "steps.jsonl"):
        (run / name).unlink()
    report = finetune.report(run)
    assert report.verdict == "Not proven"
    assert "loss is not finite at" in report.html.read_text("utf-8")
    (run / "metrics.jsonl").write_text("")
    assert finetune.report(run).pictures == ()


# ----------------------------------------------------------------------------------- text is text


def test_text_of_a_model_is_never_markup(reports):
    page = reports["one"].html.read_text("utf-8")
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt; **bold**" in page
    assert Links(page).scripts == 1
    text = reports["one"].markdown.read_text("utf-8")
    assert "<script" not in text
    assert "[link](http" not in text
    assert "**bold" not in text
    for line in text.splitlines():
        if line.startswith("|"):
            assert line.endswith("|")


@pytest.mark.parametrize(
    ("text", "shown"),
    [("a_b*c*", r"a\_b\*c\*"), ("1. one", r"1\. one"), ("- x", r"\- x"), ("0.5", "0.5"),
     ("a\n\nb", "a<br>b"), ("# head", r"\# head"), ("<b>&", "&lt;b&gt;&amp;")],
)  # fmt: skip
def test_markdown_is_escaped(text, shown):
    assert escape_md(text) == shown


def test_a_figure_in_a_sentence_keeps_its_link():
    line = Line(("of ", Num("63.0%", "a b.json".replace(" ", "%20"), 'x"y')))
    assert line.md == "of [63.0%](a%20b.json)"
    assert 'title="a%20b.json: x&quot;y"' in line.__html__()


def test_the_page_allows_its_own_script_only(reports):
    page = reports["one"].html.read_text("utf-8")
    assert "default-src 'none'" in page
    assert "script-src 'sha256-" in page
    assert " src=" not in page
    assert "@import" not in page
    assert "url(http" not in page


def test_a_notebook_shows_the_page_in_a_frame(reports):
    shown = reports["one"]._repr_html_()
    assert shown.startswith('<iframe srcdoc="')
    assert "<script" not in shown


# ----------------------------------------------------------------------------- series, theme, size


@pytest.mark.parametrize(("low", "high"), [(0.001, 0.0052), (1e-8, 1e-3), (0.0001, 0.0009)])
@pytest.mark.parametrize("log", [False, True])
def test_the_figures_of_an_axis_are_told_apart(low, high, log):
    """Thinning the drawing's coordinates leaves its text alone, and no two ticks read the same."""
    series = Series("one", np.arange(20.0).tolist(), np.geomspace(low, high, 20).tolist())
    svg = to_svg(Plot("p", "Plot", "", "a plot", (series,), log=log), 310, 215)
    ticks = re.findall(r'<g id="p-ytick_\d+">.*?<text[^>]*>([^<]*)</text>', svg, flags=re.S)
    assert 2 <= len(ticks) <= 9
    assert len(set(ticks)) == len(ticks), ticks


def test_a_thinned_series_keeps_every_extreme():
    rng = np.random.default_rng(0)
    x, y = np.arange(10_000.0), rng.normal(size=10_000)
    y[1234], y[7001] = 50, -50
    tx, ty = envelope(x, y, 300)
    assert len(ty) <= 602
    assert (ty.max(), ty.min()) == (50, -50)
    assert (tx[0], tx[-1]) == (0, 9999)
    assert all(y[int(step)] == value for step, value in zip(tx, ty, strict=True))
    for part in np.array_split(np.arange(10_000), 300):
        inside = ty[(tx >= part[0]) & (tx <= part[-1])]
        assert (inside.min(), inside.max()) == (y[part].min(), y[part].max())


def test_smoothing_is_a_mean_and_splitting_tells_what_is_not_finite():
    y = np.arange(200.0)
    assert window_of(200) == 5
    assert smoothed(y, 5)[2:-2] == pytest.approx(y[2:-2])
    assert smoothed(y, 1) is y
    values = (1.0, math.nan, math.inf)
    x, finite, broken = curve([{"step": i, "loss": v} for i, v in enumerate(values)], "loss")
    assert (x.tolist(), finite.tolist(), broken) == ([0.0], [1.0], (1.0, 2.0))


def _contrast(one: str, other: str) -> float:
    """Of two colours, after WCAG 2.2."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_colours_are_readable_in_both_themes(theme):
    for name in ("ink", "muted", "accent", "bad"):
        assert _contrast(theme[name], theme["paper"]) >= 4.5, name
    for name in (f"c{i}" for i in range(1, 9)):
        assert _contrast(theme[name], theme["paper"]) >= 3, name
    assert LIGHT.keys() == DARK.keys()
    assert len(set(LIGHT.values())) == len(LIGHT), "a colour stands for one variable"


def test_forty_series_look_different():
    assert len({tuple(style(i).items()) for i in range(40)}) == 40


@pytest.mark.long
@pytest.mark.slow  # draws 10,000 steps of 24 health curves
def test_ten_thousand_steps_make_less_than_two_megabytes(tmp_path):
    report = finetune.report(make_run(tmp_path / "long", steps=10_000, groups=GROUPS))
    assert report.html.stat().st_size < 1_000_000
    assert "10,000 points drawn as the lowest and highest of every 34" in report.html.read_text()


# ----------------------------------------------------------------------------------- command line


@pytest.fixture
def cli(tmp_path, monkeypatch, capsys):
    """A function that runs a command line in this process, in `tmp_path`: code, out, err."""
    monkeypatch.chdir(tmp_path)

    def run(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["finetune", *map(str, words)])
        code = 0
        try:
            main()
        except SystemExit as error:
            code = int(error.code or 0)
        return code, *capsys.readouterr()

    return run


@pytest.mark.slow
def test_the_last_run_is_reported_twice(cli, tmp_path):
    make_run(tmp_path / "runs" / "tiny_full_fp8" / "20261120-120000-aaaa", steps=8, groups=())
    last = make_run(
        tmp_path / "runs" / "tiny_full_fp8" / "20261121-120000-bbbb", steps=8, groups=()
    )
    code, out, _ = cli("report", "last", "--json")
    assert code == 0
    told = json.loads(out)
    assert Path(told["html"]).resolve() == last / "report.html"
    assert cli("report", last)[0] == 0
    assert "20261121-120000-bbbb" in cli("report", "tiny_full_fp8")[1]
    assert json.loads(out)["verdict"] == "FP8, proven"


def test_mistakes_are_told(cli, tmp_path, run):
    code, _, err = cli("report", "last")
    assert (code, "there is no run in runs/" in err or "no folder of runs" in err) == (2, True)
    code, _, err = cli("report", "nowhere/at/all")
    assert (code, "is no run folder" in err) == (2, True)
    (tmp_path / "file").write_text("")
    code, _, err = cli("report", run, "--to", "file")
    assert (code, "cannot be written" in err) == (2, True)
    assert cli("report")[0] == 2
    compared = make_comparison(tmp_path / "c", steps=8)
    with pytest.raises(ConfigError, match="reported alone"):
        finetune.report([compared, run])
