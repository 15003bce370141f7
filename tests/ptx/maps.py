"""Tensor maps: what TMA reads and writes, and where in shared memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

__all__ = ["TensorMap", "swizzled"]

SWIZZLES = {0: 0, 32: 0x10, 64: 0x30, 128: 0x70}
"""Bits of an address that take the bits three places above them, by the bytes of a row."""


def swizzled(addresses: np.ndarray, swizzle: int) -> np.ndarray:
    """Addresses of shared memory under a swizzle of 0, 32, 64 or 128 bytes."""
    return addresses ^ (addresses >> 3 & SWIZZLES[swizzle])


@dataclass(frozen=True)
class TensorMap:
    """A tensor as TMA sees it.

    Attributes:
        address: of the first element. size: bytes of an element. shape: elements along each dimension, the one of
            adjacent elements first. strides: bytes, for each dimension but the first. box: elements of a copy.
        swizzle: bytes, 0 for none.
    """

    address: int
    size: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int = 0

    @staticmethod
    def of(x: torch.Tensor, box: tuple[int, ...], swizzle: int = 0) -> TensorMap:
        """The map of a tensor whose last dimension is adjacent, with ``box`` in the tensor's order of dimensions."""
        size = x.element_size()
        assert x.stride(-1) == 1, "the last dimension is not adjacent"
        strides = tuple(s * size for s in reversed(x.stride()[:-1]))
        return TensorMap(
            x.data_ptr(), size, tuple(reversed(x.shape)), strides, tuple(reversed(box)), swizzle
        )

    def __post_init__(self) -> None:
        rank, inner = len(self.shape), self.box[0] * self.size
        assert 1 <= rank <= 5, "a tensor map has one to five dimensions"
        assert (len(self.box), len(self.strides)) == (rank, rank - 1), (
            "one number for each dimension"
        )
        assert self.address % 16 == 0, "a tensor map's address is a multiple of 16"
        for step, extent in zip(self.strides, self.shape[1:], strict=True):
            assert extent == 1 or (step % 16 == 0 and step > 0), (
                "a tensor map's strides are multiples of 16 bytes"
            )
        assert all(1 <= n <= 256 for n in self.box), "a box has up to 256 elements a side"
        assert inner % 16 == 0, "a box's rows are multiples of 16 bytes"
        assert not self.swizzle or inner == self.swizzle, "a box's rows are as long as the swizzle"

    @property
    def bytes(self) -> int:
        """Of a box."""
        return int(np.prod(self.box)) * self.size

    def elements(self, start: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        """(addresses, whether inside) of a box's elements, the first dimension innermost."""
        rank = len(self.shape)
        assert len(start) == rank, f"{len(start)} coordinates of a tensor map of {rank}"
        address, inside = np.int64(self.address), np.bool_(True)
        for d, (first, count, extent) in enumerate(zip(start, self.box, self.shape, strict=True)):
            shape = [1] * rank
            shape[rank - 1 - d] = count
            place = (first + np.arange(count, dtype=np.int64)).reshape(shape)
            inside = inside & (place >= 0) & (place < extent)
            address = address + place * (self.size if d == 0 else self.strides[d - 1])
        box = tuple(reversed(self.box))
        return np.broadcast_to(address, box).ravel(), np.broadcast_to(inside, box).ravel()

    def places(self, address: int) -> np.ndarray:
        """Where the elements of a box lie in shared memory, from ``address`` on."""
        assert address % 128 == 0, f"a box at {address:#x}, which is no multiple of 128"
        plain = address + np.arange(int(np.prod(self.box)), dtype=np.int64) * self.size
        return swizzled(plain, self.swizzle)
