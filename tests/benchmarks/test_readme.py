"""The tables of README and docs are the results' rendering, and say so where there are none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.parts import PARTS
from benchmarks.provenance import ROOT
from benchmarks.readme import BLOCKS, Results, main, pages, rendered
from epicute.errors import ArgumentError


def table(name: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    words = ("paper", "driver", "torch", "dsl", "date", "protocol", "floor")
    head = {word: f"the {word}" for word in words}
    return {
        "table": name,
        "device": "NVIDIA H200",
        "commit": "0123456789abcdef",
        **head,
        "rows": rows,
    }


ERROR = {"norm": 1.7e-3, "worst_row": 2.5e-3}


def row(
    weights: str,
    ours: float | None,
    peers: dict[str, float],
    accumulate: str = "fast",
    **more: Any,
) -> dict[str, Any]:
    case = {"shape": "8B", "layer": "qkv", "M": 2048, "N": 6144, "K": 4096, "weights": weights}
    case["accumulate"] = accumulate
    row = {"case": case, "ours_us": ours, "floor_us": 50.0, "peers_us": peers, "error": ERROR}
    return row | more


ROWS = [
    row("fp8", 100.0, {"scaled-mm-fast": 110.0}),
    row("fp8", 125.0, {"scaled-mm-fast": 150.0}, accumulate="precise"),
    row("fp8", 100.0, {"scaled-mm-fast": 440.0}),
    row("bf16", 200.0, {"cublas-bf16": 180.0}, failed={"quack-gemm": "out of memory"}),
    row("bf16", None, {"cublas-bf16": 180.0}, failed={"ours": "wrong | result"}),
]


@pytest.fixture
def results(tmp_path: Path) -> Results:
    """A folder with results of one table."""
    (tmp_path / "gemm.json").write_text(json.dumps(table("gemm", ROWS)))
    return Results(tmp_path)


def test_committed_pages_are_the_rendering() -> None:
    results = Results.of(ROOT)
    stale = []
    for page in pages(ROOT):
        text = page.read_text(encoding="utf-8")
        stale += [page.name] if rendered(text, results, page.name) != text else []
    assert stale == [], "run python -m benchmarks.readme"


def test_every_block_is_published() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in pages(ROOT))
    assert [name for name in BLOCKS if f"<!-- generated: {name} -->" not in text] == []


@pytest.mark.parametrize("name", BLOCKS)
def test_without_results_nothing_is_claimed(name: str, tmp_path: Path) -> None:
    said = BLOCKS[name](Results(tmp_path))
    assert said
    assert "µs" not in said
    assert "×" not in said
    assert "GPU tests pass" not in said
    if name not in ("status", "planned"):
        assert said.startswith(("Not measured yet", "Not run yet"))


def test_summary_has_mean_least_and_most(results: Results) -> None:
    said = BLOCKS["summary"](results)
    assert "| fp8 | fast | scaled-mm-fast | 2.20× | 1.10× | 4.40× | 2 |" in said
    assert "| fp8 | precise | scaled-mm-fast | 1.20× | 1.20× | 1.20× | 1 |" in said
    assert "| bf16 | fast | cublas-bf16 | 0.90× | 0.90× | 0.90× | 1 |" in said
    assert "Cases of ours that failed: 1." in said
    assert (
        "NVIDIA H200, driver the driver, torch the torch, CuTe DSL the dsl, commit 012345" in said
    )
    assert "no `benchmarks/results/h200/epilogue.json`" in said


def test_whole_table_has_every_row_and_names_failures(results: Results) -> None:
    said = BLOCKS["gemm"](results)
    lines = [line for line in said.splitlines() if "8B qkv" in line]
    assert len(lines) == len(ROWS)
    assert "| 100.0 | 50% | 110.0 (1.10×) | 1.7e-03 | 2.5e-03 |" in lines[0]
    assert "| 100.0 | 50% | 440.0 (4.40×) |" in lines[1]
    assert "fp8 accumulate precise 2048×6144×4096 | 125.0 | 40% | 150.0 (1.20×) |" in lines[2]
    assert "| 200.0 | 25% | 180.0 (0.90×) | failed | 1.7e-03 |" in lines[3]
    assert "| failed | - | 180.0 | 1.7e-03 |" in lines[4]
    assert "Protocol: the protocol." in said
    assert "Floor: the floor." in said


def test_accumulations_have_tables_of_their_own(results: Results) -> None:
    parts = BLOCKS["gemm"](results).split("\n\n")
    assert [part.count("8B qkv") for part in parts] == [0, 2, 1, 1, 1, 0, 0]
    assert "accumulate fast" in parts[1]
    assert "accumulate precise" in parts[2]


def test_a_table_of_errors_names_whose_they_are(tmp_path: Path) -> None:
    def errors(**more: Any) -> dict[str, Any]:
        peers = {"scaled-mm-fast": {"norm": 0.04, "worst_row": 0.05}}
        return row("fp8", None, {}, floor_us=0.0, **{"errors": peers, **more})

    failed = errors(accumulate="precise", error=None, failed={"ours": "no", "scaled-mm-x": "no"})
    rows = [errors(), failed, row("fp8", None, {}, failed={"ours": "no"}, error=None)]
    (tmp_path / "accuracy.json").write_text(json.dumps(table("accuracy", rows)))
    said = BLOCKS["accuracy"](Results(tmp_path)).splitlines()
    assert "| case | ours: norm | worst row | scaled-mm-fast: norm | worst row |" in said
    lines = [line for line in said if "8B qkv" in line]
    assert "accumulate fast 2048×6144×4096 | 1.7e-03 | 2.5e-03 | 4.0e-02 | 5.0e-02 |" in lines[0]
    assert "accumulate precise 2048×6144×4096 | failed | failed | 4.0e-02 | 5.0e-02 |" in lines[1]
    assert lines[2].endswith("| failed | failed | - | - |")
    assert "µs" not in "".join(said)


def test_a_layer_has_rates_errors_and_footprints(tmp_path: Path) -> None:
    case = {"shape": "8B", "weights": "fp8", "accumulate": "fast", "batch": 1, "length": 2048}
    more = {
        "errors": {"compile-fp8": {"norm": 0.03, "worst_row": 0.04}},
        "launches": {"compile-fp8": 14, "ours": 5},
        "peak_bytes": {"ours": 46_100_000},
    }
    rows = [row("fp8", 804.2, {"compile-fp8": 1004.5}, **more) | {"case": case}]
    (tmp_path / "prefill-layer.json").write_text(json.dumps(table("prefill-layer", rows)))
    said = BLOCKS["prefill-layer"](Results(tmp_path))
    assert "| case | ours, µs | TFLOP/s | of the floor | compile-fp8 | TFLOP/s | error" in said
    assert "| 804.2 | 1154 | 6% | 1004.5 (1.25×) | 924 | 1.7e-03 |" in said
    assert "| 1.7e-03 | 2.5e-03 | 3.0e-02 | 4.0e-02 |" in said
    assert "| launches of a call: case | ours | compile-fp8 |" in said
    assert "| 5 | 14 |" in said
    assert "| 46.1 |" in said
    summary = BLOCKS["summary"](Results(tmp_path))
    assert "| weights | accumulate | peer |" in summary
    assert "| fp8 | fast | compile-fp8 | 1.25× | 1.25× | 1.25× | 1 |" in summary


def test_packing_is_measured_by_its_padding(tmp_path: Path) -> None:
    case = {"shape": "8B", "weights": "fp8", "batch": 8, "length": 2048, "M": 2944}
    case["mix"] = "one long, seven short"
    rows = [row("fp8", 1000.0, {"ours-padded": 5400.0}) | {"case": case}]
    (tmp_path / "packed-prefill.json").write_text(json.dumps(table("packed-prefill", rows)))
    said = BLOCKS["packed-prefill"](Results(tmp_path))
    assert "| of the padding ratio |" in said
    assert "| 5400.0 (5.40×) |" in said
    assert "| 97% | 1.7e-03 |" in said  # 16384 / 2944 = 5.57


def test_power_stands_once_per_measurement_with_its_share(tmp_path: Path) -> None:
    peer = {"cublas-bf16": 160.0}
    bf16 = row("bf16", 158.0, peer, clocks_mhz={"ours": 1470.0}, watts={"ours": 708.2})
    sensed = {"ours": 1440.0, "cublas-bf16": 1500.0}
    fp8 = row("fp8", 85.5, peer, clocks_mhz=sensed, watts={"ours": 650.0})
    (tmp_path / "gemm.json").write_text(json.dumps(table("gemm", [bf16, fp8])))
    said = BLOCKS["power"](Results(tmp_path))
    assert "2 measurements. Clock, MHz: 1440 to 1470, median 1455. Power, W: 650 to 708" in said
    assert "132 SMs: BF16 4096, nominal 989.5 TFLOP/s at 1830 MHz; FP8 8192, nominal 1979" in said
    assert "| 8B qkv 2048×6144×4096 | 1470 | 708 | 652 | 82% |" in said
    assert "| 8B qkv 2048×6144×4096 | 1440 | 650 | 1206 | 77% |" in said
    assert said.count("8B qkv") == 2


def test_power_without_sensors_says_so(results: Results) -> None:
    assert BLOCKS["power"](results).endswith("The card's sensors could not be read.")


def test_a_file_against_the_schema_is_refused(results: Results) -> None:
    broken = table("gemm", [row("fp8", 100.0, {"scaled-mm-fast": -1.0})])
    (results.folder / "gemm.json").write_text(json.dumps(broken))
    with pytest.raises(ArgumentError, match="scaled-mm-fast"):
        BLOCKS["gemm"](results)


def gpu_tests(**files: tuple[int, int, int]) -> str:
    words = ("passed", "failed", "skipped")
    counts = {f"tests/{n}.py": dict(zip(words, c, strict=True)) for n, c in files.items()}
    head = {"device": "NVIDIA H200", "commit": "0123456789abcdef", "date": "2026-11-29"}
    return json.dumps({**head, "files": counts})


def test_status_follows_the_gpu_tests(results: Results) -> None:
    path = results.folder / "gpu-tests.json"
    path.write_text(gpu_tests(**{"gemm/test_gpu_policies": (40, 0, 0), "jit/test_gpu": (3, 1, 0)}))
    lines = {line.split(" | ")[1]: line for line in BLOCKS["status"](results).splitlines()[2:]}
    assert "40 GPU tests pass (NVIDIA H200, 0123456789) |" in lines["`epicute.gemm`"]
    assert "3 GPU tests pass (NVIDIA H200, 0123456789), 1 fail" in lines["`epicute.jit`"]
    assert "no run of its GPU tests" in lines["`epicute.quant`"]
    assert "GPU" not in lines["`epicute.kv`"]
    assert "| `tests/jit/test_gpu.py` | 3 | 1 | 0 |" in BLOCKS["gpu-tests"](results)


def test_gpu_tests_named_by_the_status_exist() -> None:
    for part in PARTS:
        assert all((ROOT / place).exists() for place in part.tests), part
        assert (part.needs == "sm_90a") <= bool(part.tests)


def test_blocks_are_replaced_and_the_rest_is_kept(results: Results) -> None:
    text = "a\n<!-- generated: planned -->\nold\n<!-- end -->\nb | c\n"
    once = rendered(text, results)
    assert once.startswith("a\n<!-- generated: planned -->\n\n- ")
    assert once.endswith("\n\n<!-- end -->\nb | c\n")
    assert "old" not in once
    assert rendered(once, results) == once


@pytest.mark.parametrize(
    "text",
    [
        "<!-- generated: gem -->\n<!-- end -->\n",
        "<!-- generated: gemm -->\nno end\n",
        "<!-- generated: gemm -->\n<!-- generated: calls -->\n<!-- end -->\n",
    ],
)
def test_a_broken_block_is_refused(text: str, results: Results) -> None:
    with pytest.raises(ArgumentError, match="a block"):
        rendered(text, results, "page.md")


def test_command_rewrites_and_checks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "docs").mkdir()
    for page in ("README.md", "docs/index.md"):
        (tmp_path / page).write_text("<!-- generated: planned -->\n<!-- end -->\n")
    assert main(["--root", str(tmp_path), "--check"]) == 1
    assert "docs/index.md: stale" in capsys.readouterr().out
    assert main(["--root", str(tmp_path)]) == 0
    assert main(["--root", str(tmp_path), "--check"]) == 0
