"""Instructions that touch memory, other lanes or other warps, as functions of a warp and a mask of its lanes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.ptx import copies, matrix
from tests.ptx.access import EVERY, LANE, RANK, lanes_of, owner, places, store
from tests.ptx.arithmetic import KINDS, LANES
from tests.ptx.machine import Warp
from tests.ptx.operands import Operands
from tests.ptx.program import SHARED, Instruction, Program, known
from tests.ptx.sync import MBarrier, Named

__all__ = ["Handlers"]

Step = Callable[[Warp, Any], None]


class Handlers:
    """Makes a function of each instruction of a program."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.operands = Operands(program)

    def __call__(self, x: Instruction) -> Step:
        """The function of (warp, mask); the mask is None for all lanes."""
        name = x.name
        if name == "cp":
            return copies.make(self, x)
        if name in ("ldmatrix", "stmatrix", "mma", "wgmma", "movmatrix"):
            return matrix.make(self, x)
        found = getattr(self, f"_{name}", None)
        assert found is not None, f"{x.opcode} is not known"
        return found(x)

    # --- memory

    def space(self, x: Instruction) -> str:
        """The state space that an opcode names; generic where it names none."""
        for part in x.parts:
            for name in ("global", "shared", "param", "local", "const"):
                if part.split("::")[0] == name:
                    return name
        return "generic"

    def _vector(self, x: Instruction, text: str) -> tuple[str, list[str]]:
        kind = x.parts[-1]
        return kind, re.findall(r"[^{},\s]+", text)

    def _ld(self, x: Instruction) -> Step:
        kind, names = self._vector(x, x.operands[0])
        dtype = np.dtype(KINDS[kind][2])
        size = dtype.itemsize
        total, shift = size * len(names), size.bit_length() - 1
        signed = dtype.kind == "i"
        targets = [None if n == "_" else self.operands.row(n, signed) for n in names]
        address, space = self.operands.address(x.operands[1]), self.space(x)

        def step(w: Warp, m: Any) -> None:
            a = address(w)
            a = a if m is None else a[m]
            for lanes, segment, offset in places(w, space, a, total, False):
                view, index = segment.view(size), offset >> shift
                for i, target in enumerate(targets):
                    if target is None:
                        continue
                    value = view[index + i]
                    store(w, target, value.view(dtype) if signed else value, m, lanes)

        return step

    def _st(self, x: Instruction) -> Step:
        if x.parts[0] == "async":
            return copies.store_async(self, x)
        kind, names = self._vector(x, x.operands[1])
        size = np.dtype(KINDS[kind][2]).itemsize
        total, shift = size * len(names), size.bit_length() - 1
        sources = [self.operands.value(n, f"u{8 * size}") for n in names]
        address, space = self.operands.address(x.operands[0]), self.space(x)

        def step(w: Warp, m: Any) -> None:
            a = address(w)
            a = a if m is None else a[m]
            w.cta.cluster.effects += 1
            for lanes, segment, offset in places(w, space, a, total, True):
                view, index = segment.view(size), offset >> shift
                for i, source in enumerate(sources):
                    value = source(w)
                    value = value if m is None else value[m]
                    view[index + i] = value if lanes is None else value[lanes]

        return step

    _ldu = _ld

    def _atom(self, x: Instruction) -> Step:
        kind = x.parts[-1]
        operation = next((p for p in x.parts if p in ATOMS), None)
        assert operation is not None, f"{x.opcode} is not known"
        at = 0 if x.name == "red" else 1
        address = self.operands.address(x.operands[at])
        names = re.findall(r"[^{},\s]+", x.operands[at + 1])
        values = [self.operands.value(n, kind) for n in names]
        more = [self.operands.value(n, kind) for n in x.operands[at + 2 :]]
        targets = []
        if x.name == "atom":
            targets = [
                None if n == "_" else self.operands.row(n, False)
                for n in re.findall(r"[^{},\s]+", x.operands[0])
            ]
        dtype = np.dtype(KINDS[kind][2])
        size, space, function = dtype.itemsize, self.space(x), ATOMS[operation]
        packed = kind if kind in ("f16x2", "bf16x2", "bf16", "f16") else ""

        def step(w: Warp, m: Any) -> None:
            mask = EVERY if m is None else m
            a, given = address(w), [v(w) for v in values]
            third = [v(w) for v in more]
            w.cta.cluster.effects += 1
            before = [np.zeros(LANES, np.dtype(f"u{size}")) for _ in given]
            for lane in np.flatnonzero(mask):
                ((_, segment, offset),) = places(
                    w, space, a[lane : lane + 1], size * len(given), True, atomic=True
                )
                view = segment.view(size)
                for i, value in enumerate(given):
                    cell = view[offset // size + i]
                    before[i][lane] = cell[0]
                    old, new = cell.view(dtype), value[lane : lane + 1]
                    if packed:
                        found = copies.add_packed(packed, operation, old, new)
                    else:
                        found = function(old, new, *(t[lane : lane + 1] for t in third))
                    view[offset // size + i] = found.astype(dtype).view(cell.dtype)
            for target, value in zip(targets, before, strict=False):
                if target is not None:
                    store(w, target, value if m is None else value[m], m, None)

        return step

    _red = _atom

    def _mapa(self, x: Instruction) -> Step:
        width = x.parts[-1]
        target = self.operands.row(x.operands[0], False)
        address, rank = (
            self.operands.value(x.operands[1], width),
            self.operands.value(x.operands[2], "u32"),
        )

        def step(w: Warp, m: Any) -> None:
            a, r = address(w).astype(np.int64), rank(w).astype(np.int64)
            tag = a & SHARED
            value = (a & ((1 << RANK) - 1)) | (r + 1) << RANK | tag
            assert (r[EVERY if m is None else m] < w.cta.cluster.size).all(), (
                "mapa of a rank outside of the cluster"
            )
            value = value.astype(np.uint64 if width[-2:] == "64" else np.uint32)
            store(w, target, value if m is None else value[m], m, None)

        return step

    def _createpolicy(self, x: Instruction) -> Step:
        target = self.operands.row(x.operands[0], False)

        def step(w: Warp, m: Any) -> None:
            store(w, target, np.zeros(LANES if m is None else int(m.sum()), np.uint64), m, None)

        return step

    def _isspacep(self, x: Instruction) -> Step:
        target, address = (
            self.operands.row(x.operands[0], False),
            self.operands.value(x.operands[1], "u64"),
        )
        shared = x.parts[0].startswith("shared")
        assert shared or x.parts[0] == "global", f"{x.opcode} is not known"

        def step(w: Warp, m: Any) -> None:
            found = ((address(w) >> np.uint64(56)) == 1) == shared
            store(w, target, found if m is None else found[m], m, None)

        return step

    def _fence(self, x: Instruction) -> Step:
        """Barriers make order; fences are noted for the check of races, those between proxies above all."""
        if x.parts[0] in ("acq_rel", "sc"):

            def note(w: Warp, m: Any) -> None:
                w.fenced = True

            return note
        proxies = x.opcode.startswith("fence.proxy.async")
        if not proxies and x.parts[0] != "mbarrier_init":
            return nothing

        def step(w: Warp, m: Any) -> None:
            for barrier in w.cta.mbarriers.values():
                barrier.fenced |= barrier.maker == w.id
            if proxies and w.cta.cluster.races:
                w.cta.cluster.races.fence(w)

        return step

    def _griddepcontrol(self, x: Instruction) -> Step:
        if x.parts[0] != "wait":
            return nothing

        def step(w: Warp, m: Any) -> None:
            w.behind = w.cta.cluster.waited = True

        return step

    # --- lanes

    def _members(self, x: Instruction) -> Callable[[Warp], int]:
        value = self.operands.value(x.operands[-1], "u32")
        return lambda w: int(value(w)[0])

    def _shfl(self, x: Instruction) -> Step:
        mode = x.parts[1]
        names = x.operands[0].split("|")
        target = self.operands.row(names[0], False)
        flag = self.operands.row(names[1], False) if len(names) > 1 and names[1] != "_" else None
        a, b, c = (self.operands.value(o, "u32") for o in x.operands[1:4])

        def step(w: Warp, m: Any) -> None:
            active = EVERY if m is None else m
            clamp = c(w).astype(np.int64)
            other = b(w).astype(np.int64) & 31
            segment = clamp >> 8 & 31
            most = (LANE & segment) | (clamp & 31 & ~segment)
            if mode == "up":
                source, inside = LANE - other, LANE - other >= most
            elif mode == "down":
                source, inside = LANE + other, LANE + other <= most
            elif mode == "bfly":
                source = LANE ^ other
                inside = source <= most
            else:
                assert mode == "idx", f"{x.opcode} is not known"
                source = (LANE & segment) | (other & ~segment)
                inside = source <= most
            source = np.where(inside, source, LANE)
            assert active[source[active]].all(), f"{x.opcode} from a lane that does not take part"
            value = a(w)[source]
            store(w, target, value if m is None else value[m], m, None)
            if flag is not None:
                store(w, flag, inside if m is None else inside[m], m, None)

        return step

    def _vote(self, x: Instruction) -> Step:
        mode = x.parts[1]
        target, given = (
            self.operands.row(x.operands[0], False),
            self.operands.value(x.operands[1], "pred"),
        )

        def step(w: Warp, m: Any) -> None:
            active = EVERY if m is None else m
            value = given(w) & active
            if mode == "ballot":
                found: Any = np.uint32(int((value.astype(np.int64) << LANE).sum()))
            else:
                found = {
                    "any": value.any(), "all": value.sum() == active.sum(), "uni": value.sum() in (0, active.sum()),
                }[mode]  # fmt: skip
            store(w, target, np.full(int(active.sum()), found), m, None)

        return step

    def _activemask(self, x: Instruction) -> Step:
        target = self.operands.row(x.operands[0], False)

        def step(w: Warp, m: Any) -> None:
            active = EVERY if m is None else m
            bits = np.uint32(int((active.astype(np.int64) << LANE).sum()))
            store(w, target, np.full(int(active.sum()), bits), m, None)

        return step

    def _redux(self, x: Instruction) -> Step:
        operation, kind = x.parts[1], x.parts[-1]
        known(x, kind in ("s32", "u32", "b32"), operation in REDUCED)
        target, given = (
            self.operands.row(x.operands[0], False),
            self.operands.value(x.operands[1], kind),
        )

        def step(w: Warp, m: Any) -> None:
            active = EVERY if m is None else m
            value = given(w)[active]
            found = REDUCED[operation].reduce(value, dtype=value.dtype)
            store(w, target, np.full(len(value), found).view(np.uint32), m, None)

        return step

    def _match(self, x: Instruction) -> Step:
        assert x.parts[0] == "any", f"{x.opcode} is not known"
        target, given = (
            self.operands.row(x.operands[0], False),
            self.operands.value(x.operands[1], x.parts[-1]),
        )

        def step(w: Warp, m: Any) -> None:
            active = EVERY if m is None else m
            value = given(w)
            same = (value[:, None] == value[None, :]) & active
            bits = (same.astype(np.int64) << LANE).sum(axis=1).astype(np.uint32)
            store(w, target, bits[active], m, None)

        return step

    def _elect(self, x: Instruction) -> Step:
        lane, flag = x.operands[0].split("|")
        rows = [None if n == "_" else self.operands.row(n, False) for n in (lane, flag)]

        def step(w: Warp, m: Any) -> None:
            active = EVERY if m is None else m
            first = int(np.argmax(active))
            for row, value in zip(
                rows, (np.full(LANES, first, np.uint32), first == LANE), strict=True
            ):
                if row is not None:
                    store(w, row, value[active], m, None)

        return step

    def _setmaxnreg(self, x: Instruction) -> Step:
        count = int(x.operands[0])
        assert count % 8 == 0, f"{count} registers"
        assert 24 <= count <= 256, f"{count} registers"
        more = x.parts[0] == "inc"

        def step(w: Warp, m: Any) -> None:
            assert m is None, f"{x.opcode} without the whole warp"
            assert (count >= w.registers) == more or count == w.registers, (
                f"{x.opcode} {count} from {w.registers}"
            )
            w.cta.cluster.effects += 1
            if more:
                w.wanted, w.waiting = count, f"{count} registers a thread"
            else:
                w.registers = count
            w.cta.trade()

        return step

    # --- barriers

    def _bar(self, x: Instruction) -> Step:
        if x.opcode.startswith("bar.warp"):
            return nothing
        if x.opcode.startswith("barrier.cluster"):
            return self._cluster(x)
        kind = next((p for p in x.parts if p in ("sync", "arrive")), None)
        assert kind is not None, f"{x.opcode} is not known"
        given = [self.operands.value(o, "u32") for o in x.operands]

        def step(w: Warp, m: Any) -> None:
            assert m is None or (m == w.live).all(), f"{x.opcode} without the whole warp"
            values = [g(w) for g in given]
            for v in values:
                v = v if m is None else v[m]
                assert (v == v[0]).all(), f"{x.opcode}: lanes name different barriers"
            first = 0 if m is None else int(np.argmax(m))
            number, *count = (int(v[first]) for v in values)
            assert 0 <= number < 16, f"named barrier {number}"
            wanted = count[0] if count else 0
            assert wanted % LANES == 0, f"a barrier of {wanted} threads"
            barrier = w.cta.barriers.setdefault(number, Named())
            if barrier.arrived:
                assert barrier.count == wanted, (
                    f"barrier {number} of {barrier.count} and of {wanted} threads"
                )
            barrier.count = wanted
            barrier.arrived += LANES
            races = w.cta.cluster.races
            w.cta.cluster.effects += 1
            barrier.behind |= w.behind
            if races:
                barrier.clock = races.release(w, barrier.clock)
            if kind == "sync":
                barrier.waiting.append(w)
                w.waiting = f"barrier {number}"
            w.cta.release(barrier)

        return step

    _barrier = _bar

    def _cluster(self, x: Instruction) -> Step:
        def step(w: Warp, m: Any) -> None:
            assert m is None or (m == w.live).all(), f"{x.opcode} without the whole warp"
            cluster = w.cta.cluster
            if "arrive" in x.parts:
                cluster.arrive(w, w.fenced or "relaxed" not in x.parts)
                w.fenced = False
            else:
                cluster.wait(w)

        return step

    def _mbarrier(self, x: Instruction) -> Step:
        operation = x.parts[0]
        if operation in ("test_wait", "try_wait"):
            return self._try_wait(x)
        if operation == "init":
            address, count = (
                self.operands.address(x.operands[0]),
                self.operands.value(x.operands[1], "u32"),
            )

            def start(w: Warp, m: Any) -> None:
                for lane in lanes_of(m):
                    a, n = int(address(w)[lane]), int(count(w)[lane])
                    assert a % 8 == 0, f"an mbarrier at {a:#x}"
                    assert 0 <= a <= w.cta.shared.end - 8, f"an mbarrier at {a:#x}"
                    assert 0 < n < 1 << 20, f"an mbarrier of {n} arrivals"
                    races = w.cta.cluster.races
                    w.cta.mbarriers[a] = MBarrier(
                        n,
                        name=f"mbarrier {a:#x} of CTA {w.cta.block[0]}",
                        maker=w.id,
                        made=races.epoch(w.id) if races else 0,
                    )
                    w.cta.cluster.effects += 1

            return start
        if operation == "inval":
            address = self.operands.address(x.operands[0])

            def end(w: Warp, m: Any) -> None:
                for lane in lanes_of(m):
                    w.cta.mbarriers.pop(int(address(w)[lane]), None)

            return end
        return self._arrive(x)

    def _arrive(self, x: Instruction) -> Step:
        parts, operands = x.parts, list(x.operands)
        state = operands.pop(0) if not operands[0].startswith("[") else "_"
        target = None if state == "_" else self.operands.row(state, False)
        address = self.operands.address(operands[0])
        more = self.operands.value(operands[1], "u32") if len(operands) > 1 else None
        arrives, expects = "arrive" in parts, "expect_tx" in parts
        completes = parts[0] == "complete_tx"
        assert arrives or expects or completes, f"{x.opcode} is not known"
        assert "noComplete" not in parts, f"{x.opcode} is not known"

        def step(w: Warp, m: Any) -> None:
            a = address(w)
            number = more(w) if more else None
            w.cta.cluster.effects += 1
            races = w.cta.cluster.races
            token = np.zeros(LANES, np.uint64)
            clock = None
            for lane in lanes_of(m):
                cta, place = owner(w, int(a[lane]))
                barrier = cta.mbarrier(place, w)
                barrier.behind |= w.behind
                count = 1 if number is None else int(number[lane])
                if expects:
                    barrier.expect(count)
                    count = 1
                if completes:
                    barrier.complete(count)
                if arrives:
                    if races:
                        clock = races.release(w, None) if clock is None else clock
                        barrier.clock = (
                            clock.copy()
                            if barrier.clock is None
                            else np.maximum(barrier.clock, clock)
                        )
                    token[lane] = barrier.arrive(count)
            if target is not None:
                store(w, target, token if m is None else token[m], m, None)

        return step

    def _try_wait(self, x: Instruction) -> Step:
        target = self.operands.row(x.operands[0], False)
        address = self.operands.address(x.operands[1])
        parity = self.operands.value(x.operands[2], "u32" if "parity" in x.parts else "b64")

        def step(w: Warp, m: Any) -> None:
            a, p = address(w), parity(w)
            passed = np.zeros(LANES, bool)
            done: dict[tuple[int, int], bool] = {}
            for lane in lanes_of(m):
                key = (int(a[lane]), int(p[lane]))
                if key not in done:
                    assert key[1] in (0, 1), f"parity {key[1]}"
                    barrier = w.cta.mbarrier(key[0], w)
                    done[key] = barrier.passed(key[1])
                    w.behind |= done[key] and barrier.over
                    if done[key] and w.cta.cluster.races:
                        w.cta.cluster.races.acquire(w, barrier.done)
                passed[lane] = done[key]
            w.stalled = not all(done.values())
            store(w, target, passed if m is None else passed[m], m, None)

        return step


ATOMS: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: a + b,
    "min": np.fmin,
    "max": np.fmax,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "exch": lambda a, b: b,
    "cas": lambda a, b, c: np.where(a == b, c, a),
    "inc": lambda a, b: np.where(a >= b, 0, a + 1),
    "dec": lambda a, b: np.where((a == 0) | (a > b), b, a - 1),
}
REDUCED = {
    "add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}  # fmt: skip


def nothing(w: Warp, m: Any) -> None:
    """What is of no consequence here."""
