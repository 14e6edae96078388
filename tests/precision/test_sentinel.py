"""What leaves its plan after the proof is stopped at the very step, whichever step that is."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from finetune import get_receipt
from finetune.errors import OrderError, ProofError
from finetune.precision.model.tree import Tree
from tests.conftest import batch, prepared, slow_but, step, train
from tests.house import counting_walks

LATE = 4


def build(make_llama, method: str):
    model = make_llama()
    if method == "lora":
        torch.manual_seed(3)
        model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear")).train()
    return model


def block(model, index: int = 0):
    return (model.base_model.model if hasattr(model, "peft_config") else model).model.layers[index]


def replace(model) -> None:
    attention = block(model).self_attn
    old = attention.q_proj
    attention.q_proj = nn.Linear(64, 64, bias=False).to(next(old.parameters()).dtype)


def freeze(model) -> None:
    next(p for p in model.parameters() if p.requires_grad).requires_grad_(False)


def unfreeze(model) -> None:
    next(p for p in model.parameters() if not p.requires_grad).requires_grad_(True)


def evaluate(model) -> None:
    model.eval()


def evaluate_a_part(model) -> None:
    block(model, 1).mlp.eval()


DAMAGES = {
    "evaluation mode left on": (evaluate, r"BF16 entered at optimizer step \d: 1[14] layers"),
    "a part in evaluation mode": (evaluate_a_part, r"BF16 entered at optimizer step \d: 3 layers"),
    "layer replaced": (replace, r"replaced or removed after preparation[\s\S]*0.self_attn.q_proj"),
    "frozen": (freeze, r"which parameters train[\s\S]*no longer"),
    "unfrozen": (unfreeze, r"which parameters train[\s\S]*now trainable"),
}


@pytest.mark.parametrize("late", [0, LATE])
@pytest.mark.parametrize("method", slow_but(["full"], ["full", "lora"]))
@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_stopped_at_its_step(make_llama, setup_backend, damage, method, late) -> None:
    do, message = DAMAGES[damage]
    if (damage, method) == ("unfrozen", "full"):
        model = make_llama()
        model.model.embed_tokens.requires_grad_(False)
    else:
        model = build(make_llama, method)
    accelerator, model, optimizer = prepared(model, setup_backend)
    train(accelerator, model, optimizer, late)
    assert not late or get_receipt().status == "proven"
    weights = {name: w.clone() for name, w in model.state_dict().items()}
    do(model)
    early = r"|did not run|stopped|outside" if not late else ""  # the witness may be first
    with pytest.raises(ProofError, match=message + early):
        step(accelerator, model, optimizer)
    now = model.state_dict()
    assert all(torch.equal(now[n], w) for n, w in weights.items() if n in now and "q_proj" not in n)
    assert get_receipt().status.startswith("stopped")


@pytest.mark.parametrize("damage", ["evaluation mode left on", "a part in evaluation mode"])
def test_bf16_that_may_enter_is_said_and_lowers_the_share(
    make_llama, setup_backend, damage
) -> None:
    accelerator, model, optimizer = prepared(make_llama(), setup_backend, on_unsupported="bf16")
    train(accelerator, model, optimizer, LATE)
    before = get_receipt()
    DAMAGES[damage][0](model)
    with pytest.warns(UserWarning, match="! BF16 entered at optimizer step 5"):
        step(accelerator, model, optimizer)
    step(accelerator, model, optimizer)
    receipt = get_receipt()
    assert receipt.status.startswith("not proven: BF16 entered at optimizer step")
    assert receipt.fp8_flop_share < before.fp8_flop_share
    assert sum(receipt.flop_share.values()) == pytest.approx(1)
    assert set(receipt.held["entered"].values()) == {2}


def test_evaluation_between_steps_is_no_damage(make_llama, setup_backend) -> None:
    """Also with gradients enabled, and as a gradient of inputs that no optimizer uses."""
    accelerator, model, optimizer = prepared(make_llama(), setup_backend)
    for seed in range(3):
        step(accelerator, model, optimizer, seed)
        model.eval()
        model(**batch(seed=9))
        with torch.no_grad():
            model(**batch(seed=9))
        model.train()
    receipt = get_receipt()
    assert receipt.status == "proven"
    assert receipt.held == {"steps": 3, "resting": {}, "entered": {}}


class Branches(nn.Module):
    """Two layers, of which one runs in a step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.branches = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        return self.branches[which](x).square().mean()


@pytest.mark.parametrize("order", ["001101", "011111", "000111"])
def test_layers_may_rest_whenever_they_do(setup_backend, order) -> None:
    accelerator, model, optimizer = prepared(Branches(), setup_backend)
    x = torch.randn(32, 64)
    with (
        pytest.warns(UserWarning, match="have had no gradient but zeros")
        if order[:2] == "00"
        else (nullcontext())
    ):
        for which in order:
            accelerator.backward(model(x, int(which)))
            optimizer.step()
            optimizer.zero_grad()
    receipt = get_receipt()
    assert receipt.status == "proven"
    resting = {f"branches.{i}": order.count(str(1 - i)) for i in range(2)}
    assert receipt.held["resting"] == resting
    assert receipt.fp8_flop_share == pytest.approx(1)


