"""The QK4PV8 writer: the contract's bytes, on the CPU and in the compiled code."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from epicute.errors import ArgumentError, UnsupportedError
from epicute.jit import DEFAULT_TARGET, compile
from epicute.kv.qk4pv8 import Memory, QK4PV8Cache
from epicute.kv.qk4pv8_write import (
    ARGUMENTS,
    CacheWriteKernel,
    CacheWritePlan,
    WriteSpec,
    plan_cache_write,
)
from epicute.layouts.qk4pv8 import QK4PV8Page
from epicute.quant import smoothing
from epicute.quant.smoothing import Means
from epicute.testing import assert_equal_bits
from tests.kv.writes import (
    BF16,
    CASES,
    FP16,
    PLACINGS,
    Batch,
    Case,
    check,
    drawn,
    fresh,
    shifted,
)
from tests.ptx import Emulated


def planned(case: Case) -> CacheWritePlan:
    return plan_cache_write(
        case.cache,
        case.dtype,
        grouped=case.grouped,
        table=case.table,
        counted=case.counted,
        device="cpu",
    )


@given(
    st.sampled_from(list(CASES)),
    st.integers(0, 60),
    st.sampled_from(list(PLACINGS)),
    st.integers(0, 2**16),
)
def test_a_plan_on_the_cpu_is_quantize_and_place(
    name: str, rows: int, placing: str, seed: int
) -> None:
    case = CASES[name]
    batch = drawn(case, rows, placing, seed)
    batch.run(planned(case))
    memory, _ = fresh(case, "cpu")
    slots = batch.places.get("slots")
    if slots is None:
        return
    kept = ((slots >= 0) & (slots < case.cache.capacity)).nonzero()[:, 0]
    group = batch.places.get("group")
    rows_ = case.cache.quantize(
        batch.keys[kept],
        batch.values[kept],
        batch.means,
        None if group is None else group[kept],
    )
    case.cache.place(memory, rows_, slots[kept])
    assert_equal_bits(batch.memory.records, memory.records)


def test_kd_18_and_qk_10_what_no_kernel_serves_is_refused() -> None:
    for order in ("tcgen05",):
        cache = QK4PV8Cache(1, 1, 1, QK4PV8Page(32, 64, order))
        with pytest.raises(UnsupportedError, match="order"):
            plan_cache_write(cache, device="cpu")
    with pytest.raises(UnsupportedError, match="q_heads"):
        plan_cache_write(QK4PV8Cache(1, 1, 65, QK4PV8Page(32, 64)), device="cpu")
    with pytest.raises(ArgumentError, match="dtype"):
        plan_cache_write(CASES["plain"].cache, torch.float32, device="cpu")
    with pytest.raises(ArgumentError, match="grouped"):
        plan_cache_write(CASES["unsmoothed"].cache, grouped=True, device="cpu")
    with pytest.raises(ArgumentError, match="k_scale"):
        QK4PV8Cache(1, 1, 1, QK4PV8Page(32, 64), k_scale=1e-50)
    with pytest.raises(ArgumentError, match="cache"):
        plan_cache_write(torch.zeros(1), device="cpu")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"keys": torch.zeros(5, 2, 64, dtype=BF16)}, "keys: got"),
        ({"keys": torch.zeros(5, 2, 128)}, "keys: got"),
        ({"values": torch.zeros(4, 2, 128, dtype=BF16)}, "values: got"),
        ({"slots": torch.zeros(5, dtype=torch.int32)}, "slots: got"),
        ({"slots": torch.zeros(4, dtype=torch.int64)}, "slots: got"),
        ({"slots": None}, "places"),
        ({"group": torch.zeros(5, dtype=torch.int32)}, "places"),
        ({"means": None}, "means"),
        ({"counters": None}, "counters"),
        ({"memory": CASES["unsmoothed"].cache.allocate()}, "memory.delta"),
        ({"memory": replace(CASES["plain"], page=64).cache.allocate()}, "memory"),
        ({"means": Means("static", shifted(1, 8, 128), torch.zeros(1, 2, 128))}, "means.q: got"),
        (
            {
                "memory": Memory(
                    CASES["plain"].cache.allocate().records, shifted(9, 8, 1, 128, dtype=BF16)
                )
            },
            "memory.delta: got",
        ),
    ],
)
def test_wrong_arguments_are_refused_by_name(change: dict[str, object], named: str) -> None:
    batch = drawn(CASES["plain"], 5, "adjacent")
    given: dict[str, object] = {
        "memory": batch.memory,
        "keys": batch.keys,
        "values": batch.values,
        "means": batch.means,
        "counters": batch.counters,
        **batch.places,
    }
    with pytest.raises(ArgumentError, match=named):
        planned(CASES["plain"]).run(**{**given, **change})  # type: ignore[arg-type]
    assert (batch.memory.records == 0xA5).all()


def test_outputs_apart_from_what_is_read() -> None:
    case = Case(kv_heads=1, group=1, terms=0, page=32, head_dim=64, counted=False)
    memory = case.cache.allocate()
    keys = memory.records.view(-1)[: 5 * 128].view(BF16).view(5, 1, 64)
    with pytest.raises(ArgumentError, match="apart from"):
        planned(case).run(memory, keys, torch.zeros(5, 1, 64, dtype=BF16), slots=torch.arange(5))


def test_qk_11_rows_and_means_are_left_as_they_are() -> None:
    batch = drawn(CASES["means of requests"], 40, "running")
    before = [x.clone() for x in (batch.keys, batch.values, batch.means.q, batch.means.k)]  # type: ignore[union-attr]
    batch.run(planned(batch.case))
    after = (batch.keys, batch.values, batch.means.q, batch.means.k)  # type: ignore[union-attr]
    for a, b in zip(before, after, strict=True):
        assert_equal_bits(a, b)


SPECS = [
    WriteSpec(QK4PV8Page(page, width, order), group, terms, dtype, grouped, table, k, v, counted)
    for page, width, order, group, terms, dtype, grouped, table, k, v, counted in [
        (128, 128, "exact16", 4, 1, BF16, False, False, False, False, True),
        (128, 128, "exact16", 4, 2, BF16, True, True, False, False, True),
        (64, 128, "fast8", 5, 2, BF16, True, False, False, True, False),
        (32, 64, "exact16", 16, 3, FP16, True, False, True, True, True),
        (32, 64, "fast8", 1, 1, BF16, False, True, False, False, True),
        (64, 64, "fast8", 8, 2, FP16, True, True, True, False, True),
        (128, 128, "fast8", 64, 1, BF16, False, False, True, False, True),
        (128, 64, "exact16", 2, 0, BF16, False, False, False, False, True),
        (32, 128, "exact16", 3, 2, FP16, False, False, False, True, False),
    ]
]


@pytest.mark.compile
class TestKernel:
    @pytest.mark.parametrize("spec", SPECS, ids=str)
    def test_no_spills(self, spec: WriteSpec) -> None:
        report = compile(CacheWriteKernel(spec, DEFAULT_TARGET), strict=False).report
        assert report.problems(DEFAULT_TARGET.smem_per_block) == []

    @pytest.mark.parametrize("name", CASES)
    @pytest.mark.parametrize("placing", PLACINGS)
    def test_the_compiled_code_writes_the_contracts_bytes(self, name: str, placing: str) -> None:
        case, rows = CASES[name], 20 if placing == "scattered" else 139
        launch(drawn(case, rows, placing, 3), races=placing == "running" and case.group <= 5)

    @pytest.mark.parametrize("name", CASES)
    def test_kd_01_qk_03_qk_04_rows_of_any_bits(self, name: str) -> None:
        launch(drawn(CASES[name], 60, "running", 4, wild=True), True)

    @pytest.mark.parametrize("rows", [1, 2, 15, 16, 17, 127, 128, 129, 257])
    def test_qk_08_any_number_of_rows(self, rows: int) -> None:
        launch(drawn(CASES["64 channels"], rows, "adjacent", rows))

    @pytest.mark.parametrize("name", CASES)
    def test_a_launch_without_rows_touches_nothing(self, name: str) -> None:
        idle = tuple(int(x in ("kv_heads", "blocks")) for x in ARGUMENTS)
        emulated(planned(CASES[name]).spec).launch(idle)

    @pytest.mark.parametrize("group", [8, 13])
    def test_many_query_heads_of_a_kv_head(self, group: int) -> None:
        launch(drawn(Case(group=group, kv_heads=1, terms=3, page=64), 70, "running", 9), races=True)

    def test_a_row_has_the_same_bits_wherever_it_stands(self) -> None:
        case = CASES["plain"]
        batch = drawn(case, 131, "adjacent", 5)
        launch(batch)
        alone = Batch(
            case,
            batch.keys[77:78],
            batch.values[77:78],
            batch.means,
            {"slots": torch.tensor([700])},
            *fresh(case, "cpu"),
        )
        launch(alone)
        slot = batch.places["slots"][77:78]
        if slot < 0:
            slot = batch.places["slots"][78:79]
        found = case.cache.fetch(alone.memory, torch.tensor([700]))
        wanted = case.cache.fetch(batch.memory, slot)
        for a, b in zip(found, wanted, strict=True):
            assert_equal_bits(a, b)

    @pytest.mark.parametrize("order", ["exact16", "fast8"])
    def test_halfway_between_two_codes(self, order: str) -> None:
        """Every block's scale is a power of two, and keys are all quarters of it up to six."""
        case = Case(terms=0, order=order)
        batch = drawn(case, 64, "adjacent", 7)
        draw = torch.Generator().manual_seed(7)
        quarters = torch.randint(-24, 25, batch.keys.shape, generator=draw) / 4
        quarters[..., ::16] = 6.0
        steps = torch.randint(-5, 6, (64, 1, 1), generator=draw)
        batch.keys.copy_(torch.ldexp(quarters, steps))
        launch(batch)

    def test_terms_are_those_of_one_fp32_number(self) -> None:
        """Three terms hold FP32 exactly; fewer are what ``split_terms`` makes of it."""
        case = CASES["plain"]
        found = {}
        for terms in (1, 2, 3):
            batch = drawn(replace(case, terms=terms), 33, "adjacent", 6)
            launch(batch)
            assert batch.memory.delta is not None
            found[terms] = batch.memory.delta.transpose(2, 3)
        written = found[1][..., 0] != 7.0
        whole = smoothing.join_terms(found[3])[written]
        for terms in (1, 2):
            assert torch.equal(found[terms][written], smoothing.split_terms(whole, terms))

    def test_strided_pools_and_guards(self) -> None:
        case = CASES["64 channels"]
        cache = case.cache
        batch = drawn(case, 40, "running", 8)
        wide = torch.full(
            (cache.pages, cache.kv_heads, cache.page.bytes + 64), 0xA5, dtype=torch.uint8
        )
        batch.memory = Memory(wide[..., 32:-32][..., : cache.page.bytes], batch.memory.delta)
        launch(batch)
        assert (wide[..., :32] == 0xA5).all()
        assert (wide[..., -32:] == 0xA5).all()


def launch(batch: Batch, wild: bool = False, races: bool = False) -> None:
    """Run the compiled code on the CPU and compare."""
    plan = planned(batch.case)
    arguments = plan.bind(
        batch.memory,
        batch.keys,
        batch.values,
        means=batch.means,
        counters=batch.counters,
        **batch.places,
    )
    assert len(arguments) == len(ARGUMENTS)
    emulated(plan.spec).launch(arguments, *batch.tensors(), races=races)
    check(batch, plan, wild)


@functools.cache
def emulated(spec: WriteSpec) -> Emulated:
    return Emulated(CacheWriteKernel(spec, DEFAULT_TARGET))
