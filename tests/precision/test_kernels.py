"""Our kernels give the bits of their references, compile for every FP8 GPU, and are chosen."""

from __future__ import annotations

import ast
import copy
import dataclasses
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import TorchDispatchMode

import finetune
from finetune.errors import PrecisionError
from finetune.hardware.device import has_triton, starts_triton
from finetune.hardware.requirements import resolve
from finetune.precision import convert
from finetune.precision.model.compiling import prepare
from finetune.precision.numbers.formats import E4M3, E5M2
from finetune.precision.numbers.kernels import (
    cast_rows,
    cast_whole,
    swiglu,
    swiglu_backward,
    transpose_codes,
)
from finetune.precision.numbers.scaling import cast_current
from finetune.precision.numbers.weights import (
    Arithmetic,
    FrozenLinear,
    cast_operand,
    dgrad,
    fprop,
    quantize_weight,
)
from finetune.precision.planner import plan
from finetune.precision.settings import PrecisionConfig
from finetune.precision.stored.frozen import FrozenEngine
from tests.conftest import CPU, H100

CASTS = torch.ops.finetune.cast_rows.default
TRANSPOSES = torch.ops.finetune.transpose_codes.default
NO_TRITON = importlib.util.find_spec("triton") is None
needs_triton = pytest.mark.skipif(NO_TRITON, reason="Triton is not installed: pip install triton")


def operands(m: int = 24, k: int = 96, n: int = 64):
    generator = torch.Generator().manual_seed(0)
    x, g = torch.randn(m, k, generator=generator), torch.randn(m, n, generator=generator)
    w = torch.randn(n, k, generator=generator) * torch.logspace(-2, 0, n)[:, None]
    return x.bfloat16(), g.bfloat16(), *quantize_weight(w, (1, k))


class Seen(TorchDispatchMode):
    """Counts the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[object] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops.append(func)
        return func(*args, **(kwargs or {}))


# --------------------------------------------------------------------------------------- operators


@pytest.mark.parametrize("pow2", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_cast_is_that_of_the_scaling_rule(dtype, pow2) -> None:
    x = (torch.randn(9, 40) * 100).to(dtype)
    x[1], x[2, 3], x[3, 4] = 0.0, float("inf"), float("nan")
    fold = torch.logspace(-3, 1, 40)[None]
    for factors in (None, fold):
        wide = x if factors is None else x.float() * factors
        codes, inverse = cast_rows(x, factors, pow2=pow2)
        wanted, scale = cast_current(wide, E4M3, 1, pow2=pow2, packed=True)
        assert codes.dtype is E4M3.dtype
        assert inverse.shape == (9, 1)
        assert torch.equal(codes.view(torch.uint8), wanted.view(torch.uint8))
        assert torch.equal(inverse.view(torch.int32), scale.view(torch.int32))


@pytest.mark.parametrize("dtype", [torch.uint8, E4M3.dtype])
def test_codes_are_transposed_into_a_contiguous_matrix(dtype) -> None:
    codes = torch.randint(0, 256, (37, 50), dtype=torch.uint8).view(dtype)
    for each in (codes, codes.t(), codes[::2]):
        turned = transpose_codes(each)
        assert turned.is_contiguous()
        assert torch.equal(turned.view(torch.uint8).t(), each.view(torch.uint8))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_operators_keep_the_contract_of_torch() -> None:
    x, _, bits, _ = operands()
    fold = torch.rand(1, x.shape[1])
    for arguments in ((x, None, False), (x.float(), fold, True), (x.t(), None, False)):
        torch.library.opcheck(CASTS, arguments)
    torch.library.opcheck(TRANSPOSES, (bits, None))
    torch.library.opcheck(TRANSPOSES, (bits.t(), x))


# ----------------------------------------------------------------------------- in the frozen layer


@pytest.mark.parametrize("pow2", [False, True])
def test_a_frozen_layer_multiplies_the_same_codes_with_and_without_kernels(pow2) -> None:
    x, g, bits, inverse = operands()
    results = []
    for kernels in (False, True):
        how = Arithmetic((1, x.shape[1]), pow2=pow2, emulate=False, own=kernels)
        with Seen() as seen:
            results.append(
                (fprop(x, cast_operand(x, how), bits, inverse, how), dgrad(g, bits, inverse, how))
            )
        assert seen.ops.count(CASTS) == 2 * kernels
        assert seen.ops.count(TRANSPOSES) == kernels
    for without, own in zip(*results, strict=True):
        assert torch.equal(without, own)


def test_the_emulation_casts_as_before_whatever_is_chosen() -> None:
    x, g, bits, inverse = operands()
    plain = Arithmetic((1, x.shape[1]))
    chosen = plain._replace(own=True, own_cast=True)
    with Seen() as seen:
        for a, b in zip(cast_operand(x, plain), cast_operand(x, chosen), strict=True):
            assert torch.equal(a, b)
        assert torch.equal(dgrad(g, bits, inverse, plain), dgrad(g, bits, inverse, chosen))
    assert not {CASTS, TRANSPOSES} & set(seen.ops)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # dynamo warns about parts of torch that it traces
def test_equal_casts_of_a_graph_are_stored_once() -> None:
    """q, k and v of one input: one cast in the graph, and no transposed weight before backward."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    x, g, bits, inverse = operands()
    how = Arithmetic((1, x.shape[1]), emulate=False, own=True, own_cast=True)
    graphs: list[list[object]] = []

    def siblings(x: torch.Tensor) -> torch.Tensor:
        return sum(
            FrozenLinear.apply(x, *cast_operand(x.detach(), how), bits, inverse, how) * each
            for each in (1, 2, 3)
        )

    def keep(graph: torch.fx.GraphModule, inputs: object) -> object:
        graphs.append([node.target for node in graph.graph.nodes])
        return graph

    backend = aot_autograd(fw_compiler=keep, partition_fn=min_cut_rematerialization_partition)
    results = []
    for run in (siblings, torch.compile(siblings, backend=backend, fullgraph=True)):
        leaf = x.clone().requires_grad_()
        y = run(leaf)
        y.backward(g)
        results.append((y, leaf.grad))
    for eager, compiled in zip(*results, strict=True):
        assert torch.equal(eager, compiled)
    forward, backward = graphs
    assert (forward.count(CASTS), forward.count(TRANSPOSES)) == (1, 0)
    assert (backward.count(CASTS), backward.count(TRANSPOSES)) == (3, 3)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # inductor warns about its own environment
