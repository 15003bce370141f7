"""Where the new token of each request stands: tensors on the device, one row a request.

    positions   5   0  -1  17        of the token in its request
    slots     133  64  -1 209        its cache slot
    lengths     6   1   0  18        keys of the request, the new one included
                         └ takes no part: its row is zeros, and reaches no cache and no result

Nothing on the host depends on them: a captured step serves whatever ``copy_`` or a kernel writes there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from epicute.errors import require
from epicute.kv import NO_SLOT, slots_for
from epicute.kv.transfer import to_device

__all__ = ["DecodeStep"]


@dataclass(frozen=True, eq=False)
class DecodeStep:
    """One token for each of B requests.

    Attributes:
        positions: (B,) int64; any number where there is no token.
        slots: (B,) int64; -1 where there is no token.
        lengths: (B,) int32, keys with the new one; 0 where there is no token.
        page_table: (B, pages of a request) int32; None for a contiguous cache, whose row b is request b's.
    """

    positions: torch.Tensor
    slots: torch.Tensor
    lengths: torch.Tensor
    page_table: torch.Tensor | None = None

    def __post_init__(self) -> None:
        rows = self.positions.shape[0]
        for name, dtype in (
            ("positions", torch.int64),
            ("slots", torch.int64),
            ("lengths", torch.int32),
        ):
            given: torch.Tensor = getattr(self, name)
            require(
                given.dtype == dtype and given.shape == (rows,) and given.is_contiguous(),
                name,
                f"{tuple(given.shape)} {given.dtype}, strides {given.stride()}",
                f"contiguous ({rows},) {dtype}",
                "use DecodeStep.of",
            )
        table = self.page_table
        require(
            table is None
            or (table.dtype == torch.int32 and table.dim() == 2 and table.shape[0] == rows),
            "page_table",
            None if table is None else f"{tuple(table.shape)} {table.dtype}",
            f"({rows}, pages of a request) int32",
            "give one row of pages for each request",
        )

    @staticmethod
    def of(
        lengths: Sequence[int],
        page: int,
        page_table: torch.Tensor | None = None,
        *,
        device: torch.device | str = "cpu",
    ) -> DecodeStep:
        """A step of requests that hold so many tokens, the new one included.

        Args:
            lengths: one for each request; 0 for one that takes no part.
            page: tokens of a page; of a contiguous cache, those of a request.
            page_table: (B, pages of a request) int32 or int64 on the CPU; None where request b has stretch b.
            device: of the tensors.

        Raises:
            ArgumentError: a negative length, or a token outside of the page table.
        """
        counts = list(lengths)
        require(
            len(counts) > 0 and min(counts) >= 0,
            "lengths",
            counts,
            "a number for each request, none negative",
            "give 0 for a request that takes no part",
        )
        rows = torch.arange(len(counts))
        given = rows[:, None] if page_table is None else page_table.cpu()
        require(
            given.dim() == 2 and given.shape[0] == len(counts),
            "page_table.shape",
            tuple(given.shape),
            f"({len(counts)}, pages of a request)",
            "give one row of pages for each request",
        )
        held = torch.tensor(counts, dtype=torch.int64)
        positions = held - 1  # -1 where there is no token, which slots_for maps to no slot
        slots = slots_for(given, positions, rows, page)
        table = None if page_table is None else given.to(torch.int32).contiguous()
        found = (positions, slots, held.to(torch.int32), table)
        return DecodeStep(*(None if x is None else to_device(x, device) for x in found))  # type: ignore[arg-type]

    @staticmethod
    def allocate(
        rows: int, pages: int | None = None, device: torch.device | str = "cpu"
    ) -> DecodeStep:
        """A step in which nobody takes part; ``pages`` of a request, None for a contiguous cache."""
        none = torch.full((rows,), NO_SLOT, dtype=torch.int64, device=device)
        table = None
        if pages is not None:
            table = torch.full((rows, pages), -1, dtype=torch.int32, device=device)
        lengths = torch.zeros(rows, dtype=torch.int32, device=device)
        return DecodeStep(none, none.clone(), lengths, table)

    @property
    def rows(self) -> int:
        """B."""
        return self.positions.shape[0]

    def copy_(self, other: DecodeStep) -> DecodeStep:
        """Become ``other`` in place, so that a captured step serves it.

        Raises:
            ArgumentError: another number of requests or pages.
        """
        require(
            self.rows == other.rows
            and (self.page_table is None) == (other.page_table is None)
            and (
                self.page_table is None
                or other.page_table is None
                or self.page_table.shape == other.page_table.shape
            ),
            "other",
            f"{other.rows} requests",
            f"{self.rows} requests with as many pages each",
            "describe both steps for the same requests and pages",
        )
        self.positions.copy_(other.positions)
        self.slots.copy_(other.slots)
        self.lengths.copy_(other.lengths)
        if self.page_table is not None and other.page_table is not None:
            self.page_table.copy_(other.page_table)
        return self
