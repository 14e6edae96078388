"""What is not what was asked is stopped in its first steps, with the layers named."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

from finetune import (
    get_receipt,
    setup_fp8_mixed_precision_training,
    teardown_fp8_mixed_precision_training,
)
from finetune.errors import OrderError, PrecisionError, ProofError
from finetune.precision import convert, planner
from finetune.precision.engines.base import Fp8Mixin
from finetune.precision.proof import movement
from finetune.precision.proof.row import changed_numbers
from finetune.precision.proof.witness import ATTENTION, Witness
from finetune.precision.settings import PrecisionConfig
from finetune.training.helper.references import PRECOMPUTES, References
from finetune.training.helper.replacing import Patches
from tests.conftest import batch, prepared, slow_but, step, train


def test_trainable_weight_outside_the_optimizer(make_llama, setup_backend) -> None:
    model = make_llama()
    some = [p for n, p in model.named_parameters() if "mlp" not in n]
    accelerator, model, optimizer = prepared(model, setup_backend, parameters=some)
    step(accelerator, model, optimizer)  # another optimizer might own them
    with pytest.raises(ProofError, match=r"not in the optimizer[\s\S]*mlp.gate_proj.weight"):
        step(accelerator, model, optimizer)


def test_frozen_weight_that_became_trainable(make_llama, setup_backend) -> None:
    model = make_llama()
    frozen = model.model.layers[1].mlp.up_proj.weight
    frozen.requires_grad_(False)
    accelerator, model, optimizer = prepared(model, setup_backend)
    frozen.requires_grad_(True)
    with pytest.raises(ProofError, match=r"which parameters train[\s\S]*1.mlp.up_proj.weight"):
        step(accelerator, model, optimizer)


def test_adapters_attached_after_preparation(make_llama, setup_backend) -> None:
    from peft import LoraConfig, get_peft_model

    accelerator, model, optimizer = prepared(make_llama(), setup_backend)
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ProofError, match=r"added after preparation[\s\S]*lora_A[\s\S]*attach"):
        step(accelerator, adapted, optimizer)


@pytest.mark.parametrize("damage", ["unused", "zeros"])
def test_weights_without_a_gradient_are_told(make_llama, setup_backend, damage) -> None:
    """A layer that does not run, and what underflow looks like; decay alone is no training."""
    model = make_llama()
    name, count = "mlp.up_proj", model.model.layers[0].mlp.up_proj.weight.numel()
    if damage == "unused":
        model.unused = nn.Linear(32, 32)
        name, count = "unused", 32 * 33
    else:
        model.model.layers[0].mlp.up_proj.weight.register_hook(torch.zeros_like)
    accelerator, model, optimizer = prepared(model, setup_backend)
    step(accelerator, model, optimizer)
    with pytest.warns(UserWarning, match=rf"{count:,} trainable parameters have had no.*{name}"):
        step(accelerator, model, optimizer)
    step(accelerator, model, optimizer)
    receipt = get_receipt()
    assert receipt.trainable["without_gradient"] == count
    assert receipt.trainable["moved"] == receipt.trainable["after"] - count
    assert f"! {count:,} of {receipt.trainable['after']:,} trainable parameters" in str(receipt)


class Experts(nn.Module):
    """Two experts as linear layers; the first `few` tokens go to the second."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(64, 64), nn.Linear(64, 64)])

    def forward(self, x: torch.Tensor, few: int) -> torch.Tensor:
        return self.experts[0](x[few:]).square().sum() + self.experts[1](x[:few]).square().sum()


