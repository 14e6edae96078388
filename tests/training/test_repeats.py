"""Rows that several processes train on once more: as many as Accelerate hands out."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest
from accelerate.data_loader import BatchSamplerShard, prepare_data_loader
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from finetune.training.health.monitor import HealthMonitor, repeated_rows, repeats_line


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
        accelerator=accelerator, model=model, training_step=None, _get_grad_norm=None,
        _save_checkpoint=None,
    )  # fmt: skip
    args = SimpleNamespace(gradient_accumulation_steps=1)
    for zero in (False, True):
        state = SimpleNamespace(max_steps=4, is_world_process_zero=zero)
        monitor = HealthMonitor(trainer, say=said.append)
        monitor.on_train_begin(args, state, None, train_dataloader=loader_of(5, 2))
        monitor.close()
    (line,) = said
    assert line.startswith("each epoch of 5 rows has 3 of them once more")
