"""Precision that the user chose by module: `keep`, `map`, `first_n` and `last_n`.

A key of `precision.map` is a part of the model (`embed`, `attn`, `mlp`, `norm`, `output`, `router`)
or a pattern over module names. The more specific choice wins:

    map pattern  >  keep  >  first_n / last_n  >  map part  >  the policy of the planner

`keep`, `first_n` and `last_n` say "not FP8" and no more: a part that is mapped to another type has
that type there too. With `map: {mlp: fp16, "layers.0.*": fp32}` and `keep: [q_proj]`, layer 0
computes in float32, the other MLPs in float16, the other `q_proj` in BF16 and the rest of attention
in FP8.

Every choice must decide over something. One that matches nothing, whose every module another
choice decides over, or that requests the impossible (an embedding is a lookup and no matmul, so it
has no FP8), is an error that names what to use: a part meant for high precision would
silently run in FP8, or the other way round.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from finetune.errors import PlanError
from finetune.precision.model.layers import matched, matches
from finetune.precision.settings import Compute, PrecisionConfig

Part = Literal["embed", "attn", "mlp", "norm", "output", "router", ""]
PARTS: tuple[Part, ...] = ("embed", "attn", "mlp", "norm", "output", "router")
NO_MATMUL: tuple[Part, ...] = ("embed", "norm")


class Choice(NamedTuple):
    """The user's precision for one module.

    Attributes:
        compute: requested precision.
        reason: setting that requested it.
    """

    compute: Compute
    reason: str


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
        self, precision: PrecisionConfig, parts: dict[str, Part], blocks: tuple[str, int] = ("", 0)
    ) -> None:
        """Check every choice against the model.

        Args:
            precision: requested precision.
            parts: name -> part of everything that can be chosen: linear layers, parameters that
                multiply, embeddings and norms.
            blocks: name and length of the list of decoder blocks that `first_n` and `last_n` count.

        Raises:
            PlanError: a choice reaches nothing, or cannot be honored.
        """
        self.precision, self.parts = precision, parts
        linears = [name for name, part in parts.items() if part not in NO_MATMUL]
        self._kept = matched(precision.keep, linears, where="precision.keep")
        patterns = [key for key in precision.map if key not in PARTS]
        self._patterns = matched(patterns, parts, where="precision.map", what="module", known=PARTS)
        self._blocks = self._high_blocks(*blocks)
        for key, compute in precision.map.items():
            self._check(key, compute)
        for pattern in precision.keep:
            self._check_kept([name for name in linears if matches(pattern, name)], pattern)

    def of(self, name: str) -> Choice | None:
        """The requested precision of this module, or None."""
        key = self._key_of(name)
        if key:
            shown = repr(key) if key in self._patterns.values() else key
            return Choice(self.precision.map[key], f"precision.map: {shown}")
        reason, compute = self._why_not_fp8(name), self.precision.compute
        high: Compute = "bf16" if compute == "fp8" else compute
        return Choice(high, reason) if reason else None

    def _key_of(self, name: str) -> str:
        """The key of `precision.map` that decides over this module, if one does."""
        if name in self._patterns:
            return self._patterns[name]
        part = self.parts[name]
        wanted = self.precision.map.get(part)
        # FP8 for a part yields to keep, first_n and last_n; another type goes before them.
        return "" if wanted is None or (wanted == "fp8" and self._why_not_fp8(name)) else part

    def _why_not_fp8(self, name: str) -> str:
        """The one of `keep`, `first_n` and `last_n` that reaches this module."""
        if self.parts[name] in NO_MATMUL:
            return ""
        if name in self._kept:
            return f"kept by pattern {self._kept[name]!r}"
        return next((r for prefix, r in self._blocks.items() if name.startswith(prefix)), "")

    def _check(self, key: str, compute: Compute) -> None:
        """Raise `PlanError` unless a key of `precision.map` decides over something that can be."""

        def refusal(what: str, why: str, fix: str) -> PlanError:
            where, fix = f"precision.map.{key}={compute}", f"{without(key)}, or {fix}"
            return PlanError(what, where=where, why=why, fix=fix)

        by_part = key in PARTS
        names = [
            n for n, part in self.parts.items() if (part == key if by_part else matches(key, n))
        ]
        if not names:
            raise refusal(
                f"this model has no part {key!r}",
                "a choice that reaches nothing would be ignored silently",
                f"a part of this model: {', '.join(sorted({p for p in self.parts.values() if p}))}",
            )
        if not any(self._key_of(name) == key for name in names):
            raise refusal(
                f"precision.map.{key} decides over nothing",
                f"more specific choices decide over {names[0]!r} and whatever else it names",
                "those out of precision.keep, first_n, last_n and the patterns of precision.map",
            )
        if compute != "fp8":
            return
        if self.precision.compute != "fp8":
            raise refusal(
                f"FP8 was chosen for {key!r} in a run whose precision.compute is "
                f"{self.precision.compute}",
                "there is no FP8 engine in such a run",
                "precision.compute=fp8",
            )
        lookup = next((name for name in names if self.parts[name] in NO_MATMUL), None)
        if lookup:
            raise refusal(
                f"FP8 was chosen for {lookup!r}, which multiplies no matrices",
                "an embedding is a lookup and a norm is elementwise: FP8 would only lose digits",
                "choose bf16, fp16 or fp32",
            )

    def _check_kept(self, names: list[str], pattern: str) -> None:
        # A pattern of `map` goes before `keep`; where all are mapped to FP8, `keep` keeps nothing.
        if all(self.precision.map.get(self._patterns.get(name, "")) == "fp8" for name in names):
            raise PlanError(
                f"precision.keep pattern {pattern!r} decides over nothing",
                where="precision.keep",
                why=f"precision.map chooses fp8 for {names[0]!r} and whatever else it names",
                fix=f"{without(self._patterns[names[0]])}, or take {pattern!r} out of "
                "precision.keep",
            )

    def _high_blocks(self, name: str, count: int) -> dict[str, str]:
        """Prefix of the names in each block that `first_n` or `last_n` keeps -> the reason."""
        first, last = self.precision.first_n, self.precision.last_n
        if not first and not last:
            return {}
        if first + last >= count:
            raise PlanError(
                f"first_n={first} and last_n={last} keep all {count} decoder blocks high",
                where="precision.first_n, precision.last_n",
                why="no block would be left to run in FP8",
                fix=f"fewer than {count} together, as precision.first_n={(count - 1) // 2} "
                f"precision.last_n={(count - 1) // 2}; or precision.compute=bf16 "
                "~precision.first_n ~precision.last_n",
            )
        # With the dot at its end `layers.1.` is no prefix of `layers.10.mlp`.
        reasons = {f"{name}.{i}.": f"in a block kept by first_n={first}" for i in range(first)}
        for i in range(count - last, count):
            reasons[f"{name}.{i}."] = f"in a block kept by last_n={last}"
        return reasons


def without(key: str) -> str:
    """The override that takes a key out of `precision.map`."""
    if "." in key:  # a dot separates keys of an override
        return f"take {key!r} out of precision.map"
    return f"~precision.map.{key}"
