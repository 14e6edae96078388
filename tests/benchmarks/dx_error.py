"""How wrong is the input gradient of a frozen FP8 layer? Six kinds of operands, six ways.

    python -m tests.benchmarks.dx_error [--seeds 3] [--rank 8]

*First table.* `dx = g W` of one layer, M = 512 tokens, N = 1024 outputs, K = 768 inputs. Operands
are BF16, as in training; the error is that of the FP8 product, in Frobenius norm, over the float32
product of the same operands. Each way is the code that runs, not a model of it:

    folded          ours: E4M3 weight, one scale per output channel, folded into g, cast per token
    second copy     a copy of the weight cast for dgrad alone, one scale per input channel
    BF16 dgrad      the codes of `folded` dequantized, a BF16 product (`high_gemms: [dgrad]`)
    per tensor      ours with one scale per tensor: E4M3 weight, E4M3 gradient
    torchao e5m2    torchao's default recipe: one scale per tensor, E4M3 weight, E5M2 gradient
    torchao rows    torchao's row-wise recipe: casts the BF16 weight anew for dgrad, by columns

Operands: `gaussian`; `heavy tails`: Student t with 3 degrees of freedom, weight and gradient;
`channels`: 1 % of the output channels of the weight are 50 times as large; `tokens`: 1 % of the
rows of g are 100 times as large; `log-normal`: the scale of every output channel of the weight, and
of its gradient, is exp of a normal number of deviation 1; `real`: the packaged Llama in a backward
over packaged rows, median over its 28 layers (and the worst).

*Second table.* Gradients of A and B of the packaged Llama's adapters, whole model forward and
backward, FP8 base against BF16 on the same (dequantized) weights: what FP8 multiplication and the
FP8 copy of x cost together. B is drawn at random: at zero it hides the gradient of A.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torchao.float8 import Float8LinearConfig
from torchao.float8.float8_linear import Float8Linear

from finetune.config.paths import ASSETS, TINY_LLAMA
from finetune.config.schema import PrecisionConfig
from finetune.precision.convert import apply, revert
from finetune.precision.planner import plan
from finetune.precision.weights import Arithmetic, cast, dgrad, multiply, quantize_weight, tile_of

M, N, K = 512, 1024, 768
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
Operands = tuple[Tensor, Tensor]


# ---------------------------------------------------------------------------------------- operands


def synthetic(kind: str, seed: int) -> Operands:
    """g [M, N] and w [N, K] in BF16."""
    torch.manual_seed(seed)
    g, w = torch.randn(M, N), torch.randn(N, K)
    match kind:
        case "gaussian":
            pass
        case "heavy tails":
            student = torch.distributions.StudentT(3.0)
            g, w = student.sample((M, N)), student.sample((N, K))
        case "channels":
            w[torch.randperm(N)[: N // 100]] *= 50
        case "tokens":
            g[torch.randperm(M)[: M // 100]] *= 100
        case "log-normal":
            w *= torch.randn(N, 1).exp()
            g *= torch.randn(1, N).exp()
        case _:
            raise ValueError(kind)
    return (g / N).bfloat16(), (w * 0.02).bfloat16()


SYNTHETIC = ("gaussian", "heavy tails", "channels", "tokens", "log-normal")


def packaged_rows(rows: int = 8, length: int = 128) -> Tensor:
    """Token ids [rows, length] of packaged conversations."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(TINY_LLAMA)
    lines = (ASSETS / "data" / "harbour.jsonl").read_text(encoding="utf-8").splitlines()
    text = [tokenizer.apply_chat_template(json.loads(s)["messages"], tokenize=False) for s in lines]
    ids = tokenizer("".join(text[:200]), verbose=False)["input_ids"]
    return torch.tensor(ids[: rows * length]).view(rows, length)


def backward(model: Any, ids: Tensor) -> None:
    """Forward and backward under BF16 autocast."""
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()


