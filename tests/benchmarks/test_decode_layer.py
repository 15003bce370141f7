"""Table ``decode-layer``, end to end on the CPU at tiny sizes.

The block is epicute's own, its kernels the stand-ins of the models' tests or run from their PTX; PyTorch's steps are
what is compiled on the GPU, here run as they are, and compared with a text of the formulas that shares nothing with
them.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend

from benchmarks import decode_layer, decode_layer_ours, torch_decode_block
from benchmarks.blocks import FUSED
from benchmarks.check import Error, WrongResult, compare
from benchmarks.decode_attention import attended
from benchmarks.decode_layer import ALL, CASES, TWO, Case
from benchmarks.decode_layer_caches import PAGES, pages_of
from benchmarks.decode_layer_ours import Layers, OurStep, kernels_of
from benchmarks.decode_layer_step import Step, cache_bytes, products, step_bytes, weight_bytes
from benchmarks.few_rows import composed, records_of
from benchmarks.harness import Options, Session
from benchmarks.peers import EPS
from benchmarks.projections import THETA
from benchmarks.provenance import Provenance
from benchmarks.resume import Progress, of_case
from benchmarks.table import Row, render, validate
from benchmarks.timing import Run, Timer
from benchmarks.torch_decode_block import FORMATS, Form, TorchStep
from epicute.epilogues import Store
from epicute.models.decode_block import DecodeBlock
from epicute.models.kernels import GPU
from epicute.models.shapes import SHAPES, LayerShape, projections
from tests.benchmarks.conftest import CountingTimer
from tests.models.decode_kernels import Decoding, step_kernels
from tests.models.decode_oracle import Oracle
from tests.models.one_thread import single as single
from tests.ptx.device import emulated_device

TINY = LayerShape(256, 256, 4, 2, 64, "tiny")
OPTIONS = Options((), device="cpu", rounds=1)
PLAIN = tuple(pair for pair in ALL if pair[1] != "qk4pv8")
PEERS = {f"compile-{weights}" for weights in FORMATS}


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels without a GPU, torch.compile without its compile time, and what back-ends a CPU has."""
    chain = partial(DecodeBlock.chain, kernels=step_kernels())
    monkeypatch.setattr(decode_layer_ours, "DecodeBlock", SimpleNamespace(chain=chain))
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    backends = {"flash": SDPBackend.FLASH_ATTENTION, "math": SDPBackend.MATH}
    monkeypatch.setattr(torch_decode_block, "BACKENDS", backends)


@pytest.fixture
def step() -> Step:
    return Step(TINY, 3, 70, OPTIONS, copies=2)


def rows_of(case: Case, timer: Timer, source: Provenance) -> list[dict[str, Any]]:
    rows = [row.json() for row in decode_layer.measure(case, Session(timer, rounds=2))]
    head = dict.fromkeys(["paper", "protocol", "floor"], "said")
    validate({"table": "decode-layer", **head, **vars(source), "rows": rows})
    return rows


# --- a case ---


def test_a_case(timer: Timer, source: Provenance) -> None:
    case = Case(TINY, 3, 70, PLAIN, OPTIONS, copies=2)
    rows = rows_of(case, timer, source)
    assert [(row["case"]["weights"], row["case"]["cache"]) for row in rows] == [*PLAIN]
    assert len({row["ours_us"] for row in rows}) == len(PLAIN)
    for row in rows:
        weights, cache = row["case"]["weights"], row["case"]["cache"]
        assert "failed" not in row, row["failed"]
        tried = {"ours-4-warps"} if weights == "int4" else set()
        tried |= {"ours-nhd"} if (weights, cache) == ("int4", "bf16") else set()
        assert set(row["peers_us"]) == set(row["errors"]) == PEERS | tried
        assert row["floor_us"] == case.floor_us(weights, cache)
        assert row["case"]["variant"] == "sdpa flash"
        for error in (row["error"], *row["errors"].values()):
            assert 5e-4 < error["norm"] < 5e-3
    for name in PEERS:  # one session: their times are the same
        assert len({row["peers_us"][name] for row in rows}) == 1


