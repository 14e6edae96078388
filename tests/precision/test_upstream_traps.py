"""What today's libraries do to FP8 fine-tuning when nobody watches, and what we do instead.

Each trap is two tests: `*_upstream` pins what the installed libraries do, so that we notice when
they fix it; `*_ours` runs the same user code under the helper. Transformer Engine is its own Python
over a double of its compiled library (`tests.te`).
"""

from __future__ import annotations

import pytest
import torch
import torch.utils.checkpoint
from accelerate import Accelerator
from accelerate.utils import AORecipeKwargs, TERecipeKwargs
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoTokenizer
from trl import SFTConfig, SFTTrainer

from finetune import get_receipt, setup_fp8_mixed_precision_training
from finetune.config.paths import TINY_LLAMA
from finetune.errors import ConfigError, PlanError, PrecisionError
from finetune.precision import convert, planner
from finetune.precision.engines.base import Fp8Mixin
from finetune.precision.settings import PrecisionConfig
from tests.conftest import batch


def moved(model: nn.Module, before: list[torch.Tensor]) -> list[bool]:
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [bool((p.detach() != b).any()) for p, b in zip(parameters, before, strict=True)]


def square_stack() -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(4)])


def one_step(accelerator: Accelerator, model, optimizer) -> None:
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    accelerator.backward((model(x) - x).pow(2).mean())
    optimizer.step()


@pytest.fixture
def accelerate_sees_te(real_te, monkeypatch):
    """Accelerate finds Transformer Engine; the class of the layers that it builds."""
    from tests.te.loading import offer_to_accelerate

    return offer_to_accelerate(monkeypatch)


# ---------------------------------------------------------------- 1. SFTConfig's bf16 hides fp8


def test_bf16_default_hides_fp8_upstream(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    args = SFTConfig(output_dir=str(tmp_path), report_to="none", use_cpu=True)
    assert args.mixed_precision == "bf16", "asked for fp8, trains in bf16, no warning (trl#3860)"


def test_bf16_default_hides_fp8_ours(monkeypatch, tmp_path, make_llama, setup_backend) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    tokenizer = AutoTokenizer.from_pretrained(TINY_LLAMA)
    setup_backend("emulated")
    args = SFTConfig(
        output_dir=str(tmp_path), report_to="none", use_cpu=True, max_steps=2, learning_rate=1e-2,
        save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    rows = Dataset.from_list([{"text": "boats come home before the night"}] * 8)
    model = make_llama(vocab_size=len(tokenizer))
    SFTTrainer(model=model, args=args, train_dataset=rows, processing_class=tokenizer).train()
    assert get_receipt().precision["ran"] == "fp8"


# ------------------------------------------- 2. torchao's weights leave the optimizer, never train


def test_torchao_weights_do_not_train_upstream() -> None:
    model = square_stack()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    accelerator = Accelerator(mixed_precision="fp8", cpu=True, kwargs_handlers=[AORecipeKwargs()])
    model, optimizer = accelerator.prepare(model, optimizer)
    before = [p.detach().clone() for p in model.parameters()]
    one_step(accelerator, model, optimizer)
    assert moved(model, before) == [True, False, False, True], "the FP8 layers are the middle ones"


def test_torchao_weights_do_not_train_ours(setup_backend) -> None:
    model = square_stack()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    accelerator = setup_backend("torchao")
    model, optimizer = accelerator.prepare(model, optimizer)
    before = [p.detach().clone() for p in model.parameters()]
    one_step(accelerator, model, optimizer)
    assert all(moved(model, before))
    assert all(isinstance(layer, Fp8Mixin) for layer in model)


# -------------------- 3. TE makes frozen layers trainable, 4. converts adapters, 5. unties the head


def prepare_upstream(model):
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-3)
    accelerator = Accelerator(mixed_precision="fp8", cpu=True, kwargs_handlers=[TERecipeKwargs()])
    return accelerator.prepare(model, optimizer)


def lora(model, rank: int):
    return get_peft_model(model, LoraConfig(r=rank, target_modules=["q_proj", "v_proj"]))


def count_trainable(model) -> int:
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


@pytest.mark.filterwarnings("ignore")  # accelerate deprecates parts of its own FP8 path
def test_frozen_base_becomes_trainable_upstream(make_llama, accelerate_sees_te) -> None:
    model = lora(make_llama(), 8)
    before = count_trainable(model)
    model, _ = prepare_upstream(model)
    assert count_trainable(model) > 10 * before


@pytest.mark.parametrize("rank", [8, 16])
def test_frozen_base_becomes_trainable_ours(make_llama, setup_backend, rank) -> None:
    model = lora(make_llama(), rank)
    before = count_trainable(model)
    accelerator = setup_backend("te")
    model = accelerator.prepare(model)
    assert count_trainable(model) == before


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("rank", "converted"), [(8, 0), (16, 8)])
def test_adapters_convert_by_rank_upstream(make_llama, accelerate_sees_te, rank, converted) -> None:
    model, _ = prepare_upstream(lora(make_llama(), rank))
    found = [
        n for n, m in model.named_modules() if isinstance(m, accelerate_sees_te) and "lora_" in n
    ]
    assert len(found) == converted, "at rank 16, not at 8: 'use a low rank' is this accident"


