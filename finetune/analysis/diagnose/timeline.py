"""Timeline of a step, from a profile: slices with duration, layer, part and phase.

The events of `torch.profiler` form a tree by time on each host thread. A context goes down it:

* a range of ours (`observer.Ranges`) names a layer, and marks recomputation;
* an autograd node has the sequence number and thread of the operator that made it, so its backward
  belongs to that operator's layer; a range inside it takes precedence;
* inside the optimizer's range everything is the optimizer's.

On a *CPU* a slice is the self time of an event; these add up to the window exactly. On a *GPU* a
slice is a kernel, matched to its launching operator by the driver's correlation id. Overlapping
kernels count once, computation before communication; the rest of the step is the host's. Profiling
slows down the host but not the kernels, so the step's length is then taken from steps without a
profile. Limits: kernels in CUDA graphs have no operator each; where the GPU rests between kernels,
as under the profiler, it may run them faster than in a step at its limit of power, and the
difference is then among the host's.

*Parts by name.* Kernel names change with their libraries, so the launching operator decides
(`aten::_scaled_mm` multiplies FP8 whatever its kernel's name). Names of `torch.compile` kernels
list the fused operations: one that only casts is a cast; one that norms and casts is a norm with a
free cast. Where a library was called past PyTorch (Transformer Engine, NCCL) a kernel's name says
whether it communicates or multiplies, and the receipt whether that layer multiplies in FP8.

*Bytes moved.* A profile counts none, but has shapes and types of what each operator takes. An
operator that launches kernels reads its operands once (a kernel of `torch.compile` its
outputs, too), and a GEMM writes m x n numbers of two bytes. Results of other operators, lists of
tensors and rows looked up in a table are not counted, so a step moves at least as many.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.autograd import DeviceType

from finetune.analysis.diagnose.observer import PREFIX, WINDOW
from finetune.estimator.speed.operators import LAUNCH_NOTHING, words
from finetune.estimator.speed.step_parts import PROFILED_PARTS, StepPart

BACKWARD_NODE = "autograd::engine::evaluate_function"
_RANK = {StepPart.COMMUNICATION: 1, StepPart.OTHER: 2}
"""Priority among simultaneous kernels: the lowest rank is charged; 0 by default."""

_FP8_OPS = words("scaled_mm _scaled_mm _scaled_mm_v2 _scaled_grouped_mm")
_GEMM_OPS = words(
    "mm addmm addmm_ _addmm_activation linear matmul _int_mm _grouped_mm gemm_4bit gemv_4bit"
)
_BATCHED_OPS = words("bmm baddbmm baddbmm_")
HOST_OPS = LAUNCH_NOTHING | words("item is_nonzero resolve_conj resolve_neg result_type to")
_BY_OPERATOR = {
    **dict.fromkeys(_FP8_OPS, StepPart.FP8_GEMM),
    **dict.fromkeys(_GEMM_OPS, StepPart.GEMM),
}

_COMMUNICATION = re.compile(r"nccl|rccl|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all", re.I)
_ATTENTION = re.compile(
    r"scaled_dot_product|attention|sdpa|varlen_attn|_attn_|attn_(fwd|bwd)", re.I
)
_OPTIMIZER = re.compile(r"adam|lamb\b|foreach|optimizer.*8bit|linalg_vector_norm", re.I)
_GEMM_NAME = re.compile(r"gemm|nvjet", re.I)
_LOOKUP = re.compile(r"embedding|index|gather|scatter|select")
_ITEM_BYTES = {"float": 4, "double": 8, "int": 4, "long": 8, "long int": 8, "short int": 2} | {
    **dict.fromkeys(("c10::BFloat16", "c10::Half"), 2),
    **dict.fromkeys(("bool", "signed char", "unsigned char"), 1),
    **dict.fromkeys(("c10::Float8_e4m3fn", "c10::Float8_e5m2", "c10::Float8_e8m0fnu"), 1),
}
"""Bytes of a number by the profiler's name of its type; of others (lists) nothing is counted."""
_CUDA_CALL = re.compile(r"(?:cu|cuda|hip)[A-Z]")
_TRITON = re.compile(r"^triton_(?:poi|red|per|for)")
_FUSED_CAST = re.compile(r"amax|_scaled_mm|float8|_to_copy.*clamp|clamp.*_to_copy|aminmax")
_MORE_THAN_A_CAST = re.compile(
    r"rsqrt|silu|sigmoid|gelu|mean|softmax|embedding|cos_|sin_|var_mean|layer_norm|rms_norm"
)


