"""What hardware does not order by itself: kernels that overlap, proxies, barriers in the making, CTAs that end."""

from __future__ import annotations

import pytest
import torch

from tests.ptx import Deadlock
from tests.ptx.snippets import INIT, WAIT, run, snippet, words

SEEDS = [None, 1, 2]
READ = "ld.global.b32 %r2, [%rd11];"
COPY = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"


def eight() -> torch.Tensor:
    return torch.arange(8, dtype=torch.int32) + 8


class TestTheKernelInFront:
    """What it may write is not touched before ``griddepcontrol.wait``."""

    def test_reads_behind_the_wait(self) -> None:
        body = f"griddepcontrol.launch_dependents; griddepcontrol.wait; {READ}"
        assert run(body, words(), eight(), early=()).tolist() == [8] * 32

    def test_reads_before_it(self) -> None:
        body, source = f"{READ} griddepcontrol.wait;", eight()
        for early in ((), (source[1:],)):
            with pytest.raises(AssertionError, match=r"before griddepcontrol\.wait"):
                run(body, words(), source, early=early)
        assert run(body, words(), source, early=(source,)).tolist() == [8] * 32
        assert run(body, words(), source).tolist() == [8] * 32

    @pytest.mark.parametrize(
        "body",
        [
            "st.global.b32 [%rd11], 1;",
            "red.global.add.u32 [%rd11], 1;",
            "cp.async.ca.shared.global [%r9], [%rd11], 4;",
            "cp.async.bulk.global.shared::cta.bulk_group [%rd11], [%r9], 16;",
            INIT.format(64, 1) + f"@%p1 {COPY} [%r9], [%rd11], 16, [%r9+64];",
        ],
    )
    def test_any_access_counts(self, body: str) -> None:
        with pytest.raises(AssertionError, match=r"before griddepcontrol\.wait"):
            run(f"mov.b32 %r2, 0; {body} griddepcontrol.wait;", words(), eight(), early=())

    ONE_WAITS = """
        setp.ge.u32 %p1, %r1, 32;
        @%p1 bra $OTHER;
        griddepcontrol.wait;
        {arrive}
        bra $READ;
        $OTHER: {wait}
        $READ: ld.global.b32 %r2, [%rd11];
    """

    @pytest.mark.parametrize("seed", SEEDS)
    @pytest.mark.parametrize(
        ("arrive", "wait"),
        [
            ("bar.sync 0;", "bar.sync 0;"),
            ("bar.arrive 1, 64;", "bar.sync 1, 64;"),
            ("mbarrier.arrive.shared.b64 %rd6, [%r9+64];", WAIT.format("%r9+64", "0")),
        ],
    )
    def test_a_warp_may_wait_for_another_that_has(
        self, arrive: str, wait: str, seed: int | None
    ) -> None:
        body = INIT.format(64, 32) + self.ONE_WAITS.format(arrive=arrive, wait=wait)
        found = run(body, words(64), eight(), threads=64, seed=seed, early=())
        assert found.tolist() == [8] * 64

    def test_but_not_without_a_barrier(self) -> None:
        body = self.ONE_WAITS.format(arrive="", wait="")
        with pytest.raises(AssertionError, match=r"before griddepcontrol\.wait"):
            run(body, words(64), eight(), threads=64, early=())

    def test_a_kernel_that_does_not_wait_may_end_before_the_one_in_front(self) -> None:
        """What is launched behind it would then begin while that is still at work."""
        body = "mov.b32 %r2, 0; setp.gt.u32 %p1, %r1, 99; @%p1 griddepcontrol.wait;"
        with pytest.raises(AssertionError, match="no warp has waited"):
            run(body, words())


class TestLateCopies:
    """A copy that is late comes when all wait, not before."""

    BODY = (
        INIT.format(64, 1)
        + f"""@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r9+64], 16;
        @%p1 {COPY} [%r9], [%rd11], 16, [%r9+64];
        mov.b32 %r3, 0;
        $AGAIN: add.u32 %r3, %r3, 1; setp.lt.u32 %p2, %r3, 2000; @%p2 bra.uni $AGAIN;
        {{wait}}
        ld.shared.b32 %r2, [%r9];"""
    )

    @pytest.mark.parametrize("seed", SEEDS)
    def test_when_they_come(self, seed: int | None) -> None:
        wait = WAIT.format("%r9+64", 0)
        for late, first, body in ((0.0, 8, ""), (1.0, -1, ""), (0.0, 8, wait), (1.0, 8, wait)):
            found = run(self.BODY.format(wait=body), words(), eight(), seed=seed, late=late)
            assert found.tolist() == [first] * 32


