"""Our Triton kernels, compiled ahead of time for GPUs that are not here: registers and spills.

    python -m tests.ahead [--capabilities 89 90 100 120]

Needs `pip install triton` beside a CPU build of torch. Prints a line for each kernel and compute
capability: registers of a thread, bytes of stack and of spills (none is the goal), and the widest
access to memory. Its exit code is 1 if anything spills.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

CAPABILITIES = (89, 90, 100, 120)


class Case(NamedTuple):
    """A launch: types of arguments that are no constants, constants, warps."""

    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    warps: int

    @property
    def label(self) -> str:
        on = [name for name, value in self.constants.items() if value is True]
        return " ".join([self.kernel.__name__.removesuffix("_kernel"), *on])


def cases() -> list[Case]:
    """Launches of the largest tiles: rows of 16,384 numbers in BF16."""
    from finetune.precision.numbers import triton_kernels as ours

    logits = {"z": "*bf16", "targets": "*i64"}
    mapped = {"scale": "fp32", "softcap": "fp32", "inv_t": "fp32"}
    sizes = {"z_stride": "i32", "start": "i32", "columns": "i32"}
    block, warps = ours.row_block(ours.WHOLE)
    kept = {"entropy": True, "squares": True, "mean": True, "top1": True}
    found = []
    beside = {"statistics": "*fp32", "fold": "*fp32", "codes": "*fp8e4nv", "inverse": "*fp32"}
    for caps in (False, True):
        for does in ("", "weigh", "casts"):
            flags = {name: does == name for name in ("weigh", "casts")}
            flags |= dict.fromkeys(("folds", "pow2"), does == "casts")
            each = logits | beside | {"s_stride": "i32"} | sizes | mapped
            constants = {"block": ours.LOGITS[0], "caps": caps, **kept, **flags}
            found.append(Case(ours.observe_logits_kernel, each, constants, ours.LOGITS[1]))
        each = logits | dict.fromkeys(("log_z", "entropy", "g_probs", "g_entropy"), "*fp32")
        constants = {"block": ours.LOGITS[0], "caps": caps, "probs": True, "entropies": True}
        each |= sizes | mapped
        found.append(Case(ours.grade_logits_kernel, each, constants, ours.LOGITS[1]))
    row = {"x": "*bf16", "fold": "*fp32", "codes": "*fp8e4nv", "inverse": "*fp32", "stride": "i32"}
    constants = {"length": ours.WHOLE, "block": block, "folds": True, "pow2": True}
    found.append(Case(ours.cast_rows_kernel, row, constants, warps))
    return found + _under_one_scale(ours)


def _under_one_scale(ours: Any) -> list[Case]:
    """Both launches of each cast with one scale per tensor, in E5M2 if of gradients."""
    from triton.language import float8e4nv, float8e5

    def scales(*names: str) -> dict[str, str]:
        each = ("guess", "scale", "inverse")
        return {f"{n}_{e}" if n else e: "*fp32" for n in names for e in each}

    (tall, wide), found = ours.SQUARE, list[Case]()
    matrix = {"rows": "i32", "columns": "i32", "scratch": "*i32"}
    e4m3, e5m2 = "*fp8e4nv", "*fp8e5"
    for settles in (False, True):
        shared = {"largest": 448.0, "floor": 448.0 * 2.0**-126, "pow2": True, "settles": settles}
        tile = shared | {"tall": tall, "wide": wide}
        for turns in (False, True):
            each = {"x": "*bf16", "codes": e4m3, "turned": e4m3, "stride": "i32"}
            constants = tile | {"kind": float8e4nv, "plain": True, "turns": turns}
            each |= matrix | scales("")
            found.append(Case(ours.cast_whole_kernel, each, constants, ours.WARPS))
        each = {"gate": "*bf16", "up": "*bf16", "codes": e4m3, "scratch": "*i32", "numbers": "i32"}
        constants = shared | {"kind": float8e4nv, "block": ours.SPAN}
        found.append(Case(ours.swiglu_cast_kernel, each | scales(""), constants, ours.WARPS))
        each = dict.fromkeys(("dy", "gate", "up"), "*bf16") | {"act_scale": "*fp32", "act_t": e4m3}
        each |= dict.fromkeys(("dgate", "dgate_t", "dup", "dup_t"), e5m2)
        each |= matrix | scales("gate", "up")
        constants = tile | {"kind": float8e5, "act_kind": float8e4nv}
        found.append(Case(ours.swiglu_backward_cast_kernel, each, constants, ours.WARPS))
    return found


def compiled(case: Case, capability: int) -> dict[str, int]:
    """Registers, stack, spills and widest access (bits) of one kernel on one GPU."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = case.kernel.arg_names
    signature = {n: case.signature.get(n, "constexpr") for n in names}
    constants = {(names.index(n),): value for n, value in case.constants.items()}
    # As a launch finds them: pointers, and strides of whole rows, are multiples of 16.
    aligned = {
        (names.index(n),): [["tt.divisibility", 16]]
        for n, kind in case.signature.items()
        if kind.startswith("*")
        or n.endswith("stride")
        or n in ("columns", "start", "rows", "numbers")
    }
    source = ASTSource(case.kernel, signature, constants, aligned)
    options = {"num_warps": case.warps, "enable_fp_fusion": False}
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    tools = Path(str(triton.__file__)).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        usage = _run(tools / "cuobjdump", "-res-usage", file.name)
        code = _run(tools / "nvdisasm", "-c", file.name)
    registers, stack = (int(re.search(rf"{n}:(\d+)", usage)[1]) for n in ("REG", "STACK"))  # pyright: ignore
    widths = [int(bits) for bits in re.findall(r"\b(?:LDG|STG)\.E\S*?\.(64|128)", code)]
    spills = len(re.findall(r"\b(?:LDL|STL)", code))
    return {
        "registers": registers,
        "stack": stack,
        "spills": spills,
        "bits": max(widths, default=32),
    }


def _run(*command: Any) -> str:
    return subprocess.run(
        list(map(str, command)), capture_output=True, text=True, check=True
    ).stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--capabilities", type=int, nargs="+", default=CAPABILITIES)
    spilled = 0
    for capability in parser.parse_args().capabilities:
        for case in cases():
            found = compiled(case, capability)
            spilled += found["spills"]
            print(f"sm_{capability} {case.label}: {case.warps} warps", *found.items())
    return int(spilled > 0)


if __name__ == "__main__":
    sys.exit(main())
