"""Rates of single kernels on this device: FP8 GEMMs of an 8B layer, and attention over documents.

    python -m tests.gpu.hour.kernels gemm
    python -m tests.gpu.hour.kernels attention

*GEMM.* fprop and dgrad of the linear layers of Llama 3.1 8B have seven shapes [M, K] @ [K, N]. Each
runs in `torch._scaled_mm` with a scale per row or per tensor, with fast accumulation (Hopper adds
up in about 14 bits) and without, and in BF16. Operands are cast before and the second one is
column-major, so that this is the product alone, without casts and transposes.

*Attention.* Causal, within documents of one length that stand behind one another: 32 query heads of
128, 8 key heads, BF16, forward and backward. TFLOP/s count pairs that a query may see, so that a
kernel that also computes the others shows less. A kernel that this machine lacks is a reason.

Times are medians of half a second by CUDA events, the L2 cache cleared before each
(`triton.testing.do_bench`); a CPU takes one call, which only shows that it runs.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from finetune.hardware.device import this_device
from finetune.hardware.gpus import find_gpu

E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
SHAPES = {
    (4096, 4096): "q, o, and their dgrad",
    (4096, 1024): "k, v",
    (1024, 4096): "dgrad of k, v",
    (4096, 14336): "gate, up; dgrad of down",
    (14336, 4096): "down; dgrad of gate, up",
    (4096, 128256): "head",
    (128256, 4096): "dgrad of head",
}
"""(K, N) of the products of a layer and of the output head."""
TOKENS = 8192
HEADS, KEY_HEADS, HEAD_DIM = 32, 8, 128
DOCUMENTS = {2048: 4, 256: 32}
"""Tokens of a document -> documents."""
NO_KERNELS = ("Activity Buffer", "Command Buffer", "Lazy Function", "Memset", "Memcpy")
"""Beginnings of events of the profiler that are listed beside kernels."""
Found = dict[str, Any]


def measure(call: Callable[[], Any], device: str) -> float:
    """Seconds of one call."""
    if device == "cuda":
        from triton.testing import do_bench

        return do_bench(call, warmup=100, rep=500, return_mode="median") / 1e3
    call()
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def longest_kernel(call: Callable[[], Any], device: str) -> Found:
    """Name of the kernel that takes most of a call, which tells the library that multiplied."""
    activity, kind = (getattr(x, device.upper()) for x in (ProfilerActivity, DeviceType))
    with profile(activities=[activity]) as seen:
        call()
        if device == "cuda":
            torch.cuda.synchronize()
    events = [
        event
        for event in seen.events() or ()
        if event.device_type == kind and not event.name.startswith(NO_KERNELS)
    ]
    longest = max(events, key=lambda event: event.time_range.elapsed_us(), default=None)
    return {"kernel": longest.name[:80]} if longest else {}


def tried(act: Callable[..., Found], *arguments: Any) -> Found:
    """Figures that `act` gives, or the first line of the reason why it cannot."""
    try:
        return act(*arguments)
    except (ImportError, RuntimeError, TypeError, ValueError) as error:  # also out of memory
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return {"reason": lines[0][:200]}


# -------------------------------------------------------------------------------------------- GEMM


def products(m: int, k: int, n: int, device: str) -> dict[str, Callable[[], Tensor]]:
    """[M, K] @ [K, N] in each way."""
    a, w = (torch.randn(rows, k, device=device, dtype=BF16) for rows in (m, n))
    codes, columns = a.to(E4M3), w.to(E4M3).t()
    one = torch.ones((), device=device)
    scales = {
        "rowwise": (torch.ones(m, 1, device=device), torch.ones(1, n, device=device)),
        "tensorwise": (one, one),
    }
    return {
        f"{name}, {'fast' if fast else 'precise'}": functools.partial(
            torch._scaled_mm, codes, columns, *pair, out_dtype=BF16, use_fast_accum=fast
        )
        for name, pair in scales.items()
        for fast in (True, False)
    } | {"BF16": lambda: a @ w.t()}


def gemm_rates(device: str, shrink: int) -> tuple[list[Found], str]:
    """A row for each shape; markdown."""
    rows = []
    for (k, n), use in SHAPES.items():
        shape = [max(16, size // shrink // 16 * 16) for size in (TOKENS, k, n)]
        ways = products(*shape, device)
        rates = {way: tried(_gemm_rate, shape, call, device) for way, call in ways.items()}
        rows.append({"shape": shape, "use": use, "rates": rates})
    return rows, gemm_table(rows)


def _gemm_rate(shape: list[int], product: Callable[[], Tensor], device: str) -> Found:
    tflops = 2 * math.prod(shape) / measure(product, device) / 1e12
    return {"tflops": tflops, **tried(longest_kernel, product, device)}


def gemm_table(rows: list[Found]) -> str:
    """Rates of each shape; below them the kernels, the GPU's peaks and what could not run."""
    ways = list(rows[0]["rates"])
    lines = [["TFLOP/s of [M, K] @ [K, N]", "GEMM", *ways, f"{ways[0]} / {ways[-1]}"]]
    for row in rows:
        rates = [row["rates"][way].get("tflops") for way in ways]
        ratio = f"{rates[0] / rates[-1]:.2f}x" if rates[0] and rates[-1] else ""
        cells = ["not measured" if rate is None else f"{rate:,.4g}" for rate in rates]
        lines.append([" x ".join(map(str, row["shape"])), row["use"], *cells, ratio])
    notes = []
    for way in ways:
        found = [row["rates"][way] for row in rows]
        names = dict.fromkeys(f"`{rate['kernel']}`" for rate in found if rate.get("kernel"))
        reasons = dict.fromkeys(rate["reason"] for rate in found if "reason" in rate)
        notes += [f"{way}: {', '.join(names)}"] if names else []
        notes += [f"{way}: {reason}" for reason in reasons]
    gpu = find_gpu(this_device())
    if gpu is not None:
        peaks = ", ".join(f"{kind.upper()} {rate:,.0f}" for kind, rate in gpu.tflops.items())
        notes.append(f"Dense peaks of {gpu.name}, TFLOP/s: {peaks}")
    return table(lines, notes)


