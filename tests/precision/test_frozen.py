"""Frozen layers in FP8: two GEMMs from one copy, as exact as their operands allow."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from finetune import get_receipt, revert, setup_fp8_mixed_precision_training
from finetune.config.schema import RunConfig
from finetune.errors import ConfigError, PlanError, StorageNotComputeError
from finetune.precision import constants
from finetune.precision.convert import apply
from finetune.precision.numbers.formats import E4M3
from finetune.precision.numbers.weights import (
    Arithmetic,
    cast_operand,
    dequantize_weight,
    dgrad,
    fprop,
    quantize_weight,
    tile_of,
)
from finetune.precision.planner import plan
from finetune.precision.settings import PrecisionConfig
from finetune.precision.stored.frozen import FrozenEngine, FrozenMixin, SharedCast
from finetune.precision.stored.linear import StoredMixin, store
from tests.conftest import batch

M, K, N = 96, 160, 224


def operands(granularity: str = "row"):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(M, K, generator=generator).bfloat16()
    w = torch.randn(N, K, generator=generator) * torch.logspace(-2, 0, N)[:, None]
    g = torch.randn(M, N, generator=generator).bfloat16()
    tile = tile_of(granularity, (N, K))
    return x, g, *quantize_weight(w, tile), tile


def arithmetic(tile, granularity: str, **update) -> Arithmetic:
    return Arithmetic(tile, per_row=granularity == "row", **update)


@torch.inference_mode()
def test_an_overwritten_activation_is_cast_again():
    """One without a version counter, too: it looks unchanged."""
    shared, how = SharedCast(), Arithmetic((1, K))
    x = torch.randn(M, K)
    before = shared(x, how, x.dtype)[0].clone()
    x.neg_()
    assert torch.equal(shared(x, how, x.dtype)[0], -before)


@pytest.mark.parametrize("pow2", [False, True])
@pytest.mark.parametrize("granularity", ["row", "tensor"])
def test_gemms_are_those_of_the_operands_codes(granularity, pow2):
    """By hand in float64, from codes cast by torch itself."""
    x, g, bits, inverse, tile = operands(granularity)
    how = arithmetic(tile, granularity, pow2=pow2, in_bf16=False)

    def by_hand(v: torch.Tensor) -> torch.Tensor:
        wide = v.float().abs()
        top = wide.amax(1, keepdim=True) if granularity == "row" else wide.max()
        scale = torch.full_like(top, 448).div(top)  # `448 / top` would round twice
        if pow2:
            scale = 2.0 ** torch.floor(torch.log2(scale))
        return (v.float() * scale).to(E4M3.dtype).double() / scale.double()

    w = dequantize_weight(bits, inverse, tile).double()
    y = fprop(x, cast_operand(x, how), bits, inverse, how)
    torch.testing.assert_close(y, (by_hand(x) @ w.t()).to(y.dtype))
    dx = dgrad(g, bits, inverse, how)
    q = bits.view(E4M3.dtype).double()
    folded = by_hand(g.float() * inverse.t()) @ q if granularity == "row" else by_hand(g) @ w
    torch.testing.assert_close(dx, folded.to(dx.dtype))


@pytest.mark.slow
@pytest.mark.parametrize(("granularity", "transposed"), [("row", True), ("tensor", False)])
def test_scaled_mm_and_emulation_differ_by_accumulation_only(granularity, transposed):
    x, g, bits, inverse, tile = operands(granularity)
    bits = bits.t().contiguous().t() if transposed else bits  # as GPT-2 stores it
    results = []
    for emulate in (True, False):
        how = arithmetic(tile, granularity, emulate=emulate, in_bf16=False)
        xq = cast_operand(x, how)
        results.append((fprop(x, xq, bits, inverse, how), dgrad(g, bits, inverse, how)))
        with torch.autocast("cpu", torch.bfloat16):  # a CPU's `torch._scaled_mm` is a plain matmul
            assert torch.equal(fprop(x, xq, bits, inverse, how), results[-1][0])
        assert torch.equal(xq[0].float(), cast_operand(x, arithmetic(tile, granularity))[0].float())
    for a, b in zip(*results, strict=True):
        assert a.dtype is b.dtype is torch.bfloat16
        torch.testing.assert_close(a, b, rtol=2**-7, atol=1e-4 * float(a.abs().max()))


def test_a_weight_with_one_scale_serves_row_wise_gemms():
    x, g, bits, inverse, tile = operands("tensor")
    for emulate in (True, False):
        how = Arithmetic(tile, per_row=True, emulate=emulate)
        w = dequantize_weight(bits, inverse, tile, torch.bfloat16)
        y, dx = fprop(x, cast_operand(x, how), bits, inverse, how), dgrad(g, bits, inverse, how)
        assert (y - x @ w.t()).norm() < 0.04 * y.norm()
        assert (dx - g @ w).norm() < 0.04 * dx.norm()


@pytest.mark.parametrize("high", ["fprop", "dgrad"])
def test_a_gemm_kept_high_starts_from_the_dequantized_weight(high):
    x, g, bits, inverse, tile = operands()
    how = Arithmetic(tile, high=frozenset({high}))
    w = dequantize_weight(bits, inverse, tile, torch.bfloat16)
    y, dx = fprop(x, cast_operand(x, how), bits, inverse, how), dgrad(g, bits, inverse, how)
    assert torch.equal(y, x @ w.t()) is (high == "fprop")
    assert torch.equal(dx, g @ w) is (high == "dgrad")


# ---------------------------------------------------------------------------------- in a model

LORA = {"r": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
FROZEN = {"scaling": "rowwise", "frozen": "fp8"}


def adapted(make_llama, **lora):
    torch.manual_seed(3)
    return get_peft_model(make_llama(), LoraConfig(**LORA | lora)).train()


def fp8(**update) -> PrecisionConfig:
    values = {"compute": "fp8", "backend": "emulated", "emulation": "allow", **FROZEN}
    return PrecisionConfig(**values | update)


def train(model, accelerator, steps: int = 2):
    trained = [p for p in model.parameters() if p.requires_grad]
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(trained, lr=1e-2))
    losses = []
    for seed in range(steps):
        loss = model(**batch(length=40, seed=seed)).loss  # 80 tokens: no size of a layer
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("rank", [8, 12])
@pytest.mark.parametrize("fused", [True, False])
def test_two_base_gemms_and_adapters_never_in_fp8_at_any_rank(
    make_llama, setup_backend, rank, fused, monkeypatch
):
    model = adapted(make_llama, r=rank)
    before = {n: (id(p), p.dtype) for n, p in model.named_parameters() if p.requires_grad}
    monkeypatch.setattr(constants, "FUSED_ADAPTERS", fused)
    accelerator = setup_backend("emulated", **FROZEN)
    train(model, accelerator)
    receipt = get_receipt()
    assert receipt.status == "proven"
    base = [row for row in receipt.layers if row.role == "base"]
    assert len(base) == 14
    for row in base:
        first = "layers.0.self_attn" in row.name and "o_proj" not in row.name
        # The first layer's input needs no gradient: nothing below it trains.
        assert row.calls == {"fprop": 1, "dgrad": 0 if first else 1, "wgrad": 0}
        assert (row.fprop, row.dgrad) == ("fp8", "none" if first else "fp8")
    adapters = [row for row in receipt.layers if row.role == "adapter"]
    assert len(adapters) == 28
    for row in adapters:
        assert {row.fprop, row.dgrad, row.wgrad} <= {"bf16", "none"}
        assert row.calls["fprop"] == row.calls["wgrad"] == 1
        assert row.shape[0 if "lora_A" in row.name else 1] == rank
    after = {n: (id(p), p.dtype) for n, p in model.named_parameters() if p.requires_grad}
    assert before == after
    assert set(after_dtypes(after)) == {torch.float32}


def after_dtypes(parameters: dict) -> list:
    return [dtype for _, dtype in parameters.values()]


def test_no_high_precision_copy_of_a_held_weight_is_left(make_llama):
    model = adapted(make_llama)
    apply(model, plan(model, fp8()))
    layers = [m for m in model.modules() if isinstance(m, FrozenMixin)]
    assert len(layers) == 14
    for layer in layers:
        tensors = [v for v in vars(layer).values() if isinstance(v, torch.Tensor)]
        tensors += [*layer.parameters(), *layer.buffers()]
        shape = (layer.out_features, layer.in_features)
        assert [t.dtype for t in tensors if t.shape == shape] == [torch.uint8]


def test_an_optimizer_over_all_parameters_keeps_no_copy_of_a_held_weight(
    make_llama, setup_backend
) -> None:
    """`AdamW(model.parameters())` before `prepare`: it would keep the base in memory."""
    model = get_peft_model(make_llama(), LoraConfig(r=4, target_modules="all-linear"))
    accelerator = setup_backend("emulated", frozen="fp8")
    plain = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, _ = accelerator.prepare(model, plain)
    held = {id(p) for group in plain.param_groups for p in group["params"]}
    kept = {id(p) for name, p in model.named_parameters() if not name.endswith("base_layer.weight")}
    assert held == kept


def test_lists_beside_an_optimizers_parameters_keep_their_order(make_llama, setup_backend) -> None:
    """PEFT's LoRA-FA looks each parameter up by a list of names, torch keeps one as well."""
    from peft.optimizers import create_lorafa_optimizer

    model = adapted(make_llama)
    optimizer = create_lorafa_optimizer(model, r=8, lora_alpha=8, lr=1e-2)
    named = torch.optim.SGD(model.named_parameters(), lr=1e-2)
    accelerator = setup_backend("emulated", **FROZEN)
    model, optimizer, _ = accelerator.prepare(model, optimizer, named)
    names = {id(p): name for name, p in model.named_parameters()}
    for group, key in (
        (optimizer.param_groups[0], "names"),
        (named.param_groups[0], "param_names"),
    ):
        assert group[key] == [names[id(p)] for p in group["params"]]
    before = {n: p.clone() for n, p in model.named_parameters() if "lora_" in n}
    for seed in range(2):
        accelerator.backward(model(**batch(seed=seed)).loss)
        optimizer.step()
        optimizer.zero_grad()
    moved = {n for n, p in model.named_parameters() if n in before and not p.equal(before[n])}
    assert moved == {name for name in before if "lora_B" in name}
    assert get_receipt().status == "proven"


