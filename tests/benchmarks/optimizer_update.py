"""What the update of 8-bit AdamW costs: bytes, launches, instructions and the host's time.

    python -m tests.benchmarks.optimizer_update             host time a tensor, ours and torchao's
    python -m tests.benchmarks.optimizer_update --whole     bytes, launches, floor of an 8B model
    python -m tests.benchmarks.optimizer_update --code      the kernels' machine code, for four GPUs
    python -m tests.benchmarks.optimizer_update --kernels   Inductor's code of torchao's own update
    python -m tests.benchmarks.optimizer_update --bits      bits against torchao's function
    python -m tests.benchmarks.optimizer_update --gpu       time and bandwidth of an 8B's layers

None but the last needs a GPU; all but the second need Triton. Bytes are counted on the arguments of
launches, which the code under test makes for the tensors of the model, without memory. `--code`
compiles ahead of time and reads the disassembly: registers, spills, widths of loads and stores, and
the instructions of the loop for each number (of slow paths, too, which few numbers take).
"""

from __future__ import annotations

import argparse
import functools
import math
import re
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import nn
from torchao.optim import AdamW8bit

from finetune import load_recipe
from finetune.config.schema import RunConfig
from finetune.training.helper import optimizer as folder
from finetune.training.helper.optimizer import adamw, clipping
from finetune.training.helper.replacing import replaced
from finetune.training.model import meta_model

TENSORS = 288
BANDWIDTH = 3.0e12
"""Bytes a second that such kernels reach on an H100 SXM (of 3.35): stated, not measured."""
CAPABILITIES = (89, 90, 100, 120)


# --------------------------------------------------------------------------------- the whole model


def counted_step(shapes: list[tuple[int, ...]], device: str = "meta") -> Iterator[tuple[str, Any]]:
    """(kernel, table and kind) of every launch of a clipped step of BF16 weights."""
    weights = [nn.Parameter(torch.empty(s, dtype=torch.bfloat16, device=device)) for s in shapes]
    for weight in weights:
        weight.grad = torch.empty_like(weight)
    groups = [[w for w in weights if w.dim() > 1], [w for w in weights if w.dim() == 1]]
    optimizer: Any = AdamW8bit(
        [{"params": p, "weight_decay": 0.1 * (n == 0)} for n, p in enumerate(groups) if p],
        bf16_stochastic_round=True,
    )
    update, found = adamw.Update(optimizer), []

    def update_of(table: Any, maps: Any, factor: Any, step: int, numbers: Any, kind: Any) -> None:
        found.append(("update", (table, kind)))

    def squares_of(table: Any, dtype: torch.dtype, even: bool) -> torch.Tensor:
        found.append(("squares", (table, dtype)))
        return torch.zeros(1, device=device)

    update.attach()
    launchers = SimpleNamespace(adamw=update_of, squares=squares_of)
    with (
        # The module itself cannot be imported without Triton.
        mock.patch.object(folder, "adamw_kernels", launchers, create=True),
        replaced(adamw, "runs_kernels", lambda *_: True),
        replaced(clipping, "runs_kernels", lambda *_: True),
    ):
        clipping.clip([update], weights, 1.0)
        optimizer.step()
    yield from found


def moved(name: str, table: adamw.PointerTable, kind: Any) -> int:
    """Bytes that a launch reads and writes."""
    numbers, programs = sum(table.sizes), table.owner.numel()
    own = 8 * table.rows.numel() + 4 * programs  # the table itself, read once
    if name == "squares":
        return own + kind.itemsize * numbers + 4 * programs
    # read and written: weight, two moments and their scales; read: gradient
    moment = kind.code.itemsize / (2 if kind.levels == 16 else 1)
    scales = 4 / kind.block if kind.levels else 0
    each = 2 * (kind.weight.itemsize + 2 * (moment + scales)) + kind.gradient.itemsize
    return own + int(each * numbers)


def shapes_of(config: RunConfig) -> list[tuple[int, ...]]:
    return [tuple(p.shape) for p in meta_model(config).parameters()]


def whole() -> None:
    shapes = shapes_of(load_recipe("llama_8b_full_fp8").config)
    numbers = sum(map(math.prod, shapes))
    print(f"{len(shapes)} tensors, {numbers / 1e9:.2f} billion numbers of BF16")
    for name in ("squares", "update"):
        each = [facts for kernel, facts in counted_step(shapes) if kernel == name]
        nbytes = sum(moved(name, *facts) for facts in each)
        print(
            f"{name:8} {len(each)} launches, {nbytes / numbers:.2f} bytes a number, "
            f"{nbytes / 1e9:.1f} GB, {nbytes / BANDWIDTH * 1e3:.1f} ms at "
            f"{BANDWIDTH / 1e12:.1f} TB/s (predicted)"
        )


