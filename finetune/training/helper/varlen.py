"""Attention over documents of different lengths without a mask: `attn_implementation="varlen"`.

Packed and padding-free rows hold several documents behind one another. SDPA keeps them apart by a
mask of T x T elements and computes every one of them, also those between documents. Here the
boundaries of the documents, `cu_seq_lens_q` as TRL's collators give them, replace the mask:

    3 documents of 2, 4 and 1 tokens    cu_seq_lens_q = [0 2 6 7]; [0 2 6 7 7 7] is the same

* *CUDA*: `torch.nn.attention.varlen.varlen_attn`. cuDNN's kernel on Hopper and data-centre
  Blackwell from torch 2.15 on (`hardware.device.varlen_kernel`), elsewhere FlashAttention-2 of
  torch's own wheel, or the implementation that `activate_flash_attention_impl` of
  `torch.nn.attention` has made the current one.
* *Elsewhere*: `finetune::varlen_attention`, a loop over blocks of queries in plain torch. It is one
  opaque operator, as the kernel is, so that compiled graphs, traces and counts of FLOPs are alike.

Calls without boundaries stay right, too. Rows without padding are documents of their own: SDPA
without a mask, or this operator under a sliding window. Packed `position_ids` alone give
boundaries, at the cost of one synchronization per layer. Padded rows and steps with a cache run
SDPA under Transformers' mask. Forward and mask are registered in Transformers by `register`.
`FixedDocuments` gives nearly all batches one shape: each other one costs compiled layers a graph,
and cuDNN two plans, which take 0.1 to 2 seconds.

Shapes: q [T, H, D]; k [T, Hkv, D]; v [T, Hkv, Dv]; H is a multiple of Hkv.
"""

from __future__ import annotations

import inspect
import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import attention
from torch.nn import functional as F
from torch.nn.attention.varlen import varlen_attn
from torch.utils.flop_counter import flop_registry, register_flop_formula

from finetune.config.train_keys import TrainerArguments
from finetune.errors import ConfigError
from finetune.hardware.device import varlen_kernel
from finetune.hardware.versions import installed_torch

NAME = "varlen"
UNLIMITED = -1
"""Left window of full causal attention."""
BLOCK = 512
"""Queries at a time, which bounds the scores in memory to [H, BLOCK, document]."""
ROOM = 8
"""Documents x longest, per token of a batch, up to which cuDNN's kernel is taken.

Its backward holds gradients of queries in float32 and of keys and values for every query head, for
all documents as if each were the longest (cudnn-frontend's `CompositeSDPABackwardNode`; torch 2.15
does not tell it the number of tokens): 8 times 256 MiB for 8,192 tokens and 32 heads of 128.
"""
_ran: WeakKeyDictionary[nn.Module, frozenset[str]] = WeakKeyDictionary()
"""Attention of a layer -> names of the kernels that it has trained with, for receipts."""
_TAKES = frozenset(inspect.signature(varlen_attn).parameters)
"""Arguments of torch's function: 2.11 has no scale, 2.12 no `enable_gqa`."""


# --------------------------------------------------------------------------------------- operator


@torch.library.custom_op("finetune::varlen_attention", mutates_args=())
def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, boundaries: Tensor, scale: float, window: int
) -> Tensor:
    """Output [T, H, Dv] of causal attention within documents.

    Args:
        boundaries: cumulative lengths [documents + 1] from 0 to T; documents may be empty.
        window: tokens before its own that a query sees; `UNLIMITED` for all.

    Raises:
        ValueError: the boundaries are not a partition of 0 to T.
    """
    out = q.new_empty((*q.shape[:2], v.shape[-1]))
    for rows, seen in _blocks(boundaries, len(q), window):
        p = _probabilities(q, k, rows, seen, scale, window)
        out[rows] = torch.einsum("hgnm,mhd->nhgd", p, v[seen].to(p.dtype)).flatten(1, 2)
    return out


