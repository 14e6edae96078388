"""Preflight: facts and checks of a run before anything is loaded.

    extras, device ─┐
    settings ───────┼─> Preflight(resolution, plan, attention, meta_model) ─> memory (a `Forecast`)
    precision ──────┤
    attention ──────┘

`meta_model` is the model with its adapters on the meta device: shapes without memory. Resolution
and plan are made here once; session, model and receipt use these.
"""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from finetune.config.methods import method_of
from finetune.config.optimizers import check_optimizer, chosen
from finetune.config.schema import RunConfig, Storage
from finetune.config.sft import fsdp_settings
from finetune.config.train_section import (
    check_batch,
    decides_checkpointing,
    with_checkpointing,
)
from finetune.errors import ConfigError, FinetuneError, PlanError, PrecisionError, did_you_mean
from finetune.hardware.device import Device, processes, refuse_lone_process
from finetune.hardware.requirements import Resolution, check_here, check_launcher, resolve
from finetune.precision.model.layers import plain_name
from finetune.precision.model.plan import PrecisionPlan
from finetune.precision.planner import plan, refuse_half_weights
from finetune.precision.settings import PrecisionConfig
from finetune.training.helper.optimizer import adamw_host
from finetune.training.helper.patches import WHY_NOT_FSDP1, engine_refused, masters_copied
from finetune.training.helper.references import refuse_evaluation_apart
from finetune.training.model import Attention, meta_model, resolve_attention
from finetune.training.run.early_stopping import check_early_stopping
from finetune.training.scope import notes

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Planned:
    """A run's settings and device, its model on the meta device, and the plan."""

    config: RunConfig
    device: Device
    plan: PrecisionPlan
    meta_model: nn.Module


@dataclass(frozen=True)
class Preflight(Planned):
    """Facts of a run before anything is loaded.

    Attributes:
        processes: number of processes that train together.
        config: the run's, with `train.gradient_checkpointing` decided.
        resolution: executed precision, with reasons; `plan` is of that precision.
        attention: executed attention, with its reason.
        notes: what does not train although one might think so (`finetune.training.scope`), and
            GPUs that do not.
    """

    processes: int
    resolution: Resolution
    attention: Attention
    notes: list[str]


class Forecast(Protocol):
    """Interface of a memory estimator; `finetune.estimator.gate` implements it."""

    def explain(self, error: PrecisionError, run: Planned) -> PrecisionError:
        """Return the error of a rejected precision, extended if memory is short, too."""
        ...

    def needs_checkpointing(self, run: Preflight) -> bool:
        """True unless a step that keeps all activations fits into free memory."""
        ...

    def check(self, run: Preflight) -> None:
        """Raise `MemoryShortError` for a run that cannot fit into free memory."""
        ...

    def how_to_shrink(self, run: Planned) -> str:
        """Return what to change so that a run needs less memory."""
        ...

    def predicted(self, run: Preflight, batch: Any) -> dict[str, Any]:
        """Predicted keys of `Receipt.memory` for a `Batch` of `training.health.memory_meter`."""
        ...


def preflight(
    config: RunConfig, device: Device, *, forecast: Forecast | None = None, force: bool = False
) -> Preflight:
    """Reject what cannot work, before anything is loaded.

    Args:
        forecast: memory estimator; memory is not checked without it.
        force: train even if memory is expected to be too small.

    Raises:
        PlanError: a choice of layers cannot be honored.
        ConfigError: contradicting settings, or an optimizer or attention that cannot run here.
        PrecisionError: the precision is unavailable here, or not with these weights.
        MemoryShortError: memory is too small.
        MissingExtraError: a setting's optional library is not installed.
    """
    check_sharding(config)
    _refuse_launch(config)
    check_here(config, device)
    model = meta_model(config)
    try:
        resolution = resolve(config.precision, device)
    except FinetuneError as refusal:
        # A machine without FP8 hides no mistake in the recipe, which another machine would show.
        made = check_settings(config, model)  # contradicting settings are reported first
        if forecast is not None and isinstance(refusal, PrecisionError):
            raise forecast.explain(refusal, Planned(config, device, made, model)) from None
        raise
    made = check_settings(config, model, None if resolution.fallback else resolution.precision)
    check_launcher(resolution.precision, device)
    if resolution.precision.fp8_params and processes() > 1 and not config.train.fsdp:
        raise masters_copied(processes())
    if resolution.precision.fp8_params:
        _refuse_slow_update(config, model)
    if resolution.fallback:  # settings were checked as requested; BF16 is executed
        made = plan(model, resolution.precision)
    attention = resolve_attention(config, model, device)
    left_out = [*idle_gpus(device), *notes(model, config)]
    run = Preflight(config, device, made, model, processes(), resolution, attention, left_out)
    if decides_checkpointing(config):
        by_fsdp = bool(config.train.fsdp) and fsdp_settings(config.train).checkpointing
        # Transformers refuses both at once.
        on = not by_fsdp and (forecast is None or forecast.needs_checkpointing(run))
        run = replace(run, config=with_checkpointing(config, on))
    if forecast is not None and not force:
        forecast.check(run)
    return run


