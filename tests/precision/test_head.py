"""The output head in TRL's fused loss: TRL's results with fewer products; in FP8 its layer's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from finetune import load_recipe, train
from finetune.errors import PlanError
from finetune.precision import convert
from finetune.precision.cases import head
from finetune.precision.engines.observers import Owner
from finetune.precision.numbers.weights import multiply
from finetune.precision.planner import plan
from finetune.precision.settings import PrecisionConfig
from finetune.training.model import meta_model
from finetune.training.run.preflight import check_settings

FP8_HEAD = {"compute": "fp8", "backend": "emulated", "emulation": "exact", "frozen": "fp8"}
KEPT = ("log_probs", "entropy", "is_top1", "mean_logits", "log_sum_sq_probs")


@pytest.fixture
def make_head(make_llama, monkeypatch):
    """A converted frozen model with TRL's fused loss, in tiles of 16 tokens and 64 words."""
    from trl.trainer.utils import add_fused_lm_head

    monkeypatch.setattr(head, "TOKENS", 16)
    monkeypatch.setattr(head, "WORDS", 64)  # of 272: the last slab has 16

    def make(*, hardware: bool, bias: bool = False, **settings):
        model = make_llama().to(torch.bfloat16).requires_grad_(False)
        if bias:
            values = torch.linspace(-1, 1, 272, dtype=torch.bfloat16)
            model.lm_head.bias = torch.nn.Parameter(values)
        chosen = {"scaling": "rowwise", "map": {"output": "fp8"}} | FP8_HEAD | settings
        if hardware:
            chosen["backend"] = "torchao"
        precision = PrecisionConfig.model_validate(chosen)
        conversion = convert.apply(model, plan(model, precision), hardware=hardware)
        add_fused_lm_head(model, outputs=KEPT)
        return model, conversion

    return make


def tokens(model, count: int = 40) -> tuple[Any, Tensor]:
    """Hidden states as the decoder gives them, and labels."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(1, count, 64, generator=generator).to(torch.bfloat16).requires_grad_()
    labels = torch.randint(0, 272, (1, count), generator=generator)
    model.model.forward = lambda *_, **__: type("Out", (), {"last_hidden_state": x})()
    return x, labels


ENGINES = pytest.mark.parametrize("hardware", [False, True], ids=["emulated", "scaled_mm"])


@ENGINES
@pytest.mark.parametrize("scaling", ["rowwise", "tensorwise"])
@pytest.mark.parametrize("bias", [False, True])
def test_its_loss_and_gradient_are_those_of_the_layers_products(
    make_head, hardware, scaling, bias
) -> None:
    model, _ = make_head(hardware=hardware, scaling=scaling, bias=bias)
    x, labels = tokens(model)
    out = model(input_ids=labels, labels=labels, fused_lm_head=True)
    logits = model.lm_head(x[:, :-1])  # the layer's own, whole
    z = logits.detach().float()
    log_p = z.log_softmax(-1)
    torch.testing.assert_close(
        out.log_probs, log_p.gather(-1, labels[:, 1:, None])[..., 0], rtol=1e-6, atol=1e-5
    )
    torch.testing.assert_close(out.entropy, -(log_p.exp() * log_p).sum(-1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out.mean_logits, z.mean(-1), rtol=1e-5, atol=1e-6)
    assert torch.equal(out.is_top1, z.argmax(-1) == labels[:, 1:])

    given = torch.linspace(0.5, 1.5, 39)
    (out.log_probs[0] * given).sum().backward()
    biased = model.lm_head.bias.grad.float() if bias else None
    g = -log_p.exp()[0]
    g[torch.arange(39), labels[0, 1:]] += 1
    g = (g * given[:, None]).to(torch.bfloat16)
    x.grad, fused = None, x.grad
    model.lm_head(x[:, :-1]).backward(g[None])
    torch.testing.assert_close(fused, x.grad, rtol=0.02, atol=0.02)
    if bias:
        torch.testing.assert_close(biased, g.float().sum(0), rtol=0.02, atol=0.01)


@ENGINES
@pytest.mark.parametrize("scaling", ["rowwise", "tensorwise"])
def test_its_logits_are_the_layers_to_the_bit(make_head, monkeypatch, hardware, scaling) -> None:
    model, _ = make_head(hardware=hardware, scaling=scaling)
    x, labels = tokens(model)
    tiles = []
    monkeypatch.setattr(head, "TOKENS", 64)
    monkeypatch.setattr(head, "multiply", lambda *a: tiles.append(multiply(*a)) or tiles[-1])
    with torch.no_grad():
        model(input_ids=labels, labels=labels, fused_lm_head=True)
    assert torch.equal(model.lm_head(x[:, :-1])[0], torch.cat(tiles, 1))


def test_its_loss_has_the_same_bits_whatever_is_the_default_type(make_head) -> None:
    """Sums over the vocabulary in torch's default type were of 8 bits in a script of BF16."""
    model, _ = make_head(hardware=False)
    _, labels = tokens(model)
    losses = []
    for dtype in (torch.float32, torch.bfloat16):
        torch.set_default_dtype(dtype)
        try:
            losses.append(model(input_ids=labels, labels=labels, fused_lm_head=True).log_probs)
        finally:
            torch.set_default_dtype(torch.float32)
    assert torch.equal(*losses)
    assert losses[1].dtype is torch.float32


