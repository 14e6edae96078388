"""Stock trainers of TRL and Transformers under the helper: proven, whatever they compare with."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch

from finetune import get_receipt
from finetune.precision import convert
from finetune.precision.engines.base import Fp8Mixin
from finetune.precision.planner import plan
from finetune.precision.settings import PrecisionConfig
from finetune.precision.stored.frozen import FrozenMixin
from finetune.precision.stored.linear import store
from finetune.precision.stored.trained import TrainedMixin
from finetune.training.helper.references import References
from tests.benchmarks import stock_trainers, trainers
from tests.benchmarks.stock_trainers import METHODS, TRAINERS, Workshop
from tests.conftest import batch, slow_but

pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing:FutureWarning")  # TRL 1.16

QUICK = [("DPO", "frozen")]
SYNCHRONIZED = "DPO, synchronized"
ROWS = [(n, m) for n in TRAINERS for m in METHODS if n != SYNCHRONIZED or m == "full"]
SLOW = [
    ("DPO", "full"),
    (SYNCHRONIZED, "full"),
    ("GRPO", "LoRA"),
    ("SFT, images", "LoRA"),
    *((f"Trainer, {of}", "LoRA") for of in ("seq2seq (T5)", "vision (ViT)")),
]
REST = [row for row in ROWS if row not in QUICK + SLOW]
"""Trainers that are near one of these, or whose recipe is trained in test_methods, test_rewards."""


@pytest.fixture(scope="module")
def shop(tmp_path_factory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("shop"))


@pytest.mark.parametrize(
    ("name", "method"), [*slow_but(QUICK, QUICK + SLOW), *slow_but([], REST, pytest.mark.long)]
)
def test_stock_trainer_is_proven(shop, name, method) -> None:
    # By row, log-probabilities do not depend on what else is in the batch.
    ours = trainers.train(shop, name, method, "emulated", scaling="rowwise")
    assert not ours.error
    receipt = ours.receipt
    assert receipt is not None
    assert receipt.status == "proven"
    assert receipt.fp8_flop_share > 0.3
    counts = receipt.trainable
    assert counts["before"] == counts["after"] == counts["in_optimizer"] == counts["moved"]
    plain = trainers.train(shop, name, method, "bf16")
    assert sum(ours.losses) == pytest.approx(sum(plain.losses), rel=0.01, abs=0.01)
    if name.startswith("DPO"):
        assert ours.losses[0] == pytest.approx(math.log(2), abs=5e-5), "policy equals reference"
        own = method != "full"  # the policy without its adapters is its reference
        assert own or receipt.precision["references"], "the receipt says how it was computed"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # `trl.experimental` says that it is
@pytest.mark.parametrize(("kind", "method"), [("SDFT", "frozen"), ("DPO", "LoRA")])
def test_another_adapter_of_the_policy_is_its_teacher_or_reference(shop, kind, method) -> None:
    """TRL adds it: to an adapter that is trained on, or when training begins; it checkpoints."""
    with trainers.precision_of("emulated", method, scaling="rowwise"):
        if kind == "SDFT":
            from trl.experimental.sdft import SDFTConfig, SDFTTrainer

            settings = stock_trainers.GENERATION | {"teacher_model_kind": "ema"}
            args = SDFTConfig(str(shop.folder), **stock_trainers.COMMON, **settings)
            trainer = SDFTTrainer(
                model=shop.policy(),
                args=args,
                train_dataset=shop.rows(
                    prompt=stock_trainers.text, privileged_context=stock_trainers.text
                ),
                processing_class=shop.tokenizer,
                peft_config=stock_trainers.adapters(method),
            )
        else:
            from peft import get_peft_model

            torch.manual_seed(0)
            given = get_peft_model(shop.policy(), stock_trainers.adapters(method))
            trainer = stock_trainers.dpo(shop, "full", model=given)
        trainer.train()
        assert trainer.args.gradient_checkpointing
        assert len(trainer.model.peft_config) == 2
        receipt = get_receipt()
    assert receipt.status == "proven"
    if kind == "DPO":
        losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
        assert losses[0] == pytest.approx(math.log(2), abs=5e-5)


@pytest.mark.slow
def test_equal_rewards_are_no_proof_and_no_error(shop) -> None:
    """GRPO's advantage is zero where all rewards of a group are equal, and so is every gradient."""
    rewards = iter([1.0] * 3 * 4 + [float(i) for i in range(20)])

    def reward(completions: list[str], **_: Any) -> list[float | None]:
        return [next(rewards) for _ in completions]

    seen = []
    with trainers.precision_of("emulated", "full"):
        trainer = stock_trainers.grpo(shop, "full", reward_funcs=reward)
        plain = trainer.training_step

        def training_step(*args, **kwargs):
            seen.append(get_receipt().status)
            return plain(*args, **kwargs)

        trainer.training_step = training_step
        trainer.args.max_steps = 6
        trainer.train()
        assert get_receipt().status == "proven"
    assert seen[3] == "not proven: weights have not been seen to move; all gradients were zero"
    assert seen[4].endswith("one optimizer step was seen, and it takes 2")


