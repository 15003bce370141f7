"""The strategies must reach the awkward cases, stay within what they promise, and shrink well."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import assume, find, given, settings
from hypothesis import strategies as st

from epicute.testing import strategies as s

QUIET = settings(database=None, max_examples=2000, deadline=None)


def reaches(strategy: st.SearchStrategy, condition) -> object:
    return find(strategy, condition, settings=QUIET)


class TestShapes:
    @given(s.shapes(129))
    def test_bounds(self, shape: tuple[int, int]) -> None:
        assert 0 <= shape[0] <= 129
        assert shape[1] in (8, 16, 64, 72, 200)

    @pytest.mark.parametrize("count", [0, 1, 15, 17, 127, 129])
    def test_boundaries(self, count: int) -> None:
        assert reaches(s.rows(), lambda m: m == count) == count


class TestFloats:
    @given(s.float32s(limit=100.0, non_finite=False))
    def test_limit(self, x: float) -> None:
        assert abs(x) <= 100.0
        assert float(np.float32(x)) == x

    @pytest.mark.parametrize(
        "wanted",
        [
            np.isnan,
            np.isposinf,
            np.isneginf,
            lambda x: x == 0 and np.signbit(x),
            lambda x: 0 < abs(x) < 1.17e-38,
            lambda x: x == np.float32(4.25 + 2**-10),
        ],
    )
    def test_specials(self, wanted) -> None:
        reaches(s.float32s(), wanted)

    @given(s.matrices((6, 40), limit=50.0))
    def test_matrices(self, x: np.ndarray) -> None:
        assert x.shape == (6, 40)
        assert x.dtype == np.float32
        assert np.isfinite(x).all()
        assert np.abs(x).max() <= 50.0

    def test_empty(self) -> None:
        assert reaches(s.matrices((0, 8)), lambda x: True).shape == (0, 8)

    def test_shrinks_to_the_element_that_matters(self) -> None:
        found = reaches(s.matrices((16, 64)), lambda x: x[9, 33] > 0.5)
        assert np.count_nonzero(found) == 1 or len(np.unique(found)) == 1


class TestBitPatterns:
    def test_every_fp8_pattern_can_come(self) -> None:
        seen: set[int] = set()

        @settings(max_examples=40, database=None)
        @given(s.fp8_bits((64, 64), nan=True))
        def collect(bits: np.ndarray) -> None:
            seen.update(np.unique(bits).tolist())

        collect()
        assert seen == set(range(256))

    @given(s.fp8((4, 16)))
    def test_fp8_without_nan(self, x: torch.Tensor) -> None:
        assert x.dtype == torch.float8_e4m3fn
        assert not x.float().isnan().any()

    @given(s.int4((4, 16)))
    def test_int4(self, codes: np.ndarray) -> None:
        assert codes.dtype == np.uint8
        assert codes.shape == (4, 16)

    def test_int4_reaches_minus_eight(self) -> None:
        reaches(s.int4((2, 2)), lambda c: bool((c & 15 == 8).any()))

    @given(s.nvfp4(3, 48))
    def test_nvfp4(self, drawn: s.NVFP4) -> None:
        assert drawn.codes.shape == (3, 24)
        assert drawn.scales.shape == (3, 3)
        assert drawn.scales.max() <= 0x7E

    def test_nvfp4_nan_scale_only_if_asked(self) -> None:
        reaches(s.nvfp4(2, 32, nan=True), lambda d: bool((d.scales == 0x7F).any()))


class TestPositionsAndPages:
    @given(st.integers(0, 40).flatmap(lambda n: st.tuples(st.just(n), s.positions(n))))
    def test_positions(self, drawn: tuple[int, torch.Tensor]) -> None:
        count, found = drawn
        assert found.shape == (count,)
        assert found.dtype in (torch.int32, torch.int64)
        assume(count)
        assert 0 <= int(found.min())
        assert int(found.max()) <= 131071

    @given(st.integers(0, 40).flatmap(lambda n: s.slots(n, 32, beyond=True)))
    def test_slots_are_distinct(self, found: torch.Tensor) -> None:
        assert found.dtype == torch.int64
        kept = found[(found >= 0) & (found < 32)]
        assert kept.unique().numel() == kept.numel()

    @pytest.mark.parametrize("wanted", [-1, 32, 2**40 + 17, 31, 0])
    def test_slots_reach_every_edge(self, wanted: int) -> None:
        reaches(s.slots(16, 32, beyond=True), lambda x: bool((x == wanted).any()))

    @given(s.page_tables(4, 200))
    def test_page_tables_share_nothing(self, drawn: s.PageTable) -> None:
        used = drawn.table[drawn.table >= 0]
        assert used.unique().numel() == used.numel()
        assert used.numel() < drawn.pages
        counts = (drawn.table >= 0).sum(dim=1)
        assert torch.equal(counts, -(-drawn.lengths.long() // drawn.page_size))
        assert drawn.table.numel() == 0 or int(drawn.table.max()) < drawn.pages