@dataclass(frozen=True)
class Slice:
    """Kernel, or the self time of an operator.

    Attributes:
        seconds: time charged to this slice alone.
        owner: the layer, "" if unknown.
        phase: forward, recompute, backward, optimizer, or "".
        sizes: (m, n, k) of a GEMM, sorted; empty if unknown.
        nbytes: bytes that its operator moves, if it is the operator's first kernel; else 0.
    """

    name: str
    part: StepPart
    seconds: float
    owner: str = ""
    phase: str = ""
    sizes: tuple[int, ...] = ()
    nbytes: int = 0


@dataclass(frozen=True)
class Timeline:
    """Slices of all `steps`, with the duration of one step; `on_gpu` if slices are kernels.

    `profiled_seconds` is the duration of a step under the profiler.
    """

    slices: tuple[Slice, ...]
    steps: int
    step_seconds: float
    on_gpu: bool
    profiled_seconds: float = 0.0

    def parts(self) -> dict[StepPart, float]:
        """Seconds of one step by part; they add up to `step_seconds`."""
        found = dict.fromkeys(PROFILED_PARTS, 0.0)
        for piece in self.slices:
            found[piece.part] += piece.seconds / self.steps
        if self.on_gpu:
            found[StepPart.HOST] += max(0.0, self.step_seconds - sum(found.values()))
        return found

    @property
    def nbytes(self) -> float:
        """Bytes that the kernels of one step move at least; 0 on a CPU."""
        return sum(piece.nbytes for piece in self.slices) / self.steps

    def seconds(self, *, phase: str) -> float:
        """Seconds of one step in a phase, without waiting."""
        found = (p.seconds for p in self.slices if p.phase == phase and p.part != StepPart.HOST)
        return sum(found) / self.steps


@dataclass(frozen=True)
class _Context:
    """Context of an event, inherited by its children; `part` overrides what names imply."""

    owner: str = ""
    phase: str = ""
    part: StepPart | None = None
    sizes: tuple[int, ...] = ()


def read_profile(
    events: Iterable[Any],
    *,
    steps: int,
    step_seconds: float | None = None,
    low: Mapping[str, bool],
    batched: bool = False,
) -> Timeline:
    """Convert a profile to slices.

    Args:
        events: from `torch.profiler.profile.events()`, with parents and input shapes.
        steps: optimizer steps inside the window.
        step_seconds: duration of a step without a profile; used for GPU profiles.
        low: layers with FP8 GEMMs -> True if all of them are FP8.
        batched: batched GEMMs are of layers.
    """
    ordered = sorted(events, key=lambda e: (e.time_range.start, -e.time_range.end))
    host = [e for e in ordered if e.device_type == DeviceType.CPU and not e.is_async]
    # Ranges also appear on the GPU's time line, but are no work.
    ranges = (PREFIX, "Optimizer.", "ProfilerStep")
    kernels = [
        e
        for e in ordered
        if e.device_type != DeviceType.CPU
        if not e.is_user_annotation and not e.name.startswith(ranges)
    ]
    contexts = _contexts(host)

    def slice_of(operator: Any, seconds: float, kernel: str = "") -> Slice:
        here = contexts.get(id(operator), _Context())
        launcher = operator.name if operator is not None else ""
        part = part_of(launcher, kernel, low=here.owner in low, batched=batched)
        if part not in (StepPart.HOST, StepPart.COMMUNICATION):
            part = here.part or part
        if part == StepPart.GEMM and low.get(here.owner):  # by the receipt all of its GEMMs are
            part = StepPart.FP8_GEMM
        return Slice(kernel or launcher, part, seconds, here.owner, here.phase, here.sizes)

    window = next(e for e in host if e.name == WINDOW)
    length = window.time_range.elapsed_us() * 1e-6 / steps
    if kernels:
        launchers = _launchers(kernels, host)
        slices = [slice_of(o, 0.0, k.name) for k, o in zip(kernels, launchers, strict=True)]
        first = {id(o): index for index, o in reversed([*enumerate(launchers)]) if o is not None}
        # Of several kernels of one operator the first one stands for its operands, which are read
        # once.
        for index in first.values():
            slices[index] = replace(slices[index], nbytes=_moved(launchers[index]))
        spans = [(event.time_range.start, event.time_range.end) for event in kernels]
        charged = _alone(spans, [_RANK.get(piece.part, 0) for piece in slices])
        timed = zip(slices, charged, strict=True)
        slices = [replace(piece, seconds=s * 1e-6) for piece, s in timed]
        busy = sum(piece.seconds for piece in slices) / steps
        # Kernels cannot take longer than the step that holds them; the clock of the host may say so
        # by its own error.
        timed_seconds = max(step_seconds or 0.0, busy)
        return Timeline(tuple(slices), steps, timed_seconds, True, length)
    inside = (event for event in host if _is_inside(event, window))
    slices = [slice_of(event, event.self_cpu_time_total * 1e-6) for event in inside]
    return Timeline(tuple(slices), steps, length, False, length)