@torch.library.custom_op("finetune::varlen_attention_backward", mutates_args=())
def varlen_attention_backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, boundaries: Tensor, scale: float, window: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v for a gradient g [T, H, Dv]; probabilities are computed again.

    With P = softmax(S), dP = g Vᵀ: dV = Pᵀ g, dS = P (dP - rowsum(P dP)), dQ = dS K, dK = dSᵀ Q.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    dq, dk, dv = (torch.zeros_like(x, dtype=wide) for x in (q, k, v))
    groups = (k.shape[1], -1)
    for rows, seen in _blocks(boundaries, len(q), window):
        grad, query = (x[rows].to(wide).unflatten(1, groups) for x in (g, q))
        p = _probabilities(q, k, rows, seen, scale, window)
        dp = torch.einsum("nhgd,mhd->hgnm", grad, v[seen].to(wide))
        # The derivative of softmax: dS = P (dP - sum of P dP over the keys).
        ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * scale
        dq[rows] = torch.einsum("hgnm,mhd->nhgd", ds, k[seen].to(wide)).flatten(1, 2)
        # Added up, since several blocks of queries see a key.
        dk[seen] += torch.einsum("hgnm,nhgd->mhd", ds, query)
        dv[seen] += torch.einsum("hgnm,nhgd->mhd", p, grad)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _blocks(boundaries: Tensor, tokens: int, window: int) -> Iterator[tuple[slice, slice]]:
    """Yield blocks of queries, and the keys that some query of the block sees.

    Boundaries [0 3 5] and blocks of 2 queries: queries 0-1 see keys 0-1, query 2 sees 0-2, queries
    3-4 see 3-4. With a window of 1, query 2 sees keys 1-2.
    """
    ends = boundaries.tolist()
    if ends[0] or ends[-1] != tokens or ends != sorted(ends):  # the rest would be left unwritten
        raise ValueError(f"documents end at token {ends[-1]} of {tokens}, and begin at {ends[0]}")
    for begin, end in itertools.pairwise(ends):
        for first in range(begin, end, BLOCK):
            last = min(first + BLOCK, end)
            lowest = begin if window == UNLIMITED else max(begin, first - window)
            yield slice(first, last), slice(lowest, last)


def _probabilities(
    q: Tensor, k: Tensor, rows: slice, seen: slice, scale: float, window: int
) -> Tensor:
    """Probabilities [Hkv, H / Hkv, queries, keys] in float32 or wider."""
    wide = torch.promote_types(q.dtype, torch.float32)
    # q [n, H, D] -> [n, Hkv, H / Hkv, D]: query heads of a group share one key head.
    query, key = q[rows].to(wide).unflatten(1, (k.shape[1], -1)), k[seen].to(wide)
    ahead = torch.arange(rows.start, rows.stop, device=q.device)[:, None]
    ahead = ahead - torch.arange(seen.start, seen.stop, device=q.device)
    # ahead [queries, keys]: position of the query minus position of the key.
    hidden = ahead < 0 if window == UNLIMITED else (ahead < 0) | (ahead > window)
    scores = torch.einsum("nhgd,mhd->hgnm", query, key) * scale
    return scores.masked_fill(hidden, -torch.inf).softmax(-1)


@varlen_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
    return q.new_empty((*q.shape[:2], v.shape[-1]))


