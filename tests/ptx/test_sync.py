"""Barriers, mbarriers, clusters and the order of warps; races and deadlocks are seen."""

from __future__ import annotations

import pytest
import torch

from tests.ptx import Deadlock
from tests.ptx.snippets import INIT, WAIT, run, snippet, words

SEEDS = [None, 1, 2, 3]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "barrier", ["bar.sync 0;", "bar.sync 3, 64;", "barrier.sync 5, 64;", "bar.sync %r12, %r13;"]
)
def test_a_barrier_shows_what_other_warps_have_put_in_shared_memory(
    barrier: str, seed: int | None
) -> None:
    body = f"""
    mov.b32 %r12, 9;
    mov.b32 %r13, 64;
    shl.b32 %r3, %r1, 2;
    add.s32 %r3, %r3, %r9;
    st.shared.b32 [%r3], %r1;
    {barrier}
    xor.b32 %r3, %r3, 128;
    ld.shared.b32 %r2, [%r3];
"""
    found = run(body, words(64), threads=64, seed=seed, races=True)
    assert found.tolist() == [*range(32, 64), *range(32)]


def test_a_missing_barrier_is_a_race_in_any_order() -> None:
    body = """
    shl.b32 %r3, %r1, 2;
    add.s32 %r3, %r3, %r9;
    st.shared.b32 [%r3], %r1;
    xor.b32 %r3, %r3, 128;
    ld.shared.b32 %r2, [%r3];
"""
    for seed in SEEDS:
        with pytest.raises(AssertionError, match="race"):
            run(body, words(64), threads=64, seed=seed, races=True)


def test_a_read_before_a_write_of_another_warp_is_a_race() -> None:
    body = """
    mov.b32 %r2, 0;
    ld.shared.b32 %r3, [%r9];
    setp.eq.u32 %p1, %r1, 40;
    @%p1 st.shared.b32 [%r9], %r1;
"""
    with pytest.raises(AssertionError, match="race"):
        run(body, words(64), threads=64, races=True)


TURNS = """
    setp.ge.u32 %p1, %r1, 32;
    @%p1 bra $SECOND;
    mov.b32 %r2, 1;
    st.shared.b32 [%r9], %r2;
    bar.arrive 1, 64;
    bar.sync 2, 64;
    ld.shared.b32 %r2, [%r9];
    bra $THROUGH;
$SECOND:
    bar.sync 1, 64;
    ld.shared.b32 %r2, [%r9];
    add.s32 %r2, %r2, 10;
    st.shared.b32 [%r9], %r2;
    bar.arrive 2, 64;
$THROUGH:
"""


@pytest.mark.parametrize("seed", SEEDS)
def test_turns_by_named_barriers(seed: int | None) -> None:
    found = run(TURNS, words(64), threads=64, seed=seed, races=True)
    assert found.tolist() == [11] * 64


def test_turns_without_one_arrival_are_a_deadlock() -> None:
    with pytest.raises(Deadlock, match="barrier 1: 32 of 64"):
        run(TURNS.replace("bar.arrive 1, 64;", ""), words(64), threads=64)


PINGPONG = """
    setp.ge.u32 %p2, %r1, 32;
    mov.b32 %r7, 0;
    mov.b32 %r8, 0;
    mov.b32 %r2, 0;
    @%p2 bra $TAKE;
$GIVE:
    xor.b32 %r6, %r8, 1;
""" + WAIT.format("%r9+72", "%r6") + """
    shl.b32 %r3, %r1, 2;
    add.s32 %r3, %r3, %r9;
    st.shared.b32 [%r3+128], %r7;
    mbarrier.arrive.shared.b64 %rd6, [%r9+64];
    add.s32 %r7, %r7, 1;
    xor.b32 %r8, %r8, 1;
    setp.lt.u32 %p3, %r7, 5;
    @%p3 bra $GIVE;
    bra $OUT;
$TAKE:
""" + WAIT.format("%r9+64", "%r8") + """
    shl.b32 %r3, %r1, 2;
    add.s32 %r3, %r3, %r9;
    ld.shared.b32 %r4, [%r3];
    mad.lo.s32 %r2, %r2, 10, %r4;
    mbarrier.arrive.shared.b64 _, [%r9+72];
    add.s32 %r7, %r7, 1;
    xor.b32 %r8, %r8, 1;
    setp.lt.u32 %p3, %r7, 5;
    @%p3 bra $TAKE;
$OUT:
"""  # fmt: skip