MANY = 200_000_000
"""Numbers in host memory whose update, without the compiled one, takes more than a minute."""
UNCOMPILED = 377e-9
"""Seconds for each by torchao's own function on two cores (`16-updates-in-host-memory.md`)."""


def _refuse_slow_update(config: RunConfig, model: nn.Module) -> None:
    """Reject many weights in host memory where no compiler makes their update fast."""
    count = sum(p.numel() for p in model.parameters() if p.requires_grad)
    if count < MANY or not chosen(config.train).by_torchao:
        return
    with warnings.catch_warnings():  # of few weights it is a warning
        warnings.simplefilter("ignore")
        if adamw_host.library() is not None:
            return
    raise ConfigError(
        f"no C++ compiler here, and an update of {count / 1e9:.1f} billion weights in host memory "
        f"would take about {count * UNCOMPILED / 60:.0f} minutes a step",
        where="precision.fp8_params: true",
        why="the update is compiled for this processor when a run begins; torchao's own function "
        "takes a hundred times as long",
        fix="install one (apt-get install g++), or give the name of one by CXX",
    )


def idle_gpus(device: Device) -> list[str]:
    """A line if this process, alone, leaves GPUs of the machine idle."""
    if device.kind != "cuda" or device.count < 2 or processes() > 1:
        return []
    start = f"torchrun --standalone --nproc_per_node={device.count} -m finetune RECIPE"
    return [f"1 of {device.count} GPUs trains; all of them: {start}"]


def _refuse_launch(config: RunConfig) -> None:
    """Reject a launch that contradicts the recipe: a lone process, or FSDP that it does not set."""
    refuse_lone_process("-m finetune RECIPE")
    # Accelerate takes the variable of its launcher even where the arguments say nothing.
    if os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true" and not config.train.fsdp:
        raise ConfigError(
            "accelerate launch shards the model, and the recipe does not",
            where="distributed_type: FSDP, of accelerate launch; no train.fsdp",
            why="memory, samples and checkpoints follow the recipe",
            fix="distributed_type: MULTI_GPU there, and train.fsdp=true "
            "'train.fsdp_config={version: 2, reshard_after_forward: true}' to shard",
        )


def check_sharding(config: RunConfig) -> None:
    """Reject what shards in another way than FSDP2 by layers, or does not go with that.

    Raises:
        PrecisionError: DeepSpeed, of the recipe or of `accelerate launch`.
        ConfigError: FSDP1, sharding by size, or tasks to score.
    """
    settings, deepspeed = fsdp_settings(config.train), config.train.deepspeed
    if deepspeed:
        raise engine_refused("DeepSpeed", f"train.deepspeed={deepspeed}", "~train.deepspeed, and ")
    if os.environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() in ("true", "1"):
        where = "distributed_type, of accelerate launch"
        raise engine_refused("DeepSpeed", where, "distributed_type: MULTI_GPU there, and ")
    if config.eval.tasks and config.model.head:
        raise ConfigError(
            "a model that scores texts cannot be asked the questions of a task",
            where=f"eval.tasks: {', '.join(config.eval.tasks)}; train.method={config.train.method}",
            fix="~eval.tasks",
        )
    if not config.train.fsdp:
        return
    for key, found, instead, why in (
        ("version", settings.version, 2, WHY_NOT_FSDP1),
        ("auto_wrap_policy", settings.wrapping or BY_LAYERS, BY_LAYERS, "the largest part of a "
         "model is the list of its layers, which torch's fully_shard does not take"),
    ):  # fmt: skip
        if found != instead:
            raise ConfigError(
                f"FSDP was requested with {key} {found}",
                where=f"train.fsdp_config: {key} {found}",
                why=why,
                fix=f"{key}: {instead} there, or ~train.fsdp_config, whose default it is",
            )
    if config.eval.tasks:
        raise ConfigError(
            "tasks cannot be scored on weights that FSDP shards",
            where=f"eval.tasks: {', '.join(config.eval.tasks)}",
            why="lm-eval asks one process, and none has the whole model",
            fix="~eval.tasks, and afterwards python -m finetune evaluate RUN --tasks "
            + ",".join(config.eval.tasks),
        )


