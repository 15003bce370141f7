"""Tensor maps as Hopper reads them: 128 bytes that host code encodes by itself.

The layout is not documented. What stands here is what the DSL writes for known tensors: see ``test_objects.py``.
"""

from __future__ import annotations

import struct

from tests.ptx.maps import TensorMap

__all__ = ["decoded"]

SIZES = {0: 1, 1: 2, 2: 4, 4: 8, 6: 2, 7: 4, 10: 2}
"""Bytes of an element by its kind: uint8, uint16, uint32, uint64, float16, float32, bfloat16."""

SWIZZLES = (0, 32, 64, 128)
KNOWN = 0x2 | 0x70 | 0x780 | 0x6000 | 0x40000 | 0x200000
"""Bits of the second word that are understood: version, rank, kind, swizzle, promotion to L2, large tensors."""


def decoded(raw: bytes) -> TensorMap:
    """The tensor map that host code has encoded in 128 bytes."""
    assert len(raw) == 128, f"{len(raw)} bytes"
    words = struct.unpack("<8Q", raw[:64])
    flags = words[1] & 0xFFFFFFFF
    assert flags & 0x2, "no tensor map"
    assert not flags & ~KNOWN, f"tensor map: flags {flags:#x} are not known"
    kind, rank = flags >> 7 & 15, (flags >> 4 & 7) + 1
    assert kind in SIZES, f"tensor map: elements of kind {kind} are not known"
    steps = (words[1] >> 32, words[2] & 0xFFFFFFFF, words[2] >> 32, words[3] & 0xFFFFFFFF)
    strides = [(low | (words[3] >> 32 + 4 * i & 15) << 32) << 4 for i, low in enumerate(steps)]
    extents = [w >> shift & 0xFFFFFFFF for w in words[4:7] for shift in (0, 32)][:5]
    box = [words[6] >> 56, *(words[7] >> 8 * i & 0xFF for i in range(4))]
    return TensorMap(
        words[0],
        SIZES[kind],
        tuple(n + 1 for n in extents[:rank]),
        tuple(strides[: rank - 1]),
        tuple(n + 1 for n in box[:rank]),
        SWIZZLES[flags >> 13 & 3],
    )
