"""The roll of many delayed scales, one warp to a site. Imports the DSL.

    lane        0 1 2 … 31      read history[lane], history[lane + 32], …; the cursor's entry becomes the new maximum
    all         largest entry, by shuffles
    lane 0      writes scale_used, cursor, amax_next

A site belongs to its warp alone. The shuffles keep lane 0 from writing before all lanes have read.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute

from epicute.quant.dsl import (
    Launched,
    begin,
    divide,
    is_saturated,
    load_float,
    load_integer,
    maximum,
    multiply,
    reciprocal,
    select,
    store_float,
    store_integer,
    warp_maximum,
    within_range,
)
from epicute.quant.fp8 import E4M3_MAX
from epicute.quant.roll import ARGUMENTS, SITES_OF_A_BLOCK

__all__ = ["Roll"]

INFINITY = float("inf")
NOT_RUN = -1.0


class Roll(Launched):
    """Device code; calling it traces the launch. ``arguments``: see ``roll.ARGUMENTS``."""

    names = ARGUMENTS

    @cute.jit
    def __call__(self, anchor: cute.Tensor, arguments: Any, stream: Any) -> None:
        """Launch. ``anchor``: see ``Launcher``."""
        self.kernel.set_name_prefix("epicute_roll")
        self.kernel(arguments).launch(
            grid=(Int32(self.given(arguments, "blocks")), 1, 1),
            block=(32 * SITES_OF_A_BLOCK, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, arguments: Any) -> None:
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        begin()
        site = block * SITES_OF_A_BLOCK + cute.arch.make_warp_uniform(thread // 32)
        if site < Int32(self.given(arguments, "sites")):
            self._site(arguments, site, thread % 32)

    @cute.jit
    def _site(self, arguments: Any, site: Any, lane: Any) -> None:
        length = Int32(self.given(arguments, "length"))
        scale_at = self.given(arguments, "scale") + Int64(site) * 4
        amax_at = self.given(arguments, "amax") + Int64(site) * 4
        history = self.given(arguments, "history") + Int64(site) * (Int64(length) * 4)
        cursor_at = self.given(arguments, "cursor") + Int64(site) * 8
        amax, cursor = load_float(amax_at), Int32(load_integer(cursor_at))
        ran = (amax > Float32(0.0)) & (amax < Float32(INFINITY))
        peak = Float32(-INFINITY)
        for i in cutlass.range((length - lane + 31) // 32, unroll=1):
            at = lane + i * 32
            peak = maximum(peak, _entry(history + Int64(at) * 4, amax, ran & (at == cursor)))
        peak = warp_maximum(peak)
        first = lane == 0
        scale = within_range(
            multiply(_holding(peak), _power_of_two(self.given(arguments, "margin")))
        )
        store_float(scale_at, scale, first & ran & (peak > Float32(0.0)))
        following = Int32(cutlass.select_(cursor + 1 >= length, Int32(0), cursor + 1))
        store_integer(cursor_at, Int64(following), first & ran)
        store_float(amax_at, Float32(NOT_RUN), first)


@cute.jit
def _entry(address: Int64, amax: Float32, replaced: Boolean) -> Float32:
    """The entry at ``address``, after ``amax`` has taken its place where it is ``replaced``."""
    found = load_float(address)
    store_float(address, amax, replaced)
    return select(replaced, amax, found)


def _holding(peak: Any) -> Any:
    """The scale by which ``peak`` does not count as saturated, see ``delayed_scale``."""
    scale = divide(peak, E4M3_MAX)
    over = is_saturated(multiply(peak, reciprocal(scale)))
    return Float32((scale.bitcast(Int32) + over).bitcast(Float32))


def _power_of_two(exponent: Any) -> Any:
    """2 to a small Int64."""
    return Float32(((Int32(exponent) + 127) << 23).bitcast(Float32))
