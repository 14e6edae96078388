"""Types chosen in `precision.map` are those computed in; everything else about the model stays."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import Tensor, nn

from finetune import get_receipt, setup_fp8_mixed_precision_training
from finetune.errors import ConfigError, ProofError
from finetune.precision import convert, planner
from finetune.precision.cases.override import DTYPES, OverrideMixin
from finetune.precision.settings import PrecisionConfig
from finetune.precision.stored.linear import store
from tests.conftest import batch, emulated


def trained(model: nn.Module, steps: int = 2, **settings):
    """The receipt of two steps, through Accelerate and the proof."""
    accelerator = setup_fp8_mixed_precision_training(
        "emulated", emulation="allow", cpu=True, **settings
    )
    trainable = [p for p in model.parameters() if p.requires_grad]
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(trainable, lr=1e-2))
    for seed in range(steps):
        optimizer.zero_grad()
        accelerator.backward(model(**batch(seed=seed)).loss)
        optimizer.step()
    return get_receipt()


def dtypes_of(model: nn.Module, name: str) -> list[torch.dtype]:
    """Filled with the dtype of every output of a module, as the model is called."""
    seen: list[torch.dtype] = []
    model.get_submodule(name).register_forward_hook(lambda _, __, y: seen.append(y.dtype))
    return seen


def precisions(receipt, piece: str) -> set[str]:
    rows = [row for row in receipt.layers if piece in row.name and row.role != "adapter"]
    assert rows
    return {getattr(row, gemm) for row in rows for gemm in ("fprop", "dgrad", "wgrad")} - {"none"}


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("compute", ["fp32", "fp16"])
def test_attention_layers_multiply_in_the_chosen_type(make_llama, compute, kind) -> None:
    model = make_llama().to(kind)
    output = dtypes_of(model, "model.layers.0.self_attn.q_proj")
    receipt = trained(model, map={"attn": compute})
    assert receipt.status == "proven"
    assert precisions(receipt, "self_attn") == {compute}
    assert precisions(receipt, "mlp") == {"fp8"}
    # Under BF16 autocast float16 cannot meet BF16 afterwards; float32 can.
    assert set(output) == {torch.float32 if compute == "fp32" else torch.bfloat16}


def test_torch_names_of_types_are_understood(make_llama) -> None:
    receipt = trained(make_llama(), map={"attn": torch.float32, "norm": "float32"})
    assert precisions(receipt, "self_attn") == {"fp32"}
    with pytest.raises(ConfigError, match="attn"):
        trained(make_llama(), map={"attn": torch.float64})


@pytest.mark.parametrize("output", ["fp8", "fp32", "fp16"])
def test_the_head_too_where_its_layer_is_called(make_llama, output) -> None:
    receipt = trained(make_llama(), map={"output": output})
    assert receipt.status == "proven"
    assert precisions(receipt, "lm_head") == {output}


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("compute", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(
    ("part", "name"), [("norm", "model.layers.0.input_layernorm"), ("embed", "model.embed_tokens")]
)
def test_norms_and_embeddings_give_their_result_in_it(
    make_llama, part, name, compute, kind
) -> None:
    model = make_llama().to(kind)
    seen = dtypes_of(model, name)
    before = dict(model.named_parameters())
    receipt = trained(model, map={part: compute})
    assert receipt.status == "proven"
    assert set(seen) == {torch.bfloat16 if compute == "fp16" else DTYPES[compute]}
    for parameter_name, p in model.named_parameters():
        assert p is before[parameter_name]
        assert p.dtype is p.grad.dtype is kind, "masters and their gradients keep their type"


def by_hand(compute: str, x: Tensor, linear: nn.Linear) -> Tensor:
    kind = DTYPES[compute]
    return nn.functional.linear(x.to(kind), linear.weight.to(kind), linear.bias.to(kind))


@pytest.mark.parametrize("compute", ["fp32", "bf16", "fp16"])
def test_a_forced_layer_is_exactly_that(compute) -> None:
    """Bit for bit what the type gives, forward and backward, inside autocast and outside."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 32))
    twin = copy.deepcopy(model[1])
    convert.apply(model, planner.plan(model, emulated(map={"1": compute})))
    assert isinstance(model[1], OverrideMixin) == (compute != "bf16"), "BF16 is what the run has"
    if compute == "bf16":
        return
    for autocast in (False, True):
        x = torch.randn(16, 64, requires_grad=True)
        z = x.detach().clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = model[1](x)
        expected = by_hand(compute, z, twin)
        assert torch.equal(y, expected.to(y.dtype))
        y.float().sum().backward()
        expected.float().sum().backward()
        if not autocast:
            assert torch.equal(x.grad, z.grad)
            assert torch.equal(model[1].weight.grad, twin.weight.grad)
            assert x.grad.dtype is torch.float32


@pytest.mark.parametrize("compute", ["fp32", "fp16"])
def test_a_layer_stored_in_fp8_multiplies_its_values_and_not_its_codes(compute) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 32))
    store(model[0])
    x, values = torch.randn(16, 64), model[0].dequantize().to(DTYPES[compute])
    chosen = PrecisionConfig(compute="bf16", map={"0": compute})
    convert.apply(model, planner.plan(model, chosen))
    with torch.autocast("cpu", torch.bfloat16):
        y = model[0](x)
    kind, bias = DTYPES[compute], model[0].bias.to(DTYPES[compute])
    expected = nn.functional.linear(x.to(kind), values) + bias
    assert torch.equal(y, expected.to(y.dtype))


