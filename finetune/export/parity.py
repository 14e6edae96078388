"""Parity of an export with the run's model, on the run's own rows.

The models run one after the other, so that only one is in memory: the reference is the original
weights with the adapter by stock PEFT (of a full run, its weights), the other is the export, loaded
as users would. Rows are tokenized, masked and padded by the same trainer as in the run's
evaluation; models are loaded in the run's compute type, without our code in between. The
reference's loss is kept, and its logits at the first 2,048 labeled positions. Compared are:

    loss gap     |loss of the export - loss of the reference| / max(loss of the reference, 1 nat)
    KL           mean over positions of KL(reference ‖ export) in nats
    logit error  ‖export - reference‖ / ‖reference‖, each position's mean removed first
                 (softmax ignores it)
    agreement    share of positions with the same top-1 token
    answer       one, greedy, to a question of the rows: it goes no further than to an end token

A layout mistake, a scale that divides instead of multiplying, or a lost adapter puts these at 1 or
beyond; `BOUNDS` limits what rounding alone may do.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from finetune.config.schema import RunConfig
from finetune.config.sft import sft_config
from finetune.data.dataset import load_data
from finetune.errors import DataError, ParityError
from finetune.hardware.device import this_device
from finetune.storage.ends import ends_of, take_ends
from finetune.storage.loading import load_in_fp8
from finetune.storage.pretrained import auto_class, load_tokenizer, load_whole
from finetune.training.model import implementation_arguments, is_published_fp8
from finetune.training.samples import positions

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedModel

KEPT_POSITIONS = 2048
REFERENCE_GAP = 0.25
IGNORED = -100
ABOUT_ROWS = (
    *("assistant_only_loss", "chat_template_path", "completion_only_loss", "dataset_kwargs"),
    *("dataset_text_field", "eos_token", "eval_packing", "max_length", "packing"),
    *("packing_strategy", "pad_to_multiple_of", "pad_token", "padding_free", "seed"),
    "truncation_mode",
)
"""Settings of `train` that shape a batch."""
DTYPES = {"fp16": torch.float16, "fp32": torch.float32}
EVALUATION_ROWS, ANSWER = 128, 64
CALIBRATION_ROWS = 64
BATCH = 4


@dataclass(frozen=True)
class Bounds:
    """Largest figures that rounding explains (for the agreement the smallest), and the reason."""

    loss_gap: float
    kl: float
    logit_error: float
    agreement: float
    reason: str


BOUNDS = {
    "adapter": Bounds(1e-6, 1e-6, 1e-6, 1.0, "the same files: equal"),
    "merged": Bounds(0.005, 0.002, 0.06, 0.97, "merged weights are rounded to their stored type"),
    "fp8": Bounds(0.02, 0.02, 0.10, 0.93, "E4M3 rounds weights and inputs by up to 6 %"),
    "nvfp4": Bounds(0.10, 0.15, 0.35, 0.80, "E2M1 rounds weights and inputs by up to 25 %"),
}


@dataclass(frozen=True)
class Observation:
    """Outputs of a model on some batches.

    Attributes:
        loss: mean cross-entropy over all labeled positions, in nats.
        positions: number of these positions.
        logits: [T, V] of the first T of them, on the CPU, in the model's type.
        answer: ids that the model writes to the first question, greedily.
        ends: ids at which it stops.
    """

    loss: float
    positions: int
    logits: Tensor
    answer: list[int]
    ends: list[int]


@dataclass(frozen=True)
class Parity:
    """Comparison of an export with its reference; see the module's text.

    Attributes:
        positions: number of positions behind the losses.
        compared: number of positions behind the other figures.
        answer: tokens of an answer by the export.
        ended: it came to an end token.
        ran_on: it continued after one of the reference's.
    """

    loss_reference: float
    loss_export: float
    loss_gap: float
    kl: float
    logit_error: float
    agreement: float
    positions: int
    compared: int
    answer: int
    ended: bool
    ran_on: bool

    def failures(self, bounds: Bounds) -> list[str]:
        """Describe the figures that are out of bounds, NaN included."""
        found = [
            f"{name} {getattr(self, name):.3g} (at most {getattr(bounds, name):g})"
            for name in ("loss_gap", "kl", "logit_error")
            if not getattr(self, name) <= getattr(bounds, name)
        ]
        other = round((1 - self.agreement) * self.compared)
        if other > max(1, _most_others(bounds.agreement, self.compared)):  # one is always allowed
            found.append(f"agreement {self.agreement:.1%} (at least {bounds.agreement:.0%})")
        if self.ran_on:
            found.append("an answer that continues after its end token")
        return found

    def __str__(self) -> str:
        return (
            f"loss {self.loss_reference:.4f} -> {self.loss_export:.4f}, KL {self.kl:.2g}, "
            f"logit error {self.logit_error:.2%}, top-1 agreement {self.agreement:.1%}, "
            f"an answer of {self.answer} tokens{' that ends' * self.ended}"
        )


def _most_others(agreement: float, positions: int) -> float:
    """Positions with another top-1 token that a bound leaves.

    The bound holds for `KEPT_POSITIONS`, T. A share p of fewer scatters more: three of the standard
    deviations that n positions have beyond T. Of p = 0.97: 61.4 of 2,048 positions, 6.3 of 84.
    """
    spread = (agreement * (1 - agreement)) ** 0.5
    beyond = positions**-0.5 - KEPT_POSITIONS**-0.5 if positions < KEPT_POSITIONS else 0.0
    return positions * (1 - agreement + 3 * spread * beyond)


class Batches(NamedTuple):
    """Batches as the model takes them: of the run's evaluation rows, and of training rows."""

    evaluation: list[dict[str, Any]]
    calibration: list[dict[str, Any]]
    rows: str