# --------------------------------------------------------------------------------------- attention


def kernels(length: int, documents: int, device: str) -> dict[str, Callable[..., Tensor]]:
    """Name -> function of q [T, H, D] and k, v [T, Hkv, D] that gives the output [T, H, D]."""
    tokens = length * documents
    ends = torch.arange(0, tokens + 1, length, device=device, dtype=torch.int32)
    number = torch.arange(tokens, device=device)
    # As packed rows have it, [1, 1, T, T]: True where a query sees a key.
    sees = (number[:, None] // length == number // length) & (number[:, None] >= number)
    layer: Any = torch.nn.Module()
    layer.num_key_value_groups, layer.is_causal = HEADS // KEY_HEADS, True

    def sdpa(*qkv: Tensor, rows: int = documents, mask: Tensor | None = None) -> Tensor:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        q, k, v = (x.unflatten(0, (rows, -1)).transpose(1, 2) for x in qkv)  # [B, H, L, D]
        return sdpa_attention_forward(layer, q, k, v, mask)[0].flatten(0, 1)  # type: ignore

    def with_backend(backend: SDPBackend, *qkv: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return sdpa(*qkv)

    def masked(*qkv: Tensor) -> Tensor:
        return sdpa(*qkv, rows=1, mask=sees[None, None])

    def varlen(*qkv: Tensor) -> Tensor:
        from finetune.training.helper.varlen import varlen_attention_forward

        q, k, v = (x.transpose(0, 1)[None] for x in qkv)  # [1, H, T, D]
        ends_of = {"cu_seq_lens_q": ends, "max_length_q": length}
        return varlen_attention_forward(layer, q, k, v, None, **ends_of)[0][0]  # type: ignore

    def package(module: str, *qkv: Tensor) -> Tensor:
        function = importlib.import_module(module).flash_attn_varlen_func
        out = function(*qkv, ends, ends, length, length, causal=True)
        return out[0] if isinstance(out, tuple) else out

    return {
        "SDPA without a mask, a row per document": sdpa,
        "SDPA, FlashAttention": functools.partial(with_backend, SDPBackend.FLASH_ATTENTION),
        "SDPA, cuDNN": functools.partial(with_backend, SDPBackend.CUDNN_ATTENTION),
        "SDPA with a mask of T x T, one packed row": masked,
        "varlen (`model.attention`)": varlen,
        "flash-attn (FlashAttention-2)": functools.partial(package, "flash_attn"),
        "flash-attn-3": functools.partial(package, "flash_attn_interface"),
    }


def attention_rates(device: str, shrink: int) -> tuple[list[Found], str]:
    """A row for each kernel and length of documents; markdown."""
    rows = []
    for full, documents in DOCUMENTS.items():
        length = max(16, full // shrink)
        torch.manual_seed(0)
        qkv = tuple(
            torch.randn(length * documents, heads, HEAD_DIM, device=device, dtype=BF16)
            for heads in (HEADS, KEY_HEADS, KEY_HEADS)
        )
        first, *others = kernels(length, documents, device).items()
        expected = first[1](*qkv)
        for name, kernel in (first, *others):
            found = tried(_attention_rate, kernel, qkv, expected, length, device)
            rows.append({"kernel": name, "documents": [documents, length], **found})
    head = ["documents x tokens", "kernel", "ms forward", "ms both", "TFLOP/s", "from the first"]
    lines = [head]
    for row in rows:
        cells = [" x ".join(map(str, row["documents"])), row["kernel"]]
        if "reason" in row:
            lines.append([*cells, f"not measured: {row['reason']}", "", "", ""])
        else:
            times = [f"{row[key] * 1e3:.3g}" for key in ("forward_s", "both_s")]
            lines.append([*cells, *times, f"{row['tflops']:.4g}", f"{row['error']:.1e}"])
    return rows, table(lines, [])


def _attention_rate(
    kernel: Callable[..., Tensor],
    qkv: tuple[Tensor, ...],
    expected: Tensor,
    length: int,
    device: str,
) -> Found:
    qkv = tuple(x.detach().requires_grad_() for x in qkv)
    g = torch.randn_like(expected)
    error = (kernel(*qkv) - expected).norm() / expected.norm()
    forward = measure(lambda: kernel(*qkv), device)
    both = measure(lambda: torch.autograd.grad(kernel(*qkv), qkv, g), device)
    pairs = len(expected) * (length + 1) / 2
    # Two products forward, five backward: scores again, dP and dV, dQ and dK.
    tflops = 7 * 2 * pairs * HEADS * HEAD_DIM / both / 1e12
    return {"forward_s": forward, "both_s": both, "tflops": tflops, "error": error.item()}


def why_nothing(rows: list[Found]) -> str:
    """The reason of the first figure if there is none at all, else ""."""
    found = [rate for row in rows for rate in row.get("rates", {"": row}).values()]
    return "" if any("tflops" in rate for rate in found) else found[0]["reason"]


def table(lines: list[list[str]], notes: list[str]) -> str:
    """Markdown of a head, rows and sentences below."""
    clean = [[cell.replace("|", "/") for cell in line] for line in lines]
    clean.insert(1, ["---"] * len(lines[0]))
    text = "\n".join(f"| {' | '.join(line)} |" for line in clean)
    return "\n\n".join([text, *notes])


def main() -> None:
    """Measure one kind, and print its table."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("kind", choices=("gemm", "attention"))
    parser.add_argument("--shrink", type=int, default=1, help="divide all sizes, for a rehearsal")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    device = this_device().kind
    act = {"gemm": gemm_rates, "attention": attention_rates}[args.kind]
    rows, markdown = act("cuda" if device == "cuda" else "cpu", args.shrink)
    found = {"rows": rows, "markdown": markdown, "failed": why_nothing(rows)}
    print(json.dumps(found) if args.json else markdown)


if __name__ == "__main__":
    main()
