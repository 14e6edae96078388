"""`torch.compile` of decoder layers: whole layers, no graph breaks, the same training."""

from __future__ import annotations

import contextlib
import re
from functools import partial
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from peft import LoraConfig, PrefixTuningConfig, get_peft_model
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from finetune import get_receipt, setup_fp8_mixed_precision_training
from finetune.errors import PrecisionError
from finetune.precision import convert
from finetune.precision.cases.lora import AdaptedLinear
from finetune.precision.engines.observers import Owner
from finetune.precision.model import compiling
from finetune.precision.planner import plan
from finetune.precision.settings import PrecisionConfig
from finetune.training.health.operands import OperandWatch
from tests.conftest import batch, slow_but
from tests.traced import traced


def losses(make_llama, setup_backend, compile: str) -> list[float]:
    torch.manual_seed(1)
    model = get_peft_model(make_llama(), LoraConfig(r=8, target_modules="all-linear")).train()
    accelerator = setup_backend("torchao", scaling="tensorwise", compile=compile)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    found = []
    for seed in range(3):
        loss = model(**batch(seed=seed)).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # inductor warns about its own environment
def test_compiled_layers_train_alike(make_llama, setup_backend) -> None:
    eager = losses(make_llama, setup_backend, "off")
    assert get_receipt().precision["compile"] == "off, as configured"
    torch._dynamo.reset()
    counters.clear()
    compiled = losses(make_llama, setup_backend, "on")
    receipt = get_receipt()
    assert compiled == pytest.approx(eager, rel=2e-3)
    assert receipt.status == "proven"
    assert receipt.precision["compile"] == "on: 2 decoder layers, after the witnessed step"
    assert not counters["graph_break"]
    assert counters["frames"]["ok"] == counters["frames"]["total"] > 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # dynamo warns about parts of torch that it traces
