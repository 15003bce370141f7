"""Warps, CTAs and clusters that run a program.

A warp has one place in the program, or one for each lane where a branch has parted them; the rearmost lanes then go
first, which brings lanes together again behind the branch. Lanes that have to wait let the others of their warp pass.
Warps take turns in order, or at random under a seed, and so do copies that are under way. Some copies may be late: they
come, one at a time, when nothing else can go on, as those of a page that no TLB knows may.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.ptx.arithmetic import LANES
from tests.ptx.memory import Memory, Shared
from tests.ptx.program import PARAMS, Program
from tests.ptx.races import Races
from tests.ptx.sync import MBarrier, Named
from tests.ptx.translate import Translator, is_collective

__all__ = ["Cluster", "Copy", "Cta", "Deadlock", "Warp"]

GONE = 1 << 40
"""The place of a lane that has returned."""

CLUSTER = "the cluster"

TURN = 512
"""Runs of a warp's turn, unless it has to wait."""


class Deadlock(AssertionError):
    """Nothing can go on. The message says where each warp stands."""


class Copy:
    """An asynchronous operation: done when its turn comes, or when somebody waits for it.

    ``ticket``: its number among the warp's copies from shared memory, where races are looked for. ``late``: whether it
    comes only when nothing else can go on.
    """

    def __init__(self, run: Callable[[], None]) -> None:
        self._run: Callable[[], None] | None = run
        self.ticket = 0
        self.late = False

    @property
    def done(self) -> bool:
        """Whether it has been done."""
        return self._run is None

    def force(self) -> None:
        """Do it now, unless it has been done."""
        if self._run is not None:
            run, self._run = self._run, None
            run()


