"""The operators of a training step from a handful of sizes: no model, no torch.

A trace of the installed code is exact about it; it is not available for a stack of last
year, for a program that is not PyTorch, nor in a blink. Here the same kind of list is written from
the shape of a decoder and a setting, by the parts in writer.py, and read by the same roofline. It
serves comparisons in an instant and the scoreboard over published speeds.

A step is `accumulation` micro-batches and one update:

    micro-batch    forward, loss, backward (with what checkpointing computes again)
    update         gradient norm, clipping, AdamW on this GPU's share of what is trained

Limits: dense decoders and mixtures of experts of the Llama family, with small variations
(LayerNorm, no gate). Padding, dropout, data loading and logging are not in it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.benchmarks.score.records import Tensor
from tests.benchmarks.score.setting import MLP_LINEARS, Setting, Shape
from tests.benchmarks.score.writer import Linear, Writer

if TYPE_CHECKING:
    from finetune.estimator.trace.trace import Op


@dataclass(frozen=True)
class Step:
    """Operators of one micro-batch and of one update."""

    micro: list[Op]
    update: list[Op]


FUSED_PARTS = ("norm", "rotary", "act_fn", "loss")
"""Names of the parts that kernel collections (Liger and the like) replace by one kernel each."""


def in_layers(op: Op) -> bool:
    """For `step_time(compiled=...)`: decoder layers are compiled, and the loss with the head."""
    return op.phase != "optimizer"


def in_parts(*parts: str) -> Callable[[Op], bool]:
    """For `step_time(compiled=...)`: each of these parts is one kernel, the rest is eager."""
    return lambda op: op.module.rsplit(".", 1)[-1] in parts


def write_step(shape: Shape, setting: Setting) -> Step:
    """The operators of a step of this model in this setting."""
    builder = _Builder(shape, setting)
    return Step(builder.micro(), builder.update())


def adapter_parameters(shape: Shape, setting: Setting) -> int:
    """Weights of the adapters: rank x (N + K) for each target."""
    sizes = shape.linears()
    each = sum(setting.rank * sum(sizes[name]) for name in setting.targets if name in sizes)
    return shape.layers * each


@dataclass
class _Layer:
    """What a layer's backward needs of its forward."""

    linears: dict[str, Linear]
    kept: dict[str, Tensor] = field(default_factory=dict)


