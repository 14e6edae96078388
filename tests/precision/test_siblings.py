"""Adapters of siblings joined in the graph of a compiled layer: fewer GEMMs, the same numbers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from finetune.config.schema import PrecisionConfig
from finetune.precision import convert
from finetune.precision.lora import times
from finetune.precision.planner import plan
from finetune.precision.siblings import join

FP8 = {"compute": "fp8", "backend": "torchao", "frozen": "fp8", "scaling": "rowwise"}
PRECISIONS = {
    "fp8": FP8 | {"saved_input": "fp8"},
    "fp8-inputs-kept": FP8 | {"saved_input": "high"},
    "bf16": {"compute": "bf16"},
}
SEPARATE = {"forward": 14, "backward": 28}
JOINED = {"forward": 11, "backward": 22}
"""GEMMs of the seven adapters of a layer."""


def compiled(
    run: Any, found: list[tuple[str, torch.fx.Graph]], *, joins: bool, dynamic: bool = False
) -> Any:
    """`run` compiled as far as AOTAutograd's partition, and its graphs run node by node."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    def runs(phase: str) -> Callable:
        def keep(module: Any, inputs: Any) -> Any:
            if joins:
                join(module.graph)
                module.graph.lint()
                module.recompile()
            found.append((phase, module.graph))
            return make_boxed_func(module.forward)

        return keep

    backend = aot_autograd(
        fw_compiler=runs("forward"),
        bw_compiler=runs("backward"),
        decompositions=select_decomp_table,
        partition_fn=functools.partial(min_cut_rematerialization_partition, compiler="inductor"),
    )
    torch._dynamo.reset()
    return torch.compile(run, backend=backend, fullgraph=True, dynamic=dynamic)


def gemms(graph: torch.fx.Graph, rank: int = 8 * 3) -> int:
    """GEMMs of a graph with a dimension of at most `rank`: those of adapters."""
    aten = torch.ops.aten
    return sum(  # torch before 2.12 cannot add symbolic truths
        n.target in (aten.mm.default, aten.addmm.default)
        and bool(min(min(x.meta["val"].shape) for x in n.args[-2:]) <= rank)
        for n in graph.nodes
    )


def decoder_layer(make_llama, precision: dict[str, Any], **adapters: Any) -> nn.Module:
    settings = {"r": 4, "target_modules": "all-linear"} | adapters
    model: Any = get_peft_model(make_llama(num_hidden_layers=1), LoraConfig(**settings))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # it begins at zero, and hides the gradient of A
            nn.init.normal_(parameter, std=0.05)
    wanted = PrecisionConfig(**precision)
    convert.apply(model.train(), plan(model, wanted), hardware=True)
    return next(m for m in model.modules() if type(m).__name__ == "LlamaDecoderLayer")


