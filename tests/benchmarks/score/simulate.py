"""Runs a job on tensors without memory and writes down what it allocates.

The model (`building`), what is put around its layers (`wrapping`), the path of its loss (`losses`),
the optimizer of torch. One optimizer step is written down, after one that made the optimizer's
states: a steady step is where the peak is.

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

from finetune.estimator.trace.trace import Recorder, Tape
from tests.benchmarks.score import packed
from tests.benchmarks.score.autocast import CudaAutocast
from tests.benchmarks.score.building import (
    PACKED,
    TYPES,
    CannotRunError,
    adapt,
    build_model,
    hold_packed,
)
from tests.benchmarks.score.job import Job
from tests.benchmarks.score.litgpt import LitGpt
from tests.benchmarks.score.losses import take_loss
from tests.benchmarks.score.sharded import Fsdp1
from tests.benchmarks.score.wrapping import (
    Marks,
    cuda_dropout,
    decoder_layers,
    keep_cache,
    rotation_in_place,
    wrap,
)


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


class Run:
    """A job's model with all that its training step needs.

    Args:
        job: what to run.
        layers: layers to run instead of all.
    """

    def __init__(self, job: Job, layers: int | None = None) -> None:
        self.job = job
        if job.engine == "litgpt":
            with torch.device("meta"):
                self.base: Any = LitGpt(job, layers).to(TYPES[job.compute])
            self.model = self.base.train()
            if job.weights in PACKED:
                hold_packed(self.base, self.base.lm_head, job)
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
        self.marks = Marks()
        for i, block in enumerate(blocks):
            wrap(block, i, job, self.marks, self.shards)
        final = next(
            m
            for n, m in self.body.named_children()
            if n in ("norm", "ln_f", "final_layernorm", "final_layer_norm")
        )
        final.register_forward_pre_hook(lambda _, args: self.marks.enter(len(blocks), args[0]))
        self.cache = keep_cache(blocks) if job.keeps_cache else []
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.trained = self.shards.trained(trained) if self.shards else trained
        self.optimizer = _optimizer(self.trained, job)
        states = _first_step(self.optimizer, self.trained)
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
        known = [*(self.shards.held() if self.shards else _held(self.model)), *states, workspace]
        self.recorder = Recorder(None, known)
        if self.shards:
            self.shards.recorder = self.recorder
            # the model's own weights stand for views of what is gathered
            own = [*base.parameters(), *self.trained]
            for tensor in own:
                self.recorder.hold(tensor)
            for number in self.recorder.numbers_of(own) - self.recorder.numbers_of(known):
                self.recorder.tape.held[number] = 0

    def _with_prompt(self, ids: Tensor) -> Tensor:
        """Embeddings behind the learned prompt, as `PeftModelForCausalLM.forward` joins them."""
        embedded = self.model.word_embeddings(ids)
        prompts = self.model.get_prompt(batch_size=ids.shape[0]).to(embedded.dtype)
        return torch.cat((prompts, embedded), dim=1)

    def step(self) -> None:
        """Write down one optimizer step."""
        job, recorder = self.job, self.recorder
        self.marks.recorder = recorder
        ids = torch.zeros(job.batch, job.length, dtype=torch.long, device="meta")
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
                prompt = given["inputs_embeds"].shape[1] - ids.shape[1]
                labels = torch.cat((labels.new_empty(ids.shape[0], prompt), labels), dim=1)
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
    """The tape of one steady optimizer step of `job`, and which of its storages FSDP gathers.

    Raises:
        CannotRunError: its adapter looks at data, which tensors without memory do not have.
    """
    with cuda_dropout():
        run = Run(job, layers)
        try:
            with rotation_in_place(run.base, job), run.recorder:
                run.step()
        except RuntimeError as error:
            if "meta" not in str(error):
                raise
            raise CannotRunError(f"{job.adapter} looks at data in forward") from error
    tape, gathered = run.recorder.tape, run.shards.gathered if run.shards else set()
    del run
    gc.collect()
    return tape, gathered
