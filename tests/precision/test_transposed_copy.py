"""`precision.transposed_copy`: input gradients multiply codes that were transposed once."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils._python_dispatch import TorchDispatchMode

from finetune.config.recipe import load_recipe
from finetune.config.schema import PrecisionConfig
from finetune.errors import ConfigError, PrecisionError
from finetune.precision import convert
from finetune.precision.backends import frozen
from finetune.precision.planner import plan
from finetune.precision.stored import refuse_sharded_copies
from finetune.training.evidence import _kernels

TRANSPOSES = torch.ops.finetune.transpose_codes.default
LINEARS = 7  # of a decoder layer


class Transposes(TorchDispatchMode):
    """Counts the transposes of codes that run."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is TRANSPOSES
        return func(*args, **(kwargs or {}))


@pytest.fixture
def converted(make_llama, monkeypatch):
    """Function that converts a small Llama with adapters on some layers, as on an FP8 GPU."""
    monkeypatch.setattr(frozen, "has_triton", lambda: True)  # CPUs run the references

    def make(**settings: object) -> convert.Conversion:
        torch.manual_seed(0)
        adapters = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
        model = get_peft_model(make_llama().train(), adapters)
        fp8 = {"compute": "fp8", "backend": "torchao", "frozen": "fp8", "scaling": "rowwise"}
        precision = PrecisionConfig(**fp8 | settings)
        return convert.apply(model, plan(model, precision), hardware=True)

    return make


def step(conversion: convert.Conversion) -> list[torch.Tensor]:
    """Loss and gradients of a step."""
    rows = torch.arange(32).remainder(24)[None]
    with torch.autocast("cpu", torch.bfloat16):
        loss = conversion.model(input_ids=rows, labels=rows).loss
    trained = [p for p in conversion.model.parameters() if p.requires_grad]
    return [loss, *torch.autograd.grad(loss, trained)]


def test_codes_are_transposed_once_and_gradients_keep_their_bits(converted) -> None:
    found, counts = [], []
    for kept in (False, True):
        conversion = converted(transposed_copy=kept)
        layers = sum(isinstance(m, frozen.FrozenMixin) for m in conversion.model.modules())
        for _ in range(2):
            with Transposes() as seen:
                found.append(step(conversion))
            counts.append(seen.count)
    # Nothing below the first layer's q, k and v trains, but for the adapter's own gradient.
    assert counts[0] == counts[1] > 0
    assert counts[2:] == [layers, 0]
    assert len(found[0]) > 2
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))
    assert conversion.frozen is not None
    assert conversion.frozen.effective()["transposed_copy"]
    assert _kernels(conversion) == "triton; transposes: kept"


def test_a_copy_follows_its_codes(converted) -> None:
    conversion = converted(transposed_copy=True)
    layer = next(m for m in conversion.model.modules() if isinstance(m, frozen.FrozenMixin))
    backend = layer.fp8_backend
    first, again = backend.transposed(layer), backend.transposed(layer)
    assert first is not None
    assert again is not None
    assert (first.stride(0), first.data_ptr()) == (1, again.data_ptr())
    with torch.no_grad():
        layer.weight.copy_(layer.weight.flip(0))
    written = backend.transposed(layer)
    assert written is not None
    assert torch.equal(written, layer.bits)
    assert not torch.equal(written, first)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # dynamo warns about parts of torch that it traces
def test_copies_are_inputs_of_a_compiled_layer(converted) -> None:
    """One graph, no transpose in it, and the bits of a compiled layer that transposes."""
    graphs: list[list[object]] = []

    def keep(graph: torch.fx.GraphModule, inputs: object) -> object:
        graphs.append([node.target for node in graph.graph.nodes])
        return graph

    backend = aot_autograd(fw_compiler=keep, partition_fn=min_cut_rematerialization_partition)
    results, transposes = [], []
    for kept in (False, True):
        conversion = converted(transposed_copy=kept)
        torch._dynamo.reset()
        graphs.clear()
        *_, layer = (m for m in conversion.model.modules() if type(m).__name__.endswith("Layer"))
        layer.compile(backend=backend, fullgraph=True)  # one: each is a compilation
        for engine in conversion.engines:
            engine.compiled(layer)
        results.append(step(conversion))
        transposes.append(max(graph.count(TRANSPOSES) for graph in graphs))
        products = torch.ops.aten._scaled_mm.default
        assert max(graph.count(products) for graph in graphs) == LINEARS
    assert transposes == [LINEARS, 0]
    assert all(map(torch.equal, *results))


def test_the_emulation_needs_no_copy(converted) -> None:
    conversion = converted(transposed_copy=True)
    engine = frozen.FrozenBackend(conversion.plan.precision, emulate=True)
    assert not engine.keeps_transposed


@pytest.mark.parametrize("other", ["precision.frozen=bf16", "precision.compute=bf16"])
def test_it_belongs_to_weights_stored_in_fp8(other) -> None:
    with pytest.raises(ConfigError, match="transposed_copy belongs to"):
        load_recipe("tiny_lora_fp8", ["precision.transposed_copy=true", other])


def test_sharded_weights_are_not_copied() -> None:
    sharded = PrecisionConfig(compute="fp8", frozen="fp8", scaling="rowwise", transposed_copy=True)
    with pytest.raises(PrecisionError, match="transposed_copy with FSDP") as caught:
        refuse_sharded_copies(sharded)
    assert "~precision.transposed_copy" in caught.value.fix