def step(layer: nn.Module, run: Any, checkpointed: bool = False) -> dict[str, Tensor]:
    """Output and gradients of a decoder layer."""
    x = torch.randn(1, 32, 64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    places = torch.outer(torch.arange(32.0), 1e4 ** (-torch.arange(0, 16, 2) / 16)).repeat(1, 2)
    angles = places[None].cos(), places[None].sin()

    def forward(x: Tensor) -> Tensor:
        return run(x, position_embeddings=angles)

    with torch.autocast("cpu", torch.bfloat16):
        y = checkpoint(forward, x, use_reentrant=False) if checkpointed else forward(x)
    trained = {n: p for n, p in layer.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(y.float().square().sum(), [x, *trained.values()])
    return {"y": y, "x": found[0], **dict(zip(trained, found[1:], strict=True))}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # dynamo warns about parts of torch that it traces
@pytest.mark.parametrize(
    ("precision", "checkpointed", "dynamic"),
    [
        ("fp8", True, False),
        *(pytest.param(name, False, False, marks=pytest.mark.long) for name in PRECISIONS),
        pytest.param("bf16", True, False, marks=pytest.mark.long),
        pytest.param("bf16", False, True, marks=pytest.mark.long),
    ],
)
def test_siblings_are_multiplied_together(make_llama, precision, checkpointed, dynamic) -> None:
    layer = decoder_layer(make_llama, PRECISIONS[precision])
    apart, joined = [], []
    before = compiled(layer, apart, joins=False, dynamic=dynamic)
    separate = step(layer, before, checkpointed)
    together = step(layer, compiled(layer, joined, joins=True, dynamic=dynamic), checkpointed)
    counts = {name: gemms(graph) for name, graph in joined}
    assert {name: gemms(graph) for name, graph in apart} == SEPARATE
    assert counts == JOINED
    assert together.keys() == separate.keys()
    for name, found in together.items():
        # What lies before a joined sum of input gradients has its rounding; the rest is the same.
        exact = name == "y" or "mlp.down" in name or "mlp.gate" in name or "mlp.up" in name
        if exact:
            assert torch.equal(found, separate[name]), name
        assert (found - separate[name]).norm() <= 4e-3 * separate[name].norm(), name


def adapters(count: int, ranks: list[int]) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """An input [16, 12] and pairs A [r, 12], B [10, r], in BF16."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).bfloat16()

    a, b = [normal(r, 12) for r in ranks], [normal(10, r) for r in ranks]
    return normal(16, 12), a[:count], b[:count]


def joined(function: Callable, *inputs: Any) -> tuple[int, Any]:
    """GEMMs saved in the graph of a function, and what the graph then returns."""
    module = make_fx(function, tracing_mode="fake")(*inputs)
    saved = join(module.graph)
    module.graph.lint()
    module.recompile()
    return saved, module(*inputs)


@pytest.mark.parametrize(
    ("scalings", "saved"), [((2.0, 2.0, 2.0), 2), ((2.0, 2.0, 0.5), 1), ((2.0, 1.0, 0.5), 0)]
)
def test_equal_scalings_are_joined_whatever_the_ranks(scalings, saved) -> None:
    x, a, b = adapters(3, [4, 8, 2])

    def forward(x: Tensor, *weights: Tensor) -> list[Tensor]:
        pairs = zip(weights[:3], weights[3:], scalings, strict=True)
        return [times(x, a.t(), s, b[0]) @ b.t() for a, b, s in pairs]

    count, found = joined(forward, x, *a, *b)
    assert count == saved
    assert all(map(torch.equal, found, forward(x, *a, *b)))


def test_what_depends_on_the_first_product_is_not_joined_with_it() -> None:
    x, a, b = adapters(2, [4, 4])

    def forward(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        first = times(x, a.t(), 1.0, b[0])
        return times(x, a.t() * first.amax(), 1.0, b[0])

    assert joined(forward, x, a[0], b[0])[0] == 0


def summed(twice: bool, read: bool) -> Callable:
    def backward(g: Tensor, d: Tensor, e: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        u, v = times(g, b, 2.0, b[0]), times(g, b.neg(), 3.0, b[0])
        one, two = d.addmm(u, a), e.addmm(v, a)
        total = one + two.view(1, *two.shape).view(two.shape)
        total = one + one + total if twice else total
        return (total, one) if read else (total,)

    return backward


@pytest.mark.parametrize(("twice", "read", "saved"), [(0, 0, 1), (1, 0, 0), (0, 1, 0)])
def test_a_sum_is_joined_where_nothing_else_reads_its_summands(twice, read, saved) -> None:
    d, a, b = adapters(1, [4])
    g = torch.ones(16, 10).bfloat16()
    inputs = g, d, d.neg(), a[0], b[0]
    count, found = joined(summed(twice, read), *inputs)
    assert count == saved
    for value, expected in zip(found, summed(twice, read)(*inputs), strict=True):
        torch.testing.assert_close(value, expected, rtol=2e-2, atol=2e-2)


def test_a_plain_gemm_stays_alone() -> None:
    x, a, _ = adapters(2, [4, 4])
    assert joined(lambda x, *w: [x @ v.t() for v in w], x, *a)[0] == 0
