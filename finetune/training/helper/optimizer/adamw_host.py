"""The update of `adamw` in host memory: C++ of a few seconds' compiling, kept for later processes.

`adamw_host.cpp` is one program for all types and shapes, for the processor that it is compiled on.
Inductor's code of the same arithmetic takes half a minute to compile, three times as long to run,
and Python's lock while it does: a thread that updates would hold up the one that fills the GPU.
ctypes lets go of the lock. Measured: `python -m tests.benchmarks.host_update`.

It lies where torch keeps compiled extensions (`TORCH_EXTENSIONS_DIR`), under a name made of source,
flags and what the compiler defines for this processor.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SOURCE = Path(__file__).with_name("adamw_host.cpp")
NATIVE = "-march=native" if platform.machine() in ("x86_64", "AMD64") else "-mcpu=native"
FLAGS = (
    "-O3", NATIVE, "-std=c++17", "-fPIC", "-shared", "-pthread",
    # Bits are those of IEEE 754; loops that nothing traps or reports errors in become vectors.
    "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math",
)  # fmt: skip
TYPES = {torch.float32: 0, torch.bfloat16: 1}
"""Of weights, gradients and moments without blocks: `Type` there."""
LEAST = 2**22
"""Numbers of an optimizer from which on it is compiled, which takes about two seconds: as long as
torchao's function takes for them.
"""


class Places(ctypes.Structure):
    """Addresses and counters, in the order of `adamw.Launched.columns`."""

    _fields_ = [("columns", ctypes.c_int64 * 8), ("numbers", ctypes.c_int64),
                ("step", ctypes.c_int64)]  # fmt: skip


class UpdateJob(ctypes.Structure):
    """`Job` there."""

    _fields_ = [
        ("at", Places), ("by", ctypes.c_float * 8), ("kind", ctypes.c_int32 * 7),
        ("maps", ctypes.c_void_p),
    ]  # fmt: skip


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled update; None, with a warning, where nothing here compiles it."""
    try:
        found = ctypes.CDLL(str(_compiled()))
    except (OSError, RuntimeError, ImportError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        warnings.warn(
            "weights in host memory are updated by torchao's own function, which takes a hundred "
            f"times as long: no C++ compiler here compiles the update ({''.join(said[:1])}). "
            "Fix: install g++ or clang++, or give its name by CXX",
            stacklevel=2,
        )
        return None
    found.squares.restype = ctypes.c_double
    return found


def _compiled() -> Path:
    """The file of the library, compiled if nobody has before.

    Raises:
        OSError: no compiler, or no place to write to.
        subprocess.CalledProcessError: the compiler refuses.
    """
    from torch.utils import cpp_extension

    compiler = cpp_extension.get_cxx_compiler()

    def run(*arguments: Any) -> str:
        asked = [compiler, *map(str, arguments)]
        return subprocess.run(asked, check=True, capture_output=True, text=True, input="").stdout

    target = run(*FLAGS, "-dM", "-E", "-x", "c++", "-")  # its version and every instruction set
    seed = "\n".join((SOURCE.read_text(encoding="utf-8"), *FLAGS, target))
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root()
    kept = Path(root) / f"finetune_adamw_{hashlib.sha256(seed.encode()).hexdigest()[:16]}.so"
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=kept.parent) as folder:
            made = Path(folder) / kept.name
            run(*FLAGS, "-o", made, SOURCE)
            shutil.move(made, kept)  # whole at once: processes may compile side by side
    return kept


def updates(types: Sequence[torch.dtype]) -> bool:
    """True if the compiled update is there and knows the types of weights, gradients, moments."""
    return all(one in TYPES for one in types) and library() is not None


def adamw(
    columns: list[int], count: int, maps: Tensor, factor: Tensor | None, step: int,
    numbers: Sequence[float], kind: Any,
) -> None:  # fmt: skip
    """Update a tensor of `count` numbers, by as many threads as torch has.

    Args:
        columns: see `adamw.Launched`.
        numbers: see `adamw_kernels.adamw_kernel`, from `lr` to `bias2`.
        kind: `adamw.Kind` of the tensor.
    """
    by = (ctypes.c_float * 8)(*numbers, 1.0 if factor is None else float(factor))
    types = (TYPES[kind.weight], TYPES[kind.gradient], TYPES.get(kind.code, 0))
    facts = (ctypes.c_int32 * 7)(*types, kind.levels, kind.block, kind.chance, kind.decoupled)
    places = Places((ctypes.c_int64 * 8)(*columns), count, step)
    job = UpdateJob(places, by, facts, maps.data_ptr())
    found = library()
    assert found is not None, "`updates` was not asked"
    found.adamw(ctypes.byref(job), torch.get_num_threads())


def squares(x: Tensor) -> Tensor:
    """Sum of squares of a contiguous tensor, float32, in an order that threads do not change."""
    found = library() if x.dtype in TYPES else None
    if found is None:
        return torch.linalg.vector_norm(x, dtype=torch.float32).square()
    arguments = (ctypes.c_int64(x.data_ptr()), TYPES[x.dtype], ctypes.c_int64(x.numel()))
    return torch.tensor(found.squares(*arguments, torch.get_num_threads()))
