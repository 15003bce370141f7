"""``counters``: ncu's CSV is read, its launches are told apart, and a machine without ncu is told so."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import counters
from benchmarks.__main__ import main as benchmarks_main
from benchmarks.counters import METRICS, Counted, command, launches, main, parse, rows_of
from benchmarks.harness import Options
from benchmarks.provenance import Provenance
from epicute.errors import EpicuteError

OPTIONS = Options(("1B",), ("o", "gate_up"), device="cpu")

CSV = """\
==PROF== Connected to process 4242 (/usr/bin/python3.12)
==PROF== Profiling "epicute_gemm_fp8_128x256_Dequ..." - 0: 0%....50%....100% - 3 passes
==PROF== Disconnected from process 4242
"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device","CC",\
"Section Name","Metric Name","Metric Unit","Metric Value"
"0","4242","python3.12","127.0.0.1","epicute_gemm_fp8_128x256_Dequantize_EmitFP8_kernel","1","7","(384, 1, 1)",\
"(132, 1, 1)","0","9.0","Command line profiler metrics","memory_l1_wavefronts_shared","","1,310,720"
"0","4242","python3.12","127.0.0.1","epicute_gemm_fp8_128x256_Dequantize_EmitFP8_kernel","1","7","(384, 1, 1)",\
"(132, 1, 1)","0","9.0","Command line profiler metrics","memory_l1_wavefronts_shared_ideal","","1,179,648"
"0","4242","python3.12","127.0.0.1","epicute_gemm_fp8_128x256_Dequantize_EmitFP8_kernel","1","7","(384, 1, 1)",\
"(132, 1, 1)","0","9.0","Command line profiler metrics","smsp__inst_executed.sum","inst","12345678"
"0","4242","python3.12","127.0.0.1","epicute_gemm_fp8_128x256_Dequantize_EmitFP8_kernel","1","7","(384, 1, 1)",\
"(132, 1, 1)","0","9.0","Command line profiler metrics","dram__bytes_read.sum","byte","42,000,000.50"
"1","4242","python3.12","127.0.0.1","epicute_gemm_fp8_256x128_Dequantize_Store, really","1","7","(384, 1, 1)",\
"(132, 1, 1)","0","9.0","Command line profiler metrics","smsp__inst_executed.sum","inst","9,000"
"1","4242","python3.12","127.0.0.1","epicute_gemm_fp8_256x128_Dequantize_Store, really","1","7","(384, 1, 1)",\
"(132, 1, 1)","0","9.0","Command line profiler metrics","dram__bytes_read.sum","byte","n/a"
"""
"""As ncu prints with --csv: a line for each launch and metric, in its own lines and one with a comma in a name."""


def test_the_csv_is_read() -> None:
    whole, plain = parse(CSV)
    assert whole.kernel == "epicute_gemm_fp8_128x256_Dequantize_EmitFP8_kernel"
    assert whole.counters == {
        "shared_wavefronts": 1310720,
        "shared_wavefronts_ideal": 1179648,
        "instructions": 12345678,
        "dram_bytes_read": 42000000.5,
    }
    assert plain == Counted(
        "epicute_gemm_fp8_256x128_Dequantize_Store, really", {"instructions": 9000}
    )


def test_launches_are_in_their_order_whatever_the_order_of_lines() -> None:
    head, *lines = CSV.splitlines()[3:]
    turned = "\n".join([head, *lines[::-1], *(s.replace('"1"', '"10"', 1) for s in lines[-2:])])
    assert [one.kernel.split("_")[3] for one in parse(turned)] == ["128x256", "256x128", "256x128"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "got nothing, expected a CSV table"),
        ("==ERROR== ERR_NVGPUCTRPERM - no permission\n", "ERR_NVGPUCTRPERM"),
        ('"ID","Kernel Name"\n"0","k"\n', "got the columns ID, Kernel Name"),
    ],
)
def test_what_is_no_table_is_refused(text: str, said: str) -> None:
    with pytest.raises(EpicuteError, match=said):
        parse(text)


def test_rows_name_their_launch_and_its_excess() -> None:
    wanted = [(layer.name, weights, who) for layer, weights, who, _ in launches(OPTIONS)]
    assert wanted == [
        *(("o", "fp8", who) for who in ("whole", "plain")),
        *(("gate_up", weights, who) for weights in ("fp8", "bf16") for who in ("whole", "plain")),
    ]
    one, other = parse(CSV)
    rows = rows_of(OPTIONS, [one, other] * 3)
    assert [(r["case"]["layer"], r["case"]["weights"], r["candidate"]) for r in rows] == wanted
    assert rows[0]["counters"]["shared_wavefronts_excess"] == 131072
    assert "shared_wavefronts_excess" not in rows[1]["counters"]
    with pytest.raises(EpicuteError, match="got 2 launches, expected 6"):
        rows_of(OPTIONS, [one, other])


def test_the_command_counts_only_between_the_marks() -> None:
    line = command(
        "ncu", METRICS, Path("/tmp/log"), ("python", "-m", "benchmarks.counters"), OPTIONS
    )
    assert line[line.index("--profile-from-start") + 1] == "off"
    assert line[line.index("--clock-control") + 1] == "none"
    assert line[line.index("--print-units") + 1] == "base"
    assert line[line.index("--metrics") + 1].split(",") == list(METRICS)
    assert line[line.index("--launch") + 1 :] == [
        *("--shapes", "1B"),
        *("--layers", "o,gate_up"),
        *("--M", "2048"),
    ]


def test_each_kernel_is_marked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    marks = SimpleNamespace(
        cudaProfilerStart=lambda: seen.append("start"), cudaProfilerStop=lambda: seen.append("stop")
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: marks)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    for name in ("fused", "plain"):
        monkeypatch.setattr(counters.epilogue, name, lambda *_: seen.append)
    counters.launch(OPTIONS)
    assert seen == [0, "start", 1, "stop"] * 6


def test_without_ncu_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(counters.shutil, "which", lambda _: None)
    assert main(["--out", str(tmp_path)]) == 2
    assert "no ncu on PATH" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


class Ncu:
    """ncu's stand-in: it knows no ``unknown`` metric, and writes ``text``."""

    def __init__(self, text: str, unknown: str = "", code: int = 0) -> None:
        self.text, self.unknown, self.code, self.asked = text, unknown, code, []  # type: ignore[var-annotated]

    def __call__(self, line: list[str], **_: Any) -> Any:
        metrics = line[line.index("--metrics") + 1].split(",")
        self.asked.append(metrics)
        if self.unknown in metrics:
            said = f"==ERROR== Failed to find metric {self.unknown}"
            return subprocess.CompletedProcess(line, 1, said, "")
        Path(line[line.index("--log-file") + 1]).write_text(self.text)
        return subprocess.CompletedProcess(line, self.code, "", "")


