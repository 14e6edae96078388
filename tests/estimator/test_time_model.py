"""The time model: kinds of kernels, roofs, fusion, classes, steps, and published speeds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune.errors import ConfigError
from finetune.estimator.memory.sharding import Fsdp2
from finetune.estimator.speed.fusion import Launch, launches
from finetune.estimator.speed.hosted import Hosted
from finetune.estimator.speed.operators import (
    MatrixProduct,
    attention_flops,
    is_barrier,
    kind_of,
    product_of,
    traffic,
)
from finetune.estimator.speed.roofline import efficiency_of, roofline_of, shape_share, shared
from finetune.estimator.speed.step_parts import StepPart, classes_of
from finetune.estimator.speed.timing import (
    Ring,
    Timing,
    copied_traffic,
    extrapolated,
    sharded_traffic,
    spread,
)
from finetune.estimator.trace.fsdp_groups import Group
from finetune.estimator.trace.trace import Op, Operand, Recorder
from finetune.hardware.device import OUTER_VECTOR_CUDA, cuda_of
from finetune.hardware.gpus import named_gpu
from finetune.hardware.versions import torch_of_gpus
from tests.benchmarks.score.setting import ATTENTION_LINEARS, MLP_LINEARS, Setting, Shape
from tests.benchmarks.score.workload import adapter_parameters, in_layers, write_step
from tests.conftest import slow_but

ON_H100 = roofline_of(named_gpu("H100"))
BF16, F32, FP8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
LLAMA_8B = Shape(32, 4096, 32, 8, 14336, 128256)
QWEN = {
    "0.5B": Shape(24, 896, 14, 2, 4864, 151936, 64, tied=True),
    "1.5B": Shape(28, 1536, 12, 2, 8960, 151936, 128, tied=True),
    "3B": Shape(36, 2048, 16, 2, 11008, 151936, 128, tied=True),
    "7B": Shape(28, 3584, 28, 4, 18944, 152064, 128),
    "14B": Shape(48, 5120, 40, 8, 13824, 152064, 128),
}


def operand(storage: int, *shape: int, dtype: torch.dtype = BF16) -> Operand:
    return Operand(storage, shape, dtype, math.prod(shape) * dtype.itemsize)


def op(
    name: str,
    inputs: list[Operand],
    outputs: list[Operand],
    phase: str = "forward",
    module: str = "model.layers.0",
) -> Op:
    return Op(name, tuple(inputs), tuple(outputs), phase, module)  # pyright: ignore[reportArgumentType]


def gemm(m: int, n: int, k: int, dtype: torch.dtype = BF16, scale: tuple[int, ...] = ()) -> Op:
    a, b = operand(1, m, k, dtype=dtype), operand(2, k, n, dtype=dtype)
    name = "aten._scaled_mm.default" if dtype is FP8 else "aten.mm.default"
    scales = [operand(3, *scale, dtype=F32), operand(4, dtype=F32)] if dtype is FP8 else []
    return op(name, [a, b, *scales], [operand(5, m, n)])


# ----------------------------------------------------------------------------------------- kernels


def test_kinds_of_kernels():
    x = operand(1, 4, 8)
    assert kind_of(gemm(4, 8, 8)) == "gemm"
    assert kind_of(op("finetune_estimator.attention.default", [x], [x])) == "attention"
    assert kind_of(op("aten.view.default", [x], [x])) == "none"
    assert kind_of(op("aten.embedding.default", [x], [x])) == "gather"
    assert kind_of(op("aten.amax.default", [x], [x])) == "reduction"
    assert kind_of(op("aten._to_copy.default", [x], [operand(2, 4, 8)])) == "copy"
    assert kind_of(op("aten._fused_adamw_.default", [x], [])) == "optimizer"
    assert kind_of(op("aten.sqrt.default", [x], [x], phase="optimizer")) == "optimizer"
    assert kind_of(op("bitsandbytes.dequantize_4bit.default", [x], [x])) == "dequantize"
    assert kind_of(op("aten.silu.default", [x], [x])) == "pointwise"


def test_a_copy_that_gives_its_argument_back_launches_nothing():
    x = operand(1, 4, 8)
    assert kind_of(op("aten.contiguous.default", [x], [x])) == "none"
    assert kind_of(op("aten.copy_.default", [x, operand(2, 4, 8)], [x])) == "copy"


def test_products_are_read_off_their_operands():
    assert product_of(gemm(6, 10, 4)) == MatrixProduct(1, 6, 10, 4, "bf16")
    assert product_of(gemm(6, 10, 4, F32)) == MatrixProduct(1, 6, 10, 4, "fp32")
    assert product_of(gemm(6, 10, 4, FP8)) == MatrixProduct(1, 6, 10, 4, "fp8")
    assert product_of(gemm(6, 10, 4, FP8, scale=(6, 1))) == MatrixProduct(
        1, 6, 10, 4, "fp8_rowwise"
    )
    a, b, out = operand(1, 3, 6, 4), operand(2, 3, 4, 10), operand(3, 3, 6, 10)
    assert product_of(op("aten.bmm.default", [a, b], [out])) == MatrixProduct(3, 6, 10, 4, "bf16")
    y, low, weight = operand(1, 6, 10), operand(2, 6, 2), operand(3, 2, 10)
    added = op("aten.addmm_.default", [y, low, weight], [y])
    assert product_of(added) == MatrixProduct(1, 6, 10, 2, "bf16")
    bias = op("aten.addmm.default", [operand(4, 10), operand(1, 6, 4), operand(2, 4, 10)], [y])
    assert product_of(bias) == MatrixProduct(1, 6, 10, 4, "bf16")
    assert product_of(op("aten.silu.default", [a], [a])) is None
    # 6 rows in 3 groups: results by row, and gradients of the groups' weights
    x, weights, y = operand(1, 6, 4), operand(2, 3, 4, 10), operand(3, 6, 10)
    grouped = op("aten._grouped_mm.default", [x, weights], [y])
    assert product_of(grouped) == MatrixProduct(3, 2, 10, 4, "bf16")
    gradients = op("aten._grouped_mm.default", [operand(1, 4, 6), y], [weights])
    assert product_of(gradients) == MatrixProduct(3, 4, 10, 2, "bf16")


def test_flops_of_attention():
    q, k, v = operand(1, 2, 8, 64, 16), operand(2, 2, 4, 64, 16), operand(3, 2, 4, 64, 16)
    mask, name = operand(4, 1, 1, 64, 64), "finetune_estimator.attention"
    whole = 4 * 2 * 8 * 64 * 64 * 16
    assert attention_flops(op(f"{name}.default", [q, k, v], [q])) == (whole / 2, False)
    assert attention_flops(op(f"{name}.default", [q, k, v, mask], [q])) == (whole, True)
    backward = op(f"{name}_backward.default", [q, q, k, v, q, operand(5, 2, 8, 64)], [q, k, v])
    assert attention_flops(backward) == (2.5 * whole / 2, False)
    other = op(f"{name}.default", [q, operand(2, 2, 4, 100, 16), operand(3, 2, 4, 100, 16)], [q])
    assert attention_flops(other) == (whole * 100 / 64, False)


def test_attention_of_heads_of_two_widths_and_in_a_window():
    q, v, name = operand(1, 1, 4, 64, 24), operand(3, 1, 4, 64, 16), "finetune_estimator.attention"
    inner = 2 * 4 * 64 * 64
    assert attention_flops(op(f"{name}.default", [q, q, v], [v]))[0] == inner * (24 + 16) / 2
    lse, window = operand(4, 4 * 64, dtype=F32), operand(2, 16)
    backward = [v, q, q, v, v, lse]
    whole = inner * (3 * 24 + 2 * 16) / 2
    assert attention_flops(op(f"{name}_backward.default", backward, [q, q, v]))[0] == whole
    some = op(f"{name}_backward.default", [*backward, window], [q, q, v])
    # a quarter of the keys, less the triangle in which there are not so many yet
    assert attention_flops(some) == (whole * 2 * (1 / 4 - 1 / 32), False)


def test_an_update_writes_all_but_the_gradient():
    weight, first, second = operand(1, 100), operand(2, 100, dtype=FP8), operand(3, 100, dtype=FP8)
    for name in ("bitsandbytes.optimizer_update_8bit_blockwise", "finetune_estimator.update"):
        update = op(f"{name}.default", [weight, weight, first, second], [], phase="optimizer")
        assert traffic(update) == (600, 400)


def test_bytes_that_kernels_move():
    table, ids, rows = operand(1, 1000, 8), operand(2, 4), operand(3, 4, 8)
    assert traffic(op("aten.embedding.default", [table, ids], [rows]))[0] < table.nbytes / 50
    x = operand(1, 100)
    assert traffic(op("aten.zeros_like.default", [x], [operand(2, 100)])) == (0, 200)
    assert traffic(op("aten.copy_.default", [x, operand(2, 100)], [x])) == (200, 200)
    assert traffic(op("aten.view.default", [x], [x])) == (0, 0)
    state = [operand(i, 100) for i in range(4)]
    assert traffic(op("aten._fused_adamw_.default", state, [])) == (800, 600)
    assert traffic(op("aten._foreach_addcmul_.Scalar", state[:3], [])) == (600, 200)


def test_reductions_over_rows_are_no_barrier():
    x = operand(1, 64, 32)
    assert not is_barrier(op("aten.mean.dim", [x], [operand(2, 64, 1)]))
    assert not is_barrier(op("aten._log_softmax.default", [x], [operand(2, 64, 32)]))
    assert is_barrier(op("aten.max.default", [x], [operand(2)]))
    assert is_barrier(op("aten.sum.dim_IntList", [x], [operand(2, 1, 32)]))
    short = operand(1, 1, 16, 32)  # fewer tokens than columns
    assert is_barrier(op("aten.sum.dim_IntList", [short], [operand(2, 1, 1, 32)]))
    assert not is_barrier(op("aten.sum.dim_IntList", [short], [operand(2, 1, 16)]))
    square = operand(1, 16, 16)
    assert not is_barrier(op("aten.amax.default", [square], [operand(2, 16)]))


# ------------------------------------------------------------------------------------------- roofs


def seconds_of(one: Op, gpu_name: str) -> tuple[float, str]:
    (launch,) = launches([one])
    kernel = roofline_of(named_gpu(gpu_name)).kernel_time(one, launch)
    return kernel.seconds, kernel.bound


@pytest.mark.parametrize(
    ("name", "dtype", "peak", "share"),
    [
        ("H100", BF16, 989.4, 0.70),
        ("H100", FP8, 1978.9, 0.67),
        ("B200", BF16, 2250, 0.67),
        ("B200", FP8, 4500, 0.63),
    ],
)
def test_a_large_product_reaches_the_share_that_is_measured(name, dtype, peak, share):
    seconds, bound = seconds_of(gemm(8192, 8192, 8192, dtype), name)
    assert bound == "compute"
    assert 2 * 8192**3 / seconds / (peak * 1e12) == pytest.approx(share, abs=0.03)


def test_products_with_a_rank_are_bound_by_memory():
    seconds, bound = seconds_of(gemm(8192, 8, 4096), "H100")
    assert bound == "memory"
    assert seconds > 8192 * 4096 * 2 / 3.352e12  # no faster than reading x
    assert seconds_of(gemm(32, 8, 64), "H100")[1] == "launch"


@pytest.mark.parametrize(("gpu_name", "factor"), [("H100", 1.01), ("B200", 1.1), ("4090", 1.1)])
def test_rowwise_scales_cost_more_in_cutlass(gpu_name, factor):
    plain, rows = gemm(4096, 4096, 4096, FP8), gemm(4096, 4096, 4096, FP8, scale=(4096, 1))
    more = seconds_of(rows, gpu_name)[0] / seconds_of(plain, gpu_name)[0]
    # The wheels of torch 2.10 are for CUDA 12.8, whose cuBLAS has no row-wise scales on an H100.
    outer_vector = gpu_name == "H100" and cuda_of(torch_of_gpus(), None) >= OUTER_VECTOR_CUDA
    assert factor < more < 1.05 if outer_vector else more > factor


def test_a_round_that_is_hardly_filled_is_a_round():
    """132 multiprocessors: 132 tiles take one round, 133 do not fit one."""
    share = shape_share(MatrixProduct(1, 128 * 132, 256, 8192, "bf16"), 132, 128)
    more = shape_share(MatrixProduct(1, 128 * 133, 256, 8192, "bf16"), 132, 128)
    assert share > 0.97
    assert more < 0.9


sizes = st.integers(1, 20_000)


@settings(max_examples=150, deadline=None)
@given(m=sizes, n=sizes, k=sizes, more=st.integers(0, 5000), which=st.integers(0, 2))
def test_a_larger_product_is_never_faster(m, n, k, more, which):
    small = MatrixProduct(1, m, n, k, "bf16")
    name = ("m", "n", "k")[which]
    large = small._replace(**{name: getattr(small, name) + more})
    before, after = (ON_H100.product_seconds(one) for one in (small, large))
    assert after >= before * (1 - 1e-9)
    assert 0 < shape_share(small, ON_H100.gpu.sms, 128) <= 1


@settings(max_examples=100, deadline=None)
@given(read=st.floats(0, 1e10), written=st.floats(0, 1e10), more=st.floats(0, 1e10))
def test_moving_more_is_never_faster(read, written, more):
    roofline = roofline_of(named_gpu("L40S"))
    x = operand(1, 8)
    one = op("aten.silu.default", [x], [x])
    times = [
        roofline.kernel_time(one, Launch((0,), "pointwise", r, written, "straight", frozenset()))
        for r in (read, read + more)
    ]
    assert times[1].seconds >= times[0].seconds


def test_attention_in_float32_runs_no_16_bit_products():
    name = "finetune_estimator.attention.default"
    narrow, wide = (operand(1, 1, 8, 8192, 64, dtype=dtype) for dtype in (BF16, F32))
    mask = operand(2, 1, 1, 8192, 8192)
    for gpu, slower in (("H100", 6), ("T4", 7)):  # 989 / (495 / 3) and 65 / 8.1
        times = [
            roofline_of(named_gpu(gpu)).step_time([op(name, [x, x, x, mask], [x])]).seconds
            for x in (narrow, wide)
        ]
        assert times[1] > 0.9 * slower * times[0]


def test_block_formats_multiply_as_many_numbers_and_slower():
    k, y = 4096, operand(6, 8192, 4096)
    seconds = {}
    for form, size in (("fp8", 1), ("mxfp8", 33 / 32), ("nvfp4", 9 / 16), ("blockwise", 33 / 32)):
        codes = [operand(i, round(n * k * size), dtype=FP8) for i, n in ((1, 8192), (2, 4096))]
        one = op(f"finetune_estimator.{form}_mm.default", codes, [y])
        product = product_of(one)
        assert product is not None
        assert product[:4] == (1, 8192, 4096, k)
        seconds[form] = roofline_of(named_gpu("B200")).product_seconds(product)
    assert seconds["mxfp8"] == seconds["blockwise"] == pytest.approx(seconds["fp8"] / 0.82)
    assert seconds["nvfp4"] == pytest.approx(seconds["mxfp8"] / 2)


def test_fp8_is_refused_where_there_is_none():
    with pytest.raises(ConfigError, match="no matrix units for fp8"):
        roofline_of(named_gpu("A100-80GB")).step_time([gemm(64, 64, 64, FP8)])


def test_a_family_without_numbers_is_refused():
    odd = named_gpu("H100").model_copy(update={"name": "Z1", "capability": (99, 0)})
    with pytest.raises(ConfigError, match=r"Z1 .compute capability 99\.0"):
        efficiency_of(odd)


def test_attention_runs_at_the_speed_of_its_kernel():
    q = operand(1, 1, 32, 8192, 128)
    mask = operand(2, 1, 1, 8192, 8192)
    name, gpu = "finetune_estimator.attention.default", named_gpu("H100")
    flash, cudnn = (roofline_of(gpu, attention=kernel) for kernel in ("flash", "cudnn"))
    plain, masked = [op(name, [q, q, q], [q])], [op(name, [q, q, q, mask], [q])]
    seconds = flash.step_time(plain).seconds
    assert cudnn.step_time(plain).seconds < 0.75 * seconds
    for roofline in (flash, cudnn):  # a mask rules both out, and its half is computed
        assert roofline.step_time(masked).seconds > 3 * seconds
    assert efficiency_of(named_gpu("L40S"), "cudnn") == efficiency_of(named_gpu("L40S"), "flash")


@pytest.mark.parametrize(
    ("kernel", "documents", "tokens", "forward", "both"),
    [  # milliseconds on one H100 80GB HBM3, 26 and 27 November 2026: note 15
        ("flash_attention", 4, 2048, 0.501, 2.119),
        ("flash_attention", 32, 256, 0.171, 0.817),
        ("flash_attention", 1, 8192, 1.73, 6.55),
        ("attention", 4, 2048, 0.268, 1.254),
        ("attention", 32, 256, 0.0724, 0.57),
        ("attention", 1, 8192, 0.96, 3.85),
    ],
)
def test_attention_takes_as_long_as_measured(kernel, documents, tokens, forward, both):
    roofline = roofline_of(named_gpu("H100"), "native", "cudnn")
    name = f"finetune_estimator.{kernel}"
    q, kv = operand(1, documents, 32, tokens, 128), operand(2, documents, 8, tokens, 128)
    back, within = [q, q, kv, kv, q], {256: 0.2, 2048: 0.05, 8192: 0.1}[tokens]
    found = roofline.step_time([op(f"{name}.default", [q, kv, kv], [q])]).seconds
    assert found * 1e3 == pytest.approx(forward, rel=within)
    found += roofline.step_time([op(f"{name}_backward.default", back, [q, kv, kv])]).seconds
    assert found * 1e3 == pytest.approx(both, rel=within)


# ------------------------------------------------------------------------------------------ fusion

M, H = 1024, 4096
SIZE = M * H * 2


def everything(one: Op) -> bool:
    return True


def test_a_chain_becomes_one_kernel():
    x, up, a, b, y = (operand(i, M, H) for i in range(5))
    ops = [
        op("aten.silu.default", [x], [a]),
        op("aten.mul.Tensor", [a, up], [b]),
        op("aten.mm.default", [b, operand(9, H, H)], [y]),
    ]
    eager = list(launches(ops))
    assert [launch.read + launch.written for launch in eager[:2]] == [2 * SIZE, 3 * SIZE]
    fused = list(launches(ops, everything))
    assert len(fused) == 2
    assert fused[0].ops == (0, 1)
    assert (fused[0].read, fused[0].written) == (2 * SIZE, SIZE)  # x and up read, b written
    assert fused[1].kind == "gemm"


def test_what_a_product_reads_is_written_and_read_again_behind_it():
    x, h, y, z = (operand(i, M, H) for i in range(4))
    ops = [
        op("aten.neg.default", [x], [h]),
        op("aten.mm.default", [h, operand(9, H, H)], [y]),
        op("aten.add.Tensor", [h, y], [z]),
    ]
    first, _, last = launches(ops, everything)
    assert (first.read, first.written) == (SIZE, SIZE)
    assert (last.read, last.written) == (2 * SIZE, SIZE)


def test_a_maximum_over_all_costs_a_second_pass_and_one_over_rows_does_not():
    x, wide, codes = operand(1, M, H), operand(2, M, H, dtype=F32), operand(3, M, H, dtype=FP8)

    def cast(*scale: int) -> list[Op]:
        most = operand(4, *scale)
        scaled = operand(5, M, H, dtype=F32)
        return [
            op("aten.amax.default", [x], [most]),
            op("aten._to_copy.default", [x], [wide]),
            op("aten.mul.Tensor", [wide, most], [scaled]),
            op("aten._to_copy.default", [scaled], [codes]),
        ]

    by_rows = list(launches(cast(M, 1), everything))
    assert len(by_rows) == 1
    assert by_rows[0].read == SIZE
    of_all = list(launches(cast(1), everything))
    assert len(of_all) == 2
    # twice the BF16 tensor; the float32 copy lives in registers
    assert sum(launch.read for launch in of_all) == 2 * SIZE + 2
    assert of_all[1].written == SIZE / 2


@pytest.mark.parametrize(("operands", "stored"), [(4, False), (5, True)])
def test_a_value_of_few_operands_is_computed_in_each_kernel_that_reads_it(operands, stored):
    """y = a sum; s = max(y); y / s: two kernels, of which both sum, or the first one writes y."""
    ops, y = [], operand(0, M, H)
    for number in range(1, operands):
        ops.append(op("aten.add.Tensor", [y, operand(number, M, H)], [operand(20 + number, M, H)]))
        y = ops[-1].outputs[0]
    most, result = operand(10, 1), operand(11, M, H)
    ops.append(op("aten.max.default", [y], [most]))
    ops.append(op("aten.div.Tensor", [y, most], [result]))
    first, second = launches(ops, everything)
    tiny = most.nbytes
    assert (first.read, first.written) == (operands * SIZE, stored * SIZE + tiny)
    assert (second.read, second.written) == ((1 if stored else operands) * SIZE + tiny, SIZE)
    assert (y.storage in second.inputs) == stored
    assert set(first.ops) & set(second.ops) == (set() if stored else set(range(operands - 1)))


def test_a_sum_over_tokens_reads_for_itself_what_the_rows_around_it_read():
    """Gradients of a norm: of its input, by rows, and of its weight, over tokens."""
    d, x, dx, product = (operand(i, M, H) for i in range(4))
    weight, rows = operand(5, 1, H), operand(6, M, 1)
    ops = [
        op("aten.mul.Tensor", [d, x], [product]),
        op("aten.sum.dim_IntList", [product], [weight]),
        op("aten.sum.dim_IntList", [product], [rows]),
        op("aten.mul.Tensor", [product, rows], [dx]),
    ]
    by_pattern = {launch.pattern: launch for launch in launches(ops, everything)}
    assert by_pattern["straight"].ops == (0, 2, 3)
    assert by_pattern["columns"].ops == (0, 1)
    assert by_pattern["columns"].read == by_pattern["straight"].read == 2 * SIZE


def test_a_recomputation_and_the_backward_that_asks_for_it_are_one_region():
    gate, d, act, dx = (operand(i, M, H) for i in range(4))
    again = op("aten.silu.default", [gate], [act], phase="recompute")
    ops = [again, op("aten.silu_backward.default", [d, gate], [dx], phase="backward")]
    (joint,) = launches(ops, everything)
    assert (joint.read, joint.written) == (2 * SIZE, 2 * SIZE)
    assert len(list(launches([again._replace(phase="forward"), ops[1]], everything))) == 2


def test_nothing_joins_across_phases_or_out_of_the_region():
    x, a, b = (operand(i, M, H) for i in range(3))
    ops = [
        op("aten.neg.default", [x], [a]),
        op("aten.neg.default", [a], [b], phase="backward"),
    ]
    assert len(list(launches(ops, everything))) == 2
    same = [ops[0], op("aten.neg.default", [a], [b], module="head")]
    assert len(list(launches(same, lambda one: one.module != "head"))) == 2


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(0, 3)), max_size=25))
def test_fusion_never_moves_more_and_runs_every_operator(steps):
    names = ("aten.neg.default", "aten.add.Tensor", "aten.mm.default", "aten.max.default")
    ops = []
    for index, (a, b, kind) in enumerate(steps):
        taken = [operand(a, 64, 64)] if kind in (0, 3) else [operand(a, 64, 64), operand(b, 64, 64)]
        shape = (1,) if kind == 3 else (64, 64)
        ops.append(op(names[kind], taken, [operand(100 + index if kind == 3 else a, *shape)]))
    eager, fused = list(launches(ops)), list(launches(ops, everything))
    assert {i for launch in fused for i in launch.ops} == set(range(len(ops)))
    assert all(len(set(launch.ops)) == len(launch.ops) for launch in fused)
    assert sum(k.read + k.written for k in fused) <= sum(k.read + k.written for k in eager)


# ------------------------------------------------------------------------------------------- steps


def test_classes_add_up_to_the_step():
    step = write_step(LLAMA_8B, Setting(1, 2048, method="lora", rank=16, checkpointing="full"))
    time = ON_H100.step_time(step.micro)
    assert sum(time.by_class.values()) == pytest.approx(time.seconds, rel=1e-6)
    assert {"linears", "adapters", "attention", "pointwise", "head and loss"} <= set(time.by_class)
    assert time.bound["linears"] == "compute"
    assert time.bound["pointwise"] == "memory"
    assert 0.2 < time.mfu < 0.7


def test_the_host_is_waited_for_when_shapes_are_small():
    small = write_step(QWEN["0.5B"], Setting(1, 32))
    eager = ON_H100.step_time(small.micro)
    assert eager.by_class[StepPart.WAITING] > 0.5 * eager.seconds
    assert eager.bound["pointwise"] == "launch"
    native = roofline_of(named_gpu("H100"), "native").step_time(small.micro)
    assert native.seconds < 0.6 * eager.seconds


def test_a_ratio_has_an_interval_narrower_than_a_time():
    time, ratio = (spread(1, s) for s in (shared().scatter_time, shared().scatter_ratio))
    assert time.high > ratio.high > ratio.value == 1 > ratio.low > time.low


def test_words_for_adapters_without_modules_in_backward():
    m, n, k, r = 512, 256, 128, 8
    x, y, low, g = operand(1, m, k), operand(2, m, n), operand(3, m, r), operand(4, m, n)
    ops = [
        op("aten.mm.default", [x, operand(10, k, n)], [y], module="layers.0.q_proj.base_layer"),
        op("aten.mm.default", [x, operand(11, k, r)], [low], module="layers.0.q_proj.base_layer"),
        op("aten.mul_.Tensor", [low], [low], module="layers.0.q_proj.base_layer"),
        op(
            "aten.addmm_.default",
            [y, low, operand(12, r, n)],
            [y],
            module="layers.0.q_proj.base_layer",
        ),
        op("aten.mm.default", [g, operand(13, n, r)], [operand(5, m, r)], "backward", ""),
        op("aten.mm.default", [g, operand(10, n, k)], [operand(6, m, k)], "backward", ""),
    ]
    adapters = "adapters"
    assert classes_of(ops) == ["linears", adapters, adapters, adapters, adapters, "linears"]


@pytest.mark.parametrize("split", [1, 2, 4, 8, 16])
def test_a_product_of_one_tile_is_split_over_as_many_units_as_there_are(split):
    """A GEMM of 64 x 64 has one tile, which alone would leave all other units idle."""
    k, pipeline = 4096, 100.0
    share = shape_share(MatrixProduct(1, 64, 64, k, "bf16"), units=split, pipeline_k=pipeline)
    assert share == pytest.approx(0.60 * k / split / (k / split + pipeline))


def test_products_of_the_engine_and_their_casts():
    x, w = operand(1, 64, 32), operand(2, 48, 32)
    codes = [operand(i, size, dtype=FP8) for i, size in ((3, 2048), (4, 2048), (5, 1536))]
    cast, multiply = "finetune_estimator.fp8_cast.default", "finetune_estimator.fp8_mm.default"
    y = operand(6, 64, 48)
    ops = [
        op(cast, [x], codes[:1]),
        op(cast, [x], codes[1:2]),
        op(cast, [w], codes[2:]),
        op(multiply, [codes[0], codes[2]], [y]),
    ]
    assert product_of(ops[3]) == MatrixProduct(1, 64, 48, 32, "fp8")
    assert [launch.read for launch in launches(ops[:3])] == [x.nbytes, 0, w.nbytes]
    assert classes_of(ops)[3] == "linears"
    assert set(classes_of(ops)[:1]) == {"FP8 casts"}


def test_what_only_feeds_fp8_products_is_a_cast():
    x, wide, codes, y = (
        operand(1, M, H),
        operand(2, M, H, dtype=F32),
        operand(3, M, H, dtype=FP8),
        operand(4, M, H),
    )
    scale = operand(5, 1, dtype=F32)
    ops = [
        op("aten.silu.default", [operand(0, M, H)], [x]),
        op("aten.amax.default", [x], [scale]),
        op("aten._to_copy.default", [x], [wide]),
        op("aten.mul.Tensor", [wide, scale], [wide]),
        op("aten._to_copy.default", [wide], [codes]),
        op("aten._scaled_mm.default", [codes, operand(6, H, H, dtype=FP8), scale, scale], [y]),
        op("aten.mul.Tensor", [y, operand(7, M, H)], [operand(8, M, H)]),
    ]
    assert classes_of(ops) == ["pointwise", *["FP8 casts"] * 4, "linears", "pointwise"]


# ---------------------------------------------------------------------------------------- workload


def products(ops: list[Op]) -> float:
    return sum(product.flops for one in ops if (product := product_of(one)))


def test_flops_of_a_written_step():
    tokens = 2048
    full = products(write_step(LLAMA_8B, Setting(1, tokens)).micro)
    weights = LLAMA_8B.parameters - LLAMA_8B.vocabulary * LLAMA_8B.hidden  # embedding: no product
    assert full == pytest.approx(6 * weights * tokens, rel=1e-6)
    layers = LLAMA_8B.layers * LLAMA_8B.layer_parameters
    again = products(write_step(LLAMA_8B, Setting(1, tokens, checkpointing="full")).micro)
    assert again - full == pytest.approx(2 * layers * tokens, rel=1e-6)
    some = products(write_step(LLAMA_8B, Setting(1, tokens, checkpointing="selective")).micro)
    assert full < some < again
    lora = Setting(1, tokens, method="lora", rank=16, targets=ATTENTION_LINEARS + MLP_LINEARS)
    adapters = adapter_parameters(LLAMA_8B, lora)
    assert adapters == 41_943_040  # PEFT prints this for Llama 3 8B
    found = products(write_step(LLAMA_8B, lora).micro)
    assert found == pytest.approx((4 * weights + 6 * adapters) * tokens, rel=1e-6)


def test_fp8_changes_the_precision_of_layers_only():
    plain = write_step(QWEN["0.5B"], Setting(1, 256)).micro
    fp8 = write_step(QWEN["0.5B"], Setting(1, 256, fp8="tensorwise")).micro
    assert products(fp8) == products(plain)
    kinds = {product.precision: product.n for one in fp8 if (product := product_of(one))}
    assert set(kinds) == {"bf16", "fp8"}
    head = [p for one in fp8 if (p := product_of(one)) and p.precision == "bf16"]
    assert all(151936 in (p.m, p.n, p.k) for p in head)


def test_a_written_step_is_like_a_traced_one():
    """Transformers' own Llama, recorded on real tensors: the same products, much the same bytes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = Shape(2, 128, 4, 2, 256, 512)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model: Any = LlamaForCausalLM(config)
    model.to(torch.bfloat16)
    ids = torch.randint(512, (2, 64))
    with Recorder(model, known=(ids,)) as recorder:
        loss = model(ids, labels=ids).loss
        with recorder.during("backward"):
            loss.backward()
    traced, written = recorder.trace.ops, write_step(shape, Setting(2, 64)).micro
    assert products(written) == pytest.approx(products(traced), rel=1e-6)

    def moved(ops: list[Op]) -> float:
        return sum(
            sum(traffic(one))
            for one in ops
            if kind_of(one) in ("pointwise", "reduction", "copy") and ".layers." in one.module
        )

    assert moved(written) == pytest.approx(moved(traced), rel=0.3)


