"""A trace: exact bytes of everything that lives, its kind, and which module ran it."""

from __future__ import annotations

import contextlib
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F
from torch.nn.modules import module as module_hooks
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.checkpoint import checkpoint

from finetune.estimator.trace import fake_cuda, stand_ins
from finetune.estimator.trace.fake_cuda import FLOAT32, on_gpu, to_fake, without_memory
from finetune.estimator.trace.trace import KINDS, Recorder, Trace, around_decoder
from finetune.precision.numbers.gemm import mm
from finetune.training.health.memory_meter import LiveTensors

B, K, N = 4, 8, 16


class Layer(nn.Module):
    """One linear layer and a ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(K, N, bias=False)
        self.back = nn.Linear(N, K, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.back(self.linear(x).relu())


class Net(nn.Module):
    """Layers between an embedding and a head, as a causal language model has them."""

    def __init__(self, *, tied: bool = False, checkpointing: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, K)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(K, 32, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.checkpointing = checkpointing

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointing else layer(x)
        return self.head(x)


def record(net: Net, *, real: bool = False) -> Trace:
    """A step of AdamW, as rehearsals record one."""
    optimizer = torch.optim.AdamW(net.parameters(), foreach=False)
    ids = torch.arange(B) if real else torch.zeros(B, dtype=torch.long)
    recorder = Recorder(net, [ids])
    with recorder:
        loss = net(ids).sum()
        recorder.mark("backward")
        with recorder.during("backward"):
            loss.backward()
        recorder.mark("optimizer")
        recorder.sort_gradients()
        with recorder.during("optimizer"):
            optimizer.step()
        recorder.mark("end")
        del loss
    return recorder.trace


def rehearse(**kwargs: bool) -> Trace:
    with torch.device("meta"):
        net = Net(**kwargs)
    with without_memory():
        to_fake(net)
        return record(net)


def of_kind(trace: Trace, kind: str) -> int:
    return sum(block.nbytes for block in trace.storages.values() if block.kind == kind)


WEIGHTS = 4 * (32 * K + 2 * 2 * K * N)
HEAD = 4 * 32 * K


@pytest.mark.parametrize("tied", [False, True])
def test_weights_gradients_and_states_to_the_byte(tied) -> None:
    trace = rehearse(tied=tied)
    weights = WEIGHTS + (0 if tied else HEAD)
    parameters = 5 if tied else 6
    assert of_kind(trace, "weights") == weights
    assert trace.initial_bytes == weights + 8 * B
    # A tied weight has two gradients for a moment, and holds one.
    assert of_kind(trace, "gradients") == weights
    assert of_kind(trace, "optimizer") == 2 * weights + 4 * parameters  # moments; steps
    alive = trace.alive(trace.marks["end"] - 1)
    left = sum(trace.storages[n].nbytes for n in alive)
    assert left == 4 * weights + 8 * B + 4 * parameters + 4  # and the loss


def test_what_is_saved_and_what_belongs_to_the_logits() -> None:
    trace = rehearse()
    at = trace.marks["backward"] - 1
    saved = [trace.storages[n] for n in trace.alive(at) if n not in trace.initial]
    layers = [b for b in saved if b.module.startswith("layers.")]
    assert sum(b.nbytes for b in layers) == 2 * 4 * B * (N + K)  # ReLU's output; the layer's
    assert {b.kind for b in layers} == {"saved"}
    around = [b for b in saved if not b.module.startswith("layers.")]
    assert {b.kind for b in around} == {"logits", "saved"}
    assert sum(b.nbytes for b in around) == 4 * B * K + 4  # embedded ids, the loss; logits are gone
    assert around_decoder(Net()) == {"", "head"}


def test_the_decoder_is_the_longest_list_of_layers() -> None:
    """A tower for images has layers too, and stands beside the decoder's roots."""
    layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
    parts = {
        "language": nn.ModuleDict({"model": nn.ModuleDict({"layers": layers})}),
        "vision": nn.ModuleDict({"tower": nn.ModuleDict({"blocks": layers[:1]})}),
    }
    assert around_decoder(nn.ModuleDict(parts)) == {"", "language"}


