"""FP8 on this machine: device, versions, support by backend with reasons, a real GEMM, advice."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Group, RenderableType
from rich.jupyter import JupyterMixin
from rich.text import Text

from finetune.errors import FinetuneError, first_line
from finetune.hardware.device import (
    NO_ROWWISE,
    Device,
    Verdict,
    available_gib,
    has_launcher,
    this_device,
)
from finetune.hardware.requirements import backend_verdict, resolve
from finetune.hardware.versions import VersionStatus, concerns, installed, older, version_statuses
from finetune.logging import plain_table
from finetune.precision.facts import (
    BLOCK_CAPABILITY,
    ENGINES,
    FP8_CAPABILITY,
    SCALINGS,
    EngineName,
    Scaling,
)
from finetune.precision.settings import PrecisionConfig
from finetune.units import size_of_gib

COMBINATIONS: tuple[tuple[EngineName, Scaling], ...] = tuple(
    (engine, scaling)
    for engine in ENGINES
    for scaling, rule in SCALINGS.items()
    if engine in rule.engines and rule.capability == FP8_CAPABILITY and not rule.high
)
"""Engines and the rules that they have from Ada on; where torch has no product by row (capability
12), the answer says so."""
GEMM_TOLERANCE = 0.06
"""Relative Frobenius error allowed in an FP8 GEMM; E4M3 x E5M2 of normal data has 4 to 5 %."""


@dataclass
class Findings(JupyterMixin):
    """Result of `doctor`.

    Attributes:
        fp8, block_fp8: support in the hardware.
        backends: verdict by `backend/scaling`, with emulation allowed.
        auto: engine that `precision.backend=auto` selects, or the reason for none.
        gemm: result of a real FP8 forward and backward; None without FP8 hardware.
        triton: whether compiled layers can run; None without FP8 hardware.
        version_statuses: library -> `tested`, `newer` or `older` (`finetune.hardware.versions`).
        known_bad: lines about versions that are not tested, or do not work together.
    """

    device: Device
    free_gib: float
    versions: dict[str, str]
    version_statuses: dict[str, VersionStatus]
    fp8: Verdict
    block_fp8: Verdict
    backends: dict[str, Verdict]
    auto: str
    gemm: Verdict | None
    triton: Verdict | None = None
    known_bad: list[str] = field(default_factory=list)
    advice: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    def __rich__(self) -> RenderableType:
        d = self.device
        shown = ".".join(map(str, d.capability)) if d.capability else ""
        gemm = {} if self.gemm is None else {"FP8 GEMM, real": self.gemm}
        gemm |= {} if self.triton is None else {"compiled layers": self.triton}
        hardware = {"FP8 hardware": self.fp8, "MXFP8 / NVFP4 hardware": self.block_fp8}
        table = plain_table("", "here", "why", whole=("",))
        shown_before: set[str] = set()
        for name, verdict in (hardware | self.backends | gemm).items():
            mark = Text("yes", style="green") if verdict else Text("no", style="yellow")
            repeated = verdict.reason in shown_before and not verdict
            again = "as above" if self.fp8 else "no FP8 unit"
            table.add_row(name, mark, again if repeated else verdict.reason)
            shown_before.add(verdict.reason)
        return Group(
            Text(
                f"{d.name} ({d.kind})"
                + (f", compute capability {shown}, x{d.count}" if shown else ""),
                style="bold",
            ),
            Text(f"memory {size_of_gib(d.memory_gib)}, {size_of_gib(self.free_gib)} free"),
            Text("  ".join(f"{k} {v}" for k, v in self.versions.items()), style="dim"),
            Text(),
            table,
            Text(),
            Text(f"auto: {self.auto}"),
            *(Text(f"! {line}", style="bold red") for line in self.known_bad),
            Text(f"next: {self.advice}"),
        )


def examine(device: Device | None = None) -> Findings:
    """Examine this machine, or a described device without running a GEMM."""
    real = device is None
    device = device or this_device()
    backends = {
        f"{name}/{scaling}": backend_verdict(
            name, PrecisionConfig(compute="fp8", scaling=scaling, emulation="allow"), device
        )
        for name, scaling in COMBINATIONS
    }
    try:
        resolution = resolve(PrecisionConfig(compute="fp8"), device)
        auto = f"{resolution.label} ({resolution.reason})"
    except FinetuneError as error:
        auto = f"no FP8: {error.why}"
        if not device.has_fp8:
            auto = f"no FP8: {device.has_fp8.reason}. It is emulated (exact, slow) in the tiny_* "
            auto += "recipes, or with precision.emulation=allow"
    versions = installed()
    return Findings(
        device=device,
        free_gib=available_gib(device) if real else device.memory_gib,
        versions=versions,
        fp8=device.has_fp8,
        block_fp8=device.has_block_fp8,
        backends=backends,
        auto=auto,
        gemm=real_gemm() if real and device.has_fp8 else None,
        triton=has_launcher() if real and device.has_fp8 else None,
        version_statuses=version_statuses(versions),
        known_bad=[
            *(
                f"{name} {versions[name]} is older than {low}"
                for name, low in older(versions).items()
            ),
            *concerns(versions),
        ],
        advice=next_step(device),
    )


def real_gemm() -> Verdict:
    """Run one FP8 fprop, dgrad and wgrad through `torch._scaled_mm`, against float32.

    Operands are normal: x [M, K] and W [N, K] in E4M3, g [M, N] in E5M2, one scale per tensor. The
    error is ||y - ref|| / ||ref|| in the Frobenius norm.
    """
    import torch

    from finetune.precision.numbers.formats import E4M3, E5M2, amax, cast, scale_from_amax

    generator = torch.Generator("cuda").manual_seed(0)
    x, w, g = (torch.randn(512, 512, device="cuda", generator=generator) for _ in range(3))
    codes, inverse = [], []
    for tensor, fmt in ((x, E4M3), (w, E4M3), (g, E5M2)):
        scale = scale_from_amax(amax(tensor), fmt)
        codes.append(cast(tensor, scale, fmt))
        inverse.append(scale.reciprocal())
    (xq, wq, gq), (xs, ws, gs) = codes, inverse

    def multiply(a: Any, b: Any, sa: Any, sb: Any) -> Any:
        b = b.t().contiguous().t()  # cuBLASLt multiplies FP8 row-major by column-major
        return torch._scaled_mm(a.contiguous(), b, sa, sb, out_dtype=torch.bfloat16).float()

    try:
        pairs = {
            "fprop": (multiply(xq, wq.t(), xs, ws), x @ w.t()),  # [M, K] @ [K, N]
            "dgrad": (multiply(gq, wq, gs, ws), g @ w),  # [M, N] @ [N, K]
            "wgrad": (multiply(gq.t(), xq, gs, xs), g.t() @ x),  # [N, M] @ [M, K]
        }
    except RuntimeError as error:
        return Verdict(False, f"torch._scaled_mm failed: {first_line(error)}")
    errors = {name: float((y - ref).norm() / ref.norm()) for name, (y, ref) in pairs.items()}
    shown = ", ".join(f"{name} {error:.1%}" for name, error in errors.items())
    return Verdict(max(errors.values()) < GEMM_TOLERANCE, f"relative error {shown}")


def next_step(device: Device) -> str:
    capability = device.capability or (0, 0)
    if device.has_fp8:
        extra = " (MXFP8 and NVFP4 too)" if capability >= BLOCK_CAPABILITY else ""
        scales = " precision.scaling=tensorwise" if capability[0] == NO_ROWWISE else ""
        return f"FP8 in hardware{extra}: python -m finetune llama_8b_lora_fp8{scales}"
    if device.is_rocm:
        return "AMD GPUs are not supported in FP8 here: use _bf16 recipes"
    if capability >= (8, 0):
        return (
            f"{device.name} has BF16 but no FP8 units: use _bf16 recipes with "
            "train.optim=adamw_torch_8bit (8-bit AdamW) to save memory"
        )
    if device.capability is not None:
        return (
            f"{device.name} has neither FP8 nor fast BF16: precision.compute=fp16, small models, "
            "train.optim=adamw_8bit"
        )
    if device.kind == "mps":
        recipes = "_bf16 recipes of small models; FP8 numerics by emulation (tiny_* recipes)"
        return f"Apple GPU: {recipes}"
    return (
        "CPU: rehearse FP8 numerics with the tiny_* recipes (emulation), plan big ones with "
        "`python -m finetune validate RECIPE`, train them on an FP8 GPU"
    )