@pytest.mark.filterwarnings("ignore:[0-9,]+ trainable parameters have had no:UserWarning")
@pytest.mark.parametrize("tokens", [(0, 0, 0, 3, 3), (3, 0, 0, 3, 3)])
@pytest.mark.parametrize("adapters", [False, True])
def test_expert_that_is_called_without_tokens_rests(tokens, adapters, setup_backend) -> None:
    from peft import LoraConfig, get_peft_model

    model: nn.Module = Experts()
    if adapters:
        model = get_peft_model(model, LoraConfig(target_modules=["0", "1"]))  # pyright: ignore
    accelerator = setup_backend("emulated", **({"frozen": "fp8"} if adapters else {}))
    trainable = [p for p in model.parameters() if p.requires_grad]
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(trainable, lr=1e-3))
    for few in tokens:
        accelerator.backward(model(torch.randn(16, 64), few))
        optimizer.step()
        optimizer.zero_grad()
    receipt = get_receipt()
    assert receipt.status == "proven"
    assert set(receipt.held["resting"].values()) == {tokens.count(0)}


def test_steps_without_learning_rate_prove_nothing(make_llama, setup_backend) -> None:
    accelerator, model, optimizer = prepared(make_llama(), setup_backend, lr=0.0)
    train(accelerator, model, optimizer, 4)
    assert get_receipt().status == "not proven: weights have not been seen to move"
    for group in optimizer.param_groups:
        group["lr"] = 1e-2
    step(accelerator, model, optimizer)
    assert get_receipt().status != "proven"
    step(accelerator, model, optimizer)
    assert get_receipt().status == "proven"


def test_bf16_weights_below_resolution_are_told(make_llama, setup_backend) -> None:
    """An update of 1e-5 is lost beside most weights in BF16, and beside each norm's 1.0."""
    model = make_llama().bfloat16()
    accelerator, model, optimizer = prepared(model, setup_backend, lr=1e-5)
    optimizer.optimizer.param_groups[0]["weight_decay"] = 0.0
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    step(accelerator, model, optimizer)
    with pytest.warns(
        UserWarning, match=r"[0-9]\.\d% of the numbers in BF16 matrices have changed"
    ):
        step(accelerator, model, optimizer, seed=1)
    receipt = get_receipt()
    norms = sum(p.numel() for n, p in model.named_parameters() if "norm" in n)
    assert receipt.status == "proven"
    assert receipt.trainable["below_resolution"] == norms
    assert receipt.trainable["moved"] == receipt.trainable["after"] - norms
    moved = sum(int((before[n] != p).sum()) for n, p in model.named_parameters())
    assert changed_numbers(receipt.movement) == (moved, receipt.trainable["after"])
    groups = {group["kind"]: group for group in receipt.movement["early"]["groups"]}
    assert groups["vectors"]["changed"] == 0 < groups["matrices"]["changed"] < moved + 1
    assert f"{moved:,} of {receipt.trainable['after']:,} trainable parameters changed" in str(
        receipt
    )


def test_large_tensors_are_sampled_in_all_columns(monkeypatch) -> None:
    """Every 256th number of rows of 4096 would be 16 columns alone."""
    monkeypatch.setattr(movement, "SAMPLE", 4096)
    columns = torch.arange(4096.0).expand(256, 4096)
    assert len(movement.sample(columns).unique()) > 4000
    model = nn.Linear(4096, 256, bias=False)
    watch = movement.Movement(model, {}, pytest.fail)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch.before_step(optimizer, dict(model.named_parameters()))
    with torch.no_grad():
        model.weight[:, :1024] += 1
    for rate in (0.0, 0.1, 0.2, 0.1):  # warm-up is over at the fourth
        assert not watch.described().get("early")
        optimizer.param_groups[0]["lr"] = rate
        watch.count_step(optimizer)
    assert watch.described()["early"]["steps"] == 4
    assert changed_numbers(watch.described()) == (pytest.approx(2**18, rel=0.05), 2**20)


def test_layer_switched_back_to_high_precision(make_llama, setup_backend) -> None:
    accelerator, model, optimizer = prepared(make_llama(), setup_backend)
    layer = model.model.layers[0].mlp.down_proj
    layer.__class__ = nn.Linear
    with pytest.raises(ProofError, match=r"did not run[\s\S]*0.mlp.down_proj fprop=bf16"):
        step(accelerator, model, optimizer)