def check_settings(
    config: RunConfig, model: Any, precision: PrecisionConfig | None = None
) -> PrecisionPlan:
    """Reject settings that contradict each other on any machine, and plan the model.

    Args:
        model: the model with adapters, also on the meta device.
        precision: resolved precision to plan for; default: the requested one.

    Raises:
        PlanError, ConfigError, PrecisionError: layers, settings or compute cannot be honored.
    """
    check_optimizer(config.train)
    check_batch(config.train)
    check_early_stopping(config.train)
    _check_metric(config)
    method = method_of(config.train)
    if method.reference and config.train.eval_strategy != "no":
        refuse_evaluation_apart(config.precision, where=f"train.method={method.name}")
    check_storage(config, model)
    _check_routers(config, model)
    made = plan(model, precision or config.precision)
    _check_head(made)
    _check_stored_layers(config.model.storage, made)
    if config.precision.compute == "fp16":
        refuse_half_weights(model)
    if config.precision.compute == "fp32" and config.model.dtype != "float32":
        raise ConfigError(
            "FP32 compute was requested of weights that are not float32",
            where=f"model.dtype={config.model.dtype}",
            why="linear layers would multiply in the type of their weights",
            fix="model.dtype=float32, or precision.compute=bf16",
        )
    if config.precision.compute == "fp32" and config.train.tf32:
        raise ConfigError(
            "FP32 compute was requested, and TF32 too",
            where="train.tf32=true",
            why="TF32 keeps 10 of the 23 bits of a float32 operand's significand",
            fix="~train.tf32",
        )
    return made


BY_LAYERS = "TRANSFORMER_BASED_WRAP"
METRICS = ("loss", "runtime", "samples_per_second", "steps_per_second")
"""What an evaluation gives the trainer to choose the best checkpoint by (Transformers 5.23)."""


def _check_metric(config: RunConfig) -> None:
    """Reject a metric that no evaluation has: the trainer would stop at the first of them."""
    name = config.train.metric_for_best_model
    known = (*METRICS, "reward") if method_of(config.train).rewarded else METRICS
    if name is not None and str(name).removeprefix("eval_") not in known:
        raise ConfigError(
            f"no evaluation has the metric {name!r}{did_you_mean(str(name), known)}",
            where=f"train.metric_for_best_model={name}",
            fix=f"one of {', '.join(known)}; ~train.metric_for_best_model takes the eval loss",
        )


def _check_head(made: PrecisionPlan) -> None:
    """Reject a head that `SFTTrainer`, whose loss multiplies by its weight itself, cannot have.

    One that is frozen, and stored as the codes that it multiplies, is served inside that loss
    (`finetune.precision.cases.head`).
    """
    for layer in made.layers:
        adapted = layer.name.endswith(".base_layer")
        in_fp8 = layer.compute == "fp8" and not layer.stored
        if layer.role != "head" or not (adapted or layer.override or in_fp8):
            continue
        name, asked = plain_name(layer.name), f"{layer.compute.upper()} was chosen for"
        fix = (
            "~precision.map.output; a loop of your own, or transformers.Trainer, calls the head's "
        )
        fix += "layer and can have it (setup_fp8_mixed_precision_training(map=...))"
        if adapted:
            asked, fix = "adapters were requested on", "~lora.target_modules, or train the head in "
            fix += f"full: ~lora.target_modules lora.modules_to_save=[{name}]"
        raise PlanError(
            f"{asked} the output head, which SFTTrainer multiplies outside of its layer",
            where=f"lora.target_modules: {name}" if adapted else f"{layer.reason}: {name}",
            why="TRL fuses the head with the loss, so that the logits are never whole. In FP8 "
            "it can have one that is frozen and stored in FP8, as adapters with "
            "precision.frozen=fp8 leave it unless its weight is the embedding's too "
            "(tie_word_embeddings)",
            fix=fix,
        )


