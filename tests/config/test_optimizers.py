"""Every optimizer of the table steps, proven, in emulated FP8, and holds what the table says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import site_reference
import torch
from rich.console import Console
from safetensors.torch import load_file
from torch import nn
from torch._dynamo.utils import counters

from finetune import load_recipe
from finetune.config.optimizers import (
    FP8_ADAMW,
    OPTIMIZERS,
    OWN_NAMES,
    arguments,
    check_optimizer,
    state_bytes,
)
from finetune.config.train_keys import TrainSection
from finetune.errors import ConfigError, MissingExtraError
from finetune.estimator.gate import bound
from finetune.hardware.requirements import check_here, check_optimizer_here
from finetune.precision.planner import plan
from finetune.precision.proof.movement import stored_bytes
from finetune.precision.proof.row import changed_numbers
from finetune.runs.receipt import RunReport
from finetune.training.helper.optimizer import low_bit
from finetune.training.helper.optimizer.adamw import Update
from finetune.training.model import meta_model
from tests.conftest import A100, APPLE, CPU, H100, batch, slow_but
from tests.run_folders import trained

KNOWN = [x for x in OPTIMIZERS.values() if x.moments is not None]
ON_CPU = [x.name for x in KNOWN if not x.not_on_cpu]
SHIPPED = ("", "torch", "torchao", "transformers")
"""Libraries that every installation has."""
LOW_BIT_ADAMW = ["adamw_8bit", "adamw_torch_8bit", "adamw_torch_4bit", FP8_ADAMW]
SMALL = (
    "data.max_rows=48",
    "eval.samples=false",
    "train.max_steps=3",
    "train.warmup_steps=0",
    "train.per_device_train_batch_size=2",
    "train.max_length=64",
    "train.logging_steps=1",
    "train.eval_strategy=no",
)


def run(out: Path, *overrides: str, recipe: str = "tiny_full_fp8") -> RunReport:
    return trained(load_recipe(recipe, [*SMALL, *overrides]), out=out, console=Console(quiet=True))


def weights(report: RunReport) -> dict[str, torch.Tensor]:
    return load_file(report.folder / "model" / "model.safetensors")


# ---------------------------------------------------------------------------------------- the table


@pytest.mark.parametrize(
    "optimizer", [x for x in OPTIMIZERS.values() if x.library not in SHIPPED], ids=lambda x: x.name
)
def test_a_missing_library_is_named_with_its_command(optimizer, monkeypatch) -> None:
    """Before a model is loaded, not by the trainer after it."""
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    plain = load_recipe("tiny_full_bf16").config
    asked = plain.model_copy(update={"train": {"optim": optimizer.name}})
    with pytest.raises(MissingExtraError, match=optimizer.library) as error:
        check_here(asked, CPU)
    assert error.value.fix == optimizer.install != ""


def test_the_table_has_every_optimizer_of_transformers_and_ours() -> None:
    from transformers.training_args import OptimizerNames

    assert {name.value for name in OptimizerNames} | OWN_NAMES == OPTIMIZERS.keys()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    slow_but(
        ["adamw_8bit"],
        ["adamw_8bit", "adamw_torch_4bit", "adafactor", "lion_8bit", "rmsprop_bnb"],
        pytest.mark.long,
    ),
)
def test_it_steps_on_a_cpu_and_holds_the_bytes_of_the_table(name, tmp_path) -> None:
    """Three steps in emulated FP8; state measured on the tensors equals the closed form."""
    override = f"train.optim={name}"
    report = run(tmp_path, override)
    trainable = report.receipt.trainable
    assert report.receipt.status == "proven"
    assert report.receipt.precision["ran"] == "fp8"
    assert trainable["moved"] == trainable["after"]
    config = load_recipe("tiny_full_fp8", [override]).config
    model = meta_model(config)
    expected = bound(model, plan(model, config.precision), config.train).optimizer
    assert trainable["optimizer_state_bytes"] == pytest.approx(expected, abs=0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LOW_BIT_ADAMW)
def test_bytes_per_parameter_of_a_large_weight(name, dtype) -> None:
    """The README's figure, on the tensors themselves; weights keep their type."""
    weight = nn.Parameter(torch.randn(256, 512, dtype=dtype))
    optimizer = low_bit_adamw(name, [weight])
    weight.grad = torch.randn_like(weight)
    eager_step(optimizer)
    moments = OPTIMIZERS[name].moments
    assert moments is not None
    assert stored_bytes(optimizer) / weight.numel() == site_reference.bytes_per_parameter(moments)
    held = state_bytes(OPTIMIZERS[name], tuple(weight.shape), weight.element_size())
    assert stored_bytes(optimizer) == held
    assert weight.dtype == dtype


