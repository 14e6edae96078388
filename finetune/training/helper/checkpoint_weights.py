"""Weights of a `Trainer`'s checkpoint, all of them or an error.

Transformers 5.23 gives the tensors of a checkpoint to `load_state_dict(..., strict=False)` and logs
what was missing. Three kinds of checkpoints lose weights in this way, and training continues:

    experts       saved under the names of the published model (`block_sparse_moe.experts.0.w1`),
                  which the model has in one parameter (`mlp.experts.gate_up_proj`): experts and
                  routers stay as they were before the checkpoint
    FP8 codes     of frozen weights that `precision.frozen=fp8` has stored: a model that is not
                  prepared yet takes them for numbers, without their scales
    adapters      that are on other layers than the model's: they stay as they were drawn, and PEFT
                  reports no missing names. So does a whole model where adapters train

So the names of a checkpoint are compared with the model's. Where they are others, the model is read
from the checkpoint as `from_pretrained` reads any, and its tensors are taken over; codes are loaded
into a model that is prepared.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import nn

from finetune.errors import CheckpointError, PrecisionError, some
from finetune.hardware.unpromised import stands
from finetune.precision.model.plan import PrecisionPlan
from finetune.precision.stored.linear import CodesMixin, iter_scales
from finetune.runs.folder import json_of

if TYPE_CHECKING:
    from finetune.training.helper.replacing import Patches

CODES = "F8_E4M3"
"""Type of FP8 codes in the header of a safetensors file."""

Prepare = Callable[[nn.Module], Any]


def load_all_weights(patches: Patches, prepare: Prepare | None) -> None:
    """Let every `Trainer` load all weights of a checkpoint, or raise a `CheckpointError`.

    Args:
        prepare: converts a model whose frozen weights are to be stored in FP8; None if the
            session's precision stores none.
    """
    from transformers import Trainer

    def make_load(original: Callable[..., Any]) -> Callable[..., Any]:
        """`_load_from_checkpoint(checkpoint, model)`, and `_load_best_model()`."""

        def load(trainer: Any, checkpoint: str = "", model: Any = None) -> None:
            given = ((checkpoint,) if checkpoint else ()) + (() if model is None else (model,))
            own = trainer.accelerator.unwrap_model(trainer.model if model is None else model)
            folder = checkpoint or str(trainer.state.best_model_checkpoint)
            # Sharded checkpoints are read by `training.checkpoints.sharded`.
            if trainer.is_fsdp_enabled or not _load_renamed(own, folder, prepare):
                original(trainer, *given)

        return load

    if stands("weights of checkpoints"):
        patches.replace(Trainer, "_load_from_checkpoint", make_load)
        patches.replace(Trainer, "_load_best_model", make_load)


@torch.no_grad()
def _load_renamed(model: Any, checkpoint: str, prepare: Prepare | None) -> bool:
    """Load a checkpoint whose weights have other names than the model's; False if they have not.

    A second model is read in float32, which is exact, and takes its memory meanwhile.

    Raises:
        CheckpointError: file and model differ in their weights.
    """
    from transformers import PreTrainedModel

    import finetune.storage.loading  # noqa: F401, which lets Transformers read FP8 codes

    if saves_adapters(model):
        check_adapters(model, Path(checkpoint))
        return False
    # From the headers of the files alone, which costs no reading of tensors.
    types = _saved_types(checkpoint)
    codes = {name for name, dtype in types.items() if dtype == CODES}
    if prepare is not None and codes and not _codes_of(model):
        prepare(model)
    # `load_state_dict` would copy codes into BF16 weights as numbers up to 448.
    if plain_codes := codes & model.state_dict().keys() - _codes_of(model):
        raise CheckpointError(
            "frozen weights of the checkpoint are FP8 codes, and the model's are not",
            where=f"{checkpoint}: {some(sorted(plain_codes))}",
            why="codes are no numbers without their scales",
            fix="frozen='fp8', as in the run that saved it, with the same layers frozen",
        )
    lost = _difference(model, types)
    if not lost:
        return False
    if isinstance(model, PreTrainedModel):
        load: Any = type(model).from_pretrained
        # As `from_pretrained` reads any model: it knows the older names of each architecture. In
        # float32, so that no type of a trained weight is narrowed on the way.
        read, report = load(checkpoint, dtype=torch.float32, output_loading_info=True)
        kinds = ("missing_keys", "unexpected_keys", "mismatched_keys")
        lost = sorted({str(key) for kind in kinds for key in report[kind]})
        lost = lost or _difference(model, dict.fromkeys(read.state_dict(), ""))
        if not lost:
            model.load_state_dict(read.state_dict(), strict=False)  # tied ones stand there once
            return True
    raise _other_weights(Path(checkpoint), some(lost))


def check_adapters(model: Any, checkpoint: Path) -> None:
    """Compare the adapters of a checkpoint with those of a model.

    Raises:
        CheckpointError: it has others, or is of a whole model.
    """
    from peft import PeftModel, get_peft_model_state_dict

    if not isinstance(model, PeftModel):  # Transformers reads nothing into its own integration
        return
    # Transformers 5.23 loads a whole model also in place of adapters that lie beside it.
    for file in (*checkpoint.glob("model*.safetensors"), *checkpoint.glob("pytorch_model*.bin")):
        raise _other_weights(checkpoint, f"{file.name}, a whole model, and this one has adapters")
    for name in model.peft_config:
        file = checkpoint / ("" if name == "default" else name) / "adapter_model.safetensors"
        if not file.is_file():
            continue
        own = {*get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)}
        with safe_open(file, framework="pt") as opened:
            saved = {*opened.keys()} - {*model.state_dict()}  # embeddings may be saved beside them
        if differing := sorted(own ^ saved):
            raise _other_weights(checkpoint, some(differing))
        began, own = json_of(file.with_name("adapter_config.json")), model.peft_config[name]
        for key in ("lora_alpha", "use_rslora", "use_dora"):
            now = getattr(own, key, None)
            # PEFT's files have no alpha in their tensors: the same adapter is added with another
            # weight.
            if began.get("r") == getattr(own, "r", 0) and began.get(key, now) != now:
                said = f"! {checkpoint} was trained with {key}={began[key]}, and resumes with"
                warnings.warn(f"{said} {key}={now}: its adapters weigh otherwise", stacklevel=2)


def _other_weights(checkpoint: Path, which: str) -> CheckpointError:
    return CheckpointError(
        "the checkpoint does not have the model's weights, all of them and no others",
        where=f"{checkpoint}: {which}",
        why="Transformers would load the others and log the difference: training would continue "
        "with weights of before the checkpoint",
        fix="the model that the checkpoint was saved of, and no files of another one beside it",
    )


def refuse_unsaved_experts(model: nn.Module, plan: PrecisionPlan) -> None:
    """Refuse to train beside frozen experts in FP8 where checkpoints hold the whole model.

    Raises:
        PrecisionError: Transformers saves experts one by one, under the names of the published
            model, and would do so with codes, whose scales are of all.
    """
    experts = [layer.name for layer in plan.stored if layer.kind == "parameter" and layer.stored]
    if experts and not saves_adapters(model):
        raise PrecisionError(
            "frozen experts stored in FP8 cannot be saved with the model they are in",
            where=f"precision.frozen=fp8, without adapters: {some(experts)}",
            why="no checkpoint could be read again",
            fix="precision.frozen=bf16; or train adapters, whose checkpoints leave the base out",
        )


def refuse_sharded_codes(model: nn.Module) -> None:
    """Refuse to shard codes that checkpoints would have to hold: FSDP2 moves them without scales.

    Raises:
        PrecisionError: the model trains beside frozen weights in FP8, without adapters.
    """
    trains = any(p.requires_grad for p in model.parameters())
    if trains and not saves_adapters(model) and next(iter_scales(model), None) is not None:
        raise PrecisionError(
            "FSDP2 cannot save a model whose frozen weights are stored in FP8",
            where="precision.frozen=fp8 without adapters, under FSDP2",
            why="it moves their codes without their scales",
            fix="precision.frozen=bf16 (frozen='bf16'); or lora.r=8, since checkpoints of adapters "
            "leave the base out; or DDP (~train.fsdp ~train.fsdp_config)",
        )


def saves_adapters(model: nn.Module) -> bool:
    """True if the checkpoints of a model hold its adapters alone."""
    from peft import PeftModel

    return isinstance(model, PeftModel) or bool(getattr(model, "peft_config", None))


def _saved_types(checkpoint: str) -> dict[str, str]:
    """Name -> type of the tensors in a checkpoint's files of a whole model."""
    found: dict[str, str] = {}
    for file in Path(checkpoint).glob("model*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            found |= {name: opened.get_slice(name).get_dtype() for name in opened.keys()}  # noqa: SIM118
    return found


def _codes_of(model: nn.Module) -> set[str]:
    return {
        f"{name}.{local}"
        for name, module in model.named_modules()
        if isinstance(module, CodesMixin)
        for local in module.code_names()
    }


def _difference(model: nn.Module, types: dict[str, str]) -> list[str]:
    """Names that only one of the two has; tied weights are saved once."""
    if not types:
        return []
    state = model.state_dict()
    # By address: a tied weight has several names in the model, and one in the file.
    present = {state[name].data_ptr() for name in types if name in state}
    missing = [n for n, t in state.items() if n not in types and t.data_ptr() not in present]
    return [*missing, *(name for name in types if name not in state)]
