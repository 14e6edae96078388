"""Training health: right by hand, alike for every backend, and without a trace in the training."""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from rich.console import Console
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from finetune import HealthMonitor
from finetune.precision import convert
from finetune.precision.numbers.formats import snr_db
from finetune.precision.planner import plan
from finetune.precision.settings import PrecisionConfig
from finetune.training.health.moments import (
    SummedRatio,
    gradient_snr,
    moments_of,
    ratio_row,
    sample,
    spread,
    update_ratio,
)
from finetune.training.health.monitor import OVERFLOW_WARNING, SNR_WARNING_DB
from finetune.training.health.operands import (
    OperandSums,
    OperandWatch,
    group_of,
    health_row,
    inspect_operand,
    inspect_sample,
    merge_sums,
)
from finetune.training.helper.optimizer import low_bit
from tests.conftest import batch, slow_but
from tests.training.test_distributed import launch

# Tiny models at high learning rates really have such readings.
pytestmark = pytest.mark.filterwarnings("ignore:.*(overflow and are saturated|signal over noise)")
QUIET = Console(quiet=True)
FP8_GROUPS = ("attn", "mlp")


def converted(model: nn.Module, **precision):
    values = {"compute": "fp8", "backend": "emulated", "emulation": "allow"} | precision
    return convert.apply(model, plan(model, PrecisionConfig(**values)))


def watch(model: nn.Module, conversion, seed: int = 1) -> dict:
    """The sums of one forward and backward."""
    watched = OperandWatch(model, conversion)
    with watched.watching():
        model(**batch(seed=seed)).loss.backward()
    return watched.sums


def trainer_of(model, tmp_path, steps: int = 4, callbacks=(), **arguments) -> Trainer:
    values = {
        "max_steps": steps, "per_device_train_batch_size": 2, "report_to": "none", "use_cpu": True,
        "bf16": True, "learning_rate": 1e-2, "disable_tqdm": True, "save_strategy": "no",
        "logging_steps": 1, "lr_scheduler_type": "constant",
    } | arguments  # fmt: skip
    ids = batch(16)["input_ids"].tolist()
    rows = Dataset.from_list([{"input_ids": row, "labels": row} for row in ids])
    return Trainer(
        model=model,
        args=TrainingArguments(str(tmp_path), **values),
        train_dataset=rows,
        eval_dataset=rows.select(range(2)),
        callbacks=list(callbacks),
    )


def health_rows(trainer: Trainer) -> list[dict]:
    return [row for row in trainer.state.log_history if any("health/" in key for key in row)]


# --------------------------------------------------------------------------------- right by hand


def test_groups() -> None:
    linear, norm = nn.Linear(2, 2), nn.LayerNorm(2)
    named = {
        "model.layers.3.self_attn.q_proj": "attn",
        "model.layers.0.mlp.down_proj": "mlp",
        "model.layers.0.mlp.experts.7.w1": "experts",
        "transformer.h.1.attn.c_proj.base_layer": "attn",
        "model.layers.0.mlp.up_proj.lora_A.default": "adapter",
        "lm_head": "head",
        "backbone.layers.2.mixer.in_proj": "mixer",
        "scale": "other",
    }
    assert {name: group_of(name, linear) for name in named} == named
    assert group_of("model.layers.0.self_attn.q_norm", norm) == "norm"
    assert group_of("model.embed_tokens", nn.Embedding(2, 2)) == "embed"
    assert group_of("model.layers.0.mlp.gate", linear, "router") == "router"


@pytest.mark.parametrize(("scale", "overflow", "underflow"), [(None, 0, 2), (2.0, 1, 1)])
def test_what_a_cast_loses_is_counted(scale, overflow, underflow) -> None:
    """E4M3 ends at 448 and 2^-9: the amax of this row is cast as it is, or beyond by its scale."""
    x = torch.tensor([[448.0, -(2.0**-11), 2.0**-10.5, 2.0**-9, 0.0]])
    precision = PrecisionConfig(compute="fp8", backend="emulated", scaling="tensorwise")
    found = inspect_operand(x, "x", precision, None if scale is None else torch.tensor(scale))
    assert (found.amax, found.elements) == (448.0, 5)
    assert (found.overflow, found.underflow) == (overflow, underflow)