@pytest.mark.parametrize("seed", SEEDS)
def test_a_pipeline_of_one_stage(seed: int | None) -> None:
    body = (
        INIT.format(64, 32).replace("fence", "@%p1 mbarrier.init.shared.b64 [%r9+72], 32;\nfence")
        + PINGPONG
    )
    found = run(body, words(64), threads=64, seed=seed, races=True)
    assert found.tolist() == [0] * 32 + [1234] * 32
    with pytest.raises(AssertionError, match=r"race|arrivals"):
        run(
            body.replace(WAIT.format("%r9+72", "%r6"), ""),
            words(64),
            threads=64,
            seed=seed,
            races=True,
        )
    with pytest.raises(Deadlock, match=r"mbarrier 0x440: 1 of 33 arrivals"):
        run(body.replace("[%r9+64], 32", "[%r9+64], 33"), words(64), threads=64, seed=seed)


def test_lanes_that_wait_let_others_of_their_warp_pass() -> None:
    body = (
        INIT.format(64, 1)
        + f"""
    setp.eq.u32 %p2, %r1, 31;
    mov.b32 %r2, 3;
    @%p2 bra $LAST;
    {WAIT.format("%r9+64", "0")}
    bra $TOGETHER;
$LAST:
    mbarrier.arrive.shared.b64 _, [%r9+64];
$TOGETHER:
    redux.sync.add.s32 %r2, %r2, -1;
"""
    )
    assert run(body, words()).tolist() == [96] * 32