def _is_inside(event: Any, window: Any) -> bool:
    while event is not None and event is not window:
        event = event.cpu_parent
    return event is window


# ------------------------------------------------------------------------------------------ context


def _contexts(host: Sequence[Any]) -> dict[int, _Context]:
    """Contexts by id(event). `host` is in order of time, parents first."""
    found: dict[int, _Context] = {}
    forward: dict[tuple[int, int], _Context] = {}
    for event in host:
        above = found.get(id(event.cpu_parent), _Context())
        here = found[id(event)] = _descend(event, above, forward)
        if event.sequence_nr >= 0 and not event.name.startswith(BACKWARD_NODE):
            # Of operators with equal numbers the last one made the node of that number.
            forward[event.thread, event.sequence_nr] = here
    return found


def _descend(event: Any, above: _Context, forward: Mapping[tuple[int, int], _Context]) -> _Context:
    name = event.name
    if name.startswith(PREFIX) and name != WINDOW:
        _, phase, owner = name.split("|", 2)
        return _Context(owner, phase)
    if name.startswith("Optimizer."):
        return replace(above, phase="optimizer", part=StepPart.OPTIMIZER)
    if name.startswith(BACKWARD_NODE):
        # Backward runs in another thread, so the sequence number alone is not enough.
        made = forward.get((event.fwd_thread, event.sequence_nr), _Context())
        return _Context(made.owner, "backward")
    if _operator(name) in _FP8_OPS:
        return replace(above, part=StepPart.FP8_GEMM, sizes=tuple(sorted(_sizes(event))))
    if _operator(name) in _GEMM_OPS | _BATCHED_OPS:
        # The outermost operator knows the sizes as the layer has them; `mm` inside `linear` sees
        # views.
        return above if above.sizes else replace(above, sizes=tuple(sorted(_sizes(event))))
    if above.part is None and part_of(name) == StepPart.ATTENTION:
        return replace(above, part=StepPart.ATTENTION)
    return above


def _sizes(event: Any) -> tuple[int, ...]:
    """Sizes (m, n, k) of a GEMM, from the two inputs that fit together; empty if unknown."""
    shapes = [tuple(s) for s in event.input_shapes or () if len(s) in (2, 3) and all(s)]
    for a, b in itertools.pairwise(shapes):
        # Among three inputs (a bias, an accumulator) the two whose inner sizes agree.
        if a[-1] == b[-2]:  # [M, K] @ [K, N]
            rows = a[0] * a[1] if len(a) == 3 and len(b) == 2 else a[-2]
            return rows, b[-1], a[-1]
    return ()


def _moved(event: Any) -> int:
    """Bytes of an operator's operands, and of what a GEMM writes."""
    name, shapes = _operator(event.name), event.input_shapes or ()
    if _LOOKUP.search(name):
        return 0
    types = getattr(event, "input_dtypes", None) or ()
    read = sum(
        math.prod(shape) * _ITEM_BYTES.get(kind, 0)
        for shape, kind in zip(shapes, types, strict=False)
        if shape
    )
    multiplies = name in _FP8_OPS | _GEMM_OPS
    return read + (2 * math.prod(_sizes(event)[:2] or (0,)) if multiplies else 0)


