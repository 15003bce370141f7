"""Matrix instructions: ldmatrix, stmatrix, movmatrix, mma.sync and wgmma, on the fragments that lanes hold.

Products are added in float64 and rounded to float32 once an instruction; the hardware rounds more often, of FP8
coarser, which ``cutting`` imitates.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np

from tests.ptx import floats
from tests.ptx.arithmetic import LANES
from tests.ptx.machine import Warp
from tests.ptx.maps import swizzled
from tests.ptx.program import Instruction, known

__all__ = ["cut_sum", "cutting", "make"]

Step = Callable[[Warp, Any], None]
LANE = np.arange(LANES)
G, T = LANE // 4, LANE % 4

CODES = np.arange(256, dtype=np.uint32)
with np.errstate(invalid="ignore"):  # signalling NaN among the codes
    _E4M3 = floats.e4m3_value(CODES).astype(np.float64)
    _E5M2 = floats.e5m2_value(CODES).astype(np.float64)

VALUES: dict[str, tuple[int, Callable[[np.ndarray], np.ndarray]]] = {
    "bf16": (16, lambda x: (x.astype(np.uint32) << 16).view(np.float32).astype(np.float64)),
    "f16": (16, lambda x: x.view(np.float16).astype(np.float64)),
    "e4m3": (8, lambda x: _E4M3[x]),
    "e5m2": (8, lambda x: _E5M2[x]),
    "s8": (8, lambda x: x.view(np.int8).astype(np.float64)),
    "u8": (8, lambda x: x.astype(np.float64)),
    "tf32": (32, lambda x: (x & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)),
}
"""Of a type: its bits, and its values from their patterns."""


_CUTS = [False]


@contextmanager
def cutting() -> Iterator[None]:
    """In the block wgmma of FP8 adds as Hopper does, in 13 fraction bits; slow."""
    _CUTS[0] = True
    try:
        yield
    finally:
        _CUTS[0] = False


def cut_sum(a: np.ndarray, b: np.ndarray, before: np.ndarray) -> np.ndarray:
    """before + a @ b.T where all terms of a sum, and the sum, are cut at 2^-13 of the largest, toward zero.

    a: (rows, K). b: (columns, K). before: (rows, columns). At once: float64 (rows, columns, K).
    """
    terms = np.concatenate([a[:, None] * b[None], before[..., None]], axis=-1)
    unit = np.ldexp(1.0, np.frexp(np.abs(terms).max(axis=-1))[1] - 14)
    total = (np.trunc(terms / unit[..., None])).sum(axis=-1) * unit
    unit = np.ldexp(1.0, np.frexp(total)[1] - 14)
    return np.trunc(total / unit) * unit


def make(h: Any, x: Instruction) -> Step:
    """The function of a matrix instruction."""
    if x.name in ("ldmatrix", "stmatrix"):
        return _move(h, x)
    if x.name == "movmatrix":
        return _turn(h, x)
    if x.name == "mma":
        return _mma(h, x)
    assert x.name == "wgmma", f"{x.opcode} is not known"
    kind = x.parts[0]
    if kind == "fence":
        return lambda w, m: None
    if kind == "commit_group":
        return _commit
    if kind == "wait_group":
        return _wait(int(x.operands[0]))
    return _wgmma(h, x)


def whole(x: Instruction, m: Any) -> None:
    assert m is None, f"{x.opcode} without the whole warp"


def names(text: str) -> list[str]:
    return re.findall(r"[^{},\s]+", text)


def registers(h: Any, text: str) -> np.ndarray:
    """Numbers of 32-bit registers."""
    found = []
    for name in names(text):
        file, number = h.program.registers[name]
        assert file == "u", f"{name} is not a register of 32 bits"
        found.append(number)
    return np.array(found)


# --- ldmatrix and stmatrix


def _move(h: Any, x: Instruction) -> Step:
    load = x.name == "ldmatrix"
    known(x, "m8n8" in x.parts, x.parts[-1] == "b16")
    fragment, place = x.operands if load else reversed(x.operands)
    rows, address = registers(h, fragment), h.operands.address(place)
    count, turned = len(rows), "trans" in x.parts

    def step(w: Warp, m: Any) -> None:
        whole(x, m)
        a = address(w)[: 8 * count].astype(np.int64)
        assert (a % 16 == 0).all(), f"{x.opcode} of a row at no multiple of 16"
        shared, cluster = w.cta.shared, w.cta.cluster
        assert shared.has(a, 16), f"{x.opcode} beyond shared memory"
        if cluster.races:
            touch = cluster.races.read if load else cluster.races.write
            touch(w.id, cluster.races.clocks[w.id], w.cta.rank, a[:, None] + np.arange(16))
        view, index = shared.view(2), (a >> 1)[:, None] + np.arange(8)
        if load:
            tiles = view[index].reshape(count, 8, 8).astype(np.uint32)
            tiles = tiles.transpose(0, 2, 1) if turned else tiles
            w.files["u"][rows] = tiles[:, G, 2 * T] | tiles[:, G, 2 * T + 1] << 16
            return
        cluster.effects += 1
        words = w.files["u"][rows]
        tiles = np.empty((count, 8, 8), np.uint16)
        tiles[:, G, 2 * T] = words & 0xFFFF
        tiles[:, G, 2 * T + 1] = words >> 16
        tiles = tiles.transpose(0, 2, 1) if turned else tiles
        view[index] = tiles.reshape(8 * count, 8)

    return step


def _turn(h: Any, x: Instruction) -> Step:
    """A transposed 8 by 8 matrix, within registers."""
    assert x.opcode == "movmatrix.sync.aligned.m8n8.trans.b16", f"{x.opcode} is not known"
    (to,), of = registers(h, x.operands[0]), h.operands.value(x.operands[1], "b32")

    def step(w: Warp, m: Any) -> None:
        whole(x, m)
        words, tile = of(w), np.empty((8, 8), np.uint32)
        tile[G, 2 * T], tile[G, 2 * T + 1] = words & 0xFFFF, words >> 16
        w.files["u"][to] = tile[2 * T, G] | tile[2 * T + 1, G] << 16

    return step


# --- fragments


def pieces(words: np.ndarray, kind: str) -> np.ndarray:
    """(registers, lanes, elements of a register) values."""
    bits, value = VALUES[kind]
    dtype = np.dtype(f"u{bits // 8}")
    parts = np.ascontiguousarray(words).view(dtype).reshape(*words.shape, 32 // bits)
    return value(parts)


@lru_cache
def places_of_a(count: int, per: int) -> tuple[np.ndarray, np.ndarray]:
    """(row, k) of (register, lane, element) of an A fragment of 16 rows."""
    r, j = np.arange(count)[:, None, None], np.arange(per)
    row = G[:, None] + 8 * (r & 1) + 0 * j
    return row, per * T[:, None] + (r >> 1) * 4 * per + j


@lru_cache
def places_of_b(count: int, per: int) -> tuple[np.ndarray, np.ndarray]:
    """(k, n) of (register, lane, element) of a B fragment of 8 columns."""
    r, j = np.arange(count)[:, None, None], np.arange(per)
    return per * T[:, None] + r * 4 * per + j, G[:, None] + 0 * r + 0 * j


def matrix_a(words: np.ndarray, kind: str) -> np.ndarray:
    """(16, K) of an A fragment."""
    per = 32 // VALUES[kind][0]
    found = np.empty((16, len(words) // 2 * 4 * per if len(words) > 1 else 4 * per))
    found[places_of_a(len(words), per)] = pieces(words, kind)
    return found


def matrix_b(words: np.ndarray, kind: str) -> np.ndarray:
    """(K, 8) of a B fragment."""
    per = 32 // VALUES[kind][0]
    found = np.empty((len(words) * 4 * per, 8))
    found[places_of_b(len(words), per)] = pieces(words, kind)
    return found


@lru_cache
def places_of_c(n: int) -> tuple[np.ndarray, np.ndarray]:
    """(row, column) of (register, lane) of accumulators of 16 rows and ``n`` columns, a value to a register."""
    i = np.arange(n // 2)[:, None]
    return G + 8 * (i // 2 % 2), 8 * (i // 4) + 2 * T + i % 2


def _mma(h: Any, x: Instruction) -> Step:
    found = re.search(
        r"\.m16n8k(\d+)\.row\.col\.(?:satfinite\.)?(\w+)\.(\w+)\.(\w+)\.(\w+)$", x.opcode
    )
    known(x, found)
    assert found is not None
    known(x, found[3] in VALUES, found[4] in VALUES)
    depth, to, a_kind, b_kind, of = int(found[1]), *found.groups()[1:]
    known(x, to == of, to in ("f32", "f16", "s32"))
    d, a, b = (registers(h, o) for o in x.operands[:3])
    wanted = 16 * depth * VALUES[a_kind][0] // (32 * LANES)
    known(x, len(a) == wanted, len(b) == wanted // 2)
    c = [h.operands.value(n, "u32") for n in names(x.operands[3])]

    def step(w: Warp, m: Any) -> None:
        whole(x, m)
        file = w.files["u"]
        product = matrix_a(file[a], a_kind) @ matrix_b(file[b], b_kind)
        before = np.stack([v(w) for v in c])
        w.cta.cluster.effects += 0
        if to == "f16":
            rows, columns = places_of_c(8)
            total = product[rows, columns].reshape(2, 2, LANES) + np.stack(
                [floats.f16_value(before & 0xFFFF), floats.f16_value(before >> 16)], axis=1
            )
            bits = floats.f16_bits(total)
            file[d] = bits[:, 0] | bits[:, 1] << 16
            return
        kind = np.float32 if to == "f32" else np.int32
        total = product[places_of_c(8)] + before.view(kind)
        file[d] = total.astype(kind if to == "f32" else np.int64).astype(kind).view(np.uint32)

    return step


# --- wgmma


def _commit(w: Warp, m: Any) -> None:
    open_, w.products = (
        [p for p in w.products if not isinstance(p, list)],
        [p for p in w.products if isinstance(p, list)],
    )
    w.products.append(open_)


def _wait(count: int) -> Step:
    def step(w: Warp, m: Any) -> None:
        done = max(len(w.products) - count, 0)
        races = w.cta.cluster.races
        for group in w.products[:done]:
            for places in group if isinstance(group, list) else [group]:
                if races and places is not None:
                    races.read(w.id, races.clocks[w.id], w.cta.rank, places, fenced=True)
        w.products = w.products[done:]

    return step


@lru_cache(maxsize=256)
def operand_places(
    count: int, depth: int, size: int, swizzle: int, leading: int, stride: int, turned: bool
) -> np.ndarray:
    """Offsets in bytes, before the swizzle, of (count, depth) elements of an operand in shared memory.

    ``turned``: the elements of a column of ``depth`` are not adjacent (MN-major). ``leading``, ``stride``: the
    descriptor's byte offsets.
    """
    mn, k = np.arange(count)[:, None], np.arange(depth)[None, :]
    unit = 16 // size
    if not turned:
        if swizzle == 0:
            return mn % 8 * 16 + mn // 8 * stride + k // unit * leading + k % unit * size
        return mn % 8 * swizzle + mn // 8 * stride + k * size
    assert swizzle, "an MN-major operand without a swizzle is not known"
    wide = swizzle // size
    return mn % wide * size + mn // wide * leading + k % 8 * swizzle + k // 8 * stride


SWIZZLE = {0: 0, 1: 128, 2: 64, 3: 32}


def shared_places(descriptor: int, count: int, depth: int, size: int, turned: bool) -> np.ndarray:
    """Addresses of (count, depth) elements by a matrix descriptor."""
    start, leading, stride = ((descriptor >> s & 0x3FFF) << 4 for s in (0, 16, 32))
    assert descriptor >> 49 & 7 == 0, "a descriptor with a base offset"
    swizzle = SWIZZLE[descriptor >> 62]
    return swizzled(
        start + operand_places(count, depth, size, swizzle, leading, stride, turned), swizzle
    )


def _wgmma(h: Any, x: Instruction) -> Step:
    found = re.search(r"\.m64n(\d+)k(\d+)\.(f32|s32)\.(\w+)\.(\w+)$", x.opcode)
    known(x, found)
    assert found is not None
    known(x, found[4] in VALUES, found[5] in VALUES)
    n, depth, kinds = int(found[1]), int(found[2]), (found[4], found[5])
    whole_numbers = found[3] == "s32"
    known(x, (VALUES[kinds[0]][0] == 8 and kinds[0] in ("s8", "u8")) == whole_numbers)
    size = VALUES[kinds[0]][0] // 8
    d = registers(h, x.operands[0])
    known(x, len(d) == n // 2, depth * size == 32)
    of_registers = x.operands[1].startswith("{")
    a_registers = registers(h, x.operands[1]) if of_registers else None
    a_value = None if of_registers else h.operands.value(x.operands[1], "u64")
    b_value = h.operands.value(x.operands[2], "u64")
    scale = h.operands.value(x.operands[3], "pred")
    known(x, len(x.operands) == 4 or not whole_numbers)
    signs = [int(o) for o in x.operands[4:6]] or [1, 1]
    assert all(s in (1, -1) for s in signs), f"{x}: signs of 1 and -1"
    turns = [int(o) for o in x.operands[6:]]
    a_turned = bool(turns[0]) if turns and not of_registers else False
    b_turned = bool(turns[-1]) if turns else False
    c = places_of_c(n)

    def operand(
        w: Warp, value: Any, count: int, first: int, turned: bool, kind: str
    ) -> tuple[np.ndarray, np.ndarray]:
        words = value(w)
        assert (words == words[0]).all(), f"{x.opcode}: lanes have different descriptors"
        places = shared_places(int(words[0]), count, depth, size, turned)
        places = places[first : first + 16] if first >= 0 else places
        shared = w.cta.shared
        assert shared.has(places, size), (
            f"{x.opcode} reads beyond shared memory, at {int(places.max()):#x}"
        )
        return VALUES[kind][1](shared.view(size)[places // size]), places

    def step(w: Warp, m: Any) -> None:
        whole(x, m)
        file, touched = w.files["u"], []
        if a_registers is not None:
            a = matrix_a(file[a_registers], kinds[0])
        else:
            a, places = operand(w, a_value, 64, w.index % 4 * 16, a_turned, kinds[0])
            touched.append(places)
        b, places = operand(w, b_value, n, -1, b_turned, kinds[1])
        touched.append(places)
        races = w.cta.cluster.races
        if races:
            for some in touched:
                bytes_ = (some[..., None] + np.arange(size)).ravel()
                races.read(w.id, races.clocks[w.id], w.cta.rank, bytes_, fenced=True)
                w.products.append(bytes_)
        else:
            w.products.append(None)
        adds = scale(w)
        assert (adds == adds[0]).all(), f"{x.opcode}: lanes scale differently"
        if whole_numbers:
            total = (a @ b.T)[c].astype(np.int64) + (file[d].view(np.int32) if adds[0] else 0)
            file[d] = total.astype(np.int32).view(np.uint32)
            return
        before = file[d].view(np.float32) if adds[0] else np.zeros((len(d), LANES), np.float32)
        if size == 1 and _CUTS[0]:
            whole_before = np.zeros((16, n))
            whole_before[c] = before
            product = cut_sum(a * (signs[0] * signs[1]), b, whole_before)[c]
        else:
            product = (a @ b.T)[c] * (signs[0] * signs[1]) + before
        file[d] = product.astype(np.float32).view(np.uint32)

    return step
