"""Triton's interpreter runs the update of `training.helper.optimizer.adamw` on CPU tensors.

A process of its own, as `kernel_worker` is. The reference is torchao's own function, with the root
that IEEE 754 asks for: torch's on a CPU is off by a unit in the last place in one of five numbers.

Prints a JSON object: case -> number of results (weights, codes, scales) that differ by any bit, or
what should hold.
"""

from __future__ import annotations

import io
import json
import os
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh
from torchao import optim

from finetune.training.helper.optimizer import adamw, adamw_kernels, clipping
from tests.kernel_worker import different, interpreter

SIZES = ((32, 512), (4096,), (4352,), (2048,), (1,), (255,), (256,), (257,), (3, 5))
"""A cropped weight and norms of 8B and 1B models, odd ones; below 4,096 numbers without blocks."""


def fused(self: Any, x: Any, y: Any, z: Any) -> Any:
    """x y + z rounded once, where Triton 3.6 rounds twice: to odd in float64, then to float32.

    The product is exact there. A sum with an even last bit that is not exact moves by one unit
    towards what is missing, so that the second rounding goes the right way (Boldo and Melquiond
    2008).
    """
    a, b, c = (np.asarray(t.data).astype(np.float64) for t in (x, y, z))
    product = a * b
    total = product + c
    back = total - product
    missing = (product - (total - back)) + (c - back)
    bits = np.ascontiguousarray(total).view(np.int64)
    moves = (missing != 0) & (bits % 2 == 0) & np.isfinite(total)
    odd = np.where(moves, np.where((missing > 0) == (total > 0), bits + 1, bits - 1), bits)
    return interpreter.TensorHandle(odd.view(np.float64).astype(np.float32), z.dtype.scalar)


def with_scalar_ranges(patch: Any) -> Any:
    """Bounds of `range` are arrays of one number, which numpy 2.4 takes for none."""

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    return patched


adamw.in_host_memory = clipping.in_host_memory = lambda _: False
interpreter.InterpreterBuilder.create_fma = fused
interpreter._patch_lang_tensor = with_scalar_ranges(interpreter._patch_lang_tensor)
torch.Tensor.sqrt = lambda x: torch.sqrt(x.double()).float()  # pyright: ignore


class Run:
    """Steps of an optimizer, by kernels or by the reference.

    Attributes:
        launches: of the update, in the last step.
    """

    def __init__(
        self, kernels: bool, kind: Any = optim.AdamW8bit, weights: Sequence[Tensor] | None = None,
        dtype: torch.dtype = torch.bfloat16, **settings: Any,
    ) -> None:  # fmt: skip
        self.draw = torch.Generator().manual_seed(0)
        if weights is None:
            weights = [torch.randn(*size, generator=self.draw).to(dtype) for size in SIZES]
        self.parameters = [nn.Parameter(w.detach().clone()) for w in weights]
        for new, old in zip(self.parameters, weights, strict=True):
            if not isinstance(old, DTensor):  # keeps strides and the place in a buffer
                new.data = torch.empty(0, dtype=old.dtype).set_(
                    old.untyped_storage().clone(), old.storage_offset(), old.shape, old.stride()
                )
        settings = {"lr": 1e-2, "weight_decay": 0.1, "bf16_stochastic_round": True} | settings
        groups = [{"params": self.parameters[::2]}, {"params": self.parameters[1::2], "lr": 3e-3}]
        self.optimizer: Any = kind([g for g in groups if g["params"]], **settings)
        self.kernels, self.update = kernels, adamw.Update(self.optimizer)
        self.update.attach()

    def step(self, bound: float = 0.0, scale: float = 1.0) -> Tensor | None:
        """One step with gradients of all sizes, clipped to `bound`; returns their norm."""
        for p in self.parameters:
            size = scale * 10 ** float(torch.randn((), generator=self.draw))
            numbers = torch.randn(p.shape, generator=self.draw) * size
            if isinstance(p, DTensor):
                p.grad = distribute_tensor(numbers.to(p.dtype), p.device_mesh, p.placements)
            else:
                p.grad = torch.empty_like(p).copy_(numbers)
        norm = None
        if bound:
            adamw.runs_kernels = clipping.runs_kernels = lambda *_: True
            norm = clipping.clip([self.update], self.parameters, bound)
            assert norm is not None
        self.go()
        return norm

    def go(self) -> None:
        adamw.runs_kernels = clipping.runs_kernels = lambda *_: self.kernels
        real, self.launches = adamw_kernels.adamw, 0

        def counted(*args: Any) -> None:
            self.launches += 1
            real(*args)

        adamw_kernels.adamw = counted
        self.optimizer.step()
        adamw_kernels.adamw = real

    def results(self) -> tuple[Tensor, ...]:
        found = [adamw.local_part(p.detach()) for p in self.parameters]
        for state in self.optimizer.state.values():
            for moment in (
                adamw.local_part(state["exp_avg"]),
                adamw.local_part(state["exp_avg_sq"]),
            ):
                coded = hasattr(moment, "codes")
                found += [moment.codes.view(torch.uint8), moment.scale] if coded else [moment]
        return tuple(found)


