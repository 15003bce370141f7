"""Reading the compiler's output, wrapped and coloured as the DSL prints it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from epicute.errors import CompileError
from epicute.jit import Report
from epicute.jit.report import FATAL

PLAIN = """\x1b[96mremark[ptxas info]:\x1b[0m ptxas output: ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'kernel_a_0' for 'sm_90a'
ptxas info    : Function properties for kernel_a_0
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 1024 bytes smem
ptxas info    : Compile time = 9.351 ms

  --> kernels.py:13:0
"""

WRAPPED = """\x1b[96mremark[ptxas]:\x1b[0m ptxas detected register spills
          ptxas output:
          ptxas info    : 0 bytes gmem
          ptxas info    : Compiling entry function
          'kernel_a_0' for 'sm_90a'
          ptxas         .     0 bytes stack frame, 0 bytes
          spill stores, 0 bytes spill loads
          ptxas info    : Used 10 registers, used 0 barriers
          ptxas info    : Compiling entry function
          'kernel_b_1' for 'sm_90a'
          ptxas         .     472 bytes stack frame, 796 bytes spill stores, 856 bytes spill loads
          ptxas info    : Used 32
          registers, used 0 barriers, 472 bytes cumulative stack size
  \x1b[92msuggestion:\x1b[0m reduce live ranges
"""


def advisory(code: str) -> str:
    return PLAIN.replace(
        "ptxas info    : Used",
        f"ptxas info    : ({code}) Potential Performance Loss: wgmma.mma_async instructions are\n"
        "          serialized due to a reason in function 'kernel_a_0'\n"
        "ptxas info    : Used",
    )


def test_a_clean_kernel() -> None:
    report = Report.parse(PLAIN, seconds=1.25, dynamic=2048, ptxas="of the DSL")
    assert report == Report(168, 0, 0, 3072, (), 1.25, "of the DSL")
    assert report.check() is report


def test_wrapped_lines_and_several_kernels() -> None:
    report = Report.parse(WRAPPED)
    assert (report.registers, report.spill_stores, report.spill_loads) == (32, 796, 856)
    assert report.shared_memory is None
    with pytest.raises(CompileError, match=r"gemm: .*796 B of spill stores.*856 B") as caught:
        report.check("gemm")
    assert "strict=False" in str(caught.value)


def test_the_fatal_codes_are_those_of_the_design() -> None:
    assert set(FATAL) == {"C7504", *(f"C{n}" for n in (7508, 7509, 7510, 7511, 7512, 7513, 7514))}


@pytest.mark.parametrize("code", FATAL)
def test_serialised_wgmma_and_ignored_setmaxnreg_are_refused(code: str) -> None:
    report = Report.parse(advisory(code))
    assert len(report.warnings) == 1
    assert report.warnings[0].startswith(f"{code}: Potential Performance Loss")
    assert report.warnings[0].endswith("in function 'kernel_a_0'")
    with pytest.raises(CompileError, match=code):
        report.check()


@pytest.mark.parametrize("code", ["C7519", "C7503", "C7515"])
def test_other_advisories_are_reported_only(code: str) -> None:
    report = Report.parse(advisory(code))
    assert [said[:5] for said in report.warnings] == [code]
    report.check()


def test_a_warning_without_a_code_is_kept() -> None:
    text = PLAIN + "ptxas warning : Stack size cannot be determined\nptxas info    : done"
    assert Report.parse(text).warnings == ("Stack size cannot be determined",)


@pytest.mark.parametrize("text", ["", "something else entirely", "Used many registers"])
def test_silence_is_no_approval(text: str) -> None:
    report = Report.parse(text)
    assert report.registers is None
    with pytest.raises(CompileError, match="did not report"):
        report.check()


def test_too_much_shared_memory_is_refused() -> None:
    report = Report.parse(PLAIN, dynamic=232_448)
    report.check(smem_limit=233_472)
    with pytest.raises(CompileError, match=r"233472 B of shared memory, 232448 B at most"):
        report.check(smem_limit=232_448)


def test_json_round_trip() -> None:
    report = Report.parse(advisory("C7510"), dynamic=0, seconds=0.5)
    assert Report.from_json(json.loads(json.dumps(report.to_json()))) == report
    with pytest.raises(TypeError):
        Report.from_json({**report.to_json(), "other": 1})


def test_it_prints_as_a_table() -> None:
    shown = str(replace(Report.parse(WRAPPED, dynamic=4096, seconds=1.5), warnings=("C7519: x",)))
    assert shown.splitlines() == [
        "registers      32",
        "spills         796 B stored, 856 B loaded",
        "shared memory  4,096 B",
        "compiled in    1.50 s",
        "ptxas          C7519: x",
    ]
    assert "unknown" in str(Report.parse(""))
