"""Where the rows of a block go: slots, chunks, and the shared memory that a block meets in. Imports the DSL."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Int8, Int16, Int32, Int64, Uint64, cute
from cutlass import memory as cutlass_memory
from cutlass._mlir.dialects import llvm

from epicute.kv.qk4pv8_write import ARGUMENTS, CHUNKS, ROWS, THREADS, TOKENS, WriteSpec
from epicute.quant.dsl import Launched

__all__ = [
    "SIGNS",
    "Places",
    "Shared",
    "read",
    "shared_view",
    "store_if",
    "store_words",
    "store_words_if",
    "view",
]

SIGNS = 0x80808080 - 2**32
UNITS = {1: Int8, 2: Int16, 4: Int32}


def view(dtype: Any, address: Any, count: int, alignment: int, space: Any = None) -> Any:
    """``count`` elements at an address, of global memory or of another ``space``."""
    space = cute.AddressSpace.gmem if space is None else space
    pointer = cute.make_ptr(dtype, address, space, assumed_align=alignment)
    return cute.make_tensor(pointer, cute.make_layout(count))


def shared_view(dtype: Any, address: Any, count: int, alignment: int) -> Any:
    """``count`` elements of shared memory."""
    return view(dtype, address, count, alignment, cute.AddressSpace.smem)


def read(source: Any) -> Any:
    """A tensor's elements as a register fragment."""
    found = cute.make_rmem_tensor(cute.size(source), source.element_type)
    cute.autovec_copy(source, found)
    return found


def store_if(condition: Any, size: int, address: Any, value: Any) -> None:
    """Store the low ``size`` bytes of ``value``."""
    unit = UNITS[size]
    _store_if(Boolean(condition), view(unit, address, 1, size), unit(value))


@cute.jit
def _store_if(condition, cell, value) -> None:
    if condition:
        cell[0] = value


def store_words(target: Any, words: list[Any]) -> None:
    """Store words to so many, adjacent ones."""
    whole = cute.make_rmem_tensor(len(words), Int32)
    for i, word in enumerate(words):
        whole[i] = word
    cute.autovec_copy(whole, target)


@cute.jit
def store_words_if(condition, address, words) -> None:
    """Store adjacent words, two or four."""
    if condition:
        store_words(view(Int32, address, len(words), 4 * len(words)), words)


@cute.jit
def copy_if(condition, target, source) -> None:
    """Set out to copy 16 bytes to shared memory."""
    if condition:
        text = "cp.async.cg.shared.global [$0], [$1], 16;"
        llvm.inline_asm(
            None,
            [target.ir_value(), source.ir_value()],
            text,
            "r,l,~{memory}",
            has_side_effects=True,
            is_align_stack=False,
            asm_dialect=llvm.AsmDialect.AD_ATT,
        )


class Shared(NamedTuple):
    """Addresses in shared memory."""

    keys: Any
    value_rows: Any
    values: Any
    delta: Any
    row_of: Any
    slots: Any
    homes: Any
    starts: Any