def test_operands_that_were_not_rounded_are_not_fp8(make_llama, setup_backend, monkeypatch) -> None:
    """An emulated GEMM multiplies in float32: only its operands show in which precision."""
    from finetune.precision.numbers import scaling

    accelerator, model, optimizer = prepared(make_llama(), setup_backend)
    monkeypatch.setattr(scaling, "to_codes", lambda x, *_, **__: x)
    with pytest.raises(ProofError, match=r"did not run[\s\S]*fprop=fp32"):
        step(accelerator, model, optimizer)


def test_a_layer_that_answers_without_multiplying(make_llama, setup_backend) -> None:
    """As one whose answer comes from a cache."""
    accelerator, model, optimizer = prepared(make_llama(), setup_backend)
    layer = model.model.layers[0].mlp.down_proj
    layer.forward = lambda x: x[..., :1].expand(*x.shape[:-1], layer.out_features)
    with pytest.raises(ProofError, match=r"0\.mlp\.down_proj was called and multiplied nothing"):
        step(accelerator, model, optimizer)


def test_adapters_around_a_model_in_evaluation_mode(make_llama, setup_backend) -> None:
    """As CorDA's preprocessing leaves it: PEFT's wrapper is in training mode, and nothing else."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(make_llama().eval(), LoraConfig(target_modules=["q_proj"]))
    assert model.training
    accelerator, model, optimizer = prepared(model, setup_backend)
    with pytest.raises(ProofError, match=r"did not run[\s\S]*model\.train\(\) before the step"):
        step(accelerator, model, optimizer)


def test_fp8_disabled_in_the_step(make_llama, setup_backend) -> None:
    accelerator, model, optimizer = prepared(make_llama(), setup_backend)
    with pytest.raises(ProofError, match=r"0\.0% ran in FP8"), convert.disabled(model):
        step(accelerator, model, optimizer)


def test_trainer_built_before_the_helper(make_llama, tmp_path) -> None:
    from datasets import Dataset
    from transformers import Trainer, TrainingArguments

    rows = Dataset.from_list([{k: v[0].tolist() for k, v in batch(1).items()}] * 4)
    args = TrainingArguments(str(tmp_path), max_steps=1, report_to="none", use_cpu=True)
    trainer = Trainer(model=make_llama(), args=args, train_dataset=rows)
    setup_fp8_mixed_precision_training("emulated", emulation="allow", cpu=True)
    with pytest.raises(OrderError, match="built before FP8 was set up"):
        trainer.train()


@pytest.mark.parametrize("flag", ["is_loaded_in_4bit", "is_loaded_in_8bit"])
def test_quantized_model_is_refused(make_llama, setup_backend, flag) -> None:
    model = make_llama()
    setattr(model, flag, True)
    accelerator = setup_backend("emulated")
    with pytest.raises(PrecisionError, match=r"storage[\s\S]*compute"):
        accelerator.prepare(model)


def test_fp8_storage_is_refused(make_llama, setup_backend) -> None:
    model = make_llama().requires_grad_(False)
    layer = model.model.layers[0].mlp.up_proj
    layer.weight.data = layer.weight.data.to(torch.float8_e4m3fn)
    with pytest.raises(PrecisionError, match=r"quantized[\s\S]*mlp.up_proj"):
        setup_backend("emulated").prepare(model)


def test_fp16_and_doubled_recipes_are_refused(setup_backend) -> None:
    from accelerate import Accelerator
    from accelerate.utils import AORecipeKwargs

    setup_backend("emulated")
    with pytest.raises(PrecisionError, match="asks for FP16"):
        Accelerator(mixed_precision="fp16", cpu=True)
    with pytest.raises(PrecisionError, match="set up twice"):
        Accelerator(cpu=True, kwargs_handlers=[AORecipeKwargs()])


def test_no_gpu_and_no_emulation_is_an_error() -> None:
    with pytest.raises(PrecisionError, match="emulation='allow'"):
        setup_fp8_mixed_precision_training()


@pytest.mark.usefixtures("imported")
def test_fallback_is_loud_and_stands_in_the_receipt(make_llama) -> None:
    with pytest.warns(UserWarning, match="FP8 was requested, BF16 will run"):
        accelerator = setup_fp8_mixed_precision_training(on_unsupported="bf16", cpu=True)
    model = make_llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    train(accelerator, model, optimizer)
    receipt = get_receipt()
    lines = str(receipt).splitlines()
    assert lines[0] == receipt.headline
    assert lines[1].startswith("! FP8 was requested, BF16 will run")
    assert any(line.startswith("layers ") for line in lines)
    precision = receipt.precision
    assert precision["asked"] == "fp8"
    assert precision["ran"] == "bf16"
    assert "BF16 will run" in precision["fallback"]


def patches_of_any_script() -> list[str]:
    """Without those of TRL's trainers, which are patched where a script has loaded them."""
    names = get_receipt().environment["patches"]
    return [name for name in names if not name.endswith(PRECOMPUTES)]


