"""Every row of ``gemm`` and ``epilogue``, end to end on the CPU at tiny sizes.

The plan is the CPU interpreter behind the same names of operands, so that compositions, operands,
outputs, references and peers are those of the GPU run; the timer alone is not.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import epicute
from benchmarks import epilogue, gemm
from benchmarks.data import Layer, layers
from benchmarks.harness import LAYERS, SHARDS, Options, Session
from benchmarks.power import Reading
from benchmarks.projections import projection
from benchmarks.provenance import Provenance
from benchmarks.table import validate
from benchmarks.timing import Timer

MakeLayer = Callable[[str], Layer]
MS = (64, 2048, 4096, 16384)


def rows_of(table: Any, layer: Layer, timer: Timer, source: Provenance) -> list[dict[str, Any]]:
    session = Session(timer, rounds=2)
    rows = [row.json() for row in table.measure(layer, session)]
    head = dict.fromkeys(["table", "paper", "protocol", "floor"], "said")
    validate({**head, **vars(source), "rows": rows})
    return rows


@pytest.mark.usefixtures("cpu_plan")
@pytest.mark.parametrize("name", LAYERS)
def test_gemm(name: str, layer: MakeLayer, timer: Timer, source: Provenance) -> None:
    rows = rows_of(gemm, layer(name), timer, source)
    bf16, fast, precise = rows
    told = [(row["case"]["weights"], row["case"]["accumulate"]) for row in rows]
    assert told == [("bf16", "fast"), ("fp8", "fast"), ("fp8", "precise")]
    assert [*bf16["peers_us"]] == ["cublas-bf16"]
    same = ["cublas-bf16", "ours-bf16"]
    assert [*fast["peers_us"]] == ["scaled-mm-fast", "scaled-mm-precise", *same]
    assert [*precise["peers_us"]] == ["scaled-mm-precise", "scaled-mm-fast", *same]
    assert fast["peers_us"] == precise["peers_us"]  # one session: their times are the same
    assert fast["peers_us"]["ours-bf16"] == bf16["ours_us"]
    assert len({row["ours_us"] for row in rows}) == 3
    for row in rows:
        assert "failed" not in row
        assert 1e-4 < row["error"]["norm"] < row["error"]["worst_row"] < 5e-3  # BF16's rounding
        assert row["floor_us"] > 0


@pytest.mark.usefixtures("cpu_plan")
@pytest.mark.parametrize("name", LAYERS)
def test_epilogue(name: str, layer: MakeLayer, timer: Timer, source: Provenance) -> None:
    rows = rows_of(epilogue, layer(name), timer, source)
    assert [row["case"]["weights"] for row in rows] == [*projection(layer(name)).formats]
    assert {row["case"]["accumulate"] for row in rows} == {"fast"}
    for row in rows:
        assert "failed" not in row, row["failed"]
        compiled = ["compile-bf16", "compile-fp8"][: 1 + (row["case"]["weights"] == "fp8")]
        assert [*row["peers_us"]] == ["ours-plain", *compiled]
        rounding = 0.03 if row["case"]["out"] == "fp8" else 0.003
        assert 1e-4 < row["error"]["norm"] < rounding
    assert rows[0]["case"]["composition"].startswith("Dequantize >> ")
    assert ("page" in rows[0]["case"]) == (name == "qkv")


@pytest.mark.usefixtures("cpu_plan")
@pytest.mark.parametrize("table", [gemm, epilogue])
def test_sensors_reach_the_rows_of_every_candidate(
    table: Any, layer: MakeLayer, timer: Any, source: Provenance
) -> None:
    timer.reading = Reading(1400.0, 690.0)
    for row in rows_of(table, layer("o"), timer, source):
        times = {"ours": row["ours_us"], **row["peers_us"]}
        assert row["clocks_mhz"] == {name: 1401.0 - time for name, time in times.items()}
        assert row["watts"] == dict.fromkeys(times, 690.0)


@pytest.mark.usefixtures("cpu_plan")
@pytest.mark.parametrize("reading", [Reading(), Reading(clock_mhz=1400.0), Reading(watts=690.0)])
def test_a_silent_sensor_leaves_its_field_out(
    reading: Reading, layer: MakeLayer, timer: Any, source: Provenance
) -> None:
    timer.reading = reading
    for row in rows_of(gemm, layer("o"), timer, source):
        assert ("clocks_mhz" in row) == (reading.clock_mhz is not None)
        assert ("watts" in row) == (reading.watts is not None)


@pytest.mark.usefixtures("cpu_plan")
@pytest.mark.parametrize("weights", ["bf16", "fp8"])
@pytest.mark.parametrize("name", LAYERS)
def test_every_format_of_every_layer_can_run(name: str, weights: str, layer: MakeLayer) -> None:
    found = projection(layer(name))
    exact = found.exact(epilogue.product(found.layer, weights))
    for run in (epilogue.fused(found, weights), epilogue.peer(found, weights)):
        outputs = run(1)
        assert set(outputs) == set(found.outputs(weights))
        for output, tensor in outputs.items():
            seen = found.view(output, tensor).double()
            assert torch.linalg.norm(seen - exact[output]) < 0.03 * torch.linalg.norm(exact[output])


@pytest.mark.usefixtures("cpu_plan")
@pytest.mark.parametrize("name", LAYERS)
def test_the_kernel_updates_what_it_should(name: str, layer: MakeLayer) -> None:
    """Amax covers all rows and counters stay 0: the delayed scale fits the data."""
    found = projection(layer(name))
    operands = found.operands("fp8")
    if "amax" not in operands:
        assert name == "qkv"
        return
    _, composition = found.composition("fp8")
    x, scale = epilogue.activations(found.layer, "fp8")
    (packed, _) = found.layer.packed(composition, "fp8")
    epicute.plan(composition, packed, x_dtype=x[0].dtype).run(x[0], packed, **scale, **operands)
    assert 1.0 < operands["amax"].item() < 448 * operands["out_scale"].item()
    assert operands["saturated"].item() == operands["nans"].item() == 0


@pytest.mark.parametrize("fault", ["row", "unwritten", "raises"])
def test_a_wrong_kernel_is_never_timed(
    fault: str,
    cpu_plan: Any,
    monkeypatch: pytest.MonkeyPatch,
    layer: MakeLayer,
    timer: Timer,
    source: Provenance,
) -> None:
    right = cpu_plan.run

    def run(self: Any, x: torch.Tensor, packed: Any, **operands: torch.Tensor) -> None:
        if fault == "raises":
            raise RuntimeError("launch failed")
        if fault == "row":
            right(self, x, packed, **operands)
            operands["out"][0] *= 1.5

    monkeypatch.setattr(cpu_plan, "run", run)
    rows = rows_of(gemm, layer("o"), timer, source)
    for row in rows:
        assert row["ours_us"] is None
        assert row["failed"]["ours"].startswith(
            "RuntimeError" if fault == "raises" else "WrongResult"
        )
    assert "cublas-bf16" in rows[0]["peers_us"]
    assert all("ours-bf16" in row["failed"] for row in rows[1:])


def test_a_kernel_that_errs_is_alone_in_it(
    cpu_plan: Any,
    monkeypatch: pytest.MonkeyPatch,
    layer: MakeLayer,
    timer: Timer,
    source: Provenance,
) -> None:
    """A wrong fast kernel is no fault of the precise one, whose row is another."""
    right = cpu_plan.run

    def run(self: Any, x: torch.Tensor, packed: Any, **operands: torch.Tensor) -> None:
        right(self, x, packed, **operands)
        if x.dtype == torch.float8_e4m3fn and self.accumulate == "fast":
            operands["out"].mul_(1.1)

    monkeypatch.setattr(cpu_plan, "run", run)
    bf16, fast, precise = rows_of(gemm, layer("o"), timer, source)
    assert fast["failed"]["ours"].startswith("WrongResult")
    assert "failed" not in bf16
    assert "failed" not in precise


def test_a_table_file(
    cpu_plan: Any,
    monkeypatch: pytest.MonkeyPatch,
    layer: MakeLayer,
    timer: Timer,
    source: Provenance,
    tmp_path: Path,
) -> None:
    for module, name in ((gemm, "gemm"), (epilogue, "epilogue")):
        monkeypatch.setattr(module, "layers", lambda options: [layer("o"), layer("gate_up")])
        table = module.table(Options(shapes=(), rounds=1), timer, source, tmp_path)
        validate(table.content)
        assert table.content["table"] == name
        assert len(table.rows) == {"gemm": 6, "epilogue": 3}[name]
        assert (tmp_path / f"{name}.json").exists()


def test_layers_of_the_published_shapes() -> None:
    options = Options(shapes=("1B", "405B"), device="cpu")
    found = {str(layer): layer for layer in layers(options)}
    assert [*found] == [
        "1B qkv 2048×3072×2048",
        "1B o 2048×2048×2048",
        "1B gate_up 2048×16384×2048",
        "1B down 2048×2048×8192",
        "405B qkv 2048×18432×16384",
        "405B o 2048×16384×16384",
        "405B gate_up 2048×106496×16384",
        "405B down 2048×16384×53248",
    ]
    assert found["1B o 2048×2048×2048"].copies == 37
    assert found["405B gate_up 2048×106496×16384"].copies == 4


def test_layers_at_several_rows_and_shards_last() -> None:
    options = Options(("8B",), ("qkv", "o"), M=(64, 2048), shards=True, device="cpu")
    found = list(layers(options))
    assert [str(layer) for layer in found[:4]] == [
        "8B qkv 64×6144×4096",
        "8B qkv 2048×6144×4096",
        "8B o 64×4096×4096",
        "8B o 2048×4096×4096",
    ]
    shards = [(layer.name, layer.M, layer.N, layer.K) for layer in found[4:]]
    assert shards == [(name, m, *size) for name, size in SHARDS.items() for m in (64, 2048)]
    assert [*SHARDS.values()] == [(1280, 8192), (2304, 16384), (3584, 8192), (7168, 8192)]
    assert str(found[4]) == "shard-1280x8192 64×1280×8192"
    assert "shape" not in found[4].case


@pytest.mark.usefixtures("cpu_plan")
def test_a_shard_has_a_row_of_every_format(
    monkeypatch: pytest.MonkeyPatch, timer: Timer, source: Provenance
) -> None:
    monkeypatch.setitem(SHARDS, "shard-1280x8192", (96, 128))
    layer = Layer(None, "shard-1280x8192", 33, Options((), device="cpu", check_rows=9), copies=2)
    rows = rows_of(gemm, layer, timer, source)
    assert [row["case"]["weights"] for row in rows] == ["bf16", "fp8", "fp8"]
    for row in rows:
        assert "failed" not in row
        assert (row["case"]["layer"], row["case"]["M"]) == ("shard-1280x8192", 33)


@pytest.mark.parametrize("module", [gemm, epilogue])
def test_every_M_has_its_kernels_and_none_twice(module: Any) -> None:
    """A schedule may depend on M, and may serve several."""

    def digests(*rows: int) -> list[str]:
        options = Options(("1B",), M=rows, device="cpu")
        return [kernel.key.digest for kernel in module.kernels(options)]

    found = digests(*MS)
    assert len(found) == len(set(found))
    assert set(found) == {digest for rows in MS for digest in digests(rows)}
    assert len(found) < sum(len(digests(rows)) for rows in MS)


@pytest.mark.parametrize("module", [gemm, epilogue])
def test_kernels_are_planned_for_the_rows_that_are_measured(module: Any) -> None:
    for rows in MS:
        for kernel in module.kernels(Options(("8B",), M=(rows,), device="cpu")):
            assert kernel.spec.problem.expected_m == rows


def test_the_largest_case_fits_the_card() -> None:
    """Weights of both formats, packed and not, and outputs of every candidate, in bytes."""
    options = Options(shapes=("405B",), layers=("gate_up",), device="cpu")
    (layer,) = layers(options)
    weights = layer.copies * layer.N * layer.K * (2 + 2 + 1 + 1 + 1)  # fast and precise pack each
    outputs = layer.copies * layer.M * layer.N * 2 * 7
    quantising = layer.N * layer.K * 4 * 4  # four float32 matrices at a time
    assert weights + outputs + quantising < 120e9


@pytest.mark.parametrize(("module", "count"), [(gemm, 12), (epilogue, 10)])
def test_kernels_are_known_without_data(module: Any, count: int) -> None:
    """Described before anything is drawn: a weight of this shape would not fit a small machine."""
    options = Options(shapes=("405B",), device="cpu")
    found = list(module.kernels(options))
    assert len(found) == count
    assert len({kernel.key.digest for kernel in found}) == count
    assert {kernel.spec.problem.columns for kernel in found} == {18432, 16384, 106496}
    for kernel in found:  # as it reaches another process
        assert pickle.loads(pickle.dumps(kernel)).key.digest == kernel.key.digest


@pytest.mark.parametrize("module", [gemm, epilogue])
def test_exactly_these_kernels_are_run(
    module: Any,
    planned: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    layer: MakeLayer,
    timer: Timer,
) -> None:
    monkeypatch.setattr(module, "layers", lambda options: [layer("qkv"), layer("gate_up")])
    for made in module.layers(None):
        module.measure(made, Session(timer, rounds=1))
    assert all(p.plan.schedule is None for p in planned)
    made = [
        (p.composition.key(), p.packed.shape, p.x_dtype, p.plan.accumulate, p.plan.expected_m)
        for p in planned
    ]
    expected = []
    for kernel in module.kernels(Options(shapes=())):
        key, asked = kernel.spec.resolved.composition.key(), kernel.spec.problem
        how = asked.accumulate, asked.expected_m
        expected.append((key, (asked.columns, asked.depth), asked.dtype, *how))
    assert sorted(map(str, made)) == sorted(map(str, expected))


def test_checked_rows_include_both_ends(layer: MakeLayer) -> None:
    rows = layer("qkv").rows.tolist()
    assert rows[0] == 0
    assert rows[-1] == 79
    assert len(rows) == len(set(rows)) >= 7


def test_copies_are_equal_and_apart(layer: MakeLayer) -> None:
    found = layer("qkv")
    for first, second in (found.x, found.weight, found.codes, found.x_rows[0], found.x_tensor[0]):
        assert first.data_ptr() != second.data_ptr()
        assert torch.equal(first.view(torch.uint8), second.view(torch.uint8))
