"""Tables ``prefill-layer`` and ``packed-prefill``, end to end on the CPU at tiny sizes.

The block is epicute's own, its kernels the stand-ins of the models' tests; peers are what is
compiled on the GPU, here run as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend

from benchmarks import (
    blocks,
    layer_accuracy,
    layer_session,
    our_block,
    packed_prefill,
    prefill_layer,
    torch_block,
)
from benchmarks.blocks import Block, allowed
from benchmarks.check import Error, compare
from benchmarks.harness import Options, Session
from benchmarks.mixes import MIXES
from benchmarks.our_block import OurBlock
from benchmarks.provenance import Provenance
from benchmarks.table import Row, validate
from benchmarks.timing import Timer
from epicute.models.prefill import PrefillBlock
from epicute.models.shapes import SHAPES, LayerShape
from tests.models.cpu_kernels import Launches

TINY = LayerShape(128, 192, 4, 2, 64, "tiny")
LENGTHS = (16, 70, 1, 33)
LONGEST = 80
OPTIONS = Options((), device="cpu", rounds=2, check_rows=9)


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """The block's kernels without a GPU, and torch.compile without its compile time."""
    launches = Launches()
    planned = SimpleNamespace(plan=partial(PrefillBlock.plan, kernels=launches.kernels))
    monkeypatch.setattr(our_block, "PrefillBlock", planned)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(blocks, "LONGEST", LONGEST)
    return launches


@pytest.fixture
def equal() -> Block:
    return Block(TINY, (96,), OPTIONS, copies=2)


@pytest.fixture
def mix() -> Block:
    return Block(TINY, LENGTHS, OPTIONS, mix="lognormal", copies=2)


def rows_of(
    measure: Callable[[Block, Session], list[Any]], block: Block, timer: Timer, source: Provenance
) -> list[dict[str, Any]]:
    rows = [row.json() for row in measure(block, Session(timer, rounds=2))]
    head = dict.fromkeys(["table", "paper", "protocol", "floor"], "said")
    validate({**head, **vars(source), "rows": rows})
    return rows


def test_a_layer(equal: Block, timer: Timer, source: Provenance) -> None:
    fp8, precise, bf16 = rows_of(prefill_layer.measure, equal, timer, source)
    for row, accumulate in ((fp8, "fast"), (precise, "precise"), (bf16, "fast")):
        assert "failed" not in row, row["failed"]
        assert row["case"]["accumulate"] == accumulate
        assert row["case"]["variant"] == "sdpa flash, by default flash"
        assert set(row["errors"]) == set(row["peers_us"])
    assert [*fp8["peers_us"]] == [
        *("compile-fp8", "compile-fp8-default", "compile-bf16", "ours-rolled", "ours-bf16")
    ]
    assert [*precise["peers_us"]] == ["compile-fp8-precise", "compile-fp8", "compile-bf16"]
    assert precise["peers_us"]["compile-fp8"] == fp8["peers_us"]["compile-fp8"]
    assert len({fp8["ours_us"], precise["ours_us"], *precise["peers_us"].values()}) == 5
    assert [*bf16["peers_us"]] == ["compile-bf16"]
    assert fp8["peers_us"]["compile-fp8"] == fp8["peers_us"]["compile-fp8-default"]
    assert fp8["peers_us"]["ours-bf16"] == bf16["ours_us"]
    assert fp8["floor_us"] < bf16["floor_us"]
    assert 5e-4 < bf16["error"]["norm"] < 5e-3 < 1e-2 < fp8["error"]["norm"] < 6e-2
    assert fp8["errors"]["compile-fp8"]["norm"] > 1e-2
    assert fp8["errors"]["compile-bf16"]["norm"] < 5e-3


def test_another_default_is_timed_apart(
    equal: Block, monkeypatch: pytest.MonkeyPatch, timer: Timer, source: Provenance
) -> None:
    monkeypatch.setattr(layer_session, "chosen", lambda block: SDPBackend.CUDNN_ATTENTION)
    fp8, _, bf16 = rows_of(prefill_layer.measure, equal, timer, source)
    assert fp8["peers_us"]["compile-fp8"] != fp8["peers_us"]["compile-fp8-default"]
    assert fp8["case"]["variant"] == "sdpa flash, by default cudnn"
    assert [*bf16["peers_us"]] == ["compile-bf16"]