def test_a_script_that_has_no_trainers_has_none_patched(monkeypatch) -> None:
    monkeypatch.delitem(sys.modules, "transformers.trainer", raising=False)
    patches = Patches()
    References(lambda: None, lambda _: pytest.fail("nothing trains")).patch_trainers(patches)
    assert patches.names == []


def test_teardown_gives_everything_back(make_llama, setup_backend) -> None:
    from accelerate import Accelerator
    from transformers import Trainer

    def patched_by_us():
        return Accelerator.__init__, Accelerator.prepare, Trainer.train, torch.autograd.backward

    before = patched_by_us()
    model = make_llama()
    accelerator = setup_backend("emulated")
    assert patches_of_any_script() == [
        "accelerate.accelerator.Accelerator.__init__",
        "accelerate.accelerator.Accelerator.prepare",
        "accelerate.accelerator.Accelerator.prepare_model",
        "accelerate.accelerator.Accelerator.clip_grad_norm_",
        "transformers.trainer.Trainer._load_from_checkpoint",
        "transformers.trainer.Trainer._load_best_model",
        "transformers.trainer.Trainer._save_scaler",
        "transformers.trainer.Trainer._load_scaler",
        "transformers.trainer.Trainer.train",
    ]
    model = accelerator.prepare(model)
    model(**batch())  # the witness waits for a backward
    assert any(isinstance(m, Fp8Mixin) for m in model.modules())
    teardown_fp8_mixed_precision_training()
    assert patched_by_us() == before
    assert not any(isinstance(m, Fp8Mixin) for m in model.modules())
    with pytest.raises(OrderError, match="no receipt"):
        get_receipt()
    teardown_fp8_mixed_precision_training()  # harmless


def test_second_setup_replaces_the_first(make_llama, setup_backend) -> None:
    first = make_llama()
    setup_backend("emulated", scaling="tensorwise").prepare(first)
    second = make_llama()
    setup_backend("torchao", scaling="rowwise").prepare(second)
    assert not any(isinstance(m, Fp8Mixin) for m in first.modules())
    assert get_receipt().precision["scaling"] == "rowwise"
    patched = patches_of_any_script()
    assert len(patched) == len(set(patched)) == 9, "each once"


def test_bf16_training_after_fp8_in_one_process(make_llama, setup_backend) -> None:
    """A notebook: FP8, teardown, then BF16 on the same model."""
    from accelerate import Accelerator

    accelerator, model, optimizer = prepared(make_llama(), setup_backend)
    step(accelerator, model, optimizer)
    teardown_fp8_mixed_precision_training()
    plain = planner.plan(model, PrecisionConfig(compute="bf16"))
    witness = Witness(model, plain)
    with witness.watching():
        accelerator = Accelerator(mixed_precision="bf16", cpu=True)
        accelerator.backward(model(**batch()).loss)
    witness.close()
    assert {precision for _, _, precision in witness.seen} <= {"bf16", "fp32"}