def low_bit_adamw(name: str, parameters, lr: float = 1e-3) -> torch.optim.Optimizer:
    from bitsandbytes.optim import AdamW8bit
    from torchao import optim

    classes = {
        "adamw_8bit": AdamW8bit,
        "adamw_torch_8bit": optim.AdamW8bit,
        "adamw_torch_4bit": optim.AdamW4bit,
        FP8_ADAMW: optim.AdamWFp8,
    }
    low_bit.forget_overrides()  # bitsandbytes knows weights by `id()`, which is used again
    blocks = {} if name == "adamw_8bit" else {"block_size": 256}
    return classes[name](parameters, lr=lr, weight_decay=0.0, **blocks)


def eager_step(optimizer: torch.optim.Optimizer) -> None:
    undo = Update(optimizer).attach() if low_bit.steps_by_parts(optimizer) else lambda: None
    optimizer.step()
    undo()


def test_small_and_odd_tensors_keep_plain_moments() -> None:
    bnb, ao = OPTIMIZERS["adamw_8bit"], OPTIMIZERS["adamw_torch_8bit"]
    assert state_bytes(bnb, (4095,), 2) == 2 * 4 * 4095, "bitsandbytes: float32"
    assert state_bytes(ao, (4095,), 2) == 2 * 2 * 4095, "torchao: the parameter's type"
    assert state_bytes(bnb, (4096,), 2) == state_bytes(ao, (4096,), 2) == 2 * (4096 + 4 * 16)
    assert state_bytes(OPTIMIZERS["rmsprop_bnb_8bit"], (4096,), 2) == 4096 + 4 * 16
    assert state_bytes(bnb, (4097,), 2) == 2 * (4097 + 4 * 17)
    assert state_bytes(ao, (4097,), 2) == 2 * 2 * 4097, "256 does not divide it"
    assert state_bytes(bnb, (4096, 8), 2, embedding=True) == 2 * 4 * 4096 * 8
    assert state_bytes(OPTIMIZERS["adafactor"], (64, 32), 2) == 4 * (64 + 32)


# ----------------------------------------------------------------------------------------- training


@pytest.mark.long
@pytest.mark.parametrize("name", ["adamw_8bit", "adamw_torch_4bit"])
def test_resuming_with_quantized_state_is_bit_identical(name, tmp_path) -> None:
    settings = [f"train.optim={name}", "train.save_strategy=steps", "train.save_steps=2"]
    settings.append("train.max_steps=5")
    if name in ("adamw_torch_4bit", FP8_ADAMW):  # BF16 weights, rounded by chance
        settings.append("model.dtype=bfloat16")
    whole = run(tmp_path, *settings)
    resume = f"train.resume_from_checkpoint={whole.folder}/checkpoints/checkpoint-2"
    resumed = run(tmp_path, *settings, resume)
    a, b = weights(whole), weights(resumed)
    assert all(torch.equal(a[key], b[key]) for key in a)
    assert resumed.receipt.status == "proven"


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but([FP8_ADAMW], LOW_BIT_ADAMW[1:], pytest.mark.long))
def test_rounding_by_chance_acts(name, tmp_path) -> None:
    """At a learning rate below what BF16 holds, weights move all the same; to nearest few do."""
    settings = ["model.dtype=bfloat16", f"train.optim={name}", "train.learning_rate=1e-5"]
    by_chance = run(tmp_path, *settings)
    with pytest.warns(UserWarning, match="numbers in BF16 matrices have changed"):
        nearest = run(tmp_path, *settings, "train.optim_args=bf16_stochastic_round=false")
    moved = [changed_numbers(report.receipt.movement)[0] for report in (by_chance, nearest)]
    assert moved[0] > 2 * moved[1] > 0
    assert [r.receipt.movement["rounding"] for r in (by_chance, nearest)] == [
        "stochastic", "nearest",
    ]  # fmt: skip
    assert "! " not in str(by_chance.receipt)