def test_inductor_stores_codes_once_for_all_who_read_them() -> None:
    """Code for a CPU, generated and run: one buffer of codes for q, k and v, three without it."""
    from torch._inductor import config
    from torch._inductor.utils import run_and_get_code

    x, _, bits, inverse = operands()
    weights = [bits.roll(shift, 0) for shift in range(3)]
    how = Arithmetic((1, x.shape[1]), emulate=False)

    def siblings(x: torch.Tensor) -> list[torch.Tensor]:
        return [
            FrozenLinear.apply(x, *cast_operand(x.detach(), how), w, inverse, how) for w in weights
        ]

    prepare()
    leaf = x.requires_grad_()
    with config.patch(force_disable_caches=True):  # what pytest takes back is gone, in torch 2.13
        found, codes = run_and_get_code(torch.compile(siblings, fullgraph=True), leaf)
    stored = re.findall(r"empty_strided_cpu\(\(24, 96\), .*torch.float8_e4m3fn\)", codes[0])
    assert len(stored) == 1
    for compiled, eager in zip(found, siblings(leaf), strict=True):
        torch.testing.assert_close(compiled, eager)


# ------------------------------------------------------------------------------- one scale a tensor


def torchaos(linear: nn.Linear, *, pow2: bool) -> nn.Module:
    """torchao's own layer on FP8 units, which a CPU's `torch._scaled_mm` stands for."""
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear

    config = Float8LinearConfig.from_recipe_name("tensorwise")
    changes = {"round_scales_to_power_of_2": pow2, "pad_inner_dim": True}
    return Float8Linear.from_float(linear, dataclasses.replace(config, **changes))


def full(pow2: bool) -> PrecisionConfig:
    return PrecisionConfig.model_validate(
        {"compute": "fp8", "backend": "torchao", "scaling": "tensorwise"}
        | {"power_of_two_scales": pow2}
    )


