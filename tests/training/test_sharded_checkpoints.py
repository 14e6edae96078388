"""FSDP2 over gloo: its checkpoints are those of other runs, in any number of processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torchao.optim  # noqa: F401, which allows its states to be read
from safetensors.torch import load_file

from finetune.precision.proof.movement import is_torchao
from finetune.runs.checkpoints import CHECKPOINTS
from tests.forked import ended, start, start_ranks
from tests.training.test_processes import GLOBAL_BATCH, SAVING, SETTINGS, losses, weights

pytestmark = pytest.mark.long

SHARDED = "train.fsdp=true"
CODES = ("tiny_full_fp8", "precision.scaling=tensorwise", "precision.fp8_params=true")
FREED = "resume.allow=[processes,train.per_device_train_batch_size]"


def sharded_on_cpus() -> None:
    """Let Accelerate, which shards on GPUs alone, take CPUs for some."""
    from accelerate import DistributedType, PartialState

    from finetune.config import sft

    plain = PartialState.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **kwargs)
        if self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.MULTI_GPU

    PartialState.__init__ = init
    sft.refuse_sharding_on_cpu = lambda: None


def saved_again() -> None:
    """Save what was loaded, before anything is trained."""
    from finetune.training.checkpoints.writing import CheckpointKeeper

    sharded_on_cpus()
    plain = CheckpointKeeper.on_train_begin

    def on_train_begin(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        plain(self, args, state, control, **kwargs)
        self.trainer._save_checkpoint(self.trainer.model, None)

    CheckpointKeeper.on_train_begin = on_train_begin


def train(folder: Path, *words: str, processes: int) -> Path:
    """A run folder of so many processes, which shard where the recipe says so."""
    before = set(folder.glob("runs/*/*"))
    words = (*words, f"train.per_device_train_batch_size={GLOBAL_BATCH // processes}")
    hook = saved_again if words[0] == "resume" else sharded_on_cpus
    if processes > 1:
        codes = ended(start_ranks(folder, *words, processes=processes, before=hook))
    else:
        codes = ended([start(folder, *words, before=hook)])
    assert codes == [0] * processes, "".join(f.read_text() for f in folder.glob("*.txt"))[-3000:]
    (made,) = set(folder.glob("runs/*/*")) - before
    return made


def state(run: Path, step: int) -> dict[str, Any]:
    """Weights, moments and schedule of a checkpoint, and a scaling state, by name."""
    folder = run / CHECKPOINTS / f"checkpoint-{step}"
    found: dict[str, Any] = {}
    for file in folder.glob("*.safetensors"):
        if not file.stem.rpartition("_")[2].isdigit():  # of another process
            found |= {f"{file.stem}/{name}": value for name, value in load_file(file).items()}
    for name in ("optimizer.pt", "scheduler.pt"):
        found |= _flat(name, torch.load(folder / name, weights_only=True))
    return found


def _flat(at: str, value: Any) -> dict[str, Any]:
    if isinstance(value, dict | list):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        return {k: v for key, inner in pairs for k, v in _flat(f"{at}/{key}", inner).items()}
    return {at: value}


def differing(first: dict[str, Any], second: dict[str, Any]) -> list[str]:
    def same(a: Any, b: Any) -> bool:
        if is_torchao(a) or is_torchao(b):
            return type(a) is type(b) and differing(vars(a), vars(b)) == []
        if isinstance(a, torch.Tensor):
            return a.dtype == b.dtype and torch.equal(a, b)
        return a == b

    return [
        name
        for name in sorted({*first, *second})
        if name not in first or name not in second or not same(first[name], second[name])
    ]


@pytest.mark.parametrize(
    ("recipe", "within"),
    # FSDP2 gathers weights in BF16, which the first updates are too small to show in; one process
    # casts the float32 weight to FP8 itself.
    [
        (("tiny_full_fp8",), 0.06),
        # Gathered as codes; of masters in host memory where one process trains.
        (CODES, 0.06),
        (("tiny_lora_fp8",), 0.02),
        (("tiny_full_bf16",), 0.02),
    ],
)
def test_a_sharded_checkpoint_goes_on_as_two_one_two_and_four(recipe, within, tmp_path) -> None:
    """Weights, moments, schedule and scales to the bit; as two again the losses too."""
    run = whole = train(tmp_path, *recipe, *SETTINGS, *SAVING, SHARDED, processes=2)
    expected = losses(whole)
    legs = ((2, 2, SHARDED), (2, 1, "~train.fsdp"), (4, 2, SHARDED), (6, 4, SHARDED))
    for step, processes, sharding in legs:
        source = whole if processes == 2 and step == 2 else run
        words = ("resume", str(source), "--checkpoint", str(step), FREED, sharding)
        made = train(tmp_path, *words, processes=processes)
        assert differing(state(source, step), state(made, step)) == []
        found = losses(made)
        assert list(found) == list(range(1, 9))
        assert found == pytest.approx({s: expected[s] for s in found}, rel=within)
        if source is whole and processes == 2:
            assert found == {s: expected[s] for s in found}
            assert differing(dict(weights(whole)), dict(weights(made))) == []
        else:
            run = made


@pytest.mark.parametrize("optim", ["adamw_torch_8bit", "adamw_torch_4bit"])
def test_states_in_few_bits_go_on_sharded_and_whole(optim, tmp_path) -> None:
    """Codes and scales to the bit, from two processes to one and back to two, and two as two."""
    chosen = f"train.optim={optim}"
    whole = train(tmp_path, "tiny_full_fp8", *SETTINGS, *SAVING, SHARDED, chosen, processes=2)
    saved = state(whole, 2)
    assert sum(is_torchao(value) for value in saved.values()) > 20
    again = train(tmp_path, "resume", str(whole), "--checkpoint", "2", FREED, SHARDED, processes=2)
    assert differing(state(again, 2), saved) == []
    expected = losses(whole)
    assert losses(again) == expected
    one = train(
        tmp_path, "resume", str(whole), "--checkpoint", "2", FREED, "~train.fsdp", processes=1
    )
    assert differing(state(one, 2), saved) == []
    back = train(tmp_path, "resume", str(one), "--checkpoint", "4", FREED, SHARDED, processes=2)
    assert differing(state(back, 4), state(one, 4)) == []
