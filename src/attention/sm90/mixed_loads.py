"""What the TMA warp of the mixed-precision kernel does. Imports the DSL."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int16, Int32, cute, pipeline
from cutlass.cute.nvgpu import cpasync

from epicute.attention import mixed_places as places
from epicute.attention.mixed import mixed_at as at
from epicute.attention.schedule import MAILBOX
from epicute.attention.sm90.kernel import CONSUMER, PRODUCER
from epicute.attention.sm90.mixed_buffers import MixedBuffers
from epicute.attention.sm90.scheduler import read_item, span

__all__ = ["MixedLoads"]


class MixedLoads(MixedBuffers):
    """Loads of an item's queries, and tile by tile of what belongs to its keys."""

    names: tuple[str, ...]
    """Operands that TMA brings, in the order of the kernel's parameters."""

    def _load_of(self, loads: Any, name: str) -> tuple[Any, Any]:
        """(copy atom, tensor) of an operand."""
        place = 2 * self.names.index(name)
        return loads[place], loads[place + 1]

    @cute.jit
    def _produce(self, loads, shared, pipes, arguments, rank) -> None:
        spec, schedule = self.spec, self.schedule
        mail = pipeline.make_pipeline_state(CONSUMER, MAILBOX)
        q_state = pipeline.make_pipeline_state(PRODUCER, 2)
        k_state = pipeline.make_pipeline_state(PRODUCER, self.stages)
        v_state = pipeline.make_pipeline_state(PRODUCER, schedule.v_stages)
        raw = pipeline.make_pipeline_state(PRODUCER, schedule.raw_stages)
        pipes["mail"].consumer_wait(mail)
        item = read_item(shared["mail"][None, mail.index])
        while item.valid != 0:
            pipes["mail"].consumer_release(mail)
            mail.advance()
            q_atom, q = self._load_of(loads, "q")
            self._load_q(q_atom, q, shared["q"], pipes["q"], q_state, item, rank)
            if cutlass.const_expr(spec.terms > 0):
                self._load_mean(loads, shared, pipes["q"], q_state, arguments, item, rank)
            q_state.advance()
            first, last = span(spec, schedule, item)
            kv_head = item.head // spec.group
            for i in cutlass.range(last - first + 1, unroll=1):
                place = (arguments, item, last - i, kv_head, rank)
                if cutlass.const_expr(spec.recorded):
                    self._load_keys(loads, shared, pipes["raw"], raw, place)
                    self._load_values(loads, shared["v"], pipes["v"], v_state, place)
                    v_state.advance()
                else:
                    k_atom, k = self._load_of(loads, "k")
                    v_atom, v = self._load_of(loads, "v")
                    self._load(k_atom, k, shared["k"], pipes["k"], k_state, place)
                    self._load(v_atom, v, shared["raw"], pipes["raw"], raw, place)
                    k_state.advance()
                raw.advance()
            pipes["mail"].consumer_wait(mail)
            item = read_item(shared["mail"][None, mail.index])
        # A tail moves its state on.
        pipes["q"].producer_tail(q_state)
        pipes["raw"].producer_tail(raw)
        if cutlass.const_expr(spec.recorded):
            pipes["v"].producer_tail(v_state)
        else:
            pipes["k"].producer_tail(k_state)

    def _partition(self, atom: Any, tensor: Any, shared: Any, box: tuple[int, int]) -> Any:
        """(target, source) of the copies of boxes; shared memory as (copy, row of boxes, column of boxes, stage)."""
        tiles = cute.local_tile(tensor, box, (None,) * cute.rank(tensor))
        return cpasync.tma_partition(
            atom,
            0,
            cute.make_layout(1),
            cute.group_modes(shared, 0, 2),
            cute.group_modes(tiles, 0, 2),
        )

    def _issue(self, atom: Any, source: Any, target: Any, barrier: Any, shared: bool) -> None:
        """Issue a copy, to every CTA of the cluster where it is ``shared``."""
        if shared and self.cluster > 1:
            mask = Int16((1 << self.cluster) - 1)
            cute.copy(atom, source, target, tma_bar_ptr=barrier, mcast_mask=mask)
        else:
            cute.copy(atom, source, target, tma_bar_ptr=barrier)

    @cute.jit
    def _load_mean(self, loads, shared, pipe, state, arguments, item, rank) -> None:
        """The mean of the item's queries, under the barrier of Q."""
        atom, mean = self._load_of(loads, "mean")
        box = (self.head_dim, 1)
        tiles = cute.local_tile(shared["mean"], (self.head_dim,), (None, None))
        tiles = cute.make_tensor(
            tiles.iterator, cute.make_layout((self.head_dim, 1, 2), stride=(1, 1, self.head_dim))
        )
        target, source = self._partition(atom, mean, tiles, box)
        group = cutlass.min(item.request, Int32(arguments[at("mean_groups")]) - 1)
        barrier = pipe.producer_get_barrier(state)
        self._issue(
            atom,
            source[None, 0, 0, item.head + rank, group],
            target[None, state.index],
            barrier,
            False,
        )

    @cute.jit
    def _load_keys(self, loads, shared, pipe, state, place) -> None:
        """This CTA's share of a tile's keys and their scales, and its own ΔS."""
        arguments, item, tile, head, rank = place
        spec, box, d = self.spec, self.box, self.head_dim
        first = tile * self.tile_n + rank * self.share
        atom, keys = self._load_of(loads, "keys")
        scale_atom, factors = self._load_of(loads, "factors")
        tiles = cute.local_tile(shared["raw"], (box, d // 2), (None, None, None))
        to, of = self._partition(atom, keys, tiles, (box, d // 2))
        words = box * d // 64
        tiles = cute.make_tensor(
            shared["factors"].iterator,
            cute.make_layout(
                (words, 1, self.tile_n // box, self.schedule.raw_stages),
                stride=(1, 1, words, self.tile_n * d // 64),
            ),
        )
        scale_to, scale_of = self._partition(scale_atom, factors, tiles, (words, 1))
        pipe.producer_acquire(state)
        barrier = pipe.producer_get_barrier(state)
        for i in cutlass.range_constexpr(self.share // box):
            token = first + i * box
            page = self._page(arguments, item, token)
            row = token % spec.page // box
            at_box = rank * (self.share // box) + i
            self._issue(
                atom, of[None, row, 0, head, page], to[None, at_box, 0, state.index], barrier, True
            )
            self._issue(
                scale_atom,
                scale_of[None, row, 0, head, page],
                scale_to[None, at_box, state.index],
                barrier,
                True,
            )
        if cutlass.const_expr(spec.terms > 0):
            self._load_terms(loads, shared["terms"], barrier, state, place)

    @cute.jit
    def _load_terms(self, loads, shared, barrier, state, place) -> None:
        arguments, item, tile, _, rank = place
        spec = self.spec
        atom, terms = self._load_of(loads, "terms")
        pages = self.tile_n // spec.page
        step = places.delta_bytes(spec.page, spec.terms) // 2
        tiles = cute.make_tensor(
            shared.iterator,
            cute.make_layout(
                (spec.page, spec.terms, pages, self.schedule.raw_stages),
                stride=(1, spec.page, step, step * pages),
            ),
        )
        to, of = self._partition(atom, terms, tiles, (spec.page, spec.terms))
        for i in cutlass.range_constexpr(pages):
            page = self._page(arguments, item, tile * self.tile_n + i * spec.page)
            self._issue(
                atom,
                of[None, 0, 0, item.head + rank, page],
                to[None, i, state.index],
                barrier,
                False,
            )

    @cute.jit
    def _load_values(self, loads, shared, pipe, state, place) -> None:
        """This CTA's share of a tile's values: half of the channels, of all tokens."""
        arguments, item, tile, head, rank = place
        atom, values = self._load_of(loads, "values")
        box = (self.values_box, self.value_width)
        tiles = cute.local_tile(shared, box, (None, None, None))
        to, of = self._partition(atom, values, tiles, box)
        pipe.producer_acquire(state)
        barrier = pipe.producer_get_barrier(state)
        for i in cutlass.range_constexpr(self.tile_n // self.value_width):
            page = self._page(arguments, item, tile * self.tile_n + i * self.value_width)
            self._issue(
                atom, of[None, rank, 0, head, page], to[None, rank, i, state.index], barrier, True
            )
