"""Outputs that show what a kernel wrote, did not write, and should not have written.

An output is a view into a larger buffer. Its elements start as a NaN that no arithmetic gives (an
odd number in integer outputs); everything around it, and between the rows of a strided view, is
0xA5.

    buffer   A5 A5 A5 | B5 FF B5 FF | A5 A5 | B5 FF B5 FF | A5 A5 A5
             guard      row 0         gap     row 1         guard
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from epicute.errors import require

__all__ = [
    "Guarded",
    "assert_fully_written",
    "assert_guards_intact",
    "assert_untouched",
    "guarded",
    "inputs_unchanged",
    "raw_bytes",
]

GUARD_BYTE = 0xA5
UNWRITTEN = {
    1: (0xFF,),
    2: (0xB5, 0xFF),
    4: (0xD7, 0xA3, 0xB5, 0xFF),
    8: (0x6B, 0x1D, 0xD7, 0xA3, 0x0B, 0xB5, 0xFF, 0xFF),
}
"""Element size to the little-endian bytes of an element nobody wrote: a NaN in every float format.
"""


@dataclass(frozen=True, eq=False)
class Guarded:
    """An output and the buffer around it.

    Attributes:
        tensor: the output, poisoned; hand this to the kernel.
        buffer: (bytes,) uint8, all of the memory.
        inside: (bytes,) bool on the CPU, True where a byte belongs to ``tensor``.
        name: for messages.
    """

    tensor: torch.Tensor
    buffer: torch.Tensor
    inside: torch.Tensor
    name: str


def _pattern(size: int) -> torch.Tensor:
    return torch.tensor(UNWRITTEN[size], dtype=torch.uint8)


def _dense(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(prod(shape[i + 1 :]) for i in range(len(shape)))


def _byte_offsets(shape: Sequence[int], strides: Sequence[int], size: int) -> torch.Tensor:
    """(elements * size,) offsets of all bytes of a view from its first."""
    offsets = torch.zeros(1, dtype=torch.int64)
    for count, stride in zip(shape, strides, strict=True):
        offsets = (offsets[:, None] + torch.arange(count) * stride).reshape(-1)
    return (offsets[:, None] * size + torch.arange(size)).reshape(-1)


def guarded(
    shape: Sequence[int],
    dtype: torch.dtype,
    strides: Sequence[int] | None = None,
    device: str | torch.device = "cpu",
    guard: int = 1024,
    name: str = "out",
) -> Guarded:
    """Allocate a poisoned output.

    Args:
        shape: of the output.
        dtype: of the output.
        strides: in elements, non-negative and without two elements at one address; dense row-major
            by default.
        device: where.
        guard: bytes of guard before and after; a multiple of 16, so that the output keeps 16-byte
            alignment.
        name: for messages.
    """
    strides = _dense(shape) if strides is None else tuple(strides)
    require(guard % 16 == 0 and guard > 0, "guard", guard, "a positive multiple of 16", "use 1024")
    require(
        len(strides) == len(shape) and min(strides, default=0) >= 0,
        "strides",
        strides,
        f"{len(shape)} non-negative numbers",
        "give one per axis, in elements",
    )
    size = torch.empty(0, dtype=dtype).element_size()
    offsets = _byte_offsets(shape, strides, size)
    require(
        offsets.unique().numel() == offsets.numel(),
        "strides",
        strides,
        "a view whose elements do not overlap",
        "widen the outer strides",
    )
    extent = int(offsets.max()) + 1 if offsets.numel() else 0
    body = -(-extent // 16) * 16
    inside = torch.zeros(guard + body + guard, dtype=torch.bool)
    inside[guard + offsets] = True
    host = torch.full((inside.numel(),), GUARD_BYTE, dtype=torch.uint8)
    host[guard + offsets] = _pattern(size).repeat(offsets.numel() // size)
    buffer = host.to(device)
    typed = buffer.view(dtype)
    tensor = typed.as_strided(tuple(shape), strides, typed.storage_offset() + guard // size)
    return Guarded(tensor, buffer, inside, name)


def assert_guards_intact(*outputs: Guarded) -> None:
    """Raise AssertionError if any byte outside an output changed."""
    for output in outputs:
        host = output.buffer.cpu()
        changed = (host != GUARD_BYTE) & ~output.inside
        if bool(changed.any()):
            where = changed.nonzero()[:, 0]
            first = int(output.inside.nonzero()[0]) if bool(output.inside.any()) else 0
            raise AssertionError(
                f"{output.name}: {len(where)} bytes outside the output were overwritten, "
                f"the first at byte {int(where[0]) - first:+d} from its start "
                f"(shape {tuple(output.tensor.shape)}, "
                f"strides {output.tensor.stride()}, {output.tensor.dtype})"
            )


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor on the CPU; an empty one has strides that ``view`` refuses."""
    flat = tensor.reshape(-1) if tensor.numel() else torch.empty(0, dtype=tensor.dtype)
    return flat.view(torch.uint8)


def _unwritten(output: Guarded) -> torch.Tensor:
    """Bool of the output's shape: every byte of the element is as poisoned."""
    host = output.tensor.detach().cpu().contiguous()
    raw = raw_bytes(host).reshape(-1, host.element_size())
    return (raw == _pattern(raw.shape[1])).all(dim=1).reshape(host.shape)


def _places(mask: torch.Tensor) -> str:
    found = mask.nonzero()
    rows = sorted({int(i) for i in found[:, 0]}) if found.dim() == 2 and found.shape[1] else []
    shown = ", ".join(map(str, rows[:8])) + (", ..." if len(rows) > 8 else "")
    return f"{len(found)} elements, the first at {found[0].tolist()}, in rows {shown}"


def assert_fully_written(output: Guarded, where: torch.Tensor | None = None) -> None:
    """Raise AssertionError if an element of the output (where ``where`` is True, if given) still is
    poison.

    E4M3 has two NaNs only, so there the negative one is the poison: a kernel that stores it counts
    as not writing.
    """
    missing = _unwritten(output)
    if where is not None:
        missing &= where.cpu()
    if bool(missing.any()):
        raise AssertionError(f"{output.name}: not written: {_places(missing)}")


def assert_untouched(output: Guarded, where: torch.Tensor) -> None:
    """Raise AssertionError if an element that must be left alone (``where`` True) was written."""
    touched = ~_unwritten(output) & where.cpu()
    if bool(touched.any()):
        raise AssertionError(f"{output.name}: written but must not be: {_places(touched)}")


def _digest(x: Any) -> str:
    tensor = torch.as_tensor(x).detach().cpu().contiguous()
    return hashlib.blake2b(raw_bytes(tensor).numpy().tobytes()).hexdigest()


@contextmanager
def inputs_unchanged(**inputs: Any) -> Iterator[None]:
    """Raise AssertionError, naming the argument, if a tensor or array changed while the block ran.

    with inputs_unchanged(x=x, weight=weight):
        plan.run(x, packed, out=out)
    """
    before = {name: _digest(x) for name, x in inputs.items() if x is not None}
    yield
    changed = [name for name in before if _digest(inputs[name]) != before[name]]
    if changed:
        raise AssertionError(f"inputs changed by the call: {', '.join(changed)}")