def real() -> list[Operands]:
    """g and w of every linear layer of the packaged model's decoder."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(TINY_LLAMA, dtype=torch.float32).train()
    found: list[Operands] = []

    def keep(module: nn.Linear, _: Any, gradients: tuple[Tensor, ...]) -> None:
        g = gradients[0].reshape(-1, module.out_features)
        found.append((g.bfloat16(), module.weight.detach().bfloat16()))

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            module.register_full_backward_hook(keep)  # pyright: ignore[reportArgumentType]
    backward(model, packaged_rows())
    return found


# -------------------------------------------------------------------------------------------- ways


def ours(
    granularity: Any, high: frozenset[Any] = frozenset()
) -> Callable[[Tensor, Tensor], Tensor]:
    """Our dgrad with the weight stored at a granularity."""

    def product(g: Tensor, w: Tensor) -> Tensor:
        tile = tile_of(granularity, (w.shape[0], w.shape[1]))
        how = Arithmetic(tile, per_row=granularity == "row", in_bf16=False, high=high)
        return dgrad(g, *quantize_weight(w, tile), how)

    return product


def second_copy(g: Tensor, w: Tensor) -> Tensor:
    """dgrad from codes with one scale per input channel: nothing to fold, another copy to keep."""
    bits, inverse = quantize_weight(w.t().contiguous(), (1, w.shape[0]))
    how = Arithmetic((1, w.shape[0]), in_bf16=False)
    return multiply(cast(g, how), bits.t(), inverse.t(), how, g.dtype)


def torchao(recipe: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """The input gradient of torchao's own layer, by its own emulation."""
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)

    def product(g: Tensor, w: Tensor) -> Tensor:
        linear = nn.Linear(w.shape[1], w.shape[0], bias=False, dtype=w.dtype)
        linear.weight = nn.Parameter(w, requires_grad=False)
        layer = Float8Linear.from_float(linear, config=config)
        x = torch.zeros(g.shape[0], w.shape[1], dtype=g.dtype, requires_grad=True)
        layer(x).backward(g)
        assert x.grad is not None
        return x.grad

    return product


WAYS = {
    "folded": ours("row"),
    "second copy": second_copy,
    "BF16 dgrad": ours("row", frozenset({"dgrad"})),
    "per tensor": ours("tensor"),
    "torchao e5m2": torchao("tensorwise"),
    "torchao rows": torchao("rowwise"),
}


def error(product: Callable[[Tensor, Tensor], Tensor], g: Tensor, w: Tensor) -> float:
    """Relative error of dx in Frobenius norm."""
    exact = g.float() @ w.float()
    return float((product(g, w).float() - exact).norm() / exact.norm())


def dx_table(seeds: int) -> str:
    """Markdown: a row for each way, a column for each kind of operands, mean over seeds."""
    lines = [f"| dx | {' | '.join(SYNTHETIC)} | real (worst) |", "|---" * 7 + "|"]
    layers = real()
    for name, product in WAYS.items():
        cells = [
            statistics.fmean(error(product, *synthetic(kind, seed)) for seed in range(seeds))
            for kind in SYNTHETIC
        ]
        found = [error(product, g, w) for g, w in layers]
        figures = [f"{100 * e:.2f} %" for e in cells]
        figures.append(f"{100 * statistics.median(found):.2f} % ({100 * max(found):.2f} %)")
        lines.append(f"| {name} | {' | '.join(figures)} |")
    return "\n".join(lines)


# ------------------------------------------------------------------------------------ A and B


def adapter_gradients(model: Any, ids: Tensor) -> dict[str, Tensor]:
    """Name -> gradient of each trainable parameter."""
    model.zero_grad()
    backward(model, ids)
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def adapter_table(rank: int) -> str:
    """Markdown: distance of the gradients of A and B from those of BF16 on the same weights."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    ids = packaged_rows()
    lines = [
        "| base | x kept as | A, median (worst) | B, median (worst) |",
        "|---|---|---|---|",
    ]
    fp8 = {"compute": "fp8", "backend": "emulated", "emulation": "exact", "frozen": "fp8"}
    lora = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=TARGETS, task_type="CAUSAL_LM")
    for scaling in ("rowwise", "tensorwise"):
        base = AutoModelForCausalLM.from_pretrained(TINY_LLAMA, dtype=torch.float32)
        torch.manual_seed(0)
        model = get_peft_model(base, lora).train()
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.02)
        for saved in ("high", "fp8"):
            config = PrecisionConfig.model_validate(
                fp8 | {"scaling": scaling, "saved_input": saved}
            )
            apply(model, plan(revert(model), config))
            low = adapter_gradients(model, ids)
            high = adapter_gradients(revert(model), ids)  # BF16 on the dequantized weights
            lines.append(f"| {scaling} | {saved} | {' | '.join(distances(low, high))} |")
    # How far BF16 itself is from float32, on the weights of the last row.
    with torch.autocast("cpu", enabled=False):
        model.zero_grad()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    exact = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    lines.append(f"| BF16 against float32 | high | {' | '.join(distances(high, exact))} |")
    return "\n".join(lines)


def distances(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    """Relative distance over layers, of A and of B: median and worst."""
    cells = []
    for kind in ("lora_A", "lora_B"):
        found = [float((a[n] - b[n]).norm() / b[n].norm()) for n in b if kind in n]
        cells.append(f"{100 * statistics.median(found):.1f} % ({100 * max(found):.1f} %)")
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rank", type=int, default=8)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(dx_table(args.seeds), flush=True)
    print(f"\nrank {args.rank}\n\n{adapter_table(args.rank)}")


if __name__ == "__main__":
    main()