def faulty(fault: str) -> Any:
    """A step's attention with something wrong."""
    right = Decoding.run

    def run(self: Decoding, q: torch.Tensor, cache: Any, **given: Any) -> None:
        if fault == "not stored":
            cache = cache.clone()
        right(self, q, cache, **given)
        if fault == "one request":
            given["out"][-1] *= 1.1

    return run


@pytest.mark.parametrize(
    ("fault", "said"), [("not stored", "the new row of k"), ("one request", "attention")]
)
def test_a_wrong_step_is_never_timed(
    fault: str, said: str, monkeypatch: pytest.MonkeyPatch, timer: Timer, source: Provenance
) -> None:
    monkeypatch.setattr(Decoding, "run", faulty(fault))
    (row,) = rows_of(Case(TINY, 2, 70, TWO[:1], OPTIONS, copies=1), timer, source)
    assert row["ours_us"] is None
    assert row["failed"]["ours"].startswith(f"WrongResult: {said}")
    assert set(row["peers_us"]) == PEERS  # what was only tried is left out


@pytest.mark.parametrize("cache", ["bf16", "fp8", "int4"])
def test_a_row_that_another_candidate_stored_does_not_count(
    cache: str, step: Step, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = OurStep(Layers(step), "int4", cache)
    run = mine.runner()
    assert mine.check(run).norm < 5e-3
    slots = mine.pages.slots[:, -1]
    held = [cells.clone() for cells in memory_of(mine)]
    right = DecodeBlock.run

    def forgetful(self: DecodeBlock, *given: Any) -> Any:
        made = right(self, *given)
        mine.pages.forget()
        return made

    monkeypatch.setattr(DecodeBlock, "run", forgetful)
    with pytest.raises(WrongResult, match="the new row of k"):
        mine.check(run)
    monkeypatch.undo()
    for cells, before in zip(memory_of(mine), held, strict=True):
        pages = (slots // mine.pages.page).unique()
        others = [page for page in range(len(cells)) if page not in pages]
        assert torch.equal(cells.view(torch.uint8)[others], before.view(torch.uint8)[others])


def memory_of(mine: OurStep) -> list[torch.Tensor]:
    cache = mine.pages.caches[0]
    if cache.records is not None:
        return [cache.records]
    assert cache.main is not None
    return [cache.main.k, cache.main.v]


@pytest.mark.parametrize("copy", [0, 1])
def test_every_copy_is_checked(copy: int, step: Step) -> None:
    mine = OurStep(Layers(step), "int4", "bf16")
    right = mine.runner()

    def run(number: int) -> Any:
        out = right(number)
        if number == copy:
            out["out"][-1] *= 1.05
        return out

    assert mine.check(right).norm < 5e-3
    with pytest.raises(WrongResult, match="out"):
        mine.check(run)


def test_copies_are_apart_and_share_their_kernels(step: Step) -> None:
    layers = Layers(step)
    narrow, wide = (OurStep(layers, "int4", cache) for cache in ("int4", "bf16"))
    for first, second in (narrow.blocks, wide.blocks):
        assert first.projections is second.projections
        assert first.memory is second.memory
        for name in projections(TINY):
            mine, other = (getattr(b.weights, name).data for b in (first, second))
            assert torch.equal(mine, other)
            assert mine.data_ptr() != other.data_ptr()
    assert narrow.blocks[0].weights.qkv is wide.blocks[0].weights.qkv
    records = [cache.records for cache in narrow.pages.caches]
    assert records[0].data_ptr() != records[1].data_ptr()


@pytest.mark.parametrize("cache", ["bf16", "fp8", "int4", "qk4pv8"])
@pytest.mark.parametrize("context", [2, 64, 130])
def test_caches_hold_the_history_and_no_newest_row(cache: str, context: int) -> None:
    """In pages of each request's own, up to the format's rounding."""
    step = Step(TINY, 2, context, OPTIONS, copies=2)
    pages = pages_of(step, cache)
    assert pages.page == PAGES[cache]
    assert len(pages.slots.unique()) == 2 * context
    assert pages.table.shape == (2, -(-context // PAGES[cache]))
    for x in pages.newest():
        assert x.isnan().all()
    pages.forget()
    before = pages._natural(*pages._rows(pages.slots[1, :-1]))
    off = {"bf16": 1e-9, "fp8": 0.04, "int4": 0.2, "qk4pv8": 0.2}[cache]
    for found, wanted in zip(before, step.history, strict=True):
        wide = wanted[1, :-1].double()
        assert (found - wide).norm() <= off * wide.norm()


# --- PyTorch's steps ---


def oracle_of(step: Step, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    """(batch, hidden) float64, the result by the formulas and divided by its root mean square."""
    layer = {f"model.layers.0.{name}": x for name, x in weights.items()}
    ends = {
        "model.embed_tokens.weight": step.x[0],
        "model.norm.weight": torch.ones(TINY.hidden),
        "lm_head.weight": torch.eye(TINY.hidden),
    }
    sizes = (TINY.heads, TINY.kv_heads, TINY.head_dim, THETA, EPS)
    turn = torch.eye(TINY.head_dim, dtype=torch.float64)
    oracle = Oracle({**layer, **ends}, *sizes, turn)
    k, v = (x[:, :-1].double() for x in step.history)
    found = [oracle.logits([b], step.position, [(k[b], v[b])], own=True) for b in range(step.batch)]
    return torch.cat(found)


def scaled(x: torch.Tensor) -> torch.Tensor:
    """Rows divided as the final norm does it."""
    return x.double() / (x.double().square().mean(1, keepdim=True) + EPS).sqrt()


@pytest.mark.parametrize("weights", FORMATS)
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("backend", ["flash", "math"])
def test_both_steps_are_the_layer_by_its_formulas(
    weights: str, grouped: bool, backend: str, step: Step, timer: Timer
) -> None:
    peers = TorchStep(Layers(step), timer)
    peers.__dict__["form"] = Form(backend, grouped)
    run = peers.runner(weights)
    state = step.state()
    if weights == "int4":
        for name, parts in FUSED.items():
            values = peers._codes(name).int4.dequantize(torch.float64)
            sizes = [state[f"{part}.weight"].shape[0] for part in parts]
            for part, rows in zip(parts, values.split(sizes), strict=True):
                state[f"{part}.weight"] = rows
    wanted = oracle_of(step, state)
    for copy in range(step.copies):
        assert compare(scaled(run(copy)["out"]), wanted).within(Error(0.005, 0.007))
    assert peers.check(weights, run).norm < 5e-3


def test_the_reference_is_the_layer_by_its_formulas(step: Step, timer: Timer) -> None:
    """To rounding: what everybody's check rests on."""
    peers, product = TorchStep(Layers(step), timer), products(step.block.fused)
    q, k, v = step.heads(product, gained=True)
    cells = peers.cells[0]
    cells["k"][:, :, -1], cells["v"][:, :, -1] = k.bfloat16(), v.bfloat16()
    rows = [(c.transpose(1, 2).double()) for c in (cells["k"], cells["v"])]
    sums = [attended(q[b], rows[0][b], rows[1][b]).flatten() for b in range(step.batch)]
    found = step.result(product, True, torch.stack(sums))
    # The new row is rounded here and not there: its share of attention.
    assert compare(scaled(found), oracle_of(step, step.state())).within(Error(2e-4, 2e-4))


def test_one_graph_without_breaks(
    step: Step, timer: Timer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torch.compile traces it, with its mutations made functional and put back."""
    from torch._dynamo.eval_frame import optimize

    def compiled(function: Any, dynamic: bool, fullgraph: bool) -> Any:
        assert fullgraph
        assert not dynamic
        return optimize("aot_eager", nopython=True, dynamic=False)(function)

    monkeypatch.setattr(torch, "compile", compiled)
    torch._dynamo.reset()
    peers = TorchStep(Layers(step), timer)
    for weights in FORMATS:
        assert peers.check(weights, peers.runner(weights)).norm < 5e-3
    torch._dynamo.reset()


def test_the_form_is_the_fastest_that_runs(step: Step, monkeypatch: pytest.MonkeyPatch) -> None:
    timer = CountingTimer()
    assert str(TorchStep(Layers(step), timer).form) == "sdpa flash"
    assert timer.prepared == 4
    backends = {"cudnn": SDPBackend.CUDNN_ATTENTION, "math": SDPBackend.MATH}
    monkeypatch.setattr(torch_decode_block, "BACKENDS", backends)
    assert TorchStep(Layers(step), CountingTimer()).form.backend == "math"  # no cuDNN on a CPU
    monkeypatch.setattr(torch_decode_block, "BACKENDS", {"cudnn": SDPBackend.CUDNN_ATTENTION})
    with pytest.raises(RuntimeError):
        _ = TorchStep(Layers(step), CountingTimer()).form


# --- bytes and floors ---


def test_bytes_of_a_step() -> None:
    """8B by hand: 218.1 million weights, a scale for 128; 1024 keys of 8 heads."""
    shape = SHAPES["8B"]
    count = shape.weights
    assert weight_bytes(shape, "int4") == count // 2 + count // 64 + 8 * 4096
    assert weight_bytes(shape, "bf16") == 2 * count
    assert weight_bytes(shape, "fp8") == count + 4 * (6144 + 4096 + 28672 + 4096)
    sizes = {"bf16": 8 * 512, "fp8": 8 * 256, "int4": 8 * 136, "qk4pv8": 8 * 200 + 64}
    for cache, each in sizes.items():
        assert cache_bytes(shape, cache) == each
        read = 32 * 4096 * each
        for weights in ("int4", "fp8", "bf16"):
            moved = weight_bytes(shape, weights) + read + 4 * 32 * 4096
            assert step_bytes(shape, 32, 4096, weights, cache) == moved


@pytest.mark.parametrize("shape", ["1B", "8B", "70B", "405B"])
@pytest.mark.parametrize("weights", ["int4", "fp8", "bf16"])
def test_packed_weights_have_no_more_bytes_than_the_floor_counts(shape: str, weights: str) -> None:
    found = SHAPES[shape]
    packed = sum(
        records_of(composed(weights, Store(torch.bfloat16)), weights, n, k).nbytes
        for n, k in projections(found).values()
    )
    rest = weight_bytes(found, weights) - packed
    columns = sum(n for n, _ in projections(found).values())
    assert rest == {"int4": 8 * found.hidden, "fp8": 4 * columns, "bf16": 0}[weights]


def test_a_floor_is_over_the_bandwidth_that_was_measured() -> None:
    case = Case(SHAPES["8B"], 1, 1024, ALL, OPTIONS, bandwidth=4.4e12)
    assert case.floor_us("int4", "int4") == pytest.approx(25.9, abs=0.1)
    assert case.least_us == case.floor_us("int4", "int4")


# --- cases and kernels ---


def options(*shapes: str, **more: Any) -> Options:
    return replace(Options(shapes or ("8B", "70B", "1B", "405B"), device="cpu"), **more)


def test_cases_are_those_of_the_papers_tables() -> None:
    found = [(c.shape.name, c.batch, c.context) for c in decode_layer.cases(options())]
    assert found == [entry[:3] for entry in CASES]
    for batch in (1, 8, 16, 32):
        assert ("8B", batch, 1024) in found  # table 4
    for shape in ("8B", "70B"):
        for sizes in ((1, 1024), (8, 1024), (32, 4096)):
            assert (shape, *sizes) in found  # table 3
    whole = {entry[:3] for entry in CASES if entry[3] == ALL}
    five = {("8B", 1, 1024), ("8B", 8, 1024), ("8B", 32, 4096), ("70B", 1, 1024), ("70B", 8, 1024)}
    assert whole == {*five, ("1B", 1, 1024), ("70B", 32, 4096)}
    assert {c[0] for c in CASES[:4]} == {"8B"}  # what matters most first


def test_a_part_of_the_cases() -> None:
    def told(found: Options) -> list[tuple[str, int, int]]:
        return [(c.shape.name, c.batch, c.context) for c in decode_layer.cases(found)]

    assert told(options("1B")) == [("1B", 1, 1024)]
    assert told(options("8B", lengths=(4096,))) == [("8B", 32, 4096)]
    assert told(options("8B", M=(8, 16))) == [("8B", 8, 1024), ("8B", 16, 1024)]
    assert told(options("8B", M=(2048,))) == told(options("8B"))


def test_enough_copies_and_not_too_many() -> None:
    """No byte is read again within 300 MB; weights and caches of all candidates fit the card beside their making."""
    for name, batch, context, formats in CASES:
        shape = SHAPES[name]
        step = Step(shape, batch, context, options())
        least = step_bytes(shape, batch, context, "int4", "int4")
        assert step.copies >= 4
        assert (step.copies - 1) * least >= 300e6
        held = sum(weight_bytes(shape, w) for w in {w for w, _ in formats} | {"bf16", "int4"})
        held += weight_bytes(shape, "bf16") + weight_bytes(shape, "int4")
        tokens = batch * context
        caches = {c for _, c in formats} | {"bf16"}
        held += tokens * (sum(cache_bytes(shape, c) for c in caches))
        held += 2 * tokens * cache_bytes(shape, "bf16")  # PyTorch's, and the other layout
        making = 2 * shape.weights + 16 * shape.hidden * shape.intermediate * 2
        assert step.copies * held + making < 120e9, (name, batch, context)


def test_kernels_are_known_without_data() -> None:
    found = list(decode_layer.kernels(options("1B")))
    assert len({kernel.key.digest for kernel in found}) == len(found)
    # Four projections in three formats, over 8-bit rows another qkv; attention, as chosen and narrow; the plain read.
    assert len(found) == 3 * (4 + 1) + 3 + 3 + 1 + 1


def test_more_rows_have_other_kernels_too() -> None:
    few, more = (list(kernels_of(SHAPES["1B"], batch, "int4", "int4")) for batch in (1, 8))
    assert len(more) == len(few) + 4


@pytest.mark.parametrize(("weights", "cache"), PLAIN)
def test_kernels_are_those_that_are_planned(
    weights: str, cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def decode(spec: Any, schedule: Any) -> Any:
        seen.append((spec, schedule))
        return step_kernels().decode(spec, schedule)

    kernels = replace(step_kernels(), few_rows=GPU.few_rows, decode=decode)
    chain = partial(DecodeBlock.chain, kernels=kernels)
    monkeypatch.setattr(decode_layer_ours, "DecodeBlock", SimpleNamespace(chain=chain))
    step = Step(TINY, 12, 3, OPTIONS, copies=1)
    layers, planned = Layers(step), set()
    for narrow in (False, True):
        block = OurStep(layers, weights, cache, narrow=narrow).blocks[0]
        for plan in block.projections.values():
            planned |= {kernel.key.digest for kernel in plan.kernels.values()}
    found = list(kernels_of(TINY, 12, weights, cache, narrow=True))
    attention = [kernel for kernel in found if kernel.key.kernel == "attention.decode"]
    assert {k.key.digest for k in found if k not in attention} == planned
    assert [(kernel.spec, kernel.schedule) for kernel in attention] == seen


# --- the table ---


def test_a_bandwidth(timer: Timer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_layer, "READ_BYTES", 4096)
    assert decode_layer.read_bandwidth(timer, "cpu") == pytest.approx(4096e6)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> list[Case]:
    """The table with two cases, whose measurement is made up."""
    monkeypatch.setattr(decode_layer, "READ_BYTES", 4096)
    measured: list[Case] = []

    def measure(case: Case, session: Session) -> list[Row]:
        measured.append(case)
        peers = {"compile-bf16": 100.0, "compile-int4": 60.0 * case.batch}
        return [
            Row({**case.case, "weights": w, "cache": c, "variant": "sdpa"}, 30.0, 25.0, peers)
            for w, c in case.formats
        ]

    monkeypatch.setattr(decode_layer, "measure", measure)
    return measured


def run_table(
    given: Options, source: Provenance, folder: Path, rows: list[dict[str, Any]] | None = None
) -> Any:
    given = replace(given, progress=Progress(rows or []))
    return decode_layer.table(given, CountingTimer(), source, folder)


def test_a_table_file(small: list[Case], source: Provenance, tmp_path: Path) -> None:
    found = run_table(options("8B", M=(8, 16)), source, tmp_path)
    assert (tmp_path / "decode-layer.json").exists()
    assert len(found.rows) == len(ALL) + len(TWO)
    assert "0.004 TB/s" in found.content["floor"]
    assert all(case.bandwidth == 4096e6 for case in small)
    assert "8B int4 cache int4 batch 8 context 1024" in render(found.content)
    shown = decode_layer.summary(found.content).splitlines()
    assert len(shown) == 1 + len(found.rows)
    assert len({len(line) for line in shown}) == 1
    heads, rows = decode_layer.columns(found.content)
    first = dict(zip(heads, rows[0], strict=True))
    assert first["over the floor"] == "1.20×"
    assert first["faster PyTorch, µs"] == "100.0 (bf16)"
    assert first["speed-up"] == "3.33×"
    moved = step_bytes(SHAPES["8B"], 8, 1024, "int4", "int4")
    assert first["MB"] == f"{moved / 1e6:.1f}"


def test_what_failed_is_shown_so(source: Provenance, tmp_path: Path) -> None:
    case = {"shape": "8B", "batch": 1, "context": 1024, "weights": "int4", "cache": "int4"}
    lost = Row(case, None, 25.0, {"compile-int4": 90.0}, failed={"ours": "x", "compile-bf16": "y"})
    unmade = Row({"shape": "8B", "batch": 1, "context": 1024}, None, 0.0, failed={"ours": "z"})
    content = {"rows": [lost.json(), unmade.json()]}
    heads, (row,) = decode_layer.columns(content)
    found = dict(zip(heads, row, strict=True))
    assert (found["ours, µs"], found["speed-up"]) == ("failed", "-")
    assert found["faster PyTorch, µs"] == "90.0 (int4)"


def test_a_table_resumes(small: list[Case], source: Provenance, tmp_path: Path) -> None:
    """Cases that have all their rows are neither compiled for nor measured; others replace what they have."""
    first = run_table(options("8B", M=(8,)), source, tmp_path)
    assert of_case(first.rows[0]["case"]) == small[0].case
    whole = options("8B", M=(8, 16))
    found = run_table(whole, source, tmp_path, first.rows)
    assert [case.batch for case in small] == [8, 16]
    assert len(found.rows) == len(ALL) + len(TWO)
    part = run_table(whole, source, tmp_path, found.rows[1:])
    assert [case.batch for case in small] == [8, 16, 8]
    assert len(part.rows) == len(found.rows)
    left = replace(whole, progress=Progress(found.rows))
    assert list(decode_layer.cases(left)) == []
    assert list(decode_layer.kernels(left)) == []


# --- from the kernels' PTX ---


class Edged(CountingTimer):
    """Calls with an ordinary operation behind each, like a graph's end: what they store may then be read early."""

    def prepare(self, run: Run, copies: int, least_us: float) -> Any:
        def edged(copy: int) -> Any:
            found = run(copy)
            torch.zeros(1, device="cuda").add_(1)
            return found

        return super().prepare(edged, copies, least_us)


def tinygemm(x: torch.Tensor, pairs: torch.Tensor, group: int, scales: torch.Tensor) -> Any:
    """``_weight_int4pack_mm`` on codes as they are handed to the packing, even ones in the high nibbles."""
    assert (x.dtype, scales.dtype) == (torch.bfloat16, torch.bfloat16)
    codes = torch.stack([pairs >> 4, pairs & 15], dim=2).flatten(1).float() - 8
    scale = scales[..., 0].T.float().repeat_interleave(group, 1)[:, : codes.shape[1]]
    return (x.float() @ (codes * scale).T).to(torch.bfloat16)


@pytest.mark.gates
def test_every_pair_from_its_kernels_ptx(
    source: Provenance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_layer_ours, "DecodeBlock", DecodeBlock)
    monkeypatch.setattr(torch_decode_block, "BACKENDS", {"math": SDPBackend.MATH})
    monkeypatch.setattr(torch, "_convert_weight_to_int4pack", lambda pairs, tiles: pairs.clone())
    monkeypatch.setattr(torch, "_weight_int4pack_mm", tinygemm)
    with emulated_device(multiprocessors=2) as gpu:
        case = Case(TINY, 3, 70, ALL, replace(OPTIONS, device="cuda"), copies=2)
        for row in rows_of(case, Edged(), source):
            assert "failed" not in row, row["failed"]
            assert row["error"]["norm"] < (8e-3 if row["case"]["cache"] == "qk4pv8" else 5e-3)
        planned = set(gpu._functions)
        known = {
            kernel.key.digest
            for pair in ALL
            for kernel in kernels_of(TINY, 3, *pair, narrow="ours-4-warps" in case.tried(*pair))
        }
        assert planned == known
