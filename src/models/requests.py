"""Which rows of a batch belong to which request, and where their keys and values go: tensors on the device.

    packed    rows  a0 a1 a2 b0 c0 c1 | slack        starts  0 3 4 6
    padded    rows  a0 a1 a2 / b0 .  . / c0 c1 .     lengths 3 1 2

A row that is no token has slot -1. Nothing on the host depends on the lengths: a captured launch serves any batch whose
tensors fit, once ``copy_`` has written it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from epicute.errors import require
from epicute.kv import NO_SLOT, slots_for
from epicute.kv.transfer import to_device

__all__ = ["Requests"]


@dataclass(frozen=True, eq=False)
class Requests:
    """The requests of one invocation.

    Attributes:
        positions: (M,) int64, of each row's token in its request; any number in rows that are none.
        slots: (M,) int64, cache slot of each row; -1 where it is no token.
        kv_lengths: (B,) int32, keys of each request, its new tokens included.
        starts: packed: (B + 1,) int32, first row of each request, and where the last one ends.
        lengths: padded: (B,) int32, new tokens of each request; M is B times the padded length.
        page_table: (B, pages per request) int32; None for a dense cache, whose row b is request b's.
    """

    positions: torch.Tensor
    slots: torch.Tensor
    kv_lengths: torch.Tensor
    starts: torch.Tensor | None = None
    lengths: torch.Tensor | None = None
    page_table: torch.Tensor | None = None

    def __post_init__(self) -> None:
        require(
            (self.starts is None) != (self.lengths is None),
            "Requests",
            "starts and lengths" if self.starts is not None else "neither starts nor lengths",
            "starts of packed requests or lengths of padded ones",
            "use Requests.packed or Requests.padded",
        )
        count = self.count
        for name, dtype, shape in (
            ("positions", torch.int64, (self.rows,)),
            ("slots", torch.int64, (self.rows,)),
            ("kv_lengths", torch.int32, (count,)),
            ("starts", torch.int32, (count + 1,)),
            ("lengths", torch.int32, (count,)),
        ):
            given: torch.Tensor | None = getattr(self, name)
            if given is not None:
                require(
                    given.dtype == dtype and given.shape == shape and given.is_contiguous(),
                    name,
                    f"{tuple(given.shape)} {given.dtype}, strides {given.stride()}",
                    f"contiguous {shape} {dtype}",
                    "use Requests.packed or Requests.padded",
                )
        table = self.page_table
        require(
            table is None
            or (table.dtype == torch.int32 and table.dim() == 2 and table.shape[0] == count),
            "page_table",
            None if table is None else f"{tuple(table.shape)} {table.dtype}",
            f"({count}, pages per request) int32",
            "give one row of pages per request",
        )
        require(
            self.starts is not None or (self.rows % count == 0 if count else self.rows == 0),
            "positions",
            f"{self.rows} rows of {count} requests",
            "the same number of rows for each padded request",
            "pad every request to one length",
        )

    @property
    def rows(self) -> int:
        """M."""
        return self.positions.shape[0]

    @property
    def count(self) -> int:
        """B."""
        return self.kv_lengths.shape[0]

    @staticmethod
    def packed(
        lengths: Sequence[int],
        page: int,
        page_table: torch.Tensor | None = None,
        *,
        cached: Sequence[int] | None = None,
        rows: int | None = None,
        device: torch.device | str = "cpu",
    ) -> Requests:
        """Requests row after row.

        Args:
            lengths: new tokens of each request; 0 is allowed.
            page: tokens of a page; of a dense cache, its length.
            page_table: (B, pages per request) int32 or int64; None where the cache is dense and request b has row b.
                Looked up on the CPU: one on a GPU is waited for, ``KVCache.host_table`` is not.
            cached: tokens of each request that are in the cache already, which the new ones follow; none by default.
            rows: M, at least the sum of the lengths; rows beyond it are no tokens.
            device: of the tensors.

        Raises:
            ArgumentError: negative or too many lengths, or a token outside the page table.
        """
        lengths, cached = _counts(lengths, cached)
        total = sum(lengths)
        rows = total if rows is None else rows
        require(
            rows >= total, "rows", rows, f"at least {total}, the sum of the lengths", "raise it"
        )
        owners = [b for b, n in enumerate(lengths) for _ in range(n)]
        places = [c + i for n, c in zip(lengths, cached, strict=True) for i in range(n)]
        blank = [NO_SLOT] * (rows - total)
        starts = [0]
        for n in lengths:
            starts.append(starts[-1] + n)
        found = _describe([*owners, *blank], [*places, *blank], lengths, cached, (page, page_table))
        return Requests(**found, starts=_int32(starts)).to(device)

    @staticmethod
    def padded(
        lengths: Sequence[int],
        page: int,
        page_table: torch.Tensor | None = None,
        *,
        cached: Sequence[int] | None = None,
        width: int | None = None,
        device: torch.device | str = "cpu",
    ) -> Requests:
        """Requests padded to ``width`` rows each, by default the longest's; the rest as in ``packed``."""
        lengths, cached = _counts(lengths, cached)
        longest = max(lengths)
        width = longest if width is None else width
        require(width >= longest, "width", width, f"at least {longest}, the longest", "raise it")
        owners, places = [], []
        for b, (n, c) in enumerate(zip(lengths, cached, strict=True)):
            blank = [NO_SLOT] * (width - n)
            owners += [b] * n + blank
            places += [*range(c, c + n), *blank]
        found = _describe(owners, places, lengths, cached, (page, page_table))
        return Requests(**found, lengths=_int32(lengths)).to(device)

    def to(self, device: torch.device | str) -> Requests:
        """The same requests on ``device``; from the CPU to a GPU without waiting for it."""
        given: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        moved: dict[str, Any] = {
            n: x if x is None else to_device(x, device) for n, x in given.items()
        }
        return Requests(**moved)

    def copy_(self, other: Requests) -> Requests:
        """Become ``other`` in place, so that a captured launch serves it; waits for nothing on one device.

        Raises:
            ArgumentError: another number of rows, requests or pages, or padded instead of packed.
        """
        pairs = [(f.name, getattr(self, f.name), getattr(other, f.name)) for f in fields(self)]
        for name, mine, given in pairs:
            require(
                (mine is None) == (given is None) and (mine is None or mine.shape == given.shape),
                name,
                None if given is None else tuple(given.shape),
                f"{None if mine is None else tuple(mine.shape)}",
                "describe both batches for the same rows, requests and pages",
            )
        for _, mine, given in pairs:
            if mine is not None:
                mine.copy_(given)
        return self


