"""The lock: versions of all libraries, for Python 3.11 to 3.14, that both README commands install.

Files of constraints, which pip and uv read alike. `requirements/libraries.txt` has all but torch,
which `lock.txt` and `gpu.txt` add to it, for machines without a GPU and with one:

    pip install -e '.[test]' -c requirements/lock.txt
    python -m tests.lock          # exits with 1 where what is installed differs from the lock
    python -m tests.lock renew    # the newest versions within pyproject.toml's ranges; needs uv
    python -m tests.lock ranges   # ranges of the libraries whose minor versions change what we call

CUDA's libraries and Triton are left out: a CUDA build of torch names its own, a CPU build none.
"""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "requirements"
TORCH = {
    "lock.txt": ("2.13.0", "a CPU: its build is quick to get"),
    "gpu.txt": ("2.15.0", "a GPU: cuDNN's attention over packed documents"),
}
"""File -> torch that it adds to `libraries.txt`, and on what and why."""
HELD = {
    "transformers==5.23.0": "5.24 adds adapters of its own with peft 0.22 only, not yet released",
}
"""What `renew` keeps, and why."""
EXTRAS = ("dev", "docs", "energy", "notebooks", "tracking")
"""`dev` has `test` and what that needs. Not locked: `te` and `liger`, which build or need CUDA."""
_OF_CUDA = re.compile(r"(nvidia(?!-ml-py)|cuda)-|triton=")


def locked(file: str = "lock.txt") -> dict[str, str]:
    """Distribution -> version for this Python and machine."""
    texts = [(FOLDER / each).read_text(encoding="utf-8") for each in ("libraries.txt", file)]
    lines = "\n".join(texts).splitlines()
    pins = [Requirement(line) for line in lines if line and line[0] not in "#-"]
    return {
        canonicalize_name(each.name): str(each.specifier).removeprefix("==")
        for each in pins
        if each.marker is None or each.marker.evaluate()
    }


def differences() -> Iterator[str]:
    """What is installed in another version than the lock's, or is not in it at all."""
    pins = locked()
    for each in importlib.metadata.distributions():
        name = canonicalize_name(each.metadata["Name"])
        of_cuda = _OF_CUDA.match(f"{name}=")
        if name in ("pip", "setuptools", "wheel", "uv", "fp8-finetune") or of_cuda:
            continue
        found, pin = each.version, pins.get(name, "no version of it")
        if pin not in (found, found.partition("+")[0]):  # 2.13.0+cpu is a build of 2.13.0
            yield f"{name} {found} is installed, the lock has {pin}"


def renew() -> None:
    """Write the lock again."""
    extras = [word for extra in EXTRAS for word in ("--extra", extra)]
    command = ["uv", "pip", "compile", "--quiet", "--universal", "--no-annotate", "--no-header"]
    command += [*extras, "--python-version", "3.11", "pyproject.toml", "-"]
    torch = f"torch=={TORCH['lock.txt'][0]}"
    held = "\n".join([*HELD, torch])
    pins = subprocess.run(
        command, cwd=ROOT, check=True, text=True, capture_output=True, input=held
    ).stdout
    kept = [line for line in pins.splitlines() if not _OF_CUDA.match(line) and line != torch]
    head = [
        "# Made by `python -m tests.lock renew`. Constraints for pip and uv; see tests/lock.py."
    ]
    head += [f"# held: {pin}, {why}" for pin, why in HELD.items()]
    (FOLDER / "libraries.txt").write_text("\n".join([*head, *kept, ""]), encoding="utf-8")
    for file, (version, why) in TORCH.items():
        text = f"# The lock; torch on {why}.\n-c libraries.txt\ntorch=={version}\n"
        (FOLDER / file).write_text(text, encoding="utf-8")


def ranges() -> Iterator[str]:
    """`transformers<5.25,>=5.23` of each library that has broken something of ours, but torch."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for each in map(Requirement, project["dependencies"]):
        if each.name in ("transformers", "trl", "peft", "accelerate", "datasets", "torchao"):
            yield str(each)


if __name__ == "__main__":
    if sys.argv[1:] == ["renew"]:
        renew()
    elif sys.argv[1:] == ["ranges"]:
        print(*ranges(), sep="\n")
    else:
        found = [*differences()]
        print(*(found or ["installed is what the lock says"]), sep="\n")
        sys.exit(bool(found))
