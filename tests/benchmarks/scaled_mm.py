"""CPU seconds of `torch._scaled_mm` by shape, layout, output type and kind of scale.

    python -m tests.benchmarks.scaled_mm [--shapes 64x64x64,256x128x128]
    ONEDNN_VERBOSE=1 python -m tests.benchmarks.scaled_mm --shapes 64x64x64

One process, one thread, CPU time (`time.process_time`), so that other processes do not count. With
one scale per operand torch hands the product to oneDNN where that is enabled, and
`ONEDNN_VERBOSE=1` prints the kernel that oneDNN takes: `ref` is a scalar loop. With a scale per
row, or with oneDNN disabled, torch does not call oneDNN's FP8 kernels.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable

import torch

OUTPUTS = (torch.bfloat16, torch.float32, torch.float16)
LAYOUTS = {"column-major": lambda w: w.t(), "row-major": lambda w: w.t().contiguous()}


def milliseconds(call: Callable[[], object]) -> float:
    """CPU time of one call, the least of three after a first one."""
    call()
    times = []
    for _ in range(3):
        start = time.process_time()
        call()
        times.append(time.process_time() - start)
    return min(times) * 1e3


def rows(m: int, k: int, n: int) -> list[str]:
    """Markdown rows for [m, k] @ [k, n]."""
    a, w = (torch.randn(size, k).to(torch.float8_e4m3fn) for size in (m, n))
    one = (torch.tensor(1.0),) * 2
    each = (torch.ones(m, 1), torch.ones(1, n))
    x, y = a.float(), w.float().t()
    float32 = milliseconds(lambda: x @ y)
    lines = []
    for (layout, turn), out in itertools.product(LAYOUTS.items(), OUTPUTS):
        b = turn(w)

        def product(scales: tuple, b: torch.Tensor = b, out: torch.dtype = out) -> float:
            return milliseconds(lambda: torch._scaled_mm(a, b, *scales, out_dtype=out))

        times = [product(one), product(each)]
        with torch.backends.mkldnn.flags(enabled=False):
            times.append(product(one))
        shown = " | ".join(f"{value:,.2f}" for value in (*times, float32))
        lines.append(f"| {m} x {k} x {n} | {layout} | {str(out)[6:]} | {shown} |")
    return lines


def main() -> None:
    """Print the table for each shape."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shapes", default="64x64x64,64x256x64,256x128x128")
    torch.set_num_threads(1)
    times = "one scale | scale per row | one scale, no oneDNN | float32 `mm`"
    print(f"| [m, k] @ [k, n] | layout of b | output | {times} |\n" + "|---" * 7 + "|")
    for shape in parser.parse_args().shapes.split(","):
        print("\n".join(rows(*map(int, shape.split("x")))), flush=True)


if __name__ == "__main__":
    main()