@ENGINES
def test_its_gradient_is_as_good_as_the_layers(make_head, hardware) -> None:
    """Slabs with scales of their own: no further from the exact gradient than one scale for all."""
    model, _ = make_head(hardware=hardware)
    x, labels = tokens(model)
    model(input_ids=labels, labels=labels, fused_lm_head=True).loss.backward()
    fused, x.grad = x.grad.float(), None
    F.cross_entropy(model.lm_head(x[:, :-1])[0].float(), labels[0, 1:]).backward()
    whole = x.grad.float()
    z = model.lm_head(x[:, :-1]).detach()[0].float().requires_grad_()
    F.cross_entropy(z, labels[0, 1:]).backward()
    exact = F.pad(z.grad @ model.lm_head.weight_in(torch.float32), (0, 0, 0, 1))
    assert (fused[0] - exact).norm() <= 1.02 * (whole[0] - exact).norm()


def test_it_is_high_in_evaluation_and_where_conversion_is_disabled(make_head) -> None:
    model, conversion = make_head(hardware=False)
    x, labels = tokens(model)
    with torch.no_grad(), convert.disabled(model):
        apart = model(input_ids=labels, labels=labels, fused_lm_head=True).log_probs
    model.eval()
    high = model(input_ids=labels, labels=labels, fused_lm_head=True).log_probs
    z = (x[:, :-1].detach() @ model.lm_head.weight_in().t()).float()
    expected = z.log_softmax(-1).gather(-1, labels[:, 1:, None])[..., 0]
    torch.testing.assert_close(high, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(apart, high.detach())
    assert not model.lm_head.fp8_calls.ran
    high.sum().backward()
    assert model.lm_head.fp8_calls.high == 1
    conversion.revert()
    assert conversion.head is None


def test_no_label_is_a_loss_of_zero_with_a_gradient(make_head, monkeypatch) -> None:
    """As on a GPU, where TRL leaves tokens without a label out."""
    from trl.trainer import utils

    monkeypatch.setattr(utils, "_use_triton", lambda _: True)
    model, _ = make_head(hardware=False)
    x, labels = tokens(model)
    model(input_ids=labels, labels=labels * 0 - 100, fused_lm_head=True).loss.backward()
    assert not x.grad.any()


# ------------------------------------------------------------------------- whatever the head holds


def operands(dtype: torch.dtype, *, trains: bool, bias: bool) -> list[Any]:
    """Hidden states [40, 64], weight [272, 64] and bias of a head, and labels."""
    generator = torch.Generator().manual_seed(2)
    x, w, b = (torch.randn(size, generator=generator) for size in ((40, 64), (272, 64), (272,)))
    labels = torch.randint(0, 272, (40,), generator=generator)
    x = (0.3 * x + 1.5 * w[labels] / 8).to(dtype).requires_grad_()
    return [x, w.to(dtype).requires_grad_(trains), b.to(dtype) if bias else None, labels]


def results(function, given: list[Any], *, bonus: bool, **settings) -> list[Any]:
    """What a head gives, then the gradients of hidden states, weight and bias."""
    settings = {"temperature": 1.0, "cap": None, "scale": 1.0} | settings
    found = function(
        *given, settings["temperature"], head.WORDS, settings["cap"], settings["scale"], KEPT
    )
    above = torch.linspace(-1, 2, 40)  # as of answers that were better and worse than others
    loss = (found[0] * above).sum() + (found[1].mean() if bonus else 0)
    of = [t for t in given[:3] if t is not None and t.requires_grad]
    return [*found, *torch.autograd.grad(loss, of)]


SETTINGS = pytest.mark.parametrize(
    "settings",
    [{}, {"temperature": 0.7, "scale": 0.5, "cap": 4.0}, {"scale": 2.0}],
    ids=["plain", "capped", "scaled"],
)


@SETTINGS
@pytest.mark.parametrize("bonus", [False, True], ids=["", "bonus"])
@pytest.mark.parametrize("trains", [False, True], ids=["frozen", "trains"])
def test_it_gives_what_trls_function_gives(monkeypatch, trains, bonus, settings) -> None:
    from trl.kernels import ChunkedLogProbFunction

    monkeypatch.setattr(head, "TOKENS", 16)
    monkeypatch.setattr(head, "WORDS", 64)
    given = operands(torch.float32, trains=trains, bias=bonus)
    expected = results(ChunkedLogProbFunction.apply, given, bonus=bonus, **settings)
    found = results(head.Head(Owner("", [])).apply, given, bonus=bonus, **settings)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_head_that_trains_has_the_bits_of_trls_function(dtype) -> None:
    from trl.kernels import ChunkedLogProbFunction

    given = operands(dtype, trains=True, bias=True)
    expected = results(ChunkedLogProbFunction.apply, given, bonus=True)
    found = results(head.Head(Owner("", [])).apply, given, bonus=True)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_the_gradient_of_a_frozen_head_is_as_good_as_trls() -> None:
    """Also where labels are likely, and 1 - p is a small number."""
    from trl.kernels import ChunkedLogProbFunction

    x, w, _, labels = given = operands(torch.bfloat16, trains=False, bias=False)
    exact = x.detach().double().requires_grad_()
    log_p = (exact @ w.double().t()).log_softmax(-1)[torch.arange(40), labels]
    assert log_p.exp().max() > 0.99
    (log_p * torch.linspace(-1, 2, 40)).sum().backward()
    ours, trls = (
        (results(apply, given, bonus=False)[-1] - exact.grad).norm()
        for apply in (head.Head(Owner("", [])).apply, ChunkedLogProbFunction.apply)
    )
    assert ours < 1.1 * trls < 0.05 * exact.grad.norm()


def products(loss, *arguments: Any) -> float:
    """Products a token of a forward and a backward."""
    # torch (2.13) has no formula for a product that is added in place.
    added = {torch.ops.aten.addmm_: lambda _c, a, b, **_: 2 * a[0] * a[1] * b[1]}
    with FlopCounterMode(display=False, custom_mapping=added) as counted:
        loss(*arguments).backward()
    return counted.get_total_flops() / (2 * 40 * 64 * 272)


@pytest.mark.parametrize("trains", [False, True], ids=["frozen", "trains"])
def test_a_frozen_head_takes_two_products_a_token_and_keeps_a_gradient(trains) -> None:
    x, w, b, labels = operands(torch.bfloat16, trains=trains, bias=False)
    kept: list[torch.Size] = []

    def loss() -> Tensor:
        made = head.Head(Owner("", [])).apply(x, w, b, labels, 1.0, 64)[0].sum()
        saved = made.grad_fn.next_functions[0][0].saved_tensors
        kept.extend(tensor.shape for tensor in saved if tensor is not None)
        return made

    assert products(loss) == (4 if trains else 2)
    assert (w.shape in kept) is trains
    assert trains or kept == [x.shape]


def test_a_bonus_on_entropy_takes_three_products_from_the_second_step_on() -> None:
    x, w, b, labels = operands(torch.bfloat16, trains=False, bias=False)
    one = head.Head(Owner("", []))

    def loss() -> Tensor:
        log_probs, entropy, *_ = one.apply(x, w, b, labels, 1.0, 64)
        return log_probs.sum() + entropy.sum()

    assert [products(loss), products(loss)] == [4, 3]


@pytest.mark.slow
def test_a_recipe_trains_with_it_and_its_receipt_has_it(tmp_path) -> None:
    short = [
        "train.max_steps=4",
        "train.eval_steps=99",
        "eval.at_start=false",
        "data.max_rows=24",
        "data.prompts=[]",
    ]
    receipts = {}
    for name, change in {"bf16": [], "fp8": ["precision.map.output=fp8"]}.items():
        report = train(load_recipe("tiny_lora_fp8", [*short, *change]), out=tmp_path / name)
        receipts[name] = report.receipt, report.eval_loss
    (plain, high), (receipt, low) = receipts.values()
    assert receipt.status == "proven"
    (row,) = (layer for layer in receipt.layers if layer.role == "head")
    assert (row.fprop, row.dgrad, row.wgrad) == ("fp8", "fp8", "none")
    before = next(layer for layer in plain.layers if layer.role == "head")
    assert row.flops == before.flops
    assert "stored in FP8" in row.reason
    gained = row.flops / sum(layer.flops for layer in receipt.layers)
    assert receipt.flop_share["fp8"] == pytest.approx(plain.flop_share["fp8"] + gained)
    assert low == pytest.approx(high, rel=0.01)


@pytest.mark.parametrize(
    ("recipe", "changes"),
    [
        ("tiny_full_fp8", []),
        ("tiny_lora_fp8", ["precision.frozen=bf16"]),
        ("tiny_lora_fp8", ["lora.target_modules=[q_proj]", "lora.modules_to_save=[lm_head]"]),
    ],
)
def test_a_head_that_trains_or_is_not_stored_is_refused(recipe, changes) -> None:
    chosen = load_recipe(recipe, ["precision.map.output=fp8", *changes])
    with pytest.raises(PlanError, match="output head, which SFTTrainer") as caught:
        check_settings(chosen.config, meta_model(chosen.config))
    assert "~precision.map.output" in caught.value.fix


def test_a_tied_head_is_refused(make_llama) -> None:
    from finetune.training.run.preflight import _check_head

    model = make_llama(tie=True).requires_grad_(False)
    settings = FP8_HEAD | {"scaling": "rowwise", "map": {"output": "fp8"}}
    with pytest.raises(PlanError, match="output head, which SFTTrainer") as caught:
        _check_head(plan(model, PrecisionConfig.model_validate(settings)))
    assert "tie_word_embeddings" in caught.value.why


def test_a_vocabulary_that_is_no_multiple_of_16_is_refused(make_llama) -> None:
    model = make_llama(vocab_size=271).requires_grad_(False)
    settings = FP8_HEAD | {"scaling": "rowwise", "map": {"output": "fp8"}}
    with pytest.raises(PlanError, match="cannot take it") as caught:
        plan(model, PrecisionConfig.model_validate(settings))
    assert caught.value.why == "N=271 is not a multiple of 16"
