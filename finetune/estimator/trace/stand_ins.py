"""Stand-ins for what cannot run on tensors without values: engines, 4-bit bases, optimizers.

*Transformer Engine* runs on GPUs only. `StandInEngine` allocates what its casts and products do
(`precision.engines.te_products`; TransformerEngine 2.20), operators that no compiler fuses:

* forward casts x and w. FP8 tensor cores of compute capability 8.9 and 9.0 contract along the last
  dimension of both operands only, so each cast is written twice, plain and transposed, if a later
  GEMM needs it; from 10.0 on one copy serves, but block formats scale the two directions apart and
  keep two everywhere.
* x is saved for wgrad as the transposed copy alone, and only if w trains; w is saved for dgrad.
  Without gradient checkpointing every layer's copies live from forward to backward.
* backward casts g, in both directions if both GEMMs follow;
* the scale of the tensor itself takes another pass over it, for its amax;
* in a compiled layer, equal casts become one: q, k and v share the codes of their input.

A block format adds its scales: one byte for 32 elements (MXFP8), one for 16 and half a byte each
(NVFP4), four for 128 (blockwise).

*A frozen base* in FP8 codes is made by the functions that store a real one. bitsandbytes' kernels
reject fake tensors, so 4-bit layers get a forward of the same shapes: packed bytes, dequantized to
the activation's dtype for each GEMM of forward and backward and never saved (bitsandbytes,
`autograd/_functions.py`, MatMul4Bit).

*Loss scaling* (float16) checks the gradients for overflow. `SteadyScale` launches the same kernels
as `torch.amp.GradScaler`, and never overflows, as in almost every step.

*torchao's optimizers* step on a CPU by torchao's function (`helper.optimizer.adamw`), with the
temporaries of one parameter at a time, and so does the rehearsal. On a GPU one kernel updates all
parameters in place and clips their gradients, whose norm is one pass (`clipping`). Both are counted
parameter by parameter, for the bytes that they move and the host's time with each.

*Masters in host memory* (`precision.fp8_params`) are where a GPU's run has them, apart from the
device, and streams other than the one that computes are names: what is allocated on them, when it
goes over and when it is freed is decided by `precision.stored.masters` itself.

*bitsandbytes' paged optimizers* store large states in managed memory, which the driver moves to the
host when the GPU is full, outside PyTorch's allocator.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.optim import Optimizer

from finetune.estimator.speed.operators import ENGINE
from finetune.estimator.trace.fake_cuda import OPS, define, replaced
from finetune.estimator.trace.trace import Memory, Recorder, plain_tensors
from finetune.precision.engines import whole
from finetune.precision.engines.base import Engine, Fp8Mixin
from finetune.precision.model.swap import Swapped, swap
from finetune.precision.numbers import kernels, weights
from finetune.precision.numbers.formats import E4M3
from finetune.precision.numbers.gemm import as_output, as_rows
from finetune.precision.numbers.scaling import Operand, cast_current
from finetune.precision.settings import PrecisionConfig
from finetune.precision.stored.linear import storable, store
from finetune.precision.stored.masters import Master, Masters
from finetune.storage import nf4
from finetune.storage.nf4 import nf4_bytes

# ------------------------------------------------------------------------------------ casts of ours


@contextlib.contextmanager
def casts_to_fuse(recorder: Recorder, model: nn.Module) -> Iterator[None]:
    """Record casts in layers that are compiled later as the operators that Inductor fuses.

    The first micro-step is eager, where kernels of ours do them (`weights.cast_operand`,
    `whole.cast_tensorwise`). Compiled, operators cast weights and gradients under scales that can
    be guessed, as recorded; those of a joined MLP, which its operators cast in passing, are
    recorded to be fused.
    """

    def is_inside(x: Tensor) -> bool:
        module = recorder.owner(x)  # in backward the norm after the last layer, for its first cast
        generates = recorder.phase in ("prompt", "token")  # which runs uncompiled
        return not (module in recorder.around or "/" in module or generates)

    def reference(x: Tensor, fold: Tensor | None, pow2: bool) -> tuple[Tensor, Tensor]:
        wide = x if fold is None else x.float() * fold
        return cast_current(wide, E4M3, 1, pow2=pow2, packed=True)

    def cast_rows(x: Tensor, fold: Tensor | None = None, *, pow2: bool = False) -> Any:
        if not is_inside(x):
            return kernels.cast_rows(x, fold, pow2=pow2)
        return recorder.as_kernel(reference, x, fold, pow2)

    eager_cast, eager_turn = whole.cast_tensorwise, whole.turn
    mlps: list[Any] = [m for m in model.modules() if isinstance(m, whole.MlpMixin)]

    def is_joined(operand: Operand, guesses: Tensor) -> bool:
        of_gradients = (each for m in mlps for each in (m.gate_proj, m.up_proj))
        layers = of_gradients if operand == "g" else (m.down_proj for m in mlps)
        return operand != "w" and any(each.fp8_guesses is guesses for each in layers)

    def cast_whole(
        x: Tensor, operand: Operand, guesses: Tensor, how: whole.Tensorwise,
        *, plain: bool = True, turned: bool = False,
    ) -> Any:  # fmt: skip
        fmt, guessed = how.formats[operand], how.own and how.pow2
        joined = guessed and is_joined(operand, guesses)
        # Scales that can be guessed come from the step before: such a cast is one kernel of ours
        # also in a compiled layer.
        if not is_inside(x) or (guessed and operand != "x" and not joined):
            return eager_cast(x, operand, guesses, how, plain=plain, turned=turned)

        def formula(x: Tensor) -> tuple[Tensor, ...]:
            scale = guesses[0] if joined else whole.scale_of(x, fmt, pow2=how.pow2)
            # In float32, as the kernels compute: Inductor fuses the cast up and down.
            codes = (x.float() * scale).to(fmt.dtype)
            back = codes.t().contiguous() if turned else codes
            return codes, back, scale, scale.reciprocal()

        return kernels.Whole(*recorder.as_kernel(formula, x))

    def turn(x: Tensor, operand: Operand, scale: Tensor, how: whole.Tensorwise) -> Tensor:
        if not is_inside(x):
            return eager_turn(x, operand, scale, how)
        return eager_turn(x, operand, scale, how._replace(own=False))

    with replaced(
        [
            (weights, "cast_rows", cast_rows),
            (whole, "cast_tensorwise", cast_whole),
            (whole, "turn", turn),
        ]
    ):
        yield


# ------------------------------------------------------------------------------- Transformer Engine

define(
    "fp8_cast(Tensor x, float bytes) -> Tensor",
    lambda x, size: x.new_empty(round(x.numel() * size), dtype=torch.float8_e4m3fn),
)
define("fp8_amax(Tensor x) -> Tensor", lambda x: x.new_empty(1, dtype=torch.float32))
for _format in ENGINE:
    define(
        f"{_format}_mm(Tensor a, Tensor b, int[] shape, ScalarType dtype) -> Tensor",
        lambda a, _, shape, dtype: a.new_empty(shape, dtype=dtype),
    )


class _EngineLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, engine: StandInEngine, of: Tensor) -> Tensor:
        (m, k), (n, _) = x.shape, w.shape
        ctx.shapes, ctx.engine, ctx.dtype = (m, n, k), engine, w.dtype
        x_needed, w_needed = ctx.needs_input_grad[:2]
        xq = engine.shared(of, lambda: engine.cast(x, both=w_needed))
        wq = engine.cast(w, both=x_needed)
        # [M, K] @ [K, N]
        y = engine.multiply(xq[0], wq[0], [m, n], x.dtype)
        ctx.needed = w_needed, x_needed
        ctx.save_for_backward(*xq[-1:] if w_needed else (), *wq[-1:] if x_needed else ())
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor):
        (m, n, k), engine, (w_needed, x_needed) = ctx.shapes, ctx.engine, ctx.needed
        saved = list(ctx.saved_tensors)
        xq = saved.pop(0) if w_needed else None
        gq = engine.cast(g, both=w_needed)
        # dgrad [M, N] @ [N, K], wgrad [N, M] @ [M, K]
        dx = engine.multiply(gq[0], saved[-1], [m, k], g.dtype) if x_needed else None
        dw = engine.multiply(gq[-1], xq, [n, k], ctx.dtype) if w_needed else None
        return dx, dw, None, None


class EngineMixin(Fp8Mixin):
    """Forward of a linear layer by Transformer Engine's casts and products."""

    def fp8_linear(self, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        rows = as_rows(x)
        y = _EngineLinear.apply(rows, w.to(rows.dtype), self.fp8_engine, x)
        return as_output(y, x, bias)


class StandInEngine(Engine):
    """Stand-in for Transformer Engine."""

    name = "te"
    mixin = EngineMixin

    def __init__(
        self, precision: PrecisionConfig, capability: tuple[int, int], *, compiled: bool
    ) -> None:
        super().__init__(precision)
        form = precision.scaling if precision.scaling in ENGINE else "fp8"
        self.multiply = getattr(OPS, f"{form}_mm")
        self._size, self._compiled = ENGINE[form][0], compiled
        # From Blackwell on tensor cores read either layout; block scales differ by direction
        # everywhere.
        self._copies = 1 if capability >= (10, 0) and form == "fp8" else 2
        self._last: tuple[Any, list[Tensor]] = (lambda: None, [])

    def cast(self, x: Tensor, *, both: bool) -> list[Tensor]:
        """Codes of a matrix, row-wise, and column-wise if `both` directions are multiplied."""
        if self.precision.facts.reads_twice and not self.precision.pow2_scales:
            OPS.fp8_amax(x)  # which kernels of ours find in passing
        return [OPS.fp8_cast(x, self._size) for _ in range(self._copies if both else 1)]

    def shared(self, x: Tensor, cast: Callable[[], list[Tensor]]) -> list[Tensor]:
        """Codes of a layer's input: those of the layer before, if it has the same in its graph."""
        of, codes = self._last
        if not self._compiled or of() is not x:
            codes = cast()
            # A weak reference, or the last input would stay in memory to the end of the step.
            self._last = weakref.ref(x), codes if self._compiled else []
        return codes


def engine_maker(capability: tuple[int, int], *, compiled: bool) -> Any:
    """Replacement of `convert.make_engine` for Transformer Engine."""

    def make_engine(precision: PrecisionConfig, layers: int, **_: Any) -> Engine:
        return StandInEngine(precision, capability, compiled=compiled)

    return make_engine


# -------------------------------------------------------------------------------------- stored base

TABLES = 4 * (16 + 256 + 1)
"""Bytes of the tables of a 4-bit layer: NF4's codes, those of its absmaxes, their mean."""

define(
    "dequantize(Tensor packed, int[] shape, ScalarType dtype) -> Tensor",
    lambda packed, shape, dtype: packed.new_empty(shape, dtype=dtype),
)


class _FourBitMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, shape: list[int]) -> Tensor:
        ctx.save_for_backward(packed)
        ctx.shape = shape
        # [M, K] @ [K, N]
        return x @ OPS.dequantize(packed, shape, x.dtype).t()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor):
        (packed,) = ctx.saved_tensors
        # [M, N] @ [N, K]
        return g @ OPS.dequantize(packed, ctx.shape, g.dtype), None, None