def load_stock(
    weights: Path | str,
    config: RunConfig,
    *,
    adapter: Path | None = None,
    dtype: torch.dtype | str | None = None,
) -> PreTrainedModel:
    """Load a model with `from_pretrained`, and an adapter with stock PEFT, in evaluation mode.

    Args:
        weights: folder of plain or compressed-tensors weights.
        config: the run's.
        adapter: folder of a PEFT adapter.
        dtype: type to load in, or `auto`, that of the files; default: the run's compute type.

    Raises:
        ModelNotFoundError: weights are missing, which Transformers would draw by chance.
    """
    from transformers import AutoConfig

    import finetune.storage.bdh  # noqa: F401  registers our own model types

    trust = config.model.trust_remote_code
    shape = AutoConfig.from_pretrained(weights, trust_remote_code=trust)
    load: Any = partial(load_whole, auto_class(shape).from_pretrained)
    if adapter is not None and is_published_fp8(shape):
        load = load_in_fp8  # other loaders treat such a base differently by device
    model: Any = load(
        weights,
        # With FP8, the compute type of the surrounding model is BF16.
        dtype=dtype or DTYPES.get(config.precision.compute, torch.bfloat16),
        device_map=this_device().kind,
        trust_remote_code=trust,
        **implementation_arguments(config.model),
    )
    return (model if adapter is None else with_adapter(model, adapter)).eval()


def with_adapter(model: Any, adapter: Path) -> Any:
    """A plain model under the adapter in a folder, by stock PEFT."""
    from peft import PeftModel

    with warnings.catch_warnings():
        # PEFT would begin what is missing by chance.
        warnings.filterwarnings("error", "Found missing adapter keys")
        model = PeftModel.from_pretrained(model, str(adapter))
    take_ends(model, adapter)
    return model


def batches_of(config: RunConfig, model: PreTrainedModel) -> Batches:
    """Batches of evaluation and training rows of the run, on the model's device.

    Raises:
        DataError, DataNotFoundError: the run's rows are gone.
    """
    from finetune.data.ledger import AccountedTrainer

    tokenizer, _ = load_tokenizer(config.model, config.train.get("chat_template_path"))
    rows = load_data(config.data, tokenizer, int(config.train.get("seed", 42)))
    held_out = rows.first(EVALUATION_ROWS) if rows.eval is None else rows.eval
    kind = "training rows (the run kept none for evaluation)" if rows.eval is None else "eval rows"
    evaluation = _spread(held_out, EVALUATION_ROWS)
    train = {key: value for key, value in config.train.items() if key in ABOUT_ROWS}
    sizes = {f"per_device_{part}_batch_size": BATCH for part in ("train", "eval")}
    only = config.model_copy(update={"train": train | sizes | {"report_to": "none"}})
    with tempfile.TemporaryDirectory() as scratch:
        trainer = AccountedTrainer(
            model=model,
            args=sft_config(only, Path(scratch), rows.settings, on_cpu=this_device().kind == "cpu"),
            train_dataset=rows.first(CALIBRATION_ROWS),
            eval_dataset=evaluation,
            processing_class=tokenizer,
        )
        return Batches(
            evaluation=list(trainer.get_eval_dataloader()),
            calibration=list(trainer.get_train_dataloader()),
            rows=f"{len(evaluation)} of {len(held_out)} {kind}",
        )


