"""Memory on the device that shows what a kernel wrote and read: outputs in guards, operands in NaN.

As ``epicute.testing.poison``, but filled and checked on the device, so that outputs of gigabytes cost milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

import torch

from epicute.testing.poison import GUARD_BYTE, UNWRITTEN

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""The CPU where these helpers are tested themselves."""

GUARD = 1024
"""Bytes before and after an output."""

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
POISON = {
    size: int.from_bytes(bytes(some), "little", signed=True) for size, some in UNWRITTEN.items()
}
HOLE = 2**30 + 7
"""What lies beside integer operands."""


def bits(x: torch.Tensor) -> torch.Tensor:
    """The same memory as integers."""
    return x.view(INTEGERS[x.element_size()])


def dense(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides."""
    return tuple(prod(shape[i + 1 :]) for i in range(len(shape)))


class Output:
    """A poisoned tensor inside a guard; ``start`` gives it values instead of poison."""

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        strides: Sequence[int] | None = None,
        start: torch.Tensor | None = None,
        device: str | torch.device = DEVICE,
        name: str = "out",
    ) -> None:
        size = dtype.itemsize
        self.name, self.shape = name, tuple(shape)
        self.strides = dense(shape) if strides is None else tuple(strides)
        last = sum((n - 1) * s for n, s in zip(shape, self.strides, strict=True))
        self._bytes = (last + 1) * size if prod(shape) else 0
        length = 2 * GUARD + -(-self._bytes // 16) * 16
        self.buffer = torch.full((length,), GUARD_BYTE, dtype=torch.uint8, device=device)
        self._place = (self.shape, self.strides, GUARD // size)
        self._integer = INTEGERS[size]
        self.buffer.view(self._integer).as_strided(*self._place).fill_(POISON[size])
        self.tensor = self.buffer.view(dtype).as_strided(*self._place)
        if start is not None:
            self.tensor.copy_(start)

    def _outside(self) -> torch.Tensor:
        if self.strides == dense(self.shape):
            return torch.cat([self.buffer[:GUARD], self.buffer[GUARD + self._bytes :]])
        inside = torch.zeros_like(self.buffer)
        inside.view(self._integer).as_strided(*self._place).fill_(-1)
        return self.buffer[inside == 0]

    def assert_intact(self) -> None:
        """No byte outside the tensor changed."""
        changed = int((self._outside() != GUARD_BYTE).sum())
        assert not changed, f"{self.name} {self.shape}: {changed} bytes beside it were written"

    def unwritten(self) -> torch.Tensor:
        """Elements that still are poison."""
        return bits(self.tensor) == POISON[self.tensor.element_size()]


def embed(values: torch.Tensor, gap: int = 16, device: str = DEVICE) -> torch.Tensor:
    """A view with these values of a larger tensor whose other elements are NaN.

    Vectors are followed by NaN; matrices by ``gap`` NaN after each row, and by rows of NaN.
    """
    shape = [n + extra for n, extra in zip(values.shape, (3, gap), strict=False)]
    if values.dim() == 1:
        shape = [len(values) + 64]
    hole = torch.nan if values.is_floating_point() else HOLE
    filler = torch.float32 if values.is_floating_point() else values.dtype
    buffer = torch.full(shape, hole, dtype=filler, device=device).to(values.dtype)
    view = buffer[tuple(slice(n) for n in values.shape)]
    view.copy_(values)
    return view


def embed_rows(values: torch.Tensor, device: str = DEVICE) -> torch.Tensor:
    """``embed`` for x: rows start at multiples of 16 bytes."""
    per_vector = 16 // values.element_size()
    return embed(values, -values.shape[1] % per_vector + 2 * per_vector, device)


def whole(x: torch.Tensor) -> torch.Tensor:
    """All memory behind a view, as bytes."""
    storage = x.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=x.device).set_(storage)


def synchronize() -> None:
    """Wait for the device."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


@contextmanager
def unchanged(**inputs: Any) -> Iterator[None]:
    """No byte of the inputs' memory, what lies around them included, may change while the block runs."""
    before = {name: whole(x).clone() for name, x in inputs.items()}
    yield
    synchronize()
    changed = [name for name, x in inputs.items() if not torch.equal(whole(x), before[name])]
    assert not changed, f"inputs written: {', '.join(changed)}"


def integers(*shape: int, dtype: torch.dtype, seed: int, most: int = 1) -> torch.Tensor:
    """Whole numbers of up to ± ``most`` on the device: sums of a few thousand products are exact in any format."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    found = torch.randint(-most, most + 1, shape, generator=generator, device=DEVICE)
    return found.to(torch.float32).to(dtype)


def normal(*shape: int, dtype: torch.dtype, seed: int, scale: float = 1.0) -> torch.Tensor:
    """N(0, scale²) on the device."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return (torch.randn(shape, generator=generator, device=DEVICE) * scale).to(dtype)