def test_evaluation_runs_in_high_precision_from_the_same_codes(make_llama):
    model = adapted(make_llama)
    conversion = apply(model, plan(model, fp8()))
    model.eval()
    with torch.no_grad():
        high = model(**batch()).logits
        revert(model)
        assert torch.equal(high, model(**batch()).logits)
        apply(model, plan(model, fp8(eval="fp8")))
        low = model(**batch()).logits
    with torch.inference_mode():
        assert torch.equal(low, model(**batch()).logits)
    assert conversion.plan.stored
    assert not torch.equal(high, low)
    assert (high - low).norm() < 0.1 * high.norm()


def test_reverting_leaves_stored_layers_and_ordinary_copies(make_llama):
    model = adapted(make_llama)
    apply(model, plan(model, fp8()))
    x = batch()
    model.eval()
    want = model(**x).logits
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), revert(model)):
        assert not any(isinstance(m, FrozenMixin) for m in other.modules())
        assert sum(isinstance(m, StoredMixin) for m in other.modules()) == 14
        assert torch.equal(other(**x).logits, want)


@pytest.mark.parametrize("stored", ["row", "tensor", "block"])
@pytest.mark.parametrize("scaling", ["rowwise", "tensorwise"])
def test_a_base_stored_in_fp8_is_taken_as_it_is_or_cast_again(make_llama, stored, scaling):
    model = make_llama()
    for module in model.model.layers.modules():
        if isinstance(module, nn.Linear):
            store(module, stored)
    model = get_peft_model(model, LoraConfig(**LORA)).train()
    before = {n: m.weight for n, m in model.named_modules() if isinstance(m, StoredMixin)}
    values = {n: m.weight_in() for n, m in model.named_modules() if isinstance(m, StoredMixin)}
    the_plan = plan(model, fp8(scaling=scaling))
    same = stored == ("row" if scaling == "rowwise" else "tensor") or stored == "tensor"
    assert all(("cast again" in layer.reason) is not same for layer in the_plan.stored)
    apply(model, the_plan)
    for name, module in model.named_modules():
        if isinstance(module, FrozenMixin):
            assert (module.weight is before[name]) is same
            error = (module.weight_in() - values[name]).norm() / values[name].norm()
            assert error < (1e-7 if same else 0.04)


