"""Our kernels on a GPU give the bits of their references on a CPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torchao import optim

from finetune.precision.numbers.formats import E4M3, E5M2
from finetune.precision.numbers.kernels import (
    LogitMap,
    cast_rows,
    cast_whole,
    grade_logits,
    observe_logits,
    swiglu_backward_cast,
    swiglu_cast,
    transpose_codes,
)
from finetune.training.helper.optimizer.adamw import Update, runs_kernels
from finetune.training.helper.optimizer.clipping import clip

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("pow2", [False, True])
@pytest.mark.parametrize("length", [1, 37, 160, 1024, 4096, 14336, 18944, 28672])
def test_casts(length, pow2) -> None:
    torch.manual_seed(length)
    x = torch.randn(300, length)
    x[1], x[2], x[3] = x[1] * 3e4, x[2] * 1e-6, 0.0
    x[4, 0], x[5, -1] = float("inf"), float("nan")
    fold = torch.logspace(-3, 1, length)[None]
    for given, factors in ((x.bfloat16(), None), (x.bfloat16(), fold), (x, fold)):
        on_gpu = None if factors is None else factors.cuda()
        codes, inverse = (y.cpu() for y in cast_rows(given.cuda(), on_gpu, pow2=pow2))
        wanted, scale = cast_rows(given, factors, pow2=pow2)
        torch.testing.assert_close(inverse, scale, rtol=0, atol=0, equal_nan=True)
        # Under an infinite scale, that of NaN as a power of two, torch before 2.12 has NaN on a CPU
        # where later ones saturate, as hardware does; the NaN itself stays one.
        finite = inverse.flatten() != 0
        assert codes[5, -1].float().isnan()
        codes, wanted = (y.float()[finite] for y in (codes, wanted))
        torch.testing.assert_close(codes, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("shape", [(1, 1), (37, 200), (4096, 1024), (1024, 14336)])
def test_transposes(shape) -> None:
    codes = torch.randint(0, 256, shape, dtype=torch.uint8)
    assert torch.equal(transpose_codes(codes.cuda()).cpu(), codes.t())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("softcap", [None, 30.0])
def test_logits(dtype, softcap) -> None:
    """Two slabs of a vocabulary: sums, weights, codes and gradients."""
    torch.manual_seed(0)
    mapped = LogitMap(0.7, softcap, 1.25)
    outputs = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
    whole, targets = (torch.randn(300, 24_000) * 4).to(dtype), torch.randint(0, 24_000, (300,))
    g_probs, g_entropy = torch.randn(2, 300)
    fold = torch.logspace(-3, 0, 7616)[None]
    found = []
    for device in ("cpu", "cuda"):
        z, labels, sums = whole.to(device, copy=True), targets.to(device), torch.zeros(8, 300)
        sums[[0, 5]] = -torch.inf
        sums = sums.to(device)
        observe_logits(z[:, :16384], labels, sums, 0, mapped, outputs, weigh=True)
        last, again = z[:, 16384:], z[:, 16384:].clone()
        codes, scales = observe_logits(
            last, labels, sums, 16384, mapped, outputs,
            weigh=True, fold=fold.to(device), pow2=False,
        )  # fmt: skip
        log_z = sums[0] + sums[1].log()
        h = log_z - sums[2] / sums[1]
        above = g_probs.to(device), g_entropy.to(device)
        grade_logits(again, labels, log_z, h, *above, 16384, mapped)
        found.append((sums, z[:, :16384], scales, codes.float() * scales, again))
    rounding = torch.finfo(dtype).eps
    for reference, kernel, error in zip(*found, (1e-4, rounding, 0.01, 0.13, 0.02), strict=True):
        close = torch.isclose(kernel.cpu(), reference, rtol=error, atol=1e-5)
        assert close.float().mean() > 0.999


@pytest.mark.parametrize("pow2", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (37, 200), (2048, 2048), (8192, 4096), (4096, 14336)])
def test_casts_under_one_scale(shape, pow2) -> None:
    """A wrong guess first, then a right one, which the kernel keeps."""
    torch.manual_seed(0)
    x = (torch.randn(shape) * torch.logspace(-6, 3, shape[1])).bfloat16()
    guesses = torch.full((3,), 8.0, device="cuda")
    for fmt in (E4M3, E5M2, E5M2):
        found = cast_whole(x.cuda(), guesses, 2, fmt, pow2=pow2, turned=True)
        wanted = cast_whole(x, guesses.cpu(), 2, fmt, pow2=pow2, turned=True)
        for a, b in zip(found, wanted, strict=True):
            assert torch.equal(a.cpu().float(), b.float())


@pytest.mark.parametrize("shape", [(37, 200), (1024, 8192), (2048, 14336)])
def test_casts_of_swiglu(shape) -> None:
    """Up to what the exponential of a GPU differs by: one code in ten thousand, by one step."""
    torch.manual_seed(0)
    dy, gate, up = (torch.randn(shape).bfloat16() for _ in range(3))
    for _ in range(2):
        results = []
        for device in ("cuda", "cpu"):
            d, g, u = (x.to(device) for x in (dy, gate, up))
            guesses = [torch.ones(3, device=device) for _ in range(2)]
            act = swiglu_cast(g, u, guesses[0], 0, E4M3, pow2=True)
            scale = act[1]
            act_t, *rest = swiglu_backward_cast(
                d, g, u, scale, (guesses[0], guesses[1]), 2, E4M3, E5M2, pow2=True
            )
            results.append([x.cpu().float() for x in (act[0], act_t, *rest[0], *rest[1])])
        for a, b in zip(*results, strict=True):
            assert (a != b).float().mean() < 1e-3
            torch.testing.assert_close(a, b, rtol=0.26, atol=2**-9)


@pytest.mark.parametrize("chance", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", [optim.AdamW8bit, optim.AdamW4bit, optim.AdamWFp8])
def test_updates(kind, dtype, chance, monkeypatch) -> None:
    """Three clipped steps: weights, codes and scales; on the CPU torchao's function."""
    monkeypatch.setattr(torch.Tensor, "sqrt", lambda x: torch.sqrt(x.double()).float())
    found = []
    for device in ("cpu", "cuda"):
        draw = torch.Generator().manual_seed(0)
        weights = [
            nn.Parameter(torch.randn(size, generator=draw).to(device, dtype))
            for size in (40_960, 4096, 4352, 257, 1)
        ]
        optimizer = kind(weights, lr=1e-2, weight_decay=0.1, bf16_stochastic_round=chance)
        update = Update(optimizer)
        update.attach()
        for _ in range(3):
            for w in weights:
                w.grad = torch.randn(w.shape, generator=draw).to(device, dtype)
            factor = torch.tensor(0.3, device=device)
            update.take_factor = lambda factor=factor: factor
            optimizer.step()
        states = [x for s in optimizer.state.values() for x in (s["exp_avg"], s["exp_avg_sq"])]
        parts = [y for x in states for y in ((x.codes, x.scale) if hasattr(x, "codes") else (x,))]
        found.append([x.detach().cpu().float() for x in (*weights, *parts)])
    for ours, wanted in zip(*found, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=0, atol=0, equal_nan=True)


def test_the_norm_of_gradients() -> None:
    if not runs_kernels(torch.device("cuda"), 0):
        pytest.skip("Triton is not here, so torch clips")
    weights = [nn.Parameter(torch.randn(n, device="cuda").bfloat16()) for n in (100_000, 257)]
    update = Update(optim.AdamW8bit(weights))
    for w in weights:
        w.grad = torch.randn_like(w)
    norm = clip([update], weights, 1.0)
    assert norm is not None
    every = torch.cat([w.grad.double() for w in weights if w.grad is not None])
    assert float(norm) == pytest.approx(float(every.norm()), rel=1e-6)
    factor = update.take_factor()
    assert factor is not None
    assert float(factor) == pytest.approx(1 / float(norm), rel=1e-5)