@varlen_attention_backward.register_fake
def _(g: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(torch.empty_like(x) for x in (q, k, v))  # pyright: ignore[reportReturnType]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.scale, ctx.window = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    gradients = varlen_attention_backward(g, *ctx.saved_tensors, ctx.scale, ctx.window)
    return (*gradients, None, None, None)


varlen_attention.register_autograd(_backward, setup_context=_keep)


@register_flop_formula(torch.ops.finetune.varlen_attention, get_raw=True)
def _forward_flops(q: Tensor, k: Tensor, v: Tensor, boundaries: Tensor, *_: Any, **__: Any) -> int:
    """Two products per document, each counted in full, as torch counts causal attention."""
    return 2 * _pairs(boundaries) * q.shape[1] * (q.shape[-1] + v.shape[-1])


@register_flop_formula(torch.ops.finetune.varlen_attention_backward, get_raw=True)
def _backward_flops(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, boundaries: Tensor, *_: Any, **__: Any
) -> int:
    """Five products: scores again, dP and dV, dQ and dK."""
    return 2 * _pairs(boundaries) * q.shape[1] * (3 * q.shape[-1] + 2 * v.shape[-1])


def _pairs(boundaries: Tensor) -> int:
    """Pairs of query and key of one document."""
    # In 64 bits: a document of 65,536 tokens has 2^32 pairs.
    return int(boundaries.diff().long().square().sum())


def count_kernel() -> None:
    """Let the FLOPs of torch's kernel be counted, which the witness does: by torch from 2.12 on."""
    kernel = torch.ops.torch_attn
    # From torch 2.12 on; a second formula for an operator is an error.
    if kernel._varlen_attn in flop_registry:
        return

    def backward_flops(*given: Any, **_: Any) -> int:
        """Of g, q, k, v, the result, its log-sum-exp and boundaries."""
        return _backward_flops(*given[:4], given[6])

    register_flop_formula(kernel._varlen_attn, get_raw=True)(_forward_flops)
    register_flop_formula(kernel._varlen_attn_backward, get_raw=True)(backward_flops)


count_kernel()


# --------------------------------------------------------------------------- Transformers' function


def varlen_attention_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    dropout: float = 0.0, scaling: float | None = None, sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None, max_length_q: int | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attention of a layer, as Transformers' `AttentionInterface` calls it.

    Args:
        query, key, value: [B, heads, L, D].
        attention_mask: from `varlen_mask`: None, a mask of four dimensions, or the first tokens of
            documents [B, L].
        sliding_window: tokens that a query sees, its own included.
        cu_seq_lens_q, max_length_q: boundaries of the documents over all B L tokens, and the
            length of the longest.

    Returns:
        Output [B, L, H, D], and no weights.

    Raises:
        ConfigError: attention that this kernel lacks (softcap, sinks, dropout, float32 on a GPU),
            or a padding mask beside boundaries.
    """
    masked = attention_mask is not None and attention_mask.ndim == 4
    batch, _, length, _ = query.shape
    if masked and cu_seq_lens_q is not None:
        raise ConfigError(
            "rows have a mask, and boundaries of documents",
            where="attention_mask and cu_seq_lens_q",
            why="padding, a cache, or a pattern besides causal attention made a mask, and varlen "
            "attention takes boundaries alone",
            fix="leave attention_mask out, or model.attention=sdpa",
        )
    windowed = sliding_window is not None and sliding_window < length
    # SDPA would need a mask for the window; rows of equal length are documents of this operator.
    if cu_seq_lens_q is None and attention_mask is None and windowed and key.shape[2] == length:
        cu_seq_lens_q = torch.arange(0, batch * length + 1, length, device=query.device)
        max_length_q = length
    elif cu_seq_lens_q is None and attention_mask is not None and not masked:
        cu_seq_lens_q = _boundaries(attention_mask)
    if cu_seq_lens_q is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        _refuse({"attention sinks": kwargs.get("s_aux") is not None})  # SDPA would ignore them
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    if torch.is_autocast_enabled(query.device.type):  # custom operators are unknown to autocast
        narrow = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(narrow), key.to(narrow), value.to(narrow)
    causal = kwargs.get("is_causal")
    _refuse(
        {
            "attention sinks": kwargs.get("s_aux") is not None,
            "soft-capped scores": kwargs.get("softcap") is not None,
            "position bias": kwargs.get("position_bias") is not None,
            "dropout of attention weights": dropout > 0,
            "bidirectional form": not (
                getattr(module, "is_causal", True) if causal is None else causal
            ),
            "form for float32 on a GPU": query.is_cuda and query.dtype == torch.float32,
            "kernel in torch 2.10": query.is_cuda and not runs_on_cuda(),
        }
    )
    # [B, heads, L, D] -> [B L, heads, D]
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    # Transformers counts the query itself in its window; the kernel does not.
    window = UNLIMITED if sliding_window is None else sliding_window - 1
    boundaries, longest = cu_seq_lens_q.to(torch.int32), max_length_q or len(q)
    kernel = _kernel(q, len(boundaries) - 1, longest, window)
    # Layers run uncompiled first, to be observed; a graph would be guarded by what is written.
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        # Without gradients it is an evaluation, whose kernel says nothing about training.
        _ran[module] = _ran.get(module, frozenset()) | {kernel}
    if query.is_cuda:
        out = _on_cuda(q, k, v, boundaries, longest, scale, window, kernel)
    else:
        out = varlen_attention(q, k, v, boundaries, scale, window)
    return out.unflatten(0, (batch, length)), None


def runs_on_cuda() -> bool:
    """True if torch's varlen attention has sliding windows, as it has from 2.11 on."""
    return "window_size" in _TAKES


def _kernel(q: Tensor, documents: int, longest: int, window: int) -> str:
    """Name of the kernel for queries [T, H, D]."""
    if not q.is_cuda:
        return "a loop over documents"
    kernel = _kernel_here(q.shape[-1], window != UNLIMITED)
    wide = kernel == "cuDNN" and documents * longest > ROOM * len(q)
    return "FlashAttention-2" if wide else kernel


@torch.compiler.assume_constant_result
def _kernel_here(head_dim: int, windowed: bool) -> str:
    """Name of the kernel on this GPU for batches that are not too wide (`ROOM`)."""
    current: Any = getattr(attention, "current_flash_attention_impl", lambda: None)
    if (chosen := current()) is not None:  # what a user has activated is what he gets
        return chosen.replace("FA", "FlashAttention-")
    if not torch.backends.cuda.cudnn_sdp_enabled():
        return "FlashAttention-2"
    return varlen_kernel(
        torch.cuda.get_device_capability(),
        installed_torch(),
        torch.backends.cudnn.version() or 0,
        head_dim=head_dim,
        windowed=windowed,
    )


def _on_cuda(
    q: Tensor, k: Tensor, v: Tensor, boundaries: Tensor, longest: int, scale: float, window: int,
    kernel: str,
) -> Tensor:  # fmt: skip
    more: dict[str, Any] = {"window_size": (window, 0)}
    if "scale" in _TAKES:
        more["scale"] = scale
    else:
        # The kernel then divides by sqrt(D), so this leaves `scale`.
        q = q * (scale * q.shape[-1] ** 0.5)
    if "enable_gqa" in _TAKES:  # 2.13 refuses grouped heads without it; earlier ones lack it
        more["enable_gqa"] = q.shape[1] != k.shape[1]
    short = q.shape[-1] - v.shape[-1]  # multi-head latent attention: values are narrower
    wide = F.pad(v, [0, short]) if short else v
    # torch takes cuDNN only if both boundaries are one object: a view of them is another.
    ends = boundaries if kernel == "cuDNN" else boundaries[:]
    out: Any = varlen_attn(q, k, wide, boundaries, ends, longest, longest, **more)
    return out[..., : v.shape[-1]] if short else out


def _refuse(found: dict[str, bool]) -> None:
    """Raise for attention that would silently be another one."""
    for what in (what for what, is_so in found.items() if is_so):
        raise ConfigError(
            f"varlen attention has no {what}",
            where=f"model.attention: {NAME}",
            why="FlashAttention as torch ships it computes plain causal attention in 16 bits",
            fix="model.attention=eager"
            if what in ("attention sinks", "soft-capped scores")
            else "model.attention=sdpa",
        )


# -------------------------------------------------------------------------------------------- mask


def varlen_mask(
    batch_size: int, q_length: int, kv_length: int, q_offset: Any = 0, kv_offset: int = 0,
    mask_function: Any = None, attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True, use_vmap: bool = False, config: Any = None,
    device: torch.device | str = "cpu", **kwargs: Any,
) -> Tensor | None:  # fmt: skip
    """Mask of a model's layers, as Transformers' `AttentionMaskInterface` calls it.

    Returns:
        None for whole causal rows; the first tokens of documents [B, L], in O(L), where
        Transformers has found them in `position_ids`; SDPA's mask for anything else: padding, a
        cache, chunks, patterns of a model's own.
    """
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    mask_function = mask_function or causal_mask_function
    # Chunks are a pattern besides causal attention, which no boundary of documents tells.
    chunked = getattr(config, "attention_chunk_size", None) is not None
    other = use_vmap or chunked or "allow_is_bidirectional_skip" in kwargs
    padded = attention_mask is not None and not bool(attention_mask.all())
    if other or padded or q_length != kv_length:
        return sdpa_mask(
            batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask,
            allow_is_causal_skip=allow_is_causal_skip, use_vmap=use_vmap, config=config,
            device=device, **kwargs,
        )  # fmt: skip
    # None: causal attention alone, as `is_causal` says it.
    if allow_is_causal_skip:
        return None
    row = torch.arange(batch_size, device=device)[:, None]
    here = torch.arange(q_length, device=device)
    # A token that does not see its predecessor is the first of its document.
    sees = mask_function(row, torch.zeros_like(row), here[None], (here - 1).clamp(min=0)[None])
    return ~(sees & (here > 0)).expand(batch_size, -1)


def _boundaries(first: Tensor) -> Tensor:
    """Cumulative lengths of the documents of all rows, from their first tokens [B, L]."""
    starts = first.flatten().nonzero().flatten()
    return torch.cat([starts, starts.new_tensor([first.numel()])])


def register() -> None:
    """Make `attn_implementation="varlen"` known to Transformers; again is harmless."""
    from transformers import AttentionInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    AttentionInterface.register(NAME, varlen_attention_forward)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, varlen_mask)


