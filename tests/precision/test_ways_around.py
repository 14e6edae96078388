"""Ways in which a script could train in another precision, crash oddly, or leave things behind."""

from __future__ import annotations

import copy
import gc
import pickle

import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from finetune import (
    get_receipt,
    revert,
    setup_fp8_mixed_precision_training,
    teardown_fp8_mixed_precision_training,
)
from finetune.errors import OrderError, PlanError, ProofError, UnknownArgumentError
from finetune.precision import convert
from finetune.precision.convert import conversion_of
from finetune.precision.engines.base import Fp8Mixin
from finetune.precision.planner import plan
from finetune.precision.settings import PrecisionConfig
from finetune.precision.stored.linear import StoredMixin
from tests.conftest import batch, prepared, slow_but, step, train


def fp8_layers(model: nn.Module) -> int:
    return sum(isinstance(m, Fp8Mixin) for m in model.modules())


# ----------------------------------------------------------------- training past the prepared model


def test_training_in_evaluation_mode(make_llama, setup_backend) -> None:
    accelerator, model, optimizer = prepared(make_llama(), setup_backend)
    model.eval()
    with pytest.raises(ProofError, match=r"did not run[\s\S]*evaluation mode") as caught:
        step(accelerator, model, optimizer)
    assert caught.value.fix.startswith("model.train()")


def test_weights_that_became_nan_are_not_proven(make_llama, setup_backend) -> None:
    """Adam's epsilon is zero in FP16."""
    with pytest.warns(UserWarning, match=r"21 weights that train are float16 .*loss scaling"):
        accelerator, model, optimizer = prepared(make_llama().half(), setup_backend)
    train(accelerator, model, optimizer, 4)
    assert get_receipt().status.startswith("not proven: weights are not finite (model.embed")


@pytest.mark.parametrize("adapted", [False, True])
def test_weights_cast_in_mid_run(make_llama, setup_backend, adapted) -> None:
    """SGD has no state whose type would differ: it went on with rounded weights, still proven."""
    model = make_llama()
    if adapted:
        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))
    accelerator = setup_backend("emulated")
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    train(accelerator, model, optimizer)
    model.to(torch.bfloat16)
    with pytest.raises(ProofError, match="weights that train were cast from float32 to bfloat16"):
        step(accelerator, model, optimizer, 2)
    revert(model)  # what the error says
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    train(accelerator, model, optimizer)


@pytest.mark.parametrize("proven", [False, True])
@pytest.mark.parametrize("by_accelerate", [False, True])
def test_training_without_its_adapters(make_llama, setup_backend, proven, by_accelerate) -> None:
    """torch refuses the loss, and the proof is none the worse."""
    model = get_peft_model(make_llama(), LoraConfig(r=4, target_modules="all-linear"))
    accelerator, model, optimizer = prepared(model, setup_backend)
    train(accelerator, model, optimizer, 2 * proven)
    backward = accelerator.backward if by_accelerate else torch.Tensor.backward
    with (
        pytest.raises(RuntimeError, match="does not require grad"),
        model.disable_adapter(),
    ):
        backward(model(**batch()).loss)
    train(accelerator, model, optimizer)
    assert get_receipt().status == "proven"


def test_going_on_after_an_error_that_was_caught(make_llama, setup_backend) -> None:
    """It went on unwatched, in BF16 for all that anybody knew, under a receipt of before."""
    accelerator, model, optimizer = prepared(make_llama(), setup_backend)
    train(accelerator, model, optimizer)
    model.eval()
    with pytest.raises(ProofError, match="BF16 entered"):
        step(accelerator, model, optimizer)
    with pytest.raises(OrderError, match=r"trains on after an error[\s\S]*BF16 entered"):
        step(accelerator, model, optimizer)
    model, optimizer = accelerator.prepare(model.train(), optimizer)
    optimizer.zero_grad()
    step(accelerator, model, optimizer)
    assert get_receipt().status.startswith("not proven: one optimizer step was seen")
    step(accelerator, model, optimizer, 1)
    assert get_receipt().status == "proven"