def test_values_are_those_of_the_operands(make_llama) -> None:
    """x, w and g of a layer, taken by hooks of the test, judged one by one."""
    model = make_llama()
    conversion = converted(model, scaling="tensorwise")
    layers = {n: m for n, m in model.named_modules() if n.endswith(("up_proj", "gate_proj"))}
    layers |= {n: m for n, m in model.named_modules() if n.endswith("down_proj")}
    seen: dict[str, list] = {"x": [], "w": [], "g": []}
    for module in layers.values():
        seen["w"].append(module.weight.detach())

        def keep(_, args, output):
            seen["x"].append(args[0].detach().flatten(0, 1))
            output.register_hook(lambda g: seen["g"].append(g.flatten(0, 1)))

        module.register_forward_hook(keep)
    row = health_row(watch(model, conversion))
    for operand, tensors in seen.items():
        assert len(tensors) == 6
        each = [inspect_operand(t, operand, conversion.plan.precision) for t in tensors]
        elements = sum(t.numel() for t in tensors)
        at = f"health/mlp/{operand}"
        assert row[f"{at}_amax"] == max(float(t.abs().max()) for t in tensors)
        underflow = sum(e.underflow for e in each)
        assert row[f"{at}_underflow"] == pytest.approx(underflow / elements)
        assert row[f"{at}_overflow"] == 0
        assert row[f"{at}_snr_db"] == pytest.approx(sum(e.snr_db for e in each) / 6)
        assert row[f"{at}_worst_snr_db"] == pytest.approx(min(e.snr_db for e in each))


SCALINGS = (
    "delayed", "tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise", "mxfp8", "nvfp4"
)  # fmt: skip


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("operand", ["x", "w", "g"])
def test_a_sample_tells_what_the_whole_does(scaling, operand) -> None:
    """Rows of one size, and one outlier that sets the scale of a whole tensor."""
    precision = PrecisionConfig.model_validate({"compute": "fp8", "scaling": scaling})
    rows = torch.randn(2000, 256, generator=torch.Generator().manual_seed(0))
    rows[1234, 5] = 50.0
    whole, part = (
        inspect_operand(rows, operand, precision),
        inspect_sample(rows, operand, precision),
    )
    assert part.amax == whole.amax == 50
    # NVFP4's sample holds the run of the outlier, which weighs more in it than in the whole.
    near = 1.0 if scaling == "nvfp4" else 0.4
    assert part.snr_db == pytest.approx(whole.snr_db, abs=near)
    for kind, within in (("underflow", 0.02 * near), ("overflow", 1e-3)):
        shares = [getattr(found, kind) / found.elements for found in (part, whole)]
        assert shares[0] == pytest.approx(shares[1], abs=within)


def test_gemms_kept_high_have_no_cast(make_llama) -> None:
    """With dgrad and wgrad in high precision no gradient is quantized; x and w still are."""
    model = make_llama()
    conversion = converted(model, scaling="tensorwise", high_gemms=("dgrad", "wgrad"))
    row = health_row(watch(model, conversion))
    assert row["health/mlp/x_snr_db"] > 25
    assert row["health/mlp/w_snr_db"] > 25
    assert row["health/mlp/g_amax"] > 0
    assert "health/mlp/g_snr_db" not in row


def test_high_precision_has_amax_only(make_llama) -> None:
    model = make_llama()
    row = health_row(watch(model, converted(model, compute="bf16")))
    assert row["health/mlp/w_amax"] > 0
    assert row["health/embed/g_amax"] > 0
    assert all(key.endswith("_amax") for key in row)
    without_session = health_row(watch(make_llama(), None))
    assert without_session == row


