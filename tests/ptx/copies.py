"""Asynchronous copies: ``cp.async``, bulk copies and those of TMA.

A copy reads and writes when its turn comes: at the latest when somebody waits for it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.ptx import floats
from tests.ptx.access import EVERY, RANK, lanes_of, owner, reach
from tests.ptx.machine import Copy, Warp
from tests.ptx.maps import TensorMap
from tests.ptx.program import PARAMS, Instruction, known

__all__ = ["add_packed", "make", "store_async"]

Step = Callable[[Warp, Any], None]


def make(h: Any, x: Instruction) -> Step:
    """The function of a copy, or of a wait for copies."""
    text = x.opcode
    if text.startswith(("cp.async.bulk.prefetch", "cp.async.bulk.tensor.prefetch")):
        return lambda w, m: None
    if text == "cp.async.bulk.commit_group":
        return _commit_bulk
    if text.startswith("cp.async.bulk.wait_group"):
        return _wait_bulk(int(x.operands[0]))
    if text.startswith(("cp.async.bulk.tensor", "cp.reduce.async.bulk.tensor")):
        return _tensor(h, x)
    if text.startswith(("cp.async.bulk", "cp.reduce.async.bulk")):
        return _bulk(h, x)
    if text == "cp.async.commit_group":
        return _commit
    if text.startswith("cp.async.wait"):
        return _wait(0 if text.endswith("all") else int(x.operands[0]), text.endswith("all"))
    if text.startswith("cp.async.mbarrier.arrive"):
        return _arrive_after(h, x)
    assert text.startswith("cp.async.c"), f"{text} is not known"
    return _small(h, x)


# --- cp.async


def _small(h: Any, x: Instruction) -> Step:
    """4, 8 or 16 bytes for each lane."""
    to, of = h.operands.address(x.operands[0]), h.operands.address(x.operands[1])
    size = int(x.operands[2], 0)
    assert size in (4, 8, 16), f"cp.async of {size} bytes"
    given = None
    if len(x.operands) - ("cache_hint" in x.opcode) > 3:
        given = h.operands.value(x.operands[3], "u32")

    def step(w: Warp, m: Any) -> None:
        mask = EVERY if m is None else m
        targets, sources = to(w)[mask].copy(), of(w)[mask].copy()
        counts = np.full(len(targets), size) if given is None else given(w)[mask].astype(np.int64)
        cluster, cta = w.cta.cluster, w.cta
        places = np.concatenate([targets, sources[counts > 0]])
        assert (places % size == 0).all(), "cp.async of unaligned addresses"
        assert cta.shared.has(targets, size), "cp.async beyond shared memory"
        if counts.any():
            reach(w, sources[counts > 0], size)
        clock = cluster.races.fork(w) if cluster.races else None

        def run() -> None:
            for target, source, count in zip(targets, sources, counts, strict=True):
                data = np.zeros(size, np.uint8)
                if count:
                    data[:count] = cluster.memory.block(int(source), int(count))
                cta.shared.data[target : target + size] = data
            if cluster.races:
                cluster.races.write(w.id, clock, cta.rank, targets[:, None] + np.arange(size))

        copy = Copy(run)
        w.copies[-1].append(copy)
        cluster.begin(copy)

    return step


def _commit(w: Warp, m: Any) -> None:
    w.copies.append([])


def _wait(count: int, every: bool) -> Step:
    def step(w: Warp, m: Any) -> None:
        groups = len(w.copies) if every else max(len(w.copies) - 1 - count, 0)
        for group in w.copies[:groups]:
            for copy in group:
                copy.force()
        w.copies = w.copies[groups:] or [[]]

    return step


def _arrive_after(h: Any, x: Instruction) -> Step:
    address = h.operands.address(x.operands[0])
    counted = "noinc" in x.parts

    def step(w: Warp, m: Any) -> None:
        a, before = address(w).copy(), [c for group in w.copies for c in group if not c.done]
        lanes = list(lanes_of(m))
        cluster = w.cta.cluster
        for lane in lanes:
            cta, place = owner(w, int(a[lane]))
            if not counted:
                cta.mbarrier(place, w).pending += 1
        clock = cluster.races.release(w, None) if cluster.races else None
        behind = w.behind

        def run() -> None:
            for copy in before:
                copy.force()
            for lane in lanes:
                cta, place = owner(w, int(a[lane]))
                barrier = cta.mbarrier(place, w)
                barrier.behind |= behind
                if clock is not None:
                    barrier.clock = (
                        clock if barrier.clock is None else np.maximum(barrier.clock, clock)
                    )
                barrier.arrive()

        cluster.begin(Copy(run))

    return step


# --- bulk copies


def _groups(w: Warp, lane: int) -> list[list[Copy]]:
    return w.bulk.setdefault(lane, [[]])


def _commit_bulk(w: Warp, m: Any) -> None:
    for lane in lanes_of(m):
        _groups(w, lane).append([])


def _wait_bulk(count: int) -> Step:
    def step(w: Warp, m: Any) -> None:
        races = w.cta.cluster.races
        for lane in lanes_of(m):
            groups = _groups(w, lane)
            done = max(len(groups) - 1 - count, 0)
            for group in groups[:done]:
                for copy in group:
                    copy.force()
                    if races:
                        races.reached(w, races.warps + w.id, copy.ticket)
            w.bulk[lane] = groups[done:]

    return step


def _deliver(
    w: Warp,
    rank: int,
    address: int,
    places: np.ndarray,
    data: Any,
    mbarrier: int,
    size: int,
    clock: Any,
) -> None:
    """Bytes to a CTA's shared memory, and word of it to an mbarrier there."""
    cluster = w.cta.cluster
    cta = cluster.ctas[rank]
    assert cta.shared.has(places, 1), f"a copy to {address:#x}, beyond shared memory"
    cta.shared.data[places] = data
    barrier = cta.mbarrier(mbarrier)
    barrier.behind |= w.behind
    if cluster.races:
        actor = cluster.races.actor(rank, mbarrier)
        cluster.races.write(actor, clock, rank, places, fenced=True)
        assert not cta.over, f"a copy to {address:#x} of CTA {cta.block[0]}, which has ended"
        barrier.clock = cluster.races.tick(actor, barrier.clock)
    barrier.complete(size)


