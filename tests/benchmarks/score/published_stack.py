"""What the libraries of a published run did otherwise than the installed ones.

A row is predicted by the shipped estimator: a `RunConfig` is rehearsed and measured. The rehearsal
runs the *installed* Transformers, TRL and PEFT, and a run of two years ago ran others. Each
difference that decides memory is one function here, taken from the code of that version, and is put
in place while the row is rehearsed. None is fitted to a measurement:

* the path of the loss: older Transformers copied the logits (`losses`), and TRL fused no head;
* adapters: any method of PEFT; adapters of BF16; one factor frozen (LoRA-FA, MiCA);
* layers held in float32 (`prepare_model_for_kbit_training`, TRL's norms);
* weights held by GPTQ: codes and scales of other sizes (`packed_bytes`);
* keys and values repeated for each head before flash attention (Mistral before Transformers 4.48);
* Mixtral's experts as linear layers (before Transformers 5), a cache kept in training (GPTBigCode);
* fused kernels of fms-acceleration (`foak`), and FSDP 1 (`fsdp1`);
* rows of one length, that no documents are packed into without padding;
* the version of torch, which decides the attention kernel and cuBLAS's workspaces;
* products in the type of the weights, without autocast: a run of ours is refused.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from finetune.estimator import predict
from finetune.estimator.memory import overheads
from finetune.estimator.trace import fake_cuda, rehearsal
from finetune.estimator.trace.fake_cuda import replaced
from finetune.precision.planner import plan
from tests.benchmarks.score import foak, fsdp1
from tests.benchmarks.score.jobs import REPEATED, Job
from tests.benchmarks.score.losses import take_loss
from tests.benchmarks.score.packed import GPTQ, packed_bytes
from tests.benchmarks.score.shapes import shape_of

_MADE_ON_CPU = ("BOFT", "UniLora")
"""Adapters that read what they have just drawn; small enough to be real."""
_LOW = (torch.bfloat16, torch.float16)


@contextlib.contextmanager
def as_published(job: Job) -> Iterator[None]:
    """Rehearse with the libraries of `job` while this is entered."""
    import peft
    import trl.trainer.sft_trainer as sft
    from transformers.models.mixtral import modeling_mixtral

    register_repeated_keys()
    store_base, make_adapters = rehearsal.store_base, peft.get_peft_model
    rehearse = predict.rehearse

    def store(model: Any, storage: str | None) -> None:
        store_base(model, storage)
        rebuild(model, job)

    def adapt(base: Any, _: Any) -> Any:
        with torch.device("cpu" if job.adapter_class in _MADE_ON_CPU else "meta"):
            return make_adapters(
                base, _peft_config(job), autocast_adapter_dtype=job.adapter_type == "float32"
            )

    def rehearse_rows(*args: Any, **kwargs: Any) -> Any:
        return rehearse(*args, **{**kwargs, "padded": job.padded})

    changes: list[tuple[Any, str, Any]] = [
        (predict, "rehearse", rehearse_rows),
        (predict, "_made", lambda wanted: wanted.make()),  # each with libraries of its own
        (overheads, "torch_of_gpus", lambda: job.torch),
        (fake_cuda, "torch_of_gpus", lambda: job.torch),
        (rehearsal, "check_settings", lambda _, *planned: plan(*planned)),
        (rehearsal, "store_base", store),
        (peft, "get_peft_model", adapt),
        (sft, "add_fused_lm_head", lambda *_, **__: None),
        (sft.SFTTrainer, "compute_loss", _compute_loss(job)),
        (modeling_mixtral, "MixtralSparseMoeBlock", ExpertsOneByOne),
    ]
    if job.sharding == "fsdp1":
        changes += fsdp1.trainer_changes(sft.SFTTrainer)
    with replaced(changes), contextlib.ExitStack() as stack:
        if job.fused_kernels:
            stack.enter_context(foak.rotation_in_place(shape_of(job.shape).of))
        yield


def rebuild(model: Any, job: Job) -> None:
    """Make a model of fake tensors the one that the job trained, in place."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    sharded = job.sharding == "fsdp1"
    if job.weights in GPTQ or sharded:
        repack(base, job)
    if job.half:  # the other factor of the adapter is frozen
        for name, p in model.named_parameters():
            p.requires_grad_(p.requires_grad and f"lora_{job.half}" in name)
    if job.float32_rest:
        for p in base.parameters():
            p.data = p.data.float() if p.dtype in _LOW else p.data
    if job.float32_norms:
        for name, module in base.named_modules():
            for key, p in module.named_parameters(recurse=False) if "norm" in name else ():
                setattr(module, key, nn.Parameter(p.float(), requires_grad=p.requires_grad))
    if job.fused_kernels:
        foak.fuse(model, job)
    if job.keeps_cache:
        keep_cache(base)
    base.forward = types.MethodType(_forward(job), base)
    if sharded:
        fsdp1.share(model, base, job)


