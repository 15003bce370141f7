"""The warp that prepares a part's queries, and quantises and stores a request's new row. Imports the DSL.

A lane takes eight adjacent channels, so that D / 8 lanes are a row; the others take further query heads. It works while
the part's pages are on their way. A new row's bits, ΔS among them, are those of the cache writer; it goes to its page
when the part has been given what it waits for.

Dead end: a second such warp, for the new row: two CTAs of eleven warps leave 80 registers a thread, and they spill.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int8, Int16, Int32, Int64, cute

from epicute.attention.mixed_decode_spec import MAIL_SLOTS, MixedDecodeSpec
from epicute.attention.mixed_decode_spec import decode_at as at
from epicute.attention.sm90.mixed_decode_places import (
    Barriers,
    Layout,
    Shared,
    global_view,
    load_from,
    shared_view,
)
from epicute.attention.sm90.mixed_decode_producer import read_part
from epicute.attention.sm90.scheduler import load_int
from epicute.kv.qk4pv8_write_arithmetic import (
    block_scale,
    encode_word,
    finite_maximum,
    in_terms,
    loudest,
    pack_quad,
    subtract,
)
from epicute.quant.dsl import asm, divide, unpack

__all__ = ["Scribe"]

HELD = 17
"""Words of a new row: key, value, the number of its page, eight channels of the mean."""

DONE = 5
"""Words of a new row when it is quantised: nibbles, the scale's code, values, and again the number of its page."""

QUERY = "cvt.rn.f16x2.f32 $0, $2, $1;"


