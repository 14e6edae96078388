"""A recipe's model and TRL's trainer around it: what a run trains and a measurement measures."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any

from finetune.config import sft
from finetune.config.methods import TEACHER, Method, arguments, method_of
from finetune.config.optimizers import chosen
from finetune.config.reward_names import reward_names
from finetune.config.schema import RunConfig
from finetune.config.train_keys import TrainerArguments
from finetune.data.image_forms import COLUMN
from finetune.data.masks import answer_end
from finetune.errors import FinetuneError
from finetune.precision.model.layers import without_adapters
from finetune.precision.stored.linear import stored_weights
from finetune.storage import nf4
from finetune.storage.ends import stop_at
from finetune.storage.pretrained import fit_trl, refuse_other_words
from finetune.storage.processors import tokenizer_of
from finetune.training import scope
from finetune.training.asking.rewards import rewards_of
from finetune.training.helper.optimizer import low_bit
from finetune.training.helper.replacing import replaced
from finetune.training.helper.varlen import fix_documents
from finetune.training.model import VARLEN, Attention, load_model, take_model, teacher_of
from finetune.training.trl_trainer import trainer_of

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset
    from transformers import TrainerCallback

    from finetune.precision.model.plan import LayerPlan


def make_trainer(
    config: RunConfig,
    args: Any,
    *,
    train: Dataset | IterableDataset,
    held_out: Dataset | None,
    reader: Any,
    stored: Sequence[LayerPlan],
    attention: Attention,
    callbacks: list[TrainerCallback],
    kind: Any = None,
    given: Any = None,
) -> Any:
    """Load a recipe's model and build the trainer around it, under the current session.

    Training and measuring share it, so that speeds are measured of what is trained.

    Args:
        args: trainer arguments (`finetune.config.sft`).
        train, held_out: rows in one of TRL's formats.
        reader: their tokenizer, or processor (`data.dataset.reader_for`).
        stored: plan rows of weights that are stored in FP8 from the start.
        attention: resolved `model.attention`.
        kind: trainer class; default: the class of `train.method` with a ledger of its rows.
        given: model with the run's adapters, in place of the one that would be loaded.

    Raises:
        FinetuneError: the model cannot be loaded, or adapters do not fit it.
    """
    method, beside = method_of(config.train), dict[str, Any]()
    tokenizer = tokenizer_of(reader)
    if method.rewarded:
        images = COLUMN in (train.column_names or ())
        beside["reward_funcs"] = rewards_of(reward_names(config.train), tokenizer, images=images)
    # A teacher's probabilities are compared token by token, so its ids have to mean the same words.
    # It stays as its checkpoint has it: none of the run's layers is stored or adapted in it.
    if TEACHER in arguments(method):
        refuse_other_words(tokenizer, teacher_of(config), f"train.{TEACHER}")
        beside["teacher_model"] = load_model(teacher_of(config), ())
    named = config.model.model_copy(update={"attention": attention.implementation})
    model: Any = load_model(named, stored) if given is None else take_model(given, named, stored)
    # Before TRL's trainer is made, which reads the names of the backbone.
    fit_trl(without_adapters(model))
    if method.writes and (end := answer_end(tokenizer)) is not None:
        stop_at(without_adapters(model), [end])  # what is written ends there, and is counted so
    # Before adapters are attached: the patterns of `model.freeze` name modules of the plain model.
    scope.freeze(without_adapters(model), config)
    # A script's model has its adapters already; a second configuration would wrap them again.
    adapters = scope.lora_config(model, config) if given is None else None
    if adapters is not None and stored_weights(model):  # the trainer would cast new adapters
        model, adapters = scope.attach(model, config), None
    optimizer = chosen(config.train)
    # bitsandbytes keeps overrides of single weights for as long as the process lives, by `id`,
    # which a weight of a later run (in a notebook, of a comparison) may have again.
    if optimizer.library == "bitsandbytes":
        low_bit.forget_overrides()
    # Set on the trainer below, since only some of TRL's (1.16) take it as an argument; None lets
    # Transformers (5.23) read `optim`.
    own = low_bit.class_and_kwargs if optimizer.by_torchao else lambda *_: None
    # With adapters the reference is the base without them; with log probabilities computed before
    # training the model is its own reference, as long as it has not moved.
    again = not TrainerArguments(args).precompute_ref_log_probs
    if method.reference and config.lora is None and again:
        beside["ref_model"] = deepcopy(model)  # TRL would read another revision from the hub
    try:
        copying = reference_copied(method, model)
        with nf4.masters_kept(model), scope.false_warnings_ignored(), copying:
            trainer = (kind or trainer_of(method))(
                model=model,
                args=args,
                train_dataset=train,
                eval_dataset=held_out,
                processing_class=reader,
                peft_config=adapters,
                callbacks=callbacks,
                **beside,
            )
        trainer.optimizer_cls_and_kwargs = own(config.train, args)
        trainer.embedding_learning_rate = config.train.embedding_learning_rate
        if given is None and "ref" in getattr(model, "peft_config", ()):
            model.delete_adapter("ref")  # TRL's copy of new adapters, which add nothing as well
    except Exception as error:
        # Only what libraries raise over settings becomes an error of the recipe: a bug keeps its
        # traceback.
        refusal = isinstance(error, sft.REFUSALS) or sft.is_of_the_hub(error)
        if isinstance(error, FinetuneError) or not refusal:
            raise
        raise sft.refused(method.trainer, error, config.train) from error
    # Varlen kernels take the boundaries of documents as a tensor, whose every new length would be
    # another shape to plan and compile for.
    if attention.implementation == VARLEN:
        fix_documents(trainer)
    return trainer


def reference_copied(method: Method, model: Any) -> contextlib.AbstractContextManager[None]:
    """Make the trainer of a method that writes copy the model, where it would load a reference.

    TRL (1.16) loads it by its name: of another revision, in float32, and with towers that train,
    so that it would be another model than the policy began as.
    """
    if not method.writes:
        return contextlib.nullcontext()
    module = sys.modules[method.trainer_class.__module__]
    return replaced(module, "create_model_from_path", lambda *_, **__: deepcopy(model))