@pytest.mark.slow
def test_a_reference_computes_as_the_policy_does(shop) -> None:
    """In FP8 while the policy trains, in high precision while that is evaluated."""
    with trainers.precision_of("emulated", "full"):
        trainer = stock_trainers.dpo(shop, "full", given=True)
        trainer.train()
        reference, inputs = trainer.ref_model, {"input_ids": batch()["input_ids"]}
        assert not reference.training
        layers = [m for m in reference.modules() if isinstance(m, Fp8Mixin)]
        assert len(layers) == 14
        with torch.no_grad():
            trainer.model.train()
            low = reference(**inputs).logits
            trainer.model.eval()
            high = reference(**inputs).logits
            trainer.model.train()
            assert torch.equal(reference(**inputs).logits, low)
        assert not torch.equal(low, high)
        assert get_receipt().precision["references"] == [
            "LlamaForCausalLM: in the precision of the policy, FP8 in training"
        ]


@pytest.mark.parametrize("hardware", [True, False])  # CPUs have `torch._scaled_mm`, too
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("trains", [False, True])
def test_a_reference_multiplies_to_the_bits_of_stored_layers(
    make_llama, dtype, hardware, trains
) -> None:
    """A given reference keeps its weights; the policy's are codes, and torchao is set."""
    held: Any = {"fp8_params": True} if trains else {"frozen": "fp8", "power_of_two_scales": False}
    precision = PrecisionConfig(
        compute="fp8", backend="torchao", scaling="rowwise", emulation="allow", **held
    )
    policy = make_llama().to(dtype).requires_grad_(trains)
    reference = copy.deepcopy(policy)
    for module in list(policy.model.modules()) * (not trains):
        if isinstance(module, torch.nn.Linear):
            store(module)
    convert.apply(policy, plan(policy, precision), hardware=hardware)
    same = References.precision_of(precision, hardware=hardware)
    convert.apply(reference, plan(reference, same), hardware=hardware)
    with torch.no_grad():  # on a CPU autocast reaches the inside of `torch._scaled_mm`
        for one, other in zip(
            policy.model.layers[0].modules(), reference.model.layers[0].modules(), strict=True
        ):
            if isinstance(one, Fp8Mixin):
                rows = torch.randn(8, one.weight.shape[1], dtype=torch.bfloat16)
                assert isinstance(one, TrainedMixin if trains else FrozenMixin)
                assert not isinstance(other, TrainedMixin | FrozenMixin)
                assert torch.equal(one.train()(rows), other.train()(rows))


def test_a_teacher_beside_its_student(make_llama, setup_backend) -> None:
    """Both prepared, the teacher with gradients enabled in one step: it has no optimizer."""
    accelerator = setup_backend("emulated")
    student, teacher = make_llama(), make_llama(seed=1)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2)
    student, teacher, optimizer = accelerator.prepare(student, teacher, optimizer)
    for seed in range(2):
        inputs = batch(seed=seed)
        target = teacher(**inputs).logits.detach() if seed else None
        with torch.no_grad():
            target = teacher(**inputs).logits if target is None else target
        loss = (student(**inputs).logits - target).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    receipt = get_receipt()
    assert receipt.status == "proven"
    assert {row.calls["fprop"] for row in receipt.layers if row.role in ("base", "head")} == {1}


@pytest.mark.slow
def test_a_reward_model_stays_in_high_precision(shop) -> None:
    ours = trainers.train(shop, "GRPO, reward model", "full", "emulated")
    assert ours.receipt is not None
    assert ours.receipt.precision["references"] == [
        "LlamaForSequenceClassification, another model: evaluated in high precision"
    ]