def test_a_stored_base_is_refused_where_its_codes_would_not_be_used(make_llama, setup_backend):
    model = make_llama()
    for module in model.model.layers.modules():
        if isinstance(module, nn.Linear):
            store(module)
    accelerator = setup_backend("emulated")
    with pytest.raises(StorageNotComputeError, match="stored in FP8") as caught:
        accelerator.prepare(model)
    assert "frozen='fp8'" in caught.value.fix


def test_a_model_that_trains_throughout_has_nothing_to_hold(make_llama):
    with pytest.raises(PlanError, match="no frozen layer"):
        plan(make_llama(), fp8())


def test_tied_and_kept_weights_stay_as_they_are(make_llama):
    torch.manual_seed(3)
    model = get_peft_model(
        make_llama(tie=True), LoraConfig(r=8, target_modules=["q_proj", "v_proj"])
    )
    the_plan = plan(model, fp8(keep=("down_proj",), map={"output": "fp8"}))
    held = {layer.name.split(".")[-1] for layer in the_plan.stored}
    assert held == {"base_layer", "k_proj", "o_proj", "gate_proj", "up_proj"}
    apply(model, the_plan)
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    assert head.weight is embedding.weight
    assert model.base_model.model.model.layers[0].mlp.down_proj.weight.dtype is torch.float32