# ------------------------------------------------------------------------------------------ loss


def _forward(job: Job) -> Callable[..., Any]:
    from transformers.modeling_outputs import CausalLMOutput

    def forward(
        base: Any, input_ids: Any = None, labels: Any = None, inputs_embeds: Any = None,
        attention_mask: Any = None, **_: Any,
    ) -> CausalLMOutput:  # fmt: skip
        given = {"input_ids": input_ids} if inputs_embeds is None else {
            "inputs_embeds": inputs_embeds}  # fmt: skip
        found = base.get_decoder()(**given, attention_mask=attention_mask, use_cache=False)
        hidden = found.last_hidden_state
        del found, inputs_embeds, given
        loss, logits = take_loss(
            job.loss, hidden, base.get_output_embeddings(), labels, fast=job.fast_loss,
            scale=getattr(base.config, "logits_scaling", None),
        )  # fmt: skip
        del hidden
        return CausalLMOutput(loss=loss, logits=logits)

    return forward


def _compute_loss(job: Job) -> Callable[..., Tensor]:
    """`Trainer.compute_loss` of Transformers 4; TRL 0.13 had none of its own."""

    def compute_loss(trainer: Any, model: Any, inputs: Any, *_: Any, **__: Any) -> Tensor:
        outputs = model(**inputs)
        if job.outputs_held:  # until the loop of the next step assigns the name again
            trainer.published_outputs = outputs
        for module in model.modules() if job.keeps_cache else ():
            vars(module).get("published_cache", []).clear()  # goes with the outputs
        return outputs["loss"]

    return compute_loss


# ---------------------------------------------------------------------------------------- adapters


def _peft_config(job: Job) -> Any:
    import peft

    kind = getattr(peft, f"{job.adapter_class}Config")
    return kind(task_type="CAUSAL_LM", **{k: _plain(v) for k, v in job.adapter_options})


def _plain(value: Any) -> Any:
    """Lists and dictionaries, of the tuples that make a job hashable."""
    if isinstance(value, tuple):
        pairs = bool(value) and all(isinstance(v, tuple) and len(v) == 2 for v in value)
        return dict(value) if pairs else list(value)
    return value


# ---------------------------------------------------------------------------------- packed weights


def repack(base: Any, job: Job) -> None:
    """Hold the 4-bit layers in the job's form, codes apart from scales (FSDP shards codes only)."""
    from bitsandbytes.nn import Linear4bit
    from peft.tuners.lora import LoraLayer

    for module in [m for m in base.modules() if isinstance(m, Linear4bit)]:
        codes, scales = packed_bytes(job.weights, module.out_features, module.in_features)
        module.weight = nn.Parameter(torch.empty(codes, dtype=torch.uint8), requires_grad=False)  # pyright: ignore[reportAttributeAccessIssue]
        module.register_buffer("scales", torch.empty(scales, dtype=torch.uint8))
    if job.weights in GPTQ:
        for layer in [m for m in base.modules() if isinstance(m, LoraLayer)]:
            layer.forward = types.MethodType(_gptq_forward, layer)  # pyright: ignore[reportAttributeAccessIssue]


