"""What instructions on registers, memory and lanes compute, and what they must not let pass."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.ptx import Kernel, unknown
from tests.ptx.snippets import LANES, run, snippet, words

TWO = torch.arange(64, dtype=torch.int32)


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ("add.s32 %r2, %r1, -5;", TWO - 5),
        ("shl.b32 %r2, %r1, 3;", TWO << 3),
        ("sub.s32 %r3, 7, %r1; shr.s32 %r2, %r3, 1;", (7 - TWO) >> 1),
        ("mov.b32 %r3, 40; shl.b32 %r2, %r1, %r3;", 0 * TWO),
        ("sub.s32 %r3, 7, %r1; mov.b32 %r4, 40; shr.s32 %r2, %r3, %r4;", (7 - TWO) >> 31),
        ("sub.s32 %r3, %r1, 20; div.s32 %r2, %r3, 7;", ((TWO - 20) / 7).trunc()),
        ("sub.s32 %r3, %r1, 20; rem.s32 %r2, %r3, 7;", torch.fmod(TWO - 20, 7)),
        ("mad.lo.s32 %r2, %r1, %r1, 3;", TWO * TWO + 3),
        ("mul.hi.u32 %r2, %r1, 0x80000000;", TWO // 2),
        ("mul.wide.s32 %rd5, %r1, -3; shr.s64 %rd5, %rd5, 1; cvt.u32.u64 %r2, %rd5;", (TWO * -3) >> 1),
        ("min.s32 %r2, %r1, 9;", TWO.clamp(max=9)),
        ("popc.b32 %r2, %r1;", torch.tensor([n.bit_count() for n in range(64)])),
        ("clz.b32 %r2, %r1;", torch.tensor([32 - n.bit_length() for n in range(64)])),
        ("bfe.u32 %r2, %r1, 1, 3;", TWO >> 1 & 7),
        ("bfe.s32 %r2, %r1, 0, 2;", ((TWO & 3) ^ 2) - 2),
        ("bfi.b32 %r2, %r1, 0xff, 4, 2;", 0xCF + ((TWO & 3) << 4)),
        ("shf.l.wrap.b32 %r2, %r1, %r1, 30;", (TWO >> 2) | (TWO.long() << 30).int()),
        ("lop3.b32 %r2, %r1, 0x0f, 0x55, 0xEA;", (TWO & 0xF) | 0x55),
        ("setp.lt.s32 %p1, %r1, 9; selp.s32 %r2, 4, 5, %p1;", torch.where(TWO < 9, 4, 5)),
        ("setp.lt.s32 %p1, %r1, 9; setp.gt.and.s32 %p2|%p3, %r1, 4, %p1; selp.s32 %r2, 4, 5, %p2;",
         torch.where((TWO < 9) & (TWO > 4), 4, 5)),
        ("setp.lt.u32 %p1, %r1, 9; mov.b32 %r2, 0; @!%p1 add.s32 %r2, %r1, 1;",
         torch.where(TWO < 9, 0, TWO + 1)),
        ("{ .reg .b32 t; add.s32 t, %r1, 1; mov.b32 %r2, t; }", TWO + 1),
        ("cvt.u16.u32 %rs1, %r1; sub.s16 %rs1, %rs1, 10; cvt.s32.s16 %r2, %rs1;", TWO - 10),
        ("shl.b32 %r3, %r1, 2; cvt.u16.u32 %rs1, %r3; cvt.s16.s8 %rs2, %rs1; cvt.s32.s16 %r2, %rs2;",
         (TWO * 4 + 128) % 256 - 128),
        ("mov.b32 %r3, 0x44332211; mov.b32 %r4, 0x88776655; prmt.b32 %r2, %r3, %r4, 0x7210U;",
         torch.full((64,), 0x88332211 - 2**32, dtype=torch.int64)),
        ("mov.b32 %r3, 0x44332211; mov.b32 %r4, 0x88776655; prmt.b32 %r2, %r3, %r4, 0x0F8E;",
         torch.full((64,), 0x11FF0000 - 0, dtype=torch.int64)),
        ("mov.b64 %rd5, {%r1, 7}; shl.b64 %rd5, %rd5, 8; mov.b64 {%r3, %r4}, %rd5; add.s32 %r2, %r3, %r4;",
         (TWO << 8) + 7 * 256),
        ("mov.b32 {%rs1, %rs2}, %r1; mov.b32 %r2, {%rs2, %rs1};", TWO << 16),
    ],
)  # fmt: skip
def test_integers(body: str, wanted: torch.Tensor) -> None:
    assert run(body, words(64), threads=64).tolist() == wanted.tolist()


def floats(body: str, *given: np.ndarray) -> np.ndarray:
    """Run on float32 lanes in %r20, %r21, …; the result of %r2."""
    loads = []
    tensors = [torch.from_numpy(np.asarray(x, np.float32)) for x in given]
    for i in range(len(given)):
        loads.append(f"add.s64 %rd5, %rd{11 + i}, %rd3; ld.global.b32 %r{20 + i}, [%rd5];")
    return run("".join(loads) + body, words(), *tensors).view(torch.float32).numpy()


X = np.random.default_rng(0).standard_normal(32).astype(np.float32)
WILD = X.copy()
WILD[:8] = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-41, -3e38, 500.0]


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ("add.f32 %r2, %r20, %r21;", lambda x, y: x + y),
        ("fma.rn.f32 %r2, %r20, %r21, %r20;",
         lambda x, y: (x.astype(np.float64) * y + x).astype(np.float32)),
        ("max.f32 %r2, %r20, %r21;", np.fmax),
        ("max.NaN.f32 %r2, %r20, %r21;", np.maximum),
        ("abs.f32 %r2, %r20;", lambda x, y: np.abs(x)),
        ("setp.neu.f32 %p1, %r20, %r20; selp.f32 %r2, 0f3F800000, 0f00000000, %p1;",
         lambda x, y: np.isnan(x).astype(np.float32)),
        ("setp.ne.f32 %p1, %r20, %r20; selp.f32 %r2, 0f3F800000, 0f00000000, %p1;", lambda x, y: 0 * np.ones(32)),
        ("cvt.rni.f32.f32 %r2, %r20;", lambda x, y: np.rint(x)),
        ("max.u16x2 %r2, %r20, %r21;",
         lambda x, y: np.maximum(x.view(np.uint16), y.view(np.uint16)).view(np.float32)),
        ("rcp.approx.ftz.f32 %r2, %r21;", lambda x, y: 1 / y),
        ("cvt.rn.bf16x2.f32 %r2, %r20, %r20; and.b32 %r2, %r2, 0xffff0000;",
         lambda x, y: torch.from_numpy(x).bfloat16().float().numpy()),
        ("cvt.rn.f16x2.f32 %r2, %r20, %r21; { .reg .b16 l, h; mov.b32 {l, h}, %r2; cvt.f32.f16 %r2, h; }",
         lambda x, y: torch.from_numpy(x).half().float().numpy()),
        ("{ .reg .b16 q, l, h; cvt.rn.satfinite.e4m3x2.f32 q, %r20, %r21; cvt.rn.f16x2.e4m3x2 %r2, q; "
         "mov.b32 {l, h}, %r2; cvt.f32.f16 %r2, h; }",
         lambda x, y: torch.from_numpy(np.clip(x, -448, 448)).to(torch.float8_e4m3fn).float().numpy()),
        ("cvt.rzi.s32.f32 %r2, %r20; cvt.rn.f32.s32 %r2, %r2;",
         lambda x, y: np.where(np.isnan(x), 0, np.clip(np.trunc(x), -(2.0**31), 2.0**31)).astype(np.float32)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("x", [X, WILD], ids=["normal", "wild"])
def test_floats(body: str, wanted, x: np.ndarray) -> None:
    y = np.roll(X, 5)
    with np.errstate(all="ignore"):
        expected = wanted(x, y).astype(np.float32)
    np.testing.assert_array_equal(floats(body, x, y), expected)


def test_approximations_flush_what_is_subnormal() -> None:
    x = np.full(32, -130.0, np.float32)
    assert (floats("ex2.approx.ftz.f32 %r2, %r20;", x) == 0).all()
    assert (floats("ex2.approx.f32 %r2, %r20;", x) == np.float32(2.0**-130)).all()
    assert np.isneginf(floats("lg2.approx.ftz.f32 %r2, %r20;", 2.0 ** np.float32(x))).all()
    assert (floats("tanh.approx.f32 %r2, %r20;", x) == -1).all()


@pytest.mark.parametrize("kind", ["bf16x2", "f16x2"])
def test_halves_two_to_a_word(kind: str) -> None:
    dtype = torch.bfloat16 if kind == "bf16x2" else torch.float16
    pairs = torch.from_numpy(X).to(dtype).repeat_interleave(2)
    pairs[1::2] *= 3
    body = "add.s64 %rd5, %rd11, %rd3; ld.global.b32 %r20, [%rd5]; "
    found = run(body + f"fma.rn.{kind} %r2, %r20, %r20, %r20;", words(), pairs).view(dtype)
    exact = pairs.double() * pairs.double() + pairs.double()
    assert torch.equal(found, exact.to(dtype))
    found = run(body + f"neg.{kind} %r3, %r20; max.{kind} %r2, %r3, %r20;", words(), pairs).view(
        dtype
    )
    assert torch.equal(found, pairs.abs())


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ("shfl.sync.bfly.b32 %r2, %r1, 5, 31, -1;", LANES ^ 5),
        ("shfl.sync.idx.b32 %r2, %r1, 3, 31, -1;", LANES * 0 + 3),
        ("shfl.sync.idx.b32 %r2, %r1, %r1, 0x181f, -1;", LANES),
        ("shfl.sync.up.b32 %r2|%p1, %r1, 2, 0, -1; @!%p1 mov.b32 %r2, 99;",
         torch.where(LANES < 2, 99, LANES - 2)),
        ("shfl.sync.down.b32 %r2, %r1, 4, 31, -1;", torch.where(LANES > 27, LANES, LANES + 4)),
        ("shfl.sync.down.b32 %r2, %r1, 1, 0x1807, -1;", torch.where(LANES % 8 == 7, LANES, LANES + 1)),
        ("redux.sync.max.s32 %r2, %r1, -1;", LANES * 0 + 31),
        ("redux.sync.add.s32 %r2, %r1, -1;", LANES * 0 + 496),
        ("redux.sync.or.b32 %r2, %r1, -1;", LANES * 0 + 31),
        ("setp.gt.s32 %p1, %r1, 29; vote.sync.ballot.b32 %r2, %p1, -1;", LANES * 0 - (1 << 30)),
        ("setp.gt.s32 %p1, %r1, 29; vote.sync.any.pred %p2, %p1, -1; selp.b32 %r2, 1, 0, %p2;", LANES * 0 + 1),
        ("setp.gt.s32 %p1, %r1, 29; vote.sync.ballot.b32 %r2, !%p1, -1;", LANES * 0 + (1 << 30) - 1),
        ("setp.ge.s32 %p1, %r1, 0; mov.b32 %r2, 0; @%p1 redux.sync.add.s32 %r2, %r1, -1; @!%p1 bar.sync 0;",
         LANES * 0 + 496),
        ("setp.gt.s32 %p1, %r1, 29; vote.sync.all.pred %p2, %p1, -1; selp.b32 %r2, 1, 0, %p2;", LANES * 0),
        ("elect.sync %r3|%p1, -1; selp.b32 %r2, 5, %r3, %p1;", torch.where(LANES == 0, 5, 0)),
        ("and.b32 %r3, %r1, 3; match.any.sync.b32 %r2, %r3, -1;",
         torch.tensor([0x11111111 << (i % 4) for i in range(32)], dtype=torch.int64).int()),
        ("mov.u32 %r2, %lanemask_lt; popc.b32 %r2, %r2;", LANES),
        ("setp.lt.s32 %p1, %r1, 8; mov.b32 %r2, 0; @!%p1 bra $E; shfl.sync.idx.b32 %r2, %r1, 7, 31, 0xff;\n$E:",
         torch.where(LANES < 8, 7, 0)),
    ],
)  # fmt: skip
def test_lanes(body: str, wanted: torch.Tensor) -> None:
    assert run(body, words()).tolist() == wanted.tolist()


def test_branches_part_threads_and_bring_them_together() -> None:
    body = """
    mov.b32 %r2, 0;
    mov.b32 %r3, 0;
