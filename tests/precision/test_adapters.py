"""Adapters fused with their base: PEFT's numbers, less kept, and PEFT's way where it must be."""

from __future__ import annotations

import contextlib

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch._dynamo.utils import counters

from finetune import get_receipt, revert
from finetune.errors import StorageNotComputeError
from finetune.precision import constants
from finetune.precision.cases.lora import AdaptedMixin, FusedMixin, fused_adapters
from finetune.precision.convert import apply, disabled
from finetune.precision.planner import plan
from finetune.precision.settings import PrecisionConfig
from finetune.precision.stored.frozen import FrozenMixin
from tests.conftest import batch, train
from tests.traced import traced

LORA = {"r": 8, "lora_alpha": 12, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
FP8 = {
    "compute": "fp8",
    "backend": "emulated",
    "emulation": "exact",
    "scaling": "rowwise",
    "frozen": "fp8",
}


def adapted(make_llama, *, seed: int = 3, **lora):
    torch.manual_seed(seed)
    model = get_peft_model(make_llama(), LoraConfig(**LORA | lora)).train()
    for name, parameter in model.named_parameters():  # B starts at zero, and hides A's gradient
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.05)
    return model


def convert(model, **precision):
    config = PrecisionConfig(**precision)
    return apply(model, plan(revert(model), config))


def gradients(model, autocast: bool = True, **inputs):
    model.zero_grad()
    around = torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext()
    with around:
        loss = model(**inputs or batch(length=40)).loss
    loss.backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return loss.item(), found


def apart(a: dict, b: dict) -> float:
    """Largest relative distance of two sets of gradients, layer by layer."""
    assert a.keys() == b.keys()
    return max(float((a[n] - b[n]).norm() / b[n].norm()) for n in b)


def test_in_float32_the_fused_function_is_pefts(make_llama):
    model = adapted(make_llama)
    loss, want = gradients(model, autocast=False)
    conversion = convert(model, compute="fp32")
    assert len(conversion.swapped_by(FusedMixin)) == 14
    fused_loss, got = gradients(model, autocast=False)
    assert abs(loss - fused_loss) < 1e-6
    assert apart(got, want) < 1e-5


@pytest.mark.parametrize("options", [{}, {"use_rslora": True}, {"r": 64}, {"bias": "all"}])
def test_in_bf16_it_is_as_near_to_float32_as_peft_is(make_llama, options):
    model = adapted(make_llama, **options)
    _, exact = gradients(model, autocast=False)
    _, peft = gradients(model)
    conversion = convert(model, compute="bf16")
    assert len(conversion.swapped_by(FusedMixin)) == 14
    _, fused = gradients(model)
    assert apart(fused, exact) < 1.3 * apart(peft, exact)


@pytest.mark.parametrize(
    ("saved", "bound"),
    # Of the distance to BF16 on the same FP8 weights; measured 0.06 and 0.07 on these layers.
    [("high", 0.10), ("fp8", 0.12)],
)
@pytest.mark.parametrize("scaling", ["rowwise", "tensorwise"])
def test_gradients_on_an_fp8_base_are_near_bf16_ones(
    make_llama, monkeypatch, scaling, saved, bound
):
    monkeypatch.setattr(constants, "SAVED_INPUT", saved)
    model = adapted(make_llama)
    convert(model, **FP8 | {"scaling": scaling})
    loss, low = gradients(model)
    revert(model)
    high_loss, high = gradients(model)
    assert abs(loss - high_loss) < 0.01 * high_loss
    assert apart(low, high) < bound


def test_saved_codes_change_the_gradient_of_a_only(make_llama, monkeypatch):
    model = adapted(make_llama)
    convert(model, **FP8)
    monkeypatch.setattr(constants, "SAVED_INPUT", "high")
    loss, high = gradients(model)
    monkeypatch.setattr(constants, "SAVED_INPUT", "fp8")
    same_loss, low = gradients(model)
    assert loss == same_loss
    changed = {n for n in high if not torch.equal(high[n], low[n])}
    assert changed
    assert all("lora_A" in name for name in changed)
    only_a = {n: v for n, v in high.items() if "lora_A" in n}
    assert apart({n: low[n] for n in only_a}, only_a) < 0.04  # E4M3 rounds by 2.6 % on average


def kept_by(layer, x) -> dict[torch.dtype, int]:
    """Bytes that a forward keeps for its backward, each tensor once, weights left out."""
    weights = {t.untyped_storage().data_ptr() for t in (*layer.parameters(), *layer.buffers())}
    kept = {}

    def keep(t):
        if t.untyped_storage().data_ptr() not in weights:
            kept[t.untyped_storage().data_ptr()] = t
        return t

    watching = torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t)
    with watching, torch.autocast("cpu", torch.bfloat16):
        outputs = layer(x)
    bytes_of: dict[torch.dtype, int] = {}
    for t in kept.values():
        bytes_of[t.dtype] = bytes_of.get(t.dtype, 0) + t.numel() * t.element_size()
    del outputs
    return bytes_of