@pytest.mark.parametrize("tokens", [64, 24])
def test_witness_counts_three_gemms_a_layer(make_llama, tokens) -> None:
    """Also where tokens equal outputs (64), so that shapes alone cannot tell dgrad from wgrad."""
    model = make_llama()
    plain = planner.plan(model, PrecisionConfig(compute="bf16"))
    witness = Witness(model, plain)
    with witness.watching():
        model(**batch(1, tokens)).loss.backward()
    witness.close()
    counted = {(name, gemm): seen.calls for (name, gemm, _), seen in witness.seen.items()}
    for layer in plain.layers:
        for gemm in ("fprop", "dgrad", "wgrad"):
            assert counted[layer.name, gemm] == 1
    n, k = plain.layers[0].shape
    assert witness.seen[plain.layers[0].name, "fprop", "fp32"].flops == 2 * tokens * n * k
    c = model.config  # fused attention: two matmuls of a head forward, five backward
    scores = 2 * c.num_hidden_layers * c.num_attention_heads * tokens**2 * c.head_dim
    attention = {gemm: s.flops for (name, gemm, _), s in witness.seen.items() if name == ATTENTION}
    assert sorted(attention.values()) == [2 * scores, 5 * scores]


@pytest.mark.parametrize("words", [272, 33_000])
def test_products_of_a_fused_loss_are_the_heads(make_llama, words) -> None:
    """It multiplies slabs of 16,384 words, of which no size tells that they are the head's."""
    from trl.trainer.utils import add_fused_lm_head

    model = make_llama(vocab_size=words)
    add_fused_lm_head(model)
    plain = planner.plan(model, PrecisionConfig(compute="bf16"))
    convert.apply(model, plain)
    witness = Witness(model, plain)
    ids = batch(1, 24)["input_ids"]
    with witness.watching():
        model(input_ids=ids, labels=ids, fused_lm_head=True).loss.backward()
    witness.close()
    flops = {(name, gemm): seen.flops for (name, gemm, _), seen in witness.seen.items()}
    (head,) = [layer for layer in plain.layers if layer.role == "head"]
    one = 2 * 23 * words * 64  # the last token has no label
    seen = {gemm: count for (name, gemm), count in flops.items() if name == head.name}
    assert seen == {"fprop": 2 * one, "dgrad": one, "wgrad": one}, "backward has the logits again"
    assert {name for name, _ in flops} == {ATTENTION, *(layer.name for layer in plain.layers)}


def test_other_precisions_are_proven_too(make_llama) -> None:
    """FP32 asked of BF16 weights would run in BF16: that is an error as well."""
    from accelerate import Accelerator

    from finetune.training.helper import session

    def run(model):
        session.install(PrecisionConfig(compute="fp32"))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        accelerator = Accelerator(cpu=True)
        model, optimizer = accelerator.prepare(model, optimizer)
        train(accelerator, model, optimizer)

    run(make_llama())
    assert get_receipt().precision["ran"] == "fp32"
    with pytest.raises(ProofError, match=r"FP32 was requested and did not run[\s\S]*model.dtype"):
        run(make_llama().bfloat16())


def test_backward_of_something_else_is_not_taken_for_the_models(make_llama, setup_backend) -> None:
    accelerator, model, optimizer = prepared(make_llama(), setup_backend)
    loss = model(**batch()).loss
    other = nn.Linear(4, 4)
    other(torch.randn(2, 4)).sum().backward()
    assert not get_receipt().layers, "still waiting"
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    step(accelerator, model, optimizer)
    receipt = get_receipt()
    assert receipt.status == "proven"
    assert {row.wgrad for row in receipt.layers if row.role == "base"} == {"fp8"}


