"""How many bytes of tensors are alive, and how many were at most: counted, on any device.

A dispatch mode sees every operator's results. Their storages are counted once each, however many
tensors share one, and given back by a weak reference when the storage dies, which is when the
allocator gets it back. So `with LiveTensors(parameters) as live:` around a training step knows the
bytes that weights, saved activations, gradients, optimizer states and temporaries hold at any
moment. Sorting them is a matter of asking at the right moment: before forward, at its end, at the
peak.

What it cannot see: buffers inside one kernel, what an allocator rounds up or keeps cached, and
tensors made before that it was not told of. What an operator written in Python makes in passing
counts as inside of it. Wrapper subclasses (torchao's) count as what they wrap. `thorough` sees the
last two: an operand that was not known must have been there before, so it is counted from the
beginning; and a wrapper's operator is left to the wrapper, whose own operators come by one at a
time.

torch has `torch.distributed._tools.mem_tracker`, which sorts by hooks on modules and is private;
`tests/test_live_tensors.py` holds the peak of a step to be the same in both.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves


class LiveTensors(TorchDispatchMode):
    """Counts storages while it is entered.

    Attributes:
        bytes: held now.
        peak: the most that was held since the beginning or since `reset_peak`.
    """

    def __init__(self, known: Iterable[Tensor] = (), *, thorough: bool = False) -> None:
        """Begin with what is there.

        Args:
            known: tensors made before, counted from the beginning.
            thorough: count also operands that are not known, and look inside of wrappers.
        """
        super().__init__()
        self.bytes = self.peak = 0
        self.thorough = thorough
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        for tensor in known:
            self.count(tensor)

    def reset_peak(self) -> None:
        """From now on."""
        self.peak = self.bytes

    def count(self, tensor: Tensor) -> int:
        """Count a tensor's storage, unless it is counted already or it has none (meta, sparse).

        Returns:
            The bytes that are new.
        """
        if is_traceable_wrapper_subclass(tensor):
            return sum(self.count(getattr(tensor, n)) for n in tensor.__tensor_flatten__()[0])
        if tensor.is_meta or tensor.layout is not torch.strided:
            return 0
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._alive:
            return 0

        def died(_: Any) -> None:
            del self._alive[key]
            self.bytes -= size

        self._alive[key] = weakref.ref(storage, died)
        self.bytes += size
        self.peak = max(self.peak, self.bytes)
        return size

    def _count_from_the_beginning(self, tensor: Tensor) -> None:
        before = self.peak
        size = self.count(tensor)
        self.peak = max(self.peak, before + size)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.thorough:
            given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
            for tensor in given:
                self._count_from_the_beginning(tensor)
            if any(is_traceable_wrapper_subclass(tensor) for tensor in given):
                return NotImplemented
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.count(leaf)
        return result