@pytest.mark.parametrize("inside", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_compiled_layer_that_is_checkpointed_saves_little(
    make_llama, setup_backend, traced, monkeypatch, inside
) -> None:
    """Around the graph, as before torch 2.13, with the same losses; or inside, as from then on."""
    monkeypatch.setattr(compiling, "RECOMPUTES", (2, 0, 0) if inside else (99, 0, 0))
    if inside and torch.__version__ < (2, 13):
        pytest.skip("this torch recomputes nothing inside of a graph")

    def train(*, checkpointing: bool) -> tuple[list[float], int]:
        torch._dynamo.reset()
        torch.manual_seed(1)
        model = get_peft_model(make_llama(), LoraConfig(r=8, target_modules="all-linear")).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.enable_input_require_grads()
        accelerator = setup_backend("torchao", scaling="tensorwise", compile="on")
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        model, optimizer = accelerator.prepare(model, optimizer)
        weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        found = []
        for seed in range(3):
            saved: dict[int, int] = {}

            def pack(x: Tensor, saved: dict[int, int] = saved) -> Tensor:
                saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
                return x

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
                loss = model(**batch(seed=seed, rows=2)).loss
            held = sum(size for place, size in saved.items() if place not in weights)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        layers = [m for m in model.modules() if hasattr(m, "gradient_checkpointing")]
        assert all(m.gradient_checkpointing is checkpointing for m in layers[-2:])
        assert get_receipt().status == "proven"
        assert not counters["graph_break"]
        return found, held

    plain, most = train(checkpointing=False)
    found, held = train(checkpointing=True)
    assert held < 0.6 * most
    assert found == (pytest.approx(plain, rel=1e-3) if inside else plain)


@pytest.fixture(name="traced")
def layers_are_traced():
    with traced():
        yield


def lengths_of(make_llama, setup_backend) -> str:
    """Train LoRA over rows of two lengths, each padded and not, and evaluate; what is compiled."""
    model = get_peft_model(make_llama(), LoraConfig(r=8, target_modules="all-linear")).train()
    accelerator = setup_backend("torchao", compile="on", frozen="fp8", scaling="rowwise")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    for length in (16, 24, 32):
        mask = torch.ones(2, length, dtype=torch.long)
        for padding in (0, 3):
            mask[0, length - padding :] = 0
            rows = batch(length=length) | {"attention_mask": mask.clone(), "use_cache": False}
            accelerator.backward(model.train()(**rows).loss)
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                model.eval()(**rows)
    return get_receipt().precision["compile"]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # dynamo warns about parts of torch that it traces
def test_rows_of_all_lengths_stay_compiled(make_llama, setup_backend, traced) -> None:
    """More graphs than the eight that torch allows one function, after which layers ran eagerly."""
    said = lengths_of(make_llama, setup_backend)
    assert said == "on: 2 decoder layers, after the witnessed step"
    assert counters["frames"]["ok"] == counters["frames"]["total"] > 8


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:(?!! torch's recompile_limit)")
def test_layers_that_run_uncompiled_nevertheless_are_said(
    make_llama, setup_backend, traced, monkeypatch
) -> None:
    monkeypatch.setattr(compiling, "GRAPHS", 0)
    with (
        torch._dynamo.config.patch(recompile_limit=1),
        pytest.warns(UserWarning, match="run uncompiled") as told,
    ):
        said = lengths_of(make_llama, setup_backend)
    # torch 2.10 counts them among what it skips.
    why = "torch('s recompile_limit is reached| skips 1 functions)"
    assert sum(bool(re.search(why, str(each.message))) for each in told) == 1
    assert re.search(f"after the witnessed step; {why}", said)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_layer_in_fp32_is_in_fp32_backward_too(make_llama, setup_backend, traced) -> None:
    """AOTAutograd traced backward under the autocast of forward: its GEMMs took BF16 operands."""

    def gradients() -> dict[str, torch.Tensor]:
        for p in model.parameters():
            p.grad = None
        accelerator.backward(model(**rows).loss)
        return {name: p.grad for name, p in model.named_parameters()}

    accelerator = setup_backend("torchao", compile="on", map={"mlp": "fp32"})
    model = accelerator.prepare(make_llama())
    rows = batch() | {"use_cache": False}
    eager, compiled = gradients(), gradients()  # the first step is witnessed, uncompiled
    assert counters["frames"]["ok"] > 0
    for name, gradient in eager.items():
        assert torch.equal(gradient, compiled[name]), name


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_layers_compiled_under_observation_are_whole(make_llama, setup_backend, traced) -> None:
    """Hooks of training health on modules inside broke a layer into dozens of graphs, for good."""
    lora = LoraConfig(r=8, target_modules=["q_proj", "down_proj"])
    model = get_peft_model(make_llama(), lora).train()
    accelerator = setup_backend("torchao", compile="on", frozen="fp8", scaling="rowwise")
    model = accelerator.prepare(model)
    watch = OperandWatch(model, convert.conversion_of(model))
    rows = batch() | {"use_cache": False}
    accelerator.backward(model(**rows).loss)  # the witnessed one
    for _ in range(2):
        with watch.watching():
            accelerator.backward(model(**rows).loss)
        assert {operand for _, operand in watch.sums} == {"x", "w", "g"}
    assert not counters["graph_break"]
    assert counters["frames"]["ok"] == counters["frames"]["total"] <= 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_training_model_without_gradients_stays_compiled(
    make_llama, setup_backend, traced
) -> None:
    """As KTO calls it for its KL term; Dynamo left the fused adapters' layers to eager mode."""
    model = get_peft_model(make_llama(), LoraConfig(r=8, target_modules="all-linear")).train()
    accelerator = setup_backend("torchao", compile="on", frozen="fp8", scaling="rowwise")
    model = accelerator.prepare(model)
    rows = batch() | {"use_cache": False}
    accelerator.backward(model(**rows).loss)
    with torch.no_grad():
        compiled = model(**rows).loss
    assert counters["frames"]["ok"] == counters["frames"]["total"] == 1
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        assert torch.allclose(compiled, model(**rows).loss, rtol=1e-2)


@pytest.mark.filterwarnings("ignore")
def test_a_recomputation_has_the_adapters_of_its_forward(make_llama, setup_backend, traced) -> None:
    """Layers that torch leaves uncompiled, and a reference without adapters in between (KTO)."""

    def gradients(*, between: bool) -> list[torch.Tensor]:
        torch.manual_seed(1)
        model = get_peft_model(make_llama(), LoraConfig(r=8, target_modules="all-linear")).train()
        accelerator = setup_backend("torchao", compile="on", frozen="fp8", scaling="rowwise")
        model.activation_checkpointing_enable({"use_reentrant": False})
        model = accelerator.prepare(model)
        rows = batch() | {"use_cache": False}
        accelerator.backward(model(**rows).loss)  # the witnessed one
        with torch.compiler.set_stance("force_eager"):
            loss = model(**rows).loss
            if between:
                with torch.no_grad(), model.disable_adapter():
                    model(**rows)
            accelerator.backward(loss)
        return [p.grad for p in model.parameters() if p.grad is not None]

    pairs = zip(gradients(between=True), gradients(between=False), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def double(module: nn.Module, args: object, y: torch.Tensor) -> torch.Tensor:
    return y * 2


def a_lora(model: nn.Module, **options: object) -> nn.Module:
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], **options))  # pyright: ignore


