"""``cp.async``, bulk copies and TMA against NumPy; what is read too early is poison."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.ptx import TensorMap
from tests.ptx.maps import swizzled
from tests.ptx.snippets import INIT, WAIT, run, snippet, words

SEEDS = [None, 1, 2]
PLACE = "shl.b32 %r3, %r1, 2; add.s32 %r3, %r3, %r9;"
ASYNC = (
    PLACE
    + "shl.b32 %r4, %r1, 4; add.s32 %r4, %r4, %r9; mul.wide.u32 %rd5, %r1, 16; add.s64 %rd5, %rd11, %rd5;"
)


def data(count: int = 1024) -> torch.Tensor:
    return torch.arange(count, dtype=torch.int32) * 3 + 1


class TestCpAsync:
    BODY = ASYNC + "cp.async.cg.shared.global [%r4], [%rd5], 16; cp.async.commit_group;"

    @pytest.mark.parametrize("seed", SEEDS)
    @pytest.mark.parametrize("wait", ["cp.async.wait_group 0;", "cp.async.wait_all;"])
    def test_groups(self, wait: str, seed: int | None) -> None:
        body = self.BODY + wait + "bar.warp.sync -1; ld.shared.b32 %r2, [%r3+4];"
        assert run(body, words(), data(), seed=seed).tolist() == data()[1:33].tolist()

    def test_what_nobody_waited_for_is_not_there(self) -> None:
        body = self.BODY + "cp.async.wait_group 1; ld.shared.b32 %r2, [%r3];"
        assert run(body, words(), data()).tolist() == [-1] * 32

    def test_bytes_beyond_the_source_are_zero(self) -> None:
        body = (
            ASYNC
            + """
            setp.lt.u32 %p1, %r1, 2; selp.b32 %r6, 16, 0, %p1; setp.eq.u32 %p1, %r1, 2; selp.b32 %r6, 8, %r6, %p1;
            cp.async.ca.shared.global [%r4], [%rd5], 16, %r6; cp.async.commit_group; cp.async.wait_group 0;
            bar.warp.sync -1; ld.shared.b32 %r2, [%r3];"""
        )
        assert run(body, words(), data(10)).tolist() == data(10).tolist() + [0] * 22

    @pytest.mark.parametrize("seed", SEEDS)
    def test_arrivals_behind_copies(self, seed: int | None) -> None:
        body = (
            INIT.format(1024, 32)
            + self.BODY
            + f"""
            cp.async.mbarrier.arrive.noinc.shared.b64 [%r9+1024]; {WAIT.format("%r9+1024", 0)}
            ld.shared.b32 %r2, [%r3];"""
        )
        assert run(body, words(), data(), seed=seed).tolist() == data(32).tolist()

    def test_unaligned(self) -> None:
        with pytest.raises(AssertionError, match="unaligned"):
            run(self.BODY.replace("[%rd5]", "[%rd5+4]") + "mov.b32 %r2, 0;", words(), data())


BULK = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
LOAD = (
    INIT.format(1024, 1)
    + f"""
    @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r9+1024], 512;
    @%p1 {BULK} [%r9], [%rd11+16], 512, [%r9+1024];