class Places(Launched):
    """Rows, chunks and records of one ``WriteSpec``."""

    names = ARGUMENTS

    def __init__(self, spec: WriteSpec) -> None:
        self.spec, self.page = spec, spec.page
        self.lanes = self.page.head_dim // 8
        self.run = self.page.head_dim // 64
        self.matrix = spec.terms > 0 and not spec.grouped

    def _allocate(self) -> Shared:
        """Shared memory of a block."""
        values = self.page.head_dim * CHUNKS * TOKENS + self.lanes * 16
        means = (2 * self.spec.group + 1) * self.page.head_dim * 4 * self.matrix
        sizes = {
            "keys": ROWS * self.page.head_dim * 2,
            "value_rows": ROWS * self.page.head_dim * 2,
            "values": max(values, means),
            "delta": 4 * self.spec.group * CHUNKS * TOKENS * (self.spec.terms > 0),
            "row_of": ROWS * TOKENS,
            "slots": 8 * ROWS,
            "homes": 8 * ROWS,
            "starts": 4 * (ROWS // 32),
        }
        allocator = cutlass_memory.SmemAllocator()
        found = []
        for size in sizes.values():
            layout = cute.make_layout(max(size, 16))
            tensor = allocator.allocate_tensor(cutlass.Uint8, layout, 64)
            found.append(Int32(tensor.iterator.toint()))
        return Shared(*found)

    # --- where rows come from ---

    @cute.jit
    def _fetch(self, arguments, shared, first, head, thread) -> None:
        """Set out to copy the block's keys to shared memory, then its values: two groups of copies."""
        row, lane = thread // self.lanes, thread % self.lanes
        step = THREADS // self.lanes
        for name, target in (("keys", shared.keys), ("values", shared.value_rows)):
            source = self.row(arguments, name, first + row) + Int64(lane) * 16
            source += Int64(head) * self.given(arguments, f"{name}_head")
            stride = self.given(arguments, f"{name}_stride") * step
            for i in cutlass.range_constexpr(ROWS // step):
                there = first + row + i * step < Int32(self.given(arguments, "rows"))
                place = (thread + i * THREADS) * 16
                if cutlass.const_expr(name == "keys"):
                    place = self._key_piece(row + i * step, lane)
                copy_if(there, target + place, source)
                source += stride
            cute.arch.cp_async_commit_group()

    def _key_piece(self, row: Any, piece: Any) -> Any:
        """Bytes in front of 16 bytes of a row of keys; of the first row where there is none.

        Those of a block change places such that eight lanes, which read of four blocks of two rows, read from all
        banks.
        """
        row = cutlass.max(row, 0)
        return (row * self.lanes + (piece ^ (row & 1))) * 16

    # --- where rows go ---

    @cute.jit
    def _find_slots(self, arguments, first, thread, found) -> None:
        """Slots of a thread's row and of the one before it, as they are given; -1 where there is no such row."""
        if thread < ROWS:
            for i in cutlass.range_constexpr(2):
                self._find_slot(arguments, first + thread - i, found, i)

    def _inside(self, arguments: Any, slot: Any) -> Any:
        """The slot; -1 where it is none."""
        inside = (slot >= 0) & (slot < self.given(arguments, "capacity"))
        return Int64(cutlass.select_(inside, slot, Int64(-1)))

    @cute.jit
    def _find_slot(self, arguments, row, found, i) -> None:
        if (row >= 0) & (row < Int32(self.given(arguments, "rows"))):
            if cutlass.const_expr(self.spec.table):
                position = self._integer(arguments, "positions", row)
                request = self._integer(arguments, "requests", row)
                stretch = position // self.page.page_size
                known = (request >= 0) & (request < Int32(self.given(arguments, "table_rows")))
                known = known & (position >= 0)
                if known & (stretch < Int32(self.given(arguments, "table_columns"))):
                    place = Int64(request) * self.given(arguments, "table_stride") + stretch * 4
                    page = view(Int32, self.given(arguments, "page_table") + place, 1, 4)[0]
                    if page >= 0:
                        token = position % self.page.page_size
                        found[i] = Int64(page) * self.page.page_size + token
            else:
                address = self.given(arguments, "slots") + Int64(row) * 8
                found[i] = view(Int64, address, 1, 8)[0]

    def _integer(self, arguments: Any, name: str, row: Any) -> Any:
        """Element ``row`` of a vector of int32 or int64, of which the low half is enough."""
        address = self.given(arguments, name) + Int64(row) * self.given(arguments, f"{name}_step")
        return view(Int32, address, 1, 4)[0]

    @cute.jit
    def _map(self, arguments, shared, head, thread, slots) -> Int32:
        """Enter every row in its chunk, given the slots found; returns the number of chunks."""
        found = cute.make_rmem_tensor(3, Int32)  # rank in the warp, token, whether a chunk starts
        slot = cute.make_rmem_tensor(1, Int64)
        slot[0] = Int64(-1)
        warp = thread // 32
        if thread < ROWS:
            slot[0] = self._inside(arguments, slots[0])
            before = self._inside(arguments, slots[1])
            valid = slot[0] >= 0
            new = (thread == 0) | (before < 0) | (before // TOKENS != slot[0] // TOKENS)
            votes = cute.arch.vote_ballot_sync(valid & new)
            found[0] = cute.arch.popc(votes & cute.arch.lanemask_lt())
            found[1] = Int32(slot[0] % TOKENS)
            found[2] = Int32(cutlass.select_(valid & new, Int32(1), Int32(0)))
            if thread % 32 == 0:
                shared_view(Int32, shared.starts + warp * 4, 1, 4)[0] = cute.arch.popc(votes)
        cute.arch.sync_threads()
        starts = read(shared_view(Int32, shared.starts, ROWS // 32, 16))
        total = Int32(0)
        for i in cutlass.range_constexpr(ROWS // 32):
            earlier = Int32(cutlass.select_(warp > i, starts[i], Int32(0)))
            found[0] = found[0] + earlier
            total += starts[i]
        if (thread < ROWS) & (slot[0] >= 0):
            chunk = found[0] + found[2] - 1
            own = shared.row_of + chunk * TOKENS + found[1]
            shared_view(Int8, own, 1, 1)[0] = Int8(thread)
            if found[2] != 0:
                shared_view(Int64, shared.slots + chunk * 8, 1, 8)[0] = slot[0] // TOKENS * TOKENS
                page = Uint64(slot[0]) // self.page.page_size
                part = Uint64(slot[0]) % self.page.page_size // TOKENS
                home = self._record(arguments, Int64(page), head) | Int64(part)
                shared_view(Int64, shared.homes + chunk * 8, 1, 8)[0] = home
        cute.arch.sync_threads()
        return total

    def _place(self, arguments: Any, shared: Any, chunk: Any) -> tuple[Any, Any]:
        """(page, first token) of a chunk."""
        slot = shared_view(Uint64, shared.slots + chunk * 8, 1, 8)[0]
        page, token = slot // self.page.page_size, slot % self.page.page_size
        return Int64(page), Int32(token)

    def _home(self, shared: Any, chunk: Any) -> tuple[Any, Any]:
        """(address of the record, first token) of a chunk. Records lie at multiples of 16."""
        home = shared_view(Int64, shared.homes + chunk * 8, 1, 8)[0]
        return home & ~15, Int32(home & 15) * TOKENS

    def _record(self, arguments: Any, page: Any, head: Any) -> Any:
        """Address of a record."""
        page_bytes = page * self.given(arguments, "page_stride")
        head_bytes = Int64(head) * self.given(arguments, "head_stride")
        return self.given(arguments, "records") + page_bytes + head_bytes