class Scribe:
    """Device code of the preparing warp."""

    def __init__(
        self, spec: MixedDecodeSpec, layout: Layout, shared: Shared, barriers: Barriers
    ) -> None:
        self.spec, self.page = spec, spec.page
        self.layout, self.shared, self.barriers = layout, shared, barriers
        self.lanes = spec.page.head_dim // 8
        self.rows = 32 // self.lanes
        self.steps = -(-spec.group // self.rows)

    @cute.jit
    def run(self, arguments, lane) -> None:
        """All parts of this CTA; the kernel in front is waited for behind the first one's finding."""
        mail = Int32(0)
        part = Scribe._take(self, mail, lane)
        cute.arch.griddepcontrol_wait()
        while part.valid != 0:
            slot, turn = mail % 2, mail // 2 % 2
            newest = Int32(0)
            held = cute.make_rmem_tensor(HELD, Int32)
            held.fill(0)
            done = cute.make_rmem_tensor(DONE, Int32)
            done.fill(0)
            totals = cute.make_rmem_tensor(self.steps, Float32)
            totals.fill(0.0)
            if cutlass.const_expr(self.spec.append):
                last = (part.first + part.count == part.tiles) & (part.length > 0)
                newest = Int32(cutlass.select_(last, Int32(1), Int32(0)))
                if newest != 0:
                    Scribe._ask(self, arguments, part, held, lane)
            cute.arch.mbarrier_wait(self.barriers.q_empty + slot, turn ^ 1)
            Scribe._queries(self, arguments, part, slot, lane)
            if cutlass.const_expr(self.spec.append):
                found = (newest, done, totals)
                Scribe._quantise(self, arguments, part, (slot, held), found, lane)
            cute.arch.fence_view_async_shared()
            cute.arch.sync_warp()
            if lane == 0:
                cute.arch.mbarrier_arrive(self.barriers.q_full + slot)
            if cutlass.const_expr(self.spec.append):
                Scribe._store(self, arguments, part, (newest, done, totals), lane)
            mail += 1
            part = Scribe._take(self, mail, lane)

    def _take(self, mail: Any, lane: Any) -> Any:
        place, turn = mail % MAIL_SLOTS, mail // MAIL_SLOTS % 2
        cute.arch.mbarrier_wait(self.barriers.posted + place, turn)
        part = read_part(self.shared.mail, place)
        cute.arch.sync_warp()
        _arrive_if(self.barriers.taken + place, Boolean(lane == 0))
        return part

    def _group(self, arguments: Any, request: Any) -> Any:
        """Group of a request's means."""
        several = Int32(arguments[at("mean_groups")]) > 1
        return Int32(cutlass.select_(several, request, Int32(0)))

    def _mean(self, arguments: Any, name: str, row: Any, channel: Any) -> list[Any]:
        """Eight channels of a mean's row."""
        place = (Int64(row) * self.page.head_dim + Int64(channel)) * 4
        address = arguments[at(name)] + place
        return [x for i in (0, 16) for x in load_from(global_view(Float32, address + i, 4))]

    def _halves(self, address: Any) -> Any:
        """Eight 16-bit channels as four words."""
        found = cute.make_rmem_tensor(4, Int32)
        cute.autovec_copy(global_view(Int32, address, 4), found)
        return found

    # --- queries ---

    @cute.jit
    def _queries(self, arguments, part, slot, lane) -> None:
        """Centred queries as float16, in the order in which keys are multiplied."""
        spec = self.spec
        kv_head, block = part.head // spec.blocks, part.head % spec.blocks
        channel, group = lane % self.lanes * 8, self._group(arguments, part.request)
        for i in cutlass.range_constexpr(spec.columns // self.rows):
            column = i * self.rows + lane // self.lanes
            number = block * spec.columns + column
            # Columns that pad hold the last head again; nobody reads what becomes of them.
            head = kv_head * spec.group + cutlass.min(number, spec.group - 1)
            place = Int64(part.request) * arguments[at("q_batch")]
            place += Int64(head) * arguments[at("q_head")] + Int64(channel) * 2
            lanes = unpack(self._halves(arguments[at("q")] + place), spec.dtype)
            if cutlass.const_expr(spec.terms > 0):
                mean = self._mean(arguments, "q_mean", group * spec.heads + head, channel)
                lanes = [subtract(x, m) for x, m in zip(lanes, mean, strict=True)]
            self._put(slot, column, channel, lanes)

    def _put(self, slot: Any, column: Any, channel: Any, lanes: list[Any]) -> None:
        """Eight channels of a query to where a product's four steps find their pairs."""
        run = self.page.head_dim // 4
        t, word = channel // run, channel % run // 8
        base = self.shared.q + slot * self.layout.query_bytes + column * 128
        for pair in range(4):
            k = (2 * word + pair // 2) * 16 + 2 * t + pair % 2 * 8
            block, within = k // 64, k % 64 * 2
            place = base + block * (self.spec.columns * 128) + (within ^ (column % 8 * 16))
            value = asm(
                QUERY, "=r,f,f", Int32, *(Float32(x) for x in lanes[2 * pair : 2 * pair + 2])
            )
            shared_view(Int32, place)[0] = value

    # --- the new row ---

    @cute.jit
    def _ask(self, arguments, part, held, lane) -> None:
        """Have a request's new key and value on their way, the page they go to, and the mean of keys."""
        spec = self.spec
        kv_head, own = part.head // spec.blocks, lane % self.lanes
        for i in cutlass.range_constexpr(2):
            name = ("new_k", "new_v")[i]
            place = Int64(part.request) * arguments[at(f"{name}_batch")]
            place += Int64(kv_head) * arguments[at(f"{name}_head")] + Int64(own) * 16
            words = self._halves(arguments[at(name)] + place)
            for w in cutlass.range_constexpr(4):
                held[4 * i + w] = words[w]
        held[8] = load_int(
            arguments[at("page_table")] + Int64(part.request) * arguments[at("table_row")],
            (part.length - 1) // self.page.page_size,
        )
        if cutlass.const_expr(spec.terms > 0):
            row = self._group(arguments, part.request) * spec.kv_heads + kv_head
            mean = self._mean(arguments, "k_mean", row, own * 8)
            for i in cutlass.range_constexpr(8):
                held[9 + i] = Float32(mean[i]).bitcast(Int32)

    @cute.jit
    def _quantise(self, arguments, part, row, found, lane) -> None:
        """Quantise a request's new key and value for the part's last tile, where it has them.

        ``row``: slot, and what ``_ask`` has got; ``found``: whether there are any, and room for what ``_store`` takes.
        """
        newest, done, totals = found
        if newest != 0:
            Scribe._encode_row(self, arguments, part, row, (done, totals), lane)

    @cute.jit
    def _encode_row(self, arguments, part, row, found, lane) -> None:
        (slot, held), (done, totals) = row, found
        spec, own = self.spec, lane % self.lanes
        base = self.shared.rows + slot * self.layout.row_bytes
        keys, values = (unpack([held[4 * i + w] for w in range(4)], spec.dtype) for i in range(2))
        if cutlass.const_expr(spec.terms > 0):
            mean = [Int32(held[9 + i]).bitcast(Float32) for i in range(8)]
            keys = [subtract(x, m) for x, m in zip(keys, mean, strict=True)]
        code, word = self._encode(arguments, keys)
        if cutlass.const_expr(spec.v_scaled):
            v_scale = Int32(arguments[at("v_scale")]).bitcast(Float32)
            values = [divide(x, v_scale) for x in values]
        packed = [pack_quad(values[4 * i : 4 * i + 4]) for i in (0, 1)]
        first, even = Boolean(lane < self.lanes), Boolean((lane < self.lanes) & (own % 2 == 0))
        _set_if(shared_view(Int32, base + own * 4), word, first)
        for i in cutlass.range_constexpr(2):
            cell = shared_view(Int32, base + self.layout.row_values + own * 8 + 4 * i)
            _set_if(cell, packed[i], first)
        _set_if(shared_view(Int8, base + self.layout.row_scales + own // 2), Int8(code), even)
        for i, x in enumerate((word, code, *packed, held[8])):
            done[i] = Int32(x)
        if cutlass.const_expr(spec.terms > 0):
            Scribe._deltas(self, arguments, part, base, keys, totals, lane)

    def _encode(self, arguments: Any, keys: list[Any]) -> tuple[Any, Any]:
        """(code of the scale, word of nibbles) of eight channels, with the neighbour's eight."""
        lanes, amax = cute.make_rmem_tensor(8, Float32), cute.make_rmem_tensor(1, Float32)
        for i, x in enumerate(keys):
            lanes[i] = x
        amax[0] = loudest(keys)
        _mend(lanes, amax)
        other = cute.arch.shuffle_sync_bfly(amax[0], offset=1)
        best = asm("max.f32 $0, $1, $2;", "=f,f,f", Float32, amax[0], other)
        k_scale = None
        if self.spec.k_scaled:
            k_scale = Int32(arguments[at("k_scale")]).bitcast(Float32)
        code, inverse, _ = block_scale(best, k_scale)
        return code, encode_word(keys, inverse, self.page.order)

    @cute.jit
    def _deltas(self, arguments, part, base, keys, totals, lane) -> None:
        """ΔS of the row, for all query heads in ``totals``, and for those of the block in shared memory."""
        spec = self.spec
        kv_head, group = part.head // spec.blocks, self._group(arguments, part.request)
        first = part.head % spec.blocks * spec.columns
        for i in cutlass.range_constexpr(self.steps):
            query = i * self.rows + lane // self.lanes
            head = kv_head * spec.group + cutlass.min(query, spec.group - 1)
            mean = self._mean(arguments, "q_mean", group * spec.heads + head, lane % self.lanes * 8)
            total = Float32(0.0)
            for x, m in zip(keys, mean, strict=True):
                total = asm("fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", Float32, x, m, total)
            distance = self.lanes // 2
            for step in cutlass.range_constexpr(distance.bit_length()):
                total = total + cute.arch.shuffle_sync_bfly(total, offset=distance >> step)
            totals[i] = total
            column = query - first
            inside = (query < spec.group) & (lane % self.lanes == 0)
            mine = Boolean(inside & (column >= 0) & (column < spec.columns))
            cell = base + self.layout.row_delta + column * (2 * spec.terms)
            for term, word in enumerate(in_terms((total, total), spec.terms)):
                _set_if(shared_view(Int16, cell + 2 * term), Int16(word), mine)

    @cute.jit
    def _store(self, arguments, part, found, lane) -> None:
        """The row to its place in the page, and its ΔS, once; ``found``: of ``_quantise``."""
        newest, done, totals = found
        if (newest != 0) & (part.head % self.spec.blocks == 0):
            Scribe._store_row(self, arguments, part, (done, totals), lane)

    @cute.jit
    def _store_row(self, arguments, part, found, lane) -> None:
        done, totals = found
        spec, page, own = self.spec, self.page, lane % self.lanes
        kv_head, token, number = part.head // spec.blocks, part.length - 1, done[4]
        token = token % page.page_size
        first, even = Boolean(lane < self.lanes), Boolean((lane < self.lanes) & (own % 2 == 0))
        record = Int64(number) * arguments[at("page_stride")]
        record += Int64(kv_head) * arguments[at("head_stride")] + arguments[at("records")]
        cell = global_view(Int32, record + Int64(page.key_row(token) + 4 * own))
        _set_if(cell, done[0], first)
        for i in cutlass.range_constexpr(8):
            cell = global_view(Int8, record + Int64(page.value_byte(token, 8 * own + i)))
            _set_if(cell, Int8(done[2 + i // 4] >> (8 * (i % 4))), first)
        cell = global_view(Int8, record + Int64(page.scale_byte(token, own // 2)))
        _set_if(cell, Int8(done[1]), even)
        for i in cutlass.range_constexpr(self.steps if spec.terms else 0):
            query = i * self.rows + lane // self.lanes
            inside = Boolean((query < spec.group) & (lane % self.lanes == 0))
            head = kv_head * spec.group + cutlass.min(query, spec.group - 1)
            line = (Int64(number) * spec.heads + Int64(head)) * spec.terms
            for term, word in enumerate(in_terms((totals[i], totals[i]), spec.terms)):
                element = (line + term) * page.page_size + Int64(token)
                target = global_view(Int16, arguments[at("delta")] + element * 2)
                _set_if(target, Int16(word), inside)


@cute.jit
def _set_if(cell, value, condition) -> None:
    if condition:
        cell[0] = value


@cute.jit
def _arrive_if(barrier, condition) -> None:
    if condition:
        cute.arch.mbarrier_arrive(barrier)


@cute.jit
def _mend(lanes, amax) -> None:
    """Leave what is not finite out of the maximum."""
    whole = amax[0] < Float32.inf
    if not whole:
        finite_maximum(lanes, amax, 0)
