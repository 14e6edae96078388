"""Backend `te`: NVIDIA Transformer Engine multiplies.

Each converted layer owns a `te.Linear` that is not its submodule and borrows the layer's parameters
in every call. So there is one copy of each weight, the state dict has plain Hugging Face names and
no `_extra_state`, and a replaced parameter (FSDP2) is used at once.

TE's autocast must surround the whole model's forward: leaving the outermost one updates every
delayed scale. It must also surround recomputation, or a checkpointed layer recomputes in BF16, but
must *not* update scales there. Since TE 2.9 the entry is `te.autocast(recipe=...)`.

Recipes of TE are pydantic dataclasses, which ignore keywords that they do not know (`interval`,
`override_linear_precision`): every setting is therefore read back from the recipe that was made.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, is_dataclass
from enum import Enum
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import set_checkpoint_early_stop

from finetune.config.schema import PrecisionConfig
from finetune.errors import PrecisionError
from finetune.precision.backends.base import Backend, Fp8Mixin, in_backward, restore
from finetune.precision.layers import alignment
from finetune.precision.planner import LayerPlan
from finetune.precision.scaling import Operand


def te_recipe(precision: PrecisionConfig) -> Any:
    """The `transformer_engine.common.recipe` object of a precision.

    Raises:
        PrecisionError: this version of TE drops a setting.
    """
    from transformer_engine.common import recipe

    # Recipes of an older TE have no `backward_override`: it is passed only where it is needed.
    high = {"backward_override": "high_precision"} if precision.gemms_kept_high else {}
    if precision.scaling == "nvfp4":
        return _made(
            recipe.NVFP4BlockScaling,
            disable_rht=not precision.hadamard,
            disable_stochastic_rounding=not precision.stochastic_rounding,
            **high,
        )
    fmt = {"hybrid": recipe.Format.HYBRID, "e4m3": recipe.Format.E4M3}[precision.fp8_format]
    if precision.scaling == "delayed":
        return _made(
            recipe.DelayedScaling,
            margin=precision.margin,
            fp8_format=fmt,
            amax_history_len=precision.amax_history_len,
            amax_compute_algo=precision.amax_compute_algo,
            reduce_amax=precision.reduce_amax,
            **high,
        )
    if precision.scaling == "mxfp8":
        return _made(recipe.MXFP8BlockScaling, fp8_format=fmt, **high)
    blockwise = precision.scaling == "blockwise"
    kind = recipe.Float8BlockScaling if blockwise else recipe.Float8CurrentScaling
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
    """Forward of a linear layer that lends its parameters to a `te.Linear`."""

    fp8_backend: TransformerEngineBackend
    fp8_engine: Any

    def fp8_linear(self, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        engine = self.fp8_engine
        engine.training = self.training
        rows = x.reshape(-1, x.shape[-1])
        # Tokens are contracted in wgrad: a multiple of 16, of 32 for block formats.
        missing = -rows.shape[0] % alignment(self.fp8_backend.precision)
        if missing:
            rows = nn.functional.pad(rows, (0, 0, 0, missing))
        parameters, placeholders = engine._parameters, dict(engine._parameters)
        parameters["weight"] = w.contiguous()
        if bias is not None:
            parameters["bias"] = bias
        try:
            with self.fp8_backend.region_if_outside():
                y = engine(rows)  # [M, K] @ [K, N]; its backward is dgrad and wgrad
        finally:
            parameters.update(placeholders)
        # Padding adds rows of zeros: they change neither dgrad of real rows nor wgrad.
        y = y[: y.shape[0] - missing] if missing else y
        # No view for autograd, as in `gemm.as_output`: what the engine returns is one of its own.
        return torch.ops.aten._unsafe_view(y, (*x.shape[:-1], y.shape[-1]))


class TransformerEngineBackend(Backend):
    """Backend whose layers run in Transformer Engine; owns its autocast."""

    name = "te"
    mixin = TransformerEngineMixin
    wraps_checkpointing = True

    def __init__(self, precision: PrecisionConfig) -> None:
        super().__init__(precision)
        self.recipe = te_recipe(precision)
        if precision.scaling == "nvfp4":
            from transformer_engine.pytorch import NVFP4Quantizer

            # The first quantizer makes TE's Hadamard matrix, by a product (2.20): here, and not in
            # the forward of the first layer, where the proof would count it as BF16.
            NVFP4Quantizer()
        self._engines: list[Any] = []
        self._inside = 0

    def attributes(self, module: nn.Module, layer: LayerPlan) -> dict[str, Any]:
        import transformer_engine.pytorch as te

        n, k = layer.shape
        # (in_features, out_features): a weight of [N, K].
        engine = te.Linear(
            k, n, bias=module.bias is not None, params_dtype=module.weight.dtype, device="meta"
        )
        self._engines.append(engine)
        return {"fp8_engine": engine}

    def region(self) -> contextlib.AbstractContextManager[None]:
        return self._autocast(update=True)

    def region_if_outside(self) -> contextlib.AbstractContextManager[None]:
        """Context of a layer that is called outside the model's forward."""
        if self._inside:
            return contextlib.nullcontext()
        return self._autocast(update=not in_backward())

    @contextlib.contextmanager
    def _autocast(self, *, update: bool) -> Iterator[None]:
        import transformer_engine.pytorch as te

        context = te.autocast(enabled=True, recipe=self.recipe)
        context.__enter__()
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1
            # TE updates delayed scales when the outermost autocast ends with gradients enabled.
            with contextlib.nullcontext() if update else torch.no_grad():
                context.__exit__(None, None, None)

    @contextlib.contextmanager
    def unrecorded(self) -> Iterator[None]:
        # TE's kernels record amaxes whether or not gradients are enabled.
        def rows() -> dict[int, Tensor]:
            states = (state for e in self._engines for _, state in _delayed_states(e))
            return {id(state): state.amax_history[0] for state in states}

        before = {key: row.clone() for key, row in rows().items()}
        try:
            yield
        finally:
            with torch.no_grad():
                for key, row in rows().items():
                    # A state made inside the block had no amax before it.
                    row.copy_(before[key]) if key in before else row.zero_()

    def wrap_checkpoint(self, checkpoint: Callable[..., Any]) -> Callable[..., Any]:
        """A gradient-checkpointing function whose recomputation runs under the same recipe.

        Re-entrant recomputation enters an autocast of its own in backward. There TE takes every
        layer for the first, and updates the scales of gradients after each: the same histories,
        since the others have no new amax then, but a reduction a layer over several processes.
        """
        from transformer_engine.pytorch.distributed import get_activation_recompute_contexts

        @wraps(checkpoint)
        def wrapped(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return checkpoint(function, *args, **kwargs)
            first, again = get_activation_recompute_contexts()

            def phased(*inner: Any, **inner_kwargs: Any) -> Any:
                if in_backward():
                    with self._autocast(update=False), again:
                        return function(*inner, **inner_kwargs)
                with first:
                    return function(*inner, **inner_kwargs)

            # Each scale put aside in forward must be taken back in recomputation, in order, so it
            # may not stop early. (Early stopping concerns non-reentrant checkpointing only.)
            with set_checkpoint_early_stop(False):
                return checkpoint(phased, *args, **kwargs)

        return wrapped

    def scale_in_force(self, module: nn.Module, operand: Operand) -> Tensor | None:
        engine: Any = module.fp8_engine
        # TE's scaling_fwd has x at 0 and w at 1; scaling_bwd has g at 0.
        wanted, index = "scaling_bwd" if operand == "g" else "scaling_fwd", int(operand == "w")
        states = {direction: state.scale for direction, state in _delayed_states(engine)}
        return states[wanted][index] if wanted in states else None

    def effective(self) -> dict[str, Any]:
        # Not `repr(recipe)`, which leaves `amax_compute_algo` out (2.20).
        settings = {n: _plain(v) for n, v in vars(self.recipe).items() if not n.startswith("_")}
        return {"engine": "transformer_engine", "recipe": type(self.recipe).__name__} | settings

    def state_tensors(self) -> dict[str, Tensor]:
        return {
            f"{index}.{direction}.{name}": getattr(state, name)
            for index, engine in enumerate(self._engines)
            for direction, state in _delayed_states(engine)
            for name in ("amax_history", "scale")
        }

    def load_state_tensors(self, tensors: dict[str, Tensor]) -> None:
        if self.precision.scaling != "delayed":
            return
        for index, engine in enumerate(self._engines):
            # TE makes these tensors at the first forward, which resuming precedes.
            with self._autocast(update=False):
                engine.init_fp8_metadata(num_gemms=1)
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