class Warp:
    """32 threads.

    Attributes:
        lists: rows of the registers by class and type; see ``translate``. pc: place of all lanes, or None where ``pcs``
            has one for each. waiting: what for, or empty. stalled: whether an mbarrier was not through. at: the
            instruction in work. products: WGMMAs that nobody has waited for. copies: what ``cp.async`` has begun.
            bulk: of each lane, the bulk stores it has begun. registers: of a thread; wanted: more of them, or 0.
            fenced: whether a fence stands before its next arrival at the cluster's barrier. behind: whether it has
            waited for the kernel in front, or for a warp that has.
    """

    def __init__(self, cta: Cta, index: int) -> None:
        program = cta.cluster.program
        self.behind = not program.waits
        self.cta, self.index = cta, index
        self.id = cta.rank * cta.warp_count + index
        self.files = {
            "p": np.zeros((program.counts["p"], LANES), np.bool_),
            "h": np.full((program.counts["h"], LANES), 0xFFFF, np.uint16),
            "u": np.full((program.counts["u"], LANES), 0xFFFFFFFF, np.uint32),
            "U": np.full((program.counts["U"], LANES), 0xFFFFFFFFFFFFFFFF, np.uint64),
        }
        p, h, u, big = (self.files[k] for k in "phuU")
        views = (
            p,
            h,
            h.view(np.int16),
            h.view(np.float16),
            u,
            u.view(np.int32),
            u.view(np.float32),
        )
        self.lists = tuple(list(v) for v in (*views, big, big.view(np.int64), big.view(np.float64)))
        self.pc: int | None = 0
        self.pcs = np.zeros(LANES, np.int64)
        self.waiting = ""
        self.stalled = False
        self.done = False
        self.at = 0
        self.phase = -1
        self.registers = cta.cluster.program.registers_per_thread
        self.wanted = 0
        self.fenced = False
        self.products: list[Any] = []
        self.copies: list[Any] = [[]]
        self.bulk: dict[int, list[list[Copy]]] = {}
        self._special = self._registers()

    def _registers(self) -> dict[str, np.ndarray]:
        cta, block = self.cta, self.cta.cluster.program.block
        lane = np.arange(LANES)
        thread = self.index * LANES + lane
        grid = cta.cluster.grid
        found = {
            "%tid.x": thread % block[0],
            "%tid.y": thread // block[0] % block[1],
            "%tid.z": thread // (block[0] * block[1]),
            "%laneid": lane,
            "%warpid": self.index,
            "%lanemask_lt": (1 << lane) - 1,
            "%lanemask_le": (2 << lane) - 1,
            "%lanemask_eq": 1 << lane,
            "%lanemask_gt": 0xFFFFFFFF & -(2 << lane),
            "%lanemask_ge": 0xFFFFFFFF & -(1 << lane),
            "%cluster_ctarank": cta.rank,
            "%cluster_nctarank": cta.cluster.size,
            "%cluster_ctaid.x": cta.rank,
            "%cluster_nctaid.x": cta.cluster.size,
            "%clusterid.x": cta.block[0] // cta.cluster.size,
            "%nclusterid.x": grid[0] // cta.cluster.size,
            "%smid": cta.block[0],
            "%nsmid": grid[0],
            "%clock": 0, "%clock64": 0, "%globaltimer": 0, "%dynamic_smem_size": cta.shared.end,
        }  # fmt: skip
        for axis, name in enumerate("xyz"):
            found[f"%ctaid.{name}"] = cta.block[axis]
            found[f"%nctaid.{name}"] = grid[axis]
            found[f"%ntid.{name}"] = block[axis]
        for name in "yz":
            found[f"%cluster_ctaid.{name}"], found[f"%cluster_nctaid.{name}"] = 0, 1
        return {k: np.full(LANES, v, np.int64).astype(np.uint32) for k, v in found.items()}

    def special(self, name: str) -> np.ndarray:
        """A special register, uint32."""
        assert name in self._special, f"{name} is not known"
        return self._special[name]

    # --- what translated code calls

    def go(self, mask: np.ndarray, to: int) -> None:
        """Move the lanes of ``mask`` on."""
        self.pcs[mask] = to

    def fork(self, mask: np.ndarray | None, taken: np.ndarray, to: int, otherwise: int) -> None:
        """Move lanes by a predicate."""
        places = np.where(taken, to, otherwise)
        if mask is None:
            self.pcs, self.pc = places, None
        else:
            self.pcs[mask] = places[mask]

    def leave(self, mask: np.ndarray | None, some: np.ndarray | None, otherwise: int) -> None:
        """Return, in the lanes of ``mask`` (of ``some`` of them; the others go on)."""
        if mask is None:
            if some is None:
                self.pcs, self.pc = np.full(LANES, GONE), None
            else:
                self.pcs, self.pc = np.where(some, GONE, otherwise), None
        elif some is None:
            self.pcs[mask] = GONE
        else:
            self.pcs[mask] = np.where(some, GONE, otherwise)[mask]

    # --- running

    @property
    def live(self) -> np.ndarray:
        """Lanes that have not returned."""
        return np.ones(LANES, bool) if self.pc is not None else self.pcs != GONE

    def run(self, turns: int) -> None:
        """Run until there is something to wait for, the threads have returned, or the turn is over."""
        code = self.cta.cluster.code
        self.stalled = False
        passed_over: set[int] = set()
        for _ in range(turns):
            if self.pc is not None:
                self.pc = code.run(self.pc, False)(self, None)
            else:
                place = self._rearmost(passed_over)
                if place is None:
                    return
                at, mask = place
                if mask.all():
                    self.pc = at
                    continue
                if not self._gathered(at, mask):
                    passed_over.add(at)
                    continue
                code.run(at, True)(self, mask)
                if self.stalled:
                    # Others of this warp may be what these lanes wait for.
                    passed_over.update(int(x) for x in self.pcs[mask])
                    self.stalled = False
                    continue
            if self.waiting or self.stalled:
                return
        self.cta.cluster.effects += 1

    def _rearmost(self, passed_over: set[int]) -> tuple[int, np.ndarray] | None:
        """The place to go on from and the lanes that are there."""
        places = {int(x) for x in self.pcs} - {GONE}
        if not places:
            self.done = True
            self.cta.leave(self)
            return None
        left = places - passed_over
        if not left:
            if all(is_collective(self.cta.cluster.program.code[x]) for x in places):
                x = self.cta.cluster.program.code[min(places)]
                raise AssertionError(f"{x.opcode} without the whole warp")
            self.stalled = True
            return None
        at = min(left)
        return at, self.pcs == at

    def _gathered(self, at: int, mask: np.ndarray) -> bool:
        """Whether the lanes that an instruction needs are there."""
        x = self.cta.cluster.program.code[at]
        if not is_collective(x):
            return True
        if x.opcode == "bar.warp.sync" or x.name in ("shfl", "vote", "redux", "elect", "match"):
            text = x.operands[-1]
            if text.lstrip("-").isdigit() or text.startswith("0x"):
                value = np.full(LANES, int(text, 0) & 0xFFFFFFFF)
            else:
                file, number = self.cta.cluster.program.registers[text]
                value = self.files[file][number]
            bits = int(value[int(np.flatnonzero(mask)[0])])
            wanted = (bits >> np.arange(LANES) & 1).astype(bool)
        else:
            wanted = np.ones(LANES, bool) if x.name not in ("bar", "barrier") else self.live
        if (wanted & ~self.live).any():
            raise AssertionError(
                f"{x.opcode} without the whole warp: some of its threads have returned"
            )
        return not (wanted & ~mask).any()

    def place(self) -> str:
        """Where it stands, for an error."""
        code = self.cta.cluster.program.code
        places = sorted({int(x) for x in self.pcs} - {GONE}) if self.pc is None else [self.pc]
        shown = "; ".join(f"{p}: {code[p]}" for p in places[:3])
        return f"CTA {self.cta.block[0]} warp {self.index} at {shown} {self.waiting}"


