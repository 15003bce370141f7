"""The memory that a launch may touch: tensors at their own addresses, and a CTA's shared memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

__all__ = ["Memory", "Segment", "Shared"]

POISON = 0xFF
"""Every byte of shared memory before it is written: NaN in all floating-point formats, -1 in integers."""


class Segment:
    """Bytes that may be touched, from ``start`` up to ``end``, in an array whose first byte is at ``base``."""

    def __init__(self, data: np.ndarray, base: int, start: int, end: int) -> None:
        self.data, self.base, self.start, self.end = data, base, start, end
        self._views: dict[int, np.ndarray] = {1: data}

    def view(self, size: int) -> np.ndarray:
        """The bytes as unsigned integers of ``size`` bytes; number i is at ``base`` + i * size."""
        found = self._views.get(size)
        if found is None:
            assert self.base % size == 0, f"a tensor whose memory is not aligned to {size}"
            whole = self.data[: len(self.data) // size * size]
            found = self._views[size] = whole.view(np.dtype(f"u{size}"))
        return found

    def has(self, addresses: np.ndarray, size: int) -> bool:
        """Whether ``size`` bytes from each address are inside."""
        return bool(addresses.min() >= self.start and addresses.max() + size <= self.end)


class Memory:
    """The tensors of a launch at their own addresses; nothing beside them may be touched.

    ``early``: those that may be read before the kernel in front has ended, as it does not write them; None for all.
    """

    def __init__(self, *tensors: torch.Tensor, early: Sequence[torch.Tensor] | None = None) -> None:
        self.spans: list[Segment] = []
        self.early = None if early is None else [_reach(x) for x in early if x.numel()]
        for tensor in tensors:
            if not tensor.numel():
                continue
            raw = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy()
            start, end = _reach(tensor)
            base = start - tensor.storage_offset() * tensor.element_size()
            self.spans.append(Segment(raw, base, start, end))

    def is_early(self, addresses: np.ndarray, size: int) -> np.ndarray:
        """Whether ``size`` bytes from each address may be read before the kernel in front has ended."""
        found = np.full(len(addresses), self.early is None)
        for start, end in self.early or ():
            found |= (addresses >= start) & (addresses + size <= end)
        return found

    def find(self, addresses: np.ndarray, size: int) -> list[tuple[np.ndarray | None, Segment]]:
        """The tensors that hold ``size`` aligned bytes from each address, with the positions of the addresses in each.

        None for all of them, which is the common case.
        """
        spans = self.spans
        for i, span in enumerate(spans):
            if span.has(addresses, size):
                if i:
                    spans[0], spans[i] = span, spans[0]
                return [(None, span)]
        found: list[tuple[np.ndarray | None, Segment]] = []
        missing = np.ones(len(addresses), bool)
        for span in spans:
            inside = missing & (addresses >= span.start) & (addresses + size <= span.end)
            if inside.any():
                found.append((np.flatnonzero(inside), span))
                missing &= ~inside
        if missing.any():
            address = int(addresses[missing][0])
            raise AssertionError(
                f"memory that was not given: {size} bytes at {address:#x}{self._near(address)}"
            )
        return found

    def _near(self, address: int) -> str:
        """What the closest tensor is."""
        if not self.spans:
            return ""

        def distance(span: Segment) -> int:
            return max(span.start - address, address - span.end)

        closest = min(self.spans, key=distance)
        return f", {address - closest.start} from the start of a tensor of {closest.end - closest.start} bytes"

    def block(self, address: int, size: int) -> np.ndarray:
        """``size`` bytes of one tensor, to be read or written in place."""
        for span in self.spans:
            if span.start <= address and address + size <= span.end:
                return span.data[address - span.base : address - span.base + size]
        raise AssertionError(
            f"memory that was not given: {size} bytes at {address:#x}{self._near(address)}"
        )


def _reach(tensor: torch.Tensor) -> tuple[int, int]:
    """First address, and the one behind the last."""
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.element_size()


class Shared(Segment):
    """Shared memory of a CTA, poisoned."""

    def __init__(self, size: int) -> None:
        super().__init__(np.full(size, POISON, np.uint8), 0, 0, size)
