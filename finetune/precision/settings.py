"""The `precision` section of a recipe: what is asked of the matmuls. Imports no torch.

Field by field it is described here; `finetune.config.schema` puts it beside the other sections.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveInt, model_validator

from finetune.precision.facts import (
    ENGINES,
    SCALINGS,
    STORED_SCALINGS,
    UNDECIDED,
    EngineFacts,
    EngineName,
    Fp8Format,
    Gemm,
    Scaling,
    ScalingFacts,
)
from finetune.section import RefusedError, Section

TORCH_NAMES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
"""Name of a type in torch -> the same as `precision.compute`."""
Compute = Literal["fp8", "bf16", "fp16", "fp32"]


def _compute_of(value: Any) -> Any:
    """`fp32` of `torch.float32`, `torch.float32` as text, or `float32`; anything else as it is."""
    return TORCH_NAMES.get(plain_dtype(value), value)


class PrecisionConfig(Section):
    """Precision of matmuls. Storage is another matter: see `model.dtype`."""

    compute: Compute = Field(
        default="bf16", description="precision of the matmuls of linear layers"
    )
    backend: Literal["auto", EngineName] = Field(
        default="auto",
        description="engine; `auto` takes the fastest that has the scaling on an FP8 GPU: torchao, "
        "else Transformer Engine",
    )
    scaling: Scaling = Field(
        default="tensorwise",
        description="`delayed`: per tensor from an amax history; `tensorwise`: per tensor, current "
        "amax; `rowwise`: one scale per row of each GEMM operand; `rowwise_with_gw_hp`: the same, "
        "weight gradient in high precision; `blockwise`: 1x128 for activations and gradients, "
        "128x128 for weights; `mxfp8`: 1x32, E8M0 scales; `nvfp4`: FP4, 1x16 with E4M3 scales",
    )
    format: Fp8Format | None = Field(
        default=None,
        description="`hybrid`: E4M3 for activations and weights, E5M2 for gradients; `e4m3`: E4M3 "
        "everywhere; `e5m2`: E5M2 everywhere (no engine runs it, emulation does; it is not a cure "
        "for NaN); left out: hybrid with delayed and tensorwise scaling, else e4m3 (nvfp4 has "
        "one format of its own, E2M1)",
    )
    power_of_two_scales: bool | None = Field(
        default=None,
        description="round scales down to powers of two; left out: yes with rowwise and blockwise, "
        "no with delayed and tensorwise (mxfp8 and nvfp4 have scales of their own); weights stored "
        "in FP8 (`frozen`) have float32 scales, and left out so have what they multiply",
    )
    high_gemms: tuple[Gemm, ...] = Field(
        default=(),
        description="GEMMs that stay in high precision in every layer: `fprop`, `dgrad`, `wgrad`",
    )
    map: dict[str, Annotated[Compute, BeforeValidator(_compute_of)]] = Field(
        default={},
        description="precision by part: `embed`, `attn`, `mlp`, `norm`, `output`, `router` or a "
        "module pattern, to `fp8`, `bf16`, `fp16` or `fp32` (or a torch dtype); one that cannot be "
        "honored is an error. `output: fp8` is for a frozen head (LoRA with `frozen: fp8`), "
        "stored in FP8 as well. Attention scores and softmax are never touched",
    )
    first_n: NonNegativeInt = Field(
        default=0, description="decoder blocks at the beginning that stay in high precision"
    )
    last_n: NonNegativeInt = Field(
        default=0, description="decoder blocks at the end that stay in high precision"
    )
    margin: NonNegativeInt = Field(
        default=0, le=16, description="delayed scaling: headroom, scales are divided by 2^margin"
    )
    amax_history_len: PositiveInt = Field(
        default=1024, description="delayed scaling: micro-steps of amax history"
    )
    amax_compute_algo: Literal["max", "most_recent"] = Field(
        default="max", description="delayed scaling: which amax of the history sets the scale"
    )
    reduce_amax: bool = Field(
        default=True, description="delayed scaling: share amax over all processes"
    )
    frozen: Literal["fp8", "bf16"] | None = Field(
        default=None,
        description="how an FP8 run holds the linear layers that do not train: `fp8`: only as E4M3 "
        "codes, which forward and backward multiply, cast by current amax (scaling `rowwise` or "
        "`tensorwise`); `bf16`: in `model.dtype`, cast at each use; left out: `fp8` in recipes "
        "with adapters where the scaling has it",
    )
    fp8_params: bool = Field(
        default=False,
        description="full fine-tuning: the device holds the linear layers that train as FP8 codes "
        "alone; weights, gradients and optimizer states of them, of embeddings and head are in "
        "host memory, where the update runs (scaling `tensorwise` or `rowwise`). Under FSDP2 all "
        "of that is sharded over the GPUs, as ever, and what they gather are codes",
    )
    keep: tuple[str, ...] = Field(
        default=(),
        description="patterns of layers that stay in high precision: `fnmatch` over module names "
        "or any dotted part of them; one that matches nothing is an error",
    )
    eval: Literal["high", "fp8"] = Field(
        default="high",
        description="precision of evaluation and generation: high precision, or FP8 too",
    )
    emulation: Literal["forbid", "allow", "exact"] = Field(
        default="forbid",
        description="may FP8 be emulated where the device has none? `exact`: on CPUs multiply in "
        "float32, where `allow` rounds a product twice to BF16 if its scales are no powers of two",
    )
    compile: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="`torch.compile` of each decoder layer; `auto`: with torchao on a GPU, where "
        "casts are slow unless fused, in a run that is long enough for it to save time",
    )
    kernels: Literal["auto", "triton", "inductor", "eager"] = Field(
        default="auto",
        description="frozen=fp8: what casts the operands of GEMMs and transposes codes: `triton`: "
        "kernels of ours; `inductor`: torch.compile, which fuses casts with what precedes them; "
        "`eager`: torch's own kernels, and no layer is compiled; `auto`: on FP8 GPUs `triton`, but "
        "`inductor` for casts in compiled layers; elsewhere as `compile` has it",
    )
    on_unsupported: Literal["error", "bf16"] = Field(
        default="error",
        description="where FP8 is not available: stop, or train in BF16 and say so loudly",
    )
    health_every: NonNegativeInt = Field(
        default=50,
        description="optimizer steps between logs of training health (amax, overflow, underflow, "
        "quantization and gradient noise by layer group); 0: none. That a loss or gradient is "
        "finite is checked at every step anyway",
    )

    @property
    def facts(self) -> ScalingFacts:
        """Facts of the scaling rule."""
        return SCALINGS[self.scaling]

    @property
    def engine(self) -> EngineFacts:
        """Facts of the engine, if `backend` is resolved."""
        return UNDECIDED if self.backend == "auto" else ENGINES[self.backend]

    @property
    def low(self) -> Literal["fp8", "fp4"]:
        """Precision of the GEMMs requested as `fp8`: FP4 with nvfp4 scaling."""
        return self.facts.low

    @property
    def fp8_format(self) -> Fp8Format:
        """The format in force, as given or as usual for the scaling; nvfp4 has none of these."""
        return self.format or self.facts.format or "e4m3"

    @property
    def pow2_scales(self) -> bool:
        """True when scales are powers of two: as given, or as usual for the scaling."""
        return self.facts.pow2 if self.power_of_two_scales is None else self.power_of_two_scales

    @property
    def gemms_kept_high(self) -> frozenset[Gemm]:
        """GEMMs in high precision: those asked for, and the one that the scaling leaves out."""
        return frozenset((*self.high_gemms, *self.facts.high))

    @property
    def compile_requested(self) -> Literal["auto", "on", "off"]:
        """`compile` as given, or what `kernels` needs."""
        needed: dict[str, Literal["on", "off"]] = {"inductor": "on", "eager": "off"}
        return needed.get(self.kernels, "auto") if self.compile == "auto" else self.compile

    @model_validator(mode="after")
    def _known_limits(self) -> PrecisionConfig:
        # A setting of another scaling rule would be ignored silently.
        for other, facts in SCALINGS.items():
            for name in self._changed(*facts.settings) if self.scaling != other else ():
                raise RefusedError(
                    f"{name} belongs to {other} scaling and scaling is {self.scaling!r}, which has "
                    f"no {facts.state}",
                    f"scaling={other}",
                    f"~{name}",
                )
        if self.facts.format is None and self.format is not None:
            what = f"{self.scaling} has one format, E2M1 with E4M3 block scales"
            raise RefusedError(what, "~format")
        if (kind := self.facts.own_scales) and self.power_of_two_scales is not None:
            raise RefusedError(
                f"scales of {self.scaling} are {kind} by definition", "~power_of_two_scales"
            )
        for name in self._changed(*FP8_ONLY) if self.compute != "fp8" else ():
            raise RefusedError(
                f"{name} belongs to FP8 compute and compute is {self.compute!r}",
                "compute=fp8",
                f"~{name}",
            )
        if self.compute == "fp8" and len(self.gemms_kept_high) == 3:
            what = "fprop, dgrad and wgrad are all kept in high precision, so nothing would run "
            raise RefusedError(what + "in FP8", "high_gemms=[wgrad]", "compute=bf16 ~high_gemms")
        self._check_frozen()
        self._check_fp8_params()
        return self

    def _check_fp8_params(self) -> None:
        if not self.fp8_params:
            return
        if self.frozen == "fp8":
            what = "fp8_params is for weights that train, frozen=fp8 for weights that do not"
            raise RefusedError(what, "~fp8_params", "frozen=bf16")
        ways = [f"scaling={scaling}" for scaling in STORED_SCALINGS]
        if self.scaling not in STORED_SCALINGS:
            what = (
                f"fp8_params casts weights under current scaling, and scaling is {self.scaling!r}"
            )
            raise RefusedError(what, *ways, "~fp8_params")
        if (self.facts.by_row and self.fp8_format != "e4m3") or self.fp8_format == "e5m2":
            what = f"fp8_params has weights in E4M3, and format is {self.format!r}"
            raise RefusedError(what, "~format", "~fp8_params")
        if self.engine.owns_weights:
            what = f"{self.engine.shown} owns its weights, whose masters it keeps on the GPU"
            raise RefusedError(what, "backend=torchao", "~fp8_params")

    def _check_frozen(self) -> None:
        own = self._changed(*FROZEN_ONLY)
        without = " ".join(f"~{name}" for name in own)
        if self.frozen != "fp8":
            if own and not self.fp8_params:
                fitting = "" if self.scaling in STORED_SCALINGS else " scaling=rowwise"
                what = f"{own[0]} belongs to weights stored in FP8"
                raise RefusedError(what, f"frozen=fp8{fitting}", without)
            return
        if (self.kernels, self.compile) in (("inductor", "off"), ("eager", "on")):
            what = f"kernels={self.kernels} and compile={self.compile} contradict each other"
            raise RefusedError(what, "~kernels", "~compile")
        plain = f"frozen=bf16 {without}".rstrip()
        if self.scaling not in STORED_SCALINGS:
            what = f"multiplies under current scaling, and scaling is {self.scaling!r}"
            ways = [f"scaling={scaling}" for scaling in STORED_SCALINGS]
        elif self.format not in (None, "e4m3"):
            what = f"multiplies E4M3 operands, gradients too, and format is {self.format!r}"
            ways = ["~format"]
        elif {"fprop", "dgrad"} <= self.gemms_kept_high:
            what, ways = "needs one of fprop and dgrad in FP8, both are high", ["~high_gemms"]
        else:
            return
        raise RefusedError(f"frozen=fp8 {what}", *ways, plain)


FROZEN_ONLY = ("kernels",)
FP8_ONLY = ("high_gemms", "eval", "frozen", "fp8_params", *FROZEN_ONLY)


def plain_dtype(value: object) -> str:
    """`bfloat16` for `torch.bfloat16`, as an object or as text; other values as text."""
    return str(value).removeprefix("torch.")