def test_replicas_round_alike_and_a_resumed_one_too(tmp_path) -> None:
    """Whatever else has drawn: samples, on the first process; and what draws later is the same."""
    torch.manual_seed(0)
    start = torch.randn(64, 64).bfloat16()
    gradients = torch.randn(4, 64, 64).bfloat16()

    def trained(seed: int, begin: int = 0) -> list[torch.Tensor]:
        """Weights after each step; those of seed 1 are saved after the second."""
        weight = nn.Parameter(start.clone())
        optimizer: Any = low_bit_adamw("adamw_torch_8bit", [weight], lr=1e-4)
        optimizer.bf16_stochastic_round = True
        if begin:
            saved = torch.load(tmp_path / "saved.pt", weights_only=False)
            weight.data.copy_(saved["weight"])
            optimizer.load_state_dict(saved["optimizer"])
        undo = Update(optimizer).attach()
        torch.manual_seed(seed)
        found = []
        for number in range(begin, len(gradients)):
            weight.grad = gradients[number].clone()
            torch.rand(seed)
            before = torch.get_rng_state()
            optimizer.step()
            assert torch.equal(torch.get_rng_state(), before)
            found.append(weight.detach().clone())
            if seed == 1 and number == 1:
                both = {"weight": weight.data, "optimizer": optimizer.state_dict()}
                torch.save(both, tmp_path / "saved.pt")
        undo()
        return found

    one = trained(seed=1)
    assert all(map(torch.equal, one, trained(seed=2)))
    assert all(map(torch.equal, one[2:], trained(seed=3, begin=2)))
    shares = [float((w != start).float().mean()) for w in one]
    assert 0 < shares[0] < shares[1] < shares[2] < shares[3] < 1, "others in each step"


@pytest.mark.long
def test_the_update_of_torchao_is_not_compiled(tmp_path) -> None:
    torch._dynamo.reset()
    counters.clear()
    run(tmp_path, "train.optim=adamw_torch_8bit")
    assert not counters["frames"]


@pytest.mark.long
def test_what_an_earlier_run_told_bitsandbytes_is_forgotten(tmp_path) -> None:
    """It keeps modules of earlier runs for ever, and knows their weights by `id()` alone."""
    from bitsandbytes.optim import GlobalOptimManager

    for _ in range(2):
        run(tmp_path, "train.optim=adamw_8bit")
        manager = GlobalOptimManager.get_instance()
        assert len(manager.module_weight_config_triple) == 1
        assert len(manager.pid2config) == 1


# -------------------------------------------------------------------------------------- the proof


@pytest.mark.parametrize("name", LOW_BIT_ADAMW)
def test_a_weight_with_gradients_of_zero_is_told(name, make_llama, setup_backend) -> None:
    model = make_llama()
    model.unused = nn.Linear(64, 64, bias=False)  # runs, and adds nothing
    model.model.norm.register_forward_hook(lambda _, __, x: x + 0.0 * model.unused(x))
    accelerator = setup_backend("emulated")
    optimizer = low_bit_adamw(name, model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)

    def step(seed: int) -> None:
        accelerator.backward(model(**batch(seed=seed)).loss)
        optimizer.step()
        optimizer.zero_grad()

    step(0)
    with pytest.warns(UserWarning, match="4,096 trainable parameters have had no.*unused"):
        step(1)


# ------------------------------------------------------------------------------------------ refused


@pytest.mark.parametrize("name", [x.name for x in OPTIMIZERS.values() if x.not_on_cpu or x.refused])
def test_what_cannot_step_here_is_refused_with_what_can(name, tmp_path) -> None:
    with pytest.raises(ConfigError) as caught:
        run(tmp_path, f"train.optim={name}")
    instead = caught.value.fix.removeprefix("train.optim=")
    assert instead != name
    assert not OPTIMIZERS[instead].refused
    assert not OPTIMIZERS[instead].not_on_cpu
    assert caught.value.why
    assert not list(tmp_path.iterdir()), "nothing was written"


def test_a_paged_optimizer_needs_a_gpu() -> None:
    check_optimizer_here(TrainSection({"optim": "paged_adamw_8bit"}), A100)
    with pytest.raises(ConfigError, match=r"on x86_64[\s\S]*train.optim=adamw_8bit"):
        check_optimizer_here(TrainSection({"optim": "paged_adamw_8bit"}), CPU)


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("adamw_8bit", "adamw_torch_8bit"),
        ("lion_32bit", "adamw_torch_fused"),
        ("adafactor", "adamw_torch_8bit"),
        ("adagrad", "adamw_torch_fused"),
    ],
)
def test_what_cannot_step_on_shards_is_refused_with_what_can(name, instead) -> None:
    """Each ended in a traceback at the first step, when the model was loaded and sharded."""
    check_optimizer(TrainSection({"optim": name}))
    with pytest.raises(ConfigError, match=rf"with train.fsdp[\s\S]*train.optim={instead}$"):
        check_optimizer(TrainSection({"optim": name, "fsdp": True}))
    check_optimizer(TrainSection({"optim": instead, "fsdp": True}))


