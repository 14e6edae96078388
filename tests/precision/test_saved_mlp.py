"""`precision.saved_mlp=fp8`: what compiled layers keep of their MLP for backward."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor

from finetune import train
from finetune.config.recipe import load_recipe
from finetune.config.schema import PrecisionConfig
from finetune.errors import ConfigError, PrecisionError
from finetune.hardware.device import Device
from finetune.hardware.requirements import resolve
from finetune.precision import convert
from finetune.precision.formats import E4M3
from finetune.precision.planner import plan
from tests.conftest import batch, slow_but
from tests.traced import traced

FROZEN = {"compute": "fp8", "backend": "torchao", "frozen": "fp8", "scaling": "rowwise"}
FULL = {"compute": "fp8", "backend": "torchao", "scaling": "tensorwise"}
ADAPTERS = {"r": 4, "target_modules": "all-linear"}
KINDS = {
    "frozen": (FROZEN, ADAPTERS),
    "full": (FULL, None),
    "weights-in-16-bits": (FULL | {"map": {"mlp": "bf16"}}, None),  # beside float32 masters
    "scales-of-columns": (FULL | {"backend": "emulated", "scaling": "rowwise"}, None),
    "dora": (FROZEN, ADAPTERS | {"use_dora": True}),
}
ROWS, LENGTH, WIDTH = 2, 48, 160
"""Rows of a batch, tokens of a row, and the width of the MLP in these tests."""
TOKENS = ROWS * LENGTH


def prepared(make_llama, kind: str, *, compiles: bool = True, **settings: Any) -> Any:
    precision, adapters = KINDS[kind]
    if settings.get("compute") == "bf16":
        precision: dict[str, Any] = {}
    model = make_llama(intermediate_size=WIDTH, num_hidden_layers=2)
    if adapters is not None:
        model = get_peft_model(model, LoraConfig(**adapters))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # it begins at zero, and hides the gradient of A
                torch.nn.init.normal_(parameter, std=0.05)
    wanted = PrecisionConfig(**precision, **settings)
    conversion = convert.apply(model.train(), plan(model, wanted), hardware=True)
    if compiles:
        conversion.compile_layers()
    return model


def step(model: Any) -> tuple[Tensor, dict[str, Tensor], dict[int, Tensor]]:
    """Logits, gradients, and what the call keeps for backward besides parameters."""
    kept: dict[int, Tensor] = {}
    weights = {p.untyped_storage().data_ptr() for p in (*model.parameters(), *model.buffers())}
    with torch.autocast("cpu", torch.bfloat16):
        out = model(**batch(ROWS, LENGTH))
    seen, waiting = set(), [out.loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [following for following, _ in node.next_functions]
        for x in getattr(node, "saved_tensors", ()) if "Compiled" in node.name() else ():
            if x is not None and x.untyped_storage().data_ptr() not in weights:
                kept[x.untyped_storage().data_ptr()] = x
    out.loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return out.logits, grads, kept


def error(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Distance of all gradients, as a share of their norm."""
    apart = sum((a[name] - b[name]).square().sum().item() for name in b)
    return (apart / sum(x.square().sum().item() for x in b.values())) ** 0.5


@pytest.fixture
def graphs():
    with traced() as words:
        yield words


def activations(kept: dict[int, Tensor]) -> tuple[Counter[Any], Counter[Any]]:
    """What is kept of one row per token, as wide as the MLP, by type; and the rest, but scales."""
    inside, others = Counter[Any](), Counter[Any]()
    for x in kept.values():
        if x.shape[-1:] == (WIDTH,) and x.numel() == TOKENS * WIDTH:
            inside[x.dtype] += 1
        elif x.shape[-1:] != (1,):
            others[x.shape, x.dtype] += 1
    return inside, others


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # dynamo warns about parts of torch that it traces
@pytest.mark.parametrize("kind", slow_but(["frozen"], list(KINDS), pytest.mark.long))
def test_gate_and_up_are_kept_as_codes_alone(make_llama, graphs, kind) -> None:
    """Two a layer, half the bytes; the forward is the same to the bit."""
    logits, high, kept = step(prepared(make_llama, kind))
    before, others = activations(kept)
    model = prepared(make_llama, kind, saved_mlp="fp8")
    after_logits, low, kept = step(model)
    assert torch.equal(logits, after_logits)
    after, same = activations(kept)
    assert same == others, "weights are kept as they are"
    assert before[torch.bfloat16] >= 4
    assert after[torch.bfloat16] == 0
    assert after[E4M3.dtype] == before[E4M3.dtype] + before[torch.bfloat16]
    exact = step(prepared(make_llama, kind, compute="bf16"))[1]
    assert exact.keys() == high.keys() == low.keys()
    assert error(low, high) > 0
    assert error(low, exact) < 1.1 * error(high, exact)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # dynamo warns about parts of torch that it traces
