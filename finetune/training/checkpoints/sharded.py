"""Checkpoints of weights that FSDP2 shards, in the files that every other run writes and reads.

    FSDP2, N processes ──┐                                           ┌─> FSDP2, M processes
    DDP, N processes   ──┼─> model or adapter, optimizer.pt, as from ┼─> DDP, M processes
    one process        ──┘   one process: names, order and types     └─> one process

Transformers 5.23 has other files under FSDP, which no run without it reads, and leaves it to
`state_dict_type`: whole ones (`pytorch_model_fsdp.bin`, `optimizer.bin`), or shards in the form of
`torch.distributed.checkpoint`, whose `.metadata` is read with `pickle.load` (torch 2.13), so that a
checkpoint can run code; and with shards it saves no model when training ends.

Here each tensor is gathered on its own and goes to the host's memory of the first process, which
writes it; a base that adapters leave alone is not gathered. Of states in few bits codes and scales
are gathered: `full_tensor` (torchao 0.18) leaves tensors in them that no reader of plain data
takes. Each process reads its own part of the files, which are mapped into memory. Nothing is
rounded either way.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from finetune.config.train_keys import TrainerArguments
from finetune.errors import ConfigError
from finetune.precision.proof.movement import is_torchao
from finetune.training.helper.optimizer import low_bit

OPTIMIZER, SCHEDULER = "optimizer.pt", "scheduler.pt"


class WholeFiles:
    """Writes and reads a sharded trainer's checkpoints in the files of one process."""

    def __init__(self, trainer: Any) -> None:
        """Take the place of the trainer's own methods."""
        self.trainer = trainer
        # So that nothing of Accelerate writes shards beside, which are read with `pickle.load`.
        trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
        trainer.accelerator.get_state_dict = self.model_state
        trainer._save_optimizer_and_scheduler = self.save_optimizer
        trainer._load_from_checkpoint = self.load_weights
        trainer._load_optimizer_and_scheduler = self.load_optimizer
        trainer._load_best_model = self.load_best

    @property
    def has_adapters(self) -> bool:
        """True if the files hold adapters, not the model."""
        from peft import PeftModel

        return isinstance(self.trainer.model, PeftModel)

    # ------------------------------------------------------------------------------------ weights

    def model_state(self, model: Any, unwrap: bool = True) -> dict[str, Any]:
        """`Accelerator.get_state_dict` of what is saved; empty but on the first process."""
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        options = StateDictOptions(
            full_state_dict=True, cpu_offload=True, ignore_frozen_params=self.has_adapters
        )
        return get_model_state_dict(model, options=options)

    @torch.no_grad()
    def load_weights(self, checkpoint: str, model: Any = None) -> None:
        """`Trainer._load_from_checkpoint`, into the shards of this process.

        Raises:
            ConfigError: file and model differ in a tensor's name or shape.
        """
        from peft import get_peft_model_state_dict
        from safetensors import safe_open

        model = model if model is not None else self.trainer.model
        own = get_peft_model_state_dict(model) if self.has_adapters else model.state_dict()
        tied = getattr(model, "_tied_weights_keys", None) or ()  # of which files have one
        left = own.keys() - tied
        # Each process reads all files and keeps its part; mapped, they are in memory once for a
        # machine.
        for file in _weight_files(Path(checkpoint), adapters=self.has_adapters):
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118
                    value = opened.get_tensor(name)
                    # `copy_` would broadcast another shape in silence.
                    if name not in own or own[name].shape != value.shape:
                        raise _does_not_fit(file, name)
                    own[name].copy_(_as_sharded(value, own[name]))
                    left -= {name}
        for name in left:
            raise _does_not_fit(Path(checkpoint), name)

    def load_best(self) -> None:
        """`Trainer._load_best_model`."""
        self.load_weights(self.trainer.state.best_model_checkpoint)

    # ---------------------------------------------------------------------------------- optimizer

    def save_optimizer(self, folder: str) -> None:
        """`Trainer._save_optimizer_and_scheduler`: parameters by number, as torch saves them.

        Raises:
            ConfigError: its state is not one of whole parameters.
        """
        trainer, numbered = self.trainer, list(self._parameters())
        state = trainer.optimizer.state_dict()
        whole = {
            number: {key: self._whole(value, numbered[number]) for key, value in entry.items()}
            for number, entry in state["state"].items()
        }
        if trainer.args.should_save:
            torch.save({**state, "state": whole}, Path(folder) / OPTIMIZER)
            torch.save(trainer.lr_scheduler.state_dict(), Path(folder) / SCHEDULER)

    def load_optimizer(self, checkpoint: str | None) -> None:
        """`Trainer._load_optimizer_and_scheduler`, into the shards of this process."""
        if checkpoint is None:
            return
        trainer, numbered = self.trainer, list(self._parameters())
        state, schedule = (
            # `weights_only`: tensors and numbers, and no code of whoever made the file.
            torch.load(Path(checkpoint) / name, map_location="cpu", mmap=True, weights_only=True)
            for name in (OPTIMIZER, SCHEDULER)
        )
        parts = {
            number: {key: _as_state_of(value, numbered[number]) for key, value in entry.items()}
            for number, entry in state["state"].items()
        }
        trainer.optimizer.load_state_dict({**state, "state": parts})
        trainer.lr_scheduler.load_state_dict(schedule)

    def _parameters(self) -> Iterator[Tensor]:
        """The optimizer's parameters in the order of the numbers in its state."""
        for group in self.trainer.optimizer.param_groups:
            yield from group["params"]

    @torch.no_grad()
    def _whole(self, value: Any, parameter: Tensor) -> Any:
        """An entry of a parameter's state, gathered on the CPU of the first process."""
        # Step counts are the same on all processes.
        if not isinstance(value, Tensor) or not value.dim():
            return value
        if isinstance(parameter, DTensor):
            if not isinstance(value, DTensor) or value.shape != parameter.shape:
                raise ConfigError(
                    "this optimizer's state cannot be put together from its shards",
                    where=f"train.optim={TrainerArguments(self.trainer.args).optim}, train.fsdp",
                    why="it is not one number for each of a parameter's, split as that is",
                    fix="train.optim=adamw_torch; or ~train.fsdp ~train.fsdp_config (DDP); or "
                    "train.save_strategy=no",
                )
            local, low = value.to_local(), None
            if type(self.trainer.optimizer.optimizer).__module__.startswith("torchao."):
                # torchao stores parts of 4096 numbers and more in few bits: processes may differ.
                low = low_bit.joined(gather_object([local.cpu()]), value.shape)
            value = low if low is not None else _sharded_like(_numbers(local), value).full_tensor()
        return value.cpu() if self.trainer.args.should_save else None