@pytest.mark.parametrize(
    ("capability", "masked", "kernel"),
    [((8, 0), False, "flash"), ((8, 0), True, "efficient"), ((7, 5), False, "efficient")],
)
def test_a_mask_decides_over_the_kernel_of_attention(
    capability, masked, kernel, monkeypatch
) -> None:
    taken = []
    monkeypatch.setattr(fake_cuda, "fused", lambda *call: taken.append(call[-1]))
    x = torch.zeros(1, 2, 4, 64, dtype=torch.bfloat16)
    mask = torch.zeros(4, 4) if masked else None
    fake_cuda.attention_on(capability)(x, x, x, attn_mask=mask)
    assert taken == [kernel]


@pytest.mark.parametrize(
    ("numbers", "each", "codes"), [(64, 1.0, 64), (64, 2.0, 128), (10, 1.0625, 11)]
)
def test_a_cast_of_the_engine_holds_its_bytes_of_each_number(numbers, each, codes) -> None:
    """MXFP8 has a byte of scale for 32 numbers, and both orientations are twice as much."""
    made = stand_ins.OPS.fp8_cast(torch.zeros(numbers, device="meta"), each)
    assert (made.numel(), made.element_size()) == (codes, 1)


def test_what_backward_makes_belongs_to_the_layer_that_it_is_for() -> None:
    """No module runs then: what ReLU's gradient holds is no part of the head and the loss."""
    made = [b for b in rehearse().storages.values() if b.phase == "backward"]
    relu = [b for b in made if b.op == "threshold_backward.default"]
    assert [b.module for b in relu] == ["layers.1", "layers.0"]
    assert {b.kind for b in relu} == {"temporary"}


def test_a_tensor_in_eight_bits_is_an_fp8_copy() -> None:
    recorder = Recorder()
    with without_memory(), recorder:
        x = torch.ones(16, 16).to(torch.float8_e4m3fn)
        assert x.nbytes == 256
    assert of_kind(recorder.trace, "fp8") == 256


def test_phases_and_modules_of_operators() -> None:
    trace = rehearse()
    products = [op for op in trace.ops if op.name == "aten.mm.default"]
    forward = [op.module for op in products if op.phase == "forward"]
    assert forward == [
        "layers.0.linear", "layers.0.back", "layers.1.linear", "layers.1.back", "head",
    ]  # fmt: skip
    backward = [op.module for op in products if op.phase == "backward"]
    assert len(backward) == 2 * len(forward)
    assert backward[0] == "layers.1.back"  # whose output the head's weight gradient reads
    assert {op.phase for op in trace.ops} == {"forward", "backward", "optimizer"}
    first = products[0]
    assert [o.shape for o in first.inputs] == [(B, K), (K, N)]
    assert [o.nbytes for o in (*first.inputs, *first.outputs)] == [128, 512, 256]
    assert all(op.phase == "optimizer" for op in trace.ops if "addcdiv" in op.name)


def test_a_recomputation_is_told_from_backward_and_belongs_to_its_modules() -> None:
    trace = rehearse(checkpointing=True)
    again = [op for op in trace.ops if op.phase == "recompute"]
    products = [op.module for op in again if op.name == "aten.mm.default"]
    assert products == ["layers.1.linear", "layers.0.linear"]  # no further than is needed
    assert all(op.module.startswith("layers.") for op in again)
    after = [op.phase for op in trace.ops if op.name == "aten.mm.default"]
    assert after[-1] == "backward"
    plain = rehearse()
    at = [t.marks["backward"] - 1 for t in (plain, trace)]
    peaks = [
        sum(t.storages[n].nbytes for n in t.alive(i))
        for t, i in zip((plain, trace), at, strict=True)
    ]
    assert peaks[0] - peaks[1] == 2 * 4 * B * N  # ReLU's outputs