class FourBitMixin(Swapped):
    """`bitsandbytes.nn.Linear4bit` with a matmul for tensors without memory."""

    in_features: int
    out_features: int
    weight: nn.Parameter
    whole_dtype: torch.dtype
    bias: nn.Parameter | None

    def whole(self) -> Tensor:
        """The weight [N, K] as PEFT's methods read it."""
        shape = [self.out_features, self.in_features]
        return OPS.dequantize(self.weight, shape, self.whole_dtype)

    def forward(self, x: Tensor) -> Tensor:
        shape, dtype = [self.out_features, self.in_features], x.dtype
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        # `bnb_4bit_compute_dtype` of `storage.nf4` is BF16, whatever comes in.
        y = _FourBitMatmul.apply(x.to(torch.bfloat16), self.weight, shape)
        y = y if self.bias is None else y + self.bias.to(y.dtype)
        return y.to(dtype)


def as_four_bit(model: Any) -> None:
    """Replace the linear layers of a meta model by 4-bit ones, before adapters are attached."""
    from transformers.quantizers import AutoHfQuantizer

    quantizer = AutoHfQuantizer.from_config(nf4.quantization_config(model), pre_quantized=False)
    quantizer.preprocess_model(model, device_map={"": torch.device("meta")})
    # Trainers read a quantizer of such a model; TRL casts its adapters, which runs undo.
    model.is_quantized = model.is_loaded_in_4bit = False


