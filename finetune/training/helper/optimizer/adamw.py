"""AdamW with states of few bits: one update of all tensors of an optimizer.

torchao steps tensor by tensor, and compiles its update of a tensor with `torch.compile`: how many
bytes that moves depends on the version of torch. Here its step runs up to that call, which notes
its arguments instead (`Update`); the update of all noted tensors follows:

    CUDA with Triton   one launch of a kernel for tensors of the same types and settings
                       (`adamw_kernels`): 10 bytes a number with 8-bit states and BF16
    host memory        from `adamw_host.LEAST` numbers on, compiled C++ for each tensor
                       (`adamw_host`), by all threads of torch, with the kernel's bits
    elsewhere          torchao's own function for each tensor, uncompiled, with the same bits but
                       for roots: torch's on a CPU may be off by a unit in the last place

    bytes a number     read: weight 2, gradient 2, codes 1 + 1;  written: weight 2, codes 1 + 1;
                       scales, 4 bytes for 256 numbers, 4 times: 1/16

*Rounding by chance* of BF16 weights takes 16 random bits for each number from Philox-4x32-7 (Salmon
et al. 2011), whose counter is the place of the number in its tensor and the tensor's place in the
optimizer, and whose key is the number of the step. No generator's state is involved: replicas of
data parallelism, a resumed run and both implementations round alike, and dropout draws as before.
The 16 bits are added below the BF16 number, and its carry rounds. NaN stays NaN, which torchao's
own rounding may turn into zero (the carry of 0x7FFFFFFF, the NaN of a GPU, overflows).
"""

from __future__ import annotations

import contextlib
import functools
import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer
from torchao.optim.adam import single_param_adam
from torchao.optim.quant_utils import quantize_4bit_with_qmap, quantize_8bit_with_qmap
from torchao.optim.subclass_4bit import OptimState4bit
from torchao.optim.subclass_8bit import OptimState8bit
from torchao.optim.subclass_fp8 import OptimStateFp8

from finetune.hardware.device import has_launcher, has_triton
from finetune.precision.proof.movement import local_part
from finetune.training.helper.optimizer import adamw_host
from finetune.training.helper.replacing import replaced

PHILOX = (0xD2511F53, 0xCD9E8D57, 0x9E3779B9, 0xBB67AE85)
"""Multipliers and increments of the key."""
ROUNDS = 7
"""The fewest without a known flaw."""
EACH = 8
"""Numbers that a thread processes at a time: 16 bytes of BF16, rounded by one draw of 128 bits."""
WARPS = 4
"""Warps of a program."""
TILE = 32 * WARPS * EACH
"""Numbers that they process at a time."""
CHUNK = 32 * TILE
"""Numbers of a program."""
BLOCKS = tuple(2**n for n in range(3, 11))
"""Numbers under one scale that the kernel takes, up to `TILE`."""
LEVELS = {OptimState8bit: 256, OptimState4bit: 16, OptimStateFp8: 8}
"""Kind of a state for the kernel, by class: levels of its table, 8 for the numbers of FP8."""
WORD = 0xFFFFFFFF


class Asked(NamedTuple):
    """Arguments of `single_param_adam`, of the part of a tensor that this process has."""

    weight: Tensor
    gradient: Tensor
    step: Tensor
    first: Any
    second: Any
    largest: Tensor | None
    lr: Tensor
    beta1: float
    beta2: float
    decay: float
    eps: float
    decoupled: bool
    chance: bool


class Draws(NamedTuple):
    """Where a tensor's random numbers are: its number in the optimizer, its first number's."""

    tensor: int
    first: int


class Noted(NamedTuple):
    """The update of a tensor that a step has asked for, of this process's part of it.

    Attributes:
        factor: what the gradient is multiplied by, a number.
        numbers: of all tensors of the step.
    """

    parameter: Tensor
    asked: Asked
    place: Draws
    factor: Tensor | None
    numbers: int


def runs_kernels(device: torch.device, numbers: int) -> bool:
    """True where the update of an optimizer of so many numbers is a kernel on a device.

    All processes have to say the same: clipping adds up over them. A host that cannot compile has
    torchao's function for a kernel.
    """
    if in_host_memory(device):
        return numbers >= adamw_host.LEAST
    return device.type == "cuda" and bool(has_triton() and has_launcher())


def in_host_memory(device: torch.device) -> bool:
    """True where kernels are those of `adamw_host`."""
    return device.type == "cpu"


# ---------------------------------------------------------------------------------------- rounding