class _Builder:
    def __init__(self, shape: Shape, setting: Setting) -> None:
        self.shape, self.setting = shape, setting
        self.w = Writer(
            once=setting.compiled,
            turn_codes=setting.turn_codes,
            weights_cast=setting.cast_weights_once,
            adapter_dtype=setting.adapter_dtype,
        )
        self.full = setting.method == "full"

    # ---------------------------------------------------------------------------------- micro-batch

    def micro(self) -> list[Op]:
        w, s, m = self.w, self.shape, self.setting.tokens
        table = w.tensor(s.vocabulary, s.hidden)
        ids = w.tensor(m, dtype="float32")
        x = w.tensor(m, s.hidden)
        w.op("aten.embedding.default", (table, ids), (x,), "model.embed_tokens")
        layers = [self._layer(index) for index in range(s.layers)]
        for index, layer in enumerate(layers):
            x = self._forward(layer, x, f"model.layers.{index}")
        normed = self._norm(x, "model.norm")
        head = Linear(
            "lm_head",
            w.tensor(s.vocabulary, s.hidden),
            trained=self.full,
            fp8=self.setting.fp8 if self.setting.fp8_head else None,
        )
        g = self._loss(w.linear(normed, head))
        w.phase = "backward"
        g = w.linear_backward(g, normed, head)
        g = self._norm_backward(g, x, "model.norm")
        for index in reversed(range(s.layers)):
            g = self._backward(layers[index], g, f"model.layers.{index}")
        if self.full:
            w.op("aten.embedding_dense_backward.default", (g, ids), (table,), "model.embed_tokens")
            if self.setting.accumulation > 1:
                self._accumulate()
        return w.take()

    def _accumulate(self) -> None:
        """Gradients of a further micro-batch are added to those that are there."""
        for index in range(self.shape.layers):
            size = self.shape.layer_parameters
            old, new = self.w.tensor(size), self.w.tensor(size)
            self.w.op("aten.add_.Tensor", (old, new), (old,), f"gradients.{index}")

    def _layer(self, index: int) -> _Layer:
        s, c = self.setting, self.w
        # FSDP gathers weights in BF16; alone, a float32 weight is cast where it is used
        dtype = s.weight_dtype if self.full and s.shards == 1 else "bfloat16"
        linears = {}
        for name, (n, k) in self.shape.linears().items():
            experts = self.shape.experts and name in MLP_LINEARS
            adapted = not self.full and name in s.targets and not experts
            linears[name] = Linear(
                f"model.layers.{index}.{name}",
                c.tensor(n, k, dtype=dtype if s.fp8 else "bfloat16"),
                packed=n * k * s.base_bits // 8 if s.base_bits < 16 else 0,
                trained=self.full,
                fp8=s.fp8,
                rank=s.rank if adapted else 0,
            )
        return _Layer(linears)

    def _norm(self, x: Tensor, at: str) -> Tensor:
        norm = self.w.rms_norm if self.shape.norm == "rms" else self.w.layer_norm
        return norm(x, at=at)

    def _norm_backward(self, g: Tensor, x: Tensor, at: str) -> Tensor:
        if self.shape.norm == "rms":
            return self.w.rms_norm_backward(g, x, trained=self.full, at=at)
        return self.w.layer_norm_backward(g, x, at=at)

    def _forward(
        self, layer: _Layer, x: Tensor, at: str, skip: frozenset[str] = frozenset()
    ) -> Tensor:
        """One layer; `skip` names what is not computed again."""
        w, s, b, kept = self.w, self.shape, self.setting.batch, layer.kept
        length = self.setting.length
        d = s.width // s.heads
        kept["x"] = x
        kept["h"] = h = self._norm(x, f"{at}.input_layernorm.norm")
        q, k, v = (self._linear(layer, name, h, skip) for name in ("q_proj", "k_proj", "v_proj"))
        table = w.tensor(length, d)
        q, k = (w.rotary(t, table, at=f"{at}.self_attn.rotary") for t in (q, k))
        kept["q"] = _split(q, b, s.heads, length, d)
        kept["k"] = _split(k, b, s.kv_heads, length, d)
        kept["v"] = _split(v, b, s.kv_heads, length, d)
        if "attention" in skip:
            out = w.tensor(b, s.heads, length, d)
        else:
            out = w.tensor(b, s.heads, length, d)
            operands = (kept["q"], kept["k"], kept["v"])
            w.op("finetune_estimator.attention.default", operands, (out,), f"{at}.self_attn")
        kept["a"] = a = Tensor(out.storage, (b * length, s.width), out.dtype, out.nbytes)
        y = self._linear(layer, "o_proj", a, skip)
        kept["x2"] = x2 = w.map("add.Tensor", x, y, at=at)
        kept["h2"] = h2 = self._norm(x2, f"{at}.post_attention_layernorm.norm")
        return w.map("add.Tensor", x2, self._mlp(layer, h2, at, skip), at=at)

    def _linear(self, layer: _Layer, name: str, x: Tensor, skip: frozenset[str]) -> Tensor:
        to = layer.linears[name]
        return (
            self.w.tensor(x.shape[0], to.weight.shape[0]) if name in skip else self.w.linear(x, to)
        )

    def _mlp(self, layer: _Layer, h: Tensor, at: str, skip: frozenset[str]) -> Tensor:
        w, s = self.w, self.shape
        if not s.experts:
            return self._expert(layer, h, at, skip, "")
        rows = max(1, h.shape[0] * s.chosen // s.experts)
        w.product(h, w.tensor(s.experts, s.hidden), s.experts, at=f"{at}.gate")
        total = w.tensor(*h.shape)
        for expert in range(s.experts):
            part = w.tensor(rows, s.hidden)
            w.op("aten.index.Tensor", (h,), (part,), at)
            y = self._expert(layer, part, at, skip, str(expert))
            y = w.map("mul.Tensor", y, w.tensor(rows, 1), at=at)
            w.op("aten.index_add_.default", (y,), (total,), at)
        return total

    def _expert(self, layer: _Layer, h: Tensor, at: str, skip: frozenset[str], tag: str) -> Tensor:
        w, kept, act = self.w, layer.kept, f"{at}.mlp.act_fn"
        up = kept["up" + tag] = self._linear(layer, "up_proj", h, skip)
        kept["hm" + tag] = h
        if self.shape.gated:
            gate = kept["gate" + tag] = self._linear(layer, "gate_proj", h, skip)
            inner = w.map("mul.Tensor", w.map("silu.default", gate, at=act), up, at=act)
        else:
            inner = w.map("gelu.default", up, at=act)
        kept["inner" + tag] = inner
        return self._linear(layer, "down_proj", inner, skip)

    def _backward(self, layer: _Layer, g: Tensor, at: str) -> Tensor:
        w, s, kept = self.w, self.shape, layer.kept
        if self.setting.checkpointing != "off":
            w.phase = "recompute"
            selective = frozenset({"attention", "k_proj", "o_proj", "up_proj", "down_proj"})
            skip = (
                selective if self.setting.checkpointing == "selective" else frozenset({"down_proj"})
            )
            # the layer's last product is computed again too, though nothing needs it
            self._forward(layer, kept["x"], at, skip if skip is selective else frozenset())
            w.phase = "backward"
        dh = self._mlp_backward(layer, g, at)
        dn = self._norm_backward(dh, kept["x2"], f"{at}.post_attention_layernorm.norm")
        g = w.map("add.Tensor", g, dn, at=at)
        da = w.linear_backward(g, kept["a"], layer.linears["o_proj"])
        b, length = self.setting.batch, self.setting.length
        grad = _split(da, b, s.heads, length, s.width // s.heads)
        q, k, v = kept["q"], kept["k"], kept["v"]
        out = Tensor(kept["a"].storage, q.shape, q.dtype, q.nbytes)
        dq, dk, dv = w.tensor(*q.shape), w.tensor(*k.shape), w.tensor(*v.shape)
        operands = (grad, q, k, v, out)
        w.op(
            "finetune_estimator.attention_backward.default",
            operands,
            (dq, dk, dv),
            f"{at}.self_attn",
        )
        table = w.tensor(length, s.width // s.heads)
        rotary = f"{at}.self_attn.rotary"
        dqf = w.rotary_backward(_flat(dq), table, at=rotary)
        dkf = w.rotary_backward(_flat(dk), table, at=rotary)
        parts = [
            w.linear_backward(grad, kept["h"], layer.linears[name])
            for name, grad in (("q_proj", dqf), ("k_proj", dkf), ("v_proj", _flat(dv)))
        ]
        dh = w.map("add.Tensor", w.map("add.Tensor", parts[0], parts[1], at=at), parts[2], at=at)
        dn = self._norm_backward(dh, kept["x"], f"{at}.input_layernorm.norm")
        return w.map("add.Tensor", g, dn, at=at)

    def _mlp_backward(self, layer: _Layer, g: Tensor, at: str) -> Tensor:
        w, s = self.w, self.shape
        if not s.experts:
            return self._expert_backward(layer, g, at, "")
        total = w.tensor(*g.shape)
        for expert in range(s.experts):
            part = w.tensor(layer.kept[f"hm{expert}"].shape[0], s.hidden)
            w.op("aten.index.Tensor", (g,), (part,), at)
            part = w.map("mul.Tensor", part, w.tensor(part.shape[0], 1), at=at)
            dx = self._expert_backward(layer, part, at, str(expert))
            w.op("aten.index_put_.default", (dx,), (total,), at)
        return total

    def _expert_backward(self, layer: _Layer, g: Tensor, at: str, tag: str) -> Tensor:
        w, kept, act = self.w, layer.kept, f"{at}.mlp.act_fn"
        d = w.linear_backward(g, kept["inner" + tag], layer.linears["down_proj"])
        h, up = kept["hm" + tag], kept["up" + tag]
        if not self.shape.gated:
            return w.linear_backward(
                w.map("gelu_backward.default", d, up, at=act), h, layer.linears["up_proj"]
            )
        gate = kept["gate" + tag]
        dup = w.map("mul.Tensor", d, w.tensor(*gate.shape), at=act)
        dsilu = w.map("mul.Tensor", d, up, at=act)
        dgate = w.map("silu_backward.default", dsilu, gate, at=act)
        return w.map(
            "add.Tensor",
            w.linear_backward(dup, h, layer.linears["up_proj"]),
            w.linear_backward(dgate, h, layer.linears["gate_proj"]),
            at=at,
        )

    def _loss(self, logits: Tensor) -> Tensor:
        """The gradient of the logits."""
        w, at = self.w, "lm_head.loss"
        if self.setting.loss == "fused":
            return w.map("_log_softmax.default", logits, at=at)
        wide = w.map("_to_copy.default", logits, at=at, dtype="float32")
        moved = w.map("clone.default", wide, at=at)
        probabilities = w.map("_log_softmax.default", moved, at=at)
        w.phase = "backward"
        g = w.map("_log_softmax_backward_data.default", probabilities, at=at)
        g = w.map("constant_pad_nd.default", g, at=at)
        return w.map("_to_copy.default", g, at=at, dtype="bfloat16")

    # --------------------------------------------------------------------------------------- update

    def update(self) -> list[Op]:
        w, s = self.w, self.setting
        w.phase = "optimizer"
        count = self.shape.parameters if self.full else adapter_parameters(self.shape, s)
        count = -(-count // s.shards)
        dtype = s.weight_dtype if self.full else "float32"
        states = "uint8" if s.optimizer == "8bit" else s.state_dtype if self.full else "float32"
        if s.fp8 and s.cast_weights_once:
            for index in range(self.shape.layers):
                for name, (n, k) in self.shape.linears().items():
                    shard = w.tensor(-(-n // s.shards), k)
                    w.casts.both_layouts(shard, s.fp8, at=f"model.layers.{index}.{name}")
        p, g = w.tensor(count, dtype=dtype), w.tensor(count, dtype=dtype)
        m, v = w.tensor(count, dtype=states), w.tensor(count, dtype=states)
        w.op("aten._foreach_norm.Scalar", (g,), (w.tensor(1),), "")
        w.op("aten._foreach_mul_.Tensor", (g,), (g,), "")
        if s.optimizer != "foreach":
            w.op("aten._fused_adamw_.default", (p, g, m, v), (p, m, v), "")
            return w.take()
        w.op("aten._foreach_mul_.Scalar", (p,), (p,), "")
        w.op("aten._foreach_lerp_.Scalar", (m, g), (m,), "")
        w.op("aten._foreach_mul_.Scalar", (v,), (v,), "")
        w.op("aten._foreach_addcmul_.Scalar", (v, g, g), (v,), "")
        root = w.map("_foreach_sqrt.default", v, at="")
        w.op("aten._foreach_div_.ScalarList", (root,), (root,), "")
        w.op("aten._foreach_add_.Scalar", (root,), (root,), "")
        w.op("aten._foreach_addcdiv_.ScalarList", (p, m, root), (p,), "")
        return w.take()


def _split(x: Tensor, b: int, heads: int, length: int, d: int) -> Tensor:
    """The same memory as `[B, H, L, D]`."""
    return Tensor(x.storage, (b, heads, length, d), x.dtype, x.nbytes)


def _flat(x: Tensor) -> Tensor:
    """The same memory as `[M, heads D]`."""
    b, heads, length, d = x.shape
    return Tensor(x.storage, (b * length, heads * d), x.dtype, x.nbytes)
