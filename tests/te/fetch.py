"""Get Transformer Engine's wheel (1.2 MB, Python alone) for the tests over its own code.

    python -m tests.te.fetch

It is unpacked into a folder of the checkout that git ignores and is *not* installed: the bare wheel
on the path makes `import peft` fail ("Found empty meta package"). Without it those tests are
skipped, and the others run over a stand-in (`tests.te`). Exits with 0 where no index is reached.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PINNED = Path(__file__).with_name("wheel.txt")
FOLDER = Path(__file__).parents[2] / ".cache" / "transformer-engine-2.20.2"


def is_here() -> bool:
    """True if the wheel was unpacked, completely."""
    return (FOLDER / "complete").exists()


def main() -> None:
    if is_here():
        print(f"Transformer Engine's Python is in {FOLDER}")
        return
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "download", "-q", "--retries", "1", "--timeout", "15"]
        wheel = ["--no-deps", "--require-hashes", "-r", str(PINNED), "-d", folder]
        done = subprocess.run([*pip, *wheel], check=False)
        if done.returncode:
            print("no wheel of Transformer Engine to be had: its tests use the stand-in")
            return
        FOLDER.mkdir(parents=True, exist_ok=True)
        for wheel in Path(folder).glob("*.whl"):
            zipfile.ZipFile(wheel).extractall(FOLDER)
    (FOLDER / "complete").touch()
    print(f"Transformer Engine's Python is in {FOLDER}, for tests alone")


if __name__ == "__main__":
    main()
