"""Run under torchrun by `test_distributed.py`: trains two processes and reports what each saw.

    torchrun --nproc_per_node=2 -m tests.distributed_worker OUT MODE,MODE,...

A mode is `ddp`, `fsdp`, `experts` (FSDP2 of a mixture of experts, whose weights are plain
parameters), `local` (DDP with reduce_amax off), or `frozen` and `frozen_fsdp` (adapters over a base
held in FP8, under DDP and FSDP2), `frozen_experts` (the same of a mixture, under FSDP2), or
`frozen_ram` and `frozen_ram_experts` (FSDP2 whose weights come from the first process: the other
one's are made wrong before). In `frozen_head` and `frozen_head_fsdp` the output head is held so as
well, and multiplied inside the loss of TRL's trainer. In `sharded_tensorwise` and
`sharded_rowwise` all weights train under FSDP2, and with `_codes` they are gathered as codes
(`fp8_params`). They run one after the other, since starting two processes takes longer than what
they do. Each process writes OUT/MODE/RANK.json.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

torch.set_num_threads(1)

from accelerate import DistributedType, PartialState
from accelerate.state import AcceleratorState, GradientState
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from torch.distributed.tensor import DTensor
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Trainer,
    TrainingArguments,
)
from trl import SFTConfig, SFTTrainer

from finetune import (
    get_receipt,
    setup_fp8_mixed_precision_training,
    teardown_fp8_mixed_precision_training,
)
from finetune.config.paths import TINY_LLAMA
from finetune.precision.convert import conversion_of
from finetune.precision.proof.row import changed_numbers
from finetune.precision.stored.linear import StoredMixin


def rows(rank: int) -> list[dict]:
    """Different lengths of different tokens, so that amaxes differ between processes."""
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(1, 272, (16, 32), generator=generator).tolist()
    return [{"input_ids": x, "labels": x} for x in ids]


def count_gathered(found: dict[str, int]) -> None:
    """Add up the bytes that FSDP2 gathers, by type, in this process from now on."""
    names = ("all_gather_single", "all_gather_into_tensor")  # of torch 2.13, and before
    name = next(name for name in names if hasattr(dist, name))
    plain = getattr(dist, name)

    def gather(output_tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        kind = str(output_tensor.dtype)
        found[kind] = found.get(kind, 0) + output_tensor.nbytes
        return plain(output_tensor, *args, **kwargs)

    setattr(dist, name, gather)


def digest(model: torch.nn.Module) -> str:
    """What only equal weights have in common."""
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in whole)).hexdigest()


def main(out: Path, mode: str) -> None:
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    shape = {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 272, "use_cache": False,
    }  # fmt: skip
    if mode.endswith("experts"):
        model = MixtralForCausalLM(MixtralConfig(**shape, num_local_experts=4))
    else:
        model = LlamaForCausalLM(LlamaConfig(**shape, pad_token_id=0))
    frozen, fsdp = (
        mode.startswith("frozen"),
        mode.startswith(("frozen_ram", "sharded")) or mode.endswith(("experts", "fsdp")),
    )
    if frozen:
        lora = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(model, lora)
    fsdp_config = {"version": 2, "reshard_after_forward": True}
    if mode.startswith("frozen_ram"):
        fsdp_config["cpu_ram_efficient_loading"] = True
        if rank:  # nothing of it may be used
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(3.0)
    sharded = {"fsdp": True, "fsdp_config": fsdp_config}
    head = mode.startswith("frozen_head")
    args = (SFTConfig if head else TrainingArguments)(
        output_dir=str(out / "run"), max_steps=3, per_device_train_batch_size=2, use_cpu=True,
        bf16=True, learning_rate=1e-2, logging_steps=1, report_to="none", disable_tqdm=True,
        save_strategy="no", ddp_find_unused_parameters=False, **(sharded if fsdp else {}),
        **({"dataset_kwargs": {"skip_prepare_dataset": True}} if head else {}),
    )  # fmt: skip
    if fsdp:
        # Accelerate ignores FSDP on CPUs without a word; taking these for GPUs, it shards them.
        PartialState().distributed_type = DistributedType.MULTI_GPU
    scaling = {"scaling": "rowwise", "frozen": "fp8"} if frozen else {
        "scaling": "delayed", "amax_history_len": 4, "reduce_amax": mode != "local",
    }  # fmt: skip
    scaling |= {"map": {"output": "fp8"}} if head else {}
    if mode.startswith("sharded"):
        scaling = {"scaling": mode.split("_")[1], "fp8_params": mode.endswith("codes")}
    gathered: dict[str, int] = {}
    count_gathered(gathered)
    setup_fp8_mixed_precision_training("emulated", emulation="allow", cpu=True, **scaling)
    if head:
        trainer = SFTTrainer(
            model, args=args, train_dataset=Dataset.from_list(rows(rank)),
            processing_class=AutoTokenizer.from_pretrained(TINY_LLAMA),
        )  # fmt: skip
    else:
        trainer = Trainer(model=model, args=args, train_dataset=rows(rank))
    trainer.train()
    receipt = get_receipt()
    conversion = conversion_of(trainer.model_wrapped)
    assert conversion is not None
    state = conversion.engine.state_tensors() if conversion.engine is not None else {}
    codes = [m.weight for m in trainer.model.modules() if isinstance(m, StoredMixin)]
    stacks = [p for p in trainer.model.parameters() if p.dim() == 3]
    facts = {
        "stacks": [str(p.dtype) for p in stacks],
        "stacks_local": [
            p.to_local().shape[0] / p.shape[0] for p in stacks if isinstance(p, DTensor)
        ],
        "status": receipt.status,
        "share": receipt.fp8_flop_share,
        "trainable": receipt.trainable,
        "changed": changed_numbers(receipt.movement),
        "experts": {
            row.name.rpartition(".")[2]: [row.fprop, row.dgrad, row.wgrad]
            for row in receipt.layers
            if "experts" in row.name
        },
        "processes": receipt.environment["processes"],
        "sharded": sum(isinstance(p, DTensor) for p in trainer.model.parameters()),
        "scale": state["scale"].tolist() if state else [],
        "history": state["history"].tolist() if state else [],
        "base": [row.fprop + row.dgrad for row in receipt.layers if row.role == "base"],
        "head": [row.fprop + row.dgrad for row in receipt.layers if row.role == "head"],
        "codes": [str(w.dtype) for w in codes],
        "local": [w.to_local().shape[0] / w.shape[0] for w in codes if isinstance(w, DTensor)],
        "loss": [row["loss"] for row in trainer.state.log_history if "loss" in row],
        "gathered": gathered,
        "weights": digest(trainer.model) if mode.startswith("sharded") else "",
    }
    (out / f"{rank}.json").write_text(json.dumps(facts))


def one_by_one(run: Callable[[Path, str], None], out: Path, modes: str) -> None:
    """Run each mode in a folder of its own, as the first of a process."""
    for mode in modes.split(","):
        (out / mode).mkdir(parents=True, exist_ok=True)
        environment = dict(os.environ)  # where Transformers leaves its FSDP settings to Accelerate
        run(out / mode, mode)
        os.environ.clear()
        os.environ.update(environment)
        teardown_fp8_mixed_precision_training()
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


if __name__ == "__main__":
    one_by_one(main, Path(sys.argv[1]), sys.argv[2])
