"""What a consumer warpgroup does with each tile of keys. Imports the DSL."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.cute.nvgpu import warpgroup

from epicute.attention.schedule import AttentionSchedule
from epicute.attention.sm90.scheduler import Item
from epicute.attention.sm90.softmax import LOG2_E, Rows, cap, mask
from epicute.attention.spec import AttentionSpec
from epicute.epilogues.dsl import pack_words
from epicute.gemm.memory import PACKED

__all__ = ["Steps"]

CLEARED = 1
"""Named barrier of all consumers, between clearing the end of V and multiplying it."""

TURN = 2
"""First of the named barriers by which consumer warpgroups take turns."""


class Steps:
    """A consumer thread's fragments and the steps over them; one object for all of its items.

    Attributes:
        out: accumulators of O. rows: the softmax's state. lane: of the warp. row: the thread's first query row.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        schedule: AttentionSchedule,
        products: tuple[Any, Any],
        shared: dict[str, Any],
        pipes: dict[str, Any],
        thread: Any,
    ) -> None:
        self.spec, self.schedule, self.pipes = spec, schedule, pipes
        self.tile_m, self.tile_n = schedule.tile_m, schedule.tile_n
        self.group = cute.arch.make_warp_uniform(thread // 128)
        self.thread, self.lane = thread, thread % 32
        self.qk, self.pv = products
        place = cute.make_layout(schedule.groups, stride=128)(self.group)
        self.part, pv_part = self.qk.get_slice(place), self.pv.get_slice(place)
        self.values = shared["v"]
        turned = cute.make_tensor(self.values.iterator, cute.select(self.values.layout, [1, 0, 2]))
        self.a_q = self.part.make_fragment_A(self.part.partition_A(shared["q"]))
        self.b_k = self.part.make_fragment_B(self.part.partition_B(shared["k"]))
        self.b_v = pv_part.make_fragment_B(pv_part.partition_B(turned))
        self.out = pv_part.make_fragment_C(pv_part.partition_shape_C((self.tile_m, spec.head_dim)))
        self.p = pv_part.make_fragment_A(pv_part.partition_shape_A((self.tile_m, self.tile_n)))
        self.rows = Rows()

    @cute.jit
    def open(self) -> None:
        """The last warpgroup gives the first one the first turn."""
        if self.group == self.schedule.groups - 1:
            self._end_turn()

    def begin(self, item: Item, key_scale: Any) -> None:
        """Set out on an item. ``key_scale``: of the head's keys."""
        spec = self.spec
        self.item, self.row = item, item.tile * self.tile_m + self._row_in_tile()
        self.key_scale = key_scale
        scale = LOG2_E if spec.softcap is not None else spec.scale * LOG2_E * key_scale
        self.rows.begin(Float32(scale))
        self.out.fill(0.0)

    def _row_in_tile(self) -> Any:
        return self.group * 64 + self.thread % 128 // 32 * 16 + self.lane // 4

    def cut(self, first: Any, last: Any) -> tuple[Any, Any]:
        """Steps behind the first one that the causal mask or the end cuts, and those that the window cuts."""
        item, row = self.item, self.item.tile * self.tile_m + self.group * 64
        offset = item.kv_length - item.q_length
        whole = item.kv_length
        if self.spec.causal:
            whole = cutlass.min(whole, row + offset + 1)
        whole = cutlass.max(whole, 0) // self.tile_n
        masked = cutlass.min(cutlass.max(last - whole, 0), last - first)
        windowed = Int32(0)
        if self.spec.window is not None:
            since = cutlass.max(row + 63 + offset - (self.spec.window - 1), 0)
            until = (since + (self.tile_n - 1)) // self.tile_n
            windowed = cutlass.min(cutlass.max(until - first, 0), last - first - masked)
        return masked, windowed

    @cute.jit
    def first(self, q_state, k_state, v_state, tile) -> None:
        """The last keys: there are no values to multiply yet."""
        self.pipes["q"].consumer_wait(q_state)
        self.pipes["k"].consumer_wait(k_state)
        logits = self._logits(q_state.index, k_state.index)
        self._clear_behind(tile, v_state)
        warpgroup.wait_group(0)
        self.pipes["k"].consumer_release(k_state)
        self._soften(logits, tile, True)
        self._pack(logits)

    @cute.jit
    def next(self, q_state, k_state, v_state, tile, masked: cutlass.Constexpr) -> None:
        """The logits of a tile, and meanwhile the product of the one before with its values."""
        self.pipes["k"].consumer_wait(k_state)
        self._await_turn()
        logits = self._logits(q_state.index, k_state.index)
        self.pipes["v"].consumer_wait(v_state)
        self._weigh(v_state.index)
        self._end_turn()
        warpgroup.wait_group(1)
        self.pipes["k"].consumer_release(k_state)
        self._soften(logits, tile, masked)
        warpgroup.wait_group(0)
        self.pipes["v"].consumer_release(v_state)
        self._pack(logits)
        self.rows.rescale(self.out)

    @cute.jit
    def end(self, q_state, v_state) -> None:
        """The product of the first keys, which were last."""
        self.pipes["q"].consumer_release(q_state)
        self.pipes["v"].consumer_wait(v_state)
        self._weigh(v_state.index)
        warpgroup.wait_group(0)
        self.pipes["v"].consumer_release(v_state)

    def _logits(self, q_index: Any, k_index: Any) -> Any:
        """Issue S = Q·Kᵀ."""
        shape = self.part.partition_shape_C((self.tile_m, self.tile_n))
        logits = self.part.make_fragment_C(shape)
        atom = cute.make_mma_atom(self.qk.op)
        atom.set(warpgroup.Field.ACCUMULATE, False)
        warpgroup.fence()
        for k in range(self.spec.head_dim // 16):
            a, b = self.a_q[None, None, k, q_index], self.b_k[None, None, k, k_index]
            cute.gemm(atom, logits, a, b, logits)
            atom.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.commit_group()
        return logits

    def _weigh(self, index: Any) -> None:
        """Issue O += P·V."""
        atom = cute.make_mma_atom(self.pv.op)
        atom.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.fence()
        for k in range(self.tile_n // 16):
            a, b = self.p[None, None, k], self.b_v[None, None, k, index]
            cute.gemm(atom, self.out, a, b, self.out)
        warpgroup.commit_group()

    def _soften(self, logits: Any, tile: Any, masked: bool) -> None:
        """Cap, mask and exponentials of a step."""
        spec, item = self.spec, self.item
        if spec.softcap is not None:
            cap(logits, spec.scale * self.key_scale, spec.softcap)
        if masked:
            offset = item.kv_length - item.q_length
            first = tile * self.tile_n + self.lane % 4 * 2
            seen = [self.row + 8 * r + offset for r in range(2)]
            right = [item.kv_length] * 2
            left = None
            if spec.causal:
                right = [cutlass.min(item.kv_length, s + 1) for s in seen]
            if spec.window is not None:
                left = [s - (spec.window - 1) for s in seen]
            mask(logits, first, right, left)
        self.rows.take(logits)

    def _pack(self, logits: Any) -> None:
        """Exponentials to the A fragment, which has the accumulators' order."""
        words = cute.recast_tensor(self.p, Int32)
        lanes = [logits[i] for i in range(cute.size(logits))]
        for i, word in enumerate(pack_words(lanes, PACKED[self.spec.dtype])):
            words[i] = word

    @cute.jit
    def _clear_behind(self, tile, state) -> None:
        """Zero the last tile of V behind the request's end."""
        kept = cutlass.max(self.item.kv_length - tile * self.tile_n, 0)
        if kept < self.tile_n:
            self.pipes["v"].consumer_wait(state)
            self._clear(kept, state.index)
            cute.arch.fence_view_async_shared()
            cute.arch.barrier(barrier_id=CLEARED, number_of_threads=128 * self.schedule.groups)

    @cute.jit
    def _clear(self, kept, index) -> None:
        # A row's chunk is contiguous whatever the swizzle, which moves 16 bytes within it.
        size = 2 * self.spec.head_dim
        width = min(size & -size, 128)
        base = Int32(self.values.iterator.toint()) + index * (self.tile_n * size)
        count = (self.tile_n - kept) * (width // 16)
        for i in cutlass.range(self.thread, count, 128 * self.schedule.groups, unroll=1):
            for c in cutlass.range_constexpr(size // width):
                clear_vector(base + c * (self.tile_n * width) + (kept * width + i * 16))

    def _await_turn(self) -> None:
        """Warpgroups issue in turn, each while the others are at their softmax."""
        if self.schedule.turns:
            cute.arch.barrier(barrier_id=TURN + self.group, number_of_threads=256)

    def _end_turn(self) -> None:
        """Pass the turn to the next warpgroup."""
        if self.schedule.turns:
            last = self.group == self.schedule.groups - 1
            following = cutlass.select_(last, Int32(0), self.group + 1)
            cute.arch.barrier_arrive(barrier_id=TURN + following, number_of_threads=256)


def clear_vector(address: Any) -> None:
    """Zero 16 bytes of shared memory."""
    pointer = cute.make_ptr(Int32, address, cute.AddressSpace.smem, assumed_align=16)
    zeros = cute.make_rmem_tensor(4, Int32)
    zeros.fill(0)
    cute.autovec_copy(zeros, cute.make_tensor(pointer, cute.make_layout(4)))
