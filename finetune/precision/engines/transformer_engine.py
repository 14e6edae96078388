"""Backend `te`: NVIDIA Transformer Engine casts and multiplies.

Its quantizers and its product (`te_products`) are called, and no layer of its own: so there is one
copy of each weight, the state dict has plain Hugging Face names and no `_extra_state`, a replaced
parameter (FSDP2) is used at once, no autocast must surround anything, and decoder layers compile.
Tensors under one scale that is a power of two are cast by kernels of ours, where Triton starts.

Under delayed scaling the engine's states (scales and amax histories) are kept by a `te.Linear`
without weights for each layer. They are updated, by the engine, when a training forward begins.
Until then scales stay as they were, so that recomputation casts by those of its forward, and what
it records is what forward has recorded.

Recipes of TE are pydantic dataclasses, which ignore keywords that they do not know (`interval`,
`override_linear_precision`): every setting is therefore read back from the recipe that was made.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import asdict, is_dataclass
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from finetune.errors import PrecisionError
from finetune.precision import constants
from finetune.precision.engines.base import Engine, Fp8Mixin, restore
from finetune.precision.engines.observers import in_backward
from finetune.precision.engines.te_products import RULES, SLOTS, TeRule, te_linear
from finetune.precision.engines.whole import Tensorwise
from finetune.precision.model.layers import alignment
from finetune.precision.model.plan import LayerPlan
from finetune.precision.numbers.scaling import OPERANDS, Operand, formats_of
from finetune.precision.settings import PrecisionConfig


def te_recipe(precision: PrecisionConfig) -> Any:
    """The `transformer_engine.common.recipe` object of a precision.

    Raises:
        PrecisionError: this version of TE drops a setting.
    """
    from transformer_engine.common import recipe

    # Recipes of an older TE have no `backward_override`: it is passed only where it is needed.
    high = {"backward_override": "high_precision"} if precision.gemms_kept_high else {}
    facts = precision.facts
    if facts.is_random:
        return _made(
            recipe.NVFP4BlockScaling,
            disable_rht=not constants.HADAMARD,
            disable_stochastic_rounding=not constants.STOCHASTIC_ROUNDING,
            **high,
        )
    fmt = {"hybrid": recipe.Format.HYBRID, "e4m3": recipe.Format.E4M3}[precision.fp8_format]
    if facts.has_history:
        return _made(
            recipe.DelayedScaling,
            margin=precision.margin,
            fp8_format=fmt,
            amax_history_len=precision.amax_history_len,
            amax_compute_algo=precision.amax_compute_algo,
            reduce_amax=precision.reduce_amax,
            **high,
        )
    if facts.has_exponents:
        return _made(recipe.MXFP8BlockScaling, fp8_format=fmt, **high)
    kind = recipe.Float8BlockScaling if facts.block else recipe.Float8CurrentScaling
    made = _made(kind, fp8_format=fmt, **high)
    # TE reads this setting off the recipe object, and offers an environment variable to set it.
    scales = _made(
        recipe.QParams, power_2_scale=precision.pow2_scales, amax_epsilon=0.0
    )  # fmt: skip
    made.fp8_quant_fwd_inp = made.fp8_quant_fwd_weight = made.fp8_quant_bwd_grad = scales
    return made


def _made(kind: Any, **settings: Any) -> Any:
    """An object of TE with these settings, each of which it must have taken."""
    made = kind(**settings)
    dropped = [name for name, value in settings.items() if getattr(made, name, None) != value]
    if dropped:
        raise PrecisionError(
            f"this Transformer Engine ignores {' and '.join(dropped)}",
            where=f"{kind.__module__}.{kind.__name__}",
            why="its recipes drop settings that they do not know, without an error",
            fix="install transformer-engine 2.20, or choose another backend or scaling",
        )
    return made


class TransformerEngineMixin(Fp8Mixin):
    """Forward of a linear layer by Transformer Engine.

    Attributes:
        fp8_states: scale and amax history of forward and of backward (delayed); last scales and
            None (casts of ours); or Nones.
    """

    fp8_engine: TeEngine
    fp8_states: tuple[Tensor | None, ...]

    def fp8_linear(self, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        engine = self.fp8_engine
        engine.note_use()
        rows = x.reshape(-1, x.shape[-1])
        if engine.rule.own is not None and not torch.compiler.is_compiling():
            states = (None if state is None else state.to(x.device) for state in self.fp8_states)
            self.fp8_states = tuple(states)
        # Tokens are contracted in wgrad: a multiple of 16, of 32 for block formats.
        missing = -rows.shape[0] % alignment(engine.precision)
        if missing:
            rows = nn.functional.pad(rows, (0, 0, 0, missing))
        # [M, K] @ [K, N]; its backward is dgrad and wgrad
        y = te_linear(
            *(rows, w.contiguous(), bias, engine.rule), high=engine.high, states=self.fp8_states
        )
        # Padding adds rows of zeros: they change neither dgrad of real rows nor wgrad.
        y = y[: y.shape[0] - missing] if missing else y
        # No view for autograd, as in `gemm.as_output`.
        return torch.ops.aten._unsafe_view(y, (*x.shape[:-1], y.shape[-1]))


class TeEngine(Engine):
    """Backend whose layers run in Transformer Engine; owns its delayed states.

    Attributes:
        high: True if dgrad and wgrad are multiplied in high precision.
        rule: quantizers of the recipe.
    """

    name = "te"
    mixin = TransformerEngineMixin

    def __init__(self, precision: PrecisionConfig, *, triton: bool = True) -> None:
        super().__init__(precision)
        import transformer_engine.pytorch as te

        self.recipe, self.high = te_recipe(precision), bool(precision.gemms_kept_high)
        if precision.facts.is_random:
            # The first quantizer makes TE's Hadamard matrix, by a product (2.20): here, and not in
            # the forward of the first layer, where the proof would count it as BF16.
            te.NVFP4Quantizer()
        self._engines: list[Any] = []
        self._is_inside = False
        forward, backward = self._engine().quantizers.values()
        quantizers: dict[Operand, Any] = {"x": forward[0], "w": forward[1], "g": backward[0]}
        for operand, quantizer in quantizers.items():
            quantizer.internal = True
            # Block scales in the order in which the product reads them, as TE's layers have it.
            quantizer.optimize_for_gemm = operand != "w" or precision.facts.has_exponents
        how = None
        if precision.facts.has_history:
            how = {
                operand: te.Float8CurrentScalingQuantizer(quantizer.dtype, device=None)
                for operand, quantizer in quantizers.items()
            }
            for quantizer in how.values():
                quantizer.internal = True
        own = None
        if triton and precision.facts.reads_twice and precision.pow2_scales:
            own = Tensorwise(formats_of(precision), pow2=True, own=True)
        self.casts = "transformer_engine" if own is None else "finetune"
        self.rule = TeRule(repr(self.effective()), self.recipe, quantizers, how, own)
        RULES[self.rule.name] = self.rule

    def _engine(self) -> Any:
        """A layer of the engine without weights, with the quantizers and states of the recipe."""
        import transformer_engine.pytorch as te

        engine = te.Linear(16, 16, bias=False, device="meta")
        # TE updates delayed scales when the outermost autocast ends with gradients enabled.
        with torch.no_grad(), te.autocast(enabled=True, recipe=self.recipe):
            engine.init_fp8_metadata(num_gemms=1)
        return engine

    def attributes(self, module: nn.Module, layer: LayerPlan) -> dict[str, Any]:
        if self.rule.own is not None:  # two, since Dynamo wants arguments of a function apart
            guesses, of_g = (torch.zeros(len(OPERANDS)) for _ in range(2))
            return {"fp8_states": (guesses, None, of_g, None)}
        if not self.precision.facts.has_history:
            return {"fp8_states": (None,) * 4}
        self._engines.append(engine := self._engine())
        states = [state for _, state in _delayed_states(engine)]
        tensors = tuple(t for state in states for t in (state.scale, state.amax_history))
        return {"fp8_states": tensors}

    @contextlib.contextmanager
    def region(self) -> Iterator[None]:
        before, self._is_inside = self._is_inside, True
        try:
            yield
        finally:
            self._is_inside = before

    def begin_step(self) -> None:
        """Let the engine take in the amaxes of the last step, and set the scales of this one.

        A layer that was not called keeps both. TE's own manager would update every model's layers.
        """
        if not self._engines:
            return
        import transformer_engine_torch as library

        recipe, states = self.recipe, [dict(_delayed_states(e)) for e in self._engines]
        for direction in states[0]:
            those = [state[direction] for state in states]
            histories = [state.amax_history for state in those]
            amax = torch.cat([history[0] for history in histories])
            if recipe.reduce_amax and dist.is_initialized() and dist.get_world_size() > 1:
                dist.all_reduce(amax, op=dist.ReduceOp.MAX)
            library.fused_amax_and_scale_update_after_reduction(
                *(amax, histories, [state.scale for state in those]),
                *(recipe.amax_compute_algo, those[0].dtype, recipe.margin),
            )

    def note_use(self) -> None:
        """Begin a step where a layer is called without the whole model, in training."""
        # In a compiled layer, what is looked at would be guards.
        outside = not torch.compiler.is_compiling() and not self._is_inside
        if outside and torch.is_grad_enabled() and not in_backward():
            self.begin_step()

    @contextlib.contextmanager
    def unrecorded(self) -> Iterator[None]:
        # Its casts record amaxes whether or not gradients are enabled.
        rows = [state.amax_history[0] for e in self._engines for _, state in _delayed_states(e)]
        before = [row.clone() for row in rows]
        try:
            yield
        finally:
            with torch.no_grad():
                for row, old in zip(rows, before, strict=True):
                    row.copy_(old)

    def scale_in_force(self, module: nn.Module, operand: Operand) -> Tensor | None:
        if not self.precision.facts.has_history:
            return None
        states: Any = module.fp8_states
        return states[2 if operand == "g" else 0][SLOTS[operand]]

    def effective(self) -> dict[str, Any]:
        # Not `repr(recipe)`, which leaves `amax_compute_algo` out (2.20).
        settings = {n: _plain(v) for n, v in vars(self.recipe).items() if not n.startswith("_")}
        engine = {"engine": "transformer_engine", "casts": self.casts}
        return engine | {"recipe": type(self.recipe).__name__} | settings

    def state_tensors(self) -> dict[str, Tensor]:
        return {
            f"{index}.{direction}.{name}": getattr(state, name)
            for index, engine in enumerate(self._engines)
            for direction, state in _delayed_states(engine)
            for name in ("amax_history", "scale")
        }

    def load_state_tensors(self, tensors: dict[str, Tensor]) -> None:
        for index, engine in enumerate(self._engines):
            for direction, state in _delayed_states(engine):
                for name in ("amax_history", "scale"):
                    restore(getattr(state, name), tensors, f"{index}.{direction}.{name}")


def _delayed_states(engine: Any) -> Iterator[tuple[str, Any]]:
    for direction in ("scaling_fwd", "scaling_bwd"):
        state = engine.fp8_meta.get(direction)
        if state is not None and getattr(state, "amax_history", None) is not None:
            yield direction, state


def _plain(value: Any) -> Any:
    """A setting of a recipe, for JSON: formats by name, parameters as a table."""
    if isinstance(value, Enum):
        return value.name
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return value if isinstance(value, (str, bool, int, float)) or value is None else repr(value)
