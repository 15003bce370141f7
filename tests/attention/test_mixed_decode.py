"""The QK4PV8 decode kernel without a GPU: it compiles clean, and its code computes what the contract says."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from epicute.attention.mixed_decode import Binder, plan_mixed_decode, workspace_of
from epicute.attention.mixed_decode_build import MixedDecodeKernel, mixed_decode_kernel_for
from epicute.attention.mixed_decode_spec import (
    MixedDecodeSchedule,
    MixedDecodeSpec,
    choose_mixed_decode,
)
from epicute.errors import ArgumentError, UnsupportedError
from epicute.jit import DEFAULT_TARGET, Target, compile
from epicute.kv.qk4pv8 import Memory
from epicute.layouts.qk4pv8 import HEAD_DIMS, PAGE_SIZES, QK4PV8Page
from epicute.quant.smoothing import Means
from tests.attention.mixed_decode_cases import BF16, CASES, Batch, Case, bound, check
from tests.kv.writes import shifted
from tests.ptx import Kernel, TensorMap, ptx_of

CTAS = 3


def kernel_of(case: Case) -> MixedDecodeKernel:
    return mixed_decode_kernel_for(case.spec, target=DEFAULT_TARGET)


@functools.cache
def compiled(kernel: MixedDecodeKernel) -> Kernel:
    return Kernel(ptx_of(kernel))


def launch(
    batch: Batch, kernel: MixedDecodeKernel | None = None, ctas: int = CTAS, **how: object
) -> None:
    """Run the compiled code on the CPU."""
    kernel = kernel or kernel_of(batch.case)
    arguments, tensors = bound(batch, kernel, ctas)
    page, pool = batch.cache.page, batch.cache.pool(batch.memory)
    size = page.page_size
    # The DSL leaves out heads where it knows that there is one.
    heads = () if batch.case.kv_heads == 1 else (batch.case.kv_heads,)
    steps = (size, *((pool.head_stride,) if heads else ()), pool.page_stride)
    table = TensorMap(
        batch.memory.records.data_ptr() + page.values_start,
        1,
        (size, page.head_dim, *heads, batch.cache.pages),
        steps,
        (size, page.head_dim, *((1,) if heads else ()), 1),
        size,
    )
    options = {"resident": ctas, "shared": kernel.shared_memory + 1024, "early": (), **how}
    compiled(kernel).launch(arguments, *tensors, grid=ctas, maps=[table], **options)


SPECS = [
    MixedDecodeSpec(32, 8, QK4PV8Page(128, 128), 1),
    MixedDecodeSpec(40, 8, QK4PV8Page(64, 128, "fast8"), 2, k_scaled=True, v_scaled=True, lse=True),
    MixedDecodeSpec(32, 8, QK4PV8Page(32, 128), 3, torch.float16, append=False),
    MixedDecodeSpec(96, 8, QK4PV8Page(128, 128), 2),
    MixedDecodeSpec(28, 4, QK4PV8Page(128, 128, "fast8"), 0, prefetch=True),
    MixedDecodeSpec(16, 2, QK4PV8Page(32, 64, "fast8"), 3, torch.float16, 256),
    MixedDecodeSpec(9, 3, QK4PV8Page(64, 64), 1, lse=True),
    MixedDecodeSpec(71, 1, QK4PV8Page(128, 64), 3),
    MixedDecodeSpec(64, 4, QK4PV8Page(64, 64, "fast8"), 2, append=False, lse=True),
]


@pytest.mark.compile
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_no_spills_no_serialised_products(spec: MixedDecodeSpec) -> None:
    kernel = mixed_decode_kernel_for(spec, target=DEFAULT_TARGET)
    report = compile(kernel, strict=False).report
    assert report.problems(DEFAULT_TARGET.smem_per_block) == []
    assert report.registers is not None
    assert report.shared_memory is not None
    threads = 320 * kernel.schedule.ctas
    assert report.registers * threads <= 65536
    assert report.shared_memory <= kernel.shared_memory
    assert kernel.schedule.ctas * (report.shared_memory + 1024) <= 228 * 1024


@pytest.mark.compile
class TestKernel:
    @pytest.mark.parametrize("name", CASES)
    def test_kd_01_kd_04_kd_08_kd_11_qk_08_attention_of_the_codes(self, name: str) -> None:
        batch = Batch.draw(CASES[name], [300, 5, 0, 128, 1], 3)
        launch(batch)
        check(batch, kernel_of(batch.case))

    @pytest.mark.parametrize("name", ["plain", "40:8, hi and lo, page 64"])
    def test_qk_07_means_of_each_request(self, name: str) -> None:
        batch = Batch.draw(CASES[name], [129, 64, 257], 4, groups=3)
        launch(batch)
        check(batch, kernel_of(batch.case))

    @pytest.mark.parametrize("name", ["plain", "unsmoothed, in pages"])
    def test_parts_are_merged(self, name: str) -> None:
        batch = Batch.draw(CASES[name], [1025, 700], 5)
        launch(batch)
        check(batch, kernel_of(batch.case))

    def test_more_parts_than_a_warp_has_lanes(self) -> None:
        case = replace(CASES["plain"], terms=0, kv_heads=1)
        kernel = kernel_of(case)
        kernel = replace(kernel, schedule=replace(kernel.schedule, part=128))
        batch = Batch.draw(case, [34 * 128 + 5], 9)
        launch(batch, kernel, ctas=3, seed=1)
        check(batch, kernel)

    @pytest.mark.parametrize(("stages", "keys"), [(2, 2), (3, 2), (3, 3)])
    def test_tiles_come_in_any_order(self, stages: int, keys: int) -> None:
        """A tile may come after the other warpgroup is done with the next: of a part, and across parts of odd size."""
        case = replace(CASES["plain"], terms=0, kv_heads=1)
        kernel = kernel_of(case)
        for seed in range(4):
            part = (5, 5, 1, 3)[seed] * 128
            cut = replace(kernel.schedule, stages=stages, key_stages=keys, part=part)
            other = replace(kernel, schedule=cut)
            batch = Batch.draw(case, [1900, 130], 8)
            launch(batch, other, ctas=1, late=0.3, seed=seed or None)
            check(batch, other)

    def test_kd_17_neither_order_nor_batch_mates_change_bits(self) -> None:
        case = CASES["plain"]
        batch = Batch.draw(case, [600, 31, 128], 6)
        launch(batch)
        for seed in (1, 2):
            again = Batch.draw(case, [600, 31, 128], 6)
            launch(again, seed=seed)
            assert torch.equal(again.out, batch.out)
            assert torch.equal(again.lse, batch.lse)
        for i in range(3):
            own = slice(i, i + 1)
            alone = Batch.of(case, batch.q[own], batch.keys[own], batch.values[own], batch.means, 9)
            launch(alone)
            assert torch.equal(alone.out, batch.out[own])
            assert torch.equal(alone.lse, batch.lse[own])

    @pytest.mark.parametrize(
        "name", ["plain", "40:8, hi and lo, page 64", "64 channels, page 32, fast8"]
    )
    def test_kd_17_bits_do_not_depend_on_which_cta_has_which_parts(self, name: str) -> None:
        """One that folds all of a head, stripes that begin or end within one, and a CTA for each part."""
        case = CASES[name]
        first = Batch.draw(case, [1300, 0, 700], 6)
        launch(first, ctas=1)
        check(first, kernel_of(case))
        for ctas in (2, 5, 7, 40):
            batch = Batch.draw(case, [1300, 0, 700], 6)
            launch(batch, ctas=ctas, seed=ctas)
            assert torch.equal(batch.out, first.out)
            assert torch.equal(batch.lse, first.lse)

    @pytest.mark.parametrize("name", ["plain", "64 channels, scaled", "12:1 of 64 channels"])
    def test_a_new_row_is_entered_by_who_clears_behind_it(self, name: str) -> None:
        """Of the first and the last token in an odd sixteen, an even one, and the first and last one of a tile."""
        case = CASES[name]
        for lengths in ([17, 255, 60], [33, 129, 384]):
            batch = Batch.draw(case, lengths, 7)
            launch(batch, ctas=2, races=True, resident=1)
            check(batch, kernel_of(case))

    @pytest.mark.parametrize("name", ["plain", "64 channels, page 32, fast8"])
    def test_shared_memory_is_read_behind_what_orders_it(self, name: str) -> None:
        for lengths, ctas in (([300, 5, 128], CTAS), ([1100, 513], 2)):
            batch = Batch.draw(CASES[name], lengths, 7)
            launch(batch, ctas=ctas, races=True, resident=1)

    def test_kd_02_without_queries_the_mean_of_values(self) -> None:
        case = replace(CASES["plain"], terms=0)
        for n in (1, 15, 16, 17, 255, 256, 257):
            batch = Batch.draw(case, [n], n)
            batch.q.zero_()
            launch(batch)
            _, values = batch.scores(0)
            mean = values.mean(dim=1)
            assert ((batch.out[0].double() - mean).abs() <= 2.0**-8 * mean.abs() + 1e-3).all()


@given(
    st.sampled_from(HEAD_DIMS),
    st.sampled_from(PAGE_SIZES),
    st.sampled_from(["exact16", "fast8"]),
    st.integers(1, 8),
    st.integers(1, 72),
    st.integers(0, 3),
)
def test_schedules_fit(
    head_dim: int, page: int, order: str, kv_heads: int, group: int, terms: int
) -> None:
    spec = MixedDecodeSpec(kv_heads * group, kv_heads, QK4PV8Page(page, head_dim, order), terms)
    try:
        schedule = choose_mixed_decode(spec)
    except UnsupportedError:
        assert group * terms > 64
        return
    assert schedule.shared_memory(spec) * schedule.ctas <= 226 * 1024
    assert spec.blocks * spec.columns >= spec.group > (spec.blocks - 1) * spec.columns


@pytest.mark.parametrize(
    ("heads", "kv_heads", "batch", "each"),
    [(32, 8, 1, 1), (8, 1, 2, 1), (32, 8, 3, 2), (32, 8, 32, 2)],
)
def test_one_request_leaves_room_for_the_next_launch(
    heads: int, kv_heads: int, batch: int, each: int
) -> None:
    spec = MixedDecodeSpec(heads, kv_heads, QK4PV8Page(128, 128), 1)
    assert choose_mixed_decode(spec).launched(spec, batch, 132) == each * 132


def test_kd_18_qk_10_what_no_kernel_serves_is_refused() -> None:
    page = QK4PV8Page(64, 128)
    for wrong, named in (
        ({"heads": 3, "kv_heads": 2}, "kv_heads"),
        ({"heads": 0}, "heads"),
        ({"terms": 4}, "terms"),
        ({"dtype": torch.float32}, "dtype"),
        ({"p_scale": 1}, "p_scale"),
        ({"scale": -1.0}, "scale"),
        ({"scale": float("nan")}, "scale"),
    ):
        with pytest.raises(ArgumentError, match=named):
            MixedDecodeSpec(**{"heads": 8, "kv_heads": 2, "page": page, **wrong})  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="order"):
        MixedDecodeSpec(8, 2, QK4PV8Page(64, 128, "tcgen05"))
    with pytest.raises(UnsupportedError, match="target"):
        mixed_decode_kernel_for(CASES["plain"].spec, target=Target("sm_100a"))
    with pytest.raises(ArgumentError, match="cache"):
        plan_mixed_decode(CASES["plain"])  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="schedule"):
        MixedDecodeSchedule(1)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"q": torch.zeros(2, 8, 64, dtype=BF16)}, "q: got"),
        ({"q": torch.zeros(2, 8, 128)}, "q: got"),
        ({"out": torch.zeros(3, 8, 128, dtype=BF16)}, "out: got"),
        ({"out": torch.zeros(2, 8, 129, dtype=BF16)[..., 1:]}, "out: got"),
        ({"new_k": None}, "operands"),
        ({"new_v": torch.zeros(2, 8, 128, dtype=BF16)}, "new_v: got"),
        ({"means": None}, "operands"),
        ({"lse": torch.zeros(8, 2)}, "lse: got"),
        ({"lengths": torch.zeros(2, dtype=torch.int64)}, "kv_lengths: got"),
        ({"table": torch.zeros(1, 4, dtype=torch.int32)}, "page_table: got"),
        ({"table": torch.zeros(2, 4, dtype=torch.int64)}, "page_table: got"),
        ({"batch": 1}, "workspace.counters: got"),
        ({"memory": replace(CASES["plain"], page=64).cache(5).allocate()}, "memory"),
        ({"means": Means("static", shifted(1, 8, 128), torch.zeros(1, 2, 128))}, "q_mean: got"),
        ({"means": Means("static", torch.zeros(1, 8, 128), shifted(1, 2, 128))}, "k_mean: got"),
        ({"delta": shifted(5, 8, 1, 128, dtype=BF16)}, "memory.delta: got"),
        ({"workspace": {"stats": shifted(10**5)}}, "workspace.stats: got"),
        ({"workspace": {"partials": torch.zeros(10**7, dtype=torch.int32)}}, "workspace.partials"),
        (
            {"workspace": {"counters": torch.zeros(90, dtype=torch.int64)}},
            "workspace.counters: got",
        ),
    ],
)
def test_wrong_operands_are_refused_by_name(change: dict[str, object], named: str) -> None:
    batch = Batch.draw(CASES["plain"], [40, 3], 1)
    kernel = kernel_of(batch.case)
    operands = {**batch.operands(), **{k: v for k, v in change.items() if k in batch.operands()}}
    operands = {name: x for name, x in operands.items() if x is not None}
    workspace = workspace_of(kernel, change.get("batch", 2), "cpu")  # type: ignore[arg-type]
    if "workspace" in change:
        workspace = replace(workspace, **change["workspace"])  # type: ignore[arg-type]
    memory = change.get("memory", batch.memory)
    if "delta" in change:
        memory = Memory(batch.memory.records, change["delta"])  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=named):
        Binder(batch.cache, kernel).bind(
            change.get("q", batch.q),  # type: ignore[arg-type]
            memory,  # type: ignore[arg-type]
            change.get("out", batch.out),  # type: ignore[arg-type]
            workspace,
            (change.get("lengths", batch.lengths), change.get("table", batch.table)),  # type: ignore[arg-type]
            operands,
            CTAS,
        )