def executed_attention(model: nn.Module) -> str:
    """Implementation of a model, and with `varlen` the kernels that ran, for receipts."""
    name = str(getattr(getattr(model, "config", None), "_attn_implementation", None) or "")
    ran = frozenset[str]().union(*(_ran.get(m, ()) for m in model.modules()))
    return ", ".join([name, " and ".join(sorted(ran))]) if name == NAME and ran else name


# ----------------------------------------------------------------------------------------- batches


class FixedDocuments:
    """TRL's collator with boundaries of one shape, so that compiled layers keep one graph.

    With usually 4 documents, of at most 9 tokens, [0 3 7 9] and [0 5 9] become [0 3 7 9 9] and
    [0 5 9 9 9], and the longest has 9 tokens in both. Documents without tokens cost nothing. Tokens
    of padding, which the collator makes documents of their own, become one document.

    Args:
        collate: `torch_call` of the collator.
        documents: number that most batches do not exceed, padding included; doubled until it
            suffices, so that other batches have few shapes.
        longest: bound of a document; None where rows are not known beforehand: the next power of
            two of each batch.
    """

    def __init__(
        self,
        collate: Callable[[list[dict[str, Any]]], dict[str, Any]],
        documents: int,
        longest: int | None,
    ) -> None:
        self.collate, self.documents, self.longest = collate, documents, longest

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        batch = self.collate(rows)
        if "cu_seq_lens_q" in batch:
            given, tokens = batch["cu_seq_lens_q"], sum(len(row["input_ids"]) for row in rows)
            ends = torch.cat([given[given < tokens], given.new_tensor([tokens])])
            if tokens < int(given[-1]):
                ends = torch.cat([ends, given[-1:]])
            size, longest = self.documents, int(ends.diff().max())
            # Doubled for the rare batch with more documents: few shapes, whatever comes.
            while size < len(ends) - 1:
                size *= 2
            # The last end again: each repetition is an empty document.
            padded = F.pad(ends, (0, size + 1 - len(ends)), value=int(ends[-1]))
            longest = max(longest, self.longest) if self.longest else _power_of_two(longest)
            batch["cu_seq_lens_q"] = batch["cu_seq_lens_k"] = padded
            batch["max_length_q"] = batch["max_length_k"] = longest
        return batch


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


