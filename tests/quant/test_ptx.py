"""The interpreter itself: what it computes, and what it must not let pass."""

from __future__ import annotations

import pytest
import torch

from tests.quant.ptx import Block, Memory, Program

HEAD = """
.visible .entry f(
    .param .u64 f_param_0,
    .param .u64 f_param_1
)
.reqntid 64, 1, 1
{
    .reg .pred %p<9>;
    .reg .b32 %r<9>;
    .reg .b64 %rd<9>;
    ld.param.b64 %rd1, [f_param_0];
    ld.param.b64 %rd2, [f_param_1];
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %rd3, %r1, 4;
    add.s64 %rd4, %rd1, %rd3;
"""
TAIL = """
    st.global.b32 [%rd4], %r2;
    ret;
}
"""


def run(body: str, out: torch.Tensor, *more: torch.Tensor, tail: str = TAIL) -> torch.Tensor:
    program = Program(HEAD + body + tail)
    arguments = tuple(x.data_ptr() for x in (out, *more, out))
    Block(program, Memory(out, *more), arguments, 0).run()
    return out


def ints(count: int = 64) -> torch.Tensor:
    return torch.full((count,), -7, dtype=torch.int32)


LANES = torch.arange(64, dtype=torch.int32)


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ("add.s32 %r2, %r1, -5;", LANES - 5),
        ("shl.b32 %r2, %r1, 3;", LANES << 3),
        ("sub.s32 %r3, 7, %r1; shr.s32 %r2, %r3, 1;", (7 - LANES) >> 1),
        ("shfl.sync.bfly.b32 %r2, %r1, 5, 31, -1;", LANES ^ 5),
        ("shfl.sync.idx.b32 %r2, %r1, 3, 31, -1;", LANES // 32 * 32 + 3),
        ("redux.sync.max.s32 %r2, %r1, -1;", LANES // 32 * 32 + 31),
        ("redux.sync.add.s32 %r2, %r1, -1;", torch.tensor([496] * 32 + [1520] * 32)),
        ("setp.lt.s32 %p1, %r1, 9; selp.s32 %r2, 4, 5, %p1;", torch.where(LANES < 9, 4, 5)),
        ("{ .reg .b32 t; add.s32 t, %r1, 1; mov.b32 %r2, t; }", LANES + 1),
        ("mov.b32 %r3, 0x44332211; mov.b32 %r4, 0x88776655; prmt.b32 %r2, %r3, %r4, 0x7210U;",
         torch.full((64,), 0x88332211 - 2**32, dtype=torch.int64)),
    ],
)  # fmt: skip
def test_instructions(body: str, wanted: torch.Tensor) -> None:
    assert run(body, ints()).tolist() == wanted.tolist()


def test_branches_part_threads_and_bring_them_together() -> None:
    body = """
    mov.b32 %r2, 0;
    mov.b32 %r3, 0;
$LOOP:
    setp.ge.s32 %p1, %r3, %r1;
    @%p1 bra $DONE;
    add.s32 %r2, %r2, 2;
    add.s32 %r3, %r3, 1;
    bra.uni $LOOP;
$DONE:
    redux.sync.max.s32 %r2, %r2, -1;
"""
    assert run(body, ints()).tolist() == [62] * 32 + [126] * 32


def test_a_barrier_shows_what_other_warps_have_put_in_shared_memory() -> None:
    body = """
    shl.b32 %r3, %r1, 2;
    setp.lt.s32 %p1, %r1, 32;
    @%p1 bra $WAIT;
    st.shared.b32 [%r3], %r1;
$WAIT:
    bar.sync 0;
    xor.b32 %r3, %r3, 128;
    ld.shared.b32 %r2, [%r3];
"""
    assert run(body, ints()).tolist() == [*range(32, 64), *[0] * 32]


def test_casts() -> None:
    x = torch.tensor([1.0, -0.0, 500.0, float("nan")]).repeat(16)
    out = ints()
    body = """
    add.s64 %rd5, %rd2, %rd3;
    ld.global.b32 %r3, [%rd5];
    { .reg .b16 l; cvt.rn.satfinite.e4m3x2.f32 l, %r3, %r3; mov.b32 %r2, {l, l}; }
"""
    run(body, out, x)
    assert out.view(torch.uint8).reshape(64, 4)[:4].tolist() == [
        [c] * 4 for c in (0x38, 0x80, 0x7E, 0x7F)
    ]
    body = body.replace(
        "cvt.rn.satfinite.e4m3x2.f32 l, %r3, %r3; mov.b32 %r2, {l, l};",
        "cvt.rn.bf16x2.f32 %r2, %r3, %r3;",
    )
    run(body, out, x)
    assert out.view(torch.bfloat16).reshape(64, 2)[:3].tolist() == [[1, 1], [0, 0], [500, 500]]


def test_atomics_count_every_thread() -> None:
    count = torch.zeros(2, dtype=torch.int64)
    body = "mov.b32 %r2, 0; cvt.u64.u32 %rd6, %r1; atom.global.add.u64 %rd5, [%rd2], %rd6;"
    run(body, ints(), count)
    assert count.tolist() == [2016, 0]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("mov.b32 %r2, 0; add.s64 %rd4, %rd4, 4;", "not given"),
        ("mov.b32 %r2, 0; add.s64 %rd4, %rd4, 2;", "no multiple of 4"),
        ("mov.b32 %r2, 0; and.b64 %rd4, %rd4, 0xFFFFFFFF;", "not given"),
        ("mov.b32 %r2, %r8;", "not set"),
        ("sad.u32 %r2, %r1, %r1;", "not known"),
        (
            "setp.eq.s32 %p1, %r1, 3; @%p1 bra $X; redux.sync.add.s32 %r2, %r1, -1;\n$X:",
            "whole warp",
        ),
    ],
)
def test_what_hardware_would_not_forgive(body: str, said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        run(body, ints())
