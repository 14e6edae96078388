"""Patches during a session: four methods of Accelerate, listed in the receipt.

    Accelerator.__init__        mixed precision is that of the session
    Accelerator.prepare         converts models and watches optimizers, before Accelerate's own
    Accelerator.prepare_model   the same for a single model
    Accelerator.clip_grad_norm_ leaves the factor to an update that can take it (`adamw`)

Accelerate's own FP8 path is not used (FP8_FINDINGS.md has the reasons). The accelerator runs in
BF16 mixed precision, for everything outside FP8 GEMMs. Settings of a trainer that contradict the
session's precision raise here, instead of silently training in another. Written for accelerate
1.15.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from finetune.errors import OrderError, PrecisionError
from finetune.hardware.device import processes
from finetune.hardware.requirements import Resolution
from finetune.precision.model.compiling import never_compiled
from finetune.precision.model.layers import multiplies
from finetune.precision.settings import Compute, PrecisionConfig
from finetune.precision.stored.linear import before_sharding, share_scales
from finetune.training.helper import compute_types
from finetune.training.helper.checkpoint_weights import refuse_sharded_codes
from finetune.training.helper.replacing import replaced
from finetune.training.helper.scaling_state import keep_in_states

MIXED_PRECISION: dict[Compute, str] = {
    "fp8": "bf16",  # around FP8 GEMMs
    "bf16": "bf16",
    "fp16": "fp16",
    "fp32": "no",
}
"""Accelerate's name of `compute_types.AUTOCAST`, by compute precision."""


WHY_NOT_FSDP1 = "FSDP1 puts each layer into a wrapper under another name, past plan and proof"


