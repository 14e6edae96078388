"""Each upstream trap planted behind a conversion whose own protection is off: what the proof says.

Conversion, planner and patches avoid the traps by construction, so that no trap test needs the
proof. Here the conversion does what the other libraries do, unchecked, and the proof is alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from finetune import get_receipt
from finetune.errors import ProofError
from finetune.precision import convert
from finetune.precision.convert import Conversion
from finetune.precision.engines.base import Fp8Mixin
from finetune.precision.engines.emulated import EmulatedMixin
from finetune.precision.engines.observers import in_backward
from finetune.precision.model.layers import linear_records
from finetune.precision.model.swap import unswap
from tests.conftest import train

Damage = Callable[[Conversion], Any]


@pytest.fixture
def trapped(make_llama, setup_backend, monkeypatch):
    """A function: train some steps behind a conversion that does a damage."""

    def run(
        damage: Damage, *, rank: int = 0, checkpointing: bool = False, tie: bool = False
    ) -> None:
        convert_well = Conversion.apply

        def badly(self: Conversion) -> None:
            convert_well(self)
            damage(self)

        monkeypatch.setattr(Conversion, "apply", badly)
        accelerator = setup_backend("emulated")
        model = make_llama(tie=tie)
        if rank:
            model = get_peft_model(model, LoraConfig(r=rank, target_modules=["q_proj", "v_proj"]))
        if checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": False})
        trained = [p for p in model.parameters() if p.requires_grad]
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(trained, lr=1e-3))
        train(accelerator, model, optimizer, 4)

    return run


def converted(conversion: Conversion) -> list[Any]:
    return [m for m in conversion.model.modules() if isinstance(m, Fp8Mixin)]


def convert_nothing(conversion: Conversion) -> None:
    for layer in converted(conversion):
        unswap(layer)


def stop_at_an_odd_sibling(conversion: Conversion) -> None:
    for layer in converted(conversion)[-3:]:
        unswap(layer)


def make_weights_again(conversion: Conversion) -> None:
    for layer in converted(conversion):
        layer.weight = nn.Parameter(layer.weight.detach().clone())


def untie_the_head(conversion: Conversion) -> None:
    head = conversion.model.get_output_embeddings()
    head.weight = nn.Parameter(head.weight.detach().clone())


def train_the_base(conversion: Conversion) -> None:
    conversion.model.requires_grad_(True)


def convert_adapters(conversion: Conversion) -> None:
    like = converted(conversion)[0]
    for record in linear_records(conversion.model):
        name, module = record.name, record.owner
        if "lora_" in name:
            calls = type(like.fp8_calls)()
            convert.swap(module, EmulatedMixin, **{**_facts(like), "fp8_calls": calls})


def _facts(layer: Any) -> dict[str, Any]:
    return {key: value for key, value in vars(layer).items() if key.startswith("fp8_")}


TRAPS: dict[str, tuple[Damage, dict[str, Any], str]] = {
    "1 and 14: FP8 is asked for, flagged, and nothing runs in it": (
        *(convert_nothing, {}, "FP8 was requested and did not run"),
    ),
    "2: weights leave the optimizer": (
        *(make_weights_again, {}, "trainable parameters are not in the optimizer"),
    ),
    "3: a frozen base becomes trainable": (
        *(train_the_base, {"rank": 8}, "not in the optimizer|choice of which parameters train"),
    ),
    "4: adapters are converted": (
        *(convert_adapters, {"rank": 16}, r"lora_A.default ran in FP8, planned in high"),
    ),
    "5: the tied head is cloned": (
        *(untie_the_head, {"tie": True}, "lm_head.weight"),
    ),
    "6: an odd shape stops the conversion of later siblings": (
        *(stop_at_an_odd_sibling, {}, r"FP8 was requested[\s\S]*fprop=bf16"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("trap", TRAPS)
def test_the_proof_sees_a_trap_that_conversion_does_not_prevent(trapped, trap) -> None:
    damage, settings, said = TRAPS[trap]
    with pytest.raises(ProofError, match=said):
        trapped(damage, **settings)
    assert get_receipt().status.startswith("stopped")


def test_the_proof_sees_a_recomputation_outside_of_fp8(trapped, monkeypatch) -> None:
    """Trap 8: the forward ran in FP8, and what the checkpoint computes again does not."""
    in_fp8 = EmulatedMixin.forward

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight) if in_backward() else in_fp8(self, x)

    monkeypatch.setattr(EmulatedMixin, "forward", forward)
    with pytest.raises((ProofError, torch.utils.checkpoint.CheckpointError)) as caught:
        trapped(lambda _: None, checkpointing=True)
    if isinstance(caught.value, ProofError):
        assert "bf16+fp8" in str(caught.value)


def test_without_a_trap_the_unchecked_conversion_is_proven(trapped) -> None:
    trapped(lambda _: None)
    assert get_receipt().status == "proven"
