"""Figures of the pages, written from what commands printed.

A source, `docs/figures/NAME.txt`, is a command, how and where it ran, a blank line and what it
printed. Pages get figures from sources in two ways:

* a table between `<!-- figures: NAME [COLUMNS] -->` and `<!-- end -->` is that of the source, whole
  or the named columns (numbers from 1);
* a sentence stands in `figures.toml` with fields for its figures. `find` reads the fields from the
  source, `says` has the sentence of each page. Blanks match any blanks, so that lines may be broken
  anywhere, and `{_}` is a figure of another source:

      [[claim]]
      source = "compare_full"                                # printed: "eval loss: -0.15 %"
      find = 'eval loss: (?P<gap>[+-][\\d.]+) %'
      says = { "README.md" = "it ends {gap} % from BF16" }   # is written: ends -0.15 % from BF16

`{x:.1f}` rounds, `{x:k}` shows thousands ("20.5k").

    python docs/figures.py                  # write the pages, and what `ls` shows as measured
    python docs/figures.py --run NAME ...   # run the commands of sources, store what they print

`tests/docs/test_figures.py` fails where a page says another figure than its source.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import shlex
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "docs" / "figures"
CLAIMS = ROOT / "docs" / "figures.toml"
MEASURED = ROOT / "finetune" / "assets" / "measured.json"
TABLE = re.compile(r"(<!-- figures: (\w+)((?: \d+)*) -->\n).*?(<!-- end -->)", re.S)
FIELD = re.compile(r"\{(\w+)(?::([^}]+))?\}")
NUMBER = r"[-+]?\d(?:[\d,.]*\d)?k?"


@dataclass(frozen=True)
class Source:
    """What a command printed.

    Attributes:
        facts: `command`, `commit`, `date`, `machine`, and `kind`: measured or predicted.
        text: What it printed.
    """

    name: str
    facts: dict[str, str]
    text: str

    @property
    def rows(self) -> list[list[str]]:
        """Cells of its Markdown table, the line below the header left out."""
        lines = [line for line in self.text.splitlines() if line.startswith("|")]
        cells = [[cell.strip() for cell in line.strip("|").split(" |")] for line in lines]
        return [row for row in cells if not set("".join(row)) <= set("-|")]


def read(name: str) -> Source:
    """The source of a name."""
    head, _, text = (SOURCES / f"{name}.txt").read_text(encoding="utf-8").partition("\n\n")
    facts = dict(line.split(": ", 1) for line in head.splitlines())
    return Source(name, facts, text)


def sources() -> list[Source]:
    """All of them, by name."""
    return [read(path.stem) for path in sorted(SOURCES.glob("*.txt"))]


def table(source: Source, columns: list[int]) -> str:
    """The table of a source in Markdown, or some of its columns."""
    rows = source.rows
    chosen = [[row[i - 1] for i in columns] if columns else row for row in rows]
    chosen.insert(1, ["---"] * len(chosen[0]))
    return "".join(f"| {' | '.join(row)} |\n" for row in chosen)


# ----------------------------------------------------------------------------------- sentences


@dataclass(frozen=True)
class Claim:
    """A sentence of a page, with the values of its fields."""

    page: str
    sentence: str
    values: dict[str, str]

    @property
    def pattern(self) -> re.Pattern[str]:
        """The sentence with any figures."""
        parts = re.split(r"\{\w+(?::[^}]+)?\}", self.sentence)
        blank = [re.sub(r"(?:\\ |\s)+", r"\\s+", re.escape(part)) for part in parts]
        return re.compile(f"({NUMBER})".join(f"({part})" for part in blank))

    def write(self, text: str) -> tuple[str, int]:
        """The page with the figures of the source; how many places have the sentence."""
        fields = FIELD.findall(self.sentence)

        def put(found: re.Match[str]) -> str:
            parts = list(found.groups())
            for i, (name, form) in enumerate(fields):
                if name != "_":
                    parts[2 * i + 1] = shown(self.values[name], form)
            return "".join(parts)

        return self.pattern.subn(put, text)


def shown(value: str, form: str) -> str:
    """A figure as a page has it."""
    if not form:
        return value
    number = float(value.replace(",", ""))
    return f"{number / 1000:.1f}k" if form == "k" else format(number, form)


def claims() -> list[Claim]:
    """The sentences of all pages.

    Raises:
        ValueError: a source does not have what `find` looks for.
    """
    found = list[Claim]()
    for one in tomllib.loads(CLAIMS.read_text(encoding="utf-8"))["claim"]:
        values = re.search(one["find"], read(one["source"]).text, re.S)
        if values is None:
            raise ValueError(f"docs/figures/{one['source']}.txt has nothing like {one['find']}")
        for page, sentences in one["says"].items():
            for sentence in [sentences] if isinstance(sentences, str) else sentences:
                found.append(Claim(page, sentence, values.groupdict()))
    return found


# -------------------------------------------------------------------------------------- pages


def pages() -> list[Path]:
    """Every page that may have figures."""
    notes, site = ROOT / "docs" / "notes", ROOT / "docs" / "pages"
    return [ROOT / "README.md", ROOT / "FP8_FINDINGS.md", *notes.glob("*.md"), *site.rglob("*.md")]


def written(page: Path, text: str) -> str:
    """The text of a page with the figures of the sources.

    Raises:
        ValueError: a sentence of `figures.toml` is not on the page, or twice.
    """

    def put(found: re.Match[str]) -> str:
        columns = [int(word) for word in found[3].split()]
        return found[1] + table(read(found[2]), columns) + found[4]

    text = TABLE.sub(put, text)
    name = str(page.relative_to(ROOT))
    for claim in claims():
        if claim.page == name:
            text, places = claim.write(text)
            if places != 1:
                raise ValueError(f"{name} says {places} times, not once: {claim.sentence}")
    return text


def measured() -> str:
    """What `ls` shows as measured: JSON, from the runs of recipes on an H100."""
    runs = dict[str, Any]()
    for recipe, _, tokens, gib, ratio, commit in read("h100_8b").rows[1:]:
        runs[recipe.strip("`")] = {
            "tokens_per_s": int(tokens.replace(",", "")),
            "gib": float(gib),
            **({"over_bf16": float(ratio.partition("x")[0])} if ratio else {}),
            "commit": commit,
        }
    return json.dumps({"H100": runs}, indent=1) + "\n"


def run(name: str) -> None:
    """Run the command of a source and store what it prints."""
    facts = read(name).facts
    words = [sys.executable, *shlex.split(facts["command"])[1:]]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, check=True)
    commit = ["git", "rev-parse", "--short=8", "HEAD"]
    facts["commit"] = subprocess.run(
        commit, capture_output=True, text=True, cwd=ROOT, check=True
    ).stdout.strip()
    facts["date"] = datetime.date.today().strftime("%d %B %Y")
    head = "".join(f"{key}: {value}\n" for key, value in facts.items())
    lines = "\n".join(line.rstrip() for line in done.stdout.rstrip().splitlines())
    (SOURCES / f"{name}.txt").write_text(f"{head}\n{lines}\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--run", nargs="+", default=[], metavar="NAME", help="sources to run")
    for name in parser.parse_args().run:
        run(name)
    MEASURED.write_text(measured(), encoding="utf-8")
    for page in pages():
        text = page.read_text(encoding="utf-8")
        page.write_text(written(page, text), encoding="utf-8")


if __name__ == "__main__":
    main()