def patch_accelerator(session: Any) -> None:
    """Make every `Accelerator` built from now on follow the precision of a `Session`."""
    from accelerate import Accelerator, DistributedType, PartialState
    from accelerate.state import AcceleratorState

    patches, resolution = session.patches, session.resolution
    precision = resolution.precision
    made: weakref.WeakSet[Any] = weakref.WeakSet()  # accelerators built under this precision

    def make_init(original: Any) -> Any:
        signature = inspect.signature(original)

        def init(accelerator: Any, *args: Any, **kwargs: Any) -> None:
            # Trainers are imported when a script builds one, which makes its Accelerator at the
            # same time.
            session.references.patch_trainers(patches)
            given = signature.bind(accelerator, *args, **kwargs).arguments
            _refuse_conflicts(given, precision)
            given["mixed_precision"] = MIXED_PRECISION[precision.compute]
            plugin = given.get("fsdp_plugin")
            chosen = plugin is not None and plugin.mixed_precision_policy is not None
            # `bind` names the first argument, which `original` gets by position.
            del given["self"]
            # Accelerate keeps its first configuration process-wide: another precision would be
            # rejected, and a trainer's FSDP or compile settings silently ignored.
            AcceleratorState._shared_state.clear()
            original(accelerator, **given)
            if plugin is not None or os.environ.get("ACCELERATE_USE_FSDP") == "true":
                _refuse_copies(accelerator)
                # Accelerate (1.15) leaves FSDP in the state of the process, after which another one
                # gets no plugin: rows are prepared by trainers of their own, each of which has one.
                if accelerator.num_processes > 1:
                    PartialState().distributed_type = DistributedType.MULTI_GPU
            if precision.compute == "fp16":
                session.loss_scaling = compute_types.complete(accelerator)
            # After Accelerate has made its default policy, which sums gradients in the type of
            # compute.
            _complete_policy(accelerator, precision, chosen=chosen)
            keep_in_states(accelerator)
            made.add(accelerator)

        return init

    def make_prepare(original: Any) -> Any:
        def prepare(accelerator: Any, *args: Any, **kwargs: Any) -> Any:
            models = [a for a in args if isinstance(a, nn.Module)]
            # Before the original, which wraps models for DDP or FSDP: layers change their class
            # inside.
            if models:
                _check_accelerator(accelerator, resolution, known=accelerator in made)
                session.gathered = gathered_type(accelerator, precision)
                session.prepare_models([session.tree_of(model) for model in models])
            for optimizer in args:
                if isinstance(optimizer, Optimizer):
                    session.prepare_optimizer(optimizer)
            if "FSDP" not in str(accelerator.distributed_type):
                return original(accelerator, *args, **kwargs)
            for model in models:
                refuse_sharded_codes(model)
                before_sharding(model)
            with _checkpointed_by_models(accelerator.state.fsdp_plugin, models):
                prepared = original(accelerator, *args, **kwargs)
            # Accelerate (1.15) sends parameters from the first process to the others, and no
            # attribute.
            for model in models if accelerator.state.fsdp_plugin.cpu_ram_efficient_loading else ():
                share_scales(model)
            return prepared

        return prepare

    def make_prepare_model(original: Any) -> Any:
        signature = inspect.signature(original)

        def prepare_model(accelerator: Any, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
            # What has no matrix (a loss, a temperature) is Accelerate's alone.
            tree = session.tree_of(model)
            if multiplies(tree):
                given = signature.bind(accelerator, model, *args, **kwargs).arguments
                evaluation = bool(given.get("evaluation_mode"))
                _check_accelerator(accelerator, resolution, known=accelerator in made)
                session.gathered = gathered_type(accelerator, precision)
                session.prepare_models([tree], evaluation=evaluation)
            return original(accelerator, model, *args, **kwargs)

        return prepare_model

    def make_clip(original: Any) -> Any:
        def clip_grad_norm_(
            accelerator: Any, parameters: Any, max_norm: float, norm_type: float = 2
        ) -> Any:
            every = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            norm = session.updates.clip(accelerator, every, max_norm, norm_type)
            return original(accelerator, every, max_norm, norm_type) if norm is None else norm

        return clip_grad_norm_

    patches.replace(Accelerator, "__init__", make_init)
    patches.replace(Accelerator, "prepare", make_prepare)
    patches.replace(Accelerator, "prepare_model", make_prepare_model)
    patches.replace(Accelerator, "clip_grad_norm_", make_clip)


def _refuse_conflicts(given: dict[str, Any], precision: PrecisionConfig) -> None:
    """Reject arguments of an `Accelerator` that contradict the session's precision."""
    if precision.compute == "fp8" and str(given.get("mixed_precision")) == "fp16":
        raise PrecisionError(
            "FP8 was set up, and this trainer asks for FP16",
            where="fp16=True, mixed_precision='fp16', or --mixed_precision of accelerate launch",
            why="FP8 training keeps everything else in BF16; FP16 needs loss scaling, which "
            "delayed and current FP8 scales would see as exploding gradients",
            fix="leave fp16 out, or call teardown_fp8_mixed_precision_training() first",
        )
    names = {type(handler).__name__ for handler in given.get("kwargs_handlers") or ()}
    clash = names & {"TERecipeKwargs", "AORecipeKwargs", "FP8RecipeKwargs", "MSAMPRecipeKwargs"}
    if clash:
        raise PrecisionError(
            "FP8 was set up twice: by the helper and by Accelerate's own recipe handlers",
            where=f"kwargs_handlers={sorted(clash)}",
            why="both would convert the model",
            fix="pass those settings to setup_fp8_mixed_precision_training instead",
        )


def _complete_policy(accelerator: Any, precision: PrecisionConfig, *, chosen: bool) -> None:
    """Let FSDP2 keep the type of results and sum gradients in float32.

    Accelerate 1.15 has it cast every result to the type of its mixed precision
    (`FullyShardedDataParallelPlugin.set_mixed_precision`): losses, and log-probabilities before
    they are added, kept three digits, 5.0 for 4.9597. Logits stay as the head computes them. And it
    sums gradients in that type, of all processes and micro-batches: in BF16 a sum of 256 equal ones
    is that of 128 or less, since an addend below 1/256 of the sum is lost. The shards that an
    optimizer gets are float32 either way.

    Args:
        chosen: a policy of the script's says how gradients are summed.

    Raises:
        PrecisionError: a plugin of the script's own gathers weights in another type than the
            session computes in.
    """
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    policy = getattr(plugin, "mixed_precision_policy", None)
    if plugin is None or policy is None or plugin.fsdp_version != 2:
        return
    computes = compute_types.AUTOCAST[precision.compute]
    if policy.param_dtype != computes:
        named = str(computes).removeprefix("torch.") if computes else "that of the weights"
        raise PrecisionError(
            f"FSDP2 was to compute in another type than {precision.compute.upper()} training",
            where=f"mixed_precision_policy with param_dtype={policy.param_dtype}",
            why=f"layers outside FP8 compute in the type of gathered weights, here {named}",
            fix="leave mixed_precision_policy out of FullyShardedDataParallelPlugin",
        )
    # Thousands of gradients summed over GPUs in BF16 lose what each of them had; a policy that the
    # user wrote stays as it is.
    changed: dict[str, Any] = {} if chosen else {"reduce_dtype": torch.float32}
    # FSDP2 would cast a model's outputs down, logits in float32 among them.
    if policy.output_dtype == computes:
        changed["output_dtype"] = None
    plugin.mixed_precision_policy = replace(policy, **changed)


def _refuse_copies(accelerator: Any) -> None:
    """Reject FSDP where each of several processes would have a copy of the model."""
    if accelerator.num_processes > 1 and "FSDP" not in str(accelerator.distributed_type):
        raise PrecisionError(
            "FSDP was requested of processes without GPUs",
            where="fsdp, FullyShardedDataParallelPlugin, or accelerate launch",
            why=f"Accelerate shards on GPUs alone; here it is {accelerator.distributed_type}, with "
            "a copy of the model in each process, and says nothing",
            fix="leave FSDP out, or run on GPUs",
        )


def gathered_type(accelerator: Any, precision: PrecisionConfig) -> torch.dtype | None:
    """Type in which FSDP2 gathers weights, None if it does not shard them.

    Raises:
        PrecisionError: codes are asked for, and each process would have masters of its own.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy

    if "FSDP" not in str(accelerator.distributed_type):
        if precision.fp8_params and accelerator.num_processes > 1:
            raise masters_copied(accelerator.num_processes)
        return None
    plugin = accelerator.state.fsdp_plugin
    if precision.fp8_params and isinstance(plugin.cpu_offload, CPUOffloadPolicy):
        raise PrecisionError(
            "fp8_params gathers codes, and FSDP2 was to keep shards in host memory",
            where="offload_params or cpu_offload of FSDP2",
            why="it looks there for weights in high precision alone",
            fix="~precision.fp8_params; or FSDP2 without offload",
        )
    policy = plugin.mixed_precision_policy
    return (policy and policy.param_dtype) or torch.float32


def masters_copied(count: int) -> PrecisionError:
    """The error of processes that would each have all masters."""
    return PrecisionError(
        f"fp8_params keeps masters in host memory, and {count} processes would each have a copy",
        where="precision.fp8_params, without FSDP2",
        why="copies take that many times the host's memory, and DDP sums no gradients that are "
        "there; where FSDP2 shards masters, GPUs keep them and gather codes",
        fix="train.fsdp=true 'train.fsdp_config={version: 2, reshard_after_forward: true}'; one "
        "process; or ~precision.fp8_params",
    )


@contextlib.contextmanager
def _checkpointed_by_models(plugin: Any, models: list[nn.Module]) -> Iterator[None]:
    """Let models checkpoint their own layers inside the block, where FSDP2 was to do it.

    Accelerate 1.15 wraps each layer (`fsdp2_apply_ac`): its parts get other names than plan and
    proof know, and are recomputed without the state of random generators, with other dropout.
    Transformers checkpoints in the same place, around the gathering of a layer's weights.

    Raises:
        PrecisionError: a model has no checkpointing of its own.
    """
    asked = plugin.fsdp_version == 2 and plugin.activation_checkpointing
    if not asked:
        yield
        return
    for model in models:
        if not getattr(model, "supports_gradient_checkpointing", False):
            raise PrecisionError(
                f"FSDP2 was to checkpoint the layers of {type(model).__name__}",
                where="activation_checkpointing, of fsdp_config or FullyShardedDataParallelPlugin",
                why="it wraps each of them under another name, past plan and proof, and the model "
                "has no checkpointing of its own that could take its place",
                fix="leave activation_checkpointing out, and call torch.utils.checkpoint in the "
                "model's forward",
            )
        to_host = {"offload": True} if plugin.activation_checkpointing_offload else {}
        enable: Any = model.activation_checkpointing_enable
        enable({"use_reentrant": False}, **to_host)
    with replaced(plugin, "activation_checkpointing", False):
        yield


def engine_refused(name: str, where: str, before: str = "") -> PrecisionError:
    """The error of an engine that trains in Accelerate's place; `before`: what its fix begins with.

    DeepSpeed's ZeRO-3 also keeps each weight in a flat buffer of its own.
    """
    return PrecisionError(
        f"{name} is not supported",
        where=where,
        why="its engine replaces forward, backward and optimizer: which precision ran could not be "
        "proven",
        fix=f"{before}FSDP2, which shards as ZeRO-3 does: train.fsdp=true 'train.fsdp_config="
        "{version: 2, reshard_after_forward: true}'; or DDP, without them",
    )


def _check_accelerator(accelerator: Any, resolution: Resolution, *, known: bool) -> None:
    """Reject an accelerator that cannot train in this precision; `known` if built under it."""
    if not known:
        raise OrderError(
            f"this trainer was built before {resolution.asked.compute.upper()} was set up",
            where="Trainer() or Accelerator() came before setup_fp8_mixed_precision_training()",
            why="its Accelerator was made for another precision; it would train in BF16",
            fix="call setup_fp8_mixed_precision_training() first, then build the trainer",
        )
    started = processes()
    if started > 1 and accelerator.num_processes == 1:
        raise OrderError(
            f"{started} processes were started, and each would train alone",
            where="torchrun or accelerate launch, with an Accelerator of one process",
            why="the first Accelerator of a process decides how it is joined to the others, and "
            "that one was built without knowing of them",
            fix="on CPUs: cpu=True in setup_fp8_mixed_precision_training(...) as in your own "
            "Accelerator; on GPUs leave cpu=True out of both; or start one process",
        )
    if str(accelerator.distributed_type).rpartition(".")[2] in ("DEEPSPEED", "MEGATRON_LM"):
        raise engine_refused("DeepSpeed or Megatron-LM", str(accelerator.distributed_type))
    sharded = "FSDP" in str(accelerator.distributed_type)
    if sharded and accelerator.state.fsdp_plugin.fsdp_version != 2:
        raise PrecisionError(
            "FSDP1 is not supported",
            where="FullyShardedDataParallelPlugin, fsdp_config, or accelerate launch",
            why=WHY_NOT_FSDP1,
            fix="fsdp_version=2 there (version: 2 in fsdp_config)",
        )
    if accelerator.state.dynamo_plugin.backend.value != "NO":
        raise never_compiled("torch_compile=True, or the dynamo settings of accelerate")