def test_a_mixture_computes_with_the_chosen_experts():
    mixture = Shape(2, 512, 8, 2, 1024, 1000, experts=8, chosen=2)
    dense = Shape(2, 512, 8, 2, 1024, 1000)
    setting = Setting(1, 1024)
    extra = products(write_step(mixture, setting).micro) - products(
        write_step(dense, setting).micro
    )
    assert extra == pytest.approx(6 * 2 * 3 * 512 * 1024 * 1024, rel=0.02)  # one expert more


# ------------------------------------------------------------------------------------------ anchors


def ratio(
    shape: Shape, setting: Setting, fp8: Mapping[str, object], compiled, launched: str
) -> float:
    from dataclasses import replace

    attention, seconds = "cudnn" if launched == "native" else "flash", []
    roofline = roofline_of(named_gpu("H100"), launched, attention, (2, 8, 0))  # pyright: ignore[reportArgumentType]
    for one in (setting, replace(setting, **fp8)):  # pyright: ignore[reportArgumentType]
        step = write_step(shape, one)
        micro = roofline.step_time(step.micro, compiled=compiled)
        update = roofline.step_time(step.update)
        seconds.append(one.accumulation * micro.seconds + update.seconds)
    return seconds[0] / seconds[1]


PUBLISHED = [("0.5B", 32, 1.10), ("3B", 16, 1.29), ("14B", 8, 1.48)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "batch", "published"),
    slow_but(PUBLISHED[1:2], PUBLISHED, pytest.mark.long),
)
def test_llm_q_on_an_h100(size, batch, published):
    """IST-DASLab/llmq README, FP8 over BF16 tokens per second, 524,288 tokens per update."""
    setting = Setting(
        batch,
        1024,
        loss="fused",
        optimizer="fused",
        accumulation=512 // batch,
        compiled=True,
        turn_codes=True,
    )
    fp8 = {"fp8": "tensorwise", "cast_weights_once": True}
    assert ratio(QWEN[size], setting, fp8, in_layers, "native") == pytest.approx(
        published, abs=0.08
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "published"),
    [("tensorwise", 1.25), pytest.param("rowwise", 1.10, marks=pytest.mark.long)],
)
def test_torchao_compiled_on_8b(how, published):
    """torchao `float8/README.md`: Llama 3 8B, 8 H100, 8192 tokens, FSDP2 and torch.compile."""
    setting = Setting(
        1,
        8192,
        checkpointing="selective",
        weight_dtype="float32",
        state_dtype="float32",
        optimizer="fused",
        shards=8,
        compiled=True,
    )
    found = ratio(LLAMA_8B, setting, {"fp8": how}, in_layers, "compiled")
    assert found == pytest.approx(published, abs=0.08)


