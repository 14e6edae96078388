"""Make `recipes.json`: the facts of each shipped recipe that `finetune ls` shows.

Run as ``python -m tests.asset_makers.make_recipes`` after a change of a recipe or of the preview of
memory; `tests/cli` compares the file with fresh rows.
"""

import json
from typing import Any

from finetune.cli.recipes import ROWS, checksum, row_of
from finetune.config.lookup import list_recipes


def table() -> dict[str, Any]:
    """Recipe -> its row, and the checksum of the file that it is made from."""
    return {name: {"crc32": checksum(name), "row": row_of(name)} for name in list_recipes()}


if __name__ == "__main__":
    ROWS.write_text(json.dumps(table(), indent=1) + "\n")