def _check_routers(config: RunConfig, model: Any) -> None:
    """Reject reentrant checkpointing of a mixture of experts whose routers have a loss.

    Its forward runs under `no_grad`, and what Transformers collects there (the routers' logits) has
    no graph: the auxiliary loss is added to the loss, and gives no gradient.
    """
    train = config.train
    settings = train.gradient_checkpointing_kwargs or {}
    if not (train.gradient_checkpointing and settings.get("use_reentrant")):
        return
    # None is TRL's default: the model's own coefficient.
    text, weight = model.config.get_text_config(), train.router_aux_loss_coef
    weight = getattr(text, "router_aux_loss_coef", 0.0) if weight is None else weight
    if hasattr(text, "output_router_logits") and weight:
        raise ConfigError(
            "the auxiliary loss of the routers would have no gradient",
            where=f"train.gradient_checkpointing_kwargs={settings}",
            why="reentrant checkpointing runs the layers without a graph, and the routers' logits "
            "are read there",
            fix="~train.gradient_checkpointing_kwargs: checkpointing that is not reentrant; or "
            "train.router_aux_loss_coef=0",
        )


# --------------------------------------------------------------------------------- model.storage
#
# Quantized storage is for a frozen base under adapters with BF16 compute: each weight is
# dequantized before its GEMM. FP8 compute on frozen FP8 codes is `precision.frozen` instead.


def check_storage(config: RunConfig, model: Any) -> None:
    """Reject settings that quantized storage cannot honor.

    Args:
        model: the model with adapters, also on the meta device; its configuration says if the
            checkpoint is itself quantized. Not asked, thus None too, with a `model.storage`.

    Raises:
        ConfigError: quantized weights would have to train, or to be sharded.
        PrecisionError: compute other than BF16.
    """
    compute, storage, lora = config.precision.compute, config.model.storage, config.lora
    where = f"model.storage={storage}"
    if storage is None:
        where = f"quantization_config in config.json of {config.model.name}"
        # Adapters over a published quantized base are what such a base is good for.
        if lora is not None or not getattr(model.config, "quantization_config", None):
            return
    if lora is None:
        raise ConfigError(
            "all weights were to train, and to be stored quantized",
            where=f"{where}, and no section lora",
            why="quantized weights get no gradient, and an update would be lost between two of "
            "their levels",
            fix="lora.r=8: adapters over them, as in the _qlora_ recipes; or ~model.storage, or a "
            "16-bit model.name where it is published quantized",
        )
    if compute != "bf16":
        in_fp8 = " precision.frozen=fp8 precision.scaling=rowwise" if compute == "fp8" else ""
        raise PrecisionError(
            f"{compute.upper()} compute was requested of weights that are stored for BF16 compute",
            where=f"{where}, precision.compute={compute}",
            why="they are dequantized to BF16 and multiplied in BF16",
            fix=f"precision.compute=bf16 (QLoRA), or ~model.storage{in_fp8}",
        )
    if storage == "nf4" and config.train.fsdp:
        raise ConfigError(
            "FSDP cannot shard weights that are stored in NF4",
            where=f"{where}, train.fsdp={config.train.fsdp}",
            why="a shard is a plain tensor, without the scales that stand beside the weight",
            fix="~train.fsdp ~train.fsdp_config: a copy on each GPU (DDP); or ~model.storage",
        )
    if storage == "nf4" and lora.bias != "none":
        raise ConfigError(
            "biases cannot train beside weights that are stored quantized",
            where=f"{where}, lora.bias={lora.bias}",
            why="bitsandbytes casts a layer's bias to BF16 in place, where small updates are lost",
            fix="~lora.bias, or ~model.storage",
        )


def _check_stored_layers(storage: Storage | None, made: PrecisionPlan) -> None:
    """Reject quantized layers that were to train in full, or to compute in a type of their own."""
    if storage is None:
        return
    roles = ("base",) if storage == "fp8" else ("base", "router")  # bitsandbytes takes routers, too
    for layer in made.layers:
        if layer.kind != "linear" or layer.role not in roles:
            continue
        if layer.compute != "bf16" or layer.name.endswith(".original_module"):  # PEFT's
            raise PlanError(
                f"{layer.name!r}, which is stored quantized, was to "
                + ("train in full" if layer.compute == "bf16" else f"compute in {layer.compute}"),
                where=f"model.storage={storage}, {layer.reason}",
                why="it gets no gradient, is dequantized to BF16 and multiplied in BF16",
                fix="~lora.modules_to_save, ~precision.map or bf16 for this layer; or "
                "~model.storage",
            )


def how_to_shrink(forecast: Forecast | None, ahead: Preflight) -> str:
    """What to change in a run that ran out of memory."""
    if forecast is not None:
        return forecast.how_to_shrink(ahead)
    return "train.gradient_checkpointing=true, or a smaller train.per_device_train_batch_size"
