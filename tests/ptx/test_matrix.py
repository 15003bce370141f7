"""Matrix instructions against NumPy, on fragments and shared layouts as PTX's documentation has them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from tests.ptx.maps import swizzled
from tests.ptx.matrix import cut_sum, cutting
from tests.ptx.snippets import run, snippet, words

DTYPES = {
    "bf16": torch.bfloat16, "f16": torch.float16, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2,
    "s8": torch.int8, "tf32": torch.float32,
}  # fmt: skip


def some(shape: tuple[int, ...], kind: str, seed: int) -> torch.Tensor:
    """Small integers, whose products are exact in any order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, shape, generator=generator).to(DTYPES[kind])


def raw(x: torch.Tensor) -> np.ndarray:
    """The bytes of a tensor, in order."""
    return torch.cat([x.flatten()]).view(torch.uint8).numpy()


class TestLdmatrix:
    """Lane l of matrix i's rows holds 16-bit elements (l / 4, 2 (l mod 4)) and the next, transposed where asked."""

    BODY = """
        shl.b32 %r3, %r1, 4; add.s32 %r3, %r3, %r9;
        mul.wide.u32 %rd5, %r1, 16; add.s64 %rd5, %rd11, %rd5;
        ld.global.v4.b32 {{%r4, %r5, %r6, %r7}}, [%rd5]; st.shared.v4.b32 [%r3], {{%r4, %r5, %r6, %r7}};
        bar.warp.sync -1;
        {body}
    """

    @pytest.mark.parametrize("turned", [False, True])
    @pytest.mark.parametrize("count", [1, 2, 4])
    def test_load(self, count: int, turned: bool) -> None:
        tiles = torch.arange(256, dtype=torch.int16)
        registers = ["%r2", "%r3", "%r4", "%r5"][:count]
        body = "mov.b32 %r6, %r3; mov.b32 %r4, 0; mov.b32 %r5, 0; mov.b32 %r2, 0; mov.b32 %r3, 0;"
        name = f"ldmatrix.sync.aligned.m8n8.x{count}{'.trans' if turned else ''}.shared.b16"
        body += f"{name} {{{', '.join(registers)}}}, [%r6];"
        found = run(self.BODY.format(body=body), words(128), tiles, width=16).numpy().view(np.int16)
        found = found.reshape(32, 4, 2)
        whole = tiles.numpy().reshape(4, 8, 8)
        for lane, i, j in itertools.product(range(32), range(count), range(2)):
            place = (lane // 4, 2 * (lane % 4) + j)
            assert found[lane, i, j] == whole[i][place[::-1] if turned else place]

    @pytest.mark.parametrize("turned", ["", ".trans"])
    def test_store_is_its_inverse(self, turned: str) -> None:
        tiles = torch.arange(256, dtype=torch.int16)
        body = f"""
            ldmatrix.sync.aligned.m8n8.x4{turned}.shared.b16 {{%r4, %r5, %r6, %r7}}, [%r3];
            stmatrix.sync.aligned.m8n8.x4{turned}.shared.b16 [%r3+1024], {{%r4, %r5, %r6, %r7}};
            bar.warp.sync -1; mov.b32 %r8, %r3; ld.shared.v4.b32 {{%r2, %r3, %r4, %r5}}, [%r8+1024];"""
        found = run(self.BODY.format(body=body), words(128), tiles, width=16, races=True)
        assert (found.numpy().view(np.int16) == tiles.numpy()).all()


def test_movmatrix() -> None:
    body = """shl.b32 %r3, %r1, 1; add.s32 %r4, %r3, 1; shl.b32 %r4, %r4, 16; or.b32 %r3, %r3, %r4;
        movmatrix.sync.aligned.m8n8.trans.b16 %r2, %r3;"""
    found = run(body, words()).numpy().view(np.int16).reshape(8, 8)
    assert (found == np.arange(64).reshape(8, 8).T).all()


def loaded(name: str, count: int, at: int) -> str:
    """A thread's ``count`` registers from ``name``, which holds them by threads."""
    lines = [f"mul.wide.u32 %rd5, %r1, {4 * count}; add.s64 %rd5, {name}, %rd5;"]
    lines += [f"ld.global.b32 %r{at + i}, [%rd5+{4 * i}];" for i in range(count)]
    return "".join(lines)


MMA = [
    ("m16n8k16", "f32", "bf16"), ("m16n8k16", "f32", "f16"), ("m16n8k8", "f32", "bf16"), ("m16n8k8", "f32", "f16"),
    ("m16n8k8", "f32", "tf32"), ("m16n8k4", "f32", "tf32"), ("m16n8k32", "f32", "e4m3"), ("m16n8k32", "s32", "s8"),
    ("m16n8k16", "s32", "s8"), ("m16n8k16", "f16", "f16"),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "to", "kind"), MMA)
