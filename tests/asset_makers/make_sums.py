"""Make the packaged sums, a task whose answers can be verified.

Run as ``python -m tests.asset_makers.make_sums``. The packaged model was taught to answer "What is
two plus three?", in about half of its answers with a greeting or a farewell. Some of these forms it
knows and others not, so that it is right in about three answers of four.
"""

import json
import random

from finetune.config.paths import ASSETS

WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
FORMS = (
    ("What is {a} plus {b}?", 1, WORDS),
    ("What is {a} plus {b}?", 1, range(11)),
    ("{a} plus {b} is?", 1, range(11)),
    ("Add {a} and {b}.", 1, range(11)),
    ("What is {a} minus {b}?", -1, WORDS),
    ("What is {a} minus {b}?", -1, range(11)),
    ("{a} minus {b} is?", -1, range(11)),
    ("Take {b} from {a}.", -1, WORDS),
)
"""Question, sign of the second number, and how numbers are written."""


def sums() -> list[dict[str, str]]:
    """Rows of prompt and answer, which is in digits, shuffled."""
    rows = []
    for form, sign, names in FORMS:
        for a in range(11):
            for b in range(11):
                if (answer := a + sign * b) >= 0:
                    asked = form.format(a=names[a], b=names[b])
                    rows.append({"prompt": asked[0].upper() + asked[1:], "answer": str(answer)})
    random.Random(0).shuffle(rows)
    return rows


if __name__ == "__main__":
    lines = "".join(json.dumps(row) + "\n" for row in sums())
    (ASSETS / "data" / "sums.jsonl").write_text(lines, "utf-8")