def test_gradients_by_autograd_grad_are_seen(make_llama, setup_backend) -> None:
    _, model, optimizer = prepared(make_llama(), setup_backend)
    parameters = list(model.parameters())
    for seed in range(2):
        loss = model(**batch(seed=seed)).loss
        for p, g in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            p.grad = g
        optimizer.step()
    receipt = get_receipt()
    assert receipt.status == "proven"
    assert {row.wgrad for row in receipt.layers if row.role == "base"} == {"fp8"}


@pytest.mark.slow
def test_models_are_not_kept_alive(make_llama, setup_backend) -> None:
    """A loop that trains model after model under one setup does not fill the memory."""
    import gc
    import weakref

    accelerator = setup_backend("emulated")
    alive = []
    for _ in range(3):
        model = make_llama()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, optimizer = accelerator.prepare(model, optimizer)
        train(accelerator, model, optimizer)
        alive.append(weakref.ref(model))
        accelerator.free_memory()
        del model, optimizer
    gc.collect()
    assert [ref() is not None for ref in alive] == [False, False, True], "the receipt's is kept"


def test_whole_model_compile_is_refused(make_llama, setup_backend) -> None:
    from accelerate import Accelerator

    setup_backend("emulated")
    accelerator = Accelerator(cpu=True, dynamo_backend="inductor")
    with pytest.raises(PrecisionError, match="compile='on'"):
        accelerator.prepare(make_llama())


@pytest.mark.parametrize("frozen", slow_but(["fp8"], ["fp8", "bf16"]))
def test_reentrant_checkpointing_is_witnessed_whole(make_llama, setup_backend, frozen) -> None:
    """Its backwards run inside another: the receipt is that of the other kind of checkpointing."""
    from peft import LoraConfig, get_peft_model

    rows = []
    for reentrant in (False, True):
        torch.manual_seed(3)
        model = get_peft_model(make_llama(), LoraConfig(r=8, target_modules="all-linear")).train()
        model.enable_input_require_grads()
        model.activation_checkpointing_enable({"use_reentrant": reentrant})
        accelerator, model, optimizer = prepared(
            model, setup_backend, scaling="rowwise", frozen=frozen
        )
        train(accelerator, model, optimizer)
        receipt = get_receipt()
        assert receipt.status == "proven"
        rows.append([(r.name, r.fprop, r.dgrad, r.wgrad) for r in receipt.layers])
    assert rows[0] == rows[1]
    assert all(wgrad == "bf16" for name, _, _, wgrad in rows[1] if "lora_" in name)


def test_a_trainer_may_train_twice(make_llama, setup_backend, tmp_path) -> None:
    from transformers import Trainer, TrainingArguments

    setup_backend("emulated")
    ids = batch()["input_ids"].tolist()
    args = TrainingArguments(
        output_dir=str(tmp_path), max_steps=2, use_cpu=True, report_to="none", disable_tqdm=True,
        save_strategy="no", learning_rate=1e-2, bf16=True,
    )  # fmt: skip
    rows = [{"input_ids": x, "labels": x} for x in ids * 4]
    trainer = Trainer(model=make_llama(), args=args, train_dataset=rows)
    trainer.train()
    trainer.train()
    assert get_receipt().status == "proven"


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_a_checkpoint_recomputes_is_not_the_gradient_of_a_layer(
    make_llama, setup_backend, reentrant
) -> None:
    """LoHa multiplies outside of any linear layer, and again while `down_proj` runs backward."""
    from peft import LoHaConfig, get_peft_model

    torch.manual_seed(3)
    model = get_peft_model(make_llama(), LoHaConfig(r=4, alpha=4, target_modules=["q_proj"]))
    model.train().enable_input_require_grads()
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    trained = [p for p in model.parameters() if p.requires_grad]
    accelerator, model, optimizer = prepared(model, setup_backend, parameters=trained)
    train(accelerator, model, optimizer)
    receipt = get_receipt()
    assert receipt.status == "proven"
    assert {row.wgrad for row in receipt.layers if row.role == "base"} == {"none"}