def tasks(model: nn.Module) -> nn.Module:
    from peft import PolyConfig

    poly = PolyConfig(
        task_type="CAUSAL_LM", target_modules=["q_proj"], r=4, n_tasks=2, n_splits=1
    )  # fmt: skip
    return get_peft_model(model, poly)  # pyright: ignore[reportArgumentType]


def hooked_from_the_start(model: nn.Module) -> nn.Module:
    model.get_submodule("model.layers.0.mlp").register_forward_hook(double)
    return model


HOOKED = {
    "from the start, in one layer": (hooked_from_the_start, {}),
    "later": (lambda model: model, {}),
    "tasks of Poly": (tasks, {"task_ids": torch.tensor([0, 1])}),
    "offsets of aLoRA": (partial(a_lora, task_type="CAUSAL_LM", alora_invocation_tokens=[5]), {}),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", slow_but(["offsets of aLoRA"], HOOKED))
def test_hooks_inside_compiled_layers_run(make_llama, setup_backend, traced, kind) -> None:
    """Graphs have the hooks of the call that made them, in every layer and for good."""
    make, more = HOOKED[kind]

    def gradients(compile: str) -> list[torch.Tensor]:
        torch.manual_seed(1)
        model = make(make_llama())
        for name, p in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(p, std=0.05)
        model = setup_backend("torchao", compile=compile).prepare(model.train())
        found = []
        for seed in range(4):
            if kind == "later" and seed == 2:
                hooked_from_the_start(model)
            rows = batch(seed=seed)
            rows["input_ids"][:, 5 * seed + 3] = 5
            model.zero_grad()
            torch.manual_seed(seed)  # Poly draws
            model(**rows, **more).loss.backward()
            found += [p.grad for p in model.parameters() if p.grad is not None]
        return found

    pairs = zip(gradients("off"), gradients("on"), strict=True)
    assert all(torch.equal(eager, compiled) for eager, compiled in pairs)
    assert "layers ran uncompiled, with hooks" in get_receipt().precision["compile"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_generation_takes_no_graphs_from_training(make_llama, setup_backend, traced) -> None:
    """Each layer would take three: 64 are made of all layers, and training comes later."""
    model = setup_backend("torchao", compile="on").prepare(make_llama().train())
    model(**batch()).loss.backward()
    counters.clear()
    with torch.no_grad():
        model.generate(batch()["input_ids"], max_new_tokens=3, use_cache=True)
    assert not counters["frames"]
    model(**batch(), use_cache=False).loss.backward()
    assert counters["frames"]["ok"] > 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_each_row_has_the_adapter_that_was_named_for_it(make_llama, setup_backend, traced) -> None:
    model = a_lora(make_llama())
    model.add_adapter("b", LoraConfig(r=4, target_modules=["q_proj"]))  # pyright: ignore
    for name, p in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.5)
    model = setup_backend("torchao", compile="on", frozen="fp8").prepare(model)
    model.train()(**batch()).loss.backward()
    rows = {"input_ids": batch()["input_ids"]}
    with torch.no_grad():
        model.eval()
        first = model(**rows).logits
        mixed = model(**rows, adapter_names=["default", "b"]).logits
    torch.testing.assert_close(mixed[0], first[0], rtol=0.02, atol=0.02)
    assert not torch.allclose(mixed[1], first[1], rtol=0.02, atol=0.02)


def whole(model: nn.Module) -> None:
    model.compile(backend="eager")


def one_layer(model: nn.Module) -> None:
    model.get_submodule("model.layers.0").compile(backend="eager")


def the_forward(model: nn.Module) -> None:
    model.forward = torch.compile(model.forward, backend="eager")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("compile_it", "late"), [(whole, True), (one_layer, False), (the_forward, True)]
)
def test_what_a_script_compiles_by_itself_is_refused(
    make_llama, setup_backend, compile_it, late
) -> None:
    """The first steps are watched uncompiled: torch would never compile what it met then."""
    accelerator = setup_backend("emulated")
    model = make_llama(num_hidden_layers=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)

    def step() -> None:
        accelerator.backward(model(**batch()).loss)
        optimizer.step()

    if late:
        step()
        step()
    compile_it(model)
    with pytest.raises(PrecisionError, match=r"set compile=.on.:"):
        step()