def test_outlier_under_delayed_scaling(make_llama) -> None:
    """A weight that grows past yesterday's amax is clipped: overflow, no signal left."""
    model = make_llama()
    conversion = converted(model, scaling="delayed", amax_history_len=4)
    for seed in range(3):
        model(**batch(seed=seed)).loss.backward()
    calm = health_row(watch(model, conversion))
    assert calm["health/mlp/w_overflow"] == 0
    assert calm["health/mlp/w_worst_snr_db"] > 25
    weight = model.model.layers[1].mlp.down_proj.weight
    before = float(weight.detach().abs().max())
    with torch.no_grad():
        weight[3, 5] = 64 * before
    sums = watch(model, conversion)
    row = health_row(sums)
    assert row["health/mlp/w_amax"] == pytest.approx(64 * before)
    assert row["health/mlp/w_overflow"] > 0
    assert row["health/mlp/w_worst_snr_db"] < 1
    assert sums[("mlp", "w")].worst[1] == "model.layers.1.mlp.down_proj"
    assert row["health/attn/w_worst_snr_db"] > 25, "other groups are untouched"


def test_sums_of_processes_merge() -> None:
    good, bad = snr_db(torch.ones(4), torch.full((4,), 1.01)), 3.0
    one = OperandSums(2.0, 10, 5, 0, good, 1, (good, "a"))
    two = OperandSums(5.0, 30, 3, 6, bad, 1, (bad, "b"))
    whole = merge_sums([{("mlp", "x"): one}, {("mlp", "x"): two}])
    row = health_row(whole)
    assert row["health/mlp/x_amax"] == 5
    assert row["health/mlp/x_overflow"] == pytest.approx((10 * 0.5 + 30 * 0.1) / 40)
    assert row["health/mlp/x_underflow"] == pytest.approx(0.15)
    assert row["health/mlp/x_snr_db"] == pytest.approx((good + bad) / 2)
    assert row["health/mlp/x_worst_snr_db"] == bad


# ------------------------------------------------------------------------- the same for every path


@pytest.mark.parametrize("backend", slow_but(["emulated"], ["te", "torchao", "emulated"]))
def test_every_backend(backend, make_llama, setup_backend, tmp_path) -> None:
    setup_backend(backend, scaling="tensorwise", health_every=2)
    trainer = trainer_of(make_llama(), tmp_path)
    trainer.train()
    rows = health_rows(trainer)
    assert [row["step"] for row in rows] == [2, 4]
    for group in FP8_GROUPS:
        for operand, least in (("x", 30), ("w", 30), ("g", 24)):
            at = f"health/{group}/{operand}"
            assert rows[0][f"{at}_amax"] > 0
            assert rows[0][f"{at}_overflow"] == 0
            assert rows[0][f"{at}_underflow"] < 0.05
            assert least < rows[0][f"{at}_snr_db"] < least + 4, "E4M3, and E5M2 for gradients"
        assert 0 < rows[0][f"health/{group}/update_ratio"] < 1
        assert rows[0][f"health/{group}/grad_snr"] > 0
    assert rows[0]["health/head/w_amax"] > 0


@pytest.mark.parametrize("scaling", ["tensorwise", "delayed"])
def test_parameters_that_multiply(scaling) -> None:
    """A BDH: two levels share three matrices, one of them a stack of one for each head."""
    from finetune.storage.bdh import BdhConfig, BdhForCausalLM

    torch.manual_seed(0)
    config = BdhConfig(
        vocab_size=272, hidden_size=32, num_neurons=128, num_attention_heads=2,
        num_hidden_layers=2, dropout=0.0, use_cache=False,
    )  # fmt: skip
    model = BdhForCausalLM(config).train()
    conversion = converted(model, scaling=scaling)
    for seed in range(2):
        model(**batch(seed=seed)).loss.backward()
    sums = watch(model, conversion)
    row = health_row(sums)
    tokens = 2 * 32
    assert sums[("block", "x")].layers == 2 * (1 + 2 + 1)
    assert sums[("block", "x")].elements == 2 * tokens * (32 + 2 * 32 + 128)
    assert sums[("block", "g")].elements == 2 * tokens * (128 + 2 * 64 + 32)
    weights = [p for n, p in model.named_parameters() if "coder" in n]
    assert row["health/block/w_amax"] == max(float(p.detach().abs().max()) for p in weights)
    assert row["health/block/w_snr_db"] > 30
    assert row["health/block/g_snr_db"] > 20
    assert not any(module.fp8_observers for module in model.modules()
                   if "fp8_observers" in vars(module))  # fmt: skip