def _targets(w: Warp, to: int, mbarrier: int, mask: int | None) -> list[tuple[int, int, int]]:
    """(rank, address, mbarrier) of each CTA that a copy goes to."""
    low = (1 << RANK) - 1
    if mask is not None:
        assert 0 < mask < 1 << w.cta.cluster.size, f"multicast to {mask:#x}"
        return [(r, to & low, mbarrier & low) for r in range(w.cta.cluster.size) if mask >> r & 1]
    cta, address = owner(w, to)
    other, barrier = owner(w, mbarrier)
    assert cta is other, "a copy and its mbarrier are in different CTAs"
    return [(cta.rank, address, barrier)]


def _read_shared(w: Warp, places: np.ndarray, clock: Any, ticket: int) -> None:
    races = w.cta.cluster.races
    if races:
        races.read(races.warps + w.id, clock, w.cta.rank, places, fenced=True, ticket=ticket)
        assert not w.cta.over, f"a copy from shared memory of CTA {w.cta.block[0]}, which has ended"


def _ticket(w: Warp) -> int:
    """The number of the warp's next copy from shared memory."""
    races = w.cta.cluster.races
    return races.ticket(races.warps + w.id) if races else 0


def _send(w: Warp, lane: int, run: Callable[[], None], ticket: int) -> None:
    """Begin a copy from shared memory, in the lane's open group."""
    copy = Copy(run)
    copy.ticket = ticket
    _groups(w, lane)[-1].append(copy)
    w.cta.cluster.begin(copy)


REDUCES = ("add", "min", "max", "and", "or", "xor", "inc", "dec")


