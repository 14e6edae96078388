"""Bytes of weights held in 4 or 8 bits, by the form they were published in."""

from __future__ import annotations

GPTQ = ("gptq4", "gptq4-column", "int8")
_GPTQ_GROUP = 128
_NF4_BLOCK, _NF4_BLOCK2 = 64, 256


def packed_bytes(form: str, rows: int, columns: int) -> tuple[int, int]:
    """Bytes of the codes, and of scales and indices, of a weight [rows, columns].

    NF4 with double quantization (bitsandbytes): two weights to a byte, one byte for the maximum of
    64, and a float32 for 256 of these. GPTQ (auto_gptq): 4 or 8 bits a weight; for each group of
    128 inputs (`-column`: for all of them) a scale of 2 bytes and a zero of the width of a code
    per output, and an int32 per input that says its group.
    """
    count = rows * columns
    if form in ("nf4", "nf4-dq"):
        blocks = count // _NF4_BLOCK
        return count // 2, 4 * blocks if form == "nf4" else blocks + 4 * -(-blocks // _NF4_BLOCK2)
    bits = 8 if form == "int8" else 4
    groups = 1 if form == "gptq4-column" else -(-columns // _GPTQ_GROUP)
    return count * bits // 8, groups * rows * (16 + bits) // 8 + columns * 4
