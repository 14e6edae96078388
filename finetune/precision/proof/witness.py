"""The witness: sees every matrix multiplication of a step as it runs, and in what precision.

No flag is read. A dispatch mode looks at each GEMM that PyTorch executes and takes its precision
from its *operands*: those of `aten._scaled_mm` are FP8, torchao's tensors carry FP8 data, and those
of the emulated `finetune.scaled_mm` must lie on the grid of their format, number by number.
Transformer Engine calls its own library past PyTorch's dispatcher, so there the library's entry,
`generic_gemm`, is watched.

A GEMM belongs to the layer whose forward is running or whose autograd nodes are running; an FP8 one
by a declared parameter is named by the converter, which multiplies (`parameters`). Within a layer
with weight [N, K] it is fprop in forward; in backward it is dgrad when it contracts N and wgrad
when it contracts the tokens. GEMMs of the output head inside a fused loss are the head's. Those
outside any layer (attention scores) are counted too, so that shares are of the whole step.

Some operators multiply matrices inside (another library's attention, a fused LSTM), and nothing is
known of them but shapes. Counted as nothing, they would raise the share of everything else, so each
is taken for the product that makes its result: 2 · size of the result · longest inner dimension of
an operand.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from finetune.precision.engines.observers import Hook, ObservedMixin, in_backward, tensors_of
from finetune.precision.facts import Gemm
from finetune.precision.model.plan import LayerPlan, PrecisionPlan
from finetune.precision.model.tree import Tree
from finetune.precision.numbers.formats import E2M1, FORMATS, FP8_DTYPES, on_grid
from finetune.precision.numbers.gemm import EMULATED

aten = torch.ops.aten
ATTENTION = "(attention)"
BATCHED = "(batched)"
EXPERTS = "(experts)"
OTHER = "(other)"
UNKNOWN = "(unknown)"
NOT_LINEAR = {
    ATTENTION: "attention scores and weighted sum: kept in high precision",
    BATCHED: "batched matmuls outside linear layers, such as attention scores",
    EXPERTS: "grouped matmuls of experts in high precision",
    OTHER: "not a linear layer",
    UNKNOWN: "operators that cannot be looked into; FLOPs estimated from their shapes",
}
"""Names of matmuls outside linear layers, and the reason in the receipt."""


def _existing(*names: str) -> list[Any]:
    """Operators by name, without those that this torch does not have (yet)."""
    return [getattr(aten, name) for name in names if hasattr(aten, name)]


# Position of the first of the two operands in the calls that multiply matrices.
_FIRST_OPERAND: dict[Any, int] = dict.fromkeys(
    [EMULATED, *_existing("mm", "bmm", "_scaled_mm", "_scaled_mm_v2")], 0
) | dict.fromkeys(
    _existing("addmm", "addmm_", "_addmm_activation", "baddbmm", "baddbmm_", "addbmm", "addbmm_"),
    1,
)
_FOUR_BIT = {"bitsandbytes::gemm_4bit"}
"""Products x Wᵀ, (x, codes, (N, K), ...), of a weight that is dequantized to the type of x."""
_GROUPED = _existing("_grouped_mm", "_scaled_grouped_mm")
_ATTENTION = [
    f"_scaled_dot_product_{kind}"
    for kind in (
        "flash_attention",
        "efficient_attention",
        "cudnn_attention",
        "flash_attention_for_cpu",
        "fused_attention_overrideable",
    )
]
# Fused attention: forward is 2 matmuls of 2·B·H·Sq·Sk·D each; backward recomputes one and has four.
_ATTENTION_MATMULS: dict[Any, int] = dict.fromkeys(_existing(*_ATTENTION), 2) | dict.fromkeys(
    _existing(*(f"{name}_backward" for name in _ATTENTION)), 5
)

_VARLEN = {
    f"{name}{direction}"
    for name in ("finetune::varlen_attention", "torch_attn::_varlen_attn")
    for direction in ("", "_backward")
}
"""Attention over documents: `finetune.training.helper.varlen`, and torch's kernel."""

_CONTRACTING = {
    "_trilinear", "_cdist_forward", "_euclidean_dist", "sspaddmm", "_int_mm", "addr",
    "mkldnn_rnn_layer", "mkldnn_rnn_layer_backward", "_cudnn_rnn", "_cudnn_rnn_backward",
}  # fmt: skip
"""Operators of `aten` without a formula in torch's own counter."""
_SEEN_THROUGH = {
    "aten", "prim", "prims", "profiler", "c10d", "c10d_functional", "_c10d_functional",
    "torchao", "finetune", "fsdp", "inductor", "_inductor", "rngprims", "autograd",
}  # fmt: skip
"""Namespaces whose other operators multiply no matrices, or are counted by name."""