def test_a_metric_that_is_not_there_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    ncu = Ncu(CSV, "memory_l1_wavefronts_shared_ideal")
    monkeypatch.setattr(counters.subprocess, "run", ncu)
    assert len(counters.measured("ncu", OPTIONS)) == 2
    assert [len(metrics) for metrics in ncu.asked] == [len(METRICS), len(METRICS) - 1]


def test_no_right_to_count_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters.subprocess, "run", Ncu("==ERROR== ERR_NVGPUCTRPERM\n", code=1))
    with pytest.raises(EpicuteError, match="ERR_NVGPUCTRPERM"):
        counters.measured("ncu", OPTIONS)


def test_the_file_says_where_it_comes_from(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: Provenance
) -> None:
    monkeypatch.setattr(counters.shutil, "which", lambda _: "ncu")
    monkeypatch.setattr(counters.subprocess, "run", Ncu(CSV))
    monkeypatch.setattr(counters, "compile_all", lambda _: None)
    monkeypatch.setattr(Provenance, "here", classmethod(lambda cls, allow_dirty=False: source))
    monkeypatch.setattr(counters, "Options", lambda **given: Options(**given, device="cpu"))
    assert main(["--out", str(tmp_path), "--shapes", "1B", "--layers", "o"]) == 0
    found = json.loads((tmp_path / "counters.json").read_text())
    assert found["commit"] == source.commit
    assert [row["candidate"] for row in found["rows"]] == ["whole", "plain"]
    assert found["rows"][0]["counters"]["shared_wavefronts_excess"] == 131072


def test_it_is_a_word_of_the_benchmarks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(counters.shutil, "which", lambda _: None)
    assert benchmarks_main(["counters", "--shapes", "1B"]) == 2
    assert "no ncu on PATH" in capsys.readouterr().err