def test_a_mix(mix: Block, timer: Timer, source: Provenance) -> None:
    rows = rows_of(packed_prefill.measure, mix, timer, source)
    compiled = {"fast": "compile-fp8-default", "precise": "compile-fp8-precise"}
    for row, accumulate in zip(rows, compiled, strict=True):
        assert "failed" not in row, row["failed"]
        assert [*row["peers_us"]] == ["ours-padded", "compile-fp8", compiled[accumulate]]
        sizes = {"batch": 4, "length": LONGEST, "M": sum(LENGTHS), "mix": "lognormal", "page": 128}
        sizes["accumulate"] = accumulate
        assert sizes.items() <= row["case"].items()
        assert 1e-2 < row["error"]["norm"] < 6e-2
        assert 1e-2 < row["errors"]["ours-padded"]["norm"] < 6e-2
    first, second = rows
    assert first["peers_us"]["ours-padded"] != second["peers_us"]["ours-padded"]


@pytest.mark.parametrize("outliers", [False, True])
def test_errors_beside_each_other(outliers: bool, timer: Timer, source: Provenance) -> None:
    shape = LayerShape(512, 192, 4, 2, 64, "tiny")
    block = Block(shape, (40,), OPTIONS, outliers=outliers, copies=1)
    fp8, bf16 = rows_of(layer_accuracy.measure, block, timer, source)
    for row in (fp8, bf16):
        assert "failed" not in row, row["failed"]
        assert row["ours_us"] is None
        assert row["case"]["variant"] == ("outliers" if outliers else "normal")
    assert [*fp8["errors"]] == ["compile-fp8", "ours-rows"]
    assert [*bf16["errors"]] == ["compile-bf16"]
    for error in (fp8["error"], *fp8["errors"].values()):
        assert 2 * bf16["error"]["norm"] < error["norm"] < 6e-2
    assert fp8["error"]["norm"] != fp8["errors"]["ours-rows"]["norm"]
    spread = block.x[0].float().std(dim=0)
    assert spread[0] / spread[1] == pytest.approx(16 if outliers else 1, rel=0.5)


@pytest.mark.parametrize("weights", ["fp8", "bf16"])
def test_everybody_computes_the_same_layer(mix: Block, weights: str) -> None:
    """All rows, not the checked ones alone, of the second copy."""
    mix.rows = torch.arange(mix.tokens)
    exact = mix.exact()
    runs = {
        "packed": OurBlock(mix, weights, packed=True, page=16).runner(),
        "padded": OurBlock(mix, weights, page=16).runner(),
        "dense": OurBlock(mix, weights).runner(roll=True),
        "compiled": torch_block.compiled_block(mix, weights, SDPBackend.MATH),
    }
    for name, run in runs.items():
        found = compare(mix.view("out", run(1)["out"]), exact)
        assert found.within(allowed(weights)), (name, found)


def test_a_layer_is_five_launches(equal: Block, on_cpu: Launches) -> None:
    run, rolled = (OurBlock(equal, "fp8").runner(roll) for roll in (False, True))
    on_cpu.made.clear()
    run(0)
    assert len(on_cpu.made) == 5
    on_cpu.made.clear()
    rolled(0)
    assert on_cpu.made[0] == "roll"
    assert len(on_cpu.made) == 6


def test_results_begin_poisoned_and_scales_fit(equal: Block) -> None:
    mine = OurBlock(equal, "fp8")
    for bound in mine.bound:
        assert bound.out.values.isnan().all()
        assert bound.scales is not None
        for site in bound.scales.sites:
            assert site.scale_used.item() * 448 == pytest.approx(site.history.max().item())
    before = [site.saturated.item() for site in mine.bound[0].scales.sites]
    mine.runner()(0)
    assert [site.saturated.item() for site in mine.bound[0].scales.sites] == before


def test_copies_are_apart(equal: Block) -> None:
    first, second = OurBlock(equal, "bf16").bound
    for name in ("qkv", "o", "gate_up", "down"):
        mine, other = (getattr(b.block.weights, name).codes for b in (first, second))
        assert mine.data_ptr() != other.data_ptr()
        assert torch.equal(mine, other)
    assert first.x.values.data_ptr() != second.x.values.data_ptr()
    assert first.out.values.data_ptr() != second.out.values.data_ptr()
    assert first.block.workspace is second.block.workspace


def test_padding_is_where_no_token_is(mix: Block) -> None:
    padded = mix.x_padded[1].view(-1, TINY.hidden)
    assert torch.equal(padded[mix.places], mix.x[1])
    assert mix.places.tolist() == [
        request * LONGEST + at for request, n in enumerate(LENGTHS) for at in range(n)
    ]
    assert not padded.isnan().any()
    assert mix.view("out", padded).equal(mix.x[0][mix.rows])
    assert mix.view("out", mix.x[0]).equal(mix.x[0][mix.rows])


