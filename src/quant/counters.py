"""The device's counters on the host, a little late and without waiting."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from epicute.errors import require

__all__ = ["CounterReader", "Counters"]


@dataclass(frozen=True)
class Counters:
    """What had been counted when a copy was taken.

    Attributes:
        saturated: site to values clipped since the last reset.
        nans: site to NaNs stored since the last reset.
    """

    saturated: dict[str, int]
    nans: dict[str, int]

    @property
    def clean(self) -> bool:
        """Whether nothing was clipped and nothing was NaN."""
        return not any(self.saturated.values()) and not any(self.nans.values())


class CounterReader:
    """Copies counters to pinned host memory behind the work already queued, and reads finished copies.

    ``request`` queues a copy and an event on the current stream; ``newest`` looks whether the event has passed. Neither
    waits for the device. The copies alternate between two buffers, so that a finished one is never overwritten while
    it is the newest. Make it outside of a CUDA graph and call it beside the replays: a copy captured in a graph would
    be taken behind the reader's back, and is refused.
    """

    def __init__(self, names: tuple[str, ...], counters: torch.Tensor) -> None:
        """``counters``: (2, N) int64, saturated and NaNs of the N ``names``."""
        self._names, self._counters = names, counters
        self._cuda = counters.device.type == "cuda"
        shape = (2, *counters.shape)
        self._host = torch.zeros(shape, dtype=torch.int64, pin_memory=self._cuda)
        self._event = torch.cuda.Event() if self._cuda else None
        self._flying: int | None = None
        self._done: int | None = None

    def request(self) -> bool:
        """Queue a copy on the current stream of the counters' device; False where the last one is still under way.

        Raises:
            ArgumentError: inside a CUDA graph capture.
        """
        if self._event is None:
            self._host[0].copy_(self._counters)
            self._done = 0
            return True
        require(
            not torch.cuda.is_current_stream_capturing(),
            "request",
            "a CUDA graph capture",
            "a call outside of it",
            "call it beside the graph's replays",
        )
        self._settle()
        if self._flying is not None:
            return False
        target = 1 if self._done == 0 else 0
        with torch.cuda.device(self._counters.device):
            self._host[target].copy_(self._counters, non_blocking=True)
            self._event.record()
        self._flying = target
        return True

    def newest(self) -> Counters | None:
        """The counters of the newest copy that has arrived; None before the first one has."""
        self._settle()
        if self._done is None:
            return None
        saturated, nans = self._host[self._done].tolist()
        names = self._names
        return Counters(
            dict(zip(names, saturated, strict=True)), dict(zip(names, nans, strict=True))
        )

    def _settle(self) -> None:
        if self._flying is None or self._event is None:
            return
        # An event must not be asked while a graph is captured.
        if not torch.cuda.is_current_stream_capturing() and self._event.query():
            self._done, self._flying = self._flying, None