def _gptq_forward(self: Any, x: Tensor, *_: Any, **__: Any) -> Tensor:
    """`peft.tuners.lora.gptq.QuantLinear.forward`, and fms's `GPTQLoraLinear`."""
    result = self.base_layer(x)
    autocast = torch.is_autocast_enabled("cpu")
    for name in self.active_adapters:
        a, b, dropout = self.lora_A[name], self.lora_B[name], self.lora_dropout[name]
        added = b(a(dropout(x if autocast else x.to(a.weight.dtype))))
        added = added if autocast else added.to(result.dtype)
        result = result + added * self.scaling[name]
    return result


# --------------------------------------------------------------------------------- models of before


def register_repeated_keys() -> None:
    """Make `REPEATED` known to Transformers: FlashAttention 2 over keys repeated for each head."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, flash_attention_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **_: Any
    ) -> tuple[Tensor, None]:
        times = query.shape[1] // key.shape[1]
        key, value = _repeated(key, times), _repeated(value, times)
        # FlashAttention takes no float32: Transformers casts to the type of computing.
        query, key, value = (
            t.to(torch.bfloat16) if t.dtype is torch.float32 else t for t in (query, key, value)
        )
        return fake_cuda.fused(query, key, value, None, True, "flash").transpose(1, 2), None

    if REPEATED not in ALL_ATTENTION_FUNCTIONS:
        ALL_ATTENTION_FUNCTIONS.register(REPEATED, attend)
        ALL_MASK_ATTENTION_FUNCTIONS.register(REPEATED, flash_attention_mask)


def _repeated(x: Tensor, times: int) -> Tensor:
    if times == 1:
        return x
    batch, heads, length, size = x.shape
    wide = x[:, :, None].expand(batch, heads, times, length, size)
    return wide.reshape(batch, heads * times, length, size)


class _Expert(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(hidden, inner, bias=False)
        self.w2 = nn.Linear(inner, hidden, bias=False)
        self.w3 = nn.Linear(hidden, inner, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))


class ExpertsOneByOne(nn.Module):
    """`MixtralSparseMoeBlock` of Transformers 4.36 to 4.57: linear layers, one expert at a time.

    Routing depends on the data; here every expert gets an equal share of tokens, as a loss for
    balance asks of it.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.top = config.num_experts_per_tok
        self.gate = nn.Linear(config.hidden_size, config.num_local_experts, bias=False)
        self.experts = nn.ModuleList(
            _Expert(config.hidden_size, config.intermediate_size)
            for _ in range(config.num_local_experts)
        )

    def forward(self, hidden_states: Tensor) -> Tensor:
        """hidden_states [B, L, H] -> [B, L, H]."""
        batch, length, size = hidden_states.shape
        x = hidden_states.view(-1, size)
        weights = nn.functional.softmax(self.gate(x), dim=1, dtype=torch.float)
        weights, chosen = torch.topk(weights, self.top, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        weights = weights.to(x.dtype)
        final = torch.zeros_like(x)
        mask = nn.functional.one_hot(chosen, len(self.experts)).permute(2, 1, 0)
        share = x.shape[0] * self.top // len(self.experts)
        for expert in self.experts:
            tokens, ranks = mask.new_empty(share), mask.new_empty(share)
            inner = x[None, tokens].reshape(-1, size)
            out = expert(inner) * weights[tokens, ranks, None]
            final.index_add_(0, tokens, out.to(x.dtype))
        return final.view(batch, length, size)


def keep_cache(base: Any) -> None:
    """GPTBigCode keeps a cache in training too: views of the product of q, k, v, so all of it."""
    base.published_cache = []

    def keep(_: Any, __: Any, out: Tensor) -> None:
        if not torch.is_grad_enabled():
            base.published_cache.append(out)

    for layer in base.transformer.h:
        layer.attn.c_attn.register_forward_hook(keep)