def test_the_reference_sees_no_other_request(mix: Block) -> None:
    mix.rows = torch.arange(mix.tokens)
    first = mix.exact()
    mix.x[0][-LENGTHS[-1] :] += 1.0
    second = mix.exact()
    others = mix.tokens - LENGTHS[-1]
    assert torch.equal(first[:others], second[:others])
    assert not torch.allclose(first[others:], second[others:])


@pytest.mark.parametrize("fault", ["row", "unwritten"])
def test_a_wrong_layer_is_never_timed(
    fault: str,
    equal: Block,
    monkeypatch: pytest.MonkeyPatch,
    timer: Timer,
    source: Provenance,
) -> None:
    right = our_block.Bound.run

    def run(self: Any, requests: Any, roll: bool) -> torch.Tensor:
        if fault == "unwritten":
            return torch.full_like(self.out.values, float("nan"))
        made = right(self, requests, roll)
        made[0] *= 1.5
        return made

    monkeypatch.setattr(our_block.Bound, "run", run)
    for row in rows_of(prefill_layer.measure, equal, timer, source):
        assert row["ours_us"] is None
        assert row["failed"]["ours"].startswith("WrongResult")
        assert row["peers_us"]["compile-bf16"]


def test_fastest_leaves_out_what_does_not_run(
    equal: Block, monkeypatch: pytest.MonkeyPatch, timer: Timer
) -> None:
    assert torch_block.fastest(equal, timer) == SDPBackend.FLASH_ATTENTION  # no cuDNN on a CPU
    monkeypatch.setattr(torch_block, "BACKENDS", {"sdpa-cudnn": SDPBackend.CUDNN_ATTENTION})
    with pytest.raises(RuntimeError):
        torch_block.fastest(equal, timer)


def test_budgets_tell_the_formats_apart() -> None:
    assert not Error(0.034, 0.04).within(allowed("bf16"))
    assert Error(0.034, 0.04).within(allowed("fp8"))


def test_cases() -> None:
    options = Options(("1B", "405B"), device="cpu", lengths=(512, 16384))
    found = list(prefill_layer.cases(options))
    assert [(b.shape.name, b.lengths) for b in found] == [
        (shape, (length,)) for shape in options.shapes for length in options.lengths
    ]
    for block in found:  # enough copies that no byte is read again within 300 MB
        assert (block.copies - 1) * block.shape.weights >= 300e6
    mixes = list(packed_prefill.cases(Options(("8B",), device="cpu")))
    assert [(b.mix, b.lengths) for b in mixes] == [*MIXES.items()]


def test_the_largest_case_fits_the_card() -> None:
    """Weights of all candidates, and what a call of each of them needs, in bytes."""
    shape, length = SHAPES["405B"], 16384
    block = Block(shape, (length,), Options((), device="cpu"))
    weights = shape.weights * (2 + block.copies * (1 + 1 + 2 + 1 + 2))
    peer = length * (2 * shape.intermediate * 2 + shape.intermediate * 3 + shape.hidden * 8)
    ours = length * (shape.intermediate * 3 + shape.hidden * 8 * block.copies)
    reference = length * shape.hidden * 8 * 3
    assert weights + 2 * 4 * peer + ours + reference < 135e9


def test_kernels_are_known_without_data() -> None:
    options = Options(("8B",), device="cpu", lengths=(2048,))
    found = list(prefill_layer.kernels(options))
    assert len({kernel.key.digest for kernel in found}) == len(found) == 14
    packed = list(packed_prefill.kernels(options))
    attention = [kernel.spec for kernel in packed if hasattr(kernel.spec, "packed")]
    assert {spec.packed for spec in attention} == {True, False}
    assert {spec.page for spec in attention} == {128}


@pytest.mark.parametrize("module", [prefill_layer, packed_prefill, layer_accuracy])
def test_a_table_file(
    module: Any,
    equal: Block,
    monkeypatch: pytest.MonkeyPatch,
    timer: Timer,
    source: Provenance,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(module, "cases", lambda options: [equal])
    monkeypatch.setattr(module, "measure", lambda block, session: [Row(block.case, 2.0, 1.0)])
    table = module.table(OPTIONS, timer, source, tmp_path)
    validate(table.content)
    name = module.__name__.rsplit(".", 1)[1].replace("_", "-")
    assert table.content["table"] == name
    assert [row["case"] for row in table.rows] == [equal.case]
    assert (tmp_path / f"{name}.json").exists()