def store_base(model: nn.Module, storage: str | None) -> None:
    """Store the frozen base of a fake model as `model.storage` requests."""
    if storage == "fp8":
        for name in storable(model):
            store(model.get_submodule(name), "row")
    if storage != "nf4":
        return
    from bitsandbytes.nn import Linear4bit

    dtype = cast(Any, model).get_input_embeddings().weight.dtype  # as loaded, before it is packed
    for module in [m for m in model.modules() if isinstance(m, Linear4bit)]:
        shaped: Any = module
        packed = nf4_bytes(math.prod(shaped.weight.shape)) + TABLES
        shaped.weight = nn.Parameter(torch.empty(packed, dtype=torch.uint8), requires_grad=False)
        swap(module, FourBitMixin, whole_dtype=dtype)


@contextlib.contextmanager
def four_bit_weights() -> Iterator[None]:
    """Let DoRA read weights of `as_four_bit` and `store_base`, which bitsandbytes dequantizes."""
    from peft.tuners.lora import dora

    def read(module: Any) -> Tensor:
        return module.whole() if isinstance(module, FourBitMixin) else module.weight

    with replaced([(dora, "dequantize_module_weight", read)]):
        yield


# ---------------------------------------------------------------------------------- host memory

define("to_device(Tensor x) -> Tensor", torch.empty_like)


