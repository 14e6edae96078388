"""Rows that several processes train on once more, or not together: as Accelerate hands them out."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest
from accelerate.data_loader import (
    BatchSamplerShard,
    prepare_data_loader,
    skip_first_batches,
)
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler
from trl import SFTTrainer

from finetune.config.methods import METHODS
from finetune.data.repeats import (
    EvaluatesOnce,
    refuse_no_batch,
    refuse_uneven,
    repeated_rows,
    repeats_line,
    uneven_batches,
)
from finetune.errors import ConfigError, DataError
from finetune.training.health.monitor import HealthMonitor
from finetune.training.trl_trainer import trainer_of


def loader_of(rows: int, batch: int, *, processes: int = 2, drop: bool = False, **settings):
    """A loader of one process of some, as `accelerator.prepare` makes it."""
    plain = DataLoader(list(range(rows)), batch_size=batch, drop_last=drop)
    settings = {"even_batches": True, **settings}
    return prepare_data_loader(plain, num_processes=processes, process_index=0, **settings)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("processes", [2, 3])
@pytest.mark.parametrize("rows", [1, 5, 12, 13, 24, 25])
def test_the_rows_counted_are_those_handed_out(rows, processes, split) -> None:
    batch = 6 if split else 2
    inner = BatchSampler(SequentialSampler(range(rows)), batch, False)
    seen = Counter(
        row
        for index in range(processes)
        for taken in BatchSamplerShard(inner, processes, index, split_batches=split)
        for row in taken
    )
    loader = loader_of(rows, batch, processes=processes, split_batches=split)
    assert repeated_rows(loader, 100) == (sum(seen.values()) - rows, rows)


def test_nothing_is_said_where_nothing_is_repeated() -> None:
    assert "5 rows has 3 of them once more" in repeats_line(loader_of(5, 2), 2)
    assert not repeats_line(loader_of(5, 2), 1), "the epoch does not end"
    assert not repeats_line(loader_of(8, 2), 9)
    assert not repeats_line(loader_of(5, 2, drop=True), 9)
    assert not repeats_line(loader_of(5, 2, even_batches=False), 9)
    assert not repeats_line(loader_of(5, 2, processes=1), 9)


def test_the_monitor_of_every_trainer_says_it(make_llama) -> None:
    said: list[str] = []
    model = make_llama()
    accelerator = SimpleNamespace(unwrap_model=lambda model: model)
    trainer = SimpleNamespace(
        accelerator=accelerator, model=model, training_step=None,
        _save_checkpoint=None, lr_scheduler=None, model_wrapped=model, args=SimpleNamespace(),
        optimizer=SimpleNamespace(zero_grad=None),
    )  # fmt: skip
    args = SimpleNamespace(gradient_accumulation_steps=1, max_steps=4)
    for zero in (False, True):
        state = SimpleNamespace(max_steps=4, is_world_process_zero=zero)
        monitor = HealthMonitor(trainer, say=said.append)
        monitor.on_train_begin(args, state, None, train_dataloader=loader_of(5, 2))
        monitor.close()
    (line,) = said
    assert line.startswith("each epoch of 5 rows has 3 of them once more")


class Unequal:
    """A script's own batches, of changing sizes: it has neither `batch_size` nor `drop_last`."""

    def __iter__(self):
        yield from ([0], [1, 2], [3])

    def __len__(self) -> int:
        return 3


def test_batches_of_changing_sizes_are_left_alone() -> None:
    plain = DataLoader(list(range(4)), batch_sampler=Unequal())
    loader = prepare_data_loader(plain, num_processes=2, process_index=0)
    assert not repeats_line(loader, 9)
    assert uneven_batches(loader) is None


def test_a_run_that_goes_on_has_the_shares_of_its_first_part() -> None:
    assert repeated_rows(skip_first_batches(loader_of(5, 2), 1), 9) == (3, 5)


def test_rows_that_fill_no_batch_are_refused() -> None:
    """Transformers logs that no step is trained, and the run ended well."""
    args = SimpleNamespace(per_device_train_batch_size=4, world_size=2)
    with pytest.raises(DataError, match=r"7 rows fill no batch[\s\S]*takes 8"):
        refuse_no_batch(loader_of(7, 4, drop=True), args)
    refuse_no_batch(loader_of(8, 4, drop=True), args)


def test_eval_rows_are_not_left_out_with_those_of_training() -> None:
    class Plain:
        args = SimpleNamespace(dataloader_drop_last=True)
        accelerator = SimpleNamespace(num_processes=1)
        padding_free, data_collator = False, None

        def get_eval_dataloader(self) -> bool:
            return self.args.dataloader_drop_last

    trainer = type("Trained", (EvaluatesOnce, Plain), {})()
    assert trainer.get_eval_dataloader() is False
    assert trainer.args.dataloader_drop_last


# ----------------------------------------------------------------------- unequal numbers of batches


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("processes", [2, 3])
@pytest.mark.parametrize("rows", [1, 5, 12, 13, 15, 17, 18, 23, 24, 25])
def test_unequal_batches_are_those_handed_out(rows, processes, split) -> None:
    batch = 6 if split else 2
    inner = BatchSampler(SequentialSampler(range(rows)), batch, False)
    counts = [
        sum(1 for _ in BatchSamplerShard(inner, processes, index, split, even_batches=False))
        for index in range(processes)
    ]
    loader = loader_of(rows, batch, processes=processes, split_batches=split, even_batches=False)
    fewest, most = min(counts), max(counts)
    assert uneven_batches(loader) == (None if fewest == most else (fewest, most))


def test_unequal_batches_are_refused_where_an_epoch_ends() -> None:
    """One process waits for the other for good, or mixes gradients of two epochs."""
    uneven = loader_of(5, 2, even_batches=False)
    with pytest.raises(ConfigError, match=r"fewer batches[\s\S]*1 and 2[\s\S]*leave even_batches"):
        refuse_uneven(uneven, 2)
    refuse_uneven(uneven, 1)
    refuse_uneven(loader_of(5, 2), 9)
    refuse_uneven(loader_of(5, 2, even_batches=False, drop=True), 9)
    refuse_uneven(loader_of(7, 2, even_batches=False), 9)


def test_batches_of_several_lengths_read_by_one_process_are_refused(monkeypatch) -> None:
    def get_batch_samples(*_):
        raise RuntimeError("You can't use batches of different size with `dispatch_batches=True`")

    monkeypatch.setattr(SFTTrainer, "get_batch_samples", get_batch_samples)
    with pytest.raises(ConfigError, match=r"differ in length[\s\S]*~train.accelerator_config"):
        object.__new__(trainer_of(METHODS["sft"])).get_batch_samples()
