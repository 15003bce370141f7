"""The command line."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.__main__ import KNOWN, TABLES, finish, folder_of, options_of, parse
from benchmarks.provenance import ROOT, Provenance
from benchmarks.table import Row, Table


def test_everything_by_default() -> None:
    given = parse([])
    first = ["gemm", "epilogue", "calls", "accuracy"]
    layers = ["prefill-layer", "packed-prefill", "layer-accuracy"]
    decode = ["projections", "decode-attention", "decode-layer", "decode-ablation", "cache-write"]
    decode += ["qk4pv8-decode", "qk4pv8-prefill"]
    assert given.tables == [*TABLES] == [*first, "attention", *layers, *decode]
    assert options_of(given, "gemm").shapes == ("1B", "8B", "70B", "405B")
    assert options_of(given, "epilogue").shapes == ("8B", "1B", "70B", "405B")
    assert {options_of(given, n).M for n in TABLES if n != "projections"} == {(2048,)}
    assert not any(options_of(given, name).shards for name in TABLES)
    assert {name: options_of(given, name).shapes for name in ("calls", "accuracy")} == {
        "calls": (),
        "accuracy": (),
    }


def test_a_part_of_it() -> None:
    given = parse(["gemm", "--shapes", "8B,70B", "--layers", "qkv", "--quick"])
    options = options_of(given, "gemm")
    assert given.tables == ["gemm"]
    assert (options.shapes, options.layers) == (("8B", "70B"), ("qkv",))
    whole = options_of(parse([]), "gemm")
    for quick, full in (
        (options.rounds, whole.rounds),
        (options.lead_us, whole.lead_us),
        (options.slice_us, whole.slice_us),
    ):
        assert 0 < quick < full


def test_more_rows_and_shards() -> None:
    given = parse(["gemm", "epilogue", "--M", "64,2048", "--shards"])
    assert options_of(given, "gemm").M == options_of(given, "epilogue").M == (64, 2048)
    assert options_of(given, "gemm").shards
    assert not options_of(given, "epilogue").shards


def test_search_is_measured_where_it_is_named() -> None:
    given = parse(["search", "gemm"])
    assert given.tables == ["search", "gemm"]
    found = options_of(given, "search")
    assert sorted(found.shapes) == sorted(("8B", "1B", "70B", "405B"))
    assert found.M == (64, 256, 1024, 2048, 8192)
    assert (found.rounds, found.lead_us, found.slice_us) == (3, 60000.0, 30000.0)
    assert (found.tries, found.accumulate, found.shards) == (12, "fast", False)
    whole = options_of(given, "gemm")
    assert whole.M == (2048,)
    assert whole == options_of(parse([]), "gemm")


def test_what_search_is_told() -> None:
    words = ["search", "--M=64", "--shards", "--tries=3", "--accumulate=precise", "--quick"]
    found = options_of(parse(words), "search")
    assert (found.M, found.shards, found.tries, found.accumulate) == ((64,), True, 3, "precise")
    assert (found.rounds, found.lead_us, found.slice_us) == (3, 10000.0, 6000.0)


@pytest.mark.parametrize(
    "wrong", [["--tries", "0"], ["--tries", "1,2"], ["--accumulate", "exact"]], ids=str
)
def test_what_search_cannot_be_told(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["search", *wrong])
    assert wrong[0] in capsys.readouterr().err


@pytest.mark.parametrize("wrong", ["", "0", "64,-1", "64,2k", "64.5"])
def test_what_is_no_count_of_rows_is_refused(
    wrong: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse([f"--M={wrong}"])
    assert "not counts from 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    "wrong", [["attentive"], ["gemm", "--shapes", "9B"], ["--layers", "gate"]], ids=str
)
def test_unknown_words_are_refused(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(wrong)
    assert "known are" in capsys.readouterr().err


def test_lengths_of_requests() -> None:
    given = parse([])
    whole = (2048, 4096, 8192, 16384, 32768)
    assert options_of(given, "attention").lengths == whole
    assert options_of(given, "prefill-layer").lengths == (512, 1024, 2048, 4096, 8192, 16384)
    assert options_of(given, "prefill-layer").shapes == ("8B", "405B", "70B", "1B")
    assert options_of(given, "packed-prefill").shapes == ("8B",)
    assert options_of(given, "layer-accuracy").shapes == ("1B", "8B")
    assert options_of(given, "gemm").lengths == ()
    some = parse(["prefill-layer", "--lengths", "512,2048"])
    assert options_of(some, "prefill-layer").lengths == (512, 2048)


def test_a_model_needs_its_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["prefill-model"])
    assert "--checkpoint" in capsys.readouterr().err
    given = parse(["prefill-model", "--checkpoint", "smollm2", "--text", "1960.txt"])
    found = options_of(given, "prefill-model")
    assert (found.checkpoint, found.text) == (Path("smollm2"), Path("1960.txt"))


def test_where_results_go(source: Provenance, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OUT", raising=False)
    assert folder_of(parse([]), source) == ROOT / "benchmarks" / "results" / "h200"
    monkeypatch.setenv("OUT", "/somewhere")
    assert folder_of(parse([]), source) == Path("/somewhere")
    assert folder_of(parse(["--out", "here"]), source) == Path("here")


def test_a_table_with_a_failed_kernel_is_not_complete(source: Provenance, tmp_path: Path) -> None:
    table = Table("gemm", "paper", "protocol", "floor", source, tmp_path / "gemm.json")
    table.add(Row({"shape": "8B"}, 2.0, 1.0, failed={"quack-gemm": "ImportError: no"}))
    assert finish(table)
    table.add(Row({"shape": "8B"}, None, 1.0, failed={"ours": "CompileError: no"}))
    assert not finish(table)


def test_a_table_of_errors_is_complete_without_times(source: Provenance, tmp_path: Path) -> None:
    table = Table("accuracy", "paper", "protocol", "floor", source, tmp_path / "accuracy.json")
    error = {"norm": 0.01, "worst_row": 0.02}
    peers = {"scaled-mm-fast": error}
    table.add(Row({"K": 1024}, None, 0.0, error=error, errors=peers))
    assert finish(table)
    table.add(Row({"K": 4096}, None, 0.0, errors=peers, failed={"ours": "WrongResult: out"}))
    assert not finish(table)


def test_every_table_has_a_measure() -> None:
    assert [*KNOWN] == [*TABLES, "search", "prefill-model", "perplexity", "outliers"]
    for module in KNOWN.values():
        assert callable(module.table), SimpleNamespace(module=module)
        assert callable(module.kernels), SimpleNamespace(module=module)