def _spread(rows: Dataset, count: int) -> Dataset:
    """So many rows from all parts: the first ones may be of one of several files, or the easy ones.

    Two of the rows 0 to 4 are 0 and 2.
    """
    kept = min(count, len(rows))
    return rows.select([number * len(rows) // kept for number in range(kept)])


def observe(model: Any, batches: Sequence[dict[str, Any]]) -> Observation:
    """Run a causal language model in evaluation mode over batches with labels.

    Args:
        batches: `input_ids`, `labels` [B, L] and other inputs of the model.

    Raises:
        DataError: no position has a label.
    """
    total, count, kept, room = 0.0, 0, [], KEPT_POSITIONS
    with torch.inference_mode():
        for batch in batches:
            inputs = {key: value for key, value in batch.items() if key != "labels"}
            labels = batch["labels"][:, 1:]
            counts = labels != IGNORED
            # With a cache Transformers would not keep packed documents apart.
            logits = model(**inputs, use_cache=False).logits[:, :-1][counts]
            for part, wanted in zip(logits.split(1024), labels[counts].split(1024), strict=True):
                total += float(F.cross_entropy(part.float(), wanted, reduction="sum"))
            count += len(logits)
            kept.append(logits[:room].cpu())
            room -= len(kept[-1])
    if not count:
        raise DataError(
            "no position of the evaluation rows counts in the loss",
            why="every label is masked, or cut off by train.max_length",
            fix="longer rows (train.max_length), or other evaluation rows (data.eval_path)",
        )
    ends = ends_of(model.generation_config)
    return Observation(total / count, count, torch.cat(kept), _answer(model, batches[0]), ends)


def _answer(model: Any, batch: dict[str, Any]) -> list[int]:
    """Ids that a model writes, greedily, to what stands before the first label of a batch."""
    first = int((batch["labels"][0] != IGNORED).int().argmax())
    room = positions(model.config) or first + 2 * ANSWER
    most = min(ANSWER, room // 2)
    asked = batch["input_ids"][:1, : max(first, 1)][:, -(room - most) :]
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": most}
    with torch.inference_mode():
        found = model.generate(asked, attention_mask=torch.ones_like(asked), **options)
    return found[0, asked.shape[1] :].tolist()


def compare(reference: Observation, export: Observation) -> Parity:
    """Compare an export with its reference, over the same batches."""
    kl = error = signal = same = 0.0
    for ours, theirs in zip(reference.logits.split(256), export.logits.split(256), strict=True):
        r, e = (x.float() for x in (ours, theirs))
        same += float((r.argmax(-1) == e.argmax(-1)).sum())
        ours, theirs = r.log_softmax(-1), e.log_softmax(-1)
        kl += float(F.kl_div(theirs, ours, reduction="sum", log_target=True))
        r, e = (x - x.mean(-1, keepdim=True) for x in (r, e))
        error += float((e - r).square().sum())
        signal += float(r.square().sum())
    kept, ends = len(reference.logits), {*reference.ends}
    return Parity(
        loss_reference=reference.loss,
        loss_export=export.loss,
        loss_gap=abs(export.loss - reference.loss) / max(reference.loss, 1.0),
        kl=max(kl / kept, 0.0),
        logit_error=(error / signal) ** 0.5,
        agreement=same / kept,
        positions=reference.positions,
        compared=kept,
        answer=len(export.answer),
        ended=export.answer[-1] in ends,
        ran_on=not ends.isdisjoint(export.answer[:-1]),
    )


def likelihood_of(train: dict[str, Any], eval_loss: float | None) -> float | None:
    """A run's eval loss where it is a mean of -ln p of the labels, as `observe` computes it.

    That of `loss_type=dft` is weighted by p, that under label smoothing has all other tokens in it.
    """
    is_other = train.get("loss_type") == "dft" or float(train.get("label_smoothing_factor") or 0)
    return None if is_other else eval_loss


def check_reference(loss: float, reported: float | None) -> None:
    """Raise if the reference is not the model that the run evaluated.

    Args:
        loss: loss of the original weights under the run's adapter, over all positions.
        reported: eval loss of the run (`likelihood_of`), or None. Its base may have been
            stored in FP8 or NF4: a few percent apart.

    Raises:
        ParityError: they differ by more than that explains.
    """
    if reported is not None and not abs(loss - reported) <= REFERENCE_GAP * max(reported, 1.0):
        raise ParityError(
            "the run's model cannot be put together again",
            where=f"eval loss {reported:.4f} in the run's report.json, {loss:.4f} now",
            why="the weights behind model.name, or the rows, are not those of the run any more",
            fix="give the run its weights and rows back (model.revision, the folder it used)",
        )


def check(parity: Parity, target: str, where: str) -> None:
    """Raise `ParityError` if figures of the export in folder `where` are out of bounds."""
    failures = parity.failures(BOUNDS[target])
    if failures:
        raise ParityError(
            f"the export does not say what the run's model says: {', '.join(failures)}",
            where=f"{where} holds it, unfinished; its export.json has the figures",
            why=f"{target}: {BOUNDS[target].reason}; this is more",
            fix="a model whose weights have a wider range needs a wider type: nvfp4 -> fp8 -> "
            "merged"
            if target in ("fp8", "nvfp4")
            else "please report it, with export.json",
        )


def as_record(parity: Parity, target: str) -> dict[str, Any]:
    """Figures and bounds as plain data, for `export.json`."""
    bounds = BOUNDS[target]
    failed = parity.failures(bounds)
    return {**asdict(parity), "bounds": asdict(bounds), "passed": not failed, "failed": failed}