class Siblings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(256, 256, bias=False), nn.Linear(256, 64, bias=False)

    def forward(self, x):
        return self.q_proj(x), self.k_proj(x)


def test_one_byte_of_each_input_is_kept_for_all_siblings():
    model = get_peft_model(Siblings(), LoraConfig(r=8, target_modules=["q_proj", "k_proj"])).train()
    x = torch.randn(512, 256, dtype=torch.bfloat16).requires_grad_()
    stock = kept_by(model, x)
    convert(model, compute="bf16")
    fused = kept_by(model, x)
    convert(model, **FP8)
    low = kept_by(model, x)
    t = 2 * 512 * 8 * 2  # x Aᵀ of both
    assert fused[torch.bfloat16] == x.numel() * 2 + t
    assert fused[torch.bfloat16] < stock[torch.bfloat16]
    assert low[torch.uint8] == x.numel()  # bytes of E4M3
    assert low[torch.bfloat16] == t
    assert low[torch.float32] == 512 * 4  # a scale for each token


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("precision", [FP8, {"compute": "bf16"}], ids=["fp8", "bf16"])
def test_checkpointing_gives_the_same_bits(make_llama, precision, reentrant):
    model = adapted(make_llama)
    convert(model, **precision)
    loss, plain = gradients(model)
    model.enable_input_require_grads()
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    again, recomputed = gradients(model)
    assert loss == again
    assert plain.keys() == recomputed.keys()
    assert all(torch.equal(plain[n], recomputed[n]) for n in plain)


@pytest.mark.parametrize("scaling", ["rowwise", "tensorwise"])
def test_an_expert_without_tokens_has_nothing_to_cast(scaling):
    expert = nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 32))
    model = get_peft_model(expert, LoraConfig(r=4, target_modules=["0", "1"])).train()
    convert(model, **FP8 | {"scaling": scaling})
    x = torch.randn(0, 32, requires_grad=True)
    model(x).sum().backward()
    assert x.grad.shape == (0, 32)
    assert all(p.grad.eq(0).all() for p in model.parameters() if p.requires_grad)


def test_decoder_layers_are_found_behind_the_class_that_fsdp2_puts_in_front(
    make_llama, monkeypatch
):
    model = adapted(make_llama)
    conversion = convert(model, **FP8)
    for layer in model.get_base_model().model.layers:
        layer.__class__ = type(f"FSDP{type(layer).__name__}", (type(layer),), {})
    compiled = []
    monkeypatch.setattr(nn.Module, "compile", lambda module, **_: compiled.append(module))
    assert conversion.compile_layers() == 2
    assert compiled == list(model.get_base_model().model.layers)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_all_decoder_layers_are_one_compiled_graph(make_llama):
    """Layers past `recompile_limit` would run uncompiled if each were a graph of its own."""
    deep = 10  # torch's limit is 8
    torch.manual_seed(3)
    base = make_llama(num_hidden_layers=deep, hidden_size=32, intermediate_size=32)
    model = get_peft_model(base, LoraConfig(**LORA)).train()
    conversion = convert(model, **FP8)
    _, eager = gradients(model)
    with traced():
        conversion.compile_layers()
        _, compiled = gradients(model)
        # The first layer's input needs no gradient, all others' does.
        assert counters["stats"]["unique_graphs"] == 2
        assert counters["frames"]["ok"] == counters["frames"]["total"] == 2
    b_alone = [{n: v for n, v in found.items() if "lora_B" in n} for found in (compiled, eager)]
    assert apart(*b_alone) < 2e-2  # B begins at zero, so A has no gradient