"""
)


class TestBulk:
    @pytest.mark.parametrize("seed", SEEDS)
    def test_load(self, seed: int | None) -> None:
        body = LOAD + WAIT.format("%r9+1024", 0) + PLACE + "ld.shared.b32 %r2, [%r3+256];"
        found = run(body, words(64), data(), threads=64, seed=seed, races=True)
        assert found.tolist() == data()[68:132].tolist()

    def test_a_load_that_is_not_awaited(self) -> None:
        body = LOAD + PLACE + "ld.shared.b32 %r2, [%r3+256];"
        assert run(body, words(), data()).tolist() == [-1] * 32
        with pytest.raises(AssertionError, match="race"):
            run(body, words(), data(), races=True)

    def test_a_load_over_what_others_still_read(self) -> None:
        body = (
            LOAD
            + WAIT.format("%r9+1024", 0)
            + PLACE
            + f"""
            ld.shared.b32 %r2, [%r3];
            @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r9+1024], 512;
            @%p1 {BULK} [%r9], [%rd11], 512, [%r9+1024];"""
            + WAIT.format("%r9+1024", 1)
        )
        with pytest.raises(AssertionError, match="which CTA 0 warp 1 reads"):
            run(body, words(64), data(), threads=64, races=True)
        body = body.replace("ld.shared.b32 %r2, [%r3];", "ld.shared.b32 %r2, [%r3]; bar.sync 0;")
        run(body, words(64), data(), threads=64, races=True)

    STORE = (
        PLACE
        + """
        add.s32 %r2, %r1, 7; st.shared.b32 [%r3], %r2; {fence} bar.sync 0;
        setp.eq.u32 %p1, %r1, 0;
        @%p1 cp.async.bulk.global.shared::cta.bulk_group [%rd11+32], [%r9], 128;
        @%p1 cp.async.bulk.commit_group;
        @%p1 cp.async.bulk.wait_group.read 0;
        {barrier} st.shared.b32 [%r3], 99;"""
    )

    @pytest.mark.parametrize("seed", SEEDS)
    def test_store(self, seed: int | None) -> None:
        fence = "fence.proxy.async.shared::cta;"
        target = torch.zeros(64, dtype=torch.int32)
        body = self.STORE.format(fence=fence, barrier="bar.sync 0;")
        run(body, words(64), target, threads=64, seed=seed, races=True)
        assert target.tolist() == [0] * 8 + list(range(7, 39)) + [0] * 24
        with pytest.raises(AssertionError, match="reads without a fence"):
            run(
                self.STORE.format(fence="", barrier="bar.sync 0;"),
                words(64),
                target,
                threads=64,
                races=True,
            )

    def test_a_source_that_is_overwritten_too_early(self) -> None:
        body = self.STORE.format(fence="fence.proxy.async.shared::cta;", barrier="").replace(
            "wait_group.read 0", "wait_group.read 1"
        )
        target = torch.zeros(64, dtype=torch.int32)
        run(body, words(), target)
        assert target[8:40].tolist() == [99] * 32
        with pytest.raises(AssertionError, match="race"):
            run(body, words(), target, races=True)

    @pytest.mark.parametrize("kind", ["f32", "u32", "bf16"])
    def test_reductions(self, kind: str) -> None:
        dtype = {"f32": torch.float32, "u32": torch.int32, "bf16": torch.bfloat16}[kind]
        count = 128 // dtype.itemsize
        total, part = torch.arange(count).to(dtype), (torch.arange(count) * 2).to(dtype)
        name = "add.noftz.bf16" if kind == "bf16" else f"add.{kind}"
        body = (
            PLACE
            + f"""
            add.s64 %rd5, %rd12, %rd3; ld.global.b32 %r2, [%rd5]; st.shared.b32 [%r3], %r2; bar.warp.sync -1;
            elect.sync _|%p1, -1;
            @%p1 cp.reduce.async.bulk.global.shared::cta.bulk_group.{name} [%rd11], [%r9], 128;"""
        )
        run(body, words(), total, part)
        assert total.tolist() == [3 * i for i in range(count)]

    def test_to_another_cta_of_the_cluster(self) -> None:
        body = (
            INIT.format(1024, 1)
            + f"""
            mov.u32 %r10, %cluster_ctarank; xor.b32 %r4, %r10, 1;
            mapa.shared::cluster.u32 %r5, %r9, %r4; {PLACE}
            mad.lo.s32 %r6, %r10, 100, %r1; st.shared.b32 [%r3], %r6; fence.proxy.async; bar.sync 0;
            barrier.cluster.arrive; barrier.cluster.wait;
            @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r9+1024], 128;
            @%p1 cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes
                [%r5+512], [%r9], 128, [%r5+1024];
            {WAIT.format("%r9+1024", 0)} ld.shared.b32 %r2, [%r3+512];
            barrier.cluster.arrive; barrier.cluster.wait;
            mul.wide.u32 %rd5, %r10, 128; add.s64 %rd4, %rd4, %rd5;"""
        )
        out = words(64)
        snippet(body).launch([out.data_ptr()], out, grid=2, cluster=2, races=True)
        assert out.tolist() == [*range(100, 132), *range(32)]

    @pytest.mark.parametrize(
        ("old", "new", "said"),
        [
            ("512, [", "520, [", "not multiples of 16"),
            ("[%rd11+16]", "[%rd11+4000]", "not given"),
            ("_, [%r9+1024], 512", "_, [%r9+1024], 496", "Deadlock|nothing can go on"),
        ],
    )
    def test_refused(self, old: str, new: str, said: str) -> None:
        body = LOAD.replace(old, new) + WAIT.format("%r9+1024", 0) + "mov.b32 %r2, 0;"
        with pytest.raises(AssertionError, match=said):
            run(body, words(), data())


def box_of(x: np.ndarray, start: tuple[int, ...], box: tuple[int, ...]) -> np.ndarray:
    """A box, zeros outside; in the order of the array's dimensions."""
    found = np.zeros(box, x.dtype)
    for at in np.ndindex(*box):
        place = tuple(s + i for s, i in zip(start, at, strict=True))
        if all(0 <= p < n for p, n in zip(place, x.shape, strict=True)):
            found[at] = x[place]
    return found


