"""One launch that rolls every delayed scale of a group (FuTransformer 3.2.3).

What it does to a site is ``DelayedScale.roll`` to the bit: a site whose ``amax_next`` is no finite magnitude above 0
keeps history, cursor and scale. The launch reads and writes the state's memory and nothing else:
captured in a CUDA graph it goes on rolling with each replay.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from epicute.jit import CompileKey, ObjectCache, Report, Target, modules_digest
from epicute.quant.fp8 import delayed_scale
from epicute.quant.launch import Launcher, anchor_and_stream, device_of

if TYPE_CHECKING:
    from epicute.quant.group import DelayedGroup

__all__ = ["RollKernel", "RollPlan", "plan_roll", "roll_sites"]

ARGUMENTS = ("scale", "amax", "history", "cursor", "sites", "length", "margin", "blocks")
"""The kernel's integers: four addresses, N, H, the margin, blocks to launch."""

MODULES = ("epicute.quant.roll_kernel", "epicute.quant.roll")
SITES_OF_A_BLOCK = 4
"""Warps of a block."""


@dataclass(frozen=True)
class RollKernel:
    """The kernel as the compiler room sees it: one for all numbers of sites and history lengths."""

    target: Target

    @cached_property
    def key(self) -> CompileKey:
        """Everything that decides the machine code."""
        return CompileKey("quant.roll", (), self.target, (modules_digest(*MODULES),))

    def trace(self) -> tuple[Any, tuple[Any, ...]]:
        """The DSL function and its fake arguments."""
        from cutlass import Int64

        from epicute.quant.roll_kernel import Roll

        anchor, stream = anchor_and_stream()
        return Roll(), (anchor, tuple(Int64(0) for _ in ARGUMENTS), stream)


def plan_roll(
    device: torch.device | str | None = None, *, cache: ObjectCache | None = None
) -> RollPlan:
    """Compile (or load) the roll for a device; None is the current GPU, or the CPU where there is none.

    Args:
        device: where groups will live; others are prepared at their first roll.
        cache: object cache; by default the user's.

    Raises CompileError inside a CUDA graph capture, in which neither is possible.
    """
    return RollPlan(Launcher(RollKernel, (0,) * (len(ARGUMENTS) - 1) + (1,), device, cache))


class RollPlan:
    """A compiled roll. Make one with ``plan_roll``; groups have one of their own."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher

    @property
    def report(self) -> Report | None:
        """What the compiler said; None where no GPU asked for code."""
        return self._launcher.report

    def prepare(self, device: torch.device | str) -> None:
        """Compile and load for another device."""
        self._launcher.prepare(device)

    def run(self, group: DelayedGroup) -> None:
        """Roll every site of ``group``, in place.

        On a GPU one launch on the current stream of the group's device, without waiting or allocating. On the CPU the
        same in PyTorch.

        Raises:
            ArgumentError: a group on neither a CUDA device nor the CPU.
        """
        device = device_of("group", group.scale_used)
        if device.type == "cpu":
            sites = (group.scale_used, group.amax_next, group.history, group.cursor)
            roll_sites(*sites, group.margin)
        else:
            self._launcher.launch(group.scale_used.get_device(), self.bind(group))

    def bind(self, group: DelayedGroup) -> tuple[int, ...]:
        """The kernel's arguments."""
        sites, length = group.history.shape
        addresses = (group.scale_used, group.amax_next, group.history, group.cursor)
        blocks = -(-sites // SITES_OF_A_BLOCK)
        return (*(x.data_ptr() for x in addresses), sites, length, group.margin, blocks)


@torch.no_grad()
def roll_sites(
    scale_used: torch.Tensor,
    amax_next: torch.Tensor,
    history: torch.Tensor,
    cursor: torch.Tensor,
    margin: int,
) -> None:
    """``DelayedScale.roll`` for N sites at once, in PyTorch and in place.

    Args:
        scale_used: (N,) float32. amax_next: (N,) float32. history: (N, H) float32. cursor: (N,) int64.
        margin: headroom in powers of two.
    """
    ran = amax_next.isfinite() & (amax_next > 0)
    entry = torch.arange(history.shape[1], device=history.device)
    replaced = (entry == cursor[:, None]) & ran[:, None]
    history.copy_(torch.where(replaced, amax_next[:, None], history))
    cursor.add_(ran).remainder_(history.shape[1])
    peak = history.amax(dim=1)
    scale_used.copy_(torch.where(ran & (peak > 0), delayed_scale(peak, margin), scale_used))
    amax_next.fill_(-1.0)