def rounded(x: Tensor, step: int, place: Draws) -> Tensor:
    """BF16 numbers above or below x, float32, with the probabilities that keep the mean."""
    halves = _halves(x.numel(), step, place, x.device).view(x.shape)
    # As integers: adding 16 random bits below a BF16 number carries with the probability of its
    # remainder.
    up = (x.contiguous().view(torch.int32) + halves) >> 16
    return torch.where(x.isnan(), x.bfloat16(), up.to(torch.int16).view(torch.bfloat16))


def _halves(count: int, step: int, place: Draws, device: torch.device) -> Tensor:
    """16 random bits for each of `count` numbers, int32. Products of two words wrap in int64."""
    # Masks of 32 bits below: torch (2.13) computes next to nothing with uint32.
    a, b, up0, up1 = PHILOX
    # The key of Philox is 64 bits wide, in two words.
    key0, key1 = step & WORD, step >> 32
    c0 = (torch.arange(-(-count // EACH), device=device) + place.first // EACH) & WORD
    c1 = torch.full_like(c0, place.tensor)
    c2 = c3 = torch.zeros_like(c0)
    for _ in range(ROUNDS):
        x, y = a * c0, b * c2
        c0, c1 = (y >> 32 & WORD) ^ c1 ^ key0, y & WORD
        c2, c3 = (x >> 32 & WORD) ^ c3 ^ key1, x & WORD
        key0, key1 = (key0 + up0) & WORD, (key1 + up1) & WORD
    words = torch.stack((c0, c1, c2, c3), 1)
    return torch.stack((words & 0xFFFF, words >> 16), 2).flatten()[:count].int()


# ------------------------------------------------------------------------------------- the update


def update_tensor(x: Asked, place: Draws, factor: Tensor | None) -> None:
    """Update one tensor by torchao's function; the reference of the kernel."""
    if factor is not None:
        x = x._replace(gradient=x.gradient.float() * factor)
    if not x.chance:
        single_param_adam(*x)
        return
    wide = x.weight.float()
    # In float32 and without torchao's own rounding, which draws from the generator of the device.
    single_param_adam(wide, *x[1:-1], False)
    x.weight.copy_(rounded(wide, int(x.step), place))


def no_factor() -> Tensor | None:
    """The factor of gradients that are not to be multiplied."""
    return None


class Update:
    """The update of an optimizer of torchao's, step after step.

    Attributes:
        clips: False once a script has changed gradients between clipping and the step.
        defer: called with what a step has asked for, instead of `finish`, which is then to be
            called with it before the next step; None to finish within the step. Learning rates and
            the number of the step are those of now; gradients are not copied.
        take_factor: gives what the gradients of the next step are multiplied by, once.
        tables: of launches, by number and device.
    """

    defer: Callable[[list[Noted]], None] | None = None

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._asked: list[Asked] = []
        self._step = contextlib.ExitStack()
        self.clips, self.take_factor = True, no_factor
        self.tables = defaultdict[Any, PointerTable](PointerTable)

    def attach(self) -> Callable[[], None]:
        """Take over the steps that follow; returns a function to end it.

        These hooks run inside of the global ones: an error of the proof leaves nothing behind.
        """
        optimizer: Any = self._optimizer()
        hooks = (
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        )

        def undo() -> None:
            for hook in hooks:
                hook.remove()
            self._step.close()

        return undo

    @property
    def graded(self) -> list[tuple[int, Tensor]]:
        """Parameters with gradients and their numbers, in the order of torchao's step."""
        optimizer = self._optimizer()
        groups = optimizer.param_groups if optimizer is not None else []
        every = [p for group in groups for p in group["params"]]
        return [(number, p) for number, p in enumerate(every) if p.grad is not None]

    @property
    def numbers(self) -> int:
        """Numbers that a step updates, in all processes."""
        return sum(p.numel() for _, p in self.graded)

    def _before_step(self, *_: Any) -> None:
        """Note what torchao would compile, until the step's end."""
        self._step.close()  # one that an error broke off
        self._asked = asked = []
        self._bring_to_host()
        real = torch.compile

        def compile_(model: Any = None, **how: Any) -> Any:
            # torchao (0.18) compiles this one function, at each step; whatever else is compiled
            # meanwhile passes.
            if model is not single_param_adam:
                return real(model, **how)
            return lambda *args: asked.append(Asked(*args))

        self._step.enter_context(replaced(torch, "compile", compile_))

    def _bring_to_host(self) -> None:
        """Keep learning rates and step counters where they are read: Accelerate moves them."""
        optimizer: Any = self._optimizer()
        for key, holders in (("lr", optimizer.param_groups), ("step", optimizer.state.values())):
            for one in holders:
                # A number on the GPU would be fetched for each tensor, and the host wait for it.
                if isinstance(value := one.get(key), Tensor) and value.device.type != "cpu":
                    one[key] = value.cpu()

    def _after_step(self, *_: Any) -> None:
        self._step.close()
        asked, self._asked = self._asked, []
        noted = self._noted(asked)
        if self.defer is None:
            self.finish(noted)
        else:  # by tensors that the next step, or a schedule, counts on
            now = ((x, x.asked.step.clone(), x.asked.lr.clone()) for x in noted)
            self.defer([x._replace(asked=x.asked._replace(step=n, lr=lr)) for x, n, lr in now])

    def _noted(self, asked: list[Asked]) -> list[Noted]:
        factor, numbers, found = self.take_factor(), self.numbers, []
        for whole, (number, p) in zip(asked, self.graded, strict=True):
            x, place = whole, Draws(number, 0)
            if isinstance(p, DTensor):
                x = Asked(*(local_part(one) for one in cast(Any, whole)))
                place = Draws(number, _first_number(p))
            if x.weight.numel():  # else a process without a part of it
                found.append(Noted(p, x, place, factor, numbers))
        return found

    @torch.no_grad()
    def finish(
        self, noted: Sequence[Noted], on_done: Callable[[Tensor], Any] = lambda _: None
    ) -> None:
        """Update what a step has asked for, all or a part of it, in this order; in any thread.

        Args:
            on_done: called with each parameter that is updated; on a GPU when that is launched.
        """
        rows: dict[Kind, list[Launched]] = defaultdict(list)
        for one in noted:
            kernel = runs_kernels(one.asked.weight.device, one.numbers)
            row = _row(one) if kernel else None
            if row is None:
                update_tensor(one.asked, one.place, one.factor)
            elif in_host_memory(row.kind.device):
                _update_on_host(row)
                increment_version(one.parameter)
            else:
                rows[row.kind].append(row)
                continue
            on_done(one.parameter)
        for number, (kind, each) in enumerate(rows.items()):
            self._launch(self.tables[number, kind.device], kind, each)
            for row in each:
                increment_version(row.noted.parameter)
                on_done(row.noted.parameter)

    def _launch(self, table: PointerTable, kind: Kind, rows: list[Launched]) -> None:
        from finetune.training.helper.optimizer import adamw_kernels

        like, factor = rows[0].noted.asked, rows[0].noted.factor
        factor = factor if factor is None else factor.to(kind.device)
        columns = [row.columns for row in rows]
        sizes = [row.noted.asked.weight.numel() for row in rows]
        adamw_kernels.adamw(
            table.on(kind.device, columns, sizes), maps(kind.levels, kind.device), factor,
            int(like.step), _numbers(like), kind,
        )  # fmt: skip


def _update_on_host(row: Launched) -> None:
    kind, columns, (_, x, _, factor, _) = row
    levels = maps(kind.levels, kind.device)
    numbers, step = _numbers(x), int(x.step)
    adamw_host.adamw(columns, x.weight.numel(), levels, factor, step, numbers, kind)


def _numbers(x: Asked) -> list[float]:
    """What kernels multiply by, from `lr` to `bias2`, as torchao's function rounds it."""
    bias1, bias2 = (1 - beta**x.step for beta in (x.beta1, x.beta2))
    decay = x.lr * x.decay if x.decoupled else x.decay
    numbers = (x.lr, decay, x.eps, 1 - x.beta1, 1 - x.beta2, bias1, bias2.sqrt())
    return [float(number) for number in numbers]


class Kind(NamedTuple):
    """What tensors of one launch share."""

    device: torch.device
    weight: torch.dtype
    gradient: torch.dtype
    code: torch.dtype
    levels: int
    block: int
    even: bool
    chance: bool
    decoupled: bool
    settings: tuple[float, ...]


class Launched(NamedTuple):
    """A tensor of a launch; `columns` are its table's."""

    kind: Kind
    columns: list[int]
    noted: Noted


def _row(noted: Noted) -> Launched | None:
    """The row of a tensor; None if torchao's function has to update it."""
    x, place = noted.asked, noted.place
    levels = LEVELS.get(type(x.first), 0)
    block = x.first.block_size if levels else TILE
    plain = type(x.weight) in (Tensor, torch.nn.Parameter) and x.weight.is_contiguous()
    same = type(x.first) is type(x.second) and (levels or x.first.is_contiguous())
    usual = x.largest is None and min(x.beta1, x.beta2) > 0.5  # below, `lerp` is another formula
    types = (x.weight.dtype, x.gradient.dtype, *(() if levels else (x.first.dtype,)))
    known = not in_host_memory(x.weight.device) or adamw_host.updates(types)
    if not (block in BLOCKS and plain and same and usual and known):
        return None
    if not x.gradient.is_contiguous():
        x = x._replace(gradient=x.gradient.contiguous())
    first, second = _stored(x.first), _stored(x.second)
    pointers = [one.data_ptr() for one in (x.weight, x.gradient, *first, *second)]
    # Whole vectors of 16 bytes: Triton loads them at once where it may take that for granted.
    even = not (x.weight.numel() % 16 or any(pointer % 16 for pointer in pointers))
    kind = Kind(
        x.weight.device, x.weight.dtype, x.gradient.dtype, first[0].dtype, levels, block, even,
        x.chance, x.decoupled, (float(x.step), float(x.lr), x.beta1, x.beta2, x.decay, x.eps),
    )  # fmt: skip
    columns = [*pointers, place.tensor, place.first // EACH]
    return Launched(kind, columns, noted._replace(asked=x))


def _stored(moment: Any) -> tuple[Tensor, Tensor]:
    """Codes and scales; a moment without blocks twice."""
    return (moment.codes, moment.scale) if type(moment) in LEVELS else (moment, moment)


def _first_number(p: Tensor) -> int:
    """Place of a shard's first number in the whole tensor."""
    if not isinstance(p, DTensor) or not p.dim():
        return 0
    first, rows = 0, len(p)
    for size, rank, placement in zip(
        p.device_mesh.shape, p.device_mesh.get_coordinate() or (), p.placements, strict=False
    ):
        if placement == Shard(0):
            each = -(-rows // size)  # as torch.chunk has it
            first, rows = first + min(rank * each, rows), max(0, min(each, rows - rank * each))
    return first * (p.numel() // max(len(p), 1))


class PointerTable:
    """Rows of pointers and sizes on a device, for tensors that one launch serves.

    Attributes:
        rows: int64, one row a tensor.
        owner: int32, the row of each program.
        sizes: numbers of each tensor.
    """

    rows: Tensor
    owner: Tensor

    def __init__(self) -> None:
        self._columns: list[list[int]] = []
        self.sizes: list[int] = []

    def on(self, device: torch.device, columns: list[list[int]], sizes: list[int]) -> PointerTable:
        """Itself for these tensors; what has changed is copied, and no host waits."""
        programs = torch.tensor([-(-size // CHUNK) for size in sizes])
        if sizes != self.sizes:
            owner = torch.arange(len(sizes), dtype=torch.int32).repeat_interleave(programs)
            self.owner, self._columns = _sent(owner, device), []
        if columns != self._columns:
            first = (programs.cumsum(0) - programs).tolist()
            rows = [[*r, n, at] for r, n, at in zip(columns, sizes, first, strict=True)]
            self.rows = _sent(torch.tensor(rows), device)
        self._columns, self.sizes = columns, sizes
        return self


def _sent(values: Tensor, device: torch.device) -> Tensor:
    # A copy from pageable memory would make the host wait for the stream.
    pinned = values.pin_memory() if device.type == "cuda" else values
    return pinned.to(device, non_blocking=True)


# --------------------------------------------------------------------------------------- the maps


@functools.cache
def maps(levels: int, device: torch.device) -> Tensor:
    """Levels and thresholds of torchao's map for the first moment, and the second: [4, levels]."""
    from torchao.optim import subclass_4bit, subclass_8bit

    if levels not in (256, 16):
        return torch.zeros(4, 1, device=device)
    of = {256: subclass_8bit, 16: subclass_4bit}[levels]
    nearest = {256: quantize_8bit_with_qmap, 16: quantize_4bit_with_qmap}[levels]
    both = [torch.tensor(of.get_qmap_signed()), torch.tensor(of.get_qmap_unsigned())]
    rows = [row for levels_ in both for row in (levels_, thresholds(levels_, nearest))]
    return torch.stack(rows).to(device)


def thresholds(levels: Tensor, nearest: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """The smallest float32 number in [-1, 1] that has each code or a higher one; -inf for 0.

    Found by halving among the bits of numbers, whose order is that of integers.
    """
    codes = torch.arange(len(levels))
    low = torch.full(codes.shape, _ordered(torch.tensor(-1.0)), dtype=torch.int64)
    high = torch.full(codes.shape, _ordered(torch.tensor(1.0)), dtype=torch.int64)
    # Bisection over all float32 numbers in their order, 31 rounds: whatever torchao's comparison
    # does with ties, the threshold has it.
    while bool((low < high).any()):
        middle = (low + high) // 2
        has = nearest(_number(middle), levels) >= codes
        low, high = torch.where(has, low, middle + 1), torch.where(has, middle, high)
    found = _number(high)
    found[0] = -math.inf
    return found


def _ordered(x: Tensor) -> int:
    bits = int(x.view(torch.int32))
    # IEEE 754 numbers of one sign are ordered as their bits are.
    return bits if bits >= 0 else -(bits & 0x7FFFFFFF)


def _number(order: Tensor) -> Tensor:
    return order.abs().int().view(torch.float32).copysign(order.float())