def test_gpt2s_transposed_layers_too() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    shape = {"n_embd": 64, "n_layer": 1, "n_head": 2, "vocab_size": 272, "n_positions": 64}
    ids = {"bos_token_id": 1, "eos_token_id": 2, "use_cache": False}
    model = GPT2LMHeadModel(GPT2Config(**shape, **ids)).train()
    receipt = trained(model, map={"attn": "fp32", "norm": "fp32"})
    assert receipt.status == "proven"
    assert precisions(receipt, "attn.c_") == {"fp32"}
    assert precisions(receipt, "mlp.c_") == {"fp8"}


@pytest.mark.parametrize("affine", [False, True])
def test_a_layer_norm_of_bf16_weights_in_float32(affine) -> None:
    """Torch has no kernel of a float32 input and 16-bit weights."""
    model = nn.Sequential(nn.LayerNorm(32, elementwise_affine=affine), nn.Linear(32, 32)).bfloat16()
    chosen = PrecisionConfig(compute="bf16", map={"norm": "fp32"})
    twin = copy.deepcopy(model[0]).float()
    convert.apply(model, planner.plan(model, chosen))
    x = torch.randn(4, 32, dtype=torch.bfloat16)
    y = model[0](x)
    assert y.dtype is torch.float32
    assert torch.equal(y, twin(x.float()))
    assert all(p.dtype is torch.bfloat16 for p in model.parameters())


def test_a_module_called_by_keyword_and_with_more_arguments() -> None:
    class GatedNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(64))

        def forward(self, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
            assert hidden_states.dtype is torch.bfloat16
            y = hidden_states * self.weight
            return y if gate is None else y * gate

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.layer = GatedNorm(), nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            n = self.norm
            ways = n(hidden_states=x), n(x, x), n(x, gate=x), n(hidden_states=x, gate=x)
            self.seen = torch.stack(ways)
            return self.layer(self.seen.sum(0))

    model = Net()
    convert.apply(model, planner.plan(model, emulated(map={"norm": "bf16"})))
    x = torch.randn(16, 64)
    assert model(x).shape == (16, 64)
    low = x.bfloat16()
    once, gated = low * model.norm.weight, low * model.norm.weight * x
    expected = [once, gated, gated, gated]
    assert torch.equal(model.seen, torch.stack([y.bfloat16() for y in expected]))


def test_revert_copy_and_pickle_give_plain_modules(make_llama) -> None:
    model = make_llama(vocab_size=288)
    classes = [type(m) for m in model.modules()]
    names = list(model.state_dict())
    reference = model(**batch()).logits
    chosen = {"attn": "fp32", "norm": "bf16", "embed": "bf16", "output": "fp8"}
    convert.apply(model, planner.plan(model, emulated(scaling="nvfp4", map=chosen)))
    assert [type(m) for m in model.modules()] != classes
    assert list(model.state_dict()) == names
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    for other in (copy.deepcopy(model), torch.load(stream, weights_only=False)):
        assert [type(m) for m in other.modules()] == classes
        assert not [k for m in other.modules() for k in m.__dict__ if k.startswith("fp8_")]
        assert torch.equal(other(**batch()).logits, reference)
    assert [type(m) for m in model.modules()] != classes, "the model itself stays converted"
    convert.revert(model)
    assert [type(m) for m in model.modules()] == classes
    assert not [k for m in model.modules() for k in m.__dict__ if k.startswith("fp8_")]
    assert torch.equal(model(**batch()).logits, reference)


def test_a_trained_copy_of_the_head_beside_adapters(make_llama) -> None:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=8, target_modules=["q_proj"], modules_to_save=["lm_head"])
    model = get_peft_model(make_llama(), config).train()
    receipt = trained(model, map={"output": "fp32"})
    assert receipt.status == "proven"
    rows = {r.name: (r.fprop, r.dgrad, r.wgrad) for r in receipt.layers if "lm_head" in r.name}
    assert rows["base_model.model.lm_head.modules_to_save.default"] == ("fp32",) * 3


def sft_trainer(model: nn.Module, tmp_path):
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    from finetune.config.paths import TINY_LLAMA

    ids = torch.randint(5, 272, (8, 32), generator=torch.Generator().manual_seed(0)).tolist()
    args = SFTConfig(
        output_dir=str(tmp_path), max_steps=2, per_device_train_batch_size=2, use_cpu=True,
        bf16=True, report_to="none", disable_tqdm=True, save_strategy="no",
        gradient_checkpointing=False,
    )  # fmt: skip
    return SFTTrainer(
        model=model, args=args, train_dataset=Dataset.from_dict({"input_ids": ids}),
        processing_class=AutoTokenizer.from_pretrained(TINY_LLAMA),
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("output", ["fp8", "fp32"])
def test_a_stock_sft_trainer_cannot_have_the_head_in_a_chosen_type(make_llama, tmp_path, output):
    """Its loss multiplies by the head's weight itself: an error that says what to do."""
    setup_fp8_mixed_precision_training(
        "emulated", emulation="allow", cpu=True, map={"output": output}
    )
    with pytest.raises(ProofError) as caught:
        sft_trainer(make_llama(vocab_size=2048), tmp_path).train()
    assert "lm_head fprop=bf16" in caught.value.where
    assert "output" in caught.value.fix
    assert "SFTTrainer" in caught.value.fix


@pytest.mark.slow
def test_a_stock_sft_trainer_has_a_frozen_head_in_fp8(make_llama, tmp_path) -> None:
    from peft import LoraConfig, get_peft_model

    setup_fp8_mixed_precision_training(
        "emulated", emulation="allow", cpu=True, scaling="rowwise", frozen="fp8",
        map={"output": "fp8"},
    )  # fmt: skip
    model = get_peft_model(make_llama(vocab_size=2048), LoraConfig(target_modules="all-linear"))
    sft_trainer(model, tmp_path).train()
    (row,) = (layer for layer in get_receipt().layers if layer.role == "head")
    assert (row.fprop, row.dgrad) == ("fp8", "fp8")