def test_gpt2_stores_its_transposed_weights(setup_backend):
    config = GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=272, n_positions=64)
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config).train()
    lora = LoraConfig(r=8, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True)
    losses = train(get_peft_model(model, lora), setup_backend("emulated", **FROZEN), steps=4)
    receipt = get_receipt()
    assert receipt.status == "proven"
    assert {row.fprop for row in receipt.layers if row.role == "base"} == {"fp8"}
    assert receipt.precision["adapters"].startswith("4 of 4")
    assert losses[-1] < losses[0] + 0.5


@pytest.mark.slow
def test_the_adapter_is_an_ordinary_one(make_llama, setup_backend, tmp_path):
    model = adapted(make_llama)
    train(model, setup_backend("emulated", **FROZEN), steps=3)
    model.eval()
    model.save_pretrained(tmp_path)
    plain = PeftModel.from_pretrained(make_llama(), tmp_path).eval()
    mine = {n: p for n, p in model.named_parameters() if "lora_" in n}
    theirs = {n: p for n, p in plain.named_parameters() if "lora_" in n}
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[n], theirs[n]) for n in mine)
    with torch.no_grad():
        low, high = model(**batch()).logits, plain(**batch()).logits
        merged = plain.merge_and_unload()(**batch()).logits
    assert (low - high).norm() < 0.06 * high.norm()  # FP8 weights under the same adapter
    torch.testing.assert_close(merged, high, rtol=1e-4, atol=1e-4)


def test_merging_into_codes_is_refused_with_the_way_out(make_llama, setup_backend):
    model = adapted(make_llama)
    train(model, setup_backend("emulated", **FROZEN))
    with pytest.raises(StorageNotComputeError, match="cannot be merged") as caught:
        model.merge_adapter()
    assert "export" in caught.value.fix


def test_codes_are_not_loaded_without_their_scales(make_llama, setup_backend):
    """`strict=False` let the scales of other codes stand, and the receipt said proven."""
    model = adapted(make_llama)
    train(model, setup_backend("emulated", **FROZEN))
    state = {n: t for n, t in model.state_dict().items() if "0.mlp.up_proj.base_layer" in n}
    model.load_state_dict(state, strict=False)
    for alone in state:
        with pytest.raises(RuntimeError, match="weight_scale are loaded together"):
            model.load_state_dict({alone: state[alone]}, strict=False)


