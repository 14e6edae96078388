"""litgpt's own model and fine-tuning step, as far as memory can tell them from other code.

`litgpt/model.py`: one product for q, k and v, reshaped into copies; rotation of a part of each
head, joined with the rest; RMSNorm in float32, LayerNorm in the model's type; residuals in
sequence or in parallel. `litgpt/lora.py`: adapters of chosen parts of q, k, v in one layer, whose
product is spread into zeros (`zero_pad`). `litgpt/adapter.py`, `adapter_v2.py`: a learned prefix
in the later layers; a learned scale and bias behind every linear layer. `finetune/lora.py`:
everything in the type of the weights (`bf16-true`), the head in chunks of 128 positions that
Fabric returns in float32, cross entropy chunk by chunk; the first batch is the longest.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from finetune.estimator.memory.footprint import FRAGMENTS
from finetune.estimator.memory.overheads import library_workspaces
from finetune.estimator.trace.fake_cuda import fused
from finetune.estimator.trace.trace import Recorder
from tests.benchmarks.score.jobs import Job
from tests.benchmarks.score.packed import packed_bytes
from tests.benchmarks.score.shapes import Shape, shape_of

_CHUNK = 128


class _Product(torch.autograd.Function):
    """x W^T with W made from NF4 codes; bitsandbytes before 0.43 kept the input all the same."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Linear) -> Tensor:
        """x [..., K] -> [..., N]."""
        ctx.save_for_backward(x)
        ctx.layer = layer
        return F.linear(x, _unpacked(layer))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """dy [..., N] -> dx [..., K]."""
        return torch.matmul(grads[0], _unpacked(ctx.layer)), None


