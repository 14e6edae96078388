"""Steps of small Llamas under FSDP2, by Accelerate, and alone: what was alive.

    RANK=0 WORLD_SIZE=2 MASTER_ADDR=... MASTER_PORT=... python -m tests.sharding_worker OUT CASES

CASES are names of `test_sharding.CASES`, such as `full-4`, with commas. Each process writes the
peak of a step to OUT/sharded-RANK.json, and the first one to OUT/alone.json what the estimate is
made of: a step on its own, with weights in the dtype of computing, moment by moment.

Cases of `RECIPES` are runs of TRL's trainer, as `recipe_config` describes them.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import torch
from accelerate import Accelerator, DistributedType, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import FullyShardedDataParallelPlugin, convert_outputs_to_fp32
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, TrainerCallback
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from trl import SFTConfig, SFTTrainer

from finetune import (
    load_recipe,
    setup_fp8_mixed_precision_training,
    teardown_fp8_mixed_precision_training,
)
from finetune.config.paths import TINY_LLAMA
from finetune.config.schema import RunConfig
from finetune.precision.proof import movement
from finetune.training.health.memory_meter import LiveTensors
from finetune.training.helper import session

ROWS, LENGTH = 2, 96


class SizedTensors(LiveTensors):
    """Counts storages as large as they are: FSDP2 frees gathered weights by resizing them to 0."""

    def __init__(self, known: Any = ()) -> None:
        self.sizes: dict[int, int] = {}
        super().__init__(known)

    def count(self, tensor: Tensor) -> None:
        if is_traceable_wrapper_subclass(tensor):
            for part in map(tensor.__getattribute__, tensor.__tensor_flatten__()[0]):
                if isinstance(part, Tensor):  # and not a DTensor's mesh
                    self.count(part)
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if tensor.is_meta or key in self._alive:
            return

        def died(_: Any) -> None:
            del self._alive[key]
            self.bytes -= self.sizes.pop(key)

        self._alive[key] = weakref.ref(storage, died)
        self.sizes[key] = 0
        self.resized(storage)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Count a storage that is known again."""
        if storage._cdata in self.sizes:
            self.bytes += storage.nbytes() - self.sizes[storage._cdata]
            self.sizes[storage._cdata] = storage.nbytes()
            self.peak = max(self.peak, self.bytes)

    def __enter__(self) -> Self:
        self._resize = resize = torch.UntypedStorage.resize_

        def counted(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            self.resized(storage)
            return result

        torch.UntypedStorage.resize_ = counted
        return super().__enter__()

    def __exit__(self, *details: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize
        super().__exit__(*details)


def build(case: str) -> nn.Module:
    """`full`, `tied` or `lora`, `-ckpt` or `-sum` (of two batches) or neither, and layers."""
    method, *options, layers = case.split("-")
    torch.manual_seed(0)
    shape = LlamaConfig(
        hidden_size=256, intermediate_size=640, num_hidden_layers=int(layers), pad_token_id=0,
        num_attention_heads=4, num_key_value_heads=2, vocab_size=1536, use_cache=False,
        tie_word_embeddings=method == "tied", dtype=torch.bfloat16,
    )  # fmt: skip
    model = LlamaForCausalLM(shape).to(torch.bfloat16)
    if options == ["ckpt"]:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    if method == "lora":
        lora = LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(model, lora)
    return model.train()


def backward(model: nn.Module, move: Callable[[str, int], None] = lambda *_: None) -> None:
    """Forward and backward of a batch."""
    ids = torch.arange(ROWS * LENGTH).reshape(ROWS, LENGTH) % 1536
    loss = model(input_ids=ids, labels=ids).loss
    move("loss", 0)
    loss.backward()


def step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    move: Callable[[str, int], None] = lambda *_: None,
) -> None:
    """A step; `move` gets the loss and the update."""
    backward(model, move)
    move("optimizer", 0)
    optimizer.step()
    optimizer.zero_grad()


def settled(collective: Callable[..., Any]) -> Callable[..., Any]:
    """A collective that is over when gloo's thread has let go of the buffers, not just before.

    What gloo makes for itself (it reduces and scatters a copy) is not counted.
    """

    def uses(tensor: Tensor) -> int:
        return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)

    def call(*args: Any, **kwargs: Any) -> Any:
        buffers = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        before = [uses(buffer) for buffer in buffers]
        # Through views, so that what gloo holds counts as a use of the storage.
        args = tuple(x.view(-1) if isinstance(x, Tensor) else x for x in args)
        kwargs = {k: x.view(-1) if isinstance(x, Tensor) else x for k, x in kwargs.items()}
        with _disable_current_modes():
            result = collective(*args, **kwargs)
        del args, kwargs
        deadline = time.monotonic() + 30
        while any(uses(x) > n for x, n in zip(buffers, before, strict=True)):
            assert time.monotonic() < deadline, "gloo holds on to a buffer"
            time.sleep(0.0002)
        return result

    return call


