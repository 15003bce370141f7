"""The first scales of delayed scaling: run on typical data until they fit (FuTransformer 3.2.3)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from epicute.errors import require
from epicute.quant.delayed import NOT_RUN, DelayedScale

__all__ = ["calibrate"]


@torch.no_grad()
def calibrate(
    sites: Sequence[DelayedScale],
    invoke: Callable[[], object],
    roll: Callable[[], object],
    *,
    most: int,
    tolerance: float = 0.0,
) -> int:
    """Call ``invoke`` until no scale changes by more than ``tolerance`` of what it was, or ``most`` times.

    A site behind one that saturated has seen wrong values, and sees better ones the next time: sites in a chain are
    right to the bit after as many calls as there are sites. Then history holds the last call alone and the counters
    are zero. A site that ``invoke`` does not reach, or that sees zeros alone, keeps its scale. Waits for the device.

    Args:
        sites: on one device.
        invoke: one invocation on typical data; whether it rolls at its start does not matter.
        roll: rolls ``sites``.
        most: calls at most.
        tolerance: share of a scale, not negative.

    Returns:
        How often ``invoke`` was called.

    Raises:
        ArgumentError: ``most`` is not positive.
    """
    require(most >= 1, "most", most, "at least one call", "leave it out")
    calls, settled = 0, False
    while calls < most and not settled:
        before = torch.cat([site.scale_used for site in sites])
        for site in sites:
            site.history.zero_()
            site.cursor.zero_()
            site.amax_next.fill_(NOT_RUN)
        invoke()
        roll()
        after = torch.cat([site.scale_used for site in sites])
        settled = bool(((after - before).abs() <= before * tolerance).all())
        calls += 1
    for site in sites:
        site.reset_counters()
    return calls