def tma_load(table: TensorMap, start: tuple[int, ...], first: str = "") -> str:
    """Load a box to the start of shared memory, and each thread's 16 bytes of it."""
    coordinates = ", ".join(str(s) for s in reversed(start))
    return f"""{INIT.format(16384, 1)} {first}
        mov.b64 %rd9, 0;
        @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r9+16384], {table.bytes};
        @%p1 cp.async.bulk.tensor.{len(start)}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint
            [%r9], [%rd20, {{{coordinates}}}], [%r9+16384], %rd9;
        {WAIT.format("%r9+16384", 0)}
        shl.b32 %r6, %r1, 4; add.s32 %r6, %r6, %r9;
        ld.shared.v4.b32 {{%r2, %r3, %r4, %r5}}, [%r6];"""


def loaded(
    x: torch.Tensor, box: tuple[int, ...], swizzle: int, start: tuple[int, ...], **options
) -> np.ndarray:
    """Bytes of shared memory behind a load of a box."""
    table = TensorMap.of(x, box, swizzle)
    body = tma_load(table, start)
    threads = table.bytes // 16
    out = words(4 * threads)
    kernel = snippet(body, threads=threads, width=16, maps=1)
    kernel.launch([out.data_ptr()], out, x, maps=[table], races=True, **options)
    return out.numpy().view(np.uint8)


