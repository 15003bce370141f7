"""Tables of decode, of QK4PV8 and of counters on the pages: every case by its own module, in columns and in a line."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from benchmarks import (
    cache_write,
    counters,
    decode_ablation,
    decode_attention,
    decode_layer,
    few_rows,
    int4_peers,
    qk4pv8_decode,
    qk4pv8_prefill,
)
from benchmarks.__main__ import LENGTHS_OF, TABLES
from benchmarks.harness import Options
from benchmarks.provenance import Provenance
from benchmarks.readme import BLOCKS, Results
from benchmarks.shown import COLUMNS, LINES, NAMES, fours
from benchmarks.table import Row, Table, label, validate
from epicute.errors import ArgumentError

ERROR = {"norm": 1.7e-3, "worst_row": 2.5e-3}
OPTIONS = Options(("8B", "70B"), M=(1, 16), device="cpu")


# --- rows of every case, timed by a rule ---


def projections(options: Options) -> Iterator[Row]:
    """Ours twice the floor; cuBLAS four times, tinygemm three times, a chain a quarter above the floor."""
    for found in few_rows.cases(options):
        floor = found.floor_us
        if isinstance(found, few_rows.Chain):
            yield Row(found.case, 1.25 * floor, floor, {"stream-read": 1.1 * floor}, ERROR)
            continue
        peers = {"stream-read": 1.1 * floor, "cublas-bf16": 4 * floor}
        failed = {}
        if found.M >= few_rows.BOTH_FORMS:
            peers |= {"ours-sync": 2.5 * floor, "ours-wgmma": 1.9 * floor}
        if found.weights == "int4":
            failed = dict.fromkeys(int4_peers.PEERS, "RuntimeError: not here")
            del failed["tinygemm-int4"]
            peers["tinygemm-int4"] = 3 * floor
        yield Row(found.case, 2 * floor, floor, peers, ERROR, failed)


def attention(options: Options) -> Iterator[Row]:
    for found in decode_attention.cases(options):
        floor = found.floor_us
        wide = {"fa4": 3 * floor, **dict.fromkeys(decode_attention.BACKENDS, 4.0 * floor)}
        peers = wide if found.cache == "bf16" else {"ours-bf16": 5 * floor}
        yield Row(found.case, 2 * floor, floor, peers, ERROR)


def layers(options: Options) -> Iterator[Row]:
    for found in decode_layer.cases(options):
        for weights, cache in found.formats:
            floor = found.floor_us(weights, cache)
            case = {**found.case, "weights": weights, "cache": cache, "variant": "sdpa flash"}
            peers = {"compile-bf16": 5 * floor, "compile-int4": 3 * floor}
            peers |= dict.fromkeys(found.tried(weights, cache), 1.5 * floor)
            errors = dict.fromkeys(peers, ERROR)
            yield Row(case, 1.25 * floor, floor, peers, ERROR, errors=errors)


def ablation(options: Options) -> Iterator[Row]:
    for found in decode_ablation.cases(options):
        step = isinstance(found, decode_ablation.Case)
        names = found.variants if step else (decode_ablation.SKINNY,)
        times = {name: found.floor_us * (2.2 + i) for i, name in enumerate(names)}
        errors = dict.fromkeys(names, ERROR)
        yield Row(found.case, 2 * found.floor_us, found.floor_us, times, ERROR, errors=errors)


def writes(options: Options) -> Iterator[Row]:
    for found in cache_write.cases(options):
        floor = found.bytes / 4.8e6
        yield Row(found.case, 2 * floor, floor, dict.fromkeys(cache_write.PEERS, 1.5 * floor))


def mixed_decode(options: Options) -> Iterator[Row]:
    for found in qk4pv8_decode.cases(options):
        floor = found.bytes / 4.8e6
        times = {name: floor * (3 + i) for i, name in enumerate(qk4pv8_decode.PEERS)}
        yield Row(found.case, 2 * floor, floor, times, ERROR)


def mixed_prefill(options: Options) -> Iterator[Row]:
    for found in qk4pv8_prefill.cases(options):
        times = {name: 900.0 + i for i, name in enumerate(qk4pv8_prefill.peers())}
        for variant in qk4pv8_prefill.VARIANTS:
            yield Row(found.row_case(variant), 450.0, 300.0, times, ERROR)


MADE: dict[str, tuple[ModuleType, Callable[[Options], Iterator[Row]]]] = {
    "projections": (few_rows, projections),
    "decode-attention": (decode_attention, attention),
    "decode-layer": (decode_layer, layers),
    "decode-ablation": (decode_ablation, ablation),
    "cache-write": (cache_write, writes),
    "qk4pv8-decode": (qk4pv8_decode, mixed_decode),
    "qk4pv8-prefill": (qk4pv8_prefill, mixed_prefill),
}


def rows_of(name: str) -> list[Row]:
    options = replace(OPTIONS, lengths=LENGTHS_OF.get(name, ()))
    return list(MADE[name][1](options))


@pytest.fixture
def written(tmp_path: Path, source: Provenance) -> Callable[[str, list[Row]], Results]:
    """A table's file as its module writes it."""

    def write(name: str, rows: list[Row]) -> Results:
        module = MADE[name][0]
        path = tmp_path / f"{name}.json"
        table = Table(name, module.PAPER, "the protocol", module.FLOOR, source, path)
        content = {**table.content, "rows": [row.json() for row in rows]}
        validate(content)
        path.write_text(json.dumps(content))
        return Results(tmp_path)

    return write