@pytest.mark.parametrize("frozen", [False, True])
def test_the_witnessed_step_saves_no_more_than_compiled_steps_do(
    make_llama, setup_backend, monkeypatch, frozen
) -> None:
    """It runs uncompiled, so its layers recompute: same loss, gradients, receipt; fewer bytes."""

    def step(compile: str) -> tuple[int, float, list[torch.Tensor], list[object]]:
        torch.manual_seed(1)
        model = make_llama()
        if frozen:
            model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear"))
        accelerator = setup_backend(
            "torchao", compile=compile, frozen="fp8" if frozen else "bf16", scaling="rowwise"
        )
        model.train()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        model, optimizer = accelerator.prepare(model, optimizer)
        saved: dict[int, int] = {}

        def pack(x: torch.Tensor) -> torch.Tensor:
            saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            loss = model(**batch(rows=2)).loss
        held = sum(saved.values())
        accelerator.backward(loss)
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        layers = [m for m in model.modules() if hasattr(m, "gradient_checkpointing")]
        assert not any(m.gradient_checkpointing for m in layers), "later steps are not checkpointed"
        optimizer.step()
        receipt = get_receipt()
        return held, loss.item(), gradients, [receipt.flop_share, receipt.layers]

    monkeypatch.setattr(convert.Conversion, "compile_layers", lambda self: len(self.compilable))
    eager, loss, gradients, proof = step("off")
    held, *same = step("on")
    assert held < 0.6 * eager, (held, eager)
    assert same[0] == loss
    assert all(torch.equal(a, b) for a, b in zip(same[1], gradients, strict=True))
    assert same[2] == proof, "what is recomputed for the witness is not counted"