def _counts(lengths: Sequence[int], cached: Sequence[int] | None) -> tuple[list[int], list[int]]:
    lengths = list(lengths)
    cached = [0] * len(lengths) if cached is None else list(cached)
    for name, given in (("lengths", lengths), ("cached", cached)):
        require(
            len(given) == len(lengths) > 0 and min(given) >= 0,
            name,
            given,
            f"{max(len(lengths), 1)} numbers, none negative",
            "give one per request",
        )
    return lengths, cached


def _int32(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _describe(
    owners: list[int],
    places: list[int],
    lengths: list[int],
    cached: list[int],
    where: tuple[int, torch.Tensor | None],
) -> dict[str, Any]:
    """The tensors that packed and padded requests share."""
    page, table = where
    if table is not None:
        require(
            isinstance(table, torch.Tensor),
            "page_table",
            type(table).__name__,
            "a tensor of page numbers",
            "torch.tensor(page_table), one row per request",
        )
        require(
            table.dim() == 2 and table.shape[0] == len(lengths),
            "page_table.shape",
            tuple(table.shape),
            f"({len(lengths)}, pages per request)",
            "give one row of pages per request",
        )
        table = table.cpu()
    rows = torch.arange(len(lengths))[:, None] if table is None else table
    positions = torch.tensor(places, dtype=torch.int64)
    slots = slots_for(rows, positions, torch.tensor(owners, dtype=torch.int64), page)
    return {
        "positions": positions.clamp_min(0),
        "slots": slots,
        "kv_lengths": _int32([n + c for n, c in zip(lengths, cached, strict=True)]),
        "page_table": None if table is None else table.to(torch.int32).contiguous(),
    }
