"""The update of all tensors at once: torchao's bits, one launch, and the clipping factor in it."""

from __future__ import annotations

import functools
import importlib.util
import json
import math
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch
from torch import nn
from torchao import optim

from finetune import load_recipe
from finetune.errors import ConfigError
from finetune.hardware.device import this_device
from finetune.training.helper.optimizer import adamw, adamw_host, clipping, low_bit
from finetune.training.helper.optimizer.adamw import Draws, Update, rounded
from finetune.training.run import preflight

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="CUDA builds of torch bring Triton"
)
KINDS = (optim.AdamW8bit, optim.AdamW4bit, optim.AdamWFp8, optim.Adam8bit)


def steps(kind: type[Any], *, ours: bool) -> list[torch.Tensor]:
    """Weights and states of tensors with blocks, strides, neither, in two groups, to nearest."""
    draw = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw).bfloat16()

    both = [nn.Parameter(numbers(64, 128)) for _ in range(3)]
    others = [nn.Parameter(numbers(128, 64).t()), nn.Parameter(numbers(64))]
    groups = [{"params": both}, {"params": others, "weight_decay": 0.1}]
    optimizer = kind(groups, lr=1e-2)
    if ours:
        Update(optimizer).attach()
    for number in range(3):
        for parameter in (*both, *others):
            parameter.grad = numbers(*parameter.shape)
        both[0].grad = numbers(128, 64).t()
        both[1].grad = both[1].grad if number else None
        optimizer.param_groups[0]["lr"].fill_(1e-2 / (1 + number))
        with torch.compiler.set_stance("default" if ours else "force_eager"):
            optimizer.step()
    states = [value for state in optimizer.state.values() for value in state.values()]
    parts = [(x.codes.float(), x.scale) if hasattr(x, "codes") else (x,) for x in states]
    return [*both, *others, *(one for part in parts for one in part)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_without_kernels_has_torchaos_bits(kind) -> None:
    assert all(map(torch.equal, steps(kind, ours=True), steps(kind, ours=False)))


@needs_triton
@pytest.mark.long
def test_the_kernel_has_the_references_bits_in_the_interpreter() -> None:
    """States of 8 bits, FP8, 4 bits and none, odd sizes and places, clipped, resumed, sharded."""
    worker = [sys.executable, "-W", "ignore", "-m", "tests.update_worker"]
    done = subprocess.run(worker, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) > 30
    assert {case: x for case, x in found.items() if json.dumps(x) not in ("0", "true")} == {}


@needs_triton
@pytest.mark.long
@pytest.mark.parametrize("capability", [89, 90, 100, 120])
def test_machine_code_spills_nothing_and_moves_vectors(capability) -> None:
    from tests.benchmarks.optimizer_update import KINDS, compiled, facts_of

    for name, kind in KINDS.items():
        facts = facts_of(compiled("adamw_kernel", kind, capability))
        assert facts["spills"] == 0, name
        assert facts["registers"] <= 128, name
    facts = facts_of(compiled("adamw_kernel", {}, capability))
    assert (facts["LDG.128"], facts["STG.128"], facts["STG.64"]) == (2, 1, 2)
    assert facts["LDG.64"] >= 2
    assert facts["instructions"] < 155


@needs_triton
@pytest.mark.slow
def test_an_8b_model_is_updated_by_two_launches_of_ten_bytes_a_number() -> None:
    from tests.benchmarks.optimizer_update import counted_step, moved

    shapes = [(4096, 4096)] * 9 + [(4096,)] * 5
    found = list(counted_step(shapes))
    assert [name for name, _ in found] == ["squares", "update", "update"]
    numbers = 9 * 4096**2 + 5 * 4096
    nbytes = [sum(moved(name, *facts) for name, facts in found if name == kind)
              for kind in ("squares", "update")]  # fmt: skip
    assert nbytes[0] / numbers == pytest.approx(2.0, abs=0.001)
    assert nbytes[1] / numbers == pytest.approx(10 + 1 / 16, abs=0.001)


# ------------------------------------------------------------------------------------- host memory

SIZES = ((32, 512), (4096,), (4352,), (3, 130, 1024), (2048,), (1,), (255,), (257,), (3, 5))
"""Blocks in one piece and several, odd ones; below 4,096 numbers without blocks."""


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates by C++ whatever their size, by threads; a reference with roots of IEEE 754."""
    if adamw_host.library() is None:
        pytest.skip("no C++ compiler")
    monkeypatch.setattr(adamw_host, "LEAST", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(torch.Tensor, "sqrt", lambda x: torch.sqrt(x.double()).float())


def host_run(kind: type[Any], dtype: torch.dtype, **how: Any) -> list[torch.Tensor]:
    """Weights and states after three steps, one of them clipped, with all sorts of gradients."""
    draw = torch.Generator().manual_seed(0)
    weights = [nn.Parameter(torch.randn(s, generator=draw).to(dtype)) for s in how["sizes"]]
    groups = [{"params": weights[::2]}, {"params": weights[1::2], "weight_decay": 0.1}]
    groups = [group for group in groups if group["params"]]
    optimizer = kind(groups, lr=1e-2, bf16_stochastic_round=how.get("chance", True))
    update, handed = Update(optimizer), how.get("handed", [])
    update.attach()
    if "handed" in how:
        update.defer = handed.append
    for number in range(3):
        for p in weights:
            gradient = torch.randn(p.shape, generator=draw) * 10.0 ** (3 * number - 3)
            flat = gradient.view(-1, p.shape[-1])
            flat[0] *= 1e-25
            flat[-1, :3] = torch.tensor([0.0, float("inf"), float("nan")])[: p.shape[-1]]
            p.grad = gradient.to(dtype)
        update.take_factor = adamw.no_factor if number else lambda: torch.tensor(0.37)
        optimizer.step()
        optimizer.param_groups[0]["lr"].fill_(3e-3)
        if "handed" in how:
            optimizer.state[weights[0]]["step"] += 1  # as an early next step would
            worker = threading.Thread(target=how["finish"], args=(update, handed.pop()))
            worker.start()
            worker.join()
            optimizer.state[weights[0]]["step"] -= 1
    found: list[torch.Tensor] = [p.detach() for p in weights]
    for state in optimizer.state.values():
        for x in (state["exp_avg"], state["exp_avg_sq"]):
            found += [x.codes.view(torch.uint8), x.scale] if hasattr(x, "codes") else [x]
    return found


def same(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    pairs = zip(found, wanted, strict=True)
    return all(
        a.isnan().equal(b.isnan()) and a.nan_to_num().equal(b.nan_to_num()) for a, b in pairs
    )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", KINDS)
def test_in_host_memory_the_update_has_the_references_bits(compiled, kind, dtype, monkeypatch):
    for chance in (True, False)[: 2 if dtype == torch.bfloat16 else 1]:
        found = host_run(kind, dtype, sizes=SIZES, chance=chance)
        with monkeypatch.context() as patch:
            patch.setattr(adamw_host, "adamw", pytest.fail)
            patch.setattr(adamw_host, "LEAST", math.inf)
            wanted = host_run(kind, dtype, sizes=SIZES, chance=chance)
        assert same(found, wanted)


@pytest.mark.slow
def test_every_code_of_the_tables_is_found_at_its_thresholds(compiled, monkeypatch) -> None:
    """Betas of 0.75 make moments of a quarter of g and g^2; a block's first number, the scale."""

    def codes() -> list[torch.Tensor]:
        weight = nn.Parameter(torch.zeros(blocks.shape))
        optimizer = optim.AdamW8bit([weight], betas=(0.75, 0.75))
        Update(optimizer).attach()
        weight.grad = blocks
        optimizer.step()
        return [optimizer.state[weight][name].codes for name in ("exp_avg", "exp_avg_sq")]

    maps = adamw.maps(256, torch.device("cpu"))
    rows = [(t := maps[1][1:]), -t, maps[3][1:].sqrt()]
    up, down = torch.tensor(2.0), torch.tensor(-2.0)
    rows += [moved for x in rows for moved in (x.nextafter(up), x.nextafter(down))]
    rows += [x.nextafter(to) for x in rows[-2:] for to in (up, down)]
    blocks = torch.cat([torch.ones(len(rows), 1), torch.stack(rows).clamp(-1.0, 1.0)], 1)
    blocks = torch.cat([blocks, torch.rand(16, 256)])
    found = codes()
    assert len(found[0].unique()) == 256 == len(found[1].unique())
    monkeypatch.setattr(adamw_host, "LEAST", math.inf)
    assert all(map(torch.equal, found, codes()))


@pytest.mark.slow
def test_a_step_is_finished_later_in_another_order_with_the_arguments_of_then(compiled) -> None:
    done: list[tuple[int, ...]] = []

    def finish(update: Update, noted: list[Any]) -> None:
        for one in reversed(noted):  # a layer at a time
            before = one.parameter._version
            update.finish([one], lambda p: done.append(tuple(p.shape)))
            assert one.parameter._version > before, "by which codes know that they are old"

    late = host_run(optim.AdamW8bit, torch.bfloat16, sizes=SIZES, handed=[], finish=finish)
    assert same(late, host_run(optim.AdamW8bit, torch.bfloat16, sizes=SIZES))
    order = [*SIZES[::2], *SIZES[1::2]]
    assert done == 3 * order[::-1]


@pytest.mark.slow
def test_in_host_memory_the_norm_is_read_once_and_the_update_clips(compiled) -> None:
    weights = [nn.Parameter(torch.randn(3, 70_001).to(d)) for d in (torch.float32, torch.bfloat16)]
    optimizer = optim.AdamW8bit(weights)
    update = Update(optimizer)
    for p in weights:
        p.grad = torch.randn_like(p) * 3
    before = [p.grad.clone() for p in weights if p.grad is not None]
    norm = clipping.clip([update], weights, 1.0)
    wanted = torch.cat([x.double().flatten() for x in before]).norm()
    assert norm is not None
    assert float(norm) == pytest.approx(float(wanted), rel=1e-6)
    assert all(p.grad is not None and p.grad.equal(x) for p, x in zip(weights, before, strict=True))
    factor = update.take_factor()
    assert factor is not None
    assert float(factor) == pytest.approx(1 / float(wanted), rel=1e-5)
    weights[0].grad[1, 7] = float("inf")  # pyright: ignore[reportOptionalSubscript]
    assert not clipping.clip([update], weights, 1.0).isfinite()  # pyright: ignore


def test_small_optimizers_compile_nothing(monkeypatch) -> None:
    monkeypatch.setattr(adamw_host, "library", pytest.fail)
    host_run(optim.AdamW8bit, torch.bfloat16, sizes=((64, 64),))


def test_without_a_compiler_the_update_is_torchaos_with_one_warning(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(adamw_host, "LEAST", 0)
    monkeypatch.setattr(adamw_host, "library", functools.cache(adamw_host.library.__wrapped__))
    with pytest.warns(UserWarning, match="a hundred times as long.*install g\\+\\+") as caught:
        found = host_run(optim.AdamW8bit, torch.float32, sizes=((64, 64),))
    x = torch.randn(300)
    assert float(adamw_host.squares(x)) == pytest.approx(float(x.square().sum()))
    assert len([x for x in caught if "host memory" in str(x.message)]) == 1
    monkeypatch.setattr(adamw_host, "LEAST", math.inf)
    assert same(found, host_run(optim.AdamW8bit, torch.float32, sizes=((64, 64),)))


def test_many_weights_without_a_compiler_are_refused_before_a_run(monkeypatch) -> None:
    recipe = load_recipe("tiny_full_24gb_fp8", ["precision.emulation=allow"])
    device = this_device()
    monkeypatch.setattr(adamw_host, "library", lambda: None)
    preflight.preflight(recipe.config, device)
    monkeypatch.setattr(preflight, "MANY", 1_000_000)
    with pytest.raises(ConfigError, match=r"no C\+\+ compiler.* minutes a step") as refused:
        preflight.preflight(recipe.config, device)
    assert "g++" in refused.value.fix
    monkeypatch.setattr(adamw_host, "library", lambda: "compiled")
    preflight.preflight(recipe.config, device)


# ---------------------------------------------------------------------------------------- rounding


def test_the_random_bits_are_those_of_philox() -> None:
    """Philox-4x32 of seven rounds, by its authors' table (Random123, `kat_vectors`)."""
    halves = adamw._halves(8, 0, Draws(0, 0), torch.device("cpu")).tolist()
    words = [low + (high << 16) for low, high in zip(halves[::2], halves[1::2], strict=True)]
    assert words == [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]


def test_rounding_by_chance_keeps_the_mean_and_what_is_no_number() -> None:
    x = torch.full((200_000,), 1.0 + 0.25 * 2**-7)
    found = rounded(x, 3, Draws(5, 0)).float()
    assert set(found.tolist()) == {1.0, 1.0 + 2**-7}
    assert float((found - 1.0).mean()) == pytest.approx(0.25 * 2**-7, rel=0.02)
    parts = [rounded(x[:512], 3, Draws(5, 0)), rounded(x[512:1024], 3, Draws(5, 512))]
    assert torch.equal(torch.cat(parts).float(), found[:1024]), "a shard's are those of the whole"
    assert not torch.equal(rounded(x, 4, Draws(5, 0)).float(), found)
    assert not torch.equal(rounded(x, 3, Draws(6, 0)).float(), found)
    every = torch.tensor([0x7FFFFFFF, 0x7FC00000, 0x7F800000, -0x800000, 0]).int()
    odd = rounded(every.view(torch.float32), 1, Draws(0, 0))
    assert odd.isnan().tolist() == [True, True, False, False, False]
    assert odd[2:].tolist() == [float("inf"), float("-inf"), 0.0]


# ------------------------------------------------------------------------------------------- hooks


def test_a_step_that_is_broken_off_leaves_compiling_as_it_was() -> None:
    weight, plain = nn.Parameter(torch.randn(64, 64)), torch.compile
    optimizer = optim.AdamWFp8([weight])
    undo = Update(optimizer).attach()
    weight.grad = torch.randn(64, 64)
    optimizer.param_groups[0]["lr"] = 1e-3  # torchao wants a tensor
    with pytest.raises(RuntimeError, match="lr was changed"):
        optimizer.step()
    undo()
    assert torch.compile is plain


def test_other_optimizers_are_left_to_themselves() -> None:
    weight = nn.Parameter(torch.randn(4))
    assert low_bit.steps_by_parts(optim.AdamW4bit([weight]))
    assert not low_bit.steps_by_parts(torch.optim.AdamW([weight]))


def test_an_optimizer_prepared_twice_steps_once(make_llama, setup_backend) -> None:
    """As `trainer.train()` does when it is called again."""
    accelerator, model = setup_backend("emulated"), make_llama()
    optimizer = optim.AdamW8bit(model.parameters(), lr=1e-3)
    accelerator.prepare(model, optimizer)
    model, prepared = accelerator.prepare(model, optimizer)
    model(input_ids=torch.ones(1, 8).long(), labels=torch.ones(1, 8).long()).loss.backward()
    norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
    largest = torch.nn.utils.get_total_norm(p.grad for p in model.parameters())
    assert float(norm) > 1.0 >= float(largest) - 1e-5, "without kernels Accelerate clips"
    prepared.step()
    assert {int(state["step"]) for state in optimizer.state.values()} == {1}