@pytest.mark.parametrize("again", slow_but(["the same trainer"], ["the same trainer", "a new one"]))
def test_training_again_after_a_run_that_failed(make_llama, setup_backend, tmp_path, again) -> None:
    """The second run had no proof, and the receipt said that the first was stopped."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Fails(TrainerCallback):
        def on_step_end(self, *_, **__):
            raise MemoryError

    setup_backend("emulated")
    args = TrainingArguments(
        output_dir=str(tmp_path), max_steps=2, use_cpu=True, report_to="none", disable_tqdm=True,
        save_strategy="no", learning_rate=1e-2, bf16=True,
    )  # fmt: skip
    rows = [{"input_ids": x, "labels": x} for x in batch()["input_ids"].tolist() * 4]
    trainer = Trainer(make_llama(), args, train_dataset=rows, callbacks=[Fails])
    with pytest.raises(MemoryError):
        trainer.train()
    assert get_receipt().status == "stopped: MemoryError"
    trainer.remove_callback(Fails)
    trainer = trainer if again == "the same trainer" else Trainer(trainer.model, args, None, rows)
    trainer.train()
    assert get_receipt().status == "proven"


def test_calling_the_inner_model(make_llama, setup_backend) -> None:
    accelerator, model, _ = prepared(make_llama(), setup_backend)
    ids = batch()["input_ids"]
    logits = model.lm_head(model.model(input_ids=ids).last_hidden_state)
    with pytest.raises(ProofError, match=r"outside a call of the prepared model"):
        accelerator.backward(logits.square().mean())


def test_stepping_without_a_step(make_llama, setup_backend) -> None:
    _, model, optimizer = prepared(make_llama(), setup_backend)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    with pytest.raises(ProofError, match=r"no forward and backward of the prepared model"):
        optimizer.step()


def test_an_optimizer_without_a_learning_rate(make_llama, setup_backend) -> None:
    """Its settings have other names: a KeyError in the first step."""

    class Signs(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    p.add_(p.grad.sign(), alpha=-group["eta"])

    accelerator, model = setup_backend("emulated"), make_llama()
    model, optimizer = accelerator.prepare(model, Signs(model.parameters(), {"eta": 1e-3}))
    train(accelerator, model, optimizer)
    assert get_receipt().status == "proven"


def test_copies_made_before_the_first_step_are_not_watched(make_llama, setup_backend) -> None:
    """A teacher's backward was taken for that of the model: "FP8 did not run"."""
    accelerator, model, optimizer = prepared(make_llama(), setup_backend)
    assert pickle.loads(pickle.dumps(model)).training
    teacher = copy.deepcopy(model).requires_grad_(False)
    for seed in range(2):
        embedded = model.get_input_embeddings()(batch(seed=seed)["input_ids"])
        apart = model(**batch(seed=seed)).logits - teacher(inputs_embeds=embedded).logits
        accelerator.backward((apart - 1).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    assert get_receipt().status == "proven"


def test_optimizer_whose_model_was_never_prepared(make_llama, setup_backend) -> None:
    """What Trainer does under nn.DataParallel: only the optimizer is prepared."""
    model = make_llama()
    accelerator = setup_backend("emulated")
    optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=1e-2))
    model(**batch()).loss.backward()
    with pytest.raises(OrderError, match=r"never prepared[\s\S]*torchrun"):
        optimizer.step()


@pytest.mark.parametrize("separate", [False, True])
def test_a_model_left_out_beside_a_prepared_one(make_llama, setup_backend, separate) -> None:
    """It would train in high precision, next to a receipt that is proven."""
    accelerator, model, probe = setup_backend("emulated"), make_llama(), nn.Linear(272, 16)
    optimizer = torch.optim.AdamW([*probe.parameters(), *([] if separate else model.parameters())])
    probe, optimizer = accelerator.prepare(probe, optimizer)
    accelerator.backward(probe(model(**batch()).logits.float()).square().mean())
    if not separate:
        with pytest.raises(OrderError, match="most of what an optimizer trains belongs to no"):
            optimizer.step()
        return
    optimizer.step()
    own = torch.optim.AdamW(model.parameters())
    with pytest.warns(UserWarning, match=r"belong to no prepared model \(16 of 16 matrices"):
        own.step()


def test_parameters_that_need_no_conversion_are_prepared_too(make_llama, setup_backend) -> None:
    accelerator, model = setup_backend("emulated"), make_llama()
    prompt = nn.ParameterList([nn.Parameter(torch.randn(600, 64))])
    optimizer = torch.optim.AdamW([*model.parameters(), *prompt.parameters()], lr=1e-2)
    model, prompt, optimizer = accelerator.prepare(model, prompt, optimizer)
    embedded = prompt[0][:8].expand(2, 8, 64)
    accelerator.backward(model(inputs_embeds=embedded).logits.square().mean())
    before = prompt[0].detach().clone()
    optimizer.step()  # neither an error nor a warning
    assert not torch.equal(prompt[0], before)