class Cta:
    """The warps of a CTA and what they share."""

    def __init__(self, cluster: Cluster, block: tuple[int, int, int], rank: int, size: int) -> None:
        self.cluster, self.block, self.rank = cluster, block, rank
        self.shared = Shared(size)
        self.warp_count = -(-cluster.program.threads // LANES)
        assert cluster.program.threads % LANES == 0, "whole warps"
        self.barriers: dict[int, Named] = {}
        self.mbarriers: dict[int, MBarrier] = {}
        self.registers = self.warp_count * cluster.program.registers_per_thread
        self.warps = [Warp(self, i) for i in range(self.warp_count)]

    def leave(self, warp: Warp) -> None:
        """A warp has returned: barriers of all threads do not wait for it."""
        assert not warp.products, "returned before wgmma.wait_group"
        self.cluster.effects += 1
        for barrier in self.barriers.values():
            if barrier.waiting and barrier.count == 0:
                self.release(barrier)
        self.cluster.turn()

    def release(self, barrier: Named) -> None:
        """Let the warps of a named barrier go on if all have come."""
        wanted = barrier.count or LANES * sum(not w.done for w in self.warps)
        assert barrier.arrived <= wanted, f"{barrier.arrived} threads at a barrier of {wanted}"
        if barrier.arrived == wanted:
            races = self.cluster.races
            for w in barrier.waiting:
                w.waiting = ""
                w.behind |= barrier.behind
                if races:
                    races.acquire(w, barrier.clock)
            barrier.arrived, barrier.waiting, barrier.count, barrier.clock = 0, [], 0, None
            barrier.behind = False

    def trade(self) -> None:
        """Give registers to the warps that want more, as far as others have given them back."""
        for w in self.warps:
            others = sum(x.registers for x in self.warps if x is not w)
            if w.wanted and others + w.wanted <= self.registers:
                w.registers, w.wanted, w.waiting = w.wanted, 0, ""

    @property
    def over(self) -> bool:
        """Whether all of its warps have returned: its shared memory is somebody else's then."""
        return all(w.done for w in self.warps)

    def mbarrier(self, address: int, user: Warp | None = None) -> MBarrier:
        """The mbarrier at an address of its shared memory, for a warp, or for a copy."""
        found = self.mbarriers.get(address)
        assert found is not None, (
            f"no mbarrier was initialised at {address:#x} of CTA {self.block[0]}"
        )
        if user is None or user.id != found.maker:
            assert found.fenced, f"{found.name} is used with no fence behind its initialisation"
            races = self.cluster.races
            if races and user is not None and not found.shown:
                known = races.clocks[user.id, 0, found.maker]
                assert found.made <= known, f"race: {found.name} is used before it is initialised"
        return found


class Cluster:
    """CTAs that run together: those of a cluster, or of several.

    Attributes:
        effects: grows with whatever another warp could wait for. queue: copies under way. waited: whether any warp has
            waited for the kernel in front: one that has not may end before it, and what comes behind not know.
    """

    def __init__(
        self,
        program: Program,
        code: Translator,
        memory: Memory,
        parameters: np.ndarray,
        given: np.ndarray,
        maps: dict[int, Any],
        blocks: list[tuple[int, int, int]],
        grid: tuple[int, int, int],
        shared: int,
        seed: int | None,
        races: bool,
        late: float = 0.0,
    ) -> None:
        self.program, self.code, self.memory, self.maps = program, code, memory, maps
        self.parameters, self.given = parameters, given
        self.size, self.grid = len(blocks), grid
        self.effects = 0
        self.queue: list[Copy] = []
        self.random = None if seed is None else random.Random(seed)
        self._late, self._delays = late, random.Random(seed)
        self.ctas = [Cta(self, block, i, shared) for i, block in enumerate(blocks)]
        self.warps = [w for cta in self.ctas for w in cta.warps]
        self.races = Races(self, len(self.warps), shared) if races else None
        self._arrived: set[int] = set()
        self.generation = 0
        self._clock: Any = None
        self._done: Any = None
        self._behind = self._over = False
        self.waited = not program.waits

    def parameter(self, address: int, size: int) -> np.ndarray:
        """Bytes of parameter space."""
        at = address - PARAMS
        assert 0 <= at <= len(self.parameters) - size, "no parameter"
        assert self.given[at : at + size].all(), f"a parameter that was not given, at byte {at}"
        return self.parameters[at : at + size]

    def begin(self, copy: Copy) -> None:
        """Put a copy under way."""
        self.effects += 1
        copy.late = self._late > self._delays.random()
        self.queue.append(copy)

    # --- the barrier of the cluster

    def arrive(self, warp: Warp, ordered: bool) -> None:
        """A warp arrives at the cluster's barrier; ``ordered``: what it has done is seen by those that wait."""
        if self.races and ordered:
            self._clock = self.races.release(warp, self._clock)
        assert warp.id not in self._arrived, "a warp arrived twice at the cluster's barrier"
        self._behind |= warp.behind
        self._arrived.add(warp.id)
        warp.phase = self.generation
        self.effects += 1
        self.turn()

    def turn(self) -> None:
        """End the phase of the cluster's barrier if all warps that live have arrived."""
        live = {w.id for w in self.warps if not w.done}
        if self._arrived and live <= self._arrived:
            self._arrived = set()
            self.generation += 1
            self._done, self._clock = self._clock, None
            self._over, self._behind = self._behind, False
            for barrier in (b for cta in self.ctas for b in cta.mbarriers.values()):
                barrier.shown |= barrier.fenced
            for w in self.warps:
                if w.waiting == CLUSTER:
                    w.waiting = ""
                    self._pass(w)

    def wait(self, warp: Warp) -> None:
        """A warp waits at the cluster's barrier."""
        if warp.phase == self.generation:
            warp.waiting = CLUSTER
        else:
            self._pass(warp)

    def _pass(self, warp: Warp) -> None:
        warp.behind |= self._over
        if self.races:
            self.races.acquire(warp, self._done)

    # --- running

    @staticmethod
    def run_together(clusters: list[Cluster]) -> None:
        """Run all warps of some clusters to their ends, and all copies."""
        with np.errstate(all="ignore"):
            still = 0
            while any(not w.done for c in clusters for w in c.warps):
                before = sum(c.effects for c in clusters)
                for c in clusters:
                    c._round()
                still = 0 if sum(c.effects for c in clusters) != before else still + 1
                if still >= 4:
                    raise Deadlock(
                        "\n".join(["nothing can go on", *(c.places() for c in clusters)])
                    )
            for c in clusters:
                c._flush()
                assert c.waited, "no warp has waited for the kernel in front"

    def places(self) -> str:
        """Where everything stands, for an error."""
        lines = [w.place() for w in self.warps if not w.done]
        lines += [
            f"CTA {c.block[0]} mbarrier {a:#x}: {b.pending} of {b.count} arrivals and {b.bytes} bytes awaited, "
            f"parity {b.phase}"
            for c in self.ctas
            for a, b in sorted(c.mbarriers.items())
        ]
        lines += [
            f"CTA {c.block[0]} barrier {i}: {b.arrived} of {b.count or 'all'} threads"
            for c in self.ctas
            for i, b in sorted(c.barriers.items())
            if b.arrived
        ]
        return "\n".join(lines)

    def _flush(self) -> None:
        """Do all copies."""
        while self.queue:
            some, self.queue = self.queue, []
            for copy in some:
                copy.force()

    def _round(self) -> None:
        before = self.effects
        warps = list(self.warps)
        if self.random:
            self.random.shuffle(warps)
        for w in warps:
            if w.done or w.waiting:
                continue
            try:
                w.run(self.random.randint(1, 40) if self.random else TURN)
            except AssertionError as error:
                error.add_note(
                    f"CTA {w.cta.block[0]} warp {w.index}, near {w.at}: {self.program.code[w.at]}"
                )
                raise
            if self.random and self.random.random() < 0.5:
                self._copies()
        self._copies()
        if self.queue and self.effects == before:
            self.queue.pop(self._delays.randrange(len(self.queue))).force()
            self.effects += 1

    def _copies(self) -> None:
        """Do the copies that are under way, or some of them."""
        some, self.queue = self.queue, []
        for copy in some:
            if copy.done:
                continue
            if copy.late:
                self.queue.append(copy)
            elif self.random and self.random.random() < 0.5:
                self.queue.append(copy)
                self.effects += 1
            else:
                copy.force()
                self.effects += 1
