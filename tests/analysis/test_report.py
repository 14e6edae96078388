"""Reports: what they say, that every figure is linked, that text stays text, and their size."""

from __future__ import annotations

import base64
import importlib
import json
import re
import shutil
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

import finetune
from finetune.analysis.compare.result import EMULATED, read_comparison
from finetune.analysis.report import figures
from finetune.analysis.report.comparison_page import comparison_page
from finetune.analysis.report.curves import curve
from finetune.analysis.report.elements import Line, Num, PageSource
from finetune.analysis.report.report import as_html
from finetune.analysis.report.run_page import names_of, page_of
from finetune.analysis.report.run_source import RunSource
from finetune.cli.app import main
from finetune.errors import ConfigError, MissingExtraError, install_hint
from finetune.runs.folder import RunFolder
from finetune.runs.receipt import Receipt
from tests.conftest import slow_but
from tests.run_folders import make_comparison, make_run

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


@pytest.fixture
def unplotted(monkeypatch):
    """Pages without plots, which take most of their time, for tests of what else stands there."""
    monkeypatch.setattr(sys.modules[as_html.__module__], "save_picture", lambda *_: None)
    monkeypatch.setattr(figures, "SIZES", {size: {} for size in figures.SIZES})  # for no screen


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
    share = 'title="receipt.json: fp8_flop_share">FP8 verified: 80.0% of matmul FLOPs</a>'
    assert share in page
    assert f'title="metrics.jsonl: loss at step 80">{stored["final_loss"]:.4f}</a>' in page
    assert 'href="report.json" title="report.json: tokens_per_s">1,312</a>' in page


@pytest.mark.parametrize("kind", KINDS)
def test_pictures_of_the_plots_lie_beside_the_page(reports, kind):
    report = reports[kind]
    for picture in report.pictures:
        assert picture.parent == report.folder / "plots"
        assert picture.read_bytes().startswith(b"\x89PNG")
    assert (report.folder / "plots" / "loss.png") in report.pictures
    assert report.verdict in report.html.read_text("utf-8")


def test_the_top_names_model_method_data_device_and_date(reports):
    page = reports["one"].html.read_text("utf-8")
    title = page.partition("<title>")[2].partition("</title>")[0]
    assert title.startswith("tiny_llama, full fine-tuning on harbour, CPU (x86_64), 2026-11-21: ")
    top = page.partition("<h1>")[2].partition("<h2>Loss</h2>")[0]
    answers = top.partition("<h2>Answers</h2>")[2]
    assert answers.index(">step 20</a>") < answers.index(">after training</a>")
    page = reports["comparison"].html.read_text("utf-8")
    assert "<h1>FP8 against BF16: " in page


def test_each_image_stands_beside_what_was_asked_of_it_and_nothing_else_is_embedded(
    unplotted, tmp_path
):
    """One question of two images is two; a name in the metrics reads no file outside the run's."""
    from PIL import Image

    shown = {"prompt": "Which ship?", "answer": "A cutter.", "expected": TRAP, "tokens": 61}
    outside = tmp_path / "secret.jpg"
    names = ("samples/1-1.jpg", "samples/2-1.jpg", "../secret.jpg", str(outside))
    samples: list[dict] = [shown | {"images": [name]} for name in names]
    run = make_run(tmp_path / "r", steps=8, groups=(), samples=samples)
    (run / "samples").mkdir()
    for i in (1, 2):
        Image.new("RGB", (8 * i, 8)).save(run / "samples" / f"{i}-1.jpg")
    Image.new("RGB", (9, 9)).save(outside)
    page = finetune.report(run).html.read_text("utf-8")
    found = [one.partition('"')[0] for one in page.split('src="data:image/jpeg;base64,')[1:]]
    files = [(run / "samples" / f"{i}-1.jpg").read_bytes() for i in (1, 2)]
    assert [base64.b64decode(one) for one in found] == files
    assert page.count("the question has 61 tokens, images included") == 3  # two, and one without
    assert TRAP not in page
    assert (run / "samples" / "1-1.jpg").is_file()


