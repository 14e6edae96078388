"""Runs a job on tensors without memory and writes down what it allocates.

The model is built from its shape on the meta device by the installed transformers and PEFT, whose
layers have been the same for years; what did change between versions (the path of the loss, how
4-bit products are done, fused kernels, FSDP) is put in from `losses`, `packed`, `fused`, `sharded`.
One optimizer step is written down, after one that made the optimizer's states: a steady step is
where the peak is.

Meta tensors have a storage with a size and no memory, dispatch to the same operators and free
themselves like any other; they take about half the time of fake tensors.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from finetune.estimator.score import fused, packed
from finetune.estimator.score.attention import NAMES, CausalMask, register_kernels
from finetune.estimator.score.autocast import CudaAutocast
from finetune.estimator.score.experts import separate_experts
from finetune.estimator.score.job import Job
from finetune.estimator.score.litgpt import LitGpt
from finetune.estimator.score.losses import take_loss
from finetune.estimator.score.sharded import Fsdp1
from finetune.estimator.tape import Recorder, Tape

TYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_PACKED = ("nf4", "nf4-dq", "gptq4", "gptq4-column", "int8")


_MADE_ON_CPU = ("BOFTConfig", "UniLoraConfig")
"""Adapters that read what they have just drawn; small enough to be real."""


class CannotRun(Exception):
    """A job that cannot be run without memory; its text is the reason."""


def build_model(job: Job, layers: int | None = None) -> Any:
    """The model of `job` on the meta device, with `layers` layers instead of its own."""
    from transformers import AutoModelForCausalLM

    from finetune.estimator.score.shapes import config_of

    register_kernels()
    config = config_of(job.shape, layers)
    config.use_cache = False
    config.scored_compute = TYPES[job.compute]
    config.scored_mask = CausalMask()
    config._attn_implementation = NAMES.get(job.attention, job.attention)
    held = TYPES.get(job.weights, TYPES[job.compute])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=held)
    if config.model_type == "mixtral":
        separate_experts(model)
    model.train()
    return model


def adapt(model: Any, job: Job) -> Any:
    """Attach the adapter and hold the base as the job says. Returns the model to call."""
    base = model
    if job.adapter:
        import peft

        options = dict(job.adapter_options)
        half = options.pop("half", "")
        config_class = getattr(peft, options.pop("config_class", "LoraConfig"))
        options = {name: _thawed(value) for name, value in options.items()}
        config = config_class(task_type="CAUSAL_LM", **options)
        place = torch.device("cpu" if config_class.__name__ in _MADE_ON_CPU else "meta")
        try:
            with place:
                model = peft.get_peft_model(
                    model, config, autocast_adapter_dtype=job.adapter_type == "float32"
                )
        except NotImplementedError as error:  # an operator whose result depends on data
            raise CannotRun(f"{config_class.__name__} looks at data when it is made") from error
        except RuntimeError as error:
            if "meta" not in str(error):
                raise
            raise CannotRun(f"{config_class.__name__} looks at data when it is made") from error
        made = sum(p.numel() for p in model.parameters() if p.requires_grad)
        if half:  # the other factor of the adapter is frozen
            for name, p in model.named_parameters():
                if p.requires_grad:
                    p.requires_grad_(f"lora_{half}" in name)
            made = sum(p.numel() for p in model.parameters() if p.requires_grad)
        if job.trainable and made != job.trainable:
            raise CannotRun(
                f"the installed PEFT makes {config_class.__name__} of another size than the row's"
            )
    if job.weights in _PACKED:
        _hold_packed(base, base.get_output_embeddings(), job)
    if job.float32_rest:  # `prepare_model_for_kbit_training`: all that is not packed
        for p in base.parameters():
            if p.dtype in (torch.bfloat16, torch.float16):
                p.data = p.data.float()
    if job.float32_norms:
        for name, module in base.named_modules():
            if "norm" in name:
                module.float()
    if job.fused_kernels:
        _fuse(base, job)
    return model


def _thawed(value: Any) -> Any:
    if isinstance(value, tuple):
        pairs = bool(value) and all(isinstance(v, tuple) and len(v) == 2 for v in value)
        return dict(value) if pairs else list(value)
    return value


def _hold_packed(model: Any, head: nn.Module, job: Job) -> None:
    for module in list(model.modules()):
        inside = getattr(module, "base_layer", None)
        layer = inside if isinstance(inside, nn.Linear) else module
        plain = isinstance(layer, nn.Linear) and not layer.weight.requires_grad
        if (
            plain
            and not isinstance(layer, packed.PackedLinear)
            and (layer is not head or job.packs_head)
        ):
            packed.pack(layer, job.weights, TYPES[job.compute], keeps_input=job.keeps_packed_input)
    wrappers = {"bnb": packed.forward_bnb_lora, "gptq": packed.forward_gptq_lora}
    if job.lora_wrapper in wrappers:
        import types

        from peft.tuners.lora import LoraLayer

        for module in model.modules():
            if isinstance(module, LoraLayer):
                module.scored_autocast = job.autocast  # type: ignore[assignment]
                module.forward = types.MethodType(wrappers[job.lora_wrapper], module)


def _fuse(model: Any, job: Job) -> None:
    drop = float(dict(job.adapter_options).get("lora_dropout", 0.0))
    for module in model.modules():
        name = type(module).__name__
        if name.endswith("RMSNorm"):
            fused.fuse_norm(module)
        elif name in ("MistralAttention", "LlamaAttention", "MixtralAttention", "GraniteAttention"):
            if job.adapter:
                fused.fuse_attention(module, drop)


@contextlib.contextmanager
def _rotation(model: Any, job: Job) -> Iterator[None]:
    """With fused kernels, rotation is in place: the tensors that come are those that go."""
    import sys

    if not job.fused_kernels:
        yield
        return
    module: Any = sys.modules[type(model).__module__]
    if not hasattr(module, "apply_rotary_pos_emb"):
        yield
        return
    before = module.apply_rotary_pos_emb
    module.apply_rotary_pos_emb = lambda q, k, *_, **__: (q, k)
    try:
        yield
    finally:
        module.apply_rotary_pos_emb = before


def _cuda_dropout(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    """CUDA's dropout keeps a mask of one byte an element; the CPU's a tensor of the input's type."""
    return torch.native_dropout(input, p, True)[0] if training and p else input