def _bulk(h: Any, x: Instruction) -> Step:
    parts = x.parts
    spaces = [p.split("::")[0] for p in parts if p.split("::")[0] in ("shared", "global")][:2]
    to, of = h.operands.address(x.operands[0]), h.operands.address(x.operands[1])
    size = h.operands.value(x.operands[2], "u32")
    reduces = next((p for p in parts if p in REDUCES), None) if parts[0] == "reduce" else None
    kind = parts[-1]
    load = spaces[0] == "shared"
    mbarrier = h.operands.address(x.operands[3]) if load else None
    mask = h.operands.value(x.operands[4], "u16") if "multicast::cluster" in parts else None

    def step(w: Warp, m: Any) -> None:
        for lane in lanes_of(m):
            begin(w, lane, int(to(w)[lane]), int(of(w)[lane]), int(size(w)[lane]))

    def begin(w: Warp, lane: int, target: int, source: int, count: int) -> None:
        cluster = w.cta.cluster
        assert not any(n % 16 for n in (count, target, source)), (
            f"a bulk copy of {count} bytes from {source:#x} to {target:#x}: not multiples of 16"
        )
        if "global" in spaces:
            reach(w, np.array([source if load else target]), count)
        clock = cluster.races.fork(w) if cluster.races else None
        ticket = _ticket(w)
        if load:
            known(x, reduces is None)
            assert mbarrier is not None
            bits = None if mask is None else int(mask(w)[lane])
            targets = _targets(w, target, int(mbarrier(w)[lane]), bits)

            def fetch() -> None:
                if spaces[1] == "global":
                    data = cluster.memory.block(source, count).copy()
                else:
                    inside = source + np.arange(count)
                    _read_shared(w, inside, clock, ticket)
                    data = w.cta.shared.data[source : source + count].copy()
                for rank, address, barrier in targets:
                    _deliver(
                        w, rank, address, address + np.arange(count), data, barrier, count, clock
                    )

            cluster.begin(Copy(fetch))
            return
        assert source + count <= w.cta.shared.end, "a copy from beyond shared memory"

        def send() -> None:
            _read_shared(w, source + np.arange(count), clock, ticket)
            data, there = (
                w.cta.shared.data[source : source + count],
                cluster.memory.block(target, count),
            )
            there[:] = data if reduces is None else _reduced(reduces, kind, there, data)

        _send(w, lane, send, ticket)

    return step


DTYPES = {"f32": np.float32, "u32": np.uint32, "s32": np.int32, "u64": np.uint64, "b32": np.uint32}


def _reduced(operation: str, kind: str, there: np.ndarray, data: np.ndarray) -> np.ndarray:
    if kind in ("f16", "bf16"):
        return add_packed(kind, operation, there.view(np.uint16), data.copy().view(np.uint16)).view(
            np.uint8
        )
    function = {"add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or,
                "xor": np.bitwise_xor}[operation]  # fmt: skip
    dtype = DTYPES[kind]
    return function(there.view(dtype), data.copy().view(dtype)).astype(dtype).view(np.uint8)