def test_no_path_of_the_machine_leaves_with_a_page(tmp_path):
    run = make_run(tmp_path / "r", steps=8, groups=())
    home = "/home/someone/secret"
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(
        config.replace("name: builtin:harbour", f"path: {home}/a.jsonl")
    )
    _spoil(run, fallback=f"see {home}/b.log")
    command = {"command": [f"{home}/finetune/__main__.py", f"data.path={home}/a.jsonl"]}
    (run / "run.json").write_text(json.dumps(command))
    receipt = json.loads((run / "receipt.json").read_text())
    receipt["conditions"] = {
        "model": {"name": f"{home}/llama"},
        "optimizer": {"betas": [0.9, 0.95]},
    }
    (run / "receipt.json").write_text(json.dumps(receipt))
    page = as_html(page_of([RunSource(run, run)]))
    assert "secret" not in page
    for shown in ("path: …/a.jsonl", "…/b.log", "python -m finetune data.path=…/a.jsonl"):
        assert shown in page
    assert "name …/llama" in page
    assert "betas 0.9 0.95" in page
    other = make_run(tmp_path / "s", steps=8, groups=())
    (run / "config.yaml").write_text(config.replace("path: null", f"path: {home}/a.jsonl", 1))
    assert RunFolder(run).config["data"]["path"] == f"{home}/a.jsonl"
    page = as_html(page_of([RunSource(one, tmp_path, one.name) for one in (run, other)]))
    assert "secret" not in page
    assert ">…/a.jsonl</a>" in page.partition("<td>data.path</td>")[2].partition("</tr>")[0]


def test_gaps_over_steps_are_of_the_seeds_whose_two_runs_are_there(tmp_path):
    """A's seeds 43 and 44 were divided by B's 42 and 43."""
    folder = make_comparison(tmp_path / "c", steps=8)
    found = read_comparison(folder)
    shutil.rmtree(folder / found.runs[0].a)
    shutil.rmtree(folder / found.runs[2].b)
    plots = {plot.name: plot for plot in comparison_page(found, PageSource(folder, folder)).plots}
    a, b = (
        curve(RunFolder(folder / run).rows, "loss").y for run in (found.runs[1].a, found.runs[1].b)
    )
    (line,) = plots["gap_train"].series
    assert line.y == pytest.approx((a / b - 1).tolist())
    shutil.rmtree(folder / found.runs[1].b)
    names = [plot.name for plot in comparison_page(found, PageSource(folder, folder)).plots]
    assert "loss" in names
    assert not any(name.startswith("gap_") for name in names)


def test_runs_on_a_page_have_names_of_their_own(tmp_path):
    """Those of one recipe and seed were all called "tiny_full_fp8", and had one color."""
    folders = [(tmp_path / "a", 42), (tmp_path / "b", 43), (tmp_path / "c", 43)]
    runs = [RunFolder(make_run(folder, steps=8, seed=seed, groups=())) for folder, seed in folders]
    assert names_of(runs[:1]) == ["tiny_full_fp8"]
    assert names_of(runs[:2]) == ["tiny_full_fp8, seed 42", "tiny_full_fp8, seed 43"]
    assert names_of(runs) == [f"tiny_full_fp8, run {number}" for number in (1, 2, 3)]


def test_a_run_that_ended_in_no_number_shows_none(tmp_path):
    """Its last number stood there, that of the step before."""
    run = make_run(tmp_path / "r", steps=8, groups=())
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "loss": NaN}\n')
    assert RunSource(run, run).course("loss").last.text == "not finite"
    assert RunSource(run, run).course("loss").last.key == "loss at step 9"
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 10, "loss": 2.5}\n')
    assert RunSource(run, run).course("loss").last.text == "2.5000"


def test_damaged_scores_are_left_out(tmp_path):
    run = make_run(tmp_path / "r", steps=8, groups=())
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "tasks": [1]}\n{"step": 8, "tasks": {"t": 3, "u": {"acc": 0.5}}}\n')
    assert [row[:2] for row in RunSource(run, run).tasks.rows][-1] == ("u", "acc")


def test_letters_that_a_picture_lacks_are_no_warning(tmp_path, recwarn):
    run = make_run(tmp_path / "r", steps=8, groups=())
    (run / "run.json").write_text('{"recipe": "\u65e5\u672c"}')
    finetune.report([run, make_run(tmp_path / "s", steps=8, groups=())], to=tmp_path / "both")
    assert not [one for one in recwarn if "Glyph" in str(one.message)]


