"""BDH, the Dragon Hatchling (Kosowski et al. 2025, arXiv 2509.26507), in its GPU form.

Importing this module registers it with the `Auto` classes of Transformers:

    import finetune.storage.bdh
    model = AutoModelForCausalLM.from_pretrained("runs/bdh_tiny_full_bf16/.../model")

All levels share three matrices. With x_t the stream of token t (D numbers of unit variance), LN a
LayerNorm without gain or bias, R_t the rotary turn of position t, and h the head, a slice of
N = n / heads neurons, one level is

    s_t    = relu(x_t E)                          n     sparse activity of the neurons
    a_t,h  = sum over tau < t of <R_t s_t,h, R_tau s_tau,h> x_tau
                                                  D     linear attention over the past, by head
    g_t,h  = relu(LN(a_t,h) V_h)                  N     neurons that this result excites
    y_t    = (s_t * g_t) G                        D     only neurons excited by both write
    x_t   <- LN(x_t + LN(y_t))                    D

with E = `encoder` [D, n], V = `encoder_v` [heads, D, N] and G = `decoder` [n, D]: plain parameters
instead of `nn.Linear`, listed in `BdhBlock.fp8_matmuls` and multiplied by `fp8_matmul`.

The attention has no softmax, scale or projections, and a token never reads itself (tau < t). The
paper's recurrent form keeps a state of N x D numbers; this one computes the [T, T] table of inner
products, and `tests/training/test_bdh.py` checks that the two agree.

Precision: matmuls run in the type of autocast or of the weights, LayerNorm in float32. The inner
products are sums of N unbounded terms, which overflow float16: there they run in float32. They
never go below bfloat16, as no operand is a parameter.

Limits: time and memory grow with T^2. The generation cache stores T x n activities per level, more
than the recurrent state beyond T = D tokens. Rotary pairs are neurons i and i + N/2 of a head: the
published pairs (2i, 2i + 1), permuted.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    Cache,
    DynamicCache,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils import TransformersKwargs, can_return_tuple

from finetune.precision.cases.parameters import fp8_matmul

CACHE: str = next(
    field.name
    for field in dataclasses.fields(BaseModelOutputWithPast)
    if "Cache" in str(field.type)
)
"""What Transformers calls a cache: `past_key_values` until 5.23, `cache` from 5.24 on."""


def take_cache(cache: Any, arguments: dict[str, Any]) -> Any:
    """The cache of a call: `cache`, or taken from `arguments`, whatever its name is there.

    Raises:
        TypeError: one of the other arguments is unknown to Transformers. Without an error, a new
            name of the cache would be a cache that nobody reads.
    """
    for name in [name for name in arguments if name == CACHE or isinstance(arguments[name], Cache)]:
        found = arguments.pop(name)
        cache = found if cache is None else cache
    if unknown := arguments.keys() - TransformersKwargs.__annotations__.keys():
        raise TypeError(f"BDH has no argument {', '.join(sorted(unknown))}")
    return cache


def rotary_table(positions: Tensor, size: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine of rotary angles, float32 [B, 1, T, size / 2] (Su et al. 2021).

    Of positions [B, T] and a head of `size` neurons; pair i turns by theta^(-2i / size) per token.
    """
    pairs = torch.arange(0, size, 2, dtype=torch.float32, device=positions.device)
    angles = positions[:, None, :, None].float() * theta ** (-pairs / size)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + N/2) of x [B, H, T, N] by angles [B, 1, T, N/2], in its type."""
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """Linear attention, in parallel: the sum of `v` weighted by plain inner products.

    q [B, H, T, N], k [B, H, S, N], v [B, 1, S, D] shared by all heads, visible bool
    [B or 1, 1, T, S] -> [B, H, T, D].
    """
    if q.dtype == torch.float16:  # sums of N squares: past float16's range, whatever autocast says
        with torch.autocast(q.device.type, enabled=False):
            return attend(q.float(), k.float(), v.float(), visible)
    scores = (q @ k.mT).masked_fill(~visible, 0)
    # Heads share the values: one batch of [H·T, S] rather than H copies of v.
    return (scores.flatten(1, 2) @ v[:, 0]).unflatten(1, q.shape[1:3])


def visible_tokens(position_ids: Tensor, seen: int, attention_mask: Tensor | None) -> Tensor:
    """Mask of earlier, unpadded tokens of the same text, bool [B or 1, 1, T, seen + T].

    Args:
        position_ids: int64 [B or 1, T]; a text begins at each 0.
        seen: number of cached tokens, taken to belong to the same text.
        attention_mask: [B, seen + T], 0 for padding.

    Raises:
        ValueError: a mask of another shape.
    """
    length = position_ids.shape[1]
    shape = (1, 1, length, seen + length)
    visible = torch.ones(shape, dtype=torch.bool, device=position_ids.device).tril(seen - 1)
    if not seen:
        # Packed rows: positions begin at 0 with each document, which sees itself alone.
        text = (position_ids == 0).cumsum(-1)[:, None]
        visible = visible & (text[..., :, None] == text[..., None, :])
    if attention_mask is not None:
        if attention_mask.ndim != 2:
            raise ValueError(
                "BDH takes an attention_mask [batch, length], "
                f"not a {attention_mask.ndim}-dimensional one"
            )
        visible = visible & attention_mask.bool()[:, None, None]
    return visible


@strict
class BdhConfig(PreTrainedConfig):
    """Shape of a BDH: 3 · num_neurons · hidden_size shared parameters, plus embedding and head.

    Attributes:
        hidden_size: D, width of the stream between levels.
        num_neurons: n, over all heads.
        num_hidden_layers: applications of the shared block; more cost time, no parameters.
        dropout: share of neurons dropped before they write, in training.
        rope_theta: the slowest rotary pair turns once in about 2π · rope_theta tokens.
    """

    model_type = "bdh"
    keys_to_ignore_at_inference: ClassVar[list[str]] = [CACHE]

    vocab_size: int = 256
    hidden_size: int = 256
    num_neurons: int = 32768
    num_attention_heads: int = 4
    num_hidden_layers: int = 6
    dropout: float | int = 0.1
    rope_theta: float | int = 65536.0
    layer_norm_eps: float = 1e-5
    initializer_range: float = 0.02
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    tie_word_embeddings: bool = False

    def validate_architecture(self) -> None:
        """Raise `ValueError` for a shape that cannot be built."""
        if self.num_neurons % (2 * self.num_attention_heads):
            raise ValueError(
                f"num_neurons ({self.num_neurons}) must be a multiple of twice "
                f"num_attention_heads ({self.num_attention_heads}): rotary pairs lie in a head"
            )


def normalize(x: Tensor, eps: float) -> Tensor:
    """Normalize x [..., D] to mean 0 and variance 1 over D, in float32; keeps the type of `x`."""
    return F.layer_norm(x.float(), x.shape[-1:], eps=eps).to(x.dtype)


class BdhBlock(GradientCheckpointingLayer):
    """One level, whose parameters are shared: the model calls it `num_hidden_layers` times.

    Attributes:
        fp8_matmuls: parameters that are right operands of matmuls, each used once per call:
            [.., D] @ [D, n], [H, M, D] @ [H, D, N], [.., n] @ [n, D].
    """

    fp8_matmuls: ClassVar[tuple[str, ...]] = ("encoder", "encoder_v", "decoder")

    def __init__(self, config: BdhConfig) -> None:
        super().__init__()
        d, n, heads = config.hidden_size, config.num_neurons, config.num_attention_heads
        self.heads, self.eps, self.dropout = heads, config.layer_norm_eps, config.dropout
        self.encoder = nn.Parameter(torch.empty(d, n))
        self.encoder_v = nn.Parameter(torch.empty(heads, d, n // heads))
        self.decoder = nn.Parameter(torch.empty(n, d))

    def forward(
        self,
        x: Tensor,
        visible: Tensor,
        cos: Tensor,
        sin: Tensor,
        level: int = 0,
        **named: DynamicCache | None,
    ) -> Tensor:
        """Compute the next level's stream [B, T, D].

        Args:
            visible: bool [B or 1, 1, T, S], True for the S tokens that each token reads.
            cos, sin: rotary table of the positions.
            level: index of this level in the cache.
            **named: activities of earlier tokens as `CACHE`: by that name Transformers takes a
                cache away where it checkpoints.
        """
        rows = x.shape[:2]
        active = F.relu(fp8_matmul(x, self.encoder)).unflatten(-1, (self.heads, -1))  # [B, T, H, N]
        query = key = rotate(active.transpose(1, 2), cos, sin)
        # The stream itself, one for all heads: that is what BDH's attention reads.
        value = x[:, None]
        if (cache := named[CACHE]) is not None:
            key, value = cache.update(key, value, level)
        read = attend(query, key, value, visible)  # [B, H, T, D]
        read = normalize(read.transpose(0, 1).flatten(1, 2), self.eps)  # [H, B·T, D]
        excited = F.relu(fp8_matmul(read, self.encoder_v))  # [H, B·T, N]
        both = active * excited.transpose(0, 1).unflatten(0, rows)
        both = F.dropout(both, self.dropout, self.training)
        written = fp8_matmul(both.flatten(2), self.decoder)  # [B, T, D]
        # A token with nothing to read writes exactly 0, where LayerNorm's slope is eps^-1/2: its
        # gradient, which changes nothing, was 60 to 150 times all others and would set their scale.
        written = written.masked_fill(~visible.any(-1).mT, 0)
        return normalize(x + normalize(written, self.eps), self.eps)


class BdhPreTrainedModel(PreTrainedModel):
    """Base class of the family for Transformers."""

    config: BdhConfig
    config_class = BdhConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["BdhBlock"]
    _skip_keys_device_placement = [CACHE]

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, BdhBlock):
            for parameter in (module.encoder, module.encoder_v, module.decoder):
                init.normal_(parameter, mean=0.0, std=self.config.initializer_range)


class BdhModel(BdhPreTrainedModel):
    """Embedding and levels: from token ids to the last stream."""

    def __init__(self, config: BdhConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.block = BdhBlock(config)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: DynamicCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Run all levels.

        Args:
            input_ids: int64 [B, T], or `inputs_embeds` [B, T, D] instead.
            attention_mask: [B, S], 0 for padding.
            position_ids: int64 [B or 1, T]; a restart at 0 begins another text (packed rows), which
                reads nothing of the one before.
            cache: activities of the S - T tokens before these, also by Transformers' own name.
            **kwargs: of Transformers, for other parts of a model.

        Raises:
            TypeError: an argument that neither this model nor Transformers knows.
            ValueError: both or neither of ids and embeddings; a mask that is not [B, S].
        """
        cache = take_cache(cache, kwargs)
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("exactly one of input_ids and inputs_embeds is needed")
        config = self.config
        if output_hidden_states is None:
            output_hidden_states = config.output_hidden_states
        embedded = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if cache is None and (config.use_cache if use_cache is None else use_cache):
            cache = DynamicCache(config=config)
        seen = 0 if cache is None else cache.get_seq_length()
        if position_ids is None:
            after = seen + embedded.shape[1]
            position_ids = torch.arange(seen, after, device=embedded.device)[None]
        visible = visible_tokens(position_ids, seen, attention_mask)
        head_size = config.num_neurons // config.num_attention_heads
        cos, sin = rotary_table(position_ids, head_size, config.rope_theta)
        x = normalize(embedded, config.layer_norm_eps)
        streams = (x,)
        for level in range(config.num_hidden_layers):
            x = self.block(x, visible, cos, sin, level, **{CACHE: cache})
            # Not asked for, they would keep every level's stream alive.
            streams = (*streams, x) if output_hidden_states else ()
        return BaseModelOutputWithPast(x, cache, streams or None)


class BdhForCausalLM(BdhPreTrainedModel, GenerationMixin):
    """BDH with an output head, for training and generation."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: BdhConfig) -> None:
        super().__init__(config)
        self.model = BdhModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: DynamicCache | None = None,
        labels: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Run `BdhModel.forward` and return logits [B, T, vocabulary] and, given labels, the loss.

        Args:
            labels: int64 [B, T], -100 for ignored tokens; shifted here.
            logits_to_keep: number of last tokens, or indices, to compute logits for; 0 is all.
            **kwargs: for `BdhModel.forward` (`inputs_embeds`, `use_cache`) and the loss.
        """
        outputs = self.model(input_ids, attention_mask, position_ids, cache, **kwargs)
        # 0 keeps all, since `-0` is 0: as Transformers has it.
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss, logits, getattr(outputs, CACHE), outputs.hidden_states)


AutoConfig.register(BdhConfig.model_type, BdhConfig, exist_ok=True)
AutoModel.register(BdhConfig, BdhModel, exist_ok=True)
AutoModelForCausalLM.register(BdhConfig, BdhForCausalLM, exist_ok=True)
