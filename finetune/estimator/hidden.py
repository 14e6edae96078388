"""What fused kernels allocate in passing."""

from __future__ import annotations

from typing import Any


def attention_backward_extra(
    kernel: str, b: int, h: int, hkv: int, lq: int, lk: int, d: int, dtype: Any
) -> list[int]:
    """Bytes of each passing buffer of an attention backward."""

    def up(x: int, to: int) -> int:
        return -(-x // to) * to

    rows = up(lq, 128)
    sizes = [b * h * rows * up(d, 32) * 4, b * h * rows * 4] if kernel == "flash" else []
    return sizes + [b * lk * h * d * dtype.itemsize] * (2 if hkv != h else 0)
