"""The site's generated tables have everything, and its pages lead on."""

from __future__ import annotations

import json
import re

import agents
import hooks
import pytest
import site_reference
import yaml

import finetune
from finetune.config.aliases import DROPPED, SETTINGS
from finetune.config.methods import METHODS
from finetune.config.optimizers import OPTIMIZERS
from finetune.config.paths import list_recipes
from finetune.config.schema import RunConfig
from finetune.hardware.gpus import gpu_table
from tests.docs.commands import ROOT

PAGES = sorted((ROOT / "docs" / "pages").rglob("*.md"))
NAMES = [str(path.relative_to(ROOT / "docs" / "pages")) for path in PAGES]


class _Loader(yaml.SafeLoader):
    """Tags of Python that mkdocs.yml may have are of no interest here."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)
CONFIG = yaml.load((ROOT / "docs" / "mkdocs.yml").read_text(encoding="utf-8"), _Loader)


def in_navigation(entry: object) -> list[str]:
    if isinstance(entry, str):
        return [entry]
    values = entry.values() if isinstance(entry, dict) else entry
    return [page for value in values for page in in_navigation(value)]


# ---------------------------------------------------------------------------------- generated parts


def test_every_setting_is_there() -> None:
    assert site_reference.SECTIONS.keys() | {"train"} == RunConfig.model_fields.keys()
    for name, section in site_reference.SECTIONS.items():
        made = site_reference.GENERATED[f"settings {name}"]()
        for key, field in section.model_fields.items():
            assert f"| `{key}`<br>" in made
            assert " ".join(field.description.split()) in made


def test_every_key_of_another_tool_is_there() -> None:
    made = site_reference.other_tools()
    for name in (*SETTINGS, *DROPPED):
        assert re.search(rf"^\| `{name}` \| \w|`", made, re.M), name


def test_every_optimizer_is_there() -> None:
    made = site_reference.optimizers() + site_reference.other_optimizers()
    for name, facts in OPTIMIZERS.items():
        assert f"| `{name}` |" in made
        assert facts.refused in made


def test_every_key_of_train_that_a_recipe_sets_has_a_meaning_and_its_value() -> None:
    sections = site_reference._train_sections()
    assert {key for train in sections.values() for key in train} <= site_reference.KEYS.keys()
    assert re.findall(r"^\| `(\w+)`", site_reference.train_values(), re.M) == list(sections)
    assert re.findall(r"^\| `(\w+)`", site_reference.methods(), re.M) == list(METHODS)


def test_every_recipe_verb_and_public_name_is_there() -> None:
    made = site_reference.recipes()
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| ([^|]+) \|", made, re.M)
    named = [f"{name}{end}" for name, ends in rows for end in re.findall(r"_\w+", ends)]
    assert sorted(named) == sorted(list_recipes())
    lines = site_reference.command_line()
    for name, verb in site_reference.verbs().items():
        assert f"\n## {name}\n" in f"\n{lines}"
        for param in verb.params:
            if getattr(param, "hidden", False):
                continue
            shown = param.opts[-1] if param.param_type_name == "option" else param.metavar
            assert f"`{shown or param.name.upper()}`" in lines
    names = [name for group in site_reference.API.values() for name in group]
    assert sorted(names) == sorted(finetune.__all__)
    for name in names:
        assert f".{name}\n" in site_reference.python_api()


@pytest.mark.parametrize(
    ("gpu", "recipe", "overrides"),
    [(gpu, *case) for gpu, cases in site_reference.REFUSED.items() for case in cases],
)
def test_what_is_shown_as_refused_is_refused(gpu, recipe, overrides) -> None:
    error = site_reference.refusal(recipe, overrides, gpu)
    assert error is not None
    assert error.what


def test_gpus_have_what_their_capability_says() -> None:
    rows = {line.split(" | ")[0].strip("| "): line for line in site_reference.gpus().splitlines()}
    for name, fp8, mxfp8, nvfp4 in (
        ("H100", "yes", "no", "no"),
        ("B200", "yes", "yes", "yes"),
        ("RTX 5090", "yes", "no", "yes"),
        ("RTX 4090", "yes", "no", "no"),
        ("A100", "no", "no", "no"),
        ("V100", "no", "no", "no"),
        ("Apple M series", "no", "no", "no"),
    ):
        assert rows[name].split(" | ")[2:5] == [fp8, mxfp8, nvfp4]
    assert "compute=fp16" in rows["V100"]
    figures = site_reference.gpu_figures()
    assert all(f"| {gpu.name} |" in figures for gpu in gpu_table())


def test_a_bar_does_not_break_a_table() -> None:
    made = site_reference.table(("a", "b"), [("x|y", "two\nlines")])
    assert made.splitlines()[-1] == "| x\\|y | two lines |"


# -------------------------------------------------------------------------------------------- pages


def test_every_page_is_in_the_navigation_and_every_generated_part_in_a_page() -> None:
    listed = in_navigation(CONFIG["nav"])
    assert len(listed) == len(set(listed))
    assert set(NAMES) | set(hooks.ELSEWHERE.values()) == set(listed)
    used = [
        name
        for path in PAGES
        for name in re.findall(r"<!-- generated: ([\w ]+) -->", path.read_text(encoding="utf-8"))
    ]
    assert sorted(used) == sorted(site_reference.GENERATED)
    for file in (*CONFIG["extra_css"], *CONFIG["extra_javascript"]):
        assert (ROOT / "docs" / "pages" / file).is_file()  # wide tables say that they scroll


@pytest.mark.parametrize("path", PAGES, ids=NAMES)
def test_a_page_ends_with_the_way_to_the_next(path) -> None:
    """The next one of the navigation; links lead to files that are there."""
    text = path.read_text(encoding="utf-8")
    page = str(path.relative_to(ROOT / "docs" / "pages"))
    last = re.fullmatch(r"\*\*Next:\*\* \[.+\]\(([^)]+)\)", text.splitlines()[-1])
    assert last
    listed = in_navigation(CONFIG["nav"])
    target = hooks._inside(hooks.source_of(page), last[1])
    assert hooks.page_of(target or "") == listed[listed.index(page) + 1]
    prose = "".join(hooks.CODE.split(text)[::2])
    for _, _, link in hooks.LINK.findall(prose):
        if not re.match(r"[a-z]+:|#", link):
            assert hooks._inside(hooks.source_of(page), link.partition("#")[0]), link


def test_links_become_links_of_the_site() -> None:
    def shown(text: str, page: str) -> str:
        return hooks.render(text, page)

    assert shown("[a](../fp8.md#x)", "guides/first-run.md") == "[a](../fp8.md#x)"
    assert shown("[a](../../FP8_FINDINGS.md)", "fp8.md") == "[a](findings.md)"
    assert shown("[a](docs/pages/fp8.md)", "findings.md") == "[a](fp8.md)"
    assert shown("[a](finetune/errors.py)", "findings.md") == "a"
    assert shown("`[a](nothing.md)`", "fp8.md") == "`[a](nothing.md)`"
    with pytest.raises(FileNotFoundError, match=r"fp8.md links to nothing.md"):
        shown("[a](nothing.md)", "fp8.md")


def test_a_notebook_is_a_page_with_a_picture_and_a_finding_for_each_experiment() -> None:
    file = next(file for file in hooks.ELSEWHERE if file.endswith(".ipynb"))
    page = hooks.of_notebook(json.loads((ROOT / file).read_text(encoding="utf-8")))
    experiments = page.split("\n## ")[2:]
    assert len(experiments) == 5
    for experiment in experiments:
        assert experiment.count('src="data:image/png;base64,') == 1
        assert experiment.count("**Finding.**") == experiment.count("**Verdict: ") == 1


def test_pages_load_nothing_from_elsewhere() -> None:
    assert CONFIG["theme"]["font"] is False
    for path in (ROOT / "docs" / "pages").rglob("*"):
        if path.suffix in (".svg", ".css", ".md"):
            text = path.read_text(encoding="utf-8").replace("http://www.w3.org/", "")
            assert not re.search(r"(src|href|url\()[=\"']*https?:", text), path
            assert path.stat().st_size < 150_000


# ------------------------------------------------------------------------------------ contributors


def test_the_folders_and_answers_for_contributors_exist() -> None:
    text = (ROOT / ".github" / "CONTRIBUTING.md").read_text(encoding="utf-8")
    package = ROOT / "finetune"
    floors = re.search(r"^  ways in (.*?)^```$", text, re.MULTILINE | re.DOTALL)
    folders = {path.name for path in package.iterdir() if path.is_dir()} - {"__pycache__"}
    assert floors
    assert folders <= set(re.findall(r"\w+", floors[1]))
    answers = dict(re.findall(r"^\| (.+\?) \| `([\w./]+)`", text, re.MULTILINE))
    assert len(answers) >= 12
    assert [file for file in answers.values() if not (package / file).exists()] == []


@pytest.mark.parametrize("file", agents.FILES)
def test_what_agents_read_is_made_of_what_is_there(file) -> None:
    assert (ROOT / file).read_text("utf-8") == agents.made()[file], "python docs/agents.py"


def test_agents_are_told_of_every_room_and_page() -> None:
    about, pages = agents.made().values()
    rooms = {p.parent.name for p in (ROOT / "finetune").glob("*/__init__.py")} - {"assets"}
    assert {room for room in rooms if f"`{room}`" in about} == rooms
    assert all(str(page).removesuffix(".md") in pages for page in in_navigation(CONFIG["nav"]))
