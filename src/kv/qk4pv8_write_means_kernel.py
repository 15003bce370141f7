"""Sums of queries and keys over requests, in two stages. Imports the DSL.

tiles      a block to (tile, head): thread (row r, eight channels) adds the rows r, r + R, … of the tile, even and odd
           ones apart; then the R threads of a channel over a tree in shared memory
requests   a block to (request, head), a thread to a channel: adds the tiles, each sum with its rounding error
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, Uint8, cute
from cutlass import memory as cutlass_memory

from epicute.kv.qk4pv8_write_arithmetic import subtract
from epicute.kv.qk4pv8_write_means import MEANS_ARGUMENTS, THREADS, TILE, MeansSpec
from epicute.kv.qk4pv8_write_places import view
from epicute.quant.dsl import (
    Launched,
    Vector,
    add,
    begin,
    divide,
    load_float,
    select,
    store_float,
    unpack,
)

__all__ = ["SequenceMeans"]


class SequenceMeans(Launched):
    """Device code of one ``MeansSpec``; calling it traces the launch."""

    names = MEANS_ARGUMENTS

    def __init__(self, spec: MeansSpec) -> None:
        self.spec = spec
        self.lanes = spec.head_dim // 8
        self.parallel = THREADS // self.lanes

    @cute.jit
    def __call__(self, anchor: cute.Tensor, arguments: Any, stream: Any) -> None:
        """Launch. ``anchor``: see ``Launcher``."""
        self.kernel.set_name_prefix(f"epicute_sequence_means_{self.spec.stage}")
        self.kernel(arguments).launch(
            grid=(Int32(self.given(arguments, "blocks")), 1, 1),
            block=(THREADS, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, arguments: Any):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        shared: Any = None
        if cutlass.const_expr(self.spec.stage == "tiles"):
            layout = cute.make_layout(self.parallel * self.spec.head_dim)
            shared = cutlass_memory.SmemAllocator().allocate_tensor(Float32, layout, 16)
        begin()
        heads = Int32(self.given(arguments, "q_heads") + self.given(arguments, "kv_heads"))
        if heads > 0:
            own, head = block // heads, block % heads
            if cutlass.const_expr(self.spec.stage == "tiles"):
                self._tile(arguments, shared, own, head, heads, thread)
            else:
                self._request(arguments, own, head, heads, thread)

    def _start(self, arguments: Any, request: Any) -> Any:
        """First row of a request."""
        return view(Int32, self.given(arguments, "starts") + Int64(request) * 4, 1, 4)[0]

    @cute.jit
    def _found(self, arguments, tile, lane) -> Int32:
        """The request that a tile may belong to: the last one whose tiles begin at or before it."""
        requests, found = Int32(self.given(arguments, "requests")), Int32(0)
        for first in cutlass.range(0, requests, 32, unroll=1):
            request = first + lane
            safe = cutlass.min(request, requests - 1)
            begun = self._start(arguments, safe) // TILE + safe <= tile
            votes = cute.arch.vote_ballot_sync((request < requests) & begun)
            found += cute.arch.popc(votes)
        return found - 1

    # --- a tile ---

    @cute.jit
    def _tile(self, arguments, shared, tile, head, heads, thread) -> None:
        request = self._found(arguments, tile, thread % 32)
        start = self._start(arguments, request)
        first = start + (tile - (start // TILE + request)) * TILE
        end = cutlass.min(first + TILE, self._start(arguments, request + 1))
        row, lane = thread // self.lanes, thread % self.lanes
        sums, count = cute.make_rmem_tensor(16, Float32), cute.make_rmem_tensor(1, Int32)
        sums.fill(0.0)
        count.fill(0)
        for i in cutlass.range_constexpr(TILE // self.parallel):
            number = first + row + i * self.parallel
            counts = self._counts(arguments, number, end)
            found = self._load(arguments, number, head, lane, counts)
            for c in cutlass.range_constexpr(8):
                at = 8 * (i % 2) + c
                # Adding 0 for a row that does not count would make 0 of -0, and nothing else.
                sums[at] = add(sums[at], found[c])
            count[0] = count[0] + Int32(cutlass.select_(counts, Int32(1), Int32(0)))
        for c in cutlass.range_constexpr(8):
            shared[row * self.spec.head_dim + lane * 8 + c] = add(sums[c], sums[8 + c])
        cute.arch.sync_threads()
        self._tree(shared, thread)
        if thread < self.spec.head_dim:
            place = Int64(tile) * heads + Int64(head)
            address = place * self.spec.head_dim + Int64(thread)
            target = self.given(arguments, "partials") + address * 4
            store_float(target, shared[thread], Boolean(first < end))
        if head == 0:
            self._store_count(arguments, tile, lane, row, count, first < end, thread)

    @cute.jit
    def _store_count(self, arguments, tile, lane, row, count, live, thread) -> None:
        """Rows of the tile that count."""
        mine = Int32(cutlass.select_(lane == 0, count[0], Int32(0)))
        total = cute.arch.warp_redux_sync(mine, "add")
        layout = cute.make_layout(THREADS // 32)
        warps = cutlass_memory.SmemAllocator().allocate_tensor(Int32, layout, 16)
        if thread % 32 == 0:
            warps[thread // 32] = total
        cute.arch.sync_threads()
        if (thread == 0) & live:
            total = Int32(0)
            for w in cutlass.range_constexpr(THREADS // 32):
                total += warps[w]
            address = self.given(arguments, "counts") + Int64(tile) * 4
            view(Int32, address, 1, 4)[0] = total

    def _counts(self, arguments: Any, row: Any, end: Any) -> Any:
        """Whether a row counts."""
        found = cute.make_rmem_tensor(1, Uint8)
        found[0] = Uint8(1)
        if self.spec.masked:
            address = self.given(arguments, "valid") + Int64(row)
            _copy_if(view(Uint8, address, 1, 1), found, Boolean(row < end))
        return Boolean((row < end) & (found[0] != 0))

    def _load(self, arguments: Any, row: Any, head: Any, lane: Any, live: Any) -> list[Any]:
        """Eight channels of a row of q, or of k behind the heads of q; zero where it does not count."""
        queries = Int32(self.given(arguments, "q_heads"))
        second = head >= queries
        pick = lambda a, b: Int64(cutlass.select_(second, b, a))  # noqa: E731
        given = {n: self.given(arguments, n) for n in MEANS_ARGUMENTS[:6]}
        own = Int64(cutlass.select_(second, head - queries, head))
        address = pick(given["q"], given["k"])
        address += Int64(row) * pick(given["q_row"], given["k_row"])
        address += own * pick(given["q_head"], given["k_head"])
        words = Vector(lane, self.spec.head_dim, self.lanes - 1, live).load(address)
        return unpack(words, self.spec.dtype)

    def _tree(self, shared: Any, thread: Any) -> None:
        """Add the threads of a channel: those of half the rows onto the others, until one is left."""
        width, half = self.spec.head_dim, self.parallel // 2
        while half:
            for i in range(half * width // THREADS or 1):
                at = thread + i * THREADS
                _add_if(shared, at, at + half * width, Boolean(at < half * width))
            cute.arch.sync_threads()
            half //= 2

    # --- a request ---

    @cute.jit
    def _request(self, arguments, request, head, heads, thread) -> None:
        start = self._start(arguments, request)
        tiles = (self._start(arguments, request + 1) - start + (TILE - 1)) // TILE
        first, width = start // TILE + request, self.spec.head_dim
        total, lost, count = Float32(0.0), Float32(0.0), Int32(0)
        safe = cutlass.min(thread, width - 1)
        for tile in cutlass.range(tiles, unroll=4):
            place = Int64(first + tile) * heads + Int64(head)
            address = self.given(arguments, "partials") + (place * width + Int64(safe)) * 4
            x = load_float(address)
            total, error = two_sum(total, x)
            lost = add(lost, error)
            counts = self.given(arguments, "counts") + Int64(first + tile) * 4
            count += view(Int32, counts, 1, 4)[0]
        there = count > 0
        mean = divide(add(total, lost), select(there, count.to(Float32), Float32(1.0)))
        mean = select(there, mean, Float32(0.0))
        queries = Int32(self.given(arguments, "q_heads"))
        second = head >= queries
        row = Int64(request) * Int64(queries) + Int64(head)
        row_k = Int64(request) * Int64(heads - queries) + Int64(head - queries)
        base = cutlass.select_(
            second, self.given(arguments, "k_mean"), self.given(arguments, "q_mean")
        )
        place = Int64(cutlass.select_(second, row_k, row)) * width + Int64(thread)
        store_float(Int64(base) + place * 4, mean, Boolean(thread < width))


def two_sum(a: Any, b: Any) -> tuple[Any, Any]:
    """a + b, rounded, and what rounding took from it."""
    total = add(a, b)
    part = subtract(total, a)
    return total, add(subtract(a, subtract(total, part)), subtract(b, part))


@cute.jit
def _add_if(shared: cute.Tensor, at: Int32, other: Int32, condition: Boolean) -> None:
    if condition:
        shared[at] = add(shared[at], shared[other])


@cute.jit
def _copy_if(source: cute.Tensor, target: cute.Tensor, condition: Boolean) -> None:
    if condition:
        target[0] = source[0]