Written = Callable[[str, list[Row]], Results]


def line_of(name: str, results: Results) -> str:
    """What README's summary says of a table."""
    lines = BLOCKS["summary"](results).splitlines()
    (said,) = (line for line in lines if line.startswith(f"- **{name}**: "))
    return said


def parts_of(said: str) -> list[list[str]]:
    """Lines of each table of a block."""
    return [part.splitlines() for part in said.split("\n\n") if part.startswith("|")]


# --- all of them ---


def test_every_table_of_the_command_has_a_block() -> None:
    assert {*TABLES, *LINES} <= set(BLOCKS)
    assert set(LINES) == {*MADE, "counters"}


@pytest.mark.parametrize("name", MADE)
def test_every_case_has_its_line(name: str, written: Written) -> None:
    rows = rows_of(name)
    said = BLOCKS[name](written(name, rows))
    cases = [label(row.case) for row in rows]
    assert len(set(cases)) == len(cases)
    shown = [line.split(" | ")[0][2:] for part in parts_of(said) for line in part[2:]]
    per_case = [shown.count(case) for case in cases]
    assert set(per_case) == ({2} if rows[0].errors else {1})
    for part in parts_of(said):  # a cell for each head
        assert len({line.count(" | ") for line in part if "---" not in line}) == 1
        assert part[1] == "|" + "---|" * (part[0].count(" | ") + 1)
    assert "NVIDIA H200, driver 580.1" in said
    assert said.endswith(f"Protocol: the protocol.\n\nFloor: {MADE[name][0].FLOOR}.")


@pytest.mark.parametrize("name", MADE)
def test_a_case_that_failed_is_there(name: str, written: Written) -> None:
    rows = rows_of(name)
    lost = Row(rows[0].case, None, 0.0, failed={"ours": "OutOfMemoryError: no"})
    results = written(name, [lost, *rows[1:]])
    line = next(x for x in BLOCKS[name](results).splitlines() if f"| {label(lost.case)} |" in x)
    assert "| failed |" in line
    assert line_of(name, results).endswith(" Cases of ours that failed: 1.")


@pytest.mark.parametrize("name", MADE)
def test_where_all_failed_no_ratio_is_said(name: str, written: Written) -> None:
    rows = [Row(row.case, None, 0.0, failed={"ours": "no"}) for row in rows_of(name)[:2]]
    results = written(name, rows)
    told = line_of(name, results)
    assert told == f"- **{name}**: no case that has both times. Cases of ours that failed: 2."
    assert BLOCKS[name](results).count("| failed |") >= 2


@pytest.mark.parametrize("name", MADE)
def test_readme_stays_short(name: str, written: Written) -> None:
    """Prose of three lines of a page at the most, no table."""
    assert len(line_of(name, written(name, rows_of(name)))) < 3 * 120


def test_where_numbers_come_from_is_said_once(written: Written, source: Provenance) -> None:
    for name in ("cache-write", "projections"):
        results = written(name, rows_of(name))
    said = BLOCKS["summary"](results)
    assert said.count("commit 0123456789") == 1
    assert "commit 0123456789, 2026-11-29:\n\n- **projections**: " in said
    path = results.path("cache-write")
    later = json.loads(path.read_text()) | {"commit": "fedcba9876543210"}
    path.write_text(json.dumps(later))
    said = BLOCKS["summary"](results)
    assert "commit fedcba9876, 2026-11-29:\n\n- **cache-write**: " in said
    assert "commit 0123456789, 2026-11-29:\n\n- **projections**: " in said