def test_share_follows_the_calls(setup_backend) -> None:
    """Three layers of equal FLOPs, the head in BF16, one other called in two of four steps."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b = (nn.Linear(64, 64, bias=False) for _ in range(2))
            self.head = nn.Linear(64, 64, bias=False)

        def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
            x = self.a(x.requires_grad_())
            return self.head(self.b(x) if both else x).square().mean()

    accelerator, model, optimizer = prepared(Model(), setup_backend, keep=["head"])
    x = torch.randn(32, 64)
    shares = []
    for both in (True, True, False, False):
        accelerator.backward(model(x.clone(), both))
        optimizer.step()
        optimizer.zero_grad()
        shares.append(get_receipt().fp8_flop_share)
    assert shares == pytest.approx([2 / 3, 2 / 3, 5 / 8, 6 / 10])


def test_adapters_that_are_merged_in_mid_run(make_llama, setup_backend) -> None:
    """Checkpointing keeps the loss's gradient alive, so that nothing else fails."""
    torch.manual_seed(3)
    model = get_peft_model(make_llama(), LoraConfig(r=8, target_modules=["q_proj"])).train()
    model.enable_input_require_grads()
    accelerator, model, optimizer = prepared(model, setup_backend)
    train(accelerator, model, optimizer, LATE)
    model.merge_adapter()
    message = r"2 adapters are merged into their base[\s\S]*0.self_attn.q_proj"
    with pytest.raises(ProofError, match=message):
        step(accelerator, model, optimizer)
    assert get_receipt().status.startswith("stopped")


def test_adapters_merged_between_steps_are_no_damage(make_llama, setup_backend) -> None:
    accelerator, model, optimizer = prepared(build(make_llama, "lora"), setup_backend)
    for seed in range(LATE):
        step(accelerator, model, optimizer, seed)
        model.merge_adapter()
        model.unmerge_adapter()
    assert get_receipt().status == "proven"


def test_prepared_again_after_a_change(make_llama, setup_backend) -> None:
    """The way to unfreeze in the middle of a run."""
    model = make_llama()
    model.model.layers[0].requires_grad_(False)
    accelerator, model, optimizer = prepared(model, setup_backend)
    train(accelerator, model, optimizer, 3)
    model.requires_grad_(True)
    model._is_accelerate_prepared = False
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    train(accelerator, model, optimizer, 3)
    receipt = get_receipt()
    assert receipt.status == "proven"
    assert receipt.trainable["before"] == sum(p.numel() for p in model.parameters())


def tie(model) -> None:
    mlp = block(model).mlp
    mlp.up_proj.lora_A.default.weight = mlp.gate_proj.lora_A.default.weight


def wrap(model) -> None:
    block(model).mlp = nn.Sequential(block(model).mlp)


def append(model) -> None:
    block(model).mlp.add_module("another", nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)))


def remove(model) -> None:
    del block(model).mlp.down_proj


@pytest.mark.parametrize("change", [wrap, append, remove, tie, freeze, None])
def test_a_tree_answers_as_its_model_does_after_a_change(make_llama, setup_backend, change) -> None:
    model = build(make_llama, "lora")
    tree = Tree(model)
    tree.modules()
    prepared(model, setup_backend, frozen="fp8")  # which replaces classes and weights
    if change is not None:
        change(model)
    for name in ("named_modules", "named_parameters"):
        assert all(
            ours[0] == theirs[0] and ours[1] is theirs[1]
            for ours, theirs in zip(getattr(tree, name)(), getattr(model, name)(), strict=True)
        )


def test_a_model_is_walked_over_once_until_it_changes(make_llama, setup_backend) -> None:
    model = build(make_llama, "lora")
    with counting_walks(model) as in_prepare:
        accelerator, model, optimizer = prepared(model, setup_backend, frozen="fp8")
    with counting_walks(model) as in_steps:
        train(accelerator, model, optimizer)
    assert in_prepare["named_modules"] == 1  # Accelerate has walks of other kinds
    assert not in_steps


@pytest.mark.parametrize("proven", [False, True])
def test_adapters_that_do_not_train_come_and_go(make_llama, setup_backend, proven) -> None:
    """A teacher's, which TRL's SDFT and SDPO add when training begins, or one that is weighted."""
    accelerator, model, optimizer = prepared(build(make_llama, "lora"), setup_backend, frozen="fp8")
    train(accelerator, model, optimizer, 2 * proven)
    model.add_adapter("teacher", LoraConfig(r=8, target_modules="all-linear"))
    for seed in range(2):
        with torch.no_grad():
            model.set_adapter("teacher")
            model(**batch(seed=seed))
            model.set_adapter("default")
        step(accelerator, model, optimizer, seed)
    model.add_weighted_adapter(["default", "teacher"], [0.5, 0.5], "both", combination_type="cat")
    step(accelerator, model, optimizer)
    model.delete_adapter("teacher")
    step(accelerator, model, optimizer)
    receipt = get_receipt()
    assert receipt.status == "proven"
    assert {row.fprop for row in receipt.layers if row.role == "base"} == {"fp8"}


@pytest.mark.parametrize("trains", ["the new one", "the deleted one"])
def test_adapters_that_train_do_not(make_llama, setup_backend, trains) -> None:
    accelerator, model, optimizer = prepared(build(make_llama, "lora"), setup_backend)
    step(accelerator, model, optimizer)
    model.add_adapter("other", LoraConfig(r=8, target_modules="all-linear"))
    model.set_adapter("other")
    if trains == "the deleted one":
        model.delete_adapter("default")
    said = "linear layers were added|it no longer uses"
    with pytest.raises((ProofError, OrderError), match=said):
        step(accelerator, model, optimizer)