@pytest.mark.parametrize("tokens", [48, 40])
@pytest.mark.parametrize("pow2", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_layer_of_one_scale_a_tensor_gives_torchaos_bits(dtype, pow2, tokens) -> None:
    """Output and both gradients; 40 tokens are padded to 48 where wgrad contracts them."""
    torch.manual_seed(0)
    linear = nn.Linear(64, 96).to(dtype)
    x, g = torch.randn(2, tokens // 2, 64).to(dtype), torch.randn(2, tokens // 2, 96).to(dtype)
    ours = nn.Sequential(copy.deepcopy(linear))
    convert.apply(ours, plan(ours, full(pow2)), hardware=True)
    found = []
    for layer in (torchaos(linear, pow2=pow2), ours[0]):
        leaf = x.clone().requires_grad_()
        layer(leaf).backward(g * 1e-3)
        found.append((layer(leaf), leaf.grad, layer.weight.grad))
    for theirs, own in zip(*found, strict=True):
        assert torch.equal(theirs, own)


def test_no_result_depends_on_a_guess() -> None:
    x, column = operands()[0], 1
    results = [
        cast_whole(x, torch.tensor([0.0, guess, 0.0]), column, E5M2, pow2=True, turned=True)
        for guess in (0.0, 1.0, 2.0**40)
    ]
    for each in results[1:]:
        assert all(torch.equal(a.float(), b.float()) for a, b in zip(each, results[0], strict=True))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_casts_of_one_scale_keep_the_contract_of_torch() -> None:
    ops, guesses = torch.ops.finetune, torch.zeros(3)
    gate, up, dy = (torch.randn(24, 32).bfloat16() for _ in range(3))
    for plain, turned in ((True, True), (True, False), (False, True)):
        given = gate.t(), guesses, 1, E4M3.dtype, True, plain, turned
        torch.library.opcheck(ops.cast_whole.default, given)
    torch.library.opcheck(ops.swiglu_cast.default, (gate, up, guesses, 0, E4M3.dtype, True))
    given = dy, gate, up, torch.ones(()), guesses, guesses + 1, 2, E4M3.dtype, E5M2.dtype, True
    torch.library.opcheck(ops.swiglu_backward_cast.default, given)


def test_swiglu_is_that_of_the_model_and_its_gradients() -> None:
    gate, up, dy = (torch.randn(24, 32).bfloat16().requires_grad_() for _ in range(3))
    wanted = nn.functional.silu(gate) * up
    assert torch.equal(swiglu(gate, up), wanted)
    for a, b in zip(
        torch.autograd.grad(wanted, (gate, up), dy), swiglu_backward(dy, gate, up), strict=True
    ):
        assert torch.equal(a, b)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # dynamo warns about parts of torch that it traces
def test_a_compiled_mlp_is_one_function_with_the_bits_of_its_layers(make_llama) -> None:
    """Only of SwiGLU, of weights that train, under scales that can be guessed."""
    x = torch.randn(32, 64)

    def run(mlp: nn.Module) -> list[torch.Tensor]:
        leaf = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y = mlp(leaf)
        parameters = [p for p in mlp.parameters() if p.requires_grad]
        return [y, *torch.autograd.grad(y.float().square().sum(), [leaf, *parameters])]

    names: set[str] = set()

    def keep(graph: torch.fx.GraphModule, _: object) -> object:
        names.update(str(node.target) for node in graph.graph.nodes)
        return make_boxed_func(graph)

    backend = aot_autograd(fw_compiler=keep)
    for pow2, act, frozen in (
        (True, "silu", False), (False, "silu", False), (True, "gelu", False), (True, "silu", True)
    ):  # fmt: skip
        model = make_llama(hidden_act=act)
        if frozen:
            model.model.layers[0].mlp.down_proj.requires_grad_(False)
        convert.apply(model, plan(model, full(pow2)), hardware=True)
        mlp = model.model.layers[0].mlp
        names.clear()
        torch._dynamo.reset()
        for eager, compiled in zip(
            run(mlp), run(torch.compile(mlp, backend=backend, fullgraph=True)), strict=True
        ):
            assert torch.equal(eager, compiled)
        joined = {"finetune.swiglu_cast.default", "finetune.swiglu_backward_cast.default"}
        assert (
            joined <= names if (pow2, act, frozen) == (True, "silu", False) else not joined & names
        )
    torch._dynamo.reset()


# ------------------------------------------------------------------------------------ Triton itself


@pytest.mark.parametrize(
    "name", ["precision/numbers/triton_kernels", "training/helper/optimizer/adamw_kernels"]
)
def test_no_launch_lets_triton_make_one_rounding_of_two(name) -> None:
    """A GPU multiplies and adds in one rounding where it may: the interpreter, never."""
    file = Path(finetune.__file__).parent / f"{name}.py"
    calls = (node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call))
    given = [{word.arg: ast.unparse(word.value) for word in call.keywords} for call in calls]
    launches = [words for words in given if "num_warps" in words]
    assert launches
    assert {words.get("enable_fp_fusion") for words in launches} == {"False"}


@needs_triton
@pytest.mark.long
def test_kernels_give_the_references_bits_in_the_interpreter() -> None:
    worker = [sys.executable, "-W", "ignore", "-m", "tests.kernel_worker"]
    done = subprocess.run(worker, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    different = json.loads(done.stdout)
    assert len(different) > 300
    assert {case: count for case, count in different.items() if count} == {}


# ------------------------------------------------------------------------------------------ choice


def fp8(**update) -> PrecisionConfig:
    return PrecisionConfig(**{"compute": "fp8", "scaling": "rowwise", "frozen": "fp8"} | update)


@pytest.mark.filterwarnings("ignore")  # dynamo warns about parts of torch that it traces
@pytest.mark.parametrize(
    ("update", "emulate", "eager", "compiled"),
    [
        ({}, False, True, False),  # Inductor joins casts to what makes their operand
        ({"compile": "off"}, False, True, False),
        ({"kernels": "triton"}, False, True, True),
        ({"kernels": "inductor"}, False, False, False),
        ({"kernels": "eager"}, False, False, False),
        ({"compile": "off"}, True, False, False),
    ],
)
def test_kernels_of_ours_run_where_nothing_fuses(update, emulate, eager, compiled) -> None:
    """Also in the first micro-step of layers that are compiled later."""
    x, g, bits, inverse = operands()
    how = FrozenEngine(fp8(**update), emulate=emulate).how._replace(tile=(1, x.shape[1]))
    targets: set[str] = set()

    def keep(graph: torch.fx.GraphModule, _: object) -> object:
        targets.update(str(node.target) for node in graph.graph.nodes)
        return graph

    def gradient(x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        return dgrad(g, bits, inverse, how) + cast_operand(x, how)[1]

    with Seen() as seen:
        plain = gradient(x, g)
    assert (CASTS in seen.ops, TRANSPOSES in seen.ops) == (eager, eager)
    torch.compiler.reset()
    assert torch.equal(torch.compile(gradient, backend=keep, fullgraph=True)(x, g), plain)
    traced = [f"finetune.{name}" in targets for name in ("cast_rows", "transpose_codes")]
    assert traced == [compiled, eager]


@pytest.mark.parametrize(
    ("device", "backend", "why"),
    [(CPU, "auto", "no FP8 matrix units"), (H100, "emulated", "an emulated GEMM")],
)
def test_triton_by_name_is_an_error_where_it_cannot_be_had(device, backend, why) -> None:
    with pytest.raises(PrecisionError) as caught:
        resolve(fp8(kernels="triton", backend=backend, emulation="allow"), device)
    assert why in caught.value.why
    assert caught.value.fix == "~precision.kernels"
    resolve(fp8(backend=backend, emulation="allow"), device)


def test_triton_by_name_is_taken_by_a_gpu_with_fp8() -> None:
    assert resolve(fp8(kernels="triton"), H100).precision.kernels == "triton"


def test_a_cuda_build_without_triton_takes_torchs_kernels(monkeypatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setitem(sys.modules, "triton", None)
    has_triton.cache_clear()
    try:
        assert not has_triton()
        assert not starts_triton()
        frozen = FrozenEngine(fp8(compile="off"), emulate=False, triton=starts_triton())
        assert not frozen.how.own
        with pytest.raises(PrecisionError, match="Triton kernels are not available on") as caught:
            resolve(fp8(kernels="triton"), H100)
        assert "triton does not import" in caught.value.why
    finally:
        has_triton.cache_clear()


@pytest.mark.parametrize(
    ("kernels", "compile", "requested"),
    [("auto", "auto", "auto"), ("inductor", "auto", "on"), ("eager", "auto", "off"),
     ("triton", "off", "off"), ("inductor", "on", "on")],
)  # fmt: skip
def test_kernels_decide_on_compiling_where_compile_does_not(kernels, compile, requested) -> None:
    assert fp8(kernels=kernels, compile=compile).compile_requested == requested


@pytest.mark.long
def test_import_needs_no_triton() -> None:
    code = "import sys; sys.modules['triton'] = None; import finetune, finetune.precision.convert"
    subprocess.run([sys.executable, "-c", code], check=True)
