"""Kernels compile to code that may run, and weights are read before what a kernel depends on is awaited."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from epicute.decode.schedule import BUCKETS, CONVERSIONS
from epicute.epilogues import Composition, ResidualAdd, RowScale, Store, SumSquares, SwiGLU, compose
from epicute.errors import UnsupportedError
from epicute.jit import DEFAULT_TARGET, compile
from epicute.layouts import CHANNEL
from epicute.models.shapes import SHAPES, projections
from tests.decode.cases import BF16, FP16, Few, chains, dequantized, emulated, in_place, qkv
from tests.ptx import Program


def layer(shape: str, name: str, format: str, rows: int, **options: Any) -> Few:
    """A projection of a published layer."""
    sizes = SHAPES[shape]
    n, k = projections(sizes)[name]
    heads, kv_heads = sizes.q_width // sizes.head_dim, sizes.kv_width // sizes.head_dim
    composition: Composition = {
        "qkv": qkv(heads, kv_heads, sizes.head_dim, k),
        "gate_up": RowScale(k) >> SwiGLU() >> Store(BF16),
    }.get(name, ResidualAdd() >> SumSquares() >> Store(BF16))
    if format == "fp8":
        composition = dequantized(composition)
    x_dtype = FP16 if format == "fp16" else BF16
    return Few(composition, n, k, format, rows, x_dtype, exact=False, **options)


def gate(case: Few, record: Callable[[str, object], None]) -> None:
    """Compile and note what the compiler said."""
    kernel = case.kernel()
    report = compile(kernel, strict=False).report
    record("schedule", str(kernel.spec.schedule))
    record("registers", report.registers)
    record("shared_memory", report.shared_memory)
    record("seconds", round(report.seconds, 2))
    report.check(str(case), DEFAULT_TARGET.smem_per_block)
    assert report.registers is not None
    assert report.registers <= 168
    assert report.shared_memory is not None
    assert report.shared_memory <= kernel.shared_memory


def covering() -> Iterator[Few]:
    """Every composition, format, group, conversion, number of rows and cluster at least once."""
    buckets = iter(BUCKETS * 8)
    for name, (composition, n, exact) in chains(576).items():
        rows = next(buckets) if "80" not in name and "96" not in name else 8
        rows = rows if rows < 64 or "qkv" not in name else 32
        yield Few(composition, n, 576, rows=rows, exact=exact)
    plain = compose(Store(BF16))
    for group, zeros in ((32, True), (64, False), (CHANNEL, True)):
        for conversion in CONVERSIONS:
            changes = (("conversion", conversion),)
            x_dtype = FP16 if conversion == "bias" else BF16
            yield Few(
                plain,
                4096,
                4096,
                rows=next(buckets),
                group=group,
                zeros=zeros,
                x_dtype=x_dtype,
                changes=changes,
                mma="sync",
            )
    for format in ("fp8", "bf16", "fp16"):
        for rows in (8, 64):
            yield layer("8B", "gate_up", format, rows)
    for rows in BUCKETS:
        yield layer("8B", "down", "int4", rows)
    yield layer("8B", "qkv", "int4", 8, gain=True)


WGMMA = (("mma", "wgmma"), ("conversion", "registers"))


WIDE = (*WGMMA, ("wide", 2), ("sums", 1), ("chunks", 1), ("cluster", 1))


def by_wgmma() -> Iterator[Few]:
    """Every format and number of rows from 16 on, the kinds of groups, sums of several tiles held."""
    for rows, group, zeros in ((16, 32, True), (32, CHANNEL, False), (64, 64, True)):
        options = {"group": group, "zeros": zeros, "x_dtype": BF16 if zeros else FP16}
        yield Few(compose(Store(BF16)), 4096, 4096, rows=rows, changes=WGMMA, **options)
    for name, format, rows in (
        ("qkv", "int4", 16),
        ("gate_up", "int4", 64),
        ("gate_up", "fp8", 32),
        ("o", "bf16", 64),
    ):
        yield layer("8B", name, format, rows, changes=WGMMA)
    for name, chunks, cluster in (("qkv", 1, 4), ("gate_up", 2, 1)):
        wide = (*WGMMA, ("wide", 2), ("chunks", chunks), ("cluster", cluster))
        yield layer("8B", name, "int4", 64, changes=wide)


def integers_in_place() -> Iterator[Few]:
    """Every number of rows, kinds of groups, and dtype."""
    for rows, group, x_dtype in (
        (8, 64, BF16),
        (16, 32, FP16),
        (16, CHANNEL, BF16),
    ):
        case = Few(compose(Store(BF16)), 4096, 4096, rows=rows, group=group, x_dtype=x_dtype)
        yield in_place(replace(case, zeros=rows == 16), 4)
    for name in ("qkv", "gate_up"):
        yield in_place(layer("8B", name, "int4", 16), 2)


def published() -> Iterator[Few]:
    for shape in SHAPES:
        for name in ("qkv", "o", "gate_up", "down"):
            for format in ("int4", "fp8", "bf16"):
                for rows in BUCKETS:
                    yield layer(shape, name, format, rows)
                    if rows > 8:
                        yield layer(shape, name, format, rows, mma="wgmma")


@pytest.mark.compile
@pytest.mark.parametrize("case", [*covering(), *by_wgmma(), *integers_in_place()], ids=str)
def test_covering_set(case: Few, record_property: Callable[[str, object], None]) -> None:
    gate(case, record_property)


@pytest.mark.gates
@pytest.mark.parametrize("case", list(published()), ids=str)
def test_every_published_layer(case: Few, record_property: Callable[[str, object], None]) -> None:
    try:
        case.kernel()
    except UnsupportedError:
        assert case.rows == 64  # the plan serves them in tiles of 32
        return
    gate(case, record_property)


def reachable(program: Program, over: str) -> set[int]:
    """Instructions that can be come to without one whose opcode is ``over``."""
    found: set[int] = set()
    todo = [0]
    while todo:
        at = todo.pop()
        if at in found or at >= len(program.code):
            continue
        found.add(at)
        x = program.code[at]
        if x.opcode == over:
            continue
        if x.name == "bra":
            todo.append(x.target)
            if x.guard:
                todo.append(at + 1)
        elif x.name not in ("ret", "exit", "trap") or x.guard:
            todo.append(at + 1)
    return found


@pytest.mark.compile
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("residual", ()),
        ("qkv.128", ()),
        ("residual", WGMMA),
        ("qkv.128", WGMMA),
        ("residual", WIDE),
    ],
    ids=["residual", "qkv", "residual.wgmma", "qkv.wgmma", "residual.wide"],
)
def test_weights_alone_are_read_before_the_kernel_before_is_done(name: str, changes: Any) -> None:
    composition, n, _ = chains(576)[name]
    program = emulated(Few(composition, n, 576, rows=16, changes=changes)).program
    free = reachable(program, "griddepcontrol.wait")
    copies = [i for i, x in enumerate(program.code) if x.opcode.startswith("cp.async.bulk.shared")]
    assert copies
    assert set(copies) <= free
    touched = [
        i
        for i, x in enumerate(program.code)
        if x.opcode.startswith(("ld.global", "st.global", "red", "atom")) and i in free
    ]
    assert not touched, [str(program.code[i]) for i in touched]


@pytest.mark.compile
def test_the_next_kernel_may_start_at_once() -> None:
    """The trigger comes before anything that could wait or take long."""
    composition, n, _ = chains(576)["residual"]
    program = emulated(Few(composition, n, 576)).program
    opcodes = [x.opcode for x in program.code]
    first = opcodes.index("griddepcontrol.launch_dependents")
    slow = ("mbarrier", "bar", "barrier", "ld.global", "griddepcontrol.wait", "cp.async")
    assert not [x for x in opcodes[:first] if x.startswith(slow)]
    assert first < 16


@pytest.mark.compile
def test_the_cache_hint_reaches_the_code() -> None:
    composition, n, _ = chains(576)["store"]
    case = Few(composition, n, 576)
    for hint in (True, False):
        hinted = replace(case, changes=(("evict_first", hint),))
        copies = [
            x for x in emulated(hinted).program.code if x.opcode.startswith("cp.async.bulk.shared")
        ]
        assert [x.opcode.endswith("L2::cache_hint") for x in copies] == [hint] * len(copies)


@pytest.mark.compile
@pytest.mark.parametrize("kind", ["int4", "bf16", "integers"])
def test_products_are_begun_behind_a_fence_and_read_behind_a_wait(kind: str) -> None:
    """A fence before each group of products, none left open, and sums touched by nothing else between."""
    composition, n, _ = chains(576)["residual"]
    format = "bf16" if kind == "bf16" else "int4"
    case = Few(composition, n, 576, format, rows=32, changes=WGMMA)
    if kind == "integers":
        case = in_place(replace(case, rows=16, changes=()))
    program = emulated(case).program
    groups: list[set[str]] = []
    begun: set[str] = set()
    fenced, products = False, 0
    for x in program.code:
        names = set(re.findall(r"%[a-z]+\d+", " ".join(x.operands)))
        if x.name != "wgmma":
            for under_way in (*groups, begun):
                assert not names & under_way, x
        elif x.parts[0] == "fence":
            fenced = True
        elif x.parts[0] == "mma_async":
            assert fenced, x
            products += 1
            begun |= set(re.findall(r"%[a-z]+\d+", x.operands[0]))
        elif x.parts[0] == "commit_group":
            groups, begun, fenced = [*groups, begun], set(), False
        else:
            pending = int(x.operands[0])
            groups = groups[len(groups) - pending :] if pending else []
    assert products
    assert not groups
    assert not begun


@pytest.mark.compile
def test_slots_are_given_back_behind_a_barrier_of_the_warp() -> None:
    """``bar.warp.sync`` right before each arrival of one lane for the warp."""
    composition, n, _ = chains(576)["residual"]
    program = emulated(Few(composition, n, 576)).program
    arrivals = [
        i
        for i, x in enumerate(program.code)
        if x.opcode.startswith("mbarrier.arrive.release") and x.guard
    ]
    assert arrivals
    for at in arrivals:
        before = [x.opcode for x in program.code[max(at - 24, 0) : at]]
        assert any(x.startswith("bar.warp.sync") for x in before), program.code[at]