@pytest.mark.parametrize("reentrant", [None, True, False])
def test_recomputation_is_not_counted_twice(reentrant, make_llama) -> None:
    def sums(reentrant):
        model = make_llama()
        if reentrant is not None:
            model.activation_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        return watch(model, converted(model, scaling="tensorwise"))

    plain, again = sums(None), sums(reentrant)
    assert {k: (t.elements, t.layers) for k, t in plain.items()} == {
        k: (t.elements, t.layers) for k, t in again.items()
    }
    assert plain[("mlp", "g")].elements == 2 * 64 * (128 + 128 + 64)
    assert health_row(again) == pytest.approx(health_row(plain))


@pytest.mark.slow
def test_one_micro_batch_of_an_accumulation(make_llama, setup_backend, tmp_path) -> None:
    found = {}
    for accumulation in (1, 3):
        setup_backend("emulated", health_every=1)
        monitor_rows = []
        trainer = trainer_of(
            make_llama(), tmp_path, steps=2, gradient_accumulation_steps=accumulation
        )
        watched = HealthMonitor(trainer, every=2)
        trainer.add_callback(watched)
        trainer.train()
        monitor_rows = health_rows(trainer)
        assert [row["step"] for row in monitor_rows] == [2]
        assert watched._watch is not None
        found[accumulation] = watched._watch.sums[("attn", "x")].elements
    assert found[1] == found[3] == 2 * 4 * 2 * 32 * 64


@pytest.mark.slow
def test_lora(make_llama, setup_backend, tmp_path) -> None:
    setup_backend("emulated", health_every=2)
    model = get_peft_model(make_llama(), LoraConfig(r=8, target_modules="all-linear"))
    trainer = trainer_of(model, tmp_path, steps=2)
    trainer.train()
    (row,) = health_rows(trainer)
    updated = {key.split("/")[1] for key in row if key.endswith("update_ratio")}
    assert updated == {"adapter"}, "frozen weights have no update"
    assert {key.split("/")[1] for key in row if key.endswith("grad_snr")} == {"adapter"}
    assert row["health/attn/x_snr_db"] > 25, "the frozen base multiplies in FP8"
    assert row["health/adapter/w_amax"] > 0
    assert "health/adapter/w_snr_db" not in row, "adapters stay in high precision"


@pytest.mark.long
def test_two_processes(tmp_path) -> None:
    """Rows are of both processes, and a NaN in one of them stops both, by its name."""
    for mode, (first, second) in launch(tmp_path, "ddp,fsdp", "tests.health_worker").items():
        assert first["health"] == second["health"], mode
        (row,) = first["health"]
        assert row["step"] == 2
        assert 0 < row["health/mlp/update_ratio"] < 0.1
        assert row["health/mlp/grad_snr"] > 0
        assert row["health/mlp/x_snr_db"] > 30
        assert (first["step"], second["step"]) == (3, 3), "the fourth step was not made"
        assert first["where"] == second["where"]
        assert first["where"] == "the loss: its value, micro-batch 1 of 2, in process 1"


# ----------------------------------------------------------------------------------- no trace left


@pytest.mark.long
@pytest.mark.parametrize("backend", slow_but(["emulated"], ["te", "emulated"]))
@pytest.mark.parametrize("checkpointing", slow_but([True], [False, True]))
def test_training_is_bit_equal_with_health(
    backend, checkpointing, make_llama, setup_backend, tmp_path
) -> None:
    scaling = "tensorwise" if backend == "torchao" else "delayed"
    history = {} if backend == "torchao" else {"amax_history_len": 4}
    results = []
    for every in (0, 1):
        setup_backend(backend, scaling=scaling, health_every=every, **history)
        model = make_llama(attention_dropout=0.0 if checkpointing else 0.1)
        trainer = trainer_of(
            model, tmp_path, gradient_checkpointing=checkpointing, gradient_accumulation_steps=2
        )
        trainer.train()
        losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
        norms = [row["grad_norm"] for row in trainer.state.log_history if "loss" in row]
        results.append((losses, norms, model.state_dict()))
        assert len(health_rows(trainer)) == (3 if every else 0), "not in the witnessed first step"
    (losses, norms, weights), (same_losses, same_norms, same_weights) = results
    assert len(losses) == 4
    assert losses == same_losses
    assert norms == same_norms
    assert all(torch.equal(weights[key], same_weights[key]) for key in weights)