def test_views_are_no_operators_and_hold_no_memory() -> None:
    recorder = Recorder()
    with without_memory(), recorder:
        x = torch.ones(4, 4)
        y = x.t()[1:].unsqueeze(0).expand(2, -1, -1)
        del x
        assert [e.nbytes for e in recorder.trace.events] == [64]
        assert y.shape == (2, 3, 4)
        del y
    assert [e.nbytes for e in recorder.trace.events] == [64, -64]
    with without_memory(), recorder:
        z = torch.ones(2)
    del z
    assert [e.nbytes for e in recorder.trace.events] == [64, -64, 8]  # a trace ends when it is left
    assert [op.name for op in recorder.trace.ops] == ["aten.ones.default"] * 2


def test_an_operand_that_nobody_told_of_was_held() -> None:
    with without_memory():
        x = torch.ones(100)
        recorder = Recorder()
        with recorder:
            y = x[10:] * 2
            del y
    assert recorder.trace.initial_bytes == 400
    assert [e.nbytes for e in recorder.trace.events] == [360, -360]
    assert recorder.trace.peak() == (760, 0)


def test_the_same_step_writes_the_same_trace() -> None:
    first, second = rehearse(checkpointing=True), rehearse(checkpointing=True)
    assert first.ops == second.ops
    assert first.events == second.events
    assert first.initial == second.initial
    assert first.storages == second.storages


def test_a_tape_of_real_tensors_is_that_of_fake_ones() -> None:
    """And both have the peak of the live tensors of that step."""
    fake, real = rehearse(), record(Net(), real=True)
    assert [e.nbytes for e in fake.events] == [e.nbytes for e in real.events]
    assert [op.name for op in fake.ops] == [op.name for op in real.ops]
    net, ids = Net(), torch.arange(B)
    optimizer = torch.optim.AdamW(net.parameters(), foreach=False)
    with LiveTensors([*net.parameters(), ids]) as live:
        loss = net(ids).sum()
        loss.backward()
        optimizer.step()
    assert fake.peak()[0] == live.peak


# ------------------------------------------------------------------------------------- exact counts


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["new", "view", "free", "add"]), st.integers(1, 50)), max_size=30
    )
)
def test_events_follow_any_program(program) -> None:
    """Bytes alive and their peak are those of a program of allocations, views and frees."""
    recorder = Recorder()
    tensors: list[Tensor] = []
    sizes: dict[int, int] = {}
    owner: list[int] = []
    most = 0
    fresh = itertools.count()
    with without_memory(), recorder:
        for what, size in program:
            if what == "new":
                tensors.append(torch.empty(size))
                owner.append(next(fresh))
                sizes[owner[-1]] = 4 * size
            elif tensors:
                i = size % len(tensors)
                if what == "view":
                    tensors.append(tensors[i][:1])
                    owner.append(owner[i])
                elif what == "add":
                    tensors.append(tensors[i] + 1)
                    owner.append(next(fresh))
                    sizes[owner[-1]] = tensors[-1].nbytes
                else:
                    del tensors[i], owner[i]
            alive = sum(sizes[o] for o in set(owner))
            most = max(most, alive)
            assert sum(e.nbytes for e in recorder.trace.events) == alive
        assert recorder.trace.peak()[0] == most
        trace = recorder.trace
        living = trace.alive(len(trace.events) - 1)
        assert sum(trace.storages[n].nbytes for n in living) == sum(sizes[o] for o in set(owner))
        tensors.clear()
        assert sum(e.nbytes for e in recorder.trace.events) == 0


# ---------------------------------------------------------------------------- leaving things behind


def test_a_wrapper_counts_as_what_it_wraps() -> None:
    from torchao.optim.subclass_8bit import OptimState8bit

    state = OptimState8bit.zeros((64, 256), signed=True, block_size=256)
    other = torch.ones(64, 256)
    inside = state.codes.nbytes + state.scale.nbytes + state.qmap.nbytes
    recorder = Recorder(None, [state, other])
    with recorder:
        state.lerp(other, 0.5)
    assert recorder.trace.initial_bytes == inside + other.nbytes
    assert recorder.trace.peak()[0] == inside + 3 * other.nbytes  # looked up; the result