def run_sharded(case: str, accelerator: Accelerator) -> dict[str, int]:
    """Peak of the step after the first, on this process."""
    model = build(case)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model, optimizer = accelerator.prepare(model, optimizer)
    with SizedTensors([*model.parameters(), *model.buffers()]) as live:
        step(model, optimizer)
        gc.collect()
        held = live.bytes
        live.peak = live.bytes
        if "-sum-" in case:
            with accelerator.no_sync(model):
                backward(model)
        step(model, optimizer)
    return {"peak": live.peak, "held": held}


class Recorder(SizedTensors):
    """What is alive besides weights, gradients and optimizer states, by group of `groups_of`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__([*model.parameters(), *model.buffers()])
        self.weights, self.states = self.bytes, 0
        self.phase, self.group = "forward", 0
        self.gradients: dict[int, int] = {}
        self.visits: list[list[Any]] = []
        for index, module in groups_of(model):
            module.register_forward_pre_hook(lambda *_, i=index: self.move("forward", i))
            module.register_forward_hook(lambda _m, _i, out, i=index: self.watch(out, i))
            for parameter in filter(lambda p: p.requires_grad, module.parameters()):
                parameter.register_post_accumulate_grad_hook(
                    lambda p, i=index: self.made(i, p.grad.nbytes)
                )

    def move(self, phase: str, group: int) -> None:
        """On to another group, unless checkpointing goes forward within backward."""
        if phase == "forward" and self.phase != "forward":
            return
        if (phase, group) != (self.phase, self.group) or not self.visits:
            self.phase, self.group = phase, group
            self.visits.append([phase, group])
        self.look()

    def watch(self, output: Any, group: int) -> None:
        output = output if isinstance(output, Tensor) else output[0]
        if output.requires_grad:
            output.register_hook(lambda _: self.move("backward", group))

    def made(self, group: int, nbytes: int) -> None:
        self.gradients[group] = self.gradients.get(group, 0) + nbytes
        self.look()

    def look(self) -> None:
        if not self.visits:
            return
        own = self.gradients.get(self.group, 0) if self.phase == "backward" else 0
        rest = self.bytes - self.weights - self.states - sum(self.gradients.values())
        visit = self.visits[-1]
        if len(visit) == 2:
            visit += [[rest, own]] * 3
        visit[4] = [rest, own]
        if rest + own >= sum(visit[3]):
            visit[3] = [rest, own]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.look()
        return result


def groups_of(model: nn.Module) -> list[tuple[int, nn.Module]]:
    """Modules of each group, as Accelerate makes them."""
    base = model.base_model.model if hasattr(model, "peft_config") else model
    layers = list(base.model.layers)
    tail = 0 if base.config.tie_word_embeddings else len(layers) + 1
    return [
        (0, base.model.embed_tokens),
        *((i + 1, layer) for i, layer in enumerate(layers)),
        (tail, base.model.norm),
        (tail, base.lm_head),
    ]


def run_alone(case: str) -> dict[str, Any]:
    """Moments of a step on one process, and the sizes of the groups."""
    model = build(case).to(torch.bfloat16)
    groups: dict[int, list[int]] = {}
    seen: set[int] = set()
    for index, module in groups_of(model):
        own = groups.setdefault(index, [0, 0])
        for parameter in module.parameters():
            if id(parameter) not in seen:
                seen.add(id(parameter))
                size = parameter.numel() if parameter.requires_grad else parameter.nbytes
                own[parameter.requires_grad] += size
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    # As Accelerate does for mixed precision on one process.
    model.forward = convert_outputs_to_fp32(torch.autocast("cpu", torch.bfloat16)(model.forward))
    with Recorder(model) as live:
        step(model, optimizer)
        live.states, live.gradients = live.bytes - live.weights, {}
        live.visits, live.phase = [], "forward"
        step(model, optimizer, live.move)
    moments = [[phase, group, *part] for phase, group, *parts in live.visits for part in parts]
    return {"moments": moments, "groups": [groups[i] for i in sorted(groups)]}


RECIPES: dict[str, tuple[str, dict[str, Any]]] = {
    "recipe-full": ("llama_8b_full_bf16", {}),
    "recipe-sum": ("llama_8b_full_bf16", {"gradient_accumulation_steps": 2}),
    "recipe-kept": (
        "llama_8b_full_bf16",
        {
            "gradient_checkpointing": False,
            "fsdp_config": {"version": 2, "reshard_after_forward": False},
        },
    ),
    "recipe-lora": ("llama_8b_lora_fp8", {}),
}
"""Recipe and keys of `train`, of a small Llama."""
EMULATED: dict[str, Any] = {
    "backend": "emulated",
    "emulation": "allow",
    "scaling": "rowwise",
    "frozen": "fp8",
}


def recipe_config(case: str, folder: Path) -> RunConfig:
    """A recipe on a small Llama, whose shape is written to a folder."""
    recipe, train = RECIPES[case]
    LlamaConfig(
        hidden_size=256, intermediate_size=640, num_hidden_layers=4, pad_token_id=0,
        num_attention_heads=4, num_key_value_heads=2, vocab_size=1536, use_cache=False,
        dtype=torch.bfloat16,
    ).save_pretrained(folder)  # fmt: skip
    data = load_recipe(recipe).config.model_dump()
    data["model"] |= {"name": str(folder), "weights": "random", "pad_token": None}
    data["train"] |= {
        "max_length": LENGTH, "per_device_train_batch_size": ROWS, "packing": False,
        "gradient_accumulation_steps": 1, "fsdp": True, "fsdp_config": {"version": 2},
        "gradient_checkpointing": True, "optim": "adamw_torch_fused", **train,
    }  # fmt: skip
    if data["precision"]["compute"] == "fp8":
        data["precision"] |= EMULATED
    return RunConfig.model_validate(data)


def in_host_memory(sample: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Samples of weights for the proof, which are in no GPU's memory, uncounted."""

    def call(parameter: Tensor) -> Tensor:
        with _disable_current_modes():
            return sample(parameter)

    return call


