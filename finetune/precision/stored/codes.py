"""Codes of a weight in the hands of others: a parameter of FP8 bit patterns that is no number.

`finetune.precision.numbers.weights` multiplies by it. What reads it as numbers, writes other ones
there, or wants it to train, gets an error that says what to do instead.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from finetune.errors import StorageNotComputeError


class RawCodes(Tensor):
    """What others get as `weight.data`: codes that may be looked at, moved and copied.

    PEFT's methods read weights there and write merged ones back in place (`copy_`, `+=` of a delta
    cast to the type of the weight). Either would be garbage without an error: a code is no number
    without its scale.
    """

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func.__name__
        # `__iadd__` and its like, and methods with one underscore at the end, as `copy_`.
        writes = name.startswith("__i") or (name.endswith("_") and name[-2] != "_")
        if (writes or name == "__setitem__") and isinstance(args[0], cls):
            raise refuse_merge()
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        if not isinstance(result, Tensor):
            return result
        if result.is_floating_point() and not (name == "view" or name.endswith("_like")):
            raise refuse_reading(name)
        same = name in ("clone", "detach", "t", "transpose", "__get__")  # `.T` is the last
        return result.as_subclass(cls) if same and result.dtype is torch.uint8 else result


class Fp8Bits(nn.Parameter):
    """A frozen parameter of bits that raises when other values are assigned.

    PEFT's safe merge assigns weight plus adapter to `weight.data`, which would be garbage here;
    others write there in place (`RawCodes`), or read codes as numbers past the layer
    (`x @ weight.to(x.dtype).T`). Device moves and reloads assign the same bits.
    """

    def __new__(cls, data: Tensor, requires_grad: bool = False) -> Fp8Bits:
        return super().__new__(cls, data.as_subclass(Tensor), requires_grad=requires_grad)

    def requires_grad_(self, requires_grad: bool = True) -> Fp8Bits:
        if requires_grad:
            raise refuse_training()
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "requires_grad" and value:
            raise refuse_training()
        super().__setattr__(name, value)

    def detach(self) -> Tensor:
        # By its caller: an average begins with a copy, which is no harm by itself, and no other
        # step of it asks the parameter. One that was made before the base was stored
        # would take codes for weights.
        if sys._getframe(1).f_globals.get("__name__") == "torch.optim.swa_utils":
            raise StorageNotComputeError(
                "AveragedModel would average the codes of weights stored in FP8 as numbers",
                where="torch.optim.swa_utils.AveragedModel.update_parameters",
                why="products of codes are rounded down: some weights would be other ones",
                fix="average the parameters that train alone, or frozen='bf16'",
            )
        return super().detach()

    moving = False
    """Allow assignment of `data` while the module is moved, which keeps the bits."""

    @property
    def data(self) -> Tensor:
        bits: Tensor = Tensor.data.__get__(self)  # pyright: ignore[reportAttributeAccessIssue]
        # Not inside a dispatch mode: AOTAutograd's (torch 2.13) goes by the type of a
        # parameter's data, and no script merges there.
        plain = self.moving or is_in_torch_dispatch_mode()
        return bits if plain else bits.as_subclass(RawCodes)

    @data.setter
    def data(self, new: Tensor) -> None:
        # Not by value: a small adapter rounds to nothing in the type of the codes.
        elsewhere = self.moving or new.device != self.device
        same = elsewhere or new.data_ptr() == self.data_ptr()
        if new.dtype is not self.dtype or not same:
            raise refuse_merge()
        new = new.as_subclass(Tensor)
        Tensor.data.__set__(self, new)  # pyright: ignore[reportAttributeAccessIssue]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Fp8Bits, (self.as_subclass(Tensor),)


def _unread(name: str) -> Callable[..., Any]:
    plain = getattr(Tensor, name)

    def read(codes: Tensor, *args: Any, **kwargs: Any) -> Any:
        result = plain(codes, *args, **kwargs)
        if isinstance(result, Tensor) and result.is_floating_point():
            raise refuse_reading(name)
        return result

    return read


for _name in (
    "to",
    "type",
    "type_as",
    "float",
    "double",
    "half",
    "bfloat16",
    "__mul__",
    "__rmul__",
):
    setattr(Fp8Bits, _name, _unread(_name))


@contextlib.contextmanager
def moving(parameters: Iterable[Any]) -> Iterator[None]:
    """Let parameters of codes be moved; where FSDP2 has put its own parameter, it says nothing."""
    marked = list(parameters)
    for bits in marked:
        bits.__dict__["moving"] = True
    try:
        yield
    finally:
        for bits in marked:
            bits.__dict__.pop("moving", None)


def refuse_training() -> StorageNotComputeError:
    """The error of training weights that are stored in FP8."""
    return StorageNotComputeError(
        "weights stored in FP8 cannot be trained",
        where="a model of load_in_fp8, or a base with precision.frozen=fp8",
        why="codes are integers and have no gradient (only floating point has), and an update is "
        "far smaller than one step of E4M3",
        fix="to train all weights with FP8 compute, load the model plain and call "
        "setup_fp8_mixed_precision_training(); to train adapters, attach them with peft",
    )


def refuse_merge(where: str = "") -> StorageNotComputeError:
    """The error of merging an adapter into FP8 weights."""
    return StorageNotComputeError(
        "an adapter cannot be merged into weights stored in FP8",
        where=where,
        why="one step of E4M3 is up to an eighth of a weight, far more than what LoRA changes it "
        "by: rounding would undo the training",
        fix="merge into the original weights: `python -m finetune export RUN --to merged OUT`, or "
        "load the base model plain and the adapter over it with peft, then merge_and_unload()",
    )


def refuse_reading(operation: str) -> StorageNotComputeError:
    """The error of computing with codes as if they were weights."""
    return StorageNotComputeError(
        "something computes with the codes of a weight stored in FP8 as if they were numbers",
        where=f"its weight, in {operation}()",
        why="a code is no number without its scale: what starts from the weight itself (a merge, "
        "an SVD or norm of it, a product with it) would start from garbage",
        fix="attach such adapters to the model loaded plain, which frozen='fp8' stores afterwards, "
        "and merge into a model loaded plain; or LoRA, which adds to what the layer gives",
    )