def test_a_case_that_could_not_be_made_is_no_line_of_columns(written: Written) -> None:
    """Its row has neither weights nor cache."""
    case = next(decode_layer.cases(OPTIONS)).case
    lost = Row(case, None, 0.0, failed={"ours": "OutOfMemoryError: no"})
    results = written("decode-layer", [lost, *rows_of("decode-layer")])
    said = BLOCKS["decode-layer"](results)
    assert f"| {label(case)} | failed |" in said
    assert line_of("decode-layer", results).endswith("Cases of ours that failed: 1.")


# --- what they say ---


def test_projections_in_sum(written: Written) -> None:
    rows = rows_of("projections")
    results = written("projections", rows)
    said = line_of("projections", results)
    sums = "a layer's four in sum, "
    assert f"{sums}the fastest of cublas-bf16, tinygemm-int4 over ours: int4 1.50× (" in said
    assert f"{sums}cublas-bf16 over ours: fp8 2.00× (2.00× to 2.00×, 4 cases), bf16 2.00×" in said
    assert "as a chain, share of the floor: int4 80% (80% to 80%), fp8 80%" in said
    table = results.read("projections")
    assert table is not None
    found = fours(table["rows"])
    assert [(f.shape, f.M, f.weights) for f in found] == [
        (shape, m, weights)
        for shape in ("8B", "70B")
        for m in (1, 16)
        for weights in few_rows.FORMATS
    ]
    parts = [row for row in rows if (row.case["shape"], row.case["M"]) == ("8B", 16)]
    four = next(f for f in found if (f.shape, f.M, f.weights) == ("8B", 16, "int4"))
    mine = [r for r in parts if r.case["weights"] == "int4" and "layer" in r.case]
    assert four.ours == pytest.approx(sum(row.ours_us or 0 for row in mine))
    assert four.fastest == "tinygemm-int4"
    assert four.peers["ours-wgmma"] == pytest.approx(0.95 * four.ours)  # no rival of ours
    assert four.chain_share == pytest.approx(0.8)
    columns = parts_of(BLOCKS["projections"](results))[0]
    assert len(columns) == 2 + len(found)
    (line,) = (x for x in columns if x.startswith("| 8B | 16 | int4 |"))
    assert f"| {four.ours:.1f} | 50% | {1.5 * four.ours:.1f} (tinygemm-int4) | 1.50× |" in line
    assert line.endswith("| 80% |")


def test_a_chain_claims_no_error(written: Written) -> None:
    """Its numbers are only seen to exist; of a projection the error is shown."""
    said = BLOCKS["projections"](written("projections", rows_of("projections")))
    chains = [line for line in said.splitlines() if " chain " in line and "×" in line]
    assert len(chains) == 12
    assert all(line.endswith("| - | - |") for line in chains)
    assert "| 1.7e-03 | 2.5e-03 |" in said


def test_three_of_four_are_no_layer() -> None:
    """A sum that lacks one would flatter; a peer that failed at one has no sum."""
    options = replace(OPTIONS, shapes=("8B",), M=(1,))
    rows = [row.json() for row in projections(options)]
    (whole, *_) = fours(rows)
    assert whole.ours
    (without, *_) = fours([row for row in rows if row["case"].get("layer") != "down"])
    assert (without.ours, without.floor, without.peers) == (None, None, {})
    assert without.chain == whole.chain
    del rows[0]["peers_us"]["tinygemm-int4"]
    (slower, *_) = fours(rows)
    assert (slower.fastest, slower.ours) == ("cublas-bf16", whole.ours)
    rows[1]["ours_us"] = None
    (failed, *_) = fours(rows)
    assert (failed.ours, failed.speedup) == (None, None)


def test_decode_attention(written: Written) -> None:
    said = line_of("decode-attention", written("decode-attention", rows_of("decode-attention")))
    assert "the fastest of fa4, sdpa-cudnn, sdpa-flash over ours: bf16 1.50× (" in said
    assert "our own over BF16 pages to ours: fp8 2.50× (" in said
    assert ", int4 2.50× (" in said
    assert "share of 4.8 TB/s: bf16 50% (50% to 50%), fp8 50% (50% to 50%), int4 50%" in said


def test_decode_layer(written: Written) -> None:
    rows = rows_of("decode-layer")
    results = written("decode-layer", rows)
    said = line_of("decode-layer", results)
    assert "PyTorch's faster step over ours, by weights/cache: int4/int4 2.40× (" in said
    assert f"all pairs 2.40× (2.40× to 2.40×, {len(rows)} cases)" in said
    assert "ours over the floor: int4/int4 1.25×, fp8/fp8 1.25×, bf16/bf16 1.25×, all" in said
    block = BLOCKS["decode-layer"](results)
    columns = parts_of(block)[0]
    assert columns[0] == f"| {' | '.join(decode_layer.HEADS)} |"
    assert len(columns) == 2 + len(rows)
    assert "| compile-bf16 | compile-int4 | ours-4-warps | ours-nhd |" in block


