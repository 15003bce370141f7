"""All delayed scales of one request group, in a few tensors, rolled by one launch (FuTransformer 3.2.3).

    names        "0.x"  "0.attention"  "0.x1"  "0.z"  "1.x"  …       layer and site
    scale_used   [ s  ,      s       ,   s   ,   s  ,   s  , …]      (N,) float32
    history      [[H] ,     [H]      ,  [H]  ,  [H] ,  [H] , …]      (N, H) float32
    group["0.z"] a DelayedScale whose tensors are views of these

Two groups never share a scale: each has its own memory. Who wants a group to start from what another has learnt says
so, with ``fork``.

One invocation, in this order:

    group.roll()                        takes what the last invocation saw into the scales
    kernels with site.scale_used, …     quantise with them and collect amax_next, saturated, nans
    reader.request()                    now and then; ``reader.newest()`` never waits
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import torch

from epicute.errors import ArgumentError, require
from epicute.quant.calibration import calibrate
from epicute.quant.counters import CounterReader
from epicute.quant.delayed import NOT_RUN, DelayedScale
from epicute.quant.fp8 import as_float32
from epicute.quant.roll import RollPlan, plan_roll

__all__ = ["STATE_VERSION", "DelayedGroup"]

STATE_VERSION = 1
"""Number of the arrangement of a saved group; files of any other are refused."""

_ENTRIES = {
    "scale_used": torch.float32,
    "amax_next": torch.float32,
    "history": torch.float32,
    "cursor": torch.int64,
    "saturated": torch.int64,
    "nans": torch.int64,
}


@cache
def _plan_on(device: torch.device) -> RollPlan:
    """The roll of all groups on a device."""
    return plan_roll(device)


@dataclass(frozen=True, eq=False)
class DelayedGroup:
    """N sites of one request group: contiguous tensors on one device that are only ever changed in place.

    Make one with ``create``, ``load`` or ``fork``. On a CUDA device that compiles and loads the roll, so that the first
    one may be captured in a graph.

    Attributes:
        names: what the sites are called, each once.
        scale_used: (N,) float32, the scale of this invocation's codes.
        amax_next: (N,) float32, largest finite magnitude since the last roll, -1 for none.
        history: (N, H) float32 rings of past maxima; entries not yet filled are 0.
        cursor: (N,) int64, the history entry that the next roll overwrites.
        counters: (2, N) int64: values clipped so far, NaNs stored so far.
        margin: headroom in powers of two, of all sites.
    """

    names: tuple[str, ...]
    scale_used: torch.Tensor
    amax_next: torch.Tensor
    history: torch.Tensor
    cursor: torch.Tensor
    counters: torch.Tensor
    margin: int = 0

    def __post_init__(self) -> None:
        count = len(self.names)
        require(
            count > 0 and len(set(self.names)) == count,
            "names",
            f"{count} names, {len(set(self.names))} of them different",
            "at least one, each once",
            "name a site by layer and place, '3.attention'",
        )
        length = self.history.shape[-1] if self.history.dim() == 2 else 1
        shapes = {"history": (count, length), "counters": (2, count)}
        for name in ("scale_used", "amax_next", "history", "cursor", "counters"):
            given, dtype = getattr(self, name), _ENTRIES.get(name, torch.int64)
            wanted = shapes.get(name, (count,))
            require(
                given.dtype == dtype
                and given.shape == wanted
                and (given.is_contiguous() or (name == "counters" and given.stride(1) == 1))
                and given.device == self.scale_used.device,
                name,
                f"{tuple(given.shape)} {given.dtype} on {given.device}",
                f"contiguous {wanted} {dtype} on {self.scale_used.device}",
                "build the state with DelayedGroup.create",
            )
        _ = self._sites  # refuses a margin or history length that no site may have
        _ = self._plan

    @staticmethod
    def create(
        names: Sequence[str],
        device: torch.device | str = "cpu",
        *,
        history: int = 16,
        initial: float = 1.0,
        margin: int = 0,
    ) -> DelayedGroup:
        """A fresh group whose first invocation quantises with the scale ``initial`` everywhere.

        Args:
            names: of the sites, each once; their order is that of the tensors.
            device: where the state lives.
            history, initial, margin: see ``DelayedScale.create``.

        Raises:
            ArgumentError: an argument is out of its range, or a name is given twice.
        """
        DelayedScale.create(history=history, initial=initial, margin=margin)  # refuses bad ones
        require(
            not isinstance(names, str),
            "names",
            repr(names),
            "a sequence of names",
            "write ('x', 'attention', …)",
        )
        count = len(names)
        return DelayedGroup(
            names=tuple(names),
            scale_used=torch.full((count,), initial, dtype=torch.float32, device=device),
            amax_next=torch.full((count,), NOT_RUN, dtype=torch.float32, device=device),
            history=torch.zeros(count, history, dtype=torch.float32, device=device),
            cursor=torch.zeros(count, dtype=torch.int64, device=device),
            counters=torch.zeros(2, count, dtype=torch.int64, device=device),
            margin=margin,
        )

    @property
    def device(self) -> torch.device:
        """Where the state lives."""
        return self.scale_used.device

    @property
    def saturated(self) -> torch.Tensor:
        """(N,) int64 view: values clipped so far."""
        return self.counters[0]

    @property
    def nans(self) -> torch.Tensor:
        """(N,) int64 view: NaNs stored so far."""
        return self.counters[1]

    @cached_property
    def _sites(self) -> dict[str, DelayedScale]:
        return {
            name: DelayedScale(
                scale_used=self.scale_used[i : i + 1],
                amax_next=self.amax_next[i : i + 1],
                history=self.history[i],
                cursor=self.cursor[i : i + 1],
                saturated=self.counters[0, i : i + 1],
                nans=self.counters[1, i : i + 1],
                margin=self.margin,
            )
            for i, name in enumerate(self.names)
        }

    @cached_property
    def _plan(self) -> RollPlan:
        return _plan_on(self.device if self.device.type == "cuda" else torch.device("cpu"))

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __getitem__(self, name: str) -> DelayedScale:
        """The site ``name``: views of this group's memory, always the same object."""
        found = self._sites.get(name)
        if found is None:
            near = ", ".join(self.names[:8]) + (", …" if len(self.names) > 8 else "")
            raise ArgumentError(
                f"site: got {name!r}, expected one of {near}. Fix: check the spelling"
            )
        return found

    def part(self, names: Sequence[str]) -> DelayedGroup:
        """Some sites as a group: the same memory, so that one launch rolls them alone.

        Args:
            names: sites that are neighbours in ``self.names``, in that order.

        Raises:
            ArgumentError: others.
        """
        wanted = tuple(names)
        start = self.names.index(wanted[0]) if wanted and wanted[0] in self.names else 0
        at = slice(start, start + len(wanted))
        require(
            bool(wanted) and self.names[at] == wanted,
            "names",
            wanted,
            "neighbours among the sites, in their order",
            "name them as model_sites does",
        )
        return DelayedGroup(
            wanted,
            self.scale_used[at],
            self.amax_next[at],
            self.history[at],
            self.cursor[at],
            self.counters[:, at],
            self.margin,
        )

    def roll(self) -> None:
        """Start an invocation: ``DelayedScale.roll`` of every site that ran, in one launch.

        In place, on the current stream, without allocating or waiting; capturable in a CUDA graph, whose replays roll
        on.
        """
        self._plan.run(self)

    def reset_counters(self) -> None:
        """Set ``saturated`` and ``nans`` of all sites to zero."""
        self.counters.zero_()

    def reader(self) -> CounterReader:
        """A reader of the counters that never waits for the device."""
        return CounterReader(self.names, self.counters)

    def fork(self) -> DelayedGroup:
        """A group of its own memory that starts from this one's scales and history.

        Counters start at zero, and no site has run.
        """
        return DelayedGroup(
            self.names,
            self.scale_used.clone(),
            torch.full_like(self.amax_next, NOT_RUN),
            self.history.clone(),
            self.cursor.clone(),
            torch.zeros_like(self.counters),
            self.margin,
        )

    @torch.no_grad()
    def start_from(self, data: Mapping[str, torch.Tensor | float]) -> None:
        """Give sites their first valid scale from typical data.

        What the sites knew is forgotten; those not named stay as they are. Waits for the device.

        Args:
            data: by site, a tensor of values as the site would quantise (float32, bfloat16 or float16), or their
                largest magnitude as a number. Of zeros alone the scale stays what it was.

        Raises:
            ArgumentError: an unknown site, another dtype, or data without a finite value; nothing is changed then.
        """
        found = {}
        for name, given in data.items():
            site = self[name]
            require(
                isinstance(given, torch.Tensor) or given >= 0,
                f"data[{name!r}]",
                given,
                "a largest magnitude, not negative",
                "pass abs(x).max() of typical activations, or the activations themselves",
            )
            values = torch.as_tensor(
                given, dtype=None if isinstance(given, torch.Tensor) else torch.float32
            )
            values = as_float32(values, f"data[{name!r}]")
            seen = (
                float(values[values.isfinite()].abs().amax())
                if bool(values.isfinite().any())
                else NOT_RUN
            )
            require(
                seen >= 0,
                f"data[{name!r}]",
                f"{values.numel()} values, none finite",
                "typical activations of that site",
                "leave the site out, and let the first invocation set its scale",
            )
            found[name] = (site, seen)
        for site, seen in found.values():
            site.history.zero_()
            site.cursor.zero_()
            site.amax_next.fill_(seen)
            site.roll()

    def calibrate(self, invoke: Callable[[], object], most: int = 8) -> int:
        """Give every site its first valid scale by running the model, before traffic does.

        ``epicute.quant.calibration.calibrate`` of all sites, until no scale changes by more than a sixteenth, half the
        distance of two E4M3 values. What else an invocation leaves behind is the caller's: a model's ``prefill``
        appends to its cache each time, so give it one of its own, and reset that with each call.

        Args:
            invoke: one invocation on typical data; whether it rolls at its start does not matter.
            most: calls at most.

        Returns:
            How often ``invoke`` was called.

        Raises:
            ArgumentError: ``most`` is not positive.
        """
        sites = tuple(self._sites.values())
        return calibrate(sites, invoke, self.roll, most=most, tolerance=1 / 16)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Copies of all state by name: ``DelayedScale.state_dict`` with a leading dimension of N."""
        return {name: getattr(self, name).clone() for name in _ENTRIES}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Continue bit for bit from ``state``; names, margin and history length stay this object's own.

        All or nothing, by the rules of ``DelayedScale.load_state_dict``. Waits for the device.

        Raises:
            ArgumentError: as there, naming the site; or another number of sites.
        """
        require(
            set(state) == set(_ENTRIES),
            "state",
            sorted(state),
            f"{sorted(_ENTRIES)}",
            "pass a state_dict()",
        )
        count = len(self)
        for name, given in state.items():
            require(
                given.shape[:1] == (count,) and given.dim() == (2 if name == "history" else 1),
                f"state[{name!r}]",
                tuple(given.shape),
                f"{count} sites",
                "load into a group of the same sites",
            )
        length = self.history.shape[1]
        fresh = DelayedGroup.create(self.names, history=length, margin=self.margin)
        host = {name: given.cpu() for name, given in state.items()}
        for i, name in enumerate(self.names):
            one = {k: x[i] if k == "history" else x[i : i + 1] for k, x in host.items()}
            try:
                fresh[name].load_state_dict(one)
            except ArgumentError as error:
                raise ArgumentError(f"site {name!r}: {error}") from error
        for name in ("scale_used", "amax_next", "history", "cursor", "counters"):
            getattr(self, name).copy_(getattr(fresh, name))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file with the state, the names and the margin; it appears whole or not at all."""
        from safetensors.torch import save_file

        metadata = {
            "state_version": str(STATE_VERSION),
            "names": json.dumps(self.names),
            "margin": str(self.margin),
        }
        partial = Path(f"{os.fspath(path)}.{os.getpid()}.partial")
        try:
            save_file(self.state_dict(), partial, metadata)
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)

    @staticmethod
    def load(path: str | os.PathLike[str], device: torch.device | str = "cpu") -> DelayedGroup:
        """Read what ``save`` wrote.

        Raises:
            ArgumentError: another version, or a file that is not a saved group.
        """
        from safetensors import SafetensorError, safe_open

        try:
            opened = safe_open(path, framework="pt")
        except (OSError, SafetensorError) as error:
            raise ArgumentError(
                f"path: got {os.fspath(path)} ({error}), expected a file that DelayedGroup.save wrote. "
                "Fix: name that file, or start from a calibration"
            ) from error
        with opened as file:
            found = file.metadata() or {}
            require(
                found.get("state_version") == str(STATE_VERSION),
                f"{os.fspath(path)}: state_version",
                found.get("state_version", "none"),
                str(STATE_VERSION),
                "write it with DelayedGroup.save of this version of epicute",
            )
            state = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        try:
            names, margin, length = (
                json.loads(found["names"]),
                int(found["margin"]),
                state["history"].shape[1],
            )
        except (KeyError, IndexError, ValueError) as error:
            raise ArgumentError(
                f"{os.fspath(path)}: got unreadable contents ({error!r}), expected a group's state. "
                "Fix: write it with DelayedGroup.save"
            ) from error
        group = DelayedGroup.create(names, device, history=length, margin=margin)
        group.load_state_dict(state)
        return group
