"""Weights that train in host memory (*masters*), and what stands for them on the device.

    forward    device: codes of a linear layer (1 byte a number), a copy of an embedding or head
    backward   the gradient of a weight leaves as soon as it is complete, and its memory is free
    update     host: master, gradient and optimizer state, where the optimizer finds its parameters
    refresh    before the next forward: masters that changed go over once more, and are cast there

The parameter of a module *is* the master, so optimizers, checkpoints and exports know nothing of
all this. On a GPU two streams move data beside the one that computes. Gradients wait for nothing:
the compute stream waits for the transfer of the gradient before the last one, after which the
allocator has that memory again, and the host waits once, at the end of a backward. Where gradients
of several micro-steps are added up, the sum comes back over the other direction of the bus, is
added to on the device and leaves again: the host adds nothing.

    bytes over PCIe   a micro-step: 2 a number down, and 2 up from the second on
                      an update:    2 a number up
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.optim import Optimizer

from finetune.errors import MemoryShortError, first_line
from finetune.precision.numbers.weights import Tile, quantize_weight

SAMPLE = 64
"""Numbers of a master that tell whether somebody has written to it."""
IN_FLIGHT = 2
"""Gradients on their way, or about to leave, whose memory on the device is still taken."""


class Master:
    """A parameter in host memory.

    Attributes:
        parameter: the master.
        tile: tile of its codes that shares a scale; None if a copy stands for it on the device.
        bits, inverse: codes, uint8 [N, K], and inverse scales; or the copy, and None.
        ready: event of the transfer that brought them.
        handle: what a compiled layer takes in place of `lend()`.
        is_sent: True if it was cast within the step of the optimizer that is running.
    """

    def __init__(
        self, masters: Masters, parameter: nn.Parameter, tile: Tile | None, *, turned: bool = False
    ) -> None:
        self.masters, self.parameter, self.tile, self._turned = masters, parameter, tile, turned
        self.bits: Any = None
        self.inverse: Any = None
        self.handle: Any = None
        self.ready: Any = None
        self.is_sent = False
        self._seen: tuple[int, int, list[float]] | None = None
        self._sum: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        """Shape of what is lent: [N, K] of codes, whatever the layer's layout."""
        return self.parameter.t().shape if self._turned else self.parameter.shape

    def lend(self) -> Tensor:
        """What autograd takes for the weight: its gradient goes to the master.

        The copy; or of codes a tensor of their shape with memory for one number.
        """
        if self.is_stale:  # a part of the model is called without the whole
            self.refresh()
        self.arrive()
        return _Lent.apply(self.parameter, self)  # pyright: ignore[reportReturnType]

    def stand_in(self) -> Tensor:
        """The result of `lend`, without its place in a graph."""
        if self.tile is None:
            return self.bits.view_as(self.bits)
        one = torch.empty(1, dtype=self.parameter.dtype, device=self.masters.device)
        return one.expand(self.shape)

    # ------------------------------------------------------------------------------ to the device

    def arrive(self) -> None:
        """Let the compute stream wait until the codes are there; the host does not wait."""
        if self.ready is not None:
            torch.cuda.current_stream(self.masters.device).wait_event(self.ready)
            self.ready = None

    @property
    def is_stale(self) -> bool:
        """True if the master has changed since it was last cast.

        Neither torch's fused optimizers nor `p.data.copy_(...)` move its version counter (2.13):
        so a hook reports steps (`Masters.stepped`), and `SAMPLE` numbers are compared.
        """
        return self._seen is None or self._seen != self._now()

    def forget(self) -> None:
        """The master has changed."""
        self._seen = None

    def _now(self) -> tuple[int, int, list[float]]:
        p = self.parameter.detach()
        numbers = p.reshape(-1)[:: max(1, p.numel() // SAMPLE)].tolist()
        return p.data_ptr(), self.parameter._version, numbers

    @torch.no_grad()
    def refresh(self) -> None:
        """Bring the master to the device and cast it there, on the current stream."""
        self._seen, device = self._now(), self.masters.device
        if self.tile is None:
            if self.bits is None or self.bits.device != device:
                self.bits = torch.empty_like(self.parameter, device=device)
            self.bits.copy_(self.parameter, non_blocking=True)
            return
        codes = self._cast(self.masters.bring(self.parameter))
        if self.bits is None or self.bits.device != device:
            self.bits, self.inverse = codes
            return
        # In place: a compiled layer knows these tensors.
        self.bits.copy_(codes[0])
        self.inverse.copy_(codes[1])

    @torch.no_grad()
    def is_cast(self) -> bool:
        """True if the device has the codes of the master as it is; casts it there once more."""
        if self.tile is None or self.bits is None:
            return True
        there = self.parameter.detach().to(self.bits.device, non_blocking=True)
        bits, inverse = self._cast(there)
        # One answer, and the host waits once.
        return bool((self.bits == bits).all() & (self.inverse == inverse).all())

    def _cast(self, there: Tensor) -> tuple[Tensor, Tensor]:
        assert self.tile is not None
        matrix = there.t() if self._turned else there
        return quantize_weight(matrix, self.tile, pow2=self.masters.pow2)

    # -------------------------------------------------------------------------------- to the host

    def gradient_buffer(self) -> Tensor:
        """Where the gradient goes: kept from step to step, pinned where the device is a GPU."""
        if self._sum is None:
            self._sum = self.masters.host_memory(self.parameter.shape, self.parameter.dtype)
        return self._sum


class _Lent(torch.autograd.Function):
    """A weight's stand-in on the device, and its gradient's way to the master."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, master: Master) -> Tensor:  # noqa: ARG004
        ctx.master = master
        return master.stand_in()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor):
        master = ctx.master
        master.masters.send(master, (g.t() if master._turned else g).contiguous())
        return None, None  # it is where the optimizer looks for it already


class Masters:
    """All masters of a model, in the order of its forward.

    Attributes:
        device: where the model computes.
        pow2: True if scales are powers of two.
    """

    def __init__(self, *, pow2: bool) -> None:
        self.pow2 = pow2
        self.device = torch.device("cpu")
        self.each: list[Master] = []
        self._streams: tuple[Any, Any] | None = None
        self._leaving: deque[tuple[Tensor, Tensor, Any]] = deque()
        self._ends = False

    def of(self, parameter: nn.Parameter, tile: Tile | None, *, turned: bool = False) -> Master:
        """The master of a parameter, one also where modules share it."""
        for known in self.each:
            if known.parameter is parameter:
                return known
        made = Master(self, parameter, tile, turned=turned)
        self.each.append(made)
        return made

    def one_to_check(self, step: int) -> Master | None:
        """One of the smallest masters that have codes, another at each step."""
        coded = [one for one in self.each if one.tile is not None]
        least = min((one.parameter.numel() for one in coded), default=0)
        smallest = [one for one in coded if one.parameter.numel() == least]
        return smallest[step % len(smallest)] if smallest else None

    # ------------------------------------------------------------------------------------- memory

    @property
    def is_apart(self) -> bool:
        """True if the device has memory of its own, and streams."""
        return self.device.type == "cuda"

    def host_memory(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Memory for a tensor, pinned where the device is a GPU.

        Raises:
            MemoryShortError: the host has no more.
        """
        try:
            return torch.empty(shape, dtype=dtype, pin_memory=self.is_apart)
        except RuntimeError as error:  # CUDA says only that it is out of memory, not whose
            needed = sum(one.parameter.numel() for one in self.each) * dtype.itemsize / 2**30
            raise MemoryShortError(
                "host memory is full: fp8_params has weights and gradients of the run there",
                where=f"{needed:.2f} GiB of weights, as much of gradients, and optimizer states"
                + ", pinned" * self.is_apart,
                why=first_line(error),
                fix="free memory of the host, or raise `ulimit -l` and the container's limit; "
                "model.dtype=bfloat16 needs half of float32; or train adapters: lora.r=16 "
                "~precision.fp8_params",
            ) from error

    def bring(self, x: Tensor) -> Tensor:
        """A tensor of host memory, copied to the device on the current stream."""
        return x.detach().to(self.device, non_blocking=True)

    def settle(self) -> None:
        """All masters are known: the model computes where they are, and they go to the host."""
        if self.each:
            first = self.each[0].parameter
            self.move(first.device, first.dtype, again=True)

    @torch.no_grad()
    def move(self, device: torch.device, dtype: torch.dtype, *, again: bool = False) -> None:
        """The model moves, or changes its type: masters stay in host memory."""
        changes = any(one.parameter.dtype != dtype for one in self.each)
        if not (changes or again) and device == self.device:
            return
        self.device, self._streams = device, None
        for one in self.each:
            p = one.parameter
            if p.dtype != dtype or p.device.type != "cpu" or self.is_apart:
                g, p.grad = p.grad, None
                p.data = self.host_memory(p.shape, dtype).copy_(p)
                p.grad = None if g is None else g.to("cpu", dtype)
            one.bits = one.inverse = one.ready = one._sum = None
            one.forget()

    # ---------------------------------------------------------------------------------- transfers

    @property
    def _both(self) -> tuple[Any, Any]:
        """Streams to the device and from it."""
        if self._streams is None:
            self._streams = torch.cuda.Stream(self.device), torch.cuda.Stream(self.device)
        return self._streams

    def refresh(self) -> None:
        """Cast what has changed, before a forward; `Master.arrive` waits for each."""
        if self._ends:  # an error, or Ctrl-C, has broken a backward off
            self._end_backward()
        # Copies first: embeddings begin a forward, and what is in no decoder layer waits for them.
        order = sorted(self.each, key=lambda one: one.tile is not None)
        self._refresh([one for one in order if one.is_stale])

    def send_up(self, parameter: Tensor) -> None:
        """The same of one master that a step has just updated, if it is one."""
        sent = [one for one in self.each if one.parameter is parameter]
        self._refresh(sent)
        for one in sent:
            one.is_sent = True

    def stepped(self, optimizer: Optimizer, *_: Any) -> None:
        """Hook after the steps of all optimizers: what they have and did not send is stale."""
        changed = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for one in self.each:
            if id(one.parameter) in changed and not one.is_sent:
                one.forget()
            one.is_sent = False

    def _refresh(self, stale: list[Master]) -> None:
        if not stale or not self.is_apart:
            for one in stale:
                one.refresh()
            return
        up = self._both[0]
        up.wait_stream(torch.cuda.current_stream(self.device))  # products by the codes before
        with torch.cuda.stream(up):
            for one in stale:
                one.refresh()
                one.ready = up.record_event()

    @torch.no_grad()
    def send(self, master: Master, g: Tensor) -> None:
        """Add a gradient [N, K] of a backward that is running to the master's."""
        p, begins = master.parameter, master.parameter.grad is None
        total = master.gradient_buffer() if begins else p.grad
        assert total is not None
        if not self.is_apart:
            total.copy_(g) if begins else total.add_(g)
            p.grad = total
            return
        down, now = self._both[1], torch.cuda.current_stream(self.device)
        down.wait_stream(now)
        with torch.cuda.stream(down):
            both = g if begins else self.bring(total).add_(g)
            total.copy_(both, non_blocking=True)
            self._leaving.append((g, both, down.record_event()))
        p.grad = total
        while len(self._leaving) > IN_FLIGHT:
            self._let_go(now)
        if not self._ends:
            self._ends = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _let_go(self, stream: Any) -> None:
        """Give back the memory of the oldest gradient: later kernels come after its transfer."""
        *_, gone = self._leaving.popleft()
        stream.wait_event(gone)

    def _end_backward(self) -> None:
        """Wait for the last gradients: from here on anything may read them."""
        self._ends = False
        now = torch.cuda.current_stream(self.device)
        while self._leaving:
            self._let_go(now)
        self._both[1].synchronize()
