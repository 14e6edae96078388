"""Losses of sharded processes: those of one process, to what BF16 compute allows, in all digits."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from peft import LoraConfig, get_peft_model
from torch.distributed.fsdp import MixedPrecisionPolicy

from finetune.errors import PrecisionError
from finetune.precision.settings import PrecisionConfig
from finetune.precision.stored.linear import store
from finetune.training.helper import session
from finetune.training.helper.checkpoint_weights import refuse_sharded_codes
from finetune.training.helper.patches import (
    _check_accelerator,
    _checkpointed_by_models,
    _complete_policy,
    _refuse_copies,
)
from tests.forked import ended, start, start_ranks
from tests.training.test_processes import GLOBAL_BATCH, SETTINGS
from tests.training.test_sharded_checkpoints import sharded_on_cpus

SHORT = (
    "train.max_steps=3", "train.eval_strategy=steps", "train.eval_steps=2", "eval.at_start=true",
    "train.per_device_eval_batch_size=4",
)  # fmt: skip
FSDP = "train.fsdp=true"
OF_MODEL = (FSDP, "train.gradient_checkpointing=true")
OF_FSDP = (FSDP, "train.fsdp_config={version: 2, activation_checkpointing: true}")
FULL_FP8 = ("tiny_full_fp8", "precision.scaling=rowwise")


def first_values(run: Path) -> dict[str, float]:
    """Eval loss, loss and gradient norm before any weight has moved."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {
        key: next(row[key] for row in rows if key in row)
        for key in ("eval_loss", "loss", "grad_norm")
    }


def train(folder: Path, recipe: tuple[str, ...], *words: str, processes: int) -> Path:
    folder.mkdir()
    batch = f"train.per_device_train_batch_size={GLOBAL_BATCH // processes}"
    words = (*recipe, *SETTINGS, *SHORT, batch, *words)
    if processes == 1:
        codes = ended([start(folder, *words)])
    else:
        codes = ended(start_ranks(folder, *words, processes=processes, before=sharded_on_cpus))
    assert codes == [0] * processes, "".join(f.read_text() for f in folder.glob("*.txt"))[-3000:]
    (made,) = folder.glob("runs/*/*")
    assert json.loads((made / "receipt.json").read_text())["status"] == "proven"
    return made


@pytest.mark.long
@pytest.mark.parametrize(
    ("recipe", "ways"),
    [
        (FULL_FP8, [(FSDP,), OF_MODEL]),
        (("tiny_full_bf16",), [OF_FSDP]),
        (("tiny_lora_fp8",), [(FSDP,), OF_FSDP]),
    ],
)
def test_losses_of_two_sharded_processes_are_those_of_one(recipe, ways, tmp_path) -> None:
    """Accelerate has FSDP2 round them to BF16's three digits: an eval loss of 5.0 for 4.9597.

    The one process has weights in BF16, as FSDP2 gathers them. So nothing but the order of sums
    differs, and of the gradient norm the type that gradients are computed in.
    """
    one = first_values(train(tmp_path / "one", recipe, "model.dtype=bfloat16", processes=1))
    for number, words in enumerate(ways):
        run = train(tmp_path / f"two-{number}", recipe, *words, processes=2)
        two = first_values(run)
        assert two.pop("grad_norm") == pytest.approx(one["grad_norm"], rel=0.01)
        assert two == pytest.approx({key: one[key] for key in two}, rel=1e-5)
        receipt = json.loads((run / "receipt.json").read_text())
        assert (receipt["conditions"]["checkpointing"]["layers"] > 0) == (words != (FSDP,))


# --------------------------------------------------------------------------- plugins of a script


def plugin_of(**settings: Any) -> Any:
    return FullyShardedDataParallelPlugin(fsdp_version=2, **settings)


def accelerator_of(plugin: Any) -> Any:
    """What is looked at of an `Accelerator`, which shards in several processes alone."""
    return SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin))


FP8 = PrecisionConfig(compute="fp8")
LOW = torch.bfloat16