@pytest.mark.parametrize("rank", [8, 16, 32, 64])
def test_adapters_convert_by_rank_ours(make_llama, setup_backend, rank) -> None:
    model = setup_backend("te").prepare(lora(make_llama(), rank))
    assert not [n for n, m in model.named_modules() if isinstance(m, Fp8Mixin) and "lora_" in n]


@pytest.mark.filterwarnings("ignore")
def test_tied_head_is_cloned_upstream(make_llama, accelerate_sees_te) -> None:
    model, optimizer = prepare_upstream(make_llama(tie=True))
    owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    assert id(model.lm_head.weight) not in owned


def test_tied_head_is_cloned_ours(make_llama, setup_backend) -> None:
    model = make_llama(tie=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = setup_backend("te").prepare(model, optimizer)
    owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert {id(p) for p in model.parameters()} == owned


# ---------------------------------------- 6. one odd shape stops the conversion of later siblings


def odd_first() -> nn.Sequential:
    layers = (nn.Linear(64, 8), nn.Linear(64, 64), nn.Linear(64, 64))
    return nn.Sequential(*layers)


def test_odd_shape_stops_siblings_upstream(accelerate_sees_te) -> None:
    from accelerate.utils.transformer_engine import convert_model

    model = odd_first()
    Accelerator(cpu=True)  # its logger wants one
    with torch.no_grad():
        convert_model(model)
    assert not [m for m in model if isinstance(m, accelerate_sees_te)], "2 of 3 were eligible"


def test_odd_shape_stops_siblings_ours() -> None:
    the_plan = planner.plan(odd_first(), PrecisionConfig(compute="fp8", backend="emulated"))
    assert [layer.compute for layer in the_plan.layers] == ["bf16", "fp8", "fp8"]
    assert the_plan.layers[0].reason == "N=8 is not a multiple of 16"


# ------------------------------------------------ 7. torchao computes the wgrad of a frozen weight


class CountGemms(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        gemms = (torch.ops.aten.mm, torch.ops.aten._scaled_mm, torch.ops.finetune.scaled_mm)
        self.calls += func.overloadpacket in gemms
        return func(*args, **(kwargs or {}))


def backward_gemms(model: nn.Module) -> int:
    x = torch.randn(32, 64, requires_grad=True)
    loss = model(x).sum()
    with CountGemms() as counter:
        loss.backward()
    assert x.grad is not None
    return counter.calls


def test_frozen_wgrad_is_wasted_upstream() -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    model = nn.Sequential(nn.Linear(64, 64, bias=False)).requires_grad_(False)
    convert_to_float8_training(model, config=Float8LinearConfig(emulate=True))
    assert backward_gemms(model) == 2, "one is needed"


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("backend", ["torchao", "emulated"])
def test_frozen_wgrad_is_wasted_ours(backend, scaling) -> None:
    model = nn.Sequential(nn.Linear(64, 64, bias=False)).requires_grad_(False)
    precision = PrecisionConfig(compute="fp8", backend=backend, scaling=scaling, emulation="allow")
    convert.apply(model, planner.plan(model, precision))
    assert backward_gemms(model) == 1


# ------------------------------------------------------ 8. checkpointing recomputes outside of FP8


def checkpointed_lora(make_llama, *, reentrant: bool):
    model = lora(make_llama(), 8)
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    return model


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_recomputes_outside_fp8_upstream(
    make_llama, accelerate_sees_te, te_engine, monkeypatch, reentrant
) -> None:
    """Accelerate's autocast is around `model.forward` alone, and TRL checkpoints by default."""
    model, _ = prepare_upstream(checkpointed_lora(make_llama, reentrant=reentrant))
    seen = te_engine.watch_forwards(monkeypatch)
    loss = model(**batch()).loss
    assert seen == [True] * 15, "7 layers in each of 2 blocks, and the head"
    if reentrant:
        loss.backward()
    else:  # what a BF16 forward saves is not what an FP8 one did
        with pytest.raises(torch.utils.checkpoint.CheckpointError, match="different number"):
            loss.backward()
    recomputed = seen[15:]
    assert recomputed
    assert not any(recomputed)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_recomputes_in_fp8_ours(make_llama, setup_backend, reentrant) -> None:
    accelerator = setup_backend("te", compile="off")  # or these layers are always checkpointed
    model = accelerator.prepare(checkpointed_lora(make_llama, reentrant=reentrant))
    accelerator.backward(model(**batch()).loss)
    rows = [row for row in get_receipt().layers if row.role == "base"]
    assert len(rows) == 14
    assert {(row.fprop, row.calls["fprop"]) for row in rows} == {("fp8", 2)}


# ------------------------------------------- TRL's fused loss stops at a head that TE has converted


def sft_trainer(model, tmp_path) -> SFTTrainer:
    tokenizer = AutoTokenizer.from_pretrained(TINY_LLAMA)
    args = SFTConfig(
        output_dir=str(tmp_path), report_to="none", use_cpu=True, max_steps=2, bf16=False,
        save_strategy="no", disable_tqdm=True, gradient_checkpointing=False,
    )  # fmt: skip
    rows = Dataset.from_list([{"text": "boats come home before the night"}] * 8)
    return SFTTrainer(model=model, args=args, train_dataset=rows, processing_class=tokenizer)


@pytest.mark.filterwarnings("ignore")
def test_fused_loss_reads_the_engines_empty_bias_upstream(
    make_llama, accelerate_sees_te, monkeypatch, tmp_path
) -> None:
    """`te.Linear(bias=False).bias` has no elements, and is not None."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "TE")
    trainer = sft_trainer(make_llama(vocab_size=1536), tmp_path)
    with pytest.raises(RuntimeError, match=r"must match the size of tensor b \(0\)"):
        trainer.train()


def test_fused_loss_reads_the_engines_empty_bias_ours(make_llama, setup_backend, tmp_path) -> None:
    setup_backend("te")
    sft_trainer(make_llama(vocab_size=1536), tmp_path).train()
    assert get_receipt().status == "proven"


# ------------------------------------------------------------ 9. settings that are dropped or crash


@pytest.mark.filterwarnings("ignore")
def test_settings_reach_the_engine_upstream(accelerate_sees_te) -> None:
    assert "amax_compute_algo" not in TERecipeKwargs(amax_compute_algo="most_recent").to_kwargs(), (
        "equals accelerate's default, so it is not passed on and TE's default 'max' applies"
    )


@pytest.mark.filterwarnings("ignore")
def test_interval_is_passed_on_upstream(accelerate_sees_te) -> None:
    """Transformer Engine 2.20 has no such setting and drops unknown ones without a word."""
    assert TERecipeKwargs(interval=2).to_kwargs() == {"interval": 2}


def test_interval_is_dropped_upstream(real_te) -> None:
    """As is anything else that the recipe does not know."""
    from transformer_engine.common.recipe import DelayedScaling

    made = DelayedScaling(interval=2, override_linear_precision=(False, False, True), nonsense=1)
    assert vars(made) | {"_cached_repr": None} == vars(DelayedScaling()) | {"_cached_repr": None}


def test_a_setting_that_the_engine_drops_is_an_error_ours(te_engine, monkeypatch) -> None:
    """A later version renames one, say."""
    from transformer_engine.common import recipe

    real = recipe.DelayedScaling
    dropping = lambda amax_compute_algo, **settings: real(**settings)  # noqa: ARG005, E731
    monkeypatch.setattr(recipe, "DelayedScaling", dropping)
    precision = PrecisionConfig(
        compute="fp8", backend="te", scaling="delayed", amax_compute_algo="most_recent"
    )
    with pytest.raises(PrecisionError, match="ignores amax_compute_algo"):
        convert.apply(square_stack(), planner.plan(square_stack(), precision))


def test_lower_case_backend_upstream(monkeypatch) -> None:
    """`accelerate launch --fp8_backend te` is accepted, and the script it launches crashes."""
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "te")
    with pytest.raises(ValueError, match="te"):
        Accelerator(mixed_precision="fp8", cpu=True)


def test_settings_reach_the_engine_ours(make_llama, te_engine) -> None:
    setup = setup_fp8_mixed_precision_training
    accelerator = setup(
        backend="te", fp8_format="hybrid", amax_history_len=8, amax_compute_algo="most_recent",
        margin=1, reduce_amax=False, cpu=True,
    )  # fmt: skip
    model = accelerator.prepare(make_llama())
    accelerator.backward(model(**batch()).loss)
    effective = get_receipt().precision["effective"]  # as the engine itself reports it
    assert effective["recipe"] == "DelayedScaling"
    assert effective["fp8_format"] == "HYBRID"
    assert effective["amax_compute_algo"] == "most_recent"
    wanted = {"margin": 1, "amax_history_len": 8, "reduce_amax": False}
    assert wanted.items() <= effective.items()


def test_settings_an_engine_lacks_are_errors(te_engine) -> None:
    with pytest.raises(PrecisionError, match="no pure E5M2"):
        setup_fp8_mixed_precision_training(backend="te", fp8_format="e5m2")
    with pytest.raises(TypeError, match="interval"):
        setup_fp8_mixed_precision_training(backend="te", interval=2)
    with pytest.raises(ConfigError, match="margin belongs to delayed scaling"):
        setup_fp8_mixed_precision_training(backend="torchao", margin=2)
    with pytest.raises(PrecisionError, match="torchao has no delayed scaling"):
        setup_fp8_mixed_precision_training(backend="torchao", scaling="delayed")


# ------------------------------------------------- 10. which layers stay in high precision is shown


def test_first_linear_is_left_out_upstream(make_llama) -> None:
    from accelerate.utils.ao import find_first_last_linear_layers

    first, last = find_first_last_linear_layers(make_llama())
    assert (first, last) == ("model.layers.0.self_attn.q_proj", "lm_head")


def test_first_linear_is_left_out_ours(make_llama) -> None:
    the_plan = planner.plan(make_llama(), PrecisionConfig(compute="fp8", backend="emulated"))
    high = {layer.name: layer.reason for layer in the_plan.layers if layer.compute != "fp8"}
    assert list(high) == ["lm_head"]
    assert "output head" in high["lm_head"]


# -------------------------------------------------------------------- 14. flags that prove nothing


def test_flags_prove_nothing_upstream() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    accelerator = Accelerator(mixed_precision="fp8", cpu=True, kwargs_handlers=[AORecipeKwargs()])
    model = accelerator.prepare(model)
    assert accelerator.fp8_enabled, "says FP8"
    assert not [m for m in model.modules() if type(m).__name__ == "Float8Linear"], "has none"


def test_flags_prove_nothing_ours(setup_backend) -> None:
    accelerator = setup_backend("emulated", keep=["0", "1"])
    with pytest.raises(PlanError, match="no layer of this model can take it"):
        accelerator.prepare(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)))


# --------------------------------------------------- 15. skipped steps (ours: test_loss_scaling.py)


def test_fused_step_is_skipped_unseen_upstream() -> None:
    """So Accelerate reports no skipped step, and the learning rate goes on without one."""
    weight = torch.nn.Parameter(torch.ones(4, 4))
    optimizer = torch.optim.AdamW([weight], lr=0.1, fused=True)
    called = []
    optimizer.register_step_post_hook(lambda *_: called.append(optimizer.found_inf.item()))
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(weight.sum() * float("inf")).backward()
    scaler.step(optimizer)
    assert called == [1.0]
    assert torch.equal(weight, torch.ones(4, 4))


# --------------------------------------------- 16. torchao's optimizers (ours: test_optimizers.py)


def test_block_size_is_handed_on_as_text_upstream() -> None:
    """Which fails in the first step."""
    from transformers import Trainer, TrainingArguments

    args = TrainingArguments(optim="adamw_torch_8bit", optim_args="block_size=64", use_cpu=True)
    optimizer_class, kwargs = Trainer.get_optimizer_cls_and_kwargs(args)
    assert kwargs["block_size"] == "64"
    weight = torch.nn.Parameter(torch.ones(64, 64))
    optimizer = optimizer_class([weight], **kwargs)
    weight.grad = torch.ones(64, 64)
    with pytest.raises(TypeError), torch.compiler.set_stance("force_eager"):
        optimizer.step()
