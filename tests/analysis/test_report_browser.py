"""Reports in a real browser: nothing is fetched, plots have ink, dark is dark, a phone can read it.

One start of a headless Chromium serves all checks.
"""

from __future__ import annotations

import functools
import shutil

import pytest

import finetune
from tests.analysis.test_report_plots import contrast
from tests.run_folders import make_comparison, make_run

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        CHROMIUM is None,
        reason="there is no Chromium to open a report in: apt-get install chromium",
    ),
]
KINDS = ("one", "several", "comparison")

PLOTS = """() => [...document.querySelectorAll("figure.plot")].map(figure => {
  const shown = [...figure.querySelectorAll(".draw")].filter(d => d.offsetParent !== null);
  const svg = shown.length === 1 ? shown[0].querySelector("svg") : null;
  if (!svg) return {id: figure.id, shown: shown.length, width: 0, height: 0, ink: [], texts: 0};
  const box = svg.getBoundingClientRect();
  const ink = [...svg.querySelectorAll("[id*='-series-'] path, [id*='-series-'] use")].map(path => {
    const style = getComputedStyle(path);
    const at = path.getBoundingClientRect();
    return {extent: at.width + at.height, stroke: style.stroke, fill: style.fill};
  });
  return {id: figure.id, shown: shown.length, width: box.width, height: box.height, ink,
          texts: svg.querySelectorAll("text").length,
          named: Boolean(svg.querySelector("title").textContent && svg.querySelector("desc"))};
})"""
COLOURS = """() => {
  const rgb = text => {  // whatever notation the browser has, drawn and read back
    const context = document.createElement("canvas").getContext("2d");
    context.fillStyle = text; context.fillRect(0, 0, 1, 1);
    return [...context.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const of = (selector, key) => rgb(getComputedStyle(document.querySelector(selector))[key]);
  return {
    paper: of("body", "backgroundColor"), text: of("body", "color"), note: of(".note", "color"),
    head: of(".headline", "color"), tick: of("figure svg text", "fill"),
    line: of("[id*='-series-'] path", "stroke"),
  };
}"""
OVERFLOW = """() => [...document.querySelectorAll("body *")].filter(e => {
  if (e.closest(".box, pre, svg") && !e.matches(".box, pre")) return false;
  return e.getBoundingClientRect().right > document.documentElement.clientWidth + 0.5;
}).map(e => e.outerHTML.slice(0, 120))"""


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """A report of each kind."""
    home = tmp_path_factory.mktemp("runs here & there")
    one = make_run(home / "tiny_full_fp8" / "20261121-120000-aaaa")
    two = make_run(home / "tiny_full_bf16" / "20261121-130000-bbbb", recipe="tiny_full_bf16")
    compared = make_comparison(home / "compare", steps=40)
    made = (finetune.report(one), finetune.report([one, two], home / "both"), compared)
    return dict(zip(KINDS, (*made[:2], finetune.report(compared)), strict=True))


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu", "--headless=new"]
        )
        yield started
        started.close()


@pytest.fixture(scope="module")
def open_page(browser, reports):
    """Opens a report at a width and in a theme, once; requests and console lines are in `seen`.

    Tests share the pages, so that each leaves one as it was, but for what is unfolded or scrolled.
    """
    contexts = []

    @functools.cache
    def opened(kind: str, width: int, scheme: str):
        context = browser.new_context(
            viewport={"width": width, "height": 800}, color_scheme=scheme, reduced_motion="reduce"
        )
        contexts.append(context)
        page = context.new_page()
        seen = {"requests": [], "console": []}
        page.on("request", lambda request: seen["requests"].append(request.url))
        page.on("console", lambda line: seen["console"].append(line.text))
        page.on("pageerror", lambda error: seen["console"].append(str(error)))
        page.goto(reports[kind].html.as_uri(), wait_until="load")
        return page, seen

    yield lambda kind, width=1280, scheme="light": opened(kind, width, scheme)
    for context in contexts:
        context.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [1280, 360])
def test_plots_render_nothing_is_fetched_and_nothing_sticks_out(open_page, reports, kind, width):
    page, seen = open_page(kind, width)
    assert seen["requests"] == [reports[kind].html.as_uri()]
    assert seen["console"] == []
    plots = page.evaluate(PLOTS)
    assert len(plots) == len(reports[kind].pictures) >= 3
    for plot in plots:
        assert plot["shown"] == 1, plot
        assert min(plot["width"], plot["height"]) > 100, plot
        assert plot["named"], plot
        assert plot["texts"] >= 3, plot
        assert any(ink["extent"] > 5 for ink in plot["ink"]), plot
        assert any({ink["stroke"], ink["fill"]} != {"none"} for ink in plot["ink"]), plot
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(OVERFLOW) == []


def test_a_wide_table_says_that_it_scrolls_until_its_end(open_page):
    page, _ = open_page("one", 360)
    box = page.locator(".box[data-more]").first
    assert "scroll" in box.evaluate("e => getComputedStyle(e, '::before').content")
    box.evaluate("e => { e.id = 'wide'; e.scrollLeft = e.scrollWidth; }")
    page.wait_for_selector("#wide:not([data-more])")
    wide, _ = open_page("one")
    assert wide.locator(".box[data-more]").count() == 0


@pytest.mark.parametrize("kind", KINDS)
def test_dark_is_dark_and_the_button_changes_it(open_page, kind):
    light_page, _ = open_page(kind)
    dark_page, seen = open_page(kind, scheme="dark")
    light, dark = light_page.evaluate(COLOURS), dark_page.evaluate(COLOURS)
    assert sum(light["paper"]) > 600 > 150 > sum(dark["paper"])
    for colours in (light, dark):
        for name in ("text", "note", "head", "tick"):
            assert contrast(colours[name], colours["paper"]) >= 4.5, (name, colours)
        assert contrast(colours["line"], colours["paper"]) >= 3, colours
    assert all(light[name] != dark[name] for name in light)
    dark_page.click("#theme")
    assert dark_page.evaluate(COLOURS) == light
    assert dark_page.inner_text("#theme") == "Dark"
    dark_page.click("#theme")
    assert dark_page.evaluate(COLOURS) == dark
    assert seen["console"] == []


def test_paper_is_white_also_where_the_screen_is_dark(open_page):
    page, _ = open_page("one", scheme="dark")
    page.emulate_media(media="print", color_scheme="dark")
    assert sum(page.evaluate(COLOURS)["paper"]) > 600
    assert not page.is_visible("#theme")
    page.emulate_media(media="screen", color_scheme="dark")


@pytest.mark.parametrize("kind", KINDS)
def test_on_paper_tables_are_whole_and_nothing_scrolls(open_page, kind):
    """Their last columns faded out, under "scroll sideways"."""
    page, _ = open_page(kind, 718)  # of A4 between margins of a centimeter
    page.emulate_media(media="print")
    cut = """() => [...document.querySelectorAll(".box")].filter(box =>
      box.scrollWidth > box.clientWidth + 1 || getComputedStyle(box).maskImage !== "none"
      || getComputedStyle(box, "::before").content !== "none").map(b => b.innerText.slice(0, 99))"""
    assert page.evaluate(cut) == []
    page.emulate_media(media="screen")


def test_ids_are_unique_and_folded_parts_open(open_page):
    page, _ = open_page("comparison")
    ids = page.eval_on_selector_all("[id]", "all => all.map(e => e.id)")
    assert len(ids) == len(set(ids))
    closed = page.locator("details").first
    closed.locator("summary").click()
    assert closed.locator("table").first.is_visible()