def test_decode_ablation(written: Written) -> None:
    results = written("decode-ablation", rows_of("decode-ablation"))
    said = line_of("decode-ablation", results)
    assert "a step with one thing replaced over the step as it is: table 1.10×" in said
    assert "BF16 projections from row-major weights over ours: skinny 1.10×." in said
    block = BLOCKS["decode-ablation"](results)
    assert "| 8B int4 cache int4 batch 1 context 1024 heads 32 kv_heads 8 head_dim 128 |" in block
    assert "| 8B bf16 projections M 1 |" in block


def test_caches_of_nvfp4(written: Written) -> None:
    said = line_of("cache-write", written("cache-write", rows_of("cache-write")))
    assert "a copy of as many bytes over ours: smoothing none 0.75× (0.75× to 0.75×, 6" in said
    assert "share of 4.8 TB/s: smoothing none 50% (" in said
    said = line_of("qk4pv8-decode", written("qk4pv8-decode", rows_of("qk4pv8-decode")))
    rivals = "the fastest of sdpa-cudnn, sdpa-flash in BF16 over ours: 1 request 2.00× ("
    assert rivals in said
    assert "our own in BF16 over ours: 1 request 1.50×, " in said
    assert ", 32 requests 1.50×" in said
    results = written("qk4pv8-prefill", rows_of("qk4pv8-prefill"))
    said = line_of("qk4pv8-prefill", results)
    assert "the fastest of fa4, sdpa-cudnn, sdpa-flash in BF16 over ours: exact16 2.00× (" in said
    assert ", fp8 cache 2.00× (" in said
    assert "| case | ours, µs | TFLOP/s |" in BLOCKS["qk4pv8-prefill"](results)


def test_one_case_has_no_range(written: Written) -> None:
    results = written("cache-write", rows_of("cache-write")[:1])
    said = line_of("cache-write", results)
    assert "smoothing none 0.75× (1 case); share of 4.8 TB/s: smoothing none 50%." in said


# --- counters ---


def counted(source: Provenance) -> dict[str, Any]:
    head = {"table": "counters", "paper": counters.PAPER, **vars(source)}
    rows = []
    for layer, more in (("qkv", 1.2), ("o", 1.8)):
        case = {"shape": "8B", "layer": layer, "M": 64, "N": 96, "K": 128, "weights": "fp8"}
        for candidate, times in (("whole", more), ("plain", 1.0)):
            found = {"instructions": round(1_000_000 * times), "dram_bytes_read": 1234.5}
            kernel = f"epicute_gemm_{candidate}"
            rows.append({"case": case, "candidate": candidate, "kernel": kernel, "counters": found})
    return {**head, "protocol": "the protocol", "rows": rows}


def test_counters(source: Provenance, tmp_path: Path) -> None:
    (tmp_path / "counters.json").write_text(json.dumps(counted(source)))
    results = Results(tmp_path)
    said = BLOCKS["counters"](results)
    assert "| case | epilogue | instructions | dram bytes read |" in said
    assert "| 8B qkv fp8 64×96×128 | whole | 1,200,000 | 1,234 |" in said
    assert said.count("| plain |") == 2
    assert "µs" not in said
    line = line_of("counters", results)
    assert "with a plain store: fp8 1.47× (1.20× to 1.80×, 2 cases)." in line


@pytest.mark.parametrize(
    "fault", ["no device", "no rows", "candidate", "a key more", "unknown counter", "negative"]
)
def test_counters_of_another_schema_are_refused(
    fault: str, source: Provenance, tmp_path: Path
) -> None:
    table = counted(source)
    row = table["rows"][1]
    match fault:
        case "no device":
            table["device"] = ""
        case "no rows":
            del table["rows"]
        case "candidate":
            row["candidate"] = "half"
        case "a key more":
            row["ours_us"] = 3.0
        case "unknown counter":
            row["counters"]["seconds"] = 3
        case "negative":
            row["counters"]["instructions"] = -1
    (tmp_path / "counters.json").write_text(json.dumps(table))
    with pytest.raises(ArgumentError):
        BLOCKS["counters"](Results(tmp_path))


def test_all_that_is_counted_has_a_column() -> None:
    assert set(counters.METRICS.values()) < set(NAMES)
    assert set(COLUMNS) == {"projections", "decode-layer"}