def both(steps: int = 3, bound: float = 0.0, **settings: Any) -> tuple[Run, Run]:
    pair = Run(True, **settings), Run(False, **settings)
    for run in pair:
        for _ in range(steps):
            run.step(bound)
    return pair


def odd_places() -> list[Tensor]:
    """Strided, at an odd place in a buffer, in several programs."""
    buffer = torch.randn(5000).bfloat16()
    return [
        torch.randn(64, 128).bfloat16().t(),
        buffer[1 : 1 + 4096],
        torch.randn(3, 3 * 4096).bfloat16(),
        torch.randn(2, 2, 8448).bfloat16()[:, 1],
        buffer[1:4],
    ]


def updates() -> Iterator[tuple[str, Any]]:
    cases: dict[str, dict[str, Any]] = {
        "8 bits": {},
        "8 bits, rounded to nearest": {"bf16_stochastic_round": False},
        "8 bits, no decay": {"weight_decay": 0.0},
        "8 bits, clipped": {"bound": 0.5},
        "8 bits, float32 weights": {"dtype": torch.float32},
        "8 bits, float16 weights": {"dtype": torch.float16},
        "FP8": {"kind": optim.AdamWFp8},
        "FP8, clipped, float32": {"kind": optim.AdamWFp8, "bound": 2.0, "dtype": torch.float32},
        "4 bits": {"kind": optim.AdamW4bit},
        "4 bits, blocks of 256": {"kind": optim.AdamW4bit, "block_size": 256},
        "blocks of 64": {"block_size": 64},
        "blocks of 100: torchao's function": {"block_size": 100},
        "Adam, which adds decay to gradients": {"kind": optim.Adam8bit},
        "beta below a half: torchao's function": {"betas": (0.4, 0.99)},
        "odd places": {"weights": odd_places()},
    }
    for name, settings in cases.items():
        ours, reference = both(**settings)
        yield name, different(ours.results(), reference.results())
        if name == "8 bits":
            yield "launches: two groups, blocks and none, even and odd", ours.launches <= 6
            whole = Run(True, weights=[torch.randn(64, 64).bfloat16() for _ in range(9)], lr=3e-3)
            whole.step()
            yield "launches: one for the same settings", whole.launches == 1


def values() -> Iterator[tuple[str, Any]]:
    """Gradients that are not numbers, zeros, large and small; one that comes later."""
    pair = both(steps=1, weights=[torch.randn(8, 1024) for _ in range(3)], dtype=torch.float32)
    for run in pair:
        for number in range(2):
            gradient = torch.randn(8, 1024, generator=torch.Generator().manual_seed(number))
            gradient[0], gradient[1], gradient[2, 5] = 0.0, gradient[1] * 1e-25, float("nan")
            gradient[3], gradient[4] = gradient[3] * 1e12, 1.0
            run.parameters[0].grad, run.parameters[1].grad = gradient, None
            run.parameters[2].grad = None if number else -gradient
            run.go()
    yield "values", different(pair[0].results(), pair[1].results())


def levels() -> Iterator[tuple[str, Any]]:
    """Every threshold and the floats beside it, through the kernel's own lookup."""
    import triton
    import triton.language as tl

    def look_up(x, thresholds, out, levels: tl.constexpr, signed: tl.constexpr):
        spots = tl.arange(0, 2048)
        code = adamw_kernels._nearest(tl.load(x + spots), thresholds, levels, signed)
        tl.store(out + spots, code)

    looks: Any = triton.jit(look_up)
    for count, nearest in (
        (256, adamw.quantize_8bit_with_qmap),
        (16, adamw.quantize_4bit_with_qmap),
    ):
        maps = adamw.maps(count, torch.device("cpu"))
        for signed, (table, thresholds) in ((True, maps[:2]), (False, maps[2:])):
            t = thresholds[1:]
            beside = [t.nextafter(torch.tensor(to)) for to in (2.0, -2.0)]
            x = torch.cat((t, *beside, table, -t if signed else t, torch.rand(2048)))[:2048]
            x = x.clamp(-1.0 if signed else 0.0, 1.0)
            x[-1], out = float("nan"), torch.empty(2048, dtype=torch.int32)
            looks[1,](x, thresholds, out, count, signed)
            wanted = nearest(x, table).int()
            yield f"levels of {count}, signed={signed}", int((out != wanted).sum())


