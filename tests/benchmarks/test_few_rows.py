"""Table ``projections``, end to end on the CPU at tiny sizes: the plan evaluates, the timer counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks import few_rows, int4_peers
from benchmarks.few_rows import Chain, Few
from benchmarks.harness import Options, Session
from benchmarks.provenance import Provenance
from benchmarks.stream import ReadKernel
from benchmarks.table import validate
from benchmarks.timing import Timer
from epicute.decode import FewRowsPlan
from epicute.jit import DEFAULT_TARGET, compile
from epicute.models.shapes import LayerShape
from tests.benchmarks.conftest import TINY
from tests.ptx import Emulated

FORMATS = ("int4", "fp8", "bf16")


@pytest.fixture
def options() -> Options:
    return Options((), device="cpu", rounds=2)


def row_of(found: Few | Chain, timer: Timer, source: Provenance) -> dict[str, Any]:
    (row,) = (row.json() for row in few_rows.measure(found, Session(timer, rounds=2)))
    head = dict.fromkeys(["paper", "protocol", "floor"], "said")
    validate({"table": "projections", **head, **vars(source), "rows": [row]})
    return row


@pytest.mark.parametrize("weights", FORMATS)
@pytest.mark.parametrize("layer", few_rows.LAYERS)
def test_a_row(
    weights: str, layer: str, options: Options, timer: Timer, source: Provenance
) -> None:
    row = row_of(Few(TINY, layer, 3, weights, options, copies=2), timer, source)
    assert row["ours_us"]
    assert {"stream-read", "cublas-bf16"} <= set(row["peers_us"])
    assert row["error"]["norm"] < 5e-3
    assert row["floor_us"] > 0
    if weights == "int4" and TINY.hidden % 128 == 0 and layer != "down":
        assert set(row["failed"]) <= set(int4_peers.PEERS)
        assert "VLLM_OPS" in row["failed"]["marlin"]


@pytest.mark.parametrize("weights", FORMATS)
def test_a_chain(weights: str, options: Options, timer: Timer, source: Provenance) -> None:
    row = row_of(Chain(TINY, 2, weights, options, copies=3), timer, source)
    assert row["case"]["variant"] == "chain"
    assert row["ours_us"]
    assert set(row["peers_us"]) == {"stream-read"}


def test_a_chain_is_its_projections_in_turn(options: Options) -> None:
    found = Chain(TINY, 2, "bf16", options, copies=2)
    run = few_rows.chained(found)
    first = run(0)["out"].clone()
    assert torch.isfinite(first).all()
    second = run(1)["out"]
    assert not torch.equal(first, second)  # the next layer read what this one wrote


def test_a_wrong_row_is_never_timed(
    options: Options, timer: Timer, source: Provenance, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = FewRowsPlan.run

    def wrong(self: FewRowsPlan, x: Any, packed: Any, **given: Any) -> None:
        right(self, x, packed, **given)
        given["out"][-1] *= 1.2

    monkeypatch.setattr(FewRowsPlan, "run", wrong)
    row = row_of(Few(TINY, "o", 3, "int4", options, copies=2), timer, source)
    assert row["ours_us"] is None
    assert "WrongResult" in row["failed"]["ours"]


def test_bytes_are_those_of_codes_scales_and_activations(options: Options) -> None:
    shape = LayerShape(4096, 14336, 32, 8, 128, "8B")
    found = Few(shape, "o", 8, "int4", options)
    wanted = 4096 * 4096 // 2 + 4096 * 32 * 2 + 2 * 8 * 8192
    assert found.bytes == wanted
    assert found.copies * found.records.nbytes >= 300e6
    assert Few(shape, "o", 8, "bf16", options).bytes == 4096 * 4096 * 2 + 2 * 8 * 8192


def test_words_along_k_are_what_gptq_stores() -> None:
    codes = torch.randint(0, 16, (5, 24), dtype=torch.uint8)
    words = int4_peers.along_k(codes)
    assert words.shape == (3, 5)
    for i in range(8):
        assert torch.equal((words >> (4 * i) & 15).to(torch.uint8), codes[:, i::8].T)


@pytest.mark.compile
def test_kernels_are_known_without_data() -> None:
    options = Options(("SmolLM2",), device="cpu", M=(1, 64))
    found = list(few_rows.kernels(options))
    assert len(found) == len({kernel.key.digest for kernel in found})
    assert {kernel.spec.schedule.rows for kernel in found} >= {8, 64}


@pytest.mark.compile
def test_the_plain_read_compiles() -> None:
    report = compile(ReadKernel(DEFAULT_TARGET), strict=False).report
    assert report.problems(DEFAULT_TARGET.smem_per_block) == []
    assert report.registers is not None
    assert report.registers <= 64  # two blocks of 1024 threads share an SM at 32


@pytest.mark.compile
def test_the_plain_read_touches_nothing_else() -> None:
    """Run from its PTX on tensors that end where they end."""
    for count in (1, 1024, 3 * 8 * 1024 + 17):
        data = torch.zeros(count, 4, dtype=torch.int32)
        arguments = (data.data_ptr(), count, 1)
        Emulated(ReadKernel(DEFAULT_TARGET)).launch(arguments, data)
        assert not data.any()