# ----------------------------------------------------------------------------------- machine code

BF16_8 = {
    "device": torch.device("cuda"), "weight": torch.bfloat16, "gradient": torch.bfloat16,
    "code": torch.uint8, "levels": 256, "block": 256, "even": True, "chance": True,
    "decoupled": True, "settings": (),
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "8 bits": {},
    "FP8": {"code": torch.float8_e4m3fn, "levels": 8},
    "4 bits": {"levels": 16, "block": 128},
    "no blocks": {"code": torch.bfloat16, "levels": 0, "block": adamw.TILE},
    "8 bits, float32 weights": {
        "weight": torch.float32, "gradient": torch.float32, "chance": False},
    "8 bits, odd places": {"even": False},
}  # fmt: skip


def compiled(kernel: str, kind: dict[str, Any], capability: int) -> str:
    """Disassembly of a kernel, and the usage of registers, of a GPU that need not be here."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from finetune.training.helper.optimizer import adamw_kernels

    types = adamw_kernels.TYPES
    k = adamw.Kind(**BF16_8 | kind)
    function = getattr(adamw_kernels, kernel)
    if kernel == "adamw_kernel":
        pointers = ["*i64", "*i32", "*fp32", "*fp32"]
        constants = (types[k.weight], types[k.gradient], types[k.code], k.levels, k.block, k.even)
        given = [*pointers, "i32", *["fp32"] * 7]
        constants = (*constants, True, k.chance, k.decoupled)
    else:
        given, constants = ["*i64", "*i32", "*fp32"], (types[k.gradient], k.even)
    names = function.arg_names
    signature = dict(zip(names, [*given, *["constexpr"] * len(constants)], strict=True))
    values = {(len(given) + i,): value for i, value in enumerate(constants)}
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(given) if "*" in kind}
    options = {"num_warps": adamw.WARPS, "enable_fp_fusion": False}
    target = GPUTarget("cuda", capability, 32)
    binary = triton.compile(
        ASTSource(function, signature, values, aligned), target=target, options=options
    ).asm["cubin"]
    tools = Path(str(triton.__file__)).parent / "backends/nvidia/bin"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(binary)
        asked = ([tools / "cuobjdump", "-res-usage"], [tools / "nvdisasm", "-c"])
        return "".join(
            subprocess.run([*ask, file], capture_output=True, text=True, check=True).stdout
            for ask in asked
        )


def facts_of(code: str) -> dict[str, Any]:
    """Registers, spills, wide accesses and instructions of the loop a number."""
    labels, lines = dict[str, int](), list[str]()
    for line in code.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = len(lines)
        elif found := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            lines.append(re.sub(r"^@!?U?P\d+ ", "", found[1]))
    ops = Counter(line.split()[0] for line in lines)
    loops = [
        at - labels[to[1]]
        for at, line in enumerate(lines)
        if (to := re.search(r"^BRA.*?(\.L_x_\d+)", line)) and labels.get(to[1], at) < at
    ]
    widths = {
        f"{kind}.{bits}": sum(
            n for op, n in ops.items() if op.startswith(kind) and op.endswith(f".{bits}")
        )
        for kind in ("LDG", "STG")
        for bits in (128, 64)
    }
    return {
        "registers": int(re.findall(r"REG:(\d+)", code)[0]),
        "stack": int(re.findall(r"STACK:(\d+)", code)[0]),
        "spills": sum(n for op, n in ops.items() if op.startswith(("STL", "LDL"))),
        "shared": int(re.findall(r"SHARED:(\d+)", code)[0]),
        "instructions": max(loops, default=0) / adamw.EACH,
        **widths,
    }


def code() -> None:
    for capability in CAPABILITIES:
        for kernel, kinds in (("adamw_kernel", KINDS), ("squares_kernel", {"squares": {}})):
            for name, kind in kinds.items():
                facts = facts_of(compiled(kernel, kind, capability))
                print(
                    f"sm_{capability:<4}{name:24} {facts['registers']:3} registers, "
                    f"{facts['spills']} spills, {facts['shared']} bytes shared, "
                    f"{facts['instructions']:.0f} instructions a number; "
                    + ", ".join(f"{k} {facts[k]}" for k in facts if "." in k)
                )


# ------------------------------------------------------------------------------------- the others


def backend_of(take: Callable[[Any, Any], None]) -> Any:
    """A backend of `torch.compile` that gives graphs and inputs away, and computes nothing."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.decomposition import select_decomp_table

    def compiled(graph: Any, inputs: Any) -> Callable[..., Any]:
        take(graph, inputs)
        return lambda *_: ()

    return aot_autograd(
        fw_compiler=compiled, inference_compiler=compiled, decompositions=select_decomp_table(),
        keep_inference_input_mutations=True,
    )  # fmt: skip