@pytest.mark.slow
def test_evaluation_is_untouched(make_llama, setup_backend, tmp_path) -> None:
    hooks = []

    class Spy(TrainerCallback):
        def on_prediction_step(self, args, state, control, model=None, **kwargs):
            hooks.append(sum(len(m._forward_hooks) for m in model.modules()))

    setup_backend("emulated", health_every=1)
    trainer = trainer_of(make_llama(), tmp_path, callbacks=[Spy()])
    before = trainer.training_step
    trainer.args.eval_strategy = "steps"
    trainer.args.eval_steps = 2
    trainer.train()
    assert hooks == [0, 0]
    assert trainer.training_step == before
    assert not any("health" in key for row in trainer.state.log_history if "eval_loss" in row
                   for key in row)  # fmt: skip
    assert not any(isinstance(c, HealthMonitor) for c in trainer.callback_handler.callbacks)


@pytest.mark.slow
def test_own_monitor_replaces_that_of_the_helper(make_llama, setup_backend, tmp_path) -> None:
    setup_backend("emulated", health_every=1)
    trainer = trainer_of(make_llama(), tmp_path, steps=3)
    trainer.add_callback(HealthMonitor(trainer, every=3))
    trainer.train()
    assert [row["step"] for row in health_rows(trainer)] == [3]


@pytest.mark.slow
def test_without_any_set_up(make_llama, tmp_path) -> None:
    trainer = trainer_of(make_llama(), tmp_path, steps=2)
    trainer.add_callback(HealthMonitor(trainer, every=2))
    trainer.train()
    (row,) = health_rows(trainer)
    assert row["health/attn/g_amax"] > 0
    assert row["health/attn/update_ratio"] > 0
    assert not any("snr_db" in key for key in row)