def test_the_witnessed_step_keeps_the_prefix_of_prefix_tuning(
    make_llama, setup_backend, monkeypatch
) -> None:
    """Prefixes are entries of a cache, which Transformers drops where a layer is checkpointed."""
    monkeypatch.setattr(convert.Conversion, "compile_layers", lambda self: len(self.compilable))

    def step(compile: str) -> tuple[float, list[Tensor]]:
        torch.manual_seed(0)
        config = PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
        model = get_peft_model(make_llama(use_cache=True), config)
        accelerator = setup_backend("torchao", compile=compile, frozen="fp8", scaling="rowwise")
        model = accelerator.prepare(model)
        loss = model(**batch()).loss
        accelerator.backward(loss)
        return loss.item(), [p.grad.clone() for p in model.parameters() if p.grad is not None]

    loss, gradients = step("on")
    same, others = step("off")
    assert loss == same
    assert len(gradients) == 1
    assert torch.equal(gradients[0], others[0])


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_health_sees_compiled_layers_in_turns(make_llama, setup_backend) -> None:
    """A part of the layers runs uncompiled while it is looked into; nothing is compiled again."""
    from finetune.precision.convert import conversion_of
    from finetune.training.health.operands import OperandWatch

    accelerator = setup_backend("torchao", scaling="tensorwise", compile="on")
    model = make_llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    watch = OperandWatch(model, conversion_of(model))
    seen, frames = [], []
    for seed in range(6):
        looks = seed in (3, 4)
        with watch.watching() if looks else contextlib.nullcontext():
            accelerator.backward(model(**batch(seed=seed)).loss)
        optimizer.step()
        optimizer.zero_grad()
        frames.append(counters["frames"]["ok"])
        if looks:
            seen.append(watch.sums[("mlp", "x")].worst[1].split(".")[2])
    assert seen == ["0", "1"]
    assert watch.sums[("mlp", "g")].layers == 3, "of one of the two layers"
    assert frames[-1] == frames[2]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


class Net(nn.Module):
    """As small as what is compiled may be: one decoder layer."""

    _no_split_modules = ["Block"]

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # dynamo warns about parts of torch that it traces
@pytest.mark.parametrize(
    "scaling",
    ["rowwise", "blockwise", "nvfp4"],
)
def test_emulated_rules_compile(setup_backend, monkeypatch, scaling) -> None:
    """Traced by dynamo and AOTAutograd and run without a code generator: the same bits.

    In whole layers, but for NVFP4, whose generator of random numbers is no value of a graph: its
    matmuls run in eager mode between the pieces of a layer.
    """
    compile = torch.nn.Module.compile
    monkeypatch.setattr(
        torch.nn.Module,
        "compile",
        lambda self, *a, **k: compile(self, *a, **k, backend="aot_eager"),
    )

    def run(mode: str) -> list[float]:
        torch.manual_seed(0)
        accelerator = setup_backend("emulated", scaling=scaling, compile=mode)
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = accelerator.prepare(model, optimizer)
        found = []
        for seed in range(3):
            optimizer.zero_grad()
            x = torch.randn(32, 64, generator=torch.Generator().manual_seed(seed))
            loss = model(x).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            found.append(loss.item())
        return found

    torch._dynamo.reset()
    counters.clear()
    assert run("on") == run("off")
    assert counters["stats"]["unique_graphs"] > 0
    assert bool(counters["graph_break"]) == (scaling == "nvfp4")