@pytest.mark.parametrize("output", [LOW, None, torch.float32])
def test_results_under_a_policy_of_a_script_keep_their_type(output) -> None:
    policy = MixedPrecisionPolicy(param_dtype=LOW, reduce_dtype=torch.float32, output_dtype=output)
    plugin = plugin_of(mixed_precision_policy=policy)
    _complete_policy(accelerator_of(plugin), FP8, chosen=True)
    kept = plugin.mixed_precision_policy
    assert kept.output_dtype is (None if output is LOW else output)
    assert (kept.param_dtype, kept.reduce_dtype) == (LOW, torch.float32)


@pytest.mark.parametrize("chosen", [None, torch.bfloat16])
def test_gradients_are_summed_in_float32_unless_a_script_chose(chosen, monkeypatch) -> None:
    """Accelerate's own policy sums them in BF16, over processes and micro-batches."""

    def with_plugin(self: Any, fsdp_plugin: Any = None, **_: Any) -> None:
        if fsdp_plugin.mixed_precision_policy is None:  # what Accelerate does where it shards
            fsdp_plugin.set_mixed_precision("bf16")
            assert fsdp_plugin.mixed_precision_policy.reduce_dtype is LOW
        self.state = SimpleNamespace(fsdp_plugin=fsdp_plugin, num_processes=1)
        self.register_save_state_pre_hook = self.register_load_state_pre_hook = lambda _: None

    monkeypatch.setattr(Accelerator, "__init__", with_plugin)
    session.install(PrecisionConfig(compute="fp8", backend="emulated", emulation="allow"))
    policy = chosen and MixedPrecisionPolicy(param_dtype=LOW, reduce_dtype=chosen)
    plugin = plugin_of(mixed_precision_policy=policy)
    try:
        Accelerator(fsdp_plugin=plugin)
    finally:
        session.uninstall()  # while the class is as it was found
    assert plugin.mixed_precision_policy.reduce_dtype is (chosen or torch.float32)
    assert plugin.mixed_precision_policy.param_dtype is LOW


@pytest.mark.parametrize("gathered", [torch.float32, torch.float16, None])
def test_a_policy_that_gathers_weights_in_another_type_is_refused(gathered) -> None:
    plugin = plugin_of(mixed_precision_policy=MixedPrecisionPolicy(param_dtype=gathered))
    with pytest.raises(PrecisionError, match=r"another type[\s\S]*leave mixed_precision_policy"):
        _complete_policy(accelerator_of(plugin), FP8, chosen=True)


def test_checkpointing_by_fsdp_of_a_model_that_has_none_is_refused() -> None:
    plugin = plugin_of(activation_checkpointing=True)
    refused = pytest.raises(PrecisionError, match=r"Linear[\s\S]*leave activation_checkpointing")
    with refused, _checkpointed_by_models(plugin, [torch.nn.Linear(4, 4)]):
        pass


# ---------------------------------------------------------------------------------- what is refused


def test_the_older_fsdp_of_a_script_is_refused() -> None:
    plugin = SimpleNamespace(fsdp_version=1)
    accelerator = SimpleNamespace(
        num_processes=1, distributed_type="FSDP", state=SimpleNamespace(fsdp_plugin=plugin)
    )
    with pytest.raises(PrecisionError, match=r"FSDP1 is not supported[\s\S]*fsdp_version=2"):
        _check_accelerator(accelerator, SimpleNamespace(precision=FP8), known=True)


@pytest.mark.parametrize(("kind", "refused"), [("MULTI_CPU", True), ("FSDP", False), ("NO", False)])
def test_sharding_that_accelerate_would_leave_out_is_refused(kind, refused) -> None:
    processes = 1 if kind == "NO" else 2
    accelerator = SimpleNamespace(num_processes=processes, distributed_type=kind)
    with pytest.raises(PrecisionError, match="a copy of") if refused else nullcontext():
        _refuse_copies(accelerator)


def test_codes_that_fsdp_would_save_without_scales_are_refused(make_llama) -> None:
    """Of a model without adapters: Transformers saved bytes, which nothing can read."""
    model = make_llama()
    store(model.model.layers[0].mlp.up_proj)
    with pytest.raises(PrecisionError, match=r"FSDP2 cannot save[\s\S]*without their scales"):
        refuse_sharded_codes(model)
    refuse_sharded_codes(get_peft_model(model, LoraConfig(target_modules=["q_proj"])))
    refuse_sharded_codes(make_llama())
