"""What a run adds to TRL's trainers: an order that resumes, rates of embeddings, better errors."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from jinja2 import TemplateError
from transformers import Trainer
from transformers.trainer_pt_utils import LengthGroupedSampler

from finetune.config.methods import Method
from finetune.config.sft import refused_by
from finetune.config.train_keys import TrainerArguments
from finetune.data.both_labels import order_seed
from finetune.data.pairs import preparing
from finetune.data.preparing import not_formatted
from finetune.errors import ConfigError, FinetuneError, first_line
from finetune.storage.ends import save_ends
from finetune.storage.pretrained import TEMPLATE_ERRORS


@functools.cache
def trainer_of(method: Method) -> type[Any]:
    """TRL's trainer of a method, with ledgers, as a run trains by it."""
    kind = preparing(method)
    # RunTrainer first: its methods are around the ledger's, and these around TRL's.
    return type(kind.__name__, (RunTrainer, kind), {})


class RunTrainer(Trainer):
    """Mixin of a trainer that prepares its rows (`finetune.data.preparing.Accounted`).

    Attributes:
        embedding_learning_rate: for embeddings and output head, where it is another one.
        processor_files: copied beside saved weights, where a run on text has the tokenizer alone of
            a model that reads images.
    """

    embedding_learning_rate: float | None = None
    processor_files: Sequence[Path] = ()

    def get_train_dataloader(self) -> Any:
        """TRL's; settings of workers that torch refuses are a `ConfigError`."""
        # Such as `persistent_workers` without workers, which torch refuses here, not Transformers
        # before.
        fix = "take back the settings train.dataloader_... that it names"
        with refused_by("torch's DataLoader", fix=fix):
            return super().get_train_dataloader()

    def ordered(self, sampler: Any) -> Any:
        """Transformers' order of rows; by length one that a resumed run makes again."""
        above: Any = super()
        # Asked first, though lengths replace its answer: it is where a method spreads its own rows.
        found, by_length = above.ordered(sampler), isinstance(sampler, LengthGroupedSampler)
        return ByLength(sampler, order_seed(self.args)) if by_length else found

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """TRL's, embeddings in groups of their own; what it refuses is a `ConfigError`."""
        with refused_by("the optimizer", fix="~train.optim_args, or ~train.optim"):
            made = super().create_optimizer(*args, **kwargs)
        # Behind Transformers, whose groups go by weight decay alone.
        if self.embedding_learning_rate is not None:
            give_rate(made, embeddings_of(self.model), self.embedding_learning_rate)
        return made

    def create_scheduler(self, *args: Any, **kwargs: Any) -> Any:
        """TRL's; what the learning rate's schedule refuses is a `ConfigError`."""
        fix = "~train.lr_scheduler_kwargs, or ~train.lr_scheduler_type"
        with refused_by("the learning rate's schedule", fix=fix):
            return super().create_scheduler(*args, **kwargs)

    def save_model(self, output_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        """TRL's; beside an adapter, too, stands where its answers end, and what reads images."""
        model: Any = self.accelerator.unwrap_model(self.model)
        if self.args.should_save:
            folder = Path(output_dir or str(TrainerArguments(self.args).output_dir))
            folder.mkdir(parents=True, exist_ok=True)
            # PEFT saves adapters without `generation_config.json`; without the ends in it, whoever
            # loads the adapter would get answers that run on past the token that training taught.
            if hasattr(model, "peft_config"):
                save_ends(model, folder)
            for file in self.processor_files:
                shutil.copyfile(file, folder / file.name)
        super().save_model(output_dir, *args, **kwargs)

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Next batches; what is wrong with a stream's rows shows when they are read."""
        try:
            return super().get_batch_samples(*args, **kwargs)
        except (TemplateError, *TEMPLATE_ERRORS, RuntimeError, OSError, EOFError) as error:
            # Accelerate concatenates what process 0 read for all of them; batches are padded to
            # their own longest row, so their shapes differ.
            if "dispatch_batches" in str(error):
                raise ConfigError(
                    "one process was to read batches for all, and theirs differ in length",
                    where="train.accelerator_config: dispatch_batches",
                    why=first_line(error),
                    fix="~train.accelerator_config",
                ) from error
            # Rows of a data set were looked at before training; only a stream brings new ones here.
            if isinstance(error, FinetuneError) or isinstance(self.train_dataset, Dataset):
                raise
            raise not_formatted("train", error, step=self.state.global_step) from error


class ByLength(LengthGroupedSampler):
    """Rows grouped by length, in an order that seed and epoch make.

    Transformers (5.23) draws it from torch's global generator, which has gone further in a run that
    goes on in mid-epoch: of another order, some rows are trained on again and others never.
    """

    def __init__(self, like: LengthGroupedSampler, seed: int) -> None:
        super().__init__(like.batch_size, lengths=like.lengths)
        self.seed, self.epoch = seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Called by Accelerate's loaders."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        self.generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return super().__iter__()


def embeddings_of(model: Any) -> list[torch.nn.Parameter]:
    """Parameters of embeddings and output head that train."""
    # The head, too: where it is tied, it is the same parameter, and two rates could not both hold.
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    return [p for end in ends if end is not None for p in end.parameters() if p.requires_grad]


def give_rate(optimizer: Any, parameters: list[Any], rate: float) -> None:
    """Move parameters of an optimizer into groups with a learning rate of their own.

    Raises:
        ConfigError: there are none.
    """
    if not parameters:
        raise ConfigError(
            "a learning rate is given for embeddings, and none of them trains",
            where="train.embedding_learning_rate",
            why="adapters leave them as they are",
            fix="lora.modules_to_save=[embed_tokens, lm_head], or ~train.embedding_learning_rate",
        )
    # By identity: comparing tensors with `in` compares their numbers.
    own = {id(p) for p in parameters}
    # A copy of the list, since groups are added to it meanwhile.
    for group in list(optimizer.param_groups):
        inside = [p for p in group["params"] if id(p) in own]
        if len(inside) == len(group["params"]):
            group["lr"] = rate if inside else group["lr"]
        elif inside:
            group["params"] = [p for p in group["params"] if id(p) not in own]
            # With the group's other settings, weight decay above all. The schedule, which is made
            # later, takes each group's rate as its first one.
            optimizer.add_param_group({**group, "params": inside, "lr": rate})
