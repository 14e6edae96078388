"""What FP8 would do to attention, by the size of its scores: the reason why scores stay in BF16.

    python -m tests.benchmarks.fp8_attention

One head, 256 tokens of 64 numbers, causal, random queries and keys whose scores (q·k / 8) have the
standard deviation of the first column. In FP8 as `fp8_dpa` of Transformer Engine has it: q, k, v
and the probabilities in E4M3, gradients of the output and of the scores in E5M2, scores and softmax
in float32. Errors are relative to float32, in the Frobenius norm: of the output, and of the
gradients of q, k and v together for a random gradient of the output.

`doubled` is delayed scaling in the step in which queries and keys have doubled: both saturate at
the old amax. `stored` keeps the scores themselves in E4M3 without a scale, saturated at 448.
The last column is a linear layer (a product of two such operands alone), for comparison.
"""

from __future__ import annotations

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from finetune.precision.formats import E4M3, E5M2, Format, amax, cast, dequantize, scale_from_amax

TOKENS, HEAD = 256, 64
SIZES = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 128.0)
"""Standard deviations of scores."""
MODES = ("bf16", "fp8", "doubled", "stored")


def rounded(x: Tensor, fmt: Format, headroom: float = 1.0) -> Tensor:
    """Values of `x` in a format, scaled by the amax, or by an old one that is `headroom` of it."""
    scale = scale_from_amax(amax(x) * headroom, fmt)
    return dequantize(cast(x, scale, fmt), scale)


def attention(q: Tensor, k: Tensor, v: Tensor, g: Tensor, mode: str = "exact") -> list[Tensor]:
    """Output and gradients of q, k, v [T, D] for a gradient g of the output, as one mode rounds."""
    low = mode in ("fp8", "doubled")

    def operand(x: Tensor, headroom: float = 1.0, fmt: Format = E4M3) -> Tensor:
        if mode == "bf16":
            return x.bfloat16().float()
        return rounded(x, fmt, headroom) if low else x

    old = 0.5 if mode == "doubled" else 1.0
    q, k, v = operand(q, old), operand(k, old), operand(v)
    scores = (q @ k.T) / HEAD**0.5  # [T, D] @ [D, T]
    if mode == "stored":
        scores = scores.clamp(-E4M3.max, E4M3.max).to(E4M3.dtype).float()
    causal = torch.ones_like(scores, dtype=torch.bool).tril()
    p = scores.masked_fill(~causal, -torch.inf).softmax(-1)
    y = operand(p) @ v  # [T, T] @ [T, D]
    g = operand(g, fmt=E5M2)
    dp = g @ v.T  # [T, D] @ [D, T]
    ds = operand(p * (dp - (g * y).sum(-1, keepdim=True)), fmt=E5M2) / HEAD**0.5
    return [y, ds @ k, ds.T @ q, operand(p).T @ g]


def error(found: list[Tensor], exact: list[Tensor]) -> float:
    """Relative error of several tensors together."""
    wrong = sum((a - b).square().sum() for a, b in zip(found, exact, strict=True))
    return float((wrong / sum(b.square().sum() for b in exact)) ** 0.5)


def operands(size: float, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v, g [T, D] whose scores have standard deviation `size`."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v, g = torch.randn(4, TOKENS, HEAD, generator=generator).unbind()
    return q * size**0.5, k * size**0.5, v, g


def errors(size: float, mode: str) -> tuple[float, float]:
    """Error of the output, and of the gradients, means of four seeds."""
    pairs = []
    for seed in range(4):
        found, exact = (attention(*operands(size, seed), m) for m in (mode, "exact"))
        pairs.append((error(found[:1], exact[:1]), error(found[1:], exact[1:])))
    output, gradients = torch.tensor(pairs).mean(0).tolist()
    return output, gradients


def linear_error(size: float) -> float:
    """Error of q kᵀ alone, as a linear layer with these operands has it."""
    q, k, *_ = operands(size)
    return error([rounded(q, E4M3) @ rounded(k, E4M3).T], [q @ k.T])


def main() -> None:
    table = Table(box=None, pad_edge=False)
    for column in ("scores", *(f"{mode}: output, gradients" for mode in MODES), "linear layer"):
        table.add_column(column, justify="right")
    for size in SIZES:
        cells = [" ".join(f"{x:6.1%}" for x in errors(size, mode)) for mode in MODES]
        table.add_row(f"{size:g}", *cells, f"{linear_error(size):.1%}")
    Console(width=140, highlight=False).print(table)


if __name__ == "__main__":
    main()