def run_recipe(case: str, out: Path) -> dict[str, int]:
    """Peak of the third step of TRL's trainer under FSDP2, on this process."""
    config = recipe_config(case, out / case / os.environ["RANK"])
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(LlamaConfig.from_pretrained(config.model.name))
    model = model.to(torch.bfloat16)
    if config.lora is not None:
        asked = {"r": config.lora.r, "target_modules": config.lora.target_modules}
        lora = LoraConfig(lora_alpha=config.lora.alpha, task_type="CAUSAL_LM", **asked)
        model = get_peft_model(model, lora)
    train = {k: v for k, v in config.train.items() if k not in ("num_train_epochs", "eval_steps")}
    args = SFTConfig(
        output_dir=str(out / "run"), use_cpu=True, bf16=True, disable_tqdm=True,
        **train | {
            "max_steps": 3, "warmup_steps": 0, "eval_strategy": "no", "save_strategy": "no",
            "logging_steps": 1,
            "dataset_kwargs": {"skip_prepare_dataset": True},
        },
    )  # fmt: skip
    AcceleratorState._reset_state(reset_partial_state=True)
    # `SFTConfig` has set it, and CPUs are no GPUs yet: FSDP would be refused.
    shards = {"ACCELERATE_USE_FSDP": os.environ.pop("ACCELERATE_USE_FSDP")}
    if config.precision.compute == "fp8":
        setup_fp8_mixed_precision_training(cpu=True, **EMULATED)
    else:
        session.install(config.precision)
    os.environ |= shards
    PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU
    live = SizedTensors()
    peaks: list[int] = []

    class Watch(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            gc.collect()
            live.peak = live.bytes

        def on_step_end(self, *_: Any, **__: Any) -> None:
            peaks.append(live.peak)

    ids = [1 + 7 * i % 1500 for i in range(LENGTH)]
    row = {"input_ids": ids, "labels": ids}
    trainer = SFTTrainer(
        model=model, args=args, train_dataset=Dataset.from_list([row] * 24), callbacks=[Watch()],
        processing_class=AutoTokenizer.from_pretrained(TINY_LLAMA),
    )  # fmt: skip
    for tensor in (*model.parameters(), *model.buffers()):
        live.count(tensor)
    with live:
        trainer.train()
    teardown_fp8_mixed_precision_training()
    return {"peak": peaks[-1]}


def main(out: Path, cases: list[str]) -> None:
    rank = os.environ["RANK"]
    torch.set_num_threads(1)
    gc.freeze()  # so that collecting does not walk through all of torch
    if rank == "0":
        alone = [case for case in cases if case not in RECIPES]
        facts: dict[str, Any] = {case: run_alone(case) for case in alone}
        (out / "alone.json").write_text(json.dumps(facts))
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, reshard_after_forward=True, auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=[LlamaDecoderLayer.__name__], cpu_ram_efficient_loading=False,
        mixed_precision_policy=MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.bfloat16
        ),
    )  # fmt: skip
    for name in ("all_gather_single", "reduce_scatter_single"):
        setattr(torch.distributed, name, settled(getattr(torch.distributed, name)))
    movement.sample = in_host_memory(movement.sample)
    # Accelerate ignores FSDP on CPUs without a word; taking these for GPUs, it shards them.
    PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", fsdp_plugin=plugin)
    facts = {
        case: run_recipe(case, out) if case in RECIPES else run_sharded(case, accelerator)
        for case in cases
    }
    (out / f"sharded-{rank}.json").write_text(json.dumps(facts))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2].split(","))
