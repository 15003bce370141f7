"""``epicute compile``: how a command line becomes a kernel, with a stand-in for the GEMM."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from epicute import gemm
from epicute.cli import main
from epicute.epilogues import Dequantize, Store
from epicute.gemm import Problem
from epicute.jit import CompileKey, Target, forget
from tests.jit.tiny import trace

EPILOGUE = ["--epilogue", "Dequantize() >> Store(bf16)"]
SIZE = ["--n", "256", "--k", "512"]


PROBLEM = Problem(columns=32, rows=32, depth=512, dtype=torch.bfloat16, unit=256)
"""Of a unit that fits no narrower tile."""


@dataclass(frozen=True)
class Plan:
    tile_m: int = 128
    tile_n: int = 256
    cluster_m: int = 2
    stages: int = 4
    slots: int = 0
    cluster_n: int = 1
    pingpong: bool = False

    def __str__(self) -> str:
        return f"the plan {self.tile_m}, {self.tile_n}, {self.cluster_m}, {self.stages}"


@dataclass
class StandIn:
    """What ``kernel_for`` was asked for; compiles the tiny kernel instead."""

    spill: bool = False
    asked: list[dict[str, Any]] = field(default_factory=list)

    def __call__(self, composition: Any, *, schedule: Plan | None = None, **problem: Any) -> Any:
        self.asked.append({"composition": composition, "schedule": schedule, **problem})
        return Kernel(self.spill, problem["target"], schedule or Plan())


@dataclass(frozen=True)
class Kernel:
    spill: bool
    target: Target
    plan: Plan

    @property
    def spec(self) -> SimpleNamespace:
        return SimpleNamespace(schedule=self.plan, problem=PROBLEM)

    @cached_property
    def key(self) -> CompileKey:
        return CompileKey("tests.command", {"spill": self.spill}, self.target)

    def trace(self) -> Any:
        return trace(2.0, 0, "heavy" if self.spill else "add")


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    found = StandIn()
    monkeypatch.setattr(gemm, "kernel_for", found)
    forget()
    yield found
    forget()


@pytest.mark.compile
def test_the_problem_and_the_report(stand_in: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compile", *SIZE, "--dtype", "fp8", "--target", "sm90", *EPILOGUE]) == 0
    assert stand_in.asked == [
        {
            "composition": Dequantize() >> Store(torch.bfloat16),
            "schedule": None,
            "n": 256,
            "k": 512,
            "dtype": torch.float8_e4m3fn,
            "target": Target("sm_90a"),
            "expected_m": None,
            "accumulate": None,
        }
    ]
    said = capsys.readouterr().out
    assert said.startswith(str(Dequantize() >> Store(torch.bfloat16)))
    assert "256 x 512 fp8 for sm_90a: the plan 128, 256, 2, 4" in said
    assert "(24 and 240 once the warpgroups have traded)" in said
    assert "begins with" not in said
    assert "spills         0 B stored, 0 B loaded" in said
    assert main(["compile", *SIZE, *EPILOGUE]) == 0
    assert capsys.readouterr().out.endswith("memory\n")


@pytest.mark.compile
def test_a_schedule_in_part(stand_in: StandIn) -> None:
    options = ["--tile", "128x192", "--cluster", "1x1", "--stages", "5"]
    assert main(["compile", *SIZE, *EPILOGUE, *options]) == 0
    assert stand_in.asked[-1]["schedule"] == Plan(128, 192, 1, 5)
    assert main(["compile", *SIZE, *EPILOGUE, "--stages", "3"]) == 0
    assert stand_in.asked[-1]["schedule"] == Plan(stages=3)
    assert main(["compile", *SIZE, *EPILOGUE, "--cluster", "1x2", "--pingpong"]) == 0
    assert stand_in.asked[-1]["schedule"] == Plan(cluster_m=1, cluster_n=2, pingpong=True)
    assert main(["compile", *SIZE, *EPILOGUE, "--slots", "2", "--stages", "0"]) == 0
    assert stand_in.asked[-1]["schedule"] == Plan(slots=2, stages=0)


@pytest.mark.compile
def test_rows_and_accumulation(stand_in: StandIn) -> None:
    options = ["--expected-m", "64", "--accumulate", "precise"]
    assert main(["compile", *SIZE, *EPILOGUE, *options]) == 0
    assert stand_in.asked[-1]["expected_m"] == 64
    assert stand_in.asked[-1]["accumulate"] == "precise"


RANGE = "(128, Dequantize() >> Store(bf16))"


@pytest.mark.compile
@pytest.mark.parametrize(
    ("epilogue", "dtype"),
    [
        ("Dequantize() >> Store(bf16)", "fp8"),
        (f"Columns(a={RANGE}, b={RANGE})", "fp8"),
        (f"Columns(a={RANGE}, b=(128, Store(bf16)))", "bf16"),
        ("Store(bf16)", "bf16"),
        ("RowScale(512) >> Dequantize() >> Store(bf16)", "bf16"),
    ],
)
def test_without_a_dtype_the_composition_decides(
    epilogue: str, dtype: str, stand_in: StandIn, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compile", *SIZE, "--epilogue", epilogue]) == 0
    assert stand_in.asked[-1]["dtype"] == {"fp8": torch.float8_e4m3fn}.get(dtype, torch.bfloat16)
    said = capsys.readouterr().out
    assert f"256 x 512 {dtype} for" in said
    assert ("fp8, as the composition begins with Dequantize" in said) == (dtype == "fp8")
    assert main(["compile", *SIZE, "--epilogue", epilogue, "--dtype", "bf16"]) == 0
    assert stand_in.asked[-1]["dtype"] == torch.bfloat16
    assert "begins with" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("fused = Store(", "line 1: '(' was never closed"),
        ("import torch\n\nfused = torch.nothing_such\n", "line 3: got AttributeError"),
        ("def fused(cap):\n    return cap\n", "fused(cap)"),
        ("def fused():\n    return 1 / 0\n", "line 2: got ZeroDivisionError"),
        ("fused = None\n", "got None"),
    ],
)
def test_a_file_that_does_not_do_is_one_line(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "wrong_for_the_command.py"
    path.write_text(text)
    assert main(["compile", *SIZE, "--module", f"{path}:fused"]) == 1
    error = capsys.readouterr().err
    sys.modules.pop(path.stem, None)
    assert said in error
    assert "Fix: " in error
    assert len(error.splitlines()) == 1


@pytest.mark.compile
@pytest.mark.filterwarnings("ignore:This static loop has")
def test_spills_fail_unless_wanted(stand_in: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    stand_in.spill = True
    assert main(["compile", *SIZE, *EPILOGUE]) == 1
    assert "spill stores" in capsys.readouterr().err
    assert main(["compile", *SIZE, *EPILOGUE, "--anyway"]) == 0
    assert "spills         796 B" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--tile", "128"], "128x256"),
        (["--cluster", "2"], "128x256"),
        (["--target", "sm_80"], "sm_90a"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_the_fix(
    options: list[str], said: str, stand_in: StandIn, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compile", *SIZE, *EPILOGUE, *options]) == 1
    error = capsys.readouterr().err
    assert said in error
    assert "Fix: " in error


def test_one_composition_is_needed(stand_in: StandIn) -> None:
    for options in ([*SIZE], [*SIZE, *EPILOGUE, "--module", "x.py:y"], [*EPILOGUE, "--n", "1"]):
        with pytest.raises(SystemExit) as caught:
            main(["compile", *options])
        assert caught.value.code == 2