# ------------------------------------------------------------------------------------------- slices


def _launchers(kernels: Sequence[Any], host: Sequence[Any]) -> list[Any]:
    """The operator that launched each kernel, None where it is not known.

    Events of torch 2.10 and 2.11 do not have its number; there a kernel has the number of the CUDA
    call which launched it, inside the operator.
    """
    if all(hasattr(event, "linked_correlation_id") for event in (*kernels, *host)):
        operators = {event.id: event for event in host if not event.linked_correlation_id}
        return [operators.get(kernel.linked_correlation_id) for kernel in kernels]
    calls = {event.id: event.cpu_parent for event in host if _CUDA_CALL.match(event.name)}
    return [calls.get(kernel.id) for kernel in kernels]


def _alone(spans: Sequence[tuple[float, float]], rank: Sequence[int]) -> list[float]:
    """Charge every moment to one span: among overlapping ones to the lowest rank, then the first.

    Spans (0, 4) and (2, 6) of one rank are charged 4 and 2; of ranks 1 and 0, 2 and 4.
    """
    starts: dict[float, list[int]] = {}
    for index, (start, _) in enumerate(spans):
        starts.setdefault(start, []).append(index)
    charged, active = [0.0] * len(spans), list[int]()
    for left, right in itertools.pairwise(sorted({edge for span in spans for edge in span})):
        active = [i for i in (*active, *starts.get(left, [])) if spans[i][1] > left]
        if active:
            charged[min(active, key=lambda i: (rank[i], spans[i][0], i))] += right - left
    return charged


# ------------------------------------------------------------------------------------ parts by name


def _operator(name: str) -> str:
    """Short operator name, `aten::mm` -> `mm`; empty for ranges and autograd nodes."""
    space, _, bare = name.rpartition("::")
    return "" if not space or space.startswith(("autograd", "torch::autograd")) else bare


def part_of(
    operator: str, kernel: str = "", *, low: bool = False, batched: bool = False
) -> StepPart:
    """Part of an operator's self time, or of a GPU kernel that it launched.

    Args:
        operator: full name, such as `aten::mm`; also of a range or an autograd node.
        kernel: name in the driver, none on a CPU.
        low: it runs in a layer with FP8 GEMMs: other operators there prepare operands, as do
            batched GEMMs (the Hadamard transform of NVFP4).
        batched: batched GEMMs are of layers, not of attention.
    """
    if kernel.startswith(("Memcpy HtoD", "Memcpy DtoH", "Memset")):
        return StepPart.OTHER
    if _COMMUNICATION.search(f"{operator} {kernel}") or operator.startswith("c10d"):
        return StepPart.COMMUNICATION
    if _TRITON.match(kernel):
        casts = _FUSED_CAST.search(kernel) and not _MORE_THAN_A_CAST.search(kernel)
        return StepPart.CASTS if casts else StepPart.ELEMENTWISE
    bare, other = _operator(operator), StepPart.CASTS if low else StepPart.ELEMENTWISE
    if not kernel and "CompiledFxGraph" in operator:  # on a CPU its kernels are not operators
        return other
    if not bare or bare in HOST_OPS:  # a library launched the kernel past PyTorch
        found = StepPart.GEMM if _GEMM_NAME.search(kernel) else other
        return found if kernel else StepPart.HOST
    if bare in _BATCHED_OPS:
        # Batched products are attention of its own without a fused kernel, except in models that
        # multiply parameters in batches (experts, BDH).
        return StepPart.GEMM if batched else StepPart.CASTS if low else StepPart.ATTENTION
    if bare in _BY_OPERATOR:
        return _BY_OPERATOR[bare]
    if _ATTENTION.search(bare):
        return StepPart.ATTENTION
    if _OPTIMIZER.search(bare):
        return StepPart.OPTIMIZER
    return StepPart.CASTS if "dequant" in bare else other
