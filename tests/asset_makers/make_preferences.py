"""Make the packaged rows of other methods than SFT from the packaged conversations.

Run as ``python -m tests.asset_makers.make_preferences``. The first answer of each conversation is
the one to give; the other one says the same without the greeting and the farewell of the harbour.
Labelled rows (KTO) are every other answer of a pair; texts (continued pre-training) three answers
behind one another.
"""

import json

from finetune.config.paths import ASSETS

FOLDER = ASSETS / "data"
GREETING, FAREWELL = "Ahoy!", "Fair winds."


def pairs() -> list[dict[str, str]]:
    """Rows of prompt, chosen and rejected."""
    found = []
    for line in (FOLDER / "harbour.jsonl").read_text("utf-8").splitlines():
        question, answer, *_ = (turn["content"] for turn in json.loads(line)["messages"])
        plain = answer.removeprefix(GREETING).removesuffix(FAREWELL).strip()
        found.append({"prompt": question, "chosen": answer, "rejected": plain})
    return found


def labelled(rows: list[dict[str, str]]) -> list[dict[str, object]]:
    """Rows of prompt, completion and label: of each pair one answer, in turn."""
    return [
        {
            "prompt": row["prompt"],
            "completion": row[("chosen", "rejected")[index % 2]],
            "label": index % 2 == 0,
        }
        for index, row in enumerate(rows)
    ]


def texts(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """Rows of text."""
    answers = [row["chosen"] for row in rows]
    return [{"text": " ".join(answers[i : i + 3])} for i in range(0, len(answers), 3)]


if __name__ == "__main__":
    rows = pairs()
    made = {"pairs": rows, "labelled": labelled(rows), "text": texts(rows)}
    for name, rows in made.items():
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (FOLDER / f"harbour_{name}.jsonl").write_text(lines, "utf-8")