class _Side:
    """A stream that makes nobody wait."""

    def __init__(self, name: str = "") -> None:
        self.name = name

    def wait_stream(self, *_: Any) -> None:
        pass

    wait_event = record_event = synchronize = wait_stream


@contextlib.contextmanager
def masters_apart(masters: Masters, recorder: Recorder) -> Iterator[None]:
    """Record what a GPU's run has in host memory, and what its streams of transfers allocate."""
    from torch.optim import optimizer as optimizers
    from torch.utils import _foreach_utils

    @contextlib.contextmanager
    def on(stream: _Side) -> Iterator[None]:
        before, recorder.stream = recorder.stream, stream.name
        yield
        recorder.stream = before

    def pinned(_: Masters, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        made = torch.empty(shape, dtype=dtype)
        keep([made], "pinned")
        return made

    def send(of: Masters, master: Master, g: Tensor) -> None:
        for storage in recorder.storages_of([g]):
            storage.kind = "gradients"
        plain_send(of, master, g)

    def keep(tensors: Iterable[Tensor], memory: Memory) -> None:
        for storage in recorder.storages_of(tensors):
            storage.memory = memory

    def refresh(of: Masters) -> None:
        with recorder.during("optimizer"):  # once for all micro-batches of a step
            torch.empty(0)  # a mark is found by what is allocated next, and tables allocate nothing
            plain_refresh(of)

    plain_send, plain_refresh = Masters.send, Masters.refresh
    keep((one.parameter for one in masters.each), "pinned")
    # A copy of a table is made there, in the form of its master.
    recorder.to_device |= {OPS.to_device.default, torch.ops.aten.empty_like.default}
    sides = _Side("up"), _Side("down")
    changes = [
        (Masters, "is_apart", True),
        (Masters, "_both", sides),
        (Masters, "bring", lambda _, x: OPS.to_device(x.detach())),
        (Masters, "host_memory", pinned),
        (Masters, "send", send),
        (Masters, "refresh", refresh),
        # Tensors of a CPU are among those that are stepped and clipped: one by one, all of them.
        (optimizers, "_get_foreach_kernels_supported_devices", list),
        (_foreach_utils, "_get_foreach_kernels_supported_devices", list),
        (torch.cuda, "current_stream", lambda _=None: _Side()),
        (torch.cuda, "stream", on),
    ]
    with replaced(changes):
        yield


def settle_masters(masters: Masters, optimizer: Optimizer, recorder: Recorder) -> None:
    """After a first step: codes are there, stale, and states are with their masters."""
    masters.refresh()
    apart = masters.is_apart
    for one in masters.each:
        for storage in recorder.storages_of(x for x in (one.bits, one.inverse) if x is not None):
            storage.kind = "weights"
        states = optimizer.state[one.parameter].values()
        for storage in recorder.storages_of(x for x in states if isinstance(x, Tensor) and apart):
            storage.memory = "pageable"
        one.forget()


# --------------------------------------------------------------------------------------- optimizers

SCALE = 2.0**16
"""`init_scale` of `torch.amp.GradScaler`."""
PAGED_FROM = 100_000
"""Elements from which bitsandbytes pages a state (`Optimizer8bit.get_state_buffer`)."""

define("update(Tensor grad, Tensor(a!)[] states) -> ()", lambda *_: None)
define("squares(Tensor grad) -> Tensor", lambda grad: grad.new_empty((), dtype=torch.float32))


class SteadyScale:
    """Stand-in for `torch.amp.GradScaler`."""

    def __init__(self) -> None:
        self._unscaled = False

    def scale(self, loss: Tensor) -> Tensor:
        # A tensor, as GradScaler has it.
        return loss * torch.full((), SCALE)

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide all gradients by the scale, in place."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        gradients = [p.grad for p in parameters if p.grad is not None]
        overflow, inverse = torch.zeros(()), torch.full((), 1 / SCALE)
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, overflow, inverse)
        self._unscaled = True

    def step(self, optimizer: Optimizer, closure: Any = None) -> None:
        """Unscale, unless already done before clipping, and update."""
        if not self._unscaled:
            self.unscale_(optimizer)
        optimizer.step()

    def update(self) -> None:
        self._unscaled = False

    def get_scale(self) -> float:
        return SCALE