def checkpoints() -> Iterator[tuple[str, Any]]:
    """Half of a run by kernels and half by the reference, through a file, either way around."""
    wanted = both(steps=4, weights=[torch.randn(16, 512).bfloat16(), torch.randn(64).bfloat16()])[0]
    for first in (True, False):
        weights = [torch.randn(16, 512).bfloat16(), torch.randn(64).bfloat16()]
        runs = [Run(kernels, weights=weights) for kernels in (first, not first)]
        other = Run(True, weights=weights)
        for _ in range(2):
            runs[0].step()
        file = io.BytesIO()
        torch.save(runs[0].optimizer.state_dict(), file)
        file.seek(0)
        runs[1].optimizer.load_state_dict(torch.load(file, weights_only=True))
        for new, old in zip(runs[1].parameters, runs[0].parameters, strict=True):
            new.data.copy_(old.data)
        runs[1].draw.set_state(runs[0].draw.get_state())
        for _ in range(2):
            runs[1].step()
        for _ in range(4):
            other.step()
        yield f"resumed, kernels first={first}", different(runs[1].results(), other.results())
    assert wanted.launches


def clips() -> Iterator[tuple[str, Any]]:
    weights = [torch.randn(64, 128).bfloat16(), torch.randn(5, 7).bfloat16(), torch.randn(4096)]
    run = Run(True, weights=weights)
    norm = run.step(bound=1.0)
    gradients = [p.grad.double() for p in run.parameters if p.grad is not None]
    wanted = torch.linalg.vector_norm(torch.cat([x.flatten() for x in gradients]))
    yield "norm", abs(float(0.0 if norm is None else norm) / float(wanted) - 1) < 1e-6
    yield "gradients keep their values", any(float(x.abs().max()) > 1.0 for x in gradients)
    ours, other = Run(True, weights=weights), Run(True, weights=weights)
    ours.step(bound=1e9)
    other.step()
    yield "a factor of one", different(ours.results(), other.results())

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        clipping.clip([run.update], run.parameters, 1.0)
        gradient: Any = run.parameters[0].grad
        gradient *= 2.0
        run.go()
    yield "a change between clipping and step is told", len(caught) == 1
    yield "and ends it", clipping.clip([run.update], run.parameters, 1.0) is None
    ours.step(bound=1.0)
    clipping.clip([ours.update], ours.parameters, 1.0)
    for p in ours.parameters:
        p.grad = None
    before = [p.detach().clone() for p in ours.parameters]
    ours.parameters[2].grad = torch.ones(4096)
    yield "a factor goes with its gradients", ours.update.take_factor() is None
    assert all(map(torch.equal, before, ours.parameters))
    some = ours.parameters[:1]
    yield "only some parameters: not here", clipping.clip([ours.update], some, 1.0) is None


def shards() -> Iterator[tuple[str, Any]]:
    """Of two processes, against one: the same launch for local parts, and the norm of all."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(shard, (folder,), nprocs=2)
        for rank in range(2):
            found = json.loads((Path(folder) / f"{rank}.json").read_text(encoding="utf-8"))
            yield from ((f"rank {rank}: {name}", value) for name, value in found.items())


def shard(rank: int, folder: str) -> None:
    store = torch.distributed.FileStore(f"{folder}/store", 2)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    mesh, draw = init_device_mesh("cpu", (2,)), torch.Generator().manual_seed(1)
    whole = [torch.randn(n, 128, generator=draw).bfloat16() for n in (64, 5, 1)]
    parts = [distribute_tensor(w, mesh, [Shard(0)]) for w in whole]
    ours, alone = Run(True, weights=parts), Run(True, weights=whole)
    norms = [[float(cast(Tensor, run.step(1e9))) for _ in range(2)] for run in (ours, alone)]
    found: dict[str, Any] = {
        "norms": all(abs(a / b - 1) < 1e-6 for a, b in zip(*norms, strict=True))
    }
    for n, (part, w) in enumerate(zip(ours.parameters, alone.parameters, strict=True)):
        mine = distribute_tensor(w.detach(), mesh, [Shard(0)])
        found[f"weight {n}"] = different(
            (adamw.local_part(part.detach()),), (adamw.local_part(mine),)
        )
    coded, codes = (run.optimizer.state[run.parameters[0]]["exp_avg"] for run in (ours, alone))
    mine = codes.codes[32 * rank : 32 * rank + 32]
    found["codes"] = different((adamw.local_part(coded).codes,), (mine,))
    file = Path(folder) / f"{rank}.json"
    file.write_text(json.dumps(found), encoding="utf-8")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    torch.manual_seed(0)
    cases = (updates, values, levels, checkpoints, clips, shards)
    print(json.dumps({name: found for case in cases for name, found in case()}))
