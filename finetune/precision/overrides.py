"""What the user chose for which module: `keep`, `map`, `first_n` and `last_n`.

A key of `precision.map` is a part of the model (`embed`, `attn`, `mlp`, `norm`, `output`, `router`)
or a pattern over module names. The more specific choice wins:

    map pattern  >  keep  >  first_n / last_n  >  map part  >  the policy of the planner

`keep`, `first_n` and `last_n` say "not FP8" and no more: a part that is mapped to another type has
that type there too.

Every choice must decide over something. One that matches nothing, whose every module another
choice decides over, or that asks what cannot be had (an embedding is a lookup and no matmul, so it
has no FP8), is an error that names what to use: a part meant for high precision would otherwise
silently run in FP8, or the other way round.

The module itself changes class (`OverrideMixin`), whatever autocast says: a linear layer multiplies
inputs and weights cast to its type; an embedding or a norm gets its input in that type and gives
its result in it (norms compute inside in that type or a higher one, as they are written). Where
autocast is on, only its own type and float32 can meet afterwards, so a result in a third type
(float16 in a BF16 run) is handed on in autocast's. Parameters stay what the optimizer knows, and
gradients come back in their own type.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from finetune.config.schema import Compute, PrecisionConfig
from finetune.errors import PlanError, nearest
from finetune.precision.layers import is_conv1d, matches
from finetune.precision.swap import Swapped

Part = Literal["embed", "attn", "mlp", "norm", "output", "router", ""]
PARTS: tuple[Part, ...] = ("embed", "attn", "mlp", "norm", "output", "router")
NO_MATMUL: tuple[Part, ...] = ("embed", "norm")


DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Choice:
    """The user's precision for one module.

    Attributes:
        compute: requested precision.
        reason: setting that requested it.
        asked: True if requested for this very part or name: honoured or refused.
    """

    compute: Compute
    reason: str
    asked: bool


def part_of(name: str) -> Part:
    """`attn` or `mlp`, for a weight inside a decoder block, by the names of its parents."""
    for piece in name.lower().split("."):
        if "attn" in piece or "attention" in piece:
            return "attn"
        if any(word in piece for word in ("mlp", "ffn", "feed_forward", "expert", "moe")):
            return "mlp"
        if piece in ("fc1", "fc2"):  # OPT has its MLP's layers beside the attention
            return "mlp"
    return ""


class Choices:
    """The choices of a precision over a model whose modules are known by name and part."""

    def __init__(
        self, model: nn.Module, precision: PrecisionConfig, parts: dict[str, Part]
    ) -> None:
        """Check every choice against the model.

        Args:
            model: on any device.
            precision: what was asked.
            parts: name -> part of everything that can be chosen: linear layers, parameters that
                multiply, embeddings and norms.

        Raises:
            PlanError: a choice reaches nothing, or cannot be honoured.
        """
        self.precision, self.parts = precision, parts
        linears = [name for name, part in parts.items() if part not in NO_MATMUL]
        self._kept = self._matched("precision.keep", precision.keep, linears)
        patterns = tuple(key for key in precision.map if key not in PARTS)
        self._patterns = self._matched("precision.map", patterns, list(parts))
        self._blocks = self._high_blocks(model)
        for key, compute in precision.map.items():
            self._check(key, compute)
        for pattern in precision.keep:
            self._check_kept(pattern, linears)

    def of(self, name: str) -> Choice | None:
        """The requested precision of this module, or None."""
        chosen, asked = self.precision.map, self.precision.compute
        high: Compute = "bf16" if asked == "fp8" else asked
        key = self._key_of(name)
        if key:
            shown = repr(key) if key in self._patterns.values() else key
            return Choice(chosen[key], f"precision.map: {shown}", asked=True)
        reason = self._why_not_fp8(name)
        return Choice(high, reason, asked=False) if reason else None

    def _key_of(self, name: str) -> str:
        """The key of `precision.map` that decides over this module, if one does."""
        if name in self._patterns:
            return self._patterns[name]
        part = self.parts[name]
        wanted = self.precision.map.get(part)
        if wanted is None or (wanted == "fp8" and self._why_not_fp8(name)):
            return ""
        return part

    def _why_not_fp8(self, name: str) -> str:
        """Which of `keep`, `first_n` and `last_n` reaches this module."""
        if self.parts[name] in NO_MATMUL:
            return ""
        if name in self._kept:
            return f"kept by pattern {self._kept[name]!r}"
        return next((r for prefix, r in self._blocks.items() if name.startswith(prefix)), "")

    def _matched(self, where: str, patterns: tuple[str, ...], names: list[str]) -> dict[str, str]:
        found: dict[str, str] = {}
        for pattern in patterns:
            matched = self._names_of(pattern, names)
            if not matched:
                pieces = {piece for name in names for piece in name.split(".")}
                words = sorted(piece for piece in pieces if not piece.isdigit())
                is_map = where == "precision.map"
                hint = nearest(pattern, [*words, *names, *(PARTS if is_map else ())])
                raise PlanError(
                    f"{where} pattern {pattern!r} matches no "
                    + ("module" if is_map else "linear layer")
                    + (f"; {hint}" if hint else ""),
                    where=where,
                    why="a layer meant to stay in high precision would silently run in FP8",
                    fix=(f"parts are {', '.join(PARTS)}; " if is_map else "")
                    + f"layer names are made of: {', '.join(words)}",
                )
            found.update(dict.fromkeys(matched, pattern))
        return found

    def _check(self, key: str, compute: Compute) -> None:
        where = f"precision.map.{key}={compute}"
        named = set(self._names_of(key, list(self.parts)) if key not in PARTS else ())
        names = [name for name, part in self.parts.items() if key == part or name in named]
        if not names:
            present = sorted({part for part in self.parts.values() if part})
            raise PlanError(
                f"this model has no part {key!r}",
                where=where,
                why="a choice that reaches nothing would be ignored silently",
                fix=f"parts of this model: {', '.join(present)}; or a pattern of module names",
            )
        if not any(self._key_of(name) == key for name in names):
            raise PlanError(
                f"precision.map.{key} decides over nothing",
                where=where,
                why=f"more specific choices decide over {names[0]!r} and whatever else it names",
                fix=f"take {key} out of precision.map, or those out of precision.keep, first_n, "
                "last_n and the patterns of precision.map",
            )
        if compute != "fp8":
            return
        if self.precision.compute != "fp8":
            raise PlanError(
                f"FP8 was chosen for {key!r} in a run whose precision.compute is "
                f"{self.precision.compute}",
                where=where,
                why="there is no FP8 engine in such a run",
                fix="set precision.compute=fp8, and map the other parts to bf16",
            )
        lookup = [name for name in names if self.parts[name] in NO_MATMUL]
        if lookup:
            raise PlanError(
                f"FP8 was chosen for {lookup[0]!r}, which multiplies no matrices",
                where=where,
                why="FP8 compute is about matmuls: an embedding is a lookup and a norm is "
                "elementwise; FP8 would only lose digits there",
                fix="choose bf16, fp16 or fp32",
            )

    def _check_kept(self, pattern: str, linears: list[str]) -> None:
        names = self._names_of(pattern, linears)
        if all(self.precision.map.get(self._patterns.get(name, "")) == "fp8" for name in names):
            raise PlanError(
                f"precision.keep pattern {pattern!r} decides over nothing",
                where="precision.keep",
                why=f"precision.map chooses fp8 for {names[0]!r} and whatever else it names",
                fix="take one of the two out",
            )

    @staticmethod
    def _names_of(pattern: str, names: list[str]) -> list[str]:
        return [name for name in names if matches(pattern, name)]

    def _high_blocks(self, model: nn.Module) -> dict[str, str]:
        first, last = self.precision.first_n, self.precision.last_n
        if not first and not last:
            return {}
        name, count = _decoder_blocks(model, [n for n, p in self.parts.items() if p])
        if first + last >= count:
            raise PlanError(
                f"first_n={first} and last_n={last} keep all {count} decoder blocks high",
                where="precision.first_n, precision.last_n",
                why="no block would be left to run in FP8",
                fix=f"choose fewer than {count} together, or precision.compute=bf16",
            )
        reasons = {f"{name}.{i}.": f"in a block kept by first_n={first}" for i in range(first)}
        for i in range(count - last, count):
            reasons[f"{name}.{i}."] = f"in a block kept by last_n={last}"
        return reasons


def _decoder_blocks(model: nn.Module, names: list[str]) -> tuple[str, int]:
    """Name and length of the list of decoder blocks: the longest list that holds weights."""
    lists = [
        (len(module), name)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and any(n.startswith(f"{name}.0.") for n in names)
    ]
    if not lists:
        raise PlanError(
            "first_n and last_n were asked of a model without a list of decoder blocks",
            where="precision.first_n, precision.last_n",
            why="its blocks share one set of weights, or are not held in an nn.ModuleList",
            fix="name modules in precision.keep or precision.map instead",
        )
    # Experts are lists inside a block: the outermost list comes first, whatever its length.
    depth = min(name.count(".") for _, name in lists)
    count, name = max((c, n) for c, n in lists if n.count(".") == depth)
    return name, count


class OverrideMixin(Swapped):
    """In front of a module's own class: computes in `fp8_dtype`, with autocast off."""

    fp8_dtype: torch.dtype

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        dtype = self.fp8_dtype
        # The input is the first argument, whatever the module calls it.
        name, x = ("", args[0]) if args else next(iter(kwargs.items()))
        kind = x.device.type
        around = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else dtype
        with torch.autocast(kind, enabled=False):
            if isinstance(self, nn.Linear) or is_conv1d(type(self)):  # pyright: ignore
                weight: Any = self.weight
                weight = weight if isinstance(self, nn.Linear) else weight.t()
                bias: Any = None if self.bias is None else self.bias.to(dtype)
                y = nn.functional.linear(x.to(dtype), weight.to(dtype), bias)  # [M, K] @ [K, N]
            else:
                x = x.to(dtype) if x.is_floating_point() else x  # token ids stay
                args, kwargs = ((x, *args[1:]), kwargs) if args else ((), {**kwargs, name: x})
                y = self.plain_class.forward(self, *args, **kwargs)
                y = y.to(dtype)
        return y.to(around) if dtype not in (torch.float32, around) else y