@pytest.mark.parametrize("name", ["adamw_torch_8bit", "adamw_torch_4bit", FP8_ADAMW])
def test_parts_of_a_state_are_its_codes_and_scales(name) -> None:
    """Between blocks, as shards are cut; a part that splits one is left to plain numbers."""
    weight = nn.Parameter(torch.randn(64, 128))
    optimizer = low_bit_adamw(name, [weight])
    weight.grad = torch.randn_like(weight)
    eager_step(optimizer)
    whole = optimizer.state[weight]["exp_avg"]
    parts: Any = [low_bit.part(whole, at * 128, (n, 128)) for at, n in ((0, 40), (40, 24))]
    assert [tuple(one.shape) for one in parts] == [(40, 128), (24, 128)]
    again: Any = low_bit.joined([*parts, torch.empty(0, 128)], whole.shape)
    assert type(again) is type(whole)
    assert torch.equal(again.dequantize(), whole.dequantize())
    assert low_bit.joined([parts[0], torch.zeros(24, 128)], whole.shape) is None
    assert low_bit.part(whole, 128, (4, 128)) is None
    assert low_bit.part(whole, 0, (0, 128)) is None


def test_an_fp8_optimizer_needs_fp8_casts_on_a_gpu() -> None:
    for device in (H100, APPLE, CPU):
        check_optimizer_here(TrainSection({"optim": FP8_ADAMW}), device)
    with pytest.raises(ConfigError, match=r"8\.9; this GPU has 8\.0[\s\S]*adamw_torch_8bit"):
        check_optimizer_here(TrainSection({"optim": FP8_ADAMW}), A100)


def test_a_bitsandbytes_that_cannot_step_on_a_cpu_is_named(monkeypatch) -> None:
    from importlib import metadata

    from finetune.hardware.versions import version

    version.cache_clear()
    monkeypatch.setattr(metadata, "version", {"bitsandbytes": "0.49.2"}.__getitem__)
    check_optimizer_here(TrainSection({"optim": "adamw_8bit"}), H100)
    with pytest.raises(ConfigError, match=r"0\.49\.2 steps on GPUs only[\s\S]*adamw_torch_8bit"):
        check_optimizer_here(TrainSection({"optim": "adamw_8bit"}), CPU)
    version.cache_clear()


@pytest.mark.parametrize(
    ("typo", "meant"),
    [("adamw", "adamw_torch"), ("adamw8bit", "adamw_8bit"), ("adamw_torchao_fp9", FP8_ADAMW)],
)
def test_a_typo_gets_the_nearest_name(typo, meant) -> None:
    with pytest.raises(ConfigError, match=f"did you mean '{meant}'") as caught:
        load_recipe("tiny_full_fp8", [f"train.optim={typo}"])
    assert caught.value.where == f"override 'train.optim={typo}'"


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("adamw_torch", "betas=1", "has no argument 'betas'"),
        ("adamw_torch_4bit", "blocksize=64", "did you mean 'block_size'"),
        ("adamw_torch_4bit", "block_size=wide", "block_size is a number"),
        ("adamw_torch_8bit", "bf16_stochastic_round=maybe", "true or false"),
        ("sgd", "momentum", "write it as key=value"),
    ],
)
def test_arguments_that_would_not_act_are_refused(name, given, message, tmp_path) -> None:
    with pytest.raises(ConfigError, match=message):
        run(tmp_path, f"train.optim={name}", f"train.optim_args={given}")
    assert not list(tmp_path.glob("**/model"))


@pytest.mark.slow
def test_validate_tells_what_cannot_be_had_from_what_cannot_be_had_here() -> None:
    from typer.testing import CliRunner

    from finetune.cli.app import app

    def validate(*overrides: str):
        return CliRunner().invoke(app, ["validate", "tiny_full_bf16", *overrides])

    here = validate("train.optim=paged_adamw_8bit")
    assert here.exit_code == 0
    assert "not on this machine: pages live in memory shared with a GPU" in here.output
    anywhere = validate("train.optim=lomo")
    assert isinstance(anywhere.exception, ConfigError)
    assert "adamw_torch_4bit" in str(anywhere.exception)


def test_arguments_are_read() -> None:
    assert arguments(TrainSection({})) == {}
    assert arguments(TrainSection({"optim_args": "a=1, b=x"})) == {"a": "1", "b": "x"}


@pytest.mark.slow
def test_the_checkpoint_holds_the_quantized_state(tmp_path) -> None:
    settings = ("train.save_strategy=steps", "train.save_steps=3")
    report = run(tmp_path, f"train.optim={FP8_ADAMW}", *settings)
    file = report.folder / "checkpoints" / "checkpoint-3" / "optimizer.pt"
    held = report.receipt.trainable["optimizer_state_bytes"]
    assert held < file.stat().st_size < 1.2 * held, "not turned into float32 on the way"