@pytest.mark.slow
def test_warnings_are_said_once(make_llama, setup_backend, tmp_path) -> None:
    """Every weight of the MLPs grows by 8 in each step: its scale lags behind."""
    said: list[str] = []

    class Grow(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            with torch.no_grad():
                for layer in model.model.layers:
                    layer.mlp.up_proj.weight.mul_(8)

    setup_backend("emulated", scaling="delayed", amax_history_len=1, health_every=1)
    trainer = trainer_of(make_llama(), tmp_path, steps=3, callbacks=[Grow()], learning_rate=0.0)
    trainer.add_callback(HealthMonitor(trainer, every=1, say=said.append))
    trainer.train()
    assert OVERFLOW_WARNING == 0.01
    assert SNR_WARNING_DB == 15
    overflow = [line for line in said if "weights of mlp overflow" in line]
    noise = [line for line in said if "weights of mlp keeps" in line]
    assert len(overflow) == len(noise) == 1
    assert "up_proj" in noise[0]
    assert not any("weights of attn" in line for line in said)


# ------------------------------------------------------------------------- moments of the optimizer


def test_gradient_snr_by_hand() -> None:
    p = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.AdamW([p], lr=0.0, betas=(0.5, 0.75))
    gradients = torch.tensor([[1.0, 2.0, -1.0], [3.0, 2.0, 1.0], [2.0, 2.0, 0.0]])
    for g in gradients:
        p.grad = g.clone()
        optimizer.step()
    m = v = torch.zeros(3)
    for g in gradients:
        m, v = 0.5 * m + 0.5 * g, 0.75 * v + 0.25 * g * g
    m, v = m / (1 - 0.5**3), v / (1 - 0.75**3)
    found = gradient_snr({"p": p}, optimizer, {"p": "mlp"})["mlp"]
    assert found.above == pytest.approx(float((m * m).sum()), rel=1e-5)
    assert found.below == pytest.approx(float((v - m * m).sum()), rel=1e-5)


def stepped(optimizer, p, steps: int = 3):
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        p.grad = 0.1 + torch.randn(p.shape, generator=generator)
        optimizer.step()
    return optimizer.state[p]


@pytest.mark.parametrize("kind", ["8bit", "4bit", "Fp8"])
def test_quantized_moments_of_torchao(kind) -> None:
    """The states themselves: its optimizers compile their step, which takes a C++ compiler."""
    from torchao.optim import subclass_4bit, subclass_8bit, subclass_fp8

    modules = {"8bit": subclass_8bit, "4bit": subclass_4bit, "Fp8": subclass_fp8}
    make = getattr(modules[kind], f"OptimState{kind}").zeros
    signed = [{}, {}] if kind == "Fp8" else [{"signed": True}, {"signed": False}]
    state = {name: make((96, 256), **sign) for name, sign in zip(
        ("exp_avg", "exp_avg_sq"), signed, strict=True)}  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    for stored in state.values():
        stored.copy_(torch.rand(96, 256, generator=generator))
    found = moments_of(state | {"step": torch.tensor(3.0)}, 96 * 256)
    assert found is not None
    for key, values in zip(("exp_avg", "exp_avg_sq"), found[:2], strict=True):
        whole = state[key].dequantize().flatten()[spread(96 * 256)].float()
        assert len(whole) < 96 * 256, "sampled"
        assert torch.equal(values, whole)
    assert found[2] == 3


@pytest.mark.parametrize("size", [(64, 80), (70, 70)])
def test_quantized_moments_of_bitsandbytes(size) -> None:
    bnb = pytest.importorskip("bitsandbytes")
    low_bit.forget_overrides()  # of other tests' parameters, by addresses that are used again
    p, exact = nn.Parameter(torch.zeros(size)), nn.Parameter(torch.zeros(size))
    state = stepped(bnb.optim.AdamW8bit([p], lr=1e-3), p)
    whole = stepped(torch.optim.AdamW([exact], lr=1e-3), exact)
    assert state["state1"].dtype == torch.uint8
    found = moments_of(state, p.numel())
    assert found is not None
    for key, values in zip(("exp_avg", "exp_avg_sq"), found[:2], strict=True):
        assert snr_db(whole[key].flatten()[spread(p.numel())], values) > 20


@pytest.mark.parametrize("name", ["SGD", "Adagrad", "RMSprop"])
def test_optimizers_without_both_moments(name) -> None:
    p = nn.Parameter(torch.zeros(8))
    optimizer = getattr(torch.optim, name)([p], lr=1e-3)
    stepped(optimizer, p)
    assert gradient_snr({"p": p}, optimizer, {"p": "mlp"}) == {}


def test_the_logged_update_ratio_is_one_of_norms_not_of_their_squares() -> None:
    found = SummedRatio(above=0.02**2 * 4.0, below=4.0)
    assert ratio_row({}, {"mlp": found}) == {"health/mlp/update_ratio": pytest.approx(0.02)}
    assert ratio_row({"mlp": found}, {"mlp": SummedRatio(1.0, 0.0)}) == {
        "health/mlp/grad_snr": pytest.approx(0.02**2)
    }


def test_update_ratio_by_hand() -> None:
    """A sampled parameter and a small one of the same group."""
    big, small = nn.Parameter(torch.full((300, 400), 2.0)), nn.Parameter(torch.full((3,), 1.0))
    named = {"big": big, "small": small}
    before = {name: sample(p) for name, p in named.items()}
    assert before["big"].numel() < 2**14
    with torch.no_grad():
        big.add_(0.02)
        small.sub_(0.5)
    found = update_ratio(before, named, {"big": "mlp", "small": "mlp"})["mlp"]
    assert found.above == pytest.approx(120_000 * 0.02**2 + 3 * 0.25, rel=1e-3)
    assert found.below == pytest.approx(120_000 * 4 + 3)
    assert (found + SummedRatio(1.0, 1.0)).below == found.below + 1