class TestBarriersInTheMaking:
    BODY = """
        setp.eq.u32 %p1, %r1, 0; setp.eq.u32 %p2, %r1, 32; mov.b32 %r2, 0;
        @%p1 mbarrier.init.shared.b64 [%r9+64], 1;
        {fence} {order}
        @%p2 mbarrier.arrive.shared.b64 %rd6, [%r9+64];"""
    FENCE = "fence.mbarrier_init.release.cluster;"

    def test_a_fence_and_a_barrier(self) -> None:
        body = self.BODY.format(fence=self.FENCE, order="bar.sync 0;")
        run(body, words(64), threads=64, races=True)

    def test_no_fence(self) -> None:
        with pytest.raises(AssertionError, match="no fence behind its initialisation"):
            run(self.BODY.format(fence="", order="bar.sync 0;"), words(64), threads=64)

    def test_no_barrier(self) -> None:
        body = self.BODY.format(fence=self.FENCE, order="")
        with pytest.raises(AssertionError, match="used before it is initialised"):
            run(body, words(64), threads=64, races=True)

    def test_a_copy_of_the_maker(self) -> None:
        """The asynchronous proxy is somebody else, whichever warp asks it."""
        body = (
            INIT.format(64, 1)
            + f"""@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r9+64], 16;
            @%p1 {COPY} [%r9], [%rd11], 16, [%r9+64];"""
            + WAIT.format("%r9+64", 0)
            + "mov.b32 %r2, 0;"
        )
        run(body, words(), eight(), races=True)
        with pytest.raises(AssertionError, match="no fence behind its initialisation"):
            run(body.replace(self.FENCE, ""), words(), eight())


@pytest.mark.parametrize("fence", ["fence.proxy.async.shared::cta;", ""])
def test_a_load_over_what_a_warp_wrote_needs_a_fence(fence: str) -> None:
    """A barrier is not enough: a store may be on its way when the copy's bytes come."""
    body = (
        INIT.format(1024, 1)
        + f"""
        shl.b32 %r3, %r1, 2; add.s32 %r3, %r3, %r9; st.shared.b32 [%r3], %r1; {fence} bar.sync 0;
        @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r9+1024], 32;
        @%p1 {COPY} [%r9], [%rd11], 32, [%r9+1024];"""
        + WAIT.format("%r9+1024", 0)
        + "ld.shared.b32 %r2, [%r9+4];"
    )
    if fence:
        assert run(body, words(64), eight(), threads=64, races=True).tolist() == [9] * 64
    else:
        with pytest.raises(AssertionError, match="writes without a fence"):
            run(body, words(64), eight(), threads=64, races=True)


class TestTheEndOfACta:
    def test_a_load_that_nobody_awaits(self) -> None:
        body = (
            INIT.format(64, 1)
            + f"""mov.b32 %r2, 0;
            @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r9+64], 16;
            @%p1 {COPY} [%r9], [%rd11], 16, [%r9+64];"""
        )
        with pytest.raises(AssertionError, match="which has ended"):
            run(body, words(), eight(), races=True)

    def test_a_store_that_nobody_awaits(self) -> None:
        body = """
            shl.b32 %r3, %r1, 2; add.s32 %r3, %r3, %r9; st.shared.b32 [%r3], %r1; mov.b32 %r2, 0;
            fence.proxy.async.shared::cta; bar.sync 0; setp.eq.u32 %p1, %r1, 0;
            @%p1 cp.async.bulk.global.shared::cta.bulk_group [%rd11], [%r9], 32;
            @%p1 cp.async.bulk.commit_group;"""
        with pytest.raises(AssertionError, match="which has ended"):
            run(body, words(), eight(), races=True)
        target = eight()
        run(body + "@%p1 cp.async.bulk.wait_group.read 0;", words(), target, races=True)
        assert target.tolist() == list(range(8))

    def test_shared_memory_of_one_that_has_ended(self) -> None:
        """The first CTA leaves at once, and the other one still writes to it."""
        body = """
            mov.b32 %r2, 0; mov.b32 %r7, 0;
            mov.u32 %r10, %cluster_ctarank;
            setp.eq.u32 %p1, %r10, 0;
            barrier.cluster.arrive; barrier.cluster.wait;
            @%p1 bra DONE;
            $LATER: add.s32 %r7, %r7, 1; setp.lt.u32 %p2, %r7, 2000; @%p2 bra $LATER;
            mov.b32 %r3, 0; mapa.shared::cluster.u32 %r4, %r9, %r3;
            st.shared::cluster.b32 [%r4], 1;"""
        out = words()
        with pytest.raises(AssertionError, match="which has ended"):
            snippet(body).launch([out.data_ptr()], out, grid=2, cluster=2)


@pytest.mark.parametrize(("ctas", "many"), [(1, 240), (2, 96), (2, 104)])
def test_registers_of_a_launch_that_shares_its_sm(ctas: int, many: int) -> None:
    """Two CTAs of 384 threads leave 80 registers to a thread, 240 for three warpgroups."""
    body = f"""
        mov.b32 %r2, 1; setp.lt.u32 %p1, %r1, 128; @%p1 bra $FEW;
        setmaxnreg.inc.sync.aligned.u32 {many}; bra $TRADED;
        $FEW: setmaxnreg.dec.sync.aligned.u32 {24 if ctas == 1 else 40};
        $TRADED: bar.sync 0;"""
    kernel, out = snippet(body, threads=384, ctas=ctas), words(384)
    if many == 104:
        with pytest.raises(Deadlock, match="104 registers a thread"):
            kernel.launch([out.data_ptr()], out)
    else:
        kernel.launch([out.data_ptr()], out)
        assert out.tolist() == [1] * 384
