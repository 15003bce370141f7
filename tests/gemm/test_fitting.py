"""A tile that spills is passed over for a narrower one; the narrowest may spill a little."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from epicute.epilogues import HeadNorm, Store
from epicute.errors import CompileError
from epicute.gemm import fitting, kernel_for
from epicute.jit import Report

CLEAN = Report(168, 0, 0, 1000, (), 1.0, "")


class Compiler:
    """In place of ``compile``: a report for each tile's width."""

    def __init__(self, reports: dict[int, Report]) -> None:
        self.reports = reports
        self.asked: list[int] = []

    def __call__(self, kernel, *, cache=None, strict=True):
        report = self.reports.get(kernel.spec.schedule.tile_n, CLEAN)
        self.asked.append(kernel.spec.schedule.tile_n)
        if strict:
            report.check(str(kernel.key))
        return SimpleNamespace(report=report)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    found = Compiler({})
    monkeypatch.setattr(fitting, "compile", found)
    return found


def spilling(count: int, **changes: object) -> Report:
    return replace(CLEAN, spill_stores=count, spill_loads=count, **changes)


def test_a_tile_that_fits_is_compiled_once(compiler: Compiler) -> None:
    kernel = kernel_for(Store(), n=4096, k=64)
    found, _ = fitting.compile_fitting(kernel)
    assert found is kernel
    assert compiler.asked == [256]


def test_narrower_ones_follow_until_one_fits(
    compiler: Compiler, caplog: pytest.LogCaptureFixture
) -> None:
    compiler.reports = {256: spilling(4), 192: spilling(4)}
    with caplog.at_level(logging.INFO, "epicute.gemm"):
        found, compiled = fitting.compile_fitting(kernel_for(Store(), n=4096, k=64))
    assert compiler.asked == [256, 192, 128]
    assert found.spec.schedule.tile_n == 128
    assert compiled.report is CLEAN
    assert "compiling 128x192" in caplog.text


def wide() -> object:
    """Heads of 256, which fill a tile."""
    return kernel_for(HeadNorm(256) >> Store(torch.bfloat16), n=512, k=64)


def test_a_tile_that_cannot_be_narrower_may_spill_a_little(
    compiler: Compiler, caplog: pytest.LogCaptureFixture
) -> None:
    compiler.reports = {256: spilling(fitting.SPARED)}
    with caplog.at_level(logging.WARNING, "epicute.gemm"):
        _, compiled = fitting.compile_fitting(wide())
    assert compiled.report.spill_stores == fitting.SPARED
    assert "no narrower tile" in caplog.text
    compiler.reports = {256: spilling(fitting.SPARED + 4)}
    with pytest.raises(CompileError, match="spill stores"):
        fitting.compile_fitting(wide())
    assert fitting.compile_fitting(wide(), strict=False)[1].report.spill_stores > fitting.SPARED


@pytest.mark.parametrize("changes", [{"registers": None}, {"warnings": ("C7510: serialised",)}])
def test_nothing_but_spills_is_let_pass(compiler: Compiler, changes: dict[str, object]) -> None:
    compiler.reports = {256: spilling(4, **changes)}
    with pytest.raises(CompileError):
        fitting.compile_fitting(wide())