class TestTma:
    @pytest.mark.parametrize("seed", SEEDS)
    @pytest.mark.parametrize(
        ("shape", "box", "swizzle", "start"),
        [
            ((50, 100), (32, 64), 128, (3, 16)),
            ((50, 100), (32, 64), 128, (30, 60)),
            ((50, 100), (64, 32), 64, (-2, 8)),
            ((50, 100), (64, 16), 32, (0, 0)),
            ((50, 100), (16, 64), 0, (0, -8)),
            ((4, 20, 64), (1, 16, 64), 128, (2, 9, 0)),
            ((4, 20, 64), (1, 16, 64), 128, (-1, 9, 0)),
            ((3, 2, 40, 64), (1, 1, 32, 64), 128, (2, 1, 20, 0)),
            ((2, 3, 2, 40, 64), (1, 1, 2, 16, 32), 64, (1, 2, 0, 30, 32)),
        ],
    )
    def test_loads(self, shape, box, swizzle: int, start, seed: int | None) -> None:
        x = torch.arange(int(np.prod(shape)), dtype=torch.int16).reshape(shape)
        pitch = shape[-1] + -shape[-1] % 16 + 16
        wide = torch.full((*shape[:-1], pitch), -3, dtype=torch.int16)[..., : shape[-1]]
        wide.copy_(x)
        found = loaded(wide, box, swizzle, start, seed=seed)
        wanted = box_of(x.numpy(), start, box).reshape(-1)
        places = swizzled(np.arange(len(wanted)) * 2, swizzle)
        assert sorted(places.tolist()) == list(range(0, 2 * len(wanted), 2))
        assert (found.view(np.int16)[places // 2] == wanted).all()

    def test_the_swizzle_is_of_addresses(self) -> None:
        a = np.arange(0, 2048, 16)
        for swizzle in (32, 64, 128):
            unit, moved = a // 16, swizzled(a, swizzle) // 16
            assert (moved ^ unit == a // 128 % (swizzle // 16)).all()

    @pytest.mark.parametrize("seed", SEEDS)
    def test_multicast(self, seed: int | None) -> None:
        """Each CTA loads its half of the rows for both."""
        x = torch.arange(32 * 64, dtype=torch.int16).reshape(32, 64)
        table = TensorMap.of(x, (16, 64), 128)
        out = words(2 * 1024)
        body = (
            INIT.format(16384, 1)
            + f"""
            mov.u32 %r10, %cluster_ctarank; shl.b32 %r11, %r10, 4; shl.b32 %r12, %r10, 11; add.s32 %r12, %r12, %r9;
            mov.b16 %rs1, 3;
            barrier.cluster.arrive; barrier.cluster.wait;
            @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r9+16384], 4096;
            @%p1 cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster
                [%r12], [%rd20, {{0, %r11}}], [%r9+16384], %rs1;
            {WAIT.format("%r9+16384", 0)}
            shl.b32 %r6, %r1, 4; add.s32 %r6, %r6, %r9; ld.shared.v4.b32 {{%r2, %r3, %r4, %r5}}, [%r6];
            mul.wide.u32 %rd5, %r10, 4096; add.s64 %rd4, %rd4, %rd5;"""
        )
        kernel = snippet(body, threads=256, width=16, maps=1)
        kernel.launch(
            [out.data_ptr()], out, x, grid=2, cluster=2, maps=[table], seed=seed, races=True
        )
        places = swizzled(np.arange(2048) * 2, 128) // 2
        for half in out.numpy().view(np.int16).reshape(2, 2048):
            assert (half[places] == x.numpy().ravel()).all()

    def test_stores(self) -> None:
        x = torch.zeros(20, 48, dtype=torch.int32)
        table = TensorMap.of(x, (16, 32), 0)
        body = """
            shl.b32 %r3, %r1, 2; add.s32 %r3, %r3, %r9; st.shared.b32 [%r3], %r1; st.shared.b32 [%r3+1024], 5;
            fence.proxy.async.shared::cta; bar.sync 0; mov.b32 %r2, 0;
            setp.eq.u32 %p1, %r1, 0;
            @%p1 cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%rd20, {24, 14}], [%r9];
            @%p1 cp.async.bulk.commit_group; @%p1 cp.async.bulk.wait_group 0;"""
        out = words(256)
        snippet(body, threads=256, maps=1).launch(
            [out.data_ptr()], out, x, maps=[table], races=True
        )
        wanted = np.zeros((20, 48), np.int32)
        box = np.concatenate([np.arange(256), np.full(256, 5)]).reshape(16, 32)
        wanted[14:20, 24:48] = box[:6, :24]
        assert (x.numpy() == wanted).all()

    def test_refused(self) -> None:
        x = torch.zeros(8, 64, dtype=torch.int16)
        with pytest.raises(AssertionError, match="multiples of 16"):
            TensorMap.of(torch.zeros(8, 65, dtype=torch.int16)[:, :64], (8, 64))
        with pytest.raises(AssertionError, match="as long as the swizzle"):
            TensorMap.of(x, (8, 32), 128)
        out, table = words(1024), TensorMap.of(x, (8, 64), 128)
        body = tma_load(table, (0, 0)).replace("[%r9], [%rd20", "[%r9+64], [%rd20")
        kernel = snippet(body, threads=64, width=16, maps=1)
        with pytest.raises(AssertionError, match="no multiple of 128"):
            kernel.launch([out.data_ptr()], out, x, maps=[table])
        with pytest.raises(AssertionError, match="no tensor map was given"):
            kernel.launch([out.data_ptr()], out, x)