@contextlib.contextmanager
def _dropping() -> Iterator[None]:
    before = torch.nn.functional.dropout
    torch.nn.functional.dropout = _cuda_dropout
    try:
        yield
    finally:
        torch.nn.functional.dropout = before


def decoder_layers(model: Any) -> list[nn.Module]:
    """The repeated layers of a model."""
    for module in model.modules():
        if (
            isinstance(module, nn.ModuleList)
            and len(module) > 0
            and not isinstance(module[0], nn.Linear)
        ):
            return list(module)
    raise LookupError(type(model).__name__)


class _Marks:
    """Marks on the tape where each layer begins, and where its backward ends."""

    def __init__(self) -> None:
        self.recorder: Recorder | None = None

    def enter(self, i: int, hidden: Tensor) -> None:
        """Layer `i` is about to run on `hidden`."""
        if self.recorder is None:
            return
        recorder = self.recorder
        recorder.mark(f"f{i}")
        if hidden.requires_grad:
            hidden.register_hook(lambda _: recorder.mark(f"b{i}"))


def _wrap(layer: Any, i: int, job: Job, marks: _Marks, shards: Fsdp1 | None) -> None:
    """Checkpoint around FSDP around the layer, as transformers before 5.2 nests them."""
    from torch.utils.checkpoint import checkpoint

    inner = layer.forward

    def forward(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        def unit(hidden: Tensor) -> Any:
            if shards is None:
                return inner(hidden, *args, **kwargs)
            shards.before(i, hidden)
            out = inner(hidden, *args, **kwargs)
            shards.after(i, hidden, out[0] if isinstance(out, tuple) else out)
            return out

        marks.enter(i, hidden)
        if job.checkpoint == "none":
            return unit(hidden)
        return checkpoint(
            unit, hidden, use_reentrant=job.checkpoint == "reentrant", preserve_rng_state=False
        )

    layer.forward = forward


def _keep_cache(layers: list[nn.Module]) -> list[Tensor]:
    """GPTBigCode keeps a cache in training too: a view of the product of q, k and v, so all of it."""
    kept: list[Tensor] = []

    def keep(_: Any, __: Any, out: Tensor) -> None:
        if not torch.is_grad_enabled():
            kept.append(out)

    for layer in layers:
        layer.attn.c_attn.register_forward_hook(keep)  # type: ignore[union-attr]
    return kept


def _optimizer(parameters: list[nn.Parameter], job: Job) -> torch.optim.Optimizer:
    kind = job.optimizer
    if kind == "adamw-foreach":
        return torch.optim.AdamW(parameters, foreach=True)
    if kind == "adamw-fused":
        return torch.optim.AdamW(parameters, fused=True)
    if kind == "adamw-for":
        return torch.optim.AdamW(parameters, foreach=False)
    return torch.optim.SGD(parameters, lr=0.1)


def _held(model: Any) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()
    for module in model.modules():
        if isinstance(module, packed.PackedLinear):
            yield from module.scales


class Rehearsed:
    """A job's model with all that its training step needs.

    Args:
        job: what to run.
        layers: layers to run instead of all.
        fresh: the optimizer has no states yet; the first step makes them.
    """

    def __init__(self, job: Job, layers: int | None = None, *, fresh: bool = False) -> None:
        self.job = job
        if job.engine == "litgpt":
            with torch.device("meta"):
                self.base: Any = LitGpt(job, layers).to(TYPES[job.compute])
            self.model = self.base.train()
            if job.weights in _PACKED:
                _hold_packed(self.base, self.base.lm_head, job)
        else:
            self.base = build_model(job, layers)
            self.model = adapt(self.base, job)
        base = self.base
        if not job.adapter:
            for p in base.parameters():
                p.requires_grad_(True)
        if job.input_grads and job.checkpoint != "none":
            base.enable_input_require_grads()
        blocks = decoder_layers(base)
        self.body = base if job.engine == "litgpt" else base.get_decoder()
        self.shards = Fsdp1(base, blocks, job, TYPES) if job.sharding == "fsdp1" else None
        self.marks = _Marks()
        for i, block in enumerate(blocks):
            _wrap(block, i, job, self.marks, self.shards)
        final = next(
            m
            for n, m in self.body.named_children()
            if n in ("norm", "ln_f", "final_layernorm", "final_layer_norm")
        )
        final.register_forward_pre_hook(lambda _, args: self.marks.enter(len(blocks), args[0]))
        self.cache = _keep_cache(blocks) if job.keeps_cache else []
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.trained = self.shards.trained(trained) if self.shards else trained
        self.optimizer = _optimizer(self.trained, job)
        states: list[Tensor] = [] if fresh else _first_step(self.optimizer, self.trained)
        active = getattr(self.model, "active_peft_config", None)
        self.prompted = active is not None and active.is_prompt_learning
        if job.accumulates:
            for p in self.trained:
                p.grad = torch.empty_like(p)
                states.append(p.grad)
        self.cast = CudaAutocast(TYPES[job.compute])
        self.outputs: Tensor | None = None
        workspace = torch.empty(job.workspace, dtype=torch.uint8, device="meta")
        self.workspace = workspace
        known = [*(self.shards.held() if self.shards else _held(base)), *states, workspace]
        self.recorder = Recorder(None, known)
        if self.shards:
            self.shards.recorder = self.recorder
        if self.shards:  # the model's own weights stand for views of what is gathered
            own = list(base.parameters())
            for tensor in own:
                self.recorder.hold(tensor)
            for number in self.recorder.numbers_of(own) - self.recorder.numbers_of(known):
                self.recorder.tape.held[number] = 0

    def _with_prompt(self, ids: Tensor) -> Tensor:
        """Embeddings behind the learned prompt, as `PeftModelForCausalLM.forward` joins them."""
        embedded = self.model.word_embeddings(ids)
        prompts = self.model.get_prompt(batch_size=ids.shape[0]).to(embedded.dtype)
        return torch.cat((prompts, embedded), dim=1)

    def step(self, length: int, *, marked: bool = True) -> None:
        """Write down one optimizer step over rows of `length` tokens."""
        job, recorder = self.job, self.recorder
        self.marks.recorder = recorder if marked else None
        ids = torch.zeros(job.batch, length, dtype=torch.long, device="meta")
        labels = torch.zeros_like(ids)
        if self.shards:
            self.shards.begin()
        if job.engine == "litgpt":
            loss, logits = self.base.loss(ids, labels), None
        else:
            loss, logits = self._loss(ids, labels)
        self.outputs = logits if job.outputs_held else None
        del logits
        # checkpointed layers run again under the context they ran under at first
        again = self.cast if job.autocast and job.checkpoint != "none" else contextlib.nullcontext()
        with recorder.during("backward"), again:
            loss.backward()
        del loss
        recorder.mark("step")
        with recorder.during("optimizer"):
            if self.shards:
                self.shards.finish()
            torch._foreach_norm([p.grad for p in self.trained if p.grad is not None])
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        recorder.mark("end")

    def _loss(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor | None]:
        """Forward of the model of transformers, and its loss; ids, labels [B, L]."""
        job, recorder = self.job, self.recorder
        with self.cast if job.autocast else contextlib.nullcontext():
            given: dict[str, Any] = {"input_ids": ids}
            if self.prompted:
                given = {"inputs_embeds": self._with_prompt(ids)}
                labels = torch.cat(
                    (
                        labels.new_empty(
                            given["inputs_embeds"].shape[0],
                            given["inputs_embeds"].shape[1] - ids.shape[1],
                        ),
                        labels,
                    ),
                    dim=1,
                )
            hidden = self.body(**given, attention_mask=None, use_cache=False).last_hidden_state
            del given
            recorder.mark("head")
            loss, logits = take_loss(
                job.loss, hidden, self.base.get_output_embeddings(), labels,
                low=TYPES[job.compute], fast=job.fast_loss,
                scale=getattr(self.base.config, "logits_scaling", None),
                outputs_in_float32=job.outputs_in_float32,
            )  # fmt: skip
            del hidden
            self.cache.clear()
        return loss, logits


def _first_step(optimizer: torch.optim.Optimizer, trained: list[nn.Parameter]) -> list[Tensor]:
    """Make the optimizer's states; returns them."""
    for p in trained:
        p.grad = torch.empty_like(p)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return [t for s in optimizer.state.values() for t in s.values() if isinstance(t, Tensor)]


def record_step(job: Job, layers: int | None = None) -> tuple[Tape, set[int]]:
    """The tape of one steady optimizer step of `job`, and which of its storages FSDP gathers."""
    with _dropping():
        run = Rehearsed(job, layers)
        with _rotation(run.base, job), run.recorder:
            run.step(job.length)
    tape, gathered = run.recorder.tape, run.shards.gathered if run.shards else set()
    del run
    gc.collect()
    return tape, gathered


def record_run(job: Job, lengths: tuple[int, ...]) -> tuple[Tape, list[int]]:
    """The tape of the first steps of `job`, over rows of these lengths, and where each step ends."""
    ends: list[int] = []
    with _dropping():
        run = Rehearsed(job, fresh=True)
        with _rotation(run.base, job), run.recorder:
            for i, length in enumerate(lengths):
                run.step(length, marked=i + 1 == len(lengths))
                ends.append(len(run.recorder.tape.events))
    tape = run.recorder.tape
    del run
    gc.collect()
    return tape, ends