$LOOP:
    setp.ge.s32 %p1, %r3, %r1;
    @%p1 bra $NEXT;
    add.s32 %r2, %r2, 2;
    add.s32 %r3, %r3, 1;
    bra.uni $LOOP;
$NEXT:
    redux.sync.max.s32 %r2, %r2, -1;
"""
    assert run(body, words(64), threads=64).tolist() == [62] * 32 + [126] * 32


def test_labels_of_scopes_are_their_own() -> None:
    once = "{ .reg .pred P; AGAIN: add.s32 %r2, %r2, 1; setp.lt.s32 P, %r2, 9; @P bra AGAIN; }"
    assert run(f"mov.b32 %r2, 0; {once} {once}", words()).tolist() == [10] * 32


def test_vectors_and_signs_of_loads() -> None:
    data = torch.arange(-64, 64, dtype=torch.int8)
    body = "mul.wide.u32 %rd5, %r1, 4; add.s64 %rd5, %rd11, %rd5; "
    found = run(body + "ld.global.s8 %r2, [%rd5+1];", words(), data)
    assert found.tolist() == data[1::4].tolist()
    found = run(body + "ld.global.u8 %rs1, [%rd5]; cvt.u32.u16 %r2, %rs1;", words(), data)
    assert found.tolist() == data[::4].view(torch.uint8).tolist()
    body = "mov.b64 %rd5, %rd11; ld.global.nc.v4.b32 {%r3, %r4, %r2, %r5}, [%rd5+16];"
    assert run(body, words(), torch.arange(8, dtype=torch.int32)).tolist() == [6] * 32


@pytest.mark.parametrize(
    ("body", "wanted", "after"),
    [
        ("cvt.u64.u32 %rd6, %r1; mov.b32 %r2, 0; atom.global.add.u64 %rd5, [%rd11], %rd6;", 0, [496, 0]),
        ("atom.global.add.u32 %r2, [%rd11], 1;", None, [32, 0]),
        ("mov.b32 %r2, 0; red.relaxed.gpu.global.max.s32 [%rd11+8], %r1;", 0, [0, 31]),
        ("atom.acq_rel.gpu.global.cas.b32 %r2, [%rd11], %r1, 77;", None, [77, 0]),
        ("atom.global.inc.u32 %r2, [%rd11], 30;", None, [1, 0]),
    ],
)  # fmt: skip
def test_atomics(body: str, wanted: int | None, after: list[int]) -> None:
    count = torch.zeros(2, dtype=torch.int64)
    found = run(body, words(), count)
    assert count.tolist() == after
    if wanted is not None:
        assert found.tolist() == [wanted] * 32
    elif "add" in body:
        assert sorted(found.tolist()) == list(range(32))


def test_floats_are_added_to_memory() -> None:
    total = torch.zeros(4)
    run("mov.b32 %r2, 0; red.global.add.f32 [%rd11], 0f3F000000;", words(), total)
    assert total.tolist() == [16.0, 0, 0, 0]
    body = "mov.b32 %r2, 0x3f803f80; red.global.add.noftz.bf16x2 [%rd11], %r2;"
    halves = torch.zeros(4, dtype=torch.bfloat16)
    run(body, words(), halves)
    assert halves.tolist() == [32.0, 32.0, 0, 0]


def test_shared_memory_starts_as_nan() -> None:
    found = run("ld.shared.b32 %r2, [%r9];", words())
    assert found.view(torch.float32).isnan().all()
    assert found.view(torch.bfloat16).isnan().all()


def test_a_grid() -> None:
    body = "mov.u32 %r3, %ctaid.x; mov.u32 %r4, %ctaid.y; mov.u32 %r5, %nctaid.x; mad.lo.s32 %r2, %r4, %r5, %r3;"
    body += "mul.wide.u32 %rd5, %r2, 128; add.s64 %rd4, %rd4, %rd5;"
    out = words(32 * 6)
    snippet(body).launch([out.data_ptr()], out, grid=(3, 2))
    assert out.tolist() == [i for i in range(6) for _ in range(32)]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("mov.b32 %r2, 0; add.s64 %rd4, %rd4, 4;", "not given"),
        ("mov.b32 %r2, 0; add.s64 %rd4, %rd4, 2;", "no multiple of 4"),
        ("mov.b32 %r2, 0; and.b64 %rd4, %rd4, 0xFFFFFFFF;", "not given"),
        ("mov.b32 %r2, %r8;", "not set"),
        ("sad.u32 %r2, %r1, %r1;", "not known"),
        ("ld.shared.b32 %r2, [%r9+300000];", "shared memory"),
        ("ld.shared.b32 %r2, [%r9+2];", "no multiple of 4"),
        ("setp.eq.s32 %p1, %r1, 3; mov.b32 %r2, 0; @%p1 bra $X; redux.sync.add.s32 %r2, %r1, -1;\n$X:", "whole warp"),
        ("setp.eq.s32 %p1, %r1, 3; mov.b32 %r2, 0; @%p1 bra $X; bar.sync 0;\n$X:", "whole warp"),
        ("setp.lt.s32 %p1, %r1, 8; mov.b32 %r2, 0; @!%p1 bra $E; shfl.sync.idx.b32 %r2, %r1, 9, 31, 0xff;\n$E:",
         "does not take part"),
        ("trap;", "trap"),
    ],
)  # fmt: skip
def test_what_hardware_would_not_forgive(body: str, said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        run(body, words())


def test_unknown_instructions_are_listed() -> None:
    kernel = snippet(
        "mov.b32 %r2, 0; sad.u32 %r2, %r1, %r1; cvt.rz.bf16x2.f32 %r2, %r1, %r1; video %r2;"
    )
    found = unknown(kernel.program)
    assert [name in text for name, text in zip(("sad.u32", "video"), found, strict=True)] == [
        True
    ] * 2


def test_a_parameter_that_was_not_given() -> None:
    kernel = Kernel(
        ".visible .entry f(.param .align 4 .b8 a[8], .param .u64 b)\n.reqntid 32, 1, 1\n"
        "{ .reg .b32 %r<3>; ld.param.b32 %r1, [a+4]; ret; }"
    )
    with pytest.raises(AssertionError, match="was not given"):
        kernel.launch([0])
    kernel.launch([0], parameters={0: bytes(8)})