TRAINED = {
    "full": ({"backend": "torchao", "scaling": "tensorwise"}, None, False),
    "lora, checkpointed": (
        {"frozen": "fp8", "scaling": "rowwise"},
        {"r": 4, "target_modules": "all-linear"},
        True,
    ),
}
"""Kind of layer -> its precision, its adapters, and whether it is checkpointed."""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # dynamo warns about parts of torch that it traces
@pytest.mark.parametrize("kind", TRAINED)
def test_a_layer_on_fp8_units_is_one_graph(make_llama, kind) -> None:
    """Forward and backward of a decoder layer without a break, and the numbers of eager mode.

    Each setting is compiled in `test_compiled_settings`.
    """
    settings, adapters, checkpointed = TRAINED[kind]
    model = make_llama().train()
    if adapters is not None:
        model = get_peft_model(model, LoraConfig(**adapters))
    precision = PrecisionConfig(**{"compute": "fp8", "backend": "torchao"} | settings)
    convert.apply(model, plan(model, precision), hardware=True)  # CPUs have `torch._scaled_mm` too
    layer = next(m for m in model.modules() if type(m).__name__ == "LlamaDecoderLayer")
    x = torch.randn(1, 32, 64, generator=torch.Generator().manual_seed(0))
    places = torch.outer(torch.arange(32.0), 1e4 ** (-torch.arange(0, 16, 2) / 16)).repeat(1, 2)[
        None
    ]

    def step(run: nn.Module) -> list[torch.Tensor]:
        given = x.clone().requires_grad_()

        def forward(value: torch.Tensor) -> torch.Tensor:
            return run(value, position_embeddings=(places.cos(), places.sin()))

        with torch.autocast("cpu", torch.bfloat16):
            y = checkpoint(forward, given, use_reentrant=False) if checkpointed else forward(given)
        trained = [p for p in layer.parameters() if p.requires_grad]
        return [y, *torch.autograd.grad(y.float().square().sum(), [given, *trained])]

    eager = step(layer)
    torch._dynamo.reset()
    compiled = step(torch.compile(layer, backend="aot_eager", fullgraph=True))
    assert len(eager) > 2
    for a, b in zip(compiled, eager, strict=True):  # autocast's casts stand elsewhere in the graph
        assert (a - b).norm() <= 0.02 * b.norm()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # dynamo warns about parts of torch that it traces
@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
def test_a_graph_for_changing_lengths_trains_on_fp8_units(scaling) -> None:
    """Padding to 16 tokens of a transposed gradient made graphs that torch traced and refused."""
    model = nn.Sequential(nn.Linear(32, 48)).train()
    precision = PrecisionConfig(compute="fp8", backend="torchao", scaling=scaling)
    convert.apply(model, plan(model, precision), hardware=True)  # CPUs have `torch._scaled_mm` too
    padded: list[bool] = []

    def noted(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        padded.append("constant_pad_nd" in graph.code)
        return make_boxed_func(graph)

    def step(run: nn.Module, tokens: int) -> list[Tensor]:
        x = torch.randn(tokens, 32, generator=torch.Generator().manual_seed(tokens))
        y = run(x)
        return [y, *torch.autograd.grad(y.square().sum(), list(model.parameters()))]

    torch._dynamo.reset()
    layer = model[0]
    compiled = torch.compile(layer, backend=aot_autograd(fw_compiler=noted), fullgraph=True)
    for tokens in (32, 48, 40):
        for a, b in zip(step(compiled, tokens), step(layer, tokens), strict=True):
            assert torch.equal(a, b)
        assert any(padded) == (tokens % 16 > 0)
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore")  # dynamo warns about parts of torch that it traces
def test_a_compiled_adapter_has_the_gradients_of_eager_mode() -> None:
    """Those of torch 2.11.0 were zero, where a function returned what it had changed in place."""
    generator = torch.Generator().manual_seed(0)
    w, x, a, b = (
        torch.randn(*shape, generator=generator) for shape in ((6, 8), (4, 8), (2, 8), (6, 2))
    )
    owners = Owner("", []), Owner("", [])

    def adapted(*operands: Tensor) -> Tensor:
        x, a, b = operands
        nones = (None,) * 3
        return AdaptedLinear.apply(x, *nones, w, None, a, b, 2.0, None, owners).tanh()

    trained = [each.requires_grad_() for each in (x, a, b)]
    torch._dynamo.reset()
    compiled = torch.compile(adapted, backend="aot_eager", fullgraph=True)
    found = torch.autograd.grad(compiled(*trained).sum(), trained)
    for there, here in zip(
        found, torch.autograd.grad(adapted(*trained).sum(), trained), strict=True
    ):
        torch.testing.assert_close(there, here)
        assert there.any()


def test_emulated_delayed_scaling_is_not_compiled(te_engine) -> None:
    with pytest.raises(PrecisionError) as caught:
        setup_fp8_mixed_precision_training(
            "emulated", scaling="delayed", compile="on", emulation="allow", cpu=True
        )
    assert "use compile='off' or backend=te" in caught.value.why