@pytest.mark.slow
def test_eager_torchao_is_slower_than_bf16():
    setting = Setting(1, 4096, checkpointing="full", optimizer="fused")
    assert ratio(LLAMA_8B, setting, {"fp8": "tensorwise"}, None, "eager") < 0.8


@pytest.mark.long
def test_fp8_pays_more_in_larger_models_and_batches():
    fp8 = {"fp8": "tensorwise"}

    def at(size: str, tokens: int) -> float:
        return ratio(QWEN[size], Setting(1, tokens, compiled=True), fp8, in_layers, "compiled")

    assert at("14B", 8192) > at("3B", 8192) > at("0.5B", 8192)
    assert at("7B", 8192) > at("7B", 1024)


@pytest.mark.parametrize("shards", [True, False])
def test_what_several_gpus_wait_for_is_that_of_all_layers(shards):
    """Two layers hide little of the first gather, forty all but it: no line through two and three.

    Each layer gathers 1 GB in 8.75 ms on 8 GPUs, and computes 10 and 20 ms.
    """

    def timing(layers: int) -> Timing:
        middle = [Group(10**9) for i in range(layers)]
        groups = (Group(12 * 10**9), *middle, Group(10**9, reshard=False))
        computed, ring = (0.01 * layers + 0.01, 0.02 * layers + 0.02), Ring(8, 100)
        if shards:
            found = sharded_traffic(Fsdp2(groups, 8), ring, computed)
        else:
            found = copied_traffic(layers * 10**9, ring, computed)
        classes = {StepPart.LINEARS: sum(computed), StepPart.COMMUNICATION: found.added}
        return Timing(sum(classes.values()), 1, classes, {}, 0.5, 0.1, traffic=found)

    few, more, whole = (timing(n).classes[StepPart.COMMUNICATION] for n in (2, 3, 40))
    found = extrapolated(timing(2), timing(3), 38)
    assert found.classes[StepPart.COMMUNICATION] == pytest.approx(whole, rel=1e-3)
    assert found.seconds == pytest.approx(timing(40).seconds, rel=1e-3)
    if shards:
        assert whole != pytest.approx(few + 38 * (more - few), rel=0.05)