def test_verdicts(reports, unplotted, tmp_path):
    assert reports["one"].verdict == "FP8 verified: 80.0% of matmul FLOPs"
    assert reports["several"].verdict == "All verified"
    assert reports["comparison"].verdict == "Equivalent within 1%"
    difference = {"condition": "optimizer", "a": "adamw_torch", "b": "sgd", "why": "other update"}
    worse = finetune.report(
        make_comparison(tmp_path / "c", steps=40, gap=0.03, differences=(difference,))
    )
    assert worse.verdict == "Not equivalent within 1%"
    page = worse.html.read_text("utf-8")
    assert page.index("optimizer") < page.index("Do they train the same?")


@pytest.mark.long
def test_speeds_of_an_emulation_say_so(unplotted, tmp_path):
    folder = make_comparison(tmp_path / "c", steps=8)
    found = read_comparison(folder)
    assert "emulated, no claim" not in as_html(comparison_page(found, PageSource(folder, folder)))
    found.notes.append(EMULATED)
    page = as_html(comparison_page(found, PageSource(folder, folder)))
    assert "emulated, no claim" in page
    cost = page.partition("<h2>Speed and memory</h2>")[2].partition("</section>")[0]
    assert "FP8 was emulated" in cost
    a, b = (finetune.report(folder / run) for run in (found.runs[0].a, found.runs[0].b))
    assert "not the speed of FP8" in a.html.read_text("utf-8")
    assert "not the speed of FP8" not in b.html.read_text("utf-8")


def test_a_run_that_is_named_twice_is_reported_once(unplotted, tmp_path, monkeypatch):
    run = make_run(tmp_path / "r", steps=8, groups=())
    monkeypatch.chdir(tmp_path)
    assert finetune.report(["r", run, "r/../r"]).verdict == "FP8 verified: 80.0% of matmul FLOPs"


def _spoil(run: Path, **precision: str) -> None:
    receipt = json.loads((run / "receipt.json").read_text())
    receipt["precision"] |= precision
    (run / "receipt.json").write_text(json.dumps(receipt))


def test_bf16_where_fp8_was_requested_is_said_loudly(unplotted, tmp_path):
    run = make_run(tmp_path / "r", steps=8, groups=())
    _spoil(run, ran="bf16", fallback="no FP8 here: trains in BF16")
    report = finetune.report(run)
    assert report.verdict == "FP8 refused: BF16 executed"
    assert '<div class="verdict bad">' in report.html.read_text("utf-8")
    assert "no FP8 here: trains in BF16" in report.html.read_text("utf-8")
    whole = make_run(tmp_path / "s", steps=8, groups=())
    assert finetune.report([run, whole], to=tmp_path / "both").verdict == "Not all verified"


@pytest.mark.parametrize(
    ("processes", "said"),
    slow_but([(2, "each per process")], [(1, "each"), (2, "each per process")]),
)
def test_optimizer_state_of_several_processes_is_that_of_one(processes, said, unplotted, tmp_path):
    """Sharded, each has a part: 4 bytes of the 8 of two moments looked like another optimizer."""
    run = make_run(tmp_path / "r", steps=8, groups=())
    receipt = json.loads((run / "receipt.json").read_text())
    receipt["environment"]["processes"] = processes
    (run / "receipt.json").write_text(json.dumps(receipt))
    shown = [line.strip() for line in " ".join(str(Receipt.read(receipt)).split()).split("state ")]
    assert shown[0].endswith("8.00 bytes of optimizer")
    assert shown[1].startswith("each per process") is (processes > 1)
    assert f"bytes of optimizer state {said}." in finetune.report(run).html.read_text("utf-8")


def test_the_time_of_a_resumed_run_is_that_of_its_own_steps(tmp_path):
    """Beside all steps it made the run look as fast as its checkpoint was late."""
    run = make_run(tmp_path / "r", steps=8, groups=())
    assert RunSource(run, run).timed.text == "8 steps"
    ticks = (run / "steps.jsonl").read_text().splitlines()
    (run / "steps.jsonl").write_text("\n".join(ticks[5:]) + "\n")
    assert RunSource(run, run).timed.text == "steps 6 to 8, as resumed"
    (run / "report.json").unlink()
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "tasks": {}}\n')  # of `evaluate`, without a time
    assert RunSource(run, run).time.text == "3.2 s"