def test_model_without_linear_layers(setup_backend) -> None:
    accelerator = setup_backend("emulated")
    with pytest.raises(PlanError, match="no layer of this model can take it"):
        accelerator.prepare(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()))


def test_loss_module_beside_the_model(make_llama, setup_backend) -> None:
    class Temperature(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

    accelerator = setup_backend("emulated")
    _, model = accelerator.prepare(Temperature(), make_llama())
    assert fp8_layers(model) == 14


def test_model_around_a_prepared_model(make_llama, setup_backend) -> None:
    accelerator = setup_backend("emulated")
    inner = accelerator.prepare(nn.Sequential(nn.Linear(64, 64)))
    outer = accelerator.prepare(nn.Sequential(inner, *[nn.Linear(64, 64) for _ in range(8)]))
    assert fp8_layers(outer) == 9


def test_setup_again_and_going_on_with_the_old_model(make_llama, setup_backend) -> None:
    accelerator, model, optimizer = prepared(make_llama(), setup_backend)
    step(accelerator, model, optimizer)
    accelerator = setup_backend("emulated")
    with pytest.raises(OrderError, match="replaced"):
        model(**batch())
    with torch.no_grad():
        model(**batch())  # inference goes on
    model._is_accelerate_prepared = False
    model = accelerator.prepare(model)
    model(**batch())
    assert fp8_layers(model) == 14


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_layers_of_an_unloaded_adapter_are_prepared_again(
    make_llama, setup_backend, frozen, kept
) -> None:
    """Stage after stage in a script; what the first one trained may be alive (`kept`) or gone."""
    settings = {"frozen": "fp8", "scaling": "rowwise"} if frozen else {}
    accelerator = setup_backend("emulated", **settings)
    config = LoraConfig(r=8, target_modules=["q_proj"])
    first = get_peft_model(make_llama(), config).train()
    optimizer = torch.optim.AdamW([p for p in first.parameters() if p.requires_grad], lr=1e-2)
    first, optimizer = accelerator.prepare(first, optimizer)
    train(accelerator, first, optimizer)
    base = first.unload() if frozen else first.merge_and_unload()
    if not kept:
        accelerator.free_memory()
        del first, optimizer
        gc.collect()
    base._is_accelerate_prepared = False
    second = get_peft_model(base, config).train()
    stepper = torch.optim.AdamW([p for p in second.parameters() if p.requires_grad], lr=1e-2)
    second, stepper = accelerator.prepare(second, stepper)
    train(accelerator, second, stepper)
    assert get_receipt().status == "proven"
    assert fp8_layers(second) == 14
    if kept:
        with pytest.raises(OrderError, match="another model with the same layers was prepared"):
            first.train()(**batch())


def test_teardown_reaches_the_layers_of_an_unloaded_adapter(make_llama, setup_backend) -> None:
    accelerator = setup_backend("emulated")
    model = get_peft_model(make_llama(), LoraConfig(r=8, target_modules=["q_proj"])).train()
    base = accelerator.prepare(model).merge_and_unload()
    other = accelerator.prepare(make_llama())  # what the session's receipt is of
    accelerator.free_memory()
    del model
    gc.collect()
    assert fp8_layers(base) == fp8_layers(other) == 14
    teardown_fp8_mixed_precision_training()
    assert fp8_layers(base) == 0


def test_a_trunk_of_two_models_is_prepared_once(setup_backend) -> None:
    accelerator, trunk = setup_backend("emulated"), nn.Linear(64, 64)
    actor, critic = (nn.Sequential(trunk, nn.Linear(64, 32)) for _ in range(2))
    actor, critic = accelerator.prepare(actor, critic)
    with pytest.raises(OrderError, match="belong into one module"):
        (actor(torch.randn(4, 64)).sum() + critic(torch.randn(4, 64)).sum()).backward()


# ------------------------------------------------------------------------- interrupted and restored


@pytest.mark.parametrize("backend", ["emulated", "te"])
def test_interrupt_inside_forward_leaves_nothing_open(
    make_llama, setup_backend, te_engine, backend
) -> None:
    accelerator = setup_backend(backend, scaling="delayed")
    model = make_llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    layer = model.model.layers[1]

    def interrupt(*_):
        raise KeyboardInterrupt

    hook = layer.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(**batch())
    hook.remove()
    assert _get_current_dispatch_mode() is None
    assert te_engine.depth == 0
    train(accelerator, model, optimizer)
    assert get_receipt().status == "proven"


@pytest.mark.parametrize("wrapped", [True, False])
def test_going_on_with_a_reverted_model(make_llama, setup_backend, wrapped) -> None:
    accelerator, model, optimizer = prepared(make_llama(), setup_backend)
    if not wrapped:  # an optimizer that Accelerate does not know: it trained on, proven, in BF16
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(accelerator, model, optimizer, 3)
    revert(model)
    with pytest.raises(OrderError, match="plain layers back"):
        step(accelerator, model, optimizer)
    model, optimizer = accelerator.prepare(model, optimizer)
    step(accelerator, model, optimizer)


def test_failed_backward_is_no_evidence(make_llama, setup_backend) -> None:
    accelerator, model, optimizer = prepared(make_llama(), setup_backend)

    def fail(*_):
        raise RuntimeError("out of memory")

    loss = model(**batch()).loss
    handle = model.model.layers[0].mlp.up_proj.weight.register_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        accelerator.backward(loss)
    handle.remove()
    optimizer.zero_grad()
    train(accelerator, model, optimizer)
    rows = [r for r in get_receipt().layers if r.role == "base"]
    assert {(r.calls["fprop"], r.calls["dgrad"], r.calls["wgrad"]) for r in rows} == {(1, 1, 1)}


def test_sanity_forward_in_evaluation_mode_is_no_evidence(make_llama, setup_backend) -> None:
    accelerator, model, optimizer = prepared(make_llama(), setup_backend)
    model.eval()
    model(**batch())
    model.train()
    train(accelerator, model, optimizer)
    assert get_receipt().status == "proven"


# ------------------------------------------------------------------------------- legitimate scripts


def test_an_optimizer_that_steps_less_often(make_llama, setup_backend) -> None:
    """A critic steps five times as often: the other's parameters were "not in the optimizer"."""
    accelerator, model = setup_backend("emulated"), make_llama()
    first = torch.optim.AdamW(model.model.parameters(), lr=1e-2)
    second = torch.optim.AdamW(model.lm_head.parameters(), lr=1e-2)
    model, first, second = accelerator.prepare(model, first, second)
    for seed in range(8):
        accelerator.backward(model(**batch(seed=seed)).loss)
        first.step()
        first.zero_grad()
        if seed % 4 == 3:
            second.step()
            second.zero_grad()
    assert get_receipt().status == "proven"


def test_long_warmup_of_float32_weights_is_told_not_stopped(make_llama, setup_backend) -> None:
    """A first learning rate of 1e-9 moves no weight of 1.0, in float32 either."""
    accelerator, model, optimizer = prepared(make_llama(), setup_backend, lr=1e-9)
    optimizer.optimizer.param_groups[0]["weight_decay"] = 0.0
    train(accelerator, model, optimizer)
    t = get_receipt().trainable
    assert t["below_resolution"] >= 5 * 64, "the norms"


def test_converted_layers_keep_their_interface(make_llama, setup_backend) -> None:
    accelerator, model, optimizer = prepared(make_llama(), setup_backend)
    train(accelerator, model, optimizer)
    layer = model.model.layers[0].mlp.up_proj
    assert layer(input=torch.randn(4, 64)).shape == (4, 128)
    assert layer(torch.randn(0, 64)).shape == (0, 128), "an expert without tokens"
    again = pickle.loads(pickle.dumps(layer))
    assert type(again) is nn.Linear
    assert torch.equal(again.weight, layer.weight)
    average = copy.deepcopy(model)
    assert fp8_layers(average) == 0
    assert type(average).__name__ == type(model).__name__ == "LlamaForCausalLM"
    assert conversion_of(average) is None
    average(**batch()).loss.backward()
    assert fp8_layers(model) == 14


@pytest.mark.parametrize("chosen", [{}, {"map": {"0": "fp32"}}, {"frozen": "fp8"}])
def test_a_layer_behind_fsdp2s_class_is_plain_after_a_revert(chosen) -> None:
    """FSDP2 puts a class of its own in front of each module that it shards, and needs it there."""

    class Sharded:
        pass

    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model.requires_grad_("frozen" not in chosen)
    precision = PrecisionConfig(
        compute="fp8", backend="emulated", emulation="allow", scaling="rowwise", **chosen
    )
    convert.apply(model, plan(model, precision))
    model[0].__class__ = type("FSDPLinear", (Sharded, type(model[0])), {})
    for _ in range(2):
        convert.revert(model)
        assert isinstance(model[0], Sharded)
        stored = isinstance(model[0], StoredMixin)
        assert stored == ("frozen" in chosen)
        weight = model[0].dequantize() if stored else model[0].weight
        x = torch.randn(4, 64)
        expected = nn.functional.linear(x, weight, model[0].bias)
        assert torch.allclose(model[0](x), expected, atol=1e-6)
    convert.apply(model, plan(model, precision))
    assert model.train()(torch.randn(4, 64)).shape == (4, 64)


def test_root_that_is_a_linear_layer(setup_backend) -> None:
    layer = setup_backend("emulated").prepare(nn.Linear(64, 64))
    layer(torch.randn(16, 64)).sum().backward()
    teardown_fp8_mixed_precision_training()
    assert type(layer) is nn.Linear
    assert layer(torch.randn(16, 64)).shape == (16, 64)


def test_backend_in_capitals_and_keep_as_text(make_llama, te_engine) -> None:
    accelerator = setup_fp8_mixed_precision_training("TE", keep="q_proj", cpu=True)
    model = accelerator.prepare(make_llama())
    assert get_receipt().precision["scaling"] == "delayed"
    assert fp8_layers(model) == 12


@pytest.mark.parametrize(
    ("name", "value", "hint"),
    [
        ("eval", "fp8", "eval_precision"),
        ("format", "e4m3", "fp8_format"),
        ("compute", "fp16", "it is always fp8 here"),
    ],
)
def test_settings_of_recipes_with_another_name_here(name, value, hint) -> None:
    with pytest.raises(UnknownArgumentError, match=hint):
        setup_fp8_mixed_precision_training("emulated", emulation="allow", **{name: value})


def test_misspelt_setting_leaves_nothing_in_force() -> None:
    plain = Accelerator.__init__
    with pytest.raises(UnknownArgumentError, match="did you mean 'amax_history_len'"):
        setup_fp8_mixed_precision_training("emulated", emulation="allow", amax_history=16)
    assert Accelerator.__init__ is plain


@pytest.mark.parametrize(
    ("backend", "scaling"),
    [("emulated", "tensorwise"), ("torchao", "rowwise"), ("te", "tensorwise"), ("te", "delayed")],
)
def test_evaluation_in_fp8_only_when_asked(make_llama, setup_backend, backend, scaling) -> None:
    def logits(eval_precision: str, *, training: bool) -> torch.Tensor:
        accelerator = setup_backend(backend, scaling=scaling, eval_precision=eval_precision)
        model = accelerator.prepare(make_llama()).train(training)
        with torch.no_grad():
            return model(**batch()).logits

    plain = logits("high", training=False)
    fp8 = logits("fp8", training=False)
    assert not torch.equal(plain, fp8)
    assert torch.equal(fp8, logits("high", training=True))
    assert float((plain - fp8).norm() / plain.norm()) < 0.2


@pytest.mark.parametrize("backend", ["emulated", "torchao", "te"])
def test_answers_are_written_in_high_precision_by_weights_that_train(
    make_llama, setup_backend, backend
) -> None:
    """In training mode, as trainers of written answers leave it; and FP8 goes on afterwards."""

    def written(eval_precision: str) -> tuple[torch.Tensor, torch.Tensor]:
        accelerator = setup_backend(backend, scaling="tensorwise", eval_precision=eval_precision)
        model = accelerator.prepare(make_llama()).train()
        ids = batch()["input_ids"][:2, :8]
        how = {"output_logits": True, "return_dict_in_generate": True, "do_sample": False}
        found = model.generate(ids, max_new_tokens=3, min_new_tokens=3, **how)
        with torch.no_grad():
            return torch.stack(found.logits), model(ids).logits[:, -1]

    high, low = written("high"), written("fp8")
    model, ids = make_llama().eval(), batch()["input_ids"][:2, :8]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        plain = model(ids).logits[:, -1].float()
    torch.testing.assert_close(high[0][0], plain)
    assert not torch.allclose(low[0][0], plain)
    torch.testing.assert_close(high[1], low[1], rtol=0, atol=0)
