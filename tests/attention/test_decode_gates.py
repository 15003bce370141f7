"""Every decode kernel compiles to code that may run: no spills, shared memory that fits, loads where they belong."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import product

import pytest
import torch

from epicute.attention.decode_build import decode_kernel_for
from epicute.attention.decode_schedule import DecodeSchedule
from epicute.attention.decode_spec import CACHES, DecodeSpec, decode_unsupported
from epicute.attention.spec import HEAD_DIMS, PAGES
from epicute.jit import DEFAULT_TARGET, compile
from tests.attention.decode_emulated import kernel
from tests.attention.decode_specs import FP8, SPECS, TABLED, schedule

Record = Callable[[str, object], None]


def gate(spec: DecodeSpec, record: Record, found: DecodeSchedule | None = None) -> None:
    """Compile strictly and note what the compiler said."""
    thing = decode_kernel_for(spec, target=DEFAULT_TARGET, schedule=found)
    report = compile(thing, strict=False).report
    record("schedule", str(thing.schedule))
    record("seconds", round(report.seconds, 2))
    report.check(str(spec), DEFAULT_TARGET.smem_per_block)
    assert report.registers is not None
    assert report.registers * thing.schedule.threads(spec) <= 65536
    assert report.shared_memory is not None
    assert report.shared_memory <= thing.shared_memory <= DEFAULT_TARGET.smem_per_block


def every_spec() -> list[DecodeSpec]:
    """Caches, head dimensions and pages in full; groups, rows, masks and outputs beside them in turn."""
    found = []
    options = [
        {},
        {"lse": True, "batch_invariant": True},
        {"window": 300, "sinks": True},
        {"softcap": 30.0, "out_dtype": FP8, "lse": True},
        {"prefetch": True, "sinks": True},
    ]
    turns = 0
    for cache, head_dim, page in product(CACHES, HEAD_DIMS, (None, *PAGES)):
        dtype = torch.float16 if cache == "fp16" else torch.bfloat16
        for group, rows in ((1, 1), (4, 1), (8, 2), (16, 1), (8, 8)):
            turns += 1
            spec = DecodeSpec(
                2 * group,
                2,
                head_dim,
                cache,
                dtype,
                rows=rows,
                page=page,
                **options[turns % len(options)],  # type: ignore[arg-type]
            )
            if decode_unsupported(spec) is None:
                found.append(spec)
    return found


@pytest.mark.compile
@pytest.mark.parametrize("name", SPECS)
def test_covering_set(name: str, record_property: Record) -> None:
    gate(SPECS[name], record_property)


@pytest.mark.compile
def test_the_table_compiles(record_property: Record) -> None:
    gate(TABLED, record_property, schedule(TABLED, unpack="table"))


@pytest.mark.gates
@pytest.mark.parametrize("spec", every_spec(), ids=str)
def test_every_variant(spec: DecodeSpec, record_property: Record) -> None:
    gate(spec, record_property)


def test_the_covering_set_covers() -> None:
    specs = SPECS.values()
    assert len(SPECS) <= 19
    assert {s.cache for s in specs} == set(CACHES)
    assert {s.head_dim for s in specs} == set(HEAD_DIMS)
    assert {s.page for s in specs} == {None, *PAGES}
    for cache, dims in (("bf16", HEAD_DIMS), ("fp8", HEAD_DIMS), ("int4", (64, 128))):
        assert {s.head_dim for s in specs if s.cache == cache} == set(dims)
    for name in ("window", "softcap", "sinks", "lse", "batch_invariant", "prefetch", "out_is_fp8"):
        assert {bool(getattr(s, name)) for s in specs} == {True, False}, name


@pytest.mark.compile
@pytest.mark.parametrize(
    "name", ["fp8, heads of 256, prefetch", "int4, read alone, softcap", "int4"]
)
def test_who_waits_for_the_kernel_in_front(name: str) -> None:
    """The next kernel is let go first of all; queries, and keys without ``prefetch``, are read behind the wait."""
    spec = SPECS[name]
    code = kernel(spec, schedule(spec)).program.code
    opcodes = [x.opcode for x in code]
    assert opcodes.count("griddepcontrol.launch_dependents") == 1
    waits = opcodes.count("griddepcontrol.wait")
    # The multiplying warps, the scribe, and the loading one at its start, before its fresh tiles, or not at all.
    assert waits == (2 if spec.prefetch and spec.cache == "int4" and spec.append else 3)
    early = opcodes[: opcodes.index("griddepcontrol.launch_dependents")]
    assert not [x for x in early if re.match(r"(ld|st|cp|atom|red)\.(global|async)", x)]