@dataclass
class Seen:
    """GEMMs of one kind seen for one layer: their number, and the sum of their 2·m·n·k."""

    calls: int = 0
    flops: int = 0


_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"} | dict.fromkeys(
    FP8_DTYPES, "fp8"
)


def operand_precision(x: Any) -> str:
    """`fp8`, `bf16`, `fp16`, `fp32` ... of a GEMM operand, by what it holds."""
    data = getattr(x, "_data", None)  # torchao's Float8TrainingTensor
    if isinstance(data, Tensor) and data.dtype in FP8_DTYPES:
        return "fp8"
    for low in ("fp8", "fp4"):  # Transformer Engine's quantized tensors
        if getattr(x, f"_{low}_dtype", None) is not None:
            return low
    return _DTYPES.get(x.dtype, str(x.dtype).removeprefix("torch."))


def emulated_precision(values: Tensor, name: str) -> str:
    """`fp8` or `fp4` of an operand of the emulated GEMM, if all its numbers are of that format."""
    fmt = FORMATS[name]
    if not on_grid(values, fmt):
        return operand_precision(values)
    return "fp4" if fmt is E2M1 else "fp8"


class Witness:
    """Watches a model under a plan. Enter `watching()` around forwards and backwards.

    Attributes:
        called: names of the layers, and of a module's parameters, whose forward has run.
        seen: (layer name, gemm, precision) -> `Seen`; attention and GEMMs outside layers under
            names in parentheses.
        unknown: names of operators whose FLOPs are estimates.
        saw_backward: True if a gradient of one of the model's layers has run.
        is_paused: True while GEMMs are not counted.
    """

    def __init__(self, model: nn.Module | Tree, plan: PrecisionPlan) -> None:
        self.seen: dict[tuple[str, Gemm, str], Seen] = defaultdict(Seen)
        self.called: set[str] = set()
        self.unknown: set[str] = set()
        self.saw_backward = self.is_paused = False
        self._plan = {layer.name: layer for layer in plan.layers}
        self._head = next((layer for layer in plan.layers if layer.role == "head"), None)
        self._words = 0  # that the head was last multiplied by
        self._stack: list[tuple[str, bool, tuple[int, int]]] = []
        self._handles: list[Any] = []
        modules = dict(model.named_modules())
        self._joined = [m.fp8_observers for m in modules.values() if isinstance(m, ObservedMixin)]
        for observers in self._joined:
            observers.append(self)
        for name, module in modules.items():
            # A block's GEMMs besides its layers belong to no layer, also in a checkpoint's
            # recomputation, which begins inside an autograd node of some layer. Lists and dicts of
            # modules have no forward.
            forward = getattr(module.forward, "__func__", None)
            if name not in self._plan and module._modules and forward is not nn.Module.forward:
                self._watch_module(module, OTHER, (0, 0))
        for layer in plan.layers:
            if layer.kind == "parameter":
                self._watch_parameter(layer, modules[layer.owner])
            else:
                self._watch_module(modules[layer.owner], layer.name, layer.shape)

    @property
    def owners(self) -> set[str]:
        """Names of the layers for which some GEMM has been seen."""
        return {name for name, _, _ in self.seen}

    def reset(self) -> None:
        """Discard all observations: they were not of a step."""
        self.seen.clear()
        self.called.clear()
        self._stack.clear()
        self.saw_backward = False

    def close(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()
        for observers in self._joined:
            observers[:] = [one for one in observers if one is not self]
        self._handles.clear()
        self._joined.clear()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Count the matmuls inside the block, on this thread or in its backward."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._watching_transformer_engine())
            stack.enter_context(_Dispatch(self))
            yield

    # ------------------------------------------------------------------------ who is multiplying

    def enter(self, name: str, shape: tuple[int, int], backward: bool = False) -> None:
        """Begin a forward or gradient of this layer or parameter, of shape (N, K)."""
        self.saw_backward |= backward and name in self._plan
        self._stack.append((name, backward, shape))

    def leave(self, *_: Any) -> None:
        """End it."""
        if self._stack:
            self._stack.pop()

    def watch(self, name: str, shape: tuple[int, int], y: Tensor, inputs: tuple[Any, ...]) -> None:
        """Hook every autograd node between an output and the inputs it was made of."""
        stop = {x.grad_fn for x in inputs if isinstance(x, Tensor)}
        pending, known = [y.grad_fn], set(stop)
        while pending:
            node = pending.pop()
            if node is None or node in known or type(node).__name__ == "AccumulateGrad":
                continue
            known.add(node)
            self._handles.append(node.register_prehook(lambda _: self.enter(name, shape, True)))
            self._handles.append(node.register_hook(self.leave))
            pending.extend(n for n, _ in node.next_functions if n is not None)

    def _watch_module(self, module: nn.Module, name: str, shape: tuple[int, int]) -> None:
        """Attribute the GEMMs in a module's forward to `name`, and those of a layer's gradients."""

        def before(module: nn.Module, args: Any) -> None:
            empty = any(isinstance(x, Tensor) and not x.numel() for x in args)  # no expert's tokens
            if torch.is_grad_enabled() and not empty:  # not in a generation
                self.called.add(name)
            self.enter(name, shape)

        def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            self.leave()
            if name != OTHER and isinstance(output, Tensor):
                self.watch(name, shape, output, (*args, *kwargs.values()))

        leave = module.register_forward_hook(Hook(after), with_kwargs=True, always_call=True)
        self._handles += [module.register_forward_pre_hook(Hook(before), prepend=True), leave]

    def _watch_parameter(self, layer: LayerPlan, owner: nn.Module) -> None:
        def before(module: nn.Module, args: Any) -> None:
            if torch.is_grad_enabled():
                self.called.add(layer.name)

        def after(module: nn.Module, args: Any, output: Any) -> None:
            # Its products in high precision have no name, and none of theirs tells of a backward.
            for y in tensors_of(output if isinstance(output, tuple) else (output,)):
                if y.requires_grad:
                    y.register_hook(self._see_backward)

        self._handles.append(owner.register_forward_pre_hook(Hook(before)))
        self._handles.append(owner.register_forward_hook(Hook(after)))

    def _see_backward(self, gradient: Tensor) -> None:
        self.saw_backward = True

    # ------------------------------------------------------------------------------ which GEMM

    def count_gemm(self, m: int, n: int, k: int, precision: str, *, batch: int = 1) -> None:
        """Count one GEMM [m, k] @ [k, n], contracting k."""
        if not batch * m * n * k:  # an expert without tokens
            return
        no_layer = OTHER, in_backward(), (0, 0)
        name, backward, shape = self._stack[-1] if self._stack else no_layer
        if backward and batch > 1 and not set(shape) <= {m, n, k}:
            # A checkpoint recomputes what saved this node's inputs: attention, not the layer.
            name, backward, shape = no_layer
        if batch > 1 and name == OTHER:
            name = BATCHED
        head = self._head
        if name == OTHER and head is not None and set(head.shape) <= {m, n, k}:
            name = head.name  # a fused loss that multiplies by the whole weight (Liger's)
        if head is not None and name == head.name:
            gemm = self._which_of_head(head.shape[1], m, n, k)
        else:
            gemm = self._which(name, backward, shape, m, n, k)
        self.add(name, gemm, precision, 2 * batch * m * n * k)

    def count_grouped(self, a: Tensor, b: Tensor, flops: int, precision: str) -> None:
        """Count one grouped GEMM; only a weight gradient is of two 2-D operands."""
        name, backward, _ = self._stack[-1] if self._stack else (EXPERTS, in_backward(), (0, 0))
        gemm: Gemm = "fprop"
        if backward:
            gemm = "wgrad" if a.dim() == b.dim() == 2 else "dgrad"
        self.add(name, gemm, precision, flops)

    def add(self, name: str, gemm: Gemm, precision: str, flops: int) -> None:
        """Add one GEMM to what was seen."""
        if self.is_paused:
            return
        entry = self.seen[(name, gemm, precision)]
        entry.calls += 1
        entry.flops += flops

    def _which_of_head(self, columns: int, m: int, n: int, k: int) -> Gemm:
        """GEMM of a head of K columns, also of a slab of its words.

        Fused losses make logits in backward, too, or their gradient in forward, and multiply tiles
        of T tokens by slabs of S words: z [T, K] @ [K, S], dx [T, S] @ [S, K], dW [S, T] @ [T, K].
        """
        if n != columns:
            self._words = n
            return "fprop"
        return "dgrad" if k == self._words else "wgrad"

    def _which(
        self, name: str, backward: bool, shape: tuple[int, int], m: int, n: int, k: int
    ) -> Gemm:
        layer = self._plan.get(name)
        if not backward or layer is None:
            return "dgrad" if backward else "fprop"
        rows, columns = shape
        contracts_outputs = k == rows and columns in (m, n)
        if contracts_outputs and {m, n} == {rows, columns}:
            # As many tokens as outputs: shapes cannot tell. Every engine runs dgrad first.
            done: Counter[str] = Counter()
            for (who, gemm, _), seen in self.seen.items():
                done[gemm] += seen.calls if who == name else 0
            return "wgrad" if done["dgrad"] > done["wgrad"] and not layer.frozen else "dgrad"
        return "dgrad" if contracts_outputs else "wgrad"

    @contextlib.contextmanager
    def _watching_transformer_engine(self) -> Iterator[None]:
        library = sys.modules.get("transformer_engine_torch")
        if library is None:
            yield
            return
        original = library.generic_gemm

        def watched(a: Any, transpose_a: bool, b: Any, transpose_b: bool, *args: Any, **kw: Any):
            result = original(a, transpose_a, b, transpose_b, *args, **kw)
            # Column-major BLAS: A is the weight (fprop, dgrad) or the input (wgrad), B the other.
            gemm: Gemm = "wgrad" if transpose_b else ("fprop" if transpose_a else "dgrad")
            pair = {operand_precision(a), operand_precision(b)}
            name = self._stack[-1][0] if self._stack else OTHER
            layer = self._plan.get(name)
            out = result[0] if isinstance(result, (tuple, list)) else result
            n, k = layer.shape if layer is not None else (0, 0)
            tokens = out.numel() // (n if gemm == "fprop" else k) if layer is not None else 0
            if gemm == "wgrad":
                tokens = _rows(b)
            self.add(name, gemm, min(pair), 2 * tokens * n * k)
            return result

        library.generic_gemm = watched
        try:
            yield
        finally:
            library.generic_gemm = original


def _rows(x: Any) -> int:
    """Tokens M of a wgrad operand [M, ...]; TE's tensors know their size whatever they hold."""
    if getattr(x, "_fp4_dtype", None) is not None and x._rowwise_data is None:
        return int(x._columnwise_data.shape[-1]) * 2  # transposed, two values a byte; size() warns
    return math.prod(x.size()[:-1])


class _Dispatch(TorchDispatchMode):
    def __init__(self, witness: Witness) -> None:
        super().__init__()
        self.witness = witness

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self._count(func.overloadpacket, args, kwargs, result)
        return result

    def _count(self, packet: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        """Count the matmuls of an operator that has run."""
        witness, name = self.witness, str(packet).replace(".", "::", 1)
        if packet in _FIRST_OPERAND:
            first = _FIRST_OPERAND[packet]
            a, b = args[first : first + 2]
            pair = operand_precision(a), operand_precision(b)
            if packet is EMULATED:
                pair = emulated_precision(a, args[6]), emulated_precision(b, args[7])
            # The higher of two precisions counts ('bf16' < 'fp32' < 'fp4' < 'fp8').
            batch = a.shape[0] if a.dim() == 3 else 1
            witness.count_gemm(a.shape[-2], b.shape[-1], a.shape[-1], min(pair), batch=batch)
        elif name in _FOUR_BIT:
            x, (n, k) = args[0], args[2]
            witness.count_gemm(x.numel() // k, n, k, operand_precision(x))
        elif packet in _GROUPED:
            # fprop [tokens, K] @ [experts, K, N]; in backward the roles of tokens change, and the
            # product of all sizes but the number of groups stays.
            a, b = args[:2]
            sizes = a.numel() * b.shape[-1] if a.dim() == 2 else a.shape[-2] * b.numel()
            precision = min(operand_precision(a), operand_precision(b))
            witness.count_grouped(a, b, 2 * sizes, precision)
        elif packet in _ATTENTION_MATMULS:
            backward = packet.__name__.endswith("backward")
            q, k = args[1:3] if backward else args[0:2]
            flops = 2 * q[..., 0].numel() * k.shape[-2] * q.shape[-1] * _ATTENTION_MATMULS[packet]
            witness.add(ATTENTION, _direction(backward), operand_precision(q), flops)
        elif name in _VARLEN:
            backward = name.endswith("backward")
            precision = operand_precision(args[int(backward)])
            flops = flop_registry[packet](*args, **kwargs)
            witness.add(ATTENTION, _direction(backward), precision, flops)
        elif packet in flop_registry:  # convolutions and whatever else torch counts
            flops = flop_registry[packet](*args, **kwargs, out_val=result)
            precision = operand_precision(next(a for a in args if isinstance(a, Tensor)))
            witness.add(OTHER, _direction(in_backward()), precision, flops)
        elif flops := estimated_flops(packet, args, result):
            witness.unknown.add(name)
            witness.add(UNKNOWN, _direction(in_backward()), "unknown", flops)


def _direction(backward: bool) -> Gemm:
    """GEMM of a product that is no linear layer's."""
    return "dgrad" if backward else "fprop"


def estimated_flops(packet: Any, args: tuple[Any, ...], result: Any) -> int:
    """Estimated FLOPs of an operator that cannot be looked into, 0 of one that can."""
    namespace, _, name = str(packet).partition(".")
    if namespace in _SEEN_THROUGH and not (namespace == "aten" and name in _CONTRACTING):
        return 0
    operands = [x for x in tensors_of(args) if x.is_floating_point() and x.dim() > 1]
    made = max((math.prod(y.shape) for y in tensors_of([result])), default=0)
    if len(operands) < 2:  # elementwise
        return 0
    return 2 * made * max(x.shape[-1] for x in operands)
