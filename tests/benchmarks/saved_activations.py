"""Bytes that one decoder layer saves for its backward, eager and compiled, in BF16 and FP8.

    python -m tests.benchmarks.saved_activations [--tokens 8192]

A decoder layer of Llama 3.1 8B on fake tensors, without gradient checkpointing; FP8 is torchao's
tensorwise rule. `compiled` is torch.compile with AOTAutograd's partition (backend
`aot_eager_decomp_partition`): it decides what is saved, and no device code is written or run.
Storages of weights and of the layer's inputs are not counted, each other storage once.
"""

from __future__ import annotations

import argparse

import torch
from functorch.compile import make_boxed_func
from torch._inductor.compile_fx import compile_fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torchao.float8 import convert_to_float8_training
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from finetune.config.paths import shipped_shape


def inductor_passes(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]):
    """Inductor's passes and partition, with graphs that run as they are instead of kernels."""

    def keep(module: torch.fx.GraphModule, *_, **__):
        return make_boxed_func(module.forward)

    return compile_fx(graph, inputs, inner_compile=keep)


def saved_bytes(fp8: bool, compiled: bool, tokens: int) -> int:
    """Bytes saved by one forward of `tokens` tokens in a row."""
    torch._dynamo.reset()
    config = AutoConfig.from_pretrained(shipped_shape("meta-llama/Llama-3.1-8B-Instruct"))
    config._attn_implementation = "sdpa"
    with FakeTensorMode():
        torch.set_default_dtype(torch.bfloat16)
        layer = LlamaDecoderLayer(config, 0)
        torch.set_default_dtype(torch.float32)
        if fp8:
            convert_to_float8_training(layer)
        x = torch.empty(1, tokens, config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
        angle = torch.empty(
            1, tokens, config.hidden_size // config.num_attention_heads, dtype=x.dtype
        )
        run = torch.compile(layer, backend=inductor_passes) if compiled else layer
        storages: dict[int, torch.UntypedStorage] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            for part in parts(tensor):
                storage = part.untyped_storage()
                storages[storage._cdata] = storage
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            run(x, position_embeddings=(angle, angle))
    owned = {
        part.untyped_storage()._cdata
        for tensor in (x, angle, *layer.parameters())
        for part in parts(tensor)
    }
    return sum(storage.nbytes() for key, storage in storages.items() if key not in owned)


def parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Plain tensors that a tensor subclass is made of, or the tensor itself."""
    if hasattr(tensor, "__tensor_flatten__"):
        return [
            part for name in tensor.__tensor_flatten__()[0] for part in parts(getattr(tensor, name))
        ]
    return [tensor]


def main() -> None:
    """Print a table of MB a layer."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=8192)
    tokens = parser.parse_args().tokens
    print("| layer | eager, MB | compiled, MB |\n|---|---|---|")
    for name, fp8 in (("BF16", False), ("FP8, torchao tensorwise", True)):
        row = [saved_bytes(fp8, compiled, tokens) / 1e6 for compiled in (False, True)]
        print(f"| {name} | {row[0]:,.0f} | {row[1]:,.0f} |")


if __name__ == "__main__":
    main()