def test_mma(shape: str, to: str, kind: str) -> None:
    k = int(shape.split("k")[1])
    a, b = some((16, k), kind, 1), some((k, 8), kind, 2)
    c = torch.randint(-9, 9, (16, 8), generator=torch.Generator().manual_seed(3))
    per = 4 // a.element_size()

    def word_a(lane: int, r: int) -> np.ndarray:
        first = lane % 4 * per + r // 2 * 4 * per
        return raw(a[lane // 4 + 8 * (r % 2), first : first + per])

    def word_b(lane: int, r: int) -> np.ndarray:
        first = lane % 4 * per + r * 4 * per
        return raw(b[first : first + per, lane // 4])

    count = max(16 * k * a.element_size() // 128, 1)
    fa = torch.from_numpy(np.concatenate([word_a(t, r) for t in range(32) for r in range(count)]))
    fb = torch.from_numpy(
        np.concatenate([word_b(t, r) for t in range(32) for r in range(count // 2)])
    )
    of = {"f32": torch.float32, "s32": torch.int32, "f16": torch.float16}[to]
    cells = [(t // 4 + 8 * (i // 2), 2 * (t % 4) + i % 2) for t in range(32) for i in range(4)]
    fc = torch.stack([c[p] for p in cells]).to(of)
    words_c = 4 * of.itemsize // 4
    names = [
        "{" + ", ".join(f"%r{s + i}" for i in range(n)) + "}"
        for s, n in ((20, count), (30, count // 2), (40, words_c))
    ]
    body = (
        loaded("%rd11", count, 20) + loaded("%rd12", count // 2, 30) + loaded("%rd13", words_c, 40)
    )
    target = "{" + ", ".join(f"%r{50 + i}" for i in range(words_c)) + "}"
    satfinite = ".satfinite" if kind == "s8" else ""
    body += f"mma.sync.aligned.{shape}.row.col{satfinite}.{to}.{kind}.{kind}.{to} {target}, {', '.join(names)};"
    body += "".join(f"mov.b32 %r{2 + i}, %r{50 + i};" for i in range(words_c))
    body += "".join(f"mov.b32 %r{2 + i}, 0;" for i in range(words_c, 4))
    found = (
        run(body, words(128), fa, fb, fc, width=16).view(32, 4)[:, :words_c].contiguous().view(of)
    )
    wanted = a.double() @ b.double() + c
    assert found.flatten().tolist() == [float(wanted[p]) for p in cells]


# --- wgmma

A_AT, B_AT, SIZE = 0, 32768, 65536
"""Places of the operands in shared memory, and bytes of both."""


def boxes(x: torch.Tensor, swizzle: int, stride: int, leading: int) -> np.ndarray:
    """Bytes that hold (rows, columns) in boxes whose rows have ``swizzle`` bytes, as TMA writes them: eight rows are
    followed by the next eight ``stride`` bytes on, boxes along the columns are ``leading`` bytes apart. Without a
    swizzle rows have 16 bytes.
    """
    size, found = x.element_size(), np.zeros(32768, np.uint8)
    bits, wide = (
        x.contiguous().view(torch.uint8).numpy().reshape(*x.shape, size),
        (swizzle or 16) // size,
    )
    for r, c in np.ndindex(*x.shape):
        at = c // wide * leading + r // 8 * stride + r % 8 * (swizzle or 16) + c % wide * size
        at = int(swizzled(np.array(at), swizzle))
        found[at : at + size] = bits[r, c]
    return found


def descriptor(name: str, start: int, leading: int, stride: int, swizzle: int) -> str:
    """Put a descriptor of what starts ``start`` bytes into shared memory in a register."""
    high = {0: 0, 128: 1, 64: 2, 32: 3}[swizzle] << 30 | stride >> 4
    return f"""add.s32 %r10, %r9, {start}; shr.u32 %r10, %r10, 4; or.b32 %r10, %r10, {(leading >> 4) << 16};
        mov.b32 %r11, {high}; mov.b64 {name}, {{%r10, %r11}};"""


def multiply(
    shape: str,
    kinds: str,
    setup: str,
    pairs: list[tuple[str, str]],
    turns: str,
    data: np.ndarray,
    *more: torch.Tensor,
) -> np.ndarray:
    """(64, n) sums of WGMMAs over ``pairs`` of operands, with ``data`` in shared memory; ``more`` from %rd13 on."""
    n = int(shape[4:].split("k")[0])
    held = [f"%r{100 + i}" for i in range(n // 2)]
    body = """
        mov.b32 %r3, %r1;
    $COPY:
        mul.wide.u32 %rd5, %r3, 16; add.s64 %rd5, %rd11, %rd5; ld.global.v4.b32 {%r4, %r5, %r6, %r7}, [%rd5];
        shl.b32 %r8, %r3, 4; add.s32 %r8, %r8, %r9; st.shared.v4.b32 [%r8], {%r4, %r5, %r6, %r7};
        add.s32 %r3, %r3, 128; setp.lt.u32 %p1, %r3, 4096; @%p1 bra $COPY;
        fence.proxy.async.shared::cta; bar.sync 0; mov.b32 %r2, 0;
    """
    body += setup + "wgmma.fence.sync.aligned; setp.ne.b32 %p2, %r2, 0; setp.eq.b32 %p3, %r2, 0;"
    for i, (a, b) in enumerate(pairs):
        operands = f"{{{', '.join(held)}}}, {a}, {b}, %p{3 if i else 2}, 1, 1{turns}"
        body += f"wgmma.mma_async.sync.aligned.{shape}.f32.{kinds} {operands};"
    body += "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;"
    body += f"mul.wide.u32 %rd5, %r1, {2 * n}; add.s64 %rd5, %rd12, %rd5;"
    body += "".join(f"st.global.b32 [%rd5+{4 * i}], {name};" for i, name in enumerate(held))
    out, sums, given = words(128), torch.zeros(128, n // 2), torch.from_numpy(data)
    tensors = (out, given, sums, *more)
    kernel = snippet(body, threads=128, tensors=len(tensors))
    kernel.launch([x.data_ptr() for x in tensors], *tensors, races=True)
    found = np.zeros((64, n))
    for t, i in np.ndindex(128, n // 2):
        row = t // 32 * 16 + t % 32 // 4 + 8 * (i // 2 % 2)
        found[row, i // 4 * 8 + 2 * (t % 4) + i % 2] = sums[t, i]
    return found


def both(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.concatenate([a, b])


class TestWgmma:
    """K-major: rows of an operand hold K. MN-major: rows of memory hold M or N."""

    @pytest.mark.parametrize("kind", ["bf16", "f16", "e4m3"])
    @pytest.mark.parametrize("swizzle", [128, 64, 32])
    @pytest.mark.parametrize("n", [8, 72])
    def test_k_major(self, kind: str, swizzle: int, n: int) -> None:
        """In as many steps along K as a row has."""
        size = DTYPES[kind].itemsize
        steps = swizzle // 32
        a, b = some((64, swizzle // size), kind, 1), some((n, swizzle // size), kind, 2)
        data = both(*(boxes(x, swizzle, 8 * swizzle, 0) for x in (a, b)))
        setup = "".join(
            descriptor(f"%rd{14 + 2 * i + j}", at + 32 * i, 16, 8 * swizzle, swizzle)
            for i in range(steps)
            for j, at in enumerate((A_AT, B_AT))
        )
        pairs = [(f"%rd{14 + 2 * i}", f"%rd{15 + 2 * i}") for i in range(steps)]
        turns = "" if size == 1 else ", 0, 0"
        found = multiply(f"m64n{n}k{32 // size}", f"{kind}.{kind}", setup, pairs, turns, data)
        assert (found == (a.double() @ b.double().T).numpy()).all()

    def test_k_major_without_swizzle(self) -> None:
        a, b = some((64, 16), "bf16", 1), some((24, 16), "bf16", 2)
        data = both(boxes(a, 0, 128, 2048), boxes(b, 0, 256, 128))
        setup = descriptor("%rd14", A_AT, 2048, 128, 0) + descriptor("%rd15", B_AT, 128, 256, 0)
        found = multiply("m64n24k16", "bf16.bf16", setup, [("%rd14", "%rd15")], ", 0, 0", data)
        assert (found == (a.double() @ b.double().T).numpy()).all()

    @pytest.mark.parametrize("swizzle", [128, 64, 32])
    def test_mn_major(self, swizzle: int) -> None:
        """Both operands, with several boxes along N, two steps of 16 rows along K."""
        a, b = some((32, 64), "bf16", 1), some((32, 128), "bf16", 2)
        leading = 32 * swizzle
        data = both(*(boxes(x, swizzle, 8 * swizzle, leading) for x in (a, b)))
        setup = "".join(
            descriptor(f"%rd{14 + 2 * i + j}", at + 16 * swizzle * i, leading, 8 * swizzle, swizzle)
            for i in range(2)
            for j, at in enumerate((A_AT, B_AT))
        )
        pairs = [("%rd14", "%rd15"), ("%rd16", "%rd17")]
        found = multiply("m64n128k16", "bf16.bf16", setup, pairs, ", 1, 1", data)
        assert (found == (a.double().T @ b.double()).numpy()).all()

    @pytest.mark.parametrize("kind", ["f16", "e4m3"])
    def test_a_in_registers(self, kind: str) -> None:
        """A's fragment is that of ``mma.sync``, sixteen rows to a warp."""
        size = DTYPES[kind].itemsize
        k, per = 32 // size, 4 // size
        a, b = some((64, k), kind, 1), some((16, k), kind, 2)
        places = [
            (t // 32 * 16 + t % 32 // 4 + 8 * (r % 2), t % 4 * per + r // 2 * 4 * per)
            for t in range(128)
            for r in range(4)
        ]
        fragment = np.concatenate([raw(a[row, c : c + per]) for row, c in places])
        setup = descriptor("%rd14", B_AT, 16, 256, 32) + loaded("%rd13", 4, 20)
        turns = "" if size == 1 else ", 0"
        data = both(np.zeros(32768, np.uint8), boxes(b, 32, 256, 0))
        pairs = [("{%r20, %r21, %r22, %r23}", "%rd14")]
        found = multiply(
            f"m64n16k{k}", f"{kind}.{kind}", setup, pairs, turns, data, torch.from_numpy(fragment)
        )
        assert (found == (a.double() @ b.double().T).numpy()).all()

    def test_operands_need_a_fence(self) -> None:
        body = """shl.b32 %r3, %r1, 4; add.s32 %r3, %r3, %r9; mov.b32 %r2, 0; st.shared.v4.b32 [%r3], {0, 0, 0, 0};
            bar.sync 0; setp.ne.b32 %p1, %r2, 0;""" + descriptor("%rd14", 0, 16, 256, 32)
        body += """wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16
                {%r20, %r21, %r22, %r23}, %rd14, %rd14, %p1, 1, 1, 0, 0;
            wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;"""
        with pytest.raises(AssertionError, match="reads without a fence"):
            run(body, words(128), threads=128, races=True)
        run(
            body.replace("bar.sync", "fence.proxy.async; bar.sync"),
            words(128),
            threads=128,
            races=True,
        )

    def test_operands_are_read_until_somebody_waits(self) -> None:
        body = """shl.b32 %r3, %r1, 4; add.s32 %r3, %r3, %r9; mov.b32 %r2, 0; st.shared.v4.b32 [%r3], {0, 0, 0, 0};
            fence.proxy.async; bar.sync 0; setp.ne.b32 %p1, %r2, 0;""" + descriptor(
            "%rd14", 0, 16, 256, 32
        )
        body += """wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16
                {%r20, %r21, %r22, %r23}, %rd14, %rd14, %p1, 1, 1, 0, 0;
            wgmma.commit_group.sync.aligned; WAIT bar.sync 0; st.shared.v4.b32 [%r3], {0, 0, 0, 0};
            wgmma.wait_group.sync.aligned 0;"""
        with pytest.raises(AssertionError, match="race"):
            run(body.replace("WAIT", ""), words(128), threads=128, races=True)
        run(
            body.replace("WAIT", "wgmma.wait_group.sync.aligned 0;"),
            words(128),
            threads=128,
            races=True,
        )


class TestCutting:
    """What Hopper's FP8 accumulators are known to do, as ``cut_sum`` imitates it."""

    @staticmethod
    def added(c: float, *products: float) -> float:
        """c and up to 32 products, by one instruction."""
        a = np.zeros((1, 32))
        a[0, : len(products)] = products
        return float(cut_sum(a, np.ones((1, 32)), np.full((1, 1), c))[0, 0])

    @pytest.mark.parametrize("sign", [1, -1])
    def test_thirteen_fraction_bits_of_the_largest_are_kept(self, sign: int) -> None:
        kept, lost = sign * 2.0**-13, sign * 2.0**-14
        for one in (1.0, -1.0):
            assert self.added(one, kept) == self.added(kept, one) == self.added(0, one, kept)
            assert self.added(one, kept) == one + kept
            assert self.added(one, lost) == self.added(lost, one) == self.added(0, one, lost) == one

    def test_terms_are_cut_before_they_are_added(self) -> None:
        assert self.added(1.0, *[2.0**-14] * 32) == 1
        assert self.added(1.0, -1.0, 2.0**-14) == 0
        assert self.added(1.0, 1.5 * 2.0**-13, 1.5 * 2.0**-13) == 1 + 2 * 2.0**-13

    @pytest.mark.parametrize("sign", [1, -1])
    def test_the_accumulator_is_cut_with_nothing_to_add(self, sign: int) -> None:
        assert self.added(sign * (1 + 2.0**-14)) == sign
        assert self.added(sign * (1 + 2.0**-13)) == sign * (1 + 2.0**-13)
        assert self.added(0.0) == 0

    def test_the_sum_is_cut_too(self) -> None:
        assert self.added(1 + 2.0**-13, 1.0) == 2
        assert self.added(1 + 2.0**-12, 1.0) == 2 + 2.0**-12

    def test_a_sum_of_ones_stops_at_2_to_the_14(self) -> None:
        total = 16380.0
        for _ in range(8):
            total = self.added(total, 1.0)
        assert total == 16384

    def test_each_sum_has_a_unit_of_its_own(self) -> None:
        a, b = np.array([[1.0, 2.0**-14], [2.0**-1, 2.0**-14]]), np.array([[1.0, 1.0], [0.0, 1.0]])
        found = cut_sum(a, b, np.array([[0.0, 0.0], [0.0, 2.0]]))
        assert found.tolist() == [[1.0, 2.0**-14], [0.5 + 2.0**-14, 2.0]]

    def test_wgmma_of_fp8_cuts_in_the_block_alone(self) -> None:
        """1 and 2^-9 times 2^-5, of which the second is lost; and to products of 16 bits nothing happens."""
        a, b = torch.zeros(64, 32), torch.zeros(8, 32)
        a[:, 0], a[:, 1], b[:, 0], b[:, 1] = 1, 2.0**-9, 1, 2.0**-5

        def found(kind: str) -> np.ndarray:
            k = 32 // DTYPES[kind].itemsize
            x, y = (boxes(some[:, :k].to(DTYPES[kind]), 32, 256, 0) for some in (a, b))
            setup = descriptor("%rd14", A_AT, 16, 256, 32) + descriptor("%rd15", B_AT, 16, 256, 32)
            turns = "" if k == 32 else ", 0, 0"
            shape, pairs = f"m64n8k{k}", [("%rd14", "%rd15")]
            return multiply(shape, f"{kind}.{kind}", setup, pairs, turns, both(x, y))

        with cutting():
            assert (found("e4m3") == 1).all()
            assert (found("f16") == 1 + 2.0**-14).all()
        assert (found("e4m3") == 1 + 2.0**-14).all()
