"""Parity of an export with the run's model, on the run's own rows.

The models run one after the other, so that only one is in memory: the reference is the original
weights with the adapter by stock PEFT (of a full run, its weights), the other is the export, loaded
as users would. Rows are tokenized, masked and padded by the same trainer as in the run's
evaluation, with their images if it had some; models are loaded in the run's compute type, without
our code in between. The reference's loss is kept, and its logits at the first 2,048 labeled
positions. Compared are:

    loss gap     |loss of the export - loss of the reference| / max(loss of the reference, 1 nat)
    KL           mean over positions of KL(reference ‖ export) in nats
    logit error  ‖export - reference‖ / ‖reference‖, each position's mean removed first
                 (softmax ignores it)
    agreement    share of positions with the same top-1 token
    answer       one, greedy, to a question of the rows: it goes no further than to an end token
    weight error ‖Ŵ - W‖ / ‖W‖ of the matrix that is furthest from the merged one, as it is loaded

How far rounding alone moves logits depends on the model: its depth, its weights, its rows. So the
reference is evaluated twice, in float32 (`in_float32`) and as it is used, in BF16; the error of the
second against the first is this model's *noise*, and an export's error against float32 may be a
multiple of it (`MULTIPLES`). A merged model is evaluated in float32, too: what is left is the
rounding of its weights. A quantized export computes in BF16, with rounded inputs. Logits that are m
times further off have m² times the KL (`bounds_of`). Agreement is shown, and has no bound.

One of many layers that is off, in NVFP4 even by a factor of two, stays below what rounding does to
the logits. So each matrix is compared, too, by a few products with random signs (`signed_sums`),
which are kept while the weights themselves are not. Its bound is what rounding to the type can do
to any number that is not tiny (`MULTIPLES`), for any model.

Limits: of the scales that NVFP4 has for inputs, only the logits tell.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from finetune.config.methods import method_of
from finetune.config.schema import RunConfig
from finetune.config.sft import sft_config
from finetune.config.train_keys import TrainSection
from finetune.data.dataset import Rows, reader_for, rows_for
from finetune.errors import DataError, FinetuneError, ParityError, first_line
from finetune.export.compressed_tensors import PRESETS
from finetune.hardware.device import this_device
from finetune.precision.model.layers import decoder_layers
from finetune.storage.ends import ends_of
from finetune.storage.loading import load_in_fp8
from finetune.storage.pretrained import auto_class, load_tokenizer, load_whole, positions
from finetune.training.asking.reload import with_adapter
from finetune.training.model import implementation_arguments, is_published_fp8

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedModel

KEPT_POSITIONS = 2048
SIGNS, SLAB = 4, 2**26
"""Vectors of signs for each matrix, and numbers of it that are float32 at a time."""
REFERENCE_GAP = 0.25
IGNORED = -100
ABOUT_ROWS = (
    "assistant_only_loss",
    "chat_template_path",
    "completion_only_loss",
    "dataset_kwargs",
    "dataset_text_field",
    "eos_token",
    "eval_packing",
    "max_length",
    "packing",
    "packing_strategy",
    "pad_to_multiple_of",
    "pad_token",
    "padding_free",
    "seed",
    "truncation_mode",
)
"""Settings of `train` that shape a batch."""
DTYPES = {"fp16": torch.float16, "fp32": torch.float32}
EVALUATION_ROWS, ANSWER = 128, 64
CALIBRATION_ROWS = 64
BATCH = 4


@dataclass(frozen=True)
class Bounds:
    """Largest figures that rounding explains, and the reason."""

    loss_gap: float
    kl: float
    logit_error: float
    weight_error: float
    reason: str


MULTIPLES = {
    "adapter": (0, 0, "the same files: equal"),
    "merged": (1.5, 2**-8, "merged weights are rounded to their stored type"),
    "fp8": (24, 2**-4, "E4M3 rounds weights and inputs by up to 6 %"),
    "nvfp4": (96, 2**-2, "E2M1 rounds weights and inputs by up to 25 %"),
    "gguf": (1.5, 2**-8, "its matrices are rounded to BF16"),
    "gguf-q8": (6, 32**0.5 / 254, "Q8_0 rounds weights to 1/254 of the largest of 32"),
}
"""Target -> how many times the noise of BF16 its logits may be off, its largest weight error, and
why."""


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
        weight_error: of the matrix that is furthest off, and its name, `weight`.
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
    weight_error: float = 0.0
    weight: str = ""

    def failures(self, bounds: Bounds) -> list[str]:
        """Describe the figures that are out of bounds, NaN included."""
        found = [
            f"{name} {getattr(self, name):.3g} (at most {getattr(bounds, name):g})"
            for name in ("loss_gap", "kl", "logit_error")
            if not getattr(self, name) <= getattr(bounds, name)
        ]
        if not self.weight_error <= bounds.weight_error:
            error = f"{self.weight_error:.2%} (at most {bounds.weight_error:.2%})"
            found.append(f"{self.weight} off by {error}")
        if self.ran_on:
            found.append("an answer that continues after its end token")
        return found

    def __str__(self) -> str:
        return (
            f"loss {self.loss_reference:.4f} -> {self.loss_export:.4f}, KL {self.kl:.2g}, "
            f"logit error {self.logit_error:.2%}, top-1 agreement {self.agreement:.1%}, "
            f"an answer of {self.answer} tokens{' that ends' if self.ended else ''}"
        )


def bounds_of(target: str, noise: Parity | None) -> Bounds:
    """Bounds of an export, from the noise of BF16 in the reference; None: nothing may differ."""
    multiple, of_weights, reason = MULTIPLES[target]
    if noise is None:
        return Bounds(1e-6, 1e-6, 1e-6, of_weights, reason)
    kl = multiple**2 * noise.kl
    return Bounds(
        (2 * kl) ** 0.5,
        kl,
        multiple * noise.logit_error,
        of_weights,
        f"{reason}: {multiple:g} times the noise of BF16",
    )


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
    to_merge: bool = False,
) -> PreTrainedModel:
    """Load a model with `from_pretrained`, and an adapter with stock PEFT, in evaluation mode.

    Args:
        weights: folder of plain or compressed-tensors weights.
        config: the run's.
        adapter: folder of a PEFT adapter.
        dtype: type to load in, or `auto`, the files'; default: the run's compute type.
        to_merge: published FP8 codes as the BF16 weights that they stand for.

    Raises:
        ModelNotFoundError: weights are missing, which Transformers would draw by chance.
    """
    from transformers import AutoConfig

    import finetune.storage.bdh  # noqa: F401  registers our own model types

    trust = config.model.trust_remote_code
    shape = AutoConfig.from_pretrained(weights, trust_remote_code=trust)
    load: Any = partial(load_whole, auto_class(shape).from_pretrained)
    codes = (to_merge or adapter is not None) and is_published_fp8(shape)
    if codes:
        load = load_in_fp8  # other loaders treat such a base differently by device
        dtype = torch.bfloat16 if to_merge else dtype
    model: Any = load(
        weights,
        # With FP8, the compute type of the surrounding model is BF16.
        dtype=dtype or DTYPES.get(config.precision.compute, torch.bfloat16),
        device_map=this_device().kind,
        trust_remote_code=trust,
        **implementation_arguments(config.model),
    )
    if codes and to_merge:
        model = model.dequantize()
    return (model if adapter is None else with_adapter(model, adapter)).eval()


def batches_of(config: RunConfig, model: PreTrainedModel) -> Batches:
    """Batches of evaluation and training rows of the run, on the model's device.

    Raises:
        DataError, DataNotFoundError: the run's rows are gone.
    """
    from finetune.data.preparing import AccountedTrainer

    tokenizer, _ = load_tokenizer(config.model, config.train.chat_template_path)
    method = method_of(config.train)
    rows = rows_for(config, tokenizer, shape=model.config)
    reader = reader_for(config, rows, tokenizer)
    if not method.is_text:
        rows = _as_answers(rows) if rows.images else _as_tokens(rows, config, tokenizer)
    held_out = rows.first(EVALUATION_ROWS) if rows.eval is None else rows.eval
    kind = "training rows (the run kept none for evaluation)" if rows.eval is None else "eval rows"
    evaluation = _spread(held_out, EVALUATION_ROWS)
    train = {key: value for key, value in config.train.items() if key in ABOUT_ROWS}
    # One by one with images, whose pixels have no dimension for rows in every family.
    size = 1 if rows.images else BATCH
    sizes = {f"per_device_{part}_batch_size": size for part in ("train", "eval")}
    only = config.model_copy(update={"train": train | sizes | {"report_to": "none"}})
    with tempfile.TemporaryDirectory() as scratch:
        trainer = AccountedTrainer(
            model=model,
            args=sft_config(only, Path(scratch), rows.settings, on_cpu=this_device().kind == "cpu"),
            train_dataset=rows.first(CALIBRATION_ROWS),
            eval_dataset=evaluation,
            processing_class=reader,
        )
        return Batches(
            evaluation=list(trainer.get_eval_dataloader()),
            calibration=list(trainer.get_train_dataloader()),
            rows=f"{len(evaluation)} of {len(held_out)} {kind}",
        )


def _as_tokens(rows: Rows, config: RunConfig, tokenizer: Any) -> Rows:
    """Prompts and answers of another method than SFT as token ids, all of which count."""
    from finetune.data.counting import arguments_for, count

    args, method = arguments_for(rows, config), method_of(config.train)

    def tokens(part: Any) -> Any:
        if part is None:
            return None
        found = count(replace(rows, train=part, sample=None), args, tokenizer, method).prepared
        return found.map(lambda row: {"labels": row["input_ids"]})

    first = rows.first(CALIBRATION_ROWS)
    return replace(rows, train=tokens(first), eval=tokens(rows.eval), sample=None, settings={})


def _as_answers(rows: Rows) -> Rows:
    """Rows with images of another method than SFT: prompts with their better answers, as text."""

    def answered(part: Any) -> Any:
        if part is None:
            return None
        names = {*part.column_names}
        part = part.remove_columns([*(names & {"rejected"})])
        if "chosen" not in names:
            return part.rename_column("prompt", "messages")
        return part.rename_column("chosen", "completion" if "prompt" in names else "messages")

    first = rows.first(CALIBRATION_ROWS)
    return replace(rows, train=answered(first), eval=answered(rows.eval), sample=None)


def _spread(rows: Dataset, count: int) -> Dataset:
    """So many rows from all parts: the first ones may be of one of several files, or the easy ones.

    Two of the rows 0 to 4 are 0 and 2.
    """
    kept = min(count, len(rows))
    return rows.select([number * len(rows) // kept for number in range(kept)])


@contextlib.contextmanager
def in_float32(model: nn.Module) -> Iterator[None]:
    """Compute in float32, with the weights of one decoder layer at a time: memory is for
    the model and a layer. Fused attention that takes 16 bits alone gives way to SDPA.
    """
    layers = [*decoder_layers(model)]
    inside = {id(p) for layer in layers for p in layer.parameters()}
    narrow: dict[nn.Module, list[tuple[nn.Parameter, Tensor]]] = {}

    def widen(module: nn.Module, *_: Any) -> None:
        chosen = [p for p in module.parameters() if p.dtype in (torch.bfloat16, torch.float16)]
        if module is model:
            chosen = [p for p in chosen if id(p) not in inside]
        narrow[module] = [(p, p.data) for p in chosen]
        for p in chosen:
            p.data = p.data.float()

    def restore(module: nn.Module, *_: Any) -> None:
        for p, data in narrow.pop(module):
            p.data = data

    stock: Any = model
    attention = stock.config._attn_implementation
    with contextlib.ExitStack() as stack:
        if attention not in ("eager", "sdpa"):
            stock.set_attn_implementation("sdpa")
            stack.callback(stock.set_attn_implementation, attention)
        for layer in layers:
            stack.callback(layer.register_forward_pre_hook(widen).remove)
            stack.callback(layer.register_forward_hook(restore).remove)
        widen(model)
        stack.callback(restore, model)
        yield


def observe(model: Any, batches: Sequence[dict[str, Any]], *, answers: bool = True) -> Observation:
    """Run a causal language model in evaluation mode over batches with labels.

    Args:
        batches: `input_ids`, `labels` [B, L] and other inputs of the model.
        answers: write an answer, too.

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
            # In pieces: in float32 the logits of a batch over 150,000 words are gigabytes.
            for part, wanted in zip(logits.split(1024), labels[counts].split(1024), strict=True):
                total += float(F.cross_entropy(part.float(), wanted, reduction="sum"))
            count += len(logits)
            # In host memory, since the reference is gone when the export is observed.
            kept.append(logits[:room].cpu())
            room -= len(kept[-1])
    if not count:
        raise DataError(
            "no position of the evaluation rows counts in the loss",
            why="every label is masked, or cut off by train.max_length",
            fix="longer rows (train.max_length), or other evaluation rows (data.eval_path)",
        )
    ends = ends_of(model.generation_config)
    answer = _answer(model, batches[0]) if answers else []
    return Observation(total / count, count, torch.cat(kept), answer, ends)