@pytest.mark.parametrize(
    "read",
    [
        lambda w, x: x @ w.to(x.dtype).t(),
        lambda w, x: nn.functional.linear(x, w.float()),
        lambda w, x: x @ (w * 0.5).t(),
        lambda w, x: x @ (x.new_tensor(0.5) * w).t(),
        lambda w, x: x @ w.type_as(x).t(),
    ],
)
def test_codes_are_not_read_as_numbers(make_llama, read):
    """Code that multiplies by a weight itself, past its layer, which then is never called."""
    layer = make_llama().model.layers[0].mlp.up_proj.requires_grad_(False)
    store(layer)
    with pytest.raises(StorageNotComputeError, match="as if they were numbers"):
        read(layer.weight, torch.randn(4, 64))
    assert torch.equal(layer.weight.to(torch.int16), layer.weight.detach().to(torch.int16))


def test_codes_are_not_averaged(make_llama):
    """With a decay of 0.9999 a fifth of all codes became the next lower ones."""
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    model = make_llama().requires_grad_(False)
    store(model.model.layers[0].mlp.up_proj)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9999))
    with pytest.raises(StorageNotComputeError, match="average the parameters that train alone"):
        averaged.update_parameters(model)


# --------------------------------------------------------------------------------- configuration


@pytest.mark.parametrize(
    ("update", "message"),
    [
        (
            {"scaling": "delayed"},
            "set scaling=rowwise or set scaling=tensorwise or set frozen=bf16",
        ),
        ({"scaling": "mxfp8"}, "set scaling=rowwise or set scaling=tensorwise"),
        ({"scaling": "tensorwise", "format": "hybrid"}, "leave format out"),
        ({"high_gemms": ("fprop", "dgrad")}, "leave high_gemms out"),
        ({"frozen": None, "kernels": "eager"}, "set frozen=fp8"),
        ({"compute": "bf16", "backend": "auto"}, "frozen belongs to FP8 compute"),
    ],
)
def test_what_frozen_weights_cannot_have_is_refused(update, message):
    with pytest.raises(ValueError, match=message):
        fp8(**update)


@pytest.mark.parametrize(
    ("precision", "lora", "frozen"),
    [
        ({"compute": "fp8"}, {"r": 8}, "fp8"),
        ({"compute": "fp8", "scaling": "rowwise"}, {"r": 8}, "fp8"),
        ({"compute": "fp8", "scaling": "delayed"}, {"r": 8}, None),
        ({"compute": "fp8", "format": "hybrid"}, {"r": 8}, None),
        ({"compute": "fp8", "frozen": "bf16"}, {"r": 8}, "bf16"),
        ({"compute": "fp8"}, None, None),
        ({"compute": "bf16"}, {"r": 8}, None),
    ],
)
def test_a_base_under_adapters_is_held_in_fp8_by_default(precision, lora, frozen):
    values = {"model": {"name": "m"}, "data": {"path": "d"}, "precision": precision, "lora": lora}
    assert RunConfig.model_validate(values).precision.frozen == frozen


def test_the_helper_takes_it_by_name():
    setup_fp8_mixed_precision_training(
        "emulated", emulation="allow", cpu=True, scaling="rowwise", frozen="fp8"
    )
    with pytest.raises(
        ConfigError, match="scaling='rowwise', or scaling='tensorwise', or frozen='bf16'"
    ):
        setup_fp8_mixed_precision_training("emulated", scaling="delayed", frozen="fp8")


def test_siblings_share_the_cast_of_their_input():
    engine = FrozenEngine(fp8(), emulate=True)
    how = Arithmetic((1, 32))
    x = torch.randn(4, 8, 32)
    first = engine.cast(x, how, torch.bfloat16)
    assert engine.cast(x, how, torch.bfloat16) is first
    kept = engine.cast_and_keep(x, how, torch.bfloat16)[2]
    assert kept is engine.cast_and_keep(x, how, torch.bfloat16)[2]
    assert kept.dtype is E4M3.dtype
    x.add_(1)  # the same object with other numbers
    assert engine.cast(x, how, torch.bfloat16) is not first
    del x
    assert engine._shared._cast is None