# ------------------------------------------------------------------------------------ host memory

STEP = Hosted(
    down=16e9, up=16e9, last=1e9, raised=16e9, norm=0.1, update=1.5, forward=0.7, backward=2.0,
    batches=1, bus=20e9,
)  # fmt: skip


def test_gradients_hide_behind_backward_but_for_the_last_one() -> None:
    assert STEP.waits == pytest.approx(1 / 20)  # 0.8 s of transfers in 2 s
    assert STEP.moved == (16e9, 16e9)
    short = STEP._replace(backward=0.5)
    assert short.waits == pytest.approx(0.3)
    # Backward of 8192 x 0.8 / 0.5 tokens takes as long as the bus.
    assert short.hides_from(8192) == pytest.approx(13107, abs=1)


def test_a_sum_goes_over_the_bus_twice_in_all_micro_batches_but_the_first() -> None:
    three = STEP._replace(batches=3)
    assert three.moved == (48e9, 48e9)
    assert three.waits == pytest.approx(1 / 20 + 2 * 2 / 20)


def test_weights_go_up_behind_the_update_which_the_gpu_waits_for() -> None:
    assert STEP.on_cpu == pytest.approx(1.6)
    assert STEP.gained == pytest.approx(0.7)  # behind the next forward
    assert STEP._replace(update=0.3).waits == pytest.approx(1 / 20 + 0.5)
