"""Measurements of table gemm, each once, and what follows from them."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.floors import BANDWIDTH, PEAK
from benchmarks.gemm import PEERS
from benchmarks.points import CANDIDATES, median_mhz, points
from benchmarks.readme import Results
from epicute.errors import ArgumentError

SIZES = {"M": 2048, "N": 6144, "K": 4096}
FLOPS = 2 * 2048 * 6144 * 4096


def row(
    weights: str, accumulate: str, ours: float | None, peers: dict[str, float], **more: Any
) -> dict[str, Any]:
    case = {"shape": "8B", "layer": "qkv", **SIZES, "weights": weights, "accumulate": accumulate}
    return {"case": case, "ours_us": ours, "peers_us": peers, **more}


ROWS = [
    row(
        "bf16",
        "fast",
        160.0,
        {"cublas-bf16": 150.0},
        clocks_mhz={"ours": 1470.0, "cublas-bf16": 1500.0},
        watts={"ours": 700.0},
    ),
    row(
        "fp8",
        "fast",
        80.0,
        {"ours-bf16": 160.0, "cublas-bf16": 150.0, "scaled-mm-precise": 100.0},
        clocks_mhz={"ours": 1400.0, "ours-bf16": 1470.0},
    ),
    row("fp8", "precise", None, {"scaled-mm-precise": 100.0}),
    {"case": {"shape": "8B"}, "ours_us": None, "peers_us": {}},
]


def test_a_shared_measurement_stands_once_and_as_what_it_is() -> None:
    found = points({"rows": ROWS})
    assert [(p.candidate, p.weights, p.accumulate, p.us) for p in found] == [
        ("ours", "bf16", "fast", 160.0),
        ("cublas-bf16", "bf16", "fast", 150.0),
        ("ours", "fp8", "fast", 80.0),
        ("scaled-mm-precise", "fp8", "precise", 100.0),
    ]
    assert {p.product for p in found} == {"8B qkv 2048×6144×4096"}
    assert [(p.mhz, p.watts) for p in found] == [
        (1470.0, 700.0),
        (1500.0, None),
        (1400.0, None),
        (None, None),
    ]
    assert median_mhz(found) == 1470.0
    assert median_mhz([]) is None


def test_rates_by_hand() -> None:
    bf16, _, fp8, unread = points({"rows": ROWS})
    assert bf16.rate == pytest.approx(FLOPS / 160e-6)
    assert bf16.bytes == 2 * (2048 * 4096 + 6144 * 4096 + 2048 * 6144)
    assert fp8.bytes == 2048 * 4096 + 6144 * 4096 + 2 * 2048 * 6144
    assert fp8.intensity == FLOPS / fp8.bytes
    assert bf16.share == pytest.approx(FLOPS / 160e-6 / (132 * 4096 * 1470e6))
    assert fp8.share == pytest.approx(FLOPS / 80e-6 / (132 * 8192 * 1400e6))
    assert unread.share is None


def test_a_peer_that_is_not_known_is_refused() -> None:
    assert {name for names in PEERS.values() for name in names} == set(CANDIDATES)
    with pytest.raises(ArgumentError, match="novel"):
        points({"rows": [row("fp8", "fast", 1.0, {"novel": 1.0})]})


def test_committed_table_gives_points_under_its_floors() -> None:
    table = Results.of().read("gemm")
    if table is None:
        pytest.skip("table gemm is not measured")
    found = {(p.product, p.candidate, p.weights, p.accumulate): p for p in points(table)}
    for row in table["rows"]:
        if row["ours_us"] is None:
            continue
        case = row["case"]
        product = f"{case['shape']} {case['layer']} {case['M']}×{case['N']}×{case['K']}"
        point = found[product, "ours", case["weights"], case["accumulate"]]
        roof = min(PEAK[point.weights], BANDWIDTH * point.intensity)
        assert point.size.flops / roof * 1e6 == pytest.approx(row["floor_us"])
        assert point.rate <= roof
        assert point.mhz == row.get("clocks_mhz", {}).get("ours")
        assert point.share is None or point.share < 1