def _as_state_of(value: Any, parameter: Tensor) -> Any:
    """This process's part of an entry in a file."""
    if not isinstance(value, Tensor):
        return value
    if value.shape != parameter.shape or not isinstance(parameter, DTensor):
        return value.clone()
    if is_torchao(value):
        rows: Any = _as_sharded(torch.arange(len(value)), parameter).to_local()
        start = int(rows[0]) * (value.numel() // len(value)) if len(rows) else 0
        # None where it splits a block, whose scale it would share with another process.
        part = low_bit.part(value, start, parameter.to_local().shape)
        if part is not None:
            return _sharded_like(part.to(parameter.device), parameter)
    return _as_sharded(_numbers(value), parameter)


def _numbers(value: Any) -> Tensor:
    """Plain numbers of a moment, which torchao may hold as codes."""
    return value.dequantize() if is_torchao(value) else value


def _sharded_like(local: Tensor, like: DTensor) -> DTensor:
    """This process's part as one of a tensor that is sharded as another one is."""
    mesh, placements = like.device_mesh, like.placements
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def _as_sharded(value: Tensor, like: Tensor) -> Any:
    """This process's part of a tensor that every process has; a copy."""
    if not isinstance(like, DTensor):
        return value.clone()
    part = distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)
    return part.clone()


def _weight_files(checkpoint: Path, *, adapters: bool) -> list[Path]:
    """Files of a checkpoint's weights, one or several."""
    return sorted(checkpoint.glob(f"{'adapter_' if adapters else ''}model*.safetensors"))


def _does_not_fit(file: Path, name: str) -> ConfigError:
    return ConfigError(
        f"the checkpoint's weights do not fit the model: {name}",
        where=str(file),
        why="only one of the two has it, or in another shape",
        fix="the recipe that the checkpoint was trained with",
    )