def optimizer_of(tensors: int, *shape: int) -> AdamW8bit:
    weights = [nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16)) for _ in range(tensors)]
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    return AdamW8bit(weights, lr=1e-3, bf16_stochastic_round=tensors > 1)


def host_time(steps: int) -> None:
    """All but the launches and the code that Inductor would write."""
    from finetune.training.helper.optimizer import adamw_kernels

    compiler = functools.partial(torch.compile, backend=backend_of(lambda *_: None))
    torchao, ours = optimizer_of(TENSORS, 64, 64), optimizer_of(TENSORS, 64, 64)
    adamw.Update(ours).attach()
    with (
        replaced(torch, "compile", compiler),
        replaced(adamw_kernels, "adamw", lambda *_: None),
        replaced(adamw, "runs_kernels", lambda *_: True),
        replaced(adamw, "in_host_memory", lambda _: False),
    ):
        taken = in_turn({"torchao": torchao, "ours": ours}, steps)
    for name, each in taken.items():
        print(f"{name:8} {statistics.median(each):.4f} ms of host time a tensor")
    ratios = (b / a for a, b in zip(*taken.values(), strict=True))
    print(f"ours / torchao {statistics.median(ratios):.3f}")


def in_turn(optimizers: dict[str, AdamW8bit], steps: int) -> dict[str, list[float]]:
    """Milliseconds of CPU time a tensor in each step, without the first three."""
    taken: dict[str, list[float]] = {name: [] for name in optimizers}
    for _ in range(steps + 3):
        for name, optimizer in optimizers.items():
            started = time.process_time()
            optimizer.step()
            taken[name].append((time.process_time() - started) / TENSORS * 1e3)
    return {name: each[3:] for name, each in taken.items()}


def kernels() -> None:
    """Inductor's code of torchao's update of a weight [4096, 4096], rounded to nearest."""
    from tests.benchmarks import inductor_code

    graphs: list[tuple[Any, Any]] = []
    compiler = functools.partial(torch.compile, backend=backend_of(lambda *x: graphs.append(x)))
    with replaced(torch, "compile", compiler):
        optimizer_of(1, 4096, 4096).step()
    found = inductor_code.count(inductor_code.code_of(*graphs[0], "forward"))
    print(f"torchao  {found['kernels']} kernels, {found['bytes'] / 2**24:.1f} bytes a number")


def gpu() -> None:
    """Milliseconds of clipping and of the step, of as many layers of an 8B as fit."""
    layer = [(4096, 4096)] * 2 + [(1024, 4096)] * 2 + [(14336, 4096)] * 3 + [(4096,)] * 2
    room = torch.cuda.mem_get_info()[0] / (6.5 * sum(torch.Size(s).numel() for s in layer))
    shapes = layer * min(32, int(room))
    weights = [nn.Parameter(torch.randn(s, device="cuda").bfloat16()) for s in shapes]
    numbers = sum(w.numel() for w in weights)
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    optimizer = AdamW8bit(weights, bf16_stochastic_round=True)
    update = adamw.Update(optimizer)
    update.attach()
    parts: dict[str, tuple[Callable[[], Any], float]] = {
        "squares": (lambda: clipping.clip([update], weights, 1.0), 2.0),
        "update": (optimizer.step, 10.06),
    }
    taken: dict[str, list[float]] = {name: [] for name in parts}
    for _ in range(13):
        for name, (run, _) in parts.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            torch.cuda.synchronize()
            taken[name].append(begin.elapsed_time(end))
    for name, (_, nbytes) in parts.items():
        ms = statistics.median(taken[name][3:])
        print(
            f"{name:8} {ms:.2f} ms of {numbers / 1e9:.2f} billion numbers (host included), "
            f"{nbytes * numbers / ms / 1e9:.2f} TB/s; {ms * 8.03e9 / numbers:.1f} ms for an 8B"
        )


def bits() -> None:
    worker = [sys.executable, "-W", "ignore", "-m", "tests.update_worker"]
    print(subprocess.run(worker, capture_output=True, text=True, check=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--steps", type=int, default=30)
    what = parser.add_mutually_exclusive_group()
    for run in (whole, code, kernels, bits, gpu):
        what.add_argument(f"--{run.__name__}", dest="run", action="store_const", const=run)
    args = parser.parse_args()
    warnings.simplefilter("ignore")  # torchao's states have no hash for torch's caches
    if args.run is None:
        host_time(args.steps)
    else:
        args.run()


if __name__ == "__main__":
    main()