def test_another_step_and_another_length_keep_codes_too(make_llama, graphs) -> None:
    model = prepared(make_llama, "frozen", saved_mlp="fp8")
    for rows, length in ((2, 32), (2, 32), (3, 48), (2, 32)):
        with torch.autocast("cpu", torch.bfloat16):
            model(**batch(rows, length)).loss.backward()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        model.eval()(**batch(2, 32))  # nothing is kept, and nothing asked for
    assert "left out" not in graphs()
    assert "breaks" not in graphs()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # dynamo warns about parts of torch that it traces
def test_checkpointed_layers_that_keep_nothing_are_an_error(make_llama, graphs) -> None:
    """As a script that leaves TRL's gradient_checkpointing on."""
    model = prepared(make_llama, "frozen", saved_mlp="fp8")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with pytest.raises(PrecisionError, match="acts on nothing") as caught:
        step(model)
    assert "gradient_checkpointing=false" in caught.value.fix


def test_uncompiled_operators_keep_what_they_are_given(make_llama) -> None:
    """Weights of the MLP are as wide as its activations, and are not to be rounded."""
    plain = prepared(make_llama, "frozen", compiles=False)
    other = prepared(make_llama, "frozen", compiles=False, saved_mlp="fp8")
    kept = convert.conversion_of(other).saved_mlp  # pyright: ignore[reportOptionalMemberAccess]
    saved = torch.ones((), dtype=torch.bfloat16, requires_grad=True)  # a number is no matrix
    with kept.in_call([]):  # pyright: ignore[reportOptionalMemberAccess]
        for (_, a), (_, b) in zip(step(plain)[1].items(), step(other)[1].items(), strict=True):
            assert torch.equal(a, b)
        assert torch.autograd.grad(saved.square(), saved)[0] == 2


def test_widths_are_those_of_the_mlp_alone(make_llama) -> None:
    model = get_peft_model(make_llama(intermediate_size=WIDTH), LoraConfig(r=4))
    asked = PrecisionConfig.model_validate(FROZEN | {"saved_mlp": "fp8"})
    assert plan(model, asked).saved_widths == {WIDTH}
    model = make_llama(intermediate_size=128, num_attention_heads=8, head_dim=16)
    with pytest.raises(PrecisionError, match="finds no activations"):
        plan(model, PrecisionConfig.model_validate(FULL | {"saved_mlp": "fp8"}))


def test_a_cpu_compiles_by_request_alone() -> None:
    precision = load_recipe("tiny_lora_fp8", ["precision.saved_mlp=fp8"]).config.precision
    cpu = Device("cpu", "a CPU", None, 8.0)
    with pytest.raises(PrecisionError, match="not compiled") as caught:
        resolve(precision, cpu)
    assert caught.value.fix.startswith("precision.compile=on")
    on = precision.model_copy(update={"compile": "on"})
    assert resolve(on, cpu).precision.saved_mlp == "fp8"


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # dynamo warns about parts of torch that it traces
def test_a_recipe_trains_with_it(graphs, tmp_path) -> None:
    """Proven; the receipt says what was kept; the loss is near that without."""
    compiled = ["precision.compile=on", "train.max_steps=6", "train.gradient_checkpointing=false"]
    compiled += ["precision.health_every=2"]  # observes layers uncompiled, and checkpoints those
    losses = []
    for more in ((), ("precision.saved_mlp=fp8",)):
        report = train(load_recipe("tiny_lora_fp8", [*compiled, *more]), out=tmp_path)
        losses.append(report.eval_loss)
        assert report.receipt.status == "proven"
        kept = report.receipt.precision["effective"].get("saved_mlp")
        assert kept == ("e4m3 by row" if more else None)
    assert losses[0] == pytest.approx(losses[1], rel=0.01)
    assert losses[0] != losses[1]


@pytest.mark.parametrize("setting", ["compile=off", "kernels=eager", "compute=bf16"])
def test_it_is_refused_where_nothing_is_compiled(setting: str) -> None:
    with pytest.raises(ConfigError, match="saved_mlp"):
        load_recipe("llama_8b_lora_fp8", ["precision.saved_mlp=fp8", f"precision.{setting}"])


def test_checkpointing_is_off_with_it() -> None:
    """What is open is decided; what contradicts is refused."""
    config = load_recipe("llama_8b_lora_fp8", ["precision.saved_mlp=fp8"]).config
    assert config.train["gradient_checkpointing"] is False
    for key in ("~train.gradient_checkpointing", "train.gradient_checkpointing=auto"):
        config = load_recipe("llama_8b_lora_fp8", ["precision.saved_mlp=fp8", key]).config
        assert config.train["gradient_checkpointing"] is False
    both = ["precision.saved_mlp=fp8", "train.gradient_checkpointing=true"]
    with pytest.raises(ConfigError, match="contradict each other"):
        load_recipe("llama_8b_lora_fp8", both)