def add_packed(kind: str, operation: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Sums (or extrema) of halves, in arrays of 16 or of 32 bits, two to a word."""
    f16 = kind.startswith("f16")
    value, bits = (
        (floats.f16_value, floats.f16_bits) if f16 else (floats.bf16_value, floats.bf16_bits)
    )
    x, y = (np.ascontiguousarray(v).view(np.uint16) for v in (a, b))
    function = {"add": np.add, "min": np.fmin, "max": np.fmax}[operation]
    return bits(function(value(x), value(y))).astype(np.uint16).view(a.dtype)


# --- TMA


def _tensor(h: Any, x: Instruction) -> Step:
    parts = x.parts
    assert not any(p.startswith("im2col") for p in parts), f"{x.opcode} is not known"
    reduces = next((p for p in parts if p in REDUCES), None) if parts[0] == "reduce" else None
    load = any(p.startswith("mbarrier") for p in parts)
    where, near = (x.operands[1], x.operands[0]) if load else (x.operands[0], x.operands[1])
    name, coordinates = re.fullmatch(r"\[\s*([^,\s]+)\s*,\s*\{(.*)\}\s*\]", where).groups()  # type: ignore[union-attr]
    table = h.operands.address(f"[{name}]")
    start = [h.operands.value(c.strip(), "s32") for c in coordinates.split(",")]
    shared = h.operands.address(near)
    mbarrier = h.operands.address(x.operands[2]) if load else None
    mask = h.operands.value(x.operands[3], "u16") if "multicast::cluster" in parts else None

    def step(w: Warp, m: Any) -> None:
        for lane in lanes_of(m):
            at = int(table(w)[lane])
            found = w.cta.cluster.maps.get(at - PARAMS)
            assert found is not None, (
                f"no tensor map was given for the parameter at byte {at - PARAMS}"
            )
            place = tuple(int(c(w)[lane]) for c in start)
            if load:
                assert mbarrier is not None
                bits = None if mask is None else int(mask(w)[lane])
                fetch(
                    w, found, place, _targets(w, int(shared(w)[lane]), int(mbarrier(w)[lane]), bits)
                )
            else:
                send(w, lane, found, place, int(shared(w)[lane]))

    def fetch(
        w: Warp, table: TensorMap, place: tuple[int, ...], targets: list[tuple[int, int, int]]
    ) -> None:
        cluster = w.cta.cluster
        if not w.behind:
            addresses, inside = table.elements(place)
            reach(w, addresses[inside], table.size)
        clock = cluster.races.fork(w) if cluster.races else None
        byte = np.arange(table.size)

        def run() -> None:
            addresses, inside = table.elements(place)
            data = np.zeros((len(addresses), table.size), np.uint8)
            if inside.any():
                wanted = addresses[inside]
                for lanes, segment in cluster.memory.find(wanted, table.size):
                    some = (
                        np.flatnonzero(inside) if lanes is None else np.flatnonzero(inside)[lanes]
                    )
                    data[some] = segment.data[(addresses[some] - segment.base)[:, None] + byte]
            for rank, address, barrier in targets:
                places = table.places(address)[:, None] + byte
                _deliver(w, rank, address, places, data, barrier, table.bytes, clock)

        cluster.begin(Copy(run))

    def send(w: Warp, lane: int, table: TensorMap, place: tuple[int, ...], address: int) -> None:
        cluster = w.cta.cluster
        clock = cluster.races.fork(w) if cluster.races else None
        ticket, byte = _ticket(w), np.arange(table.size)
        places = table.places(address)[:, None] + byte
        assert w.cta.shared.has(places, 1), "a copy from beyond shared memory"
        assert reduces is None, f"{x.opcode} is not known"
        if not w.behind:
            addresses, inside = table.elements(place)
            reach(w, addresses[inside], table.size)

        def run() -> None:
            _read_shared(w, places, clock, ticket)
            addresses, inside = table.elements(place)
            if not inside.any():
                return
            data, wanted = w.cta.shared.data[places][inside], addresses[inside]
            for lanes, segment in cluster.memory.find(wanted, table.size):
                some = slice(None) if lanes is None else lanes
                segment.data[(wanted[some] - segment.base)[:, None] + byte] = data[some]

        _send(w, lane, run, ticket)

    return step


def store_async(h: Any, x: Instruction) -> Step:
    """``st.async``: a store to a CTA of the cluster that counts on an mbarrier there."""
    kind = x.parts[-1]
    names = re.findall(r"[^{},\s]+", x.operands[1])
    size = int(kind[1:]) // 8
    address, mbarrier = h.operands.address(x.operands[0]), h.operands.address(x.operands[2])
    sources = [h.operands.value(n, f"u{8 * size}") for n in names]

    def step(w: Warp, m: Any) -> None:
        cluster = w.cta.cluster
        clock = cluster.races.fork(w) if cluster.races else None
        for lane in lanes_of(m):
            data = np.concatenate([s(w)[lane : lane + 1] for s in sources]).view(np.uint8)
            ((rank, place, barrier),) = _targets(
                w, int(address(w)[lane]), int(mbarrier(w)[lane]), None
            )

            def run(
                rank: int = rank,
                place: int = place,
                barrier: int = barrier,
                data: np.ndarray = data,
            ) -> None:
                _deliver(
                    w, rank, place, place + np.arange(len(data)), data, barrier, len(data), clock
                )

            cluster.begin(Copy(run))

    return step