@pytest.mark.slow
def test_a_run_that_goes_on_and_one_that_diverged_have_a_report(tmp_path):
    run = make_run(tmp_path / "r", steps=8, groups=())
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "loss": NaN}\n{"step": 10, "loss": Infinity}\n')
        file.write('{"step": 11, "seconds": [1], "loss": 2.0}\n{"step": 1')
    for name in ("receipt.json", "report.json", "steps.jsonl"):
        (run / name).unlink()
    report = finetune.report(run)
    assert report.verdict == "Not verified yet"
    assert "loss is not finite at" in report.html.read_text("utf-8")
    (run / "metrics.jsonl").write_text("")
    (run / "run.json").write_text('{"command": true}')
    (run / "receipt.json").write_text('{"status": "proven", "layers": [3, {}, {"name": {}}]}')
    assert finetune.report(run).pictures == ()


# ----------------------------------------------------------------------------------- text is text


def test_text_of_a_model_is_never_markup(reports):
    page = reports["one"].html.read_text("utf-8")
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt; **bold**" in page
    assert Links(page).scripts == 1


def test_a_figure_in_a_sentence_keeps_its_link():
    line = Line(("of ", Num("63.0%", "a b.json".replace(" ", "%20"), 'x"y')))
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


@pytest.mark.long
def test_the_last_run_is_reported_twice(cli, tmp_path):
    make_run(tmp_path / "runs" / "tiny_full_fp8" / "20261120-120000-aaaa", steps=8, groups=())
    last = make_run(
        tmp_path / "runs" / "tiny_full_fp8" / "20261121-120000-bbbb", steps=8, groups=()
    )
    code, out, _ = cli("report", "last", "--json")
    assert code == 0
    reported = json.loads(out)
    assert Path(reported["html"]).resolve() == last / "report.html"
    assert cli("report", last)[0] == 0
    assert "20261121-120000-bbbb" in cli("report", "tiny_full_fp8")[1]
    assert json.loads(out)["verdict"] == "FP8 verified: 80.0% of matmul FLOPs"


def test_mistakes_are_told(cli, tmp_path, run):
    code, _, err = cli("report", "last")
    assert (code, "no folder of runs" in err) == (2, True)
    code, _, err = cli("report", "nowhere/at/all")
    assert (code, "is no run folder" in err) == (2, True)
    (tmp_path / "file").write_text("")
    code, _, err = cli("report", run, "--to", "file")
    assert (code, "cannot be written" in err) == (2, True)
    assert cli("report")[0] == 2
    compared = make_comparison(tmp_path / "c", steps=8)
    with pytest.raises(ConfigError, match="reported alone"):
        finetune.report([compared, run])


OTHER = ["x", [1], {"now": 3}, {"now": {"groups": [3]}}, {"before": 1}, {"ran": 3}]
OTHER += [{"device": "text"}, {"versions": [1]}, {"measured_gib": "1"}, {"predicted_gib": {}}]


@pytest.mark.slow
def test_parts_of_a_receipt_of_another_form_are_left_out(tmp_path):
    folder = make_run(tmp_path / "r", steps=4, groups=())
    whole = json.loads((folder / "receipt.json").read_text())
    (folder / "metrics.jsonl").write_text("")  # plots take the time, and are of no receipt
    for part in ("precision", "environment", "trainable", "movement", "memory"):
        for other in OTHER:
            (folder / "receipt.json").write_text(json.dumps(whole | {part: other}))
            page = as_html(page_of([RunSource(folder, folder)]))
            says = "FP8 verified: 80" in page, "FP8 verified: 80" in str(receipt_of(folder))
            assert says == (part != "precision", part != "precision"), (part, other)


def receipt_of(folder: Path) -> Receipt:
    return Receipt.read(RunFolder(folder).receipt)


def test_without_matplotlib_a_page_is_refused_and_a_verdict_stands(tmp_path, monkeypatch) -> None:
    from finetune.cli.analysis import _page_of

    for name in ("figures", "curves", "report"):
        monkeypatch.delitem(sys.modules, f"finetune.analysis.report.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError, match=re.escape(install_hint("report"))):
        importlib.import_module("finetune.analysis.report.report")
    assert _page_of(tmp_path).startswith("none: pages and pictures need matplotlib")