def signed_sums(model: nn.Module) -> dict[str, Tensor]:
    """Each matrix [N, K] of a model times random signs [K, 4], float32 on the CPU, by its name.

    On average over signs v, ‖E v‖² = ‖E‖² for any E (Hutchinson, 1990): products of two matrices
    tell how far one is from the other, and take 4/K of its memory.
    """
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            matrix = parameter.detach().flatten(0, -2)
            k = matrix.shape[1]
            signs = torch.randint(2, (k, SIGNS), generator=torch.Generator().manual_seed(k))
            signs = (2 * signs - 1).to(matrix.device, torch.float32)
            slabs = matrix.split(max(SLAB // k, 1))
            found[name] = torch.cat([slab.float() @ signs for slab in slabs]).cpu()
    return found


def furthest(model: nn.Module, wanted: dict[str, Tensor]) -> tuple[float, str]:
    """Error of the matrix that is furthest from what gave these `signed_sums`, and its name."""
    worst, there = (0.0, ""), signed_sums(model)
    for name, expected in wanted.items():
        error = torch.tensor(float("inf"))
        if name in there and there[name].shape == expected.shape:
            error = (there[name] - expected).norm() / expected.norm().clamp(min=1e-30)
        worst = max(worst, (float(error.nan_to_num(float("inf"))), name))
    return worst


def _answer(model: Any, batch: dict[str, Any]) -> list[int]:
    """Ids that a model writes, greedily, to what stands before the first label of a batch."""
    first = int((batch["labels"][0] != IGNORED).int().argmax())
    room = positions(model.config) or first + 2 * ANSWER
    # Of a short context half is left for the question.
    most = min(ANSWER, room // 2)
    window = slice(max(first - (room - most), 0), max(first, 1))
    asked = {"input_ids": batch["input_ids"][:1, window]}
    if any(key.startswith("pixel_values") for key in batch):  # of this row alone (`batches_of`)
        shape = batch["labels"].shape
        asked |= {k: v[:, window] if v.shape[:2] == shape else v for k, v in batch.items()}
        del asked["labels"]
    asked["attention_mask"] = torch.ones_like(asked["input_ids"])
    with torch.inference_mode():
        found = model.generate(**asked, do_sample=False, max_new_tokens=most)
    return found[0, asked["input_ids"].shape[1] :].tolist()


def compare(
    reference: Observation, export: Observation, furthest: tuple[float, str] = (0.0, "")
) -> Parity:
    """Compare an export with its reference, over the same batches, and its `furthest` weight."""
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
        ended=not ends.isdisjoint(export.answer[-1:]),
        ran_on=not ends.isdisjoint(export.answer[:-1]),
        weight_error=furthest[0],
        weight=furthest[1],
    )


def likelihood_of(train: TrainSection, eval_loss: float | None) -> float | None:
    """A run's eval loss where it is a mean of -ln p of the labels, as `observe` computes it.

    With `loss_type=dft` the loss is weighted by p; under label smoothing it has all other tokens.
    """
    is_other = train.loss_type == "dft" or float(train.label_smoothing_factor)
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
            why="the weights behind model.name, or the rows, are not the run's any more",
            fix="give the run its weights and rows back (model.revision, the folder it used)",
        )


@contextlib.contextmanager
def kept_unchecked(folder: Path) -> Iterator[None]:
    """Keep an export in its folder where its check fails by itself: merging takes hours."""
    try:
        yield
    except FinetuneError:
        raise
    except Exception as error:
        raise ParityError(
            "the export is written, and could not be checked",
            where=f"{folder} holds it, unfinished",
            why=f"{type(error).__name__}: {first_line(error)}",
            fix="compare it with the run yourself before you use it, and please report this",
        ) from error


def check(parity: Parity, target: str, noise: Parity | None, where: str) -> None:
    """Raise `ParityError` if figures of the export in folder `where` are out of bounds."""
    bounds = bounds_of(target, noise)
    failures = parity.failures(bounds)
    if failures:
        raise ParityError(
            f"the export does not say what the run's model says: {', '.join(failures)}",
            where=f"{where} holds it, unfinished; its export.json has the figures",
            why=f"{target}: {bounds.reason}; this is more",
            fix="a model whose weights have a wider range needs a wider type: nvfp4 -> fp8 -> "
            "merged"
            if target in PRESETS
            else "please report it, with export.json",
        )


def as_record(parity: Parity, target: str, noise: Parity | None) -> dict[str, Any]:
    """Figures, noise and bounds as plain data, for `export.json`."""
    bounds = bounds_of(target, noise)
    failed = parity.failures(bounds)
    return asdict(parity) | {
        "noise": noise and asdict(noise),
        "bounds": asdict(bounds),
        "passed": not failed,
        "failed": failed,
    }
