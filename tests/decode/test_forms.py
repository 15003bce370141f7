"""Both MMAs as candidates of the benchmark's table: timed where rows are many, the same numbers on the CPU."""

from __future__ import annotations

import pytest

from benchmarks import few_rows
from benchmarks.few_rows import BOTH_FORMS, Few
from benchmarks.harness import Options
from epicute.decode.geometry import MMAS
from epicute.models.shapes import LayerShape

TINY = LayerShape(256, 512, 4, 2, 64, "tiny")


@pytest.mark.parametrize("weights", few_rows.FORMATS)
def test_either_form_gives_the_product(weights: str) -> None:
    found = Few(TINY, "o", BOTH_FORMS, weights, Options((), device="cpu"), copies=1)
    exact = found.exact()
    for mma in MMAS:
        assert found.kernel(mma).spec.schedule.mma == mma
        got = few_rows.ours(found, mma)(0)["out"].double()
        assert float((got - exact).norm() / exact.norm()) < 5e-3


def test_the_kernels_of_both_forms_are_compiled_beforehand() -> None:
    options = Options(("8B",), device="cpu", M=(8, 16, 32, 64))
    forms = {(k.spec.schedule.rows, k.spec.schedule.mma) for k in few_rows.kernels(options)}
    assert forms == {(8, "sync"), *((rows, mma) for rows in (16, 32, 64) for mma in MMAS)}


def test_a_name_tells_the_forms_apart() -> None:
    found = Few(TINY, "o", 32, "int4", Options((), device="cpu"), copies=1)
    names = [found.kernel(mma).spec.name for mma in MMAS]
    assert "wgmma" in names[1]
    assert "wgmma" not in names[0]
    keys = {found.kernel(mma).key.digest for mma in MMAS}
    assert len(keys) == 2
