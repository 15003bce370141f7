"""Delayed FP8 scaling (FuTransformer 3.2.3): quantise now with what earlier invocations have seen.

    invocation t            roll            invocation t+1
    codes  <- scale_used    history <- amax_next
    amax_next <- max |x|    scale_used <- max(history) / 448 * 2^margin, see ``delayed_scale``

The contract, which kernels that write FP8 share:

* ``scale_used`` is the multiplier of a code: value = code * scale, and
  code = cast(x * float32(1 / scale)).
* ``amax_next`` is the maximum of |x| over the finite x of the invocation, taken from the FP32 value
  that is cast. -1 says that the site saw no finite value (it did not run, got no rows, or all was
  broken). A signed-integer maximum of the FP32 bits serves as atomic, since -1 lies below all
  magnitudes.
* The roll passes by a site whose maximum is -1, or 0: zeros say nothing about the next tensor, and
  zeros are what rows become that are no token. History, cursor and scale stay.
* ``saturated`` counts |x * float32(1 / scale)| > 448, infinities included; ``nans`` counts NaNs.
  Both grow until ``reset_counters``. A roll chooses the scale so that no value up to the maximum it
  has seen counts.
* A new scale lies within [SCALE_MIN, SCALE_MAX].
* The roll belongs at the start of an invocation. Codes outlive it only with a copy of the scale
  they were written with.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from epicute.errors import require
from epicute.quant.fp8 import (
    E4M3_MAX,
    SCALE_MAX,
    SCALE_MIN,
    as_float32,
    cast_e4m3,
    delayed_scale,
    inverse,
)

__all__ = ["NOT_RUN", "DelayedScale"]

NOT_RUN = -1.0
"""``amax_next`` of a site that has seen no finite value since the last roll."""

_ONE = {
    "scale_used": torch.float32,
    "amax_next": torch.float32,
    "cursor": torch.int64,
    "saturated": torch.int64,
    "nans": torch.int64,
}


@dataclass(frozen=True, eq=False)
class DelayedScale:
    """State of one site: preallocated tensors on one device that are only ever changed in place.

    Attributes:
        scale_used: (1,) float32, the scale of this invocation's codes.
        amax_next: (1,) float32, largest finite magnitude since the last roll, -1 for none.
        history: (H,) float32 ring of past maxima; entries not yet filled are 0.
        cursor: (1,) int64, the history entry that the next roll overwrites, the oldest.
        saturated: (1,) int64, values clipped so far.
        nans: (1,) int64, NaNs stored so far.
        margin: headroom in powers of two.
    """

    scale_used: torch.Tensor
    amax_next: torch.Tensor
    history: torch.Tensor
    cursor: torch.Tensor
    saturated: torch.Tensor
    nans: torch.Tensor
    margin: int = 0

    def __post_init__(self) -> None:
        require(
            0 <= self.margin <= 16,
            "margin",
            self.margin,
            "0 to 16 powers of two",
            "use a small margin: each step costs one bit of range at the small end",
        )
        for name, dtype in _ONE.items():
            _require_tensor(name, getattr(self, name), dtype, (1,))
        _require_tensor("history", self.history, torch.float32, (max(self.history.numel(), 1),))

    @staticmethod
    def create(
        device: torch.device | str = "cpu",
        history: int = 16,
        initial: float = 1.0,
        margin: int = 0,
    ) -> DelayedScale:
        """A fresh state whose first invocation quantises with the scale ``initial``.

        Args:
            device: where the state lives.
            history: how many invocations a maximum is remembered, at least 1.
            initial: first scale (value = code * scale), within [SCALE_MIN, SCALE_MAX].
            margin: a new scale is 2^margin times the least that holds the history.

        Raises:
            ArgumentError: an argument is out of its range.
        """
        require(history >= 1, "history", history, "at least 1", "remember at least one invocation")
        _require_scale("initial", initial)
        ones = {n: torch.zeros(1, dtype=dtype, device=device) for n, dtype in _ONE.items()}
        ones["scale_used"].fill_(initial)
        ones["amax_next"].fill_(NOT_RUN)
        return DelayedScale(
            history=torch.zeros(history, dtype=torch.float32, device=device), margin=margin, **ones
        )

    @torch.no_grad()
    def quantize(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes of ``x`` under ``scale_used``, and a copy of that scale; records what it saw.

        Args:
            x: any shape and strides; float32, bfloat16 or float16. No elements: nothing is
                recorded.

        Returns:
            codes float8_e4m3fn shaped like ``x``; scale (1,) float32, which later rolls do not
            change.
        """
        x = as_float32(x)
        scaled = x * inverse(self.scale_used)
        if x.numel() > 0:
            seen = torch.where(x.isfinite(), x.abs(), NOT_RUN).amax().reshape(1)
            self.amax_next.copy_(torch.maximum(self.amax_next, seen))
            self.saturated.add_((scaled.abs() > E4M3_MAX).sum())
            self.nans.add_(x.isnan().sum())
        return cast_e4m3(scaled), self.scale_used.clone()

    @torch.no_grad()
    def roll(self) -> None:
        """Take the finished invocation into the history and choose the next scale.

        In place, without waiting for the device, and capturable in a CUDA graph. A site that did
        not run, that saw zeros alone, or whose maximum is not finite, keeps history, cursor and
        scale. A maximum leaves the history with the H-th roll after the one that brought it in.
        """
        ran = self.amax_next.isfinite() & (self.amax_next > 0)
        entry = torch.arange(self.history.numel(), device=self.history.device)
        replaced = (entry == self.cursor) & ran
        self.history.copy_(torch.where(replaced, self.amax_next, self.history))
        self.cursor.add_(ran).remainder_(self.history.numel())
        peak = self.history.amax(dim=0, keepdim=True)
        wanted = delayed_scale(peak, self.margin)
        self.scale_used.copy_(torch.where(ran & (peak > 0), wanted, self.scale_used))
        self.amax_next.fill_(NOT_RUN)

    def reset_counters(self) -> None:
        """Set ``saturated`` and ``nans`` to zero."""
        self.saturated.zero_()
        self.nans.zero_()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Copies of all tensors by name. The inverse scale is derived at each use: none is kept."""
        return {name: getattr(self, name).clone() for name in (*_ONE, "history")}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Continue bit for bit from ``state``; margin and history length stay this object's own.

        Of a longer history the newest entries are kept; a shorter one is completed with empty
        entries. The loaded scale holds until the next roll. Reads the scale's value, so it waits
        for the device.

        Raises:
            ArgumentError: a tensor is missing, unknown or of another dtype or shape, the scale is
                out of its range, or the cursor is outside the history.
        """
        names = {*_ONE, "history"}
        require(
            set(state) == names, "state", sorted(state), f"{sorted(names)}", "pass a state_dict()"
        )
        for name, dtype in _ONE.items():
            _require_tensor(f"state[{name!r}]", state[name], dtype, (1,))
        past = state["history"]
        _require_tensor("state['history']", past, torch.float32, (max(past.numel(), 1),))
        _require_scale("state['scale_used']", float(state["scale_used"]))
        oldest = int(state["cursor"])
        require(
            0 <= oldest < past.numel(),
            "state['cursor']",
            oldest,
            f"an index into {past.numel()} entries",
            "pass a state_dict()",
        )
        newest = torch.roll(past, -oldest)[-self.history.numel() :]
        self.history.zero_()
        self.history[self.history.numel() - newest.numel() :].copy_(newest)
        for name in _ONE:
            getattr(self, name).copy_(state[name])
        self.cursor.zero_()


def _require_tensor(
    name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    require(
        tensor.dtype == dtype and tensor.shape == shape,
        name,
        f"{tuple(tensor.shape)} {tensor.dtype}",
        f"{shape} {dtype}",
        "build the state with DelayedScale.create",
    )


def _require_scale(name: str, scale: float) -> None:
    require(
        math.isfinite(scale) and SCALE_MIN <= scale <= SCALE_MAX,
        name,
        scale,
        f"a scale from {SCALE_MIN:.3g} to {SCALE_MAX:.3g}",
        "pass amax / 448 of typical data",
    )