def _unpacked(layer: nn.Linear) -> Tensor:
    """The weight [N, K]; with double quantization the maxima are made first."""
    weight = layer.weight.new_empty(layer.out_features, layer.in_features, dtype=torch.bfloat16)
    layer.weight.new_empty(weight.numel() // 64, dtype=torch.float32)
    return weight


class _Linear(nn.Linear):
    """A linear layer, with adapter_v2's scale and bias when asked, or held in NF4."""

    v2 = False

    def pack(self, form: str) -> None:
        """Hold the weight in `form` from now on."""
        codes, scales = packed_bytes(form, self.out_features, self.in_features)
        size = codes + scales
        self.weight = nn.Parameter(self.weight.new_empty(size, dtype=torch.uint8), False)

    def forward(self, input: Tensor) -> Tensor:
        """input [..., K] -> [..., N]."""
        if self.weight.dtype is not torch.uint8:
            return super().forward(input)
        out: Any = _Product.apply(input, self)
        return out if self.bias is None else out + self.bias

    def add_v2(self) -> None:
        """`adapter_v2_linear_with_bias_and_scale`."""
        self.v2 = True
        self.adapter_bias = nn.Parameter(self.weight.new_empty(self.out_features))
        self.adapter_scale = nn.Parameter(self.weight.new_empty(self.out_features))


def _apply(layer: Any, x: Tensor) -> Tensor:
    out = layer(x)
    if getattr(layer, "adapter_scale", None) is not None:
        return layer.adapter_scale * (out + layer.adapter_bias)
    return out


class _RmsNorm(nn.Module):
    def __init__(self, size: int, offset: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.offset = offset

    def forward(self, x: Tensor) -> Tensor:
        kind = x.dtype
        x = x.float()
        mean = torch.mean(x * x, dim=-1, keepdim=True)
        normed = (x * torch.rsqrt(mean + 1e-5)).to(kind)
        return normed * (1 + self.weight) if self.offset else normed * self.weight


class _Parts:
    """What differs between the families."""

    def __init__(self, s: Shape) -> None:
        self.rms = s.of in ("llama", "mistral", "gemma", "gemma2", "phi3")
        self.gated = self.rms
        self.bias = s.of in ("gpt_neox", "phi")
        self.parallel = s.of in ("gpt_neox", "phi", "falcon")
        self.shared_norm = s.of in ("phi",) or (s.of == "falcon" and s.k == 1)
        self.rotated = int(s.rotary * s.head)
        self.gemma = s.of in ("gemma", "gemma2")
        self.post_norm = s.of == "gemma2"


def _norm(s: Shape, parts: _Parts) -> nn.Module:
    return _RmsNorm(s.h, parts.gemma) if parts.rms else nn.LayerNorm(s.h)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.size(-1) // 2
    rotated = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return ((x * cos) + (rotated * sin)).to(x.dtype)


class _Lora(nn.Module):
    """`LoRAQKVLinear` (parts of the outputs) or `LoRALinear` (all of them)."""

    def __init__(self, inner: int, outs: int, sizes: list[int], rank: int) -> None:
        super().__init__()
        enabled, groups = sum(sizes), len(sizes)
        self.sizes, self.even = sizes, len(set(sizes)) == 1
        self.spread = enabled != outs
        self.outs, self.enabled = outs, enabled
        self.a = nn.Parameter(torch.empty(rank * groups, inner))
        self.b = nn.Parameter(torch.empty(enabled, rank))
        self.groups = groups

    def forward(self, x: Tensor, base: Tensor) -> Tensor:
        """x [B, L, K], base [B, L, N] -> [B, L, N]."""
        after = F.linear(F.dropout(x, 0.05, self.training), self.a)
        if self.groups == 1:
            added = after @ self.b.t()
        elif self.even:  # a grouped convolution
            wide = F.conv1d(after.transpose(-2, -1), self.b.unsqueeze(-1), groups=self.groups)
            added = wide.transpose(-2, -1)
        else:  # parts of unequal size, one convolution each
            ranks, parts = after.chunk(self.groups, -1), self.b.split(self.sizes)
            added = torch.cat([r @ b.t() for r, b in zip(ranks, parts, strict=True)], dim=-1)
        if self.spread:
            flat = added.reshape(-1, self.enabled)
            zeros = added.new_zeros(flat.shape[0], self.outs)
            places = torch.empty(self.enabled, dtype=torch.long, device="meta")
            added = zeros.index_copy(1, places, flat).view(base.shape)
        return base + added * 2.0


class _Block(nn.Module):
    def __init__(self, s: Shape, job: Job, index: int) -> None:
        super().__init__()
        self.s, self.parts = s, _Parts(s)
        wide = (s.a + 2 * s.k) * s.head
        bias = self.parts.bias
        self.norm_1 = _norm(s, self.parts)
        self.attn = _Linear(s.h, wide, bias=bias)
        self.proj = _Linear(s.a * s.head, s.h, bias=bias)
        self.norm_2 = None if self.parts.shared_norm else _norm(s, self.parts)
        if self.parts.post_norm:
            self.post_1, self.post_2 = _norm(s, self.parts), _norm(s, self.parts)
        self.fc_1 = _Linear(s.h, s.i, bias=bias)
        self.fc_2 = _Linear(s.h, s.i, bias=bias) if self.parts.gated else None
        self.out = _Linear(s.i, s.h, bias=bias)
        options = dict(job.adapter_options)
        self.lora: nn.ModuleDict = nn.ModuleDict()
        self.prefix: nn.Embedding | None = None
        if job.adapter == "lora":
            where, rank = options["parts"], options["r"]
            sizes = {"q": s.a * s.head, "k": s.k * s.head, "v": s.k * s.head}
            enabled = [sizes[p] for p in "qkv" if p in where]
            self.lora["attn"] = _Lora(s.h, wide, enabled, rank)
            if "projection" in where:
                self.lora["proj"] = _Lora(s.a * s.head, s.h, [s.h], rank)
            if "mlp" in where:
                self.lora["fc_1"] = _Lora(s.h, s.i, [s.i], rank)
                if self.fc_2 is not None:
                    self.lora["fc_2"] = _Lora(s.h, s.i, [s.i], rank)
                self.lora["out"] = _Lora(s.i, s.h, [s.h], rank)
        elif job.adapter in ("adapter", "adapter_v2") and index >= 2:
            self.prefix = nn.Embedding(10, s.h)
            self.gating = nn.Parameter(torch.empty(1, 1, s.a, 1))

    def _linear(self, name: str, x: Tensor) -> Tensor:
        out = _apply(getattr(self, name), x)
        return self.lora[name](x, out) if name in self.lora else out

    def attention(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [B, L, H] -> [B, L, H]."""
        s, n = self.s, self.parts.rotated
        batch, length, _ = x.shape
        per = s.a // s.k
        qkv = self._linear("attn", x).view(batch, length, s.k, per + 2, s.head)
        qkv = qkv.permute(0, 2, 3, 1, 4)
        q, k, v = qkv.split((per, 1, 1), dim=2)
        if s.k not in (s.a, 0):
            k = k.expand(batch, s.k, per, length, s.head)
            v = v.expand(batch, s.k, per, length, s.head)
        q, k, v = (t.reshape(batch, -1, length, s.head) for t in (q, k, v))
        q = torch.cat((_rotate(q[..., :n], cos, sin), q[..., n:]), dim=-1)
        k = torch.cat((_rotate(k[..., :n], cos, sin), k[..., n:]), dim=-1)
        y = fused(q, k, v, None, True, "flash").transpose(1, 2)
        if self.prefix is not None:
            y = self._with_prefix(q, y)
        return self._linear("proj", y.reshape(batch, length, s.a * s.head))

    def _with_prefix(self, q: Tensor, y: Tensor) -> Tensor:
        assert self.prefix is not None
        s = self.s
        batch = q.shape[0]
        prefix = self.prefix.weight.reshape(1, -1, s.h)
        akv = (
            _apply(self.attn, prefix)
            .view(1, 10, s.k, s.a // s.k + 2, s.head)
            .permute(0, 2, 3, 1, 4)
        )
        _, ak, av = akv.split((s.a // s.k, 1, 1), dim=2)
        ak, av = (
            t.expand(1, s.k, s.a // s.k, 10, s.head).reshape(1, -1, 10, s.head)
            .expand(batch, -1, -1, -1) for t in (ak, av)
        )  # fmt: skip
        ay = fused(q, ak, av, None, True, "flash").transpose(1, 2)
        return y + self.gating * ay

    def mlp(self, x: Tensor) -> Tensor:
        """x [B, L, H] -> [B, L, H]."""
        first = self._linear("fc_1", x)
        if self.fc_2 is None:
            return self._linear("out", F.gelu(first))
        act = F.gelu(first) if self.parts.gemma else F.silu(first)
        return self._linear("out", act * self._linear("fc_2", x))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        n_1 = self.norm_1(x)
        h = self.attention(n_1, cos, sin)
        if self.parts.parallel:
            n_2 = n_1 if self.norm_2 is None else self.norm_2(x)
            return self.mlp(n_2) + h + x
        assert self.norm_2 is not None
        if self.parts.post_norm:
            h = self.post_1(h)
        x = h + x
        out = self.mlp(self.norm_2(x))
        return (self.post_2(out) if self.parts.post_norm else out) + x


class LitGpt(nn.Module):
    """The model with its adapters."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        s = shape_of(job.shape)
        parts = _Parts(s)
        self.s = s
        self.wte = nn.Embedding(s.v, s.h)
        self.h = nn.ModuleList(_Block(s, job, i) for i in range(s.l))
        self.norm = _norm(s, parts)
        self.lm_head = _Linear(s.h, s.v, bias=s.of == "phi")
        if parts.gemma:
            self.lm_head.weight = self.wte.weight
        self.lora_head: _Lora | None = None
        options = dict(job.adapter_options)
        if job.adapter:
            self.requires_grad_(False)
        if job.adapter == "lora" and "head" in options["parts"]:
            self.lora_head = _Lora(s.h, s.v, [s.v], options["r"])
        if job.adapter == "adapter_v2":
            for module in self.modules():
                if isinstance(module, _Linear):
                    module.add_v2()
        for name, p in self.named_parameters():
            if "lora" in name or "adapter" in name or "prefix" in name or "gating" in name:
                p.requires_grad_(True)
            if job.adapter == "adapter_v2" and "norm" in name:
                p.requires_grad_(True)

    def loss(self, ids: Tensor, targets: Tensor) -> Tensor:
        """ids, targets [B, L] -> the mean loss."""
        length = ids.shape[1]
        cos = torch.empty(
            length, _Parts(self.s).rotated, dtype=self.wte.weight.dtype, device="meta"
        )
        sin = torch.empty_like(cos)
        x = self.wte(ids)
        if self.s.of in ("gemma", "gemma2"):
            x = x * 2.0
        for block in self.h:
            x = block(x, cos, sin)
        x = self.norm(x)
        low = [self._head(part) for part in x.split(_CHUNK, dim=1)]
        logits = [part.float() for part in low]  # Fabric's precision plugin, `convert_output`
        del low
        logits[-1] = logits[-1][..., :-1, :]
        flat = [part.reshape(-1, part.size(-1)) for part in logits]
        goals = [t.reshape(-1) for t in targets[..., 1:].split(_CHUNK, dim=1)]
        losses = [
            F.cross_entropy(a, b, ignore_index=-100, reduction="none")
            for a, b in zip(flat, goals, strict=True)
        ]
        return torch.cat(losses).sum() / 1.0

    def _head(self, x: Tensor) -> Tensor:
        out = _apply(self.lm_head, x)
        return out if self.lora_head is None else self.lora_head(x, out)


def measure(job: Job, capability: tuple[int, int]) -> tuple[int, int]:
    """Bytes allocated and reserved at most in a steady step of `job`, on tensors without memory.

    Gradients of the batches before are there when the step begins.
    """
    with torch.device("meta"):
        model = LitGpt(job).bfloat16().train()
    for module in model.modules() if job.weights != "bfloat16" else ():
        if isinstance(module, _Linear) and module is not model.lm_head:
            module.pack(job.weights)
    trained = [p for p in model.parameters() if p.requires_grad]
    for p in trained:
        p.grad = torch.empty_like(p)
    optimizer = torch.optim.AdamW(trained, foreach=True)
    optimizer.step()
    states = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, Tensor)]
    workspaces = library_workspaces(capability, job.torch)
    kept = [torch.empty(size, dtype=torch.uint8, device="meta") for size in workspaces]
    known = [*model.parameters(), *model.buffers(), *states, *kept]
    recorder = Recorder(None, [*known, *(p.grad for p in trained if p.grad is not None)])
    ids = torch.zeros(job.batch, job.length, dtype=torch.long, device="meta")
    with recorder:
        model.loss(ids, torch.zeros_like(ids)).backward()
        torch._foreach_norm([p.grad for p in trained if p.grad is not None])
        optimizer.step()
    allocated = recorder.trace.peak()[0]
    return allocated, round((1 + FRAGMENTS) * allocated)