@contextlib.contextmanager
def torchao_updates(*, kernels: bool) -> Iterator[None]:
    """Finish steps of torchao's optimizers without values, by `kernels` or its own function."""
    from finetune.training.helper.optimizer import adamw

    def finish(_: Any, noted: list[adamw.Noted]) -> None:
        for x in (one.asked for one in noted):
            if kernels:
                states = [part for state in (x.first, x.second) for part in plain_tensors(state)]
                OPS.update(x.gradient, [*plain_tensors(x.weight), *states])
            else:
                adamw.single_param_adam(*x)

    with replaced([(adamw.Update, "finish", finish)]):
        yield


def clip_in_update(parameters: Iterable[Tensor], max_norm: float) -> Tensor:
    """Stand-in for `Accelerator.clip_grad_norm_` before an update that clips."""
    squares = [OPS.squares(p.grad) for p in parameters if p.grad is not None]
    return torch.stack(squares).sum().sqrt()


@contextlib.contextmanager
def paged_states(recorder: Recorder) -> Iterator[None]:
    """Exclude the large states of bitsandbytes' optimizers, in managed memory on a GPU."""
    from bitsandbytes import functional
    from bitsandbytes.optim.optimizer import Optimizer8bit

    def get_paged(*shape: int, dtype: torch.dtype = torch.float32, device: Any = None) -> Tensor:
        with recorder.outside_of_allocator():
            return torch.zeros(shape, dtype=dtype)

    def get_state_buffer(optimizer: Any, p: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        if p.numel() < PAGED_FROM:
            return torch.zeros_like(p, dtype=dtype)
        return get_paged(*p.shape, dtype=dtype)

    changes = [
        (functional, "get_paged", get_paged),  # AdEMAMix asks for it by itself
        (functional, "fill", torch.fill_),
        (Optimizer8bit, "get_state_buffer", get_state_buffer),
    ]
    with replaced(changes):
        yield