OTHERS = {
    "dropout": ({"lora_dropout": 0.1}, "dropout"),
    "dora": ({"use_dora": True}, "DoraLinearVariant"),
    "bias": ({"lora_bias": True}, "adapter with a bias"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_cannot_be_fused_runs_as_peft_has_it(make_llama, setup_backend, name):
    options, why = OTHERS[name]
    if name == "bias":
        make = make_llama
        model = get_peft_model(
            make(attention_bias=True),
            LoraConfig(r=8, target_modules=["q_proj"], task_type="CAUSAL_LM", **options),
        ).train()
        count = 2
    else:
        model, count = adapted(make_llama, **options), 14
    trained = [p for p in model.parameters() if p.requires_grad]
    accelerator = setup_backend("emulated", scaling="rowwise", frozen="fp8")
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(trained, lr=1e-2))
    for seed in range(2):
        accelerator.backward(model(**batch(seed=seed, length=40)).loss)
        optimizer.step()
        optimizer.zero_grad()
    receipt = get_receipt()
    assert receipt.status == "proven"
    assert receipt.precision["adapters"].endswith(f"{count} as PEFT has them: {why}")
    base = [row for row in receipt.layers if row.role == "base" and "q_proj" in row.name]
    assert {row.fprop for row in base} == {"fp8"}


def test_an_adapter_that_begins_from_the_weight_is_refused_once_it_is_codes(make_llama):
    """PiSSA splits the weight itself; what PEFT made before the base was stored is guarded too."""
    model = adapted(make_llama)
    convert(model, **FP8)
    late = LoraConfig(**LORA | {"init_lora_weights": "pissa"})
    with pytest.raises(StorageNotComputeError, match="init_lora_weights='pissa' cannot adapt"):
        model.add_adapter("late", late)


def test_two_adapters_one_at_a_time(make_llama):
    model = adapted(make_llama)
    model.add_adapter("other", LoraConfig(**LORA | {"r": 4}))
    convert(model, **FP8)
    _, first = gradients(model)
    assert all("default" in name for name in first)
    model.set_adapter("other")
    _, second = gradients(model)
    assert second
    assert all("other" in name for name in second)
    with model.disable_adapter():
        model(**batch())  # as PEFT has it


def test_adapters_to_be_swapped_run_as_peft_has_them(make_llama):
    """Their scaling is a tensor, so that graphs do not depend on it; reading it broke them."""
    from peft.utils.hotswap import prepare_model_for_compiled_hotswap

    model = adapted(make_llama)
    loss, _ = gradients(model)
    prepare_model_for_compiled_hotswap(model, target_rank=16)
    conversion = convert(model, compute="bf16")
    said = fused_adapters(conversion.swapped_by(FusedMixin))
    assert said.endswith("14 as PEFT has them: scaling in a tensor, to be swapped")
    again, found = gradients(model)
    assert abs(again - loss) < 1e-3
    assert len(found) == 28


def test_adapters_run_as_peft_has_them_in_evaluation_and_when_switched_off(make_llama):
    model = adapted(make_llama)
    convert(model, **FP8)
    model.eval()
    with torch.no_grad():
        fused = model(**batch()).logits
        with disabled(model):
            assert torch.equal(fused, model(**batch()).logits)
    model.train()
    with disabled(model):
        gradients(model)
    revert(model)
    classes = {type(m) for m in model.modules()}
    assert not any(issubclass(c, FusedMixin | AdaptedMixin | FrozenMixin) for c in classes)


def test_hooks_on_the_base_layer_run_around_base_and_adapter(make_llama):
    model = adapted(make_llama)
    convert(model, **FP8)
    layer = model.base_model.model.model.layers[0].mlp.up_proj
    seen = []
    layer.base_layer.register_forward_hook(lambda _, args, y: seen.append((args[0], y)))
    gradients(model)
    ((x, y),) = seen
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        alone = layer.base_layer(x)
        assert not torch.equal(alone, y)
        a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        added = (x.bfloat16() @ a.t().bfloat16()) * layer.scaling["default"] @ b.t().bfloat16()
        torch.testing.assert_close(y, alone + added, rtol=2e-2, atol=2e-2)


def test_a_base_weight_that_is_thawed_gets_its_gradient(make_llama):
    model = adapted(make_llama)
    convert(model, compute="bf16")
    layer = model.base_model.model.model.layers[0].self_attn.o_proj
    layer.base_layer.weight.requires_grad_(True)
    _, found = gradients(model)
    assert any("o_proj.base_layer.weight" in name for name in found)
    model.base_model.model.model.layers[0].self_attn.o_proj.base_layer.weight.requires_grad_(False)
    _, found = gradients(model)
    assert not any("base_layer" in name for name in found)


@pytest.mark.parametrize("frozen", ["bf16", "fp8"])
def test_the_base_of_x_lora_is_no_adapter(make_llama, setup_backend, tmp_path, frozen) -> None:
    """PEFT holds it in a module named `lora_model`, beside a classifier that weighs adapters."""
    from peft import XLoraConfig

    lora = LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    get_peft_model(make_llama(), lora).save_pretrained(tmp_path)
    config = XLoraConfig(
        task_type="CAUSAL_LM", hidden_size=64, xlora_depth=2, xlora_size=64,
        adapters={"0": str(tmp_path), "1": str(tmp_path)},
    )  # fmt: skip
    model = get_peft_model(make_llama().requires_grad_(False), config).train()
    accelerator = setup_backend("emulated", frozen=frozen)
    model, optimizer = accelerator.prepare(
        model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    )
    train(accelerator, model, optimizer, 3)
    receipt = get_receipt()
    assert receipt.status == "proven"
    base = [row for row in receipt.layers if row.role == "base"]
    assert len(base) == 14
    assert {row.fprop for row in base} == {"fp8"}
    classifier = [row for row in receipt.layers if "xlora_classifier" in row.name]
    assert {(row.role, row.fprop) for row in classifier} == {("adapter", "bf16")}, classifier
    assert (receipt.precision["storage"] == {"fp8": 14}) is (frozen == "fp8")