USUAL = 0.9
"""Share of batches that have no more documents than there are boundaries for."""


def fix_documents(trainer: Any) -> None:
    """Give the batches of a padding-free trainer boundaries of few shapes."""
    args, collator = TrainerArguments(trainer.args), trainer.data_collator
    if not trainer.padding_free or not hasattr(collator, "torch_call"):
        return
    sets = [data for data in (trainer.train_dataset, trainer.eval_dataset) if data is not None]
    lengths = [row for data in sets for row in _lengths(data)]
    rows = max(args.per_device_train_batch_size, args.per_device_eval_batch_size)
    longest = max((length for row in lengths for length in row), default=0)
    fixed = FixedDocuments(collator.torch_call, _usual([*map(len, lengths)], rows), longest or None)
    collator.torch_call = fixed  # an attribute of this collator, whose type TRL asks for


def _usual(numbers: list[int], rows: int) -> int:
    """Documents that most batches of so many rows do not exceed, with one of padding.

    Rows that are packed last have the shortest documents and most of them: `rows` times the most
    would be boundaries for several times what most batches have.
    """
    if not numbers:
        return 1
    # As training draws them; with a seed, since two processes must agree on the shape.
    random.Random(0).shuffle(numbers)
    sums = sorted(sum(numbers[i : i + rows]) for i in range(0, len(numbers), rows))
    return sums[int(USUAL * (len(sums) - 1))] + 1


def _lengths(data: Any) -> Iterable[list[int]]:
    """Lengths of the documents of each row; none of a stream, or of rows that are documents."""
    columns = getattr(data, "column_names", None) or ()
    return data["seq_lengths"][:] if "seq_lengths" in columns and hasattr(data, "__len__") else ()