def test_nothing_is_left_after_an_error() -> None:
    hooks = (module_hooks._global_forward_hooks, module_hooks._global_forward_pre_hooks)
    before = [len(x) for x in hooks]
    net = Net()
    recorder = Recorder(net)

    def fails() -> None:
        with recorder, recorder.during("backward"):
            assert _get_current_dispatch_mode() is recorder
            assert len(hooks[0]) == before[0] + 1
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert _get_current_dispatch_mode() is None
    assert [len(x) for x in hooks] == before
    assert recorder.phase == "forward"
    with pytest.raises(ZeroDivisionError), without_memory():
        raise ZeroDivisionError
    assert type(torch.ones(1)) is not FakeTensor


def test_an_index_by_a_mask_is_taken_apart_and_leaves_no_hook() -> None:
    before = len(module_hooks._global_forward_hooks)
    net, mask = Net(), torch.tensor([True, False, True, True])
    recorder = Recorder(net)
    with without_memory(), recorder:
        picked = torch.ones(4, 8)[mask]
        assert len(module_hooks._global_forward_hooks) == before + 1
    assert picked.shape == (3, 8)
    assert len(module_hooks._global_forward_hooks) == before
    assert {"aten.nonzero.default", "aten.index.Tensor"} <= {op.name for op in recorder.trace.ops}


def patched() -> list[object]:
    import torch.optim.optimizer as optimizers
    from torch.utils import _foreach_utils
    from trl.kernels import ChunkedLogProbFunction
    from trl.trainer import utils as trl_utils

    from finetune.precision.numbers import gemm
    from finetune.precision.numbers import weights as tiles

    found: list[object] = [
        optimizers._get_foreach_kernels_supported_devices,
        optimizers._foreach_supported_types,
        _foreach_utils._get_foreach_kernels_supported_devices,
        trl_utils._use_triton,
        vars(ChunkedLogProbFunction).get("apply"),
        gemm.add_mm,
        F.scaled_dot_product_attention,
        tiles.SLAB,
        tiles.SLAB_ELSEWHERE,
    ]
    for owner, names in FLOAT32.items():
        found += [getattr(owner, name) for name in names.split()]
    return found


@pytest.mark.parametrize("error", [None, ZeroDivisionError])
def test_functions_are_put_back_after_a_gpu_was_played(error) -> None:
    before = patched()
    own = {name: name in vars(Tensor) for name in FLOAT32[Tensor].split()}
    during: list[object] = []
    with (
        contextlib.nullcontext() if error is None else pytest.raises(error),
        without_memory(),
        on_gpu(),
    ):
        during = patched()
        if error is not None:
            raise error
    assert all(a is b for a, b in zip(before, patched(), strict=True))
    assert {name: name in vars(Tensor) for name in own} == own
    assert sum(a is not b for a, b in zip(before, during, strict=True)) > len(before) // 2


def test_cuda_computes_in_float32_what_its_list_says() -> None:
    x = torch.ones(8, 8, dtype=torch.bfloat16)
    with on_gpu():
        assert x.pow(2).dtype is torch.bfloat16
        with torch.autocast("cpu", torch.bfloat16):
            assert x.pow(2).dtype is torch.float32
            assert (x**2).dtype is torch.float32
            assert (x @ x).dtype is torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        assert x.pow(2).dtype is torch.bfloat16


def test_a_gradient_of_float32_masters_is_one_product_as_on_a_gpu() -> None:
    with without_memory(), on_gpu():
        x = torch.ones(64, 64, dtype=torch.bfloat16)
        with LiveTensors([x]) as live:
            y = mm(x, x, torch.float32)
    assert y.dtype is torch.float32
    assert live.peak == x.nbytes + y.nbytes, "no product in 16 bits in between"


def test_a_fake_model_keeps_its_ties_types_and_what_trains() -> None:
    with torch.device("meta"):
        net = Net(tied=True).to(torch.bfloat16)
    net.embed.weight.requires_grad_(False)
    with without_memory():
        to_fake(net)
    assert net.head.weight is net.embed.weight
    assert not net.head.weight.requires_grad
    assert isinstance(net.head.weight, nn.Parameter)
    assert type(net.head.weight) is FakeTensor
    assert net.head.weight.device == torch.device("cpu")
    assert {p.dtype for p in net.parameters()} == {torch.bfloat16}
    assert list(KINDS)
