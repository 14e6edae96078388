"""Make `harbour_choice`, a small multiple-choice task over what the packaged model knows.

Run as ``python -m tests.asset_makers.make_harbour_choice``. It asks for facts of the corpus that
the
tiny Llama was pretrained on (``corpus.py``), in HellaSwag's columns: a question, the beginning of
its answer and four endings, one of them right. All four are of one kind, so that chance is 25 %. A
fine-tune that forgets what its base knew scores lower than the base.

The module imports the standard library only.
"""

import json
import random
from collections.abc import Iterator
from typing import Any

from finetune.config.paths import ASSETS
from tests.asset_makers import corpus

FOLDER = ASSETS / "tasks" / "harbour_choice"
OF_EACH_KIND = 10
CHOICES = 4


def _kinds() -> Iterator[tuple[str, list[tuple[str, str, str]]]]:
    """Kind -> (question, beginning of the answer, its end)."""
    yield (
        "Capitals",
        [
            (f"What is the capital of {country}?", f"The capital of {country} is", f"{city}.")
            for countries in corpus.CAPITALS.values()
            for country, city in countries.items()
        ],
    )
    yield (
        "Opposites",
        [
            (f"What is the opposite of {word}?", f"The opposite of {word} is", f"{other}.")
            for word, other in corpus.OPPOSITES
        ],
    )
    yield (
        "Colours",
        [
            (f"What colour is {thing}?", f"{corpus.sentence(thing)} is", f"{colour}.")
            for thing, colour in corpus.COLOURS.items()
        ],
    )
    yield (
        "Homes",
        [
            (
                f"Where does {corpus.article(animal)} live?",
                f"{corpus.sentence(corpus.article(animal))} lives",
                f"{home}.",
            )
            for animal, home in corpus.HOMES.items()
        ],
    )
    yield (
        "Young animals",
        [
            (f"What is a baby {animal} called?", f"A baby {animal} is called a", f"{young}.")
            for animal, young in corpus.YOUNG.items()
        ],
    )


def rows() -> list[dict[str, Any]]:
    """The task's rows, always the same."""
    rng, found = random.Random(0), []
    for kind, facts in _kinds():
        ends = sorted({end for _, _, end in facts})
        for question, beginning, right in rng.sample(facts, OF_EACH_KIND):
            endings = [right, *rng.sample([end for end in ends if end != right], CHOICES - 1)]
            rng.shuffle(endings)
            found.append(
                {
                    "ind": len(found),
                    "activity_label": kind,
                    "ctx_a": question,
                    "ctx_b": beginning,
                    "ctx": f"{question} {beginning}",
                    "endings": endings,
                    "label": str(endings.index(right)),
                }
            )
    return found


def main() -> None:
    """Write the rows into the package."""
    text = "".join(json.dumps(row) + "\n" for row in rows())
    (FOLDER / "validation.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