def test_bytes_that_never_come_are_a_deadlock() -> None:
    body = (
        INIT.format(64, 1)
        + f"""
    mov.b32 %r2, 0;
    @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r9+64], 128;
    {WAIT.format("%r9+64", "0")}
"""
    )
    with pytest.raises(Deadlock, match="0 of 1 arrivals and 128 bytes awaited"):
        run(body, words())


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (
            INIT.format(64, 1) + "mov.b32 %r2, 0; mbarrier.arrive.shared.b64 _, [%r9+64], 2;",
            "2 arrivals where 1",
        ),
        ("mov.b32 %r2, 0; mbarrier.arrive.shared.b64 _, [%r9+64];", "no mbarrier was initialised"),
        (
            "mov.b32 %r2, 0; bar.sync 1, 32; bar.arrive 1, 64; bar.sync 1, 32;",
            "barrier 1 of 64 and of 32",
        ),
        ("mov.b32 %r2, 0; bar.sync %r1, 32;", "different barriers"),
    ],
)
def test_barriers_are_counted(body: str, said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        run(body, words())


def test_warps_that_have_returned_are_not_awaited() -> None:
    body = "setp.lt.u32 %p1, %r1, 32; @%p1 bra DONE; mov.b32 %r2, 4; bar.sync 0;"
    assert run(body, words(96), threads=96).tolist() == [-7] * 32 + [4] * 64


@pytest.mark.parametrize("seed", SEEDS)
def test_a_cluster(seed: int | None) -> None:
    """Each CTA stores to the other's shared memory and arrives at an mbarrier there."""
    body = (
        INIT.format(64, 32)
        + f"""
    mov.u32 %r10, %cluster_ctarank;
    mov.u32 %r11, %ctaid.x;
    xor.b32 %r3, %r10, 1;
    mapa.shared::cluster.u32 %r4, %r9, %r3;
    barrier.cluster.arrive.relaxed;
    barrier.cluster.wait;
    shl.b32 %r5, %r1, 2;
    add.s32 %r6, %r4, %r5;
    mad.lo.s32 %r7, %r11, 100, %r1;
    st.shared::cluster.b32 [%r6+128], %r7;
    mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r4+64];
    {WAIT.format("%r9+64", "0")}
    add.s32 %r6, %r9, %r5;
    ld.shared.b32 %r2, [%r6+128];
    mul.wide.u32 %rd5, %r11, 128;
    add.s64 %rd4, %rd4, %rd5;
"""
    )
    out = words(128)
    snippet(body).launch([out.data_ptr()], out, grid=4, cluster=2, seed=seed, races=True)
    assert out.view(4, 32)[:, 5].tolist() == [105, 5, 305, 205]


def test_ctas_that_wait_for_each_other_run_together() -> None:
    body = """
    mov.u32 %r3, %ctaid.x;
    mov.b32 %r2, 0;
    setp.eq.u32 %p1, %r1, 0;
    @%p1 atom.acq_rel.gpu.global.add.u32 %r4, [%rd11], 1;
$SPIN:
    ld.acquire.gpu.global.b32 %r2, [%rd11];
    setp.lt.u32 %p2, %r2, 3;
    @%p2 bra $SPIN;
"""
    count = torch.zeros(1, dtype=torch.int32)
    out = words()
    kernel = snippet(body, tensors=2)
    kernel.launch([out.data_ptr(), count.data_ptr()], out, count, grid=3, resident=3, seed=1)
    assert out.tolist() == [3] * 32


REGISTERS = """
    mov.b32 %r2, 1;
    setp.lt.u32 %p1, %r1, 128;
    @%p1 bra $FEW;
    setmaxnreg.inc.sync.aligned.u32 {many};
    bra $TRADED;
$FEW:
    setmaxnreg.dec.sync.aligned.u32 24;
$TRADED:
    bar.sync 0;
"""


def test_registers_are_traded_within_what_a_launch_gets() -> None:
    """384 threads get 168 each: 504 for three warpgroups."""
    assert run(REGISTERS.format(many=240), words(384), threads=384, seed=1).tolist() == [1] * 384
    with pytest.raises(Deadlock, match="248 registers a thread"):
        run(REGISTERS.format(many=248), words(384), threads=384)


CLUSTER = """
    mov.u32 %r10, %cluster_ctarank;
    xor.b32 %r3, %r10, 1;
    mapa.shared::cluster.u32 %r4, %r9, %r3;
    shl.b32 %r5, %r1, 2;
    add.s32 %r4, %r4, %r5;
    st.shared::cluster.b32 [%r4], %r10;
    {arrive}
    barrier.cluster.wait.acquire.aligned;
    add.s32 %r6, %r9, %r5;
    ld.shared.b32 %r2, [%r6];
    mul.wide.u32 %rd5, %r10, 128;
    add.s64 %rd4, %rd4, %rd5;
"""


@pytest.mark.parametrize(
    "arrive",
    [
        "barrier.cluster.arrive.release.aligned;",
        "barrier.cluster.arrive;",
        "fence.acq_rel.cluster; barrier.cluster.arrive.relaxed.aligned;",
    ],
)
@pytest.mark.parametrize("seed", SEEDS)
def test_the_barrier_of_a_cluster_orders(arrive: str, seed: int | None) -> None:
    out = words(64)
    kernel = snippet(CLUSTER.format(arrive=arrive))
    kernel.launch([out.data_ptr()], out, grid=2, cluster=2, seed=seed, races=True)
    assert out.tolist() == [1] * 32 + [0] * 32


def test_a_relaxed_arrival_orders_nothing() -> None:
    out = words(64)
    kernel = snippet(CLUSTER.format(arrive="barrier.cluster.arrive.relaxed.aligned;"))
    with pytest.raises(AssertionError, match="race"):
        kernel.launch([out.data_ptr()], out, grid=2, cluster=2, races=True)
